"""Train a GPT: `lowprec-lab train`, or `train(settings("baby", precision="bf16"))` in a notebook.

What happens around the steps is here: the log, validations, checkpoints, the progress bar, stopping and going on, and
several processes under torchrun. What a step is, is in trainer.py.

A run that goes on from a checkpoint gives the same bits as one that was never stopped: batches are drawn from the
number of the step, torch is asked for deterministic algorithms, and the number of threads, on which the last bits of
sums depend, is recorded and compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lowprec_lab.data import Corpus, load_corpus
from lowprec_lab.devices import threads
from lowprec_lab.files import write_whole
from lowprec_lab.peers import Alone, PeerError, join, open_group
from lowprec_lab.runs import Run, RunError, run_folder
from lowprec_lab.settings import IDENTITY, Settings, SettingsError, changed, settings
from lowprec_lab.trainer import Trainer, TrainingError, deterministic

_SIGNALS = {"SIGINT": 130, "SIGTERM": 143}


@dataclass(frozen=True)
class Result:
    """How a run ended.

    folder: the run's. records: the log, a dict for each step: step, loss, lr, grad_norm, scale, skipped, tokens_per_s,
    and val_loss where there was a validation. sample: what the model wrote. stopped: 0, or the exit status of a run
    that was stopped (130 by Ctrl-C, 143 by SIGTERM). trainer: with the trained model.
    """

    folder: Path
    records: list[dict]
    sample: str
    stopped: int
    trainer: Trainer

    @property
    def val_loss(self) -> float | None:
        """The last validation's loss."""
        return next((record["val_loss"] for record in reversed(self.records) if "val_loss" in record), None)

    def as_dict(self) -> dict:
        """The result as plain data, without the log."""
        last = self.records[-1] if self.records else {"step": 0, "loss": None}
        return {
            "folder": str(self.folder), "step": last["step"], "loss": last["loss"], "val_loss": self.val_loss,
            "stopped": self.stopped, "sample": self.sample,
        }  # fmt: skip

    def text(self) -> str:
        """The result in words."""
        last = self.records[-1]["step"] if self.records else 0
        seen = [(each["val_loss"], each["step"]) for each in self.records if "val_loss" in each]
        lines = [f"Validation loss {loss:.4f}, at step {step}." for loss, step in seen[-1:]]
        if last < self.trainer.settings.steps:
            lines.append(f"Stopped after step {last}, with a checkpoint. Go on with the same command and --resume.")
        return "\n".join([*lines, *([f"\n{self.sample}"] if self.sample else [])])

    def __repr__(self) -> str:
        last = self.records[-1]["step"] if self.records else 0
        loss = "no validation yet" if self.val_loss is None else f"validation loss {self.val_loss:.4f}"
        return f"<{last} steps, {loss}, in {self.folder}>"


def train(
    told: Settings,
    name: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    stop_at: int | None = None,
    progress: bool = True,
    corpus: Corpus | None = None,
    on_step: Callable[[dict], None] | None = None,
    on_start: Callable[[Trainer], None] | None = None,
    say: Callable[[str], None] = print,
) -> Result:
    """Train as `told`, in the folder `work/runs/<name>`, or in the folder of that path.

    name: default: preset-precision, and the recipe of FP8.
    resume: go on from the newest checkpoint, where there is one. overwrite: forget a run of that name. stop_at: stop
    after that step, with a checkpoint. corpus: the text; what `load_corpus` finds, when omitted. on_step: called with
    every line of the log; on_start: with the trainer before the first step (to hook something in).

    Raises RunError for a folder that cannot be used, WorkspaceError when it cannot be written (a full disk),
    TrainingError when the loss is not finite, and PeerError when another process has ended, hangs or was told something
    else; the newest checkpoint is then from before.
    """
    if stop_at is not None and stop_at < 1:
        raise SettingsError(f"stop_at is a step from 1 on, not {stop_at}")
    run = Run(run_folder(name or told.run_name))
    last = min(told.steps, stop_at or told.steps)
    with _Stop() as stop, _processes(told) as peers, threads(told.threads), deterministic():
        stop.begin()
        rank = peers.rank
        say = say if rank == 0 else _silent
        peers.agree("settings", {**_agreed(told), "stop_at": last})
        state, told = _look(run, told, resume, overwrite, say, peers.world)
        trainer = Trainer(told, corpus if corpus is not None else load_corpus(say), say)
        trainer.peers = peers
        if state is not None:
            _require_same_text(state, trainer)
            trainer.load_state_dict(state["trainer"], state.get("shards"))
            say(f"Going on after step {trainer.step} of {told.steps}.")
        peers.agree("text and checkpoint", {"text": trainer.corpus.sha256, "step": trainer.step})
        _claim(run, told, rank, clear=overwrite and not resume)
        say(_what(told, trainer, run))
        loop = _Loop(run, trainer, rank, progress, on_step, stop)
        if on_start is not None:
            on_start(trainer)
        loop.go(last)
        sample = ""
        wanted = told.sample and trainer.step == told.steps
        if wanted and trainer.sharded:
            sample = trainer.sample(told.sample)
        trainer.leave_processes()
        if wanted and rank == 0:
            sample = sample or trainer.sample(told.sample)
            write_whole(run.folder / "sample.txt", sample.encode())
        return Result(run.folder, loop.records, sample, stop.status, trainer)


def resume_settings(name: str, given: dict) -> Settings:
    """The settings to go on with: the run's own, with the `given` ones in their place.

    Raises RunError where that would make another run of it. Where there is no run of that name yet: the given ones.
    """
    run = Run(run_folder(name))
    if not (run.folder / "settings.json").exists():
        return settings(**given)
    own = run.read_settings()
    asked = settings(**{**dataclasses.asdict(own), **given})
    different = [name for name in IDENTITY if name in changed(own, asked)]
    if different:
        has = ", ".join(f"{name} {getattr(own, name)}" for name in different)
        wants = ", ".join(f"{name} {getattr(asked, name)}" for name in different)
        raise RunError(
            f"the run in {run.folder} was trained with {has}, and cannot go on with {wants}. Leave that out to go on "
            "with it, or choose another --name for a new run"
        )
    return asked


# --- starting ---------------------------------------------------------------------------------------------------------


def _look(run: Run, told: Settings, resume: bool, overwrite: bool, say, ranks: int) -> tuple[dict | None, Settings]:
    """The checkpoint to go on from, or None, and what is told then; says what changes. Nothing is written yet."""
    if run.exists() and not resume and not overwrite:
        raise RunError(
            f"there is a run in {run.folder} already. Go on with it (--resume), begin it again (--overwrite), or "
            "choose another --name"
        )
    state = run.load(say) if resume else None
    if state is not None:
        told = _with_steps_as_large(run, state, told, say, ranks)
        _compare(run, state, told, say)
    return state, told


def _claim(run: Run, told: Settings, rank: int, clear: bool) -> None:
    """From here on the folder is this run's: what could be refused has been looked at."""
    if dist.is_initialized():
        dist.barrier()  # everybody has looked before anybody writes
    if rank == 0:
        if clear:
            run.clear()
        run.write_settings(told)


def _with_steps_as_large(run: Run, state: dict, told: Settings, say, ranks: int) -> Settings:
    """The settings with which a step is of as many batches as before, on another number of processes, too."""
    before = state["settings"]["accumulate"]
    had, has = state.get("ranks", ranks) * before, ranks * told.accumulate
    if had == has:
        return told
    step = f"a step of the run in {run.folder} is {had} batches"
    if told.accumulate not in (1, before):  # 1: nothing was said about it
        raise RunError(
            f"{step}, and {has} were asked for ({ranks} of processes times accumulate {told.accumulate}): that is "
            "another run. Choose another --name"
        )
    if had % ranks:
        fit = [count for count in range(1, had + 1) if had % count == 0]
        raise RunError(
            f"{step}, and {ranks} processes cannot have equally many of them. Go on with "
            f"{', '.join(map(str, fit[:-1]))}{' or ' if fit[:-1] else ''}{fit[-1]}"
        )
    say(f"{step[0].upper()}{step[1:]}, so each of {ranks} processes has {had // ranks} of them now.")
    return dataclasses.replace(told, accumulate=had // ranks)


def _compare(run: Run, state: dict, told: Settings, say) -> None:
    """Refuse a checkpoint of another model; say what will differ from a run that was never stopped."""
    before = settings(**state["settings"])
    differences = changed(before, told)
    other = [name for name in IDENTITY if name in differences]
    if other:
        was = ", ".join(f"{name} {differences[name][0]}" for name in other)
        asked = ", ".join(f"{name} {differences[name][1]}" for name in other)
        raise RunError(
            f"the checkpoint in {run.folder} is of another run: it has {was}, and {asked} was asked for. "
            "Choose another --name"
        )
    kept = ("accumulate", "eval_every", "checkpoint_every", "sample", "tensorboard", "threads", "patience")
    now = [f"{name} {old} → {new}" for name, (old, new) in differences.items() if name not in kept]
    if now:
        say(f"Changed since the checkpoint: {', '.join(now)}.")
    if state["threads"] != torch.get_num_threads():
        say(
            f"The checkpoint was made with {state['threads']} threads, and this run has {torch.get_num_threads()}: the "
            f"last bits will differ from a run that was never stopped. --threads {state['threads']} keeps them."
        )
    if state["torch"] != torch.__version__:
        say(f"The checkpoint was made with torch {state['torch']}, and this is {torch.__version__}: bits may differ.")


def _require_same_text(state: dict, trainer: Trainer) -> None:
    if state["text"] != trainer.corpus.sha256:
        raise RunError(
            f"the checkpoint was trained on another text than {trainer.corpus.name}. Set LOWPREC_DATA to that text, or "
            "choose another --name"
        )


def _agreed(told: Settings) -> dict:
    """The settings that all ranks need to have in common: with others, one would wait for what never comes."""
    own = ("device", "threads", "tensorboard", "sample")
    return {name: value for name, value in dataclasses.asdict(told).items() if name not in own}


def _what(told: Settings, trainer: Trainer, run: Run) -> str:
    kind = f"{told.preset} ({trainer.model.size():,} parameters) in {told.label} on {trainer.device}"
    world = f", {trainer.world} processes" if trainer.world > 1 else ""
    return f"Training {kind}{world}, {torch.get_num_threads()} threads. The run is in {run.folder}."


# --- the loop ---------------------------------------------------------------------------------------------------------


class _Loop:
    """The steps, and what is done after each."""

    def __init__(self, run: Run, trainer: Trainer, rank: int, progress: bool, on_step, stop: _Stop) -> None:
        self.run, self.trainer, self.rank, self.stop, self.on_step = run, trainer, rank, stop, on_step
        self.progress, self.told = progress and rank == 0, trainer.settings
        told = self.told
        self.tokens = told.batch * told.context * told.accumulate * trainer.world  # in a step
        self.records = run.start_log(trainer.step) if rank == 0 else []
        self.board = _tensorboard(run, trainer.step) if rank == 0 and told.tensorboard else None
        self.saved = trainer.step if trainer.step else -1

    def go(self, last: int) -> None:
        """Steps up to number `last`; a checkpoint at the end, however it comes."""
        try:
            with _bar(self.progress, self.told.steps, self.trainer.step) as bar:
                while self.trainer.step < last and not self.stop.agreed:
                    self._step(bar)
            self._save()
        finally:
            self.run.close()
            if self.board is not None:
                self.board.close()

    def _step(self, bar) -> None:
        started = time.perf_counter()
        record = self.trainer.take_step(self.stop.status != 0)
        record["tokens_per_s"] = round(self.tokens / (time.perf_counter() - started))
        self.stop.agreed = record.pop("stop")
        step = record["step"]
        if step % self.told.eval_every == 0 or step == self.told.steps:
            record["val_loss"] = self.trainer.evaluate()
        if self.rank == 0:
            self._keep(record, bar)
        if step % self.told.checkpoint_every == 0:
            self._save()

    def _keep(self, record: dict, bar) -> None:
        self.records.append(record)
        self.run.log(record)
        if self.board is not None:
            for name, value in record.items():
                if name != "step" and value is not None:
                    self.board.add_scalar(name, float(value), record["step"])
        if bar is not None:
            if "val_loss" in record:
                bar.write(f"step {record['step']}: loss {record['loss']:.4f}, validation {record['val_loss']:.4f}")
            bar.set_postfix_str(f"loss {record['loss']:.3f}, {record['tokens_per_s']:,} tokens/s", refresh=False)
            bar.update()
        if self.on_step is not None:
            self.on_step(record)

    def _save(self) -> None:
        trainer = self.trainer
        trainer.peers.mark(trainer.step, "the checkpoint")
        if self.saved == trainer.step:
            return
        state = {
            "step": trainer.step, "settings": dataclasses.asdict(self.told), "text": trainer.corpus.sha256,
            "vocabulary": trainer.corpus.vocabulary.characters, "threads": torch.get_num_threads(),
            "torch": str(torch.__version__), "ranks": trainer.world, "trainer": trainer.state_dict(),
        }  # fmt: skip
        if trainer.sharded:
            self._save_shards(state)
        elif self.rank == 0:
            self.run.save(state)
        self.saved = trainer.step

    def _save_shards(self, state: dict) -> None:
        if self.rank == 0:
            self.run.begin_shards()
        dist.barrier()
        self.trainer.save_shards(self.run.unfinished)
        dist.barrier()
        if self.rank == 0:
            self.run.end_shards(state, self.trainer.world)


@contextlib.contextmanager
def _bar(wanted: bool, total: int, done: int) -> Iterator[object]:
    if not wanted:
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:  # a bare machine
        yield None
        return
    with tqdm(total=total, initial=done, unit="step", file=sys.stderr, dynamic_ncols=True, mininterval=0.25) as bar:
        yield bar


def _tensorboard(run: Run, done: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RunError(
            "TensorBoard is not installed: pip install tensorboard, or train without --tensorboard"
        ) from error
    return SummaryWriter(str(run.folder / "tensorboard"), purge_step=done + 1)


# --- stopping ---------------------------------------------------------------------------------------------------------


class _Stop:
    """From `begin` to its end, Ctrl-C and SIGTERM let the step end and stop the run; a second one stops it at once.

    Before, while it waits for other processes to come, one is enough. After, while it finds out which other process has
    failed, torchrun's SIGTERM does not keep it from saying so.
    status: 0, or the exit status of a process that the signal ends. agreed: all processes know.
    """

    def __init__(self) -> None:
        self.status, self.agreed, self._before = 0, False, {}

    def __enter__(self) -> _Stop:
        return self

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for name in _SIGNALS:
                number = getattr(signal, name)
                self._before[number] = signal.signal(number, self._ask)

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame) -> None:
        self.status = _SIGNALS[signal.Signals(number).name]
        signal.signal(number, self._before[number] or signal.SIG_DFL)


def _silent(_line: str) -> None:
    pass


# --- threads and processes --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _processes(told: Settings) -> Iterator[Alone]:
    """Join the other processes under torchrun; what this one knows of them.

    The group has to be gone, and its threads with it, before Python ends: a thread of gloo's that lets go of a tensor
    while Python ends brings the process down ("terminate called without an active exception"). torch's own
    distributed.nn takes the group of the moment of its import as a default argument and so holds it for ever; it is
    therefore imported before there is one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        alone = Alone()
        if dist.is_initialized():
            alone.rank, alone.world = dist.get_rank(), dist.get_world_size()
        yield alone
        return
    on_gpus = told.device.startswith("cuda") or (told.device == "auto" and torch.cuda.is_available())
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    importlib.import_module("torch.distributed.nn")
    peers = join(told.patience)
    try:
        open_group(peers, "nccl" if on_gpus else "gloo")
        yield peers
    except Exception as error:  # the group stays: to end it would wait, and let no thread run, for who is gone
        told_error = peers.failed(error)
        if told_error is error:
            raise
        raise told_error from error
    gc.collect()  # what holds the group is in cycles of references
    dist.destroy_process_group()
    peers.leave()


__all__ = ["PeerError", "Result", "TrainingError", "resume_settings", "train"]
