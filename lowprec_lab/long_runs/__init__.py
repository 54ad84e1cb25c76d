"""Training runs that take longer than a page may: made once with `lowprec-lab record`, kept small, shown by a page.

    recorded = long_runs("06_loss_scaling")
    print(recorded.table("float32"))
    recorded.plot()

`<chapter>.json` beside this file holds what a page shows of them: validation losses, means of training losses, and what
the runs were told. `lowprec-lab record 06` makes them again, and says how they differ.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from lowprec_lab.chapters import find_chapter
from lowprec_lab.files import write_whole

EVERY = 25  # steps whose mean training loss is kept as one number
SEEDS = {"06_loss_scaling": (1337, 1, 2), "10_fp8_nanogpt": (1337, 1, 2, 3, 4)}


@dataclass(frozen=True)
class Variant:
    """One way to train, which a chapter compares with others.

    name: as pages write it. changes: to the settings of the `baby` preset. fmt: whose colour its curves have.
    line: matplotlib's style of them.
    """

    name: str
    changes: dict
    fmt: str
    line: str = "-"

    @property
    def slug(self) -> str:
        """The name as part of a folder's."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.name.lower()).split())


VARIANTS: dict[str, tuple[Variant, ...]] = {
    # 65536 is where torch's scaler begins; 640 batches of `baby` have as many tokens as a step of nanoGPT's GPT-2.
    "06_loss_scaling": (
        Variant("float32", {"precision": "fp32"}, "float32"),
        Variant("BF16", {"precision": "bf16"}, "bfloat16"),
        Variant("FP16, scaler", {"precision": "fp16"}, "float16"),
        Variant("FP16, 1/640 of a step, scaled", {"precision": "fp16", "loss_scale": "65536/640"}, "float16", "--"),
        Variant("FP16, 1/640 of a step, naive", {"precision": "fp16", "loss_scale": "1/640"}, "float16", "--"),
    ),
    "10_fp8_nanogpt": (
        Variant("float32", {"precision": "fp32"}, "float32"),
        Variant("BF16", {"precision": "bf16"}, "bfloat16"),
        Variant("BF16, weights too", {"precision": "pure_bf16"}, "bfloat16", "--"),
        Variant("FP8 tensorwise", {"precision": "fp8", "recipe": "tensorwise", "sample": 300}, "float8_e4m3fn"),
        Variant("FP8 rowwise", {"precision": "fp8", "recipe": "rowwise"}, "float8_e4m3fn", "--"),
        Variant("FP8 rowwise_with_gw_hp", {"precision": "fp8", "recipe": "rowwise_with_gw_hp"}, "float8_e4m3fn", ":"),
        Variant("FP8 delayed", {"precision": "fp8", "recipe": "delayed"}, "float8_e5m2", "-."),
    ),
}


@dataclass(frozen=True)
class RecordedRun:
    """A run, as a page needs it.

    name: its variant's. seed. losses: (last step, mean training loss) for every 25 steps. validations: (step,
    validation loss). skipped: the number of steps that were skipped. sample: what the model wrote at the end, if it was
    asked to.
    """

    name: str
    seed: int
    losses: list[tuple[int, float]]
    validations: list[tuple[int, float]]
    skipped: int
    sample: str = ""

    @classmethod
    def of(cls, name: str, seed: int, records: Sequence[dict], sample: str = "") -> RecordedRun:
        """From the log of a run, a dict for each step, and what it wrote."""
        parts = [records[first : first + EVERY] for first in range(0, len(records), EVERY)]
        losses = [(part[-1]["step"], round(statistics.fmean(each["loss"] for each in part), 4)) for part in parts]
        validations = [(each["step"], round(each["val_loss"], 5)) for each in records if "val_loss" in each]
        return cls(name, seed, losses, validations, sum(bool(each["skipped"]) for each in records), sample)

    @property
    def final(self) -> float:
        """The last validation loss."""
        return self.validations[-1][1]


@dataclass(frozen=True)
class LongRuns:
    """The recorded runs of a chapter.

    made_with: the text, torch, number of threads and of steps, and the losses of models that know nothing, and that
    know how often each character comes. runs: all of them.
    """

    chapter: str
    made_with: dict
    runs: list[RecordedRun] = field(default_factory=list)

    def finals(self, name: str) -> dict[int, float]:
        """Seed -> last validation loss, of a variant. Raises KeyError for one that was not recorded."""
        found = {run.seed: run.final for run in self.runs if run.name == name}
        if not found:
            known = ", ".join(dict.fromkeys(run.name for run in self.runs))
            raise KeyError(f"there is no recorded run {name!r}. There are: {known}")
        return found

    def gap(self, name: str, baseline: str) -> tuple[float, float]:
        """(mean, its standard error) over seeds of how far `name` ends above `baseline`, as a share of its loss.

        Runs of the same seed see the same batches and are compared in pairs. The error of one pair is NaN.
        """
        return self.gaps(name, baseline)[-1][1:]

    def gaps(self, name: str, baseline: str) -> list[tuple[int, float, float]]:
        """(step, mean gap, its standard error) at every validation, as `gap` has them for the last one."""
        self.finals(name), self.finals(baseline)  # KeyError for one that was not recorded
        ours, theirs = ({run.seed: dict(run.validations) for run in self.runs if run.name == each}
                        for each in (name, baseline))  # fmt: skip
        seeds = [seed for seed in ours if seed in theirs]
        found = []
        for step in ours[seeds[0]]:
            shares = [ours[seed][step] / theirs[seed][step] - 1 for seed in seeds]
            error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
            found.append((step, statistics.fmean(shares), error))
        return found

    def table(self, baseline: str) -> str:
        """A line for each variant: seeds, mean last validation loss, gap to `baseline`, skipped steps."""
        rows = [("", "seeds", "validation loss", f"against {baseline}", "skipped steps")]
        for name in dict.fromkeys(run.name for run in self.runs):
            finals = self.finals(name)
            mean, error = self.gap(name, baseline)
            spread = "" if math.isnan(error) else f" ± {error:.2%}"
            skipped = sum(run.skipped for run in self.runs if run.name == name)
            gap = "" if name == baseline else f"{mean:+.2%}{spread}"
            rows.append((name, str(len(finals)), f"{statistics.fmean(finals.values()):.4f}", gap, str(skipped)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def plot(self, title: str, highest: float | None = None):
        """Training losses (thin) and validation losses (dots) of all runs: a matplotlib Figure.

        highest: where the loss axis ends, for early steps that would squeeze the rest.
        """
        from lowprec_lab import compare, plots

        variants = {each.name: each for each in VARIANTS[self.chapter]}
        with plots.style():
            made, axes = plots.figure(9.5, 5)
            ends: dict[str, tuple[float, float, str, str]] = {}
            for run in self.runs:
                variant = variants[run.name]
                color, line = plots.color_of(variant.fmt), variant.line
                axes.plot(*zip(*run.losses, strict=True), color=color, linestyle=line, linewidth=0.8, alpha=0.6)
                axes.plot(*zip(*run.validations, strict=True), color=color, linestyle=line, marker="o", markersize=3.5)
                ends.setdefault(run.name, (*run.validations[-1], run.name, color))
            axes.set_ylim(top=highest)
            axes.set_xlabel("step")
            axes.set_ylabel("loss (nats for each character)")
            axes.grid()
            axes.set_title(title)
            compare.label_ends(axes, list(ends.values()))
        return made

    def plot_gaps(self, baseline: str, title: str):
        """How far every other variant is above `baseline` at each validation, with standard errors: a Figure."""
        from lowprec_lab import compare, plots

        names = {run.name for run in self.runs} - {baseline}
        variants = [each for each in VARIANTS[self.chapter] if each.name in names]
        with plots.style():
            made, axes = plots.figure(9.5, 4.2)
            ends = []
            for place, variant in enumerate(variants):
                steps, means, errors = (np.array(each) for each in zip(*self.gaps(variant.name, baseline), strict=True))
                color, apart = plots.color_of(variant.fmt), 5 * (place - len(variants) / 2)  # so that bars can be told
                bars = None if np.isnan(errors).any() else 100 * errors
                axes.errorbar(steps + apart, 100 * means, bars, color=color, linestyle=variant.line, linewidth=1.2)
                ends.append((float(steps[-1]), float(100 * means[-1]), variant.name, color))
            axes.axhline(0, color=plots.color_of("float32"), linewidth=0.8)
            axes.set_xlabel("step")
            axes.set_ylabel(f"validation loss above {baseline} (%)")
            axes.set_title(title)
            compare.label_ends(axes, ends)
        return made


def loss_of_frequencies(corpus) -> float:
    """The validation loss of a model that knows how often each character comes in the training text, and no more.

    Each character is counted once more than it comes, so that none is impossible. Nats for each character.
    """
    seen, asked = (
        np.bincount(corpus.split(split), minlength=len(corpus.vocabulary)) for split in ("train", "validation")
    )
    return float(-(asked * np.log((seen + 1) / (seen.sum() + seen.size))).sum() / asked.sum())


def path_of(chapter: str) -> Path:
    """Where the recorded runs of a chapter are kept."""
    return Path(__file__).with_name(f"{chapter}.json")


def long_runs(chapter: str) -> LongRuns:
    """The recorded runs of a chapter ("06", "06_loss_scaling", "loss_scaling").

    Raises ValueError for a chapter that has none.
    """
    name = _chapter(chapter)
    kept = json.loads(path_of(name).read_text(encoding="utf-8"))
    runs = [
        RecordedRun(**{**each, "losses": _pairs(each["losses"]), "validations": _pairs(each["validations"])})
        for each in kept["runs"]
    ]
    return LongRuns(kept["chapter"], kept["made_with"], runs)


def _chapter(text: str) -> str:
    name = find_chapter(text).name
    if name not in VARIANTS:
        raise ValueError(f"chapter {name} has no recorded runs. These have: {', '.join(VARIANTS)}")
    return name


def _pairs(values: list[list]) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in values]


def record(
    chapter: str, seeds: Sequence[int] = (), out: Path | None = None, say: Callable[[str], None] = print, **changes
) -> LongRuns:
    """Train every variant of a chapter with every seed, and write what a page shows of them to `out`.

    seeds: default: the chapter's own in `SEEDS`.
    Each run is `work/runs/<chapter's number>-<variant>-<seed>`: one that was stopped goes on, one that is whole is
    taken as it is. changes: to the settings of all of them (steps, say). out: default: the file that the page reads.
    """
    import torch

    from lowprec_lab.data import load_corpus
    from lowprec_lab.settings import settings
    from lowprec_lab.train import train

    name, corpus = _chapter(chapter), load_corpus(say)
    runs = []
    for seed in seeds or SEEDS[name]:
        for variant in VARIANTS[name]:
            told = settings("baby", **{"seed": seed, "sample": 0, "threads": 1, **variant.changes, **changes})
            result = train(told, f"{name[:2]}-{variant.slug}-{seed}", resume=True, corpus=corpus, say=say)
            if result.stopped:
                raise KeyboardInterrupt
            runs.append(RecordedRun.of(variant.name, seed, result.records, result.sample))
            say(f"{variant.name}, seed {seed}: validation loss {runs[-1].final:.4f}")
    runs.sort(key=lambda run: [each.name for each in VARIANTS[name]].index(run.name))
    made_with = {"text": corpus.name, "torch": str(torch.__version__), "threads": 1, "steps": told.steps,
                 "knowing_nothing": round(math.log(len(corpus.vocabulary)), 4),
                 "knowing_frequencies": round(loss_of_frequencies(corpus), 4)}  # fmt: skip
    recorded = LongRuns(name, made_with, runs)
    content = json.dumps({"chapter": name, "made_with": made_with, "runs": [asdict(run) for run in runs]})
    write_whole(out or path_of(name), content.replace('{"name"', '\n{"name"').encode() + b"\n")
    return recorded


__all__ = ["LongRuns", "RecordedRun", "Variant", "VARIANTS", "long_runs", "record"]
