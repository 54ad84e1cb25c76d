"""Chapter 11's oracle against fractions, and its rules on rows of every kind."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from lowprec_lab.formats import E4M3
from lowprec_lab.graders import inference_oracle as exact
from lowprec_lab.graders import oracle
from lowprec_lab.graders.inference import near_ties
from lowprec_lab.sources import reference

VALUES = sorted(v for v in oracle.decode(torch.arange(256, dtype=torch.int32), E4M3).tolist() if v == v)


def nearest(value):
    """The E4M3 value nearest to a fraction; a tie goes to the one whose code is even, which has an even place here."""
    magnitudes = [v for v in VALUES if v > 0 or (v == 0 and math.copysign(1, v) > 0)]
    distances = [abs(Fraction(v) - abs(value)) for v in magnitudes]
    best = [place for place, distance in enumerate(distances) if distance == min(distances)]
    size = magnitudes[next((place for place in best if place % 2 == 0), best[0])]
    return -size if value < 0 else size


def test_codes_and_scales_by_fractions():
    for row in near_ties(np.random.default_rng(1), 6, 12):
        codes, scale = exact.by_row(row)
        amax = max(abs(Fraction(v)) for v in row.tolist())
        assert scale.item() == float(np.float32(float(amax / 448)))
        for value, got in zip(row.tolist(), exact.values_of(codes), strict=True):
            quotient = np.float32(np.float32(value) / np.float32(scale.item()))  # IEEE 754 rounds it correctly
            assert got == nearest(max(min(Fraction(float(quotient)), Fraction(448)), Fraction(-448)))


def test_the_floor_is_the_float32_next_to_its_fraction():
    floor = Fraction(1, 448 * 512)
    near = [float(np.nextafter(exact.FLOOR, np.float32(side))) for side in (0, 1)]
    assert all(abs(Fraction(float(exact.FLOOR)) - floor) < abs(Fraction(other) - floor) for other in near)


@pytest.mark.parametrize(
    ("row", "scale", "values"),
    [
        ([0.0, -0.0], 2**-9 / 448, [0.0, -0.0]),
        ([1e-40, 0.0], 2**-9 / 448, [0.0, 0.0]),
        ([2**-9, 2**-18], 2**-9 / 448, [448.0, 0.875]),
        ([math.inf, -5.0], math.inf, [math.nan, -0.0]),
        ([math.nan, 1.0], math.nan, [math.nan, math.nan]),
    ],
    ids=["zeros", "subnormal", "at the floor", "infinity", "NaN"],
)
def test_rows_that_have_a_rule_of_their_own(row, scale, values):
    for quantize in (
        exact.by_row,
        reference("quantize_activation_per_token"),
        reference("quantize_weight_per_channel"),
    ):
        codes, found = quantize(torch.tensor([row]))
        np.testing.assert_array_equal(found.item(), np.float32(scale))
        np.testing.assert_array_equal(codes.float()[0].numpy(), np.float32(values))


def test_an_upper_bound_is_one_of_magnitudes():
    codes, scale = reference("quantize_activation_per_token")(torch.tensor([[1.0, 4.0]]), 2.0)
    assert scale.item() == np.float32(2 / 448)
    assert codes.float().tolist() == [[224.0, 448.0]]


def test_static_scales_are_places_among_sorted_numbers():
    batches = [torch.tensor([3.0, -8.0, 1.0]), torch.tensor([[2.0, 5.0]])]
    for fraction, amax in ((1.0, 8.0), (0.8, 5.0), (0.75, 5.0), (0.6, 3.0), (0.1, 1.0)):
        for calibrate in (exact.calibrate_static, reference("calibrate_static")):
            assert calibrate(batches, fraction).item() == np.float32(amax) / np.float32(448)


def test_compensation_is_the_best_change_of_the_later_columns():
    """Column by column: no other change of the columns that are left has a smaller squared error."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    H = exact.hessian(x, 0.0)
    w = torch.randn(1, 4, generator=generator, dtype=torch.float64).numpy()
    error = 0.3
    share = exact.push(np.linalg.inv(H), 0)
    after = w.copy()
    after[:, 0] -= error
    after[:, 1:] += error * share
    loss = float(((after - w) @ H @ (after - w).T).item())
    rng = np.random.default_rng(4)
    for _ in range(200):
        other = after.copy()
        other[:, 1:] += rng.normal(size=(1, 3)) * 0.01
        assert float(((other - w) @ H @ (other - w).T).item()) >= loss


def test_compensation_lowers_the_error_of_the_output():
    generator = torch.Generator().manual_seed(5)
    mixed = torch.randn(200, 8, generator=generator) @ torch.randn(8, 32, generator=generator)
    x = mixed + 0.1 * torch.randn(200, 32, generator=generator)
    weight = torch.randn(16, 32, generator=generator)

    def error(codes, scale):
        return float((x @ (codes.float() * scale - weight).T).norm())

    plain = error(*reference("quantize_weight_per_channel")(weight))
    assert error(*reference("compensate")(weight, x)) < 0.7 * plain


def test_smoothing_changes_no_product():
    generator = torch.Generator().manual_seed(6)
    x, weight = torch.randn(5, 6, generator=generator), torch.randn(3, 6, generator=generator)
    factors, smoothed = reference("smooth")(x.abs().amax(0), weight)
    assert torch.allclose((x / factors) @ smoothed.T, x @ weight.T, atol=1e-5)
    assert torch.allclose((x / factors).abs().amax(0), smoothed.abs().amax(0), rtol=1e-5)  # alpha = 1/2: both alike


def test_the_bound_of_a_layer_holds_and_is_not_loose():
    generator = torch.Generator().manual_seed(7)
    codes, scale = exact.by_row(torch.randn(6, 64, generator=generator))
    layer, x = exact.Float8InferenceLinear(codes, scale), torch.randn(9, 64, generator=generator)
    numbers, bound = layer.exact(x)
    got = reference("Float8InferenceLinear")(codes, scale)(x).double().numpy()
    assert (np.abs(got - numbers) <= bound).all()
    assert bound.max() < 1e-4 * np.abs(numbers).max()
