"""What a linear layer in 8 bits costs where 8 bits are emulated: ours, torchao's, and nn.Linear in float32.

One layer, forward and backward, on one thread. All take turns, step by step, so that what slows the machine for a while
slows all of them; a figure is the median, over the turns, of one time divided by another. `Float8Linear` is whoever's
is in use: the learner's saved one, else the reference.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from tqdm import tqdm

from lowprec_lab import fused
from lowprec_lab.blanks import current, load_chapters
from lowprec_lab.devices import threads
from lowprec_lab.float8_linear import RECIPES
from lowprec_lab.libraries import AbsentError, torchao_linear

SIZES = (1024, 512, 512)  # M, K, N
TURNS = 40
_WARM = 3  # turns that are not counted: compiling, the first pages of memory
FLOAT32, OURS, TORCHAO = "float32", "ours", "torchao"


def run(progress: bool = True, turns: int = TURNS, sizes: tuple[int, int, int] = SIZES) -> dict:
    """Figures: `fp8_vs_float32_eager`, `fp8_vs_torchao_eager`, and the same `_compiled`: our time over theirs, for the
    tensorwise recipe.

    turns: at least 1. sizes: M, K and N of the layer. Figures are left out where there is no torchao, and where nothing
    can be compiled. The report also has `ratios`, for every recipe each time over that of eager float32;
    `milliseconds`, of eager float32; and `left_out`, with reasons.
    """
    with threads(1):
        return _report(progress, turns, sizes)


def _report(progress: bool, turns: int, sizes: tuple[int, int, int]) -> dict:
    load_chapters()
    reason = fused.why_not_compiled()
    left_out = {"compiled": reason} if reason else {}
    figures, ratios, base = {}, {}, 0.0
    bar = tqdm(total=len(RECIPES) * (_WARM + turns), disable=not progress, desc="float8_linear", leave=False)
    for recipe in RECIPES:
        steps = dict(_steps(recipe, sizes, compiled=not reason, left_out=left_out))
        seconds = _take_turns(steps, turns, bar)
        eager = f"{FLOAT32}_eager"
        ratios[recipe] = {name: _ratio(times, seconds[eager]) for name, times in seconds.items()}
        if recipe == "tensorwise":
            figures, base = _figures(seconds), statistics.median(seconds[eager])
    bar.close()
    return {
        "figures": figures, "ratios": ratios, "milliseconds": base * 1e3, "turns": turns, "sizes": list(sizes),
        "left_out": left_out,
    }  # fmt: skip


def _figures(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {
        f"fp8_vs_{other}_{kind}": _ratio(seconds[f"{OURS}_{kind}"], seconds[f"{other}_{kind}"])
        for other in (FLOAT32, TORCHAO)
        for kind in ("eager", "compiled")
        if f"{other}_{kind}" in seconds
    }


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _steps(
    recipe: str, sizes: tuple[int, int, int], compiled: bool, left_out: dict[str, str]
) -> Iterator[tuple[str, Callable]]:
    """(name, a function that takes one step) for each runner."""
    rows, in_features, out_features = sizes
    generator = torch.Generator().manual_seed(8)
    x, gradient = (torch.randn(rows, size, generator=generator) for size in (in_features, out_features))
    linear = nn.Linear(in_features, out_features, bias=False)
    layers = {FLOAT32: linear, OURS: current("Float8Linear").from_linear(linear, recipe)}
    try:
        layers[TORCHAO] = torchao_linear(linear, recipe)
    except AbsentError as absent:
        left_out[TORCHAO] = str(absent)
    for name, layer in layers.items():
        yield f"{name}_eager", _step(layer, linear, x, gradient)
        if compiled:
            yield f"{name}_compiled", _step(torch.compile(layer), linear, x, gradient)


def _step(layer: Callable, linear: nn.Linear, x: torch.Tensor, gradient: torch.Tensor) -> Callable:
    def step() -> None:
        layer(x.detach().requires_grad_()).backward(gradient)
        linear.weight.grad = None

    return step


def _take_turns(steps: dict[str, Callable], turns: int, bar: tqdm) -> dict[str, list[float]]:
    """Seconds of each step of each runner."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(_WARM + turns):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if turn >= _WARM:
                seconds[name].append(time.perf_counter() - started)
        bar.update()
    return seconds
