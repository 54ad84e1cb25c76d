"""The registry of formats, and what a Format that cannot exist is told."""

import pytest
import torch

from lowprec_lab import formats
from lowprec_lab.formats import BF16, E4M3, E5M2, E8M0, FORMATS, FP32, SPECIALS, Format, get_format
from lowprec_lab.graders import oracle

# name: sign, exponent, mantissa bits, bias, specials, largest, smallest normal, smallest subnormal
TABLE = {
    "float32": (1, 8, 23, 127, "ieee", (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149),
    "tfloat32": (1, 8, 10, 127, "ieee", (2 - 2.0**-10) * 2.0**127, 2.0**-126, 2.0**-136),
    "float16": (1, 5, 10, 15, "ieee", 65504.0, 2.0**-14, 2.0**-24),
    "bfloat16": (1, 8, 7, 127, "ieee", (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133),
    "float8_e4m3fn": (1, 4, 3, 7, "fn", 448.0, 2.0**-6, 2.0**-9),
    "float8_e5m2": (1, 5, 2, 15, "ieee", 57344.0, 2.0**-14, 2.0**-16),
    "float8_e4m3fnuz": (1, 4, 3, 8, "fnuz", 240.0, 2.0**-7, 2.0**-10),
    "float8_e5m2fnuz": (1, 5, 2, 16, "fnuz", 57344.0, 2.0**-15, 2.0**-17),
    "float8_e8m0fnu": (0, 8, 0, 127, "fn", 2.0**127, 2.0**-127, None),
    "float6_e2m3fn": (1, 2, 3, 1, "finite", 7.5, 1.0, 0.125),
    "float6_e3m2fn": (1, 3, 2, 3, "finite", 28.0, 0.25, 0.0625),
    "float4_e2m1fn": (1, 2, 1, 1, "finite", 6.0, 1.0, 0.5),
}


def test_the_registry_is_the_table():
    assert set(FORMATS) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_fields_and_landmarks(name):
    sign, exponent, mantissa, bias, specials, largest, normal, subnormal = TABLE[name]
    fmt = FORMATS[name]
    assert (int(fmt.signed), fmt.exponent_bits, fmt.mantissa_bits) == (sign, exponent, mantissa)
    assert (fmt.bias, fmt.specials, fmt.width) == (bias, specials, sign + exponent + mantissa)
    assert fmt.subnormals == (subnormal is not None)
    assert oracle.max_finite(fmt) == largest
    assert oracle.min_normal(fmt) == normal
    assert oracle.min_subnormal(fmt) == subnormal


def test_a_torch_dtype_has_the_same_number_of_bits():
    for fmt in FORMATS.values():
        if fmt.torch_dtype is not None:
            assert torch.empty(0, dtype=fmt.torch_dtype).element_size() * 8 == fmt.width
            assert str(fmt.torch_dtype).removeprefix("torch.") == fmt.name


@pytest.mark.parametrize("name", ["E4M3", "float8_e4m3fn"])
def test_get_format(name):
    assert get_format(name) is E4M3


def test_get_format_lists_what_there_is():
    with pytest.raises(ValueError, match=r"'E4M4'.*float8_e4m3fn \(E4M3\).*Format\("):
        get_format("E4M4")


def test_a_format_of_ones_own():
    fmt = Format("mine", 3, 4, bias=5, specials="fn")
    assert (fmt.width, fmt.bias, str(fmt)) == (8, 5, "mine")
    assert Format("usual", 6, 2).bias == 31


def test_repr_can_be_typed_in():
    for fmt in (*FORMATS.values(), Format("mine", 3, 4, bias=5, specials="fn", signed=False, subnormals=False)):
        assert eval(repr(fmt), vars(formats)) == fmt


def test_a_format_that_borrows_a_name_does_not_pass_for_the_registered_one():
    assert repr(Format("float8_e4m3fn", 4, 3)) != "E4M3"


def test_equal_by_bits_and_usable_as_a_key():
    assert Format("float8_e4m3fn", 4, 3, specials="fn") == E4M3
    assert {E5M2: 1}[Format("float8_e5m2", 5, 2)] == 1
    assert BF16 != FP32


# (arguments, what is said to be wrong, what to do about it)
IMPOSSIBLE = [
    ({"exponent_bits": 0, "mantissa_bits": 3, "bias": 0}, "0 exponent bits, and subnormals", "at least 1 exponent bit"),
    (
        {"exponent_bits": 0, "mantissa_bits": 3, "bias": 0, "subnormals": False, "specials": "finite"},
        "0 exponent bits",
        "at least 1",
    ),
    ({"exponent_bits": -2, "mantissa_bits": 3, "bias": 0}, "-2 exponent bits", "at least 1"),
    ({"exponent_bits": 4, "mantissa_bits": -1}, "-1 mantissa bits", "Use 0 or more"),
    ({"exponent_bits": 8, "mantissa_bits": 24}, "33 bits", "at most 32"),
    ({"exponent_bits": 11, "mantissa_bits": 52}, "64 bits", "at most 32"),
    (
        {"exponent_bits": 4, "mantissa_bits": 3, "specials": "nan_only"},
        "specials='nan_only' is unknown",
        "Choose one of",
    ),
    ({"exponent_bits": 1, "mantissa_bits": 3}, "'ieee' needs 2 exponent bits", "use specials="),
    ({"exponent_bits": 4, "mantissa_bits": 0}, "1 mantissa bit", "use specials="),
    ({"exponent_bits": 4, "mantissa_bits": 3, "specials": "fnuz", "signed": False}, "code of -0", "specials='fn'"),
    (
        {"exponent_bits": 4, "mantissa_bits": 3, "specials": "fnuz", "subnormals": False},
        "a sign and a zero",
        "specials='fn'",
    ),
    ({"exponent_bits": 1, "mantissa_bits": 0, "specials": "fn"}, "only code that is not 0 is NaN", "Add bits"),
    ({"exponent_bits": 9, "mantissa_bits": 3}, "not all exact in float32", "Change the bias"),
    ({"exponent_bits": 8, "mantissa_bits": 3, "bias": 100}, "2^154", "Change the bias"),
    ({"exponent_bits": 8, "mantissa_bits": 3, "bias": 150}, "2^-152", "use fewer bits"),
    ({"exponent_bits": 5, "mantissa_bits": 24}, "24 mantissa bits", "use fewer bits"),
    ({"exponent_bits": 4.0, "mantissa_bits": 3}, "exponent_bits is a whole number", "not 4.0"),
    ({"exponent_bits": 4, "mantissa_bits": "3"}, "mantissa_bits is a whole number", "not '3'"),
    ({"exponent_bits": True, "mantissa_bits": 3}, "exponent_bits is a whole number", "not True"),
    ({"exponent_bits": 4, "mantissa_bits": 3, "bias": 7.5}, "bias is a whole number", "not 7.5"),
]


@pytest.mark.parametrize(("options", "reason", "way_out"), IMPOSSIBLE, ids=lambda v: v if isinstance(v, str) else "")
def test_impossible_formats_say_why_and_what_to_do(options, reason, way_out):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 the two lines below look at the text
        Format("wish", **options)
    assert reason in str(raised.value)
    assert way_out in str(raised.value)
    assert "'wish'" in str(raised.value)


@pytest.mark.parametrize("name", ["", None, 4])
def test_a_name_is_text(name):
    with pytest.raises(ValueError, match="non-empty text"):
        Format(name, 4, 3)


def test_every_kind_of_special_is_explained():
    assert set(SPECIALS) == {fmt.specials for fmt in FORMATS.values()}


def test_possible_at_the_very_edge():
    assert Format("widest", 8, 22, bias=128, specials="fn").width == 31
    assert Format("e1", 1, 3, specials="finite").bias == 0
    assert E8M0.width == 8
