"""Precisions: what is rounded where, FP16 without FP16 arithmetic, and the loss scalers."""

import math

import pytest
import torch
from torch import nn

from lowprec_lab import devices, exercises, fused, hardware, precision, recipes
from lowprec_lab.formats import FP16
from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.precision import ConstantScale, EmulatedFP16, PrecisionError, loss_scaler, straight


@pytest.fixture
def no_fp16(monkeypatch):
    """A CPU without 16-bit arithmetic, wherever this runs."""
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset({"avx2"}))


def half(x):
    return x.half().float()


def same(a, b):
    return bool(precision._same_bits(a.detach(), b.detach()).all())


def test_the_probes_hold_every_value_and_every_tie():
    x = precision._probes()
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    assert set(values[values.isfinite()].tolist()) <= set(x.tolist())
    assert {1 + 2.0**-11, 65520.0, 2.0**-25, -3 * 2.0**-25, math.inf} <= set(x.tolist())


def test_emulated_values_and_gradients_are_fp16s(no_fp16):
    made = precision.precision("fp16")
    assert type(made) is EmulatedFP16
    x = precision._probes().requires_grad_()
    y = straight(made._round)(x)
    y.backward(x.detach().flip(0))
    assert same(y, half(x))
    assert same(x.grad, half(x.flip(0)))


def test_a_rounded_layer_is_three_rounded_products(no_fp16):
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    x, gradient = torch.randn(4, 5), torch.randn(4, 3)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    names = list(layer.state_dict())
    precision.precision("fp16").convert(nn.Sequential(layer))
    assert list(layer.state_dict()) == names
    leaf = x.clone().requires_grad_()
    out = layer(leaf)
    out.backward(gradient)
    assert torch.equal(out, half(half(x) @ half(weight).T + half(bias)))
    assert torch.equal(leaf.grad, half(half(gradient) @ half(weight)))
    assert torch.equal(layer.weight.grad, half(half(gradient).T @ half(x)))
    assert torch.equal(layer.bias.grad, half(half(gradient).sum(0)))


def test_too_large_becomes_infinity_and_a_gradient_too_small_becomes_zero(no_fp16):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    precision.precision("fp16").convert(nn.Sequential(layer))
    assert layer(torch.tensor([[70000.0]])).item() == math.inf
    x = torch.ones(1, 1, requires_grad=True)
    (layer(x) * 2.0**-26).backward()
    assert x.grad.item() == 0


def test_every_linear_layer_of_the_gpt_is_rounded(no_fp16):
    model = GPT(GPTConfig(vocab_size=7, context=4, layers=2, heads=1, width=8))
    keys = list(model.state_dict())
    precision.precision("fp16").convert(model)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 2 * 4 + 1
    assert all(type(module) is precision.RoundedLinear for module in linear)
    assert list(model.state_dict()) == keys
    assert model.head.weight is model.token_embedding.weight


def test_the_learners_own_rounding_is_used(no_fp16, monkeypatch):
    def towards_zero(x, fmt, out=None):
        return (x.view(torch.int32) & -(1 << 13)).view(torch.float32)

    supplied = exercises.Supply(towards_zero, "yours", "your fast_round_to (exercise 2.7)")
    monkeypatch.setattr(exercises, "supply", lambda name: supplied)
    made = precision.precision("fp16")
    assert "your fast_round_to" in made.note
    x = torch.tensor([1 + 2.0**-10 + 2.0**-11 + 2.0**-12, 70000.0, math.nan])
    assert same(made._round(x), torch.tensor([1 + 2.0**-10, math.inf, math.nan]))


def test_without_any_answer_the_labs_own(no_fp16, monkeypatch):
    def nobody(name):
        raise exercises.AnswerError("not written")

    monkeypatch.setattr(exercises, "supply", nobody)
    made = precision.precision("fp16")
    assert "the lab's own code, until" in made.note
    assert same(made._round(precision._probes()), half(precision._probes()))


def casts(x, fmt, out=None):
    """A rounding that a compiler takes out: a pair of casts."""
    return x.clamp(-65504, 65504).to(torch.float16).to(torch.float32)


@pytest.mark.slow
@pytest.mark.skipif(bool(fused.why_not_compiled()), reason="nothing can be compiled here")
def test_rounding_that_the_compiler_removes_is_refused(no_fp16, monkeypatch):
    supplied = exercises.Supply(casts, "yours", "your fast_round_to (exercise 2.7)")
    monkeypatch.setattr(exercises, "supply", lambda name: supplied)
    with pytest.raises(PrecisionError, match=r"does not survive the compiler: [\d,]+ of .* Train without --compile"):
        precision.precision("fp16", compiled=True)
    made = precision.precision("fp16")
    assert "runs as plain code" in made.note
    assert same(made._round(precision._probes()), half(precision._probes()))


@pytest.mark.slow
def test_the_reference_survives_the_compiler(no_fp16):
    x = torch.randn(1000).requires_grad_()
    made = precision.precision("fp16", compiled=True)
    y = torch.compile(lambda x: straight(made._round)(x * 3) * 1.0)(x)
    assert same(y, half(x * 3))


def test_what_the_doctor_says_decides(monkeypatch):
    def doctor_says(status):
        line = devices.Line("bf16", status, "this GPU is from 2016")
        monkeypatch.setattr(devices, "diagnose", lambda machine: devices.Report((), (line,)))
        return precision.precision("bf16", "cuda")

    with pytest.raises(PrecisionError, match="bf16 cannot be had here: this GPU is from 2016. Train in fp32"):
        doctor_says(devices.CANNOT)
    assert doctor_says(devices.EMULATED).note == "bf16 is slow here: this GPU is from 2016."
    assert doctor_says(devices.NATIVE).note == ""


def test_on_a_cpu_with_fp16_arithmetic_autocast_does_it(monkeypatch):
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset({"avx512_fp16"}))
    made = precision.precision("fp16")
    assert type(made) is precision.Autocast
    with made.context():
        assert torch.get_autocast_dtype("cpu") == torch.float16


def test_an_unknown_precision():
    with pytest.raises(PrecisionError, match="The precisions are: fp32, bf16, fp16"):
        precision.precision("fp12")


# scaling the loss


def test_settings_of_the_scale():
    said = []
    scaler = loss_scaler("dynamic", said.append)
    scaler.update(True)
    assert scaler.scale == 2.0**15
    assert said == ["The scale of the loss is set by reference: DynamicLossScaler (exercise 6.3)."]
    assert (loss_scaler("none").scale, loss_scaler("none").checks) == (1.0, False)
    assert (loss_scaler("1024").scale, loss_scaler("1024").checks) == (1024.0, True)
    assert (loss_scaler("1/640").scale, loss_scaler("1/640").checks) == (1 / 640, True)
    fixed = ConstantScale(8.0)
    fixed.update(True)
    assert fixed.scale == 8.0
    for wrong in ("0", "-2", "much", "inf", "nan", "1/0", "1/-4", "1/", "a/b"):
        with pytest.raises(ValueError, match="a loss scale is dynamic, none, or a number above 0"):
            loss_scaler(wrong)


def test_fp16_of_the_formats_is_what_is_emulated():
    assert FP16.torch_dtype == torch.float16


# FP8


class Counted(nn.Module):
    """A model with a layer that 16 divides, one that it does not, and one that is named like a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.odd, self.head = nn.Linear(32, 16), nn.Linear(16, 5), nn.Linear(5, 16)

    def forward(self, x):
        return self.head(self.odd(self.up(x)))


@pytest.mark.parametrize(
    ("skip", "converted"),
    [(("head",), ["up", "odd"]), ((), ["up", "odd", "head"]), (("up", "head"), ["odd"]), (("o",), ["up", "head"])],
)
@pytest.mark.parametrize("recipe", recipes.NAMES)
def test_fp8_converts_what_is_not_skipped(recipe, skip, converted):
    made, model = precision.precision("fp8", recipe=recipe, skip=skip), Counted()
    before = dict(model.named_parameters())
    made.convert(model)
    assert made.converted == converted
    assert made.note.startswith("FP8 is by the reference's convert_to_float8, ")
    assert f"{len(converted)} of 3 linear layers are converted. All products are emulated (there is no" in made.note
    assert all(each is before[name] for name, each in model.named_parameters())
    changed = [name for name, module in model.named_modules() if name and type(module) is not nn.Linear]
    assert changed == converted
    assert len(made.state_dict()) == (3 * len(converted) if recipe == "delayed" else 0)


@pytest.mark.parametrize("recipe", recipes.NAMES)
def test_on_tensor_cores_the_rest_is_bf16(recipe, monkeypatch):
    monkeypatch.setattr(hardware, "capability_of", lambda device: (9, 0))
    made, model = precision.precision("fp8", recipe=recipe, skip=("head",)), Counted()
    made.convert(model)
    assert type(model.up).__name__ == ("HardwareDelayedLinear" if recipe == "delayed" else "HardwareLinear")
    assert "2 of 3 linear layers are converted. All products run on tensor cores of capability 9.0" in made.note
    assert made.note.endswith("the rest is BF16.")
    with made.context():
        assert torch.is_autocast_enabled("cpu")


def test_where_only_some_products_can_run_it_names_one_that_cannot(monkeypatch):
    monkeypatch.setattr(hardware, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(
        hardware,
        "where_products_run",
        lambda recipe, shape, _: ("emulated", "a reason") if 5 in shape else ("hardware", "cores"),
    )
    made = precision.precision("fp8", skip=())
    made.convert(Counted())
    assert "The products of 1 run on cores; those of 2 are emulated (odd: a reason). The rest is BF16." in made.note


def test_fp8_with_nothing_left_says_so():
    with pytest.raises(PrecisionError, match="no layer is left for FP8: up, odd, head is to be skipped"):
        precision.precision("fp8", skip=("up", "odd", "head")).convert(Counted())


def test_layers_that_no_gpu_is_faster_with_can_be_skipped():
    made = precision.precision("fp8", skip=("small",), rows=64)
    with pytest.raises(PrecisionError, match="no layer is left for FP8: small is to be skipped"):
        made.convert(nn.Sequential(nn.Linear(32, 16)))
    large = nn.Sequential(nn.Linear(32, 16), nn.Linear(4112, 1040, device="meta"))
    made.convert(large)
    assert made.converted == ["1"]


def test_fp8_of_an_unknown_recipe():
    with pytest.raises(PrecisionError, match="no recipe 'rowise'. The recipes are: tensorwise, rowwise, rowwise_with_"):
        precision.precision("fp8", recipe="rowise")


def test_fp8_without_an_answer_names_the_exercise(monkeypatch):
    def nobody(name, living=False):
        raise exercises.AnswerError("quantize is not written yet: it is exercise 7.3")

    monkeypatch.setattr(exercises, "supply", nobody)
    with pytest.raises(PrecisionError, match="FP8 is made of your answers, and one is missing: quantize is not writt"):
        precision.precision("fp8")


def test_delayed_scales_move_after_a_step_and_come_back_from_a_checkpoint():
    made, model = precision.precision("fp8", recipe="delayed"), Counted()
    made.convert(model)
    x = torch.randn(4, 32)
    model(x).sum().backward()
    first = made.state_dict()["up x"]
    assert first["scale"] == 1
    assert first["history"][0] == x.abs().max()
    made.after_step()
    state = made.state_dict()
    assert state["up x"]["scale"] == torch.div(torch.tensor(448.0), x.abs().max())
    model.eval()(x * 100)
    assert all(torch.equal(made.state_dict()["up x"][key], state["up x"][key]) for key in state["up x"])  # validation
    other = precision.precision("fp8", recipe="delayed")
    other.convert(Counted())
    other.load_state_dict(state)
    assert str(other.state_dict()) == str(state)


def test_everything_in_bf16():
    made, model = precision.precision("pure_bf16"), Counted()
    made.convert(model)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    with made.context():
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
