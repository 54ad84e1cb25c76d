"""The hardware path: a CPU's torch._scaled_mm stands in for the tensor cores, and the emulation says what is right."""

import math
from itertools import product
from math import inf, nan

import pytest
import torch
from torch import nn

from lowprec_lab import hardware, quantizer
from lowprec_lab.bits import max_finite
from lowprec_lab.blanks import current
from lowprec_lab.float8_linear import RECIPES, Cast, Recipe, float8_layers, float8_matmul, transpose
from lowprec_lab.formats import E4M3, E5M2
from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.hardware import EMULATED, HARDWARE, HardwareLinear, hardware_matmul, to_hardware, where_products_run
from lowprec_lab.quantizer import Quantized

H100 = (9, 0)
ROW, COLUMN = Cast(E4M3, "row", True), Cast(E4M3, "column", True)
BLOCKS = Cast(E4M3, (1, 128))
SHAPES = [(16, 32, 48), (30, 40, 65), (1, 16, 16), (33, 257, 5), (128, 512, 32)]
UNIT = 2.0**-24
STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a step, relative


def operands(shape, left, right, seed=0, dtype=torch.float32):
    m, k, n = shape
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(size, generator=generator).to(dtype) for size in ((m, k), (k, n)))
    return quantizer.quantize(a, *left), quantizer.quantize(b, *right)


def values(q):
    return q.codes.view(hardware.float8_dtype(q.fmt)).double() / q.scale.double()


def bound(a, b, *written):
    """How far two products of the same codes may be apart, one of them by inverse scales, each as `written` rounds.

    A term code_a / s_a * code_b / s_b has a relative error of 2 units by division and of 4 by inverses, which are
    rounded before; a float32 sum of K terms adds K units of the terms' magnitudes; each dtype on the way half a step.
    """
    terms, exact = values(a).abs() @ values(b).abs(), (values(a) @ values(b)).abs()
    sums = (2 * a.codes.shape[1] + 8) * UNIT * terms
    return 1.01 * (sums + sum(STEP[dtype] for dtype in written) * (exact + sums)) + 2.0**-24


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Cast(E4M3), Cast(E4M3)),
        (Cast(E5M2), Cast(E4M3)),
        (Cast(E4M3), Cast(E5M2)),
        (Cast(E4M3, "row"), Cast(E4M3, "column")),
        (ROW, Cast(E4M3)),
        (Cast(E5M2), COLUMN),
    ],
)
def test_a_product_is_the_emulated_one_up_to_its_roundings(shape, out, left, right):
    a, b = operands(shape, left, right, dtype=out)
    got, wanted = hardware_matmul(a, b, out, fast_accumulation=True), float8_matmul(a, b)
    assert (got.dtype, got.shape) == (out, wanted.shape)
    by_row = "tensor" not in (left.granularity, right.granularity) or left.granularity != right.granularity
    written = (out, out, torch.bfloat16) if by_row else (out, out)
    assert ((got.double() - wanted.double()).abs() <= bound(a, b, *written)).all()


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_a_product_of_small_whole_numbers_is_exact(granularity):
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((24, 40), (33, 40)))
    x[:, 0], weight[:, 0] = 3.5, 3.5  # every row has the same largest number, and a scale of 128
    a, b = quantizer.quantize(x, E4M3, granularity), transpose(quantizer.quantize(weight, E4M3, granularity))
    exact = x @ weight.t()
    assert torch.equal(hardware_matmul(a, b, torch.bfloat16), exact.bfloat16())
    assert torch.equal(float8_matmul(a, b), exact)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 16, 16), (16, 0, 16), (16, 16, 0)])
def test_a_product_of_nothing_is_zeros(m, k, n):
    a, b = operands((m, k, n), Cast(E4M3), Cast(E4M3))
    assert torch.equal(hardware_matmul(a, b), torch.zeros(m, n, dtype=torch.bfloat16))


@pytest.mark.parametrize("value", [inf, nan])
def test_an_overflow_comes_out_as_nan(value):
    x = torch.randn(16, 32)
    x[3, 5] = value
    for cast, rows in ((Cast(E4M3), 16), (ROW, 1)):
        b = quantizer.quantize(torch.randn(32, 48), E4M3, "column" if rows == 1 else "tensor")
        product = hardware_matmul(quantizer.quantize(x, *cast), b)
        assert int(product.isnan().all(dim=1).sum()) == rows
        assert int(product.isnan().any(dim=1).sum()) == rows


@pytest.mark.parametrize(
    ("left", "right", "says"),
    [
        (Cast(E5M2), Cast(E5M2), "both are E5M2"),
        (Cast(E4M3, "column"), Cast(E4M3), "cannot be taken out of the sum"),
        (Cast(E4M3), Cast(E4M3, "row"), "cannot be taken out of the sum"),
        (BLOCKS, Cast(E4M3), "cannot be taken out of the sum"),
    ],
)
def test_what_torch_cannot_multiply_is_refused_with_the_reason(left, right, says):
    with pytest.raises(ValueError, match=says):
        hardware_matmul(*operands((16, 32, 48), left, right))


def test_the_public_product_gives_the_same_bits():
    if not hasattr(nn.functional, "scaled_mm"):
        pytest.skip("this torch has none")
    for left, right in ((Cast(E4M3), Cast(E4M3)), (ROW, COLUMN)):
        a, b = operands((30, 40, 65), left, right)
        wanted = hardware_matmul(a, b)
        with hardware.by_public_product():
            assert torch.equal(hardware_matmul(a, b), wanted)


def test_operands_reach_torch_as_its_rules_ask(monkeypatch):
    """Row-major by column-major, K and N multiples of 16, scales inverse and shaped: what a CPU would not refuse."""
    seen = []

    def watch(a, b, inverse_a, inverse_b, **more):
        problems = current("explain_scaled_mm")(a, b, inverse_a, inverse_b, (8, 9), None, more["out_dtype"])
        seen.append((problems, more["use_fast_accum"]))
        return torch.zeros(a.shape[0], b.shape[1], dtype=more["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", watch)
    for recipe, (m, k, n) in product(RECIPES.values(), [(32, 48, 64), (30, 40, 65)]):
        model = hardware_model(nn.Linear(k, n), recipe, m)
        model(torch.randn(m, k, requires_grad=True)).sum().backward()
    assert [problems for problems, _ in seen] == [[]] * len(seen)
    assert [fast for _, fast in seen] == [*[True, False, False] * 4, *[True, False] * 2]


# --- casts on every version of torch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_nothing_that_is_cast_is_half_a_step_beyond_the_format(fmt, power_of_two):
    """There torch before 2.13 gives NaN or infinity where newer ones saturate. With amax the largest of a group, its
    product with the scale is at most the largest value times 1 + 2^-24 twice: the scale's rounding, and the product's.
    """
    significands = torch.arange(0, 2**23, 97, dtype=torch.int32) + (127 << 23)
    ones = significands.view(torch.float32)
    tiny = torch.tensor([0.0, 1e-45, 1e-38, 9.99e-13, 1e-12, 1.0000001e-12, 3.4e38, torch.finfo(torch.float32).max])
    amax = torch.cat([ones, ones * 2.0**-39, ones * 2.0**-40, ones * 2.0**126, tiny])
    scaled = amax * quantizer.scale_for(amax, fmt, power_of_two=power_of_two)
    largest = max_finite(fmt)
    half_a_step = 2.0 ** (math.floor(math.log2(largest)) - fmt.mantissa_bits - 1)
    assert float(scaled.max()) <= largest * (1 + 2.0**-22) < largest + half_a_step


# --- layers -----------------------------------------------------------------------------------------------------------


def hardware_model(linear, recipe, rows):
    model = nn.Sequential(current("Float8Linear").from_linear(linear, recipe))
    (place,) = to_hardware(model, "cpu", rows, H100)
    assert place.where == HARDWARE
    return model


def both_ways(layer, x, gradient):
    x = x.clone().requires_grad_()
    output = layer(x)
    return output.detach(), *torch.autograd.grad(output, [x, *layer.parameters()], gradient.to(output.dtype))


def close(got, wanted, by_row):
    """Within what inverse scales, and bfloat16 on the way, may change: relative to the largest of a product."""
    unit = 2.0**-7 if by_row or wanted.dtype == torch.bfloat16 else 2.0**-18
    return float((got.double() - wanted.double()).abs().max()) <= unit * float(wanted.double().abs().max())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(32, 48, 64), (30, 40, 65)])
def test_a_layer_gives_what_the_emulated_one_gives(recipe, shape):
    m, k, n = shape
    torch.manual_seed(1)
    linear, x, gradient = nn.Linear(k, n), torch.randn(2, m // 2, k), torch.randn(2, m // 2, n)
    emulated, fast = current("Float8Linear").from_linear(linear, recipe), hardware_model(linear, recipe, m)
    for got, wanted in zip(both_ways(fast, x, gradient), both_ways(emulated, x, gradient), strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert close(got, wanted, by_row=recipe != "tensorwise")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_traces_as_one_graph_and_gives_the_same_bits(recipe):
    torch._dynamo.reset()
    linear, x, gradient = nn.Linear(48, 65), torch.randn(32, 48), torch.randn(32, 65)
    fast = hardware_model(linear, recipe, 32)
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    pairs = zip(both_ways(compiled, x, gradient), both_ways(fast, x, gradient), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_output_its_dtype_and_casts_no_operand(dtype):
    linear, x = nn.Linear(48, 64), torch.randn(32, 48, dtype=dtype)
    fast = hardware_model(linear, "tensorwise", 32)
    with torch.autocast("cpu", torch.bfloat16):
        output = fast(x)
    x8, weight8 = quantizer.quantize(x, E4M3), quantizer.quantize(linear.weight, E4M3)
    wanted = hardware_matmul(x8, transpose(weight8), torch.bfloat16, True) + linear.bias.bfloat16()
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, wanted)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_that_nobody_wants_are_not_computed(recipe, monkeypatch):
    linear = nn.Linear(32, 48)
    linear.weight.requires_grad_(False)
    fast = hardware_model(linear, recipe, 16)
    count = []
    whole = hardware.hardware_matmul
    monkeypatch.setattr(hardware, "hardware_matmul", lambda *all_, **more: count.append(1) or whole(*all_, **more))
    x = torch.randn(16, 32, requires_grad=True)
    fast(x).sum().backward()
    assert len(count) == 2
    assert x.grad is not None
    assert linear.weight.grad is None
    fast(x.detach()).sum().backward()
    assert len(count) == 3


def test_the_layers_casts_are_whoever_is_in_use(monkeypatch):
    """A learner's quantize that gives zeros: so does the layer."""
    fast = hardware_model(nn.Linear(32, 48, bias=False), "tensorwise", 16)
    whole = quantizer.quantize

    def mine(x, fmt, granularity="tensor", power_of_two=False):
        return whole(x * 0, fmt, granularity, power_of_two)

    assert fast(torch.randn(16, 32)).any()
    monkeypatch.setattr(quantizer, "quantize", mine)
    assert not fast(torch.randn(16, 32)).any()


class Scaling:
    """A delayed scale that stays as it is; seen: the shapes that it recorded."""

    def __init__(self, fmt, scale):
        self.fmt, self.scale, self.seen = fmt, torch.tensor(scale), []

    def quantize(self, x, record=True):
        if record:
            self.seen.append(tuple(x.shape))
        limit = max_finite(self.fmt)
        codes = (x.detach().float() * self.scale).clamp(-limit, limit).to(self.fmt.torch_dtype).view(torch.uint8)
        return Quantized(codes, self.scale.clone(), self.fmt, "tensor", x.dtype)


@pytest.mark.parametrize("shape", [(32, 48, 64), (30, 40, 65)])
def test_a_layer_with_delayed_scales_multiplies_its_own_codes(shape):
    m, k, n = shape
    model = nn.Sequential(nn.Linear(k, n))
    model[0].scalings = Scaling(E4M3, 40.0), Scaling(E4M3, 900.0), Scaling(E5M2, 3000.0)
    assert [place.where for place in to_hardware(model, "cpu", m, H100)] == [HARDWARE]
    x, gradient = torch.randn(2, m // 2, k), torch.randn(2, m // 2, n)
    output, grad_x, grad_weight, grad_bias = both_ways(model, x, gradient)
    x8, weight8, gradient8 = (
        scaling.quantize(each.flatten(0, -2), record=False)
        for scaling, each in zip(model[0].scalings, (x, model[0].weight, gradient), strict=True)
    )
    assert torch.equal(output.flatten(0, 1), hardware_matmul(x8, transpose(weight8), x.dtype, True) + model[0].bias)
    assert torch.equal(grad_x.flatten(0, 1), hardware_matmul(gradient8, weight8, x.dtype))
    assert torch.equal(grad_weight, hardware_matmul(transpose(gradient8), x8, x.dtype))
    assert torch.equal(grad_bias, gradient.sum((0, 1)))
    assert [scaling.seen for scaling in model[0].scalings] == [[(m, k)], [(n, k)], [(m, n)]]
    model.eval()(x)
    assert [len(scaling.seen) for scaling in model[0].scalings] == [1, 1, 1]
    model[0].weight.requires_grad_(False)
    (only_x,) = torch.autograd.grad(model(x.requires_grad_()), x, gradient)
    assert torch.equal(only_x, grad_x)


# --- where it can be had ----------------------------------------------------------------------------------------------

MADE = {
    "blocks": Recipe("blocks", BLOCKS, BLOCKS, None, None, None, None),
    "bf16": Recipe("bf16", None, None, None, None, None, None),
    "e5m2 twice": Recipe("e5m2 twice", Cast(E5M2), Cast(E5M2), None, None, None, None),
    "e5m2 rows": Recipe("e5m2 rows", ROW, ROW, ROW, Cast(E5M2, "column"), None, None),
    "wrong lines": Recipe("wrong lines", ROW, Cast(E4M3, "column"), None, None, None, None),
}


@pytest.mark.parametrize(
    ("recipe", "shape", "capability", "where", "says"),
    [
        ("tensorwise", (32, 48, 64), H100, HARDWARE, "tensor cores of capability 9.0, tensorwise"),
        ("tensorwise", (32, 48, 64), (8, 9), HARDWARE, "8.9"),
        ("rowwise", (32, 48, 64), H100, HARDWARE, "rowwise"),
        ("rowwise_with_gw_hp", (30, 48, 64), H100, HARDWARE, "rowwise"),
        ("tensorwise", (30, 48, 64), H100, HARDWARE, "zeros are added for grad_weight, whose"),
        ("tensorwise", (32, 48, 65), H100, HARDWARE, "zeros are added for output, grad_x, whose"),
        ("tensorwise", (32, 48, 64), (8, 6), EMULATED, "matmul_for says so for tensorwise scales and capability 8.6"),
        ("rowwise", (32, 48, 64), None, EMULATED, "no NVIDIA GPU"),
        ("blocks", (32, 128, 64), H100, EMULATED, "output: scales by (1, 128)"),
        ("bf16", (32, 48, 64), H100, EMULATED, "casts nothing"),
        ("e5m2 twice", (32, 48, 64), H100, EMULATED, "both are E5M2"),
        ("e5m2 rows", (32, 48, 64), H100, EMULATED, "grad_x: rowwise, the second operand has to be E4M3"),
        ("wrong lines", (32, 48, 64), H100, EMULATED, "output: scales by column"),
    ],
)
def test_where_a_layer_runs_and_why(recipe, shape, capability, where, says):
    found, reason = where_products_run(RECIPES.get(recipe) or MADE[recipe], shape, capability)
    assert found == where
    assert says in reason


def test_where_it_runs_is_what_matmul_for_says(monkeypatch):
    asked = []
    monkeypatch.setattr("lowprec_lab.scaled_mm.matmul_for", lambda *all_: asked.append(all_) or "emulated")
    assert where_products_run(RECIPES["tensorwise"], (30, 40, 65), H100)[0] == EMULATED
    assert asked == [(H100, "tensorwise", (30, 48, 80))]


def test_a_model_changes_its_layers_and_nothing_else():
    torch.manual_seed(2)
    model = float8_layers(GPT(GPTConfig(65, 16, 2, 2, 32)), "tensorwise", skip=("head",))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    parameters = list(model.parameters())
    model.blocks[1].mlp.up.recipe = MADE["blocks"]
    places = to_hardware(model, "cpu", 32, H100)
    assert len(places) == 8
    assert [place.layer for place in places if place.where == EMULATED] == ["blocks.1.mlp.up"]
    made = [name for name, each in model.named_modules() if type(each) is HardwareLinear]
    assert made == [place.layer for place in places if place.where == HARDWARE]
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_without_a_gpu_nothing_changes():
    model = float8_layers(GPT(GPTConfig(65, 16, 1, 2, 32)), "rowwise")
    places = to_hardware(model, "cpu", 32)
    assert {place.where for place in places} == {EMULATED}
    assert not any(type(each) is HardwareLinear for each in model.modules())


def test_amds_gpus_and_others_have_no_compute_capability(monkeypatch):
    assert hardware.capability_of("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert hardware.capability_of("cuda") is None
    monkeypatch.setattr(torch.version, "hip", None)
    assert hardware.capability_of("cuda:0") == (9, 4)
