# %% [markdown]
# # 12 · GGUF: how do 4.5 bits hold a weight?
#
# **Takes** 6 to 7 hours. **Needs** [chapter 01](01_bit_layouts.ipynb): codes and bits; [chapter 07](07_quantizer.ipynb): amax and granularity; [chapter 11](11_fp8_inference.ipynb): what a served model is measured by. A C compiler for two of its exercises. **Gives** you the blocks of llama.cpp in Python and in C, byte for byte, and your own GPT as a GGUF file.
#
# Chapter 11 went from 32 bits to 8, with one scale for each row. Below 8 bits a row is too much for one scale: a single large number makes the step so wide that all its neighbours fall to a handful of codes. llama.cpp cuts each row into **blocks** of 32 numbers, and gives each of them a scale of its own. The files that people load to run a large model on a laptop are made of these blocks, one after the other.

# %% tags=["setup"]
try:
    import math

    import torch

    from lowprec_lab import check, fill, progress, question, reveal
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
    from lowprec_lab.gguf_blocks import (
        ALIGNMENT,
        GGUF_TYPES,
        SUPER_BLOCK,
        GGUFTensor,
        dequantize_q4_k,
        dequantize_q6_k,
        plain_bound,
        quantize_q4_k,
        quantized,
        sample,
        write_gguf,
        written,
    )
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %% [markdown]
# ---
# ## Blocks of 32
#
# ### Exercise 12.1 · `quantize_q8_0` · 30 min · medium · 3 points
#
# | | |
# |---|---|
# | in | `x`: (..., n) float32 |
# | out | uint8, (..., n / 32 · 34) |


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
# ---
# ## Blocks of 32, in C


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
# EX7


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

# %%
progress()
