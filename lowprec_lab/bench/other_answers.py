"""Right answers written another way: where a clone keeps them, and how each is loaded as a learner's would be.

A file `tests/other_answers/<module>.py` holds functions under `@other("decode")`. Each has a name of its own and stands
alone: its source, under the exercise's name, is loaded as an answer cell is.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowprec_lab.blanks import BLANKS, in_order
from lowprec_lab.chapters import CHAPTERS
from lowprec_lab.sources import Source, load, reference


@dataclass(frozen=True)
class OtherAnswer:
    """One right answer. label: its name in its file; source: its text, under the exercise's name."""

    exercise: str
    label: str
    source: Source

    def function(self) -> Callable:
        """The answer as a function, built on the references of earlier exercises. Raises AnswerError."""
        return load_answer(self.exercise, self.source, self.label)


def other(exercise: str) -> Callable:
    """Mark the decorated function as another right answer to `exercise`."""

    def mark(function: Callable) -> Callable:
        function.__lowprec_other__ = exercise
        return function

    return mark


def load_answer(exercise: str, source: Source, label: str) -> Callable:
    """The function that a source defines for an exercise, with references for earlier ones. Raises AnswerError."""
    return load(source, BLANKS[exercise], reference, label)


def other_answers(folder: Path | None = None) -> list[OtherAnswer]:
    """All other right answers, in the order of the exercises. folder: tests/other_answers of this clone if omitted.

    Raises FileNotFoundError, with what to do, where there is no such folder.
    """
    folder = Path(__file__).parents[2] / "tests" / "other_answers" if folder is None else folder
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}: the other right answers are in a clone of the project, not in an installed "
            "package. Run this from a clone"
        )
    order = {blank.name: place for place, blank in enumerate(in_order())}
    found = [each for chapter in CHAPTERS for each in _answers_in(folder / f"{chapter.module}.py")]
    return sorted(found, key=lambda each: order[each.exercise])


def _answers_in(path: Path) -> list[OtherAnswer]:
    if not path.is_file():
        return []
    spec = importlib.util.spec_from_file_location(f"other_answers_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where inspect looks for the file of a class
    spec.loader.exec_module(module)
    marked = [value for value in vars(module).values() if hasattr(value, "__lowprec_other__")]
    return [OtherAnswer(f.__lowprec_other__, f.__name__, _source_under(f.__lowprec_other__, f)) for f in marked]


def _source_under(exercise: str, function: Callable) -> Source:
    """The function's or class's text without its decorator, and under the exercise's name (inside of it too)."""
    text = inspect.getsource(function)
    text = text[re.search(rf"^(def|class) {function.__name__}\b", text, re.MULTILINE).start() :]
    return Source(re.sub(rf"\b{function.__name__}\b", exercise, text))
