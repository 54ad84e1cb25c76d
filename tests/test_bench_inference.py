"""The bench of a served GPT: its figures, on a small one."""

import pytest

from lowprec_lab import bench
from lowprec_lab.bench import inference
from lowprec_lab.libraries import AbsentError


@pytest.fixture
def absent(monkeypatch):
    def rows(x):
        raise AbsentError("is not installed")

    monkeypatch.setattr(inference, "compressed_tensors_rows", rows)


def test_figures(absent):
    found = inference.run(progress=False, turns=1, tokens=12, width=16)
    figures = found["figures"]
    assert set(figures) == {"cache_speedup", "fp8_cache_vs_float32", "weight_bytes", "cache_bytes"}
    assert figures["cache_bytes"] == 0.25
    assert 0.25 < figures["weight_bytes"] < 1
    assert all(figure > 0 for figure in figures.values())
    assert found["left_out"] == {"compressed_tensors": "is not installed"}
    assert "inference" in bench.NAMES


@pytest.mark.slow
def test_a_cache_is_five_times_as_fast_at_512_tokens(absent):
    """By an order of magnitude where nothing else runs, so that a busy machine passes as well."""
    assert inference.run(progress=False, turns=1)["figures"]["cache_speedup"] >= 5
