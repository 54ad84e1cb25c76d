# %% [markdown]
# # 13 · Block formats: what do block scales buy?

# %% tags=["setup"]
try:
    import copy
    import math

    import torch

    from lowprec_lab import check, fill, plots, progress, question, reveal
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
    from lowprec_lab.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP32
    from lowprec_lab.quantizer import absmax, spread, values_of
    from lowprec_lab.reading import installed_lines
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None


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


# %%
@fill
def quantize_mx(x, fmt, mode="floor", block=MX_BLOCK):
    ### BEGIN SOLUTION
    if x.shape[-1] % block:
        raise ValueError(f"blocks of {block} do not divide rows of {x.shape[-1]}")
    blocks = x.detach().float().unflatten(-1, (x.shape[-1] // block, block))
    scale = e8m0_scale(blocks.abs().amax(-1), fmt, mode)
    is_nan = (scale == NAN_SCALE).unsqueeze(-1)
    scaled = torch.where(is_nan, 0.0, blocks / scale_value(scale).unsqueeze(-1)).flatten(-2)
    if fmt.torch_dtype is not None and fmt.width == 8:  # the same codes, many times as fast
        largest = max_finite(fmt)
        return scaled.clamp(-largest, largest).to(fmt.torch_dtype).view(torch.uint8), scale
    return quick_encode(scaled, fmt), scale
    ### END SOLUTION


# %%
check(quantize_mx)


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


# %%
@fill
def unpack_nibbles(packed):
    ### BEGIN SOLUTION
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    ### END SOLUTION


# %%
check(unpack_nibbles)


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
