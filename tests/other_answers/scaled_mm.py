"""Other right answers to the exercises of chapter 09."""

import math

import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.scaled_mm import (
    E4M3,
    E5M2,
    RULES,
    has_strides,
    matmul_for,
    pad_to_multiple,
    problem,
    scaling_kind,
    to_column_major,
)

# --- 9.1 scaled_mm_reference ---


@other("scaled_mm_reference")
def scales_afterwards(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    product = torch.mm(a.to(torch.float32), b.to(torch.float32)) * scale_a * scale_b
    return (product if bias is None else product + bias).to(out_dtype)


@other("scaled_mm_reference")
def in_float64_by_einsum(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    total = torch.einsum("mk,kn->mn", a.double() * scale_a.double(), b.double() * scale_b.double())
    if bias is not None:
        total += bias.double()
    return total.float().to(out_dtype)


@other("scaled_mm_reference")
def one_product_after_the_other(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    left, right = a.float() * scale_a, b.float() * scale_b
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total = total + left[:, k, None] * right[None, k, :]
    return (total + (0 if bias is None else bias.float())).type(out_dtype)


# --- 9.2 to_column_major ---


@other("to_column_major")
def into_empty(x):
    made = torch.empty_strided(x.shape, (1, x.shape[0]), dtype=x.dtype)
    made.copy_(x)
    return made


@other("to_column_major")
def columns_in_a_row(x):
    flat = torch.cat([x[:, column] for column in range(x.shape[1])])
    return flat.view(x.shape[1], x.shape[0]).transpose(0, 1)


@other("to_column_major")
def only_where_it_is_not(x):
    return x if x.stride() == (1, x.shape[0]) else x.mT.clone(memory_format=torch.contiguous_format).mT


# --- 9.3 pad_to_multiple ---


@other("pad_to_multiple")
def with_pad(x, multiple, dims):
    more = [0] * (2 * x.dim())
    for dim in dims:
        more[2 * (x.dim() - 1 - dim % x.dim()) + 1] = (multiple - x.shape[dim] % multiple) % multiple
    return (
        torch.nn.functional.pad(x.view(torch.uint8), more).view(x.dtype)
        if x.element_size() == 1
        else torch.nn.functional.pad(x, more)
    )


@other("pad_to_multiple")
def with_cat(x, multiple, dims):
    for dim in dims:
        shape = list(x.shape)
        shape[dim] = math.ceil(shape[dim] / multiple) * multiple - shape[dim]
        x = torch.cat([x, torch.zeros(shape, dtype=x.dtype)], dim=dim)
    return x


# --- 9.4 scaling_kind ---


@other("scaling_kind")
def one_question_after_the_other(a, b, scale_a, scale_b):
    for matrix, scale in ((a, scale_a), (b, scale_b)):
        if matrix.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or scale.dtype is not torch.float32:
            return None
    if (scale_a.numel(), scale_b.numel()) == (1, 1):
        return "tensorwise"
    if scale_a.dim() != 2 or scale_b.dim() != 2:
        return None
    m, n, blocks = a.size(0), b.size(1), math.ceil(a.size(1) / 128)
    whole = scale_a.is_contiguous() and scale_b.is_contiguous()
    if scale_a.size() == (m, 1) and scale_b.size() == (1, n) and whole:
        return "rowwise"
    if scale_a.size(1) != blocks or scale_b.size(0) != blocks:
        return None
    column_major = lambda scale: has_strides(scale, 1, scale.size(0))  # noqa: E731
    row_major = lambda scale: has_strides(scale, scale.size(1), 1)  # noqa: E731
    fine_a, fine_b = scale_a.size(0) == m and column_major(scale_a), scale_b.size(1) == n and row_major(scale_b)
    coarse_a = scale_a.size(0) == math.ceil(m / 128) and row_major(scale_a)
    coarse_b = scale_b.size(1) == math.ceil(n / 128) and column_major(scale_b)
    return "blockwise" if (fine_a and (fine_b or coarse_b)) or (coarse_a and fine_b) else None


@other("scaling_kind")
def by_table(a, b, scale_a, scale_b):
    if {a.dtype, b.dtype} - {E4M3, E5M2} or {scale_a.dtype, scale_b.dtype} - {torch.float32}:
        return None
    m, k, n = *a.shape, b.shape[-1]
    rows, across, columns = ((size + 127) // 128 for size in (m, k, n))
    if scale_a.numel() * scale_b.numel() == 1:
        return "tensorwise"
    if scale_a.dim() != 2 or scale_b.dim() != 2:
        return None

    def memory(scale):
        orders = {"C": (scale.shape[1], 1), "F": (1, scale.shape[0])}
        return {order for order, strides in orders.items() if has_strides(scale, *strides)}

    table = {(m, n): ("F", "C"), (m, columns): ("F", "F"), (rows, n): ("C", "C")}
    found = scale_a.shape[0], scale_b.shape[1]
    whole = scale_a.is_contiguous() and scale_b.is_contiguous()
    if found == (m, n) and scale_a.shape[1] == scale_b.shape[0] == 1 and whole:
        return "rowwise"
    if scale_a.shape[1] != across or scale_b.shape[0] != across or found not in table:
        return None
    order_a, order_b = table[found]
    return "blockwise" if order_a in memory(scale_a) and order_b in memory(scale_b) else None


# --- 9.5 explain_scaled_mm ---


@other("explain_scaled_mm")
def a_table_of_conditions(a, b, scale_a, scale_b, capability, bias=None, out_dtype=torch.bfloat16, cublas=(12, 9)):
    call = (a, b, scale_a, scale_b, capability, bias, out_dtype, cublas)
    major = capability[0]
    broken = {
        "capability": major < 8 or (major == 8 and capability[1] < 9),
        "two dimensions": a.ndim != 2 or b.ndim != 2,
    }
    broken["inner size"] = not broken["two dimensions"] and a.size(1) != b.size(0)
    if not broken["two dimensions"] and not broken["inner size"]:
        m, k, n = a.size(0), a.size(1), b.size(1)
        kind = scaling_kind(a, b, scale_a, scale_b)
        broken |= {
            "scales": kind is None,
            "K by 16": bool(k % 16),
            "mat2 by 16": bool(k % 16 or n % 16),
            "two E5M2": {a.dtype, b.dtype} == {E5M2},
        }
        if bias is not None:
            pair = {bias.dtype, out_dtype}
            broken |= {
                "bias size": bias.numel() != n,
                "bias with float32": out_dtype is torch.float32,
                "bias dtype": bias.dtype not in (torch.bfloat16, torch.float16),
                "bias as output": pair == {torch.bfloat16, torch.float16},
            }
        if kind and m and k and n:
            cutlass = kind == "rowwise" and (major != 9 or cublas < (12, 9))
            wants_layout = cutlass or major <= 9
            broken |= {
                "block-wise": kind == "blockwise" and major != 9,
                "block-wise cuBLAS": kind == "blockwise" and cublas < (12, 9),
                "row-wise output": cutlass and out_dtype.itemsize == 1,
                "row-wise E5M2": cutlass and b.dtype == E5M2,
                "a row-major": (cutlass and (a.stride(1) != 1 or a.stride(0) < k))
                or (not cutlass and wants_layout and m > 1 and a.stride(0) == 1 and a.stride(1) >= m),
                "b column-major": wants_layout and (b.stride(0) != 1 or b.stride(1) < k),
            }
    return [problem(rule, *call) for rule in RULES if broken.get(rule)]


@other("explain_scaled_mm")
def in_three_parts(a, b, scale_a, scale_b, capability, bias=None, out_dtype=torch.bfloat16, cublas=(12, 9)):
    def shape_rules():
        if a.dim() != 2 or b.dim() != 2:
            yield "two dimensions"
        elif a.shape[1] != b.shape[0]:
            yield "inner size"

    def argument_rules(kind):
        if kind is None:
            yield "scales"
        if bias is not None and bias.numel() != b.shape[1]:
            yield "bias size"
        if a.shape[1] % 16:
            yield "K by 16"
        if any(size % 16 for size in b.shape):
            yield "mat2 by 16"
        if a.dtype == E5M2 and b.dtype == E5M2:
            yield "two E5M2"
        if bias is None:
            return
        if out_dtype == torch.float32:
            yield "bias with float32"
        if bias.dtype == torch.float32 or bias.dtype == torch.float64:
            yield "bias dtype"
        elif out_dtype in (torch.float16, torch.bfloat16) and out_dtype != bias.dtype:
            yield "bias as output"

    def kernel_rules(kind):
        hopper, new_cublas = capability[0] == 9, cublas >= (12, 9)
        if kind == "blockwise":
            yield from (["block-wise"] if not hopper else []) + (["block-wise cuBLAS"] if not new_cublas else [])
        by_cutlass = kind == "rowwise" and not (hopper and new_cublas)
        if by_cutlass and out_dtype in (E4M3, E5M2):
            yield "row-wise output"
        if by_cutlass and b.dtype != E4M3:
            yield "row-wise E5M2"
        is_row_major = a.stride(1) == 1 and a.stride(0) >= a.shape[1]
        is_column_major = a.shape[0] > 1 and a.t().stride(1) == 1 and a.t().stride(0) >= a.shape[0]
        if (by_cutlass and not is_row_major) or (not by_cutlass and capability[0] < 10 and is_column_major):
            yield "a row-major"
        if (by_cutlass or capability[0] < 10) and not (b.t().stride(1) == 1 and b.t().stride(0) >= b.shape[0]):
            yield "b column-major"

    names = ["capability"] if capability < (8, 9) else []
    first = list(shape_rules())
    names += first
    if not first:
        kind = scaling_kind(a, b, scale_a, scale_b)
        names += argument_rules(kind)
        if kind is not None and 0 not in (*a.shape, *b.shape):
            names += kernel_rules(kind)
    return [problem(name, a, b, scale_a, scale_b, capability, bias, out_dtype, cublas) for name in names]


# --- 9.6 matmul_for ---


@other("matmul_for")
def by_one_number(capability, scaling="tensorwise", shape=None):
    lowest = {"tensorwise": 89, "rowwise": 89, "blockwise": 90}
    if scaling not in lowest:
        raise ValueError(scaling)
    number = 0 if capability is None else 10 * capability[0] + capability[1]
    highest = 99 if scaling == "blockwise" else math.inf
    fits = shape is None or math.gcd(shape[1], shape[2], 16) == 16
    return "hardware" if lowest[scaling] <= number <= highest and fits else "emulated"


@other("matmul_for")
def step_by_step(capability, scaling="tensorwise", shape=None):
    able = {"tensorwise": (8, 9), "rowwise": (8, 9), "blockwise": (9, 0)}.get(scaling)
    if able is None:
        raise ValueError(f"unknown: {scaling}")
    good = capability is not None and tuple(capability) >= able
    good = good and not (scaling == "blockwise" and capability[0] > 9)
    if shape:
        _, k, n = shape
        good = good and k % 16 + n % 16 == 0
    return ("emulated", "hardware")[good]


# --- 9.7 requantized_sum ---


@other("requantized_sum")
def with_scales(x, inverse_x, y, inverse_out, cast):
    total = x.to(torch.float32).mul(inverse_x).add(y)
    if inverse_out is not None:
        return cast(torch.clamp(total / inverse_out, min=-448.0, max=448.0)), inverse_out
    scale = 448 / total.abs().max(dim=1, keepdim=True).values.clamp(min=1e-12)
    return cast((total * scale).clamp(-448, 448)), 1 / scale


@other("requantized_sum")
def row_by_row(x, inverse_x, y, inverse_out, cast):
    rows, inverses = [], []
    for row in range(len(x)):
        total = x[row].float() * inverse_x[row] + y[row]
        if inverse_out is None:
            largest = float(total.abs().max())
            inverse = torch.tensor([largest / 448 if largest else 1.0])
        else:
            inverse = inverse_out[row]
        rows.append(cast(torch.minimum(torch.maximum(total / inverse, torch.tensor(-448.0)), torch.tensor(448.0))))
        inverses.append(inverse)
    return torch.stack(rows), torch.stack(inverses)


# --- 9.8 multiply ---


@other("multiply")
def try_and_fall_back(gpu, a, b, inverse_a, inverse_b):
    try:
        return gpu.scaled_mm(a, b, inverse_a, inverse_b)
    except RuntimeError:
        if matmul_for(gpu.capability, "tensorwise") == "hardware":
            product = gpu.scaled_mm(a, b, torch.ones(()), torch.ones(()), out_dtype=torch.float32)
        else:
            product = gpu.mm(a.to(torch.bfloat16), b.to(torch.bfloat16))
        return (product * inverse_a * inverse_b).to(torch.bfloat16)


@other("multiply")
def three_ways(gpu, a, b, inverse_a, inverse_b):
    scaling = "tensorwise" if inverse_a.numel() == inverse_b.numel() == 1 else "rowwise"
    if gpu.capability < (8, 9):
        return (gpu.mm(a.bfloat16(), b.bfloat16()) * (inverse_a * inverse_b)).bfloat16()
    if scaling == "rowwise" and not gpu.rowwise:
        one = torch.ones(1, 1)
        return gpu.scaled_mm(a, b, one, one, None, torch.float32).mul(inverse_a).mul(inverse_b).to(torch.bfloat16)
    return gpu.scaled_mm(a, b, scale_a=inverse_a, scale_b=inverse_b)


# --- 9.9 float8_products ---


@other("float8_products")
def in_the_order_of_the_table(gpu, x, weight, grad_output):
    def cast(tensor, dtype):
        scale = torch.finfo(dtype).max / tensor.abs().amax()
        return (tensor * scale).to(dtype), (1 / scale).view(1, 1)

    (x8, sx), (w8, sw), (g8, sg) = cast(x, E4M3), cast(weight, E4M3), cast(grad_output, E5M2)
    results = []
    for left, right, scale_l, scale_r in ((x8, w8.t(), sx, sw), (g8.t(), x8, sg, sx)):
        rows, columns = left.shape[0], right.shape[1]
        left = pad_to_multiple(left, 16, (0, 1)).contiguous()
        right = to_column_major(pad_to_multiple(right, 16, (0, 1)))
        results.append(gpu.scaled_mm(left, right, scale_l, scale_r)[:rows, :columns])
    return tuple(results)


@other("float8_products")
def padded_before_the_cast(gpu, x, weight, grad_output):
    (m, k), n = x.shape, weight.shape[0]
    up = lambda size: 16 * math.ceil(size / 16)  # noqa: E731
    x, weight = (
        torch.nn.functional.pad(x, (0, up(k) - k, 0, up(m) - m)),
        torch.nn.functional.pad(weight, (0, up(k) - k, 0, up(n) - n)),
    )
    grad = torch.nn.functional.pad(grad_output, (0, up(n) - n, 0, up(m) - m))
    inverses = [x.abs().max() / 448, weight.abs().max() / 448, grad.abs().max() / 57344]
    x8, w8, g8 = (x / inverses[0]).to(E4M3), (weight / inverses[1]).to(E4M3), (grad / inverses[2]).to(E5M2)
    output = gpu.scaled_mm(x8, w8.T, inverses[0], inverses[1])
    grad_weight = gpu.scaled_mm(g8.T.contiguous(), x8.T.contiguous().T, inverses[2], inverses[0])
    return output[:m, :n], grad_weight[:n, :k]
