"""ExponentHeatmap: a recorded run as a map of layers and steps, and what a format at a scale would lose of it.

The kernel sends all histograms once; the browser works out medians and shares from them, for any format and scale.
"""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from lowprec_lab import plots
from lowprec_lab.explorers import heatmap_picture
from lowprec_lab.explorers.widget import Explorer, code, one_of
from lowprec_lab.formats import BF16, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, FP16, FP32, Format, get_format
from lowprec_lab.graders import oracle
from lowprec_lab.instruments import LOWEST_EXPONENT
from lowprec_lab.recordings import KINDS, Recording

SCALES = (-16, 48)
_OFFERED = (FP32, BF16, FP16, E5M2, E4M3, E5M2FNUZ, E4M3FNUZ)


class ExponentHeatmap(Explorer):
    """Where in a model, and when in its training, the numbers have which exponents.

    recording: with at least one line. kind: "gradients" or "activations". shown: "exponent" (the median), "underflow"
    (the share that becomes zero) or "overflow" (the share that is too large). fmt: a Format or its name.
    scale_exponent: the numbers are multiplied by 2 to this power first, -16 to 48. All can be set later, and so can
    `layer` and `step`: the cell whose histogram is drawn below the map.

    Shares come from histograms: numbers on the very tie, and those between the largest value and the next power of two,
    count as kept.

    Raises ValueError for what is not on offer, and for a recording without a line.
    """

    _esm = code("exponent_heatmap", "js")
    _css = code("exponent_heatmap", "css")

    def __init__(
        self,
        recording: Recording,
        kind: str = "gradients",
        shown: str = "exponent",
        fmt: str | Format = FP16,
        scale_exponent: int = 0,
    ) -> None:
        super().__init__()
        if not recording.lines:
            raise ValueError("the recording has no line yet: write one, or read one from its file")
        self.recording = recording
        self._formats = {each.name: each for each in _OFFERED}
        self._state = {
            "kind": one_of(kind, KINDS),
            "shown": one_of(shown, heatmap_picture.SHOWN),
            "fmt": self._known(fmt),
            "scale": _scale(scale_exponent),
            "layer": 0,
            "column": len(recording.lines) - 1,
        }
        self.refresh()

    def _known(self, fmt: str | Format) -> str:
        chosen = fmt if isinstance(fmt, Format) else get_format(fmt)
        self._formats[chosen.name] = chosen
        return chosen.name

    def _set(self, **change: object) -> None:
        self._state = {**self._state, **change}

    @property
    def kind(self) -> str:
        """What is shown: "gradients" or "activations"."""
        return self._state["kind"]

    @kind.setter
    def kind(self, kind: str) -> None:
        self._set(kind=one_of(kind, KINDS))

    @property
    def shown(self) -> str:
        """The number that the colour stands for: "exponent", "underflow" or "overflow"."""
        return self._state["shown"]

    @shown.setter
    def shown(self, shown: str) -> None:
        self._set(shown=one_of(shown, heatmap_picture.SHOWN))

    @property
    def fmt(self) -> Format:
        """The format whose losses are counted."""
        return self._formats[self._state["fmt"]]

    @fmt.setter
    def fmt(self, fmt: str | Format) -> None:
        name = self._known(fmt)
        self.refresh()
        self._set(fmt=name)

    @property
    def scale_exponent(self) -> int:
        """The power of two that the numbers are multiplied by."""
        return self._state["scale"]

    @scale_exponent.setter
    def scale_exponent(self, scale_exponent: int) -> None:
        self._set(scale=_scale(scale_exponent))

    @property
    def layer(self) -> str:
        """The layer of the chosen cell."""
        return self.recording.layers[self._state["layer"]]

    @layer.setter
    def layer(self, layer: str) -> None:
        self._set(layer=self.recording.layers.index(one_of(layer, tuple(self.recording.layers))))

    @property
    def step(self) -> int:
        """The step of the chosen cell; setting it chooses the recorded step that is nearest."""
        return self.recording.steps[self._state["column"]]

    @step.setter
    def step(self, step: int) -> None:
        steps = self.recording.steps
        self._set(column=min(range(len(steps)), key=lambda place: abs(steps[place] - step)))

    @property
    def share(self) -> float:
        """What the map shows for the chosen cell: a median exponent, or a share; NaN where nothing was counted."""
        values = heatmap_picture.cells(self.recording, self.kind, self.shown, self.fmt, self.scale_exponent)
        return float(values[self._state["layer"], self._state["column"]])

    def refresh(self) -> None:
        """Take up the recording as it is now."""
        counts = {kind: self.recording.counts(kind) for kind in KINDS}
        there = np.flatnonzero(sum(each.sum((0, 1)) for each in counts.values()))
        first, last = (int(there[0]), int(there[-1])) if there.size else (0, 0)
        self._panels = [
            {
                "layers": self.recording.layers,
                "steps": self.recording.steps,
                "first": first + LOWEST_EXPONENT,
                "width": last - first + 1,
                "counts": {
                    kind: np.ascontiguousarray(each[:, :, first : last + 1], dtype=np.int32).tobytes()
                    for kind, each in counts.items()
                },
                "formats": [_range(fmt) for fmt in self._formats.values()],
                "scales": list(SCALES),
            }
        ]

    def plot(self) -> Figure:
        """The map as a static picture. Returns a matplotlib Figure."""
        return heatmap_picture.draw(self.recording, self.kind, self.shown, self.fmt, self.scale_exponent)

    def __repr__(self) -> str:
        values = heatmap_picture.cells(self.recording, self.kind, self.shown, self.fmt, self.scale_exponent)
        finite = values[np.isfinite(values)]
        lowest, highest = (finite.min(), finite.max()) if finite.size else (math.nan, math.nan)
        spread = f"{lowest:.0f} to {highest:.0f}" if self.shown == "exponent" else f"{lowest:.1%} to {highest:.1%}"
        title = heatmap_picture.title(self.kind, self.shown, self.fmt, self.scale_exponent)
        steps = self.recording.steps
        return f"ExponentHeatmap: {title}: {spread}, in {len(values)} layers, steps {steps[0]} to {steps[-1]}"


def _scale(scale_exponent: int) -> int:
    if type(scale_exponent) is not int or not SCALES[0] <= scale_exponent <= SCALES[1]:
        raise ValueError(f"the scale is 2 to a whole power from {SCALES[0]} to {SCALES[1]}, not {scale_exponent!r}")
    return scale_exponent


def _range(fmt: Format) -> dict:
    """What the browser must know of a format: its ends as exponents."""
    low, high = heatmap_picture.ends(fmt)
    normal = math.frexp(oracle.min_normal(fmt))[1] - 1
    name, color = plots.short_name(fmt), plots.color_of(fmt)
    return {"name": fmt.name, "label": name, "color": color, "low": low, "high": high, "normal": normal}
