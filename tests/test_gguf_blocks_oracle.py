"""Chapter 12's oracle for blocks of 32 against fractions, and its rules on blocks of every kind."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from lowprec_lab.formats import FP16
from lowprec_lab.graders import gguf_blocks as grader
from lowprec_lab.graders import gguf_blocks_oracle as exact
from lowprec_lab.graders import oracle
from lowprec_lab.sources import reference

LAYOUTS = ("q8_0", "q4_0", "q4_1", "q5_0")
HALVES = oracle.decode(torch.arange(0x7C00, dtype=torch.int32), FP16).tolist()


def single(value):
    """The float32 nearest to a fraction: a float64 near it, and then the nearer one of its neighbours."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    distances = [abs(Fraction(float(each)) - value) for each in around]
    best = [each for each, distance in zip(around, distances, strict=True) if distance == min(distances)]
    return Fraction(float(next((each for each in best if int(each.view(np.uint32)) % 2 == 0), best[0])))


def half_code(value):
    """The code of the float16 nearest to a fraction, below 65520 in magnitude; a tie goes to the even code."""
    place = int(np.searchsorted(HALVES, float(abs(value))))
    near = range(max(0, place - 2), min(len(HALVES), place + 2))
    distances = [abs(Fraction(HALVES[code]) - abs(value)) for code in near]
    best = [code for code, distance in zip(near, distances, strict=True) if distance == min(distances)]
    return next((code for code in best if code % 2 == 0), best[0]) + (0x8000 if value < 0 else 0)


def by_fractions(block, layout):
    """The bytes of one block of ordinary numbers, by the rules as they are written."""
    x = [Fraction(float(v)) for v in block]
    largest = max(x, key=abs)
    if layout == "q8_0":
        d, m = single(abs(largest) / 127), Fraction(0)
    elif layout == "q4_1":
        m = min(x)
        d = single(single(max(x) - m) / 15)
    else:
        d, m = single(largest / (-8 if layout == "q4_0" else -16)), Fraction(0)
    inverse = single(1 / d)
    scaled = [single(single(v - m) * inverse) for v in x]
    if layout == "q8_0":
        codes = [int(math.copysign(math.floor(abs(v) + Fraction(1, 2)), v)) % 256 for v in scaled]
        return [*half_code(d).to_bytes(2, "little"), *codes]
    offset, top = {"q4_0": (8.5, 15), "q4_1": (0.5, 15), "q5_0": (16.5, 31)}[layout]
    codes = [min(top, math.floor(single(v + Fraction(offset)))) for v in scaled]
    head = [*half_code(d).to_bytes(2, "little"), *(half_code(m).to_bytes(2, "little") if layout == "q4_1" else b"")]
    if layout == "q5_0":
        head += sum((code >> 4) << j for j, code in enumerate(codes)).to_bytes(4, "little")
    return head + [codes[j] % 16 | codes[j + 16] % 16 << 4 for j in range(16)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_by_fractions(layout):
    rng = np.random.default_rng(1)
    x = torch.cat([grader.drawn(rng, 8, 32), grader.near_ties(rng, 12, layout), grader.heavy_tailed(rng, 4)])
    got = getattr(exact, f"quantize_{layout}")(x)
    assert got.tolist() == [by_fractions(block, layout) for block in x.numpy()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ties_are_among_the_inputs(layout):
    """What is half-way in float32 stays there: that is what these inputs are for."""
    x = exact.in_blocks(grader.near_ties(np.random.default_rng(2), 40, layout))
    low = x.min(axis=1, keepdims=True) if layout == "q4_1" else 0
    d = {"q8_0": np.abs(x).max(1, keepdims=True) / 127, "q4_1": (x.max(1, keepdims=True) - low) / 15}.get(layout)
    d = exact.first_largest(x) / (-8 if layout == "q4_0" else -16) if d is None else d
    scaled = exact.scaled_by(x - low, d.astype(np.float32)).astype(np.float64)
    distances = np.abs(scaled - np.floor(scaled) - 0.5)
    assert (distances == 0).mean() > 0.1
    assert ((distances > 0) & (distances < 1e-5)).mean() > 0.1


def test_numbers_that_are_there_twice_or_not_at_all():
    zero = torch.zeros(32)
    assert exact.quantize_q8_0(zero).tolist() == [0] * 34
    assert exact.quantize_q4_0(zero).tolist() == [0, 0x80] + [0x88] * 16  # 0 / -8 is -0
    assert exact.quantize_q4_1(zero + 5).tolist() == [0, 0, 0, 0x45] + [0] * 16
    assert exact.quantize_q5_0(zero).tolist() == [0, 0x80] + [0xFF] * 4 + [0] * 16
    both = zero.clone()
    both[3], both[9] = 8.0, -8.0
    assert exact.quantize_q4_0(both).tolist()[:2] == [0, 0xBC]  # the first one: d = -1
    assert exact.quantize_q4_0(-both).tolist()[:2] == [0, 0x3C]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_cost_their_block_and_no_other(layout, value):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    plain = getattr(exact, f"quantize_{layout}")(x)
    x[1, 40] = value
    for quantize in (getattr(exact, f"quantize_{layout}"), reference(f"quantize_{layout}")):
        found = quantize(x)
        numbers = reference("dequantize_blocks")(found, layout)
        assert numbers[1, 32:].isnan().all()
        assert numbers[[0, 2]].isfinite().all()
        numbers[1, 32:] = 0
        expected = reference("dequantize_blocks")(plain, layout)
        expected[1, 32:] = 0
        assert torch.equal(numbers, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_next_to_zero_all_codes_are_those_of_zero(layout):
    """2^-127 and what is near: 1 / d is infinite, where d does not even become 0."""
    x = torch.full((1, 32), 2.0**-127)
    x[0, ::2] *= -1
    for quantize in (getattr(exact, f"quantize_{layout}"), reference(f"quantize_{layout}")):
        numbers = reference("dequantize_blocks")(quantize(x), layout)
        assert (numbers == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_back_by_fractions(layout):
    rng = np.random.default_rng(3)
    rows = grader.with_halves(rng, 6, layout)
    got = exact.dequantize_blocks(rows, layout).double().tolist()
    for row, numbers in zip(rows.tolist(), got, strict=True):
        halves = [Fraction(float(np.frombuffer(bytes(row[at : at + 2]), "<f2")[0])) for at in (0, 2)]
        if layout == "q8_0":
            want = [Fraction(code - 256 * (code > 127)) * halves[0] for code in row[2:]]
        else:
            codes = [byte & 15 for byte in row[-16:]] + [byte >> 4 for byte in row[-16:]]
            if layout == "q4_1":
                want = [single(code * halves[0] + halves[1]) for code in codes]
            else:
                fifth = int.from_bytes(bytes(row[2:6]), "little") if layout == "q5_0" else 0
                zero = 16 if layout == "q5_0" else 8
                want = [((code | (fifth >> j & 1) << 4) - zero) * halves[0] for j, code in enumerate(codes)]
        assert [Fraction(v) for v in numbers] == want
