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

import io
from collections.abc import Callable
from dataclasses import dataclass

import torch
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


def defined_q8_0(function: Callable[[], str], x: Tensor) -> Tensor:
    """As run_q8_0, but stopped at the first thing that C leaves undefined, where the compiler can do that."""
    return c_code.run_defined(function(), "quantize_q8_0", x, block=BLOCK, block_bytes=LAYOUTS["q8_0"].bytes)


def defined_q4_0(function: Callable[[], str], x: Tensor) -> Tensor:
    """The same for Q4_0."""
    return c_code.run_defined(function(), "quantize_q4_0", x, block=BLOCK, block_bytes=LAYOUTS["q4_0"].bytes)


# --- given for blocks of 256 and for files ----------------------------------------------------------------------------

SUPER_BLOCK = 256  # numbers in a block of Q4_K and Q6_K
ALIGNMENT = 32  # a tensor in a GGUF file begins at a multiple of this, where its metadata do not say otherwise

LAYOUTS["q4_k"] = Layout("q4_k", SUPER_BLOCK, 144)  # float16 d and dmin, 12 bytes of scales and mins, nibbles
LAYOUTS["q6_k"] = Layout("q6_k", SUPER_BLOCK, 210)  # nibbles, 64 bytes of high bits, 16 signed scales, float16 d

# The number that stands for a type in a GGUF file: of each layout, and of float32 and float16.
GGUF_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q8_0": 8, "q4_k": 12, "q6_k": 14}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor on its way into a GGUF file.

    kind: "f32", "f16" or the name of a layout. shape: as torch has it, rows first. data: uint8, the tensor's bytes in
    the order of its rows.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: Tensor


# --- the exercises: blocks of 256, and a file -------------------------------------------------------------------------


@blank(exercise="12.8", points=3, minutes=40)
def dequantize_q4_k(blocks: Tensor) -> Tensor:
    """The numbers that bytes of Q4_K stand for: d * scale * code - dmin * min, in float32.

    blocks: uint8, (..., n * 144). Returns: float32, (..., n * 256). A block is: float16 d; float16 dmin; 12 bytes with
    a scale and a min, 6 bits each, for each of its 8 groups of 32 numbers; 128 bytes with two codes each.
    Of the 12 bytes, from high bits to low ones:
        byte g, g < 4:      the two high bits of the scale of group g + 4, the scale of group g
        byte g + 4, g < 4:  the two high bits of the min of group g + 4, the min of group g
        byte g + 8, g < 4:  the four low bits of the min of group g + 4, the four low bits of its scale
    Byte i of the k-th 32 of the 128 bytes: low, the code of number i of group 2k; high, that of group 2k + 1.
    """


@blank(exercise="12.9", points=5, minutes=60)
def quantize_q4_k(x: Tensor) -> Tensor:
    """Bytes of Q4_K for x, judged by the numbers that they stand for.

    x: (..., n) float32, n a multiple of 256 (else ValueError, as `as_blocks`). Returns: uint8, (..., n / 256 * 144).
    - The root mean square error is at most 1.036 times that of a good search for the scale and the min of each group:
      on normal numbers that is 0.074 of their size. Where groups of one block differ in size, each
      group's error as a share of its own size is at most 1.05 times as large as there, on the whole.
    - No group is worse than the bound of a plain way, whose scale is (largest - smallest) / 15 (`plain_bound`).
    - A block of zeros stands for zeros. d and dmin are finite (at most 65504) where all numbers of a block are; where
      one is NaN or infinite, d is NaN.
    """


@blank(exercise="12.10", points=2, minutes=25)
def dequantize_q6_k(blocks: Tensor) -> Tensor:
    """The numbers that bytes of Q6_K stand for: d * scale * (code - 32), in float32.

    blocks: uint8, (..., n * 210). Returns: float32, (..., n * 256). A block is: 128 bytes with the low four bits of two
    codes each; 64 bytes with the high two bits of four codes each; a signed byte for each of 16 groups of 16 numbers,
    its scale; float16 d. Either half of a block, 128 numbers, has 64 of the 128 bytes, and 32 of the 64.
    Number k = 32 * j + i of a half, i < 32: its four low bits are in byte 32 * (j % 2) + i, low for j < 2, high for
    j >= 2; its two high bits are in byte i of the others, bits 2j and 2j + 1.
    """


@blank(exercise="12.11", points=4, minutes=50)
def write_gguf(file: object, metadata: dict, tensors: list[GGUFTensor]) -> None:
    """Write a GGUF file, version 3, to a binary file that is open for writing. All numbers are little-endian.

    "GGUF"; uint32 3; uint64: how many tensors; uint64: how many entries of metadata. Then
    - for each entry, in the order of the dict: key; uint32 type; value. A str is type 8: its length in bytes of UTF-8
      as uint64, and the bytes; a key is written in the same way. bool: 7, one byte. int: 4, uint32. float: 6, float32.
      list: 9; uint32 type of its elements (that of the first one: no list is empty), uint64: how many, the elements;
    - for each tensor: name, as a str; uint32: how many dimensions; a uint64 for each, the *last one first*; uint32
      type (GGUF_TYPES); uint64: where its bytes begin, counted from the beginning of the data;
    - zeros up to a multiple of the alignment; there the data begins. Each tensor's bytes, followed by zeros up to a
      multiple of the alignment, the last one too.
    The alignment is metadata["general.alignment"] where that is given, else ALIGNMENT.
    """


# --- scenarios and given functions of blocks of 256 -------------------------------------------------------------------

SAMPLES = ("normal", "long tails", "around 3", "uniform", "from 1 to 2", "groups of many sizes")


def sample(kind: str, seed: int, blocks: int = 24) -> Tensor:
    """Numbers to try a quantizer of blocks of 256 on: float32, (blocks, 256), the same for the same kind and seed.

    kind: one of SAMPLES. "groups of many sizes": each 32 of a row have a size of their own, from 1/11 to 1.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, 8, 32, generator=generator)
    share = torch.rand(blocks, 8, 32, generator=generator)
    if kind == "long tails":
        x = -x.sign() * share.clamp(min=1e-7).log() * 0.02
    elif kind == "around 3":
        x = x + 3
    elif kind in ("uniform", "from 1 to 2"):
        x = share + 1 if kind == "from 1 to 2" else 2 * share - 1
    elif kind == "groups of many sizes":
        x = x * torch.exp2(-3.5 * share[..., :1])
    elif kind != "normal":
        raise ValueError(f"there is no sample {kind!r}. The samples are: {', '.join(SAMPLES)}")
    return x.flatten(1)


def quantized(function: Callable, kind: str, seed: int) -> Tensor:
    """The bytes that a quantizer makes of a `sample`."""
    return function(sample(kind, seed))


def byte_count(kind: str, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor in a file. kind: one of GGUF_TYPES. ValueError where its blocks do not divide the rows."""
    count = 1
    for size in shape:
        count *= size
    if kind in ("f32", "f16"):
        return count * int(kind[1:]) // 8
    layout = LAYOUTS[kind]
    if shape[-1] % layout.size:
        raise ValueError(f"rows of {shape[-1]} numbers are not made of blocks of {layout.size}, which {kind} has")
    return count // layout.size * layout.bytes


def written(function: Callable, metadata: tuple, *tensors: tuple) -> Tensor:
    """The bytes of a file that was written: uint8. metadata: pairs. tensors: name, kind and shape of each.

    The bytes of the first tensor are 1, 2, 3, ... 255, 1, 2, ..., those of the next one 32, 33, ..., and so on.
    """
    file, made = io.BytesIO(), []
    for place, (name, kind, shape) in enumerate(tensors):
        content = (torch.arange(byte_count(kind, shape)) + 31 * place) % 255 + 1
        made.append(GGUFTensor(name, kind, shape, content.to(torch.uint8)))
    function(file, dict(metadata), made)
    return torch.tensor(list(file.getvalue()), dtype=torch.uint8)


def plain_bound(x: Tensor) -> Tensor:
    """The largest error that the plain way can have in each group of 32: float64, (..., n / 256, 8).

    x: as `quantize_q4_k` has it. The plain way: low = the smallest number of a group, or 0 if that is smaller; scale =
    (largest - low) / 15; min = -low; d = largest scale / 63; dmin = largest min / 63; all scales and mins to the
    nearest multiple of those, all codes to the nearest of 0 to 15. A stored scale is off by half a d at most, and a min
    by half a dmin. So inside its range a number is off by half a stored scale, and at its ends by 15 halves of d and
    half a dmin. What float16 rounds off d and dmin is added.
    """
    groups = as_blocks(x, SUPER_BLOCK).unflatten(-1, (8, 32)).double()
    low = groups.amin(-1).clamp(max=0)
    scale = (groups.amax(-1) - low) / 15  # (..., n / 256, 8)
    d, dmin = scale.amax(-1, keepdim=True) / 63, -low.amin(-1, keepdim=True) / 63
    d_off, dmin_off = ((each * 2.0**-11).clamp(min=2.0**-25) for each in (d, dmin))
    inside = (scale + d / 2) / 2
    ends = 15 * d / 2 + dmin / 2
    return torch.maximum(inside, ends) + 63 * (15 * d_off + dmin_off)
