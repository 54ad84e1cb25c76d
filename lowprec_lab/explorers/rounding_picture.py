"""RoundingExplorer as a still picture: the number between its neighbours, and an arrow to each value that is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from lowprec_lab import plots
from lowprec_lab.explorers import ladder, nearest
from lowprec_lab.formats import Format

# How modes are called where they are explained.
MODE_NAMES = {
    "nearest_even": "nearest, ties to even",
    "nearest_away": "nearest, ties away",
    "toward_zero": "toward zero",
    "up": "up",
    "down": "down",
}
_WANTED, _CHOSEN, _QUIET = "#B02A5B", "#1D56A5", "#57606A"
_AROUND = 3


def draw(fmt: Format, text: str, results: Mapping[str, float], overflow: str, line: str) -> Figure:
    """text: the number as it was written; results: what each mode makes of it; line: whose code did."""
    with plots.style():
        made, axes = plots.figure(9.5, 3.4)
        axes.set_title(f"{text} in {fmt.name}, {overflow}", color=plots.color_of(fmt), fontsize=11)
        axes.text(1, 1.06, line, transform=axes.transAxes, ha="right", fontsize=8.5, color=_QUIET)
        axes.yaxis.set_visible(False)
        axes.spines["left"].set_visible(False)
        real = nearest.read_real(text)
        if isinstance(real, float) and math.isnan(real):
            axes.set_axis_off()
            axes.text(0.5, 0.5, f"NaN becomes {_named(results['nearest_even'])}", ha="center", color=_QUIET)
            return made
        _draw_line(axes, fmt, real, text, results)
    return made


def _draw_line(axes: Axes, fmt: Format, real: nearest.Real, text: str, results: Mapping[str, float]) -> None:
    at = ladder.step_below(fmt, real)
    around = _AROUND if fmt.mantissa_bits else 1
    low, high = max(ladder.first_step(fmt), at - around), min(ladder.last_step(fmt), at + around + 1)
    largest = ladder.value_at(fmt, nearest.largest_finite_code(fmt))
    values = [ladder.value_at(fmt, step) for step in range(low, high + 1)]
    is_value = [
        abs(value) <= largest and (fmt.signed or value >= (0 if fmt.subnormals else 1e-300)) for value in values
    ]
    span = values[-1] - values[0]
    axes.set_xlim(values[0] - 0.06 * span, values[-1] + 0.06 * span)
    axes.set_ylim(-0.62, 1.25)
    for value, exists in zip(values, is_value, strict=True):
        axes.vlines(value, 0, 0.12, color=_QUIET, linewidth=1, linestyle="-" if exists else (0, (1, 2)))
        axes.vlines(value, -0.02, 0, color=_QUIET, linewidth=1)
    axes.spines["bottom"].set_position(("data", 0))
    kept = [value for value, exists in zip(values, is_value, strict=True) if exists]
    axes.set_xticks(kept, [f"{value:.9g}".replace("-", "−") for value in kept], fontsize=8)
    edge = min(max(_as_float(real), values[0]), values[-1])
    axes.plot([edge], [0.95], marker="D", color=_WANTED, markersize=8)
    axes.text(edge, 1.06, text, color=_WANTED, ha="center", va="bottom", fontsize=10, fontweight="bold")
    groups: dict[str, list[str]] = {}
    for mode, value in results.items():
        groups.setdefault(_named(value), []).append(mode)
    for name, modes in groups.items():
        value = results[modes[0]]
        target = values[-1] if math.isnan(value) else min(max(value, values[0]), values[-1])
        arrow = FancyArrowPatch((edge, 0.86), (target, 0.14), arrowstyle="-|>", mutation_scale=14, color=_CHOSEN,
                                linewidth=1.8, shrinkA=0, shrinkB=0)  # fmt: skip
        axes.add_patch(arrow)
        side = "center" if target == edge else ("right" if target < edge else "left")
        words = "all five modes" if len(modes) == 5 else "\n".join(MODE_NAMES[mode] for mode in modes)
        outside = "" if target == value else f"{name}: "
        axes.text(target, -0.22, outside + words, color=_CHOSEN, ha=side, va="top", fontsize=8.5)


def _as_float(real: nearest.Real) -> float:
    try:
        return float(real)
    except OverflowError:
        return math.inf if Fraction(real) > 0 else -math.inf


def _named(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.12g}".replace("inf", "∞").replace("-", "−")
