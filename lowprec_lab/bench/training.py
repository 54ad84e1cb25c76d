"""What a step of `lowprec-lab train` costs next to a bare loop: the same model, the same batches, and nothing around.

The two take turns, step by step, in one process and on one thread, so that what slows the machine for a while slows
both. A step of ours is everything from one turn to the next: the batch, the step, the checks, the log, the bar.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
from torch import nn

from lowprec_lab import fused
from lowprec_lab.data import Corpus, Text, corpus_of, step_generator
from lowprec_lab.gpt import GPT
from lowprec_lab.settings import Settings, settings
from lowprec_lab.train import train
from lowprec_lab.trainer import Trainer, config_of, make_optimizer

STEPS = 120
_WARM = 10  # steps that are not counted: compiling, the first pages of memory, the optimizer's first state


def run(progress: bool = True, steps: int = STEPS, size: dict | None = None) -> dict:
    """Figures: `train_vs_bare_eager` and `train_vs_bare_compiled` (left out where nothing can be compiled): the median,
    over pairs of steps, of our time divided by the bare loop's.

    steps: pairs, of the preset "baby", with the settings in `size` changed. The report also has `milliseconds`, the
    median of each.
    """
    kinds = ["eager"] if fused.why_not_compiled() else ["eager", "compiled"]
    figures, milliseconds = {}, {}
    for kind in kinds:
        told = settings(
            "baby", steps=_WARM + steps, eval_every=10**6, checkpoint_every=10**6, sample=0, eval_batches=1, threads=1,
            device="cpu", compile=kind == "compiled", **(size or {}),
        )  # fmt: skip
        ours, bare = _race(told, progress)
        figures[f"train_vs_bare_{kind}"] = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
        milliseconds[kind] = {"train": statistics.median(ours) * 1e3, "bare": statistics.median(bare) * 1e3}
    return {"figures": figures, "milliseconds": milliseconds, "pairs": steps}


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

    def __init__(self, told: Settings, corpus: Corpus) -> None:
        self.told, self.corpus = told, corpus
        torch.manual_seed(told.seed)
        self.model = GPT(config_of(told, len(corpus.vocabulary)))
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
