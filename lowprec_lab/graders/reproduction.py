"""The line under "try it": a call that the learner can type, as small as it can be, on which the mistake still shows.

An element cut out of a tensor no longer shows a mistake that needs its neighbours, and a row of a product of matrices
is no product. So a smaller call is tried before it is shown, on the exact oracle and on the answer. Where no element
will do alone, elements are left out as long as the mistake stays (delta debugging: Zeller and Hildebrandt, Simplifying
and Isolating Failure-Inducing Input, 2002).
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.blanks import Blank
from lowprec_lab.graders.case import Answer, Call, Case, Record, tokens_of
from lowprec_lab.graders.counterexample import call_text, line_of, row_of
from lowprec_lab.graders.registry import ORACLES, Check
from lowprec_lab.graders.run import run_check

_FEW_ELEMENTS = 24
# When no smaller call will do: as many numbers as can still be pasted. A block of Q4_K has 256.
_MANY_ELEMENTS = 256
_LIMIT_S = 2.0
_THINNING_S = 1.0


def try_it(blank: Blank, function: Callable | None, record: Record, index: int | None = None) -> str:
    """The smallest call that shows what `record` found (at element `index`), as text.

    function: the answer, which is called again; when None, a smaller call has to have the same right result.
    """

    def shows(call: Call) -> bool:
        return _differs(blank, function, call) if function else _has_result(blank, call, record, index)

    return _first_that(shows, blank, record, index)


def try_again(blank: Blank, function: Callable | None, call: Call | None) -> str:
    """The smallest call on which `function` fails as it did for `call`, as text; without a function, a small one that
    makes sense."""
    if call is None:
        return ""
    record = Record(call, (), (), np.zeros(0, bool), np.zeros((0, 0)))

    def shows(call: Call) -> bool:
        return _differs(blank, function, call) if function else _makes_sense(blank, call)

    return _first_that(shows, blank, record, None)


def _first_that(shows: Callable[[Call], bool], blank: Blank, record: Record, index: int | None) -> str:
    calls = list(_smaller(record, index))
    if not record.call.repeatable or blank.name not in ORACLES:
        return call_text(blank, calls[0])
    found = next(filter(shows, calls), None) or _thinned(record, shows) or _few_rows(record, shows)
    return call_text(blank, found or next((call for call in calls[::-1] if _makes_sense(blank, call)), calls[-1]))


def _makes_sense(blank: Blank, call: Call) -> bool:
    """Whether a part of a call is one that can be made: a block has all its numbers."""
    if not call.cut:
        return True
    try:
        call.made_on(ORACLES[blank.name])
    except Exception:
        return False
    return True


def _thinned(record: Record, shows: Callable[[Call], bool]) -> Call | None:
    """The call with elements left out, as many as a second allows; None where results are not one for each."""
    tensors = [arg for arg in record.call.args if isinstance(arg, Tensor)]
    want = record.want[0] if record.want else None
    if not (tensors and isinstance(want, Tensor) and all(arg.shape == want.shape for arg in tensors)):
        return None
    kept, parts, ends = np.arange(want.numel()), 2, time.monotonic() + _THINNING_S
    while len(kept) > 1 and parts <= len(kept) and time.monotonic() < ends:
        pieces = np.array_split(kept, parts)
        rests = (np.concatenate(pieces[:place] + pieces[place + 1 :]) for place in range(parts))
        in_time = itertools.takewhile(lambda _: time.monotonic() < ends, rests)
        fewer = next((rest for rest in in_time if shows(_elements(record.call, rest))), None)
        kept, parts = (kept, 2 * parts) if fewer is None else (fewer, max(parts - 1, 2))
    return _elements(record.call, kept) if len(kept) <= _MANY_ELEMENTS else None


def _few_rows(record: Record, shows: Callable[[Call], bool]) -> Call | None:
    """The call with one row, or two, of what has as many rows everywhere; None where none shows it within a second."""
    tensors = [arg for arg in record.call.args if isinstance(arg, Tensor)]
    if not tensors or any(arg.dim() < 2 or len(arg) != len(tensors[0]) for arg in tensors):
        return None
    ends = time.monotonic() + _THINNING_S
    for rows in (1, 2):
        if sum(arg[:rows].numel() for arg in tensors) > _MANY_ELEMENTS:
            return None
        for first in range(len(tensors[0])):
            call = _cut(record.call, lambda arg, first=first, rows=rows: arg[first : first + rows])
            if time.monotonic() > ends:
                return None
            if shows(call):
                return call
    return None


def _elements(call: Call, which: np.ndarray) -> Call:
    return _cut(call, lambda arg: arg.reshape(-1)[torch.from_numpy(which)])


def _smaller(record: Record, index: int | None) -> Iterator[Call]:
    """One element of each tensor, or one row, where the result has as many; all of a few; a whole row, for blocks of a
    row; a corner; a row that becomes one of another length; all of many."""
    call, want = record.call, record.want[0] if record.want else None
    tensors = [arg for arg in call.args if isinstance(arg, Tensor)]
    if index is not None and isinstance(want, Tensor):
        if all(arg.shape == want.shape for arg in tensors):
            yield _cut(call, lambda arg: arg.reshape(-1)[index : index + 1])
        if all(row_of(arg, want, index) is not None for arg in tensors):
            yield _cut(call, lambda arg: row_of(arg, want, index))
    if all(arg.numel() <= _FEW_ELEMENTS for arg in tensors):
        yield call
        return
    if index is not None and isinstance(want, Tensor):
        rows = [_row_around(arg, want, index) for arg in tensors]
        if all(row is not None for row in rows) and sum(row.numel() for row in rows) <= _MANY_ELEMENTS:
            yield _cut(call, lambda arg: _row_around(arg, want, index))
    yield _cut(call, _corner)
    if tensors and all(arg.dim() > 1 and line_of(arg, want, index) is not None for arg in tensors):
        yield _cut(call, lambda arg: line_of(arg, want, index))
    if sum(arg.numel() for arg in tensors) <= _MANY_ELEMENTS:
        yield call


def _row_around(arg: Tensor, want: Tensor, index: int) -> Tensor | None:
    """The row that result `index` is in, of as many dimensions as before; None where rows do not belong together."""
    if not (arg.dim() and want.dim()) or arg.shape[:-1] != want.shape[:-1] or index >= want.numel():
        return None
    row = arg.reshape(want.numel() // want.shape[-1], arg.shape[-1])[index // want.shape[-1]]  # which may be empty
    return row.reshape((1,) * (arg.dim() - 1) + row.shape)


def _cut(call: Call, part: Callable[[Tensor], Tensor]) -> Call:
    return replace(call, args=tuple(part(arg) if isinstance(arg, Tensor) else arg for arg in call.args), cut=True)


def _corner(value: Tensor) -> Tensor:
    """A few elements that keep the tensor's number of dimensions: a failure may depend on it. All, if there are few."""
    if value.numel() <= _FEW_ELEMENTS:
        return value
    few = 3 if value.dim() == 1 else 2
    return value[(slice(few),) * value.dim()]


def _differs(blank: Blank, function: Callable, call: Call) -> bool:
    """Whether the answer still differs from the oracle on this call."""
    try:
        right = call.made_on(ORACLES[blank.name])
    except Exception as error:  # what was cut out may make no sense; a whole call may be one that has to raise
        if call.cut:
            return False
        again = _raises(type(error), call)
    else:
        again = _gives(right, call)
    return not run_check(Check(blank.name, again, 1.0), function, 0, limit_s=_LIMIT_S).passed


def _gives(right: object, call: Call) -> Callable:
    def again(answer: Answer, case: Case) -> None:
        run = functools.partial(answer.run, call.scenario) if call.scenario else answer
        got = run(*call.args, **call.kwargs)
        if not isinstance(right, tuple):
            case.same_bits(got, right)
        elif not isinstance(got, tuple) or len(got) != len(right):
            case.same_bits(type(got).__name__, "tuple")
        else:
            for part, other in zip(got, right, strict=True):
                case.same_bits(part, other)

    return again


def _raises(error: type[Exception], call: Call) -> Callable:
    return lambda answer, case: case.raises(error, answer, *call.args, **call.kwargs)


def _has_result(blank: Blank, call: Call, record: Record, index: int | None) -> bool:
    """Whether the right result of a smaller call is what the record expects of its element."""
    if not call.cut:
        return True
    try:
        right = call.made_on(ORACLES[blank.name])
    except Exception:  # what was cut out makes no sense
        return False
    found = [tokens_of(part) for part in (right if isinstance(right, tuple) else (right,))]
    wanted = [tokens_of(part)[index : index + 1] for part in record.want]
    return len(found) == len(wanted) and all(map(np.array_equal, found, wanted))
