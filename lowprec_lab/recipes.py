"""Chapter 10: a GPT in FP8: whose scale an operand gets, which layers are converted, and what a step does.

Chapter 08's recipes look at a tensor, find its largest magnitude, and scale by it: two passes over memory before a
number is rounded ("dynamic", or "current", scaling). **Delayed scaling** takes the scale from the steps before: one
pass, whose largest magnitude is kept for the steps to come.

References: NVIDIA Transformer Engine, DelayedScaling (transformer_engine/common/recipe/delayed_scaling.cu, the update
that is not in bulk); torchao/float8/float8_linear_utils.py in pytorch/ao (converting a model); Micikevicius et al., FP8
Formats for Deep Learning, arXiv:2209.05433 (E4M3 forward, E5M2 back); DeepSeek-V3, arXiv:2412.19437 (a relative gap of
the loss to BF16 below 0.25 %).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lowprec_lab import fused
from lowprec_lab.blanks import blank
from lowprec_lab.float8_linear import (  # noqa: F401 (answers find transpose here)
    RECIPES,
    CountedProducts,
    Float8Linear,
    Recipe,
    find_recipe,
    float8_linear_backward,
    float8_linear_forward,
    transpose,
    why_not_float8,
)
from lowprec_lab.formats import E4M3, E5M2, Format
from lowprec_lab.quantizer import Quantized, one_nan

DELAYED = "delayed"
NAMES = (*RECIPES, DELAYED)
MULTIPLE = 16  # of what the sizes of a float8 product are on a GPU (chapter 09)


@blank(exercise="10.1", points=3, minutes=30)
def delayed_update(
    history: Tensor, scale: Tensor, fmt: Format, margin: int = 0, algo: str = "max"
) -> tuple[Tensor, Tensor]:
    """What the end of a step does to the largest magnitudes of the last steps, and to the scale of the next one.

    history: float32, (H,), H at least 1. history[0] is this step's; history[1] the oldest, history[H - 1] the one of
    the step before. scale: float32, 0-d, the one in use. fmt: the format that is cast to.
    Returns: (history, scale), new tensors of the same shapes.
    scale: with A the largest of the history ("max") or history[0] ("most_recent"), max_finite * 2^-margin / A, divided
    in float32; the largest float32 where that is infinite. Where A is 0, infinite or NaN (a NaN anywhere makes the
    largest NaN), the scale stays as it is.
    history: the oldest is dropped, this step's becomes the last, and history[0] is 0.
    ValueError for another algo, which lists both.
    """


@blank(exercise="10.2", points=4, minutes=40)
class DelayedScaling:
    """The scale of one tensor of a model, such as the weight of a layer, from step to step.

    history: float32, (length,), zeros at first. scale: float32, 0-d, 1 at first. Both are attributes, and stay the same
    tensors for good: their numbers are changed in place.
    """

    def __init__(self, fmt: Format, length: int = 1024, margin: int = 0, algo: str = "max") -> None:
        """fmt: the format that is cast to, with a sign, a NaN, at most 8 bits. The others: as in `delayed_update`."""

    def quantize(self, x: Tensor, record: bool = True) -> Quantized:
        """The codes of x by the scale that stands, and one scale for the tensor; granularity "tensor".

        x: float32, bfloat16 or float16, any shape. It is converted to float32, multiplied by the scale there, and
        rounded to nearest, ties to even. What is beyond the format, infinity too, saturates; NaN stays NaN.
        record: put the largest magnitude of x into history[0], if it is larger than what is there (a step may quantize
        several batches); NaN wins, and stays. An empty x changes nothing.
        No gradient flows into the result, whose scale does not change any more when this one's does.
        """

    def update(self) -> None:
        """The end of a step: `delayed_update` of history and scale."""

    def state_dict(self) -> dict[str, Tensor]:
        """{"history": ..., "scale": ...}: copies, which later steps do not change."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state_dict` gave. ValueError for a history of another length, with both lengths."""


@blank(exercise="10.3", points=4, minutes=45)
def delayed_linear(
    x: Tensor, weight: Tensor, scalings: tuple[DelayedScaling, DelayedScaling, DelayedScaling], record: bool = True
) -> Tensor:
    """The output of a linear layer whose three tensors are quantized once each, by delayed scales.

    x: (..., K), float32, bfloat16 or float16; weight: (N, K). scalings: of x, of weight and of the gradient of the
    output, in that order; record: what their `quantize` gets. Returns: (..., N), x's dtype.
    The codes of x and of weight that gave the output give the gradients too; that of the output is quantized when it
    arrives, once, for both products. All three products are `float8_matmul`'s; the gradients of x and weight have the
    dtype of the gradient that arrives. A gradient that nobody asks for is not computed.
    """


@blank(exercise="10.4", points=3, minutes=30)
def padded_linear(x: Tensor, weight: Tensor, linear: Callable[[Tensor, Tensor], Tensor], multiple: int = 16) -> Tensor:
    """`linear(x, weight)` for sizes that it does not take: with zeros around, and without what they gave.

    x: (..., K); weight: (N, K). linear: takes matrices (M, K) and (N, K) and returns (M, N); M, K and N have to be
    multiples of `multiple`, for its gradients too. It is called once, with the least such sizes.
    Returns: (..., N), what `linear` would give without that restriction; gradients flow to x and weight.
    """


@blank(exercise="10.5", points=4, minutes=40, unlocks="`lowprec-lab train --precision fp8` converts its model with it.")
def convert_to_float8(model: nn.Module, recipe: str | Recipe, skip: tuple[str, ...] = ("head",)) -> list[str]:
    """Put a layer in 8 bits in the place of every linear layer of a model, in the model itself.

    recipe: a Recipe, or one of `NAMES`. skip: layers with one of these texts in their name stay.
    A linear layer is an nn.Linear itself, not an object of a subclass. In its place comes `float8_layer(it, recipe)`,
    which has the same parameters. A layer that stands in several places is converted once, and stands in all of them;
    it stays if one of its names is to be skipped.
    Returns: the names of the layers that were converted, the first for each, in the order of `named_modules`.
    ValueError, and nothing is changed, for an unknown recipe (with the names of all), and for a model that is itself a
    linear layer, which cannot be replaced in itself.
    """


@blank(exercise="10.6", points=4, minutes=45)
def training_step(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    scalings: Sequence[DelayedScaling] = (),
    clip: float = 1.0,
) -> tuple[float, float]:
    """One step of training: gradients of several batches, clipped together, used once; then the scales move on.

    model: `model(x, y)` returns (logits, loss). batches: (x, y) pairs, at least one; the gradient is that of the mean
    of their losses, and of nothing that was there before. clip: gradients whose norm, all together, is above it are
    scaled down to it, to five digits (0: never). optimizer: has all parameters of the model.
    It steps only if that norm is finite. In either case no parameter keeps a gradient, and after that every one of the
    scalings is updated, once.
    Returns: (the mean loss, the norm before clipping).
    """


@blank(exercise="10.7", points=2, minutes=20)
def loss_gap(run: tuple[tuple[int, float], ...], baseline: tuple[tuple[int, float], ...]) -> tuple[float, float]:
    """How far one way to train ends above another one, as a share of the loss, and how sure that is.

    run, baseline: (seed, last validation loss) of each run, in any order. Runs of the same seed saw the same batches,
    and are compared with each other: run / baseline - 1. Seeds that only one of them has are left out.
    Returns: (mean of those shares, its standard error: their sample standard deviation over the root of their number;
    NaN for a single one), in float64. ValueError where no seed is in both.
    """


# --- scenarios: what a check drives an answer with, beside plain calls ------------------------------------------------


def steps_of(function: Callable, amaxes: Tensor, length: int, fmt: Format, margin: int, algo: str) -> Tensor:
    """The scale that each step casts with, by an update after every one. amaxes: (steps,), what each step records."""
    history, scale, used = torch.zeros(length), torch.tensor(1.0), []
    for amax in amaxes:
        used.append(scale)
        history[0] = amax
        history, scale = function(history.clone(), scale, fmt, margin, algo)
    return torch.stack(used)


def update_refuses(function: Callable, algo: str, length: int) -> str:
    """In words: the error of an update by this algo, and which ones its text lists."""
    try:
        function(torch.ones(length), torch.tensor(1.0), E4M3, 0, algo)
    except ValueError as error:
        listed = [name for name in ("max", "most_recent") if f"{name}" in str(error).replace(repr(algo), "")]
        return f"ValueError that lists {' and '.join(listed) or 'nothing'}"
    return "no error"


def scaling_steps(
    function: Callable, x: Tensor, record: str, fmt: Format, length: int, margin: int, algo: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, the scale of each quantized batch, the history after each update) of a DelayedScaling.

    x: (steps, batches, n). record: "r" or "-" for each batch of a step, whether it is recorded. All codes that mean NaN
    become one of them.
    """
    made = function(fmt, length, margin, algo)
    codes, scales, histories = [], [], []
    for step in x:
        for batch, recorded in zip(step, record, strict=True):
            q = made.quantize(batch.clone(), recorded == "r")
            codes.append(one_nan(q.codes, fmt))
            scales.append(q.scale.clone())
        made.update()
        histories.append(made.history.clone())
    return torch.stack(codes).reshape(x.shape), torch.stack(scales).reshape(x.shape[:2]), torch.stack(histories)


def scaling_resumed(
    function: Callable, before: Tensor, after: Tensor, fmt: Format, length: int, margin: int, algo: str
) -> tuple[Tensor, Tensor]:
    """(scale, history) after each step of `after`, of a DelayedScaling that goes on where another stood after `before`.

    Between the two the first one lives on, for as many steps as its history is long.
    """
    first, second = (function(fmt, length, margin, algo) for _ in range(2))
    for x in before:
        _one_step(first, x)
    state = first.state_dict()
    for _ in range(length):
        _one_step(first, torch.tensor([7.0]))
    scale, history, rows = second.scale, second.history, []
    second.load_state_dict(state)
    for x in after:
        _one_step(second, x)
        rows.append((scale.clone(), history.clone()))  # those of the beginning: they stay the same tensors
    return torch.stack([each for each, _ in rows]), torch.stack([each for _, each in rows])


def _one_step(scaling: DelayedScaling, x: Tensor) -> None:
    scaling.quantize(x.clone())
    scaling.update()


def scaling_facts(function: Callable, fmt: Format, length: int, dtype: torch.dtype) -> tuple[str, ...]:
    """What can be seen of a DelayedScaling in two steps, in words. length: 0 leaves it out, and margin and algo too."""
    made = function(fmt, length) if length else function(fmt)
    history, scale = made.history, made.scale
    new = bool((history == 0).all()) and float(scale) == 1.0
    q = made.quantize(torch.full((2, 3), 0.5, dtype=dtype, requires_grad=True))
    kind = f"{q.granularity!r} of {_short(q.dtype)}, codes {_short(q.codes.dtype)} {tuple(q.codes.shape)}"
    made.update()
    kept = float(q.scale) == 1.0
    state = made.state_dict()
    was = state["scale"].clone(), state["history"].clone()
    _one_step(made, torch.tensor([8.0]))
    same = made.history is history and made.scale is scale
    stays = torch.equal(was[0], state["scale"]) and torch.equal(was[1], state["history"])
    made.quantize(torch.empty(0, 4, dtype=dtype))
    first = f"{_short(history.dtype)} {tuple(history.shape)} and {_short(scale.dtype)} {tuple(scale.shape)}"
    return (
        f"history and scale {first}, {'0 and 1' if new else 'others than 0 and 1'} at first",
        kind,
        f"history and scale are {'the same tensors' if same else 'new tensors'} after a step",
        f"a gradient is {'kept' if made.history.requires_grad or q.scale.requires_grad else 'not kept'}",
        f"the scale of a result {'stays' if kept else 'changes'}",
        f"a state {'stays' if stays else 'changes'}",
        f"history[0] is {float(made.history[0]):g} after an empty tensor",
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def scaling_refuses(function: Callable, length: int, other: int) -> str:
    """In words: the error for a state whose history is of another length, and which lengths its text has."""
    try:
        function(E4M3, length).load_state_dict(function(E4M3, other).state_dict())
    except ValueError as error:
        listed = [str(each) for each in (length, other) if str(each) in str(error)]
        return f"ValueError with {' and '.join(listed) or 'neither length'}"
    except RuntimeError:
        return "RuntimeError"
    return "no error"


def delayed_step(
    function: Callable, x: Tensor, weight: Tensor, gradient: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, gradient of x, gradient of weight) of a delayed_linear, with these three scales; 0 where none arrives.

    Between forward and backward all scales become four times as large, as if an update had come too early.
    """
    scalings = _told_scalings(scales)
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    output = function(x, weight, scalings)
    for scaling in scalings[:2]:
        scaling.scale *= 4
    if not output.requires_grad:
        return output, torch.zeros_like(x), torch.zeros_like(weight)
    found = torch.autograd.grad(output, (x, weight), gradient.to(output.dtype), allow_unused=True)
    return output.detach(), *(
        torch.zeros_like(leaf) if each is None else each for leaf, each in zip((x, weight), found, strict=True)
    )


def delayed_casts(function: Callable, rows: int, record: bool, frozen: str) -> str:
    """In words: how often each scaling was asked to quantize, forward and backward, and how many products ran backward.

    frozen: "x", "weight" or "": which of the two needs no gradient.
    """
    scalings = _told_scalings(torch.ones(3))
    x, weight = torch.ones(rows, 2, requires_grad=frozen != "x"), torch.ones(3, 2, requires_grad=frozen != "weight")
    output = function(x, weight, scalings, record)
    forward = _casts_told(scalings)
    with CountedProducts() as seen:
        output.sum().backward()
    arrived = [name for name, each in (("x", x), ("weight", weight)) if each.grad is not None]
    return (
        f"forward {forward}; then {_casts_told(scalings)}; {seen.count} products backward, "
        f"gradients of {' and '.join(arrived) or 'nothing'}"
    )


def _told_scalings(scales: Tensor) -> tuple[_ToldScaling, ...]:
    return tuple(_ToldScaling(fmt, scale.clone()) for fmt, scale in zip((E4M3, E4M3, E5M2), scales, strict=True))


def _casts_told(scalings: Sequence[_ToldScaling]) -> str:
    names = ("x", "weight", "grad_output")
    told = [f"{name} {' '.join(each.casts) or 'none'}" for name, each in zip(names, scalings, strict=True)]
    return ", ".join(told)


class _ToldScaling:
    """A DelayedScaling that writes down what happens to it, and whose numbers are given ones."""

    def __init__(self, fmt: Format, scale: Tensor, say: Callable[[], None] = lambda: None) -> None:
        self.fmt, self.scale, self.history = fmt, scale, torch.zeros(4)
        self.casts: list[str] = []
        self.update = say

    def quantize(self, x: Tensor, record: bool = True) -> Quantized:
        self.casts.append("recorded" if record else "cast")
        codes = fused.encode_(x.detach().float().contiguous() * self.scale, self.fmt)
        return Quantized(codes, self.scale.clone(), self.fmt, "tensor", x.dtype)


def padded_step(
    function: Callable, x: Tensor, weight: Tensor, gradient: Tensor, multiple: int
) -> tuple[str, Tensor, Tensor, Tensor]:
    """(what `linear` was given, in words; output; gradient of x; gradient of weight) of a padded_linear.

    Where `linear` refuses its operands, the rest is NaN. A gradient that does not arrive is 0.
    """
    said: list[str] = []

    def linear(a: Tensor, b: Tensor) -> Tensor:
        if a.dim() != 2 or b.dim() != 2 or any(size % multiple for size in (*a.shape, *b.shape)):
            said.append(f"refused {tuple(a.shape)} and {tuple(b.shape)}")
            raise _RefusedError
        counts = (int((padded != 0).sum()) - int((own != 0).sum()) for padded, own in ((a, x), (b, weight)))
        said.append(f"{tuple(a.shape)} and {tuple(b.shape)}, {'zeros' if not any(counts) else 'other numbers'} around")
        return a @ b.T

    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    shape = (*x.shape[:-1], len(weight))
    try:
        output = function(x, weight, linear, multiple)
    except _RefusedError:
        nothing = (torch.full(each, torch.nan) for each in (shape, x.shape, weight.shape))
        return "; ".join(said), *nothing
    found = (None, None)
    if output.requires_grad and output.shape == shape:
        found = torch.autograd.grad(output, (x, weight), gradient, allow_unused=True)
    gradients = (torch.zeros_like(a) if b is None else b for a, b in zip((x, weight), found, strict=True))
    return "; ".join(said) or "nothing", output.detach(), *gradients


class _RefusedError(Exception):
    """What a product says of sizes that it does not take."""


def converted(function: Callable, kind: str, recipe: str, *skip: str) -> tuple[str, ...]:
    """In words: what comes back from converting a model of a kind, the layers in it, its parameters, its ties.

    kind: one of `MODELS`. recipe: a name, or "your own" for a Recipe that is in no list. skip: nothing for the default;
    "nothing" for an empty tuple.
    """
    model = MODELS[kind]()
    names, parameters = list(model.state_dict()), list(model.parameters())
    with _stand_ins():
        try:
            given = {"skip": () if skip == ("nothing",) else skip} if skip else {}
            found = function(model, _OWN_RECIPE if recipe == _OWN_RECIPE.name else recipe, **given)
            said = "converted " + (", ".join(map(str, found)) or "nothing")
        except ValueError as error:
            listed = [name for name in NAMES if name in str(error)]
            said = "ValueError" + (f" that lists {', '.join(listed)}" if listed else "")
    layers = {
        name: layer for name, layer in model.named_modules(remove_duplicate=False) if isinstance(layer, nn.Linear)
    }
    objects = list(dict.fromkeys(layers.values()))
    same = len(parameters) == len(list(model.parameters())) and all(
        one is other for one, other in zip(model.parameters(), parameters, strict=False)
    )
    return (
        said,
        "; ".join(f"{name or 'itself'} {objects.index(layer) + 1} {_kind_of(layer)}" for name, layer in layers.items()),
        f"parameters: {'the same ones' if same and list(model.state_dict()) == names else 'other ones'}",
    )


_OWN_RECIPE = replace(RECIPES["rowwise"], name="your own")


def _kind_of(layer: nn.Module) -> str:
    if isinstance(layer, DelayedLinear):
        return DELAYED
    if isinstance(layer, (PaddedLinear, _StandIn)):
        return f"{'padded ' if isinstance(layer, PaddedLinear) else ''}{layer.recipe.name}"
    return "nn.Linear" if type(layer) is nn.Linear else "a subclass"


class _StandIn(nn.Linear):
    """In the place of a Float8Linear while conversion is judged: of no interest is what it computes."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe) -> _StandIn:
        layer = cls(1, 1, bias=False)
        layer.weight, layer.bias, layer.recipe = linear.weight, linear.bias, recipe
        return layer.train(linear.training)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """No exercise is needed for a layer: a mistake in one of them costs once."""
    here = globals()
    before = here["Float8Linear"], here["DelayedScaling"]
    here["Float8Linear"], here["DelayedScaling"] = _StandIn, lambda fmt: _ToldScaling(fmt, torch.tensor(1.0))
    try:
        yield
    finally:
        here["Float8Linear"], here["DelayedScaling"] = before


class _Own(nn.Linear):
    """A linear layer that somebody changed."""


def _nested() -> nn.Module:
    inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.ModuleDict({"head_of_block": nn.Linear(32, 16)}))
    return nn.ModuleDict(
        {"first": nn.Linear(16, 16), "inner": inner, "head": nn.Linear(16, 17), "ahead": nn.Linear(8, 16)}
    )


def _tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(32, 16), "body": nn.Linear(16, 16), "out": nn.Linear(16, 32)})
    model["out"].weight = model["embedding"].weight
    return model


def _shared() -> nn.Module:
    layer, block = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    return nn.ModuleDict({"up": layer, "block": block, "again": layer, "last": nn.Linear(16, 48), "twice": block})


def _shared_with_head() -> nn.Module:
    layer = nn.Linear(16, 16)
    return nn.ModuleDict({"up": layer, "other": nn.Linear(16, 16), "head": nn.ModuleList([layer])})


def _with_subclasses() -> nn.Module:
    return nn.ModuleDict({"own": _Own(16, 16), "plain": nn.Linear(16, 16), "attention": nn.MultiheadAttention(16, 2)})


# Models that are converted in checks, by what is special about them.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "nested": _nested,
    "tied": _tied,
    "shared": _shared,
    "shared with the head": _shared_with_head,
    "subclasses": _with_subclasses,
    "no linear layer": lambda: nn.Sequential(nn.Embedding(4, 16), nn.GELU()),
    "a linear layer": lambda: nn.Linear(16, 16),
    "a changed linear layer": lambda: _Own(16, 16),
}


def steps_told(function: Callable, x: Tensor, scalings: int, clip: float) -> tuple[str, ...]:
    """In words, for each step: what happened in which order, what was returned, and whether gradients are left.

    x: (steps, batches, n): the gradient that each batch has.
    """
    return tuple(_train(function, x, scalings, clip)[0])


def gradients_used(function: Callable, x: Tensor, scalings: int, clip: float) -> Tensor:
    """(steps, n): the gradient that the optimizer found in each step; NaN where it was not asked to step."""
    return _train(function, x, scalings, clip)[1]


def _train(function: Callable, x: Tensor, scalings: int, clip: float) -> tuple[list[str], Tensor]:
    log: list[str] = []
    model = _ToldModel(x.shape[-1], log)
    optimizer = _ToldOptimizer(model.parameters(), log)
    made = [
        _ToldScaling(E4M3, torch.tensor(1.0), functools.partial(log.append, f"update {k + 1}")) for k in range(scalings)
    ]
    told, used = [], []
    for number, step in enumerate(x):
        log.clear()
        optimizer.found = torch.full(step.shape[1:], torch.nan)
        if number % 2:  # somebody has left gradients behind
            for each in model.used():
                each.grad = torch.ones_like(each)
        batches = [(batch, torch.tensor(place)) for place, batch in enumerate(step, start=1)]
        result = function(model, batches, optimizer, made, clip)
        left = any(each.grad is not None and bool(each.grad.any()) for each in model.parameters())
        told.append(f"{', '.join(log)}; {_returned(result)}{'; a gradient is left' if left else ''}")
        used.append(optimizer.found)
    return told, torch.stack(used)


def _returned(result: object) -> str:
    if not (type(result) is tuple and len(result) == 2):
        return "no pair is returned"
    return " and ".join(
        f"{name} {value:.5g}" if isinstance(value, float) else f"a {type(value).__name__} for the {name}"
        for name, value in zip(("loss", "norm"), result, strict=True)
    )


class _ToldModel(nn.Module):
    """A loss whose gradient is x: the sum of x times n weights, two parameters that are all 1. A third is not used."""

    def __init__(self, n: int, log: list[str]) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))
        self.one, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(n - 2, 1))
        self.log = log

    def used(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.one, self.other

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.log.append(f"batch {int(y)}")
        products = torch.cat([each.flatten() for each in self.used()]) * x
        return products, products.sum()


class _ToldOptimizer(torch.optim.Optimizer):
    """Writes down each step and what it found in it, and changes nothing.

    What torch's own class does when it is made, and when it clears gradients, loads torch's compiler: seconds, of those
    that a check may take.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], log: list[str]) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.state, self.defaults, self.log = {}, {}, log

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.grad = None if set_to_none or each.grad is None else torch.zeros_like(each)

    def step(self, closure: object = None) -> None:
        self.log.append("step")
        found = [each.grad for group in self.param_groups for each in group["params"]][1:]
        if all(each is not None for each in found):
            self.found = torch.cat([each.detach().flatten() for each in found])


# --- given: layers ----------------------------------------------------------------------------------------------------


def float8_linear(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """What chapter 08's layer computes, as a function: x (..., K), weight (N, K) -> (..., N), x's dtype."""
    return _Products.apply(x, weight, recipe)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return float8_linear_forward(x, weight, recipe)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:2]
        return *float8_linear_backward(gradient, *ctx.saved_tensors, ctx.recipe, needs), None


class _Converted(nn.Linear):
    """A linear layer that computes its product in another way, with the parameters of the one whose place it takes."""

    @classmethod
    def _of(cls, linear: nn.Linear) -> nn.Linear:
        with torch.device("meta"):  # no memory for weights that are replaced at once
            layer = cls(linear.in_features, linear.out_features, linear.bias is not None)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features). Returns: x's dtype, or autocast's where that is on; (..., out_features)."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):  # the operands have their casts already
            product = self._product
            if self.in_features % MULTIPLE or self.out_features % MULTIPLE:
                output = padded_linear(x, self.weight, product, MULTIPLE)
            else:
                output = product(x, self.weight)
        output = output.to(dtype)
        return output if self.bias is None else output + self.bias.to(dtype)


class PaddedLinear(_Converted):
    """Chapter 08's layer for sizes that do not divide by 16: zeros around its operands. recipe: a Recipe."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: str | Recipe) -> PaddedLinear:
        """A layer with the very parameters of `linear`."""
        layer = cls._of(linear)
        layer.recipe = find_recipe(recipe)
        return layer

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return float8_linear(x, weight, self.recipe)


class DelayedLinear(_Converted):
    """A linear layer with delayed scales: E4M3 for input and weight, E5M2 for the gradient of the output.

    scalings: of the input, of the weight, of that gradient. They record while the layer is in training mode.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> DelayedLinear:
        """A layer with the very parameters of `linear`, and scales that have seen nothing."""
        layer = cls._of(linear)
        layer.scalings = tuple(DelayedScaling(fmt) for fmt in (E4M3, E4M3, E5M2))
        for scaling in layer.scalings:
            scaling.history, scaling.scale = (
                each.to(linear.weight.device) for each in (scaling.history, scaling.scale)
            )
        return layer

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return delayed_linear(x, weight, self.scalings, self.training)


def float8_layer(linear: nn.Linear, recipe: str | Recipe) -> nn.Linear:
    """The layer in 8 bits that takes the place of `linear`, with the very same parameters.

    A DelayedLinear for "delayed"; else chapter 08's Float8Linear; a PaddedLinear where in_features or out_features is
    no multiple of 16. Raises ValueError, with the names that there are, for an unknown recipe.
    """
    if recipe == DELAYED:
        return DelayedLinear.from_linear(linear)
    found = require_recipe(recipe)
    divides = linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0
    return (Float8Linear if divides else PaddedLinear).from_linear(linear, found)


def require_recipe(recipe: str | Recipe) -> Recipe | str:
    """The recipe of that name, or "delayed". Raises ValueError that lists the names for anything else."""
    if recipe == DELAYED:
        return DELAYED
    if not isinstance(recipe, Recipe) and recipe not in RECIPES:
        raise ValueError(f"there is no recipe {recipe!r}. The recipes are: {', '.join(NAMES)}")
    return find_recipe(recipe)


def scalings_of(model: nn.Module) -> dict[str, DelayedScaling]:
    """Every delayed scale of a model, by its layer's name and what it is of: "blocks.0.mlp.up weight"."""
    kinds = ("x", "weight", "grad_output")
    return {
        f"{name} {kind}": scaling
        for name, layer in model.named_modules()
        for kind, scaling in zip(kinds, getattr(layer, "scalings", ()), strict=False)
    }


def too_small(model: nn.Module, recipe: str | Recipe, rows: int) -> list[str]:
    """Names of the linear layers that a GPU is not faster with in 8 bits, by chapter 08's `why_not_float8`.

    rows: the tokens of a step. "delayed" and recipes of your own count as "tensorwise".
    """
    name = recipe if isinstance(recipe, str) and recipe in RECIPES else "tensorwise"
    return [
        layer
        for layer, module in model.named_modules()
        if type(module) is nn.Linear
        and why_not_float8(layer, module.out_features, module.in_features, rows, name) == "too small"
    ]
