"""Calling an answer: with copies of data, watched for changed inputs, and held to return data.

The same code calls an answer in the notebook and in a class's sandbox, so both say the same of it.
"""

from __future__ import annotations

import functools
import importlib
import linecache
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import Format

TOO_MUCH_MEMORY = "It needs more memory than a check may take."
_MESSAGE_LIMIT = 200
# By the size of an element in bytes: the whole-number dtype that shows its bits.
BIT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# torch and numpy may be installed elsewhere than Python thinks, as in a class's sandbox.
_LIBRARIES = (
    str(Path(__file__).parent),
    sysconfig.get_paths()["stdlib"],
    sysconfig.get_paths()["purelib"],
    *(str(Path(library.__file__).parents[1]) for library in (torch, np)),
)


class AnswerFailed(Exception):
    """An answer raised, ran too long, changed its input or gave back something that is not data.

    kind: "exception", "timeout", "memory", "mutated", "type" or "undefined" (by the C standard).
    where: the learner's own line, or "".
    """

    def __init__(self, kind: str, sentence: str, where: str = "") -> None:
        super().__init__(sentence)
        self.kind, self.sentence, self.where = kind, sentence, where


def call_answer(function: Callable, args: tuple, kwargs: dict) -> object:
    """What `function` returns for copies of these arguments. Raises AnswerFailed for all that goes wrong in it."""
    return _require_data(_call(function, args, kwargs))


def differentiate_answer(function: Callable, args: tuple, kwargs: dict, gradients: tuple) -> tuple[tuple, tuple]:
    """The outputs of `function` and the gradients of its floating-point tensor arguments.

    gradients: one for each output tensor. Returns (outputs, gradients), the latter with None where nothing flows and
    for arguments that are not floating-point tensors. Raises AnswerFailed as `call_answer` does.
    """

    def both(*given: object, **named: object) -> tuple[tuple, tuple]:
        leaves = [arg.requires_grad_() for arg in given if _is_floating(arg)]
        with torch.enable_grad():
            result = function(*given, **named)
        outputs = result if isinstance(result, tuple) else (result,)
        found = iter(torch.autograd.grad(outputs, leaves, gradients, allow_unused=True))
        return tuple(o.detach() for o in outputs), tuple(next(found) if _is_floating(arg) else None for arg in given)

    return _require_data(_call(both, args, kwargs))


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def build_answer(constructor: Callable, args: tuple, kwargs: dict) -> object:
    """An object of a stateful answer, to be driven by `call_answer(getattr(object, name), ...)` alone."""
    return _call(constructor, args, kwargs)


def call_scenario(function: Callable, args: tuple, kwargs: dict, name: str, module: str) -> object:
    """What the scenario `name` of a chapter's module returns for `function` and copies of these arguments.

    A scenario is a given function that drives an answer which must be held, traced or handed something that is no
    data, and that returns data. Raises AnswerFailed as `call_answer` does.
    """
    scenario = getattr(importlib.import_module(module), name)
    return call_answer(functools.partial(scenario, function), args, kwargs)


def _call(function: Callable, args: tuple, kwargs: dict) -> object:
    handed, kept = copy_data(args), copy_data(args)
    try:
        result = function(*handed, **{key: copy_data(value) for key, value in kwargs.items()})
    except RecursionError as error:
        raise AnswerFailed("exception", "It calls itself for ever (RecursionError).", own_line(error)) from None
    except MemoryError as error:
        raise AnswerFailed("memory", TOO_MUCH_MEMORY, own_line(error)) from None
    except AnswerFailed:  # of a scenario: it has said what there is to say
        raise
    except (Exception, SystemExit) as error:
        said = _said(error)
        raise AnswerFailed("memory" if said == TOO_MUCH_MEMORY else "exception", said, own_line(error)) from None
    if not same_data(kept, handed):
        sentence = "It changes its input in place: look at the input after a call. Work on a new tensor instead."
        raise AnswerFailed("mutated", sentence)
    return result


def _said(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # a class of the answer's own, whose text cannot be had
        text = ""
    if "can't allocate memory" in text:
        return TOO_MUCH_MEMORY
    shown = text if len(text) <= _MESSAGE_LIMIT else text[: _MESSAGE_LIMIT - 1] + "…"
    return f"It raised {type(error).__name__}: {shown}" if shown else f"It raised {type(error).__name__}"


def own_line(error: BaseException) -> str:
    """The deepest line that is a learner's (not a library's) in the error's traceback: "line 3 of decode: code"."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_learners(frame.filename)]
    if not frames:
        return ""
    frame = frames[-1]
    place = f"line {frame.lineno}" + (f" of {frame.name}" if frame.name.isidentifier() else "")
    code = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{place}: {code}" if code else place


def _is_learners(filename: str) -> bool:
    return not filename.startswith(("<frozen", *_LIBRARIES))


def copy_data(value: object) -> object:
    """An independent copy of what is handed to an answer; TypeError if it is not data."""
    if type(value) is Tensor:
        return value.clone(memory_format=torch.preserve_format)
    if type(value) in (tuple, list):
        return type(value)(copy_data(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str, Format, torch.dtype)):
        return value
    raise TypeError(f"{type(value).__name__} is not data: tensors, numbers, strings, Formats, dtypes and tuples are")


def bits_of(value: Tensor) -> np.ndarray:
    """The bits of a tensor's elements as a flat int64 array."""
    return _raw(value.detach()).numpy().astype(np.int64)


def same_data(left: object, right: object) -> bool:
    """Whether two copies of the same data still have the same bits."""
    if isinstance(left, Tensor):
        # Bits, not classes: turning one NaN into another is a change too. A shape can change in place as well.
        same_kind = left.shape == right.shape and left.dtype == right.dtype
        return same_kind and torch.equal(_raw(left), _raw(right))
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(same_data(a, b) for a, b in zip(left, right, strict=True))
    return True


def _raw(value: Tensor) -> Tensor:
    """The bits of the elements, flat. The view keeps the elements' size: one of bytes fails on strides of numpy's."""
    return value.contiguous().reshape(-1).view(BIT_VIEWS[value.element_size()])


def _require_data(result: object) -> object:
    if isinstance(result, (tuple, list)):
        for item in result:
            _require_data(item)
        return result
    if result is None or isinstance(
        result, (Tensor, bool, int, float, str, Format, torch.dtype, np.generic, np.ndarray)
    ):
        return result
    raise AnswerFailed("type", f"It returned {article(type(result).__name__)}, which is not a tensor or a number.")


def article(word: str) -> str:
    """The word with "a" or "an" before it, as it is spoken ("an ndarray")."""
    return f"{'an' if word[0].lower() in 'aeiou' or word.startswith('nd') else 'a'} {word}"
