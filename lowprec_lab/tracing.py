"""What torch.compile needs before it can follow an answer: numbers that do not depend on tensors, as numbers."""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable

from lowprec_lab import blanks
from lowprec_lab.formats import Format

_CONSTANTS = ("max_finite", "min_normal", "min_subnormal", "machine_epsilon")


def with_constants(function: Callable, fmt: Format) -> Callable:
    """`function` with its own names for `max_finite(fmt)` and the like bound to the numbers: no compiler needs to look
    into the code that works them out, which may not be made of operations on tensors."""
    name = getattr(function, "__lowprec_blank__", None)
    if name is not None and hasattr(function, "__wrapped__"):  # a dispatcher: what it stands for now
        function = blanks.current(name)
    if not isinstance(function, types.FunctionType):
        return function
    return _bound(function, fmt, {})


def _bound(function: types.FunctionType, fmt: Format, done: dict) -> types.FunctionType:
    if function in done:
        return done[function]
    names = dict(function.__globals__)
    names.pop("__name__", None)  # else Dynamo looks names up in the module of this name, and not here
    names.setdefault("__builtins__", builtins)
    done[function] = copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    for name in function.__code__.co_names:
        value = names.get(name)
        if name in _CONSTANTS and callable(value):
            names[name] = _constant(value, fmt)
        elif isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
            names[name] = _bound(value, fmt, done)
    return copy


def _constant(ask: Callable, fmt: Format) -> Callable:
    number = ask(fmt)
    return lambda _fmt: number
