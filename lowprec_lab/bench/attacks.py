"""What an attack is: a submission that tries to cheat, to break, or to reach the people who look; and where they are.

A file `tests/red_team/<kind>.py` holds a list ATTACKS. Each is text: nothing in it runs before a grader runs it. In its
texts these words stand for what an attacker may know of the machine that grades:

    @COURSE@   the course's folder            @CANARY@  a file of somebody else's, with a secret in it
    @DROP@     a folder outside of the course @HOME@    the home of whoever grades
    @PORT@     where a program listens        @PIDS@    the machine's process namespace
    @NAME@     the attack's name              @MARK@    a word that occurs nowhere else

Every attack is bounded in itself (500 processes, 2 GiB, 256 MiB of files, 60 s), for the engine that does not stop it.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from lowprec_lab.blanks import BLANKS, load_chapters
from lowprec_lab.sources import reference_source

CHAPTER = "01_bit_layouts"
HONEST = ("machine_epsilon",)
KINDS = {
    "verdicts": "forge the verdict",
    "objects": "return objects that lie",
    "secrets": "read or change files, guess the seed",
    "borrowing": "find somebody else's answer",
    "neighbours": "reach another submission",
    "notebooks": "tamper with the notebook",
    "breaking": "break the grader",
    "people": "attack the people who look",
}


@dataclass(frozen=True)
class Attack:
    """One submission.

    body: what the answer to `exercise` does (lines inside the function); before: lines above it in the same cell.
    answers: the whole source of further answer cells, by exercise. cells: sources of code cells added before the
    attacked one. tamper: changes the notebook. place: changes the folder of the submission, given that folder and the
    course's. deserves: points that its attacked exercises may earn; 0 for those that are not named.
    honest: exercises whose answer is the reference. by_students: how many students hand this in, one after the other.
    not_on_stock: why stock nbgrader does not get to run it.
    """

    name: str
    tries: str
    body: str = ""
    before: str = ""
    exercise: str = "bit_pattern"
    helpers: str = ""
    answers: dict[str, str] = field(default_factory=dict)
    cells: tuple[str, ...] = ()
    tamper: Callable[[NotebookNode], None] | None = None
    place: Callable[[Path, Path], None] | None = None
    deserves: dict[str, float] = field(default_factory=dict)
    honest: tuple[str, ...] = HONEST
    by_students: int = 1
    not_on_stock: str = ""
    kind: str = ""

    @cached_property
    def sources(self) -> dict[str, str]:
        """The source of every answer cell, by exercise."""
        own = dict(self.answers)
        if self.body:
            own[self.exercise] = answer_cell(self.exercise, self.body, self.before)
        return {name: reference_source(name).text for name in self.honest} | own

    @property
    def earns(self) -> dict[str, float]:
        """The points that each exercise deserves; others deserve none."""
        return {name: float(BLANKS[name].points) for name in self.honest} | self.deserves

    def submit(self, released: NotebookNode, words: dict[str, str]) -> NotebookNode:
        """A copy of the released page with the attack in it. words: what stands for COURSE and the others."""
        notebook = copy.deepcopy(released)
        for cell in notebook.cells:
            cell.source = self.sources.get(cell.id, cell.source)
            if cell.id == "helpers" and self.helpers:
                cell.source = "# Your helpers\n" + textwrap.dedent(self.helpers)
        place = index_of(notebook, self.exercise)
        notebook.cells[place:place] = [code_cell(textwrap.dedent(each)) for each in self.cells]
        if self.tamper:
            self.tamper(notebook)
        return nbformat.from_dict(json.loads(with_words(json.dumps(notebook), words)))


def answer_cell(exercise: str, body: str, before: str = "") -> str:
    """An answer's cell: the lines before, then the function with this body under the exercise's name."""
    load_chapters()
    parameters = ", ".join(BLANKS[exercise].signature.parameters)
    top = textwrap.dedent(before).strip("\n")
    lines = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    return (f"{top}\n\n\n" if top else "") + f"@fill\ndef {exercise}({parameters}):\n{lines}"


def with_words(text: str, words: dict[str, str]) -> str:
    """The text with what the words stand for."""
    for word, meaning in words.items():
        text = text.replace(f"@{word}@", meaning)
    return text


def index_of(notebook: NotebookNode, cell_id: str) -> int:
    """The place of a cell."""
    return next(place for place, cell in enumerate(notebook.cells) if cell.id == cell_id)


def cell_of(notebook: NotebookNode, cell_id: str) -> NotebookNode:
    """A cell by its id: an exercise's name, or "check-" and that name."""
    return notebook.cells[index_of(notebook, cell_id)]


def code_cell(source: str, **metadata: object) -> NotebookNode:
    """A new code cell."""
    from nbformat.v4 import new_code_cell

    return new_code_cell(source, metadata=metadata)


def load_attacks(folder: Path | None = None) -> list[Attack]:
    """All attacks, kind by kind. folder: tests/red_team of this clone if omitted.

    Raises FileNotFoundError, with what to do, where there is no such folder.
    """
    folder = Path(__file__).parents[2] / "tests" / "red_team" if folder is None else folder
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}: the attacks are in a clone of the project, not in an installed package. "
            "Run this from a clone"
        )
    return [replace(each, kind=kind) for kind in KINDS for each in _attacks_in(folder / f"{kind}.py")]


def _attacks_in(path: Path) -> list[Attack]:
    spec = importlib.util.spec_from_file_location(f"red_team_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ATTACKS
