"""ExponentHeatmap: the same numbers in Python and in the browser, driven by mouse and keys, accessible."""

import base64
import math
import re

import numpy as np
import pytest
import torch

from lowprec_lab import ExponentHeatmap
from lowprec_lab.formats import BF16, E2M1, E4M3, E5M2, E8M0, FP16, Format
from lowprec_lab.graders import instruments_oracle as exact
from lowprec_lab.recordings import Recording, packed

LAYERS = ("blocks.0.attention.qkv", "blocks.0.mlp.up", "head")
STEPS = (0, 10, 20, 30)


def numbers(layer, column, kind):
    rng = np.random.default_rng([layer, column, len(kind)])
    size = -14 - 3 * layer + column if kind == "gradients" else layer - 2
    return torch.from_numpy((rng.normal(size=300) * 2.0**size).astype(np.float32))


@pytest.fixture
def recording():
    made = Recording()
    for column, step in enumerate(STEPS):
        kinds = {
            kind: {
                name: packed(exact.exponent_histogram(numbers(layer, column, kind)))
                for layer, name in enumerate(LAYERS)
            }
            for kind in ("activations", "gradients")
        }
        made.write({"step": step, "loss": 1.0, "gradient_norm": 1.0, **kinds})
    return made


# --- in Python --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [FP16, E5M2, E4M3, BF16, E2M1, E8M0], ids=str)
@pytest.mark.parametrize("scale", [-3, 0, 12])
def test_the_chosen_cell_says_what_the_exercise_says(recording, fmt, scale):
    explorer = ExponentHeatmap(recording, "gradients", "underflow", fmt, scale)
    explorer.layer, explorer.step = "blocks.0.mlp.up", 10
    assert explorer.share == pytest.approx(exact.underflow_fraction(numbers(1, 1, "gradients"), fmt, 2.0**scale))


def test_settings_can_be_read_and_set(recording):
    explorer = ExponentHeatmap(recording)
    assert (explorer.kind, explorer.shown, explorer.fmt, explorer.scale_exponent) == ("gradients", "exponent", FP16, 0)
    assert (explorer.layer, explorer.step) == (LAYERS[0], 30)
    explorer.kind, explorer.shown, explorer.fmt = "activations", "overflow", "E4M3"
    explorer.scale_exponent, explorer.layer, explorer.step = 12, "head", 14
    assert (explorer.fmt, explorer.layer, explorer.step) == (E4M3, "head", 10)
    own = Format("e3m4, bias 5", 3, 4, bias=5)
    explorer.fmt = own
    assert explorer.fmt == own
    assert own.name in [each["name"] for each in explorer._panels[0]["formats"]]


def test_what_is_not_on_offer_is_refused(recording):
    with pytest.raises(ValueError, match="has no line yet"):
        ExponentHeatmap(Recording())
    with pytest.raises(ValueError, match="'weights' is not one of"):
        ExponentHeatmap(recording, "weights")
    with pytest.raises(ValueError, match="'mean' is not one of"):
        ExponentHeatmap(recording, shown="mean")
    with pytest.raises(ValueError, match="from -16 to 48, not 49"):
        ExponentHeatmap(recording, scale_exponent=49)
    explorer = ExponentHeatmap(recording)
    with pytest.raises(ValueError, match="'tail' is not one of"):
        explorer.layer = "tail"


def test_a_growing_recording_is_taken_up(recording):
    explorer = ExponentHeatmap(recording)
    recording.write({**recording.lines[0], "step": 40})
    explorer.refresh()
    explorer.step = 40
    assert explorer.step == 40
    assert explorer._panels[0]["steps"] == [*STEPS, 40]


@pytest.mark.parametrize("shown", ["exponent", "underflow", "overflow"])
def test_every_map_has_a_picture_and_a_text(recording, shown):
    data, _ = ExponentHeatmap(recording, shown=shown, fmt=E4M3, scale_exponent=5)._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "in 3 layers, steps 0 to 30" in data["text/plain"]


def test_a_layer_without_numbers_is_no_trouble():
    made = Recording()
    nothing = {"dead": packed(exact.exponent_histogram(torch.zeros(4)))}
    made.write({"step": 0, "activations": nothing, "gradients": nothing})
    explorer = ExponentHeatmap(made)
    assert math.isnan(explorer.share)
    assert "image/png" in explorer._repr_mimebundle_()[0]


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def show(show_until):
    return show_until(".lpheat-map")


def sentence(page) -> str:
    return page.locator(".lpheat-sentence").inner_text().replace("\u00a0", " ")


def state(page) -> dict:
    return page.evaluate("window.model.get('_state')")


@pytest.mark.browser
@pytest.mark.parametrize("fmt", [FP16, E5M2, E4M3], ids=str)
def test_the_browser_counts_as_python_does(show, recording, fmt):
    explorer = ExponentHeatmap(recording, fmt=fmt, scale_exponent=3)
    page = show(explorer)
    for layer, name in enumerate(LAYERS):
        for column, step in enumerate(STEPS):
            explorer.layer, explorer.step = name, step
            page.evaluate("change => window.model.set('_state', change)", explorer._state)
            shares = {}
            for shown in ("exponent", "underflow", "overflow"):
                explorer.shown = shown
                shares[shown] = explorer.share
            found = re.search(r"exponent (−?\d+)\. \S+ makes ([\d.]+) % of them zero, and ([\d.]+) %", sentence(page))
            assert int(found[1].replace("−", "-")) == shares["exponent"], (layer, column)
            assert float(found[2]) == pytest.approx(100 * shares["underflow"], abs=0.05)
            assert float(found[3]) == pytest.approx(100 * shares["overflow"], abs=0.05)


@pytest.mark.browser
def test_a_click_chooses_a_cell(show, recording):
    page = show(ExponentHeatmap(recording))
    box = page.locator(".lpheat-map").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 10, box["y"] + 50)
    assert (state(page)["layer"], state(page)["column"]) == (2, 3)
    page.mouse.click(box["x"] + 180, box["y"] + 30)
    assert (state(page)["layer"], state(page)["column"]) == (1, 0)
    assert sentence(page).startswith("blocks.0.mlp.up, step 0: 300 gradients")


@pytest.mark.browser
def test_all_is_reached_by_keys(show, recording):
    page = show(ExponentHeatmap(recording, shown="underflow"))
    page.get_by_role("slider", name="Scale").focus()
    page.keyboard.press("ArrowRight")
    assert state(page)["scale"] == 1
    assert "Gradients × 2¹" in page.locator(".lpheat-title").inner_text()
    step = page.get_by_role("slider", name="Step")
    step.focus()
    page.keyboard.press("Home")
    assert state(page)["column"] == 0
    assert step.get_attribute("aria-valuetext") == "step 0"
    page.get_by_label("Layer", exact=True).select_option(label="head")
    page.get_by_label("Format", exact=True).select_option(label="E4M3")
    page.get_by_label("Colour", exact=True).select_option(label="share that is too large")
    page.get_by_label("Numbers", exact=True).select_option(label="activations")
    assert sentence(page).startswith("head, step 0: 300 activations")
    assert "is too large for E4M3" in page.locator(".lpheat-title").inner_text()


@pytest.mark.browser
@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
@pytest.mark.parametrize("width", [1000, 420])
def test_axe_finds_nothing_in_either_theme(show, recording, background, width):
    from browser import axe_violations

    page = show(ExponentHeatmap(recording, shown="overflow", fmt=E4M3, scale_exponent=20), background, width)
    page.wait_for_function("document.querySelector('.lpheat').dataset.theme")
    assert axe_violations(page, ".lpheat") == []
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width


@pytest.mark.browser
def test_it_lets_go_of_everything(show, recording):
    page = show(ExponentHeatmap(recording))
    page.evaluate("window.unmount()")
    assert page.evaluate("Object.values(window.model.listeners).every((list) => list.length === 0)")
