"""LossScaleExplorer as a still picture: the hill of gradients, and the range of the format."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from lowprec_lab import plots
from lowprec_lab.formats import Format

_LEFT, _RIGHT = -52, 24


def draw(
    fmt: Format,
    log2_scale: int,
    histogram: tuple[np.ndarray, np.ndarray],
    edges: tuple[float, float, float],
    outcome: dict[str, int],
) -> Figure:
    """What to see: what is left of the shading is rounded to zero, what is right of it overflows."""
    exponents, counts = histogram
    smallest, normal, largest = np.log2(edges)
    color, total = plots.color_of(fmt), sum(outcome.values())
    with plots.style():
        made, axes = plots.figure(9.5, 3.6)
        for left in (smallest, normal):
            axes.axvspan(left, largest, color=color, alpha=0.12, linewidth=0)
        axes.bar(exponents + 0.5, counts, width=1, color="#B9C0C8")
        axes.bar(exponents + log2_scale + 0.5, counts, width=1, color=color)
        axes.set_xlim(_LEFT, _RIGHT)
        axes.set_xlabel("size of a gradient (log2)      grey: as it is, coloured: times the scale")
        axes.set_ylabel("gradients")
        shares = "   ".join(f"{kind} {count / total:.1%}" for kind, count in outcome.items())
        axes.set_title(f"Times 2^{log2_scale} in {plots.short_name(fmt)}:   {shares}", fontsize=11)
    return made
