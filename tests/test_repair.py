"""Submitted pages put in order: which cells count, what happens to the others, and what nobody must be shown."""

import base64
import json
import re
import struct
import zlib
from copy import deepcopy

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output, new_raw_cell

pytest.importorskip("nbgrader")

from nbconvert.exporters import HTMLExporter
from nbgrader.nbgraderformat import MetadataValidator
from nbgrader.utils import determine_grade

from lowprec_lab import authoring
from lowprec_lab.authoring import source_notebook
from lowprec_lab.blanks import in_order
from lowprec_lab.grading.repair import AS_SUBMITTED, find_answers, repair
from lowprec_lab.grading.safe_markdown import safe_markdown, safe_png, text_as_markdown

CHAPTER = "01_bit_layouts"
NAMES = [blank.name for blank in in_order() if blank.chapter.name == CHAPTER]


def _chunk(kind, content):
    crc = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def png(width=1, height=1):
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    raw = b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", zlib.compress(b"\0\0")) + _chunk(b"IEND", b"")
    return base64.b64encode(raw).decode()


@pytest.fixture(scope="module")
def source():
    return source_notebook(authoring.SOLUTIONS / f"{CHAPTER}.py")


@pytest.fixture
def released():
    return nbformat.read(authoring.NOTEBOOKS / CHAPTER / f"{CHAPTER}.ipynb", as_version=4)


@pytest.fixture
def page(source):
    """The released page with the reference's answers."""
    return deepcopy(source)


def cell_of(notebook, identity):
    return next(cell for cell in notebook.cells if cell.id == identity)


def at(notebook, identity):
    return [cell.id for cell in notebook.cells].index(identity)


def texts(answers):
    return {name: answer.text for name, answer in answers.items()}


def checked(page, source):
    """The repaired page and its notes: always one that nbformat and nbgrader take, with the answers found before."""
    before = json.dumps(page)
    found = find_answers(page, CHAPTER)
    repaired, notes = repair(page, source)
    assert json.dumps(page) == before, "the submission itself was changed"
    nbformat.validate(repaired)
    MetadataValidator().validate_nb(repaired)
    assert find_answers(repaired, CHAPTER) == found
    known = {cell.metadata.nbgrader.grade_id: cell for cell in source.cells if cell.metadata.get("nbgrader")}
    there = [cell for cell in repaired.cells if cell.metadata.get("nbgrader")]
    for cell in there:
        assert cell.metadata.nbgrader == known[cell.metadata.nbgrader.grade_id].metadata.nbgrader
    graded = [key for key, cell in known.items() if cell.metadata.nbgrader.grade]
    assert sorted(c.metadata.nbgrader.grade_id for c in there if c.metadata.nbgrader.grade) == sorted(graded)
    assert bool(notes) == repaired.cells[0].source.startswith("<div><p><b>For the instructor")
    return repaired, notes


# --- which cells count ----------------------------------------------------------------------------------------------


def test_a_page_in_order_stays_as_it_is(page, source, released):
    for given in (page, released):
        repaired, notes = checked(given, source)
        assert notes == []
        assert [cell.source for cell in repaired.cells] == [cell.source for cell in given.cells]
    assert list(find_answers(page, CHAPTER)) == NAMES
    assert find_answers(released, CHAPTER) == {}


def test_cells_without_ids_and_metadata_as_from_colab(page, source):
    want = find_answers(page, CHAPTER)
    for cell in page.cells:
        cell.metadata = {}
        del cell["id"]
    page.metadata = {"colab": {"provenance": []}}
    page.nbformat_minor = 0
    repaired, notes = checked(page, source)
    assert notes == []
    assert find_answers(repaired, CHAPTER) == want
    assert {"setup", "question_1A", "decode", "check_decode"} <= {
        cell.metadata.nbgrader.grade_id for cell in repaired.cells if cell.metadata.get("nbgrader")
    }


def test_reordered_cells(page, source):
    want = find_answers(page, CHAPTER)
    page.cells.reverse()
    repaired, _ = checked(page, source)
    assert find_answers(repaired, CHAPTER) == want


@pytest.mark.parametrize("part", ["decorator", "body", "helper"])
def test_a_split_answer_is_joined(page, source, part):
    cell = cell_of(page, "decode")
    whole = "BIAS = 1\n\n" + cell.source
    cell.source = whole
    lines = whole.split("\n")
    cut = {
        "decorator": next(i for i, line in enumerate(lines) if line == "@fill") + 1,
        "body": next(i for i, line in enumerate(lines) if "BEGIN" in line) + 2,
        "helper": 1,
    }[part]
    rest = deepcopy(cell)
    cell.source, rest.source = "\n".join(lines[:cut]), "\n".join(lines[cut:])
    page.cells.insert(at(page, "decode") + 1, rest)
    repaired, notes = checked(page, source)
    assert find_answers(repaired, CHAPTER)["decode"].text == whole
    assert "they were joined" in notes[0]
    assert len([cell for cell in repaired.cells if "@fill\ndef decode" in cell.source]) == 1


def test_a_whole_answer_and_the_cell_below_it_stay_apart(page, source):
    page.cells.insert(at(page, "decode") + 1, new_code_cell("decode(torch.tensor([1]), E4M3)"))
    repaired, notes = checked(page, source)
    assert notes == []
    assert len(repaired.cells) == len(page.cells)


def test_of_two_answers_the_first_counts(page, source):
    again = deepcopy(cell_of(page, "decode"))
    again.source = "@fill\ndef decode(codes, fmt):\n    return 1"
    page.cells.insert(at(page, "decode") + 1, again)
    want = cell_of(page, "decode").source
    repaired, notes = checked(page, source)
    assert find_answers(repaired, CHAPTER)["decode"].text == want
    assert ["decode is answered more than once" in note for note in notes] == [True]
    [aside] = [cell for cell in repaired.cells if "Set aside" in cell.source]
    assert aside.cell_type == "markdown"
    assert "return 1" in aside.source


def test_an_answer_with_its_place_counts_before_one_above_it(page, source):
    page.cells.insert(1, new_code_cell("@fill\ndef decode(codes, fmt):\n    return 1"))
    want = cell_of(page, "decode").source
    assert find_answers(checked(page, source)[0], CHAPTER)["decode"].text == want


def test_an_answer_elsewhere_counts_before_an_untouched_place(released, source):
    released.cells.append(new_code_cell("@fill\ndef decode(codes, fmt):\n    return 1"))
    repaired, _ = checked(released, source)
    assert list(find_answers(repaired, CHAPTER)) == ["decode"]
    [place] = [c for c in repaired.cells if c.metadata.get("nbgrader", {}).get("grade_id") == "decode"]
    assert place.source.endswith("return 1")


def test_two_answers_in_one_cell(page, source):
    for cell in page.cells:
        if cell.id == "min_normal":
            cell.source += "\n\n" + cell_of(page, "min_subnormal").source
    page.cells = [cell for cell in page.cells if cell.id != "min_subnormal"]
    repaired, _ = checked(page, source)
    found = find_answers(repaired, CHAPTER)
    assert list(found) == NAMES
    assert found["min_normal"].text == found["min_subnormal"].text


def test_an_answer_that_became_text_is_code_again(page, source):
    cell = cell_of(page, "decode")
    page.cells[at(page, "decode")] = new_raw_cell(cell.source, id=cell.id, metadata=cell.metadata)
    repaired, _ = checked(page, source)
    assert "decode" in find_answers(repaired, CHAPTER)
    assert cell_of(repaired, "decode").cell_type == "code"


def test_magics_do_not_cost_an_answer(page):
    cell_of(page, "decode").source = "%time 1\n!pip install x\n" + cell_of(page, "decode").source
    compile(find_answers(page, CHAPTER)["decode"].text, "decode", "exec")


@pytest.mark.parametrize(
    "text",
    ["@fill\ndef decode(codes, fmt):\n    return (", "@fill\ndef decode(codes, fmt): return " + "-" * 50_000 + "1",
     "@fill\ndef decode(codes, fmt):\n    return '\0'"],
)  # fmt: skip
def test_an_answer_that_is_no_python_is_an_answer(released, source, text):
    cell_of(released, "decode").source = text
    assert list(find_answers(checked(released, source)[0], CHAPTER)) == ["decode"]


def test_no_fill_no_answer(page, source):
    cell_of(page, "decode").source = cell_of(page, "decode").source.replace("@fill\n", "")
    repaired, notes = checked(page, source)
    assert "decode" not in find_answers(repaired, CHAPTER)
    assert "no answer cell for decode" in notes[-1]


def test_missing_cells_are_put_back_in_their_places(page, source):
    gone = {"check-decode", "check-ulp", "setup"}
    page.cells = [cell for cell in page.cells if cell.id not in gone]
    repaired, notes = checked(page, source)
    assert at(repaired, "check-decode") == at(repaired, "decode") + 1
    assert at(repaired, "check-ulp") == at(repaired, "ulp") + 1
    assert "setup, check_decode, check_ulp" in notes[0]


def test_an_empty_page_gets_every_check(source):
    repaired, _ = checked(nbformat.v4.new_notebook(), source)
    checks = [cell.source for cell in repaired.cells if cell.source.startswith("check(")]
    assert checks == [f"check({name})" for name in NAMES]


def test_cells_that_lie_are_set_right(page, source):
    check, answer = cell_of(page, "check-decode"), cell_of(page, "decode")
    check.source = "100.0"
    check.metadata.nbgrader |= {"points": 100, "locked": False}
    answer.metadata.nbgrader |= {"grade": True, "points": 50, "grade_id": "check_ulp"}
    cell_of(page, "check-ulp").metadata.nbgrader.grade_id = "decode"
    repaired, notes = checked(page, source)
    assert cell_of(repaired, "check-decode").source == "check(decode)"
    said = " ".join(notes)
    assert "check_decode) had been changed and was set right" in said
    assert "had other points, locked" in said


@pytest.mark.parametrize("claims", [None, 3, [], {"grade_id": []}, {"grade_id": "x" * 9999}, {"points": "many"},
                                    {"schema_version": 99, "grade": True, "solution": True}])  # fmt: skip
def test_any_metadata_may_be_there(page, source, claims):
    for cell in page.cells[::3]:
        cell.metadata["nbgrader"] = claims
    assert list(find_answers(checked(page, source)[0], CHAPTER)) == NAMES


def test_only_what_is_known_stays_in_the_metadata(page, source):
    page.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    page.metadata["language_info"] = {"name": "python", "pygments_lexer": "html"}
    page.metadata["title"] = "<script>"
    page.cells[2].metadata = {"magics_language": "x", "tags": ['"><script>'], "collapsed": True}
    repaired, _ = checked(page, source)
    assert set(repaired.metadata) == {"kernelspec", "language_info", "lowprec_lab"}
    assert repaired.metadata.language_info.name == "python"
    assert "pygments_lexer" not in repaired.metadata.language_info
    assert repaired.cells[2].metadata == {}


def test_every_output_is_gone(page, source):
    for cell in page.cells:
        if cell.cell_type == "code":
            cell.outputs = [new_output("execute_result", data={"text/plain": "5.0", "text/html": "<script>"})]
    repaired, _ = checked(page, source)
    assert not any(cell.get("outputs") for cell in repaired.cells)


def test_a_cell_that_a_person_grades_keeps_what_it_showed(source):
    source = deepcopy(source)
    manual = new_code_cell("...  # your code here", id="essay")
    manual.metadata["nbgrader"] = {
        "schema_version": 3, "grade_id": "essay", "solution": True, "grade": True, "locked": False, "task": False,
        "points": 4,
    }  # fmt: skip
    source.cells.append(manual)
    page = deepcopy(source)
    page.cells[-1].source = "plot()"
    page.cells[-1].outputs = [
        new_output("stream", text="\x1b[31m<b>seen</b>\x1b[0m"),
        new_output("display_data", data={"image/png": png(), "text/html": "<script>alert(1)</script>"}),
        new_output("display_data", data={"image/svg+xml": "<svg onload=alert(1)>", "application/javascript": "x"}),
        new_output("display_data", data={"image/png": base64.b64encode(b"<svg>").decode()}),
    ]
    repaired, _ = checked(page, source)
    shown = [output.data for output in cell_of(repaired, "essay").outputs]
    assert shown == [{"text/plain": AS_SUBMITTED}, {"text/plain": "<b>seen</b>"}, {"image/png": png()}]
    assert determine_grade(cell_of(repaired, "essay")) == (None, 4)
    page.cells.pop()
    assert cell_of(checked(page, source)[0], "essay").source == "...  # your code here"


NO_CELLS = [
    None,
    3,
    [None, 3, "x", {}, {"cell_type": []}],
    [{"cell_type": "code", "source": 5}],
    [{"cell_type": "code", "source": ["a", 5], "metadata": 3, "outputs": 7, "id": 9}],
    [{"cell_type": "markdown", "source": "x", "attachments": [1], "id": "ü"}] * 3,
]


@pytest.mark.parametrize("cells", NO_CELLS)
def test_whatever_is_in_a_page_it_is_repaired(source, cells):
    checked({"cells": cells, "metadata": [], "nbformat": "four"}, source)


def test_giant_pages_are_cut(source):
    page = nbformat.v4.new_notebook(cells=[new_code_cell("x") for _ in range(5000)])
    page.cells[0].source = "a" * 10_000_000
    repaired, notes = checked(page, source)
    assert len(nbformat.writes(repaired)) < 4_000_000
    assert len(notes) >= 2


# --- what nobody must be shown --------------------------------------------------------------------------------------

ATTACKS = [
    "<script>alert(1)</script>",
    "<SCRIPT SRC=http://e.vil/x.js></SCRIPT>",
    "<img src=x onerror=alert(1)>",
    '<img src="http://e.vil/track.png">',
    "![x](http://e.vil/track.png)",
    "![x](/formgrader?path=/tmp)",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt&colon;alert(1))",
    "<a href='jav\tascript:alert(1)'>x</a>",
    "[click](/formgrader?path=/tmp/evil)",
    "<http://localhost:8888/formgrader?path=/tmp/evil>",
    "<svg onload=alert(1)></svg>",
    "<svg><script>alert(1)</script></svg>",
    "<iframe src=javascript:alert(1)></iframe>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<object data=x></object><embed src=x>",
    "<form action=/formgrader/api/grade/1><input name=x><button>Go</button></form>",
    "<style>* {display: none}</style>",
    "<div style='position:fixed;top:0;background:url(http://e.vil)'>x</div>",
    "<base href=http://e.vil/><meta http-equiv=refresh content='0;url=http://e.vil'><link rel=stylesheet href=x>",
    "<div class=nbgrader_cell><input id=check_decode class=score></div>",
    "# check_decode",
    "check_decode\n============",
    "<math><mtext><table><mglyph><style><!--</style><img title=\"--&gt;&lt;img src=1 onerror=alert(1)&gt;\">",
    "<noscript><p title=\"</noscript><img src=x onerror=alert(1)>\">",
    "<!--><script>alert(1)</script>-->",
    "<p title='\"><script>alert(1)</script>'>x</p>",
    "$$<script>alert(1)</script>$$",
    "\\begin{a<script>alert(1)</script>}x\\end{a}",
    "```html\n<script>alert(1)</script>\n```",
    "```mermaid\n<img src=x onerror=alert(1)>\n```",
    "`` <script>alert(1)</script> ``",
    "<details open ontoggle=alert(1)><summary>x</summary></details>",
    "| a |\n|---|\n| <img src=x onerror=alert(1)> |",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "<div>\n\n[x](javascript:alert(1))\n\n</div>",
    "<x" * 3000,
    "<b>" * 5000,
    "[" * 15_000,
    "a" * 50_000,
    "{{ resources }} {% include 'x' %}",
    "\ud800 <script>alert(1)</script>",
]  # fmt: skip


def rendered(source, attachments=None):
    """A markdown cell as nbconvert, and so the form grader, shows it."""
    cell = new_markdown_cell(source, **({"attachments": attachments} if attachments else {}))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    exporter = HTMLExporter(template_name="basic")
    return exporter.from_notebook_node(notebook)[0]


HARMLESS = (
    "b blockquote br code dd del details div dl dt em hr i img li ol p pre s span strong sub summary sup table tbody "
    "td th thead tr u ul h1 h2 h3 h4 h5 h6"
)
PICTURE = re.compile(r'\s*(?:alt="[^"<>]*"|src="data:image/png;base64,[\w+/=]+"|\s)*/?')


def active_parts(html):
    """Tags that do something, and attributes other than a picture's; what nbconvert puts around a cell left out."""
    inside = re.search(r'rendered_html">\s*(.*?)\s*</div>\s*</div>\s*</div>\s*$', html, re.S)[1]
    tags = re.findall(r"<\s*/?\s*([A-Za-z!?][^\s>/]*)([^>]*)>", inside)
    return [(tag, rest) for tag, rest in tags if f" {tag} " not in f" {HARMLESS} " or not PICTURE.fullmatch(rest)]


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_markdown_can_do_nothing(attack):
    safe = safe_markdown(attack)
    assert active_parts(rendered(safe)) == []
    assert active_parts(rendered(safe_markdown(f"text\n\n- {attack}\n\n> {attack}"))) == []


def test_the_test_of_what_can_act_finds_the_attacks():
    found = [
        attack for attack in ATTACKS if len(attack) < 1000 and active_parts(rendered(attack.replace("\ud800", "")))
    ]
    assert len(found) >= 25


PLAIN = [
    "Because **zero** has two `signs`.",
    "- one\n- two\n\n1. three",
    "a < b and c > d & e",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "$x^2$ is even",
    "    code",
]


@pytest.mark.parametrize("text", PLAIN)
def test_plain_markdown_stays_as_it_was_written(text):
    assert safe_markdown(text) == text


def test_what_is_harmless_is_shown():
    shown = rendered(safe_markdown("# Title\n\nsee [the paper](https://arxiv.org/abs/2209.05433) <sub>2</sub>"))
    assert "<h1>Title" in shown
    assert "<sub>2</sub>" in shown
    assert "the paper (https" in shown
    assert "href" not in shown


def test_pictures_are_png_attachments():
    attachments = {"a.png": {"image/png": png()}, "b.png": {"image/png": base64.b64encode(b"<svg>").decode()},
                   "c.svg": {"image/svg+xml": "<svg onload=alert(1)>"}, "d": {"text/html": "<script>"}}  # fmt: skip
    text = "![a](attachment:a.png) ![b](attachment:b.png) ![c](attachment:c.svg) ![d](attachment:d) ![e](attachment:e)"
    shown = rendered(safe_markdown(text, attachments))
    assert shown.count("<img") == 1
    assert f"data:image/png;base64,{png()}" in shown


@pytest.mark.parametrize("content", [None, 3, [], "", "!!", "AAAA", base64.b64encode(b"\x89PNG\r\n\x1a\n").decode(),
                                     png(100_000, 100_000), png(0, 5), png() + "<script>"])  # fmt: skip
def test_what_is_no_png(content):
    assert safe_png(content) is None


def test_text_is_shown_letter_by_letter():
    text = "<b>&amp; *x* [y](z)\n\n  $a$ `c` \\ |"
    shown = rendered(text_as_markdown(text))
    assert "&lt;b&gt;&amp;amp; *x* [y](z)" in shown
    assert active_parts(shown) == []


def test_a_repaired_page_shows_nothing_active(page, source):
    for number, attack in enumerate(ATTACKS):
        page.cells.insert(3 * number, [new_markdown_cell, new_raw_cell, new_code_cell][number % 3](attack))
    page.cells.append(new_code_cell(f"@fill\ndef decode(codes, fmt):\n    return '{ATTACKS[0]}'"))
    repaired, notes = checked(page, source)
    exporter = HTMLExporter(template_name="basic")
    shown = exporter.from_notebook_node(repaired)[0]
    assert not re.search(
        r"<script>alert|onerror=(?!alert\(1\)&gt;)[^&]*>|<svg|<iframe|href=\"javascript|e\.vil/[^<]*\">", shown
    )
    assert any("could act on its reader" in note for note in notes)
