# %% [markdown]
# # 11 · FP8 inference: what does a served model need from 8 bits?

# %% tags=["setup"]
try:
    import math
    import warnings

    import torch

    from lowprec_lab import check, fill, plots, progress, question, reveal
    from lowprec_lab.inference import (
        FP8,
        MIN_SCALE,
        RECIPES,
        TOP,
        UNSET,
        Float8InferenceLinear,
        Float8KVCache,
        cache_keeps,
        cache_scales,
        cached,
        calibrate_cache,
        calibrate_static,
        compare_models,
        compensate,
        generate,
        keys_and_values,
        layer_in_8_bits,
        layer_inputs,
        layer_output,
        layer_refuses,
        layer_state,
        make_caches,
        model_bytes,
        perplexity,
        perplexity_leaves,
        perplexity_of,
        quantize_activation_per_token,
        quantize_model,
        quantize_per_tensor,
        quantize_weight_per_channel,
        smooth,
    )
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None


# %%
@fill
def quantize_weight_per_channel(weight):
    ### BEGIN SOLUTION
    wide = weight.detach().float()  # before anything is divided: a bfloat16 quotient would be a bfloat16 scale
    scale = (wide.abs().amax(-1, keepdim=True) / TOP).clamp(min=MIN_SCALE)
    return (wide / scale).clamp(-TOP, TOP).to(FP8), scale
    ### END SOLUTION


# %%
check(quantize_weight_per_channel)


# %%
@fill
def quantize_activation_per_token(x, upper_bound=None):
    ### BEGIN SOLUTION
    wide = x.detach().float()
    amax = wide.abs().amax(-1, keepdim=True)
    if upper_bound is not None:
        amax = amax.clamp(max=upper_bound)
    scale = (amax / TOP).clamp(min=MIN_SCALE)
    return (wide / scale).clamp(-TOP, TOP).to(FP8), scale
    ### END SOLUTION


# %%
check(quantize_activation_per_token)


# %%
@fill
def quantize_per_tensor(x, scale=None):
    ### BEGIN SOLUTION
    wide = x.detach().float()
    if scale is None:
        scale = (wide.abs().amax() / TOP).clamp(min=MIN_SCALE)
    return (wide * scale.reciprocal()).clamp(-TOP, TOP).to(FP8), scale
    ### END SOLUTION


# %%
check(quantize_per_tensor)


# %%
@fill
def calibrate_static(batches, fraction=1.0):
    ### BEGIN SOLUTION
    sizes = torch.cat([torch.zeros(0), *(batch.detach().float().abs().flatten() for batch in batches)])
    if not sizes.numel():
        raise ValueError("there is no number to calibrate with")
    rank = math.ceil(fraction * sizes.numel())
    amax = sizes.amax() if rank == sizes.numel() or sizes.isnan().any() else sizes.kthvalue(rank).values
    return (amax / TOP).clamp(min=MIN_SCALE)
    ### END SOLUTION


# %%
check(calibrate_static)


# %%
@fill
class Float8InferenceLinear(torch.nn.Module):
    def __init__(self, codes, weight_scale, bias=None, input_scale=None, activations="token"):
        ### BEGIN SOLUTION
        super().__init__()
        if activations not in ("token", "tensor", "none"):
            raise ValueError(f"activations are quantized by 'token', 'tensor' or 'none', not {activations!r}")
        self.activations = activations
        tensors = {"weight": codes, "weight_scale": weight_scale, "bias": bias, "input_scale": input_scale}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)  # None is no entry of state_dict
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        x = x.detach()
        if self.activations == "token":
            codes, scale = quantize_activation_per_token(x)
        elif self.activations == "tensor":
            codes, scale = quantize_per_tensor(x, None if self.input_scale is None else self.input_scale.reshape(()))
        else:
            codes, scale = x, 1.0
        # Products of codes are summed, and scales come out of the sum: by row and by column of the output.
        output = codes.float() @ self.weight.float().T * scale * self.weight_scale.reshape(-1)
        if self.bias is not None:
            output = output + self.bias.float()
        return output.to(x.dtype)
        ### END SOLUTION


# %%
check(Float8InferenceLinear)


# %%
@fill
def perplexity(model, batches):
    ### BEGIN SOLUTION
    training, total, tokens = model.training, 0.0, 0
    model.eval()
    try:
        with torch.no_grad():
            for x, y in batches:
                total += float(model(x, y)[1]) * y.numel()  # Python's numbers are float64
                tokens += y.numel()
    finally:
        model.train(training)
    return math.exp(total / tokens)
    ### END SOLUTION


# %%
check(perplexity)


# %%
@fill
class Float8KVCache:
    def __init__(self, batch, heads, context, dim, k_scale=-1.0, v_scale=-1.0):
        ### BEGIN SOLUTION
        import warnings

        if k_scale < 0 and v_scale < 0:
            warnings.warn("the scales of a KV cache in 8 bits are not calibrated: 1.0 is used", stacklevel=2)
            k_scale = v_scale = 1.0
        self.k_scale = v_scale if k_scale < 0 else k_scale
        self.v_scale = k_scale if v_scale < 0 else v_scale
        if not (self.k_scale > 0 and self.v_scale > 0):  # NaN is not above 0 either
            raise ValueError(f"a scale is above 0 (or below, where it is unset), not {k_scale!r}, {v_scale!r}")
        self.k, self.v = (torch.zeros(batch, heads, context, dim, dtype=FP8) for _ in range(2))
        self.length = 0
        ### END SOLUTION

    def append(self, k, v):
        ### BEGIN SOLUTION
        end = self.length + k.shape[2]
        if end > self.k.shape[2]:
            raise ValueError(f"{k.shape[2]} tokens do not fit: {self.length} of {self.k.shape[2]} are taken")
        for memory, piece, scale in ((self.k, k, self.k_scale), (self.v, v, self.v_scale)):
            codes = (piece.detach().float() / scale).clamp(-TOP, TOP).to(FP8)
            memory[:, :, self.length : end] = codes
        self.length = end
        ### END SOLUTION

    def read(self):
        ### BEGIN SOLUTION
        pairs = ((self.k, self.k_scale), (self.v, self.v_scale))
        return tuple(memory[:, :, : self.length].float() * scale for memory, scale in pairs)
        ### END SOLUTION


# %%
check(Float8KVCache)


# %%
@fill
def smooth(activation_amax, weight, alpha=0.5):
    ### BEGIN SOLUTION
    x, w = activation_amax.double(), weight.abs().amax(0).double()
    factors = (x**alpha / w ** (1 - alpha)).float()
    factors = torch.where((x == 0) | (w == 0), 1.0, factors)
    return factors, weight * factors
    ### END SOLUTION


# %%
check(smooth)


# %%
@fill
def compensate(weight, x, damping=0.01):
    ### BEGIN SOLUTION
    _, scale = quantize_weight_per_channel(weight)
    w, wide = weight.double(), x.double()
    H = wide.T @ wide
    H += damping * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
    codes = torch.empty(weight.shape, dtype=FP8)
    for j in range(w.shape[1]):
        codes[:, j] = (w[:, j] / scale[:, 0]).float().clamp(-TOP, TOP).to(FP8)
        error = w[:, j] - codes[:, j].double() * scale[:, 0]
        if j + 1 < w.shape[1] and H.any():
            a = torch.linalg.solve(H[j + 1 :, j + 1 :], H[j + 1 :, j])
            w[:, j + 1 :] += error[:, None] * a
    return codes, scale
    ### END SOLUTION


# %%
check(compensate)
