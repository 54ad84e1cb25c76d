"""Part "products": the hardware path next to the emulated one: codes, scales, and how far products are from exact."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowprec_lab import float8_linear, fused, hardware, quantizer
from lowprec_lab.blanks import current
from lowprec_lab.float8_linear import PRODUCTS, RECIPES, Cast, Recipe, transpose
from lowprec_lab.formats import E4M3, E5M2
from lowprec_lab.gpu_check.device import Device
from lowprec_lab.gpu_check.timing import SkippedError, reported
from lowprec_lab.quantizer import Quantized

SHAPES = ((4096, 4096, 4096), (8192, 4096, 12288), (512, 65536, 512), (300, 1000, 65))  # M, K, N
TINY_SHAPES = ((32, 64, 48), (30, 40, 65))
_CASTS = {
    "E4M3 tensor": Cast(E4M3),
    "E5M2 tensor": Cast(E5M2),
    "E4M3 row": Cast(E4M3, "row"),
    "E4M3 row, power of two": Cast(E4M3, "row", True),
    "E4M3 column, power of two": Cast(E4M3, "column", True),
}
_KINDS = {"tensorwise": Cast(E4M3), "rowwise": Cast(E4M3, "row", True)}
WAYS = ("cpu", "eager", "compiled")  # to cast: here, on the device, and there compiled
_REPEATS = 10


def check(device: Device, found: dict, save: Callable[[], None], tiny: bool = False) -> None:
    """Fill in `codes`, `products` and `layers`; each is described where it is made."""
    size = (24, 32) if tiny else (1024, 1024)
    found["codes"] = {}
    for name, cast in _CASTS.items():
        counts = found["codes"][name] = {}
        with reported(counts):
            differing_codes(device, cast, size, counts)
        save()
    found["products"] = []
    for shape in TINY_SHAPES if tiny else SHAPES:
        for kind in _KINDS:
            report = {"shape": list(shape), "kind": kind}
            found["products"].append(report)
            with reported(report):
                one_product(device, shape, kind, report)
            device.free()
            save()
    found["layers"] = {}
    for name, recipe in RECIPES.items():
        report = found["layers"][name] = {}
        with reported(report):
            one_layer(device, recipe, report, tiny)
        save()


# --- codes and scales -------------------------------------------------------------------------------------------------


def inputs(rows: int, columns: int) -> dict[str, Tensor]:
    """Numbers to cast, (rows, columns), on the CPU: ordinary ones, heavy tails, and every kind of special row."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(rows, columns, generator=generator)
    heavy = normal * torch.exp(3 * torch.randn(rows, columns, generator=generator))
    edges = normal.clone()
    special = (0.0, -0.0, 1e-40, 1e-20, 3e38, 2.0**-126)
    for row, value in enumerate(special):
        edges[row] = value * (edges[row].sign() if value else 1)
    edges[len(special), 0], edges[len(special) + 1, 0] = float("inf"), float("nan")
    return {"normal": normal, "heavy tails": heavy, "bfloat16": heavy.bfloat16(), "edges": edges}


def differing_codes(device: Device, cast: Cast, size: tuple[int, int], counts: dict) -> None:
    """Count the codes and scales that are not what they have to be: cast on the CPU, on the device, and there compiled.

    Scales have to be those of the CPU; codes what the lab's own arithmetic rounds to with them, which leans on no cast
    of torch: some versions give NaN where others saturate, on all devices alike. All codes that mean NaN count as one.
    """
    counts.update(codes=0, scales=0, **{f"{way}_{what}": 0 for way in WAYS for what in ("codes", "scales")})
    torch._dynamo.reset()  # it gives up on a function that it has compiled too often
    compiled = torch.compile(lambda x: _cast(x, cast), backend=device.compiler, dynamic=False, fullgraph=True)
    for name, x in inputs(*size).items():
        ways = {"cpu": _cast(x, cast), "eager": _cast(x.to(device.where), cast)}
        if name != "bfloat16":  # another dtype is another compilation
            ways["compiled"] = compiled(x.to(device.where))
        scales = ways["cpu"][1]
        codes = fused.encode_(x.float() * quantizer.spread(scales, cast.granularity, x.shape), cast.fmt)
        counts["codes"] += codes.numel()
        counts["scales"] += scales.numel()
        for way, (its_codes, its_scales) in ways.items():
            same = quantizer.one_nan(its_codes.cpu(), cast.fmt) == quantizer.one_nan(codes, cast.fmt)
            counts[f"{way}_codes"] += int((~same).sum())
            counts[f"{way}_scales"] += int((~_same(its_scales.cpu(), scales)).sum())


def _cast(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    q = quantizer.quantize(x, *cast)
    return q.codes, q.scale


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())


# --- products ---------------------------------------------------------------------------------------------------------


def one_product(device: Device, shape: tuple[int, int, int], kind: str, report: dict) -> None:
    """One product, with fast accumulation ("fast") and without ("slow"), next to the emulation and to BF16.

    Errors: `relative`, ||y - exact|| / ||exact||; `worst`, the largest |y - exact| / (|a| @ |b|); exact is float64's
    product of the very codes, so that the casts' own error is not in it. Output is float32 (rowwise: through BF16).
    milliseconds: the median of 10. public: whether torch.nn.functional.scaled_mm gives the same bits.
    """
    m, k, n = shape
    generator = torch.Generator().manual_seed(m + k + n)
    x, weight = (torch.randn(size, generator=generator).to(device.where) for size in ((m, k), (n, k)))
    a, b = (quantizer.quantize(each, *_KINDS[kind]) for each in (x, weight))
    b = transpose(b)
    exact, terms = exact_product(a, b)
    report["emulated"] = _errors(float8_linear.float8_matmul(a, b), exact, terms)
    for name, fast in (("fast", True), ("slow", False)):
        report[name] = _errors(hardware.hardware_matmul(a, b, torch.float32, fast), exact, terms)
        report[name]["milliseconds"] = _milliseconds(
            device, lambda fast=fast: hardware.hardware_matmul(a, b, torch.bfloat16, fast)
        )
    del exact, terms
    x, weight = x.bfloat16(), weight.bfloat16()
    report["bf16_milliseconds"] = _milliseconds(device, lambda: x @ weight.t())
    report["public"] = _public(a, b)


def exact_product(a: Quantized, b: Quantized) -> tuple[Tensor, Tensor]:
    """(the product of the codes' values, the product of their magnitudes), float64, (M, N)."""
    values = []
    for q in (a, b):
        wide = q.codes.view(hardware.float8_dtype(q.fmt)).double()
        values.append(wide / quantizer.spread(q.scale, q.granularity, q.codes.shape).double())
    return values[0] @ values[1], values[0].abs() @ values[1].abs()


def _errors(y: Tensor, exact: Tensor, terms: Tensor) -> dict[str, float]:
    apart = y.double() - exact
    return {"relative": float(apart.norm() / exact.norm()), "worst": float((apart.abs() / terms).max())}


def _milliseconds(device: Device, run: Callable[[], Tensor]) -> float:
    run()
    device.synchronize()
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e3


def _public(a: Quantized, b: Quantized) -> str:
    """Whether torch's public product is the same as the one in use, in words."""
    mine = hardware.hardware_matmul(a, b, torch.bfloat16)
    try:
        with hardware.by_public_product():
            theirs = hardware.hardware_matmul(a, b, torch.bfloat16)
    except Exception as error:  # whatever another version of torch says
        return fused.first_line(error)
    return "the same bits" if torch.equal(mine, theirs) else "other bits"


# --- layers -----------------------------------------------------------------------------------------------------------


def one_layer(device: Device, recipe: Recipe, report: dict, tiny: bool = False) -> None:
    """Output and gradients of a layer in hardware, eager and compiled, next to the emulated one: ||y - e|| / ||e||.

    Both run on the device, in float32. Raises SkippedError, and why, where the layer is emulated.
    """
    rows, inner, columns = (32, 48, 64) if tiny else (2048, 1024, 3072)
    torch.manual_seed(3)
    linear = nn.Linear(inner, columns, bias=False, device=device.where)
    x, gradient = torch.randn(rows, inner), torch.randn(rows, columns) / rows
    kind = current("Float8Linear")
    emulated, fast = kind.from_linear(linear, recipe), nn.Sequential(kind.from_linear(linear, recipe))
    (place,) = hardware.to_hardware(fast, device.where, rows, device.capability)
    if place.where != hardware.HARDWARE:
        raise SkippedError(place.reason)
    wanted = _both_ways(emulated, x.to(device.where), gradient.to(device.where))
    torch._dynamo.reset()
    compiled = torch.compile(fast, backend=device.compiler, dynamic=False, fullgraph=True)
    for way, layer in (("eager", fast), ("compiled", compiled)):
        got = _both_ways(layer, x.to(device.where), gradient.to(device.where))
        pairs = zip(PRODUCTS, got, wanted, strict=True)
        report[way] = {product: float((one - other).norm() / other.norm()) for product, one, other in pairs}


def _both_ways(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x.requires_grad_()
    output = layer(x)
    weight = next(layer.parameters())
    return output.detach(), *torch.autograd.grad(output, (x, weight), gradient)
