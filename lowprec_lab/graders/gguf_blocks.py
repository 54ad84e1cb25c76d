"""Checks and known misconceptions of chapter 12.

Bytes are compared one by one. Where a block's d is NaN, any NaN of float16 counts as right.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.graders import gguf_blocks_oracle as exact
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for

for _function in (exact.quantize_q8_0,):
    oracle_for(_function.__name__, _function)


# --- inputs -----------------------------------------------------------------------------------------------------------


def drawn(rng: np.random.Generator, *shape: int, low: int = -9, high: int = 10) -> Tensor:
    """Normal numbers; each row of a size of its own, from 2^low to 2^high."""
    sizes = np.ldexp(1.0, rng.integers(low, high, (*shape[:-1], 1)))
    return torch.from_numpy((rng.normal(size=shape) * sizes).astype(np.float32))


# --- 12.1 quantize_q8_0 -----------------------------------------------------------------------------------------------


@check_for("quantize_q8_0", weight=2)
def rows_of_every_shape(answer, case):
    """One to three dimensions, transposed; rows of 32, 64 and 96 numbers of very different sizes."""
    for shape in ((32,), (3, 64), (2, 3, 96), (1, 32)):
        for _ in range(case.count(1)):
            x = drawn(case.rng, *shape)
            case.same_bits(answer(x), exact.quantize_q8_0(x))
    x = drawn(case.rng, 32, 3).t()
    case.same_bits(answer(x), exact.quantize_q8_0(x))


@misconception("quantize_q8_0", "It takes the largest number of a block, not the largest magnitude.")
def signed_largest(x):
    return exact.quantize_q8_0(x, amax=lambda b: b.max(axis=1, keepdims=True))


# --- reading questions ------------------------------------------------------------------------------------------------


# --- blocks of 256 (12.8 and on) --------------------------------------------------------------------------------------

from lowprec_lab.graders import gguf_kquants  # noqa: E402, F401
