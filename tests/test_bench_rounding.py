"""The bench of rounding: its figures, its table and its chart, on few elements."""

import pytest
import torch

from lowprec_lab import bench, fused
from lowprec_lab.bench import rounding
from lowprec_lab.formats import E4M3
from lowprec_lab.graders import rounding_oracle

TIMES = {"median": 2.0, "smallest": 1.0, "largest": 3.0}


def report(**times):
    names = {rounding.COPY: TIMES, rounding.NATIVE: {**TIMES, "median": 20.0}, rounding.COMPILED: TIMES}
    return {"nanoseconds": names | times, "absent": ["gfloat"], "figures": {}}


def test_table_and_chart():
    text = rounding.table(report())
    assert "not installed: gfloat" in text
    assert text.splitlines()[1].split()[-1] == "0.10"
    axes = rounding.chart(report()).axes[0]
    assert len(axes.patches) == 3
    assert axes.get_xlabel().startswith("time relative")


def test_inputs_reach_below_and_above_the_format():
    x = rounding.inputs(4096)
    assert (x.abs() < 2.0**-9).any()
    assert (x.abs() > 448).any()
    assert (x < 0).any()


def test_our_version_of_qtorchs_way_differs_where_qtorch_does():
    x = torch.tensor([1.0625, 464.00003, 1e6, 1.1])
    assert rounding._ties_away(x).tolist() == [1.125, 480.0, 480.0, 1.125]
    plain = torch.tensor([1.1, -3.3, 0.0021, 101.0])
    assert torch.equal(rounding._ties_away(plain), rounding_oracle.round_to(plain, E4M3))


@pytest.mark.slow
def test_figures():
    assert "rounding" in bench.NAMES
    found = rounding.run(progress=False, elements=2**13, rounds=5)
    wanted = {"compiled_vs_copy", "compiled_vs_native", "eager_vs_native"}
    assert wanted <= set(found["figures"])
    assert set(found["spread"]) == set(found["figures"])
    assert all(low <= found["figures"][name] <= high for name, (low, high) in found["spread"].items())
    assert found["compiled"] == (not fused.why_not_compiled())
