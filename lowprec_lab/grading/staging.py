"""What was handed in, read whatever it is, and staged as a page that nbgrader can open. Originals are never touched.

nbgrader's autograde gives up on a page that is no JSON, and passes over `01_bit_layouts (1).ipynb`; it copies whatever
lies beside a page, through symbolic links too, into folders that go back to students. So it is given a folder of its
own for each submission, `<course>/.lowprec/staged/<student>/<chapter>/`, with one valid page, the time at which it was
handed in, and the secret by which nbgrader returns feedback.

nbgrader has no setting for the folder that autograde reads alone: `use_staged_submissions`, called by a course's
nbgrader_config.py, puts staging in front of its Autograde, which the command, the form grader's button and the class
runner all use; and where nbgrader asks when something was handed in, it gets an answer whatever timestamp.txt holds. A
course of somebody else in the same process is left alone.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from traitlets.utils.importstring import import_item

from lowprec_lab.authoring import KERNEL, write_page
from lowprec_lab.chapters import CHAPTERS
from lowprec_lab.grading.clean import clean_text
from lowprec_lab.grading.course import RECORD, CourseError

STAGED = os.path.join(".lowprec", "staged")
TIMESTAMP = "timestamp.txt"
SECRET = "submission_secret.txt"
NOTES = "lowprec_lab_notes"  # in the metadata of a staged page: what `repair` tells the instructor
LARGEST_PAGE = 32 * 2**20
_LARGEST_TIMESTAMP, _LARGEST_SECRET, _MOST_FILES = 200, 1_000, 1_000


@dataclass
class Submission:
    """What one student handed in for one chapter.

    notebook: a page of nbformat 4, perhaps without cells; what is in them is not looked at here (see `repair`).
    timestamp: when it was handed in, as nbgrader writes it, or "". secret: what names its feedback in the exchange, or
    "". notes: sentences for the instructor.
    """

    notebook: NotebookNode
    timestamp: str = ""
    secret: str = ""
    notes: list[str] = field(default_factory=list)


def read_submission(folder: Path | str, chapter: str) -> Submission:
    """What is in `submitted/<student>/<chapter>`, whatever that is; only files of the folder itself are opened.

    Raises OSError only where the folder itself cannot be listed.
    """
    folder, found = Path(folder), Submission(_well_formed({}, []))
    page = _choose_page(folder, chapter, found.notes)
    if page is not None:
        found.notebook = _read_page(page, found.notes)
    found.timestamp = _read_timestamp(folder / TIMESTAMP, found.notes)
    if not found.timestamp and os.path.lexists(folder / SECRET):  # through the exchange, which gives every page a time
        found.timestamp = _time_text(folder / SECRET)
        found.notes.append(f"{TIMESTAMP} is missing. The time of {SECRET} counts: {found.timestamp}.")
    found.secret = _read_secret(folder / SECRET)
    found.notebook.metadata = nbformat.from_dict({**KERNEL, NOTES: list(found.notes)})
    return found


# --- which file ------------------------------------------------------------------------------------------------------


def _choose_page(folder: Path, chapter: str, notes: list[str]) -> Path | None:
    """The page to grade: the one with the right name, else the newest with a name like it, else the only one."""
    if folder.is_symlink() or folder.parent.is_symlink():  # to another student's, for one
        notes.append("What was handed in is a link to another folder. Nothing could be graded.")
        return None
    names = sorted(entry.name for entry in _some_entries(folder) if entry.name.lower().endswith(".ipynb"))
    wanted = f"{chapter}.ipynb"
    if wanted in names:
        others = [name for name in names if name != wanted]
        if others:
            notes.append(f"There are other pages beside {wanted}, which were not graded: {_listed(others)}.")
        return folder / wanted
    if not names:
        notes.append(f"There is no page {wanted} in what was handed in, and no other. Nothing could be graded.")
        return None
    like = [name for name in names if _is_like(name, chapter)]
    if not like and len(names) > 1:
        notes.append(f"There is no page {wanted}, and it is not clear which was meant: {_listed(names)}.")
        return None
    chosen = max(like or names, key=lambda name: (_changed(folder / name), name))
    others = [name for name in names if name != chosen]
    notes.append(f"There is no page {wanted}: {clean_text(chosen)} was graded in its place.")
    if others:
        notes.append(f"It is the newest of several. The others: {_listed(others)}.")
    return folder / chosen


def _some_entries(folder: Path) -> list[os.DirEntry]:
    entries = []
    with os.scandir(folder) as listing:
        for entry in listing:
            entries.append(entry)
            if len(entries) == _MOST_FILES:
                break
    return entries


def _is_like(name: str, chapter: str) -> bool:
    """Whether a name is the page's, as browsers, Colab and file managers change it: `01_bit_layouts (1).ipynb`."""

    def letters(text: str) -> str:
        return re.sub(r"[^0-9a-z]", "", text.lower())

    other = any(letters(each.name) in letters(name) for each in CHAPTERS if each.name != chapter)
    return letters(chapter) in letters(name) and not other


def _changed(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _listed(names: list[str]) -> str:
    shown = ", ".join(clean_text(name, 80) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


# --- what is in it --------------------------------------------------------------------------------------------------


def _read_page(path: Path, notes: list[str]) -> NotebookNode:
    name = clean_text(path.name, 80)
    try:
        content = _read_file(path, LARGEST_PAGE)
        return _as_version_4(_parse(content), notes)
    except _CannotReadError as problem:
        notes.append(f"{name} {problem}. Nothing could be graded; the file itself is as it was handed in.")
    return _well_formed({}, notes)


def _well_formed(notebook: Mapping, notes: list[str]) -> NotebookNode:
    # Imported here: each nbgrader command reads the course's settings, and few of them need torch.
    from lowprec_lab.grading.repair import well_formed

    return well_formed(notebook, notes)


class _CannotReadError(Exception):
    """The end of a sentence that begins with the name of a file."""


def _read_file(path: Path, most: int) -> bytes:
    """The content of a regular file. Nothing is followed, waited for or read without end."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        link = path.is_symlink()
        raise _CannotReadError(
            "is a link to another file" if link else f"cannot be opened ({problem.strerror})"
        ) from None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, handle)
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise _CannotReadError("is no file that can be read")
        if about.st_nlink > 1 and about.st_uid != os.getuid():
            raise _CannotReadError("is another name of a file of somebody else")
        try:
            with open(handle, "rb", closefd=False) as file:
                content = file.read(most + 1)
        except OSError as problem:
            raise _CannotReadError(f"cannot be read ({problem.strerror})") from None
    if len(content) > most:
        raise _CannotReadError(f"is larger than {most // 2**20} MB")
    return content


def _parse(content: bytes) -> object:
    if not content.strip():
        raise _CannotReadError("is empty")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        # Windows' Notepad writes UTF-16; whatever else it is, what can be read of it is.
        is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        text = content.decode("utf-16" if is_utf16 else "utf-8", errors="replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError, MemoryError) as problem:
        kind = "is no notebook" if text.lstrip()[:1] != "{" else "is damaged"
        raise _CannotReadError(f"{kind}: it is not valid JSON ({clean_text(problem, 80)})") from None


def _as_version_4(data: object, notes: list[str]) -> NotebookNode:
    """A valid page with the cells of a notebook of any version."""
    if not isinstance(data, dict):
        raise _CannotReadError("is no notebook")
    if "cells" not in data and isinstance(data.get("worksheets"), list):
        try:
            data = nbformat.convert(nbformat.from_dict({"metadata": {}, "nbformat": 3, **data}), 4)
        except Exception as problem:  # nbformat checks nothing of what it converts
            raise _CannotReadError(
                f"is a notebook of an old version that cannot be converted ({clean_text(problem, 80)})"
            ) from None
    if not isinstance(data.get("cells"), list):
        raise _CannotReadError("is no notebook: it has no cells")
    return _well_formed(data, notes)


# --- when -----------------------------------------------------------------------------------------------------------


def _read_timestamp(path: Path, notes: list[str]) -> str:
    """The time in timestamp.txt, if nbgrader can read it; of one that it cannot, the time of the file itself."""
    from nbgrader.utils import parse_utc

    if not os.path.lexists(path):
        return ""
    with contextlib.suppress(
        _CannotReadError, UnicodeDecodeError, ValueError, OverflowError, AttributeError, TypeError
    ):
        text = _read_file(path, _LARGEST_TIMESTAMP).decode("ascii").strip()
        if parse_utc(text) is not None:
            return text
    moment = _time_text(path)
    notes.append(f"{TIMESTAMP} says no time. That of the file itself counts: {moment}.")
    return moment


def _time_text(path: Path) -> str:
    return datetime.fromtimestamp(_changed(path) / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _read_secret(path: Path) -> str:
    """What `nbgrader submit` put there, from which release_feedback makes the name of the feedback; "" if it is not."""
    with contextlib.suppress(_CannotReadError, UnicodeDecodeError):
        text = _read_file(path, _LARGEST_SECRET).decode("ascii")
        return text if re.fullmatch(r"[0-9A-Za-z_-]+", text) else ""
    return ""


# --- staging ----------------------------------------------------------------------------------------------------------


def stage(folder: Path, chapter: str, staged: Path) -> Submission:
    """Bring the staged copy of a submission up to date. Raises OSError when it cannot be written."""
    submission = read_submission(folder, chapter)
    write_page(staged / f"{chapter}.ipynb", (nbformat.writes(submission.notebook) + "\n").encode())
    if submission.timestamp:
        write_page(staged / TIMESTAMP, (submission.timestamp + "\n").encode())
        # Without a secret release_feedback stops, for everybody; under one that nobody knows it passes over this page.
        write_page(staged / SECRET, (submission.secret or secrets.token_hex(64)).encode())
    else:
        (staged / TIMESTAMP).unlink(missing_ok=True)
        (staged / SECRET).unlink(missing_ok=True)
    return submission


def use_staged_submissions() -> None:
    """Make nbgrader, in this process, grade staged submissions in courses of this package. Calling it again is fine."""
    from nbgrader.apps.api import NbGraderAPI
    from nbgrader.converters import Autograde
    from nbgrader.coursedir import CourseDirectory

    if getattr(Autograde, "_lowprec_lab_stages", False):
        return
    Autograde._lowprec_lab_stages = True
    stock_input, stock_init = Autograde._input_directory.fget, Autograde.init_notebooks
    stock_time, stock_submitted = CourseDirectory.get_existing_timestamp, NbGraderAPI.get_submitted_timestamp

    def input_directory(self) -> str:
        return STAGED if self._sanitizing and _is_ours(self.coursedir) else stock_input(self)

    def init_notebooks(self) -> None:
        if _is_ours(self.coursedir):
            _stage_all(self)
        stock_init(self)

    def get_existing_timestamp(self, dest_path: str) -> datetime | None:
        return _time_of(Path(dest_path)) if _is_ours(self) else stock_time(self, dest_path)

    def get_submitted_timestamp(self, assignment_id: str, student_id: str) -> datetime | None:
        if not _is_ours(self.coursedir):
            return stock_submitted(self, assignment_id, student_id)
        submitted = self.coursedir.submitted_directory
        return _time_of(Path(self.coursedir.format_path(submitted, student_id, assignment_id)))

    Autograde._input_directory = property(input_directory)
    Autograde.init_notebooks = init_notebooks
    CourseDirectory.get_existing_timestamp = get_existing_timestamp
    NbGraderAPI.get_submitted_timestamp = get_submitted_timestamp


def _time_of(folder: Path) -> datetime | None:
    from nbgrader.utils import parse_utc

    text = _read_timestamp(folder / TIMESTAMP, [])
    return parse_utc(text) if text else None


def _is_ours(course) -> bool:
    return (Path(course.root) / RECORD).is_file()


def _stage_all(autograde) -> None:
    """Stage every submission that this run of nbgrader is about, and nothing that is not there any more."""
    from nbgrader.converters.base import NbGraderException

    submitted = autograde.coursedir.submitted_directory
    handed_in = _folders_by_student(autograde.coursedir, submitted)
    try:
        for student, staged in _folders_by_student(autograde.coursedir, STAGED).items():
            if student not in handed_in:
                shutil.rmtree(staged)
        for student, folder in handed_in.items():
            _stage_one(autograde, student, folder)
        _require_engines(autograde, list(handed_in))
    except OSError as problem:
        sentence = f"{problem.filename or STAGED} could not be staged: {problem.strerror or problem}"
        autograde.log.error(sentence)
        raise NbGraderException(sentence) from None
    except CourseError as problem:
        autograde.log.error(str(problem))
        raise NbGraderException(str(problem)) from None


def _require_engines(autograde, students: list[str]) -> None:
    """Let what grades say that it cannot before nbgrader removes anybody's grading. Raises CourseError."""
    for engine in autograde.autograde_preprocessors:
        kind = import_item(engine) if isinstance(engine, str) else engine
        if hasattr(kind, "require_ready"):
            kind(parent=autograde).require_ready(autograde.coursedir.assignment_id, students)


def _stage_one(autograde, student: str, folder: Path) -> None:
    course = autograde.coursedir
    staged = course.format_path(STAGED, student, course.assignment_id)
    for note in stage(folder, course.assignment_id, Path(staged)).notes:
        autograde.log.warning("%s: %s", student, note)


def _folders_by_student(course, step: str) -> dict[str, Path]:
    """The folders of one step of nbgrader that its settings choose: {student: folder}."""
    chapter = course.assignment_id
    pattern = os.path.normpath(course.format_path(step, "(?P<student>[^/]+)", chapter, escape=True))
    folders = sorted(map(os.path.normpath, glob.glob(course.format_path(step, course.student_id, chapter))))
    matches = [re.fullmatch(pattern, folder) for folder in folders if os.path.isdir(folder)]
    return {match["student"]: Path(match[0]) for match in matches if match}
