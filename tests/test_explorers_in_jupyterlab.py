"""The explorers in JupyterLab: they obey mouse and keys, take up new code, follow the theme, live after a restart."""

import nbformat
import pytest
from browser import axe_violations, jupyter_lab

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with jupyter_lab(tmp_path_factory.mktemp("pages")) as running:
        yield running


@pytest.fixture
def open_page(browser, lab):
    """Opens a notebook of these cells (sources by their names), with a kernel of its own, which ends with the test."""
    pages = []

    def open_page(cells):
        name = f"page{len(lab.opened)}.ipynb"
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [nbformat.v4.new_code_cell(source, id=cell) for cell, source in cells.items()]
        nbformat.write(notebook, lab.root / name)
        pages.append(lab.open(browser, name))
        return pages[-1]

    yield open_page
    for opened in pages:
        opened.evaluate("async panel => { await panel.sessionContext.shutdown(); }")
        opened.close()


def says(opened, expected):
    """Ask the kernel until it has heard of the last change: the page sends changes one at a time."""
    seen = [opened.run_cell("value")]
    while expected not in seen[-1] and len(seen) < 10:
        opened.page.wait_for_timeout(200)
        seen.append(opened.run_cell("value"))
    assert expected in seen[-1]


def press(opened, *keys):
    for key in keys:  # JupyterLab has uses of its own for these keys
        opened.page.keyboard.press(key)


def takes_up_an_answer(opened, line):
    opened.run_cell("imports")
    assert "Error" not in opened.run_cell("fill")
    opened.select("show")
    opened.page.get_by_text(line).wait_for()


def is_accessible_in(opened, *themes):
    for theme in themes:
        opened.set_theme(theme)
        opened.page.wait_for_function("theme => document.querySelector('.lplab').dataset.theme === theme", arg=theme)
        assert axe_violations(opened.page, ".lplab") == []


# What makes the explorer, its slider, what is asked of it, and the answer after two steps to the right.
SLIDERS = {
    "scale": (
        "import torch\nfrom lowprec_lab import ScaleExplorer\nexplorer = ScaleExplorer(torch.ones(4, 4))\nexplorer",
        "Outlier",
        "print(explorer.log2_outlier, explorer.fmt, explorer.granularity)",
        "2 float8_e4m3fn tensor",
    ),
    "float8 linear": (
        "import torch\nfrom lowprec_lab import Float8LinearExplorer\n"
        "explorer = Float8LinearExplorer(torch.ones(3, 4), torch.ones(2, 4), torch.ones(3, 2))\nexplorer",
        "One token's gradient",
        "print(explorer.recipe, explorer.log2_outlier)",
        "tensorwise 4",
    ),
    "loss scale": (
        "import torch\nfrom lowprec_lab import LossScaleExplorer\n"
        "explorer = LossScaleExplorer(torch.full((10,), 2.0**-26))\nexplorer",
        "Loss scale",
        "print(explorer.log2_scale, explorer.fmt, explorer.outcome['lost'])",
        "2 float16 0",
    ),
}


@pytest.mark.parametrize("explorer", SLIDERS)
def test_a_slider_obeys_the_keys_also_after_a_restart(open_page, explorer):
    show, name, value, expected = SLIDERS[explorer]
    opened = open_page({"show": show, "value": value})
    for restarted in (False, True):
        if restarted:
            opened.restart_kernel()
        opened.run_cell("show")
        opened.page.get_by_role("slider", name=name).focus()
        press(opened, "ArrowRight", "ArrowRight")
        says(opened, expected)


BITS = {
    "show": "from lowprec_lab.explorers import BitExplorer\nexplorer = BitExplorer('E4M3')\nexplorer",
    "value": "print(explorer.codes, explorer.value)",
    "set": "explorer.value = 448",
    "imports": "from lowprec_lab.exercises import fill",
    "fill": "@fill\ndef decode(codes, fmt):\n    return codes.double()",
}


def test_bits(open_page):
    opened = open_page(BITS)
    page = opened.page
    opened.run_cell("show")
    bits = page.locator(".lplab-bit")
    bits.nth(1).click()
    says(opened, "{'float8_e4m3fn': 93} 26.0")

    bits.nth(0).focus()
    press(opened, "ArrowRight", "Space", "ArrowRight", "ArrowLeft", "Space", "Space")
    says(opened, "{'float8_e4m3fn': 29}")
    page.locator("[role=gridcell]").nth(0x1D).focus()
    press(opened, "ArrowDown", "Enter")
    says(opened, "{'float8_e4m3fn': 45}")

    opened.run_cell("set")
    page.get_by_text("= 7 × 2⁶").wait_for()
    takes_up_an_answer(opened, "your decode")
    is_accessible_in(opened, "dark", "light")

    opened.restart_kernel()
    opened.run_cell("show")
    bits.nth(1).click()
    says(opened, "{'float8_e4m3fn': 93} 26.0")
    kinds = set(opened.outputs("show")[0]["data"])
    assert kinds == {"text/plain", "image/png", "application/vnd.jupyter.widget-view+json"}


ROUNDING = {
    "show": "from lowprec_lab import RoundingExplorer\nexplorer = RoundingExplorer()\nexplorer",
    "value": "print(explorer.value, explorer.mode)",
    "set": "explorer.value = 464",
    "imports": "import torch\nfrom lowprec_lab.exercises import fill",
    "fill": "@fill\ndef round_to(x, fmt, mode='nearest_even', overflow='saturate'):\n    return torch.zeros_like(x)",
}


def test_rounding(open_page):
    opened = open_page(ROUNDING)
    page = opened.page
    opened.run_cell("show")
    marker = page.locator(".lpround-marker")
    marker.focus()
    press(opened, "Home", "Shift+ArrowRight", "Shift+ArrowRight")
    page.get_by_role("radio", name="toward zero").check()
    says(opened, "0.09765625 toward_zero")
    opened.run_cell("set")
    page.get_by_text("beyond the largest value").first.wait_for()
    takes_up_an_answer(opened, "your round_to")
    is_accessible_in(opened, "dark", "light")
    opened.restart_kernel()
    opened.run_cell("show")
    marker.focus()
    press(opened, "End")
    says(opened, "0.1015625 nearest_even")


SUMS = {
    "show": "from lowprec_lab import AccumulatorExplorer\nexplorer = AccumulatorExplorer()\nexplorer",
    "value": "print(explorer.n, explorer.total, explorer.fmt, explorer.method)",
    "imports": "from lowprec_lab.exercises import fill",
    "fill": "@fill\ndef sum_sequential(x, fmt):\n    return x.sum(dim=-1)",
}


def test_accumulation(open_page):
    opened = open_page(SUMS)
    page = opened.page
    opened.run_cell("show")
    page.get_by_role("slider", name="Additions").focus()
    press(opened, "End", "ArrowLeft")
    says(opened, "511 256.0 bfloat16 sequential")
    page.get_by_label("Format").select_option("float8_e4m3fn")
    page.get_by_text("stops at 16, after 16 additions").wait_for()
    page.get_by_label("Sum").select_option("kahan")
    says(opened, "float8_e4m3fn kahan")
    page.get_by_label("Sum").select_option("sequential")
    takes_up_an_answer(opened, "your sum_sequential")
    is_accessible_in(opened, "dark", "light")
    opened.restart_kernel()
    opened.run_cell("show")
    page.get_by_role("button", name="100 additions").click()
    says(opened, "100 100.0 bfloat16 sequential")


CASTS = {
    "show": "from lowprec_lab import CastPolicyExplorer\nexplorer = CastPolicyExplorer()\nexplorer",
    "value": "print(explorer.table, explorer.op, explorer.again, explorer.policies, explorer.rows[-1]['op'])",
    "imports": "from lowprec_lab.exercises import fill",
    "fill": "@fill\ndef cast_policy(op, device_type):\n    return 'fp32' if op == 'gelu' else 'as is'",
}


def test_cast_policies(open_page):
    opened = open_page(CASTS)
    page = opened.page
    for theme in ("light", "dark"):
        opened.run_cell("show")
        page.locator("[data-key=qkv]").focus()
        press(opened, "ArrowDown", "ArrowDown")
        says(opened, "cpu scaled False {} cross_entropy_loss")
        page.locator("[data-key=mixed]").click()
        page.get_by_label("Table", exact=True).select_option("own")
        page.get_by_label("Policy of matmul in your table", exact=True).select_option("as is")
        page.locator("[data-key=softmax]").click()
        page.get_by_label("Policy of softmax in your table", exact=True).select_option("fp32")
        page.get_by_text("The pass does not get to the end.").wait_for()
        says(opened, "own softmax False {'matmul': 'as is', 'softmax': 'fp32'} matmul")
        is_accessible_in(opened, theme)
        takes_up_an_answer(opened, "your cast_policy")
        opened.restart_kernel()


BLOCKS = {
    "show": "from lowprec_lab import BlockExplorer\nexplorer = BlockExplorer(log2_outlier=20)\nexplorer",
    "value": "print(explorer.fmt, explorer.mode, explorer.place, explorer.block, explorer.lost)",
    "imports": "import torch\nfrom lowprec_lab.exercises import fill",
    "fill": "@fill\ndef quantize_mx(x, fmt, mode='floor', block=32):\n"
    "    return x.to(torch.uint8) * 0, torch.full((*x.shape[:-1], x.shape[-1] // block), 127).to(torch.uint8)",
}


def test_blocks(open_page):
    """Another place of the outlier goes to the kernel, and what it finds comes back."""
    opened = open_page(BLOCKS)
    page = opened.page
    for restarted in (False, True):
        if restarted:
            opened.restart_kernel()
        opened.run_cell("show")
        page.get_by_role("slider", name="Place of the outlier").focus()
        press(opened, "Home", "ArrowRight")
        page.get_by_text("Block 0 in full").wait_for()
        outlier = page.locator(".lpblock-numbers li[data-outlier=yes]").get_by_text("number 1, the outlier")
        outlier.wait_for(state="attached")
        says(opened, "MXFP8 floor 1 0 31")
        page.get_by_label("Format").select_option("MXFP4")
        page.get_by_label("Scale", exact=True).select_option("rceil")
        page.get_by_role("button", name="Show block 5 in full").focus()
        press(opened, "Space")
        says(opened, "MXFP4 rceil 1 5")
    takes_up_an_answer(opened, "your quantize_mx")
    says(opened, "MXFP4 rceil 1 5 256")
    is_accessible_in(opened, "dark", "light")
