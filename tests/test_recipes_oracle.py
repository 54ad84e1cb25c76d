"""Chapter 10: the rule of delayed scaling on a thousand histories, layers, conversion like torchao's, steps, gaps."""

import itertools
import math

import numpy as np
import pytest
import torch
import training

from lowprec_lab import libraries, recipes
from lowprec_lab.data import Text, corpus_of, step_generator
from lowprec_lab.float8_linear import RECIPES
from lowprec_lab.formats import E4M3, E5M2
from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.graders import recipes as grader
from lowprec_lab.graders import recipes_oracle as exact
from lowprec_lab.quantizer import dequantize
from lowprec_lab.sources import reference
from lowprec_lab.trainer import Trainer

LARGEST = torch.finfo(torch.float32).max


def both(name):
    return [pytest.param(getattr(exact, name), id="oracle"), pytest.param(reference(name), id="reference")]


def same(one, other):
    """Bit for bit, and any NaN like any other."""
    return one.shape == other.shape and torch.equal(one.nan_to_num(nan=-1.0, posinf=-2.0), other.nan_to_num(-1.0, -2.0))


def by_the_rule(history, scale, top, margin, algo):
    """The rule as it is written down, one number after the other."""
    old = history.tolist()
    amax = math.nan if any(map(math.isnan, old)) else sorted(old)[-1]
    amax = old[0] if algo == "most_recent" else amax
    new = float(scale)
    if math.isfinite(amax) and amax > 0:
        with np.errstate(over="ignore"):
            new = float(np.float32(top * 2.0**-margin) / np.float32(amax))
        new = LARGEST if math.isinf(new) else new
    moved = [*old[1:], old[0]]
    moved[0] = 0.0
    return torch.tensor(moved), torch.tensor(new)


def some_history(rng):
    length = int(rng.integers(1, 20))
    history = np.exp2(rng.uniform(-149, 128, length) if rng.random() < 0.3 else rng.uniform(-20, 20, length))
    for value, share in ((0.0, 0.3), (np.inf, 0.05), (np.nan, 0.05)):
        if rng.random() < 0.5:
            history[rng.random(length) < share] = value
    with np.errstate(over="ignore"):
        return torch.from_numpy(history.astype(np.float32))


@pytest.mark.parametrize("update", both("delayed_update"))
def test_a_thousand_histories_are_updated_by_the_rule(update):
    rng, kinds = np.random.default_rng(10), set()
    for _ in range(1000):
        history, scale = some_history(rng), torch.tensor(float(np.float32(np.exp2(rng.uniform(-20, 20)))))
        fmt, top = ((E4M3, 448.0), (E5M2, 57344.0))[rng.integers(2)]
        margin, algo = int(rng.integers(-2, 5)), exact.ALGOS[rng.integers(2)]
        got, want = update(history.clone(), scale, fmt, margin, algo), by_the_rule(history, scale, top, margin, algo)
        assert same(got[0], want[0])
        assert same(got[1], want[1])
        kinds |= {str(want[1] == scale), str(float(want[1]) == LARGEST), f"NaN {bool(history.isnan().any())}"}
    assert len(kinds) >= 4


@pytest.mark.parametrize("scaling", both("DelayedScaling"))
def test_a_thousand_steps_of_a_scaling_are_those_of_the_rule(scaling):
    rng = np.random.default_rng(11)
    for fmt, algo, length in itertools.product((E4M3, E5M2), exact.ALGOS, (1, 3, 16)):
        made = scaling(fmt, length, 1, algo)
        history, scale = torch.zeros(length), torch.tensor(1.0)
        for _ in range(84):
            x = torch.from_numpy((rng.standard_normal(5) * np.exp2(rng.uniform(-30, 30))).astype(np.float32))
            x = x * 0 if rng.random() < 0.1 else x
            if rng.random() < 0.1:
                x[rng.integers(5)] = rng.choice([np.inf, -np.inf, np.nan])
            assert same(made.quantize(x).scale, scale)
            history[0] = x.abs().max()
            made.update()
            history, scale = by_the_rule(history, scale, 448.0 if fmt is E4M3 else 57344.0, 1, algo)
            assert same(made.history, history)
            assert same(made.scale, scale)


@pytest.mark.parametrize("scaling", both("DelayedScaling"))
def test_codes_are_those_of_a_saturating_cast_of_torch(scaling):
    x = torch.cat([torch.randn(500) * 100, torch.tensor([math.inf, -math.inf, 1e30, 0.0, -0.0])])
    for fmt in (E4M3, E5M2):
        made = scaling(fmt)
        for _ in range(2):
            q = made.quantize(x)
            top = torch.finfo(fmt.torch_dtype).max
            assert torch.equal(q.codes, (x * q.scale).clamp(-top, top).to(fmt.torch_dtype).view(torch.uint8))
            made.history[0] = 100.0
            made.update()


# the oracle and the reference


def test_a_layer_of_the_reference_is_within_the_bound_of_the_oracle():
    """And so are its gradients; of whole numbers they are equal."""
    rng = np.random.default_rng(12)
    for _ in range(5):
        x, weight, gradient = grader.whole(rng, 4, 6), grader.whole(rng, 5, 6), grader.whole(rng, 4, 5)
        scales = grader.powers(rng, 0, 0, 6)
        found = [recipes.delayed_step(each, x, weight, gradient, scales)
                 for each in (reference("delayed_linear"), exact.delayed_linear)]  # fmt: skip
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other + 0.0)


def test_what_is_kept_for_backward_has_one_byte_for_each_number():
    scalings = tuple(reference("DelayedScaling")(fmt) for fmt in (E4M3, E4M3, E5M2))
    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda kept: sizes.append(kept.numel() * kept.element_size()) or kept, lambda kept: kept
    ):
        reference("delayed_linear")(x, weight, scalings)
    assert sum(sizes) == 64 * 32 + 16 * 32 + 2 * 4


# given layers


def linear(outputs, inputs, bias=True):
    torch.manual_seed(3)
    return torch.nn.Linear(inputs, outputs, bias)


def test_every_recipe_has_a_layer_and_an_unknown_one_is_told_which_there_are():
    kinds = {name: type(recipes.float8_layer(linear(16, 32), name)).__name__ for name in recipes.NAMES}
    assert kinds["delayed"] == "DelayedLinear"
    assert {kinds[name] for name in RECIPES} == {type(recipes.float8_layer(linear(16, 16), "rowwise")).__name__}
    assert type(recipes.float8_layer(linear(65, 32), "rowwise")) is recipes.PaddedLinear
    with pytest.raises(ValueError, match="no recipe 'x'. The recipes are: tensorwise, rowwise, .*, delayed"):
        recipes.float8_layer(linear(16, 16), "x")


@pytest.mark.parametrize("name", recipes.NAMES)
@pytest.mark.parametrize("sizes", [(65, 32), (16, 40), (16, 32)], ids=str)
@pytest.mark.parametrize("rows", [(8,), (2, 9)], ids=str)
def test_a_layer_of_any_size_has_outputs_and_gradients(name, sizes, rows):
    plain = linear(*sizes)
    layer = recipes.float8_layer(plain, name)
    assert layer.weight is plain.weight
    assert layer.bias is plain.bias
    x = torch.randn(*rows, sizes[1], requires_grad=True)
    for _ in range(2):  # a delayed scale knows nothing in the first step
        output = layer(x)
        x.grad = layer.weight.grad = None
        output.backward(torch.ones_like(output))
        for scaling in getattr(layer, "scalings", ()):
            scaling.update()
    expected = torch.nn.functional.linear(x, plain.weight, plain.bias)
    want = torch.autograd.grad(expected, (x, plain.weight), torch.ones_like(expected))
    for got, right in zip((output, x.grad, layer.weight.grad), (expected, *want), strict=True):
        assert got.shape == right.shape
        assert float((got - right).detach().norm() / right.detach().norm()) < 0.1


def test_layers_follow_autocast_and_record_in_training_alone():
    layer = recipes.float8_layer(linear(16, 32), "delayed")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, 32)).dtype == torch.bfloat16
    first = layer.scalings[0].history[0].clone()
    layer.eval()(torch.full((4, 32), 1e4))
    assert torch.equal(layer.scalings[0].history[0], first)
    layer.train()(torch.full((4, 32), 1e4))
    assert float(layer.scalings[0].history[0]) == 1e4


def test_scalings_are_found_by_name_and_layers_that_are_too_small_too():
    model = GPT(GPTConfig(65, 8, layers=1, heads=2, width=16))
    linears = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    assert recipes.too_small(model, "rowwise", 64) == [name for name in linears if name != "head"]
    names = reference("convert_to_float8")(model, "delayed")
    assert names == linears[:-1]
    assert list(recipes.scalings_of(model)) == [
        f"{name} {kind}" for name in names for kind in ("x", "weight", "grad_output")
    ]


# whole models


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_converted_model_trains_as_one_of_torchao_does(recipe):
    """Bit for bit, with the references: losses and weights of six steps."""
    pytest.importorskip("torchao")
    characters = "".join(chr(32 + k % 90) for k in np.random.default_rng(0).integers(0, 90, 4000))
    corpus = corpus_of(Text(characters, "noise", "", ""))

    def trained(convert):
        torch.manual_seed(1)
        model = GPT(GPTConfig(len(corpus.vocabulary), 16, layers=2, heads=2, width=32))
        model = convert(model) or model
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for step in range(6):
            loss = model(*corpus.batch("train", step_generator(1, step), 4, 16))[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [each.detach().clone() for each in model.parameters()]

    def ours(model):
        assert len(reference("convert_to_float8")(model, recipe)) == 8

    losses, weights = trained(ours)
    other_losses, other_weights = trained(lambda model: libraries.torchao_training(model, recipe))
    assert losses == other_losses
    assert all(torch.equal(one, other) for one, other in zip(weights, other_weights, strict=True))


@pytest.mark.parametrize("step", both("training_step"))
def test_a_step_is_that_of_a_larger_batch(step):
    torch.manual_seed(5)
    x, y = torch.randint(16, (2, 4, 8))
    results = []
    for parts in (1, 2, 4):
        torch.manual_seed(6)
        model = GPT(GPTConfig(16, 8, layers=1, heads=2, width=16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss, norm = step(model, list(zip(x.chunk(parts), y.chunk(parts), strict=True)), optimizer, (), 0.5)
        results.append((loss, norm, torch.cat([each.detach().flatten() for each in model.parameters()])))
    for loss, norm, weights in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert norm == pytest.approx(results[0][1], rel=1e-4)
        torch.testing.assert_close(weights, results[0][2], rtol=1e-4, atol=1e-6)
    assert results[0][1] > 0.5  # it was clipped


@pytest.mark.parametrize("gap", both("loss_gap"))
def test_a_gap_by_hand(gap):
    mean, error = gap(((1, 2.02), (2, 2.00)), ((2, 1.98), (1, 2.00)))
    assert mean == pytest.approx(0.0100505, abs=1e-7)
    assert error == pytest.approx(0.0000505, abs=1e-7)


def test_a_value_beyond_the_scale_saturates_and_comes_back_smaller():
    made = reference("DelayedScaling")(E4M3, 2)
    assert dequantize(made.quantize(torch.tensor([100.0, -600.0]))).tolist() == [96.0, -448.0]
    made.update()
    back = dequantize(made.quantize(torch.tensor([100.0, -600.0])))
    assert back.tolist() == pytest.approx([96.43, -600.0], rel=1e-4)


def test_a_state_has_every_scale_and_history():
    def trainer():
        return Trainer(training.small(precision="fp8", recipe="delayed"), training.corpus(), say=lambda line: None)

    first, second = trainer(), trainer()
    for _ in range(3):
        first.take_step()
    second.load_state_dict(first.state_dict())
    assert first.take_step() == second.take_step()
    ours, theirs = (recipes.scalings_of(each.model) for each in (first, second))
    assert ours
    assert all(same(ours[name].history, theirs[name].history) for name in ours)
