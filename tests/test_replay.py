"""Replay: one answer of one submission again, in the sandbox: input, theirs, right, and the answer's source."""

import json
import shutil
import sys

import pytest

from lowprec_lab.bench.classroom import Classroom, honest_answers
from lowprec_lab.chapters import find_chapter
from lowprec_lab.grading.course import CourseError, init_course

pytest.importorskip("nbgrader")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("bwrap") is None, reason="needs Linux with bubblewrap"
)
BITS = find_chapter("01")
WRONG = """@fill
def ulp(x, fmt):
    # a comment \x1b[31m with a colour and \u202e more
\treturn x.double() * 0 + 0.125
"""


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A course in which one person is right and one is not; nothing of it is graded, or has to be."""
    from lowprec_lab import authoring

    room = Classroom(tmp_path_factory.mktemp("replay"), BITS)
    init_course(room.course, "class", [BITS])
    page = authoring.source_notebook(authoring.SOLUTIONS / f"{BITS.name}.py")
    right = next(honest_answers(BITS))
    for student, change in (("ada", {}), ("bob", {"ulp": WRONG}), ("cy", {"ulp": "@fill\ndef ulp(x, fmt):\n    ..."})):
        for cell in page.cells:
            cell.source = (right | change).get(cell.id, cell.source)
        room.hand_in(student, page, name=f"{BITS.name} (1).ipynb" if student == "ada" else None)
    return room


def shown(room, student, exercise="ulp", **options):
    from lowprec_lab.grading.replay import replay

    return replay(room.course, student, exercise, **options)


def test_a_wrong_answer_is_shown_with_its_first_differences(room):
    before = {path: path.read_bytes() for path in room.course.rglob("*") if path.is_file()}
    found = shown(room, "bob", most=4)
    assert found.verdict.level == "wrong"
    assert 0 < found.wrong <= found.cases
    assert len(found.differences) == 4
    assert len({each.check for each in found.differences}) > 1  # not four times the same
    for each in found.differences:
        rows = {row.label: row.value for row in each.rows}
        assert rows["yours"] == "0.125" or rows["yours"] == "nan"
        assert rows["yours"] != rows["right"]
        assert each.try_it.startswith("ulp(")
    assert {path: path.read_bytes() for path in room.course.rglob("*") if path.is_file()} == before


def test_the_text_has_all_of_it_and_nothing_that_steers_a_terminal(room):
    text = shown(room, "bob").text()
    for part in ("bob: exercise 1.10, ulp", "wrong on", "difference 1 of", "input", "yours", "right", "the answer"):
        assert part in text
    assert "    # a comment  [31m with a colour and  more" in text
    assert "    return x.double() * 0 + 0.125" in text
    assert not {character for character in text if ord(character) < 32} - {"\n"}
    assert "\u202e" not in text


def test_a_right_answer_has_no_differences(room):
    found = shown(room, "ada")
    assert (found.verdict.passed, found.wrong, found.differences) == (True, 0, [])
    assert "def ulp(x, fmt):" in found.text()
    assert "(1).ipynb was graded in its place" in found.text()


def test_what_was_not_written_is_said(room):
    found = shown(room, "cy")
    assert (found.verdict.level, found.differences, found.source) == ("unwritten", [], [])


def test_the_seed_is_the_courses(room):
    """The inputs are those that the answer lost its points on, and not the notebook's."""
    from lowprec_lab.graders.run import seed_number
    from lowprec_lab.grading.course import read_seed

    calls = {each.try_it for each in shown(room, "bob", most=50).differences}
    seed = room.course / "seed"
    kept = seed.read_text()
    seed.write_text("another\n")
    try:
        assert seed_number(read_seed(room.course)) != seed_number(kept.strip())
        assert calls != {each.try_it for each in shown(room, "bob", most=50).differences}
    finally:
        seed.write_text(kept)


@pytest.mark.parametrize("student", ["zoe", "..", "", "ada/../bob"])
def test_nobody_of_that_name(room, student):
    with pytest.raises(CourseError, match="has no submission of 01_bit_layouts .*Handed in by: ada, bob, cy"):
        shown(room, student)


def test_without_a_seed_nothing_is_replayed(room):
    seed = room.course / "seed"
    kept = seed.rename(room.place / "seed")
    try:
        with pytest.raises(CourseError, match="seed cannot be used"):
            shown(room, "bob")
    finally:
        kept.rename(seed)


@pytest.mark.slow
def test_the_command(room):
    done = room.run("-m", "lowprec_lab", "replay", "bob", "1.10", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["verdict"]["name"] == "ulp"
    assert set(content["differences"][0]["rows"]) >= {"input", "yours", "right"}


def test_a_command_that_cannot_be_right(room, capsys):
    from lowprec_lab.__main__ import main

    course = ["--course", str(room.course)]
    assert main(["replay", "bob", "ulp", "--chapter", "00", *course]) == 2
    assert "ulp is an exercise of 01_bit_layouts, not of 00_start" in capsys.readouterr().err
    assert main(["replay", "zoe", "ulp", *course]) == 1
    assert "zoe has no submission" in capsys.readouterr().err
