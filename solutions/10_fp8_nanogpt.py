# %% [markdown]
# # 10 · FP8 nanoGPT: what does FP8 cost a GPT?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 08](08_float8_linear.ipynb): `Float8Linear` and its recipes; [chapter 09](09_scaled_mm.ipynb): multiples of 16. **Gives** you delayed scaling to the last bit of its rule, a GPT that trains in FP8 with your own code from the first cast to the last, and an answer to the question above that has an error bar.
#
# Chapter 08's layer looks at every tensor before it casts it: once through memory for the largest magnitude, and a second time for the rounding. On a GPU those passes are what FP8 costs. But a training run is not a bag of tensors. It does nearly the same thing again and again. So does it have to look?

# %% tags=["setup"]
try:
    import math
    import tempfile
    import time
    from dataclasses import replace

    import torch

    from lowprec_lab import check, fill, plots, progress, question, reveal
    from lowprec_lab.bits import decode, max_finite
    from lowprec_lab.data import load_corpus, step_generator
    from lowprec_lab.float8_linear import RECIPES, Float8Linear, float8_matmul, layer_operands, transpose
    from lowprec_lab.formats import BF16, E4M3, E5M2, FP32, Format
    from lowprec_lab.gpt import GPT, GPTConfig, preset
    from lowprec_lab.libraries import AbsentError, torchao_training
    from lowprec_lab.long_runs import long_runs
    from lowprec_lab.quantizer import Quantized, absmax, dequantize, quantize
    from lowprec_lab.reading import installed_lines
    from lowprec_lab.recipes import (
        NAMES,
        DelayedScaling,
        convert_to_float8,
        converted,
        delayed_casts,
        delayed_linear,
        delayed_step,
        delayed_update,
        float8_layer,
        float8_linear,
        gradients_used,
        loss_gap,
        padded_linear,
        padded_step,
        require_recipe,
        scaling_facts,
        scaling_refuses,
        scaling_resumed,
        scaling_steps,
        scalings_of,
        steps_of,
        steps_told,
        too_small,
        training_step,
        update_refuses,
    )
    from lowprec_lab.rounding import cast_saturating, encode
    from lowprec_lab.scaled_mm import pad_to_multiple
    from lowprec_lab.settings import settings
    from lowprec_lab.train import train
    from lowprec_lab.trainer import Trainer
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %% [markdown]
# **Predict first:** the largest magnitude of a layer's input, of its weight, and of the gradient of its output: by which factor does it change from one training step to the next? 1.05, 2, 10? And which of the three changes most?

# %%
torch.set_num_threads(1)  # the matrices are small: two threads would mostly wait for each other
corpus = load_corpus()
context, batch = 32, 8


def small_gpt(seed=1):
    """The same untrained GPT every time."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(len(corpus.vocabulary), context, layers=2, heads=2, width=64))


def batch_of(step):
    return corpus.batch("train", step_generator(1, step), batch, context)


def watched_steps(model, steps, layer="blocks.1.mlp.up"):
    """Train in float32 for some steps. Returns (x, weight, grad_output) of a layer in each of them."""
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99)), []
    for step in range(steps):
        seen.append(layer_operands(model, *batch_of(step))[layer])
        model(*batch_of(step))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


seen = watched_steps(small_gpt(), 40)
amaxes = torch.tensor([[float(each.abs().max()) for each in three] for three in seen])
for name, row in zip(("x", "weight", "grad_output"), amaxes.T, strict=True):
    factors = torch.maximum(row[1:] / row[:-1], row[:-1] / row[1:])
    print(
        f"{name:12} largest magnitude {row.min():.2g} to {row.max():.2g}; from step to step by {factors.median():.2f} (median), at most {factors.max():.2f}"
    )

# %% [markdown]
# What was largest in the last steps is a good guess of what will be largest in the next. **Delayed scaling** makes use of that: it casts with a scale that is known *before* the tensor is there, and writes down the largest magnitude while it casts, in one pass. It was the recipe of NVIDIA's Transformer Engine from its first day, and torchao had it until February 2025.
#
# ---
# ## A scale from the past
#
# ### Exercise 10.1 · `delayed_update` · 30 min · medium · 3 points
#
# What happens between two steps. A **history** of the last H largest magnitudes is kept for each tensor; one slot of it, `history[0]`, is filled while the step runs. The scale of the next step comes from it, and then it moves on by one.
#
# | | |
# |---|---|
# | in | `history`: float32, (H,); `scale`: float32, 0-d, the one in use; `fmt`; `margin`: an int; `algo`: `"max"` or `"most_recent"` |
# | order | `history[0]` is this step's, `history[1]` the oldest, `history[H - 1]` the one of the step before |
# | A | the largest of the history (`"max"`), or `history[0]` (`"most_recent"`) |
# | new scale | max_finite · 2^-margin / A, divided in float32; where that is infinite, the largest float32 |
# | but | where A is 0, infinite or NaN the scale stays as it is. A NaN anywhere makes the largest NaN |
# | new history | the oldest is dropped, this step's becomes the last, `history[0]` is 0 |
# | out | (history, scale): new tensors |
# | mind | ValueError for another `algo`, with both names in its text |
#
# By hand, with E4M3 (448) and no margin:
#
# | history | algo | A | new scale | new history |
# |---|---|---|---|---|
# | [3, 8, 1, 2] | max | 8, the oldest | 56 | [0, 1, 2, 3] |
# | [3, 8, 1, 2] | most_recent | 3 | 149.33 | [0, 1, 2, 3] |
# | [0, 1, 2, 3] | most_recent | 0: nothing was recorded | as before | [0, 2, 3, 0] |
#
# A margin of 1 halves the scale, and leaves room for a tensor that is twice as large as any before.
#
# <details><summary>A nudge</summary>The 8 counts once more, and is gone afterwards. So what comes first, the largest or the move?</details>
# <details><summary>An approach</summary><code>history.max()</code> lets NaN win. The moved history is <code>history[1:]</code> with <code>history[:1]</code> behind it, and then its first number is set to 0. <code>torch.where</code> chooses between new and old scale.</details>


# %%
@fill
def delayed_update(history, scale, fmt, margin=0, algo="max"):
    ### BEGIN SOLUTION
    if algo not in ("max", "most_recent"):
        raise ValueError(f"algo is 'max' or 'most_recent', not {algo!r}")
    amax = history.max() if algo == "max" else history[0]
    largest = torch.tensor(max_finite(fmt) * 2.0**-margin, device=history.device)
    new = torch.div(largest, amax).clamp(max=torch.finfo(torch.float32).max)
    usable = (amax > 0) & amax.isfinite()
    moved = torch.cat([history[1:], history[:1]])  # history[1:] is the oldest to the newest before, then this step's
    moved[0] = 0
    return moved, torch.where(usable, new, scale)
    ### END SOLUTION


# %%
check(delayed_update)

# %% [markdown]
# **Predict first:** a tensor whose largest magnitude is 1 in every step but one, when it is 1000. The history has 16 steps. For how many steps is the scale too small by a factor of 1000? And by `"most_recent"`?

# %%
outlier = torch.ones(40)
outlier[9] = 1000.0
with plots.style():
    picture, axes = plots.figure(9, 3.6)
    for algo, line, fmt in (("max", "-", E4M3), ("most_recent", "--", E5M2)):
        scales = steps_of(delayed_update, outlier, 16, E4M3, 0, algo)
        axes.step(range(1, 41), scales, line, where="mid", color=plots.color_of(fmt), label=algo)
        axes.text(32, {"max": 300, "most_recent": 620}[algo], algo, color=plots.color_of(fmt), fontweight="bold")
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step (the outlier is in step 10)")
    axes.set_ylabel("scale that the step casts with")
    axes.set_title("A history of 16 remembers an outlier")
picture

# %% [markdown]
# **10.E** How many steps are cast with the small scale, by `"max"`? (A number.)

# %%
question(
    "10.E",
    ### BEGIN SOLUTION
    16,
    ### END SOLUTION
)

# %% [markdown]
# Meanwhile numbers of size 1 have 2^10 less of the format's range. With E4M3 that is a good part of what there is: ordinary numbers become subnormal, and small ones zero. `"most_recent"` forgets at once, and is caught by every second outlier. There is no setting that is right for all tensors; Transformer Engine's default is 1,024 steps and the largest ([TE#1169](https://github.com/NVIDIA/TransformerEngine/issues/1169) and [TE#786](https://github.com/NVIDIA/TransformerEngine/issues/786) are about scales that stayed behind, or became infinite).
#
# ### Exercise 10.2 · `DelayedScaling` · 40 min · medium · 4 points
#
# The object that a layer keeps for each of its tensors. It casts, and records while it casts; at the end of a step it moves on.
#
# | | |
# |---|---|
# | `DelayedScaling(fmt, length=1024, margin=0, algo="max")` | `history`: float32 zeros, (length,); `scale`: float32, 0-d, 1. Both stay the *same tensors* for good: their numbers change in place |
# | `quantize(x, record=True)` | a `Quantized` with granularity `"tensor"`: codes of float32(x) · scale, rounded to nearest even, saturated (infinity too; NaN stays NaN); x's dtype |
# | record | `history[0]` becomes the largest magnitude of x, if that is larger. NaN wins, and stays. An empty x changes nothing |
# | `update()` | `delayed_update` of both, in place |
# | `state_dict()`, `load_state_dict(state)` | `{"history": ..., "scale": ...}`, copies; ValueError, with both lengths in its text, for a history of another length |
# | mind | no gradient flows; the scale *in the result* must not change when this one does; `record=False` leaves the history alone |
#
# By hand, E4M3 with a history of 2, and x = [100, -600] in both steps:
#
# | step | scale | times the scale | codes mean | come back as | history[0] |
# |---|---|---|---|---|---|
# | 1 | 1 | 100, -600 | 96 (a tie), -448 (saturated) | 96, -448 | 600 |
# | 2 | 448 / 600 = 0.7467 | 74.67, -448 | 72, -448 | 96.43, -600 | 600 |
#
# <details><summary>A nudge</summary>Python's <code>max(1.0, nan)</code> is 1.0. Which maximum lets NaN win? And who holds the tensor that you put into the result?</details>
# <details><summary>An approach</summary><code>torch.maximum</code> and <code>absmax</code> for the record; <code>self.scale.clone()</code> in the result; <code>encode(x.float() * scale, fmt)</code> for the codes (<code>cast_saturating</code> is faster, for formats that torch has). In <code>update</code>, <code>copy_</code> into what is there.</details>


# %%
@fill
class DelayedScaling:
    def __init__(self, fmt, length=1024, margin=0, algo="max"):
        ### BEGIN SOLUTION
        self.fmt, self.margin, self.algo = fmt, margin, algo
        self.history, self.scale = torch.zeros(length), torch.tensor(1.0)
        ### END SOLUTION

    def quantize(self, x, record=True):
        ### BEGIN SOLUTION
        x = x.detach()
        if record:
            self.history[0] = torch.maximum(self.history[0], absmax(x).float())  # NaN wins
        scale = self.scale.clone()
        scaled = x.float() * scale
        native = self.fmt.torch_dtype is not None and self.fmt.torch_dtype.itemsize == 1 and self.fmt.signed
        if native:
            codes = cast_saturating(scaled, self.fmt.torch_dtype).view(torch.uint8)
        else:
            codes = encode(scaled, self.fmt).to(torch.uint8)
        return Quantized(codes, scale, self.fmt, "tensor", x.dtype)
        ### END SOLUTION

    def update(self):
        ### BEGIN SOLUTION
        history, scale = delayed_update(self.history, self.scale, self.fmt, self.margin, self.algo)
        self.history.copy_(history)
        self.scale.copy_(scale)
        ### END SOLUTION

    def state_dict(self):
        ### BEGIN SOLUTION
        return {"history": self.history.clone(), "scale": self.scale.clone()}
        ### END SOLUTION

    def load_state_dict(self, state):
        ### BEGIN SOLUTION
        if state["history"].shape != self.history.shape:
            raise ValueError(
                f"the saved history has {len(state['history'])} steps, and this one keeps {len(self.history)}"
            )
        self.history.copy_(state["history"])
        self.scale.copy_(state["scale"])
        ### END SOLUTION


# %%
check(DelayedScaling)

# %% [markdown]
# **Predict first:** the gradient of a layer's output, from the 40 steps above, cast by a `DelayedScaling` to E5M2, whose smallest number is 2^-16. The scale is 1 in the first step. Which share of the gradient is lost, that is, becomes 0? And in step 2?

# %%
scaling = DelayedScaling(E5M2, length=16)
scales, lost, lost_now = [], [], []
for _, _, gradient in seen:
    q = scaling.quantize(gradient)
    scaling.update()
    scales.append(float(q.scale))
    lost.append(float(((dequantize(q) == 0) & (gradient != 0)).float().mean()))
    lost_now.append(float(((dequantize(quantize(gradient, E5M2)) == 0) & (gradient != 0)).float().mean()))
print("scale in steps 1 to 4:", ", ".join(f"{each:.3g}" for each in scales[:4]))
print("lost, delayed:        ", ", ".join(f"{each:.1%}" for each in lost[:4]))
print("lost, current scale:  ", ", ".join(f"{each:.1%}" for each in lost_now[:4]))
current = [57344 / float(gradient.abs().max()) for _, _, gradient in seen]
with plots.style():
    picture, axes = plots.figure(9, 3.6)
    axes.plot(range(1, 41), scales, color=plots.color_of(E5M2), label="delayed, history of 16")
    axes.plot(range(1, 41), current, ":", color=plots.color_of(FP32), label="by the tensor itself")
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step")
    axes.set_ylabel("scale of grad_output")
    axes.set_title("The delayed scale is the smallest of the current ones of the last 16 steps, but for the first")
    axes.legend()
picture

# %% [markdown]
# The first step is a price that every run pays once: it casts with 1. After that the delayed scale follows the *largest* of the last 16 steps, so it is a little smaller than it could be. Where the gradient grows faster than that, it is too large, and numbers saturate.
#
# **What it hides.** Chapter 07's quantizer lets an infinity make the whole tensor NaN, so that nobody can miss it. What does a delayed scale make of it?

# %%
x = torch.tensor([1.0, -2.0, float("inf")])
scaling = DelayedScaling(E4M3, length=16)
for step in (1, 2, 3):
    q = scaling.quantize(x if step == 2 else x[:2])
    scaling.update()
    print(f"step {step}: {dequantize(q).tolist()}, scale of the next step {float(scaling.scale):g}")
print("chapter 07:", dequantize(quantize(x, E4M3)).tolist())

# %% [markdown]
# The infinity came back as a large, finite number, and the run goes on. The scale stays where it is as long as the infinity is in the history, which with a length of 1,024 is a long time. So a run with delayed scales needs another place where a number that is not finite is seen: the norm of the gradient (exercise 10.6), or chapter 05's taps.
#
# ---
# ## Three casts, three products
#
# ### Exercise 10.3 · `delayed_linear` · 45 min · hard · 4 points
#
# Chapter 08's layer has six casts, two for each product. With one scale for a tensor, a tensor looks the same in both of its products. So three casts are enough: x and weight on the way forward, and the gradient of the output when it arrives. What was multiplied forward is kept, in 8 bits, and multiplied again backward.
#
# | | |
# |---|---|
# | in | `x`: (..., K), float32, bfloat16 or float16; `weight`: (N, K); `scalings`: three `DelayedScaling`, of x, weight and the gradient of the output; `record`: what their `quantize` gets |
# | out | (..., N), x's dtype: x · weight.T |
# | backward | the gradient is quantized *once*; grad_x = gradient · weight, grad_weight = gradient.T · x, in the dtype of the gradient that arrives |
# | products | all three by `float8_matmul`, of the same codes as forward |
# | mind | no gradient is computed that nobody asks for; scales may have changed in the meantime, and codes must not |
#
# | tensor | forward | backward |
# |---|---|---|
# | x | quantized, E4M3 | its codes, for grad_weight |
# | weight | quantized, E4M3 | its codes, for grad_x |
# | gradient | | quantized, E5M2, for both |
#
# `transpose` turns a `Quantized` matrix without rounding it again, and `float8_matmul`'s result has the dtype of its first operand.
#
# <details><summary>A nudge</summary>What has to live on from forward to backward, and how large is it, compared with x?</details>
# <details><summary>An approach</summary>A <code>torch.autograd.Function</code> on the rows of x as a matrix. Keep codes and scales with <code>ctx.save_for_backward</code>, build two <code>Quantized</code> from them again with the gradient's dtype, and ask <code>ctx.needs_input_grad</code>.</details>


# %%
@fill
def delayed_linear(x, weight, scalings, record=True):
    ### BEGIN SOLUTION
    scaling_x, scaling_weight, scaling_gradient = scalings

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, weight):
            x8, weight8 = scaling_x.quantize(rows, record), scaling_weight.quantize(weight, record)
            ctx.save_for_backward(x8.codes, x8.scale, weight8.codes, weight8.scale)
            ctx.formats = x8.fmt, weight8.fmt
            return float8_matmul(x8, transpose(weight8))

        @staticmethod
        def backward(ctx, gradient):
            x_codes, x_scale, weight_codes, weight_scale = ctx.saved_tensors
            gradient8 = scaling_gradient.quantize(gradient, record)
            grad_x = grad_weight = None
            if ctx.needs_input_grad[0]:
                weight8 = Quantized(weight_codes, weight_scale, ctx.formats[1], "tensor", gradient.dtype)
                grad_x = float8_matmul(gradient8, weight8)
            if ctx.needs_input_grad[1]:
                x8 = Quantized(x_codes, x_scale, ctx.formats[0], "tensor", gradient.dtype)
                grad_weight = float8_matmul(transpose(gradient8), x8)
            return grad_x, grad_weight

    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return Products.apply(rows, weight).reshape(*x.shape[:-1], weight.shape[0])
    ### END SOLUTION


# %%
check(delayed_linear)

# %% [markdown]
# **Predict first:** the same layer over the 40 steps, by current scales (chapter 08, tensorwise) and by delayed ones. How much larger is the error of the output, of grad_x and of grad_weight, once the first steps are over?


# %%
def errors_of(layer, x, weight, gradient):
    """How far the three products are from the exact ones, relative to their size."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    output = layer(x, weight)
    output.backward(gradient)
    wide = [each.detach().double() for each in (x, weight, gradient)]
    exact = wide[0] @ wide[1].T, wide[2] @ wide[1], wide[2].T @ wide[0]
    got = output.detach(), x.grad, weight.grad
    return torch.tensor([float((one - other).norm() / other.norm()) for one, other in zip(got, exact, strict=True)])


scalings = tuple(DelayedScaling(fmt, length=16) for fmt in (E4M3, E4M3, E5M2))
rows = {"current": [], "delayed": []}
for three in seen:
    rows["current"].append(errors_of(lambda x, w: float8_linear(x, w, RECIPES["tensorwise"]), *three))
    rows["delayed"].append(errors_of(lambda x, w: delayed_linear(x, w, scalings), *three))
    for scaling in scalings:
        scaling.update()
for name, errors in rows.items():
    first, rest = errors[0], torch.stack(errors[3:]).mean(0)
    said = "  ".join(
        f"{product} {a:.1%} then {b:.1%}"
        for product, a, b in zip(("output", "grad_x", "grad_weight"), first, rest, strict=True)
    )
    print(f"{name}: step 1 {said}")

# %% [markdown]
# After the first step there is little to choose between them. A float has the same *relative* precision wherever a number stands in its range. A scale that is too small by a factor of two costs something only at the lower end, where numbers become subnormal or zero.
#
# ---
# ## Sizes that do not fit
#
# Tiny Shakespeare has 65 different characters, so a GPT that writes it has a head with 65 outputs. A GPU multiplies 8-bit matrices whose sizes are multiples of 16 (chapter 09). There are two ways out.
#
# ### Exercise 10.4 · `padded_linear` · 30 min · medium · 3 points
#
# The first: fill up with zeros, multiply, and cut off what they gave. A zero adds nothing to a sum, and a row of zeros gives a row that nobody looks at.
#
# | | |
# |---|---|
# | in | `x`: (..., K); `weight`: (N, K); `linear`: a function of two matrices, (M, K) and (N, K), that gives (M, N); `multiple` |
# | `linear` takes | only sizes M, K and N that are all multiples of `multiple` (its gradients sum over M and N). It is called once, with the least such sizes |
# | out | (..., N): what `linear` would give without that rule |
# | backward | gradients flow to x and weight, in their own shapes |
# | mind | all leading dimensions of x are rows together; sizes that divide are left as they are |
#
# By hand, x of (2, 9, 16) and weight of (65, 16), multiples of 16:
#
# | size | is | becomes |
# |---|---|---|
# | M, rows | 2 · 9 = 18 | 32 |
# | K | 16 | 16 |
# | N | 65 | 80 |
#
# <details><summary>A nudge</summary>Which operation that adds zeros does autograd know how to differentiate? You wrote one in chapter 09.</details>
# <details><summary>An approach</summary>Rows as a matrix; <code>pad_to_multiple(each, multiple, (0, 1))</code> for both; one call; a slice of the first rows and columns; the shape of x again. Autograd does the rest.</details>


# %%
@fill
def padded_linear(x, weight, linear, multiple=16):
    ### BEGIN SOLUTION
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    output = linear(pad_to_multiple(rows, multiple, (0, 1)), pad_to_multiple(weight, multiple, (0, 1)))
    return output[: rows.shape[0], : weight.shape[0]].reshape(*x.shape[:-1], weight.shape[0])
    ### END SOLUTION


# %%
check(padded_linear)

# %% [markdown]
# The second way is to leave such a layer alone. Both work. What does each cost?

# %%
for title, rows, width, symbols in (
    ("65 symbols, 8 batches of 32 tokens", 8 * 32, 64, 65),
    ("65 symbols, 8 batches of 31 tokens", 8 * 31, 64, 65),
    ("GPT-2's head, 12 batches of 1,024", 12 * 1024, 768, 50_257),
):
    sizes = rows, width, symbols
    full = [-(-each // 16) * 16 for each in sizes]
    more = math.prod(full) / math.prod(sizes) - 1
    print(f"{title:35} {sizes} is multiplied as {tuple(full)}, {more:.1%} more multiplications")

torch.manual_seed(0)
head, x = torch.nn.Linear(64, 65, bias=False), torch.randn(8, 31, 64)
padded = float8_layer(head, "tensorwise")
with torch.no_grad():
    off = float((padded(x) - head(x)).norm() / head(x).norm())
print(f"{type(padded).__name__} in 8 bits is {off:.1%} from float32; a head that is skipped is 0 % from it")

# %% [markdown]
# Zeros are cheap where a size is large. What is dear about the head is its error: it makes the logits, and there is no layer behind it that could make up for anything. So most people skip the head, for its precision and not for its 65 symbols; `skip=("head",)` is the default here. A *batch* that 16 does not divide is another matter: it stops `grad_weight` of every layer ([ao#3111](https://github.com/pytorch/ao/issues/3111)). Choose the batch so that it divides, or pad; skipping would skip everything.
#
# ---
# ## The whole model
#
# ### Exercise 10.5 · `convert_to_float8` · 40 min · hard · 4 points
#
# Put a layer in 8 bits in the place of every linear layer of a model. It sounds like three lines. Then comes a model in which one layer stands in two places, or whose head shares its weight with the embedding.
#
# | | |
# |---|---|
# | in | `model`; `recipe`: a `Recipe`, or one of `NAMES`; `skip`: layers with one of these texts in their *whole* name stay |
# | changes | the model itself: in the place of each `nn.Linear` comes `float8_layer(it, recipe)`, which has the very same parameters |
# | a linear layer | is an `nn.Linear` itself; an object of a subclass stays |
# | in several places | converted once, and that one layer stands in all of them; it stays if *one* of its names is to be skipped |
# | out | the names of what was converted, the first of each, in the order of `named_modules` |
# | mind | ValueError, and nothing is changed: for an unknown recipe (with the names of all in its text), also where there is nothing to convert; and for a model that is itself a linear layer |
#
# By hand, with the default skip:
#
# | model | converted | why |
# |---|---|---|
# | up, block.0, head | up, block.0 | "head" is a part of "head" |
# | up, other, and up once more as head.0 | other | one of up's names has "head" in it |
# | attention.out_proj, of a subclass | nothing | it has a class of its own for a reason |
#
# <details><summary>A nudge</summary>What has to be known of all places of a layer, before the first one is replaced?</details>
# <details><summary>An approach</summary>Errors first (<code>require_recipe</code> raises the one for recipes). <code>named_modules(remove_duplicate=False)</code> gives every place: collect the names of each layer in a dict. Then convert, and <code>model.set_submodule(name, layer)</code> for all names.</details>


# %%
@fill
def convert_to_float8(model, recipe, skip=("head",)):
    ### BEGIN SOLUTION
    recipe = require_recipe(recipe)
    if type(model) is torch.nn.Linear:
        raise ValueError("the model is itself a linear layer: put it into a module, whose layers can be replaced")
    names = {}  # a layer -> its names, in the order in which they are met
    for name, found in model.named_modules(remove_duplicate=False):
        if type(found) is torch.nn.Linear:
            names.setdefault(found, []).append(name)
    converted = []
    for linear, places in names.items():
        if any(text in name for text in skip for name in places):
            continue
        layer = float8_layer(linear, recipe)
        for place in places:
            model.set_submodule(place, layer)
        converted.append(places[0])
    return converted
    ### END SOLUTION


# %%
check(convert_to_float8)

# %%
for recipe in NAMES:
    model = small_gpt()
    names = convert_to_float8(model, recipe)
    kinds = {type(layer).__name__ for layer in model.modules() if isinstance(layer, torch.nn.Linear)}
    tied = model.head.weight is model.token_embedding.weight
    print(f"{recipe:20} {len(names)} layers converted; {', '.join(sorted(kinds))}; head and embedding tied: {tied}")

# %% [markdown]
# **Predict first:** the same model, converted by you and by torchao's own `convert_to_float8_training`, trained for eight steps on the same batches. Are the losses equal to the last bit?


# %%
def losses_of(model, steps):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        loss = model(*batch_of(step))[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


try:
    for recipe in RECIPES:
        mine = small_gpt()
        convert_to_float8(mine, recipe)
        ours, theirs = losses_of(mine, 8), losses_of(torchao_training(small_gpt(), recipe), 8)
        equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
        print(f"{recipe:20} yours {ours[-1]:.6f}  torchao {theirs[-1]:.6f}  equal in {equal} of 8 steps")
except AbsentError as absent:
    print(f"torchao {absent}: there is nothing to compare with here")

# %% [markdown]
# With the reference's products they are equal in all steps. If yours differ in the last digits, your `float8_matmul` adds up in another order, which is allowed: what is wrong in a cast would show in the first digits.
#
# ### Exercise 10.6 · `training_step` · 45 min · medium · 4 points
#
# One step, whole. With delayed scales there is something new at its end, and it has to happen in *every* step, taken or not.
#
# | | |
# |---|---|
# | in | `model(x, y)` gives (logits, loss); `batches`: (x, y) pairs; `optimizer`, which has all parameters of the model; `scalings`; `clip` |
# | gradient | that of the *mean* of the losses of all batches, and of nothing that was there before |
# | norm | of the gradients of all parameters together; above `clip` they are scaled down to it (0: never) |
# | the optimizer steps | only if the norm is finite |
# | in either case | no parameter keeps a gradient; then every one of the scalings is updated, once |
# | out | (mean loss, norm before clipping), two floats |
#
# By hand, two batches and a clip of 1:
#
# | gradient of batch 1 | of batch 2 | of the mean | norm | after clipping |
# |---|---|---|---|---|
# | (6, 0) | (0, 8) | (3, 4) | 5 | (0.6, 0.8) |
# | (6, 0) | (0, inf) | (3, inf) | inf | no step, and the scales move on |
#
# Why must they move on when the step is skipped? What was recorded in it may be the very outlier that made it fail. Left in `history[0]`, it would be mixed up with what the next step records.
#
# <details><summary>A nudge</summary>Gradients add up by themselves until somebody clears them. Who divides, and when?</details>
# <details><summary>An approach</summary><code>zero_grad</code>; for each batch <code>(loss / len(batches)).backward()</code>; <code>torch.nn.utils.clip_grad_norm_</code> returns the norm before clipping (with <code>inf</code> as its limit it only measures); <code>math.isfinite</code>; and then what happens in either case.</details>


# %%
@fill
def training_step(model, batches, optimizer, scalings=(), clip=1.0):
    ### BEGIN SOLUTION
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for x, y in batches:
        loss = model(x, y)[1] / len(batches)
        loss.backward()
        total += loss.item()
    norm = float(torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]))
    if clip and norm > clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, torch.tensor(norm))
    if math.isfinite(norm):
        optimizer.step()
    model.zero_grad(set_to_none=True)
    for scaling in scalings:
        scaling.update()
    return total, norm
    ### END SOLUTION


# %%
check(training_step)

# %% [markdown]
# **Predict first:** a GPT that trains by delayed scales with your step, two batches in each, for 40 steps; and in step 20 it meets a batch whose gradients are not finite. What do loss and scale do afterwards?

# %%
model = small_gpt()
convert_to_float8(model, "delayed")
scalings = scalings_of(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
watched = scalings["blocks.1.mlp.up grad_output"]


class Broken(torch.nn.Module):
    """A model in a bad moment: its loss is infinite."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        logits, loss = self.model(x, y)
        return logits, loss * float("inf")


for step in range(1, 41):
    batches = [batch_of(2 * step), batch_of(2 * step + 1)]
    loss, norm = training_step(Broken(model) if step == 20 else model, batches, optimizer, list(scalings.values()))
    if step in (1, 2, 19, 20, 21, 22, 40):
        print(f"step {step:2}  loss {loss:8.4f}  norm {norm:8.3f}  scale of a gradient {float(watched.scale):.4g}")

# %% [markdown]
# The bad step was skipped, and the weights are fine. The scale of that gradient stands still from now on: there is an infinity, or a NaN, among its 1,024 steps. Here it stands at a good value. Had the gradients been a hundred times smaller a week later, it would still be there. Watch for that in a long run: a scale that has not moved for a thousand steps is no scale that follows anything.
#
# ---
# ## A hundred steps
#
# All of it together, with your answers in every place: `lowprec-lab train --precision fp8` converts a model with your `convert_to_float8`, and its note says whose code runs. Here is a small GPT, a hundred steps each.

# %%
small = {"layers": 2, "heads": 2, "width": 64, "context": 32, "batch": 4, "steps": 100, "lr": 3e-3, "warmup": 10}
small |= {"eval_every": 100, "eval_batches": 10, "sample": 0, "threads": 1}
ways = {
    "float32": ({"precision": "fp32"}, FP32, "-"),
    "BF16": ({"precision": "bf16"}, BF16, "-"),
    "FP8 tensorwise": ({"precision": "fp8", "recipe": "tensorwise"}, E4M3, "-"),
    "FP8 delayed": ({"precision": "fp8", "recipe": "delayed"}, E5M2, "--"),
}
curves, finals = {}, {}
with tempfile.TemporaryDirectory() as folder:
    for name, (changes, _, _) in ways.items():
        told = settings("baby", **small, **changes)
        result = train(told, f"{folder}/{name}", corpus=corpus, progress=False, say=lambda line: None)
        print(f"{name}: {result.trainer.precision.note or 'nothing is emulated'}")
        curves[name], finals[name] = [each["loss"] for each in result.records], result.val_loss
for name, final in finals.items():
    print(f"{name:15} validation loss {final:.4f}, {final / finals['float32'] - 1:+.2%} against float32")
with plots.style():
    picture, axes = plots.figure(9, 3.8)
    for name, (_, fmt, line) in ways.items():
        axes.plot(range(1, 101), curves[name], line, color=plots.color_of(fmt), linewidth=1.3, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title("A hundred steps on the same batches")
    axes.legend()
picture

# %% [markdown]
# Can you see a difference? A plot is no measurement. Nor is one run: another seed moves the end by more than what we are looking for.
#
# ### Exercise 10.7 · `loss_gap` · 20 min · easy · 2 points
#
# Runs of one seed have the same first weights and see the same batches, so they go up and down together. Compare them in *pairs*, and what they have in common drops out.
#
# | | |
# |---|---|
# | in | `run`, `baseline`: tuples of (seed, last validation loss), in any order |
# | out | (mean of run / baseline - 1 over the seeds that both have, its standard error), float64 |
# | standard error | sample standard deviation (n - 1) of these shares, over the root of n; NaN where n is 1 |
# | mind | seeds that only one of them has are left out; ValueError where none is in both |
#
# By hand, run ((1, 2.02), (2, 2.00)) and baseline ((2, 1.98), (1, 2.00)):
#
# | seed | share |
# |---|---|
# | 1 | 2.02 / 2.00 - 1 = 1.00 % |
# | 2 | 2.00 / 1.98 - 1 = 1.01 % |
#
# The mean is 1.005 %, with an error of 0.005 %. Unpaired, the two losses of each side are 1 % apart by themselves, and one could say nothing.
#
# <details><summary>A nudge</summary>What does a dict of one of the two make easy?</details>
# <details><summary>An approach</summary>A list of shares; its mean; the sum of squared differences from it, divided by n - 1 and by n; the root.</details>


# %%
@fill
def loss_gap(run, baseline):
    ### BEGIN SOLUTION
    theirs = dict(baseline)
    gaps = [loss / theirs[seed] - 1 for seed, loss in run if seed in theirs]
    if not gaps:
        raise ValueError("no seed is in both: only runs that saw the same batches can be compared")
    mean = sum(gaps) / len(gaps)
    if len(gaps) == 1:
        return mean, math.nan
    variance = sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)
    return mean, math.sqrt(variance / len(gaps))
    ### END SOLUTION


# %%
check(loss_gap)

# %% [markdown]
# ---
# ## What FP8 costs
#
# Two thousand steps of the `baby` preset, seven ways, each with several seeds, took hours. They were recorded, and are shown here.

# %%
recorded = long_runs("10_fp8_nanogpt")
print(f"{recorded.made_with['text']}, {recorded.made_with['steps']} steps")
print(recorded.table("BF16"))
recorded.plot("The baby GPT: seven ways to train it")

# %% [markdown]
# Seven curves, and the eye cannot tell them apart. So subtract one of them:

# %%
recorded.plot_gaps("BF16", "How far the others are above BF16 (bars: one standard error)")

# %% [markdown]
# **Predict first:** which of these curves are a gap, and which are noise? Your `loss_gap` says how many standard errors lie between each and BF16.


# %%
def pairs(name):
    return tuple(recorded.finals(name).items())


kinds = list(dict.fromkeys(run.name for run in recorded.runs))
gaps = {name: loss_gap(pairs(name), pairs("BF16")) for name in kinds if name != "BF16"}
for name, (mean, error) in gaps.items():
    print(f"{name:25} {mean:+.2%} ± {error:.2%} against BF16: {abs(mean) / error:4.1f} standard errors")
best = min((name for name in gaps if name.startswith("FP8")), key=lambda name: gaps[name][0])
worst = max((name for name in gaps if name.startswith("FP8")), key=lambda name: gaps[name][0])
print(f"FP8 at its best: {best} {gaps[best][0]:+.2%}; at its worst: {worst} {gaps[worst][0]:+.2%}")
print(f"BF16 weights: {gaps['BF16, weights too'][0]:+.2%}")

# %% [markdown]
# DeepSeek-V3's report names 0.25 % as the gap of its FP8 training to BF16. What an FP8 model of ours writes after these steps:

# %%
print(next(run.sample for run in recorded.runs if run.name == "FP8 tensorwise" and run.sample))

# %% [markdown]
# Look at the line "BF16, weights too". Everything in it has 16 bits: weights, gradients, the optimizer's moments. No product in it is as coarse as one in FP8. And it loses more than they do.
#
# Chapter 03 has the reason: an update that is smaller than half an ulp of the weight is lost, whole. An FP8 *product* is wrong by a few percent, in one direction for one batch and in another for the next, and the weights are an average of many. An update that is lost is lost every time.
#
# **Predict first:** a small GPT after 60 steps in float32. Which share of its updates would not change a BF16 weight at all, at the learning rate of the middle of a run, and at that of its end?

# %%
model = small_gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.99))
for step in range(60):
    model(*batch_of(step))[1].backward()
    optimizer.step()
    optimizer.zero_grad()
for lr in (1.5e-3, 1e-4):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = lr
    model(*batch_of(100))[1].backward()
    optimizer.step()
    optimizer.zero_grad()
    lost = moved = 0
    for old, new in zip(before, model.parameters(), strict=True):
        short, update = old.bfloat16(), new.detach() - old
        lost += int((((short.float() + update).bfloat16() == short) & (update != 0)).sum())
        moved += int((update != 0).sum())
    print(f"learning rate {lr:g}: {lost / moved:.1%} of {moved:,} updates would be lost in BF16 weights")

# %% [markdown]
# Now look at the picture of gaps again: the line of BF16 weights leaves the others late, as the learning rate falls and weights notice less and less.
#
# So keep what adds up in float32: weights, and what the optimizer knows of them. What is only multiplied can have 8 bits. (Where memory forbids that, *stochastic rounding* of chapter 03 keeps small updates on average.)
#
# ### Time and memory
#
# On this machine FP8 is emulated, and saves no time. Here is what a step costs, measured now, for the small GPT:

# %%
times = {}
every = {**{name: changes for name, (changes, _, _) in ways.items()}, "BF16, weights too": {"precision": "pure_bf16"}}
every |= {f"FP8 {name}": {"precision": "fp8", "recipe": name} for name in NAMES}
trainers = {
    name: Trainer(settings("baby", **small, **changes), corpus, say=lambda line: None)
    for name, changes in every.items()
}
for trainer in trainers.values():
    trainer.take_step()
for _ in range(7):
    for name, trainer in trainers.items():
        start = time.perf_counter()
        trainer.take_step()
        times.setdefault(name, []).append(time.perf_counter() - start)
base = sorted(times["float32"])[3]
for name, runs in times.items():
    print(f"{name:25} {sorted(runs)[3] * 1e3:6.1f} ms a step, {sorted(runs)[3] / base:.2f} of float32's")

# %% [markdown]
# And on a GPU? Chapter 08's rule of thumb says which layers would be faster at all:

# %%
for name, tokens in (("baby", 12 * 64), ("shakespeare_char", 64 * 256), ("gpt2", 12 * 1024)):
    with torch.device("meta"):  # a model without memory: only the shapes are wanted
        model = GPT(preset(name, vocab_size=50_304 if name == "gpt2" else 65))
    linears = [each for each, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    small_ones = {recipe: len(too_small(model, recipe, tokens)) for recipe in ("tensorwise", "rowwise")}
    said = ", ".join(f"{count} too small for {recipe}" for recipe, count in small_ones.items())
    print(f"{name:17} {len(linears)} linear layers: {said}")

# %% [markdown]
# "FP8 is slower than BF16" ([ao#572](https://github.com/pytorch/ao/issues/572), [torchtitan#1191](https://github.com/pytorch/torchtitan/issues/1191)) is mostly this: small layers, or a model that was not compiled, so that every cast is a pass of its own. `--skip small` leaves such layers alone.
#
# Memory, by arithmetic, for GPT-2's preset and one batch of 12 · 1,024 tokens. *Saved* is what linear layers keep of their inputs until backward:

# %%
with torch.device("meta"):
    model = GPT(preset("gpt2", vocab_size=50_304))
size, tokens = model.size(), 12 * 1024
inputs = sum(layer.in_features for layer in model.modules() if isinstance(layer, torch.nn.Linear)) * tokens
kept = {"weights": size, "gradients": size, "moments": 2 * size, "saved": inputs}
plans = {  # bytes for a number of each
    "float32": (4, 4, 4, 4),
    "BF16 autocast": (4, 4, 4, 2),
    "BF16, weights too": (2, 2, 2, 2),
    "FP8, x kept in BF16": (4, 4, 4, 2),
    "FP8, x kept in codes": (4, 4, 4, 1),
}
print(f"{'GB':22}", *(f"{name:>10}" for name in kept), f"{'all':>10}")
for name, widths in plans.items():
    each = [count * width / 1e9 for count, width in zip(kept.values(), widths, strict=True)]
    print(f"{name:22}", *(f"{part:10.2f}" for part in each), f"{sum(each):10.2f}")

# %% [markdown]
# Chapter 08's layer keeps x itself, and casts it again on the way back (8.C). Your `delayed_linear` keeps codes, one byte for each number. Weights, gradients and moments are the same: FP8 training is about *products*, and not about a small model. (Copies of the weights in 16 or 8 bits, which a layer makes for its products, are left out: they live for one step, and are small beside the rest.)
#
# ---
# ## Read the real code
#
# torchao's `convert_to_float8_training` ends in this traversal:

# %%
AO = "https://github.com/pytorch/ao/blob/36027d8/torchao/float8/float8_linear_utils.py"
print(
    installed_lines(
        "torchao", "float8/float8_linear_utils.py", "if isinstance(module, nn.Linear) and (", after=42, link=AO
    )
)

# %% [markdown]
# **10.A** `nn.MultiheadAttention` has an `out_proj` whose class is a *subclass* of `nn.Linear`. Is it replaced by torchao? (`True` or `False`; there is no filter.)

# %%
question(
    "10.A",
    ### BEGIN SOLUTION
    True,
    ### END SOLUTION
)

# %% [markdown]
# **10.B** Somebody writes `layer = torch.nn.Linear(64, 64)`, then `convert_to_float8_training(layer)`, and trains `layer`. Does `layer` compute in FP8? (`True` or `False`.)

# %%
question(
    "10.B",
    ### BEGIN SOLUTION
    False,
    ### END SOLUTION
)

# %% [markdown]
# **Transformer Engine's rule** is in [delayed_scaling.cu](https://github.com/NVIDIA/TransformerEngine/blob/080e1b4c0a89472573b0924dbcfe6df23784c86a/transformer_engine/common/recipe/delayed_scaling.cu): a kernel whose thread blocks each have one scale. Read how it moves the history, how it finds the largest (with C's `fmaxf`), and when the scale stays. (This early version does not catch an infinite scale; later ones put the largest float32 in its place. There is a second kernel for many tensors at once in later versions, which leaves a history as it is when nothing was recorded.)
#
# **10.C** A history of [NaN, 2, 4], E4M3, `"max"`, and a scale of 1 in use. Yours keeps 1. Which scale does *this kernel* go on with? (`fmaxf(2, NaN)` is 2.)

# %%
question(
    "10.C",
    ### BEGIN SOLUTION
    112.0,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## Break it
#
# **The loss falls, and most of the model stands still.** Somebody wrote a conversion of their own, and it runs without an error:


# %%
def convert_with_copies(model):
    """Looks right: every layer is replaced, and every new one has the weights of the old one."""
    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and "head" not in name:
            new = Float8Linear(layer.in_features, layer.out_features, layer.bias is not None, "tensorwise")
            new.load_state_dict(layer.state_dict())
            model.set_submodule(name, new)


def trained(order):
    model = small_gpt()
    if order == "converted first":
        convert_with_copies(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
    if order == "converted last":
        convert_with_copies(model)
    if order == "parameters shared":
        convert_to_float8(model, "tensorwise")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    layers = [layer for layer in model.modules() if hasattr(layer, "recipe")]
    before = [layer.weight.detach().clone() for layer in layers]
    for step in range(15):
        loss = model(*batch_of(step))[1]
        loss.backward()
        optimizer.step()
        model.zero_grad()
    moved = sum(float((layer.weight.detach() - old).norm()) for layer, old in zip(layers, before, strict=True))
    return loss.item(), moved / sum(float(old.norm()) for old in before), model, held


for order in ("converted first", "converted last", "parameters shared"):
    loss, moved, broken, held = trained(order)
    if order == "converted last":
        model_of_10d, held_by_the_optimizer = broken, held
    print(f"{order:18} loss {loss:.2f}; the weights of linear layers moved by {moved:.1%}")

# %% [markdown]
# In the second one the optimizer was made before the conversion. It still steps, on weights that no layer uses. Embedding, positions and norms learn, so the loss falls; in the first steps even as fast as in the others, since there is enough to learn from how often each character comes. The loss alone does not tell you: look at what moves (chapter 05's `update_ratio` would be 0).
#
# **10.D** Of how many tensors among `model_of_10d.parameters()` does that optimizer know nothing? (`held_by_the_optimizer` has the ids of those that it holds.)

# %%
question(
    "10.D",
    ### BEGIN SOLUTION
    8,
    ### END SOLUTION
)

# %% [markdown]
# Whoever shares the parameters, as your `convert_to_float8` does, cannot make that mistake in either order. Who copies has to convert first.
#
# **A step back after every restart.** Checkpoints were written with `torch.save(model.state_dict(), ...)`, and the loss jumps a little whenever a run with delayed scales goes on from one:

# %%
model = small_gpt()
convert_to_float8(model, "delayed")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
for step in range(10):
    training_step(model, [batch_of(step)], optimizer, list(scalings_of(model).values()))
again = small_gpt()
convert_to_float8(again, "delayed")
again.load_state_dict(model.state_dict())
print(
    "names with 'scale' or 'history' in the model's state:",
    [n for n in model.state_dict() if "scal" in n or "hist" in n],
)


def zeros_in_gradients(model):
    """The share of weight gradients that are exactly 0 in one step, without taking it."""
    model.zero_grad()
    model(*batch_of(10))[1].backward()
    found = [p.grad for name, p in model.named_parameters() if "mlp" in name and p.dim() == 2]
    model.zero_grad()
    return float(torch.cat([each.flatten() == 0 for each in found]).float().mean())


print(f"gradients of 0: {zeros_in_gradients(model):.1%} in the run, {zeros_in_gradients(again):.1%} after a restart")
for name, scaling in scalings_of(again).items():
    scaling.load_state_dict(scalings_of(model)[name].state_dict())
print(f"with histories and scales: {zeros_in_gradients(again):.1%}")

# %% [markdown]
# A delayed scale is a *state* of the run, like the optimizer's moments, though it belongs to no parameter. `lowprec-lab train` puts all of them into its checkpoints. (A current scale has no memory, and nothing to forget.)
#
# ---
# ## What you built
#
# A GPT that trains in FP8: the formats of chapter 01, the rounding of chapter 02, the quantizer of chapter 07, the products of chapter 08, the sizes of chapter 09, and from this chapter scales with a memory, the conversion, the step, and the measurement.
#
# Three points to take along:
#
# - A float's precision is relative. So a scale need not be exact, only in the right region; that is why a scale from yesterday will do.
# - Products forgive 8 bits. Sums do not: weights, moments and the accumulator of a product want 32.
# - A gap of a percent is measured with pairs and an error, or not at all.
#
# All of it again, in a terminal: `lowprec-lab record 10` (what was stopped goes on). One of the runs: `lowprec-lab train --preset baby --precision fp8 --recipe delayed`. `lowprec-lab compare` draws runs next to each other.

# %%
progress()
