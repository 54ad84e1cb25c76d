# %% [markdown]
# # 07 · Quantizer: how does a tensor fit into 8 bits?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 02](02_rounding.ipynb): `encode`, saturation; [chapter 05](05_instruments.ipynb): `Taps`, activations, gradients. **Gives** you a quantizer that agrees with torchao's to the last bit, and a way to say how good a quantizer is.
#
# E4M3 has 126 magnitudes above zero, from 2^-9 to 448. A tensor has millions of numbers, wherever it likes. Here are some from inside a GPT. Cast to E4M3 as they are, how many of them survive?

# %% tags=["setup"]
try:
    import math

    import torch

    from lowprec_lab import ScaleExplorer, check, fill, plots, progress, question, reveal
    from lowprec_lab.bits import decode, max_finite
    from lowprec_lab.data import load_corpus, step_generator
    from lowprec_lab.formats import E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, FORMATS, FP16, Format
    from lowprec_lab.gpt import GPT, preset
    from lowprec_lab.instruments import Taps, underflow_fraction
    from lowprec_lab.libraries import AbsentError, torchao_cast
    from lowprec_lab.quantizer import (
        INLINE_DECODERS,
        Quantized,
        absmax,
        best_clip,
        dequantize,
        dequantized,
        passed_through,
        quantize,
        quantize_int8,
        quantized,
        refusal,
        require_granularity,
        scale_for,
        spread,
        sqnr_db,
        straight_through,
        values_of,
    )
    from lowprec_lab.races import race
    from lowprec_lab.reading import installed_lines
    from lowprec_lab.rounding import encode, round_to
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %%
torch.set_num_threads(1)  # a model as small as this is no quicker on more of them
corpus = load_corpus()
SIZE = preset("baby", vocab_size=len(corpus.vocabulary), width=64)  # half as wide as the others: to be quick
torch.manual_seed(7)
model = GPT(SIZE)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(60):
    x, y = corpus.batch("train", step_generator(7, step), batch=12, context=SIZE.context)
    loss = model(x, y)[1]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with Taps(
    model, ["blocks.1.mlp_norm", "blocks.1.mlp.gelu", "blocks.1.mlp.up", "blocks.1.attention.qkv", "head"]
) as taps:
    model(x, y)[1].backward()
tensors = {
    "activation, after a norm": taps.activations["blocks.1.mlp_norm"][0],
    "activation, after GELU": taps.activations["blocks.1.mlp.gelu"][0],
    "weight": model.blocks[1].mlp.down.weight.detach(),
    "gradient of the logits": taps.gradients["head"][0],
    "gradient, mlp.up": taps.gradients["blocks.1.mlp.up"][0],
    "gradient, attention.qkv": taps.gradients["blocks.1.attention.qkv"][0],
}
tensors = {name: tensor.flatten(0, -2) for name, tensor in tensors.items()}  # (tokens, features)
for name, tensor in tensors.items():
    lost = underflow_fraction(tensor, E4M3)
    print(f"{name:26} {str(tuple(tensor.shape)):11} largest {tensor.abs().max():8.2e}   becomes 0: {lost:7.2%}")

# %% [markdown]
# The activations would nearly do. Of the gradients nothing is left. In chapter 06 one number for the whole model was enough, since FP16 has 40 binades. E4M3 has 18. So every tensor gets a number of its own: before it is rounded, it is multiplied by a **scale** that puts its largest number on 448, and afterwards it is divided by it again:
#
# input → **scale** → **quantize** (round to codes) → 8 bits → **dequantize** (decode, divide) → output
#
# **Words.** The **amax** of some numbers is the largest of their magnitudes. The numbers that share a scale are a **group**, and the **granularity** says what a group is: the whole tensor, a row, a column, a block. Here a *scale* multiplies on the way in and divides on the way out. Hardware and half of the literature mean the inverse by that word, as int8 does below; look twice.

# Here is a corner of the activation after a norm, in a scaled E4M3. One number (the ring) has been made 2^14 times as large as the largest of the others. Make it smaller: from which size on do the others lose nothing? And what do more scales help?

# %%
ScaleExplorer(tensors["activation, after a norm"], E4M3, log2_outlier=14)

# %% [markdown]
# A number is *kept* if it has the format's full precision, *coarse* if it has fallen among the subnormal numbers, and a cross means that it has become 0. Try E2M1 as well: it has 4 bits, and there one scale for a tensor is not enough even without an outlier.

# %% tags=["helpers"]
# Your helpers: functions that more than one of your answers on this page uses.

# %% [markdown]
# ---
# ## Scale
#
# ### Exercise 7.1 · `absmax` · 30 min · medium · 3 points
#
# How large is a group? Everything else follows from this number. If it is too small, numbers are clipped; if one group's is used for another, bits are wasted.
#
# | | |
# |---|---|
# | in | `x`: float32, bfloat16 or float16 tensor of any shape; `granularity`: "tensor", "row", "column" or `(r, c)` |
# | out | x.dtype, one number for each group: `()`, `(..., M, 1)`, `(..., 1, N)` or `(..., ceil(M/r), ceil(N/c))` |
# | mind | a row runs along the last dimension; leading dimensions are left alone; the last block may be smaller; a NaN makes the amax of its group NaN; a group with nothing in it has 0; ValueError for any other granularity, and for too few dimensions |
#
# By hand:
#
# | x | tensor | row | column | (1, 2) |
# |---|---|---|---|---|
# | 1, -8, 0.5 | 8 | 8 | 3, 8, 4 | 8, 0.5 |
# | 3, 2, -4 | | 4 | | 3, 4 |
#
# The result has a dimension of size 1 where numbers were taken together, so that it can be multiplied with x as it is. `require_granularity(granularity, dimensions)` is given: it raises what has to be raised.
#
# <details><summary>A nudge</summary><code>amax</code> takes a dimension, and raises an error if there is nothing along it. What is the sum of no numbers?</details>
# <details><summary>An approach</summary>For blocks: pad the magnitudes with zeros until both sides divide (<code>torch.nn.functional.pad</code>), reshape to (..., R, r, C, c), and take <code>amax</code> over r and c. A zero is never the largest.</details>


# %%
@fill
def absmax(x, granularity="tensor"):
    ### BEGIN SOLUTION
    require_granularity(granularity, x.dim())
    size = x.detach().abs()
    if granularity == "tensor":
        return size.amax() if size.numel() else size.new_zeros(())
    if granularity in ("row", "column"):
        dim = -1 if granularity == "row" else -2
        # A maximum of nothing is an error; a sum of nothing is 0, in the shape that is wanted.
        return size.amax(dim, keepdim=True) if size.shape[dim] else size.sum(dim, keepdim=True)
    (rows, columns), (height, width) = granularity, size.shape[-2:]
    down, across = -(-height // rows), -(-width // columns)
    padded = torch.nn.functional.pad(size, (0, across * columns - width, 0, down * rows - height))  # 0 is never larger
    return padded.reshape(*size.shape[:-2], down, rows, across, columns).amax((-3, -1))
    ### END SOLUTION


# %%
check(absmax)


# %% [markdown]
# ### Exercise 7.2 · `scale_for` · 30 min · medium · 3 points
#
# The scale is 448 divided by amax. One division, and four ways to get it wrong: amax may be 0, the division may round twice, the power of two may be the wrong one, and NaN may turn into something else.
#
# | | |
# |---|---|
# | in | `amax`: float32, bfloat16 or float16 tensor; `fmt`; `eps`: a floor under amax; `power_of_two` |
# | out | float32 tensor of that shape: max_finite / max(amax, eps), divided in float64, rounded to float32 once |
# | mind | a quotient beyond float32's largest number becomes that number; `power_of_two`: the largest power of two that is not above the float32 scale; NaN stays NaN; an infinite amax gives 0 |
#
# By hand, E4M3:
#
# | amax | scale | power of two | why |
# |---|---|---|---|
# | 3 | 149.33333 | 128 | down, never up: up would push amax beyond 448 |
# | 7 | 64 | 64 | |
# | 7.0000005 | 63.999996 | **32** | the float32 below 64 is not 64 |
# | 0, 1e-40 | 4.48e14 | 2^48 | the floor: 448 / 1e-12. A zero times anything is 0 |
# | inf | 0 | 0 | all of the group comes back as NaN: an overflow must not hide |
# | NaN | NaN | NaN | its bits with a cleared mantissa would be infinity |
#
# Why a power of two? Multiplying and dividing by it is exact, so the only error left is that of the rounding, and the scale fits into 8 bits itself. It costs up to a factor 2 of range.
#
# <details><summary>A nudge</summary>What does torch do for <code>448 / tensor</code>? (It is not a division.) And where in the 32 bits is the exponent?</details>
# <details><summary>An approach</summary><code>amax.double().clamp(min=eps)</code>, then tensor / tensor: <code>torch.full_like(wide, max_finite(fmt)) / wide</code>. For the power: view as int32, <code>& 0x7F800000</code>, view as float32; NaN apart.</details>


# %%
@fill
def scale_for(amax, fmt, eps=1e-12, power_of_two=False):
    ### BEGIN SOLUTION
    wide = amax.double().clamp(min=eps)  # NaN stays NaN
    largest = torch.finfo(torch.float32).max
    scale = (torch.full_like(wide, max_finite(fmt)) / wide).clamp(max=largest).float()
    if power_of_two:
        exponent = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)  # the mantissa is cut off
        scale = torch.where(scale.isnan(), scale, exponent)
    return scale
    ### END SOLUTION


# %%
check(scale_for)


# %% [markdown]
# **Predict first:** `448 / amax` for a float32 tensor is worked out by torch as `448 * (1 / amax)`, with two roundings. For how many amaxes does that change the scale? (Significands are enough: a power of two changes nothing.) And if it is done in float64, and rounded to float32 at the end?

# %%
every = (torch.arange(0, 2**23, 8, dtype=torch.int32) + (127 << 23)).view(torch.float32)  # every eighth one in [1, 2)
right = torch.full_like(every, 448.0) / every
print(f"in float32: {(448 / every != right).float().mean():.1%} of the scales are off by an ulp")
print(f"in float64: {((448 / every.double()).float() != right).float().mean():.1%}")
print("scale_for:  ", f"{(scale_for(every, E4M3) != right).float().mean():.1%}")

# %% [markdown]
# More than a quarter. An ulp of float32 is nothing for training, but two programs that should agree do not, and a test bit for bit never passes. (A compiler may do the division either way. torchao divides in float64 for that very reason; you will read the comment below.)
#
# ---
# ## There and back
#
# ### Exercise 7.3 · `quantize` · 25 min · medium · 3 points
#
# Now put together what you have. `Quantized(codes, scale, fmt, granularity, dtype)` is given: a record of what has to be kept. `spread(scale, granularity, shape)` is given as well: it repeats the scales of blocks, so that each element meets its own.
#
# | | |
# |---|---|
# | in | `x`: float32, bfloat16 or float16 tensor; `fmt`: a format with a sign and at most 8 bits; `granularity`; `power_of_two` |
# | out | a `Quantized`: codes uint8 in the shape of x, scale as `absmax` is shaped, dtype that of x |
# | mind | the product in float32, also for short x; nearest, ties to even, saturated; NaN gets a NaN's code (a format without one: ValueError, which `encode` raises); no gradient flows |
#
# By hand, E4M3, x = (3, -1, 0.01), one group: the scale is 448 / 3 = 149.33333.
#
# | x | x * scale | nearest value | code | back: value / scale |
# |---|---|---|---|---|
# | 3 | 448 | 448 | 0x7E | 3.0 |
# | -1 | -149.33333 | -144 | 0xF1 | -0.96428573 |
# | 0.01 | 1.4933333 | 1.5 | 0x3C | 0.010044644 |
#
# The largest number of a group comes back exactly (up to the rounding of the scale). The others have E4M3's relative error, up to 1/16. What is at most 2^-10 after scaling is gone: here, numbers below 7 millionths.
#
# <details><summary>A nudge</summary>You have <code>absmax</code>, <code>scale_for</code> and <code>encode</code>. Which dtype has <code>bfloat16_tensor * float32_scale</code> if the scale has no dimension?</details>
# <details><summary>An approach</summary><code>x.float() * spread(scale, granularity, x.shape)</code>, then <code>encode(..., fmt).to(torch.uint8)</code>. That is all. If it is to be fast: <code>cast_saturating</code> of exercise 2.8, viewed as uint8, has the same codes where torch has the format.</details>


# %%
@fill
def quantize(x, fmt, granularity="tensor", power_of_two=False):
    ### BEGIN SOLUTION
    x = x.detach()
    scale = scale_for(absmax(x, granularity), fmt, power_of_two=power_of_two)
    scaled = x.float() * spread(scale, granularity, x.shape)
    if fmt.torch_dtype is not None and fmt.torch_dtype.itemsize == 1 and fmt.signed:
        # The same codes, a hundred times as fast. Nothing is beyond the format here, but by the rounding of a product.
        codes = scaled.to(fmt.torch_dtype).view(torch.uint8)
    else:
        codes = encode(scaled, fmt).to(torch.uint8)
    return Quantized(codes, scale, fmt, granularity, x.dtype)
    ### END SOLUTION


# %%
check(quantize)


# %% [markdown]
# ### Exercise 7.4 · `dequantize` · 15 min · easy · 2 points
#
# | | |
# |---|---|
# | in | `q`: a `Quantized` |
# | out | tensor of dtype `q.dtype`: decode(code) / scale, in float32, then rounded to the dtype |
# | mind | divide: 1 / scale is rounded already. A scale of 0 gives NaN, since 0 / 0 does |
#
# By hand: the last column of the table above.
#
# A format of 8 bits has 256 values at most. Working each of a million codes out is a waste: `values_of(decode, fmt, codes.device)` is given, and has them all, as *your* `decode` gives them.
#
# <details><summary>A nudge</summary>If all values lie in a table, what is a code?</details>
# <details><summary>An approach</summary><code>table.index_select(0, codes.reshape(-1).int())</code>, in the shape of the codes, divided by the spread scales.</details>


# %%
@fill
def dequantize(q):
    ### BEGIN SOLUTION
    if torch.compiler.is_compiling() and q.fmt in INLINE_DECODERS:
        values = INLINE_DECODERS[q.fmt](q.codes)
        return (values / spread(q.scale, q.granularity, q.codes.shape)).to(q.dtype)
    table = values_of(decode, q.fmt, q.codes.device)
    if q.scale.numel() == 1:  # each of the few values is divided once, and not each of the many elements
        table = table / q.scale.reshape(())
        return table.index_select(0, q.codes.reshape(-1).int()).view(q.codes.shape).to(q.dtype)
    values = table.index_select(0, q.codes.reshape(-1).int()).view(q.codes.shape)
    return (values / spread(q.scale, q.granularity, q.codes.shape)).to(q.dtype)
    ### END SOLUTION


# %%
check(dequantize)


# %% [markdown]
# ### Numbers that are no ordinary numbers
#
# **Predict first:** one row each, with a scale for each row. Which rows come back whole? Which say that something was wrong with them?

# %%
rows = torch.tensor([
    [1.0, -0.5, 0.3, 0.001],
    [0.0, 0.0, -0.0, 0.0],
    [1e-40, 3e-40, -1e-40, 0.0],
    [1e-20, -3e-20, 2e-20, 5e-21],
    [math.nan, 1.0, 2.0, 3.0],
    [math.inf, 1.0, 2.0, 3.0],
    [3e38, 1.0, -3e37, 2e38],
])  # fmt: skip
q = quantize(rows, E4M3, "row")
back = dequantize(q)
for row, scale, codes, values in zip(rows, q.scale, q.codes, back, strict=True):
    numbers = "".join(f"{value:10.3g}" for value in row.tolist())
    text = " ".join(f"{code:02X}" for code in codes.tolist())
    print(
        f"{numbers}   scale {scale.item():9.3g}   codes {text}  ", "".join(f"{each:10.3g}" for each in values.tolist())
    )

# %% [markdown]
# Zeros stay zeros, of either sign: without the floor their scale would be infinite, and 0 times infinity is NaN. 1e-40 and 1e-20 are below the floor, and are taken for zeros. That is a decision, and a sound one: a gradient of 1e-20 changes no weight. A NaN takes its whole row along, and so does an infinity, through a scale of 0. Both are meant to: saturated to 448, an overflow would look like any other number, and training would go on with it. And by *tensor* instead of by row, one NaN anywhere takes everything.
#
# 16-bit inputs need no rule of their own: amax is one of their numbers, and the product is taken in float32.
#
# ---
# ## How good is it?
#
# ### Exercise 7.5 · `sqnr_db` · 10 min · easy · 1 point
#
# The largest error says little about a million numbers. The usual measure compares the *energy* of the tensor with that of the error: the signal-to-quantization-noise ratio, in decibel. 10 dB more is a tenth of the noise; one bit of mantissa is worth 6 dB.
#
# | | |
# |---|---|
# | in | `x`, `y`: two tensors of the same shape, x the original |
# | out | float: 10 log10(sum(x²) / sum((x - y)²)), in float64 |
# | mind | no error at all is infinity, also for zeros and for nothing; NaN stays NaN |
#
# By hand: x = (3, 4), y = (3, 4.5): 25 / 0.25 = 100, which is 20 dB.
#
# <details><summary>A nudge</summary>Which dtype holds the square of 1e30? Where should x - y be taken if both are bfloat16?</details>
# <details><summary>An approach</summary>Both to <code>double()</code> first. One case apart: no noise.</details>


# %%
@fill
def sqnr_db(x, y):
    ### BEGIN SOLUTION
    signal, noise = x.double().square().sum(), (x.double() - y.double()).square().sum()
    if noise == 0:
        return math.inf
    return float(10 * torch.log10(signal / noise))
    ### END SOLUTION


# %%
check(sqnr_db)


# %% [markdown]
# **Predict first:** from one scale for a tensor to one for every 32 numbers: how many decibel is that worth in E4M3? In E5M2? For Gaussian numbers, for numbers with heavy tails, for the tensors of the GPT?

# %%
generator = torch.Generator().manual_seed(0)
gauss = torch.randn(512, 256, generator=generator)
chi = torch.randn(2, 512, 256, generator=generator).square().mean(0).sqrt()
tried = {"Gaussian": gauss, "heavy tails (Student's t, 2)": gauss / chi, **tensors}
GROUPS = {"tensor": "tensor", "column": "column", "row": "row", "32 x 32": (32, 32), "1 x 32": (1, 32)}


def quality(x, fmt, granularity, power_of_two=False):
    return sqnr_db(x, dequantize(quantize(x, fmt, granularity, power_of_two)))


for fmt in (E4M3, E5M2):
    print(f"{plots.short_name(fmt)}, dB{'':22}" + "".join(f"{name:>9}" for name in GROUPS))
    for name, x in tried.items():
        print(f"{name:29} " + "".join(f"{quality(x, fmt, each):9.1f}" for each in GROUPS.values()))
    print()

# %% [markdown]
# For most of them it is worth next to nothing. That is the point of a *floating* point: a number 100 times smaller has the same relative error, with any scale, as long as it stays above the subnormal numbers. E4M3 is at 31 dB and E5M2 at 25, one bit apart, whatever the tensor. With heavy tails, and for the gradient of the logits, small groups gain, for a reason that the worked example showed: the largest number of each group comes back exactly, and there it holds most of the energy.
#
# So why does anybody use blocks? Move one number:
#
# **Predict first:** one of 131,072 Gaussian numbers is made 10 times, a thousand times, a million times as large as the others. What happens to the *others*, in E4M3, in E5M2, and in int8, whose codes are whole numbers?
#
# For int8 you need one more function.
#
# ### Exercise 7.6 · `quantize_int8` · 30 min · medium · 3 points
#
# The codes of int8 are whole numbers, equally far apart: `value = (code - zero_point) * scale`. Here the *scale* is a step, the inverse of what it was above; that is how everybody writes int8. The **zero point** is the code of 0. Symmetric codes have it at 0, and waste half of them on numbers that are never negative, as those after a ReLU. With a zero point the codes are spread from the smallest number to the largest.
#
# | | |
# |---|---|
# | in | `x`: float32, bfloat16 or float16 tensor; `symmetric` |
# | out | `(codes, scale, zero_point)`: int8 in the shape of x, float32 and int32 without dimensions |
# | symmetric | scale = max\|x\| / 127; code = round(x / scale), -127 to 127 |
# | else | lo, hi: the smallest and the largest number, and 0 if it lies outside; scale = (hi - lo) / 255; zero_point = round(-128 - lo / scale); code = round(x / scale) + zero_point, clamped to -128 to 127 |
# | mind | scale: worked out in float64, rounded to float32, at least 1e-12; the rest in float32; ties to even; ValueError for NaN and infinities: int8 has no code for them |
#
# By hand, x = (-1, 0, 3.3):
#
# | | scale | zero point | codes |
# |---|---|---|---|
# | symmetric | 3.3 / 127 = 0.02598 | 0 | -38, 0, 127 |
# | else | 4.3 / 255 = 0.01686 | round(-128 + 59.30) = -69 | -59 - 69 = -128, -69, 196 - 69 = 127 |
#
# 0 has a code of its own in both. It must: zeros are everywhere, in padding and after a ReLU, and an error there would be everywhere too.
#
# <details><summary>A nudge</summary>An empty tensor has no smallest number. A tensor with a 0 attached has, and it is never above 0.</details>
# <details><summary>An approach</summary><code>torch.round</code> rounds ties to even. Clamp before you convert: <code>to(torch.int8)</code> makes -128 of 128.</details>


# %%
@fill
def quantize_int8(x, symmetric=True):
    ### BEGIN SOLUTION
    x = x.detach().float()
    if not x.isfinite().all():
        raise ValueError("int8 has no code for NaN and infinity")
    with_zero = torch.cat([x.reshape(-1), x.new_zeros(1)])  # lo is at most 0, hi at least; and no tensor is empty
    lo, hi = with_zero.min().double(), with_zero.max().double()
    width = torch.maximum(-lo, hi) / 127 if symmetric else (hi - lo) / 255
    scale = width.clamp(min=1e-12).float()
    zero_point = torch.zeros_like(scale) if symmetric else torch.round(-128 - lo.float() / scale)
    codes = (torch.round(x / scale) + zero_point).clamp(-127 if symmetric else -128, 127)
    return codes.to(torch.int8), scale, zero_point.to(torch.int32)
    ### END SOLUTION


# %%
check(quantize_int8)


# %%
def through_int8(x):
    codes, scale, zero_point = quantize_int8(x)
    return (codes.float() - zero_point) * scale


sizes = [10.0**k for k in range(8)]
ways = {
    "int8, tensor": through_int8,
    "E4M3, tensor": lambda x: dequantize(quantize(x, E4M3)),
    "E4M3, row": lambda x: dequantize(quantize(x, E4M3, "row")),
    "E5M2, tensor": lambda x: dequantize(quantize(x, E5M2)),
}
others = {name: [] for name in ways}
for size in sizes:
    x = gauss.clone()
    x[3, 5] = 4 * size
    for name, way in ways.items():
        y = way(x)
        kept = torch.ones(x.shape, dtype=torch.bool)
        kept[3, 5] = False
        others[name].append(sqnr_db(x[kept], y[kept]))

with plots.style():
    picture, axes = plots.figure(9, 4.2)
    looks = [("int8, tensor", "#57606A", "-"), ("E4M3, tensor", plots.color_of(E4M3), "-"),
             ("E4M3, row", plots.color_of(E4M3), "--"), ("E5M2, tensor", plots.color_of(E5M2), "-")]  # fmt: skip
    marks = {"int8, tensor": (0, 0.15, 1.5), "E4M3, tensor": (4, 0.15, 1.5), "E4M3, row": (5, 0.3, 1.2),
             "E5M2, tensor": (1, 0.0, -2.6)}  # fmt: skip
    for name, color, line in looks:
        axes.plot(range(8), others[name], color=color, linestyle=line, marker="o", markersize=4)
        place, right_by, up_by = marks[name]
        axes.text(place + right_by, others[name][place] + up_by, name, color=color, fontsize=9, fontweight="bold")
    axes.set_xticks(range(8), ["1", "10", "100", "1e3", "1e4", "1e5", "1e6", "1e7"])
    axes.set_xlabel("size of one number, relative to the largest of the others")
    axes.set_ylabel("SQNR of all the others, dB")
    axes.set_title("One outlier, and what becomes of the other 131,071 numbers")
picture

# %% [markdown]
# Without an outlier int8 is *better* than E4M3, by 8 dB: its steps are equal, and Gaussian numbers are all of about the same size. Ten times as large, and int8 has lost three bits of every number; a hundred times, and it has nothing. **In int8 one outlier ruins a tensor.** E4M3 does not notice until the others fall among its subnormal numbers and below, at ten thousand and more, and then it breaks down as well; E5M2 holds out to the end of the picture. With a scale for each row the damage is that of one row, and the other 511 are as they were.
#
# Large language models have such outliers: single features of activations, tens to thousands of times as large as the rest ([LLM.int8()](https://arxiv.org/abs/2208.07339), [Massive Activations](https://arxiv.org/abs/2402.17762)). Small ones, like this GPT, do not. That is why int8 inference needs tricks, why DeepSeek-V3 has blocks of 128, and why FP8 training gets along with one scale for a tensor.
#
# **Predict first:** what does rounding the scales down to powers of two cost?

# %%
print(f"{'E4M3, by row, dB':30} any scale   power of two")
for name, x in tried.items():
    print(f"{name:29} {quality(x, E4M3, 'row'):10.1f} {quality(x, E4M3, 'row', True):14.1f}")

# %% [markdown]
# Nearly nothing, where the largest number of each row is one of many. With heavy tails, and for the gradient of the logits, it costs what small groups had gained: the largest number is no longer on 448, and comes back rounded like all others.
#
# ---
# ## Learning through a rounding
#
# ### Exercise 7.7 · `straight_through` · 20 min · medium · 2 points
#
# Rounding is a staircase: flat nearly everywhere, so its derivative is 0, and a network behind it learns nothing. What people do instead is to look away: forward the value is rounded, backward the gradient passes as if nothing had been there. This is the **straight-through estimator**.
#
# | | |
# |---|---|
# | in | `x`: float32, bfloat16 or float16 tensor; `fmt` |
# | out | `dequantize(quantize(x, fmt))`, bit for bit |
# | backward | the gradient of x is the gradient of the result, unchanged: not rounded, not masked, not scaled |
#
# By hand, E4M3: x = (0.3, 1000, 0.0001): the scale is 0.448, and the result (0.3139, 1000, 0). A gradient of (0.3, 1000, 0.0001) arrives at x as (0.3, 1000, 0.0001).
#
# Everybody knows a one-liner for this: `x + (y - x).detach()`. In exact arithmetic that is y.
#
# <details><summary>A nudge</summary>What is 1000 + (0.0001 - 1000) in float32?</details>
# <details><summary>An approach</summary>A <code>torch.autograd.Function</code> of four lines, inside the answer: <code>forward(ctx, x)</code> returns the value, <code>backward(ctx, gradient)</code> returns the gradient.</details>


# %%
@fill
def straight_through(x, fmt):
    ### BEGIN SOLUTION
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return dequantize(quantize(x, fmt))

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Through.apply(x)
    ### END SOLUTION


# %%
check(straight_through)


# %% [markdown]
# **Predict first:** three ways to put a float8 into a network, and the gradient that arrives before it. The loss asks for a gradient of (0.3, 1000, 0.0001).

# %%
wanted = torch.tensor([0.3, 1000.0, 0.0001])
ways = {
    "quantize, dequantize": lambda x: dequantize(quantize(x, E4M3)),
    "x.to(float8).float()": lambda x: x.to(torch.float8_e4m3fn).float(),
    "straight_through": lambda x: straight_through(x, E4M3),
}
for name, way in ways.items():
    x = torch.ones(3, requires_grad=True)
    y = way(x)
    if not y.requires_grad:
        print(f"{name:22} no gradient at all: autograd does not know that y came from x")
        continue
    (y * wanted).sum().backward()
    print(f"{name:22} {[round(value, 6) for value in x.grad.tolist()]}")

# %% [markdown]
# The middle one is a trap, and a quiet one: torch's derivative of a cast is the cast the other way, so the *gradient* goes through E4M3, without a scale. 1000 becomes 448, and 0.0001 becomes 0. Chapter 08 begins with it.
#
# ---
# ## Is the largest number worth it?
#
# ### Exercise 7.8 · `best_clip` · 30 min · medium · 3 points
#
# Who says that the largest number must fit? If it is clipped, it has a large error, and all others have a finer step. With few bits that can be a good trade. So try some clips, and take the one with the least error.
#
# | | |
# |---|---|
# | in | `x`: a tensor; `fmt`; `fractions` of max\|x\| to try, in any order, from above 0 to 1 |
# | out | float32 tensor without dimensions: the clip, max\|x\| times a fraction, with the least sum of squared errors; of equally good ones the largest |
# | how | with the scale that `scale_for` gives for the clip: x * scale rounded to `fmt`, saturated, divided by the scale, in float32; squares in float64 |
# | mind | the error of what is clipped counts; max\|x\| of 0, infinity and NaN is returned as it is |
#
# By hand, E2M1 (its values are 0, 0.5, 1, 1.5, 2, 3, 4, 6), one 8 and forty 3.3:
#
# | clip | scale | 8 becomes | 3.3 becomes | sum of squares |
# |---|---|---|---|---|
# | 8 | 0.75 | 8 | 2 / 0.75 = 2.667 | 40 * 0.401 = 16.0 |
# | 6.5 | 0.923 | 6.5 | 3 / 0.923 = 3.25 | 2.25 + 40 * 0.0025 = 2.35 |
#
# <details><summary>A nudge</summary><code>round_to</code> saturates by itself. In which order do you have to look so that the first best one is the largest?</details>
# <details><summary>An approach</summary>A loop over <code>sorted(fractions, reverse=True)</code>, and the best one so far.</details>


# %%
@fill
def best_clip(x, fmt, fractions=tuple(k / 16 for k in range(16, 3, -1))):
    ### BEGIN SOLUTION
    x = x.detach().float()
    amax, best = absmax(x), None
    if not 0 < amax < math.inf:
        return amax
    for clip in (amax * fraction for fraction in sorted(fractions, reverse=True)):
        scale = scale_for(clip, fmt)
        error = (round_to(x * scale, fmt) / scale - x).double().square().sum()
        if best is None or error < best[0]:
            best = error, clip
    return best[1]
    ### END SOLUTION


# %%
check(best_clip)


# %% [markdown]
# **Predict first:** for Gaussian numbers, which of the three formats gains from clipping? (The vertical axis is SQNR; the dot is what `best_clip` chooses.)

# %%
fractions = tuple(k / 64 for k in range(64, 15, -1))
x = gauss[:64]
with plots.style():
    picture, axes = plots.figure(9, 4.2)
    for fmt, color in ((E4M3, plots.color_of(E4M3)), (E2M3, plots.color_of(E2M3)), (E2M1, plots.color_of(E2M1))):
        clips = [absmax(x) * fraction for fraction in fractions]
        line = [sqnr_db(x, round_to(x * scale_for(clip, fmt), fmt) / scale_for(clip, fmt)) for clip in clips]
        chosen = float(best_clip(x, fmt, fractions) / absmax(x))
        axes.plot(fractions, line, color=color)
        axes.plot([chosen], [line[fractions.index(chosen)]], color=color, marker="o", markersize=7)
        axes.text(1.01, line[0], plots.short_name(fmt), color=color, va="center", fontsize=9, fontweight="bold")
        print(
            f"{fmt.name:15} best clip {chosen:.3f} of the largest: {line[fractions.index(chosen)]:.1f} dB, with all of it {line[0]:.1f}"
        )
    axes.set_xlim(0.24, 1.1)
    axes.set_xlabel("clip, relative to the largest magnitude")
    axes.set_ylabel("SQNR, dB")
    axes.set_title("Clip the largest numbers?")
picture

# %% [markdown]
# E2M1, with 4 bits, gains most by giving up the outermost numbers, and E2M3 a little. E4M3 gains nothing worth mentioning: a finer step is of no use to a floating point with room below, and every number that is clipped costs. What 8-bit floats do without, 4-bit formats live by, and part 4 comes back to it.
#
# ---
# ## Read the real code
#
# torchao is PyTorch's own library for this. What you wrote in 7.2 is its `amax_to_scale`:

# %%
RELEASE = "https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/"
print(
    installed_lines(
        "torchao", "float8/float8_utils.py", "def amax_to_scale", after=24, link=RELEASE + "float8_utils.py"
    )
)
print()
print(
    installed_lines(
        "torchao", "float8/float8_utils.py", "def _round_scale_down", after=3, link=RELEASE + "float8_utils.py"
    )
)

# %% [markdown]
# Do the two agree? Here are a thousand tensors through both, codes and scales bit for bit: of many sizes, in float32 and bfloat16, some with zero rows, infinities, NaN.


# %%
def agreement(count):
    """(how many tensors were tried, in how many codes and scales are the same)."""
    generator, tried, same = torch.Generator().manual_seed(3), 0, 0
    for n in range(count):
        x = torch.randn(6, 20, generator=generator) * 2.0 ** int(torch.randint(-40, 40, (), generator=generator))
        if n % 4 == 0:
            x[n % 6] = (0.0, 1e-20, math.inf, math.nan)[n // 4 % 4]
        x = x.to((torch.float32, torch.bfloat16)[n % 2])
        fmt, granularity, power = (E4M3, E5M2)[n // 2 % 2], ("tensor", "row", "column")[n % 3], n % 5 < 2
        mine = quantize(x, fmt, granularity, power)
        codes, scale = torchao_cast(x, fmt, granularity, power)
        nan = mine.scale.isnan()
        equal = torch.equal(mine.scale[~nan], scale[~nan]) and torch.equal(nan, scale.isnan())
        here, there = (each.view(fmt.torch_dtype).float() for each in (mine.codes, codes))
        tried, same = tried + 1, same + (equal and torch.equal(here.nan_to_num(7e9), there.nan_to_num(7e9)))
    return tried, same


try:
    print("tried {}, the same in {}".format(*agreement(1000)))
except AbsentError as absent:
    print(f"torchao {absent}: nothing to compare with.")

# %% [markdown]
# **7.A** A tensor holds one infinity. Which scale does `amax_to_scale` give for E4M3?

# %%
question(
    "7.A",
    ### BEGIN SOLUTION
    0,
    ### END SOLUTION
)

# %%
print(
    installed_lines(
        "torchao",
        "float8/float8_training_tensor.py",
        "tensor_scaled = tensor.to(torch.float32) * scale",
        before=4,
        after=2,
        link=RELEASE + "float8_training_tensor.py",
    )
)
print()
print(
    installed_lines(
        "torchao",
        "float8/float8_training_tensor.py",
        "def backward(ctx, g):",
        before=1,
        after=2,
        link=RELEASE + "float8_training_tensor.py",
    )
)

# %% [markdown]
# **7.B** The class is called `_ToFloat8ConstrFunc`, and its `forward` casts to float8. Is the gradient cast to float8 in its `backward`? (`True` or `False`.)

# %%
question(
    "7.B",
    ### BEGIN SOLUTION
    False,
    ### END SOLUTION
)

# %% [markdown]
# **7.C** `_round_scale_down_to_power_of_2` takes the floor of log2, in float32. Take a scale of 7.9999995, the float32 just below 2^3. Which power of two comes out: 2 to the power of ... what? (Try the line in a cell of your own.)

# %%
question(
    "7.C",
    ### BEGIN SOLUTION
    3,
    ### END SOLUTION
)

# %% [markdown]
# This is the one place where torchao leaves its own rule, and you follow it. The next cell looks for every power of two at which it happens, and what it does:

# %%
below = torch.nextafter(2.0 ** torch.arange(-30, 31), torch.tensor(0.0))  # the float32 just below 2^-30 to 2^30
by_log2 = torch.exp2(torch.floor(torch.log2(below)))
by_bits = (below.view(torch.int32) & 0x7F800000).view(torch.float32)
up = [k for k, one, other in zip(range(-30, 31), by_log2, by_bits, strict=True) if one != other]
print("log2 goes up instead of down just below 2^k for k =", *up)

amax = torch.tensor([[56.000004, 1.0]])  # 448 / amax is just below 8
mine = quantize(amax, E4M3, power_of_two=True)
print(f"scale {448 / 56.000004:.7f}; down to a power of two: {mine.scale.item():g}")
try:
    print(f"torchao: {torchao_cast(amax, E4M3, power_of_two=True)[1].item():g}, and amax * 8 is above 448")
except AbsentError as absent:
    print(f"torchao {absent}.")

# %% [markdown]
# It does no harm: amax times 8 is above 448 by less than a thousandth of a step, and saturates to where it would have been rounded. But "down" is what the name says, and a program that relies on it, say one without saturation, would be wrong once in a million scales or so. Rare bugs are the expensive ones. Exponents come from exponent bits.
#
# ---
# ## Break it
#
# "NaN with rowwise scales", reported in [ao#3356](https://github.com/pytorch/ao/issues/3356) and elsewhere. A batch is padded, and the padded rows are zeros. Here is the quantizer of the report, in a few lines; the input is float16.

# %%
padded = torch.randn(4, 6, generator=generator).half()
padded[2:] = 0


def reported(x):
    scale = 448.0 / x.abs().amax(-1, keepdim=True)
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


print("rows with NaN:", reported(padded).isnan().any(-1).tolist())

# %% [markdown]
# The amax of a zero row is 0, its scale infinite, and 0 times infinity is NaN. The NaN then spreads: the gradient of a weight sums over all rows, and is NaN throughout. The repair that everybody writes is a floor:


# %%
def repaired(x):
    scale = 448.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


# %% [markdown]
# **7.D** Does that repair it for this input? (`True` or `False`. Think first, then run `repaired(padded)`.)

# %%
question(
    "7.D",
    ### BEGIN SOLUTION
    False,
    ### END SOLUTION
)

# %% [markdown]
# Yours does it in the right order: to float64, and then the floor.

# %%
print("rows with NaN:", dequantize(quantize(padded, E4M3, "row")).isnan().any(-1).tolist())

# %% [markdown]
# ---
# ## What you built
#
# A quantizer that gives the codes of the library that trains large models in FP8. How fast is it? A matrix of 1024 x 1024, there and back, against torchao where it is installed. (A learner's `encode` and `decode` work on every code by itself. With `cast_saturating` and a table there is not much between you and the library.)

# %%
matrix = torch.randn(1024, 1024, generator=generator)
runners = {
    "yours, tensor": lambda: dequantize(quantize(matrix, E4M3)),
    "yours, row": lambda: dequantize(quantize(matrix, E4M3, "row")),
    "yours, 128 x 128": lambda: dequantize(quantize(matrix, E4M3, (128, 128))),
}


def through_torchao(granularity):
    codes, scale = torchao_cast(matrix, E4M3, granularity)
    return codes.view(torch.float8_e4m3fn).float() / scale


try:
    through_torchao("tensor")
    runners |= {"torchao, tensor": lambda: through_torchao("tensor"), "torchao, row": lambda: through_torchao("row")}
except AbsentError as absent:
    print(f"torchao {absent}: it does not take part.")
race(runners, rounds=7).plot(to="yours, tensor")

# %% [markdown]
# Four points to take along:
#
# - A scale moves a tensor to where the format is; an 8-bit *float* needs it for range, int8 for precision.
# - For a float it hardly matters how fine the groups are, until there is an outlier.
# - Zero, infinity and NaN have to be decided, each of them, before the first training run does it for you.
# - Divide once, in a place where it is exact, and take exponents from bits.
#
# What is still missing is arithmetic: a layer multiplies two quantized tensors, forward and twice backward. Chapter 08 puts your quantizer there.

# %%
progress()
