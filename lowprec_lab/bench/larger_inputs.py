"""A second, larger set of inputs for every exercise, drawn apart from the checks: does an answer differ anywhere?

The checks look at thousands of inputs within a fraction of a second. Here are 300 random formats with any bias that is
possible, every code of every 16-bit format, a million float32 values, and all kinds of shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lowprec_lab import autocast, instruments, loss_scaling, quantizer
from lowprec_lab.formats import BF16, E4M3, E5M2, FORMATS, FP16, Format

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


# --- chapter 03 ---

_SUM_FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float6_e2m3fn")


@lru_cache(maxsize=1)
def _formats_for_sums() -> tuple[Format, ...]:
    """Registered formats and random ones of at most 16 bits that have a sign and a zero and hold 1, 2 and 4."""
    from lowprec_lab.graders import oracle

    usable = [
        fmt
        for fmt in random_formats()
        if fmt.signed and fmt.subnormals and 3 <= fmt.width <= 16 and oracle.max_finite(fmt) >= 8
        if oracle.min_normal(fmt) <= 0.5
    ]
    return (*(FORMATS[name] for name in _SUM_FORMATS), *usable[:10])


def _numbers(shape: tuple[int, ...], seed: int, bits: int = 24) -> Tensor:
    """Numbers of many sizes around 1; some rows have few bits, so that ties are common; some have zeros in them."""
    rng = np.random.default_rng([_SEED, seed])
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 4, (*shape[:-1], 1)))
    few = np.round(values * 16) / 16
    values = np.where(rng.random((*shape[:-1], 1)) < 0.5, values, few)
    fraction, exponent = np.frexp(values)
    return torch.from_numpy(np.ldexp(np.round(fraction * 2**bits) / 2**bits, exponent).astype(np.float32))


def _ends(fmt: Format) -> Tensor:
    """Rows at the ends of the range, with infinities, NaN and zeros of both signs."""
    from lowprec_lab.graders import oracle

    top, inf, nan = oracle.max_finite(fmt), float("inf"), float("nan")
    return torch.tensor([
        [top, top, -top], [-top, top, top], [top, top / 16, -1.0], [-top, -top, 1.0], [inf, 1.0, -1.0],
        [1.0, inf, -inf],
        [nan, 1.0, 2.0], [-0.0, -0.0, -0.0], [0.0, -0.0, -0.0], [-0.0, 1.0, -1.0], [1.0, -1.0, -0.0],
    ])  # fmt: skip


def _rows(seed: int) -> list[tuple[Tensor, Format]]:
    calls = []
    for place, fmt in enumerate(_formats_for_sums()):
        calls += [(_numbers((60, n), seed + place), fmt) for n in (1, 2, 5, 12)]
        calls += [(_ends(fmt), fmt), (_ends(fmt)[:, :1], fmt), (_ends(fmt)[7], fmt), (torch.ones(40), fmt)]
    bf16 = FORMATS["bfloat16"]
    shapes = ((2, 3, 7), (4, 0), (0, 5), (0,), (1, 1, 1, 3))
    calls += [(_numbers(shape, seed), bf16) for shape in shapes]
    return [*calls, (_numbers((6, 9), seed).t(), bf16), (_numbers((5, 30), seed)[:, ::4], bf16)]


def _sum_calls() -> list[tuple]:
    return _rows(0)


def _dot_calls() -> list[tuple]:
    formats, calls = (*_formats_for_sums(), FORMATS["float32"]), []
    for place, (x, fmt) in enumerate(_rows(100)):
        other = formats[place * 7 % len(formats)]
        a, b = (_few_bits(each) for each in (x, x.flip(0) if place % 2 else x.flip(-1)))
        calls += [(a, b, fmt, other), (a, b, other, fmt)][: 1 + place % 2]
    return calls


def _few_bits(x: Tensor) -> Tensor:
    return x.to(torch.float16).float() if bool((x.abs() < 60_000).all()) else x.to(torch.bfloat16).float()


def _matmul_calls() -> list[tuple]:
    calls = []
    for place, fmt in enumerate((*_formats_for_sums(), Format("e8m13", 8, 13), FORMATS["float32"])):
        a, b = _numbers((5, 11), 200 + place, 8), _numbers((11, 4), 300 + place, 8)
        calls += [(a, b, fmt, every) for every in (1, 3, 5, 11, 12)]
        calls += [(_ends(fmt), torch.ones(3, 2), fmt, every) for every in (1, 2, 3)]
    bf16 = FORMATS["bfloat16"]
    shapes = (((1, 1), (1, 1)), ((2, 0), (0, 3)), ((0, 4), (4, 2)), ((2, 4), (4, 0)), ((3, 1), (1, 3)))
    calls += [(_numbers(left, 1, 8), _numbers(right, 2, 8), bf16, 2) for left, right in shapes]
    calls += [(_numbers((7, 3), 1, 8).t(), _numbers((2, 7), 2, 8).t(), bf16, 3)]
    return [*calls, *((torch.ones(2, 3), torch.ones(3, 2), bf16, every) for every in (0, -1, -7))]


def _loss_calls() -> list[tuple]:
    from lowprec_lab.graders import accumulation_oracle, oracle

    calls = []
    for place, fmt in enumerate(_formats_for_sums()):
        weight = torch.from_numpy(accumulation_oracle.rounder(fmt)(_numbers((3000, 1), 400 + place).numpy()[:, 0]))
        weight = weight.where(weight != 0, 1.0)
        shares = np.random.default_rng([_SEED, place]).choice([0.0, -0.0, 0.25, 0.5, -0.25, -0.5, 0.3, -0.7], 3000)
        update = (oracle.ulp(weight, fmt) * torch.from_numpy(shares)).float()
        up = torch.nextafter(update, torch.tensor(float("inf")))
        calls += [(weight, each, fmt) for each in (update, up, torch.zeros_like(update))]
        calls += [(weight[:600].reshape(20, 30).t(), update[:600].reshape(20, 30).t(), fmt)]
        calls += [(weight[0], update[0], fmt), (weight[:0], update[:0], fmt)]
        special = torch.tensor([0.0, 1.0, oracle.max_finite(fmt), -oracle.max_finite(fmt)]).repeat_interleave(4)
        calls += [(special, torch.tensor([float("inf"), float("nan"), 1e-30, -0.0]).repeat(4), fmt)]
    return calls


def _descents(divide: float) -> list[tuple[Tensor, Tensor, float, Format]]:
    calls = []
    for place, fmt in enumerate(_formats_for_sums()):
        for steps, n, lr in ((1, 40, 0.1), (6, 30, 0.013), (9, 20, -0.5), (0, 3, 0.1), (3, 0, 0.1), (30, 5, 1e-3)):
            weight = _numbers((n, 1), 500 + place)[:, 0]
            gradients = _numbers((n, max(steps, 1)), 600 + place)[:, :steps].t() / divide
            calls.append((weight / divide, gradients, lr, fmt))
    return calls


def _master_calls() -> list[tuple]:
    odd = torch.tensor([[float("inf"), float("nan"), 0.0], [1.0, 1.0, -0.0], [1e9, -1e9, 1e-9]])
    edges = [(torch.tensor([1.0, -0.0, 0.0]), odd, 0.25, fmt) for fmt in _formats_for_sums()]
    return _descents(1) + edges


def _noisy_calls() -> list[tuple]:
    from lowprec_lab.graders import accumulation_oracle

    calls = []
    for weight, gradients, lr, fmt in _descents(64):
        rng = np.random.default_rng([_SEED, len(calls)])
        drawn = np.where(rng.random(gradients.shape) < 0.1, 0, rng.integers(0, 2**23, gradients.shape))
        noise = torch.from_numpy((drawn * 2.0**-23).astype(np.float32))
        stored = torch.from_numpy(accumulation_oracle.rounder(fmt)(weight.contiguous().numpy()))
        calls.append((stored, gradients, lr, fmt, noise))
    return calls


def _values_for(fmt: Format, count: int) -> Tensor:
    """The edges of a format (some of them for a wide one) and many random float32; at most about 4 * `count`."""
    from lowprec_lab.graders import inputs

    rng = np.random.default_rng(_SEED + fmt.width)
    edges, everything = inputs.edges(fmt, max(count // 8, 20), rng), float32_values()
    return torch.cat([edges[torch.from_numpy(rng.permutation(len(edges))[: 3 * count])], everything[-count:]])


def _bfloat16_calls() -> list[tuple]:
    return [*_float32_calls(), (_values_for(BF16, 200_000),)]


def _policies(fmt: Format) -> list[tuple[str, str]]:
    from lowprec_lab.graders.rounding import policies_of

    return policies_of(fmt)


_REFUSED = (("nearest", "saturate"), ("up", "clip"), ("Up", "saturate"), ("", ""), ("toward_zero", "to_infinity"))


def _rounding_calls() -> list[tuple]:
    calls = [(_values_for(fmt, 20_000), fmt) for fmt in FORMATS.values()]
    calls += [(_values_for(fmt, 200), fmt, *policy) for fmt in all_formats() for policy in _policies(fmt)]
    calls += [(x, fmt) for fmt in list(FORMATS.values())[3:8] for x in shapes_of(float32_values()[:1000])]
    calls += [(torch.ones(3), fmt, *policy) for fmt in list(FORMATS.values())[:8] for policy in _REFUSED]
    finite = [fmt for fmt in all_formats() if fmt.specials == "finite"]
    return calls + [(torch.ones(2), fmt, mode, "to_special") for fmt in finite for mode in ("up", "nearest_even")]


def _encoding_calls() -> list[tuple]:
    from lowprec_lab.graders import rounding_oracle

    calls = _rounding_calls()
    finite = [call for call in calls if call[1].specials == "finite" and call[2:] in ((), *_policies(call[1]))]
    for x, fmt, *policy in finite:  # what a finite format has codes for, besides the refusals
        calls.append((x[~rounding_oracle.round_to(x, fmt, *policy).isnan()], fmt, *policy))
    return calls


def _stochastic_calls() -> list[tuple]:
    rng = np.random.default_rng(_SEED)
    calls = []
    for fmt in all_formats():
        x = _values_for(fmt, 1000)
        noise = torch.as_tensor(rng.integers(0, 2**23, len(x)), dtype=torch.float32) * 2.0**-23
        noise[::5], noise[1::5] = 0.0, 1 - 2.0**-23
        policies = ("saturate", "to_special") if fmt.specials != "finite" else ("saturate",)
        calls += [(x, fmt, noise, overflow) for overflow in policies]
    for fmt in list(FORMATS.values())[3:6]:
        calls += [(x, fmt, torch.full_like(x, 0.25)) for x in shapes_of(float32_values()[:1000])]
    pair = torch.ones(2), torch.zeros(2)
    refused = [(pair[0], fmt, pair[1], overflow) for fmt in FORMATS.values() for overflow in ("clip", "to_special")]
    return calls + refused


def _victim_calls() -> list[tuple]:
    rng = np.random.default_rng(_SEED)
    calls, formats = [], [fmt for fmt in all_formats() if fmt.width <= 16]
    for _ in range(150):
        via, fmt = (formats[int(place)] for place in rng.integers(0, len(formats), 2))
        first = int(rng.integers(1, 0x7F000000))
        ends = np.array([first, first + int(rng.integers(1, 2**13))], dtype=np.uint32)
        calls.append((via, fmt, *ends.view(np.float32).tolist()))
    for via, fmt in ((BF16, E4M3), (FP16, E4M3), (BF16, E5M2)):
        calls += [(via, fmt, 1.0625 * part - 2.0**-12, 1.0625 * part + 2.0**-10) for part in range(1, 40)]
        calls += [(via, fmt, 1.0625 + k * 2.0**-25, 1.0625 + (k + 9) * 2.0**-25) for k in range(12)]
    return calls


def _fast_calls() -> list[tuple]:
    from lowprec_lab.graders.rounding import is_fast

    some = float32_values()[:1000]
    calls = [(_values_for(fmt, 5_000), fmt) for fmt in all_formats() if is_fast(fmt)]
    return calls + [(x, E4M3) for x in shapes_of(some)] + [(some, fmt, torch.empty_like(some)) for fmt in (E4M3, E5M2)]


def _cast_calls() -> list[tuple]:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    every = [float32_values(), halves.view(torch.bfloat16), halves.view(torch.float16)]
    calls = [(x, dtype) for x in every for dtype in _SMALL]
    calls += [(_values_for(fmt, 10_000), fmt.torch_dtype) for fmt in FORMATS.values() if fmt.torch_dtype in _SMALL]
    return calls + [(x, dtype) for dtype in _SMALL for x in shapes_of(float32_values()[:1000])]


def _histogram_calls() -> list[tuple]:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return [(x,) for x in (*shapes_of(float32_values()), codes.view(torch.bfloat16), codes.view(torch.float16))]


def _share_calls() -> list[tuple]:
    rng, found = np.random.default_rng(_SEED + 5), []
    for fmt in all_formats():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            scale = float(np.float32(2.0 ** rng.uniform(-20, 20)))
            x = _values_for(fmt, 300)
            found.append(((x.double() / scale).float().to(dtype), fmt, scale))
            found.append((x.to(dtype), fmt))
        found += [(torch.tensor([1e-40, -1e30, 3e38, 1e-30, 1.0]), fmt, scale) for scale in (1e-10, 10.0)]
    return [*found, (torch.ones(2), E4M3, 0.0), (torch.ones(2), E4M3, -1.0), (torch.ones(2), E4M3, float("inf"))]


def _report_calls() -> list[tuple]:
    return [*_histogram_calls(), *((x.double() * 1e-60,) for x in shapes_of(float32_values()[:1000]))]


def _gradient_calls() -> list[tuple]:
    rng, found = np.random.default_rng(_SEED + 6), [(), (None,), (torch.zeros(3), None)]
    for number in range(200):
        size = 2.0 ** rng.uniform(-60, 60) if number % 2 else 1.0
        parts = [_numbers((int(rng.integers(0, 40)),), 10 * number + part) * size for part in range(number % 5)]
        found.append(tuple(None if rng.random() < 0.2 else part for part in parts))
    return found


def _step_calls() -> list[tuple]:
    rng, found = np.random.default_rng(_SEED + 7), [(torch.zeros(3), torch.zeros(3)), (torch.zeros(3), torch.ones(3))]
    for number in range(200):
        before = _numbers((int(rng.integers(1, 60)),), number) * 2.0 ** rng.uniform(-60, 60)
        after = before * (1 + 2.0 ** rng.uniform(-12, 3) * _numbers(before.shape, number + 1000))
        dtype = (torch.float32, torch.bfloat16, torch.float32)[number % 3]
        found.append((before.to(dtype), after.to(dtype)))
    return found


def _whole(rng: np.random.Generator) -> np.ndarray:
    """Three whole numbers whose norm is whole, of 1 to 4, both signs: a, b, c, d give one of a^2 + b^2 + c^2 + d^2."""
    a, b, c, d = (int(each) for each in rng.permutation([1, *rng.integers(0, 2, 3)]))
    return np.array([a * a + b * b - c * c - d * d, 2 * (b * c + a * d), 2 * (b * d - a * c)], dtype=np.float64)


_POWERS = {torch.float32: (0, -3, 80, -80, -130), torch.bfloat16: (0, -3, 80, -80), torch.float16: (0, 3, 10, -18)}


def _orderless_gradient_calls() -> list[tuple]:
    """Gradients whose squares a narrow dtype holds exactly, or for which they are infinite, or zero."""
    rng, found = np.random.default_rng(_SEED + 6), [(), (None,), (torch.zeros(3), None)]
    for number in range(240):
        dtype = tuple(_POWERS)[number % 3]
        unit = np.ldexp(_whole(rng), _POWERS[dtype][number // 3 % len(_POWERS[dtype])])
        parts = [torch.from_numpy(factor * unit).to(dtype) for factor in _whole(rng)]
        found.append(tuple(parts[:1] if number % 2 else parts))
    return found


def _orderless_step_calls() -> list[tuple]:
    """Steps whose ratio is exact in every dtype, and steps near 1e-30 and 1e30."""
    rng, found = np.random.default_rng(_SEED + 7), [(torch.zeros(3), torch.zeros(3)), (torch.zeros(3), torch.ones(3))]
    for number in range(240):
        before = rng.choice([-2.0, 2.0], 4)
        after = before + np.ldexp(np.append(_whole(rng), 0), -int(rng.integers(3, 6)))
        power = (0, 100, -100)[number // 3 % 3] if number % 3 == 0 else 0
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        found.append(tuple(torch.from_numpy(np.ldexp(each, power)).to(dtype) for each in (before, after)))
    return found


def _tap_calls() -> list[tuple]:
    rng, found = np.random.default_rng(_SEED + 8), []
    for number in range(60):
        rows, width, hidden, out = (int(size) for size in rng.integers(1, 6, 4))
        shapes = ((rows, width), (hidden, width), (out, hidden))
        parts = [torch.from_numpy(rng.integers(-3, 4, shape).astype(np.float32)) for shape in shapes]
        found.append((*parts, 1 + number % 4, ("train", "largest", "no_grad", "error", "later")[number // 4 % 5]))
    return found


def _length_calls() -> list[tuple]:
    rng, found = np.random.default_rng(_SEED + 9), []
    for n in (1, 2, 4, 5, 16, 20):
        filled = 1 if n < 4 else 4
        rows = np.zeros((500, n), dtype=np.float32)
        rows[:, :filled] = np.ldexp(rng.choice([-1.0, 1.0], (500, filled)), rng.integers(-20, 20, (500, 1)))
        rows[rng.random(500) < 0.3] = 0
        found.append((torch.from_numpy(rng.permuted(rows, axis=1)),))
    return found


def _lengths_and_gradients(function: Callable, x: Tensor) -> tuple[Tensor, Tensor]:
    return function(x) + 0.0, instruments.gradient_through(function, x, torch.ones(x.shape[:-1]))


def _through(scenario: Callable, calls: Callable[[], list[tuple]]) -> Callable[[], list[tuple]]:
    """The same calls for a scenario, which drives the answer."""
    return lambda: [(scenario, *args) for args in calls()]


def _gradient_lists(rng: np.random.Generator, dtypes: tuple[torch.dtype, ...]) -> list[list[Tensor | None]]:
    """Lists of none to five gradients of many shapes and sizes; special values in some, None in some."""
    shapes, lists = ((), (1,), (7,), (2, 3), (0,), (3, 1, 2)), [[], [None]]
    special = torch.tensor([-0.0, float("inf"), float("-inf"), float("nan"), 3e38, 7e4, 1e-45])
    for _ in range(300):
        found = []
        for shape in (shapes[int(k)] for k in rng.integers(0, len(shapes), int(rng.integers(1, 6)))):
            x = torch.from_numpy(np.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-30, 40), dtype=np.float32))
            if rng.random() < 0.2:
                x = torch.where(torch.from_numpy(np.asarray(rng.random(shape) < 0.3)), special[rng.integers(7)], x)
            found.append(None if rng.random() < 0.15 else x.to(dtypes[rng.integers(len(dtypes))]))
        lists.append(found)
    return lists


def _unscaling_calls() -> list[tuple]:
    rng = np.random.default_rng(61)
    lists = [each for each in _gradient_lists(rng, (torch.float32,)) if any(one is not None for one in each)]
    scales = (1.0, 2.0**16, 3.0, 1000.0, 2.0**-140, float(np.float32(0.1)))
    calls = [(loss_scaling.unscaled, each, scales[int(rng.integers(len(scales)))]) for each in lists]
    short = _gradient_lists(rng, (torch.float32, torch.float16))
    short = [each for each in short if not any(one is not None and one.isnan().any() for one in each)]
    return calls + [(loss_scaling.refused, each, 3.0) for each in short]


def _finding_calls() -> list[tuple]:
    rng = np.random.default_rng(62)
    return [(each,) for each in _gradient_lists(rng, (torch.float32, torch.float16, torch.bfloat16))]


def _steps(rng: np.random.Generator) -> str:
    bad = rng.random() * 0.8
    return "".join(rng.choice(["x", "."], int(rng.integers(0, 60)), p=[bad, 1 - bad]))


def _dynamic_calls() -> list[tuple]:
    rng, calls = np.random.default_rng(63), [(loss_scaling.scales_after, "." * 2001 + "x")]
    for _ in range(400):
        low, high = sorted(np.exp2(rng.uniform(-150, 128, 2)).astype(np.float32).tolist())
        low, high = (0.0 if rng.random() < 0.4 else low, float("inf") if rng.random() < 0.4 else high)
        start = float(np.float32(np.clip(np.exp2(rng.uniform(-149, 127)), low, high)))
        factors = (2.0, 0.5) if rng.random() < 0.5 else (float(rng.uniform(1, 5)), float(rng.uniform(0.01, 1)))
        settings = (start, *factors, int(rng.integers(1, 9)), low, high)
        calls.append((loss_scaling.scales_after, _steps(rng), *settings))
        calls.append((loss_scaling.scales_resumed, _steps(rng), _steps(rng), *settings))
    return calls


def _apex_calls() -> list[tuple]:
    rng, calls = np.random.default_rng(64), [(loss_scaling.scales_after, "." * 2001 + "x")]
    for _ in range(400):
        floor = None if rng.random() < 0.4 else float(np.exp2(rng.uniform(-4, 6)))
        start, cap = np.exp2(rng.uniform(6, 30, 2)).tolist()
        calls.append((loss_scaling.scales_after, _steps(rng), start, int(rng.integers(1, 9)), floor, cap))
    return calls


def _hysteresis_calls() -> list[tuple]:
    rng, calls = np.random.default_rng(65), [(loss_scaling.scales_after, "x" + "." * 1001 + "xxx" * 20)]
    for _ in range(400):
        factors = (2.0, 0.5) if rng.random() < 0.5 else (float(rng.uniform(1, 5)), float(rng.uniform(0.01, 1)))
        rest = int(rng.integers(1, 9)), float(np.exp2(rng.uniform(-4, 6))), int(rng.integers(1, 6))
        calls.append((loss_scaling.scales_after, _steps(rng), float(np.exp2(rng.uniform(6, 30))), *factors, *rest))
    return calls


def _adamw_calls() -> list[tuple]:
    rng, calls = np.random.default_rng(66), []
    for _ in range(150):
        n, steps = int(rng.integers(2, 12)), int(rng.integers(1, 40))
        weight = torch.from_numpy(rng.normal(size=n)).to(torch.float16)
        sizes = np.exp2(rng.uniform(-30, 20)) * rng.normal(size=(steps, n))
        gradients = torch.from_numpy((sizes * (rng.random((steps, n)) < 0.9)).astype(np.float32))
        betas, eps = (float(rng.uniform(0, 0.99)), float(rng.uniform(0.5, 0.9999))), float(10 ** rng.uniform(-12, -1))
        lr, decay = float(10 ** rng.uniform(-5, 0)), float(rng.choice([0, 0.01, 0.3]))
        calls.append((loss_scaling.adamw_steps, weight, gradients, lr, *betas, eps, decay))
    return calls


def _training_calls() -> list[tuple]:
    from lowprec_lab.graders.loss_scaling import to_be_clipped, whole

    rng, calls = np.random.default_rng(67), []
    for _ in range(100):
        max_norm = float(rng.choice([0.5, 1.0, 8.0]))
        settings = float(2.0 ** rng.integers(0, 20)), int(rng.integers(1, 5))
        small = whole(rng, 12, int(rng.integers(-28, 4)))
        for inputs, norm in ((small, 1e9), (to_be_clipped(rng, max_norm), max_norm)):
            for scenario in (loss_scaling.gradients_taken, loss_scaling.steps_told):
                calls.append((scenario, inputs, *settings, norm))
    return calls


def _autocast_loss_calls() -> list[tuple]:
    devices = ("cpu", "xpu", "mtia", "hpu", "ipu", "mps")
    shapes = ((2, 8), (1, 1), (5, 3), (1, 7))
    return [
        (autocast.loss_facts, device, batch, length, training, 7 + batch)
        for device in devices
        for batch, length in shapes
        for training in (True, False)
    ]


def _recorder_calls() -> list[tuple]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    calls = [(autocast.recorded, program, dtype) for program in autocast.PROGRAMS for dtype in dtypes]
    calls += [(autocast.recorded_in_two_blocks, program, torch.float32) for program in autocast.PROGRAMS]
    choices = [(dtype, layers, fused) for dtype in dtypes[:2] for layers in (1, 3) for fused in (True, False)]
    return calls + [(autocast.recorded_gpt, *choice, back) for choice in choices for back in (True, False)]


def _policy_calls() -> list[tuple]:
    names = (*autocast.OPS, "view", "arange", "linear_", "", "nothing", "Linear", "soft", "mm ", "layer_norm.default")
    return [(name, device) for name in names for device in ("cpu", "cuda", "xpu", "CUDA", "")]


def _caster_calls() -> list[tuple]:
    rng, dtypes = np.random.default_rng(41), (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    products = ("linear", "matmul", "scaled_dot_product_attention")  # their operands have to agree: never as they are
    others = ("embedding", "add", "layer_norm", "gelu", "softmax", "cross_entropy_loss", "dropout", "flatten")
    tables = [
        (*((op, str(rng.choice(autocast.POLICIES[:3]))) for op in products),
         *((op, str(rng.choice(autocast.POLICIES))) for op in others))
        for _ in range(24)
    ]  # fmt: skip
    calls = [(autocast.traced_gpt, table, torch.bfloat16, 1, n % 2 == 0, True, 2) for n, table in enumerate(tables)]
    for policy in autocast.POLICIES:
        ops = (*autocast.OPS[::5], "cat", "stack")
        calls += [(autocast.traced_op, ((op, policy),), torch.float16, op, dtype) for op in ops for dtype in dtypes]
        pairs = [(one, two) for one in dtypes for two in dtypes]
        calls += [(autocast.traced_op, ((op, policy),), torch.bfloat16, op, *pair) for op in ops[-2:] for pair in pairs]
        calls += [(autocast.traced_keywords, policy, torch.float16, *pair) for pair in pairs]
    kinds = [(leaf, gradients) for leaf in (True, False) for gradients in (True, False)]
    return calls + [(autocast.traced_weight, torch.bfloat16, n, b, *k) for n in (1, 5) for b in (1, 4) for k in kinds]


def _cast_count_calls() -> list[tuple]:
    sizes = [(layers, frozen) for layers in (1, 2, 4) for frozen in range(layers + 1)]
    rest = [(passes, cached, length) for passes in (0, 1, 3) for cached in (True, False) for length in (1, 4)]
    return [
        (autocast.weight_casts, layers, bias, frozen, *each)
        for layers, frozen in sizes
        for bias in (True, False)
        for each in rest
    ]


def _compiler_calls() -> list[tuple]:
    rng = np.random.default_rng(46)
    drawn = [torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for shape in ((7,), (2, 3), (1, 1, 4), (1,))]
    special = torch.tensor([-0.0, 0.0, math.inf, -math.inf, math.nan, 1e-40, 1e30, 2.0])
    inputs = [*drawn, special, special[:4], special[4:5], special[:1], torch.zeros(0), torch.arange(6.0)]
    pairs = [(f, compiler) for f in autocast.ROUNDINGS for compiler in autocast.COMPILERS]
    calls = [(autocast.survives, *pair, x) for pair in pairs for x in inputs]
    return [call for call in calls if call[-1].numel() or call[2] != "the last one moves"]


_GRANULARITIES = ("tensor", "row", "column", (1, 1), (2, 3), (1, 4), (3, 1), (16, 16))
_QUANTIZED = (*(fmt for fmt in FORMATS.values() if fmt.signed and fmt.width <= 8),
              Format("e3m4_bias5", 3, 4, bias=5, specials="fn"), Format("e6m1", 6, 1))  # fmt: skip


def _tensors(rng: np.random.Generator, count: int, special: bool = True) -> list[Tensor]:
    """Tensors of no to four dimensions and three dtypes, strided and empty ones, of sizes from 2^-30 to 2^20.

    special: some have zeros, NaN, infinities, 1e-40 or 3e38 among their numbers.
    """
    shapes, found = ((), (9,), (4, 7), (6, 5), (2, 3, 4), (1, 2, 3, 5), (0,), (3, 0), (0, 4), (1, 1)), []
    edges = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, -1e-20, 3e38])
    for number in range(count):
        shape = shapes[number % len(shapes)]
        sizes = np.ldexp(rng.normal(size=shape), int(rng.integers(-14, 12)) - rng.integers(0, 9, shape))
        x = torch.from_numpy(np.asarray(sizes, dtype=np.float32))
        if special and rng.random() < 0.4:
            x = torch.where(torch.from_numpy(np.asarray(rng.random(shape) < 0.2)), edges[rng.integers(8)], x)
        if special and rng.random() < 0.2:
            x = x * 2.0 ** int(rng.integers(-60, 60))
        x = x.to((torch.float32, torch.bfloat16, torch.float16)[int(rng.integers(3))])
        found.append(x.transpose(-1, -2) if x.dim() > 1 and rng.random() < 0.3 else x)
    return found


def _grouped(x: Tensor) -> list:
    """The granularities that a tensor has enough dimensions for."""
    return [each for each in _GRANULARITIES if x.dim() >= (0 if each == "tensor" else 1 if each == "row" else 2)]


def _absmax_calls() -> list[tuple]:
    return [(x, each) for x in _tensors(np.random.default_rng(71), 200) for each in _grouped(x)]


def _scale_calls() -> list[tuple]:
    rng, calls = np.random.default_rng(72), []
    for fmt in _QUANTIZED:
        for eps in (1e-12, 1e-6, 0.0):
            for power_of_two in (False, True):
                sizes = np.exp2(rng.uniform(-140, 127, 2000)).astype(np.float32)
                exact = np.exp2(rng.integers(-100, 100, 300)) * rng.integers(1, 16, 300)
                amax = torch.from_numpy(np.concatenate([sizes, exact.astype(np.float32), [0, np.inf, np.nan]]))
                calls += [(amax.to(dtype), fmt, eps, power_of_two) for dtype in (torch.float32, torch.bfloat16)]
    return calls


def _quantizing_calls() -> list[tuple]:
    rng, calls = np.random.default_rng(73), []
    for x in _tensors(rng, 200):
        for granularity in _grouped(x):
            fmt = _QUANTIZED[int(rng.integers(len(_QUANTIZED)))]
            if fmt.specials == "finite" and not bool(x.isfinite().all()):
                fmt = E5M2
            calls.append((quantizer.quantized, x, fmt, granularity, bool(rng.random() < 0.3)))
    return calls


def _dequantizing_calls() -> list[tuple]:
    rng, calls = np.random.default_rng(74), []
    for x in _tensors(rng, 200, special=False):
        for granularity in _grouped(x):
            fmt = _QUANTIZED[int(rng.integers(len(_QUANTIZED)))]
            codes = torch.from_numpy(np.asarray(rng.integers(0, 2**fmt.width, tuple(x.shape)), dtype=np.uint8))
            scale = quantizer.absmax(x, granularity).float() * 2.0 ** int(rng.integers(-9, 9))
            calls.append((quantizer.dequantized, codes, scale, fmt, granularity, x.dtype))
    return calls


def _decibel_rounded(function: Callable, x: Tensor, y: Tensor) -> float:
    return round(function(x, y), 6)


def _decibel_calls() -> list[tuple]:
    rng, calls = np.random.default_rng(75), []
    for x in _tensors(rng, 300):
        noise = torch.from_numpy(np.asarray(rng.normal(size=tuple(x.shape)), dtype=np.float32))
        calls.append((_decibel_rounded, x, x + x.float() * noise * 2.0 ** int(rng.integers(-12, 2))))
        calls.append((_decibel_rounded, x, x.clone()))
    return calls


def _int8_calls() -> list[tuple]:
    return [(x, each) for x in _tensors(np.random.default_rng(76), 300) for each in (True, False)]


def _through_calls() -> list[tuple]:
    rng, calls = np.random.default_rng(77), []
    for x in _tensors(rng, 200, special=False):
        gradient = np.asarray(rng.normal(size=tuple(x.shape)) * 2.0 ** rng.integers(-40, 12), dtype=np.float32)
        fmt = _QUANTIZED[int(rng.integers(len(_QUANTIZED)))]
        calls.append((quantizer.passed_through, x, fmt, torch.from_numpy(gradient).to(x.dtype)))
    return calls


def _clip_calls() -> list[tuple]:
    from lowprec_lab.graders.quantizer import decided

    rng, fractions = np.random.default_rng(78), tuple(k / 16 for k in range(16, 3, -1))
    formats = [fmt for fmt in _QUANTIZED if fmt.width <= 6] + [E4M3]
    drawn = [(decided(rng, fmt, fractions, outlier=outlier), fmt) for fmt in formats for outlier in (0, 0, 0, 5, 9)]
    rest = [
        torch.zeros(3),
        torch.zeros(0),
        torch.tensor([math.nan, 1.0]),
        torch.tensor([math.inf]),
        torch.ones(3) * 1e-20,
    ]
    return drawn + [(x, E4M3) for x in rest]


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
    "truncate_to_bfloat16": _bfloat16_calls,
    "round_to_bfloat16": _bfloat16_calls,
    "round_to": _rounding_calls,
    "encode": _encoding_calls,
    "round_stochastic": _stochastic_calls,
    "double_rounding_victims": _victim_calls,
    "fast_round_to": _fast_calls,
    "cast_saturating": _cast_calls,
    "sum_sequential": _sum_calls,
    "sum_pairwise": _sum_calls,
    "sum_kahan": _sum_calls,
    "dot_product": _dot_calls,
    "matmul_promoted": _matmul_calls,
    "update_is_lost": _loss_calls,
    "sgd_with_master_weights": _master_calls,
    "sgd_with_stochastic_rounding": _noisy_calls,
    "exponent_histogram": _histogram_calls,
    "underflow_fraction": _share_calls,
    "overflow_fraction": _share_calls,
    "tensor_report": _report_calls,
    "gradient_norm": _through(instruments.norm_of, _gradient_calls),
    "update_ratio": _through(instruments.ratio_of, _step_calls),
    "Taps": _through(instruments.tapped, _tap_calls),
    "row_lengths": _through(_lengths_and_gradients, _length_calls),
    "unscale_": _unscaling_calls,
    "found_nonfinite": _finding_calls,
    "DynamicLossScaler": _dynamic_calls,
    "ApexLossScaler": _apex_calls,
    "HysteresisLossScaler": _hysteresis_calls,
    "MasterWeightAdamW": _adamw_calls,
    "fp16_train_step": _training_calls,
    "bf16_loss": _autocast_loss_calls,
    "OpRecorder": _recorder_calls,
    "cast_policy": _policy_calls,
    "MiniAutocast": _caster_calls,
    "count_weight_casts": _cast_count_calls,
    "survives_compile": _compiler_calls,
    "absmax": _absmax_calls,
    "scale_for": _scale_calls,
    "quantize": _quantizing_calls,
    "dequantize": _dequantizing_calls,
    "sqnr_db": _decibel_calls,
    "quantize_int8": _int8_calls,
    "straight_through": _through_calls,
    "best_clip": _clip_calls,
}

# A narrow sum depends on the order of its terms in the last bit. Which order it is, is no part of what a name says.
_NAMED_CALLS: dict[str, Callable[[], list[tuple]]] = {
    "gradient_norm": _through(instruments.norm_of, _orderless_gradient_calls),
    "update_ratio": _through(instruments.ratio_of, _orderless_step_calls),
}


@lru_cache(maxsize=32)
def named_calls_for(exercise: str) -> list[tuple]:
    """The calls on which an answer has to agree with the misconception that it is named after: mostly `calls_for`."""
    return _NAMED_CALLS[exercise]() if exercise in _NAMED_CALLS else calls_for(exercise)


@lru_cache(maxsize=32)
def calls_for(exercise: str) -> list[tuple]:
    """The arguments of every call of the larger set; KeyError, with what to do, for an exercise that has none yet.

    Where the first is a function, it is a scenario, which drives the answer with the others.
    """
    if exercise not in _CALLS:
        raise KeyError(f"add the larger inputs of {exercise} to {__name__}")
    return _CALLS[exercise]()
