"""Mistakes of chapter 13 as people write them, in place of lines of the reference: each is told by its name."""

from dataclasses import replace

import pytest
from misconceptions import in_notebook

from lowprec_lab.sources import reference_source

BACK = "return product(gradient, weight.T), product(gradient.T, x.T)"
AGAIN = "x, weight = (dequantize_mx(*quantize_mx(each, fmt, mode), fmt) for each in (x, weight)); "
OLD_R = "restored(r_codes, r_scale).square()"

WRITTEN = [
    ("keeps_v", "adam_8bit_step", [("kept(v.sqrt())", "kept(v)"), (OLD_R, OLD_R.removesuffix(".square()"))]),
    ("root_not_squared", "adam_8bit_step", [(OLD_R, OLD_R.removesuffix(".square()"))]),
    ("eps_in_the_root", "adam_8bit_step", [(").sqrt() + eps)", " + eps).sqrt())")]),
    ("quantizes_twice", "mx_linear", [(BACK, AGAIN + BACK)]),
    ("gradients_in_high_precision", "mx_linear", [(BACK, "return gradient @ weight, gradient.T @ x")]),
    ("weight_gradient_in_high_precision", "mx_linear", [("product(gradient.T, x.T)", "gradient.T @ x")]),
    ("tensor_scale_without_448", "quantize_nvfp4", [("/ (448 * 6)", "/ 6")]),
    ("nan_carries_over", "quantize_blockwise_128", [("torch.where(scale.isnan(), scale, up.view(torch.float32))",
                                                     "up.view(torch.float32)")]),
    ("signs_always_last", "hadamard_rotate", [("((blocks * signs) @ H / math.sqrt(n))",
                                               "(blocks @ H / math.sqrt(n) * signs)")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "exercise", "changes"), WRITTEN, ids=[each[0] for each in WRITTEN])
def test_a_mistake_in_the_reference_has_its_name(name, exercise, changes):
    source = reference_source(exercise)
    text = source.text
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    assert in_notebook(exercise, replace(source, text=text)).misconception == name


def test_a_verdict_says_which_product_differs():
    source = reference_source("mx_linear")
    text = source.text.replace("product(gradient.T, x.T)", "gradient.T @ x")
    rows = {row.label: row.value for row in in_notebook("mx_linear", replace(source, text=text)).rows}
    assert rows["part"] == "gradient of the weight"


def test_a_verdict_says_what_the_block_is_like():
    source = reference_source("quantize_mx")
    text = source.text.replace("blocks.abs().amax(-1)", "blocks.amax(-1).clamp(min=0)")
    rows = {row.label: row.value for row in in_notebook("quantize_mx", replace(source, text=text)).rows}
    assert "amax of its block" in rows["part"]
