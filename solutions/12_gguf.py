# %% [markdown]
# # 12 · GGUF: how do 4.5 bits hold a weight?
#
# **Takes** 7 to 8 hours. **Needs** [chapter 01](01_bit_layouts.ipynb): codes and bits; [chapter 07](07_quantizer.ipynb): amax and granularity; [chapter 11](11_fp8_inference.ipynb): how a served model is measured. For two exercises a C compiler, and enough C to read a loop. **Gives** you the blocks of llama.cpp in Python and in C, byte for byte, and your own GPT in a GGUF file.
#
# Chapter 11 went from 32 bits to 8, with one scale for each row. Below 8 bits a row is too much for one scale: a single large number makes the step so wide that its neighbours share a handful of codes. llama.cpp cuts each row into **blocks** of 32 numbers, and gives each block a scale of its own. The files that people load to run a large model on a laptop are made of such blocks, one after the other.

# %% tags=["setup"]
try:
    import math
    import tempfile
    from pathlib import Path

    import torch

    from lowprec_lab import c_code, check, fill, plots, progress, question, reveal
    from lowprec_lab.calls import AnswerFailed
    from lowprec_lab.data import DataError, load_corpus, step_generator
    from lowprec_lab.files import WorkspaceError, under_grading
    from lowprec_lab.formats import BF16, E4M3, FP16, FP32
    from lowprec_lab.gguf_blocks import (
        ALIGNMENT,
        BLOCK,
        GGUF_TYPES,
        LAYOUTS,
        SAMPLES,
        SUPER_BLOCK,
        GGUFTensor,
        as_blocks,
        defined_q4_0,
        defined_q8_0,
        dequantize_blocks,
        dequantize_q4_k,
        dequantize_q6_k,
        plain_bound,
        q4_0_in_c,
        q8_0_in_c,
        quantize_q4_0,
        quantize_q4_1,
        quantize_q4_k,
        quantize_q5_0,
        quantize_q8_0,
        quantized,
        run_q4_0,
        run_q8_0,
        sample,
        write_gguf,
        written,
    )
    from lowprec_lab.gguf_file import GGUFError, file_name, load_gpt, packed, read_gguf, save_gpt, unpacked
    from lowprec_lab.gpt import GPT, preset
    from lowprec_lab.inference import perplexity
    from lowprec_lab.libraries import AbsentError, gguf_bytes, gguf_numbers
    from lowprec_lab.races import race
    from lowprec_lab.reading import installed_lines
    from lowprec_lab.runs import RunError
    from lowprec_lab.serving import load_run, text_of
    from lowprec_lab.weight_formats import find_format, format_picture, format_table, table_text, with_weights_in
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
# | mind | where d or id is not finite, all 32 codes are 0. That is so for zeros, for a block whose largest magnitude is about 3.7e-37 or less (id is infinite), and with NaN or infinity in the block. A NaN makes d NaN |
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
print(
    "and once more: ", *(c_code.finds_undefined(c_code.find_compiler() or "") or ["no, this compiler cannot do that"])
)

# %% [markdown]
# All warnings are errors. Your function runs in a process of its own, on arrays that end exactly where memory ends: a float read too far, or a byte written too far, stops it on the spot, and the verdict says so. An endless loop ends after a few seconds. So a mistake with memory costs you a verdict, and not this notebook. (It is a process like any other of yours: C can delete a file as well as Python can. In a class, answers run in a sandbox.)
#
# Some mistakes cannot be seen in bytes. What C calls **undefined** may do anything, and may be just right on your processor: a cast of NaN to int, or of -3.0 to a byte. So an answer whose bytes are right is compiled once more, with **sanitizers**: code that is added to yours, and that stops at the first undefined cast, shift, index or overflow of an int. The verdict then says *right here, by luck*, and names the line. It looks at what your code does with the inputs of the check, and at nothing else; where the compiler cannot add such code, such luck is not found out.
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
# In the cell it stands between `return r"""` and `"""`. (With the `r`, a backslash stays one.)
#
# Three traps:
#
# | | |
# |---|---|
# | double | `8.5` and `1.0` are doubles; `x[j] * 1.0` is one, too, and is not rounded to float. `8.5f` and `1.0f` are floats, and whole numbers next to a float become floats |
# | NaN | every comparison with NaN is false, `size > amax` as well as `size <= amax`. Ask `isnan(size)` |
# | casts | `(int)v` cuts fractions off, and is undefined for NaN and for what no int can hold. `(uint8_t)` of a negative int wraps around: -1 is 255, which is what a signed byte of -1 looks like. `(uint8_t)` of a negative *float* is undefined: go over `(int)` |
#
# <details><summary>A nudge</summary>Where is byte 0 of block b? And what has to be 0 again at the beginning of every block?</details>
# <details><summary>An approach</summary>A loop over blocks; in it a loop for amax, then d and id, two bytes of <code>half_bits(d)</code> (<code>half &amp; 0xFF</code> and <code>half &gt;&gt; 8</code>), and a loop for the codes, with <code>roundf</code>. Where d <em>or</em> id is not finite, in a block of zeros too: 32 zeros.</details>


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
# numpy and torch go over memory once for each step: magnitudes, maximum, product, rounding, conversion. C does everything for one block while its 128 bytes are at hand. But each of their steps works on 4, 8 or 16 numbers in one instruction, so a plain C with one number at a time is hardly faster than numpy. C can do that, too, and then it is far ahead. It is up to the compiler: it cannot where a loop calls a function (`roundf` is one) or where one turn's result decides what the next one does.
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
#
# Q4_1 gives each block a smallest number of its own, and pays for it: 32 bits of scales for 32 numbers, which makes 5 bits of 4. The **K-quants** of llama.cpp save there. Eight **groups** of 32 numbers make a block of 256. Each group has a *scale* and a *min* of 6 bits each, and the block has two float16, *d* and *dmin*, which these are multiples of:
#
# | | bits for 256 numbers | bits for each |
# |---|---|---|
# | Q4_0 | 1024 + 8 · 16 | 4.5 |
# | Q4_1 | 1024 + 8 · 32 | 5 |
# | Q4_K | 1024 + 8 · (6 + 6) + 2 · 16 | 4.5 |
#
# So Q4_K is what Q4_1 is, at Q4_0's price. Scales are quantized, too. Is that bad? The largest scale of a block is 63 and is off by less than 1 %, which is little next to a code of 4 bits. A group ten times as small has a scale of 6, which may be off by 8 %: there it shows.
#
# ### Exercise 12.8 · `dequantize_q4_k` · 40 min · medium · 3 points
#
# | bytes | what |
# |---|---|
# | 0, 1 | d, float16 |
# | 2, 3 | dmin, float16 |
# | 4 to 15 | scales and mins of the 8 groups, 6 bits each |
# | 16 to 143 | codes: byte i of the k-th 32 of these has number i of group 2k in its low nibble, and number i of group 2k + 1 in its high one |
#
# Sixteen times 6 bits fill 12 bytes. Groups 0 to 3 lie in whole 6-bit fields; the other groups' bits are put where there is room. For g = 0, 1, 2, 3:
#
# | byte | its high bits | its low bits |
# |---|---|---|
# | 4 + g | 7, 6: the two high bits of the scale of group g + 4 | 5 to 0: the scale of group g |
# | 8 + g | 7, 6: the two high bits of the min of group g + 4 | 5 to 0: the min of group g |
# | 12 + g | 7 to 4: the four low bits of the min of group g + 4 | 3 to 0: the four low bits of its scale |
#
# | | |
# |---|---|
# | in | `blocks`: (..., n · 144) uint8 |
# | out | (..., n · 256) float32: d · scale · code - dmin · min |
# | mind | a min is *subtracted*: it is the smallest number of a group with its sign turned. d and dmin may be anything that float16 can be |
#
# By hand: d = 0.5, dmin = 0.25, and among the bytes
#
# | byte | bits | says |
# |---|---|---|
# | 4 | `10 000011` | scale of group 0: 3; high bits of the scale of group 4: 2 |
# | 8 | `01 000010` | min of group 0: 2; high bits of the min of group 4: 1 |
# | 12 | `0101 1001` | scale of group 4: 2 · 16 + 9 = 41; min of group 4: 1 · 16 + 5 = 21 |
# | 16 | `0111 1011` | code of number 0 of group 0: 11; of number 0 of group 1: 7 |
# | 80 | `0000 0100` | code of number 0 of group 4: 4 |
#
# Number 0 is 0.5 · 3 · 11 - 0.25 · 2 = 16. Number 128, the first of group 4, is 0.5 · 41 · 4 - 0.25 · 21 = 76.75.
#
# <details><summary>A nudge</summary>Do the 12 bytes fall into three times four?</details>
# <details><summary>An approach</summary><code>reshape(-1, 144).split([2, 2, 12, 128], -1)</code>, then the 12 <code>.split(4, -1)</code>. With <code>&amp;</code>, <code>&gt;&gt;</code> and <code>|</code> on uint8 you get (blocks, 8) scales and mins. The 128 bytes are (blocks, 4, 32): put low and high nibbles side by side in a new dimension before you flatten to (blocks, 8, 32).</details>


# %%
@fill
def dequantize_q4_k(blocks):
    ### BEGIN SOLUTION
    d, dmin, packed, codes = blocks.reshape(-1, 144).split([2, 2, 12, 128], -1)
    d, dmin = (each.clone().view(torch.float16).float() for each in (d, dmin))  # (blocks, 1)
    first, second, third = packed.split(4, -1)
    scales = torch.cat([first & 63, (first >> 6) << 4 | (third & 15)], -1)  # (blocks, 8)
    mins = torch.cat([second & 63, (second >> 6) << 4 | (third >> 4)], -1)
    codes = codes.reshape(-1, 4, 1, 32)
    codes = torch.cat([codes & 15, codes >> 4], 2).reshape(-1, 8, 32)
    values = (d * scales)[..., None] * codes - (dmin * mins)[..., None]
    return values.reshape(*blocks.shape[:-1], blocks.shape[-1] // 144 * 256)
    ### END SOLUTION


# %%
check(dequantize_q4_k)

# %% [markdown]
# **Predict first:** ten thousand blocks of random bytes. How many of your 2.56 million numbers differ from gguf's, in any bit?

# %%
random_blocks = torch.randint(256, (10_000, 144), generator=torch.Generator().manual_seed(8)).to(torch.uint8)
try:
    theirs = gguf_numbers(random_blocks, "q4_k")
    ours = dequantize_q4_k(random_blocks)
    same = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    print(f"{int((~same).sum())} of {same.numel():,} numbers differ")
except AbsentError as absent:
    print(f"gguf {absent}: nothing to compare with.")

# %% [markdown]
# None, and not by chance. The order of the multiplications does not matter: d has 11 significant bits, a scale 6 and a code 4, so their product fits into the 24 bits of float32. Only the subtraction rounds. (A machine that fuses it with a multiplication gets the same, since the product was exact.)
#
# ### Exercise 12.9 · `quantize_q4_k` · 60 min · hard · 5 points
#
# Now the other way, and here is no rule that says which bytes are right. A group may have any scale and any min, and what is best depends on all of its 32 numbers. So you are judged by what your bytes stand for.
#
# The plain way takes the ends of a group: low = its smallest number, or 0 if that is smaller (a min has 6 bits and no sign: no group can begin above 0); scale = (largest - low) / 15; min = -low. Then d = the largest scale of the block / 63, dmin = the largest min / 63, each scale and min becomes the nearest multiple, and each number the nearest code.
#
# By hand: numbers -1, 0.2, 0.5 and 2 of a group. Another group of the block has the largest scale, 0.69, and the largest min, 1.9.
#
# | | scale | min | codes | back |
# |---|---|---|---|---|
# | the ends | 3 / 15 = 0.2 | 1 | | |
# | d = 0.69 / 63, dmin = 1.9 / 63 | 18 (18.26) | 33 (33.17) | | |
# | what is stored, in float16 | 18 · 0.010956 = 0.19720 | 33 · 0.030151 = 0.99500 | 0, 6, 8, 15 | -0.995, 0.188, 0.583, 1.963 |
#
# Codes are those of the *stored* scale and min: (0.5 + 0.995) / 0.1972 = 7.58, so 8.
#
# But the ends are rarely the best. Pull them in a little, and one or two numbers are cut off while thirty have a finer grid. Or take any codes, and ask: which scale and which min fit these codes best? That is a line through 32 points, by least squares:
#
# > scale = Σ (code - mean code) · number / Σ (code - mean code)², low = mean number - scale · mean code
#
# and where low comes out above 0, it is 0, and scale = Σ code · number / Σ code². So: try some twenty ranges, take the codes of each, fit a line, keep the one with the smallest squared error. (llama.cpp does this in `make_qkx2_quants`, with weights. Any other way that is as good will pass.)
#
# | | |
# |---|---|
# | in | `x`: (..., n) float32, n a multiple of 256 |
# | out | uint8, (..., n / 256 · 144) |
# | error on the whole | root mean square error at most 1.036 times what a good search has: on normal numbers that is 0.074 of their size. Where groups of a block differ in size, each group's error as a share of its own size: 1.05 times |
# | of each group | never above the bound of the plain way; `plain_bound(x)` has it |
# | mind | zeros stay zeros; d and dmin are finite, at most 65504, also for huge numbers; a block with a NaN or an infinity gets d = NaN, and no other block does |
# | error | ValueError where 256 does not divide n: `as_blocks(x, SUPER_BLOCK)` raises it for you |
#
# To try your own: `sample(kind, seed)` has the numbers that checks are made of; `SAMPLES` lists the kinds.
#
# <details><summary>A nudge</summary>What is 0 / 0, and in which groups does it come up? Which of your numbers do you round to 6 bits, before or after the codes?</details>
# <details><summary>An approach</summary>Work in float64 on (..., blocks, 8, 32): all groups at once, and a loop over ranges: codes = (x - low) / (largest - low) · levels, for levels from 14 to 16 in steps of 0.1, rounded and clamped to 0 to 15. <code>torch.where(error &lt; least, new, old)</code> keeps the best. A small function that divides, and gives 0 where the divisor is 0, takes care of groups of one number and of zeros. Take out what is not finite first, and put NaN into d at the end.</details>


# %%
@fill
def quantize_q4_k(x):
    ### BEGIN SOLUTION
    groups = as_blocks(x, SUPER_BLOCK).unflatten(-1, (8, 32)).double()  # (..., blocks, 8, 32)
    fine = groups.isfinite().all(-1).all(-1, keepdim=True)  # (..., blocks, 1)
    groups = torch.where(fine[..., None], groups, 0.0)

    def total(values):
        return values.sum(-1, keepdim=True)

    def divided(above, below):
        return torch.where(below > 0, above / below, 0.0)

    # Each group by itself: the scale and the lowest value with the least squared error, among 21 candidates.
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    scale, lowest, least = low, low, torch.full_like(low, math.inf)
    for step in range(21):
        codes = (divided(groups - low, high - low) * (14 + step / 10)).round().clamp(0, 15)
        centered = codes - codes.mean(-1, keepdim=True)
        slope = divided(total(centered * groups), total(centered**2))
        start = groups.mean(-1, keepdim=True) - slope * codes.mean(-1, keepdim=True)
        slope = torch.where(start > 0, divided(total(codes * groups), total(codes**2)), slope)  # a line through 0
        start = start.clamp(max=0)
        error = total((slope * codes + start - groups) ** 2)
        better = error < least
        scale, lowest, least = (
            torch.where(better, *each) for each in ((slope, scale), (start, lowest), (error, least))
        )

    # All groups of a block together: six bits for each scale and min, in units of d and dmin.
    fields, tops = [], []
    for values in (scale.squeeze(-1), -lowest.squeeze(-1)):  # (..., blocks, 8)
        top = (values.amax(-1, keepdim=True) / 63).clamp(max=65504).half()
        tops.append(torch.where(fine, top, math.nan))
        fields.append(divided(values, top.double()).round().clamp(0, 63).to(torch.uint8))
    (d, dmin), (scales, mins) = tops, fields

    # Codes for what is stored, not for what was meant.
    steps, offsets = ((top.double() * field)[..., None] for top, field in ((d, scales), (dmin, mins)))
    codes = divided(groups + offsets, steps).round().clamp(0, 15).to(torch.uint8)
    third = scales[..., 4:] & 15 | (mins[..., 4:] & 15) << 4
    packed = [each[..., :4] | each[..., 4:] >> 4 << 6 for each in (scales, mins)]
    nibbles = codes[..., 0::2, :] | codes[..., 1::2, :] << 4  # (..., blocks, 4, 32)
    halves = [each.contiguous().view(torch.uint8) for each in (d, dmin)]
    return torch.cat([*halves, *packed, third, nibbles.flatten(-2)], -1).flatten(-2)
    ### END SOLUTION


# %%
check(quantize_q4_k)

# %% [markdown]
# Why is there something to search for? Here are three groups of normal numbers: the error against the number of levels that the range is cut into, without a line fitted and with one. 15 levels are the ends as they are.

# %%
groups = sample("normal", 4).reshape(-1, 32)[:3].double()
levels = torch.arange(13, 17, 0.02, dtype=torch.float64)


def errors_of(group, fitted):
    """Root mean square error of a group for each number of levels."""
    low, errors = group.min(), []
    for count in levels:
        codes = ((group - low) / (group.max() - low) * count).round().clamp(0, 15)
        centered = codes - codes.mean()
        scale = (centered @ group) / (centered @ centered) if fitted else (group.max() - low) / count
        start = group.mean() - scale * codes.mean() if fitted else low
        errors.append(float((scale * codes + start - group).square().mean().sqrt()))
    return errors


with plots.style():
    picture, axes = plots.figure(9, 4)
    for group, colour in zip(groups, (E4M3, BF16, FP16), strict=True):
        for fitted in (False, True):
            axes.plot(levels, errors_of(group, fitted), "-" if fitted else ":", color=plots.color_of(colour))
    axes.axvline(15, color=plots.color_of(FP32), linewidth=1)
    axes.set_xlabel("levels")
    axes.set_ylabel("root mean square error")
    axes.set_title("Three groups: a line fitted (solid), and not (dotted)")
picture

# %% [markdown]
# The solid curves jump wherever a number goes over to another code: another line fits then. The dotted ones only bend there, but they have many valleys as well. So there is no slope to follow: one has to try. Fitting a line helps everywhere.
#
# **Predict first:** how much is Q4_K better than Q4_0, with as many bits? On numbers around 0, and on numbers around 3?


# %%
def share(x, again):
    return float((again - x).norm() / x.norm())


print(f"{'':22}" + "".join(f"{name:>9}" for name in ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q8_0")))
for kind in SAMPLES:
    x, found = sample(kind, 5), []
    for name in ("q4_0", "q4_1", "q4_k", "q5_0", "q8_0"):
        tensor = packed("x", x, name)  # your quantizer, and then your way back
        found.append(share(x, unpacked(tensor)))
    print(f"{kind:22}" + "".join(f"{each:9.4f}" for each in found))

# %% [markdown]
# Around 0, Q4_K is ahead of Q4_1, which has half a bit more: that is what the search buys. Around 3, half of Q4_0's codes are for numbers that are not there; and Q4_1 is ahead of Q4_K, since its smallest number has a sign and a min has none. Weights of trained models are around 0. What is not, norms and biases, is so little that it stays in float32.
#
# ### Exercise 12.10 · `dequantize_q6_k` · 25 min · medium · 2 points
#
# Files called *Q4_K_M* keep some matrices in more bits: those that hurt most. They are in Q6_K: 16 groups of 16 numbers, a signed scale of 8 bits for each, no min. A code has 6 bits, four in one place and two in another.
#
# | bytes | what |
# |---|---|
# | 0 to 127 | low four bits of two codes each |
# | 128 to 191 | high two bits of four codes each |
# | 192 to 207 | scales of the 16 groups, int8 |
# | 208, 209 | d, float16 (last, for once) |
#
# A block has two halves of 128 numbers; either has 64 bytes of the first kind and 32 of the second. Number k = 32 · j + i of a half (i < 32) has
#
# | j | its four low bits in | its two high bits in byte i, bits |
# |---|---|---|
# | 0 | byte i, low nibble | 0, 1 |
# | 1 | byte 32 + i, low nibble | 2, 3 |
# | 2 | byte i, high nibble | 4, 5 |
# | 3 | byte 32 + i, high nibble | 6, 7 |
#
# | | |
# |---|---|
# | in | `blocks`: (..., n · 210) uint8 |
# | out | (..., n · 256) float32: d · scale · (code - 32) |
# | mind | scales have a sign |
#
# By hand, number 70 of a block: first half, k = 70 = 32 · 2 + 6, so j = 2 and i = 6. Byte 6 is `1010 0011`: high nibble, 10. Byte 128 + 6 is `00 11 01 10`: bits 5 and 4 are 3. The code is 3 · 16 + 10 = 58, minus 32 is 26. Number 70 is in group 70 / 16, rounded down: 4. With a scale of -3 (byte 196 is 253) and d = 0.5 it is 0.5 · -3 · 26 = -39.
#
# <details><summary>A nudge</summary>Which reshape gives you (blocks, half, j, i)?</details>
# <details><summary>An approach</summary>The 128 bytes as (blocks, 2, 1, 64): low and high nibbles side by side in the third dimension are (blocks, 2, 2, 64), which is (blocks, 2, 4, 32). The 64 bytes as (blocks, 2, 32), shifted by 0, 2, 4, 6 and stacked. <code>.to(torch.int8)</code> before you take 32 off.</details>


# %%
@fill
def dequantize_q6_k(blocks):
    ### BEGIN SOLUTION
    low, high, scales, d = blocks.reshape(-1, 210).split([128, 64, 16, 2], -1)
    low = low.reshape(-1, 2, 1, 64)  # (blocks, half, 1, two times 32 numbers)
    low = torch.cat([low & 15, low >> 4], 2).reshape(-1, 2, 4, 32)
    high = torch.stack([high.reshape(-1, 2, 32) >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    codes = (low | high << 4).to(torch.int8) - 32  # (blocks, half, j, i)
    steps = d.clone().view(torch.float16).float() * scales.clone().view(torch.int8)  # (blocks, 16)
    values = steps[..., None] * codes.reshape(-1, 16, 16)
    return values.reshape(*blocks.shape[:-1], blocks.shape[-1] // 210 * 256)
    ### END SOLUTION


# %%
check(dequantize_q6_k)

# %% [markdown]
# ---
# ## A file for others
#
# Blocks are bytes, and bytes go into a file. GGUF is the one that llama.cpp loads, and everything that is built on it. It says what the model is (metadata), which tensors there are, and where their bytes begin. A program maps the file into memory and computes with the blocks where they lie: nothing is unpacked, nothing copied.
#
# ### Exercise 12.11 · `write_gguf` · 50 min · medium · 4 points
#
# All numbers are little-endian. A *text* is its length in bytes (uint64), and its bytes in UTF-8.
#
# | part | what |
# |---|---|
# | beginning | `GGUF`; uint32 3, the version; uint64: number of tensors; uint64: number of entries |
# | each entry | key, a text; uint32 type; value |
# | each tensor | name, a text; uint32: number of dimensions; uint64 for each, **the last one of torch first**; uint32 type (`GGUF_TYPES[kind]`); uint64: where its bytes begin, counted from the beginning of the data |
# | zeros | up to a multiple of the alignment, counted from the beginning of the file |
# | data | each tensor's bytes, and zeros up to a multiple of the alignment; after the last one, too |
#
# | Python | type | value |
# |---|---|---|
# | `int` | 4 | uint32 |
# | `float` | 6 | float32 |
# | `bool` | 7 | one byte, 1 or 0 |
# | `str` | 8 | a text |
# | `list` | 9 | uint32 type of its elements (no list is empty); uint64: how many; the elements, one after the other |
#
# | | |
# |---|---|
# | in | `file`: has `write(bytes)`; `metadata`: a dict; `tensors`: a list of `GGUFTensor(name, kind, shape, data)`, data uint8 |
# | out | nothing; what you wrote is compared |
# | alignment | `metadata["general.alignment"]` where it is given, else `ALIGNMENT`, 32 |
# | mind | the order of dict and list is that of the file; `True` is an int in Python, and not here |
#
# By hand, a file of one entry and one tensor of shape (2, 3). Find in it: the dimensions (3 first), the zeros up to byte 128, and those after the 24 bytes of the tensor.
#
# ```
#   0  47 47 55 46 03 00 00 00 01 00 00 00 00 00 00 00   GGUF............
#  16  01 00 00 00 00 00 00 00 14 00 00 00 00 00 00 00   ................
#  32  67 65 6e 65 72 61 6c 2e 61 72 63 68 69 74 65 63   general.architec
#  48  74 75 72 65 08 00 00 00 0b 00 00 00 00 00 00 00   ture............
#  64  6c 6f 77 70 72 65 63 5f 67 70 74 08 00 00 00 00   lowprec_gpt.....
#  80  00 00 00 61 2e 77 65 69 67 68 74 02 00 00 00 03   ...a.weight.....
#  96  00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 00   ................
# 112  00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00   ................
# 128  01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f 10   ................
# 144  11 12 13 14 15 16 17 18 00 00 00 00 00 00 00 00   ................
# ```
#
# <details><summary>A nudge</summary>Everything up to the data has to be known before the first byte of data is written: which sizes do you need for that?</details>
# <details><summary>An approach</summary><code>struct.pack("&lt;IQ", 3, 1)</code> makes bytes of a uint32 and a uint64 ("Q"); import struct in the cell. Put the head together, with a running offset for the tensors; <code>bytes(-size % alignment)</code> are the zeros. Ask for <code>type(value)</code>: <code>isinstance(True, int)</code> says yes.</details>


# %%
import struct


@fill
def write_gguf(file, metadata, tensors):
    ### BEGIN SOLUTION
    alignment = metadata.get("general.alignment", ALIGNMENT)
    types = {str: 8, bool: 7, int: 4, float: 6, list: 9}

    def text(value):
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    def plain(value):
        if type(value) is str:
            return text(value)
        if type(value) is list:
            return struct.pack("<IQ", types[type(value[0])], len(value)) + b"".join(plain(each) for each in value)
        return struct.pack({bool: "<?", int: "<I", float: "<f"}[type(value)], value)

    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head.append(text(key) + struct.pack("<I", types[type(value)]) + plain(value))
    offset = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]
        told = (len(sizes), *sizes, GGUF_TYPES[tensor.kind], offset)
        head.append(text(tensor.name) + struct.pack(f"<I{len(sizes)}QIQ", *told))
        offset += tensor.data.numel() + -tensor.data.numel() % alignment
    for content in (b"".join(head), *(tensor.data.numpy().tobytes() for tensor in tensors)):
        file.write(content + bytes(-len(content) % alignment))
    ### END SOLUTION


# %%
check(write_gguf)

# %% [markdown]
# Now a model. Its rows should be made of blocks of 256, so its width is 256 (the preset `baby256`). If you have trained one, with `lowprec-lab train --preset baby256 --precision fp32` (some minutes on a laptop), this page takes it. If not, here is a smaller one of that width, trained for a few seconds.

# %%
torch.set_num_threads(1)
try:
    if under_grading():
        raise RunError("nothing of the learner's is read while a class is graded")
    model, vocabulary, sha256, told = load_run("baby256-fp32")
    corpus, context = text_of("baby256-fp32", sha256), told.context
    print(f"your run baby256-fp32, {told.steps} steps")
except (RunError, DataError, WorkspaceError):
    corpus, context = load_corpus(), 32
    torch.manual_seed(12)
    vocabulary = corpus.vocabulary
    model = GPT(preset("baby256", vocab_size=len(vocabulary), layers=1, context=context))
    optimizer, STEPS = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99)), 250
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 20) * (1 - step / STEPS)
        loss = model(*corpus.batch("train", step_generator(12, step), 12, context))[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    print(f"a small model, {STEPS} steps, loss {loss.item():.2f}")
validation = [corpus.even_batch("validation", which, 6, 12, context) for which in range(6)]

folder = Path(tempfile.mkdtemp(prefix="lowprec-lab-"))
saved = save_gpt(model, "q4_k", folder / "model.gguf", vocabulary, name="mine")
print(saved.text())
print(f"{saved.bytes:,} bytes; {4 * model.size():,} in float32")
found = read_gguf(folder / "model.gguf")
for key, value in list(found.metadata.items())[:8]:
    print(f"   {key:36} {value}")
for name, tensor in list(found.tensors.items())[:6]:
    print(f"   {name:36} {tensor.kind:5} {tensor.shape}")

# %% [markdown]
# `save_gpt` quantizes each matrix with your functions, and hands the bytes to the one that writes. Vectors stay in float32. The names are llama.cpp's. Where rows are not made of blocks of 256, as in the narrower preset `baby`, matrices fall back to Q5_0:

# %%
print(save_gpt(GPT(preset("baby", layers=1)), "q4_k", folder / "baby.gguf").text())

# %% [markdown]
# **Predict first:** is the perplexity of the model that is read from the file *exactly* that of the model in memory whose weights went through Q4_K?

# %%
again, characters = load_gpt(folder / "model.gguf")
in_memory, bits, fell_back = with_weights_in(model, find_format("Q4_K"))
print(f"float32        {perplexity(model, validation):.6f}")
print(f"in memory      {perplexity(in_memory, validation):.6f}   ({bits:.3f} bits for each weight)")
print(f"from the file  {perplexity(again, validation):.6f}")
try:
    import gguf

    reader = gguf.GGUFReader(folder / "model.gguf")
    ours = {file_name(name): parameter.detach() for name, parameter in again.named_parameters()}
    equal = sum(
        torch.equal(
            torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()).reshape(ours[t.name].shape),
            ours[t.name],
        )
        for t in reader.tensors
    )
    print(f"gguf's reader: {len(reader.tensors)} tensors, {equal} of them equal to ours, number by number")
except ImportError:
    print("gguf is not installed: nothing to compare with.")

# %% [markdown]
# It is: the same bytes, the same way back. Could llama.cpp run this file? It can list it. But it has no program for our architecture: a GPT without biases, with characters as tokens. The key `general.architecture` is there so that a program says so instead of guessing.
#
# A reader has to expect anything: files that are cut off by a full disk, and files that are something else. `read_gguf` compares each length with what is left of the file, before it allocates anything.

# %%
content = (folder / "model.gguf").read_bytes()
for name, bad in (
    ("cut off", content[:-1000]),
    ("cut off early", content[:300]),
    ("another file", b"PK\x03\x04" + content[4:]),
    ("another architecture", content.replace(b"lowprec_gpt", b"someone_gpt", 1)),
    ("a count of 2^60", content[:8] + (2**60).to_bytes(8, "little") + content[16:]),
):
    (folder / "bad.gguf").write_bytes(bad)
    try:
        load_gpt(folder / "bad.gguf")
    except GGUFError as error:
        print(f"{name:21} {str(error).removeprefix(str(folder) + '/')}")

# %% [markdown]
# `lowprec-lab quantize RUN --recipe q4_k` writes such a file for a run of yours, and says what it costs. `q8_0`, `q5_0`, `q4_1`, `q4_0` and `f16` are there, too; `lowprec-lab generate` reads them.
#
# ---
# ## What bits are worth
#
# Every format of the course that you have a quantizer for, on the same model: each matrix goes through the format and comes back, and the model is measured.
#
# **Predict first:** two formats have 4.5 bits. Which one is better, and by how much? And of those with about 8 bits: is float8 as good as whole numbers?

# %%
rows = format_table(model, validation)
print(table_text(rows))
format_picture(rows)

# %% [markdown]
# For the record, `baby256` after 2,000 steps in float32, on 20 batches of the validation text:
#
# | format | bits | perplexity | agreement | KL divergence |
# |---|---|---|---|---|
# | float32 | 32 | 5.5658 | 100 % | 0 |
# | bfloat16 | 16 | 5.5658 | 99.90 % | 2.1e-6 |
# | Q8_0 | 8.5 | 5.5670 | 99.70 % | 2.1e-5 |
# | float8, scale per channel | 8.09 | 5.5662 | 98.25 % | 5.8e-4 |
# | int8, scale per channel | 8.09 | 5.5653 | 99.62 % | 3.8e-5 |
# | float8, one scale | 8.00 | 5.5683 | 98.12 % | 6.5e-4 |
# | Q5_0 | 5.5 | 5.5738 | 97.59 % | 1.4e-3 |
# | Q4_1 | 5 | 5.5944 | 95.16 % | 5.1e-3 |
# | Q4_0 | 4.5 | 5.5820 | 94.64 % | 5.8e-3 |
# | Q4_K | 4.5 | 5.5771 | 95.90 % | 4.1e-3 |
#
# Three things are worth a second look.
#
# - *Eight bits are not eight bits.* float8 spends four of them on exponents, and has steps of 1/16 to 1/8 of a number's size, for large numbers as for small ones. Weights within a row differ so little in size that int8's even steps, 1/127 of the largest, are finer where it counts: its KL divergence is 15 times smaller. The range of float8 is for activations and gradients, and for hardware that multiplies it.
# - *Perplexity is coarse.* It says that Q4_1 is worse than Q4_0, and int8 better than float32. The KL divergence has them in order: it compares whole predictions with those of the model in float32, and not with the one character that comes next in the text.
# - *The search pays.* Q4_K has as many bits as Q4_0, and is nearer to the model than Q4_1.
#
# On the small model that this page trains where it finds no run of yours, all formats of 4 bits are within half a percent of float32's perplexity, in any order: Q4_0 may be best of all, even before float32, and Q4_K worst. It has learned too little for its weights to matter that much. Its KL divergences rank the formats as those above do, except that Q4_K and Q4_1 are side by side.


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
# **12.F** All three were to be Q4_K. Which types do they get? (Three names in a tuple, like `("q4_k", "q8_0", "f16")`; small letters or capitals.)

# %%
question(
    "12.F",
    ### BEGIN SOLUTION
    ("q5_0", "q4_k", "f16"),
    ### END SOLUTION
)

# %% [markdown]
# Count such tensors before you are surprised by the size of a file: with fallbacks "4 bits" may be 5 or 6. Whoever designs a model can do better, and makes widths multiples of 256.

# %% [markdown]
# ---
# ## Read on: blocks of 256
#
# Here is how gguf takes the 12 bytes of Q4_K apart. A to H are the eight groups, capitals the scales, small letters the mins, and a letter stands for a bit:

# %%
print(installed_lines("gguf", "quants.py", "def get_scale_min", after=24, link=GGUF))

# %% [markdown]
# **12.G** In which of these 12 bytes are the four low bits of the scale of group 5? (0 to 11.)

# %%
question(
    "12.G",
    ### BEGIN SOLUTION
    9,
    ### END SOLUTION
)

# %% [markdown]
# The other way is in [`ggml-quants.c`](https://github.com/ggml-org/llama.cpp/blob/94933c8c2eeaa9a7983e3f6c08af76bd86724094/ggml/src/ggml-quants.c) alone: read `quantize_row_q4_K_ref`, and the search that it calls, `make_qkx2_quants`. It is yours, with one more idea: errors have *weights*. `weights[l] = av_x + fabsf(x[32*j + l])`, where av_x is the root mean square of the group: large weights of a model do more, so their errors count more.
#
# **12.H** A group has a root mean square of 1. How many times as much does a squared error count there at a number 3 as at a number 0?

# %%
question(
    "12.H",
    ### BEGIN SOLUTION
    4.0,
    ### END SOLUTION
)

# %% [markdown]
# With these weights the plain error on normal numbers is a bit more: 0.0716 instead of 0.0711, on an average of `sample("normal", seed)` for seeds 0 to 11. It is not what they are for.
#
# And where gguf's reader looks for the data:

# %%
READER = GGUF.replace("quants.py", "gguf_reader.py")
print(
    installed_lines("gguf", "gguf_reader.py", "new_align = self.fields.get('general.alignment')", after=14, link=READER)
)

# %% [markdown]
# **12.I** The last tensor's entry ends at byte 1000, and `general.alignment` is 64. At which byte does the data begin?

# %%
question(
    "12.I",
    ### BEGIN SOLUTION
    1024,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## What you built
#
# The blocks in which most language models on laptops are stored, in two languages and to the last byte, and your own GPT in a file of them. Five points to take along:
#
# - A scale costs 16 bits. For 32 numbers that is half a bit each, and an outlier takes 31 numbers along instead of a whole row.
# - Asymmetry is a resource: 16 codes are -8 to 7, and the sign of d decides which side gets the eighth.
# - A format is a promise about bytes. Rounding, order of operations, doubles, fused multiply-adds, the first of several largest numbers: each is part of it. Where there is no such promise, as for Q4_K, a search for better bytes pays.
# - C does not tell you what went wrong unless you ask it to: warnings as errors, guarded arrays, sanitizers.
# - Compare a quantized model with the model itself. Perplexity on one text is too coarse to tell 4.5 bits from 5.
#
# Here a scale was a float16, and it took a division to find it. Chapter 13 has the formats that hardware multiplies: scales that are powers of two, or eight bits, and codes that are tiny floats.

# %%
progress()
