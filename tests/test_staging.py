"""What people hand in, read whatever it is: staged as a page that nbgrader can open, the original untouched."""

import json
import os
import shutil

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("nbgrader")

from lowprec_lab import authoring
from lowprec_lab.grading import staging
from lowprec_lab.grading.repair import find_answers, repair
from lowprec_lab.grading.staging import NOTES, read_submission, stage

CHAPTER = "01_bit_layouts"
PAGE = f"{CHAPTER}.ipynb"
ANSWER = "@fill\ndef decode(codes, fmt):\n    return 1"

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a class is graded on Linux")


def page(*answers):
    return nbformat.writes(new_notebook(cells=[new_code_cell(answer) for answer in answers or (ANSWER,)]))


@pytest.fixture
def folder(tmp_path):
    """The folder of one submission."""
    made = tmp_path / "submitted" / "ada" / CHAPTER
    made.mkdir(parents=True)
    return made


def content_of(folder):
    return {
        str(path.relative_to(folder)): (os.readlink(path) if path.is_symlink() else path.read_bytes())
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def staged(folder, tmp_path, note=None, answers=1, name=CHAPTER):
    """Stage a submission; checks that it is a valid page, has this note, and that the original is as it was."""
    before = content_of(folder)
    there = tmp_path / "staged"
    submission = stage(folder, name, there)
    assert content_of(folder) == before
    made = nbformat.read(there / f"{name}.ipynb", as_version=4)
    nbformat.validate(made)
    assert {path.name for path in there.iterdir()} <= {f"{name}.ipynb", "timestamp.txt", "submission_secret.txt"}
    assert not any(path.is_symlink() for path in there.iterdir())
    assert made.metadata[NOTES] == submission.notes
    assert len(find_answers(made, CHAPTER)) == answers
    if note is None:
        assert submission.notes == []
    else:
        assert note in " ".join(submission.notes)
    source = authoring.source_notebook(authoring.SOLUTIONS / f"{CHAPTER}.py")
    repaired, notes = repair(made, source)
    assert set(submission.notes) <= set(notes)
    assert find_answers(repaired, CHAPTER) == find_answers(made, CHAPTER)
    return there, submission


def test_a_page_with_its_name(folder, tmp_path):
    (folder / PAGE).write_text(page())
    staged(folder, tmp_path)


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"cells": [', "is damaged: it is not valid JSON"),
        (b"print('hello')", "is no notebook"),
        (b"<!DOCTYPE html><html></html>", "is no notebook"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is no notebook"),
        (b"PK\x03\x04", "is no notebook"),
        (b"[]", "is no notebook"),
        (b"null", "is no notebook"),
        (b"NaN", "is no notebook"),
        (b"{}", "it has no cells"),
        (b'{"cells": {}, "nbformat": 4}', "it has no cells"),
        (b"[" * 200_000, "is no notebook"),
        (b'{"a":' * 200_000, "is damaged"),
        (b'{"cells": ' + b"9" * 10_000 + b"}", "is damaged"),
        (b'{"worksheets": [3], "nbformat": 3}', "cannot be converted"),
    ],
)
def test_what_is_no_notebook(folder, tmp_path, content, note):
    (folder / PAGE).write_bytes(content)
    staged(folder, tmp_path, note, answers=0)


def test_a_giant_file_is_not_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "LARGEST_PAGE", 2**20)
    with (folder / PAGE).open("wb") as file:
        file.truncate(2**40)  # takes no room
    submission = read_submission(folder, CHAPTER)
    assert "is larger than 1 MB" in submission.notes[0]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
def test_other_encodings(folder, tmp_path, encoding):
    (folder / PAGE).write_bytes(page(ANSWER + "  # é").encode(encoding))
    staged(folder, tmp_path)


def test_bytes_that_are_no_text(folder, tmp_path):
    (folder / PAGE).write_bytes(page(ANSWER + "  # e").encode().replace(b"# e", b"# \xff\xfe"))
    staged(folder, tmp_path)


def test_halves_of_characters(folder, tmp_path):
    (folder / PAGE).write_text(page(ANSWER + "  # e").replace("# e", r"# \ud800 \u0000"))
    staged(folder, tmp_path)


def test_a_notebook_of_version_3(folder, tmp_path):
    cell = {"cell_type": "code", "input": ANSWER, "language": "python", "outputs": [], "collapsed": False}
    old = {"nbformat": 3, "nbformat_minor": 0, "metadata": {"name": ""}, "worksheets": [{"cells": [cell]}]}
    (folder / PAGE).write_text(json.dumps(old))
    staged(folder, tmp_path)


def test_a_notebook_of_a_version_to_come(folder, tmp_path):
    (folder / PAGE).write_text(page().replace('"nbformat": 4', '"nbformat": 5'))
    staged(folder, tmp_path)


@pytest.mark.parametrize(
    "name",
    ["01_bit_layouts (1).ipynb", "Copy of 01_bit_layouts.ipynb", "01_bit_layouts-Copy1.ipynb", "01_BIT_LAYOUTS.IPYNB",
     "01-bit-layouts.ipynb", "ada_01_bit_layouts_final.ipynb", "Untitled.ipynb", "01_bit_layouts .ipynb"],
)  # fmt: skip
def test_a_renamed_page(folder, tmp_path, name):
    (folder / name).write_text(page())
    staged(folder, tmp_path, "was graded in its place")


def test_of_several_renamed_pages_the_newest(folder, tmp_path):
    for number, name in enumerate(["01_bit_layouts (2).ipynb", "01_bit_layouts (1).ipynb", "other.ipynb"]):
        (folder / name).write_text(page(ANSWER.replace("1", str(number))))
        os.utime(folder / name, (1000 + number, 1000 + number))
    there, _ = staged(folder, tmp_path, "(1).ipynb was graded in its place. It is the newest of several")
    assert "return 1" in (there / PAGE).read_text()


def test_several_pages_with_other_names(folder, tmp_path):
    for name in ("a.ipynb", "b.ipynb"):
        (folder / name).write_text(page())
    staged(folder, tmp_path, "not clear which was meant: a.ipynb, b.ipynb", answers=0)


def test_the_page_of_another_chapter_is_not_taken_for_this_one(folder, tmp_path):
    (folder / "00_start.ipynb").write_text(page())
    (folder / "01_bit_layouts (1).ipynb").write_text(page())
    there, _ = staged(folder, tmp_path, "01_bit_layouts (1).ipynb was graded")


def test_pages_beside_the_right_one(folder, tmp_path):
    (folder / PAGE).write_text(page())
    (folder / "01_bit_layouts (1).ipynb").write_text("{")
    staged(folder, tmp_path, "were not graded: 01_bit_layouts (1).ipynb")


def test_no_page(folder, tmp_path):
    (folder / "bits.py").write_text("x = 1")
    staged(folder, tmp_path, "There is no page 01_bit_layouts.ipynb", answers=0)


def test_a_folder_in_the_place_of_the_page(folder, tmp_path):
    (folder / PAGE).mkdir()
    staged(folder, tmp_path, "is no file that can be read", answers=0)


def test_links_are_not_followed(folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(page())
    (folder / PAGE).symlink_to(secret)
    (folder / "seed.txt").symlink_to(secret)
    (folder / "timestamp.txt").symlink_to(secret)
    (folder / "up").symlink_to("..", target_is_directory=True)
    there, submission = staged(folder, tmp_path, "is a link to another file", answers=0)
    assert "return 1" not in "".join(path.read_text() for path in there.iterdir())


def test_nothing_waits_for_a_pipe(folder, tmp_path):
    os.mkfifo(folder / PAGE)
    os.mkfifo(folder / "timestamp.txt")
    submission = read_submission(folder, CHAPTER)
    assert "is no file that can be read" in submission.notes[0]


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root reads everything")
def test_a_page_that_may_not_be_read(folder, tmp_path):
    (folder / PAGE).write_text(page())
    (folder / PAGE).chmod(0)
    assert "cannot be opened" in read_submission(folder, CHAPTER).notes[0]


def test_other_files_are_left_where_they_are(folder, tmp_path):
    (folder / PAGE).write_text(page())
    (folder / "lowprec_lab").mkdir()
    (folder / "lowprec_lab" / "__init__.py").write_text("raise SystemExit")
    (folder / "torch.py").write_text("raise SystemExit")
    (folder / "nbgrader_config.py").write_text("raise SystemExit")
    staged(folder, tmp_path)


# --- when it was handed in ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2026-11-30 10:00:00 UTC", "2026-11-30 10:00:00.123456 CET", "2026-11-30T10:00:00Z"])
def test_the_time_at_which_it_was_handed_in(folder, tmp_path, text):
    (folder / PAGE).write_text(page())
    (folder / "timestamp.txt").write_text(f"{text}\n")
    there, submission = staged(folder, tmp_path)
    assert submission.timestamp == (there / "timestamp.txt").read_text().strip() == text


@pytest.mark.parametrize("content", [b"", b"soon", b"\xff\xfe", b"1" * 10_000, b"2026-99-99 99:99:99 UTC", b"9" * 150])
def test_a_time_that_is_none_is_that_of_the_file(folder, tmp_path, content):
    (folder / PAGE).write_text(page())
    (folder / "timestamp.txt").write_bytes(content)
    os.utime(folder / "timestamp.txt", (1_800_000_000, 1_800_000_000))
    _, submission = staged(folder, tmp_path, "That of the file itself counts")
    assert submission.timestamp == "2027-01-15 08:00:00 UTC"


def test_without_a_time_none_is_left_from_before(folder, tmp_path):
    (folder / PAGE).write_text(page())
    (folder / "timestamp.txt").write_text("2026-11-30 10:00:00 UTC")
    staged(folder, tmp_path)
    (folder / "timestamp.txt").unlink()
    there, _ = staged(folder, tmp_path)
    assert [path.name for path in there.iterdir()] == [PAGE]


def test_the_secret_that_names_the_feedback(folder, tmp_path):
    (folder / PAGE).write_text(page())
    (folder / "timestamp.txt").write_text("2026-11-30 10:00:00 UTC")
    (folder / "submission_secret.txt").write_text("a0" * 64)
    there, _ = staged(folder, tmp_path)
    assert (there / "submission_secret.txt").read_text() == "a0" * 64


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b"\xff\n"), lambda path: path.symlink_to("/dev/zero"),
                                  os.mkfifo, lambda path: path.write_text("../../x"), lambda path: None])  # fmt: skip
def test_a_secret_that_is_none_stops_nobodys_feedback(folder, tmp_path, make):
    (folder / PAGE).write_text(page())
    (folder / "timestamp.txt").write_text("2026-11-30 10:00:00 UTC")
    make(folder / "submission_secret.txt")
    there, submission = staged(folder, tmp_path)
    assert submission.secret == ""
    assert len((there / "submission_secret.txt").read_text()) == 128


def test_no_time_is_no_way_around_a_penalty(folder, tmp_path):
    (folder / PAGE).write_text(page())
    (folder / "submission_secret.txt").write_text("a0" * 64)
    os.utime(folder / "submission_secret.txt", (1_800_000_000, 1_800_000_000))
    _, submission = staged(folder, tmp_path, "timestamp.txt is missing")
    assert submission.timestamp == "2027-01-15 08:00:00 UTC"


# --- nbgrader -------------------------------------------------------------------------------------------------------


@pytest.fixture
def autograde(tmp_path):
    """nbgrader's Autograde for a course in tmp_path, about to look for submissions."""
    from nbgrader.converters import Autograde
    from nbgrader.coursedir import CourseDirectory

    staging.use_staged_submissions()
    staging.use_staged_submissions()  # each command reads the settings more than once

    def make(student="*"):
        course = CourseDirectory(root=str(tmp_path), assignment_id=CHAPTER, student_id=student)
        return Autograde(coursedir=course)

    return make


def test_nbgrader_is_given_the_staged_pages(folder, tmp_path, autograde):
    (tmp_path / "course.json").write_text("{}")
    (folder / "01_bit_layouts (1).ipynb").write_text(page())
    (folder / "torch.py").write_text("")
    for student in ("bob", "eve"):
        (folder.parents[1] / student / CHAPTER).mkdir(parents=True)
    found = autograde()
    found.init_notebooks()
    staged_in = tmp_path / ".lowprec" / "staged"
    want = {str(staged_in / student / CHAPTER): [str(staged_in / student / CHAPTER / PAGE)] for student in
            ("ada", "bob", "eve")}  # fmt: skip
    assert found.assignments == want
    shutil.rmtree(folder.parents[1] / "bob")
    found.init_notebooks()
    assert set(found.assignments) == {key for key in want if "bob" not in key}
    one = autograde("eve")
    one.init_notebooks()
    assert list(one.assignments) == [str(staged_in / "eve" / CHAPTER)]
    assert list((staged_in / "ada" / CHAPTER).iterdir())  # a run about one student leaves the others' pages


def test_the_course_of_somebody_else_is_left_alone(folder, tmp_path, autograde):
    (folder / PAGE).write_text(page())
    found = autograde()
    found.init_notebooks()
    assert found.assignments == {str(folder): [str(folder / PAGE)]}
    assert not (tmp_path / ".lowprec").exists()


def test_a_page_that_cannot_be_staged_says_why(folder, tmp_path, autograde):
    from nbgrader.converters.base import NbGraderException

    (tmp_path / "course.json").write_text("{}")
    (folder / PAGE).write_text(page())
    (tmp_path / ".lowprec").write_text("a file where a folder is needed")
    with pytest.raises(NbGraderException, match="could not be staged"):
        autograde().init_notebooks()
