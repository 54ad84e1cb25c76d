"""What goes between the judge and a worker: a JSON header and raw tensor bytes, length first. No pickle either way.

A frame is two little-endian lengths (u32 for the header, u64 for the raw part), the header, the raw part. The header
says what the data is; a tensor in it is a dtype, a shape and a place in the raw part. Whoever reads trusts nothing:
lengths are bounded before anything is allocated, and types, dtypes and shapes are checked one by one.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import Format

HEADER_LIMIT = 4 * 2**20
RAW_LIMIT = 64 * 2**20
_LENGTHS = struct.Struct("<IQ")
_MOST_DIMENSIONS, _DEEPEST, _MOST_ITEMS, _LONGEST_NAME = 16, 8, 10_000, 200
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.uint8, torch.uint16, torch.uint32,
        torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FORMAT_FIELDS = {
    "name": str, "exponent_bits": int, "mantissa_bits": int, "bias": int, "specials": str, "signed": bool,
    "subnormals": bool,
}  # fmt: skip


class WireError(Exception):
    """The other side sent something that is no message, or stopped sending, or took too long (`late`)."""

    def __init__(self, sentence: str, *, late: bool = False) -> None:
        super().__init__(sentence)
        self.late = late


class Foreign:
    """The base of what stands for a value that is no data: its class has the name that the value's class has there."""


# --- data to JSON and bytes -------------------------------------------------------------------------------------------


def pack(value: object) -> tuple[bytes, bytes]:
    """The header and the raw part of a message. Raises TypeError for anything that is not data."""
    raw: list[bytes] = []
    header = json.dumps(_to_json(value, raw, [0], 0), allow_nan=False).encode()
    return header, b"".join(raw)


def _to_json(value: object, raw: list[bytes], size: list[int], depth: int) -> object:
    if depth > _DEEPEST:
        raise TypeError(f"data nested more than {_DEEPEST} deep")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return {"int": str(value)} if value.bit_length() < 4096 else _refuse("a whole number of thousands of bits")
    if kind is float:
        return {"float": value.hex() if math.isfinite(value) else repr(value)}
    if kind in (tuple, list):
        if len(value) > _MOST_ITEMS:
            raise TypeError(f"a {kind.__name__} of more than {_MOST_ITEMS} items")
        return {kind.__name__: [_to_json(item, raw, size, depth + 1) for item in value]}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _to_json(item, raw, size, depth + 1) for key, item in value.items()}}
    if kind is Format:
        return {"format": {name: getattr(value, name) for name in _FORMAT_FIELDS} | {"dtype": _dtype_name(value)}}
    if kind is torch.dtype:
        return {"dtype": _NAMES[value]} if value in _NAMES else _refuse(f"the dtype {value}")
    if kind is Tensor:
        return {"tensor": _tensor_to_json(value, raw, size)}
    if isinstance(value, (Tensor, int, float, str, Format, np.generic, np.ndarray)):
        return {"foreign": str(kind.__name__)[:_LONGEST_NAME]}
    return _refuse(f"{kind.__name__}")


def _dtype_name(fmt: Format) -> str | None:
    return _NAMES.get(fmt.torch_dtype)


def _refuse(what: str):
    raise TypeError(f"{what} is not data that can be handed over")


def _tensor_to_json(value: Tensor, raw: list[bytes], size: list[int]) -> dict:
    if value.layout is not torch.strided:
        _refuse(f"a tensor of layout {str(value.layout).removeprefix('torch.')}")
    if value.device.type != "cpu":
        _refuse(f"a tensor on {value.device}")
    if value.dtype not in _NAMES:
        _refuse(f"a tensor of {str(value.dtype).removeprefix('torch.')}")
    value = value.detach().resolve_conj().resolve_neg()
    if size[0] + value.numel() * value.element_size() > RAW_LIMIT:  # said before it is copied
        raise TypeError(f"more data than the {RAW_LIMIT // 2**20} MB of one message")
    # A transposed tensor stays transposed on the other side: strides may be what a check is about.
    order = sorted(range(value.dim()), key=lambda axis: -value.stride(axis))
    flat = value.permute(order).contiguous().reshape(-1)
    if flat.numel() == 1:  # is contiguous with any stride, and cannot be read as bytes with some, such as expand's 0
        flat = flat.clone(memory_format=torch.contiguous_format)
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    entry = {
        "dtype": _NAMES[value.dtype],
        "shape": list(value.shape),
        "order": order,
        "at": size[0],
        "size": len(content),
    }
    size[0] += len(content)
    raw.append(content)
    return entry


# --- and back ---------------------------------------------------------------------------------------------------------


class _Raw:
    """The raw part, taken tensor by tensor in order: no byte twice, so a message holds no more than was sent."""

    def __init__(self, content: bytes) -> None:
        self.content, self.taken = memoryview(content), 0

    def take(self, start: int, size: int) -> bytearray:
        if type(start) is not int or type(size) is not int or start != self.taken or size > len(self.content) - start:
            raise WireError("a tensor whose bytes were not sent")
        self.taken += size
        return bytearray(self.content[start : start + size])


def unpack(header: bytes, raw: bytes) -> object:
    """The data of a message. Raises WireError for a header that does not describe data."""
    try:
        return _from_json(json.loads(header), _Raw(raw), 0)
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, RuntimeError) as error:
        raise WireError(f"a message that cannot be read ({type(error).__name__})") from None


def _from_json(value: object, raw: _Raw, depth: int) -> object:
    if depth > _DEEPEST + 1:
        raise WireError("a message nested too deeply")
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is not dict or len(value) != 1:
        raise WireError("a message that is no data")
    ((kind, content),) = value.items()
    if kind == "int":
        return int(content, 10) if type(content) is str and len(content) < 1300 else _bad()
    if kind == "float":
        return float(content) if content in ("inf", "-inf", "nan") else float.fromhex(content)
    if kind in ("tuple", "list"):
        if type(content) is not list or len(content) > _MOST_ITEMS:
            raise WireError("a sequence that is too long")
        items = [_from_json(item, raw, depth + 1) for item in content]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {str(key): _from_json(item, raw, depth + 1) for key, item in content.items()}
    if kind == "format":
        return _format_from_json(content)
    if kind == "foreign":
        return _foreign(content)
    if kind == "dtype":
        return _DTYPES[content]
    if kind == "tensor":
        return _tensor_from_json(content, raw)
    return _bad()


def _bad():
    raise WireError("a message that is no data")


def _format_from_json(content: dict) -> Format:
    given = dict(content)
    dtype = given.pop("dtype")
    if given.keys() != _FORMAT_FIELDS.keys():
        _bad()
    for name, kind in _FORMAT_FIELDS.items():
        value = given[name]
        if type(value) is not kind or (kind is int and abs(value) > 10_000) or (kind is str and len(value) > 1000):
            _bad()
    return Format(**given, torch_dtype=None if dtype is None else _DTYPES[dtype])


def _foreign(name: str) -> Foreign:
    if type(name) is not str or len(name) > _LONGEST_NAME or not name.isidentifier():
        _bad()
    return type(name, (Foreign,), {})()


def _tensor_from_json(entry: dict, raw: _Raw) -> Tensor:
    dtype, shape, order = _DTYPES[entry["dtype"]], entry["shape"], entry["order"]
    for numbers in (shape, order):
        if type(numbers) is not list or len(numbers) > _MOST_DIMENSIONS or any(type(n) is not int for n in numbers):
            raise WireError("a tensor of an impossible shape")
    too_large = math.prod(max(n, 1) for n in shape) >= 2**48  # of no elements, too: torch multiplies such numbers
    if any(n < 0 for n in shape) or too_large or sorted(order) != list(range(len(shape))):
        raise WireError("a tensor of an impossible shape")
    if entry["size"] != math.prod(shape) * dtype.itemsize:
        raise WireError("a tensor whose bytes do not fit its shape")
    content = raw.take(entry["at"], entry["size"])
    stored = [shape[axis] for axis in order]
    flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    if dtype is torch.bool:
        flat = flat.ne(0)  # a byte of another value is no bool, and torch computes nonsense with it
    return flat.view(dtype).reshape(stored).permute([order.index(axis) for axis in range(len(shape))])


# --- over a socket ----------------------------------------------------------------------------------------------------


def send(channel: socket.socket, value: object, deadline: float | None = None) -> None:
    """Send one message. Raises TypeError for what is not data, WireError when the other side is gone or late."""
    header, raw = pack(value)
    if len(header) > HEADER_LIMIT or len(raw) > RAW_LIMIT:
        raise TypeError("more data than one message may hold")
    try:
        for part in (_LENGTHS.pack(len(header), len(raw)) + header, raw):
            _wait_no_longer_than(channel, deadline)
            channel.sendall(part)
    except TimeoutError:
        raise WireError("the other side does not listen", late=True) from None
    except OSError:
        raise WireError("the other side is gone") from None


def receive(channel: socket.socket, deadline: float | None = None) -> object:
    """Receive one message. Raises WireError for a bad or oversized one, or when nothing comes before `deadline`."""
    header_size, raw_size = _LENGTHS.unpack(_read(channel, _LENGTHS.size, deadline))
    if header_size > HEADER_LIMIT or raw_size > RAW_LIMIT:
        raise WireError("a message that is too large")
    header = _read(channel, header_size, deadline)
    return unpack(header, _read(channel, raw_size, deadline))


def _read(channel: socket.socket, size: int, deadline: float | None) -> bytearray:
    content = bytearray()
    while len(content) < size:
        try:
            _wait_no_longer_than(channel, deadline)
            part = channel.recv(min(size - len(content), 2**20))
        except TimeoutError:
            raise WireError("no reply in time", late=True) from None
        except OSError:
            raise WireError("the other side is gone") from None
        if not part:
            raise WireError("the other side is gone")
        content += part  # it grows with what is sent, whatever length was announced
    return content


def _wait_no_longer_than(channel: socket.socket, deadline: float | None) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError
    channel.settimeout(left)
