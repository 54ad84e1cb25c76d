"""What a weight costs and what it is worth: bits for each number, and the perplexity of a GPT whose weights have them.

Every format of the course goes through the same: each matrix of a model (weights of linear layers, embeddings) is
quantized and comes back as float32, and the model is measured. So only what the format does to weights counts, and not
how fast it is. A format is made of the chapters' own functions, the learner's where there are some.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from lowprec_lab import block_formats, formats, gguf_file, inference, plots, quantizer
from lowprec_lab.gguf_blocks import LAYOUTS


@dataclass(frozen=True)
class WeightFormat:
    """One way to keep a matrix.

    name: for tables. bits: of a matrix (rows, columns), for each of its numbers, scales included. round_trip: a float32
    matrix (out, in) to what it comes back as, float32. falls_back: from a shape to the name of another format in
    ALL_FORMATS where this one cannot keep such a matrix, else None.
    """

    name: str
    bits: Callable[[int, int], float]
    round_trip: Callable[[Tensor], Tensor]
    falls_back: Callable[[tuple[int, ...]], str | None] = lambda shape: None


def _through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.to(dtype).float()


def _per_tensor(weight: Tensor) -> Tensor:
    return quantizer.dequantize(quantizer.quantize(weight, formats.E4M3))


def _per_channel(weight: Tensor) -> Tensor:
    codes, scale = inference.quantize_weight_per_channel(weight)
    return codes.float() * scale


def _int8_per_channel(weight: Tensor) -> Tensor:
    """Chapter 07's symmetric int8, for each row by itself."""
    found = (quantizer.quantize_int8(row) for row in weight)
    return torch.stack([codes.float() * scale for codes, scale, _ in found])


def _blocks(kind: str) -> WeightFormat:
    """A type of llama.cpp's files."""

    def falls_back(shape: tuple[int, ...]) -> str | None:
        chosen = gguf_file.kind_for(shape, kind)
        return None if chosen == kind else name_of(chosen)

    def round_trip(weight: Tensor) -> Tensor:
        return gguf_file.unpacked(gguf_file.packed("", weight, kind))

    return WeightFormat(name_of(kind), lambda rows, columns: LAYOUTS[kind].bits, round_trip, falls_back)


def name_of(kind: str) -> str:
    """The name of the format that a tensor of a GGUF file has: "Q4_K" for "q4_k"."""
    return {"f16": "float16"}.get(kind, kind.upper())


# From many bits to few.
WEIGHT_FORMATS: tuple[WeightFormat, ...] = (
    WeightFormat("float32", lambda rows, columns: 32.0, lambda weight: weight),
    WeightFormat("bfloat16", lambda rows, columns: 16.0, _through(torch.bfloat16)),
    _blocks("q8_0"),
    WeightFormat("float8, scale per channel", lambda rows, columns: 8 + 32 / columns, _per_channel),
    WeightFormat("int8, scale per channel", lambda rows, columns: 8 + 32 / columns, _int8_per_channel),
    WeightFormat("float8, one scale", lambda rows, columns: 8 + 32 / (rows * columns), _per_tensor),
    _blocks("q5_0"),
    _blocks("q4_1"),
    _blocks("q4_0"),
    _blocks("q4_k"),
)


def _mx(name: str, mode: str) -> WeightFormat:
    """A format of MX. mode: of the scales."""
    fmt = block_formats.MX_FORMATS[name]
    return WeightFormat(
        name, lambda rows, columns: fmt.width + 8 / block_formats.MX_BLOCK,
        lambda weight: block_formats.mx_round_trip(weight, fmt, mode), _unless_divided(block_formats.MX_BLOCK),
    )  # fmt: skip


def _unless_divided(block: int) -> Callable[[tuple[int, ...]], str | None]:
    return lambda shape: "bfloat16" if shape[-1] % block else None


def _tiles(rows: int, columns: int) -> float:
    """Bits for each number in E4M3, with a float32 scale for each 128 x 128."""
    return 8 + 32 * math.ceil(rows / 128) * math.ceil(columns / 128) / (rows * columns)


# Those of chapter 13.
BLOCK_FORMATS: tuple[WeightFormat, ...] = (
    _mx("MXFP8", "rceil"),
    WeightFormat("float8, 128 x 128", _tiles, lambda weight: block_formats.blockwise_round_trip(weight, (128, 128))),
    _mx("MXFP6 E2M3", "even"),
    _mx("MXFP6 E3M2", "even"),
    WeightFormat(
        "NVFP4", lambda rows, columns: 4 + 8 / block_formats.NVFP4_BLOCK + 32 / (rows * columns),
        lambda weight: block_formats.nvfp4_round_trip(weight), _unless_divided(block_formats.NVFP4_BLOCK),
    ),
    _mx("MXFP4", "even"),
)  # fmt: skip
ALL_FORMATS: tuple[WeightFormat, ...] = tuple(
    sorted(WEIGHT_FORMATS + BLOCK_FORMATS, key=lambda each: -each.bits(256, 256))
)
# What a format may fall back to, and is no line of the table.
_OTHERS = (WeightFormat("float16", lambda rows, columns: 16.0, _through(torch.float16)),)


def find_format(name: str, known: Sequence[WeightFormat] = WEIGHT_FORMATS) -> WeightFormat:
    """The format of that name. Raises ValueError that lists the formats there are."""
    for each in (*known, *WEIGHT_FORMATS, *_OTHERS):
        if each.name == name:
            return each
    raise ValueError(f"there is no format {name!r}. The formats are: {', '.join(each.name for each in known)}")


def with_weights_in(
    model: nn.Module, fmt: WeightFormat, known: Sequence[WeightFormat] = WEIGHT_FORMATS
) -> tuple[nn.Module, float, dict[str, str]]:
    """(a copy of the model whose matrices went through a format, bits for each of their numbers, what fell back).

    Weights of linear layers and of embeddings, of two dimensions each; tied ones once. The rest stays as it is. What
    fell back: the name of each parameter that the format cannot keep, and the name of the format that it has instead.
    known: where that name is looked up.
    """
    made, fell, bits, count = copy.deepcopy(model).eval(), {}, 0.0, 0
    with torch.no_grad():
        for name, weight in _matrices(made).items():
            other = fmt.falls_back(tuple(weight.shape))
            used = fmt if other is None else find_format(other, known)
            if other is not None:
                fell[name] = other
            weight.copy_(used.round_trip(weight.detach().float()))
            bits += used.bits(*weight.shape) * weight.numel()
            count += weight.numel()
    return made, bits / count, fell


def _matrices(model: nn.Module) -> dict[str, Tensor]:
    """Name and weight of each linear layer and embedding; tied weights have one name."""
    kinds = (nn.Linear, nn.Embedding)
    owners = {name for name, layer in model.named_modules() if isinstance(layer, kinds)}
    return {
        name: weight
        for name, weight in model.named_parameters()
        if name.rpartition(".")[0] in owners and weight.dim() == 2
    }


@dataclass(frozen=True)
class FormatRow:
    """A line of the table. agreement, divergence: next to the model as it was, as `inference.Comparison` has them."""

    name: str
    bits: float
    perplexity: float
    agreement: float
    divergence: float
    fell_back: dict[str, str]

    def text(self) -> str:
        """For people. A star where matrices fell back."""
        star = "*" if self.fell_back else " "
        return (
            f"{self.name:28}{star} {self.bits:7.3f} bits   perplexity {self.perplexity:8.4f}   "
            f"agreement {self.agreement:7.2%}   KL {self.divergence:.1e}"
        )


def format_table(
    model: nn.Module, batches: Sequence, formats: Sequence[WeightFormat] = WEIGHT_FORMATS
) -> list[FormatRow]:
    """A line for each format, on batches (x, y). The model itself stays as it is; it is expected to evaluate."""
    rows = []
    for fmt in formats:
        made, bits, fell = with_weights_in(model, fmt, formats)
        found = inference.compare_models(model, made, batches)
        rows.append(FormatRow(fmt.name, bits, found.perplexity, found.agreement, found.divergence, fell))
    return rows


def table_text(rows: Sequence[FormatRow]) -> str:
    """The lines, and below them what fell back to what, counted."""
    lines = [row.text() for row in rows]
    for row in rows:
        kinds = sorted(set(row.fell_back.values()))
        counts = [f"{sum(each == kind for each in row.fell_back.values())} in {kind}" for kind in kinds]
        if counts:
            lines.append(f"* {row.name}: rows are not made of its blocks, so that there are {', '.join(counts)}")
    return "\n".join(lines)


def format_picture(rows: Sequence[FormatRow], title: str = "What the bits of a weight are worth") -> Figure:
    """Bits for each number against perplexity, and against KL divergence where there is any.

    Lines whose perplexity is no number are left out.
    """
    shown = [row for row in rows if math.isfinite(row.perplexity)]
    apart = [row for row in shown if row.divergence > 0]
    with plots.style():
        picture, (above, below) = plots.figure(9, 8, rows=2, sharex=True)
        _draw(above, [(row.name, row.bits, row.perplexity) for row in shown])
        _draw(below, [(row.name, row.bits, math.log10(row.divergence)) for row in apart])
        above.set_title(title)
        above.set_ylabel("perplexity")
        below.set_ylabel("log10 of the KL divergence")
        below.set_xlabel("bits for each weight, scales included")
    return picture


_TICKS = (4, 5, 6, 8, 12, 16, 32)


def _draw(axes: Axes, points: list[tuple[str, float, float]]) -> None:
    """Points with their names; one that would cover another is moved to the nearest free place, with a line to it."""
    axes.plot([bits for _, bits, _ in points], [height for *_, height in points], "o", markersize=5,
              color=plots.color_of(formats.E4M3))  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(_TICKS, [str(tick) for tick in _TICKS])
    axes.set_xlim(3.6, 60)
    axes.grid(True)
    heights = [height for *_, height in points]
    span = max(max(heights) - min(heights), 1e-9) if heights else 1.0
    bottom, top = min(heights, default=0) - 0.2 * span, max(heights, default=1) + 0.1 * span
    axes.set_ylim(bottom, top)
    taken = [(math.log2(bits) - 0.03, math.log2(bits) + 0.03, height) for _, bits, height in points]
    for name, bits, height in sorted(points, key=lambda point: -point[2]):
        left = math.log2(bits * 1.06)
        right = left + 0.037 * len(name) + 0.04
        steps = sorted(range(-60, 61), key=lambda step: (abs(step), step))
        places = (height + 0.012 * span * step for step in steps)
        places = (each for each in places if bottom < each < top)
        place = next((each for each in places if _is_free(taken, left, right, each, span)), height)
        taken.append((left, right, place))
        line = {"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2}
        at = bits * 1.06, place
        axes.annotate(name, (bits, height), at, fontsize=8, verticalalignment="center", arrowprops=line)


def _is_free(taken: list[tuple[float, float, float]], left: float, right: float, place: float, span: float) -> bool:
    """Whether a name from `left` to `right` (log2 of bits) at this height covers no other."""
    return all(right < start or end < left or abs(place - other) >= 0.05 * span for start, end, other in taken)
