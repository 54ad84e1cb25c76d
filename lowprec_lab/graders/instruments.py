"""Checks and known misconceptions of chapter 05."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import BF16, E2M3, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FP16, FP32, TF32, Format
from lowprec_lab.graders import inputs, oracle
from lowprec_lab.graders import instruments_oracle as exact
from lowprec_lab.graders.accumulation_oracle import rounder
from lowprec_lab.graders.case import tokens_of, type_problem
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for
from lowprec_lab.instruments import gradient_through, norm_of, ratio_of, tapped

for _function in (
    exact.exponent_histogram, exact.underflow_fraction, exact.overflow_fraction, exact.tensor_report,
    exact.gradient_norm, exact.update_ratio, exact.Taps, exact.row_lengths,
):  # fmt: skip
    oracle_for(_function.__name__, _function)

MADE_UP = (
    Format("e3m4_bias5", 3, 4, bias=5, specials="fn"),
    Format("e6m1", 6, 1),
    Format("e5m2_finite", 5, 2, specials="finite"),
    Format("e4m2_no_zero", 4, 2, specials="fn", subnormals=False),
    Format("e4m3_unsigned", 4, 3, specials="fn", signed=False),
    Format("e3m3_unsigned", 3, 3, specials="fn", signed=False),
)
WITHOUT_ZERO, UNSIGNED = (E8M0, MADE_UP[3]), MADE_UP[4:]
TRIED = (FP16, E4M3, E5M2, BF16, E4M3FNUZ, E5M2FNUZ, E2M3, *MADE_UP[:3])  # with a sign and a zero
FINITE = (E2M3, MADE_UP[2])
WITH_SPECIALS = (FP16, E4M3, E5M2, BF16, E4M3FNUZ, E5M2FNUZ, *MADE_UP[:2], *WITHOUT_ZERO, *UNSIGNED)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _tensor(values, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32)).to(dtype)


def spread(count: int, low: int, high: int, rng: np.random.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of both signs whose exponents are even between `low` and `high`."""
    values = np.ldexp(rng.uniform(1, 2, count), rng.integers(low, high + 1, count)) * rng.choice([-1, 1], count)
    return _tensor(values, dtype)


def with_specials(x: Tensor, rng: np.random.Generator) -> Tensor:
    """The numbers with zeros of both signs, infinities and NaNs among them."""
    special = torch.tensor([0.0, -0.0, 0.0, math.inf, -math.inf, math.nan], dtype=x.dtype)
    mixed = torch.cat([x, special])
    return mixed[torch.from_numpy(rng.permutation(len(mixed)))]


def _with_its_place(got: object, want: Tensor, place: Callable[[int], str]) -> Callable:
    """A function from an element of either result to text: its value, and the place where the two differ first."""
    same_kind = type_problem(got, want) is None
    wrong = np.flatnonzero(tokens_of(got) != tokens_of(want)) if same_kind else ()
    where = place(int(wrong[0])) if len(wrong) else ""

    def show(element: Tensor) -> str:
        value = element.item()
        return f"{'nothing' if value != value else value} {where}"

    return show


# --- 5.1 exponent_histogram -------------------------------------------------------------------------------------------


def _counts(answer, case, x: Tensor) -> None:
    got, want = answer(x), exact.exponent_histogram(x)
    case.same_bits(got, want, show=_with_its_place(got, want, _exponent_at))


def _exponent_at(place: int) -> str:
    return f"with exponent {place - 149} (place {place})"


@check_for("exponent_histogram", weight=2)
def around_powers_of_two(answer, case):
    """Powers of two up to 2^126, of both signs, and the float32 next to each; few numbers at a time."""
    for low in range(-126, 127, 32):
        powers = torch.from_numpy(np.ldexp(1.0, np.arange(low, min(low + 32, 127))))
        chosen = powers[torch.from_numpy(case.rng.permutation(len(powers))[:5])]
        near = inputs.around(chosen)
        _counts(answer, case, near)
        _counts(answer, case, -near)


@check_for("exponent_histogram")
def subnormals_by_their_value(answer, case):
    """Subnormals of float32, of bfloat16 and of float16: the smallest and the largest of them, and random ones."""
    for count in (1, 2, 4):
        bits = case.rng.integers(1, 2**23, case.count(count)) >> case.rng.integers(0, 23, case.count(count))
        _counts(answer, case, inputs.float32_from_bits(np.maximum(bits, 1)))
    _counts(answer, case, inputs.float32_from_bits([1, 2, 3, 4, 0x007FFFFF, 0x80000001, 0x00800000]))
    for dtype in (torch.bfloat16, torch.float16):
        codes = torch.from_numpy(case.rng.integers(1, 100, case.count(6)).astype(np.int16))
        _counts(answer, case, codes.view(dtype))


@check_for("exponent_histogram")
def zeros_infinities_and_nans(answer, case):
    """Zeros of both signs, infinities and NaNs among other numbers, and alone; in three dtypes."""
    for dtype in _DTYPES:
        _counts(answer, case, with_specials(spread(case.count(6), -8, 8, case.rng, dtype), case.rng))
        _counts(answer, case, torch.tensor([0.0, -0.0], dtype=dtype))
        _counts(answer, case, torch.tensor([math.inf, -math.inf, math.inf], dtype=dtype))
        _counts(answer, case, torch.tensor([math.nan], dtype=dtype))


@check_for("exponent_histogram")
def many_numbers_of_any_shape(answer, case):
    """Every float16 and bfloat16, 3,000 random float32, the largest ones, few numbers many times, one, none."""
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        _counts(answer, case, everything.view(dtype))
    _counts(answer, case, inputs.random_float32(case.count(3000), case.rng))
    for power in (2.0**127, -(2.0**127), 1.5 * 2.0**127):
        _counts(answer, case, torch.tensor([1.0, power]))
    for times in (2, 3, 4):
        _counts(answer, case, spread(case.count(4), -20, 20, case.rng).repeat(times))
    _counts(answer, case, torch.zeros(0))
    _counts(answer, case, torch.tensor(-0.75))
    _counts(answer, case, spread(12, -20, 20, case.rng).reshape(3, 4).t())


def _exponents(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(magnitudes that are finite and not zero, their exponents), by frexp, which is exact in float64."""
    values = np.abs(x.detach().double().reshape(-1).numpy())
    values = values[np.isfinite(values) & (values > 0)]
    return values, np.frexp(values)[1] - 1


def _binned(exponents: np.ndarray) -> Tensor:
    places = np.clip(np.asarray(exponents, dtype=np.int64), -149, 127) + 149
    return torch.from_numpy(np.bincount(places, minlength=277).astype(np.int64))


@misconception("exponent_histogram", "It takes floor(log2(x)) in float32: just below a power of two that is one more.")
def by_log2(x):
    values, _ = _exponents(x)
    return _binned(torch.from_numpy(values.astype(np.float32)).log2().floor().numpy())


@misconception("exponent_histogram", "It rounds log2(x) to the nearest whole number instead of down.")
def by_rounded_log2(x):
    return _binned(np.rint(np.log2(_exponents(x)[0])))


@misconception("exponent_histogram", "It takes floor(log2(x)) in the dtype of x: in 16 bits many logarithms round up.")
def by_log2_in_own_dtype(x):
    x = x[x.isfinite() & (x != 0)].abs()
    return _binned(x.log2().floor().long().numpy())


@misconception(
    "exponent_histogram",
    "It counts every exponent one too high, up to a place 277 that is not there: frexp's fraction begins at 0.5, not "
    "at 1.",
)
def by_frexp(x):
    return torch.from_numpy(np.bincount(_exponents(x)[1] + 150, minlength=277).astype(np.int64))


@misconception(
    "exponent_histogram", "It counts every exponent below 127 one too high: frexp's fraction begins at 0.5, not at 1."
)
def by_frexp_and_clamped(x):
    return _binned(_exponents(x)[1] + 1)


@misconception(
    "exponent_histogram", "It counts all subnormals of float32 at -127, the exponent field without its bias."
)
def by_field(x):
    _, exponents = _exponents(x)
    return _binned(np.where(exponents < -126, -127, exponents))


@misconception(
    "exponent_histogram", "It counts all subnormals of float32 at -126, the exponent that they are scaled by."
)
def by_scaled_field(x):
    _, exponents = _exponents(x)
    return _binned(np.maximum(exponents, -126))


@misconception("exponent_histogram", "It leaves out the subnormals of float32.")
def without_subnormals(x):
    _, exponents = _exponents(x)
    return _binned(exponents[exponents >= -126])


@misconception("exponent_histogram", "It leaves out negative numbers.")
def positive_ones(x):
    return _binned(_exponents(x[x > 0])[1])


@misconception("exponent_histogram", "It counts zeros at -149: a zero has no exponent.")
def zeros_at_the_bottom(x):
    return _binned(np.append(_exponents(x)[1], np.full(int((x == 0).sum()), -149)))


@misconception("exponent_histogram", "It counts infinities and NaNs at 127.")
def specials_at_the_top(x):
    return _binned(np.append(_exponents(x)[1], np.full(int((~x.isfinite()).sum()), 127)))


@misconception("exponent_histogram", "It uses histc on log2(x) from -149 to 127 in 277 bins, narrower than 1 each.")
def by_histc(x):
    logarithms = torch.from_numpy(np.log2(_exponents(x)[0]))
    return torch.histc(logarithms, 277, -149, 127).to(torch.int64)


@misconception("exponent_histogram", "It counts each different value once, however often it is there.")
def each_value_once(x):
    return _binned(_exponents(x.double().unique())[1])


# --- 5.2 underflow_fraction -------------------------------------------------------------------------------------------

_SCALES = (1.0, 2.0**10, 2.0**-7, 3.0, 1000 / 3, 0.7)
_LOWEST = {torch.float32: -140, torch.bfloat16: -130, torch.float16: -20}  # exponents that `spread` draws from


def smallest(fmt: Format) -> float:
    """The smallest magnitude that is not zero."""
    return oracle.min_subnormal(fmt) or oracle.min_normal(fmt)


def _exponent(value: float) -> int:
    return math.frexp(value)[1] - 1


def _shares(answer, case, right, x: Tensor, fmt: Format, scale: float = 1.0) -> None:
    got = answer(x, fmt) if scale == 1.0 else answer(x, fmt, scale)  # the default is a part of the contract
    case.same_bits(got, right(x, fmt, scale))


def _refuses_scales(answer, case) -> None:
    for scale in (0.0, -1.0, math.inf, math.nan):
        for x in ([1.0, 2.0], [0.5]):
            case.raises(ValueError, answer, torch.tensor(x), E4M3, scale)


def on_a_tie(bound: float, scale: float) -> Tensor:
    """Float32 numbers whose product with `scale` is at `bound` in float32, or one float32 off, on either side."""
    middle = np.float32(bound / scale)
    near = inputs.around(torch.tensor([float(middle)]))
    products = near.double() * float(np.float32(scale))
    return near[(products - bound).abs() < bound * 2.0**-20]


def beside_a_tie(bound: float, tie_is_above: bool, rng: np.random.Generator) -> tuple[Tensor, float]:
    """(x, scale): x times the scale as float32, and the exact product rounded to float32, are on two sides of `bound`.

    tie_is_above: whether the bound itself belongs to what is above it.
    """

    def above(product: np.ndarray) -> np.ndarray:
        return product >= np.float32(bound) if tie_is_above else product > np.float32(bound)

    while True:
        scale = float(rng.uniform(1, 1000))
        near = on_a_tie(bound, scale).numpy()
        apart = above(near * np.float32(scale)) != above((near.astype(np.float64) * scale).astype(np.float32))
        if apart.any():
            return torch.from_numpy(near[apart]), scale


def out_of_float32(rng: np.random.Generator) -> list[tuple[Tensor, float]]:
    """(x, scale): some of the numbers become zero in float32 when they are scaled; or infinite."""
    tiny, small, huge = spread(3, -140, -130, rng), spread(3, -70, -60, rng), spread(2, 115, 125, rng)
    return [(torch.cat([tiny, huge]), 1e-10), (torch.cat([small, huge]), 2.0**14)]


@check_for("underflow_fraction", weight=2)
def near_half_of_the_smallest(answer, case):
    """Half of the smallest value, the float32 next to it and the smallest value, of each sign, in 10 formats."""
    for fmt in TRIED:
        edge = smallest(fmt)
        if edge / 2 < 2.0**-140:
            continue
        for point in (edge / 2, edge * 0.75, edge, oracle.min_normal(fmt)):
            near = inputs.around(torch.tensor([point]))
            for element in (near, -near):
                _shares(answer, case, exact.underflow_fraction, element[element.abs() < 3e38], fmt)


@check_for("underflow_fraction", weight=2)
def scaled_first(answer, case):
    """Numbers around the lower end of 12 formats after scaling by powers of two and by other numbers; three dtypes."""
    for place, fmt in enumerate((*TRIED, TF32, FP32)):
        for dtype in _DTYPES:
            scale = _SCALES[int(case.rng.integers(len(_SCALES)))]
            bottom = max(_exponent(smallest(fmt) / scale), _LOWEST[dtype])
            x = spread(case.count(12), bottom - 3, bottom + 4, case.rng, dtype)
            _shares(answer, case, exact.underflow_fraction, x, fmt, scale)
        _shares(answer, case, exact.underflow_fraction, spread(8, -12, 4, case.rng), fmt, _SCALES[place % 6])


@check_for("underflow_fraction")
def one_float32_multiplication(answer, case):
    """Products at the tie itself that are not exact, and 16-bit numbers whose product needs more than 16 bits."""
    for fmt in (FP16, E4M3, E5M2, E2M3, MADE_UP[0]):
        for scale in (3.0, 1000 / 3, 0.7, 1.1, 13.0):
            _shares(answer, case, exact.underflow_fraction, on_a_tie(smallest(fmt) / 2, scale), fmt, scale)
        x, scale = beside_a_tie(smallest(fmt) / 2, False, case.rng)
        _shares(answer, case, exact.underflow_fraction, x, fmt, scale)
        for dtype, width in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
            scale = float(case.rng.uniform(300, 900)) if dtype == torch.float16 else 1.0 + width / 2
            near = smallest(fmt) / 2 / scale * case.rng.uniform(1 - 2 * width, 1 + 2 * width, case.count(12))
            _shares(answer, case, exact.underflow_fraction, _tensor(near, dtype), fmt, scale)


@check_for("underflow_fraction")
def counted_before_scaling(answer, case):
    """Zeros, infinities and NaNs among the numbers, and alone; numbers that the scale makes zero or infinite."""
    for fmt in (E4M3, FP16, E5M2):
        bottom = _exponent(smallest(fmt))
        x = with_specials(spread(case.count(9), bottom - 4, bottom + 4, case.rng), case.rng)
        _shares(answer, case, exact.underflow_fraction, x, fmt)
        _shares(answer, case, exact.underflow_fraction, x[x.isfinite()], fmt)
        _shares(answer, case, exact.underflow_fraction, x[~x.isnan()], fmt)
        for x, scale in out_of_float32(case.rng):
            _shares(answer, case, exact.underflow_fraction, x, fmt, scale)
    small = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0, 1e-9])
    for x in (small, torch.zeros(3), torch.zeros(0), torch.tensor([math.inf, math.nan, 0.0]), torch.tensor(1e-9)):
        _shares(answer, case, exact.underflow_fraction, x, E4M3)
    _shares(answer, case, exact.underflow_fraction, spread(12, -13, -5, case.rng).reshape(3, 4).t(), E4M3)


@check_for("underflow_fraction")
def scales_that_underflow_refuses(answer, case):
    """Scales of 0, -1, infinity and NaN raise ValueError; very small and very large scales do not."""
    _refuses_scales(answer, case)
    x = spread(case.count(8), -60, 20, case.rng)
    for scale in (1e-38, 1e-30, 1e30, 3e38):
        _shares(answer, case, exact.underflow_fraction, x, E5M2, scale)


@check_for("underflow_fraction")
def without_a_sign_or_without_a_zero(answer, case):
    """Formats without a sign; formats without subnormals, which have no zero and for which min_subnormal is None."""
    for fmt in (*UNSIGNED, *WITHOUT_ZERO):
        for point in (smallest(fmt) / 2, smallest(fmt) * 0.75, smallest(fmt)):
            near = inputs.around(torch.tensor([point]))
            _shares(answer, case, exact.underflow_fraction, near, fmt)
            _shares(answer, case, exact.underflow_fraction, -near, fmt)
        bottom = max(_exponent(smallest(fmt)), -130)
        for scale in (1.0, 0.7):
            x = spread(case.count(9), bottom - 4, bottom + 4, case.rng)
            _shares(answer, case, exact.underflow_fraction, x, fmt, scale)


# The wrong answers to 5.2 and 5.3 are put together from parts: what is taken as the product, which of the products are
# lost, and which of the numbers are counted.


def _require_scale(scale: float) -> None:
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError("a scale is finite and above zero")


def _share(x: Tensor, fmt: Format, scale: float, product, lost, counted) -> float:
    """The share of those that are lost, `lost(product(x, scale), fmt)`, among `counted(x)`."""
    _require_scale(scale)
    return _ratio(lost(product(x, scale), fmt), counted(_numbers_of(x)))


def _ratio(lost: np.ndarray, counted: np.ndarray) -> float:
    count = int(counted.sum())
    return int((lost & counted).sum()) / count if count else 0.0


def _numbers_of(x: Tensor) -> np.ndarray:
    return x.detach().float().reshape(-1).numpy()


def _product(x: Tensor, scale: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        return _numbers_of(x) * np.float32(scale)


def _quotient(x: Tensor, scale: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        return _numbers_of(x) / np.float32(scale)


def _unscaled(x: Tensor, scale: float) -> np.ndarray:
    return _numbers_of(x)


def _own_product(x: Tensor, scale: float) -> np.ndarray:
    return _numbers_of(x * scale)


def _wide_product(x: Tensor, scale: float) -> np.ndarray:
    return x.detach().double().reshape(-1).numpy() * scale


def _wide_product_rounded(x: Tensor, scale: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        return _wide_product(x, scale).astype(np.float32)


def _vanishes(scaled: np.ndarray, fmt: Format) -> np.ndarray:
    return rounder(fmt)(np.abs(scaled)) == 0


def _below(scaled: np.ndarray, bound: float) -> np.ndarray:
    return np.abs(scaled).astype(np.float64) < bound


def _up_to(scaled: np.ndarray, bound: float) -> np.ndarray:
    return np.abs(scaled).astype(np.float64) <= bound


def _counted(numbers: np.ndarray) -> np.ndarray:
    return np.isfinite(numbers) & (numbers != 0)


def _not_zero(numbers: np.ndarray) -> np.ndarray:
    return numbers != 0


@misconception("underflow_fraction", "It counts zeros as lost: they were zero before.")
def counts_zeros_as_lost(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, _vanishes, np.isfinite)


@misconception("underflow_fraction", "It divides by the number of all elements: zeros, infinities and NaNs too.")
def underflow_of_all(x, fmt, scale=1.0):
    _require_scale(scale)
    lost = _vanishes(_product(x, scale), fmt) & _counted(_numbers_of(x))
    return int(lost.sum()) / lost.size if lost.size else 0.0


@misconception(
    "underflow_fraction", "It divides by the number of all elements that are not zero: infinities and NaNs too."
)
def underflow_with_specials(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda scaled, fmt: np.isfinite(scaled) & _vanishes(scaled, fmt), _not_zero)


@misconception(
    "underflow_fraction",
    "It counts what is finite and not zero after scaling: what the scale makes zero or infinite is missing.",
)
def underflow_counted_after_scaling(x, fmt, scale=1.0):
    _require_scale(scale)
    scaled = _product(x, scale)
    return _ratio(_vanishes(scaled, fmt), _counted(scaled))


@misconception("underflow_fraction", "It counts all below the smallest value: above half of it they round up to it.")
def below_the_smallest(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda y, fmt: _below(y, smallest(fmt) if fmt.subnormals else 0), _counted)


@misconception(
    "underflow_fraction",
    "It counts all below min_subnormal(fmt): above half of it they round up to it; and for formats without subnormals "
    "it is None.",
)
def below_min_subnormal(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda y, fmt: _below(y, oracle.min_subnormal(fmt)), _counted)


@misconception("underflow_fraction", "It counts all below the smallest normal value: subnormals are not lost.")
def below_the_smallest_normal(x, fmt, scale=1.0):
    limit = oracle.min_normal(fmt) if fmt.subnormals else 0.0
    return _share(x, fmt, scale, _product, lambda scaled, fmt: _below(scaled, limit), _counted)


@misconception(
    "underflow_fraction", "It counts a tie, half of the smallest value, as kept: it goes to the even one, zero."
)
def tie_is_kept(x, fmt, scale=1.0):
    limit = smallest(fmt) / 2 if fmt.subnormals else 0.0
    return _share(x, fmt, scale, _product, lambda scaled, fmt: _below(scaled, limit), _counted)


@misconception(
    "underflow_fraction",
    "It counts what is below half of min_subnormal(fmt): the tie goes to zero, too; and for formats without subnormals "
    "it is None.",
)
def below_half_of_min_subnormal(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda y, fmt: _below(y, oracle.min_subnormal(fmt) / 2), _counted)


@misconception("underflow_fraction", "It counts small numbers as lost in formats that have no zero.")
def zero_where_there_is_none(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda scaled, fmt: _up_to(scaled, smallest(fmt) / 2), _counted)


@misconception("underflow_fraction", "It forgets the sign: every negative number counts as lost.")
def negative_is_lost(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda scaled, fmt: _vanishes(scaled, fmt) | (scaled < 0), _counted)


@misconception(
    "underflow_fraction",
    "It rounds without taking magnitudes: negative numbers are NaN in a format that has no sign, and not zero.",
)
def signs_are_rounded(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda scaled, fmt: rounder(fmt)(scaled) == 0, _counted)


@misconception("underflow_fraction", "It divides by the scale instead of multiplying with it.")
def underflow_divides(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _quotient, _vanishes, _counted)


@misconception("underflow_fraction", "It leaves out the scale.")
def underflow_unscaled(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _unscaled, _vanishes, _counted)


@misconception(
    "underflow_fraction", "It multiplies 16-bit tensors in their own dtype, which rounds the product to 16 bits."
)
def underflow_in_own_dtype(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _own_product, _vanishes, _counted)


@misconception("underflow_fraction", "It multiplies in float64: the product is not rounded to float32.")
def underflow_in_float64(x, fmt, scale=1.0):
    limit = smallest(fmt) / 2 if fmt.subnormals else -1.0
    return _share(x, fmt, scale, _wide_product, lambda scaled, fmt: _up_to(scaled, limit), _counted)


@misconception(
    "underflow_fraction",
    "It multiplies in float64 and rounds the product to float32: the scale itself is not rounded to float32 first.",
)
def underflow_by_an_exact_scale(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _wide_product_rounded, _vanishes, _counted)


@misconception("underflow_fraction", "It takes any scale: 0, negative ones, infinity and NaN.")
def underflow_takes_any_scale(x, fmt, scale=1.0):
    return _ratio(_vanishes(_product(x, scale), fmt), _counted(_numbers_of(x)))


@misconception("underflow_fraction", "It refuses scales of 0 and below, and takes infinity and NaN.")
def underflow_takes_infinite_scales(x, fmt, scale=1.0):
    if scale <= 0:
        raise ValueError("a scale is above zero")
    return _ratio(_vanishes(_product(x, scale), fmt), _counted(_numbers_of(x)))


@misconception("underflow_fraction", "It takes the mean in float32, which rounds the share to 24 bits.")
def underflow_mean_in_float32(x, fmt, scale=1.0):
    return float(np.float32(_share(x, fmt, scale, _product, _vanishes, _counted)))


# --- 5.3 overflow_fraction --------------------------------------------------------------------------------------------


def top_of(fmt: Format) -> tuple[float, float, bool]:
    """(largest value, half a step above it, whether that tie overflows)."""
    largest = oracle.max_finite(fmt)
    step = float(oracle.ulp(torch.tensor(largest), fmt))
    return largest, largest + step / 2, (largest / step) % 2 == 1


def _near_the_top(answer, case, fmt: Format) -> None:
    largest, tie, _ = top_of(fmt)
    for point in (largest, tie, (largest + tie) / 2, tie * 1.5):
        if point < 3e38:
            near = inputs.around(torch.tensor([point], dtype=torch.float64))
            _shares(answer, case, exact.overflow_fraction, near, fmt)
            _shares(answer, case, exact.overflow_fraction, -near, fmt)


@check_for("overflow_fraction", weight=2)
def near_half_a_step_above_the_largest(answer, case):
    """The largest value, half a step above it, the float32 next to each, and what lies far beyond; in 12 formats."""
    for fmt in WITH_SPECIALS:
        _near_the_top(answer, case, fmt)


@check_for("overflow_fraction", weight=2)
def scaled_before_it_overflows(answer, case):
    """Numbers around the upper end of 14 formats after scaling by powers of two and by other numbers; three dtypes."""
    for place, fmt in enumerate((*WITH_SPECIALS, TF32, FP32)):
        for dtype in _DTYPES:
            scale = _SCALES[int(case.rng.integers(len(_SCALES)))]
            top = min(_exponent(oracle.max_finite(fmt) / scale), 13 if dtype == torch.float16 else 124)
            x = spread(case.count(12), top - 3, top + 2, case.rng, dtype)
            _shares(answer, case, exact.overflow_fraction, x, fmt, scale)
        _shares(answer, case, exact.overflow_fraction, spread(8, -4, 12, case.rng), fmt, _SCALES[place % 6])


@check_for("overflow_fraction")
def one_multiplication_before_it_overflows(answer, case):
    """Products at the tie itself that are not exact, and 16-bit numbers whose product needs more than 16 bits."""
    for fmt in (FP16, E4M3, E5M2, E4M3FNUZ, MADE_UP[0]):
        for scale in (3.0, 1000 / 3, 0.7, 1.1, 13.0):
            _shares(answer, case, exact.overflow_fraction, on_a_tie(top_of(fmt)[1], scale), fmt, scale)
        x, scale = beside_a_tie(*top_of(fmt)[1:], case.rng)
        _shares(answer, case, exact.overflow_fraction, x, fmt, scale)
        for dtype, width in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
            scale = float(case.rng.uniform(300, 900)) if dtype == torch.float16 else 1.0 + width / 2
            near = top_of(fmt)[1] / scale * case.rng.uniform(1 - 2 * width, 1 + 2 * width, case.count(12))
            _shares(answer, case, exact.overflow_fraction, _tensor(near, dtype), fmt, scale)


@check_for("overflow_fraction")
def what_was_infinite_before(answer, case):
    """Zeros, infinities and NaNs among the numbers, and alone; numbers that the scale makes zero or infinite."""
    for fmt in (E4M3, FP16, E5M2, E8M0):
        top = min(_exponent(oracle.max_finite(fmt)), 120)
        x = with_specials(spread(case.count(9), top - 4, top + 4, case.rng), case.rng)
        _shares(answer, case, exact.overflow_fraction, x, fmt)
        _shares(answer, case, exact.overflow_fraction, x[x.isfinite()], fmt)
        _shares(answer, case, exact.overflow_fraction, x[~x.isnan()], fmt)
        for x, scale in out_of_float32(case.rng):
            _shares(answer, case, exact.overflow_fraction, x, fmt, scale)
    large = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0, 1e9])
    for x in (large, torch.zeros(3), torch.zeros(0), torch.tensor([math.inf, math.nan, 0.0]), torch.tensor(1e9)):
        _shares(answer, case, exact.overflow_fraction, x, E4M3)
    _shares(answer, case, exact.overflow_fraction, spread(12, 5, 11, case.rng).reshape(3, 4).t(), E4M3)


@check_for("overflow_fraction")
def scales_that_overflow_refuses(answer, case):
    """Scales of 0, -1, infinity and NaN raise ValueError; very small and very large scales do not."""
    _refuses_scales(answer, case)
    x = spread(case.count(8), -20, 60, case.rng)
    for scale in (1e-38, 1e-10, 1e30, 3e38):
        _shares(answer, case, exact.overflow_fraction, x, E5M2, scale)
    for fmt in (FP32, BF16):
        _shares(answer, case, exact.overflow_fraction, spread(case.count(8), 60, 70, case.rng), fmt, 2.0**62)


@check_for("overflow_fraction")
def with_nothing_to_overflow_to(answer, case):
    """Formats that have no infinity and no NaN: around the largest value and beyond it, with and without a scale."""
    for fmt in FINITE:
        _near_the_top(answer, case, fmt)
        top = _exponent(oracle.max_finite(fmt))
        for scale in (1.0, 3.0):
            x = spread(case.count(9), top - 4, top + 2, case.rng)
            _shares(answer, case, exact.overflow_fraction, x, fmt, scale)


def _beyond(scaled: np.ndarray, fmt: Format) -> np.ndarray:
    _, tie, tie_is_out = top_of(fmt)
    wide = np.abs(scaled.astype(np.float64))
    return (wide >= tie) if tie_is_out else (wide > tie)


@misconception(
    "overflow_fraction", "It counts all above the largest value: less than half a step above it they round down to it."
)
def above_the_largest(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda scaled, fmt: ~_up_to(scaled, top_of(fmt)[0]), _counted)


@misconception("overflow_fraction", "It counts the largest value itself as an overflow, and all above it.")
def from_the_largest_on(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda scaled, fmt: ~_below(scaled, top_of(fmt)[0]), _counted)


@misconception(
    "overflow_fraction", "It counts what round_to makes the largest value: that is also what fits and is rounded to it."
)
def saturates(x, fmt, scale=1.0):
    def at_the_top(scaled, fmt):
        return _beyond(scaled, fmt) | (rounder(fmt)(np.abs(scaled)) == np.float32(top_of(fmt)[0]))

    return _share(x, fmt, scale, _product, at_the_top, _counted)


@misconception(
    "overflow_fraction",
    "It looks for what is above the largest value after a round_to that saturates: nothing ever is.",
)
def never_overflows(x, fmt, scale=1.0):
    _require_scale(scale)
    return 0.0


@misconception(
    "overflow_fraction",
    "It counts every tie as an overflow: where the largest value is even, as in E4M3, the tie goes to it.",
)
def every_tie_overflows(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda scaled, fmt: ~_below(scaled, top_of(fmt)[1]), _counted)


@misconception(
    "overflow_fraction",
    "It counts no tie as an overflow: where the largest value is odd, as in FP16, the tie goes beyond it.",
)
def no_tie_overflows(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda scaled, fmt: ~_up_to(scaled, top_of(fmt)[1]), _counted)


@misconception(
    "overflow_fraction", "It looks for infinities after rounding: formats without one never overflow that way."
)
def looks_for_infinities(x, fmt, scale=1.0):
    def infinite(scaled, fmt):
        return _beyond(scaled, fmt) & (fmt.specials == "ieee")

    return _share(x, fmt, scale, _product, infinite, _counted)


@misconception(
    "overflow_fraction",
    "It looks for infinities after a round_to that overflows to special: formats without one have NaN, or raise.",
)
def looks_for_infinities_and_raises(x, fmt, scale=1.0):
    _require_scale(scale)
    if fmt.specials == "finite":
        raise ValueError(f"{fmt.name} has no infinity and no NaN to overflow to")
    return _ratio(_beyond(_product(x, scale), fmt) & (fmt.specials == "ieee"), _counted(_numbers_of(x)))


@misconception("overflow_fraction", "It forgets the sign: negative numbers never overflow.")
def positive_side_alone(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, lambda scaled, fmt: _beyond(scaled, fmt) & (scaled > 0), _counted)


@misconception("overflow_fraction", "It counts infinities that were there before as overflows.")
def counts_old_infinities(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, _beyond, lambda numbers: ~np.isnan(numbers) & (numbers != 0))


@misconception(
    "overflow_fraction",
    "It counts what is finite and not zero after scaling: what the scale makes zero or infinite is missing.",
)
def overflow_counted_after_scaling(x, fmt, scale=1.0):
    _require_scale(scale)
    scaled = _product(x, scale)
    return _ratio(_beyond(scaled, fmt), _counted(scaled))


@misconception("overflow_fraction", "It divides by the number of all elements: zeros, infinities and NaNs too.")
def overflow_of_all(x, fmt, scale=1.0):
    _require_scale(scale)
    lost = _beyond(_product(x, scale), fmt) & _counted(_numbers_of(x))
    return int(lost.sum()) / lost.size if lost.size else 0.0


@misconception("overflow_fraction", "It divides by the number of finite elements: zeros are among them.")
def overflow_with_zeros(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _product, _beyond, np.isfinite)


@misconception("overflow_fraction", "It divides by the scale instead of multiplying with it.")
def overflow_divides(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _quotient, _beyond, _counted)


@misconception("overflow_fraction", "It leaves out the scale.")
def overflow_unscaled(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _unscaled, _beyond, _counted)


@misconception(
    "overflow_fraction", "It multiplies 16-bit tensors in their own dtype, where the product itself may overflow."
)
def overflow_in_own_dtype(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _own_product, _beyond, _counted)


@misconception("overflow_fraction", "It multiplies in float64: the product is not rounded to float32.")
def overflow_in_float64(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _wide_product, _beyond, _counted)


@misconception(
    "overflow_fraction",
    "It multiplies in float64 and rounds the product to float32: the scale itself is not rounded to float32 first.",
)
def overflow_by_an_exact_scale(x, fmt, scale=1.0):
    return _share(x, fmt, scale, _wide_product_rounded, _beyond, _counted)


@misconception("overflow_fraction", "It takes any scale: 0, negative ones, infinity and NaN.")
def overflow_takes_any_scale(x, fmt, scale=1.0):
    return _ratio(_beyond(_product(x, scale), fmt), _counted(_numbers_of(x)))


@misconception("overflow_fraction", "It refuses scales of 0 and below, and takes infinity and NaN.")
def overflow_takes_infinite_scales(x, fmt, scale=1.0):
    if scale <= 0:
        raise ValueError("a scale is above zero")
    return _ratio(_beyond(_product(x, scale), fmt), _counted(_numbers_of(x)))


# --- 5.4 tensor_report ------------------------------------------------------------------------------------------------

_REPORTED = ("smallest", "largest", "zeros", "nonfinite")


def _reported(smallest: object, largest: object, zeros: object, nonfinite: object) -> str:
    return f"smallest {smallest!r}, largest {largest!r}, zeros {zeros!r}, nonfinite {nonfinite!r}"


def _reports(answer, case, x: Tensor) -> None:
    case.same_bits(answer(x), exact.tensor_report(x), show=_reported, parts=_REPORTED)


@check_for("tensor_report", weight=2)
def numbers_of_both_signs(answer, case):
    """Numbers from 2^-30 to 2^10 of both signs, in four dtypes, with the smallest or the largest below zero."""
    for dtype in (*_DTYPES, torch.float64):
        low = -14 if dtype == torch.float16 else -30
        for count in (1, 5, 9, 14):
            _reports(answer, case, spread(case.count(count), low, 10, case.rng, dtype))
    for x in ([1.0, -2.0], [-0.5, 1.0, 3.0], [-3.0, -1.0], [2.8e-7, -0.1, 0.02]):
        _reports(answer, case, torch.tensor(x))
    _reports(answer, case, spread(case.count(400), -40, 10, case.rng).reshape(4, -1).t())


@check_for("tensor_report")
def zeros_and_what_is_not_finite(answer, case):
    """Zeros of both signs, infinities and NaNs among numbers, and alone; no element; a single number."""
    for dtype in (*_DTYPES, torch.float64):
        for count in (3, 8):
            _reports(answer, case, with_specials(spread(case.count(count), -8, 8, case.rng, dtype), case.rng))
        _reports(answer, case, torch.tensor([0.0, -0.0, -0.0], dtype=dtype))
        _reports(answer, case, torch.tensor([1.0, math.inf, -0.25], dtype=dtype))
        _reports(answer, case, torch.tensor([-math.inf, 3.0, 5.0], dtype=dtype))
        _reports(answer, case, torch.tensor([math.nan, -3.0, 5.0], dtype=dtype))
    for x in ([math.inf, -math.inf], [math.nan], [math.nan, 0.0, math.inf], [], [-0.0, 5.0], [-7.0]):
        _reports(answer, case, torch.tensor(x))
    _reports(answer, case, torch.tensor(-0.3))


@check_for("tensor_report")
def smallest_of_the_small(answer, case):
    """Subnormals of float32, float16 and bfloat16, and float64 numbers that no float32 holds."""
    for _ in range(4):
        bits = case.rng.integers(1, 2**24, case.count(5))
        _reports(answer, case, inputs.float32_from_bits(bits))
        for dtype in (torch.float16, torch.bfloat16):
            _reports(answer, case, torch.from_numpy(case.rng.integers(1, 200, 5).astype(np.int16)).view(dtype))
        wide = np.ldexp(case.rng.uniform(1, 2, 4), case.rng.integers(-300, 300, 4))
        _reports(answer, case, torch.from_numpy(wide))


def _sizes(x: Tensor) -> np.ndarray:
    values = np.abs(x.detach().double().reshape(-1).numpy())
    return values[np.isfinite(values) & (values > 0)]


def _ends(values: np.ndarray) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _zeros(x: Tensor) -> int:
    return int((x == 0).sum())


def _nonfinite(x: Tensor) -> int:
    return int((~x.isfinite()).sum())


@misconception("tensor_report", "It takes the smallest of all magnitudes: with a zero among them that is 0.")
def smallest_is_zero(x):
    values = np.abs(x.detach().double().reshape(-1).numpy())
    low = float(values[np.isfinite(values)].min()) if np.isfinite(values).any() else 0.0
    return low, _ends(_sizes(x))[1], _zeros(x), _nonfinite(x)


@misconception("tensor_report", "It takes the smallest and the largest number with their signs, not the magnitudes.")
def with_signs(x):
    values = x.detach().double().reshape(-1).numpy()
    return *_ends(values[np.isfinite(values) & (values != 0)]), _zeros(x), _nonfinite(x)


@misconception("tensor_report", "It looks at positive numbers alone.")
def positive_numbers_alone(x):
    return *_ends(_sizes(x[x > 0])), _zeros(x), _nonfinite(x)


@misconception("tensor_report", "It takes infinity for the largest magnitude.")
def largest_is_infinite(x):
    low, high = _ends(_sizes(x))
    return low, (math.inf if x.isinf().any() else high), _zeros(x), _nonfinite(x)


@misconception("tensor_report", "One NaN makes its smallest and its largest magnitude NaN.")
def poisoned_by_nan(x):
    found = (math.nan, math.nan) if x.isnan().any() else _ends(_sizes(x))
    return *found, _zeros(x), _nonfinite(x)


@misconception("tensor_report", "It counts NaNs alone as not finite.")
def nans_alone(x):
    return *_ends(_sizes(x)), _zeros(x), int(x.isnan().sum())


@misconception("tensor_report", "It counts infinities alone as not finite.")
def infinities_alone(x):
    return *_ends(_sizes(x)), _zeros(x), int(x.isinf().sum())


@misconception("tensor_report", "It counts how many elements are not zero instead of how many are.")
def counts_the_others(x):
    return *_ends(_sizes(x)), int((x != 0).sum()), _nonfinite(x)


@misconception("tensor_report", "It rounds the magnitudes to four decimals, as :.4f prints them.")
def four_decimals(x):
    return *(round(value, 4) for value in _ends(_sizes(x))), _zeros(x), _nonfinite(x)


@misconception("tensor_report", "It converts to float32 first: what float64 holds beyond that is lost.")
def by_float32(x):
    with np.errstate(all="ignore"):
        narrow = torch.from_numpy(x.detach().double().numpy().astype(np.float32))
    return *_ends(_sizes(narrow)), _zeros(narrow), _nonfinite(narrow)


@misconception("tensor_report", "It leaves out what is below the smallest normal float32, 2^-126.")
def normal_numbers_alone(x):
    values = _sizes(x)
    return *_ends(values[values >= 2.0**-126]), _zeros(x), _nonfinite(x)


# --- 5.5 gradient_norm ------------------------------------------------------------------------------------------------


def _clear_of_ties(value: float) -> bool:
    """Whether errors in the 44th bit do not change how the value rounds to 24 bits."""
    part = math.frexp(value)[0] * 2**24 % 1
    return value == 0 or abs(part - 0.5) > 2.0**-20


def _norms(answer, case, *gradients: Tensor | None) -> None:
    want = exact.norm([each for each in gradients if each is not None])
    want = norm_of(lambda parameters: want)[0]
    case.same_bits(answer.run(norm_of, *gradients), (want, True), show=_norm_text, parts=("norm", "rest"))


def _norm_text(norm: object, same: object) -> str:
    return f"{norm!r}{'' if same is True else ', and gradients or weights have changed'}"


def drawn_gradients(
    sizes: tuple[int, ...], low: int, high: int, rng: np.random.Generator, dtype=torch.float32
) -> list[Tensor]:
    """A gradient for each size, whose norm together is not where rounding to 24 bits would change sides."""
    while True:
        drawn = [spread(size, low, high, rng, dtype) for size in sizes]
        if _clear_of_ties(exact.norm(drawn)):
            return drawn


# Magnitudes with a whole norm. Their squares, the sums of these and the norms are exact in each of the three dtypes,
# and so are those of two of them whose norms are the legs of a triangle. Who squares in a narrow dtype is right there,
# however sums and roots are rounded; the next check is the one that such an answer does not pass.
_WHOLE = {3: (1, 2, 2), 4: (2, 2, 2, 2), 5: (1, 4, 2, 2), 6: (4, 4, 2), 8: (4, 4, 4, 4), 12: (8, 8, 4), 13: (3, 4, 12)}
_LEGS = ((3,), (5,), (13,), (3, 4), (4, 3), (6, 8), (8, 6), (5, 12), (12, 5), (3, 4, 12))


def whole_gradients(norms: tuple[int, ...], power: int, rng: np.random.Generator, dtype=torch.float32) -> list[Tensor]:
    """A gradient for each norm: whole numbers of both signs times 2^power, in any order."""
    drawn = [rng.permutation(_WHOLE[norm]) * rng.choice([-1, 1], len(_WHOLE[norm])) for norm in norms]
    return [_tensor(np.ldexp(values.astype(np.float64), power), dtype) for values in drawn]


@check_for("gradient_norm", weight=2)
def gradients_of_usual_sizes(answer, case):
    """One to three gradients of different shapes, of whole numbers times 2^-3 to 2^3, in three dtypes."""
    _norms(answer, case, torch.tensor([3.0, -4.0]))
    _norms(answer, case, torch.tensor([[1.0, 2.0], [2.0, 4.0]]), torch.tensor([-10.0, 10.0, 0.0, 0.0]))
    for dtype in _DTYPES:
        for place in case.rng.permutation(len(_LEGS))[:4]:
            _norms(answer, case, *whole_gradients(_LEGS[place], int(case.rng.integers(-3, 4)), case.rng, dtype))
    for power in (-3, 0):
        long = torch.cat([whole_gradients((norm,), power, case.rng)[0] for norm in (4, 8) * case.count(6)])
        wide = torch.cat([whole_gradients((norm,), power, case.rng)[0] for norm in (12, 6, 3, 5, 8, 4, 13)])
        _norms(answer, case, long.reshape(-1, 4).t(), wide.reshape(2, 3, 4))


@check_for("gradient_norm", weight=2)
def gradients_whose_squares_leave_their_dtype(answer, case):
    """Gradients near 1e-30, near 1e30, of both kinds, and four of 3e38, which are no overflow; three dtypes."""
    for low, high in ((-105, -95), (95, 105), (-148, -130)):
        for sizes in ((3,), (4, 5), (case.count(40), 30)):
            _norms(answer, case, *drawn_gradients(sizes, low, high, case.rng))
    for _ in range(3):
        _norms(answer, case, *drawn_gradients((3,), -120, 60, case.rng), *drawn_gradients((2,), 100, 120, case.rng))
    _norms(answer, case, torch.full((4,), 3e38))
    _norms(answer, case, torch.full((3,), 1e-40), torch.full((2,), -1e-39))
    for dtype, power in ((torch.bfloat16, 100), (torch.bfloat16, -100), (torch.float16, 9), (torch.float16, -17)):
        for norms in ((3,), (6, 8)):
            _norms(answer, case, *whole_gradients(norms, power, case.rng, dtype))


@check_for("gradient_norm")
def gradients_that_are_not_finite(answer, case):
    """Infinities and NaNs among the gradients."""
    for odd in ([math.inf, 1.0], [-math.inf, 2.0], [math.nan, 1.0], [math.nan, math.inf]):
        _norms(answer, case, torch.tensor([2.0, 2.0]), torch.tensor(odd))
        _norms(answer, case, torch.tensor(odd))


@check_for("gradient_norm")
def gradients_that_are_not_there(answer, case):
    """Parameters without a gradient first, in between and last; none with one; no parameter; gradients of zeros."""
    for norms in ((3, 4), (5, 12), (8, 6)):
        one, two = whole_gradients(norms, 0, case.rng)
        _norms(answer, case, None, one, two)
        _norms(answer, case, one, None, two)
        _norms(answer, case, one, two, None)
    _norms(answer, case, torch.tensor([0.0, -0.0]), torch.zeros(0))
    _norms(answer, case, None, None)
    _norms(answer, case)


def _found(parameters) -> list[Tensor]:
    """The gradients that are there."""
    return [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]


def _wide(parameters) -> list[np.ndarray]:
    """The gradients that are there, float64, flat."""
    return [gradient.double().reshape(-1).numpy() for gradient in _found(parameters)]


def _length(*parts: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.square(np.concatenate([np.zeros(0), *parts])).sum()))


@misconception("gradient_norm", "It calls clip_grad_norm_, which returns the norm and shortens the gradients to 1.")
def clips(parameters):
    return float(torch.nn.utils.clip_grad_norm_(list(parameters), 1.0))


@misconception(
    "gradient_norm",
    "It calls clip_grad_norm_ with an infinite max_norm: where squares leave float32 the norm is wrong, and where that "
    "is infinite, infinity / infinity makes every gradient NaN.",
)
def clips_to_infinity(parameters):
    return float(torch.nn.utils.clip_grad_norm_(list(parameters), math.inf))


@misconception("gradient_norm", "It squares in float32: tiny gradients vanish, large ones become infinite.")
def squares_in_float32(parameters):
    with np.errstate(all="ignore"):
        squares = [np.square(each.astype(np.float32)).astype(np.float64).sum() for each in _wide(parameters)]
    return float(np.sqrt(sum(squares, start=0.0)))


@misconception(
    "gradient_norm",
    "It squares gradients in their own dtype: tiny ones vanish, large ones become infinite, in FP16 from 256 on.",
)
def squares_in_own_dtype(parameters):
    squares = [float(each.square().double().sum()) for each in _found(parameters)]
    return float(np.sqrt(sum(squares, start=0.0)))


@misconception(
    "gradient_norm",
    "It squares in float32, where tiny gradients vanish and large ones become infinite; and it stacks the sums: there "
    "is nothing to stack where no gradient is.",
)
def stacks_float32(parameters):
    return float(torch.stack([each.float().norm() for each in _found(parameters)]).norm())


@misconception(
    "gradient_norm",
    "It squares gradients in their own dtype, where tiny ones vanish and large ones become infinite; and it stacks the "
    "sums: there is nothing to stack where no gradient is.",
)
def stacks_own_dtype(parameters):
    return float(torch.stack([each.square().sum() for each in _found(parameters)]).sum().sqrt())


@misconception(
    "gradient_norm",
    "It squares in float32, where tiny gradients vanish and large ones become infinite; and it joins the gradients "
    "with torch.cat: there is nothing to join where no gradient is.",
)
def joins_float32(parameters):
    return float(torch.cat([each.flatten() for each in _found(parameters)]).norm())


@misconception("gradient_norm", "It adds the norms of the gradients instead of their squares.")
def adds_norms(parameters):
    return float(sum((_length(each) for each in _wide(parameters)), start=0.0))


@misconception("gradient_norm", "It leaves out the root.")
def without_root(parameters):
    return _length(*_wide(parameters)) ** 2


@misconception("gradient_norm", "It adds up magnitudes instead of squares.")
def adds_magnitudes(parameters):
    return float(sum((np.abs(each).sum() for each in _wide(parameters)), start=0.0))


@misconception("gradient_norm", "It gives the largest magnitude.")
def largest_magnitude(parameters):
    return float(np.max(np.concatenate([np.zeros(1), *(np.abs(each) for each in _wide(parameters))])))


@misconception("gradient_norm", "It takes the norm of the weights, not of the gradients.")
def norm_of_weights(parameters):
    return _length(*(each.detach().double().reshape(-1).numpy() for each in parameters))


@misconception("gradient_norm", "It takes the mean of the squares instead of their sum.")
def mean_of_squares(parameters):
    parts = _wide(parameters)
    count = sum(each.size for each in parts)
    return _length(*parts) / math.sqrt(count) if count else 0.0


@misconception("gradient_norm", "It goes through the parameters twice: a generator is empty the second time.")
def reads_a_generator_twice(parameters):
    there = sum(each.grad is not None for each in parameters)
    return _length(*_wide(parameters)) if there else 0.0


@misconception("gradient_norm", "It leaves out infinities and NaNs.")
def finite_ones_alone(parameters):
    return _length(*(each[np.isfinite(each)] for each in _wide(parameters)))


@misconception("gradient_norm", "It stops at the first parameter without a gradient.")
def stops_at_the_first_gap(parameters):
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            break
        found.append(parameter)
    return _length(*_wide(found))


@misconception("gradient_norm", "It gives the norm of the last gradient alone.")
def last_gradient_alone(parameters):
    return _length(*_wide(parameters)[-1:])


# --- 5.6 update_ratio -------------------------------------------------------------------------------------------------


def _ratios(answer, case, before: Tensor, after: Tensor) -> None:
    want = ratio_of(exact.update_ratio, before, after)
    case.same_bits(answer.run(ratio_of, before, after), want)


def step_of(size: int, low: int, high: int, ratio: float, rng: np.random.Generator, dtype=torch.float32) -> tuple:
    """Weights and the same after a step of about `ratio` of their size; not where rounding to 24 bits changes sides."""
    while True:
        before = spread(size, low, high, rng, dtype)
        after = (before.double() * torch.from_numpy(1 + ratio * rng.normal(size=size))).to(dtype)
        if _clear_of_ties(exact.update_ratio(before, after)):
            return before, after


def whole_step(power: int, rng: np.random.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights whose norm is 4 or 8, and a step whose norm is a whole number times 2^power: exact in every dtype."""
    size = float(rng.choice([2, 4]))
    moved = rng.choice([(1, 2, 2, 0), (2, 2, 2, 2), (1, 4, 2, 2), (4, 4, 2, 0), (3, 4, 12, 0), (8, 8, 4, 0)])
    before = rng.choice([-size, size], 4)
    after = before + np.ldexp(rng.permutation(moved) * rng.choice([-1.0, 1.0], 4), power)
    return _tensor(before, dtype), _tensor(after, dtype)


def steps_beyond_float32(count: int, rng: np.random.Generator) -> list[tuple[Tensor, Tensor]]:
    """Steps from a tiny weight, whose difference is the weight after it in float32, which changes the ratio."""
    after = rng.integers(2**10, 2**11, 4096).astype(np.float64)
    tiny = rng.integers(16, 65, 4096) * 2.0**-20  # up to half of what float32 numbers near `after` are apart
    right, wrong = (after + tiny) / tiny, after / tiny
    changes = right.astype(np.float32) != wrong.astype(np.float32)
    lost = (after + tiny).astype(np.float32) == after.astype(np.float32)
    chosen = [k for k in np.flatnonzero(changes & lost) if _clear_of_ties(float(right[k]))]
    return [(_tensor([-tiny[k], 0.0]), _tensor([after[k], 0.0])) for k in chosen[:count]]


@check_for("update_ratio", weight=2)
def steps_of_usual_sizes(answer, case):
    """Steps of a hundredth to three times the weights, in three dtypes; (3, 4) to (3, 4.5), whose ratio is 0.1."""
    _ratios(answer, case, torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    _ratios(answer, case, torch.tensor([3.0, -4.0, 0.0]), torch.tensor([3.0, -4.0, 10.0]))
    for dtype in _DTYPES:
        for power in (-5, -4, -3, -2) * case.count(1):
            _ratios(answer, case, *whole_step(power, case.rng, dtype))
    for power in (-7, -12):
        before, after = whole_step(power, case.rng, torch.float32)
        _ratios(answer, case, before.repeat(4).reshape(2, 8).t(), after.repeat(4).reshape(2, 8).t())


@check_for("update_ratio")
def steps_that_need_float64(answer, case):
    """Weights near 1e-30 and 1e30; steps far larger than the weights; differences that 16 bits or float32 round."""
    for low, high in ((-105, -95), (95, 105), (-140, -120)):
        for size in (case.count(4), 40):
            _ratios(answer, case, *step_of(size, low, high, 0.05, case.rng))
    for dtype, tiny in ((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-11)):
        for after in (1.0, 4.0, -0.5):
            _ratios(answer, case, _tensor([-tiny * after, 0.0], dtype), _tensor([after, 0.0], dtype))
    for before, after in steps_beyond_float32(4, case.rng):
        _ratios(answer, case, before, after)


@check_for("update_ratio")
def steps_from_zero_and_to_nowhere(answer, case):
    """Weights that are all zero, steps that move nothing, no weight at all, a single weight, infinities and NaNs."""
    for count in (1, 2, 3):
        zero, some = torch.zeros(count), spread(count, -3, 3, case.rng)
        for before, after in ((zero, zero), (zero, -zero), (zero, some), (-zero, -some), (some, some), (some, zero)):
            _ratios(answer, case, before, after)
    _ratios(answer, case, torch.zeros(0), torch.zeros(0))
    _ratios(answer, case, torch.tensor(2.0), torch.tensor(-1.0))
    for odd in (math.inf, math.nan):
        _ratios(answer, case, torch.tensor([1.0, 2.0]), torch.tensor([odd, 2.0]))
    _ratios(answer, case, torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))


def _flat64(*tensors: Tensor) -> list[np.ndarray]:
    return [each.detach().double().reshape(-1).numpy() for each in tensors]


def _over(moved: float, size: float) -> float:
    """moved / size; where size is 0: infinity, or what `moved` is when that is 0 or NaN."""
    if size == 0:
        return math.inf if moved > 0 else moved
    return float(moved / size)


def _ratio_by(before: Tensor, after: Tensor, measure) -> float:
    old, new = _flat64(before, after)
    with np.errstate(all="ignore"):
        return _over(measure(new - old), measure(old)) if old.size else 0.0


@misconception("update_ratio", "It divides by the norm of the weight after the step.")
def over_the_new_weight(before, after):
    old, new = _flat64(before, after)
    return _over(_length(new - old), _length(new))


@misconception("update_ratio", "It compares standard deviations instead of norms: a mean that moves is not seen.")
def by_standard_deviations(before, after):
    return _ratio_by(before, after, lambda values: float(values.std()))


@misconception("update_ratio", "It compares sums of magnitudes instead of norms.")
def by_magnitudes(before, after):
    return _ratio_by(before, after, lambda values: float(np.abs(values).sum()))


@misconception("update_ratio", "It compares the largest magnitudes instead of norms.")
def by_largest(before, after):
    return _ratio_by(before, after, lambda values: float(np.abs(values).max()))


@misconception("update_ratio", "It compares sums of squares: the root is missing.")
def by_squares(before, after):
    return _ratio_by(before, after, lambda values: float(np.square(values).sum()))


@misconception("update_ratio", "It takes the mean of the ratios of all elements.")
def mean_of_ratios(before, after):
    old, new = _flat64(before, after)
    with np.errstate(all="ignore"):
        ratios = [_over(abs(float(b - a)), abs(float(a))) for a, b in zip(old, new, strict=True)]
    return float(np.mean(ratios)) if ratios else 0.0


@misconception("update_ratio", "It subtracts in the tensors' own dtype, which rounds the difference.")
def subtracts_in_own_dtype(before, after):
    moved, old = _flat64(after - before, before)
    return _over(_length(moved), _length(old))


@misconception("update_ratio", "It subtracts in float32, which rounds the difference.")
def subtracts_in_float32(before, after):
    moved, old = _flat64(after.float() - before.float(), before)
    return _over(_length(moved), _length(old))


@misconception(
    "update_ratio", "It computes in float32: differences are rounded, small weights vanish, large ones become infinite."
)
def ratio_in_float32(before, after):
    return _over(float((after.float() - before.float()).norm()), float(before.float().norm()))


@misconception(
    "update_ratio",
    "It computes in the tensors' own dtype: differences are rounded, small weights vanish, large ones become infinite.",
)
def ratio_in_own_dtype(before, after):
    return _over(float((after - before).norm()), float(before.norm()))


@misconception(
    "update_ratio",
    "It divides two norms in the tensors' own dtype: differences are rounded, small weights vanish, and 0 / 0 is NaN.",
)
def plain_quotient(before, after):
    return float((after - before).norm() / before.norm())


@misconception("update_ratio", "It compares the norms before and after: a step that turns the weights is not seen.")
def difference_of_norms(before, after):
    old, new = _flat64(before, after)
    with np.errstate(all="ignore"):
        return _over(abs(_length(new) - _length(old)), _length(old))


@misconception("update_ratio", "It adds 1e-8 to the norm that it divides by.")
def with_an_epsilon(before, after):
    old, new = _flat64(before, after)
    return float(_length(new - old) / (_length(old) + 1e-8))


@misconception("update_ratio", "It gives 0 for weights that were all zero, also when they moved.")
def zero_for_zero_weights(before, after):
    old, new = _flat64(before, after)
    return _over(_length(new - old), _length(old)) if _length(old) else 0.0


@misconception("update_ratio", "It gives NaN where nothing was and nothing moved.")
def nan_for_nothing(before, after):
    old, new = _flat64(before, after)
    return (
        float(np.divide(_length(new - old), _length(old)))
        if _length(old)
        else (math.nan if not _length(new) else math.inf)
    )


@misconception("update_ratio", "It divides the norm of the weight by the norm of the step.")
def turned_round(before, after):
    old, new = _flat64(before, after)
    return _over(_length(old), _length(new - old))


# --- 5.7 Taps ---------------------------------------------------------------------------------------------------------

_RECORDED = ("activations", "gradients", "counts", "run")


def whole_numbers(shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """Whole numbers from -3 to 3 in float32, no row of them all zero: sums of their products are exact."""
    drawn = rng.integers(-3, 4, shape)
    drawn[..., 0] = np.where(drawn[..., 0] == 0, 2, drawn[..., 0])
    return torch.from_numpy(drawn.astype(np.float32))


def _taps(answer, case, calls: int, how: str) -> None:
    """One run of the two layers; the four results are compared one by one, since they differ in length."""
    rows, width, hidden, out = (int(size) for size in case.rng.integers(2, 4, 4))
    x, up, down = (whole_numbers(shape, case.rng) for shape in ((rows, width), (hidden, width), (out, hidden)))
    got = answer.run(tapped, x, up, down, calls, how)
    sizes = (1, 1) if how == "largest" else (rows * hidden, rows * out)
    weights = (hidden * width, out * hidden)
    entries = [_entry_at(kept, sizes, calls) for kept in _RECORDED[:2]]
    places = (*entries, _counted_at, _run_at(weights))
    for part, right, name, place in zip(got, exact.tapped(x, up, down, calls, how), _RECORDED, places, strict=True):
        case.same_bits(part, right, parts=(name,), show=_with_its_place(part, right, place))


def _entry_at(kept: str, sizes: tuple[int, int], calls: int) -> Callable[[int], str]:
    """A function from a place among all entries to the words for it: list, module, call."""
    first = calls * sizes[0]

    def place(index: int) -> str:
        name, size, index = ("up", sizes[0], index) if index < first else ("down", sizes[1], index - first)
        return f"in {kept}[{name!r}], call {index // size + 1} of {calls}, number {index % size + 1} of {size}"

    return place


def _counted_at(index: int) -> str:
    """What the number at a place of the scenario's counts is a number of."""
    if index >= 8:
        return "(entries that are tied to the graph)" if index == 8 else "(errors that came out of the block)"
    kept, name = ("activations", "gradients")[index // 2 % 2], ("up", "down")[index % 2]
    return f"(entries in {kept}[{name!r}], {'in' if index < 4 else 'after'} the block)"


def _run_at(weights: tuple[int, int]) -> Callable[[int], str]:
    """A function from a place in the run's own results to the words for it."""

    def place(index: int) -> str:
        if not index:
            return "for the loss of the run itself"
        return f"in the gradient of the weight of {'up' if index <= weights[0] else 'down'}, in the run itself"

    return place


@check_for("Taps", weight=2)
def one_forward_and_one_backward(answer, case):
    """Two layers with a ReLU in place between them, called once: activations, gradients, and the run itself."""
    for _ in range(4):
        _taps(answer, case, 1, "train")


@check_for("Taps", weight=2)
def several_calls_of_a_module(answer, case):
    """Two and three calls before one backward pass: an entry for each call, in the order of the calls."""
    for calls in (2, 3, 2, 3):
        _taps(answer, case, calls, "train")


@check_for("Taps")
def with_a_measure(answer, case):
    """The largest magnitudes are kept instead of copies."""
    for calls in (1, 1, 2):
        _taps(answer, case, calls, "largest")


@check_for("Taps")
def without_gradients(answer, case):
    """A forward pass under torch.no_grad: activations, and None for each gradient."""
    for calls in (1, 1, 2):
        _taps(answer, case, calls, "no_grad")


@check_for("Taps")
def ended_by_an_error(answer, case):
    """An error in the block comes through, nothing is watched afterwards, and what was kept is there."""
    for calls in (1, 1, 2):
        _taps(answer, case, calls, "error")


@check_for("Taps")
def backward_after_the_block(answer, case):
    """The forward passes in the block, the backward pass after it: no gradient is kept any more."""
    for calls in (1, 1, 2):
        _taps(answer, case, calls, "later")


def _recorder(
    model, names, measure, *, removes="always", swallows=False, entries="all", order="calls", place="output",
    detach=True, forgets=False, in_place=False, twice=False, tensors=True, late_name=False
):  # fmt: skip
    """Taps with parts of the rule replaced."""

    class Recorder:
        def __init__(self):
            self.activations = {name: [] for name in names}
            self.gradients = {name: [] for name in names}
            self.handles = []

        def __enter__(self):
            for name in names:
                module, kept_as = model.get_submodule(name), names[-1] if late_name else name
                self.handles.append(module.register_forward_hook(self.hook(kept_as)))
            return self

        def __exit__(self, kind, *error):
            if removes == "always" or (removes == "without error" and kind is None):
                for handle in self.handles:
                    handle.remove()
            if forgets:
                for name in names:
                    self.activations[name], self.gradients[name] = [], []
            return swallows

        def hook(self, name):
            def forward(module, args, output):
                watched = args[0] if place == "input" else output
                if entries == "last":
                    self.activations[name].clear()
                    self.gradients[name].clear()
                kept = watched.detach() if detach else watched
                self.activations[name].append(kept if in_place else measure(kept))
                number = len(self.gradients[name])
                if order != "arrival":
                    self.gradients[name].append(None)
                watched = module.weight if place == "weight" else watched
                if watched.requires_grad:
                    handle = watched.register_hook(lambda gradient: keep(number, gradient))
                    self.handles += [handle] * tensors

            def keep(number, gradient):
                found = measure(gradient.detach())
                own = self.gradients[name]
                if order == "arrival":
                    own.append(found)
                elif order == "first empty":
                    own[next(k for k, each in enumerate(own) if each is None)] = found
                else:
                    own[-1 if order == "last" or entries == "last" else number] = found
                return gradient * 2 if twice else None

            return forward

    return Recorder()


@misconception("Taps", "It never removes its hooks: what is called after the block is recorded too.")
def never_removes(model, names, measure=torch.clone):
    return _recorder(model, names, measure, removes="never")


@misconception(
    "Taps",
    "It removes the modules' hooks and leaves those on tensors: a gradient that arrives after the block is kept, too.",
)
def leaves_hooks_on_tensors(model, names, measure=torch.clone):
    return _recorder(model, names, measure, tensors=False)


@misconception("Taps", "It removes its hooks only when the block ends without an error.")
def removes_without_error(model, names, measure=torch.clone):
    return _recorder(model, names, measure, removes="without error")


@misconception("Taps", "It swallows errors: __exit__ returns True.")
def swallows_errors(model, names, measure=torch.clone):
    return _recorder(model, names, measure, swallows=True)


@misconception("Taps", "It keeps the output itself: what is changed in place afterwards changes in the record.")
def keeps_the_output(model, names, measure=torch.clone):
    return _recorder(model, names, measure, in_place=True)


@misconception("Taps", "It keeps the last call alone.")
def keeps_the_last_call(model, names, measure=torch.clone):
    return _recorder(model, names, measure, entries="last")


@misconception("Taps", "It appends gradients as they arrive: backward, the last call comes first.")
def gradients_as_they_arrive(model, names, measure=torch.clone):
    return _recorder(model, names, measure, order="arrival")


@misconception(
    "Taps",
    "Its hook looks up the place when the gradient arrives: by then it is that of the last call, and all gradients of "
    "a module are written there.",
)
def place_is_looked_up_late(model, names, measure=torch.clone):
    return _recorder(model, names, measure, order="last")


@misconception("Taps", "It puts a gradient into the first place that is still empty: that of the first call.")
def first_empty_place(model, names, measure=torch.clone):
    return _recorder(model, names, measure, order="first empty")


@misconception(
    "Taps",
    "Its hooks look up the name when they are called: by then the loop is over, and all is kept under the last name.",
)
def name_is_looked_up_late(model, names, measure=torch.clone):
    return _recorder(model, names, measure, late_name=True)


# Who makes one of these mistakes has mostly not thought of the hooks on tensors either.


@misconception(
    "Taps",
    "Its hook looks up the place when the gradient arrives: by then it is that of the last call. And the hooks on "
    "tensors stay after the block.",
)
def late_place_and_hooks_stay(model, names, measure=torch.clone):
    return _recorder(model, names, measure, order="last", tensors=False)


@misconception(
    "Taps",
    "Its hooks look up the name when they are called: by then it is the last one. And the hooks on tensors stay after "
    "the block.",
)
def late_name_and_hooks_stay(model, names, measure=torch.clone):
    return _recorder(model, names, measure, late_name=True, tensors=False)


@misconception(
    "Taps",
    "It appends gradients as they arrive, the last call's first. And the hooks on tensors stay after the block.",
)
def as_they_arrive_and_hooks_stay(model, names, measure=torch.clone):
    return _recorder(model, names, measure, order="arrival", tensors=False)


@misconception("Taps", "It keeps copies, whatever measure is.")
def never_measures(model, names, measure=torch.clone):
    return _recorder(model, names, torch.clone)


@misconception("Taps", "It records what goes into a module, not what comes out.")
def records_the_input(model, names, measure=torch.clone):
    return _recorder(model, names, measure, place="input")


@misconception("Taps", "It records the gradient of the module's weight, not of its output.")
def gradient_of_the_weight(model, names, measure=torch.clone):
    return _recorder(model, names, measure, place="weight")


@misconception("Taps", "It keeps tensors that are tied to the graph: nothing is detached.")
def tied_to_the_graph(model, names, measure=torch.clone):
    return _recorder(model, names, measure, detach=False)


@misconception("Taps", "It throws away at the end of the block what it kept.")
def forgets_at_the_end(model, names, measure=torch.clone):
    return _recorder(model, names, measure, forgets=True)


@misconception("Taps", "Its hook returns a gradient, and so changes what goes further back.")
def changes_the_gradient(model, names, measure=torch.clone):
    return _recorder(model, names, measure, twice=True)


# --- 5.8 row_lengths --------------------------------------------------------------------------------------------------


def exact_rows(count: int, n: int, rng: np.random.Generator) -> Tensor:
    """Rows whose length is a power of two: 1, 4 or 16 elements of one magnitude, the rest zero; some are all zero."""
    rows = np.zeros((count, n), dtype=np.float32)
    for row in rows:
        filled = int(rng.choice([size for size in (1, 4, 16) if size <= n]))
        places = rng.permutation(n)[:filled]
        row[places] = np.ldexp(rng.choice([-1.0, 1.0], filled), int(rng.integers(-20, 20)))
    rows[rng.random(count) < 0.3] = 0
    return torch.from_numpy(rows)


def _lengths_of(answer, case, x: Tensor) -> None:
    """Lengths first, then their gradient for a gradient of powers of two."""
    case.same_bits(answer(x), exact.row_lengths(x))
    powers = np.ldexp(1.0, case.rng.integers(-3, 4, x.shape[:-1]))
    gradient = torch.from_numpy(np.asarray(powers, dtype=np.float32))
    case.same_bits(answer.run(gradient_through, x, gradient), exact.gradient_of_lengths(x, gradient) + 0.0)


@check_for("row_lengths", weight=2)
def lengths_that_are_powers_of_two(answer, case):
    """Rows with lengths from 2^-20 to 2^20 and rows of zeros, in batches and alone; lengths and gradients."""
    for n in (1, 3, 4, 8):
        _lengths_of(answer, case, exact_rows(case.count(6), n, case.rng))
    _lengths_of(answer, case, exact_rows(6, 16, case.rng).reshape(2, 3, 16))
    _lengths_of(answer, case, exact_rows(1, 5, case.rng)[0])


@check_for("row_lengths", weight=2)
def rows_of_zeros(answer, case):
    """Rows of zeros of both signs: the length is 0 and so is the gradient."""
    for shape in ((1, 2), (2, 3), (2, 2, 4), (5,)):
        _lengths_of(answer, case, torch.zeros(shape))
    _lengths_of(answer, case, torch.tensor([[0.0, -0.0], [1.0, 0.0], [-0.0, -0.0], [0.0, -2.0]]))


@check_for("row_lengths")
def whole_lengths(answer, case):
    """Rows such as (3, 4) and (2, 3, 6), whose lengths are whole numbers; lengths alone."""
    for row in ((3.0, 4.0), (2.0, 3.0, 6.0), (1.0, 2.0, 2.0), (-5.0, 12.0), (8.0, -9.0, 12.0)):
        x = torch.tensor([row, [0.0] * len(row), [2 * value for value in row]])
        case.same_bits(answer(x), exact.row_lengths(x))


@misconception(
    "row_lengths",
    "Its gradient at a row of zeros is NaN: the root of 0 has an infinite slope, and 0 times infinity is NaN, also "
    "when a torch.where comes after it.",
)
def plain_root(x):
    return x.square().sum(-1).sqrt()


@misconception("row_lengths", "It adds 1e-12 to the sum of squares: a row of zeros gets the length 1e-6.")
def epsilon_inside(x):
    return (x.square().sum(-1) + 1e-12).sqrt()


@misconception(
    "row_lengths", "It raises the sum of squares to at least 1e-12: shorter rows get the length 1e-6, and no gradient."
)
def clamped_inside(x):
    return x.square().sum(-1).clamp(min=1e-12).sqrt()


@misconception("row_lengths", "It detaches the lengths: every gradient is 0.")
def detached_lengths(x):
    return torch.linalg.vector_norm(x.detach(), dim=-1)


@misconception("row_lengths", "It adds up magnitudes instead of squares.")
def sums_of_magnitudes(x):
    return x.abs().sum(-1)


@misconception("row_lengths", "It gives the largest magnitude of each row.")
def largest_of_each_row(x):
    return x.abs().amax(-1)


@misconception("row_lengths", "It leaves out the root.")
def squares_of_lengths(x):
    return x.square().sum(-1)


# --- questions about the real code ------------------------------------------------------------------------------------

question_for(
    "5.A",
    1.0,
    "Right: the coefficient is 2.0 (nearly), and clamp makes 1.0 of it. Clipping shortens; it never lengthens.",
    "max_norm / (total_norm + 1e-6) is about 2. Read the next line, too.",
    {
        2.0: "That is clip_coef. Read what is done with it before anything is multiplied.",
        0.5: "That is the norm. By what is each gradient multiplied?",
    },
)
question_for(
    "5.B",
    8.0,
    "Right: what is returned is the norm from before clipping. A log of it says nothing about what the optimizer got.",
    "total_norm is worked out first, and what is returned at the end?",
    {1.0: "1.0 is the norm afterwards. Is it worked out again before the return?"},
)
question_for(
    "5.C",
    1,
    "Right: 0.5 alone. What is outside and what is NaN is left out without a word.",
    "Which of the four numbers are lower than min, higher than max, or NaN?",
    {
        2: "NaN is no number between 0 and 1. And 3.0?",
        3: "Read the sentence about elements lower than min and higher than max.",
        4: "Read the sentence about elements lower than min and higher than max.",
    },
)
