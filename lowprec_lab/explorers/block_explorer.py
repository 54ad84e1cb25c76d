"""BlockExplorer: a row of weights in blocks, each with a scale of its own, and how far an outlier's damage goes.

The kernel quantizes for every format, mode and size of the outlier at its place; the browser shows what it is asked
for. Another place, and the kernel quantizes anew.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lowprec_lab import plots
from lowprec_lab.explorers import block_picture, blocks
from lowprec_lab.explorers.blocks import BLOCK_FORMATS, BlockFormat, Found
from lowprec_lab.explorers.widget import Explorer, code, one_of, panel_of

LONGEST, DIVISOR = 256, 32
HIGHEST = 20  # log2 of the largest outlier
PLACE = 70  # where the outlier is, if the row is that long


class BlockExplorer(Explorer):
    """A row of numbers in a block format: scales, codes, values, and the error of each block next to one scale for all.

    weights: one dimension, floats; its first 256 numbers are shown, and 32 has to divide their count; None for Gaussian
    numbers. fmt: one of "MXFP8", "MXFP8 E5M2", "MXFP6 E2M3", "MXFP6 E3M2", "MXFP4", "NVFP4" and "1x128". mode: how MX
    scales are chosen ("floor", "rceil", "ceil", "even"), and for "1x128" "float32" or "power of two". The number at
    `place` is made 2^log2_outlier times as large as the largest of the others, 0 to 20.

    All but the weights can be read and set later. `errors` (of each block), `error` (of the row),
    `error_with_one_scale` and `lost` (how many become 0) say what the explorer shows; the outlier itself does not count
    in errors.

    Raises ValueError for what is not on offer, and for weights with nothing but zeros, or with NaN or infinities.
    """

    _esm = code("block_explorer", "js")
    _css = code("block_explorer", "css")
    runs_on = ("e8m0_scale", *blocks.EXERCISES)

    def __init__(
        self,
        weights: Tensor | None = None,
        fmt: str = "MXFP8",
        mode: str | None = None,
        log2_outlier: int = 0,
        place: int | None = None,
    ) -> None:
        super().__init__()
        self._numbers = _checked(weights)
        known = BLOCK_FORMATS[one_of(fmt, tuple(BLOCK_FORMATS))]
        at = min(PLACE, len(self._numbers) - 1) if place is None else self._known_place(place)
        self._state = {
            "fmt": known.name,
            "mode": one_of(known.modes[0] if mode is None else mode, known.modes),
            "log2_outlier": _power(log2_outlier),
            "place": at,
            "number": at,  # the block that has this number is shown in full
        }
        self.refresh()
        self.observe(self._follow, names="_state")

    # --- what is shown

    @property
    def fmt(self) -> str:
        """The block format."""
        return self._state["fmt"]

    @fmt.setter
    def fmt(self, fmt: str) -> None:
        known = BLOCK_FORMATS[one_of(fmt, tuple(BLOCK_FORMATS))]
        self._set(fmt=fmt, mode=self.mode if self.mode in known.modes else known.modes[0])

    @property
    def mode(self) -> str:
        """How a scale is chosen."""
        return self._state["mode"]

    @mode.setter
    def mode(self, mode: str) -> None:
        self._set(mode=one_of(mode, BLOCK_FORMATS[self.fmt].modes))

    @property
    def log2_outlier(self) -> int:
        """How many times as large as all others the outlier is, as a power of two."""
        return self._state["log2_outlier"]

    @log2_outlier.setter
    def log2_outlier(self, log2_outlier: int) -> None:
        self._set(log2_outlier=_power(log2_outlier))

    @property
    def place(self) -> int:
        """Which number is the outlier."""
        return self._state["place"]

    @place.setter
    def place(self, place: int) -> None:
        self._set(place=self._known_place(place), number=self._known_place(place))

    @property
    def block(self) -> int:
        """Which block is shown in full."""
        return self._state["number"] // BLOCK_FORMATS[self.fmt].block

    @block.setter
    def block(self, block: int) -> None:
        self._set(number=self._known_place(block * BLOCK_FORMATS[self.fmt].block))

    @property
    def errors(self) -> tuple[float, ...]:
        """The error of each block, relative to its numbers."""
        return tuple(self._errors(self._values(), BLOCK_FORMATS[self.fmt].block)[self.log2_outlier].tolist())

    @property
    def error(self) -> float:
        """The error of the whole row, relative to its numbers."""
        return float(self._errors(self._values(), len(self._numbers))[self.log2_outlier, 0])

    @property
    def error_with_one_scale(self) -> float:
        """The same for the same elements with one scale for the row."""
        values, _ = self._plain[BLOCK_FORMATS[self.fmt].element.name]
        return float(self._errors(values, len(self._numbers))[self.log2_outlier, 0])

    @property
    def lost(self) -> int:
        """How many numbers become 0."""
        return int(self._lost(self._values())[self.log2_outlier].sum())

    def _set(self, **change: object) -> None:
        self._state = {**self._state, **change}

    def _known_place(self, place: int) -> int:
        if not 0 <= int(place) < len(self._numbers) or int(place) != place:
            raise ValueError(f"the row has the numbers 0 to {len(self._numbers) - 1}, and no {place!r}")
        return int(place)

    # --- working it out

    def refresh(self) -> None:
        """Quantize anew, by the code that is in use, with the outlier at its place."""
        self._rows = torch.stack([self._with_outlier(power) for power in range(HIGHEST + 1)])
        self._in_use = blocks.by_answers(self._rows)
        elements = {each.element.name: each.element for each in BLOCK_FORMATS.values()}
        self._plain = {name: blocks.with_one_scale(self._rows, element) for name, element in elements.items()}
        self._panels = [self._panel(fmt) for fmt in BLOCK_FORMATS.values()]

    def _follow(self, change: dict) -> None:
        """Another place, from the page or from Python."""
        if self._panels and self.place != self._panels[0]["place"]:
            self.refresh()

    def _with_outlier(self, power: int) -> Tensor:
        x = self._numbers.clone()
        x[self.place] = 0
        x[self.place] = math.copysign(float(x.abs().max() or 1.0), float(self._numbers[self.place])) * 2.0**power
        return x

    def _found(self) -> Found:
        return self._in_use[BLOCK_FORMATS[self.fmt].exercise].found[self.fmt, self.mode]

    def _values(self) -> np.ndarray:
        return blocks.values_of(self._found(), BLOCK_FORMATS[self.fmt])

    def _errors(self, values: np.ndarray, block: int) -> np.ndarray:
        return blocks.errors(values, self._rows, self.place, block)

    def _lost(self, values: np.ndarray) -> np.ndarray:
        return (values == 0) & (self._rows.numpy() != 0)

    def _panel(self, fmt: BlockFormat) -> dict:
        in_use, (values, scale) = self._in_use[fmt.exercise], self._plain[fmt.element.name]
        return {
            "name": fmt.name,
            "element": {**panel_of(fmt.element), "values": _bytes(blocks.element_values(fmt.element), np.float64)},
            "short": plots.short_name(fmt.element),
            "block": fmt.block,
            "bits": fmt.bits,
            "place": self.place,
            "highest": HIGHEST,
            "rows": _bytes(self._rows.numpy(), np.float32),
            "modes": {mode: self._sent(fmt, in_use.found[fmt.name, mode]) for mode in fmt.modes},
            "plain": {**self._sent_errors(values, fmt), "scale": _bytes(scale, np.float32)},
            "origin": in_use.origin,
            "line": in_use.line,
            "note": in_use.note,
        }

    def _sent(self, fmt: BlockFormat, found: Found) -> dict:
        return {
            **self._sent_errors(blocks.values_of(found, fmt), fmt),
            "codes": _bytes(found.codes, np.uint8),
            "scale": _bytes(found.scale, np.float32),
            "byte": None if found.byte is None else _bytes(found.byte, np.uint8),
            "tensor_scale": None if found.tensor_scale is None else _bytes(found.tensor_scale, np.float32),
        }

    def _sent_errors(self, values: np.ndarray, fmt: BlockFormat) -> dict:
        """The errors of blocks and row, and how many numbers of each row become 0."""
        return {
            "errors": _bytes(self._errors(values, fmt.block), np.float64),
            "error": _bytes(self._errors(values, len(self._numbers)), np.float64),
            "lost": self._lost(values).sum(-1).tolist(),
        }

    # --- without a browser

    def plot(self) -> Figure:
        """The same as a static picture. Returns a matplotlib Figure."""
        fmt = BLOCK_FORMATS[self.fmt]
        size, (plain, scale) = self.log2_outlier, self._plain[fmt.element.name]
        shown = block_picture.Shown(
            fmt, self.mode, size, self.place, self._rows[size].numpy(), self._values()[size],
            self._found().scale[size], scale[size], np.array(self.errors), self._errors(plain, fmt.block)[size],
        )  # fmt: skip
        return block_picture.draw(shown, self.error, self.error_with_one_scale)

    def __repr__(self) -> str:
        fmt = BLOCK_FORMATS[self.fmt]
        return (
            f"BlockExplorer: {len(self._numbers)} numbers in {self.fmt} ({self.mode}), {fmt.block} codes of "
            f"{plots.short_name(fmt.element)} for each scale, number {self.place} 2^{self.log2_outlier} times the "
            f"others: error of the others {self.error:.2%}, with one scale for all {self.error_with_one_scale:.2%}; "
            f"{self.lost} become 0  [{self._in_use[fmt.exercise].line}]"
        )


def _bytes(values: np.ndarray, dtype: type) -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def _checked(weights: Tensor | None) -> Tensor:
    if weights is None:
        return torch.randn(LONGEST, generator=torch.Generator().manual_seed(13)) / 16
    if weights.dim() != 1 or not weights.is_floating_point():
        raise ValueError("a row of floats can be shown: use weights[0] or flatten")
    shown = weights.detach().float().cpu()[:LONGEST].clone()
    if len(shown) == 0 or len(shown) % DIVISOR:
        raise ValueError(f"blocks of {DIVISOR} do not divide a row of {len(shown)}")
    if not (shown * 2.0**HIGHEST).isfinite().all() or not shown.any():
        raise ValueError(
            f"there is nothing to show: the numbers have to be finite (2^{HIGHEST} times as large too), and some other "
            "than zero"
        )
    return shown


def _power(log2_outlier: int) -> int:
    if not 0 <= int(log2_outlier) <= HIGHEST or int(log2_outlier) != log2_outlier:
        raise ValueError(f"log2_outlier is a whole number from 0 to {HIGHEST}, not {log2_outlier!r}")
    return int(log2_outlier)
