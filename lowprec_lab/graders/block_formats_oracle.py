"""The exact oracle for block formats: exponents by frexp in float64, codes from breakpoints, sums in float64.

A power of two changes only the exponent, so every quotient by an MX scale is exact in float64. Where a contract divides
in float32, numpy does, which IEEE 754 rounds correctly. No cast of torch and no blank is used. A function has a keyword
for each step that a known misconception changes.

References: OCP Microscaling Formats (MX) Specification 1.0; the rest as in lowprec_lab/block_formats.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import E2M1, E4M3, Format
from lowprec_lab.graders import oracle, quantizer_oracle, rounding_oracle

MODES = ("floor", "rceil", "ceil", "even")
FP8 = torch.float8_e4m3fn


def single(x: Tensor) -> np.ndarray:
    """The numbers in float32, which holds all of the short dtypes."""
    return quantizer_oracle.numbers(x).astype(np.float32)


def tensor(values: np.ndarray, dtype: type = np.float32) -> Tensor:
    """A tensor with these numbers, of no dimension too."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def codes_of(values: np.ndarray, fmt: Format, mode: str = "nearest_even", overflow: str = "saturate") -> Tensor:
    """uint8 codes; NaN, for which not every format has one, counts as 0."""
    inside = tensor(np.nan_to_num(values.astype(np.float32), nan=0.0, posinf=np.inf, neginf=-np.inf))
    overflow = "saturate" if fmt.specials == "finite" else overflow
    return rounding_oracle.encode(inside, fmt, mode, overflow).to(torch.uint8)


def values_of(codes: Tensor, fmt: Format) -> np.ndarray:
    """What uint8 codes stand for, in float64."""
    return oracle.decode(codes.to(torch.int32), fmt).numpy()


def require_division(count: int, block: int) -> None:
    """ValueError unless `block` divides `count`."""
    if count % block:
        raise ValueError(f"blocks of {block} do not divide rows of {count}")


def in_blocks(x: np.ndarray, block: int) -> np.ndarray:
    """(..., K) as (..., K / block, block)."""
    require_division(x.shape[-1], block)
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


# --- E8M0 scales ------------------------------------------------------------------------------------------------------


def powers(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(f, e) with value = f * 2^e and 1 <= f < 2, of float64 numbers above 0."""
    fraction, exponent = np.frexp(values)
    return fraction * 2, exponent - 1


def floor_power(values: np.ndarray) -> np.ndarray:
    """floor(log2(value)), exactly."""
    return powers(values)[1]


def ceil_power(values: np.ndarray, reached=lambda fraction: fraction == 1) -> np.ndarray:
    """ceil(log2(value)), exactly. reached: of which fractions the power of two itself is not below the value."""
    fraction, exponent = powers(values)
    return exponent + ~reached(fraction)


def even_power(values: np.ndarray, bits: int) -> np.ndarray:
    """floor(log2(r)), r being the value rounded to so many bits behind the point, ties upwards."""
    fraction, exponent = powers(values)
    return exponent + (np.floor(fraction * 2.0**bits + 0.5) >= 2.0 ** (bits + 1))


def emax_of(fmt: Format) -> int:
    """The exponent of the largest power of two in the format."""
    return int(floor_power(np.float64(oracle.max_finite(fmt))))


def quotient(amax: np.ndarray, fmt: Format) -> np.ndarray:
    """amax / max_finite in float32."""
    with np.errstate(all="ignore"):
        return (amax.astype(np.float32) / np.float32(oracle.max_finite(fmt))).astype(np.float64)


def e8m0_scale(
    amax: Tensor, fmt: Format, mode: str = "floor", floor=floor_power, ceil=ceil_power, even=even_power,
    rceil=quotient, emax=emax_of, bias: int = 127, ends: tuple[int, int] = (0, 254), nan: int = 255,
) -> Tensor:  # fmt: skip
    """The contract. Keywords: how each mode finds its exponent, the bias, where bytes end, the byte of NaN."""
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    sizes = quantizer_oracle.numbers(amax)
    usual = np.where((sizes > 0) & np.isfinite(sizes), sizes, 1.0)
    if mode == "rceil":
        small = rceil(usual, fmt)
        k = np.where(small > 0, ceil(np.where(small > 0, small, 1.0)), -(2**10))
    else:
        found = {"floor": floor, "ceil": ceil}.get(mode)
        k = (found(usual) if found else even(usual, fmt.mantissa_bits)) - emax(fmt)
    byte = np.where(sizes == 0, ends[0], np.clip(k + bias, *ends))
    top = ends[1] if mode == "rceil" else min(128 - emax(fmt) + bias, ends[1])
    byte = np.where(np.isposinf(sizes), top, byte)
    return tensor(np.where(np.isnan(sizes), nan, byte).astype(np.int64) & 0xFF, np.uint8)


def scale_values(scale: Tensor, bias: int = 127, nan: float = np.nan) -> np.ndarray:
    """2^(byte - 127) in float64; NaN for 255."""
    byte = scale.numpy().astype(np.int64)
    return np.where(byte == 255, nan, np.ldexp(1.0, byte - bias))


# --- MX ---------------------------------------------------------------------------------------------------------------


def quantize_mx(
    x: Tensor, fmt: Format, mode: str = "floor", block: int = 32, size=np.abs, shared=None, value=scale_values,
    by=np.divide, rounding: str = "nearest_even", overflow: str = "saturate",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The contract. Keywords: what counts as size, over which blocks, the scale's value, and how codes are rounded."""
    blocks = in_blocks(single(x).astype(np.float64), block)
    amax = np.max(size(blocks), axis=-1)
    if shared is not None:
        amax = np.broadcast_to(shared(amax), amax.shape)
    scale = e8m0_scale(tensor(amax), fmt, mode)
    known = (scale.numpy() != 255)[..., None]
    with np.errstate(all="ignore"):
        scaled = np.where(known, by(blocks, value(scale)[..., None]), 0.0)
    return codes_of(scaled.reshape(x.shape), fmt, rounding, overflow), scale


def dequantize_mx(codes: Tensor, scale: Tensor, fmt: Format, values=values_of, factor=scale_values) -> Tensor:
    """The contract. Keywords: what codes and bytes stand for."""
    blocks = values(codes, fmt).reshape(*scale.shape, codes.shape[-1] // scale.shape[-1])
    with np.errstate(all="ignore"):
        return tensor((blocks * factor(scale)[..., None]).reshape(codes.shape))


# --- nibbles ----------------------------------------------------------------------------------------------------------


def pack_nibbles(codes: Tensor, pairs=lambda c: (c[..., ::2], c[..., 1::2]), shift: int = 4, mask: int = 15) -> Tensor:
    """The contract. pairs: the codes of the lower and of the upper halves."""
    if codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape[-1]} codes do not make whole bytes")
    low, high = pairs(codes.numpy().astype(np.int64) & mask)
    return tensor((low + high * 2**shift) & 0xFF, np.uint8)


def unpack_nibbles(packed: Tensor, low=lambda b: b % 16, high=lambda b: b // 16, join=None) -> Tensor:
    """The contract. low, high: the codes of a byte; join: where they go."""
    byte = packed.numpy().astype(np.int64)
    both = low(byte), high(byte)
    if join is None:
        join = lambda low, high: np.stack((low, high), -1).reshape(*byte.shape[:-1], 2 * byte.shape[-1])  # noqa: E731
    return tensor(join(*both) & 0xFF, np.uint8)


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


def nvfp4_tensor_scale(amax: np.ndarray, top: float = 448 * 6) -> np.float32:
    """amax / 2688, and 1.0 where that is below 2^-100."""
    with np.errstate(all="ignore"):
        scale = np.float32(amax) / np.float32(top)
    return np.float32(1) if scale < 2.0**-100 else scale


def reciprocals(blocks: np.ndarray, tensor_scale: np.float32, scale: np.ndarray) -> np.ndarray:
    """x * ((1 / tensor_scale) / scale) in float32."""
    return blocks * ((np.float32(1) / tensor_scale) / scale)


def quantize_nvfp4(
    x: Tensor, tensor_scale: Tensor | None = None, own=nvfp4_tensor_scale, least: float = 0.0, used=None,
    scaled=reciprocals, guard: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The contract. Keywords: the tensor's own scale, the least block scale, which one is used, how, and its guard."""
    blocks = in_blocks(single(x), 16)
    amax = np.max(np.abs(blocks), axis=-1)
    whole = own(np.max(amax)) if tensor_scale is None else np.float32(tensor_scale.item())
    with np.errstate(all="ignore"):
        exact = amax / np.float32(6) / whole
        code = rounding_oracle.encode(tensor(np.maximum(exact, np.float32(least))), E4M3).to(torch.uint8)
        rounded = values_of(code, E4M3).astype(np.float32)
        factor = rounded if used is None else used(exact, rounded)
        numbers = scaled(blocks, whole, factor[..., None])
        if guard:
            numbers = np.where((rounded > 0)[..., None], numbers, np.float32(0))
    return codes_of(numbers.reshape(x.shape), E2M1), code.view(FP8), tensor(whole)


# --- DeepSeek's blocks ------------------------------------------------------------------------------------------------


def blockwise_scale(amax: np.ndarray, least: float = 1e-4) -> np.ndarray:
    """max(amax, 1e-4) / 448 in float32."""
    return np.maximum(amax.astype(np.float32), np.float32(least)) / np.float32(448)


def power_above(scale: np.ndarray, power=ceil_power) -> np.ndarray:
    """The smallest power of two that is not below each scale; infinity and NaN as they are."""
    usual = np.isfinite(scale) & (scale > 0)
    found = np.ldexp(1.0, power(np.where(usual, scale, 1.0).astype(np.float64)))
    return np.where(usual, found, scale).astype(np.float32)


def quantize_blockwise_128(
    x: Tensor, block: tuple[int, int] = (1, 128), power_of_two: bool = False, size=np.abs, scale_of=blockwise_scale,
    power=ceil_power, change=lambda scale: scale, by: str = "division", given=lambda scale: scale,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The contract. Keywords: what counts as size, the scale, its power, what becomes of all, how it divides."""
    wide = single(x)
    with np.errstate(all="ignore"):
        scale = scale_of(quantizer_oracle.groups(size(wide), block).astype(np.float32))
        scale = change(power_above(scale, power) if power_of_two else scale)
        each = quantizer_oracle.spread(scale, block, wide.shape)
        scaled = wide / each if by == "division" else wide * (np.float32(1) / each)
    return fp8_codes(scaled), tensor(given(scale))


def fp8_codes(scaled: np.ndarray) -> Tensor:
    """float8_e4m3fn of float32 numbers, saturated; NaN stays NaN."""
    return rounding_oracle.encode(tensor(scaled), E4M3).to(torch.uint8).view(FP8)


# --- rotations --------------------------------------------------------------------------------------------------------


def hadamard(n: int) -> np.ndarray:
    """H by its definition: the parity of i & j."""
    bits = [[bin(i & j).count("1") % 2 for j in range(n)] for i in range(n)]
    return 1.0 - 2.0 * np.array(bits)


def hadamard_rotate(x: Tensor, signs: Tensor, back: bool = False, matrix=hadamard, size=np.sqrt, first=None) -> Tensor:
    """The contract. first: whether signs are multiplied before H, from `back`."""
    n = len(signs)
    blocks, flips = in_blocks(quantizer_oracle.numbers(x), n), quantizer_oracle.numbers(signs)
    if first(back) if first else not back:
        made = (blocks * flips) @ matrix(n) / size(n)
    else:
        made = blocks @ matrix(n) / size(n) * flips
    return tensor(made.reshape(x.shape))


# --- Adam -------------------------------------------------------------------------------------------------------------


def moment_scale(amax: np.ndarray, block: int = 256) -> np.ndarray:
    """amax / 448, and 1.0 where that is below 2^-126."""
    scale = amax / np.float32(448)
    return np.where(scale < 2.0**-126, np.float32(1), scale)


def kept(moment: np.ndarray, scale_of=moment_scale) -> tuple[Tensor, Tensor]:
    """(codes, scale) of a moment in blocks of 256."""
    flat = moment.astype(np.float32).reshape(-1)
    blocks = np.pad(flat, (0, -len(flat) % 256)).reshape(-1, 256)
    with np.errstate(all="ignore"):
        scale = scale_of(np.max(np.abs(blocks), axis=-1)).astype(np.float32)
        scaled = (blocks / scale[:, None]).reshape(-1)[: len(flat)].reshape(moment.shape)
    return fp8_codes(scaled), tensor(scale)


def restored(codes: Tensor, scale: Tensor) -> np.ndarray:
    """What a moment was kept as, in float64."""
    each = np.repeat(quantizer_oracle.numbers(scale), 256)[: codes.numel()].reshape(codes.shape)
    return values_of(codes.contiguous().view(torch.uint8), E4M3) * each


def second_root(gradient: Tensor, moments: tuple, betas: tuple[float, float]) -> np.ndarray:
    """The root of the new second moment, in float64."""
    old = betas[1] * restored(*moments[2:]) ** 2
    return np.sqrt(old + (1 - betas[1]) * quantizer_oracle.numbers(gradient) ** 2)


def adam_8bit_step(
    weight: Tensor, gradient: Tensor, m_codes: Tensor, m_scale: Tensor, r_codes: Tensor, r_scale: Tensor, step: int,
    lr: float, betas: tuple = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, scale_of=moment_scale,
    root=np.sqrt, square=np.square, correct: bool = True, after: bool = False, inside: bool = False,
    coupled: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The contract, in float64 but where moments are kept. Keywords: a step of it that is done in another way."""
    w, g = quantizer_oracle.numbers(weight), quantizer_oracle.numbers(gradient)
    g = g + weight_decay * w if coupled else g
    m = betas[0] * restored(m_codes, m_scale) + (1 - betas[0]) * g
    v = betas[1] * square(restored(r_codes, r_scale)) + (1 - betas[1]) * g**2
    parts = (*kept(m, scale_of), *kept(root(v), scale_of))
    if after:
        m, v = restored(*parts[:2]), square(restored(*parts[2:]))
    share = [1 - beta**step if correct else 1.0 for beta in betas]
    below = np.sqrt(v / share[1] + eps) if inside else np.sqrt(v / share[1]) + eps
    with np.errstate(all="ignore"):
        kept_weight = w * (1 if coupled else 1 - lr * weight_decay)
        return tensor(kept_weight - lr * (m / share[0]) / below), *parts


# --- a linear layer ---------------------------------------------------------------------------------------------------


def seen(x: Tensor, fmt: Format, mode: str) -> np.ndarray:
    """What MX leaves of a matrix, in float64, blocks along its last dimension."""
    return dequantize_mx(*quantize_mx(x, fmt, mode), fmt).numpy().astype(np.float64)


def product(a: np.ndarray, b: np.ndarray) -> Tensor:
    """a @ b.T in float64, and then float32."""
    return tensor(a @ b.T)


def forward_product(x: Tensor, weight: Tensor, fmt: Format, mode: str) -> Tensor:
    """x @ weight.T."""
    return product(seen(x, fmt, mode), seen(weight, fmt, mode))


def backward_products(gradient: Tensor, x: Tensor, weight: Tensor, fmt: Format, mode: str) -> tuple[Tensor, Tensor]:
    """(grad_x, grad_weight), each operand in blocks along what is summed over."""
    turned = [each.T.contiguous() for each in (gradient, x, weight)]
    down, x_down, weight_down = (seen(each, fmt, mode) for each in turned)
    return product(seen(gradient, fmt, mode), weight_down), product(down, x_down)


def mx_linear(x: Tensor, weight: Tensor, fmt: Format = E4M3, mode: str = "rceil", forward=forward_product,
              backward=backward_products) -> Tensor:  # fmt: skip
    """The contract. Keywords: the products of both ways."""

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return forward(x.detach(), weight.detach(), fmt, mode)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient.contiguous(), *(each.detach() for each in ctx.saved_tensors), fmt, mode)

    rows = x.reshape(-1, x.shape[-1])
    return Products.apply(rows, weight).reshape(*x.shape[:-1], len(weight))
