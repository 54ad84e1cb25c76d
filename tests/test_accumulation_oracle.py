"""The oracle for sums: its rounding is the exact one, and its sums are those that fractions give."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

from lowprec_lab.formats import BF16, E2M3, E4M3, E5M2, FORMATS, FP16, FP32, TF32, Format
from lowprec_lab.graders import accumulation_oracle, inputs, oracle, rounding_oracle
from lowprec_lab.graders.case import tokens_of

SHORT = [fmt for fmt in (*FORMATS.values(), *inputs.MADE_UP) if fmt.width <= 16]
WIDE = [TF32, FP32, Format("e8m13", 8, 13), *(fmt for fmt in inputs.MADE_UP if fmt.width > 16)]


def policy(fmt):
    return "saturate" if fmt.specials == "finite" else "to_special"


def floats():
    rng = np.random.default_rng(3)
    return torch.cat([inputs.special_float32(), inputs.random_float32(5000, rng), torch.linspace(-20, 20, 4001)])


def same(got, want):
    return np.array_equal(tokens_of(got), tokens_of(want))


@pytest.mark.parametrize("fmt", SHORT, ids=str)
def test_short_formats_round_as_the_rounding_oracle_does(fmt):
    x = floats()
    got = torch.from_numpy(accumulation_oracle.rounder(fmt)(x.numpy()))
    assert same(got, rounding_oracle.round_to(x, fmt, "nearest_even", policy(fmt)))


@pytest.mark.parametrize("fmt", SHORT, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_way_of_wide_formats_agrees_on_short_ones(fmt):
    x = floats().abs()
    got = torch.from_numpy(accumulation_oracle._by_division(fmt)(x.numpy()))
    assert same(got, rounding_oracle.round_to(x, fmt, "nearest_even", policy(fmt)))


@pytest.mark.parametrize("fmt", WIDE, ids=str)
def test_wide_formats_round_to_the_nearest_of_two_neighbours(fmt):
    x = floats()
    x = x[x.isfinite() & (x.abs() <= oracle.max_finite(fmt))]
    with np.errstate(all="ignore"):
        got = torch.from_numpy(accumulation_oracle.rounder(fmt)(x.numpy())).double()
    ulp = oracle.ulp(x, fmt)
    assert bool(((got - x.double()).abs() <= ulp / 2).all())
    assert bool((torch.remainder(got, ulp / 2) == 0).all())


def nearest(value: Fraction, fmt: Format) -> Fraction:
    values = sorted({Fraction(v) for v in rounding_oracle.ladder(fmt)[0].tolist()})
    values = [-v for v in reversed(values[1:])] + values
    best = min(abs(v - value) for v in values)
    near = [v for v in values if abs(v - value) == best]
    step = Fraction(float(oracle.ulp(torch.tensor([float(value)]), fmt)[0]))
    return near[0] if len(near) == 1 else next(v for v in near if (v / step) % 2 == 0)


def by_fractions(x, fmt):
    elements = [nearest(Fraction(v), fmt) for v in x]
    total = lost = Fraction(0)
    plain = Fraction(0)
    for element in elements:
        plain = nearest(plain + element, fmt)
        y = nearest(element - lost, fmt)
        t = nearest(total + y, fmt)
        lost, total = nearest(nearest(t - total, fmt) - y, fmt), t
    parts = elements
    while len(parts) > 1:
        sums = [nearest(a + b, fmt) for a, b in zip(parts[0::2], parts[1::2], strict=False)]
        parts = sums + parts[2 * len(sums) :]
    return plain, parts[0], total


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M3], ids=str)
def test_sums_are_those_that_fractions_give(fmt):
    rng = np.random.default_rng(8)
    rows = torch.from_numpy(np.round(rng.normal(size=(12, 9)) * 16).astype(np.float32) / 16) / 4
    three = (accumulation_oracle.sum_sequential, accumulation_oracle.sum_pairwise, accumulation_oracle.sum_kahan)
    for row in rows:
        want = by_fractions(row.tolist(), fmt)
        assert [Fraction(float(function(row, fmt))) for function in three] == list(want)


def test_sums_that_are_known():
    assert float(accumulation_oracle.sum_sequential(torch.full((10_000,), 1e-3), BF16)) == 0.5
    assert float(accumulation_oracle.sum_sequential(torch.ones(1000), BF16)) == 256
    assert float(accumulation_oracle.sum_pairwise(torch.ones(1024), BF16)) == 1024
    ones = torch.ones(1, 4096)
    assert float(accumulation_oracle.matmul_promoted(ones, ones.t(), BF16, 4096)) == 256
    assert float(accumulation_oracle.matmul_promoted(ones, ones.t(), BF16, 128)) == 4096
    assert float(accumulation_oracle.dot_product(ones, ones, FP16, FP32)) == 4096
    assert bool(accumulation_oracle.update_is_lost(torch.ones(()), torch.tensor(1e-4), BF16))


def test_the_mean_of_all_noises_is_the_float32_weight():
    noise = (torch.arange(256) / 256)[None, :]
    weight, gradients = torch.ones(256), torch.full((1, 256), 2.0**-10)
    steps = accumulation_oracle.sgd_with_stochastic_rounding(weight, gradients, 1.0, BF16, noise)
    assert float(steps.double().mean()) == 1 - 2.0**-10


def test_infinities_and_overflow_do_not_warn():
    rows = torch.tensor([[math.inf, -math.inf, 1.0], [3e38, 3e38, -3e38], [math.nan, 1.0, 2.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fmt in (BF16, FP32, E4M3):
            for name in ("sum_sequential", "sum_pairwise", "sum_kahan"):
                getattr(accumulation_oracle, name)(rows, fmt)
            accumulation_oracle.matmul_promoted(rows, rows, fmt, 2)
            accumulation_oracle.dot_product(rows, rows, fmt, fmt)
