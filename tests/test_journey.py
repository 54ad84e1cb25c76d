"""What a learner does, in a real JupyterLab: chapter 00 by keyboard alone, chapter 01, verdicts nobody trusts yet.

JupyterLab is started by the code that `make lab` runs. LOWPREC_SCREENSHOT=PATH writes the picture of the README there:

    LOWPREC_SCREENSHOT=solutions/pictures/chapter_01.png pytest tests/test_journey.py -k picture
"""

from __future__ import annotations

import functools
import html
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from browser import Lab, NotebookPage, _end, _environment, _free_port, _wait_until_up, axe_violations
from misconceptions import NAMES, named_verdict
from nbformat.v4 import new_code_cell, new_notebook, new_output

from lowprec_lab import BitExplorer, bootstrap, doctor
from lowprec_lab.blanks import BLANKS, in_order
from lowprec_lab.graders.judging import grade, unwritten
from lowprec_lab.graders.registry import MISCONCEPTIONS
from lowprec_lab.graders.verdict import FIELD_COLORS
from lowprec_lab.progress import progress_map
from lowprec_lab.sources import reference, sources_in
from lowprec_lab.workspace import save_answer

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
TOKEN = "learner"
THEMES = ("light", "dark")
# What the tests' environment has, and a learner's has not: it would stand in the tool bars.
NOT_A_LEARNERS = {"@jupyter/nbgrader": True, "jupyterlab-jupytext": True}

EXPLORER_00 = 'BitExplorer("float32", value=-0.0)'
EXPLORER_01 = 'BitExplorer(["float8_e4m3fn", "float8_e5m2"], value=0.1)'
EXPLORER_AFTER_DECODE = 'BitExplorer("float8_e4m3fn", value=448)'
WRONG_SIGN_BIT = "return (x < 0).to(torch.int32)"
RIGHT_SIGN_BIT = "return (x.view(torch.int32) >> 31) & 1"

# Right but for one thing: a subnormal gets the leading 1 of a normal number.
WRONG_DECODE = """
@fill
def decode(codes, fmt):
    sign, exponent, mantissa = split_fields(codes, fmt)
    classes = classify(codes, fmt)
    power = (exponent - fmt.bias).double()
    values = (1 + mantissa / 2**fmt.mantissa_bits).double() * 2**power
    values[classes == NumberClass.ZERO] = 0.0
    values[classes == NumberClass.INF] = math.inf
    values[classes == NumberClass.NAN] = math.nan
    return torch.where(sign == 1, -values, values)
""".strip()


# --- a JupyterLab as `make lab` starts it ----------------------------------------------------------------------------


@contextmanager
def make_lab(folder: Path):
    """JupyterLab on chapter 00 in a new learner's folder; yields the Lab, and where the browser is sent."""
    private, work, port = folder / "jupyter", folder / "work", _free_port()
    private.mkdir(parents=True)
    bootstrap.silence_first_start(private)
    settings = private / "share" / "jupyter" / "lab" / "settings"
    (settings / "page_config.json").write_text(json.dumps({"disabledExtensions": NOT_A_LEARNERS}))
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.open_browser": False,
        "IdentityProvider.token": TOKEN,
        "LabApp.app_settings_dir": settings,
        "LabApp.expose_app_in_browser": True,
    }
    environment = _environment(private, work, {"JUPYTER_DATA_DIR": str(private / "data")})
    environment["LAB_ARGS"] = " ".join(f"--{name}={value}" for name, value in options.items())
    start = "import sys; from lowprec_lab import bootstrap; sys.exit(bootstrap.open_lab(sys.executable))"
    log = private / "lab.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", start], cwd=folder, env=environment, stdout=output, stderr=output
        )
    try:
        lab = Lab(f"http://127.0.0.1:{port}/", TOKEN, work, process, log)
        _wait_until_up(lab)
        page = next((private / "runtime").glob("jpserver*file-to-run*open.html")).read_text(encoding="utf-8")
        yield lab, html.unescape(re.search(r'href="([^"]+)"', page)[1])
    finally:
        _end(process)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    with make_lab(tmp_path_factory.mktemp("learner")) as lab_and_address:
        yield lab_and_address


@pytest.fixture
def lab(started):
    lab = started[0]
    yield lab
    while lab.opened:  # one page at a time: hidden ones go on drawing
        lab.opened.pop().close()


def complaints_of(page) -> list[str]:
    """Fills with what the page's scripts complain about from now on."""
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    return said


def lowprec_lab(*arguments: str, work: Path) -> str:
    """What a learner types into a terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "lowprec_lab", *arguments],
        env={**os.environ, "LOWPREC_WORK": str(work)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def cell_with(page: NotebookPage, source: str) -> int:
    """The position of the cell whose source is `source`."""
    sources = page.evaluate("panel => panel.content.widgets.map(cell => cell.model.sharedModel.getSource())")
    return sources.index(source)


# --- by keyboard ------------------------------------------------------------------------------------------------------


def press(page: NotebookPage, *keys: str) -> None:
    for key in keys:
        page.page.keyboard.press(key)


def active(page: NotebookPage) -> int:
    return page.evaluate("panel => panel.content.activeCellIndex")


WATCH = """(panel, at) => {
  const { model } = panel.content.widgets[at];
  window.done = model.type !== "code" || new Promise((resolve) => {
    model.stateChanged.connect((_, change) => { if (change.name === "executionCount" && change.newValue) resolve(); });
  });
}"""


def shift_enter(page: NotebookPage) -> str:
    """Run the active cell with Shift+Enter, wait until it is done, and return what its output says."""
    at = active(page)
    page.evaluate(WATCH, at)
    press(page, "Shift+Enter")
    page.page.evaluate("async () => { await window.done; }")
    page.wait_until_idle()
    assert active(page) == at + 1
    page.page.wait_for_timeout(100)  # the reply comes before the last output is drawn
    return page.output(at)


def walk_to(page: NotebookPage, cell: str | int) -> None:
    """Go to a cell with the arrow keys, from wherever the notebook is in command mode."""
    wanted = page.position(cell)
    while (at := active(page)) != wanted:
        press(page, "ArrowDown" if at < wanted else "ArrowUp")


def retype_last_line(page: NotebookPage, line: str) -> None:
    """Put `line` in place of what the active cell's last line says, and go back to command mode."""
    press(page, "Enter", "Control+End", "Shift+Home")
    page.page.keyboard.type(line)
    press(page, "Escape")


def tab_into_explorer(page: NotebookPage) -> None:
    """From its cell, move the focus with Tab to the explorer's first bit toolbar."""
    inside = "() => document.activeElement?.classList.contains('lplab-bit') ?? false"
    for _ in range(12):
        press(page, "Tab")
        if page.page.evaluate(inside):
            return
    raise AssertionError("twelve times Tab did not lead from the cell to the explorer's bits")


# --- 00, then 01 ------------------------------------------------------------------------------------------------------


def test_a_learner_goes_through_both_pages(browser, started, lab):
    first_page(browser, lab, address=started[1])
    second_page(browser, lab)


def first_page(browser, lab, address):
    """Chapter 00 from the first paint on, and no mouse."""
    tab = browser.new_page(viewport={"width": 1300, "height": 950})
    tab.set_default_timeout(60_000)
    complaints = complaints_of(tab)
    tab.goto(address)
    tab.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.context?.isReady")
    page = NotebookPage(tab)
    page.evaluate("async panel => { await panel.sessionContext.ready; }")
    page.wait_until_idle()
    tab.wait_for_timeout(1000)
    assert tab.locator(".jp-Dialog").count() == 0, "a dialog stands in front of the first page"
    assert tab.locator(".Toastify__toast").count() == 0, "a notice pops up on the first page"

    while active(page) < page.position("sign_bit"):
        said = shift_enter(page)
        assert "Error" not in said, said
    assert_the_explorer_follows_the_keys(page)

    walk_to(page, "sign_bit")
    assert "your code here" in page.source("sign_bit")
    retype_last_line(page, WRONG_SIGN_BIT)
    assert page.source("sign_bit").endswith("    " + WRONG_SIGN_BIT)
    shift_enter(page)
    verdict = shift_enter(page)
    assert re.match(r"✗ sign_bit\s+wrong on [\d,]+ of [\d,]+ inputs", verdict)
    assert "It compares with zero: -0.0 and NaNs with the sign bit set come out as 0." in verdict
    assert re.search(r"input +-0\.0 +1 00000000 0{23}\n *yours +0\n *right +1\n", verdict)
    assert "sign_bit(torch.tensor([-0.0]))" in verdict
    assert not (lab.root / "answers" / "start.py").exists()

    walk_to(page, "sign_bit")
    retype_last_line(page, RIGHT_SIGN_BIT)
    shift_enter(page)
    verdict = shift_enter(page)
    assert re.match(r"✓ sign_bit\s+bit-exact on ([\d,]+) of \1 inputs", verdict)
    assert RIGHT_SIGN_BIT in (lab.root / "answers" / "start.py").read_text(encoding="utf-8")

    restart_by_keyboard(page)
    walk_to(page, "setup")
    shift_enter(page)
    walk_to(page, cell_with(page, "sign_bit(torch.tensor([1.5, -1.5, 0.0, -0.0]))"))
    assert "tensor([0, 1, 0, 1], dtype=torch.int32)" in shift_enter(page)
    walk_to(page, "check-sign_bit")
    assert re.search(r"not judged now; your saved answer of 20[\d-]+ [\d:]+ is in use", shift_enter(page))
    assert complaints == []
    page.close()


def assert_the_explorer_follows_the_keys(page):
    walk_to(page, cell_with(page, EXPLORER_00))
    count = page.evaluate("panel => panel.content.widgets.length")
    value = page.page.locator(".lplab-value")
    assert value.inner_text() == "−0"
    tab_into_explorer(page)
    press(page, "Home", "Space")
    assert value.inner_text() == "0"
    press(page, "ArrowRight", "ArrowRight", "Space")  # exponent bit 6, worth 64
    assert "2⁻⁶³" in page.page.locator(".lplab-whole").inner_text()
    press(page, "d", "d", "Escape")
    assert page.evaluate("panel => panel.content.widgets.length") == count, "keys in the explorer edited the page"
    press(page, *["Shift+Tab"] * 4)  # past the two lists and the number, and back to the page
    assert not page.page.evaluate("() => document.activeElement.closest('.lplab')"), "the focus stays in the explorer"


def restart_by_keyboard(page):
    before = page.evaluate("panel => panel.sessionContext.session.kernel.id")
    press(page, "0", "0")
    page.page.locator(".jp-Dialog").wait_for()
    press(page, "Enter")
    page.page.locator(".jp-Dialog").wait_for(state="detached")
    page.wait_until_idle()
    assert page.evaluate("panel => panel.sessionContext.session.kernel.id") == before


def second_page(browser, lab):
    """Chapter 01: the answer of 00 is at work, the explorer, and every exercise."""
    lowprec_lab("open", "01", work=lab.root)
    page = lab.open(browser, "01_bit_layouts.ipynb")
    complaints = complaints_of(page.page)
    assert page.run_cell("setup") == ""
    progress = cell_with(page, "progress()")
    shown = page.run_cell(progress)
    assert re.search(r"00 Start\b.*● \(1 of 1 done\)", shown), shown
    assert re.search(r"○ open\s+1\.1\s+bit_pattern", shown), shown
    assert_the_explorer_works(page)

    answers = sources_in(ROOT / "solutions")
    names = [blank.name for blank in in_order() if blank.chapter.number == "01"]
    assert len(names) >= 11
    for name in names:
        page.set_source(name, answers[name].text)
        assert page.run_cell(name) == ""
        verdict = page.run_cell(f"check-{name}")
        assert re.match(rf"✓ {name}\s+bit-exact on ([\d,]+) of \1 inputs", verdict), verdict
    saved = (lab.root / "answers" / "bits.py").read_text(encoding="utf-8")
    assert all(f"def {name}(" in saved for name in names)

    explorer = cell_with(page, EXPLORER_AFTER_DECODE)
    page.run_cell(explorer)
    badge = page.output_area(explorer).locator(".lplab-badge")
    assert badge.inner_text() == "your decode (exercise 1.5)"
    assert badge.get_attribute("data-origin") == "yours"
    assert f"{'●' * len(names)} ({len(names)} of {len(names)} done)" in page.run_cell(progress)
    assert complaints == []


def assert_the_explorer_works(page):
    """Bits by mouse and by keyboard; the value follows; axe-core has nothing to say, in either theme."""
    at = cell_with(page, EXPLORER_01)
    page.run_cell(at)
    panel = page.output_area(at).locator(".lplab-panel").first
    value, bits = panel.locator(".lplab-value"), panel.locator(".lplab-bit")
    assert value.inner_text() == "0.1015625"
    assert "reference: decode" in panel.locator(".lplab-badge").inner_text()
    bits.last.click()  # the lowest bit: on to the neighbour
    assert value.inner_text() == "0.09375"
    bits.nth(4).click()  # the lowest exponent bit: half
    assert value.inner_text() == "0.046875"
    bits.nth(4).focus()
    press(page, "ArrowLeft", "Space")  # exponent bit 1: the exponent field is 0 now, and the number subnormal
    assert value.inner_text() == "0.0078125"
    press(page, "Home", "Space")
    assert value.inner_text() == "−0.0078125"
    for theme in THEMES:
        page.set_theme(theme)
        page.page.wait_for_timeout(400)
        assert axe_violations(page.page, ".lplab") == []
    page.set_theme("light")


# --- untrusted --------------------------------------------------------------------------------------------------------


@functools.cache
def verdicts() -> dict:
    """A verdict of every level, and of every exercise one on a known mistake."""

    def breaks(codes, fmt):
        return codes.there_is_no_such_method("<b>escaped</b>")

    shown = {f"wrong {name}": named_verdict(MISCONCEPTIONS[name][0]) for name in NAMES}
    shown["exact"] = grade(BLANKS["decode"], reference("decode"))
    shown["failed"] = grade(BLANKS["decode"], breaks)
    shown["unwritten"] = unwritten(BLANKS["decode"], "not written yet (exercise 1.5)", "Write it in the cell above.")
    return shown


def executed_page(path: Path, things: dict) -> None:
    """A notebook with outputs, as somebody else's Jupyter wrote it: this one has not signed it."""
    cells = []
    for name, thing in things.items():
        data = thing._repr_mimebundle_() if hasattr(thing, "_repr_mimebundle_") else {"text/html": thing._repr_html_()}
        data = data[0] if isinstance(data, tuple) else data
        output = new_output("display_data", data=data)
        cells.append(new_code_cell(f"# {name}", execution_count=1, outputs=[output], id=name.replace(" ", "-")))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


def words(text: str) -> str:
    return " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())


# For each strip of bits: where its differing bits and the carets below them are, and whether the font is of one width.
CARETS = """
(panel, at) => {
  const pre = panel.content.widgets[at].node.querySelector(".jp-OutputArea-output pre");
  const middle = (node, index) => {
    const range = document.createRange();
    range.setStart(node, index);
    range.setEnd(node, index + 1);
    const box = range.getBoundingClientRect();
    return { x: box.x + box.width / 2, y: Math.round(box.y), width: box.width };
  };
  const found = { carets: [], marked: [], widths: [] };
  const walker = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (let index = 0; index < node.data.length; index += 1) {
      if (node.data[index] === "^") found.carets.push(middle(node, index));
      if (node.parentElement.closest("u")) found.marked.push(middle(node, index));
      if (/[01^]/.test(node.data[index])) found.widths.push(middle(node, index).width);
    }
  }
  return { ...found, white: getComputedStyle(pre).whiteSpace };
}
"""

COLORS = """
(panel, at) => [...panel.content.widgets[at].node.querySelectorAll(".jp-OutputArea-output pre span")].map((span) => {
  const style = getComputedStyle(span);
  return [style.backgroundColor, style.color];
})
"""


def rgb(color: str) -> str:
    return f"rgb({int(color[1:3], 16)}, {int(color[3:5], 16)}, {int(color[5:7], 16)})"


@pytest.mark.parametrize("width", [1300, 820])
def test_verdicts_read_right_in_an_untrusted_notebook(browser, lab, width):
    shown = verdicts()
    things = {**shown, "progress": progress_map(), "doctor": doctor(), "explorer": BitExplorer("E4M3", 0.1)}
    executed_page(lab.root / "untrusted.ipynb", things)
    page = lab.open(browser, "untrusted.ipynb", width=width)
    complaints = complaints_of(page.page)
    assert not page.is_trusted()
    marked = 0
    for theme in THEMES:
        page.set_theme(theme)
        for name, thing in things.items():
            cell = name.replace(" ", "-")
            page.select(cell)
            page.output_area(cell).locator(".jp-OutputArea-output").first.wait_for()
            if name in shown:
                marked += assert_it_reads_right(page, cell, thing)
            elif name == "explorer":
                assert page.output_area(cell).locator("img").count() == 1, "no picture stands in for the explorer"
            else:
                text = words(page.output_area(cell).inner_text())
                assert all(part in text for part in ("sign_bit", "runs:") if name == "progress"), text
                assert all(part in text for part in ("Precisions", "fp8 e4m3") if name == "doctor"), text
        found = axe_violations(page.page, '.jp-OutputArea-output[data-mime-type="text/html"]')
        # Browsers focus what scrolls; axe-core asks for a tabindex, and JupyterLab drops it.
        assert [line for line in found if not line.startswith("scrollable-region-focusable")] == []
    assert marked >= 2 * 3, "hardly any verdict had carets: nothing was compared"
    assert complaints == []


def assert_it_reads_right(page, cell, verdict) -> bool:
    """All words are there, the carets stand under the bits that differ, the fields have their colours."""
    assert words(page.output_area(cell).inner_text()) == words(verdict.text())
    if not verdict.rows:
        return False
    seen = page.evaluate(CARETS, page.position(cell))
    assert seen["white"] == "pre"
    assert seen["widths"] == pytest.approx(seen["widths"][:1] * len(seen["widths"]), abs=0.1), "not of one width"
    assert len(seen["carets"]) == verdict.marks().count("^")
    lines = sorted({place["y"] for place in seen["marked"]})
    assert len(lines) == (2 if verdict.marks() else 0), "yours and right are marked, each on a line of its own"
    for line in lines:
        under = [caret["x"] for caret in seen["carets"]]
        assert [place["x"] for place in seen["marked"] if place["y"] == line] == pytest.approx(under, abs=1)
    colors = {(rgb(color), "rgb(0, 0, 0)") for color in FIELD_COLORS.values()}
    strips = [row for row in verdict.rows if row.bits]
    found = {tuple(pair) for pair in page.evaluate(COLORS, page.position(cell))}
    assert found <= colors
    assert not strips or found
    return bool(verdict.marks())


# --- the picture ------------------------------------------------------------------------------------------------------


STATUS_BAR = 36  # pixels, with a little room above it

TO_THE_TOP = """(panel, at) => {
  const cell = panel.content.widgets[at].node;
  const view = cell.closest(".jp-WindowedPanel-outer");
  view.scrollTop += cell.getBoundingClientRect().top - view.getBoundingClientRect().top - 12;
}"""


def test_the_picture_of_the_readme(browser, tmp_path, monkeypatch):
    """Chapter 01: a wrong decode, its verdict, and the explorer on the very code that went wrong."""
    with make_lab(tmp_path) as (lab, _):
        monkeypatch.setenv("LOWPREC_WORK", str(lab.root))
        for earlier in ("bit_pattern", "split_fields", "join_fields", "classify"):
            save_answer("bits", earlier, sources_in(ROOT / "solutions")[earlier].text)
        lowprec_lab("open", "01", work=lab.root)
        page = lab.open(browser, "01_bit_layouts.ipynb", width=1400, height=1312)
        page.command("application:toggle-left-area")
        page.run_cell("setup")
        page.set_source("decode", WRONG_DECODE)
        page.run_cell("decode")
        verdict = page.run_cell("check-decode")
        assert "It reads subnormals as normal numbers" in verdict
        at = cell_with(page, EXPLORER_AFTER_DECODE)
        page.run_cell(at)
        explorer = page.output_area(at).locator(".lplab")
        toolbar = explorer.locator(".lplab-bit")
        for bit in range(1, 7):  # from 448 down to the smallest subnormal: only the lowest bit stays
            toolbar.nth(bit).click()
        toolbar.nth(7).click()
        assert "this decode gives" in explorer.inner_text()
        line = explorer.locator(".lplab-line")
        for _ in range(2):  # the second time with the height that shows all, down to the number line
            page.evaluate(TO_THE_TOP, page.position("decode"))
            page.page.wait_for_timeout(300)
            box = line.bounding_box()
            bottom = round(box["y"] + box["height"])
            page.page.set_viewport_size({"width": 1400, "height": bottom + STATUS_BAR})
        first = page.page.get_by_text("def decode").first.bounding_box()
        assert 0 < first["y"] < bottom < 1400, "the answer, its verdict and the explorer are not in one view"
        page.page.wait_for_timeout(300)
        picture = tmp_path / "chapter_01.png"
        page.page.screenshot(path=picture)
    assert picture.stat().st_size < 400_000
    wanted = os.environ.get("LOWPREC_SCREENSHOT")
    if wanted:
        Path(wanted).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, wanted)
