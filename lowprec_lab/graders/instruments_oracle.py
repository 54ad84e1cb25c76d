"""The exact oracle for chapter 05: whole numbers and searches between breakpoints instead of float arithmetic.

Exponents are bit lengths of Python's whole numbers; underflow and overflow are comparisons of a float32's bits with the
two ends of the format; norms are sums of fractions, whose root is taken of whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from lowprec_lab.formats import Format
from lowprec_lab.graders import oracle, rounding_oracle

_INFINITY_BITS = 0x7F800000
_PLACES, _LOWEST = 277, -149


def _float32_bits(x: Tensor) -> np.ndarray:
    """The magnitude bits of the elements as float32, flat, int64. Conversions from 16 bits are exact."""
    return oracle.bit_pattern(x.detach().float()).numpy().reshape(-1).astype(np.int64) % 2**31


def exponent_histogram(x: Tensor) -> Tensor:
    """The counts by the position of the highest set bit."""
    bits = _float32_bits(x)
    bits = bits[(bits > 0) & (bits < _INFINITY_BITS)]
    normal, low = bits[bits >= 2**23], bits[bits < 2**23]
    places = np.concatenate([normal // 2**23 + 22, [int(each).bit_length() - 1 for each in low]]).astype(np.int64)
    return torch.from_numpy(np.bincount(places, minlength=_PLACES).astype(np.int64))


@lru_cache(maxsize=512)
def ends(fmt: Format) -> tuple[int, int]:
    """The bits of the first float32 magnitude that does not become zero, and of the first that overflows."""
    if fmt.width <= 16:
        points = rounding_oracle.breakpoints(fmt, "nearest_even", False)
        return int(points[0]) if fmt.subnormals else 0, int(min(points[-1], _INFINITY_BITS))
    smallest = Fraction(oracle.min_subnormal(fmt) or oracle.min_normal(fmt))
    largest = Fraction(oracle.max_finite(fmt))
    step = Fraction(float(oracle.ulp(torch.tensor(float(largest)), fmt)))
    tie_is_out = (largest / step) % 2 == 1
    first = _first(smallest / 2, strict=True) if fmt.subnormals else 0
    return first, _first(largest + step / 2, strict=not tie_is_out)


def _first(bound: Fraction, strict: bool) -> int:
    """The bits of the first float32 magnitude at or (strict) above a bound: a search by halving."""
    low, high = 0, _INFINITY_BITS
    while low < high:
        middle = (low + high) // 2
        value = Fraction(float(np.array(middle, dtype=np.uint32).view(np.float32)))
        if value > bound or (value == bound and not strict):
            high = middle
        else:
            low = middle + 1
    return low


def _share(x: Tensor, scale: float, lost) -> float:
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"a scale is finite and above zero, not {scale!r}")
    numbers = x.detach().float().reshape(-1).numpy()
    counted = numbers[np.isfinite(numbers) & (numbers != 0)]
    with np.errstate(all="ignore"):
        scaled = np.abs(counted * np.float32(scale)).view(np.uint32).astype(np.int64)
    return int(lost(scaled).sum()) / len(counted) if len(counted) else 0.0


def underflow_fraction(x: Tensor, fmt: Format, scale: float = 1.0) -> float:
    """Those below the format's first breakpoint."""
    return _share(x, scale, lambda bits: bits < ends(fmt)[0])


def overflow_fraction(x: Tensor, fmt: Format, scale: float = 1.0) -> float:
    """Those from the format's last breakpoint on."""
    return _share(x, scale, lambda bits: bits >= ends(fmt)[1])


def tensor_report(x: Tensor) -> tuple[float, float, int, int]:
    """By Python's own numbers, one after the other."""
    values = x.detach().double().reshape(-1).tolist()
    sizes = sorted(abs(value) for value in values if math.isfinite(value) and value != 0)
    smallest, largest = (sizes[0], sizes[-1]) if sizes else (0.0, 0.0)
    return smallest, largest, values.count(0.0), sum(not math.isfinite(value) for value in values)


_CHUNK = 2**16


def _square_sum(tensors: Iterable[Tensor]) -> Fraction:
    """The exact sum of the squares of finite elements: 53-bit significands in three parts of 18 bits, by exponent.

    A sum of 2^16 products of two parts is below 2^53: float64, which bincount adds in, holds it.
    """
    total = Fraction(0)
    for values in (tensor.detach().double().reshape(-1).numpy() for tensor in tensors):
        for start in range(0, len(values), _CHUNK):
            total += _chunk_sum(values[start : start + _CHUNK])
    return total


def _chunk_sum(values: np.ndarray) -> Fraction:
    significands, exponents = np.frexp(np.abs(values))
    whole = (significands * 2.0**53).astype(np.int64)
    parts = [(whole >> shift) % 2**18 for shift in (0, 18, 36)]
    lowest = int(exponents.min())
    total = Fraction(0)
    for one, left in enumerate(parts):
        for other, right in enumerate(parts):
            sums = np.bincount(exponents - lowest, weights=(left * right).astype(np.float64))
            for place in np.flatnonzero(sums):
                scale = 2 * (int(place) + lowest - 53) + 18 * (one + other)
                total += int(sums[place]) * Fraction(2) ** scale
    return total


def root(value: Fraction) -> float:
    """The root of a fraction to about 80 bits, rounded to float64."""
    if value == 0:
        return 0.0
    shift = max(0, 90 - (value.numerator.bit_length() - value.denominator.bit_length()) // 2)
    whole = math.isqrt(value.numerator * 4**shift // value.denominator)
    return float(Fraction(whole, 2**shift))


def norm(tensors: list[Tensor]) -> float:
    """The length of all tensors together."""
    everything = [tensor.detach().double().reshape(-1) for tensor in tensors]
    if any(bool(each.isnan().any()) for each in everything):
        return math.nan
    if any(bool(each.isinf().any()) for each in everything):
        return math.inf
    return root(_square_sum(everything))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The norm of the gradients that are there."""
    return norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def update_ratio(before: Tensor, after: Tensor) -> float:
    """The ratio of two norms; the difference is taken of float64, as the contract says."""
    moved, size = norm([after.double() - before.double()]), norm([before])
    if size == 0:
        return math.inf if moved > 0 else moved
    return moved / size


class Taps:
    """By replacing the modules' forward methods for a while, which no hook does."""

    def __init__(self, model: nn.Module, names: Iterable[str], measure=torch.clone) -> None:
        self.modules = {name: model.get_submodule(name) for name in names}
        self.measure, self.watching = measure, False
        self.activations = {name: [] for name in self.modules}
        self.gradients = {name: [] for name in self.modules}

    def __enter__(self) -> Taps:
        for name, module in self.modules.items():
            module.forward = self._watched(name, module.forward)
        self.watching = True
        return self

    def __exit__(self, *error: object) -> None:
        for module in self.modules.values():
            del module.forward
        self.watching = False

    def _watched(self, name: str, forward):
        def watched(*args: object, **kwargs: object) -> Tensor:
            output = forward(*args, **kwargs)
            self.activations[name].append(self.measure(output.detach()))
            place = len(self.gradients[name])
            self.gradients[name].append(None)
            if output.requires_grad:
                output.register_hook(lambda gradient: self._keep(name, place, gradient))
            return output

        return watched

    def _keep(self, name: str, place: int, gradient: Tensor) -> None:
        if self.watching:
            self.gradients[name][place] = self.measure(gradient.detach())


def row_lengths(x: Tensor) -> Tensor:
    """The lengths, through numpy and float64, with a gradient of their own."""
    return _RowLengths.apply(x)


class _RowLengths(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.detach().double().numpy()
        return torch.from_numpy(np.asarray(np.sqrt(np.square(wide).sum(-1)), dtype=np.float32))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient_of_lengths(x, gradient)


def gradient_of_lengths(x: Tensor, gradient: Tensor) -> Tensor:
    """x / length times the gradient of the lengths; 0 where the length is 0."""
    wide = x.detach().double().numpy()
    length = np.sqrt(np.square(wide).sum(-1, keepdims=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        unit = np.where(length > 0, wide / length, 0.0)
    return torch.from_numpy((unit * gradient.double().numpy()[..., None]).astype(np.float32))


def tapped(x: Tensor, up: Tensor, down: Tensor, calls: int = 1, how: str = "train") -> tuple[Tensor, ...]:
    """What the scenario of that name returns: forward and backward by hand, in whole numbers.

    x, up, down: whole numbers, small enough that float32 holds every result.
    """
    inputs, first, second = (part.numpy().astype(np.int64) for part in (x, up, down))
    hidden = [inputs * (call + 1) @ first.T for call in range(calls)]
    outputs = [np.maximum(each, 0) @ second.T for each in hidden]
    backs = [each @ second * (pre > 0) for each, pre in zip(outputs, hidden, strict=True)]
    one = (lambda part: np.abs(part).max().reshape(1)) if how == "largest" else np.ravel
    activations = np.concatenate([one(part) for part in (*hidden, *outputs)])
    gradients = np.concatenate([one(part) for part in (*backs, *outputs)])
    loss = sum(int((each**2).sum()) for each in outputs) / 2
    of_up = sum(back.T @ (inputs * (call + 1)) for call, back in enumerate(backs))
    of_down = sum(out.T @ np.maximum(pre, 0) for out, pre in zip(outputs, hidden, strict=True))
    run = np.concatenate([[loss], of_up.ravel(), of_down.ravel()])
    if how in ("no_grad", "later"):
        gradients = np.full(len(gradients), np.nan)
    if how == "no_grad":
        run = np.concatenate([[loss], np.full(len(run) - 1, np.nan)])
    counts = torch.tensor([calls] * 8 + [0, int(how == "error")])
    flat = (torch.from_numpy(part.astype(np.float32)) for part in (activations, gradients))
    return *flat, counts, torch.from_numpy(run.astype(np.float32))
