"""The exact oracle for a served model: scales divided in float32, codes from breakpoints, products in float64.

Codes come from the rounding oracle, and every step is one numpy operation that IEEE 754 rounds correctly. No cast of
torch and no blank is used. A function has a keyword for each step that a known misconception changes.

How far off a layer's output may be. Let u = 2^-24, and T the exact value of (sum of products) * s_a * s_w + bias. A
product of two codes is exact in float32 (four bits times four). Whoever multiplies codes has K - 1 additions, two
multiplications by scales and the addition of the bias; whoever multiplies dequantized numbers has one more rounding; a
weight-only layer rounds the product instead. So no summand carries more than K + 3 factors (1 + d), |d| <= u, and with
S the sum of the magnitudes of all summands, the bias among them,

    |R - T| <= gamma S,    gamma = (K + 4) u / (1 - (K + 4) u)

(Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1). Subnormal float32 stay out of the checks.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor, nn

from lowprec_lab.formats import E4M3
from lowprec_lab.graders import float8_linear_oracle, oracle, quantizer_oracle, rounding_oracle

FP8 = torch.float8_e4m3fn
FLOOR = np.float32(1) / np.float32(448 * 512)
TOP = np.float32(448)
_U = 2.0**-24


# --- codes and scales -------------------------------------------------------------------------------------------------


def single(x: Tensor) -> np.ndarray:
    """The numbers in float32, which holds all of the short dtypes."""
    return quantizer_oracle.numbers(x).astype(np.float32)


def tensor(values: np.ndarray) -> Tensor:
    """A float32 tensor, of no dimension too."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


def codes_of(quotients: np.ndarray, saturate: bool = True) -> Tensor:
    """float8_e4m3fn of float32 numbers; what is beyond the range becomes 448, or NaN."""
    with np.errstate(all="ignore"):
        inside = np.clip(quotients, -TOP, TOP) if saturate else np.where(np.abs(quotients) >= 464, np.nan, quotients)
    codes = rounding_oracle.encode(tensor(inside), E4M3, "nearest_even")
    return codes.to(torch.uint8).view(FP8)


def values_of(codes: Tensor) -> np.ndarray:
    """What float8_e4m3fn codes stand for, in float64."""
    return oracle.decode(codes.contiguous().view(torch.uint8).to(torch.int32), E4M3).numpy()


def scale_of(amax: np.ndarray, floor: np.float32 = FLOOR) -> np.ndarray:
    """amax / 448, not below the floor; NaN stays NaN."""
    with np.errstate(all="ignore"):
        return np.maximum(np.asarray(amax, dtype=np.float32) / TOP, floor)


def divided(x: Tensor, scale: np.ndarray, by: str = "division", saturate: bool = True) -> Tensor:
    """Codes of x / scale. by: "division", "reciprocal", or "product" (x * scale)."""
    with np.errstate(all="ignore"):
        if by == "division":
            quotients = single(x) / scale
        else:
            quotients = single(x) * (np.float32(1) / scale if by == "reciprocal" else scale)
    return codes_of(quotients.astype(np.float32), saturate)


def by_row(
    x: Tensor, upper_bound: float | None = None, size=np.abs, axis=-1, floor=FLOOR, by: str = "division",
    saturate: bool = True, change=lambda scale: scale,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes and scales of rows. size: of an element. axis: that one maximum is taken over. change: of the scale."""
    with np.errstate(all="ignore"):
        amax = np.max(size(single(x)), axis=axis, keepdims=True)
        if upper_bound is not None:
            amax = np.minimum(amax, np.float32(upper_bound))
        scale = change(scale_of(amax, floor))
    shape = (*x.shape[:-1], 1)
    if axis == -1:
        scale = scale.reshape(shape)
    return divided(x, scale, by, saturate), tensor(np.broadcast_to(scale, shape) if axis is None else scale)


def quantize_weight_per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    return by_row(weight)


def quantize_activation_per_token(x: Tensor, upper_bound: float | None = None) -> tuple[Tensor, Tensor]:
    return by_row(x, upper_bound)


def quantize_per_tensor(
    x: Tensor, scale: Tensor | None = None, by: str = "reciprocal", saturate: bool = True, floor=FLOOR
) -> tuple[Tensor, Tensor]:
    with np.errstate(all="ignore"):
        found = scale_of(np.max(np.abs(single(x))), floor) if scale is None else scale.numpy()
    return divided(x, found, by, saturate), tensor(found)


def sizes_of(batches: list[Tensor]) -> np.ndarray:
    """All magnitudes, float32. ValueError where there are none."""
    sizes = np.concatenate([np.zeros(0, np.float32), *(np.abs(single(batch)).reshape(-1) for batch in batches)])
    if not sizes.size:
        raise ValueError("no numbers")
    return sizes


def rank_of(fraction: float, count: int) -> int:
    """The place of a magnitude among `count`, from 0."""
    return math.ceil(fraction * count) - 1


def calibrate_static(batches: list[Tensor], fraction: float = 1.0) -> Tensor:
    sizes = np.sort(sizes_of(batches))  # NaN comes last
    return tensor(scale_of(sizes[-1] if np.isnan(sizes[-1]) else sizes[rank_of(fraction, len(sizes))]))


# --- a layer ----------------------------------------------------------------------------------------------------------


class Float8InferenceLinear(nn.Module):
    """With a method for each step, so that a known misconception can change one of them."""

    def __init__(self, codes, weight_scale, bias=None, input_scale=None, activations="token") -> None:
        if activations not in ("token", "tensor", "none"):
            raise ValueError(f"not {activations!r}: there are token, tensor and none")
        super().__init__()
        self.activations = activations
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)
        self.register_buffer("input_scale", input_scale)

    def operand(self, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """(rows of numbers that are multiplied, their scale), float64."""
        if self.activations == "none":
            return quantizer_oracle.numbers(x), np.ones(1)
        if self.activations == "token":
            codes, scale = by_row(x)
        else:
            codes, scale = quantize_per_tensor(x, None if self.input_scale is None else self.input_scale.reshape(()))
        return values_of(codes), scale.double().numpy()

    def weight_values(self) -> np.ndarray:
        return values_of(self.weight)

    def scales(self, own: np.ndarray) -> np.ndarray:
        """What a sum of products is multiplied with, given the input's scale."""
        return own * self.weight_scale.double().numpy().reshape(-1)

    def offset(self) -> np.ndarray:
        return np.zeros(1) if self.bias is None else quantizer_oracle.numbers(self.bias)

    def exact(self, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """(the exact output, how far from it a right one may be), of rows."""
        rows = float8_linear_oracle.rows_of(x)
        values, own = self.operand(rows)
        weight, factors = self.weight_values(), (rows.shape[1] + 4) * _U
        with np.errstate(all="ignore"):
            scales = self.scales(own)
            exact = values @ weight.T * scales + self.offset()
            return exact, factors / (1 - factors) * (
                np.abs(values) @ np.abs(weight).T * np.abs(scales) + np.abs(self.offset())
            )

    def forward(self, x: Tensor) -> Tensor:
        return float8_linear_oracle.rounded(self.exact(x)[0], x.dtype).reshape(*x.shape[:-1], len(self.weight))


# --- perplexity -------------------------------------------------------------------------------------------------------


def losses(model: nn.Module, batches, training: bool = False) -> list[tuple[float, int]]:
    """(mean loss, tokens) of each batch."""
    mode = model.training
    model.train(training)
    with torch.no_grad():
        found = [(float(model(x, y)[1]), y.numel()) for x, y in batches]
    model.train(mode)
    return found


def perplexity(model: nn.Module, batches) -> float:
    found = losses(model, batches)
    return math.exp(math.fsum(loss * tokens for loss, tokens in found) / sum(tokens for _, tokens in found))


# --- a cache ----------------------------------------------------------------------------------------------------------


class Float8KVCache:
    """With a method for each step."""

    def __init__(self, batch, heads, context, dim, k_scale=-1.0, v_scale=-1.0) -> None:
        self.k_scale, self.v_scale = self.settle(k_scale, v_scale)
        self.k, self.v = (self.memory(batch, heads, context, dim) for _ in range(2))
        self.length = 0

    def memory(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8).view(FP8)

    def settle(self, k_scale: float, v_scale: float) -> tuple[float, float]:
        if math.isnan(k_scale) or math.isnan(v_scale) or not k_scale or not v_scale:
            raise ValueError(f"no scales: {k_scale}, {v_scale}")
        there = [each for each in (k_scale, v_scale) if each > 0]
        if not there:
            self.warn()
        first = [*there, 1.0][0]
        return (k_scale if k_scale > 0 else first), (v_scale if v_scale > 0 else first)

    def warn(self) -> None:
        warnings.warn("1.0 is used", stacklevel=3)

    def codes(self, piece: Tensor, scale: float) -> Tensor:
        return divided(piece, np.float32(scale))

    def place(self, count: int) -> int:
        """Where `count` tokens go."""
        if self.length + count > self.k.shape[2]:
            raise ValueError("full")
        return self.length

    def append(self, k: Tensor, v: Tensor) -> None:
        start = self.place(k.shape[2])
        for memory, piece, scale in ((self.k, k, self.k_scale), (self.v, v, self.v_scale)):
            memory[:, :, start : start + k.shape[2]] = self.codes(piece, scale)
        self.length = start + k.shape[2]

    def shown(self) -> int:
        """How many tokens are read."""
        return self.length

    def values(self, memory: Tensor, scale: float) -> Tensor:
        return tensor(values_of(memory).astype(np.float32) * np.float32(scale))

    def read(self) -> tuple[Tensor, Tensor]:
        kept = self.shown()
        return self.values(self.k[:, :, :kept], self.k_scale), self.values(self.v[:, :, :kept], self.v_scale)


# --- before the rounding ----------------------------------------------------------------------------------------------


def wide_factors(amax: np.ndarray, weight: np.ndarray, alpha: float) -> np.ndarray:
    """The factors in float64; amax, weight: magnitudes of each input channel."""
    with np.errstate(all="ignore"):
        factors = np.power(amax, alpha) / np.power(weight, 1 - alpha)
    return np.where((amax == 0) | (weight == 0), 1.0, factors)


def smooth(activation_amax: Tensor, weight: Tensor, alpha: float = 0.5) -> tuple[Tensor, Tensor]:
    sizes = np.max(np.abs(quantizer_oracle.numbers(weight)), axis=0)
    return smoothed(weight, wide_factors(quantizer_oracle.numbers(activation_amax), sizes, alpha))


def smoothed(weight: Tensor, factors: np.ndarray) -> tuple[Tensor, Tensor]:
    """Factors in float32, and the weight times them."""
    single_ = factors.astype(np.float32)
    return tensor(single_), tensor(single(weight) * single_)


def settled_factors(got: object, want: np.ndarray) -> np.ndarray:
    """The float32 factors that count as right: those of `got` that another float64 power may have rounded to."""
    right = want.astype(np.float32)
    if not isinstance(got, Tensor) or got.shape != right.shape or got.dtype != torch.float32:
        return right
    mine = got.detach().numpy()
    with np.errstate(all="ignore"):
        near = (mine == (want * (1 - 1e-12)).astype(np.float32)) | (mine == (want * (1 + 1e-12)).astype(np.float32))
    return np.where(near, mine, right)


def hessian(x: Tensor, damping: float) -> np.ndarray:
    """x^T x, with damping on its diagonal."""
    wide = quantizer_oracle.numbers(x)
    H = wide.T @ wide
    return H + damping * np.mean(np.diag(H)) * np.eye(len(H))


def push(inverse: np.ndarray, j: int) -> np.ndarray:
    """How much of the error of column j each column gets, given the inverse of H over columns j and after."""
    return -inverse[1:, 0] / inverse[0, 0]


def compensate(
    weight: Tensor, x: Tensor, damping: float = 0.01, spread=push, H: np.ndarray | None = None, own_error: bool = False,
    scale_again: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """By the inverse of H over the columns that are left, and not by solving. H: another one.

    own_error: the error is that of the column as it was in the beginning. scale_again: scales follow the columns.
    """
    first, w = quantizer_oracle.numbers(weight), quantizer_oracle.numbers(weight).copy()
    H = hessian(x, damping) if H is None else H
    scale = by_row(weight)[1].double().numpy()
    codes = []
    for j in range(w.shape[1]):
        if scale_again:
            scale = scale_of(np.max(np.abs(w), axis=1, keepdims=True).astype(np.float32)).astype(np.float64)
        codes.append(codes_of((w[:, j] / scale[:, 0]).astype(np.float32)))
        error = (first if own_error else w)[:, j] - values_of(codes[-1]) * scale[:, 0]
        if j + 1 < w.shape[1] and H.any():
            w[:, j + 1 :] += error[:, None] * spread(np.linalg.inv(H[j:, j:]), j)
    found = torch.stack([each.view(torch.uint8) for each in codes], 1)
    return found.view(FP8), tensor(by_row(weight)[1].numpy())
