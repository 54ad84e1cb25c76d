"""Pictures of chapter 09: which GPU takes which product, and where the elements of a matrix lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from lowprec_lab import plots
from lowprec_lab.scaled_mm import E4M3, E5M2, Call, call, empty_like_described, float8, floats

GPUS: tuple[tuple[str, tuple[int, int]], ...] = (
    ("RTX 3090\n8.6", (8, 6)), ("RTX 4070, L4\n8.9", (8, 9)), ("H100\n9.0", (9, 0)), ("B200\n10.0", (10, 0)),
    ("RTX 5090\n12.0", (12, 0)),
)  # fmt: skip
_TAKEN, _REFUSED = "#0065A8", "#C24E00"


def products(capability: tuple[int, int]) -> list[Call]:
    """One product of each kind that the map has a row for, on a GPU of this capability."""
    row_major = {"b": float8(E4M3, 256, 128)}
    both_e5m2 = {"a": float8(E5M2, 64, 256), "b": float8(E5M2, 256, 128, column_major=True)}
    e5m2_b = {"b": float8(E5M2, 256, 128, column_major=True)}

    def of(title: str, k: int = 256, n: int = 128, **changes: object) -> Call:
        return call(title, capability, 64, k, n, **changes)

    return [
        of("one scale each"), of("scales by row", rowwise=True), of("scales by block of 128", blockwise=True),
        of("a in E5M2 (gradients)", a=float8(E5M2, 64, 256)), of("a and b in E5M2", **both_e5m2),
        of("scales by row, b in E5M2", rowwise=True, **e5m2_b), of("b row-major", **row_major),
        of("b row-major, scales by row", rowwise=True, **row_major), of("K = 40", 40), of("N = 65", n=65),
        of("bias in bfloat16", bias=floats(128, dtype=torch.bfloat16)),
        of("the same, output in float32", bias=floats(128, dtype=torch.bfloat16), out_dtype=torch.float32),
    ]  # fmt: skip


def verdicts(
    explain: Callable, gpus: Sequence[tuple[str, tuple[int, int]]] = GPUS
) -> tuple[list[str], list[list[str]]]:
    """(titles of the rows, for each row what `explain` finds on each GPU): the first broken rule, or ""."""
    columns = []
    for _, capability in gpus:
        column = []
        for one in products(capability):
            bias = empty_like_described(one.bias)
            found = explain(*one.tensors(), one.capability, bias, one.out_dtype, one.cublas)
            column.append(found[0].rule if found else "")
        columns.append(column)
    return [one.title for one in products(gpus[0][1])], [list(row) for row in zip(*columns, strict=True)]


def compatibility(explain: Callable, gpus: Sequence[tuple[str, tuple[int, int]]] = GPUS) -> Figure:
    """Kinds of products against kinds of GPUs: what is taken, and else the first rule that is broken.

    explain: a function like `explain_scaled_mm`, whose findings are drawn. What to see: the columns differ in a few
    rows only, and most rows are the same for every GPU that has float8 at all.
    """
    titles, rows = verdicts(explain, gpus)
    with plots.style():
        made, axes = plots.figure(9.5, 0.9 + 0.36 * len(rows))
        for y, row in enumerate(rows):
            for x, rule in enumerate(row):
                _cell(axes, x, y, rule)
        axes.set_xlim(-0.5, len(gpus) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(titles)), titles)
        axes.set_xticks(range(len(gpus)), [name for name, _ in gpus])
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title("What torch._scaled_mm takes, and the first rule that it finds broken")
    return made


def _cell(axes, x: int, y: int, rule: str) -> None:
    color = _REFUSED if rule else _TAKEN
    box = {"facecolor": color, "alpha": 0.14, "linewidth": 0}
    axes.add_patch(_rectangle(x, y, box))
    axes.text(x, y, rule or "yes", ha="center", va="center", fontsize=8.5, color=color, fontweight="bold")


def _rectangle(x: float, y: float, box: dict) -> Rectangle:
    return Rectangle((x - 0.47, y - 0.43), 0.94, 0.86, **box)


def memory(matrices: Sequence[tuple[str, Tensor]]) -> Figure:
    """Small matrices side by side: in each cell, the place of the element in memory, counted from 0.

    What to see: in a row-major matrix the places go along the rows, in a column-major one down the columns.
    """
    with plots.style():
        made, axes = plots.figure(9.5, 2.6, subplot_kw={"aspect": "equal"})
        left = 0.0
        for title, matrix in matrices:
            rows, columns = matrix.shape
            places = (np.arange(rows)[:, None] * matrix.stride(0) + np.arange(columns) * matrix.stride(1)).astype(int)
            axes.text(left - 0.4, -1.0, title, fontsize=9.5, fontweight="bold", va="bottom")
            axes.text(left - 0.4, rows - 0.2, f"strides {tuple(matrix.stride())}", fontsize=9, va="top")
            for (row, column), place in np.ndenumerate(places):
                shade = {"facecolor": plots.color_of("float8_e4m3fn"), "linewidth": 0}
                shade["alpha"] = 0.08 + 0.4 * place / max(places.max(), 1)
                axes.add_patch(_rectangle(left + column, row, shade))
                axes.text(left + column, row, str(place), ha="center", va="center", fontsize=9)
            left += columns + 1.6
        axes.set_xlim(-0.7, left - 1.2)
        axes.set_ylim(max(matrix.shape[0] for _, matrix in matrices) + 0.5, -1.8)
        axes.axis("off")
    return made
