"""What a check works with: an answer that is called with data, and a case that records how the results compare.

Only data goes to an answer and only data comes back (tensors, numbers, strings, Formats, tuples), so the same check
judges a function in this process or one behind a pipe. Every comparison is recorded element by element, as bits: the
verdict shows the first difference, and the naming of misconceptions compares whole records.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.calls import (
    AnswerFailed,
    article,
    bits_of,
    build_answer,
    call_answer,
    call_scenario,
    differentiate_answer,
)

# All NaNs of a dtype compare equal: formats disagree about payloads, never about being NaN.
_NAN_TOKEN = np.int64(-(2**63) + 1)


@dataclass
class Call:
    """One call of the answer: positional arguments and keywords, as they were handed over.

    scenario: the function of the chapter's module that drove the answer, if one did. repeatable: whether the call alone
    says what happened (a method's result depends on the calls before it). cut: whether only a part of what was handed
    over is left.
    """

    args: tuple
    kwargs: dict = field(default_factory=dict)
    scenario: Callable | None = None
    repeatable: bool = True
    cut: bool = False

    def made_on(self, function: Callable) -> object:
        """What the same call of another function gives."""
        return self.scenario(function, *self.args) if self.scenario else function(*self.args, **self.kwargs)


@dataclass
class Record:
    """One comparison. `got` and `want` are the results; arrays have one row per part and one column per element.

    problem: (kind, sentence) when the results cannot be compared at all; every element counts as wrong then, and `got`
    is empty. right: what `want` is called in a verdict. about: what to say of the element that is shown, from its
    index: which part of a result it is, its block. parts: the names of several results.
    """

    call: Call
    want: tuple
    got: tuple
    wrong: np.ndarray
    tokens: np.ndarray
    show: object = None
    problem: tuple[str, str] | None = None
    right: str = "right"
    about: Callable[[int], str] | None = None
    parts: tuple[str, ...] = ()

    @property
    def cases(self) -> int:
        return self.wrong.size


def tokens_of(value: object) -> np.ndarray:
    """The bits of a tensor's elements, or of a number, as a flat int64 array, with one token for every NaN."""
    if isinstance(value, Tensor):
        bits = bits_of(value)
        if value.dtype.is_floating_point:
            bits = np.where(value.detach().reshape(-1).isnan().numpy(), _NAN_TOKEN, bits)
        return bits
    if isinstance(value, float):
        return tokens_of(torch.tensor([value], dtype=torch.float64))
    return np.array([zlib.crc32(repr(value).encode()) if not isinstance(value, int) else _small(value)], dtype=np.int64)


def _small(value: int) -> int:
    return value if -(2**63) <= value < 2**63 else zlib.crc32(repr(value).encode())


def type_problem(got: object, want: object, what: str = "It returned") -> tuple[str, str] | None:
    """Why `got` cannot be compared with `want`: the type, then the dtype, then the shape. None if it can."""
    if want is None and type(got) is float:
        return None  # a number where there is none is a wrong value, like any other
    if type(got) is not type(want):
        expected = "None" if want is None else f"{article(type(want).__name__)}"
        given = "None (is a `return` missing?)" if got is None else article(type(got).__name__)
        return "type", f"{what} {given}; {expected} is expected."
    if not isinstance(want, Tensor):
        return None
    if got.device != want.device:
        return "device", f"{what} a tensor on {got.device}; one on {want.device} is expected, like the input."
    if got.dtype != want.dtype:
        return "dtype", f"{what} {_dtype(got)}; {_dtype(want)} is expected."
    if got.shape != want.shape:
        return "shape", f"{what} a tensor of shape {tuple(got.shape)}; {tuple(want.shape)} is expected."
    return None


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


class Case:
    """The inputs of one check and the record of its comparisons.

    rng: numpy generator that depends only on the seed and the check's name.
    size: multiplies the number of random inputs (the naming of misconceptions looks twice, the second time harder).
    """

    def __init__(self, seed: int, name: str, size: int = 1) -> None:
        self.rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self.size = size
        self.records: list[Record] = []
        self.last_call: Call | None = None

    def count(self, base: int) -> int:
        """`base` random inputs, more of them when the case is a larger one."""
        return base * self.size

    def same_bits(
        self, got: object, want: object, *, show: object = None, parts: tuple[str, ...] = (), right: str = "right",
        about: Callable[[int], str] | None = None,
    ) -> None:  # fmt: skip
        """Record whether `got` equals `want`: type, dtype and shape first, then every element's bits, NaN by class.

        show: how to display a result: a Format (its codes as bit strips) or a function from an element to text.
        parts: names of the elements of a tuple result ("sign", "exponent", "mantissa"); without `show`, a verdict has
        the first one that differs.
        right: what `want` is called in a verdict: "right", or "at most" where it is a bound. about: a line for the
        verdict on the element with this index, where value and input do not say enough.
        """
        wants = want if isinstance(want, tuple) else (want,)
        gots = got if isinstance(want, tuple) else (got,)
        problem = _tuple_problem(got, want, parts) if isinstance(want, tuple) else None
        if problem is None:
            found = (type_problem(g, w, part) for part, g, w in zip(_named(parts, wants), gots, wants, strict=True))
            problem = next(filter(None, found), None)
        expected = np.stack([tokens_of(w) for w in wants])
        if problem:
            # What came back is not kept: nobody shows it, and it may be large, for every call again. At least one
            # element counts as wrong, also where nothing was expected.
            wrong = np.ones(max(1, expected.shape[1]), bool)
            record = Record(self.last_call, wants, (), wrong, expected, show, problem, right, about, parts)
        else:
            tokens = np.stack([tokens_of(g) for g in gots])
            wrong = (tokens != expected).any(axis=0)
            record = Record(self.last_call, wants, gots, wrong, tokens, show, None, right, about, parts)
        self.records.append(record)

    def raises(self, error: type[Exception], answer: Answer, *args: object, **kwargs: object) -> None:
        """Record whether the answer raises `error` (or a known subclass) for these arguments: one comparison."""
        try:
            result = answer(*args, **kwargs)
            outcome = f"no error; it returned {article(type(result).__name__)}"
        except AnswerFailed as failure:
            found = _RAISED.match(failure.sentence)
            if failure.kind != "exception" or not found:
                raise
            outcome = found.group(1)
        outcome = error.__name__ if outcome in _names_of(error) else outcome
        wrong = np.array([outcome != error.__name__])
        self.records.append(Record(self.last_call, (error.__name__,), (outcome,), wrong, tokens_of(outcome)[None], str))


_RAISED = re.compile(r"It raised (\w+)")


def _names_of(error: type[Exception]) -> set[str]:
    """The names of an exception and of Python's and the package's kinds of it: an answer elsewhere has no others."""
    own = {error.__name__} if error.__module__.split(".")[0] in ("builtins", "lowprec_lab") else set()
    return own.union(*(_names_of(kind) for kind in error.__subclasses__()))


def _named(parts: tuple[str, ...], wants: tuple) -> list[str]:
    if not parts and len(wants) == 1:
        return ["It returned"]
    return [f"The {part} is" for part in (parts or ("result",) * len(wants))]


def _tuple_problem(got: object, want: tuple, parts: tuple[str, ...]) -> tuple[str, str] | None:
    expected = f"a tuple of {len(want)}" + (f" ({', '.join(parts)})" if parts else "")
    if type(got) is not tuple:
        return "type", f"It returned {article(type(got).__name__)}; {expected} is expected."
    if len(got) != len(want):
        return "type", f"It returned a tuple of {len(got)}; {expected} is expected."
    return None


class Answer:
    """An answer under judgement, as a check drives it; `case` remembers the last call.

    The answer is a function (or class) of this process, or stands for one in another: then it has a method `elsewhere`.
    """

    def __init__(self, function: Callable, case: Case) -> None:
        self.function, self.case = function, case

    def __call__(self, *args: object, **kwargs: object) -> object:
        """What the answer returns for these arguments."""
        return self._drive("call", call_answer, Call(args, kwargs))

    def differentiate(self, *args: object, gradients: tuple, **kwargs: object) -> tuple[tuple, tuple]:
        """(outputs, gradients of the floating-point arguments) for these gradients of the outputs."""
        return self._drive("differentiate", differentiate_answer, Call(args, kwargs, repeatable=False), gradients)

    def run(self, scenario: Callable, *args: object) -> object:
        """What a scenario of the chapter's module returns for the answer: `scenario(answer, *args)`, run beside it."""
        call = Call(args, scenario=scenario)
        return self._drive("scenario", call_scenario, call, scenario.__name__, scenario.__module__)

    def build(self, *args: object, **kwargs: object) -> Answered:
        """An object of a stateful answer: `answer.build(2.0**16).update(True)` calls its methods with data."""
        return Answered(self, self._drive("build", build_answer, Call(args, kwargs, repeatable=False)))

    def _drive(self, verb: str, here: Callable, call: Call, *more: object) -> object:
        self.case.last_call = call
        drive = getattr(self.function, "elsewhere", None)
        drive = functools.partial(drive, verb) if drive else functools.partial(here, self.function)
        return drive(call.args, call.kwargs, *more)


class Answered:
    """An object that an answer built. Its methods take and return data.

    In another process `thing` is a number that stands for the object there.
    """

    def __init__(self, answer: Answer, thing: object) -> None:
        self._answer, self._thing = answer, thing

    def __getattr__(self, name: str) -> Callable:
        def method(*args: object, **kwargs: object) -> object:
            self._answer.case.last_call = Call(args, kwargs, repeatable=False)
            elsewhere = getattr(self._answer.function, "elsewhere", None)
            if elsewhere:
                return elsewhere("method", args, kwargs, self._thing, name)
            return call_answer(getattr(self._thing, name), args, kwargs)

        return method
