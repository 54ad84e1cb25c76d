"""Chapter 13's oracle against fractions, and its rules on blocks of every kind."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from lowprec_lab.block_formats import MX_FORMATS, SCALE_MODES
from lowprec_lab.formats import E2M1, E4M3
from lowprec_lab.graders import block_formats_oracle as exact
from lowprec_lab.graders import oracle
from lowprec_lab.graders.block_formats import near_ties, turning_points
from lowprec_lab.sources import reference

FORMATS = list(MX_FORMATS.values())


def floor_log2(value):
    """The largest whole k with 2^k <= value, a fraction."""
    k = value.numerator.bit_length() - value.denominator.bit_length()
    return k if Fraction(2) ** k <= value else k - 1


def ceil_log2(value):
    k = floor_log2(value)
    return k if Fraction(2) ** k == value else k + 1


def exponent(amax, fmt, mode):
    """The rule in fractions."""
    top = Fraction(oracle.max_finite(fmt))
    emax = floor_log2(top)
    if mode == "rceil":
        return ceil_log2(Fraction(float(np.float32(amax) / np.float32(top))))
    value = Fraction(float(amax))
    if mode == "even":
        step = Fraction(2) ** (floor_log2(value) - fmt.mantissa_bits)
        value = math.floor(value / step + Fraction(1, 2)) * step
    return (ceil_log2(value) if mode == "ceil" else floor_log2(value)) - emax


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scales_by_fractions(fmt, mode):
    amax = turning_points(fmt, np.random.default_rng(1), 60)
    want = [min(max(exponent(each, fmt, mode) + 127, 0), 254) for each in amax]
    for scale in (exact.e8m0_scale, reference("e8m0_scale")):
        assert scale(torch.from_numpy(amax), fmt, mode).tolist() == want


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_codes_by_fractions(fmt, mode):
    """Each value is the nearest one of the format times the scale, ties to the even code."""
    codes = torch.arange(2 ** (fmt.width - 1), dtype=torch.uint8)
    values = [Fraction(v) for v in exact.values_of(codes, fmt) if math.isfinite(v)]
    x = near_ties(np.random.default_rng(2), fmt, 2, 32)
    found, scale = exact.quantize_mx(x, fmt, mode)
    for row, made, byte in zip(x.tolist(), found.tolist(), scale[:, 0].tolist(), strict=True):
        for number, code in zip(row, made, strict=True):
            size = abs(Fraction(number)) / Fraction(2) ** (byte - 127)
            off = [abs(value - size) for value in values]
            best = [place for place, each in enumerate(off) if each == min(off)]
            place = next((place for place in best if place % 2 == 0), best[0])
            assert code == place + (number < 0) * 2 ** (fmt.width - 1)


@pytest.mark.parametrize(
    ("amax", "bytes_"),
    [
        (0.0, [0, 0, 0, 0]),
        (448.0, [127, 127, 128, 127]),
        (449.0, [127, 128, 128, 127]),
        (480.0, [127, 128, 128, 128]),
        (957.0, [128, 129, 129, 128]),
        (2.0**-127, [0, 0, 0, 0]),
        (448 * 2.0**-127, [0, 0, 1, 0]),
        (449 * 2.0**-127, [0, 1, 1, 0]),
        (math.inf, [247, 254, 247, 247]),
        (math.nan, [255, 255, 255, 255]),
    ],
)
def test_magnitudes_that_are_known(amax, bytes_):
    for mode, byte in zip(SCALE_MODES, bytes_, strict=True):
        if (amax, mode) == (480.0, "even"):
            byte = 127  # 1.875: 3 mantissa bits hold it
        for scale in (exact.e8m0_scale, reference("e8m0_scale")):
            assert scale(torch.tensor([amax]), E4M3, mode).item() == byte, mode


@pytest.mark.parametrize(
    ("largest", "back"),
    [
        (448.0, [448, 448, 448, 448]),
        (449.0, [448, 448, 448, 448]),
        (464.0, [448, 448, 448, 448]),
        (480.0, [448, 480, 480, 448]),
        (511.0, [448, 512, 512, 512]),
        (957.0, [896, 960, 960, 896]),
    ],
)
def test_what_each_mode_makes_of_a_blocks_largest_number(largest, back):
    x = torch.zeros(1, 32)
    x[0, 3] = largest
    for mode, want in zip(SCALE_MODES, back, strict=True):
        for quantize in (exact.quantize_mx, reference("quantize_mx")):
            assert exact.dequantize_mx(*quantize(x, E4M3, mode), E4M3)[0, 3].item() == want


def test_an_infinity_comes_back_as_one():
    for fmt in FORMATS:
        for mode in SCALE_MODES:
            x = torch.ones(1, 32)
            x[0, 0] = -math.inf
            back = reference("dequantize_mx")(*reference("quantize_mx")(x, fmt, mode), fmt)
            assert back[0, 0].item() == -math.inf
            assert back[0, 1:].isfinite().all()


def test_nvfp4_by_fractions():
    """Scales and codes, each step a fraction that is rounded once to where the contract says."""
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(3))
    codes, scale, whole = exact.quantize_nvfp4(x)
    amax = max(abs(Fraction(v)) for v in x.flatten().tolist())
    assert whole.item() == np.float32(float(amax / 2688))
    values = [Fraction(v) for v in exact.values_of(torch.arange(8, dtype=torch.uint8), E2M1)]
    scales = [Fraction(v) for v in exact.values_of(torch.arange(127, dtype=torch.uint8), E4M3)]
    one = np.float32(1)
    for place, block in enumerate(x.reshape(-1, 16)):
        largest = np.float32(block.abs().max().item()) / np.float32(6) / np.float32(whole.item())
        nearest = min(scales, key=lambda each: abs(each - Fraction(float(largest))))
        got = scale.float().reshape(-1)[place].item()
        assert abs(Fraction(got) - Fraction(float(largest))) == abs(nearest - Fraction(float(largest)))
        factor = one / np.float32(whole.item()) / np.float32(got)
        for number, code in zip(block.tolist(), codes.reshape(-1, 16)[place].tolist(), strict=True):
            product = abs(Fraction(float(np.float32(number) * factor)))
            assert abs(values[code % 8] - product) == min(abs(each - product) for each in values)
            assert (code >= 8) == (number < 0)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_of_deepseek_by_fractions(power_of_two):
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(4)) * 20
    for quantize in (exact.quantize_blockwise_128, reference("quantize_blockwise_128")):
        codes, scale = quantize(x, (2, 32), power_of_two)
        assert scale.shape == (2, 3)
        for i in range(2):
            for j in range(3):
                part = x[2 * i : 2 * i + 2, 32 * j : 32 * j + 32]
                want = Fraction(float(np.float32(part.abs().max().item()) / np.float32(448)))
                if power_of_two:
                    want = Fraction(2) ** ceil_log2(want)
                assert Fraction(scale[i, j].item()) == want
                off = codes[2 * i : 2 * i + 2, 32 * j : 32 * j + 32].float() * scale[i, j] - part
                assert (off.abs() <= part.abs() / 16 + scale[i, j] * 2.0**-10).all()


def test_rotations_keep_lengths_and_come_back():
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(5))
    signs = torch.tensor([1.0, -1.0]).repeat(8)
    for rotate in (exact.hadamard_rotate, reference("hadamard_rotate")):
        turned = rotate(x, signs)
        lengths = [each.unflatten(-1, (-1, 16)).norm(dim=-1) for each in (x, turned)]
        assert torch.allclose(*lengths, atol=1e-5)
        assert torch.allclose(rotate(turned, signs, True), x, atol=1e-5)
        assert not torch.allclose(turned, x, atol=0.1)


def test_adam_in_8_bits_is_adam_where_8_bits_hold_the_moments():
    """All gradients of a block alike: every code is 448, and nothing is lost."""
    torch.manual_seed(6)
    weight = torch.randn(300)
    sizes = torch.full((300,), 0.25)
    twin = weight.clone().requires_grad_()
    optimizer = torch.optim.AdamW([twin], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for step_of in (exact.adam_8bit_step, reference("adam_8bit_step")):
        own, moments = weight.clone(), (torch.zeros(300).to(exact.FP8), torch.ones(2)) * 2
        with torch.no_grad():
            twin.copy_(weight)
        optimizer.state.clear()
        for step in range(1, 6):
            own, *moments = step_of(own, sizes, *moments, step, 0.01, (0.9, 0.99), 1e-8, 0.1)
            twin.grad = sizes.clone()
            optimizer.step()
        assert torch.allclose(own, twin.detach(), rtol=1e-5)


def test_a_layer_of_numbers_that_mx_holds_is_a_layer():
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randint(-6, 7, (32, 32), generator=generator).float().requires_grad_() for _ in range(2))
    for linear in (exact.mx_linear, reference("mx_linear")):
        output = linear(x, weight, E4M3, "floor")
        assert torch.equal(output, x @ weight.T)
        found = torch.autograd.grad(output, (x, weight), torch.ones_like(output))
        wanted = torch.autograd.grad(x @ weight.T, (x, weight), torch.ones_like(output))
        assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
