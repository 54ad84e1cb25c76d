"""Quantizing to blocks: of 32, in C and in Python, next to gguf-py's numpy; and how far off Q4_K is.

One thread. All take turns, so that what slows the machine for a while slows all of them; a figure is the median, over
the turns, of one time divided by another. Answers are whoever's are in use: the learner's saved ones, else references.
C is compiled for this machine's processor. Every result is compared, so nothing is fast by being wrong.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import tqdm

from lowprec_lab import c_code
from lowprec_lab.blanks import current, load_chapters
from lowprec_lab.devices import threads
from lowprec_lab.gguf_blocks import LAYOUTS
from lowprec_lab.libraries import AbsentError, gguf_bytes

IN_C = {"q8_0": "q8_0_in_c", "q4_0": "q4_0_in_c"}
ROWS = 256
TURNS = 7


def run(progress: bool = True, turns: int = TURNS, rows: int = ROWS) -> dict:
    """Figures: `c_q8_0_speedup` and `c_q4_0_speedup`, how many times as fast as gguf-py's numpy the C is;
    `python_q8_0_vs_gguf` and the like, our time in Python over gguf-py's; `q4_k_rmse`, the root mean square error of
    Q4_K on normal numbers as a share of their size (that of ggml's own C is 0.0715).

    The report also has `nanoseconds` for each number, and `left_out` with reasons. rows: of 4096 numbers each.
    Raises AssertionError where a result is not gguf-py's.
    """
    with threads(1):
        return _report(progress, turns, rows)


def _report(progress: bool, turns: int, rows: int) -> dict:
    load_chapters()
    x = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(12))
    figures, nanoseconds, left_out = {"q4_k_rmse": _q4_k_rmse(x[:64])}, {}, {}
    try:
        for layout in ("q8_0", "q4_0", "q4_1", "q5_0"):
            runners = _runners(layout, left_out)
            seconds = _take_turns(runners, x, turns, progress)
            nanoseconds[layout] = {name: 1e9 * statistics.median(each) / x.numel() for name, each in seconds.items()}
            figures[f"python_{layout}_vs_gguf"] = _ratio(seconds["python"], seconds["gguf"])
            if "c" in seconds:
                figures[f"c_{layout}_speedup"] = _ratio(seconds["gguf"], seconds["c"])
    except AbsentError as absent:
        left_out["gguf"] = str(absent)
    return {"figures": figures, "nanoseconds": nanoseconds, "turns": turns, "rows": rows, "left_out": left_out}


def _q4_k_rmse(x: Tensor) -> float:
    back = current("dequantize_q4_k")(current("quantize_q4_k")(x))
    return float((back.double() - x).norm() / x.double().norm())


def _runners(layout: str, left_out: dict) -> dict[str, Callable]:
    made: dict[str, Callable] = {"gguf": lambda x: gguf_bytes(x, layout), "python": current(f"quantize_{layout}")}
    if layout in IN_C:
        try:
            text, size = current(IN_C[layout])(), LAYOUTS[layout].bytes
            made["c"] = c_code.in_process(text, f"quantize_{layout}", block_bytes=size)
        except c_code.CompilerMissingError as missing:
            left_out["c"] = str(missing)
    return made


def _take_turns(runners: dict[str, Callable], x: Tensor, turns: int, progress: bool) -> dict[str, list[float]]:
    right = runners["gguf"](x)
    for name, runner in runners.items():
        if not torch.equal(runner(x), right):
            raise AssertionError(f"{name} has other bytes than gguf-py")
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in tqdm(range(turns), disable=not progress, desc="gguf", leave=False):
        for name, runner in runners.items():
            started = time.perf_counter()
            runner(x)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
