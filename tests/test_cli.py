"""The command line: what is printed where, and the exit status."""

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lowprec_lab import __main__ as cli
from lowprec_lab import bench
from lowprec_lab.files import WorkspaceError
from lowprec_lab.workspace import Opened


def result(name, chapter, exercise, passed):
    points = {"points": 4 * passed, "max_points": 4}
    verdict = f"{'✓' if passed else '✗'} {name}"
    return {"name": name, "chapter": chapter, "exercise": exercise, "passed": passed, **points, "verdict": verdict}


RESULTS = {
    "passed": 1,
    "total": 2,
    "exercises": [result("sign_bit", "00_start", "0.1", True), result("decode", "01_bit_layouts", "1.5", False)],
}


def replace(monkeypatch, module, **functions):
    """Put functions in a module's place of its own, so that a command is tested apart from what it calls."""
    for name, function in functions.items():
        monkeypatch.setattr(importlib.import_module(f"lowprec_lab.{module}"), name, function)


def run(capsys, *arguments):
    """(exit status, stdout, stderr) of one command."""
    status = cli.main(list(arguments))
    output = capsys.readouterr()
    return status, output.out, output.err


# doctor


def test_doctor_prints_the_report(capsys):
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert "fp8 e4m3" in out


def test_doctor_json(capsys):
    status, out, _ = run(capsys, "doctor", "--json")
    assert status == 0
    assert {"healthy", "facts", "precisions"} == set(json.loads(out))


def test_doctor_fails_where_the_course_cannot_run(capsys, monkeypatch):
    from lowprec_lab import devices

    line = devices.Line("torch", devices.MISSING, "1.0 is too old")
    monkeypatch.setattr(devices, "doctor", lambda: devices.Report(facts=(line,), precisions=(line,)))
    assert run(capsys, "doctor")[0] == 1


# open


def opened(folder, name):
    return Opened(path=folder / f"{name}.ipynb", status="copied", message=f"{name} is open.")


def test_open_passes_on_the_chapters_full_name(capsys, monkeypatch, tmp_path):
    asked = []
    replace(monkeypatch, "workspace", open_chapter=lambda name: asked.append(name) or opened(tmp_path, name))
    status, out, _ = run(capsys, "open", "1")
    assert (status, asked) == (0, ["01_bit_layouts"])
    assert out == "01_bit_layouts is open.\n"


def test_open_json_gives_the_path_that_setting_up_needs(capsys, monkeypatch, tmp_path):
    replace(monkeypatch, "workspace", open_chapter=lambda name: opened(tmp_path, name))
    status, out, _ = run(capsys, "open", "--json")
    assert status == 0
    page = str(tmp_path / "00_start.ipynb")
    assert json.loads(out) == {"chapter": "00_start", "path": page, "status": "copied", "kept": None}


def test_a_folder_that_cannot_be_written_is_a_sentence(capsys, monkeypatch):
    def refuse(name):
        raise WorkspaceError("work/ cannot be written. Set LOWPREC_WORK to a folder of your own.")

    replace(monkeypatch, "workspace", open_chapter=refuse)
    status, out, err = run(capsys, "open", "01")
    assert (status, out) == (1, "")
    assert err == "lowprec-lab: work/ cannot be written. Set LOWPREC_WORK to a folder of your own.\n"


# check


def graded(monkeypatch, results):
    asked = []
    replace(monkeypatch, "exercises", check_answers=lambda path, names: asked.append((path, names)) or results)
    return asked


def test_check_fails_while_one_exercise_fails(capsys, monkeypatch, tmp_path):
    asked = graded(monkeypatch, RESULTS)
    status, out, _ = run(capsys, "check", "--answers", str(tmp_path))
    assert (status, asked) == (1, [(str(tmp_path), None)])
    assert out.splitlines() == [
        "passed   0.1  sign_bit  4 of 4",
        "not yet  1.5  decode    0 of 4",
        "1 of 2 exercises pass",
        "The verdict on one of them: lowprec-lab check decode",
    ]


def test_check_holds_when_all_pass(capsys, monkeypatch):
    graded(monkeypatch, {"passed": 1, "total": 1, "exercises": RESULTS["exercises"][:1]})
    status, out, _ = run(capsys, "check")
    assert status == 0
    assert out.splitlines()[-1] == "1 of 1 exercises pass"


def test_check_json_is_what_was_graded(capsys, monkeypatch, tmp_path):
    graded(monkeypatch, RESULTS)
    status, out, _ = run(capsys, "check", "--answers", str(tmp_path), "--json")
    assert status == 1
    assert json.loads(out) == RESULTS


def test_check_of_some_shows_their_verdicts(capsys, monkeypatch):
    asked = graded(monkeypatch, RESULTS)
    status, out, _ = run(capsys, "check", "0.1", "decode")
    assert (status, asked) == (1, [(None, ["sign_bit", "decode"])])
    assert out == "✓ sign_bit\n\n✗ decode\n"


def test_check_of_nothing_does_not_hold(capsys, monkeypatch):
    graded(monkeypatch, {"passed": 0, "total": 0, "exercises": []})
    assert run(capsys, "check")[0] == 1


def test_an_empty_folder_passes_nothing(capsys, tmp_path):
    """The real graders: whatever the course has, a fresh clone passes none of it."""
    status, out, _ = run(capsys, "check", "--answers", str(tmp_path), "--json")
    results = json.loads(out)
    assert (status, results["passed"]) == (1, 0)
    assert results["total"] == len(results["exercises"]) >= 11
    assert {"name", "chapter", "exercise", "passed", "points", "max_points"} <= set(results["exercises"][0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("check", "decod"), "there is no exercise 'decod'. The exercises are: sign_bit (0.1)"),
        (("check", "--answers", "nowhere"), "there is no folder nowhere"),
        (("reveal", "99.9"), "there is no exercise '99.9'"),
        (("open", "77"), "there is no chapter '77'. The chapters are: 00_start"),
        (("bench", "speed"), "there is no bench 'speed'. The benches are: graders"),
    ],
)
def test_what_does_not_exist_is_one_line_on_stderr(capsys, monkeypatch, arguments, says):
    graded(monkeypatch, RESULTS)
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"lowprec-lab: {says}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("grow",), ("reveal",), ("check", "--jsn"), ("course", "init", "here")])
def test_a_command_that_does_not_exist_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    assert stopped.value.code == 2
    assert "usage: lowprec-lab" in capsys.readouterr().err


def test_ctrl_c(capsys, monkeypatch):
    def stop(path, names):
        raise KeyboardInterrupt

    replace(monkeypatch, "exercises", check_answers=stop)
    status, _, err = run(capsys, "check")
    assert status == 130
    assert "stopped" in err


# reveal, progress, build, course


def test_reveal_takes_a_name_or_a_number(capsys, monkeypatch):
    replace(
        monkeypatch, "exercises", reveal=print, progress=lambda whole: print("the whole map" if whole else "the map")
    )
    assert run(capsys, "reveal", "1.5") == (0, "decode\n", "")
    assert run(capsys, "progress") == (0, "the map\n", "")
    assert run(capsys, "progress", "--all") == (0, "the whole map\n", "")


def test_build_lists_the_pages(capsys, monkeypatch, tmp_path):
    from lowprec_lab import authoring

    monkeypatch.setattr(authoring, "build", lambda out: [Path(out or "notebooks") / "00_start.ipynb"])
    assert run(capsys, "build", "--out", str(tmp_path)) == (0, f"{tmp_path / '00_start.ipynb'}\n", "")


def test_build_of_a_faulty_source_fails_with_its_sentence(capsys, monkeypatch):
    from lowprec_lab import authoring

    def refuse(out):
        raise authoring.AuthoringError("solutions/00_start.py, line 7: no answer cell")

    monkeypatch.setattr(authoring, "build", refuse)
    assert run(capsys, "build") == (1, "", "solutions/00_start.py, line 7: no answer cell\n")


def test_course_init_passes_on_folder_and_name(capsys, monkeypatch, tmp_path):
    from lowprec_lab.grading.course import Course

    def init_course(folder, course_id):
        return Course(Path(folder), course_id, [], notes=["nbgrader_config.py was kept."])

    replace(monkeypatch, "grading.course", init_course=init_course)
    status, out, _ = run(capsys, "course", "init", str(tmp_path / "fp8"), "--course-id", "fp8-2027")
    assert (status, out) == (0, f"The course fp8-2027 is in {tmp_path / 'fp8'}.\nnbgrader_config.py was kept.\n")


def test_course_init_into_a_folder_in_use_is_a_sentence(capsys, tmp_path):
    (tmp_path / "thesis.tex").write_text("Chapter 1")
    status, out, err = run(capsys, "course", "init", str(tmp_path), "--course-id", "x")
    assert (status, out) == (2, "")
    assert err.startswith("lowprec-lab: ")
    assert str(tmp_path) in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# bench


def test_bench_alone_lists(capsys):
    status, out, _ = run(capsys, "bench")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == list(bench.NAMES)


def test_bench_runs_what_its_name_says(capsys, monkeypatch):
    asked = []
    made = ModuleType("lowprec_lab.bench.importing")

    def measure(progress):
        print("reference: decode (exercise 1.5)")  # not on stdout, which a program may read
        asked.append(progress)
        return {"figures": {"import_vs_torch": 0.123456, "pairs": 9}}

    made.run = measure
    monkeypatch.setitem(sys.modules, made.__name__, made)
    status, out, _ = run(capsys, "bench", "import")
    assert (status, asked) == (0, [True])
    assert out.splitlines() == ["import", "  import_vs_torch  0.1235", "  pairs            9"]
    status, out, _ = run(capsys, "bench", "import", "--json")
    assert (status, asked) == (0, [True, False])
    assert json.loads(out)["figures"]["import_vs_torch"] == 0.123456


def test_each_bench_has_a_sentence_and_an_unknown_one_is_refused():
    assert all(bench.NAMES.values())
    with pytest.raises(ValueError, match="graders, explorer, red_team, grading, rounding, training, import"):
        bench.run("speed")


def test_bench_import_compares_pairs(monkeypatch):
    from lowprec_lab.bench import importing

    seconds = {importing.READY: 2.0, importing.BARE: 0.5, "import torch": 4.0}
    asked = []
    monkeypatch.setattr(importing, "_seconds", lambda statement: asked.append(statement) or seconds[statement])
    figures = importing.run(progress=False)["figures"]
    assert figures == {"import_vs_torch": 0.5, "import_s": 2.0, "bare_import_s": 0.5, "torch_s": 4.0}
    assert asked[1:] == [importing.READY, importing.BARE, "import torch"] * importing.PAIRS
    assert importing.PAIRS >= 7


# the program itself


def test_help_does_not_wait_for_torch():
    code = """
import sys, lowprec_lab.__main__ as cli
try:
    cli.main(["--help"])
finally:
    assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for command in ("doctor", "open", "check", "reveal", "progress", "train", "compare", "build", "bench"):
        assert command in result.stdout


def test_an_old_console_shows_a_question_mark_instead_of_an_error():
    code = "import sys, lowprec_lab.__main__ as cli\ncli.main(['bench'])\nprint('\\u2717')"
    environment = {"PYTHONIOENCODING": "cp1252", "PATH": "", "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().endswith(b"?")


@pytest.mark.parametrize("name", bench.NAMES)
def test_every_bench_is_run_the_same_way(name):
    module = importlib.import_module(f"lowprec_lab.bench.{bench._MODULES.get(name, name)}")
    progress, *others = inspect.signature(module.run).parameters.values()
    assert (progress.name, progress.default, progress.annotation) == ("progress", True, "bool")
    assert all(other.default is not other.empty for other in others)
