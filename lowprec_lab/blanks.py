"""Blanks: the functions of the package that a learner writes, and whose code stands in for each of them.

`@blank` turns a contract (signature and docstring, no body) into a dispatcher. The dispatcher calls the learner's
function once `fill` has installed it, else whatever `exercises.supply` finds.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lowprec_lab.chapters import CHAPTERS, Chapter


@dataclass(frozen=True)
class Blank:
    """One exercise.

    name: the function or class that the learner writes; module: its chapter's module ("bits").
    exercise: "1.5"; points; minutes it takes; uses: later blanks that an answer may call all the same.
    unlocks: what a pass opens, as a sentence. contract: the documented function without a body.
    language: "Python", or "C" where the answer returns C code that a compiler must be there for.
    """

    name: str
    module: str
    exercise: str
    points: float
    minutes: int
    uses: tuple[str, ...]
    unlocks: str
    contract: Callable
    language: str = "Python"

    @property
    def chapter(self) -> Chapter:
        return next(chapter for chapter in CHAPTERS if chapter.module == self.module)

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.contract)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts exercises as a reader meets them: 1.10 comes after 1.9."""
        chapter, number = self.exercise.split(".")
        return int(chapter), int(number)

    @property
    def page(self) -> str:
        return f"{self.chapter.name}.ipynb"


BLANKS: dict[str, Blank] = {}

# Held while an answer is loaded: ranks that are threads of one process may all need the same one first.
FINDING = threading.RLock()
# What runs for each blank in this process: the learner's own (by `fill`), or what was supplied in its place.
FILLED: dict[str, Callable] = {}
SUPPLIED: dict[str, Callable] = {}


def blank(
    exercise: str, points: float, minutes: int = 15, uses: tuple[str, ...] | list[str] = (), unlocks: str = "",
    language: str = "Python",
) -> Callable:  # fmt: skip
    """Declare the decorated contract as exercise `exercise` ("1.5") worth `points`."""

    def declare(contract: Callable) -> Callable:
        module = contract.__module__.rpartition(".")[2]
        name = contract.__name__
        BLANKS[name] = Blank(name, module, exercise, points, minutes, tuple(uses), unlocks, contract, language)

        @functools.wraps(contract)
        def dispatcher(*args: object, **kwargs: object) -> object:
            return current(name)(*args, **kwargs)

        for method, value in vars(contract).items():
            if isinstance(value, classmethod):  # a class's other ways to make an object: `Float8Linear.from_linear`
                setattr(dispatcher, method, _class_method(name, method))
        dispatcher.__lowprec_blank__ = name
        dispatcher.__mro_entries__ = lambda _bases: (current(name),)  # so that a class can inherit from the answer
        return dispatcher

    return declare


def _class_method(name: str, method: str) -> Callable:
    return lambda *args, **kwargs: getattr(current(name), method)(*args, **kwargs)


def current(name: str, say: bool = True) -> Callable:
    """The function that runs for a blank now: the learner's, else a supplied one. Raises AnswerError.

    say: print whose it is, where it is not the learner's, once until an answer changes.
    """
    if name in FILLED:
        return FILLED[name]
    if name not in SUPPLIED:
        _supply(name)
    if say and name in _UNSAID and (line := _UNSAID.pop(name, "")):
        print(line)
    return SUPPLIED[name]


def _supply(name: str) -> None:
    from lowprec_lab.exercises import supply

    with FINDING:
        if name in SUPPLIED:  # another thread has found it meanwhile
            return
        supplied = supply(name)
        if supplied.origin in ("reference", "oracle"):
            _UNSAID[name] = supplied.line
        SUPPLIED[name] = supplied.function


_UNSAID: dict[str, str] = {}  # what stands in for a blank, and has only been called by what stands in for another one


def install(name: str, function: Callable) -> None:
    """Make `function` what runs for a blank, here and wherever the package calls it."""
    FILLED[name] = function
    forget_supplied()
    setattr(sys.modules[f"lowprec_lab.{BLANKS[name].module}"], name, function)
    if "torch._dynamo" in sys.modules:  # compiled code still holds the old function, and refills use up its limit
        sys.modules["torch._dynamo"].reset()


def forget_supplied() -> None:
    """Have everything that stands in for a blank looked up again: it may be built on an answer that changed."""
    SUPPLIED.clear()
    _UNSAID.clear()


def blank_of(thing: object) -> Blank | None:
    """The blank that a dispatcher, an answer or a name stands for; None if it is no exercise."""
    load_chapters()
    name = thing if isinstance(thing, str) else getattr(thing, "__lowprec_blank__", None)
    return BLANKS.get(name)


def load_chapters() -> None:
    """Import every chapter's module, so that BLANKS is full."""
    for chapter in CHAPTERS:
        importlib.import_module(f"lowprec_lab.{chapter.module}")


def in_order() -> list[Blank]:
    """Every blank of the course, as a reader meets them."""
    load_chapters()
    return sorted(BLANKS.values(), key=lambda each: each.order)


def earlier_than(name: str) -> list[Blank]:
    """The blanks that an answer to `name` may call: all earlier ones, and those that its contract names in `uses`."""
    this = BLANKS[name]
    return [other for other in in_order() if other.order < this.order or other.name in this.uses]
