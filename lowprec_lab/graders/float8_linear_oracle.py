"""The exact oracle for a linear layer in 8 bits: products in float64, and how far a float32 product may be from them.

Every operand is a matrix of float32 values, decode(code) / scale. Their product in float64 is exact where the values
are whole numbers (times a power of two) whose sums stay below 2^53; elsewhere it is off by 2^-53 times the sum of the
magnitudes and the like, which is nothing beside what follows.

How far off a right answer may be. Let u = 2^-24, the largest relative error of one float32 operation, and T the exact
sum of the K products (code_a / scale_a) (code_b / scale_b), S the sum of their magnitudes. A factor (1 + d), |d| <= u,
comes from: each of the two divisions by a scale, or two of them where one multiplies by the reciprocal of a scale; the
multiplication; and at most K - 1 additions, in whichever order (Higham, section 3.1: no summand takes part in more).
So each summand carries at most K + 4 of these factors, and the float32 result R obeys

    |R - T| <= gamma S,    gamma = (K + 4) u / (1 - (K + 4) u)

(Higham, lemma 3.1). Dividing by the scales after the sum, where that is possible, has fewer of them. Fused
multiplications and additions have fewer, too. What is rounded to a shorter dtype in the end is the rounding of some R
in that interval; rounding is monotone, so the result lies between the roundings of the interval's ends. Subnormal
float32 numbers would need an absolute term; the checks stay away from them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from lowprec_lab.float8_linear import PRODUCTS, RECIPES, Cast, Recipe
from lowprec_lab.graders import quantizer_oracle
from lowprec_lab.quantizer import Quantized

_U = 2.0**-24


# --- operands and products --------------------------------------------------------------------------------------------


def values(q: Quantized) -> np.ndarray:
    """The float32 values that the codes and the scale stand for, as float64."""
    return quantizer_oracle.dequantize(replace(q, dtype=torch.float32)).double().numpy()


def cast(x: Tensor, how: Cast | None) -> np.ndarray:
    """What a cast leaves of a matrix, as float64; all of it where `how` is None."""
    if how is None:
        return x.detach().double().numpy()
    return values(quantizer_oracle.quantize(x, *how))


def seen(x: Tensor, how: Cast | None) -> Tensor:
    """The same, in x's dtype."""
    return quantizer_oracle.as_dtype(cast(x, how), x.dtype)


def product(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the exact product, how far from it a float32 product may be), float64."""
    factors = (left.shape[1] + 4) * _U
    with np.errstate(all="ignore"):
        return left @ right, factors / (1 - factors) * (np.abs(left) @ np.abs(right))


def rounded(exact: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Float64 numbers in float32, and then in the dtype."""
    return quantizer_oracle.as_dtype(exact, dtype)


def settled(got: object, exact: np.ndarray, bound: np.ndarray, want: Tensor) -> object:
    """`got`, with `want` in place of each element that a right answer may have."""
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return got
    ends = []
    for end, outwards in ((exact - bound, -np.inf), (exact + bound, np.inf)):
        with np.errstate(all="ignore"):
            ends.append(torch.from_numpy(np.nextafter(end.astype(np.float32), np.float32(outwards))).to(want.dtype))
    return torch.where((got >= ends[0]) & (got <= ends[1]), want, got)


# --- the three products of a layer ------------------------------------------------------------------------------------


def rows_of(x: Tensor) -> Tensor:
    """All leading dimensions as one."""
    lines = 1
    for size in x.shape[:-1]:
        lines *= size
    return x.detach().reshape(lines, x.shape[-1])


def operands(
    which: str, recipe: Recipe, x: Tensor, weight: Tensor, grad_output: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The two matrices of a product ("output", "grad_x", "grad_weight") after their casts, ready to be multiplied."""
    first, second = recipe.pairs()[PRODUCTS.index(which)]
    if which == "output":
        return cast(rows_of(x), first), cast(weight, second).T
    if which == "grad_x":
        return cast(rows_of(grad_output), first), cast(weight, second)
    return cast(rows_of(grad_output), first).T, cast(rows_of(x), second)


# --- what stands in for an answer -------------------------------------------------------------------------------------


def through(x: Tensor, there, back) -> Tensor:
    """there(x), with back(gradient) for its gradient."""
    return quantizer_oracle.with_gradient(x, there(x.detach()), back)


def cast_both_ways(x: Tensor, forward: Cast | None, backward: Cast | None) -> Tensor:
    return through(x, lambda value: seen(value, forward), lambda gradient: seen(gradient, backward))


# For each of the six casts: its product, whether it is of grad_output, and whether it keeps its rows (or its columns).
_SIX = (
    ("output", False, True), ("output", False, True), ("grad_x", True, True), ("grad_x", False, False),
    ("grad_weight", True, False), ("grad_weight", False, False),
)  # fmt: skip


def make_recipe(granularity, forward, backward, power_of_two, high_precision, change=None) -> Recipe:
    """change: a function that gets the place of each cast (0 to 5) and the cast, and gives what is used instead."""
    six = []
    for place, (which, gradient, row) in enumerate(_SIX):
        along = granularity if granularity == "tensor" else "row" if row else "column"
        made = Cast(backward if gradient else forward, along, power_of_two)
        used = None if which in high_precision else made
        six.append(change(place, used) if change else used)
    return Recipe("exact", *six)


def float8_matmul(a: Quantized, b: Quantized) -> Tensor:
    return rounded(product(values(a), values(b))[0], a.dtype)


def float8_linear_forward(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    exact, _ = product(*operands("output", recipe, x, weight))
    return rounded(exact, x.dtype).reshape(*x.shape[:-1], len(weight))


def backward_by(grad_output, x, weight, casts, needs=(True, True)) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients by four casts; float64 products of torch's, so that they can be counted as an answer's are."""
    gradient, rows = rows_of(grad_output), rows_of(x)
    sides = (
        (cast(gradient, casts[0]), cast(weight, casts[1])),
        (cast(gradient, casts[2]).T, cast(rows, casts[3])),
    )
    found: list[Tensor | None] = []
    for (left, right), wanted, shape in zip(sides, needs, (x.shape, weight.shape), strict=True):
        exact = torch.mm(*(torch.from_numpy(each.copy()) for each in (left, right))).numpy() if wanted else None
        found.append(None if exact is None else rounded(exact, grad_output.dtype).reshape(shape))
    return tuple(found)


def casts_back(recipe: Recipe) -> list[Cast | None]:
    """The four casts of the way back."""
    return [each for pair in recipe.pairs()[1:] for each in pair]


def float8_linear_backward(grad_output, x, weight, recipe, needs=(True, True)) -> tuple[Tensor | None, Tensor | None]:
    return backward_by(grad_output, x, weight, casts_back(recipe), needs)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer, dtype):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer.product(x, weight).to(dtype)

    @staticmethod
    def backward(ctx, gradient):
        found = ctx.layer.gradients(gradient, *ctx.saved_tensors, ctx.needs_input_grad[:2])
        return *found, None, None


class Float8Linear(nn.Linear):
    """With a method for each step, so that a known misconception can change one of them."""

    def __init__(self, in_features, out_features, bias=True, recipe="tensorwise") -> None:
        if not isinstance(recipe, Recipe) and recipe not in RECIPES:
            raise ValueError(f"no recipe {recipe!r}: there are {', '.join(RECIPES)}")
        super().__init__(in_features, out_features, bias)
        self.recipe = recipe if isinstance(recipe, Recipe) else RECIPES[recipe]

    @classmethod
    def from_linear(cls, linear, recipe="tensorwise"):
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, recipe)
        layer.take(linear)
        layer.training = linear.training
        return layer

    def take(self, linear: nn.Linear) -> None:
        self.weight, self.bias = linear.weight, linear.bias

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return float8_linear_forward(x, weight, self.recipe)

    def gradients(self, gradient, x, weight, needs) -> tuple[Tensor | None, Tensor | None]:
        return float8_linear_backward(gradient, x, weight, self.recipe, needs)

    def add_bias(self, output: Tensor) -> Tensor:
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return self.add_bias(_Layer.apply(x, self.weight, self, dtype))


def why_not_float8(name, out_features, in_features, rows, recipe, skip=()) -> str:
    if recipe not in RECIPES:
        raise ValueError(f"no recipe {recipe!r}: there are {', '.join(RECIPES)}")
    if any(name.find(text) >= 0 for text in skip):
        return "by name"
    lengths = [in_features, out_features, *([rows] if None not in RECIPES[recipe].pairs()[2] else [])]
    if any(length & 15 for length in lengths):
        return "does not divide"
    if recipe == "tensorwise":
        large = in_features > 4096 or out_features > 1024
    else:
        large = out_features > 2048 and in_features > 1024 and (out_features > 4096 or in_features > 2048)
    return "" if large else "too small"
