"""A submitted page put in order before it is judged and shown: what counts is found by content, not by what it claims.

`find_answers` finds the answers of a chapter in a page; `repair` makes the page one that nbgrader can grade and that
can do nothing to whoever looks at it. Neither runs anything, and whatever was in the page, neither fails.

nbgrader stops at the first page with a cell twice, and everybody after it stays ungraded; so `RepairSubmission` stands
first among the sanitizers.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, new_raw_cell
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Unicode

from lowprec_lab.authoring import KERNEL
from lowprec_lab.blanks import in_order
from lowprec_lab.grading.clean import clean_text
from lowprec_lab.grading.course import CourseError
from lowprec_lab.grading.safe_markdown import (
    notes_as_markdown,
    plain_characters,
    plain_pictures,
    safe_markdown,
    safe_png,
    text_as_markdown,
)
from lowprec_lab.grading.staging import NOTES
from lowprec_lab.sources import HELPERS_MARK, Source, is_untouched

NOTES_HEADING = "For the instructor: what was put in order here before grading"
AS_SUBMITTED = "As submitted, not re-run:"
_MOST_CELLS, _MOST_CELL, _MOST_PAGE, _MOST_NOTES = 2_000, 200_000, 2_000_000, 30
_MOST_OUTPUT, _MOST_OUTPUTS = 20_000, 50
_CLAIMS = ("grade_id", "grade", "solution", "locked", "points", "task")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DEFINITION = re.compile(r"(?:async\s+)?(?:def|class)\s+([A-Za-z_]\w*)")
_ACTIVE = re.compile(
    r"<\s*(?:script|svg|iframe|object|embed|style|math|form|link|meta)\b|\bon\w+\s*=|javascript:", re.I
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


# --- finding the answers --------------------------------------------------------------------------------------------


@dataclass
class _Page:
    """The cells of a submission, split answers joined, and the one that counts for each exercise (by position)."""

    cells: list[NotebookNode]
    answers: dict[str, int] = field(default_factory=dict)
    aside: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find_answers(notebook: Mapping, chapter: str) -> dict[str, Source]:
    """The answers to a chapter's exercises ("01_bit_layouts") in a page, as the judge takes them; {} if there are none.

    An answer is a cell with `@fill` above `def name(`. Of several, the one that still has its place in the page counts
    if something is written in it, else the first in which something is.
    """
    names = tuple(blank.name for blank in in_order() if blank.chapter.name == chapter)
    return _sources(_read_page(_cells_of(notebook), names))


def _sources(page: _Page) -> dict[str, Source]:
    helpers = next((cell.source for cell in page.cells if _is_helpers(cell)), "")
    written = {name: page.cells[at].source for name, at in page.answers.items()}
    return {
        name: Source(_without_magics(text), _without_magics(helpers))
        for name, text in written.items()
        if not _is_untouched(text, name)
    }


def _read_page(cells: list[NotebookNode], names: tuple[str, ...]) -> _Page:
    page = _Page([])
    _join_split_answers(cells, names, page)
    for name in names:
        found = [at for at, cell in enumerate(page.cells) if name in _defined(cell.source) and _may_answer(cell, name)]
        if found:
            page.answers[name] = max(found, key=lambda at, name=name: (*_worth(page.cells[at], name), -at))
        page.aside |= {at: name for at in found if at != page.answers[name]}
    for at in page.answers.values():  # a cell with two answers, of which one counts, stays
        page.aside.pop(at, None)
    page.notes += [
        f"{name} is answered more than once. Cell {_place(page.answers[name])} counts; cell {_place(at)} was set aside."
        for at, name in page.aside.items()
    ]
    return page


def _place(at: int) -> int:
    return at + 1


def _may_answer(cell: NotebookNode, name: str) -> bool:
    """A code cell; or one that was turned into text by mistake and still says what it was."""
    return cell.cell_type == "code" or _claim(cell) == name or cell.get("id") == name


def _worth(cell: NotebookNode, name: str) -> tuple[bool, bool]:
    return not _is_untouched(cell.source, name), _claim(cell) == name


def _claim(cell: NotebookNode) -> str:
    """nbgrader's id of a cell, as the submission has it. Anybody can write anything there."""
    about = cell.metadata.get("nbgrader")
    claim = about.get("grade_id") if isinstance(about, Mapping) else None
    return claim if isinstance(claim, str) else ""


def _is_helpers(cell: NotebookNode) -> bool:
    return cell.cell_type == "code" and cell.source.lstrip().startswith(HELPERS_MARK)


@functools.lru_cache(maxsize=4096)
def _defined(source: str) -> tuple[str, ...]:
    """The names that a cell defines with `@fill` above them."""
    if "@fill" not in source:
        return ()
    found, filled = [], False
    for line in source.split("\n"):
        definition = _DEFINITION.match(line)
        if re.match(r"@(?:\w+\.)*fill\b", line):
            filled = True
        elif definition and filled:
            found.append(definition[1])
            filled = False
        elif line.strip() and not line.startswith(("#", "@")):
            filled = False
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _is_untouched(source: str, name: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return is_untouched(_without_magics(source), name)
    except Exception:  # no Python, or too deeply nested to be read: somebody wrote it
        return False


@functools.lru_cache(maxsize=4096)
def _parses(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _without_magics(source: str) -> str:
    """The cell as Python reads it in a notebook: `%time` and `!pip` lines become calls, which a judge does not run."""
    if _parses(source) or not re.search(r"^\s*[%!?]|[?]\s*$", source, re.M) or source.startswith("%%"):
        return source
    try:
        from IPython.core.inputtransformer2 import TransformerManager

        python = TransformerManager().transform_cell(source)
    except Exception:
        return source
    return python if _parses(python) else source


# --- answers that were split ----------------------------------------------------------------------------------------


def _join_split_answers(cells: list[NotebookNode], names: tuple[str, ...], page: _Page) -> None:
    """Put the parts of an answer together that stand in neighbouring cells: JupyterLab splits one at a keystroke."""
    at = 0
    while at < len(cells):
        cell, end = cells[at], at + 1
        while end < len(cells) and _goes_on(cell, cells[end], names):
            joined = deepcopy(cell)
            joined.source = f"{cell.source}\n{cells[end].source}"
            joined.metadata = cells[end].metadata if _claim(cells[end]) in _defined(joined.source) else cell.metadata
            cell, end = joined, end + 1
        if end > at + 1:
            if _parses(_without_magics(cell.source)):
                whose = " and ".join(name for name in _defined(cell.source) if name in names)
                page.notes.append(
                    f"The answer {whose} was in {end - at} cells ({_place(at)} to {end}); they were joined."
                )
            else:  # together they are no answer either: leave them as they were
                cell, end = cells[at], at + 1
        page.cells.append(cell)
        at = end


def _goes_on(cell: NotebookNode, following: NotebookNode, names: tuple[str, ...]) -> bool:
    """Whether an answer that begins in `cell` goes on in the next cell."""
    if cell.cell_type != "code" or following.cell_type != "code" or not following.source.strip():
        return False
    lines = [line for line in cell.source.split("\n") if line.strip()]
    last = lines[-1] if lines else ""
    first = next(line for line in following.source.split("\n") if line.strip())
    if re.match(r"@(?:\w+\.)*fill\s*$", last):  # split below the decorator
        return bool(_DEFINITION.match(first)) and _DEFINITION.match(first)[1] in names
    begun = [name for name in _defined(cell.source) if name in names]
    theirs = _claim(following)
    if begun and not _defined(following.source):
        return first[0] in " \t" or not _parses(_without_magics(cell.source)) and not first.startswith("check(")
    # Split above the decorator: what stands there has the answer's metadata.
    return bool(theirs) and theirs == _claim(cell) and theirs in _defined(following.source) and not begun


# --- a page that can be graded and shown ------------------------------------------------------------------------------


def repair(notebook: Mapping, source: NotebookNode) -> tuple[NotebookNode, list[str]]:
    """A page for nbgrader made from a submission, and notes for the instructor, which are also its first cell.

    source: the course's source notebook of the page, from which everything is taken that is not the learner's to say:
    which cells count, what they are worth, which are locked.
    """
    known = _known_cells(source)
    names = tuple(key for key, cell in known.items() if key in _defined(cell.source))
    notes = _given_notes(notebook)
    page = _read_page(_cells_of(notebook, notes), names)
    notes += page.notes
    places = _places(page, known, names, notes)
    texts = {cell.source: cell for cell in source.cells if cell.cell_type == "markdown"}
    cells = [
        _shown_cell(cell, known.get(places.get(at, "")), texts, page.aside.get(at, ""), notes, at)
        for at, cell in enumerate(page.cells)
    ]
    _put_back_missing(cells, known, names, notes)
    _note_missing_answers(page, names, notes)
    _give_ids(cells, source)
    if notes:
        shown = [clean_text(note) for note in notes[:_MOST_NOTES]]
        cells.insert(0, new_markdown_cell(notes_as_markdown(NOTES_HEADING, shown), id="notes-for-the-instructor"))
    metadata = {**deepcopy(KERNEL), "lowprec_lab": dict(source.metadata.get("lowprec_lab", {}))}
    repaired = new_notebook(cells=cells, metadata=metadata)
    repaired.nbformat_minor = 5
    return repaired, notes


def _known_cells(source: NotebookNode) -> dict[str, NotebookNode]:
    """The cells of the source notebook that nbgrader knows, by grade_id."""
    return {cell.metadata.nbgrader.grade_id: cell for cell in source.cells if cell.metadata.get("nbgrader")}


def well_formed(notebook: Mapping, notes: list[str]) -> NotebookNode:
    """A valid page of nbformat 4.5 with the cells of any page: their kind, text, id, claims, PNG and text outputs."""
    made = new_notebook(cells=_cells_of(notebook, notes))
    made.nbformat_minor = 5
    return made


def _cells_of(notebook: Mapping, notes: list[str] | None = None) -> list[NotebookNode]:
    notes = [] if notes is None else notes
    given = notebook.get("cells")
    given = given if isinstance(given, list) else []
    if len(given) > _MOST_CELLS:
        notes.append(f"The page has {len(given):,} cells. Those after the first {_MOST_CELLS:,} were left out.")
    cells, left, ids = [], _MOST_PAGE, set()
    for at, cell in enumerate(given[:_MOST_CELLS]):
        if not isinstance(cell, Mapping):
            notes.append(f"Cell {_place(at)} is no cell and was left out.")
            continue
        text = plain_characters(_text_of(cell.get("source")))
        if len(text) > min(_MOST_CELL, left):
            text = text[: min(_MOST_CELL, left)]
            notes.append(
                f"Cell {_place(at)} was cut: a cell may have {_MOST_CELL:,} characters, a page {_MOST_PAGE:,}."
            )
        left -= len(text)
        cells.append(_well_formed(cell, text, f"submitted-{at}", ids))
    return cells


def _text_of(value: object) -> str:
    if isinstance(value, list):
        return "".join(part for part in value if isinstance(part, str))
    return value if isinstance(value, str) else ""


def _well_formed(cell: Mapping, text: str, other_id: str, ids: set[str]) -> NotebookNode:
    kind = cell.get("cell_type")
    identity = cell.get("id")
    if not isinstance(identity, str) or not _ID.fullmatch(identity) or identity in ids:
        identity = other_id
    while identity in ids:
        identity += "x"
    ids.add(identity)
    if kind == "code":
        made = new_code_cell(text, id=identity, outputs=_plain_outputs(cell.get("outputs")))
    elif kind == "markdown":
        pictures = plain_pictures(cell.get("attachments"))
        attachments = {"attachments": {n: {"image/png": p} for n, p in pictures.items()}} if pictures else {}
        made = new_markdown_cell(text, id=identity, **attachments)
    else:
        made = new_raw_cell(text, id=identity)
    about = cell.get("metadata")
    claims = about.get("nbgrader") if isinstance(about, Mapping) else None
    if isinstance(claims, Mapping):
        kept = {key: claims[key] for key in _CLAIMS if isinstance(claims.get(key), (str, bool, int, float))}
        made.metadata["nbgrader"] = {key: value for key, value in kept.items() if value == value}
    return made


def _given_notes(notebook: Mapping) -> list[str]:
    about = notebook.get("metadata")
    given = about.get(NOTES) if isinstance(about, Mapping) else None
    return [note for note in given if isinstance(note, str)] if isinstance(given, list) else []


def _places(page: _Page, known: dict[str, NotebookNode], names: tuple[str, ...], notes: list[str]) -> dict[int, str]:
    """Which known cell each cell of the page is: {position: grade_id}. By content first, then by what it claims."""
    places: dict[int, str] = {}
    for name in names:
        if page.answers.get(name, -1) not in places and name in page.answers:
            places[page.answers[name]] = name
    for key, cell in known.items():
        if key in names:
            continue
        free = [at for at in range(len(page.cells)) if at not in places and at not in page.aside]
        same = [at for at in free if page.cells[at].cell_type == "code" and _is_same(page.cells[at].source, cell)]
        claiming = [at for at in free if _claims(page.cells[at], key, cell) and not _defined(page.cells[at].source)]
        both = [at for at in same if at in claiming]
        # A cell that may be edited is told by its claim, whatever is in it now; a locked one by its text.
        chosen = (both or same or claiming) if _is_locked(cell) else (both or claiming or same)
        if not chosen:
            continue
        places[chosen[0]] = key
        if _is_locked(cell) and chosen[0] not in same:
            notes.append(f"Cell {_place(chosen[0])} ({key}) had been changed and was set right.")
        for at in (at for at in claiming if at != chosen[0]):
            page.aside[at] = key
            notes.append(f"Cell {_place(at)} is {key} a second time and was set aside.")
    return places


def _is_locked(cell: NotebookNode) -> bool:
    return not cell.metadata.nbgrader.get("solution", False)


def _is_same(text: str, known: NotebookNode) -> bool:
    """Whether a cell's text is a known cell's; a question is known by its number."""
    number = re.match(r"question\(\s*([\"'][^\"']*[\"'])", known.source)
    if number and known.metadata.nbgrader.get("solution"):
        return bool(re.match(r"question\(\s*" + re.escape(number[1]), text.strip()))
    return text.strip() == known.source.strip()


def _claims(cell: NotebookNode, key: str, known: NotebookNode) -> bool:
    return _claim(cell) == key or (not _claim(cell) and bool(cell.id) and cell.id == known.get("id"))


def _shown_cell(
    cell: NotebookNode,
    known: NotebookNode | None,
    texts: Mapping[str, NotebookNode],
    aside: str,
    notes: list[str],
    at: int,
) -> NotebookNode:
    """The cell as it goes on: known ones with the course's metadata, the learner's own with none."""
    if aside:
        return new_markdown_cell(text_as_markdown(cell.source, f"Set aside: another cell for {aside}"), id=cell.id)
    if known is not None:
        return _known_cell(cell, known, notes, at)
    if cell.cell_type == "code":
        return new_code_cell(cell.source, id=cell.id)
    if cell.cell_type == "raw":
        return new_markdown_cell(text_as_markdown(cell.source), id=cell.id)
    if cell.source in texts:
        return deepcopy(texts[cell.source])
    return new_markdown_cell(_markdown(cell, notes, at), id=cell.id)


def _markdown(cell: NotebookNode, notes: list[str], at: int) -> str:
    if _ACTIVE.search(cell.source):
        notes.append(f"Cell {_place(at)} holds HTML that could act on its reader. It is shown as text.")
    return safe_markdown(cell.source, cell.get("attachments"))


def _known_cell(cell: NotebookNode, known: NotebookNode, notes: list[str], at: int) -> NotebookNode:
    kind, manual = known.cell_type, bool(known.metadata.nbgrader.get("grade")) and not _is_locked(known)
    text = known.source if _is_locked(known) else cell.source
    if kind == "markdown":
        text = text if _is_locked(known) else _markdown(cell, notes, at)
    make = new_code_cell if kind == "code" else new_markdown_cell
    made = make(text, id=known.id, metadata=deepcopy(known.metadata))
    about = cell.metadata.get("nbgrader")
    if isinstance(about, Mapping):
        lied = [key for key in ("points", "locked", "grade", "solution")
                if key in about and about[key] != known.metadata.nbgrader.get(key)]  # fmt: skip
        if lied:
            notes.append(f"Cell {_place(at)} ({known.metadata.nbgrader.grade_id}) had other {', '.join(lied)}.")
    if kind == "code" and manual:
        marked = new_output("display_data", data={"text/plain": AS_SUBMITTED})
        made.outputs = [marked, *cell.outputs] if cell.get("outputs") else []
    return made


def _plain_outputs(given: object) -> list[NotebookNode]:
    """What a cell showed when it was handed in: text and PNG alone."""
    kept = []
    for output in (given if isinstance(given, list) else [])[:_MOST_OUTPUTS]:
        if not isinstance(output, Mapping):
            continue
        data = output.get("data") if isinstance(output.get("data"), Mapping) else {}
        picture = safe_png(data.get("image/png"))
        text = _text_of(output.get("text") or data.get("text/plain") or output.get("traceback"))
        shown = plain_characters(_ANSI.sub("", text[:_MOST_OUTPUT]))
        if picture or shown:
            kept.append(new_output("display_data", data={"image/png": picture} if picture else {"text/plain": shown}))
    return kept


def _put_back_missing(
    cells: list[NotebookNode], known: dict[str, NotebookNode], names: tuple[str, ...], notes: list[str]
) -> None:
    """Put known cells back that are graded or locked and are not there: below the known cell that they come after."""
    at = {_claim(cell): number for number, cell in enumerate(cells) if cell.metadata.get("nbgrader")}
    before, missing = -1, []
    for key, cell in known.items():
        about = cell.metadata.nbgrader
        if key in at:
            before = at[key]
        elif about.get("grade") or about.get("locked") or about.get("task"):
            missing.append((before, key))
    for number, (place, key) in enumerate(missing):
        made = deepcopy(known[key])
        made.source = known[key].source if _is_locked(known[key]) else _stub(known[key])
        if made.cell_type == "code":
            made.outputs, made.execution_count = [], None
        cells.insert(place + 1 + number, made)
    if missing and len(cells) > len(missing):  # where there is no page at all, another note says so
        notes.append(f"Put back, because it was missing: {', '.join(key for _, key in missing)}.")


def _stub(cell: NotebookNode) -> str:
    from lowprec_lab.authoring import released_source

    return released_source(cell)


def _note_missing_answers(page: _Page, names: tuple[str, ...], notes: list[str]) -> None:
    missing = [name for name in names if name not in page.answers]
    if missing and len(missing) < len(names):
        notes.append(f"There is no answer cell for {', '.join(missing)}: none with @fill above the definition.")
    elif missing and page.cells:
        notes.append("The page has no answer cells at all.")


def _give_ids(cells: list[NotebookNode], source: NotebookNode) -> None:
    """Each cell an id of its own; those of the course's cells are theirs."""
    reserved = {cell.id for cell in source.cells} | {"notes-for-the-instructor", "graded-by"}
    theirs = {id(cell) for cell in cells if cell.metadata.get("nbgrader")}
    seen = {cell.id for cell in cells if id(cell) in theirs}
    for number, cell in enumerate(cells):
        if id(cell) in theirs:
            continue
        if cell.id in seen or not cell.id or (cell.id in reserved and _is_foreign(cell, source)):
            cell.id = f"submitted-{number}"
        while cell.id in seen:
            cell.id += "-x"
        seen.add(cell.id)


def _is_foreign(cell: NotebookNode, source: NotebookNode) -> bool:
    return not any(each.id == cell.id and each.source == cell.source for each in source.cells)


# --- nbgrader's hook --------------------------------------------------------------------------------------------------


class RepairSubmission(NbGraderPreprocessor):
    """Stands first among nbgrader's sanitizers, in the place of ClearOutput."""

    course = Unicode("", help="The course's folder, with its source notebooks.").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Repair the page. Raises CourseError when the course's own files do not fit together."""
        about = resources["nbgrader"]
        source = read_source(Path(self.course), about["assignment"], about["notebook"])
        _require_generated(source, about)
        repaired, notes = repair(nb, source)
        for note in notes:
            self.log.warning("%s: %s", about["student"], clean_text(note))
        return repaired, resources


def read_source(course: Path, assignment: str, notebook: str) -> NotebookNode:
    """The course's source notebook. Raises CourseError when it is not there."""
    path = course / "source" / assignment / f"{notebook}.ipynb"
    try:
        return _read_source(path, path.stat().st_mtime_ns)
    except (OSError, ValueError) as problem:
        raise CourseError(
            f"{path} cannot be read ({problem}). `lowprec-lab course init` brings the course's source notebooks back"
        ) from None


@functools.lru_cache(maxsize=32)
def _read_source(path: Path, _changed: int) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def _require_generated(source: NotebookNode, about: Mapping) -> None:
    """Raise CourseError when the gradebook knows other cells than the source: nbgrader would fail at each page."""
    from nbgrader.api import Gradebook

    with Gradebook(about["db_url"]) as gradebook:
        there = {cell.name for cell in gradebook.find_notebook(about["notebook"], about["assignment"]).source_cells}
    wanted = set(_known_cells(source))
    if not wanted <= there:
        raise CourseError(
            f"the gradebook does not know {', '.join(sorted(wanted - there))} of source/{about['assignment']}. "
            f"Run `nbgrader generate_assignment {about['assignment']} --force` first"
        )
