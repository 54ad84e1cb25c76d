"""The evaluation of chapter 15: a recipe is data, and this trains a small GPT with it and counts its bits.

Nothing here calls an exercise: whatever a learner's answers do, the same recipe has the same loss and the same bits. A
recipe is a plain dict (as JSON has them); `read_recipe` refuses all others, with a sentence. What a cast does to a
matrix, and what it costs, is written down at the top of `lowprec_lab.capstone`.

What is trained: a GPT of width 64 with two blocks, on sentences made by rule, for STEPS steps of Adam on one thread.
Every linear layer takes its matrices through the recipe's casts, forward and backward; so do the gradient of each
weight on its way to the optimizer, the optimizer's two moments and the weights that it keeps. Norms (320 numbers) and
the products inside attention stay float32 and are not counted.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowprec_lab import fused
from lowprec_lab.capstone import BATCH, FORMATS, INTEGERS, ROLES, SCALE_BITS, SIZE, STEPS, layout
from lowprec_lab.capstone_text import tokens
from lowprec_lab.devices import threads
from lowprec_lab.formats import BF16, E4M3, FP32, TF32, Format
from lowprec_lab.gpt import GPT

ROUNDINGS = ("nearest", "stochastic")
MOST_VALUES = 256
MOST_OVERRIDES = 64
MOST_CHARACTERS = 200_000

PEAK_RATE = 4e-3
_WARMUP = 20
_BETAS = (0.9, 0.99)
_EPS = 1e-8
_SEED = 15


class RecipeError(ValueError):
    """A recipe that cannot be evaluated; the sentence says what is wrong, and what is allowed."""

    def _render_traceback_(self) -> list[str]:
        return [f"RecipeError: {self}"]


# --- reading a recipe -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cast:
    """One cast, read and found right. values: a Format, a whole number of bits ("int4": 4), or a codebook's tuple."""

    values: Format | int | tuple[float, ...]
    block: str | tuple[int, int] = "tensor"
    scale: str = "none"
    clip: float = 1.0
    rounding: str = "nearest"


@dataclass(frozen=True)
class Override:
    """Another cast for a role, in one layer (or all: ""), from one step on and up to before another."""

    role: str
    layer: str
    first: int
    end: int
    cast: Cast


@dataclass(frozen=True)
class Recipe:
    """A recipe, read and found right. overrides: the last one that applies holds."""

    name: str
    casts: dict[str, Cast]
    overrides: tuple[Override, ...] = ()

    def cast(self, role: str, layer: str, step: int) -> Cast:
        """The cast that holds for a matrix at a step."""
        for each in reversed(self.overrides):
            if each.role == role and each.layer in ("", layer) and each.first <= step < each.end:
                return each.cast
        return self.casts[role]


def read_text(text: str) -> Recipe:
    """The recipe that a text of JSON says. Raises RecipeError."""
    if type(text) is not str:
        raise RecipeError(f"a recipe comes as text, not {_kind(text)}")
    if len(text) > MOST_CHARACTERS:
        raise RecipeError(f"the recipe has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    try:
        recipe = json.loads(text)
    except (ValueError, RecursionError):  # also for a whole number with too many digits
        raise RecipeError("the recipe is no JSON: it has to be made of dicts, lists, numbers and strings") from None
    return read_recipe(recipe)


def read_recipe(recipe: object, steps: int = STEPS) -> Recipe:
    """The recipe, read and checked from the first key to the last. Raises RecipeError for everything that is wrong."""
    if type(recipe) is not dict:
        raise RecipeError(f"a recipe is a dict, not {_kind(recipe)}")
    _known_keys(recipe, ("name", *ROLES, "overrides"), "a recipe")
    name = recipe.get("name", "")
    if type(name) is not str or not 1 <= len(name) <= 40:
        raise RecipeError("a recipe has a name: a string of 1 to 40 characters")
    casts = {role: read_cast(recipe.get(role, {"values": "FP32"}), role) for role in ROLES}
    overrides = recipe.get("overrides", [])
    if type(overrides) is not list or len(overrides) > MOST_OVERRIDES:
        raise RecipeError(f"overrides is a list of at most {MOST_OVERRIDES} dicts, not {_kind(overrides)}")
    return Recipe(name, casts, tuple(_read_override(each, at, steps) for at, each in enumerate(overrides)))


def _read_override(given: object, at: int, steps: int) -> Override:
    where = f"overrides[{at}]"
    if type(given) is not dict:
        raise RecipeError(f"{where} is {_kind(given)}; it has to be a dict")
    _known_keys(given, ("role", "layer", "from", "to", "cast"), where)
    role, layer = given.get("role"), given.get("layer", "")
    if role not in ROLES:
        raise RecipeError(f"{where}: role is one of {', '.join(ROLES)}, not {_shown(role)}")
    known = layout()[role]
    if layer != "" and layer not in known:
        raise RecipeError(f"{where}: {role} has no layer {_shown(layer)}. Its layers are: {', '.join(known)}")
    first, end = given.get("from", 0), given.get("to", steps)
    for step in (first, end):
        if type(step) is not int or not 0 <= step <= steps:
            raise RecipeError(f"{where}: a step is a whole number from 0 to {steps}, not {_shown(step)}")
    if first >= end:
        raise RecipeError(f"{where}: it goes from step {first} to before step {end}, which is no step at all")
    return Override(role, layer, first, end, read_cast(given.get("cast"), f"{where}.cast"))


def read_cast(given: object, where: str = "the cast") -> Cast:
    """A cast, read and checked. Raises RecipeError; where: what the sentence calls it."""
    if type(given) is not dict:
        raise RecipeError(f"{where} is {_kind(given)}; a cast is a dict with at least 'values'")
    _known_keys(given, ("values", "block", "scale", "clip", "rounding"), where)
    if "values" not in given:
        raise RecipeError(f"{where} has no 'values': the name of a format, 'int2' to 'int8', or a list of numbers")
    values = _read_values(given["values"], where)
    scale = given.get("scale", "none")
    if type(scale) is not str or scale not in SCALE_BITS:
        raise RecipeError(f"{where}: scale is one of {', '.join(SCALE_BITS)}, not {_shown(scale)}")
    if type(values) is int and scale == "none":
        raise RecipeError(f"{where}: whole numbers need a scale. Choose one of {', '.join(list(SCALE_BITS)[1:])}")
    if scale != "none" and values in (FP32, TF32, BF16):
        raise RecipeError(f"{where}: {given['values']} has the range of float32, and takes no scale")
    if scale == "none" and ("block" in given or "clip" in given):
        raise RecipeError(f"{where}: block and clip belong to a scale, and there is none")
    clip = given.get("clip", 1.0)
    if type(clip) not in (int, float) or not 0 < clip <= 1:
        raise RecipeError(f"{where}: clip is a number above 0, at most 1, not {_shown(clip)}")
    rounding = given.get("rounding", "nearest")
    if type(rounding) is not str or rounding not in ROUNDINGS:
        raise RecipeError(f"{where}: rounding is nearest or stochastic, not {_shown(rounding)}")
    return Cast(values, _read_block(given.get("block", "tensor"), where), scale, float(clip), rounding)


def _read_values(values: object, where: str) -> Format | int | tuple[float, ...]:
    if type(values) is str:
        if values in FORMATS:
            return FORMATS[values]
        if values in INTEGERS:
            return int(values[3:])
        raise RecipeError(f"{where}: there are no values {_shown(values)}. Known: {', '.join((*FORMATS, *INTEGERS))}")
    if type(values) is not list or not 2 <= len(values) <= MOST_VALUES:
        count = f"a list of {len(values):,}" if type(values) is list else _kind(values)
        raise RecipeError(f"{where}: a codebook is a list of 2 to {MOST_VALUES} numbers, not {count}")
    if not all(type(each) in (int, float) and abs(each) < 2.0**127 for each in values):  # NaN is not below either
        raise RecipeError(f"{where}: a codebook has finite numbers, of magnitudes below 2^127, and nothing else")
    singles = torch.tensor([float(each) for each in values], dtype=torch.float32)
    if not bool((singles[1:] > singles[:-1]).all()):
        raise RecipeError(f"{where}: a codebook's numbers go up, each above the last one (as float32)")
    return tuple(singles.tolist())


def _read_block(block: object, where: str) -> str | tuple[int, int]:
    if type(block) is str and block in ("tensor", "row", "column"):
        return block
    sizes = block if type(block) is list and len(block) == 2 else []
    if not sizes or not all(type(each) is int and 1 <= each <= 2**16 for each in sizes):
        raise RecipeError(
            f"{where}: block is 'tensor', 'row', 'column' or [rows, columns], two whole numbers from 1 on, "
            f"not {_shown(block)}"
        )
    return sizes[0], sizes[1]


def _known_keys(given: dict, known: tuple[str, ...], where: str) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise RecipeError(f"{where} has no key {_shown(unknown[0])}. Its keys are: {', '.join(known)}")


def _kind(value: object) -> str:
    return "nothing (None)" if value is None else f"of type {type(value).__name__}"


def _shown(value: object) -> str:
    text = re.sub(r"[^\x20-\x7e]", "?", repr(value)[:200])
    return text if len(text) <= 40 else text[:39] + "..."


# --- what it costs ----------------------------------------------------------------------------------------------------


def cast_bits(cast: Cast, rows: int, columns: int) -> int:
    """What a matrix of this shape takes: its codes, its scales, its codebook."""
    if isinstance(cast.values, Format):
        each, book = cast.values.width, 0
    elif isinstance(cast.values, int):
        each, book = cast.values, 0
    else:
        each, book = (len(cast.values) - 1).bit_length(), 32 * len(cast.values)
    if cast.scale == "none":
        return rows * columns * each + book
    height, width = block_of(cast.block, rows, columns)
    blocks = -(-rows // height) * -(-columns // width)
    return rows * columns * each + book + blocks * SCALE_BITS[cast.scale] + (32 if cast.scale == "e4m3" else 0)


def block_of(block: str | tuple[int, int], rows: int, columns: int) -> tuple[int, int]:
    """The rows and columns of a block."""
    named = {"tensor": (rows, columns), "row": (1, columns), "column": (rows, 1)}
    return named[block] if isinstance(block, str) else block


def count_bits(recipe: Recipe, shapes: Mapping | None = None, steps: int = STEPS) -> dict[str, int]:
    """For each role the bits of all its matrices in all steps."""
    shapes = layout() if shapes is None else shapes
    cost = functools.cache(cast_bits)
    return {
        role: sum(cost(recipe.cast(role, layer, step), *shape)
                  for layer, shape in shapes[role].items() for step in range(steps))
        for role in ROLES
    }  # fmt: skip


def share_of_float32(bits: Mapping[str, int]) -> float:
    """The score: all bits, divided by what float32 takes for the same."""
    whole = 32 * STEPS * sum(rows * columns for role in ROLES for rows, columns in layout()[role].values())
    return sum(bits.values()) / whole


# --- what it does -----------------------------------------------------------------------------------------------------


def apply(cast: Cast, x: Tensor, noise: Callable[[tuple[int, ...]], Tensor] | None = None) -> Tensor:
    """A float32 matrix after the cast: what its codes and scales stand for, in float32.

    noise: gives float32 numbers from [0, 1) of a shape, for stochastic rounding.
    """
    if cast.values is FP32:
        return x
    if cast.scale == "none":
        return _to_grid(cast, x, noise)
    rows, columns = x.shape
    height, width = block_of(cast.block, rows, columns)
    padded = F.pad(x, (0, -columns % width, 0, -rows % height)) if columns % width or rows % height else x
    blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    amax = blocks.abs().amax(3, keepdim=True)
    amax = amax.amax(1, keepdim=True) if height > 1 else amax
    scale = _stored(amax * cast.clip / _top(cast.values), cast.scale)
    wide = (blocks / torch.where(scale > 0, scale, 1.0)).reshape(padded.shape)  # 0 times whatever comes out is 0
    values = _to_grid(cast, wide[:rows, :columns], noise)
    values = F.pad(values, (0, -columns % width, 0, -rows % height)) if padded is not x else values
    return (values.reshape(blocks.shape) * scale).reshape(padded.shape)[:rows, :columns]


def _top(values: Format | int | tuple[float, ...]) -> float:
    if isinstance(values, Format):
        return fused._largest(values)[1]
    return float(2 ** (values - 1) - 1) if isinstance(values, int) else max(abs(each) for each in values)


def _stored(scale: Tensor, how: str) -> Tensor:
    """The scales, as they come back from where they are stored."""
    if how == "bfloat16":
        return scale.bfloat16().float()
    if how == "e8m0":
        above = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # from 2^-126 on
        return torch.where(scale > 2.0**-127, above, torch.where(scale > 0, 2.0**-127, 0.0))
    if how == "e4m3":
        second = scale.amax() / 448
        return torch.where(second > 0, _nearest(scale / second, E4M3) * second, 0.0)
    return scale


def _to_grid(cast: Cast, x: Tensor, noise: Callable | None) -> Tensor:
    values = cast.values
    if cast.rounding == "nearest":
        if isinstance(values, Format):
            return _nearest(x, values)
        if isinstance(values, int):
            return x.round().clamp(-_top(values), _top(values))
        book, middles = _book(values)
        return book[torch.bucketize(x.double(), middles)]
    x = _inside(values, x)
    low, high = _neighbours(values, x)
    return torch.where(noise(x.shape) < (x - low) / (high - low), high, low)


def _nearest(x: Tensor, fmt: Format) -> Tensor:
    x = x.clamp(-_top(fmt), _top(fmt))
    if fmt.width == 16:
        return x.to(fmt.torch_dtype).to(torch.float32)
    step = _step(fmt, x)  # torch's own conversions to 8 bits are slower than this
    return (x / step).round() * step  # a step is a power of two: only the round is not exact


def _inside(values: Format | int | tuple[float, ...], x: Tensor) -> Tensor:
    return x.clamp(values[0], values[-1]) if isinstance(values, tuple) else x.clamp(-_top(values), _top(values))


def _neighbours(values: Format | int | tuple[float, ...], x: Tensor) -> tuple[Tensor, Tensor]:
    """The value at or below each number, and the next one above that; for the largest the last two."""
    if isinstance(values, Format):
        step = _step(values, x)
        low = (x / step).floor() * step
        return low, low + step
    if isinstance(values, int):
        return x.floor(), x.floor() + 1
    book, _ = _book(values)
    at = (torch.bucketize(x, book, right=True) - 1).clamp(max=len(book) - 2)
    return book[at], book[at + 1]


def _step(fmt: Format, x: Tensor) -> Tensor:
    """The distance of a format's values around each number, a power of two."""
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=2.0 ** (1 - fmt.bias))
    return binade * 2.0**-fmt.mantissa_bits


@functools.lru_cache(maxsize=256)
def _book(values: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """The codebook, and half-way between its neighbours, in float64. A tie goes to the lower value."""
    book = torch.tensor(values, dtype=torch.float32)
    return book, (book[1:].double() + book[:-1].double()) / 2


# --- the training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What an evaluation found.

    loss: on text that was not trained on; NaN when it diverged. bits: by role, in all steps. share: of float32's bits.
    history: the loss of every step. note: why it ended early, or "".
    """

    name: str
    loss: float
    bits: dict[str, int]
    share: float
    history: tuple[float, ...]
    note: str = ""


class _Casts:
    """The casts of a recipe at the step that is being trained, each with noise of its own."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.step = recipe, 0
        self._at = {place: at for at, place in enumerate((role, layer) for role in ROLES for layer in layout()[role])}

    def __call__(self, role: str, layer: str, x: Tensor) -> Tensor:
        cast = self.recipe.cast(role, layer, self.step)
        place = self.step * len(self._at) + self._at[role, layer]
        return apply(cast, x, lambda shape: torch.rand(shape, generator=torch.Generator().manual_seed(place)))


class _Product(torch.autograd.Function):
    """x @ weight^T, with the casts of a recipe on x and on the gradient that comes back."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, casts: _Casts, layer: str) -> Tensor:
        x = casts("activations", layer, x)
        ctx.save_for_backward(x, weight)
        ctx.casts, ctx.layer = casts, layer
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        gradient = ctx.casts("gradients", ctx.layer, gradient)
        return gradient @ weight, gradient.t() @ x, None, None


class _Linear(nn.Module):
    """A linear layer whose matrices go through a recipe's casts. Without casts it is an ordinary one."""

    def __init__(self, weight: nn.Parameter, layer: str) -> None:
        super().__init__()
        self.weight, self.layer, self.casts = weight, layer, None

    def forward(self, x: Tensor) -> Tensor:
        if self.casts is None:
            return x @ self.weight.t()
        return _Product.apply(x.flatten(0, -2), self.weight, self.casts, self.layer).unflatten(0, x.shape[:-1])


def _model(casts: _Casts) -> tuple[GPT, dict[str, nn.Parameter]]:
    """The model with its first weights, and its matrices by the names of `layout`."""
    with torch.random.fork_rng(devices=[]):
        model = GPT(SIZE)
    generator = torch.Generator().manual_seed(_SEED)
    for name, each in model.named_parameters():
        if each.dim() == 2:
            added_up = name.endswith(("attention.out.weight", "mlp.down.weight"))
            nn.init.normal_(each, std=0.02 / (math.sqrt(2 * SIZE.layers) if added_up else 1), generator=generator)
    model.head = _Linear(model.head.weight, "head")
    for at, block in enumerate(model.blocks):
        for owner, name in ((block.attention, "qkv"), (block.attention, "out"), (block.mlp, "up"), (block.mlp, "down")):
            setattr(owner, name, _Linear(getattr(owner, name).weight, f"{at}.{name}"))
    linear = {each.layer: each for each in model.modules() if isinstance(each, _Linear)}
    for each in linear.values():
        each.casts = casts
    return model, {**{n: each.weight for n, each in linear.items()}, "positions": model.position_embedding.weight}


class _Adam:
    """Adam on one matrix or norm, whose moments and weights come back from their casts after every step."""

    def __init__(self, parameter: nn.Parameter, layer: str, casts: _Casts) -> None:
        self.parameter, self.layer, self._casts = parameter, layer, casts
        self.master = self._cast("master", parameter.detach().clone())
        self.first, self.second = torch.zeros_like(parameter), torch.zeros_like(parameter)
        self.show()

    def _cast(self, role: str, x: Tensor) -> Tensor:
        return self._casts(role, self.layer, x) if self.layer else x

    def show(self) -> None:
        """Give the model its weights, cast for its products."""
        self.parameter.data = self._cast("weights", self.master)

    def step(self, rate: float, count: int) -> None:
        gradient = self._cast("wire", self.parameter.grad)
        first = self.first * _BETAS[0] + gradient * (1 - _BETAS[0])
        second = self.second * _BETAS[1] + gradient * gradient * (1 - _BETAS[1])
        self.first, self.second = self._cast("moment1", first), self._cast("moment2", second)
        slope = self.first / (1 - _BETAS[0] ** count)
        size = (self.second / (1 - _BETAS[1] ** count)).sqrt() + _EPS
        self.master = self._cast("master", self.master - slope / size * rate)
        self.parameter.grad = None


def _batch(step: int) -> tuple[Tensor, Tensor]:
    text = tokens("train")
    starts = torch.randint(len(text) - SIZE.context, (BATCH,), generator=torch.Generator().manual_seed(1_000 + step))
    x = torch.stack([text[at : at + SIZE.context + 1] for at in starts.tolist()])
    return x[:, :-1], x[:, 1:]


@torch.no_grad()
def _validation_loss(model: GPT, optimizers: list[_Adam]) -> float:
    """On 256 pieces of other text, with the casts of the last step on weights and activations."""
    for each in optimizers:
        each.show()
    text = tokens("validation")[: 256 * SIZE.context + 1]
    x, y = text[:-1].view(-1, BATCH, SIZE.context), text[1:].view(-1, BATCH, SIZE.context)
    return sum(float(model(*pair)[1].double()) for pair in zip(x, y, strict=True)) / len(x)


def _rate(step: int) -> float:
    return PEAK_RATE * min((step + 1) / _WARMUP, (STEPS - step) / (STEPS - _WARMUP))


def evaluate(recipe: Recipe, progress: Callable[[int], None] | None = None) -> Result:
    """Train with a recipe and count its bits. The same recipe has the same result, to the last bit, on one machine.

    progress: is called with the number of each step. It takes seconds: 2 for float32, up to 15 for casts everywhere.
    """
    with threads(1), torch.enable_grad():
        loss, history, note = _train(recipe, progress)
    bits = count_bits(recipe)
    return Result(recipe.name, loss, bits, share_of_float32(bits), tuple(history), note)


def _train(recipe: Recipe, progress: Callable[[int], None] | None) -> tuple[float, list[float], str]:
    casts, history = _Casts(recipe), []
    model, matrices = _model(casts)
    names = {id(parameter): layer for layer, parameter in matrices.items()}
    optimizers = [_Adam(each, names.get(id(each), ""), casts) for each in model.parameters()]
    for step in range(STEPS):
        casts.step = step
        for each in optimizers:
            each.show()
        loss = model(*_batch(step))[1]
        history.append(float(loss.detach()))
        if not math.isfinite(history[-1]) or history[-1] > 3 * history[0]:
            return math.nan, history, f"it diverged: the loss at step {step} is {history[-1]:.3g}"
        loss.backward()
        for each in optimizers:
            each.step(_rate(step), step + 1)
        if progress:
            progress(step)
    final = _validation_loss(model, optimizers)
    note = "" if math.isfinite(final) else "it diverged in its last step"
    return (final if math.isfinite(final) else math.nan), history, note


_KNOWN: dict[str, Result] = {}
_MOST_KNOWN = 64


def evaluate_text(text: str, progress: Callable[[int], None] | None = None) -> Result:
    """`evaluate` for a recipe as JSON; the result is kept, so that five checks train once. Raises RecipeError."""
    recipe = read_text(text)
    if text not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)))
        _KNOWN[text] = evaluate(recipe, progress)
    return _KNOWN[text]
