"""The table of casts: what each library gives, what is right, and which library is absent."""

import math
import sys

import pytest
import torch

from lowprec_lab import libraries
from lowprec_lab.formats import BF16, E2M1, E4M3, E5M2, E8M0, Format
from lowprec_lab.libraries import casts

EDGES = [464.0, 464.00003, 1e6, math.inf, math.nan, -0.0, 2**-10, 1.0625]


def column(table, name):
    return next(each for each in [*table.right, *table.libraries] if each.name.startswith(name))


def test_right_under_both_policies():
    table = casts(EDGES, E4M3)
    assert str(column(table, "right (saturate)").values) == "[448.0, 448.0, 448.0, 448.0, nan, -0.0, 0.0, 1.0]"
    assert str(column(table, "right (to_special)").values) == "[448.0, nan, nan, nan, nan, -0.0, 0.0, 1.0]"
    assert [each.name for each in casts([1.0], E2M1).right] == ["right (saturate)"]


def test_ml_dtypes_and_gfloat_follow_their_policies():
    pytest.importorskip("ml_dtypes")
    pytest.importorskip("gfloat")
    table = casts(EDGES, E4M3)
    saturated, special = (str(each.values) for each in table.right)
    assert str(column(table, "ml_dtypes").values) == special
    names = [each.name for each in table.libraries if each.name.startswith("gfloat")]
    assert len(names) == 2
    assert str(column(table, names[0]).values) == special
    assert str(column(table, names[1]).values) == saturated
    assert "Every value is right under one of the policies." in table.notes()


def test_a_value_that_no_policy_allows_is_marked(monkeypatch):
    def wrong(x, fmt):
        return {"": torch.where(x == 464, 480.0, x.to(torch.float8_e4m3fn).float())}

    monkeypatch.setattr(libraries, "LIBRARIES", {"qtorch": wrong})
    table = casts([464.0, 1.0], E4M3)
    assert table.differs(table.libraries[0]) == [True, False]
    assert "480*" in str(table)
    assert "font-weight: bold" in table.html()
    assert "* neither policy allows this value." in str(table)


@pytest.mark.parametrize("name", ["ml_dtypes", "gfloat", "qtorch"])
def test_an_absent_library_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    table = casts(EDGES, E5M2)
    assert f"{name}: is not installed" in str(table)
    assert f"{name}: is not installed" in table.html()
    assert name not in str(table).splitlines()[0]


def test_a_library_that_raises_does_not_take_the_table_down(monkeypatch):
    def broken(_x, _fmt):
        raise RuntimeError("no <compiler>")

    monkeypatch.setitem(libraries.LIBRARIES, "qtorch", broken)
    table = casts([1.0], BF16)
    assert "qtorch: raised RuntimeError: no <compiler>" in str(table)
    assert "no &lt;compiler&gt;" in table.html()


def test_formats_that_no_library_has():
    text = str(casts([1.0, 0.3], Format("my own", 3, 4)))
    assert "torch: has no dtype for my own" in text
    assert "0.296875" in text or "0.3125" in text


def test_a_tensor_and_formats_without_zero():
    table = casts(torch.tensor([[0.0, 3.0]]), E8M0)
    assert table.right[0].values == [2.0**-127, 4.0]
    assert len(table.rows()) == 3


def test_every_number_is_shown_in_the_digits_that_bring_it_back():
    table = casts([464.00003, 2**-10], E4M3)
    assert [row[0] for row in table.rows()[1:]] == ["464.00003", "0.0009765625"]


def test_html_has_headers_and_inline_styles_only():
    page = casts(EDGES, E4M3).html()
    assert page.count('scope="row"') == len(EDGES)
    assert "<style" not in page
    assert "class=" not in page
