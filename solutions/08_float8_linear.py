# %% [markdown]
# # 08 · FP8 linear: which casts does a linear layer need?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 07](07_quantizer.ipynb): `quantize`, `dequantize`, granularity. **Gives** you a linear layer whose three matrix products are in 8 bits, forward and backward, to the last bit that of torchao; and a reason for each of its six casts.
#
# You have a quantizer. Put it before a matrix product, and you have FP8 training? Here is what comes back when a gradient goes through the plainest cast there is:

# %% tags=["setup"]
try:
    import math
    from dataclasses import replace

    import torch

    from lowprec_lab import Float8LinearExplorer, check, fill, plots, progress, question, reveal
    from lowprec_lab.data import load_corpus, step_generator
    from lowprec_lab.float8_linear import (
        PRODUCTS,
        RECIPES,
        Cast,
        Float8Linear,
        Recipe,
        backward_of,
        both_ways,
        cast_both_ways,
        casts_of,
        find_recipe,
        float8_layers,
        float8_linear_backward,
        float8_linear_forward,
        float8_matmul,
        forward_of,
        layer_facts,
        layer_of,
        layer_operands,
        make_recipe,
        product_errors,
        product_of,
        products_for,
        refuses,
        transpose,
        why_not_float8,
    )
    from lowprec_lab.formats import BF16, E4M3, E5M2, FP32, Format
    from lowprec_lab.gpt import GPT, GPTConfig, preset
    from lowprec_lab.libraries import AbsentError, torchao_linear
    from lowprec_lab.quantizer import Quantized, dequantize, quantize, spread
    from lowprec_lab.races import race
    from lowprec_lab.reading import installed_lines
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %%
x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
y = x.to(torch.float8_e4m3fn).float()  # 1, 2 and 3 are exact in E4M3
y.backward(torch.tensor([0.3, 1000.0, 1e-4]))
print("the values:  ", y.tolist())
print("the gradient:", x.grad.tolist())

# %% [markdown]
# The values went through unharmed. The *gradient* was 0.3, 1000 and 0.0001, and comes back rounded to E4M3, cut at 448, and zero. autograd knows how to differentiate a conversion from float32 to 8 bits: it converts the gradient back the same way, from float32 to 8 bits and up again, and without a scale. Nobody asked for that, nothing is said, and the gradients of a GPT are far smaller than 0.0001.
#
# So casts have to be put in *by hand*, with a scale each, and on both ways. This page is about which ones.
#
# **Words.** A linear layer computes `output = x @ weight.T`. Its backward pass gets `grad_output`, the gradient of the loss with respect to the output, and owes two gradients: `grad_x` and `grad_weight`. M, K and N are rows of x (tokens), inputs and outputs of the layer: x is (M, K), weight (N, K), output and grad_output (M, N). A **product** is a product of two matrices, a **cast** is quantizing one operand of one product, a **recipe** says how all casts are done.
#
# ---
# ## Out of autograd's hands
#
# ### Exercise 8.1 · `cast_both_ways` · 30 min · medium · 3 points
#
# A function in two directions: forward it quantizes and dequantizes x, by one cast; backward it does that to the gradient, by another. Each gets a scale of its own, from the very tensor that is cast. The derivative of rounding itself is 0 almost everywhere, and of no use. It is taken as 1 ("straight through"), as in exercise 7.7.
#
# | | |
# |---|---|
# | in | `x`: float32, bfloat16 or float16, (M, N); `forward`, `backward`: a `Cast` or None |
# | out | x's dtype and shape: `dequantize(quantize(x, *forward))` |
# | backward | the gradient g that arrives goes on to x as `dequantize(quantize(g, *backward))` |
# | mind | None leaves its direction as it is |
#
# A `Cast` is what `quantize` takes after the tensor: `Cast(fmt, granularity, power_of_two)`. As it is a tuple, `quantize(x, *cast)` does it.
#
# By hand, for the gradient above with `Cast(E5M2)`: the largest is 1000, so the scale is 57344 / 1000 = 57.344, as a float32 57.3440017700.
#
# | gradient | times the scale | rounded to E5M2 | divided by the scale |
# |---|---|---|---|
# | 0.3 | 17.203 | 16 | 0.27902 |
# | 1000 | 57344.002 | 57344 | 999.99994 |
# | 0.0001 | 0.0057344 | 0.005859375 (3 · 2^-9) | 0.00010218 |
#
# Coarse, and all three are there.
#
# <details><summary>A nudge</summary>Which class of torch lets you write forward and backward yourself? Chapter 07 used it for <code>straight_through</code>.</details>
# <details><summary>An approach</summary>A <code>torch.autograd.Function</code> inside your function, with two static methods that call the same little helper: <code>tensor.clone()</code> for None, else quantize and dequantize.</details>


# %%
@fill
def cast_both_ways(x, forward, backward):
    ### BEGIN SOLUTION
    def seen(tensor, cast):
        return tensor.clone() if cast is None else dequantize(quantize(tensor, *cast))

    class BothWays(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return seen(x, forward)

        @staticmethod
        def backward(ctx, gradient):
            return seen(gradient, backward)

    return BothWays.apply(x)
    ### END SOLUTION


# %%
check(cast_both_ways)

# %% [markdown]
# **Predict first:** a GPT whose linear layers cast x and weight with `.to(torch.float8_e4m3fn).float()`, as above. How many of the gradients of its weights are exactly zero? And with `cast_both_ways` in the same place?

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


class TrapLinear(torch.nn.Linear):
    """The cast that everybody writes first."""

    def forward(self, x):
        there_and_back = (each.to(torch.float8_e4m3fn).float() for each in (x, self.weight))
        return torch.nn.functional.linear(*there_and_back)


class BothWaysLinear(torch.nn.Linear):
    """The same place, with casts that are meant."""

    def forward(self, x):
        rows = cast_both_ways(x.flatten(0, -2), Cast(E4M3), None)
        output = rows @ cast_both_ways(self.weight, Cast(E4M3), None).T
        return cast_both_ways(output, None, Cast(E5M2)).reshape(*x.shape[:-1], -1)


def made_of(kind):
    model = small_gpt()
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = kind
    return model


for kind in (torch.nn.Linear, TrapLinear, BothWaysLinear):
    model = made_of(kind)
    model(*batch_of(0))[1].backward()
    lost = {
        name: float((p.grad == 0).float().mean())
        for name, p in model.named_parameters()
        if "mlp" in name and p.dim() == 2
    }
    print(
        f"{kind.__name__:15}", "  ".join(f"{name.removesuffix('.weight')} {share:.1%}" for name, share in lost.items())
    )

# %% [markdown]
# The share of gradients that are exactly zero. Behind the trap there is nothing left to learn from, and no error says so. (The last line casts in three places. You are about to see that a linear layer has six.)
#
# ---
# ## Three products, six casts
#
# Here are the products of one layer of this GPT, after a few steps of training:
#
# | | first operand | second operand | sums over |
# |---|---|---|---|
# | `output = x @ weight.T` | x (M, K) | weight.T (K, N) | K, inputs |
# | `grad_x = grad_output @ weight` | grad_output (M, N) | weight (N, K) | N, outputs |
# | `grad_weight = grad_output.T @ x` | grad_output.T (N, M) | x (M, K) | M, tokens |


# %%
def train(model, steps, lr=3e-3):
    """The losses of a short run."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99)), []
    for step in range(steps):
        loss = model(*batch_of(step))[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


model = small_gpt()
baseline = train(model, 40)
layers = layer_operands(model, *batch_of(1000))
Float8LinearExplorer(*layers["blocks.1.mlp.up"], recipe="rowwise")

# %% [markdown]
# Choose the recipes one after the other, and see how the bars beside the matrices change. They are the scales: one for a matrix, or one for each row, or one for each column (darker is larger). Each tensor takes part in *two* products. Does it have the same scales in both? (The slider is for later.)
#
# It can not, when there is one for each row. Here is why, for one number of the output:
#
#     output[m, n] = sum over k of  (code_x[m, k] / s[m]) * (code_w[n, k] / t[n])
#                  = (sum over k of  code_x[m, k] * code_w[n, k]) / (s[m] * t[n])
#
# A tensor core multiplies *codes* and adds up the products. It can do so only because s and t do not depend on k: they come **out of the sum**. So x may have a scale for each m, and weight one for each n. Neither may have one for each k.
# In `grad_x` the sum runs over n, and there weight must *not* have a scale for each n. It gets one for each k.
#
# Matrices in 8 bits are multiplied by hardware in exactly this way, and what emulates it should not allow itself more.
#
# ### Exercise 8.2 · `make_recipe` · 25 min · medium · 2 points
#
# Write down the six casts for any choice of formats. A `Recipe` has them in this order, two for each product:
#
# `Recipe(name, x, weight, grad_output, weight_for_grad_x, grad_output_for_grad_weight, x_for_grad_weight)`
#
# | | |
# |---|---|
# | in | `granularity`: "tensor" or "row"; `forward`, `backward`: formats; `power_of_two`: bool; `high_precision`: a tuple of names among "output", "grad_x", "grad_weight" |
# | out | a `Recipe`, of any name |
# | granularity | "tensor": every cast has "tensor". "row": every cast has as many scales as can come out of its sum: "row" or "column" of the tensor *as it stands*, x (M, K), weight (N, K), grad_output (M, N), before any transposing |
# | formats | x and weight have `forward` in every product, grad_output has `backward` |
# | mind | both casts of a product in `high_precision` are None |
#
# By hand, the first product with "row": x[m, k] keeps its m, its row, so "row". weight[n, k] keeps its n, which is its row as well (weight.T has it as a column, but weight is cast as it stands): "row". For the second product: grad_output[m, n] sums over n and keeps m; weight[n, k] keeps k. Rows or columns?
#
# <details><summary>A nudge</summary>Write the two letters of each tensor, and strike out the one that is summed over. Is the other one the first or the second?</details>
# <details><summary>An approach</summary>A small function for a pair of casts that returns <code>(None, None)</code> for a product in high precision; then six pairs (format, "row" or "column") written out.</details>


# %%
@fill
def make_recipe(granularity, forward, backward, power_of_two, high_precision):
    ### BEGIN SOLUTION
    def casts(product, *operands):
        if product in high_precision:
            return None, None
        return tuple(Cast(fmt, "tensor" if granularity == "tensor" else lines, power_of_two) for fmt, lines in operands)

    return Recipe(
        "by rules",
        *casts("output", (forward, "row"), (forward, "row")),
        *casts("grad_x", (backward, "row"), (forward, "column")),
        *casts("grad_weight", (backward, "column"), (forward, "column")),
    )
    ### END SOLUTION


# %%
check(make_recipe)

# %% [markdown]
# These are the three recipes of torchao, which the package knows as `RECIPES`. How many of them can you make?

# %%
yours = {
    "tensorwise": make_recipe("tensor", E4M3, E5M2, False, ()),
    "rowwise": make_recipe("row", E4M3, E4M3, True, ()),
    "rowwise_with_gw_hp": make_recipe("row", E4M3, E4M3, True, ("grad_weight",)),
}
for name, recipe in RECIPES.items():
    print(name)
    for product, known, made in zip(PRODUCTS, recipe.pairs(), yours[name].pairs(), strict=True):
        casts = [
            "high precision" if c is None else f"{plots.short_name(c.fmt)} {c.granularity}{' 2^k' * c.power_of_two}"
            for c in known
        ]
        print(
            f"   {product:12} {casts[0]:17} {casts[1]:17} {'as you made it' if known == made else 'not by these rules'}"
        )

# %% [markdown]
# One pair is not by the rules. `rowwise_with_gw_hp` gives weight *one* scale in `grad_x` though it could have one for each column. A column of a row-major matrix is slow to look at, and so this recipe never does: each tensor is cast along its rows, or as a whole. ("gw_hp" is "grad_weight in high precision".)
#
# Two more things to notice. `tensorwise` has E5M2 for gradients, and both others E4M3. And in no product are both operands E5M2: hardware does not multiply such a pair.
#
# ---
# ## A product of codes
#
# ### Exercise 8.3 · `float8_matmul` · 20 min · easy · 2 points
#
# On a GPU of the last years this is one instruction. Here you emulate it, with the same codes and scales: dequantize both operands to float32, multiply in float32, and round the result once.
#
# | | |
# |---|---|
# | in | `a`, `b`: `Quantized`, (M, K) and (K, N), of any formats and granularities |
# | out | (M, N), of dtype `a.dtype` |
# | mind | operands are *float32* values, decode(code) / scale, also where `a.dtype` is bfloat16; only the result is rounded to it |
# | order | add up in any order you like. Where everything is exact the bits are compared; elsewhere the result has to be as near as float32 sums of K products can be |
#
# By hand, K = 2, in E4M3: a has codes for 3 and 1.5 and scale 2, b has codes for 6 and -4 and scale 0.5. So a is (1.5, 0.75), b is (12, -8), and the product 1.5 · 12 - 0.75 · 8 = 12. The codes alone: 3 · 6 - 1.5 · 4 = 12, divided by 2 · 0.5.
#
# How near is near? Every summand goes through at most K + 4 operations that are off by at most 2^-24 of their result: two divisions (or four roundings, if you multiply by reciprocals), the product, K - 1 additions. So the float32 result is at most (K + 4) · 2^-24, and a trifle, times the sum of the *magnitudes* of the products away from the exact one.
# (Higham, *Accuracy and Stability of Numerical Algorithms*, section 3.1. Chapter 03 has shown what a wrong order can do to a sum; here it may be wrong by so much and no more.)
#
# <details><summary>A nudge</summary><code>dequantize</code> returns <code>q.dtype</code>. How do you get float32 from a Quantized that was made of bfloat16?</details>
# <details><summary>An approach</summary><code>replace(q, dtype=torch.float32)</code> from <code>dataclasses</code> makes a copy with another dtype. Or decode the codes yourself, and divide by <code>spread(q.scale, q.granularity, q.codes.shape)</code>.</details>


# %%
@fill
def float8_matmul(a, b):
    ### BEGIN SOLUTION
    def values(q):  # laid out in memory as its codes are: the order of a sum, and its last bits, depend on that
        wide = replace(q, dtype=torch.float32)
        return dequantize(wide) if q.codes.is_contiguous() else dequantize(transpose(wide)).t()

    return torch.mm(values(a), values(b)).to(a.dtype)
    ### END SOLUTION


# %%
check(float8_matmul)

# %% [markdown]
# The reference goes to some length to lay its operands out in memory as the codes are. That changes no value; but a library may add up in another order then, and the last bit may differ. To be equal to torchao bit for bit, one has to multiply as it does.
#
# **Predict first:** the same product in three other ways. How many of its 1,200 numbers have the same bits?

# %%
torch.manual_seed(0)
a, b = torch.randn(120, 118), torch.randn(118, 10)
plain = a @ b
ways = {
    "b laid out by columns": a @ b.t().contiguous().t(),
    "the transpose of b.T @ a.T": (b.t() @ a.t()).t(),
    "K backwards": a.flip(1) @ b.flip(0),
}
for name, other in ways.items():
    apart = float((plain - other).abs().max() / plain.abs().max())
    print(
        f"{name:28}{int((plain == other).sum()):6,} of {plain.numel():,} are the same; {apart:.0e} of the largest apart"
    )

# %% [markdown]
# How many are the same depends on your machine and its library. That is why a learner's sum is judged by a bound.
#
# ---
# ## Forward
#
# ### Exercise 8.4 · `float8_linear_forward` · 20 min · easy · 2 points
#
# | | |
# |---|---|
# | in | `x`: (..., K), float32, bfloat16 or float16; `weight`: (N, K); `recipe` |
# | out | (..., N), x's dtype |
# | casts | `recipe.x` and `recipe.weight`; None for both: the product in high precision, in x's dtype |
# | mind | all leading dimensions of x are one. One scale for a tensor is one for the whole batch |
#
# `transpose(q)` is given: it transposes a quantized matrix, codes and scales, and rounds nothing.
#
# By hand: x of shape (2, 3, 4) and weight (5, 4). x becomes (6, 4), quantized by rows it has scales (6, 1). weight has scales (5, 1); its transpose (4, 5) has scales (1, 5). The product is (6, 5), and the output (2, 3, 5).
#
# <details><summary>A nudge</summary>Does the cast of weight come before or after transposing? What do rows and columns refer to?</details>
# <details><summary>An approach</summary>Flatten x to two dimensions, <code>float8_matmul</code> of its quantized rows and the transpose of the quantized weight, and back to the leading dimensions. <code>x.reshape(-1, K)</code> fails for an x with no elements; <code>math.prod(x.shape[:-1])</code> is how many rows there are.</details>


# %%
@fill
def float8_linear_forward(x, weight, recipe):
    ### BEGIN SOLUTION
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # (M, K)
    if recipe.x is None:
        output = torch.mm(rows, weight.t().to(x.dtype))
    else:
        output = float8_matmul(quantize(rows, *recipe.x), transpose(quantize(weight, *recipe.weight)))
    return output.reshape(*x.shape[:-1], weight.shape[0])
    ### END SOLUTION


# %%
check(float8_linear_forward)

# %% [markdown]
# **Predict first:** one number of x is infinite (or NaN; chapter 07 made them alike). How many of 8 rows of the output are lost, by each recipe? And how many, when the number is 1e-40, far below the smallest that a scale is made for?

# %%
weight = torch.randn(6, 4)
for value in (math.inf, math.nan, 1e-40):
    x = torch.randn(8, 4)
    x[2, 1] = value
    lost = {
        name: int(float8_linear_forward(x, weight, recipe).isnan().any(dim=1).sum()) for name, recipe in RECIPES.items()
    }
    print(f"{value:6}: rows with NaN", lost)

# %% [markdown]
# ---
# ## Backward
#
# ### Exercise 8.5 · `float8_linear_backward` · 40 min · hard · 4 points
#
# Now both products of the way back. Each starts from the tensors themselves, x, weight and grad_output in high precision. A layer that kept the codes of the way forward and cast *those* again would round twice (and by scales along the wrong dimension).
#
# | | |
# |---|---|
# | in | `grad_output`: (..., N); `x`: (..., K); `weight`: (N, K); `recipe`; `needs`: two bools |
# | out | `(grad_x, grad_weight)`: (..., K) and (N, K), both of grad_output's dtype |
# | casts | for `grad_x` `recipe.grad_output` and `recipe.weight_for_grad_x`; for `grad_weight` `recipe.grad_output_for_grad_weight` and `recipe.x_for_grad_weight`; a pair of None: in high precision, in grad_output's dtype |
# | mind | `needs` says which of the two is wanted. The other one is None, and nothing is computed for it |
#
# By hand, one row (M = 1), N = 2, K = 1: grad_output (0.5, 2), weight (4, 8), x (3). Whatever the casts (all of these are exact), `grad_x` = 0.5 · 4 + 2 · 8 = 18, and `grad_weight` = (0.5 · 3, 2 · 3) = (1.5, 6).
#
# <details><summary>A nudge</summary>Which of the four operands has to be transposed, and is that before or after its cast?</details>
# <details><summary>An approach</summary>Flatten both to rows. <code>grad_x</code> needs no transpose at all. For <code>grad_weight</code> quantize grad_output as it stands, and transpose the result. Each behind an <code>if</code> on <code>needs</code> and one on the recipe.</details>


# %%
@fill
def float8_linear_backward(grad_output, x, weight, recipe, needs=(True, True)):
    ### BEGIN SOLUTION
    m = math.prod(x.shape[:-1])
    gradient, rows = grad_output.reshape(m, len(weight)), x.reshape(m, x.shape[-1])  # (M, N), (M, K)
    grad_x = grad_weight = once = None
    if needs[0] and recipe.grad_output is None:
        grad_x = torch.mm(gradient, weight.to(gradient.dtype))
    elif needs[0]:
        once = quantize(gradient, *recipe.grad_output)
        grad_x = float8_matmul(once, quantize(weight, *recipe.weight_for_grad_x))
    if needs[1] and recipe.grad_output_for_grad_weight is None:
        grad_weight = torch.mm(gradient.t(), rows.to(gradient.dtype))
    elif needs[1]:
        if once is None or recipe.grad_output_for_grad_weight != recipe.grad_output:  # the same cast, the same codes
            once = quantize(gradient, *recipe.grad_output_for_grad_weight)
        grad_weight = float8_matmul(transpose(once), quantize(rows, *recipe.x_for_grad_weight))
    return grad_x if grad_x is None else grad_x.reshape(x.shape), grad_weight
    ### END SOLUTION


# %%
check(float8_linear_backward)

# %% [markdown]
# **Predict first:** the relative error of each of the three products, by recipe, on the real tensors of the GPT that was trained above. Which product is worst? Does a scale for each row help?

# %%
tried = {
    **RECIPES,
    "tensorwise, but E4M3 back": make_recipe("tensor", E4M3, E4M3, False, ()),
    "rowwise, but E5M2 back": make_recipe("row", E4M3, E5M2, True, ()),
}
errors = {}
for name, recipe in tried.items():
    found = [product_errors(*operands, recipe) for operands in layers.values()]
    errors[name] = {product: sum(each[product] for each in found) / len(found) for product in PRODUCTS}
print(f"{'mean of ' + str(len(layers)) + ' layers':28}", "  ".join(f"{product:>12}" for product in PRODUCTS))
for name, row in errors.items():
    print(f"{name:28}", "  ".join(f"{row[product]:12.2%}" for product in PRODUCTS))
with plots.style():
    picture, axes = plots.figure(9, 4)
    for place, (name, row) in enumerate(errors.items()):
        back = tried[name].grad_output.fmt
        heights = [100 * row[product] for product in PRODUCTS]
        at = [group + (place - 2) * 0.16 for group in range(3)]
        axes.bar(at, heights, width=0.14, color=plots.color_of(back), alpha=1 if name in RECIPES else 0.45)
        for left, height in zip(at, heights, strict=True):
            axes.text(
                left, height + 0.05, name.replace(", but", ","), rotation=90, fontsize=7, ha="center", va="bottom"
            )
    axes.set_xticks(range(3), PRODUCTS)
    axes.set_ylim(0, max(max(row.values()) for row in errors.values()) * 190)
    axes.set_ylabel("relative error (%)")
    axes.set_title("Three products, by recipe (orange: E4M3 gradients, purple: E5M2)")
picture

# %% [markdown]
# The output loses least: two operands with three mantissa bits each, and errors that average out over K. The gradients lose more, and what decides how much is the *format* of grad_output. With two mantissa bits in place of three, E5M2 has twice the rounding error; that of the other operand stays, and so a product is about sqrt((2² + 1²) / (1² + 1²)) = 1.6 times as far off. The granularity hardly matters here. So why does anybody use E5M2 for gradients?
#
# ## What breaks with E4M3 gradients
#
# **Predict first:** one token of the batch gets a gradient that is 2^k times as large as the others' (a rare token, a bad label; loss spikes are made of this). All other rows stay as they are. How far are the *other rows* of `grad_x` off, as k grows, for each choice?

# %%
x, weight, grad_output = layers["blocks.1.mlp.up"]
choices = {
    "E4M3, one scale": (tried["tensorwise, but E4M3 back"], E4M3, "--"),
    "E5M2, one scale": (RECIPES["tensorwise"], E5M2, "-"),
    "E4M3, a scale for each row": (RECIPES["rowwise"], E4M3, "-"),
}
powers, curves = range(0, 32, 2), {name: [] for name in choices}
for k in powers:
    spiked = grad_output.clone()
    spiked[0] *= 2.0**k
    exact = (spiked.double() @ weight.double())[1:]
    for name, (recipe, _, _) in choices.items():
        others = float8_linear_backward(spiked, x, weight, recipe, (True, False))[0][1:]
        curves[name].append(float((others - exact).norm() / exact.norm()))
with plots.style():
    picture, axes = plots.figure(9, 4)
    for name, (_, fmt, line) in choices.items():
        axes.semilogy(powers, curves[name], line, color=plots.color_of(fmt))
    labels = {
        "E4M3, one scale": (17, 0.25, "right"),
        "E5M2, one scale": (2, 0.02, "left"),
        "E4M3, a scale for each row": (18, 0.0085, "left"),
    }
    for name, (k, height, side) in labels.items():
        axes.text(k, height, name, color=plots.color_of(choices[name][1]), fontweight="bold", ha=side)
    axes.set_ylim(0.005, 1.5)
    axes.set_xlabel("k: the gradient of one token is 2^k times as large")
    axes.set_ylabel("relative error of grad_x,\nall other tokens")
    axes.set_title("What one large gradient does to the others")
picture

# %% [markdown]
# (The slider of the explorer above does the same.) With one scale for all, the large row takes the top of the range, and the others slide down into the subnormals and then to zero. E4M3 has about 15 binades of normal numbers, E5M2 has 30: that is what its second mantissa bit was given up for. A scale for each row does not care, since each row has its own range. So there are two ways to be safe, range or granularity, and the two kinds of recipe take one each.
#
# Both have a price: E5M2 a larger error at all times, and a scale for each row a slower cast and a slower product.
#
# ---
# ## The layer
#
# ### Exercise 8.6 · `Float8Linear` · 45 min · hard · 4 points
#
# A layer that takes the place of `nn.Linear`, in any model. Its parameters are those of the layer that it replaces: the same objects, in float32, under the same names. So the optimizer that already holds them goes on, checkpoints fit, and a weight that is tied to an embedding stays tied. What is in 8 bits are the products, and nothing else.
#
# | | |
# |---|---|
# | `Float8Linear(in, out, bias, recipe)` | like nn.Linear; `recipe` is a Recipe or a name. The attribute `recipe` is the Recipe. `find_recipe` gives it, and raises the ValueError for an unknown name |
# | `Float8Linear.from_linear(linear, recipe)` | *shares* weight and bias with `linear`; training or evaluation mode as there |
# | `forward(x)` | (..., in) to (..., out), x's dtype; the bias is added last, converted to the output's dtype, and not quantized |
# | autocast | casts no operand of these products. Where it is on, for x's kind of device, the output has its dtype, like that of nn.Linear |
# | backward | `float8_linear_backward`, and only what is needed: not the gradient of a frozen weight, nor that of an input which requires none |
# | mind | the weight is cast anew in every forward pass: an optimizer changes it between them |
#
# By hand: a layer with a frozen weight (`requires_grad_(False)`, as in fine-tuning with adapters) in the middle of a model. Forward one product, backward one: `grad_x`. In the first layer of a model, whose input is data, it is the other one. `ctx.needs_input_grad` in an autograd function says which inputs want a gradient. `torch.is_autocast_enabled(x.device.type)` and `torch.get_autocast_dtype(x.device.type)` say what autocast wants, and `with torch.autocast(x.device.type, enabled=False)` keeps it away.
#
# <details><summary>A nudge</summary>What does an autograd function have to keep from forward to backward, and what may it compute again?</details>
# <details><summary>An approach</summary>A <code>torch.autograd.Function</code> of (x, weight, recipe), as a class inside of your class: <code>save_for_backward(x, weight)</code>, the recipe on <code>ctx</code>, and exercises 8.4 and 8.5. For <code>from_linear</code>: make a layer (<code>torch.device("meta")</code> spares the memory), and assign the parameters of the other one.</details>


# %%
@fill
class Float8Linear(torch.nn.Linear):
    def __init__(self, in_features, out_features, bias=True, recipe="tensorwise"):
        ### BEGIN SOLUTION
        super().__init__(in_features, out_features, bias=bias)
        self.recipe = find_recipe(recipe)
        ### END SOLUTION

    @classmethod
    def from_linear(cls, linear, recipe="tensorwise"):
        ### BEGIN SOLUTION
        with torch.device("meta"):  # no memory for weights that are replaced at once
            layer = cls(linear.in_features, linear.out_features, linear.bias is not None, recipe)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):  # the operands have their casts already
            output = self.Products.apply(x, self.weight, self.recipe, dtype)
        return output if self.bias is None else output + self.bias.to(dtype)

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, recipe, dtype):
            ctx.save_for_backward(x, weight)
            ctx.recipe = recipe
            return float8_linear_forward(x, weight, recipe).to(dtype)

        @staticmethod
        def backward(ctx, gradient):
            needs = ctx.needs_input_grad[:2]
            return *float8_linear_backward(gradient, *ctx.saved_tensors, ctx.recipe, needs), None, None

        ### END SOLUTION


# %%
check(Float8Linear)

# %% [markdown]
# **Predict first:** 40 steps of the GPT with every linear layer in 8 bits, by each recipe, beside the float32 run from above. And the run that fell into the trap. Which one stands out? Can you tell the others apart?

# %%
runs = {
    "float32": baseline,
    "float32, other seed": train(small_gpt(seed=2), 40),
    "the trap": train(made_of(TrapLinear), 40),
}
runs |= {name: train(float8_layers(small_gpt(), name), 40) for name in RECIPES}
for name, losses in runs.items():
    print(f"{name:20} mean loss of the last 10 steps {sum(losses[-10:]) / 10:.3f}")
with plots.style():
    picture, axes = plots.figure(9, 4)
    looks = {
        "float32": (FP32, "-"),
        "float32, other seed": (FP32, ":"),
        "the trap": (E4M3, ":"),
        "tensorwise": (E5M2, "-"),
        "rowwise": (E4M3, "-"),
        "rowwise_with_gw_hp": (BF16, "--"),
    }
    for name, losses in runs.items():
        fmt, line = looks[name]
        axes.plot(losses, line, color=plots.color_of(fmt), linewidth=1.4, label=name)
    axes.text(40.4, runs["the trap"][-1], "the trap", color=plots.color_of(E4M3), va="center", fontweight="bold")
    axes.text(40.4, runs["float32"][-1], "float32 and\nthree recipes", va="center", fontweight="bold")
    axes.set_xlim(0, 48)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title("Forty steps, six ways")
picture

# %% [markdown]
# The three recipes follow the float32 run closely. (How closely, forty steps cannot tell: compare with the other seed. Chapter 10 measures it properly.) The trap learns something as well, since its embedding and its norms still get gradients. A run like that does not crash. It is just worse, and you would look for the reason in the data, or in the learning rate.
#
# **With autocast** such a layer behaves like `nn.Linear`: what comes out is BF16. Its operands are left alone; they have 8 bits already.

# %%
layer, x = torch.nn.Linear(64, 64, bias=False), torch.randn(256, 64)
layers_here = {"nn.Linear": layer} | {name: Float8Linear.from_linear(layer, name) for name in RECIPES}
for name, each in layers_here.items():
    with torch.no_grad():
        plain, exact = each(x), layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            cast = each(x)
    moved, off = (float((one - other).norm() / exact.norm()) for one, other in ((cast, plain), (plain, exact)))
    print(f"{name:20} {cast.dtype}; autocast moves it by {moved:.2%}, and FP8 had moved it by {off:.2%} before")

# %% [markdown]
# In torchao 0.18 one combination of these fails backward, and yours does not. Under CPU autocast grad_output is BF16 and x is float32. In `rowwise_with_gw_hp` they meet in a product that nobody casts:

# %%
inputs = torch.randn(4, 64, requires_grad=True)
try:
    for name, eight in (
        ("yours", layers_here["rowwise_with_gw_hp"]),
        ("torchao", torchao_linear(layer, "rowwise_with_gw_hp")),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            output = eight(inputs)
        output.sum().backward()
        print(f"{name}: a gradient of {layer.weight.grad.dtype}")
except AbsentError as absent:
    print(f"torchao {absent}")
except RuntimeError as error:
    print(f"{name}: {error}")

# %% [markdown]
# ---
# ## Which layers are worth it?
#
# ### Exercise 8.7 · `why_not_float8` · 20 min · easy · 2 points
#
# A product in 8 bits is up to twice as fast as one in BF16, on hardware that can do it. The casts cost time too, though: each reads a tensor twice, for its largest magnitude and for the rounding. A product of (M, K) by (K, N) has M·K·N multiplications and its casts only M·K + K·N numbers to look at, so *large* layers win and small ones lose. torchao has rules of thumb for that, from measurements on an H100 (none for `rowwise_with_gw_hp`; here it has those of `rowwise`). And the hardware wants multiples of 16.
#
# | | |
# |---|---|
# | in | `name` of the layer, `out_features` (N), `in_features` (K), `rows` (M), `recipe`: a name, `skip`: a tuple of texts |
# | out | why it stays in high precision, the first that holds of `"by name"`, `"does not divide"`, `"too small"`; `""` when it is worth converting |
# | by name | a text of `skip` is a part of the name |
# | does not divide | N or K is no multiple of 16; or M is none, and grad_weight (which sums over M) is in 8 bits by this recipe |
# | too small, tensorwise | K <= 4096 and N <= 1024 |
# | too small, both others | N <= 2048, or K <= 1024, or N <= 4096 and K <= 2048 |
# | mind | ValueError for an unknown recipe, whatever the layer is |
#
# By hand, for GPT-2's `mlp.up` (N = 3072, K = 768) with 12 · 1024 rows: all divide by 16. tensorwise: K <= 4096, but N > 1024: worth it. rowwise: K <= 1024: too small.
#
# <details><summary>A nudge</summary>Three questions in an order. Which of them needs the recipe as an object, and which only its name?</details>
# <details><summary>An approach</summary><code>find_recipe</code> first, since it raises the error. Then three <code>if</code>s.</details>


# %%
@fill
def why_not_float8(name, out_features, in_features, rows, recipe, skip=()):
    ### BEGIN SOLUTION
    summed_over_rows = find_recipe(recipe).x_for_grad_weight is not None
    if any(text in name for text in skip):
        return "by name"
    if in_features % 16 or out_features % 16 or summed_over_rows and rows % 16:
        return "does not divide"
    if recipe == "tensorwise":
        small = in_features <= 4096 and out_features <= 1024
    else:
        small = out_features <= 2048 or in_features <= 1024 or out_features <= 4096 and in_features <= 2048
    return "too small" if small else ""
    ### END SOLUTION


# %%
check(why_not_float8)


# %%
def shapes_of(name, rows, vocabulary):
    """Every linear layer of a preset: its name, N and K; and M."""
    with torch.device("meta"):  # a model without memory: only the shapes are wanted
        model = GPT(preset(name, vocab_size=vocabulary))
    return {
        each: (*layer.weight.shape, rows) for each, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)
    }


for title, shapes in (
    ("baby, 65 characters, 12 x 64 tokens", shapes_of("baby", 12 * 64, 65)),
    ("GPT-2, 50,304 tokens, 12 x 1,024", shapes_of("gpt2", 12 * 1024, 50_304)),
    ("GPT-2, 50,257 tokens, 12 x 1,023", shapes_of("gpt2", 12 * 1023, 50_257)),
):
    print(title)
    for recipe in RECIPES:
        reasons = [why_not_float8(name, *shape, recipe) or "converted" for name, shape in shapes.items()]
        print(f"   {recipe:20}", ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons)))

# %% [markdown]
# Look at the third line of each block, and at the last block. A vocabulary of 50,257 keeps one layer out; a batch whose tokens are no multiple of 16 keeps out *all* of them, unless grad_weight is in high precision. That is why nanoGPT's vocabulary is padded to 50,304.
#
# ---
# ## Read the real code
#
# You have written what torchao's `Float8Linear` does. Its products, where they are emulated:

# %%
AO = "https://github.com/pytorch/ao/blob/36027d8/torchao/float8/"
print(
    installed_lines(
        "torchao", "float8/float8_ops.py", "if scaled_mm_config.emulate:", after=4, link=AO + "float8_ops.py"
    )
)
print()
print(
    installed_lines(
        "torchao",
        "float8/float8_linear.py",
        "def forward(self, input: torch.Tensor)",
        after=20,
        link=AO + "float8_linear.py",
    )
)

# %% [markdown]
# **8.A** `torch.is_autocast_enabled()` without an argument asks about CUDA alone. A model runs under `torch.autocast("cpu", torch.bfloat16)`. Is the input of such a layer converted to BF16 here? (`True` or `False`.)

# %%
question(
    "8.A",
    ### BEGIN SOLUTION
    False,
    ### END SOLUTION
)

# %%
print(
    installed_lines(
        "torchao", "float8/config.py", "gemm_config_output: Float8GemmConfig", before=4, after=4, link=AO + "config.py"
    )
)
print()
print(
    installed_lines(
        "torchao",
        "float8/float8_linear.py",
        "ctx.save_for_backward(input_hp, weight_hp_t)",
        before=8,
        after=4,
        link=AO + "float8_linear.py",
    )
)

# %% [markdown]
# **8.B** Tensor cores can add up faster, with fewer bits (chapter 03's `matmul_promoted` is about the repair). In which of the three products does torchao let them? (`"output"`, `"grad_x"` or `"grad_weight"`.)

# %%
question(
    "8.B",
    ### BEGIN SOLUTION
    "output",
    ### END SOLUTION
)

# %% [markdown]
# **8.C** From forward to backward, how many bytes does this function keep for each number of a *bfloat16* input?

# %%
question(
    "8.C",
    ### BEGIN SOLUTION
    2,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## Break it
#
# **"The gradients in my FP8 model are wrong."** ([pytorch#128257](https://github.com/pytorch/pytorch/issues/128257)) You know this one by now. Here it is in its smallest form, a loss scale and all:

# %%
weight = torch.nn.Parameter(torch.ones(4))
gradient = torch.tensor([2.0**-9, 0.001, 2.0**-11, 500.0])
(weight.to(torch.float8_e4m3fn).float() * gradient).sum().backward()
print("should be", gradient.tolist())
print("is       ", weight.grad.tolist())

# %% [markdown]
# **8.D** One of the gradients above comes back about *twice* as large as it should be. What does 0.001 come back as? (A number. The smallest E4M3 is 2^-9, and half of it is a tie.)

# %%
question(
    "8.D",
    ### BEGIN SOLUTION
    2.0**-9,
    ### END SOLUTION
)

# %% [markdown]
# The fix is your `cast_both_ways`, with the gradient left alone or with a cast that has a scale:

# %%
for backward in (None, Cast(E5M2)):
    weight = torch.nn.Parameter(torch.ones(1, 4))
    (cast_both_ways(weight, Cast(E4M3), backward) * gradient).sum().backward()
    print([f"{each:.6g}" for each in weight.grad[0].tolist()])

# %% [markdown]
# **"Expected trailing dimension of mat1 to be divisible by 16"** ([ao#571](https://github.com/pytorch/ao/issues/571), [ao#3111](https://github.com/pytorch/ao/issues/3111)), though all layers have good sizes. A CPU multiplies any shapes, so here a stand-in says what a GPU says, with the same words:


# %%
def on_a_gpu(product, first, second):
    """What torch._scaled_mm on CUDA says of the shapes of a product, (rows, summed) and (summed, columns)."""
    if first[1] % 16:
        raise RuntimeError(
            f"{product}: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: ({first[0]}x{first[1]})."
        )
    if second[0] % 16 or second[1] % 16:
        raise RuntimeError(f"{product}: mat2 shape ({second[0]}x{second[1]}) must be divisible by 16")


def a_step_on_a_gpu(rows, in_features, out_features):
    m, k, n = rows, in_features, out_features
    on_a_gpu("output", (m, k), (k, n))
    on_a_gpu("grad_x", (m, n), (n, k))
    on_a_gpu("grad_weight", (n, m), (m, k))
    return "all three products ran"


try:
    print(a_step_on_a_gpu(rows=6 * 100, in_features=768, out_features=3072))
except RuntimeError as error:
    print("RuntimeError:", error)
print("why not?", why_not_float8("mlp.up", 3072, 768, 6 * 100, "tensorwise"))

# %% [markdown]
# The forward pass went through, and the first of the products backward, too. Where a batch has 6 · 100 tokens, the sum of `grad_weight` has 600 numbers, and that is no multiple of 16.
#
# **8.E** To how many rows would you fill up this batch with zeros, so that it runs? (The least number. Zeros add nothing to a sum.)

# %%
question(
    "8.E",
    ### BEGIN SOLUTION
    608,
    ### END SOLUTION
)

# %%
print(a_step_on_a_gpu(rows=608, in_features=768, out_features=3072))
x, grad_output = torch.randn(600, 32), torch.randn(600, 16)
filled = (torch.nn.functional.pad(each, (0, 0, 0, 8)) for each in (grad_output, x))
recipe, weight = RECIPES["tensorwise"], torch.randn(16, 32)
plain = float8_linear_backward(grad_output, x, weight, recipe)[1]
padded = float8_linear_backward(*filled, weight, recipe)[1]
print(
    f"grad_weight with 8 rows of zeros more: at most {float((plain - padded).abs().max() / plain.abs().max()):.0e} of the largest apart"
)

# %% [markdown]
# ---
# ## What you built
#
# A race, forward and backward, of one layer of GPT-2's width: `nn.Linear` in float32, yours, and torchao's where it is installed. All emulate: on a CPU nothing is won by 8 bits. What can be compared is what the emulation costs.

# %%
x, gradient = torch.randn(256, 768), torch.randn(256, 768)
linear = torch.nn.Linear(768, 768, bias=False)


def step_of(layer):
    def step():
        inputs = x.clone().requires_grad_()
        layer(inputs).backward(gradient)

    return step


runners = {"nn.Linear, float32": step_of(linear)}
runners |= {
    f"Float8Linear, {name}": step_of(Float8Linear.from_linear(linear, name)) for name in ("tensorwise", "rowwise")
}
try:
    runners |= {f"torchao, {name}": step_of(torchao_linear(linear, name)) for name in ("tensorwise", "rowwise")}
except AbsentError as absent:
    print(f"torchao is left out: it {absent}")
race(runners, rounds=5).plot(to="nn.Linear, float32")

# %% [markdown]
# Three points to take along:
#
# - A linear layer has three products and six casts. Which scales a cast may have is decided by what its product sums over.
# - A gradient needs a cast of its own, with a scale of its own; what it needs in *range* depends on how many numbers share a scale.
# - Parameters, bias, optimizer and everything between the layers stay as they are.
#
# On a GPU the product becomes `torch._scaled_mm`, and that is far more particular about what it takes. Why, and how one finds out, is chapter 09.

# %%
progress()
