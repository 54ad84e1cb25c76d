"""Chapter 02: rounding, from any float32 to the nearest value of a format.

References: IEEE 754-2019 sections 4.3 (rounding-direction attributes) and 7.4 (overflow); OCP 8-bit Floating Point
Specification 1.0; Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433; Croci et al., Stochastic
rounding: implementation, error analysis and applications, Royal Society Open Science 9 (2022).

What holds for every function here that takes a format:
- *Rounding comes first*, as if the largest binade went on; what then lies above the largest finite value overflows.
- Modes: "nearest_even" (ties to the even significand; without mantissa bits to the larger magnitude), "nearest_away"
  (ties away from zero), "toward_zero", "up" (towards +infinity), "down" (towards -infinity).
- Overflow "saturate" gives the largest finite value with the sign, for infinity too. "to_special" gives infinity where
  the format has one, else NaN. toward_zero, and "up" or "down" where it points towards zero, do not overflow a finite
  number: it becomes the largest finite value. Infinity itself always follows the policy.
- NaN stays NaN. The sign of zero stays, where the format has a -0 (fnuz and unsigned formats have none).
- A format without a zero (`fmt.subnormals` is False) gives its smallest value for what is below it, with the sign. A
  format without a sign gives NaN for numbers below zero; -0.0 counts as zero and becomes 0.0.
- ValueError for an unknown mode or overflow policy, and for "to_special" on a format without special values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowprec_lab.blanks import blank
from lowprec_lab.formats import Format
from lowprec_lab.tracing import with_constants

MODES = ("nearest_even", "nearest_away", "toward_zero", "up", "down")
OVERFLOWS = ("saturate", "to_special")


@blank(exercise="2.1", points=1, minutes=10)
def truncate_to_bfloat16(x: Tensor) -> Tensor:
    """Cut float32 down to bfloat16: keep the upper 16 bits, drop the lower ones.

    x: float32, any shape. Returns: bfloat16, same shape.
    Values move towards zero. NaN stays NaN, also one whose payload is all in the lower half; infinity stays infinity.
    """


@blank(exercise="2.2", points=2, minutes=20)
def round_to_bfloat16(x: Tensor) -> Tensor:
    """Round float32 to the nearest bfloat16, ties to even.

    x: float32, any shape. Returns: bfloat16, same shape.
    NaN stays NaN; infinity stays infinity; finite values above the largest bfloat16 by half a step or more become
    infinity.
    """


@blank(exercise="2.3", points=5, minutes=60, unlocks="RoundingExplorer, BitExplorer and every picture round with it.")
def round_to(x: Tensor, fmt: Format, mode: str = "nearest_even", overflow: str = "saturate") -> Tensor:
    """Round every element of `x` to a value of `fmt`; the rules are at the top of this module.

    x: float32, any shape; not changed. Returns: float32, same shape: values of the format.
    """


@blank(exercise="2.4", points=3, minutes=30)
def encode(x: Tensor, fmt: Format, mode: str = "nearest_even", overflow: str = "saturate") -> Tensor:
    """The codes of the rounded elements: `decode(encode(x, ...), fmt)` is `round_to(x, ...)`, bit for bit.

    x: float32, any shape. Returns: int32 codes, same shape (see chapter 01).
    NaN gets one code: sign 0 and the mantissa's top bit alone in ieee formats, sign 0 and all ones in fn, the code of
    -0 in fnuz. ValueError when there is a NaN and the format is "finite".
    """


@blank(exercise="2.5", points=3, minutes=30)
def round_stochastic(x: Tensor, fmt: Format, noise: Tensor, overflow: str = "saturate") -> Tensor:
    """Round every element up or down at random, so that the mean of many roundings is the element itself.

    x: float32, any shape. noise: float32, same shape, multiples of 2^-23 in [0, 1). Returns: float32, same shape.
    With neighbours lo <= |x| < hi the magnitude becomes hi exactly when noise < (|x| - lo) / (hi - lo), compared
    exactly; values of the format never move. Above the largest finite value hi is what would follow it; the overflow
    policy comes last.
    """


@blank(exercise="2.6", points=2, minutes=20)
def double_rounding_victims(via: Format, fmt: Format, lo: float, hi: float) -> Tensor:
    """Every float32 in [lo, hi) that becomes another value of `fmt` when it is rounded to `via` first.

    0 < lo < hi, at most 2^24 float32 between them. Both roundings are nearest_even and saturate.
    Returns: float32, one dimension, in ascending order.
    """


@blank(exercise="2.7", points=3, minutes=40, unlocks="Training and every later chapter round with it.")
def fast_round_to(x: Tensor, fmt: Format, out: Tensor | None = None) -> Tensor:
    """`round_to(x, fmt)` (nearest_even, saturate) in one pass over memory, once torch.compile has fused it.

    x: float32, any shape. out: float32 of that shape to write into, or None. Returns: `out`, or a new float32 tensor.
    Formats with a sign, a zero, at least 2 exponent bits, at most 22 mantissa bits and a bias from -100 to 127. Only
    operations that work element by element, and no Python branch on a value of `x`: the whole function is one graph
    (`torch.compile(fullgraph=True)`), and bits are the same compiled and eager.
    """


@blank(exercise="2.8", points=2, minutes=15)
def cast_saturating(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a float8 dtype so that every version of torch gives the same: round, then saturate.

    x: float32, bfloat16 or float16, any shape. dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz.
    Returns: `dtype`, same shape. Finite and infinite values beyond the largest become the largest, with their sign;
    NaN stays NaN.
    """


# --- scenarios: what a check drives an answer with, beside plain calls ---


def traced(function: Callable, x: Tensor, fmt: Format) -> Tensor:
    """`function(x, fmt)` after torch.compile has followed it as one graph. RuntimeError, with the reason, if it cannot.

    Nothing is generated: the graph is run as it is, so this says that a compiler can take it whole, and not how fast.
    As in `compiled`, blanks that give a number for the format are asked before.
    """
    import torch._dynamo as dynamo

    function(x, fmt)  # what it calls is loaded before anything is followed
    whole = with_constants(function, fmt)
    dynamo.reset()
    try:
        return torch.compile(whole, backend="eager", fullgraph=True, dynamic=False)(x, fmt)
    except dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise RuntimeError(f"torch.compile cannot make one graph of it: {reason}") from None
    finally:
        dynamo.reset()


def written_into(function: Callable, x: Tensor, fmt: Format) -> tuple[Tensor, bool]:
    """(out, whether `out` itself came back) after `function(x, fmt, out)`, with NaN in `out` before."""
    out = torch.full_like(x, float("nan"))
    result = function(x, fmt, out)
    return out, result is out


def compiled(function: Callable, fmt: Format) -> Callable:
    """A rounder `function(x, fmt, out)` compiled for one format: returns `run(x, out=None)`, which returns `out`.

    x: float32, any shape. The first call compiles, which takes seconds. Where it cannot be compiled (no C++ compiler, a
    Python branch on a value of `x`) the function runs eagerly, and a sentence says so once. Blanks that give a number
    for the format (`max_finite` and the like) are asked once, now.
    """
    from lowprec_lab import fused

    whole = with_constants(function, fmt)
    name = getattr(function, "__name__", "the function")
    return fused.compile_elementwise(lambda x, out: whole(x, fmt, out), torch.float32, f"{name} for {fmt.name}", True)
