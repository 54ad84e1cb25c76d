"""The counter-example in a verdict: an input, what came out, what is right, as values and bits, and how to try it."""

from __future__ import annotations

import inspect
import math
import re

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.blanks import Blank
from lowprec_lab.calls import BIT_VIEWS
from lowprec_lab.formats import FORMATS, Format
from lowprec_lab.graders.case import Call, Record, tokens_of
from lowprec_lab.graders.verdict import Row

_OWN_FORMAT = {fmt.torch_dtype: fmt for fmt in FORMATS.values() if fmt.torch_dtype is not None}


def input_rows(blank: Blank, record: Record, index: int) -> list[Row]:
    """What element `index` of a comparison was computed from: the format, and each argument's element with its bits."""
    rows = []
    fmt = next((arg for arg in record.call.args if isinstance(arg, Format)), None)
    names = _argument_names(blank, record.call)
    tensors = sum(isinstance(arg, Tensor) for arg in record.call.args)
    for name, arg in zip(names, record.call.args, strict=False):
        if isinstance(arg, Format):
            rows.append(Row("format", _format_text(arg)))
        elif isinstance(arg, Tensor) and isinstance(record.want[0], Tensor) and arg.shape == record.want[0].shape:
            label = "input" if tensors == 1 else name
            rows.append(_element_row(label, arg.reshape(-1)[index], fmt if name == "codes" else None))
        elif row_of(arg, record.want[0], index) is not None:
            row = row_of(arg, record.want[0], index)
            rows.append(Row("input" if tensors == 1 else name, _short(row.tolist())))
        elif line_of(arg, record.want[0], index) is not None:
            row = line_of(arg, record.want[0], index)
            rows.append(Row("input" if tensors == 1 else name, _short(row.tolist())))
            rows.append(Row("place", f"element {index % record.want[0].shape[-1]} of the result for this row"))
        else:
            rows.append(Row(name, _short(arg)))
    if record.about is not None:
        rows.append(Row("part", record.about(index)))
    return rows


def _argument_names(blank: Blank, call: Call) -> list[str]:
    """A name for each argument: of the answer's contract, or of the scenario that drove it.

    `*dtypes` names all further ones; `*settings` are what an object is made with.
    """
    if call.scenario is None:
        return list(blank.signature.parameters)
    parameters = list(inspect.signature(call.scenario).parameters.values())[1:]
    names = [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]
    more = [each.name for each in parameters if each.kind is each.VAR_POSITIONAL]
    if more == ["settings"]:  # the constructor's, in its order
        return names + [name for name in blank.signature.parameters if name != "parameters"]
    return names + more * len(call.args)


def result_rows(record: Record, index: int) -> list[Row]:
    """What came out for element `index`, "yours", and what is "right" (or "at most" right)."""
    rows, which = [], _first_that_differs(record, index)
    if record.show is None and len(record.parts) > 1:
        rows.append(Row("part", record.parts[which]))
    for label, results in (("yours", record.got), (record.right, record.want)):
        elements = [r.detach().reshape(-1)[index] if isinstance(r, Tensor) else r for r in results]
        if isinstance(record.show, Format):
            rows.append(_element_row(label, elements[0], record.show))
        elif callable(record.show):
            rows.append(Row(label, record.show(*elements)))
        else:
            rows.append(_element_row(label, elements[which], None))
    return rows


def _first_that_differs(record: Record, index: int) -> int:
    """Which of several results is wrong at an element: the first one, where there is but one."""
    for which, (got, want) in enumerate(zip(record.got, record.want, strict=False)):
        if not np.array_equal(tokens_of(got)[index], tokens_of(want)[index]):
            return which
    return 0


def row_of(arg: object, want: object, index: int | None) -> Tensor | None:
    """The elements along the last dimension that result `index` of a reduction came from; None if it is none."""
    if index is None or not (isinstance(arg, Tensor) and isinstance(want, Tensor)):
        return None
    if arg.dim() == 0 or arg.shape[:-1] != want.shape or index >= want.numel():
        return None
    return arg.reshape(want.numel(), arg.shape[-1])[index]


def line_of(arg: object, want: object, index: int | None) -> Tensor | None:
    """The row that element `index` of a result came from, where each row becomes one of another length; else None."""
    if index is None or not (isinstance(arg, Tensor) and isinstance(want, Tensor)):
        return None
    if arg.dim() == 0 or want.dim() == 0 or arg.shape[:-1] != want.shape[:-1] or arg.shape[-1] == want.shape[-1]:
        return None
    if index >= want.numel():
        return None
    return arg.reshape(want.numel() // want.shape[-1], arg.shape[-1])[index // want.shape[-1]]  # which may be empty


def _element_row(label: str, element: object, code_format: Format | None) -> Row:
    """A value with its bits: a code under the format it belongs to, a float under its own."""
    if not isinstance(element, Tensor):
        return Row(label, "None" if element is None else repr(element))
    if code_format is not None:
        code = int(element) % 2**code_format.width
        outside = int(element) not in (code, code - 2**code_format.width)
        value = f"{int(element)} (not a code)" if outside else f"{code:#0{2 + (code_format.width + 3) // 4}x}"
        return Row(label, value, [] if outside else bit_fields(code, code_format))
    if element.dtype in _OWN_FORMAT:
        fmt = _OWN_FORMAT[element.dtype]
        bits = int(element.reshape(1).view(BIT_VIEWS[fmt.width // 8]).to(torch.int64)) % 2**fmt.width
        return Row(label, repr(float(element)), bit_fields(bits, fmt))
    return Row(label, repr(element.item()))


def bit_fields(code: int, fmt: Format) -> list[tuple[str, str]]:
    """The digits of a code by field: [("s", "0"), ("e", "0111"), ("m", "000")]; fields of no bits are left out."""
    digits = f"{code:0{fmt.width}b}"
    widths = [("s", int(fmt.signed)), ("e", fmt.exponent_bits), ("m", fmt.mantissa_bits)]
    fields, start = [], 0
    for name, width in widths:
        if width:
            fields.append((name, digits[start : start + width]))
        start += width
    return fields


def _format_text(fmt: Format) -> str:
    extras = "".join(
        f", {text}" for text, there in (("no sign", not fmt.signed), ("no subnormals", not fmt.subnormals)) if there
    )
    return (
        f"{fmt.name}: {fmt.exponent_bits} exponent bits, {fmt.mantissa_bits} mantissa bits, bias {fmt.bias}, "
        f"{fmt.specials}{extras}"
    )


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def call_text(blank: Blank, call: Call) -> str:
    """The call as the learner can type it. A scenario takes the answer as its first argument."""
    parts = [blank.name] if call.scenario else []
    parts += [_value_text(arg) for arg in call.args]
    parts += [f"{key}={value!r}" for key, value in call.kwargs.items()]
    return f"{call.scenario.__name__ if call.scenario else blank.name}({', '.join(parts)})"


def _value_text(value: object) -> str:
    if isinstance(value, Tensor):
        return tensor_text(value)
    if type(value) is list:
        return f"[{', '.join(_value_text(each) for each in value)}]"
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def tensor_text(value: Tensor) -> str:
    """Python that makes this small tensor again, to the last bit."""
    if value.dim() == 2 and not value.is_contiguous() and value.t().is_contiguous():
        return f"{tensor_text(value.t())}.t()"
    dtype = "" if value.dtype in (torch.int64, torch.float32) and value.numel() else f", dtype={value.dtype}"
    if not value.numel():
        return f"torch.empty({tuple(value.shape)}{dtype})"
    if value.dtype.is_floating_point and (value.isnan().any() or value.element_size() < 4):
        view = BIT_VIEWS[value.element_size()]
        return f"torch.tensor({value.contiguous().view(view).tolist()}, dtype={view}).view({value.dtype})"
    numbers = re.sub(r"\binf\b", "float('inf')", repr(value.tolist()))
    return f"torch.tensor({numbers}{dtype})"
