"""BlockExplorer: shows what block formats leave of a row, is moved by mouse and keys, and is accessible."""

import math

import numpy as np
import pytest
import torch

from lowprec_lab import BlockExplorer, blanks
from lowprec_lab.block_formats import MX_FORMATS, dequantize_blockwise, dequantize_nvfp4
from lowprec_lab.explorers.blocks import BLOCK_FORMATS
from lowprec_lab.graders import block_formats_oracle as exact
from lowprec_lab.sources import reference

CHOICES = [(fmt.name, mode) for fmt in BLOCK_FORMATS.values() for mode in fmt.modes]


def set_to(explorer, fmt, mode, log2_outlier):
    explorer.fmt, explorer.mode, explorer.log2_outlier = fmt, mode, log2_outlier


@pytest.fixture(scope="module")
def gaussian():
    return BlockExplorer()


def row(place=70, log2_outlier=0):
    x = torch.randn(256, generator=torch.Generator().manual_seed(13)) / 16
    sign, x[place] = x[place].sign(), 0.0
    x[place] = sign * x.abs().max() * 2.0**log2_outlier
    return x


def restored(x, fmt, mode):
    if fmt in MX_FORMATS:
        return reference("dequantize_mx")(*reference("quantize_mx")(x, MX_FORMATS[fmt], mode), MX_FORMATS[fmt])
    if fmt == "NVFP4":
        return dequantize_nvfp4(*reference("quantize_nvfp4")(x))
    return dequantize_blockwise(*reference("quantize_blockwise_128")(x[None], (1, 128), mode == "power of two"))[0]


def error_of(back, x, others):
    return ((back - x)[others].double().norm() / x[others].double().norm()).item()


@pytest.mark.parametrize(("fmt", "mode"), CHOICES)
@pytest.mark.parametrize("log2_outlier", [0, 7, 20])
def test_it_shows_what_the_answers_do(gaussian, fmt, mode, log2_outlier):
    set_to(gaussian, fmt, mode, log2_outlier)
    x = row(log2_outlier=log2_outlier)
    back = restored(x, fmt, mode)
    assert np.array_equal(gaussian._values()[log2_outlier], back.numpy())
    assert gaussian.lost == int((back == 0).sum())
    others = torch.arange(256) != 70
    assert gaussian.error == pytest.approx(error_of(back, x, others))
    width = BLOCK_FORMATS[fmt].block
    for at, error in enumerate(gaussian.errors):
        inside = others & (torch.arange(256) // width == at)
        assert error == pytest.approx(error_of(back, x, inside))


def test_one_scale_for_the_row_takes_all_along_and_a_block_only_its_own(gaussian):
    set_to(gaussian, "MXFP8", "rceil", 20)
    assert gaussian.error_with_one_scale == 1.0
    assert gaussian.lost == 31
    assert gaussian.errors[70 // 32] == 1.0
    assert max(error for block, error in enumerate(gaussian.errors) if block != 70 // 32) < 0.04


def test_the_two_levels_of_nvfp4_have_an_end_too(gaussian):
    set_to(gaussian, "NVFP4", "two levels", 20)
    assert gaussian.lost == 255
    set_to(gaussian, "NVFP4", "two levels", 10)
    assert gaussian.lost < 60


def test_settings_can_be_read_and_set():
    explorer = BlockExplorer(fmt="NVFP4", place=40)
    assert (explorer.fmt, explorer.mode, explorer.log2_outlier, explorer.place, explorer.block) == (
        "NVFP4", "two levels", 0, 40, 2,
    )  # fmt: skip
    explorer.fmt = "MXFP6 E3M2"
    assert (explorer.mode, explorer.block) == ("floor", 1)
    explorer.mode, explorer.fmt = "even", "MXFP4"
    assert explorer.mode == "even", "formats that have a mode keep it"
    explorer.block = 7
    assert (explorer.block, explorer.place) == (7, 40)
    explorer.fmt = "1x128"
    assert (explorer.mode, explorer.block) == ("float32", 1)
    assert repr(explorer).startswith(
        "BlockExplorer: 256 numbers in 1x128 (float32), 128 codes of E4M3 for each scale, number 40 2^0 times the "
    )


@pytest.mark.parametrize("place", [0, 31, 32, 255])
def test_the_outlier_can_be_anywhere(place):
    explorer = BlockExplorer(log2_outlier=20)
    explorer.place = place
    assert explorer._panels[0]["place"] == place
    assert explorer.block == place // 32
    assert np.array_equal(explorer._rows[20].numpy(), row(place, 20).numpy())
    assert [error == 1.0 for error in explorer.errors] == [block == place // 32 for block in range(8)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"weights": torch.zeros(32)}, "nothing to show"),
        ({"weights": torch.full((32,), math.nan)}, "nothing to show"),
        ({"weights": torch.full((32,), 1e38)}, "nothing to show"),
        ({"weights": torch.ones(2, 32)}, "a row of floats"),
        ({"weights": torch.ones(32, dtype=torch.int32)}, "a row of floats"),
        ({"weights": torch.ones(0)}, "32 do not divide a row of 0"),
        ({"weights": torch.ones(48)}, "32 do not divide a row of 48"),
        ({"fmt": "MXFP5"}, "is not one of"),
        ({"mode": "nearest"}, "is not one of"),
        ({"fmt": "NVFP4", "mode": "floor"}, "is not one of"),
        ({"log2_outlier": 21}, "from 0 to 20"),
        ({"log2_outlier": 0.5}, "from 0 to 20"),
        ({"place": 256}, "0 to 255"),
        ({"weights": torch.ones(64), "place": -1}, "0 to 63"),
    ],
)
def test_what_cannot_be_shown_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        BlockExplorer(**arguments)


def test_rows_of_other_lengths_and_blocks_of_zeros():
    x = torch.zeros(96, dtype=torch.bfloat16)
    x[:20] = 1.0
    explorer = BlockExplorer(x)
    for fmt, mode in CHOICES:
        set_to(explorer, fmt, mode, 9)
        assert len(explorer.errors) == math.ceil(96 / BLOCK_FORMATS[fmt].block)
        assert explorer.plot() is not None
    set_to(explorer, "MXFP8", "floor", 0)
    assert explorer.errors[1] == 0.0
    assert explorer._found().byte[0].tolist() == [119, 0, 119]
    assert BlockExplorer(torch.ones(1000))._rows.shape == (21, 256)


def test_where_no_widget_can_live_there_is_a_picture(gaussian):
    bundle, _ = gaussian._repr_mimebundle_()
    assert bundle["image/png"]
    assert bundle["text/plain"].startswith("BlockExplorer: 256 numbers in")
    assert "application/vnd.jupyter.widget-view+json" in bundle


def panel(explorer, name):
    return next(each for each in explorer._panels if each["name"] == name)


@pytest.fixture
def answer(monkeypatch):
    return lambda name, function: monkeypatch.setitem(blanks.FILLED, name, function)


def test_it_runs_on_the_code_in_use_and_says_where_that_is_wrong(answer):
    def scales_of_one(x, fmt, mode="floor", block=32):
        codes, scale = exact.quantize_mx(x, fmt, mode, block)
        return codes, torch.full_like(scale, 127)

    answer("quantize_mx", scales_of_one)
    explorer = BlockExplorer()
    assert panel(explorer, "MXFP8")["origin"] == "yours"
    assert panel(explorer, "MXFP8")["note"] == "differs from the definition for 420 of 420 rows"
    assert panel(explorer, "NVFP4")["origin"] != "yours"
    assert panel(explorer, "NVFP4")["note"] == ""
    assert explorer.plot() is not None


WRONG = {
    "quantize_mx": [lambda *a, **k: None, lambda x, *a, **k: (x, x), lambda x, *a, **k: (x.to(torch.uint8),) * 2],
    "quantize_nvfp4": [lambda *a, **k: None, lambda x, *a, **k: (x, x, x)],
    "quantize_blockwise_128": [lambda *a, **k: None, lambda x, *a, **k: (x.to(torch.float8_e4m3fn), x)],
}


@pytest.mark.parametrize(("name", "function"), [(name, each) for name, wrong in WRONG.items() for each in wrong])
def test_an_answer_that_gives_nothing_to_show_is_told_and_replaced(answer, name, function):
    answer(name, function)
    shown = next(each for each in BlockExplorer()._panels if BLOCK_FORMATS[each["name"]].exercise == name)
    assert shown["origin"] == "oracle"
    assert shown["note"].startswith(f"your {name} returned ")


def test_codes_that_the_format_does_not_have_are_told(answer):
    def too_many_bits(x, fmt, mode="floor", block=32):
        codes, scale = exact.quantize_mx(x, fmt, mode, block)
        return torch.full_like(codes, 200), scale

    answer("quantize_mx", too_many_bits)
    assert panel(BlockExplorer(), "MXFP4")["note"] == "your quantize_mx returned codes that have more than 6 bits"


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def show(show_until):
    return show_until(".lpblock-own")


def percent(share):
    return f"{float(f'{100 * share:.3g}'):.12g} %"


def table(page):
    rows = page.locator(".lpblock-table tbody tr")
    return [rows.nth(at).locator("td").all_inner_texts() for at in range(rows.count())]


def is_shown(page, explorer):
    facts = [page.locator(f"dd.lpblock-{key}").inner_text() for key in ("error", "plain", "lost")]
    assert facts == [percent(explorer.error), percent(explorer.error_with_one_scale), str(explorer.lost)]
    rows = table(page)
    assert [cells[6] for cells in rows] == [percent(error) for error in explorer.errors]
    lost = explorer._lost(explorer._values())[explorer.log2_outlier]
    width = BLOCK_FORMATS[explorer.fmt].block
    assert [int(cells[5].split()[0]) for cells in rows] == np.add.reduceat(lost, range(0, 256, width)).tolist()


@pytest.mark.browser
def test_every_format_and_mode(show):
    explorer = BlockExplorer(log2_outlier=9)
    page = show(explorer)
    for fmt, mode in CHOICES:
        page.get_by_label("Format").select_option(fmt)
        if len(BLOCK_FORMATS[fmt].modes) > 1:
            page.get_by_label("Scale", exact=True).select_option(mode)
        set_to(explorer, fmt, mode, 9)
        assert page.evaluate("window.model.get('_state').mode") == mode
        is_shown(page, explorer)


@pytest.mark.browser
def test_scales_codes_and_values(show):
    explorer = BlockExplorer(fmt="MXFP4", log2_outlier=7)
    page = show(explorer)
    x = row(log2_outlier=7)
    codes, scale = reference("quantize_mx")(x, MX_FORMATS["MXFP4"])
    back = restored(x, "MXFP4", "floor")
    stored = [cells[3] for cells in table(page)]
    assert stored == [f"{byte} (0x{byte:02X})" for byte in scale.tolist()]
    items = page.locator(".lpblock-numbers li")
    assert items.count() == 32
    for k in (64, 70, 71, 95):
        digits = items.nth(k - 64).locator(".lpblock-code").inner_text()
        assert "".join(digits.split()) == f"{codes[k].item():04b}"
    assert items.nth(6).locator(".lpblock-value").inner_text() == f"{back[70].item():g}"
    assert items.nth(6).get_attribute("data-outlier") == "yes"
    assert "31 numbers become 0 in the block of the outlier" in page.locator(".lpblock-sentence").inner_text()


@pytest.mark.browser
def test_sliders_and_blocks_obey_mouse_and_keys(show):
    explorer = BlockExplorer(fmt="NVFP4")
    page = show(explorer)
    size = page.get_by_role("slider", name="Outlier", exact=True)
    size.focus()
    page.keyboard.press("End")
    explorer.log2_outlier = 20
    is_shown(page, explorer)
    assert "2 to the power of 20" in size.get_attribute("aria-valuetext")
    assert "The scale of 15 blocks has become 0" in page.locator(".lpblock-sentence").inner_text()

    button = page.get_by_role("button", name="Show block 3 in full")
    button.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Show block 3 in full"
    assert button.get_attribute("aria-pressed") == "true"
    assert page.locator(".lpblock-full p").inner_text().startswith("Block 3 in full")
    box = page.locator(".lpblock-map svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 10, box["y"] + 60)
    assert page.evaluate("window.model.get('_state').number") // 16 == 15

    place = page.get_by_role("slider", name="Place of the outlier")
    place.focus()
    page.keyboard.press("Home")
    state = page.evaluate("window.model.get('_state')")
    assert (state["place"], state["number"]) == (0, 0)


@pytest.mark.browser
def test_another_place_comes_from_the_kernel(show):
    explorer = BlockExplorer(log2_outlier=16)
    page = show(explorer)
    explorer.place = 200
    sent = show(explorer)
    is_shown(sent, explorer)
    assert sent.locator(".lpblock-full p").inner_text().startswith("Block 6 in full")
    page.get_by_role("slider", name="Place of the outlier").fill("200")
    assert page.locator("output").nth(1).inner_text() == "number 200"


THEMES = {"light": "#ffffff", "dark": "#111111"}


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(("fmt", "log2_outlier", "width"), [("MXFP4", 7, 1160), ("NVFP4", 20, 500)])
def test_axe_finds_no_violation(show, fmt, log2_outlier, width, theme):
    from browser import axe_violations

    page = show(BlockExplorer(fmt=fmt, log2_outlier=log2_outlier), THEMES[theme], width=width)
    page.wait_for_function("theme => document.querySelector('.lplab').dataset.theme === theme", arg=theme)
    assert axe_violations(page, ".lplab") == []


@pytest.mark.browser
@pytest.mark.parametrize("fmt", ["MXFP8", "1x128"])
def test_half_the_width_is_enough(show, fmt):
    """What a page of 1,000 px has at 200 %."""
    page = show(BlockExplorer(fmt=fmt, log2_outlier=9), width=500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 500
