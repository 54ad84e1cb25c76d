"""A row of numbers in block formats, by whoever's code is in use: codes, scales, values, and the errors of each block.

A format has elements, blocks, and ways to choose a scale ("modes"). An answer gets the row with the outlier in every
size it may have. Values are worked out here, from codes and scales, and so is what one scale for the whole row leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.block_formats import FP8, MX_BLOCK, MX_FORMATS, NVFP4_BLOCK, SCALE_MODES, scale_value
from lowprec_lab.formats import E2M1, E4M3, Format
from lowprec_lab.graders import block_formats_oracle as exact
from lowprec_lab.graders import oracle
from lowprec_lab.tables import NotUsableError, ask

WIDE_BLOCK = 128


@dataclass(frozen=True)
class BlockFormat:
    """element: the format of a code. block: how many numbers share a scale. exercise: whose answer quantizes.
    scale_bits: of the scale of a block."""

    name: str
    element: Format
    block: int
    exercise: str
    modes: tuple[str, ...]
    scale_bits: int

    @property
    def bits(self) -> float:
        """Bits for each number, with its part of the scale."""
        return self.element.width + self.scale_bits / self.block


BLOCK_FORMATS: dict[str, BlockFormat] = {
    name: BlockFormat(name, fmt, MX_BLOCK, "quantize_mx", SCALE_MODES, 8) for name, fmt in MX_FORMATS.items()
} | {
    "NVFP4": BlockFormat("NVFP4", E2M1, NVFP4_BLOCK, "quantize_nvfp4", ("two levels",), 8),
    "1x128": BlockFormat("1x128", E4M3, WIDE_BLOCK, "quantize_blockwise_128", ("float32", "power of two"), 32),
}
EXERCISES = tuple(dict.fromkeys(each.exercise for each in BLOCK_FORMATS.values()))
_EXACT = {name: getattr(exact, name) for name in EXERCISES}


@dataclass(frozen=True)
class Found:
    """What a format leaves of rows, one for each size of the outlier.

    codes: uint8 (sizes, K). scale: float32 (sizes, blocks), what a code is multiplied by. byte: uint8, of scale's
    shape, as it is stored; None for scales of four bytes. tensor_scale: float32 (sizes,), for NVFP4.
    """

    codes: np.ndarray
    scale: np.ndarray
    byte: np.ndarray | None = None
    tensor_scale: np.ndarray | None = None

    def same_rows(self, other: Found) -> np.ndarray:
        """For each row, whether codes and scales are the same."""
        return (self.codes == other.codes).all(-1) & ((self.scale == other.scale) | _both_nan(self, other)).all(-1)


def _both_nan(one: Found, other: Found) -> np.ndarray:
    return np.isnan(one.scale) & np.isnan(other.scale)


@dataclass(frozen=True)
class InUse:
    """What the code in use for an exercise found, by format and mode. origin, line, note: as in `tables.Table`."""

    found: dict[tuple[str, str], Found]
    origin: str
    line: str
    note: str


def by_answers(rows: Tensor) -> dict[str, InUse]:
    """By exercise. rows: float32 (sizes, K)."""
    return {name: _by_answer(name, rows) for name in EXERCISES}


def _by_answer(name: str, rows: Tensor) -> InUse:
    right = dict(_all_found(name, _EXACT[name], rows))

    def use(function: Callable) -> dict:
        return right if function is _EXACT[name] else dict(_all_found(name, function, rows))

    found, origin, line, note = ask(name, use, exact=_EXACT[name])
    same = np.concatenate([found[key].same_rows(right[key]) for key in right])
    wrong = int(np.count_nonzero(~same))
    note = note or (f"differs from the definition for {wrong:,} of {len(same):,} rows" if wrong else "")
    return InUse(found, origin, line, note)


def _all_found(name: str, quantize: Callable, rows: Tensor) -> Iterator[tuple[tuple[str, str], Found]]:
    quantized = {"quantize_mx": _mx, "quantize_nvfp4": _nvfp4, "quantize_blockwise_128": _wide}[name]
    for fmt in BLOCK_FORMATS.values():
        if fmt.exercise == name:
            for mode in fmt.modes:
                yield (fmt.name, mode), quantized(quantize, fmt, mode, rows)


def _mx(quantize: Callable, fmt: BlockFormat, mode: str, rows: Tensor) -> Found:
    codes, scale = _parts(quantize(rows.clone(), fmt.element, mode), 2)
    _require(codes, "codes", torch.uint8, rows.shape)
    _require(scale, "scales", torch.uint8, (len(rows), blocks_in(fmt, rows)))
    return Found(_known_codes(codes, fmt), scale_value(scale).numpy(), scale.numpy())


def _nvfp4(quantize: Callable, fmt: BlockFormat, mode: str, rows: Tensor) -> Found:
    """Row by row: each has a tensor scale of its own."""
    found = [_parts(quantize(row[None].clone()), 3) for row in rows]
    for codes, scale, tensor_scale in found:
        _require(codes, "codes", torch.uint8, (1, rows.shape[-1]))
        _require(scale, "scales", FP8, (1, blocks_in(fmt, rows)))
        _require(tensor_scale, "a tensor scale", torch.float32, ())
    codes, scale, tensor_scale = (torch.stack(part) for part in zip(*found, strict=True))
    factor = scale[:, 0].float() * tensor_scale[:, None]
    byte = scale[:, 0].view(torch.uint8).numpy()
    return Found(_known_codes(codes[:, 0], fmt), factor.numpy(), byte, tensor_scale.numpy())


def _wide(quantize: Callable, fmt: BlockFormat, mode: str, rows: Tensor) -> Found:
    codes, scale = _parts(quantize(rows.clone(), (1, fmt.block), mode == "power of two"), 2)
    _require(codes, "codes", FP8, rows.shape)
    _require(scale, "scales", torch.float32, (len(rows), blocks_in(fmt, rows)))
    return Found(_known_codes(codes.view(torch.uint8), fmt), scale.numpy())


def _parts(result: object, count: int) -> tuple[Tensor, ...]:
    if not isinstance(result, tuple) or len(result) != count or not all(isinstance(each, Tensor) for each in result):
        raise NotUsableError(f"returned something that is not {count} tensors")
    return tuple(each.detach() for each in result)


def _require(part: Tensor, what: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if part.dtype != dtype or tuple(part.shape) != tuple(shape):
        raise NotUsableError(f"returned {what} of {part.dtype} and the shape {tuple(part.shape)}")


def _known_codes(codes: Tensor, fmt: BlockFormat) -> np.ndarray:
    if int(codes.max()) >= 2**fmt.element.width:
        raise NotUsableError(f"returned codes that have more than {fmt.element.width} bits")
    return codes.numpy().copy()


def blocks_in(fmt: BlockFormat, rows: Tensor) -> int:
    """How many blocks a row has; the last one may be smaller."""
    return -(-rows.shape[-1] // fmt.block)


# --- what is left of the numbers --------------------------------------------------------------------------------------


def element_values(fmt: Format) -> np.ndarray:
    """What every code of a format stands for, float64."""
    return oracle.decode(torch.arange(2**fmt.width, dtype=torch.int32), fmt).numpy()


def values_of(found: Found, fmt: BlockFormat) -> np.ndarray:
    """decode(code) * scale, rounded to float32: (sizes, K)."""
    scale = np.repeat(found.scale.astype(np.float64), fmt.block, axis=-1)[:, : found.codes.shape[-1]]
    with np.errstate(all="ignore"):
        return (element_values(fmt.element)[found.codes] * scale).astype(np.float32)


def with_one_scale(rows: Tensor, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """(values, scale) with one scale for the row, its amax over the largest value: float32 (sizes, K) and (sizes,)."""
    numbers = exact.single(rows)
    scale = np.abs(numbers).max(-1, keepdims=True) / np.float32(oracle.max_finite(fmt))
    codes = exact.codes_of(numbers / scale, fmt)
    return (exact.values_of(codes, fmt) * scale).astype(np.float32), scale[:, 0]


def errors(values: np.ndarray, rows: Tensor, place: int, block: int) -> np.ndarray:
    """The typical error of each block's numbers but the outlier, relative to them: RMS of errors / RMS of numbers.

    values: (sizes, K). place: of the outlier. Returns: float64 (sizes, blocks); 0 for a block of zeros that stays so.
    """
    numbers = rows.double().numpy()
    starts = range(0, numbers.shape[-1], block)
    with np.errstate(all="ignore"):
        noise = np.square(values.astype(np.float64) - numbers)
        noise[:, place], size = 0.0, np.square(numbers)
        size[:, place] = 0.0
        noise, size = (np.add.reduceat(each, list(starts), axis=-1) for each in (noise, size))
        return np.where(noise == 0, 0.0, np.sqrt(noise / size))
