"""Checks and known misconceptions of chapter 12's blocks of 256, and of its file.

Numbers are compared bit for bit, but for the sign of a zero. A quantizer is judged by the numbers that its bytes stand
for: their error in each group next to `plain_bound`, and over a whole tensor next to that of the oracle's own search,
which gets 0.0714 on normal numbers. A file is taken apart, and compared part by part.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.gguf_blocks import plain_bound, quantized, sample, written
from lowprec_lab.graders import gguf_kquants_oracle as exact
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for

oracle_for("dequantize_q4_k", exact.dequantize_q4_k)
oracle_for("quantize_q4_k", exact.quantize_q4_k)
oracle_for("dequantize_q6_k", exact.dequantize_q6_k)
oracle_for("write_gguf", exact.write_gguf)

_MARGIN = 1.036  # 0.074 is what the contract allows on normal numbers, and 0.0714 what the oracle has there
_MARGIN_OF_GROUPS = 1.05  # between good searches 1.02 was seen, and 1.08 with codes of scales that are not stored


# --- inputs -----------------------------------------------------------------------------------------------------------


def random_bytes(rng: np.random.Generator, *shape: int, size: int, halves: tuple[int, ...]) -> Tensor:
    """Blocks of `size` random bytes, (*shape[:-1], shape[-1] * size), whose float16 at bytes `halves` are finite."""
    blocks = rng.integers(0, 256, (*shape, size)).astype(np.uint8)
    for place in halves:
        numbers = (rng.normal(size=shape) * np.ldexp(1.0, rng.integers(-12, 4, shape))).astype("<f2")
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(*shape[:-1], shape[-1] * size))


def extreme_bytes(rng: np.random.Generator, size: int, halves: tuple[int, ...]) -> Tensor:
    """Blocks whose float16 are zeros, subnormal, the largest, infinite or NaN."""
    odd = np.array([0, 0x8000, 1, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00], dtype="<u2").view(np.uint8)
    odd = odd.reshape(-1, 2)
    blocks = rng.integers(0, 256, (len(odd), size)).astype(np.uint8)
    for place in halves:
        blocks[:, place : place + 2] = odd[rng.permutation(len(odd))] if place != halves[0] else odd
    return torch.from_numpy(blocks)


def _settled_zeros(got: object) -> object:
    fine = isinstance(got, Tensor) and got.dtype == torch.float32
    return got + 0.0 if fine else got


def _compare_numbers(answer, case, blocks: Tensor, right) -> None:
    case.same_bits(_settled_zeros(answer(blocks)), _settled_zeros(right(blocks)))


# --- 12.8 dequantize_q4_k ---------------------------------------------------------------------------------------------


@check_for("dequantize_q4_k", weight=2)
def blocks_of_random_bytes(answer, case):
    """One to three dimensions of one and more blocks: any bytes, any finite d and dmin."""
    for shape in ((1,), (3,), (2, 2), (2, 1, 2)):
        for _ in range(case.count(1)):
            blocks = random_bytes(case.rng, *shape, size=exact.Q4_K, halves=(0, 2))
            _compare_numbers(answer, case, blocks, exact.dequantize_q4_k)


@check_for("dequantize_q4_k")
def one_field_at_a_time(answer, case):
    """Blocks in which one scale and one min are not 0, of a group below 4 and of one from 4 on."""
    for _ in range(case.count(1)):
        for group in range(8):
            bits = np.zeros((1, 8 * exact.Q4_K), np.int64)
            exact.put(bits, exact.run_of(np.array([0]), 16), np.array([[0x3C00]]))  # d is 1
            exact.put(bits, exact.run_of(np.array([16]), 16), np.array([[0x3800]]))  # dmin is 1/2
            for places in (exact.SCALES, exact.MINS):
                exact.put(bits, places[group : group + 1], case.rng.integers(1, 64, (1, 1)))
            exact.put(bits, exact.CODES, case.rng.integers(0, 16, (1, 256)))
            blocks = torch.from_numpy(np.packbits(bits.astype(np.uint8), axis=1, bitorder="little"))
            _compare_numbers(answer, case, blocks, exact.dequantize_q4_k)


@check_for("dequantize_q4_k")
def extreme_scales(answer, case):
    """d and dmin that are 0, subnormal, the largest, infinite or NaN; no blocks at all; bytes laid out oddly."""
    for _ in range(case.count(1)):
        _compare_numbers(answer, case, extreme_bytes(case.rng, exact.Q4_K, (0, 2)), exact.dequantize_q4_k)
        _compare_numbers(answer, case, torch.zeros(0, exact.Q4_K, dtype=torch.uint8), exact.dequantize_q4_k)
        blocks = random_bytes(case.rng, 3, 2, size=exact.Q4_K, halves=(0, 2))
        _compare_numbers(answer, case, blocks.t().contiguous().t(), exact.dequantize_q4_k)


@misconception("dequantize_q4_k", "It adds the min: it is stored with its sign turned.")
def adds_the_min(blocks):
    return exact.dequantize_q4_k(blocks, sign=1.0)


@misconception(
    "dequantize_q4_k", "It takes the two nibbles of a byte for neighbours: numbers 2i and 2i + 1 of a block."
)
def neighbours_in_a_byte(blocks):
    return exact.dequantize_q4_k(blocks, codes=exact.run_of(8 * 16 + 4 * np.arange(256), 4))


@misconception("dequantize_q4_k", "It takes 16 bytes for each group, low nibbles first, as in Q4_0.")
def own_bytes_for_each_group(blocks):
    group, place = np.arange(256) // 32, np.arange(256) % 32
    places = 8 * (16 + 16 * group + place % 16) + 4 * (place // 16)
    return exact.dequantize_q4_k(blocks, codes=exact.run_of(places, 4))


@misconception(
    "dequantize_q4_k",
    "It takes the low nibbles of all 128 bytes for the first half of a block, and the high ones for the other.",
)
def halves_of_the_block(blocks):
    places = 8 * (16 + np.arange(256) % 128) + 4 * (np.arange(256) // 128)
    return exact.dequantize_q4_k(blocks, codes=exact.run_of(places, 4))


@misconception("dequantize_q4_k", "It leaves out the two high bits of the scales and mins of groups 4 to 7.")
def without_high_bits(blocks):
    def low(places):
        return np.concatenate([places[:4], np.concatenate([places[4:, :4], np.full((4, 2), -1)], axis=1)])

    return exact.dequantize_q4_k(blocks, low(exact.SCALES), low(exact.MINS))


@misconception("dequantize_q4_k", "It reads the 12 bytes as sixteen numbers of 6 bits, one after the other.")
def six_bits_in_a_row(blocks):
    first = exact.run_of(32 + 6 * np.arange(16), 6)
    return exact.dequantize_q4_k(blocks, first[:8], first[8:])


@misconception(
    "dequantize_q4_k",
    "In the last four of the 12 bytes it takes the scale from the high bits, and the min from the low ones.",
)
def exchanges_low_and_high(blocks):
    def exchanged(places, other):
        return np.concatenate([places[:4], np.concatenate([other[4:, :4], places[4:, 4:]], axis=1)])

    return exact.dequantize_q4_k(blocks, exchanged(exact.SCALES, exact.MINS), exchanged(exact.MINS, exact.SCALES))


@misconception("dequantize_q4_k", "It takes 8 from every code, as Q4_0 does.")
def takes_eight_off(blocks):
    return exact.dequantize_q4_k(blocks, zero=8)


@misconception("dequantize_q4_k", "It multiplies the mins by d, too: dmin is not used.")
def one_d_for_both(blocks):
    return exact.dequantize_q4_k(blocks, one_d=True)


@misconception("dequantize_q4_k", "It leaves the two high bits of scales and mins of groups 4 to 7 at bits 6 and 7.")
def high_bits_too_high(blocks):
    def kept(places):
        nothing = np.full((4, 2), -1)
        later = np.concatenate([places[4:, :4], nothing, places[4:, 4:]], axis=1)
        return np.concatenate([np.concatenate([places[:4], nothing], axis=1), later])

    return exact.dequantize_q4_k(blocks, kept(exact.SCALES), kept(exact.MINS))


@misconception("dequantize_q4_k", "It puts the two high bits of scales and mins of groups 4 to 7 over their low ones.")
def high_bits_too_low(blocks):
    def joined(bits, places):
        later = exact.taken(bits, places[4:, :4]) | exact.taken(bits, places[4:, 4:])
        return np.concatenate([exact.taken(bits, places[:4]), later], axis=1)

    return exact.dequantize_q4_k(blocks, fields=joined)


# --- 12.9 quantize_q4_k -----------------------------------------------------------------------------------------------


def _numbers_of(got: object, x: Tensor) -> Tensor | None:
    """What an answer's bytes stand for, (groups of 32); None where they are no bytes of this size."""
    shape = (*x.shape[:-1], x.shape[-1] // 256 * exact.Q4_K)
    if type(got) is not Tensor or got.dtype != torch.uint8 or got.shape != shape:
        return None
    return exact.dequantize_q4_k(got.detach()).double().reshape(-1, 32)


def _size(errors: Tensor) -> Tensor:
    return errors.square().mean(-1).sqrt()


def _rounded(value: float) -> float:
    """Two digits: what a right and another right float64 would not tell apart."""
    return float(f"{value:.2g}")


def _as_error(value: object) -> str:
    return f"root mean square error {float(value):.2g}"


def _as_share(value: object) -> str:
    return f"error {float(value):.3g} of the size of the numbers"


def _compare_groups(answer, case, x: Tensor) -> None:
    """The error of each group, next to the plain way's bound. What is within it counts as equal."""
    got, bounds = answer(x), plain_bound(x).flatten(-2)  # (..., groups of a row)
    values = _numbers_of(got, x)
    if values is None:
        case.same_bits(got, exact.quantize_q4_k(x))
        return
    errors = _size(values - x.double().reshape(-1, 32)).tolist()
    pairs = [(e, b) for e, b in zip(errors, bounds.flatten().tolist(), strict=True)]
    kept = [_rounded(bound if exact.is_close_to(error, bound) else error) for error, bound in pairs]
    mine, allowed = (
        torch.tensor(each, dtype=torch.float64).reshape(bounds.shape)
        for each in (kept, [_rounded(bound) for _, bound in pairs])
    )
    case.same_bits(mine, allowed, show=_as_error, right="at most")


def _compare_shares(answer, case, kind: str) -> None:
    """The error as a share of the size, next to the oracle's search. What is not worse counts as equal."""
    seed = int(case.rng.integers(0, 2**31))
    groups, x = kind == "groups of many sizes", sample(kind, seed)
    got, right = answer.run(quantized, kind, seed), exact.quantize_q4_k(x)
    values = _numbers_of(got, x)
    if values is None:
        case.same_bits(got, right)
        return
    wide = x.double().reshape(-1, 32) if groups else x.double().reshape(1, -1)
    mine, best = (
        float(_size(_size(each.reshape(wide.shape) - wide) / _size(wide))) for each in (values, _numbers_of(right, x))
    )
    bound = (_MARGIN_OF_GROUPS if groups else _MARGIN) * best
    allowed = float(f"{bound:.3g}")
    case.same_bits(
        allowed if exact.is_close_to(mine, bound) else float(f"{mine:.3g}"), allowed, show=_as_share, right="at most"
    )


def _single(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


@check_for("quantize_q4_k", weight=3, by="error")
def error_of_whole_tensors(answer, case):
    """Normal numbers, numbers with long tails, numbers that are not around 0: the error of 24 blocks at once."""
    for _ in range(case.count(1)):
        for kind in ("normal", "long tails", "around 3", "uniform", "from 1 to 2"):
            _compare_shares(answer, case, kind)


@check_for("quantize_q4_k", weight=2, by="error")
def error_of_each_group(answer, case):
    """Groups of very different sizes in one block, single large numbers, groups of one sign and of one number."""
    for _ in range(case.count(1)):
        for _ in range(3):
            _compare_shares(answer, case, "groups of many sizes")
        sizes = np.ldexp(1.0, case.rng.integers(-9, 10, (4, 8, 1)))
        _compare_groups(answer, case, _single(case.rng.normal(size=(4, 8, 32)) * sizes).reshape(2, 512))
        for outlier in (100.0, -1000.0):
            x = case.rng.normal(size=(2, 256))
            x[np.arange(2), case.rng.integers(0, 256, 2)] = outlier
            _compare_groups(answer, case, _single(x))
        above = np.abs(case.rng.normal(size=(8, 32))) + 1
        some = np.where(np.arange(8)[:, None] % 2, above, -above)
        same = np.repeat(case.rng.normal(size=(8, 1)), 32, axis=1)
        for groups in (above, -above, some, same):
            _compare_groups(answer, case, _single(groups).reshape(256))


@check_for("quantize_q4_k", by="error")
def zeros_tiny_and_huge_numbers(answer, case):
    """Zeros, which stay zeros; subnormal and tiny numbers; numbers whose d would be beyond float16: all are finite."""
    zeros = torch.zeros(1, 256)
    _compare_exactly(answer, case, zeros, zeros)
    for power in (-149, -140, -100, -24, -16):
        x = _single(np.ldexp(np.rint(case.rng.uniform(-64, 64, (1, 256))), power))
        _compare_groups(answer, case, x)
    for size in (1e9, 1e30, 3e38):
        x = _single(case.rng.choice([-1.0, 1.0], (1, 256)) * size)
        got = answer(x)
        values = _numbers_of(got, x)
        if values is None:
            case.same_bits(got, exact.quantize_q4_k(x))
            continue
        signs = values.sign().masked_fill(~values.isfinite(), math.nan)
        case.same_bits(signs.reshape(x.shape), x.double().sign(), show=_as_sign)
    half_zeros = _single(case.rng.normal(size=(1, 256)))
    half_zeros[:, 64:128] = 0.0
    _compare_groups(answer, case, half_zeros)


def _as_sign(value: object) -> str:
    value = float(value)
    return "not finite" if math.isnan(value) else {0.0: "0", 1.0: "above 0", -1.0: "below 0"}[value]


def _compare_exactly(answer, case, x: Tensor, want: Tensor) -> None:
    got = answer(x)
    values = _numbers_of(got, x)
    if values is None:
        case.same_bits(got, exact.quantize_q4_k(x))
    else:
        case.same_bits(values.float().reshape(x.shape) + 0.0, want)


@check_for("quantize_q4_k", by="error")
def nan_infinities_and_rows_that_do_not_fit(answer, case):
    """A NaN or an infinity in one block of several: that block is NaN and no other; rows of 128 and of 300 numbers."""
    for odd, shape in ((math.nan, (4, 256)), (math.inf, (4, 256)), (-math.inf, (2, 512))):
        for _ in range(case.count(1)):
            x = _single(case.rng.normal(size=(4, 256)))
            place = int(case.rng.integers(0, 4))
            x[place, int(case.rng.integers(0, 256))] = odd
            x = x.reshape(shape)
            got = answer(x)
            values = _numbers_of(got, x)
            if values is None:
                case.same_bits(got, exact.quantize_q4_k(x))
                continue
            blocks = values.reshape(4, 256)
            numbers, nans = blocks.isfinite().all(1), blocks.isnan().all(1)
            found = torch.where(numbers, 0.0, torch.where(nans, 1.0, 0.5))
            want = torch.zeros(4)
            want[place] = 1.0
            parts = (4,) if shape == (4, 256) else (2, 2)
            case.same_bits(found.reshape(parts), want.reshape(parts), show=_as_blocks)
    for shape in ((128,), (2, 300), (256, 1)):
        case.raises(ValueError, answer, torch.zeros(shape))


def _as_blocks(value: object) -> str:
    """What the numbers of a block are."""
    return {0.0: "all are finite", 0.5: "some are finite, others are not", 1.0: "all are NaN"}[float(value)]


@misconception(
    "quantize_q4_k", "It takes the smallest and the largest number of a group as its ends, and searches no better ones."
)
def ends_as_they_are(x):
    return exact.quantize_q4_k(x, fit=exact.ends)


@misconception(
    "quantize_q4_k", "It lets a min be above 0, as no group around 3 has a number near 0: 6 bits have no sign."
)
def min_above_zero(x):
    def fit(groups):
        scale, least = exact.fitted(groups - groups.min(-1, keepdims=True))
        return scale, np.maximum(least - groups.min(-1), 0)

    return exact.quantize_q4_k(x, fit=fit)


@misconception("quantize_q4_k", "It takes codes from scales and mins as they were before they got 6 bits.")
def codes_of_the_unrounded(x):
    return exact.quantize_q4_k(x, stored=False)


@misconception("quantize_q4_k", "It has one scale and one min for the whole block, repeated for every group.")
def one_scale_for_the_block(x):
    def repeated(scale, least):
        return tuple(np.repeat(each.max(1, keepdims=True), 8, axis=1) for each in (scale, least))

    return exact.quantize_q4_k(x, change=repeated)


@misconception("quantize_q4_k", "It cuts codes off where it should round them.")
def cuts_codes_off(x):
    return exact.quantize_q4_k(x, rounded=np.floor)


@misconception("quantize_q4_k", "It puts neighbours into a byte: numbers 2i and 2i + 1 of a block.")
def packs_neighbours(x):
    return exact.quantize_q4_k(x, codes=exact.run_of(8 * 16 + 4 * np.arange(256), 4))


@misconception("quantize_q4_k", "It leaves out the two high bits of the scales of groups 4 to 7.")
def drops_high_bits(x):
    packed = exact.quantize_q4_k(x)
    packed.reshape(-1, exact.Q4_K)[:, 4:8] &= 63
    return packed


@misconception("quantize_q4_k", "Its d overflows to infinity where numbers are huge, and infinity times 0 is NaN.")
def overflows(x):
    return exact.quantize_q4_k(x, top=math.inf)


@misconception("quantize_q4_k", "It takes NaN and infinities for 0, so that nobody hears of them.")
def hides_nan(x):
    return exact.quantize_q4_k(x, mark=False)


@misconception("quantize_q4_k", "It stores mins where scales belong, and scales where mins do.")
def exchanges_scales_and_mins(x):
    return exact.quantize_q4_k(x, scales=exact.MINS, mins=exact.SCALES)


@misconception("quantize_q4_k", "It stores dmin in the first two bytes, and d in the next two.")
def dmin_before_d(x):
    return exact.quantize_q4_k(x, halves=(1, 0))


@misconception("quantize_q4_k", "It puts even groups into the high nibbles, and odd ones into the low nibbles.")
def exchanges_nibbles(x):
    exchanged = exact.CODES.reshape(4, 2, 32, 4)[:, ::-1].reshape(256, 4)
    return exact.quantize_q4_k(x, codes=exchanged)


@misconception("quantize_q4_k", "It takes all blocks for NaN where one of them has a NaN or an infinity.")
def all_blocks_are_nan(x):
    packed = exact.quantize_q4_k(x)
    if not x.isfinite().all():
        packed.reshape(-1, exact.Q4_K)[:, :2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
    return packed


# --- 12.10 dequantize_q6_k --------------------------------------------------------------------------------------------


@check_for("dequantize_q6_k", weight=2)
def blocks_of_six_bits(answer, case):
    """One to three dimensions of one and more blocks: any bytes, any finite d."""
    for shape in ((1,), (3,), (2, 2), (2, 1, 2)):
        for _ in range(case.count(1)):
            blocks = random_bytes(case.rng, *shape, size=exact.Q6_K, halves=(208,))
            _compare_numbers(answer, case, blocks, exact.dequantize_q6_k)


@check_for("dequantize_q6_k")
def one_scale_at_a_time(answer, case):
    """Blocks in which one of the 16 scales is not 0, above and below 0."""
    for _ in range(case.count(1)):
        for group in range(16):
            blocks = random_bytes(case.rng, 1, size=exact.Q6_K, halves=(208,))
            blocks[192:208] = 0
            blocks[192 + group] = int(case.rng.integers(1, 256))
            _compare_numbers(answer, case, blocks, exact.dequantize_q6_k)


@check_for("dequantize_q6_k")
def extreme_scales_of_six_bits(answer, case):
    """d that is 0, subnormal, the largest, infinite or NaN; no blocks at all; bytes laid out oddly."""
    for _ in range(case.count(1)):
        _compare_numbers(answer, case, extreme_bytes(case.rng, exact.Q6_K, (208,)), exact.dequantize_q6_k)
        _compare_numbers(answer, case, torch.zeros(0, exact.Q6_K, dtype=torch.uint8), exact.dequantize_q6_k)
        blocks = random_bytes(case.rng, 3, 2, size=exact.Q6_K, halves=(208,))
        _compare_numbers(answer, case, blocks.t().contiguous().t(), exact.dequantize_q6_k)


@misconception("dequantize_q6_k", "It takes codes as they are, from 0 to 63.")
def codes_from_zero(blocks):
    return exact.dequantize_q6_k(blocks, zero=0)


@misconception("dequantize_q6_k", "It reads the scales as bytes without a sign.")
def scales_without_a_sign(blocks):
    return exact.dequantize_q6_k(blocks, signed=False)


@misconception("dequantize_q6_k", "It has a scale for every 32 numbers, the first eight of the sixteen.")
def scale_for_32(blocks):
    return exact.dequantize_q6_k(blocks, group=32)


@misconception("dequantize_q6_k", "It puts the two high bits below the four low ones.")
def high_bits_below(blocks):
    return exact.dequantize_q6_k(blocks, codes=exact.pieces(exact.HIGH_BITS, exact.LOW_BITS))


@misconception(
    "dequantize_q6_k", "It takes the two nibbles of a byte for neighbours: numbers 2i and 2i + 1 of a block."
)
def low_bits_of_neighbours(blocks):
    low = exact.run_of(4 * np.arange(256), 4)
    return exact.dequantize_q6_k(blocks, codes=exact.pieces(low, exact.HIGH_BITS))


@misconception("dequantize_q6_k", "It takes a byte of high bits for those of four neighbours, numbers 4i to 4i + 3.")
def high_bits_of_neighbours(blocks):
    high = exact.run_of(8 * 128 + 2 * np.arange(256), 2)
    return exact.dequantize_q6_k(blocks, codes=exact.pieces(exact.LOW_BITS, high))


@misconception("dequantize_q6_k", "It does not cut the block in half: high nibbles belong to the second 128 numbers.")
def no_halves(blocks):
    low = exact.run_of(8 * (np.arange(256) % 128) + 4 * (np.arange(256) // 128), 4)
    return exact.dequantize_q6_k(blocks, codes=exact.pieces(low, exact.HIGH_BITS))


@misconception("dequantize_q6_k", "It looks for d in the first two bytes, where other blocks have it.")
def d_at_the_beginning(blocks):
    return exact.dequantize_q6_k(blocks, d_at=0)


@misconception(
    "dequantize_q6_k", "It takes both nibbles of byte i for numbers i and 32 + i: j = 1 and j = 2 change places."
)
def nibbles_of_j_exchanged(blocks):
    low = exact.LOW_BITS.reshape(2, 4, 32, 4)[:, [0, 2, 1, 3]].reshape(256, 4)
    return exact.dequantize_q6_k(blocks, codes=exact.pieces(low, exact.HIGH_BITS))


@misconception("dequantize_q6_k", "It takes bits 7 and 6 of a byte of high bits for j = 0, and goes down from there.")
def high_bits_from_above(blocks):
    high = exact.HIGH_BITS.reshape(2, 4, 32, 2)[:, ::-1].reshape(256, 2)
    return exact.dequantize_q6_k(blocks, codes=exact.pieces(exact.LOW_BITS, high))


@misconception("dequantize_q6_k", "It subtracts 32 from bytes, which have no sign: 31 - 32 is 255.")
def subtracts_32_from_bytes(blocks):
    return exact.dequantize_q6_k(blocks, wrap=True)


@misconception("dequantize_q6_k", "It subtracts 31: there are 64 codes, and 32 is that of 0.")
def subtracts_31(blocks):
    return exact.dequantize_q6_k(blocks, zero=31)


@misconception("dequantize_q6_k", "It expects d in front, as other blocks have it, and all else two bytes later.")
def all_after_d(blocks):
    return exact.dequantize_q6_k(blocks.reshape(-1, exact.Q6_K).roll(-2, -1).reshape(blocks.shape))


# --- 12.11 write_gguf ------------------------------------------------------------------------------------------------


def some_tensors(*kinds: tuple[str, tuple[int, ...]]) -> tuple:
    """Names for tensors of these kinds and shapes."""
    return tuple((f"part.{place}.weight", kind, shape) for place, (kind, shape) in enumerate(kinds))


def _in_words(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _compare_files(answer, case, metadata: tuple, *tensors: tuple) -> None:
    alignment = dict(metadata).get("general.alignment", 32)
    got = answer.run(written, metadata, *tensors)
    want = exact.described(exact.as_bytes(written(exact.write_gguf, metadata, *tensors)), alignment)
    if isinstance(got, Tensor) and got.dtype == torch.uint8:
        got = exact.described(exact.as_bytes(got), alignment)
    for part, one, other in zip(exact.PARTS, got, want, strict=True):
        case.same_bits(one, other, parts=(part,), show=_in_words)


_NAME = ("general.architecture", "lowprec_gpt")


@check_for("write_gguf", weight=2)
def tensors_of_every_kind(answer, case):
    """One to three tensors of one to three dimensions, of five kinds, whose bytes end anywhere."""
    for _ in range(case.count(1)):
        for kinds in (
            (("f32", (3, 8)),), (("q8_0", (2, 64)), ("f32", (_size_of(case),))),
            (("q4_k", (3, 256)), ("q5_0", (2, 96)), ("f16", (2, _size_of(case), 4))), (("q6_k", (1, 512)),),
            (("q4_0", (4, 32)), ("q4_1", (_size_of(case), 32))),
        ):  # fmt: skip
            _compare_files(answer, case, (_NAME,), *some_tensors(*kinds))


def _size_of(case) -> int:
    return int(case.rng.integers(2, 12)) * 2 + 1


@check_for("write_gguf", weight=2)
def entries_of_every_type(answer, case):
    """Texts beyond ASCII and empty ones, whole numbers, floats, True and False, lists of texts and of numbers."""
    for _ in range(case.count(1)):
        count = int(case.rng.integers(1, 2**32 - 1))
        value = float(case.rng.normal())
        tensors = some_tensors(("f32", (2, 2)))
        for entry in (
            ("general.name", "Größe ½ GPT"), ("a.count", count), ("a.rate", value), ("a.flag", True), ("a.flag", False),
            ("a.empty", ""), ("a.größe", 3), ("ein.µ", "x"), ("a.texts", ["\n", "é", "ab"]),
            ("a.counts", [count, 0, 7]), ("a.rates", [value, 0.5]), ("a.flags", [True, False, True]),
        ):  # fmt: skip
            _compare_files(answer, case, (_NAME, entry), *tensors)
        _compare_files(answer, case, (("b", 1), ("a", "x"), _NAME, ("c", [0.25])), *tensors)


@check_for("write_gguf")
def other_alignments_and_empty_files(answer, case):
    """Alignments of 8, 64 and 256 among the metadata, tensors that end on them; no tensors, no metadata."""
    for _ in range(case.count(1)):
        for alignment in (8, 64, 256):
            kinds = (("f32", (_size_of(case),)), ("f32", (4, 16)), ("q8_0", (1, 32)))
            _compare_files(answer, case, (_NAME, ("general.alignment", alignment)), *some_tensors(*kinds))
        _compare_files(answer, case, (_NAME,))
        _compare_files(answer, case, (), *some_tensors(("f32", (8,))))
        _compare_files(answer, case, ())


@misconception("write_gguf", "It writes dimensions in torch's order: rows first.")
def rows_first(file, metadata, tensors):
    exact.write_gguf(file, metadata, tensors, dimensions=tuple)


@misconception("write_gguf", "It counts where a tensor begins from the beginning of the file.")
def offsets_in_the_file(file, metadata, tensors):
    exact.write_gguf(file, metadata, tensors, from_start=True)


def _none(size: int, alignment: int) -> int:
    return 0


@misconception("write_gguf", "It leaves no gap between tensors: only the first one is aligned.")
def without_gaps(file, metadata, tensors):
    exact.write_gguf(file, metadata, tensors, between=_none, last=_none)


@misconception("write_gguf", "It begins the data right after the last entry: the first tensor is not aligned.")
def data_at_once(file, metadata, tensors):
    exact.write_gguf(file, metadata, tensors, before=_none)


@misconception("write_gguf", "It writes no zeros after the last tensor.")
def nothing_after_the_last(file, metadata, tensors):
    exact.write_gguf(file, metadata, tensors, last=_none)


@misconception("write_gguf", "It takes 32 for the alignment, whatever the metadata say.")
def always_32(file, metadata, tensors):
    exact.write_gguf(file, metadata, tensors, alignment=32)


@misconception("write_gguf", "It writes True and False as whole numbers: in Python they are.")
def flags_as_numbers(file, metadata, tensors):
    def kinds(value):
        return 4 if type(value) is bool else exact.kind_of(value)

    exact.write_gguf(file, metadata, tensors, kinds=kinds)


def _in_characters(value: str) -> bytes:
    return exact.number(len(value), 8) + value.encode()


@misconception("write_gguf", "It takes the length of a text in characters, not in bytes.")
def lengths_in_characters(file, metadata, tensors):
    def value(each, kinds):
        if type(each) is not list or type(each[0]) is not str:
            return exact.plain_value(each, kinds)
        told = b"".join(_in_characters(text) for text in each)
        return exact.number(8, 4) + exact.number(len(each), 8) + told

    exact.write_gguf(file, metadata, tensors, value=value, written=_in_characters)


@misconception("write_gguf", "It writes a float as Python has it, with 64 bits (type 12).")
def floats_of_64_bits(file, metadata, tensors):
    def kinds(value):
        return 12 if type(value) is float else exact.kind_of(value)

    def value(each, kinds):
        if type(each) is list and type(each[0]) is float:
            told = b"".join(np.array(number, "<f8").tobytes() for number in each)
            return exact.number(12, 4) + exact.number(len(each), 8) + told
        return np.array(each, "<f8").tobytes() if type(each) is float else exact.plain_value(each, kinds)

    exact.write_gguf(file, metadata, tensors, kinds=kinds, value=value)


# --- reading questions ------------------------------------------------------------------------------------------------

question_for(
    "12.G",
    9,
    "9: A to H are groups 0 to 7, so group 5 is F, and its four low bits, FFFF, are in byte 9.",
    "Which letter is group 5, if A is group 0?",
    {
        1: "Byte 1 has FF, the two high bits. The four low ones are elsewhere.",
        13: "That is the byte of the block. Here they are counted from the first of the 12.",
    },
)
question_for(
    "12.H",
    4.0,
    "4: (1 + 3) / (1 + 0).",
    "The weight is av_x + |x|. What is it for x = 3, and for x = 0?",
    {3.0: "av_x is added to both: nothing weighs 0."},
)
question_for(
    "12.I",
    1024,
    "1024: 1000 % 64 is 40, and 64 - 40 = 24 bytes of padding follow.",
    "What is 1000 % 64?",
    {1040: "padding is the rest of the division, and 64 minus that is added.", 1000: "1000 is no multiple of 64."},
)
