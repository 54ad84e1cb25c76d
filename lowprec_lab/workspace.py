"""The learner's folder: where it is, chapters opened in it and updated, answers saved.

A released page is copied to `<work>/<chapter>.ipynb`. What was given is kept in `<work>/.released/`, to tell later what
the learner changed; whatever an update replaces is kept in `<work>/kept/`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowprec_lab.answers import Answers, SavedAnswer, load_answers, save_answer
from lowprec_lab.chapters import find_chapter
from lowprec_lab.files import WorkspaceError, explained, find_clone, keep_copy, locked, work_folder, write_whole

__all__ = [
    "Answers",
    "Opened",
    "SavedAnswer",
    "WorkspaceError",
    "load_answers",
    "open_chapter",
    "save_answer",
    "work_folder",
]

GLOSSARY = "glossary"

_RELOAD = (
    "If the page is open in JupyterLab, choose File > Reload Notebook from Disk there; "
    "do not save the old one over the new one."
)


@dataclass(frozen=True)
class Opened:
    """A chapter in the learner's folder.

    path: the page. status: "copied" (it was not there, or could not be read), "unchanged" or "updated".
    message: sentences for the learner. kept: the page as it was before, or None if nothing was replaced.
    """

    path: Path
    status: str
    message: str
    kept: Path | None = None

    def __str__(self) -> str:
        return self.message


def open_chapter(text: str, notebooks: Path | None = None) -> Opened:
    """Have the chapter's page in the learner's folder, in its newest release, with the learner's cells in it.

    text: a chapter's number ("1", "01"), name or module. notebooks: the folder of released pages; `LOWPREC_NOTEBOOKS`,
    else `notebooks/` in the clone, when omitted. Nothing is ever overwritten: a page that is replaced is kept.
    Raises ValueError for an unknown chapter, WorkspaceError when there are no released pages or nothing can be written.
    """
    chapter = find_chapter(text)
    released = _released_page(chapter.name, notebooks)
    path = work_folder() / f"{chapter.name}.ipynb"
    opened = _open_locked(path, released)
    _open_glossary(notebooks)
    return opened


def _open_locked(path: Path, released: bytes) -> Opened:
    with locked(path):
        for _ in range(5):
            opened = _open(path, released)
            if opened is not None:
                return opened
    raise WorkspaceError(f"{path} kept changing while it was being updated. Close it in JupyterLab, then try again.")


def _open_glossary(notebooks: Path | None) -> None:
    """Have the newest glossary beside the chapter: its pages link to it. A release without one is no fault."""
    try:
        released = _released_page(GLOSSARY, notebooks)
    except WorkspaceError:
        return
    _open_locked(work_folder() / f"{GLOSSARY}.ipynb", released)


def _released_page(name: str, notebooks: Path | None) -> bytes:
    from lowprec_lab.pages import read_page

    folder = notebooks or os.environ.get("LOWPREC_NOTEBOOKS", "").strip() or None
    if folder is None:
        clone = find_clone()
        if clone is None:
            raise WorkspaceError(
                "The released pages are not part of an installed package. Clone the project, or copy its notebooks/ "
                "folder to this machine, and set LOWPREC_NOTEBOOKS to that folder."
            )
        folder = clone / "notebooks"
    path = Path(folder).expanduser() / name / f"{name}.ipynb"
    if not path.is_file():
        raise WorkspaceError(
            f"There is no released page {path}. Get the newest release (git pull), or set LOWPREC_NOTEBOOKS "
            "to the folder that holds the released pages."
        )
    with explained(path, "read"):
        content = path.read_bytes()
    try:
        read_page(content)
    except ValueError as error:
        raise WorkspaceError(f"The released page {path} is broken: {error}. Get it again (git pull).") from error
    return content


def _open(path: Path, released: bytes) -> Opened | None:
    """One attempt; None when the page was saved by somebody else meanwhile."""
    from lowprec_lab.pages import is_of_release, read_page, release_of

    given_path = path.parent / ".released" / path.name
    if not os.path.lexists(path):
        if not write_whole(path, released, lambda: not os.path.lexists(path)):
            return None
        write_whole(given_path, released)
        return Opened(path, "copied", f"Your copy of the page is {path}.")
    with explained(path, "read"):
        before = path.read_bytes()
    try:
        mine = read_page(before)
    except ValueError as error:
        return _start_afresh(path, before, released, given_path, error)
    new, given = read_page(released), _given_page(given_path)
    if not is_of_release(mine, given, new):
        return _update(path, before, released, given_path)
    if given is None or release_of(given) != release_of(new):  # interrupted after the page itself was written
        write_whole(given_path, released)
    return Opened(path, "unchanged", f"Your page {path} is of the newest release.")


def _given_page(path: Path):
    from lowprec_lab.pages import read_page

    try:
        return read_page(path.read_bytes())
    except (OSError, ValueError):
        return None


def _start_afresh(path: Path, before: bytes, released: bytes, given_path: Path, error: ValueError) -> Opened | None:
    kept = _exchange(path, before, released, released, given_path)
    if kept is None:
        return None
    message = (
        f"{path.name} could not be read as a notebook: {error}. It is kept as it was in {kept}, and {path} is a fresh "
        f"copy of the page. Your saved answers are still in use. {_RELOAD}"
    )
    return Opened(path, "copied", message, kept)


def _update(path: Path, before: bytes, released: bytes, given_path: Path) -> Opened | None:
    from lowprec_lab.pages import merge, read_page, write_page

    merged = merge(read_page(before), _given_page(given_path), read_page(released))
    kept = _exchange(path, before, write_page(merged.page), released, given_path)
    if kept is None:
        return None
    sentences = [f"{path} is now the newest release of the page."]
    if merged.answers:
        sentences.append(f"Your cells are in it: {_listed(merged.answers)}.")
    if merged.own_cells:
        sentences.append(f"So {_are(merged.own_cells, 'cell')} that you had added.")
    if merged.contracts:
        sentences.append(f"What is asked has changed, read it again: {_listed(merged.contracts)}.")
    if merged.orphans:
        sentences.append(f"No longer asked, your answer is at the end of the page: {_listed(merged.orphans)}.")
    if merged.left_behind:
        sentences.append(f"Only in the old page {_are(merged.left_behind, 'given cell')} that you had changed.")
    sentences += [f"The old page is kept: {kept}.", _RELOAD]
    return Opened(path, "updated", " ".join(sentences), kept)


def _exchange(path: Path, before: bytes, after: bytes, released: bytes, given_path: Path) -> Path | None:
    """Keep the page `before` and put `after` in its place; None, and no change, if it is not `before` any more."""
    kept = keep_copy(before, path.parent / "kept", path.stem, path.suffix)
    if not write_whole(path, after, lambda: path.read_bytes() == before):
        return None
    # Last: if this is interrupted, the page itself says of which release it is.
    write_whole(given_path, released)
    return kept


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _are(count: int, noun: str) -> str:
    return f"is 1 {noun}" if count == 1 else f"are {count} {noun}s"
