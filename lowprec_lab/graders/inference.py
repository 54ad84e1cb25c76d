"""Checks and known misconceptions of chapter 11.

Codes and scales are compared bit for bit. Outputs of a layer are, on numbers whose sums are exact in any order, and
elsewhere with the bound that inference_oracle.py derives. The sign of a zero in an output is not judged.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import E4M3
from lowprec_lab.graders import float8_linear_oracle, oracle
from lowprec_lab.graders import inference_oracle as exact
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for
from lowprec_lab.inference import (
    FP8,
    cache_keeps,
    cache_scales,
    cached,
    layer_output,
    layer_refuses,
    layer_state,
    perplexity_leaves,
    perplexity_of,
)

for _function in (
    exact.quantize_weight_per_channel, exact.quantize_activation_per_token, exact.quantize_per_tensor,
    exact.calibrate_static, exact.Float8InferenceLinear, exact.perplexity, exact.Float8KVCache, exact.smooth,
    exact.compensate,
):  # fmt: skip
    oracle_for(_function.__name__, _function)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PARTS = ("codes", "scale")


def _same_parts(case, got: object, want: tuple, parts: tuple[str, ...] = _PARTS) -> None:
    """Compare the parts of a tuple one after the other: their shapes differ."""
    if not isinstance(got, tuple) or len(got) != len(want):
        case.same_bits(got, tuple(torch.zeros(1) for _ in want), parts=parts)  # says what is expected
        return
    for part, one, other in zip(parts, got, want, strict=True):
        case.same_bits(one, other, parts=(part,))


# --- inputs -----------------------------------------------------------------------------------------------------------


def drawn(rng: np.random.Generator, *shape: int, low: int = -9, high: int = 10) -> Tensor:
    """Normal numbers; each row of a size of its own, from 2^low to 2^high."""
    sizes = np.ldexp(1.0, rng.integers(low, high, (*shape[:-1], 1)))
    return torch.from_numpy((rng.normal(size=shape) * sizes).astype(np.float32))


def near_ties(rng: np.random.Generator, rows: int, columns: int) -> Tensor:
    """float32 rows in which x / scale is half-way between two codes, or an ulp of float32 from there."""
    amax = np.ldexp(rng.uniform(1, 2, (rows, 1)), rng.integers(-5, 6, (rows, 1))).astype(np.float32)
    values = oracle.decode(torch.arange(1, 125, dtype=torch.int32), E4M3).numpy()
    middles = ((values[1:] + values[:-1]) / 2)[rng.integers(0, len(values) - 1, (rows, columns))]
    x = (middles * (amax / np.float32(448))).astype(np.float32)
    for _ in range(2):
        x = np.nextafter(x, rng.choice([-np.inf, np.inf], x.shape).astype(np.float32))
    x *= rng.choice([-1, 1], x.shape).astype(np.float32)
    x[:, :1] = amax * rng.choice([-1, 1], amax.shape)
    return torch.from_numpy(x)


# Rows of two kinds of numbers each, which are repeated.
_ODD = (
    (0.0, 0.0), (-0.0, 0.0), (1e-40, -1e-41), (1e-6, -3e-7), (0.0019, 1e-4), (0.002, -0.0019), (math.nan, 1.0),
    (math.inf, -2.0), (-math.inf, 0.0), (3e38, -1e38),
)  # fmt: skip


def odd_rows(rng: np.random.Generator, columns: int = 4) -> Tensor:
    """Zeros, subnormal and tiny numbers, NaN, infinities, the largest ones; and ordinary rows among them."""
    rows = torch.tensor([[each[k % 2] for k in range(columns)] for each in _ODD])
    return torch.cat([rows, drawn(rng, 2, columns)])[torch.from_numpy(rng.permutation(len(_ODD) + 2))]


# --- 11.1 quantize_weight_per_channel ---------------------------------------------------------------------------------


def _compare_rows(answer, case, x: Tensor, *more: float) -> None:
    _same_parts(case, answer(x, *more), exact.by_row(x, *more))


@check_for("quantize_weight_per_channel", weight=2)
def weights_of_every_dtype(answer, case):
    """Weights of 1 to 8 rows in float32, bfloat16 and float16, rows of very different sizes."""
    for dtype in _DTYPES:
        for _ in range(case.count(4)):
            n, k = (int(each) for each in case.rng.integers(1, 9, 2))
            _compare_rows(answer, case, drawn(case.rng, n, k).to(dtype))


@check_for("quantize_weight_per_channel")
def quotients_near_ties(answer, case):
    """Quotients half-way between two codes, and up to two ulps of float32 from there."""
    for _ in range(case.count(3)):
        _compare_rows(answer, case, near_ties(case.rng, 4, 24))


@check_for("quantize_weight_per_channel")
def rows_of_zeros_and_worse(answer, case):
    """Rows of zeros, of tiny and of huge numbers, NaN and infinities."""
    for _ in range(case.count(2)):
        _compare_rows(answer, case, odd_rows(case.rng))


@check_for("quantize_weight_per_channel")
def weights_that_are_laid_out_oddly(answer, case):
    """A transposed weight, every other column, no rows."""
    for _ in range(case.count(1)):
        _compare_rows(answer, case, drawn(case.rng, 5, 3).t())
        _compare_rows(answer, case, drawn(case.rng, 4, 8)[:, ::2])
        _compare_rows(answer, case, torch.zeros(0, 4))


@misconception("quantize_weight_per_channel", "It has one scale for each column, an input, along which the sum runs.")
def by_input_channel(weight):
    with np.errstate(all="ignore"):
        amax = np.max(np.abs(exact.single(weight)), axis=0, keepdims=True, initial=0.0)
    scale = exact.scale_of(amax)
    rows = np.resize(scale, (len(weight), 1)) if scale.size else np.zeros((len(weight), 1))
    return exact.divided(weight, scale), exact.tensor(rows)


@misconception("quantize_weight_per_channel", "It has one scale for the whole weight, repeated for every row.")
def one_scale_for_all(weight):
    return exact.by_row(weight, axis=None) if weight.numel() else exact.by_row(weight)


@misconception("quantize_weight_per_channel", "It has no floor: a row of zeros gets the scale 0, and 0 / 0 is NaN.")
def no_floor(weight):
    return exact.by_row(weight, floor=np.float32(0))


@misconception("quantize_weight_per_channel", "It returns 448 / amax: chapter 07's scale, the inverse of this one.")
def inverse_scale(weight):
    codes, scale = exact.by_row(weight)
    return codes, exact.tensor(1 / scale.numpy())


@misconception("quantize_weight_per_channel", "It takes the largest number of a row, not the largest magnitude.")
def signed_maximum(weight):
    return exact.by_row(weight, size=lambda x: x)


@misconception(
    "quantize_weight_per_channel", "It multiplies by the rounded reciprocal of the scale: some codes differ."
)
def by_the_reciprocal(weight):
    return exact.by_row(weight, by="reciprocal")


@misconception("quantize_weight_per_channel", "It works out the scale in the weight's dtype: a bfloat16 has 8 bits.")
def scale_in_the_dtype(weight):
    def short(scale):
        return exact.tensor(scale).to(weight.dtype).float().numpy()

    with np.errstate(all="ignore"):
        amax = np.max(np.abs(exact.single(weight)), axis=-1, keepdims=True)
        scale = np.maximum(short(amax / exact.TOP), exact.FLOOR)
    return exact.divided(weight, scale), exact.tensor(scale)


# --- 11.2 quantize_activation_per_token -------------------------------------------------------------------------------


@check_for("quantize_activation_per_token", weight=2)
def tokens_of_every_shape(answer, case):
    """One to four dimensions, transposed and without tokens; float32, bfloat16 and float16."""
    for dtype in _DTYPES:
        for shape in ((7,), (3, 5), (2, 3, 4), (2, 1, 3, 4), (0, 4)):
            for _ in range(case.count(1)):
                _compare_rows(answer, case, drawn(case.rng, *shape).to(dtype))
    _compare_rows(answer, case, drawn(case.rng, 6, 4).t())
    _compare_rows(answer, case, drawn(case.rng, 3, 2, 4).transpose(0, 1))


@check_for("quantize_activation_per_token", weight=2)
def upper_bounds(answer, case):
    """Bounds below, among and above the amaxes of the tokens, infinities among them."""
    for bound in (0.5, 3.0, 100.0, 1000.0, 0.001):
        for _ in range(case.count(2)):
            _compare_rows(answer, case, drawn(case.rng, 5, 6, low=-3, high=9), bound)
    _compare_rows(answer, case, odd_rows(case.rng), 2.0)
    _compare_rows(answer, case, drawn(case.rng, 2, 3, 4).bfloat16(), 1.5)


@check_for("quantize_activation_per_token")
def tokens_near_ties(answer, case):
    """Quotients half-way between two codes, and up to two ulps of float32 from there."""
    for _ in range(case.count(3)):
        _compare_rows(answer, case, near_ties(case.rng, 4, 24))


@check_for("quantize_activation_per_token")
def tokens_of_zeros_and_worse(answer, case):
    """Tokens of zeros, of tiny and of huge numbers, NaN and infinities."""
    for _ in range(case.count(2)):
        _compare_rows(answer, case, odd_rows(case.rng))
    _compare_rows(answer, case, drawn(case.rng, 6, 4, low=-14, high=-8))


@misconception("quantize_activation_per_token", "It bounds the scale instead of the amax: 448 times as high.")
def bounds_the_scale(x, upper_bound=None):
    top = np.float32(np.inf if upper_bound is None else upper_bound)
    return exact.by_row(x, change=lambda scale: np.minimum(scale, top))


@misconception("quantize_activation_per_token", "It takes no notice of the upper bound.")
def without_the_bound(x, upper_bound=None):
    return exact.by_row(x)


@misconception("quantize_activation_per_token", "It does not saturate: what is above the upper bound becomes NaN.")
def does_not_saturate(x, upper_bound=None):
    return exact.by_row(x, upper_bound, saturate=False)


@misconception("quantize_activation_per_token", "It has no floor: a token of zeros gets the scale 0, and 0 / 0 is NaN.")
def token_without_a_floor(x, upper_bound=None):
    return exact.by_row(x, upper_bound, floor=np.float32(0))


@misconception("quantize_activation_per_token", "Its floor is 1e-12, torchao's eps: tiny tokens keep their own scale.")
def floor_of_torchao(x, upper_bound=None):
    return exact.by_row(x, upper_bound, floor=np.float32(1e-12))


@misconception(
    "quantize_activation_per_token", "It multiplies by the rounded reciprocal of the scale: some codes differ."
)
def token_by_the_reciprocal(x, upper_bound=None):
    return exact.by_row(x, upper_bound, by="reciprocal")


@misconception("quantize_activation_per_token", "It has one scale for all tokens, repeated for each of them.")
def one_scale_for_all_tokens(x, upper_bound=None):
    return exact.by_row(x, upper_bound, axis=None) if x.numel() else exact.by_row(x)


@misconception("quantize_activation_per_token", "It keeps the scale in x's dtype: that of a bfloat16 token has 8 bits.")
def short_scale(x, upper_bound=None):
    return exact.by_row(x, upper_bound, change=lambda scale: exact.tensor(scale).to(x.dtype).float().numpy())


# --- 11.3 quantize_per_tensor -----------------------------------------------------------------------------------------


def _compare_tensors(answer, case, x: Tensor, scale: float | None = None) -> None:
    given = () if scale is None else (torch.tensor(scale),)
    _same_parts(case, answer(x, *given), exact.quantize_per_tensor(x, *given))


@check_for("quantize_per_tensor")
def scales_of_their_own(answer, case):
    """No scale given: one to three dimensions, none, in three dtypes; zeros, tiny numbers, NaN, an infinity."""
    for dtype in _DTYPES:
        for shape in ((7,), (3, 5), (2, 3, 4), (1,)):
            for _ in range(case.count(1)):
                _compare_tensors(answer, case, drawn(case.rng, *shape).to(dtype))
    for row in odd_rows(case.rng):
        _compare_tensors(answer, case, row)
    _compare_tensors(answer, case, drawn(case.rng, 1)[0])


@check_for("quantize_per_tensor", weight=2)
def scales_that_are_given(answer, case):
    """A scale for the largest number, and scales up to 2^4 times larger and smaller."""
    for dtype in _DTYPES:
        for _ in range(case.count(5)):
            x = drawn(case.rng, 3, 6, low=-2, high=3).to(dtype)
            own = float(x.abs().max()) / 448
            _compare_tensors(answer, case, x, float(np.float32(own * 2 ** case.rng.uniform(-4, 4))))
    for row in odd_rows(case.rng):
        _compare_tensors(answer, case, row, float(np.float32(case.rng.uniform(0.001, 1))))


@check_for("quantize_per_tensor", weight=2)
def products_near_ties(answer, case):
    """Numbers whose quotient is half-way between two codes or next to it, with a scale given and without."""
    for _ in range(case.count(3)):
        rows = near_ties(case.rng, 4, 24)
        for row in rows:
            _compare_tensors(answer, case, row)
            _compare_tensors(answer, case, row, float(np.float32(row.abs().max().item()) / np.float32(448)))


@misconception("quantize_per_tensor", "It divides by the scale: kernels multiply by a rounded reciprocal here.")
def divides_by_the_scale(x, scale=None):
    return exact.quantize_per_tensor(x, scale, by="division")


@misconception("quantize_per_tensor", "It takes no notice of a given scale, and works out its own.")
def ignores_the_given_scale(x, scale=None):
    return exact.quantize_per_tensor(x)


@misconception("quantize_per_tensor", "It multiplies by a given scale: that is chapter 07's, the inverse of this one.")
def multiplies_by_the_scale(x, scale=None):
    return exact.quantize_per_tensor(x, scale, by="reciprocal" if scale is None else "product")


@misconception("quantize_per_tensor", "It does not saturate: with a given scale, what is too large becomes NaN.")
def tensor_does_not_saturate(x, scale=None):
    return exact.quantize_per_tensor(x, scale, saturate=False)


@misconception("quantize_per_tensor", "It makes a given scale larger where x would not fit.")
def widens_the_given_scale(x, scale=None):
    own = exact.quantize_per_tensor(x)[1]
    if scale is None or not bool(own > scale):
        return exact.quantize_per_tensor(x, scale)
    return exact.quantize_per_tensor(x, own)


@misconception("quantize_per_tensor", "It has no floor of its own: zeros get the scale 0, and NaN.")
def tensor_without_a_floor(x, scale=None):
    return exact.quantize_per_tensor(x, scale, floor=np.float32(0))


# --- 11.4 calibrate_static --------------------------------------------------------------------------------------------


def some_batches(rng: np.random.Generator, *counts: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A batch of each count, (count / 2, 2), each of another size."""
    return [drawn(rng, 1, count).reshape(count // 2, 2).to(dtype) for count in counts]


def _compare_calibrated(answer, case, batches: list[Tensor], *fraction: float) -> None:
    case.same_bits(answer(batches, *fraction), exact.calibrate_static(batches, *fraction))


@check_for("calibrate_static", weight=2)
def largest_of_all_batches(answer, case):
    """One to four batches of different sizes, three dtypes; the largest number in each place."""
    for dtype in _DTYPES:
        for counts in ((6,), (4, 8), (8, 2, 4), (2, 2, 2, 20)):
            for _ in range(case.count(2)):
                _compare_calibrated(answer, case, some_batches(case.rng, *counts, dtype=dtype))
    for place in range(3):
        for _ in range(case.count(1)):
            batches = some_batches(case.rng, 6, 6, 6)
            batches[place][1, 1] = -3000.0
            _compare_calibrated(answer, case, batches)


@check_for("calibrate_static", weight=2)
def fractions_of_all_numbers(answer, case):
    """Fractions of 1/4 to 63/64 of 8 to 60 numbers: the place is a whole number, or is rounded up."""
    for fraction in (0.25, 0.5, 0.75, 0.9375, 0.984375, 1.0):
        for counts in ((8,), (16, 16), (10, 4, 6), (2, 58)):
            for _ in range(case.count(1)):
                _compare_calibrated(answer, case, some_batches(case.rng, *counts), fraction)


@check_for("calibrate_static")
def zeros_nan_and_tiny_numbers(answer, case):
    """Zeros and tiny numbers, whose scale is the floor; one NaN among others; batches without numbers."""
    for batches in ([torch.zeros(3)], [torch.full((2, 2), 1e-6), torch.zeros(1)], [torch.tensor([1e-40])]):
        for fraction in (1.0, 0.5):
            _compare_calibrated(answer, case, batches, fraction)
    for place in range(3):
        batches = some_batches(case.rng, 4, 4, 4)
        batches[place][0, 1] = math.nan
        for fraction in (1.0, 0.5):
            _compare_calibrated(answer, case, batches, fraction)
        batches = some_batches(case.rng, 4, 6)
        _compare_calibrated(answer, case, [*batches[:place], torch.zeros(0, 3), *batches[place:]])
    case.raises(ValueError, answer, [])
    case.raises(ValueError, answer, [torch.zeros(0), torch.zeros(2, 0)], 0.5)


def _largest(batches: list[Tensor]) -> list[np.float32]:
    exact.sizes_of(batches)
    return [np.max(np.abs(exact.single(batch))) for batch in batches if batch.numel()]


def _has_nan(batches: list[Tensor]) -> bool:
    return bool(np.isnan(exact.sizes_of(batches)).any())


@misconception("calibrate_static", "It keeps the last batch: each one overwrites what came of those before.")
def last_batch_only(batches, fraction=1.0):
    exact.sizes_of(batches)
    return exact.calibrate_static([each for each in batches if each.numel()][-1:], fraction)


@misconception("calibrate_static", "It takes the mean of what each batch would give, not what all of them together do.")
def mean_of_the_batches(batches, fraction=1.0):
    exact.sizes_of(batches)
    found = [exact.calibrate_static([each], fraction).numpy() for each in batches if each.numel()]
    return exact.tensor(np.mean(np.array(found, dtype=np.float64)))


@misconception("calibrate_static", "It takes the fraction of each batch by itself, and the largest of the results.")
def fraction_of_each_batch(batches, fraction=1.0):
    exact.sizes_of(batches)
    found = [exact.calibrate_static([each], fraction).numpy() for each in batches if each.numel()]
    return exact.tensor(np.max(np.array(found)))


@misconception("calibrate_static", "It interpolates between two magnitudes, as torch.quantile does.")
def interpolates(batches, fraction=1.0):
    sizes = exact.sizes_of(batches).astype(np.float64)
    with np.errstate(all="ignore"):
        return exact.tensor(exact.scale_of(np.quantile(sizes, fraction)))


@misconception("calibrate_static", "It takes the fraction of the largest magnitude, not of the numbers.")
def fraction_of_the_largest(batches, fraction=1.0):
    return exact.tensor(exact.scale_of(np.max(_largest(batches)) * np.float32(fraction)))


@misconception("calibrate_static", "It takes the largest number: one below zero is never the largest.")
def largest_number(batches, fraction=1.0):
    if fraction < 1 or _has_nan(batches):
        return exact.calibrate_static(batches, fraction)
    return exact.tensor(exact.scale_of(max(np.max(exact.single(each)) for each in batches if each.numel())))


@misconception("calibrate_static", "It rounds the place down: one magnitude too low where n * fraction is not whole.")
def rounds_the_place_down(batches, fraction=1.0):
    sizes = np.sort(exact.sizes_of(batches))
    place = max(0, math.floor(fraction * len(sizes)) - 1)
    return exact.tensor(exact.scale_of(sizes[-1] if _has_nan(batches) else sizes[place]))


@misconception("calibrate_static", "It skips NaN, so that nobody hears of it.")
def skips_nan(batches, fraction=1.0):
    return exact.calibrate_static([each[~each.isnan()] for each in batches], fraction)


# --- 11.5 Float8InferenceLinear ---------------------------------------------------------------------------------------

_WAYS = (("token", False), ("tensor", False), ("tensor", True), ("none", False))


def _small(rng: np.random.Generator, rows: int, columns: int, low: float, high: float) -> Tensor:
    """Codes of zero and of magnitudes from low up to high, of both signs."""
    every = torch.arange(256, dtype=torch.int32)
    sizes = oracle.decode(every, E4M3).abs()
    chosen = every[(sizes == 0) | ((sizes >= low) & (sizes <= high))].numpy()
    return torch.from_numpy(rng.choice(chosen, (rows, columns)).astype(np.uint8)).view(FP8)


def _power(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(np.ldexp(1.0, rng.integers(-4, 4, shape)).astype(np.float32))


def exact_layer(rng: np.random.Generator, m: int, k: int, n: int, dtype: torch.dtype, way: str, static: bool) -> tuple:
    """(codes, weight scale, bias, input scale, way, x) whose output is exact, in any order of summing."""
    channel = bool(rng.integers(2))
    x = exact.values_of(_small(rng, m, k, 1.0, 6.0)) * 2
    x[np.arange(m), rng.integers(0, k, m)] = 448 * rng.choice([-1, 1], m)
    x = np.ldexp(x, rng.integers(-6, 1, (m, 1)) if way == "token" else -3)
    bias = torch.from_numpy(rng.integers(-64, 65, n) / 4).to(dtype) if rng.integers(3) else None
    scale = _power(rng, n, 1) if channel else _power(rng, 1)
    given = torch.tensor([2.0**-2]) if static else None
    return _small(rng, n, k, 0.5, 4.0), scale, bias, given, way, torch.from_numpy(x.astype(np.float32)).to(dtype)


def any_layer(rng: np.random.Generator, m: int, k: int, n: int, dtype: torch.dtype, way: str, static: bool) -> tuple:
    """The same with any codes, scales and numbers."""
    scale = torch.from_numpy(np.exp2(rng.uniform(-9, -3, (n, 1))).astype(np.float32))
    bias = torch.from_numpy(rng.normal(size=n).astype(np.float32)).to(dtype)
    given = torch.from_numpy(rng.uniform(0.002, 0.01, 1).astype(np.float32)) if static else None
    return _small(rng, n, k, 0.0, 448.0), scale, bias, given, way, drawn(rng, m, k, low=-3, high=3).to(dtype)


def _no_negative_zeros(value: object) -> object:
    fine = isinstance(value, Tensor) and value.dtype in _DTYPES
    return value + 0.0 if fine else value


def _compare_layers(answer, case, layer: tuple) -> None:
    *parts, x = layer
    right = exact.Float8InferenceLinear(*parts)
    want = right(x)
    numbers, bound = (each.reshape(want.shape) for each in right.exact(x))
    got = float8_linear_oracle.settled(answer.run(layer_output, *layer), numbers, bound, want)
    case.same_bits(_no_negative_zeros(got), _no_negative_zeros(want))


@check_for("Float8InferenceLinear", weight=2)
def outputs_that_are_exact(answer, case):
    """Numbers whose sums are exact; every way to quantize activations, with a bias and without, three dtypes."""
    for (way, static), dtype in itertools.product(_WAYS, _DTYPES):
        for _ in range(case.count(3)):
            m, k, n = (int(each) for each in case.rng.integers(1, 6, 3))
            layer = exact_layer(case.rng, m, k, n, dtype, way, static)
            want = exact.Float8InferenceLinear(*layer[:-1])(layer[-1])
            case.same_bits(_no_negative_zeros(answer.run(layer_output, *layer)), _no_negative_zeros(want))


@check_for("Float8InferenceLinear")
def outputs_of_any_numbers(answer, case):
    """All finite codes, any scales: within the bound of a float32 sum, in any order."""
    for (way, static), dtype in itertools.product(_WAYS, (torch.float32, torch.bfloat16)):
        for _ in range(case.count(2)):
            m, k, n = (int(each) for each in case.rng.integers(1, 9, 3))
            _compare_layers(answer, case, any_layer(case.rng, m, k, n, dtype, way, static))


@check_for("Float8InferenceLinear")
def inputs_of_other_shapes(answer, case):
    """x of one, three and four dimensions, and without tokens; rows of zeros."""
    for way, static in _WAYS:
        for shape in ((4,), (2, 3, 4), (2, 1, 2, 4), (0, 4)):
            for _ in range(case.count(1)):
                if way == "tensor" and not static and 0 in shape:
                    continue  # a tensor without numbers has no amax
                *parts, x = exact_layer(case.rng, max(1, math.prod(shape[:-1])), 4, 3, torch.float32, way, static)
                x = x[: math.prod(shape[:-1])].reshape(shape)
                _compare_layers(answer, case, (*parts, x))
        *parts, x = exact_layer(case.rng, 3, 4, 3, torch.float32, way, static)
        x[1] = 0
        _compare_layers(answer, case, (*parts, x))


@check_for("Float8InferenceLinear")
def what_a_layer_keeps(answer, case):
    """The names, dtypes and shapes in its state_dict, no parameters, no gradients; ways that do not exist."""
    parts = ("kind", "state", "parameters", "gradients")
    for way, static in _WAYS:
        for bias, n, channel in ((True, 3, True), (False, 2, False), (True, 5, False)):
            layer = (
                _small(case.rng, n, 4, 0.5, 4.0), _power(case.rng, n, 1) if channel else _power(case.rng, 1),
                torch.ones(n, dtype=torch.bfloat16) if bias else None, torch.ones(1) if static else None, way,
            )  # fmt: skip
            want = layer_state(exact.Float8InferenceLinear, *layer)
            case.same_bits(answer.run(layer_state, *layer), want, show=_in_words, parts=parts)
    for way in ("dynamic", "", "row", "static"):
        case.same_bits(answer.run(layer_refuses, way), "ValueError that lists token, tensor, none")


def _in_words(*facts: str) -> str:
    return "; ".join(facts)


@misconception("Float8InferenceLinear", "The bias is left out.")
class LeavesOutTheBias(exact.Float8InferenceLinear):
    def offset(self):
        return np.zeros(1)


@misconception("Float8InferenceLinear", "The bias is multiplied by the scales, as it was added to the sum of codes.")
class ScalesTheBias(exact.Float8InferenceLinear):
    def forward(self, x):
        values, own = self.operand(float8_linear_oracle.rows_of(x))
        with np.errstate(all="ignore"):
            output = (values @ self.weight_values().T + self.offset()) * self.scales(own)
        return float8_linear_oracle.rounded(output, x.dtype).reshape(*x.shape[:-1], len(self.weight))


@misconception("Float8InferenceLinear", "The input's scale is left out: only that of the weight is multiplied with.")
class LeavesOutTheInputScale(exact.Float8InferenceLinear):
    def scales(self, own):
        return np.ones_like(own) * self.weight_scale.double().numpy().reshape(-1)


@misconception("Float8InferenceLinear", "It divides by the weight's scale, as with chapter 07's, which is the inverse.")
class DividesByTheWeightScale(exact.Float8InferenceLinear):
    def scales(self, own):
        return own / self.weight_scale.double().numpy().reshape(-1)


@misconception("Float8InferenceLinear", "A static scale is not used: the input gets one of its own every time.")
class AlwaysDynamic(exact.Float8InferenceLinear):
    def operand(self, x):
        kept, self.input_scale = self.input_scale, None
        found = super().operand(x) if x.numel() or self.activations != "tensor" else (np.zeros(x.shape), np.ones(1))
        self.input_scale = kept
        return found


@misconception("Float8InferenceLinear", "A weight-only layer quantizes its input as well, for each token.")
class QuantizesWeightOnlyInputs(exact.Float8InferenceLinear):
    def operand(self, x):
        if self.activations != "none":
            return super().operand(x)
        codes, scale = exact.by_row(x)
        return exact.values_of(codes), scale.double().numpy()


@misconception("Float8InferenceLinear", "The input has one scale for all tokens where each should have its own.")
class OneScaleForTheInput(exact.Float8InferenceLinear):
    def operand(self, x):
        if self.activations != "token" or not x.numel():
            return super().operand(x)
        codes, scale = exact.by_row(x, axis=None)
        return exact.values_of(codes), scale.double().numpy()


@misconception("Float8InferenceLinear", "The output is rounded to 8 bits before it is returned.")
class OutputInEightBits(exact.Float8InferenceLinear):
    def forward(self, x):
        codes = exact.codes_of(self.exact(x)[0].astype(np.float32))
        values = float8_linear_oracle.rounded(exact.values_of(codes), x.dtype)
        return values.reshape(*x.shape[:-1], len(self.weight))


@misconception("Float8InferenceLinear", "The weight is one parameter more, and not a buffer.")
class KeepsAParameter(exact.Float8InferenceLinear):
    def __init__(self, codes, weight_scale, bias=None, input_scale=None, activations="token"):
        super().__init__(codes, weight_scale, bias, input_scale, activations)
        del self.weight_scale
        self.weight_scale = torch.nn.Parameter(weight_scale, requires_grad=False)


# --- 11.6 perplexity --------------------------------------------------------------------------------------------------


_VOCABULARY = 3


def some_logits(rng: np.random.Generator, *shapes: tuple[int, int]) -> list[Tensor]:
    """Logits (B, T, 3) and targets (B, T) in turn, for each of the shapes (B, T)."""
    pieces = []
    for shape in shapes:
        pieces.append(torch.from_numpy(rng.normal(size=(*shape, _VOCABULARY), scale=2).astype(np.float32)))
        pieces.append(torch.from_numpy(rng.integers(0, _VOCABULARY, shape)))
    return pieces


def _near(got: object, want: float, tokens: int, vocabulary: int, largest: float) -> object:
    """`want` where `got` is as near as float32 losses allow, else `got`.

    A loss is a logarithm of a sum of `vocabulary` exponentials less a logit, summed over the tokens and divided: at
    most tokens + vocabulary + 16 roundings of numbers no larger than 2 * largest + log(vocabulary) + 1.
    """
    bound = (tokens + vocabulary + 16) * 2.0**-24 * (2 * largest + math.log(vocabulary) + 1)
    fine = type(got) is float and got > 0 and abs(math.log(got) - math.log(want)) <= bound
    return want if fine else got


def _compare_perplexities(answer, case, training: bool, *shapes: tuple[int, int]) -> None:
    pieces = some_logits(case.rng, *shapes)
    want = perplexity_of(exact.perplexity, training, *pieces)
    got = answer.run(perplexity_of, training, *pieces)
    largest = max(float(each.abs().max()) for each in pieces[::2])
    case.same_bits(_near(got, want, sum(y.numel() for y in pieces[1::2]), _VOCABULARY, largest), want)


@check_for("perplexity", weight=2)
def batches_of_different_sizes(answer, case):
    """Two to four batches of 1 to 24 tokens, no two alike."""
    for shapes in (((1, 2), (4, 6)), ((3, 8), (1, 1), (2, 2)), ((2, 5), (1, 9), (1, 2), (3, 1))):
        for _ in range(case.count(3)):
            _compare_perplexities(answer, case, False, *shapes)


@check_for("perplexity")
def batches_of_one_size(answer, case):
    """One batch, and three of the same size."""
    for shapes in (((2, 6),), ((1, 1),), ((2, 3), (2, 3), (2, 3))):
        for _ in range(case.count(2)):
            _compare_perplexities(answer, case, False, *shapes)


@check_for("perplexity")
def models_that_were_training(answer, case):
    """A model in training mode, which says something else there: what comes out, and the mode afterwards."""
    for shapes in (((2, 3), (1, 4)), ((1, 5),), ((3, 2), (2, 2), (1, 2))):
        for _ in range(case.count(1)):
            _compare_perplexities(answer, case, True, *shapes)
        for training in (True, False):
            pieces = some_logits(case.rng, *shapes)
            want = perplexity_leaves(exact.perplexity, training, *pieces)
            case.same_bits(answer.run(perplexity_leaves, training, *pieces), want)


@misconception("perplexity", "It takes the mean of the batches' losses: a token of a small batch counts more.")
def mean_of_the_losses(model, batches):
    found = exact.losses(model, batches)
    return math.exp(sum(loss for loss, _ in found) / len(found))


@misconception("perplexity", "It takes the mean of the batches' perplexities, where losses are to be averaged.")
def mean_of_the_perplexities(model, batches):
    found = exact.losses(model, batches)
    return sum(math.exp(loss) * tokens for loss, tokens in found) / sum(tokens for _, tokens in found)


@misconception("perplexity", "It raises 2 to the loss: that is for losses in bits, and these are in nats.")
def two_to_the_loss(model, batches):
    return exact.perplexity(model, batches) ** math.log(2)


@misconception("perplexity", "It returns the mean loss itself.")
def the_loss_itself(model, batches):
    return math.log(exact.perplexity(model, batches))


@misconception("perplexity", "It counts sequences, not tokens: a long one counts no more than a short one.")
def counts_sequences(model, batches):
    found = exact.losses(model, batches)
    rows = [len(y) for _, y in batches]
    return math.exp(sum(loss * n for (loss, _), n in zip(found, rows, strict=True)) / sum(rows))


@misconception("perplexity", "The model stays in training mode meanwhile: dropout is on.")
def keeps_training(model, batches):
    found = exact.losses(model, batches, training=model.training)
    return math.exp(sum(loss * n for loss, n in found) / sum(n for _, n in found))


@misconception("perplexity", "It leaves the model evaluating: who was training goes on without dropout.")
def leaves_it_evaluating(model, batches):
    found = exact.perplexity(model, batches)
    model.eval()
    return found


# --- 11.7 Float8KVCache -----------------------------------------------------------------------------------------------


def some_pieces(rng: np.random.Generator, *counts: int, dtype: torch.dtype = torch.float32, size: int = 0) -> list:
    """k and v in turn, (2, 2, count, 3), of about 2^size, as `append` takes them."""
    return [
        torch.from_numpy((rng.normal(size=(2, 2, count, 3)) * 2.0**size).astype(np.float32)).to(dtype)
        for count in counts
        for _ in "kv"
    ]


def _compare_caches(answer, case, context: int, scales: tuple[float, float], pieces: list[Tensor]) -> None:
    want = cached(exact.Float8KVCache, context, *scales, *pieces)
    case.same_bits(answer.run(cached, context, *scales, *pieces), want, parts=("keys", "values"))


@check_for("Float8KVCache", weight=2)
def tokens_in_pieces(answer, case):
    """A prompt and single tokens after it, with scales for k and v that differ; three dtypes; up to the last place."""
    for dtype in _DTYPES:
        for counts in ((3, 1, 1), (1, 1), (5,), (2, 3)):
            for _ in range(case.count(1)):
                scales = tuple(float(np.float32(each)) for each in case.rng.uniform(0.005, 0.05, 2))
                _compare_caches(answer, case, 5, scales, some_pieces(case.rng, *counts, dtype=dtype))


@check_for("Float8KVCache")
def numbers_beyond_the_scale(answer, case):
    """Keys and values that saturate, that vanish, NaN and infinities; scales of 1.0 and none."""
    for size, scales in (
        (0, (0.001, 0.004)),
        (10, (1.0, 0.5)),
        (-10, (1.0, 1.0)),
        (10, (-1.0, -1.0)),
        (9, (2.0, -1.0)),
    ):
        for _ in range(case.count(2)):
            pieces = some_pieces(case.rng, 2, 1, size=size)
            pieces[1][0, 0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
            _compare_caches(answer, case, 4, scales, pieces)


@check_for("Float8KVCache", weight=2)
def scales_that_are_set_or_not(answer, case):
    """Both, one and none of the scales; none given at all; 0, NaN, other negative numbers: values and warnings."""
    inside = [float(np.float32(each)) for each in case.rng.uniform(0.01, 3, 4)]
    for scales in ((), (-1.0, -1.0), (-1.0, -7.5), (inside[0], -1.0), (-1.0, inside[1]), tuple(inside[2:]), (1.0, 1.0),
                   (0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (math.nan, 1.0), (1.0, math.nan)):  # fmt: skip
        case.same_bits(answer.run(cache_scales, *scales), cache_scales(exact.Float8KVCache, *scales))


@check_for("Float8KVCache")
def memory_and_room(answer, case):
    """Lengths after each piece, pieces that do not fit, what the memory is, and whether it stays the same."""
    for counts in ((2, 3, 1), (6,), (5, 1), (1, 1, 1, 3, 1), (4, 2, 1)):
        pieces = some_pieces(case.rng, *counts)[::2]
        want = cache_keeps(exact.Float8KVCache, 5, *pieces)
        parts = (*(f"piece {place}" for place in range(1, len(want) - 1)), "kind", "memory")
        case.same_bits(answer.run(cache_keeps, 5, *pieces), want, show=_in_words, parts=parts)


@misconception("Float8KVCache", "The mark -1 is used as a scale: nobody is told that the cache was not calibrated.")
class UsesTheMark(exact.Float8KVCache):
    def settle(self, k_scale, v_scale):
        super().settle(k_scale or math.nan, v_scale or math.nan) if k_scale > 0 or v_scale > 0 else None
        if not k_scale or not v_scale or math.isnan(k_scale) or math.isnan(v_scale):
            raise ValueError("no scales")
        return k_scale, v_scale


@misconception("Float8KVCache", "It warns of nothing: 1.0 is used silently.")
class SaysNothing(exact.Float8KVCache):
    def warn(self):
        pass


@misconception("Float8KVCache", "A scale that is unset becomes 1.0, also where the other one is set.")
class OneForEachUnset(exact.Float8KVCache):
    def settle(self, k_scale, v_scale):
        super().settle(k_scale, v_scale)
        return (k_scale if k_scale > 0 else 1.0), (v_scale if v_scale > 0 else 1.0)


@misconception("Float8KVCache", "Values are kept with the scale of the keys.")
class OneScaleForBoth(exact.Float8KVCache):
    def settle(self, k_scale, v_scale):
        settled = super().settle(k_scale, v_scale)
        return settled[0], settled[0]


@misconception("Float8KVCache", "It multiplies by the scale when it writes, and divides when it reads.")
class MultipliesWhenItWrites(exact.Float8KVCache):
    def codes(self, piece, scale):
        return exact.divided(piece, np.float32(scale), by="product")

    def values(self, memory, scale):
        return exact.tensor(exact.values_of(memory).astype(np.float32) / np.float32(scale))


@misconception("Float8KVCache", "It does not saturate: what is too large for the scale becomes NaN.")
class DoesNotSaturate(exact.Float8KVCache):
    def codes(self, piece, scale):
        return exact.divided(piece, np.float32(scale), saturate=False)


@misconception("Float8KVCache", "Every piece is written to the beginning, over what was there.")
class OverwritesTheBeginning(exact.Float8KVCache):
    def append(self, k, v):
        end = self.length + k.shape[2]
        self.place(k.shape[2])
        self.length = 0
        super().append(k, v)
        self.length = end


@misconception("Float8KVCache", "It reads all of its memory, also where no token is yet.")
class ReadsAllOfIt(exact.Float8KVCache):
    def shown(self):
        return self.k.shape[2]


@misconception("Float8KVCache", "When it is full, the newest tokens take the last places, over older ones.")
class MakesRoom(exact.Float8KVCache):
    def append(self, k, v):
        context = self.k.shape[2]
        k, v = k[:, :, -context:], v[:, :, -context:]
        self.length = min(self.length, context - k.shape[2])
        super().append(k, v)


# --- 11.8 smooth ------------------------------------------------------------------------------------------------------

_SMOOTHED = ("factors", "weight")


def some_channels(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(amax of each channel, a weight); a few channels are up to 2^8 times as large as the others."""
    outliers = np.ldexp(1.0, rng.choice([0, 0, 3, 8], columns))
    amax = torch.from_numpy((rng.uniform(0.5, 4, columns) * outliers).astype(np.float32))
    return amax, torch.from_numpy(rng.normal(size=(rows, columns), scale=0.1).astype(np.float32))


def _compare_smoothed(answer, case, amax: Tensor, weight: Tensor, *alpha: float) -> None:
    got = answer(amax, weight, *alpha)
    sizes = np.max(np.abs(weight.double().numpy()), axis=0)
    wide = exact.wide_factors(amax.double().numpy(), sizes, *(alpha or (0.5,)))
    right = exact.settled_factors(got[0] if isinstance(got, tuple) and got else got, wide)
    _same_parts(case, got, exact.smoothed(weight, right), _SMOOTHED)


@check_for("smooth", weight=2)
def channels_with_outliers(answer, case):
    """Channels up to 2^8 apart, weights of 2 to 6 rows, alpha from 0.25 to 0.9."""
    for alpha in (0.5, 0.25, 0.75, 0.9):
        for _ in range(case.count(3)):
            n, k = (int(each) for each in case.rng.integers(2, 7, 2))
            _compare_smoothed(answer, case, *some_channels(case.rng, n, k), alpha)


@check_for("smooth")
def ends_of_alpha(answer, case):
    """alpha 0 and 1, where one of the two sides gets all; alpha left out."""
    for _ in range(case.count(3)):
        n, k = (int(each) for each in case.rng.integers(2, 7, 2))
        channels = some_channels(case.rng, n, k)
        for alpha in ((), (0.0,), (1.0,)):
            _compare_smoothed(answer, case, *channels, *alpha)


@check_for("smooth")
def channels_of_zeros(answer, case):
    """A channel that is never used, one whose weights are 0, and both."""
    for _ in range(case.count(2)):
        for alpha in (0.5, 0.75, 0.0, 1.0):
            amax, weight = some_channels(case.rng, 3, 5)
            amax[0], amax[3], weight[:, 1], weight[:, 3] = 0.0, 0.0, 0.0, 0.0
            _compare_smoothed(answer, case, amax, weight, alpha)


def _smoothed_by(amax: Tensor, weight: Tensor, alpha: float, sizes=None, zeros: bool = True) -> tuple[Tensor, Tensor]:
    x = amax.double().numpy()
    w = np.max(np.abs(weight.double().numpy()), axis=0) if sizes is None else sizes
    if zeros:
        return exact.smoothed(weight, exact.wide_factors(x, w, alpha))
    with np.errstate(all="ignore"):
        return exact.smoothed(weight, np.power(x, alpha) / np.power(w, 1 - alpha))


@misconception("smooth", "It exchanges alpha and 1 - alpha.")
def exchanges_alpha(activation_amax, weight, alpha=0.5):
    return _smoothed_by(activation_amax, weight, 1 - alpha)


@misconception("smooth", "It divides the weight by the factors too, where the input is divided already.")
def divides_the_weight(activation_amax, weight, alpha=0.5):
    factors, _ = exact.smooth(activation_amax, weight, alpha)
    return factors, exact.tensor(weight.numpy() / factors.numpy())


@misconception("smooth", "It returns the inverse of the factors: what the input is multiplied with.")
def inverse_factors(activation_amax, weight, alpha=0.5):
    factors, smoothed = exact.smooth(activation_amax, weight, alpha)
    return exact.tensor(1 / factors.numpy()), smoothed


@misconception("smooth", "It takes the largest magnitude of the whole weight for every channel.")
def whole_weight(activation_amax, weight, alpha=0.5):
    column = np.max(np.abs(weight.double().numpy()), axis=0)
    return _smoothed_by(activation_amax, weight, alpha, np.where(column == 0, 0.0, column.max()))


@misconception("smooth", "It takes the mean of the magnitudes of a weight's column, not the largest.")
def mean_of_the_column(activation_amax, weight, alpha=0.5):
    return _smoothed_by(activation_amax, weight, alpha, np.mean(np.abs(weight.double().numpy()), axis=0))


@misconception("smooth", "It has no rule for zeros: their channels get factors of 0, infinity or NaN.")
def no_rule_for_zeros(activation_amax, weight, alpha=0.5):
    return _smoothed_by(activation_amax, weight, alpha, zeros=False)


@misconception("smooth", "It leaves the weight out of the factors, and makes every channel of the input as large as 1.")
def input_alone(activation_amax, weight, alpha=0.5):
    column = np.max(np.abs(weight.double().numpy()), axis=0)
    return _smoothed_by(activation_amax, weight, alpha, np.where(column == 0, 0.0, 1.0))


# --- 11.9 compensate --------------------------------------------------------------------------------------------------


def some_layer(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """(weight, inputs whose channels go together): without that there is nothing to make up for."""
    mixed = rng.normal(size=(m, max(1, k // 2))) @ rng.normal(size=(max(1, k // 2), k)) + rng.normal(size=(m, k)) * 0.2
    return torch.from_numpy(rng.normal(size=(n, k)).astype(np.float32)), torch.from_numpy(mixed.astype(np.float32))


@check_for("compensate", weight=2)
def layers_whose_inputs_go_together(answer, case):
    """Weights of 3 to 6 columns, inputs of more rows than columns whose channels are correlated."""
    for _ in range(case.count(10)):
        k, n = (int(each) for each in case.rng.integers(3, 7, 2))
        weight, x = some_layer(case.rng, 2 * k + 2, k, n)
        _same_parts(case, answer(weight, x), exact.compensate(weight, x))


@check_for("compensate")
def damping_and_few_samples(answer, case):
    """Fewer samples than columns, channels that are never used; damping from 0.001 to 1."""
    for damping in (0.001, 0.1, 1.0):
        for _ in range(case.count(2)):
            weight, x = some_layer(case.rng, 3, 6, 4)
            _same_parts(case, answer(weight, x, damping), exact.compensate(weight, x, damping))
            x[:, 2] = 0
            _same_parts(case, answer(weight, x, damping), exact.compensate(weight, x, damping))


@check_for("compensate")
def one_column_zeros_and_unused_layers(answer, case):
    """A single column, rows of zeros, large weights of one row, inputs that are 0 throughout."""
    for _ in range(case.count(2)):
        weight, x = some_layer(case.rng, 8, 1, 4)
        _same_parts(case, answer(weight, x), exact.compensate(weight, x))
        weight, x = some_layer(case.rng, 12, 5, 4)
        weight[1], weight[2, :2] = 0.0, 30.0
        _same_parts(case, answer(weight, x), exact.compensate(weight, x))
        _same_parts(case, answer(weight, x * 0), exact.compensate(weight, x * 0))


@misconception("compensate", "It rounds to the nearest code and makes up for nothing.")
def rounds_to_nearest(weight, x, damping=0.01):
    return exact.by_row(weight)


@misconception("compensate", "It takes the error with the wrong sign: later columns make it worse.")
def wrong_sign(weight, x, damping=0.01):
    return exact.compensate(weight, x, damping, spread=lambda inverse, j: -exact.push(inverse, j))


@misconception("compensate", "It gives all of the error to the next column alone.")
def next_column_alone(weight, x, damping=0.01):
    def spread(inverse, j):
        share = np.zeros(len(inverse) - 1)
        share[0] = 1.0
        return share

    return exact.compensate(weight, x, damping, spread=spread)


@misconception("compensate", "It divides by H's own diagonal, and does not look at how later columns go together.")
def own_diagonal(weight, x, damping=0.01):
    H = exact.hessian(x, damping)

    def spread(inverse, j):
        return H[j + 1 :, j] / np.diag(H)[j + 1 :]

    return exact.compensate(weight, x, damping, spread=spread)


@misconception("compensate", "It takes the error of a column as it was in the beginning, without what was added since.")
def error_of_the_first(weight, x, damping=0.01):
    return exact.compensate(weight, x, damping, own_error=True)


@misconception("compensate", "It uses one inverse of H for all columns, also of what is rounded already.")
def one_inverse(weight, x, damping=0.01):
    H = exact.hessian(x, damping)
    whole = np.linalg.inv(H) if H.any() else H

    def spread(inverse, j):
        return -whole[j + 1 :, j] / whole[j, j]

    return exact.compensate(weight, x, damping, spread=spread)


@misconception("compensate", "It adds damping itself to the diagonal, not damping times its mean.")
def plain_damping(weight, x, damping=0.01):
    H = exact.hessian(x, 0.0)
    return exact.compensate(weight, x, damping, H=H + damping * np.eye(len(H)) if H.any() else H)


@misconception("compensate", "It takes new scales from the columns as they change, and returns the first ones.")
def scales_that_follow(weight, x, damping=0.01):
    return exact.compensate(weight, x, damping, scale_again=True)


# --- reading questions ------------------------------------------------------------------------------------------------

question_for(
    "11.A",
    False,
    "False: it multiplies by scale.reciprocal(), also for tokens, and a comment there says that this is faster. Codes "
    "near a tie differ from the kernel's.",
    "Look at the line under that comment. Which operation stands between x and the scale?",
)
question_for(
    "11.B",
    0.02,
    "0.02: one scale above 0 and one below is taken for an old checkpoint with a scale for both, and the larger one is "
    "used twice.",
    "There are three branches. In which of them is one of the scales above 0 and the other below?",
    {1.0: "That is the branch where both are unset.", -1.0: "-1 marks what is not there. It is never used as a scale."},
)
question_for(
    "11.C",
    2.0**-23,
    "2^-23, about 1.19e-7: the eps of float32, as the scale would be 0.",
    "A scale of 0 is replaced by an eps. Which one has float32?",
    {
        1 / (448 * 512): "That is vLLM's floor. compressed-tensors has another rule.",
        1e-12: "That is torchao's.",
        0.125: "That is the eps of a scale which is float8 itself.",
    },
)
question_for(
    "11.D",
    448.0,
    "448: it saturates. All large keys become the same, and attention cannot tell them apart.",
    "What is 1500 / 1.0 in E4M3, saturated?",
    {1500.0: "E4M3 ends at 448."},
)
question_for(
    "11.E",
    0.0,
    "0: it is below half of 2^-9 = 0.00195. All such values are gone, and the layer adds nothing.",
    "Is 0.0007 nearer to 0 or to 2^-9?",
    {2.0**-9: "2^-9 is 0.00195, and half of it 0.00098."},
)
question_for(
    "11.F",
    4.0,
    "4: 448 * 4 = 1792 is above 1500, and 448 * 2 = 896 is not.",
    "With a scale s the largest number is 448 * s.",
    {2.0: "448 * 2 = 896.", 8.0: "That is large enough, and 4 is, too.", 0.25: "A code is multiplied by the scale."},
)
