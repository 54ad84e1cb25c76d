"""What the sandbox's file system is made of: an interpreter, torch and numpy, and the package without its graders.
A C compiler too, where there is one: exercises in C are compiled in there.

Only what is listed here exists in there. No grader, reference, seed, gradebook or other submission is bound, so none
can be found, whatever an answer does.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
INSIDE = "/lab"
# What an answer may write to: small folders of its own, which vanish with it.
HOME = "/home/answer"
SCRATCH = ("/tmp", "/dev/shm", HOME)
# What a new worker says once it is ready, and what it then waits for.
READY, GO = b"+", b"."

# Where the package's own imports begin; what these import when they are loaded is needed too.
_ROOTS = ("grading/zygote.py", "grading/worker.py")
# Never in the sandbox. An import that reaches one of these from the roots is a fault of the package.
_SECRET = ("graders", "exercises", "terminal", "bench", "grading/judge", "grading/course", "grading/processes")
_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/sys/devices/system/cpu")


class ViewError(Exception):
    """What an answer needs cannot be shown without showing what it must not see, or is not there at all."""


@dataclass
class View:
    """Read-only binds (source on this machine, place in the sandbox), links, and folders that are covered as empty.

    python: the interpreter, in both. environment: variables that it needs.
    """

    binds: list[tuple[Path, str]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    covered: list[str] = field(default_factory=list)
    python: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def make_view(package: Path = PACKAGE) -> View:
    """The view for this interpreter and the package in the folder `package`. Raises ViewError."""
    view = View(python=os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
    _bind_system(view)
    _bind_python(view)
    _bind_compiler(view)
    for name, path in libraries().items():
        view.binds.append((path, f"{INSIDE}/site-packages/{name}"))
    for name in package_files(package):
        view.binds.append((package / name, f"{INSIDE}/package/lowprec_lab/{name}"))
    return view


def _bind_system(view: View) -> None:
    for place in _SYSTEM_LIBRARIES:
        if os.path.islink(place):
            view.links.append((os.readlink(place), place))
        elif os.path.isdir(place):
            _bind_libraries(view, Path(place))
    view.binds += [(Path(place), place) for place in _SYSTEM_FILES if os.path.exists(place)]


def _bind_python(view: View) -> None:
    prefix = Path(os.path.realpath(sys.base_prefix))
    view.binds.append((Path(view.python), view.python))
    for folder in (prefix / "lib", prefix / "lib64"):
        known = any(folder.is_relative_to(target) for _, target in view.binds)
        if folder.is_dir() and not folder.is_symlink() and not known:
            _bind_libraries(view, folder)
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):  # else another libpython of the system's might be taken for it
        view.environment["LD_LIBRARY_PATH"] = str(prefix / "lib")


def _bind_compiler(view: View) -> None:
    """Bind the C compiler, the programs that it calls, and the headers, as far as they are not in a library folder."""
    from lowprec_lab.c_code import find_compiler  # imports torch, which this file must not

    compiler = find_compiler()
    if compiler is None:
        return
    asked = [_said_by(compiler, f"-print-prog-name={name}").strip() for name in ("as", "ld", "collect2", "cc1")]
    programs = [compiler, *filter(None, (shutil.which(name) for name in asked if name))]
    searched = _said_by(compiler, "-E", "-v", "-x", "c", os.devnull).partition("<...> search starts here:")[2]
    headers = [line.strip() for line in searched.partition("End of search list")[0].splitlines()]
    for place in dict.fromkeys([*programs, *filter(os.path.isdir, headers)]):
        place = os.path.normpath(place)
        if not any(Path(place).is_relative_to(target) for _, target in view.binds):
            view.binds.append((Path(os.path.realpath(place)), place))
    view.environment["CC"] = compiler


def _said_by(compiler: str, *arguments: str) -> str:
    try:
        done = subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=20, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _bind_libraries(view: View, folder: Path) -> None:
    """Bind a lib folder, with every folder of installed Python packages in it covered."""
    view.binds.append((folder, str(folder)))
    for pattern in ("python*/site-packages", "python*/dist-packages"):
        view.covered += [str(place) for place in sorted(folder.glob(pattern)) if not place.is_symlink()]


def libraries() -> dict[str, Path]:
    """{file or folder name: path} of torch, numpy and what they require, as far as it is installed."""
    found: dict[str, Path] = {}
    for distribution in _with_requirements(["torch", "numpy"]):
        for name in _top_levels(distribution):
            path = Path(os.path.realpath(distribution.locate_file(name)))
            if path.exists():
                found[name] = path
    for needed in ("torch", "numpy"):
        if needed not in found:
            spec = importlib.util.find_spec(needed)
            if spec is None or spec.origin is None:
                raise ViewError(f"{needed} is not installed for {sys.executable}")
            found[needed] = Path(os.path.realpath(spec.origin)).parent
    return found


def _with_requirements(names: list[str]) -> Iterator[importlib.metadata.Distribution]:
    waiting, seen = list(names), set()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a requirement of another platform
        yield distribution
        for text in distribution.requires or ():
            requirement, _, marker = text.partition(";")
            if "extra" not in marker:
                waiting.append(re.match(r"[\w.-]+", requirement.strip())[0])


def _top_levels(distribution: importlib.metadata.Distribution) -> list[str]:
    tops = {Path(str(file)).parts[0] for file in distribution.files or ()}
    ignored = (".dist-info", ".egg-info", ".pth")
    return sorted(top for top in tops if top not in ("..", "__pycache__") and not top.endswith(ignored))


def package_files(package: Path) -> list[str]:
    """The files of the package that answers need: the roots, and what these import as they are loaded."""
    waiting = [*_ROOTS, *_chapter_modules(package)]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        if any(name == f"{secret}.py" or name.startswith(f"{secret}/") for secret in _SECRET):
            raise ViewError(f"an answer's process would import {name}, which it must not see")
        found.add(name)
        waiting += [parent for parent in _parents(name) if (package / parent).is_file()]
        waiting += _imports(package, name)
    return sorted(found | {path.name for path in package.glob("*.c")})  # what answers in C stand in, and what runs them


def _chapter_modules(package: Path) -> list[str]:
    """The modules that chapters.py of this package lists, read without running it."""
    tree = ast.parse((package / "chapters.py").read_text("utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Chapter")
    return [f"{ast.literal_eval(call.args[1])}.py" for call in calls]


def _parents(name: str) -> list[str]:
    return ["__init__.py", *(f"{parent}/__init__.py" for parent in Path(name).parents if str(parent) != ".")]


def _imports(package: Path, name: str) -> list[str]:
    """Files of the package that this one imports outside of functions."""
    wanted: list[str] = []
    for node in _outside_functions(ast.parse((package / name).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            wanted += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            wanted += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    places = [each.split(".")[1:] for each in wanted if each.split(".")[0] == "lowprec_lab"]
    paths = [path for parts in places if parts for path in ("/".join(parts) + ".py", "/".join(parts) + "/__init__.py")]
    return [path for path in paths if (package / path).is_file()]


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from _outside_functions(node)
