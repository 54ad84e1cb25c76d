"""The instructor's guide, solutions/README.md: its ten commands, run as they are written, in their order."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from classroom import full_marks, references, scores

from lowprec_lab import authoring
from lowprec_lab.blanks import load_chapters
from lowprec_lab.grading.course import Course

ROOT = Path(__file__).resolve().parents[1]
GUIDE = authoring.SOLUTIONS / "README.md"
CHAPTER = "01_bit_layouts"

# What a student does in between, with nbgrader as well.
STUDENT = f"""\
mkdir "$HOME/desk" && pushd "$HOME/desk"
nbgrader fetch_assignment {CHAPTER} --course fp8-2027
python "$HOME/answer.py" {CHAPTER}/{CHAPTER}.ipynb
nbgrader submit {CHAPTER} --course fp8-2027
popd
"""
FETCH_FEEDBACK = f'pushd "$HOME/desk" && nbgrader fetch_feedback {CHAPTER} --course fp8-2027 && popd\n'
ANSWER = """\
import json, sys
page = json.load(open(sys.argv[1]))
answers = json.load(open(__file__.replace("answer.py", "answers.json")))
for cell in page["cells"]:
    cell["source"] = answers.get(cell["id"], cell["source"])
json.dump(page, open(sys.argv[1], "w"))
"""


# Puts this environment's packages first in another one, so that pip finds there what the guide installs, and makes
# the commands that come with them.
FILL = f"""\
import sys
from pathlib import Path
[packages] = Path(sys.argv[1]).glob("lib/python*/site-packages")
(packages / "index.pth").write_text("import sys; sys.path.insert(0, {sysconfig.get_paths()["purelib"]!r})")
for name in ("nbgrader", "alembic"):
    script = Path(sys.argv[1], "bin", name)
    script.write_text('#!/bin/sh\\nexec "$(dirname "$0")/python" -m ' + name + ' "$@"\\n')
    script.chmod(0o755)
(Path(sys.argv[1]) / "share").mkdir()
(Path(sys.argv[1]) / "share" / "jupyter").symlink_to({str(Path(sysconfig.get_paths()["data"], "share", "jupyter"))!r})
"""


def commands():
    """The commands of the guide, one a line of its shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_there_are_ten_commands():
    assert len(commands()) == 10


def test_the_readme_and_the_guide_say_the_same():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    nbgraders = [part for line in commands() for part in line.split(" && ") if part.startswith("nbgrader ")]
    assert [command for command in nbgraders if command not in readme] == []


@pytest.fixture
def machine(tmp_path):
    """An empty machine: a home, an exchange, what is cloned, and packages on disk in the place of an index."""
    home, exchange, origin = tmp_path / "home", tmp_path / "exchange", tmp_path / "origin"
    for folder in (home, exchange):
        folder.mkdir()
    exchange.chmod(0o777)
    _copy_of_the_project(origin)
    (home / ".jupyter").mkdir()
    (home / ".jupyter" / "nbgrader_config.py").write_text(f"c = get_config()\nc.Exchange.root = {str(exchange)!r}\n")
    own = ("JUPYTER", "LOWPREC", "NBGRADER", "PYTHON", "GIT_", "PIP_", "VIRTUAL_ENV")
    given = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    python = Path(sys.base_prefix, "bin")
    path = os.pathsep.join([str(python), given.get("PATH", "")])
    return home, origin, {**given, **offline, "HOME": str(home), "PATH": path, "GIT_CONFIG_NOSYSTEM": "1"}


def _copy_of_the_project(origin):
    """A repository of this working tree as it is, so that the test is about it, committed or not."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, found.split("\0")):
        if (ROOT / name).is_file():
            (origin / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, origin / name)
    identity = ["-c", "user.name=guide", "-c", "user.email=guide@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=origin, check=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a class is graded on Linux")
@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="the guide begins with a clone")
def test_the_ten_commands_lead_to_returned_feedback(machine):
    import json

    home, origin, environment = machine
    load_chapters()
    (home / "answers.json").write_text(json.dumps(references(CHAPTER)))
    (home / "answer.py").write_text(ANSWER)
    (home / "fill.py").write_text(FILL)
    script = ["set -e -o pipefail", f'cd "{home}"']
    for command in commands():
        script += [f"echo '### {command}'", f"{{ {command.replace('ADDRESS', str(origin))}; }} || exit 1"]
        if "-m venv" in command:  # what an index would give is already here
            script.append(f'python3 "$HOME/fill.py" {command.split()[-1]}')
        if command.startswith("nbgrader release_assignment"):
            script.append(STUDENT)
    script.append(FETCH_FEEDBACK)
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    course = Course(home / "fp8-2027", "fp8-2027", [])
    [student] = [path.name for path in (course.folder / "submitted").iterdir()]
    assert scores(course, student, CHAPTER) == full_marks(CHAPTER)
    [feedback] = (home / "desk" / CHAPTER / "feedback").rglob("*.html")
    assert "Graded by lowprec_lab" in feedback.read_text(encoding="utf-8")
