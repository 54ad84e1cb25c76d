"""The values of a format as steps of a ladder, numbered through zero, and the numbers to try between two of them.

Step 0 is the first value that is not negative; the steps go on a little beyond the largest value, as if its binade had
no end: that is where it is decided what overflows. The same numbers as in rounding_explorer.js.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch

from lowprec_lab.explorers import nearest
from lowprec_lab.explorers.nearest import Real
from lowprec_lab.formats import FP32, Format
from lowprec_lab.graders import oracle

BEYOND = 3  # steps past the largest value

# The numbers tried from each step (included) to the next: where any rounding may change, and a quarter from there.
PER_GAP = 8


def first_step(fmt: Format) -> int:
    """The lowest step: past the most negative value, or the one below zero in a format without sign."""
    if not fmt.signed:
        return -1
    return -nearest.largest_finite_code(fmt) - int(not fmt.subnormals) - BEYOND


def last_step(fmt: Format) -> int:
    """The highest step, past the largest value."""
    return nearest.largest_finite_code(fmt) + BEYOND


@lru_cache(maxsize=32)
def _magnitudes(fmt: Format) -> np.ndarray:
    top = nearest.largest_finite_code(fmt)
    values = oracle.decode(torch.arange(top + 1, dtype=torch.int32), fmt).numpy()
    step = float(nearest.spacing(fmt, top))
    return np.append(values, values[-1] + step * np.arange(1, BEYOND + 1))


def value_at(fmt: Format, step: int) -> float:
    """The value of a step; exact."""
    values = _magnitudes(fmt)
    if step >= 0:
        return float(values[step])
    if fmt.signed:
        return -float(values[-step if fmt.subnormals else -step - 1])
    return -float(nearest.spacing(fmt, 0)) if fmt.subnormals else 0.0


def step_below(fmt: Format, real: Real) -> int:
    """The highest step whose value is not above `real`; one of the ends for what is beyond them."""
    low, high = first_step(fmt), last_step(fmt)
    if real != real:
        return 0
    while high > low:
        middle = (low + high + 1) // 2
        value = value_at(fmt, middle)
        if (Fraction(value) if isinstance(real, Fraction) else value) <= real:
            low = middle
        else:
            high = middle - 1
    return low


def float32_of(real: Real) -> float:
    """The float32 next to a real number, ties to even."""
    code, _ = nearest.nearest_code(real, FP32, _float32, "nearest_even", "to_special")
    return _float32(code)


def _float32(code: int) -> float:
    return float(np.array(code, dtype=np.uint32).view(np.float32))


def numbers_between(fmt: Format, first: int, last: int) -> np.ndarray:
    """What to try from step `first` to step `last`: float32, PER_GAP for each step but the last, which has one.

    For each: the value, its float32 neighbour, a quarter, the midpoint between its two float32 neighbours, three
    quarters, and the float32 before the next value.
    """
    values = np.array([value_at(fmt, step) for step in range(first, last + 1)])
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    with np.errstate(over="ignore"):
        columns = [
            low,
            _beside(low, math.inf),
            low + (high - low) / 4,
            _beside(middle, -math.inf),
            middle,
            _beside(middle, math.inf),
            high - (high - low) / 4,
            _beside(high, -math.inf),
        ]
        return np.append(np.stack(columns, axis=1).ravel(), values[-1]).astype(np.float32)


def _beside(values: np.ndarray, towards: float) -> np.ndarray:
    return np.nextafter(values.astype(np.float32), np.float32(towards))
