"""Chapter 15: a recipe of one's own: which numbers train a GPT with the fewest bits.

**A recipe is data**: a dict of strings, numbers, lists and dicts, as JSON has them.

    {"name": "...", "weights": CAST, ..., "master": CAST, "overrides": [OVERRIDE, ...]}

The name has 1 to 40 characters. A role (see ROLES) that the recipe leaves out is float32. An OVERRIDE is {"role": ...,
"layer": ..., "from": ..., "to": ..., "cast": CAST}: another cast for one role, in one layer (all of them, if left out),
from step "from" (0) to before step "to" (the last one). Where several apply, the last one of the list holds.

**A CAST** is {"values": ...} and, if need be, "scale", "block", "clip" and "rounding":

- "values": the name of a format (FORMATS); "int2" to "int8", whole numbers from -(2^(bits - 1) - 1) to the same above
  zero; or a *codebook*, a list of 2 to 256 numbers that go up. The *top* is the largest magnitude among them: a
  format's largest finite value, 2^(bits - 1) - 1 for whole numbers.
- "scale": how the scale of a block is stored: "none" (the default: it is 1), "float32", "bfloat16", "e8m0", "e4m3".
  Whole numbers need one, and FP32, TF32 and BF16, which have all of float32's range, take none.
- "block": "tensor" (the default), "row", "column" or [rows, columns], a list; where they do not divide, the last are
  smaller.
- "clip": a number above 0, at most 1 (the default).
- "rounding": "nearest" (the default) or "stochastic".

**What a cast does to a float32 matrix**, all of it in float32:

1. The scale of a block is amax * clip / top, multiplied first, and then as it is stored: "float32" as it is;
   "bfloat16" rounded to nearest, ties to even; "e8m0" the smallest power of two, from 2^-127 on, that is not below it
   (0 stays 0); "e4m3" a second scale for the matrix, the largest scale / 448, and each scale is that times (scale /
   second) rounded to E4M3, ties to even. If the second is 0, all are.
2. z = x / scale; where the scale is 0 the result is 0.
3. z is brought into the range of the values, from the lowest to the highest, and rounded to one of them. "nearest":
   ties to even for formats and whole numbers; in a codebook a tie goes to the lower value, and half-way between two
   values is (low + high) / 2 in float64. "stochastic": with low the value at or below z and high the next one, high
   where noise < (z - low) / (high - low), else low. A value stays.
4. The result is that times the scale.

**What it costs**: for each number the bits of a format or of whole numbers, or as many as tell a codebook's values
apart; for each block the bits of its scale (SCALE_BITS), and 32 once for the second scale of "e4m3"; for a codebook 32
bits for each of its values, in every matrix. A float32 without a scale has 32 bits for each number.

References: OCP Microscaling Formats 1.0 (e8m0); NVIDIA, Pretraining large language models with NVFP4, arXiv:2509.25149
(e4m3 scales, stochastic rounding of gradients); Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
arXiv:2110.02861; Jenks (1967) and Wang and Song, Ckmeans.1d.dp, The R Journal 3/2 (2011), for the best codebook.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowprec_lab.blanks import blank
from lowprec_lab.capstone_text import CHARACTERS
from lowprec_lab.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP16, FP32, TF32, Format
from lowprec_lab.gpt import GPTConfig
from lowprec_lab.quantizer import spread  # noqa: F401 - for answers: a scale for each number

ROLES = ("weights", "activations", "gradients", "wire", "moment1", "moment2", "master")
FORMATS: dict[str, Format] = {
    "FP32": FP32, "TF32": TF32, "BF16": BF16, "FP16": FP16, "E4M3": E4M3, "E5M2": E5M2, "E2M3": E2M3, "E3M2": E3M2,
    "E2M1": E2M1,
}  # fmt: skip
INTEGERS = tuple(f"int{bits}" for bits in range(2, 9))
SCALE_BITS = {"none": 0, "float32": 32, "bfloat16": 16, "e8m0": 8, "e4m3": 8}
SIZE = GPTConfig(vocab_size=len(CHARACTERS), context=32, layers=2, heads=2, width=64)
BATCH = 16
STEPS = 400
TARGET_LOSS = 0.6  # float32 comes to 0.51 to 0.57, as the first weights and the machine will have it
SHARES = (0.5, 0.25, 0.16)  # of float32's bits: BF16 everywhere; below MXFP8 everywhere; below 4 bits in products


@functools.cache
def _shapes() -> dict[str, dict[str, tuple[int, int]]]:
    width, rows = SIZE.width, BATCH * SIZE.context
    linear = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    layers = {f"{block}.{name}": shape for block in range(SIZE.layers) for name, shape in linear.items()}
    layers["head"] = (SIZE.vocab_size, width)
    inputs = {name: (rows, columns) for name, (_, columns) in layers.items()}
    outputs = {name: (rows, columns) for name, (columns, _) in layers.items()}
    weights = {**layers, "positions": (SIZE.context, width)}
    return {role: {"activations": inputs, "gradients": outputs}.get(role, weights) for role in ROLES}


def layout() -> dict[str, dict[str, tuple[int, int]]]:
    """For each role its matrices: the name of the layer, and (rows, columns).

    Linear layers are "0.qkv", "0.out", "0.up", "0.down", the same of block 1, and "head", whose weight is the
    embedding's too. Their inputs are the role "activations", what comes back to their outputs "gradients". All other
    roles have a matrix for each weight, that of the "positions" among them.
    """
    return {role: dict(matrices) for role, matrices in _shapes().items()}


# --- the exercises ----------------------------------------------------------------------------------------------------


@blank(exercise="15.1", points=2, minutes=20)
def bits_of_cast(cast: dict, rows: int, columns: int) -> int:
    """How many bits a matrix takes after a cast: codes, scales and codebook, as the module's first lines say.

    cast: a valid one. rows, columns: 1 or more. Returns: a whole number.
    """


@blank(exercise="15.2", points=3, minutes=30)
def bits_of_recipe(recipe: dict, shapes: dict, steps: int) -> dict:
    """For each role of `shapes` the bits of all its matrices in all steps together.

    recipe: a valid one. shapes: {role: {layer: (rows, columns)}}, as `layout()` gives. steps: 1 or more; overrides
    may begin or end after them. Returns: {role: whole number}.
    """


@blank(exercise="15.3", points=5, minutes=60)
def emulate_cast(x: Tensor, cast: dict, noise: Tensor) -> Tensor:
    """What a matrix is after a cast, to the last bit.

    x: float32, (rows, columns), finite, 1 or more of both. cast: a valid one. noise: float32, in [0, 1), the shape of
    x: what stochastic rounding compares with. Returns: float32, the shape of x. The sign of a zero is not judged.
    """


@blank(exercise="15.4", points=2, minutes=20)
def pareto_front(points: Tensor) -> Tensor:
    """Which points nobody beats.

    points: float64, (N, 2): for each recipe its share of the bits and its loss; less is better in both. Each is
    finite or NaN. N may be 0.
    Returns: int64, the numbers of those that no other one dominates, by ascending bits; equal points in their order.
    A point dominates another if it is nowhere worse and somewhere better. One with a NaN, which diverged, is on no
    front, and dominates nobody.
    """


@blank(exercise="15.5", points=4, minutes=50)
def fit_codebook(samples: Tensor, size: int) -> Tensor:
    """The codebook with the least sum of squared errors for these samples.

    samples: float32, one dimension, finite, at least `size` different numbers. size: from 1 to 256.
    Returns: float32, (size,), ascending: no other `size` numbers have a smaller sum of (sample - nearest number)^2.
    """


@blank(exercise="15.6", points=10, minutes=240)
def design_recipe(shapes: dict, steps: int) -> dict:
    """A recipe that trains the model of `layout()` to TARGET_LOSS with as few bits as you can.

    shapes: what `layout()` gives. steps: STEPS. Returns: a recipe (see the module's first lines), the same every time.
    What it returns is turned into JSON where it runs; all that is judged is that text.
    """


# --- scenarios: what a check drives an answer with, beside plain calls ------------------------------------------------


def bits_for(function: Callable, cast: str, rows: int, columns: int) -> int:
    """function(cast, rows, columns); cast: as JSON."""
    return function(json.loads(cast), rows, columns)


def bits_by_role(function: Callable, recipe: str, shapes: str, steps: int) -> Tensor:
    """function(recipe, shapes, steps), by role in the order of `shapes`, as int64; recipe, shapes: as JSON."""
    known = {role: {name: tuple(shape) for name, shape in each.items()} for role, each in json.loads(shapes).items()}
    bits = function(json.loads(recipe), known, steps)
    if sorted(bits) != sorted(known):
        raise ValueError(f"the roles are {', '.join(known)}; it gives {', '.join(map(str, bits)) or 'none'}")
    return torch.tensor([bits[role] for role in known])


def emulated(function: Callable, x: Tensor, cast: str, noise: Tensor) -> Tensor:
    """function(x, cast, noise), with 0.0 in place of -0.0; cast: as JSON. ValueError if x is no matrix."""
    if x.dim() != 2:
        raise ValueError(f"a cast takes a matrix, and this has {x.dim()} dimensions")
    result = function(x, json.loads(cast), noise)
    return result + 0.0 if isinstance(result, Tensor) else result


def recipe_text(function: Callable, goal: str) -> str:
    """The recipe that `function(layout(), STEPS)` gives, as JSON; ValueError if it is made of anything else.

    goal: what is judged, in words.
    """
    recipe = function(layout(), STEPS)
    try:
        return json.dumps(recipe, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a recipe is made of dicts, lists, numbers and strings: {error}") from None


# --- given: the evaluation --------------------------------------------------------------------------------------------


def evaluate(recipe: dict, progress: Callable[[int], None] | None = None):
    """Train with a recipe and count its bits: a `Result` with .loss, .bits by role, .share of float32's, .history.

    It takes about 2 seconds for float32 and up to 15 for casts everywhere, and none for a recipe that was evaluated in
    this kernel. The same recipe has the same result, to the last bit, on the same machine. progress: is called with
    the number of each step.
    Raises RecipeError, in words, for a recipe that is not valid.
    """
    from lowprec_lab.graders import capstone_run

    capstone_run.read_recipe(recipe)
    return capstone_run.evaluate_text(json.dumps(recipe, sort_keys=True), progress)


def _cast(values: object, block: object = None, scale: str = "none", rounding: str = "nearest") -> dict:
    made = {"values": values, "rounding": rounding}
    return made if scale == "none" else {**made, "scale": scale, "block": block or "tensor"}


def _with(name: str, common: dict, **roles: dict) -> dict:
    """A recipe with one cast for all roles but those that are named."""
    return {"name": name, **{role: roles.get(role, common) for role in ROLES}}


_FLOAT32, _BF16, _BF16_RANDOM = _cast("FP32"), _cast("BF16"), _cast("BF16", rounding="stochastic")
_E4M3, _MX = _cast("E4M3", "tensor", "float32"), _cast("E4M3", [1, 32], "e8m0")
_MX_REST = {"moment2": _cast("E5M2", [1, 32], "e8m0"), "master": _BF16_RANDOM}


def _in_blocks_of_16(values: str) -> dict[str, dict]:
    """Products as NVFP4 has them: weights and activations to nearest, gradients at random."""
    nearest = _cast(values, [1, 16], "e4m3")
    return {"weights": nearest, "activations": nearest, "gradients": {**nearest, "rounding": "stochastic"}}


_THREE = _in_blocks_of_16("int3")

# What others do, from the most bits to the fewest, and one step further; a point of the picture each. None of them
# reaches the last goal: what has so few bits does not reach the loss.
REFERENCES: tuple[dict, ...] = (
    _with("float32", _FLOAT32),
    _with("BF16 in products and on the wire", _FLOAT32, weights=_BF16, activations=_BF16, gradients=_BF16, wire=_BF16),
    _with("BF16 everywhere", _BF16, master=_BF16_RANDOM),
    _with(
        "FP8 in products", _FLOAT32, weights=_E4M3, activations=_E4M3, gradients=_cast("E5M2", "tensor", "float32"),
        wire=_BF16,
    ),
    _with("MXFP8 everywhere", _MX, **_MX_REST),
    _with("4 bits in products", _MX, **_in_blocks_of_16("E2M1"), **_MX_REST),
    _with("3 bits, on the wire too", _MX, **_THREE, wire=_THREE["gradients"], **_MX_REST),
)  # fmt: skip


def compare(recipes: Sequence[dict]) -> list:
    """The results of several recipes. A line for each, and for the one that is being trained how far it is."""
    shown, lines, results = _Shown(), [], []
    for recipe in recipes:

        def tell(step: int, name: str = recipe["name"]) -> None:
            if step % 20 == 0:
                shown.show([*lines, f"{name:32} {'#' * (step * 20 // STEPS):<20} step {step} of {STEPS}"])

        results.append(evaluate(recipe, tell))
        loss = results[-1].note or f"loss {results[-1].loss:.4f}"
        lines.append(f"{results[-1].name:32} {results[-1].share:7.2%} of float32's bits   {loss}")
        shown.show(lines)
    shown.end(lines)
    return results


class _Shown:
    """Lines that are shown again and again in the same place, in a notebook; elsewhere once, at the end."""

    def __init__(self) -> None:
        try:
            from IPython import get_ipython

            self._shell, self._handle = get_ipython(), None
        except ImportError:
            self._shell = None

    def show(self, lines: list[str]) -> None:
        if self._shell is None:
            return
        from IPython.display import display

        content = {"text/plain": "\n".join(lines)}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def end(self, lines: list[str]) -> None:
        if self._shell is None:
            print("\n".join(lines))
