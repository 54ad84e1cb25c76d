"""Running totals: the sum of the first n numbers for every n, by whoever's code is in use and by the definition.

The numbers are a start and then one increment again and again. The definition is worked out here step by step. An
answer gets many sums at once, as rows of a matrix, and is drawn where it differs from the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lowprec_lab.explorers import nearest
from lowprec_lab.formats import FP32, Format
from lowprec_lab.graders import oracle, registry
from lowprec_lab.tables import NotUsableError, ask

METHODS = {"sequential": "sum_sequential", "pairwise": "sum_pairwise", "kahan": "sum_kahan"}

FEWEST, MOST = 32, 2304

# An answer is asked for so many totals, of so many additions: each of them is a step in Python.
_ASKED, _ASKED_UP_TO = 65, 512


@dataclass(frozen=True)
class Totals:
    """values: float32, the sum after 0, 1, 2 ... additions. origin, line, note: as in `tables.Table`."""

    values: np.ndarray
    origin: str
    line: str
    note: str


class Rounder:
    """Rounds a result to a format by way of float32; beyond the largest value, to what the format has for that."""

    def __init__(self, fmt: Format) -> None:
        code = nearest.largest_finite_code(fmt)
        self.is_float32 = fmt.mantissa_bits >= FP32.mantissa_bits
        self.largest = oracle.decode(torch.tensor([code], dtype=torch.int32), fmt).item()
        self.special = {"ieee": math.inf, "finite": self.largest}.get(fmt.specials, math.nan)
        self.mantissa_bits = fmt.mantissa_bits
        self.lowest_exponent = 1 - fmt.bias

    def __call__(self, value: float) -> float:
        value = float(np.float32(value))
        if self.is_float32 or value == 0 or math.isnan(value):
            return value
        if math.isinf(value):
            return math.copysign(self.special, value)
        exponent = max(math.frexp(value)[1] - 1, self.lowest_exponent)
        step = math.ldexp(1.0, exponent - self.mantissa_bits)
        rounded = round(value / step) * step  # both exact; Python rounds a tie to even
        return rounded if abs(rounded) <= self.largest else math.copysign(self.special, value)


def how_many(fmt: Format, start: float, increment: float) -> int:
    """How many additions are worth a look: twice as many as it takes until the total stops."""
    if increment == 0 or not math.isfinite(increment) or not math.isfinite(start):
        return FEWEST
    # The total stops at the power of two where the increment is half of the distance between values.
    stop = 2.0 ** math.ceil(math.log2(abs(increment)) + fmt.mantissa_bits + 1)
    return int(min(max(2 * (stop - abs(start)) / abs(increment), FEWEST), MOST))


def by_definition(method: str, fmt: Format, start: float, increment: float, count: int) -> np.ndarray:
    """The exact running totals, float32. start and increment: values of the format."""
    rounded = Rounder(fmt)
    work = {"sequential": _sequential, "pairwise": _pairwise, "kahan": _kahan}[method]
    with np.errstate(over="ignore"):
        return np.array(work(rounded, start, increment, count), dtype=np.float32)


def _sequential(rounded: Rounder, start: float, increment: float, count: int) -> list[float]:
    totals = [start]
    for _ in range(count):
        totals.append(rounded(totals[-1] + increment))
    return totals


def _kahan(rounded: Rounder, start: float, increment: float, count: int) -> list[float]:
    totals, lost = [start], 0.0
    for _ in range(count):
        y = rounded(increment - lost)
        total = rounded(totals[-1] + y)
        lost = rounded(rounded(total - totals[-1]) - y)
        totals.append(total)
    return totals


def _pairwise(rounded: Rounder, start: float, increment: float, count: int) -> list[float]:
    def tree(length: int, first: float) -> float:
        """`length` numbers, all the same but for the first; at every level only the last becomes another one."""
        middle = last = increment if length > 1 else first
        while length > 1:
            if length == 2:
                return rounded(first + last)
            first, last = rounded(first + middle), last if length % 2 else rounded(middle + last)
            middle, length = rounded(middle + middle), (length + 1) // 2
        return first

    if start:
        return [tree(n + 1, start) for n in range(count + 1)]
    return [0.0] + [tree(n, increment) for n in range(1, count + 1)]


def asked_of(count: int) -> np.ndarray:
    """After how many additions an answer is asked for its total: after each, or after each at first and then some."""
    last = min(count, _ASKED_UP_TO)
    if last < _ASKED:
        return np.arange(last + 1)
    return np.unique(np.append(np.arange(_ASKED // 2), np.linspace(0, last, _ASKED // 2).round().astype(int)))


def rows(method: str, start: float, increment: float, n: np.ndarray) -> torch.Tensor:
    """float32, a row for each n: its numbers, filled up with zeros where they change nothing."""
    longest = int(n[-1])
    places, additions = torch.arange(longest), torch.from_numpy(n)
    if method == "pairwise":
        filled = torch.where(places < additions[:, None], increment, 0.0)
        return torch.cat([torch.full((len(n), 1), start), filled], dim=1) if start else filled
    filled = torch.where(places >= longest - additions[:, None], increment, 0.0)
    padded = torch.cat([torch.zeros(len(n), 1), filled], dim=1)
    padded[torch.arange(len(n)), longest - additions] = start
    return padded


def totals(method: str, fmt: Format, start: float, increment: float, count: int) -> Totals:
    """The running totals by the answer in use for the method's exercise, else by the definition."""
    right = by_definition(method, fmt, start, increment, count)
    n = asked_of(count)

    def use(function: Callable) -> np.ndarray:
        if function in (by_definition, registry.ORACLES.get(METHODS[method])):
            return right[n]
        result = function(rows(method, start, increment, n), fmt)
        if not isinstance(result, torch.Tensor):
            raise NotUsableError(f"returned {type(result).__name__}, not a tensor")
        if result.shape != n.shape or not result.dtype.is_floating_point:
            raise NotUsableError(f"returned {result.dtype} of the shape {tuple(result.shape)} for {len(n)} rows")
        return result.detach().to(torch.float32).numpy().copy()

    found, origin, line, note = ask(METHODS[method], use, exact=by_definition)
    wrong = int(np.count_nonzero(~((found == right[n]) | (np.isnan(found) & np.isnan(right[n])))))
    if not wrong:
        return Totals(right, origin, line, note)
    note = f"differs from the definition for {wrong:,} of the {len(n):,} totals it was asked for"
    held = np.searchsorted(n, np.arange(n[-1] + 1), side="right") - 1  # between two of them, the one before
    return Totals(found[held], origin, line, note)


def stop_of(values: np.ndarray) -> int | None:
    """After how many additions the total stays what it is to the end, where that is seen for a while; else None."""
    moving = np.flatnonzero(values[1:] != values[:-1])
    last = int(moving[-1]) + 1 if len(moving) else 0
    return last if len(values) - 1 - last >= max(4, len(values) // 16) else None
