"""The exact oracle for the quantizer: groups as index lists, scales divided in float64, codes looked up.

Codes come from the breakpoints of the rounding oracle and values from its tables; numpy does the rest, one operation
that IEEE 754 rounds correctly after the other. No cast of torch, no blank and no float8 dtype is used. Tests compare it
with fractions and with torchao.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import BF16, FP16, Format
from lowprec_lab.graders import oracle, rounding_oracle
from lowprec_lab.quantizer import Quantized, require_granularity

EPS = 1e-12
LARGEST = float(np.finfo(np.float32).max)
_SHORT = {torch.bfloat16: BF16, torch.float16: FP16}


def numbers(x: Tensor) -> np.ndarray:
    """The elements in float64, exactly."""
    return x.detach().double().numpy()


def as_dtype(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Float values rounded to the dtype once, from float32."""
    with np.errstate(over="ignore"):
        single = torch.from_numpy(np.asarray(values, dtype=np.float32))
    if dtype == torch.float32:
        return single
    codes = rounding_oracle.encode(single, _SHORT[dtype], "nearest_even", "to_special")
    return codes.to(torch.int16).view(dtype)


def blocks(granularity, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a group, for the last two dimensions of a tensor of at least two."""
    height, width = shape[-2:]
    named = {"row": (1, max(width, 1)), "column": (max(height, 1), 1)}
    return named[granularity] if isinstance(granularity, str) else tuple(granularity)


def scale_shape(granularity, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one number for each group."""
    if granularity == "tensor":
        return ()
    if granularity == "row":
        return (*shape[:-1], 1)
    if granularity == "column":
        return (*shape[:-2], 1, shape[-1])
    return (*shape[:-2], *(math.ceil(size / part) for size, part in zip(shape[-2:], granularity, strict=True)))


def groups(sizes: np.ndarray, granularity, reduce=np.maximum) -> np.ndarray:
    """One number for each group: `reduce` over its elements, 0 where it has none."""
    shape = scale_shape(granularity, sizes.shape)
    if not sizes.size:
        return np.zeros(shape)
    if granularity == "tensor":
        return reduce.reduce(sizes.reshape(-1))
    two = sizes.reshape((1,) * (2 - sizes.ndim) + sizes.shape)
    rows, columns = blocks(granularity, two.shape)
    down = reduce.reduceat(two, np.arange(0, two.shape[-2], rows), axis=-2)
    return reduce.reduceat(down, np.arange(0, two.shape[-1], columns), axis=-1).reshape(shape)


def absmax(x: Tensor, granularity="tensor") -> Tensor:
    """The largest magnitudes; every one of them is an element, so no rounding is needed."""
    require_granularity(granularity, x.dim())
    with np.errstate(invalid="ignore"):
        return as_dtype(groups(np.abs(numbers(x)), granularity), x.dtype)


def quotient(amax: Tensor, top: float, eps: float) -> np.ndarray:
    """top / max(amax, eps) in float64."""
    with np.errstate(all="ignore"):
        return np.float64(top) / np.maximum(numbers(amax), eps)


def single(values: np.ndarray, limit: float = LARGEST) -> np.ndarray:
    """float64 to float32, rounded once; at most `limit`."""
    with np.errstate(over="ignore"):
        return np.minimum(np.asarray(values, dtype=np.float32), np.float32(limit))


def floor_power(scale: np.ndarray) -> np.ndarray:
    """The largest power of two that is not above each positive number."""
    mantissa, exponent = np.frexp(scale)
    usual = np.isfinite(scale) & (scale > 0)
    return np.where(usual, np.ldexp(np.float32(1), np.where(usual, exponent - 1, 0)), scale).astype(np.float32)


def tensor(values: np.ndarray) -> Tensor:
    """A float32 tensor, of no dimension too."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


def scale_for(amax: Tensor, fmt: Format, eps: float = EPS, power_of_two: bool = False) -> Tensor:
    """The scale of each largest magnitude."""
    scale = single(quotient(amax, oracle.max_finite(fmt), eps))
    return tensor(floor_power(scale) if power_of_two else scale)


def spread(scale: np.ndarray, granularity, shape: tuple[int, ...]) -> np.ndarray:
    """The scale of each element, by the number of its group."""
    if isinstance(granularity, str):
        return np.broadcast_to(scale, shape)
    place = [np.arange(size) // part for size, part in zip(shape[-2:], granularity, strict=True)]
    return scale[..., place[0], :][..., place[1]]


def scaled(x: Tensor, scale: Tensor, granularity) -> Tensor:
    """x * scale in float32."""
    with np.errstate(all="ignore"):
        return tensor(numbers(x).astype(np.float32) * spread(scale.numpy(), granularity, tuple(x.shape)))


def codes_of(values: Tensor, fmt: Format, mode: str = "nearest_even") -> Tensor:
    """uint8 codes of float32 values, saturated."""
    return rounding_oracle.encode(values, fmt, mode).to(torch.uint8)


def raw(x: Tensor) -> tuple[bytes, tuple[int, ...], torch.dtype]:
    """A tensor as something that a cache can look up: its bytes, shape and dtype."""
    whole = {4: torch.int32, 2: torch.int16}[x.element_size()]
    return x.detach().contiguous().view(whole).numpy().tobytes(), tuple(x.shape), x.dtype


def from_raw(content: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor again."""
    return (
        torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape) if content else torch.zeros(shape, dtype=dtype)
    )


def quantize(x: Tensor, fmt: Format, granularity="tensor", power_of_two: bool = False) -> Quantized:
    """Codes and scales. They are kept: a verdict compares many wrong answers on the same inputs."""
    return _quantize(*raw(x), fmt, granularity, power_of_two)


@lru_cache(maxsize=1024)
def _quantize(content, shape, dtype, fmt: Format, granularity, power_of_two: bool) -> Quantized:
    x = from_raw(content, shape, dtype)
    if fmt.width > 8:
        raise ValueError(f"{fmt.name} does not fit into 8 bits")
    scale = scale_for(absmax(x, granularity), fmt, EPS, power_of_two)
    return Quantized(codes_of(scaled(x, scale, granularity), fmt), scale, fmt, granularity, x.dtype)


def values(q: Quantized) -> np.ndarray:
    """What the codes mean, in float64."""
    return oracle.decode(q.codes.to(torch.int32), q.fmt).numpy()


def dequantize(q: Quantized) -> Tensor:
    """The quotients, rounded to float32 and then to the dtype."""
    with np.errstate(all="ignore"):
        quotients = values(q).astype(np.float32) / spread(q.scale.numpy(), q.granularity, tuple(q.codes.shape))
    return as_dtype(quotients, q.dtype)


class _WithGradient(torch.autograd.Function):
    """A value that is given, and a gradient that a function makes of the one that comes."""

    @staticmethod
    def forward(ctx, x, value, change):
        ctx.change = change
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None, None


def with_gradient(x: Tensor, value: Tensor, change=lambda gradient: gradient) -> Tensor:
    """`value`, through which a gradient reaches x as `change(gradient)`."""
    return _WithGradient.apply(x, value, change)


def straight_through(x: Tensor, fmt: Format) -> Tensor:
    """The values, and the gradient as it is."""
    return with_gradient(x, dequantize(quantize(x, fmt)))


def power(x: np.ndarray) -> float:
    """The sum of squares."""
    with np.errstate(all="ignore"):
        return float(np.square(x).sum())


def decibel(signal: float, noise: float, factor: float = 10.0, logarithm=math.log10) -> float:
    """factor * log10(signal / noise), with its limits."""
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return -math.inf if ratio == 0 else factor * logarithm(ratio)


def sqnr_db(x: Tensor, y: Tensor) -> float:
    """Signal to noise. An infinity in either is infinite noise, or no number where both have the same."""
    with np.errstate(all="ignore"):
        return decibel(power(numbers(x)), power(numbers(x) - numbers(y)))


def int8_scale(lo: float, hi: float, symmetric: bool) -> np.float32:
    """The step of int8 between the smallest number and the largest."""
    step = np.float32(max(-lo, hi) / 127 if symmetric else (hi - lo) / 255)
    return max(step, np.float32(EPS))


def ends(x: Tensor) -> tuple[float, float]:
    """The smallest number or 0, and the largest or 0. ValueError where one of them is not finite."""
    if not np.isfinite(numbers(x)).all():
        raise ValueError("int8 has no code for NaN and infinity")
    return float(np.min(numbers(x), initial=0.0)), float(np.max(numbers(x), initial=0.0))


def int8_codes(steps: np.ndarray, zero_point: np.ndarray, lowest: int) -> Tensor:
    """Steps from zero, moved and clamped."""
    return torch.from_numpy(np.asarray(np.clip(steps + zero_point, lowest, 127), dtype=np.int8))


def quantize_int8(x: Tensor, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero point."""
    lo, hi = ends(x)
    scale = int8_scale(lo, hi, symmetric)
    zero_point = np.float32(0) if symmetric else np.rint(np.float32(-128) - np.float32(lo) / scale)
    steps = np.rint(numbers(x).astype(np.float32) / scale)
    return (
        int8_codes(steps, zero_point, -127 if symmetric else -128),
        tensor(scale),
        torch.tensor(int(zero_point), dtype=torch.int32),
    )


FRACTIONS = tuple(k / 16 for k in range(16, 3, -1))


def clipped_errors(x: Tensor, fmt: Format, fractions: tuple[float, ...]) -> tuple[list[np.float32], list[np.ndarray]]:
    """(clips, differences of each): the largest clip first. Kept, as above."""
    return _clipped_errors(*raw(x), fmt, fractions)


@lru_cache(maxsize=512)
def _clipped_errors(content, shape, dtype, fmt: Format, fractions: tuple[float, ...]):
    x32 = tensor(numbers(from_raw(content, shape, dtype)))
    amax = np.float32(groups(np.abs(numbers(x32)), "tensor"))
    clips = [np.float32(amax * np.float32(fraction)) for fraction in sorted(fractions, reverse=True)]
    return clips, [numbers(x32) - numbers(clipped(x32, fmt, clip)) for clip in clips]


def clipped(x: Tensor, fmt: Format, clip: np.float32) -> Tensor:
    """float32 x, there and back with the scale of a clip."""
    scale = scale_for(tensor(clip), fmt)
    rounded = rounding_oracle.round_to(scaled(x, scale, "tensor"), fmt)
    with np.errstate(all="ignore"):
        return tensor(rounded.numpy() / scale.numpy())


def best_clip(x: Tensor, fmt: Format, fractions: tuple[float, ...] = FRACTIONS) -> Tensor:
    """The clip with the least error."""
    with np.errstate(invalid="ignore"):
        amax = np.float32(groups(np.abs(numbers(x)), "tensor"))
    if not 0 < amax < math.inf:
        return tensor(amax)
    clips, differences = clipped_errors(x, fmt, fractions)
    return tensor(clips[int(np.argmin([power(each) for each in differences]))])
