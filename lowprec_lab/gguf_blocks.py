"""Chapter 12: the blocks of llama.cpp: rows of a weight in pieces, each a few bytes with a scale of its own.

A **block** is a piece of a row, of 32 numbers (here: Q8_0, Q4_0, Q4_1, Q5_0) or 256 (Q4_K, Q6_K), and the bytes that
stand for it. A row of n numbers becomes n / 32 blocks, one after the other. A quantized tensor is uint8, with the bytes
of all blocks of a row as its last dimension: just as they lie in a file.

What holds for every function of blocks of 32:
- `d` is the step between two codes. It is worked out in float32, and stored as float16, low byte first. A d above the
  range of float16 is stored as infinity, and a d below it as 0.
- Codes are worked out with the reciprocal id = 1 / d of d as it was *before* it became a float16.
- Where d or 1 / d is not a finite number (a block of zeros, or nearly; NaN, infinity), all codes are those of 0.
- A NaN anywhere makes d NaN. Any NaN of float16 will do.

References: ggml-org/ggml, src/ggml-common.h (the layouts) and src/ggml-quants.c (the rules); gguf-py, gguf/quants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lowprec_lab import c_code
from lowprec_lab.blanks import blank

BLOCK = 32  # numbers in a block of Q8_0, Q4_0, Q4_1 and Q5_0


@dataclass(frozen=True)
class Layout:
    """What the bytes of a block are. name: "q4_0". size: numbers in a block. bytes: bytes in a block."""

    name: str
    size: int
    bytes: int

    @property
    def bits(self) -> float:
        """Bits for each number, scales included."""
        return 8 * self.bytes / self.size


# By name: every layout of this chapter. What lies where in a block, see the exercises.
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("q8_0", BLOCK, 34),  # float16 d, 32 signed bytes
        Layout("q4_0", BLOCK, 18),  # float16 d, 16 bytes of two nibbles
        Layout("q4_1", BLOCK, 20),  # float16 d, float16 m, 16 bytes of two nibbles
        Layout("q5_0", BLOCK, 22),  # float16 d, 4 bytes of fifth bits, 16 bytes of two nibbles
    )
}


def as_blocks(x: Tensor, size: int = BLOCK) -> Tensor:
    """The rows of x cut into blocks: (..., n) becomes (..., n / size, size).

    Raises ValueError where n is no multiple of size: then the tensor needs another type.
    """
    n = x.shape[-1] if x.dim() else 1
    if not x.dim() or n % size:
        raise ValueError(
            f"rows of {n} numbers cannot be cut into blocks of {size}. Fall back to another type for this tensor: "
            "one with smaller blocks, or float16"
        )
    return x.contiguous().reshape(*x.shape[:-1], n // size, size)


# --- the exercises: blocks of 32 --------------------------------------------------------------------------------------


@blank(exercise="12.1", points=3, minutes=30)
def quantize_q8_0(x: Tensor) -> Tensor:
    """The bytes of x in Q8_0: for each block of 32 numbers d as float16, then 32 signed bytes.

    x: (..., n) float32, n a multiple of 32 (else ValueError, as `as_blocks`). Returns: uint8, (..., n / 32 * 34).
    d = amax / 127; code = x * id, rounded to the nearest whole number; half-way goes away from zero.
    """


@blank(exercise="12.2", points=3, minutes=35)
def dequantize_blocks(blocks: Tensor, layout: str) -> Tensor:
    """The numbers that bytes stand for: float32.

    blocks: uint8, (..., k * LAYOUTS[layout].bytes), k at least 1. Returns: (..., k * 32).
    layout: "q8_0": code * d. "q4_0": (code - 8) * d. "q4_1": code * d + m. "q5_0": (code - 16) * d. All in float32.
    Low nibbles belong to numbers 0 to 15 of a block, high nibbles to 16 to 31; bit j of the fifth bits to number j.
    ValueError for another layout, and where the last dimension is not made of whole blocks.
    """


@blank(exercise="12.3", points=3, minutes=35)
def quantize_q4_0(x: Tensor) -> Tensor:
    """The bytes of x in Q4_0: for each block d as float16, then 16 bytes of two nibbles.

    x: as for quantize_q8_0. Returns: uint8, (..., n / 32 * 18). d = (the number of largest magnitude, with its sign)
    / -8; of several, the first. code = x * id + 8.5 without its fraction, at most 15; in float32, each step rounded.
    """


@blank(exercise="12.4", points=2, minutes=25)
def quantize_q4_1(x: Tensor) -> Tensor:
    """The bytes of x in Q4_1: for each block d and m as float16, then 16 bytes of two nibbles.

    x: as for quantize_q8_0. Returns: uint8, (..., n / 32 * 20). m = the smallest number; d = (largest - m) / 15;
    code = (x - m) * id + 0.5 without its fraction, with the m in float32.
    """


@blank(exercise="12.5", points=3, minutes=30)
def quantize_q5_0(x: Tensor) -> Tensor:
    """The bytes of x in Q5_0: for each block d as float16, 4 bytes of fifth bits, 16 bytes of two nibbles.

    x: as for quantize_q8_0. Returns: uint8, (..., n / 32 * 22). As Q4_0, with d = largest / -16, and code = x * id +
    16.5 without its fraction, at most 31. Nibbles hold the low four bits. Bit j of the four bytes, read as one number
    with its low byte first, is the fifth bit of number j.
    """


# --- the exercises: blocks of 32, in C --------------------------------------------------------------------------------


@blank(exercise="12.6", points=4, minutes=50, language="C")
def q8_0_in_c() -> str:
    """C code that quantizes to Q8_0: quantize_q8_0's bytes for every input, NaN and zeros included.

    Returns the text of the C function (and of what else it needs)

        void quantize_q8_0(const float *x, uint8_t *out, size_t blocks)

    x: blocks * 32 floats, which stay as they are. out: blocks * 34 bytes, every one of which is written. It is compiled
    with all warnings as errors, behind gguf_blocks.c, which has half_bits, BLOCK and the headers.
    """


@blank(exercise="12.7", points=3, minutes=40, language="C")
def q4_0_in_c() -> str:
    """C code that quantizes to Q4_0: quantize_q4_0's bytes for every input.

    Returns the text of the C function (and of what else it needs)

        void quantize_q4_0(const float *x, uint8_t *out, size_t blocks)

    x: blocks * 32 floats. out: blocks * 18 bytes. Otherwise as for q8_0_in_c.
    """


# --- given: running C -------------------------------------------------------------------------------------------------


def run_q8_0(function: Callable[[], str], x: Tensor) -> Tensor:
    """The bytes that the C code which `function` returns makes of x: float32, (..., n). In a process of its own."""
    return c_code.run(function(), "quantize_q8_0", x, block=BLOCK, block_bytes=LAYOUTS["q8_0"].bytes)


def run_q4_0(function: Callable[[], str], x: Tensor) -> Tensor:
    """The same for Q4_0."""
    return c_code.run(function(), "quantize_q4_0", x, block=BLOCK, block_bytes=LAYOUTS["q4_0"].bytes)


# --- the exercises: blocks of 256 (12.8 and on) -----------------------------------------------------------------------


# --- given: blocks of 256, files --------------------------------------------------------------------------------------
