"""Block formats: the answers next to torchao's MX and NVFP4, and the compiled MX round trip next to torch's own cast.

One thread, and its own processor time, so that other programs count as little as possible. Two that are compared take
their turn one right after the other; a figure is the median, over the turns, of one time divided by another. Answers
are whoever's are in use: the learner's saved ones, else references.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from lowprec_lab import fused
from lowprec_lab.blanks import current, load_chapters
from lowprec_lab.block_formats import MX_FORMATS
from lowprec_lab.devices import threads
from lowprec_lab.formats import E2M1, E4M3
from lowprec_lab.libraries import AbsentError, torchao_mx, torchao_mx_round_trip, torchao_nvfp4

ELEMENTS = 2**22
ROW = 1024
TURNS = 7
FUSED = "fused_mxfp8_round_trip_vs_torch_e4m3"

Pair = tuple[Callable[[], object], Callable[[], object]]


def run(progress: bool = True, turns: int = TURNS, elements: int = ELEMENTS) -> dict:
    """Figures: `fused_mxfp8_round_trip_vs_torch_e4m3`, the time of one compiled pass over E4M3 and back (floor scales,
    blocks of 32) over that of x.to(torch.float8_e4m3fn).float(); for each format `..._vs_torchao`, the time of our
    codes and scales over torchao's, both packed where they have 4 bits; the same for MXFP8 and back.

    elements: of the tensor, a multiple of 2048; torchao gets half of it. The report also has `spread` (the smallest and
    the largest ratio), `nanoseconds` for each element (ours, theirs), and `left_out` with reasons.
    """
    with threads(1):
        return _report(progress, turns, elements)


def _report(progress: bool, turns: int, elements: int) -> dict:
    load_chapters()
    left_out: dict[str, str] = {}
    x = torch.randn(elements // ROW, ROW, generator=torch.Generator().manual_seed(13))
    # A call of what is compiled costs the same for any size, so x is large; but where all passes make temporaries,
    # larger ones would come from the system each time.
    pairs = {**_fused(x, left_out), **_torchao(x[: len(x) // 2], left_out)}
    sizes = {name: elements if name == FUSED else elements // 2 for name in pairs}
    seconds = {name: [] for name in pairs}
    for name, pair in pairs.items():
        for each in pair:
            each()  # compiles, and touches the memory
        for _ in tqdm(range(turns), disable=not progress, desc=name, leave=False):
            seconds[name].append([_time(each) for each in pair])
    ratios = {name: [ours / theirs for ours, theirs in each] for name, each in seconds.items()}
    return {
        "figures": {name: statistics.median(each) for name, each in ratios.items()},
        "spread": {name: [min(each), max(each)] for name, each in ratios.items()},
        "nanoseconds": {
            name: [statistics.median(side) / sizes[name] * 1e9 for side in zip(*each, strict=True)]
            for name, each in seconds.items()
        },
        "turns": turns,
        "elements": elements,
        "left_out": left_out,
    }


def _time(run_once: Callable[[], object]) -> float:
    started = time.thread_time()
    run_once()
    return time.thread_time() - started


def _fused(x: Tensor, left_out: dict[str, str]) -> dict[str, Pair]:
    reason = fused.why_not_compiled()
    if reason:
        left_out["fused"] = reason
        return {}
    round_trip, out = fused.compiled_mx_round_trip(E4M3), torch.empty_like(x)
    return {FUSED: (lambda: round_trip(x, out), lambda: x.to(torch.float8_e4m3fn).float())}


def _torchao(x: Tensor, left_out: dict[str, str]) -> dict[str, Pair]:
    try:
        torchao_mx(x[:1], E4M3)
    except AbsentError as absent:
        left_out["torchao"] = str(absent)
        return {}
    return dict(_pairs(x))


def _pairs(x: Tensor) -> Iterator[tuple[str, Pair]]:
    quantize, dequantize, pack = (current(name) for name in ("quantize_mx", "dequantize_mx", "pack_nibbles"))
    nvfp4 = current("quantize_nvfp4")

    def mx(fmt) -> Callable:
        def codes_and_scale() -> tuple[Tensor, Tensor]:
            codes, scale = quantize(x, fmt)
            return (pack(codes) if fmt == E2M1 else codes), scale

        return codes_and_scale

    for name, fmt in MX_FORMATS.items():
        yield f"{name.lower().replace(' ', '_')}_vs_torchao", (mx(fmt), lambda fmt=fmt: torchao_mx(x, fmt))

    def nvfp4_packed() -> tuple[Tensor, ...]:
        codes, scale, tensor_scale = nvfp4(x)
        return pack(codes), scale, tensor_scale

    yield "nvfp4_vs_torchao", (nvfp4_packed, lambda: torchao_nvfp4(x))
    back = lambda: dequantize(*quantize(x, E4M3), E4M3)  # noqa: E731
    yield "mxfp8_round_trip_vs_torchao", (back, lambda: torchao_mx_round_trip(x, E4M3))
