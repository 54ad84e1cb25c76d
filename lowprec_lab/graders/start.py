"""Checks and known misconceptions of chapter 00."""

from __future__ import annotations

import torch

from lowprec_lab.graders import inputs, oracle
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for

oracle_for("sign_bit", oracle.sign_bit)


@check_for("sign_bit", weight=2)
def numbers_of_both_signs(answer, case):
    """Numbers of both signs, in shapes of 0, 1, 2 and 3 dimensions, an empty and a transposed one included."""
    x = inputs.random_float32(case.count(1200), case.rng)
    x = x[~x.isnan() & (x != 0)]
    for shaped in (x, x[0], x[:1000].reshape(10, 100), x[:1000].reshape(10, 100).t(), x[:120].reshape(2, 3, 20), x[:0]):
        case.same_bits(answer(shaped), oracle.sign_bit(shaped))


@check_for("sign_bit")
def zeros_infinities_and_nans(answer, case):
    """Both zeros, both infinities, the smallest and largest numbers, and NaNs with either sign."""
    special = torch.cat([inputs.special_float32(), inputs.special_float32().neg()])
    case.same_bits(answer(special), oracle.sign_bit(special))


@misconception("sign_bit", "It compares with zero: -0.0 and NaNs with the sign bit set come out as 0.")
def is_negative(x):
    return (x < 0).to(torch.int32)


@misconception("sign_bit", "It shifts a signed integer, which copies the sign downwards: -1 where 1 is expected.")
def shifts_without_mask(x):
    return x.view(torch.int32) >> 31


@misconception("sign_bit", "It asks whether the value is not above zero: 0.0 and every NaN count as negative.")
def is_not_positive(x):
    return (~(x > 0)).to(torch.int32)


@misconception(
    "sign_bit", "It asks for values up to and including zero: 0.0 counts as negative, a negative NaN does not."
)
def is_zero_or_less(x):
    return (x <= 0).to(torch.int32)


@misconception("sign_bit", "It reads the lowest bit of the number, which belongs to the mantissa.")
def reads_the_lowest_bit(x):
    return x.view(torch.int32) & 1


@misconception("sign_bit", "It gives 1 for positive and 0 for negative: the sign bit is set for negative numbers.")
def inverted(x):
    return 1 - torch.signbit(x).to(torch.int32)


@misconception("sign_bit", "It gives the sign as -1, 0 or 1 instead of the bit.")
def gives_the_sign(x):
    return torch.sign(x).nan_to_num().to(torch.int32)


question_for(
    "0.A",
    True,
    "Right: as values they are equal. Only their bits differ.",
    "Type it into a cell of your own and look.",
)
