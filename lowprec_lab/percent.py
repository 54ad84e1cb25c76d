"""Percent files: a page as a Python script, its cells separated by `# %%` lines.

The standard library is enough to read one, so that a reference answer can be found where neither jupytext nor nbgrader
is installed. The format is jupytext's "py:percent": https://jupytext.readthedocs.io/en/latest/formats-scripts.html
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise

_MARKER = re.compile(r"# %%(?:\s+(?P<options>.*?))?\s*")
_KIND = re.compile(r"\[(?P<kind>markdown|md|raw)\]")
_TAGS = re.compile(r"\btags=(?P<tags>\[[^\]]*\])")


@dataclass(frozen=True)
class Cell:
    """One cell of a percent file.

    kind: "code", "markdown" or "raw".
    source: the text of the cell as a notebook holds it: no marker, no blank lines around it, markdown without the `# `.
    tags: the strings of `tags=[...]` in the marker.
    line: number of the first line of `source` in the file, counted from 1.
    title: what else the marker says ("answer: decode" in `# %% answer: decode`).
    """

    kind: str
    source: str
    tags: tuple[str, ...]
    line: int
    title: str = ""


def read_cells(text: str) -> list[Cell]:
    """The cells of a percent file in order; cells without text are left out.

    A line that starts with `# %%` in its first column begins a cell, inside a string too. Text above the first marker
    is a code cell; a YAML header (between two lines `# ---`) is skipped. Raises ValueError, with the line, for tags
    that are not a list of strings.
    """
    lines = text.splitlines()
    start = _end_of_header(lines)
    marks = [number for number in range(start, len(lines)) if _MARKER.fullmatch(lines[number])]
    edges = [*marks, len(lines)]
    cells = [_cell("code", (), "", lines, start, edges[0])]
    for mark, end in pairwise(edges):
        kind, tags, title = _read_marker(lines[mark], mark + 1)
        cells.append(_cell(kind, tags, title, lines, mark + 1, end))
    return [cell for cell in cells if cell.source]


def _end_of_header(lines: list[str]) -> int:
    if lines and lines[0].rstrip() == "# ---":
        for number, line in enumerate(lines[1:], start=1):
            if line.rstrip() == "# ---":
                return number + 1
    return 0


def _read_marker(line: str, number: int) -> tuple[str, tuple[str, ...], str]:
    options = _MARKER.fullmatch(line)["options"] or ""
    kind, tags = _KIND.search(options), _TAGS.search(options)
    title = _TAGS.sub("", _KIND.sub("", options, count=1), count=1).strip()
    kind_name = "code" if kind is None else {"md": "markdown"}.get(kind["kind"], kind["kind"])
    return kind_name, () if tags is None else _read_tags(tags["tags"], number), title


def _read_tags(text: str, number: int) -> tuple[str, ...]:
    try:
        tags = json.loads(text)
    except json.JSONDecodeError:
        tags = None
    if tags is None or not all(isinstance(tag, str) for tag in tags):
        raise ValueError(f'line {number}: tags are a list of strings in double quotes, tags=["setup"], not {text}')
    return tuple(tags)


def _cell(kind: str, tags: tuple[str, ...], title: str, lines: list[str], start: int, end: int) -> Cell:
    while start < end and not lines[start].strip():
        start += 1
    while start < end and not lines[end - 1].strip():
        end -= 1
    content = lines[start:end]
    if kind != "code":
        content = [re.sub(r"^# ?", "", line) for line in content]
    return Cell(kind, "\n".join(content), tags, start + 1, title)
