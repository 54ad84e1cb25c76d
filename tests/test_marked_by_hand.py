"""A text that a person marks: in a page's source, in the released page, and in a course with nbgrader's gradebook."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from classroom import Room, gradebook, hand_in, references, released

from lowprec_lab import authoring

NAME = "15_capstone"
MARKED = "marked_reasoning"
PAGE = """\
# %% [markdown]
# What is asked.

# %% [markdown] tags=["marked-by-hand", "reasoning", "10"]
# ### BEGIN SOLUTION
# An answer that is worth all of the points.
# ### END SOLUTION
"""


def built(tmp_path, text):
    path = tmp_path / "99_page.py"
    path.write_text(text)
    return authoring.source_notebook(path, {})


def test_a_text_is_marked_by_its_tags(tmp_path):
    [_, cell] = built(tmp_path, PAGE).cells
    assert cell.cell_type == "markdown"
    assert cell.id == "marked-reasoning"
    assert cell.metadata.nbgrader == {
        "schema_version": 3, "grade_id": MARKED, "solution": True, "grade": True, "locked": False, "task": False,
        "points": 10,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('"reasoning", "10"', '"reasoning"', "with three tags"),
        ('"10"', '"many"', "with three tags"),
        ('"10"', '"0"', "with three tags"),
        ('"reasoning"', '"a b"', "with three tags"),
        ("[markdown] tags", "[raw] tags", "with three tags"),
        ("# ### END SOLUTION\n", "", "the text reasoning needs one line"),
    ],
)
def test_what_is_wrong_with_such_a_text_is_told(tmp_path, before, after, sentence):
    with pytest.raises(authoring.AuthoringError, match=sentence):
        built(tmp_path, PAGE.replace(before, after))


def test_two_texts_of_one_name_are_told(tmp_path):
    with pytest.raises(authoring.AuthoringError, match="the marked of reasoning is here twice"):
        built(tmp_path, PAGE + PAGE)


def test_the_released_page_has_an_empty_text_and_nothing_of_the_answer():
    page = nbformat.read(authoring.NOTEBOOKS / NAME / f"{NAME}.ipynb", as_version=4)
    [cell] = [cell for cell in page.cells if cell.metadata.get("nbgrader", {}).get("grade_id") == MARKED]
    assert cell.source == authoring.TEXT_STUB
    source = authoring.source_notebook(authoring.SOLUTIONS / f"{NAME}.py")
    assert authoring.leaked_lines(page, source) == []
    [text] = [cell for cell in source.cells if cell.id == "marked-reasoning"]
    assert len(text.source) > 500
    assert authoring.released_source(text) == authoring.TEXT_STUB


# --- in a course ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def alembic_on_path(monkeypatch):
    """nbgrader's gradebook runs `alembic`, in an environment that need not be activated."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


def marks(course, student):
    """(auto score, manual score, needs a manual grade) of the text, and the score of all."""
    with gradebook(course) as book:
        submission = book.find_submission(NAME, student)
        [notebook] = submission.notebooks
        [grade] = [grade for grade in notebook.grades if grade.name == MARKED]
        return (grade.auto_score, grade.manual_score, bool(grade.needs_manual_grade)), submission.score


def mark(course, student, points):
    """What the form grader does when a person enters points."""
    with gradebook(course) as book:
        [notebook] = book.find_submission(NAME, student).notebooks
        [grade] = [grade for grade in notebook.grades if grade.name == MARKED]
        grade.manual_score = points
        book.db.commit()


def page_with(course, text):
    """The released page with one exercise answered, and `text` as the learner's page of reasoning (None: untouched)."""
    page = nbformat.read(released(course, NAME), as_version=4)
    for cell in page.cells:
        if cell.id == "pareto_front":
            cell.source = references(NAME)["pareto_front"]
        if text is not None and cell.id == "marked-reasoning":
            cell.source = text
    return page


@pytest.mark.slow
def test_a_text_waits_for_a_person_and_keeps_its_mark(tmp_path):
    pytest.importorskip("nbgrader")
    room = Room(tmp_path)
    course = room.course("fp8-capstone", [NAME], release=False)
    text = (
        "**The choice.** Four bits, as the mean is right.\n\n<script>alert('read')</script><b onclick='go()'>bold</b>"
    )
    hand_in(course, "ada", NAME, page_with(course, text))
    hand_in(course, "bob", NAME, page_with(course, None))
    removed = page_with(course, None)
    removed.cells = [cell for cell in removed.cells if cell.id != "marked-reasoning"]
    hand_in(course, "cid", NAME, removed)
    room.run(course.folder, "autograde", NAME)
    assert marks(course, "ada") == ((None, None, True), 2.0)
    for student in ("bob", "cid"):  # an untouched text is worth nothing, and nobody need look at it
        assert marks(course, student) == ((0.0, None, False), 2.0)

    mark(course, "ada", 7.0)
    assert marks(course, "ada")[1] == 9.0
    room.run(course.folder, "autograde", NAME, "--student=ada", "--force")
    (auto, manual, _), score = marks(course, "ada")
    assert (auto, manual, score) == (None, 7.0, 9.0)

    room.run(course.folder, "generate_feedback", NAME, "--student=ada")
    shown = (course.folder / "feedback" / "ada" / NAME / f"{NAME}.html").read_text(encoding="utf-8")
    assert "Four bits, as the mean is right." in shown
    assert "<script>alert" not in shown
    assert "onclick" not in shown.partition("Four bits, as the mean")[2].partition("</div>")[0]
