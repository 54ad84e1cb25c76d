"""Checks and known misconceptions of chapter 15.

Bits, fronts and casts are compared exactly; a codebook by its error, since two may be equally good; a recipe by the
evaluation of capstone_run.py, which trains once for all checks of it.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.capstone import (
    INTEGERS,
    SHARES,
    TARGET_LOSS,
    bits_by_role,
    bits_for,
    emulated,
    recipe_text,
)
from lowprec_lab.graders import capstone_oracle as exact
from lowprec_lab.graders import capstone_run
from lowprec_lab.graders.capstone_run import RecipeError
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for

for _function in (
    exact.bits_of_cast, exact.bits_of_recipe, exact.emulate_cast, exact.pareto_front, exact.fit_codebook,
    exact.design_recipe,
):  # fmt: skip
    oracle_for(_function.__name__, _function)

_SMALL = ("E4M3", "E5M2", "E2M3", "E3M2", "E2M1", "FP16")
_WIDE = ("FP32", "TF32", "BF16")
_SCALED = ("float32", "bfloat16", "e8m0", "e4m3")


# --- inputs -----------------------------------------------------------------------------------------------------------


def a_codebook(rng: np.random.Generator, size: int) -> list[float]:
    """Float32 numbers that go up, of both signs or (one time in three) from 0 on."""
    numbers = np.sort(rng.choice(np.arange(-40, 41), size, replace=False)) / 8
    return (numbers - (numbers[0] if rng.random() < 1 / 3 else 0)).tolist()


def a_block(rng: np.random.Generator) -> str | list[int]:
    """A name or a size; sizes often do not divide."""
    named = rng.integers(4)
    return ("tensor", "row", "column")[named] if named < 3 else [int(rng.integers(1, 4)), int(rng.integers(1, 6))]


def a_cast(rng: np.random.Generator, values: object = None, **more: object) -> dict:
    """Any valid cast; values, more: what is settled."""
    if values is None:
        kind = rng.integers(3)
        values = str(rng.choice(_SMALL + _WIDE)) if kind == 0 else str(rng.choice(INTEGERS))
        values = a_codebook(rng, int(rng.integers(2, 20))) if kind == 2 else values
    cast: dict = {"values": values}
    if values not in _WIDE and (values in INTEGERS or rng.random() < 0.8):
        cast |= {"scale": str(rng.choice(_SCALED)), "block": a_block(rng)}
    return {**cast, **more}


def numbers(rng: np.random.Generator, rows: int, columns: int) -> Tensor:
    """Normal numbers, each row of a size of its own."""
    return torch.from_numpy((rng.normal(size=(rows, columns)) * np.exp2(rng.integers(-6, 7, (rows, 1)))).astype("f4"))


def noise(rng: np.random.Generator, rows: int, columns: int) -> Tensor:
    """Multiples of 2^-24 in [0, 1)."""
    return torch.from_numpy((rng.integers(0, 2**24, (rows, columns)) / 2**24).astype(np.float32))


# --- 15.1 bits_of_cast ------------------------------------------------------------------------------------------------


def _compare_bits(answer, case, cast: dict, rows: int, columns: int) -> None:
    case.same_bits(answer.run(bits_for, json.dumps(cast), rows, columns), exact.bits_of_cast(cast, rows, columns))


def _size(rng: np.random.Generator) -> tuple[int, int]:
    rows, columns = rng.integers(1, 70, 2)
    return int(rows), int(columns)


@check_for("bits_of_cast")
def codes_alone(answer, case):
    """Every format and every whole number of bits, formats without a scale and whole numbers with one for a row."""
    for values in _SMALL + _WIDE:
        _compare_bits(answer, case, {"values": values}, *_size(case.rng))
    for values in INTEGERS:
        _compare_bits(answer, case, {"values": values, "scale": "float32", "block": "row"}, *_size(case.rng))


@check_for("bits_of_cast", weight=2)
def scales_of_blocks(answer, case):
    """Blocks by name and by size, which often do not divide; scales of every kind."""
    for _ in range(case.count(4)):
        for scale in _SCALED:
            for block in ("tensor", "row", "column", a_block(case.rng), [3, 32]):
                _compare_bits(answer, case, {"values": "E2M1", "scale": scale, "block": block}, *_size(case.rng))
    for scale in _SCALED:  # the block is left out
        _compare_bits(answer, case, {"values": "int4", "scale": scale, "clip": 0.5}, *_size(case.rng))


@check_for("bits_of_cast")
def codebooks(answer, case):
    """Codebooks of 2 to 256 numbers, with a scale and without, for nearest and stochastic rounding."""
    for size in (2, 3, 4, 5, 15, 16, 17, 128, 129, 255, 256):
        book = [float(each) for each in range(size)]
        _compare_bits(answer, case, {"values": book}, *_size(case.rng))
        _compare_bits(answer, case, a_cast(case.rng, book, rounding="stochastic"), *_size(case.rng))


@misconception("bits_of_cast", "It counts codes and codebooks alone: scales cost nothing.")
def free_scales(cast, rows, columns):
    return exact.bits_of_cast({**cast, "scale": "none"}, rows, columns)


@misconception("bits_of_cast", "It has scales only for whole blocks: the smaller ones at the end cost nothing.")
def whole_blocks_only(cast, rows, columns):
    return exact.bits_of_cast(cast, rows, columns, count=lambda r, c, height, width: (r // height) * (c // width))


@misconception("bits_of_cast", "It forgets the second scale that E4M3 scales need.")
def no_second_scale(cast, rows, columns):
    return exact.bits_of_cast(cast, rows, columns, second=0)


@misconception("bits_of_cast", "It does not count the codebook's own numbers.")
def free_codebook(cast, rows, columns):
    return exact.bits_of_cast(cast, rows, columns, book=0)


@misconception("bits_of_cast", "It takes 8 bits for each code of a codebook, however few numbers there are.")
def bytes_for_codebooks(cast, rows, columns):
    return exact.bits_of_cast(
        cast, rows, columns, code=lambda values: 8 if isinstance(values, list) else exact.code_bits(values)
    )


@misconception("bits_of_cast", "It rounds the bits of a codebook's codes down: 5 numbers do not fit into 2 bits.")
def bits_rounded_down(cast, rows, columns):
    return exact.bits_of_cast(
        cast, rows, columns,
        code=lambda values: len(values).bit_length() - 1 if isinstance(values, list) else exact.code_bits(values),
    )  # fmt: skip


@misconception("bits_of_cast", "It has bits for one number more than a codebook has: 16 numbers do fit into 4 bits.")
def one_number_more(cast, rows, columns):
    return exact.bits_of_cast(
        cast, rows, columns,
        code=lambda values: len(values).bit_length() if isinstance(values, list) else exact.code_bits(values),
    )  # fmt: skip


@misconception("bits_of_cast", "It divides all numbers by those of a block: a block does not go on in the next row.")
def blocks_by_count(cast, rows, columns):
    return exact.bits_of_cast(cast, rows, columns, count=lambda r, c, height, width: -(-r * c // (height * width)))


@misconception("bits_of_cast", "It swaps rows and columns: a row of numbers gets the scales of a column.")
def rows_for_columns(cast, rows, columns):
    other = {"row": "column", "column": "row"}
    return exact.bits_of_cast(
        cast, rows, columns, edge=lambda b, r, c: exact.edges(other.get(b, b) if isinstance(b, str) else b, r, c)
    )


@misconception("bits_of_cast", "Every scale has 32 bits, whatever it is stored in.")
def float32_scales(cast, rows, columns):
    return exact.bits_of_cast(cast, rows, columns, scale_bits=dict.fromkeys(_SCALED, 32))


# --- 15.2 bits_of_recipe ----------------------------------------------------------------------------------------------

_LAYERS = {
    "weights": {"0.up": (6, 4), "head": (8, 4), "positions": (3, 4)}, "activations": {"0.up": (5, 4), "head": (5, 4)},
    "wire": {"0.up": (6, 4), "head": (8, 4), "positions": (3, 4)},
}  # fmt: skip


def a_recipe(rng: np.random.Generator, overrides: int, steps: int) -> dict:
    """Some roles, and overrides of all kinds."""
    recipe: dict = {"name": "drawn", **{role: a_cast(rng) for role in _LAYERS if rng.random() < 0.7}}
    for _ in range(overrides):
        role = str(rng.choice(list(_LAYERS)))
        each: dict = {"role": role, "cast": a_cast(rng)}
        if rng.random() < 0.6:
            each["layer"] = str(rng.choice(list(_LAYERS[role])))
        if rng.random() < 0.6:
            each["from"] = int(rng.integers(0, steps))
        if rng.random() < 0.6:
            each["to"] = int(rng.integers(each.get("from", 0) + 1, steps + 3))
        recipe.setdefault("overrides", []).append(each)
    return recipe


def _compare_roles(answer, case, recipe: dict, steps: int) -> None:
    shapes = {role: _LAYERS[role] for role in case.rng.permutation(list(_LAYERS))[: case.rng.integers(1, 4)].tolist()}
    want = torch.tensor(list(exact.bits_of_recipe(recipe, shapes, steps).values()))
    got = answer.run(bits_by_role, json.dumps(recipe), json.dumps(shapes), steps)
    case.same_bits(got, want, about=lambda index: f"the bits of the {list(shapes)[index]}")


@check_for("bits_of_recipe")
def one_cast_for_a_role(answer, case):
    """Recipes without overrides; roles that are left out; 1 to 7 steps."""
    for _ in range(case.count(8)):
        _compare_roles(answer, case, a_recipe(case.rng, 0, 5), int(case.rng.integers(1, 8)))


@check_for("bits_of_recipe", weight=2)
def overrides_that_overlap(answer, case):
    """1 to 6 overrides, by layer and by step or for all of a role, some of which end after the last step."""
    for _ in range(case.count(16)):
        steps = int(case.rng.integers(2, 9))
        _compare_roles(answer, case, a_recipe(case.rng, int(case.rng.integers(1, 7)), steps), steps)


@check_for("bits_of_recipe")
def overrides_of_one_step(answer, case):
    """Overrides for the first step, for the last one, and for one in between."""
    for _ in range(case.count(2)):
        for first in (0, 2, 4):
            one = {"role": "wire", "from": first, "to": first + 1, "cast": a_cast(case.rng, "E2M1")}
            layer = {"role": "weights", "layer": "head", "from": first, "cast": a_cast(case.rng, "E4M3")}
            _compare_roles(answer, case, {"name": "one step", "overrides": [one, layer]}, 5)


@misconception("bits_of_recipe", "It takes no notice of overrides.")
def without_overrides(recipe, shapes, steps):
    return exact.bits_of_recipe({**recipe, "overrides": []}, shapes, steps)


@misconception("bits_of_recipe", "Of several overrides that apply, the first one holds.")
def first_override(recipe, shapes, steps):
    return exact.bits_of_recipe(recipe, shapes, steps, which=0)


@misconception("bits_of_recipe", 'An override still holds at the step "to": one step too many.')
def end_included(recipe, shapes, steps):
    def holds(override, role, layer, step, all_steps):
        return exact.applies({**override, "to": override.get("to", steps) + 1}, role, layer, step, all_steps)

    return exact.bits_of_recipe(recipe, shapes, steps, holds=holds)


@misconception("bits_of_recipe", "A role that the recipe leaves out costs nothing.")
def absent_is_free(recipe, shapes, steps):
    return exact.bits_of_recipe(recipe, shapes, steps, absent="")


@misconception("bits_of_recipe", "An override for one layer holds for all layers of its role.")
def every_layer(recipe, shapes, steps):
    def holds(override, role, layer, step, all_steps):
        return exact.applies({**override, "layer": ""}, role, layer, step, all_steps)

    return exact.bits_of_recipe(recipe, shapes, steps, holds=holds)


@misconception("bits_of_recipe", "An override that names no layer holds for none; it should hold for all of its role.")
def no_layer_is_none(recipe, shapes, steps):
    def holds(override, role, layer, step, all_steps):
        return override.get("layer") == layer and exact.applies(override, role, layer, step, all_steps)

    return exact.bits_of_recipe(recipe, shapes, steps, holds=holds)


@misconception("bits_of_recipe", "It counts the first step, and multiplies by the number of steps.")
def first_step_for_all(recipe, shapes, steps):
    return {role: bits * steps for role, bits in exact.bits_of_recipe(recipe, shapes, 1).items()}


@misconception("bits_of_recipe", "An override holds for its layer and steps in every role.")
def every_role(recipe, shapes, steps):
    def holds(override, role, layer, step, all_steps):
        return exact.applies({**override, "role": role}, role, layer, step, all_steps)

    return exact.bits_of_recipe(recipe, shapes, steps, holds=holds)


# --- 15.3 emulate_cast ------------------------------------------------------------------------------------------------


def _compare_cast(answer, case, x: Tensor, cast: dict, drawn: Tensor | None = None) -> None:
    drawn = noise(case.rng, *x.shape) if drawn is None else drawn
    got = answer.run(emulated, x, json.dumps(cast), drawn)
    case.same_bits(got, exact.emulate_cast(x, cast, drawn))


@check_for("emulate_cast")
def values_without_a_scale(answer, case):
    """Every format and some codebooks without a scale: ordinary numbers, and some beyond the range."""
    for values in (*_SMALL, *_WIDE, a_codebook(case.rng, 4), a_codebook(case.rng, 9)):
        for _ in range(case.count(1)):
            _compare_cast(answer, case, numbers(case.rng, 4, 5), {"values": values})


@check_for("emulate_cast", weight=2)
def scales_as_they_are_stored(answer, case):
    """Every kind of scale, on blocks of every kind, with a clip and without; a block of zeros."""
    for scale in _SCALED:
        for values in ("E4M3", "E2M1", "int4", "int8", a_codebook(case.rng, 8)):
            for block in ("tensor", "row", "column", [2, 3], [1, 4]):
                cast = {"values": values, "scale": scale, "block": block}
                if case.rng.random() < 0.4:
                    cast["clip"] = float(case.rng.uniform(0.3, 1))
                x = numbers(case.rng, 4, 7)
                x[:2] = 0 if case.rng.random() < 0.2 else x[:2]
                _compare_cast(answer, case, x, cast)


@check_for("emulate_cast", weight=2)
def at_random(answer, case):
    """Stochastic rounding of both signs, to formats, whole numbers and codebooks; and of values, which stay."""
    for values in ("E4M3", "E2M1", "BF16", "int4", "int2", a_codebook(case.rng, 6)):
        for _ in range(case.count(2)):
            _compare_cast(answer, case, numbers(case.rng, 3, 8), a_cast(case.rng, values, rounding="stochastic"))
    grid = torch.from_numpy(case.rng.integers(-3, 4, (3, 8)).astype(np.float32))
    _compare_cast(answer, case, grid, {"values": "E2M1", "rounding": "stochastic"})
    quarters = torch.from_numpy((case.rng.integers(-12, 13, (3, 8)) / 4).astype(np.float32))
    as_far = torch.from_numpy((case.rng.integers(0, 4, (3, 8)) / 4).astype(np.float32))
    for values in ("E2M1", [-3.0, -1.0, 0.0, 1.0, 3.0]):  # noise that is what it is compared with
        _compare_cast(answer, case, quarters, {"values": values, "rounding": "stochastic"}, as_far)


@check_for("emulate_cast")
def ties_and_tiny_numbers(answer, case):
    """Numbers half-way between two values of a format, of whole numbers and of a codebook; numbers down to 2^-140."""
    halves = torch.from_numpy((case.rng.integers(-12, 13, (3, 12)) / 4).astype(np.float32))
    for values in ("E2M1", "E2M3", [-2.0, -1.0, 0.0, 0.5, 1.0, 3.0], [-3.0, -1.5, 0.5, 2.0]):
        _compare_cast(answer, case, halves, {"values": values})
    near = (1 + np.arange(-2, 4) * 2.0**-23).astype(np.float32)  # no float32 is half-way between two of them
    for left_out in range(6):
        book = [-2.0, *np.delete(near, left_out).astype(float).tolist(), 1.5]
        _compare_cast(answer, case, torch.from_numpy(near.reshape(2, 3)), {"values": book})
    sevens = torch.from_numpy((case.rng.integers(-14, 15, (2, 6)) / 2).astype(np.float32))
    sevens[:, 0] = 7
    _compare_cast(answer, case, sevens, {"values": "int4", "scale": "float32", "block": "row"})
    for scale in ("float32", "e8m0"):
        tiny = numbers(case.rng, 3, 6) * torch.tensor([[2.0**-100], [2.0**-120], [2.0**-134]])
        _compare_cast(answer, case, tiny, {"values": "E4M3", "scale": scale, "block": "row"})


@misconception("emulate_cast", "It takes no notice of the clip.")
def without_the_clip(x, cast, noise):
    return exact.emulate_cast(x, cast, noise, clipped=False)


@misconception("emulate_cast", "It rounds e8m0 scales down, as the OCP's rule does: the largest numbers are cut off.")
def power_of_two_below(x, cast, noise):
    stored = {**exact.STORED, "e8m0": lambda scale: exact.to_power_of_two(scale, up=False)}
    return exact.emulate_cast(x, cast, noise, stored=stored)


@misconception("emulate_cast", "It keeps every scale in float32, whatever it is stored in.")
def scales_as_float32(x, cast, noise):
    return exact.emulate_cast(x, cast, noise, stored=dict.fromkeys(_SCALED, lambda scale: scale))


@misconception("emulate_cast", "It has one scale for the matrix, whatever the block.")
def one_block(x, cast, noise):
    return exact.emulate_cast(x, {**cast, "block": "tensor"}, noise)


@misconception("emulate_cast", "It swaps the sides of a block: columns and rows, rows and columns.")
def sides_swapped(x, cast, noise):
    other = {"row": "column", "column": "row"}

    def edge(block, rows, columns):
        return tuple(block[::-1]) if isinstance(block, list) else exact.edges(other.get(block, block), rows, columns)

    return exact.emulate_cast(x, cast, noise, edge=edge)


@misconception("emulate_cast", "Stochastic rounding goes by magnitude: negative numbers are rounded the other way.")
def magnitudes(x, cast, noise):
    return exact.emulate_cast(x, cast, noise, random=exact.magnitudes_at_random)


@misconception("emulate_cast", "It rounds to nearest, whatever the noise is.")
def always_nearest(x, cast, noise):
    return exact.emulate_cast(x, {**cast, "rounding": "nearest"}, noise)


@misconception("emulate_cast", "In a codebook, a tie goes to the higher value.")
def ties_go_up(x, cast, noise):
    return exact.emulate_cast(x, cast, noise, tie_up=True)


@misconception(
    "emulate_cast", "It goes up where the noise is *equal* to the part of the way, too: noise of 0 moves values."
)
def up_when_equal(x, cast, noise):
    return exact.emulate_cast(x, cast, noise, random=exact.at_random_or_equal)


@misconception(
    "emulate_cast", "Half-way between two numbers of a codebook is worked out in float32, and is one of them."
)
def halfway_in_float32(x, cast, noise):
    return exact.emulate_cast(x, cast, noise, halfway_of=np.float32)


@misconception("emulate_cast", "It rounds e8m0 scales to the nearest power of two: the largest numbers can be cut off.")
def power_of_two_nearby(x, cast, noise):
    def nearby(scale):
        with np.errstate(divide="ignore"):
            power = np.exp2(np.maximum(np.rint(np.log2(scale.astype(np.float64))), -127))
        return np.where(scale > 0, power, 0).astype(np.float32)

    return exact.emulate_cast(x, cast, noise, stored={**exact.STORED, "e8m0": nearby})


@misconception("emulate_cast", "The second scale is made of the largest number, and not of the largest scale.")
def second_of_the_numbers(x, cast, noise):
    second = np.abs(x.numpy()).max() / np.float32(448)

    def stored(scale):
        if second == 0:
            return np.zeros_like(scale)
        under = np.minimum(scale / second, np.float32(448)).astype(np.float64)
        return exact.nearest("E4M3", under).astype(np.float32) * second

    return exact.emulate_cast(x, cast, noise, stored={**exact.STORED, "e4m3": stored})


@misconception("emulate_cast", "It returns z, rounded, and does not multiply by the scale again.")
def not_scaled_back(x, cast, noise):
    return exact.emulate_cast(x, cast, noise, back=False)


@misconception("emulate_cast", "It rounds an E4M3 scale by itself, without the second scale of the matrix.")
def one_level(x, cast, noise):
    stored = {
        **exact.STORED,
        "e4m3": lambda s: exact.nearest("E4M3", np.minimum(s, 448).astype(np.float64)).astype(np.float32),
    }
    return exact.emulate_cast(x, cast, noise, stored=stored)


# --- 15.4 pareto_front ------------------------------------------------------------------------------------------------


def _compare_fronts(answer, case, points: np.ndarray) -> None:
    """The place of each point on the front, and -1 for those that are not on it."""
    x = torch.from_numpy(points.astype(np.float64).reshape(-1, 2))
    got, right = answer(x), exact.pareto_front(x)
    if _are_numbers_of(got, len(x)):
        got, right = _places(got, len(x)), _places(right, len(x))
    case.same_bits(got, right, about=lambda index: f"where point {index} is in the result; -1: it is not")


def _are_numbers_of(got: object, count: int) -> bool:
    """Whether an answer has numbers of points, each at most once, and can be compared point by point."""
    if not isinstance(got, Tensor) or got.dtype != torch.int64 or got.dim() != 1:
        return False
    return len(got.unique()) == len(got) and bool(((got >= 0) & (got < count)).all())


def _places(front: Tensor, count: int) -> Tensor:
    places = torch.full((count,), -1)
    places[front] = torch.arange(len(front))
    return places


@check_for("pareto_front")
def points_without_order(answer, case):
    """Up to 20 points, in no order."""
    for _ in range(case.count(8)):
        _compare_fronts(answer, case, case.rng.random((case.rng.integers(1, 21), 2)))
    _compare_fronts(answer, case, np.zeros((0, 2)))


@check_for("pareto_front", weight=2)
def equal_numbers(answer, case):
    """Points that share their bits or their loss, and points that are there twice."""
    for _ in range(case.count(12)):
        _compare_fronts(answer, case, case.rng.integers(0, 4, (case.rng.integers(2, 12), 2)))


@check_for("pareto_front")
def recipes_that_diverged(answer, case):
    """Some losses are NaN; all of them; the share of another is NaN."""
    for _ in range(case.count(8)):
        points = case.rng.integers(0, 6, (8, 2)).astype(np.float64)
        points[case.rng.random(8) < 0.4, 1] = np.nan
        _compare_fronts(answer, case, points)
    _compare_fronts(answer, case, np.full((3, 2), np.nan))
    _compare_fronts(answer, case, np.array([[np.nan, 1.0], [0.5, 2.0], [0.7, 1.5]]))


@misconception("pareto_front", "A point has to be better in both to beat another: some that are worse in one stay.")
def better_in_both(points):
    return exact.pareto_front(points, lambda one, other: bool((one < other).all()))


@misconception("pareto_front", "Of points that are equal it keeps the first one alone.")
def drops_equals(points):
    kept = exact.pareto_front(points).tolist()
    first = {tuple(points[at].tolist()): at for at in reversed(kept)}
    return torch.tensor([at for at in kept if first[tuple(points[at].tolist())] == at], dtype=torch.int64)


@misconception("pareto_front", "The points come in the order of the list and not by their bits.")
def in_the_lists_order(points):
    return exact.pareto_front(points).sort().values


@misconception("pareto_front", "A point with a NaN stays: nothing is better than NaN.")
def keeps_nan(points):
    kept = exact.pareto_front(points).tolist()
    kept += [at for at in range(len(points)) if bool(points[at].isnan().any())]
    return torch.tensor(sorted(kept, key=lambda at: (np.nan_to_num(points[at, 0].item()), at)), dtype=torch.int64)


@misconception("pareto_front", "Points that are equal beat each other, and all of them go.")
def equals_beat_each_other(points):
    return exact.pareto_front(points, lambda one, other: bool((one <= other).all()))


@misconception("pareto_front", "It keeps the corners of the convex hull alone: points of the front between them go.")
def hull_alone(points):
    kept: list[int] = []
    for at in exact.pareto_front(points).tolist():
        while len(kept) > 1 and _bends_up(points, *kept[-2:], at):
            kept.pop()
        kept.append(at)
    return torch.tensor(kept, dtype=torch.int64)


def _bends_up(points: Tensor, a: int, b: int, c: int) -> bool:
    """Whether b lies above the line from a to c."""
    (ax, ay), (bx, by), (cx, cy) = points[[a, b, c]].tolist()
    return (by - ay) * (cx - ax) > (cy - ay) * (bx - ax)


@misconception("pareto_front", "It takes more for better, in both columns.")
def more_is_better(points):
    kept = exact.pareto_front(-points).tolist()
    return torch.tensor(sorted(kept, key=lambda at: (points[at, 0].item(), at)), dtype=torch.int64)


# --- 15.5 fit_codebook ------------------------------------------------------------------------------------------------


def _compare_codebooks(answer, case, samples: np.ndarray, size: int) -> None:
    """The error, and whether the numbers go up. One that is as good as the best to 1e-9 of it counts as the best."""
    x = samples.astype(np.float32)
    got = answer(torch.from_numpy(x), size)
    right = exact.fit_codebook(torch.from_numpy(x), size)
    if not isinstance(got, Tensor) or got.shape != right.shape or got.dtype != right.dtype:
        case.same_bits(got, right)
        return
    wide = x.astype(np.float64)
    best, error = (exact.error_of(each.detach().double().numpy(), wide) for each in (right, got))
    close = abs(error - best) <= 1e-9 * best + 1e-12 * float((wide**2).sum())
    ascending = bool((got[1:] >= got[:-1]).all())
    want = torch.tensor([best, 1.0], dtype=torch.float64)
    found = torch.tensor([best if close else error, float(ascending)], dtype=torch.float64)
    case.same_bits(
        found, want, about=lambda index: ("the sum of squared errors", "whether the numbers go up (1: they do)")[index]
    )


@check_for("fit_codebook", by="error")
def a_few_samples(answer, case):
    """3 to 12 samples and 1 to 4 numbers: small enough to try everything."""
    for _ in range(case.count(10)):
        count = int(case.rng.integers(4, 13))
        _compare_codebooks(answer, case, case.rng.normal(size=count) ** 3, int(case.rng.integers(1, 5)))


@check_for("fit_codebook", weight=2, by="error")
def samples_of_every_kind(answer, case):
    """60 samples with few large ones, in heaps, of one sign, and many equal ones; 2 to 16 numbers."""
    rng = case.rng
    for _ in range(case.count(2)):
        heaps = rng.normal(size=60) * 0.1 + rng.choice([-5.0, 0.0, 1.0, 9.0], 60, p=[0.1, 0.6, 0.2, 0.1])
        repeated = np.repeat(rng.normal(size=20), rng.integers(1, 12, 20))
        for samples in (rng.standard_t(2, 60), heaps, rng.gamma(0.5, size=60)):
            _compare_codebooks(answer, case, samples, int(rng.choice([2, 3, 5, 8, 16])))
        for size in (2, 5, 8):
            _compare_codebooks(answer, case, repeated, size)


@check_for("fit_codebook", by="error")
def as_many_numbers_as_samples(answer, case):
    """As many numbers as there are different samples, and one number for all; samples far from 0."""
    for _ in range(case.count(2)):
        samples = case.rng.normal(size=7)
        _compare_codebooks(answer, case, np.concatenate([samples, samples[:3]]), 7)
        _compare_codebooks(answer, case, samples, 1)
        _compare_codebooks(answer, case, samples + 50, 3)
        for size in (4, 8):
            _compare_codebooks(answer, case, case.rng.normal(size=60) + 1000, size)


@misconception("fit_codebook", "Its numbers lie at equal distances, from the smallest sample to the largest.")
def equal_distances(samples, size):
    low, high = samples.double().aminmax()
    return (low + (high - low) * (torch.arange(size) + 0.5 * (size == 1)) / max(size - 1, 1)).float()


@misconception("fit_codebook", "It cuts the sorted samples into pieces of equal counts: quantiles, not least squares.")
def equal_counts(samples, size):
    pieces = np.array_split(np.sort(samples.double().numpy()), size)
    return torch.tensor([piece.mean() for piece in pieces], dtype=torch.float32)


def _lloyd(x: np.ndarray, book: np.ndarray) -> np.ndarray:
    """Assign and average, until nothing moves."""
    for _ in range(200):
        nearest = np.abs(x[:, None] - book[None, :]).argmin(1)
        moved = np.array([x[nearest == k].mean() if (nearest == k).any() else book[k] for k in range(len(book))])
        if np.array_equal(moved, book):
            break
        book = np.sort(moved)
    return book


@misconception(
    "fit_codebook", "It moves numbers from equal counts to the nearest optimum (Lloyd), which is a local one."
)
def lloyd_from_quantiles(samples, size):
    x = samples.double().numpy()
    return torch.from_numpy(_lloyd(x, equal_counts(samples, size).double().numpy())).float()


@misconception("fit_codebook", "It moves numbers from equal distances to the nearest optimum, which is a local one.")
def lloyd_from_equal_distances(samples, size):
    x = samples.double().numpy()
    return torch.from_numpy(_lloyd(x, equal_distances(samples, size).double().numpy())).float()


@misconception("fit_codebook", "It counts samples that are equal once: how often a number occurs plays no part.")
def each_once(samples, size):
    return exact.fit_codebook(samples.unique(), size)


@misconception(
    "fit_codebook", "Its running sums are float32: squares of samples far from 0 leave nothing of the errors."
)
def sums_in_float32(samples, size):
    return exact.fit_codebook(samples, size, sums_in=np.float32)


@misconception("fit_codebook", "Each piece is represented by its median, which is best for absolute errors.")
def medians(samples, size):
    return exact.fit_codebook(samples, size, middle=np.median)


@misconception("fit_codebook", "Each piece is represented by the middle between its ends.")
def middles(samples, size):
    return exact.fit_codebook(samples, size, middle=lambda piece: (piece[0] + piece[-1]) / 2)


# --- 15.6 design_recipe -----------------------------------------------------------------------------------------------

_VALID = "a recipe, the same every time"
_TRAINED = f"a loss of at most {TARGET_LOSS}"
_LIMIT_S = 120.0


def _result(text: object) -> capstone_run.Result | str:
    try:
        return capstone_run.evaluate_text(text)
    except RecipeError as error:
        return str(error)


@check_for("design_recipe", by="training")
def it_can_be_evaluated(answer, case):
    """What comes back is a recipe, and the same one when it is asked again."""
    texts = [answer.run(recipe_text, goal) for goal in (_VALID, _VALID)]
    try:
        capstone_run.read_text(texts[0])
        said = _VALID if texts[0] == texts[1] else "another recipe at the second call"
    except RecipeError as error:
        said = str(error)
    case.same_bits(said, _VALID)


@check_for("design_recipe", weight=3, limit_s=_LIMIT_S, by="training")
def it_trains(answer, case):
    """The evaluation trains with it to the loss that is asked for."""
    result = _result(answer.run(recipe_text, _TRAINED))
    if isinstance(result, str):
        said = result
    elif result.note:
        said = result.note
    else:
        said = _TRAINED if result.loss <= TARGET_LOSS else f"a loss of {result.loss:.4f}"
    case.same_bits(said, _TRAINED)


def _compare_share(answer, case, most: float) -> None:
    goal = f"at most {most} of float32's bits, at that loss"
    result = _result(answer.run(recipe_text, goal))
    if isinstance(result, str):
        said = result
    elif not result.loss <= TARGET_LOSS:
        said = "not trained to that loss"
    else:
        said = goal if result.share <= most else f"{result.share:.4f} of float32's bits"
    case.same_bits(said, goal)


@check_for("design_recipe", weight=2, limit_s=_LIMIT_S, by="training")
def no_more_bits_than_bfloat16(answer, case):
    """It trains with at most half of float32's bits: what BF16 everywhere takes."""
    _compare_share(answer, case, SHARES[0])


@check_for("design_recipe", weight=2, limit_s=_LIMIT_S, by="training")
def fewer_bits_than_mxfp8(answer, case):
    """It trains with at most a quarter of float32's bits: fewer than MXFP8 everywhere."""
    _compare_share(answer, case, SHARES[1])


@check_for("design_recipe", weight=2, limit_s=_LIMIT_S, by="training")
def fewer_bits_than_4_in_products(answer, case):
    """It trains with at most 0.16 of float32's bits: fewer than 4 bits in products and 8 in the rest."""
    _compare_share(answer, case, SHARES[2])


@misconception(
    "design_recipe", "It leaves every role out, which is float32 everywhere: it trains, with all of the bits."
)
def float32_everywhere(shapes, steps):
    return {"name": "as it was"}


@misconception(
    "design_recipe", "Its second moment is whole numbers to nearest: small ones become 0, and a step divides by that."
)
def second_moment_in_int8(shapes, steps):
    recipe = exact.design_recipe(shapes, steps)
    return {**recipe, "moment2": {"values": "int8", "scale": "float32", "block": "row"}}


@misconception("design_recipe", "Its codebook has 1,000 numbers: more than 8 bits tell apart.")
def thousand_numbers(shapes, steps):
    recipe = exact.design_recipe(shapes, steps)
    return {**recipe, "weights": {"values": [k / 1000 for k in range(1000)], "scale": "float32"}}


@misconception("design_recipe", "It asks for blocks of no columns, whose scales would cost nothing.")
def blocks_of_nothing(shapes, steps):
    recipe = exact.design_recipe(shapes, steps)
    return {**recipe, "weights": {"values": "E4M3", "scale": "float32", "block": [1, 0]}}


@misconception("design_recipe", "It has an override for a layer that the model does not have.")
def layer_of_another_model(shapes, steps):
    recipe = exact.design_recipe(shapes, steps)
    override = {"role": "gradients", "layer": "lm_head", "cast": {"values": "FP32"}}
    return {**recipe, "overrides": [override]}


@misconception("design_recipe", "It gives its own count of the bits: nothing that a recipe says of itself counts.")
def counts_for_itself(shapes, steps):
    return {**exact.design_recipe(shapes, steps), "bits": 1}


# --- questions --------------------------------------------------------------------------------------------------------

question_for(
    "15.A",
    0.0,
    "0: int8 has 127 steps, and what is below half of one, 1 / 254 of the largest, is rounded to 0.",
    "How large is a step, if the largest of the row is 127 of them? Is 1 / 400 more than half of that?",
    {1.0: "One step is 1 / 127 of the largest. 1 / 400 is less than half of that."},
)
question_for(
    "15.B",
    31,
    "31: 1.75 * 2^15 / 2^-16 = 1.75 * 2^31. int8 has less than 2^7.",
    "Divide: exponents subtract. The answer is the exponent, a whole number, and not the factor itself.",
    {-1: "15 - (-16) is not 15 - 16.", 32: "1.75 is below 2: it does not make another binade."},
)
question_for(
    "15.C",
    100,
    "100: up with probability 0.1, so the mean over the steps is 0.1 of a step, which is right. To nearest it is 0.",
    "With which probability is it rounded up?",
    {0: "That is what rounding to nearest gives."},
)
question_for(
    "15.D",
    0.5,
    "0.5: half of the step above is 0.00195, and the update is less. It is lost, and so is each later one like it.",
    "Which of its neighbours is 0.5005 nearest to?",
    {0.5005: "BF16 has no such number.", 0.50390625: "Rounded to nearest, 0.5005 is nearer to 0.5."},
)
