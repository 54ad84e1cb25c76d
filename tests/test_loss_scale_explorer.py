"""LossScaleExplorer: counts what rounding does, is moved by mouse and keys, and is accessible."""

import math

import numpy as np
import pytest
import torch

from lowprec_lab import LossScaleExplorer
from lowprec_lab.explorers import loss_scale_explorer
from lowprec_lab.formats import BF16, E4M3, E5M2, FP16
from lowprec_lab.graders import oracle, rounding_oracle

FORMATS = (FP16, BF16, E5M2, E4M3)


def gradients(n=2000, seed=1):
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.normal(size=n) * np.exp2(rng.normal(-22, 5, n))).astype(np.float32))


def edges(fmt):
    """Both sides of the places where the outcome changes, ties among them."""
    smallest, normal, largest = loss_scale_explorer.edges_of(fmt)
    step = float(oracle.ulp(torch.tensor([largest]), fmt)[0])
    ties = torch.tensor([smallest / 2, normal - smallest / 2, largest + step / 2, largest, normal, smallest]).double()
    x = ties.float()
    found = torch.cat([x, torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(math.inf))])
    return found[found.isfinite()]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("log2_scale", [-24, -3, 0, 7, 16, 44])
def test_counts_are_those_of_rounding(fmt, log2_scale):
    x = torch.cat([gradients(), edges(fmt) if log2_scale == 0 else torch.ones(1)])
    sizes = np.sort(x.double().abs().numpy())
    found = loss_scale_explorer.outcome(sizes, fmt, log2_scale)
    scaled = torch.from_numpy(np.ldexp(sizes, log2_scale))
    fits = scaled <= torch.finfo(torch.float32).max
    rounded = rounding_oracle.round_to(scaled[fits].float(), fmt, "nearest_even", "to_special").double()
    exact = scaled[fits].float().double() == scaled[fits]
    assert bool(exact.all())
    over = int((~rounded.isfinite()).sum()) + int((~fits).sum())
    lost, normal = (
        int((rounded == 0).sum()),
        int((rounded >= oracle.min_normal(fmt)).logical_and(rounded.isfinite()).sum()),
    )
    assert found == {"lost": lost, "subnormal": len(x) - lost - normal - over, "normal": normal, "overflow": over}


def test_settings_can_be_read_and_set():
    explorer = LossScaleExplorer([gradients(), None, torch.tensor([0.0, math.inf, math.nan])], "float16")
    assert (explorer.fmt, explorer.log2_scale, sum(explorer.outcome.values())) == (FP16, 0, 2000)
    lost = explorer.outcome["lost"]
    explorer.log2_scale = 12
    assert explorer.outcome["lost"] < lost / 4
    explorer.fmt = BF16
    assert explorer.outcome == {"lost": 0, "subnormal": 0, "normal": 2000, "overflow": 0}
    shares = "0.0% lost, 0.0% subnormal, 100.0% normal, 0.0% overflow"
    assert repr(explorer) == f"LossScaleExplorer: 2,000 gradients times 2^12 in bfloat16: {shares}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((torch.zeros(3),), "nothing to show"),
        (([],), "nothing to show"),
        ((torch.ones(1), "float8_e8m0fnu"), "is not one of"),
        ((torch.ones(1), FP16, 99), "from -24 to 44"),
        ((torch.ones(1), FP16, 0.5), "from -24 to 44"),
    ],
)
def test_what_cannot_be_shown_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        LossScaleExplorer(*arguments)


def test_where_no_widget_can_live_there_is_a_picture():
    bundle, _ = LossScaleExplorer(gradients(), E5M2, 10)._repr_mimebundle_()
    assert bundle["image/png"]
    assert bundle["text/plain"].startswith("LossScaleExplorer: 2,000 gradients times 2^10 in float8_e5m2")
    assert "application/vnd.jupyter.widget-view+json" in bundle


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def show(show_until):
    return show_until(".lpscale-slider")


def shares(page):
    return [page.locator(f"dd.lpscale-{kind}").inner_text() for kind in loss_scale_explorer.KINDS]


def expected(explorer):
    total = sum(explorer.outcome.values())
    return [f"{100 * count / total:.1f} %" for count in explorer.outcome.values()]


@pytest.mark.browser
def test_the_slider_moves_the_hill_by_mouse_and_keys(show):
    explorer = LossScaleExplorer(gradients())
    page = show(explorer)
    assert shares(page) == expected(explorer)
    slider = page.get_by_role("slider", name="Loss scale")
    slider.fill("12")
    explorer.log2_scale = 12
    assert shares(page) == expected(explorer)
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("window.model.get('_state').log2_scale") == 13
    page.keyboard.press("End")
    explorer.log2_scale = 44
    assert shares(page) == expected(explorer)
    assert "would be skipped" in page.locator(".lpscale-sentence").inner_text()
    assert "2 to the power of 44" in slider.get_attribute("aria-valuetext")


@pytest.mark.browser
def test_another_format_has_another_range(show):
    explorer = LossScaleExplorer(gradients())
    page = show(explorer)
    page.get_by_label("Format").select_option("bfloat16")
    explorer.fmt = BF16
    assert shares(page) == expected(explorer)
    assert page.locator(".lpscale-sentence").inner_text() == "Every gradient has a place in BF16."


THEMES = {"light": "#ffffff", "dark": "#111111"}


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("log2_scale", [0, 16, 44])
def test_axe_finds_no_violation(show, log2_scale, theme):
    from browser import axe_violations

    page = show(LossScaleExplorer(gradients(), FP16, log2_scale), THEMES[theme], width=700)
    page.wait_for_function("theme => document.querySelector('.lplab').dataset.theme === theme", arg=theme)
    assert axe_violations(page, ".lplab") == []
