"""The source of an answer: found for a live function, tried on its own, and loaded again from where it was saved.

An answer cell stands alone: what it needs beyond the chapter's own names is in the cell or in the page's one
"Your helpers" cell. So the same source can be saved, loaded in another process, and judged there.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import importlib
import importlib.util
import inspect
import io
import linecache
import math
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lowprec_lab import formats
from lowprec_lab.answers import load_answers
from lowprec_lab.blanks import BLANKS, FINDING, Blank, earlier_than, in_order
from lowprec_lab.chapters import CHAPTERS
from lowprec_lab.percent import Cell, read_cells

HELPERS_MARK = "# Your helpers"
_SOLUTION_MARKS = ("### BEGIN SOLUTION", "### END SOLUTION")


class AnswerError(Exception):
    """An answer cannot be used as it stands; the text says why and what to do. Notebooks show the text alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass(frozen=True)
class Source:
    """The text of an answer's cell, and of the helpers it may use."""

    text: str
    helpers: str = ""


def source_of(function: Callable) -> Source | None:
    """The cell that defines a live function or class, with the page's helpers; None where Python does not know it."""
    code = _code_of(function)
    lines = linecache.getlines(code.co_filename) if code is not None else []
    if not lines:
        return None
    text, helpers = "".join(lines), _helpers_in_kernel()
    if "\n# %%" in text:  # a page run as a script: only the cell around the function counts
        cells = read_cells(text)
        text = next((c.source for c in reversed(cells) if c.line <= code.co_firstlineno), text)
        helpers = _helpers_in(cells)
    return Source(text, helpers)


def _code_of(thing: object) -> types.CodeType | None:
    function = inspect.unwrap(thing) if callable(thing) else thing
    if inspect.isclass(function):
        methods = (value for value in vars(function).values() if inspect.isfunction(value))
        function = next(methods, None)
    return getattr(function, "__code__", None)


def ipython_shell() -> object | None:
    """The shell of the notebook or terminal that this runs in; None outside IPython."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def _cells_run() -> list[str]:
    """The cells that were run in this kernel, the last one first; none outside IPython."""
    shell = ipython_shell()
    return list(reversed(shell.user_ns.get("In", []))) if shell is not None else []


def _helpers_in_kernel() -> str:
    return next((cell for cell in _cells_run() if cell.lstrip().startswith(HELPERS_MARK)), "")


def last_cell_defining(name: str) -> str:
    """The last cell run in this kernel that fills in `name`, whether it got through or not; "" if there is none."""
    return next((cell for cell in _cells_run() if "@fill" in cell and _defines(cell, name)), "")


def _helpers_in(cells: list[Cell]) -> str:
    return next((c.source for c in cells if c.kind == "code" and c.source.lstrip().startswith(HELPERS_MARK)), "")


def is_untouched(source: str, name: str) -> bool:
    """Whether the definition of `name` still has no body: a docstring, `...`, `pass` or `raise NotImplementedError`."""
    body = next((n.body for n in ast.walk(_parse(source, name)) if getattr(n, "name", None) == name), None)
    return body is not None and all(_does_nothing(statement) for statement in body)


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef):  # a method of a class
        return all(_does_nothing(inner) for inner in statement.body)
    if isinstance(statement, ast.Raise):
        raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
        return getattr(raised, "id", "") == "NotImplementedError"
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass) or constant


def _parse(source: str, name: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise AnswerError(f"the answer to {name} has a syntax error in line {error.lineno}: {error.msg}") from None


def chapter_names(blank: Blank, earlier: Callable[[str], Callable]) -> dict[str, object]:
    """What an answer finds without an import: torch (nn, F, dist), numpy, math, the formats, the names of its chapter.

    earlier: gives the function for each blank that the answer may call. Its own name and later blanks are not there.
    """
    module = importlib.import_module(f"lowprec_lab.{blank.module}")
    given = {name: value for name, value in vars(module).items() if not name.startswith("_") and name not in BLANKS}
    names = {"math": math, "np": np, "torch": torch, "Tensor": torch.Tensor, "nn": torch.nn, "F": torch.nn.functional}
    names["dist"] = torch.distributed
    names |= {name: getattr(formats, name) for name in formats.__all__}
    names |= {name: value for name, value in given.items() if not inspect.ismodule(value)}
    names |= {other.name: earlier(other.name) for other in earlier_than(blank.name)}
    names.pop("blank", None)
    return names


def load(source: Source, blank: Blank, earlier: Callable[[str], Callable], label: str) -> Callable:
    """Run an answer's cell in a namespace of its own and return what it defines as `blank.name`.

    Only definitions, assignments and imports are run: a call such as `check(...)` in the same cell is not.
    label: a name for the source in tracebacks, such as "answers/bits.py: decode". Raises AnswerError.
    """
    namespace = chapter_names(blank, earlier) | {"fill": lambda function: function}
    for part, text in (("helpers", source.helpers), (blank.name, source.text)):
        if text:
            _run(text, namespace, blank, f"<{label}{'' if part == blank.name else ' helpers'}>")
    if not callable(namespace.get(blank.name)):
        raise AnswerError(f"the cell defines no {blank.name} (exercise {blank.exercise})")
    _require_names(namespace, blank, f"<{label}")
    return namespace[blank.name]


def _run(text: str, namespace: dict, blank: Blank, filename: str) -> None:
    tree = _parse(text, blank.name)
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Expr, ast.For, ast.While))]
    for node in tree.body:
        if isinstance(
            node, (ast.FunctionDef, ast.ClassDef)
        ):  # the cell may have imported the real fill, which loads it
            node.decorator_list = [each for each in node.decorator_list if not ast.unparse(each).endswith("fill")]
    # The learner's line appears in tracebacks and verdicts though there is no such file.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(compile(tree, filename, "exec"), namespace)
    except NameError as error:
        raise AnswerError(_missing_text(blank, [error.name])) from None
    except Exception as error:
        raise AnswerError(
            f"the answer to {blank.name} does not run on its own: {type(error).__name__}: {error}. Run its cell in a "
            "fresh kernel to see where."
        ) from None


def _require_names(namespace: dict, blank: Blank, label: str) -> None:
    """Raise AnswerError for names that the answer uses and nothing in its own cell or chapter defines."""
    used: list[str] = []
    for value in list(namespace.values()):
        code = _code_of(value) if inspect.isfunction(value) or inspect.isclass(value) else None
        if code is not None and code.co_filename.startswith(label):
            used += _global_names(code)
            if inspect.isclass(value):
                methods = [m for m in vars(value).values() if inspect.isfunction(m)]
                used += [name for method in methods for name in _global_names(method.__code__)]
    missing = [name for name in dict.fromkeys(used) if name not in namespace and not hasattr(builtins, name)]
    if missing:
        raise AnswerError(_missing_text(blank, missing))


def _global_names(code: types.CodeType) -> list[str]:
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    nested = [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return own + [name for inner in nested for name in _global_names(inner)]


def _missing_text(blank: Blank, missing: list[str]) -> str:
    later = [name for name in missing if name in BLANKS]
    if later:
        which = ", ".join(f"{name} (exercise {BLANKS[name].exercise})" for name in later)
        return f"{blank.name} uses {which}, which comes later. An answer may use earlier exercises only."
    modules = [name for name in missing if importlib.util.find_spec(name) is not None]
    if modules:
        return f"{blank.name} uses {', '.join(modules)}. Import it in this cell, so that the answer stands alone."
    names = ", ".join(missing)
    return (
        f"{blank.name} uses {names}, which this cell does not define. An answer stands alone, so that it can be saved "
        f"and judged: move {names} into this cell, or into the cell that begins with `{HELPERS_MARK}`."
    )


def references_folder() -> Path | None:
    """Where reference answers are: LOWPREC_REFERENCES, else `solutions/` of a clone; None in a class's package."""
    given = os.environ.get("LOWPREC_REFERENCES")
    folder = Path(given).expanduser() if given else Path(__file__).parents[1] / "solutions"
    return folder if folder.is_dir() else None


def sources_in(folder: Path) -> dict[str, Source]:
    """The answers in a folder by exercise name: saved answers (bits.py) and pages (01_bit_layouts.py or .ipynb)."""
    found: dict[str, Source] = {}
    for chapter in CHAPTERS:
        saved = load_answers(chapter.module, folder)
        found |= {name: Source(answer.source, saved.helpers or "") for name, answer in saved.answers.items()}
        for path in (folder / f"{chapter.name}.py", folder / f"{chapter.name}.ipynb"):
            if path.is_file():
                cells = _notebook_cells(path) if path.suffix == ".ipynb" else read_cells(path.read_text("utf-8"))
                found |= _answers_in(cells)
    return found


def _notebook_cells(path: Path) -> list[Cell]:
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    return [Cell(cell.cell_type, cell.source, (), 1) for cell in notebook.cells]


def _answers_in(cells: list[Cell]) -> dict[str, Source]:
    helpers, found = _helpers_in(cells), {}
    for cell in cells:
        if cell.kind == "code" and "@fill" in cell.source:
            for blank in in_order():
                if _defines(cell.source, blank.name) and not is_untouched(cell.source, blank.name):
                    found[blank.name] = Source(cell.source, helpers)
    return found


def _defines(source: str, name: str) -> bool:
    return any(line.startswith((f"def {name}(", f"class {name}(", f"class {name}:")) for line in source.splitlines())


@functools.lru_cache(maxsize=8)
def _references(folder: Path) -> dict[str, Source]:
    return sources_in(folder)


def reference_source(name: str) -> Source | None:
    """The source of the reference answer to `name`, or None where no reference is installed."""
    folder = references_folder()
    return _references(folder).get(name) if folder else None


@functools.lru_cache(maxsize=256)
def reference(name: str) -> Callable | None:
    """The reference answer to `name`, built on the references of earlier exercises only; None if there is none."""
    source = reference_source(name)
    return source and load(source, BLANKS[name], _reference_later(name), f"reference: {name}")


def _reference_later(user: str) -> Callable[[str], Callable]:
    """For each earlier blank, a function that finds its reference when it is first called."""

    def find(name: str) -> Callable:
        function = reference(name)
        if function is None:
            raise AnswerError(f"{user} calls {name}, and no reference answer for {name} is installed")
        return function

    return lambda name: found_when_used(name, find)


def found_when_used(name: str, find: Callable[[str], Callable]) -> Callable:
    """A function that stands in for a blank, and finds it when it is first called, or first inherited from."""
    found: list[Callable] = []  # kept here, so that torch.compile can follow a second call

    def look() -> None:
        with FINDING:
            if not found:
                found.append(find(name))

    def call(*args: object, **kwargs: object) -> object:
        if not found:
            look()
        return found[0](*args, **kwargs)

    def as_a_base(_bases: tuple) -> tuple:
        if not found:
            look()
        return (found[0],)

    call.__mro_entries__ = as_a_base  # what Python asks for where a base is no class
    return call


def without_marks(text: str) -> str:
    """An answer's text without the lines that mark where its page is cleared for learners."""
    return "\n".join(line for line in text.splitlines() if line.strip() not in _SOLUTION_MARKS)


def earlier_sources(blank: Blank, sources: Mapping[str, Source]) -> dict[str, Source]:
    """What stands in for earlier exercises: the references, so that a mistake costs once; else the submission's own."""
    found = {other.name: reference_source(other.name) or sources.get(other.name) for other in earlier_than(blank.name)}
    return {name: source for name, source in found.items() if source is not None}


def earlier_answers(sources: Mapping[str, Source]) -> Callable[[str], Callable]:
    """For each earlier exercise, a function that loads its source when it is first called."""

    def find(name: str) -> Callable:
        if name not in sources:
            raise AnswerError(f"{name} (exercise {BLANKS[name].exercise}) is not among the answers")
        return load(sources[name], BLANKS[name], earlier, f"reference: {name}")

    def earlier(name: str) -> Callable:
        return found_when_used(name, find)

    return earlier
