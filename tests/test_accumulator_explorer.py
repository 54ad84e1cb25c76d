"""AccumulatorExplorer: right totals, stepped through by mouse and keys, driven by the learner's sums, accessible."""

import base64
import math

import numpy as np
import pytest
import torch

from lowprec_lab import AccumulatorExplorer
from lowprec_lab.explorers import running
from lowprec_lab.formats import BF16, E2M1, E4M3, E5M2, E8M0, FP16, FP32, Format
from lowprec_lab.graders import rounding_oracle

OWN_FORMAT = Format("e3m4, bias 5", 3, 4, bias=5)


def rounded(x, fmt):
    if fmt is FP32:
        return x
    return rounding_oracle.round_to(x, fmt, "nearest_even", "saturate" if fmt.specials == "finite" else "to_special")


def sequential(x, fmt):
    x, total = rounded(x, fmt), torch.zeros(x.shape[:-1])
    for k in range(x.shape[-1]):
        total = rounded(total + x[..., k], fmt)
    return total


def pairwise(x, fmt):
    x = rounded(x, fmt)
    while x.shape[-1] > 1:
        even = x.shape[-1] // 2 * 2
        x = torch.cat([rounded(x[..., 0:even:2] + x[..., 1:even:2], fmt), x[..., even:]], dim=-1)
    return x[..., 0] if x.shape[-1] else torch.zeros(x.shape[:-1])


def kahan(x, fmt):
    x, total = rounded(x, fmt), torch.zeros(x.shape[:-1])
    lost = torch.zeros_like(total)
    for k in range(x.shape[-1]):
        y = rounded(x[..., k] - lost, fmt)
        new = rounded(total + y, fmt)
        lost, total = rounded(rounded(new - total, fmt) - y, fmt), new
    return total


SUMS = {"sequential": sequential, "pairwise": pairwise, "kahan": kahan}


# --- the totals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E4M3, E5M2, BF16, FP16, E2M1, OWN_FORMAT], ids=str)
def test_one_number_is_rounded_as_the_oracle_does(fmt):
    rounder = running.Rounder(fmt)
    bits = torch.randint(0, 2**31 - 2**23, (2000,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    top = torch.tensor([rounder.largest])
    near_top = torch.cat([top * factor for factor in (0.97, 1.0, 1.01, 1.03, 1.0625, 1.07, 1.25, 2.0)])
    halves = torch.arange(-40, 40) * 2.0 ** (1 - fmt.bias - fmt.mantissa_bits - 1)
    x = torch.cat([bits.view(torch.float32), torch.randn(500), near_top, -near_top, halves])
    with np.errstate(over="ignore"):
        ours = torch.tensor([rounder(value) for value in x.tolist()])
    assert torch.equal(ours.nan_to_num(nan=1e30), rounded(x, fmt).nan_to_num(nan=1e30))


@pytest.mark.slow
@pytest.mark.parametrize("method", running.METHODS)
@pytest.mark.parametrize(
    ("fmt", "start", "increment", "count"),
    [
        (E4M3, 0.0, 0.3125, 60),
        (BF16, 0.0, 1.0, 300),
        (E5M2, 3.0, 8192.0, 20),
        (E2M1, 0.0, 0.5, 20),
        (FP16, 7.0, -0.1, 90),
    ],
    ids=str,
)
def test_running_totals_are_sums_of_the_first_numbers(method, fmt, start, increment, count):
    rounder = running.Rounder(fmt)
    start, increment = rounder(start), rounder(increment)
    found = running.by_definition(method, fmt, start, increment, count)
    assert len(found) == count + 1
    for n in range(count + 1):
        numbers = torch.tensor(([start] if start else []) + [increment] * n, dtype=torch.float32)
        assert np.array_equal(SUMS[method](numbers, fmt).numpy(), found[n], equal_nan=True), n


@pytest.mark.parametrize("method", running.METHODS)
@pytest.mark.parametrize("start", [0.0, 2.0])
def test_the_rows_that_an_answer_gets_sum_to_the_totals(method, start):
    n = running.asked_of(100)
    found = SUMS[method](running.rows(method, start, 0.3125, n), E4M3)
    assert np.array_equal(found.numpy(), running.by_definition(method, E4M3, start, 0.3125, 100)[n])


def test_an_answer_is_asked_for_the_first_totals_and_for_some_later_ones():
    assert running.asked_of(40).tolist() == list(range(41))
    asked = running.asked_of(2000)
    assert len(asked) < 80
    assert (asked[:20] == np.arange(20)).all()
    assert asked[-1] == 512


def test_where_a_total_stops():
    assert running.stop_of(running.by_definition("sequential", BF16, 0.0, 1.0, 512)) == 256
    assert running.stop_of(running.by_definition("kahan", BF16, 0.0, 1.0, 512)) is None
    assert running.stop_of(running.by_definition("sequential", FP32, 0.0, 1.0, 512)) is None
    assert running.stop_of(running.by_definition("sequential", BF16, 1024.0, 1.0, 32)) == 0


@pytest.mark.parametrize(("fmt", "stop"), [(E4M3, 16), (BF16, 256), (FP16, 2048)], ids=str)
def test_enough_additions_are_shown_to_see_it_stop(fmt, stop):
    explorer = AccumulatorExplorer(fmt, 1.0)
    assert explorer.stop == stop
    explorer.n = stop + 3
    assert (explorer.total, explorer.exact) == (stop, stop + 3)


# --- the widget, in Python --------------------------------------------------------------------------------------------


def test_settings_can_be_read_and_set():
    explorer = AccumulatorExplorer()
    assert (explorer.fmt, explorer.increment, explorer.start, explorer.method, explorer.n) == (
        BF16,
        1,
        0,
        "sequential",
        0,
    )
    explorer.fmt = "E4M3"
    explorer.increment = 0.3
    explorer.n = 30
    assert (explorer.increment, explorer.stop, explorer.total) == (0.3125, 23, 8.0)
    explorer.method = "kahan"
    assert explorer.total == 9.0
    explorer.start = 100
    assert explorer.start == 96.0  # a tie
    explorer.n = 10**9
    assert explorer.n <= running.MOST


def test_what_cannot_be_summed_up_is_refused():
    with pytest.raises(ValueError, match="no sign or no zero"):
        AccumulatorExplorer(E8M0)
    with pytest.raises(ValueError, match="use a finite number"):
        AccumulatorExplorer(BF16, math.inf)
    with pytest.raises(ValueError, match="'tree' is not one of"):
        AccumulatorExplorer(method="tree")


@pytest.mark.parametrize("fmt", [BF16, E4M3, E2M1, FP32, OWN_FORMAT], ids=str)
@pytest.mark.parametrize("increment", [1.0, 0.0, -0.3, 1e6])
def test_every_running_total_has_a_picture_and_a_text(fmt, increment):
    explorer = AccumulatorExplorer(fmt, increment)
    data, _ = explorer._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert f"in {fmt.name}, sequential" in data["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in data


def test_the_learners_sum_is_taken_up_when_it_is_filled(answer_in_use):
    explorer = AccumulatorExplorer(E4M3)
    answer_in_use("sum_sequential", lambda x, fmt: x.sum(dim=-1))
    shown = explorer._panels[0]["methods"]["sequential"]
    assert shown["origin"] == "yours"
    assert "your sum_sequential" in shown["line"]
    assert "differs from the definition for" in shown["note"]
    explorer.n = 30
    assert explorer.total == 30.0
    answer_in_use("sum_sequential", sequential)
    assert explorer.total == 16.0
    assert explorer._panels[0]["methods"]["sequential"]["note"] == ""


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda x, fmt: 1 / 0, "raised ZeroDivisionError"),
        (lambda x, fmt: 3.0, "returned float, not a tensor"),
        (lambda x, fmt: x.sum(), "of the shape ()"),
    ],
)
def test_a_sum_that_cannot_be_drawn_gives_way_to_the_oracle(answer_in_use, wrong, reason):
    answer_in_use("sum_sequential", wrong)
    explorer = AccumulatorExplorer(E4M3)
    shown = explorer._panels[0]["methods"]["sequential"]
    assert shown["line"] == "exact oracle"
    assert shown["note"].startswith("your sum_sequential ")
    assert reason in shown["note"]
    assert explorer.stop == 16


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def show(show_until):
    return show_until(".lpsum-slider")


def n_in(page) -> int:
    return page.evaluate("window.model.get('_state').n")


def reading(page) -> list[str]:
    return [page.locator(f".lpsum-{name}").inner_text() for name in ("count", "total", "exact", "lost")]


@pytest.mark.browser
def test_buttons_step_through_the_additions(show):
    page = show(AccumulatorExplorer(BF16, 1.0))
    for name in (
        "100 additions",
        "100 additions",
        "100 additions",
        "10 additions",
        "one addition",
        "one addition back",
    ):
        page.get_by_role("button", name=name, exact=True).click()
    assert reading(page) == ["310", "256", "310", "54 (17.4 %)"]
    sentence = page.locator(".lpsum-sentence").inner_text()
    assert "0.5 of that: a tie" in sentence
    assert "the addition is lost" in sentence
    page.get_by_role("button", name="start over").click()
    assert reading(page) == ["0", "0", "0", "0"]
    assert page.get_by_role("button", name="one addition back").is_disabled()


@pytest.mark.browser
def test_the_slider_is_moved_with_keys(show):
    page = show(AccumulatorExplorer(BF16, 1.0))
    slider = page.get_by_role("slider", name="Additions")
    slider.focus()
    page.keyboard.press("End")
    assert n_in(page) == 512
    page.keyboard.press("ArrowLeft")
    assert n_in(page) == 511
    assert slider.get_attribute("aria-valuetext") == "511 additions: total 256, exact 511, lost 255"


@pytest.mark.browser
def test_play_walks_and_pause_stops(show):
    page = show(AccumulatorExplorer(BF16, 1.0))
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("window.model.get('_state').n > 10")
    page.get_by_role("button", name="Pause").click()
    stopped = n_in(page)
    page.wait_for_timeout(200)
    assert n_in(page) == stopped
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("window.model.get('_state').n === 512")
    page.get_by_role("button", name="Play").wait_for()


@pytest.mark.browser
def test_without_motion_play_is_one_jump(show):
    page = show(AccumulatorExplorer(BF16, 1.0), reduced_motion="reduce")
    page.get_by_role("button", name="To the stop").click()
    assert n_in(page) == 256
    page.get_by_role("button", name="To the stop").click()
    assert n_in(page) == 512


@pytest.mark.browser
def test_methods_are_a_choice_without_the_kernel(show):
    page = show(AccumulatorExplorer(BF16, 1.0))
    page.get_by_role("slider", name="Additions").fill("400")
    assert reading(page)[1] == "256"
    page.get_by_label("Sum").select_option("pairwise")
    assert reading(page)[1] == "400"
    assert "sum_pairwise" in page.locator(".lplab-badge").inner_text()
    assert "neighbours" in page.locator(".lpsum-sentence").inner_text()


@pytest.mark.browser
def test_new_settings_go_to_the_kernel_and_what_cannot_be_read_does_not(show):
    page = show(AccumulatorExplorer(BF16, 1.0))
    increment = page.get_by_label("Increment")
    increment.fill("0.3")
    increment.press("Enter")
    assert page.evaluate("window.model.get('_state').increment") == "0.3"
    assert page.locator(".lpsum").get_attribute("aria-busy") == "true"
    increment.fill("zero")
    increment.press("Enter")
    assert increment.get_attribute("aria-invalid") == "true"
    assert "no finite number" in page.locator(".lplab-hint").inner_text()
    assert page.evaluate("window.model.get('_state').increment") == "0.3"


@pytest.mark.browser
def test_an_overflow_is_said(show):
    page = show(AccumulatorExplorer(E5M2, 8192.0))
    page.get_by_role("button", name="100 additions").click()
    assert reading(page)[1] == "∞"
    assert "overflowed" in page.locator(".lpsum-sentence").inner_text()


THEMES = {"light": "#ffffff", "dark": "#111111"}
ACCESSIBLE = {
    "start": lambda: AccumulatorExplorer(),
    "middle": lambda: _at(AccumulatorExplorer(E4M3, -0.3, method="kahan"), 30),
    "overflow": lambda: _at(AccumulatorExplorer(E5M2, 8192.0), 30),
}


def _at(explorer, n):
    explorer.n = n
    return explorer


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("case", ACCESSIBLE)
def test_axe_finds_no_violation(show, case, theme):
    from browser import axe_violations

    page = show(ACCESSIBLE[case](), THEMES[theme], width=700)
    page.wait_for_function("theme => document.querySelector('.lplab').dataset.theme === theme", arg=theme)
    assert axe_violations(page, ".lplab") == []
