"""Chapter 06: FP16 training, and the loss scale that keeps its gradients alive.

A loss scaler is a rule for one number. It has `scale`, a float by which the next loss is multiplied, and
`update(found_inf)`, which is called after every step and says whether any gradient of that step was infinite or NaN.
`state_dict()` gives what later steps depend on, `load_state_dict(state)` takes it up again.

References: Micikevicius et al., Mixed precision training, arXiv:1710.03740; torch/amp/grad_scaler.py in PyTorch;
apex/amp/scaler.py and csrc/multi_tensor_adam.cu in NVIDIA Apex; megatron/core/optimizer/grad_scaler.py and optimizer.py
in Megatron-LM; Loshchilov and Hutter, Decoupled weight decay regularization, arXiv:1711.05101.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowprec_lab.blanks import blank


@blank(exercise="6.1", points=2, minutes=15)
def unscale_(gradients: list[Tensor | None], scale: float) -> None:
    """Take the loss scale out of the gradients, in place: whoever holds the same tensors sees it.

    gradients: float32 tensors of any shapes; None stands for a parameter without a gradient. scale: above 0.
    Each gradient is multiplied by one float32 number: 1 / scale, worked out in float64 and rounded to float32.
    ValueError for a float16 gradient (torch says "Attempting to unscale FP16 gradients."), before any is changed.
    """


@blank(exercise="6.2", points=2, minutes=15)
def found_nonfinite(gradients: list[Tensor | None]) -> bool:
    """Whether any element of any gradient is infinite or NaN.

    gradients: float32, float16 or bfloat16 tensors of any shapes, empty ones too; None is skipped.
    Returns: a bool of Python. Finite gradients are finite, however large they, their sum or their norm may be.
    """


@blank(exercise="6.3", points=4, minutes=35)
class DynamicLossScaler:
    """torch.amp.GradScaler's rule for the scale, with a floor and a ceiling that it lacks.

    After a step with found_inf: scale * backoff_factor, at least min_scale; good steps are counted from 0 again.
    After one without: one more good step. When growth_interval of them have followed each other: scale * growth_factor,
    at most max_scale, and the count begins again; where the product is infinite in float32, the scale stays.
    Both products are worked out in float64 and rounded to float32, the dtype in which GradScaler keeps its scale.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 0.0,
        max_scale: float = math.inf,
    ) -> None:
        """Sets `scale`, a float, to init_scale: a float32 number between min_scale and max_scale, like both of them."""

    def update(self, found_inf: bool) -> None:
        """Say how a step went; afterwards `scale` is that of the next one."""

    def state_dict(self) -> dict:
        """All that later steps depend on, beside the settings: numbers by name, which later steps do not change."""

    def load_state_dict(self, state: dict) -> None:
        """Go on from a `state_dict()`; the settings are the constructor's."""


@blank(exercise="6.4", points=2, minutes=20)
class ApexLossScaler:
    """The rule of NVIDIA Apex's amp, in the float64 of Python.

    After a step with found_inf: half the scale, at least min_loss_scale unless that is None; the count is 0 again.
    After one without: one more good step; at scale_window of them twice the scale, at most max_loss_scale, and the
    count is 0 again.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        """Sets `scale`, a float: init_scale, at most max_loss_scale."""

    def update(self, found_inf: bool) -> None:
        """Say how a step went; afterwards `scale` is that of the next one."""


@blank(exercise="6.5", points=3, minutes=30)
class HysteresisLossScaler:
    """Megatron-LM's rule: the scale falls when the patience is used up, and growth alone refills it.

    After a step with found_inf: the count of good steps is 0 again, and the patience one less; if it is 0 or below, the
    scale is multiplied by backoff_factor, and is at least min_scale. The patience stays where it is.
    After one without: one more good step; at growth_interval of them the count is 0 again, the scale is multiplied by
    growth_factor, and the patience is `hysteresis` again.
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        min_scale: float = 1.0,
        hysteresis: int = 2,
    ) -> None:
        """Sets `scale`, a float, to init_scale, and the patience to `hysteresis`."""

    def update(self, found_inf: bool) -> None:
        """Say how a step went; afterwards `scale` is that of the next one."""


@blank(exercise="6.6", points=4, minutes=45)
class MasterWeightAdamW:
    """AdamW in the arithmetic of fused kernels, on float32 masters of float16 weights.

    Step t = 1, 2, ... for each parameter, with its gradient g, its moments m and v (both 0 at first) and its master p,
    every operation in float32, in the order that the parentheses say, and each rounded by itself:

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (g * g)
        u = (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)
        u = u + weight_decay * p
        p = p - lr * u

    lr, eps, 1 - beta1 and the like are numbers of Python, rounded to float32 where they meet a tensor. The square root
    is the float32 nearest to the exact one. torch.sqrt of a float32 tensor may miss that by one ulp: take the root in
    float64, and round it.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        """parameters: the weights that a model computes with, float16 (or float32) tensors of any shapes.

        Sets `masters`, a list: a float32 copy of each.
        """

    def step(self, gradients: list[Tensor]) -> None:
        """One step. gradients: float32, unscaled, one for each parameter.

        Changes the masters, and writes them into the parameters, in place, rounded to their dtype.
        """


@blank(exercise="6.7", points=4, minutes=40)
def fp16_train_step(
    model: nn.Module, x: Tensor, y: Tensor, optimizer: object, scaler: object, max_norm: float
) -> tuple[float, bool]:
    """One training step with a scaled loss.

    model: `model(x, y)` returns `(logits, loss)`, loss 0-d float32; its parameters are float16 or float32, and all of
    them get a gradient. optimizer: `step(gradients)` takes a list of float32 gradients, one for each parameter, in the
    order of model.parameters(). scaler: has `scale` and `update(found_inf)`.
    Returns: (the loss as it is without the scale, whether the step was skipped).

    The loss is multiplied by the scale before backward; gradients are converted to float32 and unscaled. When one of
    them is not finite, the optimizer takes no step. Else they are clipped: with norm the square root of the sum of all
    their squares, all are multiplied by max_norm / (norm + 1e-6), where that is below 1. The scaler hears of every
    step. No parameter keeps a gradient.
    """


# --- scenarios: what a check drives an answer with, beside plain calls ------------------------------------------------


def unscaled(function: Callable, gradients: list[Tensor | None], scale: float) -> Tensor:
    """All numbers of the gradients, in one row, after `function(gradients, scale)` changed them in place."""
    held = [None if each is None else each.clone() for each in gradients]
    function(list(held), scale)
    return torch.cat([each.flatten() for each in held if each is not None])


def refused(function: Callable, gradients: list[Tensor | None], scale: float) -> str:
    """In words: which error `function(gradients, scale)` raises, and whether gradients were changed all the same."""
    held = [None if each is None else each.clone() for each in gradients]
    try:
        function(list(held), scale)
        said = "no error"
    except ValueError:
        said = "ValueError"
    same = all(one is None or torch.equal(one, other) for one, other in zip(gradients, held, strict=True))
    return f"{said}, and the gradients are {'as they were' if same else 'changed'}"


def scales_after(scaler: Callable, steps: str, *settings: float) -> tuple[float, ...]:
    """The scale before the first step and after each. steps: "x" for one with found_inf, "." for one without."""
    made = scaler(*settings)
    found = [made.scale]
    for step in steps:
        made.update(step == "x")
        found.append(made.scale)
    return tuple(found)


def scales_resumed(scaler: Callable, before: str, after: str, *settings: float) -> tuple[float, ...]:
    """The scales after each step of `after`, taken by a new scaler that goes on where another stood after `before`.

    The state goes to a file and back. In between the first scaler lives on, and meets three bad steps.
    """
    first, second = scaler(*settings), scaler(*settings)
    for step in before:
        first.update(step == "x")
    state = first.state_dict()
    for _ in range(3):
        first.update(True)
    second.load_state_dict(json.loads(json.dumps(state)))
    found = [second.scale]
    for step in after:
        second.update(step == "x")
        found.append(second.scale)
    return tuple(found)


def adamw_steps(
    optimizer: Callable, weight: Tensor, gradients: Tensor, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(float16 weights after each step, their masters): a row of n for each row of gradients.

    weight: float16, (n,). The first of its numbers are one parameter and the rest another, a matrix of one column.
    """
    half = len(weight) // 2
    parameters = [weight[:half].clone(), weight[half:].clone()[:, None]]
    made = optimizer(parameters, lr, (beta1, beta2), eps, weight_decay)
    weights, masters = torch.empty(gradients.shape, dtype=torch.float16), torch.empty(gradients.shape)
    for step, gradient in enumerate(gradients):
        made.step([gradient[:half].clone(), gradient[half:].clone()[:, None]])
        weights[step] = torch.cat([each.flatten() for each in parameters])
        masters[step] = torch.cat([each.flatten() for each in made.masters])
    return weights, masters


def gradients_taken(step: Callable, inputs: Tensor, scale: float, interval: int, max_norm: float) -> Tensor:
    """What the optimizer was given in each step, one row of n numbers each, float32; a row of NaN for no step.

    inputs: float32, (steps, n): the gradients as they would be without any rounding. They reach the n float16 weights
    (two parameters) through a scaled loss. scale, interval: a loss scaler's that halves, and doubles after as many.
    """
    return _train(step, inputs, scale, interval, max_norm)[0]


def steps_told(step: Callable, inputs: Tensor, scale: float, interval: int, max_norm: float) -> tuple[str, ...]:
    """For each step, in words: the loss and whether it was skipped, as returned, and then the scale after it."""
    return tuple(_train(step, inputs, scale, interval, max_norm)[1])


def _train(step: Callable, inputs: Tensor, scale: float, interval: int, max_norm: float) -> tuple[Tensor, list[str]]:
    model, scaler, told = _Linear(inputs.shape[1]), _Scaler(scale, interval), []
    taken = torch.full_like(inputs, math.nan)
    for row, x in zip(taken, inputs, strict=True):
        loss, skipped = step(model, x, x, _Recorder(row), scaler, max_norm)
        left = any(each.grad is not None and bool(each.grad.any()) for each in model.parameters())
        told.append(
            f"loss {_as_told(loss, float, '{:g}')}, skipped: {_as_told(skipped, bool, '{}')}, scale {scaler.scale:g}"
            + (", and a gradient is left" if left else "")
        )
    return taken, told


def _as_told(value: object, kind: type, text: str) -> str:
    return text.format(value) if isinstance(value, kind) else f"a {type(value).__name__} and no {kind.__name__}"


class _Linear(nn.Module):
    """A loss whose gradient is x: the sum of weights times x. Its n weights, all 1, are two float16 parameters."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(2, dtype=torch.float16))
        self.other = nn.Parameter(torch.ones(n - 2, 1, dtype=torch.float16))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        products = torch.cat([self.one.float(), self.other.float().flatten()]) * x
        return products, products.sum()


class _Scaler:
    """Halves after a bad step, doubles after `interval` good ones."""

    def __init__(self, scale: float, interval: int) -> None:
        self.scale, self.interval, self.good = scale, interval, 0

    def update(self, found_inf: bool) -> None:
        self.good = 0 if found_inf else self.good + 1
        if found_inf:
            self.scale /= 2
        elif self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0


class _Recorder:
    """An optimizer that writes down what it is given."""

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def step(self, gradients: list[Tensor]) -> None:
        self.row.copy_(torch.cat([each.detach().flatten() for each in gradients]))


# --- given: a model whose layers compute in 16 bits, for the page's experiments ---------------------------------------


def round_layers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Make every linear layer of a float32 model round to `dtype`, in place: what goes in, what comes out, the weights.

    Their gradients are rounded as well, on the way back. Products are added up in float32. Beyond the largest value is
    infinity. This is how training in 16 bits is emulated on any CPU; the result is the model itself.
    """
    from lowprec_lab.precision import RoundedLinear, straight

    rounded = straight(lambda x: x.to(dtype).float())
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__, module.rounded = RoundedLinear, rounded
    return model


class PartOfAStep(nn.Module):
    """A language model whose loss is the share of a larger batch: `share` times the mean over the tokens it is given.

    Who collects the gradients of many small batches, as every large run does, divides each loss by their number.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        super().__init__()
        self.model, self.share = model, share

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits, loss = self.model(x, y)
        return logits, loss * self.share
