"""BitExplorer: click the bits of a number, and see what they mean.

The kernel sends the values of each format once (formats up to 16 bits), and the browser does the rest, so that a click
does not wait for the kernel. The values come from the learner's own `decode` once there is one; a badge says whose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowprec_lab.explorers import bit_picture, nearest
from lowprec_lab.explorers.widget import Explorer, code, one_of, panel_of, text_of
from lowprec_lab.formats import Format, get_format
from lowprec_lab.graders import oracle
from lowprec_lab.tables import ORACLE_LINE, TABLE_WIDTH, Table, table_of

MOST_FORMATS = 3


class BitExplorer(Explorer):
    """One toggle for each bit of a code, and everything that the code means.

    fmt: the name of a format ("float8_e4m3fn", "E4M3"), a Format, or a list of up to three: the same real number side
        by side.
    value: the real number to start with. Its shortest decimal is what is rounded: 0.1 is one tenth.
    mode: how a number between two values is rounded: "nearest_even", "nearest_away", "toward_zero", "up" or "down".
    overflow: what becomes of numbers beyond the largest value: "saturate" or "to_special".
    `value`, `mode` and `overflow` can be read and set later; `codes` says what the explorer shows now.

    Raises ValueError for an unknown format, mode or policy.
    """

    _esm = code("bit_explorer", "js")
    _css = code("bit_explorer", "css")
    runs_on = ("decode", "classify")

    def __init__(
        self,
        fmt: str | Format | list[str | Format] = "float8_e4m3fn",
        value: float = 0.1,
        mode: str = "nearest_even",
        overflow: str = "saturate",
    ) -> None:
        super().__init__()
        self._formats = _as_formats(fmt)
        self._tables: list[Table | None] = []
        self._load()
        self._show(text=text_of(value), mode=one_of(mode, nearest.MODES), overflow=one_of(overflow, nearest.OVERFLOWS))

    @property
    def value(self) -> float:
        """The real number that is rounded, as a float. Setting it rounds anew."""
        real = nearest.read_real(self._state["text"])
        try:
            return float(real)
        except OverflowError:
            return float("inf") if real > 0 else float("-inf")

    @value.setter
    def value(self, value: float) -> None:
        self._show(text=text_of(value))

    @property
    def mode(self) -> str:
        """The rounding mode."""
        return self._state["mode"]

    @mode.setter
    def mode(self, mode: str) -> None:
        self._show(mode=one_of(mode, nearest.MODES))

    @property
    def overflow(self) -> str:
        """The overflow policy."""
        return self._state["overflow"]

    @overflow.setter
    def overflow(self, overflow: str) -> None:
        self._show(overflow=one_of(overflow, nearest.OVERFLOWS))

    @property
    def codes(self) -> dict[str, int]:
        """The code that is shown for each format, by the format's name; not negative."""
        return {fmt.name: code for fmt, code in zip(self._formats, self._state["codes"], strict=True)}

    def refresh(self) -> None:
        """Take up the `decode` that is in use now. The codes stay; what they mean may change."""
        self._load()

    def plot(self):
        """The same as a static picture. Returns a matplotlib Figure."""
        return bit_picture.draw(self._readings(), self._state["text"])

    def _load(self) -> None:
        self._tables = [table_of(fmt) if fmt.width <= TABLE_WIDTH else None for fmt in self._formats]
        self._panels = [_panel(fmt, table) for fmt, table in zip(self._formats, self._tables, strict=True)]

    def _show(self, **change: str) -> None:
        state = {**self._state, **change}
        real = nearest.read_real(state["text"])
        rounded = [
            nearest.nearest_code(real, fmt, self._values(index), state["mode"], state["overflow"])
            for index, fmt in enumerate(self._formats)
        ]
        self._state = {**state, "codes": [code for code, _ in rounded], "problems": [problem for _, problem in rounded]}

    def _values(self, index: int) -> Callable[[int], float]:
        table = self._tables[index]
        return table.values.item if table else lambda code: _decode_one(code, self._formats[index])

    def _readings(self) -> list[bit_picture.Reading]:
        return [
            bit_picture.Reading(fmt, code, self._values(index), self._panels[index]["line"])
            for index, (fmt, code) in enumerate(zip(self._formats, self._state["codes"], strict=True))
        ]

    def __repr__(self) -> str:
        lines = [reading.sentence() for reading in self._readings()]
        return "\n".join([f"BitExplorer: {self._state['text']}, {self.mode}, {self.overflow}", *lines])


def _as_formats(fmt: str | Format | list[str | Format]) -> list[Format]:
    wanted = list(fmt) if isinstance(fmt, (list, tuple)) else [fmt]
    if not 1 <= len(wanted) <= MOST_FORMATS:
        raise ValueError(f"BitExplorer shows 1 to {MOST_FORMATS} formats side by side, not {len(wanted)}")
    return [each if isinstance(each, Format) else get_format(each) for each in wanted]


def _decode_one(code: int, fmt: Format) -> float:
    signed = code - 2**32 if code >= 2**31 else code
    return oracle.decode(torch.tensor([signed], dtype=torch.int32), fmt).item()


def _panel(fmt: Format, table: Table | None) -> dict:
    panel = panel_of(fmt) | {
        "origin": "oracle",
        "line": f"{ORACLE_LINE} (more than {TABLE_WIDTH} bits)",
        "note": "",
    }
    if table is not None:
        panel |= {"values": table.values.tobytes(), "classes": table.classes.tobytes()}
        panel |= {"origin": table.origin, "line": table.line, "note": table.note}
    return panel
