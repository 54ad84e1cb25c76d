"""What is right in chapter 15, from the rules as they are written down: numpy, float64 where that is exact, and loops.

The parameters beyond an exercise's own are what the known misconceptions do otherwise.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.capstone import FORMATS, ROLES, SCALE_BITS
from lowprec_lab.formats import Format

# --- 15.1, 15.2 -------------------------------------------------------------------------------------------------------


def code_bits(values: str | list) -> int:
    """The bits of one code."""
    if isinstance(values, list):
        return next(bits for bits in range(9) if 2**bits >= len(values))
    return FORMATS[values].width if values in FORMATS else int(values.removeprefix("int"))


def edges(block: str | list, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a block."""
    if isinstance(block, list):
        return block[0], block[1]
    return {"tensor": (rows, columns), "row": (1, columns), "column": (rows, 1)}[block]


def blocks_in(rows: int, columns: int, height: int, width: int) -> int:
    """How many blocks there are, by walking over their corners."""
    return len(range(0, rows, height)) * len(range(0, columns, width))


def bits_of_cast(
    cast: dict, rows: int, columns: int, code=code_bits, edge=edges, scale_bits=SCALE_BITS, second: int = 32,
    book: int = 32, count=blocks_in,
) -> int:  # fmt: skip
    """Codes and codebook, and scales for all blocks."""
    values, scale = cast["values"], cast.get("scale", "none")
    bits = rows * columns * code(values) + (book * len(values) if isinstance(values, list) else 0)
    if scale == "none":
        return bits
    blocks = count(rows, columns, *edge(cast.get("block", "tensor"), rows, columns))
    return bits + blocks * scale_bits[scale] + (second if scale == "e4m3" else 0)


def applies(override: dict, role: str, layer: str, step: int, steps: int) -> bool:
    """Whether an override holds for a matrix at a step."""
    first, end = override.get("from", 0), override.get("to", steps)
    return override["role"] == role and override.get("layer") in (None, "", layer) and first <= step < end


def bits_of_recipe(
    recipe: dict, shapes: dict, steps: int, holds=applies, which: int = -1, absent: object = "FP32", cost=bits_of_cast
) -> dict:
    """Step by step. which: of all the overrides that apply, the one that counts."""
    total = {}
    for role, matrices in shapes.items():
        total[role] = 0
        for layer, shape in matrices.items():
            for step in range(steps):
                found = [o["cast"] for o in recipe.get("overrides", []) if holds(o, role, layer, step, steps)]
                cast = found[which] if found else recipe.get(role, {"values": absent})
                total[role] += cost(cast, *shape) if cast["values"] else 0
    return total


# --- 15.3 -------------------------------------------------------------------------------------------------------------


def steps_of(fmt: Format, z: np.ndarray) -> np.ndarray:
    """The distance between the values of a format around each number."""
    exponent = np.frexp(z)[1] - 1
    return np.ldexp(1.0, np.maximum(exponent, 1 - fmt.bias) - fmt.mantissa_bits)


def largest(fmt: Format) -> float:
    """The largest finite value."""
    field = 2**fmt.exponent_bits - 1
    if fmt.specials == "ieee":
        return (2 - 2.0**-fmt.mantissa_bits) * 2.0 ** (field - 1 - fmt.bias)
    ulps = 2 if fmt.specials == "fn" else 1  # the last code of an fn format is its NaN
    return (2 - ulps * 2.0**-fmt.mantissa_bits) * 2.0 ** (field - fmt.bias)


def nearest(values: str | list, z: np.ndarray, tie_up: bool = False, halfway_of=np.float64) -> np.ndarray:
    """float64 in, float64 out; z is within the range. halfway_of: the dtype of what is between two codebook numbers."""
    if isinstance(values, list):
        book = np.array(values, np.float32).astype(np.float64)
        halfway = ((book[1:] + book[:-1]) / 2).astype(halfway_of)  # rounded once, to float64
        beyond = z[..., None] >= halfway if tie_up else z[..., None] > halfway
        return book[beyond.sum(-1)]
    step = steps_of(FORMATS[values], z) if values in FORMATS else 1.0
    return np.rint(z / step) * step


def neighbours(values: str | list, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The value at or below, and the next one."""
    if isinstance(values, list):
        book = np.array(values, np.float32).astype(np.float64)
        at = np.minimum((z[..., None] >= book).sum(-1) - 1, len(book) - 2)
        return book[at], book[at + 1]
    step = steps_of(FORMATS[values], z) if values in FORMATS else np.ones_like(z)
    low = np.floor(z / step) * step
    return low, low + step


def at_random(values: str | list, z: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Up where the noise is below the part of the way that z has come, worked out in float32."""
    low, high = neighbours(values, z)
    way = (z.astype(np.float32) - low.astype(np.float32)) / (high.astype(np.float32) - low.astype(np.float32))
    return np.where(noise < way, high, low)


def at_random_or_equal(values: str | list, z: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Up where the noise is that part exactly, too."""
    return at_random(values, z, np.nextafter(noise, np.float32(-1)))


def magnitudes_at_random(values: str | list, z: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The same for magnitudes, with the sign put back."""
    if isinstance(values, list):
        return at_random(values, z, noise)
    return np.copysign(at_random(values, np.abs(z), noise), z)


def to_power_of_two(scale: np.ndarray, up: bool = True) -> np.ndarray:
    """The power of two that is not below (or not above) each scale, from 2^-127 on; 0 stays."""
    part, exponent = np.frexp(scale.astype(np.float64))
    exponent = np.where((part == 0.5) | (not up), exponent - 1, exponent)
    return np.where(scale > 0, np.ldexp(1.0, np.maximum(exponent, -127)), 0.0).astype(np.float32)


def to_bfloat16(scale: np.ndarray) -> np.ndarray:
    """To nearest, ties to even."""
    bits = scale.view(np.uint32).astype(np.int64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def with_second(scale: np.ndarray) -> np.ndarray:
    """E4M3 scales under a float32 one for the matrix."""
    second = np.float32(scale.max() / np.float32(448))
    if second == 0:
        return np.zeros_like(scale)
    return (nearest("E4M3", np.minimum(scale / second, np.float32(448)).astype(np.float64)).astype(np.float32)) * second


STORED = {"float32": lambda s: s, "bfloat16": to_bfloat16, "e8m0": to_power_of_two, "e4m3": with_second}


def emulate_cast(
    x: Tensor, cast: dict, noise: Tensor, stored=None, edge=edges, clipped: bool = True, tie_up: bool = False,
    random=at_random, back: bool = True, top_of=None, halfway_of=np.float64,
) -> Tensor:  # fmt: skip
    """Block by block."""
    values, how, numbers = cast["values"], cast.get("scale", "none"), x.numpy()
    if isinstance(values, list):
        book = np.array(values, np.float32)
        lowest, top = float(book[0]), float(np.abs(book).max())
        highest = float(book[-1])
    else:
        top = largest(FORMATS[values]) if values in FORMATS else 2.0 ** (int(values[3:]) - 1) - 1
        lowest, highest = -top, top
    scale = np.ones(numbers.shape, np.float32)
    if how != "none":
        height, width = edge(cast.get("block", "tensor"), *numbers.shape)
        places = [
            (slice(r, r + height), slice(c, c + width))
            for r in range(0, numbers.shape[0], height)
            for c in range(0, numbers.shape[1], width)
        ]
        clip = np.float32(cast.get("clip", 1.0) if clipped else 1.0)
        amax = np.array([np.abs(numbers[place]).max() for place in places], np.float32)
        for place, each in zip(places, (stored or STORED)[how](amax * clip / np.float32(top_of or top)), strict=True):
            scale[place] = each
    with np.errstate(all="ignore"):
        z = np.where(scale > 0, numbers / np.where(scale > 0, scale, np.float32(1)), np.float32(0))
    z = np.clip(z.astype(np.float64), lowest, highest)
    stochastic = cast.get("rounding") == "stochastic"
    found = random(values, z, noise.numpy()) if stochastic else nearest(values, z, tie_up, halfway_of)
    return torch.from_numpy(found.astype(np.float32) * (scale if back else np.float32(1)) + np.float32(0))


# --- 15.4 -------------------------------------------------------------------------------------------------------------


def pareto_front(points: Tensor, beats=None) -> Tensor:
    """Everybody against everybody. beats(one, other): whether one dominates the other."""
    beats = beats or (lambda one, other: bool((one <= other).all() and (one < other).any()))
    numbers = points.numpy()
    alive = [at for at in range(len(numbers)) if not np.isnan(numbers[at]).any()]
    kept = [at for at in alive if not any(beats(numbers[other], numbers[at]) for other in alive if other != at)]
    return torch.tensor(sorted(kept, key=lambda at: (numbers[at][0], at)), dtype=torch.int64)


# --- 15.5 -------------------------------------------------------------------------------------------------------------


def error_of(codebook: np.ndarray, samples: np.ndarray) -> float:
    """The sum of squared errors, each sample to its nearest number."""
    return float((np.abs(samples[:, None] - codebook[None, :]).min(1) ** 2).sum())


def clusters(samples: np.ndarray, size: int, sums_in=np.float64) -> list[np.ndarray]:
    """The sorted samples, cut into `size` pieces of the least squared error about their means.

    best[j] is the least error of the first j samples in so many pieces; the last piece begins where that is least.
    """
    x = np.sort(samples.astype(np.float64))
    n, centred = len(x), (x - (x.mean() if sums_in is np.float64 else 0)).astype(sums_in)
    sums, squares = (np.concatenate([centred[:1] * 0, np.cumsum(each)]) for each in (centred, centred**2))
    first, end = np.arange(n)[:, None], np.arange(1, n + 1)[None, :]
    count = np.maximum(end - first, 1)
    within = squares[end] - squares[first] - (sums[end] - sums[first]) ** 2 / count
    within = np.where(end > first, np.maximum(within, 0), np.inf)  # [first, end - 1]
    best, cuts = within[0], []
    for _ in range(size - 1):
        total = np.concatenate([[np.inf], best[:-1]])[:, None] + within
        cuts.append(np.argmin(total, 0))
        best = total.min(0)
    end, pieces = n, []
    for cut in reversed(cuts):
        pieces.append(x[cut[end - 1] : end])
        end = cut[end - 1]
    return [x[:end], *reversed(pieces)]


def fit_codebook(samples: Tensor, size: int, middle=np.mean, sums_in=np.float64) -> Tensor:
    """The means of the best pieces."""
    return torch.tensor([middle(piece) for piece in clusters(samples.numpy(), size, sums_in)], dtype=torch.float32)


# --- 15.6 -------------------------------------------------------------------------------------------------------------


def design_recipe(shapes: dict, steps: int) -> dict:
    """BF16 everywhere: it trains, and stands in while there is no recipe."""
    recipe: dict = {role: {"values": "BF16"} for role in ROLES}
    recipe["master"]["rounding"] = "stochastic"
    return {"name": "BF16 everywhere", **recipe}
