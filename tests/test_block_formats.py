"""Chapter 13's references next to torchao, and what is given: round trips, an optimizer, a layer, a compiled one."""

import copy
import math

import pytest
import torch
from torch import nn

from lowprec_lab import block_formats, fused
from lowprec_lab.block_formats import MX_FORMATS, SCALE_MODES, Adam8bit, MXLinear, convert_to_mx
from lowprec_lab.formats import E2M1, E4M3
from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.libraries import AbsentError, torchao_mx, torchao_mx_round_trip, torchao_nvfp4
from lowprec_lab.sources import reference

FORMATS = list(MX_FORMATS.values())


def tensors(count, kinds=("ordinary", "whole", "sizes", "bfloat16")):
    """`count` tensors (8, 128), in turn of each kind: ordinary, whole numbers, blocks of many sizes, bfloat16."""
    generator = torch.Generator().manual_seed(13)
    for which in range(count):
        x = torch.randn(8, 128, generator=generator)
        kind = kinds[which % len(kinds)]
        if kind == "whole":
            x = (x * 4).round()
        elif kind == "sizes":
            powers = torch.randint(-100, 100, (8, 8), generator=generator).double()
            x = (x.double() * torch.exp2(powers).repeat_interleave(16, 1)).float()
        elif kind == "bfloat16":
            x = x.bfloat16()
        yield x


def same_mx(x, fmt, mode):
    """(whether all scales are torchao's, whether each code is) of our own and torchao's quantizer."""
    codes, scale = reference("quantize_mx")(x, fmt, mode)
    codes = reference("pack_nibbles")(codes) if fmt is E2M1 else codes
    their_codes, their_scale = torchao_mx(x, fmt, mode)
    return torch.equal(scale, their_scale), codes == their_codes


@pytest.fixture
def torchao():
    try:
        torchao_mx(torch.zeros(1, 32), E4M3)
    except AbsentError as absent:
        pytest.skip(str(absent))


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_mx_is_torchaos_to_the_last_bit(torchao, fmt, mode):
    for x in tensors(60):
        scales, codes = same_mx(x, fmt, mode)
        assert scales
        assert codes.all()
        back = reference("dequantize_mx")(*reference("quantize_mx")(x, fmt, mode), fmt)
        assert torch.equal(back, torchao_mx_round_trip(x.float(), fmt, mode))


@pytest.mark.slow
@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_mx_is_torchaos_on_a_thousand_tensors(torchao, fmt, mode):
    whole = torch.cat([x.float() for x in tensors(1000)])
    scales, codes = same_mx(whole, fmt, mode)
    assert scales
    assert codes.all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_special_blocks_are_torchaos_where_it_follows_the_rule(torchao, fmt):
    """Zeros, infinities, NaN: the scales are the same; so are codes, but those of a block that is NaN."""
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    x[0], x[1, 3], x[2, 4], x[3, 5] = 0.0, math.inf, -math.inf, math.nan
    for mode in SCALE_MODES:
        scales, codes = same_mx(x, fmt, mode)
        assert scales
        assert codes[:3].all()


def test_where_torchao_does_not_follow_the_rule(torchao):
    tiny = torch.full((1, 32), 2.0**-120)
    for mode in SCALE_MODES:  # byte 0: divided by 2^-126, or by 1
        scales, codes = same_mx(tiny, E4M3, mode)
        assert scales
        assert not codes.any()
        assert torch.equal(block_formats.mx_round_trip(tiny, E4M3, mode), tiny)
        assert not torch.equal(torchao_mx_round_trip(tiny, E4M3, mode), tiny)
    edge = torch.full((1, 32), 32 * 448 * (1 + 2.0**-23))  # log2 in float32
    ours, theirs = reference("quantize_mx")(edge, E4M3, "rceil")[1], torchao_mx(edge, E4M3, "rceil")[1]
    assert (ours.item(), theirs.item()) == (133, 132)


def test_nvfp4_is_torchaos_to_the_last_bit(torchao):
    for x in tensors(200, ("ordinary", "whole", "bfloat16")):
        codes, scale, whole = reference("quantize_nvfp4")(x)
        their_codes, their_scale, their_whole = torchao_nvfp4(x)
        assert torch.equal(whole, their_whole)
        assert torch.equal(scale.float(), their_scale.float())
        assert torch.equal(reference("pack_nibbles")(codes), their_codes)


def test_nvfp4_with_small_blocks_differs_from_torchaos_only_there(torchao):
    generator = torch.Generator().manual_seed(2)
    sizes = torch.exp2(torch.randint(-18, 1, (64, 16), generator=generator).float()).repeat_interleave(16, 1)
    x = torch.randn(64, 256, generator=generator) * sizes
    codes, scale, whole = reference("quantize_nvfp4")(x)
    their_codes, their_scale, _ = torchao_nvfp4(x)
    other = scale.float() != their_scale.float()
    assert other.any()
    assert (scale.float()[other] < 2.0**-6).all()
    assert (their_scale.float()[other] == 2.0**-6).all()
    same = (reference("pack_nibbles")(codes) == their_codes).unflatten(-1, (-1, 8)).all(-1)
    assert same[~other].all()


def test_nvfp4_of_zeros_and_of_nan():
    codes, scale, whole = reference("quantize_nvfp4")(torch.zeros(2, 32))
    assert not codes.any()
    assert not scale.float().any()
    assert whole.item() == 1.0
    assert not block_formats.dequantize_nvfp4(codes, scale, whole).any()
    broken = torch.ones(2, 32)
    broken[1, 20] = math.nan
    assert block_formats.nvfp4_round_trip(broken).isnan().all()
    assert block_formats.dequantize_nvfp4(*reference("quantize_nvfp4")(broken, torch.tensor(0.01))).isnan().sum() == 16


def test_bits_that_pack_are_torchaos(torchao):
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    codes = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    assert torch.equal(reference("pack_nibbles")(codes), kernels.pack_uint4(codes))
    assert torch.equal(reference("unpack_nibbles")(kernels.pack_uint4(codes)), codes)


# --- what is given ----------------------------------------------------------------------------------------------------


def test_scale_values_are_powers_of_two():
    values = block_formats.scale_value(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert values[:-1].tolist() == [2.0**k for k in range(-127, 128)]
    assert values[-1].isnan()


@pytest.mark.parametrize(
    "fmt", [pytest.param(fmt, marks=[pytest.mark.slow][fmt is E4M3 :]) for fmt in FORMATS], ids=str
)
def test_the_compiled_round_trip_is_the_eager_one(fmt):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(64, 96, generator=generator)
    many = (x.double() * torch.exp2(torch.randint(-149, 128, (64, 1), generator=generator).double())).float()
    odd = x.clone()
    odd[0], odd[1, 3], odd[2, 4], odd[3, :32] = 0.0, math.inf, math.nan, 1e-40
    for mode in SCALE_MODES:
        run = fused.compiled_mx_round_trip(fmt, mode)
        for each in (x, many, odd):
            out = torch.empty_like(each)
            assert run(each, out) is out
            want = block_formats.mx_round_trip(each, fmt, mode)
            torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(out.signbit() & ~out.isnan(), want.signbit() & ~want.isnan())


def test_the_compiled_round_trip_says_what_it_takes():
    run = fused.compiled_mx_round_trip(E4M3)
    with pytest.raises(ValueError, match=r"32 .* 33"):
        run(torch.ones(2, 33))
    with pytest.raises(TypeError, match="float32"):
        run(torch.ones(2, 32).bfloat16())
    with pytest.raises(ValueError, match="24"):
        fused.compiled_mx_round_trip(E4M3, "floor", 24)


def test_an_optimizer_with_moments_in_8_bits_learns():
    torch.manual_seed(5)
    target, weight = torch.randn(40, 30), torch.zeros(40, 30, requires_grad=True)
    optimizer = Adam8bit([{"params": [weight]}], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        (weight - target).square().sum().backward()
        optimizer.step()
    assert (weight - target).abs().max() < 0.05
    assert optimizer.moment_bytes() == 2 * (1200 + 4 * 5)


def test_an_optimizer_goes_on_from_where_it_was():
    torch.manual_seed(7)
    weights = [torch.zeros(300, requires_grad=True) for _ in range(2)]
    gradients = torch.randn(6, 300)
    one, other = (Adam8bit([weight], lr=0.1) for weight in weights)
    for step, gradient in enumerate(gradients):
        if step == 3:
            with torch.no_grad():
                weights[1].copy_(weights[0])
            other.load_state_dict(copy.deepcopy(one.state_dict()))
            assert other.moment_bytes() == one.moment_bytes()
        for weight, optimizer in zip(weights, (one, other), strict=True):
            if optimizer is one or step >= 3:
                weight.grad = gradient.clone()
                optimizer.step()
    assert torch.equal(*weights)


def test_a_gpt_in_mx_trains_and_keeps_its_parameters():
    torch.manual_seed(6)
    model = GPT(GPTConfig(vocab_size=32, context=32, layers=1, heads=2, width=32))
    names = [name for name, _ in model.named_parameters()]
    made = convert_to_mx(copy.deepcopy(model), E4M3)
    assert [name for name, _ in made.named_parameters()] == names
    assert sum(isinstance(layer, MXLinear) for layer in made.modules()) == 4
    assert not isinstance(made.head, MXLinear)
    x = torch.randint(0, 32, (2, 32))
    losses = []
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    for _ in range(15):
        loss = made(x, x)[1]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_a_layer_keeps_the_bias_in_high_precision():
    linear = nn.Linear(32, 64)
    made = MXLinear.from_linear(linear)
    x = torch.randn(32, 32)
    assert made.weight is linear.weight
    assert made.bias is linear.bias
    assert torch.equal(made(x), block_formats.mx_linear(x, linear.weight) + linear.bias)
