# %% [markdown]
# # 07 · Quantizer: how does a tensor fit into 8 bits?

# %% tags=["setup"]
try:
    import math

    import torch

    from lowprec_lab import check, fill, progress, question
    from lowprec_lab.bits import decode, max_finite
    from lowprec_lab.formats import E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, FORMATS, FP16, Format
    from lowprec_lab.quantizer import (
        Quantized,
        absmax,
        best_clip,
        dequantize,
        dequantized,
        passed_through,
        quantize,
        quantize_int8,
        quantized,
        refusal,
        require_granularity,
        scale_for,
        spread,
        sqnr_db,
        straight_through,
        values_of,
    )
    from lowprec_lab.rounding import cast_saturating, encode, round_to
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None


# %%
@fill
def absmax(x, granularity="tensor"):
    ### BEGIN SOLUTION
    require_granularity(granularity, x.dim())
    size = x.detach().abs()
    if granularity == "tensor":
        return size.max() if size.numel() else size.new_zeros(())
    if granularity in ("row", "column"):
        dim = -1 if granularity == "row" else -2
        # A maximum of nothing is an error; a sum of nothing is 0, in the shape that is wanted.
        return size.amax(dim, keepdim=True) if size.shape[dim] else size.sum(dim, keepdim=True)
    (rows, columns), (height, width) = granularity, size.shape[-2:]
    down, across = -(-height // rows), -(-width // columns)
    padded = torch.nn.functional.pad(size, (0, across * columns - width, 0, down * rows - height))  # 0 is never larger
    return padded.reshape(*size.shape[:-2], down, rows, across, columns).amax((-3, -1))
    ### END SOLUTION


# %%
check(absmax)


# %%
@fill
def scale_for(amax, fmt, eps=1e-12, power_of_two=False):
    ### BEGIN SOLUTION
    wide = amax.double().clamp(min=eps)  # NaN stays NaN
    largest = torch.finfo(torch.float32).max
    scale = (torch.full_like(wide, max_finite(fmt)) / wide).clamp(max=largest).float()
    if power_of_two:
        exponent = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)  # the mantissa is cut off
        scale = torch.where(scale.isnan(), scale, exponent)
    return scale
    ### END SOLUTION


# %%
check(scale_for)


# %%
@fill
def quantize(x, fmt, granularity="tensor", power_of_two=False):
    ### BEGIN SOLUTION
    x = x.detach()
    scale = scale_for(absmax(x, granularity), fmt, power_of_two=power_of_two)
    scaled = x.float() * spread(scale, granularity, x.shape)
    if fmt.torch_dtype is not None and fmt.torch_dtype.itemsize == 1 and fmt.signed:
        codes = cast_saturating(scaled, fmt.torch_dtype).view(torch.uint8)  # the same codes, a hundred times as fast
    else:
        codes = encode(scaled, fmt).to(torch.uint8)
    return Quantized(codes, scale, fmt, granularity, x.dtype)
    ### END SOLUTION


# %%
check(quantize)


# %%
@fill
def dequantize(q):
    ### BEGIN SOLUTION
    table = values_of(q.fmt, q.codes.device)
    values = table.index_select(0, q.codes.reshape(-1).int()).view(q.codes.shape)
    return (values / spread(q.scale, q.granularity, q.codes.shape)).to(q.dtype)
    ### END SOLUTION


# %%
check(dequantize)


# %%
@fill
def sqnr_db(x, y):
    ### BEGIN SOLUTION
    signal, noise = x.double().square().sum(), (x.double() - y.double()).square().sum()
    if noise == 0:
        return math.inf
    return float(10 * torch.log10(signal / noise))
    ### END SOLUTION


# %%
check(sqnr_db)


# %%
@fill
def quantize_int8(x, symmetric=True):
    ### BEGIN SOLUTION
    x = x.detach().float()
    if not x.isfinite().all():
        raise ValueError("int8 has no code for NaN and infinity")
    with_zero = torch.cat([x.reshape(-1), x.new_zeros(1)])  # lo is at most 0, hi at least; and no tensor is empty
    lo, hi = with_zero.min().double(), with_zero.max().double()
    width = torch.maximum(-lo, hi) / 127 if symmetric else (hi - lo) / 255
    scale = width.clamp(min=1e-12).float()
    zero_point = torch.zeros_like(scale) if symmetric else torch.round(-128 - lo.float() / scale)
    codes = (torch.round(x / scale) + zero_point).clamp(-127 if symmetric else -128, 127)
    return codes.to(torch.int8), scale, zero_point.to(torch.int32)
    ### END SOLUTION


# %%
check(quantize_int8)


# %%
@fill
def straight_through(x, fmt):
    ### BEGIN SOLUTION
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return dequantize(quantize(x, fmt))

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Through.apply(x)
    ### END SOLUTION


# %%
check(straight_through)


# %%
@fill
def best_clip(x, fmt, fractions=tuple(k / 16 for k in range(16, 3, -1))):
    ### BEGIN SOLUTION
    x = x.detach().float()
    amax, best = absmax(x), None
    if not 0 < amax < math.inf:
        return amax
    for clip in (amax * fraction for fraction in sorted(fractions, reverse=True)):
        scale = scale_for(clip, fmt)
        error = (round_to(x * scale, fmt) / scale - x).double().square().sum()
        if best is None or error < best[0]:
            best = error, clip
    return best[1]
    ### END SOLUTION


# %%
check(best_clip)

# %%
progress()
