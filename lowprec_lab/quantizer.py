"""Chapter 07: the quantizer: input, scale, codes of 8 bits, and back.

A tensor is cut into *groups*; each group has one *scale*, a float32 by which its numbers are multiplied before they are
rounded. The **granularity** says what a group is:

- "tensor": all of it;
- "row": a row, the numbers along the last dimension;
- "column": a column, the numbers along the dimension before that;
- (r, c): a block of r rows and c columns of the last two dimensions. Where they do not divide, the last ones are
  smaller.

"row" needs a tensor of one dimension at least, "column" and blocks need two; ValueError otherwise, and for any other
granularity.

References: torchao/float8/float8_utils.py and float8_training_tensor.py (the rule of its casts, which this is to the
last bit); Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433; DeepSeek-V3, arXiv:2412.19437, section
3.3 (blocks); Jacob et al., arXiv:1712.05877 (zero points); Bengio et al., arXiv:1308.3432 (straight-through).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_lab import blanks, fused
from lowprec_lab.blanks import blank
from lowprec_lab.formats import E4M3, E5M2, Format

Granularity = str | tuple[int, int]


@dataclass(frozen=True)
class Quantized:
    """A tensor in 8 bits: the value of an element is decode(code) / scale.

    codes: uint8, the shape of the tensor: codes of `fmt`, as in chapter 01. scale: float32, of the shape that `absmax`
    gives for the granularity. dtype: that of the tensor before, and what `dequantize` comes back to.
    ValueError for a format of more than 8 bits.
    """

    codes: Tensor
    scale: Tensor
    fmt: Format
    granularity: Granularity
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.fmt.width > 8:
            raise ValueError(f"{self.fmt.name} has {self.fmt.width} bits, and codes here have 8")


@blank(exercise="7.1", points=3, minutes=30)
def absmax(x: Tensor, granularity: Granularity = "tensor") -> Tensor:
    """The largest magnitude of each group.

    x: float32, bfloat16 or float16, any shape, any strides. Returns: x.dtype, of shape
        ()                                  "tensor"
        (..., M, 1)                         "row", for x of (..., M, N); (1,) for x of (N,)
        (..., 1, N)                         "column"
        (..., ceil(M / r), ceil(N / c))     (r, c)
    A group with a NaN has NaN; one of zeros has 0.0, not -0.0. A group without elements has 0: "tensor" of an empty
    tensor, "row" of (M, 0), "column" of (0, N). ValueError as the module's first lines say.
    """


@blank(exercise="7.2", points=3, minutes=30)
def scale_for(amax: Tensor, fmt: Format, eps: float = 1e-12, power_of_two: bool = False) -> Tensor:
    """The scale that brings a magnitude of `amax` to the largest finite value of the format.

    amax: float32, bfloat16 or float16, any shape, not below 0. fmt: its largest value is between 4 and 2^127.
    Returns: float32, same shape: max_finite / max(amax, eps), both in float64, divided there and rounded to float32
    once. A quotient beyond the largest float32 gives the largest float32.
    power_of_two: the largest power of two that is not above that float32, exactly.
    NaN gives NaN. Infinity gives 0: the group comes back as NaN, so that an overflow cannot hide.
    """


@blank(exercise="7.3", points=3, minutes=25, unlocks="ScaleExplorer runs on your quantizer.")
def quantize(x: Tensor, fmt: Format, granularity: Granularity = "tensor", power_of_two: bool = False) -> Quantized:
    """Scale every group of `x` into the range of `fmt`, and round: nearest, ties to even, saturated.

    x: float32, bfloat16 or float16, any shape. fmt: any format with a sign and at most 8 bits.
    The scale is `scale_for(absmax(x, granularity), fmt)`; x is converted to float32, multiplied by it there, and
    encoded. NaN has a code that is a NaN (any one); in a "finite" format, which has none, ValueError.
    No gradient flows into the result.
    """


@blank(exercise="7.4", points=2, minutes=15)
def dequantize(q: Quantized) -> Tensor:
    """The tensor that the codes stand for, in `q.dtype`.

    Returns: decode(code) / scale, divided in float32 and rounded to q.dtype once. 0 / 0 is NaN: a scale of 0 gives NaN.
    """


@blank(exercise="7.5", points=1, minutes=10)
def sqnr_db(x: Tensor, y: Tensor) -> float:
    """The signal-to-quantization-noise ratio of `y`, an approximation of `x`, in decibel.

    x, y: the same shape; each float32, bfloat16 or float16. Returns: 10 * log10(sum(x^2) / sum((x - y)^2)), in float64.
    Infinity where y is x, also for zeros and for empty tensors; -infinity where x is 0 and y is not, or y alone has an
    infinity; NaN where x has an infinity, or either has a NaN.
    """


@blank(exercise="7.6", points=3, minutes=30)
def quantize_int8(x: Tensor, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers instead of floats: `value = (code - zero_point) * scale`, with one scale for the tensor.

    x: float32, bfloat16 or float16, any shape; converted to float32 first.
    Returns: (codes: int8, shape of x; scale: float32, 0-d; zero_point: int32, 0-d).
    symmetric: scale = max|x| / 127, zero_point = 0, code = round(x / scale), from -127 to 127.
    else, with lo the smallest number or 0 and hi the largest or 0: scale = (hi - lo) / 255,
        zero_point = round(-128 - lo / scale), code = round(x / scale) + zero_point, from -128 to 127 (clamped).
    scale is worked out in float64 and rounded to float32, and is at least 1e-12; the rest is float32. Ties go to even.
    ValueError where x has a NaN or an infinity: int8 has no code for them.
    """


@blank(exercise="7.7", points=2, minutes=20)
def straight_through(x: Tensor, fmt: Format) -> Tensor:
    """`dequantize(quantize(x, fmt))`, with the derivative of a function that does nothing.

    x: float32, bfloat16 or float16, any shape. Returns: x.dtype, same shape: those values to the last bit.
    Backward: the gradient of x is the gradient of the result, unchanged.
    """


@blank(exercise="7.8", points=3, minutes=30)
def best_clip(x: Tensor, fmt: Format, fractions: tuple[float, ...] = tuple(k / 16 for k in range(16, 3, -1))) -> Tensor:
    """The amax with which `x` comes back with the least error, which need not be the largest magnitude.

    x: float32, bfloat16 or float16, any shape. fractions: above 0, at most 1, in any order. Returns: float32, 0-d.
    Each fraction is tried: clip = max|x| * fraction (in float32), scale = scale_for(clip, fmt); x * scale is rounded to
    `fmt`, saturated, and divided by the scale, in float32. The error is the sum of the squared differences, in float64.
    Returns the clip with the least error; the largest of those that are equally good.
    Where max|x| is 0, infinite or NaN, and for an empty tensor: max|x| itself (0 for an empty one).
    """


# --- given: from a scale for each group to one for each element -------------------------------------------------------


def require_granularity(granularity: Granularity, dims: int) -> None:
    """ValueError, in words, unless a tensor of `dims` dimensions can be cut into such groups."""
    block = isinstance(granularity, (tuple, list)) and len(granularity) == 2
    if block and not all(isinstance(size, int) and size >= 1 for size in granularity):
        raise ValueError(f"a block has at least 1 row and 1 column, whole numbers; not {granularity!r}")
    if not block and granularity not in ("tensor", "row", "column"):
        raise ValueError(f"granularity is 'tensor', 'row', 'column' or (rows, columns) of a block, not {granularity!r}")
    needed = 2 if block or granularity == "column" else int(granularity == "row")
    if dims < needed:
        raise ValueError(f"granularity {granularity!r} needs {needed} dimensions or more; the tensor has {dims}")


def spread(scale: Tensor, granularity: Granularity, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """A scale for each element of a tensor of this shape, from one for each group.

    scale: of the shape that `absmax` gives. Returns: `shape`, scale's dtype; only for blocks is memory used.
    """
    require_granularity(granularity, len(shape))
    if isinstance(granularity, str):
        return scale.expand(shape)
    (rows, columns), (height, width) = granularity, shape[-2:]
    return scale.repeat_interleave(rows, -2)[..., :height, :].repeat_interleave(columns, -1)[..., :width]


def values_of(decode: Callable, fmt: Format, device: torch.device) -> Tensor:
    """The value of every code of a format of at most 8 bits, as `decode` gives them: float32, (2^width,).

    Worked out once and kept: a table look-up is many times as fast as decoding. A compiler that follows the call finds
    a dict and takes the table that is there; so let each format be decoded once before anything is compiled.
    """
    key = decode, blanks.FILLED.get("decode"), blanks.SUPPLIED.get("decode"), fmt, device
    if key not in _VALUES:
        codes = torch.arange(2**fmt.width, dtype=torch.int32)
        if "torch._dynamo" in sys.modules:  # a compiler that follows all calls is to leave this one alone
            decode = torch.compiler.disable(decode)
        _VALUES[key] = decode(codes, fmt).float().to(device)
    return _VALUES[key]


_VALUES: dict[tuple, Tensor] = {}

# How to decode by plain arithmetic: a compiler makes one loop of that and what is around it, which it cannot do with a
# look-up. For the two formats that whole models are trained in.
INLINE_DECODERS = {fmt: fused.elementwise_decode(fmt) for fmt in (E4M3, E5M2)}


# --- scenarios: what a check drives an answer with, beside plain calls ------------------------------------------------


def quantized(
    function: Callable, x: Tensor, fmt: Format, granularity: Granularity = "tensor", power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(codes, scale) of `function(x, fmt, granularity, power_of_two)`. All codes that mean NaN become one of them."""
    q = function(x, fmt, granularity, power_of_two)
    if q.fmt != fmt or q.granularity != granularity or q.dtype != x.dtype:
        raise ValueError(f"Quantized has {q.fmt}, {q.granularity!r} and {q.dtype}, which are not those of the call")
    return one_nan(q.codes, fmt), q.scale


def one_nan(codes: Tensor, fmt: Format) -> Tensor:
    """uint8 codes, with the format's own code for NaN in place of each that means NaN; other tensors as they are."""
    if codes.dtype != torch.uint8 or fmt.specials == "finite":
        return codes
    return _with_one_nan(fmt)[codes.int()]


@functools.lru_cache(maxsize=64)
def _with_one_nan(fmt: Format) -> Tensor:
    """For every uint8 the code that stands for it."""
    table = torch.arange(256, dtype=torch.uint8)
    codes = table[: 2**fmt.width]
    codes[fused.decode_(codes, fmt).isnan()] = fused.encode_(torch.tensor([float("nan")]), fmt)
    return table


def dequantized(
    function: Callable, codes: Tensor, scale: Tensor, fmt: Format, granularity: Granularity, dtype: torch.dtype
) -> Tensor:
    """`function` of the Quantized with these parts."""
    return function(Quantized(codes, scale, fmt, granularity, dtype))


def refusal(function: Callable, x: Tensor, fmt: Format, granularity: Granularity) -> str:
    """Whether `function(x, fmt, granularity)` raises ValueError, in words."""
    try:
        function(x, fmt, granularity)
    except ValueError:
        return "ValueError"
    return "no error"


def passed_through(function: Callable, x: Tensor, fmt: Format, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """(`function(x, fmt)`, the gradient of x when that of the result is `gradient`); zeros where none arrives."""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        result = function(x, fmt)
    if not result.requires_grad:
        return result, torch.zeros_like(x)
    (arrived,) = torch.autograd.grad(result, x, gradient, allow_unused=True)
    return result.detach(), torch.zeros_like(x) if arrived is None else arrived
