"""A course for nbgrader: a folder outside the clone, in which nbgrader's own commands release, collect and grade."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lowprec_lab import authoring
from lowprec_lab.authoring import CODE_STUB, write_page
from lowprec_lab.chapters import CHAPTERS, Chapter, find_chapter
from lowprec_lab.files import find_clone, keep_copy

RECORD, SEED, CONFIG = "course.json", "seed", "nbgrader_config.py"

_CONFIG_TEXT = '''\
"""Settings of nbgrader for this course. Yours to edit: `lowprec-lab course init` keeps what you changed."""

import os
import sys
from pathlib import Path

from lowprec_lab.grading.feedback import template_folders
from lowprec_lab.grading.staging import use_staged_submissions

HERE = Path(__file__).resolve().parent
c = get_config()  # noqa: F821 (nbgrader gives it)

c.CourseDirectory.course_id = {course_id!r}
c.CourseDirectory.root = str(HERE)
c.CourseDirectory.db_url = f"sqlite:///{{HERE / 'gradebook.db'}}"

# Where assignments are handed out and in. Ask whoever runs your JupyterHub; the default is nbgrader's own.
# c.Exchange.root = "/srv/nbgrader/exchange"

# What stands in place of an answer on a released page: it must be valid in a function and in a call.
c.ClearSolutions.code_stub = {{"python": {code_stub!r}}}

# What grades: the judge, which runs answers in a sandbox. CourseExecute in its place is nbgrader's own engine, which
# runs submissions with your rights and believes what they print.
ENGINE = "lowprec_lab.grading.execute.JudgeExecute"
c.JudgeExecute.course = c.CourseExecute.course = c.RepairSubmission.course = str(HERE)
# c.JudgeExecute.sandbox = False  # no sandbox: for trying your own answers, never for a class
c.Execute.timeout = 120  # seconds for each cell, with nbgrader's own engine

# Submissions are read and put in order before nbgrader looks at them: whatever was handed in, everybody is graded.
use_staged_submissions()
c.Autograde.sanitize_preprocessors = [
    "lowprec_lab.grading.repair.RepairSubmission",
    "nbgrader.preprocessors.DeduplicateIds",
    "nbgrader.preprocessors.OverwriteKernelspec",
    "nbgrader.preprocessors.OverwriteCells",
    "nbgrader.preprocessors.CheckCellMetadata",
]
c.Autograde.autograde_preprocessors = [
    ENGINE,
    "nbgrader.preprocessors.IgnorePattern",
    "nbconvert.preprocessors.ClearMetadataPreprocessor",
    "nbgrader.preprocessors.LimitOutput",
    "nbgrader.preprocessors.SaveAutoGrades",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]

# Feedback and the form grader load nothing from afar.
c.HTMLExporter.extra_template_basedirs = template_folders()

# nbgrader calls `alembic`, which is beside this Python, in an environment that need not be activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
'''


class CourseError(ValueError):
    """A course that cannot be made, or cannot grade: what is wrong, and what to do."""


@dataclass
class Course:
    """What `init_course` made.

    folder: the course. pages: the source notebooks. notes: sentences for the instructor, what was kept among them.
    """

    folder: Path
    course_id: str
    pages: list[Path]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return str(self.folder)


def init_course(folder: Path | str, course_id: str, chapters: Sequence[Chapter | str] | None = None) -> Course:
    """Make the course `course_id` in `folder`, or bring its source notebooks up to date; all chapters when omitted.

    The folder gets nbgrader_config.py, source/<chapter>/<chapter>.ipynb, the seed and course.json, which holds the
    release that the course is pinned to. In a course that is there already the seed, the gradebook, and whatever the
    instructor edited are kept.

    Raises CourseError for a folder inside the clone, a folder with something else in it, or a bad course id, and
    AuthoringError for a chapter that cannot be built.
    """
    folder = Path(folder).expanduser().resolve()
    _require_course_id(course_id)
    _require_place(folder)
    record = _read_record(folder)
    _require_same_course(folder, record, course_id)
    sources = _sources(CHAPTERS if chapters is None else chapters)
    course = Course(folder, course_id, [folder / path for path in sources])
    written = dict(record.get("written", {}))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_record(course, written)  # first: an init that is interrupted can be repeated
        _make_seed(folder)
        _write_config(course, written)
        for path, content in sources.items():
            _write_source(course, path, content, written)
        _write_record(course, written)
    except OSError as problem:
        raise CourseError(f"{problem.filename or folder} could not be written: {problem.strerror or problem}") from None
    return course


def read_seed(folder: Path) -> str:
    """The course's secret seed. Raises CourseError when it is missing or empty: grading must not use the public one."""
    try:
        seed = (folder / SEED).read_text(encoding="utf-8").strip()
    except OSError as problem:
        seed, reason = "", problem.strerror
    else:
        reason = "it is empty"
    if not seed:
        raise CourseError(
            f"{folder / SEED} cannot be used ({reason}). Bring it back from a copy; only if there is none, run "
            "`lowprec-lab course init` again, which makes a new seed, and grade everybody again"
        )
    return seed


def seed_or_new(folder: Path) -> tuple[str, str]:
    """The course's secret seed, and a sentence for the instructor where a fresh one had to be made ("" where not).

    Verdicts that were given with a lost seed no longer count: everybody is graded again. Raises CourseError.
    """
    path = folder / SEED
    try:
        if path.is_file() and not path.read_bytes().strip():
            path.unlink()
        made = _make_seed(folder)
    except OSError as problem:
        raise CourseError(f"{path} could not be written: {problem.strerror or problem}") from None
    note = f"There was no seed in {path}: a fresh one was made, and everybody is graded with it." if made else ""
    return read_seed(folder), note


def require_release(folder: Path) -> None:
    """Raise CourseError unless the installed release is the one that the course is pinned to."""
    pinned, installed = _read_record(folder).get("release"), installed_release()
    if pinned != installed:
        raise CourseError(
            f"the course in {folder} is pinned to lowprec_lab {pinned}, and {installed} is installed. Install "
            f"{pinned}, or run `lowprec-lab course init` again to move the course to this one"
        )


def installed_release() -> str:
    """The version of the package that runs; in a clone that is not installed, what pyproject.toml says."""
    try:
        return importlib.metadata.version("lowprec_lab")
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]


# --- what may be a course -------------------------------------------------------------------------------------------


def _require_course_id(course_id: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", course_id):
        raise CourseError(
            f"a course id is letters, digits, '-', '_' and '.', and begins with a letter or a digit: fp8-2027, say. "
            f"It names a folder of the exchange. This one is {course_id!r}"
        )


def _require_place(folder: Path) -> None:
    clone = find_clone()
    if clone is not None and folder.is_relative_to(clone):
        raise CourseError(
            f"{folder} is inside the clone {clone}: a seed and a gradebook must not lie beside what students get. "
            "Choose a folder elsewhere"
        )
    if folder.exists() and not folder.is_dir():
        raise CourseError(f"{folder} is a file. Choose a new folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file():
        raise CourseError(
            f"{folder} is not empty, and no course of lowprec_lab ({RECORD} is missing). Choose a new folder"
        )


def _require_same_course(folder: Path, record: dict, course_id: str) -> None:
    there = record.get("course_id", course_id)
    if there != course_id:
        raise CourseError(
            f"{folder} is the course {there!r}, not {course_id!r}. Each course has a folder of its own: "
            "choose another one"
        )


def _read_record(folder: Path) -> dict:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise CourseError(f"{folder / RECORD} cannot be read ({problem}). Bring it back from a copy") from None
    if not isinstance(record, dict):
        raise CourseError(f"{folder / RECORD} holds no record of a course. Bring it back from a copy")
    return record


# --- what is written ------------------------------------------------------------------------------------------------


def _sources(chapters: Sequence[Chapter | str]) -> dict[str, bytes]:
    """The source notebooks: path in the course, content. Nothing else may lie beside one: nbgrader would release it."""
    import nbformat

    if not authoring.SOLUTIONS.is_dir():
        raise CourseError(
            f"there is no {authoring.SOLUTIONS}: a course is made from a clone of the whole project. Clone it, "
            "install it with `pip install -e '.[class]'`, and run this again"
        )
    names = [(chapter if isinstance(chapter, Chapter) else find_chapter(chapter)).name for chapter in chapters]
    return {
        f"source/{name}/{name}.ipynb": (
            nbformat.writes(authoring.source_notebook(authoring.SOLUTIONS / f"{name}.py")) + "\n"
        ).encode()
        for name in names
    }


def _make_seed(folder: Path) -> bool:
    """A secret that nobody else can read; one that is there stays. Returns whether one was made."""
    try:
        handle = os.open(folder / SEED, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(16) + "\n")
    return True


def _write_config(course: Course, written: dict[str, str]) -> None:
    path = course.folder / CONFIG
    content = _CONFIG_TEXT.format(course_id=course.course_id, code_stub=CODE_STUB).encode()
    if path.exists() and _hash(path.read_bytes()) not in (written.get(CONFIG), _hash(content)):
        course.notes.append(f"{path} has your changes and was left as it is")
        return
    write_page(path, content)
    written[CONFIG] = _hash(content)


def _write_source(course: Course, path: str, content: bytes, written: dict[str, str]) -> None:
    """Write a source notebook; one that the instructor edited is kept in kept/, away from what is released."""
    page = course.folder / path
    if page.exists() and _hash(page.read_bytes()) not in (written.get(path), _hash(content)):
        kept = keep_copy(page.read_bytes(), course.folder / "kept", page.stem, page.suffix)
        course.notes.append(f"{page} had your changes: it is new now, and yours is {kept}")
    write_page(page, content)
    written[path] = _hash(content)


def _write_record(course: Course, written: dict[str, str]) -> None:
    record = {"course_id": course.course_id, "release": installed_release(), "written": dict(sorted(written.items()))}
    write_page(course.folder / RECORD, (json.dumps(record, indent=2) + "\n").encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
