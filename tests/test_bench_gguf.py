"""The bench of blocks of 32: its figures, on few rows."""

import pytest

from lowprec_lab import bench, c_code
from lowprec_lab.bench import gguf
from lowprec_lab.libraries import AbsentError

pytest.importorskip("gguf")
needs_compiler = pytest.mark.skipif(c_code.find_compiler() is None, reason="there is no C compiler")


@needs_compiler
def test_figures():
    found = gguf.run(progress=False, turns=1, rows=2)
    python = {f"python_{layout}_vs_gguf" for layout in ("q8_0", "q4_0", "q4_1", "q5_0")}
    assert set(found["figures"]) == {"q4_k_rmse", "c_q8_0_speedup", "c_q4_0_speedup", *python}
    assert found["figures"]["q4_k_rmse"] <= 0.074
    assert all(figure > 0 for figure in found["figures"].values())
    assert found["left_out"] == {}
    assert "gguf" in bench.NAMES


def test_without_a_compiler_the_python_part_stays(monkeypatch):
    monkeypatch.setattr(c_code, "find_compiler", lambda: None)
    found = gguf.run(progress=False, turns=1, rows=1)
    assert set(found["left_out"]) == {"c"}
    assert not any(name.startswith("c_") for name in found["figures"])


def test_without_gguf_nothing_is_measured(monkeypatch):
    def absent(x, layout):
        raise AbsentError("is not installed")

    monkeypatch.setattr(gguf, "gguf_bytes", absent)
    assert gguf.run(progress=False, turns=1, rows=1)["left_out"] == {"gguf": "is not installed"}


def test_what_is_wrong_is_not_measured(monkeypatch):
    monkeypatch.setattr(gguf, "gguf_bytes", lambda x, layout: x)
    with pytest.raises(AssertionError, match="other bytes"):
        gguf.run(progress=False, turns=1, rows=1)


@pytest.mark.slow
@needs_compiler
def test_q8_0_in_c_is_ten_times_as_fast_as_numpy():
    """The best of three: what else runs on a machine does not slow both alike."""
    found = [gguf.run(progress=False, turns=5)["figures"]["c_q8_0_speedup"] for _ in range(3)]
    assert max(found) >= 10
