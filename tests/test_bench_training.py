"""The bench of training: its figures, on few steps of a small model."""

import pytest

from lowprec_lab import bench, fused
from lowprec_lab.bench import training
from lowprec_lab.libraries import AbsentError

PAIRS = ("train_vs_bare", "fp8_vs_torchao", "fp8_vs_fp32")
SMALL = {"layers": 1, "heads": 1, "width": 8, "context": 8, "batch": 2}


def test_eager_figure(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fused, "why_not_compiled", lambda: "not in this test")
    found = training.run(progress=False, steps=6, size=SMALL)
    assert set(found["figures"]) == {f"{name}_eager" for name in PAIRS}
    assert all(figure > 0.1 for figure in found["figures"].values())
    assert all(found["milliseconds"]["eager"][name] > 0 for name in ("train", "bare", "fp32", "fp8", "torchao"))
    assert found["left_out"] == {"compiled": "not in this test"}
    assert "training" in bench.NAMES


@pytest.mark.slow
@pytest.mark.skipif(bool(fused.why_not_compiled()), reason="nothing can be compiled here")
def test_both_figures(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = training.run(progress=False, steps=3, size=SMALL)
    assert set(found["figures"]) == {f"{name}_{kind}" for name in PAIRS for kind in ("eager", "compiled")}


def test_without_torchao_its_figures_are_left_out(monkeypatch, tmp_path):
    def absent(model, recipe):
        raise AbsentError("is not installed")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fused, "why_not_compiled", lambda: "not in this test")
    monkeypatch.setattr(training, "torchao_training", absent)
    found = training.run(progress=False, steps=3, size=SMALL)
    assert set(found["figures"]) == {"train_vs_bare_eager", "fp8_vs_fp32_eager"}
    assert found["left_out"]["torchao"] == "is not installed"
