# %% [markdown]
# # 05 · Instruments: which numbers would a format lose?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 02](02_rounding.ipynb): `round_to`, ties, overflow; [chapter 03](03_accumulation.ipynb): why sums of squares want a wide accumulator. **Gives** you gauges for tensors, gradients and whole models, and a
# recording of a training run that says, before you change any format, what the change would cost.
#
# Somebody tells you that training in 16 bits "lost the gradients". Here is a GPT that has learned nothing yet, and the gradients of one of its layers. Are there numbers in it that FP16 would turn into zero? How many?

# %% tags=["setup"]
try:
    import json
    import math
    import time

    import numpy as np
    import torch
    from IPython.display import display
    from torch.nn import functional as F
    from tqdm.auto import tqdm

    from lowprec_lab import check, fill, plots, progress, question, reveal
    from lowprec_lab.bits import bit_pattern, max_finite, min_normal, min_subnormal, ulp
    from lowprec_lab.data import load_corpus, step_generator
    from lowprec_lab.formats import BF16, E2M3, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FP16, FP32, TF32, Format
    from lowprec_lab.gpt import GPT, preset
    from lowprec_lab.instruments import (
        Taps,
        exponent_histogram,
        gradient_norm,
        gradient_through,
        norm_of,
        overflow_fraction,
        ratio_of,
        row_lengths,
        tapped,
        tensor_report,
        underflow_fraction,
        update_ratio,
    )
    from lowprec_lab.reading import installed_lines
    from lowprec_lab.rounding import round_to
    from lowprec_lab.workspace import work_folder
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %%
corpus = load_corpus()
SIZE = preset("baby", vocab_size=len(corpus.vocabulary))
torch.manual_seed(5)
model = GPT(SIZE)
x, y = corpus.batch("train", step_generator(5, 0), batch=12, context=SIZE.context)
logits, loss = model(x, y)
loss.backward()
gradient = model.blocks[0].mlp.up.weight.grad
print(f"{model.size():,} weights; loss {loss.item():.4f}, in {loss.dtype}")
print(
    f"gradient of blocks.0.mlp.up: smallest {gradient.abs().min():.4f}, mean {gradient.abs().mean():.4f}, largest {gradient.abs().max():.4f}"
)

# %% [markdown]
# Four decimals, as everybody prints them, and nearly nothing is left to see. 0.0000 may be a tenth of a thousandth, or a billionth, or really zero, and to a format these are three different things. A mean says even less: it is made by the large ones.
#
# **Words.** A number **underflows** in a format when it is not zero and is rounded to zero. It **overflows** when it lies beyond the largest value. The numbers from 2^e up to 2^(e + 1) are a **binade**, and e is their exponent. An **activation** is what comes out of a layer on the way forward; a **gradient** is what comes back.
#
# What a format keeps of a tensor is decided by exponents. So the first instrument counts them.


# %% tags=["helpers"]
# Your helpers: functions that more than one of your answers on this page uses.
def scaled_magnitudes(x, scale):
    """What underflow_fraction and overflow_fraction count: |x| * scale in float32, of what is finite and not zero."""
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"a scale is finite and above zero, not {scale!r}")
    x = x.float().reshape(-1)
    return (x[x.isfinite() & (x != 0)] * scale).abs()


# %% [markdown]
# ---
# ## What a format would lose
#
# ### Exercise 5.1 · `exponent_histogram` · 25 min · medium · 3 points
#
# How many numbers lie in each binade? The histogram of exponents is the one picture that decides about a format: lay the format's range over it, and read off what falls out at either end. Micikevicius et al. drew it for gradients in 2017 ([Mixed Precision Training](https://arxiv.org/abs/1710.03740), figure 3), and loss scaling was the answer.
#
# | | |
# |---|---|
# | in | `x`: float32, bfloat16 or float16 tensor of any shape |
# | out | int64 tensor (277,): place k counts exponent k - 149, from -149 to 127 |
# | mind | zeros, infinities and NaNs are counted nowhere; a subnormal has the exponent of its value; just below a power of two, `log2` in float32 is wrong |
#
# By hand:
#
# | x | 2^e <= \|x\| < 2^(e + 1) | place |
# |---|---|---|
# | -1.5 | e = 0 | 149 |
# | 0.9999999 | e = -1 (log2 in float32 gives -1.2e-7, in float16 gives 0) | 148 |
# | 2.8e-7 | e = -22 | 127 |
# | 2^-149, the smallest float32 | e = -149, though its exponent field is that of 2^-126 | 0 |
# | 0.0, inf | none | |
#
# <details><summary>A nudge</summary>Where do the 8 bits of the exponent stand in the int32 of a float32, and what is in them for a subnormal?</details>
# <details><summary>An approach</summary>Every float32 is a normal number in float64. So <code>torch.frexp(x.double())</code> gives exact exponents, for subnormals too. But look up where its fraction begins: at 0.5, not at 1. <code>torch.bincount(..., minlength=277)</code> counts.</details>


# %%
@fill
def exponent_histogram(x):
    ### BEGIN SOLUTION
    x = x.double().reshape(-1)  # there every float32 is a normal number
    exponents = torch.frexp(x[x.isfinite() & (x != 0)]).exponent.long() - 1  # frexp's fraction begins at 1/2
    return torch.bincount(exponents + 149, minlength=277)
    ### END SOLUTION


# %%
check(exponent_histogram)

# %% [markdown]
# ### Exercise 5.2 · `underflow_fraction` · 25 min · medium · 3 points
#
# PLACEHOLDER


# %%
@fill
def underflow_fraction(x, fmt, scale=1.0):
    ### BEGIN SOLUTION
    counted = scaled_magnitudes(x, scale)
    lost = round_to(counted, fmt) == 0
    return int(lost.sum()) / counted.numel() if counted.numel() else 0.0
    ### END SOLUTION


# %%
check(underflow_fraction)

# %% [markdown]
# ### Exercise 5.3 · `overflow_fraction` · 25 min · medium · 3 points
#


# %%
@fill
def overflow_fraction(x, fmt, scale=1.0):
    ### BEGIN SOLUTION
    counted = scaled_magnitudes(x, scale).double()
    largest = max_finite(fmt)
    step = ulp(torch.tensor(largest), fmt)
    steps = (counted / step).round()  # a whole number of steps; ties to the even one
    return int((steps > largest / step).sum()) / counted.numel() if counted.numel() else 0.0
    ### END SOLUTION


# %%
check(overflow_fraction)

# %% [markdown]
# ### Exercise 5.4 · `tensor_report` · 15 min · easy · 2 points


# %%
@fill
def tensor_report(x):
    ### BEGIN SOLUTION
    sizes = x.double().abs()
    nonzero = sizes[sizes.isfinite() & (sizes != 0)]
    smallest, largest = (nonzero.min().item(), nonzero.max().item()) if nonzero.numel() else (0.0, 0.0)
    return smallest, largest, int((x == 0).sum()), int((~x.isfinite()).sum())
    ### END SOLUTION


# %%
check(tensor_report)

# %% [markdown]
# ### Exercise 5.5 · `gradient_norm` · 25 min · medium · 3 points


# %%
@fill
def gradient_norm(parameters):
    ### BEGIN SOLUTION
    gradients = [each.grad for each in parameters if each.grad is not None]
    squares = [gradient.double().square().sum() for gradient in gradients]  # in float64 1e-30 and 3e38 have squares
    return float(sum(squares, start=torch.zeros((), dtype=torch.float64)).sqrt())
    ### END SOLUTION


# %%
check(gradient_norm)

# %% [markdown]
# ### Exercise 5.6 · `update_ratio` · 15 min · easy · 2 points


# %%
@fill
def update_ratio(before, after):
    ### BEGIN SOLUTION
    before, after = before.double(), after.double()
    moved, size = ((after - before).square().sum().sqrt(), before.square().sum().sqrt())
    return float(moved / size) if size != 0 or moved != 0 else 0.0
    ### END SOLUTION


# %%
check(update_ratio)

# %% [markdown]
# ### Exercise 5.7 · `Taps` · 50 min · hard · 5 points


# %%
@fill
class Taps:
    def __init__(self, model, names, measure=torch.clone):
        ### BEGIN SOLUTION
        self.modules = {name: model.get_submodule(name) for name in names}
        self.measure, self.handles = measure, []
        self.activations = {name: [] for name in names}
        self.gradients = {name: [] for name in names}
        ### END SOLUTION

    def __enter__(self):
        ### BEGIN SOLUTION
        for name, module in self.modules.items():
            self.handles.append(module.register_forward_hook(self.hook_for(name)))
        return self

    def hook_for(self, name):
        def keep(module, inputs, output):
            place = len(self.gradients[name])
            self.activations[name].append(self.measure(output.detach()))
            self.gradients[name].append(None)

            def arrived(gradient):  # backward, the last call comes first: each call has its own place
                self.gradients[name][place] = self.measure(gradient.detach())

            if output.requires_grad:
                output.register_hook(arrived)

        return keep
        ### END SOLUTION

    def __exit__(self, *error):
        ### BEGIN SOLUTION
        while self.handles:
            self.handles.pop().remove()
        ### END SOLUTION


# %%
check(Taps)

# %% [markdown]
# ### Exercise 5.8 · `row_lengths` · 20 min · medium · 2 points


# %%
@fill
def row_lengths(x):
    ### BEGIN SOLUTION
    total = x.square().sum(-1)
    there = total > 0
    roots = torch.where(there, total, 1.0).sqrt()  # no root of 0 is ever taken, so none goes backward
    return torch.where(there, roots, 0.0)
    ### END SOLUTION


# %%
check(row_lengths)
