"""ScaleExplorer: shows what quantizing leaves of each number, is moved by mouse and keys, and is accessible."""

import math

import numpy as np
import pytest
import torch

from lowprec_lab import ScaleExplorer, blanks
from lowprec_lab.explorers import scale_explorer
from lowprec_lab.formats import E2M1, E4M3, E5M2, FP16
from lowprec_lab.graders import quantizer_oracle as exact
from lowprec_lab.sources import reference

FORMATS = (E4M3, E5M2, E2M1)


def set_to(explorer, fmt, granularity, log2_outlier):
    explorer.fmt, explorer.granularity, explorer.log2_outlier = fmt, granularity, log2_outlier


@pytest.fixture(scope="module")
def gaussian():
    return ScaleExplorer()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("granularity", scale_explorer.GRANULARITIES)
@pytest.mark.parametrize("log2_outlier", [0, 9, 24])
def test_it_shows_what_quantizing_does(gaussian, fmt, granularity, log2_outlier):
    set_to(gaussian, fmt, granularity, log2_outlier)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(7))
    others = torch.ones(16, 32, dtype=torch.bool)
    others[5, 11] = False
    x[5, 11] = math.copysign(x[others].abs().max().item(), x[5, 11].item()) * 2.0**log2_outlier
    q = reference("quantize")(x, fmt, scale_explorer.GRANULARITIES[granularity])
    back = reference("dequantize")(q)
    assert gaussian.decibel == pytest.approx(exact.sqnr_db(x[others], back[others]), abs=1e-4)
    assert gaussian.shares["lost"] == float((back == 0).double().mean())
    half = x.abs() * 2.0 ** -(fmt.mantissa_bits + 1)
    assert gaussian.shares["kept"] == pytest.approx(float(((back - x).abs() <= half * 1.00001).double().mean()))


def test_an_outlier_does_its_damage_within_its_group(gaussian):
    set_to(gaussian, E4M3, "block", 24)
    kinds = gaussian._shown().kinds
    assert kinds[4:8, 8:16].sum() == 2 * 31, "31 others of its block, all lost"
    kinds = kinds.copy()
    kinds[4:8, 8:16] = 0
    assert not (kinds == 2).any()


def test_settings_can_be_read_and_set(gaussian):
    set_to(gaussian, "float8_e5m2", "row", 3)
    assert (gaussian.fmt, gaussian.granularity, gaussian.log2_outlier) == (E5M2, "row", 3)
    assert repr(gaussian).startswith(
        "ScaleExplorer: 16 x 32 numbers in float8_e5m2, a scale for each row, one number 2^3 times the others: "
    )
    assert sum(gaussian.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((torch.zeros(3, 3),), "nothing to show"),
        ((torch.zeros(0, 3),), "nothing to show"),
        ((torch.tensor([[1.0, math.nan]]),), "nothing to show"),
        ((torch.ones(3),), "two dimensions"),
        ((torch.ones(3, 3, dtype=torch.int32),), "floats"),
        ((None, FP16), "is not one of"),
        ((None, E4M3, "rows"), "is not one of"),
        ((None, E4M3, "row", 25), "from 0 to 24"),
        ((None, E4M3, "row", 0.5), "from 0 to 24"),
    ],
)
def test_what_cannot_be_shown_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        ScaleExplorer(*arguments)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (16, 32), (100, 100), (1, 40)])
def test_any_size_is_shown_or_cut(shape):
    explorer = ScaleExplorer(torch.ones(shape, dtype=torch.bfloat16), granularity="block", log2_outlier=5)
    assert explorer._shown().kinds.shape == (min(shape[0], 16), min(shape[1], 32))
    assert explorer.plot() is not None


def test_where_no_widget_can_live_there_is_a_picture(gaussian):
    bundle, _ = gaussian._repr_mimebundle_()
    assert bundle["image/png"]
    assert bundle["text/plain"].startswith("ScaleExplorer: 16 x 32 numbers in")
    assert "application/vnd.jupyter.widget-view+json" in bundle


@pytest.fixture
def answer(monkeypatch):
    def use(function):
        monkeypatch.setitem(blanks.FILLED, "quantize", function)

    return use


def test_it_runs_on_the_code_in_use_and_says_where_that_is_wrong(answer):
    def half(x, fmt, granularity="tensor", power_of_two=False):
        q = exact.quantize(x, fmt, granularity)
        return type(q)(q.codes, q.scale / 2, fmt, granularity, x.dtype)

    answer(half)
    panel = ScaleExplorer()._panels[0]
    assert panel["origin"] == "yours"
    assert panel["note"] == "differs from the definition for 300 of 300 tensors"


@pytest.mark.parametrize("result", [None, torch.zeros(16, 32)])
def test_an_answer_that_gives_nothing_to_show_is_told_and_replaced(answer, result):
    answer(lambda x, fmt, granularity="tensor", power_of_two=False: result)
    panel = ScaleExplorer()._panels[0]
    assert panel["origin"] == "oracle"
    assert panel["note"] == "your quantize returned something that is no Quantized of the right shapes"


def test_what_the_browser_gets_is_what_python_shows(gaussian):
    set_to(gaussian, E2M1, "column", 7)
    panel = next(each for each in gaussian._panels if each["name"] == E2M1.name)
    sent = np.frombuffer(panel["kinds"]["column"], dtype=np.uint8).reshape(25, 16, 32)[7]
    assert np.array_equal(sent, gaussian._shown().kinds)
    assert panel["decibels"]["column"][7] == gaussian.decibel
    assert panel["scales"] == {"tensor": 1, "row": 16, "column": 32, "block": 16}


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def show(show_until):
    return show_until(".lpgroup-cell")


def shown(page):
    shares = [page.locator(f"dd.lpgroup-{kind}").inner_text() for kind in scale_explorer.KINDS]
    crosses = page.locator(".lpgroup-cell-lost").count()
    return [*shares, page.locator("dd.lpgroup-decibel").inner_text(), crosses]


def expected(explorer):
    shares = [f"{100 * share:.1f} %" for share in explorer.shares.values()]
    return [*shares, f"{explorer.decibel:.1f} dB", round(explorer.shares["lost"] * 512)]


@pytest.mark.browser
def test_the_slider_moves_the_outlier_by_mouse_and_keys(show):
    explorer = ScaleExplorer()
    page = show(explorer)
    assert shown(page) == expected(explorer)
    slider = page.get_by_role("slider", name="Outlier")
    slider.fill("15")
    explorer.log2_outlier = 15
    assert shown(page) == expected(explorer)
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("window.model.get('_state').log2_outlier") == 16
    page.keyboard.press("End")
    explorer.log2_outlier = 24
    assert shown(page) == expected(explorer)
    assert "511 numbers have become 0" in page.locator(".lpgroup-sentence").inner_text()
    assert "2 to the power of 24" in slider.get_attribute("aria-valuetext")


@pytest.mark.browser
def test_another_format_and_other_groups(show):
    explorer = ScaleExplorer(log2_outlier=24)
    page = show(explorer)
    for fmt, granularity in ((E4M3, "row"), (E4M3, "block"), (E2M1, "column"), (E5M2, "tensor")):
        page.get_by_label("Format").select_option(fmt.name)
        page.get_by_label("One scale for", exact=True).select_option(granularity)
        set_to(explorer, fmt, granularity, 24)
        assert shown(page) == expected(explorer)


THEMES = {"light": "#ffffff", "dark": "#111111"}


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(("granularity", "log2_outlier"), [("tensor", 14), ("block", 24)])
def test_axe_finds_no_violation(show, granularity, log2_outlier, theme):
    from browser import axe_violations

    page = show(ScaleExplorer(None, E4M3, granularity, log2_outlier), THEMES[theme], width=700)
    page.wait_for_function("theme => document.querySelector('.lplab').dataset.theme === theme", arg=theme)
    assert axe_violations(page, ".lplab") == []
