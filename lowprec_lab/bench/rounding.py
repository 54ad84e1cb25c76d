"""How fast rounding to E4M3 and back to float32 is: ours, torch's own, other libraries', and a plain copy.

One thread, and its own processor time, so that other programs on the machine count as little as possible. The input is
random float32 over E4M3's whole range. All runners take their turn in every round, so that what slows the machine for a
while slows all of them; a ratio is the median over the rounds, and its spread the smallest and the largest. Slow
runners get fewer elements, and times are counted for each element.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lowprec_lab import fused
from lowprec_lab.devices import threads
from lowprec_lab.formats import E4M3

ELEMENTS = 2**24
ROUNDS = 7
COPY, NATIVE, COMPILED, EAGER = "copy_", "torch's cast and back", "ours, compiled", "ours, eager"
ANSWER, ENCODER = "fast_round_to (reference), compiled", "ours, compiled: codes only"
MX, COMPARED = "torchao MX (blocks of 32, with scales)", "qtorch's way, in torch (ties away, 480)"
ML_DTYPES, GFLOAT = "ml_dtypes", "gfloat"

# Figure -> the two runners whose times are divided.
FIGURES = {
    "compiled_vs_copy": (COMPILED, COPY),
    "compiled_vs_native": (COMPILED, NATIVE),
    "ml_dtypes_vs_compiled": (ML_DTYPES, COMPILED),
    "gfloat_vs_compiled": (GFLOAT, COMPILED),
    "eager_vs_native": (EAGER, NATIVE),
    "answer_vs_copy": (ANSWER, COPY),
    "answer_vs_native": (ANSWER, NATIVE),
}


@dataclass(frozen=True)
class Runner:
    """call(): rounds `elements` numbers."""

    name: str
    call: Callable[[], object]
    elements: int


def run(progress: bool = True, elements: int = ELEMENTS, rounds: int = ROUNDS) -> dict:
    """Figures: see `FIGURES`, each a ratio of times; those of a library that is not installed are left out.

    elements: of the tensor. rounds: at least 5. The report also has `spread` (smallest and largest of each figure),
    `nanoseconds` for each element by runner (median, smallest, largest), `absent` and `table`.
    """
    with threads(1):
        absent: list[str] = []
        runners = list(_runners(elements, absent))
        times = _measure(runners, rounds, progress)
    ratios = {
        figure: [a / b for a, b in zip(times[over], times[under], strict=True)]
        for figure, (over, under) in FIGURES.items()
        if over in times and under in times
    }
    report = {
        "figures": {figure: statistics.median(values) for figure, values in ratios.items()},
        "spread": {figure: [min(values), max(values)] for figure, values in ratios.items()},
        "nanoseconds": {
            name: {"median": statistics.median(values), "smallest": min(values), "largest": max(values)}
            for name, values in times.items()
        },
        "elements": elements,
        "rounds": rounds,
        "absent": absent,
        "compiled": not fused.why_not_compiled(),
    }
    return report | {"table": table(report)}


def table(report: dict) -> str:
    """A line for each runner: nanoseconds for each element, with spread, and the time relative to torch's own cast."""
    times = report["nanoseconds"]
    width = max(map(len, times))
    lines = [f"{'':<{width}}  ns/element  smallest   largest  relative"]
    for name, time_ in sorted(times.items(), key=lambda item: item[1]["median"]):
        relative = time_["median"] / times[NATIVE]["median"]
        cells = (time_["median"], time_["smallest"], time_["largest"])
        lines.append(f"{name:<{width}}  {cells[0]:>10.2f}{cells[1]:>10.2f}{cells[2]:>10.2f}{relative:>10.2f}")
    return "\n".join([*lines, *(f"not installed: {name}" for name in report["absent"])])


def chart(report: dict):
    """The table as bars on a log axis: a matplotlib Figure. Ours are darker, and a line marks what a copy takes."""
    from lowprec_lab import plots

    times = report["nanoseconds"]
    names = sorted(times, key=lambda name: times[name]["median"])
    ratios = [times[name]["median"] / times[NATIVE]["median"] for name in names]
    with plots.style():
        made, axes = plots.figure(9.5, 1.2 + 0.45 * len(names))
        ours = {COMPILED, EAGER, ANSWER, ENCODER}
        colors = [plots.color_of(E4M3) if name in ours else "#9AA3AD" for name in names]
        bars = axes.barh(names, ratios, height=0.6, color=colors)
        axes.bar_label(bars, labels=[f" {ratio:.2g}" for ratio in ratios], padding=2)
        axes.axvline(times[COPY]["median"] / times[NATIVE]["median"], color="#57606A", linewidth=1, linestyle="--")
        axes.set_xscale("log")
        axes.set_xlabel("time relative to torch's cast and back (log axis; shorter is faster; dashed: a plain copy)")
        axes.set_title("Rounding float32 to E4M3")
        axes.invert_yaxis()
        axes.margins(x=0.12)
    return made


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(runners: list[Runner], rounds: int, progress: bool) -> dict[str, list[float]]:
    """Nanoseconds for each element, by runner, one for each round."""
    for runner in runners:
        runner.call()  # compiles, and touches the memory
    times: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for _ in _with_bar(range(rounds), progress):
        for runner in runners:
            started = time.thread_time()
            runner.call()
            times[runner.name].append((time.thread_time() - started) / runner.elements * 1e9)
    return times


def _with_bar(steps, progress: bool):
    if not progress:
        return steps
    from tqdm import tqdm

    return tqdm(steps, desc="rounding", unit="round")


# --- the runners ------------------------------------------------------------------------------------------------------


def inputs(elements: int) -> Tensor:
    """Random float32, as many in each binade from 2^-12 to 2^9: subnormal for E4M3, normal, and above its largest."""
    generator = torch.Generator().manual_seed(2)
    exponents = torch.randint(-12, 10, (elements,), generator=generator)
    return torch.ldexp(torch.rand(elements, generator=generator) + 1, exponents) * _signs(elements, generator)


def _signs(elements: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (elements,), generator=generator) * 2.0 - 1.0


def _runners(elements: int, absent: list[str]) -> Iterator[Runner]:
    x = inputs(elements)
    out, codes = torch.empty_like(x), torch.empty(elements, dtype=torch.uint8)
    compiled, encoder = fused.compiled_round(E4M3), fused.compiled_encode(E4M3)
    yield Runner(COPY, lambda: out.copy_(x), elements)
    yield Runner(NATIVE, lambda: x.to(torch.float8_e4m3fn).float(), elements)
    yield Runner(COMPILED, lambda: compiled(x, out), elements)
    yield Runner(EAGER, lambda: fused.round_(x, E4M3, out), elements)
    yield Runner(ENCODER, lambda: encoder(x, codes), elements)
    answer = _answer()
    if answer is not None:
        yield Runner(ANSWER, lambda: answer(x, out), elements)
    part = x[: elements // 4].clone()
    yield Runner(COMPARED, lambda: _ties_away(part), part.numel())
    for name, make in ((ML_DTYPES, _ml_dtypes), (GFLOAT, _gfloat), (MX, _torchao)):
        try:
            yield make(name, x)
        except ImportError:
            absent.append(name)


def _answer() -> Callable | None:
    """The reference of exercise 2.7, compiled; None where no references are installed."""
    from lowprec_lab.blanks import load_chapters
    from lowprec_lab.rounding import compiled
    from lowprec_lab.sources import reference

    load_chapters()
    function = reference("fast_round_to")
    return function and compiled(function, E4M3)


def _ties_away(x: Tensor) -> Tensor:
    """Rounding as qtorch does it, one operation after the other: half a step is added to the bits and the rest is cut
    off, so that ties go away from zero; what is above ends at 480, a code that is NaN in E4M3."""
    bits = x.view(torch.int32)
    normal = ((bits + (1 << 19)) & -(1 << 20)).view(torch.float32)
    offset = torch.copysign(torch.full_like(x, 2.0**-6), x)
    shifted = (((x + offset).view(torch.int32) + (1 << 19)) & -(1 << 20)).view(torch.float32) - offset
    return torch.where(x.abs() < 2.0**-6, shifted, normal).clamp(-480, 480)


def _ml_dtypes(name: str, x: Tensor) -> Runner:
    import ml_dtypes

    array = x.numpy()
    return Runner(name, lambda: array.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), array.size)


def _gfloat(name: str, x: Tensor) -> Runner:
    import gfloat
    from gfloat.formats import format_info_ocp_e4m3

    part = x[: max(1, x.numel() // 64)].numpy().astype(np.float64)
    return Runner(name, lambda: gfloat.round_ndarray(format_info_ocp_e4m3, part, sat=True), part.size)


def _torchao(name: str, x: Tensor) -> Runner:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    part = x[: max(32, x.numel() // 4)].reshape(-1, 32)
    return Runner(name, lambda: MXTensor.to_mx(part, torch.float8_e4m3fn, 32).dequantize(torch.float32), part.numel())
