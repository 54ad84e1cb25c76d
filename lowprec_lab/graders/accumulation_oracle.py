"""The exact oracle for sums in low precision: one operation in numpy's float32, then one rounding to the format.

The loops run over the elements of a sum in numpy, all sums of a batch at once. Rounding is a search between breakpoints
for formats of at most 16 bits (`rounding_oracle`), and a division by the format's step in float64 for wider ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import Format
from lowprec_lab.graders import oracle, rounding_oracle

_FIRST_NAN_BITS = 0x7F800001


def _beyond(fmt: Format, largest: float) -> float:
    """What lies beyond the largest value becomes: the special value that the format has, else the largest."""
    return {"ieee": math.inf, "finite": largest}.get(fmt.specials, math.nan)


@lru_cache(maxsize=256)
def rounder(fmt: Format) -> Callable[[np.ndarray], np.ndarray]:
    """A function that rounds a float32 array to `fmt`: nearest, ties to even, beyond the largest value to special."""
    nearest_magnitude = _by_search(fmt) if fmt.width <= 16 else _by_division(fmt)

    def nearest(x: np.ndarray) -> np.ndarray:
        magnitude = nearest_magnitude(x)
        if not fmt.signed:
            return np.where(x < 0, np.float32(np.nan), magnitude)
        rounded = np.copysign(magnitude, x)
        return np.where(rounded == 0, np.float32(0), rounded) if fmt.specials == "fnuz" else rounded

    return nearest


def _by_search(fmt: Format) -> Callable[[np.ndarray], np.ndarray]:
    steps, _ = rounding_oracle.ladder(fmt)
    starts = np.append(rounding_oracle.breakpoints(fmt, "nearest_even", False), _FIRST_NAN_BITS).astype(np.uint32)
    outcomes = np.append(steps, [_beyond(fmt, steps[-1]), math.nan]).astype(np.float32)

    def nearest_magnitude(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
        return outcomes[np.searchsorted(starts, bits, "right")]

    return nearest_magnitude


def _by_division(fmt: Format) -> Callable[[np.ndarray], np.ndarray]:
    smallest, largest = oracle.min_normal(fmt), oracle.max_finite(fmt)
    bottom = math.frexp(smallest)[1] - 1

    def nearest_magnitude(x: np.ndarray) -> np.ndarray:
        wide = np.abs(x.astype(np.float64))
        step = np.ldexp(1.0, np.maximum(np.frexp(wide)[1] - 1, bottom) - fmt.mantissa_bits)
        near = np.rint(wide / step) * step  # the quotient is exact: a step is a power of two
        if not fmt.subnormals:
            near = np.maximum(near, smallest)
        return np.where(near > largest, _beyond(fmt, largest), near).astype(np.float32)

    return nearest_magnitude


def rows_of(x: Tensor) -> np.ndarray:
    """(..., n) as a float32 array of (number of sums, n)."""
    return x.numpy().reshape(math.prod(x.shape[:-1]), x.shape[-1])


def as_sums(totals: np.ndarray, x: Tensor) -> Tensor:
    """The totals of `rows_of(x)` in the shape of x without its last dimension."""
    return torch.from_numpy(np.ascontiguousarray(totals, dtype=np.float32)).reshape(x.shape[:-1])


@np.errstate(all="ignore")
def sum_sequential(x: Tensor, fmt: Format) -> Tensor:
    """One element after the other; every total is rounded."""
    nearest = rounder(fmt)
    elements = nearest(rows_of(x))
    total = np.zeros(len(elements), dtype=np.float32)
    for column in elements.T:
        total = nearest(total + column)
    return as_sums(total, x)


@np.errstate(all="ignore")
def sum_pairwise(x: Tensor, fmt: Format) -> Tensor:
    """Neighbours first; the last of an odd number moves on as it is."""
    nearest = rounder(fmt)
    parts = nearest(rows_of(x))
    while parts.shape[1] > 1:
        even = parts.shape[1] // 2 * 2
        parts = np.concatenate([nearest(parts[:, 0:even:2] + parts[:, 1:even:2]), parts[:, even:]], axis=1)
    return as_sums(parts[:, 0] if parts.shape[1] else np.zeros(len(parts)), x)


@np.errstate(all="ignore")
def sum_kahan(x: Tensor, fmt: Format) -> Tensor:
    """Kahan's sum; each of its four operations is rounded."""
    nearest = rounder(fmt)
    elements = nearest(rows_of(x))
    total = lost = np.zeros(len(elements), dtype=np.float32)
    for column in elements.T:
        y = nearest(column - lost)
        t = nearest(total + y)
        lost = nearest(nearest(t - total) - y)
        total = t
    return as_sums(total, x)


@np.errstate(all="ignore")
def dot_product(a: Tensor, b: Tensor, product_fmt: Format, accumulator_fmt: Format) -> Tensor:
    """Products rounded to one format, totals to the other."""
    products = rounder(product_fmt)(rows_of(a) * rows_of(b))
    nearest = rounder(accumulator_fmt)
    total = np.zeros(len(products), dtype=np.float32)
    for column in products.T:
        total = nearest(total + column)
    return as_sums(total, a)


@np.errstate(all="ignore")
def matmul_promoted(a: Tensor, b: Tensor, accumulator_fmt: Format, promote_every: int) -> Tensor:
    """A short accumulator that is added to a float32 one after every `promote_every` products, and at the end."""
    if promote_every < 1:
        raise ValueError(f"promote_every is 1 or more, not {promote_every}")
    nearest = rounder(accumulator_fmt)
    left, right = a.numpy(), b.numpy()
    total = np.zeros((len(left), right.shape[1]), dtype=np.float32)
    short = np.zeros_like(total)
    for done, (column, row) in enumerate(zip(left.T, right, strict=True), start=1):
        short = nearest(short + column[:, None] * row[None, :])
        if done % promote_every == 0 or done == len(right):
            total, short = total + short, np.zeros_like(total)
    return torch.from_numpy(total)


@np.errstate(all="ignore")
def update_is_lost(weight: Tensor, update: Tensor, fmt: Format) -> Tensor:
    """Where the update is not zero and the rounded sum is the weight."""
    old, change = weight.numpy().reshape(-1), update.numpy().reshape(-1)
    lost = (rounder(fmt)(old + change) == old) & (change != 0)
    return torch.from_numpy(lost).reshape(weight.shape)


@np.errstate(all="ignore")
def sgd_with_master_weights(weight: Tensor, gradients: Tensor, lr: float, fmt: Format) -> tuple[Tensor, Tensor]:
    """float32 master weights, and their rounded copy after each step."""
    nearest, master, stored = rounder(fmt), weight.numpy().copy(), np.empty(gradients.shape, dtype=np.float32)
    for step, gradient in enumerate(gradients.numpy()):
        master = master - np.float32(lr) * gradient
        stored[step] = nearest(master)
    return torch.from_numpy(stored), torch.from_numpy(master)


@np.errstate(all="ignore")
def sgd_with_stochastic_rounding(weight: Tensor, gradients: Tensor, lr: float, fmt: Format, noise: Tensor) -> Tensor:
    """Weights of the format, rounded with each step's own noise."""
    current, stored = weight, torch.empty_like(gradients)
    for step, gradient in enumerate(gradients.numpy()):
        exact = torch.from_numpy(current.numpy() - np.float32(lr) * gradient)
        current = stored[step] = rounding_oracle.round_stochastic(exact, fmt, noise[step])
    return stored
