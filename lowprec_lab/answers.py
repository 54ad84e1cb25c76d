"""Saved answers: a percent file for each module, `answers/bits.py` in the learner's folder, a section for each answer.

A section begins with a line like `# %% answer: decode | saved 2026-11-30T10:11:12+00:00` or `# %% helpers | saved ...`
(the date may be left out) and goes on to the next such line. A line of an answer that itself begins with `# %%` is
stored with a backslash (`# \\%%`), so every `# %%` at the start of a line is a header.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from lowprec_lab.files import WorkspaceError, explained, keep_copy, locked, under_grading, work_folder, write_whole

_MARKER = re.compile(r"#[ \t]*%%")
_HEADER = re.compile(
    r"#[ \t]*%%[ \t]*(?:answer:[ \t]*(?P<name>[^\W\d]\w*)|helpers)[ \t]*(?:\|[ \t]*saved[ \t]+(?P<date>\S+))?[ \t]*"
)
_TO_ESCAPE = re.compile(r"^(#[ \t]*)(\\*%%)", re.MULTILINE)
_ESCAPED = re.compile(r"^(#[ \t]*)\\(\\*%%)", re.MULTILINE)
_PREAMBLE = (
    "# Your saved answers for lowprec_lab/{module}.py. check() writes this file when an answer passes.\n"
    "# You may edit it: each section is one answer, and begins with its '# %%' line.\n"
)


@dataclass(frozen=True)
class SavedAnswer:
    """One saved answer. `line` is the line of the section's header in the file; the source begins on the next one.

    saved_at: in UTC; for a section without a date, when the file was last changed.
    """

    name: str
    source: str
    saved_at: datetime
    line: int


@dataclass
class Answers:
    """What one file of saved answers holds.

    helpers: the source of the "your helpers" cell, or None. problems: sentences with file and line, for the learner.
    """

    path: Path | None
    answers: dict[str, SavedAnswer] = field(default_factory=dict)
    helpers: str | None = None
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Section:
    """A section as it stands in a file. name: None for the helpers."""

    name: str | None
    source: str
    saved_at: datetime
    line: int


@dataclass
class _Parsed:
    preamble: str = ""
    sections: dict[str | None, _Section] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def save_answer(
    module: str, name: str, source: str, helpers: str | None = None, order: Sequence[str] | None = None
) -> Path | None:
    """Save the source of one answer cell to `answers/<module>.py`, and return that path.

    All other sections stay as they are, also when another notebook saves at the same moment.
    helpers: the source of the helpers cell; None leaves what is saved, a blank text removes it.
    order: names in the order that the sections should have; others follow in the order they were saved.
    Under nbgrader nothing is saved, and the result is None.
    Raises WorkspaceError when the source is not Python that defines `name`, or the file cannot be written (then the
    old one is intact). Warns when the file was broken; what was wrong with it is set aside, as `load_answers` does.
    """
    if under_grading():
        return None
    source, helpers = _tidy(source), None if helpers is None else _tidy(helpers)
    for label, text in ((name, source), (None, helpers or "")):
        reason = _what_is_wrong(label, text)
        if reason is not None:
            line, what = reason
            raise WorkspaceError(f"Nothing was saved. Line {line} of {_title(label)} is at fault: {what}.")
    path = _answers_file(module)
    with locked(path):
        with explained(path, "read"):
            parsed = _read(path, module)
        if parsed.problems:
            warnings.warn("\n".join(parsed.problems + [_set_aside(path)]), stacklevel=2)
        _put(parsed, name, source)
        if helpers is not None:
            _put(parsed, None, helpers)
        write_whole(path, _render(parsed, order))
    return path


def load_answers(module: str, folder: Path | None = None) -> Answers:
    """Read the saved answers of a module; never raises for a broken file or folder.

    What is wrong with the file is in `.problems`, by name and line. The whole file is then copied to
    `answers/set_aside/`, and the good sections stay in the live file.
    folder: another folder of answers, which is only read and never changed.
    Under nbgrader the result is empty.
    """
    if under_grading():
        return Answers(None)
    try:
        path = _answers_file(module, folder)
    except WorkspaceError as error:
        return Answers(None, problems=[str(error)])
    try:
        parsed = _read(path, module)
        if parsed.problems and folder is None:
            parsed = _repair(path, module, parsed)
    except OSError as error:
        return Answers(path, problems=[f"{_where(path)} could not be read: {error.strerror or error}."])
    saved = {s.name: SavedAnswer(s.name, s.source, s.saved_at, s.line) for s in parsed.sections.values() if s.name}
    helpers = parsed.sections.get(None)
    return Answers(path, saved, helpers.source if helpers else None, parsed.problems)


def _answers_file(module: str, folder: Path | None = None) -> Path:
    if not module.isidentifier():
        raise ValueError(f"a module's name is a Python name such as 'bits', not {module!r}")
    return (work_folder() / "answers" if folder is None else Path(folder)) / f"{module}.py"


def _where(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _title(name: str | None) -> str:
    return "the helpers cell" if name is None else f"the answer {name}"


def _tidy(source: str) -> str:
    """The source with plain newlines, and no blank lines around it."""
    return _plain_newlines(source).strip("\n")


def _plain_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read(path: Path, module: str) -> _Parsed:
    """Parse the file; a missing one is empty. Raises OSError when it is there and cannot be read."""
    try:
        content = path.read_bytes()
        changed = datetime.fromtimestamp(int(path.stat().st_mtime), UTC)
    except FileNotFoundError:
        content, changed = b"", datetime.now(UTC)
    parsed = _parse(content, _where(path), changed)
    parsed.preamble = parsed.preamble or _PREAMBLE.format(module=module)
    return parsed


def _parse(content: bytes, where: str, changed: datetime) -> _Parsed:
    # Bytes that are not UTF-8 survive as surrogates, so that only the sections which have some are bad.
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    lines = _plain_newlines(text).split("\n")
    starts = [number for number, line in enumerate(lines) if _MARKER.match(line)]
    parsed = _Parsed()
    _take_preamble(parsed, lines[: starts[0] if starts else len(lines)], where)
    for start, stop in pairwise([*starts, len(lines)]):
        _take_section(parsed, start + 1, lines[start:stop], where, changed)
    return parsed


def _take_preamble(parsed: _Parsed, lines: list[str], where: str) -> None:
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#") or not _is_utf8(line):
            problem = "this line stands before the first section, so it belongs to no answer"
            parsed.problems.append(f"{where}, line {number}: {problem}. Put a line '# %% answer: NAME' above it.")
            return
    parsed.preamble = "\n".join(lines).strip("\n") + "\n" if any(lines) else ""


def _take_section(parsed: _Parsed, line: int, lines: list[str], where: str, changed: datetime) -> None:
    header, source = lines[0], _ESCAPED.sub(r"\1\2", "\n".join(lines[1:])).rstrip("\n")
    match = _HEADER.fullmatch(header)
    saved_at = _date(match["date"], changed) if match else None
    if saved_at is None:
        shown = header.encode("ascii", "backslashreplace").decode()
        wanted = "'# %% answer: NAME | saved DATE' or '# %% helpers | saved DATE'"
        parsed.problems.append(f"{where}, line {line}: this header cannot be read: {shown!r}. It should be {wanted}.")
        return
    name = match["name"]
    reason = _what_is_wrong(name, source)
    if reason is not None:
        parsed.problems.append(f"{where}, line {line + reason[0]}: {_title(name)} cannot be used: {reason[1]}.")
        return
    if name in parsed.sections:
        twice = f"is there twice, also on line {parsed.sections[name].line}; the last one is used"
        parsed.problems.append(f"{where}, line {line}: {_title(name)} {twice}.")
    parsed.sections[name] = _Section(name, source, saved_at, line)


def _date(text: str | None, default: datetime) -> datetime | None:
    if text is None:
        return default
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _what_is_wrong(name: str | None, source: str) -> tuple[int, str] | None:
    """The line (from 1) and the reason why this cannot be the source of an answer (None: of the helpers), or None."""
    for number, line in enumerate(source.split("\n"), 1):
        if not _is_utf8(line):
            return number, "it holds bytes that are not UTF-8 text"
        if "\0" in line:
            return number, "it holds a zero byte"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, "<answer>", "exec", dont_inherit=True)
            tree = ast.parse(source)
    except SyntaxError as error:
        number = min(max(error.lineno or 1, 1), source.count("\n") + 1)
        magic = source.split("\n")[number - 1].lstrip()[:1] in ("%", "!")
        hint = "; take the line with the % or ! command out of the cell, and run it again" if magic else ""
        return number, f"it is not Python: {error.msg}{hint}"
    except (ValueError, RecursionError, MemoryError) as error:
        return 1, f"it is not Python: {error or type(error).__name__}"
    if name is not None and not _defines(tree, name):
        return 1, f"it has no 'def {name}' or 'class {name}'"
    return None


def _defines(tree: ast.AST, name: str) -> bool:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) and node.name == name for node in ast.walk(tree))


def _repair(path: Path, module: str, seen: _Parsed) -> _Parsed:
    """Set a copy of the broken file aside and keep the good sections in the live one; say so, or why that failed."""
    try:
        with locked(path):
            parsed = _read(path, module)
            if not parsed.problems:  # another notebook has just done it
                parsed.problems = seen.problems
                return parsed
            note = _set_aside(path)
            write_whole(path, _render(parsed, None))
            problems = parsed.problems + [note]
            parsed = _read(path, module)  # the lines have moved
            parsed.problems = problems
            return parsed
    except WorkspaceError as error:
        seen.problems.append(f"{_where(path)} stays as it is, and nothing was set aside. {error}")
        return seen


def _set_aside(path: Path) -> str:
    kept = keep_copy(path.read_bytes(), path.parent / "set_aside", path.stem, path.suffix)
    return (
        f"The whole file as it was is kept in {path.parent.name}/set_aside/{kept.name}; its other answers are in use."
    )


def _put(parsed: _Parsed, name: str | None, source: str) -> None:
    if not source.strip():
        parsed.sections.pop(name, None)
    elif name is not None or name not in parsed.sections or parsed.sections[name].source != source:
        now = datetime.now(UTC).replace(microsecond=0)
        parsed.sections[name] = _Section(name, source, now, 0)


def _render(parsed: _Parsed, order: Sequence[str] | None) -> bytes:
    place = {name: number for number, name in enumerate(order or ())}
    sections = sorted(parsed.sections.values(), key=lambda s: -1 if s.name is None else place.get(s.name, len(place)))
    parts = [parsed.preamble]
    for section in sections:
        title = "helpers" if section.name is None else f"answer: {section.name}"
        source = _TO_ESCAPE.sub(r"\1\\\2", section.source)
        parts.append(f"# %% {title} | saved {section.saved_at.isoformat(timespec='seconds')}\n{source}\n")
    return "\n".join(parts).encode("utf-8")
