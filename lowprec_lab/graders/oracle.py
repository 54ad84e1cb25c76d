"""The exact oracle: what each code of a format means, from the definition alone.

It shares nothing with the answers that it judges: no torch cast, no bit trick, no reference answer. Every finite value
of a format is a significand of at most 24 bits times a power of two: integers and `ldexp` give it exactly in float64.
The tests compare it with Python fractions, and with torch, ml_dtypes and gfloat where those have the format.

Codes are int32 tensors, as in the chapters; inside, numpy int64 arrays of non-negative codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import Format

ZERO, SUBNORMAL, NORMAL, INF, NAN = range(5)

# Up to this width every code is looked up in a table; above it, codes are worked out as they come.
_TABLE_WIDTH = 16


@dataclass(frozen=True)
class Fields:
    """The three fields of each code, as int64 arrays."""

    sign: np.ndarray
    exponent: np.ndarray
    mantissa: np.ndarray


def _unsigned(codes: Tensor, fmt: Format) -> np.ndarray:
    return codes.detach().numpy().astype(np.int64) % 2**fmt.width


def _fields(codes: np.ndarray, fmt: Format) -> Fields:
    rest, mantissa = np.divmod(codes, 2**fmt.mantissa_bits)
    sign, exponent = np.divmod(rest, 2**fmt.exponent_bits)
    return Fields(sign, exponent, mantissa)


def _classes(codes: np.ndarray, fmt: Format) -> np.ndarray:
    field = _fields(codes, fmt)
    top_exponent = field.exponent == 2**fmt.exponent_bits - 1
    top_mantissa = field.mantissa == 2**fmt.mantissa_bits - 1
    classes = np.full(codes.shape, NORMAL)
    if fmt.subnormals:
        bottom = field.exponent == 0
        classes[bottom] = np.where(field.mantissa[bottom] == 0, ZERO, SUBNORMAL)
    if fmt.specials == "ieee":
        classes[top_exponent] = np.where(field.mantissa[top_exponent] == 0, INF, NAN)
    elif fmt.specials == "fn":
        classes[top_exponent & top_mantissa] = NAN
    elif fmt.specials == "fnuz":
        classes[(field.sign == 1) & (field.exponent == 0) & (field.mantissa == 0)] = NAN
    return classes


def _values(codes: np.ndarray, fmt: Format) -> np.ndarray:
    field, classes = _fields(codes, fmt), _classes(codes, fmt)
    leading_one = 2**fmt.mantissa_bits
    fraction_only = np.isin(classes, (ZERO, SUBNORMAL))
    significand = np.where(fraction_only, field.mantissa, field.mantissa + leading_one)
    exponent = np.where(fraction_only, 1, field.exponent) - fmt.bias - fmt.mantissa_bits
    with np.errstate(over="ignore"):  # the exponent of infinities and NaNs, which the next lines replace
        magnitude = np.asarray(np.ldexp(significand.astype(np.float64), exponent))  # also of no dimension
    magnitude[classes == INF] = np.inf
    magnitude[classes == NAN] = np.nan
    return np.where(field.sign == 1, -magnitude, magnitude)


@lru_cache(maxsize=256)
def _tables(fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    codes = np.arange(2**fmt.width)
    return _values(codes, fmt), _classes(codes, fmt)


def _look_up(codes: Tensor, fmt: Format, which: int, compute) -> np.ndarray:
    unsigned = _unsigned(codes, fmt)
    return _tables(fmt)[which][unsigned] if fmt.width <= _TABLE_WIDTH else compute(unsigned, fmt)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """The value of each code: int32 tensor, any shape -> float64, same shape."""
    return torch.from_numpy(np.asarray(_look_up(codes, fmt, 0, _values)))


def classify(codes: Tensor, fmt: Format) -> Tensor:
    """ZERO, SUBNORMAL, NORMAL, INF or NAN for each code: int32 tensor -> int32, same shape."""
    return torch.from_numpy(np.asarray(_look_up(codes, fmt, 1, _classes)).astype(np.int32))


def split_fields(codes: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Sign, exponent and mantissa field of each code, as int32 tensors of its shape."""
    field = _fields(_unsigned(codes, fmt), fmt)
    return tuple(
        torch.from_numpy(np.asarray(part).astype(np.int32)) for part in (field.sign, field.exponent, field.mantissa)
    )


def join_fields(sign: Tensor, exponent: Tensor, mantissa: Tensor, fmt: Format) -> Tensor:
    """The codes with these fields, as int32."""
    parts = [part.numpy().astype(np.int64) for part in (sign, exponent, mantissa)]
    codes = (parts[0] * 2**fmt.exponent_bits + parts[1]) * 2**fmt.mantissa_bits + parts[2]
    return torch.from_numpy(np.asarray(codes).astype(np.uint32).view(np.int32))


def bit_pattern(x: Tensor) -> Tensor:
    """The bits of a float32 tensor, read through Python's buffer of bytes."""
    raw = x.detach().contiguous().numpy().tobytes()
    return torch.from_numpy(np.frombuffer(raw, dtype="<i4").astype(np.int32).reshape(x.shape))


def sign_bit(x: Tensor) -> Tensor:
    """1 where the sign bit of a float32 is set, else 0; int32."""
    return (bit_pattern(x) < 0).to(torch.int32)


def landmark_codes(fmt: Format) -> Tensor:
    """Codes among which every extreme of the format lies: all of them up to 16 bits, else the ends of each binade."""
    if fmt.width <= _TABLE_WIDTH:
        return torch.arange(2**fmt.width, dtype=torch.int32)
    last = 2**fmt.mantissa_bits - 1
    ends = np.unique(np.clip([0, 1, 2, last // 2, last - 1, last], 0, last))
    exponents = np.arange(2 ** (fmt.width - fmt.mantissa_bits)) * 2**fmt.mantissa_bits
    codes = (exponents[:, None] + ends[None, :]).reshape(-1)
    return torch.from_numpy(codes.astype(np.uint32).view(np.int32))


def _positive(fmt: Format, wanted: tuple[int, ...]) -> np.ndarray:
    codes = landmark_codes(fmt)
    values, classes = decode(codes, fmt).numpy(), classify(codes, fmt).numpy()
    return values[np.isin(classes, wanted) & (values > 0)]


@lru_cache(maxsize=1024)
def max_finite(fmt: Format) -> float:
    """The largest finite value, by looking at every candidate."""
    return float(_positive(fmt, (SUBNORMAL, NORMAL)).max())


@lru_cache(maxsize=1024)
def min_normal(fmt: Format) -> float:
    """The smallest positive normal value, by looking at every candidate."""
    return float(_positive(fmt, (NORMAL,)).min())


@lru_cache(maxsize=1024)
def min_subnormal(fmt: Format) -> float | None:
    """The smallest positive subnormal value, by looking at every candidate; None if there is none."""
    found = _positive(fmt, (SUBNORMAL,))
    return float(found.min()) if found.size else None


@lru_cache(maxsize=1024)
def machine_epsilon(fmt: Format) -> float:
    """The relative gap between a power of two and the next value above it, measured on the format's own values."""
    values = np.unique(_positive(fmt, (NORMAL,)))
    significands, _ = np.frexp(values)
    starts = np.flatnonzero(significands[:-1] == 0.5)
    if starts.size == 0:  # a single normal number: nothing to measure, and the mantissa says how far the next would be
        return 1 / 2**fmt.mantissa_bits
    return float((values[starts[0] + 1] - values[starts[0]]) / values[starts[0]])


def ulp(x: Tensor, fmt: Format) -> Tensor:
    """The spacing of the format's values in the binade of |x|, clamped to its lowest and highest; float64."""
    lowest, highest = (np.frexp(edge)[1] for edge in (min_normal(fmt), max_finite(fmt)))
    wide = np.abs(x.detach().numpy().astype(np.float64))
    exponent = np.clip(np.frexp(wide)[1], lowest, highest)
    exponent = np.where(wide == 0, lowest, exponent)
    spacing = np.ldexp(1.0, exponent - 1 - fmt.mantissa_bits)
    return torch.from_numpy(np.asarray(np.where(np.isfinite(wide), spacing, np.nan)))


def add_float8(a: Tensor, b: Tensor, fmt: Format) -> Tensor:
    """The exact sum of two tensors of an 8-bit torch dtype, rounded once, to float32."""
    wide = [decode(part.view(torch.uint8).to(torch.int32), fmt).numpy() for part in (a, b)]
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, and is meant to be
        return torch.from_numpy(np.asarray(wide[0] + wide[1]).astype(np.float32))
