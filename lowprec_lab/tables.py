"""The values of a format, for pictures and explorers, by whoever's code is in use.

Pictures run on the learner's `decode` once it is filled or saved, else on the reference, else on the exact oracle. An
answer that raises or returns something else than numbers must not take the picture down: the oracle draws it, and the
table says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lowprec_lab import exercises
from lowprec_lab.formats import Format
from lowprec_lab.graders import oracle
from lowprec_lab.limits import TookTooLongError, time_limit

# Up to this width all codes are decoded at once and looked up after that; wider formats are decoded as they come.
TABLE_WIDTH = 16

ORACLE_LINE = "exact oracle"

# A picture does not wait longer for an answer: an endless loop must not take the page with it.
_LIMIT_S = 5.0


@dataclass(frozen=True)
class Table:
    """All codes of one format of at most 16 bits, in the order of the codes.

    values: float64, 2^width of them. classes: uint8, the numbers of `NumberClass`.
    origin: "yours", "saved", "reference" or "oracle"; line: the sentence that says so.
    note: what was wrong with the code that should have made the table; empty if nothing was.
    """

    fmt: Format
    values: np.ndarray
    classes: np.ndarray
    origin: str
    line: str
    note: str


class NotUsableError(Exception):
    """An answer gave something that cannot be drawn."""


def table_of(fmt: Format) -> Table:
    """The table of a format of at most 16 bits, by the `decode` and `classify` that are in use."""
    if fmt.width > TABLE_WIDTH:
        raise ValueError(f"{fmt.name} has {fmt.width} bits; a table is made for formats of at most {TABLE_WIDTH} bits")
    codes = torch.arange(2**fmt.width, dtype=torch.int32)
    values, origin, line, note = ask("decode", lambda decode: _numbers(decode(codes, fmt), codes, fmt))
    classes, _, _, class_note = ask("classify", lambda classify: _classes(classify(codes, fmt), codes))
    if not note:
        note = _disagreement(values, fmt)
    return Table(fmt, values, classes, origin, line, " ".join(filter(None, (note, class_note))))


def ask(name: str, use: Callable, exact: Callable | None = None) -> tuple[object, str, str, str]:
    """What `use(function)` returns for the code in use for exercise `name`: (result, origin, line, note).

    When that code raises, or `use` raises NotUsableError, the oracle answers and the note says why.
    exact: the oracle, where `graders.oracle` has no function of that name.
    """
    exact = exact or getattr(oracle, name)
    try:
        supply = exercises.supply(name)
    except exercises.AnswerError:  # nobody wrote it, and no reference is installed
        return use(exact), "oracle", ORACLE_LINE, ""
    try:
        with time_limit(_LIMIT_S):
            return use(supply.function), supply.origin, supply.line, ""
    except Exception as error:
        known = isinstance(error, (NotUsableError, TookTooLongError))
        reason = str(error) if known else f"raised {type(error).__name__}: {error}"
        whose = "your" if supply.origin in ("yours", "saved") else "the"
        return use(exact), "oracle", ORACLE_LINE, f"{whose} {name} {_shortened(reason)}"


def _shortened(reason: str, limit: int = 120) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _numbers(result: object, codes: torch.Tensor, fmt: Format) -> np.ndarray:
    _require_tensor(result, codes)
    if not result.dtype.is_floating_point:
        raise NotUsableError(f"returned {result.dtype}, not floating-point values")
    values = result.detach().to(torch.float64).numpy().copy()
    magnitudes = values[: 2 ** (fmt.exponent_bits + fmt.mantissa_bits)]
    if np.count_nonzero(np.isfinite(magnitudes) & (magnitudes >= 0)) < 2:
        raise NotUsableError("returned no finite values to draw")
    return values


def _classes(result: object, codes: torch.Tensor) -> np.ndarray:
    _require_tensor(result, codes)
    classes = result.detach().to(torch.int64).numpy()
    if classes.min() < 0 or classes.max() > 4:
        raise NotUsableError("returned a class that is none of 0 to 4")
    return classes.astype(np.uint8)


def _require_tensor(result: object, codes: torch.Tensor) -> None:
    if not isinstance(result, torch.Tensor):
        raise NotUsableError(f"returned {type(result).__name__}, not a tensor")
    if result.shape != codes.shape:
        raise NotUsableError(f"returned the shape {tuple(result.shape)} for codes of the shape {tuple(codes.shape)}")


def _disagreement(values: np.ndarray, fmt: Format) -> str:
    right = oracle.decode(torch.arange(2**fmt.width, dtype=torch.int32), fmt).numpy()
    both_nan = np.isnan(values) & np.isnan(right)
    same = both_nan | ((values == right) & (np.signbit(values) == np.signbit(right)))
    wrong = int(np.count_nonzero(~same))
    return f"differs from the definition for {wrong:,} of {values.size:,} codes" if wrong else ""
