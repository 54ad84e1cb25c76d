"""From a chapter's source, `solutions/NN_name.py`, to the page that a learner opens, `notebooks/NN_name/NN_name.ipynb`.

An author writes plain cells; what nbgrader needs to know is derived from them here, by name and never by position, so
that an exercise inserted in mid-term renames nothing. nbgrader's own generate_assignment then takes the answers out.
"""

from __future__ import annotations

import ast
import hashlib
import io
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowprec_lab.chapters import CHAPTERS, Chapter, find_chapter
from lowprec_lab.files import WorkspaceError, write_whole
from lowprec_lab.percent import Cell, read_cells

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = ROOT / "solutions"
NOTEBOOKS = ROOT / "notebooks"

CODE_STUB = "...  # your code here"
TEXT_STUB = "YOUR ANSWER HERE"  # nbgrader's own, for text
MARKED_BY_HAND = "marked-by-hand"
BEGIN, END = "BEGIN SOLUTION", "END SOLUTION"
SHORTEST_LEAK = 20

# Nothing of the machine that builds: no version of Python, no name of an environment.
KERNEL = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}


class AuthoringError(ValueError):
    """What an author has to change: one sentence a line, each with file and line."""


@dataclass(frozen=True)
class _PageCell:
    """A cell of a page and what it is there for.

    role: "setup", "helpers", "answer", "check", "question", "marked", "text" or "experiment".
    name: the exercise of an answer and a check, the number of a question ("1.A"), the name of a text that a person
    marks. points: of such a text.
    """

    cell: Cell
    role: str
    name: str = ""
    points: int = 0

    @property
    def grade_id(self) -> str:
        """nbgrader's name for the cell; empty for cells that nbgrader need not know."""
        return {
            "setup": "setup",
            "answer": self.name,
            "check": f"check_{self.name}",
            "question": f"question_{re.sub(r'[^0-9A-Za-z]', '', self.name)}",
            "marked": f"marked_{self.name}",
        }.get(self.role, "")

    @property
    def cell_id(self) -> str:
        """The notebook's name for the cell; empty where it comes from the content."""
        if self.role in ("setup", "helpers", "answer"):
            return self.name or self.role
        return self.grade_id.replace("_", "-", 1)


# --- one page -------------------------------------------------------------------------------------------------------


def source_notebook(path: Path | str, blanks: Mapping | None = None) -> NotebookNode:
    """The nbgrader source notebook, answers included, of the percent file at `path`.

    blanks: exercises by name, the package's own (`lowprec_lab.blanks.BLANKS`) when omitted. The notebook's metadata
    has `lowprec_lab: {"chapter": name, "release": hash of the released cells}`.

    Raises AuthoringError that lists everything wrong with the page.
    """
    import nbformat.v4

    path = Path(path)
    blanks = _all_blanks() if blanks is None else blanks
    page = _read_page(path)
    problems = sorted(_problems(page, path, blanks))
    if problems:
        raise AuthoringError("\n".join(f"{path}:{line}: {sentence}" for line, sentence in problems))
    cells = [_notebook_cell(*pair, blanks) for pair in zip(page, _cell_ids(page), strict=True)]
    chapter = {"chapter": path.stem, "release": _release_hash(cells)}
    return nbformat.v4.new_notebook(cells=cells, metadata={**KERNEL, "lowprec_lab": chapter})


def _all_blanks() -> Mapping:
    from lowprec_lab.blanks import BLANKS, load_chapters

    load_chapters()
    return BLANKS


def _read_page(path: Path) -> list[_PageCell]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise AuthoringError(
            f"{path}: there is no such page. Each chapter is written in solutions/NN_name.py"
        ) from None
    try:
        cells = read_cells(text)
    except ValueError as problem:
        raise AuthoringError(f"{path}: {problem}") from None
    return [_page_cell(cell, path) for cell in cells]


def _page_cell(cell: Cell, path: Path) -> _PageCell:
    if cell.kind != "code":
        return _text_cell(cell, path)
    try:
        statements = ast.parse(cell.source).body
    except SyntaxError as problem:
        line = cell.line + (problem.lineno or 1) - 1
        raise AuthoringError(
            f"{path}:{line}: this cell is no Python ({problem.msg}). A page must also run as a script"
        ) from None
    if "setup" in cell.tags:
        return _PageCell(cell, "setup")
    if "helpers" in cell.tags or cell.source.startswith("# Your helpers"):
        return _PageCell(cell, "helpers")
    for statement in statements:
        if answer := _answer_name(statement):
            return _PageCell(cell, "answer", answer)
        if question := _called_with(statement, "question", ast.Constant):
            return _PageCell(cell, "question", str(question.value))
        if exercise := _called_with(statement, "check", ast.Name):
            return _PageCell(cell, "check", exercise.id)
    return _PageCell(cell, "experiment")


def _text_cell(cell: Cell, path: Path) -> _PageCell:
    """A text, or one that a person marks: `# %% [markdown] tags=["marked-by-hand", "reasoning", "10"]`."""
    if MARKED_BY_HAND not in cell.tags:
        return _PageCell(cell, "text")
    match list(cell.tags):
        case [_, name, points] if (
            cell.kind == "markdown" and name.isidentifier() and points.isdecimal() and int(points)
        ):
            return _PageCell(cell, "marked", name, int(points))
    raise AuthoringError(
        f"{path}:{cell.line}: a text that a person marks is a markdown cell with three tags: "
        f'tags=["{MARKED_BY_HAND}", its name, its points], as in ["{MARKED_BY_HAND}", "reasoning", "10"]'
    )


def _answer_name(statement: ast.stmt) -> str:
    decorators = getattr(statement, "decorator_list", [])
    return statement.name if any(isinstance(d, ast.Name) and d.id == "fill" for d in decorators) else ""


def _called_with(statement: ast.stmt, function: str, kind: type[ast.expr]) -> ast.expr | None:
    """The first argument, of the AST class `kind`, when the statement is a plain call of `function`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == function and call.args:
        return call.args[0] if isinstance(call.args[0], kind) else None
    return None


def _cell_ids(page: Sequence[_PageCell]) -> list[str]:
    """One unique id for each cell: from the name where there is one, else from kind and text."""
    ids, seen = [], Counter()
    for page_cell in page:
        wanted = page_cell.cell_id or f"{page_cell.cell.kind}-{_short_hash(page_cell.cell.source)}"
        seen[wanted] += 1
        ids.append(wanted if seen[wanted] == 1 else f"{wanted}-{seen[wanted]}")
    return ids


def _notebook_cell(page_cell: _PageCell, cell_id: str, blanks: Mapping) -> NotebookNode:
    import nbformat.v4

    make = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    cell = make.get(page_cell.cell.kind, nbformat.v4.new_raw_cell)(page_cell.cell.source, id=cell_id)
    if page_cell.cell.tags:
        cell.metadata["tags"] = list(page_cell.cell.tags)
    if page_cell.grade_id:
        solution = page_cell.role in ("answer", "question", "marked")
        grade = page_cell.role in ("check", "marked")
        cell.metadata["nbgrader"] = {
            "schema_version": 3,
            "grade_id": page_cell.grade_id,
            "solution": solution,
            "grade": grade,
            "locked": not solution,
            "task": False,
        }
        if grade:
            cell.metadata["nbgrader"]["points"] = page_cell.points or blanks[page_cell.name].points
    return cell


def _release_hash(cells: Iterable[NotebookNode]) -> str:
    """A short hash of what the reader of a page sees, the same for the source notebook and the released page."""
    return _short_hash("\0".join(f"{cell.cell_type}\0{cell.id}\0{released_source(cell)}" for cell in cells))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def released_source(cell: NotebookNode) -> str:
    """What a cell of a source notebook says in the released page."""
    return _released(cell.source, CODE_STUB if cell.cell_type == "code" else TEXT_STUB)


def _released(source: str, stub: str = CODE_STUB) -> str:
    """`source` with its solution regions replaced as nbgrader replaces them."""
    lines, inside = [], False
    for line in source.split("\n"):
        if BEGIN in line:
            lines.append(line[: len(line) - len(line.lstrip())] + stub)
        if BEGIN in line or END in line:
            inside = BEGIN in line
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


# --- what can be wrong with a page ----------------------------------------------------------------------------------


def _problems(page: Sequence[_PageCell], path: Path, blanks: Mapping) -> Iterator[tuple[int, str]]:
    """Line and sentence of everything that an author has to change."""
    yield from _setup_problems(page)
    for page_cell in page:
        yield from _cell_problems(page_cell)
    yield from _exercise_problems(page, path, blanks)
    yield from _order_problems(page, blanks)


def _setup_problems(page: Sequence[_PageCell]) -> Iterator[tuple[int, str]]:
    code = [page_cell for page_cell in page if page_cell.cell.kind == "code"]
    setups = [page_cell for page_cell in page if page_cell.role == "setup"]
    if code and code[0].role != "setup":
        yield code[0].cell.line, 'the first code cell is not the setup cell. Begin it with `# %% tags=["setup"]`'
    for page_cell in setups[1:]:
        yield page_cell.cell.line, "there is a setup cell already. A page has one, its first code cell"


def _cell_problems(page_cell: _PageCell) -> Iterator[tuple[int, str]]:
    cell, role = page_cell.cell, page_cell.role
    lines = cell.source.split("\n")
    marks = [(line, BEGIN if BEGIN in line else END) for line in lines if BEGIN in line or END in line]
    if role not in ("answer", "question", "marked"):
        if marks:
            line = cell.line + lines.index(marks[0][0])
            yield (
                line,
                f"a solution region ({marks[0][1]}) outside an answer cell. Put it under `@fill` or in a question",
            )
    elif [mark for _, mark in marks] != [BEGIN, END] * (_regions_allowed(cell, marks) if role == "answer" else 1):
        what = {"answer": "the answer cell of", "marked": "the text"}.get(role, "question") + f" {page_cell.name}"
        yield cell.line, f"{what} needs one line `### {BEGIN}` and below it one line `### {END}` around the answer"
    elif role != "marked":
        yield from _stub_problems(page_cell)
    if role in ("answer", "check"):
        yield from _company_problems(page_cell)


def _regions_allowed(cell: Cell, marks: Sequence) -> int:
    """How many regions an answer cell may have: one, or in a class one for each method, as many as there are."""
    is_class = any(isinstance(each, ast.ClassDef) and _answer_name(each) for each in ast.parse(cell.source).body)
    return max(len(marks) // 2, 1) if is_class else 1


def _stub_problems(page_cell: _PageCell) -> Iterator[tuple[int, str]]:
    try:
        ast.parse(_released(page_cell.cell.source))
    except SyntaxError as problem:
        yield (
            page_cell.cell.line,
            f"without its answer the cell of {page_cell.name} is no Python ({problem.msg}). The region is replaced by "
            f"`{CODE_STUB}`: put whole statements, or whole arguments, between the markers",
        )


def _company_problems(page_cell: _PageCell) -> Iterator[tuple[int, str]]:
    """An answer stands alone with what it needs; a check ends its cell, so that the cell ends in a number."""
    cell = page_cell.cell
    tree = ast.parse(cell.source)
    answers = [name for name in map(_answer_name, ast.walk(tree)) if name]
    checks = [statement for statement in tree.body if _called_with(statement, "check", ast.Name)]
    if page_cell.role == "answer" and (len(answers) > 1 or checks):
        yield cell.line, f"the answer cell of {page_cell.name} holds another answer or a check. Give each its own cell"
    if page_cell.role == "check" and (len(checks) > 1 or tree.body[-1] is not checks[-1]):
        yield (
            cell.line,
            f"`check({page_cell.name})` is not the last and only check of its cell. Give it a cell of its own",
        )
    if page_cell.role == "check" and answers:
        yield cell.line, f"the check cell of {page_cell.name} holds an answer. Give each its own cell"


def _exercise_problems(page: Sequence[_PageCell], path: Path, blanks: Mapping) -> Iterator[tuple[int, str]]:
    """Unknown, foreign, duplicate and missing exercises; answers without a check and checks without an answer."""
    seen = {"answer": {}, "check": {}, "question": {}, "marked": {}}
    for page_cell in page:
        role, name, line = page_cell.role, page_cell.name, page_cell.cell.line
        if role not in seen:
            continue
        if name in seen[role]:
            yield line, f"the {role} of {name} is here twice: first in line {seen[role][name]}. Remove one"
        elif role in ("answer", "check") and (problem := _name_problem(name, path, blanks)):
            yield line, problem
        elif role == "check" and name not in seen["answer"]:
            yield (
                line,
                f"check({name}) has no answer cell above it. Put one with `@fill` and `def {name}(...)` before it",
            )
        seen[role].setdefault(name, line)
    for name, line in seen["answer"].items():
        if name not in seen["check"]:
            yield line, f"the answer {name} is never checked. Put a cell `check({name})` below it"
    for name in _names_of(path, blanks):
        if name not in seen["answer"]:
            yield 1, f"exercise {blanks[name].exercise}, {name}, has no answer cell on this page. Add one"


def _name_problem(name: str, path: Path, blanks: Mapping) -> str:
    if name not in blanks:
        known = ", ".join(_names_of(path, blanks)) or "none"
        return f"there is no exercise {name!r}. The exercises of {path.stem} are: {known}"
    if blanks[name].chapter.name != path.stem:
        return f"exercise {name} belongs to {blanks[name].chapter.name}, not to {path.stem}"
    return ""


def _names_of(path: Path, blanks: Mapping) -> list[str]:
    names = [name for name in blanks if blanks[name].chapter.name == path.stem]
    return sorted(names, key=lambda name: blanks[name].order)


def _order_problems(page: Sequence[_PageCell], blanks: Mapping) -> Iterator[tuple[int, str]]:
    last = None
    for page_cell in page:
        if page_cell.role != "answer" or page_cell.name not in blanks:
            continue
        blank = blanks[page_cell.name]
        if last is not None and blank.order < blanks[last].order:
            yield (
                page_cell.cell.line,
                f"exercise {blank.exercise}, {page_cell.name}, comes after {blanks[last].exercise}, {last}. "
                "Move the cell or change the numbers",
            )
        last = page_cell.name


# --- all pages ------------------------------------------------------------------------------------------------------


def build(
    out: Path | str | None = None,
    chapters: Sequence[Chapter | str] | None = None,
    *,
    solutions: Path | str = SOLUTIONS,
    blanks: Mapping | None = None,
) -> list[Path]:
    """Write the released pages of `chapters` to `out` (notebooks/) and return their paths.

    When `chapters` is omitted these are all chapters, and the pages of solutions/ without a number (the glossary).

    Everything is built before anything is replaced, and each page is replaced whole: a build that fails changes
    nothing. Pages without a source are removed when all are built.

    Raises AuthoringError for what is wrong with a source, RuntimeError when nbgrader fails.
    """
    out = Path(NOTEBOOKS if out is None else out)
    pages = _released_pages(_names(chapters, Path(solutions)), Path(solutions), blanks)
    out.mkdir(parents=True, exist_ok=True)
    for relative, content in pages.items():
        write_page(out / relative, content)
    if chapters is None:
        for stale in _pages_in(out) - set(pages):
            (out / stale).unlink()
            if not any((out / stale).parent.iterdir()):
                (out / stale).parent.rmdir()
    return [out / relative for relative in pages]


def out_of_step(
    notebooks: Path | str | None = None, *, solutions: Path | str = SOLUTIONS, blanks: Mapping | None = None
) -> list[str]:
    """One sentence for each page of notebooks/ that a fresh build would change; empty when all are in step."""
    notebooks = Path(NOTEBOOKS if notebooks is None else notebooks)
    fresh = _released_pages(_names(None, Path(solutions)), Path(solutions), blanks)
    differences = []
    for relative in sorted(set(fresh) | _pages_in(notebooks)):
        page = notebooks / relative
        if relative not in fresh:
            differences.append(f"{page} has no source in solutions/. Run `make notebooks`, which removes it")
        elif not page.is_file():
            differences.append(f"{page} is missing. Run `make notebooks`")
        elif page.read_bytes() != fresh[relative]:
            differences.append(f"{page} differs from what solutions/{page.stem}.py gives. Run `make notebooks`")
    return differences


def leaked_lines(released: NotebookNode, source: NotebookNode) -> list[str]:
    """The lines of the answers in `source` that stand anywhere in `released`: in a cell, an output or the metadata.

    released: a released page. source: a source notebook (`source_notebook`). Only lines that could give something
    away count: at least 20 characters, and not part of the code around the answers. A line counts with and without
    the comment at its end.
    """
    given = "\n".join(_released(cell.source) for cell in source.cells if cell.cell_type == "code")
    page = "\n".join(_strings_in(released))
    return [line for line in _solution_lines(source) if line in page and line not in given]


def _solution_lines(source: NotebookNode) -> Iterator[str]:
    for cell in source.cells:
        inside = False
        for line in cell.source.split("\n"):
            if BEGIN in line or END in line:
                inside = BEGIN in line
            elif inside:
                whole, code = line.strip().rstrip(","), line.partition("  #")[0].strip().rstrip(",")
                yield from (text for text in dict.fromkeys((whole, code)) if len(text) >= SHORTEST_LEAK)


def _strings_in(node) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _strings_in(value)
    elif isinstance(node, list):
        yield "\n".join(text for value in node for text in _strings_in(value))


def _names(chapters: Sequence[Chapter | str] | None, solutions: Path) -> list[str]:
    """The pages to build: `chapters`, or all of them and the pages without a number (the glossary)."""
    if chapters is not None:
        return [(chapter if isinstance(chapter, Chapter) else find_chapter(chapter)).name for chapter in chapters]
    known = [chapter.name for chapter in CHAPTERS]
    others = sorted(path.stem for path in solutions.glob("*.py") if path.stem not in known)
    for name in others:
        if name[0].isdigit():
            raise AuthoringError(f"{solutions / name}.py: no chapter has this name. Add it to lowprec_lab/chapters.py")
    return known + others


def _pages_in(notebooks: Path) -> set[Path]:
    """The generated pages, relative to the folder: NAME/NAME.ipynb."""
    found = notebooks.glob("*/*.ipynb")
    return {page.relative_to(notebooks) for page in found if page.stem == page.parent.name}


def _released_pages(names: Sequence[str], solutions: Path, blanks: Mapping | None) -> dict[Path, bytes]:
    """What nbgrader's generate_assignment makes of each page: path below notebooks/ and content."""
    import nbformat

    sources = {name: source_notebook(solutions / f"{name}.py", blanks) for name in names}
    with tempfile.TemporaryDirectory(prefix="lowprec-lab-") as folder:
        course = Path(folder).resolve()
        for name, notebook in sources.items():
            page = course / "source" / name / f"{name}.ipynb"
            page.parent.mkdir(parents=True)
            nbformat.write(notebook, page)
        for name in sources:
            _generate_assignment(course, name)
        pages = [Path(name) / f"{name}.ipynb" for name in sources]
        return {page: _with_one_newline((course / "release" / page).read_bytes()) for page in pages}


def _with_one_newline(content: bytes) -> bytes:
    return content.rstrip(b"\n") + b"\n"


def _generate_assignment(course: Path, name: str) -> None:
    """nbgrader's `generate_assignment --no-db`, without the settings of whoever runs it."""
    from nbgrader.converters import GenerateAssignment
    from nbgrader.coursedir import CourseDirectory
    from traitlets.config import Config

    config = Config()
    config.CourseDirectory.root = str(course)
    config.CourseDirectory.assignment_id = name
    config.GenerateAssignment.no_database = True
    config.SaveCells.enabled = False
    config.ClearSolutions.code_stub = {"python": CODE_STUB}
    converter = GenerateAssignment(coursedir=CourseDirectory(config=config), config=config)
    report = io.StringIO()
    handler = logging.StreamHandler(report)
    converter.log.addHandler(handler)
    try:
        converter.start()
    except Exception as problem:
        raise RuntimeError(
            f"nbgrader could not generate the page of {name}. It reports:\n{report.getvalue()}"
        ) from problem
    finally:
        converter.log.removeHandler(handler)


def write_page(path: Path, content: bytes) -> None:
    """Write `content` to `path` in one step; leave a file alone that has it already. Raises OSError."""
    if path.is_file() and path.read_bytes() == content:
        return
    try:
        write_whole(path, content)
    except WorkspaceError as problem:  # its advice is for a learner's folder
        raise problem.__cause__ or problem from None
