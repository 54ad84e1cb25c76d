"""A course for nbgrader: what `init_course` makes, and a class graded with nbgrader's own commands."""

import ast
import csv
import getpass
import inspect
import os
import stat
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from classroom import (
    ROOT,
    Room,
    answered,
    full_marks,
    hand_in,
    no_marks,
    points_of,
    references,
    released,
    scores,
    verdicts,
)
from nbformat.v4 import new_output

from lowprec_lab import authoring
from lowprec_lab.blanks import load_chapters
from lowprec_lab.chapters import CHAPTERS
from lowprec_lab.graders.registry import MISCONCEPTIONS, load_graders
from lowprec_lab.grading.course import CourseError, init_course, installed_release, read_seed, require_release

PAGE = """\
# %% tags=["setup"]
from lowprec_lab.exercises import check, fill

# %%
@fill
def sign_bit(x):
    ### BEGIN SOLUTION
    return x
    ### END SOLUTION

# %%
check(sign_bit)
"""


# --- what a course is made of ---------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A small source of chapter 00, from which courses are made quickly."""
    folder = tmp_path / "solutions"
    folder.mkdir()
    path = folder / f"{CHAPTERS[0].name}.py"
    path.write_text(PAGE)
    monkeypatch.setattr(authoring, "SOLUTIONS", folder)
    return path


@pytest.fixture
def make(page, tmp_path):
    return lambda folder="course", course_id="fp8-2027": init_course(tmp_path / folder, course_id, ["00"])


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_course_has_its_settings_its_sources_and_a_seed(make):
    course = make()
    name = CHAPTERS[0].name
    assert set(files_of(course.folder)) == {
        "course.json", "nbgrader_config.py", "seed", f"source/{name}/{name}.ipynb"
    }  # fmt: skip
    assert course.pages == [course.folder / "source" / name / f"{name}.ipynb"]
    assert "return x" in course.pages[0].read_text()
    assert len(read_seed(course.folder)) == 32
    require_release(course.folder)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_the_seed_is_for_the_instructor_alone(make):
    assert stat.S_IMODE((make().folder / "seed").stat().st_mode) == 0o600


def test_init_again_changes_nothing(make):
    course = make()
    (course.folder / "gradebook.db").write_bytes(b"grades")
    before = files_of(course.folder)
    assert make().notes == []
    assert files_of(course.folder) == before


def test_init_again_brings_new_sources_and_keeps_what_is_the_instructors(make, page):
    course = make()
    config, seed = course.folder / "nbgrader_config.py", read_seed(course.folder)
    config.write_text(config.read_text() + "\nc.Execute.timeout = 7\n")
    course.pages[0].write_text(course.pages[0].read_text().replace("return x", "return -x"))
    page.write_text(PAGE.replace("return x", "return x + 0"))
    again = make()
    assert config.read_text().endswith("c.Execute.timeout = 7\n")
    assert read_seed(course.folder) == seed
    assert "return x + 0" in course.pages[0].read_text()
    [kept] = (course.folder / "kept").iterdir()
    assert "return -x" in kept.read_text()
    assert [str(config) in again.notes[0], str(kept) in again.notes[1]] == [True, True]
    assert list(course.pages[0].parent.iterdir()) == course.pages  # nbgrader would release anything beside it


def test_an_interrupted_init_can_be_repeated(make, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lowprec_lab.grading.course._write_source", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make()
    assert make().pages[0].is_file()


def test_a_page_that_cannot_be_built_leaves_no_half_course(make, page, tmp_path):
    page.write_text(PAGE.replace("    ### END SOLUTION\n", ""))
    with pytest.raises(authoring.AuthoringError):
        make()
    assert not (tmp_path / "course").exists()


def test_courses_have_seeds_of_their_own(make):
    assert read_seed(make("one", "one").folder) != read_seed(make("two", "two").folder)


def refused(sentence, folder, course_id="fp8-2027"):
    with pytest.raises(CourseError, match=sentence):
        init_course(folder, course_id, ["00"])


def test_places_that_are_no_course_are_refused(make, tmp_path):
    refused("is inside the clone", ROOT / "course")
    refused("is inside the clone", ROOT)
    assert not (ROOT / "course").exists()
    file = tmp_path / "file"
    file.write_text("x")
    refused("is a file", file)
    refused("is not empty, and no course", tmp_path)
    refused("is the course 'fp8-2027', not 'other'", make().folder, "other")
    (tmp_path / "course" / "course.json").write_text("{")
    refused("cannot be read", tmp_path / "course")


@pytest.mark.parametrize("course_id", ["", "a b", "a/b", "..", "-a", "a*", "é"])
def test_a_course_id_is_a_folders_name(tmp_path, course_id):
    refused("a course id is letters, digits", tmp_path / "course", course_id)
    assert not (tmp_path / "course").exists()


def test_grading_without_the_seed_or_with_another_release_is_refused(make):
    folder = make().folder
    (folder / "seed").write_text("\n")
    with pytest.raises(CourseError, match=r"seed cannot be used \(it is empty\)"):
        read_seed(folder)
    (folder / "seed").unlink()
    with pytest.raises(CourseError, match="Bring it back from a copy"):
        read_seed(folder)
    record = folder / "course.json"
    record.write_text(record.read_text().replace(f'"{installed_release()}"', '"0.0.1"'))
    with pytest.raises(CourseError, match=r"is pinned to lowprec_lab 0\.0\.1, and .* is installed"):
        require_release(folder)


# --- what an executed check is worth --------------------------------------------------------------------------------


def result(text):
    return new_output("execute_result", data={"text/plain": text})


WARNING = new_output("stream", name="stderr", text="UserWarning: careful")
WORTH = {
    "full": ([result("2.0")], 2),
    "part": ([result("0.5")], 0.5),
    "nothing": ([result("0.0")], 0),
    "a warning costs nothing": ([WARNING, result("2.0")], 2),
    "an error": ([new_output("error", ename="E", evalue="", traceback=[]), result("2.0")], 0),
    "no output": ([], 0),
    "only a verdict": ([new_output("display_data", data={"text/plain": "2.0"})], 0),
    "no number": ([result("'well done'")], 0),
    "too much": ([result("3.0")], 0),
    "negative": ([result("-1.0")], 0),
    "nan": ([result("nan")], 0),
}


def test_pages_without_a_kernel_show_pictures_of_explorers():
    pytest.importorskip("nbgrader")
    from lowprec_lab.grading.execute import WIDGET, show_pictures

    outputs = [{WIDGET: {}, "image/png": "..."}, {WIDGET: {}, "text/plain": "an explorer"}, {"text/plain": "1"}]
    cell = nbformat.v4.new_code_cell("", outputs=[new_output("display_data", data=data) for data in outputs])
    show_pictures(cell)
    assert [list(output.data) for output in cell.outputs] == [["image/png"], [WIDGET, "text/plain"], ["text/plain"]]


@pytest.mark.parametrize("name", WORTH)
def test_what_an_executed_check_is_worth(name):
    pytest.importorskip("nbgrader")
    from nbgrader.utils import determine_grade

    from lowprec_lab.grading.execute import settle

    outputs, worth = WORTH[name]
    cell = nbformat.v4.new_code_cell("check(f)", outputs=outputs)
    cell.metadata["nbgrader"] = {"grade": True, "solution": False, "grade_id": "check_f", "points": 2}
    settle(cell)
    assert determine_grade(cell) == (worth, 2)


# --- a class, with nbgrader's commands ------------------------------------------------------------------------------


# A learner's folder on the machine that grades. An answer in it that were used would be right.
SAVED = {
    str(
        Path("answers", "start.py")
    ): b"# %% answer: sign_bit | saved 2026-11-30T10:11:12+00:00\n@fill\ndef sign_bit(x):\n"
    b"    return (x.view(torch.int32) >> 31) & 1\n"
}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    pytest.importorskip("nbgrader")
    place = tmp_path_factory.mktemp("class")
    for path, content in SAVED.items():
        (place / "work" / path).parent.mkdir(parents=True, exist_ok=True)
        (place / "work" / path).write_bytes(content)
    return Room(place)


@pytest.fixture(scope="module")
def course(room):
    """A course of the first two chapters, released."""
    return room.course("fp8-2027", [chapter.name for chapter in CHAPTERS[:2]])


@pytest.fixture(autouse=True)
def alembic_on_path(monkeypatch):
    """nbgrader's gradebook runs `alembic`, in an environment that need not be activated."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


@pytest.mark.slow
@pytest.mark.usefixtures("wrong_class")  # begins the long grading
def test_full_marks_for_the_reference_then_0_for_an_empty_page(room, course):
    """One student, through the exchange: hands in everything and is graded, hands in an untouched page and is again."""
    name, desk = CHAPTERS[1].name, room.place / "desk"
    desk.mkdir()
    assert (
        released(course, name).read_bytes().strip()
        == (authoring.NOTEBOOKS / name / f"{name}.ipynb").read_bytes().strip()
    )
    room.run(desk, "fetch_assignment", name, "--course=fp8-2027")
    page = desk / name / f"{name}.ipynb"
    untouched = page.read_bytes()

    def submit_and_grade(*options):
        room.run(desk, "submit", name, "--course=fp8-2027")
        room.run(course.folder, "collect", name, *options)
        room.run(course.folder, "autograde", name, f"--student={getpass.getuser()}")
        return scores(course, getpass.getuser(), name)

    nbformat.write(answered(page, references(name)), page)
    assert "Success! Your notebook passes all the tests." in room.run(desk, "validate", str(page))
    assert submit_and_grade() == full_marks(name), verdicts(course, getpass.getuser(), name)
    page.write_bytes(untouched)
    assert f"VALIDATION FAILED ON {len(points_of(name))} CELL" in room.run(desk, "validate", str(page))
    assert submit_and_grade("--update") == no_marks(name)
    assert files_of(room.work) == SAVED  # neither read, nor written


@pytest.mark.slow
@pytest.mark.parametrize("name", [chapter.name for chapter in CHAPTERS])
def test_each_misconception_costs_points(wrong_class, name):
    course, grading = wrong_class
    grading.result()
    known = {exercise: wrong[: wrong_students(name)] for exercise, wrong in misconceptions_of(name).items()}
    assert sum(map(len, known.values())) >= 1.5 * len(known)
    believed = [
        (exercise, misconception.function.__name__)
        for exercise, wrong in known.items()
        for k, misconception in enumerate(wrong)
        if scores(course, f"wrong-{k}", name)[exercise][0] >= points_of(name)[exercise]
    ]
    assert believed == []


def misconceptions_of(name):
    """{exercise: its known misconceptions} of a chapter."""
    return {exercise: MISCONCEPTIONS[exercise] for exercise in points_of(name)}


def wrong_students(name):
    """How many people hand in wrong answers: all there can be in chapter 01, and two in each other chapter.

    (That every misconception costs points is tested in test_judge.py. Here they go through nbgrader.)
    """
    return max(map(len, misconceptions_of(name).values())) if name == CHAPTERS[1].name else 2


@pytest.fixture(scope="module")
def wrong_class(room):
    """A course of people who are wrong, and its grading, which goes on beside the other tests (a future).

    Student k answers each exercise with its k-th known misconception.
    """
    load_chapters()
    load_graders()
    names = [chapter.name for chapter in CHAPTERS]
    course = room.course("fp8-wrong", release=False)
    for name in names:
        known = misconceptions_of(name)
        for k in range(wrong_students(name)):
            answers = {exercise: as_answer(wrong[k]) for exercise, wrong in known.items() if k < len(wrong)}
            notebook = answered(released(course, name), answers)
            notebook.cells = [cell for cell in notebook.cells if cell.id == "setup" or "nbgrader" in cell.metadata]
            hand_in(course, f"wrong-{k}", name, notebook)
    with ThreadPoolExecutor(1) as pool:
        yield course, pool.submit(lambda: [room.run(course.folder, "autograde", name) for name in names])


def as_answer(misconception):
    """A misconception as its owner would hand it in: a cell of its own, with the functions that it calls."""
    module, parts = inspect.getmodule(misconception.function), []

    def add(function):
        for name in sorted(names_in(function) & set(vars(module)) - {function.__name__}):
            value = vars(module)[name]
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                add(value)
            else:
                parts.append(f"from {module.__name__} import {name}")
        if function is not misconception.function:
            parts.append(inspect.getsource(function))

    add(misconception.function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(misconception.function)))
    tree.body[0].decorator_list = [ast.Name("fill")]
    tree.body[0].name = misconception.exercise
    return "\n".join([*dict.fromkeys(parts), ast.unparse(tree)])


def names_in(thing):
    """The names that a function's or a class's source uses."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    return {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}


@pytest.mark.slow
def test_each_answer_scores_what_it_deserves(course, room):
    """One page: an answer that warns, one that raises, one that never ends, and one that replaces `check` as well."""
    name = CHAPTERS[1].name
    answers = references(name)
    warning, raising, endless, replacing = list(points_of(name))[:4]
    warns = "    import sys, warnings\n    warnings.warn('careful')\n    print('careful', file=sys.stderr)\n"
    answers[warning] = with_first_line(answers[warning], warns)
    answers[raising] = with_first_line(answers[raising], "    raise RuntimeError('no')\n")
    answers[endless] = with_first_line(answers[endless], "    while True: pass\n")
    answers[replacing] += "\n\ndef check(answer):\n    return 'all tests passed'\n"
    hand_in(course, "odd", name, answered(released(course, name), answers))
    room.run(course.folder, "autograde", name, "--student=odd")
    want = full_marks(name) | {exercise: (0, points_of(name)[exercise]) for exercise in (raising, endless)}
    assert scores(course, "odd", name) == want, verdicts(course, "odd", name)
    room.run(course.folder, "generate_feedback", name, "--student=odd")
    feedback = (course.folder / "feedback" / "odd" / name / f"{name}.html").read_text(encoding="utf-8")
    assert f"✗ {raising}" in feedback or f"&#10007; {raising}" in feedback
    assert "It raised RuntimeError: no" in feedback
    room.run(course.folder, "export")
    with (course.folder / "grades.csv").open() as file:
        [row] = [row for row in csv.DictReader(file) if (row["student_id"], row["assignment"]) == ("odd", name)]
    assert float(row["score"]) == sum(points for points, _ in want.values())
    assert float(row["max_score"]) == sum(points_of(name).values())


@pytest.mark.slow
def test_nbgraders_own_engine_is_one_line_away(room):
    """The engine that is compared with: it runs the page in a kernel, with the course's seed."""
    name = CHAPTERS[0].name
    course = room.course("fp8-stock", [name], release=False)
    config = course.folder / "nbgrader_config.py"
    ours, stock = (f'ENGINE = "lowprec_lab.grading.execute.{engine}"' for engine in ("JudgeExecute", "CourseExecute"))
    assert config.read_text().count(ours) == 1
    config.write_text(config.read_text().replace(ours, stock))
    right, tricked = references(name), references(name)
    tricked["sign_bit"] += "\n\ndef check(answer):\n    return 'all tests passed'\n"
    for student, answers in (("right", right), ("tricked", tricked), ("empty", {})):
        hand_in(course, student, name, answered(released(course, name), answers))
    room.run(course.folder, "autograde", name)
    assert scores(course, "right", name) == full_marks(name), verdicts(course, "right", name)
    assert scores(course, "empty", name) == no_marks(name)
    assert scores(course, "tricked", name) == no_marks(name)
    assert "This check ended in no number" in verdicts(course, "tricked", name)
    assert not (course.folder / ".lowprec" / "verdicts").exists()


def with_first_line(source, lines):
    head, marker, rest = source.partition("    ### BEGIN SOLUTION\n")
    return f"{head}{marker}{lines}{rest}"


@pytest.mark.slow
def test_two_courses_side_by_side(course, room):
    """The same students in two courses of one exchange, the one with all done here and the other there."""
    name = CHAPTERS[0].name
    other = room.course("fp8-evening", [name])
    done, untouched = (answered(released(course, name), answers) for answers in (references(name), {}))
    for one, student, notebook in (
        (course, "ada", done),
        (course, "bob", untouched),
        (other, "ada", untouched),
        (other, "bob", done),
    ):
        hand_in(one, student, name, notebook)
    for one, ada, bob in ((course, full_marks, no_marks), (other, no_marks, full_marks)):
        room.run(one.folder, "autograde", name, "--student=[ab]*")
        assert scores(one, "ada", name) == ada(name)
        assert scores(one, "bob", name) == bob(name)
    outbound = {path.parent.name: sorted(p.name for p in path.iterdir()) for path in room.exchange.glob("*/outbound/")}
    assert outbound == {"fp8-2027": [chapter.name for chapter in CHAPTERS[:2]], "fp8-evening": [name]}


@pytest.mark.slow
def test_a_lost_seed_is_replaced_by_a_fresh_one(course, room):
    name = CHAPTERS[0].name
    hand_in(course, "late", name, answered(released(course, name), references(name)))
    lost = read_seed(course.folder)
    (course.folder / "seed").unlink()
    assert "a fresh one was made" in room.run(course.folder, "autograde", name, "--student=late")
    assert read_seed(course.folder) != lost
    assert scores(course, "late", name) == full_marks(name)


@pytest.mark.slow
def test_nobody_is_graded_with_another_release(course, room):
    name = CHAPTERS[0].name
    hand_in(course, "early", name, answered(released(course, name), references(name)))
    record = course.folder / "course.json"
    before = record.read_text()
    record.write_text(before.replace(f'"{installed_release()}"', '"0.0.1"'))
    try:
        assert "is pinned to lowprec_lab 0.0.1" in room.run(
            course.folder, "autograde", name, "--student=early", status=1
        )
    finally:
        record.write_text(before)
