"""The pages run from top to bottom: the authors' with every check passed, the released ones as they come, untouched."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from lowprec_lab.blanks import in_order
from lowprec_lab.chapters import CHAPTERS

ROOT = Path(__file__).parents[1]
NAMES = [chapter.name for chapter in CHAPTERS]
# What a page may take on two cores, and what these tests allow on a machine that does other things as well.
PAGE_LIMIT_S = 90


def run_page(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, references: Path | None
) -> nbformat.NotebookNode:
    """Execute a page in a kernel whose learner's folder is `folder`; an exception in a cell fails the test."""
    monkeypatch.setenv("LOWPREC_WORK", str(folder))
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    if references is not None:
        monkeypatch.setenv("LOWPREC_REFERENCES", str(references))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=PAGE_LIMIT_S, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()
    return notebook


def outputs_of(cell: nbformat.NotebookNode) -> str:
    """Everything a cell printed or displayed, as text."""
    texts = [
        output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", [])
    ]
    return "\n".join(texts)


@pytest.fixture
def no_references(tmp_path: Path) -> Path:
    empty = tmp_path / "no_references"
    empty.mkdir()
    return empty


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_released_page_runs_untouched_without_references(name, tmp_path, monkeypatch, no_references):
    page = run_page(ROOT / "notebooks" / name / f"{name}.ipynb", tmp_path, monkeypatch, no_references)
    cells = [cell for cell in page.cells if cell.cell_type == "code"]
    text = "\n".join(outputs_of(cell) for cell in cells)
    assert "exact oracle" in text, "nothing says that the oracle stands in"
    assert not any(passed in text for passed in ("bit-exact", "inputs, judged by")), "an untouched page passed a check"
    checks = [outputs_of(cell) for cell in cells if cell.source.startswith("check(")]
    assert checks
    assert all("not written yet" in output for output in checks)
    pictures = [cell for cell in cells if any("image/png" in o.get("data", {}) for o in cell.outputs)]
    drawn = [cell for cell in cells if re.search(r"plots\.|Explorer\(|\.plot\(", cell.source.split("except")[0])]
    assert len(pictures) >= len(drawn) > 0, "an explorer or a plot shows no picture"
    assert not list(tmp_path.glob("answers/*.py")), "an untouched page saved something"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_authors_page_passes_and_saves_every_answer(name, tmp_path, monkeypatch):
    from lowprec_lab.authoring import source_notebook

    path = tmp_path / f"{name}.ipynb"
    nbformat.write(source_notebook(ROOT / "solutions" / f"{name}.py"), path)
    page = run_page(path, tmp_path, monkeypatch, None)
    exercises = [blank for blank in in_order() if blank.chapter.name == name]
    checks = [outputs_of(cell) for cell in page.cells if cell.source.startswith("check(")]
    passed = [text for text in checks if "bit-exact" in text or "inputs, judged by" in text]
    assert len(passed) == len(exercises)
    questions = [outputs_of(cell) for cell in page.cells if cell.source.startswith("question(")]
    assert all(answer.lstrip().startswith("✓") for answer in questions), questions
    saved = (tmp_path / "answers" / f"{exercises[0].module}.py").read_text()
    assert all(f"answer: {blank.name} " in saved for blank in exercises)
    stderr = [o for cell in page.cells for o in cell.get("outputs", []) if o.get("name") == "stderr"]
    assert not stderr, "a page prints to stderr, which costs points under nbgrader"


# Runs each cell of a list where the package cannot be imported; what each ended with, or "" where it got through.
WITHOUT_THE_PACKAGE = """
import json, sys, traceback

sys.modules["lowprec_lab"] = None
ended = []
for source in json.load(sys.stdin):
    try:
        exec(source, {"__name__": "__main__"})
        ended.append("")
    except BaseException:
        ended.append(traceback.format_exc())
print(json.dumps(ended))
"""


@functools.cache
def ends_of_first_cells() -> dict[str, str]:
    """How the first code cell of each page ends without the package, by the page's name."""
    pages = [nbformat.read(ROOT / "notebooks" / name / f"{name}.ipynb", as_version=4) for name in NAMES]
    cells = [next(cell.source for cell in page.cells if cell.cell_type == "code") for page in pages]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE], input=json.dumps(cells), capture_output=True, text=True,
        check=True, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    return dict(zip(NAMES, json.loads(run.stdout), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_says_what_to_type_when_the_package_is_missing(name):
    said = ends_of_first_cells()[name]
    assert "lowprec_lab is not installed in this kernel" in said
    assert "make lab" in said
    assert "During handling" not in said


@pytest.mark.parametrize("name", NAMES)
def test_a_page_tells_how_long_it_takes_what_it_needs_and_what_it_gives(name):
    page = nbformat.read(ROOT / "notebooks" / name / f"{name}.ipynb", as_version=4)
    head = page.cells[0].source
    assert all(word in head for word in ("**Takes**", "**Needs**", "**Gives**"))
    assert "?" in head, "a chapter begins with a question"


@pytest.mark.parametrize("blank", in_order(), ids=lambda blank: blank.name)
def test_the_page_gives_an_exercise_its_number_name_time_and_points(blank):
    source = (ROOT / "solutions" / f"{blank.chapter.name}.py").read_text()
    points = f"{blank.points:g} point" + ("" if blank.points == 1 else "s")
    heading = next(
        (line for line in source.splitlines() if f"### Exercise {blank.exercise} · `{blank.name}`" in line), ""
    )
    assert f"{blank.minutes} min" in heading
    assert heading.rstrip().endswith(points)
