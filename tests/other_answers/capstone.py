"""Other right answers to the exercises of chapter 15."""

import math

import numpy as np
import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.bits import decode
from lowprec_lab.capstone import FORMATS, SCALE_BITS, bits_of_cast
from lowprec_lab.formats import BF16, E4M3
from lowprec_lab.rounding import round_to

# --- 15.1 bits_of_cast ---


@other("bits_of_cast")
def number_by_number(cast, rows, columns):
    values = cast["values"]
    total = 0
    if type(values) is list:
        each = len(bin(len(values) - 1)) - 2
        total += 32 * len(values)
    elif values.startswith("int"):
        each = int(values[-1])
    else:
        each = FORMATS[values].width
    total += each * rows * columns
    if "scale" in cast and cast["scale"] != "none":
        sides = {"tensor": [rows, columns], "row": [1, columns], "column": [rows, 1]}
        block = cast.get("block", "tensor")
        a, b = sides.get(block) if type(block) is str else block
        total += SCALE_BITS[cast["scale"]] * ((rows + a - 1) // a) * ((columns + b - 1) // b)
        if cast["scale"] == "e4m3":
            total += 32
    return total


@other("bits_of_cast")
def in_three_terms(cast, rows, columns):
    values, how = cast["values"], cast.get("scale", "none")
    codebook = values if isinstance(values, list) else []
    if codebook:
        width = (len(codebook) - 1).bit_length()
    else:
        width = {f"int{n}": n for n in range(2, 9)}.get(values) or FORMATS[values].width
    block = cast.get("block", "tensor")
    down = {"tensor": 1, "row": rows, "column": 1}.get(block) if isinstance(block, str) else -(-rows // block[0])
    across = (
        {"tensor": 1, "row": 1, "column": columns}.get(block) if isinstance(block, str) else -(-columns // block[1])
    )
    return width * rows * columns + 32 * len(codebook) + down * across * SCALE_BITS[how] + 32 * (how == "e4m3")


# --- 15.2 bits_of_recipe ---


@other("bits_of_recipe")
def a_table_of_steps(recipe, shapes, steps):
    total = {}
    for role in shapes:
        total[role] = 0
        for layer, (rows, columns) in shapes[role].items():
            cost = [bits_of_cast(recipe.get(role, {"values": "FP32"}), rows, columns)] * steps
            for override in recipe.get("overrides", ()):
                if override["role"] != role or override.get("layer") not in (None, layer):
                    continue
                for step in range(override.get("from", 0), min(override.get("to", steps), steps)):
                    cost[step] = bits_of_cast(override["cast"], rows, columns)
            total[role] += sum(cost)
    return total


@other("bits_of_recipe")
def from_the_last_override_on(recipe, shapes, steps):
    def cast_of(role, layer, step):
        for override in reversed(recipe.get("overrides", [])):
            if "layer" in override and override["layer"] != layer:
                continue
            if override["role"] == role and step in range(override.get("from", 0), override.get("to", steps)):
                return override["cast"]
        return recipe.get(role, {"values": "FP32"})

    total = dict.fromkeys(shapes, 0)
    for role in shapes:
        for layer in shapes[role]:
            for step in range(steps):
                total[role] += bits_of_cast(cast_of(role, layer, step), *shapes[role][layer])
    return total


# --- 15.3 emulate_cast ---


@other("emulate_cast")
def with_a_list_of_all_values(x, cast, noise):
    """Everything of at most 8 bits is a codebook."""
    import itertools

    values, how = cast["values"], cast.get("scale", "none")
    wide = None
    if isinstance(values, list):
        book = torch.tensor(values, dtype=torch.float32)
    elif values.startswith("int"):
        top = 2 ** (int(values[3]) - 1) - 1
        book = torch.arange(-top, top + 1, dtype=torch.float32)
    elif FORMATS[values].width <= 8:
        fmt = FORMATS[values]
        book = decode(torch.arange(2**fmt.width, dtype=torch.int32), fmt).float()
        book = book[book.isfinite()].unique()
    else:
        wide = FORMATS[values]
        top = round_to(torch.tensor([math.inf]), wide)
        book = torch.cat([-top, top])
    rows, columns = x.shape
    scale = torch.ones_like(x)
    if how != "none":
        block = cast.get("block", "tensor")
        named = {"tensor": (rows, columns), "row": (1, columns), "column": (rows, 1)}
        height, width = named[block] if isinstance(block, str) else block
        for i, j in itertools.product(range(0, rows, height), range(0, columns, width)):
            part = x[i : i + height, j : j + width]
            scale[i : i + height, j : j + width] = part.abs().max() * cast.get("clip", 1.0) / book.abs().max()
        if how == "bfloat16":
            scale = round_to(scale, BF16)
        elif how == "e8m0":
            mantissa, exponent = torch.frexp(scale.double())
            exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=-127)
            scale = torch.where(scale > 0, torch.ldexp(torch.ones_like(mantissa), exponent).float(), scale)
        elif how == "e4m3":
            second = scale.max() / 448
            scale = (scale / second).to(torch.float8_e4m3fn).float() * second if second else scale * 0
    z = (x / scale).nan_to_num(0.0, 0.0, 0.0) if (scale == 0).any() else x / scale
    z = torch.minimum(torch.maximum(z, book[0]), book[-1])
    stochastic = cast.get("rounding") == "stochastic"
    if wide is not None:
        low, high = round_to(z, wide, "down"), round_to(z, wide, "up")
        near = round_to(z, wide)
    else:
        at = torch.searchsorted(book, z)
        high, low = book[at], torch.where(book[at] == z, z, book[(at - 1).clamp(min=0)])
        up = z.double() > (low.double() + high.double()) / 2
        near = torch.where(up, high, low)
        if isinstance(values, str):  # ties to even
            ties = z.double() == (low.double() + high.double()) / 2
            even = z.round() if values.startswith("int") else round_to(z, FORMATS[values])
            near = torch.where(ties, even, near)
    chance = (z - low) / (high - low)
    result = torch.where((high > low) & (noise < chance), high, low) if stochastic else near
    return result * scale


@other("emulate_cast")
def block_after_block(x, cast, noise):
    from itertools import product

    import numpy as np

    values, how, clip = cast["values"], cast.get("scale", "none"), cast.get("clip", 1.0)
    rows, columns = x.shape
    block = {"tensor": [rows, columns], "row": [1, columns], "column": [rows, 1]}.get(
        cast["block"] if isinstance(cast.get("block"), str) else "tensor"
    )
    block = cast["block"] if isinstance(cast.get("block"), list) else block
    if isinstance(values, list):
        low_end, high_end = min(values), max(values)
    elif values in FORMATS:
        high_end = float(round_to(torch.tensor(3e38), FORMATS[values])) if values not in ("FP32", "BF16", "TF32") else 0
        high_end = high_end or float(round_to(torch.tensor(float("inf")), FORMATS[values]))
        low_end = -high_end
    else:
        high_end = 2 ** (int(values[3:]) - 1) - 1
        low_end = -high_end

    def nearest(z):
        if isinstance(values, list):
            return min(values, key=lambda value: (abs(value - z), value))
        return float(round_to(torch.tensor(z), FORMATS[values])) if values in FORMATS else float(np.rint(z))

    def around(z):
        if isinstance(values, list):
            below = max(value for value in values if value <= z)
            return below, min(value for value in values if value >= z)
        if values in FORMATS:
            one = torch.tensor(z)
            return float(round_to(one, FORMATS[values], "down")), float(round_to(one, FORMATS[values], "up"))
        return float(np.floor(z)), float(np.ceil(z))

    result, scales = torch.zeros_like(x), {}
    corners = list(product(range(0, rows, block[0]), range(0, columns, block[1])))
    for i, j in corners:
        amax = np.float32(x[i : i + block[0], j : j + block[1]].abs().max().item())
        scales[i, j] = torch.tensor(amax * np.float32(clip) / np.float32(max(abs(low_end), abs(high_end))))
    second = max(scales.values()) / 448
    for i, j in corners:
        scale = torch.ones(()) if how == "none" else scales[i, j]
        if how == "bfloat16":
            scale = scale.to(torch.bfloat16).to(torch.float32)
        if how == "e8m0" and scale > 0:
            power = -127
            while 2.0**power < float(scale):
                power += 1
            scale = torch.tensor(2.0**power)
        if how == "e4m3":
            scale = round_to(scale / second, E4M3) * second if second > 0 else second
        if scale == 0:
            continue
        for r, c in product(range(i, min(i + block[0], rows)), range(j, min(j + block[1], columns))):
            z = min(max(float(x[r, c] / scale), low_end), high_end)
            value = nearest(z)
            if cast.get("rounding") == "stochastic":
                low, high = around(z)
                way = (np.float32(z) - np.float32(low)) / np.float32(np.float32(high) - np.float32(low) or 1)
                value = high if float(noise[r, c]) < way else low
            result[r, c] = torch.tensor(value, dtype=torch.float32) * scale
    return result


# --- 15.4 pareto_front ---


@other("pareto_front")
def sweeps_by_bits(points):
    rows = [(bits, loss, at) for at, (bits, loss) in enumerate(points.tolist()) if bits == bits and loss == loss]
    kept, best = [], (math.inf, math.inf)
    for bits, loss, at in sorted(rows):
        if loss < best[1] or (bits, loss) == best:
            kept.append(at)
            best = (bits, loss)
    return torch.tensor(kept, dtype=torch.int64)


@other("pareto_front")
def by_numpy(points):
    x = points.numpy()
    beaten = np.isnan(x).any(1)
    for at in range(len(x)):
        beaten[at] |= bool(((x <= x[at]).all(1) & (x != x[at]).any(1)).any())
    left = np.flatnonzero(~beaten)
    return torch.from_numpy(left[np.argsort(x[left, 0], kind="stable")])


# --- 15.5 fit_codebook ---


@other("fit_codebook")
def recursion_by_hand(samples, size):
    """The classical table, one entry after the other."""
    x = sorted(samples.tolist())
    n, shift = len(x), sum(x) / len(x)
    sums, squares = [0.0], [0.0]
    for each in x:
        sums.append(sums[-1] + each - shift)
        squares.append(squares[-1] + (each - shift) ** 2)

    def spread(i, j):  # of x[i:j] about its mean
        return max(squares[j] - squares[i] - (sums[j] - sums[i]) ** 2 / (j - i), 0.0)

    best = [[0.0] + [math.inf] * n]
    came = []
    for k in range(1, size + 1):
        row, back = [math.inf] * (n + 1), [0] * (n + 1)
        for j in range(k, n + 1):
            row[j], back[j] = min((best[-1][i] + spread(i, j), i) for i in range(k - 1, j))
        best.append(row)
        came.append(back)
    means, j = [], n
    for back in reversed(came):
        i = back[j]
        means.append(math.fsum(x[i:j]) / (j - i))
        j = i
    return torch.tensor(means[::-1], dtype=torch.float32)


@other("fit_codebook")
def with_weights_of_what_is_equal(samples, size):
    """Equal samples count as one that weighs more."""
    values, weights = np.unique(samples.double().numpy(), return_counts=True)
    n = len(values)
    cost = np.full((n, n), np.inf)
    means = np.zeros((n, n))
    for i in range(n):
        w = np.cumsum(weights[i:])
        m = np.cumsum(weights[i:] * (values[i:] - values[i])) / w
        s = np.cumsum(weights[i:] * (values[i:] - values[i]) ** 2) - w * m**2
        cost[i, i:], means[i, i:] = np.maximum(s, 0), m + values[i]
    table = cost[0].copy()
    ways = [[(0, j)] for j in range(n)]
    for _ in range(size - 1):
        new, paths = np.full(n, np.inf), [None] * n
        for j in range(1, n):
            i = int(np.argmin(table[:j] + cost[1 : j + 1, j]))
            new[j] = table[i] + cost[i + 1, j]
            if ways[i] is not None and np.isfinite(new[j]):
                paths[j] = [*ways[i], (i + 1, j)]
        table, ways = new, paths
    return torch.tensor([means[i, j] for i, j in ways[-1]], dtype=torch.float32)


# --- 15.6 design_recipe ---


@other("design_recipe")
def less_on_the_wire(shapes, steps):
    def cast(values, scale="e4m3", block=(1, 32), rounding="stochastic"):
        return {"values": values, "scale": scale, "block": list(block), "rounding": rounding}

    return {
        "name": "two bits on the wire",
        "weights": cast("int4", rounding="nearest"),
        "activations": cast("int4", rounding="nearest"),
        "gradients": cast("E2M1"),
        "wire": cast("int2"),
        "moment1": cast("int3"),
        "moment2": {**cast([4.0**-power for power in range(7, -1, -1)], "bfloat16"), "block": "row"},
        "master": {**cast("int8", "bfloat16"), "block": "row"},
        "overrides": [{"role": "gradients", "layer": "head", "cast": cast("int8")}],
    }


@other("design_recipe")
def eight_bits_at_the_end(shapes, steps):
    recipe = {"name": "four bits, and eight in the last steps", "overrides": []}
    for role in ("weights", "activations", "gradients", "wire", "moment1"):
        late = role in ("gradients", "wire", "moment1")
        values, rounding = (
            ("E2M1", "stochastic") if role == "gradients" else ("int4", "stochastic" if late else "nearest")
        )
        recipe[role] = {"values": values, "scale": "e4m3", "block": [1, 16], "rounding": rounding}
    for role in ("weights", "activations"):
        eight = {"values": "E4M3", "scale": "e8m0", "block": [1, 32]}
        recipe["overrides"].append({"role": role, "from": steps * 9 // 10, "cast": eight})
    powers = [2.0**power for power in range(-15, 1)]
    for role, values in (("moment2", powers), ("master", "int8")):
        recipe[role] = {"values": values, "scale": "bfloat16", "block": "row", "rounding": "stochastic"}
    return recipe
