# %% [markdown]
# # 06 · Loss scaling: why scale the loss before backward?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 03](03_accumulation.ipynb): master weights, lost updates. **Gives** you the loss scalers of PyTorch, Apex and Megatron, AdamW on master weights, and a GPT that you train in FP16 with them.
#
# The smallest number of FP16 is 2^-24, about 6e-8. What is smaller than half of that is rounded to zero, and a gradient of zero teaches nothing. How much of a GPT's gradient survives?

# %% tags=["setup"]
try:
    import math
    import warnings

    import torch

    from lowprec_lab import LossScaleExplorer, check, fill, plots, progress, question, reveal
    from lowprec_lab.data import load_corpus, step_generator
    from lowprec_lab.formats import BF16, FP16, FP32
    from lowprec_lab.gpt import GPT, GPTConfig, preset
    from lowprec_lab.instruments import Taps, underflow_fraction
    from lowprec_lab.long_runs import long_runs
    from lowprec_lab.loss_scaling import (
        ApexLossScaler,
        DynamicLossScaler,
        HysteresisLossScaler,
        MasterWeightAdamW,
        PartOfAStep,
        adamw_steps,
        found_nonfinite,
        fp16_train_step,
        gradients_taken,
        refused,
        round_layers,
        scales_after,
        scales_resumed,
        steps_told,
        unscale_,
        unscaled,
    )
    from lowprec_lab.precision import ConstantScale
    from lowprec_lab.reading import installed_lines
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %% [markdown]
# One batch goes forward and backward through a small GPT, twice: once in float32, and once with every linear layer rounding to FP16 whatever goes in and out of it, its gradients too. (`round_layers` does that, so that it works on any CPU. The products are added up in float32, as tensor cores do it.)
#
# A large run collects the gradients of many small batches before it takes a step. nanoGPT's GPT-2 has 491,520 tokens in a step. So each small batch contributes its *share*: its loss is multiplied by its tokens divided by all tokens, and its gradients are that much smaller.

# %%
torch.set_num_threads(1)  # the matrices are small: two threads would mostly wait for each other
corpus = load_corpus()
context, batch = 32, 12
share = context * batch / 491_520  # of a step with as many tokens as nanoGPT's GPT-2 has: 40 times 12 times 1024
print(f"this batch is 1/{1 / share:.0f} of a step")


def small_gpt(dtype=None):
    """The same untrained GPT every time, in float32 or with layers that round to a dtype."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(len(corpus.vocabulary), context, layers=2, heads=2, width=64))
    return PartOfAStep(model if dtype is None else round_layers(model, dtype), share)


def batch_of(step):
    return corpus.batch("train", step_generator(1, step), batch, context)


def gradients_of(model, scale=1.0):
    """The gradients of the first batch, with the loss multiplied by scale."""
    model.zero_grad()
    (model(*batch_of(0))[1] * scale).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def distance(gradients, exact):
    """How far gradients are from the exact ones, relative to the size of those."""
    squares = sum((g - e).double().square().sum() for g, e in zip(gradients, exact, strict=True))
    return float((squares / sum(e.double().square().sum() for e in exact)).sqrt())


exact = gradients_of(small_gpt())
for dtype in (torch.float16, torch.bfloat16):
    off = distance(gradients_of(small_gpt(dtype)), exact)
    print(f"{str(dtype).removeprefix('torch.'):9} the gradients are off by {off:7.2%} of their size")

# %% [markdown]
# FP16 has three mantissa bits more than BF16, and its gradients are far worse. The reason is not precision but range: most of what flows back is too small for it. Where does it disappear? Here are the gradients of the logits, which everything else is made of:

# %%
model = small_gpt()
x, y = batch_of(0)
logits, loss = model(x, y)
(flowing,) = torch.autograd.grad(loss, logits)
LossScaleExplorer(flowing, FP16)

# %% [markdown]
# The hill stands left of the shaded range, and most of what is there becomes 0. Before you drag the slider: by how many powers of two must the hill move until nothing is lost? And how far can it go until the first gradient is too large? Then choose BF16, and see why nobody scales there.
#
# There is room, because FP16 goes up to 65504. Multiply the *loss* by 2^16, and by the chain rule every gradient is multiplied by 2^16 on its way back. That is all there is to **loss scaling**
# ([Mixed Precision Training](https://arxiv.org/abs/1710.03740), section 3.2). The rest of this page is about undoing it correctly, and about finding the factor.
#
# **Words.** The factor is the **loss scale**, or just *scale*. Dividing the gradients by it is **unscaling**. A gradient that does not fit into FP16 becomes infinite: an **overflow**. A step with an overflow is *bad*, and is not taken (*skipped*); the others are *good*.
#
# ---
# ## Undo it, and look
#
# ### Exercise 6.1 · `unscale_` · 15 min · easy · 2 points
#
# After backward every gradient is `scale` times too large. The optimizer must not see that. The division happens in float32, because in FP16 it would undo everything: what was saved from rounding would be rounded now. So FP16 gradients are refused.
#
# | | |
# |---|---|
# | in | `gradients`: a list of float32 tensors, or None for a parameter that has no gradient; `scale`: float above 0 |
# | out | nothing; the tensors themselves are changed (that is what the `_` in the name says) |
# | mind | multiply by *one float32 number*, 1 / scale, as torch does; a `ValueError` for a float16 gradient (torch says "Attempting to unscale FP16 gradients."), before anything is changed |
#
# By hand, scale 3: 1 / 3 in float32 is 0.3333333433. A gradient of 5.0 becomes 5 * 0.3333333433 = 1.6666667163 exactly, and in float32 1.6666667461. The division 5 / 3 would have given 1.6666666269. With a power of two both are exact; scales are powers of two for a good reason.
#
# <details><summary>A nudge</summary><code>gradient = gradient * x</code> makes a new tensor. Who still holds the old one?</details>
# <details><summary>An approach</summary>First look through the whole list for float16. Then a loop with <code>mul_</code>, which skips None. A float of Python is rounded to float32 where it meets a float32 tensor.</details>


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

# %% [markdown]
# ### Exercise 6.2 · `found_nonfinite` · 15 min · easy · 2 points
#
# Was there an overflow? One infinite or NaN element in any gradient is enough. It is tempting to look at the sum of each gradient, since an infinity anywhere makes the sum infinite, or NaN where there are two of different signs. The fallback of NVIDIA's Apex did that.
#
# | | |
# |---|---|
# | in | `gradients`: a list of tensors, float32, float16 or bfloat16, or None |
# | out | `True` or `False`, a bool of Python |
# | mind | finite numbers are finite, whatever their sum or norm is; empty tensors and None have nothing in them |
#
# By hand, in float32, whose largest number is 3.4e38:
#
# | gradient | sum | right |
# |---|---|---|
# | 1, inf, 2 | inf | True |
# | 1, nan | nan | True |
# | 3e38, 3e38, 3e38, 3e38 | **inf** | **False** |
# | inf, -inf | nan | True |
#
# <details><summary>A nudge</summary>Which function of torch answers the question for each element? Which of <code>all</code> and <code>any</code> comes next?</details>
# <details><summary>An approach</summary><code>isfinite</code>, <code>all</code>, and a bool of it, for each gradient that is there.</details>


# %%
@fill
def found_nonfinite(gradients):
    ### BEGIN SOLUTION
    return any(not bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
    ### END SOLUTION


# %%
check(found_nonfinite)

# %% [markdown]
# **Predict first:** which scale is best? Too small, and gradients vanish; too large, and they overflow. How wide is the range in between, in powers of two? (The loss in float32 is multiplied by the scale; what flows back is FP16. The vertical axis is the distance from the float32 gradients, after `unscale_`.)

# %%
scales = [2.0**k for k in range(-4, 42, 2)]
curves = {FP16: [], BF16: []}
for fmt in curves:
    rounding = small_gpt(fmt.torch_dtype)
    for scale in scales:
        gradients = gradients_of(rounding, scale)
        unscale_(gradients, scale)
        curves[fmt].append(None if found_nonfinite(gradients) else distance(gradients, exact))
good = [scale for scale, off in zip(scales, curves[FP16], strict=True) if off is not None and off < 0.01]
overflow = next(scale for scale, off in zip(scales, curves[FP16], strict=True) if off is None)
print(
    f"FP16: less than 1 % off from 2^{math.log2(good[0]):.0f} to 2^{math.log2(good[-1]):.0f}, overflow at 2^{math.log2(overflow):.0f}"
)
with plots.style():
    picture, axes = plots.figure(9, 4)
    for fmt, errors in curves.items():
        there = [(scale, off) for scale, off in zip(scales, errors, strict=True) if off is not None]
        axes.loglog(*zip(*there, strict=True), color=plots.color_of(fmt), marker="o", markersize=4)
        axes.text(
            there[0][0],
            there[0][1] * 1.3,
            plots.short_name(fmt),
            color=plots.color_of(fmt),
            fontweight="bold",
            va="bottom",
        )
    axes.axvline(overflow, color=plots.color_of(FP16), linestyle="--", linewidth=1)
    axes.text(overflow * 1.4, max(curves[BF16]) * 5, "FP16 overflows", color=plots.color_of(FP16))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("loss scale (log2 axis)")
    axes.set_ylabel("relative error of the gradient")
    axes.set_title("What the scale does to the gradient")
picture

# %% [markdown]
# The line of BF16 is flat: it has the exponent range of float32, so a power of two more or less changes no digit. That is why BF16 needs no scale. FP16 has a wide valley with a cliff at its right end. Any scale in the valley will do, and the valley moves while a model learns, because gradients change their size. So people let the scale *look for the cliff*.
#
# ---
# ## Three rules for one number
#
# All three rules work the same way: go up when all has been well for some time, go down when there was an overflow. They differ in details that decide whether a run survives. The three classes share an interface: `scale` is what the next loss is multiplied by, and `update(found_inf)` is called after every step.
#
# ### Exercise 6.3 · `DynamicLossScaler` · 35 min · medium · 4 points
#
# PyTorch's rule, with a floor and a ceiling, which torch's own does not have. (You will see below why one may want a floor.)
#
# | | |
# |---|---|
# | in | the settings; then `update(found_inf)` with a bool, again and again |
# | out | the attribute `scale`, a float |
# | mind | a bad step starts the count of good ones anew; growth comes after `growth_interval` good steps *in a row* and starts the count anew, too; each product is rounded to float32 |
# | edges | not below `min_scale`, not above `max_scale`; where growth gives infinity in float32, the scale stays (the count begins again all the same) |
# | state | `state_dict()` gives a dict of numbers, and later steps do not change it; `load_state_dict(state)` goes on from it. The names in it are yours |
#
# By hand, scale 256, interval 3, the steps x . x . x . . . x x x (x is a bad one):
#
# | | x | . | x | . | x | . | . | . | x | x | x |
# |---|---|---|---|---|---|---|---|---|---|---|---|
# | good steps | 0 | 1 | 0 | 1 | 0 | 1 | 2 | 3, then 0 | 0 | 0 | 0 |
# | scale after it | 128 | 128 | 64 | 64 | 32 | 32 | 32 | **64** | 32 | 16 | 8 |
#
# <details><summary>A nudge</summary>Which two numbers change over time? They are the state; everything else is a setting.</details>
# <details><summary>An approach</summary>An <code>if</code> for the bad step and a return. Then count, compare, grow. <code>torch.tensor(product, dtype=torch.float32).item()</code> rounds a float to float32.</details>


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

# %% [markdown]
# ### Exercise 6.4 · `ApexLossScaler` · 20 min · easy · 2 points
#
# Apex was how one trained in FP16 before PyTorch could do it, and its rule lives on in many scripts. The differences are at the edges: a scale of more than 2^24 is never tried, a floor is optional, and the number is a float64 of Python.
#
# | | |
# |---|---|
# | in | `init_scale`, `scale_window`, `min_loss_scale` (None: no floor), `max_loss_scale`; then `update(found_inf)` |
# | out | the attribute `scale`, a float |
# | mind | the *first* scale is capped as well; growth doubles and then caps, so the cap itself is reached; no rounding to float32 |
#
# By hand, `init_scale=1024, scale_window=2, max_loss_scale=3000`, good steps only: 1024, 2048 after two, then 4096 would be too much: **3000** after four, and so it stays. One bad step: 1500.
#
# <details><summary>A nudge</summary>Which lines of 6.3 stay as they are?</details>
# <details><summary>An approach</summary><code>min</code> in the constructor and at growth; <code>max</code> at an overflow, with 0.0 for a floor that is None.</details>


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

# %% [markdown]
# ### Exercise 6.5 · `HysteresisLossScaler` · 30 min · medium · 3 points
#
# One overflow may be an accident: a strange batch, and the next hundred are fine. Megatron-LM does not halve the scale at once. It has patience for a number of overflows (`hysteresis`, 2 by default), and only when that is used up does the scale fall.
#
# | | |
# |---|---|
# | in | the settings; then `update(found_inf)` |
# | out | the attribute `scale`, a float |
# | mind | every bad step costs one patience and starts the count of good steps anew; at 0 patience *and below* the scale falls, at least to `min_scale`; only growth refills the patience |
#
# By hand, the trace of 6.3 again, interval 3, hysteresis 2, floor 1:
#
# | | x | . | x | . | x | . | . | . | x | x | x |
# |---|---|---|---|---|---|---|---|---|---|---|---|
# | patience | 1 | 1 | 0 | 0 | -1 | -1 | -1 | **2** | 1 | 0 | -1 |
# | scale after it | 256 | 256 | 128 | 128 | 64 | 64 | 64 | **128** | 128 | 64 | 32 |
#
# Megatron's own docstring speaks of *consecutive* overflows. Its code does not ask for that, as the third step shows. (Apex has a kernel that does: there every good step refills the patience. On this trace its scale would stay at 256 until it doubles.)
#
# <details><summary>A nudge</summary>After the scale has fallen, is the patience refilled? Look at the fifth column.</details>
# <details><summary>An approach</summary>Start from 6.3 and add one number. It goes down in the bad branch and back up in exactly one place.</details>


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

# %% [markdown]
# **Predict first:** a run whose cliff is at 2^14, and where one step in forty has a strange batch that overflows whatever the scale is. Which of the three scales is highest on average, and which scaler skips most steps?

# %%
torch.manual_seed(3)
strange = torch.rand(400) < 1 / 40
scalers = {
    "torch": DynamicLossScaler(2.0**16, growth_interval=20),
    "Apex": ApexLossScaler(2.0**16, scale_window=20),
    "Megatron": HysteresisLossScaler(2.0**16, growth_interval=20),
}
with plots.style():
    picture, axes = plots.figure(9, 4.6, rows=3, sharex=True)
    for row, (name, scaler), color in zip(axes, scalers.items(), ("#C24E00", "#007A5A", "#332288"), strict=True):
        trace, skipped = [], 0
        for odd in strange.tolist():
            bad = odd or scaler.scale > 2.0**14
            trace.append(math.log2(scaler.scale))
            skipped += bad
            scaler.update(bad)
        print(f"{name:9} mean of log2(scale) {sum(trace) / len(trace):5.2f}, {skipped} of {len(trace)} steps skipped")
        row.plot([0, len(trace)], [14, 14], color="#7A7A7A", linewidth=1, linestyle="--")
        row.step(range(len(trace)), trace, where="post", color=color, linewidth=1.4)
        row.set_ylabel("log2(scale)")
        row.set_ylim(7.5, 16.5)
        row.set_yticks(range(8, 17, 2))
        row.text(len(trace) + 5, 14, name, color=color, fontweight="bold", va="center")
    axes[-1].set_xlabel("step      dashed: above it gradients overflow")
    axes[0].set_title("Saw-teeth")
picture

# %% [markdown]
# The scale climbs until it falls off the cliff, is halved, and climbs again: a saw-tooth. Each tooth costs a skipped step, so real runs wait 1,000 or 2,000 good steps and not 20. torch and Apex draw the same line here, because this run never comes near Apex's cap. Megatron stays higher, and pays for it: a scale that is too high is tried more often.
#
# ---
# ## The optimizer
#
# ### Exercise 6.6 · `MasterWeightAdamW` · 45 min · hard · 4 points
#
# With FP16 weights the update gets lost, as you know from chapter 03. Hence master weights; but now with the optimizer that everybody uses. Apex and Megatron do it in one fused kernel, entirely in float32, and their arithmetic is what you write here: the contract fixes the order of operations, and so every bit.
#
# | | |
# |---|---|
# | in | `parameters`: a list of float16 (or float32) tensors; `lr`, `betas`, `eps`, `weight_decay`; then `step(gradients)` with float32 gradients, unscaled |
# | out | nothing: the attribute `masters` (float32) changes, and so do the parameters themselves, which become the rounded masters |
# | mind | `m` and `v` are float32 and start at 0; t counts the calls of `step` and begins at 1; the decay is added to the *update*, not to the gradient |
# | bits | each operation is rounded by itself: `addcmul_`, `lerp_` and `add(..., alpha=...)` may round twice in one |
#
# ```
# m = beta1 * m + (1 - beta1) * g
# v = beta2 * v + (1 - beta2) * (g * g)
# u = (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)
# u = u + weight_decay * p
# p = p - lr * u
# ```
#
# By hand, the first step with g = 0.5 and p = 1, betas 0.9 and 0.999, eps 1e-8, no decay, lr 0.001: m = 0.05 and v = 0.00025. The corrections turn them into 0.5 and 0.25. So u = 0.5 / (0.5 + 1e-8) = 1 (nearly), and p = 0.999. Whatever g is, the first update is the learning rate: that is Adam.
#
# **One trap is torch's own.** Run the next cell before you take a square root.

# %%
numbers = torch.rand(100_000, generator=torch.Generator().manual_seed(2)) + 1e-3
nearest = numbers.double().sqrt().float()
print(
    f"torch.sqrt of float32 is not the nearest float32 for {float((numbers.sqrt() != nearest).float().mean()):.1%} of 100,000 numbers"
)

# %% [markdown]
# IEEE 754 asks for the nearest. Some CPU builds of torch take their square roots from a vector library that may be off by one ulp (yours may print 0). The contract wants the nearest on every machine: take the root in float64, and round it to float32.
#
# <details><summary>A nudge</summary>Which tensors must live from one step to the next? There are three for each parameter, and none of them is float16.</details>
# <details><summary>An approach</summary>Make masters and moments in the constructor: <code>detach().to(torch.float32, copy=True)</code>, so that a float32 parameter gets a copy too. In <code>step</code> write the five lines as they stand, then <code>parameter.copy_(master)</code>, which rounds.</details>


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
        for k, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            p, (m, v) = self.masters[k], self.moments[k]
            m = beta1 * m + (1 - beta1) * gradient
            v = beta2 * v + (1 - beta2) * (gradient * gradient)
            root = (v / (1 - beta2**self.t)).double().sqrt().float()  # torch.sqrt of float32 may be off by an ulp
            u = (m / (1 - beta1**self.t)) / (root + self.eps)
            u = u + self.weight_decay * p
            self.masters[k], self.moments[k] = p - self.lr * u, (m, v)
            parameter.copy_(self.masters[k])  # rounds to the parameter's dtype
        ### END SOLUTION


# %%
check(MasterWeightAdamW)

# %% [markdown]
# **Predict first:** a thousand steps with a learning rate of 1e-5, on weights of 1.0 in FP16, and gradients that are always 1. Where do they arrive with masters, where without? (1 - 1000 * 1e-5 = 0.99. The step of FP16 just below 1 is 2^-11, about 0.0005.)

# %%
with_masters, without = (torch.ones(4, dtype=torch.float16) for _ in range(2))
optimizer = MasterWeightAdamW([with_masters], lr=1e-5, weight_decay=0.0)
for _ in range(1000):
    optimizer.step([torch.ones(4)])
    without = (without.float() - 1e-5).half()
print("with float32 masters:", with_masters.tolist())
print("FP16 weights alone:  ", without.tolist())

# %% [markdown]
# ---
# ## A step, in the right order
#
# ### Exercise 6.7 · `fp16_train_step` · 40 min · medium · 4 points
#
# Now everything together. Each of these seven things is easy. What goes wrong in practice is their order.
#
# | | |
# |---|---|
# | 1 | forward, then `loss * scale`, and backward |
# | 2 | the gradients in float32, unscaled |
# | 3 | is one of them not finite? Then no step |
# | 4 | else clip: with `norm` the square root of the sum of *all* squares, multiply all by `max_norm / (norm + 1e-6)` where that is below 1 |
# | 5 | `optimizer.step(gradients)` |
# | 6 | `scaler.update(found)`, after good and bad steps |
# | 7 | no parameter keeps a gradient |
#
# `model(x, y)` returns `(logits, loss)`. Return `(loss, skipped)`: the loss as a float, without the scale, and a bool.
#
# By hand, two parameters with the gradients (3, 4) and (12), scale 1024, max_norm 6.5: backward leaves (3072, 4096) and (12288), unscaled (3, 4) and (12). Their norm is 13, so all are halved (nearly: 6.5 / 13.000001). Clipped *before* unscaling, the norm would have been 13312, and the optimizer would have got gradients of norm 0.006.
#
# <details><summary>A nudge</summary>Which of the seven does a skipped step still need?</details>
# <details><summary>An approach</summary>Take <code>parameter.grad.float()</code> of all parameters into a list, clear the model's gradients, and go on with the list alone. You have written 2, 3, 5 and 6 already.</details>


# %%
@fill
def fp16_train_step(model, x, y, optimizer, scaler, max_norm):
    ### BEGIN SOLUTION
    logits, loss = model(x, y)
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

# %% [markdown]
# ## The run
#
# **Predict first:** the same GPT, the same 300 batches, six ways. Which of them learn? The share of a step is still 1/1280, as in a run of nanoGPT's GPT-2, and Adam does not mind how large gradients are: it divides by their size. Do not expect much of 300 steps; look at the differences.
#
# - float32, and BF16 without a scale
# - FP16 *naive*: no scale
# - FP16 with a static scale of 2^10, and with one of 2^28, which is beyond the cliff at times
# - FP16 with your `DynamicLossScaler`, which begins at 2^30, too high for the first steps, and tries a higher one every 25 good steps


# %%
def train(dtype, scaler, steps=300):
    """(losses, scales, number of skipped steps) of a short run."""
    model = small_gpt(dtype)
    optimizer = MasterWeightAdamW(list(model.parameters()), lr=3e-3, betas=(0.9, 0.99), eps=1e-12)
    losses, scales, skipped = [], [], 0
    for step in range(steps):
        scales.append(scaler.scale)
        loss, bad = fp16_train_step(model, *batch_of(step), optimizer, scaler, max_norm=1.0)
        losses.append(loss / share)
        skipped += bad
    return losses, scales, skipped


runs = {
    "float32": (FP32, None, ConstantScale(1.0)),
    "BF16, no scale": (BF16, torch.bfloat16, ConstantScale(1.0)),
    "FP16, naive": (FP16, torch.float16, ConstantScale(1.0)),
    "FP16, static 2^10": (FP16, torch.float16, ConstantScale(2.0**10)),
    "FP16, static 2^28": (FP16, torch.float16, ConstantScale(2.0**28)),
    "FP16, dynamic": (FP16, torch.float16, DynamicLossScaler(2.0**30, growth_interval=25)),
}
results = {name: train(dtype, scaler) for name, (_, dtype, scaler) in runs.items()}
final = {name: sum(losses[-50:]) / 50 for name, (losses, _, _) in results.items()}
for name, (_, _, skipped) in results.items():
    print(f"{name:18} mean loss of the last 50 steps {final[name]:.3f}   skipped {skipped:3}")

# %%
styles = {"FP16, naive": "--", "FP16, static 2^28": ":", "FP16, static 2^10": "-."}


def smooth(values, over=25):
    return [sum(values[max(0, k - over) : k + 1]) / len(values[max(0, k - over) : k + 1]) for k in range(len(values))]


with plots.style():
    picture, (above, below) = plots.figure(9, 6.4, rows=2, sharex=True)
    place = -math.inf
    for name in sorted(final, key=lambda name: smooth(results[name][0])[-1]):
        line = smooth(results[name][0])
        color = plots.color_of(runs[name][0])
        above.plot(line, color=color, linestyle=styles.get(name, "-"), linewidth=1.5)
        place = max(line[-1], place + 0.13)  # beside the end of its line, or above the label below
        above.text(304, place, name, color=color, va="center", fontsize=9, fontweight="bold")
    above.set_ylabel("loss (mean of 25 steps)")
    above.set_ylim(2.3, 4.6)
    above.set_xlim(0, 370)
    above.set_title("Six runs of the same GPT")
    scales = results["FP16, dynamic"][1]
    below.step(range(len(scales)), [math.log2(scale) for scale in scales], where="post", color=plots.color_of(FP16))
    below.set_ylabel("log2(scale)")
    below.set_yticks(range(round(math.log2(min(scales))), round(math.log2(max(scales))) + 1))
    below.set_xlabel("step")
    below.text(
        304,
        math.log2(scales[-1]),
        "FP16, dynamic",
        color=plots.color_of(FP16),
        va="center",
        fontsize=9,
        fontweight="bold",
    )
picture

# %% [markdown]
# The naive run learns how often each character comes, within a hundred steps, and then nothing more; it even gets worse. Of the gradients of the logits only the few largest survive, those of the right tokens, and the model never hears which tokens were wrong. Scaled by anything in the valley, FP16 learns as float32 does. With 2^28 many steps are skipped while gradients are large, and that time is lost. The dynamic scale needs a few bad steps to come down,
# and then draws its saw-tooth. BF16 runs without any of this. (The runs that learn differ in the second digit; that is the noise of so short a run. Another seed orders them otherwise.)
#
# ## The long run
#
# Does that survive 2,000 steps of a real run? A batch of the `baby` GPT has 768 tokens, and the step of nanoGPT's GPT-2 640 times as many. Before anybody spends an hour on it: the instruments of [chapter 05](05_instruments.ipynb) say beforehand what to expect. The model learns for 50 steps in float32; then `Taps` watches what flows back to its layers, and `underflow_fraction` says
# which share of it FP16 would turn into zero: if the batch is the whole step, if it is one of 40, one of 640, and one of 640 under the scale with which torch's scaler begins.
#
# **Predict first:** which layers suffer most? Look back at the heat map of chapter 05 if you like.

# %%
torch.manual_seed(1)
baby = GPT(preset("baby", vocab_size=len(corpus.vocabulary)))
optimizer = torch.optim.AdamW(baby.parameters(), lr=1.5e-3)


def baby_loss(step):
    return baby(*corpus.batch("train", step_generator(1, step), 12, 64))[1]


for step in range(50):
    optimizer.zero_grad()
    baby_loss(step).backward()
    optimizer.step()

layers = ["head", *(f"blocks.{block}.{layer}" for block in (3, 0) for layer in ("mlp.up", "mlp.down", "attention.qkv"))]
with Taps(baby, layers) as taps:
    baby_loss(50).backward()
factors = {"whole step": 1, "1/40": 1 / 40, "1/640": 1 / 640, "65536/640": 65536 / 640}
print(f"{'lost in FP16':24}" + "".join(f"{name:>12}" for name in factors))
for layer in layers:
    lost = [underflow_fraction(taps.gradients[layer][0], FP16, factor) for factor in factors.values()]
    print(f"{layer:24}" + "".join(f"{fraction:12.1%}" for fraction in lost))

# %% [markdown]
# Where the batch is the whole step FP16 loses little, and a run needs no scaler. As one of 640 it loses nearly all that flows into the layers that widen (`mlp.up`, `attention.qkv`), and most of what flows into the head. The scale brings all of it back.
#
# These fifteen runs take about an hour, so here is a recording: five ways to train, three seeds each, the same batches for all runs of a seed. `1/640 of a step` means that the loss is multiplied by 1/640 before backward, and gradients by 640 after it: what each of 640 batches does to FP16, for the price of one. *Scaled* means 65536 on top, where torch's scaler begins, and where it stays for its first 2,000 good steps.

# %%
recorded = long_runs("06_loss_scaling")
print(f"{recorded.made_with['text']}, {recorded.made_with['steps']} steps")
print(recorded.table("float32"))
recorded.plot("The baby GPT: five ways, three seeds", highest=4.2)

# %%
naive = recorded.finals("FP16, 1/640 of a step, naive")
gap, error = recorded.gap("FP16, 1/640 of a step, scaled", "float32")
print(
    f"Naive FP16 in a step of 640 batches ends at {min(naive.values()):.2f} or above; with a scale it is {gap:+.2%} (± {error:.2%}) from float32."
)
known = recorded.made_with
print(
    f"A model that knows nothing has {known['knowing_nothing']:.2f}; one that knows how often each character comes, {known['knowing_frequencies']:.2f}."
)

# %% [markdown]
# The naive runs learn roughly how often each character comes, which is what the few large gradients tell. One gets a little further, and loses it again. None gives an error, and the loss is always finite: who does not compare sees a model that is bad at reading. That is what makes underflow worse than overflow, which at least shouts. The runs with a scale, and the BF16 runs without one, end within a fraction of a percent of float32.
#
# All of it again, in a terminal: `lowprec-lab record 06` (what was stopped goes on). One of them: `lowprec-lab train --preset baby --precision fp16 --loss-scale 1/640`. With your own `DynamicLossScaler`, once it is saved: `lowprec-lab train --preset baby --precision fp16`. `lowprec-lab compare` draws runs next to each other.
#
# ---
# ## Read the real code
#
# You have written what `torch.amp.GradScaler` does. Here is its `unscale_`:

# %%
SCALER = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py"
print(installed_lines("torch", "amp/grad_scaler.py", "FP32 division can be imprecise", after=16, link=SCALER))

# %% [markdown]
# **6.A** With how many bits does it work out 1 / scale?

# %%
question(
    "6.A",
    ### BEGIN SOLUTION
    64,
    ### END SOLUTION
)

# %%
print(installed_lines("torch", "amp/grad_scaler.py", "def _maybe_opt_step", after=12, link=SCALER))
print()
print(installed_lines("torch", "amp/grad_scaler.py", "Consume shared inf/nan data", after=22, link=SCALER))

# %% [markdown]
# **6.B** A GAN has two optimizers and one scaler. The gradients of the first overflow, those of the second are fine. Is the step of the *second* skipped too? (`True` or `False`.)

# %%
question(
    "6.B",
    ### BEGIN SOLUTION
    False,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## Break it
#
# Four ways in which loss scaling fails, from public reports. Each cell shows the failure itself, in torch.
#
# **The scale falls for ever.** "Gradient overflow. Skipping step, loss scale reducing to 0.0": chapter 05 looked for the layer; here is the scaler's side. These gradients are NaN for a reason of their own, the square root of 0 in a norm, and no scale can help:

# %%
weight = torch.nn.Parameter(torch.zeros(3))
optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
scales = []
for _ in range(200):
    optimizer.zero_grad()
    loss = (weight**2).sum().sqrt()
    scaler.scale(loss).backward()  # the derivative of sqrt at 0 is infinite; times 0 it is NaN
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
print("after 10, 100 and 200 steps:", *(scales[k - 1] for k in (10, 100, 200)))
print("the gradient:", weight.grad.tolist(), " the weights, never changed:", weight.tolist())
print("with a floor:", scales_after(DynamicLossScaler, "x" * 200, 2.0**16, 2.0, 0.5, 2000, 1.0)[-1])

# %% [markdown]
# A scale of 1 that still overflows tells you that the *gradients* are broken. A floor keeps that visible; the cure is to find the operation. `torch.autograd.set_detect_anomaly(True)` names the first one whose backward gives a NaN, which is not always the one at fault:

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with torch.autograd.detect_anomaly():
        try:
            (weight**2).sum().sqrt().backward()
        except RuntimeError as error:
            print(error)

# %% [markdown]
# The root of 0 has an infinite slope. That is no NaN yet: the square, one operation earlier in the model and the next one in backward, multiplies it by 2 * 0, and 0 times infinity is. So look at what is named, and at what came out of the operation behind it.
#
# **6.C** From a scale of 2^16, and without a floor: after how many bad steps in a row is the scale 0? (The smallest float32 is 2^-149. What is half of it, rounded? Try `scales_after` in a cell of your own.)

# %%
question(
    "6.C",
    ### BEGIN SOLUTION
    166,
    ### END SOLUTION
)

# %% [markdown]
# **Clipped before it is unscaled** ([pytorch#40907](https://github.com/pytorch/pytorch/issues/40907), [examples#1196](https://github.com/pytorch/examples/issues/1196)). No error, and a run that crawls:

# %%
for order in ("clip, then unscale", "unscale, then clip"):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale((weight * torch.tensor([0.1, 0.2, 0.2])).sum()).backward()
    if order.startswith("unscale"):
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
    scaler.step(optimizer)  # unscales, if that has not been done
    print(f"{order}: the optimizer saw a norm of {float(weight.grad.norm()):.2e}")

# %% [markdown]
# The norm is 0.3, and should not have been clipped at all.
#
# **6.D** With a scale of 2^16 and `max_norm=1.0` in the wrong order, the norm that the optimizer sees is at most 2 to the power of ... what? (A whole number.)

# %%
question(
    "6.D",
    ### BEGIN SOLUTION
    -16,
    ### END SOLUTION
)

# %% [markdown]
# **"Attempting to unscale FP16 gradients."** ([bitsandbytes#945](https://github.com/bitsandbytes-foundation/bitsandbytes/issues/945)) comes when the *model* was made FP16 with `model.half()`. `GradScaler` wants float32 weights and autocast: then the gradients arrive in float32. It has no masters to put the update into. With FP16 weights you need what you built, a float32 copy of gradients and weights.

# %%
model = torch.nn.Linear(2, 1).half()
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
scaler.scale(model(torch.ones(1, 2).half()).float().sum()).backward()
try:
    scaler.step(optimizer)
except ValueError as error:
    print(type(error).__name__ + ":", error)
parameters = list(model.parameters())
gradients = [parameter.grad.float() for parameter in parameters]
unscale_(gradients, scaler.get_scale())
MasterWeightAdamW(parameters).step(gradients)
print("in float32:", [gradient.flatten().tolist() for gradient in gradients])

# %% [markdown]
# **`GradScaler()` on a machine without a GPU** does nothing at all. The default device is "cuda"; where there is none it warns once, disables itself, and every method becomes a no-op: losses are not scaled, and overflows are not skipped. Write `torch.amp.GradScaler("cpu")`.

# %%
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    scaler = torch.amp.GradScaler()
print(f"enabled: {scaler.is_enabled()}   scale(1.0) = {float(scaler.scale(torch.tensor(1.0))):g}")
print("\n".join(str(each.message) for each in heard) or "no warning: this machine has a GPU")
print(f"with 'cpu': scale(1.0) = {float(torch.amp.GradScaler('cpu').scale(torch.tensor(1.0))):g}")

# %% [markdown]
# ---
# ## What you built
#
# A way to train in 16 bits on hardware that has FP16 and no BF16, and an answer to the question of the title: because the loss is where one multiplication reaches every gradient. Three points to take along:
#
# - A scale buys *range*, not precision. BF16 has the range built in, and needs none.
# - The scale may be wrong at any time. What makes that harmless is the check, and the skipped step.
# - Order: scale, backward, unscale, check, clip, step, update.
#
# FP8 has less range than FP16. One scale for the whole model will not do there: each tensor gets its own. That is where part 3 begins.

# %%
progress()
