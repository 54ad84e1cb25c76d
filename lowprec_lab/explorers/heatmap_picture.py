"""Pictures of a recording: the run while it goes on, the heat map of exponents by layer and step, and one histogram."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowprec_lab import plots
from lowprec_lab.formats import Format
from lowprec_lab.instruments import LOWEST_EXPONENT
from lowprec_lab.recordings import Recording, median_exponent, share_below, share_from

SHOWN = ("exponent", "underflow", "overflow")
_COLORS = {"exponent": "viridis", "underflow": "Purples", "overflow": "Oranges"}
_WIDEST = (-42, 22)  # exponents that a histogram shows; BF16 and float32 go on beyond
_FLOOR = 1e-6  # a share of 0 is drawn here on a log axis
_LOSS, _NORM = "#0065A8", "#C24E00"


def ends(fmt: Format) -> tuple[int, int]:
    """(low, high): below 2^low a number becomes zero, from 2^high on it is beyond the format; in whole exponents.

    Half of the smallest value is a power of two: what is above it is kept. Numbers between the largest value and the
    next power of two are counted as kept, though the upper ones of them overflow.
    """
    from lowprec_lab.graders import oracle

    smallest = oracle.min_subnormal(fmt) or oracle.min_normal(fmt)
    low = math.frexp(smallest)[1] - 2 if fmt.subnormals else LOWEST_EXPONENT
    return low, math.frexp(oracle.max_finite(fmt))[1]


def cells(recording: Recording, kind: str, shown: str, fmt: Format, scale_exponent: int = 0) -> np.ndarray:
    """What the heat map shows, float64 (layers, steps): median exponents, or the shares that a format loses.

    scale_exponent: the numbers are multiplied by 2 to this power first.
    """
    counts, (low, high) = recording.counts(kind), ends(fmt)
    if shown == "exponent":
        return median_exponent(counts) + scale_exponent
    if shown == "underflow":
        return share_below(counts, low - scale_exponent)
    return share_from(counts, high - scale_exponent)


def draw(recording: Recording, kind: str, shown: str, fmt: Format, scale_exponent: int = 0) -> Figure:
    """The heat map, layers from the input (top) to the output (bottom), steps from left to right."""
    with plots.style():
        made, axes = plots.figure(9.5, 1.6 + 0.24 * max(len(recording.layers), 4))
        heat(axes, recording, kind, shown, fmt, scale_exponent)
        bar = made.colorbar(axes.images[0], ax=axes, pad=0.01)
        bar.set_label("median exponent" if shown == "exponent" else "share of the numbers")
        axes.set_title(title(kind, shown, fmt, scale_exponent))
    return made


def title(kind: str, shown: str, fmt: Format, scale_exponent: int = 0) -> str:
    """What the heat map shows, in words."""
    scaled = f" x 2^{scale_exponent}" if scale_exponent else ""
    if shown == "exponent":
        return f"Median exponent of {kind}{scaled}"
    verb = "become zero in" if shown == "underflow" else "are too large for"
    return f"{kind.capitalize()}{scaled} that {verb} {plots.short_name(fmt)}"


def heat(axes: Axes, recording: Recording, kind: str, shown: str, fmt: Format, scale_exponent: int = 0) -> None:
    """The heat map on given axes."""
    values = cells(recording, kind, shown, fmt, scale_exponent)
    limits = {} if shown == "exponent" else {"vmin": 0, "vmax": 1}
    axes.imshow(values, aspect="auto", interpolation="nearest", cmap=_COLORS[shown], **limits)
    layers, steps = recording.layers, recording.steps
    axes.set_yticks(range(len(layers)), layers, fontsize=7)
    places = sorted({0, len(steps) // 4, len(steps) // 2, 3 * len(steps) // 4, len(steps) - 1})
    axes.set_xticks(places, [str(steps[place]) for place in places])
    axes.set_xlabel("step")
    axes.tick_params(length=0)


def live(recording: Recording, of: int, fmt: Format) -> Figure:
    """A run while it goes on: loss, gradient norm and the heat map so far. of: how many steps it will have."""
    with plots.style():
        made, (lines, map_axes) = plots.figure(9.5, 6.8, rows=2, height_ratios=(2, 3))
        steps, loss, norm = recording.steps, recording.column("loss"), recording.column("gradient_norm")
        lines.plot(steps, loss, color=_LOSS)
        lines.set(xlim=(0, of), ylabel="loss")
        lines.yaxis.label.set_color(_LOSS)
        other = lines.twinx()
        other.semilogy(steps, norm, base=2, color=_NORM, linewidth=1.2)
        other.set_ylabel("gradient norm (log2 axis)", color=_NORM)
        other.spines["right"].set_visible(True)
        lines.set_title(f"step {steps[-1]} of {of}: loss {loss[-1]:.3f}, gradient norm {norm[-1]:.3g}")
        heat(map_axes, recording, "gradients", "exponent", fmt)
        made.colorbar(map_axes.images[0], ax=map_axes, pad=0.01).set_label("median exponent of the gradient")
    return made


def histogram(axes: Axes, counts: np.ndarray, color: str, label: str) -> None:
    """One histogram of exponents as a line of steps; shares of the counted numbers. counts: (277,)."""
    places = np.flatnonzero(counts)
    if not places.size:
        return
    inside = np.arange(places[0], places[-1] + 1)
    shares = counts[inside] / counts.sum()
    axes.stairs(shares, np.append(inside, inside[-1] + 1) + LOWEST_EXPONENT, color=color, linewidth=1.8)
    top = int(shares.argmax())
    axes.annotate(
        label, (inside[top] + LOWEST_EXPONENT + 0.5, shares[top]), xytext=(0, 4), textcoords="offset points",
        ha="center", color=color, fontsize=9, fontweight="bold", annotation_clip=False,
    )  # fmt: skip


def ranges(axes: Axes, formats: list[Format], height: float) -> None:
    """Where each format's numbers are, as bars above the histograms; the subnormals are lighter."""
    from lowprec_lab.graders import oracle

    for row, fmt in enumerate(formats):
        normal = math.frexp(oracle.min_normal(fmt))[1] - 1
        low, high = ends(fmt)
        level, color = height * (1.12 + 0.09 * row), plots.color_of(fmt)
        axes.plot([low + 1, normal], [level, level], color=color, linewidth=5, alpha=0.4, solid_capstyle="butt")
        axes.plot([normal, high], [level, level], color=color, linewidth=5, solid_capstyle="butt")
        end = axes.get_xlim()[1]
        name = plots.short_name(fmt) + (" →" if high > end else "")
        axes.text(
            min(high, end) + 0.4, level, name, color=color, va="center", fontsize=9, fontweight="bold", clip_on=False
        )


def histograms(counts: dict[str, tuple[np.ndarray, str]], formats: list[Format], caption: str) -> Figure:
    """Histograms of exponents by label, each (counts (277,), colour), below the ranges of formats.

    What to see: what lies left of a format's bar becomes zero in it, and what lies right of it is too large for it.
    """
    with plots.style():
        made, axes = plots.figure(9.5, 4.4)
        height = 0.0
        for label, (values, color) in counts.items():
            values = np.asarray(values)
            histogram(axes, values, color, label)
            height = max(height, float(values.max() / max(values.sum(), 1)))
        axes.set_xlim(_WIDEST)
        ranges(axes, formats, height)
        axes.set_ylim(0, height * (1.12 + 0.09 * len(formats)))
        axes.set_xlabel("exponent e: magnitudes from 2^e up to 2^(e + 1)      light: subnormal, dark: normal")
        axes.set_ylabel("share of the numbers")
        axes.set_title(caption)
    return made


def sweep(lost: dict[str, tuple[list[float], list[float]]], exponents: list[int], caption: str) -> Figure:
    """Shares that are lost at each scale, by format name: (underflow, overflow), one of each for every exponent.

    What to see: a valley for each format, and how wide it is. A mark shows where it is lowest.
    """
    with plots.style():
        made, axes = plots.figure(9.5, 4.2)
        for row, (name, (under, over)) in enumerate(lost.items()):
            color = plots.color_of(name)
            for shares, style in ((under, "-"), (over, (0, (3, 2)))):
                axes.semilogy(exponents, np.maximum(shares, _FLOOR), color=color, linestyle=style)
            axes.text(
                exponents[0] - 0.4, max(under[0], _FLOOR), plots.short_name(name), color=color, ha="right", va="center",
                fontweight="bold",
            )  # fmt: skip
            best = int(np.argmin(np.add(under, over)))
            axes.plot([exponents[best]], [_FLOOR * 1.6 * 1.9**row], marker="v", color=color, markersize=7)
        axes.set_xlim(exponents[0] - 3.5, exponents[-1] + 0.5)
        axes.set_ylim(_FLOOR, 1.4)
        axes.set_xlabel("scale, as a power of two      solid: becomes zero, dashed: too large")
        axes.set_ylabel("share of the numbers (log axis)")
        axes.grid(axis="y")
        axes.set_title(caption)
    return made
