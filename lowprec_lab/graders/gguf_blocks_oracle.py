"""The exact oracle for blocks of 32: one numpy operation in float32 for each step, float16 from breakpoints.

numpy's float32 operations are those of IEEE 754, each rounded correctly. Neither gguf nor torch's casts nor a blank is
used: half precision comes from the rounding oracle, and bytes are put together by arithmetic on whole numbers. A
function has a keyword for each step that a known misconception changes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import FP16
from lowprec_lab.graders import oracle, rounding_oracle

ONE = np.float32(1)


def in_blocks(x: Tensor, size: int = 32) -> np.ndarray:
    """(blocks, size) float32. ValueError where rows cannot be cut."""
    if not x.dim() or x.shape[-1] % size:
        raise ValueError(f"{tuple(x.shape)} is not made of blocks of {size}")
    return x.numpy().astype(np.float32).reshape(-1, size)


def to_rows(blocks: np.ndarray, x: Tensor, size: int = 32) -> Tensor:
    """The bytes of blocks, uint8, in the leading dimensions of x."""
    rows = blocks.astype(np.uint8).reshape(*x.shape[:-1], x.shape[-1] // size * blocks.shape[1])
    return torch.from_numpy(np.ascontiguousarray(rows))


def half(values: np.ndarray) -> np.ndarray:
    """The codes of float16, nearest even, infinity where it overflows: whole numbers."""
    codes = rounding_oracle.encode(torch.from_numpy(values), FP16, "nearest_even", "to_special")
    return codes.numpy().astype(np.int64)


def half_bytes(values: np.ndarray) -> np.ndarray:
    """Two bytes for each of the (blocks, 1) values, low byte first."""
    codes = half(values)
    return np.concatenate([codes % 256, codes // 256], axis=1)


def half_values(codes: np.ndarray) -> np.ndarray:
    """What codes of float16 stand for, in float32, which holds them all."""
    return oracle.decode(torch.from_numpy(codes.astype(np.int32)), FP16).numpy().astype(np.float32)


def reciprocal(d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(1 / d, whether codes are worked out at all: d and 1 / d are finite)."""
    with np.errstate(all="ignore"):
        inverse = ONE / d
    return inverse, np.isfinite(d) & np.isfinite(inverse)


def away(values: np.ndarray) -> np.ndarray:
    """The nearest whole number; half-way goes away from zero. Exact in float64."""
    wide = values.astype(np.float64)
    return np.sign(wide) * np.floor(np.abs(wide) + 0.5)


# --- Q8_0 -------------------------------------------------------------------------------------------------------------


def quantize_q8_0(
    x: Tensor, amax: Callable = lambda b: np.abs(b).max(axis=1, keepdims=True), rounded: Callable = away,
    step: Callable = lambda d: d, order: int = 1, settle: bool = True, top: int = 127,
) -> Tensor:  # fmt: skip
    """amax: of blocks. rounded: to whole numbers. step: the d whose reciprocal is taken. order: of d's bytes.

    settle: whether blocks without a finite 1 / d have codes of 0.
    """
    blocks = in_blocks(x)
    with np.errstate(all="ignore"):
        d = (amax(blocks) / np.float32(top)).astype(np.float32)
        inverse, usable = reciprocal(step(d))
        codes = rounded(blocks * inverse)
        codes = np.where(usable, codes, 0) if settle else np.nan_to_num(codes, nan=0, posinf=0, neginf=0)
    return to_rows(np.concatenate([half_bytes(d)[:, ::order], codes.astype(np.int64) % 256], axis=1), x)


# --- 256: see below ---------------------------------------------------------------------------------------------------
