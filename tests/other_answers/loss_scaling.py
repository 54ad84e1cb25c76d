"""Other right answers to the exercises of chapter 06."""

import math

import numpy as np
import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.loss_scaling import DynamicLossScaler, found_nonfinite, unscale_

# --- 6.1 unscale_ ---


@other("unscale_")
def all_at_once(gradients, scale):
    there = list(filter(lambda gradient: gradient is not None, gradients))
    for gradient in there:
        if gradient.dtype is torch.half:
            raise ValueError("Attempting to unscale FP16 gradients.")
    if there:
        torch._foreach_mul_(there, 1.0 / scale)


@other("unscale_")
def with_a_tensor_and_copy(gradients, scale):
    if torch.float16 in {gradient.dtype for gradient in gradients if gradient is not None}:
        raise ValueError("Attempting to unscale FP16 gradients.")
    inverse = torch.tensor(scale, dtype=torch.float64).reciprocal().to(torch.float32)
    for place in range(len(gradients)):
        if gradients[place] is not None:
            gradients[place].copy_(gradients[place] * inverse)


@other("unscale_")
def with_the_kernel_of_torch(gradients, scale):
    there = [gradient for gradient in gradients if gradient is not None]
    if any(gradient.dtype == torch.float16 for gradient in there):
        raise ValueError("Attempting to unscale FP16 gradients.")
    inverse = torch.tensor(scale).double().reciprocal().float()
    torch._amp_foreach_non_finite_check_and_unscale_(there, torch.zeros(()), inverse)


# --- 6.2 found_nonfinite ---


@other("found_nonfinite")
def one_after_the_other(gradients):
    for gradient in gradients:
        if gradient is not None and (torch.isinf(gradient).any() or torch.isnan(gradient).any()):
            return True
    return False


@other("found_nonfinite")
def times_zero(gradients):
    # 0 times a finite number is 0; 0 times anything else is NaN.
    return any(bool((gradient * 0 != 0).any()) for gradient in gradients if gradient is not None)


@other("found_nonfinite")
def in_numpy(gradients):
    return not all(np.isfinite(each.float().numpy()).all() for each in gradients if each is not None)


# --- 6.3 DynamicLossScaler ---


@other("DynamicLossScaler")
class CountsDown:
    def __init__(
        self,
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        min_scale=0.0,
        max_scale=math.inf,
    ):
        self.up, self.down, self.interval = growth_factor, backoff_factor, growth_interval
        self.low, self.high = min_scale, max_scale
        self.scale, self.left = init_scale, growth_interval

    def update(self, found_inf):
        self.left = self.interval if found_inf else self.left - 1
        if not found_inf and self.left > 0:
            return
        with np.errstate(over="ignore"):
            new = float(np.float32(self.scale * (self.down if found_inf else self.up)))
        if found_inf:
            self.scale = new if new > self.low else self.low
        else:
            self.left = self.interval
            if new != math.inf:
                self.scale = new if new < self.high else self.high

    def state_dict(self):
        return {"scale": self.scale, "left": self.left}

    def load_state_dict(self, state):
        vars(self).update(state)


@other("DynamicLossScaler")
class OnTorchsKernel:
    def __init__(
        self,
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        min_scale=0.0,
        max_scale=math.inf,
    ):
        self.rule = growth_factor, backoff_factor, growth_interval
        self.range = min_scale, max_scale
        self._scale = torch.tensor(init_scale, dtype=torch.float32)
        self._good = torch.zeros((), dtype=torch.int32)

    @property
    def scale(self):
        return self._scale.item()

    def update(self, found_inf):
        torch._amp_update_scale_(self._scale, self._good, torch.tensor(float(found_inf)), *self.rule)
        self._scale.clamp_(*self.range)

    def state_dict(self):
        return {"scale": self._scale.item(), "good": self._good.item()}

    def load_state_dict(self, state):
        self._scale.fill_(state["scale"])
        self._good.fill_(state["good"])


@other("DynamicLossScaler")
class AroundGradScaler:
    def __init__(
        self,
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        min_scale=0.0,
        max_scale=math.inf,
    ):
        self.inner = torch.amp.GradScaler("cpu", init_scale, growth_factor, backoff_factor, growth_interval)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)
        self.min_scale, self.max_scale = min_scale, max_scale
        self.inner.scale(torch.zeros(()))
        self.scale = self.inner.get_scale()

    def update(self, found_inf):
        self.weight.grad = torch.tensor(math.inf if found_inf else 0.0)
        self.inner.step(self.optimizer)
        self.inner.update()
        self.scale = max(self.min_scale, min(self.inner.get_scale(), self.max_scale))
        self.inner._scale.fill_(self.scale)

    def state_dict(self):
        state = self.inner.state_dict()
        return {"scale": state["scale"], "tracker": state["_growth_tracker"]}

    def load_state_dict(self, state):
        self.inner._scale.fill_(state["scale"])
        self.inner._growth_tracker.fill_(state["tracker"])
        self.scale = state["scale"]


# --- 6.4 ApexLossScaler ---


@other("ApexLossScaler")
class BuiltOnTheOneBefore(DynamicLossScaler):
    def __init__(self, init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
        super().__init__(growth_interval=scale_window)
        self.scale, self.window, self.good = min(init_scale, max_loss_scale), scale_window, 0
        self.least, self.most = min_loss_scale or 0.0, max_loss_scale

    def update(self, found_inf):
        self.good += 1
        if found_inf:
            self.scale, self.good = max(self.least, 0.5 * self.scale), 0
        if self.good == self.window:
            self.scale, self.good = min(self.most, 2 * self.scale), 0


@other("ApexLossScaler")
class WithBothEnds:
    def __init__(self, init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
        self.window, self.ends = scale_window, (min_loss_scale, max_loss_scale)
        self.scale = self.within(init_scale, top_only=True)
        self.unskipped = 0

    def within(self, scale, top_only=False):
        low, high = self.ends
        scale = high if scale > high else scale
        return low if low is not None and not top_only and scale < low else scale

    def update(self, found_inf):
        if found_inf:
            self.unskipped = 0
            self.scale = self.within(0.5 * self.scale)
            return
        self.unskipped += 1
        if self.unskipped >= self.window:
            self.scale = self.within(self.scale + self.scale, top_only=True)
            self.unskipped = 0


@other("ApexLossScaler")
class ByTheStepOfTheLastChange:
    def __init__(self, init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
        self.scale, self.cap = min(max_loss_scale, init_scale), max_loss_scale
        self.floor, self.window = min_loss_scale, scale_window
        self.step, self.changed = 0, 0

    def update(self, found_inf):
        self.step += 1
        if found_inf:
            self.changed = self.step
            halved = self.scale / 2.0
            self.scale = halved if self.floor is None else max(self.floor, halved)
        elif self.step - self.changed == self.window:
            self.changed = self.step
            self.scale = min(self.cap, self.scale * 2.0)


# --- 6.5 HysteresisLossScaler ---


@other("HysteresisLossScaler")
class CountsOverflows:
    def __init__(
        self,
        init_scale=2.0**32,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=1000,
        min_scale=1.0,
        hysteresis=2,
    ):
        self.scale, self.good, self.bad = init_scale, 0, 0
        self.factors, self.interval, self.low, self.patience = (
            (growth_factor, backoff_factor), growth_interval, min_scale, hysteresis
        )  # fmt: skip

    def update(self, found_inf):
        growth, backoff = self.factors
        if found_inf:
            self.good, self.bad = 0, self.bad + 1
            if self.bad >= self.patience:
                self.scale = max(self.low, backoff * self.scale)
        else:
            self.good = (self.good + 1) % self.interval
            if not self.good:
                self.scale, self.bad = growth * self.scale, 0


@other("HysteresisLossScaler")
class WithTensors:
    def __init__(
        self,
        init_scale=2.0**32,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=1000,
        min_scale=1.0,
        hysteresis=2,
    ):
        self.settings = {"up": growth_factor, "down": backoff_factor, "every": growth_interval, "low": min_scale}
        self.settings["h"] = hysteresis
        self.state = torch.tensor([init_scale, 0.0, hysteresis], dtype=torch.float64)

    @property
    def scale(self):
        return float(self.state[0])

    def update(self, found_inf):
        scale, good, patience = self.state.tolist()
        if found_inf:
            good, patience = 0, patience - 1
            if patience <= 0:
                scale = max(scale * self.settings["down"], self.settings["low"])
        elif good + 1 == self.settings["every"]:
            scale, good, patience = scale * self.settings["up"], 0, self.settings["h"]
        else:
            good += 1
        self.state = torch.tensor([scale, good, patience], dtype=torch.float64)


# --- 6.6 MasterWeightAdamW ---


@other("MasterWeightAdamW")
class InPlace:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.parameters = parameters
        self.masters = [torch.empty(each.shape, dtype=torch.float32).copy_(each.detach()) for each in parameters]
        self.first = [torch.zeros_like(each) for each in self.masters]
        self.second = [torch.zeros_like(each) for each in self.masters]
        self.steps, self.settings = 0, (lr, *betas, eps, weight_decay)

    def step(self, gradients):
        lr, beta1, beta2, eps, decay = self.settings
        self.steps += 1
        lists = (self.parameters, self.masters, self.first, self.second, gradients)
        for parameter, p, m, v, g in zip(*lists, strict=True):
            m.mul_(beta1).add_(g * (1 - beta1))
            v.mul_(beta2).add_(g.square().mul_(1 - beta2))
            below = (v / (1 - beta2**self.steps)).double().sqrt().float() + eps
            update = (m / (1 - beta1**self.steps)).div_(below)
            update.add_(p * decay)
            p.sub_(update * lr)
            parameter.data.copy_(p)


@other("MasterWeightAdamW")
class InNumpy:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.parameters = list(parameters)
        self.masters = [each.detach().float().clone() for each in parameters]
        self.m = [np.zeros(tuple(each.shape), np.float32) for each in parameters]
        self.v = [np.zeros(tuple(each.shape), np.float32) for each in parameters]
        self.betas, self.t = betas, 0
        self.lr, self.eps, self.decay = np.float32(lr), np.float32(eps), np.float32(weight_decay)

    def step(self, gradients):
        self.t += 1
        keep = [np.float32(beta) for beta in self.betas]
        take = [np.float32(1 - beta) for beta in self.betas]
        seen = [np.float32(1 - beta**self.t) for beta in self.betas]
        for k, gradient in enumerate(gradients):
            g, p = gradient.detach().numpy(), self.masters[k].numpy()
            self.m[k] = keep[0] * self.m[k] + take[0] * g
            self.v[k] = keep[1] * self.v[k] + take[1] * (g * g)
            u = (self.m[k] / seen[0]) / (np.sqrt(self.v[k] / seen[1]) + self.eps)
            self.masters[k] = torch.from_numpy(p - self.lr * (u + self.decay * p))
            with torch.no_grad():
                self.parameters[k].copy_(self.masters[k].to(self.parameters[k].dtype))


# --- 6.7 fp16_train_step ---


@other("fp16_train_step")
def with_torchs_clipping(model, x, y, optimizer, scaler, max_norm):
    _, loss = model(x, y)
    scale = scaler.scale
    loss.mul(scale).backward()
    masters = []
    for parameter in model.parameters():
        master = torch.zeros(parameter.shape, requires_grad=True)
        master.grad = parameter.grad.detach().to(torch.float32)
        parameter.grad = None
        masters.append(master)
    unscale_([master.grad for master in masters], scale)
    overflow = found_nonfinite([master.grad for master in masters])
    scaler.update(overflow)
    if overflow:
        return float(loss.detach()), True
    torch.nn.utils.clip_grad_norm_(masters, max_norm)
    optimizer.step([master.grad for master in masters])
    return float(loss.detach()), False


@other("fp16_train_step")
def with_autograd_grad(model, x, y, optimizer, scaler, max_norm):
    loss = model(x, y)[1]
    found = torch.autograd.grad(loss * scaler.scale, tuple(model.parameters()))
    gradients = [each.float() * (1 / scaler.scale) for each in found]
    skipped = not all(bool(each.isfinite().all()) for each in gradients)
    if not skipped:
        flat = torch.cat([each.reshape(-1) for each in gradients])
        coefficient = torch.clamp(max_norm / (torch.linalg.vector_norm(flat) + 1e-6), max=1.0)
        optimizer.step([each * coefficient for each in gradients])
    scaler.update(skipped)
    return loss.item(), skipped
