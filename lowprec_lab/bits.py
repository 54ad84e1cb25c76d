"""Chapter 01: what the bits of a number mean, for any format of at most 32 bits.

A *code* is the bit pattern of a number, read as an integer. Codes are int32 tensors; the code of a 32-bit format whose
sign bit is set is therefore a negative int32 (two's complement), and every narrower code is not negative.

References: IEEE 754-2019 sections 3.4 and 3.5; OCP 8-bit Floating Point Specification 1.0; Micikevicius et al., FP8
Formats for Deep Learning, arXiv:2209.05433; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

from lowprec_lab.blanks import blank
from lowprec_lab.formats import Format


class NumberClass(IntEnum):
    """What kind of number a code stands for."""

    ZERO = 0
    SUBNORMAL = 1
    NORMAL = 2
    INF = 3
    NAN = 4


@blank(exercise="1.1", points=2, minutes=10)
def bit_pattern(x: Tensor) -> Tensor:
    """The code of every element: its 32 bits, unchanged, read as an integer.

    x: float32, any shape, contiguous or not. Returns: int32, same shape; negative where the sign bit is set.
    Every bit counts: -0.0 is not 0.0, and NaNs keep their payload.
    """


@blank(exercise="1.2", points=2, minutes=20)
def split_fields(codes: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """The sign, exponent and mantissa field of every code, as they are stored: no bias subtracted, no 1 added.

    codes: int32, any shape. Returns: (sign, exponent, mantissa), three int32 tensors of that shape, none negative.
    A format without a sign bit (`fmt.signed` is False) has sign 0; one without mantissa bits has mantissa 0.
    """


@blank(exercise="1.3", points=2, minutes=10)
def join_fields(sign: Tensor, exponent: Tensor, mantissa: Tensor, fmt: Format) -> Tensor:
    """The code that has these fields: the inverse of `split_fields`.

    sign, exponent, mantissa: int32 tensors of one shape, each within the width of its field.
    Returns: int32, same shape; negative for a 32-bit format whose sign bit is set.
    """


@blank(exercise="1.4", points=3, minutes=30)
def classify(codes: Tensor, fmt: Format) -> Tensor:
    """What every code stands for: ZERO, SUBNORMAL, NORMAL, INF or NAN (the values of `NumberClass`).

    codes: int32, any shape. Returns: int32, same shape.
    `fmt.specials` says which codes are special:
    "ieee": exponent all ones; mantissa 0 is INF, any other mantissa is NAN.
    "fn": exponent and mantissa all ones is NAN, with either sign; there is no INF.
    "fnuz": the code of -0 (sign 1, everything else 0) is NAN; there is no INF and no other NAN.
    "finite": no code is special.
    Where `fmt.subnormals` is True, exponent field 0 is ZERO (mantissa 0) or SUBNORMAL; where it is False, exponent
    field 0 is as NORMAL as any other.
    """


@blank(
    exercise="1.5", points=5, minutes=45, unlocks="BitExplorer and every picture of this chapter run on your decode."
)
def decode(codes: Tensor, fmt: Format) -> Tensor:
    """The value of every code, exactly.

    codes: int32, any shape. Returns: float64, same shape.
    NORMAL: (-1)^sign * 1.mantissa * 2^(exponent - bias). SUBNORMAL: (-1)^sign * 0.mantissa * 2^(1 - bias).
    ZERO keeps its sign: -0.0 is not 0.0. INF is +-infinity, NAN is NaN (of any sign and payload).
    Formats of up to 32 bits, the smallest subnormal of float32 (2^-149) and E8M0 included.
    """


@blank(exercise="1.6", points=2, minutes=20)
def max_finite(fmt: Format) -> float:
    """The largest finite value of the format, by formula: no table, no search. Returns: float (exact)."""


@blank(exercise="1.7", points=1, minutes=5)
def min_normal(fmt: Format) -> float:
    """The smallest positive normal value of the format, by formula. Returns: float (exact).

    Where `fmt.subnormals` is False, exponent field 0 is normal too.
    """


@blank(exercise="1.8", points=1, minutes=5)
def machine_epsilon(fmt: Format) -> float:
    """The gap between a power of two and the next value above it, relative to that power. Returns: float (exact).

    This is the distance from 1.0 to the next larger value, also for a format whose range does not reach 1.0.
    """


@blank(exercise="1.9", points=1, minutes=10)
def min_subnormal(fmt: Format) -> float | None:
    """The smallest positive subnormal value of the format, by formula. Returns: float (exact).

    Returns None where the format has none: `fmt.subnormals` is False, or there are no mantissa bits.
    """


@blank(exercise="1.10", points=3, minutes=30)
def ulp(x: Tensor, fmt: Format) -> Tensor:
    """The spacing of the format's values at |x|: the unit in the last place.

    x: float32, any shape; x need not be a value of the format. Returns: float64, same shape.
    With 2^e <= |x| < 2^(e + 1) the spacing is 2^(e - mantissa_bits), where e is no smaller than the exponent of the
    smallest normal value (zero and all subnormals have that spacing) and no larger than that of the largest finite one.
    Infinity and NaN have no spacing: NaN.
    """


@blank(exercise="1.11", points=2, minutes=10)
def add_float8(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two float8 tensors, as the nearest float32 to the exact sum.

    a, b: tensors of one shape and of one dtype: torch.float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz.
    Returns: float32, same shape. Infinities and NaNs add as IEEE 754 says.
    """
