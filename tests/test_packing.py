"""Packed references: a folder that works as LOWPREC_REFERENCES, holds answers alone, and replaces nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowprec_lab.blanks import in_order
from lowprec_lab.chapters import CHAPTERS, find_chapter
from lowprec_lab.exercises import check_answers
from lowprec_lab.grading import packing
from lowprec_lab.grading.course import CourseError, installed_release
from lowprec_lab.grading.packing import pack_references
from lowprec_lab.percent import read_cells
from lowprec_lab.sources import references_folder, sources_in

ROOT = Path(__file__).resolve().parents[1]


def names_through(number):
    return [blank.name for blank in in_order() if blank.chapter.number <= number]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "published" / "references"


def test_only_chapters_up_to_the_one_are_packed(out):
    assert {path.name for path in pack_references(find_chapter("00"), out)} == {"00_start.py", "references.json"}
    assert list(sources_in(out)) == names_through("00")
    record = json.loads((out / "references.json").read_text())
    assert record == {"release": installed_release(), "through": "00_start"}


@pytest.mark.slow
def test_what_was_packed_passes_every_check(out):
    pack_references(CHAPTERS[-1], out)
    results = check_answers(out)
    assert [result["name"] for result in results["exercises"] if not result["passed"]] == []
    assert results["total"] == len(in_order())


def test_it_holds_answers_and_no_prose(out):
    pack_references(CHAPTERS[-1], out)
    for chapter in CHAPTERS:
        cells = read_cells((out / f"{chapter.name}.py").read_text())
        assert cells
        assert all(cell.kind == "code" and ("@fill" in cell.source or "helpers" in cell.source) for cell in cells)
        assert "SOLUTION" not in (out / f"{chapter.name}.py").read_text()


def test_the_package_finds_them_where_there_is_no_clone(out):
    """A class's package has no solutions/: LOWPREC_REFERENCES alone names what `reveal` shows."""
    pack_references(find_chapter("00"), out)
    script = "from lowprec_lab.exercises import reveal; reveal('sign_bit'); reveal('decode')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LOWPREC_REFERENCES": str(out), "NBGRADER_EXECUTION": "x"}
    shown = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "def sign_bit(x):" in shown.stdout
    assert "SOLUTION" not in shown.stdout
    assert "No reference answer for decode is installed here" in shown.stdout


def test_a_folder_of_references_is_replaced_as_a_whole(out):
    pack_references(CHAPTERS[-1], out)
    pack_references(CHAPTERS[0], out)
    assert sorted(path.name for path in out.iterdir()) == ["00_start.py", "references.json"]
    assert [path.name for path in out.parent.iterdir()] == ["references"]  # nothing is left beside it


def test_anything_else_is_left_alone(out, tmp_path):
    def refused(sentence, place):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(CourseError, match=sentence):
            pack_references(CHAPTERS[0], place)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    file = tmp_path / "thesis.txt"
    file.write_text("mine")
    refused("is no folder", file)
    refused("not empty, and not", tmp_path)
    pack_references(CHAPTERS[0], out)
    (out / "notes.txt").write_text("mine")
    refused("not empty, and not", out)
    refused("is where the references come from", references_folder())
    refused("is where the references come from", references_folder() / "packed")


def test_a_failed_write_leaves_the_old_folder(out, monkeypatch):
    pack_references(CHAPTERS[-1], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing.os, "fsync", full)
    with pytest.raises(CourseError, match="No space left on device.* is as it was"):
        pack_references(CHAPTERS[0], out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in out.parent.iterdir()] == ["references"]


def test_without_references_nothing_is_packed(out, monkeypatch, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("LOWPREC_REFERENCES", str(empty))
    with pytest.raises(CourseError, match="no reference answer for sign_bit"):
        pack_references(CHAPTERS[0], out)
    assert not out.exists()


def test_an_empty_folder_may_be_filled(out):
    out.mkdir(parents=True)
    pack_references(CHAPTERS[0], out)
    assert list(sources_in(out)) == names_through("00")
