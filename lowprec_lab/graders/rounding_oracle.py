"""The exact oracle for rounding: which value of a format a float32 becomes, under every mode and overflow policy.

Nothing is computed on the input but a search. For each format, mode and sign the *breakpoints* are worked out once, exactly
(float64 holds every value of a format of at most 16 bits, and every midpoint): breakpoint k is the smallest float32 magnitude that becomes value k + 1 instead of value k. Magnitudes
are compared as integers, because the bits of non-negative floats are in the order of their values.

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


@lru_cache(maxsize=256)
def ladder(fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """(values, codes): every finite magnitude of a format of at most 16 bits in order, float64, with its code."""
    codes = np.arange(2 ** (fmt.exponent_bits + fmt.mantissa_bits))
    values = oracle.decode(torch.from_numpy(codes.astype(np.int32)), fmt).numpy()
    finite = np.isfinite(values)
    return values[finite], codes[finite]


def _beyond(fmt: Format) -> float:
    """The value that would follow the largest one, if its binade went on."""
    top = ladder(fmt)[0][-1]
    return float(top + np.ldexp(1.0, int(np.frexp(top)[1]) - 1 - fmt.mantissa_bits))


def _first_at_or_above(values: np.ndarray) -> np.ndarray:
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
    low, high = steps, np.append(steps[1:], _beyond(fmt))
    middle = (low + high) / 2
    if mode == "nearest_even":
        # Even is the last digit of the significand, counted in steps of the gap. Between two powers of two of a format
        # without mantissa bits both are odd (1 and 1): IEEE 754-2019 section 4.3.1 gives the larger one.
        upper_is_even = (low / (high - low)) % 2 == 1
        return np.where(upper_is_even, _first_at_or_above(middle), _first_above(middle))
    if mode == "nearest_away":
        return _first_at_or_above(middle)
    if (mode == "up" and not negative) or (mode == "down" and negative):
        return _first_above(low)
    inwards = _first_at_or_above(high)
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


def _finish(steps: np.ndarray, negative: np.ndarray, magnitude: np.ndarray, fmt: Format, overflow: str) -> Tensor:
    """Codes from the step on the ladder (one past its end: overflow), the sign, and the input's magnitude bits."""
    _, codes = ladder(fmt)
    over = (steps == len(codes)) | (magnitude == _INFINITY_BITS)
    found = codes[np.minimum(steps, len(codes) - 1)]
    special = infinity_code(fmt)
    nan = magnitude > _INFINITY_BITS
    if overflow == "to_special":
        found = np.where(over, nan_code(fmt) if special is None else special, found)
        nan |= over & (special is None)
    else:
        found = np.where(over, codes[-1], found)
    sign = 2 ** (fmt.width - 1) if fmt.signed else 0
    no_negative_zero = fmt.specials == "fnuz"
    signed = found + np.where(negative & ~(no_negative_zero & (found == 0)), sign, 0)
    if not fmt.signed:
        nan |= negative & (magnitude != 0)
    if fmt.specials == "finite":
        return torch.from_numpy(np.asarray(np.where(nan, -1, signed)).astype(np.int64))
    return torch.from_numpy(np.asarray(np.where(nan, nan_code(fmt), signed)).astype(np.int64))


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
    above, below = (np.searchsorted(breakpoints(fmt, mode, sign), magnitude, "right") for sign in (False, True))
    return _finish(np.where(negative, below, above), negative, magnitude, fmt, overflow)


def _values(codes: Tensor, fmt: Format) -> Tensor:
    values = oracle.decode(codes.clamp(min=0).to(torch.int32), fmt).float()
    return torch.where(codes < 0, torch.tensor(float("nan")), values)


def round_stochastic(x: Tensor, fmt: Format, noise: Tensor, overflow: str = "saturate") -> Tensor:
    """The elements rounded by the rule of the exercise, float32; every comparison is exact in float64."""
    require_policies(fmt, "nearest_even", overflow)
    negative, magnitude = _split(x)
    steps, _ = ladder(fmt)
    wide = np.abs(x.numpy().astype(np.float64))
    finite = np.where(np.isfinite(wide), wide, steps[-1])
    low = np.clip(np.searchsorted(steps, finite, "right") - 1, 0, None)
    high = np.append(steps, _beyond(fmt))[low + 1]
    share = (finite - steps[low]) / (high - steps[low])  # exact: high - low is a power of two
    moved = low + (noise.numpy().astype(np.float64) < share)
    # What lies at or beyond the value that would follow the largest one is beyond any choice.
    moved = np.where(finite >= _beyond(fmt), len(steps), moved)
    return _values(_finish(moved, negative, magnitude, fmt, overflow), fmt)
