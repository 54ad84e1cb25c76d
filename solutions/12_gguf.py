# %% [markdown]
# # 12 · GGUF: how do 4.5 bits hold a weight?
#
# **Takes** 7 to 8 hours. **Needs** [chapter 01](01_bit_layouts.ipynb): codes and bits; [chapter 07](07_quantizer.ipynb): amax and granularity; [chapter 11](11_fp8_inference.ipynb): how a served model is measured. For two exercises a C compiler, and enough C to read a loop. **Gives** you the blocks of llama.cpp in Python and in C, byte for byte, and your own GPT in a GGUF file.
#
# Chapter 11 went from 32 bits to 8, with one scale for each row. Below 8 bits a row is too much for one scale: a single large number makes the step so wide that its neighbours share a handful of codes. llama.cpp cuts each row into **blocks** of 32 numbers, and gives each block a scale of its own. The files that people load to run a large model on a laptop are made of such blocks, one after the other.

# %% tags=["setup"]
try:
    import torch

    from lowprec_lab import c_code, check, fill, plots, progress, question, reveal
    from lowprec_lab.calls import AnswerFailed
    from lowprec_lab.formats import BF16, E4M3, FP16, FP32
    from lowprec_lab.gguf_blocks import (
        BLOCK,
        LAYOUTS,
        as_blocks,
        dequantize_blocks,
        q4_0_in_c,
        q8_0_in_c,
        quantize_q4_0,
        quantize_q4_1,
        quantize_q5_0,
        quantize_q8_0,
        run_q4_0,
        run_q8_0,
    )
    from lowprec_lab.libraries import AbsentError, gguf_bytes
    from lowprec_lab.races import race
    from lowprec_lab.reading import installed_lines
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %%
weights = torch.randn(64, 1024, generator=torch.Generator().manual_seed(12))
rest = torch.ones_like(weights, dtype=torch.bool)
rest[0, 0] = False  # all numbers but the outlier


def in_4_bits(x, amax):
    """Codes -7 to 7 in steps of amax / 7, and back."""
    return (x / (amax / 7)).round().clamp(-7, 7) * (amax / 7)


def error_of_the_rest(amax_of):
    """Relative error of all numbers but the outlier, for outliers from 1 to 1024."""
    errors = []
    for power in range(11):
        x = weights.clone()
        x[0, 0] = 2.0**power
        y = in_4_bits(x, amax_of(x))
        errors.append(float((y - x)[rest].norm() / x[rest].norm()))
    return errors


def amax_of_blocks(x):
    return as_blocks(x).abs().amax(-1).repeat_interleave(BLOCK, -1)


scales = {
    "one scale": (lambda x: x.abs().amax(), FP32),
    "one for each row": (lambda x: x.abs().amax(-1, keepdim=True), BF16),
    "one for each block of 32": (amax_of_blocks, E4M3),
}
with plots.style():
    picture, axes = plots.figure(9, 3.6)
    for name, (amax_of, colour) in scales.items():
        errors = error_of_the_rest(amax_of)
        axes.plot(range(11), errors, color=plots.color_of(colour), label=name)
    axes.legend(loc="center right")
    axes.set_xlabel("the outlier is 2^k; all other numbers are normal, about 1")
    axes.set_ylabel("relative error of all others")
    axes.set_ylim(0, 1.1)
    axes.set_title("65,536 numbers in 4 bits, and what one of them does to the rest")
picture

# %% [markdown]
# With one scale, one number among 65,536 is enough to lose all others: they all become 0. With a scale for each row it takes its row along, 1,023 numbers. With one for each block it takes 31, and hardly anybody notices. Even without the outlier a block is better: the largest of 32 normal numbers is smaller than the largest of 1,024, and so is the step.
#
# What does that cost? A scale of 16 bits for 32 numbers is half a bit for each of them. So 4 bits become 4.5, and 8 become 8.5.
#
# **Words.** A **code** is the whole number that is stored for a number; **d** is the step between two codes, so it is chapter 11's scale: `value = code · d`. A **layout** says which bytes of a block hold what. Names like **Q4_0** say how many bits a code has, and which kind it is: *_0* has d alone, *_1* has d and a smallest number. A **nibble** is half a byte.
#
# ---
# ## Blocks of 32
#
# ### Exercise 12.1 · `quantize_q8_0` · 30 min · medium · 3 points
#
# The simplest block: 34 bytes, d and then 32 signed bytes.
#
# | bytes | what |
# |---|---|
# | 0, 1 | d as float16, low byte first |
# | 2 to 33 | the codes of numbers 0 to 31, int8 |
#
# | | |
# |---|---|
# | in | `x`: (..., n) float32, n a multiple of 32, at least one block |
# | out | uint8, (..., n / 32 · 34): the bytes of a row's blocks, one block after the other |
# | d | amax / 127, in float32 |
# | codes | x · id, where id = 1 / d in float32, of the d that is *not yet* a float16; rounded to the nearest whole number, and what is half-way goes **away from zero**: 2.5 to 3, -2.5 to -3 |
# | mind | where d or id is not finite, all 32 codes are 0. That is so for zeros, for numbers of about 1e-37 and below (id is infinite), and with NaN or infinity in the block. A NaN makes d NaN |
# | error | ValueError where 32 does not divide n: `as_blocks` raises it for you |
#
# By hand, for two blocks (all further numbers are 0):
#
# | block | d | stored | codes | back |
# |---|---|---|---|---|
# | 2.54, -1, 0.0123 | 0.02 | 1F 25, which is 0.0200043 | 127, -50, 1 | 2.54054, -1.00021, 0.0200043 |
# | 127, 2.5, -2.5, 0.49999997 | 1 | 00 3C, which is 1 | 127, 3, -3, 0 | 127, 3, -3, 0 |
#
# In the first block you see both errors: that of the code (0.0123 becomes 0.02), and that of d, which is the same factor for all 32 numbers.
#
# `as_blocks(x)` is given: it cuts rows into (..., n / 32, 32).
#
# <details><summary>A nudge</summary>Which way does <code>torch.round</code> send 2.5? And what is 0.49999997 + 0.5 in float32?</details>
# <details><summary>An approach</summary>Cut off the fraction with <code>trunc</code>; where the part that was cut off is at least 0.5 in magnitude, add the sign. For bytes: <code>.half().view(torch.uint8)</code> has two for each number, and <code>.to(torch.int8).view(torch.uint8)</code> one. <code>torch.cat</code> along the last dimension, then flatten the last two.</details>


# %%
@fill
def quantize_q8_0(x):
    ### BEGIN SOLUTION
    blocks = as_blocks(x)
    d = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = 1 / d
    scaled = torch.where(d.isfinite() & inverse.isfinite(), blocks * inverse, 0.0)
    whole = scaled.trunc()
    codes = whole + ((scaled - whole).abs() >= 0.5) * scaled.sign()  # torch.round would send half-way to even
    return torch.cat([d.half().view(torch.uint8), codes.to(torch.int8).view(torch.uint8)], -1).flatten(-2)
    ### END SOLUTION


# %%
check(quantize_q8_0)

# %% [markdown]
# Here is a block, byte by byte:


# %%
def hexadecimal(block):
    return " ".join(f"{byte:02X}" for byte in block.tolist())


block = quantize_q8_0(torch.tensor([2.54, -1.0, 0.0123] + [0.0] * 29))
print("d    ", hexadecimal(block[:2]), "   read as float16:", block[:2].view(torch.float16).item())
print("codes", hexadecimal(block[2:]))

# %% [markdown]
# Why the d that is not rounded? Because then code · d is nearest to x for the d that was *meant*. With the stored d some codes would fit a little better. The difference is small; but a file format is a promise about bytes, and the rule is what it is.
#
# **Predict first:** of a million normal numbers, how many get another code if 1 / d is taken of the float16? And how many if x is divided by d, instead of multiplied by the reciprocal?

# %%
million = torch.randn(1000, 1024, generator=torch.Generator().manual_seed(1))
blocks = as_blocks(million)
d = blocks.abs().amax(-1, keepdim=True) / 127
mine = quantize_q8_0(million).reshape(1000, -1, 34)[..., 2:].view(torch.int8)
for name, scaled in (("1 / float16 of d", blocks * (1 / d.half().float())), ("division by d", blocks / d)):
    others = scaled.sign() * (scaled.abs().double() + 0.5).floor()
    print(f"{name:17} {int((others != mine).sum()):6,} of {mine.numel():,} codes are others")

# %% [markdown]
# ### Exercise 12.2 · `dequantize_blocks` · 35 min · medium · 3 points
#
# Now the way back, and with it all four layouts of 32 numbers. You write the quantizers of the other three afterwards, and will know then what you aim at.
#
# | layout | bytes | d | then | codes | number |
# |---|---|---|---|---|---|
# | q8_0 | 34 | 0, 1 | | 2 to 33: int8 | code · d |
# | q4_0 | 18 | 0, 1 | | 2 to 17: nibbles | (code - 8) · d |
# | q4_1 | 20 | 0, 1 | 2, 3: m as float16 | 4 to 19: nibbles | code · d + m |
# | q5_0 | 22 | 0, 1 | 2 to 5: fifth bits | 6 to 21: nibbles | (code - 16) · d |
#
# **Nibbles.** Byte j of the 16 holds the code of number j in its low half, and that of number j + 16 in its high half. (Neighbours would be the obvious choice. But with this order 16 bytes, taken as one vector, become 16 *consecutive* numbers by one `& 15`, and the next 16 by one shift. Chips are built for that.)
#
# **Fifth bits.** The four bytes are one whole number of 32 bits, low byte first. Its bit j belongs to number j: code = nibble + 16 · bit.
#
# | | |
# |---|---|
# | in | `blocks`: uint8, (..., k · bytes); `layout`: "q8_0", "q4_0", "q4_1" or "q5_0" |
# | out | float32, (..., k · 32) |
# | how | in float32: the product, then the sum. Nothing is special: an infinite d times 0 is NaN |
# | mind | `LAYOUTS[layout].bytes` is given. ValueError for another layout, and for bytes that are no whole blocks |
#
# By hand, Q4_0, the bytes `00 34`, `80 8F` and 14 times `88`: d is 0.25.
#
# | byte | low nibble | high nibble | number j | number j + 16 |
# |---|---|---|---|---|
# | 80, j = 0 | 0 | 8 | (0 - 8) · 0.25 = -2 | 0 |
# | 8F, j = 1 | 15 | 8 | (15 - 8) · 0.25 = 1.75 | 0 |
#
# <details><summary>A nudge</summary><code>view(torch.float16)</code> needs the two bytes side by side in memory: what does <code>.contiguous()</code> do?</details>
# <details><summary>An approach</summary>Cut into blocks with <code>as_blocks(blocks, LAYOUTS[layout].bytes)</code>. Low and high nibbles: <code>&amp; 15</code> and <code>&gt;&gt; 4</code>, one after the other with <code>torch.cat</code>. Fifth bits: each byte with a new last dimension, shifted by 0 to 7, <code>&amp; 1</code>.</details>


# %%
@fill
def dequantize_blocks(blocks, layout):
    ### BEGIN SOLUTION
    if layout not in LAYOUTS or LAYOUTS[layout].size != BLOCK:
        raise ValueError(f"there is no layout {layout!r} of blocks of 32: there are q8_0, q4_0, q4_1, q5_0")
    rows = as_blocks(blocks, LAYOUTS[layout].bytes)
    d, rest = rows[..., :2].contiguous().view(torch.float16).float(), rows[..., 2:]
    if layout == "q8_0":
        return (rest.contiguous().view(torch.int8) * d).flatten(-2)
    packed = rest[..., -16:]
    codes = torch.cat([packed & 15, packed >> 4], -1).float()
    if layout == "q4_1":
        return (codes * d + rest[..., :2].contiguous().view(torch.float16).float()).flatten(-2)
    if layout == "q5_0":
        fifth = rest[..., :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        codes += 16 * fifth.flatten(-2)
    return ((codes - (16 if layout == "q5_0" else 8)) * d).flatten(-2)
    ### END SOLUTION


# %%
check(dequantize_blocks)

# %%
print("    bits for each number")
for name in ("q8_0", "q5_0", "q4_1", "q4_0"):
    layout = LAYOUTS[name]
    print(f"{name} {layout.bits:4}   {layout.bytes} bytes for {layout.size} numbers")

# %% [markdown]
# ### Exercise 12.3 · `quantize_q4_0` · 35 min · medium · 3 points
#
# Four bits have 16 codes, from -8 to 7 once 8 is subtracted. One side has a code more than the other, and Q4_0 gives it to the side that needs it: the largest number, *with its sign*, becomes code 0, that is -8. If it is positive, d is negative.
#
# | | |
# |---|---|
# | in, out | `x` as in 12.1; uint8, (..., n / 32 · 18) |
# | d | (the number of largest magnitude, with its sign) / -8. Of several that are as large, the first |
# | codes | x · id + 8.5 in float32, each step rounded; the fraction cut off; at most 15 |
# | mind | id, NaN and infinity as in 12.1. Where there is no id, all codes are 8, which stand for 0. Zeros have d = 0 / -8 = **-0** |
#
# By hand:
#
# | block | d | x / d | + 8.5 | codes | back |
# |---|---|---|---|---|---|
# | -2, 1.9, 0.25, -0.1, 0, ... | 0.25 | -8, 7.6, 1, -0.4, 0 | 0.5, 16.1, 9.5, 8.1, 8.5 | 0, **15**, 9, 8, 8 | -2, 1.75, 0.25, 0, 0 |
# | 2, -1.9, 0.25, -0.1, 0, ... | -0.25 | -8, 7.6, -1, 0.4, 0 | 0.5, 16.1, 7.5, 8.9, 8.5 | 0, **15**, 7, 8, 8 | 2, -1.75, 0.25, 0, 0 |
#
# The numbers on the other side are the ones who pay: 1.9 would be code 16.
#
# (What d is for a block of -0 is not judged. gguf's numpy takes +0 there, and ggml's C takes -0.)
#
# <details><summary>A nudge</summary><code>argmax</code> of the magnitudes says where the largest number is. Which function takes the number at that place?</details>
# <details><summary>An approach</summary><code>blocks.gather(-1, places)</code>. For nibbles: the first 16 codes, and the last 16 shifted by 4, with <code>|</code>.</details>


# %%
@fill
def quantize_q4_0(x):
    ### BEGIN SOLUTION
    blocks = as_blocks(x)
    d = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    inverse = 1 / d
    scaled = torch.where(d.isfinite() & inverse.isfinite(), blocks * inverse, 0.0)
    codes = (scaled + 8.5).clamp(max=15).to(torch.uint8)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat([d.half().view(torch.uint8), packed], -1).flatten(-2)
    ### END SOLUTION


# %%
check(quantize_q4_0)

# %% [markdown]
# "Each step rounded" is not a matter of taste. Many processors have an instruction that multiplies and adds, and rounds once at the end: a **fused multiply-add**, FMA. A C compiler may use it for x · id + 8.5 if nobody forbids it.
#
# **Predict first:** for how many of a million numbers does that change the code? And if they were stored as bfloat16 before, as the weights of most models are?

# %%
for name, numbers in (("float32", million), ("bfloat16", million.bfloat16().float())):
    blocks = as_blocks(numbers)
    d = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    once = (blocks.double() * (1 / d).double() + 8.5).float()  # the product is exact in float64
    twice = blocks * (1 / d) + 8.5
    others = int((once != twice).sum()), int((once.trunc() != twice.trunc()).sum())
    print(f"{name:9} {others[0]:,} of {once.numel():,} sums are others, and {others[1]} of the codes")

# %% [markdown]
# The sums differ all the time, in their last bit. A code differs only where that bit is the difference between 8.999999 and 9: next to half-way between two codes. Arbitrary numbers are hardly ever there. Numbers of 8 bits often are: the quotient of two of them is half-way in earnest, but for the rounding of 1 / d. So a file made from the same model differs on two machines, in some bytes out of many. That is why your C is compiled with `-ffp-contract=off`.
#
# ### Exercise 12.4 · `quantize_q4_1` · 25 min · easy · 2 points
#
# Numbers that lie on one side of zero waste half of the codes of Q4_0. Q4_1 has a second float16, m, the smallest number, and spends its 16 codes between m and the largest number.
#
# | | |
# |---|---|
# | in, out | `x` as in 12.1; uint8, (..., n / 32 · 20): d, m, nibbles |
# | m, d | m = the smallest number; d = (largest - m) / 15, both in float32 |
# | codes | (x - m) · id + 0.5 in float32, each step rounded, with the m that is *not yet* a float16; the fraction cut off |
# | mind | where all numbers are equal d is 0, and all codes are 0: m says it all. NaN makes d and m NaN; the rest as in 12.1 |
#
# By hand, 2.5, 1.07, 1.62, and 29 times 1: m is 1 (`00 3C`), d is 1.5 / 15 = 0.1 (`66 2E`, 0.099976).
#
# | x | (x - m) · 10 + 0.5 | code | back |
# |---|---|---|---|
# | 2.5 | 15.5 | 15 | 2.49963 |
# | 1.07 | 1.2 | 1 | 1.09998 |
# | 1.62 | 6.7 | 6 | 1.59985 |
# | 1 | 0.5 | 0 | 1 |
#
# <details><summary>A nudge</summary>Can a code become 16 here?</details>
# <details><summary>An approach</summary>12.3 with other d and codes, and one more <code>.half().view(torch.uint8)</code>.</details>


# %%
@fill
def quantize_q4_1(x):
    ### BEGIN SOLUTION
    blocks = as_blocks(x)
    m = blocks.amin(-1, keepdim=True)
    d = (blocks.amax(-1, keepdim=True) - m) / 15
    inverse = 1 / d
    scaled = torch.where(d.isfinite() & inverse.isfinite(), (blocks - m) * inverse, 0.0)
    codes = (scaled + 0.5).clamp(max=15).to(torch.uint8)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat([d.half().view(torch.uint8), m.half().view(torch.uint8), packed], -1).flatten(-2)
    ### END SOLUTION


# %%
check(quantize_q4_1)

# %% [markdown]
# ### Exercise 12.5 · `quantize_q5_0` · 30 min · medium · 3 points
#
# One more bit halves the step. But five bits do not fit into a nibble, so the fifth ones go into four bytes of their own.
#
# | | |
# |---|---|
# | in, out | `x` as in 12.1; uint8, (..., n / 32 · 22): d, four bytes of fifth bits, nibbles |
# | d | (the number of largest magnitude, with its sign) / -16 |
# | codes | x · id + 16.5 in float32, each step rounded; the fraction cut off; at most 31 |
# | bytes | nibbles: the low four bits of codes j and j + 16. Fifth bits: bit j of the whole number of 32 bits is bit 4 of code j; low byte first |
# | mind | as in 12.3; where there is no id, all codes are 16 |
#
# By hand, number 0 is -8, number 1 is 7.9, number 16 is 1.4, number 17 is -0.6, all others are 0: d is 0.5 (`00 38`).
#
# | number | x / d + 16.5 | code | fifth bit | nibble |
# |---|---|---|---|---|
# | 0: -8 | 0.5 | 0 = 0 0000 | 0 | 0, low in byte 0 |
# | 1: 7.9 | 32.3 | 31 = 1 1111 | 1 | F, low in byte 1 |
# | 16: 1.4 | 19.3 | 19 = 1 0011 | 1 | 3, high in byte 0 |
# | 17: -0.6 | 15.3 | 15 = 0 1111 | 0 | F, high in byte 1 |
# | all others: 0 | 16.5 | 16 = 1 0000 | 1 | 0 |
#
# Only bits 0 and 17 of the fifth bits are 0: `FE FF FD FF`. The nibbles are `30 FF` and then `00`.
#
# <details><summary>A nudge</summary>In which of the four bytes is the bit of number 17, and at which place?</details>
# <details><summary>An approach</summary>Bits as (4, 8), shifted left by 0 to 7, summed over the last dimension: a sum of different powers of two is the same as <code>|</code>.</details>


# %%
@fill
def quantize_q5_0(x):
    ### BEGIN SOLUTION
    blocks = as_blocks(x)
    d = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -16
    inverse = 1 / d
    scaled = torch.where(d.isfinite() & inverse.isfinite(), blocks * inverse, 0.0)
    codes = (scaled + 16.5).clamp(max=31).to(torch.uint8)
    fifth = (codes >> 4).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8)
    nibbles = codes[..., :16] & 15 | (codes[..., 16:] & 15) << 4
    return torch.cat([d.half().view(torch.uint8), fifth.sum(-1).to(torch.uint8), nibbles], -1).flatten(-2)
    ### END SOLUTION


# %%
check(quantize_q5_0)

# %% [markdown]
# **Predict first:** how large is the error of normal numbers, in each layout? And of numbers that are all positive?

# %%
quantizers = {"q8_0": quantize_q8_0, "q5_0": quantize_q5_0, "q4_1": quantize_q4_1, "q4_0": quantize_q4_0}
print("     bits   relative error: normal, their magnitudes")
for name, quantize in quantizers.items():
    errors = []
    for x in (million[:200], million[:200].abs()):
        back = dequantize_blocks(quantize(x), name)
        errors.append(float((back - x).norm() / x.norm()))
    print(f"{name} {LAYOUTS[name].bits:4}   {errors[0]:21.2%} {errors[1]:18.2%}")

# %% [markdown]
# A bit less is twice the error, as always; Q4_1 pays half a bit for a range that fits. Weights of a trained model are about as many positive as negative numbers in each block, which is why files are mostly made of kinds without m, and the kinds with 256 numbers below.
#
# And does gguf say the same, byte for byte?

# %%
for name, quantize in quantizers.items():
    try:
        same = torch.equal(quantize(million), gguf_bytes(million, name))
        print(f"{name}: {quantize(million).numel():,} bytes,", "all the same" if same else "and some differ")
    except AbsentError as absent:
        print(f"gguf {absent}: nothing to compare with.")
        break

# %% [markdown]
# ---
# ## Blocks of 32, in C
#
# llama.cpp is written in C and C++. A quantizer is a loop over blocks that reads 32 floats and writes some bytes, and C says that more plainly than tensors do. It is also a different world: a byte written too far is not an error message but somebody else's memory, `8.5` is not a float, and a warning is usually right.
#
# You write a function in a string; the cell hands it over. The lab puts it into this file, in place of the last line, and compiles it:

# %%
print(c_code.GIVEN.read_text())
print("compiled with:", c_code.find_compiler() or "no compiler is here", *c_code.FLAGS)

# %% [markdown]
# All warnings are errors. Your function runs in a process of its own, on arrays that end exactly where memory ends: a float read too far, or a byte written too far, stops it on the spot, and the verdict says so. An endless loop ends after a few seconds. Nothing that you write can harm this notebook; what you write about memory is found out.
#
# Where there is no C compiler, the two exercises say so, and everything else works.
#
# ### Exercise 12.6 · `q8_0_in_c` · 50 min · hard · 4 points
#
# | | |
# |---|---|
# | out | text of C code that defines `void quantize_q8_0(const float *x, uint8_t *out, size_t blocks)` |
# | `x` | `blocks` · 32 floats; only to be read |
# | `out` | `blocks` · 34 bytes; write every one of them |
# | bytes | those of 12.1, for every input |
# | given | `half_bits`: a float's float16 as 16 bits; `BLOCK`; the headers (`fabsf`, `roundf`, `isnan`, `isfinite` are in math.h) |
#
# Here is C for something else, to copy the shape from: it writes, for each block, the sum of the 32 numbers as one byte.
#
# ```c
# void quantize_sum(const float *x, uint8_t *out, size_t blocks) {
#     for (size_t b = 0; b < blocks; b++) {
#         float sum = 0;
#         for (int k = 0; k < BLOCK; k++)
#             sum += x[b * BLOCK + k];
#         out[b] = (uint8_t)sum;
#     }
# }
# ```
#
# Three traps:
#
# | | |
# |---|---|
# | double | `8.5` and `1.0` are doubles; `x[j] * 1.0` is one, too, and is not rounded to float. `8.5f` and `1.0f` are floats, and whole numbers next to a float become floats |
# | NaN | every comparison with NaN is false, `size > amax` as well as `size <= amax`. Ask `isnan(size)` |
# | casts | `(int)v` cuts fractions off, and is undefined for NaN and for what no int can hold. `(uint8_t)` of a negative int wraps around: -1 is 255, which is what a signed byte of -1 looks like. `(uint8_t)` of a negative *float* is undefined |
#
# <details><summary>A nudge</summary>Where is byte 0 of block b? And what has to be 0 again at the beginning of every block?</details>
# <details><summary>An approach</summary>A loop over blocks; in it a loop for amax, then d and id, two bytes of <code>half_bits(d)</code> (<code>half &amp; 0xFF</code> and <code>half &gt;&gt; 8</code>), and a loop for the codes, with <code>roundf</code>. If neither d nor id is finite: 32 zeros.</details>


# %%
@fill
def q8_0_in_c():
    ### BEGIN SOLUTION
    return """
void quantize_q8_0(const float *x, uint8_t *out, size_t blocks) {
    for (size_t b = 0; b < blocks; b++, x += BLOCK, out += 2 + BLOCK) {
        /* The bits of magnitudes are in the order of the magnitudes, with NaN above all. */
        uint32_t most = 0;
        for (int j = 0; j < BLOCK; j++) {
            uint32_t bits;
            memcpy(&bits, x + j, sizeof bits);
            bits &= 0x7FFFFFFF;
            most = bits > most ? bits : most;
        }
        float amax;
        memcpy(&amax, &most, sizeof amax);
        float d = amax / 127, id = 1 / d;
        uint16_t half = half_bits(d);
        out[0] = half & 0xFF;
        out[1] = half >> 8;
        int8_t code[BLOCK] = {0};
        if (isfinite(d) && isfinite(id))
            for (int j = 0; j < BLOCK; j++) {
                float v = x[j] * id;
                /* As roundf, without a call: with 0.5 the number below 0.5 would become 1. */
                code[j] = (int8_t)(v + copysignf(0.49999997f, v));
            }
        memcpy(out + 2, code, BLOCK);
    }
}
"""
    ### END SOLUTION


# %%
check(q8_0_in_c)

# %% [markdown]
# Try it on something, and look at the bytes. `run_q8_0` compiles what your function returns, runs it, and hands back a tensor:

# %%
try:
    block = run_q8_0(q8_0_in_c, torch.tensor([2.54, -1.0, 0.0123] + [0.0] * 29))
    print(hexadecimal(block))
except (c_code.CompilerMissingError, AnswerFailed) as reason:
    print(reason)

# %% [markdown]
# **Predict first:** a race, on a million numbers: your torch, gguf's numpy, your C. Once it has passed its check, your C runs in this process, compiled for this very processor.

# %%
runners = {"torch (12.1)": lambda: quantize_q8_0(million)}
try:
    if torch.equal(run_q8_0(q8_0_in_c, million), quantize_q8_0(million)):  # guarded, before it may run in here
        fast = c_code.in_process(q8_0_in_c(), "quantize_q8_0", block_bytes=LAYOUTS["q8_0"].bytes)
        runners["C (12.6)"] = lambda: fast(million)
    else:
        print("Your C does not run yet: its bytes are not those of 12.1.")
except (c_code.CompilerMissingError, AnswerFailed) as reason:
    print(reason)
try:
    gguf_bytes(million[:1], "q8_0")
    runners["numpy (gguf)"] = lambda: gguf_bytes(million, "q8_0")
except AbsentError as absent:
    print(f"gguf {absent}: it does not run.")
raced = race(runners)
raced.plot(to="torch (12.1)")

# %% [markdown]
# numpy and torch go over memory once for each step: magnitudes, maximum, product, rounding, conversion. C does everything for one block while its 128 bytes are at hand. That is worth a factor of a few. The rest is up to the compiler: if it can work on 4, 8 or 16 numbers in one instruction, it does. It cannot where a loop calls a function (`roundf` is one) or where one turn's result decides what the next one does.
#
# If you like: make yours ten times as fast as numpy, and keep the check green. `reveal(q8_0_in_c)` shows one that is. It takes the maximum of the *bits* of magnitudes, as whole numbers (chapter 01: they are in the order of the values), and rounds by adding 0.49999997 and cutting. Why not 0.5?
#
# ### Exercise 12.7 · `q4_0_in_c` · 40 min · medium · 3 points
#
# | | |
# |---|---|
# | out | text of C code that defines `void quantize_q4_0(const float *x, uint8_t *out, size_t blocks)` |
# | `out` | `blocks` · 18 bytes |
# | bytes | those of 12.3, for every input |
# | mind | 8.5 or 8.5f? > or >=? What is 16 in four bits? Byte j holds numbers j and **j + 16** |
#
# By hand, from 12.3: -2, 1.9, 0.25, -0.1 and zeros have the bytes `00 34 80 8F 89 88` and twelve times `88`.
#
# <details><summary>A nudge</summary>What is the largest number of a block of zeros, and which byte has two codes of 8?</details>
# <details><summary>An approach</summary>Keep the largest number itself, and compare magnitudes: <code>fabsf(x[j]) &gt; fabsf(largest)</code>. Codes into an array of 32, then a loop over 16 bytes.</details>


# %%
@fill
def q4_0_in_c():
    ### BEGIN SOLUTION
    return """
static uint32_t magnitude(const float *x) {
    uint32_t bits;
    memcpy(&bits, x, sizeof bits);
    return bits & 0x7FFFFFFF;
}

void quantize_q4_0(const float *x, uint8_t *out, size_t blocks) {
    for (size_t b = 0; b < blocks; b++, x += BLOCK, out += 2 + BLOCK / 2) {
        uint32_t most = 0;
        for (int j = 0; j < BLOCK; j++)
            most = magnitude(x + j) > most ? magnitude(x + j) : most;
        int first = 0;
        while (magnitude(x + first) != most)
            first++;
        float d = x[first] / -8, id = 1 / d;
        uint16_t half = half_bits(d);
        out[0] = half & 0xFF;
        out[1] = half >> 8;
        uint8_t code[BLOCK];
        memset(code, 8, BLOCK);
        if (isfinite(d) && isfinite(id))
            for (int j = 0; j < BLOCK; j++) {
                float sum = x[j] * id + 8.5f;
                code[j] = (uint8_t)(int)(sum < 15 ? sum : 15);
            }
        uint8_t packed[BLOCK / 2];
        for (int j = 0; j < BLOCK / 2; j++)
            packed[j] = (uint8_t)(code[j] | code[j + BLOCK / 2] << 4);
        memcpy(out + 2, packed, BLOCK / 2);
    }
}
"""
    ### END SOLUTION


# %%
check(q4_0_in_c)

# %% [markdown]
# ---
# ## Blocks of 256


# %% [markdown]
# ---
# ## Read the real code
#
# gguf-py quantizes blocks of 32 in numpy, and says of Q8_0 that its bytes are those of the C:

# %%
GGUF = "https://github.com/ggml-org/llama.cpp/blob/94933c8c2eeaa9a7983e3f6c08af76bd86724094/gguf-py/gguf/quants.py"
print(installed_lines("gguf", "quants.py", "def np_roundf", after=6, link=GGUF))
print()
print(installed_lines("gguf", "quants.py", "d = abs(blocks).max(axis=1, keepdims=True) / 127", after=12, link=GGUF))

# %% [markdown]
# **12.A** What is `np_roundf(-2.5)`? (A number.)

# %%
question(
    "12.A",
    ### BEGIN SOLUTION
    -3.0,
    ### END SOLUTION
)

# %% [markdown]
# **12.B** Is `id` the reciprocal of the d that is stored? (`True` or `False`)

# %%
question(
    "12.B",
    ### BEGIN SOLUTION
    False,
    ### END SOLUTION
)

# %%
print(installed_lines("gguf", "quants.py", "class Q4_0", after=20, link=GGUF))

# %% [markdown]
# **12.C** A block of 32 zeros (+0). Which 16 bits are its d? (A whole number; `0x...` is fine.)

# %%
question(
    "12.C",
    ### BEGIN SOLUTION
    0x8000,
    ### END SOLUTION
)

# %% [markdown]
# The C is in [`ggml-quants.c`](https://github.com/ggml-org/llama.cpp/blob/94933c8c2eeaa9a7983e3f6c08af76bd86724094/ggml/src/ggml-quants.c): look for `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref`, and compare them with yours. There is no test for NaN in them. `MAX(a, b)` is `((a) > (b) ? (a) : (b))`.
#
# **12.D** A block is 1, NaN, 2, and 29 times 0.5. Which amax does `quantize_row_q8_0_ref` find?

# %%
question(
    "12.D",
    ### BEGIN SOLUTION
    2.0,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## Break it
#
# A quantizer of large models prints lines like this one:
#
# > llama_tensor_get_type : tensor cols 14464 x 4096 are not divisible by 256, required for q3_K - using fallback quantization iq4_nl
#
# and people ask whether it cannot count: "anything multiplied by 4096 should be" ([llama.cpp#6614](https://github.com/ggml-org/llama.cpp/issues/6614); also [#2708](https://github.com/ggml-org/llama.cpp/issues/2708), [#2143](https://github.com/ggml-org/llama.cpp/issues/2143), and [#14996](https://github.com/ggml-org/llama.cpp/issues/14996), where the fallback was overruled and the program stopped). A small one of that kind:

# %%
SIZES = {"up.weight": (4096, 14464), "down.weight": (14464, 4096), "odd.weight": (4096, 65)}  # rows, numbers in a row
for name, (rows, n) in SIZES.items():
    try:
        print(f"{name:12} {as_blocks(torch.empty(1, n), 256).shape[1]} blocks of 256 in each of {rows} rows")
    except ValueError as error:
        print(f"{name:12} {error}")

# %% [markdown]
# A block never goes over the end of a row. If it did, a row could not be found, and multiplied, without its neighbours. So it is the length of a *row* that counts, the number of inputs of the layer; "cols" in the message is that number, and comes first.
#
# **12.E** Into how many blocks of 32 can a row of 14464 numbers be cut?

# %%
question(
    "12.E",
    ### BEGIN SOLUTION
    452,
    ### END SOLUTION
)

# %% [markdown]
# The repair is another type for such a tensor. llama.cpp has a table: what was to be Q4_K becomes Q5_0 (a bit more, since it is a simpler kind), what was to be Q6_K becomes Q8_0, and where 32 does not divide a row either, float16.
#
# **12.F** All three were to be Q4_K. Which types do they get? (Three names in a tuple, like `("q4_k", "q8_0", "f16")`.)

# %%
question(
    "12.F",
    ### BEGIN SOLUTION
    ("q5_0", "q4_k", "f16"),
    ### END SOLUTION
)

# %% [markdown]
# Count such tensors before you are surprised by the size of a file: with fallbacks "4 bits" may be 5 or 6. Whoever designs a model can do better, and makes widths multiples of 256.
#
# ---
# ## What you built
#
# The blocks in which most language models on laptops are stored, in two languages, to the last byte. Four points to take along:
#
# - A scale costs 16 bits. For 32 numbers that is half a bit each, and one outlier takes 31 others along instead of a whole row.
# - Asymmetry is a resource: 16 codes are -8 to 7, and the sign of d decides which side gets the eighth.
# - A format is a promise about bytes. Rounding, order of operations, doubles, fused multiply-adds, the first of several largest numbers: each is part of it.
# - C does not tell you what went wrong unless you ask it to: warnings as errors, guarded arrays, sanitizers.

# %%
progress()
