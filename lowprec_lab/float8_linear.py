"""Chapter 08: a linear layer whose three matrix products are in 8 bits.

With x (M, K), weight (N, K) and grad_output (M, N), the gradient of the output, a linear layer has three products:

    output      = x @ weight.T            sums over K
    grad_x      = grad_output @ weight    sums over N
    grad_weight = grad_output.T @ x       sums over M

Each product has two operands, and each operand is cast to 8 bits by itself: six casts. A `Recipe` names all of them.
Granularities are those of x, weight and grad_output as they stand above: a cast comes before any transposing.

What holds for every function here that takes a recipe:
- An operand is quantized as chapter 07's `quantize` does it. A cast that is None leaves it in high precision.
- A product of two quantized operands is that of `float8_matmul`. One in high precision is torch's, in the dtype of its
  first operand, to which the second is converted.
- Results have the dtype of the first operand: x for the output, grad_output for both gradients.

References: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433; torchao/float8/float8_linear.py,
float8_ops.py, config.py and float8_linear_utils.py in pytorch/ao; Bengio et al., Estimating or Propagating Gradients
Through Stochastic Neurons, arXiv:1308.3432 (straight-through); Higham, Accuracy and Stability of Numerical Algorithms,
section 3.1 (the error of a sum).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_lab.blanks import blank
from lowprec_lab.formats import E4M3, E5M2, Format
from lowprec_lab.quantizer import Quantized, spread  # noqa: F401 (answers find spread here)

PRODUCTS = ("output", "grad_x", "grad_weight")


class Cast(NamedTuple):
    """How one operand becomes 8 bits: what `quantize` takes after the tensor, so that `quantize(x, *cast)` does it."""

    fmt: Format
    granularity: str | tuple[int, int] = "tensor"
    power_of_two: bool = False


@dataclass(frozen=True)
class Recipe:
    """The six casts of a linear layer, two for each product; None is high precision.

    Raises ValueError where one operand of a product is cast and the other is not: no hardware multiplies such a pair.
    """

    name: str
    x: Cast | None
    weight: Cast | None
    grad_output: Cast | None
    weight_for_grad_x: Cast | None
    grad_output_for_grad_weight: Cast | None
    x_for_grad_weight: Cast | None

    def __post_init__(self) -> None:
        for product, pair in zip(PRODUCTS, self.pairs(), strict=True):
            if (pair[0] is None) != (pair[1] is None):
                raise ValueError(
                    f"recipe {self.name!r}: of the two operands of {product} one is cast to 8 bits and the other is "
                    "not. Cast both, or make both None"
                )

    def pairs(self) -> tuple[tuple[Cast | None, Cast | None], ...]:
        """The casts of the two operands of the output, of grad_x and of grad_weight."""
        six = [getattr(self, each.name) for each in fields(self)[1:]]
        return tuple(zip(six[::2], six[1::2], strict=True))


_ROW, _COLUMN = Cast(E4M3, "row", True), Cast(E4M3, "column", True)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (
    Recipe("tensorwise", Cast(E4M3), Cast(E4M3), Cast(E5M2), Cast(E4M3), Cast(E5M2), Cast(E4M3)),
    Recipe("rowwise", _ROW, _ROW, _ROW, _COLUMN, _COLUMN, _COLUMN),
    Recipe("rowwise_with_gw_hp", _ROW, _ROW, _ROW, Cast(E4M3, "tensor", True), None, None),
)}  # fmt: skip


def find_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name, or the one that is given. Raises ValueError that lists the names there are."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"there is no recipe {recipe!r}. The recipes are: {', '.join(RECIPES)}")
    return RECIPES[recipe]


def transpose(q: Quantized) -> Quantized:
    """The transpose of a quantized matrix: codes and scales change places, and nothing is rounded again."""
    turned = {"row": "column", "column": "row"}.get(q.granularity, q.granularity)
    if isinstance(turned, tuple):
        turned = turned[::-1]
    scale = q.scale.t() if q.scale.dim() == 2 else q.scale
    return replace(q, codes=q.codes.t(), scale=scale, granularity=turned)


# --- the exercises ----------------------------------------------------------------------------------------------------


@blank(exercise="8.1", points=3, minutes=30)
def cast_both_ways(x: Tensor, forward: Cast | None, backward: Cast | None) -> Tensor:
    """What 8 bits leave of x on its way forward, and of its gradient on the way back: each by a cast of its own.

    x: float32, bfloat16 or float16, (M, N). Returns: x's dtype and shape: x quantized by `forward` and dequantized.
    The gradient that arrives is quantized by `backward` and dequantized, with a scale of its own, and goes on to x as
    if rounding had been nothing at all (straight through). A cast that is None leaves its direction as it is.
    """


@blank(exercise="8.2", points=2, minutes=25)
def make_recipe(
    granularity: str, forward: Format, backward: Format, power_of_two: bool, high_precision: tuple[str, ...]
) -> Recipe:
    """A recipe by a few rules.

    granularity: "tensor", one scale for each operand; or "row", as many as can be had: one for each row or column of
    an operand that ends in a row or column of its own in the product, so that no sum meets two scales of an operand.
    forward: the format of x and of weight, in every product. backward: that of grad_output, in every product.
    power_of_two: of all casts. high_precision: those of "output", "grad_x", "grad_weight" that are not cast.
    Returns: a Recipe of any name.
    """


@blank(exercise="8.3", points=2, minutes=20)
def float8_matmul(a: Quantized, b: Quantized) -> Tensor:
    """The product of two quantized matrices, in float32 and then in a's dtype.

    a: (M, K), b: (K, N), of any formats and granularities. Returns: a.dtype, (M, N): the float32 product of both
    operands, each of its float32 values being decode(code) / scale, rounded once to the dtype.
    In which order a product is summed up is yours, and so is when the scale is divided out where it can be taken out
    of the sum. Where all that is computed on the way is exact, so is the result.
    """


@blank(exercise="8.4", points=2, minutes=20)
def float8_linear_forward(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """The output of a linear layer without bias, by the recipe's casts of x and weight.

    x: (..., K), float32, bfloat16 or float16; weight: (N, K). Returns: x's dtype, (..., N).
    All dimensions of x but the last are one: a row is a row, wherever it stands.
    """


@blank(exercise="8.5", points=4, minutes=40)
def float8_linear_backward(
    grad_output: Tensor, x: Tensor, weight: Tensor, recipe: Recipe, needs: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a linear layer's input and weight, by the recipe's casts for these two products.

    grad_output: (..., N), float32, bfloat16 or float16; x: (..., K), with the same leading dimensions, which count as
    one; weight: (N, K). Returns: (grad_x (..., K), grad_weight (N, K)), both of grad_output's dtype.
    needs: which of the two is wanted; the other is None, and its product is not computed.
    Both come from x, weight and grad_output themselves: what was quantized forward is not used again.
    """


@blank(exercise="8.6", points=4, minutes=45)
class Float8Linear(nn.Linear):
    """A linear layer that computes its output and both gradients in 8 bits, in place of nn.Linear.

    It has nn.Linear's parameters under their names, in high precision, and one attribute more, `recipe` (a Recipe).
    The bias is added to the output, in its dtype; nothing of it is quantized, on neither way. A gradient that nobody
    asks for (of a frozen weight, or of an input that needs none) is not computed.
    Autocast casts no operand of its products; where it is on, for x's kind of device, its dtype is the output's.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, recipe: str | Recipe = "tensorwise"
    ) -> None:
        """recipe: a Recipe, or the name of one of `RECIPES`; ValueError that lists them for another name."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: str | Recipe = "tensorwise") -> nn.Linear:
        """A layer with the very parameters of `linear` (not copies: tied weights stay tied, frozen ones frozen).

        It is in training mode if `linear` is.
        """

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features). Returns: x's dtype, or autocast's where that is on; (..., out_features)."""


@blank(exercise="8.7", points=2, minutes=20)
def why_not_float8(
    name: str, out_features: int, in_features: int, rows: int, recipe: str, skip: tuple[str, ...] = ()
) -> str:
    """Why a linear layer of a model stays in high precision on a GPU; "" for one that is worth converting.

    name: the layer's, such as "blocks.0.mlp.up". rows: M, the tokens of a step. The first that holds of:
    "by name": one of the texts in `skip` is in the name.
    "does not divide": in_features or out_features is no multiple of 16; nor may rows be anything else, unless the
    recipe leaves grad_weight, the one product that sums over them, in high precision.
    "too small": for "tensorwise" in_features <= 4096 and out_features <= 1024; for both others out_features <= 2048,
    or in_features <= 1024, or out_features <= 4096 and in_features <= 2048.
    ValueError that lists the recipes for one that is not in `RECIPES`.
    """


# --- scenarios: what a check drives an answer with, beside plain calls ------------------------------------------------


def recipe_of(casts: str | tuple) -> Recipe:
    """A recipe from data: its name, or six casts, each None or (format, granularity, power_of_two)."""
    if isinstance(casts, str):
        return RECIPES[casts]
    return Recipe("your own", *(None if each is None else Cast(*each) for each in casts))


def both_ways(
    function: Callable, x: Tensor, gradient: Tensor, forward: tuple | None, backward: tuple | None
) -> tuple[Tensor, Tensor]:
    """(function(x, forward, backward), the gradient of x when `gradient` is that of the result; 0 if none arrives)."""
    x = x.clone().requires_grad_()
    casts = [None if each is None else Cast(*each) for each in (forward, backward)]
    result = function(x, *casts)
    if not (isinstance(result, Tensor) and result.requires_grad):
        return result, torch.zeros_like(gradient)
    (found,) = torch.autograd.grad(result, x, gradient, allow_unused=True, materialize_grads=True)
    return result.detach(), found


def casts_of(
    function: Callable, granularity: str, forward: Format, backward: Format, power_of_two: bool, *high_precision: str
) -> tuple[str, ...]:
    """The six casts of a recipe that was made, in words."""
    made = function(granularity, forward, backward, power_of_two, high_precision)
    return tuple(_in_words(cast) for pair in made.pairs() for cast in pair)


def _in_words(cast: Cast | None) -> str:
    if cast is None:
        return "high precision"
    fmt, granularity, power_of_two = cast
    return f"{fmt.name}, {granularity}{', power of two' if power_of_two else ''}"


def product_of(
    function: Callable, codes: Tensor, scale: Tensor, granularity: str | tuple, fmt: Format,
    codes_b: Tensor, scale_b: Tensor, granularity_b: str | tuple, fmt_b: Format, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """function(a, b) for a matrix a of these codes and a matrix b of those."""
    a = Quantized(codes, scale, fmt, granularity, dtype)
    return function(a, Quantized(codes_b, scale_b, fmt_b, granularity_b, dtype))


def forward_of(function: Callable, x: Tensor, weight: Tensor, casts: str | tuple) -> Tensor:
    """function(x, weight, recipe). casts: see `recipe_of`."""
    return function(x, weight, recipe_of(casts))


def backward_of(
    function: Callable, grad_output: Tensor, x: Tensor, weight: Tensor, casts: str | tuple
) -> tuple[Tensor, Tensor]:
    """function(grad_output, x, weight, recipe). casts: see `recipe_of`."""
    return function(grad_output, x, weight, recipe_of(casts))


def products_for(function: Callable, rows: int, casts: str | tuple, grad_x: bool, grad_weight: bool) -> str:
    """In words: what function(..., needs=(grad_x, grad_weight)) gives, and how many products it computes for it."""
    grad_output, x, weight = torch.ones(rows, 2), torch.ones(rows, 3), torch.ones(2, 3)
    with CountedProducts() as seen:
        found = function(grad_output, x, weight, recipe_of(casts), (grad_x, grad_weight))
    kinds = ("None" if each is None else "a tensor" for each in found)
    return f"{' and '.join(kinds)}, {seen.count} products"


def layer_of(
    function: Callable, x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Tensor, casts: str | tuple,
    how: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(output, and the gradients of x, weight and bias) of `function.from_linear(linear, recipe)`, in one step.

    gradient: that of the output. how: "autocast" runs the layer forward under BF16 autocast. The weight is 0 when the
    layer is made, and has its values afterwards, as if an optimizer had changed it. A gradient that nothing arrives at
    is NaN; that of a bias that is not there is empty.
    """
    function(1, 1, False, recipe_of(casts))  # an error of the constructor is told before one of from_linear
    layer = function.from_linear(_linear(torch.zeros_like(weight), bias), recipe_of(casts))
    layer.weight.data.copy_(weight)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        output = layer(x)
    output.backward(gradient.to(output.dtype))
    found = [torch.full_like(each, float("nan")) if each.grad is None else each.grad for each in (x, layer.weight)]
    found.append(torch.empty(0) if layer.bias is None else layer.bias.grad)
    return output.detach(), *found


def layer_facts(
    function: Callable, in_features: int, out_features: int, bias: bool, recipe: str, how: str
) -> tuple[str, ...]:
    """What can be seen of a Float8Linear, in words.

    how: "made" by its constructor; or by from_linear, of a linear layer that is "training", "evaluating", has a
    "frozen" weight, a weight that is "tied" to an embedding, or an input that needs no gradient ("first layer").
    """
    linear = nn.Linear(in_features, out_features, bias=bias)
    embedding = nn.Embedding(out_features, in_features)
    if how == "tied":
        linear.weight = embedding.weight
    linear.train(how != "evaluating")
    linear.weight.requires_grad_(how != "frozen")
    made = how == "made"
    layer = function(in_features, out_features, bias, recipe) if made else function.from_linear(linear, recipe)
    same = all(mine is theirs for mine, theirs in zip(layer.parameters(), linear.parameters(), strict=False))
    x = torch.ones(2, 3, in_features, requires_grad=how != "first layer")
    output = layer(x)
    with CountedProducts() as seen:
        output.sum().backward()
    return (
        f"{'an' if isinstance(layer, nn.Linear) else 'no'} nn.Linear, {'training' if layer.training else 'evaluating'}",
        f"parameters {', '.join(name for name, _ in layer.named_parameters())}: "
        f"{'those of the linear layer' if same else 'new ones'}",
        f"recipe {getattr(getattr(layer, 'recipe', None), 'name', 'none')}",
        f"{seen.count} products backward",
        f"weight {'without' if layer.weight.grad is None else 'with'} a gradient",
        f"embedding {'without' if embedding.weight.grad is None else 'with'} one",
    )  # fmt: skip


def refuses(function: Callable, recipe: str) -> str:
    """In words: the error of a Float8Linear with a recipe of this name, and which recipes its text lists."""
    try:
        function(16, 16, False, recipe)
    except ValueError as error:
        return f"ValueError that lists {', '.join(name for name in RECIPES if name in str(error)) or 'nothing'}"
    return "no error"


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    linear.weight.data = weight.clone()
    if bias is not None:
        linear.bias.data = bias.clone()
    return linear


class CountedProducts(TorchDispatchMode):
    """Counts the products of matrices that run in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.count += op.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot")
        return op(*args, **(kwargs or {}))


# --- given: what the page's experiments and the explorer are made of --------------------------------------------------


def layer_operands(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """(x, weight, grad_output) of every linear layer, by its name, in one step forward and backward.

    model: `model(x, y)` returns `(logits, loss)`. Tensors are copies; leading dimensions are one. No parameter keeps a
    gradient.
    """
    found: dict[str, list[Tensor]] = {}
    hooks = []

    def watch(name: str, layer: nn.Linear) -> None:
        def forward(_layer: nn.Module, inputs: tuple, output: Tensor) -> None:
            found[name] = [inputs[0].detach().flatten(0, -2).clone(), layer.weight.detach().clone()]
            output.register_hook(lambda gradient: found[name].append(gradient.detach().flatten(0, -2).clone()))

        hooks.append(layer.register_forward_hook(forward))

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            watch(name, layer)
    try:
        model(x, y)[1].backward()
    finally:
        for hook in hooks:
            hook.remove()
    model.zero_grad(set_to_none=True)
    return {name: tuple(each) for name, each in found.items()}


def product_errors(x: Tensor, weight: Tensor, grad_output: Tensor, recipe: Recipe) -> dict[str, float]:
    """How far each product of a layer is from the exact one, relative to its size: ||got - exact|| / ||exact||.

    By `float8_linear_forward` and `float8_linear_backward`, whoever's are in use.
    """
    got = (float8_linear_forward(x, weight, recipe), *float8_linear_backward(grad_output, x, weight, recipe))
    wide = x.double(), weight.double(), grad_output.double()
    exact = wide[0] @ wide[1].T, wide[2] @ wide[1], wide[2].T @ wide[0]
    pairs = zip(PRODUCTS, got, exact, strict=True)
    return {name: float((one.double() - other).norm() / other.norm()) for name, one, other in pairs}


def float8_layers(model: nn.Module, recipe: str | Recipe, skip: tuple[str, ...] = ()) -> nn.Module:
    """Put a Float8Linear with the same parameters in place of every linear layer, in `model` itself, and return it.

    skip: layers with one of these texts in their name stay. Chapter 10 has more to say about which ones should.
    """
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and not any(text in name for text in skip):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Float8Linear.from_linear(layer, recipe))
    return model
