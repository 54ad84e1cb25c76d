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

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lowprec_lab.blanks import blank
from lowprec_lab.float8_linear import (  # noqa: F401 (answers find transpose here)
    RECIPES,
    Float8Linear,
    Recipe,
    find_recipe,
    float8_linear_backward,
    float8_linear_forward,
    transpose,
    why_not_float8,
)
from lowprec_lab.formats import E4M3, E5M2, Format
from lowprec_lab.quantizer import Quantized

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
        """fmt: the format that is cast to, one with a sign and at most 8 bits. The others: as in `delayed_update`."""

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
    multiples of `multiple`, for its gradients too. It is called once.
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
    of their losses. clip: gradients whose norm, all together, is above it are scaled down to it (0: never).
    The optimizer steps only if that norm is finite. In either case no parameter keeps a gradient, and every one of the
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
            scaling.history, scaling.scale = (each.to(linear.weight.device) for each in (scaling.history, scaling.scale))
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
