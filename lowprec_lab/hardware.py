"""Products in 8 bits on a GPU: chapter 08's linear layer, multiplied by the tensor cores instead of in float32.

The casts are chapter 07's `quantize`, the layouts chapter 09's `to_column_major` and `pad_to_multiple`, and where it
can be had is chapter 09's `matmul_for`: each the learner's, where it is written. The codes and scales are those of the
emulation, and only how a product is summed up differs: the tensor cores do that in their own order and, with *fast
accumulation*, with fewer bits; and a scale becomes its inverse, which is rounded once more.

What torch multiplies: E4M3 by E4M3 or by E5M2; with one scale for each operand ("tensorwise"), or one for each row of
a and each column of b ("rowwise"), where one of the two may have a single one as well.

References: aten/src/ATen/native/cuda/ScaledBlas.cpp in PyTorch; torchao/float8/float8_ops.py in pytorch/ao (which
products accumulate fast, and what the rowwise kernel writes).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowprec_lab import quantizer, scaled_mm
from lowprec_lab.float8_linear import PRODUCTS, RECIPES, Cast, Recipe, transpose
from lowprec_lab.formats import E4M3, E5M2, Format
from lowprec_lab.quantizer import Quantized

HARDWARE, EMULATED = "hardware", "emulated"
MULTIPLE = 16  # of what K and N have to be; zeros are added where they are not

# How an operand's scales have to lie to be taken out of a product's sum, as x, weight and grad_output stand.
_LINES = {"output": ("row", "row"), "grad_x": ("row", "column"), "grad_weight": ("column", "column")}


class Place(NamedTuple):
    """Where the products of a layer run. where: "hardware" or "emulated"; reason: why, in words."""

    layer: str
    where: str
    reason: str


# --- a product --------------------------------------------------------------------------------------------------------


def hardware_matmul(
    a: Quantized, b: Quantized, out_dtype: torch.dtype = torch.bfloat16, fast_accumulation: bool = False
) -> Tensor:
    """The product of two quantized matrices by torch's scaled product, on the device where they are.

    a: (M, K), of granularity "tensor" or "row"; b: (K, N), "tensor" or "column"; E4M3 or E5M2, not both E5M2.
    out_dtype: float32, bfloat16 or float16. fast_accumulation: sum up with the fewer bits of the tensor cores.
    Returns: out_dtype, (M, N). ValueError for other formats and granularities; on a GPU that has no such product, or
    refuses this one, torch's own error.
    """
    _require_multipliable(a, b)
    (m, k), n = a.codes.shape, b.codes.shape[1]
    if m * k * n == 0:  # nothing to sum up, and cuBLAS is not asked
        return torch.zeros(m, n, dtype=out_dtype, device=a.codes.device)
    left, right = _padded(a.codes, (1,)).contiguous(), _column_major(_padded(b.codes, (0, 1)))
    inverse_a, inverse_b = a.scale.reciprocal(), b.scale.reciprocal()
    by_row = a.granularity != "tensor" or b.granularity != "tensor"
    if by_row:
        inverse_a = inverse_a.reshape(-1, 1).expand(m, 1).contiguous()
        inverse_b = _padded(inverse_b.reshape(1, -1).expand(1, n), (1,)).contiguous()
    # The rowwise kernels of older versions write bfloat16 alone; torchao's products take that way as well.
    writes = torch.bfloat16 if by_row else out_dtype
    left, right = left.view(float8_dtype(a.fmt)), right.view(float8_dtype(b.fmt))
    product = _scaled_product(left, right, inverse_a, inverse_b, writes, fast_accumulation)
    return product[:, :n].to(out_dtype)


def _require_multipliable(a: Quantized, b: Quantized) -> None:
    reason = _why_not_formats(a.fmt, b.fmt, False)
    if not reason and (a.granularity not in ("tensor", "row") or b.granularity not in ("tensor", "column")):
        reason = (
            f"scales by {a.granularity} of a and by {b.granularity} of b cannot be taken out of the sum: "
            "a has one for each row and b one for each column, or one each"
        )
    if reason:
        raise ValueError(f"torch cannot multiply these: {reason}")


def _why_not_formats(a: Format, b: Format, by_row: bool) -> str:
    if not all(fmt in (E4M3, E5M2) for fmt in (a, b)):
        return f"{a.name} by {b.name}; the tensor cores have E4M3 and E5M2"
    if b == E5M2 and (by_row or a == E5M2):
        return "rowwise, the second operand has to be E4M3" if by_row else "both are E5M2, and one has to be E4M3"
    return ""


def float8_dtype(fmt: Format) -> torch.dtype:
    """torch's dtype for E4M3 or E5M2."""
    return torch.float8_e4m3fn if fmt == E4M3 else torch.float8_e5m2


def _padded(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Zeros at the end of `dims`, where they are needed: the code 0 is the number 0 in both formats."""
    if all(x.shape[dim] % MULTIPLE == 0 for dim in dims):
        return x
    return scaled_mm.pad_to_multiple(x, MULTIPLE, dims)


def _column_major(x: Tensor) -> Tensor:
    return x if x.stride() == (1, x.shape[0]) else scaled_mm.to_column_major(x)


_PUBLIC: list[bool] = []  # not empty inside `by_public_product`


def _scaled_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    """torch._scaled_mm: its compiler knows it in every version, and its public successor in newer ones alone."""
    if hasattr(torch, "_scaled_mm") and not _PUBLIC:
        return torch._scaled_mm(a, b, inverse_a, inverse_b, out_dtype=out_dtype, use_fast_accum=fast)
    from torch.nn.functional import ScalingType, scaled_mm

    # It is told what the scales mean, and does not find it out from their shapes.
    kind = ScalingType.TensorWise if inverse_a.numel() == inverse_b.numel() == 1 else ScalingType.RowWise
    return scaled_mm(a, b, inverse_a, kind, inverse_b, kind, output_dtype=out_dtype, use_fast_accum=fast)


@contextlib.contextmanager
def by_public_product() -> Iterator[None]:
    """Inside, products are those of torch.nn.functional.scaled_mm, which not every version has (ImportError then)."""
    _PUBLIC.append(True)
    try:
        yield
    finally:
        _PUBLIC.pop()


# --- a layer ----------------------------------------------------------------------------------------------------------


class HardwareLinear(nn.Linear):
    """Chapter 08's Float8Linear with its products on the tensor cores; `recipe` (a Recipe) names its six casts.

    It is made by changing the class of a Float8Linear (`to_hardware`): parameters, names and `recipe` stay. The output
    accumulates fast, the gradients do not. Where autocast is on for x's kind of device, its dtype is the output's.
    """

    recipe: Recipe

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features), float32, bfloat16 or float16. Returns: (..., out_features), x's dtype or autocast's.

        Both gradients have the dtype of the gradient that arrives, before autograd converts them.
        """
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):  # the operands have their casts already
            output = self._product(x, dtype)
        return output if self.bias is None else output + self.bias.to(dtype)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return _Products.apply(x, self.weight, self.recipe, dtype)


class HardwareDelayedLinear(HardwareLinear):
    """The same for a layer with delayed scales, which are carried from step to step.

    scalings: of the input, of the weight, and of the gradient of the output. Each has `quantize(x, record)`, which
    gives a Quantized with one scale; they record while the layer is in training mode. What gave the output gives the
    gradients too.
    """

    scalings: tuple

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return _DelayedProducts.apply(x, self.weight, self.scalings, self.training, dtype)


class _DelayedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scalings: tuple, record: bool, dtype: torch.dtype) -> Tensor:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # (M, K)
        x8, weight8 = scalings[0].quantize(rows, record), scalings[1].quantize(weight, record)
        ctx.scaling, ctx.record, ctx.shape, ctx.formats = scalings[2], record, x.shape, (x8.fmt, weight8.fmt)
        ctx.save_for_backward(x8.codes, x8.scale, weight8.codes, weight8.scale)
        output = hardware_matmul(x8, transpose(weight8), dtype, fast_accumulation=True)
        return output.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, weight_codes, weight_scale = ctx.saved_tensors
        dtype = gradient.dtype
        gradient8 = ctx.scaling.quantize(gradient.reshape(x_codes.shape[0], weight_codes.shape[0]), ctx.record)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight8 = Quantized(weight_codes, weight_scale, ctx.formats[1], "tensor", dtype)
            grad_x = hardware_matmul(gradient8, weight8, dtype).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            x8 = Quantized(x_codes, x_scale, ctx.formats[0], "tensor", dtype)
            grad_weight = hardware_matmul(transpose(gradient8), x8, dtype)
        return grad_x, grad_weight, None, None, None


class _Products(torch.autograd.Function):
    """The three products of a layer. Where a cast is the same both ways, its codes are kept and not the numbers:
    they are what a second cast would give, and take a quarter of the memory."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # (M, K)
        ctx.recipe, ctx.shape, ctx.dtypes = recipe, x.shape, (x.dtype, weight.dtype)
        kept_x, kept_weight = (rows,), (weight,)
        if recipe.x is None:
            output = torch.mm(rows, weight.t().to(x.dtype)).to(dtype)
        else:
            x8, weight8 = quantizer.quantize(rows, *recipe.x), quantizer.quantize(weight, *recipe.weight)
            output = hardware_matmul(x8, transpose(weight8), dtype, fast_accumulation=True)
            if recipe.x_for_grad_weight == recipe.x:
                kept_x = x8.codes, x8.scale
            if recipe.weight_for_grad_x == recipe.weight:
                kept_weight = weight8.codes, weight8.scale
        ctx.count = len(kept_x)
        ctx.save_for_backward(*kept_x, *kept_weight)
        return output.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        recipe, saved = ctx.recipe, ctx.saved_tensors
        x, weight = saved[: ctx.count], saved[ctx.count :]
        gradient = gradient.reshape(x[0].shape[0], gradient.shape[-1])  # (M, N)
        grad_x = grad_weight = once = None
        if ctx.needs_input_grad[0] and recipe.grad_output is None:
            grad_x = torch.mm(gradient, weight[0].to(gradient.dtype))
        elif ctx.needs_input_grad[0]:
            once = quantizer.quantize(gradient, *recipe.grad_output)
            other = _cast_of(weight, recipe.weight_for_grad_x, ctx.dtypes[1])
            grad_x = hardware_matmul(once, other, gradient.dtype)
        if ctx.needs_input_grad[1] and recipe.grad_output_for_grad_weight is None:
            grad_weight = torch.mm(gradient.t(), x[0].to(gradient.dtype))
        elif ctx.needs_input_grad[1]:
            if (
                once is None or recipe.grad_output_for_grad_weight != recipe.grad_output
            ):  # the same cast, the same codes
                once = quantizer.quantize(gradient, *recipe.grad_output_for_grad_weight)
            other = _cast_of(x, recipe.x_for_grad_weight, ctx.dtypes[0])
            grad_weight = hardware_matmul(transpose(once), other, gradient.dtype)
        return None if grad_x is None else grad_x.reshape(ctx.shape), grad_weight, None, None


def _cast_of(kept: tuple[Tensor, ...], cast: Cast, dtype: torch.dtype) -> Quantized:
    """The quantized operand: from (codes, scale) that were kept, or by a cast of (the numbers,)."""
    if len(kept) == 2:
        return Quantized(*kept, cast.fmt, cast.granularity, dtype)
    return quantizer.quantize(kept[0], *cast)


# --- where it can be had ----------------------------------------------------------------------------------------------


def where_products_run(
    recipe: Recipe, shape: tuple[int, int, int], capability: tuple[int, int] | None
) -> tuple[str, str]:
    """("hardware" or "emulated", why, in words) for a layer: hardware if all products that are cast can run there.

    shape: (M, K, N), the rows of x, in_features and out_features. capability: the GPU's, or None where there is none.
    """
    kinds = {}
    for product, pair in zip(PRODUCTS, recipe.pairs(), strict=True):
        if pair[0] is not None:
            kinds[product], reason = _kind_of(product, *pair)
            if reason:
                return EMULATED, f"{product}: {reason}"
    if not kinds:
        return EMULATED, f"recipe {recipe.name!r} casts nothing"
    if capability is None:
        return EMULATED, "there is no NVIDIA GPU"
    for product, kind in kinds.items():
        if scaled_mm.matmul_for(capability, kind, _up(product, shape)) != HARDWARE:
            return EMULATED, f"{product}: matmul_for says so for {kind} scales and capability {_dotted(capability)}"
    scales = " and ".join(dict.fromkeys(kinds.values()))
    return HARDWARE, f"tensor cores of capability {_dotted(capability)}, {scales}{_zeros_added(kinds, shape)}"


def _kind_of(product: str, left: Cast, right: Cast) -> tuple[str, str]:
    """(kind of scaling, "") of a product's two casts; ("", reason) where torch has no such product."""
    lines = _LINES[product]
    kind = "tensorwise" if left.granularity == right.granularity == "tensor" else "rowwise"
    for cast, line in zip((left, right), lines, strict=True):
        if cast.granularity not in ("tensor", line):
            return "", f"scales by {cast.granularity} cannot be taken out of the sum"
    reason = _why_not_formats(left.fmt, right.fmt, kind == "rowwise")
    return ("", reason) if reason else (kind, "")


def _sizes(product: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """(M, K, N) of a product as a matrix product, of which K is summed over."""
    m, k, n = shape
    return {"output": (m, k, n), "grad_x": (m, n, k), "grad_weight": (n, m, k)}[product]


def _up(product: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    rows, inner, columns = _sizes(product, shape)
    return rows, inner + -inner % MULTIPLE, columns + -columns % MULTIPLE


def _zeros_added(kinds: dict[str, str], shape: tuple[int, int, int]) -> str:
    padded = [product for product in kinds if _up(product, shape) != _sizes(product, shape)]
    return f"; zeros are added for {', '.join(padded)}, whose sizes are no multiples of {MULTIPLE}" if padded else ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def capability_of(device: torch.device | str) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None for everything else (AMD's float8 has other codes, in part)."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def to_hardware(
    model: nn.Module, device: torch.device | str, rows: int, capability: tuple[int, int] | None = None
) -> list[Place]:
    """Have every layer of `model` that is in 8 bits multiply in hardware, where it can on that device, in the model
    itself: layers with a `recipe` (Float8Linear), and with delayed `scalings`, whose products are tensorwise.

    rows: M, the tokens of a batch. capability: that of the device, which is asked for where it is None.
    Returns: a Place for each of them, in the order of `named_modules`; "emulated" ones are as they were. Call it before
    the model is compiled.
    """
    capability = capability_of(device) if capability is None else capability
    places = []
    for name, layer in model.named_modules():
        delayed = isinstance(getattr(layer, "scalings", None), tuple)
        recipe = RECIPES["tensorwise"] if delayed else getattr(layer, "recipe", None)
        if isinstance(layer, nn.Linear) and isinstance(recipe, Recipe):
            where, reason = where_products_run(recipe, (rows, *layer.weight.shape[::-1]), capability)
            if where == HARDWARE:
                layer.__class__ = HardwareDelayedLinear if delayed else HardwareLinear
                use_once(recipe)
            places.append(Place(name, where, reason))
    return places


def use_once(recipe: Recipe) -> None:
    """Call what a layer calls, once and small: answers are looked up at the first call, which no compiler follows."""
    numbers = torch.ones(2, 2)
    for pair in recipe.pairs():
        for cast in pair:
            if cast is not None:
                quantizer.quantize(numbers, *cast)
    scaled_mm.to_column_major(scaled_mm.pad_to_multiple(torch.zeros(2, 2, dtype=torch.uint8), MULTIPLE, (0, 1)))
