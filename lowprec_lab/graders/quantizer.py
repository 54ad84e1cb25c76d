"""Checks and known misconceptions of chapter 07."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, FP16, Format
from lowprec_lab.graders import oracle, rounding_oracle
from lowprec_lab.graders import quantizer_oracle as exact
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for
from lowprec_lab.quantizer import Quantized, dequantized, one_nan, passed_through, quantized, refusal

for _function in (
    exact.absmax, exact.scale_for, exact.quantize, exact.dequantize, exact.sqnr_db, exact.quantize_int8,
    exact.straight_through, exact.best_clip,
):  # fmt: skip
    oracle_for(_function.__name__, _function)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
SHORT = (E3M2, E2M3, E2M1)
MADE_UP = (
    Format("e3m4_bias5", 3, 4, bias=5, specials="fn"),
    Format("e6m1", 6, 1),
    Format("e4m3_ieee", 4, 3),
    Format("e2m5_fnuz", 2, 5, bias=2, specials="fnuz"),
)
GRANULARITIES = ("tensor", "row", "column", (2, 3))


# --- inputs -----------------------------------------------------------------------------------------------------------


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of both signs and of sizes within 2^8 of each other; each tensor elsewhere between 2^-12 and 2^6."""
    sizes = np.ldexp(rng.uniform(1, 2, shape), int(rng.integers(-12, 7)) - rng.integers(0, 8, shape))
    signed = np.asarray(sizes * rng.choice([-1.0, 1.0], shape), dtype=np.float32)
    return torch.from_numpy(signed).to(dtype)


def of_every_shape(rng: np.random.Generator) -> list[Tensor]:
    """Of one, three and four dimensions, with one element, transposed, and every other column."""
    flat = [drawn(rng, shape) for shape in ((7,), (2, 3, 5), (2, 1, 4, 3), (1, 1), (1, 6), (5, 1))]
    return [*flat, drawn(rng, (4, 6)).t(), drawn(rng, (4, 9))[:, ::2]]


def empty_ones() -> list[Tensor]:
    """Tensors without elements, of one to three dimensions."""
    return [torch.zeros(shape) for shape in ((0,), (0, 3), (3, 0), (2, 0, 4), (0, 2, 3), (0, 0))]


def with_special_values(rng: np.random.Generator) -> list[Tensor]:
    """Matrices of which one row has zeros, NaN, an infinity, 1e-40 alone or 1e-20 alone."""
    found = []
    for row in ([0.0, -0.0], [-0.0, -0.0], [math.nan, 1.0], [-math.nan, math.inf], [math.inf, -3.0], [-math.inf, 0.0],
                [1e-40, -1e-41], [1e-20, -3e-20], [3e38, -1e30]):  # fmt: skip
        x = drawn(rng, (4, 4))
        x[int(rng.integers(4))] = torch.tensor(row + row)
        found.append(x)
    return found


def fits(granularity, x: Tensor) -> bool:
    """Whether a tensor has as many dimensions as a granularity needs."""
    return granularity == "tensor" or x.dim() >= (1 if granularity == "row" else 2)


def _same_parts(case, got: object, want: tuple, parts: tuple[str, ...]) -> None:
    """Compare the parts of a tuple one after the other: their shapes differ."""
    if not isinstance(got, tuple) or len(got) != len(want):
        case.same_bits(got, want[:1] * len(want), parts=parts)  # says what is expected
        return
    for part, one, other in zip(parts, got, want, strict=True):
        case.same_bits(one, other, parts=(part,))


# --- 7.1 absmax -------------------------------------------------------------------------------------------------------


@check_for("absmax", weight=2)
def groups_of_matrices(answer, case):
    """Matrices in float32, bfloat16 and float16, by tensor, row, column and in blocks that divide or do not."""
    for granularity in (*GRANULARITIES, (1, 4), (4, 1), (3, 2), (5, 16), (1, 1)):
        for dtype in FLOATS:
            for _ in range(case.count(1)):
                x = drawn(case.rng, (int(case.rng.integers(4, 9)), int(case.rng.integers(5, 12))), dtype)
                case.same_bits(answer(x, granularity), exact.absmax(x, granularity))


@check_for("absmax")
def tensors_of_other_dimensions(answer, case):
    """Tensors of none, one, three and four dimensions, transposed ones, and every other column."""
    for x in [*of_every_shape(case.rng), drawn(case.rng, ())]:
        for granularity in (*GRANULARITIES, (1, 2), (2, 2)):
            if fits(granularity, x):
                case.same_bits(answer(x, granularity), exact.absmax(x, granularity))
    x = drawn(case.rng, (3, 5))
    case.same_bits(answer(x), exact.absmax(x))


@check_for("absmax")
def groups_with_special_values(answer, case):
    """Zeros of both signs, NaN, infinities, 1e-40 and numbers below zero alone, in one row of four."""
    for x in [*with_special_values(case.rng), -drawn(case.rng, (4, 4)).abs(), -torch.ones(3, 3)]:
        for granularity in (*GRANULARITIES, (3, 3)):
            case.same_bits(answer(x, granularity), exact.absmax(x, granularity))


@check_for("absmax")
def tensors_without_elements(answer, case):
    """Empty tensors of one to three dimensions, in every granularity."""
    for x in empty_ones():
        for granularity in GRANULARITIES:
            if fits(granularity, x):
                for dtype in (torch.float32, torch.bfloat16):
                    case.same_bits(answer(x.to(dtype), granularity), exact.absmax(x.to(dtype), granularity))


@check_for("absmax")
def groups_that_cannot_be(answer, case):
    """ValueError: "rows", "", "block", blocks of 0 or -1 rows, and too few dimensions."""
    x = torch.ones(4, 4)
    for granularity in ("rows", "", "block", (0, 4), (4, -1)):
        case.raises(ValueError, answer, x, granularity)
    for few, granularity in ((x[0], "column"), (x[0], (1, 2)), (x[0, 0], "row"), (x[0, 0], (2, 2))):
        case.raises(ValueError, answer, few, granularity)


def _absmax_of(x: Tensor, granularity, change) -> Tensor:
    """The right maxima of elements that were changed before."""
    exact.require_granularity(granularity, x.dim())
    return exact.absmax(change(x), granularity)


@misconception("absmax", "It takes the largest number, not the largest magnitude: -8 loses to 1.")
def takes_the_largest_number(x, granularity="tensor"):
    exact.require_granularity(granularity, x.dim())
    return exact.as_dtype(exact.groups(exact.numbers(x), granularity), x.dtype)


@misconception("absmax", "It skips NaN: a group that has one gets the maximum of the others.")
def skips_nan(x, granularity="tensor"):
    return _absmax_of(x, granularity, lambda x: torch.where(x.isnan(), 0.0, x).to(x.dtype))


@misconception("absmax", "It looks at finite numbers only: infinity and NaN count as 0.")
def skips_what_is_not_finite(x, granularity="tensor"):
    return _absmax_of(x, granularity, lambda x: torch.where(x.isfinite(), x, 0.0).to(x.dtype))


@misconception("absmax", "It makes the largest finite number of infinity.")
def makes_infinity_finite(x, granularity="tensor"):
    largest = torch.finfo(x.dtype).max
    return _absmax_of(x, granularity, lambda x: torch.where(x.isinf(), largest, x).to(x.dtype))


@misconception("absmax", "It has one maximum for the tensor, and repeats it for every group.")
def one_for_all(x, granularity="tensor"):
    exact.require_granularity(granularity, x.dim())
    return exact.absmax(x).expand(exact.scale_shape(granularity, tuple(x.shape))).clone()


@misconception("absmax", "It takes the root of the sum of squares, which is a norm and not a maximum.")
def takes_the_norm(x, granularity="tensor"):
    exact.require_granularity(granularity, x.dim())
    with np.errstate(all="ignore"):
        squares = exact.groups(np.square(exact.numbers(x)), granularity, np.add)
        return exact.as_dtype(np.sqrt(squares), x.dtype)


@misconception("absmax", "It takes the mean of the magnitudes instead of the largest.")
def takes_the_mean(x, granularity="tensor"):
    exact.require_granularity(granularity, x.dim())
    with np.errstate(all="ignore"):
        sizes = np.abs(exact.numbers(x))
        total = exact.groups(sizes, granularity, np.add)
        count = exact.groups(np.ones_like(sizes), granularity, np.add)
        return exact.as_dtype(total / np.maximum(count, 1), x.dtype)


@misconception("absmax", "A block that does not fit is moved back until it does, and takes numbers of its neighbour.")
def moves_the_last_block_back(x, granularity="tensor"):
    right = exact.absmax(x, granularity)
    if isinstance(granularity, str) or not x.numel():
        return right
    (rows, columns), (height, width) = granularity, x.shape[-2:]
    for i in range(right.shape[-2]):
        for j in range(right.shape[-1]):
            top, left = max(0, min(i * rows, height - rows)), max(0, min(j * columns, width - columns))
            block = x[..., top : top + rows, left : left + columns]
            right[..., i, j] = block.abs().amax((-2, -1))
    return right


@misconception("absmax", "It swaps rows and columns.")
def swaps_rows_and_columns(x, granularity="tensor"):
    exact.require_granularity(granularity, x.dim())
    swapped = {"row": "column", "column": "row"}.get(granularity, granularity) if x.dim() > 1 else granularity
    return exact.absmax(x, swapped)


@misconception("absmax", "It reads (r, c) as r columns and c rows.")
def swaps_the_sides_of_blocks(x, granularity="tensor"):
    exact.require_granularity(granularity, x.dim())
    return exact.absmax(x, granularity if isinstance(granularity, str) else granularity[::-1])


@misconception("absmax", "It gives float32 for bfloat16 and float16: x.dtype is expected.")
def amax_in_float32(x, granularity="tensor"):
    return exact.absmax(x.float(), granularity)


# --- 7.2 scale_for ----------------------------------------------------------------------------------------------------


def amaxes(rng: np.random.Generator, count: int, low: int = -36, high: int = 120) -> Tensor:
    """Magnitudes of 2^low to 2^high, at random."""
    sizes = np.ldexp(rng.uniform(1, 2, count), rng.integers(low, high, count))
    return torch.from_numpy(sizes.astype(np.float32))


def near_powers(fmt: Format, rng: np.random.Generator, count: int) -> Tensor:
    """Magnitudes whose scale is a power of two, and their neighbours in float32: powers from 2^-90 to 2^40."""
    edge = np.ldexp(np.float64(oracle.max_finite(fmt)), rng.integers(-40, 90, count)).astype(np.float32)
    inf = np.float32(np.inf)
    return torch.from_numpy(np.concatenate([np.nextafter(edge, -inf), edge, np.nextafter(edge, inf)]))


@check_for("scale_for", weight=2)
def magnitudes_at_random(answer, case):
    """Magnitudes from 2^-36 to 2^120, for four float8 formats, E3M2, E2M3, E2M1 and made-up ones."""
    for fmt in (*FLOAT8, *SHORT, *MADE_UP):
        amax = amaxes(case.rng, case.count(100))
        case.same_bits(answer(amax, fmt), exact.scale_for(amax, fmt))


@check_for("scale_for", weight=2)
def scales_that_are_powers_of_two(answer, case):
    """Magnitudes at random, and those whose scale is a power of two or the float32 next to one."""
    for fmt in (*FLOAT8, *SHORT, *MADE_UP):
        for amax in (amaxes(case.rng, case.count(40)), near_powers(fmt, case.rng, case.count(20))):
            case.same_bits(answer(amax, fmt, power_of_two=True), exact.scale_for(amax, fmt, power_of_two=True))


@check_for("scale_for")
def magnitudes_in_16_bits(answer, case):
    """bfloat16 and float16."""
    for dtype, low, high in ((torch.bfloat16, -36, 120), (torch.float16, -14, 15)):
        for fmt in (E4M3, E5M2, E2M1):
            for power_of_two in (False, True):
                amax = amaxes(case.rng, case.count(20), low, high).to(dtype)
                want = exact.scale_for(amax, fmt, power_of_two=power_of_two)
                case.same_bits(answer(amax, fmt, power_of_two=power_of_two), want)


@check_for("scale_for")
def magnitudes_near_zero(answer, case):
    """0, 1e-40, 1e-20, and what lies around eps; eps of 1e-12, 1e-6 and 0, where 0 gets the largest float32."""
    for eps in (1e-12, 1e-6, 0.0):
        small = np.array([0.0, 1e-45, 1e-40, 1e-38, 1e-30, 1e-20, 1e-13, 1e-7, 1.0, *(case.rng.uniform(0, 3, 6) * eps)])
        for fmt in (E4M3, E5M2, E2M1, MADE_UP[1]):
            for power_of_two in (False, True):
                amax = torch.from_numpy(small.astype(np.float32))
                want = exact.scale_for(amax, fmt, eps, power_of_two)
                case.same_bits(answer(amax, fmt, eps, power_of_two), want)


@check_for("scale_for")
def magnitudes_that_are_not_finite(answer, case):
    """NaN and infinity among numbers."""
    for fmt in (*FLOAT8, *SHORT, MADE_UP[1]):
        for power_of_two in (False, True):
            amax = torch.cat([torch.tensor([math.nan, math.inf, 3e38, math.inf]), amaxes(case.rng, 2)])
            want = exact.scale_for(amax, fmt, power_of_two=power_of_two)
            case.same_bits(answer(amax, fmt, power_of_two=power_of_two), want)


@check_for("scale_for")
def shapes_of_scales(answer, case):
    """Magnitudes of no dimension, of rows and columns, of blocks, and none at all."""
    for shape in ((), (5, 1), (1, 4), (2, 3, 1), (2, 3), (0, 1), (0,)):
        for power_of_two in (False, True):
            amax = amaxes(case.rng, math.prod(shape)).reshape(shape)
            want = exact.scale_for(amax, E4M3, power_of_two=power_of_two)
            case.same_bits(answer(amax, E4M3, power_of_two=power_of_two), want)


def _scale(amax, fmt, eps, power_of_two, floor_power=exact.floor_power, limit=exact.LARGEST, top=None):
    """The rule, with parts of it replaced."""
    quotient = exact.quotient(amax, oracle.max_finite(fmt) if top is None else top, eps)
    scale = exact.single(quotient, limit)
    with np.errstate(all="ignore"):
        return exact.tensor(floor_power(scale) if power_of_two else scale)


@misconception(
    "scale_for",
    "It divides a number by a float32 tensor, for which torch multiplies by the reciprocal, and rounds twice.",
)
def multiplies_by_the_reciprocal(amax, fmt, eps=1e-12, power_of_two=False):
    with np.errstate(all="ignore"):
        below = np.maximum(exact.numbers(amax), eps).astype(np.float32)
        scale = np.minimum(np.float32(1) / below * np.float32(oracle.max_finite(fmt)), np.float32(exact.LARGEST))
    return exact.tensor(exact.floor_power(scale) if power_of_two else scale)


@misconception("scale_for", "It takes log2 in float32: just below a power of two that is the next exponent.")
def takes_log2(amax, fmt, eps=1e-12, power_of_two=False):
    def power(scale):
        whole = np.floor(np.log2(scale.astype(np.float64)).astype(np.float32))
        return np.exp2(np.minimum(whole, 127)).astype(np.float32)

    return _scale(amax, fmt, eps, power_of_two, power)


@misconception(
    "scale_for", "It rounds to the nearest power of two: half of the scales grow, and their groups saturate."
)
def nearest_power(amax, fmt, eps=1e-12, power_of_two=False):
    def power(scale):
        low = exact.floor_power(scale)
        usual = np.isfinite(scale) & (scale > 0) & (low < 2.0**127)
        return np.where(usual & (scale >= low * 1.5), low * 2, low)

    return _scale(amax, fmt, eps, power_of_two, power)


@misconception("scale_for", "It rounds up to a power of two: every group but the luckiest saturates.")
def next_power(amax, fmt, eps=1e-12, power_of_two=False):
    def power(scale):
        low = exact.floor_power(scale)
        usual = np.isfinite(scale) & (scale > 0) & (low < 2.0**127)
        return np.where(usual & (scale > low), low * 2, low)

    return _scale(amax, fmt, eps, power_of_two, power)


@misconception("scale_for", "It ignores power_of_two.")
def ignores_power_of_two(amax, fmt, eps=1e-12, power_of_two=False):
    return exact.scale_for(amax, fmt, eps)


@misconception(
    "scale_for", "It rounds the largest value and amax to powers of two apart: the quotient can be too large by 2."
)
def powers_apart(amax, fmt, eps=1e-12, power_of_two=False):
    if not power_of_two:
        return exact.scale_for(amax, fmt, eps)
    floored = np.maximum(exact.numbers(amax), eps)
    usual = np.isfinite(floored) & (floored > 0)
    low = np.where(usual, np.ldexp(1.0, np.frexp(floored)[1] - 1), floored)
    top = 2.0 ** math.floor(math.log2(oracle.max_finite(fmt)))
    with np.errstate(all="ignore"):
        scale = exact.single(np.float64(top) / low)
    return exact.tensor(exact.floor_power(scale))


@misconception("scale_for", "It makes infinity of NaN where it clears the mantissa: NaN is an infinity with one.")
def clears_the_mantissa_of_nan(amax, fmt, eps=1e-12, power_of_two=False):
    right = exact.scale_for(amax, fmt, eps, power_of_two)
    return torch.where(right.isnan(), math.inf, right) if power_of_two else right


@misconception("scale_for", "It has no floor under amax: a group of zeros gets the largest scale there is.")
def no_floor(amax, fmt, eps=1e-12, power_of_two=False):
    return exact.scale_for(amax, fmt, 0.0, power_of_two)


@misconception("scale_for", "It puts eps only where amax is 0: what is smaller than eps stays.")
def floor_at_zero_only(amax, fmt, eps=1e-12, power_of_two=False):
    kept = torch.where(amax == 0, eps, amax.double())
    return exact.scale_for(kept, fmt, 0.0, power_of_two)


@misconception("scale_for", "It adds eps to amax instead of taking the larger one.")
def adds_eps(amax, fmt, eps=1e-12, power_of_two=False):
    return exact.scale_for(amax.double() + eps, fmt, 0.0, power_of_two)


@misconception("scale_for", "It gives the inverse, amax / largest value: by that one divides.")
def the_inverse(amax, fmt, eps=1e-12, power_of_two=False):
    with np.errstate(all="ignore"):
        scale = exact.single(np.maximum(exact.numbers(amax), eps) / oracle.max_finite(fmt), math.inf)
    return exact.tensor(exact.floor_power(scale) if power_of_two else scale)


@misconception("scale_for", "It has 448 for every format.")
def always_448(amax, fmt, eps=1e-12, power_of_two=False):
    return _scale(amax, fmt, eps, power_of_two, top=448.0)


@misconception("scale_for", "It divides in amax's dtype: bfloat16 and float16 amaxes get a scale of as few bits.")
def divides_in_16_bits(amax, fmt, eps=1e-12, power_of_two=False):
    right = exact.scale_for(amax, fmt, eps)
    if amax.dtype == torch.bfloat16:
        right = exact.as_dtype(right.numpy(), torch.bfloat16).float()
    elif amax.dtype == torch.float16:
        right = torch.from_numpy(right.numpy().astype(np.float16).astype(np.float32)).clamp(max=65504.0)
    return exact.tensor(exact.floor_power(right.numpy())) if power_of_two else right


@misconception("scale_for", "It gives 1 for an infinite amax, and the overflow comes back as the largest value.")
def one_for_infinity(amax, fmt, eps=1e-12, power_of_two=False):
    return torch.where(amax.isinf(), 1.0, exact.scale_for(amax, fmt, eps, power_of_two))


@misconception("scale_for", "It lets a scale beyond float32 be infinite: 0 times that is NaN.")
def infinite_scales(amax, fmt, eps=1e-12, power_of_two=False):
    return _scale(amax, fmt, eps, power_of_two, limit=math.inf)


# --- 7.3 quantize -----------------------------------------------------------------------------------------------------


def _compare_quantized(answer, case, x, fmt, granularity, power_of_two=False) -> None:
    q = exact.quantize(x, fmt, granularity, power_of_two)
    want = one_nan(q.codes, fmt), q.scale
    got = answer.run(quantized, x, fmt, granularity, power_of_two)
    _same_parts(case, got, want, ("tensor of codes", "scale"))


@check_for("quantize", weight=2)
def matrices_in_float8(answer, case):
    """Matrices in E4M3 and E5M2, by tensor, row, column and block; float32, bfloat16 and float16."""
    for fmt in (E4M3, E5M2):
        for granularity in GRANULARITIES:
            for dtype in FLOATS:
                for _ in range(case.count(1)):
                    _compare_quantized(answer, case, drawn(case.rng, (5, 7), dtype), fmt, granularity)


@check_for("quantize")
def scales_rounded_down(answer, case):
    """The same, with scales that are powers of two."""
    for fmt in (E4M3, E5M2, E2M1):
        for granularity in GRANULARITIES:
            for dtype in FLOATS[:2]:
                for _ in range(case.count(1)):
                    _compare_quantized(answer, case, drawn(case.rng, (4, 6), dtype), fmt, granularity, True)


@check_for("quantize")
def formats_of_all_kinds(answer, case):
    """Both fnuz formats, E3M2, E2M3, E2M1 and made-up formats; ties among the numbers."""
    for fmt in (*FLOAT8[2:], *SHORT, *MADE_UP):
        for granularity in ("tensor", "row", (2, 2)):
            for _ in range(case.count(1)):
                _compare_quantized(answer, case, drawn(case.rng, (4, 6)), fmt, granularity)
                _compare_quantized(answer, case, ties(fmt, case.rng), fmt, granularity, True)


def ties(fmt: Format, rng: np.random.Generator) -> Tensor:
    """A power of two times values of the format and midpoints between them; the largest value leads every row."""
    steps = rounding_oracle.ladder(fmt)[0]
    place = rng.integers(0, len(steps) - 1, (4, 12))
    middle = (steps[place] + steps[place + rng.integers(0, 2, place.shape)]) / 2
    middle[:, 0] = steps[-1]
    signs = rng.choice([-1.0, 1.0], place.shape)
    return torch.from_numpy(np.ldexp(middle * signs, int(rng.integers(-9, 4))).astype(np.float32))


@check_for("quantize")
def quantized_special_values(answer, case):
    """Rows of zeros, with NaN, with an infinity, of 1e-40 and of 1e-20 alone, by row, column and tensor."""
    for x in with_special_values(case.rng):
        for fmt in (E4M3, E5M2, E4M3FNUZ, MADE_UP[0]):
            for granularity in ("row", "column", "tensor"):
                _compare_quantized(answer, case, x, fmt, granularity)


@check_for("quantize")
def quantized_shapes(answer, case):
    """No dimension, one, three and four; transposed and strided ones; tensors without elements."""
    for x in [*of_every_shape(case.rng), drawn(case.rng, ()), *empty_ones()]:
        for granularity in GRANULARITIES:
            if fits(granularity, x):
                _compare_quantized(answer, case, x, E4M3, granularity)


@check_for("quantize")
def what_cannot_be_quantized(answer, case):
    """ValueError: NaN or an infinity in E2M1 and E3M2, formats of 16 bits, granularities that are none."""
    for value in (math.nan, math.inf, -math.inf):
        x = drawn(case.rng, (2, 3))
        x[1, 1] = value
        for fmt in (E2M1, E3M2):
            case.same_bits(answer.run(refusal, x, fmt, "tensor"), "ValueError")
    for fmt, granularity in ((FP16, "tensor"), (E4M3, "rows"), (E4M3, (0, 2)), (E2M1, "")):
        case.same_bits(answer.run(refusal, drawn(case.rng, (2, 3)), fmt, granularity), "ValueError")


def _quantized_with(x, fmt, granularity, power_of_two, product=None, codes=None, scale=None):
    """The rule, with parts of it replaced; it refuses what the contract refuses."""
    right = exact.quantize(x, fmt, granularity, power_of_two)
    used = right.scale if scale is None else scale(right.scale)
    if product is None and codes is None:
        return Quantized(right.codes, used, fmt, granularity, x.dtype)
    with np.errstate(all="ignore"):
        values = exact.scaled(x, used, granularity) if product is None else product(used)
    if fmt.specials == "finite":
        values = torch.nan_to_num(values, nan=0.0)
    found = (exact.codes_of if codes is None else codes)(values, fmt)
    return Quantized(found, right.scale, fmt, granularity, x.dtype)


@misconception("quantize", "It divides by the scale instead of multiplying.")
def divides_by_the_scale(x, fmt, granularity="tensor", power_of_two=False):
    def product(scale):
        wide = exact.spread(scale.numpy(), granularity, tuple(x.shape))
        return exact.tensor(exact.numbers(x).astype(np.float32) / wide)

    return _quantized_with(x, fmt, granularity, power_of_two, product)


@misconception("quantize", "It multiplies in x's dtype: bfloat16 and float16 round once before the codes do.")
def multiplies_in_16_bits(x, fmt, granularity="tensor", power_of_two=False):
    def product(scale):
        if x.dtype == torch.float32:
            return exact.scaled(x, scale, granularity)
        narrow = exact.as_dtype(scale.numpy(), x.dtype).float()
        return exact.as_dtype(exact.scaled(x, narrow, granularity).numpy(), x.dtype).float()

    return _quantized_with(x, fmt, granularity, power_of_two, product)


@misconception("quantize", "It rounds the product to bfloat16 before it encodes: some numbers are rounded twice.")
def rounds_to_bfloat16_first(x, fmt, granularity="tensor", power_of_two=False):
    def product(scale):
        return exact.as_dtype(exact.scaled(x, scale, granularity).numpy(), torch.bfloat16).float()

    return _quantized_with(x, fmt, granularity, power_of_two, product)


@misconception("quantize", "It cuts towards zero instead of rounding to the nearest value.")
def cuts_to_codes(x, fmt, granularity="tensor", power_of_two=False):
    return _quantized_with(x, fmt, granularity, power_of_two, codes=_towards_zero)


def _towards_zero(values, fmt):
    return exact.codes_of(values, fmt, "toward_zero")


def _away(values, fmt):
    return exact.codes_of(values, fmt, "nearest_away")


def _whole(values, fmt):
    return torch.nan_to_num(values, nan=0.0).round().clamp(-128, 127).to(torch.int8).view(torch.uint8)


def _without_subnormals(values, fmt):
    small = values.abs() < oracle.min_normal(fmt)
    return exact.codes_of(torch.where(small, torch.copysign(torch.zeros_like(values), values), values), fmt)


@misconception("quantize", "It rounds ties away from zero.")
def codes_of_ties_away(x, fmt, granularity="tensor", power_of_two=False):
    return _quantized_with(x, fmt, granularity, power_of_two, codes=_away)


@misconception("quantize", "It rounds to whole numbers and takes those for codes: codes of a float are bits.")
def whole_numbers_for_codes(x, fmt, granularity="tensor", power_of_two=False):
    return _quantized_with(x, fmt, granularity, power_of_two, codes=_whole)


@misconception("quantize", "It flushes the format's subnormal numbers to zero.")
def flushes_subnormals(x, fmt, granularity="tensor", power_of_two=False):
    return _quantized_with(x, fmt, granularity, power_of_two, codes=_without_subnormals)


@misconception("quantize", "It encodes x as it is, and forgets the scale.")
def encodes_unscaled(x, fmt, granularity="tensor", power_of_two=False):
    return _quantized_with(x, fmt, granularity, power_of_two, lambda scale: x.float())


@misconception("quantize", "It ignores power_of_two.")
def quantizes_without_powers(x, fmt, granularity="tensor", power_of_two=False):
    return exact.quantize(x, fmt, granularity)


@misconception("quantize", "It keeps the inverse of the scale, as hardware wants it: here values are code / scale.")
def keeps_the_inverse(x, fmt, granularity="tensor", power_of_two=False):
    def inverse(scale):
        with np.errstate(all="ignore"):
            return exact.tensor(np.float32(1) / scale.numpy())

    return _quantized_with(x, fmt, granularity, power_of_two, scale=inverse)


@misconception("quantize", "It has one scale for the tensor, and writes it down for every group.")
def one_scale_for_all(x, fmt, granularity="tensor", power_of_two=False):
    exact.require_granularity(granularity, x.dim())
    q = exact.quantize(x, fmt, "tensor", power_of_two)
    shape = exact.scale_shape(granularity, tuple(x.shape))
    return Quantized(q.codes, q.scale.expand(shape).clone(), fmt, granularity, x.dtype)


@misconception("quantize", "It reads the scale of x from 448 whatever the format is.")
def scale_of_e4m3(x, fmt, granularity="tensor", power_of_two=False):
    exact.quantize(x, fmt, granularity, power_of_two)
    scale = _scale(exact.absmax(x, granularity), fmt, exact.EPS, power_of_two, top=448.0)
    return Quantized(exact.codes_of(exact.scaled(x, scale, granularity), fmt), scale, fmt, granularity, x.dtype)


# --- 7.4 dequantize ---------------------------------------------------------------------------------------------------


def _compare_dequantized(answer, case, q: Quantized) -> None:
    got = answer.run(dequantized, q.codes, q.scale, q.fmt, q.granularity, q.dtype)
    case.same_bits(got, exact.dequantize(q))


def any_codes(fmt: Format, rng: np.random.Generator, granularity, shape=(4, 6), dtype=torch.float32) -> Quantized:
    """Random codes that are finite numbers, and a random scale of 2^-8 to 2^8 for each group."""
    codes = np.arange(2**fmt.width)
    values = oracle.decode(torch.from_numpy(codes.astype(np.int32)), fmt).numpy()
    chosen = rng.choice(codes[np.isfinite(values)], shape)
    scale = amaxes(rng, math.prod(exact.scale_shape(granularity, shape)), -8, 8)
    scale = scale.reshape(exact.scale_shape(granularity, shape))
    return Quantized(torch.from_numpy(np.asarray(chosen, dtype=np.uint8)), scale, fmt, granularity, dtype)


@check_for("dequantize", weight=2)
def codes_and_scales_at_random(answer, case):
    """Random codes of E4M3, E5M2, the fnuz formats, E3M2, E2M3, E2M1 and made-up formats, in every granularity."""
    for fmt in (*FLOAT8, *SHORT, *MADE_UP):
        for granularity in GRANULARITIES:
            for _ in range(case.count(1)):
                _compare_dequantized(answer, case, any_codes(fmt, case.rng, granularity))


@check_for("dequantize")
def back_to_16_bits(answer, case):
    """Tensors that were bfloat16 and float16."""
    for dtype in FLOATS[1:]:
        for fmt in (E4M3, E5M2, E2M1):
            for granularity in GRANULARITIES:
                for _ in range(case.count(1)):
                    _compare_dequantized(answer, case, any_codes(fmt, case.rng, granularity, dtype=dtype))


@check_for("dequantize")
def every_code_there_is(answer, case):
    """All codes of E4M3, E5M2, E4M3FNUZ and E2M1, NaN and infinities too; scales of 1, 3, 0 and NaN."""
    for fmt in (E4M3, E5M2, E4M3FNUZ, E2M1):
        codes = torch.arange(2**fmt.width, dtype=torch.uint8)
        for scale in (1.0, 3.0, 0.0, math.nan):
            _compare_dequantized(answer, case, Quantized(codes, torch.tensor(scale), fmt, "tensor", torch.float32))


@check_for("dequantize")
def dequantized_shapes(answer, case):
    """No dimension, one, three and four; transposed codes; none at all; blocks that do not divide."""
    for shape in ((), (7,), (2, 3, 5), (2, 1, 4, 3), (3, 0), (0,), (1, 1)):
        for granularity in GRANULARITIES:
            if fits(granularity, torch.empty(shape)):
                _compare_dequantized(answer, case, any_codes(E4M3, case.rng, granularity, shape))
    for granularity in GRANULARITIES:
        q = any_codes(E4M3, case.rng, granularity, (6, 4))
        _compare_dequantized(answer, case, Quantized(q.codes.t().contiguous().t(), q.scale, E4M3, granularity, q.dtype))


def _back(q, quotient=None, scale=None):
    """decode(code) / scale, with parts of it replaced; numpy float32."""
    wide = exact.spread(q.scale.numpy(), q.granularity, tuple(q.codes.shape)) if scale is None else scale
    with np.errstate(all="ignore"):
        values = exact.values(q).astype(np.float32)
        found = values / wide if quotient is None else quotient(values, wide)
        return exact.as_dtype(found, q.dtype)


@misconception("dequantize", "It multiplies by the scale instead of dividing.")
def multiplies_by_the_scale(q):
    return _back(q, lambda values, scale: values * scale)


@misconception("dequantize", "It multiplies by 1 / scale, which is rounded already: the quotient can be off by an ulp.")
def multiplies_by_the_inverse(q):
    return _back(q, lambda values, scale: values * (np.float32(1) / scale))


@misconception("dequantize", "It rounds the scale to q.dtype before it divides.")
def scale_in_16_bits(q):
    narrow = exact.as_dtype(exact.spread(q.scale.numpy(), q.granularity, tuple(q.codes.shape)), q.dtype)
    return _back(q, scale=narrow.float().numpy())


@misconception("dequantize", "It forgets the scale: what comes back is decode(code).")
def forgets_the_scale(q):
    return _back(q, lambda values, scale: values)


@misconception("dequantize", "It reads the codes as whole numbers, not as codes of the format.")
def codes_as_numbers(q):
    return _back(q, lambda values, scale: np.asarray(q.codes.numpy(), dtype=np.float32) / scale)


@misconception("dequantize", "It makes 0 of what has a scale of 0: the NaN that should tell of an overflow is gone.")
def zero_for_a_scale_of_zero(q):
    return _back(q, lambda values, scale: np.where(scale == 0, np.float32(0), values / scale))


@misconception("dequantize", "It uses the scale of the first group for all.")
def first_scale_for_all(q):
    return _back(q, scale=q.scale.numpy().reshape(-1)[0] if q.codes.numel() else None)


@misconception("dequantize", "It lays the scales of blocks side by side instead of repeating each for its block.")
def tiles_the_scales(q):
    if isinstance(q.granularity, str) or not q.codes.numel():
        return _back(q)
    scale, (height, width) = q.scale.numpy(), q.codes.shape[-2:]
    rows, columns = np.arange(height) % scale.shape[-2], np.arange(width) % scale.shape[-1]
    return _back(q, scale=scale[..., rows, :][..., columns])


@misconception("dequantize", "It decodes as E4M3 whatever the format is.")
def decodes_as_e4m3(q):
    other = Quantized(q.codes, q.scale, E4M3, q.granularity, q.dtype)
    return exact.dequantize(other)


@misconception("dequantize", "It gives float32 always: q.dtype is expected.")
def back_in_float32(q):
    return exact.dequantize(Quantized(q.codes, q.scale, q.fmt, q.granularity, torch.float32))


# --- 7.5 sqnr_db ------------------------------------------------------------------------------------------------------


def _compare_decibel(answer, case, x: Tensor, y: Tensor) -> None:
    """To a billionth: in which order squares are added is the answer's choice."""
    got, want = answer(x, y), exact.sqnr_db(x, y)
    close = type(got) is float and abs(got - want) <= 1e-9 * max(1.0, abs(want))
    case.same_bits(want if close else got, want)


@check_for("sqnr_db", weight=2)
def noise_of_all_sizes(answer, case):
    """Numbers with noise of 2^-20 to 2^3 of their size, and numbers rounded to bfloat16; one to three dimensions."""
    for shape in ((50,), (6, 8), (2, 3, 5), ()):
        for _ in range(case.count(4)):
            x = drawn(case.rng, shape)
            _compare_decibel(answer, case, x, x + drawn(case.rng, shape) * 2.0 ** int(case.rng.integers(-20, 4)))
        _compare_decibel(answer, case, x, exact.as_dtype(x.numpy(), torch.bfloat16).float())


@check_for("sqnr_db")
def noise_in_16_bits(answer, case):
    """bfloat16 and float16, and a mixture: what is lost when such numbers are subtracted in 16 bits."""
    for one, other in ((torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float32, torch.bfloat16)):
        for _ in range(case.count(3)):
            x = drawn(case.rng, (30,))
            y = x + drawn(case.rng, (30,)) / 8
            _compare_decibel(answer, case, x.to(one), y.to(other))


@check_for("sqnr_db")
def huge_and_tiny_numbers(answer, case):
    """Numbers around 1e30 and 1e-30: their squares do not fit into float32."""
    for size in (1e30, 1e-30, 1e-38, 1e20):
        for _ in range(case.count(2)):
            x = drawn(case.rng, (20,)) * size
            _compare_decibel(answer, case, x, x * (1 + drawn(case.rng, (20,)) / 128))


@check_for("sqnr_db")
def no_noise_or_no_signal(answer, case):
    """Equal tensors, zeros of both signs and no elements; zeros against numbers; NaN and infinities in either."""
    x, zeros = drawn(case.rng, (6,)), torch.zeros(6)
    for same in (x, zeros, -zeros, torch.zeros(0), torch.zeros(2, 0), x.to(torch.bfloat16)):
        _compare_decibel(answer, case, same, same)
    _compare_decibel(answer, case, zeros, -zeros)
    for one in (x, x / 3, x * 100):
        _compare_decibel(answer, case, zeros, one)
        for value in (math.nan, math.inf, -math.inf):
            bad = one.clone()
            bad[2] = value
            for pair in ((bad, one), (one, bad), (bad, bad)):
                _compare_decibel(answer, case, *pair)


def _decibel(x, y, signal=None, noise=None, factor=10.0, logarithm=math.log10):
    """The ratio, with parts of it replaced: what signal and noise are, in float64."""
    a, b = exact.numbers(x), exact.numbers(y)
    with np.errstate(all="ignore"):
        above = exact.power(a) if signal is None else signal(a, b)
        below = exact.power(a - b) if noise is None else noise(a, b)
        return exact.decibel(float(above), float(below), factor, logarithm)


@misconception("sqnr_db", "It multiplies by 20: that is for a ratio of lengths, and this one is of squares.")
def twenty_for_squares(x, y):
    return _decibel(x, y, factor=20.0)


@misconception("sqnr_db", "It takes the natural logarithm.")
def natural_logarithm(x, y):
    return _decibel(x, y, logarithm=math.log)


@misconception("sqnr_db", "It turns the ratio round: less noise gives a smaller number.")
def noise_to_signal(x, y):
    found = exact.sqnr_db(x, y)
    return found if found == math.inf else -found


@misconception("sqnr_db", "It compares the largest square with the mean of the noise, which is the PSNR of pictures.")
def peak_signal(x, y):
    def peak(a, b):
        return np.square(a).max(initial=0.0) * a.size

    return _decibel(x, y, signal=peak)


@misconception("sqnr_db", "It compares the largest magnitude with the largest error instead of adding squares.")
def largest_error(x, y):
    return _decibel(x, y, lambda a, b: np.square(a).max(initial=0.0), lambda a, b: np.square(a - b).max(initial=0.0))


@misconception("sqnr_db", "It takes the signal from y, the approximation.")
def signal_of_y(x, y):
    return _decibel(x, y, signal=lambda a, b: exact.power(b) if np.isfinite(b).all() else exact.power(a))


@misconception("sqnr_db", "It squares in float32: 1e30 becomes infinite, and 1e-30 zero.")
def squares_in_float32(x, y):
    def squares(values):
        return np.square(values.astype(np.float32)).astype(np.float64).sum()

    return _decibel(x, y, lambda a, b: squares(a), lambda a, b: squares(a - b))


@misconception("sqnr_db", "It subtracts in the dtype of its inputs: bfloat16 and float16 round the noise.")
def subtracts_in_16_bits(x, y):
    def noise(a, b):
        if x.dtype == torch.float32 or x.dtype != y.dtype:
            return exact.power(a - b)
        return exact.power(exact.numbers(exact.as_dtype((a - b).astype(np.float32), x.dtype)))

    return _decibel(x, y, noise=noise)


@misconception("sqnr_db", "It gives NaN where there is no noise and no signal: 0 / 0.")
def nan_for_zeros(x, y):
    found = exact.sqnr_db(x, y)
    return math.nan if found == math.inf and exact.power(exact.numbers(x)) == 0 else found


# --- 7.6 quantize_int8 ------------------------------------------------------------------------------------------------


def _compare_int8(answer, case, x: Tensor, symmetric: bool) -> None:
    got, want = answer(x, symmetric), exact.quantize_int8(x, symmetric)
    _same_parts(case, got, want, ("tensor of codes", "scale", "zero point"))


def one_sided(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Numbers mostly of one sign, at times with an offset, so that 0 lies anywhere between the ends or outside."""
    x = drawn(rng, shape)
    return x + float(rng.choice([-3.0, -1.0, -0.25, 0.0, 0.25, 1.0, 3.0])) * x.abs().max()


@check_for("quantize_int8", weight=2)
def symmetric_codes(answer, case):
    """Numbers of one to three dimensions and one-sided ones, symmetric; float32, bfloat16 and float16."""
    for shape in ((40,), (5, 6), (2, 3, 4), (), (1,)):
        for dtype in FLOATS:
            for _ in range(case.count(2)):
                _compare_int8(answer, case, one_sided(case.rng, shape).to(dtype), True)


@check_for("quantize_int8", weight=2)
def codes_with_a_zero_point(answer, case):
    """The same with a zero point: 0 between the ends, at one of them, and outside."""
    for shape in ((40,), (5, 6), (2, 3, 4), (), (1,)):
        for dtype in FLOATS:
            for _ in range(case.count(2)):
                _compare_int8(answer, case, one_sided(case.rng, shape).to(dtype), False)


@check_for("quantize_int8")
def ties_and_ends(answer, case):
    """Multiples of half a step, where ties are, and ranges at whose upper end the code would be 128."""
    halves = torch.arange(-254, 255, dtype=torch.float32) / 2
    for factor in (1.0, 2.0**-7, 2.0**9):
        _compare_int8(answer, case, halves * factor, True)
    whole = torch.arange(-256, 255, dtype=torch.float32) / 2
    for low in (-128.0, -127.5, -100.0, 0.0):
        span = (whole - whole[0] + low) * 2.0 ** int(case.rng.integers(-9, 9))
        _compare_int8(answer, case, span, False)
    for _ in range(case.count(6)):
        end = float(case.rng.uniform(0.5, 2))
        _compare_int8(answer, case, torch.tensor([-end, end, 0.0, end / 3]), False)


@check_for("quantize_int8")
def zeros_and_tiny_numbers(answer, case):
    """Zeros, 1e-40, numbers below 1e-12, the largest float32, and tensors without elements."""
    tiny = drawn(case.rng, (5,))
    for x in (torch.zeros(3), -torch.zeros(2), torch.tensor([1e-40, -1e-41]), tiny * 1e-13, tiny * 1e-11,
              torch.tensor([3.4e38, -3.4e38, 1.0]), torch.zeros(0), torch.zeros(2, 0)):  # fmt: skip
        for symmetric in (True, False):
            _compare_int8(answer, case, x, symmetric)


@check_for("quantize_int8")
def numbers_that_int8_has_not(answer, case):
    """ValueError: NaN, infinity and minus infinity, alone and among numbers, with and without a zero point."""
    for value in (math.nan, math.inf, -math.inf):
        for symmetric in (True, False):
            x = drawn(case.rng, (4,))
            x[2] = value
            case.raises(ValueError, answer, x, symmetric)
            case.raises(ValueError, answer, x[2], symmetric)


def _nearest(x, scale):
    return np.rint(exact.numbers(x).astype(np.float32) / scale)


def _int8(x, symmetric, ends=None, parts=127, levels=255, rounded=None, clamp=True, zero=True):
    """The rule, with parts of it replaced."""
    lo, hi = (ends or exact.ends)(x)
    scale = np.float32(max(-lo, hi) / parts if symmetric else (hi - lo) / levels)
    scale = max(scale, np.float32(exact.EPS))
    point = np.float32(0)
    if not symmetric and zero:
        point = np.rint(np.float32(-128) - np.float32(lo) / scale)
    found = (rounded or _nearest)(x, scale) + point
    found = np.clip(found, -127 if symmetric else -128, 127) if clamp else (found + 128) % 256 - 128
    return (
        torch.from_numpy(np.asarray(found, dtype=np.int8)),
        exact.tensor(scale),
        torch.tensor(max(-(2**31), min(int(point), 2**31 - 1)), dtype=torch.int32),
    )


@misconception("quantize_int8", "It cuts the fraction off instead of rounding.")
def cuts_the_fraction(x, symmetric=True):
    def cut(x, scale):
        return np.trunc(exact.numbers(x).astype(np.float32) / scale)

    return _int8(x, symmetric, rounded=cut)


@misconception("quantize_int8", "It rounds ties away from zero.")
def int8_ties_away(x, symmetric=True):
    def away(x, scale):
        steps = (exact.numbers(x).astype(np.float32) / scale).astype(np.float64)
        return np.copysign(np.floor(np.abs(steps) + 0.5), steps)

    return _int8(x, symmetric, rounded=away)


@misconception(
    "quantize_int8", "It multiplies by 1 / scale, which is rounded: some numbers land on the other side of a tie."
)
def multiplies_steps(x, symmetric=True):
    def product(x, scale):
        return np.rint(exact.numbers(x).astype(np.float32) * (np.float32(1) / scale))

    return _int8(x, symmetric, rounded=product)


@misconception("quantize_int8", "It divides by 128 where it is symmetric: the largest number would need the code 128.")
def divides_by_128(x, symmetric=True):
    return _int8(x, symmetric, parts=128)


@misconception("quantize_int8", "It divides the range by 256: there are 256 codes, and 255 steps between them.")
def divides_by_256(x, symmetric=True):
    return _int8(x, symmetric, levels=256)


@misconception("quantize_int8", "It takes the smallest and the largest number as they are: 0 may have no code then.")
def zero_left_outside(x, symmetric=True):
    def inside(x):
        lo, hi = exact.ends(x)
        if symmetric or not x.numel():
            return lo, hi
        return float(exact.numbers(x).min()), float(exact.numbers(x).max())

    return _int8(x, symmetric, inside)


@misconception("quantize_int8", "It does not clamp: 128 wraps round to -128.")
def wraps_round(x, symmetric=True):
    return _int8(x, symmetric, clamp=False)


@misconception("quantize_int8", "It has no zero point: codes of one-sided numbers are clamped.")
def no_zero_point(x, symmetric=True):
    return _int8(x, symmetric, zero=False)


@misconception("quantize_int8", "It is symmetric always: the argument is ignored.")
def symmetric_always(x, symmetric=True):
    return exact.quantize_int8(x, True)


@misconception("quantize_int8", "It uses the largest number instead of the largest magnitude where it is symmetric.")
def largest_number_only(x, symmetric=True):
    def ends(x):
        lo, hi = exact.ends(x)
        return (0.0, hi) if symmetric else (lo, hi)

    return _int8(x, symmetric, ends)


@misconception("quantize_int8", "It makes 0 of NaN, and the largest numbers of infinities: nobody hears of them.")
def hides_what_is_not_finite(x, symmetric=True):
    return exact.quantize_int8(torch.nan_to_num(x.float(), nan=0.0), symmetric)


# --- 7.7 straight_through ---------------------------------------------------------------------------------------------


def _compare_through(answer, case, x: Tensor, fmt: Format, gradient: Tensor) -> None:
    value = exact.dequantize(exact.quantize(x, fmt))
    got = answer.run(passed_through, x, fmt, gradient)
    _same_parts(case, got, (value, gradient), ("result", "gradient"))


@check_for("straight_through", weight=2)
def values_and_gradients(answer, case):
    """Random numbers and random gradients, in E4M3, E5M2, E3M2 and E2M1."""
    for fmt in (E4M3, E5M2, E3M2, E2M1):
        for shape in ((12,), (4, 5)):
            for _ in range(case.count(1)):
                _compare_through(answer, case, drawn(case.rng, shape), fmt, drawn(case.rng, shape))


@check_for("straight_through")
def gradients_of_all_sizes(answer, case):
    """Gradients of 2^-60 to 2^60, zeros of both signs, NaN and infinities; numbers that become 0."""
    for fmt in (E4M3, E5M2):
        x = torch.cat([drawn(case.rng, (10,)), torch.tensor([1e-30, 0.0, -0.0])])
        sizes = np.ldexp(case.rng.uniform(-1, 1, 13), case.rng.integers(-60, 61, 13)).astype(np.float32)
        gradient = torch.from_numpy(sizes)
        gradient[:5] = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf])
        _compare_through(answer, case, x, fmt, gradient)


@check_for("straight_through")
def numbers_and_gradients_in_16_bits(answer, case):
    """bfloat16 and float16."""
    for dtype in FLOATS[1:]:
        for fmt in (E4M3, E5M2):
            for _ in range(case.count(1)):
                _compare_through(answer, case, drawn(case.rng, (20,), dtype), fmt, drawn(case.rng, (20,), dtype))


@check_for("straight_through")
def other_tensors(answer, case):
    """No dimension, three, transposed, zeros alone, no elements."""
    for x in [*of_every_shape(case.rng), drawn(case.rng, ()), torch.zeros(3), torch.zeros(0), torch.zeros(2, 0)]:
        _compare_through(answer, case, x, E4M3, drawn(case.rng, tuple(x.shape)))


def _there_and_back(x, fmt):
    return exact.dequantize(exact.quantize(x, fmt))


@misconception(
    "straight_through", "It adds the difference, x + (y - x).detach(): that sum is rounded, and is not always y."
)
def adds_the_difference(x, fmt):
    held = x.detach()
    y = _there_and_back(held, fmt)
    return exact.with_gradient(x, held + (y - held))


@misconception("straight_through", "It quantizes the gradient on its way back, as a cast to float8 and back does.")
def quantizes_the_gradient(x, fmt):
    def quantized_too(gradient):
        return _there_and_back(gradient, fmt) if bool(gradient.isfinite().all()) else gradient

    return exact.with_gradient(x, _there_and_back(x, fmt), quantized_too)


@misconception("straight_through", "It casts the gradient to the format without a scale, as autograd does for a cast.")
def rounds_the_gradient(x, fmt):
    def rounded(gradient):
        finite = torch.nan_to_num(gradient.float(), nan=0.0)
        y = rounding_oracle.round_to(finite, fmt)
        return exact.as_dtype(torch.where(gradient.isnan(), math.nan, y).numpy(), gradient.dtype)

    return exact.with_gradient(x, _there_and_back(x, fmt), rounded)


@misconception("straight_through", "It lets no gradient through: the true derivative of rounding is 0.")
def stops_the_gradient(x, fmt):
    return exact.with_gradient(x, _there_and_back(x, fmt), torch.zeros_like)


@misconception("straight_through", "It stops the gradient of the largest numbers, those that use the last code.")
def stops_at_the_largest(x, fmt):
    held = x.detach()
    last = held.abs() >= exact.absmax(held)

    def masked(gradient):
        return torch.where(last, 0.0, gradient).to(gradient.dtype)

    return exact.with_gradient(x, _there_and_back(x, fmt), masked)


@misconception("straight_through", "It stops the gradient where the result is 0.")
def stops_at_zero(x, fmt):
    y = _there_and_back(x, fmt)

    def masked(gradient):
        return torch.where(y == 0, 0.0, gradient).to(gradient.dtype)

    return exact.with_gradient(x, y, masked)


@misconception(
    "straight_through", "It rounds to the format without a scale: large numbers saturate, small ones vanish."
)
def rounds_without_a_scale(x, fmt):
    y = rounding_oracle.round_to(x.detach().float(), fmt)
    return exact.with_gradient(x, exact.as_dtype(y.numpy(), x.dtype))


@misconception("straight_through", "It multiplies the gradient by the scale: that has been divided out again.")
def scales_the_gradient(x, fmt):
    scale = exact.scale_for(exact.absmax(x), fmt)

    def times(gradient):
        return exact.as_dtype(exact.scaled(gradient, scale, "tensor").numpy(), gradient.dtype)

    return exact.with_gradient(x, _there_and_back(x, fmt), times)


@misconception(
    "straight_through", "It returns x as it is: only the gradient is straight, the value is to be quantized."
)
def quantizes_nothing(x, fmt):
    return exact.with_gradient(x, x.detach())


# --- 7.8 best_clip ----------------------------------------------------------------------------------------------------

_SOME = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)


def decided(rng: np.random.Generator, fmt: Format, fractions, count: int = 160, outlier: float = 0.0) -> Tensor:
    """Numbers for which one clip is clearly the best, so that no order of adding squares can change it.

    outlier: the first number, relative to the root mean square of the others; 0 for none.
    """
    while True:
        x = torch.from_numpy(rng.normal(size=count).astype(np.float32)) * 2.0 ** int(rng.integers(-9, 5))
        if outlier:
            x[0] = outlier * float(x[1:].square().mean().sqrt())
        errors = sorted(exact.power(each) for each in exact.clipped_errors(x, fmt, fractions)[1])
        if errors[0] < errors[1] * (1 - 1e-6):
            return x


@check_for("best_clip", weight=2)
def gaussian_numbers(answer, case):
    """40 and 160 Gaussian numbers in E2M1, E3M2, E2M3, E4M3 and a made-up format, with the default fractions."""
    for fmt, count in ((E2M1, 160), (E2M1, 40), (E3M2, 160), (E2M3, 160), (E2M3, 40), (E4M3, 160), (MADE_UP[0], 40)):
        for _ in range(case.count(3)):
            x = decided(case.rng, fmt, exact.FRACTIONS, count)
            case.same_bits(answer(x, fmt), exact.best_clip(x, fmt))


@check_for("best_clip", weight=2)
def numbers_with_an_outlier(answer, case):
    """Gaussian numbers, one of them 4 to 8 times as large as the others, with fractions in any order."""
    for fmt in SHORT:
        for _ in range(case.count(4)):
            fractions = tuple(float(each) for each in case.rng.permutation(_SOME))
            x = decided(case.rng, fmt, fractions, outlier=float(case.rng.uniform(4, 8)))
            case.same_bits(answer(x, fmt, fractions), exact.best_clip(x, fmt, fractions))


@check_for("best_clip")
def clips_that_are_equally_good(answer, case):
    """Numbers below 1e-12, whose scale is the same for every clip; a single number; fractions in ascending order."""
    for _ in range(case.count(4)):
        x = drawn(case.rng, (6,)) * 1e-16
        for fractions in (_SOME, _SOME[::-1]):
            case.same_bits(answer(x, E4M3, fractions), exact.best_clip(x, E4M3, fractions))
        one = drawn(case.rng, (1,))
        case.same_bits(answer(one, E2M1), exact.best_clip(one, E2M1))


@check_for("best_clip")
def clips_of_other_tensors(answer, case):
    """bfloat16 and float16, two and three dimensions, transposed; zeros, NaN, infinities, and no elements."""
    for dtype in FLOATS[1:]:
        for fmt in SHORT:
            x = decided(case.rng, fmt, _SOME).to(dtype)
            errors = sorted(exact.power(each) for each in exact.clipped_errors(x, fmt, _SOME)[1])
            if errors[0] < errors[1] * (1 - 1e-6):
                case.same_bits(answer(x, fmt, _SOME), exact.best_clip(x, fmt, _SOME))
    x = decided(case.rng, E2M1, _SOME, 40)
    for shaped in (x.reshape(5, 8), x.reshape(2, 5, 4), x.reshape(8, 5).t()):
        case.same_bits(answer(shaped, E2M1, _SOME), exact.best_clip(shaped, E2M1, _SOME))
    for value in (0.0, -0.0, math.nan, math.inf, -math.inf):
        case.same_bits(answer(torch.tensor([value, 0.0]), E4M3), exact.best_clip(torch.tensor([value, 0.0]), E4M3))
    case.same_bits(answer(torch.zeros(0), E2M1), torch.tensor(0.0))


def _usual(x):
    with np.errstate(invalid="ignore"):
        return 0 < float(exact.absmax(x)) < math.inf


def _least(x, fmt, fractions, error):
    """(clip, its place among the largest first) with the least `error(differences, x, clip)`."""
    clips, differences = exact.clipped_errors(x, fmt, fractions)
    errors = [error(each, x, clip) for each, clip in zip(differences, clips, strict=True)]
    return clips[int(np.argmin(errors))]


def _best(x, fmt, fractions, error):
    if not _usual(x):
        return exact.best_clip(x, fmt, fractions)
    return exact.tensor(_least(x, fmt, fractions, error))


@misconception("best_clip", "It returns the largest magnitude: clipping is never tried.")
def never_clips(x, fmt, fractions=exact.FRACTIONS):
    return exact.absmax(x).float()


@misconception("best_clip", "It adds the errors' magnitudes, not their squares.")
def adds_magnitudes(x, fmt, fractions=exact.FRACTIONS):
    return _best(x, fmt, fractions, lambda d, x, clip: np.abs(d).sum())


@misconception("best_clip", "It looks at the largest error alone.")
def looks_at_the_largest_error(x, fmt, fractions=exact.FRACTIONS):
    return _best(x, fmt, fractions, lambda d, x, clip: np.abs(d).max())


@misconception(
    "best_clip", "It adds squares of errors relative to each number: small numbers count as much as large ones."
)
def relative_errors(x, fmt, fractions=exact.FRACTIONS):
    def relative(d, x, clip):
        size = np.abs(exact.numbers(x))
        return np.square(d / np.where(size == 0, 1, size)).sum()

    return _best(x, fmt, fractions, relative)


@misconception(
    "best_clip", "It measures the error before it divides by the scale: larger clips look better than they are."
)
def scaled_errors(x, fmt, fractions=exact.FRACTIONS):
    def scaled(d, x, clip):
        return exact.power(d * float(exact.scale_for(exact.tensor(clip), fmt)))

    return _best(x, fmt, fractions, scaled)


@misconception("best_clip", "It leaves out the numbers that are clipped: their error is the price of a small clip.")
def without_the_clipped(x, fmt, fractions=exact.FRACTIONS):
    def inside(d, x, clip):
        return exact.power(np.where(np.abs(exact.numbers(x)) <= clip, d, 0))

    return _best(x, fmt, fractions, inside)


@misconception("best_clip", "Of clips that are equally good it takes the smallest.")
def smallest_of_equals(x, fmt, fractions=exact.FRACTIONS):
    if not _usual(x):
        return exact.best_clip(x, fmt, fractions)
    clips, differences = exact.clipped_errors(x, fmt, fractions)
    errors = [exact.power(each) for each in differences]
    return exact.tensor(clips[len(errors) - 1 - int(np.argmin(errors[::-1]))])


@misconception("best_clip", "It returns the fraction and not the clip, which is the fraction of max|x|.")
def returns_the_fraction(x, fmt, fractions=exact.FRACTIONS):
    right = exact.best_clip(x, fmt, fractions)
    return exact.tensor(right.numpy() / exact.absmax(x).float().numpy()) if _usual(x) else right


@misconception("best_clip", "It returns the scale of the best clip and not the clip.")
def returns_the_scale(x, fmt, fractions=exact.FRACTIONS):
    right = exact.best_clip(x, fmt, fractions)
    return exact.scale_for(right, fmt) if _usual(x) else right


@misconception("best_clip", "It returns the clip with the largest error.")
def worst_clip(x, fmt, fractions=exact.FRACTIONS):
    return _best(x, fmt, fractions, lambda d, x, clip: -exact.power(d))


# --- the page's questions ---------------------------------------------------------------------------------------------

question_for(
    "7.A",
    0,
    "0: 448 / inf. Every finite number gets the code 0, the infinity NaN, and 0 / 0 is NaN: the whole tensor comes "
    "back as NaN, and the loss with it. That is loud, and loud is right.",
    "amax is the largest magnitude, so it is infinite. What is 448 divided by that?",
    {448: "That would be for an amax of 1.", math.inf: "The quotient is the other way round."},
)
question_for(
    "7.B",
    False,
    "False: backward returns the gradient as it came. This is your straight_through; its forward differs only in that "
    "it gives a tensor that keeps codes and scale.",
    "Look at what `backward` returns first, and at what it does to it before.",
)
question_for(
    "7.C",
    3,
    "3, which is too large: the scale is below 2^3. In float32 its log2 is 3 exactly, since the next float32 below 3 "
    "is too far away, and the floor of 3 is 3.",
    "The scale is 2^3 less one float32 step. Run the line in a cell of your own: torch.log2 of it.",
    {2: "That is what the name of the function promises. Run torch.log2 on it."},
)
question_for(
    "7.D",
    False,
    "False: in float16 the smallest number is 6e-8, so the floor of 1e-12 is a floor of 0. torchao goes to float64 "
    "first, as you do.",
    "What is 1e-12 in float16?",
)
