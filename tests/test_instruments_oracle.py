"""The exact oracle of chapter 05, compared with other ways to the same numbers, and its scenarios."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from lowprec_lab.formats import BF16, E4M3, E4M3FNUZ, E5M2, E8M0, FORMATS, FP16, FP32, Format
from lowprec_lab.graders import inputs, rounding_oracle
from lowprec_lab.graders import instruments_oracle as exact
from lowprec_lab.graders.instruments import MADE_UP, on_a_tie, smallest, top_of
from lowprec_lab.instruments import gradient_through, norm_of, ratio_of, tapped

EVERY_FORMAT = [*FORMATS.values(), *MADE_UP]


def numbers(count=400, seed=1):
    return torch.cat([inputs.random_float32(count, np.random.default_rng(seed)), inputs.special_float32()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exponents_are_those_of_fractions(dtype):
    x = numbers().to(dtype)
    counts = [0] * 277
    for value in x.double().tolist():
        if math.isfinite(value) and value != 0:
            size, exponent = abs(Fraction(value)), -149
            while size >= Fraction(2) ** (exponent + 1):
                exponent += 1
            counts[exponent + 149] += 1
    assert exact.exponent_histogram(x).tolist() == counts


@pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=str)
@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**-20, 2.0**40])
def test_shares_are_those_of_rounding(fmt, scale):
    if fmt.width <= 16:
        x = torch.cat([numbers(), inputs.edges(fmt, 50, np.random.default_rng(2))])
    else:
        x = torch.cat([numbers(), torch.tensor([3.4e38, 1e-45, 2.0**-127])])
    counted = x[x.isfinite() & (x != 0)]
    scaled = (counted * scale).abs()
    zeros = rounding_oracle.round_to(scaled, fmt) == 0
    assert exact.underflow_fraction(x, fmt, scale) == int(zeros.sum()) / len(counted)
    if fmt.specials != "finite":
        special = ~rounding_oracle.round_to(scaled, fmt, overflow="to_special").isfinite()
        assert exact.overflow_fraction(x, fmt, scale) == int(special.sum()) / len(counted)


@pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=str)
def test_the_ends_of_a_format(fmt):
    first, over = exact.ends(fmt)
    largest, tie, tie_is_out = top_of(fmt)
    if fmt is not FP32 and tie < 3.4e38:
        expected = inputs.float32_from_bits([over]).double().item()
        assert expected == tie if tie_is_out else largest < expected > tie
    if not fmt.subnormals:
        assert first == 0
    elif smallest(fmt) > 2.0**-140:
        assert inputs.float32_from_bits([first - 1]).double().item() == smallest(fmt) / 2


def test_ties_of_products_differ_in_float32_and_float64():
    x = on_a_tie(2.0**-10, 3.0)
    wide = (x.double() * 3.0 <= 2.0**-10).double().mean().item()
    assert exact.underflow_fraction(x, E4M3, 3.0) != wide


@pytest.mark.parametrize(
    "fmt", [E4M3, E5M2, FP16, BF16, E8M0, E4M3FNUZ, Format("e5m2_finite", 5, 2, specials="finite")]
)
def test_nothing_to_count_is_nothing_lost(fmt):
    for x in (torch.zeros(0), torch.zeros(4), torch.tensor([math.nan, math.inf])):
        assert exact.underflow_fraction(x, fmt) == exact.overflow_fraction(x, fmt) == 0.0
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="above zero"):
            exact.overflow_fraction(torch.ones(2), fmt, scale)


def test_reports():
    x = torch.tensor([2.8e-7, -0.02, 0.0, -0.0, math.inf])
    assert exact.tensor_report(x) == (2.7999999474559445e-07, 0.019999999552965164, 2, 1)
    assert exact.tensor_report(torch.zeros(0)) == (0.0, 0.0, 0, 0)
    assert exact.tensor_report(torch.tensor([math.nan, -math.inf, 0.0])) == (0.0, 0.0, 1, 2)


@pytest.mark.parametrize("size", [1, 7, 3000, 70_000])
def test_norms_are_those_of_fractions_and_of_float64(size):
    x = torch.from_numpy(np.random.default_rng(size).normal(size=size).astype(np.float32)) * 1e-3
    found = exact.norm([x])
    assert found == pytest.approx(x.double().norm().item(), rel=1e-13)
    if size < 1000:
        total = sum(Fraction(value) ** 2 for value in x.tolist())
        assert abs(Fraction(found) ** 2 - total) <= total * Fraction(1, 2**50)


def test_norms_of_wide_numbers_and_of_none():
    assert exact.norm([]) == exact.norm([torch.zeros(3)]) == 0.0
    assert exact.norm([torch.full((4,), 3e38)]) == pytest.approx(6e38, rel=1e-7)
    assert exact.norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == 5.0
    assert math.isnan(exact.norm([torch.tensor([math.inf, math.nan])]))
    assert exact.norm([torch.tensor([1.0, -math.inf])]) == math.inf
    wide = torch.tensor([1 / 3, 1e-20, 12345.6789], dtype=torch.float64)
    assert exact.norm([wide]) == pytest.approx(wide.norm().item(), rel=1e-15)


def test_ratios():
    assert exact.update_ratio(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == 0.1
    zero = torch.zeros(2)
    assert exact.update_ratio(zero, zero) == 0.0
    assert exact.update_ratio(zero, torch.ones(2)) == math.inf
    assert math.isnan(exact.update_ratio(zero, torch.tensor([math.nan, 0.0])))
    assert ratio_of(lambda before, after: 1 / 3, zero, zero) == float(np.float32(1 / 3))


def test_a_scenario_sees_what_was_changed():
    def clips(parameters):
        return float(torch.nn.utils.clip_grad_norm_(list(parameters), 1.0))

    def changes_weights(parameters):
        next(parameters).data.zero_()
        return 5.0

    gradient = torch.tensor([3.0, 4.0])
    assert norm_of(exact.gradient_norm, gradient, None) == (5.0, True)
    assert norm_of(clips, gradient) == (5.0, False)
    assert norm_of(changes_weights, gradient) == (5.0, False)


@pytest.mark.parametrize("how", ["train", "largest", "no_grad", "error", "later"])
@pytest.mark.parametrize("calls", [1, 3])
def test_taps_and_the_run_by_hand_agree(how, calls):
    rng = np.random.default_rng(calls)
    x, up, down = (torch.from_numpy(rng.integers(-3, 4, s).astype(np.float32)) for s in ((3, 4), (5, 4), (2, 5)))
    found, expected = tapped(exact.Taps, x, up, down, calls, how), exact.tapped(x, up, down, calls, how)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.nan_to_num(-77.0), other.nan_to_num(-77.0))


def test_lengths_and_their_gradients():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, -2.0]])
    assert exact.row_lengths(x).tolist() == [5.0, 0.0, 2.0]
    gradient = gradient_through(exact.row_lengths, x, torch.tensor([1.0, 1.0, 2.0]))
    expected = torch.linalg.vector_norm(x.clone().requires_grad_(), dim=-1)
    assert gradient.tolist()[1:] == [[0.0, 0.0], [0.0, -2.0]]
    assert torch.allclose(gradient[0], x[0] / expected[0].detach())
    assert gradient_through(lambda x: x.detach().sum(-1), x, torch.ones(3)).tolist() == [[0.0, 0.0]] * 3
