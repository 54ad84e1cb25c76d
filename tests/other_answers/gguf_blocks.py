"""Other right answers to the exercises of chapter 12."""

import numpy as np
import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.gguf_blocks import LAYOUTS, as_blocks

# --- 12.1 quantize_q8_0 ---


@other("quantize_q8_0")
def by_numpy(x):
    blocks = as_blocks(x).numpy()
    with np.errstate(all="ignore"):
        d = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
        inverse = np.float32(1) / d
        scaled = np.where(np.isfinite(d) & np.isfinite(inverse), blocks * inverse, 0).astype(np.float64)
        codes = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled).astype(np.int8)  # exact in float64
        packed = np.concatenate([d.astype("<f2").view(np.uint8), codes.view(np.uint8)], -1)
    return torch.from_numpy(packed.reshape(*x.shape[:-1], -1))


@other("quantize_q8_0")
def block_by_block(x):
    rows = []
    for block in as_blocks(x).reshape(-1, 32):
        d = block.abs().max() / torch.tensor(127.0)
        codes = torch.zeros(32, dtype=torch.int16)
        if torch.isfinite(d) and torch.isfinite(1 / d):
            twice = (block * (1 / d)).double() * 2  # whole numbers are at even places, what is half-way at odd ones
            codes = torch.where(twice < 0, -((1 - twice) / 2).floor(), ((twice + 1) / 2).floor()).short()
        rows.append(torch.cat([d.half().reshape(1).view(torch.uint8), (codes % 256).to(torch.uint8)]))
    return torch.stack(rows).reshape(*x.shape[:-1], x.shape[-1] // 32 * 34)


# --- 12.2 dequantize_blocks ---


@other("dequantize_blocks")
def structured(blocks, layout):
    fields = {
        "q8_0": [("d", "<f2"), ("q", "i1", 32)],
        "q4_0": [("d", "<f2"), ("q", "u1", 16)],
        "q4_1": [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)],
        "q5_0": [("d", "<f2"), ("h", "<u4"), ("q", "u1", 16)],
    }
    if layout not in fields:
        raise ValueError(f"one of {', '.join(fields)}")
    kind = np.dtype(fields[layout])
    if blocks.shape[-1] % kind.itemsize:
        raise ValueError(f"blocks of {kind.itemsize} bytes")
    rows = np.ascontiguousarray(blocks.numpy()).view(kind)
    d, q = rows["d"].astype(np.float32)[..., None], rows["q"]
    with np.errstate(all="ignore"):
        if layout == "q8_0":
            values = q.astype(np.float32) * d
        else:
            codes = np.concatenate([q % 16, q // 16], -1).astype(np.int64)
            if layout == "q4_1":
                values = codes.astype(np.float32) * d + rows["m"].astype(np.float32)[..., None]
            elif layout == "q4_0":
                values = (codes - 8).astype(np.float32) * d
            else:
                codes += (rows["h"][..., None].astype(np.int64) >> np.arange(32) & 1) * 16
                values = (codes - 16).astype(np.float32) * d
    return torch.from_numpy(values.astype(np.float32).reshape(*blocks.shape[:-1], -1))


@other("dequantize_blocks")
def by_a_table(blocks, layout):
    """All products of a block's d with the codes that there are, and a look-up."""
    if layout not in ("q8_0", "q4_0", "q4_1", "q5_0"):
        raise ValueError("no such layout")
    rows = as_blocks(blocks, LAYOUTS[layout].bytes)
    half = [float(np.frombuffer(bytes(pair.tolist()), "<f2")[0]) for pair in rows.reshape(-1, rows.shape[-1])[:, :2]]
    d = torch.tensor(half).reshape(*rows.shape[:-1], 1)
    if layout == "q8_0":
        values = torch.arange(256).where(torch.arange(256) < 128, torch.arange(256) - 256) * d
        return values.gather(-1, rows[..., 2:].long()).flatten(-2)
    low, high = rows[..., -16:].bitwise_and(15).long(), rows[..., -16:].div(16, rounding_mode="floor").long()
    places = torch.cat([low, high], -1)
    if layout == "q4_1":
        pairs = rows.reshape(-1, rows.shape[-1])[:, 2:4]
        m = torch.tensor([float(np.frombuffer(bytes(pair.tolist()), "<f2")[0]) for pair in pairs])
        values = torch.arange(16.0) * d + m.reshape(*rows.shape[:-1], 1)
    elif layout == "q4_0":
        values = torch.arange(-8.0, 8.0) * d
    else:
        word = sum(rows[..., 2 + k].long() << 8 * k for k in range(4))
        places = places + torch.stack([(word >> j) % 2 for j in range(32)], -1) * 16
        values = torch.arange(-16.0, 16.0) * d
    return values.gather(-1, places).flatten(-2)


# --- 12.3 quantize_q4_0 ---


@other("quantize_q4_0")
def from_the_two_ends(x):
    """The largest magnitude is that of the smallest or of the largest number."""
    blocks = as_blocks(x).numpy()
    low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    first = np.where((blocks == low) | (blocks == high), blocks, 0)
    alike = np.take_along_axis(first, (first != 0).argmax(-1)[..., None], -1)
    zero = blocks[..., :1]
    d = np.where(-low > high, low, np.where(high > -low, high, np.where(high == 0, zero, alike)))
    with np.errstate(all="ignore"):
        d = np.where(np.isnan(low), np.nan, d).astype(np.float32) * np.float32(-0.125)
        inverse = np.float32(1) / d
        fine = np.isfinite(inverse) & np.isfinite(d)
        sums = np.where(fine, blocks * inverse, np.float32(0)) + np.float32(8.5)
        codes = np.minimum(sums.astype(np.int32), 15)
        packed = codes[..., :16] + codes[..., 16:] * 16
        out = np.concatenate([d.astype("<f2").view(np.uint8), packed.astype(np.uint8)], -1)
    return torch.from_numpy(out.reshape(*x.shape[:-1], -1))


@other("quantize_q4_0")
def sorted_by_magnitude(x):
    blocks = as_blocks(x)
    places = blocks.abs().sort(dim=-1, descending=True, stable=True).indices[..., :1]
    d = torch.take_along_dim(blocks, places, -1) / torch.tensor(-8.0)
    fine = d.isfinite() & (1 / d).isfinite()
    sums = torch.where(fine, blocks * d.reciprocal(), torch.zeros(())).add(8.5).floor().int()
    codes = torch.minimum(sums, torch.tensor(15)).unflatten(-1, (2, 16))
    packed = codes[..., 0, :].bitwise_or(codes[..., 1, :].bitwise_left_shift(4)).to(torch.uint8)
    return torch.cat([d.to(torch.float16).view(torch.uint8), packed], -1).reshape(*x.shape[:-1], -1)


# --- 12.4 quantize_q4_1 ---


@other("quantize_q4_1")
def q4_1_by_numpy(x):
    blocks = as_blocks(x).numpy()
    with np.errstate(all="ignore"):
        m, top = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
        d = (top - m) / np.float32(15)
        inverse = np.float32(1) / d
        fine = np.isfinite(inverse) & np.isfinite(d)
        codes = np.where(fine, (blocks - m) * inverse + np.float32(0.5), np.float32(0)).astype(np.uint8)
        halves = np.concatenate([d, m], -1).astype("<f2").view(np.uint8)
    out = np.concatenate([halves, codes[..., :16] | codes[..., 16:] << 4], -1)
    return torch.from_numpy(out.reshape(*x.shape[:-1], -1))


@other("quantize_q4_1")
def q4_1_sorted(x):
    blocks = as_blocks(x)
    ends = blocks.sort(-1).values  # NaN comes last
    low = torch.where(ends[..., -1:].isnan(), torch.nan, ends[..., :1])
    d = (ends[..., -1:] - low) / 15
    above = blocks - low
    sums = torch.where(d.isfinite() & d.reciprocal().isfinite(), above * d.reciprocal(), torch.zeros(())) + 0.5
    low_half, high_half = sums.floor().int().chunk(2, -1)
    parts = [d.half().view(torch.uint8), low.half().view(torch.uint8), (low_half + 16 * high_half).to(torch.uint8)]
    return torch.cat(parts, -1).reshape(*x.shape[:-1], -1)


# --- 12.5 quantize_q5_0 ---


@other("quantize_q5_0")
def q5_0_by_packbits(x):
    blocks = as_blocks(x).numpy()
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    with np.errstate(all="ignore"):
        d = largest * np.float32(-1 / 16)
        inverse = np.float32(1) / d
        fine = np.isfinite(inverse) & np.isfinite(d)
        codes = np.where(fine, blocks * inverse, np.float32(0)) + np.float32(16.5)
        codes = np.minimum(codes, 31).astype(np.uint8)
        stored = d.astype("<f2").view(np.uint8)
    fifth = np.packbits(codes > 15, -1, bitorder="little")
    out = np.concatenate([stored, fifth, codes[..., :16] % 16 + codes[..., 16:] % 16 * 16], -1)
    return torch.from_numpy(out.reshape(*x.shape[:-1], -1))


@other("quantize_q5_0")
def q5_0_by_whole_numbers(x):
    """A block's fifth bits as one number, its nibbles as another, and their bytes."""
    rows = []
    for block in as_blocks(x).reshape(-1, 32):
        d = block[block.abs().argmax()] / -16
        inverse = 1 / d
        codes = [16] * 32
        if bool(d.isfinite()) and bool(inverse.isfinite()):
            codes = [min(31, int(v)) for v in (block * inverse + 16.5).tolist()]
        fifth = sum((code >> 4) << j for j, code in enumerate(codes))
        low = sum((code & 15) << (8 * (j % 16) + 4 * (j // 16)) for j, code in enumerate(codes))
        half = np.array(d.item(), np.float32).astype("<f2").tobytes() if not d.isinf() else d.half().numpy().tobytes()
        rows.append(list(half + fifth.to_bytes(4, "little") + low.to_bytes(16, "little")))
    return torch.tensor(rows, dtype=torch.uint8).reshape(*x.shape[:-1], x.shape[-1] // 32 * 22)


# --- 12.6 q8_0_in_c ---


@other("q8_0_in_c")
def with_roundf():
    return """
    static float largest(const float *x) {
        float amax = 0;
        for (size_t j = 0; j < BLOCK; j++) {
            if (x[j] != x[j])
                return NAN;
            amax = fmaxf(amax, fabsf(x[j]));
        }
        return amax;
    }

    void quantize_q8_0(const float *x, uint8_t *out, size_t blocks) {
        while (blocks-- > 0) {
            const float d = largest(x) / 127.0f, id = 1.0f / d;
            const uint16_t half = half_bits(d);
            *out++ = (uint8_t)half;
            *out++ = (uint8_t)(half >> 8);
            for (int j = 0; j < BLOCK; j++) {
                int8_t code = 0;
                if (isfinite(d) && isfinite(id))
                    code = (int8_t)roundf(*x * id);
                *out++ = (uint8_t)code;
                x++;
            }
        }
    }
    """


@other("q8_0_in_c")
def as_a_struct():
    """With ggml's own struct, written as a whole; rounding by twice the number."""
    return """
    typedef struct {
        uint16_t d;
        int8_t qs[BLOCK];
    } block_q8_0;

    static int8_t away(float v) {
        int twice = (int)(2.0 * (double)v);
        return (int8_t)((twice + (twice > 0) - (twice < 0)) / 2);
    }

    void quantize_q8_0(const float *x, uint8_t *out, size_t blocks) {
        for (size_t b = 0; b < blocks; ++b) {
            block_q8_0 block = {0, {0}};
            float amax = 0.0f;
            int others = 0;
            for (int j = 0; j < BLOCK; ++j) {
                float v = x[BLOCK * b + (size_t)j];
                amax = v > amax ? v : -v > amax ? -v : amax;
                others += v != v;
            }
            float d = others ? (float)NAN : amax / 127.0f;
            if (d > 0 && d < INFINITY && isfinite(1.0f / d)) {
                float id = 1.0f / d;
                for (int j = 0; j < BLOCK; ++j)
                    block.qs[j] = away(x[BLOCK * b + (size_t)j] * id);
            }
            block.d = half_bits(d);
            memcpy(out + sizeof block * b, &block, sizeof block);
        }
    }
    """


# --- 12.7 q4_0_in_c ---


@other("q4_0_in_c")
def nibble_by_nibble():
    return """
    static uint8_t code_of(float v, float id, bool usable) {
        float sum = usable ? v * id + 8.5f : 8.5f;
        return sum > 15 ? 15 : (uint8_t)sum;
    }

    void quantize_q4_0(const float *x, uint8_t *out, size_t blocks) {
        for (const float *end = x + blocks * BLOCK; x < end; x += BLOCK) {
            int most = 0;
            for (int j = 0; j < BLOCK && !isnan(x[most]); j++)
                if (isnan(x[j]) || fabsf(x[j]) > fabsf(x[most]))
                    most = j;
            float d = x[most] * -0.125f, id = 1.0f / d;
            bool usable = isfinite(d) && isfinite(id);
            uint16_t half = half_bits(d);
            *out++ = half % 256;
            *out++ = half / 256;
            for (int j = 0; j < BLOCK / 2; j++)
                *out++ = (uint8_t)(code_of(x[j], id, usable) + 16 * code_of(x[j + BLOCK / 2], id, usable));
        }
    }
    """


@other("q4_0_in_c")
def in_two_passes():
    """Low nibbles first, then high ones on top; the largest number by the bits of magnitudes."""
    return """
    static uint32_t magnitude(float v) {
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        return bits & 0x7FFFFFFFu;
    }

    void quantize_q4_0(const float *x, uint8_t *out, size_t blocks) {
        memset(out, 0, blocks * 18);
        for (size_t b = 0; b < blocks; b++) {
            size_t most = 0;
            for (size_t j = 0; j < 32; j++)
                if (magnitude(x[32 * b + j]) > magnitude(x[32 * b + most]))
                    most = j;
            float d = x[32 * b + most] / -8.0f, id = 1.0f / d;
            uint16_t half = half_bits(d);
            out[18 * b] = half & 0xFF;
            out[18 * b + 1] = half >> 8;
            for (size_t j = 0; j < 32; j++) {
                int code = 8;
                if (isfinite(d) && isfinite(id)) {
                    float scaled = x[32 * b + j] * id;
                    code = (int)(scaled + 8.5f);
                    code -= code > 15;
                }
                out[18 * b + 2 + j % 16] |= (uint8_t)(code << (j < 16 ? 0 : 4));
            }
        }
    }
    """


# --- blocks of 256 (12.8 and on) ---
