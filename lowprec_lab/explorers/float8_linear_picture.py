"""Float8LinearExplorer as a still picture: three products, their operands with the scales beside them, their errors."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lowprec_lab import plots

_PLAIN = "#7A7A7A"


def draw(products: list, recipe: str, log2_outlier: int) -> Figure:
    """What to see: scales lie along the side of an operand that is not summed over."""
    with plots.style():
        made, axes = plots.figure(9.5, 5.4)
        for place, product in enumerate(products):
            _product(axes, product, 2 - place)
        axes.set_xlim(0, 10)
        axes.set_ylim(-0.1, 3.1)
        axes.set_axis_off()
        outlier = f"   one gradient times 2^{log2_outlier}" if log2_outlier else ""
        axes.set_title(f"{recipe}{outlier}")
    return made


def _side(length: int) -> float:
    return 0.14 + 0.05 * math.log2(max(length, 1))


def _product(axes: Axes, product: object, bottom: float) -> None:
    first, second = product.operands
    for left, operand in ((0.3, first), (4.0, second)):
        _matrix(axes, operand, left, bottom)
    for at, sign in ((3.65, "×"), (7.45, "=")):
        axes.text(at, bottom + 0.55, sign, fontsize=15, ha="center", va="center")
    axes.text(7.8, bottom + 0.62, product.name, fontweight="bold", va="center")
    axes.text(7.8, bottom + 0.42, f"a typical row is {product.error:.2%} off", fontsize=9, va="center")


def _matrix(axes: Axes, operand: object, left: float, bottom: float) -> None:
    height, width = (_side(length) for length in operand.shape)
    low = bottom + 0.55 - height / 2
    color = _PLAIN if operand.cast is None else plots.color_of(operand.cast.fmt)
    axes.add_patch(Rectangle((left, low), width * 1.5, height, facecolor=color, alpha=0.16, edgecolor=color))
    _strip(axes, operand, (left, low, width * 1.5, height), color)
    beside = left + width * 1.5 + 0.12
    rows, columns = operand.shape
    axes.text(beside, bottom + 0.72, f"{operand.name}  {rows} x {columns}", fontsize=9, fontweight="bold", va="center")
    axes.text(beside, bottom + 0.55, operand.text(), fontsize=8, color=color, va="center")
    axes.text(beside, bottom + 0.38, f"{operand.lost:.2%} become 0", fontsize=8, va="center")


def _strip(axes: Axes, operand: object, box: tuple[float, float, float, float], color: str) -> None:
    left, low, width, height = box
    if not operand.scales:
        return
    if operand.along == "tensor":
        axes.add_patch(Rectangle((left - 0.13, low + height + 0.02), 0.1, 0.05, color=color))
        return
    least, most = min(operand.scales), max(operand.scales)
    for place, scale in enumerate(operand.scales):
        shade = 0.25 + 0.75 * (scale - least) / max(most - least, 1e-9)
        step = place / len(operand.scales)
        if operand.along == "row":  # the first row is on top
            size = height / len(operand.scales)
            part = Rectangle((left - 0.13, low + height * (1 - step) - size), 0.1, size * 0.9, color=color, alpha=shade)
        else:
            size = width / len(operand.scales)
            part = Rectangle((left + width * step, low + height + 0.02), size * 0.9, 0.05, color=color, alpha=shade)
        axes.add_patch(part)
