"""Loss scaling: the oracle and the reference agree with torch, with published traces and with exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from lowprec_lab.graders import loss_scaling as grader
from lowprec_lab.graders import loss_scaling_oracle as exact
from lowprec_lab.loss_scaling import adamw_steps, gradients_taken, refused, scales_after, scales_resumed, steps_told
from lowprec_lab.precision import loss_scaler
from lowprec_lab.sources import reference

SCALERS = ("DynamicLossScaler", "ApexLossScaler", "HysteresisLossScaler")


def both(name):
    return [pytest.param(getattr(exact, name), id="oracle"), pytest.param(reference(name), id="reference")]


class Torchs:
    """torch.amp.GradScaler, driven as a scaler of the course is."""

    def __init__(self, *settings):
        self.inner = torch.amp.GradScaler("cpu", *settings)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)
        self.inner.scale(torch.zeros(()))  # the scale is made at the first use
        self.scale = self.inner.get_scale()

    def update(self, found_inf):
        self.weight.grad = torch.tensor(math.inf if found_inf else 0.0)
        self.inner.step(self.optimizer)
        self.inner.update()
        self.scale = self.inner.get_scale()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
        self.scale = self.inner.get_scale()


@pytest.mark.slow
@pytest.mark.parametrize("scaler", both("DynamicLossScaler"))
def test_a_thousand_random_traces_are_those_of_grad_scaler(scaler):
    rng = np.random.default_rng(6)
    for _ in range(1000):
        steps = grader.random_steps(rng, int(rng.integers(1, 60)), float(rng.uniform(0, 0.7)))
        start = float(np.float32(np.exp2(rng.uniform(-140, 126))))
        factors = (2.0, 0.5) if rng.random() < 0.5 else (float(rng.uniform(1.01, 4)), float(rng.uniform(0.05, 0.99)))
        settings = (start, *factors, int(rng.integers(1, 8)))
        assert scales_after(scaler, steps, *settings) == scales_after(Torchs, steps, *settings), (steps, settings)


@pytest.mark.parametrize("scaler", both("DynamicLossScaler"))
def test_states_go_on_as_those_of_grad_scaler_do(scaler):
    rng = np.random.default_rng(7)
    for _ in range(20):
        before, after = (grader.random_steps(rng, 12, 0.2) for _ in range(2))
        settings = (2.0**10, 2.0, 0.5, int(rng.integers(2, 6)))
        assert scales_resumed(scaler, before, after, *settings) == scales_resumed(Torchs, before, after, *settings)


# What the published rules give for the steps "x.x.x...xxx", from 256, with an interval of 3.
TRACES = {
    "DynamicLossScaler": ((256.0, 2.0, 0.5, 3), "128 128 64 64 32 32 32 64 32 16 8"),
    "ApexLossScaler": ((256.0, 3), "128 128 64 64 32 32 32 64 32 16 8"),
    "HysteresisLossScaler": ((256.0, 2.0, 0.5, 3, 1.0, 2), "256 256 128 128 64 64 64 128 128 64 32"),
}


@pytest.mark.parametrize("name", SCALERS)
def test_published_traces(name):
    settings, trace = TRACES[name]
    for scaler in (getattr(exact, name), reference(name)):
        found = scales_after(scaler, grader.PUBLISHED, *settings)
        assert found == (256.0, *map(float, trace.split()))


def test_apexs_kernel_is_the_misconception_that_refills_on_good_steps():
    trace = "256 256 256 256 256 256 256 512 512 256 128"
    found = scales_after(grader.refills_on_good_steps, grader.PUBLISHED, *TRACES["HysteresisLossScaler"][0])
    assert found[1:] == tuple(map(float, trace.split()))


@pytest.mark.parametrize("scaler", both("DynamicLossScaler"))
def test_without_a_floor_the_scale_reaches_zero_and_with_one_it_does_not(scaler):
    assert scales_after(scaler, "x" * 153, 2.0**4)[-1] == 2.0**-149
    assert scales_after(scaler, "x" * 170, 2.0**4)[-1] == 0.0
    assert scales_after(scaler, "x" * 170, 2.0**4, 2.0, 0.5, 2000, 1.0)[-1] == 1.0
    assert scales_after(scaler, "." * 4, 2.0**127, 2.0, 0.5, 2)[-1] == 2.0**127


@pytest.mark.parametrize("scaler", both("HysteresisLossScaler"))
def test_overflows_need_not_be_consecutive_for_megatron(scaler):
    assert scales_after(scaler, "x.....x", 256.0)[-1] == 128.0


# gradients


def test_four_gradients_of_3e38_are_finite_and_their_sum_is_not():
    four = torch.full((4,), 3e38)
    assert math.isinf(float(four.sum()))
    for found in (exact.found_nonfinite, reference("found_nonfinite")):
        assert found([four]) is False
        assert found([four * 2]) is True


@pytest.mark.parametrize("scale", [65536.0, 1000.0, 3.0, 2.0**-130])
def test_gradients_are_unscaled_as_grad_scaler_does_it(scale):
    x = torch.cat([torch.randn(200), torch.tensor([math.inf, math.nan, 0.0, -0.0])])
    weight = torch.nn.Parameter(torch.zeros_like(x))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    weight.grad = x.clone()
    scaler.unscale_(torch.optim.SGD([weight], lr=0.0))
    for function in (exact.unscale_, reference("unscale_")):
        mine = x.clone()
        function([mine], scale)
        assert torch.equal(mine.view(torch.int32)[:201], weight.grad.view(torch.int32)[:201])
        assert torch.equal(mine.isnan(), weight.grad.isnan())


def test_fp16_gradients_are_refused_as_grad_scaler_does_it():
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    weight.grad = torch.ones(2, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients."):
        scaler.unscale_(torch.optim.SGD([weight], lr=0.0))
    said = refused(reference("unscale_"), [torch.ones(2), weight.grad], 2.0)
    assert said == "ValueError, and the gradients are as they were"


# AdamW


def nearest(value: Fraction) -> Fraction:
    """The nearest float32, ties to even."""
    guess = np.float32(float(value))
    near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    even = {Fraction(float(each)): int(each.view(np.uint32)) & 1 for each in near}
    return min(even, key=lambda each: (abs(each - value), even[each]))


def nearest_root(value: Fraction) -> Fraction:
    """The float32 nearest to the square root: one of three, told apart by the squares of the middles between them."""
    guess = np.float32(math.sqrt(float(value)))
    below, above = np.nextafter(guess, np.float32(0)), np.nextafter(guess, np.float32(np.inf))
    near = [Fraction(float(each)) for each in (below, guess, above)]
    middles = [(one + other) / 2 for one, other in zip(near, near[1:], strict=False)]
    return near[sum(value > middle**2 for middle in middles)]


def test_adamw_is_what_fractions_give_rounding_after_every_operation():
    rng = np.random.default_rng(8)
    settings = (1e-2, 0.9, 0.99, 1e-6, 0.1)
    weight = torch.from_numpy(rng.uniform(0.5, 2, 4)).to(torch.float16)
    gradients = torch.from_numpy(rng.uniform(-1, 1, (4, 4)).astype(np.float32))
    lr, beta1, beta2, eps, decay = settings
    named = {"lr": lr, "b1": beta1, "b2": beta2, "r1": 1 - beta1, "r2": 1 - beta2, "eps": eps, "wd": decay}
    number = {name: nearest(Fraction(value)) for name, value in named.items()}
    _, masters = exact.adamw_rows(weight, gradients, *settings)
    for place in range(4):
        p, m, v = Fraction(float(weight[place])), Fraction(0), Fraction(0)
        for t, row in enumerate(gradients, start=1):
            g = Fraction(float(row[place]))
            m = nearest(nearest(number["b1"] * m) + nearest(number["r1"] * g))
            v = nearest(nearest(number["b2"] * v) + nearest(number["r2"] * nearest(g * g)))
            one, two = nearest(Fraction(1 - beta1**t)), nearest(Fraction(1 - beta2**t))
            u = nearest(nearest(m / one) / nearest(nearest_root(nearest(v / two)) + number["eps"]))
            u = nearest(u + nearest(number["wd"] * p))
            p = nearest(p - nearest(number["lr"] * u))
            assert float(p) == float(masters[t - 1, place])


def test_adamw_stays_near_torchs_own():
    torch.manual_seed(9)
    weight, gradients = torch.randn(8).half(), torch.randn(50, 8)
    parameter = torch.nn.Parameter(weight.float())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    for made in (exact.MasterWeightAdamW, reference("MasterWeightAdamW")):
        _, masters = adamw_steps(made, weight, gradients, 1e-2, 0.9, 0.999, 1e-8, 0.1)
        torch.testing.assert_close(masters[-1], parameter.detach(), rtol=1e-3, atol=1e-4)


def test_the_oracles_optimizer_is_its_formula():
    torch.manual_seed(10)
    weight, gradients = torch.randn(6).half(), torch.randn(9, 6)
    found = adamw_steps(exact.MasterWeightAdamW, weight, gradients, *grader.ADAM)
    for got, want in zip(found, exact.adamw_rows(weight, gradients, *grader.ADAM), strict=True):
        assert torch.equal(got, want)


# a step


@pytest.mark.parametrize("settings", [(2.0**8, 2, 1e9), (2.0**17, 2, 1e9), (1.0, 3, 1e9)])
def test_the_oracles_step_is_its_formula(settings):
    inputs = grader.whole(np.random.default_rng(11), 8)
    inputs[3, 1] = math.inf
    rows, told = exact.train_rows(inputs, *settings)
    assert torch.equal(gradients_taken(exact.fp16_train_step, inputs, *settings).nan_to_num(7), rows.nan_to_num(7))
    assert steps_told(exact.fp16_train_step, inputs, *settings) == told
    assert any("skipped" in each for each in told)


def test_clipping_is_that_of_torch():
    rng = np.random.default_rng(12)
    for row in grader.to_be_clipped(rng, 1.0):
        parameter = torch.nn.Parameter(row.clone())
        parameter.grad = row.clone()
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        assert torch.equal(parameter.grad, row * torch.tensor(exact.clipping(row.numpy(), 1.0)))


def test_a_run_in_fp16_uses_the_scaler_of_the_course():
    scaler = loss_scaler("dynamic")
    assert scales_after(lambda: scaler, "xx.") == scales_after(reference("DynamicLossScaler"), "xx.")
    fresh = loss_scaler("dynamic")
    fresh.load_state_dict(scaler.state_dict())
    assert fresh.scale == 2.0**14
