"""LossScaleExplorer: gradients against the range of a format, and what a loss scale moves into it and out of it.

The kernel counts once, for every scale; the browser only shows. Nothing in it is an exercise's code.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lowprec_lab import plots
from lowprec_lab.explorers import loss_scale_picture
from lowprec_lab.explorers.widget import Explorer, OneOfFormats, code, panel_of
from lowprec_lab.formats import BF16, E4M3, E5M2, FP16, Format
from lowprec_lab.graders import oracle

KINDS = ("lost", "subnormal", "normal", "overflow")
LOWEST, HIGHEST = -24, 44  # log2 of the scales that can be chosen
_FORMATS = (FP16, BF16, E5M2, E4M3)


class LossScaleExplorer(OneOfFormats, Explorer):
    """How many gradients become zero, subnormal, normal or too large in a format, at any loss scale.

    gradients: a tensor, or several; None among them, zeros and what is not finite are left out. fmt: FP16, BF16, E5M2
    or E4M3, or its name. log2_scale: a whole number from -24 to 44. `fmt` and `log2_scale` can be read and set later;
    `outcome` says what the explorer shows.

    Raises ValueError for another format or scale, and where no gradient is left.
    """

    _esm = code("loss_scale_explorer", "js")
    _css = code("loss_scale_explorer", "css")
    formats = _FORMATS

    def __init__(
        self, gradients: Tensor | Iterable[Tensor | None], fmt: str | Format = FP16, log2_scale: int = 0
    ) -> None:
        super().__init__()
        given = [gradients] if isinstance(gradients, Tensor) else [each for each in gradients if each is not None]
        flat = np.concatenate([each.detach().double().cpu().abs().flatten().numpy() for each in given] or [np.zeros(0)])
        self._sizes = np.sort(flat[(flat > 0) & np.isfinite(flat)])
        if not len(self._sizes):
            raise ValueError("there is nothing to show: no gradient is finite and other than zero")
        self._state = {"fmt": self._known(fmt), "log2_scale": _checked(log2_scale)}
        self.refresh()

    @property
    def log2_scale(self) -> int:
        """The loss scale, as a power of two."""
        return self._state["log2_scale"]

    @log2_scale.setter
    def log2_scale(self, log2_scale: int) -> None:
        self._state = {**self._state, "log2_scale": _checked(log2_scale)}

    @property
    def outcome(self) -> dict[str, int]:
        """How many gradients are lost (rounded to zero), subnormal, normal, and beyond the largest number."""
        return outcome(self._sizes, self.fmt, self.log2_scale)

    def refresh(self) -> None:
        """Count anew."""
        exponents, counts = histogram(self._sizes)
        bins = [[int(exponent), int(count)] for exponent, count in zip(exponents, counts, strict=True)]
        self._panels = [
            panel_of(fmt)
            | {
                "short": plots.short_name(fmt),
                "bins": bins,
                "edges": [float(np.log2(edge)) for edge in edges_of(fmt)],
                "outcomes": [list(outcome(self._sizes, fmt, k).values()) for k in range(LOWEST, HIGHEST + 1)],
                "scales": [LOWEST, HIGHEST],
            }
            for fmt in _FORMATS
        ]

    def plot(self) -> Figure:
        """The same as a static picture. Returns a matplotlib Figure."""
        return loss_scale_picture.draw(
            self.fmt, self.log2_scale, histogram(self._sizes), edges_of(self.fmt), self.outcome
        )

    def __repr__(self) -> str:
        total = len(self._sizes)
        shares = ", ".join(f"{count / total:.1%} {kind}" for kind, count in self.outcome.items())
        return f"LossScaleExplorer: {total:,} gradients times 2^{self.log2_scale} in {self.fmt.name}: {shares}"


def edges_of(fmt: Format) -> tuple[float, float, float]:
    """The smallest number of a format above zero, its smallest normal one, and its largest."""
    smallest = oracle.min_subnormal(fmt)
    return float(smallest), float(oracle.min_normal(fmt)), float(oracle.max_finite(fmt))


def outcome(sizes: np.ndarray, fmt: Format, log2_scale: int) -> dict[str, int]:
    """What becomes of sorted magnitudes times 2^log2_scale when they are rounded to nearest, ties to even: counts."""
    smallest, normal, largest = edges_of(fmt)
    step = float(oracle.ulp(torch.tensor([largest]), fmt)[0])
    tie_stays = (largest / step) % 2 == 0  # the largest number is the even neighbour of a tie above it
    ends = (
        np.searchsorted(sizes, np.ldexp(smallest / 2, -log2_scale), "right"),
        np.searchsorted(sizes, np.ldexp(normal - smallest / 2, -log2_scale), "left"),
        np.searchsorted(sizes, np.ldexp(largest + step / 2, -log2_scale), "right" if tie_stays else "left"),
        len(sizes),
    )
    return {kind: int(count) for kind, count in zip(KINDS, np.diff(ends, prepend=0), strict=True)}


def histogram(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(exponents, how many magnitudes have each): from one power of two up to the next."""
    return np.unique(np.frexp(sizes)[1] - 1, return_counts=True)


def _checked(log2_scale: int) -> int:
    if not LOWEST <= int(log2_scale) <= HIGHEST or int(log2_scale) != log2_scale:
        raise ValueError(f"log2_scale is a whole number from {LOWEST} to {HIGHEST}, not {log2_scale!r}")
    return int(log2_scale)
