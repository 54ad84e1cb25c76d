"""What chapter 09's answers must give, worked out in numpy and from descriptions of tensors; shares no code with them.

Values of codes come from the oracle's tables. Products are of small whole numbers times powers of two, so float64 holds
every sum exactly. A tensor is described as (dtype, shape, strides).
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.calls import bits_of
from lowprec_lab.formats import get_format
from lowprec_lab.graders import oracle, rounding_oracle
from lowprec_lab.scaled_mm import E4M3, E5M2, Gpu, Problem, problem, whole_layer, whole_operands, whole_scales

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_NAMES = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2", torch.bfloat16: "bfloat16"}


@functools.lru_cache(maxsize=8)
def _table(dtype: torch.dtype) -> np.ndarray:
    fmt = get_format(_NAMES[dtype])
    return oracle.decode(torch.arange(256), fmt).numpy()


def values(codes: Tensor) -> np.ndarray:
    """float64: the values of a float8 tensor."""
    return _table(codes.dtype)[bits_of(codes) & 0xFF].reshape(codes.shape)


def scaled_mm_reference(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    left, right = values(a) * scale_a.double().numpy(), values(b) * scale_b.double().numpy()
    total = left @ right + (0.0 if bias is None else bias.double().numpy())
    return rounded(total, out_dtype)


def rounded(exact: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Numbers that float32 holds, rounded once to a dtype by the oracle."""
    held = torch.from_numpy(exact.astype(np.float32))
    if dtype == torch.float32:
        return held
    fmt = get_format(str(dtype).removeprefix("torch."))
    return rounding_oracle.round_to(held, fmt, "nearest_even", "to_special").to(dtype)


def to_column_major(x):
    return torch.from_numpy(np.asfortranarray(bytes_of(x))).view(x.dtype) if x.element_size() == 1 else _columns(x)


def _columns(x: Tensor) -> Tensor:
    made = torch.empty_strided(x.shape, (1, x.shape[0]), dtype=x.dtype)
    return made.copy_(x)


def bytes_of(x: Tensor) -> np.ndarray:
    return bits_of(x).astype(np.uint8).reshape(x.shape)


def pad_to_multiple(x, multiple, dims):
    sizes = list(x.shape)
    for dim in {d % x.dim() for d in dims}:
        sizes[dim] = math.ceil(sizes[dim] / multiple) * multiple
    padded = torch.zeros(sizes, dtype=x.dtype)
    padded[tuple(slice(0, size) for size in x.shape)] = x
    return padded


# --- scales and rules, from descriptions ------------------------------------------------------------------------------


def describe(x: Tensor | None) -> tuple | None:
    return None if x is None else (x.dtype, tuple(x.shape), tuple(x.stride()))


def kind(a: tuple, b: tuple, scale_a: tuple, scale_b: tuple) -> str | None:
    """The kind of scaling of described tensors."""
    if {a[0], b[0]} - set(FLOAT8) or {scale_a[0], scale_b[0]} != {torch.float32}:
        return None
    (m, k), n = a[1], b[1][1]
    shapes = scale_a[1], scale_b[1]
    if all(math.prod(shape) == 1 for shape in shapes):
        return "tensorwise"
    if shapes == ((m, 1), (1, n)) and _gapless(scale_a[2][0], m) and _gapless(scale_b[2][1], n):
        return "rowwise"
    left = _blocks(scale_a, m, k)
    right = _blocks((scale_b[0], scale_b[1][::-1], scale_b[2][::-1]), n, k)
    return "blockwise" if left and right and "1x128" in (left, right) else None


def _blocks(scale: tuple, rows: int, k: int) -> str | None:
    """Whether a scale has a number for each 1x128 or 128x128 block of a (rows, k) matrix; where both fit, the first."""
    if len(scale[1]) != 2:
        return None
    short, across = (rows + 127) // 128, (k + 127) // 128
    for name, shape, strides in (
        ("1x128", (rows, across), (1, rows)), ("128x128", (short, across), (across, 1)),
    ):  # fmt: skip
        pairs = zip(shape, scale[2], strides, strict=True)
        if scale[1] == shape and all(size < 2 or own == asked for size, own, asked in pairs):
            return name
    return None


def _gapless(stride: int, size: int) -> bool:
    return stride == 1 or size < 2


def scaling_kind(a, b, scale_a, scale_b):
    return kind(*map(describe, (a, b, scale_a, scale_b)))


def rules(a, b, scale_a, scale_b, capability, bias, out_dtype, cublas) -> list[str]:
    """The names of the broken rules of a described call."""
    major, minor = capability
    broken = [] if major >= 9 or (major, minor) == (8, 9) else ["capability"]
    if (len(a[1]), len(b[1])) != (2, 2):
        return [*broken, "two dimensions"]
    (m, k), (inner, n) = a[1], b[1]
    if k != inner:
        return [*broken, "inner size"]
    scaling = kind(a, b, scale_a, scale_b)
    tests = {
        "scales": scaling is None,
        "bias size": bias is not None and math.prod(bias[1]) != n,
        "K by 16": k & 15,
        "mat2 by 16": inner & 15 or n & 15,
        "two E5M2": (a[0], b[0]) == (E5M2, E5M2),
        **_bias_rules(bias, out_dtype),
    }
    if scaling is not None and m * k * n:
        tests |= _kind_rules(a, b, scaling, major, out_dtype, cublas)
    return broken + [name for name, is_broken in tests.items() if is_broken]


def _bias_rules(bias, out_dtype) -> dict:
    if bias is None:
        return {}
    short = bias[0] in (torch.bfloat16, torch.float16)
    differs = (out_dtype, bias[0]) in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16))
    return {
        "bias with float32": out_dtype == torch.float32,
        "bias dtype": not short,
        "bias as output": differs,
    }


def _kind_rules(a, b, scaling, major, out_dtype, cublas) -> dict:
    cutlass = scaling == "rowwise" and not (major == 9 and tuple(cublas) >= (12, 9))
    m, k = a[1]
    (down, along), (down_b, along_b) = a[2], b[2]
    turned = m > 1 and down == 1 and along >= m
    a_is_wrong = not (along == 1 and down >= k) if cutlass else turned and major < 10
    blockwise = scaling == "blockwise"
    return {
        "block-wise": blockwise and major != 9,
        "block-wise cuBLAS": blockwise and tuple(cublas) < (12, 9),
        "row-wise output": cutlass and out_dtype not in (torch.float32, torch.bfloat16, torch.float16),
        "row-wise E5M2": cutlass and b[0] == E5M2,
        "a row-major": a_is_wrong,
        "b column-major": (cutlass or major < 10) and not (down_b == 1 and along_b >= k),
    }


def explain_scaled_mm(
    a, b, scale_a, scale_b, capability, bias=None, out_dtype=torch.bfloat16, cublas=(12, 9)
) -> list[Problem]:
    described = (*map(describe, (a, b, scale_a, scale_b)), capability, describe(bias), out_dtype, cublas)
    call = (a, b, scale_a, scale_b, capability, bias, out_dtype, cublas)
    return [problem(name, *call) for name in rules(*described)]


def matmul_for(capability, scaling="tensorwise", shape=None):
    if scaling not in ("tensorwise", "rowwise", "blockwise"):
        raise ValueError(f"unknown scaling {scaling!r}")
    if capability is None or (shape is not None and (shape[1] % 16 or shape[2] % 16)):
        return "emulated"
    major = capability[0] if tuple(capability) != (8, 9) else 8.9
    able = major == 9 if scaling == "blockwise" else major >= 8.9
    return "hardware" if able else "emulated"


# --- the mended snippets ----------------------------------------------------------------------------------------------


def requantized_sum(x, inverse_x, y, inverse_out, cast):
    total = values(x) * inverse_x.double().numpy() + y.double().numpy()
    if inverse_out is None:
        largest = np.abs(total).max(axis=1, keepdims=True)
        inverse_out = torch.from_numpy(np.where(largest > 0, largest / 448, 1.0).astype(np.float32))
    ratio = torch.from_numpy((total / inverse_out.double().numpy()).astype(np.float32))
    codes = rounding_oracle.encode(ratio, get_format("float8_e4m3fn"), "nearest_even", "saturate")
    return codes.to(torch.uint8).view(E4M3), inverse_out


def multiplied(capability, rowwise, by_row, m, k, n, seed) -> tuple[str, Tensor]:
    """What `multiplied_on` must give."""
    a, b, inverse_a, inverse_b = *whole_operands(m, k, n, seed), *whole_scales(m, n, by_row, seed)
    product = scaled_mm_reference(a, b, inverse_a, inverse_b)
    shapes = f"; shapes {tuple(product.shape)}"
    if tuple(capability) < (8, 9):
        return "mm of bfloat16 and bfloat16" + shapes, product
    kinds = "scales by row" if by_row and rowwise else "one scale each"
    return f"scaled_mm of float8_e4m3fn and float8_e4m3fn, {kinds}{shapes}", product


def multiply(gpu: Gpu, a, b, inverse_a, inverse_b):
    """Right on every GPU, by way of its own methods: what stands in while no answer is there."""
    if gpu.capability < (8, 9):
        product = gpu.mm(a.bfloat16(), b.bfloat16())
    elif gpu.rowwise or inverse_a.numel() == 1:
        return gpu.scaled_mm(a, b, inverse_a, inverse_b)
    else:
        product = gpu.scaled_mm(a, b, torch.ones(1), torch.ones(1), out_dtype=torch.float32)
    return (product * inverse_a * inverse_b).bfloat16()


PRODUCTS = (
    "scaled_mm of float8_e4m3fn and float8_e4m3fn, one scale each; "
    "scaled_mm of float8_e5m2 and float8_e4m3fn, one scale each"
)


def products(m, k, n, seed) -> tuple[str, Tensor, Tensor]:
    """What `products_on` must give: float8 holds these numbers exactly at their scales."""
    x, weight, grad_output = (each.double().numpy() for each in whole_layer(m, k, n, seed))
    said = f"{PRODUCTS}; shapes {(len(x), len(weight))}, {weight.shape}"
    return said, rounded(x @ weight.T, torch.bfloat16), rounded(grad_output.T @ x, torch.bfloat16)


def float8_products(gpu: Gpu, x, weight, grad_output):
    """Right on every GPU: what stands in while no answer is there."""

    def codes(tensor, dtype, largest):
        inverse = (tensor.abs().max() / largest).reshape(1)
        return (tensor / inverse).clamp(-largest, largest).to(dtype), inverse

    def product(left, right):
        (a, scale_a), (b, scale_b) = left, right
        a, b = pad_to_multiple(a, 16, (0, 1)), pad_to_multiple(b, 16, (0, 1))
        return gpu.scaled_mm(a, _columns(b), scale_a, scale_b)

    def turned(quantized):
        return quantized[0].t().contiguous(), quantized[1]

    (m, k), n = x.shape, len(weight)
    x, weight, grad = codes(x, E4M3, 448), codes(weight, E4M3, 448), codes(grad_output, E5M2, 57344)
    return product(x, turned(weight))[:m, :n], product(turned(grad), x)[:n, :k]
