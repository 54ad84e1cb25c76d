"""Fused rounding: the same rounding as `rounding.round_to`, in one pass over memory, for any Format.

Each function is generated from one definition, made of operations that work element by element on floats and on their
bits; run eagerly it goes through the tensor in pieces that stay in the cache, compiled it is one loop. Both give the
same bits: nothing in it is a cast that a compiler may take out (a pair of casts down to 16 bits and up again is).

How it rounds: with a step of s between neighbours, |x| + 2^k * s (k: 23 in float32, 52 in float64) has no bits left
below s, so the addition itself rounds, to nearest, ties to even, and the subtraction that follows is exact. The step
is read from the exponent bits of |x|. Formats whose exponents do not leave that much room in float32 take float64.

References: Goldberg, What every computer scientist should know about floating-point arithmetic, theorem 7 and after.
"""

from __future__ import annotations

import itertools
import math
import sysconfig
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from lowprec_lab.formats import Format

MODES = ("nearest_even", "nearest_away", "toward_zero", "up", "down")
OVERFLOWS = ("saturate", "to_special")
_PIECE = 2**16  # elements: 256 KiB of float32, so that what one operation wrote is in the cache for the next


@dataclass(frozen=True)
class _Width:
    """The float in which a format is rounded, and the integer of its bits."""

    float: torch.dtype
    int: torch.dtype
    mantissa_bits: int
    bias: int


_SINGLE = _Width(torch.float32, torch.int32, 23, 127)
_DOUBLE = _Width(torch.float64, torch.int64, 52, 1023)


@dataclass(frozen=True)
class _Plan:
    """What rounding to one format under one mode and policy needs to know.

    lowest: exponent of the binade whose step also holds below it; highest: that of the largest value.
    overflow_at: |x| from which on a positive, a negative number overflows to `special`; inf where only infinity does.
    """

    fmt: Format
    mode: str
    width: _Width
    lowest: int
    highest: int
    largest: float
    smallest: float
    special: float | None
    overflow_at: tuple[float, float]


@lru_cache(maxsize=1024)
def _plan(fmt: Format, mode: str, overflow: str) -> _Plan:
    if mode not in MODES or overflow not in OVERFLOWS:
        raise ValueError(f"mode is one of {MODES} and overflow one of {OVERFLOWS}, not {mode!r} and {overflow!r}")
    if overflow == "to_special" and fmt.specials == "finite":
        raise ValueError(f"{fmt.name} has no infinity and no NaN to overflow to: use overflow='saturate'")
    lowest, (highest, largest) = int(fmt.subnormals) - fmt.bias, _largest(fmt)
    roomy = lowest >= -126 and highest + 23 - fmt.mantissa_bits <= 127 and fmt.mantissa_bits < 23
    special = None
    if overflow == "to_special":
        special = math.inf if fmt.specials == "ieee" else math.nan
    return _Plan(
        fmt, mode, _SINGLE if roomy else _DOUBLE, lowest, highest, largest,
        0.0 if fmt.subnormals else 2.0**lowest, special,
        tuple(_overflow_at(fmt, mode, negative) for negative in (False, True)),
    )  # fmt: skip


def _largest(fmt: Format) -> tuple[int, float]:
    """(exponent, value) of the largest finite number: all ones, unless those are special."""
    ones = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1
    special = {"ieee": 2**fmt.mantissa_bits, "fn": 1}.get(fmt.specials, 0)
    field, mantissa = divmod(ones - special, 2**fmt.mantissa_bits)
    normal = field > 0 or not fmt.subnormals
    exponent = max(field, int(fmt.subnormals)) - fmt.bias
    return exponent, math.ldexp(normal * 2**fmt.mantissa_bits + mantissa, exponent - fmt.mantissa_bits)


def _overflow_at(fmt: Format, mode: str, negative: bool) -> float:
    """The smallest float32 magnitude that rounds beyond the largest value, as if its binade went on."""
    exponent, largest = _largest(fmt)
    step = math.ldexp(1.0, exponent - fmt.mantissa_bits)
    middle, even = largest + step / 2, (largest / step) % 2 == 0
    if mode == "toward_zero" or mode == ("up" if negative else "down"):
        return math.inf
    if mode == "nearest_even" and not even or mode == "nearest_away":
        return _float32_at_least(middle)
    return _float32_above(middle if mode == "nearest_even" else largest)


def _float32_at_least(value: float) -> float:
    near = torch.tensor(value, dtype=torch.float64).float()
    return float(near) if float(near) >= value else float(torch.nextafter(near, torch.tensor(math.inf)))


def _float32_above(value: float) -> float:
    near = torch.tensor(_float32_at_least(value))
    return float(near) if float(near) > value else float(torch.nextafter(near, torch.tensor(math.inf)))


# --- the definition ---------------------------------------------------------------------------------------------------


def _in_steps(x: Tensor, plan: _Plan) -> tuple[Tensor, Tensor, Tensor]:
    """(magnitude, magic, total): |x| within the format's range, 2^k steps of where it is, and their rounded sum."""
    width = plan.width
    magnitude = x.abs().to(width.float).clamp(plan.smallest, plan.largest)  # NaN stays NaN
    all_ones = (2 * width.bias + 1) << width.mantissa_bits
    binade = (magnitude.view(width.int) & all_ones).view(width.float)  # the power of two at or below it
    magic = binade.clamp(2.0**plan.lowest, 2.0**plan.highest) * 2.0 ** (width.mantissa_bits - plan.fmt.mantissa_bits)
    return magnitude, magic, magnitude + magic


def _is_negative(x: Tensor) -> Tensor:
    return x.view(torch.int32) < 0  # compilers make one instruction of it, and of torch.signbit a loop


def _moves(x: Tensor, plan: _Plan, magnitude: Tensor, nearest: Tensor, step: Tensor) -> Tensor | None:
    """By how many steps the mode goes elsewhere than to the nearest: -1, 0 or 1; None for nearest_even."""
    if plan.mode == "nearest_even":
        return None
    if plan.mode == "nearest_away":
        return (magnitude - nearest == step / 2).to(plan.width.float)  # a tie that went down
    inwards, outwards = nearest > magnitude, nearest < magnitude
    if plan.mode == "toward_zero":
        return -inwards.to(plan.width.float)
    away = _is_negative(x) if plan.mode == "down" else ~_is_negative(x)
    return torch.where(away, outwards.to(plan.width.float), -inwards.to(plan.width.float))


def _round(x: Tensor, plan: _Plan) -> Tensor:
    magnitude, magic, total = _in_steps(x, plan)
    rounded = total - magic
    step = magic * 2.0**-plan.width.mantissa_bits
    moves = _moves(x, plan, magnitude, rounded, step)
    if moves is not None:
        rounded = rounded + moves * step
    return _finish(rounded.float(), x, plan)


def _finish(rounded: Tensor, x: Tensor, plan: _Plan) -> Tensor:
    """Overflow to a special value, and the sign."""
    if plan.special is not None:
        rounded = torch.where(_overflows(x, plan), plan.special, rounded)
    if not plan.fmt.signed:
        return torch.where(x < 0, math.nan, rounded)
    signed = rounded.copysign(x)
    return torch.where(rounded == 0, 0.0, signed) if plan.fmt.specials == "fnuz" else signed


def _overflows(x: Tensor, plan: _Plan) -> Tensor:
    above, below = plan.overflow_at
    return (x >= above) | (x <= -below)


def _encode(x: Tensor, plan: _Plan) -> Tensor:
    magnitude, magic, total = _in_steps(x, plan)
    width, fmt = plan.width, plan.fmt
    step = magic * 2.0**-width.mantissa_bits
    count = total.view(width.int) - magic.view(width.int)  # the rounded number of steps
    moves = _moves(x, plan, magnitude, total - magic, step)
    if moves is not None:
        count = count + moves.to(width.int)
    # magic's exponent says in which binade: 2^mantissa_bits codes for each.
    binade = (magic.view(width.int) >> width.mantissa_bits) - (
        plan.lowest + width.bias + width.mantissa_bits - fmt.mantissa_bits
    )
    first = 0 if fmt.subnormals else -(2**fmt.mantissa_bits)
    code = (count + (binade << fmt.mantissa_bits) + first).to(torch.int32)
    return _finish_code(code, x, plan)


def _finish_code(code: Tensor, x: Tensor, plan: _Plan) -> Tensor:
    fmt = plan.fmt
    nan = x != x  # as fast as any comparison, where torch.isnan is compiled to a loop
    if plan.special is not None:
        overflows = _overflows(x, plan)
        if fmt.specials == "ieee":
            code = torch.where(overflows, _infinity_code(fmt), code)
        else:
            nan = nan | overflows
    sign = _sign_code(fmt)
    if fmt.specials == "fnuz":
        code = torch.where(_is_negative(x) & (code != 0), code | sign, code)
    elif fmt.signed:
        code = torch.where(_is_negative(x), code | sign, code)
    else:
        nan = nan | (x < 0)
    return torch.where(nan, _nan_code(fmt), code).to(code_dtype(fmt))


def _infinity_code(fmt: Format) -> int:
    return (2**fmt.exponent_bits - 1) << fmt.mantissa_bits


def _nan_code(fmt: Format) -> int:
    """The code that NaN gets; 0 in formats without one, where `encode_` refuses NaN before."""
    quiet = _infinity_code(fmt) + (1 << fmt.mantissa_bits >> 1)
    ones = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1
    return {"ieee": quiet, "fn": ones, "fnuz": _sign_code(fmt), "finite": 0}[fmt.specials]


def _sign_code(fmt: Format) -> int:
    """The sign bit alone, as an int32."""
    return -(2**31) if fmt.width == 32 else 2 ** (fmt.width - 1)


def _decode(codes: Tensor, plan: _Plan) -> Tensor:
    fmt, width = plan.fmt, plan.width
    wide = codes.to(torch.int32)
    magnitude = wide & (2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1)
    shifted = magnitude.to(width.int) << (width.mantissa_bits - fmt.mantissa_bits)
    value = (shifted + ((width.bias - fmt.bias) << width.mantissa_bits)).view(width.float)
    if fmt.subnormals:
        small = magnitude.to(width.float) * 2.0 ** (plan.lowest - fmt.mantissa_bits)
        value = torch.where(magnitude < 2**fmt.mantissa_bits, small, value)
    value = value.float()
    if fmt.specials == "ieee":
        top = _infinity_code(fmt)
        value = torch.where(magnitude < top, value, math.nan)
        value = torch.where(magnitude == top, math.inf, value)
    elif fmt.specials == "fn":
        value = torch.where(magnitude == 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1, math.nan, value)
    if not fmt.signed:
        return value
    negative = (wide >> (fmt.width - 1) & 1) == 1
    signed = torch.where(negative, -value, value)
    return torch.where(negative & (magnitude == 0), math.nan, signed) if fmt.specials == "fnuz" else signed


def code_dtype(fmt: Format) -> torch.dtype:
    """The dtype of codes: uint8, int16 or int32, the smallest that has room for `fmt.width` bits."""
    return torch.uint8 if fmt.width <= 8 else torch.int16 if fmt.width <= 16 else torch.int32


# --- eager ------------------------------------------------------------------------------------------------------------


def round_(
    x: Tensor, fmt: Format, out: Tensor | None = None, mode: str = "nearest_even", overflow: str = "saturate"
) -> Tensor:
    """Round every element to a value of `fmt`, by the rules at the top of `lowprec_lab.rounding`.

    x: float32, any shape. out: float32 of that shape, `x` itself too; new when None. Returns `out`.
    """
    plan = _plan(fmt, mode, overflow)
    return _in_pieces(lambda piece: _round(piece, plan), _floats(x), out, torch.float32)


def elementwise_round(fmt: Format, mode: str = "nearest_even", overflow: str = "saturate") -> Callable:
    """`round_` for one format as plain code `(x)`, for a compiler to take into a larger graph."""
    plan = _plan(fmt, mode, overflow)
    return lambda x: _round(x, plan)


def encode_(
    x: Tensor, fmt: Format, out: Tensor | None = None, mode: str = "nearest_even", overflow: str = "saturate"
) -> Tensor:
    """The codes of the rounded elements.

    x: float32, any shape. out: `code_dtype(fmt)`, of that shape; new when None. Returns `out`. Codes of 16 and of 32
    bits are in two's complement. NaN has one code, as `rounding.encode` says; ValueError for it in a "finite" format.
    """
    plan = _plan(fmt, mode, overflow)
    _require_codes_for(x, fmt)
    return _in_pieces(lambda piece: _encode(piece, plan), _floats(x), out, code_dtype(fmt))


def decode_(codes: Tensor, fmt: Format, out: Tensor | None = None) -> Tensor:
    """The value of every code.

    codes: uint8, int16 or int32, any shape. out: float32 of that shape; new when None. Returns `out`.
    """
    plan = _plan(fmt, "nearest_even", "saturate")
    return _in_pieces(lambda piece: _decode(piece, plan), codes, out, torch.float32)


def elementwise_decode(fmt: Format) -> Callable:
    """`decode_` for one format as plain code `(codes)`, for a compiler to take into a larger graph."""
    plan = _plan(fmt, "nearest_even", "saturate")
    return lambda codes: _decode(codes, plan)


def _floats(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"fused rounding takes float32, not {x.dtype}: convert with x.float()")
    return x


def _require_codes_for(x: Tensor, fmt: Format) -> None:
    if fmt.specials == "finite" and bool((x.isnan() if fmt.signed else ~(x >= 0)).any()):
        raise ValueError(
            f"{fmt.name} has no code for NaN" + ("" if fmt.signed else ", which numbers below zero become")
        )


def _flat(x: Tensor, out: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(x in one dimension, room for the result in one dimension, what to return once that is filled)."""
    if out is None:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.shape != x.shape or out.dtype != dtype:
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)}; it has to be {dtype} of shape {tuple(x.shape)}"
        )
    room = out.view(-1) if out.is_contiguous() else torch.empty(x.numel(), dtype=dtype, device=x.device)
    return x.detach().reshape(-1), room, out


def _filled(room: Tensor, out: Tensor) -> Tensor:
    return out if out.is_contiguous() else out.copy_(room.view(out.shape))


def _in_pieces(function: Callable, x: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    flat, room, out = _flat(x, out, dtype)
    with torch.no_grad():
        for start in range(0, flat.numel(), _PIECE):
            room[start : start + _PIECE] = function(flat[start : start + _PIECE])
    return _filled(room, out)


# --- compiled ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def compiled_round(fmt: Format, mode: str = "nearest_even", overflow: str = "saturate") -> Callable:
    """`round_` for one format as a compiled function `(x, out=None)`; eager, and said once, without a compiler."""
    plan = _plan(fmt, mode, overflow)
    return compile_elementwise(lambda x: _round(x, plan), torch.float32, f"rounding to {fmt.name}")


@lru_cache(maxsize=256)
def compiled_encode(fmt: Format, mode: str = "nearest_even", overflow: str = "saturate") -> Callable:
    """`encode_` for one format as a compiled function `(x, out=None)`."""
    plan = _plan(fmt, mode, overflow)
    run = compile_elementwise(lambda x: _encode(x, plan), code_dtype(fmt), f"encoding to {fmt.name}")

    def encode(x: Tensor, out: Tensor | None = None) -> Tensor:
        _require_codes_for(x, fmt)
        return run(x, out)

    return encode


@lru_cache(maxsize=256)
def compiled_decode(fmt: Format) -> Callable:
    """`decode_` for one format as a compiled function `(codes, out=None)`."""
    plan = _plan(fmt, "nearest_even", "saturate")
    return compile_elementwise(lambda codes: _decode(codes, plan), torch.float32, f"decoding {fmt.name}")


@lru_cache(maxsize=64)
def compiled_mx_round_trip(fmt: Format, mode: str = "floor", block: int = 32) -> Callable:
    """What MX leaves of a tensor, in two passes over each block and none over the whole: a compiled `(x, out=None)`.

    fmt: of at most 8 bits, rounded by way of float32. mode: "floor", "ceil", "even" or "rceil", as
    `block_formats.e8m0_scale` has them. block: a power of two up to 2^16. x: float32, (..., K). Returns `out`.
    """
    plan = _plan(fmt, "nearest_even", "saturate")
    if plan.width is not _SINGLE or block not in {2**power for power in range(17)}:
        raise ValueError(f"this is for formats that float32 rounds to, and blocks of 1 to 65,536; not {fmt}, {block}")
    byte = _mx_byte(plan, mode)
    run = compile_elementwise(
        lambda blocks: _mx_round_trip(blocks, plan, byte), torch.float32, f"MX blocks of {fmt.name}", row=block
    )

    def round_trip(x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.shape[-1] % block:
            raise ValueError(f"blocks of {block} do not divide rows of {x.shape[-1]}")
        return run(_floats(x), out)

    round_trip.is_compiled = run.is_compiled
    return round_trip


def _mx_byte(plan: _Plan, mode: str) -> Callable:
    """A function from the largest magnitude of a block to the E8M0 byte of its scale, but for NaN."""
    half = {"even": 1 << (22 - plan.fmt.mantissa_bits)}.get(mode, 0)
    emax = 0 if mode == "rceil" else plan.highest

    def byte(amax: Tensor) -> Tensor:
        bits = (amax / plan.largest if mode == "rceil" else amax).view(torch.int32) + half
        field = bits >> 23
        if mode in ("ceil", "rceil"):  # any mantissa goes up; below 2^-126 it does so from 2^-127 on
            field = torch.where(field == 0, bits + 0x3FFFFF, bits + 0x7FFFFF) >> 23
        return (field - emax).clamp(0, 254)

    return byte


def _mx_round_trip(blocks: Tensor, plan: _Plan, byte_of: Callable) -> Tensor:
    amax = blocks.abs().amax(-1, keepdim=True)
    byte = byte_of(amax)
    scale = torch.where(byte == 0, 0x00400000, byte << 23)  # 2^-127 is a subnormal number
    scale = torch.where(amax != amax, 0x7FC00000, scale).view(torch.float32)
    inverse = torch.where(byte == 254, 0x00400000, (254 - byte) << 23).view(torch.float32)
    return _round(blocks * inverse, plan) * scale


_SAID: set[str] = set()
_COUNT = itertools.count()


def _say_once(sentence: str) -> None:
    if sentence not in _SAID:
        _SAID.add(sentence)
        print(sentence)


def why_not_compiled() -> str:
    """Why torch.compile cannot work on this machine, in words; "" where nothing is known to be missing."""
    from lowprec_lab.devices import find_compilers

    if not find_compilers()["c++"]:
        return "no C++ compiler was found (`lowprec-lab doctor` says how to get one)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python.h is missing (Debian, Ubuntu: apt-get install python3-dev)"
    return ""


def compile_elementwise(
    function: Callable, dtype: torch.dtype, what: str, into: bool = False, row: int | None = None
) -> Callable:
    """Compile `function(x)`, element by element and of one graph, to `run(x, out=None)`, which returns `out`.

    dtype: of the result. what: what it does, for the sentence that is printed once where it cannot be compiled; `run`
    is the eager function then. into: call `function(x, out)`, which writes into `out` itself. row: hand over rows of
    so many elements, (n, row), for a function that treats each row by itself.
    """

    def body(x: Tensor, out: Tensor) -> Tensor:
        if into:
            return function(x, out)
        return out.copy_(function(x))

    # Dynamo counts recompilations by the name of the code, and turns numbers that differ between them into variables.
    code = body.__code__.replace(co_name=f"body_{next(_COUNT)}")
    own = types.FunctionType(code, body.__globals__, code.co_name, None, body.__closure__)
    reason = why_not_compiled()
    if reason:
        _say_once(f"{what} runs eagerly, the same results but slower: {reason}")
    state = {"compiled": None if reason else torch.compile(own, fullgraph=True, dynamic=False)}

    def run(x: Tensor, out: Tensor | None = None) -> Tensor:
        flat, room, out = _flat(x, out, dtype)
        with torch.no_grad():
            _run(*((flat, room) if row is None else (flat.view(-1, row), room.view(-1, row))))
        return _filled(room, out)

    def _run(flat: Tensor, room: Tensor) -> None:
        # Sizes 0 and 1 would each be compiled apart.
        if state["compiled"] is not None and len(flat) > 1:
            try:
                for tensor in (flat, room):  # one compilation for all sizes; numbers of the format stay constants
                    torch._dynamo.mark_dynamic(tensor, 0)
                state["compiled"](flat, room)
                return
            except (
                Exception
            ) as error:  # whatever a compiler can stumble over; the eager function says if it is the code
                state["compiled"] = None
                _say_once(f"{what} runs eagerly, the same results but slower: {first_line(error)}")
        piece = _PIECE // (row or 1)
        for start in range(0, len(flat), piece):
            own(flat[start : start + piece], room[start : start + piece])

    run.is_compiled = lambda: state["compiled"] is not None
    return run


def first_line(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"
