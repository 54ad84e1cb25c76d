"""Chapter 00: how the lab works, met on the smallest exercise there is.

Reference: IEEE 754-2019 section 3.4 (binary interchange formats: the sign is the most significant bit).
"""

from __future__ import annotations

from torch import Tensor

from lowprec_lab.blanks import blank


@blank(
    exercise="0.1",
    points=1,
    minutes=10,
    unlocks="Chapter 01: run `lowprec-lab open 01` in a terminal, or open 01_bit_layouts.ipynb.",
)
def sign_bit(x: Tensor) -> Tensor:
    """The sign bit of every element: 1 where it is set, 0 where it is not.

    x: float32, any shape. Returns: int32, same shape.
    The sign bit is a bit, not a comparison with zero: -0.0 has it set, and so may a NaN.
    """
