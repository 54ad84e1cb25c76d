"""The class runner: everybody is graded, whatever was handed in; an interrupted run goes on; nothing is done twice."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import types
from pathlib import Path

import nbformat
import pytest

from lowprec_lab.bench.classroom import Classroom, as_cell, honest_answers
from lowprec_lab.blanks import BLANKS, in_order
from lowprec_lab.chapters import find_chapter
from lowprec_lab.graders.registry import MISCONCEPTIONS, load_graders
from lowprec_lab.grading.course import CourseError
from lowprec_lab.grading.verdicts import load_verdicts

for needed in ("nbgrader", "distributed", "cryptography"):
    pytest.importorskip(needed)
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("bwrap") is None, reason="needs Linux with bubblewrap"),
    pytest.mark.filterwarnings("ignore:Object of type"),  # SQLAlchemy's, about nbgrader's way with it
]
load_graders()
START, BITS = find_chapter("00"), find_chapter("01")


def full_marks(chapter):
    return {blank.name: float(blank.points) for blank in in_order() if blank.chapter == chapter}


def references(chapter):
    return next(honest_answers(chapter))


# --- a small class, of chapter 00 -------------------------------------------------------------------------------------


STUDENTS = ("ann", "ben", "cem", "dee")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Four people who are right, who have not been graded yet; copied for each test."""
    room = Classroom(tmp_path_factory.mktemp("small"), START)
    room.prepare()
    for student, answers in zip(STUDENTS, honest_answers(START), strict=False):
        room.hand_in(student, room.answered(answers))
    return room


@pytest.fixture
def room(small, tmp_path, monkeypatch):
    shutil.copytree(small.place, tmp_path / "room")
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "nobody"))
    return Classroom(tmp_path / "room", START)


@pytest.fixture(scope="module")
def sandbox():
    from lowprec_lab.grading.sandbox import Sandbox

    with Sandbox() as workers:
        yield workers


@pytest.fixture
def here(monkeypatch, sandbox):
    """Judges in this process, in the place of a cluster. What it yields lists whom they have judged."""
    from lowprec_lab.grading import runner
    from lowprec_lab.grading.cluster import Judged
    from lowprec_lab.grading.judge import judge_all
    from lowprec_lab.grading.verdicts import to_json
    from lowprec_lab.sources import Source

    judged = []

    class Here:
        def judge(self, jobs, chapter, seed):
            for job in jobs:
                answers = {name: Source(*each) for name, each in json.loads(job.answers).items()}
                judged.append(job.student)
                yield Judged(job, to_json(judge_all(answers, chapter, sandbox, seed=seed)))

    @contextlib.contextmanager
    def judges(*_):
        yield Here()

    monkeypatch.setattr(runner, "judges", judges)
    return judged


def grade(room, **options):
    from lowprec_lab.grading.runner import grade_class

    return grade_class(room.course, room.chapter.number, progress=False, **options)


def graded_students(room):
    return sorted({row[0] for row in room.grades() if row[2] is not None})


def refused(sentence, room, **options):
    with pytest.raises(CourseError, match=sentence):
        grade(room, **options)


@pytest.fixture
def written(monkeypatch):
    """Whom nbgrader has graded, one entry each time."""
    from lowprec_lab.grading.writer import Writer

    students, stock = [], Writer._autograde

    def counted(self, student):
        students.append(student)
        stock(self, student)

    monkeypatch.setattr(Writer, "_autograde", counted)
    return students


@pytest.mark.slow
def test_nothing_is_done_twice(room, here, written):
    report = grade(room)
    assert {score.student: score.score for score in report.scores} == dict.fromkeys(
        STUDENTS, sum(full_marks(START).values())
    )
    assert (sorted(here), sorted(written)) == (list(STUDENTS), list(STUDENTS))
    before = room.grades()
    grade(room)
    assert (len(here), len(written)) == (4, 4)
    assert room.grades() == before


@pytest.mark.slow
def test_nbgrader_takes_the_verdicts_that_are_there(room, here, monkeypatch):
    """The writer must not judge again, which would take a sandbox of its own."""
    from lowprec_lab.grading import execute

    monkeypatch.setattr(execute, "judge_notebook", lambda *_: pytest.fail("judged twice"))
    grade(room)
    assert graded_students(room) == list(STUDENTS)


@pytest.mark.slow
def test_who_hands_in_again_is_graded_again_and_nobody_else(room, here, written):
    grade(room)
    room.hand_in("cem", room.released())
    grade(room)
    assert (here[4:], written[4:]) == (["cem"], ["cem"])
    assert room.points("cem") == dict.fromkeys(full_marks(START), 0.0)


def test_a_new_time_is_written_and_not_judged_again(room, here, written):
    grade(room)
    stamp = room.course / "submitted" / "dee" / START.name / "timestamp.txt"
    stamp.write_text("2027-02-03 10:00:00 UTC")
    grade(room)
    assert (here[4:], written[4:]) == ([], ["dee"])
    assert {row[7] for row in room.grades() if row[0] == "dee"} == {"2027-02-03 10:00:00.000000"}


def test_force_grades_everybody_again_and_keeps_what_a_person_gave(room, here, written):
    from nbgrader.api import Gradebook

    grade(room)
    [exercise] = full_marks(START)
    with Gradebook(f"sqlite:///{room.course / 'gradebook.db'}") as book:
        given = book.find_grade(f"check_{exercise}", START.name, START.name, "ben")
        given.manual_score = 0.5
        book.find_comment(exercise, START.name, START.name, "ben").manual_comment = "by hand"
        book.db.commit()
    report = grade(room, force=True)
    assert (sorted(here[4:]), sorted(written[4:])) == (list(STUDENTS), list(STUDENTS))
    assert {score.student: score.score for score in report.scores}["ben"] == 0.5
    with Gradebook(f"sqlite:///{room.course / 'gradebook.db'}") as book:
        assert book.find_comment(exercise, START.name, START.name, "ben").comment == "by hand"


def test_a_late_penalty_is_nbgraders(room, here):
    from nbgrader.api import Gradebook

    config = room.course / "nbgrader_config.py"
    config.write_text(config.read_text() + "\nc.LateSubmissionPlugin.penalty_method = 'zero'\n")
    (room.course / "submitted" / "dee" / START.name / "timestamp.txt").write_text("2027-02-03 10:00:00 UTC")
    with Gradebook(f"sqlite:///{room.course / 'gradebook.db'}") as book:
        book.update_or_create_assignment(START.name, duedate="2027-02-01 10:00:00 UTC")
    scores = {score.student: (score.score, score.late_penalty) for score in grade(room).scores}
    most = sum(full_marks(START).values())
    assert scores["dee"] == (0.0, most)
    assert scores["ann"] == (most, 0.0)


def test_a_missing_seed_is_made_and_used_again(room, here):
    grade(room)
    seed = room.course / "seed"
    for lost in (seed.unlink, lambda: seed.write_text("\n")):
        before = len(here)
        lost()
        assert "a fresh one was made" in grade(room).notes[0]
        assert len(here) == before + 4  # verdicts under another seed do not count
        assert len(seed.read_text().strip()) == 32
        assert grade(room).notes == []
        assert len(here) == before + 4


# --- what stops a run, and what does not ------------------------------------------------------------------------------


def test_what_cannot_be_graded_is_said(room, small):
    def with_file(path, change):
        place = room.course / path
        kept = place.read_bytes()
        change(place)
        return lambda: place.write_bytes(kept)

    cases = [
        ("there is no gradebook .*generate_assignment 00_start", "gradebook.db", Path.unlink),
        ("is pinned to", "course.json", lambda p: p.write_text(p.read_text().replace('"0.', '"9.'))),
        ("settings in .* cannot be used", "nbgrader_config.py", lambda p: p.write_text("c = get_config(")),
        ("nbgrader_config.py is missing", "nbgrader_config.py", Path.unlink),
        ("has nbgrader run submissions itself", "nbgrader_config.py", lambda p: p.write_text(
            p.read_text().replace("execute.JudgeExecute", "execute.CourseExecute"))),
        ("cannot be written .*not a database", "gradebook.db", lambda p: p.write_bytes(b"no database" * 999)),
    ]  # fmt: skip
    for sentence, path, change in cases:
        restore = with_file(path, change)
        refused(sentence, room)
        restore()
    assert room.grades() == small.grades()
    shutil.move(room.course / "submitted", room.place / "elsewhere")
    refused("there are no submissions", room)
    refused("there is no chapter '99'", Classroom(room.place, type("Last", (), {"number": "99"})))
    refused("there is no folder", Classroom(room.place / "nowhere", START))


def test_a_chapter_that_the_gradebook_does_not_know(room):
    shutil.copytree(room.course / "submitted" / "ann" / START.name, room.course / "submitted" / "ann" / BITS.name)
    refused("does not know 01_bit_layouts.*nbgrader generate_assignment 01_bit_layouts", Classroom(room.place, BITS))


def test_two_runs_at_once_are_one_too_many(room):
    import filelock

    (room.course / ".lowprec").mkdir()
    with filelock.FileLock(room.course / ".lowprec" / "lock"):
        refused("another `lowprec-lab grade` is at work", room)


def test_a_locked_gradebook_is_said_and_the_next_run_finishes(room, here, monkeypatch):
    from lowprec_lab.grading import writer

    monkeypatch.setattr(writer, "_LOCK_WAIT_S", 0.1)
    with contextlib.closing(sqlite3.connect(room.course / "gradebook.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        refused("gradebook .*database is locked.*close the program", room)
    grade(room)
    assert graded_students(room) == list(STUDENTS)


@pytest.mark.slow
def test_a_gradebook_that_is_locked_half_way(room, here, monkeypatch):
    """Another program takes the gradebook between two students: the verdicts are kept, and the next run finishes."""
    from lowprec_lab.grading.writer import Writer

    stock, calls = Writer._autograde, itertools.count(1)

    def locked_from_the_third_on(self, student):
        if next(calls) < 3:
            return stock(self, student)
        with contextlib.closing(sqlite3.connect(room.course / "gradebook.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            return stock(self, student)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_autograde", locked_from_the_third_on)
        refused("cem could not be graded: another program holds the gradebook", room)
    assert graded_students(room) == ["ann", "ben"]
    assert not (room.course / "autograded" / "cem" / START.name).exists()
    grade(room)
    assert (graded_students(room), here) == (list(STUDENTS), list(STUDENTS))


@pytest.mark.slow
def test_a_read_only_gradebook(room):
    """Read-only for root too: a file that is mounted so."""
    book = str(room.course / "gradebook.db")
    mounted = ["bwrap", "--dev-bind", "/", "/", "--ro-bind", book, book, "--"]
    command = [*mounted, *room.grade_command()]
    done = subprocess.run(command, cwd=room.course, env=room.environment(), capture_output=True, text=True)
    if "bwrap" in done.stderr:
        pytest.skip(f"bubblewrap cannot mount here: {done.stderr}")
    assert done.returncode == 1
    assert "gradebook.db cannot be written: it, or its folder, is read-only" in done.stderr


def test_a_full_disk_leaves_nothing_half_written(room, here, monkeypatch):
    from nbgrader.converters import Autograde

    from lowprec_lab.grading import verdicts

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "write_page", full)
        refused("could not be written: No space left on device.* run this again to go on", room)
    assert graded_students(room) == []
    with monkeypatch.context() as patch:
        patch.setattr(Autograde, "write_single_notebook", full)
        refused("ann could not be graded: the disk, or your share of it, is full", room)
    assert not (room.course / "autograded" / "ann" / START.name).exists()
    assert list((room.course / ".lowprec" / "graded").rglob("*.json")) == []
    grade(room)
    assert graded_students(room) == list(STUDENTS)
    assert not list(room.course.rglob("*.tmp"))


def test_one_that_nbgrader_cannot_grade_does_not_stop_the_others(room, here, monkeypatch):
    from nbgrader.converters import Autograde

    stock = Autograde.convert_single_notebook

    def fails_for_ben(self, name):
        if "ben" in name:
            raise ValueError("a \x1b[31mbad\n one")
        stock(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Autograde, "convert_single_notebook", fails_for_ben)
        report = grade(room)
    assert list(report.failed) == ["ben"]
    assert "nbgrader could not write its grade: ValueError: a [31mbad" in report.failed["ben"]
    assert [score.student for score in report.scores] == [name for name in STUDENTS if name != "ben"]
    assert grade(room).failed == {}
    assert graded_students(room) == list(STUDENTS)


def test_a_half_written_page_of_a_killed_run_is_written_again(room, here, written):
    """Killed within nbgrader: a page is there, ungraded, which nbgrader itself would pass over."""
    grade(room)
    before = room.grades()
    (room.course / ".lowprec" / "graded" / START.name / "ann.json").unlink()
    page = room.course / "autograded" / "ann" / START.name / f"{START.name}.ipynb"
    page.chmod(0o644)
    page.write_text("{")
    with contextlib.closing(sqlite3.connect(room.course / "gradebook.db")) as book, book:
        book.execute(
            "UPDATE grade SET auto_score = NULL WHERE notebook_id IN (SELECT submitted_notebook.id FROM "
            "submitted_notebook JOIN submitted_assignment ON submitted_assignment.id = "
            "submitted_notebook.assignment_id WHERE student_id = 'ann')"
        )
    grade(room)
    assert (written[4:], len(here)) == (["ann"], 4)
    assert nbformat.read(page, as_version=4).cells
    assert room.grades() == before


def test_a_lost_gradebook_is_filled_again(room, small, here, written):
    grade(room)
    shutil.copy(small.course / "gradebook.db", room.course / "gradebook.db")
    grade(room)
    assert (len(here), len(written)) == (4, 8)
    assert graded_students(room) == list(STUDENTS)


# --- dask -------------------------------------------------------------------------------------------------------------


def test_an_unreachable_scheduler(room, monkeypatch):
    from lowprec_lab.grading import cluster

    monkeypatch.setattr(cluster, "_CONNECT_S", 0.5)
    refused(r"no scheduler answers at tcp://127\.0\.0\.1:1 .*Start one with `dask scheduler`", room,
            scheduler="tcp://127.0.0.1:1")  # fmt: skip
    refused("no scheduler answers at nonsense", room, scheduler="nonsense")
    assert graded_students(room) == []


@contextlib.contextmanager
def dask_process(room, *words):
    """A `dask` command, ended by its own number."""
    log = room.place / f"dask-{words[0]}.log"
    with log.open("ab") as output:
        command = [*room.command("-m", "dask"), *words, "--no-dashboard"]
        process = subprocess.Popen(command, env=room.environment(), stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until(holds, seconds=120):
    for _ in range(10 * seconds):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError(f"not so after {seconds} s")


@pytest.fixture
def scheduler(room):
    """The address of a scheduler that was started by hand on loopback."""
    file = room.place / "scheduler.json"
    words = ("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
    with dask_process(room, *words) as process:
        wait_until(lambda: file.is_file() or process.poll() is not None)
        yield json.loads(file.read_text())["address"]


@pytest.mark.slow
def test_a_scheduler_and_two_workers_by_hand_grade_a_class_between_them(room, scheduler, monkeypatch):
    from distributed import Client

    from lowprec_lab.grading import cluster

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "_WORKERS_S", 0.5)
        refused("has no workers. Start some with `dask worker", room, scheduler=scheduler)
    worker = ("worker", scheduler, "--host", "127.0.0.1", "--nthreads", "1", "--local-directory", str(room.place))
    with dask_process(room, *worker), dask_process(room, *worker), Client(scheduler) as client:
        client.wait_for_workers(2, timeout=60)
        with monkeypatch.context() as patch:
            patch.setattr(cluster, "grader_hash", lambda: "another")
            refused("the worker at .* has lowprec_lab .* with grader .*, and this machine .* with grader another", room,
                    scheduler=scheduler)  # fmt: skip
        done = room.grade("--scheduler", scheduler, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["graded"] == 4
        executed = client.run(lambda dask_worker: dask_worker.state.executed_count)
        left = client.run(lambda dask_worker: [name for name in dask_worker.plugins if name.startswith("lowprec_lab")])
    assert len(executed) == 2
    assert min(executed.values()) >= 1
    assert list(left.values()) == [[], []]  # their sandboxes are closed
    assert graded_students(room) == list(STUDENTS)


@pytest.mark.slow
def test_what_kills_its_worker_is_named_and_the_others_go_on():
    from lowprec_lab.grading import cluster

    def task(answers):
        if answers == b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if answers == b"raise":
            raise ValueError("a \nbad one")
        return answers.decode()

    jobs = [cluster.Job(f"s{number}", b"ok") for number in range(8)]
    jobs[2:2] = [cluster.Job("killer", b"kill")]
    jobs[5:5] = [cluster.Job("raiser", b"raise")]
    with cluster._quiet_logs(), cluster._client(2, None) as client:
        judged = {each.job.student: each for each in cluster.spread(client, task, jobs)}
    assert len(judged) == 10
    assert {name: each.failure for name, each in judged.items() if each.failure} == {
        "killer": "The process that judged it ended, and ended again when it was tried alone.",
        "raiser": "It could not be judged: ValueError: a .",
    }
    assert {each.verdicts for each in judged.values() if not each.failure} == {"ok"}


@pytest.mark.slow
def test_a_result_that_dies_with_its_worker_is_judged_again():
    from lowprec_lab.grading import cluster

    def task(answers):
        if answers == b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return answers.decode()

    jobs = [cluster.Job(f"s{number}", b"ok") for number in range(3)] + [cluster.Job("killer", b"kill")]
    with cluster._quiet_logs(), cluster._client(1, None) as client:
        found = []
        for judged in cluster.spread(client, task, jobs):
            found.append((judged.job.student, judged.verdicts))
            time.sleep(1)  # the next ones are done, and the worker that holds them dies
    assert sorted(found) == [("killer", ""), ("s0", "ok"), ("s1", "ok"), ("s2", "ok")]


def test_a_lost_result_is_no_lost_scheduler():
    from lowprec_lab.grading import cluster

    lost, job = types.SimpleNamespace(status="lost"), cluster.Job("s", b"")
    assert "were lost twice" in cluster._judged(job, lost, connected=True).failure
    with pytest.raises(cluster.CourseError, match="connection to the scheduler was lost"):
        cluster._judged(job, lost, connected=False)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(room):
    """As a terminal sends it: to the command and to all its workers."""
    for number in range(16):
        room.hand_in(f"more-{number:02}", room.answered(references(START)))
    process = subprocess.Popen(
        room.grade_command("--workers", "1"), cwd=room.course, env=room.environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: notes_of(room) or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    kept = notes_of(room)
    assert 1 <= len(kept) < 20
    done = room.grade("--workers", "1")
    assert done.returncode == 0
    assert "20/20" in done.stderr  # the bar
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(graded_students(room)) == 20


def test_ctrl_c_waits_for_the_grade_that_is_being_written(room, here, monkeypatch):
    from lowprec_lab.grading.writer import Writer

    before, stock = signal.getsignal(signal.SIGINT), Writer._autograde

    def interrupted(self, student):
        stock(self, student)
        if student == "ben":
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_autograde", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grade(room)
    assert [path.stem for path in notes_of(room)] == graded_students(room) == ["ann", "ben"]
    assert signal.getsignal(signal.SIGINT) is before
    grade(room)
    assert graded_students(room) == list(STUDENTS)


def test_ctrl_c_that_nobody_heard_is_not_lost_and_a_second_one_does_not_wait():
    from lowprec_lab.grading.interrupt import CtrlC

    class Deaf:
        def __del__(self):  # Python forgets what is raised here
            os.kill(os.getpid(), signal.SIGINT)

    def work(reached, first, second=lambda: None):
        with CtrlC() as ctrl_c:
            with ctrl_c.step():
                first()
                reached.append("the end of the step")
            second()
            reached.append("the end of the work")

    def press():
        os.kill(os.getpid(), signal.SIGINT)

    def press_twice():
        press()
        press()

    for where, steps in (((Deaf,), 1), ((press,), 1), ((press_twice,), 0), ((lambda: None, press), 1)):
        reached = []
        with pytest.raises(KeyboardInterrupt):
            work(reached, *where)
        assert len(reached) == steps


def notes_of(room):
    """The notes of what was graded, and when each was written."""
    folder = room.course / ".lowprec" / "graded"
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*.json")) if not path.name.startswith(".")}


# --- a class of 40, of chapter 01 -------------------------------------------------------------------------------------


def with_answers(page, change):
    """The page with each answer cell changed."""
    page.cells = [each for cell in page.cells for each in (change(cell) if cell.id in BLANKS else [cell])]
    return page


def without_metadata(page):
    for cell in page.cells:
        cell.metadata.clear()
        cell.pop("id", None)
    page.metadata.clear()
    page.nbformat_minor = 4
    return page


def backwards(page):
    page.cells.reverse()
    return page


BROKEN = {
    "broken-empty": b"",
    "broken-json": b'{"cells": [',
    "broken-list": b"[1, 2]",
    "broken-bytes": bytes(range(256)) * 9,
    "broken-deep": b"[" * 100_000,
}
AWKWARD = {
    "awkward-twice": lambda page: with_answers(page, lambda cell: [cell, cell.copy()]),
    "awkward-stripped": without_metadata,
    "awkward-backwards": backwards,
}
ATTACKS = {
    "attack-endless": "@fill\ndef bit_pattern(x):\n    while True: pass",
    "attack-exit": "@fill\ndef bit_pattern(x):\n    import os; os._exit(0)",
}


def hand_in_forty(room):
    """What 40 people hand in; returns the points that each deserves by exercise, or less (a misconception's name)."""
    from test_judge import standing_alone

    full, honest = full_marks(BITS), honest_answers(BITS)
    nothing, expected = dict.fromkeys(full, 0.0), {}

    def add(student, page, points, name=None):
        room.hand_in(student, page, name)
        expected[student] = points

    right = references(BITS)
    for number, answers in enumerate(itertools.islice(honest, 6)):
        add(f"right-{number}", room.answered(answers), full)
    for number in range(5):
        known = {name: MISCONCEPTIONS[name][number] for name in full if number < len(MISCONCEPTIONS[name])}
        cells = {name: as_cell(standing_alone(wrong)) for name, wrong in known.items()}
        add(f"wrong-{number}", room.answered(right | cells),
            full | {name: wrong.function.__name__ for name, wrong in known.items()})  # fmt: skip
    for student, content in BROKEN.items():
        add(student, content, nothing)
    for student, change in AWKWARD.items():
        add(student, change(room.answered(right)), full)
    add("awkward-renamed", room.answered(right), full, f"{BITS.name} (1).ipynb")
    for student, cell in ATTACKS.items():
        add(student, room.answered(right | {"bit_pattern": cell}), full | {"bit_pattern": 0.0})
    names = list(full)
    for number in range(40 - len(expected)):
        done = names[: number % len(names)]
        add(f"half-{number:02}", room.answered({name: right[name] for name in done}),
            nothing | {name: full[name] for name in done})  # fmt: skip
    return expected


@pytest.fixture(scope="module")
def forty(tmp_path_factory):
    """A class of 40, graded without a disturbance, and the same class as it was before that."""
    room = Classroom(tmp_path_factory.mktemp("forty"), BITS)
    room.prepare()
    expected = hand_in_forty(room)
    before = room.place.with_name("forty-before")
    shutil.copytree(room.place, before)
    done = room.grade("--workers", "2", "--json")
    return room, Classroom(before, BITS), expected, done


@pytest.mark.slow
def test_everybody_in_a_class_of_40_is_graded_as_they_deserve(forty):
    room, _, expected, done = forty
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["graded"], report["failed"], len(expected)) == (40, {}, 40)
    for student, deserved in expected.items():
        verdicts = load_verdicts(room.course, BITS.name, student)
        points = room.points(student)
        assert points == {name: verdict.points for name, verdict in verdicts.items()}, student
        for name, due in deserved.items():
            if isinstance(due, str):
                assert not verdicts[name].passed, (student, name)
                assert verdicts[name].misconception in ("", due), (student, name)
            else:
                assert points[name] == due, (student, name, verdicts[name].text())
    named = [v.misconception for s in expected for v in load_verdicts(room.course, BITS.name, s).values()]
    assert len(list(filter(None, named))) > 40
    assert any("is damaged" in note for note in report["notes"])


@pytest.mark.slow
def test_killed_half_way_and_run_again(forty):
    """The same gradebook as an undisturbed run's, nothing judged or written twice, and no process left behind."""
    import psutil

    undisturbed, room, expected, _ = forty
    process = subprocess.Popen(
        room.grade_command("--workers", "2"), cwd=room.course, env=room.environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: len(notes_of(room)) >= 20 or process.poll() is not None, seconds=300)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    written, kept = notes_of(room), verdicts_of(room)
    assert 20 <= len(written) <= len(kept) < len(expected)
    assert len(children) >= 4
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    done = room.grade("--workers", "2")
    assert done.returncode == 0, done.stderr
    assert {path: time for path, time in notes_of(room).items() if path in written} == written
    assert {path: time for path, time in verdicts_of(room).items() if path in kept} == kept
    assert room.grades() == undisturbed.grades()
    assert len(graded_students(room)) == 40


def verdicts_of(room):
    folder = room.course / ".lowprec" / "verdicts"
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*.json")) if not path.name.startswith(".")}
