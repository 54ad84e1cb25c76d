"""Float8LinearExplorer: shows what the casts of a recipe do, is moved by mouse and keys, and is accessible."""

import pytest
import torch

from lowprec_lab import Float8LinearExplorer
from lowprec_lab.explorers import float8_linear_explorer
from lowprec_lab.explorers.float8_linear_explorer import RECIPES_SHOWN, products_of
from lowprec_lab.float8_linear import PRODUCTS, transpose
from lowprec_lab.graders import float8_linear_oracle as exact
from lowprec_lab.graders import quantizer_oracle


def tensors(seed=1):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((40, 12), (24, 12), (40, 24))
    x, weight, grad_output = (torch.randn(size, generator=generator) for size in sizes)
    return x, weight / 8, grad_output * torch.exp2(torch.randn(40, 1, generator=generator) * 3) * 1e-5


@pytest.mark.parametrize("recipe", RECIPES_SHOWN.values(), ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("log2_outlier", [0, 18])
def test_what_is_shown_is_what_the_casts_do(recipe, log2_outlier):
    x, weight, grad_output = tensors()
    shown = products_of(x, weight, grad_output, recipe, log2_outlier)
    grad_output[0] *= 2.0**log2_outlier
    sources = {"x": x, "weight": weight, "grad_output": grad_output}
    assert [each.name for each in shown] == list(PRODUCTS)
    for product in shown:
        left, right = (torch.from_numpy(e.copy()) for e in exact.operands(product.name, recipe, x, weight, grad_output))
        names = [operand.name for operand in product.operands]
        wide = [sources[name.removesuffix(".T")].double() for name in names]
        wide = [each.T if name.endswith(".T") else each for name, each in zip(names, wide, strict=True)]
        right_product = wide[0] @ wide[1]
        error = (left @ right - right_product).norm(dim=1) / right_product.norm(dim=1)
        assert product.error == pytest.approx(float(error.median()), rel=1e-6, abs=1e-9)
        for operand, values, before in zip(product.operands, (left, right), wide, strict=True):
            assert operand.shape == tuple(values.shape)
            assert operand.lost == float(((values == 0) & (before != 0)).double().sum() / (before != 0).sum())
            if operand.cast is None:
                assert (operand.scales, operand.along, operand.text()) == ([], "", "high precision")
                continue
            q = quantizer_oracle.quantize(sources[operand.name.removesuffix(".T")], *operand.cast)
            q = transpose(q) if operand.name.endswith(".T") else q
            assert operand.along == q.granularity
            ends = q.scale.flatten()[[0, -1]].log2().tolist()
            assert [operand.scales[0], operand.scales[-1]] == pytest.approx(ends, abs=1e-5)


def test_a_scale_never_lies_along_what_is_summed_over():
    for recipe in RECIPES_SHOWN.values():
        for product in products_of(*tensors(), recipe, 0):
            first, second = product.operands
            assert first.along in ("row", "tensor", "")
            assert second.along in ("column", "tensor", "")


def test_one_large_gradient_ruins_the_others_where_they_share_a_scale():
    explorer = Float8LinearExplorer(*tensors(), "tensorwise_e4m3", 24)
    assert explorer.products[1].error > 0.5
    assert explorer.products[1].operands[0].lost > 0.5
    explorer.recipe = "rowwise"
    assert explorer.products[1].error < 0.05
    explorer.log2_outlier = 0
    assert (explorer.recipe, explorer.log2_outlier) == ("rowwise", 0)
    assert repr(explorer).startswith("Float8LinearExplorer: rowwise; a typical row is off by: output ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"recipe": "blockwise"}, "is not one of"),
        ({"log2_outlier": 3}, "an even number from 0 to 24"),
        ({"x": torch.ones(40, 11)}, "both are in_features"),
        ({"x": torch.ones(39, 12)}, "none of them empty"),
        ({"x": torch.ones(12)}, "none of them empty"),
    ],
)
def test_what_cannot_be_shown_is_refused(change, sentence):
    given = dict(zip(("x", "weight", "grad_output"), tensors(), strict=True)) | change
    with pytest.raises(ValueError, match=sentence):
        Float8LinearExplorer(**given)


def test_where_no_widget_can_live_there_is_a_picture():
    bundle, _ = Float8LinearExplorer(*tensors(), "rowwise_with_gw_hp", 4)._repr_mimebundle_()
    assert bundle["image/png"]
    assert bundle["text/plain"].startswith("Float8LinearExplorer: rowwise_with_gw_hp, one gradient 2^4 times as large")
    assert "application/vnd.jupyter.widget-view+json" in bundle


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def show(show_until):
    return show_until(".lpfp8-product")


def errors_of(page):
    return page.locator(".lpfp8-error dd").all_inner_texts()


def expected(explorer):
    return [f"{100 * each.error:.2f} %" for each in explorer.products]


@pytest.mark.browser
def test_a_recipe_is_chosen_and_one_gradient_made_larger(show):
    explorer = Float8LinearExplorer(*tensors())
    page = show(explorer)
    assert errors_of(page) == expected(explorer)
    page.get_by_label("Recipe").select_option("tensorwise_e4m3")
    explorer.recipe = "tensorwise_e4m3"
    assert errors_of(page) == expected(explorer)
    slider = page.get_by_role("slider", name="One token's gradient")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("window.model.get('_state').log2_outlier") == float8_linear_explorer.STEP
    page.keyboard.press("End")
    explorer.log2_outlier = float8_linear_explorer.HIGHEST
    assert errors_of(page) == expected(explorer)
    assert "become zero beside one large gradient" in page.locator(".lpfp8-sentence").inner_text()
    assert "grad_x" in slider.get_attribute("aria-valuetext")


@pytest.mark.browser
def test_scales_stand_beside_rows_and_columns(show):
    page = show(Float8LinearExplorer(*tensors(), "rowwise"))
    texts = page.locator(".lpfp8-operand").all_inner_texts()
    assert ["each row" in text for text in texts] == [True, False] * 3
    assert ["each column" in text for text in texts] == [False, True] * 3
    assert page.locator(".lpfp8-scale").count() == sum(min(n, 24) for n in (40, 24, 40, 12, 24, 12))


THEMES = {"light": "#ffffff", "dark": "#111111"}


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("recipe", ["tensorwise_e4m3", "rowwise_with_gw_hp"])
def test_axe_finds_no_violation(show, recipe, theme):
    from browser import axe_violations

    page = show(Float8LinearExplorer(*tensors(), recipe, 24), THEMES[theme], width=700)
    page.wait_for_function("theme => document.querySelector('.lplab').dataset.theme === theme", arg=theme)
    assert axe_violations(page, ".lplab") == []
