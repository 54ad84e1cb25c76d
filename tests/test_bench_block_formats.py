"""The bench of block formats: its figures on few elements, and that it compares what is the same work."""

import pytest
import torch

from lowprec_lab import bench, fused
from lowprec_lab.bench import block_formats
from lowprec_lab.block_formats import MX_FORMATS
from lowprec_lab.formats import E2M1, E4M3
from lowprec_lab.libraries import AbsentError, torchao_mx, torchao_mx_round_trip, torchao_nvfp4
from lowprec_lab.sources import reference

TORCHAO = {
    "mxfp8_vs_torchao", "mxfp8_e5m2_vs_torchao", "mxfp6_e2m3_vs_torchao", "mxfp6_e3m2_vs_torchao", "mxfp4_vs_torchao",
    "nvfp4_vs_torchao", "mxfp8_round_trip_vs_torchao",
}  # fmt: skip


@pytest.fixture
def not_compiled(monkeypatch):
    monkeypatch.setattr(fused, "why_not_compiled", lambda: "there is no compiler")


@pytest.fixture
def no_torchao(monkeypatch):
    def absent(x, fmt):
        raise AbsentError("is not installed")

    monkeypatch.setattr(block_formats, "torchao_mx", absent)


@pytest.fixture
def has_torchao():
    try:
        torchao_mx(torch.ones(1, 32), E4M3)
    except AbsentError:
        pytest.skip("torchao is not installed")


def check_report(found, figures):
    assert set(found["figures"]) == set(found["spread"]) == set(found["nanoseconds"]) == figures
    for name, figure in found["figures"].items():
        low, high = found["spread"][name]
        assert 0 < low <= figure <= high


def test_figures(not_compiled, has_torchao):
    assert "block_formats" in bench.NAMES
    found = block_formats.run(progress=False, turns=2, elements=2**12)
    check_report(found, TORCHAO)
    assert found["left_out"] == {"fused": "there is no compiler"}


def test_what_is_absent_is_left_out(not_compiled, no_torchao):
    found = block_formats.run(progress=False, turns=1, elements=2**12)
    assert found["figures"] == {}
    assert found["left_out"]["torchao"] == "is not installed"


def test_both_do_the_same_work(has_torchao):
    """Ordinary numbers: codes and scales are equal, and so is their size."""
    x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(5))
    for name, fmt in MX_FORMATS.items():
        for mode in ("floor", "ceil", "even", "rceil"):
            codes, scale = reference("quantize_mx")(x, fmt, mode)
            packed = reference("pack_nibbles")(codes) if fmt == E2M1 else codes
            theirs = torchao_mx(x, fmt, mode)
            assert torch.equal(packed, theirs[0]), (name, mode)
            assert torch.equal(scale, theirs[1]), (name, mode)
    codes, scale, tensor_scale = reference("quantize_nvfp4")(x)
    theirs = torchao_nvfp4(x)
    assert torch.equal(reference("pack_nibbles")(codes), theirs[0])
    assert torch.equal(scale.view(torch.uint8), theirs[1].view(torch.uint8))
    assert torch.equal(tensor_scale, theirs[2])
    own = reference("dequantize_mx")(*reference("quantize_mx")(x, E4M3), E4M3)
    assert torch.equal(own, torchao_mx_round_trip(x, E4M3))
    assert torch.equal(own, fused.compiled_mx_round_trip(E4M3)(x))


@pytest.mark.slow
def test_the_fused_round_trip_takes_three_tenths_of_torchs_cast(no_torchao):
    if fused.why_not_compiled():
        pytest.skip(fused.why_not_compiled())
    found = block_formats.run(progress=False, turns=15)
    check_report(found, {block_formats.FUSED})
    assert found["figures"][block_formats.FUSED] <= 0.3
