# %% [markdown]
# # 01 · Bit layouts: what do 8 bits mean?
#
# **Takes** 3 to 4 hours. **Needs** [chapter 00](00_start.ipynb). **Gives** you a decoder for every number format of at most 32 bits: BF16, FP16, both
# kinds of FP8, the 4- and 6-bit formats of block-scaled tensors, and formats that you make up. All later chapters run on it.
#
# Put 0.1 into an E4M3 tensor and read it back: 0.1015625. There is no 0.1 in E4M3, and there is none in float32 either; but E4M3 has only 256 codes
# for all numbers that there are. Which 256 numbers are worth having? Two answers are built into every recent accelerator, E4M3 and E5M2. They have the same
# eight bits, and disagree about what the bits mean.

# %% tags=["setup"]
try:
    import math

    import numpy as np
    import torch

    from lowprec_lab import BitExplorer, check, fill, plots, progress, question, reveal
    from lowprec_lab.bits import (
        NumberClass,
        add_float8,
        bit_pattern,
        classify,
        decode,
        join_fields,
        machine_epsilon,
        max_finite,
        min_normal,
        min_subnormal,
        split_fields,
        ulp,
    )
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
    from lowprec_lab.races import race
    from lowprec_lab.reading import installed_lines
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %%
plots.number_line([E4M3, E5M2, FP16, BF16])

# %% [markdown]
# Each stroke is one number that the format can hold. In the upper panel every power of two takes the same room: E5M2 reaches further out than E4M3. The lower panel is to scale:
# E5M2 has fewer numbers near 1, and every format is dense near zero and sparse further out.
#
# The badge of the explorer below says whose code draws it. As soon as you run a `decode` of your own, right or wrong, the explorers and pictures of this page run on it.

# %%
BitExplorer(["float8_e4m3fn", "float8_e5m2"], value=0.1)

# %% [markdown]
# Flip the lowest bit: the value moves to its neighbour. Flip the lowest *exponent* bit: it doubles or halves, unless all other exponent bits are 0. What does the highest exponent bit do? Try it in both formats.
#
# <details><summary>Answer</summary>It multiplies or divides by 2^8 in E4M3 and by 2^16 in E5M2: each exponent bit is worth twice the one below it. (Not where the other exponent bits are all 0 or all 1; exercise 1.4 says why.)</details>
#
# **Words.** A *format* is a rule for reading bits. A *code* is a bit pattern, read as a whole number. A format's *fields* are, from the topmost bit down,
# the **sign**, the **exponent** and the **mantissa** (also called significand or fraction elsewhere; here always mantissa). Formats are named by the widths of their fields: E4M3
# has four exponent bits and three mantissa bits.
#
# `Format` holds the rule as data. Nothing that you write here may know one format only: each of your functions is tried on formats that no library has. The cell below lists the formats of the course. Its last two columns
# are explained where you need them, in exercises 1.4 (special codes) and 1.5 (bias).
#
# More terms: [glossary](glossary.ipynb).

# %%
for fmt in FORMATS.values():
    print(
        f"{fmt!r:9} {fmt.name:17} {fmt.width:2} bits = {int(fmt.signed)} + {fmt.exponent_bits} + {fmt.mantissa_bits:2}   bias {fmt.bias:3}   {fmt.specials}"
    )

# %% tags=["helpers"]
# Your helpers: functions that more than one of your answers on this page uses.

# %% [markdown]
# ---
# ## From a number to its bits
#
# ### Exercise 1.1 · `bit_pattern` · 10 min · easy · 2 points
#
# To see the bits of a float you have to *not* convert it. `int(1.5)` is 1: that is its value, cut off. Its bits are another matter: the same 32 bits, read as
# a whole number, are 1,069,547,520. You need a way to look at memory under another type, without computing anything.
#
# | | |
# |---|---|
# | in | `x`: float32 tensor of any shape |
# | out | int32 tensor of the same shape: the same 32 bits |
# | mind | -0.0 is not 0.0, and a NaN keeps its payload (the bits that nobody looks at) |
#
# By hand, with the code in hexadecimal:
#
# | value | sign, exponent, mantissa | code | as int32 |
# |---|---|---|---|
# | 1.0 | `0 01111111 00000000000000000000000` | `3F800000` | 1065353216 |
# | 1.5 | `0 01111111 10000000000000000000000` | `3FC00000` | 1069547520 |
# | -0.0 | `1 00000000 00000000000000000000000` | `80000000` | -2147483648 |
#
# **Whole numbers, in four lines.** A hexadecimal digit is four bits: `3F` is `0011 1111`. `0x` marks hexadecimal in Python, `0b` binary. The topmost bit of an int32 counts as -2^31 (this is called *two's complement*), so codes of negative
# numbers are negative integers. `>>` moves bits down and, on such integers, copies the topmost bit as it goes; `<<` moves bits up; `&` keeps the bits that are set on both sides, `|` those that are set on either.
#
# <details><summary>A nudge</summary>Tensors have a method that reads the same memory as another dtype. It is not <code>.to()</code>. What does <code>.to()</code> do?</details>
# <details><summary>An approach</summary>The documentation of <code>torch.Tensor.view</code> has two halves: one is about shapes, the other about dtypes.</details>


# %%
@fill
def bit_pattern(x):
    ### BEGIN SOLUTION
    return x.view(torch.int32)  # the same bytes, read as another type: nothing is computed
    ### END SOLUTION


# %%
check(bit_pattern)

# %% [markdown]
# **Predict first:** how many float32 numbers are there from 1 up to 2? And from 2 up to 4? From 1,000,000 up to 2,000,000?

# %%
for low, high in ((1.0, 2.0), (2.0, 4.0), (1e6, 2e6), (1e-6, 2e-6)):
    codes = bit_pattern(torch.tensor([low, high]))
    print(f"{low:>9g} to {high:<9g} {int(codes[1] - codes[0]):>10,} numbers")

# %% [markdown]
# For positive numbers the codes run in the same order as the values, without a gap. So the difference of two codes counts the numbers in between. There are as many
# between 1 and 2 as between any normal number and its double: 2^23, for the 23 mantissa bits.
#
# ---
# ## Three fields
#
# ### Exercise 1.2 · `split_fields` · 20 min · easy · 2 points
#
# A code is three small integers packed side by side. Unpack them: shift the field you want down to the lowest place, and mask off what stands above it.
#
# | | |
# |---|---|
# | in | `codes`: int32 tensor; `fmt`: a Format (`fmt.exponent_bits`, `fmt.mantissa_bits`, `fmt.signed`, `fmt.width`) |
# | out | `(sign, exponent, mantissa)`: three int32 tensors of that shape, as stored, never negative |
# | mind | E8M0 has no sign bit and no mantissa: both come out as 0. A 32-bit code can be a negative integer |
#
# By hand, for code `0x3D` of E4M3, `0 0111 101`:
#
# | step | bits | number |
# |---|---|---|
# | sign: shift right by 7, mask 1 bit | `0` | 0 |
# | exponent: shift right by 3, mask 4 bits | `0111` | 7 |
# | mantissa: mask the lowest 3 bits | `101` | 5 |
#
# <details><summary>A nudge</summary>A mask of n ones is <code>2**n - 1</code>. What is it for n = 0? Try <code>torch.tensor([-1], dtype=torch.int32) >> 31</code>: is it 1?</details>
# <details><summary>An approach</summary>Three lines, one per field: <code>(codes >> how far) & mask</code>. For a format without a sign bit, the sign's mask is 0.</details>


# %%
@fill
def split_fields(codes, fmt):
    ### BEGIN SOLUTION
    mantissa = codes & (2**fmt.mantissa_bits - 1)
    exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    sign = (codes >> (fmt.mantissa_bits + fmt.exponent_bits)) & int(fmt.signed)  # >> copies the top bit downwards: mask
    return sign, exponent, mantissa
    ### END SOLUTION


# %%
check(split_fields)

# %% [markdown]
# ### Exercise 1.3 · `join_fields` · 10 min · easy · 2 points
#
# The way back: put three fields into one code. With both directions in hand you can take a number apart, change one field and look at what became of it.
#
# | | |
# |---|---|
# | in | `sign`, `exponent`, `mantissa`: int32 tensors of one shape; `fmt` |
# | out | int32 tensor of that shape: the codes (negative for a 32-bit format whose sign bit is set) |
# | mind | no bias, no hidden bit: these are fields, not values |
#
# By hand, E5M2, sign 1, exponent 16, mantissa 2: side by side they are `1 10000 10`, and that is `0xC2`, or 194.
#
# <details><summary>A nudge</summary>Each field needs to move up past the ones below it. Which operator moves bits up, and which one puts bits together that do not overlap?</details>
# <details><summary>An approach</summary>The mantissa stays. The exponent moves up by the width of the mantissa, the sign by the widths of both. Join with <code>|</code>.</details>


# %%
@fill
def join_fields(sign, exponent, mantissa, fmt):
    ### BEGIN SOLUTION
    return (sign << (fmt.exponent_bits + fmt.mantissa_bits)) | (exponent << fmt.mantissa_bits) | mantissa
    ### END SOLUTION


# %%
check(join_fields)

# %% [markdown]
# **Predict first:** what does BF16 keep of a float32? Below, 0.1 in float32, and what torch makes of it in BF16 and FP16, as fields. Which of the two has the same exponent field as
# float32? Which one stays closer to 0.1?

# %%
tenth = torch.tensor([0.1])
for fmt in (FP32, BF16, FP16):
    value = tenth.to(fmt.torch_dtype)
    code = bit_pattern(value) if fmt is FP32 else value.view(torch.int16).to(torch.int32) & 0xFFFF
    sign, exponent, mantissa = (int(field) for field in split_fields(code, fmt))
    bits = f"{sign} {exponent:0{fmt.exponent_bits}b} {mantissa:0{fmt.mantissa_bits}b}"
    print(f"{fmt.name:9} {bits:34} {float(value):.9f}   off by {abs(float(value) - 0.1):.1e}")

# %% [markdown]
# BF16 is the upper half of a float32: the same sign, the same eight exponent bits, and the first seven mantissa bits (rounded: chapter 02). So it reaches as far as float32 does, and converting costs next
# to nothing. FP16 spends three bits more on the mantissa, so its steps are eight times finer, at the price of a range that ends at 65504.
#
# ---
# ## What a code stands for
#
# ### Exercise 1.4 · `classify` · 30 min · medium · 3 points
#
# Not every code is an ordinary number. Zero needs a code. So do infinity and NaN, where a format has them. And near zero a format changes its rule, so that
# it does not stop abruptly. With eight bits to spend, each special code is a number that you cannot have, so the small formats have few of them, each in its way.
#
# | `fmt.specials` | infinity | NaN |
# |---|---|---|
# | `"ieee"` (FP16, BF16, E5M2) | exponent all ones, mantissa 0 | exponent all ones, any other mantissa |
# | `"fn"`: finite and NaN (E4M3, E8M0) | none | exponent **and** mantissa all ones, either sign |
# | `"fnuz"`: finite, NaN, unsigned zero | none | the code that would be -0: sign 1, everything else 0. No other |
# | `"finite"` (E2M1, E2M3, E3M2) | none | none |
#
# And where `fmt.subnormals` is true, exponent field 0 is not an ordinary binade: with mantissa 0 it is **zero**, with any other it is **subnormal**.
#
# | | |
# |---|---|
# | in | `codes`: int32 tensor; `fmt` |
# | out | int32 tensor of that shape, with the values of `NumberClass`: ZERO 0, SUBNORMAL 1, NORMAL 2, INF 3, NAN 4 |
# | mind | E8M0 has no subnormals: its code 0 is a normal number. There are two codes of NaN in E4M3 |
#
# By hand:
#
# | code | E4M3 (fn) | E5M2 (ieee) | E4M3FNUZ (fnuz) |
# |---|---|---|---|
# | `0x80` | ZERO (-0) | ZERO (-0) | NAN |
# | `0x7C` | NORMAL (384) | INF | NORMAL |
# | `0x7F` | NAN | NAN | NORMAL (240) |
# | `0x03` | SUBNORMAL | SUBNORMAL | SUBNORMAL |
#
# <details><summary>A nudge</summary>Begin with "everything is NORMAL", then overwrite. In which order, so that the last word is the right one?</details>
# <details><summary>An approach</summary>Split the fields. Make the masks that you need (exponent all ones, exponent 0, mantissa 0, mantissa all ones). Fill a tensor with NORMAL; write SUBNORMAL, then ZERO, if the format
# has them; then the specials by <code>fmt.specials</code>. An fn format without mantissa bits (E8M0) has a mantissa that is 0 and all ones at the same time: your masks know that already.</details>


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

# %% [markdown]
# **Predict first:** which format gives the largest *share* of its codes away to NaN?

# %%
lines = [f"{'':17}" + "".join(f"{kind.name:>11}" for kind in NumberClass) + "   lost to NaN"]
for fmt in (FP16, BF16, E5M2, E4M3, E4M3FNUZ, E3M2, E8M0):
    classes = classify(torch.arange(2**fmt.width, dtype=torch.int32), fmt)
    counts = [int((classes == kind).sum()) for kind in NumberClass]
    lines.append(
        f"{fmt.name:17}" + "".join(f"{count:11,}" for count in counts) + f"   {counts[-1] / len(classes):10.1%}"
    )
print("\n".join(lines))

# %% [markdown]
# FP16 gives the largest share away: one code in 32. What hurts a small format is not so much the count as the place: IEEE's rule takes the whole top exponent. E4M3 would end at 240 under it. As an fn format
# it gives up infinity and all NaNs but one of each sign, and reaches 448.
#
# ---
# ## What it is worth
#
# ### Exercise 1.5 · `decode` · 45 min · the heart of this chapter · 5 points
#
# Now the value. A normal number is a sign, a hidden leading 1, the mantissa behind the point, and a power of two:
#
# $$(-1)^{\text{sign}} \times 1.\text{mantissa}_2 \times 2^{\,\text{exponent} - \text{bias}}$$
#
# The bias is there so that the stored exponent needs no sign. Take it from `fmt.bias`. Do not compute it from the width, because fnuz formats have another one.
#
# A subnormal number has no hidden 1, and the exponent of the *smallest normal* number:
#
# $$(-1)^{\text{sign}} \times 0.\text{mantissa}_2 \times 2^{\,1 - \text{bias}}$$
#
# That is what makes the numbers near zero evenly spaced down to zero itself, instead of leaving a hole around it.
#
# | | |
# |---|---|
# | in | `codes`: int32 tensor; `fmt` |
# | out | float64 tensor of that shape: the exact values. INF is plus or minus infinity, NAN is any NaN |
# | mind | the sign of zero; float32's smallest subnormal, 2^-149; E8M0, where code 0 is 2^-127 |
#
# By hand, E4M3 (bias 7, 3 mantissa bits):
#
# | code | fields | rule | value |
# |---|---|---|---|
# | `0x38` | `0 0111 000` | 1.000 * 2^(7 - 7) | 1.0 |
# | `0x3D` | `0 0111 101` | 1.101 (that is 1 + 5/8) * 2^0 | 1.625 |
# | `0x7E` | `0 1111 110` | 1.110 (1 + 6/8) * 2^(15 - 7) | 448.0 |
# | `0x03` | `0 0000 011` | **0**.011 (3/8) * 2^(**1** - 7) | 0.005859375 |
# | `0x80` | `1 0000 000` | zero, with its sign | -0.0 |
#
# Your earlier `split_fields` and `classify` are at hand.
#
# <details><summary>A nudge</summary>1.mantissa in steps of 2^-m is the whole number 2^m + mantissa. Which power of two is left over? And which two of its parts change for a subnormal?</details>
# <details><summary>An approach</summary>Compute for all codes at once, as if each were a number: a whole-number significand and an exponent, chosen with <code>torch.where</code> between the normal and the subnormal rule. Combine them exactly: <code>torch.ldexp</code> with
# float64 tensors, or multiply by <code>2.0 ** exponent</code> in float64. Then overwrite INF and NAN by class, then apply the sign: multiplying by -1 keeps the sign of zero, adding does not.</details>


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

# %% [markdown]
# From here on the explorer runs on your code; its badge says so. Look for the largest number and its neighbour, the smallest normal, and the largest subnormal. Then click through the table of all 256
# values.

# %%
BitExplorer("float8_e4m3fn", value=448)

# %%
plots.number_line([E4M3, E5M2, E4M3FNUZ, E3M2, E2M3, E2M1])

# %% [markdown]
# The same picture as above, for the small formats, through your own `decode`. See how E4M3 FNUZ is shifted by one power of two: its bias is one larger, so each code is worth half of what it is in E4M3. It ends at 240, not at 224, because the code that E4M3 keeps for NaN is a number here.
#
# **Your code against torch.** torch knows eight of these formats. It decodes a byte as soon as you view the byte as a float8 tensor:

# %%
bytes_ = torch.arange(256, dtype=torch.uint8)
for fmt in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0):
    ours = decode(bytes_.to(torch.int32), fmt)
    theirs = bytes_.view(fmt.torch_dtype).to(torch.float32).double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    print(f"{fmt.name:17} {int(same.sum())} of 256 codes agree")

# %% [markdown]
# **Predict first:** which is the first whole number that a format cannot hold? For float32 it is 16,777,217. Guess it for BF16 and for E4M3 before you run the cell.

# %%
for fmt in (FP16, BF16, E5M2, E4M3, E3M2, E2M1):
    values = decode(torch.arange(2**fmt.width, dtype=torch.int32), fmt)
    held = {int(value) for value in values.tolist() if math.isfinite(value) and value == int(value) and value >= 0}
    first_missing = next(number for number in range(2**fmt.width) if number not in held)
    print(
        f"{fmt.name:15} holds 0 to {first_missing - 1:>5}, not {first_missing:>5}   = 2^{fmt.mantissa_bits + 1} + 1: {first_missing == 2 ** (fmt.mantissa_bits + 1) + 1}"
    )

# %% [markdown]
# With m mantissa bits and the hidden 1, every whole number up to 2^(m + 1) fits, and the next one does not, if the range goes that far. (E2M3 ends at 7.5.) A BF16 counter that adds 1 stops at 256. Chapter 03 is about
# what that does to sums.
#
# ---
# ## The landmarks of a format
#
# Four numbers tell you whether a format can hold your tensor: its largest value, its smallest normal and subnormal values, and how fine it is. You could look them up in a table of all values. Here you write
# **formulas** instead: float32 has four billion codes, and no check waits for a table of them.
#
# ### Exercise 1.6 · `max_finite` · 20 min · medium · 2 points
#
# The largest exponent that is not special, with the largest mantissa that is not special.
#
# | format | specials | topmost codes | largest finite value |
# |---|---|---|---|
# | E5M2 | ieee | the whole top exponent is infinity and NaN | `0 11110 11`: 1.75 * 2^15 = 57344 |
# | E4M3 | fn | only the code of all ones is NaN | `0 1111 110`: 1.75 * 2^8 = 448 |
# | E4M3FNUZ | fnuz | no positive code is special | `0 1111 111`: 1.875 * 2^7 = 240 |
# | E8M0 | fn, no mantissa | the code of all ones is NaN, and it is the only code of its exponent | `11111110`: 2^127 |
#
# | | |
# |---|---|
# | in | `fmt`: a Format |
# | out | a Python float, exact |
# | mind | fn formats without mantissa bits |
#
# <details><summary>A nudge</summary>Write down the exponent field and the mantissa field of the largest finite code for each of the four rows. Which one shrinks by one, and when?</details>
# <details><summary>An approach</summary>Begin with both fields all ones. For ieee take one from the exponent; for fn take one from the mantissa, or from the exponent where there is no mantissa. Then decode that one code by the formula of exercise 1.5, with <code>math.ldexp</code> or powers of 2.0.</details>


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

# %% [markdown]
# ### Exercise 1.7 · `min_normal` · 5 min · easy · 1 point
#
# The smallest positive normal value: mantissa 0, and the smallest exponent field that is normal. Which field is that in a format with subnormals? And in E8M0, which has none?
#
# | | |
# |---|---|
# | in | `fmt`: a Format |
# | out | a Python float, exact |
#
# By hand: E4M3 has 1.0 * 2^(1 - 7) = 0.015625, and E8M0 has 2^(0 - 127).
#
# <details><summary>A nudge</summary>It is 1.0 times a power of two. The exponent is the smallest normal field minus the bias.</details>


# %%
@fill
def min_normal(fmt):
    ### BEGIN SOLUTION
    return math.ldexp(1.0, int(fmt.subnormals) - fmt.bias)
    ### END SOLUTION


# %%
check(min_normal)

# %% [markdown]
# ### Exercise 1.8 · `machine_epsilon` · 5 min · easy · 1 point
#
# The distance from 1.0 to the next larger value: how fine the format is, relative to the number.
#
# | | |
# |---|---|
# | in | `fmt`: a Format |
# | out | a Python float, exact |
# | mind | it is the same fraction of every power of two, so it is defined even where the range does not reach 1.0 |
#
# By hand: in E4M3 the value after 1.0 is `0 0111 001`, 1.125, so epsilon is 0.125.
#
# <details><summary>A nudge</summary>Which bit of the code changes from 1.0 to the next value, and what is that bit worth when the exponent is 0?</details>


# %%
@fill
def machine_epsilon(fmt):
    ### BEGIN SOLUTION
    return 2.0**-fmt.mantissa_bits
    ### END SOLUTION


# %%
check(machine_epsilon)

# %% [markdown]
# ### Exercise 1.9 · `min_subnormal` · 10 min · easy · 1 point
#
# The smallest positive subnormal value: only the lowest mantissa bit is set. Whatever is less than half of it, a tensor in this format cannot tell from zero.
#
# | | |
# |---|---|
# | in | `fmt`: a Format |
# | out | a Python float, exact; `None` where the format has no subnormal value |
# | mind | there is none where `fmt.subnormals` is false, and none where there is no mantissa bit to set |
#
# By hand: E4M3 has 0.001 in binary, that is 1/8, times 2^(1 - 7): 2^-9.
#
# <details><summary>A nudge</summary>What is the lowest mantissa bit worth, as a fraction? Which power of two do all subnormals share?</details>


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
plots.range_and_precision(list(FORMATS.values()))

# %% [markdown]
# Range (across) against precision (up). See the trade: E4M3 and E5M2 have the same number of bits, and one more exponent bit *doubles* the number of powers of two that normal numbers cover, while one mantissa bit less halves the precision. BF16 has float32's range, and pays for it with
# three bits of FP16's precision.
#
# **Do you agree with torch?** `torch.finfo` has the same landmarks for the formats that torch knows.

# %%
lines = [f"{'':17}{'max':>12} {'':13} {'min normal':>12} {'':13} {'epsilon':>12}"]
for fmt in (FP32, FP16, BF16, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ):
    info = torch.finfo(fmt.torch_dtype)
    pairs = ((max_finite(fmt), info.max), (min_normal(fmt), info.smallest_normal), (machine_epsilon(fmt), info.eps))
    texts = [f"{ours:12.5g} {'agrees' if ours == theirs else f'torch: {theirs:.5g}':>13}" for ours, theirs in pairs]
    lines.append(f"{fmt.name:17}" + " ".join(texts))
print("\n".join(lines))

# %% [markdown]
# One line disagrees. Both cannot be right. Decode the code of 1.0 in that format and the code after it, in a cell of your own, and decide.
#
# **1.A** What is the epsilon of `float8_e5m2fnuz`?

# %%
question(
    "1.A",
    ### BEGIN SOLUTION
    0.25,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## How far apart are the neighbours?
#
# ### Exercise 1.10 · `ulp` · 30 min · medium · 3 points
#
# The *unit in the last place* of x is the distance between neighbouring values of the format around x. It is the yardstick of this whole course: a rounding error is at most half of it.
#
# The numbers from one power of two up to the next, 2^e to 2^(e + 1), are called a *binade*. Within a binade all values of a format are evenly spaced, 2^(e - m) apart. Below the smallest normal value the spacing does not shrink any further.
# Above the largest finite value there are no more values, and we keep the last spacing.
#
# | | |
# |---|---|
# | in | `x`: float32 tensor, not necessarily values of the format; `fmt` |
# | out | float64 tensor of that shape: 2^(e - m), with e between the exponents of `min_normal(fmt)` and `max_finite(fmt)` |
# | mind | 0 has the spacing of the subnormals; infinity and NaN give NaN |
#
# By hand, E4M3 (m = 3, smallest normal 2^-6, largest 448 = 1.75 * 2^8):
#
# | x | e | ulp |
# |---|---|---|
# | 1.0 | 0 | 2^-3 |
# | 15.999999 (the float32 before 16) | 3 | 2^0 |
# | -300 | 8 | 2^5 |
# | 0 | -6 (the smallest normal's) | 2^-9 |
# | 1e30 | 8 (the largest value's) | 2^5 |
#
# **The trap** is how you get e. `log2` is the obvious way. Run the next cell before you use it.

# %%
just_below = torch.tensor([2.0**k for k in range(-126, 128)])
just_below = torch.nextafter(just_below, torch.zeros(()))
wrong = torch.log2(just_below).floor() != torch.arange(-127, 127)
print(f"floor(log2(x)) is wrong for {int(wrong.sum())} of {len(wrong)} float32 just below a power of two")

# %% [markdown]
# The logarithm of 15.999999 is 3.9999999, and the nearest float32 to that is 4. (In float64 there are digits enough for any *float32*. It fails the same way for its own numbers.) Exponents come from exponent bits, or from
# `torch.frexp`, which reads them. Do not take them from a logarithm.
#
# <details><summary>A nudge</summary>Look up what <code>torch.frexp(torch.tensor(8.0))</code> gives. Its fraction is in [0.5, 1): what does that do to the exponent?</details>
# <details><summary>An approach</summary>Take |x|, clamp it between <code>min_normal(fmt)</code> and <code>max_finite(fmt)</code> first: then both ends need no further thought. Take the exponent, subtract the mantissa bits, make a power of two. Infinity and NaN at the very end, from x itself.</details>


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
plots.spacing([FP32, FP16, BF16, E4M3, E5M2])

# %% [markdown]
# A staircase for each format: one step up at each power of two. See where the stairs end on the left: there the numbers are subnormal, and the spacing stays what it is. That is where small gradients will disappear, in chapter 05.
#
# ### Design a format of your own
#
# Six bits, one of them the sign, and you want every multiple of 0.25 from 0 to 2, and as much range above as you can get. How many mantissa bits, which bias? Change the first line, and look.
#
# <details><summary>One way</summary>Between 1 and 2 the steps are 2^-m, so m is 2. The subnormals have steps of 2^(1 - bias - m); they may be as wide as 0.25, so the bias is 1, and the largest value is 112.</details>

# %%
mine = Format("mine", exponent_bits=3, mantissa_bits=2, bias=3, specials="finite")
print(
    f"{mine.width} bits; largest {max_finite(mine):g}, smallest normal {min_normal(mine):g}, smallest subnormal {min_subnormal(mine)}"
)
plots.number_line([mine, E3M2, E2M3])

# %%
BitExplorer(mine, value=0.75)

# %% [markdown]
# A format that cannot exist tells you why: try `Format("mine", 0, 3)`, or 9 exponent bits.
#
# ---
# ## Read the real code
#
# torch keeps E4M3 in a C++ header that is installed with it. This is how it recognises NaN:

# %%
RELEASE = "https://github.com/pytorch/pytorch/blob/v2.13.0/"
print(
    installed_lines(
        "torch",
        "headeronly/util/Float8_e4m3fn.h",
        "Float8_e4m3fn::isnan() const {",
        after=8,
        link=RELEASE + "torch/headeronly/util/Float8_e4m3fn.h",
    )
)

# %% [markdown]
# **1.B** The header clears one bit and compares the rest with one number. Which number? (Write it as you like: `0x..`, `0b..` or decimal.)

# %%
question(
    "1.B",
    ### BEGIN SOLUTION
    0x7F,
    ### END SOLUTION
)

# %%
print(
    installed_lines(
        "torch",
        "headeronly/util/BFloat16.h",
        "round_to_nearest_even(float src)",
        after=15,
        link=RELEASE + "torch/headeronly/util/BFloat16.h",
    )
)

# %% [markdown]
# And this is how a float32 becomes a BF16. You will write this function in chapter 02. For now one question.
#
# **1.C** A float32 has the bits `0x3F818000`: BF16 keeps the upper half, `0x3F81`, and the lower half is exactly half a step. What is `rounding_bias` for this number?

# %%
question(
    "1.C",
    ### BEGIN SOLUTION
    0x8000,
    ### END SOLUTION
)

# %% [markdown]
# Who decided all this? The two formats were proposed in [FP8 Formats for Deep Learning](https://arxiv.org/abs/2209.05433) and fixed in the OCP 8-bit Floating Point Specification. How they came into PyTorch is told in
# [RFC-0030](https://github.com/pytorch/rfcs/pull/51); its table of formats has the landmarks that you just computed.
#
# ---
# ## Break it
#
# ### Exercise 1.11 · `add_float8` · 10 min · easy · 2 points
#
# You store activations as float8 to save memory, and now you want to add two of them. Run it. (The same error is a public report: [pytorch#107087](https://github.com/pytorch/pytorch/issues/107087).)

# %%
a = torch.tensor([448.0, 0.1, -2.5]).to(torch.float8_e4m3fn)
b = torch.tensor([448.0, 0.1, 1.75]).to(torch.float8_e4m3fn)
try:
    print(a + b)
except NotImplementedError as error:
    print(type(error).__name__ + ":", str(error).splitlines()[0])

# %% [markdown]
# torch does not add float8 tensors, and not by accident: 448 + 448 has no place in E4M3, and somebody has to decide what you get instead. If you store in 8 bits, compute in more, and round again *on purpose*.
#
# Write the sum: exact, or where that does not fit, the nearest float32.
#
# | | |
# |---|---|
# | in | `a`, `b`: tensors of one shape and one float8 dtype (e4m3fn, e5m2, e4m3fnuz or e5m2fnuz) |
# | out | float32 tensor of that shape: the nearest float32 to the exact sum |
# | mind | E5M2 runs from 2^-16 to 57344: does the sum of any two fit into BF16? Into FP16? Infinities and NaNs add as IEEE 754 says |
#
# By hand: 448 + 448 = 896, although E4M3 ends at 448. And 57344 + 2^-16 in E5M2 needs 32 significant bits; float32 has 24, so the answer is 57344.
#
# <details><summary>A nudge</summary>Which dtype holds every value of all four float8 formats exactly, and rounds a sum of two to what the contract asks for?</details>
# <details><summary>An approach</summary>Convert both, add. Then check the two hard cases of the example above in your head: is anything rounded twice?</details>


# %%
@fill
def add_float8(a, b):
    ### BEGIN SOLUTION
    return a.float() + b.float()  # float32 holds every float8 value exactly; the sum is rounded once
    ### END SOLUTION


# %%
check(add_float8)

# %% [markdown]
# ---
# ## What you built
#
# A decoder for any format. Is it fast? A race over a million E4M3 codes: yours against torch's own cast, and against the simplest thing of all, looking the value up in a table of your 256 values.

# %%
codes = torch.randint(0, 256, (1_000_000,), dtype=torch.int32)
float8 = codes.to(torch.uint8).view(torch.float8_e4m3fn)
table = decode(torch.arange(256, dtype=torch.int32), E4M3)
race(
    {
        "decode": lambda: decode(codes, E4M3),
        "torch's cast": lambda: float8.to(torch.float32).double(),
        "table look-up": lambda: table.index_select(0, codes),
    }
).plot(to="torch's cast")

# %% [markdown]
# A table of 256 entries beats arithmetic: with so few codes, *all* the work can be done beforehand. The explorers on this page do exactly that. For 32-bit formats there is no table, and for encoding there is more to do: that is chapter 02, *Which of the two neighbours?*

# %%
progress()
