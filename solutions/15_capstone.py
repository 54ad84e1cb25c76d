# %% [markdown]
# # 15 · Capstone: how few bits train a GPT?

# %% tags=["setup"]
try:
    import math

    import torch

    from lowprec_lab import check, fill, progress
    from lowprec_lab.capstone import (
        FORMATS,
        SCALE_BITS,
        bits_by_role,
        bits_for,
        bits_of_cast,
        bits_of_recipe,
        design_recipe,
        emulate_cast,
        emulated,
        fit_codebook,
        layout,
        pareto_front,
        recipe_text,
    )
    from lowprec_lab.formats import E4M3, E8M0
    from lowprec_lab.quantizer import absmax, spread
    from lowprec_lab.rounding import round_to
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("") from None


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

    return {
        role: sum(bits_of_cast(cast_at(role, layer, step), *shape) for layer, shape in matrices.items() for step in range(steps))
        for role, matrices in shapes.items()
    }
    ### END SOLUTION


# %%
check(bits_of_recipe)


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
            halfway = (book[1:].double() + book[:-1].double()) / 2  # exact in float64
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


# %%
@fill
def design_recipe(shapes, steps):
    ### BEGIN SOLUTION
    def eight(values="E4M3"):
        return {"values": values, "scale": "e8m0", "block": [1, 32]}

    def four(rounding="nearest"):
        return {"values": "E2M1", "scale": "e4m3", "block": [1, 16], "rounding": rounding}

    return {
        "name": "four bits where noise may be",
        "weights": four(),
        "activations": eight(),
        "gradients": four("stochastic"),
        "wire": four("stochastic"),
        "moment1": eight(),
        "moment2": eight("E5M2"),
        "master": {"values": "BF16", "rounding": "stochastic"},
    }
    ### END SOLUTION


# %%
check(design_recipe)
