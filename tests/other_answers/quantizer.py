"""Other right answers to the exercises of chapter 07."""

import math

import numpy as np
import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.bits import decode, max_finite
from lowprec_lab.quantizer import (
    Quantized,
    absmax,
    dequantize,
    quantize,
    require_granularity,
    scale_for,
    spread,
)
from lowprec_lab.rounding import encode, fast_round_to

# --- 7.1 absmax ---


@other("absmax")
def block_after_block(x, granularity="tensor"):
    require_granularity(granularity, x.dim())
    if granularity == "tensor":
        return x.abs().max() if x.numel() > 0 else torch.tensor(0.0, dtype=x.dtype)
    if x.dim() == 1:
        return block_after_block(x[None], granularity)[0]
    height, width = x.shape[-2:]
    rows = {"row": 1, "column": max(1, height)}.get(granularity) or granularity[0]
    columns = {"row": max(1, width), "column": 1}.get(granularity) or granularity[1]
    down = 1 if granularity == "column" else math.ceil(height / rows)
    across = 1 if granularity == "row" else math.ceil(width / columns)
    found = torch.zeros((*x.shape[:-2], down, across), dtype=x.dtype)
    for i in range(down):
        for j in range(across):
            part = x[..., i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].abs()
            if part.numel():
                found[..., i, j] = part.flatten(-2).max(-1).values
    return found


@other("absmax")
def the_larger_of_both_ends(x, granularity="tensor"):
    """max(x) and -min(x), with a zero where there is nothing; blocks in strips."""
    require_granularity(granularity, x.dim())

    def absmax_of(x, dim):
        return x.abs().max(dim, keepdim=True).values if x.numel() else x.abs().sum(dim, keepdim=True)

    if granularity == "tensor":
        flat = torch.cat([x.flatten(), x.new_zeros(1)])
        return torch.maximum(flat.max(), -flat.min()) + 0.0  # -0.0 becomes 0.0
    if granularity in ("row", "column"):
        dim = -1 if granularity == "row" else -2
        one = list(x.shape)
        one[dim] = 1
        longer = torch.cat([x, x.new_zeros(one)], dim)
        return torch.maximum(longer.max(dim, keepdim=True).values, -longer.min(dim, keepdim=True).values) + 0.0
    rows, columns = granularity
    strips = [absmax_of(part, -2) for part in x.split(rows, -2)] if x.shape[-2] else [x[..., :0, :]]
    down = torch.cat(strips, -2)
    return torch.cat([absmax_of(part, -1) for part in down.split(columns, -1)], -1) if x.shape[-1] else down


# --- 7.2 scale_for ---


@other("scale_for")
def one_number_after_the_other(amax, fmt, eps=1e-12, power_of_two=False):
    def scale(value):
        if math.isnan(value):
            return value
        below = max(value, eps)
        quotient = min(max_finite(fmt) / below, 3.4028234663852886e38) if below > 0 else 3.4028234663852886e38
        single = float(np.float32(quotient))
        return 2.0 ** (math.frexp(single)[1] - 1) if power_of_two and single > 0 else single

    found = [scale(value) for value in amax.double().flatten().tolist()]
    return torch.tensor(found, dtype=torch.float32).reshape(amax.shape)


@other("scale_for")
def with_frexp(amax, fmt, eps=1e-12, power_of_two=False):
    floor = torch.tensor(eps, dtype=torch.float64)
    scale = torch.div(torch.tensor(max_finite(fmt), dtype=torch.float64), torch.maximum(amax.to(torch.float64), floor))
    scale = scale.to(torch.float32)
    scale = torch.where(scale == math.inf, torch.finfo(torch.float32).max, scale)
    if not power_of_two:
        return scale
    mantissa, exponent = torch.frexp(scale)
    rounded = torch.ldexp(torch.ones_like(scale), exponent - 1)
    return torch.where((scale > 0) & scale.isfinite(), rounded, scale)


# --- 7.3 quantize ---


@other("quantize")
def with_encode_alone(x, fmt, granularity="tensor", power_of_two=False):
    amax = absmax(x, granularity)
    scale = scale_for(amax, fmt, 1e-12, power_of_two)
    codes = encode((x.to(torch.float32) * spread(scale, granularity, x.shape)).contiguous(), fmt)
    return Quantized(codes.to(torch.uint8), scale, fmt, granularity, x.dtype)


@other("quantize")
def with_a_search(x, fmt, granularity="tensor", power_of_two=False):
    """The codes by binary search among the midpoints between the format's values."""
    if fmt.width > 8:
        raise ValueError("codes have 8 bits")
    scale = scale_for(absmax(x, granularity), fmt, power_of_two=power_of_two)
    scaled = x.float() * spread(scale, granularity, x.shape)
    positive = torch.arange(2 ** (fmt.exponent_bits + fmt.mantissa_bits), dtype=torch.int32)
    values = decode(positive, fmt)
    values = values[values.isfinite()].double()
    middle = (values[1:] + values[:-1]) / 2
    size = scaled.double().abs()
    low = torch.searchsorted(middle, size, right=False)  # a tie stays below
    tie = (low < len(middle)) & (middle[low.clamp(max=len(middle) - 1)] == size)
    code = torch.where(tie & (low % 2 == 1), low + 1, low)
    negative = scaled.signbit()
    if fmt.specials == "fnuz":
        negative = negative & (code != 0)
    code = torch.where(negative, code + 2 ** (fmt.width - 1), code)
    if scaled.isnan().any():
        if fmt.specials == "finite":
            raise ValueError("no code for NaN")
        nan = {"fnuz": 2 ** (fmt.width - 1)}.get(fmt.specials, 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1)
        code = torch.where(scaled.isnan(), nan, code)
    return Quantized(code.to(torch.uint8), scale, fmt, granularity, x.dtype)


@other("quantize")
def with_the_fused_encoder(x, fmt, granularity="tensor", power_of_two=False):
    from lowprec_lab import fused

    scale = scale_for(absmax(x, granularity), fmt, power_of_two=power_of_two)
    codes = fused.encode_((x.float() * spread(scale, granularity, x.shape)).contiguous(), fmt)
    return Quantized(codes.to(torch.uint8), scale, fmt, granularity, x.dtype)


# --- 7.4 dequantize ---


@other("dequantize")
def decodes_every_code(q):
    values = decode(q.codes.to(torch.int32), q.fmt).to(torch.float32)
    return torch.div(values, spread(q.scale, q.granularity, q.codes.shape)).to(q.dtype)


@other("dequantize")
def with_numpy_and_a_list(q):
    table = np.array(decode(torch.arange(2**q.fmt.width, dtype=torch.int32), q.fmt).tolist(), dtype=np.float32)
    scale = spread(q.scale, q.granularity, q.codes.shape).numpy()
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(table[q.codes.numpy()] / scale)).to(q.dtype)


# --- 7.5 sqnr_db ---


@other("sqnr_db")
def with_numpy(x, y):
    a, b = x.detach().double().numpy().ravel(), y.detach().double().numpy().ravel()
    with np.errstate(all="ignore"):
        noise = float(np.dot(a - b, a - b))
        return float("inf") if noise == 0 else float(10 * (np.log10(np.dot(a, a)) - np.log10(noise)))


@other("sqnr_db")
def lengths(x, y):
    """20 * log10 of the ratio of lengths, number after number."""
    pairs = list(zip(x.double().flatten().tolist(), y.double().flatten().tolist(), strict=True))
    noise = math.sqrt(sum((a - b) * (a - b) for a, b in pairs))
    signal = math.sqrt(sum(a * a for a, _ in pairs))
    if math.isnan(signal / noise if noise else 0.0):
        return math.nan
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal and noise < math.inf else -math.inf


# --- 7.6 quantize_int8 ---


@other("quantize_int8")
def int8_in_numpy(x, symmetric=True):
    values = x.detach().float().numpy()
    if not np.all(np.isfinite(values)):
        raise ValueError("not finite")
    lo, hi = min(0.0, float(values.min(initial=0))), max(0.0, float(values.max(initial=0)))
    scale = np.float32(max(hi, -lo) / 127) if symmetric else np.float32((hi - lo) / 255)
    scale = max(scale, np.float32(1e-12))
    zero = 0 if symmetric else int(np.round(np.float32(-128) - np.float32(lo) / scale))
    codes = np.clip(np.round(values / scale).astype(np.int64) + zero, -127 if symmetric else -128, 127)
    return (
        torch.from_numpy(np.asarray(codes.astype(np.int8))),
        torch.tensor(float(scale)),
        torch.tensor(zero, dtype=torch.int32),
    )


@other("quantize_int8")
def two_ways_apart(x, symmetric=True):
    x = x.to(torch.float32)
    if bool((x - x != 0).any()):
        raise ValueError("NaN or infinity")
    floor = torch.tensor(1e-12)
    if symmetric:
        scale = torch.maximum((absmax(x).double() / 127).float(), floor)
        codes = torch.round(torch.div(x, scale)).clamp(-127, 127)
        return codes.to(torch.int8), scale, torch.zeros((), dtype=torch.int32)
    lo = x.clamp(max=0).min() if x.numel() else torch.tensor(0.0)
    hi = x.clamp(min=0).max() if x.numel() else torch.tensor(0.0)
    scale = torch.maximum(torch.div(hi.double() - lo.double(), 255).float(), floor)
    zero = torch.round(-128 - lo / scale).to(torch.int32)
    return (torch.round(x / scale).to(torch.int32) + zero).clamp(-128, 127).to(torch.int8), scale, zero


# --- 7.7 straight_through ---


@other("straight_through")
def replaces_the_data(x, fmt):
    """A copy that autograd knows, whose numbers are exchanged behind its back."""
    copied = x.clone()
    copied.data = dequantize(quantize(x, fmt))
    return copied


@other("straight_through")
def with_a_hook(x, fmt):
    class Value(torch.autograd.Function):
        @staticmethod
        def forward(x, value):
            return value.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    with torch.no_grad():
        q = quantize(x, fmt)
        value = (decode(q.codes.to(torch.int32), fmt).float() / q.scale).to(x.dtype)
    return Value.apply(x, value)


# --- 7.8 best_clip ---


@other("best_clip")
def a_table_of_errors(x, fmt, fractions=tuple(k / 16 for k in range(16, 3, -1))):
    x = x.detach().to(torch.float32)
    amax = x.abs().max() if x.numel() else torch.tensor(0.0)
    if not (math.isfinite(amax) and amax > 0):
        return amax
    clips = amax * torch.tensor(sorted(fractions, reverse=True), dtype=torch.float32)
    scales = scale_for(clips, fmt)[:, None]
    flat = x.reshape(1, -1)
    errors = (fast_round_to((flat * scales).contiguous(), fmt) / scales - flat).double().square().sum(1)
    return clips[int(torch.nonzero(errors == errors.min())[0])]


@other("best_clip")
def with_min_and_a_key(x, fmt, fractions=tuple(k / 16 for k in range(16, 3, -1))):
    top = absmax(x.float())
    if top == 0 or not bool(top.isfinite()):
        return top

    def key(fraction):
        clip = top * fraction
        scale = scale_for(clip, fmt)
        codes = encode((x.float() * scale).contiguous(), fmt)
        back = (decode(codes, fmt).float() / scale).double()
        return float((back - x.double()).pow(2).sum()), -fraction

    return top * min(fractions, key=key)
