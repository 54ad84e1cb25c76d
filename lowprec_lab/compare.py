"""Training runs against each other: a table, and a picture of their losses. Behind `lowprec-lab compare`."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path

from lowprec_lab.runs import Run, RunError, run_folder
from lowprec_lab.settings import Settings

_LAST = 100  # steps whose mean training loss is shown: one batch alone says little
_FORMATS = {
    "fp32": "float32", "bf16": "bfloat16", "pure_bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn",
}  # fmt: skip
_LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Curve:
    """A run as it is compared. records: its log. told: its settings."""

    name: str
    told: Settings
    records: list[dict]

    @property
    def validations(self) -> list[tuple[int, float]]:
        """(step, validation loss) of every validation."""
        return [(record["step"], record["val_loss"]) for record in self.records if "val_loss" in record]

    def summary(self) -> dict:
        """What the table shows, as plain data; a number that the run does not have yet is None."""
        losses = [loss for _, loss in self.validations]
        return {
            "run": self.name,
            "preset": self.told.preset,
            "precision": self.told.label,
            "steps": self.records[-1]["step"],
            "loss": statistics.fmean(record["loss"] for record in self.records[-_LAST:]),
            "val_loss": losses[-1] if losses else None,
            "best_val_loss": min(losses, default=None),
            "skipped": sum(record["skipped"] for record in self.records),
            "tokens_per_s": statistics.median(record["tokens_per_s"] for record in self.records),
        }


def load_curves(names: list[str]) -> list[Curve]:
    """The runs of those names (or paths). Raises RunError for one that is missing or damaged."""
    curves = []
    for name in names:
        run = Run(run_folder(name))
        curves.append(Curve(run.folder.name, run.read_settings(), run.read_log()))
    return curves


def table(curves: list[Curve]) -> str:
    """A line for each run; `vs first` is how far its validation loss is from the first run's."""
    rows = [("run", "preset", "precision", "steps", f"loss (last {_LAST})", "validation", "best", "vs first", "skipped",
             "tokens/s")]  # fmt: skip
    summaries = [curve.summary() for curve in curves]
    for each in summaries:
        rows.append((
            each["run"], each["preset"], each["precision"], str(each["steps"]), f"{each['loss']:.4f}",
            _number(each["val_loss"]), _number(each["best_val_loss"]), _relative(each, summaries[0]),
            str(each["skipped"]), f"{each['tokens_per_s']:,.0f}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "none yet" if value is None else f"{value:.4f}"


def _relative(each: dict, first: dict) -> str:
    if each is first or each["val_loss"] is None or first["val_loss"] is None:
        return ""
    return f"{each['val_loss'] / first['val_loss'] - 1:+.2%}"


def plot(curves: list[Curve]):
    """Training loss (smoothed, thin) and validation loss (dots) of each run, against steps: a matplotlib Figure.

    What to see: whether the lines part, and when.
    """
    from lowprec_lab import plots

    with plots.style():
        made, axes = plots.figure(9.5, 5)
        used: dict[str, itertools.count] = {}
        ends = []
        for curve in curves:
            color = plots.color_of(_FORMATS.get(curve.told.precision, ""))
            line = _LINES[next(used.setdefault(color, itertools.count())) % len(_LINES)]
            steps = [record["step"] for record in curve.records]
            smooth = smoothed([record["loss"] for record in curve.records])
            axes.plot(steps, smooth, color=color, linestyle=line, linewidth=1, alpha=0.7)
            if curve.validations:
                axes.plot(*zip(*curve.validations, strict=True), color=color, linestyle=line, marker="o", markersize=4)
            ends.append((steps[-1], curve.validations[-1][1] if curve.validations else smooth[-1], curve.name, color))
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats for each character)")
        axes.grid()
        axes.set_title("Training loss (thin) and validation loss (dots)")
        label_ends(axes, ends)
    return made


def label_ends(axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Names beside the ends of the lines, moved apart where they would lie on each other."""
    low, high = axes.get_ylim()
    room, height = (high - low) / 22, -float("inf")
    right = max(step for step, *_ in ends)
    for step, loss, name, color in sorted(ends, key=lambda end: end[1]):
        height = max(loss, height + room)
        axes.annotate(
            name, (step, loss), xytext=(right * 1.02, height), textcoords="data", color=color, fontsize=9,
            fontweight="bold", va="center", annotation_clip=False,
        )  # fmt: skip


def smoothed(losses: list[float], window: int = 25) -> list[float]:
    """The mean of each loss and up to `window` - 1 before it."""
    sums = [0.0, *itertools.accumulate(losses)]
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(i + 1, window) for i in range(len(losses))]


def save(picture, path: Path) -> None:
    """Write the picture; the name's ending says how: .png or .svg. Raises RunError for another one."""
    import io

    from lowprec_lab.files import write_whole

    kind = path.suffix.lower()
    if kind not in (".png", ".svg"):
        raise RunError(f"a picture's name ends in .png or .svg, not {path.name!r}")
    buffer = io.BytesIO()
    picture.savefig(buffer, format=kind[1:])
    write_whole(path, buffer.getvalue())
