"""The bench of the linear layer in 8 bits: its figures, on a small one."""

import pytest

from lowprec_lab import bench, fused
from lowprec_lab.bench import float8_linear
from lowprec_lab.float8_linear import RECIPES
from lowprec_lab.libraries import AbsentError

SMALL = (8, 6, 4)


def test_eager_figures(monkeypatch):
    monkeypatch.setattr(fused, "why_not_compiled", lambda: "not in this test")
    found = float8_linear.run(progress=False, turns=2, sizes=SMALL)
    assert set(found["figures"]) - {"fp8_vs_torchao_eager"} == {"fp8_vs_float32_eager"}
    assert all(figure > 0.01 for figure in found["figures"].values())
    assert set(found["ratios"]) == set(RECIPES)
    assert found["ratios"]["rowwise"]["float32_eager"] == 1
    assert found["left_out"]["compiled"] == "not in this test"
    assert "float8_linear" in bench.NAMES


def test_without_torchao(monkeypatch):
    def absent(linear, recipe):
        raise AbsentError("is not installed")

    monkeypatch.setattr(fused, "why_not_compiled", lambda: "not in this test")
    monkeypatch.setattr(float8_linear, "torchao_linear", absent)
    found = float8_linear.run(progress=False, turns=1, sizes=SMALL)
    assert set(found["figures"]) == {"fp8_vs_float32_eager"}
    assert found["left_out"]["torchao"] == "is not installed"


@pytest.mark.slow
@pytest.mark.skipif(bool(fused.why_not_compiled()), reason="nothing can be compiled here")
def test_compiled_figures():
    found = float8_linear.run(progress=False, turns=1, sizes=SMALL)
    assert {"fp8_vs_float32_eager", "fp8_vs_float32_compiled"} <= set(found["figures"])
