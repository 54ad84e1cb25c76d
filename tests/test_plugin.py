"""The plug-in under nbgrader's own commands, and its form grader in a browser: what people expect, and attacks."""

import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from classroom import (
    Room,
    answered,
    full_marks,
    gradebook,
    hand_in,
    no_marks,
    released,
    scores,
    verdicts,
)
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, new_raw_cell

pytest.importorskip("nbgrader")

from nbgrader.utils import determine_grade

from lowprec_lab.blanks import BLANKS, load_chapters
from lowprec_lab.chapters import CHAPTERS
from lowprec_lab.graders.judging import unwritten
from lowprec_lab.graders.run import seed_number
from lowprec_lab.grading.course import installed_release, read_seed
from lowprec_lab.grading.execute import clamped, graded_by, judge_notebook, write_outputs
from lowprec_lab.grading.processes import PlainProcesses
from lowprec_lab.grading.verdicts import grader_hash, seed_id

START = CHAPTERS[0].name
RIGHT = "@fill\ndef sign_bit(x):\n    return (x.view(torch.int32) >> 31) & 1"
PARTLY = "@fill\ndef sign_bit(x):\n    return (x < 0).to(torch.int32)"
WRONG = "@fill\ndef sign_bit(x):\n    return x"


# --- without nbgrader's commands -------------------------------------------------------------------------------------


def graded_page(*cells):
    page = new_notebook(cells=list(cells))
    for cell in page.cells:
        name = cell.source.removeprefix("check(").removesuffix(")")
        if cell.source.startswith("check("):
            cell.metadata["nbgrader"] = {
                "grade": True, "solution": False, "locked": True, "points": 2, "grade_id": f"check_{name}",
            }  # fmt: skip
    return page


@pytest.mark.parametrize(
    ("points", "worth"),
    [(2.0, 2), (0.5, 0.5), (0, 0), (3.0, 2), (-1, 0), (float("nan"), 0), (float("inf"), 0), (float("-inf"), 0)],
)
def test_points_are_those_of_the_cell_at_most(points, worth):
    assert clamped(points, 2) == worth
    load_chapters()
    verdict = unwritten(BLANKS["sign_bit"], "<script>alert(1)</script>")
    verdict.points = points
    page = graded_page(new_code_cell("check(sign_bit)"))
    write_outputs(page, {"sign_bit": verdict})
    nbformat.validate(page)
    assert determine_grade(page.cells[0]) == (worth, 2)
    shown = page.cells[0].outputs[0].data
    assert "<script" not in shown["text/html"]
    assert "<script>alert(1)" in shown["text/plain"]


def test_a_graded_cell_that_nothing_judges_earns_nothing():
    page = graded_page(new_code_cell("check(nothing)"))
    write_outputs(page, {})
    assert determine_grade(page.cells[0]) == (0, 2)
    assert "nothing judges this cell" in page.cells[0].outputs[0].evalue


def test_other_cells_lose_their_outputs():
    page = graded_page(new_code_cell("x", outputs=[new_output("stream", text="hello")], execution_count=3))
    write_outputs(page, {})
    assert page.cells[0].outputs == []
    assert page.cells[0].execution_count is None


def test_what_graded_a_page_is_said_and_the_seed_is_not():
    text = graded_by(1234567).source
    assert installed_release() in text
    assert grader_hash() in text
    assert seed_id(1234567) in text
    assert "1234567" not in text


@pytest.mark.parametrize(("answer", "points"), [(RIGHT, 1.0), (PARTLY, 0.67), (WRONG, 0.0)])
def test_a_page_is_judged_with_plain_processes_too(answer, points):
    page = new_notebook(cells=[new_code_cell(answer), new_code_cell("raise SystemExit")])
    verdict = judge_notebook(page, START, PlainProcesses(), 7)["sign_bit"]
    assert verdict.points == points, verdict.text()
    assert bool(verdict.rows) == (answer == PARTLY)


# --- nbgrader's commands ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return Room(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def course(room):
    return room.course("fp8-plugin", [START], release=False)


@pytest.fixture(autouse=True)
def alembic_on_path(monkeypatch):
    """nbgrader's gradebook runs `alembic`, in an environment that need not be activated."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


def page_with(course, answer=RIGHT, *cells):
    page = answered(released(course, START), {"sign_bit": answer})
    page.cells += cells
    return page


def autograded(course, student):
    return nbformat.read(course.folder / "autograded" / student / START / f"{START}.ipynb", as_version=4)


def state_of(folder):
    about = {path: os.lstat(path) for path in folder.rglob("*")}
    return {path: (each.st_ino, each.st_mode, each.st_size, each.st_mtime_ns) for path, each in about.items()}


def everything_in(folder):
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.slow
def test_everybody_is_graded_whatever_they_handed_in(room):
    course = room.course("fp8-broken", [START], release=False)
    submitted, seed = course.folder / "submitted", read_seed(course.folder)
    right = page_with(course)
    twice = page_with(course)
    twice.cells += [twice.cells[k].copy() for k in range(len(twice.cells))]
    bare = page_with(course)
    for cell in bare.cells:
        cell.metadata = {}
    hand_in(course, "a-right", START, right)
    hand_in(course, "b-broken", START, b'{"cells": [')
    hand_in(course, "c-empty-file", START, b"")
    hand_in(course, "d-twice", START, nbformat.writes(twice, version=nbformat.NO_CONVERT).encode())
    hand_in(course, "e-bare", START, bare)
    renamed = hand_in(course, "f-renamed", START, right)
    renamed.rename(renamed.with_name(f"{START} (1).ipynb"))
    hand_in(course, "g-nothing", START, right).unlink()
    link = hand_in(course, "h-link", START, right)
    link.unlink()
    link.symlink_to(course.folder / "source" / START / f"{START}.ipynb")
    for name in ("seed", "gradebook.db"):
        (link.parent / name).symlink_to(course.folder / name)
    hand_in(course, "i-time", START, right, timestamp="yesterday")
    pipe = hand_in(course, "j-pipe", START, right)
    pipe.unlink()
    os.mkfifo(pipe)
    other = hand_in(course, "k-files", START, right)
    (other.parent / "torch.py").write_text("raise SystemExit")
    (other.parent / "secret.txt").write_text("left where it is")
    hand_in(course, "z-right", START, right)
    before = state_of(submitted)
    room.run(course.folder, "autograde", START)
    full = ["a-right", "d-twice", "e-bare", "f-renamed", "i-time", "k-files", "z-right"]
    none = ["b-broken", "c-empty-file", "g-nothing", "h-link", "j-pipe"]
    assert {student: scores(course, student, START) for student in full + none} == {
        **dict.fromkeys(full, full_marks(START)),
        **dict.fromkeys(none, no_marks(START)),
    }
    assert state_of(submitted) == before
    room.run(course.folder, "generate_feedback", START)
    for folder in ("autograded", "feedback"):
        files = {path.name for path in (course.folder / folder).rglob("*") if path.is_file()}
        assert files <= {f"{START}.ipynb", f"{START}.html", "timestamp.txt", "submission_secret.txt"}
        content = everything_in(course.folder / folder)
        assert seed.encode() not in content
        assert b"left where it is" not in content
    for student in [*none, "d-twice", "f-renamed", "i-time"]:
        assert autograded(course, student).cells[0].source.startswith("<div><p><b>For the instructor")
    with gradebook(course) as book:
        assert book.find_submission(START, "i-time").timestamp is not None


@pytest.mark.slow
def test_feedback_says_what_graded_it_and_loads_nothing(course, room):
    hand_in(course, "wrong", START, page_with(course, PARTLY))
    room.run(course.folder, "autograde", START, "--student=wrong")
    room.run(course.folder, "generate_feedback", START, "--student=wrong")
    feedback = (course.folder / "feedback" / "wrong" / START / f"{START}.html").read_text(encoding="utf-8")
    seed = read_seed(course.folder)
    for said in (installed_release(), grader_hash(), seed_id(seed_number(seed)), "first difference", "yours", "-0.0"):
        assert said in feedback
    assert seed not in feedback
    assert "<script" not in feedback
    assert "default-src 'none'" in feedback
    loading = r"""<(?:link|img|iframe|source|embed|object|video|audio)\b[^>]*(?:src|href|data)=["']?([^"'> ]+)"""
    assert [each for each in re.findall(loading, feedback) if not each.startswith("data:")] == []


@pytest.mark.slow
def test_verdicts_are_kept_and_used_while_they_fit(course, room):
    kept = course.folder / ".lowprec" / "verdicts" / START / "kept.json"
    hand_in(course, "kept", START, page_with(course))
    room.run(course.folder, "autograde", START, "--student=kept")
    content = json.loads(kept.read_text())
    assert read_seed(course.folder) not in kept.read_text()
    content["verdicts"]["sign_bit"] |= {"points": 0.25, "headline": "as it was kept"}
    kept.write_text(json.dumps(content))
    room.run(course.folder, "autograde", START, "--student=kept", "--force")
    assert scores(course, "kept", START)["sign_bit"] == (0.25, 1)
    assert "as it was kept" in verdicts(course, "kept", START)
    hand_in(course, "kept", START, page_with(course, RIGHT + "  # another answer"))
    room.run(course.folder, "autograde", START, "--student=kept", "--force")
    assert scores(course, "kept", START) == full_marks(START)
    kept.write_text("{")
    room.run(course.folder, "autograde", START, "--student=kept", "--force")
    assert scores(course, "kept", START) == full_marks(START)
    assert json.loads(kept.read_text())["verdicts"]["sign_bit"]["points"] == 1


@pytest.mark.slow
def test_without_a_sandbox_nobody_is_graded_unless_the_course_says_so(room, monkeypatch):
    course = room.course("fp8-no-sandbox", [START], release=False)
    hand_in(course, "ada", START, page_with(course, WRONG))
    room.run(course.folder, "autograde", START)
    before = state_of(course.folder / "autograded")
    hand_in(course, "bob", START, page_with(course))
    folder = room.place / "without-bwrap"
    folder.mkdir()
    (folder / "alembic").symlink_to(Path(sys.executable).parent / "alembic")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(folder))
        said = room.run(course.folder, "autograde", START, "--force", status=1)
        assert "bubblewrap" in said
        assert said.count("ERROR") == 1
        assert state_of(course.folder / "autograded") == before
        config = course.folder / "nbgrader_config.py"
        off = "c.JudgeExecute.sandbox = False"
        config.write_text(config.read_text().replace(f"# {off}", off))
        room.run(course.folder, "autograde", START)
    assert scores(course, "bob", START) == full_marks(START)


@pytest.mark.slow
def test_late_penalties(room):
    course = room.course("fp8-late", [START], release=False)
    config = course.folder / "nbgrader_config.py"
    config.write_text(config.read_text() + "\nc.LateSubmissionPlugin.penalty_method = 'zero'\n")
    with gradebook(course) as book:
        book.update_or_create_assignment(START, duedate="2026-11-30 12:00:00 UTC")
    times = {"early": "2026-11-30 11:59:59 UTC", "late": "2026-11-30 12:00:01 UTC", "never": "soon"}
    for student, moment in times.items():
        hand_in(course, student, START, page_with(course), timestamp=moment)
    # A time that cannot be read is no way around the penalty: the file's own counts.
    os.utime(course.folder / "submitted" / "never" / START / "timestamp.txt", (4_000_000_000, 4_000_000_000))
    room.run(course.folder, "autograde", START)
    with gradebook(course) as book:
        penalties = {s: book.find_submission(START, s).notebooks[0].late_submission_penalty for s in times}
    assert penalties == {"early": None, "late": 1.0, "never": 1.0}
    room.run(course.folder, "generate_feedback", START)
    feedback = (course.folder / "feedback" / "late" / START / f"{START}.html").read_text(encoding="utf-8")
    assert "Late submission penalty" in feedback


@pytest.mark.slow
def test_a_regrade_keeps_manual_scores_and_comments(course, room):
    hand_in(course, "regraded", START, page_with(course, WRONG))
    room.run(course.folder, "autograde", START, "--student=regraded")
    with gradebook(course) as book:
        grade = book.find_grade("check_sign_bit", START, START, "regraded")
        grade.manual_score, grade.extra_credit = 0.5, 0.25
        book.find_comment("question_0A", START, START, "regraded").manual_comment = "Why?"
        book.db.commit()
    hand_in(course, "regraded", START, page_with(course))
    room.run(course.folder, "autograde", START, "--student=regraded", "--force")
    with gradebook(course) as book:
        grade = book.find_grade("check_sign_bit", START, START, "regraded")
        assert (grade.auto_score, grade.manual_score, grade.extra_credit, grade.score) == (1, 0.5, 0.25, 0.75)
        assert grade.needs_manual_grade
        assert book.find_comment("question_0A", START, START, "regraded").comment == "Why?"


@pytest.mark.slow
def test_a_resubmission_is_graded_when_it_is_newer(course, room):
    def hand_in_and_grade(answer, moment):
        hand_in(course, "again", START, page_with(course, answer), timestamp=moment)
        room.run(course.folder, "autograde", START, "--student=again")
        return scores(course, "again", START)

    assert hand_in_and_grade(WRONG, "2026-11-30 10:00:00 UTC") == no_marks(START)
    assert hand_in_and_grade(RIGHT, "2026-11-30 10:00:00 UTC") == no_marks(START)  # the same time: nbgrader skips it
    assert hand_in_and_grade(RIGHT, "2026-11-30 11:00:00 UTC") == full_marks(START)


@pytest.mark.slow
def test_a_source_that_was_not_generated_again_is_said_so(room):
    course = room.course("fp8-stale", [START], release=False)
    source = course.folder / "source" / START / f"{START}.ipynb"
    source.write_text(source.read_text().replace('"grade_id": "question_0A"', '"grade_id": "question_0Z"'))
    hand_in(course, "ada", START, page_with(course))
    said = room.run(course.folder, "autograde", START, status=1)
    assert f"Run `nbgrader generate_assignment {START} --force` first" in said


# --- the form grader in a browser ------------------------------------------------------------------------------------

# What a script in a page would do: give itself the points, with the instructor's cookies.
_TAKE_POINTS = (
    "fetch('/formgrader/api/grades?submission_id=' + submission_id).then(r => r.json()).then(grades => grades.forEach("
    "grade => fetch('/formgrader/api/grade/' + grade.id, {method: 'PUT', headers: {'X-XSRFToken': "
    "document.cookie.match(/_xsrf=([^;]+)/)[1]}, body: JSON.stringify({manual_score: 99, extra_credit: 99})})))"
)
_QUOTED = _TAKE_POINTS.replace('"', "&quot;").replace("'", "&#39;")
_SVG = f'<svg xmlns="http://www.w3.org/2000/svg" onload="{_QUOTED}"><script>{_TAKE_POINTS}</script></svg>'
PAYLOADS = {
    "script": f"<script>{_TAKE_POINTS}</script>",
    "onerror": f'<img src="x" onerror="{_QUOTED}">',
    "svg": _SVG,
    "iframe": f'<iframe srcdoc="<script>var submission_id = parent.submission_id; {_QUOTED}</script>"></iframe>',
    "toggle": f'<details open ontoggle="{_QUOTED}"><summary>x</summary></details>',
    "link": f"[click here](javascript:{_TAKE_POINTS.replace(' ', '%20').replace('(', '%28').replace(')', '%29')})",
    "anchor": f'<a href="javascript:{_QUOTED}">click here</a>',
    "form": '<form action="/formgrader?path=/tmp" method="get"><button>Resolve</button></form>',
    "heading": f"# check_sign_bit\n\n<b onmouseover=\"{_QUOTED}\">hover</b>",
}  # fmt: skip
# These reach a reader without a click.
_ALONE = ["script", "onerror", "svg", "iframe", "toggle"]


class Visit:
    """One page of the form grader, and what it asked of whom."""

    def __init__(self, browser, address, path):
        self.asked, self.trouble = [], []
        # With the cookies that a person has: a page that was given a token in the address has their rights.
        self.page = browser.new_context().new_page()
        self.page.on("request", lambda request: self.asked.append((request.method, request.url)))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.trouble.append(dialog.message), dialog.dismiss()))
        self.page.goto(f"{address}formgrader/gradebook?token=secret")
        self.page.goto(f"{address}{path}")
        self.address = address

    def elsewhere(self):
        """Requests that left this machine."""
        return [url for _, url in self.asked if not url.startswith((self.address, "data:", "blob:", "about:"))]

    def changes(self):
        """Requests that would change something."""
        return [each for each in self.asked if each[0] != "GET"]

    def wait_for_scores(self):
        self.page.wait_for_function("() => [...document.querySelectorAll('input.score')].every(e => e.placeholder)")
        self.page.wait_for_load_state("networkidle")


def submission_path(course, student):
    with gradebook(course) as book:
        return f"formgrader/submissions/{book.find_submission_notebook(START, START, student).id}/"


def manual_scores(course, student):
    with gradebook(course) as book:
        [notebook] = book.find_submission(START, student).notebooks
        return [(grade.manual_score, grade.extra_credit) for grade in notebook.grades]


def attack_page(course):
    """A right answer, and every payload in every kind of cell, as markdown, outputs and attachments."""
    raising = f"@fill\ndef sign_bit(x):\n    raise ValueError({PAYLOADS['script'] + PAYLOADS['onerror']!r})"
    page = page_with(course, raising)
    for number, payload in enumerate(PAYLOADS.values()):
        outputs = [
            new_output("display_data", data={"text/html": payload, "text/markdown": payload, "image/svg+xml": payload}),
            new_output("display_data", data={"application/javascript": _TAKE_POINTS, "text/latex": payload}),
            new_output("stream", text=payload),
            new_output("error", ename=payload, evalue=payload, traceback=[payload]),
        ]
        page.cells.insert(2 * number, new_markdown_cell(payload))
        page.cells += [
            new_code_cell(f"'''{payload}'''", outputs=outputs, metadata={"magics_language": payload}),
            new_raw_cell(payload, metadata={"raw_mimetype": "text/html"}),
            new_markdown_cell(f"> - {payload}\n\n```html\n{payload}\n```\n\n${payload}$"),
        ]
    picture = new_markdown_cell("![x](attachment:x.png) ![y](attachment:y)")
    picture["attachments"] = {"x.png": {"image/svg+xml": _SVG}, "y": {'image/png" onerror="x': payload}}
    page.cells.insert(0, picture)
    page.metadata |= {"title": payload, "widgets": {"application/vnd.jupyter.widget-state+json": {"state": payload}}}
    return page


@pytest.mark.slow
@pytest.mark.browser
def test_no_page_that_was_handed_in_changes_the_gradebook(room, browser):
    course = room.course("fp8-attacked", [START], release=False)
    hand_in(course, "eve", START, attack_page(course))
    returning = f"@fill\ndef sign_bit(x):\n    return {PAYLOADS['script']!r}"
    hand_in(course, "mallory", START, page_with(course, returning))
    room.run(course.folder, "autograde", START)
    assert scores(course, "eve", START) == scores(course, "mallory", START) == no_marks(START)
    with room.form_grader(course.folder) as address:
        for student in ("eve", "mallory"):
            visit = Visit(browser, address, submission_path(course, student))
            visit.wait_for_scores()
            shown = visit.page.locator("#notebook-container")
            assert (
                shown.locator("a[href^='javascript:' i], script, iframe, svg, form, [onerror], [onload]").count() == 0
            )
            for tag in ("b", "summary", "button:not(.btn)"):
                for k in range(shown.locator(tag).count()):
                    shown.locator(tag).nth(k).dispatch_event("mouseover")
            visit.page.wait_for_timeout(1500)
            assert (visit.changes(), visit.elsewhere(), visit.trouble) == ([], [], [])
            assert manual_scores(course, student) == [(None, None)]
            # The score of the cell is still the form grader's own: no heading stands in for it.
            assert visit.page.locator("#check_sign_bit").evaluate_all("all => all.map(e => e.tagName)") == ["INPUT"]
        feedback_is_inert(room, course, browser)


def feedback_is_inert(room, course, browser):
    room.run(course.folder, "generate_feedback", START)
    page, asked = browser.new_context().new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((course.folder / "feedback" / "eve" / START / f"{START}.html").as_uri())
    page.wait_for_load_state("networkidle")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.locator("script, iframe, svg, [onerror], [onload], a[href^='javascript:' i]").count() == 0


@pytest.mark.slow
@pytest.mark.browser
def test_the_payloads_do_win_where_nothing_stands_in_their_way(room, browser):
    """The same payloads, put into autograded pages by hand, where stock nbgrader leaves them."""
    course = room.course("fp8-open", [START], release=False)
    for student in _ALONE:
        hand_in(course, student, START, page_with(course))
    room.run(course.folder, "autograde", START)
    for student in _ALONE:
        page = autograded(course, student)
        page.cells.insert(0, new_markdown_cell(PAYLOADS[student]))
        path = course.folder / "autograded" / student / START / f"{START}.ipynb"
        path.chmod(0o644)
        nbformat.write(page, path)
    with room.form_grader(course.folder) as address:
        for student in _ALONE:
            visit = Visit(browser, address, submission_path(course, student))
            visit.page.wait_for_timeout(1500)
    assert {student: manual_scores(course, student) for student in _ALONE} == dict.fromkeys(_ALONE, [(99, 99)])


@pytest.mark.slow
@pytest.mark.browser
def test_the_form_grader_works_and_asks_nobody_else(room, browser):
    course = room.course("fp8-form", [START], release=False)
    hand_in(course, "ada", START, page_with(course))
    hand_in(course, "bob", START, b"{", timestamp="2026-11-30 10:00:00 UTC")
    hand_in(course, "cid", START, page_with(course), timestamp="no time at all")
    with room.form_grader(course.folder) as address:
        visit = Visit(browser, address, f"formgrader/manage_submissions/{START}")
        page = visit.page
        for student in ("ada", "bob", "cid"):
            row = page.locator("#main-table tr", has_text=student)
            row.locator(".autograde a, td.autograde span.glyphicon").first.click()
            page.locator(".modal-dialog").get_by_text(re.compile("Success", re.I)).first.wait_for(timeout=120_000)
            page.locator(".modal-dialog button", has_text=re.compile("OK|Close", re.I)).last.click()
            page.locator(".modal-backdrop").wait_for(state="detached")
            row.get_by_text("graded", exact=True).wait_for()
        assert [scores(course, s, START) for s in ("ada", "bob", "cid")] == [
            full_marks(START), no_marks(START), full_marks(START),
        ]  # fmt: skip
        for path in ("manage_assignments", "gradebook", f"gradebook/{START}", f"gradebook/{START}/{START}",
                     "manage_students", "manage_students/ada", f"manage_students/ada/{START}"):  # fmt: skip
            page.goto(f"{address}formgrader/{path}")
            page.wait_for_load_state("networkidle")
        page.goto(address + submission_path(course, "ada"))
        visit.wait_for_scores()
        page.locator("#check_sign_bit").fill("0.5")
        page.locator("#question_0A-comment").fill("Look at **-0.0**.")
        page.locator("#check_sign_bit").focus()
        page.keyboard.press("Escape")
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(1000)
        assert visit.page.locator("text=bit-exact").count() >= 1
        assert (visit.elsewhere(), visit.trouble) == ([], [])
    assert manual_scores(course, "ada") == [(0.5, None)]
    room.run(course.folder, "generate_feedback", START, "--student=ada")
    feedback = (course.folder / "feedback" / "ada" / START / f"{START}.html").read_text(encoding="utf-8")
    assert "Look at <strong>-0.0</strong>." in feedback
