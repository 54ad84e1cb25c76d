"""Other right answers to the exercises of chapter 13."""

import math

import numpy as np
import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.bits import decode, max_finite
from lowprec_lab.block_formats import (
    FP8,
    MX_BLOCK,
    NAN_SCALE,
    SCALE_MODES,
    SMALLEST_TENSOR_SCALE,
    dequantize_mx,
    e8m0_scale,
    quantize_mx,
    scale_value,
)
from lowprec_lab.formats import E2M1, E4M3, E8M0
from lowprec_lab.rounding import encode, round_to

# --- 13.1 e8m0_scale ---


@other("e8m0_scale")
def by_frexp_in_float64(amax, fmt, mode="floor"):
    emax = int(np.frexp(max_finite(fmt))[1]) - 1
    wide = amax.double()
    if mode == "rceil":
        wide, emax = (amax / max_finite(fmt)).double(), 0
    elif mode == "even":
        wide, emax = wide + torch.exp2(wide.frexp().exponent.double() - 2 - fmt.mantissa_bits), emax
    elif mode not in ("floor", "ceil"):
        raise ValueError(f"{mode!r} is none of floor, rceil, ceil, even")
    fraction, exponent = wide.frexp()
    k = exponent - 1 - emax + ((fraction != 0.5) & (mode in ("ceil", "rceil"))).int()
    byte = (k + 127).clamp(0, 254)
    byte[(amax == 0) | (wide == 0)] = 0
    byte[wide.isinf()] = 254 if mode == "rceil" else 128 + 127 - emax
    byte[wide.isnan()] = 255
    return byte.to(torch.uint8)


@other("e8m0_scale")
def by_search(amax, fmt, mode="floor"):
    if mode not in SCALE_MODES:
        raise ValueError("mode: " + " ".join(SCALE_MODES))
    largest = torch.tensor(max_finite(fmt))
    top = 2.0 ** math.floor(math.log2(float(largest)))
    powers = decode(torch.arange(255, dtype=torch.int32), E8M0)  # float64, 2^-127 to 2^127
    if mode == "rceil":
        byte = torch.searchsorted(powers, (amax / largest).double())
    elif mode == "ceil":
        byte = torch.searchsorted(powers, amax.double() / top)
    else:
        steps = 2.0 ** (fmt.mantissa_bits + 2)  # up by half a step of the format, from its last number below a power
        size = amax.double() / top / (1 if mode == "floor" else 1 - 1 / steps)
        byte = torch.searchsorted(powers, size, right=True) - 1
    last = 254 if mode == "rceil" else 255 - int(math.log2(top))
    byte = byte.clamp(0, last)
    return torch.where(amax.isnan(), 255, byte).to(torch.uint8)


# --- 13.2 quantize_mx ---


@other("quantize_mx")
def through_encode(x, fmt, mode="floor", block=MX_BLOCK):
    if x.shape[-1] % block != 0:
        raise ValueError(f"{x.shape[-1]} numbers are no whole blocks of {block}")
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // block, block)
    scale = e8m0_scale(torch.maximum(blocks.max(-1).values, -blocks.min(-1).values), fmt, mode)
    quotients = (blocks.double() / decode(scale.int(), E8M0)[..., None]).float()
    quotients[scale == NAN_SCALE] = 0
    return encode(quotients.reshape(x.shape), fmt).to(torch.uint8), scale


@other("quantize_mx")
def times_the_reciprocal(x, fmt, mode="floor", block=MX_BLOCK):
    rows, left = divmod(x.shape[-1], block)
    if left:
        raise ValueError(f"a row of {x.shape[-1]}: block {block}")
    flat = x.detach().to(torch.float32).reshape(-1, block) if x.numel() else torch.zeros(0, block)
    scale = e8m0_scale(torch.linalg.vector_norm(flat, math.inf, -1), fmt, mode)
    factor = torch.ldexp(torch.ones(len(flat), dtype=torch.float64), 127 - scale.int())  # exact, and not for NaN
    numbers = (flat.double() * factor[:, None]).float().masked_fill(scale[:, None] == NAN_SCALE, 0.0)
    codes = encode(round_to(numbers, fmt), fmt)
    return codes.to(torch.uint8).reshape(x.shape), scale.reshape(*x.shape[:-1], rows)


# --- 13.3 dequantize_mx ---


@other("dequantize_mx")
def all_in_float64(codes, scale, fmt):
    block = codes.shape[-1] // scale.shape[-1]
    factors = decode(scale.int(), E8M0).repeat_interleave(block, -1)  # NaN for 255
    return (decode(codes.int(), fmt) * factors).float()


@other("dequantize_mx")
def by_ldexp(codes, scale, fmt):
    values = decode(codes.to(torch.int32), fmt).numpy().reshape(*scale.shape, codes.shape[-1] // scale.shape[-1])
    exponents = scale.numpy().astype(np.int32)[..., None] - 127
    with np.errstate(all="ignore"):
        made = np.where(exponents == 128, np.nan, np.ldexp(values, exponents)).astype(np.float32)
    return torch.from_numpy(made.reshape(codes.shape))


# --- 13.4 pack_nibbles ---


@other("pack_nibbles")
def by_weights(codes):
    if codes.shape[-1] % 2 == 1:
        raise ValueError("an odd number of codes")
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2).int()
    return (pairs * torch.tensor([1, 16])).sum(-1).to(torch.uint8)


@other("pack_nibbles")
def in_numpy(codes):
    numbers = codes.numpy()
    if numbers.shape[-1] % 2:
        raise ValueError(f"{numbers.shape[-1]} is odd")
    return torch.from_numpy(np.left_shift(numbers[..., 1::2], 4) + numbers[..., 0::2])


# --- 13.5 unpack_nibbles ---


@other("unpack_nibbles")
def into_a_new_one(packed):
    codes = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.uint8)
    codes[..., 0::2] = packed % 16
    codes[..., 1::2] = packed // 16
    return codes


@other("unpack_nibbles")
def repeated_and_shifted(packed):
    twice = packed.repeat_interleave(2, -1)
    shifts = torch.tensor([0, 4], dtype=torch.uint8).repeat(packed.shape[-1])
    return (twice >> shifts) & 15


# --- 13.6 quantize_nvfp4 ---


@other("quantize_nvfp4")
def through_encode_twice(x, tensor_scale=None):
    if x.shape[-1] % 16:
        raise ValueError(f"{x.shape[-1]} numbers are no whole blocks of 16")
    blocks = x.float().reshape(*x.shape[:-1], -1, 16)
    largest = torch.linalg.vector_norm(blocks, math.inf, -1)
    if tensor_scale is None:
        tensor_scale = largest.max() / 2688
        if tensor_scale < SMALLEST_TENSOR_SCALE:
            tensor_scale = torch.tensor(1.0)
    codes = encode((largest / 6) / tensor_scale, E4M3).to(torch.uint8)
    scale = decode(codes.int(), E4M3).float()
    factor = tensor_scale.reciprocal() / scale
    numbers = blocks * factor[..., None]
    numbers[~(scale > 0)] = 0
    return encode(numbers.reshape(x.shape), E2M1).to(torch.uint8), codes.view(FP8), tensor_scale.clone()


@other("quantize_nvfp4")
def with_thresholds(x, tensor_scale=None):
    count = x.shape[-1] // 16
    if count * 16 != x.shape[-1]:
        raise ValueError(f"16 does not divide {x.shape[-1]}")
    blocks = x.to(torch.float32).unflatten(-1, (count, 16))
    amax = torch.maximum(blocks.amax(-1), -blocks.amin(-1)).abs()  # of -0.0, too
    if tensor_scale is None:
        own = amax.max() / torch.tensor(2688.0)
        tensor_scale = torch.where(own < SMALLEST_TENSOR_SCALE, torch.ones(()), own)
    scale = torch.clamp(amax / 6 / tensor_scale, max=448.0).to(FP8)
    wide = scale.float()
    size = (blocks * ((1 / tensor_scale) / wide)[..., None]).abs()
    # How many halves between two codes are passed; every second one, the tie goes up to the even code.
    above = sum((size > half).int() for half in (0.25, 1.25, 2.5, 5.0)) + sum(
        (size >= half).int() for half in (0.75, 1.75, 3.5)
    )
    codes = above | (blocks.signbit().int() << 3)
    codes = torch.where((wide > 0)[..., None], codes, 0)
    return codes.to(torch.uint8).flatten(-2), scale, tensor_scale


# --- 13.7 quantize_blockwise_128 ---


@other("quantize_blockwise_128")
def block_by_block(x, block=(1, 128), power_of_two=False):
    (rows, columns), wide = block, x.float()
    codes = torch.zeros(x.shape).to(FP8)
    scales = []
    for top in range(0, x.shape[0], rows):
        line = []
        for left in range(0, x.shape[1], columns):
            part = wide[top : top + rows, left : left + columns]
            scale = torch.maximum(part.abs().max(), torch.tensor(1e-4)) / 448
            if power_of_two and scale.isfinite():
                fraction, exponent = torch.frexp(scale)
                scale = torch.ldexp(torch.tensor(1.0), exponent - int(fraction == 0.5))
            line.append(scale)
            codes[top : top + rows, left : left + columns] = (part / scale).clamp(-448, 448).to(FP8)
        scales.append(torch.stack(line))
    return codes, torch.stack(scales)


@other("quantize_blockwise_128")
def padded_and_cut(x, block=(1, 128), power_of_two=False):
    M, K = x.shape
    down, across = -(-M // block[0]), -(-K // block[1])
    padded = torch.zeros(down * block[0], across * block[1])
    padded[:M, :K] = x
    tiles = padded.view(down, block[0], across, block[1])
    scale = torch.clamp(tiles.abs().amax((1, 3)), min=1e-4) / torch.tensor(448.0)
    if power_of_two:
        bits = scale.view(torch.int32)
        up = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)) << 23
        scale = torch.where(scale.isfinite(), up.view(torch.float32), scale)
    codes = encode((tiles / scale[:, None, :, None]).reshape(padded.shape), E4M3)
    return codes[:M, :K].to(torch.uint8).contiguous().view(FP8), scale


# --- 13.8 hadamard_rotate ---


@other("hadamard_rotate")
def by_butterflies(x, signs, back=False):
    n = signs.numel()
    if x.shape[-1] % n != 0:
        raise ValueError(f"{x.shape[-1]} numbers are no whole blocks of {n}")
    y = x.reshape(-1, n) if back else x.reshape(-1, n) * signs
    width = 1
    while width < n:
        pairs = y.reshape(-1, n // (2 * width), 2, width)
        y = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2).reshape(-1, n)
        width *= 2
    y = y * n**-0.5
    return (y * signs if back else y).reshape(x.shape)


@other("hadamard_rotate")
def by_one_matrix(x, signs, back=False):
    n = len(signs)
    if x.shape[-1] % n:
        raise ValueError(f"rows of {x.shape[-1]}, blocks of {n}")
    i = np.arange(n)
    parity = np.array([bin(bits).count("1") & 1 for bits in (i[:, None] & i).reshape(-1)]).reshape(n, n)
    rotation = (signs[:, None].double() * torch.from_numpy(1 - 2 * parity).double()) / math.sqrt(n)
    blocks = x.double().reshape(*x.shape[:-1], -1, n)
    return (blocks @ (rotation.T if back else rotation)).float().reshape(x.shape)


# --- 13.9 adam_8bit_step ---


@other("adam_8bit_step")
def in_float64(
    weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
):
    def back(codes, scale):
        each = scale.repeat_interleave(256)[: codes.numel()].reshape(codes.shape)
        return codes.double() * each.double()

    def keep(moment):
        flat = moment.float().reshape(-1)
        codes, scales = [], []
        for start in range(0, len(flat), 256):
            part = flat[start : start + 256]
            scale = part.abs().max() / 448
            scale = torch.tensor(1.0) if scale < 2.0**-126 else scale
            codes.append(encode(part / scale, E4M3).to(torch.uint8))
            scales.append(scale)
        return torch.cat(codes).view(FP8).reshape(moment.shape), torch.stack(scales)

    m = back(m_codes, m_scale) * betas[0] + gradient.double() * (1 - betas[0])
    v = back(r_codes, r_scale) ** 2 * betas[1] + gradient.double() ** 2 * (1 - betas[1])
    size = lr / (1 - betas[0] ** step)
    new = weight.double() * (1 - lr * weight_decay) - size * m / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return new.float(), *keep(m), *keep(v.sqrt())


@other("adam_8bit_step")
def with_torch_in_place(
    weight, gradient, m_codes, m_scale, r_codes, r_scale, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
):
    count = weight.numel()

    def rows(tensor):
        return torch.nn.functional.pad(tensor.reshape(-1), (0, -count % 256)).view(-1, 256)

    def kept(blocks):
        scale = blocks.abs().amax(1, keepdim=True) / 448
        scale[scale < 2.0**-126] = 1.0
        codes = encode(blocks / scale, E4M3).to(torch.uint8).view(-1)[:count].view(FP8)
        return codes.view(weight.shape), scale.view(-1)

    g = rows(gradient)
    m = rows(m_codes.float()) * m_scale[:, None]
    m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
    v = (rows(r_codes.float()) * r_scale[:, None]).square_()
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    root = v.sqrt()
    below = (root / math.sqrt(1 - betas[1] ** step)).add_(eps)
    new = rows(weight).mul(1 - lr * weight_decay).addcdiv_(m, below, value=-lr / (1 - betas[0] ** step))
    return new.view(-1)[:count].view(weight.shape), *kept(m), *kept(root)


# --- 13.10 mx_linear ---


@other("mx_linear")
def with_einsum(x, weight, fmt=E4M3, mode="rceil"):
    def times(a, b):
        a, b = (dequantize_mx(*quantize_mx(each.contiguous(), fmt, mode), fmt) for each in (a, b))
        return torch.einsum("mk,nk->mn", a, b)

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return times(a, b)

        @staticmethod
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            return times(gradient, b.t()), times(gradient.t(), a.t())

    return Times.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


@other("mx_linear")
def in_float64_throughout(x, weight, fmt=E4M3, mode="rceil"):
    def seen(value):
        codes, scale = quantize_mx(value.detach(), fmt, mode)
        return decode(codes.int(), fmt) * scale_value(scale).double().repeat_interleave(MX_BLOCK, -1)

    rows = x.reshape(-1, x.shape[-1])

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, weight):
            return (seen(rows) @ seen(weight).T).float()

        @staticmethod
        def backward(ctx, gradient):
            along, down = seen(gradient), seen(gradient.T)
            return (along @ seen(weight.T).T).float(), (down @ seen(rows.T).T).float()

    return Layer.apply(rows, weight).reshape(*x.shape[:-1], weight.shape[0])
