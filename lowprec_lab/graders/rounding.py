"""Checks and known misconceptions of chapter 02."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from lowprec_lab.formats import (
    BF16,
    E2M1,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    TF32,
    Format,
)
from lowprec_lab.graders import inputs, oracle
from lowprec_lab.graders import rounding_oracle as exact
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for
from lowprec_lab.rounding import traced, written_into

FLOAT8 = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
E4M3_IEEE = Format("e4m3_ieee", 4, 3)


def _as_bfloat16(codes):
    return codes.to(torch.int16).view(torch.bfloat16)


def truncated(x):
    """The bfloat16 towards zero; exact."""
    return _as_bfloat16(exact.encode(x, BF16, "toward_zero", "to_special"))


def rounded(x):
    """The nearest bfloat16, infinity beyond the largest; exact."""
    return _as_bfloat16(exact.encode(x, BF16, "nearest_even", "to_special"))


def victims(via, fmt, lo, hi):
    """Every float32 in [lo, hi) that `fmt` makes another value of when it is rounded to `via` first; exact."""
    first, last = exact.first_at_or_above(np.array([lo, hi], dtype=np.float64)).tolist()
    x = inputs.float32_from_bits(np.arange(first, last))
    return x[exact.round_to(exact.round_to(x, via), fmt) != exact.round_to(x, fmt)]


def saturated(x, dtype):
    """The float8 tensor of saturating round-to-nearest-even; exact."""
    fmt = next(fmt for fmt in FLOAT8 if fmt.torch_dtype == dtype)
    return exact.encode(x.float(), fmt).to(torch.uint8).view(dtype)


def rounded_into(x, fmt, out=None):
    """`round_to` in the form of `fast_round_to`: exact, and not fast."""
    result = exact.round_to(x, fmt)
    return result if out is None else out.copy_(result)


oracle_for("truncate_to_bfloat16", truncated)
oracle_for("round_to_bfloat16", rounded)
oracle_for("round_to", exact.round_to)
oracle_for("encode", exact.encode)
oracle_for("round_stochastic", exact.round_stochastic)
oracle_for("double_rounding_victims", victims)
oracle_for("fast_round_to", rounded_into)
oracle_for("cast_saturating", saturated)


def policies_of(fmt: Format) -> list[tuple[str, str]]:
    """Every mode with every overflow policy that the format allows."""
    allowed = exact.OVERFLOWS[:1] if fmt.specials == "finite" else exact.OVERFLOWS
    return [(mode, overflow) for mode in exact.MODES for overflow in allowed]


def made_up_formats(case, count: int) -> list[Format]:
    """Formats that no library has, and some that nobody has seen before."""
    return [*inputs.MADE_UP, *(inputs.random_format(case.rng) for _ in range(case.count(count)))]


# --- 2.1 truncate_to_bfloat16, 2.2 round_to_bfloat16 ------------------------------------------------------------------


def _nans(case, count):
    """NaNs of both signs; payloads in the upper half, in the lower half alone, all ones, and at random."""
    payload = np.concatenate(
        [[1, 0x8000, 0xFFFF, 0x10000, 0x400000, 0x7FFFFF, 0x7FFF], case.rng.integers(1, 2**16, 40)]
    )
    payload = np.concatenate([payload, case.rng.integers(1, 2**23, case.count(count))]).astype(np.uint64)
    bits = np.uint64(0x7F800000) | payload
    return inputs.float32_from_bits(np.concatenate([bits, bits | np.uint64(0x80000000)]))


def _bfloat16_landmarks():
    values = [0.0, 1.0, 1.00390625, 1.01171875, 1.0078124, 1.99609375, 3.3895314e38, 3.3961775e38, 3.4e38, math.inf]
    x = inputs.around(torch.tensor([*values, 1e-40, 9.2e-41, 4.6e-41, 2.0**-126, 2.0**-133, 2.0**-134, 0.1, 1 / 3]))
    special = inputs.special_float32()
    return torch.cat([x, -x, special[~special.isnan()]])


@check_for("truncate_to_bfloat16")
def landmarks_cut(answer, case):
    """Zeros, 1 and its neighbours, subnormals, the largest values, infinities."""
    x = _bfloat16_landmarks()
    case.same_bits(answer(x), truncated(x))


@check_for("truncate_to_bfloat16", weight=2)
def every_upper_half(answer, case):
    """All 65,536 upper halves that are no NaN, with lower halves of all zeros, all ones, a half and at random."""
    upper = np.arange(2**16, dtype=np.uint64)
    upper = upper[(upper & 0x7F80) != 0x7F80]
    drawn = case.rng.integers(0, 2**16, upper.size, dtype=np.uint64)
    lower = np.stack([np.zeros_like(upper), np.full_like(upper, 0xFFFF), drawn])
    x = inputs.float32_from_bits(((upper << 16) | lower).reshape(-1))
    case.same_bits(answer(x), truncated(x))


@check_for("truncate_to_bfloat16")
def nans_cut(answer, case):
    """NaNs of both signs, with payloads in the upper half and in the lower half alone."""
    x = _nans(case, 400)
    case.same_bits(answer(x), truncated(x))


@check_for("truncate_to_bfloat16")
def shapes_cut(answer, case):
    """Random numbers in tensors of no dimension, of two, transposed and empty."""
    for x in inputs.shapes_of(inputs.random_float32(case.count(400), case.rng)):
        case.same_bits(answer(x), truncated(x))


def _upper(x):
    return oracle.bit_pattern(x) >> 16


def _quiet(x, codes):
    return _as_bfloat16(torch.where(x.isnan(), _upper(x) | 0x40, codes))


@misconception(
    "truncate_to_bfloat16", "A NaN whose payload is all in the lower half becomes infinity: its mantissa is cut to 0."
)
def nan_becomes_infinity(x):
    return _as_bfloat16(_upper(x))


@misconception("truncate_to_bfloat16", "It rounds to the nearest bfloat16: here the lower half is dropped.")
def rounds_instead(x):
    return x.to(torch.bfloat16)


@misconception("truncate_to_bfloat16", "It loses the sign.")
def cuts_the_sign(x):
    return _quiet(x, _upper(x)).abs()


@misconception("truncate_to_bfloat16", "It keeps the lower half of the bits instead of the upper one.")
def keeps_the_lower_half(x):
    return _quiet(x, oracle.bit_pattern(x) & 0xFFFF)


@misconception(
    "truncate_to_bfloat16", "It moves negative numbers away from zero (a floor of the value, not of its bits)."
)
def floors_the_value(x):
    right = truncated(x)
    lower = (oracle.bit_pattern(x) & 0xFFFF) != 0
    moved = _as_bfloat16(_upper(x) + (lower & x.signbit() & x.isfinite()).to(torch.int32))
    return torch.where(x.isnan(), right, moved)


@misconception("truncate_to_bfloat16", "It flushes subnormal numbers to zero.")
def cuts_subnormals(x):
    small = (x.abs() < 2.0**-126) & (x != 0)
    return torch.where(small, torch.copysign(torch.zeros_like(x), x).to(torch.bfloat16), truncated(x))


@misconception("truncate_to_bfloat16", "It turns the upper half into a number instead of reading it as bits.")
def converts_the_integer(x):
    return _upper(x).to(torch.bfloat16)


@misconception("truncate_to_bfloat16", "It returns the cut value as float32: bfloat16 is expected.")
def cut_but_float32(x):
    return truncated(x).float()


@check_for("round_to_bfloat16")
def landmarks_rounded(answer, case):
    """Ties next to 1, a carry into the exponent, zeros, subnormals, the largest values, infinities."""
    x = _bfloat16_landmarks()
    case.same_bits(answer(x), rounded(x))


@check_for("round_to_bfloat16", weight=2)
def nearest_with_ties_to_even(answer, case):
    """Every midpoint between two bfloat16 neighbours, and the float32 on either side of it."""
    x = inputs.around(inputs.midpoints(BF16))
    case.same_bits(answer(x), rounded(x))


@check_for("round_to_bfloat16")
def nans_rounded(answer, case):
    """NaNs of both signs; payloads in the lower half alone, and of all ones, which a carry would run through."""
    x = _nans(case, 400)
    case.same_bits(answer(x), rounded(x))


@check_for("round_to_bfloat16")
def shapes_rounded(answer, case):
    """Random numbers in tensors of no dimension, of two, transposed and empty."""
    for x in inputs.shapes_of(inputs.random_float32(case.count(400), case.rng)):
        case.same_bits(answer(x), rounded(x))


def _added(x, bias):
    """The upper half after an addition, as int32 arithmetic has it, carries into the sign included."""
    bits = oracle.bit_pattern(x).to(torch.int64) + bias
    return ((bits % 2**32) >> 16).to(torch.int32)


def _kept(x):
    return _upper(x) & 1


@misconception("round_to_bfloat16", "It rounds ties away from zero instead of to the even neighbour.")
def adds_half_and_cuts(x):
    return _quiet(x, _added(x, 0x8000))


@misconception("round_to_bfloat16", "It rounds ties towards zero: 0x7FFF alone carries only above a tie.")
def ties_towards_zero(x):
    return _quiet(x, _added(x, 0x7FFF))


@misconception("round_to_bfloat16", "It rounds ties to the odd neighbour: the kept bit is added where it is 0.")
def ties_to_odd(x):
    return _quiet(x, _added(x, 0x8000 - _kept(x)))


@misconception(
    "round_to_bfloat16",
    "It adds to the bits of NaN as well: a payload of ones carries over into the sign, and -0 comes out.",
)
def nan_becomes_minus_zero(x):
    return _as_bfloat16(_added(x, 0x7FFF + _kept(x)))


@misconception(
    "round_to_bfloat16", "It cuts NaNs without setting a bit: one whose payload is in the lower half becomes infinity."
)
def rounds_nan_to_infinity(x):
    return _as_bfloat16(torch.where(x.isnan(), _upper(x), _added(x, 0x7FFF + _kept(x))))


@misconception("round_to_bfloat16", "It loses the carry: a mantissa of ones that rounds up must raise the exponent.")
def loses_the_carry(x):
    sum_ = _added(x, 0x7FFF + _kept(x))
    return _quiet(x, (_upper(x) & ~0x7F) | (sum_ & 0x7F))


@misconception("round_to_bfloat16", "It cuts: the lower half never moves the result to the upper neighbour.")
def only_cuts(x):
    return _quiet(x, _upper(x))


@misconception("round_to_bfloat16", "It keeps finite numbers finite: above the largest value it saturates.")
def saturates_to_largest(x):
    codes = exact.encode(torch.where(x.isinf(), 0.0, x), BF16)
    return torch.where(x.isinf(), x.to(torch.bfloat16), _as_bfloat16(codes))


@misconception("round_to_bfloat16", "It flushes subnormal numbers to zero.")
def rounds_subnormals_to_zero(x):
    small = (x.abs() < 2.0**-126) & (x != 0)
    return torch.where(small, torch.copysign(torch.zeros_like(x), x).to(torch.bfloat16), rounded(x))


# --- 2.3 round_to -----------------------------------------------------------------------------------------------------

# Numbers about which libraries disagree, and inputs of public reports, with the value that the contract makes right.
_NAN, _INF = math.nan, math.inf
KNOWN = (
    (E4M3, "nearest_even", "saturate", [
        (464.0, 448.0), (464.00003, 448.0), (1e6, 448.0), (_INF, 448.0), (-_INF, -448.0), (_NAN, _NAN),
        (2.0**-10, 0.0), (1.0625, 1.0),
        (-1.0625, -1.0), (1.1875, 1.25), (1.8131605, 1.875), (4.25, 4.0), (4.75, 5.0), (1.0625001, 1.125),
        (0.000538887, 0.0),
        (1.062744140625, 1.125), (0.1, 0.1015625), (-0.0, -0.0), (-1e-9, -0.0), (0.0009765626, 2.0**-9),
        (0.0146484375, 2.0**-6),
        (440.0, 448.0), (432.0, 448.0), (431.9, 416.0),
    ]),
    (E4M3, "nearest_even", "to_special", [
        (464.0, 448.0), (464.00003, _NAN), (-464.00003, _NAN), (480.0, _NAN), (1e6, _NAN), (_INF, _NAN),
        (_NAN, _NAN), (448.0, 448.0),
    ]),
    (E4M3, "nearest_away", "saturate", [
        (1.0625, 1.125), (-1.0625, -1.125), (2.0**-10, 2.0**-9), (464.0, 448.0), (-0.0, -0.0),
    ]),
    (E4M3, "nearest_away", "to_special", [(463.99997, 448.0), (464.0, _NAN)]),
    (E4M3, "toward_zero", "to_special", [
        (1e6, 448.0), (-1e6, -448.0), (_INF, _NAN), (1.124, 1.0), (-1.124, -1.0), (-1e-9, -0.0),
    ]),
    (E4M3, "up", "to_special", [
        (449.0, _NAN), (-1e6, -448.0), (-_INF, _NAN), (-1.1, -1.0), (1e-9, 2.0**-9), (-1e-9, -0.0),
    ]),
    (E4M3, "down", "to_special", [
        (-449.0, _NAN), (1e6, 448.0), (_INF, _NAN), (-1.1, -1.125), (1e-9, 0.0), (-1e-9, -(2.0**-9)),
    ]),
    (E5M2, "nearest_even", "saturate", [
        (61440.0, 57344.0), (9.0, 8.0), (1.125, 1.0), (1e9, 57344.0), (_INF, 57344.0), (42.5, 40.0),
    ]),
    (E5M2, "nearest_even", "to_special", [
        (61440.0, _INF), (61439.996, 57344.0), (-1e9, -_INF), (_INF, _INF), (_NAN, _NAN),
    ]),
    (E5M2, "toward_zero", "to_special", [(1e9, 57344.0), (_INF, _INF), (-_INF, -_INF)]),
    (FP16, "nearest_even", "to_special", [(65536.0, _INF), (65520.0, _INF), (65519.996, 65504.0), (2.0**-25, 0.0)]),
    (E4M3_IEEE, "nearest_even", "to_special", [(256.0, _INF), (248.0, _INF), (247.9, 240.0)]),
    (E4M3FNUZ, "nearest_even", "saturate", [(-0.0, 0.0), (-1e-9, 0.0), (248.0, 240.0), (-_INF, -240.0), (_NAN, _NAN)]),
    (E4M3FNUZ, "nearest_even", "to_special", [(-0.0, 0.0), (248.0, _NAN), (247.9, 240.0), (-_INF, _NAN)]),
    (E8M0, "nearest_even", "saturate", [
        (0.0, 2.0**-127), (-0.0, 2.0**-127), (-1.0, _NAN), (1.5, 2.0), (3.0, 4.0), (1.49, 1.0),
    ]),
    (E2M1, "nearest_even", "saturate", [
        (5.0, 4.0), (2.5, 2.0), (3.5, 4.0), (0.25, 0.0), (0.75, 1.0), (7.0, 6.0), (-_INF, -6.0),
    ]),
    (BF16, "nearest_even", "to_special", [(3.4e38, _INF), (3.3895314e38, 3.3895314e38), (1.00390625, 1.0)]),
)  # fmt: skip


@check_for("round_to")
def numbers_that_libraries_disagree_about(answer, case):
    """464, 1e6, infinity, NaN, -0, ties, and inputs of public bug reports, in nine formats."""
    for fmt, mode, overflow, table in KNOWN:
        x, right = torch.tensor(table, dtype=torch.float32).t().contiguous()
        case.same_bits(answer(x, fmt, mode, overflow), right)


@check_for("round_to", weight=2)
def nearest_in_registered_formats(answer, case):
    """Values, midpoints and their float32 neighbours of all registered formats; nearest_even, saturate."""
    for fmt in FORMATS.values():
        x = inputs.edges(fmt, case.count(300), case.rng)
        case.same_bits(answer(x, fmt), exact.round_to(x, fmt))


@check_for("round_to", weight=2)
def every_mode_and_policy(answer, case):
    """All registered formats in all five modes and both overflow policies."""
    for fmt in FORMATS.values():
        x = inputs.edges(fmt, case.count(24), case.rng)
        for mode, overflow in policies_of(fmt):
            case.same_bits(answer(x, fmt, mode, overflow), exact.round_to(x, fmt, mode, overflow))


@check_for("round_to", weight=2)
def rounded_to_made_up_formats(answer, case):
    """Made-up formats, without sign, zero or mantissa too, in all five modes and both overflow policies."""
    for fmt in made_up_formats(case, 8):
        x = inputs.edges(fmt, case.count(24), case.rng)
        for mode, overflow in policies_of(fmt):
            case.same_bits(answer(x, fmt, mode, overflow), exact.round_to(x, fmt, mode, overflow))


@check_for("round_to")
def shapes_and_random_numbers(answer, case):
    """Random float32 of every size, in tensors of no dimension, of two, transposed and empty."""
    for fmt in (E4M3, FP16, E8M0, inputs.random_format(case.rng)):
        for x in inputs.shapes_of(inputs.random_float32(case.count(300), case.rng)):
            case.same_bits(answer(x, fmt), exact.round_to(x, fmt))


@check_for("round_to")
def arguments_that_do_not_exist(answer, case):
    """A mode or policy that does not exist, and "to_special" where there is nothing special: ValueError."""
    _refused(answer, case)


def _refused(answer, case):
    x = torch.tensor([1.0, 1000.0])
    for mode, overflow in (("nearest", "saturate"), ("towards_zero", "to_special"), ("up", "clip"), ("", "saturate")):
        case.raises(ValueError, answer, x, E4M3, mode, overflow)
    for fmt in (E2M1, E3M2, inputs.MADE_UP[3]):
        case.raises(ValueError, answer, x, fmt, "nearest_even", "to_special")
        case.raises(ValueError, answer, x[:1], fmt, "toward_zero", "to_special")


def _where_nearest(mode, changed, right):
    return changed if mode == "nearest_even" else right


def _settled(x, fmt, overflow, magnitude):
    """Chosen magnitudes (whole steps of the format) with the sign; then special values and overflow by the rules."""
    chosen = torch.copysign(torch.where(x.isfinite(), magnitude, x.double().abs()), x.double()).float()
    done = exact.round_to(chosen, fmt, "nearest_even", overflow)
    return done if fmt.signed else torch.where(x < 0, math.nan, done)


@misconception("round_to", "It rounds ties away from zero although the mode is nearest_even.")
def ties_away(x, fmt, mode="nearest_even", overflow="saturate"):
    exact.require_policies(fmt, mode, overflow)
    return exact.round_to(x, fmt, "nearest_away" if mode == "nearest_even" else mode, overflow)


@misconception("round_to", "It rounds ties up, towards +infinity (floor(x + 0.5)), although the mode is nearest_even.")
def floor_of_x_and_a_half(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    step = oracle.ulp(x, fmt)
    steps = (x.double() / step + 0.5).floor()
    return _where_nearest(mode, _settled(x, fmt, overflow, steps.abs() * step), right)


@misconception("round_to", "It flushes subnormal values to zero.")
def flushes_subnormals(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    return torch.where(right.abs() < oracle.min_normal(fmt), right * 0.0, right)


@misconception(
    "round_to",
    "It decides about overflow before it rounds: 464, a tie that rounds to 448, counts as too large for E4M3.",
)
def overflow_before_rounding(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    special = _INF if fmt.specials == "ieee" else _NAN
    early = (x.abs() > oracle.max_finite(fmt)) & (overflow == "to_special") & mode.startswith("nearest")
    return torch.where(early & ~right.isnan(), torch.copysign(torch.full_like(x, special), x), right)


@misconception("round_to", "It lets infinity through when it saturates: the largest value is right for infinity too.")
def infinity_is_kept(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    return torch.where(x.isinf() & (overflow == "saturate") & ~right.isnan(), x, right)


@misconception("round_to", "It saturates NaN: the largest value comes out, and the mistake upstream is hidden.")
def nan_is_saturated(x, fmt, mode="nearest_even", overflow="saturate"):
    return torch.where(x.isnan(), oracle.max_finite(fmt), exact.round_to(x, fmt, mode, overflow))


@misconception("round_to", "It turns NaN into 0.")
def nan_becomes_zero(x, fmt, mode="nearest_even", overflow="saturate"):
    return torch.where(x.isnan(), 0.0, exact.round_to(x, fmt, mode, overflow))


@misconception("round_to", "It puts the sign back with torch.sign, which is 0 for zero: -0.0 becomes 0.0.")
def sign_of_zero_is_lost(x, fmt, mode="nearest_even", overflow="saturate"):
    return torch.sign(x) * exact.round_to(x, fmt, mode, overflow).abs()


@misconception("round_to", "It has no -0: whatever rounds to zero becomes 0.0, also from below.")
def no_negative_zero(x, fmt, mode="nearest_even", overflow="saturate"):
    return exact.round_to(x, fmt, mode, overflow) + 0.0


@misconception("round_to", "It keeps -0 in fnuz formats: they have none, its code is their NaN.")
def negative_zero_in_fnuz(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    return torch.copysign(right, x) if fmt.specials == "fnuz" else right


@misconception("round_to", "It counts fn's NaN code as a number: E4M3 ends at 480 instead of 448.")
def ends_at_480(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    if fmt.specials != "fn" or fmt.mantissa_bits == 0:
        return right
    wider = exact.round_to(x, dataclasses.replace(fmt, specials="finite"), mode, "saturate")
    above = wider.abs() > oracle.max_finite(fmt)
    return torch.where(above & ((overflow == "saturate") | (x.abs() <= exact.beyond(fmt))), wider, right)


@misconception("round_to", "It rounds the tie between 0 and the smallest value up: 0 is the even one (2^-10 in E4M3).")
def tie_above_zero_goes_up(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    smallest = oracle.min_subnormal(fmt) or oracle.min_normal(fmt)
    tie = (x.abs().double() == smallest / 2) & fmt.subnormals & ~right.isnan()
    up = torch.copysign(torch.full_like(x, smallest), x)
    return _where_nearest(mode, torch.where(tie, up, right), right)


@misconception("round_to", 'It takes "up" and "down" for away from zero and towards zero: -1.1 up is -1.0 in E4M3.')
def directions_by_magnitude(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    if mode not in ("up", "down"):
        return right
    other = exact.round_to(x, fmt, "down" if mode == "up" else "up", overflow)
    return torch.where(x.signbit(), other, right)


@misconception("round_to", 'Its "to_special" gives infinity in every format: fn and fnuz formats have none, only NaN.')
def infinity_everywhere(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    below_zero = (x < 0) & (not fmt.signed)
    overflowed = right.isnan() & ~x.isnan() & ~below_zero
    return torch.where(overflowed, torch.copysign(torch.full_like(x, _INF), x), right)


@misconception("round_to", "It rounds to bfloat16 first, and then to the format: two roundings are not one.")
def through_bfloat16(x, fmt, mode="nearest_even", overflow="saturate"):
    return exact.round_to(exact.round_to(x, BF16, "nearest_even", "to_special"), fmt, mode, overflow)


@misconception("round_to", "It rounds to float16 first, and then to the format: two roundings are not one.")
def through_float16(x, fmt, mode="nearest_even", overflow="saturate"):
    return exact.round_to(exact.round_to(x, FP16, "nearest_even", "to_special"), fmt, mode, overflow)


@misconception(
    "round_to", "It lets finite numbers overflow when it rounds towards zero: 1e6 becomes 448 in E4M3, not NaN."
)
def overflows_towards_zero(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    if overflow == "saturate" or mode.startswith("nearest"):
        return right
    special = torch.full_like(x, _INF if fmt.specials == "ieee" else _NAN)
    beyond = (x.abs().double() >= exact.beyond(fmt)) & ~right.isnan()
    return torch.where(beyond, torch.copysign(special, x), right)


@misconception(
    "round_to", "It gives 0 in formats that have no zero: whatever is below their smallest value becomes that."
)
def zero_where_there_is_none(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    if fmt.subnormals:
        return right
    smallest = oracle.min_normal(fmt)
    tiny = (x.abs() < smallest / 2) & ~right.isnan()
    return torch.where(tiny, right * 0.0, right)


@misconception("round_to", "It drops the sign in formats that have none: a number below zero is NaN there.")
def absolute_value_without_a_sign(x, fmt, mode="nearest_even", overflow="saturate"):
    return exact.round_to(x if fmt.signed else x.abs(), fmt, mode, overflow)


@misconception("round_to", "It lets the step shrink below the smallest normal value: subnormals are evenly spaced.")
def no_floor_for_the_step(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    if fmt.mantissa_bits == 0 or not fmt.subnormals:
        return right
    tiny = (x.abs() < oracle.min_normal(fmt)) & (x != 0)
    fine = exact.round_to(x, Format("fine", 8, fmt.mantissa_bits), mode, "saturate")
    return torch.where(tiny, torch.copysign(fine.abs(), right), right)


@misconception("round_to", "It takes the exponent from log2 in float32, which rounds up just below a power of two.")
def exponent_from_log2(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.round_to(x, fmt, mode, overflow)
    lowest, highest = (math.frexp(edge)[1] - 1 for edge in (oracle.min_normal(fmt), oracle.max_finite(fmt)))
    exponent = torch.log2(x.abs()).nan_to_num(0, 0, 0).floor().clamp(lowest, highest)
    step = torch.ldexp(torch.ones_like(x, dtype=torch.float64), (exponent - fmt.mantissa_bits).double())
    off = (step != oracle.ulp(x, fmt)) & x.isfinite() & (x != 0)
    steps = x.double().abs() / step
    below = steps.floor()
    rest = steps - below
    move = {
        "nearest_even": (rest > 0.5) | ((rest == 0.5) & (below % 2 == 1)),
        "nearest_away": rest >= 0.5,
        "toward_zero": rest < 0,
    }.get(mode, (rest > 0) & (x.signbit() if mode == "down" else ~x.signbit()))
    return torch.where(off, _settled(x, fmt, overflow, (below + move) * step), right)


@misconception("round_to", "It accepts a mode or a policy that does not exist: a ValueError is expected.")
def asks_no_questions(x, fmt, mode="nearest_even", overflow="saturate"):
    mode = mode if mode in exact.MODES else "nearest_even"
    overflow = overflow if overflow in exact.OVERFLOWS and fmt.specials != "finite" else "saturate"
    return exact.round_to(x, fmt, mode, overflow)


@misconception("round_to", 'It saturates quietly where "to_special" has nothing to give: a ValueError is expected.')
def finite_formats_saturate_anyway(x, fmt, mode="nearest_even", overflow="saturate"):
    if mode not in exact.MODES or overflow not in exact.OVERFLOWS:
        raise ValueError(mode, overflow)
    return exact.round_to(x, fmt, mode, overflow if fmt.specials != "finite" else "saturate")


# --- 2.4 encode -------------------------------------------------------------------------------------------------------

KNOWN_CODES = (
    (E4M3, "nearest_even", "saturate", [
        (1.0, 0x38), (-1.1, 0xB9), (464.0, 0x7E), (_INF, 0x7E), (-_INF, 0xFE), (_NAN, 0x7F), (-0.0, 0x80),
        (0.0, 0x00), (2.0**-9, 0x01),
        (1.9375, 0x40), (0.0146484375, 0x08), (-1e-9, 0x80), (0.1, 0x1D),
    ]),
    (E4M3, "nearest_even", "to_special", [(464.0, 0x7E), (465.0, 0x7F), (-1e6, 0x7F), (-_INF, 0x7F)]),
    (E5M2, "nearest_even", "to_special", [(61440.0, 0x7C), (-_INF, 0xFC), (_NAN, 0x7E), (1.0, 0x3C), (2.0**-16, 0x01)]),
    (BF16, "nearest_even", "to_special", [(3.4e38, 0x7F80), (_NAN, 0x7FC0), (1.0, 0x3F80), (-2.0**-133, 0x8001)]),
    (E4M3FNUZ, "nearest_even", "saturate", [
        (_NAN, 0x80), (-0.0, 0x00), (-1e-9, 0x00), (-1e9, 0xFF), (1e9, 0x7F), (1.0, 0x40),
    ]),
    (E8M0, "nearest_even", "saturate", [
        (0.0, 0x00), (1.0, 0x7F), (1.5, 0x80), (_INF, 0xFE), (-1.0, 0xFF), (_NAN, 0xFF),
    ]),
    (E2M1, "nearest_even", "saturate", [(5.0, 0x6), (-6.0, 0xF), (100.0, 0x7), (-0.2, 0x8), (0.5, 0x1)]),
)  # fmt: skip


def _encodable(x, fmt, mode, overflow):
    """The inputs that have a code: none of them is NaN in a finite format."""
    return x[~exact.round_to(x, fmt, mode, overflow).isnan()] if fmt.specials == "finite" else x


def _codes(answer, case, fmt, x, mode="nearest_even", overflow="saturate"):
    x = _encodable(x, fmt, mode, overflow)
    case.same_bits(answer(x, fmt, mode, overflow), exact.encode(x, fmt, mode, overflow), show=fmt)


@check_for("encode")
def codes_by_hand(answer, case):
    """1, -1.1, 464, infinities, NaN, both zeros, the smallest values, a carry into the exponent, in seven formats."""
    for fmt, mode, overflow, table in KNOWN_CODES:
        x = torch.tensor([number for number, _ in table])
        right = torch.tensor([code for _, code in table], dtype=torch.int32)
        case.same_bits(answer(x, fmt, mode, overflow), right, show=fmt)


@check_for("encode", weight=2)
def codes_of_registered_formats(answer, case):
    """Values, midpoints and their float32 neighbours of all registered formats; nearest_even, both policies."""
    for fmt in FORMATS.values():
        x = inputs.edges(fmt, case.count(300), case.rng)
        _codes(answer, case, fmt, x)
        if fmt.specials != "finite":
            _codes(answer, case, fmt, x[::5], overflow="to_special")


@check_for("encode")
def codes_in_every_mode(answer, case):
    """Five formats in all five modes and both overflow policies."""
    for fmt in (E4M3, E5M2FNUZ, FP16, E8M0, E3M2):
        x = inputs.edges(fmt, case.count(40), case.rng)
        for mode, overflow in policies_of(fmt):
            _codes(answer, case, fmt, x, mode, overflow)


@check_for("encode", weight=2)
def codes_of_made_up_formats(answer, case):
    """Made-up formats, without sign, zero or mantissa too, in a mode and a policy at random."""
    for fmt in made_up_formats(case, 24):
        mode, overflow = policies_of(fmt)[int(case.rng.integers(len(policies_of(fmt))))]
        _codes(answer, case, fmt, inputs.edges(fmt, case.count(100), case.rng), mode, overflow)


@check_for("encode")
def codes_in_any_shape(answer, case):
    """Random float32 in tensors of no dimension, of two, transposed and empty."""
    for fmt in (E4M3, E5M2, FP32):
        for x in inputs.shapes_of(inputs.random_float32(case.count(200), case.rng)):
            case.same_bits(answer(x, fmt), exact.encode(x, fmt), show=fmt)


@check_for("encode")
def what_cannot_be_encoded(answer, case):
    """NaN in formats without a NaN, modes and policies that do not exist: ValueError."""
    _refused(answer, case)
    for fmt in (E2M1, inputs.MADE_UP[3], inputs.MADE_UP[6]):
        case.raises(ValueError, answer, torch.tensor([1.0, _NAN]), fmt)
        case.raises(ValueError, answer, torch.tensor(_NAN), fmt, "down")


def _field(fmt):
    return 2**fmt.mantissa_bits


@misconception("encode", "It drops the sign bit.")
def codes_without_sign(x, fmt, mode="nearest_even", overflow="saturate"):
    codes = exact.encode(x, fmt, mode, overflow)
    negative = x.signbit() & ~x.isnan() & (fmt.signed and fmt.specials != "fnuz")
    return torch.where(negative & (codes != exact.nan_code(fmt)), _magnitude(codes, fmt), codes)


def _magnitude(codes, fmt):
    return codes & (2 ** (fmt.width - 1) - 1) if fmt.signed else codes


@misconception("encode", "It finds the sign with x < 0, which is false for -0.0 and for what rounds to it in part.")
def negative_zero_without_sign(x, fmt, mode="nearest_even", overflow="saturate"):
    codes = exact.encode(x, fmt, mode, overflow)
    zero = fmt.signed and fmt.subnormals and fmt.specials != "fnuz"
    return torch.where((_magnitude(codes, fmt) == 0) & zero, 0, codes).to(torch.int32)


@misconception("encode", "It gives -0 its own code in fnuz formats: that code is the NaN, and zero is 0.")
def negative_zero_is_nan_in_fnuz(x, fmt, mode="nearest_even", overflow="saturate"):
    codes = exact.encode(x, fmt, mode, overflow)
    wrong = (codes == 0) & x.signbit() & (fmt.specials == "fnuz")
    return torch.where(wrong, exact.nan_code(fmt) or 0, codes) if fmt.specials == "fnuz" else codes


@misconception("encode", "It gives NaN all ones in ieee formats: one code is asked for, the mantissa's top bit alone.")
def nan_of_all_ones(x, fmt, mode="nearest_even", overflow="saturate"):
    codes = exact.encode(x, fmt, mode, overflow)
    ones = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1
    return torch.where(x.isnan() & (fmt.specials == "ieee") & (fmt.mantissa_bits > 1), ones, codes).to(torch.int32)


@misconception("encode", "It keeps the sign of NaN: one code is asked for, with sign 0 (in fnuz the code of -0).")
def nan_keeps_its_sign(x, fmt, mode="nearest_even", overflow="saturate"):
    codes = exact.encode(x, fmt, mode, overflow)
    signed = x.isnan() & x.signbit() & (fmt.signed and fmt.specials in ("ieee", "fn"))
    return torch.where(signed, codes.to(torch.int64) + 2 ** (fmt.width - 1), codes).to(torch.int32)


@misconception(
    "encode", "It takes fn's all-ones code for NaN in fnuz too: there it is a number, and NaN is the code of -0."
)
def fn_nan_in_fnuz(x, fmt, mode="nearest_even", overflow="saturate"):
    codes = exact.encode(x, fmt, mode, overflow)
    nan = (codes == 2 ** (fmt.width - 1)) & (fmt.specials == "fnuz")
    return torch.where(nan, 2 ** (fmt.width - 1) - 1, codes).to(torch.int32)


@misconception(
    "encode", "It loses the carry: a mantissa that rounds up to a power of two belongs to the next exponent."
)
def carry_is_masked(x, fmt, mode="nearest_even", overflow="saturate"):
    codes = exact.encode(x, fmt, mode, overflow)
    cut = exact.encode(_without_nan(x, fmt), fmt, "toward_zero", overflow)
    carried = (codes & (_field(fmt) - 1) == 0) & (codes == cut + 1) & (fmt.mantissa_bits > 0) & x.isfinite()
    return torch.where(carried, codes - _field(fmt), codes)


def _without_nan(x, fmt):
    """Numbers only where the format has no code for NaN."""
    return torch.where(x.isnan(), 0.0, x) if fmt.specials == "finite" else x


@misconception("encode", "It encodes subnormals with the exponent field 1: theirs is 0, and there is no leading one.")
def subnormals_with_exponent_one(x, fmt, mode="nearest_even", overflow="saturate"):
    codes = exact.encode(x, fmt, mode, overflow)
    magnitude = _magnitude(codes, fmt)
    subnormal = (magnitude > 0) & (magnitude < _field(fmt)) & fmt.subnormals & ~x.isnan()
    return torch.where(subnormal, codes + _field(fmt), codes)


@misconception("encode", "It uses 2^(e-1) - 1 instead of fmt.bias.")
def codes_with_the_usual_bias(x, fmt, mode="nearest_even", overflow="saturate"):
    codes = exact.encode(x, fmt, mode, overflow)
    excess = 2 ** (fmt.exponent_bits - 1) - 1 - fmt.bias
    rounded_x = exact.round_to(x, fmt, mode, overflow)
    normal = rounded_x.isfinite() & (rounded_x.abs() >= oracle.min_normal(fmt))
    return torch.where(normal, codes.to(torch.int64) + excess * _field(fmt), codes).to(torch.int32)


@misconception(
    "encode", "It subtracts one binade in formats without subnormals: their exponent field 0 is in use (E8M0)."
)
def field_zero_unused(x, fmt, mode="nearest_even", overflow="saturate"):
    codes = exact.encode(x, fmt, mode, overflow)
    number = exact.round_to(x, fmt, mode, overflow).isfinite() & (not fmt.subnormals)
    return torch.where(number, codes.to(torch.int64) + _field(fmt), codes).to(torch.int32)


@misconception("encode", "It encodes NaN in a format that has none, instead of raising ValueError.")
def nan_without_a_code(x, fmt, mode="nearest_even", overflow="saturate"):
    return exact.encode(_without_nan(x, fmt), fmt, mode, overflow)


@misconception("encode", "It cuts instead of rounding: the steps are converted to whole numbers as they are.")
def cuts_the_code(x, fmt, mode="nearest_even", overflow="saturate"):
    exact.require_policies(fmt, mode, overflow)
    cut = exact.encode(x, fmt, "toward_zero", overflow)
    right = exact.encode(x, fmt, mode, overflow)
    return torch.where(x.abs() <= oracle.max_finite(fmt), cut, right)


@misconception(
    "encode", "It gives codes with the sign bit set as negative numbers: a code is the low bits, and not below 0."
)
def negative_codes(x, fmt, mode="nearest_even", overflow="saturate"):
    codes = exact.encode(x, fmt, mode, overflow).to(torch.int64)
    half = 2 ** (fmt.width - 1)
    return torch.where((codes >= half) & fmt.signed, codes - 2 * half, codes).to(torch.int32)


@misconception("encode", "It looks up the nearest value and takes the first of a tie: ties go to the even code.")
def nearest_with_ties_down(x, fmt, mode="nearest_even", overflow="saturate"):
    right = exact.encode(x, fmt, mode, overflow)
    if mode != "nearest_even":
        return right
    step = oracle.ulp(x, fmt)
    tie = (x.abs().double() / step) % 1 == 0.5
    lower = exact.encode(_without_nan(x, fmt), fmt, "toward_zero", overflow)
    return torch.where(tie & (x.abs() < oracle.max_finite(fmt)), lower, right)


# --- 2.5 round_stochastic ---------------------------------------------------------------------------------------------


def _some_noise(x, case):
    units = case.rng.integers(0, 2**23, tuple(x.shape))
    return torch.as_tensor(units, dtype=torch.float32) * 2.0**-23


def _telling_noise(x, fmt, case):
    """Noise at the share of the way that x has gone from lo to hi, one unit of 2^-23 to either side, and at random."""
    low = exact.round_to(x.abs(), fmt, "toward_zero").double()
    share = ((x.abs().double() - low) / oracle.ulp(x, fmt)).nan_to_num(0, 0, 0).clamp(0, 1)
    units = (share * 2**23).floor() + torch.from_numpy(case.rng.integers(-1, 2, len(x)))
    near = (units.clamp(0, 2**23 - 1) * 2.0**-23).float()
    elsewhere = torch.from_numpy(case.rng.random(len(x)) < 0.25)
    return torch.where(elsewhere, _some_noise(x, case), near)


@check_for("round_stochastic")
def the_contracts_rule(answer, case):
    """A quarter of the way, with 64 noises; 42.5 in E5M2; values, which must not move; 464, infinity, NaN, -0."""
    noise = torch.arange(64, dtype=torch.float32) / 64
    for fmt, number in (
        (E4M3, 1.03125),
        (E4M3, -1.03125),
        (E5M2, 42.5),
        (E4M3, 2.0**-11),
        (E4M3, -0.8125),
        (BF16, 1.002),
    ):
        x = torch.full((64,), number)
        case.same_bits(answer(x, fmt, noise), exact.round_stochastic(x, fmt, noise))
    x = torch.tensor([15.0, 1.875, 2.0, 464.0, 464.0, 480.0, 1e6, _INF, -_INF, _NAN, -0.0, -1e-9, 0.0, 448.0])
    last = 1 - 2.0**-23
    noise = torch.tensor([last, last, last, 0.25, 0.75, 0.5, last, 0.0, 0.0, 0.5, 0.5, 0.5, 0.0, last])
    for overflow in exact.OVERFLOWS:
        case.same_bits(answer(x, E4M3, noise, overflow), exact.round_stochastic(x, E4M3, noise, overflow))


@check_for("round_stochastic", weight=2)
def the_mean_is_the_number_itself(answer, case):
    """The mean over all 256 noises j/256, exactly: subnormals, borders of binades, both signs, all kinds of formats."""
    for fmt in (E4M3, E5M2, E4M3FNUZ, BF16, FP16, E8M0, E2M1, *(inputs.random_format(case.rng) for _ in range(6))):
        x, noise = inputs.on_the_noise_grid(fmt, case.count(6), case.rng)
        grid, noises = x[:, None].repeat(1, inputs.NOISES), noise.repeat(len(x), 1)
        right = exact.round_stochastic(grid, fmt, noises)
        got = answer(grid, fmt, noises)
        if type(got) is torch.Tensor and got.shape == right.shape and got.dtype == right.dtype:
            case.same_bits(got.double().mean(dim=1), x.double())
        else:
            case.same_bits(got, right)


@check_for("round_stochastic", weight=2)
def noise_next_to_the_share(answer, case):
    """All registered formats: noise just below, at and just above the share of the way; both policies."""
    for fmt in FORMATS.values():
        x = inputs.edges(fmt, case.count(60), case.rng)
        x = torch.cat([x, inputs.random_float32(case.count(100), case.rng), _between(fmt, case)])
        noise = _telling_noise(x, fmt, case)
        for overflow in exact.OVERFLOWS[: 1 if fmt.specials == "finite" else 2]:
            case.same_bits(answer(x, fmt, noise, overflow), exact.round_stochastic(x, fmt, noise, overflow))


def _between(fmt, case):
    """Random numbers over the range of the format, between its values."""
    low, high = (
        math.log2(edge) for edge in (oracle.min_subnormal(fmt) or oracle.min_normal(fmt), oracle.max_finite(fmt))
    )
    size = 2.0 ** case.rng.uniform(low - 2, min(high + 1, 127.9), case.count(100))
    return torch.from_numpy(np.where(case.rng.random(size.size) < 0.5, -size, size).astype(np.float32))


@check_for("round_stochastic")
def values_do_not_move(answer, case):
    """Values of the format, with noise from 0 to 1 - 2^-23."""
    for fmt in (*FORMATS.values(), *inputs.MADE_UP):
        x = oracle.decode(inputs.codes_to_try(fmt, case.count(300), case.rng), fmt).float()
        x = x[:: max(1, len(x) // 1000)]
        noise = _some_noise(x, case)
        noise[::2] = 1 - 2.0**-23
        case.same_bits(answer(x, fmt, noise), exact.round_stochastic(x, fmt, noise))


@check_for("round_stochastic", weight=2)
def at_random_in_made_up_formats(answer, case):
    """Made-up formats, without sign, zero or mantissa too; both policies."""
    for fmt in made_up_formats(case, 12):
        x = torch.cat([inputs.edges(fmt, case.count(20), case.rng), _between(fmt, case)])
        noise = _telling_noise(x, fmt, case)
        for overflow in exact.OVERFLOWS[: 1 if fmt.specials == "finite" else 2]:
            case.same_bits(answer(x, fmt, noise, overflow), exact.round_stochastic(x, fmt, noise, overflow))


@check_for("round_stochastic")
def at_random_in_any_shape(answer, case):
    """Tensors of no dimension, of two, transposed and empty; policies that do not exist: ValueError."""
    for fmt in (E4M3, BF16):
        for x in inputs.shapes_of(inputs.random_float32(case.count(200), case.rng)):
            noise = _some_noise(x, case)
            case.same_bits(answer(x, fmt, noise), exact.round_stochastic(x, fmt, noise))
    ones = torch.ones(2)
    case.raises(ValueError, answer, ones, E4M3, ones * 0.5, "clip")
    case.raises(ValueError, answer, ones, E2M1, ones * 0.5, "to_special")


def _at_random(x, fmt, noise, overflow, up):
    """The right rule with the choice `up(steps, below, noise)` replaced; float64 steps of the magnitude."""
    exact.require_policies(fmt, "nearest_even", overflow)
    step = oracle.ulp(x, fmt)
    steps = x.double().abs() / step
    below = steps.floor()
    return _settled(x, fmt, overflow, (below + up(steps, below, noise.double())) * step)


@misconception(
    "round_stochastic",
    "It adds the noise and cuts: as fair, but it moves for the other half of the noises than the contract says.",
)
def adds_noise_and_cuts(x, fmt, noise, overflow="saturate"):
    return _at_random(x, fmt, noise, overflow, lambda steps, below, noise: (steps + noise).floor() - below)


@misconception(
    "round_stochastic", "It adds the noise in float32, where 15 + (1 - 2^-23) is 16: values of the format move, too."
)
def adds_noise_in_float32(x, fmt, noise, overflow="saturate"):
    return _at_random(
        x, fmt, noise, overflow, lambda steps, below, noise: (steps.float() + noise.float()).floor().double() - below
    )


@misconception("round_stochastic", "It moves at noise <= share: with noise 0, values of the format move too.")
def moves_at_equality(x, fmt, noise, overflow="saturate"):
    return _at_random(x, fmt, noise, overflow, lambda steps, below, noise: (noise <= steps - below).double())


@misconception(
    "round_stochastic",
    "It measures the share from below for negative numbers too: the contract speaks of the magnitude.",
)
def share_of_the_signed_value(x, fmt, noise, overflow="saturate"):
    def up(steps, below, noise):
        share = steps - below
        return torch.where(x.signbit(), (share > 0) & ~(noise < 1 - share), noise < share).double()

    return _at_random(x, fmt, noise, overflow, up)


@misconception(
    "round_stochastic", "It moves negative numbers towards zero with the probability of moving away from it."
)
def wrong_side_of_zero(x, fmt, noise, overflow="saturate"):
    def up(steps, below, noise):
        share = steps - below
        return torch.where(x.signbit(), (share > 0) & ~(noise < share), noise < share).double()

    return _at_random(x, fmt, noise, overflow, up)


@misconception("round_stochastic", "It rounds to nearest first: nothing is left for the noise to decide.")
def nearest_whatever_the_noise(x, fmt, noise, overflow="saturate"):
    return exact.round_to(x, fmt, "nearest_even", overflow)


@misconception("round_stochastic", "It tosses a coin: up at noise below a half, however far x is on its way.")
def tosses_a_coin(x, fmt, noise, overflow="saturate"):
    return _at_random(x, fmt, noise, overflow, lambda steps, below, noise: ((steps > below) & (noise < 0.5)).double())


@misconception("round_stochastic", "It moves when the noise is above the share: with the probability of staying.")
def complement_of_the_share(x, fmt, noise, overflow="saturate"):
    return _at_random(
        x, fmt, noise, overflow, lambda steps, below, noise: ((noise >= steps - below) & (steps > below)).double()
    )


@misconception("round_stochastic", "It flushes subnormals to zero before the noise is looked at: their mean is 0.")
def flushes_before_the_noise(x, fmt, noise, overflow="saturate"):
    right = exact.round_stochastic(x, fmt, noise, overflow)
    small = (x.abs() < oracle.min_normal(fmt)) & fmt.subnormals & ~right.isnan()
    return torch.where(small, right * 0.0, right)


@misconception(
    "round_stochastic",
    "It saturates before it looks at the noise: between the largest value and the next, chance decides.",
)
def clamps_first(x, fmt, noise, overflow="saturate"):
    right = exact.round_stochastic(x, fmt, noise, overflow)
    if overflow == "saturate":
        return right
    special = torch.full_like(x, _INF if fmt.specials == "ieee" else _NAN)
    return torch.where((x.abs() > oracle.max_finite(fmt)) & ~right.isnan(), torch.copysign(special, x), right)


@misconception(
    "round_stochastic", "It never overflows numbers near the end: above the largest value it always stays there."
)
def no_step_beyond_the_largest(x, fmt, noise, overflow="saturate"):
    right = exact.round_stochastic(x, fmt, noise, overflow)
    near = (x.abs() > oracle.max_finite(fmt)) & (x.abs().double() < exact.beyond(fmt))
    near = near & ~((x < 0) & (not fmt.signed))
    return torch.where(near, torch.copysign(torch.full_like(x, oracle.max_finite(fmt)), x), right)


@misconception(
    "round_stochastic", "It is unfair at the border of a binade: the step of the binade above is used just below it."
)
def step_of_the_binade_above(x, fmt, noise, overflow="saturate"):
    exact.require_policies(fmt, "nearest_even", overflow)
    step = oracle.ulp(x, fmt)
    after = oracle.ulp((x.double().abs() + step).float(), fmt).nan_to_num(1.0)
    step = torch.where(x.isfinite() & (after > step), after, step)
    steps = x.double().abs() / step
    below = steps.floor()
    return _settled(x, fmt, overflow, (below + (noise.double() < steps - below)) * step)


@misconception("round_stochastic", "It loses the sign of zero: what rounds to zero from below is -0.0.")
def zero_without_sign(x, fmt, noise, overflow="saturate"):
    return exact.round_stochastic(x, fmt, noise, overflow) + 0.0


@misconception("round_stochastic", "It lets infinity through when it saturates.")
def infinity_stays(x, fmt, noise, overflow="saturate"):
    right = exact.round_stochastic(x, fmt, noise, overflow)
    return torch.where(x.isinf() & (overflow == "saturate") & ~right.isnan(), x, right)


# --- 2.6 double_rounding_victims --------------------------------------------------------------------------------------


def _near_a_tie(via, fmt, case, most):
    """(lo, hi) around a random midpoint of `fmt` inside the normal range of both, at most `most` float32 wide."""
    low = max(oracle.min_normal(fmt), oracle.min_normal(via))
    high = min(oracle.max_finite(fmt), oracle.max_finite(via))
    middle = inputs.midpoints(fmt)
    middle = middle[(middle > low) & (middle < high)]
    tie = float(middle[int(case.rng.integers(len(middle)))])
    first = int(exact.first_at_or_above(np.array([tie]))[0])
    before, after = (int(part) for part in case.rng.integers(most // 4, most // 2, 2))
    lo, hi = inputs.float32_from_bits([first - before, first + after]).tolist()
    return lo, hi


@check_for("double_rounding_victims")
def next_to_one(answer, case):
    """E4M3 and E5M2 through FP16, next to the ties after 1 (1.0625 and 1.125)."""
    for via, fmt, tie in ((FP16, E4M3, 1.0625), (FP16, E5M2, 1.125), (FP16, E4M3, 1.1875)):
        for lo, hi in ((tie - 2.0**-12, tie + 2.0**-11), (tie, tie + 2.0**-13), (tie - 2.0**-13, tie)):
            case.same_bits(answer(via, fmt, lo, hi), victims(via, fmt, lo, hi))


@check_for("double_rounding_victims", weight=2)
def through_other_formats(answer, case):
    """Intervals around ties of E4M3, E5M2, FP16 and made-up formats, through BF16, FP16, TF32 and E5M2."""
    made = Format("e5m4", 5, 4, bias=9)
    pairs = ((BF16, E4M3), (BF16, E5M2), (TF32, FP16), (FP16, made), (BF16, E4M3FNUZ), (made, E4M3), (E5M2, E4M3))
    for via, fmt in pairs:
        lo, hi = _near_a_tie(via, fmt, case, 2**15)
        case.same_bits(answer(via, fmt, lo, hi), victims(via, fmt, lo, hi))


@check_for("double_rounding_victims")
def at_the_ends_of_the_range(answer, case):
    """Subnormals, intervals across powers of two, and values that the format in between has no room for."""
    for via, fmt, lo, hi in (
        (BF16, E4M3, 2.0**-10, 2.0**-10 * 1.003), (BF16, E5M2, 2.0**-17, 2.0**-17 * 1.002),
        (E5M2, BF16, 61439.0, 61442.0),
        (E4M3, E5M2, 447.9, 448.1), (E4M3, E5M2, 479.9, 480.1), (E4M3FNUZ, E5M2, 247.9, 248.1), (E2M1, E3M2, 6.99, 7.0),
        (FP16, BF16, 65500.0, 65540.0), (FP16, E4M3, 2.0**-25, 2.0**-25 * 1.004), (FP16, E8M0, 2.979e-8, 2.981e-8),
        (BF16, E4M3, 464.0, 465.0), (E2M1, E3M2, 6.499, 6.51), (BF16, E4M3, 1.999, 2.0001), (E8M0, E4M3, 1.499, 1.501),
        (BF16, E5M2, 61430.0, 61450.0), (FP16, E2M1, 2.0**-149, 2.0**-140),
    ):  # fmt: skip
        case.same_bits(answer(via, fmt, lo, hi), victims(via, fmt, lo, hi))


@check_for("double_rounding_victims")
def ends_that_are_no_float32(answer, case):
    """Intervals whose ends are no float32, or one; lo counts, hi does not; intervals without any victim."""
    tie = 1.0625
    step = 2.0**-23
    for lo, hi in (
        (tie + step, tie + 2 * step), (tie + step, tie + 3 * step), (tie + step / 3, tie + 2.5 * step), (1.1, 1.1001),
        (tie + 0.6 * step, tie + 1.4 * step), (1.0, 1.0001), (tie - 2 * step, tie + step), (tie + step, 1.0626),
    ):  # fmt: skip
        case.same_bits(answer(BF16, E4M3, lo, hi), victims(BF16, E4M3, lo, hi))


def _interval(lo, hi, last=0, first=0):
    begin, end = exact.first_at_or_above(np.array([lo, hi], dtype=np.float64)).tolist()
    return inputs.float32_from_bits(np.arange(begin + first, max(end + last, begin + first)))


def _changed(x, via, fmt):
    return exact.round_to(exact.round_to(x, via), fmt) != exact.round_to(x, fmt)


@misconception("double_rounding_victims", "It takes `hi` in: the interval ends below it.")
def takes_the_end_in(via, fmt, lo, hi):
    x = _interval(lo, hi, last=1)
    return x[_changed(x, via, fmt)]


@misconception("double_rounding_victims", "It leaves `lo` out: the interval begins with it.")
def leaves_the_start_out(via, fmt, lo, hi):
    start = np.float32(lo) == lo
    x = _interval(lo, hi, first=int(start))
    return x[_changed(x, via, fmt)]


@misconception(
    "double_rounding_victims",
    "It takes a Python float for the float32 next to it: an end between two must be looked at.",
)
def rounds_the_ends(via, fmt, lo, hi):
    x = _interval(float(np.float32(lo)), float(np.float32(hi)))
    return x[_changed(x, via, fmt)]


@misconception("double_rounding_victims", "It returns what the victims become, not the victims themselves.")
def returns_the_results(via, fmt, lo, hi):
    x = victims(via, fmt, lo, hi)
    return exact.round_to(exact.round_to(x, via), fmt)


@misconception(
    "double_rounding_victims", "It returns everything that `via` changes: what matters is what `fmt` makes of it."
)
def changed_by_via(via, fmt, lo, hi):
    x = _interval(lo, hi)
    return x[exact.round_to(x, via) != x]


@misconception(
    "double_rounding_victims", "It compares the two formats with each other, instead of one and two roundings to `fmt`."
)
def compares_the_formats(via, fmt, lo, hi):
    x = _interval(lo, hi)
    return x[exact.round_to(x, via) != exact.round_to(x, fmt)]


@misconception("double_rounding_victims", "It rounds to `fmt` first and to `via` afterwards.")
def the_other_way_round(via, fmt, lo, hi):
    x = _interval(lo, hi)
    return x[exact.round_to(exact.round_to(x, fmt), via) != exact.round_to(x, fmt)]


@misconception("double_rounding_victims", "It looks at the values of `via` alone, which that rounding does not move.")
def values_of_via_alone(via, fmt, lo, hi):
    x = _interval(lo, hi)
    x = x[exact.round_to(x, via) == x]
    return x[_changed(x, via, fmt)]


@misconception(
    "double_rounding_victims", "It walks in steps of 2^-23, which is the spacing of float32 between 1 and 2 alone."
)
def in_steps_of_epsilon(via, fmt, lo, hi):
    count = min(int((hi - lo) * 2**23) + 1, 2**20)
    x = torch.from_numpy((lo + np.arange(count) * 2.0**-23).astype(np.float32))
    x = torch.unique(x[(x.double() >= lo) & (x.double() < hi)])
    return x[_changed(x, via, fmt)]


@misconception(
    "double_rounding_victims", "It lets the format in between overflow to infinity or NaN: both roundings saturate."
)
def via_overflows(via, fmt, lo, hi):
    x = _interval(lo, hi)
    policy = "saturate" if via.specials == "finite" else "to_special"
    return x[exact.round_to(exact.round_to(x, via, "nearest_even", policy), fmt) != exact.round_to(x, fmt)]


@misconception("double_rounding_victims", "It rounds ties away from zero: both roundings are to the even neighbour.")
def victims_of_ties_away(via, fmt, lo, hi):
    x = _interval(lo, hi)
    once = exact.round_to(x, fmt, "nearest_away")
    return x[exact.round_to(exact.round_to(x, via, "nearest_away"), fmt, "nearest_away") != once]


# --- 2.7 fast_round_to ------------------------------------------------------------------------------------------------


def is_fast(fmt: Format) -> bool:
    """Whether `fast_round_to` has to know the format."""
    return (
        fmt.signed and fmt.subnormals and fmt.exponent_bits >= 2 and fmt.mantissa_bits <= 22 and -100 <= fmt.bias <= 127
    )


def _fast_formats(case, count):
    """Made-up formats that fast_round_to has to know, and random ones."""
    found = [fmt for fmt in (*inputs.MADE_UP, Format("e4m0", 4, 0, specials="finite")) if is_fast(fmt)]
    wanted = len(found) + case.count(count)
    while len(found) < wanted:
        fmt = inputs.random_format(case.rng)
        if is_fast(fmt):
            found.append(fmt)
    return found


@check_for("fast_round_to", weight=2)
def fast_in_registered_formats(answer, case):
    """Values, midpoints and their float32 neighbours of the registered formats with a sign and a zero."""
    for fmt in filter(is_fast, FORMATS.values()):
        x = inputs.edges(fmt, case.count(300), case.rng)
        case.same_bits(answer(x, fmt), exact.round_to(x, fmt))


@check_for("fast_round_to", weight=2)
def fast_in_made_up_formats(answer, case):
    """Made-up formats with 2 to 8 exponent bits, without mantissa and with any bias too."""
    for fmt in _fast_formats(case, 16):
        x = inputs.edges(fmt, case.count(100), case.rng)
        case.same_bits(answer(x, fmt), exact.round_to(x, fmt))


@check_for("fast_round_to")
def fast_in_any_shape(answer, case):
    """Random float32 in tensors of no dimension, of two, transposed and empty."""
    for fmt in (E4M3, BF16, E5M2FNUZ):
        for x in inputs.shapes_of(inputs.random_float32(case.count(400), case.rng)):
            case.same_bits(answer(x, fmt), exact.round_to(x, fmt))


@check_for("fast_round_to")
def out_is_written_and_returned(answer, case):
    """With `out`: it holds the result, and it is what comes back."""
    for fmt in (E4M3, FP16, E2M1):
        for x in (inputs.edges(fmt, 40, case.rng), inputs.random_float32(12, case.rng).reshape(3, 4)):
            got = answer.run(written_into, x, fmt)
            parts = got if type(got) is tuple and len(got) == 2 else (got, False)
            case.same_bits(parts[0], exact.round_to(x, fmt))
            case.same_bits(parts[1], True, show=lambda same: "out itself" if same else "another tensor")


@check_for("fast_round_to")
def it_is_one_graph(answer, case):
    """torch.compile follows it as one graph (fullgraph=True), and the bits stay the same."""
    for fmt in (E4M3, E4M3FNUZ):
        x = inputs.edges(fmt, 60, case.rng)
        case.same_bits(answer.run(traced, x, fmt), exact.round_to(x, fmt))


def _into(result, out):
    return result if out is None else out.copy_(result)


def _fast(x, fmt, *, odd=True, subnormal=True, nan=True, infinity=True, negative_zero=False, sign=torch.copysign):
    """A fast rounder with parts left out, which torch.compile can follow: what most misconceptions here are made of."""
    normal, size = _normal(x, fmt, odd), (x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32)
    largest = _largest(fmt)
    result = torch.where(size < 2.0 ** (1 - fmt.bias), _steps(size, fmt, subnormal), normal).clamp(max=largest)
    result = result if infinity else torch.where(size.isinf(), _INF, result)
    result = sign(torch.where(x.isnan(), _NAN if nan else largest, result), x)
    return result if negative_zero or fmt.specials != "fnuz" else torch.where(result == 0, 0.0, result)


def _normal(x, fmt, odd=True):
    """Magnitudes rounded as normal numbers are; odd: True (ties to even), "code" (the last bit's), False (up)."""
    lost = 23 - fmt.mantissa_bits
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    last = ((magnitude >> lost) & 1 if fmt.mantissa_bits or odd == "code" else 1) if odd else 1
    return ((magnitude + (2 ** (lost - 1) - 1) + last) >> lost << lost).view(torch.float32)


def _steps(size, fmt, subnormal):
    """Magnitudes rounded to multiples of the smallest subnormal; subnormal: True (ties to even), "up" or "flush"."""
    if subnormal == "flush":
        return size * 0.0
    magic = 2.0 ** (24 - fmt.bias - fmt.mantissa_bits)
    even = (size + magic) - magic
    step = 2.0 ** (1 - fmt.bias - fmt.mantissa_bits)
    return even if subnormal is True else torch.where(size - even == step / 2, even + step, even)


def _largest(fmt):
    """The largest finite value in closed form: `oracle.max_finite` looks at codes, which no compiler can follow."""
    top = 2**fmt.exponent_bits - 1 - (fmt.specials == "ieee" or (fmt.specials == "fn" and not fmt.mantissa_bits))
    ones = 2 ** (fmt.mantissa_bits + 1) - 1 - (fmt.specials == "fn" and fmt.mantissa_bits > 0)
    return ones * 2.0 ** (top - fmt.bias - fmt.mantissa_bits)


@misconception("fast_round_to", "It rounds ties away from zero: the odd bit is missing from what is added.")
def fast_ties_away(x, fmt, out=None):
    return _into(_fast(x, fmt, odd=False, subnormal="up"), out)


@misconception("fast_round_to", "It rounds ties of subnormals up: only its normal numbers go to the even neighbour.")
def fast_subnormal_ties_up(x, fmt, out=None):
    return _into(_fast(x, fmt, subnormal="up"), out)


@misconception("fast_round_to", "It flushes subnormals to zero.")
def fast_flushes(x, fmt, out=None):
    return _into(_fast(x, fmt, subnormal="flush"), out)


@misconception("fast_round_to", "It treats subnormals like normal numbers: they get as many mantissa bits.")
def fast_without_subnormals(x, fmt, out=None):
    tiny = (x.abs() < 2.0 ** (1 - fmt.bias)) & (x != 0)
    return _into(torch.where(tiny, torch.copysign(_normal(x, fmt), x), _fast(x, fmt)), out)


@misconception("fast_round_to", "It saturates NaN: the largest value comes out.")
def fast_saturates_nan(x, fmt, out=None):
    return _into(_fast(x, fmt, nan=False), out)


@misconception("fast_round_to", "It lets infinity through: the largest value is right for infinity too.")
def fast_keeps_infinity(x, fmt, out=None):
    return _into(_fast(x, fmt, infinity=False), out)


@misconception("fast_round_to", "It keeps -0 in fnuz formats, which have none.")
def fast_negative_zero(x, fmt, out=None):
    return _into(_fast(x, fmt, negative_zero=True), out)


@misconception("fast_round_to", "It puts the sign back with torch.sign: -0.0, and what rounds to it, need copysign.")
def fast_loses_the_sign_of_zero(x, fmt, out=None):
    return _into(_fast(x, fmt, sign=lambda size, x: torch.where(x == 0, 0.0, torch.copysign(size, x))), out)


@misconception(
    "fast_round_to",
    "It rounds ties to the even code in formats without mantissa bits: there the larger value is right.",
)
def fast_ties_by_code(x, fmt, out=None):
    return _into(_fast(x, fmt, odd="code"), out)


@misconception("fast_round_to", "It ignores `out`: the result must be written into it.")
def fast_ignores_out(x, fmt, out=None):
    return _fast(x, fmt)


@misconception("fast_round_to", "It writes into `out`, and returns another tensor.")
def fast_returns_another(x, fmt, out=None):
    result = _fast(x, fmt)
    if out is not None:
        out.copy_(result)
    return result


@misconception("fast_round_to", "It asks a tensor for a value (`if x.isnan().any()`): a graph has no such branch.")
def fast_branches_on_values(x, fmt, out=None):
    result = _fast(x, fmt)
    if x.isnan().any():
        result = torch.where(x.isnan(), _NAN, result)
    return _into(result, out)


# --- 2.8 cast_saturating ----------------------------------------------------------------------------------------------


def _cast(answer, case, x, fmt):
    case.same_bits(answer(x, fmt.torch_dtype), saturated(x, fmt.torch_dtype))


@check_for("cast_saturating")
def beyond_the_largest(answer, case):
    """The largest values and what is above them, infinities, NaN, both zeros; three dtypes into four."""
    for fmt in FLOAT8:
        largest = oracle.max_finite(fmt)
        x = torch.tensor([largest, largest * 1.01, largest * 1.03, exact.beyond(fmt), largest * 2, 6e4, _INF, 0.0, 1.0])
        x = torch.cat([x, -x, torch.tensor([_NAN, 1e-9, -1e-9])])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            _cast(answer, case, x.to(dtype), fmt)


@check_for("cast_saturating", weight=2)
def every_edge_of_float32(answer, case):
    """All values, midpoints and their float32 neighbours of the four dtypes; random float32."""
    for fmt in FLOAT8:
        _cast(answer, case, torch.cat([inputs.edges(fmt), inputs.random_float32(case.count(1000), case.rng)]), fmt)


@check_for("cast_saturating")
def every_bfloat16_and_float16(answer, case):
    """All 65,536 bfloat16 and all 65,536 float16 numbers, each into one dtype or more."""
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for fmt, dtypes in zip(FLOAT8, ((0, 1), (0, 1), (0,), (1,)), strict=True):
        for which in dtypes:
            _cast(answer, case, codes.view((torch.bfloat16, torch.float16)[which]), fmt)


@check_for("cast_saturating")
def casts_in_any_shape(answer, case):
    """Tensors of no dimension, of two, transposed and empty, in three dtypes."""
    for fmt, dtype in zip(FLOAT8, (torch.float32, torch.bfloat16, torch.float16, torch.float32), strict=True):
        for x in inputs.shapes_of(inputs.random_float32(case.count(120), case.rng).to(dtype)):
            _cast(answer, case, x, fmt)


def _float8(x, dtype):
    return next(fmt for fmt in FLOAT8 if fmt.torch_dtype == dtype)


def _with(x, dtype, where, value):
    """The right cast, with the code of `value` where a condition holds."""
    replaced = exact.encode(torch.where(where, value, x.float()), _float8(x, dtype), "nearest_even", "to_special")
    codes = torch.where(where, replaced, saturated(x, dtype).view(torch.uint8).to(torch.int32))
    return codes.to(torch.uint8).view(dtype)


@misconception(
    "cast_saturating", "It casts and no more: what is too large becomes what this version of torch makes of it."
)
def only_casts(x, dtype):
    return x.to(dtype)


@misconception("cast_saturating", "It clamps to 448 whatever the dtype: each has its own largest value.")
def clamps_to_448(x, dtype):
    return saturated(x.float().clamp(-448, 448), dtype)


@misconception("cast_saturating", "It clamps above and forgets the negative side.")
def clamps_one_side(x, dtype):
    fmt = _float8(x, dtype)
    special = -_INF if fmt.specials == "ieee" else _NAN
    below = exact.round_to(x.float(), fmt, "nearest_even", "to_special")
    overflowed = (x < 0) & ~below.isfinite() & ~x.isnan()
    return _with(x, dtype, overflowed, special)


@misconception("cast_saturating", "It replaces NaN by 0.")
def nan_to_zero(x, dtype):
    return _with(x, dtype, x.isnan(), 0.0)


@misconception("cast_saturating", "It turns NaN into the largest value.")
def nan_to_largest(x, dtype):
    return _with(x, dtype, x.isnan(), oracle.max_finite(_float8(x, dtype)))


@misconception("cast_saturating", "It clamps finite numbers alone: infinity must become the largest value, too.")
def leaves_infinity(x, dtype):
    special = torch.where(x.float() > 0, _INF, -_INF)
    return _with(x, dtype, x.isinf(), special)


@misconception("cast_saturating", "It goes through float16 on the way: two roundings are not one.")
def by_way_of_float16(x, dtype):
    return saturated(x.to(torch.float16).float(), dtype)


@misconception("cast_saturating", "It goes through bfloat16 on the way: two roundings are not one.")
def by_way_of_bfloat16(x, dtype):
    return saturated(x.to(torch.bfloat16).float(), dtype)


@misconception(
    "cast_saturating", "It loses the sign of what it saturates: -1e6 becomes the largest value, not its negative."
)
def saturates_to_the_positive(x, dtype):
    largest = oracle.max_finite(_float8(x, dtype))
    return _with(x, dtype, x.float() < -largest, largest)


@misconception("cast_saturating", "It returns float32: a tensor of the asked dtype is expected.")
def casts_back(x, dtype):
    return saturated(x, dtype).float()


# --- questions about the real code ------------------------------------------------------------------------------------

question_for(
    "2.A",
    14,
    "Right: the field 141 less the bias 127. From 2^14 on the steps of float32 are 2^-9, E4M3's smallest one.",
    "A float32 with the exponent field 141 and an empty mantissa: subtract float32's bias.",
    {
        141: "That is the field as it is stored. Its bias is 127.",
        -9: "That is the step that the trick needs. Which power of two has this step in float32?",
        2**14: "That is the number itself. Which power of two is it?",
    },
)
question_for(
    "2.B",
    0x7F,
    "Right: rounding up may have made 0x7F of it, the code of NaN; one less is 0x7E, and that is 448.",
    "Look after the rounding, at the end of the branch for normal numbers: when is `result` changed once more?",
    {
        0x7E: "That is the result, 448. The line compares with the code that must not come out.",
        480: "480 is the value. The line compares a code.",
    },
)
