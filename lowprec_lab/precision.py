"""What a training run is rounded to: FP32, BF16 or FP16, each a `Precision`; and the scaler of its loss.

The model's weights, its gradients as the optimizer sees them and the optimizer's moments are float32 in all of them.
What differs is what happens between: `torch.autocast` decides it, operation by operation (chapter 04).

FP16 needs arithmetic that most CPUs lack; torch then takes twenty times as long as for FP32. There it is emulated: each
linear layer rounds its input, weight and output to FP16, and the gradients of all three, while the products are added
up in float32, as tensor cores do it. What is finite and beyond 65504 by half a step becomes infinity, as in hardware.

References: Micikevicius et al., Mixed precision training, arXiv:1710.03740; torch.amp.GradScaler for the loss scaler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowprec_lab import devices, fused
from lowprec_lab.formats import FP16
from lowprec_lab.tracing import with_constants

PRECISIONS = ("fp32", "bf16", "fp16")
_OVERFLOW_AT = 65520.0  # half a step beyond the largest FP16: a tie, whose even neighbour is the missing 65536


class PrecisionError(ValueError):
    """A precision that this machine cannot train in; the sentence says why, and what to do."""

    def _render_traceback_(self) -> list[str]:
        return [f"PrecisionError: {self}"]


class Precision:
    """FP32: nothing is rounded. A subclass changes what its precision changes, and keeps the rest.

    note: what a reader of the run should know ("" where there is nothing to say).
    """

    name = "fp32"

    def __init__(self, note: str = "") -> None:
        self.note = note

    def convert(self, model: nn.Module) -> None:
        """Change the model's layers in place, once, before it is compiled. Names in its state_dict must stay."""

    def context(self) -> AbstractContextManager:
        """What a forward pass runs in."""
        return contextlib.nullcontext()

    def after_step(self) -> None:
        """Called after every step, taken or skipped: for what is carried from one step to the next."""

    def state_dict(self) -> dict:
        """What is carried on, for a checkpoint: numbers, strings, tensors, and dicts and lists of them."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Go on from what `state_dict` gave."""


class Autocast(Precision):
    """torch.autocast to one 16-bit dtype."""

    def __init__(self, name: str, device: str, dtype: torch.dtype, note: str = "") -> None:
        super().__init__(note)
        self.name, self._device, self._dtype = name, device, dtype

    def context(self) -> AbstractContextManager:
        return torch.autocast(self._device, self._dtype)


class EmulatedFP16(Precision):
    """FP16 on hardware that has none: linear layers round what goes in, what comes out, and their gradients."""

    name = "fp16"

    def __init__(self, compiled: bool = False) -> None:
        function, line = _rounder()
        # In a compiled run the compiler of the model takes the plain code into its own loops.
        self._round = function if compiled else fused.compile_elementwise(function, torch.float32, "rounding to FP16")
        super().__init__(
            "FP16 is emulated, since this CPU has no FP16 arithmetic. Weights, activations and gradients are rounded "
            f"to FP16, products are added up in FP32 (attention's inner sums too). Rounded by {line}."
        )
        difference = _difference(self._round, function, compiled)
        if difference and compiled:
            raise PrecisionError(
                f"rounding to FP16 does not survive the compiler: {difference}. Train without --compile"
            )
        if difference:
            self._round = function
            self.note += f" It runs as plain code, which is slow, since a compiler changes it: {difference}."

    def convert(self, model: nn.Module) -> None:
        rounded = straight(self._round)
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = RoundedLinear
                module.rounded = rounded


class RoundedLinear(nn.Linear):
    """A linear layer whose input, weight, bias and output are rounded, on the way there and on the way back."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.rounded(self.bias)
        return self.rounded(F.linear(self.rounded(x), self.rounded(self.weight), bias))


def straight(round_: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`round_` as a step of a forward pass that also rounds the gradient on its way back."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return round_(x)

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return round_(gradient)

    return Rounded.apply


def precision(name: str, device: str = "cpu", compiled: bool = False) -> Precision:
    """The precision called `name` ("fp32", "bf16", "fp16") on a kind of device ("cpu", "cuda", "mps").

    compiled: the model is going to be compiled. Raises PrecisionError where that precision cannot be had.
    """
    if name not in PRECISIONS:
        raise PrecisionError(f"there is no precision {name!r}. The precisions are: {', '.join(PRECISIONS)}")
    if name == "fp32":
        return Precision()
    line = _finding(name, device)
    if line.status == devices.CANNOT:
        raise PrecisionError(f"{name} cannot be had here: {line.reason}. Train in fp32")
    if name == "fp16" and device == "cpu" and line.status != devices.NATIVE:
        return EmulatedFP16(compiled)
    note = "" if line.status == devices.NATIVE else f"{name} is slow here: {line.reason}."
    return Autocast(name, device, torch.bfloat16 if name == "bf16" else torch.float16, note)


def _finding(name: str, device: str) -> devices.Line:
    """What the doctor says about a precision on that kind of device."""
    machine = devices.inspect_machine()
    if device == "cpu":
        machine = dataclasses.replace(machine, accelerator=None)
    return next(line for line in devices.diagnose(machine).precisions if line.topic == name)


# --- rounding to FP16 -------------------------------------------------------------------------------------------------


def _rounder() -> tuple[Callable[[Tensor], Tensor], str]:
    """(function that rounds float32 to FP16, with infinity beyond; whose code it is, in words)."""
    own = fused.elementwise_round(FP16, overflow="to_special"), "the lab's own code, until you write fast_round_to"
    try:
        from lowprec_lab.exercises import AnswerError, supply
    except ImportError:  # a bare machine, without what the exercises need
        return own
    try:
        supplied = supply("fast_round_to")
    except AnswerError:  # nobody wrote it, and no reference is installed
        return own
    whole = with_constants(supplied.function, FP16)
    return _overflowing(lambda x: whole(x, FP16)), supplied.line


def _overflowing(saturating: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def to_fp16(x: Tensor) -> Tensor:
        return torch.where(x.abs() < _OVERFLOW_AT, saturating(x), x * math.inf)  # NaN stays NaN

    return to_fp16


def _difference(round_: Callable, function: Callable, compiled: bool) -> str:
    """In words, how rounding, in a forward and a backward pass, differs from `function` run eagerly; "" if it does not.

    compiled: compile the passes first. A compiler may take out a pair of casts down to 16 bits and up again.
    """
    x = _probes()
    wanted = function(x)
    rounded = straight(round_)

    def there(x: Tensor) -> Tensor:
        return rounded(x * 1.0)

    leaf = x.clone().requires_grad_()
    try:
        got = (torch.compile(there, fullgraph=True) if compiled else there)(leaf)
        got.backward(x)
    except Exception as error:  # whatever a compiler can stumble over
        return fused.first_line(error)
    for what, values in (("values", got.detach()), ("gradients", leaf.grad)):
        wrong = int((~_same_bits(values, wanted)).sum())
        if wrong:
            return f"{wrong:,} of {x.numel():,} {what} are others than without it"
    return ""


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    return (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())


def _probes() -> Tensor:
    """Every FP16 value, the middle between it and its neighbour, and the float32 on either side of both."""
    values = torch.arange(0x7C01, dtype=torch.int16).view(torch.float16).float()  # 0 to infinity
    grid = torch.cat((values[:-1], torch.tensor([65536.0])))  # as if the largest binade went on
    near = torch.cat((values, (grid[:-1] + grid[1:]) / 2))
    near = torch.cat([near, *(torch.nextafter(near, torch.tensor(end)) for end in (0.0, math.inf))])
    return torch.cat((near, -near, torch.tensor([math.nan])))


# --- scaling the loss -------------------------------------------------------------------------------------------------


class ConstantScale:
    """A loss scale that stays. checks: whether a step with a gradient that is not finite is skipped."""

    def __init__(self, scale: float = 1.0, checks: bool = True) -> None:
        self.scale, self.checks = float(scale), checks

    def update(self, found_inf: bool) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict) -> None:
        self.scale = state["scale"]


def loss_scaler(setting: str | float, say: Callable[[str], None] = lambda line: None) -> object:
    """The scaler that a run is told to use: "dynamic", "none", or a number, which stays and skips bad steps too.

    A number below 1, such as 1/640, is the share of one batch in a step that is made of so many.

    A scaler has `scale` (a float), `update(found_inf)` after each step, and `state_dict`/`load_state_dict`. Where it
    has `checks`, and it is False, bad steps are taken all the same. The dynamic one is the learner's DynamicLossScaler,
    or what stands in for it; say is called with a line on whose it is. Raises ValueError for any other setting.
    """
    if setting == "dynamic":
        return _dynamic(say)
    if setting == "none":
        return ConstantScale(1.0, checks=False)
    try:
        scale = float(Fraction(setting)) if "/" in str(setting) else float(setting)
    except (ValueError, ZeroDivisionError):
        scale = math.nan
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"a loss scale is dynamic, none, or a number above 0 (1024, or 1/640), not {setting!r}")
    return ConstantScale(scale)


def _dynamic(say: Callable[[str], None]) -> object:
    from lowprec_lab.blanks import load_chapters
    from lowprec_lab.exercises import supply

    load_chapters()
    supplied = supply("DynamicLossScaler")
    say(f"The scale of the loss is set by {supplied.line}.")
    return supplied.function()
