"""The table of all formats: bits, what fell back, and that a model stays as it was."""

import math

import pytest
import torch

from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.inference import perplexity
from lowprec_lab.weight_formats import (
    WEIGHT_FORMATS,
    FormatRow,
    WeightFormat,
    find_format,
    format_picture,
    format_table,
    table_text,
    with_weights_in,
)


def small_gpt(width=64):
    torch.manual_seed(5)
    return GPT(GPTConfig(vocab_size=11, context=16, layers=1, heads=2, width=width)).eval()


def batches_for(model):
    generator = torch.Generator().manual_seed(6)
    return [tuple(torch.randint(11, (2, 4, model.config.context), generator=generator))]


def test_formats_are_in_the_order_of_their_bits():
    bits = [each.bits(256, 256) for each in WEIGHT_FORMATS]
    assert bits == sorted(bits, reverse=True)
    assert len({each.name for each in WEIGHT_FORMATS}) == len(WEIGHT_FORMATS) >= 10


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS, ids=lambda fmt: fmt.name)
def test_a_round_trip_keeps_shape_and_dtype_and_nearly_the_numbers(fmt):
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(7)) * 0.02
    before = weight.clone()
    again = fmt.round_trip(weight)
    assert torch.equal(weight, before)
    assert (again.shape, again.dtype) == (weight.shape, torch.float32)
    error = float((again - weight).norm() / weight.norm())
    assert error < (0.04 if fmt.bits(8, 256) > 6 else 0.11)


def test_every_matrix_goes_through_and_nothing_else():
    model = small_gpt()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    marked = WeightFormat("marked", lambda rows, columns: 3.0, lambda weight: weight * 2)
    made, bits, fell = with_weights_in(model, marked)
    assert (bits, fell) == (3.0, {})
    assert made.head.weight is made.token_embedding.weight  # once, and not twice
    for name, each in made.state_dict().items():
        factor = 1 if "norm" in name else 2
        assert torch.equal(each, before[name] * factor), name
        assert torch.equal(model.state_dict()[name], before[name])


def test_bits_count_scales_and_what_fell_back():
    model = small_gpt()
    _, bits, fell = with_weights_in(model, find_format("Q4_K"))
    total = sum(each.numel() for each in model.parameters() if each.dim() == 2)
    down = 64 * 256
    assert bits == pytest.approx((4.5 * down + 5.5 * (total - down)) / total)
    assert set(fell.values()) == {"Q5_0"}
    assert "blocks.0.mlp.down.weight" not in fell
    assert with_weights_in(small_gpt(256), find_format("Q4_K"))[1:] == (4.5, {})
    assert find_format("float8, scale per channel").bits(10, 64) == 8.5


def test_rows_of_48_fall_back_to_float16():
    _, _, fell = with_weights_in(small_gpt(48), find_format("Q4_0"))
    assert fell["blocks.0.mlp.up.weight"] == "float16"
    assert "blocks.0.mlp.down.weight" not in fell  # its rows have 192


def test_an_unknown_format_lists_the_others():
    with pytest.raises(ValueError, match="no format 'Q3'. The formats are: float32, bfloat16, Q8_0"):
        find_format("Q3")


def test_the_table_has_a_line_for_each_format_and_a_count_of_what_fell_back():
    model = small_gpt()
    batches = batches_for(model)
    formats = [find_format(name) for name in ("float32", "Q8_0", "Q4_K")]
    rows = format_table(model, batches, formats)
    assert [row.name for row in rows] == ["float32", "Q8_0", "Q4_K"]
    assert rows[0].perplexity == perplexity(model, batches)
    assert (rows[0].agreement, rows[0].divergence) == (1.0, 0.0)
    assert 0 < rows[1].divergence < rows[2].divergence
    text = table_text(rows)
    assert "float32" in text
    assert "* Q4_K: rows are not made of its blocks, so that there are 5 in Q5_0" in text


def test_the_picture_names_each_format_and_leaves_out_what_is_no_number():
    rows = [
        FormatRow("float32", 32.0, 5.0, 1.0, 0.0, {}), FormatRow("Q8_0", 8.5, 5.01, 0.99, 1e-5, {}),
        FormatRow("Q4_0", 4.5, 5.1, 0.9, 1e-3, {}), FormatRow("broken", 4.0, math.nan, 0.0, math.nan, {}),
    ]  # fmt: skip
    above, below = format_picture(rows).axes
    assert {each.get_text() for each in above.texts} == {"float32", "Q8_0", "Q4_0"}
    assert {each.get_text() for each in below.texts} == {"Q8_0", "Q4_0"}
    assert "bits" in below.get_xlabel()
    assert "perplexity" in above.get_ylabel()
    assert format_picture([]).axes
