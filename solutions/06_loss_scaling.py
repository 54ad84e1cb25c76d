# %% [markdown]
# # 06 · Loss scaling: why multiply the loss before backward?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 03](03_accumulation.ipynb): master weights; chapters 04 and 05 help. **Gives** you the loss scalers of PyTorch, Apex and Megatron, AdamW on master weights, and a GPT that you train in FP16 with them.
#
# The smallest number of FP16 is 2^-24, about 6e-8. Gradients of a language model are often smaller, and a gradient that is rounded to zero teaches nothing. What happens when you multiply the loss by 65,536, and divide the gradients by it afterwards?

# %% tags=["setup"]
try:
    import math

    import torch

    from lowprec_lab import check, fill, plots, progress, question, reveal
    from lowprec_lab.formats import BF16, E5M2, FP16, FP32
    from lowprec_lab.loss_scaling import (
        ApexLossScaler,
        DynamicLossScaler,
        HysteresisLossScaler,
        MasterWeightAdamW,
        adamw_steps,
        found_nonfinite,
        fp16_train_step,
        gradients_taken,
        refused,
        scales_after,
        scales_resumed,
        steps_told,
        unscale_,
        unscaled,
    )
    from lowprec_lab.reading import installed_lines
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None


# %%
@fill
def unscale_(gradients, scale):
    ### BEGIN SOLUTION
    there = [gradient for gradient in gradients if gradient is not None]
    if any(gradient.dtype == torch.float16 for gradient in there):
        raise ValueError("Attempting to unscale FP16 gradients.")
    for gradient in there:
        gradient.mul_(1 / scale)  # a float of Python is rounded to float32 where it meets a float32 tensor
    ### END SOLUTION


# %%
check(unscale_)


# %%
@fill
def found_nonfinite(gradients):
    ### BEGIN SOLUTION
    return any(not bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
    ### END SOLUTION


# %%
check(found_nonfinite)


# %%
@fill
class DynamicLossScaler:
    def __init__(
        self,
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        min_scale=0.0,
        max_scale=math.inf,
    ):
        ### BEGIN SOLUTION
        self.scale, self.good_steps = init_scale, 0
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.min_scale, self.max_scale = min_scale, max_scale
        ### END SOLUTION

    def update(self, found_inf):
        ### BEGIN SOLUTION
        if found_inf:
            self.scale = max(self._times(self.backoff_factor), self.min_scale)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            grown = self._times(self.growth_factor)
            if math.isfinite(grown):
                self.scale = min(grown, self.max_scale)
            self.good_steps = 0
        ### END SOLUTION

    def state_dict(self):
        ### BEGIN SOLUTION
        return {"scale": self.scale, "good_steps": self.good_steps}
        ### END SOLUTION

    def load_state_dict(self, state):
        ### BEGIN SOLUTION
        self.scale, self.good_steps = state["scale"], state["good_steps"]

    def _times(self, factor):
        return torch.tensor(self.scale * factor, dtype=torch.float32).item()
        ### END SOLUTION


# %%
check(DynamicLossScaler)


# %%
@fill
class ApexLossScaler:
    def __init__(self, init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
        ### BEGIN SOLUTION
        self.scale, self.good_steps = min(init_scale, max_loss_scale), 0
        self.scale_window, self.max_loss_scale = scale_window, max_loss_scale
        self.min_loss_scale = 0.0 if min_loss_scale is None else min_loss_scale
        ### END SOLUTION

    def update(self, found_inf):
        ### BEGIN SOLUTION
        self.good_steps = 0 if found_inf else self.good_steps + 1
        if found_inf:
            self.scale = max(self.scale / 2, self.min_loss_scale)
        elif self.good_steps == self.scale_window:
            self.scale, self.good_steps = min(self.scale * 2, self.max_loss_scale), 0
        ### END SOLUTION


# %%
check(ApexLossScaler)


# %%
@fill
class HysteresisLossScaler:
    def __init__(
        self,
        init_scale=2.0**32,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=1000,
        min_scale=1.0,
        hysteresis=2,
    ):
        ### BEGIN SOLUTION
        self.scale, self.good_steps, self.patience = init_scale, 0, hysteresis
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.min_scale, self.hysteresis = min_scale, hysteresis
        ### END SOLUTION

    def update(self, found_inf):
        ### BEGIN SOLUTION
        if found_inf:
            self.good_steps = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps, self.patience = self.scale * self.growth_factor, 0, self.hysteresis
        ### END SOLUTION


# %%
check(HysteresisLossScaler)


# %%
@fill
class MasterWeightAdamW:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        ### BEGIN SOLUTION
        self.parameters = list(parameters)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.masters = [each.detach().to(torch.float32, copy=True) for each in self.parameters]
        self.moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in self.masters]
        self.t = 0
        ### END SOLUTION

    @torch.no_grad()
    def step(self, gradients):
        ### BEGIN SOLUTION
        beta1, beta2 = self.betas
        self.t += 1
        for k, (parameter, g) in enumerate(zip(self.parameters, gradients, strict=True)):
            p, (m, v) = self.masters[k], self.moments[k]
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * (g * g)
            root = (v / (1 - beta2**self.t)).double().sqrt().float()  # torch.sqrt of float32 may be off by an ulp
            u = (m / (1 - beta1**self.t)) / (root + self.eps)
            u = u + self.weight_decay * p
            self.masters[k], self.moments[k] = p - self.lr * u, (m, v)
            parameter.copy_(self.masters[k])  # rounds to the parameter's dtype
        ### END SOLUTION


# %%
check(MasterWeightAdamW)


# %%
@fill
def fp16_train_step(model, x, y, optimizer, scaler, max_norm):
    ### BEGIN SOLUTION
    loss = model(x, y)[1]
    (loss * scaler.scale).backward()
    gradients = [parameter.grad.float() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    unscale_(gradients, scaler.scale)
    skipped = found_nonfinite(gradients)
    if not skipped:
        norm = sum(gradient.double().square().sum() for gradient in gradients).sqrt()
        factor = min(1.0, max_norm / (float(norm) + 1e-6))
        optimizer.step([gradient * factor for gradient in gradients])
    scaler.update(skipped)
    return loss.item(), skipped
    ### END SOLUTION


# %%
check(fp16_train_step)
