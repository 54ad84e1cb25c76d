# %% [markdown]
# # 03 · Accumulation: why is adding the hard part?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 02](02_rounding.ipynb): `round_to`, `round_stochastic`, ties. **Gives** you sums that stay right in few bits, a matrix product with a short
# accumulator, and training steps that arrive although each of them is too small to see.
#
# Count to a thousand in BF16: start at 0, add 1, add 1. Each number from 0 to 256 fits exactly, each addition is rounded to the nearest value, and nothing overflows. Where do you end?

# %% tags=["setup"]
try:
    import math

    import numpy as np
    import torch

    from lowprec_lab import AccumulatorExplorer, check, fill, plots, progress, question, reveal
    from lowprec_lab.accumulation import (
        dot_product,
        matmul_promoted,
        sgd_with_master_weights,
        sgd_with_stochastic_rounding,
        sum_kahan,
        sum_pairwise,
        sum_sequential,
        update_is_lost,
    )
    from lowprec_lab.bits import ulp
    from lowprec_lab.formats import BF16, E4M3, E5M2, FP16, FP32, Format
    from lowprec_lab.races import race
    from lowprec_lab.reading import installed_lines
    from lowprec_lab.rounding import round_stochastic, round_to
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %%
counter, counts = torch.zeros((), dtype=torch.bfloat16), []
for _ in range(1000):
    counter = counter + 1
    counts.append(float(counter))
print(f"a thousand times + 1 in BF16: {counts[-1]:g}")
with plots.style():
    picture, axes = plots.figure(9, 3.6)
    axes.plot(range(1, 1001), range(1, 1001), color="#7A7A7A", linewidth=1, linestyle="--")
    axes.plot(range(1, 1001), counts, color=plots.color_of(BF16), drawstyle="steps-post")
    axes.text(760, 800, "what you would expect", color="#57606A", ha="right", va="bottom")
    axes.text(
        1000,
        275,
        f"the BF16 counter: {counts[-1]:g}",
        color=plots.color_of(BF16),
        ha="right",
        va="bottom",
        fontweight="bold",
    )
    axes.set_xlabel("how often 1 was added")
    axes.set_ylabel("the counter")
    axes.set_title("A counter that stops")
picture

# %% [markdown]
# At 256 the neighbours in BF16 are 2 apart. 257 is exactly half-way between 256 and 258: a tie, and it goes to the even one, 256. So the counter stands still, and no number of further ones will ever move it. This is called **stagnation**.
#
# Before you look: E4M3 has three mantissa bits. At which total does the same counter stop there? Then walk through the sum below, one addition at a time. Watch the total, the step between its neighbours, and the number that is added. Change the format, or the number, and guess again. (The badge says whose code adds.
# Until you write it, the exact oracle does.)

# %%
AccumulatorExplorer(fmt=E4M3)

# %% [markdown]
# **Words.** The number that a sum is collected in is the **accumulator**; what it holds on the way are the *totals*. A product of two short numbers fits into twice as many bits, and that is the end of it. A sum has no such end: a layer adds up thousands of
# products, each total is rounded, and the larger the total is, the coarser are its steps. Products survive low precision. Sums are what it breaks.
#
# **Arithmetic on this page** is done as hardware does it that has no adder for the format: one operation in float32, then one rounding to the format, to nearest, ties to even. Beyond the largest value comes infinity, or NaN where there is no infinity; a format that has neither saturates.
# The helper below says just that. It calls your `round_to`.


# %% tags=["helpers"]
# Your helpers: functions that more than one of your answers on this page uses.
def rounded(x, fmt):
    """x, float32, rounded to fmt as all arithmetic of this page is."""
    return round_to(x, fmt, overflow="saturate" if fmt.specials == "finite" else "to_special")


# %% [markdown]
# ---
# ## Three ways to add
#
# ### Exercise 3.1 · `sum_sequential` · 15 min · easy · 2 points
#
# The obvious sum, in a format that may have eight bits: begin at 0.0, add one element after the other, and round after *every* addition. That last part is the point. If you add in float32 and round once at the end, you have computed something else, and something much better, than an adder of that format would.
#
# | | |
# |---|---|
# | in | `x`: float32 tensor (..., n); `fmt` |
# | out | float32 tensor (...): the sums along the last dimension |
# | mind | each element is rounded first; the total begins at 0.0, and is 0.0 for n = 0; any number of dimensions in front |
#
# By hand, E4M3, the numbers 15, 1, 1 and 1:
#
# | total | + | exact | neighbours in E4M3 | new total |
# |---|---|---|---|---|
# | 0 | 15 | 15 | 15 is a value | 15 |
# | 15 | 1 | 16 | 16 is a value | 16 |
# | 16 | 1 | 17 | 16 and 18: a tie | 16 |
# | 16 | 1 | 17 | 16 and 18: a tie | 16 |
#
# The exact sum is 18, and 18 is a value of E4M3. The rounding at the end would have been right.
#
# <details><summary>A nudge</summary>The loop runs over the n elements. Does it also have to run over the sums? <code>x.unbind(-1)</code> gives you the n slices, each with all sums at once.</details>
# <details><summary>An approach</summary>Round x. Make a total of zeros of shape <code>x.shape[:-1]</code>. For each slice along the last dimension: add, round.</details>


# %%
@fill
def sum_sequential(x, fmt):
    ### BEGIN SOLUTION
    total = torch.zeros(x.shape[:-1])
    for element in rounded(x, fmt).unbind(-1):
        total = rounded(total + element, fmt)
    return total
    ### END SOLUTION


# %%
check(sum_sequential)

# %% [markdown]
# **Predict first:** ten thousand times 0.001 is 10. What does a BF16 accumulator make of it? (It stops where 0.001 is less than half a step. Which total is that?)

# %%
thousandths = torch.full((10_000,), 1e-3)
total = sum_sequential(thousandths, BF16)
step = ulp(total, BF16)
print(f"10,000 x 0.001 in BF16: {float(total)}")
print(f"the step there is {float(step):.6f}; half of it is {float(step) / 2:.6f}")

# %% [markdown]
# One twentieth of the right answer, and no warning. Between 0.5 and 1 the values of BF16 are 2^-8 apart; half of that is more than 0.001, so each addition rounds back to 0.5. A mean loss, a running average, a sum of squared gradients: whoever collects them like this gets a number that looks plausible.
#
# **Predict first:** and what does torch do? Here are ten thousand ones in BF16, summed by `torch.sum`. Will it be 256?

# %%
ones = torch.ones(10_000, dtype=torch.bfloat16)
inside = ones.sum(dtype=torch.float32)
print(f"torch.sum of 10,000 ones in BF16      {float(ones.sum()):g}")
print(f"the same, asked for as float32        {float(inside):g}")
print(f"that float32, rounded to BF16         {float(rounded(inside, BF16)):g}")
print(
    f"a BF16 accumulator, one after another {float(sum_sequential(torch.ones(1000), BF16)):g}   (1,000 ones are enough)"
)

# %% [markdown]
# torch does not add in BF16. Its result is what you get when you add in float32 and round once: 9984 is the BF16 nearest to 10,000. It is wrong by 16, but it is wrong *once*. Further down you will find the line of torch that decides this.
#
# ### Exercise 3.2 · `sum_pairwise` · 25 min · medium · 3 points
#
# Totals are coarse because they are large. So keep them small as long as you can: add neighbours, then the sums of neighbours, and so on. Each element then takes part in about log2(n) additions instead of up to n, and the numbers that are added are of the same size.
#
# | | |
# |---|---|
# | in | `x`: float32 tensor (..., n); `fmt` |
# | out | float32 tensor (...): the sums along the last dimension; 0.0 for n = 0 |
# | mind | each element is rounded first; elements 0 and 1, 2 and 3, ... are added; the last of an odd number moves on *unchanged*, a -0.0 too |
#
# By hand, E4M3, six numbers:
#
# | round | numbers | |
# |---|---|---|
# | 0 | 15, 1, 1, 1, 1, 1 | |
# | 1 | 16, 2, 2 | neighbours |
# | 2 | 18, 2 | 16 + 2 fits; the last 2 moves on |
# | 3 | 20 | the exact sum. One after the other would have given 16 |
#
# <details><summary>A nudge</summary>What are <code>x[..., 0::2]</code> and <code>x[..., 1::2]</code>? Which of them is longer when n is odd?</details>
# <details><summary>An approach</summary>While there is more than one part: cut off the odd one, add the even places to the odd places, round, and put the odd one back at the end with <code>torch.cat</code>. (Splitting the row in two halves is another tree: for six numbers it adds 0, 1, 2 and 3, 4, 5.)</details>


# %%
@fill
def sum_pairwise(x, fmt):
    ### BEGIN SOLUTION
    if x.shape[-1] == 0:
        return torch.zeros(x.shape[:-1])
    parts = rounded(x, fmt)  # (..., n)
    while parts.shape[-1] > 1:
        even = parts.shape[-1] // 2 * 2
        sums = rounded(parts[..., 0:even:2] + parts[..., 1:even:2], fmt)
        parts = torch.cat([sums, parts[..., even:]], dim=-1)  # the last of an odd number moves on
    return parts[..., 0]
    ### END SOLUTION


# %%
check(sum_pairwise)

# %% [markdown]
# ### Exercise 3.3 · `sum_kahan` · 30 min · medium · 3 points
#
# What if you cannot choose the order, because the numbers come one at a time? Then remember what each addition lost, and give it back with the next element. The loss can be computed in the same short format: `t - total` is what really arrived, and `y` is what should have. William Kahan published this in
# 1965, in one page ([CACM 8](https://doi.org/10.1145/363707.363723)).
#
# ```
# y = element - lost
# t = total + y
# lost = (t - total) - y
# total = t
# ```
#
# | | |
# |---|---|
# | in | `x`: float32 tensor (..., n); `fmt` |
# | out | float32 tensor (...): `total` after the last element; 0.0 for n = 0 |
# | mind | each element is rounded first, and each of the *four* operations is rounded; total and lost begin at 0.0; the parentheses are the algorithm |
#
# By hand, E4M3, the numbers 16, 1, 1 and 1 (one after the other they give 16):
#
# | element | y | t | t - total | lost |
# |---|---|---|---|---|
# | 16 | 16 - 0 = 16 | 16 | 16 | 0 |
# | 1 | 1 - 0 = 1 | 17, rounded to 16 | 0 | 0 - 1 = **-1** |
# | 1 | 1 - (-1) = 2 | 18 | 2 | 0 |
# | 1 | 1 - 0 = 1 | 19, rounded to 20 | 2 | 2 - 1 = **1** |
#
# The result is 20; the exact sum, 19, is a tie between 18 and 20. In the second row the 1 was lost, in the third it was repaid. In the fourth row too much was added, and `lost` knows it.
#
# <details><summary>A nudge</summary>In algebra (t - total) - y is zero. What is it here, and what is its sign when too little was added?</details>
# <details><summary>An approach</summary>The loop of 3.1 with two tensors that live through it. Put <code>rounded(...)</code> around each of the four operations. The third line has two of them, one inside the other.</details>


# %%
@fill
def sum_kahan(x, fmt):
    ### BEGIN SOLUTION
    total = lost = torch.zeros(x.shape[:-1])
    for element in rounded(x, fmt).unbind(-1):
        y = rounded(element - lost, fmt)
        t = rounded(total + y, fmt)
        lost = rounded(rounded(t - total, fmt) - y, fmt)  # what arrived, less what should have
        total = t
    return total
    ### END SOLUTION


# %%
check(sum_kahan)

# %% [markdown]
# **Predict first:** 64 rows of random numbers between 0 and 1 are summed in BF16, for longer and longer rows. How does the worst error of the three sums grow with n?
#
# The unit is half an epsilon: the largest relative error that a single rounding can make, 2^-8 in BF16. Theory (Higham, *Accuracy and Stability of Numerical Algorithms*, chapter 4) guarantees, for positive numbers and to first order, n - 1 of them for the sequential sum, log2(n) for the tree, and 2 for Kahan, whatever n is. Those are the dotted lines.

# %%
generator = torch.Generator().manual_seed(6)
sizes, unit = (4, 16, 64, 256, 1024), 2.0 ** -(BF16.mantissa_bits + 1)
worst = {"sequential": [], "pairwise": [], "Kahan": []}
for n in sizes:
    x = rounded(torch.rand((64, n), generator=generator), BF16)
    exact = x.double().sum(-1)
    for name, function in zip(worst, (sum_sequential, sum_pairwise, sum_kahan), strict=True):
        worst[name].append(float(((function(x, BF16).double() - exact).abs() / exact).max()) / unit)
bounds = {"sequential": [n - 1 for n in sizes], "pairwise": [math.log2(n) for n in sizes], "Kahan": [2 for n in sizes]}
guarantees = {"sequential": "n - 1", "pairwise": "log2(n)", "Kahan": "2"}
colors = {"sequential": "#C24E00", "pairwise": "#007A5A", "Kahan": "#332288"}
with plots.style():
    picture, axes = plots.figure(9, 4.6)
    for name, color in colors.items():
        axes.loglog(sizes, bounds[name], base=2, color=color, linestyle=(0, (1, 2)), linewidth=1.2)
        axes.loglog(sizes, worst[name], base=2, color=color, marker="o", markersize=5)
        axes.text(
            sizes[-1] * 1.1,
            worst[name][-1],
            f"{name}: {worst[name][-1]:.1f}",
            color=color,
            fontweight="bold",
            va="center",
        )
        axes.text(sizes[-1] * 1.1, bounds[name][-1], guarantees[name], color=color, va="center", fontsize=9)
    axes.set_xlim(3.5, 4000)
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.set_xlabel("n: how many numbers are added (log2 axis)")
    axes.set_ylabel("worst relative error, in half epsilons")
    axes.grid(axis="y")
    axes.set_title("Three sums in BF16      dotted: guaranteed, solid: seen")
picture

# %% [markdown]
# See the jump of the sequential sum from 256 to 1,024 numbers: that is where it stops growing. The other two stay near a single rounding, however long the rows are. Rounding errors have both signs and mostly cancel, so all three do better than they must.
#
# ---
# ## Products and totals
#
# ### Exercise 3.4 · `dot_product` · 25 min · medium · 3 points
#
# A matrix product is made of dot products, and a dot product of two kinds of operations. Give each its own format, and you can ask which of the two needs the bits.
#
# | | |
# |---|---|
# | in | `a`, `b`: float32 tensors (..., n), of values with at most 12 significant bits, so that float32 holds every product exactly; `product_fmt`, `accumulator_fmt` |
# | out | float32 tensor (...) |
# | mind | `a` and `b` are taken as they are; each product is rounded to `product_fmt`; the total begins at 0.0 and is rounded to `accumulator_fmt` after each addition |
#
# By hand, a = (1.5, 2.5), b = (1.25, 3.5), products in E4M3, totals in E5M2:
#
# | product | in E4M3 | total | in E5M2 |
# |---|---|---|---|
# | 1.875 | 1.875 | 0 + 1.875, a tie of 1.75 and 2 | 2 |
# | 8.75 | 9 (8 and 9 are neighbours) | 2 + 9 = 11, a tie of 10 and 12 | 12 |
#
# The exact result is 10.625.
#
# <details><summary>A nudge</summary>Which part of it have you written already? What would that function do to the products that it must not do?</details>
# <details><summary>An approach</summary>Multiply and round all products at once; then the loop of 3.1. Calling <code>sum_sequential</code> would round the products a second time, to the accumulator's format.</details>


# %%
@fill
def dot_product(a, b, product_fmt, accumulator_fmt):
    ### BEGIN SOLUTION
    total = torch.zeros(a.shape[:-1])
    for product in rounded(a * b, product_fmt).unbind(-1):
        total = rounded(total + product, accumulator_fmt)
    return total
    ### END SOLUTION


# %%
check(dot_product)

# %% [markdown]
# **Predict first:** 64 dot products of 1,000 pairs in E4M3. Which hurts more: products in E4M3 and totals in float32, or products in float32 and totals in E4M3?

# %%
a, b = (rounded(torch.rand((64, 1000), generator=generator), E4M3) for _ in range(2))
exact = (a.double() * b.double()).sum(-1)
for accumulator_fmt in (FP32, BF16, E4M3):
    for product_fmt in (FP32, E4M3):
        error = ((dot_product(a, b, product_fmt, accumulator_fmt).double() - exact).abs() / exact).mean()
        print(
            f"products in {product_fmt.name:13}  totals in {accumulator_fmt.name:13}  mean relative error {float(error):9.4%}"
        )

# %% [markdown]
# Products in eight bits cost half a per cent: most of their errors cancel. Totals in E4M3 cost nearly everything, and even BF16 loses a fifth of the sum. This is why every matrix unit that takes FP8 or BF16 *in* has a wider accumulator inside, and why it matters how wide it is.
#
# ### Exercise 3.5 · `matmul_promoted` · 40 min · hard · 4 points
#
# The FP8 tensor cores of an H800 keep around 14 bits of a sum, not the 24 of a float32. The people who trained DeepSeek-V3 found that out, and wrote down what they did about it ([arXiv:2412.19437](https://arxiv.org/abs/2412.19437), section 3.3.2): every 128 products, the short total is added to a real float32 one, in the ordinary cores,
# and the short accumulator starts again at zero. This is called **promotion**. A total of 128 products never becomes large, so it never becomes coarse.
#
# | | |
# |---|---|
# | in | `a`: float32 tensor (M, K); `b`: (K, N), of values with at most 12 significant bits; `accumulator_fmt`; `promote_every`: int |
# | out | float32 tensor (M, N) |
# | mind | products are exact and are *not* rounded; the short accumulator is rounded after each; the float32 total never is; what is left at the end is promoted too; `ValueError` for `promote_every` below 1 |
#
# By hand, one row times one column, K = 5, all products 1, and an accumulator in E2M1, whose values are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. It stops at 4, because 5 is a tie of 4 and 6:
#
# | promote_every | short totals | float32 total |
# |---|---|---|
# | 5 | 1, 2, 3, 4, 4 | 4 |
# | 2 | 1, 2 · 1, 2 · 1 | 2, 4, **5** |
#
# <details><summary>A nudge</summary>Which of the three dimensions is the loop over? The other two can be done at once: what is a column (M, 1) times a row (1, N)?</details>
# <details><summary>An approach</summary>Two loops: over the chunks, <code>range(0, K, promote_every)</code>, and over the products in a chunk. A short accumulator of zeros begins each chunk, and is added to the total after it. The tail needs no special case when the inner loop ends at K.</details>


# %%
@fill
def matmul_promoted(a, b, accumulator_fmt, promote_every):
    ### BEGIN SOLUTION
    if promote_every < 1:
        raise ValueError(f"promote_every is a number of products, 1 or more, not {promote_every}")
    (rows, inner), columns = a.shape, b.shape[1]
    total = torch.zeros(rows, columns)
    for start in range(0, inner, promote_every):
        short = torch.zeros_like(total)
        for k in range(start, min(start + promote_every, inner)):
            short = rounded(short + a[:, k : k + 1] * b[k : k + 1], accumulator_fmt)  # (M, 1) * (1, N)
        total = total + short
    return total
    ### END SOLUTION


# %%
check(matmul_promoted)

# %% [markdown]
# **Predict first:** matrices of E4M3 numbers with K = 4096, as in the paper's example, and an accumulator of 14 significant bits. What does promotion every 128 products gain: a factor of 2, of 10, or more?
#
# (Each line takes a second or so: 4,096 roundings one after the other.)

# %%
short = Format("14 bits", exponent_bits=8, mantissa_bits=13)  # float32's range, 14 significant bits
a, b = (rounded(torch.rand(shape, generator=generator), E4M3) for shape in ((16, 4096), (4096, 16)))
exact = a.double() @ b.double()
largest_error = {}
for every in (4096, 1024, 128, 32):
    error = (matmul_promoted(a, b, short, every).double() - exact).abs() / exact
    largest_error[every] = float(error.max())
    print(f"promoted every {every:5,} products: largest relative error {largest_error[every]:.5%}")
print(f"128 instead of 4,096: {largest_error[4096] / largest_error[128]:.0f} times better")

# %% [markdown]
# The paper measured a largest error of nearly 2 % without promotion, on the hardware itself and its own matrices. Yours is a model of it: 14 bits, rounded to nearest. The order of magnitude, and the cure, are the same. Smaller chunks are better still, and each promotion costs time; 128 is the smallest interval at which the authors gained precision without substantial overhead.
#
# ---
# ## Read the real code
#
# Why did `torch.sum` not stop at 256? A header that is installed with torch says in which type each type is accumulated.

# %%
RELEASE = "https://github.com/pytorch/pytorch/blob/v2.13.0/"
HEADER = "aten/src/ATen/AccumulateType.h"
print(
    installed_lines(
        "torch", "ATen/AccumulateType.h", "CUDA_ACC_TYPE(BFloat16", before=1, after=7, link=RELEASE + HEADER
    )
)
print()
print(installed_lines("torch", "ATen/AccumulateType.h", "CPU_ACC_TYPE(BFloat16", after=7, link=RELEASE + HEADER))

# %% [markdown]
# **3.A** How many bits has the type in which torch accumulates `BFloat16`?

# %%
question(
    "3.A",
    ### BEGIN SOLUTION
    32,
    ### END SOLUTION
)

# %% [markdown]
# So much for sums. Matrix products on NVIDIA's hardware go to cuBLAS. Read `gemm_internal_cublas_bfloat16_helper` in [CUDABlas.cpp](https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/cuda/CUDABlas.cpp): the matrices are handed over as `CUDA_R_16BF`, and the compute type is
# `CUDA_R_32F`. BF16 in, float32 inside, BF16 out.
#
# There is one exception, and it is a setting. A product with a large K may be split into several, and the partial results have to be added up at the end ("split-K"). May they be rounded to BF16 before that?

# %%
print(
    installed_lines(
        "torch", "ATen/Context.h", "enum class CuBLASReductionOption", after=5, link=RELEASE + "aten/src/ATen/Context.h"
    )
)
print()
print(
    installed_lines(
        "torch",
        "ATen/Context.h",
        "CuBLASReductionOption allow_bf16_reduction_cublas =",
        after=2,
        link=RELEASE + "aten/src/ATen/Context.h",
    )
)
print()
print(
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is",
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
)

# %% [markdown]
# **3.B** What is `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` unless somebody changes it? (`True` or `False`. It is there on machines without a GPU, too.)

# %%
question(
    "3.B",
    ### BEGIN SOLUTION
    True,
    ### END SOLUTION
)

# %% [markdown]
# **3.C** Even with a float32 accumulator the *result* of `torch.sum` is BF16. For which smallest n is the BF16 sum of n ones wrong? Think first, then try it in a cell of your own.

# %%
question(
    "3.C",
    ### BEGIN SOLUTION
    257,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## Break it: a weight that never moves
#
# The longest sum of all is a weight: it starts somewhere, and a training run adds a small number to it, step after step, a million times. People who store weights in BF16 to save memory report that training is worse than it should be, or stands still
# ([torchtune#2254](https://github.com/meta-pytorch/torchtune/issues/2254)), that they need stochastic rounding in the optimizer ([pytorch#120376](https://github.com/pytorch/pytorch/issues/120376)), or that weight decay does nothing ([OneTrainer#996](https://github.com/Nerogar/OneTrainer/issues/996)). Here is how it fails, with nothing but torch:

# %%
weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
optimizer = torch.optim.SGD([weight], lr=1e-4)
for _ in range(1000):
    optimizer.zero_grad()
    weight.sum().backward()  # every gradient is 1
    optimizer.step()
print("after 1,000 steps of 0.0001, from 1.0:", weight.tolist())

decayed = torch.ones((), dtype=torch.bfloat16)
for _ in range(1000):
    decayed.mul_(1 - 1e-3 * 0.1)  # a learning rate of 1e-3 and a weight decay of 0.1, as AdamW applies it
print("after 1,000 steps of weight decay:   ", decayed.item())

# %% [markdown]
# No error, no warning, a loss that does not fall, and 0.9 was expected. The next three exercises find the cause and mend it.
#
# ### Exercise 3.6 · `update_is_lost` · 15 min · easy · 2 points
#
# First, a diagnosis that you can run on any model: where does adding an update change nothing?
#
# | | |
# |---|---|
# | in | `weight`: float32 tensor of values of `fmt`; `update`: float32 tensor of the same shape, of any values; `fmt` |
# | out | bool tensor of that shape: True where `update` is not zero and the rounded sum is the weight |
# | mind | an update of 0.0 or -0.0 is not lost; compare values, so 0.0 and -0.0 count as the same weight |
#
# "Less than half a step" is nearly right, and not right. By hand, BF16, whose step just above 1 is 2^-7, and just below 1 is 2^-8:
#
# | weight | update | exact sum | rounded | lost? |
# |---|---|---|---|---|
# | 1.0 | 2^-8 | half-way between 1 and 1 + 2^-7 | 1.0, the even one | yes |
# | 1 + 2^-7 | 2^-8 | half-way to 1 + 2^-6 | 1 + 2^-6, the even one | no |
# | 1.0 | -2^-8 | 1 - 2^-8, a value | itself | no |
# | 1.0 | -2^-9 | half-way between 1 - 2^-8 and 1 | 1.0, the even one | yes |
#
# <details><summary>A nudge</summary>All four rows follow from one sentence in the contract. Do you need the step at all?</details>
# <details><summary>An approach</summary>Do the addition, as all arithmetic of this page, and compare.</details>


# %%
@fill
def update_is_lost(weight, update, fmt):
    ### BEGIN SOLUTION
    return (rounded(weight + update, fmt) == weight) & (update != 0)
    ### END SOLUTION


# %%
check(update_is_lost)

# %% [markdown]
# **Predict first:** a hundred thousand weights (normal, standard deviation 0.02), and updates that are a fixed fraction of each weight. Below which fraction are all updates lost, in BF16 and in FP16?

# %%
weights = torch.randn(100_000, generator=generator) * 0.02
lines = ["update / weight   " + "".join(f"{'2^-' + str(k):>8}" for k in range(6, 15))]
for fmt in (BF16, FP16):
    stored = rounded(weights, fmt)
    shares = [float(update_is_lost(stored, stored * 2.0**-k, fmt).float().mean()) for k in range(6, 15)]
    lines.append(f"lost in {fmt.name:9} " + "".join(f"{share:8.0%}" for share in shares))
print("\n".join(lines))

# %% [markdown]
# In BF16 every update of 2^-9, a five-hundredth of the weight, is gone, and that is where the updates of a training run are: a ratio of about a thousandth is a [rule of thumb](https://cs231n.github.io/neural-networks-3/#ratio). FP16 has three bits more, and loses the same updates three powers of two later.
#
# ### Exercise 3.7 · `sgd_with_master_weights` · 25 min · medium · 3 points
#
# The classic cure ([Mixed Precision Training](https://arxiv.org/abs/1710.03740), section 3.1): keep the weights in float32, the **master weights**, and add updates there. The short copy is for the layers to compute with, and is made anew after every step.
#
# | | |
# |---|---|
# | in | `weight`: float32 tensor (n,), the first master weights; `gradients`: (steps, n); `lr`: float; `fmt` |
# | out | a tuple `(stored, master)`: float32 (steps, n), the weights rounded to `fmt` *after* each step; float32 (n,), the master weights after the last |
# | mind | lr * gradient and the subtraction are two float32 operations (`torch.sub(..., alpha=lr)` may do them as one); the first master weights need not be values of the format; there may be no step |
#
# By hand, E4M3, weight 1.0, gradients all 1.0, lr 0.03125 (a quarter of the step above 1, half of the one below):
#
# | step | master | stored |
# |---|---|---|
# | 1 | 0.96875 | a tie of 0.9375 and 1.0: 1.0 |
# | 2 | 0.9375 | 0.9375 |
# | 3 | 0.90625 | a tie of 0.875 and 0.9375: 0.875 |
#
# Without the master weights the first row would be repeated for ever.
#
# <details><summary>A nudge</summary>Which of the two tensors does the next step read?</details>
# <details><summary>An approach</summary>A loop over <code>gradients</code>, an update of the master, and the rounded master into row after row of a tensor like <code>gradients</code>. Do not change <code>weight</code> itself.</details>


# %%
@fill
def sgd_with_master_weights(weight, gradients, lr, fmt):
    ### BEGIN SOLUTION
    master, stored = weight.clone(), torch.empty_like(gradients)
    for step, gradient in enumerate(gradients):
        master = master - lr * gradient
        stored[step] = rounded(master, fmt)  # a copy: the next step reads the master
    return stored, master
    ### END SOLUTION


# %%
check(sgd_with_master_weights)

# %% [markdown]
# ### Exercise 3.8 · `sgd_with_stochastic_rounding` · 25 min · medium · 3 points
#
# A master weight costs four more bytes for each weight. The other cure costs none: round the sum at random, with your `round_stochastic`. Then an update of a tenth of a step moves the weight by a whole step, in one case out of ten.
#
# | | |
# |---|---|
# | in | `weight`: float32 tensor (n,) of values of `fmt`; `gradients`, `noise`: (steps, n), noise as in exercise 2.5; `lr`: float; `fmt` |
# | out | float32 tensor (steps, n): the weights *after* each step |
# | mind | there is no float32 weight anywhere that outlives a step; each step has its own row of noise |
#
# By hand, E4M3, weight 1.0, gradients all 1.0, lr 0.015625 (a quarter of the step below 1, 0.0625):
#
# | step | weight - lr * gradient | noise | how far up from the lower neighbour | weight |
# |---|---|---|---|---|
# | 1 | 0.984375 | 0.5 | 0.75 of a step above 0.9375: 0.5 < 0.75 | 1.0 |
# | 2 | 0.984375 | 0.9 | 0.9 is not below 0.75 | 0.9375 |
#
# <details><summary>A nudge</summary>How many lines differ from 3.7?</details>
# <details><summary>An approach</summary>The same loop, with one tensor less: the rounded weights are what the next step reads.</details>


# %%
@fill
def sgd_with_stochastic_rounding(weight, gradients, lr, fmt, noise):
    ### BEGIN SOLUTION
    stored = torch.empty_like(gradients)
    for step, gradient in enumerate(gradients):
        weight = round_stochastic(weight - lr * gradient, fmt, noise[step])
        stored[step] = weight
    return stored
    ### END SOLUTION


# %%
check(sgd_with_stochastic_rounding)

# %% [markdown]
# **Predict first:** the weight that never moved: 1.0 in BF16, a thousand steps of 0.0001, so that 0.9 is right. What do the three cures make of it? (The third one is Kahan's sum: a weight is a sum, after all. Optimizers that do this keep `lost` as a second BF16 number for each weight.)

# %%
steps, lr, count = 1000, 1e-4, 256
gradients = torch.ones(steps, count)
noise = torch.randint(0, 2**23, (steps, count), generator=generator) / 2**23
stored, master = sgd_with_master_weights(torch.ones(count), gradients, lr, BF16)
random = sgd_with_stochastic_rounding(torch.ones(count), gradients, lr, BF16, noise)
# Row k: the weight, its first 20 * k updates, and zeros.
taken = torch.arange(steps) < 20 * torch.arange(51)[:, None]
updates = torch.cat([torch.ones(51, 1), torch.where(taken, -lr, 0.0)], dim=1)
compensated = sum_kahan(updates, BF16)
nearest = sum_sequential(updates[-1], BF16)
print(f"to nearest                      {float(nearest):.5f}")
print(f"float32 master                  {float(master[0]):.5f}   stored: {float(stored[-1, 0]):.5f}")
print(
    f"stochastic rounding             {float(random[-1].mean()):.5f}   the mean of {count} weights; one of them: {float(random[-1, 0]):.5f}"
)
print(f"Kahan                           {float(compensated[-1]):.5f}")
with plots.style():
    picture, axes = plots.figure(9, 4.6)
    axes.plot([0, steps], [float(nearest)] * 2, color="#7A7A7A")
    axes.plot(range(1, steps + 1), random[:, 0], color="#E3A27A", linewidth=1)
    axes.plot(range(1, steps + 1), random.mean(1), color="#C24E00")
    axes.plot(range(1, steps + 1), stored[:, 0], color=plots.color_of(BF16), linewidth=1.4)
    axes.plot(range(0, steps + 1, 20), compensated, color="#332288", linestyle="none", marker="o", markersize=3)
    labels = [
        (float(nearest), "to nearest", "#57606A"),
        (float(compensated[-1]), "Kahan (dots)", "#332288"),
        (float(stored[-1, 0]), "float32 master, stored", plots.color_of(BF16)),
        (float(random[-1].mean()), "stochastic: the mean", "#C24E00"),
        (float(random[-1, 0]), "stochastic: one weight", "#9A5B2E"),
    ]
    place = -math.inf
    for height, name, color in sorted(labels):
        place = max(height, place + 0.007)  # beside the end of its line, or above the label below
        axes.text(steps + 12, place, name, color=color, va="center", fontsize=9, fontweight="bold")
    axes.set_xlim(0, steps * 1.24)
    axes.set_xticks(range(0, steps + 1, 200))
    axes.set_xlabel("step")
    axes.set_ylabel("weight, in BF16")
    axes.set_title("A weight that never moves, and three cures")
picture

# %% [markdown]
# All three arrive. The master weight is right to four digits (float32 rounds, too), and the stored copy follows it in steps. With stochastic rounding the *mean* arrives, and each single weight wanders around it: noise is the price for the saved memory. Kahan is off by less than a step of BF16, and costs a second BF16 number for each weight.
#
# And the diagnosis of the first cell:

# %%
one = torch.ones(1)
for name, update in (("the step of 0.0001", -1e-4), ("the weight decay", -1e-3 * 0.1)):
    print(
        f"{name}: lost in BF16: {bool(update_is_lost(one, one * update, BF16))}, in float32: {bool(update_is_lost(one, one * update, FP32))}"
    )

# %% [markdown]
# ---
# ## What you built
#
# Sums that you can trust, and a price for each. A race over four rows of 256 numbers: your three sums in BF16, and torch's own, which adds in float32.

# %%
rows = torch.rand((4, 256), generator=generator)
short_rows = rows.to(torch.bfloat16)
race(
    {
        "sum_sequential": lambda: sum_sequential(rows, BF16),
        "sum_pairwise": lambda: sum_pairwise(rows, BF16),
        "sum_kahan": lambda: sum_kahan(rows, BF16),
        "torch.sum in BF16": lambda: short_rows.sum(-1),
    },
    rounds=5,
).plot(to="sum_sequential")

# %% [markdown]
# The tree needs eight rounds of additions instead of 256, so it is not only more exact but also faster. Kahan pays with four operations for one. And torch's bar cannot be seen: that is what it costs to emulate an adder, and why a wide accumulator belongs into the hardware.
#
# You can now say what training in 16 bits has to look like: short numbers into the products, float32 for the totals and for the weights. PyTorch has a tool that decides this for every operation, and chapter 04 takes it apart.

# %%
progress()
