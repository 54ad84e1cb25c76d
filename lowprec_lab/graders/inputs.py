"""The inputs that checks share: made-up formats, codes, and the float32 values where formats change their mind."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import Format
from lowprec_lab.graders import oracle, rounding_oracle

# Formats that nobody's library has: an answer that leans on a native cast, or on one format's constants, meets them.
MADE_UP = (
    Format("e3m4_bias5", 3, 4, bias=5, specials="fn"),
    Format("e6m1", 6, 1),
    Format("e4m3_ieee", 4, 3),
    Format("e5m2_finite", 5, 2, specials="finite"),
    Format("e2m5_fnuz", 2, 5, bias=2, specials="fnuz"),
    Format("e4m4_unsigned", 4, 4, specials="fn", signed=False),
    Format("e3m3_no_subnormals", 3, 3, specials="finite", subnormals=False),
    Format("e7m0", 7, 0, specials="fn"),
    Format("e5m7", 5, 7, bias=20),
    Format("e1m3", 1, 3, bias=1, specials="finite"),
    Format("e1m0", 1, 0, bias=-2, specials="finite"),
    Format("e5m0_unsigned", 5, 0, specials="fn", signed=False),
    Format("e6m14", 6, 14),
    Format("e8m22_fn", 8, 22, bias=128, specials="fn"),
)


def random_format(rng: np.random.Generator, max_width: int = 12) -> Format:
    """A valid format drawn at random, of at most `max_width` bits.

    Half of them have the usual bias or one near it, the others any that is possible.
    """
    while True:
        exponent_bits, mantissa_bits = int(rng.integers(1, 9)), int(rng.integers(0, 10))
        usual = 2 ** (exponent_bits - 1) - 1
        options = {
            "bias": usual + int(rng.integers(-3, 4)) if rng.random() < 0.5 else int(rng.integers(-110, 140)),
            "specials": str(rng.choice(["ieee", "fn", "fnuz", "finite"])),
            "signed": bool(rng.random() < 0.8),
            "subnormals": bool(rng.random() < 0.8),
        }
        name = f"e{exponent_bits}m{mantissa_bits}_{options['specials']}_bias{options['bias']}"
        try:
            fmt = Format(name, exponent_bits, mantissa_bits, **options)
        except ValueError:
            continue  # not every combination can exist: draw again
        if fmt.width <= max_width:
            return fmt


def shapes_of(flat: Tensor) -> list[Tensor]:
    """All elements in one dimension; some of them in two, transposed; one element of no dimension; none at all."""
    table = flat[:: max(1, len(flat) // 60)]
    table = table[: len(table) // 2 * 2].reshape(2, -1)
    return [flat, table, table.t(), flat[-1], flat[:0]]


def all_codes(fmt: Format) -> Tensor:
    """Every code of a format of at most 16 bits, as int32."""
    return torch.arange(2**fmt.width, dtype=torch.int32)


def random_codes(fmt: Format, count: int, rng: np.random.Generator) -> Tensor:
    """`count` codes of the format, each bit pattern equally likely, as int32."""
    drawn = rng.integers(0, 2**fmt.width, count, dtype=np.uint64).astype(np.uint32)
    return torch.from_numpy(drawn.view(np.int32))


def codes_to_try(fmt: Format, count: int, rng: np.random.Generator) -> Tensor:
    """Every code where that is at most 12 bits; else the ends of every binade and `count` random codes."""
    if fmt.width <= 12:
        return all_codes(fmt)
    if fmt.width <= 16:
        return torch.cat([_binade_ends(fmt), random_codes(fmt, count, rng)])
    return torch.cat([oracle.landmark_codes(fmt), random_codes(fmt, count, rng)])


def _binade_ends(fmt: Format) -> Tensor:
    last = 2**fmt.mantissa_bits - 1
    starts = torch.arange(0, 2**fmt.width, 2**fmt.mantissa_bits, dtype=torch.int32)
    ends = torch.tensor(sorted({0, min(1, last), last // 2, max(last - 1, 0), last}), dtype=torch.int32)
    return (starts[:, None] + ends[None, :]).reshape(-1)


def float32_from_bits(bits) -> Tensor:
    """The float32 values with these bit patterns (a sequence of non-negative integers)."""
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.int32)).view(torch.float32)


# Both zeros, the ends of the subnormals, 1 and its neighbours, the largest finite value, infinities, and NaNs that
# differ in sign, in payload and in being quiet.
SPECIAL_BITS = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0x3F7FFFFF,
    0x3F800000, 0xBF800000, 0x3F800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000,
    0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00001, 0xFFC12345,
)  # fmt: skip


def special_float32() -> Tensor:
    """Zeros, subnormals, neighbours of 1, the largest values, infinities and NaNs of every kind."""
    return float32_from_bits(SPECIAL_BITS)


def random_float32(count: int, rng: np.random.Generator) -> Tensor:
    """`count` float32 values, each bit pattern equally likely (NaNs and subnormals included)."""
    return float32_from_bits(rng.integers(0, 2**32, count, dtype=np.uint64))


def around(values: Tensor) -> Tensor:
    """Each value with its two float32 neighbours: below, at, above; values that are not finite stay as they are."""
    exact = values.to(torch.float32)
    finite = exact[exact.isfinite()].numpy()
    with np.errstate(over="ignore"):  # the neighbour above the largest float32 is infinity, and is wanted
        near = [np.nextafter(finite, np.float32(-np.inf)), finite, np.nextafter(finite, np.float32(np.inf))]
    return torch.from_numpy(np.concatenate([*near, exact[~exact.isfinite()].numpy()]))


def midpoints(fmt: Format) -> Tensor:
    """Half-way between each two neighbours of a format of at most 16 bits, both signs where it has one; float64.

    The last one is half a step above the largest value, where overflow begins.
    """
    values, _ = rounding_oracle.ladder(fmt)
    middle = (values + np.append(values[1:], rounding_oracle.beyond(fmt))) / 2
    return torch.from_numpy(np.concatenate([middle, -middle]))


def edges(fmt: Format, most: int | None = None, rng: np.random.Generator | None = None) -> Tensor:
    """The float32 values at which rounding to a format changes its mind, both signs, in no particular order.

    All values and midpoints with the two float32 next to each, what is above the largest value and below half of the
    smallest one, float32's own special values. most: at most so many values and so many midpoints, drawn with `rng`,
    besides the ends of every binade and those of the range; wide formats need it.
    """
    values = _magnitudes(fmt, most, rng)
    following = np.append(values[1:], rounding_oracle.beyond(fmt))
    chosen = _some_of(values, most, rng)
    points = np.concatenate([values[chosen], ((values + following) / 2)[chosen], _outside(fmt)])
    near = around(torch.from_numpy(points[points <= np.finfo(np.float32).max]))
    return torch.cat([near, -near, special_float32()])


def _magnitudes(fmt: Format, most: int | None, rng: np.random.Generator | None) -> np.ndarray:
    """Finite magnitudes in order: all up to 16 bits, else neighbours at the ends of every binade and at random."""
    if fmt.width <= 16:
        return rounding_oracle.ladder(fmt)[0]
    last = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1
    starts = np.arange(0, last + 1, 2**fmt.mantissa_bits)
    anywhere = rng.integers(0, last, most or 1000)
    codes = np.unique(np.concatenate([starts - 2, starts - 1, starts, starts + 1, anywhere, anywhere + 1]))
    codes = codes[(codes >= 0) & (codes <= last)]
    values = oracle.decode(torch.from_numpy(codes.astype(np.int32)), fmt).numpy()
    return values[np.isfinite(values)]


def _some_of(values: np.ndarray, most: int | None, rng: np.random.Generator | None) -> np.ndarray:
    if most is None or len(values) <= most:
        return np.arange(len(values))
    exponent = np.frexp(values)[1]
    border = np.flatnonzero(np.diff(exponent) != 0)  # the last value of a binade; the next one begins another
    drawn = rng.integers(0, len(values), most)
    ends = [0, 1, 2, len(values) - 2, len(values) - 1]
    kept = border if len(border) <= most else rng.choice(border, most, replace=False)
    return np.unique(np.concatenate([drawn, kept, kept + 1, ends]))


def _outside(fmt: Format) -> np.ndarray:
    """Values beyond the largest one and below half of the smallest that is not zero."""
    small, beyond = oracle.min_subnormal(fmt) or oracle.min_normal(fmt), rounding_oracle.beyond(fmt)
    above = [beyond, beyond * 1.25, beyond * 2, beyond * 1000, 1e6, 3e38]
    return np.array([small / 4, small / 3, small * 0.49, small * 0.51, small * 0.75, *above])


NOISES = 256


def on_the_noise_grid(fmt: Format, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """(x, noise): x lies on a grid of 1/256 of the format's step, and noise is 0/256 to 255/256, once each.

    Over all noises, an unbiased rounding of x has x for its mean, exactly. x: float32, (n,): within `count` steps of
    the format, those at both ends of the range and at borders of binades among them, positive and (where the format has
    a sign) negative. noise: float32, (256,).
    """
    values = _magnitudes(fmt, 64, rng) if fmt.width > 16 else rounding_oracle.ladder(fmt)[0]
    exponent = np.frexp(values)[1]
    border = np.flatnonzero(np.diff(exponent) != 0)
    border = rng.permutation(border)[: max(1, count // 3)] if len(border) else np.zeros(0, int)
    chosen = np.unique(
        np.concatenate([[0, 1, len(values) - 2], border, border + 1, rng.integers(0, len(values), count)])
    )
    chosen = chosen[(chosen >= 0) & (chosen < len(values) - 1)]
    low = values[chosen]
    step = oracle.ulp(torch.from_numpy(low).float(), fmt).numpy()
    part = rng.integers(0, NOISES, (len(chosen), 3))
    part[:, 0] = rng.choice([0, 1, NOISES - 1], len(chosen))
    x = (low[:, None] + step[:, None] * part / NOISES).reshape(-1)
    exact = x[x.astype(np.float32).astype(np.float64) == x].astype(np.float32)
    both = np.concatenate([exact, -exact[exact > 0]]) if fmt.signed else exact
    return torch.from_numpy(both), torch.arange(NOISES, dtype=torch.float32) / NOISES
