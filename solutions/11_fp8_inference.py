# %% [markdown]
# # 11 · FP8 inference: what does a served model need from 8 bits?
#
# **Takes** 5 to 6 hours. **Needs** [chapter 07](07_quantizer.ipynb): amax, scales, granularity; [chapter 08](08_float8_linear.ipynb): which scales come out of a sum. **Gives** you a GPT whose weights, activations and cache are in 8 bits by the rules of vLLM, a file that others can load, and the numbers that say what it costs.
#
# Training is over. Nobody computes gradients any more, and the weights never change again. Now the model is asked for one token after the other, and for each of them *all* of its weights are read from memory, and all keys and values of the tokens before. A server waits for memory far more than for arithmetic, so bytes are time. Which bytes are there?

# %% tags=["setup"]
try:
    import copy
    import math
    import tempfile
    import warnings
    from pathlib import Path

    import torch

    from lowprec_lab import check, fill, plots, progress, question, reveal
    from lowprec_lab.checkpoints import CONFIG, WEIGHTS, load_fp8_checkpoint, read_safetensors, save_fp8_checkpoint
    from lowprec_lab.data import load_corpus, step_generator
    from lowprec_lab.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP16, FP32
    from lowprec_lab.gpt import GPT, GPTConfig, preset
    from lowprec_lab.inference import (
        FP8,
        MIN_SCALE,
        RECIPES,
        TOP,
        UNSET,
        Float8InferenceLinear,
        Float8KVCache,
        WithCache,
        cache_keeps,
        cache_scales,
        cached,
        calibrate_cache,
        calibrate_static,
        compare_models,
        compensate,
        generate,
        keys_and_values,
        layer_in_8_bits,
        layer_inputs,
        layer_output,
        layer_refuses,
        layer_state,
        make_caches,
        model_bytes,
        perplexity,
        perplexity_leaves,
        perplexity_of,
        quantize_activation_per_token,
        quantize_model,
        quantize_per_tensor,
        quantize_weight_per_channel,
        smooth,
    )
    from lowprec_lab.libraries import AbsentError, compressed_tensors_rows
    from lowprec_lab.quantizer import dequantize, quantize, quantize_int8
    from lowprec_lab.races import race
    from lowprec_lab.reading import installed_lines
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %%
torch.set_num_threads(1)  # a model as small as this is no quicker on more of them
corpus = load_corpus()
SIZE = preset("baby", vocab_size=len(corpus.vocabulary), width=64)  # half as wide as the others: to be quick
torch.manual_seed(11)
model = GPT(SIZE)
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
STEPS = 400
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 4e-3 * min(1, (step + 1) / 20) * (1 - step / STEPS)
    loss = model(*corpus.batch("train", step_generator(11, step), 12, SIZE.context))[1]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()


def text(split, count):
    """Batches (x, y), spread evenly over a split: the same ones every time."""
    return [corpus.even_batch(split, which, count, 12, SIZE.context) for which in range(count)]


samples, validation = text("train", 6), text("validation", 6)  # for calibrating, and for measuring
linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and name != "head"]
in_linear = sum(model.get_submodule(name).weight.numel() for name in linear)
cache = sum(each.k.numel() + each.v.numel() for each in make_caches(model))
print(f"weights of linear layers {in_linear:9,} numbers")
print(f"all other parameters     {model.size() - in_linear:9,}")
print(f"keys and values          {cache:9,} for each sequence of {SIZE.context} tokens that is being written")

# %% [markdown]
# Nearly all of it is the weights of the linear layers; and with many readers and long texts the cache outgrows them. (Take a model of 8 billion parameters with 32 layers, each with 8 heads of 128 numbers for keys and as many for values. A text of 131,072 tokens has 8.6 billion numbers in the cache, and that is a *single* reader.) So these two go into 8 bits. The rest is small, and stays as it is.
#
# **Words, and one that changes its meaning.** Servers, and the files they load, call **scale** what a code is *multiplied* by to get its value: `value = code * scale`. That is the inverse of chapter 07's. All of this page has it so. A row of a weight is an **output channel**, a row of an activation is a **token**. **W8A8** says that weights and activations have 8 bits; in **W8A16**, or **weight-only**, activations keep 16. **Dynamic** scales are worked out from each tensor as it comes, **static** ones beforehand.
#
# ---
# ## Codes
#
# ### Exercise 11.1 · `quantize_weight_per_channel` · 20 min · easy · 2 points
#
# A weight is quantized once, so one can take one's time. Each output channel gets a scale of its own: the product sums over inputs, and what belongs to an output comes out of that sum.
#
# | | |
# |---|---|
# | in | `weight`: (N, K), float32, bfloat16 or float16 |
# | out | `(codes, scale)`: codes (N, K) float8_e4m3fn, scale (N, 1) float32 |
# | how | scale = amax of the row / 448, but at least `MIN_SCALE` = 1 / (448 · 512); codes = weight / scale, both in float32, rounded to nearest, saturated |
# | mind | a bfloat16 weight has a float32 scale; a row of zeros has a scale too; NaN makes the row NaN; an infinity makes the scale infinite |
#
# By hand:
#
# | row | scale | codes stand for | back: code · scale |
# |---|---|---|---|
# | 3, -1, 0.01 | 3 / 448 = 0.0066964 | 448, -144, 1.5 | 3, -0.96429, 0.010045 |
# | 0, 0, 0 | 1 / (448 · 512) = 4.36e-6 | 0, 0, 0 | 0, 0, 0 |
# | 1e-6, 0, 0 | 4.36e-6, the floor | 0.234375, 0, 0 | 1.02e-6, 0, 0 |
#
# The floor is where 448 · scale reaches 2^-9, the smallest number of E4M3 itself.
#
# `FP8`, `TOP` and `MIN_SCALE` are given: torch.float8_e4m3fn, 448.0 and the floor.
#
# <details><summary>A nudge</summary>Which dtype has a bfloat16 tensor divided by 448? And what does <code>.to(FP8)</code> do to 500?</details>
# <details><summary>An approach</summary><code>weight.float()</code> first. <code>amax(-1, keepdim=True)</code> of the magnitudes, divided, <code>.clamp(min=MIN_SCALE)</code>. Clamp the quotients to ±448 before you convert.</details>


# %%
@fill
def quantize_weight_per_channel(weight):
    ### BEGIN SOLUTION
    wide = weight.detach().float()  # before anything is divided: a bfloat16 quotient would be a bfloat16 scale
    scale = (wide.abs().amax(-1, keepdim=True) / TOP).clamp(min=MIN_SCALE)
    return (wide / scale).clamp(-TOP, TOP).to(FP8), scale
    ### END SOLUTION


# %%
check(quantize_weight_per_channel)

# %% [markdown]
# ### Exercise 11.2 · `quantize_activation_per_token` · 25 min · medium · 3 points
#
# An activation is there for a moment, and is quantized each time. Each token gets its own scale: what other readers of the server write in the same batch then changes nothing in *your* text.
#
# | | |
# |---|---|
# | in | `x`: (..., K), float32, bfloat16 or float16; `upper_bound`: a number, or None |
# | out | `(codes, scale)`: codes (..., K) float8_e4m3fn, scale (..., 1) float32 |
# | how | as in 11.1, for each row along the last dimension |
# | upper bound | no **amax** counts as more than this. What is above it saturates |
# | mind | any number of leading dimensions |
#
# By hand, with `upper_bound=2.0`:
#
# | token | amax | counts as | scale | codes stand for | back |
# |---|---|---|---|---|---|
# | 1, 4 | 4 | 2 | 2 / 448 | 224, 448 | 1, 2 |
# | 1, 0.5 | 1 | 1 | 1 / 448 | 448, 224 | 1, 0.5 |
#
# vLLM calls this number `scale_ub`, an upper bound of the scale, and bounds the amax with it. It keeps one outlier of a token from taking the range of all its other numbers.
#
# <details><summary>A nudge</summary>How much of 11.1 is about weights at all?</details>
# <details><summary>An approach</summary>11.1 with <code>amax.clamp(max=upper_bound)</code> in between. Saturation is no longer a formality.</details>


# %%
@fill
def quantize_activation_per_token(x, upper_bound=None):
    ### BEGIN SOLUTION
    wide = x.detach().float()
    amax = wide.abs().amax(-1, keepdim=True)
    if upper_bound is not None:
        amax = amax.clamp(max=upper_bound)
    scale = (amax / TOP).clamp(min=MIN_SCALE)
    return (wide / scale).clamp(-TOP, TOP).to(FP8), scale
    ### END SOLUTION


# %%
check(quantize_activation_per_token)

# %% [markdown]
# **Predict first:** compressed-tensors is the library that writes such checkpoints. Does it have your codes and scales: for ordinary tokens, a token of zeros, a tiny one, and for bfloat16?

# %%
ordinary = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
cases = {
    "float32, ordinary": ordinary,
    "zeros": torch.zeros(1, 64),
    "1e-6 of ordinary": ordinary[:1] * 1e-6,
    "bfloat16, ordinary": ordinary.bfloat16(),
}
try:
    for name, x in cases.items():
        (codes, scale), (theirs, their_scale) = quantize_activation_per_token(x), compressed_tensors_rows(x)
        differ = (codes.float() != theirs.float()).float().mean()
        print(
            f"{name:19} scale {scale[0].item():.8g}, theirs {their_scale[0].item():.8g} ({their_scale.dtype}); {differ:.1%} of the codes differ"
        )
except AbsentError as absent:
    print(f"compressed-tensors {absent}: nothing to compare with.")

# %% [markdown]
# Where nothing is special the two agree, bit for bit. (The tests try a thousand tensors.) The rest are three decisions. A token of zeros gets some scale or other, since 0 divided by it is 0 anyway. A tiny token keeps its full precision there, and falls below the floor here, as in vLLM's kernels. And where the input is bfloat16, they round the *scale* to bfloat16, eight bits of it: then the largest number of a row no longer lands on 448, and if it lands above, it saturates. Two programs that both "quantize to FP8 per token" need not mean the same.
#
# ### Exercise 11.3 · `quantize_per_tensor` · 20 min · easy · 2 points
#
# The cheapest of all: one scale for the tensor. If it is known before (static), nobody has to look for a maximum: one pass over the tensor is enough.
#
# | | |
# |---|---|
# | in | `x`: any shape, float32, bfloat16 or float16; `scale`: float32 without dimensions, or None |
# | out | `(codes, scale)`: codes float8_e4m3fn in x's shape; scale float32, no dimension |
# | static | the given scale is used as it is |
# | dynamic | scale = amax / 448, at least `MIN_SCALE` |
# | mind | codes = x **times the reciprocal** of the scale, both in float32: kernels divide once, and multiply many times |
#
# By hand, with scale 0.005: 1 / scale is 200. 3 becomes 600 and saturates to 448, which is 2.24. 0.5 becomes 100, half-way between 96 and 104, and goes to 96, which is even.
#
# <details><summary>A nudge</summary>The reciprocal is a number that is rounded itself. How often, per tensor?</details>
# <details><summary>An approach</summary><code>x.float() * scale.reciprocal()</code>, clamped, converted. For None: a scale of your own first.</details>


# %%
@fill
def quantize_per_tensor(x, scale=None):
    ### BEGIN SOLUTION
    wide = x.detach().float()
    if scale is None:
        scale = (wide.abs().amax() / TOP).clamp(min=MIN_SCALE)
    return (wide * scale.reciprocal()).clamp(-TOP, TOP).to(FP8), scale
    ### END SOLUTION


# %%
check(quantize_per_tensor)

# %% [markdown]
# **Predict first:** dividing, and multiplying by the reciprocal: for how many numbers is the code another one? (Ten thousand tokens, so that ten thousand scales are tried.)

# %%
x = torch.randn(10_000, 100, generator=torch.Generator().manual_seed(2))
for name, tokens in (("float32", x), ("bfloat16", x.bfloat16())):
    codes, scale = quantize_activation_per_token(tokens)
    multiplied = (tokens.float() * scale.reciprocal()).clamp(-TOP, TOP).to(FP8)
    print(f"{name:9} {int((codes.float() != multiplied.float()).sum())} of {tokens.numel():,} codes differ")

# %% [markdown]
# Only numbers next to a tie can differ, by one step of E4M3. A bfloat16 has so few bits that many of them are exactly *on* a tie, and there it shows. Nobody's text gets worse. But a test that compares bytes fails, and you now know where to look.
#
# ---
# ## Static scales
#
# ### Exercise 11.4 · `calibrate_static` · 20 min · medium · 2 points
#
# Where does a static scale come from? From samples: let the model read some text, watch what each layer gets to see, and take the largest number. Or nearly the largest: the few numbers above saturate, and all others have a finer step.
#
# | | |
# |---|---|
# | in | `batches`: a list of tensors of any shapes; `fraction`: above 0, at most 1 |
# | out | the scale: float32, no dimension |
# | how | all magnitudes of all batches together, n of them: amax is the ceil(fraction · n)-th smallest one. scale = amax / 448, at least `MIN_SCALE` |
# | mind | 1.0: the largest. A NaN anywhere gives NaN. ValueError where there is no number at all |
#
# By hand, for the batches (3, -8, 1) and (2, 5):
#
# | fraction | place among 1, 2, 3, 5, 8 | amax | scale |
# |---|---|---|---|
# | 1.0 | 5 | 8 | 8 / 448 |
# | 0.75 | ceil(3.75) = 4 | 5 | 5 / 448 |
# | 0.6 | 3 | 3 | 3 / 448 |
#
# <details><summary>A nudge</summary>May you take the fraction of each batch by itself, and the largest of the results?</details>
# <details><summary>An approach</summary>Flatten, <code>torch.cat</code>, <code>kthvalue</code>. Or sort. A list without tensors cannot be concatenated: begin it with an empty one.</details>


# %%
@fill
def calibrate_static(batches, fraction=1.0):
    ### BEGIN SOLUTION
    sizes = torch.cat([torch.zeros(0), *(batch.detach().float().abs().flatten() for batch in batches)])
    if not sizes.numel():
        raise ValueError("there is no number to calibrate with")
    rank = math.ceil(fraction * sizes.numel())
    amax = sizes.amax() if rank == sizes.numel() or sizes.isnan().any() else sizes.kthvalue(rank).values
    return (amax / TOP).clamp(min=MIN_SCALE)
    ### END SOLUTION


# %%
check(calibrate_static)

# %% [markdown]
# Here is the input of one layer, `mlp.down` of the second block, for every token of the samples: the amax of each token, in the order of size. The line is the one scale that a static recipe has for all of them.

# %%
inputs = layer_inputs(model, samples)
down = torch.cat(inputs["blocks.1.mlp.down"])
amaxes = down.abs().amax(-1).sort().values
static = calibrate_static(inputs["blocks.1.mlp.down"]) * TOP
with plots.style():
    picture, axes = plots.figure(9, 3.6)
    axes.plot(torch.linspace(0, 1, len(amaxes)), amaxes, color=plots.color_of(E4M3))
    axes.axhline(static, color=plots.color_of(FP32), linewidth=1)
    axes.text(0.01, static * 0.97, "static: one for all", va="top", color=plots.color_of(FP32), fontweight="bold")
    axes.text(0.6, amaxes[int(0.45 * len(amaxes))], "per token", color=plots.color_of(E4M3), fontweight="bold")
    axes.set_xlabel("tokens, by size")
    axes.set_ylabel("largest number of the token")
    axes.set_ylim(bottom=0)
    axes.set_title("What a scale for each token saves")
print(
    f"The largest token is {amaxes[-1] / amaxes.median():.1f} times as large as the middle one: {math.log2(amaxes[-1] / amaxes.median()):.1f} binades of E4M3's 18"
)
picture

# %% [markdown]
# The distance between the line and the curve is range that a token does not use. For int8 it would be precision lost: each binade is a bit. For E4M3, which has as many significant bits in every binade, it costs nothing until the numbers of a token fall among the subnormals.
#
# ---
# ## A layer
#
# ### Exercise 11.5 · `Float8InferenceLinear` · 45 min · hard · 4 points
#
# Now the layer. There is nothing to train, so its tensors are *buffers*, under the names that they have in a checkpoint.
#
# | | |
# |---|---|
# | `Float8InferenceLinear(codes, weight_scale, bias, input_scale, activations)` | a `torch.nn.Module`; codes (N, K) float8_e4m3fn; weight_scale float32, (N, 1) or (1,); bias (N,) of any float dtype, or None; input_scale float32, (1,), or None |
# | `activations` | "token": by 11.2. "tensor": by 11.3, with `input_scale` where there is one. "none": weight-only. ValueError that lists the three for anything else |
# | buffers | `weight`, `weight_scale`, `bias`, `input_scale`: those that are there are in `state_dict()`, and there are no parameters |
# | `forward(x)` | (..., K) to (..., N), x's dtype; no gradient flows |
# | how | output[m, n] = (sum of products of codes) · input scale[m] · weight_scale[n] + bias[n], in float32; rounded to x's dtype at the end |
# | weight-only | x itself, in float32, in place of input codes, and no input scale |
# | mind | add up in any order. Where all is exact, bits are compared; elsewhere the result has to be as near as float32 sums can be |
#
# By hand, "token", K = 2, no bias: the weight's codes stand for 2, -1, its scale is 0.5, so it is (1, -0.5). x is (224, 112): its scale is 224 / 448 = 0.5, its codes stand for 448, 224. The sum is 2 · 448 - 1 · 224 = 672, times 0.5 · 0.5 is 168. And 1 · 224 - 0.5 · 112 = 168.
#
# A tensor core multiplies the codes; the multiplications by both scales and the addition of the bias are the **epilogue**, done once for each number of the output.
#
# <details><summary>A nudge</summary>Which shape has the input's scale, and along which side of the output does it run? And the weight's?</details>
# <details><summary>An approach</summary><code>register_buffer(name, None)</code> makes an attribute that <code>state_dict</code> leaves out. <code>codes.float() @ weight.float().T * scale * weight_scale.reshape(-1)</code>. For "tensor", 11.3 wants a scale without dimensions: <code>reshape(())</code>.</details>


# %%
@fill
class Float8InferenceLinear(torch.nn.Module):
    def __init__(self, codes, weight_scale, bias=None, input_scale=None, activations="token"):
        ### BEGIN SOLUTION
        super().__init__()
        if activations not in ("token", "tensor", "none"):
            raise ValueError(f"activations are quantized by 'token', 'tensor' or 'none', not {activations!r}")
        self.activations = activations
        buffers = {"weight": codes, "weight_scale": weight_scale, "bias": bias, "input_scale": input_scale}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)  # None is no entry of state_dict
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        x = x.detach()
        if self.activations == "token":
            codes, scale = quantize_activation_per_token(x)
        elif self.activations == "tensor":
            codes, scale = quantize_per_tensor(x, None if self.input_scale is None else self.input_scale.reshape(()))
        else:
            codes, scale = x, 1.0
        # Products of codes are summed, and scales come out of the sum: by row and by column of the output.
        output = codes.float() @ self.weight.float().T * scale * self.weight_scale.reshape(-1)
        if self.bias is not None:
            output = output + self.bias.float()
        return output.to(x.dtype)
        ### END SOLUTION


# %%
check(Float8InferenceLinear)

# %% [markdown]
# ### Exercise 11.6 · `perplexity` · 20 min · easy · 2 points
#
# Is the model still as good? Its loss is the mean of -log p, where p is the probability that it gave to the token which came. **Perplexity** is exp of that: among how many equally likely tokens it might as well have been guessing.
#
# | | |
# |---|---|
# | in | `model`: `model(x, y)` returns `(logits, loss)`, the loss being the mean over the batch's tokens; `batches`: a list of `(x, y)`, int64 (B, T), of any sizes |
# | out | a float: exp(mean loss of all tokens of all batches) |
# | mind | every *token* counts once, in whatever batch it is; the model evaluates meanwhile, and is in the mode it was in afterwards; no graph is made |
#
# By hand: a batch with one token, p = 1/2, and a batch with three tokens of p = 1/8 each. The losses are log 2 and log 8. The mean of all four tokens is (log 2 + 3 log 8) / 4, and perplexity the fourth root of 2 · 8³, 5.66. (The mean of the two *batches* would give 4.)
#
# <details><summary>A nudge</summary>From a mean and a count, how do you get a sum back?</details>
# <details><summary>An approach</summary>Add up <code>loss * y.numel()</code> and <code>y.numel()</code> as Python numbers, under <code>torch.no_grad()</code>.</details>


# %%
@fill
def perplexity(model, batches):
    ### BEGIN SOLUTION
    training, total, tokens = model.training, 0.0, 0
    model.eval()
    try:
        with torch.no_grad():
            for x, y in batches:
                total += float(model(x, y)[1]) * y.numel()  # Python's numbers are float64
                tokens += y.numel()
    finally:
        model.train(training)
    return math.exp(total / tokens)
    ### END SOLUTION


# %%
check(perplexity)

# %% [markdown]
# Everything is there to put the whole model into 8 bits. `quantize_model` is given: it makes a copy in which every linear layer is one of yours. The head stays as it is. Its weight is the embedding's as well, and servers leave it alone too. `compare_models` is given: beside perplexity it says for how many tokens both models think the same next token likeliest (*agreement*), and the mean of KL(float32 || 8 bits), how much worse the one predicts what the other would say.
#
# **Predict first:** by how much does perplexity go up: weight-only, with a scale for each token, with static scales? By a thousandth, a hundredth, a tenth?

# %%
base = compare_models(model, model, validation)
print(f"{'':13} perplexity            agreement   KL, nats   memory")
print(f"{'float32':13} {base.perplexity:10.4f}")
served = {name: quantize_model(model, name, samples) for name in RECIPES}
for name, made in served.items():
    found = compare_models(model, made, validation)
    change, memory = found.perplexity / base.perplexity - 1, model_bytes(made) / model_bytes(model)
    print(
        f"{name:13} {found.perplexity:10.4f} {change:+9.3%} {found.agreement:11.2%} {found.divergence:10.1e} {memory:8.1%}"
    )

# %% [markdown]
# All of them stay far below the half percent that people allow. Perplexity cannot even tell them apart: it goes up or down by chance, as some tokens gain what others lose. KL divergence is finer, and puts them in order: activations cost several times as much as weights do, and where agreement falls, two tokens had been nearly alike before.
#
# What does the fraction do that `calibrate_static` has? **Predict first:** is it better to let some numbers saturate?

# %%
for fraction in (0.9, 0.99, 0.9999, 1.0):
    found = compare_models(model, quantize_model(model, "fp8_static", samples, fraction=fraction), validation[:3])
    print(f"{fraction:<8} perplexity {found.perplexity:8.4f}   KL {found.divergence:.1e}")

# %% [markdown]
# Hardly. One number in ten thousand makes no difference to speak of, and from one in a hundred on it costs far more than it could ever gain. A clipped number is far off, and the others gain next to nothing, since a float has the same relative step everywhere. (Chapter 07's `best_clip` said so: E4M3 gains nothing, E2M1 does.) Calibrate FP8 with the largest number, and int8 with a fraction.
#
# And the other formats of this course? Here are all of them as *weight-only* formats, with one scale for each row where a format needs one. The scale's bits are counted, too.


# %%
def through(weight, fmt):
    """(the weight after a round trip through a format, the bits that it took)."""
    if fmt in (FP32, BF16, FP16):
        return weight.to(fmt.torch_dtype).float(), fmt.width * weight.numel()
    if fmt == "int8":
        rows = [quantize_int8(row) for row in weight]
        return torch.stack([codes.float() * scale for codes, scale, _ in rows]), 8 * weight.numel() + 32 * len(weight)
    return dequantize(quantize(weight, fmt, "row")), fmt.width * weight.numel() + 32 * len(weight)


def with_weights(fmt):
    """(a copy of the model whose linear layers' weights went through a format, bits for each weight)."""
    made, bits = copy.deepcopy(model), 0
    for name in linear:
        layer = made.get_submodule(name)
        layer.weight.data, more = through(layer.weight.data, fmt)
        bits += more
    return made, bits / in_linear


table = {}
print(f"{'weights in':11} bits/weight  perplexity   agreement   KL, nats")
for fmt in (FP32, BF16, FP16, "int8", E4M3, E5M2, E3M2, E2M3, E2M1):
    made, bits = with_weights(fmt)
    name = fmt if fmt == "int8" else plots.short_name(fmt)
    table[name] = bits, compare_models(model, made, validation), fmt
    print(
        f"{name:11} {bits:11.2f} {table[name][1].perplexity:11.4f} {table[name][1].agreement:11.2%} {table[name][1].divergence:10.1e}"
    )
found = compare_models(model, served["fp8_dynamic"], validation)
print(
    f"{'E4M3, W8A8':11} {table['E4M3'][0]:11.2f} {found.perplexity:11.4f} {found.agreement:11.2%} {found.divergence:10.1e}   activations as well"
)
with plots.style():
    picture, axes = plots.figure(9, 4.2)
    for name, (bits, found, fmt) in table.items():
        if found.divergence <= 0:
            continue  # float32 itself
        color = plots.color_of(FP32 if fmt == "int8" else fmt)
        axes.semilogy([bits], [found.divergence], "o", color=color, markersize=8)
        axes.annotate(
            f" {name}",
            (bits, found.divergence),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontweight="bold",
        )
    axes.set_xlim(3, 19)
    axes.set_xlabel("bits for each weight, the scale's among them")
    axes.set_ylabel("KL(float32 || this), nats per token")
    axes.set_title("What a weight's bits buy")
picture

# %% [markdown]
# Width is not what decides. Each bit of *mantissa* that goes doubles the rounding error, and KL goes with its square. (FP16 has nine of them more than E2M1, and 4^9 is a quarter of a million: compare the two ends.) E5M2 and E3M2 have two, and lie side by side though one has two bits more; so do E4M3 and E2M3, with three. The weights of a row are all of about one size, so they have no use for exponent bits, and int8, which has none, beats both 8-bit floats. E4M3 is what servers use because *activations* need its range, and because hardware multiplies it. At 4 bits a scale for each row is too coarse. Part 4 goes on from here, with blocks of 32.
#
# ---
# ## Keys and values
#
# Without a cache, a model that writes token 500 computes keys and values of 499 tokens that it knew already. `generate` is given: it keeps them. It gives the tokens that `model.generate` gives, as long as they fit into the context.

# %%
torch.manual_seed(1)
long = GPT(GPTConfig(len(corpus.vocabulary), context=512, layers=2, heads=2, width=64)).eval()  # untrained: for speed
start = torch.zeros(1, 1, dtype=torch.int64)
draws = [torch.Generator().manual_seed(5) for _ in range(2)]
same = torch.equal(generate(long, start, 64, generator=draws[0]), long.generate(start, 64, generator=draws[1]))
print("the same tokens with the cache as without:", same)
race(
    {"without": lambda: long.generate(start, 511), "with a cache": lambda: generate(long, start, 511)},
    rounds=1,
    limit_s=20,
).plot(to="with a cache")

# %% [markdown]
# The longer the text, the larger the difference: without a cache the work for each token grows with all that stands before it. So the cache is there, it is large, it grows with every token, and it is read as a whole for each. Put it into 8 bits.
#
# ### Exercise 11.7 · `Float8KVCache` · 45 min · hard · 4 points
#
# One scale for keys and one for values, for a layer. They cannot be dynamic: a token that comes later may be larger, and the codes of earlier tokens are written already. So they come from a calibration, with the checkpoint. And if the checkpoint has none? vLLM makes its scales with a mark, -1.0, loads what is there, and what is still -1.0 then was not there. `UNSET` is that mark.
#
# | | |
# |---|---|
# | `Float8KVCache(batch, heads, context, dim, k_scale, v_scale)` | both scales are -1.0 where they are left out; attributes `k_scale`, `v_scale` (floats, those in use), `length` (0), and `k`, `v`: the memory, float8_e4m3fn, (batch, heads, context, dim), made once |
# | scales | a scale below 0 is unset. Both unset: both become 1.0, and **one** `UserWarning` says so (`warnings.warn`; import `warnings` inside the method). One unset: the other is used for both, without a warning. 0 or NaN: ValueError |
# | `append(k, v)` | adds t tokens, (batch, heads, t, dim) each, float32, bfloat16 or float16: codes of k / k_scale and v / v_scale, divided in float32, saturated. ValueError where they do not fit, and nothing is changed |
# | `read()` | `(k, v)` of all tokens so far: float32, (batch, heads, length, dim), code · scale |
#
# By hand:
#
# | k_scale, v_scale given | in use | |
# |---|---|---|
# | 0.02, 0.05 | 0.02, 0.05 | |
# | -1.0, -1.0 | 1.0, 1.0 | a warning |
# | 0.02, -1.0 | 0.02, 0.02 | old checkpoints have one scale for both |
# | 0.0, 1.0 | | ValueError |
#
# With k_scale 0.02 a key of 3 is kept as 150, rounded to 144 (its next code is 160), and read as 2.88.
#
# <details><summary>A nudge</summary>What can be wrong with a piece so that nothing may be changed? Look at that before you write.</details>
# <details><summary>An approach</summary>Settle the scales in the constructor, and never look at the mark again. <code>self.k[:, :, self.length : end] = codes</code> writes into the memory that is there.</details>


# %%
@fill
class Float8KVCache:
    def __init__(self, batch, heads, context, dim, k_scale=-1.0, v_scale=-1.0):
        ### BEGIN SOLUTION
        import warnings

        if k_scale < 0 and v_scale < 0:
            warnings.warn("the scales of a KV cache in 8 bits are not calibrated: 1.0 is used", stacklevel=2)
            k_scale = v_scale = 1.0
        self.k_scale = v_scale if k_scale < 0 else k_scale
        self.v_scale = k_scale if v_scale < 0 else v_scale
        if not (self.k_scale > 0 and self.v_scale > 0):  # NaN is not above 0 either
            raise ValueError(f"a scale is above 0 (or below, where it is unset), not {k_scale!r}, {v_scale!r}")
        self.k, self.v = (torch.zeros(batch, heads, context, dim, dtype=FP8) for _ in range(2))
        self.length = 0
        ### END SOLUTION

    def append(self, k, v):
        ### BEGIN SOLUTION
        end = self.length + k.shape[2]
        if end > self.k.shape[2]:
            raise ValueError(f"{k.shape[2]} tokens do not fit: {self.length} of {self.k.shape[2]} are taken")
        for memory, piece, scale in ((self.k, k, self.k_scale), (self.v, v, self.v_scale)):
            codes = (piece.detach().float() / scale).clamp(-TOP, TOP).to(FP8)
            memory[:, :, self.length : end] = codes
        self.length = end
        ### END SOLUTION

    def read(self):
        ### BEGIN SOLUTION
        pairs = ((self.k, self.k_scale), (self.v, self.v_scale))
        return tuple(memory[:, :, : self.length].float() * scale for memory, scale in pairs)
        ### END SOLUTION


# %%
check(Float8KVCache)

# %% [markdown]
# `calibrate_cache` is given: it lets the model read the samples, and takes `calibrate_static` of each layer's keys and values. `WithCache` is a model whose keys and values go through such caches.
#
# **Predict first:** which is worse, the weights in 8 bits or the cache?

# %%
scales = calibrate_cache(model, samples)
for which, (k_scale, v_scale) in enumerate(scales):
    print(f"block {which}: the largest key {k_scale * TOP:6.2f}, the largest value {v_scale * TOP:6.2f}")
plain, short = make_caches(model), make_caches(model, scales=scales)
print(
    f"bytes for a sequence: {sum(c.k.nbytes + c.v.nbytes for c in plain):,} in float32, {sum(c.k.nbytes + c.v.nbytes for c in short):,} in 8 bits"
)
for name, each in (
    ("cache", WithCache(model, scales)),
    ("weights", served["fp8_weights"]),
    ("weights and cache", WithCache(served["fp8_weights"], scales)),
    ("all of it", WithCache(served["fp8_dynamic"], scales)),
):
    found = compare_models(model, each, validation)
    print(
        f"{name:18} perplexity {found.perplexity:8.4f} ({found.perplexity / base.perplexity - 1:+.3%})   agreement {found.agreement:.2%}   KL {found.divergence:.1e}"
    )

# %% [markdown]
# A quarter of the memory, and still nothing to be seen in perplexity. It writes:


# %%
def written(model, scales=None, count=160):
    tokens = torch.from_numpy(corpus.vocabulary.encode("\n").astype("int64"))[None]
    made = generate(model, tokens, count, 0.8, generator=torch.Generator().manual_seed(3), scales=scales)
    return corpus.vocabulary.decode(made[0])


print("float32:", written(model), "", "all of it in 8 bits:", written(served["fp8_dynamic"], scales), sep="\n")

# %% [markdown]
# (The two draw the same random numbers. They go the same way until a draw falls between two tokens whose probabilities differ a little, and from there on each goes on in its own way.)
#
# ---
# ## Before the rounding
#
# So far every number was rounded to the nearest code. Two ideas do something *before* that: one moves difficulty from where it hurts to where it does not, the other makes up for an error with what has not been rounded yet.
#
# ### Exercise 11.8 · `smooth` · 20 min · medium · 2 points
#
# In large language models a few channels of an activation are a hundred times as large as the others, in every token. A scale for each token does not help then, and a scale for each *channel* would not come out of the sum. But a channel of the input can be divided by a factor if the weights that meet it are multiplied by it: no product changes.
#
# | | |
# |---|---|
# | in | `activation_amax`: (K,) float32, the largest magnitude of each input channel; `weight`: (N, K) float32; `alpha`: 0 to 1 |
# | out | `(factors, weight * factors)`: (K,) and (N, K), float32; the layer's input is to be divided by the factors |
# | how | factor[k] = activation_amax[k]^alpha / w[k]^(1 - alpha), where w[k] is the largest magnitude of the weight's **column** k; powers and quotient in float64, then float32 |
# | mind | 1.0 where one of the two is 0: there is nothing to move |
#
# By hand, alpha = 0.5: an activation of up to 64 and weights of up to 0.25: the factor is 8 / 0.5 = 16. Then the activation goes up to 4, and the weights, too: the difficulty is shared. With alpha = 1 all of it goes to the weight, with 0 all to the activation.
#
# <details><summary>A nudge</summary>Which dimension of the weight belongs to the input?</details>
# <details><summary>An approach</summary><code>weight.abs().amax(0)</code>, both to <code>double()</code>, <code>torch.where</code> for the zeros.</details>


# %%
@fill
def smooth(activation_amax, weight, alpha=0.5):
    ### BEGIN SOLUTION
    x, w = activation_amax.double(), weight.abs().amax(0).double()
    factors = (x**alpha / w ** (1 - alpha)).float()
    factors = torch.where((x == 0) | (w == 0), 1.0, factors)
    return factors, weight * factors
    ### END SOLUTION


# %%
check(smooth)

# %% [markdown]
# This GPT has no such channels. Let us make one. After a norm, channel 7 is made 2^k times as large, and the weights behind it 2^k times as small: the model is the same function as before. (In a real model the division by the factors is put into the norm's own weights, so that it costs nothing.)
#
# **Predict first:** from which k on does the output suffer, in int8 and in E4M3, with one static scale? And with `smooth`?

# %%
norm_output = torch.cat(inputs["blocks.1.mlp.up"])
up = model.blocks[1].mlp.up.weight.detach()
exact = norm_output.double() @ up.double().T


def error(x, weight, how):
    """Relative error of x @ weight.T, both quantized: E4M3 by your functions, int8 by chapter 07's."""
    if how == "int8":
        x, weight = (codes.float() * scale for codes, scale, _ in (quantize_int8(x), quantize_int8(weight)))
        return float((x.double() @ weight.double().T - exact).norm() / exact.norm())
    codes, scale = quantize_weight_per_channel(weight)
    layer = Float8InferenceLinear(codes, scale, None, calibrate_static([x]).reshape(1), "tensor")
    return float((layer(x).double() - exact).norm() / exact.norm())


powers, curves = range(0, 21, 2), {}
for how in ("int8", "E4M3"):
    for smoothed in (False, True):
        line = curves.setdefault((how, smoothed), [])
        for k in powers:
            x, weight = norm_output.clone(), up.clone()
            x[:, 7] *= 2.0**k
            weight[:, 7] /= 2.0**k
            if smoothed:
                factors, weight = smooth(x.abs().amax(0), weight)
                x = x / factors
            line.append(error(x, weight, how))
with plots.style():
    picture, axes = plots.figure(9, 4)
    for (how, smoothed), line in curves.items():
        color = plots.color_of(E4M3) if how == "E4M3" else plots.color_of(FP32)
        axes.semilogy(
            powers, line, "--" if smoothed else "-", color=color, label=f"{how}{', smooth' if smoothed else ''}"
        )
    axes.legend()
    axes.set_xticks(powers[::2])
    axes.set_xlabel("k: one channel is 2^k times as large")
    axes.set_ylabel("relative error of the output")
    axes.set_title("One channel, and what it does to all others")
picture

# %% [markdown]
# int8 suffers at once: each factor of two takes a bit from all other channels. E4M3 does not notice until the others fall among its subnormals. With `smooth` both are as good as if nothing had happened. So SmoothQuant was invented for int8, and a server with FP8 rarely needs it; it is a tool to remember when a static scale fails.
#
# ### Exercise 11.9 · `compensate` · 50 min · hard · 4 points
#
# Rounding to nearest is best for each weight by itself. But what counts is the *output*, and there errors of different weights meet: if input 3 and input 4 rise and fall together, an error in the weight of the one can be made up for by the weight of the other. So quantize one column after the other, and let the columns that are still to come take over what went wrong. This is the idea of GPTQ, and of Optimal Brain Surgeon long before.
#
# With samples x of the input, the squared error of the output for a change d of a row of the weight is d H dᵀ, where H = xᵀ x. Column j changes by -error, and the best change of all later columns for that is known: error · a, where a solves a system of linear equations with that part of H which belongs to the later columns.
#
# | | |
# |---|---|
# | in | `weight`: (N, K) float32; `x`: (M, K) float32, samples of the input; `damping` |
# | out | `(codes, scale)`: as 11.1, with the scale of 11.1 for the weight as it came |
# | first | H = xᵀ x in float64; then damping · (mean of its diagonal) is added on its diagonal |
# | for j = 0, 1, ... | codes[:, j] = w[:, j] / scale, rounded to float32 and then to a code, saturated; error = w[:, j] - code · scale; for all k > j: w[:, k] += error · a[k], where H[j+1:, j+1:] a = H[j+1:, j] |
# | mind | all in float64 but the rounding; scales stay; where x is 0 throughout, nothing is made up for (H cannot be solved) |
#
# By hand, two inputs, x = (1, 2) and (2, 1), no damping: H = (5 4; 4 5), so a = 4 / 5. In units of the scale the weights are 134.4 and 197.12:
#
# | | first | second | d H dᵀ |
# |---|---|---|---|
# | nearest | 128, error 6.4 | 192 | 5 · 6.4² + 8 · 6.4 · 5.12 + 5 · 5.12² = 598 |
# | made up for | 128, error 6.4 | 197.12 + 0.8 · 6.4 = 202.24, so 208 | 5 · 6.4² - 8 · 6.4 · 10.88 + 5 · 10.88² = 240 |
#
# The second weight is now rounded *away* from where it was, and the output is better.
#
# <details><summary>A nudge</summary>How many later columns does the last column have?</details>
# <details><summary>An approach</summary><code>torch.linalg.solve(H[j + 1 :, j + 1 :], H[j + 1 :, j])</code> in a loop over the columns is enough here. GPTQ does it once for all columns, with a Cholesky factor of the inverse of H; the numbers are the same.</details>


# %%
@fill
def compensate(weight, x, damping=0.01):
    ### BEGIN SOLUTION
    _, scale = quantize_weight_per_channel(weight)
    w, wide = weight.double(), x.double()
    H = wide.T @ wide
    H += damping * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
    codes = torch.empty(weight.shape, dtype=FP8)
    for j in range(w.shape[1]):
        codes[:, j] = (w[:, j] / scale[:, 0]).float().clamp(-TOP, TOP).to(FP8)
        error = w[:, j] - codes[:, j].double() * scale[:, 0]
        if j + 1 < w.shape[1] and H.any():
            a = torch.linalg.solve(H[j + 1 :, j + 1 :], H[j + 1 :, j])
            w[:, j + 1 :] += error[:, None] * a
    return codes, scale
    ### END SOLUTION


# %%
check(compensate)

# %% [markdown]
# **Predict first:** how much smaller does the error of a layer's output become, on text that the samples did not have?

# %%
unseen = layer_inputs(model, validation[:4])
compensated, nearest = copy.deepcopy(model), copy.deepcopy(model)
errors = {}
for name in linear:
    weight, x = model.get_submodule(name).weight.detach(), torch.cat(unseen[name])
    for kind, made, (codes, scale) in (
        ("nearest", nearest, quantize_weight_per_channel(weight)),
        ("made up for", compensated, compensate(weight, torch.cat(inputs[name]))),
    ):
        values = codes.float() * scale
        made.get_submodule(name).weight.data = values
        errors[name, kind] = float((x @ (values - weight).T).norm() / (x @ weight.T).norm())
for name in linear[:4]:
    print(f"{name:24} error of the output {errors[name, 'nearest']:.2%}, made up for {errors[name, 'made up for']:.2%}")
for kind, made in (("nearest", nearest), ("made up for", compensated)):
    found = compare_models(model, made, validation)
    print(f"whole model, {kind:12} agreement {found.agreement:.2%}   KL {found.divergence:.1e}")

# %% [markdown]
# The codes are as many, and the scales are the same. Nothing is paid at inference; some minutes of computing, once, buy an error a few times smaller. At 8 bits hardly anybody needs that. At 4 bits it decides whether a model can be used, and the same code does it.
#
# ---
# ## A file for others
#
# A checkpoint that only its writer can read is no checkpoint. compressed-tensors has a layout that vLLM loads: a `model.safetensors` with the tensors of your layers under their own names, and a `config.json` that says how they are meant.

# %%
folder = Path(tempfile.mkdtemp(prefix="lowprec-lab-"))
sizes = save_fp8_checkpoint(served["fp8_static"], "fp8_static", folder, corpus.vocabulary)
print({name: f"{size:,} bytes" for name, size in sizes.items()}, f"and {model_bytes(model):,} in float32")
content = (folder / WEIGHTS).read_bytes()
length = int.from_bytes(content[:8], "little")
print(f"a safetensors file: 8 bytes that say {length}, then {length} bytes of JSON, then the numbers:")
print(content[8:200].decode(), "...")
for name, tensor in read_safetensors(folder / WEIGHTS).items():
    if name.startswith("blocks.0.mlp"):
        print(f"   {name:32} {tensor.dtype} {tuple(tensor.shape)}")

# %%
again, vocabulary = load_fp8_checkpoint(folder)
x, y = validation[0]
print("the same logits after loading:", torch.equal(again(x, y)[0], served["fp8_static"](x, y)[0]))
try:
    from safetensors.torch import load_file

    theirs = load_file(folder / WEIGHTS)
    ours = read_safetensors(folder / WEIGHTS)
    print(
        "the safetensors library reads the same:",
        all(torch.equal(ours[name].float(), theirs[name].float()) for name in theirs),
    )
except ImportError:
    print("safetensors is not installed: nothing to compare with.")

# %% [markdown]
# `lowprec-lab quantize RUN --recipe fp8_dynamic` does this for a run that you trained with `lowprec-lab train`, and `lowprec-lab generate RUN --start TEXT` lets it write.
#
# ---
# ## Read the real code
#
# vLLM is a large program, and it needs a GPU to be installed in full. Two of its files are short, and you know now what they do. Open them:
#
# - [`input_quant_fp8.py`](https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/model_executor/layers/quantization/input_quant_fp8.py), class `QuantFP8`: `forward_native` is plain torch, and is 11.2 and 11.3 in twenty lines.
# - [`kv_cache.py`](https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/model_executor/layers/quantization/kv_cache.py), `process_weights_after_loading`: the rules of 11.7.
#
# (Its tests have one more readable reference, [`tests/kernels/quant_utils.py`](https://github.com/vllm-project/vllm/blob/v0.11.0/tests/kernels/quant_utils.py).)
#
# **11.A** Does `forward_native` *divide* x by a token's scale? (`True` or `False`. The kernel for GPUs does.)

# %%
question(
    "11.A",
    ### BEGIN SOLUTION
    False,
    ### END SOLUTION
)

# %% [markdown]
# **11.B** A checkpoint has a `k_scale` of 0.02 for a layer, and no `v_scale`. Which v_scale does `process_weights_after_loading` use?

# %%
question(
    "11.B",
    ### BEGIN SOLUTION
    0.02,
    ### END SOLUTION
)

# %% [markdown]
# And here is how compressed-tensors arrives at a scale:

# %%
CT = "https://github.com/vllm-project/compressed-tensors/blob/0.20.1/src/compressed_tensors/quantization/utils/helpers.py"
print(
    installed_lines(
        "compressed_tensors", "quantization/utils/helpers.py", "# 5. Update any 0s with small values", after=16, link=CT
    )
)
print()
print(installed_lines("compressed_tensors", "quantization/utils/helpers.py", "def _get_dtype_eps", after=9, link=CT))

# %% [markdown]
# **11.C** Which scale does a row of zeros get there, if it is float32? (A number. `torch.finfo` knows it.)

# %%
question(
    "11.C",
    ### BEGIN SOLUTION
    2.0**-23,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## Break it
#
# **"With `--kv-cache-dtype fp8` the model writes garbage"**, and in the log, far above, one line: *Using KV cache scaling factor 1.0 for fp8_e4m3. This may cause accuracy issues.* ([vllm#5493](https://github.com/vllm-project/vllm/issues/5493), [vllm#23813](https://github.com/vllm-project/vllm/issues/23813), and others.) The checkpoint had no scales for the cache, the mark -1 became 1.0, and the warning was one of a thousand lines.
#
# With *this* GPT nothing would happen: its keys and values are of about the size of 1. But nobody promised that. Here is the same model, with keys 2^k times as large (and queries as much smaller), values 2^k times as small (and the weights behind them larger). In float32 it says exactly what it said before.


# %%
def rescaled(model, k):
    """The same function, with larger keys and smaller values."""
    made, width = copy.deepcopy(model), SIZE.width
    with torch.no_grad():
        for block in made.blocks:
            queries, keys, values = block.attention.qkv.weight.split(width)
            queries /= 2.0**k
            keys *= 2.0**k
            values /= 2.0**k
            block.attention.out.weight *= 2.0**k
    return made


other = rescaled(model, 11)
unset = [(UNSET, UNSET)] * SIZE.layers
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    broken = compare_models(model, WithCache(other, unset), validation)
print(f"float32           perplexity {compare_models(model, other, validation).perplexity:8.4f}")
print(
    f"cache, unset      perplexity {broken.perplexity:8.4f}   agreement {broken.agreement:.1%}   ({len(caught)} warnings)"
)

# %% [markdown]
# Two things go wrong at once, and in opposite directions. **11.D** With scales of 1.0, what does a key of 1500 come back as?

# %%
question(
    "11.D",
    ### BEGIN SOLUTION
    448.0,
    ### END SOLUTION
)

# %% [markdown]
# **11.E** And a value of 0.0007? (The smallest number of E4M3 is 2^-9.)

# %%
question(
    "11.E",
    ### BEGIN SOLUTION
    0.0,
    ### END SOLUTION
)

# %% [markdown]
# **11.F** The keys go up to 1500, and you may choose powers of two only. What is the smallest `k_scale` with which none of them saturates?

# %%
question(
    "11.F",
    ### BEGIN SOLUTION
    4.0,
    ### END SOLUTION
)

# %% [markdown]
# The repair is a calibration, with text like that which will be written:

# %%
repaired = compare_models(model, WithCache(other, calibrate_cache(other, samples)), validation)
print(f"cache, calibrated perplexity {repaired.perplexity:8.4f}   agreement {repaired.agreement:.1%}")

# %% [markdown]
# A warning that nobody reads is no protection. If *you* write a server: refuse to start, or calibrate on the first requests.
#
# ---
# ## What you built
#
# A GPT in a quarter of its memory, by the rules of the server that most people run, in a file that it loads; and measurements that say what it costs. Four points to take along:
#
# - Weights are quantized once, activations each time, a cache never again: that decides whether a scale can be dynamic.
# - A scale may go with an output channel, and with a token: with whatever comes out of the sum. Where the difficulty is in an input channel, move it into the weights.
# - Measure with KL divergence or agreement. Perplexity is too coarse to see 8 bits, and is what you look at to be sure that nothing broke.
# - Ask of every scale where it comes from, and what happens if nobody set it.
#
# In 8 bits rounding to nearest is good enough. Below that, scales have to be finer than a row: chapter 12 cuts rows into blocks of 32, as llama.cpp does.

# %%
progress()
