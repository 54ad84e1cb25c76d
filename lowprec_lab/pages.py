"""A learner's page and a newer release of it, merged: the new page, with the learner's cells in it.

A cell is recognised by its id, else its nbgrader grade_id, else its text, else by the exercise that it fills in: some
editors drop the ids and the metadata. Text that was only reworded from one release to the next is the same cell.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import product
from operator import attrgetter

from nbformat import NotebookNode, from_dict, v4, writes

_FILLED = re.compile(r"^@fill[ \t]*\n(?:@.*\n)*(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_DEFINED = re.compile(r"^(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_QUESTION = re.compile(r"^question\(\s*[\"']([^\"']+)[\"']", re.MULTILINE)
_GIVEN_ID = re.compile(r"(?:markdown|code|raw)-[0-9a-f]{12}(?:-\d+)?")  # what a release calls a cell without a name
_ALIKE = 0.6  # how much of two texts is common, from 0 to 1, when one is the other in new words
_before, _after = attrgetter("before"), attrgetter("after")
_END_ID = "from-your-earlier-page"
_END_TEXT = "## From your earlier page\n\nThe new page has no place for what follows. Nothing here is graded."
_ORPHAN_TEXT = "`{name}`: this exercise is not on the page any more. This was your answer:"


@dataclass
class Merged:
    """A merged page, and what became of the learner's cells.

    answers: names of the exercises (and "helpers") whose cell is the learner's. contracts: those of them whose given
    text changed in the new release. orphans: answers whose exercise is gone, kept at the end. own_cells: how many
    cells that the learner had added. left_behind: how many given cells they had changed, which are not carried over.
    """

    page: NotebookNode
    answers: list[str] = field(default_factory=list)
    contracts: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    own_cells: int = 0
    left_behind: int = 0


def read_page(content: bytes) -> NotebookNode:
    """The notebook in these bytes, each cell with its source in one piece. Raises ValueError when it is not one."""
    try:
        data = json.loads(content.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(data, dict) or data.get("nbformat") != 4 or not isinstance(data.get("cells"), list):
        raise ValueError("it is not a notebook of format 4")
    page = from_dict(data)
    page.setdefault("metadata", NotebookNode())
    for cell in page.cells:
        _complete(cell)
    return page


def _complete(cell: NotebookNode) -> None:
    if not isinstance(cell, dict) or cell.get("cell_type") not in ("code", "markdown", "raw"):
        raise ValueError("it has a cell that is neither code nor text")
    source = cell.get("source", "")
    cell.source = source if isinstance(source, str) else "".join(map(str, source))
    for key in ("metadata", "attachments") if "attachments" in cell else ("metadata",):
        if not isinstance(cell.get(key), dict):
            cell[key] = NotebookNode()


def write_page(page: NotebookNode) -> bytes:
    # Half a surrogate pair has no UTF-8; as \udXXX it is what JSON calls it.
    return (writes(page) + "\n").encode("utf-8", "backslashreplace")


def stated_release(page: NotebookNode) -> str | None:
    """The release that the page says it is, if it does."""
    ours = page.metadata.get("lowprec_lab")
    return str(ours["release"]) if isinstance(ours, dict) and ours.get("release") else None


def release_of(page: NotebookNode) -> str:
    """The release of a page as it was given: what it says, else a hash of its cells."""
    cells = [(cell.cell_type, cell.source, cell.get("id"), _grade_id(cell)) for cell in page.cells]
    return stated_release(page) or hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def is_of_release(mine: NotebookNode, given: NotebookNode | None, new: NotebookNode) -> bool:
    """Whether the learner's page was made from the release `new`. given: the page that it was made from, if known."""
    return (stated_release(mine) or release_of(given or mine)) == release_of(new)


def merge(mine: NotebookNode, given: NotebookNode | None, new: NotebookNode) -> Merged:
    """The page `new` with the learner's cells from `mine`. given: the release that `mine` was made from, if known."""
    if given is not None and stated_release(mine) not in (None, stated_release(given)):
        given = None  # a copy of some other release
    return _Merge(mine, given, new).run()


def _id(cell: NotebookNode) -> str | None:
    return cell.get("id")


def _grade_id(cell: NotebookNode) -> str | None:
    ours = cell.metadata.get("nbgrader")
    return ours.get("grade_id") if isinstance(ours, dict) else None


def _is_solution(cell: NotebookNode) -> bool:
    return _grade_id(cell) is not None and cell.metadata.nbgrader.get("solution") is True


def _role(cell: NotebookNode, filled: re.Pattern = _FILLED) -> str | None:
    """What a learner writes in this cell, from its text: an exercise's name, a question's, "helpers", or None."""
    if cell.cell_type != "code":
        return None
    if "helpers" in cell.metadata.get("tags", ()) or cell.source.lstrip().startswith("# Your helpers"):
        return "helpers"
    match = filled.search(cell.source) or _QUESTION.search(cell.source)
    return match[1] if match else None


def _text(cell: NotebookNode) -> str:
    """The source without what no reader sees, to compare two cells."""
    return "\n".join(line.rstrip() for line in cell.source.strip().split("\n"))


def _is_stub(source: str) -> bool:
    """Whether nothing was written here: comments, imports, and bodies or arguments that are `...`."""
    try:
        return all(_is_empty(statement) for statement in ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_empty(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return all(_is_empty(inner) for inner in statement.body)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        arguments = [*statement.value.args, *(keyword.value for keyword in statement.value.keywords)]
        return any(isinstance(argument, ast.Constant) and argument.value is ... for argument in arguments)
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass)


@dataclass
class _Known:
    """A cell that a release gave: in the learner's release (before) and in the new one (after).

    place: of `after`, in the new page. is_original: whether `before` is as it was given, not as the learner has it.
    """

    before: NotebookNode | None
    after: NotebookNode | None
    place: int | None
    is_original: bool = True

    @property
    def cell(self) -> NotebookNode:
        return self.before or self.after


class _Merge:
    def __init__(self, mine: NotebookNode, given: NotebookNode | None, new: NotebookNode) -> None:
        self.mine, self.new, self.has_given = mine, new, given is not None
        self.known = _pair_up(
            given.cells if given else _evidently_given(mine.cells), new.cells, is_original=self.has_given
        )
        self.sources: dict[int, str] = {}  # place in the new page -> the learner's source
        self.added: dict[int, list[NotebookNode]] = defaultdict(list)  # after which place -> cells; -1: at the top
        self.end: list[NotebookNode] = []
        self.merged = Merged(page=NotebookNode())

    def run(self) -> Merged:
        owners = _recognise(self.mine.cells, self.known)
        place: int | None = -1
        at_end = False
        for cell, known in zip(self.mine.cells, owners, strict=True):
            if cell.get("id") == _END_ID or cell.source == _END_TEXT:
                at_end = True
            elif known is not None and not self._only_shares_a_name(cell, known):
                self._take_given(cell, known)
                place = known.place
            elif cell.source.strip():
                (self.end if at_end or place is None else self.added[place]).append(_clean_copy(cell))
                self.merged.own_cells += not at_end
        self.merged.page = self._assemble()
        return self.merged

    def _only_shares_a_name(self, cell: NotebookNode, known: _Known) -> bool:
        """Whether this is a cell of their own, though the new release happens to give its id to a cell of its own."""
        is_new = self.has_given and known.before is None
        return is_new and not _is_solution(known.after) and _text(cell) != _text(known.after)

    def _take_given(self, cell: NotebookNode, known: _Known) -> None:
        before = known.before if known.is_original else None
        edited = before is not None and _text(cell) != _text(before)
        if not (_is_solution(known.cell) or _role(known.cell) == "helpers"):
            self.merged.left_behind += edited
        elif _is_stub(cell.source) or before is not None and not edited:
            return
        elif known.place is None:
            self._keep_orphan(cell, _role(known.cell) or _grade_id(known.cell))
        elif _text(cell) != _text(known.after):
            name = _role(known.after) or _grade_id(known.after)
            self.sources[known.place] = cell.source
            self.merged.answers.append(name)
            if before is not None and _text(before) != _text(known.after):
                self.merged.contracts.append(name)

    def _keep_orphan(self, cell: NotebookNode, name: str) -> None:
        if name == "helpers":
            self.end.append(_clean_copy(cell))
            self.merged.own_cells += 1
            return
        # A raw cell: run as code it would ask for an exercise that is gone.
        self.end += [v4.new_markdown_cell(_ORPHAN_TEXT.format(name=name)), v4.new_raw_cell(cell.source)]
        self.merged.orphans.append(name)

    def _assemble(self) -> NotebookNode:
        page = from_dict(self.new)
        page.nbformat_minor = max(5, page.get("nbformat_minor", 0))
        for key in ("kernelspec", "language_info"):
            if key in self.mine.metadata:
                page.metadata[key] = self.mine.metadata[key]
        for cell in page.cells:
            cell.setdefault("id", v4.new_raw_cell().id)
        _give_ids([cell for cells in self.added.values() for cell in cells] + self.end, {c.id for c in page.cells})
        cells = list(self.added[-1])
        for place, cell in enumerate(page.cells):
            cell.source = self.sources.get(place, cell.source)
            cells += [cell, *self.added[place]]
        if self.end:
            cells += [v4.new_markdown_cell(_END_TEXT, id=_END_ID), *self.end]
        page.cells = cells
        return page


def _evidently_given(cells: list[NotebookNode]) -> list[NotebookNode]:
    """The cells of a learner's page that some release gave, by their marks alone. No mark is counted twice."""
    marked = {_grade_id(cell) or _id(cell): cell for cell in reversed(cells) if _has_given_mark(cell)}
    return [cell for cell in cells if any(cell is one for one in marked.values())]


def _has_given_mark(cell: NotebookNode) -> bool:
    return _grade_id(cell) is not None or bool(_GIVEN_ID.fullmatch(str(_id(cell))))


def _pair_up(before: list[NotebookNode], after: list[NotebookNode], is_original: bool) -> list[_Known]:
    """Each cell of the old release with the one that it is in the new release, and the cells that are only in one."""
    places: list[int | None] = [None] * len(before)
    for mark in (_grade_id, _id, _text):
        place_of = {mark(cell): place for place, cell in enumerate(after) if mark(cell) and place not in places}
        for number, cell in enumerate(before):
            if places[number] is None:
                places[number] = place_of.pop(mark(cell), None)
    for number, cell in enumerate(before):
        if places[number] is None:
            places[number] = _reworded(cell, after, places, number)
    pairs = zip(before, places, strict=True)
    known = [_Known(cell, None if place is None else after[place], place, is_original) for cell, place in pairs]
    return known + [_Known(None, cell, place) for place, cell in enumerate(after) if place not in places]


def _reworded(cell: NotebookNode, after: list[NotebookNode], places: list[int | None], number: int) -> int | None:
    """The place of the new cell that says nearly the same and stands between the same neighbours, or None."""
    if _grade_id(cell) is not None:
        return None
    start = next((place for place in reversed(places[:number]) if place is not None), -1) + 1
    stop = next((place for place in places[number + 1 :] if place is not None), len(after))
    likeness = {
        place: SequenceMatcher(None, _text(cell), _text(after[place]), autojunk=False).ratio()
        for place in range(start, stop)
        if place not in places and after[place].cell_type == cell.cell_type and _grade_id(after[place]) is None
    }
    best = max(likeness, key=likeness.get, default=None)
    return best if best is not None and likeness[best] >= _ALIKE else None


def _recognise(cells: list[NotebookNode], known: list[_Known]) -> list[_Known | None]:
    """For each of the learner's cells the given cell that it is, or None for their own. No cell is taken twice."""
    owners: list[_Known | None] = [None] * len(cells)
    free = list(known)
    # Each mark of a learner's cell, and the mark that the given cell must have: the surest first.
    marks: tuple[tuple[Callable, Callable], ...] = (
        (_id, _id),
        (_grade_id, _grade_id),
        (_text, _text),
        (_role, _role),
        (lambda cell: _role(cell, _DEFINED), _role),  # the @fill line is gone too
    )
    for (mark_of_mine, mark_of_given), which in product(marks, (_before, _after)):
        for number, cell in enumerate(cells):
            mark = mark_of_mine(cell)
            if owners[number] is None and mark:
                given = ((one, which(one)) for one in free)
                owners[number] = next((one for one, its in given if its and mark_of_given(its) == mark), None)
                free = [one for one in free if one is not owners[number]]
    return owners


def _clean_copy(cell: NotebookNode) -> NotebookNode:
    """The learner's own cell, without outputs and without what nbgrader wrote into the cell it was copied from."""
    make = {"code": v4.new_code_cell, "markdown": v4.new_markdown_cell, "raw": v4.new_raw_cell}[cell.cell_type]
    metadata = {key: value for key, value in cell.metadata.items() if key != "nbgrader"}
    kept = {key: cell[key] for key in ("id", "attachments") if cell.get(key) and (key == "id" or "attachments" in cell)}
    return make(cell.source, metadata=NotebookNode(metadata), **kept)


def _give_ids(own: list[NotebookNode], taken: set[str]) -> None:
    """Give a new id to each of the learner's cells whose id is no id, or is taken by another cell."""
    for cell in own:
        if not re.fullmatch(r"[\w-]{1,64}", str(cell.id), re.ASCII) or cell.id in taken:
            cell.id = v4.new_raw_cell().id
        taken.add(cell.id)
