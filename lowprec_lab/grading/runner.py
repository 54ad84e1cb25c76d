"""The class runner: judges many submissions at once, and writes one after the other into nbgrader's gradebook.

Each verdict is kept in a file as soon as it is there, and each grade is noted when nbgrader has written it. So a run
that was interrupted, however hard, goes on where it stopped when it is started again.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from tqdm import tqdm

from lowprec_lab.chapters import find_chapter
from lowprec_lab.graders.run import seed_number
from lowprec_lab.grading.clean import clean_text
from lowprec_lab.grading.cluster import Job, judges, packed
from lowprec_lab.grading.course import CourseError, require_release, seed_or_new
from lowprec_lab.grading.interrupt import CtrlC
from lowprec_lab.grading.repair import find_answers
from lowprec_lab.grading.report import ClassReport, class_report
from lowprec_lab.grading.staging import read_submission
from lowprec_lab.grading.verdicts import from_json, key_of, load_verdicts, save_verdicts
from lowprec_lab.grading.writer import NotWrittenError, Writer, cannot_write


@dataclass(frozen=True)
class _Paper:
    """One submission: its answers, the key of their verdicts, and a hash of all that its grade follows from."""

    answers: bytes
    key: str
    mark: str


@dataclass
class _Class:
    """The submissions of one run by student, and what became of them."""

    writer: Writer
    seed: int
    papers: dict[str, _Paper] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.writer.folder

    @property
    def chapter(self) -> str:
        return self.writer.chapter


def grade_class(
    course: Path | str,
    chapter: str,
    workers: int | None = None,
    scheduler: str | None = None,
    sandbox: bool = True,
    progress: bool = True,
    force: bool = False,
) -> ClassReport:
    """Grade every submission of `chapter` ("01", "01_bit_layouts") in the course's folder that is not graded yet.

    workers: processes of this machine, one for each processor when omitted. scheduler: the address of a dask scheduler
    whose workers judge instead. sandbox: False only for one's own work. progress: a bar and notes on stderr.
    force: grade everybody again; manual scores and comments stay.

    One submission that cannot be graded is in the report's `failed`, and the others go on. Raises CourseError when
    nothing, or nothing more, can be graded: then what was done is kept, and the next run goes on from there.
    """
    folder = Path(course).expanduser().resolve()
    name = _chapter(chapter)
    with _alone(folder):
        require_release(folder)
        seed, note = seed_or_new(folder)
        room = _Class(Writer(folder, name), seed_number(seed), notes=[note] if note else [])
        _read_submissions(room)
        written, kept = (set(), set()) if force else _done_before(room)
        with _progress(len(room.papers), len(written), progress) as (step, say):
            for sentence in [*room.notes, *map(_failure_text, room.failed.items())]:
                say(sentence)
            ready = _judged(room, kept - written, written | kept, (workers, scheduler, sandbox), say)
            with CtrlC() as ctrl_c, contextlib.closing(ready):
                for student in ready:
                    with ctrl_c.step():
                        _write(room, student, say)
                        step()
    try:
        return class_report(folder, name, room.failed, room.notes, room.writer.db_url)
    except OSError as problem:
        raise cannot_write(folder / "reports" / name, problem) from None


def _chapter(text: str) -> str:
    try:
        return find_chapter(text).name
    except ValueError as problem:
        raise CourseError(str(problem)) from None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the course: two runs at once would write into one gradebook."""
    import filelock

    path = folder / ".lowprec" / "lock"
    if not folder.is_dir():
        raise CourseError(f"there is no folder {folder}. Name the course's folder with --course")
    try:
        path.parent.mkdir(exist_ok=True)
        with filelock.FileLock(path, timeout=0):
            yield
    except filelock.Timeout:
        raise CourseError(f"another `lowprec-lab grade` is at work in {folder}. Wait for it, or stop it") from None
    except OSError as problem:
        raise cannot_write(path, problem) from None


def _read_submissions(room: _Class) -> None:
    """Find every submission, the key that verdicts on its answers are kept under, and what there is to say about it."""
    found = room.writer.submissions()
    if not found:
        where = room.folder / "submitted" / "<student>" / room.chapter
        raise CourseError(f"there are no submissions: {where} is where nbgrader collects them")
    for student, folder in found.items():
        try:
            submission = read_submission(folder, room.chapter)
            answers = find_answers(submission.notebook, room.chapter)
            key = key_of(answers, room.chapter, room.seed)
        except Exception as problem:  # whatever was handed in, the others go on
            room.failed[student] = f"{type(problem).__name__}: {clean_text(problem)}"
            continue
        content = f"{key}\n{submission.timestamp}\n{nbformat.writes(submission.notebook)}"
        mark = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        room.papers[student] = _Paper(packed(answers), key, mark)
        room.notes += [f"{clean_text(student)}: {note}" for note in submission.notes]


def _done_before(room: _Class) -> tuple[set[str], set[str]]:
    """The students whose grades are written, and those whose verdicts are kept."""
    written = room.writer.written({student: paper.mark for student, paper in room.papers.items()})
    kept = {
        student
        for student, paper in room.papers.items()
        if load_verdicts(room.folder, room.chapter, student, paper.key) is not None
    }
    return written, kept


def _judged(room: _Class, kept: set[str], done: set[str], where: tuple, say: Callable[[str], None]) -> Iterator[str]:
    """The students whose verdicts are there: first those that were kept, then the others as they are judged."""
    yield from sorted(kept)
    missing = [student for student in room.papers if student not in done]
    if not missing:
        return
    jobs = (Job(student, room.papers[student].answers) for student in missing)
    with judges(*where) as ready:
        for judged in ready.judge(jobs, room.chapter, room.seed):
            student = judged.job.student
            if judged.failure:
                _fail(room, student, judged.failure, say)
                continue
            try:
                save_verdicts(room.folder, room.chapter, student, room.papers[student].key, from_json(judged.verdicts))
            except OSError as problem:
                raise cannot_write(room.folder / ".lowprec", problem) from None
            yield student


def _write(room: _Class, student: str, say: Callable[[str], None]) -> None:
    try:
        room.writer.write(student, room.papers[student].mark)
    except NotWrittenError as problem:
        _fail(room, student, f"nbgrader could not write its grade: {problem}", say)


def _fail(room: _Class, student: str, sentence: str, say: Callable[[str], None]) -> None:
    room.failed[student] = sentence
    say(_failure_text((student, sentence)))


def _failure_text(failed: tuple[str, str]) -> str:
    return f"not graded: {clean_text(failed[0])}: {failed[1]}"


@contextlib.contextmanager
def _progress(total: int, done: int, wanted: bool) -> Iterator[tuple[Callable[[], object], Callable[[str], None]]]:
    """A bar with the time left, and a way to say something above it."""
    with tqdm(total=total, initial=done, unit="submission", disable=not wanted, file=sys.stderr, smoothing=0.1) as bar:
        yield bar.update, (lambda sentence: bar.write(sentence, file=sys.stderr)) if wanted else (lambda _: None)
