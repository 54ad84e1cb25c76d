"""AccumulatorExplorer as a still picture: the running total in the format against the exact one."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from lowprec_lab import plots
from lowprec_lab.explorers.running import Totals, stop_of
from lowprec_lab.formats import Format

_EXACT, _LOST = "#B02A5B", "#8A5000"


def draw(fmt: Format, start: float, increment: float, method: str, shown: Totals) -> Figure:
    """start, increment: values of the format. What to see: where the steps become flat, nothing more is added."""
    count = len(shown.values) - 1
    n = np.arange(count + 1)
    exact = start + n * increment
    finite = np.isfinite(shown.values)
    color = plots.color_of(fmt)
    with plots.style():
        made, axes = plots.figure(9.5, 4)
        axes.plot(n, exact, color=_EXACT, linestyle=(0, (4, 3)), linewidth=1.6)
        axes.step(n[finite], shown.values[finite], where="post", color=color)
        axes.annotate("exact", (n[-1], exact[-1]), xytext=(4, 0), textcoords="offset points", color=_EXACT, va="center",
                      fontweight="bold", annotation_clip=False)  # fmt: skip
        if finite.any():
            last = int(np.flatnonzero(finite)[-1])
            end = (n[last], float(shown.values[last]))
            words = plots.short_name(fmt) if finite.all() else f"{plots.short_name(fmt)}: then {shown.values[-1]}"
            crowded = abs(end[1] - exact[last]) < 0.06 * max(float(np.ptp(exact)), 1e-300)
            axes.annotate(words, end, xytext=(4, -12 if crowded else 0), textcoords="offset points", color=color,
                          va="center", fontweight="bold", annotation_clip=False)  # fmt: skip
        stop = stop_of(shown.values)
        if stop is not None and finite[stop]:
            axes.plot([stop], [shown.values[stop]], marker="o", color=color, markersize=7)
            axes.annotate(
                f"stops at {shown.values[stop]:.9g}\nafter {stop:,} additions", (stop, float(shown.values[stop])),
                xytext=(8, -10), textcoords="offset points", va="top", color=color, fontsize=9,
            )  # fmt: skip
        axes.set_xlabel("additions")
        axes.set_ylabel("total")
        axes.set_xlim(0, count * 1.1)
        axes.grid(axis="y")
        axes.set_title(f"{start:.6g} + n × {increment:.6g} in {fmt.name}, {method}", fontsize=11)
        axes.text(1, 1.03, shown.line, transform=axes.transAxes, ha="right", fontsize=8.5, color="#57606A")
    return made
