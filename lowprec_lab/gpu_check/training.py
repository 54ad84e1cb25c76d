"""Part "training": how long a step of a GPT takes in BF16, in our FP8 and in torchao's, compiled, on the same weights.

All variants of a model share its weights and one optimizer, so that a large one is in memory once, and take turns step
by step. Each block of the model is compiled, once for all blocks, and so is the end (norm, head and loss): a whole
model takes a compiler minutes. Every linear layer but the head is in FP8, for us and for torchao alike. The tokens are
drawn at random, fresh for each turn.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from lowprec_lab import devices, hardware
from lowprec_lab.float8_linear import float8_layers
from lowprec_lab.gpt import GPT, PRESETS, GPTConfig, preset
from lowprec_lab.gpu_check.device import Device
from lowprec_lab.gpu_check.timing import OutOfTimeError, SkippedError, countdown, reported, stop_after
from lowprec_lab.libraries import AbsentError, torchao_linear

BF16 = "bf16"
VARIANTS = (BF16, "fp8_tensorwise", "torchao_tensorwise", "fp8_rowwise", "torchao_rowwise")
WARM = 3  # turns of each variant that are not counted: compiling, the optimizer's first state, the first memory
TURNS = 10
_HEAD = "head"


@dataclass(frozen=True)
class Size:
    """A model to train: its configuration, sequences in a batch, and which share of the time that is left it may take.

    AdamW keeps 16 bytes for each number that is trained; what a step needs next to them depends on the batch.
    """

    name: str
    config: GPTConfig
    batch: int
    share: float = 1.0

    @property
    def rows(self) -> int:
        """M of every product: the tokens of a batch."""
        return self.batch * self.config.context


# The largest has few layers, and wide ones: what 8 bits gain grows with the width, and the compiler sees one of them.
SIZES = (
    Size("shakespeare_char", preset("shakespeare_char", vocab_size=65), PRESETS["shakespeare_char"]["batch"], 0.3),
    Size("gpt2", preset("gpt2", vocab_size=50304), PRESETS["gpt2"]["batch"], 0.45),
    Size("gpt 1.3B", GPTConfig(32768, context=2048, layers=6, heads=32, width=4096), 8),
)
TINY = (Size("tiny", GPTConfig(65, context=16, layers=2, heads=2, width=32), 2),)


@dataclass
class _Runner:
    """A variant that is ready: a model that shares its weights with the others', and what was measured of it."""

    loss: Callable[[Tensor, Tensor], Tensor]
    report: dict
    seconds: list[float] = field(default_factory=list)


def check(
    device: Device, found: dict, save: Callable[[], None], left: Callable[[], float], sizes: tuple[Size, ...] = SIZES
) -> None:
    """Fill in a report for each size, the smallest first. left: the seconds that there still are.

    A size that does not fit into the time or the memory says so, and the next one is tried.
    """
    for size in sizes:
        report = found[size.name] = {}
        seconds = left() * size.share
        with contextlib.suppress(OutOfTimeError), reported(report), stop_after(seconds):
            measure(device, size, report, save, countdown(seconds))
        torch._dynamo.reset()
        gc.collect()
        device.free()
        save()


def measure(device: Device, size: Size, report: dict, save: Callable[[], None], left: Callable[[], float]) -> None:
    """Fill in the report on one size: its facts, each variant's, and how many times as fast ours is as the others.

    A variant has compile_seconds (until its first step is done), graphs (that were compiled) and graph_breaks,
    milliseconds (the median of its turns), tokens_per_s, peak_gib (of all tensors, weights and optimizer included) and
    loss (the last one); or skipped or failed, and why.
    """
    needed = 16 * _numbers(size.config) / 2**30
    if needed > device.total_bytes / 2**30:
        raise SkippedError(f"weights and AdamW alone need {needed:.0f} GiB, and the GPU has less")
    if left() <= 0:
        raise SkippedError("out of time")
    torch.manual_seed(1)
    with torch.device(device.where):
        model = GPT(size.config)
    report.update(parameters=model.size(), tokens=size.rows, compiler=_compiler(device), variants={}, times_as_fast={})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    runners: dict[str, _Runner] = {}
    get_ready = countdown(0.75 * left())
    for name in VARIANTS:
        told = report["variants"][name] = {}
        with contextlib.suppress(OutOfTimeError), reported(told), stop_after(get_ready()):
            if get_ready() < 0:
                raise SkippedError("out of time")
            runners[name] = _ready(name, model, device, size, optimizer, told)
        optimizer.zero_grad(set_to_none=True)
        if name not in runners:
            device.free()
        save()
    try:
        _take_turns(device, size, runners, optimizer, left)
    finally:  # what was measured counts, also if time runs out in the middle
        _sum_up(size, runners, report)
    save()


def _numbers(config: GPTConfig) -> int:
    with torch.device("meta"):
        return GPT(config).size()


def _compiler(device: Device) -> str:
    """The backend to compile with; "" where the doctor says that nothing can be compiled, and all runs eagerly."""
    line = "torch.compile"
    works = device.compiler != "inductor" or devices.diagnose(devices.inspect_machine()).status_of(line) == devices.OK
    return device.compiler if works else ""


def _ready(
    name: str, model: GPT, device: Device, size: Size, optimizer: torch.optim.Optimizer, report: dict
) -> _Runner:
    """A variant, made, compiled and warmed up. Raises whatever happens on the way."""
    counters.clear()
    runner = _Runner(_compiled(_variant(name, model, device, size, report), _compiler(device)), report)
    for turn in range(WARM):
        seconds = _step(device, runner, optimizer, _fresh(size, device))
        if turn == 0:
            report["compile_seconds"] = round(seconds, 2)
    report.update(graphs=counters["stats"]["unique_graphs"], graph_breaks=sum(counters["graph_break"].values()))
    return runner


# --- variants ---------------------------------------------------------------------------------------------------------


def twin(model: nn.Module) -> nn.Module:
    """A copy of a model's layers with the very parameters of the model."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _variant(name: str, model: GPT, device: Device, size: Size, report: dict) -> GPT:
    """The model in which the variant's layers stand; raises SkippedError where it cannot be had."""
    if name == BF16:
        return twin(model)
    whose, recipe = name.split("_")
    made = twin(model)
    if whose == "torchao":
        _with_torchao(made, recipe, emulate=device.where == "cpu")
        return made
    float8_layers(made, recipe, skip=(_HEAD,))
    places = hardware.to_hardware(made, device.where, size.rows, device.capability)
    ran = [place for place in places if place.where == hardware.HARDWARE]
    report["layers_in_hardware"] = f"{len(ran)} of {len(places)}"
    if not ran:
        raise SkippedError(f"no layer runs in hardware: {places[0].reason}")
    return made


def _with_torchao(model: nn.Module, recipe: str, emulate: bool) -> None:
    """Put torchao's layers in place of all linear ones but the head; SkippedError where there is no torchao."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and _HEAD not in name:
            parent, _, own = name.rpartition(".")
            try:
                setattr(model.get_submodule(parent), own, torchao_linear(layer, recipe, emulate))
            except AbsentError as reason:
                raise SkippedError(f"torchao {reason}") from reason


def _compiled(model: GPT, compiler: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a model as a function of tokens and targets; compiled, unless the compiler is ""."""
    end = _end
    if compiler:
        end = torch.compile(_end, backend=compiler, dynamic=False)
        for block in model.blocks:
            block.compile(backend=compiler, dynamic=False)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = model.dropout(model.token_embedding(tokens) + model.position_embedding(positions))  # (B, T, C)
        for block in model.blocks:
            x = block(x)
        return end(model.norm, model.head, x, targets)

    return loss


def _end(norm: nn.Module, head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(norm(x)).flatten(0, 1), targets.flatten())


# --- steps ------------------------------------------------------------------------------------------------------------


def _step(device: Device, runner: _Runner, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """One step on tokens (B, T + 1); the seconds it took."""
    device.synchronize()
    started = time.perf_counter()
    with torch.autocast(torch.device(device.where).type, torch.bfloat16):
        loss = runner.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    device.synchronize()
    seconds = time.perf_counter() - started
    last = float(loss.detach())
    runner.report["loss"] = last if math.isfinite(last) else str(last)
    return seconds


def _fresh(size: Size, device: Device) -> Tensor:
    return torch.randint(size.config.vocab_size, (size.batch, size.config.context + 1), device=device.where)


def _take_turns(
    device: Device, size: Size, runners: dict[str, _Runner], optimizer: torch.optim.Optimizer, left: Callable[[], float]
) -> None:
    """Time the variants, one step of each in turn, on the same batch; fewer turns where time is short."""
    for turn in range(TURNS if runners else 0):
        tokens = _fresh(size, device)
        for runner in runners.values():
            device.forget_peak()
            runner.seconds.append(_step(device, runner, optimizer, tokens))
            if turn == 0:
                runner.report["peak_gib"] = round(device.peak_bytes() / 2**30, 2)
        if left() < 0:
            break


def _sum_up(size: Size, runners: dict[str, _Runner], report: dict) -> None:
    for runner in runners.values():
        if runner.seconds:
            median = statistics.median(runner.seconds)
            runner.report.update(milliseconds=median * 1e3, tokens_per_s=size.rows / median, turns=len(runner.seconds))
    report["times_as_fast"] = times_as_fast({name: runner.seconds for name, runner in runners.items()})


def times_as_fast(seconds: dict[str, list[float]]) -> dict[str, float]:
    """How many times as fast our FP8 is: the median, over turns, of the other's seconds divided by ours.

    `fp8_vs_bf16` and `fp8_vs_torchao` for tensorwise scales, and the same with `_rowwise` after it.
    """
    pairs = {
        "fp8_vs_bf16": (BF16, "fp8_tensorwise"),
        "fp8_vs_torchao": ("torchao_tensorwise", "fp8_tensorwise"),
        "fp8_vs_bf16_rowwise": (BF16, "fp8_rowwise"),
        "fp8_vs_torchao_rowwise": ("torchao_rowwise", "fp8_rowwise"),
    }
    return {
        name: statistics.median(theirs / ours for theirs, ours in zip(seconds[other], seconds[own], strict=False))
        for name, (other, own) in pairs.items()
        if seconds.get(other) and seconds.get(own)
    }
