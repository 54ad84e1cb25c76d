"""CastPolicyExplorer as a still picture: a line for each op, and the way of the data on the left."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowprec_lab import plots
from lowprec_lab.explorers.casting import KEYS, TABLES
from lowprec_lab.formats import BF16, FP32

_COLORS = {"FP32": plots.color_of(FP32), "BF16": plots.color_of(BF16)}
_WIDTHS = {"FP32": 5.0, "BF16": 2.5}
_QUIET = "#57606A"
_POLICY_COLORS = {"lower precision": _COLORS["BF16"], "fp32": _COLORS["FP32"], "promote": "#9A6700", "as is": _QUIET}
_STREAM, _BRANCH, _NAME, _IN, _POLICY, _OUT, _OTHER = 0.02, 0.05, 0.085, 0.41, 0.63, 0.76, 0.85


def draw(table: str, rows: list[dict], other: str, others: list[dict], lines: list[str]) -> Figure:
    """rows: of `casting.trace`. What to see: where grey becomes blue, and that the stream on the left stays grey."""
    by_key, elsewhere = ({row["key"]: row for row in each} for each in (rows, others))
    keys = [key for key in KEYS if key in by_key or key in elsewhere]
    heights = {key: -place for place, key in enumerate(keys)}
    with plots.style():
        made, axes = plots.figure(10.5, 0.29 * len(keys) + 1.2)
        axes.set_xlim(0, 1)
        axes.set_ylim(-len(keys) - 0.9, 1.6)
        axes.axis("off")
        heads = ((_NAME, "op"), (_IN, "goes in"), (_POLICY, "policy"), (_OUT, "comes out"))
        for x, word in (*heads, (_OTHER, f"{TABLES[other]}, where it differs")):
            axes.text(x, 0.95, word, color=_QUIET, fontsize=9)
        draw_way(axes, rows, heights)
        for key in keys:
            _draw_op(axes, heights[key], by_key.get(key), elsewhere.get(key))
        axes.set_title(f"A forward pass of one block: {TABLES[table]}")
        axes.text(0.08, -len(keys) - 0.6, "; ".join(lines), fontsize=8, color=_QUIET)
    return made


def draw_way(axes: Axes, rows: list[dict], heights: dict[str, int]) -> None:
    """The residual stream, and the branches that leave it and are added to it: thick in FP32, thin in BF16."""
    adds = [row for row in rows if row["op"] == "add"]
    for row, following in zip(rows, rows[1:], strict=False):
        ends = [heights[row["key"]], heights[following["key"]]]
        _line(axes, [_side(row), _side(following)], ends, row["out"])
    for row, following in zip(adds, adds[1:], strict=False):
        _line(axes, [_STREAM, _STREAM], [heights[row["key"]], heights[following["key"]]], row["out"])
    for row in adds:
        axes.text(_STREAM, heights[row["key"]], "+", ha="center", va="center", fontsize=10, fontweight="bold",
                  bbox={"boxstyle": "circle,pad=0.1", "facecolor": "white", "edgecolor": _QUIET})  # fmt: skip


def _side(row: dict) -> float:
    return _STREAM if row["op"] == "add" or row["part"] == "head and loss" else _BRANCH


def _line(axes: Axes, x: list[float], y: list[float], dtype: str | None) -> None:
    axes.plot(x, y, color=_COLORS.get(dtype, _QUIET), linewidth=_WIDTHS.get(dtype, 1.5), solid_capstyle="round")


def _draw_op(axes: Axes, y: int, row: dict | None, other: dict | None) -> None:
    shown = row or other
    axes.text(_NAME, y, shown["op"], va="center", fontweight="bold", color=None if row else _QUIET)
    axes.text(0.245, y, shown["words"], va="center", fontsize=8.5, color=_QUIET)
    if row:
        at = _IN
        for arg in row["args"]:
            at = _draw_argument(axes, at, y, arg)
        axes.text(_POLICY, y, row["policy"], va="center", fontsize=9, color=_POLICY_COLORS[row["policy"]])
        _dtype(axes, _OUT, y, row["out"] or "refused")
    same = row and other and (row["policy"], row["out"]) == (other["policy"], other["out"])
    if shown["key"] == "loss" and not other:
        axes.text(_OTHER, y, "as is: its parts, below", va="center", fontsize=9, color=_QUIET)
    elif other and not same:
        axes.text(_OTHER, y, other["policy"], va="center", fontsize=9, color=_POLICY_COLORS[other["policy"]])
        _dtype(axes, _OTHER + 0.118, y, other["out"])


def _draw_argument(axes: Axes, x: float, y: int, arg: dict) -> float:
    if arg["was"] not in _COLORS:
        return x
    _dtype(axes, x, y, arg["was"])
    if arg["how"] != "as it is":
        axes.text(x + 0.039, y, {"cast": "→", "kept": "⇢"}[arg["how"]], va="center", fontsize=9, color=_QUIET)
        _dtype(axes, x + 0.056, y, arg["is"])
    return x + (0.105 if arg["how"] != "as it is" else 0.05)


def _dtype(axes: Axes, x: float, y: int, name: str | None) -> None:
    color = _COLORS.get(name, "#A8200D")
    axes.text(x, y, name, va="center", fontsize=8.5, fontweight="bold", color=color)
