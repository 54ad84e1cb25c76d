"""The bench of training: its figures, on few steps of a small model."""

import pytest

from lowprec_lab import bench, fused
from lowprec_lab.bench import training

SMALL = {"layers": 1, "heads": 1, "width": 8, "context": 8, "batch": 2}


def test_eager_figure(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fused, "why_not_compiled", lambda: "not in this test")
    found = training.run(progress=False, steps=6, size=SMALL)
    assert set(found["figures"]) == {"train_vs_bare_eager"}
    assert found["figures"]["train_vs_bare_eager"] > 0.1
    assert found["milliseconds"]["eager"]["bare"] > 0
    assert "training" in bench.NAMES


@pytest.mark.slow
@pytest.mark.skipif(bool(fused.why_not_compiled()), reason="nothing can be compiled here")
def test_both_figures(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = training.run(progress=False, steps=3, size=SMALL)
    assert set(found["figures"]) == {"train_vs_bare_eager", "train_vs_bare_compiled"}
