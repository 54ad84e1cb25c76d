"""Fused rounding: eager and compiled agree, bit for bit, with the exact oracle, for every kind of format."""

import random

import numpy as np
import pytest
import torch

from lowprec_lab import devices, fused, rounding
from lowprec_lab.formats import BF16, E4M3, E4M3FNUZ, E5M2, E8M0, FORMATS, FP16, FP32, TF32, Format, FormatError
from lowprec_lab.graders import oracle, rounding_oracle

REGISTERED = [fmt for fmt in FORMATS.values() if fmt.width <= 16]
# What a formula for the usual formats would get wrong: exponents that leave float32 no room above or below.
ODD = [
    Format("one exponent bit", 1, 2, specials="finite"),
    Format("no mantissa bits", 3, 0, specials="fn"),
    Format("as far up as float32 goes", 2, 0, bias=-124, specials="finite"),
    Format("as far down as float32 goes", 4, 3, bias=147, specials="fn"),
    Format("no zero", 4, 3, subnormals=False),
    Format("no sign, finite", 3, 2, specials="finite", signed=False),
]


def made_up(count: int) -> list[Format]:
    draw, found = random.Random(2), []
    while len(found) < count:
        exponent_bits, mantissa_bits = draw.randint(1, 8), draw.randint(0, 7)
        bias = draw.choice([None, draw.randint(-120, 140)])
        flags = {"signed": draw.random() < 0.8, "subnormals": draw.random() < 0.8}
        try:
            kind = draw.choice(["ieee", "fn", "fnuz", "finite"])
            found.append(Format(f"made up {len(found)}", exponent_bits, mantissa_bits, bias, kind, **flags))
        except FormatError:
            continue
    return found


def inputs(fmt: Format) -> torch.Tensor:
    """The breakpoints of every mode with three neighbours on each side, specials, and random bits; both signs."""
    around = np.arange(-3, 4)
    points = [rounding_oracle.breakpoints(fmt, mode, False)[:, None] + around for mode in fused.MODES]
    special = [0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    bits = np.unique(np.concatenate([*(each.ravel() for each in points), special]))
    bits = bits[(bits >= 0) & (bits < 2**31)]
    draw = np.random.default_rng(2)
    if len(bits) > 20_000:
        bits = np.union1d(draw.choice(bits, 20_000, replace=False), special)
    both = np.concatenate([bits, bits + 2**31, draw.integers(0, 2**32, 3000)])
    return torch.from_numpy(both.astype(np.uint32).view(np.int32)).view(torch.float32)


def policies(fmt: Format) -> list[tuple[str, str]]:
    overflows = fused.OVERFLOWS[: 1 if fmt.specials == "finite" else 2]
    return [(mode, overflow) for mode in fused.MODES for overflow in overflows]


def encodable(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    if fmt.specials != "finite":
        return x
    return x[~x.isnan()] if fmt.signed else x[x >= 0]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit; NaN by class."""
    plain = [torch.where(each.isnan(), torch.nan, each).view(torch.int32) for each in (a, b)]
    return torch.equal(*plain)


@pytest.mark.parametrize("fmt", [*REGISTERED, *ODD, *made_up(20)], ids=str)
def test_eager_is_the_oracle(fmt):
    x = inputs(fmt)
    for mode, overflow in policies(fmt):
        right = rounding_oracle.round_to(x, fmt, mode, overflow)
        assert same_bits(fused.round_(x, fmt, None, mode, overflow), right), (mode, overflow)
        some = encodable(x, fmt)
        codes = fused.encode_(some, fmt, None, mode, overflow)
        right_codes = rounding_oracle.encode(some, fmt, mode, overflow)
        assert torch.equal(codes, right_codes.to(fused.code_dtype(fmt))), (mode, overflow)


@pytest.mark.parametrize("fmt", [*REGISTERED, *ODD, *made_up(20)], ids=str)
def test_decoding_is_the_oracle(fmt):
    codes = torch.arange(2**fmt.width, dtype=torch.int32)
    right = oracle.decode(codes, fmt).float()
    assert same_bits(fused.decode_(codes, fmt), right)
    assert same_bits(fused.decode_(codes.to(fused.code_dtype(fmt)), fmt), right)


def test_wide_formats():
    x = inputs(BF16)
    largest = torch.finfo(torch.float32).max
    assert same_bits(fused.round_(x, FP32), x.clamp(-largest, largest))
    assert same_bits(fused.round_(x, FP32, overflow="to_special"), x)
    assert same_bits(fused.decode_(fused.encode_(x, TF32), TF32), fused.round_(x, TF32))
    assert torch.equal(fused.encode_(torch.tensor([1.0, -2.0]), FP32), torch.tensor([1.0, -2.0]).view(torch.int32))


def test_shapes_out_and_in_place():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    right = rounding_oracle.round_to(x, E4M3)
    out = torch.empty_like(x)
    assert fused.round_(x, E4M3, out) is out
    assert torch.equal(out, right)
    assert torch.equal(fused.round_(x.t(), E4M3), right.t())
    columns = torch.empty(5, 3).t()
    assert torch.equal(fused.round_(x, E4M3, columns), right)
    assert fused.round_(torch.empty(0, 4), E4M3).shape == (0, 4)
    assert fused.round_(torch.tensor(1.1), E4M3).shape == ()
    fused.round_(x, E4M3, x)
    assert torch.equal(x, right)


def test_what_is_refused():
    x = torch.ones(3)
    with pytest.raises(TypeError, match="float32"):
        fused.round_(x.double(), E4M3)
    with pytest.raises(ValueError, match="out is"):
        fused.round_(x, E4M3, torch.empty(4))
    with pytest.raises(ValueError, match="mode is one of"):
        fused.round_(x, E4M3, mode="nearest")
    with pytest.raises(ValueError, match="saturate"):
        fused.round_(x, FORMATS["float4_e2m1fn"], overflow="to_special")
    with pytest.raises(ValueError, match="no code for NaN"):
        fused.encode_(torch.tensor([torch.nan]), FORMATS["float4_e2m1fn"])


# compiled


COMPILED = [E4M3, E4M3FNUZ, E5M2, E8M0, BF16, FP16, TF32, ODD[2], ODD[3]]


@pytest.mark.slow
def test_compiled_is_eager_for_one_format_after_the_other():
    """In one process: a compiler that takes a format's numbers for variables gets the second one wrong."""
    for fmt in COMPILED:
        x = inputs(fmt if fmt.width <= 16 else BF16)
        run = fused.compiled_round(fmt)
        assert same_bits(run(x), fused.round_(x, fmt)), fmt
        assert same_bits(run(x[:1000]), fused.round_(x[:1000], fmt)), fmt
        assert run.is_compiled() == (not fused.why_not_compiled())


@pytest.mark.slow
@pytest.mark.parametrize("mode", fused.MODES)
def test_compiled_modes(mode):
    x = inputs(E5M2)
    got = fused.compiled_round(E5M2, mode, "to_special")(x)
    assert same_bits(got, rounding_oracle.round_to(x, E5M2, mode, "to_special"))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [E4M3, E5M2, BF16], ids=str)
def test_compiled_codes(fmt):
    x = inputs(fmt)
    codes = fused.compiled_encode(fmt)(x)
    assert torch.equal(codes, rounding_oracle.encode(x, fmt).to(fused.code_dtype(fmt)))
    assert same_bits(fused.compiled_decode(fmt)(codes), rounding_oracle.round_to(x, fmt))


def adds_and_subtracts(x, fmt, out=None):
    """A learner's rounder for normal numbers of E4M3, with a blank in it."""
    shifted = x.clamp(-max_finite(fmt), max_finite(fmt)) * (1 + 2.0**20)  # noqa: F821
    rounded = shifted - (shifted - x)
    return rounded if out is None else out.copy_(rounded)


def branches(x, fmt, out=None):
    rounded = x.clone() if float(x.max()) > 0 else -x
    return rounded if out is None else out.copy_(rounded)


@pytest.mark.slow
def test_a_learners_function_is_compiled_with_the_blanks_it_asks():
    asked = []
    names = {"max_finite": lambda fmt: asked.append(fmt) or 448.0, "__name__": "no module of this name"}
    function = type(adds_and_subtracts)(adds_and_subtracts.__code__, names, "mine", (None,))
    run = rounding.compiled(function, E4M3)
    x = torch.linspace(-2, 2, 1000)
    out = torch.empty_like(x)
    assert run(x, out) is out
    assert torch.equal(out, function(x, E4M3))
    assert run.is_compiled() == (not fused.why_not_compiled())
    assert asked[0] == E4M3


@pytest.mark.slow
def test_what_cannot_be_compiled_runs_eagerly_and_says_so_once(capsys):
    fused._SAID.clear()
    run = rounding.compiled(branches, E4M3)
    x = torch.ones(100)
    assert torch.equal(run(x), x)
    assert torch.equal(run(x), x)
    assert not run.is_compiled()
    assert capsys.readouterr().out.count("runs eagerly") == 1


def test_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(devices, "find_compilers", lambda: {"c": None, "c++": None})
    fused._SAID.clear()
    for _ in range(2):
        run = fused.compiled_round.__wrapped__(E4M3)
    assert not run.is_compiled()
    x = inputs(E4M3)
    assert same_bits(run(x), fused.round_(x, E4M3))
    said = capsys.readouterr().out
    assert said.count("no C++ compiler") == 1
    assert "lowprec-lab doctor" in said


def test_an_answer_can_be_followed_where_an_oracle_stands_in_for_what_it_calls(monkeypatch):
    """The oracles of max_finite and min_normal look at codes with numpy, which no compiler follows."""
    from lowprec_lab import rounding
    from lowprec_lab.graders.registry import ORACLES, load_graders
    from lowprec_lab.sources import reference_source

    load_graders()
    names = {name: ORACLES[name] for name in ("max_finite", "min_normal")} | {"torch": torch, "fill": lambda f: f}
    exec(reference_source("fast_round_to").text, names)
    x = torch.tensor([0.1, 465.0, -1e-9, 1e6])
    assert torch.equal(rounding.traced(names["fast_round_to"], x, E4M3), names["fast_round_to"](x, E4M3))
