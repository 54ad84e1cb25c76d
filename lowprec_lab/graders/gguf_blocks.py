"""Checks and known misconceptions of chapter 12.

Bytes are compared one by one. Where a block's d (or m) is NaN, any NaN of float16 counts as right.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.gguf_blocks import defined_q4_0, defined_q8_0, run_q4_0, run_q8_0
from lowprec_lab.graders import gguf_blocks_oracle as exact
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for

for _function in (
    exact.quantize_q8_0, exact.dequantize_blocks, exact.quantize_q4_0, exact.quantize_q4_1, exact.quantize_q5_0,
    exact.q8_0_in_c, exact.q4_0_in_c,
):  # fmt: skip
    oracle_for(_function.__name__, _function)


# --- inputs: (blocks, 32) ---------------------------------------------------------------------------------------------


def drawn(rng: np.random.Generator, *shape: int, low: int = -9, high: int = 10) -> Tensor:
    """Normal numbers; each row of a size of its own, from 2^low to 2^high."""
    sizes = np.ldexp(1.0, rng.integers(low, high, (*shape[:-1], 1)))
    return torch.from_numpy((rng.normal(size=shape) * sizes).astype(np.float32))


def heavy_tailed(rng: np.random.Generator, blocks: int) -> Tensor:
    """Student's t with 1.5 degrees of freedom: a few numbers are far larger than all others."""
    return torch.from_numpy(rng.standard_t(1.5, (blocks, 32)).astype(np.float32))


def tiny(rng: np.random.Generator, blocks: int) -> Tensor:
    """Numbers whose d is a subnormal float16, or below all of them."""
    return drawn(rng, blocks, 32, low=-30, high=-14)


def zeros(rng: np.random.Generator, blocks: int) -> Tensor:
    """Zeros of one sign, in some blocks with a single other number."""
    x = np.zeros((blocks, 32), np.float32) * rng.choice([1, -1], (blocks, 1)).astype(np.float32)
    some = rng.random(blocks) < 0.5
    x[some, rng.integers(0, 32, some.sum())] = rng.normal(size=some.sum())
    return torch.from_numpy(x)


def subnormal(rng: np.random.Generator, blocks: int) -> Tensor:
    """Subnormal float32 next to numbers that are large enough for a finite 1 / d, which may be subnormal itself."""
    x = rng.integers(-(2**23) + 1, 2**23, (blocks, 32)).astype(np.float64) * 2.0**-149
    largest = rng.uniform(1, 2, blocks) * np.ldexp(rng.choice([1.0, -1.0], blocks), rng.integers(-120, -117, blocks))
    x[np.arange(blocks), rng.integers(0, 32, blocks)] = largest
    return torch.from_numpy(x.astype(np.float32))


def whole(rng: np.random.Generator, blocks: int) -> Tensor:
    """Whole numbers, up to 8, 16 or 127 in magnitude: many of them alike, of both signs."""
    tops = rng.choice([8, 16, 127], (blocks, 1))
    return torch.from_numpy(np.rint(rng.uniform(-1, 1, (blocks, 32)) * tops).astype(np.float32)) + 0.0


def half_way(rng: np.random.Generator, blocks: int, low: int = -127, high: int = 127, ulps: int = 2) -> Tensor:
    """Numbers half-way between two codes, or up to `ulps` ulps of float32 from there; d is a power of two in half of
    the blocks. low, high: of what a block holds, in units of d; one end at least is there."""
    power = rng.random((blocks, 1)) < 0.5
    d = np.ldexp(np.where(power, 1.0, rng.uniform(1, 2, (blocks, 1))), rng.integers(-6, 7, (blocks, 1)))
    units = rng.integers(low, high, (blocks, 32)) + 0.5
    small = rng.random((blocks, 32)) < 0.3  # near 0 a float32 is finest: half-way plus an offset may be rounded up
    x = (np.where(small, rng.integers(max(low, -2), 2, (blocks, 32)) + 0.5, units) * d).astype(np.float32)
    for _ in range(ulps):
        ends = rng.choice([-np.inf, np.inf], x.shape).astype(np.float32)
        x = np.where(rng.random(x.shape) < 0.5, x, np.nextafter(x, ends))
    places = rng.permuted(np.tile(np.arange(32), (blocks, 1)), axis=1)
    np.put_along_axis(x, places[:, :1], (low * d).astype(np.float32), axis=1)
    np.put_along_axis(x, places[:, 1:2], (high * d).astype(np.float32), axis=1)
    return torch.from_numpy(x)


# What a block of each layout holds at most, in units of its d.
ENDS = {"q8_0": (-127, 127), "q4_0": (-8, 7), "q4_1": (0, 15), "q5_0": (-16, 15)}


def near_ties(rng: np.random.Generator, blocks: int, layout: str) -> Tensor:
    """Numbers half-way between two codes of a layout; Q4_0's and Q5_0's may be turned around, Q4_1's are moved."""
    x = half_way(rng, blocks, *ENDS[layout])
    if layout == "q4_1":
        return x - x.amax(1, keepdim=True) * torch.from_numpy(rng.choice([0, 0.5, 1], (blocks, 1)).astype(np.float32))
    return x * torch.from_numpy(rng.choice([-1, 1], (blocks, 1)).astype(np.float32))


def not_usable(rng: np.random.Generator) -> Tensor:
    """Blocks without a finite 1 / d: zeros, next to zero, NaN, infinities; and ordinary ones among them."""
    x = drawn(rng, 12, 32)
    x[0], x[1] = 0.0, -0.0
    x[2:4] *= 1e-41 / x[2:4].abs().amax()
    x[4, 5], x[5, 0] = math.nan, math.nan
    x[6, 7], x[7, 3], x[7, 9] = math.inf, -math.inf, 1e38
    x[8, 20:22] = torch.tensor([math.inf, -math.inf])
    x[9, 1], x[9, 30] = math.nan, math.inf
    return x[torch.from_numpy(rng.permutation(12))]


# --- comparing --------------------------------------------------------------------------------------------------------


def settled(got: object, want: Tensor, bytes_: int, halves: int = 1) -> Tensor:
    """The bytes that count as right: those of `got` where it has another NaN of float16. halves: at a block's start."""
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != torch.uint8:
        return want
    mine, right = (each.numpy().reshape(-1, bytes_) for each in (got.contiguous(), want.clone()))
    for start in range(0, 2 * halves, 2):
        here = slice(start, start + 2)
        nan = [np.isnan(exact.halves_in(rows[:, here].astype(np.int64)))[:, 0] for rows in (mine, right)]
        both = nan[0] & nan[1]
        right[both, here] = mine[both, here]
    return torch.from_numpy(right.reshape(want.shape))


def _compare(answer: Callable, case, name: str, x: Tensor, run: Callable | None = None) -> None:
    """One call of the answer, or of the scenario `run` that runs its C, next to the rule.

    Q4_0 and Q5_0 see no -0: what d is for a block of them is one thing in gguf's numpy and another in ggml's C.
    """
    x = x + 0.0 if name in ("q4_0", "q5_0") else x
    want = getattr(exact, f"quantize_{name}")(x)
    got = answer.run(run, x) if run else answer(x)
    case.same_bits(got, settled(got, want, exact.BYTES[name], 2 if name == "q4_1" else 1))


def _checks_of(exercise: str, name: str) -> None:
    """The checks that all quantizers in Python have. name: of the layout."""

    @check_for(exercise, weight=2)
    def rows_of_every_shape(answer, case):
        """One to three dimensions, transposed; rows of 32, 64 and 96 numbers of very different sizes."""
        for shape in ((32,), (3, 64), (2, 3, 96), (1, 32)):
            for _ in range(case.count(1)):
                _compare(answer, case, name, drawn(case.rng, *shape))
        _compare(answer, case, name, drawn(case.rng, 32, 3).t())

    @check_for(exercise, weight=2)
    def numbers_near_ties(answer, case):
        """Numbers half-way between two codes, and up to two ulps of float32 from there; whole numbers."""
        for _ in range(case.count(3)):
            _compare(answer, case, name, near_ties(case.rng, 8, name))
            _compare(answer, case, name, whole(case.rng, 4))

    @check_for(exercise)
    def blocks_of_every_size(answer, case):
        """Numbers with heavy tails, tiny ones whose d is hardly a float16, huge ones, subnormal ones."""
        for _ in range(case.count(2)):
            for make in _SIZES:
                _compare(answer, case, name, make(case.rng, 4))

    @check_for(exercise)
    def blocks_of_zeros_and_worse(answer, case):
        """Blocks of zeros, and next to zero; blocks with NaN, and with infinities."""
        for _ in range(case.count(2)):
            _compare(answer, case, name, zeros(case.rng, 4))
            _compare(answer, case, name, not_usable(case.rng))


def _checks_in_c(exercise: str, name: str, run: Callable, run_defined: Callable) -> None:
    """The same for an answer in C, which the scenario `run` runs: one process for each call, so few calls."""

    @check_for(exercise, weight=2)
    def blocks_of_ordinary_numbers(answer, case):
        """One block, and rows of several; numbers of very different sizes."""
        _compare(answer, case, name, drawn(case.rng, 32), run)
        for _ in range(case.count(1)):
            _compare(answer, case, name, drawn(case.rng, 16, 96), run)

    @check_for(exercise, weight=2)
    def blocks_near_ties(answer, case):
        """Numbers half-way between two codes, and up to two ulps of float32 from there; whole numbers."""
        for _ in range(case.count(1)):
            _compare(answer, case, name, torch.cat([near_ties(case.rng, 60, name), whole(case.rng, 12)]), run)

    @check_for(exercise)
    def blocks_of_every_size_in_c(answer, case):
        """Numbers with heavy tails, tiny ones whose d is hardly a float16, huge ones, subnormal ones."""
        for _ in range(case.count(1)):
            _compare(answer, case, name, torch.cat([make(case.rng, 8) for make in _SIZES]), run)

    @check_for(exercise)
    def blocks_of_zeros_and_worse_in_c(answer, case):
        """Blocks of zeros, and next to zero; blocks with NaN, and with infinities."""
        for _ in range(case.count(1)):
            _compare(answer, case, name, torch.cat([zeros(case.rng, 8), not_usable(case.rng)]), run)

    @check_for(exercise, last=True)
    def only_what_c_defines(answer, case):
        """All kinds of blocks again, compiled to stop at what C leaves undefined (where the compiler can do that)."""
        blocks = [drawn(case.rng, 4, 32), near_ties(case.rng, 4, name), not_usable(case.rng)]
        _compare(answer, case, name, torch.cat(blocks + [make(case.rng, 2) for make in _SIZES]), run_defined)


def huge(rng: np.random.Generator, blocks: int) -> Tensor:
    """Numbers whose d may be beyond float16."""
    return drawn(rng, blocks, 32, low=17, high=40)


_SIZES = (heavy_tailed, tiny, subnormal, huge)


def _refuses(exercise: str) -> None:
    @check_for(exercise)
    def rows_that_cannot_be_cut(answer, case):
        """Rows of 33, 16 and 100 numbers: ValueError."""
        for n in (33, 16, 100):
            case.raises(ValueError, answer, drawn(case.rng, 2, n))


for _name in ("q8_0", "q4_0", "q4_1", "q5_0"):
    _checks_of(f"quantize_{_name}", _name)
    _refuses(f"quantize_{_name}")


# --- 12.1 quantize_q8_0 -----------------------------------------------------------------------------------------------


@misconception("quantize_q8_0", "It takes the largest number of a block, not the largest magnitude.")
def signed_largest(x):
    return exact.quantize_q8_0(x, amax=lambda b: b.max(axis=1, keepdims=True))


@misconception("quantize_q8_0", "It sends what is half-way to the even code, as torch.round does.")
def half_to_even(x):
    return exact.quantize_q8_0(x, rounded=np.rint)


@misconception("quantize_q8_0", "It takes floor(x + 0.5): what is half-way goes up, below zero too.")
def half_upwards(x):
    return exact.quantize_q8_0(x, rounded=lambda v: np.floor(v.astype(np.float64) + 0.5))


@misconception("quantize_q8_0", "It adds 0.5 in float32, where 0.49999997 + 0.5 is 1.")
def half_is_rounded_up(x):
    half = np.float32(0.5)
    return exact.quantize_q8_0(x, rounded=lambda v: np.sign(v) * np.floor(np.abs(v.astype(np.float32)) + half))


@misconception("quantize_q8_0", "It cuts fractions off.")
def cuts_off(x):
    return exact.quantize_q8_0(x, rounded=np.trunc)


@misconception("quantize_q8_0", "It takes the reciprocal of d as float16, the one that is stored.")
def reciprocal_of_the_stored(x):
    return exact.quantize_q8_0(x, step=exact.half_step)


@misconception("quantize_q8_0", "It takes the reciprocal in float16, and of the d that is stored.")
def reciprocal_in_half(x):
    return exact.quantize_q8_0(x, step=exact.half_step, narrow=True)


@misconception("quantize_q8_0", "It divides by d: a product with the rounded reciprocal differs for some.")
def divides(x):
    return exact.quantize_q8_0(x, divide=True)


@misconception("quantize_q8_0", "Its largest code is 128, which a signed byte does not have.")
def up_to_128(x):
    return exact.quantize_q8_0(x, top=128)


@misconception("quantize_q8_0", "It stores the high byte of d first.")
def high_byte_first(x):
    return exact.quantize_q8_0(x, order=-1)


@misconception("quantize_q8_0", "It uses 1 / d where that is infinite: numbers next to zero get the largest codes.")
def infinite_reciprocal(x):
    return exact.quantize_q8_0(x, settle=False)


@misconception("quantize_q8_0", "It stores all scales of a row first, and then all codes.")
def scales_first(x):
    rows = exact.quantize_q8_0(x).reshape(*x.shape[:-1], -1, 34)
    return torch.cat([rows[..., :2].flatten(-2), rows[..., 2:].flatten(-2)], -1)


# --- 12.2 dequantize_blocks -------------------------------------------------------------------------------------------

_LAYOUTS = ("q8_0", "q4_0", "q4_1", "q5_0")


def with_halves(rng: np.random.Generator, blocks: int, layout: str, *values: float) -> Tensor:
    """Random bytes, with these numbers (or ordinary ones) as the d and m of each block."""
    x = rng.integers(0, 256, (blocks, exact.BYTES[layout]))
    found = rng.choice(values, (blocks, 2)) if values else rng.normal(size=(blocks, 2))
    x[:, :2] = exact.half_bytes(found[:, :1].astype(np.float32))
    if layout == "q4_1":
        x[:, 2:4] = exact.half_bytes(found[:, 1:].astype(np.float32))
    return torch.from_numpy(x.astype(np.uint8))


@check_for("dequantize_blocks", weight=2)
def bytes_of_every_layout(answer, case):
    """Random bytes with an ordinary d: blocks of all four layouts, in one to three dimensions."""
    for layout in _LAYOUTS:
        for _ in range(case.count(2)):
            rows = with_halves(case.rng, 6, layout)
            for x in (rows, rows[0], rows.reshape(2, 1, -1)):
                case.same_bits(answer(x, layout), exact.dequantize_blocks(x, layout))


@check_for("dequantize_blocks", weight=2)
def quantized_rows(answer, case):
    """Rows of normal numbers, quantized; transposed bytes."""
    for layout in _LAYOUTS:
        for _ in range(case.count(2)):
            x = getattr(exact, f"quantize_{layout}")(drawn(case.rng, 3, 64))
            case.same_bits(answer(x, layout), exact.dequantize_blocks(x, layout))
            x = x.t().contiguous().t()
            case.same_bits(answer(x, layout), exact.dequantize_blocks(x, layout))


@check_for("dequantize_blocks")
def scales_of_every_kind(answer, case):
    """d and m that are 0, negative, subnormal, the largest float16, infinite and NaN."""
    for layout in _LAYOUTS:
        for _ in range(case.count(2)):
            x = with_halves(case.rng, 8, layout, 0.0, -0.0, -1.5, 2.0**-24, -(2.0**-20), 65504.0, math.inf, math.nan)
            case.same_bits(answer(x, layout), exact.dequantize_blocks(x, layout))


@check_for("dequantize_blocks")
def what_is_no_block(answer, case):
    """Rows that are not made of whole blocks, and a layout that does not exist: ValueError."""
    for layout in _LAYOUTS:
        case.raises(ValueError, answer, with_halves(case.rng, 2, layout)[:, :-1], layout)
    case.raises(ValueError, answer, with_halves(case.rng, 2, "q8_0"), "q8")


@misconception("dequantize_blocks", "It takes the two nibbles of a byte for neighbours: numbers 2j and 2j + 1.")
def nibbles_are_neighbours(blocks, layout):
    return exact.dequantize_blocks(blocks, layout, nibbles_of=lambda part: exact.codes_in(part, neighbours=True))


@misconception("dequantize_blocks", "It takes the high nibbles for the first half of a block.")
def high_nibbles_first(blocks, layout):
    return exact.dequantize_blocks(blocks, layout, nibbles_of=lambda part: exact.codes_in(part, swapped=True))


@misconception("dequantize_blocks", "It takes the codes of Q8_0 for unsigned numbers.")
def unsigned_codes(blocks, layout):
    return exact.dequantize_blocks(blocks, layout, signed=False)


@misconception("dequantize_blocks", "It does not subtract 8 (Q4_0) or 16 (Q5_0): nothing is negative.")
def without_the_offset(blocks, layout):
    return exact.dequantize_blocks(blocks, layout, zeros={"q4_0": 0, "q5_0": 0})


@misconception("dequantize_blocks", "It subtracts 7.5 and 15.5, the middle of the codes: nothing is 0.")
def offset_of_a_half(blocks, layout):
    return exact.dequantize_blocks(blocks, layout, zeros={"q4_0": 7.5, "q5_0": 15.5})


@misconception("dequantize_blocks", "It subtracts 8 from the codes of Q4_1 as well, which has m for that.")
def offset_in_q4_1(blocks, layout):
    return exact.dequantize_blocks(blocks, layout, zeros={"q4_1": 8})


@misconception("dequantize_blocks", "It takes the first two bytes of Q4_1 for m, and the next two for d.")
def m_before_d(blocks, layout):
    return exact.dequantize_blocks(blocks, layout, swap=True)


@misconception("dequantize_blocks", "It reads the fifth bits of a byte from its highest bit downwards.")
def fifth_bits_from_above(blocks, layout):
    return exact.dequantize_blocks(blocks, layout, fifths_of=lambda part: exact.bits_in(part, from_above=True))


@misconception("dequantize_blocks", "It takes fifth bits 2j and 2j + 1 for the two nibbles of byte j.")
def fifth_bits_in_pairs(blocks, layout):
    places = np.concatenate([np.arange(0, 32, 2), np.arange(1, 32, 2)])
    return exact.dequantize_blocks(blocks, layout, fifths_of=lambda part: exact.bits_in(part, order=places))


@misconception("dequantize_blocks", "It reads the high byte of d and m first.")
def reads_the_high_byte_first(blocks, layout):
    return exact.dequantize_blocks(blocks, layout, half_of=lambda part: exact.halves_in(part, order=-1))


@misconception("dequantize_blocks", "It subtracts 8 or 16 from bytes, which have no sign: 7 - 8 is 255.")
def subtracts_in_bytes(blocks, layout):
    return exact.dequantize_blocks(blocks, layout, wrap=True)


# --- 12.3 quantize_q4_0 -----------------------------------------------------------------------------------------------


def magnitude(blocks: np.ndarray) -> np.ndarray:
    """The largest magnitude, without its sign."""
    return np.abs(exact.first_largest(blocks))


def last_largest(blocks: np.ndarray) -> np.ndarray:
    """The last of several numbers of the largest magnitude."""
    return exact.first_largest(blocks[:, ::-1])


def wide(scaled: np.ndarray, offset: float, top: int | None) -> np.ndarray:
    return exact.cut(scaled, offset, top, wide=True)


@misconception(
    "quantize_q4_0", "It drops the sign of the largest number: where that is positive, d has the wrong sign."
)
def without_its_sign(x):
    return exact.quantize_q4_0(x, pick=lambda b: -magnitude(b))


@misconception("quantize_q4_0", "It divides by 8 instead of -8: the largest number gets code 16, cut to 15.")
def by_plus_8(x):
    return exact.quantize_q4_0(x, over=8)


@misconception("quantize_q4_0", "It divides the largest magnitude by 7: code 0 is never used.")
def by_7(x):
    return exact.quantize_q4_0(x, pick=magnitude, over=7)


@misconception("quantize_q4_0", "It puts neighbours into one byte: numbers 2j and 2j + 1.")
def packs_neighbours(x):
    return exact.quantize_q4_0(x, pack=lambda codes: exact.nibbles(codes, neighbours=True))


@misconception("quantize_q4_0", "It puts the first half of a block into the high nibbles.")
def first_half_is_high(x):
    return exact.quantize_q4_0(x, pack=lambda codes: exact.nibbles(codes, swapped=True))


@misconception("quantize_q4_0", "It takes the reciprocal of d as float16, the one that is stored.")
def q4_0_of_the_stored(x):
    return exact.quantize_q4_0(x, step=exact.half_step, round_=exact.wrapped, pack=exact.spilled)


@misconception("quantize_q4_0", "It rounds to nearest and adds 8: what is half-way goes to the even code.")
def rounds_to_even(x):
    return exact.quantize_q4_0(x, round_=exact.even)


@misconception("quantize_q4_0", "It does not stop at 15: 16 does not fit into a nibble, and becomes 0.")
def runs_over(x):
    return exact.quantize_q4_0(x, top=None)


@misconception("quantize_q4_0", "Of several numbers of the largest magnitude it takes the last one.")
def takes_the_last(x):
    return exact.quantize_q4_0(x, pick=last_largest)


@misconception("quantize_q4_0", "It adds 8.5 in float64: in float32 the sum may be rounded up to the next code.")
def sum_in_float64(x):
    return exact.quantize_q4_0(x, round_=wide)


@misconception("quantize_q4_0", "It stores +0 as the d of zeros: 0 / -8 is -0, another float16.")
def plus_zero(x):
    return exact.quantize_q4_0(x, change=lambda d: np.where(d == 0, np.float32(0), d))


@misconception("quantize_q4_0", "It uses 1 / d where that is infinite: numbers next to zero get codes 0 and 15.")
def q4_0_infinite_reciprocal(x):
    return exact.quantize_q4_0(x, settle=False)


@misconception(
    "quantize_q4_0", "It divides the largest magnitude by -8: where that number is negative, d has the wrong sign."
)
def magnitude_by_minus_8(x):
    return exact.quantize_q4_0(x, pick=magnitude)


@misconception("quantize_q4_0", "It does not stop at 15: bit 4 of a 16 falls into the nibble of another number.")
def spills_over(x):
    return exact.quantize_q4_0(x, top=None, pack=exact.spilled)


@misconception("quantize_q4_0", "Where there is no 1 / d it stores codes of 0, which stand for -8 d, and not of 8.")
def code_0_for_0(x):
    return exact.quantize_q4_0(x, empty=0)


@misconception("quantize_q4_0", "It divides by d: a product with the rounded reciprocal differs for some.")
def q4_0_divides(x):
    return exact.quantize_q4_0(x, divide=True)


@misconception("quantize_q4_0", "It stores the high byte of d first.")
def q4_0_high_byte_first(x):
    return exact.quantize_q4_0(x, order=-1)


# --- 12.4 quantize_q4_1 -----------------------------------------------------------------------------------------------


@check_for("quantize_q4_1")
def numbers_on_one_side_of_zero(answer, case):
    """Numbers that are all positive, or all negative, near zero and far from it."""
    for away in (0.0, 3.0, -1.0):
        for sign in (1, -1):
            for _ in range(case.count(1)):
                _compare(answer, case, "q4_1", sign * (drawn(case.rng, 4, 32, low=-3, high=3).abs() + 2.0**away))


@misconception("quantize_q4_1", "It divides the range by 16, the number of codes: there are 15 steps between them.")
def sixteen_steps(x):
    return exact.quantize_q4_1(x, levels=16)


@misconception("quantize_q4_1", "It spans from -amax to amax, whatever the smallest and the largest number are.")
def symmetric_range(x):
    return exact.quantize_q4_1(x, ends=lambda b: (-magnitude(b), magnitude(b)))


@misconception("quantize_q4_1", "It spans from 0 where no number is negative: m is the smallest number.")
def range_with_zero(x):
    zero = np.float32(0)
    return exact.quantize_q4_1(
        x, ends=lambda b: (np.minimum(b.min(axis=1, keepdims=True), zero), b.max(axis=1, keepdims=True))
    )


@misconception("quantize_q4_1", "It subtracts m as float16, the one that is stored.")
def subtracts_the_stored(x):
    return exact.quantize_q4_1(x, origin=exact.half_step)


@misconception("quantize_q4_1", "It takes the reciprocal of d as float16, the one that is stored.")
def q4_1_of_the_stored(x):
    return exact.quantize_q4_1(x, step=exact.half_step)


@misconception("quantize_q4_1", "It stores m before d.")
def stores_m_first(x):
    return exact.quantize_q4_1(x, parts=-1)


@misconception("quantize_q4_1", "It scales x and m by themselves, and subtracts afterwards: it rounds once more.")
def subtracts_late(x):
    return exact.quantize_q4_1(x, late=True)


@misconception("quantize_q4_1", "It sends what is half-way to the even code.")
def q4_1_to_even(x):
    return exact.quantize_q4_1(x, round_=exact.even)


@misconception("quantize_q4_1", "It puts neighbours into one byte: numbers 2j and 2j + 1.")
def q4_1_packs_neighbours(x):
    return exact.quantize_q4_1(x, pack=lambda codes: exact.nibbles(codes, neighbours=True))


@misconception("quantize_q4_1", "It divides by d: a product with the rounded reciprocal differs for some.")
def q4_1_divides(x):
    return exact.quantize_q4_1(x, divide=True)


@misconception("quantize_q4_1", "It divides the range by 16, and lets bit 4 of code 16 fall into another nibble.")
def sixteen_steps_spilled(x):
    return exact.quantize_q4_1(x, levels=16, top=16, pack=exact.spilled)


@misconception(
    "quantize_q4_1",
    "It puts m into float16 first, and takes d and the codes from that: some are below 0, and run over.",
)
def from_the_stored_m(x):
    def ends(blocks):
        return exact.half_step(blocks.min(axis=1, keepdims=True)), blocks.max(axis=1, keepdims=True)

    return exact.quantize_q4_1(x, ends=ends, round_=exact.wrapped, pack=exact.spilled)


@misconception(
    "quantize_q4_1", "It subtracts m as float16, the one that is stored: some codes are below 0, and run over."
)
def subtracts_the_stored_and_wraps(x):
    return exact.quantize_q4_1(x, origin=exact.half_step, round_=exact.wrapped, pack=exact.spilled)


# --- 12.5 quantize_q5_0 -----------------------------------------------------------------------------------------------


def with_fifths(nibbles: Callable = exact.nibbles, **changed: object) -> Callable:
    """A way to pack codes of five bits."""
    return lambda codes: np.concatenate([exact.fifths(codes, **changed), nibbles(codes)], axis=1)


@misconception(
    "quantize_q5_0", "It drops the sign of the largest number: where that is positive, d has the wrong sign."
)
def q5_0_without_its_sign(x):
    return exact.quantize_q5_0(x, pick=lambda b: -magnitude(b))


@misconception("quantize_q5_0", "It has the step of Q4_0: half of the codes are never used.")
def step_of_q4_0(x):
    return exact.quantize_q5_0(x, over=-8)


@misconception("quantize_q5_0", "It stores the first fifth bit of eight in the highest bit of a byte.")
def fifths_from_above(x):
    return exact.quantize_q5_0(x, pack=with_fifths(from_above=True))


@misconception("quantize_q5_0", "It stores fifth bits in the order of the nibbles: those of j and j + 16 side by side.")
def fifths_in_pairs(x):
    return exact.quantize_q5_0(x, pack=with_fifths(order=np.arange(32).reshape(2, 16).T.flatten()))


@misconception("quantize_q5_0", "It stores the fifth bits after the nibbles.")
def fifths_last(x):
    return exact.quantize_q5_0(
        x, pack=lambda codes: np.concatenate([exact.nibbles(codes), exact.fifths(codes)], axis=1)
    )


@misconception("quantize_q5_0", "It does not stop at 31: 32 has six bits, and becomes 0.")
def q5_0_runs_over(x):
    return exact.quantize_q5_0(x, top=None)


@misconception("quantize_q5_0", "It takes the reciprocal of d as float16, the one that is stored.")
def q5_0_of_the_stored(x):
    return exact.quantize_q5_0(x, step=exact.half_step, round_=exact.wrapped, pack=exact.spilled_from_five_bits)


@misconception("quantize_q5_0", "It puts the nibbles of neighbours into one byte: numbers 2j and 2j + 1.")
def q5_0_packs_neighbours(x):
    return exact.quantize_q5_0(x, pack=with_fifths(lambda codes: exact.nibbles(codes, neighbours=True)))


@misconception("quantize_q5_0", "It rounds to nearest and adds 16: what is half-way goes to the even code.")
def q5_0_to_even(x):
    return exact.quantize_q5_0(x, round_=exact.even)


@misconception("quantize_q5_0", "It stores the last eight fifth bits first: the high byte of the four.")
def fifths_high_byte_first(x):
    return exact.quantize_q5_0(
        x, pack=lambda codes: np.concatenate([exact.fifths(codes)[:, ::-1], exact.nibbles(codes)], axis=1)
    )


@misconception(
    "quantize_q5_0", "It divides the largest magnitude by -16: where that number is negative, d has the wrong sign."
)
def magnitude_by_minus_16(x):
    return exact.quantize_q5_0(x, pick=magnitude)


@misconception("quantize_q5_0", "Where there is no 1 / d it stores codes of 0, which stand for -16 d, and not of 16.")
def q5_0_code_0_for_0(x):
    return exact.quantize_q5_0(x, empty=0)


@misconception("quantize_q5_0", "It divides by d: a product with the rounded reciprocal differs for some.")
def q5_0_divides(x):
    return exact.quantize_q5_0(x, divide=True)


@misconception("quantize_q5_0", "It stores the high byte of d first.")
def q5_0_high_byte_first(x):
    return exact.quantize_q5_0(x, order=-1)


# --- 12.6 and 12.7, in C ----------------------------------------------------------------------------------------------

_checks_in_c("q8_0_in_c", "q8_0", run_q8_0, defined_q8_0)
_checks_in_c("q4_0_in_c", "q4_0", run_q4_0, defined_q4_0)

# The float32 that the 16 bits of a float16 stand for.
_HALF_VALUE = """
static float half_value(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float size = exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
    if (exponent == 31)
        size = mantissa ? NAN : INFINITY;
    return bits & 0x8000 ? -size : size;
}
"""
_STORED = ("id = 1 / d;", "id = 1 / half_value(half_bits(d));")
_USABLE = "isfinite(d) && isfinite(id) ? in[j] * id : 0"


def changed(text: str, *changes: tuple[str, str]) -> str:
    """The C code with these pieces of it replaced."""
    for old, new in changes:
        if old not in text:
            raise ValueError(f"there is no {old!r} to change")
        text = text.replace(old, new)
    return text


@misconception("q8_0_in_c", "It takes the largest number of a block, not the largest magnitude.")
def c_signed_largest():
    return changed(exact.Q8_0_IN_C, ("float size = fabsf(in[j])", "float size = in[j]"), ("amax = 0;", "amax = in[0];"))


@misconception("q8_0_in_c", "It rounds with rintf: what is half-way goes to the even code.")
def c_rint():
    return changed(exact.Q8_0_IN_C, ("roundf(v)", "rintf(v)"))


@misconception("q8_0_in_c", "It converts to int without rounding: that cuts fractions off.")
def c_truncates():
    return changed(exact.Q8_0_IN_C, ("(int)roundf(v)", "(int)v"))


@misconception("q8_0_in_c", "It takes floorf(v + 0.5f): what is half-way goes up, below zero too.")
def c_half_upwards():
    return changed(exact.Q8_0_IN_C, ("roundf(v)", "floor(v + 0.5)"))


@misconception("q8_0_in_c", "It adds 0.5f before it cuts, and 0.49999997f + 0.5f is 1.")
def c_half_is_rounded_up():
    return changed(exact.Q8_0_IN_C, ("(int)roundf(v)", "(int)(v + copysignf(0.5f, v))"))


@misconception("q8_0_in_c", "It takes the reciprocal of d as float16, the one that is stored.")
def c_of_the_stored():
    return _HALF_VALUE + changed(exact.Q8_0_IN_C, _STORED)


@misconception("q8_0_in_c", "It works in double: 1.0 / d is one, so the product is not rounded to float.")
def c_in_double():
    product = ("in[j] * id : 0", "in[j] * (1.0 / d) : 0")
    return changed(exact.Q8_0_IN_C, product, ("float v", "double v"), ("roundf(v)", "round(v)"))


@misconception("q8_0_in_c", "It multiplies in double, as x * 1.0 * id does: the product is not rounded to float.")
def c_double_product():
    product = ("in[j] * id : 0", "in[j] * 1.0 * id : 0")
    return changed(exact.Q8_0_IN_C, product, ("float v", "double v"), ("roundf(v)", "round(v)"))


@misconception("q8_0_in_c", "It divides by d, or takes a double for 1 / d: a product with a float differs for some.")
def c_divides():
    return changed(exact.Q8_0_IN_C, ("in[j] * id : 0", "in[j] / d : 0"))


@misconception("q8_0_in_c", "It stores the high byte of d first.")
def c_high_byte_first():
    return changed(exact.Q8_0_IN_C, ("to[0]", "to[9]"), ("to[1]", "to[0]"), ("to[9]", "to[1]"))


@misconception("q8_0_in_c", "It stores the upper half of d's float32 bits, a bfloat16, and not a float16.")
def c_stores_a_bfloat16():
    upper = "uint32_t bits;\n        memcpy(&bits, &d, 4);\n        uint16_t half = (uint16_t)(bits >> 16);"
    return changed(exact.Q8_0_IN_C, ("uint16_t half = half_bits(d);", upper))


@misconception("q8_0_in_c", "It clamps codes and does not look at 1 / d: zeros become NaN, and any code.")
def c_clamps_instead():
    return changed(exact.Q8_0_IN_C, (_USABLE, "fminf(fmaxf(in[j] * id, -127), 127)"))


@misconception("q8_0_in_c", "It begins each block with the amax of the one before.")
def c_keeps_amax():
    return changed(exact.Q8_0_IN_C, ("        amax = 0;\n", ""), ("float amax;", "float amax = 0;"))


@misconception("q8_0_in_c", "It overlooks NaN: every comparison with one is false.")
def c_overlooks_nan():
    return changed(exact.Q8_0_IN_C, (" || isnan(size)", ""), ("roundf(v)", "(isnan(v) ? 0 : roundf(v))"))


@misconception("q8_0_in_c", "It reads a float too far: a loop, over blocks or in a block, has a turn too many.")
def c_one_block_too_far():
    return changed(exact.Q8_0_IN_C, ("b < blocks", "b <= blocks"))


@misconception("q8_0_in_c", "It begins a block 32 bytes after the last one: d is written over its last two codes.")
def c_32_bytes_on():
    return changed(exact.Q8_0_IN_C, ("out + 34 * b", "out + 32 * b"))


@misconception("q4_0_in_c", "It drops the sign of the largest number: where that is positive, d has the wrong sign.")
def c_without_its_sign():
    return changed(exact.Q4_0_IN_C, ("most / -8", "fabsf(most) / 8"))


@misconception("q4_0_in_c", "It divides by 8 instead of -8: the largest number gets code 16, cut to 15.")
def c_by_plus_8():
    return changed(exact.Q4_0_IN_C, ("most / -8", "most / 8"))


@misconception(
    "q4_0_in_c", "It divides the largest magnitude by -8: where that number is negative, d has the wrong sign."
)
def c_magnitude_by_minus_8():
    return changed(exact.Q4_0_IN_C, ("most / -8", "fabsf(most) / -8"))


@misconception("q4_0_in_c", "It overlooks NaN: every comparison with one is false.")
def c_q4_0_overlooks_nan():
    return changed(exact.Q4_0_IN_C, (" || isnan(in[j])", ""), ("most = in[0]", "most = 0"), ("int j = 1", "int j = 0"))


@misconception("q4_0_in_c", "It divides by d, or takes a double for 1 / d: a product with a float differs for some.")
def c_q4_0_divides():
    return changed(exact.Q4_0_IN_C, ("in[j] * id : 0", "in[j] / d : 0"))


@misconception("q4_0_in_c", "It puts neighbours into one byte: numbers 2j and 2j + 1.")
def c_packs_neighbours():
    return changed(exact.Q4_0_IN_C, ("code[j] | code[j + 16] << 4", "code[2 * j] | code[2 * j + 1] << 4"))


@misconception("q4_0_in_c", "It puts the first half of a block into the high nibbles.")
def c_first_half_is_high():
    return changed(exact.Q4_0_IN_C, ("code[j] | code[j + 16] << 4", "code[j] << 4 | code[j + 16]"))


@misconception("q4_0_in_c", "It does not stop at 15: bit 4 of a 16 falls into the nibble of another number.")
def c_runs_over():
    return changed(exact.Q4_0_IN_C, ("sum < 15 ? (int)sum : 15", "(int)sum"))


@misconception("q4_0_in_c", "It takes the reciprocal of d as float16, the one that is stored.")
def c_q4_0_of_the_stored():
    return _HALF_VALUE + changed(exact.Q4_0_IN_C, _STORED)


@misconception("q4_0_in_c", "It adds 8.5, a double: the sum is not rounded to float.")
def c_adds_a_double():
    return changed(exact.Q4_0_IN_C, ("float sum = v + 8.5f", "double sum = v + 8.5"))


@misconception("q4_0_in_c", "It uses fmaf: the product is not rounded before 8.5 is added.")
def c_fused():
    product = "isfinite(d) && isfinite(id) ? fmaf(in[j], id, 8.5f) : 8.5f"
    return changed(exact.Q4_0_IN_C, (_USABLE, product), ("v + 8.5f", "v"))


@misconception("q4_0_in_c", "Of several numbers of the largest magnitude it takes the last one: >= instead of >.")
def c_takes_the_last():
    return changed(exact.Q4_0_IN_C, ("fabsf(in[j]) > fabsf(most)", "fabsf(in[j]) >= fabsf(most)"))


@misconception("q4_0_in_c", "It rounds with rintf and adds 8: what is half-way goes to the even code.")
def c_rounds_to_even():
    return changed(exact.Q4_0_IN_C, ("float sum = v + 8.5f", "float sum = rintf(v) + 8"))


@misconception("q4_0_in_c", "It does not look at 1 / d: zeros times infinity are NaN, and get code 0 instead of 8.")
def c_zeros_are_nan():
    return changed(exact.Q4_0_IN_C, (_USABLE, "in[j] * id"), ("sum < 15 ?", "!(sum >= 0) ? 0 : sum < 15 ?"))


@misconception("q4_0_in_c", "It stores the high byte of d first.")
def c_q4_0_high_byte_first():
    return changed(exact.Q4_0_IN_C, ("to[0]", "to[9]"), ("to[1]", "to[0]"), ("to[9]", "to[1]"))


@misconception("q4_0_in_c", "It writes a code to a byte of its own: 32 bytes where there is room for 16.")
def c_does_not_pack():
    return changed(exact.Q4_0_IN_C, ("j < 16", "j < 32"), ("(code[j] | code[j + 16] << 4)", "code[j]"))


# --- reading questions ------------------------------------------------------------------------------------------------

question_for(
    "12.A",
    -3.0,
    "-3: a is 2.5, its floor 2, and floor(2 * 0.5) adds 1. The sign comes back at the end: half-way goes away from 0.",
    "a is 2.5. What is floor(2 * (2.5 - 2))?",
    {-2.0: "That is np.round, which takes the even one.", 3.0: "What does np.sign do at the end?"},
)
question_for(
    "12.B",
    False,
    "id is worked out first, and d becomes a float16 only afterwards.",
    "In which line does d become a float16? And in which one is 1 / d?",
)
question_for(
    "12.C",
    0x8000,
    "0x8000, which is -0: the largest number is 0, and 0 / -8 is -0.",
    "What is 0 / -8 in floating point? It has a sign.",
    {0: "That is +0. The 0 is divided by a negative number."},
)
question_for(
    "12.D",
    2.0,
    "2: 1 > NaN is false, so NaN is taken; NaN > 2 is false, so 2 is taken, and the NaN is forgotten.",
    "Go through the first three numbers: amax is 0, then 1, then?",
    {1.0: "1 > NaN is false. What does MAX give then?", 0.5: "2 > 0.5 is true, so 2 stays."},
)
question_for(
    "12.E",
    452,
    "452: 32 * 452 = 14464. In blocks of 256 it would be 56.5.",
    "14464 / 32.",
    {56: "That is how many blocks of 256 there would be, and a half."},
)
question_for(
    "12.F",
    ("q5_0", "q4_k", "f16"),
    "14464 is a multiple of 32 and not of 256; 4096 is one of 256; 65 is neither.",
    "Ask for 256 first, then for 32. It takes three names of types.",
    {("q5_0", "q5_0", "f16"): "4096 = 16 * 256.", ("q4_k", "q5_0", "f16"): "Rows have 14464 numbers in up.weight."},
)


# --- blocks of 256 (12.8 and on) --------------------------------------------------------------------------------------

from lowprec_lab.graders import gguf_kquants  # noqa: E402, F401
