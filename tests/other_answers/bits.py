"""Other right answers to the exercises of chapter 01."""

import math

import numpy as np
import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.bits import NumberClass, classify, decode, join_fields, max_finite, min_normal, split_fields
from lowprec_lab.formats import FORMATS

# --- 1.1 bit_pattern ---


@other("bit_pattern")
def by_bytes_of_a_word(x):
    parts = x.contiguous().reshape(-1).view(torch.uint8).reshape(-1, 4).to(torch.int64)
    word = parts[:, 0] + 256 * (parts[:, 1] + 256 * (parts[:, 2] + 256 * parts[:, 3]))
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32).reshape(x.shape)


@other("bit_pattern")
def by_half_words(x):
    halves = x.contiguous().reshape(-1).view(torch.int16).reshape(-1, 2).to(torch.int32)
    return ((halves[:, 1] << 16) | (halves[:, 0] & 0xFFFF)).reshape(x.shape)


@other("bit_pattern")
def by_numpy_view(x):
    return torch.from_numpy(x.contiguous().numpy().view(np.int32).copy())


@other("bit_pattern")
def by_struct(x):
    import struct

    words = struct.unpack(f"<{x.numel()}i", x.contiguous().numpy().tobytes())
    return torch.tensor(words, dtype=torch.int32).reshape(x.shape)


@other("bit_pattern")
def one_word_at_a_time(x):
    raw = x.contiguous().numpy().tobytes()
    words = [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)]
    return torch.tensor(words, dtype=torch.int32).reshape(x.shape)


# --- 1.2 split_fields, 1.3 join_fields ---


@other("split_fields")
def by_division(codes, fmt):
    rest = codes.to(torch.int64) % 2**fmt.width
    mantissa, rest = rest % 2**fmt.mantissa_bits, rest // 2**fmt.mantissa_bits
    exponent, sign = rest % 2**fmt.exponent_bits, rest // 2**fmt.exponent_bits
    return sign.int(), exponent.int(), mantissa.int()


@other("split_fields")
def by_text(codes, fmt):
    signs, exponents, mantissas = [], [], []
    first = fmt.width - fmt.mantissa_bits - fmt.exponent_bits
    for code in codes.reshape(-1).tolist():
        digits = format(code & (2**fmt.width - 1), f"0{fmt.width}b")
        signs.append(int("0" + digits[:first], 2))
        exponents.append(int(digits[first : first + fmt.exponent_bits], 2))
        mantissas.append(int("0" + digits[first + fmt.exponent_bits :], 2))
    return tuple(torch.tensor(part, dtype=torch.int32).reshape(codes.shape) for part in (signs, exponents, mantissas))


@other("split_fields")
def in_uint32(codes, fmt):
    unsigned = codes.numpy().astype(np.uint32)
    above = fmt.exponent_bits + fmt.mantissa_bits
    sign = (unsigned >> np.uint32(above)) & np.uint32(fmt.signed) if above < 32 else np.zeros_like(unsigned)
    exponent = (unsigned >> np.uint32(fmt.mantissa_bits)) & np.uint32((1 << fmt.exponent_bits) - 1)
    mantissa = unsigned & np.uint32((1 << fmt.mantissa_bits) - 1)
    return tuple(torch.tensor(part.astype(np.int32)) for part in (sign, exponent, mantissa))


@other("split_fields")
def bit_by_bit(codes, fmt):
    def field(start, width):
        total = torch.zeros_like(codes)
        for place in range(width):
            total = total + ((codes >> (start + place)) & 1) * 2**place
        return total

    e, m = fmt.exponent_bits, fmt.mantissa_bits
    return field(m + e, 1 if fmt.signed else 0), field(m, e), field(0, m)


@other("split_fields")
def by_subtraction(codes, fmt):
    m, e = fmt.mantissa_bits, fmt.exponent_bits
    mantissa = codes - ((codes >> m) << m)
    exponent = (codes - ((codes >> (m + e)) << (m + e)) - mantissa) >> m if m + e < 32 else codes >> m
    sign = torch.zeros_like(codes)
    if fmt.signed:
        sign[(codes & (1 << (m + e) if m + e < 31 else -(2**31))) != 0] = 1
    return sign, exponent, mantissa


@other("join_fields")
def by_products(sign, exponent, mantissa, fmt):
    code = (sign.long() * 2**fmt.exponent_bits + exponent.long()) * 2**fmt.mantissa_bits + mantissa.long()
    return torch.where(code < 2**31, code, code - 2**32).to(torch.int32)


@other("join_fields")
def from_text(sign, exponent, mantissa, fmt):
    codes = []
    for s, e, m in zip(*(part.reshape(-1).tolist() for part in (sign, exponent, mantissa)), strict=True):
        digits = str(s) if fmt.signed else ""
        digits += format(e, f"0{fmt.exponent_bits}b")
        digits += format(m, f"0{fmt.mantissa_bits}b") if fmt.mantissa_bits else ""
        codes.append(int(digits, 2))
    return torch.tensor(codes, dtype=torch.int64).to(torch.int32).reshape(sign.shape)


@other("join_fields")
def into_uint32(sign, exponent, mantissa, fmt):
    s, e, m = (part.numpy().astype(np.uint32) for part in (sign, exponent, mantissa))
    code = m + e * np.uint32(2**fmt.mantissa_bits)
    if fmt.signed:
        code = code + s * np.uint32(2 ** (fmt.width - 1))
    return torch.tensor(code.astype(np.uint32).view(np.int32))


@other("join_fields")
def sign_by_where(sign, exponent, mantissa, fmt):
    magnitude = (exponent << fmt.mantissa_bits) + mantissa
    if not fmt.signed:
        return magnitude
    top = -(2**31) if fmt.width == 32 else 2 ** (fmt.width - 1)
    return torch.where(sign == 0, magnitude, magnitude + top)


@other("join_fields")
def by_doubling(sign, exponent, mantissa, fmt):
    code = sign.clone()
    for _ in range(fmt.exponent_bits):
        code = code + code
    code = code + exponent
    for _ in range(fmt.mantissa_bits):
        code = code + code
    return code + mantissa


# --- 1.4 classify ---


@other("classify")
def by_magnitude(codes, fmt):
    magnitude = codes & (2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1)
    first_normal, top = 2**fmt.mantissa_bits, (2**fmt.exponent_bits - 1) * 2**fmt.mantissa_bits
    classes = torch.full(codes.shape, 2, dtype=torch.int32)
    if fmt.subnormals:
        classes = torch.where(magnitude < first_normal, 1, classes)
        classes = torch.where(magnitude == 0, 0, classes)
    if fmt.specials == "ieee":
        classes = torch.where(magnitude == top, 3, classes)
        classes = torch.where(magnitude > top, 4, classes)
    if fmt.specials == "fn":
        classes = torch.where(magnitude == top + first_normal - 1, 4, classes)
    if fmt.specials == "fnuz":
        classes = torch.where((magnitude == 0) & (codes != 0), 4, classes)
    return classes.to(torch.int32)


@other("classify")
def one_code_at_a_time(codes, fmt):
    def kind(code):
        code %= 2**fmt.width
        mantissa, exponent = code % 2**fmt.mantissa_bits, code // 2**fmt.mantissa_bits % 2**fmt.exponent_bits
        if fmt.specials == "ieee" and exponent + 1 == 2**fmt.exponent_bits:
            return NumberClass.NAN if mantissa else NumberClass.INF
        if fmt.specials == "fn" and code % 2 ** (fmt.width - fmt.signed) == 2 ** (fmt.width - fmt.signed) - 1:
            return NumberClass.NAN
        if fmt.specials == "fnuz" and code == 2 ** (fmt.width - 1):
            return NumberClass.NAN
        if exponent > 0 or not fmt.subnormals:
            return NumberClass.NORMAL
        return NumberClass.SUBNORMAL if mantissa > 0 else NumberClass.ZERO

    kinds = [int(kind(code)) for code in codes.reshape(-1).tolist()]
    return torch.tensor(kinds, dtype=torch.int32).reshape(codes.shape)


@other("classify")
def by_numpy_select(codes, fmt):
    sign, exponent, mantissa = (part.numpy() for part in split_fields(codes, fmt))
    full, last = 2**fmt.exponent_bits - 1, 2**fmt.mantissa_bits - 1
    inf = (fmt.specials == "ieee") & (exponent == full) & (mantissa == 0)
    nan = {
        "ieee": (exponent == full) & (mantissa != 0),
        "fn": (exponent == full) & (mantissa == last),
        "fnuz": (sign == 1) & (exponent == 0) & (mantissa == 0),
        "finite": np.zeros(exponent.shape, bool),
    }[fmt.specials]
    small = (exponent == 0) & fmt.subnormals
    kinds = np.select([nan, inf, small & (mantissa == 0), small], [4, 3, 0, 1], 2)
    return torch.tensor(kinds, dtype=torch.int32)


@other("classify")
def by_adding_conditions(codes, fmt):
    sign, exponent, mantissa = split_fields(codes, fmt)
    has_mantissa = (mantissa != 0).to(torch.int32)
    ieee_top = (exponent == 2**fmt.exponent_bits - 1).to(torch.int32) * (fmt.specials == "ieee")
    bottom = (exponent == 0).to(torch.int32) * fmt.subnormals
    kinds = (1 - bottom - ieee_top) * 2 + bottom * has_mantissa + ieee_top * (3 + has_mantissa)
    if fmt.specials == "fn":
        ones = torch.ones_like(sign)
        last = join_fields(0 * ones, (2**fmt.exponent_bits - 1) * ones, (2**fmt.mantissa_bits - 1) * ones, fmt)
        kinds[join_fields(0 * sign, exponent, mantissa, fmt) == last] = NumberClass.NAN
    if fmt.specials == "fnuz":
        kinds += 4 * ((codes != 0) & (kinds == 0)).to(torch.int32)
    return kinds.to(torch.int32)


# --- 1.5 decode ---


@other("decode")
def one_value_at_a_time(codes, fmt):
    values, full = [], 2**fmt.exponent_bits - 1
    ones, minus_zero = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1, 2 ** (fmt.width - 1)
    nan_codes = {"fn": (ones, 2**fmt.width - 1), "fnuz": (minus_zero,)}.get(fmt.specials, ())
    for code in codes.reshape(-1).tolist():
        code = code % 2**fmt.width
        sign = -1.0 if fmt.signed and code >= 2 ** (fmt.width - 1) else 1.0
        magnitude = code % 2 ** (fmt.exponent_bits + fmt.mantissa_bits)
        exponent, mantissa = divmod(magnitude, 2**fmt.mantissa_bits)
        if fmt.specials == "ieee" and exponent == full:
            value = math.nan if mantissa else math.inf
        elif code in nan_codes:
            value = math.nan
        elif exponent or not fmt.subnormals:
            value = math.ldexp(mantissa + 2**fmt.mantissa_bits, exponent - fmt.bias - fmt.mantissa_bits)
        else:
            value = math.ldexp(mantissa, 1 - fmt.bias - fmt.mantissa_bits)
        values.append(sign * value)
    return torch.tensor(values, dtype=torch.float64).reshape(codes.shape)


@other("decode")
def by_exact_fractions(codes, fmt):
    from fractions import Fraction

    def value(code):
        digits = bin(code % 2**fmt.width)[2:].zfill(fmt.width)
        minus = fmt.signed and digits[0] == "1"
        field = int(digits[int(fmt.signed) :][: fmt.exponent_bits], 2)
        fraction = Fraction(int("0" + digits[fmt.width - fmt.mantissa_bits :], 2), 2**fmt.mantissa_bits)
        if field > 0 or not fmt.subnormals:
            fraction = (1 + fraction) * Fraction(2) ** (field - fmt.bias)
        else:
            fraction = fraction * Fraction(2) ** (1 - fmt.bias)
        try:
            return -float(fraction) if minus else float(fraction)
        except OverflowError:
            return math.inf

    distinct, where = codes.reshape(-1).unique(return_inverse=True)
    values = torch.tensor([value(code) for code in distinct.tolist()], dtype=torch.float64)
    kinds, signs = classify(distinct, fmt), split_fields(distinct, fmt)[0]
    infinite = torch.where(signs == 1, -math.inf, math.inf).double()
    values = torch.where(kinds == NumberClass.INF, infinite, values)
    values = torch.where(kinds == NumberClass.NAN, math.nan, values)
    return values[where].reshape(codes.shape)


@other("decode")
def bits_of_a_float64(codes, fmt):
    sign, exponent, mantissa = (part.long() for part in split_fields(codes, fmt))
    kinds = classify(codes, fmt)
    normal = ((exponent - fmt.bias + 1023) << 52) | (mantissa << (52 - fmt.mantissa_bits))
    small = (mantissa.double() * 2.0 ** (1 - fmt.bias - fmt.mantissa_bits)).view(torch.int64)
    bits = torch.where(kinds == NumberClass.NORMAL, normal, small)
    bits = torch.where(kinds == NumberClass.INF, torch.tensor(math.inf, dtype=torch.float64).view(torch.int64), bits)
    bits = torch.where(kinds == NumberClass.NAN, torch.tensor(math.nan, dtype=torch.float64).view(torch.int64), bits)
    return (bits | (sign << 63)).view(torch.float64)


@other("decode")
def by_moving_the_fields(codes, fmt):
    width = fmt.exponent_bits + fmt.mantissa_bits
    magnitude, bias = codes.long() & (2**width - 1), fmt.bias
    if not fmt.subnormals:  # one binade up, so that no exponent field is 0
        moved, bias = magnitude + 2**fmt.mantissa_bits, bias + 1
    else:
        moved = magnitude
    values = (moved << (52 - fmt.mantissa_bits)).view(torch.float64) * 2.0**1000 * 2.0 ** (23 - bias)
    if fmt.specials == "ieee":
        top = (2**fmt.exponent_bits - 1) << fmt.mantissa_bits
        values[magnitude == top] = math.inf
        values[magnitude > top] = math.nan
    if fmt.specials == "fn":
        values[magnitude == 2**width - 1] = math.nan
    if fmt.signed:
        values = torch.where((codes >> width) & 1 == 1, -values, values)
    if fmt.specials == "fnuz":
        values[codes == 1 << width] = math.nan
    return values


@other("decode")
def by_table(codes, fmt):
    def rule(all_codes):
        m = 2.0**fmt.mantissa_bits
        fields = np.floor_divide(all_codes, 2**fmt.mantissa_bits)
        exponent = fields % 2**fmt.exponent_bits
        normal = (exponent > 0) | (not fmt.subnormals)
        power = np.where(normal, exponent, 1) - fmt.bias
        values = (normal + (all_codes % 2**fmt.mantissa_bits) / m) * np.exp2(power.astype(np.float64))
        if fmt.specials == "ieee":
            top = exponent == 2**fmt.exponent_bits - 1
            values[top] = np.where(all_codes[top] % 2**fmt.mantissa_bits == 0, np.inf, np.nan)
        if fmt.specials == "fn":
            values[all_codes % 2 ** (fmt.width - fmt.signed) == 2 ** (fmt.width - fmt.signed) - 1] = np.nan
        values[fields >= 2**fmt.exponent_bits] *= -1.0
        if fmt.specials == "fnuz":
            values[all_codes == 2 ** (fmt.width - 1)] = np.nan
        return values

    unsigned = codes.numpy().astype(np.int64) % 2**fmt.width
    if fmt.width <= 16:
        return torch.tensor(rule(np.arange(2**fmt.width))[unsigned])
    return torch.tensor(rule(unsigned.reshape(-1)).reshape(codes.shape))


@other("decode")
def native_where_there_is_one(codes, fmt):
    small = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
    if fmt.torch_dtype in small:
        return codes.to(torch.uint8).view(fmt.torch_dtype).to(torch.float64)
    if fmt.torch_dtype in (torch.float16, torch.bfloat16):
        return codes.to(torch.int16).view(fmt.torch_dtype).to(torch.float64)
    if fmt.torch_dtype == torch.float32:
        return codes.contiguous().view(torch.float32).to(torch.float64)
    sign, exponent, mantissa = split_fields(codes, fmt)
    kinds = classify(codes, fmt)
    hidden = (kinds == NumberClass.NORMAL).double()
    power = torch.maximum(exponent, torch.tensor(int(fmt.subnormals))) - fmt.bias
    values = (hidden + mantissa / torch.tensor(2.0**fmt.mantissa_bits, dtype=torch.float64)) * torch.exp2(
        power.double()
    )
    values = values.masked_fill(kinds == NumberClass.INF, math.inf).masked_fill(kinds == NumberClass.NAN, math.nan)
    return torch.copysign(values, 0.5 - sign.double())


# --- 1.6 max_finite ---


@other("max_finite")
def by_decoding_the_last_code(fmt):
    code = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1
    if fmt.specials == "ieee":
        code -= 2**fmt.mantissa_bits
    if fmt.specials == "fn":
        code -= 1
    return decode(torch.tensor([code], dtype=torch.int32), fmt).item()


@other("max_finite")
def as_a_fraction(fmt):
    from fractions import Fraction

    exponent = 2**fmt.exponent_bits - 1 - fmt.bias
    significand = 2 - Fraction(1, 2**fmt.mantissa_bits)
    if fmt.specials == "ieee":
        exponent -= 1
    if fmt.specials == "fn":
        significand -= Fraction(1, 2**fmt.mantissa_bits)
    if significand < 1:  # there was one value in the top binade, and it is NaN
        exponent, significand = exponent - 1, Fraction(1)
    return float(significand * Fraction(2) ** exponent)


@other("max_finite")
def by_adding_powers(fmt):
    top = 2**fmt.exponent_bits - 1 - fmt.bias - (fmt.specials == "ieee")
    powers = [2.0 ** (top - place) for place in range(fmt.mantissa_bits + 1)]
    if fmt.specials == "fn":
        powers = powers[:-1] or [2.0 ** (top - 1)]
    return sum(powers)


@other("max_finite")
def by_bisection(fmt):
    low, high = 0, 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1
    while low < high:
        middle = (low + high + 1) // 2
        special = classify(torch.tensor([middle], dtype=torch.int32), fmt).item() > NumberClass.NORMAL
        low, high = (low, middle - 1) if special else (middle, high)
    return float(decode(torch.tensor(low, dtype=torch.int32), fmt))


# --- 1.7 min_normal ---


@other("min_normal")
def by_decoding_the_first(fmt):
    code = 2**fmt.mantissa_bits if fmt.subnormals else 0
    return decode(torch.tensor([code], dtype=torch.int32), fmt).item()


@other("min_normal")
def as_a_power(fmt):
    return 2.0 ** (1 - fmt.bias) if fmt.subnormals else 2.0**-fmt.bias


@other("min_normal")
def by_hex_text(fmt):
    return float.fromhex(f"0x1p{-fmt.bias}") * (1 + fmt.subnormals)


@other("min_normal")
def from_the_largest(fmt):
    _, exponent = math.frexp(max_finite(fmt))
    binades = 2**fmt.exponent_bits - 1 - fmt.subnormals
    if fmt.specials == "ieee" or (fmt.specials == "fn" and fmt.mantissa_bits == 0):
        binades -= 1
    return math.ldexp(0.5, exponent - binades)


# --- 1.9 min_subnormal ---


@other("min_subnormal")
def by_decoding_code_one(fmt):
    if fmt.mantissa_bits and fmt.subnormals:
        return decode(torch.tensor([1], dtype=torch.int32), fmt).item()
    return None


@other("min_subnormal")
def by_halving(fmt):
    if not fmt.subnormals or not fmt.mantissa_bits:
        return None
    value = min_normal(fmt)
    for _ in range(fmt.mantissa_bits):
        value /= 2
    return value


@other("min_subnormal")
def as_a_product(fmt):
    exists = fmt.subnormals and fmt.mantissa_bits > 0
    return 2.0 ** (1 - fmt.bias) * 2.0**-fmt.mantissa_bits if exists else None


@other("min_subnormal")
def by_class(fmt):
    first = torch.tensor([1], dtype=torch.int32)
    return float(decode(first, fmt)) if classify(first, fmt) == NumberClass.SUBNORMAL else None


# --- 1.8 machine_epsilon ---


@other("machine_epsilon")
def as_one_division(fmt):
    return 1 / (1 << fmt.mantissa_bits)


@other("machine_epsilon")
def by_halving_one(fmt):
    gap = 1.0
    for _ in range(fmt.mantissa_bits):
        gap = gap * 0.5
    return gap


@other("machine_epsilon")
def from_two_values(fmt):
    if fmt.mantissa_bits == 0:
        return 1.0
    # Exponent field 1 begins at code 2^m; the next code is the next value, or the NaN of a very small fn format.
    start = 2**fmt.mantissa_bits
    a, b = decode(torch.tensor([start, start + 1], dtype=torch.int32), fmt).tolist()
    return b / a - 1 if math.isfinite(b) else 0.5


@other("machine_epsilon")
def by_power_of_a_fraction(fmt):
    from fractions import Fraction

    return float(Fraction(1, 2) ** fmt.mantissa_bits)


# --- 1.10 ulp ---


@other("ulp")
def from_the_exponent_bits(x, fmt):
    magnitude = x.double().abs()
    exponent = (magnitude.view(torch.int64) >> 52) - 1023
    lowest, highest = (math.frexp(edge)[1] - 1 for edge in (min_normal(fmt), max_finite(fmt)))
    power = exponent.clamp(lowest, highest) - fmt.mantissa_bits
    spacing = ((power + 1023) << 52).view(torch.float64)
    return torch.where(torch.isfinite(x), spacing, torch.tensor(math.nan, dtype=torch.float64))


@other("ulp")
def one_spacing_at_a_time(x, fmt):
    lowest, highest = min_normal(fmt), max_finite(fmt)
    spacings = []
    for value in x.reshape(-1).tolist():
        if math.isnan(value) or math.isinf(value):
            spacings.append(math.nan)
            continue
        value = min(max(abs(value), lowest), highest)
        spacings.append(math.ldexp(1.0, math.frexp(value)[1] - 1 - fmt.mantissa_bits))
    return torch.tensor(spacings, dtype=torch.float64).reshape(x.shape)


@other("ulp")
def by_numpy_spacing(x, fmt):
    magnitude = np.abs(x.numpy().astype(np.float64))
    inside = np.clip(magnitude, min_normal(fmt), max_finite(fmt))
    spacing = np.where(np.isfinite(magnitude), np.spacing(inside) * 2.0 ** (52 - fmt.mantissa_bits), np.nan)
    return torch.tensor(spacing)


@other("ulp")
def by_bucketize(x, fmt):
    lowest, highest = (math.frexp(edge)[1] - 1 for edge in (min_normal(fmt), max_finite(fmt)))
    starts = torch.tensor([2.0**e for e in range(lowest + 1, highest + 1)], dtype=torch.float64)
    binade = torch.bucketize(x.double().abs().contiguous(), starts, right=True)
    spacing = torch.exp2((binade + lowest - fmt.mantissa_bits).double())
    spacing[~x.isfinite()] = math.nan
    return spacing


# --- 1.11 add_float8 ---


@other("add_float8")
def in_float64(a, b):
    return (a.to(torch.float64) + b.to(torch.float64)).to(torch.float32)


@other("add_float8")
def by_own_decode(a, b):
    fmt = next(fmt for fmt in FORMATS.values() if fmt.torch_dtype == a.dtype)
    values = [decode(part.contiguous().view(torch.uint8).to(torch.int32), fmt) for part in (a, b)]
    return (values[0] + values[1]).float()


@other("add_float8")
def by_a_table_of_values(a, b):
    table = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(a.dtype).float()
    return table[a.contiguous().view(torch.uint8).int()] + table[b.contiguous().view(torch.uint8).int()]


@other("add_float8")
def in_numpy(a, b):
    with np.errstate(invalid="ignore"):
        return torch.tensor(np.add(a.float().numpy(), b.float().numpy(), dtype=np.float32))


@other("add_float8")
def in_whole_steps(a, b):
    left, right = a.double(), b.double()
    steps = (left.nan_to_num(0, 0, 0) * 2**17).long() + (right.nan_to_num(0, 0, 0) * 2**17).long()
    exact = (steps.double() / 2**17).float()
    both_minus_zero = (left == 0) & (right == 0) & left.signbit() & right.signbit()
    exact = torch.where(both_minus_zero, -0.0, exact)
    return torch.where(left.isfinite() & right.isfinite(), exact, (left + right).float())
