"""Other right answers to the exercises of chapter 11."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from lowprec_lab.bench.other_answers import other
from lowprec_lab.bits import decode
from lowprec_lab.formats import E4M3
from lowprec_lab.inference import (
    FP8,
    MIN_SCALE,
    TOP,
    quantize_activation_per_token,
    quantize_per_tensor,
    quantize_weight_per_channel,
)
from lowprec_lab.rounding import encode, round_to

# --- 11.1 quantize_weight_per_channel ---


@other("quantize_weight_per_channel")
def by_encode(weight):
    wide = weight.to(torch.float32)
    scale = torch.maximum(torch.linalg.vector_norm(wide, math.inf, 1, True) / 448, torch.tensor(MIN_SCALE))
    return encode(wide / scale, E4M3).to(torch.uint8).view(FP8), scale


@other("quantize_weight_per_channel")
def row_by_row(weight):
    codes, scales = [torch.zeros(0, weight.shape[1]).to(FP8)], [torch.zeros(0, 1)]
    for row in weight.float():
        amax = torch.maximum(row.max(), -row.min())
        scale = torch.max(amax / torch.tensor(448.0), torch.tensor(1.0) / torch.tensor(448.0 * 512))
        codes.append((row / scale).clamp(-448, 448).to(FP8)[None])
        scales.append(scale.reshape(1, 1))
    return torch.cat([each.view(torch.uint8) for each in codes]).view(FP8), torch.cat(scales)


# --- 11.2 quantize_activation_per_token ---


@other("quantize_activation_per_token")
def flat_and_back(x, upper_bound=None):
    rows = x.float().reshape(x.shape[:-1].numel(), x.shape[-1])
    amax = torch.maximum(rows.max(1).values, rows.min(1).values.neg())
    amax = torch.minimum(amax, torch.tensor(math.inf if upper_bound is None else upper_bound))
    scale = torch.maximum(amax / 448, torch.tensor(MIN_SCALE))[:, None]
    codes = round_to(rows / scale, E4M3)  # saturates
    return codes.to(FP8).reshape(x.shape), scale.reshape(*x.shape[:-1], 1)


@other("quantize_activation_per_token")
def scale_of_what_is_clipped(x, upper_bound=None):
    rows = x.float().reshape(-1, x.shape[-1]) if x.numel() else torch.zeros(0, x.shape[-1])
    bound = math.inf if upper_bound is None else upper_bound
    _, scale = quantize_weight_per_channel(rows.clamp(-bound, bound))
    return round_to(rows / scale, E4M3).to(FP8).reshape(x.shape), scale.reshape(*x.shape[:-1], 1)


# --- 11.3 quantize_per_tensor ---


@other("quantize_per_tensor")
def with_encode(x, scale=None):
    if scale is None:
        scale = torch.maximum(x.abs().max().float() / 448, torch.tensor(MIN_SCALE))
    inverse = torch.ones(()) / scale
    return encode(x.float() * inverse, E4M3).to(torch.uint8).view(FP8), scale


@other("quantize_per_tensor")
def own_scale_by_11_2(x, scale=None):
    if scale is None:
        scale = quantize_activation_per_token(x.reshape(-1))[1].reshape(())
    return torch.clip(x.float() * (1 / scale), -TOP, TOP).to(torch.float8_e4m3fn), scale


# --- 11.4 calibrate_static ---


@other("calibrate_static")
def sorted_by_numpy(batches, fraction=1.0):
    sizes = np.sort(np.concatenate([np.zeros(0, np.float32), *(b.float().abs().numpy().ravel() for b in batches)]))
    if len(sizes) == 0:
        raise ValueError("no numbers")
    amax = np.nan if np.isnan(sizes).any() else sizes[math.ceil(len(sizes) * fraction) - 1]
    return torch.tensor(np.float32(amax)).div(448).clamp(min=MIN_SCALE)


@other("calibrate_static")
def counts_from_above(batches, fraction=1.0):
    n = sum(batch.numel() for batch in batches)
    if n == 0:
        raise ValueError("no numbers")
    kept = n - math.ceil(fraction * n) + 1
    largest = torch.zeros(0)
    for batch in batches:  # never more of them than are needed
        together = torch.cat([largest, batch.float().abs().reshape(-1)])
        largest = together.topk(min(kept, len(together))).values
    if largest.isnan().any():
        return torch.tensor(math.nan)
    return torch.maximum(largest[kept - 1] / 448, torch.tensor(MIN_SCALE))


# --- 11.5 Float8InferenceLinear ---


@other("Float8InferenceLinear")
class DequantizesFirst(nn.Module):
    def __init__(self, codes, weight_scale, bias=None, input_scale=None, activations="token"):
        super().__init__()
        ways = {"token": self.by_token, "tensor": self.by_tensor, "none": self.as_it_is}
        if activations not in ways:
            raise ValueError(f"choose one of {', '.join(ways)}")
        self.way = activations
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)
        self.register_buffer("input_scale", input_scale)

    def by_token(self, x):
        codes, scale = quantize_activation_per_token(x)
        return codes.float() * scale

    def by_tensor(self, x):
        given = () if self.input_scale is None else (self.input_scale[0],)
        codes, scale = quantize_per_tensor(x, *given)
        return codes.float() * scale

    def as_it_is(self, x):
        return x.float()

    @torch.no_grad()
    def forward(self, x):
        values = {"token": self.by_token, "tensor": self.by_tensor, "none": self.as_it_is}[self.way](x)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(values, self.weight.float() * self.weight_scale, bias).to(x.dtype)


@other("Float8InferenceLinear")
class WithEinsum(nn.Module):
    def __init__(self, codes, weight_scale, bias=None, input_scale=None, activations="token"):
        super().__init__()
        if activations == "none":
            self.quantize = lambda x: (x, torch.ones(()))
        elif activations == "token":
            self.quantize = quantize_activation_per_token
        elif activations == "tensor":
            self.quantize = lambda x: quantize_per_tensor(
                x, self.input_scale if input_scale is None else input_scale[0]
            )
        else:
            raise ValueError("token, tensor or none")
        for name, value in (("weight", codes), ("weight_scale", weight_scale)):
            self.register_buffer(name, value)
        self.register_buffer("bias", bias)
        self.register_buffer("input_scale", input_scale)

    def forward(self, x):
        with torch.no_grad():
            codes, scale = self.quantize(x)
            total = torch.einsum("...k,nk->...n", codes.float(), self.weight.float())
            total = total * (scale * self.weight_scale.flatten())
            return (total if self.bias is None else total + self.bias.float()).to(x.dtype)


# --- 11.6 perplexity ---


@other("perplexity")
def from_the_logits(model, batches):
    before = model.training
    model.train(False)
    with torch.inference_mode():
        logits = [model(x, y)[0].double() for x, y in batches]
    model.train(before)
    log_p = [F.log_softmax(each, -1).gather(-1, y[..., None]) for each, (_, y) in zip(logits, batches, strict=True)]
    return float(torch.cat([each.flatten() for each in log_p]).mean().neg().exp())


@other("perplexity")
def weighted_by_numpy(model, batches):
    mode = model.training
    model.eval()
    losses, weights = [], []
    with torch.no_grad():
        for x, y in batches:
            losses.append(model(x, y)[1].item())
            weights.append(y.shape[0] * y.shape[1])
    model.train(mode)
    return float(np.exp(np.average(np.array(losses), weights=weights)))


# --- 11.7 Float8KVCache ---


@other("Float8KVCache")
class KeepsBytes:
    def __init__(self, batch, heads, context, dim, k_scale=-1.0, v_scale=-1.0):
        import warnings

        if k_scale == 0 or v_scale == 0 or k_scale != k_scale or v_scale != v_scale:
            raise ValueError("a scale of 0 or NaN")
        set_ones = [scale for scale in (k_scale, v_scale) if scale > 0]
        if len(set_ones) == 0:
            warnings.warn("not calibrated", UserWarning, stacklevel=2)
            set_ones = [1.0]
        self.k_scale = k_scale if k_scale > 0 else set_ones[0]
        self.v_scale = v_scale if v_scale > 0 else set_ones[-1]
        self.context, self.length = context, 0
        self.k = torch.empty(batch, heads, context, dim, dtype=torch.uint8).view(FP8)
        self.v = torch.empty_like(self.k)

    def append(self, k, v):
        count = k.shape[-2]
        if self.length + count > self.context:
            raise ValueError("no room")
        self.k.view(torch.uint8).narrow(2, self.length, count).copy_(self.bytes(k, self.k_scale))
        self.v.view(torch.uint8).narrow(2, self.length, count).copy_(self.bytes(v, self.v_scale))
        self.length += count

    def bytes(self, piece, scale):
        return encode(piece.float() / scale, E4M3).to(torch.uint8)

    def read(self):
        return self.values(self.k, self.k_scale), self.values(self.v, self.v_scale)

    def values(self, memory, scale):
        return decode(memory.narrow(2, 0, self.length).contiguous().view(torch.uint8).int(), E4M3).float() * scale


@other("Float8KVCache")
class OneTensorForBoth:
    def __init__(self, batch, heads, context, dim, k_scale=-1.0, v_scale=-1.0):
        import warnings

        if not all(abs(scale) > 0 for scale in (k_scale, v_scale)):
            raise ValueError("scales are above 0, or below where they are not known")
        if max(k_scale, v_scale) < 0:
            warnings.warn("scale 1.0", stacklevel=1)
            k_scale, v_scale = 1.0, 1.0
        elif min(k_scale, v_scale) < 0:
            k_scale = v_scale = max(k_scale, v_scale)
        self.k_scale, self.v_scale = k_scale, v_scale
        self.both = torch.zeros(2, batch, heads, context, dim).to(FP8)
        self.scales = torch.tensor([k_scale, v_scale]).reshape(2, 1, 1, 1, 1)
        self.length = 0

    @property
    def k(self):
        return self.both[0]

    @property
    def v(self):
        return self.both[1]

    def append(self, k, v):
        room = self.both.shape[3] - self.length
        if k.shape[2] > room:
            raise ValueError(f"room for {room}")
        quotients = torch.stack([k.float(), v.float()]) / self.scales
        self.both[..., self.length : self.length + k.shape[2], :] = quotients.clamp(-448, 448).to(FP8)
        self.length = self.length + k.shape[2]

    def read(self):
        values = self.both[..., : self.length, :].float() * self.scales
        return values[0], values[1]


# --- 11.8 smooth ---


@other("smooth")
def by_numpy(activation_amax, weight, alpha=0.5):
    x = activation_amax.numpy().astype(np.float64)
    w = np.abs(weight.numpy()).max(0).astype(np.float64)
    used = (x > 0) & (w > 0)
    factors = np.ones_like(x)
    factors[used] = x[used] ** alpha * w[used] ** (alpha - 1)
    factors = torch.from_numpy(factors.astype(np.float32))
    return factors, weight * factors[None]


@other("smooth")
def channel_by_channel(activation_amax, weight, alpha=0.5):
    factors = torch.ones(len(activation_amax))
    for k, amax in enumerate(activation_amax.tolist()):
        column = float(weight[:, k].abs().max())
        if amax and column:
            factors[k] = math.pow(amax, alpha) / math.pow(column, 1 - alpha)
    return factors, torch.einsum("nk,k->nk", weight, factors)


# --- 11.9 compensate ---


@other("compensate")
def by_cholesky(weight, x, damping=0.01):
    scale = quantize_weight_per_channel(weight)[1]
    w, samples = weight.double(), x.double()
    H = samples.T @ samples
    H.diagonal().add_(damping * H.diagonal().mean())
    if not H.any():
        return quantize_weight_per_channel(weight)
    # The rows of this factor of the inverse are what is pushed, one column after the other.
    upper = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
    codes = []
    for j in range(w.shape[1]):
        column = w[:, j].clone()
        codes.append((column / scale.squeeze(1)).float().clamp(-448, 448).to(FP8))
        error = (column - codes[-1].double() * scale.squeeze(1)) / upper[j, j]
        w -= torch.outer(error, upper[j])
    return torch.stack([each.view(torch.uint8) for each in codes], 1).view(FP8), scale


@other("compensate")
def by_elimination(weight, x, damping=0.01):
    codes, scale = quantize_weight_per_channel(weight)
    H = x.numpy().astype(np.float64).T @ x.numpy().astype(np.float64)
    H += np.eye(len(H)) * damping * np.trace(H) / len(H)
    if not H.any():
        return codes, scale
    w, inverse, wide = weight.double().numpy().copy(), np.linalg.inv(H), scale.double().numpy()[:, 0]
    for j in range(w.shape[1]):
        codes[:, j] = torch.from_numpy(w[:, j] / wide).float().clamp(-448, 448).to(FP8)
        error = w[:, j] - codes[:, j].double().numpy() * wide
        share = inverse[j] / inverse[j, j]
        w[:, j + 1 :] -= error[:, None] * share[j + 1 :]
        inverse -= np.outer(inverse[:, j], share)  # column j is settled, and leaves
    return codes, scale
