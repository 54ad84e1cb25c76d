"""Serving a GPT: generating with a cache and without, and quantizing next to compressed-tensors.

One thread. All take turns, so that what slows the machine for a while slows all of them; a figure is the median, over
the turns, of one time divided by another. Answers are whoever's are in use: the learner's saved ones, else references.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from lowprec_lab.blanks import current, load_chapters
from lowprec_lab.devices import threads
from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.inference import generate, make_caches, model_bytes, quantize_model
from lowprec_lab.libraries import AbsentError, compressed_tensors_rows

TOKENS = 512
TURNS = 5


def run(progress: bool = True, turns: int = TURNS, tokens: int = TOKENS, width: int = 128) -> dict:
    """Figures: `cache_speedup`, how many times as fast `tokens` tokens are generated with a cache as without;
    `fp8_cache_vs_float32`, the time with a cache in 8 bits over that with one in float32; `weight_bytes` and
    `cache_bytes`, in 8 bits over float32; `rows_vs_compressed_tensors`, our time for per-token codes over theirs.

    The report also has `seconds`, and `left_out` with reasons. tokens: the context is as long.
    """
    with threads(1):
        return _report(progress, turns, tokens, width)


def _report(progress: bool, turns: int, tokens: int, width: int) -> dict:
    load_chapters()
    torch.manual_seed(11)
    model = GPT(GPTConfig(65, tokens + 1, layers=4, heads=4, width=width)).eval()
    start, scales = torch.zeros(1, 1, dtype=torch.int64), [(0.01, 0.01)] * 4
    runners: dict[str, Callable] = {
        "without": lambda: model.generate(start, tokens),
        "cache": lambda: generate(model, start, tokens),
        "fp8_cache": lambda: generate(model, start, tokens, scales=scales),
    }
    seconds = _take_turns(runners, turns, progress)
    in_8_bits = quantize_model(model, "fp8_dynamic")
    caches = (make_caches(model), make_caches(model, scales=scales))
    sizes = [sum(each.k.nbytes + each.v.nbytes for each in both) for both in caches]
    figures = {
        "cache_speedup": _ratio(seconds["without"], seconds["cache"]),
        "fp8_cache_vs_float32": _ratio(seconds["fp8_cache"], seconds["cache"]),
        "weight_bytes": model_bytes(in_8_bits) / model_bytes(model),
        "cache_bytes": sizes[1] / sizes[0],
    }
    left_out = {}
    try:
        figures["rows_vs_compressed_tensors"] = _rows(turns, progress)
    except AbsentError as absent:
        left_out["compressed_tensors"] = str(absent)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {"figures": figures, "seconds": medians, "turns": turns, "tokens": tokens, "left_out": left_out}


def _rows(turns: int, progress: bool) -> float:
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(11))
    ours = current("quantize_activation_per_token")
    compressed_tensors_rows(x[:2])  # its own imports are not measured
    seconds = _take_turns({"ours": lambda: ours(x), "theirs": lambda: compressed_tensors_rows(x)}, turns, progress)
    return _ratio(seconds["ours"], seconds["theirs"])


def _take_turns(runners: dict[str, Callable], turns: int, progress: bool) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in tqdm(range(turns), disable=not progress, desc="inference", leave=False):
        for name, runner in runners.items():
            started = time.perf_counter()
            runner()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
