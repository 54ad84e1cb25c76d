"""The quantizer's oracle against fractions, the reference against torchao, and what is decided about odd inputs."""

import math
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from lowprec_lab import libraries
from lowprec_lab.bits import decode
from lowprec_lab.formats import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, FP16
from lowprec_lab.graders import oracle
from lowprec_lab.graders import quantizer_oracle as exact
from lowprec_lab.quantizer import Quantized, require_granularity, spread, values_of
from lowprec_lab.sources import reference

FORMATS = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E3M2, E2M3, E2M1)
GRANULARITIES = ("tensor", "row", "column", (2, 3), (1, 4), (16, 1))
NAN, INF = math.nan, math.inf


def drawn(seed, shape=(6, 7), low=-20, high=20):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.asarray(np.ldexp(rng.normal(size=shape), rng.integers(low, high)), dtype=np.float32))


def nearest(exact_value, candidates):
    """The candidate nearest to a fraction; a tie goes to the one at an even place. candidates: floats in order."""
    distances = [abs(Fraction(each) - exact_value) for each in candidates]
    best = min(distances)
    places = [place for place, distance in enumerate(distances) if distance == best]
    return candidates[next((place for place in places if place % 2 == 0), places[0])]


def single(fraction):
    """The float32 nearest to a fraction, by looking at three of them."""
    near = np.float32(float(fraction))
    around = [np.nextafter(near, np.float32(-INF)), near, np.nextafter(near, np.float32(INF))]
    best = min(abs(Fraction(float(each)) - fraction) for each in around)
    ties = [each for each in around if abs(Fraction(float(each)) - fraction) == best]
    return float(next((each for each in ties if int(each.view(np.int32)) % 2 == 0), ties[0]))


# --- the oracle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["tensor", "row", "column", (2, 3), (4, 5), (1, 1), (9, 9)])
def test_groups_are_those_of_plain_loops(granularity):
    x = drawn(1, (5, 7))
    rows, columns = {"tensor": (5, 7), "row": (1, 7), "column": (5, 1)}.get(granularity, granularity)
    want = [
        [max(abs(v) for row in x[i : i + rows].tolist() for v in row[j : j + columns]) for j in range(0, 7, columns)]
        for i in range(0, 5, rows)
    ]
    assert exact.absmax(x, granularity).flatten().tolist() == [each for row in want for each in row]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scales_are_quotients_of_fractions(fmt):
    amax = drawn(2, (300,), -30, 30).abs()
    top = Fraction(oracle.max_finite(fmt))
    wide = [float(top / Fraction(value)) for value in amax.tolist()]  # Python rounds a fraction correctly
    want = [float(np.float32(each)) for each in wide]
    assert exact.scale_for(amax, fmt).tolist() == want
    powers = exact.scale_for(amax, fmt, power_of_two=True).tolist()
    assert all(
        power <= scale < 2 * power and math.frexp(power)[0] == 0.5 for power, scale in zip(powers, want, strict=True)
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_codes_are_the_nearest_by_fractions(fmt):
    x = drawn(3, (40,), 0, 3)
    q = exact.quantize(x, fmt)
    scale = q.scale.item()
    codes = torch.arange(2 ** (fmt.exponent_bits + fmt.mantissa_bits), dtype=torch.int32)
    values = oracle.decode(codes, fmt)
    values = values[values.isfinite()].tolist()
    for number, value in zip(x.tolist(), oracle.decode(q.codes.int(), fmt).tolist(), strict=True):
        product = single(Fraction(abs(number)) * Fraction(scale))
        assert abs(value) == nearest(min(Fraction(product), Fraction(values[-1])), values)
        assert math.copysign(1, value) == math.copysign(1, number) or value == 0


def test_values_are_quotients_of_fractions():
    codes = torch.randint(0, 126, (200,), generator=torch.Generator().manual_seed(4)).to(torch.uint8)
    scale = torch.tensor(1493.3333)
    back = exact.dequantize(Quantized(codes, scale, E4M3, "tensor", torch.float32)).tolist()
    values = oracle.decode(codes.int(), E4M3).tolist()
    want = [single(Fraction(value) / Fraction(scale.item())) for value in values]
    assert back == want


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_is_that_of_fractions(symmetric):
    x = drawn(5, (200,), 0, 2) + 0.5
    codes, scale, zero_point = exact.quantize_int8(x, symmetric)
    lo, hi = min(0.0, x.min().item()), max(0.0, x.max().item())
    width = max(-lo, hi) / 127 if symmetric else (hi - lo) / 255
    assert scale.item() == float(np.float32(width))
    step = Fraction(scale.item())
    assert zero_point.item() == (0 if symmetric else round(-128 - Fraction(single(Fraction(lo) / step))))
    lowest = -127 if symmetric else -128
    for code, number in zip(codes.tolist(), x.tolist(), strict=True):
        whole = round(Fraction(single(Fraction(number) / step))) + zero_point.item()  # Python rounds ties to even
        assert code == max(lowest, min(127, whole))


def test_the_best_clip_is_found_by_trying():
    for seed in range(5):
        x = drawn(seed, (60,))
        best = exact.best_clip(x, E2M1)
        errors = {}
        for fraction in exact.FRACTIONS:
            clip = np.float32(x.abs().max().item()) * np.float32(fraction)
            scale = np.float32(6.0 / float(clip))
            inside = torch.from_numpy(np.clip(x.numpy() * scale, -6, 6))
            values = oracle.decode(exact.codes_of(inside, E2M1).int(), E2M1).numpy().astype(np.float32) / scale
            errors[float(clip)] = float(np.square(values.astype(np.float64) - x.numpy()).sum())
        assert best.item() == min(errors, key=errors.get)


def test_decibels_by_hand():
    assert exact.sqnr_db(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == pytest.approx(20.0, abs=1e-12)
    assert exact.sqnr_db(torch.zeros(2), torch.zeros(2)) == INF
    assert exact.sqnr_db(torch.zeros(2), torch.ones(2)) == -INF
    assert math.isnan(exact.sqnr_db(torch.tensor([INF]), torch.tensor([INF])))


# --- against torchao --------------------------------------------------------------------------------------------------


def just_below_a_power_of_two(scale):
    """Where log2 in float32 can round up to a whole number."""
    mantissa, _ = torch.frexp(scale)
    return mantissa > 1 - 2.0**-17


def compare_with_torchao(x, fmt, granularity, power_of_two):
    """How many scales torchao rounds up instead of down. Everything else has to be the same, bit for bit."""
    q = reference("quantize")(x, fmt, granularity, power_of_two)
    codes, scale = libraries.torchao_cast(x, fmt, granularity, power_of_two)
    assert q.codes.dtype == codes.dtype
    assert q.codes.shape == codes.shape
    assert q.scale.dtype == scale.dtype == torch.float32
    assert q.scale.shape == scale.shape
    up = torch.zeros(scale.shape, dtype=torch.bool)
    if power_of_two:
        plain = reference("scale_for")(reference("absmax")(x, granularity), fmt)
        up = just_below_a_power_of_two(plain) & (scale == 2 * q.scale)
    same = (q.scale == scale) | (q.scale.isnan() & scale.isnan())
    assert bool((same | up).all())
    ours, theirs = (each.view(fmt.torch_dtype).float().nan_to_num(9e9) for each in (q.codes, codes))
    assert bool(((ours == theirs) & (ours.signbit() == theirs.signbit()) | up.expand(x.shape)).all())
    assert torch.equal(q.codes, exact.quantize(x, fmt, granularity, power_of_two).codes) or bool(ours.eq(9e9).any())
    return int(up.sum())


def tensors(count):
    """Tensors at random and at the edges: zeros, tiny, huge, not finite, and scales at powers of two."""
    rng = np.random.default_rng(7)
    for number in range(count):
        shape = (int(rng.integers(1, 6)), int(rng.integers(1, 20)))
        shape = (2, *shape) if number % 17 == 0 else shape
        x = np.ldexp(rng.normal(size=shape), rng.integers(-60, 60) - rng.integers(0, 12, shape)).astype(np.float32)
        row = (..., int(rng.integers(shape[-2])), slice(None))
        kind = number % 10
        if kind < 4:
            x[row] = rng.choice([0.0, 1e-40, -1e-20, INF, -INF, NAN, 3e38, -1e-12, 1e-45])
        elif kind < 6:
            edge = np.float32(math.ldexp(448, int(rng.integers(-60, 60))))
            x[row] = np.clip(x[row], -edge, edge)
            x[(*row[:-1], 0)] = rng.choice(
                [np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(INF))]
            )
        tensor = torch.from_numpy(x)
        yield tensor.transpose(-1, -2) if number % 7 == 0 else tensor


def compare_all(count):
    pytest.importorskip("torchao")
    up = tried = 0
    for number, x in enumerate(tensors(count)):
        fmt = (E4M3, E5M2)[number % 3 == 0]
        for dtype in (torch.float32, torch.bfloat16):
            for granularity, power_of_two in (("tensor", False), ("row", True)):
                up += compare_with_torchao(x.to(dtype), fmt, granularity, power_of_two)
                tried += 1
    assert tried == 4 * count
    return up


def test_codes_and_scales_are_torchaos():
    assert compare_all(300) > 0, "no scale just below a power of two was tried"


@pytest.mark.slow
def test_codes_and_scales_are_torchaos_on_ten_thousand_tensors():
    assert compare_all(10_000) > 100


def test_torchao_rounds_a_scale_up_and_ours_does_not():
    pytest.importorskip("torchao")
    amax = torch.tensor([[56.000004]])  # 448 / amax is just below 8
    assert libraries.torchao_cast(amax, E4M3, power_of_two=True)[1].item() == 8
    assert reference("quantize")(amax, E4M3, power_of_two=True).scale.item() == 4


def test_the_quality_is_torchaos():
    pytest.importorskip("torchao")
    libraries._torchao_float8()  # quietly
    from torchao.float8.float8_utils import compute_error

    x = drawn(8, (50, 60))
    y = reference("dequantize")(reference("quantize")(x, E4M3))
    assert reference("sqnr_db")(x, y) == pytest.approx(compute_error(x, y).item(), abs=1e-4)


def test_without_torchao_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8.config", None)
    libraries._torchao_float8.cache_clear()
    with pytest.raises(libraries.AbsentError, match="not installed"):
        libraries.torchao_cast(torch.ones(2, 2), E4M3)
    libraries._torchao_float8.cache_clear()


# --- odd inputs -------------------------------------------------------------------------------------------------------


def round_trip(x, fmt=E4M3, granularity="row", **options):
    q = reference("quantize")(x, fmt, granularity, **options)
    return q, reference("dequantize")(q)


@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-40, 1e-20])
def test_tiny_groups_come_back_as_zeros_and_nothing_is_nan(tiny):
    q, back = round_trip(torch.tensor([[tiny, tiny], [1.0, 2.0]]))
    assert back[0].tolist() == [0.0, 0.0]
    assert back[1].tolist() == [1.0, 2.0]
    assert q.scale[0].item() == float(np.float32(448 / 1e-12))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_group_that_is_not_finite_is_nan_and_the_others_are_not(bad, power_of_two):
    x = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 4.0]])
    q, back = round_trip(x, power_of_two=power_of_two)
    assert bool(back[0].isnan().all())
    assert back[1].tolist() == [1.0, 2.0, 4.0]
    assert q.scale[0].isnan().item() if math.isnan(bad) else q.scale[0].item() == 0
    with pytest.raises(ValueError, match="NaN"):
        round_trip(x, E2M1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (2, 3, 5), (0,), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_dtypes_and_shapes_come_back(shape, granularity, dtype):
    needed = 0 if granularity == "tensor" else 1 if granularity == "row" else 2
    x = drawn(9, shape, -6, 6).to(dtype)
    if len(shape) < needed:
        with pytest.raises(ValueError, match="dimensions"):
            round_trip(x, granularity=granularity)
        return
    q, back = round_trip(x, granularity=granularity)
    assert (back.shape, back.dtype) == (x.shape, dtype)
    assert q.scale.shape == exact.scale_shape(granularity, shape)
    assert bool(q.scale.isfinite().all())
    assert bool((back - x).abs().le(x.abs() / 16 + x.abs().max() * 2.0**-18 if x.numel() else back).all())


@pytest.mark.parametrize("granularity", ["tensor", "row", "column", (2, 3)])
def test_strides_do_not_matter(granularity):
    x = drawn(10, (6, 8))
    for strided in (x.t(), x[:, ::2], x[::2], x.expand(2, 6, 8)):
        q, _ = round_trip(strided, granularity=granularity)
        other, _ = round_trip(strided.contiguous(), granularity=granularity)
        assert torch.equal(q.codes, other.codes)
        assert torch.equal(q.scale, other.scale)


def test_the_largest_numbers_of_float32_do_not_overflow():
    q, back = round_trip(torch.tensor([[3.4e38, -1e38, 1.0]]))
    assert bool(back.isfinite().all())
    assert q.scale.item() > 0


def test_no_gradient_flows_into_codes_and_scales():
    x = drawn(11).requires_grad_()
    q = reference("quantize")(x, E4M3, "row")
    assert not q.scale.requires_grad
    assert not q.codes.requires_grad


# --- what is given ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_spread_gives_each_element_the_scale_of_its_group(granularity):
    scale = torch.arange(1.0, 1 + math.prod(exact.scale_shape(granularity, (2, 5, 7))))
    scale = scale.reshape(exact.scale_shape(granularity, (2, 5, 7)))
    want = torch.from_numpy(np.array(exact.spread(scale.numpy(), granularity, (2, 5, 7))))
    assert torch.equal(spread(scale, granularity, (2, 5, 7)), want)


@pytest.mark.parametrize("granularity", ["rows", "", None, (0, 1), (1, -1), (1.0, 2), (1, 2, 3), 4])
def test_other_granularities_are_refused(granularity):
    with pytest.raises(ValueError, match="block|granularity"):
        require_granularity(granularity, 3)


def test_a_format_of_more_than_8_bits_is_refused():
    for fmt in (BF16, FP16):
        with pytest.raises(ValueError, match="16 bits"):
            reference("quantize")(torch.ones(3), fmt)


def test_values_of_keeps_the_table_of_each_decode():
    device = torch.device("cpu")
    values_of(decode, E4M3, device)  # whoever supplies decode is known from now on
    table = values_of(decode, E4M3, device)
    assert (table.dtype, table.shape) == (torch.float32, (256,))
    assert values_of(decode, E4M3, device) is table
    assert values_of(lambda codes, fmt: codes.double(), E4M3, device).tolist() == list(range(256))


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["tensor", "row", (2, 3)])
def test_there_and_back_compiled_has_the_same_bits(granularity):
    x = drawn(12, (6, 9))
    there, back = reference("quantize"), reference("dequantize")

    def both(x):
        return back(there(x, E4M3, granularity))

    eager = both(x)  # what it calls is loaded before anything is followed
    torch._dynamo.reset()
    assert torch.equal(torch.compile(both)(x), eager)
