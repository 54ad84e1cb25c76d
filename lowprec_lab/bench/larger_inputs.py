"""A second, larger set of inputs for every exercise, drawn apart from the checks: does an answer differ anywhere?

The checks look at thousands of inputs within a fraction of a second. Here are 300 random formats with any bias that is
possible, every code of every 16-bit format, a million float32 values, and all kinds of shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import FORMATS, Format

RANDOM_FORMATS = 300
FLOAT32_VALUES = 1_000_000
_SEED = 976_431
_SMALL = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@lru_cache(maxsize=1)
def random_formats() -> tuple[Format, ...]:
    """Valid formats of any width up to 32 bits: half of them with the usual bias or one near it, half with any."""
    rng, found = np.random.default_rng(_SEED), {}
    while len(found) < RANDOM_FORMATS:
        exponent_bits, mantissa_bits = int(rng.integers(1, 9)), int(rng.integers(0, 12))
        mantissa_bits += 12 * int(rng.random() < 0.05)
        usual = 2 ** (exponent_bits - 1) - 1
        try:
            fmt = Format(
                f"random_{len(found)}",
                exponent_bits,
                mantissa_bits,
                bias=usual + int(rng.integers(-4, 5) if rng.random() < 0.5 else rng.integers(-120, 140)),
                specials=str(rng.choice(["ieee", "fn", "fnuz", "finite"])),
                signed=bool(rng.random() < 0.75),
                subnormals=bool(rng.random() < 0.75),
            )
        except ValueError:
            continue  # not every combination can exist
        found[fmt] = None
    return tuple(found)


def all_formats() -> tuple[Format, ...]:
    """The registered formats and the random ones."""
    return (*FORMATS.values(), *random_formats())


@lru_cache(maxsize=512)
def codes_for(fmt: Format) -> Tensor:
    """Every code up to 16 bits (12 for random formats); else both ends of every binade and many random codes."""
    if fmt.width <= (16 if fmt in FORMATS.values() else 12):
        return torch.arange(2**fmt.width, dtype=torch.int32)
    rng = np.random.default_rng(_SEED + fmt.width)
    count = 100_000 if fmt in FORMATS.values() else 1_500
    starts = np.arange(0, 2**fmt.width, 2**fmt.mantissa_bits, dtype=np.int64)
    near = np.concatenate([starts + offset for offset in range(-4, 5)])
    codes = np.concatenate([near % 2**fmt.width, rng.integers(0, 2**fmt.width, count)])
    return torch.from_numpy(codes.astype(np.uint32).view(np.int32))


def shapes_of(flat: Tensor) -> list[Tensor]:
    """The tensor as it is, and parts of it in other shapes: no dimension, two, three, strided, transposed, empty."""
    part = flat[: len(flat) // 4 * 4]
    shaped = [flat, flat[len(flat) // 2], part.reshape(2, 2, -1), part.reshape(4, -1).t(), flat[1::3], flat[:0]]
    return [*shaped, flat[:0].reshape(0, 3)]


@lru_cache(maxsize=1)
def float32_values() -> Tensor:
    """A million random float32 values, with both ends of every binade and NaNs of many payloads."""
    rng = np.random.default_rng(_SEED)
    ends = (np.arange(512, dtype=np.int64)[:, None] * 2**23 + np.arange(-3, 4)[None, :]).reshape(-1) % 2**32
    nans = 0x7F800000 + rng.integers(1, 2**23, 2000) + rng.integers(0, 2, 2000) * 2**31
    bits = np.concatenate([ends, nans, rng.integers(0, 2**32, FLOAT32_VALUES)])
    return torch.from_numpy(bits.astype(np.uint32).view(np.int32)).view(torch.float32)


def _float32_calls() -> list[tuple]:
    return [(x,) for x in shapes_of(float32_values())]


def _code_calls() -> list[tuple]:
    calls = [(codes, fmt) for fmt in FORMATS.values() for codes in shapes_of(codes_for(fmt))]
    calls += [(codes_for(fmt), fmt) for fmt in random_formats()]
    return calls + [(codes, fmt) for fmt in random_formats()[:20] for codes in shapes_of(codes_for(fmt))]


def _field_calls() -> list[tuple]:
    from lowprec_lab.graders import oracle

    return [(*oracle.split_fields(codes, fmt), fmt) for codes, fmt in _code_calls()]


def _format_calls() -> list[tuple]:
    return [(fmt,) for fmt in all_formats()]


def _ulp_calls() -> list[tuple]:
    from lowprec_lab.graders import oracle

    calls, everything = [], float32_values()
    for fmt in all_formats():
        values = oracle.decode(codes_for(fmt)[:4096], fmt)
        exact = values[values.isfinite()].float()
        below = torch.nextafter(exact, torch.tensor(-float("inf")))
        above = torch.nextafter(exact, torch.tensor(float("inf")))
        calls.append((torch.cat([exact, below, above, everything[: 4096 + 2048]]), fmt))
    calls += [(everything, fmt) for fmt in FORMATS.values()]
    return calls + [(x, fmt) for fmt in list(FORMATS.values())[:5] for x in shapes_of(everything[:1000])]


def _float8_calls() -> list[tuple]:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    left, right = codes.repeat_interleave(256), codes.repeat(256)
    pairs = [(left.view(dtype), right.view(dtype)) for dtype in _SMALL]
    shaped = [(a.reshape(2, 128, 256), b.reshape(2, 128, 256)) for a, b in pairs]
    shaped += [(a.reshape(256, 256).t(), b.reshape(256, 256).t()) for a, b in pairs]
    return [*pairs, *shaped, *((a[5], b[5]) for a, b in pairs), *((a[:0], b[:0]) for a, b in pairs)]


_CALLS: dict[str, Callable[[], list[tuple]]] = {
    "sign_bit": _float32_calls,
    "bit_pattern": _float32_calls,
    "split_fields": _code_calls,
    "join_fields": _field_calls,
    "classify": _code_calls,
    "decode": _code_calls,
    "max_finite": _format_calls,
    "min_normal": _format_calls,
    "min_subnormal": _format_calls,
    "machine_epsilon": _format_calls,
    "ulp": _ulp_calls,
    "add_float8": _float8_calls,
}


@lru_cache(maxsize=32)
def calls_for(exercise: str) -> list[tuple]:
    """The arguments of every call of the larger set; KeyError, with what to do, for an exercise that has none yet."""
    if exercise not in _CALLS:
        raise KeyError(f"add the larger inputs of {exercise} to {__name__}")
    return _CALLS[exercise]()
