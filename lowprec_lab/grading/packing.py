"""Reference answers for a class: a folder that an instructor publishes after a deadline, for LOWPREC_REFERENCES."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path

from lowprec_lab.blanks import in_order
from lowprec_lab.chapters import CHAPTERS, Chapter
from lowprec_lab.grading.course import CourseError, installed_release
from lowprec_lab.sources import Source, references_folder, sources_in, without_marks

RECORD = "references.json"


def pack_references(through: Chapter, out: Path | str) -> list[Path]:
    """Write the reference answers of all chapters up to `through` into the folder `out`; returns the files.

    The folder is a new one, or one that this wrote before, which is replaced as a whole. Raises CourseError for any
    other folder, where no references are installed, and where it cannot be written.
    """
    out = Path(out).expanduser().absolute()
    _require_place(out)
    contents = _pages(CHAPTERS[: CHAPTERS.index(through) + 1])
    record = {"release": installed_release(), "through": through.name}
    contents[RECORD] = json.dumps(record, indent=1) + "\n"
    try:
        _write_folder(out, contents)
    except OSError as problem:
        raise CourseError(
            f"{problem.filename or out} could not be written: {problem.strerror or problem}. {out} is as it was"
        ) from None
    return [out / name for name in contents]


def _require_place(out: Path) -> None:
    source = references_folder()
    if source is not None and (out == source.absolute() or source.absolute() in out.parents):
        raise CourseError(f"{out} is where the references come from. Choose a new folder")
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise CourseError(f"{out} is no folder. Choose a new one")
    names = {path.name for path in out.iterdir()}
    if names and not (RECORD in names and names <= {RECORD, *(f"{chapter.name}.py" for chapter in CHAPTERS)}):
        raise CourseError(f"{out} is not empty, and not (only) a folder of references. Choose a new folder")


def _pages(chapters: tuple[Chapter, ...]) -> dict[str, str]:
    folder = references_folder()
    found = sources_in(folder) if folder is not None else {}
    blanks = [blank for blank in in_order() if blank.chapter in chapters]
    missing = [blank.name for blank in blanks if blank.name not in found]
    if missing:
        raise CourseError(
            f"there is no reference answer for {', '.join(missing)} here. They are in solutions/ of a clone: run this "
            "in one"
        )
    return {
        f"{chapter.name}.py": _page([found[blank.name] for blank in blanks if blank.chapter == chapter])
        for chapter in chapters
    }


def _page(answers: list[Source]) -> str:
    """A page of answer cells alone, which reads like any page of the course."""
    helpers = next((answer.helpers for answer in answers if answer.helpers), "")
    texts = [helpers] if helpers else []
    texts += list(dict.fromkeys(answer.text for answer in answers))
    cells = [without_marks(text.strip("\n")) for text in texts]
    return "\n\n".join(f"# %%\n{cell}" for cell in cells) + "\n"


def _write_folder(out: Path, contents: dict[str, str]) -> None:
    """Put the new folder where the old one was: a reader finds one of them, whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(f".{out.name}.{secrets.token_hex(4)}.new")
    old = new.with_suffix(".old")
    try:
        new.mkdir()
        for name, content in contents.items():
            with (new / name).open("w", encoding="utf-8", newline="\n") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if out.is_dir():
            os.replace(out, old)
            try:
                os.replace(new, out)
            except OSError:
                os.replace(old, out)
                raise
        else:
            os.replace(new, out)
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
