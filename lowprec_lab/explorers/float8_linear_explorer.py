"""Float8LinearExplorer: the three products of a linear layer, the casts of their six operands, and what they cost.

The kernel works out every choice once; the browser only shows. Nothing in it is an exercise's code: numbers are rounded
by `fused`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lowprec_lab import fused, plots
from lowprec_lab.explorers import float8_linear_picture
from lowprec_lab.explorers.widget import Explorer, code, one_of
from lowprec_lab.float8_linear import PRODUCTS, RECIPES, Cast, Recipe
from lowprec_lab.formats import E4M3
from lowprec_lab.graders import oracle

RECIPES_SHOWN: dict[str, Recipe] = {
    **RECIPES,
    "tensorwise_e4m3": Recipe("tensorwise_e4m3", *[Cast(E4M3)] * 6),
}
HIGHEST, STEP = 24, 2  # log2 of how much larger the gradient of one token can be made
_NAMES = (("x", "weight"), ("grad_output", "weight"), ("grad_output", "x"))
_STRIP = 24


@dataclass(frozen=True)
class Operand:
    """One operand of a product after its cast.

    name: the tensor. shape: of the matrix as it is multiplied. cast: None for high precision. scales: log2 of each, in
    their order; of a few, where there are many. along: "row" or "column" of the matrix as it is multiplied, "tensor",
    or "". lost: the share of its numbers that became zero.
    """

    name: str
    shape: tuple[int, int]
    cast: Cast | None
    scales: list[float]
    along: str
    lost: float

    def text(self) -> str:
        """The cast in a few words: "E4M3, a scale for each row"."""
        if self.cast is None:
            return "high precision"
        many = {"tensor": "one scale", "row": "a scale for each row", "column": "a scale for each column"}
        return f"{plots.short_name(self.cast.fmt)}, {many[self.along]}"


@dataclass(frozen=True)
class Product:
    """name: one of PRODUCTS. operands: both. error: of a typical row, the median of ||row - exact|| / ||exact||."""

    name: str
    operands: tuple[Operand, Operand]
    error: float


class Float8LinearExplorer(Explorer):
    """The three products of one layer under a recipe: which scales there are, what is lost, how far results are off.

    x: (M, K); weight: (N, K); grad_output: (M, N); float32, finite. recipe: "tensorwise", "rowwise",
    "rowwise_with_gw_hp" or "tensorwise_e4m3" (tensorwise with E4M3 for gradients). log2_outlier: an even number from 0
    to 24: the gradient of the first token is made 2 to that power times as large. Both can be read and set later;
    `products` is what the explorer shows.

    Raises ValueError for another recipe or power, and for shapes that do not fit together.
    """

    _esm = code("float8_linear_explorer", "js")
    _css = code("float8_linear_explorer", "css")

    def __init__(
        self, x: Tensor, weight: Tensor, grad_output: Tensor, recipe: str = "tensorwise", log2_outlier: int = 0
    ) -> None:
        super().__init__()
        if (x.dim(), weight.dim()) != (2, 2) or grad_output.shape != (len(x), len(weight)) or not x.numel():
            raise ValueError("x is (M, K), weight (N, K) and grad_output (M, N), none of them empty")
        if x.shape[1] != weight.shape[1]:
            raise ValueError(f"x has {x.shape[1]} columns and weight {weight.shape[1]}: both are in_features")
        self._tensors = tuple(each.detach().float().cpu() for each in (x, weight, grad_output))
        self._state = {"recipe": one_of(recipe, tuple(RECIPES_SHOWN)), "log2_outlier": _checked(log2_outlier)}
        self.refresh()

    @property
    def recipe(self) -> str:
        """The name of the recipe that is shown."""
        return self._state["recipe"]

    @recipe.setter
    def recipe(self, recipe: str) -> None:
        self._state = {**self._state, "recipe": one_of(recipe, tuple(RECIPES_SHOWN))}

    @property
    def log2_outlier(self) -> int:
        """By which power of two the gradient of the first token is larger."""
        return self._state["log2_outlier"]

    @log2_outlier.setter
    def log2_outlier(self, log2_outlier: int) -> None:
        self._state = {**self._state, "log2_outlier": _checked(log2_outlier)}

    @property
    def products(self) -> list[Product]:
        """The three products as they are shown."""
        return products_of(*self._tensors, RECIPES_SHOWN[self.recipe], self.log2_outlier)

    def refresh(self) -> None:
        """Work everything out anew."""
        self._panels = [
            {
                "name": name,
                "steps": [_plain(products_of(*self._tensors, recipe, k)) for k in range(0, HIGHEST + 1, STEP)],
            }
            for name, recipe in RECIPES_SHOWN.items()
        ]

    def plot(self) -> Figure:
        """The same as a static picture. Returns a matplotlib Figure."""
        return float8_linear_picture.draw(self.products, self.recipe, self.log2_outlier)

    def __repr__(self) -> str:
        errors = ", ".join(f"{each.name} {each.error:.2%}" for each in self.products)
        outlier = f", one gradient 2^{self.log2_outlier} times as large" if self.log2_outlier else ""
        return f"Float8LinearExplorer: {self.recipe}{outlier}; a typical row is off by: {errors}"


def products_of(x: Tensor, weight: Tensor, grad_output: Tensor, recipe: Recipe, log2_outlier: int) -> list[Product]:
    """The products of a layer by a recipe, the gradient of the first token being 2^log2_outlier times as large."""
    gradient = grad_output.clone()
    gradient[0] *= 2.0**log2_outlier
    tensors = {"x": x, "weight": weight, "grad_output": gradient}
    found = []
    for which, names, casts in zip(PRODUCTS, _NAMES, recipe.pairs(), strict=True):
        turned = (which == "grad_weight", which == "output")  # which of the two is transposed
        parts = [_operand(name, tensors[name], how, t) for name, how, t in zip(names, casts, turned, strict=True)]
        exact = [tensors[name].T if t else tensors[name] for name, t in zip(names, turned, strict=True)]
        error = _typical_error(parts[0][1] @ parts[1][1], exact[0].double() @ exact[1].double())
        found.append(Product(which, (parts[0][0], parts[1][0]), error))
    return found


def _typical_error(got: Tensor, exact: Tensor) -> float:
    sizes = exact.norm(dim=1)
    there = sizes > 0
    return float(((got - exact).norm(dim=1)[there] / sizes[there]).median()) if bool(there.any()) else 0.0


def _operand(name: str, x: Tensor, how: Cast | None, transposed: bool) -> tuple[Operand, Tensor]:
    """(what is said of an operand, its values as they are multiplied, float64)."""
    values, scales, along = x, [], ""
    if how is not None:
        along = how.granularity
        scale = _scale(x, how)
        values = fused.round_((x * scale).contiguous(), how.fmt) / scale
        every = np.log2(scale.flatten().numpy())
        scales = every[np.linspace(0, len(every) - 1, min(len(every), _STRIP)).round().astype(int)].tolist()
    numbers = int((x != 0).sum())
    lost = int(((values == 0) & (x != 0)).sum()) / numbers if numbers else 0.0
    if transposed:
        values, along = values.T, {"row": "column", "column": "row"}.get(along, along)
    return Operand(name + (".T" if transposed else ""), tuple(values.shape), how, scales, along, lost), values.double()


def _scale(x: Tensor, how: Cast) -> Tensor:
    dims = {"tensor": (0, 1), "row": (1,), "column": (0,)}[how.granularity]
    amax = x.abs().amax(dims, keepdim=True).double().clamp(min=1e-12)
    scale = (oracle.max_finite(how.fmt) / amax).float()
    return torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1) if how.power_of_two else scale


def _plain(products: list[Product]) -> list[dict]:
    """The same for the browser."""
    return [
        {
            "name": each.name,
            "error": each.error,
            "operands": [
                {
                    "name": one.name,
                    "shape": list(one.shape),
                    "text": one.text(),
                    "along": one.along,
                    "scales": [round(value, 2) for value in one.scales],
                    "lost": one.lost,
                }
                for one in each.operands
            ],
        }
        for each in products
    ]


def _checked(log2_outlier: int) -> int:
    if log2_outlier not in range(0, HIGHEST + 1, STEP):
        raise ValueError(f"log2_outlier is an even number from 0 to {HIGHEST}, not {log2_outlier!r}")
    return int(log2_outlier)
