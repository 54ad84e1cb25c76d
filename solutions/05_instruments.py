# %% [markdown]
# # 05 · Instruments: which numbers would a format lose?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 02](02_rounding.ipynb): `round_to`, ties, overflow; [chapter 03](03_accumulation.ipynb): why sums of squares want a wide accumulator. **Gives** you gauges for tensors, gradients and whole models, and a
# recording of a training run that says, before you change any format, what the change would cost.
#
# Somebody tells you that training in 16 bits "lost the gradients". Here is a GPT that has learned nothing yet, and the gradients of one of its layers. Are there numbers in it that FP16 would turn into zero? How many?

# %% tags=["setup"]
try:
    import contextlib
    import math

    import numpy as np
    import torch
    from IPython.display import display, update_display
    from torch import nn
    from torch.nn import functional as F

    from lowprec_lab import ExponentHeatmap, check, fill, plots, progress, question, reveal
    from lowprec_lab.bits import bit_pattern, max_finite, min_normal, min_subnormal, ulp
    from lowprec_lab.data import load_corpus, step_generator
    from lowprec_lab.explorers import heatmap_picture
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
    from lowprec_lab.races import race
    from lowprec_lab.reading import installed_lines
    from lowprec_lab.recordings import Recording, packed
    from lowprec_lab.rounding import round_to
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %%
corpus = load_corpus()
SIZE = preset(
    "baby", vocab_size=len(corpus.vocabulary), width=64
)  # half as wide as the others: this page is to be quick
torch.set_num_threads(1)  # a model as small as this is no quicker on more of them
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

# %% [markdown]
# ---
# ## What a format would lose
#
# ### Exercise 5.1 · `exponent_histogram` · 25 min · medium · 3 points
#
# How many numbers lie in each binade? The histogram of exponents is the one picture that decides about a format: lay the format's range over it, and read off what falls out at either end. Micikevicius et al. drew it for gradients in 2017 ([Mixed Precision Training](https://arxiv.org/abs/1710.03740), section 3.2), and loss scaling was the answer.
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
# | 0.9999999 | e = -1 | 148 |
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
# **Predict first:** below are the weights of one layer, their gradients, and the model's activations before the last layer. Which of the three lies lowest, and by how many binades? Which format's bar does it leave?

# %%
model.zero_grad()
hidden = []
handle = model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output.detach()))
logits, loss = model(x, y)
handle.remove()
loss.backward()
layer = model.blocks[2].mlp.up.weight
shown = {
    "weights": (exponent_histogram(layer.detach()), "#4D4D4D"),
    "activations": (exponent_histogram(hidden[0]), "#0065A8"),
    "gradients": (exponent_histogram(layer.grad), "#B02A5B"),
}
heatmap_picture.histograms(shown, [BF16, FP16, E5M2, E4M3], "blocks.2.mlp.up before the first step")

# %% [markdown]
# Activations sit around 1, weights a few binades lower. Gradients lie lower still, far from the middle of any format: all the room above them is not used, and where a format's bar ends within their hill, the left part of the hill becomes zeros.
#
# ### Exercise 5.2 · `underflow_fraction` · 25 min · medium · 3 points
#
# The picture says "some". How many, exactly? A number is lost when it is not zero and its rounded value is. Multiply by a scale first, and fewer are lost: that is all there is to loss scaling.
#
# | | |
# |---|---|
# | in | `x`: float32, bfloat16 or float16 tensor; `fmt`; `scale`: float |
# | out | float: how many become zero, divided by how many are counted; 0.0 where none is counted |
# | mind | counted is what is finite and not zero *before* scaling; the product is one float32 multiplication (by the scale as a float32), whatever the dtype of `x`; rounding is to nearest, ties to even; some formats have no sign, some no zero, and where there are no subnormals `min_subnormal` is None; ValueError unless the scale is finite and above zero |
#
# The share is a quotient of two whole numbers, divided in Python: `.float().mean()` would round it to 24 bits.
#
# By hand, E4M3, whose smallest value is 2^-9, so that the tie is at 2^-10:
#
# | x | x * 1.0 | rounds to | lost? |
# |---|---|---|---|
# | 2^-9 | | 2^-9 | no |
# | 0.0015 | above 2^-10 = 0.0009766 | 2^-9 | no: it is below the smallest value, and rounds *up* to it |
# | -2^-10 | a tie of 0 and -2^-9 | -0.0, the even one | yes |
# | 0.0 | | 0.0 | not counted |
# | inf | | | not counted |
#
# One of three: 1/3. With scale 2.0 none of them is lost.
#
# Counting comes before scaling. Of (1e-40, 1e30), with scale 1e-10, FP16 loses one of two: the first product is zero in float32 already, and that is a loss like any other. Of (3e38, 1e-30), with scale 10, it loses one of two as well: the first product is infinite, which is no underflow, but the number was there.
#
# <details><summary>A nudge</summary>Half of the smallest value is the border, but on which side is the border itself? Which function of yours knows, for every format?</details>
# <details><summary>An approach</summary>Pick what is counted, convert to float32, multiply, take magnitudes, <code>round_to</code>, compare with 0. Conversion comes <i>before</i> the multiplication: a float16 tensor times 65,536 is infinite.</details>


# %%
@fill
def underflow_fraction(x, fmt, scale=1.0):
    ### BEGIN SOLUTION
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"a scale is finite and above zero, not {scale!r}")
    x = x.float().reshape(-1)  # first: a 16-bit product would be rounded to 16 bits
    counted = x[x.isfinite() & (x != 0)]
    lost = round_to((counted * scale).abs(), fmt) == 0
    return int(lost.sum()) / counted.numel() if counted.numel() else 0.0
    ### END SOLUTION


# %%
check(underflow_fraction)

# %% [markdown]
# ### Exercise 5.3 · `overflow_fraction` · 25 min · medium · 3 points
#
# The other end. A scale that is too large pushes the largest numbers out of the format, and one infinity is enough to spoil a step. Being above the largest value is not yet an overflow: what is less than half a step above it rounds down to it.
#
# | | |
# |---|---|
# | in | `x`: float32, bfloat16 or float16 tensor; `fmt`; `scale`: float |
# | out | float: how many lie beyond the format, divided by how many are counted; 0.0 where none is counted |
# | mind | the same are counted (before scaling), and scaled in the same way; round first, as if the largest binade went on, then compare with the largest value; formats without infinity and NaN overflow, too; a product that is infinite overflows every format |
#
# By hand, at the ties above the largest value:
#
# | format | largest | one step more | tie | goes to | overflow? |
# |---|---|---|---|---|---|
# | E4M3 | 448 = 14 steps of 32 | 480 = 15 steps | 464 | 14, the even one | no |
# | FP16 | 65504 = 2047 steps of 32 | 65536 = 2048 steps | 65520 | 2048, the even one | yes |
#
# <details><summary>A nudge</summary>How many steps of the largest binade is a number? When is that, rounded, more than the largest value has?</details>
# <details><summary>An approach</summary><code>ulp</code> of <code>max_finite(fmt)</code> is the step. Divide by it in float64, where that is exact, and use <code>torch.round</code>, which sends ties to the even number. <code>round_to(..., overflow="to_special")</code> and a look at what is not finite does it as well, except for formats that have nothing special.</details>


# %%
@fill
def overflow_fraction(x, fmt, scale=1.0):
    ### BEGIN SOLUTION
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"a scale is finite and above zero, not {scale!r}")
    x = x.float().reshape(-1)
    counted = x[x.isfinite() & (x != 0)]
    largest = max_finite(fmt)
    step = ulp(torch.tensor(largest), fmt)
    steps = ((counted * scale).abs().double() / step).round()  # a whole number of steps; ties to the even one
    return int((steps > largest / step).sum()) / counted.numel() if counted.numel() else 0.0
    ### END SOLUTION


# %%
check(overflow_fraction)

# %% [markdown]
# **Predict first:** all gradients of the fresh model, in four formats, at scale 1. Which format loses most? And is anything too large for any of them?

# %%
gradients = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
print(f"{'':12}" + "".join(f"{name:>24}" for name in ("weights", "activations", "gradients")))
for fmt in (BF16, FP16, E5M2, E4M3):
    shares = [(underflow_fraction(each, fmt), overflow_fraction(each, fmt)) for each in (weights, hidden[0], gradients)]
    print(f"{plots.short_name(fmt):12}" + "".join(f"{under:>14.3%} / {over:7.3%}" for under, over in shares))
print("(becomes zero / too large)")

# %% [markdown]
# Nothing is too large, and there is a lot of room at the top. BF16 has the exponents of float32 and loses nothing. FP16 loses a little, E5M2, with the same exponent bits and eight mantissa bits less, more; E4M3, with an exponent bit less, by far the most: close to one half. So multiply. How far?

# %%
exponents = list(range(0, 37, 2))
lost = {
    fmt.name: tuple([f(gradients, fmt, 2.0**k) for k in exponents] for f in (underflow_fraction, overflow_fraction))
    for fmt in (FP16, E5M2, E4M3)
}
heatmap_picture.sweep(lost, exponents, "All gradients of the fresh GPT, at every scale")

# %%
for name, (under, over) in lost.items():
    best = min(range(len(exponents)), key=lambda place: under[place] + over[place])
    good = [k for k, *share in zip(exponents, under, over, strict=True) if sum(share) < 0.01]
    between = f"2^{good[0]} to 2^{good[-1]}" if good else "no scale"
    print(
        f"{plots.short_name(name):5} best scale 2^{exponents[best]}: {under[best]:.4%} become zero, {over[best]:.4%} are too large; less than 1 % lost: {between}"
    )

# %% [markdown]
# Each format has a valley. With FP16 it is wide: a scale that is wrong by a factor of a thousand still does, and that is why one scale for the whole model works, found by trial (chapter 06). With E5M2 it is narrower. E4M3 has the narrowest, and at its bottom some numbers are lost at both ends: one scale for all tensors is not enough there, and in chapter 07 each tensor gets its own.
#
# ### Exercise 5.4 · `tensor_report` · 15 min · easy · 2 points
#
# A report on one tensor, of the four numbers that decide: the smallest and the largest magnitude, how many zeros, and how many elements that are no finite numbers. The smallest one is what `:.4f` hides.
#
# | | |
# |---|---|
# | in | `x`: float64, float32, bfloat16 or float16 tensor of any shape |
# | out | a tuple `(smallest, largest, zeros, nonfinite)`: float, float, int, int |
# | mind | magnitudes of what is finite and not zero, exactly; 0.0 for both where there is none; -0.0 is a zero; infinities and NaNs count as nonfinite, and nowhere else |
#
# By hand, (2.8e-7, -0.02, 0.0, -0.0, inf): smallest 2.8e-7 (as a float32: 2.7999999474559445e-07), largest 0.02 (0.019999999552965164), two zeros, one nonfinite.
#
# <details><summary>A nudge</summary>What does <code>x.abs().min()</code> say when there is one zero? And <code>max()</code>, when there is one NaN?</details>
# <details><summary>An approach</summary>One mask for what is finite and not zero; <code>min</code> and <code>max</code> of that, with <code>.item()</code>; two counts. An empty tensor has no minimum: torch raises there.</details>


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

# %%
for name in ("token_embedding", "blocks.0.attention.qkv", "blocks.3.attention.qkv", "blocks.3.mlp.down"):
    smallest, largest, zeros, nonfinite = tensor_report(model.get_submodule(name).weight.grad)
    print(
        f"{name:24} :.4f {smallest:.4f} to {largest:.4f}     :.2e {smallest:.2e} to {largest:.2e}   {zeros} zeros, {nonfinite} nonfinite"
    )

# %% [markdown]
# The same numbers twice. With `:.4f` the smallest gradient is 0.0000 everywhere. With `:.2e` you see that it is not zero, and how many powers of ten lie between the smallest and the largest gradient of one layer.
#
# ---
# ## What a step does
#
# ### Exercise 5.5 · `gradient_norm` · 25 min · medium · 3 points
#
# One number for all gradients: the length of the vector that they make together. When training goes wrong it is the first curve that shows it. Two things go wrong with it. Its squares leave float32: 1e-30 squared is 0 there, and 3e38 squared is infinite, though the norm is not. And many people get it from `clip_grad_norm_`, which does what its name says.
#
# | | |
# |---|---|
# | in | `parameters`: any iterable of parameters; it may be a generator, which can be read once |
# | out | float: the root of the sum of the squares of all elements of all gradients, right to 24 significant bits |
# | mind | parameters whose `.grad` is None are left out; 0.0 where there is nothing; squares and sums in float64; an infinity gives infinity, a NaN gives NaN; nothing is changed |
#
# By hand: gradients (1, 2, 2) and (4, -2, 4): 1 + 4 + 4 + 16 + 4 + 16 = 45, and the norm is 6.708. The two norms, 3 and 6, are not added: their squares are.
#
# <details><summary>A nudge</summary>The gradients have different shapes. Do they have to become one tensor?</details>
# <details><summary>An approach</summary>A loop: skip None, <code>.double()</code>, square, sum; add up; one root at the end. <code>model.parameters()</code> is a generator: go through it once.</details>


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
# **Predict first:** two ways to log the norm, twice in a row. What does the second line of each say?

# %%
for _ in range(2):
    print(f"gradient_norm      {gradient_norm(model.parameters()):.6f}")
for _ in range(2):
    print(f"clip_grad_norm_    {torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5):.6f}")
print(f"gradient_norm      {gradient_norm(model.parameters()):.6f}")

# %% [markdown]
# A function whose name ends in an underscore changes what it is given. Whoever put it into a `print` to *look* at the norm has trained with clipping ever since, and whoever removes that print changes the training. An instrument changes nothing.
#
# ### Exercise 5.6 · `update_ratio` · 15 min · easy · 2 points
#
# A gradient says little about a step: the optimizer divides and multiplies it. What counts in the end is how far a weight moved, relative to its size. In chapter 03 you saw where that ends: in BF16, updates below 2^-9 of the weight are lost.
#
# | | |
# |---|---|
# | in | `before`, `after`: tensors of one shape and dtype: float32, bfloat16 or float16 |
# | out | float: the norm of `after - before` over the norm of `before`, right to 24 significant bits |
# | mind | the difference, squares and sums in float64; where the norm of `before` is 0: 0.0 if nothing moved, infinity if something did |
#
# By hand: from (3, 4) to (3, 4.5): 0.5 / 5 = 0.1.
#
# <details><summary>A nudge</summary>What is 1.0 - 0.001 in bfloat16, and what is lost when you subtract there?</details>
# <details><summary>An approach</summary>Both to float64 first. Then two norms and a quotient, and one case apart.</details>


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
# ---
# ## Inside the model
#
# ### Exercise 5.7 · `Taps` · 50 min · hard · 5 points
#
# Weights and their gradients lie about after a step, and anybody can look at them. Activations, and the gradients that flow through them, are gone: they exist for a moment in the middle of a pass. To see them, **hooks** are put into the model: functions that torch calls when a module has computed its output, and when a gradient arrives at a tensor.
#
# Hooks are easy to get wrong in ways that nobody notices: they stay for ever, they hold memory, they change the run. So this is a class with a `with` block: what it does is over at the end of the block.
#
# | | |
# |---|---|
# | make | `Taps(model, names, measure=torch.clone)`; names as in `model.named_modules()` |
# | use | `with Taps(...) as taps:` around forward and backward passes |
# | read | `taps.activations[name]`, `taps.gradients[name]`: lists with an entry for each call of that module, in the order of the calls |
# | an entry | `measure(output)`, taken at once, and `measure(gradient of that output)`; None for a gradient that has not arrived |
# | mind | `measure` gets detached tensors; the run has the same bits as without; after the block, also when it ends in an error, nothing is watched, not even a gradient that arrives later, and what was kept stays; errors go on |
#
# By hand: a module that is called twice, on x and then on 2x, before one backward pass:
#
# | what happens | `activations[name]` | `gradients[name]` |
# |---|---|---|
# | first call | [a1] | [None] |
# | second call | [a1, a2] | [None, None] |
# | backward: the gradient of the *second* output arrives first | [a1, a2] | [None, g2] |
# | then that of the first | [a1, a2] | [g1, g2] |
#
# <details><summary>A nudge</summary>A function that is called later, when a gradient arrives, has to know for which call it was made. When do you know the place in the list: when it is called, or when it is made?</details>
# <details><summary>An approach</summary><code>module.register_forward_hook(hook)</code> calls <code>hook(module, inputs, output)</code> and gives a handle with <code>.remove()</code>. In it: measure <code>output.detach()</code>, append None to the gradients, and, if <code>output.requires_grad</code>, <code>output.register_hook(...)</code> with a function that fills that place. A tensor's hook has a handle, too: it stays until it is removed. One that returns something other than None replaces the gradient. (Why not <code>register_full_backward_hook</code>? Because it raises when a later operation, such as a ReLU, works in place on the output.)</details>


# %%
@fill
class Taps:  # __init__ is begun; __enter__ and __exit__ belong to it
    def __init__(self, model, names, measure=torch.clone):
        ### BEGIN SOLUTION
        self.modules = {name: model.get_submodule(name) for name in names}
        self.measure, self.handles = measure, []
        self.activations = {name: [] for name in names}
        self.gradients = {name: [] for name in names}

    def __enter__(self):
        for name, module in self.modules.items():
            self.handles.append(module.register_forward_hook(self.hook_for(name)))
        return self

    def __exit__(self, *error):
        while self.handles:
            self.handles.pop().remove()

    def hook_for(self, name):
        def keep(module, inputs, output):
            place = len(self.gradients[name])  # backward, the last call comes first: each call has its own place
            self.activations[name].append(self.measure(output.detach()))
            self.gradients[name].append(None)

            def arrived(gradient):
                self.gradients[name][place] = self.measure(gradient.detach())

            if output.requires_grad:
                self.handles.append(output.register_hook(arrived))

        return keep
        ### END SOLUTION


# %%
check(Taps)

# %% [markdown]
# ### A training run, recorded
#
# Now everything at once: 300 steps of the GPT, and every tenth of them recorded. Each record is one line of JSON in a file: loss and its dtype, gradient norm, how far the weights moved, and for each watched layer the histograms of its activations and of the gradients that arrive there. The line is written at once, so a run that dies leaves its history. The picture grows while the model trains.
#
# **Predict first:** do the gradients of a model grow or shrink while it learns? Are those of the first block larger than those of the last?

# %%
WATCHED = [
    f"blocks.{k}{part}"
    for k in range(SIZE.layers)
    for part in (".attention.qkv", ".attention.out", ".mlp.up", ".mlp.down", "")
]
WATCHED += ["head"]
STEPS, EVERY, LR = 300, 10, 2e-3


def record(step, loss, taps, before):
    """One line of the recording."""
    moved = {name: update_ratio(old, model.get_submodule(name).weight.detach()) for name, old in before.items()}
    return {
        "step": step,
        "loss": loss.item(),
        "loss_dtype": str(loss.dtype).removeprefix("torch."),
        "gradient_norm": gradient_norm(model.parameters()),
        "head_norm": gradient_norm([model.head.weight]),
        "update_ratios": moved,
        "activations": {name: packed(taps.activations[name][0]) for name in WATCHED},
        "gradients": {name: packed(taps.gradients[name][0]) for name in WATCHED},
    }


def train_recorded(recording, show):
    """Train `model`; every tenth step is watched and written, and shown with `show(recording)`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(STEPS + 1):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / 20)  # warm up
        x, y = corpus.batch("train", step_generator(5, step), batch=12, context=SIZE.context)
        watched = step % EVERY == 0
        with Taps(model, WATCHED, exponent_histogram) if watched else contextlib.nullcontext() as taps:
            loss = model(x, y)[1]
            optimizer.zero_grad()
            loss.backward()
        before = {name: model.get_submodule(name).weight.detach().clone() for name in MOVING} if watched else {}
        optimizer.step()
        if watched:
            recording.write(record(step, loss, taps, before))
            show(recording)


MOVING = [f"blocks.{k}.mlp.up" for k in range(SIZE.layers)]
torch.manual_seed(5)
model = GPT(SIZE)
recording = Recording.named("instruments")
display(plots.figure(9.5, 6.8)[0], display_id="recording")


def show(recording):
    if len(recording.lines) % 3 == 1:  # drawing takes longer than a step
        update_display(heatmap_picture.live(recording, STEPS, FP16), display_id="recording")


train_recorded(recording, show)
print(
    f"{len(recording.lines)} records in {'/'.join(recording.path.parts[-3:])}; loss in {recording.lines[-1]['loss_dtype']}"
)

# %% [markdown]
# Each row of the map is a place in the model, from the input (top) to the output (bottom); each column is a step; the colour is the exponent that half of the gradient's numbers lie below. At the very first step, with random weights, gradients are large. Ten steps later they are smaller, by two binades or more, everywhere but at the `head`. Then those at attention's queries, keys and values (`qkv`) lie lowest by far, and they are the ones that come up again while the model learns what to attend to, by four binades or more; the others hardly do. So gradients shrink first, and then each layer goes its own way. A format or a scale that was right for the first step is not right for the tenth.
#
# And first block or last? In the residual stream they are the same to within a binade: each block adds to the stream, and what comes back along it passes the blocks by. Inside the blocks it is the first that gets more: at the end of the run the gradients of its `qkv`, `attention.out` and `mlp.up` lie a binade or more above those of the last.
#
# The curve of the gradient norm, above the map, does not follow. Here are its first points, with the part of it that is the gradient of one matrix, the head's:

# %%
for line in recording.lines[:3]:
    print(
        f"step {line['step']:3}   gradient norm {line['gradient_norm']:.3f}   of the head's matrix {line['head_norm']:.3f}"
    )

# %% [markdown]
# In the first ten steps, in which nearly every row of the map goes down by binades, the norm hardly changes. It is no contradiction. The map shows gradients that *flow*, one for each number of an activation. The norm is that of the *parameters'* gradients, and in a matrix of weights each of these is a sum, over all positions of the batch, of what flows there times the activation that comes in. And it is one number, made by the largest: after ten steps nearly all of it is the head's matrix (which is the token embedding's, too), and the head is the row of the map that did not move. A norm that looks steady does not say what a format would lose elsewhere.
#
# Read the file back, as a program would that looks at a run of last week, and ask it the question of this chapter: what would each format have lost, where and when? Choose a format, and move the scale until the map is clear. Then look at the other end: which colour appears, when the scale is too large? (From histograms alone the
# answer is right up to the numbers that lie exactly on a tie or just above the largest value.)

# %%
again = Recording.read(recording.path)
assert again.lines == recording.lines
ExponentHeatmap(again, shown="underflow", fmt=E5M2)

# %% [markdown]
# Without a scale E5M2 turns more than half of the gradients at `attention.qkv` into zeros, at every step, and a large part of those at `mlp.up`. In the residual stream (`blocks.0` and so on) it is much less. Now choose activations, and E4M3: at the end of the run it loses only a few percent of any layer, without any scale, and nothing is too large. That is why FP8 training takes E4M3 for the way forward and E5M2 for the way back (chapter 08).
#
# **Predict first:** which scale would E4M3 need for these gradients, so that less than 1 % of them are lost at either end, in *every* layer and at *every* recorded step? Does one scale do it?

# %%
for fmt in (FP16, E5M2, E4M3):
    found = []
    for k in range(41):
        under, over = (heatmap_picture.cells(again, "gradients", shown, fmt, k) for shown in ("underflow", "overflow"))
        found.append(float(np.nanmax(under + over)))
    good = [k for k, worst in enumerate(found) if worst < 0.01]
    sentence = (
        f"2^{good[0]} to 2^{good[-1]}"
        if good
        else f"none; the best, 2^{int(np.argmin(found))}, loses {min(found):.1%} somewhere"
    )
    print(f"{plots.short_name(fmt):5} scales at which every layer and step loses less than 1 %: {sentence}")

# %% [markdown]
# Does one scale do it? For FP16, yes, with room to spare. For E5M2, just: the scales that will do are within two binades. For E4M3, none: what lifts the lowest layer pushes numbers of another, or of another step, out at the top. That is why each tensor gets a scale of its own in chapter 07.
#
# And the steps themselves: how far did the weights of four layers move in each recorded step, relative to their size? The dotted line is where BF16 weights would begin to stand still (chapter 03).

# %%
with plots.style():
    (picture, axes), ends = plots.figure(9, 3.8), []
    for name, color in zip(MOVING, ("#0065A8", "#007A5A", "#C24E00", "#6B1160"), strict=True):
        ratios = [line["update_ratios"][name] for line in again.lines]
        axes.semilogy(again.steps, ratios, base=2, color=color, linewidth=1.4)
        ends.append((math.log2(ratios[-1]), name, color))
    place = -math.inf
    for height, name, color in sorted(ends):
        place = max(height, place + 0.22)  # beside the end of its line, or above the label below
        axes.text(STEPS + 4, 2.0**place, name, color=color, fontsize=8, va="center")
    axes.axhline(2.0**-9, color="#7A7A7A", linestyle=(0, (1, 2)))
    axes.set_xlim(0, STEPS * 1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("update ratio (log2 axis)")
    axes.set_title("How far a step moves the weights")
picture

# %% [markdown]
# ### Where outliers live
#
# A scale is decided by the largest number of a tensor. If one element in ten thousand is a hundred times larger than the rest, the scale is made for that one. So: where are the large ones? Of each activation, take the largest magnitude of every channel (the last dimension) and of every token, and compare the largest with the median.
#
# **Predict first:** is it channels or tokens that stick out? In the residual stream, or behind the GELU?

# %%
PLACES = [f"blocks.{k}" for k in range(SIZE.layers)] + ["norm"] + [f"blocks.{k}.mlp.gelu" for k in range(SIZE.layers)]
PLACES += ["blocks.0.attention.qkv", f"blocks.{SIZE.layers - 1}.attention.qkv"]
x, y = corpus.batch("validation", step_generator(5, 1), batch=12, context=SIZE.context)
with Taps(model, PLACES) as taps:
    model(x, y)[1].backward()
print(f"{'':26}{'activations':^34}{'gradients':^24}")
print(f"{'largest / median over the':26}{'channels':>12}{'tokens':>10}{'channel':>12}{'channels':>12}{'tokens':>12}")
for name in PLACES:
    texts = []
    for kept in (taps.activations[name][0], taps.gradients[name][0]):
        sizes = kept.abs().reshape(-1, kept.shape[-1])
        texts.append([largest.max() / largest.median().clamp(min=1e-30) for largest in (sizes.amax(0), sizes.amax(1))])
    first = int(taps.activations[name][0].abs().reshape(-1, taps.activations[name][0].shape[-1]).amax(0).argmax())
    print(f"{name:26}{texts[0][0]:12.1f}{texts[0][1]:10.1f}{first:12d}{texts[1][0]:12.1f}{texts[1][1]:12.1f}")

# %% [markdown]
# Channels or tokens? Of activations it is channels, and behind the GELU: from the second block on, one of them is several times the median, while in the residual stream nothing stands out. Of gradients it is tokens, at `qkv`: there the largest is ten times the median and more.
#
# Look at the column "channel" of the residual stream, `blocks.0` to the last block: where it says the same number again and again, that channel is large in every layer, since each block only adds to the stream. In a model of this size the factor is small. In large language models single channels of the residual stream reach thousands of times the median, in a few fixed places, and first at a few special tokens ([Massive Activations](https://arxiv.org/abs/2402.17762)). This is what breaks 8-bit activations with one scale for a tensor, and chapters 07 and 11 return to it.
#
# To record a longer run of the full model, train it with `lowprec-lab train --preset baby` and put your `Taps` around a step of your own, as above.
#
# ---
# ## Read the real code
#
# What you found out about `clip_grad_norm_` by trying, its source says plainly. Here is the middle of it, and its end, from the torch that is installed.

# %%
RELEASE = "https://github.com/pytorch/pytorch/blob/v2.13.0/"
CLIP = RELEASE + "torch/nn/utils/clip_grad.py"
print(installed_lines("torch", "nn/utils/clip_grad.py", "clip_coef = max_norm", after=5, link=CLIP))
print()
print(
    installed_lines(
        "torch", "nn/utils/clip_grad.py", "total_norm = _get_total_norm(grads", before=1, after=3, link=CLIP
    )
)

# %% [markdown]
# **5.A** The gradients have the norm 0.5, and `max_norm` is 1.0. By which number is each gradient multiplied?

# %%
question(
    "5.A",
    ### BEGIN SOLUTION
    1.0,
    ### END SOLUTION
)

# %% [markdown]
# **5.B** The gradients have the norm 8.0, and `max_norm` is 1.0. Which norm does `clip_grad_norm_` return?

# %%
question(
    "5.B",
    ### BEGIN SOLUTION
    8.0,
    ### END SOLUTION
)

# %% [markdown]
# Many monitoring tools draw their histograms with `torch.histc`. Its documentation:

# %%
print(installed_lines("torch", "_torch_docs.py", "histc(input, bins", after=10, link=RELEASE + "torch/_torch_docs.py"))

# %% [markdown]
# **5.C** How many of the four numbers does `torch.histc(torch.tensor([-1.0, 0.5, float("nan"), 3.0]), bins=2, min=0, max=1)` count in all?

# %%
question(
    "5.C",
    ### BEGIN SOLUTION
    1,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## Break it: the scale that falls for ever
#
# "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 0.0": this line fills thousands of logs ([apex#318](https://github.com/NVIDIA/apex/issues/318), [apex#834](https://github.com/NVIDIA/apex/issues/834), [insightface#2262](https://github.com/deepinsight/insightface/issues/2262)). A loss scaler halves its scale whenever it meets a gradient that is not finite, since it takes that for an overflow (chapter 06 builds one). But what if the gradient is NaN whatever the scale is? Here is a small model of texts: each token has a vector, long vectors are drawn in so that none is longer than 1, and token 0, which fills up short texts, begins as a vector of zeros.


# %%
class Squash(nn.Module):
    """Each vector in its own direction, and never longer than 1."""

    def __init__(self, lengths):
        super().__init__()
        self.lengths = lengths

    def forward(self, x):
        return x / (1 + self.lengths(x)[..., None])


def make_texts_model(lengths):
    torch.manual_seed(1)
    layers = {"embedding": nn.Embedding(50, 8), "squash": Squash(lengths), "mix": nn.Linear(8, 16)}
    layers["embedding"].weight.data[0] = 0
    return nn.ModuleDict({**layers, "bend": nn.GELU(), "head": nn.Linear(16, 2)})


def texts_loss(layers, tokens, labels):
    x = layers["squash"](layers["embedding"](tokens))
    return F.cross_entropy(layers["head"](layers["bend"](layers["mix"](x))).mean(1), labels)


def train_texts(lengths, steps=200):
    """(the losses, the scales) of `steps` steps with torch's loss scaler."""
    layers = make_texts_model(lengths)
    optimizer, scaler = torch.optim.SGD(layers.parameters(), lr=0.5), torch.amp.GradScaler("cpu")
    losses, scales = [], []
    for _ in range(steps):
        loss = texts_loss(layers, TOKENS, LABELS)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def lengths_as_found(x):
    return x.square().sum(-1).sqrt()


TOKENS = torch.randint(1, 50, (16, 6), generator=torch.Generator().manual_seed(2))
TOKENS[::2, 4:] = 0  # every other text is short
LABELS = torch.arange(16) % 2
losses, scales = train_texts(lengths_as_found)
for step in (0, 9, 99, 199):
    print(f"step {step + 1:3}   loss {losses[step]:.6f}   scale {scales[step]:g}")

# %% [markdown]
# The loss is finite and does not move; the scale falls to 0.0. No forward value is wrong, so printing activations does not help. Which place makes the first NaN on the way *back*? Your `Taps`, with your `tensor_report` for a measure, says it:

# %%
layers = make_texts_model(lengths_as_found)
with Taps(layers, ("embedding", "squash", "mix", "head"), tensor_report) as taps:
    texts_loss(layers, TOKENS, LABELS).backward()
for name in ("head", "mix", "squash", "embedding"):
    print(
        f"gradient at the output of {name:10} nonfinite: {taps.gradients[name][0][3]:4}    activation nonfinite: {taps.activations[name][0][3]}"
    )

# %% [markdown]
# What arrives at the output of `squash` is finite, and what leaves it backward is not. Inside `squash` there is one function of our own.
#
# ### Exercise 5.8 · `row_lengths` · 20 min · medium · 2 points
#
# The slope of the root at 0 is infinite, and what comes back through it is 0 times infinity: NaN. Write the length so that its gradient is finite everywhere, and zero where the length is zero.
#
# | | |
# |---|---|
# | in | `x`: float32 tensor (..., n), finite |
# | out | float32 tensor (...): the lengths; exact where float32 can hold all that is computed on the way |
# | gradient | x / length; zeros where the length is 0 |
# | mind | no epsilon: the length of (0, 0) is 0, and not 1e-6; `torch.where` after the root is too late |
#
# By hand, for a gradient of 1 at each length:
#
# | x | length | gradient |
# |---|---|---|
# | (3, 4) | 5 | (0.6, 0.8) |
# | (0, 0) | 0 | (0, 0) |
#
# <details><summary>A nudge</summary><code>torch.where(total &gt; 0, total.sqrt(), 0)</code> picks the right value. Backward, the branch that was not picked gets the gradient 0. What does the root make of that 0?</details>
# <details><summary>An approach</summary>Let no root of 0 be taken at all: put another number in its place <i>before</i> the root, and the 0 back after it. (Or find the function of torch that has this built in.)</details>


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

# %%
losses, scales = train_texts(row_lengths)
for step in (0, 9, 99, 199):
    print(f"step {step + 1:3}   loss {losses[step]:.6f}   scale {scales[step]:g}")

# %% [markdown]
# The scale stays, and the loss falls. An overflow is cured by a smaller scale. A NaN that does not care for the scale is a fault of the model, and the first place where it appears on the way back is where to look.
#
# ---
# ## What you built
#
# Gauges that hide nothing and change nothing. Proof of the second half: a step with your taps in place, and the same step without, bit for bit.

# %%
x, y = corpus.batch("train", step_generator(5, 2), batch=12, context=SIZE.context)
with_and_without = []
for taps in (Taps(model, WATCHED, exponent_histogram), contextlib.nullcontext()):
    model.zero_grad()
    with taps:
        loss = model(x, y)[1]
        loss.backward()
    with_and_without.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
same = all(torch.equal(one, other) for one, other in zip(*with_and_without, strict=True))
print(
    f"loss and {len(with_and_without[0]) - 1} gradients with and without taps: {'the same bits' if same else 'they differ'}"
)

# %% [markdown]
# And what does looking cost? A race over 400,000 numbers: your instruments, and what many tools draw instead of it, torch's own histogram of logarithms.

# %%
numbers = torch.randn(400_000, generator=torch.Generator().manual_seed(5))
race(
    {
        "exponent_histogram": lambda: exponent_histogram(numbers),
        "torch.histc of log2": lambda: torch.histc(numbers.abs().log2(), bins=277, min=-149, max=128),
        "underflow_fraction": lambda: underflow_fraction(numbers, E4M3),
        "tensor_report": lambda: tensor_report(numbers),
    },
    rounds=5,
).plot(to="torch.histc of log2")

# %% [markdown]
# Each of these is several passes over the tensor: nothing for a look at every tenth step, a lot for every tensor of every step. Tools that are always on keep one number for each tensor, its largest magnitude, and you will meet it again in chapter 10.
#
# You know now which gradients a format would lose, at which scale, in which layer and when. The next chapter keeps them: it trains in FP16 and finds the scale while it goes.

# %%
progress()
