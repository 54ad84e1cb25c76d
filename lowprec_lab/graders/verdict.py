"""The verdict on an answer: what the learner sees, as text and as HTML with the same words.

HTML uses inline styles and real text only: JupyterLab drops style sheets, SVG and ARIA from the outputs of an
untrusted notebook, and a verdict must read right there too. Everything that comes from an answer is escaped.
"""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from itertools import groupby

LEVELS = {
    "exact": ("✓", "#2e7d32"),
    "close": ("≈", "#b26a00"),
    "wrong": ("✗", "#c62828"),
    "failed": ("✗", "#c62828"),
    "unwritten": ("○", "#607d8b"),
}
# Pale backgrounds under black text: the same field colours as in the explorers, readable in light and dark themes.
FIELD_COLORS = {"s": "#f6c1b1", "e": "#b9d7f5", "m": "#f5e3a1"}


@dataclass
class Row:
    """One line of a counter-example: label, value as text, and the value's bits by field, [("s", "0"), ...]."""

    label: str
    value: str
    bits: list = field(default_factory=list)

    @property
    def strip(self) -> str:
        return " ".join(digits for _, digits in self.bits)


@dataclass
class Verdict:
    """What was found out about one answer.

    level: "exact", "close" (right to a few ulp, or on this machine), "wrong", "failed" (could not be compared) or
    "unwritten".
    points: what the answer earns of max_points.
    """

    name: str
    exercise: str
    level: str
    headline: str
    passed: bool
    points: float
    max_points: float
    sentences: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    try_it: str = ""
    checks: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    misconception: str = ""

    def as_dict(self) -> dict:
        """The verdict as plain data, for JSON."""
        return asdict(self)

    def text(self) -> str:
        """The verdict as plain text, for a terminal, a screen reader or nbgrader's feedback."""
        mark, _ = LEVELS[self.level]
        lines = [f"{mark} {self.name}   {self.headline}"]
        lines += [f"  {sentence}" for sentence in self.sentences]
        lines += self._counterexample_lines()
        if self.try_it:
            lines.append(f"  {'try it':<18} {self.try_it}")
        lines += self._check_lines() + [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def _counterexample_lines(self) -> list[str]:
        if not self.rows:
            return []
        heads = ["first difference"] + [""] * (len(self.rows) - 1)
        label_width = max(len(row.label) for row in self.rows) + 1
        value_width = self._value_width() + 2
        lines = [
            f"  {head:<18} {row.label:<{label_width}} {row.value:<{value_width}} {row.strip}".rstrip()
            for head, row in zip(heads, self.rows, strict=False)
        ]
        marks = self.marks()
        if marks:
            lines.append(" " * (2 + 18 + 1 + label_width + 1 + value_width + 1) + marks)
        return lines

    def _value_width(self) -> int:
        """The longest value that has bits beside it; a longer one without bits must not push them to the right."""
        return max((len(row.value) for row in self.rows if row.bits), default=0)

    def marks(self) -> str:
        """Carets under the bits in which "yours" and "right" differ; "" where their strips cannot be compared."""
        strips = {row.label: row.strip for row in self.rows}
        yours, right = strips.get("yours", ""), strips.get("right", "")
        if not yours or len(yours) != len(right):
            return ""
        return "".join("^" if a != b else " " for a, b in zip(yours, right, strict=False)).rstrip()

    def _check_lines(self) -> list[str]:
        tried = [check for check in self.checks if check["ran"]]
        if self.level == "unwritten" or len(tried) < 2 and not self.passed:
            return []
        lines = []
        for check in self.checks:
            if not check["ran"]:
                lines.append(f"  - not tried: {check['inputs']}")
            else:
                lines.append(f"  {'✓' if check['passed'] else '✗'} {check['inputs']}")
        return lines

    def html(self) -> str:
        """The verdict as HTML that survives JupyterLab's sanitizer."""
        mark, color = LEVELS[self.level]
        parts = [
            f'<div style="border-left: 4px solid {color}; padding: 4px 12px; margin: 4px 0px">',
            f'<div style="margin-bottom: 4px"><b>{mark} {html.escape(self.name)}</b>&nbsp; {html.escape(self.headline)}'
            "</div>",
        ]
        parts += [f'<div style="margin-bottom: 4px">{html.escape(sentence)}</div>' for sentence in self.sentences]
        parts += [self._counterexample_html()] if self.rows or self.try_it else []
        lines = self._check_lines()
        if lines:
            parts.append("<div>" + "<br>".join(html.escape(line.strip()) for line in lines) + "</div>")
        parts += [f'<div style="margin-top: 4px">{html.escape(note)}</div>' for note in self.notes]
        return "".join(parts) + "</div>"

    def _counterexample_html(self) -> str:
        label_width = max((len(row.label) for row in self.rows), default=6) + 2
        value_width = self._value_width() + 3
        differing = {i for i, mark in enumerate(self.marks()) if mark == "^"}
        lines = [
            html.escape(f"{row.label:<{label_width}}{row.value:<{value_width if row.bits else 0}}")
            + _bits_html(row, differing if row.label in ("yours", "right") else set())
            for row in self.rows
        ]
        if differing:
            lines.append(" " * (label_width + value_width) + self.marks())
        # The strips scroll where they do not fit: wrapped, the carets would stand under other bits. A call may wrap.
        strip = _pre("\n".join(["first difference", *lines]), "white-space: pre; overflow-x: auto")
        call = html.escape(f"{'try it':<{label_width}}{self.try_it}")
        return (strip if self.rows else "") + (_pre(call, "white-space: pre-wrap") if self.try_it else "")

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}

    def __str__(self) -> str:
        return self.text()


def _pre(content: str, wrap: str) -> str:
    return f'<pre style="margin: 4px 0px; line-height: 1.5; {wrap}">{content}</pre>'


def _bits_html(row: Row, differing: set[int]) -> str:
    """The strip with one background per field; differing bits bold and underlined, so colour is not the only cue."""
    cells: list[tuple[str, str, bool]] = []
    position = 0
    for name, digits in row.bits:
        cells += [(digit, name, position + i in differing) for i, digit in enumerate(digits)] + [(" ", "", False)]
        position += len(digits) + 1
    out = []
    for (name, marked), run in groupby(cells[:-1], key=lambda cell: cell[1:]):
        digits = html.escape("".join(cell[0] for cell in run))
        digits = f"<b><u>{digits}</u></b>" if marked else digits
        shade = FIELD_COLORS.get(name)
        out.append(f'<span style="background-color: {shade}; color: #000000">{digits}</span>' if shade else digits)
    return "".join(out)
