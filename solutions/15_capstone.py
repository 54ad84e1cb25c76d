# %% [markdown]
# # 15 · Capstone: how few bits train a GPT?
#
# **Takes** 8 hours or more: one to build the rules, the rest is yours. **Needs** [chapter 02](02_rounding.ipynb): rounding, also at random; [chapter 07](07_quantizer.ipynb): amax and scales. All other chapters help. **Gives** you a recipe of your own for training with few bits, measured by a fixed evaluation, and an argument for it.
#
# You know how BF16 trains, and FP8, and where each of them breaks. Those recipes are other people's. Here is a small GPT, a text, 400 steps, and one number: how many bits were stored and moved. Every format, block, scale and rounding is yours to choose, for each role, each layer and each step. How low can you go before it stops to learn?

# %% tags=["setup"]
try:
    import math

    import torch

    from lowprec_lab import check, fill, plots, progress, question, reveal
    from lowprec_lab.capstone import (
        FORMATS,
        INTEGERS,
        REFERENCES,
        ROLES,
        SCALE_BITS,
        SHARES,
        STEPS,
        TARGET_LOSS,
        bits_by_role,
        bits_for,
        bits_of_cast,
        bits_of_recipe,
        compare,
        design_recipe,
        emulate_cast,
        emulated,
        evaluate,
        fit_codebook,
        layout,
        pareto_front,
        recipe_text,
    )
    from lowprec_lab.capstone_text import sentences
    from lowprec_lab.formats import BF16, E2M1, E4M3, E8M0, FP32
    from lowprec_lab.quantizer import absmax, spread, sqnr_db
    from lowprec_lab.rounding import round_to
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %%
print(sentences(seed=1, characters=300))
shapes = layout()
for role in ROLES:
    numbers = sum(rows * columns for rows, columns in shapes[role].values())
    print(f"{role:12} {len(shapes[role]):3} matrices {numbers:9,} numbers in each step")

# %% [markdown]
# The text is made by rule, so that nobody has to fetch it, and so that a GPT of a hundred thousand weights learns it within seconds. A step has seven **roles**:
#
# - **weights**: as the products of the forward and backward pass see them;
# - **activations**: the inputs of linear layers, which are kept for the backward pass;
# - **gradients**: what comes back to the outputs of linear layers;
# - **wire**: the gradient of each weight, on its way to the optimizer (in a cluster: between the machines);
# - **moment1**, **moment2**: Adam's two running means;
# - **master**: the weights that the optimizer keeps and changes.
#
# **A recipe is a dict**: for each role a *cast*, which says what a matrix becomes.
#
# ```python
# {
#     "name": "FP8 activations, 4 bits on the wire",
#     "activations": {"values": "E4M3", "scale": "float32", "block": "tensor"},
#     "wire": {"values": "int4", "scale": "e8m0", "block": [1, 32], "rounding": "stochastic"},
#     "overrides": [{"role": "wire", "layer": "head", "from": 0, "to": 100, "cast": {"values": "BF16"}}],
# }
# ```
#
# A role that is left out is float32. An override is another cast for one role: in one layer (in all, if it is left out), from one step on and up to *before* another. Of several that apply, the last one of the list holds.
#
# **A cast** has `values`: a format's name, `"int2"` to `"int8"`, or a *codebook*, a list of 2 to 256 numbers that go up. It may have a `scale` ("none", "float32", "bfloat16", "e8m0", "e4m3"), which belongs to a `block` ("tensor", "row", "column" or `[rows, columns]`), and is made of the largest magnitude, times `clip`. And a `rounding`: "nearest" or "stochastic". The rules are written down at the top of `lowprec_lab.capstone`; `help("lowprec_lab.capstone")` shows them.
#
# ---
# ## Counting
#
# ### Exercise 15.1 · `bits_of_cast` · 20 min · easy · 2 points
#
# Whoever counts only the codes can claim anything: 4 bits with a float32 scale for each pair of numbers are 20.
#
# | | |
# |---|---|
# | in | `cast`: a valid cast; `rows`, `columns`: 1 or more |
# | out | a whole number of bits |
# | codes | the format's width, the whole number's bits, or as many bits as tell a codebook's numbers apart |
# | scales | `SCALE_BITS[...]` for each block; where blocks do not divide, the last ones are smaller, and have a scale too |
# | "e4m3" | 32 bits more, once: a second scale for the matrix |
# | codebook | 32 bits for each of its numbers, in every matrix |
#
# By hand, for 4 rows and 40 columns:
#
# | cast | codes | scales | codebook | bits |
# |---|---|---|---|---|
# | E4M3, no scale | 160 · 8 | | | 1280 |
# | int4, e8m0, [1, 32] | 160 · 4 | 4 · 2 blocks · 8 | | 704 |
# | E2M1, e4m3, [1, 16] | 160 · 4 | 4 · 3 blocks · 8 + 32 | | 768 |
# | 5 numbers, float32, tensor | 160 · 3 | 32 | 5 · 32 | 672 |
#
# `FORMATS` gives the `Format` of a name, and `SCALE_BITS` the bits of a scale.
#
# <details><summary>A nudge</summary>How many blocks of 32 columns has a row of 40? And how many bits tell 5 things apart?</details>
# <details><summary>An approach</summary><code>math.ceil</code> in both directions, one after the other. <code>(n - 1).bit_length()</code> for a codebook.</details>


# %%
@fill
def bits_of_cast(cast, rows, columns):
    ### BEGIN SOLUTION
    values, scale = cast["values"], cast.get("scale", "none")
    if isinstance(values, list):
        bits, book = math.ceil(math.log2(len(values))), 32 * len(values)
    else:
        bits, book = FORMATS[values].width if values in FORMATS else int(values[3:]), 0
    block = cast.get("block", "tensor")
    named = {"tensor": (rows, columns), "row": (1, columns), "column": (rows, 1)}
    height, width = named[block] if isinstance(block, str) else block
    blocks = math.ceil(rows / height) * math.ceil(columns / width)
    second = 32 if scale == "e4m3" else 0
    return rows * columns * bits + book + blocks * SCALE_BITS[scale] + second
    ### END SOLUTION


# %%
check(bits_of_cast)

# %% [markdown]
# ### Exercise 15.2 · `bits_of_recipe` · 30 min · medium · 3 points
#
# | | |
# |---|---|
# | in | `recipe`: a valid recipe; `shapes`: {role: {layer: (rows, columns)}}; `steps` |
# | out | {role: bits}, for the roles of `shapes`: all matrices, all steps |
# | mind | a role that is left out is float32, of 32 bits; "to" is the first step that the override no longer holds for; left out, it holds to the end |
#
# By hand: `shapes` has the role "wire" with one matrix "head" of 10 numbers, and there are 5 steps. The recipe says `"wire": {"values": "BF16"}`, and an override from 1 to 3 says E4M3. Steps 1 and 2 take 80 bits each, steps 0, 3 and 4 take 160: 640.
#
# <details><summary>A nudge</summary>Which of the overrides would you look at first, if the last one that applies holds?</details>
# <details><summary>An approach</summary>A function <code>cast_at(role, layer, step)</code>, and a sum over everything.</details>


# %%
@fill
def bits_of_recipe(recipe, shapes, steps):
    ### BEGIN SOLUTION
    def cast_at(role, layer, step):
        cast = recipe.get(role, {"values": "FP32"})
        for each in recipe.get("overrides", []):  # the last one that applies holds
            here = each["role"] == role and each.get("layer", layer) == layer
            if here and each.get("from", 0) <= step < each.get("to", steps):
                cast = each["cast"]
        return cast

    def bits_of_role(role, matrices):
        places = [(layer, shape, step) for layer, shape in matrices.items() for step in range(steps)]
        return sum(bits_of_cast(cast_at(role, layer, step), *shape) for layer, shape, step in places)

    return {role: bits_of_role(role, matrices) for role, matrices in shapes.items()}
    ### END SOLUTION


# %%
check(bits_of_recipe)

# %% [markdown]
# **Predict first:** a role costs in proportion to its numbers. Which two roles have the most of them, and which share of all bits are the optimizer's three roles?

# %%
everything = bits_of_recipe({"name": "float32"}, shapes, 1)
for role, bits in everything.items():
    share = bits / sum(everything.values())
    print(f"{role:12} {share:6.1%}  {'#' * round(60 * share)}")

# %% [markdown]
# Activations and gradients are two thirds here: a step has 512 tokens, more than any weight has rows. The five roles that have a weight's shape weigh 6 % each, the optimizer's three 19 %. Eight bits fewer in the gradients save more than the whole second moment has.
#
# ---
# ## Casting
#
# ### Exercise 15.3 · `emulate_cast` · 60 min · hard · 5 points
#
# What a cast does to a matrix, to the last bit. All of it is float32.
#
# | | |
# |---|---|
# | in | `x`: float32, (rows, columns), finite; `cast`: a valid cast; `noise`: float32 in [0, 1), of x's shape |
# | out | float32, x's shape |
# | scale | amax of the block · clip / top, multiplied first; *top* is the largest magnitude of the values. Then as it is stored: |
# | | "bfloat16": to nearest, ties to even. "e8m0": the smallest power of two, from 2^-127 on, that is not below it; 0 stays |
# | | "e4m3": second = the largest scale / 448; each scale becomes E4M3(scale / second) · second; all 0 if second is |
# | z | x / scale, clamped to the lowest and highest value. Where the scale is 0, the result is 0 |
# | nearest | ties to even; in a codebook to the lower number |
# | stochastic | low: the value at or below z, high: the next one. high where noise < (z - low) / (high - low), else low. A value stays |
# | last | times the scale |
#
# By hand, a row of 6, 1, -0.4 as int4 (top 7), with a scale for the row:
#
# | scale | stored | z | nearest | stochastic, noise 0.3 | back, nearest |
# |---|---|---|---|---|---|
# | float32 | 6 / 7 = 0.857 | 7, 1.167, -0.467 | 7, 1, 0 | 7, 1, 0 | 6, 0.857, 0 |
# | e8m0 | 1 | 6, 1, -0.4 | 6, 1, 0 | 6, 1, 0 | 6, 1, 0 |
#
# (For -0.467: low is -1 and high is 0. 0.533 of the way is behind it, and 0.3 is below that: 0.)
#
# What you may call: all answers of earlier chapters (`absmax`, `round_to` with its modes "up" and "down"), and `spread(scale, granularity, shape)`, which gives each number the scale of its block.
#
# <details><summary>A nudge</summary>With "up" and "down" you have both neighbours of z in a format. What is the same for whole numbers, and for a codebook?</details>
# <details><summary>An approach</summary>A small function <code>rounded(z, mode)</code> for three modes and three kinds of values; then everything else is written once. <code>torch.bucketize</code> finds places in a codebook; half-way between two numbers is worked out in float64.</details>


# %%
@fill
def emulate_cast(x, cast, noise):
    ### BEGIN SOLUTION
    values, how = cast["values"], cast.get("scale", "none")
    if isinstance(values, list):
        book = torch.tensor(values)
        lowest, highest = book[0], book[-1]
    elif values in FORMATS:
        highest = round_to(torch.tensor(math.inf), FORMATS[values])  # saturated
        lowest = -highest
    else:
        highest = torch.tensor(2.0 ** (int(values[3:]) - 1) - 1)
        lowest = -highest

    def stored(scale):
        if how == "bfloat16":
            return scale.bfloat16().float()
        if how == "e8m0":
            return torch.where(scale > 0, round_to(scale, E8M0, "up"), 0.0)
        if how == "e4m3":
            second = scale.max() / 448
            return round_to(scale / second, E4M3) * second if second > 0 else torch.zeros_like(scale)
        return scale

    def rounded(z, mode):
        if isinstance(values, str):
            if values in FORMATS:
                return round_to(z, FORMATS[values], mode)
            return {"nearest_even": torch.round, "down": torch.floor, "up": torch.ceil}[mode](z)
        if mode == "nearest_even":
            halfway = (book[1:].double() + book[:-1].double()) / 2
            return book[torch.bucketize(z.double(), halfway)]
        return book[torch.bucketize(z, book) if mode == "up" else torch.bucketize(z, book, right=True) - 1]

    scale = torch.ones(1, 1)
    if how != "none":
        block = cast.get("block", "tensor")
        block = tuple(block) if isinstance(block, list) else block
        top = torch.maximum(lowest.abs(), highest.abs())
        scale = spread(stored(absmax(x, block) * cast.get("clip", 1.0) / top), block, x.shape)
    z = torch.where(scale > 0, x / scale, 0.0).clamp(lowest, highest)
    if cast.get("rounding", "nearest") == "nearest":
        return rounded(z, "nearest_even") * scale
    low, high = rounded(z, "down"), rounded(z, "up")
    return torch.where(noise < (z - low) / (high - low), high, low) * scale  # 0 / 0 is NaN, and low == high then
    ### END SOLUTION


# %%
check(emulate_cast)

# %% [markdown]
# **Predict first:** 4 bits and a scale. Which keeps normal numbers best: int4, E2M1, E2M1 with smaller blocks, or with finer scales? And what does a stochastic rounding cost, compared with the same to nearest?

# %%
x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
noise = torch.rand(256, 256, generator=torch.Generator().manual_seed(4))
CANDIDATES = {
    "int4, e8m0, 32": {"values": "int4", "scale": "e8m0", "block": [1, 32]},
    "E2M1, e8m0, 32 (MXFP4, nearly)": {"values": "E2M1", "scale": "e8m0", "block": [1, 32]},
    "the same, blocks of 16": {"values": "E2M1", "scale": "e8m0", "block": [1, 16]},
    "E2M1, e4m3, 16 (NVFP4)": {"values": "E2M1", "scale": "e4m3", "block": [1, 16]},
    "the same, stochastic": {"values": "E2M1", "scale": "e4m3", "block": [1, 16], "rounding": "stochastic"},
    "E4M3, e8m0, 32 (MXFP8, nearly)": {"values": "E4M3", "scale": "e8m0", "block": [1, 32]},
}
for name, cast in CANDIDATES.items():
    each = bits_of_cast(cast, *x.shape) / x.numel()
    print(f"{name:32} {each:6.3f} bits a number   {sqnr_db(x, emulate_cast(x, cast, noise)):6.2f} dB")

# %% [markdown]
# (Nearly, as the MX standard rounds its scales down, and lets the largest numbers saturate. Here they are rounded up.) Smaller blocks alone bring little: most of NVFP4's gain is in its scales, which are no powers of two. Stochastic rounding costs 3 dB here. What it gives in return is not visible in a single matrix: its mean is right.
#
# ---
# ## The front
#
# ### Exercise 15.4 · `pareto_front` · 20 min · easy · 2 points
#
# Fewer bits or less loss? A recipe that is worse in both than another is of no use to anybody. What is left is the **front**.
#
# | | |
# |---|---|
# | in | `points`: float64, (N, 2): share of the bits, and loss, finite or NaN; N may be 0 |
# | out | int64: the numbers of the points that none dominates, by ascending bits; equal points in their order |
# | dominates | nowhere worse, and somewhere better |
# | mind | equal points do not dominate each other. A point with a NaN (it diverged) is not on the front, and dominates nobody |
#
# By hand:
#
# | number | bits | loss | |
# |---|---|---|---|
# | 0 | 0.5 | 0.6 | beaten by 2: the same loss with fewer bits |
# | 1 | 1.0 | 0.5 | on the front |
# | 2 | 0.4 | 0.6 | on the front |
# | 3 | 0.2 | NaN | diverged |
#
# The answer is 2, 1.
#
# <details><summary>A nudge</summary>What does a comparison with NaN give?</details>
# <details><summary>An approach</summary>Compare all pairs at once: <code>points[:, None] &lt;= points[None]</code>, and <code>all</code> or <code>any</code> over the last dimension.</details>


# %%
@fill
def pareto_front(points):
    ### BEGIN SOLUTION
    no_worse = (points[:, None] <= points[None]).all(-1)  # [i, j]: i is nowhere worse than j; never with a NaN
    better = (points[:, None] < points[None]).any(-1)
    front = ~(no_worse & better).any(0) & ~points.isnan().any(1)
    kept = front.nonzero().flatten()
    return kept[points[kept, 0].argsort(stable=True)]
    ### END SOLUTION


# %%
check(pareto_front)

# %% [markdown]
# The evaluation trains the GPT with a recipe and counts its bits. It is the same for everybody, is deterministic to the last bit (on one machine), and runs nothing of yours but the recipe's data. Here are six recipes that others use, and one that goes further: first three of 16 bits and more.

# %%
results = compare(REFERENCES[:3])

# %% [markdown]
# **Predict first:** four with fewer: FP8 with a scale for each tensor in the products, MXFP8 nearly everywhere, and then the products in 4 bits and in 3. Where does the loss begin to suffer?

# %%
results += compare(REFERENCES[3:])


# %%
def points_of(results):
    return torch.tensor([[each.share, each.loss] for each in results], dtype=torch.float64)


def picture_of(results, mine=None):
    """Share of the bits and loss of each recipe, with the front through them."""
    shown = [*results, mine] if mine is not None else results
    points = points_of(shown)
    front = pareto_front(points)
    with plots.style():
        picture, axes = plots.figure(9, 4.2)
        axes.step(*points[front].T, where="post", color=plots.color_of(FP32), linewidth=1)
        axes.axhline(TARGET_LOSS, color=plots.color_of(E2M1), linewidth=1, linestyle="--")
        axes.text(
            1.0, TARGET_LOSS, f"the loss to reach, {TARGET_LOSS}", ha="right", va="bottom", color=plots.color_of(E2M1)
        )
        for at, each in enumerate(shown):
            if math.isfinite(each.loss):
                own = each is mine
                above = own or at not in front or each.loss > TARGET_LOSS  # where nothing is in the way
                color = plots.color_of(E4M3) if own else plots.color_of(BF16)
                axes.plot(each.share, each.loss, "*" if own else "o", markersize=14 if own else 6, color=color)
                axes.annotate(
                    each.name,
                    (each.share, each.loss),
                    (6, 5 if above else -13),
                    textcoords="offset points",
                    color=color,
                    fontsize=8,
                )
        axes.set_xlabel("share of float32's bits")
        axes.set_ylabel("loss on other text")
        axes.set_xlim(0, 1.15)
        axes.margins(y=0.12)
        axes.set_title("Bits against loss, and the front")
    return picture


print("on the front:", ", ".join(results[each].name for each in pareto_front(points_of(results))))
picture_of(results)

# %% [markdown]
# From float32 down to MXFP8, at 27 % of the bits, the front is level: what it loses there is less than chance. (Chance is about 0.03: other first weights, or another machine, move each point by so much. Which of the points on the right are on the front is luck.) Then it rises: below the knee every bit costs. FP8 with one scale for each tensor is beaten, by blocks with fewer bits. Left of the knee, and below the two points that are there, is room for you.
#
# ### What fails, and why
#
# The recipe with 4 bits in products rounds gradients at random. **Predict first:** how much does it lose if they are rounded to nearest, as weights and activations are? And MXFP8, if its second moment is kept in 8-bit whole numbers, and nothing else changes?

# %%
*_, mxfp8, in_4_bits, _ = REFERENCES
nearest = {**in_4_bits["gradients"], "rounding": "nearest"}
CHANGES = (
    {**in_4_bits, "name": "4 bits, all to nearest", "gradients": nearest},
    {**mxfp8, "name": "second moment in int8", "moment2": {"values": "int8", "scale": "float32", "block": "row"}},
)
changed = compare(CHANGES)

# %% [markdown]
# E2M1 rounds to 0 what is below a twenty-fourth of its block's largest number. To nearest such gradients are 0 at every step: not noise, but a direction that is never taken. At random each of them is 0 most of the time and a whole step now and then, and the mean over the steps is right. Adam averages anyway.
#
# The other one is worth a closer look.
#
# ---
# ## Break it
#
# **"8-bit Adam: the loss explodes in the first steps."** Whole numbers from -127 to 127 are fine for the first moment. The second moment is a mean of *squares*, and Adam divides by its root. **15.A** In a row with a scale of its own, one second moment is 400 times smaller than the largest. What does int8 make of it?

# %%
question(
    "15.A",
    ### BEGIN SOLUTION
    0.0,
    ### END SOLUTION
)

# %% [markdown]
# And that weight's step is the learning rate (0.004 at most) times its first moment, divided by 1e-8. (Gradients that differ by a factor of 20 have squares that differ by 400.) Floats have room below. **15.B** E5M2 goes from 2^-16 to 1.75 · 2^15. By which power of two is its largest number more than its smallest, rounded down to a whole number? (The exponent is asked for: 10, say, and not 1024.)

# %%
question(
    "15.B",
    ### BEGIN SOLUTION
    31,
    ### END SOLUTION
)

# %% [markdown]
# Two more of the kind. **15.C** A gradient is 0.1 of a step of its block's grid. It is rounded at random in 1,000 training steps. How often do you expect it to be one whole step?

# %%
question(
    "15.C",
    ### BEGIN SOLUTION
    100,
    ### END SOLUTION
)

# %% [markdown]
# **15.D** A master weight of 0.5 is kept in BF16 (the next numbers are 0.50390625 and 0.498046875), rounded to nearest. An update adds 0.0005. What is the weight afterwards?

# %%
question(
    "15.D",
    ### BEGIN SOLUTION
    0.5,
    ### END SOLUTION
)

# %% [markdown]
# That is why the recipes above round master weights at random.
#
# ---
# ## Values of one's own
#
# ### Exercise 15.5 · `fit_codebook` · 50 min · hard · 4 points
#
# Sixteen codes need not be E2M1's. For given samples there is a best set of numbers, and in one dimension it can be found exactly.
#
# | | |
# |---|---|
# | in | `samples`: float32, one dimension, finite; `size`: from 1 to 256, not more than there are different samples |
# | out | float32, (size,), ascending |
# | best | no other `size` numbers have a smaller sum of (sample - nearest number)² |
# | mind | the *best*: moving numbers about until nothing changes finds a local optimum, and often a bad one |
#
# By hand: 0, 1, 2, 9, 10 and two numbers. Sorted samples are cut in two pieces, and each piece is represented by its mean. Cut after 2: means 1 and 9.5, errors 1 + 0 + 1 and 0.25 + 0.25, 2.5 in all. Cut after 1: 0.5 + 38. So (1, 9.5).
#
# <details><summary>A nudge</summary>Suppose you knew the least error of the first j samples in k pieces, for each j. How do you get those for k + 1 pieces?</details>
# <details><summary>An approach</summary>Dynamic programming over the sorted samples: best[k + 1][j] is the least of best[k][i] + error(i, j) over i, where error(i, j) is that of one number for samples i to j - 1. Running sums of x and x² give all errors at once. (Subtract the mean first: squares of large numbers cancel badly.) Remember the i, and walk back.</details>


# %%
@fill
def fit_codebook(samples, size):
    ### BEGIN SOLUTION
    x = samples.double().sort().values
    x, middle = x - x.mean(), x.mean()
    n = len(x)
    sums = torch.cat([x.new_zeros(1), x.cumsum(0)])
    squares = torch.cat([x.new_zeros(1), (x * x).cumsum(0)])
    i, j = torch.arange(n + 1)[:, None], torch.arange(n + 1)[None, :]
    count = (j - i).clamp(min=1)
    # error[i, j]: of one number for the samples from i to before j
    error = squares[j] - squares[i] - (sums[j] - sums[i]) ** 2 / count
    error = torch.where(j > i, error.clamp(min=0), math.inf)
    best, starts = error[0], []
    for _ in range(size - 1):  # one piece more: the last one begins at the best i
        best, start = (best[:, None] + error).min(0)
        starts.append(start)
    cuts = [n]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1]]))
    cuts = [0, *reversed(cuts)]
    means = [(sums[b] - sums[a]) / (b - a) + middle for a, b in zip(cuts, cuts[1:], strict=False)]
    return torch.stack(means).float()
    ### END SOLUTION


# %%
check(fit_codebook)

# %% [markdown]
# **Predict first:** normal numbers in blocks of 16, each divided by its largest magnitude. Where are sixteen values best put: evenly, as int4 has them, more densely around 0, as E2M1, or otherwise? And is it worth the codebook's own bits?

# %%
blocks = torch.randn(64, 16, generator=torch.Generator().manual_seed(5))
samples = (blocks / blocks.abs().amax(1, keepdim=True)).flatten()
book = fit_codebook(samples, 16)
x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
noise = torch.zeros_like(x)  # nothing is rounded at random here
print("fitted:", " ".join(f"{each:.2f}" for each in book.tolist()))
for name, values in (("int4", "int4"), ("E2M1", "E2M1"), ("fitted", [round(each, 4) for each in book.tolist()])):
    cast = {"values": values, "scale": "e4m3", "block": [1, 16]}
    each = bits_of_cast(cast, *x.shape) / x.numel()
    print(f"{name:8} {each:6.3f} bits a number   {sqnr_db(x, emulate_cast(x, cast, noise)):6.2f} dB")

# %% [markdown]
# Evenly would nearly do: in a block of 16 the largest number is not far out, and what is left is spread widely. So int4 beats E2M1 here, and lost above, with 32 numbers in a block and scales that are powers of two. The fitted values win against both, on other numbers than they were fitted to. Their 512 bits hardly count in a matrix of 65,536 numbers. In the smallest of this model, 2,048, they are a quarter of a bit for each.
#
# ---
# ## The recipe
#
# ### Exercise 15.6 · `design_recipe` · 240 min · open · 10 points
#
# Now yours.
#
# | | |
# |---|---|
# | in | `shapes`: as `layout()` gives them; `steps`: `STEPS` |
# | out | a recipe, as data; the same each time |
# | 1 point | it is a valid recipe |
# | 3 points | the evaluation trains to a loss of at most `TARGET_LOSS` (0.6) |
# | 2 points | and with at most half of float32's bits: BF16 everywhere |
# | 2 points | and with at most a quarter: below MXFP8 everywhere |
# | 2 points | and with at most 0.16: below 4 bits in products, whose loss is too high besides |
#
# Whatever you compute in it (codebooks, schedules) is computed when the function is called. Only the dict is judged, by the same evaluation as above, and nothing that it says of itself counts. A refusal says what is not allowed. Leave a margin below `TARGET_LOSS`: on another machine the loss may differ by 0.04. To see how large chance is, change something that should not matter (a clip of 0.999) and train again. An evaluation takes 3 to 15 seconds; it is Adam (0.9, 0.99) with a learning rate that rises to 0.004 in 20 steps and falls to 0 in a line.
#
# `compare([design_recipe(layout(), STEPS)])` trains with yours and shows how far it is; `evaluate(recipe).history` has the loss of each step. A "try it" under a verdict shows your recipe as text; these two show what it does.
#
# <details><summary>A nudge</summary>Which role has the most numbers? What is the cheapest cast with which <i>that role alone</i> still trains? Change one role at a time.</details>
# <details><summary>Another one</summary>Steps are not equal: at the end, when the learning rate is small, noise hurts most. Layers are not equal either.</details>
# <details><summary>An approach</summary>Begin with MXFP8, <code>REFERENCES[4]</code>. Give each role 4 bits in turn, to nearest and at random, and note bits and loss in a table. Put the good changes together, one after the other: they do not simply add up.</details>


# %%
@fill
def design_recipe(shapes, steps):
    ### BEGIN SOLUTION
    def four(values="int4", rounding="nearest"):
        return {"values": values, "scale": "e4m3", "block": [1, 16], "rounding": rounding}

    def row(values):
        return {"values": values, "scale": "bfloat16", "block": "row", "rounding": "stochastic"}

    return {
        "name": "four bits where noise may be",
        "weights": four(),
        "activations": four(),
        "gradients": four("E2M1", "stochastic"),
        "wire": four("int4", "stochastic"),
        "moment1": four("int4", "stochastic"),
        "moment2": row([2.0**power for power in range(-15, 1)]),  # 16 powers of two: no zero, and a large range
        "master": row("int8"),
    }
    ### END SOLUTION


# %%
check(design_recipe)

# %%
[mine] = compare([design_recipe(layout(), STEPS)])
for role, bits in mine.bits.items():
    share = bits / (STEPS * everything[role])
    print(f"{role:12} {32 * share:6.2f} bits a number  {'#' * round(32 * share)}")
picture_of(results, mine)

# %% [markdown]
# ---
# ## A page of reasoning · 10 points
#
# A number without a reason is luck. Write a page, for somebody who knows this course and has not seen your recipe. A person reads and marks it; in a class it is your instructor. Edit the cell below: pictures may be pasted into it.
#
# | points | what is asked |
# |---|---|
# | 3 | **The choice.** For each role: the cast, and why this one. Name the property that decides (range, bias of rounding, how long an error stays), not the format's reputation |
# | 3 | **The evidence.** At least three experiments of yours in which one thing was changed, with bits and loss. At least one that failed, and why it did |
# | 2 | **The limits.** How large is chance, and how do you know? Which of your gains is smaller than that? |
# | 2 | **The transfer.** What of it would you expect to hold for a model of 8 billion weights on real hardware, and what not? Which of the bits would that hardware not save at all? |

# %% [markdown] tags=["marked-by-hand", "reasoning", "10"]
# ### BEGIN SOLUTION
# **The choice.** Gradients of outputs have the most numbers, and an error in them is forgotten after some steps of Adam's mean. So 4 bits are enough as long as the mean is right: stochastic rounding, blocks of 16, because a gradient's sizes differ from token to token, and E2M1, because they differ within a block, too. Weights and activations stand 4 bits to nearest; in blocks of 16 with fine scales they are spread evenly enough for int4. The wire and the first moment are means of gradients: the same reasons, and whole numbers, as a mean is nearer to normal. The second moment must not become 0, since Adam divides by its root, and it is always above 0: 16 powers of two have a range of 32,768 and no zero, and its root is off by at most a factor of 1.4 at random. Master weights in 8 bits at random: an update is far below one step, and to nearest it would be lost.
#
# **The evidence.** MXFP8 everywhere: 27.3 % of the bits, loss 0.51. All three products in 4 bits, 18.6 %, does not reach the target with E2M1 (0.62); with gradients to nearest it is at 1.2, since small ones are always 0. With int4 for weights and activations and 4 bits in the wire and both moments: 16.3 % and 0.57 with BF16 master weights, 14.8 % and 0.53 with 8 bits at random. A second moment in int8 diverged at step 1.
#
# **The limits.** Float32 from three first weights ends between 0.51 and 0.57. A clip of 0.999 on my weights, which should not matter, gave 0.56 in place of 0.53. So 8 bits in the master weights are no gain over 16: all that I can say is that they cost less than 0.04.
#
# **The transfer.** That gradients need an unbiased rounding holds at any size. Whether activations of a large model stand 4 bits does not follow: they have outliers that these have not. Hardware has no products of codebooks, and multiplies int4 with int4 on few machines. Master weights and moments are a larger share where a batch has fewer tokens for each weight.
# ### END SOLUTION

# %% [markdown]
# ---
# ## What you built
#
# The rules of a competition, to the last bit; a recipe that nobody else has; and a reason for it. Four points to take along:
#
# - Count everything that is stored or moved. A scale for each pair of numbers is not 4 bits.
# - An error that is the same at every step is a bias. One that is different at every step is noise, and an optimizer averages it.
# - Roles differ more than formats do: whether an error stays (master weights), is divided by (the second moment), or is gone after the step (gradients).
# - One run is one point, with an error of its own. Before you believe in a gain, know how large chance is.

# %%
progress()
