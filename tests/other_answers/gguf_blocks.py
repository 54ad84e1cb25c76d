"""Other right answers to the exercises of chapter 12."""

import numpy as np
import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.gguf_blocks import ALIGNMENT, GGUF_TYPES, LAYOUTS, as_blocks

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

# --- 12.8 dequantize_q4_k ---


@other("dequantize_q4_k")
def group_by_group(blocks):
    rows = blocks.contiguous().numpy().reshape(-1, 144)
    found = np.empty((len(rows), 8, 32), dtype=np.float32)
    with np.errstate(all="ignore"):
        for row, numbers in zip(rows, found, strict=True):
            d, dmin = row[:4].copy().view("<f2").astype(np.float32)
            packed = row[4:16].astype(int)
            for g in range(8):
                if g < 4:
                    scale, least = packed[g] & 63, packed[g + 4] & 63
                else:
                    scale = (packed[g + 4] & 0xF) | ((packed[g - 4] >> 6) << 4)
                    least = (packed[g + 4] >> 4) | ((packed[g] >> 6) << 4)
                pair = row[16 + 32 * (g // 2) : 48 + 32 * (g // 2)]
                codes = pair >> 4 if g % 2 else pair & 15
                numbers[g] = d * np.float32(scale) * codes - dmin * np.float32(least)
    return torch.from_numpy(found.reshape(*blocks.shape[:-1], -1 if len(rows) else 256))


@other("dequantize_q4_k")
def by_remainders(blocks):
    rows = blocks.reshape(-1, 144).to(torch.int64)
    number = torch.arange(256)
    byte = 16 + number // 64 * 32 + number % 32
    codes = rows[:, byte] // 16 ** (number // 32 % 2) % 16
    twelve = rows[:, 4:16]
    scales = torch.cat([twelve[:, :4] % 64, twelve[:, 8:] % 16 + twelve[:, :4] // 64 * 16], 1)[:, number // 32]
    mins = torch.cat([twelve[:, 4:8] % 64, twelve[:, 8:] // 16 + twelve[:, 4:8] // 64 * 16], 1)[:, number // 32]
    both = rows[:, :4].to(torch.uint8).view(torch.float16).to(torch.float64)
    values = both[:, :1] * (scales * codes) - both[:, 1:] * mins  # exact in float64, so it is rounded once
    return values.float().reshape(*blocks.shape[:-1], blocks.shape[-1] // 144 * 256)


# --- 12.9 quantize_q4_k ---


@other("quantize_q4_k")
def as_ggml_does(x):
    """With weights that make large numbers count more, and what is stored found with 63 / largest."""
    blocks = as_blocks(x, 256).numpy().reshape(-1, 8, 32)
    fine = np.isfinite(blocks).all((1, 2))
    blocks = np.where(fine[:, None, None], blocks, 0).astype(np.float64)
    packed = np.zeros((len(blocks), 144), dtype=np.uint8)
    for block, row, usable in zip(blocks, packed, fine, strict=True):
        weights = np.sqrt((block**2).mean(1, keepdims=True)) + np.abs(block)
        scales, mins = np.zeros(8), np.zeros(8)
        for g in range(8):
            values, w = block[g], weights[g]
            low, high = min(values.min(), 0.0), values.max()
            if high == low:
                mins[g] = -low
                continue
            scale, least, best = (high - low) / 15, low, np.inf
            for step in range(-1, 21):
                levels = 15 if step < 0 else 14 + 0.1 * step
                codes = np.clip(np.rint(levels / (high - low) * (values - low)), 0, 15)
                if step < 0:
                    a, b = scale, low
                else:
                    total, first, second = w.sum(), (w * codes).sum(), (w * codes**2).sum()
                    sum_x, sum_xl = (w * values).sum(), (w * values * codes).sum()
                    determinant = total * second - first**2
                    if determinant <= 0:
                        continue
                    a, b = (
                        (total * sum_xl - sum_x * first) / determinant,
                        (second * sum_x - first * sum_xl) / determinant,
                    )
                    if b > 0:
                        a, b = sum_xl / second, 0.0
                error = (w * (a * codes + b - values) ** 2).sum()
                if error < best:
                    scale, least, best = a, b, error
            scales[g], mins[g] = scale, -least
        top, deepest = scales.max(), mins.max()
        d, dmin = (np.minimum(each / 63, 65504).astype(np.float16) for each in (top, deepest))
        ls, lm = (
            np.clip(np.rint(each / most * 63), 0, 63).astype(int) if most > 0 else np.zeros(8, int)
            for each, most in ((scales, top), (mins, deepest))
        )
        row[:4] = np.array([d, dmin] if usable else [np.nan, np.nan], dtype="<f2").view(np.uint8)
        row[4:8] = ls[:4] | (ls[4:] >> 4) << 6
        row[8:12] = lm[:4] | (lm[4:] >> 4) << 6
        row[12:16] = (ls[4:] & 15) | (lm[4:] & 15) << 4
        codes = np.zeros((8, 32), dtype=int)
        for g in range(8):
            step = float(d) * ls[g]
            if step:
                codes[g] = np.clip(np.rint((block[g] + float(dmin) * lm[g]) / step), 0, 15)
        row[16:] = (codes[0::2] | codes[1::2] << 4).reshape(-1)
    return torch.from_numpy(packed.reshape(*x.shape[:-1], x.shape[-1] // 256 * 144))


@other("quantize_q4_k")
def by_trying_ranges(x):
    """No least squares: many ranges for each group, each end pulled in by a share of its own; the best of them."""
    groups = as_blocks(x, 256).reshape(-1, 8, 32).double()
    broken = ~torch.isfinite(groups).flatten(1).all(1)
    groups[broken] = 0
    low = groups.min(-1, keepdim=True).values.clamp(max=0)
    high = groups.max(-1, keepdim=True).values
    best = torch.full_like(low, torch.inf)
    bottom, step = low.clone(), (high - low) / 15
    for down in torch.linspace(0, 0.15, 6):
        for up in torch.linspace(-0.05, 0.2, 26):
            start = low + (high - low) * down * (low < 0)
            start = start.clamp(max=0)
            width = (high - (high - low) * up - start) / 15
            width = width.clamp(min=0)
            codes = torch.nan_to_num((groups - start) / width).round().clamp(0, 15)
            error = ((codes * width + start - groups) ** 2).sum(-1, keepdim=True)
            won = error < best
            best, bottom, step = (
                torch.where(won, error, best),
                torch.where(won, start, bottom),
                torch.where(won, width, step),
            )
    step, depth = step[..., 0], -bottom[..., 0]
    d = (step.max(1, keepdim=True).values / 63).clamp(max=65504).half()
    dmin = (depth.max(1, keepdim=True).values / 63).clamp(max=65504).half()
    scales = torch.nan_to_num(step / d.double()).round().clamp(0, 63)
    mins = torch.nan_to_num(depth / dmin.double()).round().clamp(0, 63)
    offsets = (dmin.double() * mins)[..., None]
    codes = torch.nan_to_num((groups + offsets) / (d.double() * scales)[..., None], posinf=0, neginf=0)
    codes = codes.round().clamp(0, 15).to(torch.uint8)
    scales, mins = scales.to(torch.uint8), mins.to(torch.uint8)
    d[broken] = dmin[broken] = torch.nan
    packed = torch.empty(len(groups), 144, dtype=torch.uint8)
    packed[:, 0:2], packed[:, 2:4] = d.view(torch.uint8), dmin.view(torch.uint8)
    packed[:, 4:8] = scales[:, :4] + 64 * (scales[:, 4:] // 16)
    packed[:, 8:12] = mins[:, :4] + 64 * (mins[:, 4:] // 16)
    packed[:, 12:16] = scales[:, 4:] % 16 + 16 * (mins[:, 4:] % 16)
    packed[:, 16:] = (codes[:, 0::2] + 16 * codes[:, 1::2]).flatten(1)
    return packed.reshape(*x.shape[:-1], x.shape[-1] // 256 * 144)


# --- 12.10 dequantize_q6_k ---


@other("dequantize_q6_k")
def four_numbers_at_a_time(blocks):
    rows = blocks.contiguous().numpy().reshape(-1, 210).astype(int)
    d = rows[:, 208:].astype(np.uint8).view("<f2").astype(np.float32)  # (blocks, 1)
    scales = rows[:, 192:208].astype(np.uint8).view(np.int8).astype(np.float32)
    found = np.empty((len(rows), 256), dtype=np.float32)
    with np.errstate(all="ignore"):
        for half in range(2):
            ql, qh = rows[:, 64 * half :][:, :64], rows[:, 128 + 32 * half :][:, :32]
            parts = (
                (ql[:, :32] & 15) | ((qh & 3) << 4),
                (ql[:, 32:] & 15) | ((qh >> 2 & 3) << 4),
                (ql[:, :32] >> 4) | ((qh >> 4 & 3) << 4),
                (ql[:, 32:] >> 4) | ((qh >> 6) << 4),
            )
            for j, part in enumerate(parts):
                first = 128 * half + 32 * j
                step = d * np.repeat(scales[:, first // 16 : first // 16 + 2], 16, axis=1)
                found[:, first : first + 32] = step * (part - 32).astype(np.float32)
    return torch.from_numpy(found.reshape(*blocks.shape[:-1], blocks.shape[-1] // 210 * 256))


@other("dequantize_q6_k")
def with_places(blocks):
    rows = blocks.reshape(-1, 210).to(torch.int64)
    number = torch.arange(256)
    half, j, i = number // 128, number % 128 // 32, number % 32
    low = rows[:, 64 * half + 32 * (j % 2) + i] // torch.where(j < 2, 1, 16) % 16
    high = rows[:, 128 + 32 * half + i] // 4**j % 4
    scale = (rows[:, 192 + number // 16] + 128) % 256 - 128
    d = rows[:, 208:].to(torch.uint8).view(torch.float16).float()
    values = d * scale * (low + 16 * high - 32)
    return values.reshape(*blocks.shape[:-1], blocks.shape[-1] // 210 * 256)


# --- 12.11 write_gguf ---


@other("write_gguf")
def as_it_goes(file, metadata, tensors):
    written = 0

    def put(raw):
        nonlocal written
        file.write(raw)
        written += len(raw)

    def put_number(value, size):
        put(int(value).to_bytes(size, "little"))

    def put_text(value):
        raw = value.encode("utf-8")
        put_number(len(raw), 8)
        put(raw)

    def put_value(value):
        if isinstance(value, list):
            put_number(code(value[0]), 4)
            put_number(len(value), 8)
            for each in value:
                put_value(each)
        elif isinstance(value, str):
            put_text(value)
        elif isinstance(value, float):
            put(np.float32(value).tobytes())
        else:
            put_number(value, 1 if isinstance(value, bool) else 4)

    def code(value):
        for kind, number in ((bool, 7), (int, 4), (float, 6), (str, 8)):
            if isinstance(value, kind):
                return number
        return 9

    alignment = ALIGNMENT
    put(b"GGUF")
    put_number(3, 4)
    put_number(len(tensors), 8)
    put_number(len(metadata), 8)
    for key in metadata:
        alignment = metadata[key] if key == "general.alignment" else alignment
        put_text(key)
        put_number(code(metadata[key]), 4)
        put_value(metadata[key])
    place = 0
    for tensor in tensors:
        put_text(tensor.name)
        put_number(len(tensor.shape), 4)
        for size in reversed(tensor.shape):
            put_number(size, 8)
        put_number(GGUF_TYPES[tensor.kind], 4)
        put_number(place, 8)
        place = (place + len(tensor.data) + alignment - 1) // alignment * alignment
    while written % alignment:
        put(b"\0")
    for tensor in tensors:
        put(bytes(tensor.data.tolist()))
        while written % alignment:
            put(b"\0")


@other("write_gguf")
def with_numpy(file, metadata, tensors):
    def text(value):
        raw = np.frombuffer(value.encode(), np.uint8)
        return np.concatenate([np.array([len(raw)], "<u8").view(np.uint8), raw])

    def values(kind, entries):
        if kind is str:
            return np.concatenate([text(entry) for entry in entries])
        dtype = {bool: "?", int: "<u4", float: "<f4"}[kind]
        return np.array(entries, dtype).view(np.uint8)

    def numbers(dtype, *each):
        return np.array(each, dtype).view(np.uint8)

    numbering = {bool: 7, int: 4, float: 6, str: 8}
    pieces = [np.frombuffer(b"GGUF\3\0\0\0", np.uint8), numbers("<u8", len(tensors), len(metadata))]
    for key, value in metadata.items():
        pieces.append(text(key))
        if type(value) is list:
            kind = type(value[0])
            pieces += [numbers("<u4", 9, numbering[kind]), numbers("<u8", len(value)), values(kind, value)]
        else:
            pieces += [numbers("<u4", numbering[type(value)]), values(type(value), [value])]
    multiple = metadata.get("general.alignment", 32)
    ends = np.cumsum([0, *(-(-tensor.data.numel() // multiple) * multiple for tensor in tensors)])
    for tensor, begin in zip(tensors, ends[:-1], strict=True):
        pieces += [text(tensor.name), numbers("<u4", len(tensor.shape)), numbers("<u8", *tensor.shape[::-1])]
        pieces += [numbers("<u4", GGUF_TYPES[tensor.kind]), numbers("<u8", begin)]
    head = np.concatenate(pieces)
    start = -(-len(head) // multiple) * multiple
    content = np.zeros(start + ends[-1], np.uint8)
    content[: len(head)] = head
    for tensor, begin in zip(tensors, ends[:-1], strict=True):
        content[start + begin :][: tensor.data.numel()] = tensor.data.numpy()
    file.write(content.tobytes())
