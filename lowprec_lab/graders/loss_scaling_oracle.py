"""The exact oracle for loss scaling: scalers as machines of two rules, and float32 arithmetic in numpy.

Nothing here uses autograd, an optimizer or a scaler of torch. Tests compare the scalers with torch.amp.GradScaler and
with published traces, and the optimizer with fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class Machine:
    """A scaler made of two rules, functions of the machine: one for a good step, one for a bad one.

    memory: what the rules remember beside the scale; it is kept in the attributes of these names.
    """

    def __init__(self, scale: float, good: Callable, bad: Callable, /, **memory: object) -> None:
        self.__dict__.update(memory, scale=scale, rules=(good, bad), kept=("scale", *memory))

    def update(self, found_inf: bool) -> None:
        self.rules[bool(found_inf)](self)

    def state_dict(self) -> dict:
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: dict) -> None:
        self.__dict__.update(state)


def single(value: float) -> float:
    """The float32 nearest to a number, as a float of Python."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def grown_in_float32(machine: Machine, factor: float, ceiling: float = math.inf) -> None:
    """Growth as GradScaler does it: not to infinity."""
    product = single(machine.scale * factor)
    if product != math.inf:
        machine.scale = min(product, ceiling)


def count(machine: Machine, interval: int, grow: Callable[[], None]) -> None:
    """One more good step; `grow`, and start again, when there are `interval` of them."""
    machine.good = (machine.good + 1) % interval
    if machine.good == 0:
        grow()


def DynamicLossScaler(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
) -> Machine:
    def good(m):
        count(m, growth_interval, lambda: grown_in_float32(m, growth_factor, max_scale))

    def bad(m):
        m.scale, m.good = max(single(m.scale * backoff_factor), min_scale), 0

    return Machine(init_scale, good, bad, good=0)


def ApexLossScaler(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24) -> Machine:
    floor = -math.inf if min_loss_scale is None else min_loss_scale

    def double(m):
        m.scale = min(m.scale + m.scale, max_loss_scale)

    def bad(m):
        m.scale, m.good = max(m.scale / 2, floor), 0

    return Machine(min(init_scale, max_loss_scale), lambda m: count(m, scale_window, lambda: double(m)), bad, good=0)


def HysteresisLossScaler(
    init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0, hysteresis=2
) -> Machine:
    def grow(m):
        m.scale, m.patience = m.scale * growth_factor, hysteresis

    def bad(m):
        m.good, m.patience = 0, m.patience - 1
        if m.patience < 1:
            m.scale = max(m.scale * backoff_factor, min_scale)

    return Machine(init_scale, lambda m: count(m, growth_interval, lambda: grow(m)), bad, good=0, patience=hysteresis)


# --- gradients --------------------------------------------------------------------------------------------------------


def unscale_(gradients: list[Tensor | None], scale: float) -> None:
    """In place, through numpy views of the same memory."""
    there = [each for each in gradients if each is not None]
    if any(each.dtype == torch.float16 for each in there):
        raise ValueError("Attempting to unscale FP16 gradients.")
    for each in there:
        with np.errstate(all="ignore"):
            each.copy_(torch.from_numpy(np.asarray(each.numpy() * np.float32(np.float64(1) / np.float64(scale)))))


def found_nonfinite(gradients: list[Tensor | None]) -> bool:
    """Exponent bits that are all ones: infinity or NaN."""
    masks = {torch.float32: (torch.int32, 0x7F800000), torch.float16: (torch.int16, 0x7C00),
             torch.bfloat16: (torch.int16, 0x7F80)}  # fmt: skip
    for each in gradients:
        if each is not None:
            whole, mask = masks[each.dtype]
            bits = each.contiguous().view(whole).numpy()
            if ((bits & mask) == mask).any():
                return True
    return False


# --- a training step --------------------------------------------------------------------------------------------------


def train_rows(inputs: Tensor, scale: float, interval: int, max_norm: float) -> tuple[Tensor, tuple[str, ...]]:
    """What `gradients_taken` and `steps_told` have to find for these inputs."""
    taken, told, good = np.full(inputs.shape, np.nan, dtype=np.float32), [], 0
    with np.errstate(all="ignore"):
        for step, x in enumerate(inputs.numpy()):
            arrived = (x * np.float32(scale)).astype(np.float16).astype(np.float32) * np.float32(1 / scale)
            bad = not np.isfinite(arrived).all()
            good = 0 if bad else good + 1
            if not bad:
                taken[step] = arrived * clipping(arrived, max_norm)
            scale = scale / 2 if bad else scale * 2 if good == interval else scale
            good = 0 if good == interval else good
            told.append(f"loss {float(x.sum(dtype=np.float64)):g}, skipped: {bad}, scale {scale:g}")
    return torch.from_numpy(taken), tuple(told)


def clipping(gradient: np.ndarray, max_norm: float) -> np.float32:
    """The factor that brings the norm of a gradient to at most max_norm."""
    norm = math.sqrt(float(np.square(gradient.astype(np.float64)).sum()))
    return np.float32(min(1.0, max_norm / (norm + 1e-6)))


def fp16_train_step(model, x, y, optimizer, scaler, max_norm) -> tuple[float, bool]:
    """The step on any model, for when nobody's answer is there."""
    loss = model(x, y)[1]
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss * scaler.scale, parameters)
    gradients = [each.to(torch.float32, copy=True) for each in found]
    unscale_(gradients, scaler.scale)
    bad = found_nonfinite(gradients)
    if not bad:
        factor = clipping(torch.cat([each.flatten() for each in gradients]).numpy(), max_norm)
        optimizer.step([each * float(factor) for each in gradients])
    scaler.update(bad)
    return float(loss.detach()), bad


# --- AdamW ------------------------------------------------------------------------------------------------------------


def adam_moments(m, v, g, beta1: float, beta2: float):
    """The moments after a gradient g, in the dtype of numpy that they have."""
    number = m.dtype.type
    m = number(beta1) * m + number(1 - beta1) * g
    return m, number(beta2) * v + number(1 - beta2) * (g * g)


def adam_update(m, v, t: int, beta1: float, beta2: float, eps: float):
    """The update without learning rate and decay."""
    number = m.dtype.type
    return (m / number(1 - beta1**t)) / (np.sqrt(v / number(1 - beta2**t)) + number(eps))


def adamw_rows(weight: Tensor, gradients: Tensor, lr, beta1, beta2, eps, weight_decay) -> tuple[Tensor, Tensor]:
    """What `adamw_steps` has to find: (float16 weights, masters) after each step."""
    master = weight.numpy().astype(np.float32)
    m = v = np.zeros_like(master)
    masters = np.empty(gradients.shape, dtype=np.float32)
    with np.errstate(all="ignore"):
        for t, g in enumerate(gradients.numpy(), start=1):
            m, v = adam_moments(m, v, g, beta1, beta2)
            update = adam_update(m, v, t, beta1, beta2, eps) + np.float32(weight_decay) * master
            master = masters[t - 1] = master - np.float32(lr) * update
        return torch.from_numpy(masters.astype(np.float16)), torch.from_numpy(masters)


class Adam:
    """An optimizer of float32 masters whose rule is a function.

    rule(t, master, gradient, memory, optimizer) gives the new master; arrays of numpy, float32. memory: a dict that
    lives on for each parameter. `optimizer` has lr, betas, eps and weight_decay.
    """

    def __init__(self, rule: Callable, parameters: list[Tensor], lr, betas, eps, weight_decay) -> None:
        self.rule, self.parameters = rule, parameters
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.masters = [each.detach().to(torch.float32, copy=True) for each in parameters]
        self.memories, self.t = [{} for _ in parameters], 0

    def step(self, gradients: list[Tensor]) -> None:
        self.t += 1
        for parameter, master, gradient, memory in zip(
            self.parameters, self.masters, gradients, self.memories, strict=True
        ):
            with np.errstate(all="ignore"):
                new = self.rule(self.t, master.numpy(), gradient.detach().numpy(), memory, self)
            master.copy_(torch.from_numpy(np.asarray(new, dtype=np.float32)))
            self.write(parameter, master)

    def write(self, parameter: Tensor, master: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(master)


def moments(memory: dict, g, o: Adam, dtype=np.float32):
    """The moments of a parameter, after its gradient g; remembered in a dtype."""
    zeros = np.zeros(g.shape, dtype=np.float32)
    m, v = (memory.get(name, zeros).astype(np.float32) for name in ("m", "v"))
    memory["m"], memory["v"] = (each.astype(dtype) for each in adam_moments(m, v, g, *o.betas))
    return memory["m"].astype(np.float32), memory["v"].astype(np.float32)


def MasterWeightAdamW(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01) -> Adam:
    def rule(t, p, g, memory, o):
        update = adam_update(*moments(memory, g, o), t, *o.betas, o.eps) + np.float32(o.weight_decay) * p
        return p - np.float32(o.lr) * update

    return Adam(rule, parameters, lr, betas, eps, weight_decay)
