# %% tags=["setup"]
import torch

from lowprec_lab import check, fill
from lowprec_lab.scaled_mm import (
    E4M3,
    E5M2,
    FLOAT8,
    RULES,
    requantized_sum,
    explain_scaled_mm,
    float8_products,
    matmul_for,
    multiply,
    pad_to_multiple,
    problem,
    runs_on_cutlass,
    scaled_mm_reference,
    scaling_kind,
    to_column_major,
)


# %%
@fill
def scaled_mm_reference(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    ### BEGIN SOLUTION
    product = (a.float() * scale_a) @ (b.float() * scale_b)
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype)
    ### END SOLUTION


# %%
check(scaled_mm_reference)


# %%
@fill
def to_column_major(x):
    ### BEGIN SOLUTION
    return x.t().contiguous().t()
    ### END SOLUTION


# %%
check(to_column_major)


# %%
@fill
def pad_to_multiple(x, multiple, dims):
    ### BEGIN SOLUTION
    shape = list(x.shape)
    for dim in dims:
        shape[dim] += -shape[dim] % multiple
    padded = x.new_zeros(shape)
    padded[tuple(slice(size) for size in x.shape)] = x
    return padded
    ### END SOLUTION


# %%
check(pad_to_multiple)


# %%
@fill
def scaling_kind(a, b, scale_a, scale_b):
    ### BEGIN SOLUTION
    if not (a.dtype in FLOAT8 and b.dtype in FLOAT8 and scale_a.dtype == scale_b.dtype == torch.float32):
        return None
    (m, k), n = a.shape, b.shape[1]
    rows, columns, blocks = -(-m // 128), -(-n // 128), -(-k // 128)
    shapes = tuple(scale_a.shape), tuple(scale_b.shape)
    if scale_a.numel() == scale_b.numel() == 1:
        return "tensorwise"
    if shapes == ((m, 1), (1, n)) and scale_a.is_contiguous() and scale_b.is_contiguous():
        return "rowwise"
    if shapes in (((m, blocks), (blocks, n)), ((m, blocks), (blocks, columns)), ((rows, blocks), (blocks, n))):
        return "blockwise"
    return None
    ### END SOLUTION


# %%
check(scaling_kind)


# %%
@fill
def explain_scaled_mm(a, b, scale_a, scale_b, capability, bias=None, out_dtype=torch.bfloat16, cublas=(12, 9)):
    ### BEGIN SOLUTION
    broken = []

    def ask(rule, holds):
        if not holds:
            broken.append(problem(rule, a, b, scale_a, scale_b, capability, bias, out_dtype, cublas))
        return holds

    ask("capability", capability >= (8, 9))
    if not ask("two dimensions", a.dim() == b.dim() == 2) or not ask("inner size", a.shape[1] == b.shape[0]):
        return broken
    (m, k), n = a.shape, b.shape[1]
    kind = scaling_kind(a, b, scale_a, scale_b)
    ask("scales", kind is not None)
    ask("bias size", bias is None or bias.numel() == n)
    ask("K by 16", k % 16 == 0)
    ask("mat2 by 16", k % 16 == 0 and n % 16 == 0)
    ask("two E5M2", not a.dtype == b.dtype == E5M2)
    if bias is not None:
        ask("bias with float32", out_dtype != torch.float32)
        short = (torch.bfloat16, torch.float16)
        ask("bias dtype", bias.dtype in short)
        ask("bias as output", bias.dtype not in short or out_dtype not in short or bias.dtype == out_dtype)
    if kind is None or m * k * n == 0:
        return broken
    if kind == "blockwise":
        ask("block-wise", capability[0] == 9)
        ask("block-wise cuBLAS", cublas >= (12, 9))
    cutlass = kind == "rowwise" and runs_on_cutlass(capability, cublas)
    if cutlass:
        ask("row-wise output", out_dtype in (torch.float32, *(torch.bfloat16, torch.float16)))
        ask("row-wise E5M2", b.dtype == E4M3)
    if cutlass or capability < (10, 0):
        ask("a row-major", a.stride(1) == 1 and a.stride(0) >= k)
        ask("b column-major", b.stride(0) == 1 and b.stride(1) >= k)
    return broken
    ### END SOLUTION


# %%
check(explain_scaled_mm)


# %%
@fill
def matmul_for(capability, scaling="tensorwise", shape=None):
    ### BEGIN SOLUTION
    if scaling not in ("tensorwise", "rowwise", "blockwise"):
        raise ValueError(f"scaling is tensorwise, rowwise or blockwise, not {scaling!r}")
    if capability is None or capability < (8, 9):
        return "emulated"
    if scaling == "blockwise" and capability[0] != 9:
        return "emulated"
    if shape is not None and (shape[1] % 16 or shape[2] % 16):
        return "emulated"
    return "hardware"
    ### END SOLUTION


# %%
check(matmul_for)


# %%
@fill
def requantized_sum(x, inverse_x, y, inverse_out, cast):
    ### BEGIN SOLUTION
    total = x.float() * inverse_x + y
    if inverse_out is None:
        inverse_out = total.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 448
    return cast((total / inverse_out).clamp(-448, 448)), inverse_out
    ### END SOLUTION


# %%
check(requantized_sum)


# %%
@fill
def multiply(gpu, a, b, inverse_a, inverse_b):
    ### BEGIN SOLUTION
    if matmul_for(gpu.capability) == "emulated":
        product = gpu.mm(a.bfloat16(), b.bfloat16())  # every E4M3 number is a BF16 number
    elif gpu.rowwise or inverse_a.numel() == 1:
        return gpu.scaled_mm(a, b, inverse_a, inverse_b)
    else:
        one = torch.ones(1)
        product = gpu.scaled_mm(a, b, one, one, out_dtype=torch.float32)
    return (product * inverse_a * inverse_b).bfloat16()
    ### END SOLUTION


# %%
check(multiply)


# %%
@fill
def float8_products(gpu, x, weight, grad_output):
    ### BEGIN SOLUTION
    def quantized(tensor, dtype):
        largest = torch.finfo(dtype).max
        inverse = tensor.abs().amax() / largest
        return (tensor / inverse).clamp(-largest, largest).to(dtype), inverse

    def product(a, b, inverse_a, inverse_b):
        a, b = pad_to_multiple(a, 16, (1,)), to_column_major(pad_to_multiple(b, 16, (0, 1)))
        return gpu.scaled_mm(a.contiguous(), b, inverse_a, inverse_b)

    (m, k), n = x.shape, weight.shape[0]
    x, inverse_x = quantized(x, E4M3)
    weight, inverse_w = quantized(weight, E4M3)
    grad, inverse_g = quantized(grad_output, E5M2)
    output = product(x, weight.t(), inverse_x, inverse_w)[:, :n]
    grad_weight = product(grad.t(), x, inverse_g, inverse_x)[:, :k]
    return output, grad_weight
    ### END SOLUTION


# %%
check(float8_products)
