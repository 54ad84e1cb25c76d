"""What a training run is rounded to: FP32, BF16, FP16 or FP8, each a `Precision`; and the scaler of its loss.

The model's weights, its gradients as the optimizer sees them and the optimizer's moments are float32 in all of them
but "pure_bf16". What differs is what happens between: `torch.autocast` decides it, operation by operation (chapter 04).

FP8 is the learner's: `convert_to_float8` of chapter 10 and what it is built on, or what stands in for them.

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
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lowprec_lab import blanks, devices, fused, hardware, recipes
from lowprec_lab.formats import FP16
from lowprec_lab.tracing import with_constants

PRECISIONS = ("fp32", "bf16", "fp16", "pure_bf16", "fp8")
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


class PureBF16(Autocast):
    """Everything in BF16: weights, gradients and the optimizer's moments too."""

    def __init__(self, device: str, note: str = "") -> None:
        super().__init__("pure_bf16", device, torch.bfloat16, note)

    def convert(self, model: nn.Module) -> None:
        model.to(torch.bfloat16)


class Float8(Precision):
    """FP8 in the products of linear layers, by one of chapter 10's recipes: on tensor cores, or emulated.

    The rest is BF16 beside tensor cores. It stays FP32 where all products are emulated: BF16 would save no time there,
    and this way nothing but FP8 is between the run and one in FP32. skip: as in `convert_to_float8`; "small" stands for
    layers too small for a GPU. rows: the tokens of a batch. converted: the names of the layers in FP8.
    """

    name = "fp8"

    def __init__(self, device: str, compiled: bool, recipe: str, skip: tuple[str, ...], rows: int) -> None:
        if recipe not in recipes.NAMES:
            raise PrecisionError(f"there is no recipe {recipe!r}. The recipes are: {', '.join(recipes.NAMES)}")
        super().__init__(f"FP8 is by {_whose(recipe)}.")
        self._device, self._compiled = device, compiled
        self._recipe, self._skip, self._rows = recipe, skip, rows
        self._scalings: dict[str, object] = {}
        self._on_hardware = False
        self.converted: list[str] = []

    def context(self) -> AbstractContextManager:
        return torch.autocast(self._device, torch.bfloat16) if self._on_hardware else contextlib.nullcontext()

    def convert(self, model: nn.Module) -> None:
        linear = sum(isinstance(module, nn.Linear) for module in model.modules())
        skip = [text for text in self._skip if text != "small"]
        if "small" in self._skip:
            skip += recipes.too_small(model, self._recipe, self._rows)
        self.converted = recipes.convert_to_float8(model, self._recipe, tuple(skip))
        if not self.converted:
            raise PrecisionError(
                f"no layer is left for FP8: {', '.join(self._skip)} is to be skipped. Name fewer layers in --skip "
                "(none: all are converted), or train in bf16"
            )
        self._scalings = recipes.scalings_of(model)
        places = hardware.to_hardware(model, self._device, self._rows)
        self._on_hardware = any(place.where == hardware.HARDWARE for place in places)
        self.note += f" {len(self.converted)} of {linear} linear layers are converted. {_in_words(places)}"
        if self._compiled:
            self._prepare(model)

    def _prepare(self, model: nn.Module) -> None:
        """Whatever a compiler could not follow is done before, or left out of what it compiles."""
        layers = [model.get_submodule(name) for name in self.converted]
        self._run_once(layers[0])
        if self._scalings:  # each layer has a history of its own, and would be compiled for itself
            for layer in layers:
                layer.forward = torch.compiler.disable(layer.forward)
            self.note += " Layers with delayed scales are not compiled."

    def _run_once(self, layer: nn.Module) -> None:
        """Everything that stands in for an exercise is found now: a compiler could not follow the search."""
        training = layer.training
        x = torch.ones(1, layer.in_features, device=layer.weight.device, requires_grad=True)
        layer.eval()(x).sum().backward()
        layer.train(training).zero_grad(set_to_none=True)

    def after_step(self) -> None:
        if not self._scalings:
            return
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._agree()
        for scaling in self._scalings.values():
            scaling.update()

    def _agree(self) -> None:
        """Every process goes on with the largest magnitudes of all, a NaN among them too, and so with one scale."""
        everybodys = torch.stack([scaling.history[0] for scaling in self._scalings.values()])
        nan = everybodys.isnan().float()
        both = torch.stack((everybodys.nan_to_num(nan=0.0, posinf=torch.inf), nan))  # MAX does not always let NaN win
        dist.all_reduce(both, dist.ReduceOp.MAX)
        agreed = torch.where(both[1] > 0, torch.nan, both[0])
        for scaling, amax in zip(self._scalings.values(), agreed, strict=True):
            scaling.history[0] = amax

    def state_dict(self) -> dict:
        return {name: scaling.state_dict() for name, scaling in self._scalings.items()}

    def load_state_dict(self, state: dict) -> None:
        for name, scaling in self._scalings.items():
            scaling.load_state_dict(state[name])


def _in_words(places: list[hardware.Place]) -> str:
    """Where the products run, and what the rest of the model is."""
    fast = [place for place in places if place.where == hardware.HARDWARE]
    if len(fast) == len(places):
        return f"All products run on {fast[0].reason}; the rest is BF16."
    slow = next(place for place in places if place.where != hardware.HARDWARE)
    if not fast:
        return f"All products are emulated ({slow.reason}), and the rest is FP32."
    return (
        f"The products of {len(fast)} run on {fast[0].reason}; those of {len(places) - len(fast)} are emulated "
        f"({slow.layer}: {slow.reason}). The rest is BF16."
    )


def _whose(recipe: str) -> str:
    """Whose code an FP8 run is made of, in words; makes sure that all of it can be had.

    Raises PrecisionError for an exercise that nobody wrote where no reference is installed.
    """
    from lowprec_lab.exercises import AnswerError, supply

    names = ["convert_to_float8", "absmax", "scale_for", "quantize", "dequantize", "float8_matmul"]
    delayed = ["delayed_update", "DelayedScaling", "delayed_linear"]
    names += (
        delayed if recipe == recipes.DELAYED else ["float8_linear_forward", "float8_linear_backward", "Float8Linear"]
    )
    try:
        supplied = {name: supply(name, living=True) for name in names}
    except AnswerError as error:
        raise PrecisionError(f"FP8 is made of your answers, and one is missing: {error}") from error
    origins: dict[str, list[str]] = {}
    blanks.forget_supplied()  # an answer may have been saved since something stood in for it
    for name, each in supplied.items():
        if each.origin != "yours":  # what is filled in runs already
            blanks.SUPPLIED[name] = each.function
        origins.setdefault(each.origin, []).append(name)
    words = {"yours": "your", "saved": "your saved", "reference": "the reference's", "oracle": "the exact oracle's"}
    return "; ".join(f"{words.get(origin, origin)} {', '.join(names)}" for origin, names in origins.items())


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


def precision(
    name: str, device: str = "cpu", compiled: bool = False, recipe: str = "tensorwise",
    skip: tuple[str, ...] = ("head",), rows: int = 0,
) -> Precision:  # fmt: skip
    """The precision called `name`, one of PRECISIONS, on a kind of device ("cpu", "cuda", "mps").

    compiled: the model is going to be compiled. recipe, skip, rows: of "fp8", as `Float8` has them; rows are the tokens
    of a batch. Raises PrecisionError where that precision cannot be had.
    """
    if name not in PRECISIONS:
        raise PrecisionError(f"there is no precision {name!r}. The precisions are: {', '.join(PRECISIONS)}")
    if name == "fp32":
        return Precision()
    if name == "fp8":
        return Float8(device, compiled, recipe, skip, rows)
    line = _finding("bf16" if name == "pure_bf16" else name, device)
    if line.status == devices.CANNOT:
        raise PrecisionError(f"{name} cannot be had here: {line.reason}. Train in fp32")
    if name == "fp16" and device == "cpu" and line.status != devices.NATIVE:
        return EmulatedFP16(compiled)
    note = "" if line.status == devices.NATIVE else f"{name} is slow here: {line.reason}."
    if name == "pure_bf16":
        return PureBF16(device, note)
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
