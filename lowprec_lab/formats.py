"""What a number format is, and the formats that the course uses.

A format says how the bits of a code are read: sign, exponent, mantissa, a bias, and which codes are special. It is
data: every function of the package takes a `Format` and none is written for one format only.

References: IEEE 754-2019 section 3.4; OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); Noune et al.,
arXiv:2206.02915 (the fnuz variants); OCP Microscaling Formats 1.0 (E8M0, E2M3, E3M2, E2M1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

SPECIALS = {
    "ieee": "an exponent of all ones is infinity (mantissa 0) or NaN (any other mantissa)",
    "fn": "no infinity; NaN is the code with all exponent and mantissa bits set",
    "fnuz": "no infinity and no -0; the code of -0 is the only NaN",
    "finite": "every code is a finite number",
}

# The exponents that float32 can hold: a format is valid only if each of its finite values is exact in float32.
_FLOAT32_SMALLEST_EXPONENT = -149
_FLOAT32_LARGEST_EXPONENT = 127
_FLOAT32_MANTISSA_BITS = 23


class FormatError(ValueError):
    """A format that cannot exist, or is not known. In a notebook the sentence is shown without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"FormatError: {self}"]


@dataclass(frozen=True)
class Format:
    """A binary number format of at most 32 bits: `sign | exponent | mantissa`, most significant bit first.

    name: any text; shown in verdicts and plots.
    exponent_bits, mantissa_bits: widths of the two fields.
    bias: subtracted from the exponent field; 2^(exponent_bits - 1) - 1 when omitted.
    specials: "ieee", "fn", "fnuz" or "finite" (see `SPECIALS`).
    signed: whether there is a sign bit.
    subnormals: whether exponent field 0 means 0.mantissa * 2^(1 - bias), zero included. Without subnormals it is a
        normal number, 1.mantissa * 2^(0 - bias), and the format has no zero.
    torch_dtype: the torch dtype with the same bits, if there is one.

    Raises FormatError (a ValueError), with the reason and a way out, for a format that cannot exist.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None
    specials: str = "ieee"
    signed: bool = True
    subnormals: bool = True
    torch_dtype: torch.dtype | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _require_whole_numbers(self)
        if self.bias is None:
            object.__setattr__(self, "bias", 2 ** (self.exponent_bits - 1) - 1)
        _require_possible(self)

    @cached_property
    def width(self) -> int:
        """Bits in a code."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        constant = _CONSTANT_OF.get(self.name)
        if constant is not None and globals().get(constant) == self:
            return constant
        options = [f"bias={self.bias}", f"specials={self.specials!r}"]
        options += [f"{flag}=False" for flag in ("signed", "subnormals") if not getattr(self, flag)]
        return f"Format({self.name!r}, {self.exponent_bits}, {self.mantissa_bits}, {', '.join(options)})"


def _require_whole_numbers(fmt: Format) -> None:
    if not isinstance(fmt.name, str) or not fmt.name:
        raise FormatError(f"a Format's name is a non-empty text, not {fmt.name!r}")
    for name in ("exponent_bits", "mantissa_bits", "bias"):
        value = getattr(fmt, name)
        if name == "bias" and value is None:
            continue
        if type(value) is not int:
            raise FormatError(f"Format {fmt.name!r}: {name} is a whole number (int), not {value!r}")


def _require_possible(fmt: Format) -> None:
    def impossible(reason: str) -> FormatError:
        return FormatError(f"Format {fmt.name!r} cannot exist: {reason}")

    if fmt.specials not in SPECIALS:
        known = "; ".join(f"{name!r} ({meaning})" for name, meaning in SPECIALS.items())
        raise impossible(f"specials={fmt.specials!r} is unknown. Choose one of: {known}")
    if fmt.exponent_bits < 1:
        why = "subnormals are what exponent field 0 means" if fmt.subnormals else "a float has an exponent"
        raise impossible(f"{fmt.exponent_bits} exponent bits, and {why}. Use at least 1 exponent bit")
    if fmt.mantissa_bits < 0:
        raise impossible(f"{fmt.mantissa_bits} mantissa bits. Use 0 or more")
    if fmt.width > 32:
        raise impossible(f"it has {fmt.width} bits. Use at most 32: every code must fit an int32")
    if fmt.specials == "ieee" and (fmt.exponent_bits < 2 or fmt.mantissa_bits < 1):
        raise impossible(
            "'ieee' needs 2 exponent bits or more (one exponent is special) and 1 mantissa bit or more (to tell "
            "infinity from NaN). Add bits, or use specials='fn' or 'finite'"
        )
    if fmt.specials == "fnuz" and not (fmt.signed and fmt.subnormals):
        raise impossible("'fnuz' makes the code of -0 its NaN, so it needs a sign and a zero. Use specials='fn'")
    if fmt.specials == "fn" and fmt.exponent_bits == 1 and fmt.mantissa_bits == 0:
        raise impossible("its only code that is not 0 is NaN. Add bits, or use specials='finite'")
    _require_exact_in_float32(fmt, impossible)


def _require_exact_in_float32(fmt: Format, impossible) -> None:
    top_field = 2**fmt.exponent_bits - 1
    whole_binade_is_special = fmt.specials == "ieee" or (fmt.specials == "fn" and fmt.mantissa_bits == 0)
    largest = top_field - int(whole_binade_is_special) - fmt.bias
    smallest = int(fmt.subnormals) - fmt.bias - fmt.mantissa_bits
    if (
        fmt.mantissa_bits > _FLOAT32_MANTISSA_BITS
        or largest > _FLOAT32_LARGEST_EXPONENT
        or smallest < _FLOAT32_SMALLEST_EXPONENT
    ):
        raise impossible(
            f"its finite values are not all exact in float32 (they need {fmt.mantissa_bits} mantissa bits and the "
            f"powers 2^{smallest} to 2^{largest}; float32 has 23 bits and 2^-149 to 2^127). Change the bias "
            f"({fmt.bias}) or use fewer bits"
        )


FP32 = Format("float32", 8, 23, torch_dtype=torch.float32)
TF32 = Format("tfloat32", 8, 10)
FP16 = Format("float16", 5, 10, torch_dtype=torch.float16)
BF16 = Format("bfloat16", 8, 7, torch_dtype=torch.bfloat16)
E4M3 = Format("float8_e4m3fn", 4, 3, specials="fn", torch_dtype=torch.float8_e4m3fn)
E5M2 = Format("float8_e5m2", 5, 2, torch_dtype=torch.float8_e5m2)
E4M3FNUZ = Format("float8_e4m3fnuz", 4, 3, bias=8, specials="fnuz", torch_dtype=torch.float8_e4m3fnuz)
E5M2FNUZ = Format("float8_e5m2fnuz", 5, 2, bias=16, specials="fnuz", torch_dtype=torch.float8_e5m2fnuz)
E8M0 = Format("float8_e8m0fnu", 8, 0, specials="fn", signed=False, subnormals=False, torch_dtype=torch.float8_e8m0fnu)
E2M3 = Format("float6_e2m3fn", 2, 3, specials="finite")
E3M2 = Format("float6_e3m2fn", 3, 2, specials="finite")
E2M1 = Format("float4_e2m1fn", 2, 1, specials="finite")

_CONSTANT_OF = {value.name: name for name, value in list(globals().items()) if isinstance(value, Format)}

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (
    FP32, TF32, FP16, BF16, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0, E2M3, E3M2, E2M1,
)}  # fmt: skip


def get_format(name: str) -> Format:
    """The registered format of that name ("float8_e4m3fn") or constant ("E4M3"); FormatError lists what there is."""
    for fmt in FORMATS.values():
        if name in (fmt.name, _CONSTANT_OF[fmt.name]):
            return fmt
    known = ", ".join(f"{fmt.name} ({_CONSTANT_OF[fmt.name]})" for fmt in FORMATS.values())
    raise FormatError(f"no format is called {name!r}. Registered are: {known}. Make your own with Format(...)")


__all__ = ["Format", "FormatError", "FORMATS", "SPECIALS", "get_format", *_CONSTANT_OF.values()]
