"""Which known misconception an answer behaves like, if exactly one fits.

A misconception is named only when the answer agrees with it on every input where either of them is wrong, on at least
three distinct inputs, when no rival fits as well, and when all that still holds on a second, larger set of inputs.
No name is better than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from torch import Tensor

from lowprec_lab.calls import bits_of
from lowprec_lab.graders.case import Record
from lowprec_lab.graders.counterexample import line_of, row_of
from lowprec_lab.graders.registry import MISCONCEPTIONS, Check, Misconception
from lowprec_lab.graders.run import Outcome, run_check, run_checks

_DISTINCT_INPUTS = 3
_SECOND_LOOK_SIZE = 4


def name_misconception(exercise: str, function: Callable, outcomes: list[Outcome], seed: int) -> Misconception | None:
    """The one known misconception of `exercise` that explains all of `outcomes`, or None."""
    suspects = [m for m in MISCONCEPTIONS.get(exercise, []) if _explains(m, outcomes, seed, 1)]
    if len(suspects) != 1:
        return None
    second_look = run_checks(exercise, function, seed=seed + 1, size=_SECOND_LOOK_SIZE)
    return suspects[0] if _explains(suspects[0], second_look, seed + 1, _SECOND_LOOK_SIZE) else None


@lru_cache(maxsize=1024)
def known_outcome(wrong: Misconception, check: Check, seed: int, size: int) -> Outcome:
    """What one check finds out about a known misconception."""
    return run_check(check, wrong.function, seed, size)


def _explains(suspect: Misconception, actual: list[Outcome], seed: int, size: int) -> bool:
    distinct: set = set()
    for ours in actual:  # check by check: most suspects are cleared by the first one
        theirs = known_outcome(suspect, ours.check, seed, size)
        if _failure_of(theirs) != _failure_of(ours) or len(theirs.records) != len(ours.records):
            return False
        for known, found in zip(theirs.records, ours.records, strict=True):
            if not _same_where_wrong(known, found):
                return False
            distinct.update(_wrong_inputs(found, _DISTINCT_INPUTS))
        if ours.failure:
            distinct.add((ours.check.name, "failure"))
    return len(distinct) >= _DISTINCT_INPUTS


def _failure_of(outcome: Outcome) -> tuple | None:
    failure = outcome.failure
    return failure and (failure.kind, failure.sentence.split(":")[0])


def _same_where_wrong(known: Record, found: Record) -> bool:
    if (known.problem is None) != (found.problem is None):
        return False
    if found.problem is not None:
        return known.problem == found.problem
    either = known.wrong | found.wrong
    return np.array_equal(known.tokens[:, either], found.tokens[:, either])


def _wrong_inputs(record: Record, limit: int) -> list[tuple]:
    """Up to `limit` distinct inputs of the elements that came out wrong."""
    found: list[tuple] = []
    for index in np.flatnonzero(record.wrong)[:64]:
        key = input_key(record, int(index))
        if key not in found:
            found.append(key)
        if len(found) == limit:
            break
    return found


def input_key(record: Record, index: int) -> tuple:
    """What element `index` of a comparison came from: the bits of each argument's element or row, or its repr."""
    want = record.want[0]
    if isinstance(want, Tensor) and not want.numel():  # nothing was expected, and something else came
        return tuple(_whole(arg) for arg in (*record.call.args, *record.call.kwargs.values()))
    return tuple(_part(arg, want, index) for arg in (*record.call.args, *record.call.kwargs.values()))


def _part(arg: object, want: object, index: int) -> object:
    row = row_of(arg, want, index)
    row = line_of(arg, want, index) if row is None else row
    return int(bits_of(arg)[index]) if _elementwise(arg, want) else _whole(arg if row is None else row)


def _elementwise(arg: object, want: object) -> bool:
    return isinstance(arg, Tensor) and isinstance(want, Tensor) and arg.shape == want.shape


def _whole(arg: object) -> object:
    return bits_of(arg).tobytes() if isinstance(arg, Tensor) else repr(arg)
