"""What a step of `lowprec-lab train` costs next to a bare loop: the same model, the same batches, and nothing around.
And what FP8 costs such a loop: ours, torchao's, and float32, with FP8 emulated and the head left in float32.

All take turns, step by step, in one process and on one thread, so that what slows the machine for a while slows all of
them. A step of ours is everything from one turn to the next: the batch, the step, the checks, the log, the bar.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

from lowprec_lab import fused
from lowprec_lab.blanks import load_chapters
from lowprec_lab.data import Corpus, Text, corpus_of, step_generator
from lowprec_lab.devices import threads
from lowprec_lab.gpt import GPT
from lowprec_lab.libraries import AbsentError, torchao_training
from lowprec_lab.precision import precision
from lowprec_lab.settings import Settings, settings
from lowprec_lab.train import train
from lowprec_lab.trainer import Trainer, config_of, make_optimizer

STEPS = 120
_WARM = 10  # steps that are not counted: compiling, the first pages of memory, the optimizer's first state


FP32, FP8, TORCHAO = "fp32", "fp8", "torchao"


def run(progress: bool = True, steps: int = STEPS, size: dict | None = None) -> dict:
    """Figures, each the median over turns of one time divided by another:

    `train_vs_bare_eager`, `train_vs_bare_compiled`: a step of `train` by one of the bare loop, in float32;
    `fp8_vs_torchao_eager`, `fp8_vs_torchao_compiled`, `fp8_vs_fp32_eager`, `fp8_vs_fp32_compiled`: bare loops, one with
    chapter 10's tensorwise recipe (the learner's, or the reference) by one with torchao's, or by float32.

    steps: turns, of the preset "baby", with the settings in `size` changed. Compiled figures are left out where nothing
    can be compiled, torchao's where it is not installed; `left_out` says why. `milliseconds`: the median of each.
    """
    reason = fused.why_not_compiled()
    left_out = {"compiled": reason} if reason else {}
    figures, milliseconds = {}, {}
    for kind in ["eager"] if reason else ["eager", "compiled"]:
        told = settings(
            "baby", steps=_WARM + steps, eval_every=10**6, checkpoint_every=10**6, sample=0, eval_batches=1, threads=1,
            device="cpu", compile=kind == "compiled", **(size or {}),
        )  # fmt: skip
        ours, bare = _race(told, progress)
        figures[f"train_vs_bare_{kind}"] = _ratio(ours, bare)
        seconds = _race_fp8(told, left_out)
        for other in (TORCHAO, FP32):
            if other in seconds:
                figures[f"fp8_vs_{other}_{kind}"] = _ratio(seconds[FP8], seconds[other])
        seconds |= {"train": ours, "bare": bare}
        milliseconds[kind] = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
    return {"figures": figures, "milliseconds": milliseconds, "turns": steps, "left_out": left_out}


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _race_fp8(told: Settings, left_out: dict[str, str]) -> dict[str, list[float]]:
    """Seconds of each step of three bare loops: in float32, with our FP8 and with torchao's."""
    load_chapters()
    corpus = _corpus()
    eight = precision(FP8, compiled=told.compile, rows=told.batch * told.context)
    with threads(1):
        loops = {FP32: _BareLoop(told, corpus), FP8: _BareLoop(told, corpus, eight.convert)}
        try:
            loops[TORCHAO] = _BareLoop(told, corpus, lambda model: torchao_training(model, "tensorwise"))
        except AbsentError as absent:
            left_out[TORCHAO] = str(absent)
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for step in range(1, told.steps + 1):
            for name, loop in loops.items():
                started = time.perf_counter()
                loop.take_step(step)
                if step > _WARM:
                    seconds[name].append(time.perf_counter() - started)
    return seconds


def _race(told: Settings, progress: bool) -> tuple[list[float], list[float]]:
    """Seconds of each of our steps, and of each of the bare loop's."""
    corpus = _corpus()
    bare = _BareLoop(told, corpus)
    seconds: tuple[list[float], list[float]] = ([], [])
    turn = 0.0

    def take_turns(record: dict) -> None:
        nonlocal turn
        seconds[0].append(time.perf_counter() - turn)
        torch.use_deterministic_algorithms(False)  # a bare loop asks for nothing of the kind
        started = time.perf_counter()
        bare.take_step(record["step"])
        seconds[1].append(time.perf_counter() - started)
        torch.use_deterministic_algorithms(True)
        turn = time.perf_counter()

    def begin(_trainer: Trainer) -> None:
        nonlocal turn
        turn = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        train(
            told, f"{folder}/run", corpus=corpus, progress=progress, on_step=take_turns, on_start=begin,
            say=lambda line: None,
        )  # fmt: skip
    # The last step of ours has a validation in it.
    return seconds[0][_WARM:-1], seconds[1][_WARM:-1]


class _BareLoop:
    """What people write when they write no more than they must."""

    def __init__(self, told: Settings, corpus: Corpus, convert: Callable = lambda model: None) -> None:
        self.told, self.corpus = told, corpus
        torch.manual_seed(told.seed)
        self.model = GPT(config_of(told, len(corpus.vocabulary)))
        convert(self.model)
        self.optimizer = make_optimizer(self.model, told)
        self.forward = torch.compile(self.model) if told.compile else self.model

    def take_step(self, step: int) -> None:
        generator = step_generator(self.told.seed, step)
        x, y = self.corpus.batch("train", generator, self.told.batch, self.told.context)
        loss = self.forward(x, y)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.told.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _corpus() -> Corpus:
    """A text of our own, so that nothing is fetched; what is in it does not matter for the time."""
    generator = torch.Generator().manual_seed(5)
    letters = torch.randint(65, (300_000,), generator=generator).tolist()
    text = "".join(chr(32 + letter) for letter in letters)
    return corpus_of(Text(text, "letters", "embedded", ""))
