"""Checks and known misconceptions of chapter 01."""

from __future__ import annotations

import math

import numpy as np
import torch

from lowprec_lab.bits import NumberClass
from lowprec_lab.formats import BF16, E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FORMATS, FP16, FP32, TF32, Format
from lowprec_lab.graders import inputs, oracle
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for

for _function in (
    oracle.bit_pattern, oracle.split_fields, oracle.join_fields, oracle.classify, oracle.decode, oracle.max_finite,
    oracle.min_normal, oracle.min_subnormal, oracle.machine_epsilon, oracle.ulp,
):  # fmt: skip
    oracle_for(_function.__name__, _function)

FLOAT8 = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)


def class_name(element) -> str:
    """A class id as its name, for verdicts."""
    value = int(element)
    return NumberClass(value).name if value in set(NumberClass) else f"{value} (no class)"


def fields_text(sign, exponent, mantissa) -> str:
    """Three fields as text, for verdicts."""
    return f"sign {int(sign)}, exponent {int(exponent)}, mantissa {int(mantissa)}"


def made_up_formats(case, count: int) -> list[Format]:
    """Formats that no library has, and some that nobody has seen before."""
    return [*inputs.MADE_UP, *(inputs.random_format(case.rng) for _ in range(case.count(count)))]


# --- 1.1 bit_pattern --------------------------------------------------------------------------------------------------


@check_for("bit_pattern", weight=2)
def ordinary_numbers(answer, case):
    """Random numbers of every size, in shapes of 0, 1, 2 and 3 dimensions, strided and empty ones included."""
    x = inputs.random_float32(case.count(2000), case.rng)
    x = x[x.isfinite() & (x != 0)]
    table = x[:1600].reshape(40, 40)
    for shaped in (x, x[0], table, table.t(), table[::3, 1::2], x[:120].reshape(2, 3, 20), x[:0]):
        case.same_bits(answer(shaped), oracle.bit_pattern(shaped), show=FP32)


@check_for("bit_pattern")
def zeros_and_specials(answer, case):
    """Both zeros, subnormals, the neighbours of 1, infinities."""
    x = inputs.special_float32()
    x = torch.cat([x[~x.isnan()], inputs.around(torch.tensor([0.1, 1 / 3, 2**24, 1e-40]))])
    case.same_bits(answer(x), oracle.bit_pattern(x), show=FP32)


@check_for("bit_pattern")
def nans_keep_their_payload(answer, case):
    """NaNs of both signs, quiet and signalling, with different payloads."""
    payload = case.rng.integers(1, 2**23, case.count(200), dtype=np.uint64)
    sign = case.rng.integers(0, 2, payload.size, dtype=np.uint64)
    x = inputs.float32_from_bits(sign << 31 | np.uint64(0x7F800000) | payload)
    case.same_bits(answer(x), oracle.bit_pattern(x), show=FP32)


@misconception("bit_pattern", "It converts the value to an integer instead of reading its bits: 1.5 becomes 1.")
def converts_the_value(x):
    return x.to(torch.int32)


@misconception("bit_pattern", "It computes with the number first (adding 0.0), so -0.0 becomes 0.0.")
def adds_zero(x):
    return (x + 0.0).view(torch.int32)


@misconception(
    "bit_pattern",
    "It loses the sign bit (an absolute value, or a mask with 0x7FFFFFFF): negative numbers get positive codes.",
)
def drops_the_sign(x):
    return x.abs().view(torch.int32)


@misconception("bit_pattern", "It copies through float16, which rounds: the low bits of the mantissa are gone.")
def copies_through_float16(x):
    with np.errstate(over="ignore"):
        return torch.from_numpy(x.numpy().astype(np.float16).astype(np.float32)).view(torch.int32)


@misconception("bit_pattern", "It copies through bfloat16, which keeps only the upper half of the bits.")
def copies_through_bfloat16(x):
    return x.to(torch.bfloat16).to(torch.float32).view(torch.int32)


@misconception("bit_pattern", "It reads the four bytes in the wrong order (big-endian instead of little-endian).")
def swaps_the_bytes(x):
    swapped = x.contiguous().numpy().byteswap().view(np.int32).copy()
    return torch.from_numpy(swapped.reshape(x.shape))


@misconception("bit_pattern", "It replaces NaNs by one NaN: their sign and payload are lost.")
def canonical_nans(x):
    return torch.where(x.isnan(), torch.tensor(0x7FC00000, dtype=torch.int32), x.view(torch.int32))


# --- 1.2 split_fields, 1.3 join_fields --------------------------------------------------------------------------------

_FIELD_NAMES = ("sign", "exponent", "mantissa")


@check_for("split_fields", weight=2)
def fields_of_registered_formats(answer, case):
    """Codes of all registered formats: every code up to 12 bits, the ends of every binade and random codes above."""
    for fmt in FORMATS.values():
        codes = inputs.codes_to_try(fmt, case.count(2000), case.rng)
        case.same_bits(answer(codes, fmt), oracle.split_fields(codes, fmt), show=fields_text, parts=_FIELD_NAMES)


@check_for("split_fields")
def fields_of_made_up_formats(answer, case):
    """Codes of made-up formats: without sign, without mantissa, of odd widths; tensors of 0, 1 and 2 dimensions."""
    for fmt in made_up_formats(case, 6):
        codes = inputs.codes_to_try(fmt, case.count(200), case.rng)
        for shaped in inputs.shapes_of(codes):
            case.same_bits(answer(shaped, fmt), oracle.split_fields(shaped, fmt), show=fields_text, parts=_FIELD_NAMES)


def _sign(codes, fmt):
    return (codes >> (fmt.width - 1)) & 1 if fmt.signed else torch.zeros_like(codes)


def _exponent(codes, fmt):
    return (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)


def _mantissa(codes, fmt):
    return codes & (2**fmt.mantissa_bits - 1)


@misconception(
    "split_fields", "It does not mask the sign of a 32-bit code: shifting a negative integer gives -1, not 1."
)
def sign_by_bare_shift(codes, fmt):
    sign = codes >> (fmt.width - 1) if fmt.signed else torch.zeros_like(codes)
    return sign, _exponent(codes, fmt), _mantissa(codes, fmt)


@misconception("split_fields", "It leaves the sign bit inside the exponent field: the shift needs a mask.")
def exponent_without_mask(codes, fmt):
    return _sign(codes, fmt), codes >> fmt.mantissa_bits, _mantissa(codes, fmt)


@misconception("split_fields", "It reads a sign bit in formats that have none (E8M0).")
def always_a_sign(codes, fmt):
    return (codes >> (fmt.width - 1)) & 1, _exponent(codes, fmt), _mantissa(codes, fmt)


@misconception("split_fields", "It subtracts the bias: the field is wanted as it is stored.")
def subtracts_the_bias(codes, fmt):
    return _sign(codes, fmt), _exponent(codes, fmt) - fmt.bias, _mantissa(codes, fmt)


@misconception("split_fields", "It adds the leading one to the mantissa: the field is wanted as it is stored.")
def adds_the_leading_one(codes, fmt):
    normal = (_exponent(codes, fmt) != 0).to(torch.int32)
    return _sign(codes, fmt), _exponent(codes, fmt), _mantissa(codes, fmt) + normal * 2**fmt.mantissa_bits


@misconception("split_fields", "It swaps the widths of exponent and mantissa: the exponent is next to the sign.")
def swaps_the_widths(codes, fmt):
    exponent = (codes >> fmt.exponent_bits) & (2**fmt.mantissa_bits - 1)
    return _sign(codes, fmt), exponent, codes & (2**fmt.exponent_bits - 1)


@misconception("split_fields", "It takes one mantissa bit too few (a mask of 2^(m-1) - 1).")
def mantissa_mask_too_short(codes, fmt):
    return (
        _sign(codes, fmt),
        _exponent(codes, fmt),
        codes & max(2 ** (fmt.mantissa_bits - 1) - 1, 0) if fmt.mantissa_bits else torch.zeros_like(codes),
    )


@misconception("split_fields", "It has the fields of float32 built in, whatever the format.")
def always_float32(codes, fmt):
    return (codes >> 31) & 1, (codes >> 23) & 0xFF, codes & 0x7FFFFF


@misconception("split_fields", "It gives the sign as the factor +1 or -1: the field is 0 or 1.")
def sign_as_a_factor(codes, fmt):
    return 1 - 2 * _sign(codes, fmt), _exponent(codes, fmt), _mantissa(codes, fmt)


@check_for("join_fields", weight=2)
def codes_of_registered_formats(answer, case):
    """The fields of all registered formats: every code up to 12 bits, ends of every binade and random ones above."""
    for fmt in FORMATS.values():
        codes = inputs.codes_to_try(fmt, case.count(2000), case.rng)
        fields = oracle.split_fields(codes, fmt)
        case.same_bits(answer(*fields, fmt), oracle.join_fields(*fields, fmt), show=fmt)


@check_for("join_fields")
def codes_of_made_up_formats(answer, case):
    """The fields of made-up formats: without sign, without mantissa, of odd widths; tensors of 0 to 2 dimensions."""
    for fmt in made_up_formats(case, 6):
        codes = inputs.codes_to_try(fmt, case.count(200), case.rng)
        for shaped in inputs.shapes_of(codes):
            fields = oracle.split_fields(shaped, fmt)
            case.same_bits(answer(*fields, fmt), oracle.join_fields(*fields, fmt), show=fmt)


@misconception("join_fields", "It adds the bias to the exponent, which is already a stored field.")
def adds_the_bias(sign, exponent, mantissa, fmt):
    return (sign << (fmt.width - 1)) | ((exponent + fmt.bias) << fmt.mantissa_bits) | mantissa


@misconception("join_fields", "It shifts the sign one place too little, into the exponent.")
def sign_one_place_low(sign, exponent, mantissa, fmt):
    return (sign << max(fmt.width - 2, 0)) | (exponent << fmt.mantissa_bits) | mantissa


@misconception("join_fields", "It puts the mantissa above the exponent: the order is sign, exponent, mantissa.")
def mantissa_above_exponent(sign, exponent, mantissa, fmt):
    return (sign << (fmt.exponent_bits + fmt.mantissa_bits)) | (mantissa << fmt.exponent_bits) | exponent


@misconception("join_fields", "It drops the sign bit.")
def forgets_the_sign(sign, exponent, mantissa, fmt):
    return (exponent << fmt.mantissa_bits) | mantissa


@misconception("join_fields", "It negates the code where the sign is set: a sign bit is a bit, not a minus.")
def negates_the_code(sign, exponent, mantissa, fmt):
    code = (exponent << fmt.mantissa_bits) | mantissa
    return torch.where(sign == 1, -code, code)


@misconception("join_fields", "It shifts the exponent by its own width instead of by the mantissa's.")
def shifts_by_the_wrong_width(sign, exponent, mantissa, fmt):
    return (sign << (fmt.width - 1)) | (exponent << fmt.exponent_bits) | mantissa


@misconception("join_fields", "It has the layout of float32 built in, whatever the format.")
def joins_as_float32(sign, exponent, mantissa, fmt):
    return (sign << 31) | (exponent << 23) | mantissa


# --- 1.4 classify -----------------------------------------------------------------------------------------------------


@check_for("classify", weight=2)
def classes_of_registered_formats(answer, case):
    """Codes of all registered formats: every code up to 12 bits, the ends of every binade and random codes above."""
    for fmt in FORMATS.values():
        codes = inputs.codes_to_try(fmt, case.count(1500), case.rng)
        case.same_bits(answer(codes, fmt), oracle.classify(codes, fmt), show=class_name)


@check_for("classify")
def classes_of_made_up_formats(answer, case):
    """Codes of made-up formats of every kind: ieee, fn, fnuz, finite, unsigned, without subnormals or mantissa."""
    for fmt in made_up_formats(case, 8):
        codes = inputs.codes_to_try(fmt, case.count(200), case.rng)
        for shaped in inputs.shapes_of(codes):
            case.same_bits(answer(shaped, fmt), oracle.classify(shaped, fmt), show=class_name)


def _class_from(codes, fmt, *, special=None, nan=None, inf=None, zero=None, subnormal=None):
    """The right classes, with some of the conditions replaced: what most misconceptions of `classify` are made of."""
    classes = oracle.classify(codes, fmt)
    if special is not None:
        plain = _without_specials(codes, fmt)
        classes = torch.where(special, torch.tensor(int(NumberClass.NAN), dtype=torch.int32), plain)
    for condition, kind in ((subnormal, 1), (zero, 0), (inf, 3), (nan, 4)):
        if condition is not None:
            classes = torch.where(condition, torch.tensor(kind, dtype=torch.int32), classes)
    return classes


def _without_specials(codes, fmt):
    bottom = (_exponent(codes, fmt) == 0) & fmt.subnormals
    kinds = torch.where(_mantissa(codes, fmt) == 0, 0, 1)
    return torch.where(bottom, kinds, 2).to(torch.int32)


def _top(codes, fmt):
    return _exponent(codes, fmt) == 2**fmt.exponent_bits - 1


def _all_ones(codes, fmt):
    return _top(codes, fmt) & (_mantissa(codes, fmt) == 2**fmt.mantissa_bits - 1)


@misconception(
    "classify", "It gives every format infinities, as IEEE 754 does: E4M3 has none, and uses those codes for numbers."
)
def ieee_everywhere(codes, fmt):
    top, empty = _top(codes, fmt), _mantissa(codes, fmt) == 0
    return _class_from(codes, fmt, special=torch.zeros_like(codes, dtype=torch.bool), inf=top & empty, nan=top & ~empty)


@misconception("classify", "It takes only 0x7F for NaN in an fn format: 0xFF, with the sign set, is NaN too.")
def one_nan_in_fn(codes, fmt):
    if fmt.specials != "fn":
        return oracle.classify(codes, fmt)
    return _class_from(codes, fmt, special=_all_ones(codes, fmt) & (_sign(codes, fmt) == 0))


@misconception("classify", "It takes fnuz's 0x80 for -0: that code is the NaN, and there is no -0.")
def fnuz_negative_zero(codes, fmt):
    return oracle.classify(codes, fmt) if fmt.specials != "fnuz" else _without_specials(codes, fmt)


@misconception("classify", "It takes the whole top exponent of an fn format for NaN: only the code of all ones is.")
def top_exponent_is_nan_in_fn(codes, fmt):
    return oracle.classify(codes, fmt) if fmt.specials != "fn" else _class_from(codes, fmt, special=_top(codes, fmt))


@misconception("classify", "It takes fnuz's all-ones code for NaN, as in fn: there it is the largest number.")
def fnuz_like_fn(codes, fmt):
    if fmt.specials != "fnuz":
        return oracle.classify(codes, fmt)
    return _class_from(codes, fmt, nan=_all_ones(codes, fmt))


@misconception("classify", "It knows no subnormals: exponent field 0 with a mantissa counts as normal.")
def no_subnormals(codes, fmt):
    classes = oracle.classify(codes, fmt)
    return torch.where(classes == 1, torch.tensor(2, dtype=torch.int32), classes)


@misconception("classify", "It takes every code with exponent field 0 for zero.")
def bottom_exponent_is_zero(codes, fmt):
    classes = oracle.classify(codes, fmt)
    return torch.where(classes == 1, torch.tensor(0, dtype=torch.int32), classes)


@misconception(
    "classify", "It finds zeros and subnormals in formats that have none (`fmt.subnormals` is False, as in E8M0)."
)
def ignores_the_subnormals_flag(codes, fmt):
    bottom, empty = _exponent(codes, fmt) == 0, _mantissa(codes, fmt) == 0
    classes = oracle.classify(codes, fmt)
    plain = torch.where(bottom & (classes == 2), torch.where(empty, 0, 1), classes)
    return plain.to(torch.int32)


@misconception("classify", "It misses -0: only code 0 counts as zero.")
def only_code_zero_is_zero(codes, fmt):
    classes = oracle.classify(codes, fmt)
    return torch.where((classes == 0) & (_sign(codes, fmt) == 1), torch.tensor(1, dtype=torch.int32), classes)


@misconception("classify", "It takes every code with mantissa 0 for zero: powers of two have mantissa 0 too.")
def mantissa_zero_is_zero(codes, fmt):
    classes = oracle.classify(codes, fmt)
    empty = (_mantissa(codes, fmt) == 0) & (classes == NumberClass.NORMAL) & fmt.subnormals
    return torch.where(empty, torch.tensor(0, dtype=torch.int32), classes)


@misconception("classify", "It swaps infinity and NaN: in ieee formats, infinity has mantissa 0 and NaN any other.")
def infinity_and_nan_swapped(codes, fmt):
    classes = oracle.classify(codes, fmt)
    if fmt.specials != "ieee":
        return classes
    return torch.where(classes >= NumberClass.INF, 7 - classes, classes)


@misconception("classify", "It has no NaN in fn formats: the code with all exponent and mantissa bits set is one.")
def no_nan_in_fn(codes, fmt):
    return oracle.classify(codes, fmt) if fmt.specials != "fn" else _without_specials(codes, fmt)


# --- 1.5 decode -------------------------------------------------------------------------------------------------------


@check_for("decode", weight=2)
def values_of_eight_bit_formats(answer, case):
    """All codes of every registered format of up to 8 bits: E4M3, E5M2, both fnuz, E8M0, E2M3, E3M2, E2M1."""
    for fmt in (fmt for fmt in FORMATS.values() if fmt.width <= 8):
        codes = inputs.all_codes(fmt)
        case.same_bits(answer(codes, fmt), oracle.decode(codes, fmt))


@check_for("decode")
def values_of_wider_formats(answer, case):
    """BF16, FP16, TF32 and FP32: the ends of every binade, and random codes."""
    for fmt in (BF16, FP16, TF32, FP32):
        codes = inputs.codes_to_try(fmt, case.count(3000), case.rng)
        case.same_bits(answer(codes, fmt), oracle.decode(codes, fmt))


@check_for("decode")
def values_of_made_up_formats(answer, case):
    """Codes of made-up formats: E3M4 with bias 5, E6M1, an E4M3 with infinities, and random ones; 0 to 2 dimensions."""
    for fmt in made_up_formats(case, 8):
        codes = inputs.codes_to_try(fmt, case.count(500), case.rng)
        for shaped in inputs.shapes_of(codes):
            case.same_bits(answer(shaped, fmt), oracle.decode(shaped, fmt))


def _value(codes, fmt, *, leading=None, lowest=None, bias=None):
    """The value with parts of the rule replaced: the leading digit of subnormals, their exponent, the bias."""
    sign, exponent, mantissa = oracle.split_fields(codes, fmt)
    classes = oracle.classify(codes, fmt)
    small = (classes == 0) | (classes == 1)
    bias = fmt.bias if bias is None else bias
    digit = torch.where(small, 0.0 if leading is None else leading, 1.0).double()
    power = torch.where(small, (1 if lowest is None else lowest), exponent) - bias
    magnitude = torch.ldexp(digit + mantissa.double() / 2**fmt.mantissa_bits, power.double())
    magnitude[(classes == 0) & (leading is None)] = 0.0
    magnitude[classes == 3] = math.inf
    magnitude[classes == 4] = math.nan
    return torch.where(sign == 1, -magnitude, magnitude)


@misconception("decode", "It reads subnormals as normal numbers: with a leading 1 and the exponent field 0.")
def no_subnormal_values(codes, fmt):
    values = _value(codes, fmt, leading=1.0, lowest=0)
    return torch.where(oracle.classify(codes, fmt) == 0, oracle.decode(codes, fmt), values)


@misconception("decode", "It has one rule for all codes, with a leading 1: zero and the subnormals have none.")
def one_rule_for_all(codes, fmt):
    return _value(codes, fmt, leading=1.0, lowest=0)


@misconception("decode", "It forgets the hidden 1 of normal numbers: they are 1.mantissa, not 0.mantissa.")
def no_hidden_one(codes, fmt):
    sign, exponent, _ = oracle.split_fields(codes, fmt)
    values = oracle.decode(codes, fmt)
    hidden = torch.ldexp(torch.ones_like(values), (exponent - fmt.bias).double())
    magnitude = torch.where(oracle.classify(codes, fmt) == 2, values.abs() - hidden, values.abs())
    return torch.where(sign == 1, -magnitude, magnitude)


@misconception("decode", "It gives subnormals a leading 1: they are 0.mantissa, not 1.mantissa.")
def leading_one_for_subnormals(codes, fmt):
    values = _value(codes, fmt, leading=1.0)
    return torch.where(oracle.classify(codes, fmt) == 0, oracle.decode(codes, fmt), values)


@misconception(
    "decode", "It gives subnormals the exponent 0 - bias: theirs is 1 - bias, the same as the smallest normal's."
)
def subnormals_half_as_large(codes, fmt):
    return _value(codes, fmt, lowest=0)


@misconception("decode", "Its bias is one too large: every value is half of what it should be.")
def bias_one_too_large(codes, fmt):
    return _value(codes, fmt, bias=fmt.bias + 1)


@misconception("decode", "Its bias is 2^(e-1) for every format: IEEE's is 2^(e-1) - 1, and fmt.bias says which it is.")
def bias_from_the_width(codes, fmt):
    return _value(codes, fmt, bias=2 ** (fmt.exponent_bits - 1))


@misconception("decode", "It uses 2^(e-1) - 1 instead of fmt.bias: fnuz formats and made-up ones have another.")
def standard_bias_always(codes, fmt):
    return _value(codes, fmt, bias=2 ** (fmt.exponent_bits - 1) - 1)


@misconception("decode", "It loses the sign of zero: code 0x80 is -0.0.")
def zero_without_sign(codes, fmt):
    return oracle.decode(codes, fmt) + 0.0


@misconception("decode", "It flushes subnormals to zero.")
def flushes_subnormals(codes, fmt):
    values = oracle.decode(codes, fmt)
    return torch.where(oracle.classify(codes, fmt) == 1, values * 0.0, values)


@misconception("decode", "It ignores the special codes: infinities and NaNs come out as numbers.")
def specials_as_numbers(codes, fmt):
    sign, exponent, mantissa = oracle.split_fields(codes, fmt)
    small = (exponent == 0) & fmt.subnormals
    digit = torch.where(small, 0.0, 1.0).double() + mantissa.double() / 2**fmt.mantissa_bits
    magnitude = torch.ldexp(digit, (torch.where(small, 1, exponent) - fmt.bias).double())
    return torch.where(sign == 1, -magnitude, magnitude)


@misconception(
    "decode", "It gives E4M3 the specials of IEEE 754: its top exponent holds numbers up to 448, and one NaN."
)
def ieee_specials_in_fn(codes, fmt):
    values, top = oracle.decode(codes, fmt), _top(codes, fmt)
    if fmt.specials != "fn":
        return values
    infinite = torch.where(_sign(codes, fmt) == 1, -math.inf, math.inf).double()
    return torch.where(top, torch.where(_mantissa(codes, fmt) == 0, infinite, math.nan), values)


@misconception("decode", "It computes in float16, where values above 65504 and below 2^-24 do not exist.")
def through_float16(codes, fmt):
    return oracle.decode(codes, fmt).to(torch.float16).double()


@misconception("decode", "It drops the sign: every value comes out positive.")
def values_without_sign(codes, fmt):
    return oracle.decode(codes, fmt).abs()


@misconception("decode", "It makes both infinities positive: the one with the sign bit set is -infinity.")
def infinity_without_sign(codes, fmt):
    values = oracle.decode(codes, fmt)
    return torch.where(values.isinf(), math.inf, values)


@misconception("decode", "It takes fnuz's 0x80 for -0.0: that code is the NaN.")
def fnuz_nan_as_minus_zero(codes, fmt):
    values = oracle.decode(codes, fmt)
    return values if fmt.specials != "fnuz" else torch.where(values.isnan(), -0.0, values)


@misconception("decode", "It gives subnormals and a zero to formats that have none: code 0 of E8M0 is 2^-127.")
def subnormals_everywhere(codes, fmt):
    if fmt.subnormals:
        return oracle.decode(codes, fmt)
    steps = torch.ldexp(_mantissa(codes, fmt).double(), torch.tensor(1.0 - fmt.bias - fmt.mantissa_bits))
    small = torch.where(_sign(codes, fmt) == 1, -steps, steps)
    return torch.where(_exponent(codes, fmt) == 0, small, oracle.decode(codes, fmt))


@misconception("decode", "It counts the mantissa in steps of 1/(2^m - 1): its m bits are steps of 2^-m.")
def mantissa_over_all_ones(codes, fmt):
    if fmt.mantissa_bits == 0:
        return oracle.decode(codes, fmt)
    values, classes = oracle.decode(codes, fmt), oracle.classify(codes, fmt)
    digit = (classes == NumberClass.NORMAL).double()
    power = torch.where(digit == 1, _exponent(codes, fmt), 1) - fmt.bias
    magnitude = torch.ldexp(digit + _mantissa(codes, fmt).double() / (2**fmt.mantissa_bits - 1), power.double())
    signed = torch.where(_sign(codes, fmt) == 1, -magnitude, magnitude)
    return torch.where(classes >= NumberClass.INF, values, signed)


# --- 1.6 to 1.9: the landmarks of a format ----------------------------------------------------------------------------


def _each_format(answer, case, expected) -> None:
    for fmt in [*FORMATS.values(), *made_up_formats(case, 30)]:
        case.same_bits(answer(fmt), expected(fmt))


@check_for("max_finite")
def max_of_every_format(answer, case):
    """Every registered format and 44 others of every kind, against the largest of all their codes."""
    _each_format(answer, case, oracle.max_finite)


@check_for("min_normal")
def min_normal_of_every_format(answer, case):
    """Every registered format and 44 others of every kind, against the smallest of all their normal codes."""
    _each_format(answer, case, oracle.min_normal)


@check_for("min_subnormal")
def min_subnormal_of_every_format(answer, case):
    """Every registered format and 44 others of every kind, against the smallest of all their subnormal codes."""
    _each_format(answer, case, oracle.min_subnormal)


@check_for("machine_epsilon")
def epsilon_of_every_format(answer, case):
    """Every registered format and 44 others of every kind, against the gap above a power of two."""
    _each_format(answer, case, oracle.machine_epsilon)


def _largest(fmt, exponent_field: int, mantissa: int) -> float:
    return math.ldexp(2**fmt.mantissa_bits + mantissa, exponent_field - fmt.bias - fmt.mantissa_bits)


@misconception("max_finite", "It leaves out the top exponent in every format: only ieee formats reserve it.")
def reserves_the_top_exponent(fmt):
    return _largest(fmt, 2**fmt.exponent_bits - 2, 2**fmt.mantissa_bits - 1)


@misconception("max_finite", "It counts fn's NaN as a number: 480 for E4M3, whose all-ones code is NaN.")
def counts_the_nan(fmt):
    if fmt.specials != "fn":
        return oracle.max_finite(fmt)
    return _largest(fmt, 2**fmt.exponent_bits - 1, 2**fmt.mantissa_bits - 1)


@misconception("max_finite", "It uses the top exponent in ieee formats, which is kept for infinity and NaN.")
def uses_the_special_exponent(fmt):
    if fmt.specials != "ieee":
        return oracle.max_finite(fmt)
    return _largest(fmt, 2**fmt.exponent_bits - 1, 2**fmt.mantissa_bits - 1)


@misconception("max_finite", "It ends at a power of two: the mantissa's ones are missing.")
def mantissa_of_zeros(fmt):
    return math.ldexp(1.0, math.frexp(oracle.max_finite(fmt))[1] - 1)


@misconception("max_finite", "It uses 2^(e-1) - 1 instead of fmt.bias.")
def max_with_standard_bias(fmt):
    return math.ldexp(oracle.max_finite(fmt), fmt.bias - (2 ** (fmt.exponent_bits - 1) - 1))


@misconception("max_finite", "It takes 1.mantissa for 2, one step too far: (2 - 2^-m) is the largest significand.")
def next_power_of_two(fmt):
    return math.ldexp(1.0, math.frexp(oracle.max_finite(fmt))[1])


@misconception(
    "max_finite", "It takes away a mantissa step in fnuz and finite formats, whose all-ones code is a number."
)
def always_one_step_less(fmt):
    if fmt.specials == "ieee":
        return oracle.max_finite(fmt)
    if fmt.mantissa_bits == 0:
        return _largest(fmt, 2**fmt.exponent_bits - 2, 0)
    return _largest(fmt, 2**fmt.exponent_bits - 1, 2**fmt.mantissa_bits - 2)


@misconception("max_finite", "It forgets that an fn format without mantissa bits loses its whole top exponent to NaN.")
def fn_without_mantissa(fmt):
    if fmt.specials == "fn" and fmt.mantissa_bits == 0:
        return _largest(fmt, 2**fmt.exponent_bits - 1, 0)
    return oracle.max_finite(fmt)


@misconception(
    "max_finite", "It takes a mantissa step from every fn format, also where there is no mantissa bit (E8M0)."
)
def step_without_mantissa(fmt):
    if fmt.specials != "fn":
        return oracle.max_finite(fmt)
    return _largest(fmt, 2**fmt.exponent_bits - 1, 2**fmt.mantissa_bits - 2)


@misconception("min_normal", "It gives the smallest subnormal: a normal number has a leading 1.")
def smallest_of_all(fmt):
    return math.ldexp(1.0, 1 - fmt.bias - fmt.mantissa_bits)


@misconception(
    "min_normal", "It takes exponent field 0, which belongs to the subnormals: the smallest normal field is 1."
)
def exponent_field_zero(fmt):
    return math.ldexp(1.0, -fmt.bias)


@misconception("min_normal", "It takes exponent field 1 although a format without subnormals begins at 0 (E8M0).")
def ignores_no_subnormals(fmt):
    return math.ldexp(1.0, 1 - fmt.bias)


@misconception("min_normal", "It uses 2^(e-1) - 1 instead of fmt.bias.")
def normal_with_standard_bias(fmt):
    return math.ldexp(oracle.min_normal(fmt), fmt.bias - (2 ** (fmt.exponent_bits - 1) - 1))


@misconception("min_normal", "It is one exponent too high: 2 - bias instead of 1 - bias.")
def exponent_field_two(fmt):
    return math.ldexp(oracle.min_normal(fmt), 1)


@misconception("min_normal", "It takes the reciprocal of the largest value, as if the range were symmetric.")
def reciprocal_of_the_largest(fmt):
    return 1.0 / oracle.max_finite(fmt)


def _subnormal_or_none(fmt, value: float) -> float | None:
    return value if fmt.subnormals and fmt.mantissa_bits else None


@misconception("min_subnormal", "It gives the smallest normal number.")
def the_smallest_normal(fmt):
    return _subnormal_or_none(fmt, math.ldexp(1.0, 1 - fmt.bias))


@misconception("min_subnormal", "It takes the exponent 0 - bias: subnormals have 1 - bias.")
def subnormal_exponent_zero(fmt):
    return _subnormal_or_none(fmt, math.ldexp(1.0, -fmt.bias - fmt.mantissa_bits))


@misconception("min_subnormal", "It is twice too large: the last mantissa bit is worth 2^-m, not 2^-(m-1).")
def one_bit_short(fmt):
    return _subnormal_or_none(fmt, math.ldexp(1.0, 2 - fmt.bias - fmt.mantissa_bits))


@misconception("min_subnormal", "It gives a number for formats that have no subnormals.")
def always_a_number(fmt):
    return math.ldexp(1.0, 1 - fmt.bias - fmt.mantissa_bits)


@misconception(
    "min_subnormal", "It takes the exponent 0 - bias, and gives a number for formats without subnormals too."
)
def exponent_zero_always(fmt):
    return math.ldexp(1.0, -fmt.bias - fmt.mantissa_bits)


@misconception("min_subnormal", "It gives 0.0 instead of None where there are no subnormals.")
def zero_instead_of_none(fmt):
    return oracle.min_subnormal(fmt) or 0.0


@misconception("min_subnormal", "It gives the largest subnormal, with all mantissa bits set.")
def the_largest_subnormal(fmt):
    return _subnormal_or_none(fmt, (2**fmt.mantissa_bits - 1) * math.ldexp(1.0, 1 - fmt.bias - fmt.mantissa_bits))


@misconception("min_subnormal", "It uses 2^(e-1) - 1 instead of fmt.bias.")
def subnormal_with_standard_bias(fmt):
    shift = fmt.bias - (2 ** (fmt.exponent_bits - 1) - 1)
    return _subnormal_or_none(fmt, math.ldexp(1.0, 1 - fmt.bias - fmt.mantissa_bits + shift))


@misconception("machine_epsilon", "It gives half the gap, the largest rounding error (unit roundoff).")
def unit_roundoff(fmt):
    return 2.0 ** -(fmt.mantissa_bits + 1)


@misconception("machine_epsilon", "It counts the leading 1 among the mantissa bits: twice too large.")
def counts_the_leading_one(fmt):
    return 2.0 ** (1 - fmt.mantissa_bits)


@misconception("machine_epsilon", "It gives the smallest subnormal: epsilon is the gap next to 1, not next to 0.")
def gap_next_to_zero(fmt):
    return math.ldexp(1.0, 1 - fmt.bias - fmt.mantissa_bits)


@misconception("machine_epsilon", "It uses the exponent's bits instead of the mantissa's.")
def from_exponent_bits(fmt):
    return 2.0**-fmt.exponent_bits


@misconception("machine_epsilon", "It copies torch.finfo, which halves the epsilon of a format that has a larger bias.")
def as_finfo_for_fnuz(fmt):
    excess = fmt.bias - (2 ** (fmt.exponent_bits - 1) - 1)
    return math.ldexp(1.0, -fmt.mantissa_bits - excess)


# --- 1.10 ulp ---------------------------------------------------------------------------------------------------------


def _values_near(fmt, case):
    """Every finite value of a format (some of them for wide ones) and its float32 neighbours on either side."""
    codes = inputs.codes_to_try(fmt, case.count(300), case.rng)
    values = oracle.decode(codes[:: max(1, len(codes) // 1500)], fmt)
    landmarks = [oracle.max_finite(fmt), oracle.min_normal(fmt), oracle.min_subnormal(fmt) or 0.0]
    return inputs.around(
        torch.cat([values[values.isfinite()], torch.tensor([s * v for v in landmarks for s in (1, -1)])])
    )


@check_for("ulp", weight=2)
def at_values_of_registered_formats(answer, case):
    """At values of all registered formats and at the float32 next to them on either side, powers of two included."""
    for fmt in FORMATS.values():
        x = _values_near(fmt, case)
        case.same_bits(answer(x, fmt), oracle.ulp(x, fmt))


@check_for("ulp")
def at_values_of_made_up_formats(answer, case):
    """The same for made-up formats, in tensors of 0, 1 and 2 dimensions."""
    for fmt in made_up_formats(case, 8):
        for x in inputs.shapes_of(_values_near(fmt, case)):
            case.same_bits(answer(x, fmt), oracle.ulp(x, fmt))


@check_for("ulp")
def at_zero_and_beyond_the_range(answer, case):
    """0, -0, float32's subnormals, values far beyond the format's range, infinities and NaN; random values."""
    x = torch.cat([inputs.special_float32(), inputs.random_float32(case.count(400), case.rng)])
    for fmt in (E4M3, E5M2, BF16, FP16, FP32, E8M0, E2M1, E4M3FNUZ):
        case.same_bits(answer(x, fmt), oracle.ulp(x, fmt))


def _spacing(x, fmt, *, exponent=None, lowest=None, highest=None):
    """The spacing with parts of the rule replaced."""
    magnitude = x.double().abs()
    bottom, top = (math.frexp(edge)[1] - 1 for edge in (oracle.min_normal(fmt), oracle.max_finite(fmt)))
    exponent = torch.frexp(magnitude)[1] - 1 if exponent is None else exponent
    bottom, top = bottom if lowest is None else lowest, top if highest is None else highest
    exponent = torch.where(magnitude == 0, torch.tensor(bottom, dtype=exponent.dtype), exponent).clamp(bottom, top)
    spacing = torch.ldexp(torch.ones_like(magnitude), (exponent - fmt.mantissa_bits).double())
    return torch.where(x.isfinite(), spacing, math.nan)


@misconception(
    "ulp", "It uses log2 in float32, which rounds up just below a power of two: use the exponent bits or frexp."
)
def exponent_by_log2(x, fmt):
    return _spacing(x, fmt, exponent=torch.log2(x.abs()).nan_to_num(0, 0, 0).floor().to(torch.int32))


@misconception("ulp", "It lets the spacing shrink below the smallest normal: subnormals are evenly spaced.")
def no_floor(x, fmt):
    smallest = oracle.min_subnormal(fmt) or oracle.min_normal(fmt)
    floor = math.frexp(smallest)[1] - 1 - fmt.mantissa_bits
    return _spacing(x, fmt, lowest=min(floor, math.frexp(oracle.min_normal(fmt))[1] - 1))


@misconception("ulp", "It lets the spacing grow beyond the largest finite value, where there are no values any more.")
def no_ceiling(x, fmt):
    return _spacing(x, fmt, highest=128)


@misconception(
    "ulp", "It takes the exponent from frexp as it comes, which is one too large: frexp's fraction is in [0.5, 1)."
)
def frexp_off_by_one(x, fmt):
    return _spacing(x, fmt) * 2


@misconception("ulp", "It stops neither at the smallest normal nor at the largest finite value: the spacing does.")
def no_limits(x, fmt):
    magnitude = x.double().abs()
    spacing = torch.ldexp(torch.ones_like(magnitude), (torch.frexp(magnitude)[1] - 1 - fmt.mantissa_bits).double())
    return torch.where(x.isfinite(), spacing, math.nan)


@misconception("ulp", "It multiplies |x| by epsilon: the spacing is constant within a binade.")
def relative_to_x(x, fmt):
    magnitude = x.double().abs().clamp(oracle.min_normal(fmt), oracle.max_finite(fmt))
    return torch.where(x.isfinite(), magnitude * 2.0**-fmt.mantissa_bits, math.nan)


@misconception("ulp", "It gives the spacing next to 1 everywhere.")
def epsilon_everywhere(x, fmt):
    return torch.where(x.isfinite(), torch.full_like(x, 2.0**-fmt.mantissa_bits, dtype=torch.float64), math.nan)


@misconception("ulp", "It gives 0 for 0: the next value after 0 is the smallest subnormal away.")
def nothing_at_zero(x, fmt):
    return torch.where(x == 0, 0.0, _spacing(x, fmt))


@misconception("ulp", "It gives infinity a spacing: there is no next value after infinity.")
def infinity_has_a_spacing(x, fmt):
    return torch.where(x.isinf(), _spacing(torch.full_like(x, 3e38), fmt), _spacing(x, fmt))


@misconception(
    "ulp", "It begins the subnormals one exponent too low: their spacing is that of the smallest normal binade."
)
def floor_one_too_low(x, fmt):
    return _spacing(x, fmt, lowest=math.frexp(oracle.min_normal(fmt))[1] - 2)


@misconception("ulp", "It gives the gap below a power of two, which is half of the one above: 2^e begins its binade.")
def gap_below_powers_of_two(x, fmt):
    fraction, exponent = torch.frexp(x.double().abs())
    return _spacing(x, fmt, exponent=exponent - 1 - (fraction == 0.5).to(exponent.dtype))


# --- 1.11 add_float8 --------------------------------------------------------------------------------------------------


def _pairs(fmt):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    a, b = codes.repeat_interleave(256), codes.repeat(256)
    return a.view(fmt.torch_dtype), b.view(fmt.torch_dtype)


@check_for("add_float8", weight=2)
def every_pair(answer, case):
    """All 65,536 pairs of values of float8_e4m3fn, e5m2, e4m3fnuz and e5m2fnuz."""
    for fmt in FLOAT8:
        a, b = _pairs(fmt)
        case.same_bits(answer(a, b), oracle.add_float8(a, b, fmt))


@check_for("add_float8")
def other_shapes(answer, case):
    """Tensors of no dimension, of two, transposed and empty."""
    a, b = (part.reshape(256, 256) for part in _pairs(E4M3))
    for left, right in ((a, b), (a.t(), b.t()), (a[3, 4], b[3, 4]), (a[:0], b[:0])):
        case.same_bits(answer(left, right), oracle.add_float8(left.contiguous(), right.contiguous(), E4M3))


@misconception("add_float8", "It rounds the sum back to float8 before returning it.")
def back_to_float8(a, b):
    return (a.float() + b.float()).to(a.dtype).float()


@misconception(
    "add_float8", "It adds in bfloat16, whose 8 significant bits are too few for the sum of a large and a small value."
)
def in_bfloat16(a, b):
    return (a.to(torch.bfloat16) + b.to(torch.bfloat16)).float()


@misconception("add_float8", "It adds in float16: E5M2's sums overflow, and small parts are lost.")
def in_float16(a, b):
    return (a.to(torch.float16) + b.to(torch.float16)).float()


@misconception("add_float8", "It adds the codes instead of the values.")
def adds_the_codes(a, b):
    return (a.view(torch.uint8) + b.view(torch.uint8)).view(a.dtype).float()


@misconception("add_float8", "It clamps the sum to E4M3's range: float32 has room for it.")
def clamps_the_sum(a, b):
    return (a.float() + b.float()).clamp(-448, 448)


@misconception("add_float8", "It replaces NaN by 0.")
def drops_nans(a, b):
    return (a.float() + b.float()).nan_to_num(0.0, math.inf, -math.inf)


# --- questions about the real code ------------------------------------------------------------------------------------

question_for(
    "1.B",
    0x7F,
    "Right: isnan() masks the sign off (0x7F) and compares with 0x7F, so 0x7F and 0xFF are both NaN.",
    "Look for isnan() in Float8_e4m3fn.h: which number does it compare the masked bits with?",
    {
        0xFF: "0xFF is NaN too, but the header clears the sign bit before it compares.",
        0x78: "0x78 would be the first special code of an IEEE format. E4M3 keeps 0x78 for the number 256.",
        0x7E: "0x7E is the largest number, 448.",
    },
)
question_for(
    "1.C",
    0x8000,
    "Right: 0x7FFF plus the kept bit, 1. A tie then carries into the kept bits; with 0 kept it would not.",
    "Look for round_to_nearest_even() in BFloat16.h: the bias is 0x7FFF plus a bit. Which bit, and what is it here?",
    {
        0x7FFF: "That is the bias when the kept bit is 0. Here the last bit that stays is 1.",
        1: "That is the kept bit alone; the header adds 0x7FFF to it.",
    },
)
question_for(
    "1.A",
    0.25,
    "Right: 2 mantissa bits, so the value after 1.0 is 1.25. torch.finfo says half of that.",
    "How many mantissa bits does it have? Write the value after 1.0 with them.",
    {0.125: "That is what torch.finfo says. Decode the code after the one of 1.0 and compare."},
)
