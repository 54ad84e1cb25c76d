"""ScaleExplorer: a small tensor with an outlier, and what is left of every number under one scale or many.

The kernel quantizes once for every format, granularity and size of the outlier; the browser only shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lowprec_lab import fused, plots
from lowprec_lab.explorers import scale_picture
from lowprec_lab.explorers.widget import Explorer, OneOfFormats, code, one_of, panel_of
from lowprec_lab.formats import E2M1, E4M3, E5M2, Format
from lowprec_lab.graders import quantizer_oracle as exact
from lowprec_lab.quantizer import Quantized
from lowprec_lab.tables import NotUsableError, ask

GRANULARITIES = {"tensor": "tensor", "row": "row", "column": "column", "block": (4, 8)}
KINDS = ("kept", "coarse", "lost")
ROWS, COLUMNS, PLACE = 16, 32, (5, 11)  # PLACE: row and column of the outlier, where the tensor is that large
HIGHEST = 24  # log2 of the largest outlier
_FORMATS = (E4M3, E5M2, E2M1)
_SLACK = 1 + 2.0**-20  # products and quotients are rounded to float32 on the way


@dataclass(frozen=True)
class Outcome:
    """kinds: uint8, the tensor's shape, places in KINDS. decibel: SQNR of all numbers but the outlier."""

    kinds: np.ndarray
    decibel: float


class ScaleExplorer(OneOfFormats, Explorer):
    """What quantizing leaves of each number of a tensor, while one of them grows.

    tensor: two dimensions, floats; its first 16 rows and 32 columns are shown; None for Gaussian numbers. fmt: E4M3,
    E5M2 or E2M1, or its name. granularity: "tensor", "row", "column" or "block" (4 x 8). log2_outlier: one number is
    made 2 to this power times as large as the largest of the others, 0 to 24. The last three can be read and set later;
    `shares` and `decibel` say what the explorer shows.

    A number is *kept* when its error is at most half a step of the format's normal numbers, *lost* when it has become 0
    (or NaN), and *coarse* in between.

    Raises ValueError for what is not on offer, and for a tensor with nothing but zeros, or with NaN or infinities.
    """

    _esm = code("scale_explorer", "js")
    _css = code("scale_explorer", "css")
    runs_on = ("absmax", "scale_for", "quantize")
    formats = _FORMATS

    def __init__(
        self,
        tensor: Tensor | None = None,
        fmt: str | Format = E4M3,
        granularity: str = "tensor",
        log2_outlier: int = 0,
    ) -> None:
        super().__init__()
        self._numbers = _checked(tensor)
        self._place = tuple(min(at, size - 1) for at, size in zip(PLACE, self._numbers.shape, strict=True))
        self._state = {
            "fmt": self._known(fmt),
            "granularity": one_of(granularity, tuple(GRANULARITIES)),
            "log2_outlier": _power(log2_outlier),
        }
        self.refresh()

    @property
    def granularity(self) -> str:
        """What shares a scale."""
        return self._state["granularity"]

    @granularity.setter
    def granularity(self, granularity: str) -> None:
        self._state = {**self._state, "granularity": one_of(granularity, tuple(GRANULARITIES))}

    @property
    def log2_outlier(self) -> int:
        """How many times as large as all others the outlier is, as a power of two."""
        return self._state["log2_outlier"]

    @log2_outlier.setter
    def log2_outlier(self, log2_outlier: int) -> None:
        self._state = {**self._state, "log2_outlier": _power(log2_outlier)}

    @property
    def shares(self) -> dict[str, float]:
        """Which part of the numbers is kept, coarse, lost."""
        return shares_of(self._shown().kinds)

    @property
    def decibel(self) -> float:
        """The SQNR of all numbers but the outlier."""
        return self._shown().decibel

    def _shown(self) -> Outcome:
        return self._outcomes[self._state["fmt"], self.granularity][self.log2_outlier]

    def refresh(self) -> None:
        """Quantize anew, by the `quantize` that is in use."""
        inputs = [self._with_outlier(power) for power in range(HIGHEST + 1)]
        right = self._quantized(exact.quantize, inputs)

        def use(quantize: Callable) -> list[Quantized]:
            return right if quantize is exact.quantize else self._quantized(quantize, inputs)

        found, origin, line, note = ask("quantize", use, exact=exact.quantize)
        wrong = sum(not _same(one, other) for one, other in zip(found, right, strict=True))
        note = note or (f"differs from the definition for {wrong:,} of {len(right):,} tensors" if wrong else "")
        results = iter(found)
        self._line = line
        self._outcomes = {
            (fmt.name, name): [self._outcome(x, next(results)) for x in inputs]
            for fmt in _FORMATS
            for name in GRANULARITIES
        }
        self._panels = [self._panel(fmt, origin, line, note) for fmt in _FORMATS]

    def _with_outlier(self, power: int) -> Tensor:
        x = self._numbers.clone()
        x[self._place] = 0
        x[self._place] = math.copysign(float(x.abs().max() or 1.0), float(self._numbers[self._place])) * 2.0**power
        return x

    @staticmethod
    def _quantized(quantize: Callable, inputs: list[Tensor]) -> list[Quantized]:
        found = []
        for fmt in _FORMATS:
            for granularity in GRANULARITIES.values():
                for x in inputs:
                    q = quantize(x, fmt, granularity)
                    shape = exact.scale_shape(granularity, tuple(x.shape))
                    if not isinstance(q, Quantized) or q.codes.shape != x.shape or q.scale.shape != shape:
                        raise NotUsableError("returned something that is no Quantized of the right shapes")
                    found.append(q)
        return found

    def _outcome(self, x: Tensor, q: Quantized) -> Outcome:
        with np.errstate(all="ignore"):
            values = fused.decode_(q.codes, q.fmt).double().numpy()
            back = values / exact.spread(q.scale.numpy(), q.granularity, tuple(x.shape))
            numbers = exact.numbers(x)
            error, half = np.abs(back - numbers), np.abs(numbers) * 2.0 ** -(q.fmt.mantissa_bits + 1)
        lost = ((back == 0) & (numbers != 0)) | np.isnan(back)
        kinds = np.where(lost, 2, np.where(error <= half * _SLACK, 0, 1)).astype(np.uint8)
        others = np.ones(x.shape, dtype=bool)
        others[self._place] = False
        noise = exact.power((back - numbers)[others])
        return Outcome(kinds, exact.decibel(exact.power(numbers[others]), noise))

    def _panel(self, fmt: Format, origin: str, line: str, note: str) -> dict:
        outcomes = {name: self._outcomes[fmt.name, name] for name in GRANULARITIES}
        return panel_of(fmt) | {
            "short": plots.short_name(fmt),
            "shape": list(self._numbers.shape),
            "place": list(self._place),
            "highest": HIGHEST,
            "blocks": {name: list(self.block(name)) for name in GRANULARITIES},
            "scales": {name: math.prod(self.scales(name)) for name in GRANULARITIES},
            "kinds": {name: np.stack([each.kinds for each in found]).tobytes() for name, found in outcomes.items()},
            "decibels": {
                name: [each.decibel if math.isfinite(each.decibel) else None for each in found]
                for name, found in outcomes.items()
            },
            "origin": origin,
            "line": line,
            "note": note,
        }

    def block(self, name: str) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        shape = tuple(self._numbers.shape)
        return shape if name == "tensor" else exact.blocks(GRANULARITIES[name], shape)

    def scales(self, name: str) -> tuple[int, ...]:
        """The shape of the scales."""
        return exact.scale_shape(GRANULARITIES[name], tuple(self._numbers.shape))

    def plot(self) -> Figure:
        """The same as a static picture. Returns a matplotlib Figure."""
        return scale_picture.draw(
            self.fmt, self.granularity, self.log2_outlier, self._shown().kinds, self.block(self.granularity),
            self._place, self.decibel,
        )  # fmt: skip

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.1%} {kind}" for kind, share in self.shares.items())
        height, width = self._numbers.shape
        return (
            f"ScaleExplorer: {height} x {width} numbers in {self.fmt.name}, a scale for each {self.granularity}, one "
            f"number 2^{self.log2_outlier} times the others: {shares}; SQNR of the others {self.decibel:.1f} dB  "
            f"[{self._line}]"
        )


def shares_of(kinds: np.ndarray) -> dict[str, float]:
    """Which part of the numbers is of each kind."""
    return {name: float(np.mean(kinds == place)) for place, name in enumerate(KINDS)}


def _same(one: Quantized, other: Quantized) -> bool:
    return torch.equal(one.codes, other.codes) and torch.equal(one.scale, other.scale)


def _checked(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7))
    if tensor.dim() != 2 or not tensor.is_floating_point():
        raise ValueError("a tensor of floats with two dimensions can be shown: use flatten or unsqueeze")
    shown = tensor.detach().float().cpu()[:ROWS, :COLUMNS].clone()
    if not shown.isfinite().all() or not shown.any():
        raise ValueError("there is nothing to show: the numbers have to be finite, and some other than zero")
    return shown


def _power(log2_outlier: int) -> int:
    if not 0 <= int(log2_outlier) <= HIGHEST or int(log2_outlier) != log2_outlier:
        raise ValueError(f"log2_outlier is a whole number from 0 to {HIGHEST}, not {log2_outlier!r}")
    return int(log2_outlier)
