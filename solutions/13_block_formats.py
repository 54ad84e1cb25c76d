# %% [markdown]
# # 13 · Block formats: what do block scales buy?
#
# **Takes** 5 to 6 hours. **Needs** [chapter 07](07_quantizer.ipynb): amax, scales, granularity; [chapter 08](08_float8_linear.ipynb): the three products of a layer. **Gives** you MXFP8, MXFP6, MXFP4, NVFP4 and DeepSeek's blocks, bit for bit; an optimizer whose moments have 8 bits; and a GPT that trains on block-scaled products.
#
# A scale for a whole row has to fit its largest number. If that is an outlier, all others of the row pay for it, and at 4 bits they pay with everything they have. So give each few numbers of a row a scale of their own: a **block**. Then an outlier costs its neighbours, and nobody else. What does it cost to *keep* so many scales, and what is a scale that is kept in 8 bits? This chapter is about the blocks that accelerators multiply: NVIDIA's Blackwell and AMD's MI350 have matrix products whose operands carry a scale for every 32 or 16 numbers.

# %% tags=["setup"]
try:
    import math

    import torch

    from lowprec_lab import BlockExplorer, check, fill, plots, progress, question, reveal
    from lowprec_lab.bits import decode, max_finite
    from lowprec_lab.block_formats import (
        FP8,
        MOMENT_BLOCK,
        MX_BLOCK,
        MX_FORMATS,
        NAN_SCALE,
        NVFP4_BLOCK,
        SCALE_MODES,
        SMALLEST_TENSOR_SCALE,
        Adam8bit,
        adam_8bit_step,
        blockwise_round_trip,
        convert_to_mx,
        dequantize_blockwise,
        dequantize_mx,
        dequantize_nvfp4,
        e8m0_scale,
        empty_moments,
        hadamard_rotate,
        linear_products,
        linear_refusal,
        mx_linear,
        mx_round_trip,
        nvfp4_round_trip,
        pack_nibbles,
        quantize_blockwise_128,
        quantize_mx,
        quantize_nvfp4,
        quick_encode,
        random_signs,
        refusal,
        scale_value,
        unpack_nibbles,
    )
    from lowprec_lab.data import DataError, load_corpus, step_generator
    from lowprec_lab.files import WorkspaceError, under_grading
    from lowprec_lab.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP32
    from lowprec_lab.gpt import GPT, preset
    from lowprec_lab.libraries import AbsentError, torchao_mx, torchao_nvfp4
    from lowprec_lab.quantizer import absmax, dequantize, quantize, spread, sqnr_db, values_of
    from lowprec_lab.reading import installed_lines
    from lowprec_lab.runs import RunError
    from lowprec_lab.serving import load_run, text_of
    from lowprec_lab.weight_formats import ALL_FORMATS, format_picture, format_table, table_text
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %% [markdown]
# Here are 256 weights in MXFP8: 8 blocks of 32, each with a scale of its own. One number (the ring) can be made 2^20 times as large as the largest of the others. Shaded is what the scale of a block reaches; a cross is a number that becomes 0, a triangle one that is cut to the largest value there is. Below the row is the error of each block, with its own scale (dot) and with one scale for all (diamond). The outlier itself does not count in it.
#
# **Predict first:** from which size on does the outlier make others become 0? How many, at most? And in MXFP4? Then drag it.

# %%
BlockExplorer()

# %% [markdown]
# However large it is, it harms its own block and no other. Two more things to find. Make the outlier small: is MXFP8 any better than one scale for the row? And what are the triangles, and which of the four modes have none?
#
# **Words.** An MX tensor has *codes* (elements of 8, 6 or 4 bits) and *scales* (a byte for every 32 codes). A scale is what a code is *multiplied* by, as in chapter 11. The names say the width: MXFP8 has E4M3 codes (or E5M2), MXFP6 E2M3 or E3M2, MXFP4 E2M1.
#
# ---
# ## A scale that is an exponent
#
# ### Exercise 13.1 · `e8m0_scale` · 35 min · hard · 3 points
#
# The scale of an MX block is a byte, and the byte is an exponent: E8M0, 8 bits of exponent and none of mantissa. So a scale is a power of two, from 2^-127 to 2^127. Multiplying by it changes no digit of a number, and it is cheap in hardware: exponents are added.
#
# But amax / 448 is hardly ever a power of two. Which one do you take? Too small, and the largest number does not fit: it saturates. Too large, and half of the range is idle. The formats' inventors disagree, and so there are four modes.
#
# | | |
# |---|---|
# | in | `amax`: float32, any shape, not below 0; `fmt`: the format of the codes; `mode`: "floor", "rceil", "ceil" or "even" |
# | out | uint8, same shape: k + 127 for a scale of 2^k, from 0 to 254 |
# | emax | 2^emax is the largest power of two in the format: 8 for E4M3, 15 for E5M2, 2 for E2M3, 4 for E3M2, 2 for E2M1 |
# | "floor" | k = floor(log2(amax)) - emax: the power of two below amax comes to lie on the format's own. (OCP's rule, and torchao's default) |
# | "ceil" | k = ceil(log2(amax)) - emax |
# | "even" | k = floor(log2(r)) - emax, where r is amax rounded to the mantissa bits of the format, ties upwards |
# | "rceil" | k = ceil(log2(amax / largest value)), the quotient in float32: nothing saturates. (NVIDIA's rule) |
# | mind | 0 gives byte 0, NaN gives 255. Infinity counts as 2^128 (so k = 128 - emax), but "rceil" gives it 254. ValueError that lists the modes for another one |
#
# By hand, for E4M3 (largest value 448 = 1.75 · 2^8, emax 8):
#
# | amax | floor | ceil | even | rceil |
# |---|---|---|---|---|
# | 256 = 1.0 · 2^8 | 8 - 8 = 0 | 0 | 0 | 256 / 448 = 0.57: 0 |
# | 449 = 1.754 · 2^8 | 0 | 9 - 8 = 1 | r = 448 = 1.75 · 2^8: 0 | 1.002: 1 |
# | 496 = 1.9375 · 2^8 | 0 | 1 | a tie, up to 2.0 · 2^8: 1 | 1.107: 1 |
# | 3 · 2^-10 = 1.5 · 2^-9 | -17 | -16 | -17 | 1.71 · 2^-18: -17 |
#
# The byte is that plus 127.
#
# Take the exponent from the *bits*, not from `log2`: you will see below why. Bits 23 to 30 of a float32 are its exponent field, which is 0 for subnormal numbers. `SCALE_MODES` and `NAN_SCALE` are given.
#
# <details><summary>A nudge</summary>What has to be true of the mantissa bits for a number to be a power of two? And what does adding half a step to the <i>bits</i> of a float do to its exponent field, when the mantissa is full?</details>
# <details><summary>An approach</summary><code>bits = size.view(torch.int32)</code>, <code>field = bits >> 23</code>, <code>mantissa = bits & 0x7FFFFF</code>. For "ceil", one more where the mantissa is not 0. For "even", <code>bits + (1 << 22 - fmt.mantissa_bits)</code> first. For "rceil" the quotient can be subnormal: up to 2^-127 it is byte 0, above that byte 1. Then <code>clamp(0, 254)</code>, and 255 for NaN.</details>


# %%
@fill
def e8m0_scale(amax, fmt, mode="floor"):
    ### BEGIN SOLUTION
    if mode not in SCALE_MODES:
        raise ValueError(f"mode is one of {', '.join(SCALE_MODES)}, not {mode!r}")
    largest = max_finite(fmt)
    size, emax = (amax / largest, 0) if mode == "rceil" else (amax, math.frexp(largest)[1] - 1)
    bits = size.contiguous().view(torch.int32)
    if mode == "even":
        bits = bits + (1 << 22 - fmt.mantissa_bits)  # half a step: what rounds up to a power of two gets its exponent
    field, mantissa = bits >> 23, bits & 0x7FFFFF
    if mode in ("ceil", "rceil"):
        reached = (field == 0) & (mantissa <= 0x400000)  # subnormal: up to 2^-127, which byte 0 stands for
        field = field + ((mantissa > 0) & ~reached)
    return torch.where(amax.isnan(), NAN_SCALE, (field - emax).clamp(0, 254)).to(torch.uint8)
    ### END SOLUTION


# %%
check(e8m0_scale)

# %% [markdown]
# **Predict first:** log2 in float32 is rounded like everything. For how many powers of two is `floor(log2(x))` wrong for the number just *below*? And `ceil(log2(x))` for the one just *above*?

# %%
powers = (torch.arange(1, 255, dtype=torch.int32) << 23).view(torch.float32)  # 2^-126 to 2^127
exponents = torch.arange(1, 255) - 127
below, above = torch.nextafter(powers, torch.zeros(1)), torch.nextafter(powers, torch.full((1,), math.inf))
print(f"floor: {int((below.log2().floor() != exponents - 1).sum())} of 254 are wrong just below a power of two")
print(f"ceil:  {int((above.log2().ceil() != exponents + 1).sum())} of 254 are wrong just above one")

# %% [markdown]
# Nearly all of them: the logarithm of 1 + 2^-23 is smaller than half a step at most integers, and is rounded away. Few numbers are next to a power of two, so no test on random numbers finds it.
#
# ### Exercise 13.2 · `quantize_mx` · 30 min · medium · 3 points
#
# Now the codes. A block's numbers are divided by its scale, and rounded.
#
# | | |
# |---|---|
# | in | `x`: (..., K), float32, bfloat16 or float16; `fmt`: one of `MX_FORMATS`; `mode`; `block`: 32, if nobody says otherwise |
# | out | `(codes, scale)`: uint8 in x's shape, one code in each byte; uint8 (..., K / block) |
# | how | scale: 13.1 of each block's largest magnitude. Code: x / 2^(byte - 127), to nearest, ties to even, saturated |
# | mind | byte 0 stands for 2^-127, a subnormal float32: divide by that, and by nothing else. In a block whose scale is 255 (NaN), all codes are 0: formats of 6 and 4 bits have no NaN. ValueError with both numbers where the block does not divide K |
#
# By hand, E2M1 (values 0, 0.5, 1, 1.5, 2, 3, 4, 6) and blocks of 4:
#
# | block | amax | floor: k | divided | codes stand for | back |
# |---|---|---|---|---|---|
# | 0.1, -0.3, 0.05, 0.2 | 0.3 = 1.2 · 2^-2 | -2 - 2 = -4 | 1.6, -4.8, 0.8, 3.2 | 1.5, -4, 1, 3 | 0.09375, -0.25, 0.0625, 0.1875 |
# | 14, 1, 0, -7 | 14 = 1.75 · 2^3 | 3 - 2 = 1 | 7, 0.5, 0, -3.5 | 6, 0.5, 0, -4 | 12, 1, 0, -8 |
#
# In the second block 14 saturates. -3.5 is a tie between -3 and -4, and goes to the even code.
#
# Given: `scale_value(scale)`, 2^(byte - 127) in float32 (NaN for 255), and `quick_encode(x, fmt)`, chapter 02's `encode` several times as fast.
#
# <details><summary>A nudge</summary>How do you get a dimension for the blocks, and one for the numbers in a block?</details>
# <details><summary>An approach</summary><code>x.float().unflatten(-1, (x.shape[-1] // block, block))</code>, the amax over the last dimension, <code>scale_value(scale).unsqueeze(-1)</code>. <code>torch.where</code> puts zeros into blocks that are NaN, before anything is encoded.</details>


# %%
@fill
def quantize_mx(x, fmt, mode="floor", block=MX_BLOCK):
    ### BEGIN SOLUTION
    if x.shape[-1] % block:
        raise ValueError(f"blocks of {block} do not divide rows of {x.shape[-1]}")
    blocks = x.detach().float().unflatten(-1, (x.shape[-1] // block, block))
    scale = e8m0_scale(blocks.abs().amax(-1), fmt, mode)
    scaled = blocks / scale_value(scale).unsqueeze(-1)
    is_nan = scale == NAN_SCALE
    if is_nan.any():
        scaled = scaled.masked_fill(is_nan.unsqueeze(-1), 0.0)
    scaled = scaled.flatten(-2)
    if fmt.torch_dtype is not None and fmt.width == 8:  # the same codes, many times as fast
        largest = max_finite(fmt)
        return scaled.clamp_(-largest, largest).to(fmt.torch_dtype).view(torch.uint8), scale
    return quick_encode(scaled, fmt), scale
    ### END SOLUTION


# %%
check(quantize_mx)

# %% [markdown]
# ### Exercise 13.3 · `dequantize_mx` · 15 min · easy · 2 points
#
# | | |
# |---|---|
# | in | `codes`: uint8 (..., K); `scale`: uint8 (..., K / block), for any block; `fmt` |
# | out | float32, (..., K): decode(code) · 2^(byte - 127) |
# | mind | byte 255: NaN, whatever the codes say. Beyond float32: infinity |
#
# By hand, E2M1: code 0b0111 is 6, code 0b1010 is -1. With byte 128 the scale is 2, and the values are 12 and -2.
#
# <details><summary>A nudge</summary>The block's length is not told. What do the two shapes say?</details>
# <details><summary>An approach</summary><code>values_of(decode, fmt, codes.device)</code> is chapter 07's table of a format's values, float32: index it by the codes. Or <code>decode(codes.int(), fmt)</code>, and <code>repeat_interleave</code> for the scales.</details>


# %%
@fill
def dequantize_mx(codes, scale, fmt):
    ### BEGIN SOLUTION
    values = values_of(decode, fmt, codes.device).index_select(0, codes.flatten().int())  # a table look-up
    blocks = values.view(*scale.shape, codes.shape[-1] // scale.shape[-1])
    return (blocks * scale_value(scale).unsqueeze(-1)).view(codes.shape)
    ### END SOLUTION


# %%
check(dequantize_mx)

# %% [markdown]
# **Predict first:** a block's largest number is 449, 480, 511 or 957. What does each mode make of it? (The others of the block are small.)

# %%
for mode in SCALE_MODES:
    line = []
    for largest in (448.0, 449.0, 480.0, 511.0, 957.0):
        block = torch.full((1, 32), 0.01)
        block[0, 5] = largest
        back = mx_round_trip(block, E4M3, mode)[0, 5].item()
        line.append(f"{largest:g} -> {back:g} ({back / largest - 1:+.1%})".ljust(24))
    print(f"{mode:6}", *line)

# %% [markdown]
# "floor" cuts off what is above 1.75 of a binade, up to an eighth of the largest number of a block. That looks like a bug, and has been reported as one ([microxcaling#4](https://github.com/microsoft/microxcaling/issues/4)): 957 became 896. It is the rule. "rceil" never saturates, and has a coarser step for some blocks instead. For E4M3, whose range is far larger than a block's, that costs nothing at all. For E2M1 it does.
#
# So is MXFP8 any better than one scale for the row, when there is no outlier?

# %%
explorer = BlockExplorer(log2_outlier=0)
print(f"one float32 scale for the row: {explorer.error_with_one_scale:.2%}")
for mode in SCALE_MODES:
    explorer.mode = mode
    print(f"MXFP8, {mode:6} {explorer.error:.2%}")

# %% [markdown]
# No: it is a little worse in every mode. E4M3 has range to spare, and a power of two puts numbers at other places of a binade than amax / 448 does. In floor and even some numbers saturate as well. Blocks are for outliers, and for codes with little range.
#
# **Predict first:** which mode is best for which format? Here is the error in decibel for Gaussian numbers, and for numbers with heavy tails (Student's t with 3 degrees of freedom). Six decibel are one bit.

# %%
generator = torch.Generator().manual_seed(13)
gaussian = torch.randn(256, 512, generator=generator)
chi = sum(torch.randn(256, 512, generator=generator).square() for _ in range(3)) / 3
heavy = torch.randn(256, 512, generator=generator) / chi.sqrt()
print(f"{'':12}{'':14}" + "".join(f"{mode:>8}" for mode in SCALE_MODES))
for kind, x in (("Gaussian", gaussian), ("heavy tails", heavy)):
    for name, fmt in MX_FORMATS.items():
        decibel = [sqnr_db(x, mx_round_trip(x, fmt, mode)) for mode in SCALE_MODES]
        print(f"{kind:12}{name:14}" + "".join(f"{each:8.2f}" for each in decibel))

# %% [markdown]
# Compare the two MXFP6 with the MXFP8 that has as many mantissa bits. For Gaussian numbers E3M2 has the error of E5M2, with a quarter fewer bits. So has E2M3 next to E4M3 in floor and even, within 0.3 dB to either side; in rceil it is half a decibel behind. Only "ceil" does not suit it: whatever is above a power of two is scaled to the lower half of the range, with up to twice the step, and two exponent bits leave few small values. (E4M3 has binades to spare, and there "ceil" costs nothing.) Inside a block of 32 numbers of one kind, most exponent bits have nothing to do: the block's scale has done it already. (Chapter 11 found the same for rows of a weight.) With heavy tails two exponent bits begin to be few.
#
# Now the same tensors in torchao. It follows the same rules, and in three places it does not: the last three lines. Random numbers hardly ever come there.


# %%
def compare(what, x, fmt, mode="floor"):
    """How many scales and codes are others in torchao."""
    codes, scale = quantize_mx(x, fmt, mode)
    their_codes, their_scale = torchao_mx(x, fmt, mode)
    mine = pack_nibbles(codes) if fmt is E2M1 else codes
    print(
        f"{what:44} scales that differ {int((scale != their_scale).sum()):4}, codes {int((mine != their_codes).sum()):5}"
    )


try:
    for name, fmt in MX_FORMATS.items():
        if fmt is not E2M1:  # two codes in a byte: exercise 13.4
            compare(f"{name}, Gaussian, rceil", gaussian, fmt, "rceil")
    tiny = gaussian * 2.0**-128
    compare("MXFP8, floor, about 2^-128: byte 0", tiny, E4M3)
    compare("MXFP8, rceil, about 2^-128: byte 0", tiny, E4M3, "rceil")
    edge = gaussian[:, :32].clamp(-1, 1).contiguous()
    edge[:, 3] = 32 * 448 * (1 + 2.0**-23)  # just above the largest value times a power of two
    compare("MXFP8, rceil, amax just above 32 * 448", edge, E4M3, "rceil")
except AbsentError as absent:
    print(f"torchao {absent}: nothing to compare with.")

# %% [markdown]
# A byte of 0 stands for 2^-127. torchao keeps that byte, but it divides by another number, and in rceil by a third one. (A comment in its code says why: on GPUs, compiled code takes subnormal numbers for zero.) And in rceil some bytes are others. You will read all three in its code, at the end of this chapter. None of it matters to a model. All of it matters to a test that compares bytes.
#
# ---
# ## Two codes in a byte
#
# ### Exercise 13.4 · `pack_nibbles` · 10 min · easy · 1 point
#
# Four bits are half a byte, a **nibble**, and memory has no half bytes.
#
# | | |
# |---|---|
# | in | `codes`: uint8 (..., n), from 0 to 15 |
# | out | uint8 (..., n / 2): the code of an even place in the lower four bits, the one after it in the upper four |
# | mind | ValueError for an odd n |
#
# By hand: codes 1, 2, 15, 0 become 0x21, 0x0F.
#
# <details><summary>A nudge</summary>How many places is the second code shifted?</details>
# <details><summary>An approach</summary><code>codes[..., ::2]</code> and <code>codes[..., 1::2]</code>, a shift and an or.</details>


# %%
@fill
def pack_nibbles(codes):
    ### BEGIN SOLUTION
    if codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape[-1]} codes do not make whole bytes: give an even number of them")
    return codes[..., ::2] | codes[..., 1::2] << 4
    ### END SOLUTION


# %%
check(pack_nibbles)

# %% [markdown]
# ### Exercise 13.5 · `unpack_nibbles` · 10 min · easy · 1 point
#
# | | |
# |---|---|
# | in | `packed`: uint8 (..., n) |
# | out | uint8 (..., 2 n): the lower code of each byte, then its upper one |
#
# By hand: 0x21, 0x0F become 1, 2, 15, 0.
#
# <details><summary>A nudge</summary>The two codes of a byte have to lie side by side in the result. Which dimension do you stack them along?</details>
# <details><summary>An approach</summary><code>torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)</code>.</details>


# %%
@fill
def unpack_nibbles(packed):
    ### BEGIN SOLUTION
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    ### END SOLUTION


# %%
check(unpack_nibbles)

# %% [markdown]
# Not everybody pairs neighbours. llama.cpp's own MXFP4 blocks pair code j with code j + 16, as its Q4_0 does, and a program that took one for the other wrote [fluent nonsense](https://github.com/kekzl/imp/pull/567). Triton once had the two halves [the other way round](https://github.com/triton-lang/triton/pull/5197). Nothing in a byte says which it is.
#
# **Predict first:** the halves of every byte are swapped by such a mistake: no number is lost, each is only in its neighbour's place. What is the error?

# %%
codes, scale = quantize_mx(gaussian, E2M1)
packed = pack_nibbles(codes)
swapped = unpack_nibbles((packed << 4) | (packed >> 4))
print(
    f"{packed.nbytes + scale.nbytes:,} bytes for {gaussian.numel():,} numbers: {8 * (packed.nbytes + scale.nbytes) / gaussian.numel()} bits for each"
)
print(f"right    {sqnr_db(gaussian, dequantize_mx(unpack_nibbles(packed), scale, E2M1)):6.2f} dB")
print(f"swapped  {sqnr_db(gaussian, dequantize_mx(swapped, scale, E2M1)):6.2f} dB")

# %% [markdown]
# Below 0 dB the error is larger than the signal: zeros would have been better. Yet mean, deviation and every histogram are those of the right tensor.
#
# ---
# ## Two levels of scales
#
# ### Exercise 13.6 · `quantize_nvfp4` · 40 min · hard · 4 points
#
# A power of two is a coarse scale: on average a block wastes half a binade, and E2M1 has few. **NVFP4** has a scale with a mantissa, E4M3, and one for every 16 numbers instead of 32. But E4M3 ends at 448 and at 2^-9, so there is a second scale, float32, for the whole tensor: it brings the *scales* into E4M3's range.
#
# | | |
# |---|---|
# | in | `x`: (..., K), float32, bfloat16 or float16; `tensor_scale`: float32 without dimensions, or None |
# | out | `(codes, scale, tensor_scale)`: uint8 in x's shape, one code in each byte; float8_e4m3fn (..., K / 16); the tensor scale in use |
# | tensor scale | given: as it is. None: amax of x / 2688, which is 6 · 448; 1.0 where that is below 2^-100 (`SMALLEST_TENSOR_SCALE`): reciprocals would leave float32 |
# | scale | (amax of the block / 6) / tensor scale, rounded to E4M3, saturated at 448. Subnormal ones are fine |
# | codes | of x · ((1 / tensor scale) / scale): multiplied by a reciprocal, all in float32 |
# | mind | the scale as it is *after* rounding; where it is 0 or NaN, codes are 0. Saturate before the cast: torch 2.13 saturates in `.to(FP8)`, and others may give NaN. ValueError with both numbers where 16 does not divide K |
#
# By hand, a tensor whose amax is 26.88, so its scale is 0.01, and a block in it with amax 3:
#
# | step | |
# |---|---|
# | block scale | 3 / 6 / 0.01 = 50: between 48 and 52 in E4M3, a tie, to 48, which is even |
# | factor | (1 / 0.01) / 48 = 2.083 |
# | 3 | 6.25, saturates: 6. Back: 6 · 48 · 0.01 = 2.88 |
# | 0.4 | 0.833, to 1. Back: 0.48 |
#
# Rounding the scale down lets the largest number saturate; that is the price of a scale with few bits.
#
# <details><summary>A nudge</summary>An infinity makes the tensor scale infinite. What are the scales of the other blocks then, and what is 0 · infinity?</details>
# <details><summary>An approach</summary>Blocks by <code>unflatten</code>, as in 13.2. <code>.clamp(max=448).to(FP8)</code>, and <code>scale.float()</code> for the factor. One <code>torch.where</code> for scales that are 0 or NaN.</details>


# %%
@fill
def quantize_nvfp4(x, tensor_scale=None):
    ### BEGIN SOLUTION
    if x.shape[-1] % NVFP4_BLOCK:
        raise ValueError(f"blocks of {NVFP4_BLOCK} do not divide rows of {x.shape[-1]}")
    blocks = x.detach().float().unflatten(-1, (-1, NVFP4_BLOCK))
    amax = blocks.abs().amax(-1)
    if tensor_scale is None:
        tensor_scale = amax.amax() / (448 * 6)
        tensor_scale = torch.where(tensor_scale < SMALLEST_TENSOR_SCALE, 1.0, tensor_scale)
    scale = (amax / 6 / tensor_scale).clamp(max=448).to(FP8)
    factor = (1 / tensor_scale) / scale.float()  # a block's numbers are multiplied: two divisions for 16 of them
    none = (scale.float() == 0) | scale.float().isnan()
    scaled = torch.where(none.unsqueeze(-1), 0.0, blocks * factor.unsqueeze(-1)).flatten(-2)
    return quick_encode(scaled, E2M1), scale, tensor_scale
    ### END SOLUTION


# %%
check(quantize_nvfp4)

# %% [markdown]
# **Predict first:** three things are different from MXFP4: blocks of 16, scales with a mantissa, the second level. Which of them buys how much? Below, E2M1 codes with one change after the other.


# %%
def with_exact_scales(x, block):
    """E2M1 with a float32 scale of amax / 6 for each block: as good as block scales can be."""
    blocks = x.unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True) / 6
    codes = quick_encode((blocks / scale).flatten(-2), E2M1)
    return (values_of(decode, E2M1, x.device)[codes.int()].unflatten(-1, (-1, block)) * scale).flatten(-2)


rows = {
    "MXFP4, rceil": (4.25, lambda x: mx_round_trip(x, E2M1, "rceil")),
    "MXFP4, even": (4.25, lambda x: mx_round_trip(x, E2M1, "even")),
    "blocks of 16, even": (4.5, lambda x: dequantize_mx(*quantize_mx(x, E2M1, "even", 16), E2M1)),
    "NVFP4": (4.5, nvfp4_round_trip),
    "NVFP4, one level": (4.5, lambda x: dequantize_nvfp4(*quantize_nvfp4(x, torch.tensor(1.0)))),
    "blocks of 16, exact scales": (6.0, lambda x: with_exact_scales(x, 16)),
    "blocks of 32, exact scales": (5.0, lambda x: with_exact_scales(x, 32)),
}
print(f"{'':28} bits   Gaussian   heavy tails   Gaussian / 1000")
for name, (bits, back) in rows.items():
    print(f"{name:28}{bits:5.2f}" + "".join(f"{sqnr_db(x, back(x)):11.2f}" for x in (gaussian, heavy, gaussian / 1000)))

# %% [markdown]
# The mantissa of the scale buys more than the smaller block. Exact scales would buy little on top of that. And the second level costs 32 bits for the whole tensor and is needed as soon as a tensor is not of the size that E4M3 happens to have: with one level alone, small tensors become zeros.
#
# torchao again: it has a smallest block scale that is larger than E4M3's. (Which one? Question 13.C, at the end.) **Predict first:** which blocks does that concern?

# %%
try:
    mixed = gaussian * torch.exp2(torch.randint(-18, 1, (256, 32), generator=generator).float()).repeat_interleave(
        16, 1
    )
    codes, scale, whole = quantize_nvfp4(mixed)
    their_codes, their_scale, their_whole = torchao_nvfp4(mixed)
    other = scale.float() != their_scale.float()
    print(
        f"tensor scales equal: {torch.equal(whole, their_whole)};  block scales that differ: {int(other.sum())} of {scale.numel()}"
    )
    print(
        f"ours there: {len(scale.float()[other].unique())} different ones, theirs: {len(their_scale.float()[other].unique())}"
    )
    same = (pack_nibbles(codes) == their_codes).unflatten(-1, (-1, 8)).all(-1)
    print(f"codes that differ where scales are equal: {int((~same & ~other).sum())}")
    back = dequantize_nvfp4(unpack_nibbles(their_codes), their_scale, their_whole)
    small = other.repeat_interleave(16, -1)
    print(
        f"in those blocks: {sqnr_db(mixed[small], dequantize_nvfp4(codes, scale, whole)[small]):.1f} dB ours, {sqnr_db(mixed[small], back[small]):.1f} dB theirs"
    )
except AbsentError as absent:
    print(f"torchao {absent}: nothing to compare with.")

# %% [markdown]
# Only blocks whose numbers are tens of thousands of times smaller than the tensor's largest. In a product with others they hardly count, so nobody minds. A block of zeros gets that smallest scale there, and 0 here.
#
# Back to the row with the outlier, now by your quantizers. **Predict first:** in MX formats it harmed its own block only. In NVFP4, too?

# %%
explorer = BlockExplorer(fmt="NVFP4")
for size in (0, 8, 16, 18, 20):
    explorer.log2_outlier = size
    print(f"outlier of 2^{size:<3} {explorer.lost:3} of 256 become 0, error of the others {explorer.error:6.1%}")
explorer

# %% [markdown]
# Up to a point. The outlier sets the tensor's scale, and beside it the scales of the other blocks have to fit into E4M3: 448 over 2^-9 is 2^17.8, and no block may be that much smaller than the largest. E8M0 has 255 powers of two, so a block of MX never hears of another one. (What would you do about it: a given tensor scale?)
#
# ---
# ## DeepSeek's blocks
#
# ### Exercise 13.7 · `quantize_blockwise_128` · 30 min · medium · 3 points
#
# DeepSeek-V3 was trained in FP8 before there was hardware for MX. Its blocks are what a GPU without block scales can do in software: E4M3 codes, a float32 scale for 128 numbers along a row of an activation, and for a tile of 128 x 128 of a weight. Every 128 products the tensor core's sum is multiplied by both scales and added up in float32.
#
# | | |
# |---|---|
# | in | `x`: (M, K), float32, bfloat16 or float16; `block`: (1, 128) for activations, (128, 128) for weights; `power_of_two` |
# | out | `(codes, scale)`: float8_e4m3fn (M, K); float32 (ceil(M / rows), ceil(K / columns)) |
# | how | scale = max(amax, 1e-4) / 448; codes = x / scale, both in float32 |
# | power_of_two | the smallest power of two that is not below that scale, exactly |
# | mind | where blocks do not divide, the last ones are smaller. NaN and infinity are the scale of their block |
#
# By hand: amax 3 gives 3 / 448 = 0.0066964; as a power of two, 2^-7 = 0.0078125, and 3 / 2^-7 = 384. A block of zeros has 1e-4 / 448, not 0.
#
# `absmax(x, block)` and `spread(scale, block, shape)` of chapter 07 know blocks. (Sources disagree on one thing: [DeepGEMM's reference](https://github.com/deepseek-ai/DeepGEMM/blob/38939a4c494ce6e904b54da94a1183955a5e9497/deep_gemm/utils/math.py) multiplies by 1 / scale, DeepSeek-V3's own kernel divides. Here we divide. Chapter 11 counted what that changes.)
#
# <details><summary>A nudge</summary>Up to the next power of two, by bits: what carries into the exponent whenever the mantissa is not 0?</details>
# <details><summary>An approach</summary><code>(scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000</code>. Infinity survives that. NaN does not.</details>


# %%
@fill
def quantize_blockwise_128(x, block=(1, 128), power_of_two=False):
    ### BEGIN SOLUTION
    wide = x.detach().float()
    scale = absmax(wide, block).clamp(min=1e-4) / 448
    if power_of_two:
        up = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000  # any mantissa carries into the exponent
        scale = torch.where(scale.isnan(), scale, up.view(torch.float32))
    return (wide / spread(scale, block, x.shape)).clamp(-448, 448).to(FP8), scale
    ### END SOLUTION


# %%
check(quantize_blockwise_128)

# %% [markdown]
# **Predict first:** one number of a matrix is 2^k times as large as the others. From which k on does each way to scale suffer, and how much? (E4M3 throughout. The error is that of all other numbers together.)


# %%
def others_error(x, back, row=7, column=70):
    """The error in decibel of everything but the outlier."""
    rest = torch.ones_like(x, dtype=torch.bool)
    rest[row, column] = False
    return sqnr_db(x[rest], back[rest])


ways = {
    "one scale": lambda x: dequantize(quantize(x, E4M3)),
    "a scale for each row": lambda x: dequantize(quantize(x, E4M3, "row")),
    "128 x 128": lambda x: blockwise_round_trip(x, (128, 128)),
    "1 x 128": lambda x: blockwise_round_trip(x),
    "MXFP8, 1 x 32": lambda x: mx_round_trip(x, E4M3, "rceil"),
}
powers = range(0, 25, 2)
curves = {name: [] for name in ways}
for k in powers:
    x = gaussian.clone()
    x[7, 70] = 2.0**k * 4
    for name, back in ways.items():
        curves[name].append(others_error(x, back(x)))
with plots.style():
    picture, axes = plots.figure(9, 4)
    for place, (name, line) in enumerate(curves.items()):
        axes.plot(powers, line, ("-", "--", "-.", ":", "-")[place], label=name)
    axes.legend()
    axes.set_xlabel("one number is 2^k times as large as the largest others")
    axes.set_ylabel("SQNR of all others, dB")
    axes.set_title("How far an outlier's damage goes in E4M3")
picture

# %% [markdown]
# E4M3 stands an outlier of 2^10 without noticing: that is its range. From there on one scale for the tensor loses a little more of *all* numbers with each doubling, until none is left. A tile of 128 x 128 loses itself, an eighth of this matrix. A scale for each row loses one row of 256, a block of 128 a quarter of that, and a block of 32 a quarter of that again. In 4 bits, where there is no range to spare, this begins at k = 0.
#
# ---
# ## Rotate
#
# ### Exercise 13.8 · `hadamard_rotate` · 25 min · medium · 2 points
#
# Another way against outliers: spread them. Multiply each block by an orthogonal matrix H, and a single large number becomes n equal ones, 1 / sqrt(n) as large. A matrix product does not notice: (x R) (w R)ᵀ = x R Rᵀ wᵀ = x wᵀ. The matrix is Hadamard's, whose entries are 1 and -1, so that it needs no multiplications; random signs in front see to it that no real tensor happens to be its worst case.
#
# | | |
# |---|---|
# | in | `x`: float32 (..., K); `signs`: float32 (n,), of 1.0 and -1.0, n a power of 4; `back` |
# | out | float32, same shape. Forth: each n numbers of a row become (numbers · signs) @ H / sqrt(n). Back: what undoes it |
# | H | H[i, j] is 1 where i & j has an even number of bits set, else -1 |
# | mind | H is symmetric, and H @ H is n times the identity. ValueError with both numbers where n does not divide K |
#
# By hand, n = 4, all signs 1: the rows of H are (1, 1, 1, 1), (1, -1, 1, -1), (1, 1, -1, -1), (1, -1, -1, 1). So (8, 0, 0, 0) becomes (4, 4, 4, 4), and (8, 0, 0, 2) becomes (5, 3, 3, 5).
#
# <details><summary>A nudge</summary>H for 2n has H for n in three of its quarters. What is in the fourth?</details>
# <details><summary>An approach</summary>Begin with a 1 x 1 matrix and double it with <code>torch.cat</code> until it is n x n. Back: multiply by H first, and by the signs last.</details>


# %%
@fill
def hadamard_rotate(x, signs, back=False):
    ### BEGIN SOLUTION
    n = len(signs)
    if x.shape[-1] % n:
        raise ValueError(f"blocks of {n} do not divide rows of {x.shape[-1]}")
    H = torch.ones(1, 1)
    while len(H) < n:
        H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
    blocks = x.unflatten(-1, (-1, n))
    if back:
        return (blocks @ H / math.sqrt(n) * signs).flatten(-2)  # H is symmetric, and H @ H is n times the identity
    return ((blocks * signs) @ H / math.sqrt(n)).flatten(-2)
    ### END SOLUTION


# %%
check(hadamard_rotate)

# %% [markdown]
# **Predict first:** what does a rotation gain where there are outliers, and what where there are none? One of 64 columns is 30 times as large below, as in the activations of large language models. Rotations of 16 and of 64.

# %%
columns = gaussian.clone()
columns[:, ::64] *= 30
for kind, x in (("Gaussian", gaussian), ("heavy tails", heavy), ("large columns", columns)):
    line = [f"{kind:14}"]
    for name, back in (("MXFP4", lambda x: mx_round_trip(x, E2M1, "rceil")), ("NVFP4", nvfp4_round_trip)):
        line.append(f"{name} {sqnr_db(x, back(x)):6.2f} dB")
        for n in (16, 64):
            signs = random_signs(n, seed=1)
            rotated = hadamard_rotate(back(hadamard_rotate(x, signs)), signs, back=True)
            line.append(f"rotated by {n}: {sqnr_db(x, rotated):6.2f}")
    print("   ".join(line))
weight = torch.randn(512, 64, generator=generator)  # what the columns are multiplied by
exact = columns @ weight
for name, back in (("MXFP4", lambda x: mx_round_trip(x, E2M1, "rceil")), ("NVFP4", nvfp4_round_trip)):
    signs = random_signs(64, seed=1)
    rows_of_weight = weight.T.contiguous()
    plain = back(columns) @ back(rows_of_weight).T
    turned = back(hadamard_rotate(columns, signs)) @ back(hadamard_rotate(rows_of_weight, signs)).T
    print(
        f"a product with large columns, {name}: {sqnr_db(exact, plain):.2f} dB, both sides rotated {sqnr_db(exact, turned):.2f} dB"
    )
small = columns.unflatten(-1, (-1, 64))[..., 1:]
for name, back in (
    ("plain", lambda x: mx_round_trip(x, E2M1, "rceil")),
    ("rotated", lambda x: hadamard_rotate(mx_round_trip(hadamard_rotate(x, signs), E2M1, "rceil"), signs, back=True)),
):
    print(
        f"MXFP4, {name:8} the small columns alone: {sqnr_db(small, back(columns).unflatten(-1, (-1, 64))[..., 1:]):6.2f} dB"
    )

# %% [markdown]
# Whatever goes in, a rotated block is nearly Gaussian, and comes back with a Gaussian's decibel: about 19 for MXFP4, 19 to 20 for NVFP4. That is a gain where it was worse before, and a loss where it was better. MXFP4 gains with heavy tails and with large columns, and the small columns beside a large one gain, too. NVFP4 does not: its blocks are small, and its scale with a mantissa puts the largest number of each block close to 6, where it has hardly an error. So a rotation is a cure for a disease; look whether your format has it. (QuaRot rotates for int4 with one scale for a token, where outliers hurt most. NVIDIA's recipe for training in NVFP4 rotates the operands of the weight's gradient alone, by 16 x 16.)
#
# ---
# ## Moments in 8 bits
#
# ### Exercise 13.9 · `adam_8bit_step` · 45 min · hard · 4 points
#
# Adam keeps two numbers for every weight, 8 bytes in float32: more than the weight itself. They are averages, read once in a step and written once, and they need no great precision. Blocks of 256 and E4M3 make two bytes of them, and a little.
#
# The second moment is a trap. It is an average of *squares*, so that its range is twice as wide, in binades, as that of gradients; in one block of E4M3 its small numbers become 0, and an update is divided by its root. So keep the **root** r. (COAT finds the power that suits each block; a root is the simplest case.)
#
# | | |
# |---|---|
# | in | `weight`, `gradient`: float32, one shape; `m_codes`, `r_codes`: float8_e4m3fn, that shape; `m_scale`, `r_scale`: float32, one for each 256 numbers in the order of rows; `step`: 1, 2, ...; `lr`, `betas`, `eps`, `weight_decay` |
# | out | `(new weight, m_codes, m_scale, r_codes, r_scale)` |
# | moments | m = β1 · m + (1 - β1) · g, and v = β2 · r² + (1 - β2) · g², where the old m and r are code · scale |
# | weight | w · (1 - lr · weight_decay) - lr · (m / (1 - β1^step)) / (sqrt(v / (1 - β2^step)) + eps) |
# | kept | m and sqrt(v): scale = amax of the block / 448, and 1.0 where that is below 2^-126; codes = value / scale |
# | mind | the weight is changed by the moments as they are *before* they are rounded; the last block may be smaller than 256 |
#
# By hand, the first step, β = (0.9, 0.999), g = 0.01: m = 0.001, v = 1e-7, r = 0.000316. Corrected, they are 0.01 and 0.01²: the update is lr · 1. With 0.01 as the largest gradient of a block, a gradient of 1e-5 has r / scale = 448 / 1000 = 0.448, which E4M3 keeps with four significant bits. Its v is a millionth of the largest, 448 / 10^6 = 0.000448: below half of 2^-9, and 0.
#
# `MOMENT_BLOCK` is 256.
#
# <details><summary>A nudge</summary>Why would 13.7 with blocks of 1 x 256 not do?</details>
# <details><summary>An approach</summary>Two small functions inside: one from codes and scales to float32, one back. <code>F.pad</code> fills the last block with zeros, which change no amax.</details>


# %%
@fill
def adam_8bit_step(
    weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
):
    ### BEGIN SOLUTION
    def restored(codes, scale):
        return codes.float() * scale.repeat_interleave(MOMENT_BLOCK)[: codes.numel()].view(codes.shape)

    def kept(moment):
        blocks = torch.nn.functional.pad(moment.flatten(), (0, -moment.numel() % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
        scale = blocks.abs().amax(-1) / 448
        scale = torch.where(scale < 2.0**-126, 1.0, scale)
        codes = (blocks / scale[:, None]).clamp(-448, 448).to(FP8)
        return codes.flatten()[: moment.numel()].view(moment.shape), scale

    beta1, beta2 = betas
    m = beta1 * restored(m_codes, m_scale) + (1 - beta1) * gradient
    v = beta2 * restored(r_codes, r_scale).square() + (1 - beta2) * gradient.square()
    update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
    return weight * (1 - lr * weight_decay) - lr * update, *kept(m), *kept(v.sqrt())
    ### END SOLUTION


# %%
check(adam_8bit_step)

# %% [markdown]
# `Adam8bit` is given: a torch optimizer that calls your step for every parameter. Let it train a small GPT, next to AdamW. All runs see the same batches; "other seed" begins with other weights.
#
# **Predict first:** how many bytes does it need for each weight, and what does it cost in loss?

# %%
torch.set_num_threads(1)  # a model as small as this is no quicker on more of them
corpus = load_corpus()
SIZE = preset("baby", vocab_size=len(corpus.vocabulary), width=64, layers=2)
STEPS = 80


def train(optimizer=torch.optim.AdamW, convert=lambda model: model, seed=13):
    """(the losses of all steps, the optimizer, the model) of a short run."""
    torch.manual_seed(seed)
    model = convert(GPT(SIZE))
    made = optimizer(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        for group in made.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - step / STEPS)
        loss = model(*corpus.batch("train", step_generator(13, step), 4, SIZE.context))[1]
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses, made, model.eval()


def last(losses):
    return sum(losses[-20:]) / 20


runs = {"AdamW": train(), "AdamW, other seed": train(seed=14), "Adam8bit": train(Adam8bit)}
for name, (losses, optimizer, model) in runs.items():
    held = optimizer.moment_bytes() if isinstance(optimizer, Adam8bit) else 8 * model.size()
    print(
        f"{name:18} loss of the last 20 steps {last(losses):.4f}   moments {held:9,} bytes, {held / model.size():.2f} for each weight"
    )

# %% [markdown]
# A quarter of the bytes, and a difference in loss that is like that between two seeds.
#
# And was the root worth the trouble? Here are blocks of 256 whose gradients have sizes from 1 down to 2^-k, with the moments that they would have; and the moments of AdamW's run. An update, m / (sqrt(v) + eps), is about 1 or less if all is well. **Predict first:** from which k on does keeping v itself go wrong? And keeping r?


# %%
def kept_in_8_bits(x):
    """x after a round trip through E4M3 in blocks of 256."""
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
    scale = (blocks.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
    values = values_of(decode, E4M3, x.device)[quick_encode(blocks / scale, E4M3).int()] * scale
    return values.flatten()[: x.numel()].view(x.shape)


def show(what, m, v):
    """How many of r and of v become 0, and the largest update with each of them."""
    line = f"{what:22}"
    for name, back in (("r", kept_in_8_bits(v.sqrt())), ("v", kept_in_8_bits(v).sqrt())):
        lost = ((back == 0) & (v > 0)).float().mean()
        line += f"{name}: {lost:6.1%} become 0, largest update {(m / (back + 1e-8)).abs().max():12,.1f}    "
    print(line)


for k in (4, 8, 12, 16, 20):
    sizes = torch.exp2(torch.linspace(0, -k, MOMENT_BLOCK))
    show(f"sizes from 1 to 2^-{k}", sizes * 0.5, sizes.square())
states = list(runs["AdamW"][1].state.values())
m = torch.cat([state["exp_avg"].flatten() for state in states]) / (1 - 0.9**STEPS)
v = torch.cat([state["exp_avg_sq"].flatten() for state in states]) / (1 - 0.99**STEPS)
show("this GPT", m, v)

# %% [markdown]
# Where v becomes 0, its weight moves by tens of thousands of learning rates. (In a real step the newest gradient is added before, which makes it less bad, as long as it is not 0.) This small GPT's blocks are too regular for that: either way would do. v goes wrong when its smallest number is below 2^-10 of its scale, half the smallest E4M3: 448 · 2^-2k < 2^-10, from k = 9.4 on. For r it is 448 · 2^-k, and k = 18.8: twice as many binades. Then r fails in the same way. Whether a block of *yours* spans 2^9, you cannot know beforehand, and a root costs nothing. (COAT chooses the power for each block, and torchao's FP8 Adam keeps v as it is.)
#
# ---
# ## A product of blocks
#
# A layer has three products, and each sums over another dimension. Blocks have to lie along the sum: a scale comes out of a sum of 32 products if all 32 share it, and else it does not. For the output, x and the weight are cut along K. On the way back the weight is summed along N, and x along M. Can one turn round what has been quantized already?
#
# **Predict first:** quantize a matrix and transpose it, or transpose it and quantize: for how many numbers is the result another one? In which formats?

# %%
print(f"{'':14}{'Gaussian':>12}{'heavy tails':>14}{'rows of many sizes':>22}")
sizes = torch.exp2(torch.randint(-12, 13, (256, 1), generator=generator).float())
for name, fmt in MX_FORMATS.items():
    line = f"{name:14}"
    for x, width in ((gaussian, 12), (heavy, 14), (gaussian * sizes, 22)):
        there = mx_round_trip(x, fmt, "rceil").T
        back = mx_round_trip(x.T.contiguous(), fmt, "rceil")
        line += f"{(there != back).float().mean():{width}.1%}"
    print(line)
across = quantize_mx(gaussian, E4M3)[1].shape, quantize_mx(gaussian.T.contiguous(), E4M3)[1].shape
print(
    f"scales of a matrix {tuple(gaussian.shape)}: {tuple(across[0])}, of its transpose: {tuple(across[1])}, transposed {tuple(across[1])[::-1]}"
)

# %% [markdown]
# The scales have another shape: there is no way to get the one from the other. With E4M3 and E5M2 the *values* are the same as long as neighbours are of one size, since a power of two changes nothing but the exponent, and they have exponents to spare. With 6 and 4 bits they are not even for Gaussian numbers: which of them become 0, or lose bits as subnormals, depends on the block they are in. And where rows are of many sizes, a block along a column has large and small numbers in it, and its small ones are lost. So a training step keeps x and the weight in high precision, and quantizes each of them twice, once along each side. (DeepSeek's 128 x 128 tiles are their own transpose: that is what they are for.)
#
# ### Exercise 13.10 · `mx_linear` · 60 min · hard · 5 points
#
# | | |
# |---|---|
# | in | `x`: float32 (..., K); `weight`: float32 (N, K); `fmt`, `mode` |
# | out | float32 (..., N), differentiable in both |
# | output | x @ weight.T: both in blocks along K |
# | grad_x | grad_output @ weight: grad_output in blocks along N, and the weight along N as well |
# | grad_weight | grad_output.T @ x: both in blocks along M, all rows of x |
# | mind | each operand from its own float32 numbers, each time; leading dimensions count as one; ValueError (13.2 raises it) where 32 does not divide a sum |
#
# By hand, with blocks of 2 and E2M1, floor: grad_output = (1, 5; 6, 1). Along rows the first block has amax 5, k = 0, and 5 is a tie between 4 and 6: 4. Along columns the first block is (1, 6): amax 6, k = 0, and 1 and 6 stay. Put (1, 0.2) in place of the second row. Along the second column, amax is 5, and 0.2 becomes 0. Along the row, amax is 1, so k = -2, and 0.2 becomes 0.25. One number, two casts.
#
# <details><summary>A nudge</summary>All three products are of one form, a @ b.T, with blocks along the last dimension of both. Which a and b for grad_x?</details>
# <details><summary>An approach</summary>A small function <code>product(a, b)</code>, and a <code>torch.autograd.Function</code> whose forward is <code>product(x, weight)</code> and whose backward returns <code>product(gradient, weight.T), product(gradient.T, x.T)</code>. Flatten x before, and unflatten the output after.</details>


# %%
@fill
def mx_linear(x, weight, fmt=E4M3, mode="rceil"):
    ### BEGIN SOLUTION
    def product(a, b):
        """a @ b.T: the sum runs over the last dimension of both, and so do the blocks."""
        a, b = (dequantize_mx(*quantize_mx(each, fmt, mode), fmt) for each in (a, b))
        return a @ b.T

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return product(x, weight)

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return product(gradient, weight.T), product(gradient.T, x.T)

    return Products.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))
    ### END SOLUTION


# %%
check(mx_linear)

# %% [markdown]
# `convert_to_mx` makes every linear layer of a GPT one of yours, but the head. **Predict first:** the same run as above, with all products of the layers in MXFP8, and in MXFP4. How much worse is the loss?

# %%
runs["MXFP8"] = train(convert=lambda model: convert_to_mx(model, E4M3, "rceil"))
runs["MXFP4"] = train(convert=lambda model: convert_to_mx(model, E2M1, "even"))
for name in ("AdamW", "AdamW, other seed", "MXFP8", "MXFP4"):
    print(
        f"{name:18} loss of the last 20 steps {last(runs[name][0]):.4f}   {last(runs[name][0]) - last(runs['AdamW'][0]):+.4f}"
    )

# %% [markdown]
# In so short a run, MXFP8 and MXFP4 are both as near to float32 as another seed is: a run of this length cannot tell them apart. A longer one hardly can. With four layers and 500 steps, from two seeds, the validation loss was 2.420 and 2.451 with AdamW, and 2.429 and 2.462 with Adam8bit: 0.01 above in both. With MXFP8 and MXFP4 (even), from the first seed, it was 2.445 and 2.443: not farther off than the other seed. (Chapter 10 says how many runs it takes before one may believe such a difference.) A recipe for training in 4 bits adds what you have met: gradients rounded stochastically (chapter 02), rotations before the weight's gradient, NVFP4's finer scales, and some layers left in high precision.
#
# ---
# ## The table of all formats
#
# Chapter 12's table, with the lines of this chapter: each matrix of a model goes through a format and comes back, and the model is measured. If you have trained `baby256`, that is the model; else it is the small one from above.
#
# **Predict first:** Q4_0, Q4_K and NVFP4 have 4.5 bits. In which order are they by KL divergence? (In the small model the rows are too short for Q4_K's blocks of 256. Its line has a star there: other formats take its place, and it has more bits. The written table below has the order for `baby256`, where nothing falls back.)

# %%
try:
    if under_grading():
        raise RunError("nothing of the learner's is read while a class is graded")
    model, _, sha256, told = load_run("baby256-fp32")
    text, context = text_of("baby256-fp32", sha256), told.context
    print(f"your run baby256-fp32, {told.steps} steps")
except (RunError, DataError, WorkspaceError):
    model, text, context = runs["AdamW"][2], corpus, SIZE.context
    print(f"the small model, {STEPS} steps")
table = format_table(model, [text.even_batch("validation", which, 2, 12, context) for which in range(2)], ALL_FORMATS)
print(table_text(table))
format_picture(table)

# %% [markdown]
# For the record, the lines of this chapter for `baby256` after 2,000 steps in float32, on 20 batches of the validation text:
#
# | format | bits | perplexity | agreement | KL divergence |
# |---|---|---|---|---|
# | float32 | 32 | 5.5658 | 100 % | 0 |
# | MXFP8 (E4M3, rceil) | 8.25 | 5.5686 | 98.04 % | 6.1e-4 |
# | float8, 128 x 128 | 8.002 | 5.5662 | 98.20 % | 6.2e-4 |
# | float8, one scale | 8.000 | 5.5683 | 98.12 % | 6.5e-4 |
# | MXFP6 E2M3 | 6.25 | 5.5674 | 98.05 % | 6.7e-4 |
# | MXFP6 E3M2 | 6.25 | 5.5903 | 96.32 % | 2.4e-3 |
# | NVFP4 | 4.5 | 5.6096 | 94.03 % | 7.9e-3 |
# | Q4_0 | 4.5 | 5.5820 | 94.64 % | 5.8e-3 |
# | Q4_K | 4.5 | 5.5771 | 95.90 % | 4.1e-3 |
# | MXFP4 | 4.25 | 5.6191 | 93.50 % | 1.1e-2 |
#
# In 8 bits, block scales buy nothing for the weights of such a model: rows without outliers have no use for them, and all four lines with three mantissa bits are alike, E2M3's 6.25 bits among them. In 4 bits they are what makes it work at all. (Chapter 11 had E2M1 with one scale for a row.) And among formats of 4.5 bits llama.cpp's are better for *weights*: E2M1 spends a bit on exponents where even steps would do. NVFP4 is made for something else: both operands of a product in 4 bits, activations and gradients with all their outliers, and hardware that multiplies them.
#
# ---
# ## Read the real code
#
# torchao's `to_mx` is 13.1 and 13.2 in one function, for eager mode, for compilers and for GPUs at once:

# %%
AO = "https://github.com/pytorch/ao/blob/v0.18.0/torchao/prototype/mx_formats/"
print(
    installed_lines(
        "torchao",
        "mx_formats/mx_tensor.py",
        "# For now, calculate the scale in floating point",
        after=22,
        link=AO + "mx_tensor.py",
    )
)

# %% [markdown]
# This is for all modes but rceil. `F32_MIN_NORMAL` is the smallest normal float32: 2 ** (-127 + 1) in its file of constants.
#
# **13.A** By which number does it divide a block whose scale byte is 0, in mode floor? (A number. Python can work out powers.)

# %%
question(
    "13.A",
    ### BEGIN SOLUTION
    2.0**-126,
    ### END SOLUTION
)

# %%
print(
    installed_lines("torchao", "mx_formats/mx_tensor.py", "# Normal case", before=8, after=10, link=AO + "mx_tensor.py")
)

# %% [markdown]
# **13.B** That is "rceil". `descale` is 32 · (1 + 2^-23), the float32 after 32. Which byte comes out here? (`torch` is at hand.)

# %%
question(
    "13.B",
    ### BEGIN SOLUTION
    132,
    ### END SOLUTION
)

# %%
print(
    installed_lines(
        "torchao",
        "mx_formats/nvfp4_tensor.py",
        "# Quantize the blockwise scales w/",
        after=12,
        link=AO + "nvfp4_tensor.py",
    )
)
print()
print(installed_lines("torchao", "mx_formats/nvfp4_tensor.py", "E4M3_EPS =", after=1, link=AO + "nvfp4_tensor.py"))

# %% [markdown]
# **13.C** What is the smallest block scale that an NVFP4 tensor of torchao can have? (A number.)

# %%
question(
    "13.C",
    ### BEGIN SOLUTION
    2.0**-6,
    ### END SOLUTION
)

# %% [markdown]
# DeepGEMM has a quantizer for E2M1, too: [`_quantize_to_fp4_e2m1`](https://github.com/deepseek-ai/DeepGEMM/blob/38939a4c494ce6e904b54da94a1183955a5e9497/deep_gemm/utils/math.py). It takes the magnitude of a number and looks it up among the seven boundaries that are half-way between two values, 0.25, 0.75, 1.25 and so on. The code is the place that `torch.bucketize(magnitude, boundaries)` gives. Its option `right` is not set.
#
# **13.D** What does it make of 0.75, which is half-way between 0.5 and 1? (Read what `torch.bucketize` does at a boundary, or try it.)

# %%
question(
    "13.D",
    ### BEGIN SOLUTION
    0.5,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## Break it
#
# **"NVFP4 models produce garbage"** ([modular#6600](https://github.com/modular/modular/issues/6600)). Everything loads, shapes fit, no error anywhere. Two programs write NVFP4 checkpoints. One, ModelOpt, stores what you computed: amax / 2688, and calls it `weight_scale_2`. The other, compressed-tensors, stores what one *divides* by, and calls it `weight_global_scale`. The loader took the second for the first.

# %%
model = runs["AdamW"][2]
layer = model.blocks[1].mlp.up.weight.detach()
codes, scale, whole = quantize_nvfp4(layer)
checkpoint = {"weight_packed": pack_nibbles(codes), "weight_scale": scale, "weight_global_scale": 1 / whole}
print({name: (tuple(part.shape), str(part.dtype)) for name, part in checkpoint.items()})
loaded = dequantize_nvfp4(
    unpack_nibbles(checkpoint["weight_packed"]), checkpoint["weight_scale"], checkpoint["weight_global_scale"]
)
print(f"the weight's largest number: {layer.abs().max():.4f};  of what was loaded: {loaded.abs().max():,.0f}")
print(
    f"correlation with the right weight: {torch.corrcoef(torch.stack((layer.flatten(), loaded.flatten())))[0, 1]:.4f}"
)

# %% [markdown]
# All numbers are too large by the same factor, and in perfect order. Its correlation with the right one says that all is well. **13.E** A tensor's amax is 21. By which factor is everything too large? (Its scale is 21 / 2688 = 1 / 128.)

# %%
question(
    "13.E",
    ### BEGIN SOLUTION
    16384,
    ### END SOLUTION
)

# %% [markdown]
# **13.F** For which amax would nobody ever notice?

# %%
question(
    "13.F",
    ### BEGIN SOLUTION
    2688,
    ### END SOLUTION
)

# %% [markdown]
# A loader cannot know by looking at a number whether it is to be multiplied or divided by. But it can *check*: the largest block scale of a tensor that was quantized with its own amax is 448, or nearly. So the largest value is about 6 · 448 · tensor scale, and a weight whose largest value is in the thousands is no weight.

# %%
for name, guess in (
    ("as a factor", checkpoint["weight_global_scale"]),
    ("as a divisor", 1 / checkpoint["weight_global_scale"]),
):
    values = dequantize_nvfp4(unpack_nibbles(checkpoint["weight_packed"]), checkpoint["weight_scale"], guess)
    print(f"{name:13} largest {values.abs().max():14,.4f}   error {sqnr_db(layer, values):8.2f} dB")

# %% [markdown]
# ---
# ## What you built
#
# Every block format that accelerators multiply today, from exponent bits up. Four points to take along:
#
# - A block's scale does the exponent's work. Inside a block mantissa bits count, and E2M3 is nearly as good as E4M3.
# - A scale is a number that is rounded itself. Powers of two waste half a binade; 4-bit codes feel it, 8-bit codes do not.
# - Blocks lie along a sum. Another sum needs another cast, from high precision.
# - What is kept for a long time (moments, weights) wants the transformation that makes its range small: a root, a rotation.
#
# And of every scale in somebody else's file, ask: is it multiplied or divided by?

# %%
progress()
