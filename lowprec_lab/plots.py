"""The pictures of the course: one style, one colour for each format, and the pictures that chapters share.

Every function returns a matplotlib Figure that pyplot has let go of, so that a notebook shows it once: as the cell's
value, or with `display(figure)`.

Colours: hues that stay apart for the colour-blind (after Okabe and Ito, and Paul Tol), darkened until text in them can
be read on white. No picture relies on colour alone: formats are labelled where they are drawn.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter

from lowprec_lab.formats import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FP16, FP32, TF32, Format
from lowprec_lab.tables import ask, table_of

FORMAT_COLORS: dict[str, str] = {
    FP32.name: "#4D4D4D",
    TF32.name: "#7A7A7A",
    BF16.name: "#0065A8",
    FP16.name: "#007A5A",
    E4M3.name: "#C24E00",
    E5M2.name: "#6B1160",
    E4M3FNUZ.name: "#9A6700",
    E5M2FNUZ.name: "#B0508F",
    E8M0.name: "#2B83B8",
    E2M3.name: "#5B7A12",
    E3M2.name: "#00809A",
    E2M1.name: "#332288",
}

# Names for labels beside a line, where the registered name would not fit.
SHORT_NAMES: dict[str, str] = {
    FP32.name: "FP32",
    TF32.name: "TF32",
    BF16.name: "BF16",
    FP16.name: "FP16",
    E4M3.name: "E4M3",
    E5M2.name: "E5M2",
    E4M3FNUZ.name: "E4M3 fnuz",
    E5M2FNUZ.name: "E5M2 fnuz",
    E8M0.name: "E8M0",
    E2M3.name: "E2M3",
    E3M2.name: "E3M2",
    E2M1.name: "E2M1",
}

_OWN_FORMAT = "#1B1F24"
_INK = "#1B1F24"
_QUIET = "#57606A"

_STYLE = {
    "figure.dpi": 110,
    "figure.facecolor": "white",
    "savefig.dpi": 110,
    "savefig.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": _QUIET,
    "axes.labelcolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlepad": 12,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": "#E3E6EA",
    "grid.linewidth": 0.8,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": _INK,
    "lines.linewidth": 2,
    "legend.frameon": False,
}


def style() -> AbstractContextManager:
    """The style of the course, for the pictures inside `with style():`."""
    return matplotlib.rc_context(_STYLE)


def color_of(fmt: Format | str) -> str:
    """The colour of a format everywhere; a format of your own is drawn in the colour of the text."""
    return FORMAT_COLORS.get(str(fmt), _OWN_FORMAT)


def short_name(fmt: Format | str) -> str:
    """A name that fits beside a line: "E4M3"."""
    return SHORT_NAMES.get(str(fmt), str(fmt))


def figure(width: float = 9, height: float = 4, rows: int = 1, **options: object) -> tuple[Figure, object]:
    """A new figure (inches) and its axes, which pyplot does not show by itself. Use it inside `with style():`."""
    made, axes = plt.subplots(rows, 1, figsize=(width, height), layout="constrained", **options)
    plt.close(made)
    return made, axes


def png(picture: Figure) -> bytes:
    """The picture as PNG."""
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


# --- all values on one line -------------------------------------------------------------------------------------------

_LINEAR_BELOW = -18  # the symmetric log axis is linear between -2^-18 and 2^-18
_EDGE = 17  # and ends at 2^17
_PIXELS, _TOUCHING = 2400, 3


def number_line(formats: Sequence[Format], values: Mapping[str, np.ndarray] | None = None) -> Figure:
    """All values of the formats, one row each: over their range on a symmetric log axis, and from 0 to 2 to scale.

    formats: of at most 16 bits each. values: the values by format name (float, any order), where you have your own;
    else whatever `decode` is in use gives them.
    What to see: a format is dense near zero and sparse far out; each power of two has as many values as any other.
    """
    rows = [(fmt, _finite(values[fmt.name] if values else table_of(fmt).values)) for fmt in formats]
    with style():
        made, (wide, close) = figure(9.5, 1.6 + 0.95 * len(rows), rows=2)
        for height, (fmt, row) in enumerate(reversed(rows)):
            _strokes(wide, _symmetric_log(row), height, color_of(fmt))
            _strokes(close, row[(row >= 0) & (row <= 2)], height, color_of(fmt), reach=2)
            _mark_beyond(wide, row, height, color_of(fmt))
        for axes in (wide, close):
            _name_rows(axes, [fmt for fmt, _ in reversed(rows)])
        _symmetric_log_axis(wide)
        wide.set_title("Every value of each format")
        wide.set_xlabel("value (symmetric log axis: one step for each power of two)")
        close.set_xlim(-0.02, 2.02)
        close.set_xlabel("value (from 0 to 2, to scale)")
    return made


def _finite(values: np.ndarray) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64).ravel()
    return np.unique(array[np.isfinite(array)])


def _symmetric_log(values: np.ndarray) -> np.ndarray:
    linear = np.ldexp(1.0, _LINEAR_BELOW)
    size = np.abs(values)
    scaled = np.where(size <= linear, size / linear, 1 + np.log2(np.maximum(size, linear) / linear))
    return np.sign(values) * scaled


def _strokes(axes: Axes, places: np.ndarray, height: float, color: str, reach: float | None = None) -> None:
    """A stroke for each value; values that would share a pixel become one, so that 65,536 of them cost nothing."""
    reach = reach if reach is not None else 1 + _EDGE - _LINEAR_BELOW
    inside = places[np.abs(places) <= reach]
    pixels = np.unique(np.round(inside / reach * _PIXELS))
    # Where strokes would touch they become a bar: drawn one by one they leave slits that look like missing numbers.
    runs = np.split(pixels, np.flatnonzero(np.diff(pixels) > _TOUCHING) + 1)
    alone = [run[0] * reach / _PIXELS for run in runs if len(run) == 1]
    bars = [(run[0] * reach / _PIXELS, (run[-1] - run[0]) * reach / _PIXELS) for run in runs if len(run) > 1]
    axes.vlines(alone, height - 0.34, height + 0.34, color=color, linewidth=0.7)
    axes.broken_barh(bars, (height - 0.34, 0.68), color=color, linewidth=0)


def _mark_beyond(axes: Axes, values: np.ndarray, height: float, color: str) -> None:
    edge = 1 + _EDGE - _LINEAR_BELOW
    if values.max() <= 2.0**_EDGE:
        return
    label = f"→ {values.max():.3g}"
    axes.text(edge + 0.5, height, label, color=color, va="center", ha="left", fontsize=9, clip_on=False)


def _name_rows(axes: Axes, formats: Sequence[Format]) -> None:
    axes.set_yticks(range(len(formats)), [short_name(fmt) for fmt in formats])
    for label, fmt in zip(axes.get_yticklabels(), formats, strict=True):
        label.set(color=color_of(fmt), fontweight="bold")
    axes.set_ylim(-0.6, len(formats) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _symmetric_log_axis(axes: Axes) -> None:
    exponents = (-16, -8, 0, 8, 16)
    values = [-(2.0**e) for e in reversed(exponents)] + [0.0] + [2.0**e for e in exponents]
    axes.xaxis.set_major_locator(FixedLocator(list(_symmetric_log(np.array(values)))))
    axes.set_xticklabels([_power_text(value) for value in values])
    edge = 1 + _EDGE - _LINEAR_BELOW
    axes.set_xlim(-edge - 0.3, edge + 0.3)


def _power_text(value: float) -> str:
    if value == 0:
        return "0"
    sign = "−" if value < 0 else ""
    return f"${sign}2^{{{int(np.log2(abs(value)))}}}$"


# --- range against precision ------------------------------------------------------------------------------------------


def range_and_precision(
    formats: Sequence[Format], limits: Mapping[str, tuple[float | None, float, float]] | None = None
) -> Figure:
    """One bar for each format: how far it reaches (across), and with how many significant bits (up).

    limits: (smallest subnormal or None, smallest normal, largest) by format name, where you have your own; else
    whatever `min_subnormal`, `min_normal` and `max_finite` are in use.
    What to see: with the same number of bits, every bit of reach is paid for with a bit of precision.
    """
    rows = [(fmt, limits[fmt.name] if limits else _limits(fmt)) for fmt in formats]
    rows.sort(key=lambda row: (-row[0].mantissa_bits, -row[1][2], row[0].name))
    with style():
        made, axes = figure(9.5, 1.4 + 0.42 * len(rows))
        for height, (fmt, (subnormal, normal, largest)) in enumerate(reversed(rows)):
            low, high = np.log2(normal), np.log2(largest)
            bottom = low if subnormal is None else np.log2(subnormal)
            axes.plot([bottom, low], [height, height], color=color_of(fmt), linewidth=2.5, linestyle=(0, (1, 1)))
            axes.plot([low, high], [height, height], color=color_of(fmt), linewidth=9, solid_capstyle="butt")
            name = f"{short_name(fmt)}  {np.floor(high) - bottom + 1:.0f} binades"
            axes.text(high + 4, height, name, color=color_of(fmt), va="center", fontsize=9, fontweight="bold")
        bits = [fmt.mantissa_bits + 1 for fmt, _ in reversed(rows)]
        axes.set_yticks(range(len(rows)), [str(each) for each in bits])
        axes.set_ylabel("significant bits (hidden 1 included)")
        axes.set_xlabel("magnitude (log2 axis)      dotted: subnormal, solid: normal")
        axes.set_xlim(-155, 205)
        axes.set_ylim(-0.7, len(rows) - 0.3)
        axes.set_xticks(range(-128, 129, 32), [f"$2^{{{e}}}$" for e in range(-128, 129, 32)])
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        axes.set_title("Range against precision")
    return made


def _limits(fmt: Format) -> tuple[float | None, float, float]:
    names = ("min_subnormal", "min_normal", "max_finite")
    return tuple(ask(name, lambda function: function(fmt))[0] for name in names)


# --- spacing ----------------------------------------------------------------------------------------------------------

_SPACING_FROM, _SPACING_TO = -20, 20


def spacing(
    formats: Sequence[Format], x: np.ndarray | None = None, ulps: Mapping[str, np.ndarray] | None = None
) -> Figure:
    """The distance between neighbouring values of each format, against the size of the number: a staircase.

    x: magnitudes (float32 exact); ulps: the spacing at each x by format name, where you have your own; else whatever
    `ulp` is in use, from 2^-20 to 2^20.
    What to see: one step up for each power of two, flat where numbers are subnormal, and an end at the largest value.
    """
    if x is None:
        binades = np.arange(_SPACING_FROM, _SPACING_TO)
        x = (np.ldexp(1.0, binades)[:, None] * np.array([1.0, 1.5, 1.999])).ravel().astype(np.float32)
    with style():
        made, axes = figure(9.5, 5)
        ends = [_draw_spacing(axes, fmt, np.asarray(x), ulps) for fmt in formats]
        _label_ends(axes, formats, ends)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"$2^{{{int(round(np.log2(value)))}}}$"))
        axes.set_xlabel("magnitude |x| (log2 axis)")
        axes.set_ylabel("ulp: distance to the next value (log2 axis)")
        axes.grid()
        axes.set_title("How far apart are the neighbours?")
    return made


def _draw_spacing(axes: Axes, fmt: Format, x: np.ndarray, ulps: Mapping[str, np.ndarray] | None) -> tuple[float, float]:
    if ulps is not None:
        steps = np.asarray(ulps[fmt.name], dtype=np.float64)
    else:
        tensor = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
        steps = np.asarray(ask("ulp", lambda function: function(tensor, fmt).numpy())[0])
    subnormal, normal, largest = _limits(fmt)
    inside = (x <= largest) & (x >= (normal if subnormal is None else subnormal))
    axes.loglog(x[inside], steps[inside], base=2, color=color_of(fmt), drawstyle="default")
    return float(x[inside][-1]), float(steps[inside][-1])


# Where a label may stand beside the end of a line: its centre (in label sizes), its offset (points) and alignment.
_LABEL_PLACES = (
    ((-0.5, 0.7), (-2, 5), "right", "bottom"),
    ((0.8, 0.0), (6, 0), "left", "center"),
    ((0.5, -0.7), (0, -5), "left", "top"),
)


def _label_ends(axes: Axes, formats: Sequence[Format], ends: Sequence[tuple[float, float]]) -> None:
    """The name of each format where its line ends: above, beside or below it, the first place with room."""
    lines = [np.log2(line.get_xydata()) for line in axes.get_lines()]
    label_size = np.ptp(np.concatenate(lines), axis=0) / (20, 12)
    for own, (fmt, end) in enumerate(zip(formats, ends, strict=True)):
        others = np.concatenate([np.full((1, 2), np.inf), *lines[:own], *lines[own + 1 :]])
        distances = (others - np.log2(end)) / label_size
        rooms = [np.abs(distances - place[0]).max(axis=1).min() for place in _LABEL_PLACES]
        _, offset, across, up = _LABEL_PLACES[int(np.argmax(np.minimum(rooms, 1.0)))]
        axes.annotate(
            short_name(fmt), end, xytext=offset, textcoords="offset points", fontsize=9, ha=across, va=up,
            fontweight="bold", color=color_of(fmt), annotation_clip=False,
        )  # fmt: skip
