"""The oracle of rounding is exact: against Python fractions, torch, ml_dtypes and gfloat, and in expectation."""

import math
from bisect import bisect_right
from fractions import Fraction
from functools import lru_cache

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats

from lowprec_lab.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    TF32,
    Format,
)
from lowprec_lab.graders import inputs, oracle
from lowprec_lab.graders import rounding_oracle as exact
from lowprec_lab.graders.case import tokens_of

RNG = np.random.default_rng(11)
NARROW = [fmt for fmt in FORMATS.values() if fmt.width <= 16]
RANDOM = [inputs.random_format(RNG) for _ in range(50)]
WIDE = [fmt for fmt in (*FORMATS.values(), *inputs.MADE_UP) if fmt.width > 16]
POLICIES = [(mode, overflow) for mode in exact.MODES for overflow in exact.OVERFLOWS]


def by_name(value):
    return value.name if isinstance(value, Format) else None


def same(one, another) -> bool:
    return np.array_equal(tokens_of(one), tokens_of(another))


def edges_of(fmt):
    """All edges of formats of at most 12 bits, some thousands for wider ones."""
    return inputs.edges(fmt, 300 if fmt.width > 12 else None, np.random.default_rng(fmt.width))


# What the words of the contract say, in Python's own numbers.


@lru_cache(maxsize=8)
def magnitudes(fmt):
    """Every finite magnitude as a fraction, in order, and the one that would follow."""
    found = []
    for code in range(2 ** (fmt.exponent_bits + fmt.mantissa_bits)):
        exponent, mantissa = divmod(code, 2**fmt.mantissa_bits)
        if fmt.specials == "ieee" and exponent == 2**fmt.exponent_bits - 1:
            break
        if fmt.specials == "fn" and code == 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1:
            break
        fraction = Fraction(mantissa, 2**fmt.mantissa_bits)
        if exponent == 0 and fmt.subnormals:
            found.append(fraction * Fraction(2) ** (1 - fmt.bias))
        else:
            found.append((1 + fraction) * Fraction(2) ** (exponent - fmt.bias))
    step = Fraction(2) ** (math.frexp(float(found[-1]))[1] - 1 - fmt.mantissa_bits)
    return found, found[-1] + step


def rounded(value: float, fmt: Format, mode: str, overflow: str) -> float:
    """One number rounded by the rules at the top of lowprec_lab/rounding.py."""
    values, following = magnitudes(fmt)
    negative = math.copysign(1, value) < 0
    if math.isnan(value) or (not fmt.signed and value < 0):
        return math.nan
    special = {"ieee": math.inf}.get(fmt.specials, math.nan) if overflow == "to_special" else float(values[-1])
    inwards = mode == "toward_zero" or mode == ("up" if negative else "down")
    if math.isinf(value):
        result = special
    else:
        result = _finite(abs(Fraction(value)), values, following, fmt, mode, inwards)
        if result is None:
            result = float(values[-1]) if inwards else special
    if not fmt.signed or (fmt.specials == "fnuz" and result == 0):
        return result
    return math.copysign(result, -1.0 if negative else 1.0)


def _finite(size, values, following, fmt, mode, inwards):
    """The rounded magnitude as a float; None where it overflows."""
    if size <= values[0]:
        return float(values[0])
    if size >= following:
        return None
    place = bisect_right(values, size) - 1
    low, high = values[place], values[place + 1] if place + 1 < len(values) else following
    if size == low:
        return float(low)
    below, above = size - low, high - size
    if mode in ("nearest_even", "nearest_away"):
        # Counted in steps, one of two neighbours is even, unless there is no mantissa: then it is the upper one's turn.
        low_is_even = low / (high - low) % 2 == 0
        up = below > above or (below == above and (mode == "nearest_away" or not low_is_even))
    else:
        up = not inwards
    return (float(high) if high != following else None) if up else float(low)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [*NARROW, *RANDOM, *(f for f in inputs.MADE_UP if f.width <= 16)], ids=by_name)
def test_every_mode_and_policy_against_fractions(fmt):
    x = edges_of(fmt)
    x = x[:: max(1, len(x) // 700)]
    for mode, overflow in POLICIES:
        if overflow == "to_special" and fmt.specials == "finite":
            continue
        expected = [rounded(value, fmt, mode, overflow) for value in x.tolist()]
        assert same(exact.round_to(x, fmt, mode, overflow), torch.tensor(expected)), (mode, overflow)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M3FNUZ, E8M0, E3M2], ids=by_name)
def test_every_edge_of_small_formats_against_fractions(fmt):
    x = inputs.edges(fmt)
    expected = torch.tensor([rounded(value, fmt, "nearest_even", "saturate") for value in x.tolist()])
    assert same(exact.round_to(x, fmt), expected)


@pytest.mark.parametrize("fmt", WIDE, ids=by_name)
def test_wide_formats_against_fractions(fmt):
    x = inputs.edges(fmt, 200, np.random.default_rng(3))
    x = x[x.isfinite()][:: max(1, len(x) // 300)]
    largest = Fraction(oracle.max_finite(fmt))
    for mode, overflow in POLICIES:
        if overflow == "to_special" and fmt.specials == "finite":
            continue
        got = exact.round_to(x, fmt, mode, overflow).tolist()
        for value, result in zip(x.tolist(), got, strict=True):
            negative = math.copysign(1, value) < 0
            inwards = mode == "toward_zero" or mode == ("up" if negative else "down")
            size = abs(Fraction(value))
            exponent = max(math.frexp(value)[1] - 1, 1 - fmt.bias) if size else 1 - fmt.bias
            step = Fraction(2) ** (exponent - fmt.mantissa_bits)
            steps, rest = divmod(size, step)
            tie_up = mode == "nearest_away" or steps % 2 == 1
            nearest = rest > step / 2 or (rest == step / 2 and tie_up)
            up = nearest if mode.startswith("nearest") else bool(rest) and not inwards
            expected = (steps + up) * step
            if expected > largest:
                keep = overflow == "saturate" or inwards
                expected = largest if keep else math.inf if fmt.specials == "ieee" else math.nan
            expected = math.copysign(float(expected), -1 if negative else 1)
            assert same(result, expected), (value, mode, overflow)


def test_ladder_and_division_agree():
    """The two ways in which the oracle rounds, on formats that both can."""
    for fmt in (E4M3, FP16, BF16, E5M2FNUZ, E2M1, E8M0, *RANDOM[:20]):
        x = edges_of(fmt)
        negative, magnitude = exact._split(x)
        for mode in exact.MODES:
            if fmt.mantissa_bits == 0 and mode == "nearest_even":
                continue  # the division counts codes, and there the code's last digit belongs to the exponent
            wide = exact._finish(
                exact._wide_steps(negative, magnitude, fmt, mode), negative, magnitude, fmt, "saturate"
            )
            assert torch.equal(wide, exact._codes(x, fmt, mode, "saturate")), (fmt, mode)


@pytest.mark.parametrize("fmt", [*NARROW, *RANDOM, *WIDE], ids=by_name)
def test_codes_decode_to_the_rounded_values(fmt):
    x = edges_of(fmt)
    for mode, overflow in POLICIES:
        if overflow == "to_special" and fmt.specials == "finite":
            continue
        wanted = exact.round_to(x, fmt, mode, overflow)
        if fmt.specials == "finite":
            x, wanted = x[~wanted.isnan()], wanted[~wanted.isnan()]
        codes = exact.encode(x, fmt, mode, overflow)
        assert codes.dtype == torch.int32
        assert same(oracle.decode(codes, fmt).float(), wanted), (mode, overflow)


def test_each_value_rounds_to_its_own_code():
    for fmt in (*NARROW, *RANDOM):
        codes = inputs.all_codes(fmt)
        values = oracle.decode(codes, fmt)
        codes, values = codes[values.isfinite()], values[values.isfinite()]
        for mode in exact.MODES:
            assert torch.equal(exact.encode(values.float(), fmt, mode), codes)


@pytest.mark.parametrize(
    ("fmt", "code"), [(BF16, 0x7FC0), (FP16, 0x7E00), (E5M2, 0x7E), (E4M3, 0x7F), (E4M3FNUZ, 0x80), (E8M0, 0xFF)]
)
def test_the_code_of_nan(fmt, code):
    assert exact.encode(torch.tensor([math.nan, -math.nan]), fmt).tolist() == [code, code]


# Libraries, each with its own policy.


def everything(fmt):
    x = torch.cat(
        [edges_of(fmt), inputs.edges(fmt, 20_000, np.random.default_rng(9)) if fmt.width > 12 else edges_of(fmt)]
    )
    return torch.cat([x, inputs.random_float32(20_000, np.random.default_rng(4))])


TORCH = [(BF16, "to_special"), (FP16, "to_special"), (E4M3, "saturate"), (E5M2, "to_special"),
         (E4M3FNUZ, "to_special"), (E5M2FNUZ, "to_special")]  # fmt: skip


@pytest.mark.parametrize(("fmt", "overflow"), TORCH, ids=by_name)
def test_torch(fmt, overflow):
    x = everything(fmt)
    assert same(exact.round_to(x, fmt, "nearest_even", overflow), x.to(fmt.torch_dtype).float())


def test_torch_and_e8m0():
    ties = oracle.decode(torch.arange(254, dtype=torch.int32), E8M0).float() * 1.5
    x = torch.cat([everything(E8M0), inputs.around(ties)])
    x = x[(x > 0) & (x < 1.5 * 2.0**127)]
    # Just above its smallest value torch goes to the next one, though the smallest is nearer.
    odd = (x > 2.0**-127) & (x < 1.5 * 2.0**-127)
    assert bool(odd.any())
    assert same(exact.round_to(x, E8M0)[~odd], x.to(torch.float8_e8m0fnu).float()[~odd])


ML_DTYPES = [
    (ml_dtypes.bfloat16, BF16, "to_special"),
    (ml_dtypes.float8_e4m3fn, E4M3, "to_special"),
    (ml_dtypes.float8_e5m2, E5M2, "to_special"),
    (ml_dtypes.float8_e4m3fnuz, E4M3FNUZ, "to_special"),
    (ml_dtypes.float8_e5m2fnuz, E5M2FNUZ, "to_special"),
    (ml_dtypes.float6_e2m3fn, E2M3, "saturate"),
    (ml_dtypes.float6_e3m2fn, E3M2, "saturate"),
    (ml_dtypes.float4_e2m1fn, E2M1, "saturate"),
    (ml_dtypes.float8_e3m4, Format("e3m4", 3, 4), "to_special"),
    (ml_dtypes.float8_e4m3b11fnuz, Format("e4m3b11fnuz", 4, 3, bias=11, specials="fnuz"), "to_special"),
]


@pytest.mark.parametrize(("dtype", "fmt", "overflow"), ML_DTYPES, ids=by_name)
def test_ml_dtypes(dtype, fmt, overflow):
    x = everything(fmt)
    if fmt.specials == "finite":
        x = x[~x.isnan()]
    with np.errstate(all="ignore"):
        theirs = x.numpy().astype(dtype).astype(np.float32)
    assert same(exact.round_to(x, fmt, "nearest_even", overflow), torch.from_numpy(theirs))


GFLOAT = [("ocp_e4m3", E4M3), ("ocp_e5m2", E5M2), ("ocp_e2m3", E2M3), ("ocp_e3m2", E3M2), ("ocp_e2m1", E2M1),
          ("binary16", FP16), ("bfloat16", BF16)]  # fmt: skip
GFLOAT_MODES = {
    "nearest_even": "TiesToEven", "nearest_away": "TiesToAway", "toward_zero": "TowardZero", "up": "TowardPositive",
    "down": "TowardNegative",
}  # fmt: skip


@pytest.mark.parametrize(("name", "fmt"), GFLOAT, ids=by_name)
@pytest.mark.parametrize("mode", exact.MODES)
def test_gfloat(name, fmt, mode):
    x = edges_of(fmt)
    x = x[x.isfinite()]  # infinity: the mode decides there, and here the policy
    x = x[:: max(1, len(x) // 400)]
    info = getattr(gfloat_formats, f"format_info_{name}")
    rounding = getattr(gfloat.RoundMode, GFLOAT_MODES[mode])
    saturations = [True] if fmt.specials == "finite" else [True, False]
    for saturate in saturations:
        theirs = [gfloat.round_float(info, value, rounding, sat=saturate) for value in x.tolist()]
        overflow = "saturate" if saturate else "to_special"
        assert same(exact.round_to(x, fmt, mode, overflow), torch.tensor(theirs, dtype=torch.float32))


# Stochastic rounding: expectation by counting, not by sampling.


@pytest.mark.parametrize("fmt", [*NARROW, *RANDOM[:20], TF32], ids=by_name)
def test_the_mean_over_all_noises_is_the_number_itself(fmt):
    x, noise = inputs.on_the_noise_grid(fmt, 12, np.random.default_rng(5))
    got = exact.round_stochastic(x[:, None].expand(-1, 256), fmt, noise.expand(len(x), -1))
    assert torch.equal(got.double().mean(dim=1), x.double())
    neighbours = (exact.round_to(x, fmt, mode) for mode in ("down", "up"))
    low, high = (each[:, None] for each in neighbours)
    assert bool(((got == low) | (got == high)).all())
    assert bool((x.abs() < oracle.min_normal(fmt)).any()) == fmt.subnormals
    assert bool((x < 0).any()) == fmt.signed


@pytest.mark.parametrize("fmt", [*NARROW, *RANDOM, TF32, FP32], ids=by_name)
def test_values_of_the_format_never_move(fmt):
    codes = inputs.codes_to_try(fmt, 2000, np.random.default_rng(6))
    x = oracle.decode(codes, fmt).float()
    x = x[x.isfinite()]
    for noise in (0.0, 2.0**-23, 0.5, 1 - 2.0**-23):
        assert same(exact.round_stochastic(x, fmt, torch.full_like(x, noise)), x)


@pytest.mark.parametrize("fmt", [*NARROW, *RANDOM[:30], TF32], ids=by_name)
def test_stochastic_against_fractions(fmt):
    x = edges_of(fmt)
    x = x[x.isfinite()]
    x = x[:: max(1, len(x) // 500)]
    if not fmt.signed:
        x = x[~x.signbit()]
    rng = np.random.default_rng(8)
    noise = torch.from_numpy((rng.integers(0, 2**23, len(x)) * 2.0**-23).astype(np.float32))
    low, high = (exact.round_to(x.abs(), fmt, mode).tolist() for mode in ("toward_zero", "up"))
    got = exact.round_stochastic(x, fmt, noise).tolist()
    for value, lo, hi, at, result in zip(x.tolist(), low, high, noise.tolist(), got, strict=True):
        lo, size = Fraction(lo), abs(Fraction(value))
        hi = Fraction(hi) if Fraction(hi) > lo else lo
        up = hi > lo and Fraction(at) < (size - lo) / (hi - lo)
        expected = hi if up else lo
        assert abs(Fraction(result)) == expected, value


def test_above_the_largest_value_the_policy_comes_last():
    x = torch.tensor([464.0, 464.0, 480.0, 1e6, math.inf, math.nan, -464.0])
    noise = torch.tensor([0.25, 0.75, 0.99, 0.99, 0.0, 0.0, 0.25])
    saturated = exact.round_stochastic(x, E4M3, noise).tolist()
    special = exact.round_stochastic(x, E4M3, noise, "to_special").tolist()
    assert same(torch.tensor(saturated), torch.tensor([448.0, 448, 448, 448, 448, math.nan, -448]))
    assert same(torch.tensor(special), torch.tensor([math.nan, 448, math.nan, math.nan, math.nan, math.nan, math.nan]))


# Policies, shapes and speed.


@pytest.mark.parametrize("arguments", [("nearest", "saturate"), ("up", "clip"), ("", "to_special")])
def test_an_unknown_mode_or_policy_is_an_error(arguments):
    with pytest.raises(ValueError, match="no such mode"):
        exact.round_to(torch.ones(1), E4M3, *arguments)


def test_a_finite_format_has_nothing_to_overflow_to_and_no_code_for_nan():
    with pytest.raises(ValueError, match="no special value"):
        exact.round_to(torch.ones(1), E2M1, "nearest_even", "to_special")
    with pytest.raises(ValueError, match="no code for NaN"):
        exact.encode(torch.tensor([math.nan]), E2M1)


@pytest.mark.parametrize("fmt", [E4M3, BF16, FP32, E8M0], ids=by_name)
def test_any_shape(fmt):
    x = torch.tensor([[0.3, -1.7, 1e9], [-0.0, 5e-10, 448.0]])
    flat = exact.round_to(x.reshape(-1), fmt)
    assert same(exact.round_to(x, fmt).reshape(-1), flat)
    assert same(exact.round_to(x.t(), fmt), flat.reshape(2, 3).t())
    assert exact.round_to(x[0, 1], fmt).shape == ()
    assert exact.round_to(x[:0], fmt).shape == (0, 3)
    assert exact.round_stochastic(x[0, 1], fmt, torch.tensor(0.5)).shape == ()


def test_the_edges_are_what_they_say():
    assert len(inputs.around(inputs.midpoints(BF16))) >= 195_834
    found = set(inputs.edges(E4M3).tolist())
    assert {464.0, 448.0, -448.0, 2.0**-10, 2.0**-9, 1.0625, 480.0, 1e6, math.inf} <= found
    assert {float(np.nextafter(np.float32(1.0625), np.float32(side))) for side in (0, 2)} <= found
    for fmt in (FP16, TF32, FP32):
        few = inputs.edges(fmt, 500, np.random.default_rng(1))
        assert 1000 < len(few) < 30_000
        assert {oracle.max_finite(fmt), oracle.min_normal(fmt)} <= set(few.tolist())
