"""The exact oracle for blocks of 256 and for GGUF files: fields by the places of their bits, files by plain bytes.

A block is spread into single bits, and a field is a list of places of bits, lowest first: no shift and no mask. A
misconception has other places. Sums of Q4_K are exact in float64 (d * scale * code has 21 bits, dmin * min has 17, and
float16 spans 2^-24 to 2^16) and are rounded to float32 once; products of Q6_K fit into float32 as they are.

The quantizer here fits each group in another way than the reference: it begins from several shrunk ranges, and takes
turns between the nearest codes and the least squares of scale and min, until nothing changes.

No part of gguf, no blank and no cast of torch is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.graders import gguf_blocks_oracle as small

Q4_K, Q6_K = 144, 210
_NUMBERS = np.arange(256)
_GROUP, _INSIDE = _NUMBERS // 32, _NUMBERS % 32


# --- fields of bits ---------------------------------------------------------------------------------------------------


def run_of(first: np.ndarray, count: int) -> np.ndarray:
    """The places of `count` bits in a row for each first place."""
    return np.asarray(first)[..., None] + np.arange(count)


def pieces(*runs: np.ndarray) -> np.ndarray:
    """Fields whose bits are those of several runs, the lowest first."""
    return np.concatenate(runs, axis=-1)


def spread(blocks: np.ndarray) -> np.ndarray:
    """(blocks, bits): bit 8 * j + i is bit i of byte j, and bit -1 is always 0."""
    bits = np.unpackbits(blocks, axis=1, bitorder="little").astype(np.int64)
    return np.concatenate([bits, np.zeros((len(bits), 1), np.int64)], axis=1)


def taken(bits: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The fields at these places: whole numbers, (blocks, fields)."""
    return (bits[:, places] << np.arange(places.shape[-1])).sum(axis=-1)


def put(bits: np.ndarray, places: np.ndarray, values: np.ndarray) -> None:
    """Write whole numbers into the fields at these places."""
    bits[:, places] = values[..., None] >> np.arange(places.shape[-1]) & 1


_LOW, _HIGH = np.arange(4), np.arange(4, 8)  # the groups whose scale has a byte, and the others
_FIRST_OF_SCALES = 8 * 4
SCALES = np.concatenate([
    run_of(_FIRST_OF_SCALES + 8 * _LOW, 6),
    pieces(run_of(_FIRST_OF_SCALES + 8 * (_HIGH + 4), 4), run_of(_FIRST_OF_SCALES + 8 * (_HIGH - 4) + 6, 2)),
])  # fmt: skip
MINS = np.concatenate([
    run_of(_FIRST_OF_SCALES + 8 * (_LOW + 4), 6),
    pieces(run_of(_FIRST_OF_SCALES + 8 * (_HIGH + 4) + 4, 4), run_of(_FIRST_OF_SCALES + 8 * _HIGH + 6, 2)),
])  # fmt: skip
CODES = run_of(8 * (16 + 32 * (_GROUP // 2) + _INSIDE) + 4 * (_GROUP % 2), 4)


# --- Q4_K -------------------------------------------------------------------------------------------------------------


def dequantize_q4_k(
    blocks: Tensor, scales: np.ndarray = SCALES, mins: np.ndarray = MINS, codes: np.ndarray = CODES,
    halves: tuple[int, int] = (0, 1), sign: float = -1.0, zero: int = 0, one_d: bool = False,
    fields: Callable = taken,
) -> Tensor:  # fmt: skip
    """scales, mins, codes: places of the fields. halves: which float16 is d, and which dmin. zero: the code of 0.

    fields: scales and mins of bits, as `taken`.
    """
    rows = blocks.numpy().reshape(-1, Q4_K)
    bits = spread(rows)
    d, dmin = (wide_half(bits, which) for which in halves)
    with np.errstate(all="ignore"):
        step = d * fields(bits, scales)  # (blocks, 8)
        offset = (d if one_d else dmin) * fields(bits, mins)
        values = step[:, _GROUP] * (taken(bits, codes) - zero) + sign * offset[:, _GROUP]
    return float_rows(values, blocks, Q4_K)


def wide_half(bits: np.ndarray, which: int) -> np.ndarray:
    """The float16 number `which` of a block, counted from its beginning, in float64."""
    return small.half_values(taken(bits, run_of(16 * np.array([which]), 16))).astype(np.float64)


def float_rows(values: np.ndarray, blocks: Tensor, size: int) -> Tensor:
    """float32 in the leading dimensions of the blocks' bytes."""
    with np.errstate(all="ignore"):
        single = values.astype(np.float32)
    return torch.from_numpy(single.reshape(*blocks.shape[:-1], blocks.shape[-1] // size * 256))


def fitted(
    groups: np.ndarray, shrink: tuple[float, ...] = (1.08, 1.04, 1.0, 0.96, 0.92, 0.88, 0.84, 0.8)
) -> tuple[np.ndarray, np.ndarray]:
    """(scale, min) of each group of the last dimension: least squares, from several first ranges. float64."""
    best, scale, least = None, None, None
    for share in shrink:
        for step, low in _improvements(groups, share):
            codes = np.clip(np.rint(quotient(groups - low, step)), 0, 15)
            error = ((step * codes + low - groups) ** 2).sum(-1, keepdims=True)
            if best is None:
                best, scale, least = error, step, low
            better = error < best
            best, scale, least = (np.where(better, *each) for each in ((error, best), (step, scale), (low, least)))
    return scale[..., 0], -least[..., 0]


def _improvements(groups: np.ndarray, share: float, turns: int = 6):
    """(scale, low) again and again, better each time: the range's middle keeps, and its width is `share` at first."""
    low, high = np.minimum(groups.min(-1, keepdims=True), 0), groups.max(-1, keepdims=True)
    low, high = low + (1 - share) / 2 * (high - low), high - (1 - share) / 2 * (high - low)
    low = np.minimum(low, 0)
    step = (high - low) / 15
    yield step, low
    for _ in range(turns):
        codes = np.clip(np.rint(quotient(groups - low, step)), 0, 15)
        mean, center = codes.mean(-1, keepdims=True), groups.mean(-1, keepdims=True)
        step = quotient(((codes - mean) * groups).sum(-1, keepdims=True), ((codes - mean) ** 2).sum(-1, keepdims=True))
        low = center - step * mean
        through_zero = quotient((codes * groups).sum(-1, keepdims=True), (codes**2).sum(-1, keepdims=True))
        step, low = np.where(low > 0, through_zero, step), np.minimum(low, 0)
        step = np.maximum(step, 0)
        yield step, low


def quotient(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """above / below, 0 where below is 0."""
    with np.errstate(all="ignore"):
        return np.where(below == 0, 0.0, above / below)


def ends(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scale, min) of each group from its smallest and its largest number as they are."""
    low = np.minimum(groups.min(-1), 0)
    return (groups.max(-1) - low) / 15, -low


def quantize_q4_k(
    x: Tensor, fit: Callable = fitted, scales: np.ndarray = SCALES, mins: np.ndarray = MINS,
    codes: np.ndarray = CODES, halves: tuple[int, int] = (0, 1), stored: bool = True,
    rounded: Callable = np.rint, top: float = 65504.0, mark: bool = True,
    change: Callable = lambda scale, least: (scale, least),
) -> Tensor:  # fmt: skip
    """fit: scale and min of groups. stored: codes are those of what is stored. mark: NaN where a number is not finite.

    scales, mins, codes: places of the fields. halves: which float16 is d, and which dmin. top: the largest d and dmin.
    change: of scales and mins before they are stored.
    """
    blocks = small.in_blocks(x, 256).astype(np.float64)
    fine = np.isfinite(blocks).all(1, keepdims=True)
    groups = np.where(fine, blocks, 0).reshape(-1, 8, 32)
    scale, least = change(*fit(groups))
    bits = np.zeros((len(groups), 8 * Q4_K), np.int64)
    steps, kept = [], []
    for which, (values, places) in zip(halves, ((scale, scales), (least, mins)), strict=True):
        ratio = quotient(values, np.repeat(values.max(1, keepdims=True) / 63, 8, axis=1))
        fields = np.clip(np.rint(ratio), 0, 63).astype(np.int64)
        wide = np.minimum(values.max(1, keepdims=True) / 63, top)
        if mark:
            wide = np.where(fine, wide, np.nan)
        with np.errstate(over="ignore"):
            raw = small.half(wide.astype(np.float32))
        put(bits, run_of(16 * np.array([which]), 16), raw)
        put(bits, places, fields)
        steps.append(np.nan_to_num(small.half_values(raw).astype(np.float64), posinf=1e30) * fields)
        kept.append(fields)
    step, offset = steps if stored else (scale, least)
    with np.errstate(all="ignore"):
        found = np.clip(rounded(quotient(groups + offset[..., None], step[..., None])), 0, 15)
    put(bits, codes, found.reshape(-1, 256).astype(np.int64))
    return small.to_rows(np.packbits(bits.astype(np.uint8), axis=1, bitorder="little"), x, 256)


# --- Q6_K -------------------------------------------------------------------------------------------------------------

_HALF, _PLACE = _NUMBERS // 128, _NUMBERS % 128
_J, _I = _PLACE // 32, _PLACE % 32
LOW_BITS = run_of(8 * (64 * _HALF + 32 * (_J % 2) + _I) + 4 * (_J // 2), 4)
HIGH_BITS = run_of(8 * (128 + 32 * _HALF + _I) + 2 * _J, 2)
SIXES = pieces(LOW_BITS, HIGH_BITS)


def dequantize_q6_k(
    blocks: Tensor, codes: np.ndarray = SIXES, zero: int = 32, signed: bool = True, group: int = 16, d_at: int = 208,
    wrap: bool = False,
) -> Tensor:  # fmt: skip
    """codes: places of their bits. zero: the code of 0. group: numbers with one scale. d_at: the byte of d.

    wrap: codes less that of 0 are uint8.
    """
    bits = spread(blocks.numpy().reshape(-1, Q6_K))
    scales = taken(bits, run_of(8 * (192 + np.arange(16)), 8))
    scales = np.where(signed & (scales > 127), scales - 256, scales)[:, _NUMBERS // group]
    d = small.half_values(taken(bits, run_of(8 * np.array([d_at]), 16))).astype(np.float64)
    with np.errstate(all="ignore"):
        found = taken(bits, codes) - zero
        return float_rows(d * scales * (found % 256 if wrap else found), blocks, Q6_K)


# --- a file -----------------------------------------------------------------------------------------------------------

KINDS = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q8_0": 8, "q4_k": 12, "q6_k": 14}


def number(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def text(value: str) -> bytes:
    raw = value.encode()
    return number(len(raw), 8) + raw


def single(value: float) -> bytes:
    return np.array(value, dtype="<f4").tobytes()


def kind_of(value: object) -> int:
    return {bool: 7, int: 4, float: 6, str: 8, list: 9}[type(value)]


def plain_value(value: object, kinds: Callable = kind_of) -> bytes:
    """The bytes of a value, without its type."""
    if isinstance(value, list):
        elements = b"".join(plain_value(each, kinds) for each in value)
        return number(kinds(value[0]), 4) + number(len(value), 8) + elements
    code = kinds(value)
    if code == 8:
        return text(value)
    return single(value) if code == 6 else number(int(value), 1 if code == 7 else 4)


def reversed_(shape: tuple) -> tuple:
    return tuple(reversed(shape))


def up_to(size: int, alignment: int) -> int:
    """How many zeros there are from byte `size` to a multiple of the alignment."""
    return -size % alignment


def write_gguf(
    file: object, metadata: dict, tensors: list, dimensions: Callable = reversed_, kinds: Callable = kind_of,
    value: Callable = plain_value, written: Callable = text, before: Callable = up_to, between: Callable = up_to,
    last: Callable = up_to, alignment: int | None = None, from_start: bool = False,
) -> None:  # fmt: skip
    """dimensions: of a shape. kinds: the type of a value. value: its bytes. written: bytes of a key, name or text.

    before, between, last: zeros before the data, after a tensor, after the last one. from_start: offsets are those in
    the file.
    """
    multiple = metadata.get("general.alignment", 32) if alignment is None else alignment
    head = b"GGUF" + number(3, 4) + number(len(tensors), 8) + number(len(metadata), 8)
    for key, each in metadata.items():
        told = written(each) if isinstance(each, str) else value(each, kinds)
        head += written(key) + number(kinds(each), 4) + told
    data, offsets = b"", []
    for place, tensor in enumerate(tensors):
        offsets.append(len(data))
        data += tensor.data.numpy().tobytes()
        gap = last if place == len(tensors) - 1 else between
        data += b"\0" * gap(len(data), multiple)
    shapes = [dimensions(tensor.shape) for tensor in tensors]
    size = len(head) + sum(len(written(t.name)) + 4 + 8 * len(s) + 12 for t, s in zip(tensors, shapes, strict=True))
    begin = size + before(size, multiple)
    for tensor, offset, shape in zip(tensors, offsets, shapes, strict=True):
        head += written(tensor.name) + number(len(shape), 4) + b"".join(number(each, 8) for each in shape)
        head += number(KINDS[tensor.kind], 4) + number(offset + (begin if from_start else 0), 8)
    file.write(head + b"\0" * (begin - size) + data)


class _Cursor:
    """Reads a file from its beginning; ValueError with what was wanted where it ends too early."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place = content, 0

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self.content) - self.place:
            raise ValueError(f"{size} bytes from byte {self.place} on, of {len(self.content)}")
        self.place += size
        return self.content[self.place - size : self.place]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self) -> str:
        return self.take(self.number(8)).decode(errors="backslashreplace")

    def value(self, kind: int) -> str:
        if kind == 9:
            inner, count = self.number(4), self.number(8)
            if count > 1000:
                raise ValueError(f"{count} elements")
            return f"[type {inner}: {', '.join(self.value(inner) for _ in range(count))}]"
        if kind == 8:
            return repr(self.text())
        sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
        if kind not in sizes:
            raise ValueError(f"type {kind}")
        raw = self.take(sizes[kind])
        return repr(float(np.frombuffer(raw, "<f4")[0])) if kind == 6 else str(int.from_bytes(raw, "little"))


PARTS = ("beginning", "metadata", "tensors", "data")


def described(content: bytes, alignment: int = 32) -> tuple[str, ...]:
    """What a file says, in words, part by part (PARTS). Different files have different words."""
    cursor, said = _Cursor(content), []
    try:
        start, version, tensors, entries = cursor.take(4), cursor.number(4), cursor.number(8), cursor.number(8)
        said.append(f"{start!r}, version {version}, {tensors} tensors, {entries} entries")
        pairs = []
        for _ in range(_few(entries)):
            key, kind = cursor.text(), cursor.number(4)
            pairs.append(f"{key}: type {kind} {cursor.value(kind)}")
        said.append("; ".join(pairs))
        infos = []
        for _ in range(_few(tensors)):
            name, count = cursor.text(), cursor.number(4)
            sizes = [str(cursor.number(8)) for _ in range(_few(count))]
            infos.append(f"{name} ({' x '.join(sizes)}) type {cursor.number(4)} at {cursor.number(8)}")
        said.append("; ".join(infos))
        begin = cursor.place
    except (ValueError, OverflowError) as error:
        said.append(f"cannot be read: {error}")
        begin = None
    said += ["not reached"] * (3 - len(said))
    return (*said, "not reached" if begin is None else _data_in_words(content[begin:], begin, alignment))


def _few(count: int) -> int:
    if count > 1000:
        raise ValueError(f"{count} of them")
    return count


def _data_in_words(content: bytes, begin: int, alignment: int) -> str:
    zeros = len(content) - len(content.lstrip(b"\0"))
    needed = min(-begin % alignment, len(content))
    padding = f"{min(zeros, needed)} zeros up to byte {begin + min(zeros, needed)}"
    data = content[min(zeros, needed) :]
    return f"{padding}, then {len(data)} bytes: {_shortly(data)}"


def _shortly(data: bytes) -> str:
    """The first bytes, and a sum over all that tells files apart."""
    total = sum((place % 9973 + 1) * byte for place, byte in enumerate(data))
    return f"{data[:8].hex(' ')} ... (checksum {total})"


def as_bytes(content: Tensor) -> bytes:
    return content.numpy().tobytes()


def is_close_to(value: float, bound: float) -> bool:
    """Whether an error is at most a bound, up to what float64 rounds."""
    return not math.isnan(value) and value <= bound * (1 + 1e-9)
