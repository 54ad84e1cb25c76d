"""The learner's folder: where it is, and pages that are opened and updated without losing a cell."""

import errno
import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from lowprec_lab import files, pages
from lowprec_lab.files import WorkspaceError, find_clone, work_folder
from lowprec_lab.workspace import open_chapter

STUB = "...  # your code here"
NAME = "01_bit_layouts"


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPREC_WORK", str(tmp_path / "work"))
    for name in ("NBGRADER_EXECUTION", "LOWPREC_NOTEBOOKS", "LOWPREC_COURSE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "work"


@pytest.fixture
def notebooks(tmp_path):
    return tmp_path / "notebooks"


# ---- small released pages


def graded(grade_id, **options):
    fields = {"grade": False, "solution": False, "locked": False, "schema_version": 3} | options
    return {"nbgrader": {"grade_id": grade_id} | fields}


def text(identity, source):
    return v4.new_markdown_cell(source, id=identity)


def code(identity, source, **metadata):
    return v4.new_code_cell(source, id=identity, metadata=metadata)


def answer(name, arguments="codes, fmt"):
    source = f"@fill\ndef {name}({arguments}):\n    {STUB}"
    return code(name, source, **graded(name, solution=True))


def check(name):
    return code(f"check-{name}", f"check({name})", **graded(f"check_{name}", grade=True, locked=True, points=2))


def question(name):
    source = f'question("1.{name}",\n    {STUB}\n)'
    return code(f"question-1{name}", source, **graded(f"question_1{name}", solution=True))


def released_page(*cells, release="r1"):
    metadata = {"lowprec_lab": {"chapter": NAME, "release": release}} if release else {}
    metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=list(cells), metadata=metadata)


def first_release(release="r1"):
    return released_page(
        text("title", "# 1 · Bit layouts"),
        code("setup", "import torch\nfrom lowprec_lab.bits import decode", **graded("setup", locked=True)),
        code("helpers", "# Your helpers: functions that several answers use", tags=["helpers"]),
        text("about-decode", "### Exercise 1.5"),
        answer("decode"),
        check("decode"),
        code("experiment", "decode(codes, E4M3)"),
        answer("ulp", "x, fmt"),
        check("ulp"),
        question("A"),
        text("end", "That was all."),
        release=release,
    )


def second_release(release="r2"):
    """An exercise before decode, other words, another experiment, `ulp` with another contract, no ending."""
    page = first_release(release)
    cells = {cell.id: cell for cell in page.cells}
    cells["about-decode"].source = "### Exercise 1.6, in better words"
    cells["ulp"].source = cells["ulp"].source.replace("x, fmt", "x, fmt, mode")
    order = ["title", "setup", "helpers", "about-decode", "decode", "check-decode", "ulp", "check-ulp", "question-1A"]
    page.cells = [cells[name] for name in order]
    page.cells[3:3] = [answer("bit_pattern", "x"), check("bit_pattern")]
    page.cells.insert(8, code("experiment-2", "for fmt in FORMATS.values():\n    print(fmt.name)"))
    return page


def release(page, notebooks):
    path = notebooks / NAME / f"{NAME}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(page) + "\n", "utf-8")
    return path


def read(path):
    page = nbformat.read(path, as_version=4)
    nbformat.validate(page)
    return page


def edit(path, change):
    """Let `change` edit the learner's cells (by id) and page; then save it the way JupyterLab does."""
    page = read(path)
    change({cell.get("id"): cell for cell in page.cells}, page)
    path.write_text(json.dumps(page, indent=1) + "\n", "utf-8")
    return path.read_bytes()


def solve_decode(cells, page):
    cells["decode"].source = DECODE
    cells["decode"].outputs = [v4.new_output("stream", text="hello")]
    cells["decode"].execution_count = 4


DECODE = "@fill\ndef decode(codes, fmt):\n    return MY_TABLE[codes]"


def by_id(page):
    return {cell.id: cell for cell in page.cells}


def ids(page):
    return [cell.id for cell in page.cells]


# ---- where the folder is


def test_the_folder_can_be_moved(work):
    assert work_folder() == work
    assert not work.exists()


def test_the_folder_must_be_a_whole_path(monkeypatch):
    monkeypatch.setenv("LOWPREC_WORK", "my/work")
    with pytest.raises(WorkspaceError, match=r"LOWPREC_WORK is 'my/work'. Give the whole path"):
        work_folder()


def test_the_folder_may_begin_with_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOWPREC_WORK", "~/mine")
    assert work_folder() == tmp_path / "mine"


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """No LOWPREC_WORK, a home in tmp_path, and a current folder that must not matter."""
    monkeypatch.setenv("LOWPREC_WORK", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    return tmp_path


def put_package_in(folder, monkeypatch, is_clone):
    (folder / "lowprec_lab").mkdir(parents=True)
    if is_clone:
        (folder / "notebooks").mkdir()
        (folder / "pyproject.toml").touch()
    monkeypatch.setattr(files, "__file__", str(folder / "lowprec_lab" / "files.py"))


def test_in_a_clone_it_is_beside_the_notebooks(elsewhere, monkeypatch):
    put_package_in(elsewhere / "clone", monkeypatch, is_clone=True)
    assert find_clone() == elsewhere / "clone"
    assert work_folder() == elsewhere / "clone" / "work"


def test_installed_it_is_in_the_home_folder(elsewhere, monkeypatch):
    put_package_in(elsewhere / "site-packages", monkeypatch, is_clone=False)
    assert find_clone() is None
    assert work_folder() == elsewhere / "home" / "lowprec_lab" / "work"


@pytest.mark.parametrize(
    ("course", "folder"),
    [("fp8-2027", "fp8-2027"), ("a b/../c", "a_b_.._c"), ("../..", "_.."), ("..", "work"), (" ", "work")],
)
def test_on_a_shared_hub_each_course_has_its_own(elsewhere, monkeypatch, course, folder):
    put_package_in(elsewhere / "site-packages", monkeypatch, is_clone=False)
    monkeypatch.setenv("LOWPREC_COURSE", course)
    found = work_folder()
    assert found.name == folder
    assert found.parent == elsewhere / "home" / "lowprec_lab"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no owner of this kind")
def test_a_clone_that_belongs_to_somebody_else_is_not_used(elsewhere, monkeypatch):
    put_package_in(elsewhere / "clone", monkeypatch, is_clone=True)
    owner = (elsewhere / "clone").stat().st_uid
    monkeypatch.setattr(files.os, "getuid", lambda: owner + 1)
    assert work_folder() == elsewhere / "home" / "lowprec_lab" / "work"
    monkeypatch.setattr(files.os, "getuid", lambda: owner)
    assert work_folder() == elsewhere / "clone" / "work"
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    assert work_folder() == elsewhere / "home" / "lowprec_lab" / "work"


# ---- opening


def test_a_chapter_is_copied_once_and_then_left_alone(work, notebooks):
    source = release(first_release(), notebooks)
    opened = open_chapter("1", notebooks)
    assert (opened.path, opened.status, opened.kept) == (work / f"{NAME}.ipynb", "copied", None)
    assert opened.path.read_bytes() == source.read_bytes()
    mine = edit(opened.path, solve_decode)
    again = open_chapter("bits", notebooks)
    assert (again.path, again.status, again.kept) == (opened.path, "unchanged", None)
    assert opened.path.read_bytes() == mine
    assert not (work / "kept").exists()


def test_released_pages_are_found_through_the_environment(work, notebooks, monkeypatch):
    release(first_release(), notebooks)
    monkeypatch.setenv("LOWPREC_NOTEBOOKS", str(notebooks))
    assert open_chapter("01").status == "copied"


def test_an_unknown_chapter_lists_the_chapters(notebooks):
    with pytest.raises(ValueError, match="00_start, 01_bit_layouts"):
        open_chapter("99", notebooks)


def test_an_installed_package_without_pages_says_where_to_get_them(work, monkeypatch, tmp_path):
    put_package_in(tmp_path / "site-packages", monkeypatch, is_clone=False)
    with pytest.raises(WorkspaceError, match="Clone the project.*LOWPREC_NOTEBOOKS"):
        open_chapter("01")
    assert not work.exists()


def test_a_missing_or_broken_released_page(work, notebooks):
    with pytest.raises(WorkspaceError, match="There is no released page"):
        open_chapter("01", notebooks)
    release(first_release(), notebooks).write_text("<<<<<<< HEAD\n")
    with pytest.raises(WorkspaceError, match="is broken"):
        open_chapter("01", notebooks)
    assert not work.exists()


# ---- updating


def update(notebooks, change=lambda cells, page: None, old=first_release, new=second_release):
    """Open the old release, edit it, and open the new one. Returns the page as edited and what was opened."""
    release(old(), notebooks)
    path = open_chapter("01", notebooks).path
    before = edit(path, change)
    release(new(), notebooks)
    return before, open_chapter("01", notebooks)


def test_an_untouched_page_becomes_the_new_release(notebooks):
    before, opened = update(notebooks)
    assert opened.status == "updated"
    assert read(opened.path).cells == second_release().cells
    assert opened.kept.read_bytes() == before


def test_the_old_page_is_kept_with_everything_in_it(work, notebooks):
    before, opened = update(notebooks, solve_decode)
    assert opened.kept.parent == work / "kept"
    assert opened.kept.name.startswith(f"{NAME}.{datetime.now(UTC):%Y-%m-%d_%H}")
    assert opened.kept.read_bytes() == before
    assert str(opened.kept) in opened.message
    assert "Reload Notebook from Disk" in opened.message


def test_answers_and_questions_are_carried_over(notebooks):
    def change(cells, page):
        solve_decode(cells, page)
        cells["question-1A"].source = 'question("1.A",\n    "Because of the bias."\n)'

    _, opened = update(notebooks, change)
    page = read(opened.path)
    cells = by_id(page)
    assert ids(page) == ids(second_release())
    assert cells["decode"].source == DECODE
    assert cells["decode"].outputs == []
    assert cells["decode"].metadata == by_id(second_release())["decode"].metadata
    assert "Because of the bias." in cells["question-1A"].source
    assert cells["ulp"].source == by_id(second_release())["ulp"].source  # untouched: the new stub
    assert "Your cells are in it: decode, 1.A." in opened.message
    assert page.metadata.lowprec_lab.release == "r2"


def test_an_answer_to_a_changed_contract_is_carried_and_named(notebooks):
    def change(cells, page):
        cells["ulp"].source = "@fill\ndef ulp(x, fmt):\n    return x"

    _, opened = update(notebooks, change)
    assert "return x" in by_id(read(opened.path))["ulp"].source
    assert "What is asked has changed, read it again: ulp." in opened.message


def test_helpers_are_carried_over(notebooks):
    def change(cells, page):
        cells["helpers"].source += "\nMY_TABLE = torch.arange(256)"

    _, opened = update(notebooks, change)
    assert by_id(read(opened.path))["helpers"].source.endswith("MY_TABLE = torch.arange(256)")
    assert "helpers" in opened.message


def test_their_own_cells_stay_where_they_were(notebooks):
    def change(cells, page):
        page.cells.insert(5, text("my-note", "my note"))
        page.cells.insert(6, code("my-trial", "decode(5, E4M3)"))
        page.cells.insert(0, text("my-top", "my page"))
        page.cells.append(code("empty", "  \n"))

    _, opened = update(notebooks, change)
    expected = ids(second_release())
    place = expected.index("decode") + 1
    assert ids(read(opened.path)) == ["my-top", *expected[:place], "my-note", "my-trial", *expected[place:]]
    assert "So are 3 cells that you had added." in opened.message


def test_their_own_cells_go_to_the_end_when_their_place_is_gone(notebooks):
    def change(cells, page):
        page.cells.append(code("my-last", "print('done')"))
        page.cells.insert(7, text("my-finding", "what I saw"))

    _, opened = update(notebooks, change)
    page = read(opened.path)
    assert ids(page)[-3:] == [pages._END_ID, "my-finding", "my-last"]
    assert page.cells[-3].source.startswith("## From your earlier page")


REMARK = "The exponent of a code is stored with a bias, so that it has no sign of its own. This is {} to see."


@pytest.mark.parametrize("keeps_given", [True, False])
def test_a_reworded_paragraph_is_the_same_place(work, notebooks, keeps_given):
    """Where a release derives the id of a paragraph from its words, new words are a new id."""

    def with_remark(page, identity, word):
        page.cells.insert(4, text(identity, REMARK.format(word)))
        page.cells.insert(5, text("markdown-aaaaaaaaaaaa", "Something else altogether."))
        return page

    def change(cells, page):
        page.cells.insert(5, text("my-note", "my note"))

    release(with_remark(first_release(), "markdown-0123456789ab", "easy"), notebooks)
    path = open_chapter("01", notebooks).path
    edit(path, change)
    if not keeps_given:
        shutil.rmtree(work / ".released")
    new = with_remark(first_release("r2"), "markdown-ba9876543210", "hard")
    release(new, notebooks)
    page = read(open_chapter("01", notebooks).path)
    sources = [cell.source for cell in page.cells]
    assert sources.index("my note") == sources.index(REMARK.format("hard")) + 1
    assert len(sources) == len(new.cells) + 1


def test_an_answer_whose_exercise_is_gone_is_kept_at_the_end(notebooks):
    def new():
        page = second_release()
        page.cells = [cell for cell in page.cells if cell.id not in ("decode", "check-decode")]
        return page

    _, opened = update(notebooks, solve_decode, new=new)
    page = read(opened.path)
    assert [cell.cell_type for cell in page.cells[-3:]] == ["markdown", "markdown", "raw"]
    assert "`decode`: this exercise is not on the page any more" in page.cells[-2].source
    assert page.cells[-1].source == DECODE
    assert "your answer is at the end of the page: decode" in opened.message
    release(first_release("r3"), notebooks)  # it comes back: their cells at the end stay, once
    page = read(open_chapter("01", notebooks).path)
    assert [cell.source for cell in page.cells].count(pages._END_TEXT) == 1
    assert page.cells[-1].source == DECODE


def test_given_cells_are_the_new_ones_and_edits_in_them_are_mentioned(notebooks):
    def change(cells, page):
        cells["experiment"].source = "decode(codes, E5M2)  # mine"
        cells["about-decode"].source += "\nmy remark"
        cells["check-decode"].source = "check(decode)  # really"

    before, opened = update(notebooks, change)
    assert read(opened.path).cells == second_release().cells
    assert "Only in the old page are 3 given cells that you had changed." in opened.message
    assert b"my remark" in opened.kept.read_bytes()


def test_cells_that_they_had_deleted_or_emptied_are_back(notebooks):
    def change(cells, page):
        cells["decode"].source = "\n"
        page.cells = [cell for cell in page.cells if cell.id != "ulp"]

    _, opened = update(notebooks, change)
    assert read(opened.path).cells == second_release().cells


def test_many_updates_carry_everything_and_keep_every_page(work, notebooks):
    def change(cells, page):
        solve_decode(cells, page)
        page.cells.insert(5, text("my-note", "my note"))

    before, opened = update(notebooks, change)
    kept = {opened.kept: before}
    for number in range(3, 7):
        before = opened.path.read_bytes()
        release((first_release if number % 2 else second_release)(f"r{number}"), notebooks)
        opened = open_chapter("01", notebooks)
        assert opened.status == "updated"
        kept[opened.kept] = before
        page = read(opened.path)
        assert by_id(page)["decode"].source == DECODE
        assert [cell.source for cell in page.cells].count("my note") == 1
    assert len(kept) == 5
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert set((work / "kept").iterdir()) == set(kept)


def strip_cells(cells, page):
    """As an editor does that knows neither cell ids nor nbgrader."""
    page.nbformat_minor = 0
    for cell in page.cells:
        del cell["id"]
        cell.metadata = nbformat.NotebookNode()


@pytest.mark.parametrize("keeps_release", [True, False])
@pytest.mark.parametrize("keeps_given", [True, False])
def test_a_page_from_an_editor_that_dropped_ids_and_metadata(work, notebooks, keeps_release, keeps_given):
    def change(cells, page):
        solve_decode(cells, page)
        cells["question-1A"].source = 'question("1.A",\n    "Bias."\n)'
        cells["helpers"].source += "\nA = 1"
        page.cells.insert(5, text("my-note", "my note"))
        strip_cells(cells, page)
        if not keeps_release:
            del page.metadata["lowprec_lab"]

    release(first_release(), notebooks)
    path = open_chapter("01", notebooks).path
    edit(path, change)
    if not keeps_given:
        shutil.rmtree(work / ".released")
    release(second_release(), notebooks)
    page = read(open_chapter("01", notebooks).path)
    cells = by_id(page)
    assert cells["decode"].source == DECODE
    assert "Bias." in cells["question-1A"].source
    assert cells["helpers"].source.endswith("A = 1")
    assert cells["ulp"].source == by_id(second_release())["ulp"].source
    assert set(ids(second_release())) <= set(ids(page))
    sources = [cell.source for cell in page.cells]
    assert sources.index("my note") == sources.index(DECODE) + 1
    if keeps_given:
        assert len(page.cells) == len(second_release().cells) + 1


def test_an_answer_without_its_fill_line_and_metadata_is_still_found(notebooks):
    def change(cells, page):
        cells["decode"].source = "def decode(codes, fmt):\n    return 7"
        strip_cells(cells, page)

    _, opened = update(notebooks, change)
    assert by_id(read(opened.path))["decode"].source.endswith("return 7")


def test_a_copied_answer_cell_is_a_cell_of_their_own(notebooks):
    def change(cells, page):
        solve_decode(cells, page)
        twin = nbformat.from_dict(cells["decode"])
        twin.id, twin.source = "twin", "@fill\ndef decode(codes, fmt):\n    return 'second try'"
        page.cells.insert(5, twin)

    _, opened = update(notebooks, change)
    page = read(opened.path)
    assert by_id(page)["decode"].source == DECODE
    assert "second try" in by_id(page)["twin"].source
    assert "nbgrader" not in by_id(page)["twin"].metadata
    grade_ids = [cell.metadata.nbgrader.grade_id for cell in page.cells if "nbgrader" in cell.metadata]
    assert len(grade_ids) == len(set(grade_ids))


def test_their_cell_with_an_id_that_the_new_release_uses(notebooks):
    def change(cells, page):
        page.cells.insert(5, text("my-note", "my note"))
        page.cells.insert(6, text("my-note", "my other note"))
        page.cells.insert(6, text("experiment-2", "a third"))

    _, opened = update(notebooks, change)
    page = read(opened.path)
    assert len(set(ids(page))) == len(page.cells) == len(second_release().cells) + 3
    assert by_id(page)["experiment-2"].source == by_id(second_release())["experiment-2"].source
    place = ids(page).index("decode")
    assert [cell.source for cell in page.cells[place + 1 : place + 4]] == ["my note", "a third", "my other note"]


def test_without_the_given_page_nothing_of_theirs_is_lost(work, notebooks):
    def change(cells, page):
        solve_decode(cells, page)
        page.cells.insert(5, text("my-note", "my note"))

    release(first_release(), notebooks)
    path = open_chapter("01", notebooks).path
    edit(path, change)
    shutil.rmtree(work / ".released")
    release(second_release(), notebooks)
    page = read(open_chapter("01", notebooks).path)
    assert by_id(page)["decode"].source == DECODE
    assert by_id(page)["ulp"].source == by_id(second_release())["ulp"].source
    assert ids(page).index("my-note") == ids(page).index("decode") + 1


def test_without_the_given_page_an_answer_whose_exercise_is_gone_is_kept(work, notebooks):
    def new():
        page = second_release()
        page.cells = [cell for cell in page.cells if cell.id not in ("decode", "check-decode")]
        return page

    release(first_release(), notebooks)
    path = open_chapter("01", notebooks).path
    edit(path, solve_decode)
    shutil.rmtree(work / ".released")
    release(new(), notebooks)
    page = read(open_chapter("01", notebooks).path)
    assert [cell.source for cell in page.cells if cell.cell_type == "raw"] == [DECODE]
    assert not any("ulp(x, fmt)" in cell.source for cell in page.cells)  # an untouched stub is not an answer


def test_a_cell_pasted_from_another_chapter_is_their_own(notebooks):
    def change(cells, page):
        pasted = answer("sign_bit", "x")
        page.cells.insert(5, pasted)

    _, opened = update(notebooks, change)
    page = read(opened.path)
    assert ids(page).index("sign_bit") == ids(page).index("decode") + 1
    assert "nbgrader" not in by_id(page)["sign_bit"].metadata


def test_a_page_without_a_stated_release_is_compared_by_its_cells(notebooks):
    release(first_release(None), notebooks)
    path = open_chapter("01", notebooks).path
    edit(path, solve_decode)
    assert open_chapter("01", notebooks).status == "unchanged"
    release(second_release(None), notebooks)
    assert open_chapter("01", notebooks).status == "updated"
    assert open_chapter("01", notebooks).status == "unchanged"
    assert by_id(read(path))["decode"].source == DECODE


def test_an_update_that_was_interrupted_goes_on(work, notebooks, monkeypatch):
    """Stopped after each write in turn, as by a full disk: the next `open` has everything."""
    for stop in range(3):
        shutil.rmtree(work, ignore_errors=True)
        release(first_release(), notebooks)
        path = open_chapter("01", notebooks).path
        before = edit(path, solve_decode)
        release(second_release(), notebooks)
        calls = []

        def stopping(temporary, content, stop=stop, calls=calls, write=files._write_new):
            calls.append(temporary)
            if len(calls) > stop:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(temporary, content)

        with monkeypatch.context() as broken:
            broken.setattr(files, "_write_new", stopping)
            with pytest.raises(WorkspaceError, match="full"):
                open_chapter("01", notebooks)
        assert (path.read_bytes() == before) == (stop < 2)
        opened = open_chapter("01", notebooks)
        assert opened.status == ("updated" if stop < 2 else "unchanged")
        page = read(path)
        assert ids(page) == ids(second_release())
        assert by_id(page)["decode"].source == DECODE
        assert [kept.read_bytes() for kept in (work / "kept").iterdir()] == [before]
        assert open_chapter("01", notebooks).status == "unchanged"
        assert read(work / ".released" / path.name).metadata.lowprec_lab.release == "r2"


def test_a_page_that_is_saved_during_the_update_is_not_lost(notebooks, monkeypatch):
    release(first_release(), notebooks)
    path = open_chapter("01", notebooks).path
    release(second_release(), notebooks)
    original = files._write_new
    saved = []

    def write_while_jupyterlab_saves(temporary, content):
        original(temporary, content)
        if temporary.parent == path.parent and not saved:
            saved.append(edit(path, solve_decode))

    monkeypatch.setattr(files, "_write_new", write_while_jupyterlab_saves)
    opened = open_chapter("01", notebooks)
    assert by_id(read(path))["decode"].source == DECODE
    assert opened.kept.read_bytes() == saved[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b'{"cells": 5, "nbformat": 4}',
        b'{"nbformat": 4, "cells": [5]}',
        b"[" * 100_000,
    ],
)
def test_a_page_that_is_no_notebook_is_kept_and_a_fresh_one_given(work, notebooks, content):
    source = release(first_release(), notebooks)
    path = open_chapter("01", notebooks).path
    path.write_bytes(content)
    opened = open_chapter("01", notebooks)
    assert opened.status == "copied"
    assert opened.kept.read_bytes() == content
    assert path.read_bytes() == source.read_bytes()
    assert "could not be read as a notebook" in opened.message
    assert str(opened.kept) in opened.message


def test_a_page_with_odd_cells_is_still_updated(notebooks):
    release(first_release(), notebooks)
    path = open_chapter("01", notebooks).path
    page = json.loads(path.read_text("utf-8"))
    for cell in page["cells"]:
        if cell["id"] == "decode":
            cell["source"], cell["metadata"] = DECODE + "  # \ud800", {"nbgrader": "gone"}
        elif cell["id"] == "end":
            del cell["metadata"]
    path.write_text(json.dumps(page))
    release(second_release(), notebooks)
    assert open_chapter("01", notebooks).status == "updated"
    assert by_id(read(path))["decode"].source == DECODE + "  # \ud800"


def test_a_folder_that_cannot_be_written(work, notebooks):
    release(first_release(), notebooks)
    work.write_text("I am a file")
    with pytest.raises(WorkspaceError, match="work is a file, and a folder is needed"):
        open_chapter("01", notebooks)
    assert work.read_text() == "I am a file"


def test_a_pull_brings_a_changed_page_and_no_conflict(tmp_path, monkeypatch):
    """A learner works in a clone; upstream changes the page they work on; `git pull` and `open` give them both."""

    def git(*arguments, folder):
        settings = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", *settings, *arguments]
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout

    remote, author, clone = (tmp_path / name for name in ("remote.git", "author", "clone"))
    git("init", "--bare", "-b", "main", str(remote), folder=tmp_path)
    git("clone", str(remote), str(author), folder=tmp_path)
    ignored = (Path(__file__).parent.parent / ".gitignore").read_text()
    (author / ".gitignore").write_text(ignored)
    (author / "pyproject.toml").touch()
    (author / "lowprec_lab").mkdir()
    (author / "lowprec_lab" / "files.py").touch()
    release(first_release(), author / "notebooks")
    git("add", ".", folder=author)
    git("commit", "-m", "first", folder=author)
    git("push", "origin", "HEAD:main", folder=author)
    git("clone", str(remote), str(clone), folder=tmp_path)

    monkeypatch.delenv("LOWPREC_WORK")
    monkeypatch.setattr(files, "__file__", str(clone / "lowprec_lab" / "files.py"))
    path = open_chapter("01").path
    assert path == clone / "work" / f"{NAME}.ipynb"
    before = edit(path, solve_decode)

    release(second_release(), author / "notebooks")
    git("commit", "-am", "second", folder=author)
    git("push", "origin", "HEAD:main", folder=author)
    git("pull", "--ff-only", folder=clone)
    assert git("status", "--porcelain", folder=clone) == ""
    assert path.read_bytes() == before

    opened = open_chapter("01")
    assert opened.status == "updated"
    page = read(path)
    assert ids(page) == ids(second_release())
    assert by_id(page)["decode"].source == DECODE
    assert opened.kept.read_bytes() == before
    assert git("status", "--porcelain", folder=clone) == ""


def test_notebooks_are_read_only_when_a_chapter_is_opened():
    """What every kernel imports stays quick."""
    script = "import sys, lowprec_lab.workspace; print(sorted({'nbformat', 'jsonschema'} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == "[]"


def test_opening_a_chapter_brings_the_glossary_its_pages_link_to(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPREC_WORK", str(tmp_path))
    opened = open_chapter("01")
    assert "glossary.ipynb" in opened.path.read_text()
    assert "**ulp**" in (tmp_path / "glossary.ipynb").read_text()
