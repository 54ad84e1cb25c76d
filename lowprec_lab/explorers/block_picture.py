"""BlockExplorer as a still picture: the row with what each block's scale reaches, and below it the errors of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter

from lowprec_lab import plots
from lowprec_lab.explorers.blocks import BlockFormat, element_values

_KEPT, _LOST, _CUT, _PLAIN = "#57606A", "#93246F", "#8A5000", "#57606A"
_DEEP = 14  # so many binades below the largest number of the row without its outlier are shown
_LEAST = 1e-3  # errors below it are drawn there
_SLACK = 1 + 2.0**-20  # scales in float32 are rounded


@dataclass(frozen=True)
class Shown:
    """One choice of the explorer. numbers, values: (K,). scale, errors, plain_errors: (blocks,). plain: one scale."""

    fmt: BlockFormat
    mode: str
    log2_outlier: int
    place: int
    numbers: np.ndarray
    values: np.ndarray
    scale: np.ndarray
    plain: float
    errors: np.ndarray
    plain_errors: np.ndarray


def draw(shown: Shown, error: float, error_with_one_scale: float) -> Figure:
    """What to see: the block that the outlier is in reaches less far down, and all others stay as they were."""
    with plots.style():
        made, (above, below) = plots.figure(10.5, 5.2, rows=2, sharex=True, height_ratios=[2.4, 1])
        _numbers(above, shown)
        _errors(below, shown)
        above.set_title(
            f"{shown.fmt.name} ({shown.mode}), outlier of 2^{shown.log2_outlier}:   error of the others "
            f"{error:.2%},   with one scale for all {error_with_one_scale:.2%}",
            fontsize=10.5,
        )
    return made


def reach(fmt: BlockFormat) -> tuple[float, float]:
    """(up to what size numbers become 0, the largest value), both for a scale of 1."""
    values = element_values(fmt.element)
    values = values[np.isfinite(values) & (values > 0)]
    return float(values.min()) / 2, float(values.max())


def _numbers(axes: Axes, shown: Shown) -> None:
    sizes, places = np.abs(shown.numbers.astype(np.float64)), np.arange(len(shown.numbers))
    others = np.delete(sizes, shown.place)
    bottom = np.floor(np.log2(others.max() or sizes.max())) - _DEEP
    low, high = reach(shown.fmt)
    color = plots.color_of(shown.fmt.element)
    with np.errstate(all="ignore"):
        logs = np.maximum(np.log2(sizes), bottom)
        tops = np.log2(shown.scale.astype(np.float64) * high)
        floors = np.maximum(np.log2(shown.scale.astype(np.float64) * low), bottom)
        plain = np.log2(float(shown.plain) * low)
    for at, (start, end) in enumerate(zip(floors, tops, strict=True)):
        if np.isfinite(end) and end > start:
            left = at * shown.fmt.block
            right = min(left + shown.fmt.block, len(sizes)) - 0.5
            axes.fill_between([left - 0.5, right], start, end, color=color, alpha=0.16, linewidth=0)
    lost = (shown.values == 0) & (sizes > 0)
    largest = np.repeat(shown.scale.astype(np.float64) * high, shown.fmt.block)[: len(sizes)]
    cut = ~lost & (sizes > largest * _SLACK)
    axes.vlines(places[~lost], bottom, logs[~lost], color=_KEPT, linewidth=1.1)
    axes.plot(places[lost], logs[lost], "x", color=_LOST, markersize=4.5)
    axes.plot(places[cut], logs[cut], "^", color=_CUT, markersize=5)
    axes.plot([shown.place], [logs[shown.place]], "o", markersize=11, markerfacecolor="none", color="#B02A5B")
    if plain > bottom:
        axes.axhline(plain, color=_PLAIN, linestyle="--", linewidth=1)
    ends = [*tops[np.isfinite(tops)], logs.max()]
    axes.set_ylim(bottom, max(ends) + 1)
    axes.yaxis.set_major_locator(FixedLocator(np.arange(np.ceil(bottom / 4) * 4, max(ends) + 1, 4)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda power, _: f"$2^{{{power:.0f}}}$"))
    axes.set_ylabel("magnitude")
    axes.grid(visible=False)


def _errors(axes: Axes, shown: Shown) -> None:
    width = shown.fmt.block
    middles = [(at * width + min((at + 1) * width, len(shown.numbers)) - 1) / 2 for at in range(len(shown.errors))]
    ours, plain = (np.maximum(np.nan_to_num(each, nan=np.inf), _LEAST) for each in (shown.errors, shown.plain_errors))
    axes.vlines(middles, ours, plain, color="#AEB6BF", linewidth=1)
    axes.plot(middles, plain, "D", color=_PLAIN, markersize=5, markerfacecolor="white")
    axes.plot(middles, ours, "o", color=plots.color_of(shown.fmt.element), markersize=6)
    for at in range(0, len(shown.numbers) + 1, width):
        axes.axvline(at - 0.5, color="#D5DAE0", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylim(_LEAST * 0.8, 1.6)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda error, _: f"{100 * error:.3g} %"))
    axes.set_ylabel("error of a block")
    axes.set_xlim(-1, len(shown.numbers))
    axes.set_xlabel(
        "number of the row      shaded: what the block's scale reaches, cross: becomes 0, triangle: is cut, ring: the "
        "outlier\ndashed: below it all become 0 under one scale for all; diamond: the block's error then",
        fontsize=9,
    )
    axes.grid(visible=False)
