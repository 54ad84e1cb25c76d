"""Other right answers to the exercises of chapter 02."""

import math

import numpy as np
import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.bits import classify, decode, max_finite, min_normal, ulp
from lowprec_lab.formats import FORMATS, FP32
from lowprec_lab.rounding import encode, round_to

# --- 2.1 truncate_to_bfloat16, 2.2 round_to_bfloat16 ---


@other("truncate_to_bfloat16")
def by_upper_half_words(x):
    halves = x.contiguous().reshape(-1).view(torch.int16).reshape(-1, 2)[:, 1].reshape(x.shape)
    return torch.where(x.isnan(), torch.tensor(0x7FC0, dtype=torch.int16), halves).view(torch.bfloat16)


@other("truncate_to_bfloat16")
def by_masking_first(x):
    cut = (x.view(torch.int32) & -65536).view(torch.float32)  # exact in bfloat16, so the cast rounds nothing
    return torch.where(x.isnan(), x, cut).to(torch.bfloat16)


@other("truncate_to_bfloat16")
def back_from_the_nearest(x):
    near = x.to(torch.bfloat16)
    too_far = near.float().abs() > x.abs()
    codes = near.view(torch.int16) - too_far.to(torch.int16)
    return torch.where(too_far, codes, near.view(torch.int16)).view(torch.bfloat16)


@other("truncate_to_bfloat16")
def in_numpy(x):
    bits = x.contiguous().numpy().view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    upper = np.where(np.isnan(x.numpy()), np.uint16(0x7FFF), upper).astype(np.uint16)
    return torch.from_numpy(np.asarray(upper).view(np.int16).reshape(tuple(x.shape)).copy()).view(torch.bfloat16)


@other("round_to_bfloat16")
def by_native_cast(x):
    return x.to(torch.bfloat16)


@other("round_to_bfloat16")
def by_cases_of_the_lower_half(x):
    bits = x.view(torch.int32)
    upper, lower = bits >> 16, bits & 0xFFFF
    up = (lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))
    codes = torch.where(x.isnan(), 0x7FC0, upper + up.int())
    return codes.to(torch.int16).view(torch.bfloat16)


@other("round_to_bfloat16")
def in_numpy_unsigned(x):
    bits = np.atleast_1d(x.contiguous().numpy()).view(np.uint32).astype(np.uint64)
    odd = (bits >> np.uint64(16)) & np.uint64(1)
    codes = ((bits + np.uint64(0x7FFF) + odd) >> np.uint64(16)).astype(np.uint16)
    codes[np.isnan(np.atleast_1d(x.numpy()))] = 0xFFC1
    return torch.from_numpy(codes.view(np.int16).reshape(tuple(x.shape))).view(torch.bfloat16)


@other("round_to_bfloat16")
def by_distance_to_both_neighbours(x):
    low = torch.where(x.isnan(), 0.0, x).view(torch.int32) & -65536
    below, wide = low.view(torch.float32).double(), x.double()
    step = torch.ldexp(torch.ones_like(wide), (((low >> 23) & 0xFF).clamp(min=1) - 134).double())
    above = below.abs() + step
    nearer = above - wide.abs() < wide.abs() - below.abs()
    tie = above - wide.abs() == wide.abs() - below.abs()
    up = (nearer | (tie & ((low >> 16) & 1 == 1))) & x.isfinite()
    codes = torch.where(x.isnan(), 0x7FC0, (low >> 16) + up.int())
    return codes.to(torch.int16).view(torch.bfloat16)


# --- 2.3 round_to ---


@other("round_to")
def by_table_and_search(x, fmt, mode="nearest_even", overflow="saturate"):
    def values_around(sizes):
        """(lo, hi) next to each magnitude; from the table of all values where that is not too long."""
        if fmt.width > 12:
            step = ulp(sizes.float(), fmt)
            low = (sizes / step).floor() * step
            return low, torch.where(low == sizes, low, low + step)
        codes = torch.arange(2 ** (fmt.exponent_bits + fmt.mantissa_bits), dtype=torch.int32)
        table = decode(codes[classify(codes, fmt) < 3], fmt)
        table = torch.cat([table, table[-1:] + ulp(table[-1:].float(), fmt)])
        place = (torch.searchsorted(table, sizes.contiguous(), right=True) - 1).clamp(0, len(table) - 1)
        low = table[place]
        high = table[(place + 1).clamp(max=len(table) - 1)]
        return low, torch.where(low >= sizes, low, torch.where(sizes > table[-1], sizes, high))

    if mode not in ("nearest_even", "nearest_away", "toward_zero", "up", "down"):
        raise ValueError(f"there is no mode {mode!r}")
    if overflow not in ("saturate", "to_special") or (overflow == "to_special" and fmt.specials == "finite"):
        raise ValueError(f"overflow {overflow!r} does not exist for {fmt.name}")
    sizes = torch.where(x.isfinite(), x, 0.0).double().abs()
    low, high = values_around(sizes)
    negative, gap = x.signbit(), ulp(sizes.float(), fmt)
    if mode in ("nearest_even", "nearest_away"):
        down, up = sizes - low, high - sizes
        tie_up = (low / gap) % 2 == 1 if mode == "nearest_even" else torch.ones_like(negative)
        result = torch.where((up < down) | ((up == down) & tie_up), high, low)
        inwards = torch.zeros_like(negative)
    else:
        inwards = {"toward_zero": torch.ones_like(negative), "up": negative, "down": ~negative}[mode]
        result = torch.where(inwards, low, high)
    if not fmt.subnormals:
        result = result.clamp(min=min_normal(fmt))
    top = max_finite(fmt)
    special = {"ieee": math.inf}.get(fmt.specials, math.nan) if overflow == "to_special" else top
    result = torch.where(result > top, torch.where(inwards, top, special), result)
    result = torch.where(x.isinf(), special, result)
    result = torch.where(x.isnan(), math.nan, result)
    if not fmt.signed:
        return torch.where(x < 0, math.nan, result).float()
    signed = torch.where(negative, -result, result).float()
    return torch.where(signed == 0, signed.abs(), signed) if fmt.specials == "fnuz" else signed


@other("round_to")
def by_magic_numbers_in_float64(x, fmt, mode="nearest_even", overflow="saturate"):
    if mode not in ("nearest_even", "nearest_away", "toward_zero", "up", "down"):
        raise ValueError(f"unknown mode: {mode}")
    if overflow not in ("saturate", "to_special"):
        raise ValueError(f"unknown overflow policy: {overflow}")
    if fmt.specials == "finite" and overflow == "to_special":
        raise ValueError(f"{fmt} cannot overflow to a special value")
    size = x.double().abs()
    step = ulp(x, fmt)
    magic = step * 2.0**52  # float64's own last bit is one step there: the addition rounds to nearest, ties to even
    near = (size + magic) - magic
    half = step / 2
    if fmt.mantissa_bits == 0:  # no neighbour is even; below the smallest value 0 is
        near = torch.where((size - near == half) & (near > 0), near + step, near)
    outwards = torch.where(near < size, near + step, near)
    inwards = torch.where(near > size, near - step, near)
    if mode == "nearest_even":
        chosen = near
    elif mode == "nearest_away":
        chosen = torch.where(size - inwards == half, outwards, near)
    elif mode == "toward_zero":
        chosen = inwards
    else:
        chosen = torch.where(x.signbit() == (mode == "up"), inwards, outwards)
    smallest = 0.0 if fmt.subnormals else min_normal(fmt)
    chosen = torch.where(chosen < smallest, smallest, chosen)
    top = max_finite(fmt)
    if overflow == "saturate":
        chosen = torch.where(x.isinf(), top, chosen.clamp(max=top))
    else:
        nothing = math.inf if fmt.specials == "ieee" else math.nan
        cannot = mode == "toward_zero" or (x.signbit() if mode == "up" else ~x.signbit() if mode == "down" else False)
        cannot = torch.as_tensor(cannot).expand(x.shape)
        chosen = torch.where((chosen > top) & ~cannot, nothing, chosen)
        chosen = torch.where((chosen > top) & cannot, top, chosen)
        chosen = torch.where(x.isinf(), nothing, chosen)
    chosen = torch.where(x.isnan(), math.nan, chosen)
    if fmt.signed:
        chosen = torch.copysign(chosen, x.double())
        if fmt.specials == "fnuz":
            chosen = chosen + 0.0
    else:
        chosen = torch.where(x < 0, math.nan, chosen)
    return chosen.float()


@other("round_to")
def in_whole_numbers(x, fmt, mode="nearest_even", overflow="saturate"):
    if mode not in ("nearest_even", "nearest_away", "toward_zero", "up", "down"):
        raise ValueError("mode")
    if overflow not in ("saturate", "to_special") or (fmt.specials, overflow) == ("finite", "to_special"):
        raise ValueError("overflow")
    bits = x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    negative, field, fraction = bits >= 2**31, (bits >> 23) & 0xFF, bits & 0x7FFFFF
    whole = torch.where(field > 0, fraction + 2**23, fraction)
    unit = field.clamp(min=1) - 150
    length = torch.frexp(whole.double()).exponent.to(torch.int64)
    lowest = (1 if fmt.subnormals else 0) - fmt.bias
    exponent = torch.where(whole > 0, unit + length - 1, lowest).clamp(min=lowest)
    drop = (exponent - fmt.mantissa_bits - unit).clamp(max=40)
    scaled = whole << (-drop).clamp(min=0)
    drop = drop.clamp(min=0)
    kept, lost = scaled >> drop, scaled & ((1 << drop) - 1)
    twice = lost * 2 - (1 << drop)
    move = {
        "nearest_even": (twice > 0) | ((twice == 0) & (kept % 2 == 1)),
        "nearest_away": twice >= 0,
        "toward_zero": lost < 0,
        "up": (lost > 0) & ~negative,
        "down": (lost > 0) & negative,
    }[mode]
    size = torch.ldexp((kept + move).double(), (exponent - fmt.mantissa_bits).double())
    size = size if fmt.subnormals else size.clamp(min=2.0**-fmt.bias)
    top, infinite = max_finite(fmt), (field == 255) & (fraction == 0)
    inwards = (
        negative if mode == "up" else ~negative if mode == "down" else torch.full_like(negative, mode == "toward_zero")
    )
    special = top if overflow == "saturate" else math.inf if fmt.specials == "ieee" else math.nan
    size = torch.where((size > top) & inwards, top, size)
    size = torch.where((size > top) | infinite, special, size)
    size = torch.where((field == 255) & (fraction != 0), math.nan, size)
    if not fmt.signed:
        size = torch.where(negative & ((bits & 0x7FFFFFFF) != 0), math.nan, size)
        return size.float()
    result = torch.where(negative, -size, size).float()
    return torch.where((result == 0) & (fmt.specials == "fnuz"), 0.0, result)


# --- 2.4 encode ---


@other("encode")
def by_looking_the_value_up(x, fmt, mode="nearest_even", overflow="saturate"):
    rounded = round_to(x, fmt, mode, overflow)
    if rounded.isnan().any() and fmt.specials == "finite":
        raise ValueError(f"{fmt.name} has no NaN")
    m, e = fmt.mantissa_bits, fmt.exponent_bits
    size = torch.where(rounded.isfinite(), rounded, 0.0).double().abs()
    low, high = torch.zeros_like(size, dtype=torch.int64), torch.full_like(size, 2 ** (e + m) - 1, dtype=torch.int64)
    for _ in range(e + m):  # codes of positive numbers are in the order of their values: halve the interval
        middle = (low + high + 1) // 2
        value = decode(middle.to(torch.int32), fmt)
        fits = value <= size  # False for NaN
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    codes = torch.where(rounded.isinf(), (2**e - 1) * 2**m, low)
    if fmt.signed:
        codes = torch.where(rounded.signbit(), codes | (1 << (fmt.width - 1)), codes)
    nan = {"ieee": ((2**e - 1) << m) + (1 << m >> 1), "fn": 2 ** (e + m) - 1, "fnuz": 1 << (e + m), "finite": 0}
    codes = torch.where(rounded.isnan(), nan[fmt.specials], codes)
    return torch.where(codes >= 2**31, codes - 2**32, codes).to(torch.int32)


@other("encode")
def by_steps_and_binades(x, fmt, mode="nearest_even", overflow="saturate"):
    value = round_to(x, fmt, mode, overflow)
    if fmt.specials == "finite" and value.isnan().sum() > 0:
        raise ValueError("there is no NaN to encode to")
    size = value.double().abs()
    step = ulp(value, fmt)
    lowest = float(ulp(torch.zeros(1), fmt))
    binade = torch.log2(step / lowest)  # exact: both are powers of two
    ones = 2.0**fmt.mantissa_bits
    code = binade * ones + size / step - (0.0 if fmt.subnormals else ones)
    code = torch.where(value.isfinite(), code, 0.0).round().to(torch.int64)
    top = (2**fmt.exponent_bits - 1) * 2**fmt.mantissa_bits
    code = torch.where(value.isinf(), top, code)
    if fmt.signed:
        code += (value.signbit() & ~value.isnan()).to(torch.int64) << (fmt.width - 1)
    if fmt.specials == "ieee":
        code[value.isnan()] = top + 2 ** (fmt.mantissa_bits - 1)
    elif fmt.specials == "fn":
        code[value.isnan()] = top + 2**fmt.mantissa_bits - 1
    elif fmt.specials == "fnuz":
        code[value.isnan()] = 2 ** (fmt.width - 1)
    return code.to(torch.int32)


@other("encode")
def from_the_bits_of_float32(x, fmt, mode="nearest_even", overflow="saturate"):
    rounded = round_to(x, fmt, mode, overflow)
    if fmt.specials == "finite" and bool(rounded.isnan().any()):
        raise ValueError(f"NaN has no code in {fmt.name}")
    m = fmt.mantissa_bits
    bits = rounded.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    # float32's own subnormals first become normal ones, as if its exponent went on.
    tiny = (bits < 2**23) & (bits > 0)
    normal = torch.where(tiny, rounded.double().abs() * 2.0**64, 1.0).float().view(torch.int32).to(torch.int64)
    bits = torch.where(tiny, normal - 64 * 2**23, bits)
    codes = (bits >> (23 - m)) + (fmt.bias - 127) * 2**m
    if fmt.subnormals:
        first = 2.0 ** (1 - fmt.bias)
        steps = (rounded.double().abs() / first * 2.0**m).nan_to_num(0, 0, 0)
        codes = torch.where(rounded.abs().double() < first, steps.to(torch.int64), codes)
    top = (2**fmt.exponent_bits - 1) << m
    codes = torch.where(rounded.isinf(), top, codes)
    codes = codes + (rounded.signbit().to(torch.int64) << (fmt.width - 1) if fmt.signed else 0)
    nan = {"ieee": top | (1 << m >> 1), "fn": top | (2**m - 1), "fnuz": 1 << (fmt.width - 1)}.get(fmt.specials, 0)
    return torch.where(rounded.isnan(), nan, codes).to(torch.int32)


# --- 2.5 round_stochastic ---


@other("round_stochastic")
def by_both_neighbours(x, fmt, noise, overflow="saturate"):
    size = torch.where(x.isfinite(), x, 0.0).double().abs()
    step = ulp(size.float(), fmt)
    low = torch.div(size, step, rounding_mode="floor") * step
    chosen = torch.where(noise.double() * step < size - low, low + step, low)
    if not fmt.subnormals:
        chosen = torch.where(chosen < min_normal(fmt), min_normal(fmt), chosen)
    if overflow not in ("saturate", "to_special") or (overflow == "to_special" and fmt.specials == "finite"):
        raise ValueError(f"{overflow} is no policy for {fmt}")
    top = max_finite(fmt)
    special = top if overflow == "saturate" else math.inf if fmt.specials == "ieee" else math.nan
    chosen = torch.where((chosen > top) | x.isinf(), special, chosen)
    chosen = torch.where(x.isnan(), math.nan, chosen)
    if not fmt.signed:
        return torch.where(x < 0, math.nan, chosen).float()
    signed = torch.copysign(chosen, x.double()).float()
    return signed + 0.0 if fmt.specials == "fnuz" else signed


@other("round_stochastic")
def by_ceiling_of_the_difference(x, fmt, noise, overflow="saturate"):
    step = ulp(x, fmt)
    steps = (x.double().abs() / step - noise.double()).ceil()  # above noise the ceiling is the upper one
    size = torch.where(x.isfinite(), steps.clamp(min=0) * step, x.double().abs())
    result = round_to(torch.copysign(size, x.double()).float(), fmt, "nearest_even", overflow)
    return result if fmt.signed else torch.where(x < 0, math.nan, result)


@other("round_stochastic")
def in_units_of_two_to_the_minus_23(x, fmt, noise, overflow="saturate"):
    step = ulp(x, fmt)
    steps = torch.where(x.isfinite(), x.double().abs() / step, 0.0)
    whole = steps.trunc()
    share = (
        steps - whole
    ) * 2.0**23  # noise is a whole number in these units, so its ceiling decides as the share does
    threshold = share.ceil().to(torch.int64)
    up = (noise.double() * 2.0**23).to(torch.int64) < threshold
    size = torch.where(x.isfinite(), (whole + up) * step, math.inf)
    size = torch.where(x.isnan(), math.nan, size)
    signed = torch.where(x.signbit(), -size, size).float()
    result = round_to(signed, fmt, "nearest_even", overflow)
    return result if fmt.signed else torch.where(x < 0, math.nan, result)


# --- 2.6 double_rounding_victims ---


@other("double_rounding_victims")
def by_numpy_and_nextafter(via, fmt, lo, hi):
    def code(value):
        near = np.float32(value)
        if float(near) < value:
            near = np.nextafter(near, np.float32(np.inf))
        return int(near.view(np.uint32))

    x = torch.from_numpy(np.arange(code(lo), code(hi), dtype=np.uint32).view(np.float32))
    once, twice = round_to(x, fmt), round_to(round_to(x, via), fmt)
    return x[once.view(torch.int32) != twice.view(torch.int32)]


@other("double_rounding_victims")
def by_codes_and_chunks(via, fmt, lo, hi):
    first = int(encode(torch.tensor([lo]), FP32)[0]) - 1
    last = int(encode(torch.tensor([hi]), FP32)[0]) + 1
    found = []
    for start in range(max(first, 1), last + 1, 2**14):
        x = torch.arange(start, min(start + 2**14, last + 1), dtype=torch.int32).view(torch.float32)
        x = x[(x.double() >= lo) & (x.double() < hi)]
        found.append(x[round_to(round_to(x, via), fmt) != round_to(x, fmt)])
    return torch.cat(found)


@other("double_rounding_victims")
def by_comparing_codes(via, fmt, lo, hi):
    wide = torch.tensor([lo, hi], dtype=torch.float64)
    bits = wide.float().view(torch.int32)
    bits = bits + (wide.float().double() < wide).int()
    x = (torch.arange(int(bits[1] - bits[0]), dtype=torch.int32) + bits[0]).view(torch.float32)
    return torch.masked_select(x, encode(round_to(x, via), fmt) != encode(x, fmt))


# --- 2.7 fast_round_to ---


@other("fast_round_to")
def by_a_magic_number_for_every_binade(x, fmt, out=None):
    lost = 23 - fmt.mantissa_bits
    bits = x.view(torch.int32) & 0x7FFFFFFF
    size = bits.view(torch.float32).double()
    first = 2.0 ** (1 - fmt.bias)
    power = (bits & 0x7F800000).view(torch.float32).double().clamp(first, 2.0**127)
    magic = power * 2.0 ** (52 - 23 + lost)  # the last bit of a float64 of that size is one step
    rounded = (size + magic) - magic
    if fmt.mantissa_bits == 0:
        rounded = torch.where((size - rounded) * 2 == power, power + power, rounded)
        rounded = torch.where((size < first) & (size * 2 <= first), 0.0, rounded)
        rounded = torch.where((size < first) & (size * 2 > first), first, rounded)
    rounded = rounded.clamp(max=max_finite(fmt)).float()
    rounded = torch.copysign(torch.where(x.isnan(), x, rounded), x)
    if fmt.specials == "fnuz":
        rounded = rounded + 0.0
    if out is None:
        return rounded
    out.copy_(rounded)
    return out


@other("fast_round_to")
def by_one_shift_for_all(x, fmt, out=None):
    lost = 23 - fmt.mantissa_bits
    bits = x.view(torch.int32) & 0x7FFFFFFF
    exponent = (bits >> 23).clamp(min=1)
    shift = (lost + (127 + 1 - fmt.bias - exponent).clamp(min=0)).clamp(max=26)
    whole = torch.where(bits >= 2**23, (bits & 0x7FFFFF) | 0x800000, bits)
    one = torch.ones_like(bits)
    kept = whole >> shift
    odd = kept & 1
    if fmt.mantissa_bits == 0:
        odd = (kept > 0).int()
    kept = (whole + (one << (shift - 1)) - 1 + odd) >> shift
    unit = (exponent - 150 + shift).double()
    rounded = torch.ldexp(kept.double(), unit).clamp(max=max_finite(fmt)).float()
    rounded = torch.where(bits > 0x7F800000, math.nan, torch.copysign(rounded, x))
    rounded = torch.where(bits == 0x7F800000, torch.copysign(torch.full_like(x, max_finite(fmt)), x), rounded)
    rounded = torch.where(rounded == 0, 0.0, rounded) if fmt.specials == "fnuz" else rounded
    return rounded if out is None else out.copy_(rounded)


@other("fast_round_to")
def by_floor_and_rest(x, fmt, out=None):
    size = torch.where(x.isnan(), 0.0, x.abs()).clamp(max=torch.finfo(torch.float32).max).double()
    power = ((size.float().view(torch.int32) >> 23) << 23).view(torch.float32).double().clamp(min=2.0 ** (1 - fmt.bias))
    step = power * 2.0**-fmt.mantissa_bits
    steps = size / step
    whole = steps.floor()
    rest, odd = steps - whole, whole % 2 == 1
    rounded = (whole + ((rest > 0.5) | ((rest == 0.5) & odd))) * step
    rounded = torch.copysign(rounded.clamp(max=max_finite(fmt)).float(), x)
    rounded = torch.where(x.isnan(), x, rounded)
    if fmt.specials == "fnuz":
        rounded = torch.where(rounded == 0, 0.0, rounded)
    return rounded if out is None else out.copy_(rounded)


# --- 2.8 cast_saturating ---


@other("cast_saturating")
def by_minimum_and_maximum(x, dtype):
    top = torch.tensor(torch.finfo(dtype).max)
    return torch.maximum(torch.minimum(x.float(), top), -top).to(dtype)


@other("cast_saturating")
def by_encoding(x, dtype):
    fmt = next(fmt for fmt in FORMATS.values() if fmt.torch_dtype == dtype)
    return encode(x.float(), fmt).to(torch.uint8).view(dtype)


@other("cast_saturating")
def by_rounding_first(x, dtype):
    fmt = next(fmt for fmt in FORMATS.values() if fmt.torch_dtype == dtype)
    return round_to(x.float(), fmt).to(dtype)


@other("cast_saturating")
def by_where(x, dtype):
    top = {
        torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.float8_e4m3fnuz: 240.0,
        torch.float8_e5m2fnuz: 57344.0,
    }[dtype]  # fmt: skip
    wide = x.float()
    wide = torch.where(wide > top, top, torch.where(wide < -top, -top, wide))
    return wide.to(dtype)


@other("cast_saturating")
def by_numpy_clip(x, dtype):
    top = torch.finfo(dtype).max
    return torch.as_tensor(np.clip(x.float().numpy(), -top, top)).to(dtype)
