# %% tags=["setup"]
import math
import torch
from lowprec_lab import check, fill, question
from lowprec_lab.bits import (
    NumberClass, add_float8, bit_pattern, classify, decode, join_fields, machine_epsilon, max_finite, min_normal,
    min_subnormal, split_fields, ulp,
)

# %%
@fill
def bit_pattern(x):
    ### BEGIN SOLUTION
    return x.view(torch.int32)  # the same bytes, read as another type: nothing is computed
    ### END SOLUTION

# %%
check(bit_pattern)

# %%
@fill
def split_fields(codes, fmt):
    ### BEGIN SOLUTION
    mantissa = codes & (2**fmt.mantissa_bits - 1)
    exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    sign = (codes >> (fmt.mantissa_bits + fmt.exponent_bits)) & int(fmt.signed)  # & 1: >> copies the top bit downwards
    return sign, exponent, mantissa
    ### END SOLUTION

# %%
check(split_fields)

# %%
@fill
def join_fields(sign, exponent, mantissa, fmt):
    ### BEGIN SOLUTION
    return (sign << (fmt.exponent_bits + fmt.mantissa_bits)) | (exponent << fmt.mantissa_bits) | mantissa
    ### END SOLUTION

# %%
check(join_fields)

# %%
@fill
def classify(codes, fmt):
    ### BEGIN SOLUTION
    sign, exponent, mantissa = split_fields(codes, fmt)
    top, bottom = exponent == 2**fmt.exponent_bits - 1, exponent == 0
    classes = torch.full_like(codes, NumberClass.NORMAL)
    if fmt.subnormals:
        classes[bottom] = NumberClass.SUBNORMAL
        classes[bottom & (mantissa == 0)] = NumberClass.ZERO
    if fmt.specials == "ieee":
        classes[top] = NumberClass.NAN
        classes[top & (mantissa == 0)] = NumberClass.INF
    elif fmt.specials == "fn":
        classes[top & (mantissa == 2**fmt.mantissa_bits - 1)] = NumberClass.NAN
    elif fmt.specials == "fnuz":
        classes[(sign == 1) & bottom & (mantissa == 0)] = NumberClass.NAN
    return classes
    ### END SOLUTION

# %%
check(classify)

# %%
@fill
def decode(codes, fmt):
    ### BEGIN SOLUTION
    sign, exponent, mantissa = split_fields(codes, fmt)
    classes = classify(codes, fmt)
    small = (classes == NumberClass.ZERO) | (classes == NumberClass.SUBNORMAL)
    leading = torch.where(small, 0, 1 << fmt.mantissa_bits)  # 0.mantissa or 1.mantissa, counted in steps of 2^-m
    power = torch.where(small, 1, exponent) - fmt.bias - fmt.mantissa_bits
    values = torch.ldexp((leading + mantissa).double(), power.double())
    values[classes == NumberClass.INF] = math.inf
    values[classes == NumberClass.NAN] = math.nan
    return torch.where(sign == 1, -values, values)
    ### END SOLUTION

# %%
check(decode)

# %%
@fill
def max_finite(fmt):
    ### BEGIN SOLUTION
    exponent, mantissa = 2**fmt.exponent_bits - 1, 2**fmt.mantissa_bits - 1  # all ones, unless those are special
    if fmt.specials == "ieee" or (fmt.specials == "fn" and fmt.mantissa_bits == 0):
        exponent -= 1
    elif fmt.specials == "fn":
        mantissa -= 1
    return math.ldexp(2**fmt.mantissa_bits + mantissa, exponent - fmt.bias - fmt.mantissa_bits)
    ### END SOLUTION

# %%
check(max_finite)

# %%
@fill
def min_normal(fmt):
    ### BEGIN SOLUTION
    return math.ldexp(1.0, int(fmt.subnormals) - fmt.bias)
    ### END SOLUTION

# %%
check(min_normal)

# %%
@fill
def min_subnormal(fmt):
    ### BEGIN SOLUTION
    if not fmt.subnormals or fmt.mantissa_bits == 0:
        return None
    return math.ldexp(1.0, 1 - fmt.bias - fmt.mantissa_bits)
    ### END SOLUTION

# %%
check(min_subnormal)

# %%
@fill
def machine_epsilon(fmt):
    ### BEGIN SOLUTION
    return 2.0**-fmt.mantissa_bits
    ### END SOLUTION

# %%
check(machine_epsilon)

# %%
@fill
def ulp(x, fmt):
    ### BEGIN SOLUTION
    magnitude = x.double().abs().clamp(min_normal(fmt), max_finite(fmt))
    exponent = torch.frexp(magnitude).exponent - 1  # frexp's fraction is in [0.5, 1), ours in [1, 2)
    spacing = torch.ldexp(torch.ones_like(magnitude), (exponent - fmt.mantissa_bits).double())
    return torch.where(x.isfinite(), spacing, math.nan)
    ### END SOLUTION

# %%
check(ulp)

# %%
@fill
def add_float8(a, b):
    ### BEGIN SOLUTION
    return a.float() + b.float()  # float32 holds every float8 value exactly; the sum is rounded once
    ### END SOLUTION

# %%
check(add_float8)
