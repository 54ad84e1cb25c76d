"""Chapter 05: instruments that say what a tensor, a gradient or a whole model would lose in a format.

An instrument changes nothing, and its own arithmetic hides nothing: exponents come from exponent bits, fractions are
counts, sums of squares are taken in float64.

What holds for `underflow_fraction` and `overflow_fraction`:
- *Counted* are the elements that are finite and not zero, before they are scaled: one that the scale makes zero or
  infinite counts. Signs play no part. With none of them the share is 0.0.
- Each is converted to float32 and multiplied by the scale, one float32 multiplication (the scale is rounded to float32
  first), and the magnitude of that is rounded to the format: to nearest, ties to even.
- It *underflows* when the result is zero. A format without a zero (`fmt.subnormals` is False) loses nothing.
- It *overflows* when what it is rounded to, as if the largest binade went on, lies above the largest finite value (a
  tie that even sends there, too). A product that is infinite in float32 overflows every format.
- ValueError for a scale that is not finite or not above zero.

References: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2 (a histogram of gradients);
Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433; Sun et al., Massive Activations in Large Language
Models, arXiv:2402.17762; Karpathy, CS231n, "Ratio of weights:updates".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lowprec_lab.blanks import blank
from lowprec_lab.formats import Format

LOWEST_EXPONENT, HIGHEST_EXPONENT = -149, 127  # of float32, its subnormals included


@blank(exercise="5.1", points=3, minutes=25, unlocks="The recording of this page counts with it.")
def exponent_histogram(x: Tensor) -> Tensor:
    """How many elements of `x` have which exponent: the e of 2^e <= |x| < 2^(e + 1), exactly.

    x: float32, bfloat16 or float16, any shape. Returns: int64, (277,): place k counts the exponent k - 149, from -149
    (the smallest subnormal of float32) to 127. Subnormals have the exponent of their value, not of their field.
    Zeros, infinities and NaNs have no exponent and are counted nowhere.
    """


@blank(exercise="5.2", points=3, minutes=25)
def underflow_fraction(x: Tensor, fmt: Format, scale: float = 1.0) -> float:
    """The share of the counted elements of `x` that `fmt` would turn into zero; the rules are at the module's top.

    x: float32, bfloat16 or float16, any shape. scale: what each element is multiplied by before it is rounded.
    Returns: float, underflowing / counted elements, two whole numbers divided in Python; 0.0 where none is counted.
    """


@blank(exercise="5.3", points=3, minutes=25)
def overflow_fraction(x: Tensor, fmt: Format, scale: float = 1.0) -> float:
    """The share of the counted elements of `x` that lie beyond `fmt`; the rules are at the module's top.

    x: float32, bfloat16 or float16, any shape. scale: what each element is multiplied by before it is rounded.
    Returns: float, overflowing / counted elements, two whole numbers divided in Python; 0.0 where none is counted.
    """


@blank(exercise="5.4", points=2, minutes=15)
def tensor_report(x: Tensor) -> tuple[float, float, int, int]:
    """What a mean hides: (smallest, largest, zeros, nonfinite).

    x: float64, float32, bfloat16 or float16, any shape. smallest, largest: the smallest and the largest magnitude among
    the elements that are finite and not zero, exactly, as float; 0.0 both where there is none. zeros: how many elements
    are 0.0 or -0.0. nonfinite: how many are infinite or NaN. Both int.
    """


@blank(exercise="5.5", points=3, minutes=25)
def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The length of all gradients together: the root of the sum of the squares of all their elements.

    parameters: any iterable of parameters, a generator too; those whose `.grad` is None are left out. Gradients are
    float32, bfloat16 or float16. Returns: float, right to 24 significant bits (so squares and sums are float64, in any
    order); 0.0 where there is no gradient. Infinities without a NaN give infinity, a NaN gives NaN.
    Nothing is changed: no gradient, no weight.
    """


@blank(exercise="5.6", points=2, minutes=15)
def update_ratio(before: Tensor, after: Tensor) -> float:
    """How far a step moved a weight, relative to its size: the norm of (after - before) over the norm of before.

    before, after: one shape and one dtype (float32, bfloat16 or float16). Returns: float, right to 24 significant bits
    (so the difference, squares and sums are float64, in any order). Where the norm of `before` is 0: 0.0 if nothing
    moved, infinity if something did.
    """


@blank(exercise="5.7", points=5, minutes=50, unlocks="The recording of this page looks into the model with it.")
class Taps:
    """Watch modules of a model: what comes out of each, and the gradient that comes back to that place.

    `with Taps(model, names) as taps:` around forward and backward passes. Inside the block, each call of the module
    called `name` (as in `model.named_modules()`; its output is one tensor) adds one entry to `taps.activations[name]`
    and one to `taps.gradients[name]`: lists in the order of the calls, there and empty from the start. An activation's
    entry is `measure(output)`, taken at once. A gradient's entry is None until the gradient of that call's output
    arrives, and `measure(gradient)` then. measure is handed tensors that are detached from the graph.

    The run is the same bits as without. After the block, however it ends, nothing is watched any more: no call is
    recorded, and the gradient of a backward pass that comes later is not kept. Exceptions go on, and what was kept
    stays. It also works with no gradients (`torch.no_grad`), and where the output is changed in place afterwards.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], measure: Callable = torch.clone) -> None: ...

    def __enter__(self): ...

    def __exit__(self, *error: object) -> None: ...


@blank(exercise="5.8", points=2, minutes=20)
def row_lengths(x: Tensor) -> Tensor:
    """The length of each row (the root of the sum of its squares), with a gradient that is finite everywhere.

    x: float32, (..., n), finite, n from 1 on. Returns: float32, (...). Gradient: x / length, and zeros (of any sign)
    where the length is 0. Both are exact where float32 can hold all that is computed on the way.
    """


# --- scenarios: what a check drives an answer with, beside plain calls ---


def norm_of(function: Callable, *gradients: Tensor | None) -> tuple[float, bool]:
    """(function(parameters) to 24 significant bits, whether all is as it was), for a generator of parameters.

    gradients: what each parameter has for a gradient, a tensor or None. The weights are all 3.
    """
    parameters = [nn.Parameter(torch.full((2,), 3.0) if each is None else _threes(each)) for each in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    result = function(parameter for parameter in parameters)
    same_weights = all(bool((parameter.detach() == 3).all()) for parameter in parameters)
    pairs = zip((parameter.grad for parameter in parameters), gradients, strict=True)
    return _to_24_bits(result), same_weights and all(_same(*pair) for pair in pairs)


def ratio_of(function: Callable, before: Tensor, after: Tensor) -> float:
    """function(before, after) to 24 significant bits."""
    return _to_24_bits(function(before, after))


def gradient_through(function: Callable, x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of x when `gradient` is that of function(x); zeros where none arrives. No zero is negative."""
    x = x.clone().requires_grad_()
    result = function(x)
    if result.requires_grad:
        result.backward(gradient)
    return torch.zeros_like(x) if x.grad is None else x.grad + 0.0


def _to_24_bits(value: object) -> object:
    """A finite float with its significand rounded to 24 bits; everything else as it is."""
    if type(value) is not float or not math.isfinite(value):
        return value
    significand, exponent = math.frexp(value)
    return math.ldexp(round(significand * 2**24), exponent - 24)


def _threes(like: Tensor) -> Tensor:
    return torch.full_like(like, 3.0, memory_format=torch.contiguous_format)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one.double().nan_to_num(7.0), other.double().nan_to_num(7.0))


class _TwoLayers(nn.Module):
    """Two linear layers with a ReLU between them that works in place."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up = nn.Linear(up.shape[1], up.shape[0], bias=False)
        self.bend = nn.ReLU(inplace=True)
        self.down = nn.Linear(down.shape[1], down.shape[0], bias=False)
        self.up.weight.data, self.down.weight.data = up.clone(), down.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.bend(self.up(x)))


_WATCHED = ("up", "down")


def tapped(
    function: Callable, x: Tensor, up: Tensor, down: Tensor, calls: int = 1, how: str = "train"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two linear layers with a ReLU in place between them, watched by `function(model, ("up", "down"), ...)`.

    x: (B, D); up: (H, D) and down: (O, H), the weights. The model is called on x, 2 x, 3 x, ... `calls` times, and half
    of the sum of the squares of all outputs goes backward. how: "train"; "largest" (measure is the largest magnitude);
    "no_grad" (nothing goes backward); "error" (the block ends in a KeyError); "later" (what goes backward does so after
    the block). Then the model is called once more.

    Returns (activations, gradients, counts, run). activations and gradients: all entries of "up", then of "down", flat,
    float32, NaN for what is not there. counts, int64: how many entries the lists have in the block (activations of "up"
    and "down", gradients of both) and after it; how many are tied to the graph; how many errors came through.
    run, float32: the loss and the gradients of both weights.
    """
    model, errors, loss = _TwoLayers(up, down), 0, torch.zeros(())
    taps = function(model, _WATCHED, _largest) if how == "largest" else function(model, _WATCHED)
    try:
        with taps as watching, torch.set_grad_enabled(how != "no_grad"):
            loss = sum((model(x * (call + 1)).square().sum() / 2 for call in range(calls)), start=loss)
            if loss.requires_grad and how != "later":
                loss.backward()
            inside = _lengths(watching)
            if how == "error":
                raise KeyError("the block ends here")
    except KeyError:
        errors = 1
    if how == "later":
        loss.backward()
    model(x)
    kept = (watching.activations, watching.gradients)
    sizes = [1 if how == "largest" else len(x) * len(weight) for weight in (up, down)]
    tied = sum(
        bool(getattr(entry, "requires_grad", False)) for each in kept for name in _WATCHED for entry in each[name]
    )
    counts = torch.tensor([*inside, *_lengths(watching), tied, errors])
    gradients = [_numbers(layer.weight.grad, layer.weight.numel()) for layer in (model.up, model.down)]
    return *(_flat(each, sizes, calls) for each in kept), counts, torch.cat([_numbers(loss, 1), *gradients])


def _largest(value: Tensor) -> Tensor:
    return value.abs().max()


def _lengths(taps: object) -> list[int]:
    return [len(kept[name]) for kept in (taps.activations, taps.gradients) for name in _WATCHED]


def _flat(kept: dict, sizes: list[int], calls: int) -> Tensor:
    """The first `calls` entries of each name, each as `size` numbers."""
    entries = [[*list(kept[name])[:calls], *[None] * calls][:calls] for name in _WATCHED]
    return torch.cat([_numbers(entry, size) for own, size in zip(entries, sizes, strict=True) for entry in own])


def _numbers(value: object, size: int) -> Tensor:
    """The first `size` numbers of a tensor in float32, filled up with NaN; all NaN for what is no tensor."""
    found = value.detach().float().reshape(-1)[:size] if isinstance(value, Tensor) else torch.empty(0)
    return torch.cat([found, torch.full((size - found.numel(),), float("nan"))])
