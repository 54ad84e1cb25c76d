"""The oracle is exact: against Python fractions, against torch, ml_dtypes and gfloat, and the reference against it."""

import math
import struct
from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats

from lowprec_lab.bits import NumberClass
from lowprec_lab.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    TF32,
    Format,
)
from lowprec_lab.graders import inputs, oracle
from lowprec_lab.graders.case import tokens_of
from lowprec_lab.sources import reference

NARROW = [fmt for fmt in FORMATS.values() if fmt.width <= 16]
RNG = np.random.default_rng(5)
MADE_UP = [inputs.random_format(RNG, max_width=16) for _ in range(20)]
EVERY = [*FORMATS.values(), *inputs.MADE_UP, *MADE_UP]


def by_name(value):
    return value.name if isinstance(value, Format) else None


def meaning(code: int, fmt: Format) -> tuple[int, int, Fraction | float]:
    """(class, sign, exact value) of one code, from the words of the contract and with Python integers alone."""
    digits = f"{code:0{fmt.width}b}"
    sign = int(digits[0]) if fmt.signed else 0
    digits = digits[1:] if fmt.signed else digits
    exponent = int(digits[: fmt.exponent_bits], 2)
    mantissa = int(digits[fmt.exponent_bits :] or "0", 2)
    ones, last = 2**fmt.exponent_bits - 1, 2**fmt.mantissa_bits - 1
    if fmt.specials == "ieee" and exponent == ones:
        infinity = -math.inf if sign else math.inf
        return (NumberClass.NAN, sign, math.nan) if mantissa else (NumberClass.INF, sign, infinity)
    if fmt.specials == "fn" and (exponent, mantissa) == (ones, last):
        return NumberClass.NAN, sign, math.nan
    if fmt.specials == "fnuz" and sign and (exponent, mantissa) == (0, 0):
        return NumberClass.NAN, sign, math.nan
    fraction = Fraction(mantissa, 2**fmt.mantissa_bits)
    if exponent == 0 and fmt.subnormals:
        kind = NumberClass.SUBNORMAL if mantissa else NumberClass.ZERO
        return kind, sign, (-1) ** sign * fraction * Fraction(2) ** (1 - fmt.bias)
    return NumberClass.NORMAL, sign, (-1) ** sign * (1 + fraction) * Fraction(2) ** (exponent - fmt.bias)


def same(one, another) -> bool:
    return np.array_equal(tokens_of(one), tokens_of(another))


# decode and classify


@pytest.mark.parametrize("fmt", [*NARROW, *MADE_UP], ids=by_name)
def test_every_code_means_what_fractions_say(fmt):
    codes = inputs.all_codes(fmt)
    values, classes = oracle.decode(codes, fmt).tolist(), oracle.classify(codes, fmt).tolist()
    for code, (value, kind) in enumerate(zip(values, classes, strict=True)):
        expected_kind, sign, exact = meaning(code, fmt)
        assert kind == expected_kind, code
        if isinstance(exact, Fraction):
            assert Fraction(value) == exact, code
            assert math.copysign(1, value) == (-1 if sign else 1), code
        else:
            assert value == exact or (math.isnan(value) and math.isnan(exact)), code


@pytest.mark.parametrize("fmt", [*NARROW, *inputs.MADE_UP, *MADE_UP], ids=by_name)
def test_the_reference_equals_the_oracle_on_every_code(fmt):
    codes = inputs.all_codes(fmt) if fmt.width <= 16 else oracle.landmark_codes(fmt)
    assert same(reference("decode")(codes, fmt), oracle.decode(codes, fmt))
    assert torch.equal(reference("classify")(codes, fmt), oracle.classify(codes, fmt))


def test_a_million_float32_codes_and_all_boundaries():
    rng = np.random.default_rng(7)
    starts = np.arange(512, dtype=np.int64)[:, None] << 23
    boundaries = (starts + np.array([-2, -1, 0, 1, 2])).reshape(-1) % 2**32
    bits = np.concatenate([boundaries, rng.integers(0, 2**32, 1_000_000)]).astype(np.uint32)
    codes = torch.from_numpy(bits.view(np.int32))
    values = oracle.decode(codes, FP32)
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them
        assert same(values, torch.from_numpy(bits.view(np.float32).astype(np.float64)))
    assert same(reference("decode")(codes, FP32), values)
    for code, value in zip(bits[:3000].tolist(), values[:3000].tolist(), strict=True):
        expected = struct.unpack("<f", struct.pack("<I", code))[0]
        assert value == expected or (math.isnan(value) and math.isnan(expected))


@pytest.mark.parametrize("fmt", [TF32, *(f for f in inputs.MADE_UP if f.width > 16)], ids=by_name)
def test_wide_formats_against_fractions(fmt):
    codes = torch.cat([oracle.landmark_codes(fmt), inputs.random_codes(fmt, 3000, np.random.default_rng(3))])
    for code, value in zip(codes.tolist(), oracle.decode(codes, fmt).tolist(), strict=True):
        exact = meaning(code % 2**fmt.width, fmt)[2]
        assert Fraction(value) == exact if isinstance(exact, Fraction) else repr(value) == repr(exact)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if fmt.torch_dtype is not None], ids=by_name)
def test_torch_reads_the_same_values(fmt):
    codes = inputs.codes_to_try(fmt, 100_000, np.random.default_rng(1)) if fmt is FP32 else inputs.all_codes(fmt)
    storage = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[fmt.width]
    assert same(oracle.decode(codes, fmt), codes.to(storage).view(fmt.torch_dtype).to(torch.float64))


ML_DTYPES = {
    ml_dtypes.float8_e4m3fn: E4M3,
    ml_dtypes.float8_e5m2: E5M2,
    ml_dtypes.float8_e4m3fnuz: E4M3FNUZ,
    ml_dtypes.float8_e5m2fnuz: E5M2FNUZ,
    ml_dtypes.float8_e8m0fnu: E8M0,
    ml_dtypes.float6_e2m3fn: E2M3,
    ml_dtypes.float6_e3m2fn: E3M2,
    ml_dtypes.float4_e2m1fn: E2M1,
    ml_dtypes.bfloat16: BF16,
    # These three are registered nowhere here: a Format is data.
    ml_dtypes.float8_e3m4: Format("e3m4", 3, 4),
    ml_dtypes.float8_e4m3: Format("e4m3", 4, 3),
    ml_dtypes.float8_e4m3b11fnuz: Format("e4m3b11fnuz", 4, 3, bias=11, specials="fnuz"),
}


@pytest.mark.parametrize(("dtype", "fmt"), list(ML_DTYPES.items()), ids=by_name)
def test_ml_dtypes_reads_the_same_values(dtype, fmt):
    codes = inputs.all_codes(fmt)
    storage = np.uint16 if fmt.width == 16 else np.uint8
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them
        theirs = codes.numpy().astype(storage).view(dtype).astype(np.float64)
    assert same(oracle.decode(codes, fmt), torch.from_numpy(theirs))


GFLOAT = {
    "ocp_e4m3": E4M3, "ocp_e5m2": E5M2, "ocp_e8m0": E8M0, "ocp_e2m3": E2M3, "ocp_e3m2": E3M2, "ocp_e2m1": E2M1,
    "bfloat16": BF16, "binary16": FP16, "binary32": FP32,
}  # fmt: skip
_GFLOAT_CLASSES = {"ZERO": 0, "SUBNORMAL": 1, "NORMAL": 2, "INFINITE": 3, "NAN": 4}


@pytest.mark.parametrize(("name", "fmt"), list(GFLOAT.items()), ids=by_name)
def test_gfloat_reads_the_same_values_and_classes(name, fmt):
    info = getattr(gfloat_formats, f"format_info_{name}")
    codes = inputs.codes_to_try(fmt, 1000, np.random.default_rng(2))
    theirs = [gfloat.decode_float(info, code % 2**fmt.width) for code in codes.tolist()]
    assert same(oracle.decode(codes, fmt), torch.tensor([each.fval for each in theirs], dtype=torch.float64))
    assert oracle.classify(codes, fmt).tolist() == [_GFLOAT_CLASSES[each.fclass.name] for each in theirs]


# fields and patterns


@pytest.mark.parametrize("fmt", EVERY, ids=by_name)
def test_fields_by_text_and_back(fmt):
    codes = inputs.codes_to_try(fmt, 500, np.random.default_rng(4))
    sign, exponent, mantissa = oracle.split_fields(codes, fmt)
    assert torch.equal(oracle.join_fields(sign, exponent, mantissa, fmt), codes)
    for row in range(0, len(codes), 37):
        digits = f"{int(codes[row]) % 2**fmt.width:0{fmt.width}b}"
        parts = [f"{int(sign[row]):b}"] if fmt.signed else []
        parts += [f"{int(exponent[row]):0{fmt.exponent_bits}b}"]
        parts += [f"{int(mantissa[row]):0{fmt.mantissa_bits}b}"] if fmt.mantissa_bits else []
        assert "".join(parts) == digits


def test_bit_pattern_and_sign_bit_keep_every_bit():
    x = torch.cat([inputs.special_float32(), inputs.random_float32(10_000, np.random.default_rng(6))])
    words = [struct.unpack("<i", raw.tobytes())[0] for raw in x.numpy().view(np.uint8).reshape(-1, 4)]
    assert oracle.bit_pattern(x).tolist() == words
    assert oracle.sign_bit(x).tolist() == [int(word < 0) for word in words]


@pytest.mark.parametrize("fmt", [E4M3, FP32, TF32], ids=by_name)
def test_any_shape(fmt):
    codes = inputs.random_codes(fmt, 24, np.random.default_rng(8))
    flat = oracle.decode(codes, fmt)
    assert same(oracle.decode(codes.reshape(2, 3, 4), fmt).reshape(-1), flat)
    assert same(oracle.decode(codes[3], fmt), flat[3])
    assert oracle.decode(codes[3], fmt).shape == ()
    assert oracle.classify(codes[:0], fmt).shape == (0,)


# landmarks

LANDMARK_DTYPES = [torch.float32, torch.float16, torch.bfloat16, *(f.torch_dtype for f in (E4M3, E5M2, E4M3FNUZ, E8M0))]


@pytest.mark.parametrize("dtype", LANDMARK_DTYPES, ids=str)
def test_landmarks_against_torch(dtype):
    fmt = next(fmt for fmt in FORMATS.values() if fmt.torch_dtype == dtype)
    info = torch.finfo(dtype)
    assert oracle.max_finite(fmt) == info.max
    assert oracle.machine_epsilon(fmt) == info.eps
    assert oracle.min_normal(fmt) == info.smallest_normal


def test_finfo_of_e5m2fnuz_has_the_wrong_epsilon():
    fmt = E5M2FNUZ
    assert torch.finfo(fmt.torch_dtype).eps == 0.125
    one, after = torch.tensor([0x40, 0x41], dtype=torch.uint8).view(fmt.torch_dtype).double().tolist()
    assert (one, after) == (1.0, 1.25)
    assert oracle.machine_epsilon(fmt) == reference("machine_epsilon")(fmt) == after - one


@pytest.mark.parametrize(("dtype", "fmt"), list(ML_DTYPES.items()), ids=by_name)
def test_landmarks_against_ml_dtypes(dtype, fmt):
    info = ml_dtypes.finfo(dtype)
    assert oracle.max_finite(fmt) == float(info.max)
    assert oracle.machine_epsilon(fmt) == float(info.eps)
    if fmt.subnormals:
        assert oracle.min_normal(fmt) == float(info.smallest_normal)
        assert oracle.min_subnormal(fmt) == float(info.smallest_subnormal)


@pytest.mark.parametrize("name", ["max_finite", "min_normal", "min_subnormal", "machine_epsilon"])
def test_the_reference_formulas_equal_brute_force(name):
    rng = np.random.default_rng(9)
    for fmt in [*EVERY, *(inputs.random_format(rng) for _ in range(200))]:
        assert reference(name)(fmt) == getattr(oracle, name)(fmt), repr(fmt)


# ulp


@pytest.mark.parametrize(("fmt", "dtype"), [(FP32, np.float32), (FP16, np.float16)], ids=by_name)
def test_ulp_against_numpy_spacing(fmt, dtype):
    codes = inputs.codes_to_try(fmt, 100_000, np.random.default_rng(10))
    values = oracle.decode(codes, fmt)
    values = values[values.isfinite()].float()
    values = values[values.abs() < oracle.max_finite(fmt)]  # there numpy's next value is infinity
    spacing = np.spacing(np.abs(values.numpy()).astype(dtype)).astype(np.float64)
    assert np.array_equal(oracle.ulp(values, fmt).numpy(), spacing)


@pytest.mark.parametrize("fmt", [*NARROW, *MADE_UP], ids=by_name)
def test_ulp_is_the_gap_to_the_next_value(fmt):
    values = np.unique(oracle.decode(inputs.all_codes(fmt), fmt).numpy())
    values = values[np.isfinite(values) & (values >= 0)]
    gaps = oracle.ulp(torch.from_numpy(values).float(), fmt).numpy()[:-1]
    if fmt.subnormals:
        assert np.array_equal(np.diff(values), gaps)
    else:  # no value between 0 and the smallest normal: the gap there is the format's own
        assert np.array_equal(np.diff(values[values > 0]), gaps[-(np.count_nonzero(values) - 1) :])


# add_float8


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ], ids=by_name)
def test_sums_are_the_nearest_float32(fmt):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    a, b = codes.repeat_interleave(256).view(fmt.torch_dtype), codes.repeat(256).view(fmt.torch_dtype)
    sums = oracle.add_float8(a, b, fmt)
    assert same(sums, reference("add_float8")(a, b))
    left, right = (oracle.decode(part.view(torch.uint8).int(), fmt).tolist() for part in (a, b))
    for place in range(0, 65536, 101):
        one, two, total = left[place], right[place], sums[place].item()
        if math.isfinite(one) and math.isfinite(two):
            exact = Fraction(one) + Fraction(two)
            assert abs(Fraction(total) - exact) <= Fraction(float(oracle.ulp(torch.tensor(total), FP32))) / 2
