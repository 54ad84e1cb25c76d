"""The exact oracle for chapter 10: delayed scales in numpy, products in float64, conversions and steps on plain data.

Shares no code with the references. Codes come from the rounding oracle, products and their bounds from that of
chapter 08. Classes and functions take an argument for each step of the way, so that a known misconception can change
one of them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from lowprec_lab.formats import Format
from lowprec_lab.graders import float8_linear_oracle, oracle, quantizer_oracle, rounding_oracle
from lowprec_lab.quantizer import Quantized, one_nan
from lowprec_lab.recipes import NAMES, float8_layer

ALGOS = ("max", "most_recent")
LARGEST = np.float32(np.finfo(np.float32).max)


# --- 10.1 and 10.2: scales --------------------------------------------------------------------------------------------


def largest(history: np.ndarray, algo: str) -> np.float32:
    """A: NaN where there is one."""
    if algo not in ALGOS:
        raise ValueError(f"there is no algo {algo!r}: take one of {', '.join(ALGOS)}")
    return history[0] if algo == "most_recent" else np.maximum.reduce(history)


def next_scale(amax: np.float32, old: np.float32, fmt: Format, margin: int) -> np.float32:
    """The scale for this A."""
    if not 0 < amax < np.inf:  # NaN is not between them either
        return np.float32(old)
    with np.errstate(over="ignore"):
        return min(np.float32(np.ldexp(oracle.max_finite(fmt), -margin)) / np.float32(amax), LARGEST)


def moved(history: np.ndarray) -> np.ndarray:
    """new[i] = old[i + 1], new[last] = old[0], new[0] = 0."""
    new = np.empty_like(history)
    for place in range(len(history)):
        new[place] = history[(place + 1) % len(history)]
    new[0] = 0
    return new


def delayed_update(
    history, scale, fmt, margin=0, algo="max", find=largest, divide=next_scale, move=moved
) -> tuple[Tensor, Tensor]:
    old = history.detach().numpy()
    new = divide(find(old, algo), scale.detach().numpy()[()], fmt, margin)
    return torch.from_numpy(np.array(move(old), np.float32)), torch.from_numpy(np.array(new, np.float32))


def amax_of(x: Tensor) -> np.float32:
    """The largest magnitude, NaN if there is one; 0 of nothing."""
    return np.float32(np.maximum.reduce(np.abs(x.detach().double().numpy()).reshape(-1), initial=0.0))


class DelayedScaling:
    """With a method for each step."""

    def __init__(self, fmt, length=1024, margin=0, algo="max") -> None:
        self.fmt, self.margin, self.algo = fmt, margin, algo
        self.history = torch.from_numpy(np.zeros(length, np.float32))
        self.scale = torch.from_numpy(np.array(1, np.float32))

    def record(self, x: Tensor) -> None:
        self.put(np.maximum(self.history.numpy()[0], amax_of(x)))

    def put(self, amax: np.float32) -> None:
        self.history.numpy()[0] = amax

    def scale_of(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.scale.numpy().copy())

    def codes_of(self, x: Tensor, scale: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            scaled = x.detach().double().numpy().astype(np.float32) * scale.numpy()
        return rounding_oracle.encode(torch.from_numpy(np.asarray(scaled)), self.fmt).to(torch.uint8)

    def quantize(self, x, record=True) -> Quantized:
        scale = self.scale_of(x)
        codes = self.codes_of(x, scale)
        if record:
            self.record(x)
        return Quantized(codes, scale, self.fmt, "tensor", x.dtype)

    def updated(self) -> tuple[Tensor, Tensor]:
        return delayed_update(self.history, self.scale, self.fmt, self.margin, self.algo)

    def update(self) -> None:
        self.load(*self.updated())

    def load(self, history: Tensor, scale: Tensor) -> None:
        self.history.numpy()[:], self.scale.numpy()[()] = history.numpy(), scale.numpy()

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(getattr(self, name).numpy().copy()) for name in ("history", "scale")}

    def load_state_dict(self, state) -> None:
        theirs, ours = len(state["history"]), len(self.history)
        if theirs != ours:
            raise ValueError(f"a history of {theirs} for one of {ours}")
        self.load(state["history"], state["scale"])


def amaxes_of(x: Tensor, record: str) -> list[np.float32]:
    """What history[0] is at the end of each step. x: (steps, batches, n)."""
    return [
        np.maximum.reduce([amax_of(batch) for batch, how in zip(step, record, strict=True) if how == "r"], initial=0.0)
        for step in x
    ]


def scaling_steps(x, record, fmt, length, margin, algo) -> tuple[Tensor, Tensor, Tensor]:
    """What the scenario of this name has to find."""
    history, scale = np.zeros(length, np.float32), np.float32(1)
    codes, scales, histories = [], [], []
    for step, amax in zip(x, amaxes_of(x, record), strict=True):
        with np.errstate(all="ignore"):
            scaled = step.double().numpy().astype(np.float32) * scale
        codes.append(one_nan(rounding_oracle.encode(torch.from_numpy(scaled), fmt).to(torch.uint8), fmt))
        scales.append([scale] * len(step))
        history[0] = amax
        scale, history = next_scale(largest(history, algo), scale, fmt, margin), moved(history)
        histories.append(history.copy())
    return torch.stack(codes), torch.tensor(np.array(scales)), torch.tensor(np.array(histories))


# --- 10.3: a layer ----------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.layer, ctx.shape = layer, x.shape
        return layer.output(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        return *ctx.layer.gradients(gradient, ctx.needs_input_grad[:2], ctx.shape), None


class Layer:
    """One call of a delayed_linear, with a method for each cast. Products are float64 ones of torch's."""

    def __init__(self, scalings, record) -> None:
        (self.of_x, self.of_weight, self.of_gradient), self.record = scalings, record

    def cast_x(self, rows: Tensor) -> np.ndarray:
        return float8_linear_oracle.values(self.of_x.quantize(rows, self.record))

    def cast_weight(self, weight: Tensor) -> np.ndarray:
        return float8_linear_oracle.values(self.of_weight.quantize(weight, self.record))

    def cast_gradient(self, gradient: Tensor) -> np.ndarray:
        return float8_linear_oracle.values(self.of_gradient.quantize(gradient, self.record))

    def gradients_for(self, gradient: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The gradient for the product that gives grad_x, and for the other."""
        return (self.cast_gradient(gradient),) * 2

    def back(self) -> tuple[np.ndarray, np.ndarray]:
        """The x and the weight of the way back."""
        return self.x8, self.weight8

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        self.rows, self.weight = float8_linear_oracle.rows_of(x), weight.detach()
        self.x8, self.weight8 = self.cast_x(self.rows), self.cast_weight(self.weight)
        return _product(self.x8, self.weight8.T, x.dtype).reshape(*x.shape[:-1], len(weight))

    def gradients(self, gradient: Tensor, needs: tuple, shape: tuple) -> tuple[Tensor | None, Tensor | None]:
        for_x, for_weight = self.gradients_for(float8_linear_oracle.rows_of(gradient))
        x8, weight8 = self.back()
        return (
            _product(for_x, weight8, gradient.dtype).reshape(shape) if needs[0] else None,
            _product(for_weight.T, x8, gradient.dtype) if needs[1] else None,
        )


def _product(left: np.ndarray, right: np.ndarray, dtype: torch.dtype) -> Tensor:
    exact = torch.mm(*(torch.from_numpy(np.ascontiguousarray(each)) for each in (left, right)))
    return float8_linear_oracle.rounded(exact.numpy(), dtype)


def linear_by(kind: type, x: Tensor, weight: Tensor, scalings: tuple, record: bool = True) -> Tensor:
    """A delayed_linear whose calls are of this kind of Layer."""
    return _Linear.apply(x, weight, kind(scalings, record))


def delayed_linear(x, weight, scalings, record=True) -> Tensor:
    return linear_by(Layer, x, weight, scalings, record)


def quantized_operands(x: Tensor, weight: Tensor, gradient: Tensor, scales: Tensor, fmts: tuple) -> list[np.ndarray]:
    """The values of x, weight and gradient (each a matrix) by three scales, float64."""
    found = []
    for each, scale, fmt in zip((x, weight, gradient), scales, fmts, strict=True):
        rows = float8_linear_oracle.rows_of(each)
        codes = quantizer_oracle.codes_of(quantizer_oracle.scaled(rows, scale, "tensor"), fmt)
        found.append(float8_linear_oracle.values(Quantized(codes, scale, fmt, "tensor", torch.float32)))
    return found


# --- 10.4: padding ----------------------------------------------------------------------------------------------------


def up(size: int, multiple: int) -> int:
    """The least multiple that is not below."""
    return math.ceil(size / multiple) * multiple


class _Padded(torch.autograd.Function):
    """A larger matrix with x in its corner; the gradient comes from that corner."""

    @staticmethod
    def forward(ctx, x, rows, columns, fill):
        ctx.shape = x.shape
        made = torch.full((rows, columns), float(fill), dtype=x.dtype)
        made[: x.shape[0], : x.shape[1]] = x
        return made

    @staticmethod
    def backward(ctx, gradient):
        return gradient[: ctx.shape[0], : ctx.shape[1]].clone(), None, None, None


def pad(x: Tensor, rows: int, columns: int, fill: float = 0.0) -> Tensor:
    """x in the corner of a matrix of this size."""
    return _Padded.apply(x, rows, columns, fill)


def padded_by(x, weight, linear, multiple, size=up, fill=0.0, corner=True, which=(True, True, True)) -> Tensor:
    """size: of a side; fill: of what is around; corner: cut at the beginning; which: of M, K, N are padded."""
    lines = math.prod(x.shape[:-1])
    m, k, n = (
        size(each, multiple) if wanted else each
        for each, wanted in zip((lines, x.shape[-1], len(weight)), which, strict=True)
    )
    output = linear(pad(x.reshape(lines, x.shape[-1]), m, k, fill), pad(weight, n, k, fill))
    cut = output[:lines, : len(weight)] if corner else output[m - lines :, n - len(weight) :]
    return cut.reshape(*x.shape[:-1], len(weight))


def padded_linear(x, weight, linear, multiple=16) -> Tensor:
    return padded_by(x, weight, linear, multiple)


# --- 10.5: a model ----------------------------------------------------------------------------------------------------


def places_of(model: nn.Module, prefix: str = "") -> list[tuple[nn.Module, str, str]]:
    """(parent, own name, whole name) of each child of each module, in the order of `named_modules`, all places."""
    found = []
    for name, child in model._modules.items():
        if child is not None:
            found.append((model, name, prefix + name))
            found += places_of(child, f"{prefix}{name}.")
    return found


def skipped_by_text(names: list[str], skip: tuple[str, ...]) -> bool:
    """Whether one of the names has one of the texts in it."""
    return any(name.find(text) >= 0 for name in names for text in skip)


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def converted_by(
    model, recipe, skip, linear=is_linear, skipped=skipped_by_text, layer=float8_layer, check=True, root=True,
    places=places_of,
) -> list[str]:  # fmt: skip
    """linear, skipped, layer, places: the steps; check, root: whether errors come before anything else."""
    if check and isinstance(recipe, str) and recipe not in NAMES:
        raise ValueError(f"no recipe {recipe!r}: there are {', '.join(NAMES)}")
    if root and is_linear(model):
        raise ValueError("a linear layer cannot be replaced in itself")
    slots = [(parent, own, name) for parent, own, name in places(model) if linear(parent._modules[own])]
    by_layer: dict[int, list] = {}
    for parent, own, name in slots:
        by_layer.setdefault(id(parent._modules[own]), []).append((parent, own, name))
    done = []
    for same in list(by_layer.values()):
        if not skipped([name for _, _, name in same], skip):
            made = layer(same[0][0]._modules[same[0][1]], recipe)
            for parent, own, _ in same:
                parent._modules[own] = made
            done.append(same[0][2])
    return done


def convert_to_float8(model, recipe, skip=("head",)) -> list[str]:
    return converted_by(model, recipe, skip)


# --- 10.6: a step -----------------------------------------------------------------------------------------------------


def norm_of(gradients: list[np.ndarray]) -> float:
    """The root of the sum of all squares."""
    return math.sqrt(sum(float(np.square(each.astype(np.float64)).sum()) for each in gradients))


def factor_for(norm: float, clip: float) -> float:
    """What gradients of this norm are multiplied by."""
    return clip / norm if clip and norm > clip else 1.0


def training_step(model, batches, optimizer, scalings=(), clip=1.0) -> tuple[float, float]:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    totals, loss = [None] * len(parameters), 0.0
    for x, y in batches:
        one = model(x, y)[1]
        found = torch.autograd.grad(one, parameters, allow_unused=True)
        totals = [b if a is None else a if b is None else a + b for a, b in zip(totals, found, strict=True)]
        loss += float(one.detach()) / len(batches)
    totals = [None if each is None else each / len(batches) for each in totals]
    norm = norm_of([each.double().numpy() for each in totals if each is not None])
    for parameter, each in zip(parameters, totals, strict=True):
        parameter.grad = None if each is None else each * factor_for(norm, clip)
    if math.isfinite(norm):
        optimizer.step()
    for each in model.parameters():
        each.grad = None
    for scaling in scalings:
        scaling.update()
    return loss, norm


def steps_told(x: Tensor, scalings: int, clip: float) -> tuple[str, ...]:
    """What the scenario of this name has to find."""
    told = []
    for step in x.double().numpy():
        with np.errstate(all="ignore"):
            loss, norm = step.sum(axis=1).mean(), norm_of([step.mean(axis=0)])
        events = [f"batch {number}" for number in range(1, len(step) + 1)]
        events += ["step"] * math.isfinite(norm) + [f"update {number}" for number in range(1, scalings + 1)]
        told.append(f"{', '.join(events)}; loss {loss:.5g} and norm {norm:.5g}")
    return tuple(told)


def gradients_used(x: Tensor, clip: float) -> Tensor:
    """What the scenario of this name has to find: float32, rounded once."""
    rows = []
    for step in x.double().numpy():
        with np.errstate(all="ignore"):
            mean = step.mean(axis=0)
            norm = norm_of([mean])
        rows.append(mean * factor_for(norm, clip) if math.isfinite(norm) else np.full(mean.shape, np.nan))
    return torch.from_numpy(np.array(rows).astype(np.float32))


# --- 10.7: a gap ------------------------------------------------------------------------------------------------------


def loss_gap(run, baseline) -> tuple[float, float]:
    pairs = [(mine, theirs) for seed, mine in run for other, theirs in baseline if seed == other]
    if not pairs:
        raise ValueError("no seed is in both")
    gaps = np.array([(mine - theirs) / theirs for mine, theirs in pairs])
    error = float(np.std(gaps, ddof=1) / np.sqrt(len(gaps))) if len(gaps) > 1 else math.nan
    return float(np.mean(gaps)), error


def as_near(got: object, want: tuple[float, float]) -> object:
    """`got`, with what is wanted in place of a number that is within 1e-10 of it: sums may go in any order."""
    if type(got) is not tuple or len(got) != 2:
        return got
    return tuple(
        right if type(mine) is float and (math.isnan(mine) and math.isnan(right) or abs(mine - right) < 1e-10) else mine
        for mine, right in zip(got, want, strict=True)
    )


def as_clipped(got: object, want: Tensor) -> object:
    """`got`, with what is wanted in place of an element that is within 1e-5 of it."""
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return got
    return torch.where((got - want).abs() <= 1e-5 * want.abs(), want, got)
