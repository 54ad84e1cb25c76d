"""Setting up: what bootstrap.py decides, with a network, a pip and a GPU that are made up; and that the files agree."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowprec_lab import bootstrap
from lowprec_lab.chapters import CHAPTERS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def project(tmp_path):
    """A folder with the two files that the stamp is made from."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "lowprec_lab"\n')
    (tmp_path / "constraints.txt").write_text("torchao==0.18.0\ntorch==2.13.0\n")
    return tmp_path


@pytest.fixture
def calls(project, monkeypatch):
    """The pip commands that set_up runs; the environment is made of one empty file, and pip succeeds unless told."""
    made = []

    def make_environment(folder, stamp, root):
        python = bootstrap.venv_python(folder)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()

    def call(command, **_):
        made.append([str(part) for part in command])
        return call.status(command)

    call.status = lambda command: 0
    made_up = {
        "make_environment": make_environment,
        "torch_build": lambda: "other",
        "require_disk": lambda folder: None,
    }
    for name, function in made_up.items():
        monkeypatch.setattr(bootstrap, name, function)
    monkeypatch.setattr(bootstrap.subprocess, "call", call)
    return SimpleNamespace(commands=made, call=call)


# The Python that runs it.


def test_an_old_python_is_told_so_in_a_sentence(monkeypatch):
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    with pytest.raises(bootstrap.SetupError, match=r"Python 3\.9 is too old: the lab needs Python 3\.11 or newer"):
        bootstrap.require_python((3, 9), "Linux", "x86_64")


def test_a_newer_python_that_is_installed_is_named(monkeypatch):
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "python3.12" else None)
    with pytest.raises(bootstrap.SetupError, match="make lab PYTHON=python3.12"):
        bootstrap.require_python((3, 8), "Linux", "x86_64")


@pytest.mark.parametrize(("system", "machine"), [("Linux", "x86_64"), ("Darwin", "arm64"), ("Windows", "AMD64")])
def test_where_it_runs(system, machine):
    bootstrap.require_python((3, 11), system, machine)


def test_an_intel_mac_is_told_where_to_go():
    with pytest.raises(bootstrap.SetupError, match="Colab"):
        bootstrap.require_python((3, 12), "Darwin", "x86_64")


def test_the_sentence_reaches_the_terminal(monkeypatch, capsys):
    def too_old():
        raise bootstrap.SetupError("Python 3.9 is too old.")

    monkeypatch.setattr(bootstrap, "require_python", too_old)
    assert bootstrap.main([]) == 1
    assert capsys.readouterr().err == "Python 3.9 is too old.\n"


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys):
    def stopped(root, extras):
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "set_up", stopped)
    assert bootstrap.main([]) == 130
    assert "again" in capsys.readouterr().err


def test_an_old_python_can_read_it_and_needs_nothing_but_the_standard_library():
    tree = ast.parse((ROOT / "lowprec_lab" / "bootstrap.py").read_text(), feature_version=(3, 6))
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported
    for name in imported:
        assert name.split(".")[0] in sys.stdlib_module_names
        assert name != "__future__"  # `annotations` is unknown to Python 3.6


def test_no_module_of_the_package_hides_one_of_the_standard_library():
    """Run by path, bootstrap.py has its own folder first on the path."""
    ours = {path.stem for path in (ROOT / "lowprec_lab").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert "bootstrap" in ours
    assert not ours & set(sys.stdlib_module_names)


# Which build of PyTorch.


@pytest.mark.parametrize(
    ("system", "nvidia", "reachable", "build"),
    [
        ("Linux", False, True, "cpu"),
        ("Linux", False, False, "cuda"),
        ("Linux", True, True, "cuda"),
        ("Darwin", False, True, "other"),
        ("Windows", True, True, "other"),
    ],
)
def test_the_build_of_torch(system, nvidia, reachable, build):
    assert bootstrap.torch_build(system, nvidia, lambda address: reachable) == build


def test_with_a_gpu_nothing_is_probed():
    def probe(address):
        raise AssertionError("probed")

    assert bootstrap.torch_build("Linux", True, probe) == "cuda"
    assert bootstrap.torch_build("Darwin", False, probe) == "other"


@pytest.mark.parametrize(("smi", "proc", "found"), [(True, False, True), (False, True, True), (False, False, False)])
def test_a_gpu_is_told_by_its_driver(monkeypatch, smi, proc, found):
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if smi else None)
    monkeypatch.setattr(bootstrap.os.path, "exists", lambda path: proc)
    assert bootstrap.has_nvidia_gpu() == found


class Answer:
    """What urlopen gives back."""

    def __init__(self, status):
        self.status = status

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def test_a_probe_that_is_answered(monkeypatch):
    monkeypatch.setattr(bootstrap.urllib.request, "urlopen", lambda request, timeout: Answer(200))
    assert bootstrap.is_reachable("https://example.invalid/")


def test_a_probe_that_fails(monkeypatch):
    def refused(request, timeout):
        raise OSError("refused")

    monkeypatch.setattr(bootstrap.urllib.request, "urlopen", refused)
    assert not bootstrap.is_reachable("https://example.invalid/")


def test_a_probe_that_hangs_is_given_up(monkeypatch):
    """A name server that never answers is not covered by urlopen's own timeout."""
    release = bootstrap.threading.Event()
    monkeypatch.setattr(bootstrap.urllib.request, "urlopen", lambda request, timeout: release.wait(20) and Answer(200))
    assert not bootstrap.is_reachable("https://example.invalid/", seconds=0.05)
    release.set()


def test_the_cpu_build_is_asked_for_torch_alone(project):
    (torch, optional), (lab, needed) = bootstrap.pip_commands("python", project, "peers", "cpu")
    assert torch[-3:] == ["--index-url", bootstrap.CPU_WHEELS, "torch==2.13.0"]
    assert "--no-deps" in torch
    assert optional
    assert bootstrap.CPU_WHEELS not in lab
    assert lab[-4:] == ["--constraint", str(project / "constraints.txt"), "--editable", f"{project}[peers]"]
    assert not needed


@pytest.mark.parametrize("build", ["cuda", "other"])
def test_elsewhere_pip_decides(project, build):
    [(command, optional)] = bootstrap.pip_commands("python", project, "dev", build)
    assert "--index-url" not in command
    assert not optional


@pytest.mark.parametrize("extras", ["peers", "dev"])
@pytest.mark.parametrize("build", ["cpu", "cuda", "other"])
def test_how_much_will_be_downloaded_is_said(build, extras):
    assert re.search(r"up to [\d.]+ (MB|GB) to download, \d GB on disk", bootstrap.download_sentence(build, extras))


def test_a_full_disk_is_seen_before_the_download(monkeypatch, tmp_path):
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5e8))
    with pytest.raises(bootstrap.SetupError, match=r"0\.5 GB are free"):
        bootstrap.require_disk(tmp_path)


# The stamp.


def test_the_second_time_starts_at_once(project, calls):
    bootstrap.set_up(project, "peers")
    assert len(calls.commands) == 1
    bootstrap.set_up(project, "peers")
    assert len(calls.commands) == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_file_installs_again(project, calls, name):
    bootstrap.set_up(project, "peers")
    with open(project / name, "a") as file:
        file.write("\n# changed\n")
    bootstrap.set_up(project, "peers")
    assert len(calls.commands) == 2


def test_the_tests_tools_include_the_readers(project, calls):
    bootstrap.set_up(project, "dev")
    bootstrap.set_up(project, "peers")
    assert len(calls.commands) == 1


def test_the_readers_tools_do_not_include_the_tests(project, calls):
    bootstrap.set_up(project, "peers")
    bootstrap.set_up(project, "dev")
    bootstrap.set_up(project, "peers")
    assert [command[-1].rpartition("[")[2] for command in calls.commands] == ["peers]", "dev]"]


def test_a_failed_install_is_finished_by_the_next_run(project, calls):
    calls.call.status = lambda command: 1
    with pytest.raises(bootstrap.SetupError, match="goes on where it stopped"):
        bootstrap.set_up(project, "peers")
    assert bootstrap.read_stamp(project / ".venv") == {}
    calls.call.status = lambda command: 0
    bootstrap.set_up(project, "peers")
    assert len(calls.commands) == 2
    assert bootstrap.read_stamp(project / ".venv")["extras"] == ["peers"]


def test_a_stopped_install_is_finished_by_the_next_run(project, calls):
    def stopped(command):
        raise KeyboardInterrupt

    calls.call.status = stopped
    with pytest.raises(KeyboardInterrupt):
        bootstrap.set_up(project, "peers")
    calls.call.status = lambda command: 0
    bootstrap.set_up(project, "peers")
    assert len(calls.commands) == 2


def test_a_cpu_index_that_fails_after_all_costs_nothing(project, calls, monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "torch_build", lambda: "cpu")
    calls.call.status = lambda command: int("--index-url" in command)
    bootstrap.set_up(project, "peers")
    assert len(calls.commands) == 2
    assert "taking what pip finds" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', "{}"])
def test_a_broken_stamp_is_no_stamp(project, calls, content):
    bootstrap.set_up(project, "peers")
    (project / ".venv" / "lowprec_lab.json").write_text(content)
    bootstrap.set_up(project, "peers")
    assert len(calls.commands) == 2


def test_a_deleted_interpreter_is_noticed(project, calls):
    python = bootstrap.set_up(project, "peers")
    python.unlink()
    bootstrap.set_up(project, "peers")
    assert len(calls.commands) == 2


# The environment.


@pytest.fixture
def created(monkeypatch):
    """Whether the environment is made, and whether anew; nothing is made. Its Python answers unless told otherwise."""
    made = []
    monkeypatch.setattr(bootstrap, "_create", lambda folder, clear: made.append(clear))
    monkeypatch.setattr(bootstrap, "_answers", lambda python, *arguments: True)
    return made


def test_a_good_environment_is_kept(created, tmp_path):
    bootstrap.make_environment(tmp_path / ".venv", {"root": str(tmp_path)}, tmp_path)
    assert created == []


def test_a_moved_folder_gets_a_new_environment(created, tmp_path):
    bootstrap.make_environment(tmp_path / ".venv", {"root": "/elsewhere"}, tmp_path)
    assert created == [True]


def test_a_half_made_environment_is_made_again(created, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "_answers", lambda python, *arguments: "-c" not in arguments)
    (tmp_path / ".venv").mkdir()
    bootstrap.make_environment(tmp_path / ".venv", {}, tmp_path)
    assert created == [True]


def test_an_environment_of_an_old_python_is_not_deleted_unasked(created, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "_answers", lambda python, *arguments: "version_info" not in arguments[-1])
    with pytest.raises(bootstrap.SetupError, match=r"Delete the folder \.venv"):
        bootstrap.make_environment(tmp_path / ".venv", {}, tmp_path)
    assert created == []


def test_python_without_venv_says_what_to_install(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, stdout="ensurepip is not available")
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(bootstrap.SetupError, match=r"(?s)ensurepip is not available.*python3-venv"):
        bootstrap._create(tmp_path / ".venv", clear=False)


@pytest.mark.slow
def test_a_real_environment_is_made_and_repaired(tmp_path):
    folder = tmp_path / ".venv"
    bootstrap.make_environment(folder, {}, tmp_path)
    python = bootstrap.venv_python(folder)
    assert subprocess.run([python, "-m", "pip", "--version"], check=False).returncode == 0
    python.unlink()
    bootstrap.make_environment(folder, {}, tmp_path)
    assert subprocess.run([python, "-m", "pip", "--version"], check=False).returncode == 0


# JupyterLab.


def test_the_readers_options_come_last():
    command = bootstrap.lab_command("python", "00_start.ipynb", ["--no-browser", "--port", "8899"])
    assert command == ["python", "-m", "jupyterlab", "00_start.ipynb", "--no-browser", "--port", "8899"]


def test_root_may_start_it():
    assert "--allow-root" in bootstrap.lab_command("python", "00_start.ipynb", [], is_root=True)
    assert bootstrap.lab_command("python", "page", ["--allow-root"], is_root=True).count("--allow-root") == 1


def test_a_chapter_that_cannot_be_opened_ends_it(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="")
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *_, **__: failed)
    assert bootstrap.open_lab("python") == 1


def test_jupyterlab_asks_no_question_first_and_own_settings_stay(tmp_path):
    bootstrap.silence_first_start(tmp_path)
    settings = tmp_path / "share/jupyter/lab/settings/overrides.json"
    assert json.loads(settings.read_text()) == bootstrap.QUIET_START
    settings.write_text("{}")
    bootstrap.silence_first_start(tmp_path)
    assert settings.read_text() == "{}"


# The files agree with each other.


def project_file():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names_in(requirements):
    return {re.split(r"[<>=\[ ]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def test_everything_that_is_asked_for_is_pinned():
    project = project_file()
    wanted = names_in(project["dependencies"])
    for requirements in project["optional-dependencies"].values():
        wanted |= names_in(requirements)
    wanted.discard("lowprec-lab")
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = names_in(lines)
    assert len(wanted) > 15
    assert wanted <= pinned
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines)


def test_the_oldest_python_is_the_same_everywhere():
    from lowprec_lab import devices

    oldest = ".".join(map(str, bootstrap.OLDEST_PYTHON))
    assert project_file()["requires-python"] == f">={oldest}"
    assert devices.OLDEST_PYTHON == bootstrap.OLDEST_PYTHON
    assert f"torch>={'.'.join(map(str, devices.OLDEST_TORCH))}" in project_file()["dependencies"]


def test_conda_installs_the_same():
    text = (ROOT / "environment.yml").read_text()
    assert "-c constraints.txt" in text
    assert "-e .[dev]" in text


def test_the_map_in_the_readme_marks_the_chapters_that_exist():
    rows = re.findall(r"^\| (\d\d) \| .*\| (here|to come) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [number for number, _ in rows] == [f"{number:02}" for number in range(16)]
    assert [number for number, state in rows if state == "here"] == [chapter.number for chapter in CHAPTERS]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md"])
def test_every_command_and_file_that_a_page_names_exists(page):
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / link).exists(), link


def test_make_alone_lists_what_there_is():
    result = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) - {"help", "setup"}
    assert targets >= {"lab", "test", "lint", "notebooks"}
    for target in targets:
        assert f"make {target} " in result.stdout


def test_ci_calls_make_test_and_skips_no_browser():
    script = (ROOT / ".ci" / "run").read_text()
    assert "export LOWPREC_REQUIRE_BROWSER=1 LOWPREC_REQUIRE_SANDBOX=1\nmake test\n" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "test.yml").read_text()


# What happens where there is no Chromium.

BROWSER_TEST = "import pytest\n\n@pytest.mark.browser\ndef test_page():\n    pass\n\ndef test_other():\n    pass\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chromium", "required", "status", "says"),
    [
        ("", "", 0, "1 passed, 1 skipped"),
        ("", "1", 4, "LOWPREC_REQUIRE_BROWSER=1, but no Chromium was found"),
        ("/usr/bin/some-chromium", "1", 0, "2 passed"),
    ],
    ids=["skipped", "required", "found"],
)
def test_browser_tests_without_a_browser(tmp_path, chromium, required, status, says):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_page.py").write_text(BROWSER_TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    browser: needs one\n")
    environment = {**os.environ, "PATH": "", "LOWPREC_CHROMIUM": chromium, "LOWPREC_REQUIRE_BROWSER": required}
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == status, result.stdout + result.stderr
    assert says in result.stdout + result.stderr
    assert ("apt-get install chromium" in result.stdout + result.stderr) == (not chromium)
