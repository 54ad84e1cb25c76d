"""The exact oracle for rounding: which value of a format a float32 becomes, under every mode and overflow policy.

Nothing is computed on the input but a search. For each format, mode and sign the *breakpoints* are worked out once,
exactly (float64 holds every value of a format of at most 16 bits, and every midpoint): breakpoint k is the smallest
float32 magnitude that becomes value k + 1 instead of value k. Magnitudes are compared as integers, because the bits of
non-negative floats are in the order of their values. Formats of more than 16 bits have too many values for that: there
the input's significand is divided by the step, in whole numbers.

Rules beyond the modes (IEEE 754-2019 sections 4.3 and 7.4; the formats' own specifications):
- a value is rounded first, as if the largest binade went on; what then lies above the largest finite value overflows;
- toward_zero, and the directed mode that points towards zero, never overflow a finite number;
- overflow "saturate" gives the largest finite value, for infinity too; "to_special" gives infinity where the format has
  one, else NaN; NaN stays NaN; the sign of zero stays where the format has a -0;
- a format without zero rounds what is below its smallest value to that value; a format without sign makes negative
  numbers NaN (-0 is zero).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import Format
from lowprec_lab.graders import oracle

MODES = ("nearest_even", "nearest_away", "toward_zero", "up", "down")
OVERFLOWS = ("saturate", "to_special")
_INFINITY_BITS = 0x7F800000
_LADDER_WIDTH = 16


@lru_cache(maxsize=256)
def ladder(fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """(values, codes): every finite magnitude of a format of at most 16 bits in order, float64, with its code."""
    codes = np.arange(2 ** (fmt.exponent_bits + fmt.mantissa_bits))
    values = oracle.decode(torch.from_numpy(codes.astype(np.int32)), fmt).numpy()
    finite = np.isfinite(values)
    return values[finite], codes[finite]


def beyond(fmt: Format) -> float:
    """The value that would follow the largest one, if its binade went on."""
    top = oracle.max_finite(fmt)
    return float(top + np.ldexp(1.0, int(np.frexp(top)[1]) - 1 - fmt.mantissa_bits))


def first_at_or_above(values: np.ndarray) -> np.ndarray:
    """The bits of the smallest non-negative float32 that is not below each (float64) value."""
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    bits = near.view(np.uint32).astype(np.int64)
    return bits + (near.astype(np.float64) < values)


def _first_above(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    bits = near.view(np.uint32).astype(np.int64)
    return bits + (near.astype(np.float64) <= values)


@lru_cache(maxsize=1024)
def breakpoints(fmt: Format, mode: str, negative: bool) -> np.ndarray:
    """int64 bits: number k is the first magnitude that becomes step k + 1; the last one is where overflow begins."""
    steps, _ = ladder(fmt)
    low, high = steps, np.append(steps[1:], beyond(fmt))
    middle = (low + high) / 2
    if mode == "nearest_even":
        # Even is the last digit of the significand, counted in steps of the gap. Between two powers of two of a format
        # without mantissa bits both are odd (1 and 1): IEEE 754-2019 section 4.3.1 gives the larger one.
        upper_is_even = (low / (high - low)) % 2 == 1
        return np.where(upper_is_even, first_at_or_above(middle), _first_above(middle))
    if mode == "nearest_away":
        return first_at_or_above(middle)
    if (mode == "up" and not negative) or (mode == "down" and negative):
        return _first_above(low)
    inwards = first_at_or_above(high)
    inwards[-1] = _INFINITY_BITS  # finite numbers do not overflow towards zero
    return inwards


def require_policies(fmt: Format, mode: str, overflow: str) -> None:
    """Raise ValueError for a mode, a policy, or a combination that does not exist."""
    if mode not in MODES or overflow not in OVERFLOWS:
        raise ValueError(f"no such mode or overflow policy: {mode!r}, {overflow!r}")
    if overflow == "to_special" and fmt.specials == "finite":
        raise ValueError(f"{fmt.name} has no special value to overflow to")


def _split(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    bits = oracle.bit_pattern(x).numpy().astype(np.int64) % 2**32
    return bits // 2**31 == 1, bits % 2**31


def _top_code(fmt: Format) -> int:
    """The code of the largest finite value. Codes of magnitudes count steps: 0, 1, 2, ... up to it."""
    ones = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1
    return {"ieee": ones - 2**fmt.mantissa_bits, "fn": ones - 1}.get(fmt.specials, ones)


def _finish(steps: np.ndarray, negative: np.ndarray, magnitude: np.ndarray, fmt: Format, overflow: str) -> Tensor:
    """int64 codes from steps (past the top: overflow), the sign and the input's bits; -1 is NaN without a code."""
    top, special = _top_code(fmt), infinity_code(fmt)
    over = (steps > top) | (magnitude == _INFINITY_BITS)
    nan = magnitude > _INFINITY_BITS
    found = np.minimum(steps, top)
    if overflow == "to_special":
        found = np.where(over, 0 if special is None else special, found)
        nan = nan | (over & (special is None))
    else:
        found = np.where(over, top, found)
    if fmt.signed:
        no_sign = (found == 0) & (fmt.specials == "fnuz")  # the code of -0 is the NaN there
        found = np.where(negative & ~no_sign, found + 2 ** (fmt.width - 1), found)
    else:
        nan = nan | (negative & (magnitude != 0))
    code_of_nan = nan_code(fmt)
    return torch.from_numpy(
        np.asarray(np.where(nan, -1 if code_of_nan is None else code_of_nan, found), dtype=np.int64)
    )


def nan_code(fmt: Format) -> int | None:
    """The one code that NaN is encoded as; None for finite formats."""
    ones = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1
    top_exponent = (2**fmt.exponent_bits - 1) * 2**fmt.mantissa_bits
    quiet = top_exponent + 2 ** (fmt.mantissa_bits - 1) if fmt.mantissa_bits else None
    return {"ieee": quiet, "fn": ones, "fnuz": 2 ** (fmt.width - 1), "finite": None}[fmt.specials]


def infinity_code(fmt: Format) -> int | None:
    """The code of +infinity; None for formats without one."""
    return (2**fmt.exponent_bits - 1) * 2**fmt.mantissa_bits if fmt.specials == "ieee" else None


def encode(x: Tensor, fmt: Format, mode: str = "nearest_even", overflow: str = "saturate") -> Tensor:
    """The codes of the rounded elements, int32. ValueError as `require_policies`, and for NaN in a finite format."""
    codes = _codes(x, fmt, mode, overflow)
    if bool((codes < 0).any()):
        raise ValueError(f"{fmt.name} has no code for NaN")
    return codes.to(torch.int32)


def round_to(x: Tensor, fmt: Format, mode: str = "nearest_even", overflow: str = "saturate") -> Tensor:
    """The rounded elements, float32."""
    return _values(_codes(x, fmt, mode, overflow), fmt)


def _codes(x: Tensor, fmt: Format, mode: str, overflow: str) -> Tensor:
    require_policies(fmt, mode, overflow)
    negative, magnitude = _split(x)
    if fmt.width > _LADDER_WIDTH:
        steps = _wide_steps(negative, magnitude, fmt, mode)
    else:
        above, below = (np.searchsorted(breakpoints(fmt, mode, sign), magnitude, "right") for sign in (False, True))
        steps = np.where(negative, below, above)
    return _finish(steps, negative, magnitude, fmt, overflow)


def _divided(magnitude: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps, rest, bits): the code of the value below, and what is left over, in units of 2^-bits of a step."""
    field, fraction = magnitude >> 23, magnitude & 0x7FFFFF
    significand, unit = np.where(field > 0, fraction + 2**23, fraction), np.maximum(field, 1) - 150
    exponent = unit + np.frexp(significand.astype(np.float64))[1] - 1
    lowest = (1 if fmt.subnormals else 0) - fmt.bias
    binade = np.where(significand > 0, np.maximum(exponent, lowest), lowest)
    bits = binade - fmt.mantissa_bits - unit
    right, left = np.clip(bits, 0, 40), np.clip(-bits, 0, None)
    whole, rest = (significand << left) >> right, np.where(bits > 0, significand & ((1 << right) - 1), 0)
    steps = (binade + fmt.bias - 1) * 2**fmt.mantissa_bits + whole
    below_all = steps < 0  # only without a zero: the smallest value is for all that is below it
    return np.where(below_all, 0, steps), np.where(below_all, 0, rest), np.maximum(bits, 0)


def _wide_steps(negative: np.ndarray, magnitude: np.ndarray, fmt: Format, mode: str) -> np.ndarray:
    steps, rest, bits = _divided(magnitude, fmt)
    half = np.ldexp(0.5, bits)
    outwards = ~negative if mode == "up" else negative
    move = {
        "nearest_even": (rest > half) | ((rest == half) & (steps % 2 == 1)),
        "nearest_away": (rest >= half) & (rest > 0),
        "toward_zero": False,
    }.get(mode, (rest > 0) & outwards)
    top = _top_code(fmt)
    inwards = ~outwards if mode in ("up", "down") else mode == "toward_zero"
    return np.where(inwards, np.minimum(steps + move, top), steps + move)


def _values(codes: Tensor, fmt: Format) -> Tensor:
    values = oracle.decode(codes.clamp(min=0).to(torch.int32), fmt).float()
    return torch.where(codes < 0, torch.tensor(float("nan")), values)


def round_stochastic(x: Tensor, fmt: Format, noise: Tensor, overflow: str = "saturate") -> Tensor:
    """The elements rounded by the rule of the exercise, float32; every comparison is exact in float64."""
    require_policies(fmt, "nearest_even", overflow)
    negative, magnitude = _split(x)
    if fmt.width > _LADDER_WIDTH:
        steps, rest, bits = _divided(magnitude, fmt)
        steps = steps + (np.ldexp(noise.numpy().astype(np.float64), bits) < rest)
        return _values(_finish(steps, negative, magnitude, fmt, overflow), fmt)
    values, _ = ladder(fmt)
    wide = np.abs(x.numpy().astype(np.float64))
    finite = np.where(np.isfinite(wide), wide, values[-1])
    low = np.clip(np.searchsorted(values, finite, "right") - 1, 0, None)
    high = np.append(values, beyond(fmt))[low + 1]
    share = (finite - values[low]) / (high - values[low])  # exact: high - low is a power of two
    moved = low + (noise.numpy().astype(np.float64) < share)
    # What lies at or beyond the value that would follow the largest one is beyond any choice.
    moved = np.where(finite >= beyond(fmt), len(values), moved)
    return _values(_finish(moved, negative, magnitude, fmt, overflow), fmt)
