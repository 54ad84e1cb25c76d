"""Where a chapter's grader registers its checks, its known misconceptions, its oracles and its reading questions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from lowprec_lab.chapters import CHAPTERS


@dataclass(frozen=True)
class Check:
    """One check of an exercise: `function(answer, case)` draws inputs, calls the answer and compares.

    by: what results are judged by, as a verdict says it: "bits", "error" where many are as right, or "training".
    last: whether it is tried only where an answer has passed all others.
    limit_s: seconds for it, where it takes longer than others by its nature; None: as all have.
    """

    exercise: str
    function: Callable
    weight: float
    by: str = "bits"
    last: bool = False
    limit_s: float | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def inputs(self) -> str:
        """What was tried, in a sentence: the first line of the check's docstring."""
        return (self.function.__doc__ or self.name.replace("_", " ")).strip().splitlines()[0]


@dataclass(frozen=True)
class Misconception:
    """A wrong answer that real people write, and one sentence of what it does."""

    exercise: str
    function: Callable
    sentence: str


@dataclass(frozen=True)
class Question:
    """A question about the real code: the right value, and what to say about likely wrong ones."""

    key: str
    right: object
    because: str
    nudges: dict
    nudge: str


CHECKS: dict[str, list[Check]] = {}
MISCONCEPTIONS: dict[str, list[Misconception]] = {}
ORACLES: dict[str, Callable] = {}
QUESTIONS: dict[str, Question] = {}


def check_for(
    exercise: str, weight: float = 1.0, *, by: str = "bits", last: bool = False, limit_s: float | None = None
) -> Callable:
    """Register the decorated `function(answer, case)` as a check of `exercise`; its docstring says which inputs.

    by, last, limit_s: as `Check` has them.
    """

    def register(function: Callable) -> Callable:
        CHECKS.setdefault(exercise, []).append(Check(exercise, function, weight, by, last, limit_s))
        return function

    return register


def misconception(exercise: str, sentence: str) -> Callable:
    """Register the decorated wrong answer; `sentence` says what it does, not that it is bad."""

    def register(function: Callable) -> Callable:
        MISCONCEPTIONS.setdefault(exercise, []).append(Misconception(exercise, function, sentence))
        return function

    return register


def oracle_for(exercise: str, function: Callable) -> None:
    """Name the exact function that stands in for `exercise` while nobody's answer is there."""
    ORACLES[exercise] = function


def question_for(key: str, right: object, because: str, nudge: str, nudges: dict | None = None) -> None:
    """Register a reading question: `because` explains the right answer, `nudges` the likely wrong ones by value."""
    QUESTIONS[key] = Question(key, right, because, nudges or {}, nudge)


def load_graders() -> None:
    """Import every chapter's grader, so that the registries are full."""
    for chapter in CHAPTERS:
        importlib.import_module(f"lowprec_lab.graders.{chapter.module}")
