"""RoundingExplorer: exact in all modes, dragged without the kernel, driven by the learner's round_to, accessible."""

import base64
import functools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from lowprec_lab import RoundingExplorer
from lowprec_lab.explorers import ladder, nearest
from lowprec_lab.formats import (
    BF16,
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    TF32,
    Format,
)
from lowprec_lab.graders import oracle, rounding_oracle

OWN_FORMAT = Format("e3m4, bias 5", 3, 4, bias=5)
NO_ZERO = Format("signed, no zero", 3, 2, specials="finite", subnormals=False)
SHOWN = [*(fmt for fmt in FORMATS.values() if fmt is not FP32), OWN_FORMAT, NO_ZERO]


def same(value: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isnan(value)
    return value == expected and math.copysign(1, value) == math.copysign(1, expected)


# --- the ladder of values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", SHOWN, ids=str)
def test_the_steps_are_the_values_in_order(fmt):
    first, last = ladder.first_step(fmt), ladder.last_step(fmt)
    steps = range(first, last + 1) if last < 500 else [*range(-300, 300), *range(last - 50, last + 1)]
    values = [ladder.value_at(fmt, step) for step in steps if step >= first]
    assert all(low < high for low, high in zip(values, values[1:], strict=False))
    assert ladder.value_at(fmt, last - ladder.BEYOND) == max(_finite(fmt))
    if last < 500:
        assert set(_finite(fmt)) <= set(values)
        for step, value in zip(steps, values, strict=True):
            assert ladder.step_below(fmt, Fraction(value)) == step


def _finite(fmt):
    codes = torch.arange(2**fmt.width, dtype=torch.int32)
    return [value for value in oracle.decode(codes, fmt).tolist() if math.isfinite(value)]


def test_what_is_tried_is_every_place_where_a_rounding_may_change():
    tried = ladder.numbers_between(E4M3, 0, 8).astype(np.float64)
    values = np.array([ladder.value_at(E4M3, step) for step in range(9)])
    middles = (values[:-1] + values[1:]) / 2
    assert len(tried) == 8 * ladder.PER_GAP + 1
    assert np.all(np.diff(tried) > 0)
    assert np.isin(values, tried).all()
    assert np.isin(middles, tried).all()
    assert np.isin(np.nextafter(middles.astype(np.float32), np.float32(1)).astype(np.float64), tried).all()


@pytest.mark.parametrize("text", ["0.1", "1/3", "-0", "3.4028235e38", "1e39", "-1e39", "1e-46", "inf"])
def test_the_float32_next_to_a_number(text):
    found = ladder.float32_of(nearest.read_real(text))
    with np.errstate(over="ignore"):
        expected = float(np.float32(float(Fraction(text)) if "/" in text else float(text)))
    assert same(found, expected)


# --- the widget, in Python --------------------------------------------------------------------------------------------


def test_the_five_modes():
    explorer = RoundingExplorer(E4M3, 0.1)
    assert list(explorer.results) == list(nearest.MODES)
    assert explorer.results["nearest_even"] == explorer.results["up"] == 0.1015625
    assert explorer.results["toward_zero"] == explorer.results["down"] == 0.09375
    explorer.value = 0.09765625
    assert explorer.results["nearest_even"] == 0.09375
    assert explorer.results["nearest_away"] == 0.1015625


def test_overflow_follows_the_policy():
    explorer = RoundingExplorer("E4M3", 464)
    assert set(explorer.results.values()) == {448.0}
    explorer.overflow = "to_special"
    assert explorer.results["nearest_even"] == explorer.results["toward_zero"] == 448.0
    assert math.isnan(explorer.results["nearest_away"])
    explorer = RoundingExplorer(E5M2, 1e9, overflow="to_special")
    assert (explorer.results["nearest_even"], explorer.results["down"]) == (math.inf, 57344.0)


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(ValueError, match="at most 20 bits; float32 has 32"):
        RoundingExplorer(FP32)
    with pytest.raises(ValueError, match="can only 'saturate'"):
        RoundingExplorer(E2M1, overflow="to_special")
    with pytest.raises(ValueError, match="'nearest' is not one of"):
        RoundingExplorer(mode="nearest")
    with pytest.raises(ValueError, match="no format is called"):
        RoundingExplorer("float9")
    explorer = RoundingExplorer(E4M3)
    with pytest.raises(ValueError, match="not one of"):
        explorer.overflow = "wrap"


def test_the_static_picture_and_the_text_go_with_the_widget():
    data, _ = RoundingExplorer(E4M3, 0.1)._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "nearest_even  0.1015625" in data["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in data


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, math.inf, 1e-45, 3.4e38, -448.0, 464.0, 1.0])
def test_every_kind_of_value_has_a_picture(value):
    for fmt in (E4M3, E5M2FNUZ, E8M0, BF16, E2M1, OWN_FORMAT, NO_ZERO):
        words = " ".join(text.get_text() for text in RoundingExplorer(fmt, value).plot().axes[0].texts)
        assert "mode" in words or "nearest" in words or "NaN" in words


@pytest.fixture
def round_to_in_use(answer_in_use):
    return functools.partial(answer_in_use, "round_to")


def truncating(x, fmt, mode="nearest_even", overflow="saturate"):
    """Towards zero in every mode."""
    return rounding_oracle.round_to(x, fmt, "toward_zero", overflow)


def away_at_ties(x, fmt, mode="nearest_even", overflow="saturate"):
    return rounding_oracle.round_to(x, fmt, "nearest_away" if mode == "nearest_even" else mode, overflow)


def test_the_learners_round_to_is_taken_up_when_it_is_filled(round_to_in_use):
    explorer = RoundingExplorer(E4M3, 0.1)
    round_to_in_use(truncating)
    panel = explorer._panels[0]
    assert panel["origin"] == "yours"
    assert "your round_to" in panel["line"]
    assert "differs from the definition in" in panel["note"]
    assert explorer.results["nearest_even"] == 0.09375
    assert "0.09375" in repr(explorer)
    round_to_in_use(rounding_oracle.round_to)
    assert (explorer._panels[0]["note"], explorer._panels[0]["samples"]) == ("", None)
    assert explorer.results["nearest_even"] == 0.1015625


@pytest.mark.parametrize("fmt", SHOWN, ids=str)
def test_a_right_round_to_differs_nowhere(round_to_in_use, fmt):
    round_to_in_use(lambda *arguments: rounding_oracle.round_to(*arguments))
    for value in (0.1, -1.003, 1e9):
        assert RoundingExplorer(fmt, value)._panels[0]["note"] == ""


def test_the_kernel_tries_further_numbers_when_the_marker_leaves(round_to_in_use):
    round_to_in_use(truncating)
    explorer = RoundingExplorer(BF16, 1.0)
    before = explorer._window
    explorer.value = 1.01
    assert explorer._window == before
    explorer.value = 1e9
    assert explorer._window != before
    assert explorer._panels[0]["first"] == explorer._window[0]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda x, fmt, mode, overflow: 1 / 0, "raised ZeroDivisionError"),
        (lambda x, fmt, mode, overflow: None, "returned NoneType, not a tensor"),
        (lambda x, fmt, mode, overflow: x[:3], "of the shape (3,)"),
        (lambda x, fmt, mode, overflow: x.int(), "returned torch.int32"),
    ],
)
def test_a_round_to_that_cannot_be_drawn_gives_way_to_the_oracle(round_to_in_use, wrong, reason):
    round_to_in_use(wrong)
    explorer = RoundingExplorer(E4M3, 0.1)
    assert explorer._panels[0]["line"] == "exact oracle"
    assert explorer._panels[0]["note"].startswith("your round_to ")
    assert reason in explorer._panels[0]["note"]
    assert explorer.results["nearest_even"] == 0.1015625


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def show(show_until):
    return show_until(".lpround-marker")


def text_in(page) -> str:
    return page.evaluate("window.model.get('_state').text")


def becomes(page) -> list[str]:
    return page.locator(".lpround-value").all_inner_texts()


@pytest.mark.browser
def test_all_modes_are_shown_at_once_and_those_that_agree_are_grouped(show):
    page = show(RoundingExplorer(E4M3, 0.1))
    assert becomes(page) == ["0.1015625", "0.1015625", "0.09375", "0.1015625", "0.09375"]
    assert page.locator(".lpround-arrow").count() == 2
    assert page.locator(".lpround-mode").count() == 5
    page.locator(".lplab-input").fill("0.1015625")
    assert page.locator(".lpround-arrow").count() == 1
    assert page.locator(".lpround-mode").all_text_contents() == ["all five modes"]
    assert "is a value of the format" in page.locator(".lpround-caption").inner_text()


@pytest.mark.browser
def test_dragging_moves_the_marker_and_snaps_to_a_tie(show):
    page = show(RoundingExplorer(E4M3, 0.1))
    box = page.locator(".lpround-marker").bounding_box()
    half = page.locator(".lpround-half").nth(3).bounding_box()["x"]
    y = box["y"] + 22
    page.mouse.move(box["x"] + 22, y)
    page.mouse.down()
    page.mouse.move(half + 3, y, steps=4)
    assert text_in(page) == "0.09765625"
    assert "A tie" in page.locator(".lpround-caption").inner_text()
    assert page.locator(".lpround-tie").count() == 1
    page.mouse.move(half + 20, y)
    page.mouse.up()
    assert 0.09765625 < float(text_in(page)) < 0.1015625
    assert page.evaluate("document.activeElement.role") == "slider"
    moved = text_in(page)
    page.mouse.move(half - 100, y)
    assert text_in(page) == moved, "the marker follows the mouse only while it is held"


@pytest.mark.browser
def test_a_touch_drags_the_marker(browser, show):
    from browser import show_widget

    context = browser.new_context(has_touch=True, viewport={"width": 420, "height": 900})
    page = context.new_page()
    show_widget(page, RoundingExplorer(E4M3, 0.1))
    box = page.locator(".lpround-stage").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] * 0.7, box["y"] + 40)
    assert float(text_in(page)) > 0.1
    context.close()


@pytest.mark.browser
def test_keys_move_the_marker(show):
    page = show(RoundingExplorer(E4M3, 0.1))
    page.locator(".lpround-marker").focus()
    seen = []
    for key in ("Shift+ArrowLeft", "Shift+ArrowLeft", "ArrowLeft", "ArrowRight", "Home", "Home", "End", "PageUp"):
        page.keyboard.press(key)
        seen.append(float(text_in(page)))
    gap = 0.0078125
    assert seen == [
        0.09375 + 0.75 * gap,
        0.09375 + 0.5 * gap,
        0.09375 + (0.5 - 1 / 64) * gap,
        0.09375 + 0.5 * gap,
        0.09375,
        0.0859375,
        0.09375,
        0.1015625,
    ]
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    assert page.locator(".lpround-marker").get_attribute("aria-valuetext") == "0.1015625; all five modes give 0.1015625"


@pytest.mark.browser
@pytest.mark.parametrize("fmt", [E4M3, E8M0, E2M1, NO_ZERO, BF16], ids=str)
def test_keys_lead_from_end_to_end(show, fmt):
    largest = max(_finite(fmt))
    page = show(RoundingExplorer(fmt, largest))
    page.locator(".lpround-marker").focus()
    for _ in range(6):
        page.keyboard.press("End")
    beyond = float(Fraction(text_in(page)) if "^" not in text_in(page) else nearest.read_real(text_in(page)))
    assert beyond == ladder.value_at(fmt, ladder.last_step(fmt))
    page.locator(".lplab-input").fill(repr(ladder.value_at(fmt, 0)))
    page.locator(".lpround-marker").focus()
    for _ in range(3):
        page.keyboard.press("Home")
    lowest = ladder.value_at(fmt, max(-3, ladder.first_step(fmt)))
    assert float(nearest.read_real(text_in(page))) == lowest


@pytest.mark.browser
def test_beyond_the_largest_value_the_policy_decides(show):
    page = show(RoundingExplorer(E4M3, 464, overflow="to_special"))
    assert becomes(page) == ["448", "NaN", "448", "NaN", "448"]
    assert "half a step beyond" in page.locator(".lpround-caption").inner_text()
    assert "NaN" in page.locator(".lpround-off").text_content()
    page.get_by_label("Overflow").select_option("saturate")
    assert set(becomes(page)) == {"448"}
    page.locator(".lplab-input").fill("1e6")
    assert set(becomes(page)) == {"448"}
    assert page.locator(".lpround-number").text_content() == "1e6 →"
    number = page.locator(".lplab-input")
    number.fill("1e6x")
    assert number.get_attribute("aria-invalid") == "true"
    for text in ("inf", "-inf", "nan", "-0", "0"):
        number.fill(text)
        assert len(becomes(page)) == 5


@pytest.mark.browser
def test_the_chosen_mode_shades_its_bins(show):
    page = show(RoundingExplorer(E4M3, 0.1))

    def bins():
        return page.locator('.lpround-bin[data-here="true"]').bounding_box()

    nearest_bin = bins()
    page.get_by_role("radio", name="toward zero").check()
    assert page.evaluate("window.model.get('_state').mode") == "toward_zero"
    truncated = bins()
    assert truncated["x"] < nearest_bin["x"]
    assert abs(truncated["width"] - nearest_bin["width"]) < 3
    assert page.locator(".lpround-owner").count() == 0, "no ties where there is no nearest"


@pytest.mark.browser
@pytest.mark.parametrize("fmt", [E4M3, E5M2FNUZ, E8M0, TF32, BF16, NO_ZERO], ids=str)
def test_browser_and_kernel_agree_on_steps_and_on_a_wrong_round_to(show, round_to_in_use, fmt):
    round_to_in_use(away_at_ties)
    explorer = RoundingExplorer(fmt, 1.0)
    page = show(explorer)
    panel = explorer._panels[0]
    chance = random.Random(5)
    low, high = explorer._window
    for _ in range(12):
        step = chance.randrange(max(low, ladder.first_step(fmt)), high - 1)
        a, b = (Fraction(ladder.value_at(fmt, each)) for each in (step, step + 1))
        real = a + (b - a) * chance.choice([Fraction(0), Fraction(1, 2), Fraction(1, 3), Fraction(9, 10)])
        if abs(real) >= 2**127:
            continue
        page.locator(".lplab-input").fill(f"{real.numerator}/{real.denominator}")
        number = torch.tensor([ladder.float32_of(real)])
        expected = [away_at_ties(number, fmt, mode).item() for mode in nearest.MODES]
        shown = [float(text.replace("−", "-").replace("NaN", "nan")) for text in becomes(page)]
        assert shown == pytest.approx(expected, rel=1e-7, nan_ok=True), (step, real)
    assert panel["samples"] is not None or fmt in (E8M0,)


@pytest.mark.browser
def test_a_wrong_round_to_is_drawn_and_called_wrong(show, round_to_in_use):
    round_to_in_use(truncating)
    page = show(RoundingExplorer(E4M3, 0.1))
    assert becomes(page)[0] == "0.09375"
    assert "your round_to" in page.locator(".lplab-badge").inner_text()
    assert "the definition gives 0.1015625" in page.locator(".lpround-error").first.inner_text()


THEMES = {"light": "#ffffff", "dark": "#111111"}
ACCESSIBLE = {
    "one": lambda: RoundingExplorer(E4M3, 0.1),
    "tie": lambda: RoundingExplorer(FP16, 2049, mode="down"),
    "beyond": lambda: RoundingExplorer(E4M3FNUZ, -1e6, overflow="to_special"),
    "nan": lambda: RoundingExplorer(E2M1, math.nan),
}


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("case", ACCESSIBLE)
def test_axe_finds_no_violation(show, case, theme):
    from browser import axe_violations

    page = show(ACCESSIBLE[case](), THEMES[theme], width=700)
    page.wait_for_function("theme => document.querySelector('.lplab').dataset.theme === theme", arg=theme)
    assert axe_violations(page, ".lplab") == []
