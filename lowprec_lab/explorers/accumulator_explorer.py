"""AccumulatorExplorer: a running total in a short format next to the exact one, and where it stops.

The kernel works out all totals once for each change of the settings; the browser only walks through them.
"""

from __future__ import annotations

import math
import time
from fractions import Fraction

import numpy as np
from matplotlib.figure import Figure

from lowprec_lab import plots
from lowprec_lab.explorers import accumulator_picture, nearest, running
from lowprec_lab.explorers.widget import Explorer, code, one_of, panel_of, text_of
from lowprec_lab.formats import BF16, FORMATS, Format, get_format

_SETTINGS = ("fmt", "increment", "start")
_QUICK_S = 1.0


class AccumulatorExplorer(Explorer):
    """The same number added again and again, with every total rounded to a format.

    fmt: a Format or its name, with a sign and a zero. increment: what is added. start: the total to begin with. Both
    are rounded to the format first. method: "sequential", "pairwise" or "kahan".
    `n` (how many additions are shown), `method`, `fmt`, `increment` and `start` can be read and set later; `total`,
    `exact` and `stop` say what the explorer shows.

    Raises ValueError for an unknown format or method, and for numbers that are not finite.
    """

    _esm = code("accumulator_explorer", "js")
    _css = code("accumulator_explorer", "css")
    runs_on = tuple(running.METHODS.values())

    def __init__(
        self,
        fmt: str | Format = BF16,
        increment: float = 1.0,
        start: float = 0.0,
        method: str = "sequential",
    ) -> None:
        super().__init__()
        self._formats = {each.name: each for each in FORMATS.values() if each.signed and each.subnormals}
        self._state = {
            "fmt": self._known(fmt),
            "increment": _finite(increment),
            "start": _finite(start),
            "method": one_of(method, tuple(running.METHODS)),
            "n": 0,
        }
        self._totals: dict[str, running.Totals] = {}
        self.refresh()
        self.observe(self._follow, names="_state")

    def _known(self, fmt: str | Format) -> str:
        chosen = fmt if isinstance(fmt, Format) else get_format(fmt)
        if not (chosen.signed and chosen.subnormals):
            raise ValueError(f"{chosen.name} has no sign or no zero: nothing can be summed up in it")
        self._formats[chosen.name] = chosen
        return chosen.name

    def _set(self, **change: object) -> None:
        self._state = {**self._state, **change}

    @property
    def fmt(self) -> Format:
        """The format of the totals."""
        return self._formats[self._state["fmt"]]

    @fmt.setter
    def fmt(self, fmt: str | Format) -> None:
        self._set(fmt=self._known(fmt))

    @property
    def increment(self) -> float:
        """What is added, rounded to the format."""
        return self._panels[0]["increment"]

    @increment.setter
    def increment(self, value: float) -> None:
        self._set(increment=_finite(value))

    @property
    def start(self) -> float:
        """The total to begin with, rounded to the format."""
        return self._panels[0]["start"]

    @start.setter
    def start(self, value: float) -> None:
        self._set(start=_finite(value))

    @property
    def method(self) -> str:
        """How the numbers are summed up."""
        return self._state["method"]

    @method.setter
    def method(self, method: str) -> None:
        self._set(method=one_of(method, tuple(running.METHODS)))

    @property
    def n(self) -> int:
        """How many additions are shown."""
        return min(self._state["n"], len(self._shown().values) - 1)

    @n.setter
    def n(self, n: int) -> None:
        self._set(n=max(0, min(int(n), len(self._shown().values) - 1)))

    @property
    def total(self) -> float:
        """The total after `n` additions."""
        return float(self._shown().values[self.n])

    @property
    def exact(self) -> float:
        """The exact total after `n` additions of the rounded increment."""
        return float(Fraction(self.start) + self.n * Fraction(self.increment))

    @property
    def stop(self) -> int | None:
        """After how many additions the total stays what it is; None if it goes on."""
        return running.stop_of(self._shown().values)

    def _shown(self) -> running.Totals:
        return self._totals[self.method]

    def refresh(self) -> None:
        """Take up the sums that are in use now, and the settings."""
        self._totals = {}
        self._load()

    def _load(self) -> None:
        """Work out the method that is shown, and the others too while that is quick: they are a click away."""
        fmt, rounded = self.fmt, running.Rounder(self.fmt)
        increment, start = (_as_float(rounded, self._state[name]) for name in ("increment", "start"))
        count = running.how_many(fmt, start, increment)
        began = time.monotonic()
        for method in sorted(running.METHODS, key=lambda each: each != self.method):
            if method == self.method or time.monotonic() - began < _QUICK_S:
                self._totals.setdefault(method, running.totals(method, fmt, start, increment, count))
        choices = [[name, plots.short_name(name)] for name in self._formats]
        settings = {name: self._state[name] for name in _SETTINGS}
        methods = {method: _sent(found) for method, found in self._totals.items()}
        shown = {"increment": increment, "start": start, "methods": methods, "formats": choices, "settings": settings}
        self._panels = [panel_of(fmt) | shown]

    def _follow(self, change: dict) -> None:
        """New settings, from the page or from Python: work out the totals anew."""
        if any(self._state[name] != self._panels[0]["settings"][name] for name in _SETTINGS):
            self.refresh()
        elif self.method not in self._totals:
            self._load()

    def plot(self) -> Figure:
        """The same as a static picture. Returns a matplotlib Figure."""
        return accumulator_picture.draw(self.fmt, self.start, self.increment, self.method, self._shown())

    def __repr__(self) -> str:
        shown = self._shown()
        count = len(shown.values) - 1
        last, exact = float(shown.values[-1]), float(Fraction(self.start) + count * Fraction(self.increment))
        stop = "" if self.stop is None else f"; it stops after {self.stop} additions"
        return (
            f"AccumulatorExplorer: {self.start:.9g} + n × {self.increment:.9g} in {self.fmt.name}, {self.method}: "
            f"{last:.9g} after {count} additions, exactly {exact:.9g}{stop}  [{shown.line}]"
        )


def _sent(found: running.Totals) -> dict:
    return {
        "totals": found.values.astype(np.float32).tobytes(),
        "stop": running.stop_of(found.values),
        "origin": found.origin,
        "line": found.line,
        "note": found.note,
    }


def _finite(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"{value!r} cannot be added up: use a finite number")
    return text_of(value)


def _as_float(rounded: running.Rounder, text: str) -> float:
    real = nearest.read_real(text)
    try:
        value = rounded(float(real))
    except OverflowError:
        value = math.inf
    return value if math.isfinite(value) else math.copysign(rounded.largest, real)
