"""The report on a class: what is counted, and what is in its table, its files and its picture."""

import csv
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from lowprec_lab.blanks import BLANKS, load_chapters
from lowprec_lab.chapters import find_chapter
from lowprec_lab.graders.judging import unwritten
from lowprec_lab.graders.registry import MISCONCEPTIONS, load_graders
from lowprec_lab.grading.report import class_report
from lowprec_lab.grading.verdicts import save_verdicts

Gradebook = pytest.importorskip("nbgrader.api").Gradebook
pytestmark = pytest.mark.filterwarnings("ignore:Object of type")  # SQLAlchemy's, about nbgrader's way with it

CHAPTER = find_chapter("00").name
load_chapters()
load_graders()
[NAME] = [name for name, blank in BLANKS.items() if blank.chapter.name == CHAPTER]
MOST = float(BLANKS[NAME].points)


def verdict(points, misconception="", level="wrong"):
    made = unwritten(BLANKS[NAME], "")
    made.level, made.points, made.passed, made.misconception = level, points, points == MOST, misconception
    return {NAME: made}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A gradebook with five people: right, late, wrong twice, and one who wrote nothing. The last only handed in."""
    folder = tmp_path_factory.mktemp("made")
    common = MISCONCEPTIONS[NAME][0].function.__name__
    people = {
        "=ada": (verdict(MOST, level="exact"), 0.0),
        "bob": (verdict(MOST, level="exact"), 0.5),
        "cy": (verdict(0.0, common), 0.0),
        "di": (verdict(0.0, common), 0.0),
        "eve": (verdict(0.0, level="unwritten"), 0.0),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # nbgrader runs alembic
        book = Gradebook(f"sqlite:///{folder / 'gradebook.db'}")
    with book:
        book.add_assignment(CHAPTER)
        book.add_notebook(CHAPTER, CHAPTER)
        book.add_grade_cell(f"check_{NAME}", CHAPTER, CHAPTER, max_score=MOST, cell_type="code")
        for student, (verdicts, late) in people.items():
            book.add_student(student)
            book.add_submission(CHAPTER, student)
            book.find_grade(f"check_{NAME}", CHAPTER, CHAPTER, student).auto_score = verdicts[NAME].points
            book.find_submission_notebook(CHAPTER, CHAPTER, student).late_submission_penalty = late
            save_verdicts(folder, CHAPTER, student, "key", verdicts)
        book.add_student("zoe")
        book.add_submission(CHAPTER, "zoe")
        book.db.commit()
    return folder


@pytest.fixture
def course(made, tmp_path):
    return shutil.copytree(made, tmp_path / "course")


def test_scores_are_the_gradebooks(course):
    report = class_report(course, CHAPTER)
    assert [(score.student, score.score, score.late_penalty) for score in report.scores] == [
        ("=ada", MOST, 0.0), ("bob", MOST - 0.5, 0.5), ("cy", 0.0, 0.0), ("di", 0.0, 0.0), ("eve", 0.0, 0.0)
    ]  # fmt: skip
    assert "zoe" not in str(report)


def test_what_a_grader_changed_counts(course):
    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as book:
        grade = book.find_grade(f"check_{NAME}", CHAPTER, CHAPTER, "cy")
        grade.manual_score, grade.extra_credit = MOST, 0.25
        book.db.commit()
    report = class_report(course, CHAPTER)
    assert {score.student: score.points[NAME] for score in report.scores}["cy"] == MOST + 0.25
    assert report.exercises[0].passed == 3


def test_exercises_say_how_many_missed_them_and_why(course):
    [figures] = class_report(course, CHAPTER).exercises
    assert (figures.graded, figures.passed, figures.missed, figures.unwritten) == (5, 2, 2, 1)
    assert figures.mean_points == pytest.approx(2 * MOST / 5)
    common = MISCONCEPTIONS[NAME][0]
    assert figures.misconceptions == [(common.function.__name__, common.sentence, 2)]


def test_the_table(course):
    text = class_report(course, CHAPTER, failed={"fay\x1b[31m": "no reason"}).text()
    assert "2 of 5" in text
    assert f"2 x {MISCONCEPTIONS[NAME][0].function.__name__}" in text
    assert "late: 0.5 taken off" in text
    assert "not graded: fay [31m: no reason" in text
    assert f"Most people miss {NAME}" in text


def test_files(course):
    report = class_report(course, CHAPTER, failed={"fay": "no reason"}, notes=["a note"])
    folder = course / "reports" / CHAPTER
    assert sorted(path.name for path in folder.iterdir()) == [
        "exercises.csv", "report.json", "report.png", "scores.csv"
    ]  # fmt: skip
    assert sorted(report.files) == sorted(folder.iterdir())
    rows = list(csv.DictReader(io.StringIO((folder / "scores.csv").read_text())))
    assert rows[0]["student"] == "'=ada"  # no formula in a spreadsheet
    assert [float(row[NAME]) for row in rows] == [MOST, MOST, 0, 0, 0]
    [row] = csv.DictReader(io.StringIO((folder / "exercises.csv").read_text()))
    assert (row["name"], row["count"], row["sentence"]) == (NAME, "2", MISCONCEPTIONS[NAME][0].sentence)
    content = json.loads((folder / "report.json").read_text())
    assert content["failed"] == {"fay": "no reason"}
    assert content["graded"] == 5
    assert content["exercises"][0]["misconceptions"][0][2] == 2
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_class_of_nobody_has_a_report(course):
    """Nobody is graded yet: every figure is 0, and nothing divides by it."""
    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as book:
        for student in ("=ada", "bob", "cy", "di", "eve"):
            book.remove_student(student)
    report = class_report(course, CHAPTER)
    assert (report.scores, report.exercises[0].graded, report.exercises[0].mean_points) == ([], 0, 0.0)
    assert "0 of 0" in report.text()
