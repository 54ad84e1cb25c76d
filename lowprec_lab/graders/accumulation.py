"""Checks and known misconceptions of chapter 03."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import BF16, E2M3, E4M3, E4M3FNUZ, E5M2, FP16, FP32, Format
from lowprec_lab.graders import accumulation_oracle as exact
from lowprec_lab.graders import oracle, rounding_oracle
from lowprec_lab.graders.accumulation_oracle import as_sums, rounder, rows_of
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for

for _function in (
    exact.sum_sequential, exact.sum_pairwise, exact.sum_kahan, exact.dot_product, exact.matmul_promoted,
    exact.update_is_lost, exact.sgd_with_master_weights, exact.sgd_with_stochastic_rounding,
):  # fmt: skip
    oracle_for(_function.__name__, _function)

# What a tensor core that keeps 14 bits of a sum comes to, as a format.
SHORT = Format("e8m13", 8, 13)
MADE_UP = (
    Format("e3m4_bias5", 3, 4, bias=5, specials="fn"),
    Format("e6m1", 6, 1),
    Format("e5m7_bias20", 5, 7, bias=20),
    Format("e5m2_finite", 5, 2, specials="finite"),
)
TRIED = (BF16, E4M3, E5M2, FP16, E4M3FNUZ, E2M3, *MADE_UP)
SPECIAL_FORMATS = (BF16, E4M3, E5M2, FP16, *MADE_UP)


# --- inputs -----------------------------------------------------------------------------------------------------------


def _exponents(fmt: Format) -> tuple[int, int]:
    """The exponents between which sums neither vanish nor overflow, at most 2^-12 to 2^12."""
    bottom, top = (math.frexp(edge)[1] - 1 for edge in (oracle.min_normal(fmt), oracle.max_finite(fmt)))
    return max(bottom - 1, -12), min(max(top - 3, bottom), 12)


def numbers(fmt: Format, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """float32 numbers whose sums stay in the format's range for the most part; a third of them are values of it.

    Along the last dimension sizes vary by 2^6, and signs are mixed in half of the rows.
    """
    low, high = _exponents(fmt)
    rows = (*shape[:-1], 1)
    exponents = rng.integers(low, high + 1, rows) + rng.integers(-3, 4, shape)
    values = np.ldexp(rng.uniform(1, 2, shape), exponents).astype(np.float32)
    values = np.where(rng.random(shape) < 1 / 3, rounder(fmt)(values), values)
    signs = np.where(rng.random(rows) < 0.5, 1, rng.choice([-1, 1], shape))
    return torch.from_numpy((values * signs).astype(np.float32))


def few_bits(fmt: Format, shape: tuple[int, ...], rng: np.random.Generator, bits: int = 8) -> Tensor:
    """Numbers as above whose significands have at most `bits` bits, so that float32 holds the product of two."""
    low, high = _exponents(fmt)
    exponents = rng.integers(low // 2, high // 2 + 1, (*shape[:-1], 1)) + rng.integers(-2, 3, shape)
    significands = rng.integers(2 ** (bits - 1), 2**bits, shape) * rng.choice([-1, 1, 1], shape)
    return torch.from_numpy(np.ldexp(significands.astype(np.float64), exponents - bits + 1).astype(np.float32))


def shapes(fmt: Format, rng: np.random.Generator) -> list[Tensor]:
    """One to four dimensions, an odd number of elements, one, two and none; transposed, and every third element."""
    found = [numbers(fmt, shape, rng) for shape in ((7,), (3, 5), (2, 3, 6), (1, 2, 1, 3), (4, 1), (1,), (2, 0), (0,))]
    return [*found, numbers(fmt, (5, 4), rng).t(), numbers(fmt, (3, 13), rng)[:, ::3], numbers(fmt, (0, 3), rng)]


def special_rows(fmt: Format) -> Tensor:
    """Infinities and NaN among numbers; sums beyond the largest value, of both signs, and back again."""
    inf, nan, top = math.inf, math.nan, oracle.max_finite(fmt)
    step = float(oracle.ulp(torch.tensor([top]), fmt)[0])
    return torch.tensor([
        [1.0, inf, 1.0, 1.0], [1.0, -inf, 1.0, 1.0], [inf, -inf, 1.0, 1.0], [1.0, nan, 1.0, 1.0], [inf, 1.0, inf, 0.0],
        [top, top, -top, 0.0], [-top, -top, top, 0.0], [top, -top, top, -top], [top, step, 0.0, 0.0],
        [top, step / 2, 0.0, 0.0], [top, step / 2, -step, -step], [-top, -step / 2, -step / 2, step],
        [0.0, 0.0, -top, -top],
    ])  # fmt: skip


def zero_rows() -> Tensor:
    """Zeros of both signs, and numbers that cancel."""
    return torch.tensor([
        [-0.0, -0.0, -0.0], [0.0, -0.0, -0.0], [-0.0, -0.0, 0.0], [1.0, -1.0, -0.0], [-1.0, 1.0, -0.0],
        [-0.0, 1.0, -1.0], [2.0, -1.0, -1.0],
    ])  # fmt: skip


def _sums(answer, case, right, x: Tensor, fmt: Format) -> None:
    case.same_bits(answer(x, fmt), right(x, fmt))


def _stalling(fmt: Format, count: int) -> Tensor:
    """Rows of equal numbers, more of them than the format can count, and a large number followed by small ones."""
    ones = torch.ones(count)
    return torch.stack([ones, -ones, ones * 0.1, torch.cat([ones[:1] * 2.0 ** (fmt.mantissa_bits + 1), ones[1:]])])


# --- 3.1 sum_sequential -----------------------------------------------------------------------------------------------


@check_for("sum_sequential", weight=2)
def short_sums_in_every_kind_of_format(answer, case):
    """Rows of 3 and of 17 numbers in BF16, FP16, E4M3, E5M2, E4M3FNUZ, E2M3 and made-up formats."""
    for fmt in TRIED:
        for n in (3, 17):
            _sums(answer, case, exact.sum_sequential, numbers(fmt, (case.count(24), n), case.rng), fmt)


@check_for("sum_sequential")
def sums_that_stall(answer, case):
    """Equal numbers until the sum stops growing: 300 of them in BF16, 40 in E4M3 and in made-up formats."""
    for fmt, count in ((BF16, 300), (E4M3, 40), *((fmt, 40) for fmt in MADE_UP[:2])):
        _sums(answer, case, exact.sum_sequential, _stalling(fmt, count), fmt)


@check_for("sum_sequential")
def sums_of_all_shapes(answer, case):
    """Tensors of one to four dimensions, strided ones, and sums of one element and of none."""
    for fmt in (BF16, E4M3, MADE_UP[0]):
        for x in shapes(fmt, case.rng):
            _sums(answer, case, exact.sum_sequential, x, fmt)


@check_for("sum_sequential")
def sums_of_special_values(answer, case):
    """Infinities, NaN, zeros of both signs, sums that cancel, and sums beyond the largest value."""
    for fmt in SPECIAL_FORMATS:
        _sums(answer, case, exact.sum_sequential, special_rows(fmt), fmt)
        _sums(answer, case, exact.sum_sequential, zero_rows(), fmt)


def _in_order(elements: np.ndarray, nearest) -> np.ndarray:
    total = np.zeros(len(elements), dtype=np.float32)
    with np.errstate(all="ignore"):
        for column in elements.T:
            total = nearest(total + column)
    return total


def _as_is(x: np.ndarray) -> np.ndarray:
    return x


def saturating(fmt: Format):
    """A rounder that gives the largest value for what lies beyond it."""
    nearest, largest = rounder(fmt), np.float32(oracle.max_finite(fmt))

    def saturate(x: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(x), x, nearest(np.clip(x, -largest, largest)))

    return saturate


def toward_zero(fmt: Format):
    """A rounder that cuts."""

    def cut(x: np.ndarray) -> np.ndarray:
        policy = "saturate" if fmt.specials == "finite" else "to_special"
        return rounding_oracle.round_to(torch.from_numpy(np.asarray(x)), fmt, "toward_zero", policy).numpy()

    return cut


@misconception("sum_sequential", "It adds in float32 and rounds once, at the end: every total has to be rounded.")
def rounds_at_the_end(x, fmt):
    nearest = rounder(fmt)
    return as_sums(nearest(_in_order(nearest(rows_of(x)), _as_is)), x)


@misconception("sum_sequential", "It rounds the elements and not the totals: the sum is a float32.")
def rounds_elements_only(x, fmt):
    return as_sums(_in_order(rounder(fmt)(rows_of(x)), _as_is), x)


@misconception("sum_sequential", "It does not round the elements before it adds them.")
def leaves_the_elements(x, fmt):
    return as_sums(_in_order(rows_of(x), rounder(fmt)), x)


@misconception("sum_sequential", "It adds neither rounded elements nor rounds in between: one rounding, at the end.")
def one_rounding_in_all(x, fmt):
    return as_sums(rounder(fmt)(_in_order(rows_of(x), _as_is)), x)


@misconception("sum_sequential", "It adds from the last element to the first: in low precision the order matters.")
def backwards(x, fmt):
    return exact.sum_sequential(x.flip(-1), fmt)


@misconception("sum_sequential", "It sums along the first dimension instead of the last.")
def along_the_first(x, fmt):
    return exact.sum_sequential(x.movedim(0, -1), fmt)


@misconception("sum_sequential", "It sums over all dimensions: one number comes out, whatever the shape.")
def over_everything(x, fmt):
    return exact.sum_sequential(x.reshape(-1), fmt)


@misconception(
    "sum_sequential",
    "It saturates: beyond the largest value a total is to become infinity, or NaN, where the format has it.",
)
def saturates_totals(x, fmt):
    nearest = saturating(fmt)
    return as_sums(_in_order(nearest(rows_of(x)), nearest), x)


@misconception("sum_sequential", "It cuts (rounds towards zero) instead of rounding to the nearest value.")
def cuts_totals(x, fmt):
    nearest = toward_zero(fmt)
    return as_sums(_in_order(nearest(rows_of(x)), nearest), x)


@misconception("sum_sequential", "It adds pairs in a tree: here one element comes after the other.")
def in_a_tree(x, fmt):
    return exact.sum_pairwise(x, fmt)


@misconception("sum_sequential", "It starts with the first element instead of 0.0: a sum of -0.0 keeps its sign.")
def begins_with_the_first(x, fmt):
    right = exact.sum_sequential(x, fmt)
    rounded = as_sums(rounder(fmt)(rows_of(x)).max(axis=1, initial=-math.inf), x)
    all_minus_zero = (x == 0).all(-1) & x.signbit().all(-1) & (x.shape[-1] > 0)
    return (
        torch.where(all_minus_zero, torch.copysign(rounded, torch.tensor(-1.0)), right)
        if fmt.specials != "fnuz"
        else right
    )


# --- 3.2 sum_pairwise -------------------------------------------------------------------------------------------------


@check_for("sum_pairwise", weight=2)
def trees_of_every_size(answer, case):
    """Rows of 1 to 9, 13, 21 and 32 numbers in BF16, FP16, E4M3, E5M2 and made-up formats."""
    for fmt in (BF16, E4M3, FP16, E5M2, *MADE_UP):
        for n in (3, 6, 9, 13, 32):
            _sums(answer, case, exact.sum_pairwise, numbers(fmt, (case.count(24), n), case.rng), fmt)
    for n in (1, 2, 4, 5, 7, 8, 10, 11, 21):
        _sums(answer, case, exact.sum_pairwise, numbers(E4M3, (case.count(24), n), case.rng), E4M3)


@check_for("sum_pairwise")
def trees_of_all_shapes(answer, case):
    """Tensors of one to four dimensions, strided ones, and sums of one element and of none."""
    for fmt in (BF16, E4M3, MADE_UP[0]):
        for x in shapes(fmt, case.rng):
            _sums(answer, case, exact.sum_pairwise, x, fmt)


@check_for("sum_pairwise")
def trees_of_special_values(answer, case):
    """Infinities, NaN, zeros of both signs (a lone -0.0 too), sums that cancel, sums beyond the largest value."""
    for fmt in SPECIAL_FORMATS:
        rows = special_rows(fmt)
        for part in (
            rows,
            rows[:, :3],
            zero_rows(),
            zero_rows()[:, :1],
            zero_rows()[:, :2],
            zero_rows()[:1].reshape(-1),
        ):
            _sums(answer, case, exact.sum_pairwise, part, fmt)


@check_for("sum_pairwise")
def long_trees(answer, case):
    """300 and 257 equal numbers, and as many random ones."""
    for fmt, n in ((BF16, 300), (E4M3, 257)):
        _sums(answer, case, exact.sum_pairwise, torch.ones(n), fmt)
        _sums(answer, case, exact.sum_pairwise, torch.full((n,), 1e-2), fmt)
        _sums(answer, case, exact.sum_pairwise, numbers(fmt, (2, n), case.rng), fmt)


def _tree(parts: np.ndarray, nearest, odd=lambda parts: parts[:, -1:]) -> np.ndarray:
    """Neighbours first; `odd` gives what an odd number of parts leaves over."""
    with np.errstate(all="ignore"):
        while parts.shape[1] > 1:
            even = parts.shape[1] // 2 * 2
            rest = odd(parts) if even < parts.shape[1] else parts[:, :0]
            parts = np.concatenate([nearest(parts[:, 0:even:2] + parts[:, 1:even:2]), rest], axis=1)
    return parts[:, 0] if parts.shape[1] else np.zeros(len(parts), dtype=np.float32)


def _halves(parts: np.ndarray, nearest, first) -> np.ndarray:
    if parts.shape[1] < 2:
        return parts[:, 0] if parts.shape[1] else np.zeros(len(parts), dtype=np.float32)
    half = first(parts.shape[1])
    with np.errstate(all="ignore"):
        return nearest(_halves(parts[:, :half], nearest, first) + _halves(parts[:, half:], nearest, first))


@misconception(
    "sum_pairwise", "It splits in two halves, the smaller one first: of six, 0 and 1 are to be added, 2 and 3."
)
def splits_in_halves(x, fmt):
    nearest = rounder(fmt)
    return as_sums(_halves(nearest(rows_of(x)), nearest, lambda n: n // 2), x)


@misconception("sum_pairwise", "It splits in two halves, the larger one first, instead of adding neighbours.")
def splits_in_upper_halves(x, fmt):
    nearest = rounder(fmt)
    return as_sums(_halves(nearest(rows_of(x)), nearest, lambda n: (n + 1) // 2), x)


@misconception("sum_pairwise", "It adds element i and element i + n/2: neighbours are 0 and 1, 2 and 3.")
def folds(x, fmt):
    nearest = rounder(fmt)
    parts = nearest(rows_of(x))
    with np.errstate(all="ignore"):
        while parts.shape[1] > 1:
            half = parts.shape[1] // 2
            parts = np.concatenate([nearest(parts[:, :half] + parts[:, half : 2 * half]), parts[:, 2 * half :]], axis=1)
    return as_sums(parts[:, 0] if parts.shape[1] else np.zeros(len(parts)), x)


@misconception("sum_pairwise", "It pads an odd number with 0.0: a -0.0 that should move on unchanged becomes 0.0.")
def pads_with_zeros(x, fmt):
    nearest = rounder(fmt)
    return as_sums(_tree(nearest(rows_of(x)), nearest, lambda parts: parts[:, -1:] + np.float32(0)), x)


@misconception("sum_pairwise", "It drops the last of an odd number.")
def drops_the_odd_one(x, fmt):
    nearest = rounder(fmt)
    return as_sums(_tree(nearest(rows_of(x)), nearest, lambda parts: parts[:, :0]), x)


@misconception("sum_pairwise", "It leaves over the first of an odd number instead of the last.")
def leaves_over_the_first(x, fmt):
    nearest = rounder(fmt)
    parts = nearest(rows_of(x))
    with np.errstate(all="ignore"):
        while parts.shape[1] > 1:
            odd = parts.shape[1] % 2
            parts = np.concatenate([parts[:, :odd], nearest(parts[:, odd::2] + parts[:, odd + 1 :: 2])], axis=1)
    return as_sums(parts[:, 0] if parts.shape[1] else np.zeros(len(parts)), x)


@misconception("sum_pairwise", "It adds the tree in float32 and rounds once, at the end.")
def tree_rounded_at_the_end(x, fmt):
    nearest = rounder(fmt)
    return as_sums(nearest(_tree(nearest(rows_of(x)), _as_is)), x)


@misconception("sum_pairwise", "It rounds the elements and none of the sums: the result is a float32.")
def tree_of_float32(x, fmt):
    return as_sums(_tree(rounder(fmt)(rows_of(x)), _as_is), x)


@misconception("sum_pairwise", "It does not round the elements before it adds them.")
def tree_of_unrounded_elements(x, fmt):
    return as_sums(_tree(rows_of(x), rounder(fmt)), x)


@misconception("sum_pairwise", "It adds one element after the other instead of neighbours.")
def one_after_the_other(x, fmt):
    return exact.sum_sequential(x, fmt)


@misconception(
    "sum_pairwise",
    "It saturates: beyond the largest value a sum is to become infinity, or NaN, where the format has it.",
)
def tree_saturates(x, fmt):
    nearest = saturating(fmt)
    return as_sums(_tree(nearest(rows_of(x)), nearest), x)


@misconception(
    "sum_pairwise", "It adds neighbours once and the pairs one after the other: the tree has one level only."
)
def one_level(x, fmt):
    nearest = rounder(fmt)
    parts = nearest(rows_of(x))
    even = parts.shape[1] // 2 * 2
    with np.errstate(all="ignore"):
        pairs = np.concatenate([nearest(parts[:, 0:even:2] + parts[:, 1:even:2]), parts[:, even:]], axis=1)
    return as_sums(_in_order(pairs, nearest), x)


# --- 3.3 sum_kahan ----------------------------------------------------------------------------------------------------


@check_for("sum_kahan", weight=2)
def compensated_sums(answer, case):
    """Rows of 3 and of 12 numbers in BF16, FP16, E4M3, E5M2 and made-up formats."""
    for fmt in (BF16, E4M3, E5M2, FP16, *MADE_UP):
        for n in (3, 12):
            _sums(answer, case, exact.sum_kahan, numbers(fmt, (case.count(24), n), case.rng), fmt)


@check_for("sum_kahan")
def sums_that_would_stall(answer, case):
    """40 equal numbers in E4M3 and a made-up format; small numbers before and after a large one."""
    for fmt in (E4M3, MADE_UP[1]):
        _sums(answer, case, exact.sum_kahan, _stalling(fmt, 40), fmt)
    for fmt in (BF16, E4M3, *MADE_UP):
        large = float(rounder(fmt)(np.array([oracle.max_finite(fmt) / 8], dtype=np.float32))[0])
        small = numbers(fmt, (case.count(12), 5), case.rng).abs() / 8
        for place in (0, 2, 5):
            rows = torch.cat([small[:, :place], torch.full((len(small), 1), large), small[:, place:]], dim=1)
            _sums(answer, case, exact.sum_kahan, rows, fmt)


@check_for("sum_kahan")
def compensated_sums_of_all_shapes(answer, case):
    """Tensors of one to four dimensions, strided ones, and sums of one element and of none."""
    for fmt in (BF16, MADE_UP[0]):
        for x in shapes(fmt, case.rng):
            _sums(answer, case, exact.sum_kahan, x, fmt)


@check_for("sum_kahan")
def compensated_sums_of_special_values(answer, case):
    """Infinities (after which the compensation is NaN), NaN, zeros of both signs, sums beyond the largest value."""
    for fmt in SPECIAL_FORMATS:
        _sums(answer, case, exact.sum_kahan, special_rows(fmt), fmt)
        _sums(answer, case, exact.sum_kahan, zero_rows(), fmt)


def _compensated(x: Tensor, step, fmt: Format, finish=lambda total, lost: total, elements=None) -> Tensor:
    """A compensated sum whose step(element, total, lost) gives the new total and loss."""
    elements = rounder(fmt)(rows_of(x)) if elements is None else elements
    total = lost = np.zeros(len(elements), dtype=np.float32)
    with np.errstate(all="ignore"):
        for column in elements.T:
            total, lost = step(column, total, lost)
        return as_sums(finish(total, lost), x)


@misconception("sum_kahan", "It adds the loss with the wrong sign, so each error is doubled instead of repaid.")
def wrong_sign(x, fmt):
    r = rounder(fmt)

    def step(element, total, lost):
        y = r(element + lost)
        t = r(total + y)
        return t, r(r(t - total) - y)

    return _compensated(x, step, fmt)


@misconception("sum_kahan", "It computes the compensation in float32: each of the four operations is to be rounded.")
def compensation_in_float32(x, fmt):
    r = rounder(fmt)

    def step(element, total, lost):
        y = element - lost
        t = r(total + y)
        return t, (t - total) - y

    return _compensated(x, step, fmt)


@misconception("sum_kahan", "It does not round y = element - lost.")
def y_unrounded(x, fmt):
    r = rounder(fmt)

    def step(element, total, lost):
        y = element - lost
        t = r(total + y)
        return t, r(r(t - total) - y)

    return _compensated(x, step, fmt)


@misconception("sum_kahan", "It rounds (t - total) - y once: the difference t - total is to be rounded by itself.")
def difference_unrounded(x, fmt):
    r = rounder(fmt)

    def step(element, total, lost):
        y = r(element - lost)
        t = r(total + y)
        return t, r((t - total) - y)

    return _compensated(x, step, fmt)


@misconception("sum_kahan", "It never uses what was lost: this is the sequential sum.")
def never_uses_the_loss(x, fmt):
    return exact.sum_sequential(x, fmt)


@misconception("sum_kahan", "It drops the compensation in the last step.")
def drops_the_last(x, fmt):
    if x.shape[-1] == 0:
        return exact.sum_kahan(x, fmt)
    r = rounder(fmt)
    elements = r(rows_of(x))

    def step(element, total, lost):
        y = r(element - lost)
        t = r(total + y)
        return t, r(r(t - total) - y)

    head = _compensated(x[..., :-1], step, fmt, elements=elements[:, :-1]).numpy().reshape(-1)
    with np.errstate(all="ignore"):
        return as_sums(r(head + elements[:, -1]), x)


@misconception("sum_kahan", "It subtracts the last loss from the final total as well: Kahan's sum ends with total.")
def repays_at_the_end(x, fmt):
    r = rounder(fmt)

    def step(element, total, lost):
        y = r(element - lost)
        t = r(total + y)
        return t, r(r(t - total) - y)

    return _compensated(x, step, fmt, lambda total, lost: r(total - lost))


@misconception("sum_kahan", "It adds up the losses: lost is to be replaced in each step, as y has repaid the last one.")
def piles_up_the_losses(x, fmt):
    r = rounder(fmt)

    def step(element, total, lost):
        y = r(element - lost)
        t = r(total + y)
        return t, r(lost + r(r(t - total) - y))

    return _compensated(x, step, fmt)


@misconception("sum_kahan", "It compares with the element instead of y: lost = (t - total) - element.")
def compares_with_the_element(x, fmt):
    r = rounder(fmt)

    def step(element, total, lost):
        t = r(total + r(element - lost))
        return t, r(r(t - total) - element)

    return _compensated(x, step, fmt)


@misconception("sum_kahan", "It computes lost from the new total, after total = t: the difference is then always zero.")
def updates_total_too_early(x, fmt):
    r = rounder(fmt)

    def step(element, total, lost):
        y = r(element - lost)
        t = r(total + y)
        return t, r(r(t - t) - y)

    return _compensated(x, step, fmt)


@misconception("sum_kahan", "It swaps two operands: lost = (t - y) - total instead of (t - total) - y.")
def swaps_y_and_total(x, fmt):
    r = rounder(fmt)

    def step(element, total, lost):
        y = r(element - lost)
        t = r(total + y)
        return t, r(r(t - y) - total)

    return _compensated(x, step, fmt)


@misconception("sum_kahan", "It does not round the elements first.")
def kahan_of_unrounded_elements(x, fmt):
    r = rounder(fmt)

    def step(element, total, lost):
        y = r(element - lost)
        t = r(total + y)
        return t, r(r(t - total) - y)

    return _compensated(x, step, fmt, elements=rows_of(x))


@misconception("sum_kahan", "It carries the losses apart and adds them at the end, as Neumaier's sum does.")
def neumaier(x, fmt):
    r = rounder(fmt)

    def step(element, total, lost):
        t = r(total + element)
        larger, smaller = np.where(np.abs(total) >= np.abs(element), (total, element), (element, total))
        return t, r(lost + r(r(larger - t) + smaller))

    return _compensated(x, step, fmt, lambda total, lost: r(total + lost))


# --- 3.4 dot_product --------------------------------------------------------------------------------------------------

PAIRS_OF_FORMATS = (
    (BF16, BF16), (E4M3, BF16), (FP16, E5M2), (BF16, FP32), (FP32, BF16), (E5M2, E4M3), (FP32, SHORT), (FP32, FP32),
    (MADE_UP[0], MADE_UP[1]), (MADE_UP[2], E4M3FNUZ), (E4M3, MADE_UP[3]),
)  # fmt: skip


def _dots(answer, case, a: Tensor, b: Tensor, product_fmt: Format, accumulator_fmt: Format) -> None:
    case.same_bits(answer(a, b, product_fmt, accumulator_fmt), exact.dot_product(a, b, product_fmt, accumulator_fmt))


def _smaller(one: Format, other: Format) -> Format:
    return min(one, other, key=lambda fmt: _exponents(fmt)[1])


@check_for("dot_product", weight=2)
def dot_products_of_many_formats(answer, case):
    """Rows of 2 and of 14 pairs with 8-bit significands, in 11 pairs of formats, float32 among them."""
    for pair in PAIRS_OF_FORMATS:
        for n in (2, 14):
            a, b = (few_bits(_smaller(*pair), (case.count(24), n), case.rng) for _ in range(2))
            _dots(answer, case, a, b, *pair)


@check_for("dot_product")
def significands_of_twelve_bits(answer, case):
    """Rows of 9 pairs with 12-bit significands."""
    for pair in ((FP16, FP16), (FP32, SHORT), (BF16, E4M3), (FP32, FP32)):
        a, b = (few_bits(_smaller(*pair), (case.count(24), 9), case.rng, 12) for _ in range(2))
        _dots(answer, case, a, b, *pair)


@check_for("dot_product")
def dot_products_of_all_shapes(answer, case):
    """Tensors of one to four dimensions, strided ones, and sums of one product and of none."""
    for x in shapes(E4M3, case.rng):
        a, b = (torch.from_numpy(rounder(fmt)(x.numpy())) for fmt in (E4M3, BF16))
        a, b = (a, b) if x.is_contiguous() else (a.t().contiguous().t(), b)
        _dots(answer, case, a, b.flip(-1), E4M3, BF16)


@check_for("dot_product")
def dot_products_of_special_values(answer, case):
    """Infinities, NaN, zeros of both signs, products and totals beyond the largest value or below the smallest."""
    one, small = torch.tensor([1.0, -1.0, 1.0, 2.0]), torch.tensor([2.0**-12, 1.0, -(2.0**-5), 2.0**-9])
    for fmt, other in ((BF16, E4M3), (E5M2, BF16), (E4M3, E4M3), (MADE_UP[0], E5M2), (MADE_UP[3], FP16)):
        rows = special_rows(_smaller(fmt, other))
        for factors in (one, small):
            _dots(answer, case, rows, factors.expand(rows.shape).clone(), fmt, other)
        zeros = zero_rows()
        _dots(answer, case, zeros, torch.ones_like(zeros), fmt, other)
        _dots(answer, case, zeros, -torch.ones_like(zeros), fmt, other)


def _products(a: Tensor, b: Tensor) -> np.ndarray:
    with np.errstate(all="ignore"):
        return rows_of(a) * rows_of(b)


@misconception("dot_product", "It does not round the products.")
def products_unrounded(a, b, product_fmt, accumulator_fmt):
    return as_sums(_in_order(_products(a, b), rounder(accumulator_fmt)), a)


@misconception("dot_product", "It rounds the products to the accumulator's format.")
def products_in_the_accumulators_format(a, b, product_fmt, accumulator_fmt):
    return exact.dot_product(a, b, accumulator_fmt, accumulator_fmt)


@misconception("dot_product", "It rounds the totals to the products' format.")
def totals_in_the_products_format(a, b, product_fmt, accumulator_fmt):
    return exact.dot_product(a, b, product_fmt, product_fmt)


@misconception("dot_product", "It swaps the two formats.")
def swaps_the_formats(a, b, product_fmt, accumulator_fmt):
    return exact.dot_product(a, b, accumulator_fmt, product_fmt)


@misconception("dot_product", "It adds the products in float32 and rounds once, at the end.")
def dot_rounded_at_the_end(a, b, product_fmt, accumulator_fmt):
    total = _in_order(rounder(product_fmt)(_products(a, b)), _as_is)
    return as_sums(rounder(accumulator_fmt)(total), a)


@misconception("dot_product", "It never rounds a total: the result is a float32.")
def totals_unrounded(a, b, product_fmt, accumulator_fmt):
    return exact.dot_product(a, b, product_fmt, FP32)


@misconception("dot_product", "It rounds the factors to the products' format before it multiplies.")
def rounds_the_factors(a, b, product_fmt, accumulator_fmt):
    r = rounder(product_fmt)
    return exact.dot_product(*(torch.from_numpy(r(each.numpy())) for each in (a, b)), product_fmt, accumulator_fmt)


@misconception(
    "dot_product", "It fuses: product and total are added exactly, and only the total is rounded to both formats."
)
def rounds_totals_to_both(a, b, product_fmt, accumulator_fmt):
    first, second = rounder(product_fmt), rounder(accumulator_fmt)
    return as_sums(_in_order(_products(a, b), lambda total: second(first(total))), a)


@misconception("dot_product", "It adds the products in a tree: here one comes after the other.")
def products_in_a_tree(a, b, product_fmt, accumulator_fmt):
    return as_sums(_tree(rounder(product_fmt)(_products(a, b)), rounder(accumulator_fmt)) + np.float32(0), a)


@misconception("dot_product", "It rounds each product to the accumulator's format once more before it adds it.")
def rounds_products_twice(a, b, product_fmt, accumulator_fmt):
    r = rounder(accumulator_fmt)
    return as_sums(_in_order(r(rounder(product_fmt)(_products(a, b))), r), a)


@misconception("dot_product", "It saturates: beyond the largest value comes infinity, or NaN, where the format has it.")
def dot_saturates(a, b, product_fmt, accumulator_fmt):
    return as_sums(_in_order(saturating(product_fmt)(_products(a, b)), saturating(accumulator_fmt)), a)


# --- 3.5 matmul_promoted ----------------------------------------------------------------------------------------------


def _matmuls(answer, case, a: Tensor, b: Tensor, fmt: Format, every: int) -> None:
    case.same_bits(answer(a, b, fmt, every), exact.matmul_promoted(a, b, fmt, every))


@check_for("matmul_promoted", weight=2)
def matrices_and_intervals(answer, case):
    """Matrices of many sizes; promotion after each product, after a few, after all and after more than there are."""
    for fmt in (BF16, E4M3, SHORT, FP16, E5M2, *MADE_UP):
        a, b = few_bits(fmt, (3, 4), case.rng), few_bits(fmt, (4, 2), case.rng)
        for every in (1, 2, 3, 4, 9):
            _matmuls(answer, case, a, b, fmt, every)
        a, b = few_bits(fmt, (case.count(6), 13), case.rng), few_bits(fmt, (13, 5), case.rng)
        for every in (4, 5, 100):
            _matmuls(answer, case, a, b, fmt, every)


@check_for("matmul_promoted")
def accumulators_that_stall(answer, case):
    """60 products of ones, and of tenths, in E4M3, E5M2 and a made-up format: the short accumulator stops growing."""
    for fmt, every in ((E4M3, 7), (E5M2, 25), (MADE_UP[1], 60), (E4M3, 64)):
        ones = torch.ones(2, 60)
        _matmuls(answer, case, ones, torch.ones(60, 2), fmt, every)
        _matmuls(answer, case, ones * 0.09375, torch.ones(60, 3), fmt, every)


@check_for("matmul_promoted")
def matrices_of_all_shapes(answer, case):
    """One row, one column, one product, no product, no row, transposed matrices."""
    for (m, k, n), every in (
        ((1, 5, 1), 2),
        ((1, 1, 1), 1),
        ((2, 0, 3), 4),
        ((0, 3, 2), 2),
        ((3, 4, 0), 2),
        ((4, 1, 2), 3),
    ):
        _matmuls(answer, case, few_bits(E4M3, (m, k), case.rng), few_bits(E4M3, (k, n), case.rng), E4M3, every)
    _matmuls(answer, case, few_bits(E4M3, (6, 3), case.rng).t(), few_bits(E4M3, (4, 6), case.rng).t(), E4M3, 4)


@check_for("matmul_promoted")
def matrices_with_special_values(answer, case):
    """Infinities, NaN, zeros of both signs, and accumulators beyond the largest value."""
    for fmt in (BF16, E4M3, E5M2, *MADE_UP):
        rows = torch.cat([special_rows(fmt), torch.nn.functional.pad(zero_rows(), (0, 1))])
        columns = torch.tensor([[1.0, -1.0], [1.0, 1.0], [1.0, -0.5], [1.0, 0.25]])
        for every in (1, 2, 4):
            _matmuls(answer, case, rows, columns, fmt, every)


@check_for("matmul_promoted")
def intervals_below_one(answer, case):
    """promote_every of 0, -1 and -128 raises ValueError."""
    for every in (0, -1, -128):
        case.raises(ValueError, answer, torch.ones(2, 3), torch.ones(3, 2), BF16, every)


def _promoted(a, b, fmt, every, *, add=None, promote=None, finish=None, reset=True, products=None, last=True):
    """The promoted product with parts of the rule replaced."""
    if every < 1:
        raise ValueError("promote_every is 1 or more")
    r = rounder(fmt)
    left, right = a.numpy(), b.numpy()
    total = np.zeros((len(left), right.shape[1]), dtype=np.float32)
    short = np.zeros_like(total)
    with np.errstate(all="ignore"):
        for done, (column, row) in enumerate(zip(left.T, right, strict=True), start=1):
            product = column[:, None] * row[None, :]
            short = (add or r)(short + (products(product) if products else product))
            if done % every == 0 or (last and done == len(right)):
                total = (promote or _as_is)(total + (finish(short) if finish else short))
                short = np.zeros_like(total) if reset else short
    return torch.from_numpy(np.asarray(total, dtype=np.float32))


@misconception("matmul_promoted", "It never promotes: the short accumulator runs through to the end.")
def never_promotes(a, b, accumulator_fmt, promote_every):
    return _promoted(a, b, accumulator_fmt, promote_every and max(promote_every, b.shape[0], 1) * (promote_every > 0))


@misconception(
    "matmul_promoted", "It sums each chunk in float32 and rounds that sum: the short accumulator is missing."
)
def chunks_in_float32(a, b, accumulator_fmt, promote_every):
    return _promoted(a, b, accumulator_fmt, promote_every, add=_as_is, finish=rounder(accumulator_fmt))


@misconception("matmul_promoted", "It adds everything in float32: nothing is rounded to the accumulator's format.")
def all_in_float32(a, b, accumulator_fmt, promote_every):
    return _promoted(a, b, accumulator_fmt, promote_every, add=_as_is)


@misconception("matmul_promoted", "It loses the products after the last full chunk.")
def loses_the_tail(a, b, accumulator_fmt, promote_every):
    return _promoted(a, b, accumulator_fmt, promote_every, last=False)


@misconception("matmul_promoted", "It does not start the short accumulator again at 0.0 after a promotion.")
def never_resets(a, b, accumulator_fmt, promote_every):
    return _promoted(a, b, accumulator_fmt, promote_every, reset=False)


@misconception("matmul_promoted", "It rounds the float32 total to the accumulator's format as well.")
def rounds_the_long_total(a, b, accumulator_fmt, promote_every):
    return _promoted(a, b, accumulator_fmt, promote_every, promote=rounder(accumulator_fmt))


@misconception("matmul_promoted", "It rounds the products before it adds them: they are exact, and go in as they are.")
def rounds_the_products(a, b, accumulator_fmt, promote_every):
    return _promoted(a, b, accumulator_fmt, promote_every, products=rounder(accumulator_fmt))


@misconception("matmul_promoted", "It promotes one product too late, after promote_every + 1 of them.")
def one_product_too_late(a, b, accumulator_fmt, promote_every):
    return _promoted(a, b, accumulator_fmt, promote_every and promote_every + (promote_every > 0))


@misconception("matmul_promoted", "It makes promote_every chunks; the number says how many products are in one.")
def that_many_chunks(a, b, accumulator_fmt, promote_every):
    if promote_every < 1:
        raise ValueError("promote_every is 1 or more")
    return _promoted(a, b, accumulator_fmt, max(1, -(-b.shape[0] // promote_every)))


@misconception("matmul_promoted", "It takes promote_every below 1 for 1: a ValueError is expected.")
def takes_zero_for_one(a, b, accumulator_fmt, promote_every):
    return _promoted(a, b, accumulator_fmt, max(1, promote_every))


@misconception(
    "matmul_promoted",
    "It saturates: beyond the largest value the accumulator is to become infinity, or NaN, where the format has it.",
)
def short_accumulator_saturates(a, b, accumulator_fmt, promote_every):
    return _promoted(a, b, accumulator_fmt, promote_every, add=saturating(accumulator_fmt))


# --- 3.6 update_is_lost -----------------------------------------------------------------------------------------------


def weights_and_updates(fmt: Format, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Weights of the format, powers of two among them, with updates of up to 1.2 ulp: at ties, and beside them."""
    weight = rounder(fmt)(numbers(fmt, (count, 1), rng).numpy()[:, 0])
    low, high = _exponents(fmt)
    powers = np.ldexp(1.0, rng.integers(min(low + 2, high), high + 1, count)).astype(np.float32)
    weight = np.where(rng.random(count) < 0.3, rounder(fmt)(powers) * rng.choice([-1, 1], count), weight) + np.float32(
        0
    )
    weight = np.where(weight == 0, rounder(fmt)(powers), weight).astype(np.float32)
    ulp = oracle.ulp(torch.from_numpy(weight), fmt).numpy()
    share = rng.choice([0.25, 0.5, 0.5, 1.0, 0.125, 0.0], count)
    share = np.where(rng.random(count) < 0.3, rng.uniform(0, 1.2, count), share)
    update = (ulp * share * rng.choice([-1, 1], count)).astype(np.float32)
    beside = rng.integers(-1, 2, count).astype(np.float32)
    update = np.where(
        (beside != 0) & (update != 0), np.nextafter(update, np.copysign(np.float32(np.inf), beside)), update
    )
    return torch.from_numpy(weight.astype(np.float32)), torch.from_numpy(update.astype(np.float32))


def _losses(answer, case, weight: Tensor, update: Tensor, fmt: Format) -> None:
    case.same_bits(answer(weight, update, fmt), exact.update_is_lost(weight, update, fmt))


@check_for("update_is_lost", weight=2)
def around_half_an_ulp(answer, case):
    """Weights of ten formats, updates of a quarter, half and one ulp of both signs, and the float32 beside them."""
    for fmt in TRIED:
        _losses(answer, case, *weights_and_updates(fmt, case.count(300), case.rng), fmt)


@check_for("update_is_lost")
def at_powers_of_two(answer, case):
    """Weights that are powers of two: below them values are twice as dense as above."""
    for fmt in (BF16, FP16, E4M3, E5M2, MADE_UP[2]):
        low, high = _exponents(fmt)
        weight = torch.ldexp(torch.ones(high - low - 1), torch.arange(low + 2, high + 1).float())
        ulp = oracle.ulp(weight, fmt).float()
        for share in (0.2, 0.25, 0.26, 0.375, 0.5, 0.51, -0.2, -0.25, -0.26, -0.375, -0.5, -0.51):
            _losses(answer, case, weight, ulp * share, fmt)
            _losses(answer, case, -weight, ulp * share, fmt)


@check_for("update_is_lost")
def zeros_and_the_ends_of_the_range(answer, case):
    """Updates of 0.0 and -0.0, a weight of 0.0, the smallest and largest weights, infinities, an update of NaN."""
    for fmt in (BF16, FP16, E4M3, E5M2, *MADE_UP):
        top, small = oracle.max_finite(fmt), oracle.min_subnormal(fmt) or oracle.min_normal(fmt)
        step = float(oracle.ulp(torch.tensor([top]), fmt)[0])
        weights = torch.tensor([0.0, small, -small, 1.0, top, -top])
        weights = torch.from_numpy(rounder(fmt)(weights.numpy()))
        near = [
            small / 2,
            small * 0.51,
            small,
            step / 2,
            step * 0.49,
            step,
            2.0**-149 if fmt is not BF16 else small,
            top,
        ]
        updates = torch.tensor([0.0, -0.0, math.nan, math.inf, *near, *(-each for each in near)])
        grid = [part.reshape(-1) for part in torch.meshgrid(weights, updates, indexing="ij")]
        _losses(answer, case, *grid, fmt)
        if fmt.specials == "ieee":
            _losses(
                answer, case, torch.tensor([math.inf, -math.inf, math.inf]), torch.tensor([1.0, -1.0, -math.inf]), fmt
            )


@check_for("update_is_lost")
def weights_of_all_shapes(answer, case):
    """Tensors of no dimension, of two and three, transposed and empty."""
    weight, update = weights_and_updates(E4M3, 24, case.rng)
    for shape in ((4, 6), (2, 3, 4), (24,)):
        _losses(answer, case, weight.reshape(shape), update.reshape(shape), E4M3)
    _losses(answer, case, weight.reshape(4, 6).t(), update.reshape(4, 6).t(), E4M3)
    _losses(answer, case, weight[3], update[3], E4M3)
    _losses(answer, case, weight[:0], update[:0], E4M3)


def _nearest(x: Tensor, fmt: Format) -> Tensor:
    return torch.from_numpy(np.asarray(rounder(fmt)(x.numpy()))).reshape(x.shape)


def _against(weight: Tensor, update: Tensor, limit, compare) -> Tensor:
    return compare(update.double().abs(), limit) & (update != 0)


@misconception("update_is_lost", "It compares with half an ulp of the weight: half-way the even neighbour decides.")
def below_half_an_ulp(weight, update, fmt):
    return _against(weight, update, oracle.ulp(weight, fmt) / 2, torch.lt)


@misconception(
    "update_is_lost", "It counts all updates up to half an ulp as lost: ties may move, and so may powers of two."
)
def up_to_half_an_ulp(weight, update, fmt):
    return _against(weight, update, oracle.ulp(weight, fmt) / 2, torch.le)


@misconception("update_is_lost", "It compares with a whole ulp: from half an ulp on, the sum rounds to the neighbour.")
def below_an_ulp(weight, update, fmt):
    return _against(weight, update, oracle.ulp(weight, fmt), torch.lt)


@misconception(
    "update_is_lost", "It compares with half of epsilon times the weight: the spacing is the same all through a binade."
)
def relative_to_the_weight(weight, update, fmt):
    return _against(weight, update, weight.double().abs() * 2.0 ** (-fmt.mantissa_bits - 1), torch.lt)


@misconception("update_is_lost", "It counts updates of zero as lost.")
def counts_zeros(weight, update, fmt):
    return exact.update_is_lost(weight, update, fmt) | ((update == 0) & ~weight.isnan())


@misconception("update_is_lost", "It does not round the sum: it finds what float32 loses.")
def lost_in_float32(weight, update, fmt):
    return ((weight + update) == weight) & (update != 0)


@misconception("update_is_lost", "It asks whether the update itself rounds to zero.")
def update_rounds_to_zero(weight, update, fmt):
    return (_nearest(update, fmt) == 0) & (update != 0)


@misconception("update_is_lost", "It rounds the update to the format before it adds it.")
def rounds_the_update_first(weight, update, fmt):
    return (_nearest(weight + _nearest(update, fmt), fmt) == weight) & (update != 0)


@misconception("update_is_lost", "It cuts the sum (towards zero) instead of rounding it to the nearest value.")
def lost_when_cut(weight, update, fmt):
    cut = toward_zero(fmt)((weight + update).numpy())
    return (torch.from_numpy(np.asarray(cut)).reshape(weight.shape) == weight) & (update != 0)


@misconception("update_is_lost", "It gives the opposite: True where the weight moves.")
def where_it_moves(weight, update, fmt):
    return ~exact.update_is_lost(weight, update, fmt)


@misconception("update_is_lost", "It subtracts the update: here it is added.")
def subtracts_the_update(weight, update, fmt):
    return exact.update_is_lost(weight, -update, fmt)


# --- 3.7 sgd_with_master_weights --------------------------------------------------------------------------------------

_STEPS = (
    (BF16, 0.1, 1, 5), (E4M3, 0.5, 7, 6), (FP16, 0.003, 12, 5), (E5M2, 0.1, 9, 8), (BF16, 1e-4, 20, 7),
    (MADE_UP[0], 0.3, 8, 5), (MADE_UP[1], 0.7, 6, 9), (MADE_UP[2], 0.01, 10, 4), (E4M3FNUZ, -0.2, 5, 5),
)  # fmt: skip


def descent(fmt: Format, steps: int, n: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """First weights that are no values of the format, and gradients of about their size."""
    weight = numbers(fmt, (n, 1), rng)[:, 0].clone()
    return weight, weight * torch.from_numpy(rng.normal(size=(steps, n)).astype(np.float32))


def _same_masters(case, got: object, want: tuple[Tensor, Tensor]) -> None:
    """Two records, as the two results differ in shape."""
    names = ("first result (stored)", "second result (master)")
    if type(got) is not tuple or len(got) != 2:
        case.same_bits(got, (want[0], want[0]), parts=("stored", "master"))
        return
    for part, right, name in zip(got, want, names, strict=True):
        case.same_bits(part, right, parts=(name,))


def _descents(answer, case, weight: Tensor, gradients: Tensor, lr: float, fmt: Format) -> None:
    got = answer(weight, gradients, lr, fmt)
    _same_masters(case, got, exact.sgd_with_master_weights(weight, gradients, lr, fmt))


@check_for("sgd_with_master_weights", weight=2)
def descents_in_many_formats(answer, case):
    """1 to 20 steps in BF16, FP16, E4M3, E5M2, E4M3FNUZ and made-up formats, with learning rates of 1e-4 to 0.7."""
    for fmt, lr, steps, n in _STEPS:
        _descents(answer, case, *descent(fmt, steps, case.count(n), case.rng), lr, fmt)


@check_for("sgd_with_master_weights")
def updates_too_small_to_see(answer, case):
    """Weights near 1 and 60 updates of 1/20 ulp: the stored weights move after ten steps."""
    for fmt in (BF16, E4M3, E5M2):
        weight = 1 + torch.from_numpy(case.rng.uniform(0, 0.5, case.count(4)).astype(np.float32))
        gradients = torch.full((60, len(weight)), 2.0**-fmt.mantissa_bits / 2)
        _descents(answer, case, weight, gradients, 0.1, fmt)


@check_for("sgd_with_master_weights")
def descents_at_the_edges(answer, case):
    """No step, no weight, gradients of zero, infinity and NaN, weights beyond the largest value, strided gradients."""
    weight, gradients = descent(E4M3, 6, 4, case.rng)
    _descents(answer, case, weight, gradients[:0], 0.1, E4M3)
    _descents(answer, case, weight[:0], gradients[:, :0], 0.1, E4M3)
    _descents(answer, case, weight, descent(E4M3, 4, 6, case.rng)[1].t(), 0.1, E4M3)
    odd = torch.tensor([[0.0, -0.0, math.inf, math.nan], [0.0, 0.0, 1.0, 1.0], [1e6, -1e6, -math.inf, 0.0]])
    for fmt in (BF16, E4M3, E5M2, *MADE_UP):
        _descents(answer, case, torch.tensor([0.0, -0.0, 1.0, 2.0]), odd, 0.5, fmt)


def _masters(weight, gradients, lr, fmt, *, update=None, after=None, sign=-1, store=None, before=False):
    """Descent with master weights, with parts of the rule replaced."""
    nearest = rounder(fmt)
    master, stored = weight.numpy().copy(), np.empty(gradients.shape, dtype=np.float32)
    with np.errstate(all="ignore"):
        for step, gradient in enumerate(gradients.numpy()):
            if before:
                stored[step] = nearest(master)
            master = master + np.float32(sign) * (update(gradient) if update else np.float32(lr) * gradient)
            master = (after or _as_is)(master)
            if not before:
                stored[step] = (store or nearest)(master)
    return torch.from_numpy(stored), torch.from_numpy(np.asarray(master, dtype=np.float32))


@misconception(
    "sgd_with_master_weights", "It reads the master weights back from the rounded copy: small updates are lost."
)
def reads_the_copy_back(weight, gradients, lr, fmt):
    return _masters(weight, gradients, lr, fmt, after=rounder(fmt))


@misconception("sgd_with_master_weights", "It stores the weights from before each step.")
def stores_before_the_step(weight, gradients, lr, fmt):
    return _masters(weight, gradients, lr, fmt, before=True)


@misconception("sgd_with_master_weights", "It adds the gradients: descent subtracts them.")
def climbs(weight, gradients, lr, fmt):
    return _masters(weight, gradients, lr, fmt, sign=1)


@misconception("sgd_with_master_weights", "It stores the float32 weights: what is stored is to be rounded.")
def stores_unrounded(weight, gradients, lr, fmt):
    return _masters(weight, gradients, lr, fmt, store=_as_is)


@misconception("sgd_with_master_weights", "It rounds lr * gradient to the format before it subtracts it.")
def rounds_the_step(weight, gradients, lr, fmt):
    nearest = rounder(fmt)
    return _masters(weight, gradients, lr, fmt, update=lambda gradient: nearest(np.float32(lr) * gradient))


@misconception("sgd_with_master_weights", "It rounds the gradients to the format first.")
def rounds_the_gradients(weight, gradients, lr, fmt):
    nearest = rounder(fmt)
    return _masters(weight, gradients, lr, fmt, update=lambda gradient: np.float32(lr) * nearest(gradient))


@misconception("sgd_with_master_weights", "It gives the rounded weights as master: the master weights stay float32.")
def rounded_master(weight, gradients, lr, fmt):
    stored, master = _masters(weight, gradients, lr, fmt)
    return stored, torch.from_numpy(rounder(fmt)(master.numpy()))


@misconception("sgd_with_master_weights", "It rounds the first master weights to the format.")
def rounds_the_first_master(weight, gradients, lr, fmt):
    return _masters(torch.from_numpy(rounder(fmt)(weight.numpy())), gradients, lr, fmt)


@misconception("sgd_with_master_weights", "It leaves out the learning rate.")
def without_learning_rate(weight, gradients, lr, fmt):
    return _masters(weight, gradients, 1.0, fmt)


@misconception(
    "sgd_with_master_weights", "It gives master first and stored second: the contract has them the other way round."
)
def swaps_the_results(weight, gradients, lr, fmt):
    return _masters(weight, gradients, lr, fmt)[::-1]


@misconception(
    "sgd_with_master_weights", "It gives the master weights after every step: only the last ones are wanted."
)
def all_masters(weight, gradients, lr, fmt):
    return _masters(weight, gradients, lr, fmt)[0], _masters(weight, gradients, lr, fmt, store=_as_is)[0]


# --- 3.8 sgd_with_stochastic_rounding ---------------------------------------------------------------------------------


def noise_like(gradients: Tensor, rng: np.random.Generator) -> Tensor:
    """Multiples of 2^-23 in [0, 1), zero and the largest among them."""
    drawn = rng.integers(0, 2**23, gradients.shape)
    drawn = np.where(rng.random(gradients.shape) < 0.1, rng.choice([0, 2**23 - 1, 2**22], gradients.shape), drawn)
    return torch.from_numpy((drawn * 2.0**-23).astype(np.float32))


def noisy_descent(fmt: Format, steps: int, n: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """First weights of the format that are far from its largest value, and gradients of about their size."""
    weight, gradients = descent(fmt, steps, n, rng)
    return torch.from_numpy(rounder(fmt)(weight.numpy() / 4)), gradients / 16


def _noisy(answer, case, weight: Tensor, gradients: Tensor, lr: float, fmt: Format, noise: Tensor) -> None:
    got = answer(weight, gradients, lr, fmt, noise)
    case.same_bits(got, exact.sgd_with_stochastic_rounding(weight, gradients, lr, fmt, noise))


@check_for("sgd_with_stochastic_rounding", weight=2)
def noisy_descents_in_many_formats(answer, case):
    """1 to 20 steps in BF16, FP16, E4M3, E5M2, E4M3FNUZ and made-up formats, with a noise for each step and weight."""
    for fmt, lr, steps, n in _STEPS:
        weight, gradients = noisy_descent(fmt, steps, case.count(n), case.rng)
        _noisy(answer, case, weight, gradients, lr, fmt, noise_like(gradients, case.rng))


@check_for("sgd_with_stochastic_rounding")
def updates_that_nearest_would_lose(answer, case):
    """Weights near 1 and -1 and 40 updates of 1/20 ulp, which rounding to nearest would lose."""
    for fmt in (BF16, E4M3, E5M2, MADE_UP[0]):
        signs = torch.from_numpy(case.rng.choice([-1.0, 1.0], case.count(6)).astype(np.float32))
        gradients = torch.full((40, len(signs)), 2.0**-fmt.mantissa_bits / 2)
        _noisy(answer, case, signs, gradients, 0.1, fmt, noise_like(gradients, case.rng))


@check_for("sgd_with_stochastic_rounding")
def noisy_descents_at_the_edges(answer, case):
    """No step, no weight, gradients of zero and NaN, steps that end on values of the format, strided input."""
    weight, gradients = noisy_descent(E4M3, 6, 4, case.rng)
    noise = noise_like(gradients, case.rng)
    _noisy(answer, case, weight, gradients[:0], 0.1, E4M3, noise[:0])
    _noisy(answer, case, weight[:0], gradients[:, :0], 0.1, E4M3, noise[:, :0])
    _noisy(answer, case, weight, gradients.t().contiguous().t(), 0.1, E4M3, noise.flip(0))
    for fmt in (BF16, E4M3, E5M2, MADE_UP[0]):
        odd = torch.tensor([[0.0, -0.0, 1.0, math.nan], [0.0, 0.0, -0.5, 1.0], [0.25, -0.5, 0.0, 0.0]])
        for level in (0.0, 0.5, 1 - 2.0**-23):
            _noisy(answer, case, torch.tensor([0.0, -0.0, 1.0, 2.0]), odd, 0.5, fmt, torch.full_like(odd, level))


def _stochastically(exact_values: np.ndarray, fmt: Format, noise: Tensor) -> np.ndarray:
    return rounding_oracle.round_stochastic(torch.from_numpy(np.ascontiguousarray(exact_values)), fmt, noise).numpy()


def _noisy_steps(weight, gradients, lr, fmt, noise, step_from, before=False):
    """Descent whose step_from(weights, gradient, this step's noise, its number) gives the next weights."""
    current, stored = weight.numpy(), np.empty(gradients.shape, dtype=np.float32)
    with np.errstate(all="ignore"):
        for step, gradient in enumerate(gradients.numpy()):
            if before:
                stored[step] = current
            current = step_from(current, gradient, noise[step], step)
            if not before:
                stored[step] = current
    return torch.from_numpy(stored)


@misconception("sgd_with_stochastic_rounding", "It rounds to the nearest value: the noise is not used.")
def rounds_to_nearest(weight, gradients, lr, fmt, noise):
    r = saturating(fmt)
    return _noisy_steps(weight, gradients, lr, fmt, noise, lambda w, g, u, k: r(w - np.float32(lr) * g))


@misconception("sgd_with_stochastic_rounding", "It uses the first step's noise in every step.")
def one_noise_for_all(weight, gradients, lr, fmt, noise):
    first = noise[:1]
    return _noisy_steps(
        weight, gradients, lr, fmt, noise, lambda w, g, u, k: _stochastically(w - np.float32(lr) * g, fmt, first[0])
    )


@misconception(
    "sgd_with_stochastic_rounding", "It rounds lr * gradient stochastically, and the sum to the nearest value."
)
def rounds_the_update_stochastically(weight, gradients, lr, fmt, noise):
    r = saturating(fmt)
    return _noisy_steps(
        weight, gradients, lr, fmt, noise, lambda w, g, u, k: r(w - _stochastically(np.float32(lr) * g, fmt, u))
    )


@misconception(
    "sgd_with_stochastic_rounding", "It keeps float32 weights and rounds a copy: the weights exist in the format only."
)
def keeps_a_master(weight, gradients, lr, fmt, noise):
    master, stored = weight.numpy(), np.empty(gradients.shape, dtype=np.float32)
    for step, gradient in enumerate(gradients.numpy()):
        master = master - np.float32(lr) * gradient
        stored[step] = _stochastically(master, fmt, noise[step])
    return torch.from_numpy(stored)


@misconception("sgd_with_stochastic_rounding", "It adds the gradients: descent subtracts them.")
def climbs_noisily(weight, gradients, lr, fmt, noise):
    return exact.sgd_with_stochastic_rounding(weight, -gradients, lr, fmt, noise)


@misconception(
    "sgd_with_stochastic_rounding", "It turns the noise round: the magnitude grows where noise is below the share."
)
def noise_turned_round(weight, gradients, lr, fmt, noise):
    return exact.sgd_with_stochastic_rounding(weight, gradients, lr, fmt, 1 - 2.0**-23 - noise)


@misconception("sgd_with_stochastic_rounding", "It gives the weights from before each step.")
def weights_before_the_step(weight, gradients, lr, fmt, noise):
    return _noisy_steps(
        weight, gradients, lr, fmt, noise, lambda w, g, u, k: _stochastically(w - np.float32(lr) * g, fmt, u), True
    )


@misconception(
    "sgd_with_stochastic_rounding", "It rounds upwards where it should move away from zero: wrong below zero."
)
def upwards_instead_of_away(weight, gradients, lr, fmt, noise):
    def step(w, g, u, k):
        value = w - np.float32(lr) * g
        turned = torch.from_numpy(np.where(value < 0, 1 - 2.0**-23 - u.numpy(), u.numpy()).astype(np.float32))
        return _stochastically(value, fmt, turned)

    return _noisy_steps(weight, gradients, lr, fmt, noise, step)


@misconception("sgd_with_stochastic_rounding", "It rounds the gradients to the format first.")
def rounds_the_gradients_first(weight, gradients, lr, fmt, noise):
    rounded = torch.from_numpy(np.ascontiguousarray(rounder(fmt)(gradients.numpy())))
    return exact.sgd_with_stochastic_rounding(weight, rounded, lr, fmt, noise)


@misconception("sgd_with_stochastic_rounding", "It applies the learning rate to the noise as well.")
def scales_the_noise(weight, gradients, lr, fmt, noise):
    return exact.sgd_with_stochastic_rounding(weight, gradients, lr, fmt, noise * lr)


@misconception("sgd_with_stochastic_rounding", "It leaves out the learning rate.")
def noisy_without_learning_rate(weight, gradients, lr, fmt, noise):
    return exact.sgd_with_stochastic_rounding(weight, gradients, 1.0, fmt, noise)


@misconception(
    "sgd_with_stochastic_rounding", "It gives the last weights only: the weights after every step are wanted."
)
def last_weights_only(weight, gradients, lr, fmt, noise):
    stored = exact.sgd_with_stochastic_rounding(weight, gradients, lr, fmt, noise)
    return stored[-1] if len(stored) else weight


# --- questions about the real code ------------------------------------------------------------------------------------

question_for(
    "3.A",
    32,
    "Right: BFloat16 accumulates in float, on CUDA and on the CPU alike, and so do Half and all Float8 types.",
    "Look at the line with BFloat16: the second name is the type it accumulates in. How many bits has a C++ float?",
    {
        16: "That is BFloat16 itself. The table maps it to another type.",
        64: "64 bits are a double: on the CPU that is what float accumulates in. Look at the line with BFloat16.",
    },
)
question_for(
    "3.B",
    True,
    "Right: unless you switch it off, partial sums may be rounded to BF16 before they are added to each other.",
    "Read the value of the setting in the last line above.",
    {False: "The last line above says what it is unless you change it."},
)
question_for(
    "3.C",
    257,
    "Right: 257 needs nine significant bits and BF16 has eight. The sum inside is exact; its last rounding is not.",
    "Which is the first whole number that BF16 cannot hold? (Chapter 01 has a table of these.)",
    {
        256: "256 is a power of two: BF16 holds it. Try one more.",
        9984: "That is what comes out for 10,000. The first wrong sum comes much earlier.",
        10000: "10,000 is wrong, and so are many smaller ones. Which is the first?",
    },
)
