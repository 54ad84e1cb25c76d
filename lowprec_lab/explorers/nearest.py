"""To which code a real number rounds, for one number at a time: exact, by a search among the values of the format.

The same rules as in bit_explorer.js, where the browser applies them without asking the kernel; a test compares the two.
Policies as in IEEE 754-2019 section 7.4: modes that point inwards overflow to the largest finite value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from lowprec_lab.formats import Format

MODES = ("nearest_even", "nearest_away", "toward_zero", "up", "down")
OVERFLOWS = ("saturate", "to_special")

Real = Fraction | float  # a Fraction, or one of -0.0, inf, -inf and nan, which no Fraction can be

_DECIMAL = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,4})?"
_QUOTIENT = re.compile(rf"([+-]?)({_DECIMAL})(?:/({_DECIMAL}))?")
_POWER = re.compile(rf"([+-]?)(?:({_DECIMAL})\*)?2\^([+-]?\d{{1,4}})")
_SPECIAL = re.compile(r"([+-]?)(nan|inf|infinity|∞)")


def read_real(text: str) -> Real:
    """The number that a text means: "0.1", "1/3", "3*2^-9", "-0", "inf", "nan". Raises ValueError."""
    compact = re.sub(r"[\s_]", "", text).replace("−", "-").replace("×", "*").replace("**", "^").lower()
    if match := _SPECIAL.fullmatch(compact):
        size = float("nan") if match[2] == "nan" else float("inf")
    elif match := _POWER.fullmatch(compact):
        size = Fraction(match[2] or 1) * Fraction(2) ** int(match[3])
    elif (match := _QUOTIENT.fullmatch(compact)) and Fraction(match[3] or 1):
        size = Fraction(match[2]) / Fraction(match[3] or 1)
    else:
        raise ValueError(f"{text!r} is not a number: write 0.1, 1e-3, 1/3, 3*2^-9, inf or nan")
    if match[1] != "-":
        return size
    return -0.0 if size == 0 else -size


def sign_bit(fmt: Format) -> int:
    """The code with the sign bit set and no other; 0 if the format has no sign."""
    return 2 ** (fmt.width - 1) if fmt.signed else 0


def largest_finite_code(fmt: Format) -> int:
    """The code of the largest finite value."""
    top = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1
    return {"ieee": top - 2**fmt.mantissa_bits, "fn": top - 1}.get(fmt.specials, top)


def spacing(fmt: Format, code: int) -> Fraction:
    """The distance between the values of the binade that a code is in."""
    exponent = (code >> fmt.mantissa_bits) % 2**fmt.exponent_bits
    return Fraction(2) ** (max(exponent, int(fmt.subnormals)) - fmt.bias - fmt.mantissa_bits)


def nearest_code(real: Real, fmt: Format, value: Callable[[int], float], mode: str, overflow: str) -> tuple[int, str]:
    """The code that `real` rounds to, and what cannot be done as asked (empty if nothing).

    value: the value of each code, as a float. It need not be the right one: what counts is how the values are ordered.
    """
    if real != real:
        return _nan(fmt, 0) or (0, f"{fmt.name} has no NaN")
    negative = real < 0 or str(real) == "-0.0"
    sign = sign_bit(fmt) if negative else 0
    if real < 0 and not fmt.signed:
        return _nan(fmt, 0) or (0, f"{fmt.name} has no negative numbers")
    order = magnitudes_in_order(fmt, value)
    position = (
        None
        if real in (float("inf"), -float("inf"))
        else _position(abs(Fraction(real)), negative, fmt, order, value, mode)
    )
    if position is not None:
        magnitude = order[position]
        return (magnitude if fmt.specials == "fnuz" and magnitude == 0 else magnitude + sign), ""
    if overflow == "saturate":
        return order[-1] + sign, ""
    if fmt.specials == "ieee":
        return largest_finite_code(fmt) + 1 + sign, ""
    return _nan(fmt, sign) or (order[-1] + sign, f"{fmt.name} has neither infinity nor NaN: it can only saturate")


def magnitudes_in_order(fmt: Format, value: Callable[[int], float]) -> Sequence[int]:
    """The codes of the finite values with a clear sign bit, from the smallest value to the largest.

    That is the order of the codes, unless a learner's decode says otherwise. Wide formats keep the order of the codes.
    """
    codes = range(largest_finite_code(fmt) + 1)
    if fmt.width > 16:
        return codes
    usable = [code for code in codes if 0 <= value(code) < float("inf")]
    return sorted(usable, key=value)


def _nan(fmt: Format, sign: int) -> tuple[int, str] | None:
    if fmt.specials == "finite":
        return None
    if fmt.specials == "fnuz":
        return sign_bit(fmt), ""
    quiet = 2 ** (fmt.mantissa_bits - 1) if fmt.specials == "ieee" else 0
    return largest_finite_code(fmt) + 1 + quiet + sign, ""


def _position(
    size: Fraction, negative: bool, fmt: Format, order: Sequence[int], value: Callable, mode: str
) -> int | None:
    """Where |real| lands in the order of magnitudes; None when it overflows."""
    below = _last_not_above(size, order, value)
    if below < 0:
        return 0  # a format without zero: nothing is nearer than its smallest value
    lower = Fraction(value(order[below]))
    inwards = mode == "toward_zero" or mode == ("up" if negative else "down")
    if inwards or size == lower:
        return below
    above = below + 1 if below + 1 < len(order) else None
    if mode in ("up", "down"):
        return above
    # Beyond the largest value, the one that would follow it if the exponent had no end says what still rounds down.
    upper = lower + spacing(fmt, largest_finite_code(fmt)) if above is None else Fraction(value(order[above]))
    if 2 * size != lower + upper:
        return below if 2 * size < lower + upper else above
    return below if mode == "nearest_even" and _is_even(order[below], fmt, lower) else above


def _is_even(code: int, fmt: Format, magnitude: Fraction) -> bool:
    """Whether the last digit of a value's significand is even.

    Without mantissa bits it is the hidden 1, odd in both neighbours: IEEE 754-2019 section 4.3.1 then gives a tie to
    the larger one.
    """
    return code % 2 == 0 if fmt.mantissa_bits else magnitude == 0


def _last_not_above(size: Fraction, order: Sequence[int], value: Callable[[int], float]) -> int:
    low, high = -1, len(order)
    while high - low > 1:
        middle = (low + high) // 2
        if Fraction(value(order[middle])) <= size:
            low = middle
        else:
            high = middle
    return low
