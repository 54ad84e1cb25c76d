"""The linear layer in 8 bits: the reference is torchao's to the last bit, and the oracle is what it says."""

import contextlib
import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from lowprec_lab import libraries
from lowprec_lab.blanks import BLANKS
from lowprec_lab.float8_linear import (
    PRODUCTS,
    RECIPES,
    Cast,
    Float8Linear,
    Recipe,
    find_recipe,
    float8_layers,
    layer_operands,
    product_errors,
    transpose,
)
from lowprec_lab.formats import E4M3, E5M2
from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.graders import float8_linear as grader
from lowprec_lab.graders import float8_linear_oracle as exact
from lowprec_lab.graders import quantizer_oracle
from lowprec_lab.sources import reference

NAMES = ("float8_linear_forward", "float8_linear_backward", "Float8Linear")


def torchaos(linear, recipe):
    pytest.importorskip("torchao")
    return libraries.torchao_linear(linear, recipe)


def one_step(layer, x, gradient, autocast=False):
    """Output and all gradients of a layer in one step; the parameters' gradients are taken away again."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        output = layer(x)
    output.backward(gradient.to(output.dtype))
    found = [output.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    for parameter in layer.parameters():
        parameter.grad = None
    return found


def some_layer(seed, dtype=torch.float32):
    """A linear layer of a random shape, an input and a gradient whose rows vary in size."""
    generator = torch.Generator().manual_seed(seed)
    m, b, k, n, kind = (int(torch.randint(1, high, (1,), generator=generator)) for high in (90, 5, 130, 130, 4))
    lead = ((m,), (b, m), (2, b, 3), (m, 1))[kind]
    rows = torch.exp2(torch.randint(-4, 5, (*lead, 1), generator=generator).float())
    x, gradient = (torch.randn(*lead, size, generator=generator) * rows for size in (k, n))
    linear = torch.nn.Linear(k, n, bias=seed % 2 == 1)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(n, k, generator=generator) / k**0.5)
    return linear.to(dtype), x.to(dtype), (gradient * 1e-3).to(dtype)


def same(found, wanted):
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reference_is_torchaos_layer(recipe):
    for seed, dtype in itertools.product(range(3), (torch.float32, torch.bfloat16)):
        linear, x, gradient = some_layer(seed, dtype)
        ours = reference("Float8Linear").from_linear(linear, recipe)
        assert same(one_step(ours, x, gradient), one_step(torchaos(linear, recipe), x, gradient))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reference_is_torchaos_layer_on_a_hundred_shapes(recipe, dtype):
    for seed in range(100):
        linear, x, gradient = some_layer(1000 + seed, dtype)
        ours = reference("Float8Linear").from_linear(linear, recipe)
        assert same(one_step(ours, x, gradient), one_step(torchaos(linear, recipe), x, gradient)), (seed, x.shape)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_too(recipe, dtype):
    linear, x, gradient = some_layer(5)
    ours = one_step(reference("Float8Linear").from_linear(linear, recipe), x.to(dtype), gradient, autocast=True)
    assert ours[0].dtype == torch.bfloat16
    theirs = torchaos(linear, recipe)
    if recipe == "rowwise_with_gw_hp" and dtype == torch.float32:
        with pytest.raises(RuntimeError, match="to have the same dtype"):  # the page shows that
            one_step(theirs, x, gradient, autocast=True)
    else:
        assert same(ours, one_step(theirs, x.to(dtype), gradient, autocast=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-40, 0.0])
def test_odd_numbers_are_treated_as_torchao_treats_them(recipe, value):
    linear, x, gradient = some_layer(7)
    x.view(-1, x.shape[-1])[0, 0] = value
    gradient.view(-1, gradient.shape[-1])[-1] = value
    ours = reference("Float8Linear").from_linear(linear, recipe)
    pairs = zip(one_step(ours, x, gradient), one_step(torchaos(linear, recipe), x, gradient), strict=True)
    assert all(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_torchaos(name):
    pytest.importorskip("torchao")
    libraries.torchao_linear(torch.nn.Linear(1, 1), name)  # imports it without a word
    from torchao.float8.config import Float8LinearConfig, ScalingGranularity, ScalingType

    config, formats = Float8LinearConfig.from_recipe_name(name), {each.torch_dtype: each for each in (E4M3, E5M2)}
    theirs = (
        "input", "weight", "grad_output",
        "weight_for_grad_input", "grad_output_for_grad_weight", "input_for_grad_weight",
    )  # fmt: skip
    for cast, field in zip((c for pair in RECIPES[name].pairs() for c in pair), theirs, strict=True):
        known = getattr(config, f"cast_config_{field}")
        assert (cast is None) == (known.scaling_type is ScalingType.DISABLED)
        if cast is not None:
            assert cast.fmt == formats[known.target_dtype]
            assert (cast.granularity == "tensor") == (known.scaling_granularity is ScalingGranularity.TENSORWISE)
            assert cast.power_of_two == config.round_scales_to_power_of_2


def test_which_layers_are_worth_it_is_torchaos_filter_and_the_rows():
    pytest.importorskip("torchao")
    libraries.torchao_linear(torch.nn.Linear(1, 1), "rowwise")
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    why = reference("why_not_float8")
    sizes = (16, 40, 1024, 1040, 2048, 2064, 4096, 4112, 8192)
    for recipe, n, k in itertools.product(("tensorwise", "rowwise"), sizes, sizes):
        with torch.device("meta"):
            layer = torch.nn.Linear(k, n)
        assert _auto_filter_for_recipe(recipe, ["head"])(layer, "up") == (why("up", n, k, 16, recipe, ("head",)) == "")
        assert not _auto_filter_for_recipe(recipe, ["head"])(layer, "lm_head")
    assert why("lm_head", 8192, 8192, 16, "rowwise", ("head",)) == "by name"


# the oracle


def test_products_and_bounds_are_those_of_fractions():
    rng = np.random.default_rng(8)
    a, b = (quantizer_oracle.quantize(grader.floats(rng, *size), E4M3) for size in ((3, 7), (7, 2)))
    numbers, bound = exact.product(exact.values(a), exact.values(b))
    left, right = ([[Fraction(v) for v in row] for row in exact.values(q).tolist()] for q in (a, b))
    for i, j in itertools.product(range(3), range(2)):
        terms = [left[i][k] * right[k][j] for k in range(7)]
        assert abs(Fraction(numbers[i, j]) - sum(terms)) <= Fraction(1, 2**50) * sum(map(abs, terms))
        u = Fraction(1, 2**24)
        gamma = 11 * u / (1 - 11 * u)
        assert float(gamma * sum(map(abs, terms))) == pytest.approx(bound[i, j], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_in_any_order_are_within_the_bound_and_others_are_not(dtype):
    rng = np.random.default_rng(9)
    for _ in range(20):
        k = int(rng.integers(1, 60))
        a, b = (quantizer_oracle.quantize(grader.floats(rng, *size), E4M3) for size in ((4, k), (k, 3)))
        numbers, bound = exact.product(exact.values(a), exact.values(b))
        want = exact.rounded(numbers, dtype)
        left, right = (torch.from_numpy(exact.values(q)).float() for q in (a, b))
        for order in (torch.arange(k), torch.arange(k).flip(0), torch.from_numpy(rng.permutation(k))):
            total = torch.zeros(4, 3)
            for place in order:
                total = total + left[:, place, None] * right[place]
            assert torch.equal(exact.settled(total.to(dtype), numbers, bound, want), want)
        off = torch.from_numpy(numbers + 3 * bound + 2.0**-6 * np.abs(numbers)).float().to(dtype)
        assert torch.equal(exact.settled(off, numbers, bound, want), off)


def test_whole_numbers_are_exact_in_any_order():
    """What lets the checks compare bits: a float32 sum of these products has no rounding in it."""
    rng = np.random.default_rng(10)
    for recipe in RECIPES.values():
        for _ in range(10):
            x, weight, grad = (grader.whole(rng, *size) for size in ((8, 7), (6, 7), (8, 6)))
            for which in PRODUCTS:
                left, right = exact.operands(which, recipe, x, weight, grad)
                numbers, _ = exact.product(left, right)
                backwards = torch.zeros(numbers.shape)
                for place in reversed(range(left.shape[1])):
                    backwards += torch.from_numpy(left[:, place, None] * right[place]).float()
                assert torch.equal(backwards.double(), torch.from_numpy(numbers))


# recipes and layers


def test_one_operand_alone_cannot_be_cast():
    cast = Cast(E4M3)
    with pytest.raises(ValueError, match="of the two operands of grad_weight one is cast"):
        Recipe("half", cast, cast, cast, cast, None, cast)


def test_an_unknown_recipe_is_told_which_there_are():
    with pytest.raises(
        ValueError, match="no recipe 'rowise'. The recipes are: tensorwise, rowwise, rowwise_with_gw_hp"
    ):
        find_recipe("rowise")
    assert find_recipe(RECIPES["rowwise"]) is RECIPES["rowwise"]


@pytest.mark.parametrize("granularity", ["tensor", "row", "column", (2, 3)], ids=str)
def test_a_transposed_tensor_is_the_transpose(granularity):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    q = quantizer_oracle.quantize(x, E4M3, granularity)
    turned = transpose(q)
    assert torch.equal(quantizer_oracle.dequantize(turned), quantizer_oracle.dequantize(q).t())
    again = transpose(turned)
    assert (again.granularity, again.codes.shape, again.scale.shape) == (q.granularity, q.codes.shape, q.scale.shape)


def small_gpt():
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 8, layers=1, heads=2, width=16))
    return model, *torch.randint(16, (2, 2, 8))


def test_a_model_keeps_its_parameters_its_names_and_its_ties():
    model, x, y = small_gpt()
    names, parameters = list(model.state_dict()), list(model.parameters())
    model.blocks[0].mlp.up.weight.requires_grad_(False)
    assert float8_layers(model, "rowwise", skip=("attention",)) is model
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert model.head.weight is model.token_embedding.weight
    kinds = {name: hasattr(layer, "recipe") for name, layer in model.named_modules() if "Linear" in str(type(layer))}
    converted = {name for name, is_float8 in kinds.items() if is_float8}
    assert converted == {"blocks.0.mlp.up", "blocks.0.mlp.down", "head"}
    model(x, y)[1].backward()
    assert model.blocks[0].mlp.up.weight.grad is None
    assert bool(model.token_embedding.weight.grad.isfinite().all())


def test_operands_and_errors_of_every_layer():
    model, x, y = small_gpt()
    found = layer_operands(model, x, y)
    assert set(found) == {name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    model(x, y)[1].backward()
    for name, (inputs, weight, grad_output) in found.items():
        if name != "head":  # whose weight is the embedding's as well
            torch.testing.assert_close(grad_output.T @ inputs, model.get_submodule(name).weight.grad)
        errors = product_errors(inputs, weight, grad_output, RECIPES["rowwise_with_gw_hp"])
        assert errors["grad_weight"] < 1e-5 < errors["output"] < 0.1
    assert not any(layer._forward_hooks for layer in model.modules())


def test_a_class_is_made_by_its_other_ways_before_anybody_fills_it_in():
    linear = torch.nn.Linear(3, 2)
    layer = Float8Linear.from_linear(linear, "rowwise")
    assert layer.weight is linear.weight
    assert layer.recipe is RECIPES["rowwise"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_can_be_compiled_as_one_graph(recipe):
    linear, x, gradient = some_layer(3)
    layer = reference("Float8Linear").from_linear(linear, recipe)
    plain = one_step(layer, x, gradient)  # everything is loaded now, and the tables are there
    torch._dynamo.reset()
    assert same(one_step(torch.compile(layer, backend="aot_eager", fullgraph=True), x, gradient), plain)


def test_the_exercises_are_in_their_order():
    numbers = {name: BLANKS[name].exercise for name in NAMES}
    assert list(numbers.values()) == ["8.4", "8.5", "8.6"]


def test_a_wider_copy_is_all_that_a_quantized_tensor_needs():
    q = quantizer_oracle.quantize(torch.ones(2, 2, dtype=torch.bfloat16) / 3, E4M3)
    wide = quantizer_oracle.dequantize(replace(q, dtype=torch.float32))
    assert torch.equal(wide.double(), torch.from_numpy(exact.values(q)))
