"""The one writer: nbgrader's own autograde, in this process, for one student after the other.

Scores, late penalties and feedback stay nbgrader's. What was written is noted in
`<course>/.lowprec/graded/<chapter>/<student>.json`, so that nothing is written twice, and what was cut off is repeated.
"""

from __future__ import annotations

import contextlib
import glob
import io
import json
import logging
import os
import re
import sqlite3
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from nbgrader.api import Gradebook, MissingEntry
from nbgrader.apps import AutogradeApp
from nbgrader.converters import Autograde
from nbgrader.converters.base import NbGraderException
from nbgrader.preprocessors import Execute
from traitlets import import_item

from lowprec_lab.authoring import write_page
from lowprec_lab.grading.clean import clean_text
from lowprec_lab.grading.course import CONFIG, CourseError
from lowprec_lab.grading.execute import JudgeExecute
from lowprec_lab.grading.verdicts import private_file

_SQLITE = "sqlite:///"
_LOCK_WAIT_S = 10.0
_NOTHING_LOST = "What was judged until now is kept: run this again to go on"
# What nbgrader's log says when it is not the submission's fault: nothing else can be written either.
_STOPS = {
    "database is locked": f"another program holds the gradebook: close it, or wait for it. {_NOTHING_LOST}",
    "readonly database": f"the gradebook cannot be written: is it read-only, or somebody else's? {_NOTHING_LOST}",
    "database or disk is full": f"the disk, or your share of it, is full: free some space. {_NOTHING_LOST}",
    "No space left on device": f"the disk, or your share of it, is full: free some space. {_NOTHING_LOST}",
    "Disk quota exceeded": f"your share of the disk is full: free some space. {_NOTHING_LOST}",
}


class NotWrittenError(Exception):
    """nbgrader could not grade this one submission; the text says why."""


class Writer:
    """Writes one chapter's grades into the gradebook of the course in `folder`.

    Raises CourseError when the course's settings, the gradebook or the chapter's assignment cannot be used.
    """

    def __init__(self, folder: Path, chapter: str) -> None:
        self.folder, self.chapter = folder, chapter
        self._app = _nbgrader_in(folder)
        self._course = self._app.coursedir
        self._require_judge()
        require_gradebook(self._course.db_url, chapter)
        self._require_assignment()

    @property
    def db_url(self) -> str:
        """Where the gradebook is, as nbgrader says it."""
        return self._course.db_url

    def submissions(self) -> dict[str, Path]:
        """Each student who handed something in, and the folder of it."""
        path = self._format(self._course.submitted_directory, "(?P<student>.*)", escape=True)
        excluded = set(self._course.student_id_exclude.split(","))
        found = {}
        for folder in sorted(glob.glob(self._format(self._course.submitted_directory, "*"))):
            match = re.fullmatch(path, folder)
            if match and os.path.isdir(folder) and match["student"] not in excluded:
                found[match["student"]] = Path(folder)
        return found

    def written(self, marks: dict[str, str]) -> set[str]:
        """The students whose grades are in the gradebook already, each from what the mark stands for."""
        with self._gradebook() as gradebook:
            there = {submission.student_id for submission in gradebook.assignment_submissions(self.chapter)}
        return {student for student, mark in marks.items() if student in there and self._is_noted(student, mark)}

    def _is_noted(self, student: str, mark: str) -> bool:
        page = Path(self._format(self._course.autograded_directory, student), f"{self.chapter}.ipynb")
        try:
            return page.is_file() and json.loads(self._note(student).read_text()) == {"mark": mark}
        except (OSError, ValueError):
            return False

    def _note(self, student: str) -> Path:
        return private_file(self.folder, "graded", self.chapter, student)

    def write(self, student: str, mark: str) -> None:
        """Have nbgrader grade one submission, over what it wrote of it before; manual scores and comments stay.

        mark: noted when that is done. Raises NotWrittenError when only this one cannot be graded, and CourseError when
        none can.
        """
        try:
            self._note(student).unlink(missing_ok=True)
            self._autograde(student)
            write_page(self._note(student), (json.dumps({"mark": mark}) + "\n").encode())
        except OSError as problem:
            raise cannot_write(self._note(student), problem) from None

    def _autograde(self, student: str) -> None:
        self._course.assignment_id, self._course.student_id = self.chapter, glob.escape(student)
        converter = Autograde(coursedir=self._course, parent=self._app)
        converter.force = True
        with _captured(self._app.log) as log:
            try:
                converter.start()
            except (NbGraderException, SystemExit, OSError) as problem:
                raise _explained(student, log.getvalue(), problem) from None

    def _format(self, step: str, student: str, escape: bool = False) -> str:
        return self._course.format_path(step, student, self.chapter, escape=escape)

    def _gradebook(self) -> Gradebook:
        return Gradebook(self._course.db_url, self._course.course_id)

    def _require_judge(self) -> None:
        """Raise CourseError where nbgrader would run submissions itself, with the instructor's rights."""
        listed = Autograde(coursedir=self._course, parent=self._app).autograde_preprocessors
        classes = [import_item(each) if isinstance(each, str) else each for each in listed]
        if not any(issubclass(each, JudgeExecute) for each in classes) or any(issubclass(e, Execute) for e in classes):
            raise CourseError(
                f"{self.folder / CONFIG} has nbgrader run submissions itself, with your rights. Put "
                "lowprec_lab.grading.execute.JudgeExecute in Execute's place in c.Autograde.autograde_preprocessors, "
                "or move the file away and run `lowprec-lab course init` again"
            )

    def _require_assignment(self) -> None:
        with self._gradebook() as gradebook:
            try:
                gradebook.find_notebook(self.chapter, self.chapter)
            except MissingEntry:
                raise CourseError(_no_assignment(self.chapter)) from None


def _no_assignment(chapter: str) -> str:
    return (
        f"the gradebook does not know {chapter}. In the course's folder, run `nbgrader generate_assignment {chapter}`"
    )


def cannot_write(path: Path, problem: OSError) -> CourseError:
    """What to say when a file of the course cannot be written."""
    return CourseError(f"{path} could not be written: {problem.strerror or problem}. {_NOTHING_LOST}")


def _explained(student: str, log: str, problem: BaseException) -> Exception:
    everything = f"{log}\n{problem}"
    for sign, sentence in _STOPS.items():
        if sign in everything:
            return CourseError(f"{clean_text(student)} could not be graded: {sentence}")
    errors = re.findall(r"^(?:\[ERROR\] )?((?:\w+\.)*\w*(?:Error|Exception|Entry)\b.*)$", log, re.MULTILINE)
    said = re.findall(r"^\[ERROR\] (.+)$", log, re.MULTILINE)
    return NotWrittenError(clean_text((errors or said or [str(problem)])[-1]))


@contextlib.contextmanager
def _captured(log: logging.Logger) -> Iterator[io.StringIO]:
    buffer = io.StringIO()
    handler = logging.StreamHandler(buffer)
    handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
    log.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SQLAlchemy's, about nbgrader's way with it
            yield buffer
    finally:
        log.removeHandler(handler)


def _nbgrader_in(folder: Path) -> AutogradeApp:
    """nbgrader with the settings that `nbgrader autograde` has in the course's folder."""
    if not (folder / CONFIG).is_file():
        raise CourseError(
            f"{folder / CONFIG} is missing: this is no course of lowprec_lab. Run this in a course's folder, name it "
            "with --course, or make one with `lowprec-lab course init`"
        )
    before, paths = Path.cwd(), list(sys.path)
    app = AutogradeApp()
    app.log.handlers.clear()
    app.log.propagate = False
    with _captured(app.log) as log:
        try:
            os.chdir(folder)
            app.initialize([])
        except (Exception, SystemExit) as problem:
            raise CourseError(_bad_settings(folder, str(problem))) from None
        finally:
            os.chdir(before)
            sys.path[:] = paths
    failed = re.search(r"^\[ERROR\] .*$", log.getvalue(), re.MULTILINE)
    if failed:  # nbgrader would go on without the settings
        raise CourseError(_bad_settings(folder, log.getvalue().strip().splitlines()[-1]))
    app.log.handlers.clear()
    app.log.setLevel(logging.INFO)
    return app


def _bad_settings(folder: Path, why: str) -> str:
    return f"the settings in {folder / CONFIG} cannot be used: {clean_text(why)}"


def require_gradebook(db_url: str, chapter: str) -> None:
    """Raise CourseError unless the gradebook is there and can be written now. Only SQLite's is looked at."""
    if not db_url.startswith(_SQLITE):
        return
    path = Path(db_url.removeprefix(_SQLITE))
    if not path.is_file():
        raise CourseError(
            f"there is no gradebook {path}. {_no_assignment(chapter)[0].upper()}{_no_assignment(chapter)[1:]}"
        )
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        raise CourseError(
            f"the gradebook {path} cannot be written: it, or its folder, is read-only. Nothing was changed"
        )
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=_LOCK_WAIT_S, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.Error as problem:
        advice = "close the program that holds it" if "locked" in str(problem) else "look at it, or bring a copy back"
        raise CourseError(
            f"the gradebook {path} cannot be written ({problem}): {advice}, and run this again. Nothing was changed"
        ) from None
