"""The exact oracle for blocks of 32: one numpy operation in float32 for each step, float16 from breakpoints.

numpy's float32 operations are those of IEEE 754, each rounded correctly. Neither gguf nor torch's casts nor a blank is
used: half precision comes from the rounding oracle, and bytes are put together by arithmetic on whole numbers. A
function has a keyword for each step that a known misconception changes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import FP16
from lowprec_lab.graders import oracle, rounding_oracle

ONE = np.float32(1)


def in_blocks(x: Tensor, size: int = 32) -> np.ndarray:
    """(blocks, size) float32. ValueError where rows cannot be cut."""
    if not x.dim() or x.shape[-1] % size:
        raise ValueError(f"{tuple(x.shape)} is not made of blocks of {size}")
    return x.numpy().astype(np.float32).reshape(-1, size)


def to_rows(blocks: np.ndarray, x: Tensor, size: int = 32) -> Tensor:
    """The bytes of blocks, uint8, in the leading dimensions of x."""
    rows = blocks.astype(np.uint8).reshape(*x.shape[:-1], x.shape[-1] // size * blocks.shape[1])
    return torch.from_numpy(np.ascontiguousarray(rows))


def half(values: np.ndarray) -> np.ndarray:
    """The codes of float16, nearest even, infinity where it overflows: whole numbers."""
    codes = rounding_oracle.encode(torch.from_numpy(values), FP16, "nearest_even", "to_special")
    return codes.numpy().astype(np.int64)


def half_bytes(values: np.ndarray) -> np.ndarray:
    """Two bytes for each of the (blocks, 1) values, low byte first."""
    codes = half(values)
    return np.concatenate([codes % 256, codes // 256], axis=1)


def half_values(codes: np.ndarray) -> np.ndarray:
    """What codes of float16 stand for, in float32, which holds them all."""
    return oracle.decode(torch.from_numpy(codes.astype(np.int32)), FP16).numpy().astype(np.float32)


def reciprocal(d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(1 / d, whether codes are worked out at all: d and 1 / d are finite)."""
    with np.errstate(all="ignore"):
        inverse = ONE / d
    return inverse, np.isfinite(d) & np.isfinite(inverse)


def away(values: np.ndarray) -> np.ndarray:
    """The nearest whole number; half-way goes away from zero. Exact in float64."""
    wide = values.astype(np.float64)
    return np.sign(wide) * np.floor(np.abs(wide) + 0.5)


# --- bytes ------------------------------------------------------------------------------------------------------------


def nibbles(codes: np.ndarray, neighbours: bool = False, swapped: bool = False) -> np.ndarray:
    """(blocks, 16) bytes of (blocks, 32) codes: number j is low and j + 16 is high; or neighbours share a byte."""
    low, high = (codes[:, ::2], codes[:, 1::2]) if neighbours else (codes[:, :16], codes[:, 16:])
    if swapped:
        low, high = high, low
    return low % 16 + high % 16 * 16


def spilled(codes: np.ndarray) -> np.ndarray:
    """As `nibbles`, by low | high << 4: a low code of 16 sets a bit of the high one."""
    return (codes[:, :16] | codes[:, 16:] * 16) % 256


def fifths(codes: np.ndarray, order: np.ndarray | None = None, from_above: bool = False) -> np.ndarray:
    """(blocks, 4) bytes of bit 4 of (blocks, 32) codes. order: which number's bit comes at each place, if not its own.

    from_above: the first of eight is the highest bit of its byte.
    """
    bits = codes // 16 % 2 if order is None else codes[:, order] // 16 % 2
    weights = 2 ** np.arange(8)
    return bits.reshape(-1, 4, 8) @ (weights[::-1] if from_above else weights)


# --- quantizing -------------------------------------------------------------------------------------------------------


def scaled_by(
    values: np.ndarray, d: np.ndarray, step: Callable = lambda d: d, settle: bool = True, divide: bool = False,
    narrow: bool = False,
) -> np.ndarray:  # fmt: skip
    """values * (1 / d), or 0 where that is settled. step: the d whose reciprocal is taken. divide: by it, instead.

    narrow: the reciprocal is a float16.
    """
    with np.errstate(all="ignore"):
        inverse, usable = reciprocal(step(d).astype(np.float32))
        if narrow:
            inverse = half_step(inverse)
            usable &= np.isfinite(inverse)
        scaled = (values / step(d) if divide else values * inverse).astype(np.float32)
    return np.where(usable, scaled, 0) if settle else np.nan_to_num(scaled, nan=0, posinf=1e9, neginf=-1e9)


def half_step(d: np.ndarray) -> np.ndarray:
    """d as a float16, in float32."""
    return half_values(half(d))


def quantize_q8_0(
    x: Tensor, amax: Callable = lambda b: np.abs(b).max(axis=1, keepdims=True), rounded: Callable = away,
    order: int = 1, top: int = 127, **scaling: object,
) -> Tensor:  # fmt: skip
    """amax: of blocks. rounded: to whole numbers. order: of d's bytes. scaling: of `scaled_by`."""
    blocks = in_blocks(x)
    d = (amax(blocks) / np.float32(top)).astype(np.float32)
    codes = rounded(scaled_by(blocks, d, **scaling))
    codes = codes if scaling.get("settle", True) else np.clip(codes, -128, 127)  # else a cast to a byte wraps around
    return to_rows(np.concatenate([half_bytes(d)[:, ::order], codes.astype(np.int64) % 256], axis=1), x)


def first_largest(blocks: np.ndarray) -> np.ndarray:
    """The number of largest magnitude in each block, with its sign: the first of several; NaN before all others."""
    return np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)


def cut(scaled: np.ndarray, offset: float, top: int | None, wide: bool = False) -> np.ndarray:
    """scaled + offset without its fraction, at most top. wide: the sum is not rounded to float32."""
    sums = scaled.astype(np.float64) + offset if wide else scaled.astype(np.float32) + np.float32(offset)
    codes = np.floor(np.clip(sums, 0, 1000))
    return (codes if top is None else np.minimum(codes, top)).astype(np.int64)


def wrapped(scaled: np.ndarray, offset: float, top: int) -> np.ndarray:
    """As `cut`, but what is below 0 wraps around, as in a cast to a byte: -1 is 255."""
    sums = np.minimum(scaled.astype(np.float32) + np.float32(offset), top)
    return np.trunc(sums).astype(np.int64) % 256


def even(scaled: np.ndarray, offset: float, top: int | None) -> np.ndarray:
    """As `cut`, but rounded to nearest, ties to even."""
    return np.clip(np.rint(scaled) + np.floor(offset), 0, top).astype(np.int64)


def by_largest(
    x: Tensor, bits: int, pack: Callable, pick: Callable = first_largest, over: float | None = None,
    round_: Callable = cut, top: int | None = -1, order: int = 1, change: Callable = lambda d: d,
    empty: int | None = None, **scaling: object,
) -> Tensor:  # fmt: skip
    """Q4_0 and Q5_0. pick: the largest. over: what it is divided by. change: of d before it is stored.

    empty: the code where there is no 1 / d, if it is not that of 0.
    """
    blocks, zero = in_blocks(x), 2 ** (bits - 1)
    d = (pick(blocks) / np.float32(-zero if over is None else over)).astype(np.float32)
    codes = round_(scaled_by(blocks, d, **scaling), zero + 0.5, 2 * zero - 1 if top == -1 else top)
    codes = codes if empty is None else np.where(reciprocal(d)[1], codes, empty)
    return to_rows(np.concatenate([half_bytes(change(d))[:, ::order], pack(codes)], axis=1), x)


def quantize_q4_0(x: Tensor, pack: Callable = nibbles, **changed: object) -> Tensor:
    return by_largest(x, 4, pack, **changed)


def in_five_bits(codes: np.ndarray) -> np.ndarray:
    return np.concatenate([fifths(codes), nibbles(codes)], axis=1)


def quantize_q5_0(x: Tensor, pack: Callable = in_five_bits, **changed: object) -> Tensor:
    return by_largest(x, 5, pack, **changed)


def spilled_from_five_bits(codes: np.ndarray) -> np.ndarray:
    """As `in_five_bits`, with more than one fifth bit where a code has more than five."""
    fifth = (codes // 16).reshape(-1, 4, 8) @ 2 ** np.arange(8) % 256
    return np.concatenate([fifth, nibbles(codes)], axis=1)


def quantize_q4_1(
    x: Tensor, pack: Callable = nibbles, ends: Callable | None = None, levels: int = 15, origin: Callable = lambda m: m,
    round_: Callable = cut, parts: int = 1, late: bool = False, top: int = 15, **scaling: object,
) -> Tensor:  # fmt: skip
    """ends: (smallest, largest) of blocks. origin: the m that is subtracted. parts: -1 stores m before d.

    late: m is subtracted after the scaling.
    """
    blocks = in_blocks(x)
    low, high = ends(blocks) if ends else (blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True))
    with np.errstate(all="ignore"):
        d = ((high - low) / np.float32(levels)).astype(np.float32)
        if late:
            scaled = scaled_by(blocks, d, **scaling) - scaled_by(origin(low), d, **scaling)
        else:
            scaled = scaled_by(blocks - origin(low), d, **scaling)
    stored = [half_bytes(d), half_bytes(low)][::parts]
    return to_rows(np.concatenate([*stored, pack(round_(scaled, 0.5, top))], axis=1), x)


# --- and back ---------------------------------------------------------------------------------------------------------

BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "q5_0": 22}


def codes_in(part: np.ndarray, neighbours: bool = False, swapped: bool = False) -> np.ndarray:
    """(blocks, 32) codes of (blocks, 16) bytes."""
    low, high = part % 16, part // 16
    if swapped:
        low, high = high, low
    return np.stack([low, high], axis=2).reshape(-1, 32) if neighbours else np.concatenate([low, high], axis=1)


def bits_in(part: np.ndarray, order: np.ndarray | None = None, from_above: bool = False) -> np.ndarray:
    """(blocks, 32) bits of (blocks, 4) bytes."""
    places = np.arange(8)[::-1] if from_above else np.arange(8)
    bits = (part[:, :, None] // 2**places % 2).reshape(-1, 32)
    return bits if order is None else bits[:, order]


def halves_in(part: np.ndarray, order: int = 1) -> np.ndarray:
    """(blocks, 1) float64 values of (blocks, 2) bytes, low byte first."""
    low, high = part[:, ::order].T
    return half_values((low + 256 * high)[:, None]).astype(np.float64)


def dequantize_blocks(
    blocks: Tensor, layout: str, nibbles_of: Callable = codes_in, fifths_of: Callable = bits_in,
    half_of: Callable = halves_in, zeros: dict | None = None, signed: bool = True, swap: bool = False,
    wrap: bool = False,
) -> Tensor:  # fmt: skip
    """All products are exact in float64. zeros: the code of 0 of each layout, where it is changed. swap: d and m.

    wrap: codes less that of 0 are uint8.
    """
    if layout not in BYTES or blocks.shape[-1] % BYTES[layout]:
        raise ValueError(f"no whole blocks of {layout}")
    rows = blocks.numpy().astype(np.int64).reshape(-1, BYTES[layout])
    zero = {"q8_0": 0, "q4_0": 8, "q4_1": 0, "q5_0": 16, **(zeros or {})}[layout]
    offset, d, rest = 0.0, half_of(rows[:, :2]), rows[:, 2:]
    with np.errstate(all="ignore"):
        if layout == "q8_0":
            codes = np.where(signed & (rest > 127), rest - 256, rest)
        elif layout == "q5_0":
            codes = nibbles_of(rest[:, 4:]) + 16 * fifths_of(rest[:, :4])
        elif layout == "q4_0":
            codes = nibbles_of(rest)
        else:
            codes, offset = nibbles_of(rest[:, 2:]), half_of(rest[:, :2])
            d, offset = (offset, d) if swap else (d, offset)
        values = ((codes - zero) % 256 if wrap and zero else codes - zero) * d
        values = (values + offset if layout == "q4_1" else values).astype(np.float32)
    return torch.from_numpy(values.reshape(*blocks.shape[:-1], -1))


# --- in C: what stands in for an answer -------------------------------------------------------------------------------
# Expected bytes never come from here, but from the functions above.

Q8_0_IN_C = """
void quantize_q8_0(const float *x, uint8_t *out, size_t blocks) {
    float amax;
    for (size_t b = 0; b < blocks; b++) {
        const float *in = x + 32 * b;
        uint8_t *to = out + 34 * b;
        amax = 0;
        for (int j = 0; j < 32; j++) {
            float size = fabsf(in[j]);
            if (size > amax || isnan(size)) /* once NaN, always NaN: nothing is larger */
                amax = size;
        }
        float d = amax / 127, id = 1 / d;
        uint16_t half = half_bits(d);
        to[0] = half & 255;
        to[1] = half >> 8;
        for (int j = 0; j < 32; j++) {
            float v = isfinite(d) && isfinite(id) ? in[j] * id : 0;
            int code = (int)roundf(v);
            to[2 + j] = (uint8_t)code;
        }
    }
}
"""

Q4_0_IN_C = """
void quantize_q4_0(const float *x, uint8_t *out, size_t blocks) {
    for (size_t b = 0; b < blocks; b++) {
        const float *in = x + 32 * b;
        uint8_t *to = out + 18 * b;
        float most = in[0];
        for (int j = 1; j < 32; j++)
            if (fabsf(in[j]) > fabsf(most) || isnan(in[j]))
                most = in[j];
        float d = most / -8, id = 1 / d;
        uint16_t half = half_bits(d);
        to[0] = half & 255;
        to[1] = half >> 8;
        int code[32];
        for (int j = 0; j < 32; j++) {
            float v = isfinite(d) && isfinite(id) ? in[j] * id : 0;
            float sum = v + 8.5f;
            code[j] = sum < 15 ? (int)sum : 15;
        }
        for (int j = 0; j < 16; j++)
            to[2 + j] = (uint8_t)(code[j] | code[j + 16] << 4);
    }
}
"""


def q8_0_in_c() -> str:
    return Q8_0_IN_C


def q4_0_in_c() -> str:
    return Q4_0_IN_C


# --- 256: see below ---------------------------------------------------------------------------------------------------
