"""BitExplorer as a still picture: for pages on the web, for print, and wherever no widget can live."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from lowprec_lab import plots
from lowprec_lab.explorers import nearest
from lowprec_lab.formats import Format

# The light theme of bit_explorer.css: field, (text and border, background).
FIELD_COLORS = {"sign": ("#93246F", "#FBEAF5"), "exponent": ("#1D56A5", "#E8F0FB"), "mantissa": ("#8A5000", "#FDF1DE")}
_WANTED = "#B02A5B"
_QUIET = "#57606A"


@dataclass(frozen=True)
class Reading:
    """One code of one format. value: the value of every code; line: whose decode gave it."""

    fmt: Format
    code: int
    value: Callable[[int], float]
    line: str

    @property
    def bits(self) -> str:
        return format(self.code, f"0{self.fmt.width}b")

    @property
    def fields(self) -> list[tuple[str, str]]:
        """(field, its bits) for every field that the format has, from the highest bit."""
        signed, exponent = int(self.fmt.signed), int(self.fmt.signed) + self.fmt.exponent_bits
        parts = [
            ("sign", self.bits[:signed]),
            ("exponent", self.bits[signed:exponent]),
            ("mantissa", self.bits[exponent:]),
        ]
        return [(field, bits) for field, bits in parts if bits]

    def sentence(self) -> str:
        spaced = " ".join(bits for _, bits in self.fields)
        digits = f"0x{self.code:0{math.ceil(self.fmt.width / 4)}X}"
        return f"{self.fmt.name}  {digits} = {spaced} = {self.value(self.code):.12g}  [{self.line}]"

    def around(self, steps: int = 3) -> list[float]:
        """The finite values up to `steps` places below and above this one, in order."""
        sign = nearest.sign_bit(self.fmt)
        magnitude = self.code - sign if sign and self.code >= sign else self.code
        last = nearest.largest_finite_code(self.fmt)
        near = range(max(0, magnitude - steps), min(last, magnitude + steps) + 1)
        through_zero = range(min(last, steps) + 1) if magnitude <= steps else ()
        codes = {*near, *(code + sign for code in near), *through_zero, *(code + sign for code in through_zero)}
        here = self.value(self.code)
        values = sorted({value for value in map(self.value, codes) if math.isfinite(value)})
        if here not in values:
            return values
        at = values.index(here)
        return values[max(0, at - steps) : at + steps + 1]


def draw(readings: Sequence[Reading], text: str) -> Figure:
    """One row for each format: its bits, its value, and where that is among its neighbours.

    text: the real number as it was written. Returns a matplotlib Figure.
    """
    with plots.style():
        made, axes = plots.figure(9.5, 2.7 * len(readings), rows=2 * len(readings), squeeze=False,
                                  gridspec_kw={"height_ratios": [1.5, 1] * len(readings)})  # fmt: skip
        for index, reading in enumerate(readings):
            _draw_bits(axes[2 * index, 0], reading, text)
            _draw_neighbours(axes[2 * index + 1, 0], reading, text)
    return made


def _draw_bits(axes: Axes, reading: Reading, text: str) -> None:
    fmt = reading.fmt
    axes.set_axis_off()
    size = 1.0 if fmt.width <= 16 else 0.62
    axes.set_xlim(-0.2, 24)
    axes.set_ylim(-1.0, 2.0)
    x = 0.0
    for field, bits in reading.fields:
        ink, tint = FIELD_COLORS[field]
        axes.text(x, 1.12, field, color=ink, fontsize=9, fontweight="bold")
        for place, bit in enumerate(bits):
            on = bit == "1"
            box = FancyBboxPatch(
                (x + 0.04, 0.0), size - 0.08, 0.95, boxstyle="round,pad=0,rounding_size=0.12", linewidth=1.2,
                edgecolor=ink, facecolor=ink if on else tint,
            )  # fmt: skip
            axes.add_patch(box)
            axes.text(x + size / 2, 0.46, bit, ha="center", va="center", color="white" if on else ink,
                      fontsize=14 * size + 2, fontweight="bold", family="monospace")  # fmt: skip
            if fmt.width <= 16:
                axes.text(x + size / 2, -0.3, _worth(field, len(bits) - 1 - place, fmt), ha="center", va="center",
                          color=_QUIET, fontsize=8)  # fmt: skip
            x += size
        x += 0.35
    axes.text(0, 1.85, fmt.name, fontsize=11, fontweight="bold", color=plots.color_of(fmt), va="center")
    axes.text(24, 1.85, reading.line, fontsize=8.5, color=_QUIET, va="center", ha="right")
    axes.text(0, -0.85, f"{text}  →  {_headline(reading)}", fontsize=11, va="center")


def _headline(reading: Reading) -> str:
    value = reading.value(reading.code)
    if not math.isfinite(value):
        return {True: "NaN"}.get(math.isnan(value), "∞" if value > 0 else "−∞")
    exact = Fraction(value)
    shown = f"{value:.12g}".replace("-", "−")
    power = exact.denominator.bit_length() - 1
    if power == 0:
        return shown
    return f"{shown} = {exact.numerator} × $2^{{-{power}}}$".replace("= -", "= −")


def _worth(field: str, index: int, fmt: Format) -> str:
    if field == "sign":
        return "±"
    if field == "exponent":
        return str(2**index)
    return f"1/{2 ** (fmt.mantissa_bits - index)}"


def _labels(values: Sequence[float], here: float, limits: tuple[float, float]) -> list[str]:
    """A label for each value, nearest to `here` first; one that would touch another is left empty."""
    letter = (limits[1] - limits[0]) / 120
    texts = {value: f"{value:.9g}".replace("-", "−") for value in values}
    taken: list[tuple[float, float]] = []
    for value in sorted(values, key=lambda each: abs(each - here)):
        half = (len(texts[value]) / 2 + 1) * letter
        if any(value + half > low and value - half < high for low, high in taken):
            texts[value] = ""
        else:
            taken.append((value - half, value + half))
    return [texts[value] for value in values]


def _draw_neighbours(axes: Axes, reading: Reading, text: str) -> None:
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    here = reading.value(reading.code)
    if not math.isfinite(here):
        axes.set_axis_off()
        axes.text(0.5, 0.5, "not a finite value: it has no place on the number line", ha="center", color=_QUIET)
        return
    values = reading.around()
    gap = max(b - a for a, b in zip(values, values[1:], strict=False))
    axes.set_xlim(values[0] - 0.5 * gap, values[-1] + 0.5 * gap)
    axes.set_ylim(0, 1)
    axes.vlines(values, 0, 0.4, color=_QUIET, linewidth=1)
    axes.vlines([here], 0, 0.6, color=FIELD_COLORS["exponent"][0], linewidth=2.5)
    axes.set_xticks(values, _labels(values, here, axes.get_xlim()))
    real = nearest.read_real(text)
    low, high = axes.get_xlim()
    if isinstance(real, Fraction) and real != Fraction(here) and low <= float(real) <= high:
        axes.plot([float(real)], [0.62], marker="D", color=_WANTED, markersize=6)
        axes.vlines([float(real)], 0, 0.62, color=_WANTED, linestyle=(0, (3, 2)), linewidth=1.3)
        axes.text(float(real), 0.78, text, color=_WANTED, ha="center", va="bottom", fontsize=9, fontweight="bold")
    axes.set_xlabel("value: the neighbours of this code, to scale")
