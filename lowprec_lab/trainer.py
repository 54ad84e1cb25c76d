"""One model and its optimizer, step by step: what a training step is, in the order in which it has to be.

    trainer = Trainer(settings("baby", precision="bf16"), corpus)
    for _ in range(300):
        record = trainer.take_step()     # {"step": 1, "loss": 4.2, "lr": ..., "grad_norm": ..., "scale": ..., ...}

Everything random is drawn from the seed and the number of the step, so that a run can go on from any step as if it had
never stopped. Run logs, checkpoints and the progress bar are train.py's.

References: Karpathy, nanoGPT, train.py; PyTorch's notes on mixed precision for the order unscale, clip, step, update.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowprec_lab import fused, sharding
from lowprec_lab.data import Corpus, step_generator
from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.peers import END, Alone
from lowprec_lab.precision import loss_scaler, precision
from lowprec_lab.settings import Settings, SettingsError

_DROPOUT = 10**6  # parts of a step's seed from here on are dropout's, and not a batch's


class TrainingError(RuntimeError):
    """Training cannot go on; the sentence says at which step, and why."""

    def _render_traceback_(self) -> list[str]:
        return [f"TrainingError: {self}"]


class Trainer:
    """A model in training. model, optimizer, scaler, precision, step (steps done) may be looked at, and hooked.

    settings: see settings.py. corpus: the text. say: called with what a reader of the run should know.
    Under torchrun every process has one, and takes its own batches.
    Raises PrecisionError, DataError or ValueError where the settings cannot be had with this machine and text.
    """

    def __init__(self, settings: Settings, corpus: Corpus, say=print) -> None:
        self.settings, self.corpus, self.step = settings, corpus, 0
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.device = pick_device(settings.device)
        for split in ("train", "validation"):
            corpus.batch(split, step_generator(0, 0), 1, settings.context)  # a text that is too short says so now
        if settings.shard and settings.compile:
            raise SettingsError("--shard and --compile do not go together: leave one of them out")
        compiled = settings.compile and _can_compile(self.device, say)
        rows = settings.batch * settings.context
        self.precision = precision(
            settings.precision, self.device.type, compiled, settings.recipe, settings.skipped, rows
        )
        self.scaler = loss_scaler(settings.scale_setting, say)
        self._skips = getattr(self.scaler, "checks", True)
        torch.manual_seed(settings.seed)
        self.model = GPT(config_of(settings, len(corpus.vocabulary))).to(self.device)
        self.precision.convert(self.model)
        if self.precision.note:
            say(self.precision.note)
        self.sharded = settings.shard and self.world > 1
        self._travelling = self._shard(say) if self.sharded else []
        self._found_inf = found_inf_of_ranks(say) if self.world > 1 else None
        self.optimizer = make_optimizer(self.model, settings)
        self._forward = torch.compile(self.model) if compiled else self.model
        if self.world > 1 and not self.sharded:
            ids = [self.device.index] if self.device.type == "cuda" else None
            self._forward = nn.parallel.DistributedDataParallel(self._forward, device_ids=ids)
        self._parameters = list(self.model.parameters())
        self._last_bad = ""
        self.peers = Alone()  # train() puts in what this process knows of the others

    def take_step(self, stop: bool = False) -> dict:
        """One step: gradients of `accumulate` batches, unscaled, looked at, clipped, used or skipped.

        stop: whether this process was asked to stop. Returns the step's line of the log: step, loss (before the step,
        mean over processes), lr, grad_norm (before clipping; None where it is not finite), scale (with which the loss
        was multiplied), skipped, and stop (whether any process was asked to).
        Raises TrainingError when the loss is not finite, or the scale has reached 0; the weights are then unchanged.
        """
        step = self.step + 1
        lr = learning_rate(self.settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        scale = self.scaler.scale
        if scale == 0:
            raise TrainingError(
                f"step {step}: the loss scale has fallen to 0. No scale helps when a gradient is NaN, and not too "
                f"large. {self._last_bad}"
            )
        loss, stop = self._gradients(step, scale, stop)
        if not math.isfinite(loss):
            raise TrainingError(
                f"step {step}: the loss is {loss}. {self._first_not_finite(step)} {self._last_bad}".strip()
            )
        self.peers.mark(step, "the update")
        norm, found = self._finish(step, scale)
        self.step = step
        return {
            "step": step, "loss": loss, "lr": lr, "grad_norm": norm if math.isfinite(norm) else None, "scale": scale,
            "skipped": found and self._skips, "stop": stop,
        }  # fmt: skip

    def batch(self, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
        """(x, y), int64 (batch, context): this process's batch number `part` of a step."""
        generator = step_generator(self.settings.seed, step, part * self.world + self.rank)
        return self.corpus.batch("train", generator, self.settings.batch, self.settings.context, self.device)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The validation loss: the mean over `eval_batches` batches, the same ones every time."""
        s = self.settings
        self.peers.mark(self.step, "the validation")
        self.model.eval()
        total = 0.0
        sharding.agree(self._travelling)
        for first in range(0, s.eval_batches, self.world):  # a sharded model runs on all ranks or on none
            which = min(first + self.rank, s.eval_batches - 1)
            if which < first + self.rank and not self.sharded:
                break
            x, y = self.corpus.even_batch("validation", which, s.eval_batches, s.batch, s.context, self.device)
            with self.precision.context():
                loss = float(self.model(x, y)[1])
            total += loss if which == first + self.rank else 0.0
        self.model.train()
        if self.world > 1:
            everybodys = torch.tensor(total, dtype=torch.float64, device=self.device)
            dist.all_reduce(everybodys)
            total = float(everybodys)
        return total / s.eval_batches

    def sample(self, count: int, start: str | None = None, temperature: float = 0.8) -> str:
        """`count` characters that the model writes after `start` (its first character, where it is omitted).

        All ranks have to ask a sharded model at once.
        """
        vocabulary = self.corpus.vocabulary
        tokens = vocabulary.encode(start or ("\n" if "\n" in vocabulary.characters else vocabulary.characters[0]))
        x = torch.from_numpy(tokens.astype("int64"))[None].to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.settings.seed)
        self.model.eval()
        sharding.agree(self._travelling)
        with self.precision.context():
            made = self.model.generate(x, count, temperature, generator=generator)
        self.model.train()
        return vocabulary.decode(made[0].cpu())

    def leave_processes(self) -> None:
        """Let go of what holds on to the other processes: their group can only be ended when nothing uses it."""
        if self.world > 1:
            self.peers.mark(self.step, END)
            dist.barrier()  # nobody leaves while another is still at work
            self._forward = self.model

    def state_dict(self) -> dict:
        """Everything that the next step depends on, for a checkpoint; of a sharded model without what `save_shards`
        writes."""
        whole = {} if self.sharded else {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {
            "step": self.step,
            **whole,
            "scaler": self.scaler.state_dict(),
            "precision": self.precision.state_dict(),
            "generator": torch.get_rng_state(),
        }

    def save_shards(self, folder: Path) -> None:
        """Write the weights and moments of a sharded model to an empty folder: all ranks together."""
        sharding.save(self.model, self.optimizer, folder)

    def load_state_dict(self, state: dict, shards: str | None = None) -> None:
        """Go on from what `state_dict` gave, bit for bit. shards: the folder that `save_shards` wrote to, if it did.

        How many ranks there were, and whether the model was sharded, makes no difference.
        """
        if shards is not None:
            sharding.load(self.model, self.optimizer, shards)
        elif self.sharded:
            sharding.load_whole(self.model, self.optimizer, state["model"], state["optimizer"])
        else:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.precision.load_state_dict(state["precision"])
        torch.set_rng_state(state["generator"])
        self.step = state["step"]

    # What a step is made of.

    def _gradients(self, step: int, scale: float, stop: bool) -> tuple[float, bool]:
        """Fill in the gradients of `scale` times the loss; (the loss, whether any process is to stop)."""
        s = self.settings
        if s.dropout:
            torch.manual_seed(step_generator(s.seed, step, _DROPOUT + self.rank).initial_seed())
        sharding.agree(self._travelling)
        total = torch.zeros((), device=self.device)
        for part in range(s.accumulate):
            self.peers.mark(step, f"batch {part + 1} of {s.accumulate}")
            x, y = self.batch(step, part)
            with self._synchronised(part == s.accumulate - 1):
                with self.precision.context():
                    loss = self._forward(x, y)[1]
                self.peers.mark(step, f"the gradients of batch {part + 1} of {s.accumulate}")
                (loss * (scale / s.accumulate)).backward()
            total += loss.detach() / s.accumulate
        if self.world == 1:
            return float(total), stop
        self.peers.mark(step, "the loss")
        both = torch.stack((total, torch.tensor(float(stop), device=self.device)))
        dist.all_reduce(both)
        return float(both[0]) / self.world, bool(both[1])

    def _synchronised(self, wanted: bool):
        """Several processes average their gradients, once for each step."""
        if self.sharded:
            self.model.set_requires_gradient_sync(wanted)
        return contextlib.nullcontext() if wanted or self.world == 1 or self.sharded else self._forward.no_sync()

    def _finish(self, step: int, scale: float) -> tuple[float, bool]:
        """Unscale the gradients, look at them, clip and use or skip them: (their norm, whether one is not finite)."""
        gradients = [parameter.grad for parameter in self._parameters]
        if scale != 1:
            torch._foreach_mul_(gradients, 1 / scale)
        norm = nn.utils.get_total_norm(gradients)
        if self.sharded:
            norm = norm.full_tensor()
        found = False
        if not math.isfinite(norm):  # for all ranks alike: it is the norm of the whole
            bad = self._bad_gradient()
            self._last_bad = f"The gradient of {bad} was not finite at step {step}." if bad else self._last_bad
            own = [sharding.local(each) for each in gradients]
            found = self._found_inf(own) if self._found_inf else bad is not None
        if not (found and self._skips):
            if self.settings.clip:
                nn.utils.clip_grads_with_norm_(self._parameters, self.settings.clip, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.update(found)
        self.precision.after_step()
        return float(norm), found

    def _bad_gradient(self) -> str | None:
        """The gradient that is not finite and was worked out first: backward goes from the last layer to the first.

        None where all are finite: a norm can overflow where no gradient does.
        """
        return self._last_not_finite([(name, each.grad) for name, each in self.model.named_parameters()])

    def _last_not_finite(self, tensors: list[tuple[str, Tensor]]) -> str | None:
        """The name of the last of these tensors that is not finite, in any shard of it; the same on all ranks."""
        bad = torch.tensor([not bool(sharding.local(each).isfinite().all()) for _, each in tensors], device=self.device)
        if self.sharded:
            bad = bad.float()
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        names = [name for (name, _), is_bad in zip(tensors, bad.tolist(), strict=True) if is_bad]
        return names[-1] if names else None

    def _shard(self, say) -> list[sharding.TravellingWeight]:
        """Cut the model into shards; the weights that travel in 8 bits."""
        told = self.settings
        by_tensor = told.precision == "fp8" and told.recipe == sharding.TENSORWISE
        weights, note = sharding.shard(self.model, self.precision.converted if by_tensor else [], self.world)
        say(note)
        return weights

    def _first_not_finite(self, step: int) -> str:
        """A sentence on the first thing in the forward pass that is not finite."""
        weight = self._last_not_finite(list(self.model.named_parameters())[::-1])
        if weight:
            return f"The weight {weight} is not finite."
        with torch.no_grad(), first_not_finite(self.model) as found:
            for part in range(self.settings.accumulate):
                with self.precision.context():
                    self.model(*self.batch(step, part))
        if found:
            return f"The first layer that gives a value that is not finite is {found[0]}."
        return "Every layer of this process gives finite values: look at the loss itself, or at another process."


def found_inf_of_ranks(say: Callable[[str], None]) -> Callable[[list[Tensor]], bool]:
    """Whether any rank's gradients are not all finite: the learner's exercise 14.2, or what stands in for it.

    Of a sharded gradient one rank has the bad number, and the others would take the step that it skips.
    """
    from lowprec_lab.exercises import supply

    supplied = supply("all_reduce_found_inf")
    say(f"That all ranks skip the same steps is the work of {supplied.line}.")
    return supplied.function


@contextlib.contextmanager
def first_not_finite(model: nn.Module) -> Iterator[list[str]]:
    """Names of the layers of `model` that give infinity or NaN in the forward passes inside, in the order they run."""
    found: list[str] = []

    def look(name: str):
        def hook(_module, _inputs, output) -> None:
            values = output[0] if isinstance(output, tuple) else output
            if not bool(values.isfinite().all()):
                found.append(name)

        return hook

    handles = [module.register_forward_hook(look(name or "the model")) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def config_of(settings: Settings, vocab_size: int) -> GPTConfig:
    """The model that the settings describe, for a vocabulary of that size."""
    s = settings
    return GPTConfig(vocab_size, s.context, s.layers, s.heads, s.width, s.dropout, s.bias)


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW, in one fused pass: matrices decay, vectors do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), fused=True)


def learning_rate(settings: Settings, step: int) -> float:
    """The learning rate of a step, counted from 1: up in a line, then down along half a cosine."""
    s, done = settings, step - 1
    if done < s.warmup:
        return s.lr * (done + 1) / (s.warmup + 1)
    if done >= s.steps:
        return s.min_lr
    way = (done - s.warmup) / max(s.steps - s.warmup, 1)
    return s.min_lr + 0.5 * (1 + math.cos(math.pi * way)) * (s.lr - s.min_lr)


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the first GPU (under torchrun this process's own), else the CPU.

    Raises TrainingError for a device that is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise TrainingError(f"there is no device {name!r} here: {fused.first_line(error)}") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return device


def _can_compile(device: torch.device, say) -> bool:
    reason = fused.why_not_compiled() if device.type == "cpu" else ""
    if reason:
        say(f"The model is not compiled, which changes nothing but the speed: {reason}.")
    return not reason


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Have torch give the same bits for the same inputs, inside; compiled gradients differ between repeats else."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it makes no result another, and takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filling
