"""The command line: `lowprec-lab doctor | open | check | reveal | progress | train | compare | build | bench | ...`.

One function per command, which imports what it calls when it is called: `lowprec-lab --help` must not wait for torch.
Exit status: 0 it holds, 1 it does not, 2 the command was wrong, 130 stopped with Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path


class CommandError(Exception):
    """What was wrong with a command, in a sentence: printed on stderr, exit status 2."""


def doctor(options: argparse.Namespace) -> int:
    """Say what this machine can do."""
    if options.grading:
        from lowprec_lab.grading.sandbox_check import check_sandbox

        report = check_sandbox()
    else:
        from lowprec_lab.devices import doctor

        report = doctor()
    _print_json(report.to_dict()) if options.json else print(report)
    return 0 if report.healthy else 1


def open_chapter(options: argparse.Namespace) -> int:
    """Copy a chapter to the learner's folder, or update the copy there."""
    chapter = _chapter(options.chapter)
    from lowprec_lab.workspace import open_chapter

    opened = open_chapter(chapter.name)
    if options.json:
        kept = str(opened.kept) if opened.kept else None
        _print_json({"chapter": chapter.name, "path": str(opened.path), "status": opened.status, "kept": kept})
    else:
        print(opened.message)
    return 0


def check(options: argparse.Namespace) -> int:
    """Grade saved answers: a table of all, or the verdicts on some."""
    names = [_exercise(name) for name in options.exercises]
    if options.answers and not Path(options.answers).is_dir():
        raise CommandError(f"there is no folder {options.answers}. Name one that holds answers, bits.py and so on")
    from lowprec_lab.exercises import check_answers

    results = check_answers(options.answers, names or None)
    _print_json(results) if options.json else print(_verdicts(results) if names else _table(results))
    return 0 if results["total"] and results["passed"] == results["total"] else 1


def _verdicts(results: dict) -> str:
    return "\n\n".join(result["verdict"] for result in results["exercises"])


def _table(results: dict) -> str:
    rows = [
        (
            "passed" if result["passed"] else "not yet",
            result["exercise"],
            result["name"],
            f"{result['points']:g} of {result['max_points']:g}",
        )
        for result in results["exercises"]
    ]
    summary = f"{results['passed']} of {results['total']} exercises pass"
    failing = next((result["name"] for result in results["exercises"] if not result["passed"]), None)
    advice = [f"The verdict on one of them: lowprec-lab check {failing}"] if failing else []
    return "\n".join([*_columns(rows), summary, *advice])


def reveal(options: argparse.Namespace) -> int:
    """Show the reference answer of an exercise."""
    name = _exercise(options.exercise)
    from lowprec_lab.exercises import reveal

    reveal(name)
    return 0


def progress(options: argparse.Namespace) -> int:
    """Draw the map of chapters, with what is done."""
    from lowprec_lab.exercises import progress

    progress(options.all)
    return 0


def build(options: argparse.Namespace) -> int:
    """Build the released notebooks from solutions/."""
    from lowprec_lab.authoring import AuthoringError, build

    try:
        pages = build(out=options.out)
    except AuthoringError as error:
        print(error, file=sys.stderr)
        return 1
    for page in pages:
        print(page)
    return 0


def bench(options: argparse.Namespace) -> int:
    """Measure what has a stated bound."""
    from lowprec_lab import bench

    names = list(bench.NAMES) if options.all else [options.name] if options.name else []
    if not names:
        print("\n".join(_columns(list(bench.NAMES.items()))))
        return 0
    if names[0] not in bench.NAMES:
        raise CommandError(f"there is no bench {names[0]!r}. The benches are: {', '.join(bench.NAMES)}")
    with contextlib.redirect_stdout(sys.stderr):  # whose answers ran is no part of the report
        reports = {name: bench.run(name, progress=not options.json) for name in names}
    if options.json:
        _print_json(reports if options.all else reports[names[0]])
    else:
        print("\n\n".join(_figures_as_text(name, report) for name, report in reports.items()))
    return 0


def gpu_check(options: argparse.Namespace) -> int:
    """Check what a GPU does with FP8: its errors, its results, its speed. At most 5 minutes; writes JSON."""
    if options.seconds is not None and not options.seconds > 0:
        raise CommandError(f"--seconds is a number above 0, not {options.seconds:g}")
    from lowprec_lab import gpu_check
    from lowprec_lab.files import work_folder

    stands_in = bool(os.environ.get(gpu_check.STAND_IN))
    try:
        device = gpu_check.stand_in() if stands_in else gpu_check.find_gpu()
    except gpu_check.NoGPUError as error:
        raise CommandError(str(error)) from error
    path = Path(options.json).absolute() if options.json else work_folder() / "gpu-check.json"
    seconds = options.seconds or gpu_check.SECONDS
    check = gpu_check.Check(device, path, seconds, tiny=stands_in, say=lambda text: print(text, flush=True))
    with check.watched():
        check.run()
    print(f"The report is {path}.")
    return 0 if check.holds else 1


def train(options: argparse.Namespace) -> int:
    """Train a GPT on real text, in the precision of your choice; --resume goes on, bit for bit."""
    from lowprec_lab.settings import names, settings

    given = {name: getattr(options, name) for name in names() if getattr(options, name) is not None}
    from lowprec_lab.data import DataError
    from lowprec_lab.runs import RunError
    from lowprec_lab.train import PeerError, TrainingError, resume_settings, train

    shown = sys.stderr if options.json else sys.stdout
    try:
        name = options.name or settings(**given).run_name
        told = resume_settings(name, given) if options.resume else settings(**given)
        result = train(
            told, name, options.resume, options.overwrite, options.stop_at, progress=not options.json,
            say=lambda line: print(line, file=shown, flush=True),
        )  # fmt: skip
    except PeerError as error:
        return _leave(_failed(error) if error.tell else 1)
    except (RunError, DataError, TrainingError) as error:  # under torchrun the rank that has it first says it
        return _leave(_failed(error) if getattr(error, "tell", _is_first_process()) else 1)
    except ValueError as error:  # a setting, or a precision, that cannot be
        if hasattr(error, "tell"):
            _leave(_failed(error) if error.tell else 1)
        raise CommandError(str(error)) from error
    if _is_first_process():
        _print_json(result.as_dict()) if options.json else print(result.text())
    return result.stopped


def _leave(status: int) -> int:
    """Under torchrun, end here and now: a thread of torch's that waits for another process would not let Python end."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return status
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def compare(options: argparse.Namespace) -> int:
    """Compare training runs: a table, and a picture of their losses."""
    from lowprec_lab import compare
    from lowprec_lab.runs import RunError, runs_folder

    try:
        curves = compare.load_curves(options.runs)
        path = Path(options.out) if options.out else runs_folder() / "compare.png"
        compare.save(compare.plot(curves), path)
    except RunError as error:
        return _failed(error)
    if options.json:
        _print_json({"runs": [curve.summary() for curve in curves], "picture": str(path)})
    else:
        print(compare.table(curves))
        print(f"The picture is {path}.")
    return 0


def quantize(options: argparse.Namespace) -> int:
    """Put a trained run into 8 bits or fewer: measure what that costs, and write a checkpoint or a GGUF file."""
    from lowprec_lab.data import DataError
    from lowprec_lab.runs import RunError
    from lowprec_lab.serving import quantize

    try:
        with _remarks_aside(options.json):
            served = quantize(options.run, options.recipe, options.out)
    except (RunError, DataError) as error:
        return _failed(error)
    except ValueError as error:  # a recipe that does not exist
        raise CommandError(str(error)) from error
    _print_json(served.as_dict()) if options.json else print(served.text())
    return 0


def generate(options: argparse.Namespace) -> int:
    """Let the model of a run, or of a checkpoint in 8 bits, write text."""
    from lowprec_lab.checkpoints import CheckpointError
    from lowprec_lab.data import DataError
    from lowprec_lab.gguf_file import GGUFError
    from lowprec_lab.runs import RunError
    from lowprec_lab.serving import write

    try:
        with _remarks_aside(True):
            text = write(
                options.run, options.start, options.count, options.temperature, options.seed, options.recipe,
                options.fp8_cache,
            )  # fmt: skip
    except (RunError, DataError, CheckpointError, GGUFError) as error:
        return _failed(error)
    except ValueError as error:  # a setting that cannot be
        raise CommandError(str(error)) from error
    print(text)
    return 0


def _remarks_aside(aside: bool) -> contextlib.AbstractContextManager:
    """What is printed in this block (which text it is, whose answers run) goes to stderr, if `aside`."""
    return contextlib.redirect_stdout(sys.stderr) if aside else contextlib.nullcontext()


def record(options: argparse.Namespace) -> int:
    """Make the long training runs again that a chapter's page shows; what was stopped goes on."""
    from lowprec_lab.data import DataError
    from lowprec_lab.long_runs import record
    from lowprec_lab.runs import RunError

    try:
        out = Path(options.out) if options.out else None
        recorded = record(_chapter(options.chapter).name, options.seeds, out, steps=options.steps)
    except (RunError, DataError) as error:
        return _failed(error)
    except ValueError as error:  # a chapter without such runs
        raise CommandError(str(error)) from error
    print(recorded.table(recorded.runs[0].name))
    return 0


def prove(options: argparse.Namespace) -> int:
    """Compare your rounder, or the reference, with what is right on all 2^32 float32."""
    from lowprec_lab.formats import FormatError
    from lowprec_lab.prove import prove

    try:
        proof = prove(options.format, options.mode, options.overflow, options.against, options.answer, not options.json)
    except (FormatError, ValueError, ModuleNotFoundError) as error:
        raise CommandError(str(error)) from error
    _print_json(proof.as_dict()) if options.json else print(proof)
    return 0 if proof.holds else 1


def _figures_as_text(name: str, report: dict) -> str:
    rows = [(f"  {figure}", f"{value:.4g}" if isinstance(value, float) else str(value))
            for figure, value in report["figures"].items()]  # fmt: skip
    return "\n".join([name, *_columns(rows), *([report["table"]] if "table" in report else [])])


def course_init(options: argparse.Namespace) -> int:
    """Make a course folder for nbgrader."""
    from lowprec_lab.grading.course import CourseError, init_course

    try:
        course = init_course(options.folder, options.course_id)
    except CourseError as error:
        raise CommandError(str(error)) from error
    print("\n".join([f"The course {course.course_id} is in {course.folder}.", *course.notes]))
    return 0


def grade(options: argparse.Namespace) -> int:
    """Grade a class: judge every submission of a chapter, many at once, into nbgrader's gradebook."""
    chapter = _chapter(options.chapter).name
    if options.workers is not None and options.workers < 1:
        raise CommandError(f"--workers is a number from 1 on, not {options.workers}")
    if options.workers is not None and options.scheduler:
        raise CommandError("--workers is for this machine alone: a scheduler has the workers that were started for it")
    _require_class_extra()
    from lowprec_lab.grading.course import CourseError
    from lowprec_lab.grading.runner import grade_class

    try:
        report = grade_class(
            options.course, chapter, options.workers, options.scheduler, options.sandbox,
            progress=not options.json, force=options.force,
        )  # fmt: skip
    except CourseError as error:
        return _failed(error)
    _print_json(report.as_dict()) if options.json else print(report)
    return 1 if report.failed else 0


def replay(options: argparse.Namespace) -> int:
    """Show a student's answer to an exercise, its verdict, and input, theirs and right where they differ."""
    name = _exercise(options.exercise)
    _require_chapter_of(name, options.chapter)
    _require_class_extra()
    from lowprec_lab.grading.course import CourseError
    from lowprec_lab.grading.replay import replay
    from lowprec_lab.grading.sandbox import SandboxError

    try:
        shown = replay(options.course, options.student, name, sandbox=options.sandbox)
    except (CourseError, SandboxError) as error:
        return _failed(error)
    _print_json(shown.as_dict()) if options.json else print(shown.text())
    return 0


def pack_references(options: argparse.Namespace) -> int:
    """Write a folder of reference answers, to publish after a deadline (LOWPREC_REFERENCES)."""
    chapter = _chapter(options.through)
    from lowprec_lab.grading.course import CourseError
    from lowprec_lab.grading.packing import pack_references

    try:
        files = pack_references(chapter, options.out)
    except CourseError as error:
        return _failed(error)
    print("\n".join(map(str, files)))
    return 0


def _failed(error: Exception) -> int:
    print(f"lowprec-lab: {error}", file=sys.stderr)
    return 1


def _require_chapter_of(name: str, chapter: str | None) -> None:
    from lowprec_lab.blanks import BLANKS

    if chapter is not None and BLANKS[name].chapter != _chapter(chapter):
        raise CommandError(f"{name} is an exercise of {BLANKS[name].chapter.name}, not of {_chapter(chapter).name}")


def _require_class_extra() -> None:
    """Raise CommandError where what grading a class needs is not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("nbgrader", "distributed", "cryptography") if find_spec(name) is None]
    if missing:
        raise CommandError(
            f"{', '.join(missing)} is not installed, and grading a class needs it: pip install 'lowprec_lab[class]'"
        )


# What several commands need.


def _chapter(text: str):
    from lowprec_lab.chapters import find_chapter

    try:
        return find_chapter(text)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _exercise(text: str) -> str:
    """The name of the exercise that `text` names: "decode", or "1.5"."""
    from lowprec_lab.blanks import in_order

    blanks = in_order()
    for blank in blanks:
        if text in (blank.name, blank.exercise):
            return blank.name
    known = ", ".join(f"{blank.name} ({blank.exercise})" for blank in blanks)
    raise CommandError(f"there is no exercise {text!r}. The exercises are: {known}")


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _print_json(value: dict) -> None:
    print(json.dumps(value, indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowprec-lab", description="Learn BF16 and FP8 by building them.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(function, name: str, json_too: bool = False, into=commands) -> argparse.ArgumentParser:
        made = into.add_parser(name, help=_first_line(function), description=_first_line(function))
        made.set_defaults(function=function)
        if json_too:
            made.add_argument("--json", action="store_true", help="print JSON, for a program to read")
        return made

    command(doctor, "doctor", json_too=True).add_argument(
        "--grading", action="store_true", help="whether a class can be graded here: makes a sandbox and tries it"
    )

    opening = command(open_chapter, "open", json_too=True)
    opening.add_argument("chapter", nargs="?", default="00", help="number or name: 01, bits (default: 00)")

    checking = command(check, "check", json_too=True)
    checking.add_argument("exercises", nargs="*", metavar="EXERCISE", help="name or number: decode, 1.5 (default: all)")
    checking.add_argument("--answers", metavar="DIR", help="folder of answers (default: your own, in work/answers)")

    command(reveal, "reveal").add_argument("exercise", metavar="EXERCISE", help="name or number: decode, 1.5")
    command(progress, "progress").add_argument(
        "--all", action="store_true", help="list every exercise of every chapter"
    )
    command(build, "build").add_argument("--out", metavar="DIR", help="where to (default: notebooks/)")

    benching = command(bench, "bench", json_too=True)
    benching.add_argument("name", nargs="?", metavar="NAME", help="which (without one: lists what there is)")
    benching.add_argument("--all", action="store_true", help="all of them, one after the other")

    proving = command(prove, "prove", json_too=True)
    proving.add_argument("format", metavar="FORMAT", help="name or constant: float8_e4m3fn, E4M3")
    proving.add_argument("--mode", default="nearest_even", metavar="M", help="of rounding (default: nearest_even)")
    proving.add_argument("--overflow", metavar="P", help="saturate or to_special (default: as --against does it)")
    proving.add_argument("--against", default="oracle", metavar="WHAT", help="oracle (default), torch or ml_dtypes")
    proving.add_argument(
        "--answer", metavar="NAME", help="which exercise: round_to, say (default: what covers the mode)"
    )

    checking_gpu = command(gpu_check, "gpu-check")
    checking_gpu.add_argument("--json", metavar="FILE", help="where to (default: work/gpu-check.json)")
    checking_gpu.add_argument("--seconds", type=float, metavar="N", help="at most (default: 270)")

    training = command(train, "train", json_too=True)
    training.epilog = (
        "Several processes: torchrun --nproc-per-node 4 -m lowprec_lab train ... Each takes its own batches; --shard "
        "gives each its part of the weights, too. When one of them dies, hangs for --patience seconds or comes late, "
        "all end, and one says which it was, at which step, and why. --resume goes on with any number of them "
        "that can share a step's batches equally: processes times --accumulate stays."
    )
    training.add_argument("--name", metavar="NAME", help="of the run, in work/runs (default: preset-precision-recipe)")
    training.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    training.add_argument("--overwrite", action="store_true", help="begin a run of that name again")
    training.add_argument("--stop-at", type=int, metavar="STEP", help="stop after that step, with a checkpoint")
    _add_settings(training.add_argument_group("settings (defaults: the preset's)"))

    comparing = command(compare, "compare", json_too=True)
    comparing.add_argument("runs", nargs="+", metavar="RUN", help="names in work/runs, or paths")
    comparing.add_argument("--out", metavar="FILE", help="the picture, .png or .svg (default: work/runs/compare.png)")

    quantizing = command(quantize, "quantize", json_too=True)
    quantizing.add_argument("run", metavar="RUN", help="name in work/runs, or a path")
    quantizing.add_argument(
        "--recipe",
        default="fp8_dynamic",
        metavar="NAME",
        help="fp8_..., or q4_k, q8_0, ... for GGUF (default: fp8_dynamic)",
    )
    quantizing.add_argument("--out", metavar="DIR", help="where to (default: a folder in the run's, with that name)")

    generating = command(generate, "generate")
    generating.add_argument("run", metavar="RUN", help="name in work/runs, or a path; or what quantize wrote")
    generating.add_argument("--start", default="\n", metavar="TEXT", help="what it goes on from (default: a new line)")
    generating.add_argument("--count", type=int, default=500, metavar="N", help="characters to write (default: 500)")
    generating.add_argument("--temperature", type=float, default=0.8, metavar="X", help="low is safe (default: 0.8)")
    generating.add_argument("--seed", type=int, default=1337, metavar="N", help="of the draws (default: 1337)")
    generating.add_argument("--recipe", metavar="NAME", help="quantize the run first")
    generating.add_argument("--fp8-cache", action="store_true", help="keep keys and values in 8 bits, too")

    recording = command(record, "record")
    recording.add_argument("chapter", metavar="CHAPTER", help="number or name: 06, loss_scaling")
    recording.add_argument("--seeds", type=int, nargs="+", default=[], metavar="N", help="(default: the chapter's own)")
    recording.add_argument("--steps", type=int, default=2000, metavar="N", help="of each run (default: 2000)")
    recording.add_argument("--out", metavar="FILE", help="where to (default: the file that the page reads)")

    grading = command(grade, "grade", json_too=True)
    grading.add_argument("chapter", metavar="CHAPTER", help="number or name: 01, bits")
    grading.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each processor)")
    grading.add_argument("--scheduler", metavar="ADDRESS", help="of a dask scheduler, tcp://...: its workers judge")
    grading.add_argument("--force", action="store_true", help="grade everybody again; manual scores are kept")

    replaying = command(replay, "replay", json_too=True)
    replaying.add_argument("student", metavar="STUDENT", help="as in submitted/STUDENT")
    replaying.add_argument("exercise", metavar="EXERCISE", help="name or number: decode, 1.5")
    replaying.add_argument("--chapter", help="the exercise's chapter, to be sure")
    for one in (grading, replaying):
        one.add_argument("--course", default=".", metavar="DIR", help="the course's folder (default: this one)")
        one.add_argument(
            "--no-sandbox", dest="sandbox", action="store_false",
            help="run answers without a sandbox: only for your own work",
        )  # fmt: skip

    packing = command(pack_references, "pack-references")
    packing.add_argument("--through", required=True, metavar="CHAPTER", help="the last chapter: 01, bits")
    packing.add_argument("out", metavar="DIR", help="a new folder, or one that this made before")

    course = commands.add_parser("course", help="Run the chapters as an nbgrader course.")
    init = command(course_init, "init", into=course.add_subparsers(metavar="COMMAND", required=True))
    init.add_argument("folder", metavar="DIR", help="a new folder, outside the clone")
    init.add_argument("--course-id", required=True, metavar="ID", help="the course's name in nbgrader: fp8-2027, say")
    return parser


def _add_settings(group) -> None:
    """A flag for every setting of a training run; None where it is not given."""
    from dataclasses import fields

    from lowprec_lab.settings import Settings

    for each in fields(Settings):
        flag, kind, text = f"--{each.name.replace('_', '-')}", type(each.default), each.metadata["help"]
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            letter = {int: "N", float: "X", str: "WORD"}[kind]
            group.add_argument(flag, type=kind, metavar=letter, help=text)


def _first_line(function) -> str:
    return function.__doc__.splitlines()[0]


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns its exit status; argparse itself exits with 2 on options that it does not know."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a console that has no ✗ shows a question mark, and the lab goes on
    options = _parser().parse_args(arguments)
    from lowprec_lab.files import WorkspaceError

    try:
        return options.function(options)
    except CommandError as error:
        print(f"lowprec-lab: {error}", file=sys.stderr)
        return 2
    except WorkspaceError as error:
        print(f"lowprec-lab: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `lowprec-lab check | head`: nobody reads on, which is no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\nlowprec-lab: stopped. What was finished before is kept.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
