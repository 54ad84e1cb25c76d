"""Checks and known misconceptions of chapter 13.

Codes and scales are compared bit for bit. A layer's products are tried on numbers whose sums are exact in any order,
and Adam's moments where all but a division is exact; new weights have a bound of a few roundings. The sign of a zero
in a rotated tensor and in a product is not judged.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.block_formats import linear_products, linear_refusal, refusal
from lowprec_lab.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from lowprec_lab.graders import block_formats_oracle as exact
from lowprec_lab.graders import float8_linear_oracle, oracle, quantizer_oracle
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for

for _function in (
    exact.e8m0_scale, exact.quantize_mx, exact.dequantize_mx, exact.pack_nibbles, exact.unpack_nibbles,
    exact.quantize_nvfp4, exact.quantize_blockwise_128, exact.hadamard_rotate, exact.adam_8bit_step, exact.mx_linear,
):  # fmt: skip
    oracle_for(_function.__name__, _function)

_FORMATS = (E4M3, E5M2, E2M3, E3M2, E2M1)
_MODES = ("floor", "rceil", "ceil", "even")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _same_parts(case, got: object, want: tuple, parts: tuple[str, ...], block_of=None) -> None:
    """Compare the parts of a tuple one after the other: their shapes differ.

    block_of: what is to be said of the block of an element, from the part and the element's index.
    """
    if not isinstance(got, tuple) or len(got) != len(want):
        case.same_bits(got, tuple(torch.zeros(1) for _ in want), parts=parts)  # says what is expected
        return
    for part, one, other in zip(parts, got, want, strict=True):
        case.same_bits(one, other, parts=(part,), about=functools.partial(_about, part, block_of))


def _about(part: str, block_of, index: int) -> str:
    return part if block_of is None else f"{part}; {block_of(part, index)}"


def _block_of(x: Tensor, block: int, part: str, index: int) -> str:
    """The largest magnitude of an element's block, blocks lying along the last dimension of x."""
    which = index if part == "scale" else index // block
    amax = _amaxes(exact.in_blocks(exact.single(x), block), (-1,))
    return f"amax of its block {amax[which]!r}" if which < len(amax) else "of the whole tensor"


def _tile_of(x: Tensor, block: tuple[int, int], part: str, index: int) -> str:
    """The same for blocks of rows and columns, the last of which may be smaller."""
    amax = quantizer_oracle.groups(np.abs(exact.single(x)), block)
    each = amax if part == "scale" else quantizer_oracle.spread(amax, block, tuple(x.shape))
    return f"amax of its block {float(each.reshape(-1)[index])!r}"


def _amaxes(blocks: np.ndarray, dims: tuple[int, ...]) -> list[float]:
    return np.max(np.abs(blocks), axis=dims).reshape(-1).tolist()


# --- inputs -----------------------------------------------------------------------------------------------------------


def around(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """float32 numbers, moved by -1, 0 or 1 places."""
    x = values.astype(np.float32)
    moved = np.nextafter(x, rng.choice([-np.inf, np.inf], x.shape).astype(np.float32))
    return np.where(rng.integers(0, 3, x.shape) == 0, x, np.abs(moved))


def turning_points(fmt: Format, rng: np.random.Generator, count: int) -> np.ndarray:
    """Magnitudes at which some mode goes to the next scale, of all sizes, and float32 next to them."""
    top = oracle.max_finite(fmt) / 2.0 ** exact.emax_of(fmt)
    fractions = rng.choice([1.0, top, 2 - 2.0 ** -(fmt.mantissa_bits + 1), 1.5, 1.25], count)
    return around(np.ldexp(fractions, rng.integers(-126, 128, count)), rng)


def drawn(rng: np.random.Generator, *shape: int, block: int = 32, low: int = -9, high: int = 10) -> Tensor:
    """Normal numbers; each block of a size of its own, from 2^low to 2^high."""
    blocks = -(-shape[-1] // block)
    sizes = np.repeat(np.ldexp(1.0, rng.integers(low, high, (*shape[:-1], blocks))), block, -1)[..., : shape[-1]]
    return torch.from_numpy((rng.normal(size=shape) * sizes).astype(np.float32))


def near_ties(rng: np.random.Generator, fmt: Format, *shape: int, block: int = 32) -> Tensor:
    """Numbers half-way between two codes times a power of two, or an ulp of float32 from there; some are the largest.

    A block's largest is on both sides of where modes differ.
    """
    values = np.unique(np.abs(exact.values_of(torch.arange(2**fmt.width, dtype=torch.uint8), fmt)))
    values = values[np.isfinite(values)]
    middles = np.append((values[1:] + values[:-1]) / 2, values[-1] * np.array([1.0, 1.02, 1.06, 1.12]))
    x = middles[rng.integers(0, len(middles), shape)]
    sizes = np.repeat(np.ldexp(1.0, rng.integers(-20, 20, (*shape[:-1], shape[-1] // block))), block, -1)
    return torch.from_numpy((around(x * sizes, rng) * rng.choice([-1, 1], shape)).astype(np.float32))


def odd_blocks(rng: np.random.Generator, block: int = 32) -> Tensor:
    """Rows of two blocks: zeros, subnormal and tiny numbers, NaN, infinities, the largest ones; each beside others."""
    kinds = [
        [0.0], [-0.0, 0.0], [1e-40, -3e-41, 5e-39], [2.0**-127, -(2.0**-130)], [2.0**-119, 3e-37], [math.nan, 1.0],
        [math.inf, -2.0, 1e30], [-math.inf, 0.0], [3.4e38, -1e38, 1e36], [1e-45, 0.0], [2.0**-126, 2.0**-128],
    ]  # fmt: skip
    rows = [[each[k % len(each)] for k in range(block)] for each in kinds]
    x = np.array(rows, dtype=np.float32)
    usual = rng.normal(size=x.shape).astype(np.float32)
    return torch.from_numpy(np.concatenate([x, usual], axis=1)[rng.permutation(len(kinds))])


# --- 13.1 e8m0_scale --------------------------------------------------------------------------------------------------


def _compare_bytes(answer, case, amax: Tensor, fmt: Format, mode: str) -> None:
    case.same_bits(answer(amax, fmt, mode), exact.e8m0_scale(amax, fmt, mode))


def _magnitudes(answer, case, mode: str) -> None:
    """Magnitudes where some mode turns to the next scale, and of all sizes, in one, two and no dimensions."""
    for fmt in _FORMATS:
        _compare_bytes(answer, case, exact.tensor(turning_points(fmt, case.rng, case.count(60))), fmt, mode)
        bits = case.rng.integers(0, 0x7F800000, (case.count(4), 6)).astype(np.int32)
        _compare_bytes(answer, case, torch.from_numpy(bits).view(torch.float32), fmt, mode)
        _compare_bytes(answer, case, torch.tensor(float(case.rng.uniform(0.1, 900))), fmt, mode)


@check_for("e8m0_scale")
def magnitudes_in_floor(answer, case):
    """Mode "floor", every format: powers of two, and float32 next to them; magnitudes from 2^-149 to the largest."""
    _magnitudes(answer, case, "floor")


@check_for("e8m0_scale")
def magnitudes_in_ceil(answer, case):
    """Mode "ceil", every format: powers of two, and float32 next to them; magnitudes from 2^-149 to the largest."""
    _magnitudes(answer, case, "ceil")


@check_for("e8m0_scale")
def magnitudes_in_even(answer, case):
    """Mode "even", every format: half a step below a power of two and next to it; magnitudes from 2^-149 on."""
    _magnitudes(answer, case, "even")


@check_for("e8m0_scale")
def magnitudes_in_rceil(answer, case):
    """Mode "rceil", every format: the largest value times a power and next to it; magnitudes from 2^-149 on."""
    _magnitudes(answer, case, "rceil")


@check_for("e8m0_scale")
def zeros_subnormals_infinity_and_nan(answer, case):
    """Every format and mode: zero, subnormal numbers on both sides of 2^-127 and of 448 * 2^-127, infinity, NaN."""
    ends = [0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1.5 * 2.0**-127, 3.4028234663852886e38, math.inf, math.nan]
    for fmt in _FORMATS:
        edge = oracle.max_finite(fmt) * np.ldexp(1.0, [-127, -126, -125])
        amax = np.array([*ends, *edge, *edge * 1.001, *edge * 0.999], dtype=np.float32)
        for mode in _MODES:
            _compare_bytes(answer, case, torch.from_numpy(amax), fmt, mode)


@check_for("e8m0_scale")
def modes_that_are_not_there(answer, case):
    """The modes "nearest" and "": a ValueError that lists the modes there are."""
    for mode in ("nearest", ""):
        want = "ValueError that names floor, rceil, ceil, even"
        case.same_bits(answer.run(refusal, _MODES, torch.ones(1), E4M3, mode), want)


def _log2(values):
    """log2 in float32."""
    return torch.from_numpy(values.astype(np.float32)).log2().numpy()


def _floor_of_log2(values):
    return np.floor(_log2(values)).astype(np.int64)


def _ceil_of_log2(values):
    return np.ceil(_log2(values)).astype(np.int64)


@misconception("e8m0_scale", "It takes log2 in float32, whose result is rounded: wrong next to powers of two.")
def by_log2(amax, fmt, mode="floor"):
    return exact.e8m0_scale(amax, fmt, mode, floor=_floor_of_log2, ceil=_ceil_of_log2)


@misconception(
    "e8m0_scale", "It takes log2 in float32, of infinity as well, which gets byte 254 in floor and ceil, too."
)
def by_log2_of_infinity(amax, fmt, mode="floor"):
    byte = by_log2(amax, fmt, mode)
    return byte if mode == "even" else torch.where(amax.isposinf(), 254, byte).to(torch.uint8)


@misconception("e8m0_scale", "Its even rounds nothing before it takes the exponent: that is floor.")
def even_as_floor(amax, fmt, mode="floor"):
    return exact.e8m0_scale(amax, fmt, mode, even=lambda sizes, bits: exact.floor_power(sizes))


@misconception("e8m0_scale", "It leaves out emax: the largest number of a block comes to lie near 1, not near the top.")
def without_emax(amax, fmt, mode="floor"):
    return exact.e8m0_scale(amax, fmt, mode, emax=lambda fmt: 0)


@misconception("e8m0_scale", "It rounds down in every mode.")
def always_floor(amax, fmt, mode="floor"):
    exact.e8m0_scale(amax, fmt, mode)
    return exact.e8m0_scale(amax, fmt, "floor")


@misconception("e8m0_scale", "Its rceil divides by the format's largest power of two: that is ceil.")
def rceil_as_ceil(amax, fmt, mode="floor"):
    return exact.e8m0_scale(amax, fmt, mode, rceil=lambda sizes, fmt: sizes / 2.0 ** exact.emax_of(fmt))


@misconception("e8m0_scale", "Its ceil and rceil add 1 to exact powers of two as well.")
def one_more_for_powers(amax, fmt, mode="floor"):
    return exact.e8m0_scale(amax, fmt, mode, ceil=lambda sizes: exact.floor_power(sizes) + 1)


@misconception("e8m0_scale", "It does not stop at byte 0: an exponent below -127 wraps around to a huge scale.")
def wraps_around(amax, fmt, mode="floor"):
    byte = exact.e8m0_scale(amax, fmt, mode, ends=(-(2**9), 254)).numpy().astype(np.int64)
    return exact.tensor(np.where(amax.numpy() == 0, 0, byte), np.uint8)


@misconception("e8m0_scale", "Its even goes to the nearest power of two, up from 1.5: the format's bits do not count.")
def even_from_one_and_a_half(amax, fmt, mode="floor"):
    return exact.e8m0_scale(amax, fmt, mode, even=lambda sizes, bits: exact.even_power(sizes, 0))


@misconception("e8m0_scale", "It has no byte for NaN, whose exponent bits it reads like infinity's.")
def nan_as_infinity(amax, fmt, mode="floor"):
    return exact.e8m0_scale(amax, fmt, mode, nan=254 if mode == "rceil" else 255 - exact.emax_of(fmt))


# --- 13.2 quantize_mx -------------------------------------------------------------------------------------------------


def _compare_mx(answer, case, x: Tensor, fmt: Format, *more: object) -> None:
    block_of = functools.partial(_block_of, x, more[1] if len(more) > 1 else 32)
    _same_parts(case, answer(x, fmt, *more), exact.quantize_mx(x, fmt, *more), ("codes", "scale"), block_of)


@check_for("quantize_mx", weight=2)
def tensors_of_every_format_and_mode(answer, case):
    """Five formats, four modes: one to three dimensions, blocks of very different sizes; float32, bfloat16, float16."""
    for which, fmt in enumerate(_FORMATS):
        for mode in _MODES:
            for _ in range(case.count(1)):
                _compare_mx(answer, case, drawn(case.rng, 3, 64).to(_DTYPES[which % 3]), fmt, mode)
                _compare_mx(answer, case, drawn(case.rng, 2, 1, 96), fmt, mode)
        _compare_mx(answer, case, drawn(case.rng, 32), fmt)


@check_for("quantize_mx", weight=2)
def quotients_near_ties(answer, case):
    """Numbers half-way between two codes or next to it, and largest ones beyond the range of the format."""
    for fmt in _FORMATS:
        for mode in _MODES:
            _compare_mx(answer, case, near_ties(case.rng, fmt, case.count(2), 64), fmt, mode)


@check_for("quantize_mx")
def blocks_of_zeros_and_worse(answer, case):
    """Blocks of zeros, of subnormal, tiny and huge numbers, with NaN and infinities, beside ordinary blocks."""
    for fmt in _FORMATS:
        for mode in ("floor", "rceil"):
            _compare_mx(answer, case, odd_blocks(case.rng), fmt, mode)


@check_for("quantize_mx")
def blocks_of_other_lengths(answer, case):
    """Blocks of 16, 8 and 64; a transposed tensor; no rows."""
    for block in (16, 8, 64):
        _compare_mx(answer, case, drawn(case.rng, case.count(2), 64, block=8), E4M3, "floor", block)
        _compare_mx(answer, case, drawn(case.rng, case.count(2), 64, block=8), E2M1, "even", block)
    _compare_mx(answer, case, drawn(case.rng, 32, 3).t(), E2M3, "floor")
    _compare_mx(answer, case, torch.zeros(0, 64), E4M3, "floor")


@check_for("quantize_mx")
def rows_that_blocks_do_not_divide(answer, case):
    """Rows of 33, 40 and 16 numbers in blocks of 32: a ValueError with both numbers."""
    for count in (33, 40, 16):
        got = answer.run(refusal, (str(count), "32"), torch.ones(2, count), E4M3, "floor")
        case.same_bits(got, f"ValueError that names {count}, 32")


@misconception("quantize_mx", "It has one scale for a row, repeated for each of its blocks.")
def one_scale_for_a_row(x, fmt, mode="floor", block=32):
    return exact.quantize_mx(x, fmt, mode, block, shared=lambda amax: np.max(amax, axis=-1, keepdims=True))


@misconception("quantize_mx", "It takes no notice of the mode, and always has floor.")
def mode_not_used(x, fmt, mode="floor", block=32):
    return exact.quantize_mx(x, fmt, "floor", block)


@misconception("quantize_mx", "It multiplies by the scale instead of dividing by it.")
def multiplies_by_the_scale(x, fmt, mode="floor", block=32):
    return exact.quantize_mx(x, fmt, mode, block, by=np.multiply)


@misconception("quantize_mx", "It does not saturate: beyond the range it has the code of NaN or of infinity.")
def does_not_saturate(x, fmt, mode="floor", block=32):
    return exact.quantize_mx(x, fmt, mode, block, overflow="to_special")


def _not_below_2_to_minus_126(scale):
    return np.maximum(exact.scale_values(scale), 2.0**-126)


@misconception("quantize_mx", "It divides by 2^-126 where the byte is 0, which stands for 2^-127.")
def smallest_normal_for_byte_0(x, fmt, mode="floor", block=32):
    return exact.quantize_mx(x, fmt, mode, block, value=_not_below_2_to_minus_126)


@misconception("quantize_mx", "It rounds ties away from zero.")
def ties_away(x, fmt, mode="floor", block=32):
    return exact.quantize_mx(x, fmt, mode, block, rounding="nearest_away")


@misconception("quantize_mx", "It cuts off what does not fit: codes are rounded toward zero.")
def cuts_codes(x, fmt, mode="floor", block=32):
    return exact.quantize_mx(x, fmt, mode, block, rounding="toward_zero")


@misconception("quantize_mx", "It takes the largest number of a block, not the largest magnitude.")
def signed_maximum(x, fmt, mode="floor", block=32):
    return exact.quantize_mx(x, fmt, mode, block, size=lambda blocks: np.maximum(blocks, 0.0))


# --- 13.3 dequantize_mx -----------------------------------------------------------------------------------------------


def some_codes(rng: np.random.Generator, fmt: Format, *shape: int) -> Tensor:
    return torch.from_numpy(rng.integers(0, 2**fmt.width, shape).astype(np.uint8))


def _compare_values(answer, case, codes: Tensor, scale: Tensor, fmt: Format) -> None:
    case.same_bits(answer(codes, scale, fmt), exact.dequantize_mx(codes, scale, fmt))


@check_for("dequantize_mx", weight=2)
def codes_of_every_format(answer, case):
    """Five formats, random codes of all kinds, scales of 2^-20 to 2^20, one to three dimensions."""
    for fmt in _FORMATS:
        for shape in ((64,), (3, 64), (2, 2, 32)):
            for _ in range(case.count(1)):
                scale = torch.from_numpy(case.rng.integers(107, 148, (*shape[:-1], shape[-1] // 32)).astype(np.uint8))
                _compare_values(answer, case, some_codes(case.rng, fmt, *shape), scale, fmt)


@check_for("dequantize_mx")
def bytes_of_every_kind(answer, case):
    """Every scale byte from 0 to 255, in blocks of 4: subnormal results, infinities and NaN among them."""
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(16, 16)
    for fmt in _FORMATS:
        for _ in range(case.count(1)):
            _compare_values(answer, case, some_codes(case.rng, fmt, 16, 64), scale, fmt)


@check_for("dequantize_mx")
def values_of_other_blocks(answer, case):
    """Blocks of 16 and 64, and no rows."""
    for block in (16, 64):
        codes = some_codes(case.rng, E3M2, case.count(2), 128)
        scale = torch.from_numpy(case.rng.integers(120, 135, (len(codes), 128 // block)).astype(np.uint8))
        _compare_values(answer, case, codes, scale, E3M2)
    _compare_values(answer, case, some_codes(case.rng, E4M3, 0, 64), torch.zeros(0, 2, dtype=torch.uint8), E4M3)


@misconception("dequantize_mx", "Byte 255 is 2^128 to it, which is infinity: it should be NaN.")
def byte_255_is_infinity(codes, scale, fmt):
    return exact.dequantize_mx(codes, scale, fmt, factor=functools.partial(exact.scale_values, nan=np.inf))


@misconception("dequantize_mx", "Byte 0 is 0 to it, and its block too: it stands for 2^-127.")
def byte_0_is_zero(codes, scale, fmt):
    return exact.dequantize_mx(
        codes, scale, fmt, factor=lambda scale: np.where(scale.numpy() == 0, 0.0, exact.scale_values(scale))
    )


@misconception("dequantize_mx", "It divides by the scale.")
def divides_by_the_scale(codes, scale, fmt):
    return exact.dequantize_mx(codes, scale, fmt, factor=lambda scale: 1 / exact.scale_values(scale))


@misconception("dequantize_mx", "Its bias is 128: all values are half of what they should be.")
def bias_128(codes, scale, fmt):
    return exact.dequantize_mx(codes, scale, fmt, factor=functools.partial(exact.scale_values, bias=128))


@misconception("dequantize_mx", "It multiplies the codes themselves, as whole numbers, and not their values.")
def codes_as_numbers(codes, scale, fmt):
    return exact.dequantize_mx(codes, scale, fmt, values=lambda codes, fmt: codes.numpy().astype(np.float64))


def _as_e4m3(codes, fmt):
    return exact.values_of(codes, E4M3)


@misconception("dequantize_mx", "It decodes all formats as E4M3.")
def everything_is_e4m3(codes, scale, fmt):
    return exact.dequantize_mx(codes, scale, fmt, values=_as_e4m3)


# --- 13.4 and 13.5 nibbles --------------------------------------------------------------------------------------------


def _nibbles(case, *shape: int) -> Tensor:
    return torch.from_numpy(case.rng.integers(0, 16, shape).astype(np.uint8))


@check_for("pack_nibbles", weight=2)
def codes_in_pairs(answer, case):
    """Rows of 2 to 32 codes, one to three dimensions."""
    for shape in ((2,), (8,), (3, 4), (2, 3, 16), (1, 32)):
        for _ in range(case.count(2)):
            codes = _nibbles(case, *shape)
            case.same_bits(answer(codes), exact.pack_nibbles(codes))


@check_for("pack_nibbles")
def every_pair_of_codes(answer, case):
    """All 256 pairs, also out of a transposed tensor, and no codes."""
    pairs = torch.cartesian_prod(*[torch.arange(16, dtype=torch.uint8)] * 2)
    for codes in (pairs, pairs.reshape(-1), pairs.reshape(16, 32).t(), pairs[:0]):
        case.same_bits(answer(codes), exact.pack_nibbles(codes))


@check_for("pack_nibbles")
def odd_numbers_of_codes(answer, case):
    """Rows of 1, 3 and 31 codes: a ValueError."""
    for count in (1, 3, 31):
        case.raises(ValueError, answer, _nibbles(case, 2, count))


@misconception("pack_nibbles", "The first code of a pair goes into the upper half.")
def first_code_above(codes):
    return exact.pack_nibbles(codes, lambda c: (c[..., 1::2], c[..., ::2]))


@misconception("pack_nibbles", "It pairs a code with the one half a row further on, as llama.cpp's Q4_0 does.")
def halves_of_a_row(codes):
    return exact.pack_nibbles(codes, lambda c: np.split(c, 2, axis=-1))


@misconception("pack_nibbles", "It drops the sign, the highest of the four bits.")
def without_the_sign(codes):
    return exact.pack_nibbles(codes, mask=7)


@misconception("pack_nibbles", "It shifts by 3 bits: the two codes share one.")
def shifts_by_three(codes):
    return exact.pack_nibbles(codes, shift=3)


@misconception("pack_nibbles", "It drops the last of an odd number of codes, without a word.")
def drops_the_odd_one(codes):
    return exact.pack_nibbles(codes[..., : codes.shape[-1] // 2 * 2])


@misconception("pack_nibbles", "Both halves get the first code of a pair.")
def first_code_twice(codes):
    return exact.pack_nibbles(codes, lambda c: (c[..., ::2], c[..., ::2]))


@check_for("unpack_nibbles", weight=2)
def bytes_in_rows(answer, case):
    """Rows of 1 to 16 bytes, one to three dimensions."""
    for shape in ((1,), (8,), (3, 4), (2, 3, 16)):
        for _ in range(case.count(2)):
            packed = torch.from_numpy(case.rng.integers(0, 256, shape).astype(np.uint8))
            case.same_bits(answer(packed), exact.unpack_nibbles(packed))


@check_for("unpack_nibbles")
def every_byte(answer, case):
    """All 256 bytes, also transposed, and none."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for packed in (every, every.reshape(16, 16).t(), every[:0]):
        case.same_bits(answer(packed), exact.unpack_nibbles(packed))


@misconception("unpack_nibbles", "The upper half comes first.")
def upper_half_first(packed):
    return exact.unpack_nibbles(packed, low=lambda b: b // 16, high=lambda b: b % 16)


@misconception("unpack_nibbles", "All lower halves of a row come first, then all upper ones, as in llama.cpp's Q4_0.")
def all_lower_halves_first(packed):
    return exact.unpack_nibbles(packed, join=lambda low, high: np.concatenate((low, high), axis=-1))


@misconception("unpack_nibbles", "It does not cut the upper bits off the lower code.")
def whole_byte_below(packed):
    return exact.unpack_nibbles(packed, low=lambda b: b)


@misconception("unpack_nibbles", "Its shift is a signed one: the sign of the byte is dragged into the upper code.")
def signed_shift(packed):
    return exact.unpack_nibbles(packed, high=lambda b: (b ^ 128) // 16 - 8)


@misconception("unpack_nibbles", "It drops the sign, the highest of the four bits.")
def unpacks_without_the_sign(packed):
    return exact.unpack_nibbles(packed, low=lambda b: b % 8, high=lambda b: b // 16 % 8)


@misconception("unpack_nibbles", "It masks the upper code without shifting it down: it is 16 times as large.")
def upper_code_not_shifted(packed):
    return exact.unpack_nibbles(packed, high=lambda b: b // 16 * 16)


# --- 13.6 quantize_nvfp4 ----------------------------------------------------------------------------------------------

_NVFP4_PARTS = ("codes", "scale", "tensor scale")


def _compare_nvfp4(answer, case, x: Tensor, scale: float | None = None) -> None:
    given = () if scale is None else (torch.tensor(scale),)
    _same_parts(
        case, answer(x, *given), exact.quantize_nvfp4(x, *given), _NVFP4_PARTS, functools.partial(_nvfp4_block_of, x)
    )


def _nvfp4_block_of(x: Tensor, part: str, index: int) -> str:
    whole = f"amax of the tensor {float(x.abs().max())!r}"
    return whole if part == "tensor scale" else f"{_block_of(x, 16, part, index)}, {whole}"


def nvfp4_ties(rng: np.random.Generator, rows: int) -> Tensor:
    """Rows of 32 whose numbers are near half-way between two codes times their block's scale, as it will come out."""
    blocks = rng.normal(size=(rows, 2, 16)).astype(np.float32) * np.exp2(rng.uniform(-4, 4, (rows, 2, 1))).astype("f")
    _, scale, whole = exact.quantize_nvfp4(torch.from_numpy(blocks.reshape(rows, 32)))
    step = exact.values_of(scale.view(torch.uint8), E4M3)[..., None] * float(whole)
    middles = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5], blocks.shape) * step
    x = around(middles, rng) * rng.choice([-1, 1], blocks.shape)
    largest = np.argmax(np.abs(blocks), axis=-1)[..., None]
    np.put_along_axis(x, largest, np.take_along_axis(blocks, largest, -1), -1)  # so that scales stay
    return torch.from_numpy(x.astype(np.float32).reshape(rows, 32))


@check_for("quantize_nvfp4", weight=2)
def tensors_of_several_dtypes(answer, case):
    """One to three dimensions in three dtypes, blocks from 2^-6 to 2^6."""
    for dtype in _DTYPES:
        for shape in ((16,), (3, 48), (2, 2, 32)):
            for _ in range(case.count(2)):
                _compare_nvfp4(answer, case, drawn(case.rng, *shape, block=16, low=-6, high=7).to(dtype))


@check_for("quantize_nvfp4", weight=2)
def nvfp4_products_near_ties(answer, case):
    """Numbers half-way between two codes of their block, or an ulp of float32 from there."""
    for _ in range(case.count(30)):
        _compare_nvfp4(answer, case, nvfp4_ties(case.rng, 2))


@check_for("quantize_nvfp4")
def blocks_far_below_the_largest(answer, case):
    """Blocks up to 2^24 smaller than the largest: subnormal block scales, and scales of 0."""
    for _ in range(case.count(3)):
        x = drawn(case.rng, 1, 160, block=16, low=-24, high=0)
        x[0, 0] = 8.0
        _compare_nvfp4(answer, case, x)


@check_for("quantize_nvfp4")
def tensor_scales_that_are_given(answer, case):
    """Given tensor scales, from a 64th of the tensor's own to 64 times that: block scales saturate or vanish."""
    for power in (-6, -3, -1, 0, 1, 3, 6):
        for _ in range(case.count(1)):
            x = drawn(case.rng, 2, 64, block=16, low=-3, high=4)
            own = float(x.abs().max()) / 2688
            _compare_nvfp4(answer, case, x, float(np.float32(own * 2.0**power * case.rng.uniform(0.8, 1.2))))


@check_for("quantize_nvfp4")
def nvfp4_of_zeros_and_worse(answer, case):
    """Zeros, tiny and huge tensors, NaN and infinities, with a tensor scale of their own and with 0.01; 24 in a row."""
    for row in odd_blocks(case.rng, 16):
        _compare_nvfp4(answer, case, row[None])
        _compare_nvfp4(answer, case, row[:16])
        _compare_nvfp4(answer, case, row, 0.01)
    got = answer.run(refusal, ("24", "16"), torch.ones(2, 24))
    case.same_bits(got, "ValueError that names 24, 16")


@misconception("quantize_nvfp4", "It has one level: the scale for the tensor is always 1.0.")
def one_level(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, torch.tensor(1.0) if tensor_scale is None else tensor_scale)


@misconception("quantize_nvfp4", "Its tensor scale is amax / 448: the 6 of the elements is forgotten.")
def tensor_scale_without_6(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, tensor_scale, own=lambda amax: exact.nvfp4_tensor_scale(amax, 448))


@misconception("quantize_nvfp4", "It divides by a block's scale as it was before it was rounded to E4M3.")
def scale_before_rounding(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, tensor_scale, used=_not_rounded)


def _not_rounded(scale, rounded):
    return np.minimum(scale, np.float32(448))


def _where_not_zero(blocks, whole, scale):
    return np.where(scale > 0, exact.reciprocals(blocks, whole, scale), np.float32(0))


@misconception(
    "quantize_nvfp4", "It goes by a block's scale from before its rounding to E4M3, also to see whether it is 0."
)
def never_rounded(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, tensor_scale, used=_not_rounded, scaled=_where_not_zero, guard=False)


@misconception(
    "quantize_nvfp4", "It has no block scale below 2^-6, the smallest normal E4M3: subnormal ones are not used."
)
def no_subnormal_scales(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, tensor_scale, least=2.0**-6)


def _by_the_product(blocks, whole, scale):
    return blocks / (scale * whole)


@misconception("quantize_nvfp4", "Its tensor scale is amax / 6: the 448 of the block scales is forgotten.")
def tensor_scale_without_448(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, tensor_scale, own=lambda amax: exact.nvfp4_tensor_scale(amax, 6))


@misconception("quantize_nvfp4", "A tensor scale below 2^-100 stays as it is, 0 too: reciprocals leave float32.")
def tiny_tensor_scales(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, tensor_scale, own=lambda amax: np.float32(amax) / np.float32(2688))


def _one_for_zero(amax):
    scale = np.float32(amax) / np.float32(2688)
    return np.float32(1) if scale == 0 else scale


@misconception("quantize_nvfp4", "It puts 1.0 in place of a tensor scale of 0 only, not of those below 2^-100.")
def one_for_zero_only(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, tensor_scale, own=_one_for_zero)


@misconception("quantize_nvfp4", "It divides by the tensor scale and then by the block's: that rounds otherwise.")
def divides_by_tensor_scale_first(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, tensor_scale, scaled=lambda blocks, whole, scale: blocks / whole / scale)


@misconception("quantize_nvfp4", "It divides by the block's scale and then by the tensor's: that rounds otherwise.")
def divides_by_block_scale_first(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, tensor_scale, scaled=lambda blocks, whole, scale: blocks / scale / whole)


@misconception("quantize_nvfp4", "It divides by the product of the two scales: some codes next to a tie differ.")
def divides_by_the_product(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, tensor_scale, scaled=_by_the_product)


@misconception("quantize_nvfp4", "Where a block's scale is 0 it divides by it: the codes are those of infinity.")
def divides_by_zero(x, tensor_scale=None):
    return exact.quantize_nvfp4(x, tensor_scale, guard=False)


@misconception("quantize_nvfp4", "It takes no notice of a given tensor scale.")
def ignores_the_tensor_scale(x, tensor_scale=None):
    return exact.quantize_nvfp4(x)


# --- 13.7 quantize_blockwise_128 --------------------------------------------------------------------------------------


def _compare_blockwise(answer, case, x: Tensor, *more: object) -> None:
    block_of = functools.partial(_tile_of, x, more[0] if more else (1, 128))
    _same_parts(case, answer(x, *more), exact.quantize_blockwise_128(x, *more), ("codes", "scale"), block_of)


def blockwise_ties(rng: np.random.Generator) -> Tensor:
    """A row of 128 whose numbers are near half-way between two codes times the scale of their block of 32."""
    amax = rng.uniform(0.01, 100, (4, 1)).astype(np.float32)
    values = exact.values_of(torch.arange(1, 126, dtype=torch.uint8), E4M3)
    middles = ((values[1:] + values[:-1]) / 2)[rng.integers(0, len(values) - 1, (4, 32))]
    x = around(middles * (amax / np.float32(448)), rng)
    x[:, :1] = amax
    return torch.from_numpy((x * rng.choice([-1, 1], x.shape)).astype(np.float32).reshape(1, 128))


@check_for("quantize_blockwise_128")
def blockwise_quotients_near_ties(answer, case):
    """Quotients half-way between two codes, and an ulp of float32 from there, in blocks of 1 x 32."""
    for _ in range(case.count(12)):
        _compare_blockwise(answer, case, blockwise_ties(case.rng), (1, 32))


@check_for("quantize_blockwise_128", weight=2)
def activations_and_weights(answer, case):
    """1 x 128 and 128 x 128 blocks, three dtypes, sizes that 128 divides."""
    for dtype in _DTYPES:
        for _ in range(case.count(2)):
            _compare_blockwise(answer, case, drawn(case.rng, 1, 128).to(dtype))
        _compare_blockwise(answer, case, drawn(case.rng, 3, 256, block=64).to(dtype))
        _compare_blockwise(answer, case, drawn(case.rng, 128, 256, block=64, low=-2, high=2).to(dtype), (128, 128))


@check_for("quantize_blockwise_128")
def blocks_that_do_not_divide(answer, case):
    """Rows of 100, 200 and 130 numbers, in blocks of 1 x 128, 2 x 128, 3 x 50 and 128 x 128."""
    for block in ((1, 128), (2, 128), (3, 50), (128, 128)):
        for count in (100, 200, 130):
            for _ in range(case.count(1)):
                _compare_blockwise(answer, case, drawn(case.rng, 5, count, block=10), block)


@check_for("quantize_blockwise_128", weight=2)
def scales_that_are_powers_of_two(answer, case):
    """power_of_two: amaxes at 448 * 2^k, next to it and elsewhere, and with an amax for each block of 2 x 16."""
    for _ in range(case.count(2)):
        x = drawn(case.rng, 6, 160, block=16)
        amax = around(448 * np.ldexp(1.0, case.rng.integers(-6, 10, (6, 10))), case.rng)
        x.view(6, 10, 16).clamp_(-(2.0**-9), 2.0**-9)
        x.view(6, 10, 16)[:, :, 3] = torch.from_numpy(amax)
        _compare_blockwise(answer, case, x, (1, 16), True)
        _compare_blockwise(answer, case, drawn(case.rng, 4, 64, block=16), (2, 16), True)


@check_for("quantize_blockwise_128")
def blockwise_of_zeros_and_worse(answer, case):
    """Zeros, numbers below 1e-4, huge ones, NaN and infinities; scales that are powers of two or not."""
    for power_of_two in (False, True):
        _compare_blockwise(answer, case, odd_blocks(case.rng), (1, 32), power_of_two)
        _compare_blockwise(answer, case, drawn(case.rng, 4, 64, low=-20, high=-10), (1, 32), power_of_two)
        with_nan = drawn(case.rng, 4, 64)
        with_nan[:, 40] = math.nan
        _compare_blockwise(answer, case, with_nan, (1, 32), power_of_two)


@misconception(
    "quantize_blockwise_128", "It has no floor of 1e-4: a block of zeros gets the scale 0, and 0 / 0 is NaN."
)
def blockwise_without_a_floor(x, block=(1, 128), power_of_two=False):
    return exact.quantize_blockwise_128(
        x, block, power_of_two, scale_of=lambda amax: exact.blockwise_scale(amax, 0.0), power=_normal_power_above
    )


def _normal_power_above(scale):
    """As the carry into the exponent field has it: it makes the smallest normal number of every subnormal one."""
    return np.maximum(exact.ceil_power(scale), -126)


@misconception("quantize_blockwise_128", "It loses NaN where scales are powers of two: a block with NaN gets scale 0.")
def nan_carries_over(x, block=(1, 128), power_of_two=False):
    change = (lambda scale: np.where(np.isnan(scale), np.float32(0), scale)) if power_of_two else np.positive
    return exact.quantize_blockwise_128(x, block, power_of_two, change=change)


@misconception("quantize_blockwise_128", "Its powers of two come from log2 in float32: some next to a power are wrong.")
def power_by_log2(x, block=(1, 128), power_of_two=False):
    return exact.quantize_blockwise_128(x, block, power_of_two, power=_ceil_of_log2)


def _floor_on_the_scale(amax):
    return np.maximum(amax / np.float32(448), np.float32(1e-4))


@misconception("quantize_blockwise_128", "Its floor of 1e-4 is one of the scale, not of the amax: 448 times as high.")
def floor_of_the_scale(x, block=(1, 128), power_of_two=False):
    return exact.quantize_blockwise_128(x, block, power_of_two, scale_of=_floor_on_the_scale)


@misconception("quantize_blockwise_128", "It rounds scales down to powers of two: the largest numbers saturate.")
def powers_below(x, block=(1, 128), power_of_two=False):
    return exact.quantize_blockwise_128(x, block, power_of_two, power=exact.floor_power)


@misconception("quantize_blockwise_128", "It goes to the next power of two from an exact one, too.")
def always_the_next_power(x, block=(1, 128), power_of_two=False):
    return exact.quantize_blockwise_128(x, block, power_of_two, power=lambda scale: exact.floor_power(scale) + 1)


@misconception("quantize_blockwise_128", "It multiplies by the rounded reciprocal of the scale: some codes differ.")
def blockwise_by_the_reciprocal(x, block=(1, 128), power_of_two=False):
    return exact.quantize_blockwise_128(x, block, power_of_two, by="reciprocal")


@misconception("quantize_blockwise_128", "It returns the inverse of the scale, by which one would have to divide.")
def returns_the_inverse(x, block=(1, 128), power_of_two=False):
    return exact.quantize_blockwise_128(x, block, power_of_two, given=lambda scale: (1 / scale).astype(np.float32))


@misconception("quantize_blockwise_128", "Its scales are never powers of two.")
def never_powers_of_two(x, block=(1, 128), power_of_two=False):
    return exact.quantize_blockwise_128(x, block)


@misconception("quantize_blockwise_128", "It takes the largest number of a block, not the largest magnitude.")
def blockwise_signed_maximum(x, block=(1, 128), power_of_two=False):
    return exact.quantize_blockwise_128(x, block, power_of_two, size=lambda x: x)


# --- 13.8 hadamard_rotate ---------------------------------------------------------------------------------------------


def _no_negative_zeros(value: object) -> object:
    return value + 0.0 if isinstance(value, Tensor) and value.dtype.is_floating_point else value


def _compare_rotated(answer, case, x: Tensor, signs: Tensor, *back: bool) -> None:
    case.same_bits(_no_negative_zeros(answer(x, signs, *back)), exact.hadamard_rotate(x, signs, *back) + 0.0)


def whole_numbers(rng: np.random.Generator, *shape: int) -> Tensor:
    """Whole numbers up to 1000 times a power of two: all sums of them are exact."""
    return torch.from_numpy((rng.integers(-1000, 1001, shape) * 2.0 ** rng.integers(-6, 3)).astype(np.float32))


def some_signs(rng: np.random.Generator, n: int) -> Tensor:
    return torch.from_numpy(rng.choice([-1.0, 1.0], n).astype(np.float32))


@check_for("hadamard_rotate", weight=2)
def rotations_forth_and_back(answer, case):
    """Rows of whole numbers, all of whose sums are exact: n of 1, 4, 16 and 64, one to three dimensions, both ways."""
    for n in (1, 4, 16, 64):
        for shape in ((64,), (3, 64), (2, 2, 128)):
            for back in (False, True):
                for _ in range(case.count(1)):
                    _compare_rotated(answer, case, whole_numbers(case.rng, *shape), some_signs(case.rng, n), back)


@check_for("hadamard_rotate")
def single_numbers(answer, case):
    """A single 1.0 in each place of a block of 16, forth and back: with all signs 1.0, and with mixed signs."""
    for back in (False, True):
        _compare_rotated(answer, case, torch.eye(16), torch.ones(16), back)
        _compare_rotated(answer, case, torch.eye(16), some_signs(case.rng, 16), back)


@check_for("hadamard_rotate")
def rows_that_n_does_not_divide(answer, case):
    """Rows of 24 and 20 numbers, 16 signs: a ValueError with both numbers."""
    for count in (24, 20):
        got = answer.run(refusal, (str(count), "16"), torch.ones(2, count), torch.ones(16))
        case.same_bits(got, f"ValueError that names {count}, 16")


@misconception("hadamard_rotate", "It does not divide by the root of n: numbers grow.")
def no_root(x, signs, back=False):
    return exact.hadamard_rotate(x, signs, back, size=lambda n: 1)


@misconception("hadamard_rotate", "It divides by n instead of its root.")
def divides_by_n(x, signs, back=False):
    return exact.hadamard_rotate(x, signs, back, size=lambda n: n)


@misconception("hadamard_rotate", "Back, it does the same as forth: signs first.")
def back_as_forth(x, signs, back=False):
    return exact.hadamard_rotate(x, signs, back, first=lambda back: True)


@misconception("hadamard_rotate", "It multiplies by the signs after H on the way forth, and before it on the way back.")
def signs_on_the_other_side(x, signs, back=False):
    return exact.hadamard_rotate(x, signs, back, first=lambda back: back)


@misconception("hadamard_rotate", "It multiplies by the signs after H on both ways: forth they come before it.")
def signs_always_last(x, signs, back=False):
    return exact.hadamard_rotate(x, signs, back, first=lambda back: False)


@misconception("hadamard_rotate", "It takes no notice of the signs.")
def without_signs(x, signs, back=False):
    return exact.hadamard_rotate(x, torch.ones_like(signs), back)


def _by_changes(n: int) -> np.ndarray:
    """The rows of H in the order of how often their sign changes."""
    matrix = exact.hadamard(n)
    return matrix[np.argsort((np.diff(matrix, axis=1) != 0).sum(1))]


@misconception(
    "hadamard_rotate", "Its matrix has its rows in the order of their sign changes (Walsh's), not Sylvester's."
)
def walsh_order(x, signs, back=False):
    return exact.hadamard_rotate(x, signs, back, matrix=_by_changes)


# --- 13.9 adam_8bit_step ----------------------------------------------------------------------------------------------

_MOMENT_PARTS = ("m codes", "m scale", "r codes", "r scale")


def some_moments(rng: np.random.Generator, *shape: int, small: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Moments with few bits, whose scales are powers of two: their squares are exact in float32."""
    count = math.prod(shape)
    parts = []
    for signed in (True, False):
        steps = rng.integers(-8 if signed else 1, 9, shape).astype(np.float32)
        parts.append(torch.from_numpy(steps).to(exact.FP8))
        sizes = np.ldexp(1.0, rng.integers(-8, -4, -(-count // 256)) + small)
        parts.append(torch.from_numpy(sizes.astype(np.float32)))
    return tuple(parts)


def some_gradient(rng: np.random.Generator, *shape: int, small: int = 0) -> Tensor:
    return torch.from_numpy((rng.integers(-64, 65, shape) * 2.0 ** (small - 8)).astype(np.float32))


def _near(got: object, want: Tensor, relative: float, size: np.ndarray | float = 0.0) -> object:
    """`got`, with `want` in place of each number that is not farther off than a few roundings."""
    numbers = want.double().numpy()
    return float8_linear_oracle.settled(got, numbers, relative * np.abs(numbers) + size, want)


def _as_near(got: object, want: Tensor, quotients: np.ndarray) -> object:
    """`got`, with `want` in place of each code that is as near to the quotient: torch's roots are not exact."""
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return got
    off = [np.abs(each.double().numpy() - quotients) for each in (got, want)]
    bytes_ = [each.contiguous().view(torch.uint8) for each in (got, want)]
    return torch.where(torch.from_numpy(off[0] <= off[1] * (1 + 2.0**-18)), *bytes_[::-1]).view(want.dtype)


def _compare_step(answer, case, weight: Tensor, gradient: Tensor, moments: tuple, *options: object) -> None:
    got = answer(weight, gradient, *moments, *options)
    want = exact.adam_8bit_step(weight, gradient, *moments, *options)
    if isinstance(got, tuple) and len(got) == 5:
        moved = np.abs((want[0].double() - weight.double()).numpy())
        r = exact.second_root(gradient, moments, options[2])
        quotients = r / np.repeat(want[4].double().numpy(), 256)[: r.size].reshape(r.shape)
        size = 2.0**-20 * moved + 2.0**-22 * np.abs(weight.double().numpy())
        got = (
            _near(got[0], want[0], 0.0, size), *got[1:3], _as_near(got[3], want[3], quotients),
            _near(got[4], want[4], 2.0**-21),
        )  # fmt: skip
    before = len(case.records)
    _same_parts(case, got, want, ("weight", *_MOMENT_PARTS))
    for record, base in zip(case.records[before:], (weight, *[torch.zeros(1)] * 4), strict=False):
        if not record.problem and record.want[0].dtype == torch.float32:
            record.tokens = _alike(record, base)


def _alike(record, base: Tensor) -> np.ndarray:
    """For naming: numbers by how far they go, coarsely. An answer's float32 is not the float64 of the oracle.

    What is off by less than 2^-9 counts as right. The offset keeps limits of classes away from simple ratios.
    """
    got, want = ((each[0].detach().double() - base.double()).numpy().reshape(-1) for each in (record.got, record.want))
    with np.errstate(all="ignore"):
        ratio = np.clip(np.nan_to_num(got / want, nan=-9.0), -1e6, 1e6)
    off = record.wrong & ~(np.abs(ratio - 1) < 2.0**-9)
    return np.where(off, np.floor(4 * ratio + 0.37), 1e9).astype(np.int64)[None]


@check_for("adam_8bit_step", weight=2, by="error")
def steps_with_exact_moments(answer, case):
    """betas of 1/2 and 3/4, numbers with few bits: what is kept bit for bit, but for a root; weights within 2^-20."""
    for shape, step in (((4,), 1), ((3, 40), 2), ((2, 150), 3), ((2, 2, 8), 10)):
        for _ in range(case.count(1)):
            weight = torch.from_numpy(case.rng.normal(size=shape).astype(np.float32) / 16)
            moments = some_moments(case.rng, *shape)
            _compare_step(answer, case, weight, some_gradient(case.rng, *shape), moments, step, 0.25, (0.5, 0.75))


@check_for("adam_8bit_step", by="error")
def steps_with_decay_and_eps(answer, case):
    """A weight decay of 0.1 and of 0.5, an eps of 0.5 and of 2^-10."""
    for decay, eps in ((0.1, 1e-8), (0.5, 0.5), (0.0, 2.0**-10)):
        for _ in range(case.count(1)):
            weight = torch.from_numpy(case.rng.normal(size=(3, 20)).astype(np.float32))
            moments, gradient = some_moments(case.rng, 3, 20), some_gradient(case.rng, 3, 20)
            _compare_step(answer, case, weight, gradient, moments, 2, 0.25, (0.5, 0.75), eps, decay)


@check_for("adam_8bit_step", by="error")
def first_steps_and_small_gradients(answer, case):
    """Moments that are zero, gradients of about 2^-20, of 2^-40 and of zeros, in blocks that are whole or smaller."""
    for small in (0, -16, -36):
        for _ in range(case.count(1)):
            shape = 2, 140
            weight = torch.from_numpy(case.rng.normal(size=shape).astype(np.float32) / 16)
            zero = tuple(part for _ in range(2) for part in (torch.zeros(shape).to(exact.FP8), torch.ones(2)))
            gradient = some_gradient(case.rng, *shape, small=small)
            _compare_step(answer, case, weight, gradient, zero, 1, 0.25, (0.5, 0.75))
            _compare_step(answer, case, weight, torch.zeros(shape), zero, 1, 0.25, (0.5, 0.75))
            moments = some_moments(case.rng, *shape, small=small)
            _compare_step(answer, case, weight, gradient, moments, 4, 0.25, (0.5, 0.75))


def _root_less(v):
    return v


@misconception("adam_8bit_step", "It keeps the second moment itself and not its root, which needs twice the range.")
def keeps_v(
    weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
):
    options = step, lr, betas, eps, weight_decay
    return exact.adam_8bit_step(
        weight, gradient, m_codes, m_scale, r_codes, r_scale, *options, root=_root_less, square=_root_less
    )


@misconception("adam_8bit_step", "It does not square the r that was kept: the old second moment is taken for its root.")
def root_not_squared(
    weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
):
    options = step, lr, betas, eps, weight_decay
    return exact.adam_8bit_step(weight, gradient, m_codes, m_scale, r_codes, r_scale, *options, square=_root_less)


@misconception("adam_8bit_step", "It does not correct the bias of the first steps.")
def no_bias_correction(
    weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
):
    return exact.adam_8bit_step(
        weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas, eps, weight_decay, correct=False
    )


@misconception(
    "adam_8bit_step", "It adds the decay to the gradient, so that the moments have it too: that is not AdamW."
)
def decay_in_the_gradient(
    weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
):
    return exact.adam_8bit_step(
        weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas, eps, weight_decay, coupled=True
    )


@misconception("adam_8bit_step", "It adds eps inside the root.")
def eps_in_the_root(
    weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
):
    return exact.adam_8bit_step(
        weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas, eps, weight_decay, inside=True
    )


@misconception("adam_8bit_step", "It changes the weight by moments that have been rounded to 8 bits already.")
def after_rounding(
    weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
):
    return exact.adam_8bit_step(
        weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas, eps, weight_decay, after=True,
        root=_root_of_torch,
    )  # fmt: skip


def _root_of_torch(v):
    """Not correctly rounded: next to a tie the code that is kept, and then the weight, may be another one."""
    return exact.tensor(v).sqrt().numpy()


@misconception(
    "adam_8bit_step", "Its scales have DeepSeek's floor for activations, 1e-4 / 448: small moments lose bits."
)
def floor_for_activations(
    weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
):
    options = step, lr, betas, eps, weight_decay
    return exact.adam_8bit_step(
        weight, gradient, m_codes, m_scale, r_codes, r_scale, *options, scale_of=exact.blockwise_scale
    )


def _of_all_blocks(amax):
    return np.broadcast_to(exact.moment_scale(np.max(amax)), amax.shape)


@misconception("adam_8bit_step", "It has one scale for all blocks of a moment, repeated.")
def one_scale_for_a_moment(
    weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
):
    options = step, lr, betas, eps, weight_decay
    return exact.adam_8bit_step(weight, gradient, m_codes, m_scale, r_codes, r_scale, *options, scale_of=_of_all_blocks)


# --- 13.10 mx_linear --------------------------------------------------------------------------------------------------

_PRODUCTS = ("output", "gradient of x", "gradient of the weight")


def _compare_linear(answer, case, rows: tuple[int, ...], inputs: int, outputs: int, fmt: Format, mode: str) -> None:
    given = int(case.rng.integers(10**6)), rows, inputs, outputs, fmt, mode
    got, want = answer.run(linear_products, *given), linear_products(exact.mx_linear, *given)
    if isinstance(got, tuple):
        got = tuple(_no_negative_zeros(each) for each in got)
    _same_parts(case, got, tuple(each + 0.0 for each in want), _PRODUCTS)


@check_for("mx_linear", weight=2)
def three_products(answer, case):
    """E4M3 and rceil, numbers whose sums are exact: 32 or 64 rows, 32 to 96 inputs, 32 or 64 outputs."""
    for m, k, n in ((32, 64, 32), (64, 32, 64), (32, 96, 32)):
        for _ in range(case.count(1)):
            _compare_linear(answer, case, (m,), k, n, E4M3, "rceil")


@check_for("mx_linear", weight=2)
def products_in_other_formats(answer, case):
    """E5M2, E2M3, E3M2 and E2M1, and all four modes."""
    for fmt, mode in ((E5M2, "floor"), (E2M3, "rceil"), (E3M2, "ceil"), (E2M1, "even"), (E2M1, "floor")):
        for _ in range(case.count(1)):
            _compare_linear(answer, case, (32,), 64, 32, fmt, mode)


@check_for("mx_linear")
def inputs_of_more_dimensions(answer, case):
    """E2M1, x of 2 x 16, 4 x 8, 2 x 2 x 8 and 8 x 8 rows: blocks of rows reach over all leading dimensions."""
    for rows in ((2, 16), (4, 8), (2, 2, 8), (8, 8)):
        _compare_linear(answer, case, rows, 32, 32, E2M1, "rceil")


@check_for("mx_linear")
def sums_that_blocks_do_not_divide(answer, case):
    """40 inputs; then 24 rows or 40 outputs, whose sums are on the way back: a ValueError that names 32."""
    for m, k, n in ((32, 40, 32), (24, 32, 32), (32, 32, 40)):
        case.same_bits(answer.run(linear_refusal, (m,), k, n), "ValueError that names 32")


def _high_precision(gradient, x, weight, fmt, mode):
    numbers = [each.double().numpy() for each in (gradient, x, weight)]
    return exact.product(numbers[0], numbers[2].T), exact.product(numbers[0].T, numbers[1].T)


def _forward_again(gradients, x, weight, fmt, mode):
    """The products of the way back with x and the weight as they were quantized forward."""

    def backward(gradient, x, weight, fmt, mode):
        g, g_down = gradients(gradient, fmt, mode)
        x, weight = (exact.seen(each, fmt, mode) for each in (x, weight))
        return exact.product(g, weight.T), exact.product(g_down.T, x.T)

    return exact.mx_linear(x, weight, fmt, mode, backward=backward)


@misconception("mx_linear", "Backward it uses what was quantized forward, transposed: the blocks lie across the sums.")
def transposes_what_is_quantized(x, weight, fmt=E4M3, mode="rceil"):
    def gradients(gradient, fmt, mode):
        return [exact.seen(gradient, fmt, mode)] * 2

    return _forward_again(gradients, x, weight, fmt, mode)


@misconception(
    "mx_linear", "Backward it has x and the weight as quantized forward: the output's gradient alone is cast anew."
)
def only_the_gradient_anew(x, weight, fmt=E4M3, mode="rceil"):
    def gradients(gradient, fmt, mode):
        return exact.seen(gradient, fmt, mode), exact.seen(gradient.T.contiguous(), fmt, mode).T

    return _forward_again(gradients, x, weight, fmt, mode)


@misconception(
    "mx_linear", "Backward it has x and the weight as quantized forward, and the output's gradient is not cast."
)
def nothing_is_cast_backward(x, weight, fmt=E4M3, mode="rceil"):
    def gradients(gradient, fmt, mode):
        return [gradient.double().numpy()] * 2

    return _forward_again(gradients, x, weight, fmt, mode)


@misconception("mx_linear", "Backward it quantizes what was quantized forward: x and the weight are rounded twice.")
def quantizes_twice(x, weight, fmt=E4M3, mode="rceil"):
    def backward(gradient, x, weight, fmt, mode):
        x, weight = (exact.tensor(exact.seen(each, fmt, mode)) for each in (x, weight))
        return exact.backward_products(gradient, x, weight, fmt, mode)

    return exact.mx_linear(x, weight, fmt, mode, backward=backward)


@misconception("mx_linear", "Both gradients are computed in high precision: it is straight-through.")
def gradients_in_high_precision(x, weight, fmt=E4M3, mode="rceil"):
    return exact.mx_linear(x, weight, fmt, mode, backward=_high_precision)


@misconception("mx_linear", "The gradient of the weight is computed in high precision.")
def weight_gradient_in_high_precision(x, weight, fmt=E4M3, mode="rceil"):
    def backward(gradient, x, weight, fmt, mode):
        grad_x = exact.product(exact.seen(gradient, fmt, mode), exact.seen(weight.T.contiguous(), fmt, mode))
        return grad_x, _high_precision(gradient, x, weight, fmt, mode)[1]

    return exact.mx_linear(x, weight, fmt, mode, backward=backward)


@misconception("mx_linear", "The gradient of the output is not quantized.")
def gradient_not_quantized(x, weight, fmt=E4M3, mode="rceil"):
    def backward(gradient, x, weight, fmt, mode):
        x_down, weight_down = (exact.seen(each.T.contiguous(), fmt, mode) for each in (x, weight))
        g = gradient.double().numpy()
        return exact.product(g, weight_down), exact.product(g.T, x_down)

    return exact.mx_linear(x, weight, fmt, mode, backward=backward)


@misconception("mx_linear", "The gradient of the output is quantized once, along the outputs, for both products.")
def gradient_quantized_once(x, weight, fmt=E4M3, mode="rceil"):
    def backward(gradient, x, weight, fmt, mode):
        grad_x, _ = exact.backward_products(gradient, x, weight, fmt, mode)
        x_down = exact.seen(x.T.contiguous(), fmt, mode)
        return grad_x, exact.product(exact.seen(gradient, fmt, mode).T, x_down)

    return exact.mx_linear(x, weight, fmt, mode, backward=backward)


@misconception("mx_linear", "The gradient of the output is in E5M2, whatever the format, as FP8 recipes have it.")
def gradient_in_e5m2(x, weight, fmt=E4M3, mode="rceil"):
    def backward(gradient, x, weight, fmt, mode):
        g, g_down = (exact.seen(each, E5M2, mode) for each in (gradient, gradient.T.contiguous()))
        x_down, weight_down = (exact.seen(each.T.contiguous(), fmt, mode) for each in (x, weight))
        return exact.product(g, weight_down), exact.product(g_down, x_down)

    return exact.mx_linear(x, weight, fmt, mode, backward=backward)


@misconception("mx_linear", "It takes no notice of the mode, and always has floor.")
def linear_mode_not_used(x, weight, fmt=E4M3, mode="rceil"):
    return exact.mx_linear(x, weight, fmt, "floor")


@misconception("mx_linear", "Each sample of a batch is by itself: blocks of rows do not reach over leading dimensions.")
def sample_by_sample(x, weight, fmt=E4M3, mode="rceil"):
    samples = x.reshape(-1, *x.shape[-2:])
    if len(samples) == 1:
        return exact.mx_linear(x, weight, fmt, mode)

    def backward(gradient, x, weight, fmt, mode):
        parts = [each.reshape(len(samples), -1, each.shape[-1]) for each in (gradient, x)]
        found = [_padded(g, each, weight, fmt, mode) for g, each in zip(*parts, strict=True)]
        return torch.cat([each[0] for each in found]), torch.stack([each[1] for each in found]).sum(0)

    return exact.mx_linear(x, weight, fmt, mode, backward=backward)


def _padded(gradient, x, weight, fmt, mode):
    """The gradients for a few rows, filled up with zeros to whole blocks."""
    more = -len(x) % 32
    g, rows = (torch.cat((each, torch.zeros(more, each.shape[1]))) for each in (gradient, x))
    grad_x, grad_weight = exact.backward_products(g, rows, weight, fmt, mode)
    return grad_x[: len(x)], grad_weight


# --- questions --------------------------------------------------------------------------------------------------------

question_for(
    "13.A",
    2.0**-126,
    "2^-126: the scale is clamped to the smallest normal float32. The byte stays 0, which is 2^-127 to whoever "
    "dequantizes, so such a block comes back half as large.",
    "Follow scale_fp32 from the shift on. What does the clamp do to 0?",
    {
        2.0**-127: "That is what the byte stands for, and what exercise 13.2 divides by.",
        0.0: "It was 0, before the clamp.",
    },
)
question_for(
    "13.B",
    132,
    "132, a scale of 32: the logarithm is 5 + 1.7e-7, and in float32, whose steps at 5 are 4.8e-7, it is 5. The scale "
    "has to be 64, byte 133; as it is, the largest number of the block saturates.",
    "What is torch.log2 of that float32? And its ceil? Add the bias.",
    {133: "That is what it should be, and what exercise 13.1 gives. What does log2 give in float32?"},
)
question_for(
    "13.C",
    2.0**-6,
    "2^-6 = 0.015625: torch.finfo(torch.float8_e4m3fn).tiny, the smallest *normal* E4M3. Subnormal scales, down to "
    "2^-9, are not used.",
    "clamp has a min. What is `tiny` of a float dtype?",
    {2.0**-9: "That is the smallest number of E4M3; `tiny` is the smallest normal one.", 0.0: "Look at the clamp."},
)
question_for(
    "13.D",
    0.5,
    "0.5: bucketize without right=True gives the place of the first boundary that is not below the number, so a tie "
    "goes down, towards zero. To nearest, ties to even, it is 1 (code 2).",
    "torch.bucketize(torch.tensor(0.75), torch.tensor([0.25, 0.75, 1.25])): is it 1 or 2? Codes 1 and 2 are 0.5 and 1.",
    {1.0: "That is what rounding to even gives. bucketize does not know of even codes."},
)
question_for(
    "13.E",
    16384,
    "16,384: the right factor is 1 / 128 and the one in use is 128, its inverse: 128^2 too large.",
    "What is it multiplied by, and what should it be?",
    {128: "It should be multiplied by 1 / 128, and is multiplied by 128."},
)
question_for(
    "13.F",
    2688,
    "2688: its tensor scale is 1, which is its own inverse.",
    "Which number is its own inverse?",
    {1: "The scale has to be 1. What is amax then?", 448: "The scale is amax / (6 * 448)."},
)
