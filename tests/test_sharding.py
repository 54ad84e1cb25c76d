"""Weights that travel as codes: what arrives is, for a layer that casts it, the weight that was sent."""

import math

import pytest
import torch

from lowprec_lab.formats import E4M3
from lowprec_lab.quantizer import absmax, quantize
from lowprec_lab.sharding import codes_of, weight_of


def weights():
    generator = torch.Generator().manual_seed(14)
    for exponent in range(-40, 40, 4):
        yield torch.randn(32, 16, generator=generator) * 2.0**exponent
    yield torch.zeros(8, 4)
    yield -torch.ones(8, 4)
    tied = torch.randn(16, 16, generator=generator)
    tied[3, 5] = -tied.abs().max()  # the largest magnitude twice, with both signs
    yield tied
    near = torch.full((8, 4), 1.0)
    near[0, 0] = 1.0 + 2.0**-20  # others that have the largest code, and are not the largest
    yield near


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_layer_cannot_tell_whether_its_weight_has_travelled(ranks):
    for weight in weights():
        alone = quantize(weight, E4M3)
        amax = absmax(weight)
        parts = [codes_of(part, amax) for part in weight.chunk(ranks)]
        assert all(torch.equal(part.scale, alone.scale) for part in parts)
        codes = torch.cat([part.codes for part in parts])
        assert torch.equal(codes, alone.codes)
        arrived = weight_of(codes, parts[0].scale, amax, torch.float32)
        again = quantize(arrived, E4M3)
        assert torch.equal(again.scale, alone.scale)
        assert torch.equal(again.codes, alone.codes)


def test_a_nan_in_one_part_is_a_nan_everywhere():
    weight = torch.ones(4, 4)
    weight[3, 3] = math.nan
    first = codes_of(weight[:2], absmax(weight))
    assert bool(weight_of(first.codes, first.scale, absmax(weight), torch.float32).isnan().all())
