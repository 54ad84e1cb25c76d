"""A recording of a training run: one line of JSON for each recorded step, written as it happens, read back as arrays.

A line is `{"step": 10, "loss": 2.9, ..., "activations": {layer: histogram}, "gradients": {layer: histogram}}`. A
histogram is the exponents' counts without the empty ends: `{"first": -31, "counts": [1, 0, 4]}`; first is an exponent.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from lowprec_lab.files import explained, under_grading, work_folder
from lowprec_lab.instruments import HIGHEST_EXPONENT, LOWEST_EXPONENT

PLACES = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
KINDS = ("activations", "gradients")


def packed(counts: Tensor | Sequence[int]) -> dict:
    """A histogram of exponents, (277,), as it is written: without the empty ends."""
    values = np.asarray(counts, dtype=np.int64)
    places = np.flatnonzero(values)
    if not places.size:
        return {"first": 0, "counts": []}
    first, last = int(places[0]), int(places[-1])
    return {"first": first + LOWEST_EXPONENT, "counts": values[first : last + 1].tolist()}


def unpacked(histogram: dict) -> np.ndarray:
    """The counts, int64 (277,), of a histogram as it is written."""
    counts, start = np.zeros(PLACES, dtype=np.int64), histogram["first"] - LOWEST_EXPONENT
    counts[start : start + len(histogram["counts"])] = histogram["counts"]
    return counts


class Recording:
    """The lines of one run. path: the file that each line is added to as it comes; None keeps them in memory alone."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.lines = path, []
        if path is not None:
            with explained(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("", encoding="utf-8")

    @classmethod
    def named(cls, name: str) -> Recording:
        """A new recording in `work/recordings/<name>.jsonl`, over an older one of that name.

        Under grading, where nothing of the learner's is touched, it is in a temporary folder.
        """
        folder = Path(tempfile.mkdtemp(prefix="lowprec-recordings-")) if under_grading() else work_folder()
        return cls(folder / "recordings" / f"{name}.jsonl")

    @classmethod
    def read(cls, path: Path | str) -> Recording:
        """The recording in a file; a last line that is cut off, as a run that was killed leaves it, is left out."""
        found, path = cls(), Path(path)
        with explained(path, "read"):
            texts = path.read_text(encoding="utf-8").splitlines()
        for number, text in enumerate(texts, start=1):
            try:
                found.lines.append(json.loads(text))
            except ValueError:
                if number < len(texts):
                    raise ValueError(f"line {number} of {path} is no JSON") from None
        found.path = path
        return found

    def write(self, line: dict) -> None:
        """Add a line, in memory and in the file."""
        text = json.dumps(line)
        self.lines.append(json.loads(text))
        if self.path is not None:
            with explained(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    @property
    def steps(self) -> list[int]:
        """The recorded steps."""
        return [line["step"] for line in self.lines]

    @property
    def layers(self) -> list[str]:
        """The names of the layers, as the first line has them."""
        return list(self.lines[0]["gradients"]) if self.lines else []

    def column(self, name: str) -> list[float]:
        """One value of each line, such as "loss"."""
        return [line[name] for line in self.lines]

    def counts(self, kind: str = "gradients") -> np.ndarray:
        """All histograms: int64 (layers, steps, 277). kind: "gradients" or "activations"."""
        rows = [[unpacked(line[kind][layer]) for line in self.lines] for layer in self.layers]
        return np.asarray(rows, dtype=np.int64).reshape(len(self.layers), len(self.lines), PLACES)


def median_exponent(counts: np.ndarray) -> np.ndarray:
    """The exponent of the middle one of the counted numbers: float64, (...), from (..., 277); NaN for none."""
    total = counts.sum(-1, keepdims=True)
    place = (counts.cumsum(-1) * 2 >= total).argmax(-1)
    return np.where(total[..., 0] > 0, place + float(LOWEST_EXPONENT), np.nan)


def share_below(counts: np.ndarray, exponent: int) -> np.ndarray:
    """The share of the counted numbers below 2^exponent: float64, (...), from (..., 277); NaN for none."""
    return _share(counts, slice(0, max(exponent - LOWEST_EXPONENT, 0)))


def share_from(counts: np.ndarray, exponent: int) -> np.ndarray:
    """The share of the counted numbers from 2^exponent on: float64, (...), from (..., 277); NaN for none."""
    return _share(counts, slice(max(exponent - LOWEST_EXPONENT, 0), None))


def _share(counts: np.ndarray, places: slice) -> np.ndarray:
    total = counts.sum(-1)
    with np.errstate(invalid="ignore"):
        return np.where(total > 0, counts[..., places].sum(-1) / np.maximum(total, 1), np.nan)
