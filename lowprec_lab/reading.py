"""Show a passage of real code from an installed package, or say where to read it when it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def installed_lines(package: str, file: str, mark: str, *, before: int = 0, after: int = 12, link: str = "") -> str:
    """The lines of an installed package's file around the first line that contains `mark`, numbered.

    package: importable name ("torch"). file: the file's name or the end of its path ("util/BFloat16.h").
    link: where to read it when the package, the file or the mark is not there; that sentence is returned then.
    """
    for path in _candidates(package, file):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        at = next((number for number, line in enumerate(lines) if mark in line), None)
        if at is not None:
            shown = range(max(0, at - before), min(len(lines), at + after))
            return f"{package}: {path.name}\n" + "\n".join(f"{n + 1:>5}  {lines[n]}" for n in shown)
    return f"{file} with {mark!r} is not in the {package} that is installed here. Read it at {link}"


def _candidates(package: str, file: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations)))
    return sorted(path for path in root.rglob(Path(file).name) if path.as_posix().endswith(file))
