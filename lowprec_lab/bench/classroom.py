"""A course with people in it, in a folder of its own: for benches and tests of grading."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from lowprec_lab.bench.other_answers import other_answers
from lowprec_lab.blanks import in_order
from lowprec_lab.chapters import Chapter
from lowprec_lab.grading.course import init_course
from lowprec_lab.sources import Source, reference_source

_LIMIT_S = 1800
# All of a gradebook that a grading decides on; ids and the moments of writing differ from run to run.
_GRADES = """
SELECT student.id, base_cell.name, grade.auto_score, grade.manual_score, grade.extra_credit, grade.needs_manual_grade,
       submitted_notebook.late_submission_penalty, submitted_assignment.timestamp
FROM grade JOIN base_cell ON base_cell.id = grade.cell_id
     JOIN submitted_notebook ON submitted_notebook.id = grade.notebook_id
     JOIN submitted_assignment ON submitted_assignment.id = submitted_notebook.assignment_id
     JOIN student ON student.id = submitted_assignment.student_id
ORDER BY student.id, base_cell.name
"""


@dataclass
class Classroom:
    """One course with one chapter. place: a folder with the course and with a home for nbgrader."""

    place: Path
    chapter: Chapter

    @property
    def course(self) -> Path:
        return self.place / "course"

    def prepare(self, config: str | None = None) -> None:
        """Make the course and its release. config: other settings than a course has, for comparison."""
        init_course(self.course, "class", [self.chapter])
        if config is not None:
            (self.course / "nbgrader_config.py").write_text(config, encoding="utf-8")
        done = self.run("-m", "nbgrader", "generate_assignment", self.chapter.name)
        if done.returncode != 0:
            raise RuntimeError(f"nbgrader generate_assignment failed: {done.stderr[-2000:]}")

    def released(self) -> NotebookNode:
        """The page that students get."""
        name = self.chapter.name
        return nbformat.read(self.course / "release" / name / f"{name}.ipynb", as_version=4)

    def answered(self, answers: Mapping[str, str]) -> NotebookNode:
        """The released page with answers (the text of a cell by exercise) in place."""
        return answered(self.released(), answers)

    def hand_in(self, student: str, page: NotebookNode | bytes, name: str | None = None) -> Path:
        """Put a page, or whatever else somebody took for one, where nbgrader collects submissions."""
        path = submission(self.course, student, self.chapter.name, name)
        path.write_bytes(page if isinstance(page, bytes) else json.dumps(page).encode())
        return path

    def command(self, *words: str) -> list[str]:
        """A command line of this Python."""
        return [sys.executable, *words]

    def grade_command(self, *options: str) -> list[str]:
        """`lowprec-lab grade` for this chapter."""
        return self.command("-m", "lowprec_lab", "grade", self.chapter.number, *options)

    def environment(self) -> dict[str, str]:
        """Nobody's settings: neither this user's Jupyter nor their learner's folder."""
        return nobodys_settings(self.place / "home")

    def run(self, *words: str, limit_s: float = _LIMIT_S) -> subprocess.CompletedProcess:
        """Run a command of this Python in the course's folder."""
        return subprocess.run(
            self.command(*words), cwd=self.course, env=self.environment(), capture_output=True, text=True,
            timeout=limit_s,
        )  # fmt: skip

    def grade(self, *options: str) -> subprocess.CompletedProcess:
        """Run `lowprec-lab grade` in the course's folder."""
        return self.run(*self.grade_command(*options)[1:])

    def grades(self) -> list[tuple]:
        """Every row of the gradebook that grading decides on."""
        with contextlib.closing(sqlite3.connect(self.course / "gradebook.db", timeout=30)) as book:
            return book.execute(_GRADES).fetchall()

    def points(self, student: str) -> dict[str, float | None]:
        """What a student's checks were worth, by exercise; {} for somebody who was not graded."""
        return {cell.removeprefix("check_"): points for who, cell, points, *_ in self.grades() if who == student}


def nobodys_settings(home: Path, work: Path | None = None) -> dict[str, str]:
    """This environment without its user's settings of Jupyter, nbgrader and the lab, at home in `home`, which is made.

    work: the learner's folder; one in `home` when omitted.
    """
    home.mkdir(parents=True, exist_ok=True)
    own = ("JUPYTER", "LOWPREC", "NBGRADER")
    others = {name: text for name, text in os.environ.items() if not name.startswith(own)}
    paths = {
        "HOME": home,
        "USERPROFILE": home,
        "JUPYTER_CONFIG_DIR": home / "config",
        "PYTHONPATH": Path(__file__).resolve().parents[2],
        "LOWPREC_WORK": work or home / "work",
    }
    return others | {name: str(path) for name, path in paths.items()}


def answered(page: NotebookNode, answers: Mapping[str, str]) -> NotebookNode:
    """The page, with answers (the text of a cell by exercise) in place."""
    for cell in page.cells:
        cell.source = answers.get(cell.id, cell.source)
    return page


def submission(course: Path, student: str, chapter: str, name: str | None = None) -> Path:
    """Where nbgrader collects what a student hands in for a chapter, as a file of this name; its folder is made."""
    path = course / "submitted" / student / chapter / (name or f"{chapter}.ipynb")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def honest_answers(chapter: Chapter) -> Iterator[dict[str, str]]:
    """Right answers to every exercise of a chapter, another set each time: the references and the other answers."""
    others = other_answers()
    variants = {
        blank.name: [
            reference_source(blank.name).text,
            *(as_cell(o.source) for o in others if o.exercise == blank.name),
        ]
        for blank in in_order()
        if blank.chapter == chapter
    }
    number = 0
    while True:
        yield {
            name: texts[(number * step) % len(texts)] for step, (name, texts) in enumerate(variants.items(), start=1)
        }
        number += 1


def as_cell(source: Source) -> str:
    """A function's text, with what it needs above it, as the answer cell of a page."""
    return f"{source.helpers}\n\n@fill\n{source.text}" if source.helpers else f"@fill\n{source.text}"
