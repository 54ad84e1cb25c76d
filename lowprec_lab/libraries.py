"""The same inputs in the libraries that are installed, next to what is right under the course's policy.

Nothing here is required: a library that is not installed has a column that says so. What they do was measured, never
looked up, so the table shows the versions at hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lowprec_lab.formats import E2M1, E2M3, E3M2, Format
from lowprec_lab.graders import rounding_oracle

_GFLOAT_NAMES = {
    "float8_e4m3fn": "ocp_e4m3", "float8_e5m2": "ocp_e5m2", "float8_e8m0fnu": "ocp_e8m0", "float6_e2m3fn": "ocp_e2m3",
    "float6_e3m2fn": "ocp_e3m2", "float4_e2m1fn": "ocp_e2m1", "bfloat16": "bfloat16", "float16": "binary16",
}  # fmt: skip


class AbsentError(Exception):
    """A library, or its version of a format, is not there; the text says which."""


@dataclass(frozen=True)
class Column:
    """What one library makes of the inputs. values: None where there is nothing, and `absent` says why."""

    name: str
    values: list[float] | None
    absent: str = ""


@dataclass(frozen=True)
class Casts:
    """A table: the inputs, what is right under both policies, and each library. Text, and HTML in a notebook."""

    fmt: Format
    inputs: list[float]
    right: list[Column]
    libraries: list[Column]

    def rows(self) -> list[list[str]]:
        """The cells as text: a header, then a row for each input; absent libraries have no column."""
        columns = [*self.right, *self._present()]
        header = [f"input -> {self.fmt.name}", *(column.name for column in columns)]
        body = [[_text(x), *(_text(column.values[index]) for column in columns)] for index, x in enumerate(self.inputs)]
        return [header, *body]

    def differs(self, column: Column) -> list[bool]:
        """For each input, whether a library gives what neither policy allows."""
        allowed = [each.values for each in self.right]
        return [all(not _same(value, each[index]) for each in allowed) for index, value in enumerate(column.values)]

    def _present(self) -> list[Column]:
        return [column for column in self.libraries if column.values is not None]

    def notes(self) -> list[str]:
        """Sentences under the table: what the mark means, and what is absent."""
        marked = any(any(self.differs(column)) for column in self._present())
        meaning = "* neither policy allows this value." if marked else "Every value is right under one of the policies."
        return [meaning, *(f"{column.name}: {column.absent}" for column in self.libraries if column.values is None)]

    def __str__(self) -> str:
        rows = self._marked("*")
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self.notes()])

    __repr__ = __str__

    def _marked(self, mark: str) -> list[list[str]]:
        rows, first = self.rows(), 1 + len(self.right)
        for place, column in enumerate(self._present(), first):
            for row, wrong in zip(rows[1:], self.differs(column), strict=True):
                row[place] += mark if wrong else ""
        return rows

    def html(self) -> str:
        """The table as HTML with inline styles, which JupyterLab keeps."""
        rows = self._marked(" *")
        cell = "padding: 2px 10px; text-align: right; font-family: monospace"
        head = "".join(f'<th scope="col" style="{cell}">{html.escape(text)}</th>' for text in rows[0])
        lines = [f"<tr>{head}</tr>"]
        for row in rows[1:]:
            tds = "".join(f'<td style="{cell}{_emphasis(text)}">{html.escape(text)}</td>' for text in row[1:])
            lines.append(f'<tr><th scope="row" style="{cell}">{html.escape(row[0])}</th>{tds}</tr>')
        notes = "<br>".join(html.escape(note) for note in self.notes())
        return f'<table style="border-collapse: collapse">{"".join(lines)}</table><div>{notes}</div>'

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.html()}


def _emphasis(text: str) -> str:
    return "; font-weight: bold" if text.endswith("*") else ""


def casts(values: Sequence[float] | Tensor, fmt: Format) -> Casts:
    """Cast float32 values to `fmt` in torch, ml_dtypes, gfloat and qtorch, whichever is installed.

    values: numbers, or a float32 tensor; they are rounded to float32 first. fmt: of at most 16 bits.
    """
    x = torch.as_tensor(values, dtype=torch.float32).reshape(-1)
    policies = ["saturate"] if fmt.specials == "finite" else ["saturate", "to_special"]
    right = [
        Column(f"right ({policy})", rounding_oracle.round_to(x, fmt, "nearest_even", policy).tolist())
        for policy in policies
    ]
    libraries = [column for name, cast in LIBRARIES.items() for column in _columns(name, cast, x, fmt)]
    return Casts(fmt, x.tolist(), right, libraries)


def _columns(name: str, cast: Callable, x: Tensor, fmt: Format) -> list[Column]:
    try:
        with np.errstate(all="ignore"):
            results = cast(x, fmt)
    except AbsentError as absent:
        return [Column(name, None, str(absent))]
    except Exception as error:  # somebody else's code, in a version that we have not seen
        return [Column(name, None, f"raised {type(error).__name__}: {error}")]
    return [Column(_label(name) + what, values.tolist()) for what, values in results.items()]


def _label(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name).partition('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        return name


def _torch(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    if fmt.torch_dtype is None:
        raise AbsentError(f"has no dtype for {fmt.name}")
    return {"": x.to(fmt.torch_dtype).float()}


def _ml_dtypes(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    ml_dtypes = _require("ml_dtypes")
    dtype = np.float16 if fmt.name == "float16" else getattr(ml_dtypes, fmt.name, None)
    if dtype is None:
        raise AbsentError(f"has no dtype for {fmt.name}")
    return {"": torch.from_numpy(x.numpy().astype(dtype).astype(np.float32))}


def _gfloat(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    gfloat = _require("gfloat")
    if fmt.name not in _GFLOAT_NAMES:
        raise AbsentError(f"has no format {fmt.name}")
    from gfloat import formats

    info = getattr(formats, f"format_info_{_GFLOAT_NAMES[fmt.name]}")
    return {
        label: torch.from_numpy(gfloat.round_ndarray(info, x.numpy().astype(np.float64), sat=sat)).float()
        for label, sat in (("", False), (", sat", True))
        if sat or fmt.specials != "finite"  # gfloat too has nothing else to give there
    }


def _qtorch(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    _require("qtorch")
    from qtorch.quant import float_quantize  # compiles its C++ when it is first imported

    return {"": float_quantize(x, fmt.exponent_bits, fmt.mantissa_bits, rounding="nearest")}


def _require(name: str):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise AbsentError("is not installed") from error


LIBRARIES: dict[str, Callable] = {"torch": _torch, "ml_dtypes": _ml_dtypes, "gfloat": _gfloat, "qtorch": _qtorch}


def _same(a: float, b: float) -> bool:
    both_nan = np.isnan(a) and np.isnan(b)
    return bool(both_nan or a == b and np.signbit(a) == np.signbit(b))


def _text(value: float) -> str:
    """A float32 in the fewest digits that bring it back."""
    return str(np.float32(value)).removesuffix(".0") if np.isfinite(value) else str(value)


def torchao_cast(
    x: Tensor, fmt: Format, granularity: str = "tensor", power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(codes, scale) of torchao's cast for training, `hp_tensor_to_float8_dynamic`: uint8 and float32.

    x: two dimensions. fmt: one with a float8 dtype of torch. granularity: "tensor", "row" or "column".
    AbsentError where there is no torchao, or none that has this cast.
    """
    cast, config, granularities = _torchao_float8()
    dim = {"tensor": None, "row": -1, "column": 0}[granularity]
    how = granularities.TENSORWISE if dim is None else granularities.AXISWISE
    made = cast(
        x, fmt.torch_dtype, config, scaling_granularity=how, axiswise_dim=dim, round_scales_to_power_of_2=power_of_two
    )
    return made._data.view(torch.uint8), made._scale


def torchao_linear(linear: nn.Linear, recipe: str, emulate: bool = True) -> nn.Module:
    """torchao's Float8Linear with the parameters of `linear`, its products emulated or not; AbsentError as above."""
    _torchao_float8()  # loads it without its messages
    config = importlib.import_module("torchao.float8.config").Float8LinearConfig.from_recipe_name(recipe)
    kind = importlib.import_module("torchao.float8.float8_linear").Float8Linear
    return kind.from_float(linear, config=dataclasses.replace(config, emulate=emulate))


def torchao_training(model: nn.Module, recipe: str, skip: tuple[str, ...] = ("head",)) -> nn.Module:
    """`model` after torchao's `convert_to_float8_training`, its products emulated; AbsentError as above.

    skip: linear layers with one of these texts in their name stay.
    """
    _torchao_float8()
    config = importlib.import_module("torchao.float8.config").Float8LinearConfig.from_recipe_name(recipe)
    convert = importlib.import_module("torchao.float8.float8_linear_utils").convert_to_float8_training
    return convert(
        model,
        module_filter_fn=lambda layer, name: not any(text in name for text in skip),
        config=dataclasses.replace(config, emulate=True),
    )


def compressed_tensors_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale) of compressed-tensors' dynamic per-token quantization to float8_e4m3fn.

    x: (M, K). It looks for tokens in the second dimension of a batch, so x is handed over as a batch of one.
    AbsentError where there is no compressed-tensors.
    """
    args_of, scales_of, quantize = _compressed_tensors()
    args = args_of(num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True)
    scale, zero = scales_of(x[None], args, None)
    return quantize(x[None], scale, zero, args, dtype=torch.float8_e4m3fn)[0], scale[0]


def torchao_mx(x: Tensor, fmt: Format, mode: str = "floor") -> tuple[Tensor, Tensor]:
    """(codes, scale) of torchao's MXTensor.to_mx in blocks of 32, uint8 both; two codes in a byte for E2M1.

    x: float32 or bfloat16, contiguous. fmt: an element format of MX. mode: "floor", "ceil", "even" or "rceil".
    AbsentError where there is no torchao, or none that has MX.
    """
    found = _torchao_mx_tensor(x, fmt, mode)
    codes = found.qdata if found.qdata.dtype == torch.uint8 else found.qdata.view(torch.uint8)
    return codes, found.scale.view(torch.uint8)


def torchao_mx_round_trip(x: Tensor, fmt: Format, mode: str = "floor") -> Tensor:
    """What torchao's MX leaves of x, in x's dtype and shape; arguments and AbsentError as above."""
    return _torchao_mx_tensor(x, fmt, mode).dequantize(x.dtype)


def torchao_nvfp4(x: Tensor, tensor_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, tensor_scale) of torchao's NVFP4: uint8, two codes in a byte; float8_e4m3fn; float32.

    x: (M, K), float32 or bfloat16, contiguous. tensor_scale: torchao's own for the amax of x when None. AbsentError as
    above.
    """
    to_scale, quantize = _torchao_nvfp4()
    if tensor_scale is None:
        tensor_scale = to_scale(x.abs().max())
    scale, codes = quantize(x, 16, tensor_scale)
    return codes, scale, tensor_scale


def _torchao_mx_tensor(x: Tensor, fmt: Format, mode: str) -> object:
    tensor, modes, names = _torchao_mx()
    element = fmt.torch_dtype if fmt.width == 8 else names[fmt.name]
    return tensor.to_mx(x, element, 32, modes[mode.upper()])


@functools.lru_cache(maxsize=1)
def _torchao_mx() -> tuple:
    with _quiet_import("is not installed, or has no MX formats"):
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
    names = {E2M3.name: DTYPE_FP6_E2M3, E3M2.name: DTYPE_FP6_E3M2, E2M1.name: torch.float4_e2m1fn_x2}
    return MXTensor, ScaleCalculationMode, names


@functools.lru_cache(maxsize=1)
def _torchao_nvfp4() -> tuple:
    with _quiet_import("is not installed, or has no NVFP4"):
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    return per_tensor_amax_to_scale, nvfp4_quantize


def gguf_bytes(x: Tensor, layout: str) -> Tensor:
    """What gguf-py's numpy makes of float32 rows: uint8. layout: "q8_0", "q4_0", ... AbsentError without gguf."""
    quantize, _, kinds = _gguf()
    with np.errstate(all="ignore"):
        return torch.from_numpy(quantize(x.numpy(), kinds[layout.upper()]))


def gguf_numbers(blocks: Tensor, layout: str) -> Tensor:
    """What gguf-py's numpy makes of bytes: float32. layout: as above, and "q4_k", "q6_k". AbsentError without gguf."""
    _, dequantize, kinds = _gguf()
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(blocks.numpy(), kinds[layout.upper()]))


@functools.lru_cache(maxsize=1)
def _gguf() -> tuple:
    with _quiet_import("is not installed"):
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize, quantize
    return quantize, dequantize, GGMLQuantizationType


@functools.lru_cache(maxsize=1)
def _compressed_tensors() -> tuple:
    with _quiet_import("is not installed, or is of another version"):
        from compressed_tensors.quantization import QuantizationArgs
        from compressed_tensors.quantization.lifecycle.forward import quantize
        from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
    return QuantizationArgs, compute_dynamic_scales_and_zp, quantize


@functools.lru_cache(maxsize=1)
def _torchao_float8() -> tuple:
    with _quiet_import("is not installed, or has no float8 training"):
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig
    return hp_tensor_to_float8_dynamic, LinearMMConfig(), ScalingGranularity


@contextlib.contextmanager
def _quiet_import(absent: str) -> Iterator[None]:
    """Imports inside say nothing; AbsentError with the text `absent` where one fails.

    torchao tells of each of its extensions that this machine cannot load.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImportError as error:
        raise AbsentError(absent) from error
    finally:
        logging.disable(before)
