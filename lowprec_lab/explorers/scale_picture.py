"""ScaleExplorer as a still picture: the map of the tensor, what is left of each number, and the groups."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from lowprec_lab import plots
from lowprec_lab.formats import Format

_COLORS = ("#D6E4F5", "#F2B866", "#93246F")  # kept, coarse, lost


def draw(
    fmt: Format,
    granularity: str,
    log2_outlier: int,
    kinds: np.ndarray,
    block: tuple[int, int],
    place: tuple[int, int],
    decibel: float,
) -> Figure:
    """What to see: which numbers an outlier takes along, and how lines between groups stop it."""
    height, width = kinds.shape
    with plots.style():
        made, axes = plots.figure(9.5, 1.5 + 0.2 * max(height, 6))
        axes.imshow(kinds, cmap=ListedColormap(_COLORS), vmin=0, vmax=2, aspect="auto", interpolation="nearest")
        for kind, mark in ((1, "."), (2, "x")):  # not by colour alone
            rows, columns = np.nonzero(kinds == kind)
            axes.plot(columns, rows, mark, color="white" if kind == 2 else "#5B3A00", markersize=4, linestyle="none")
        for at in range(0, height + 1, block[0]):
            axes.axhline(at - 0.5, color="#1B1F24", linewidth=0.9)
        for at in range(0, width + 1, block[1]):
            axes.axvline(at - 0.5, color="#1B1F24", linewidth=0.9)
        axes.plot(
            [place[1]], [place[0]], "o", markersize=11, markerfacecolor="none", color="#B02A5B", markeredgewidth=2
        )
        axes.set_xlabel("column      pale: kept, dot: coarse, cross: becomes 0, ring: the outlier")
        axes.set_ylabel("row")
        axes.grid(visible=False)
        kept, coarse, lost = (f"{np.mean(kinds == kind):.0%}" for kind in range(3))
        axes.set_title(
            f"{plots.short_name(fmt)}, a scale for each {granularity}, outlier of 2^{log2_outlier}:   "
            f"kept {kept}, coarse {coarse}, lost {lost};   SQNR of the others {decibel:.1f} dB",
            fontsize=10.5,
        )
    return made
