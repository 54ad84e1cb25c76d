"""Chapter 14's oracle and references against one process, against Megatron's published rule, and against torch."""

import random
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowprec_lab import distributed as chapter
from lowprec_lab.formats import E4M3, E5M2
from lowprec_lab.graders import distributed_oracle as exact
from lowprec_lab.graders import float8_linear_oracle
from lowprec_lab.quantizer import quantize
from lowprec_lab.rank_threads import on_ranks
from lowprec_lab.sources import reference

# --- the scaler -------------------------------------------------------------------------------------------------------


def published_scales(steps, scale, growth, backoff, interval, floor, hysteresis):
    """Megatron-LM's DynamicGradScaler in its own words: two trackers, and float32 tensors for what it multiplies."""
    scale, growth, backoff, floor = (torch.tensor([each]) for each in (scale, growth, backoff, floor))
    good, patience, found = 0, hysteresis, []
    for bad in steps:
        if bad:
            good = 0
            patience -= 1
            if patience <= 0:
                scale = torch.max(scale * backoff, floor)
        else:
            good += 1
            if good == interval:
                good, patience = 0, hysteresis
                scale = scale * growth
        found.append(float(scale))
    return found


def random_run(rng):
    ranks = rng.choice([2, 3, 4])
    steps = [[rng.random() < 0.1 for _ in range(40)] for _ in range(ranks)]
    settings = (2.0 ** rng.randint(3, 30), 2.0, 0.5, rng.randint(1, 6), 1.0, rng.randint(1, 4))
    return steps, settings


def scales_of(scaler, steps, settings):
    def rank(mine):
        made = scaler(*settings)
        told = []
        for bad in mine:
            skip = made.update(bad)
            told.append((made.scale, skip))
        return told

    return on_ranks(rank, [(each,) for each in steps])


@pytest.mark.parametrize("whose", ["reference", "oracle"])
def test_200_random_runs_have_the_scales_of_the_published_rule_on_every_rank(whose):
    rng = random.Random(14)
    scaler = reference("DistributedLossScaler") if whose == "reference" else exact.DistributedLossScaler
    for _ in range(200 if whose == "reference" else 20):
        steps, settings = random_run(rng)
        anywhere = [any(each) for each in zip(*steps, strict=True)]
        want = list(zip(published_scales(anywhere, *settings), anywhere, strict=True))
        assert scales_of(scaler, steps, settings) == [want] * len(steps)


def megatrons_scaler():
    """The class DynamicGradScaler of the installed megatron-core: from its file alone, with its tensors on the CPU."""
    try:
        package = metadata.distribution("megatron-core")
    except metadata.PackageNotFoundError:
        pytest.skip("megatron-core is not installed")
    path = Path(package.locate_file("megatron/core/optimizer/grad_scaler.py"))
    source = re.sub(r",\s*device=(['\"])cuda\1", "", path.read_text(encoding="utf-8"))
    names = {"__name__": "grad_scaler"}
    exec(compile(source, str(path), "exec"), names)
    return names["DynamicGradScaler"]


def test_200_random_runs_have_the_scales_of_megatron_core():
    theirs_of = megatrons_scaler()
    rng = random.Random(15)
    for _ in range(200):
        steps, settings = random_run(rng)
        scale, growth, backoff, interval, floor, hysteresis = settings
        theirs = theirs_of(scale, floor, growth, backoff, interval, hysteresis)
        want = []
        for bad in (any(each) for each in zip(*steps, strict=True)):
            theirs.update(bad)
            want.append((float(theirs.scale), bad))
        assert scales_of(reference("DistributedLossScaler"), steps, settings) == [want] * len(steps)


def test_the_published_trace():
    bad = [step == "x" for step in "x.x.x...xxx"]
    assert published_scales(bad, 256.0, 2.0, 0.5, 3, 1.0, 2) == [256, 256, 128, 128, 64, 64, 64, 128, 128, 64, 32]


# --- gradients --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """The same weights on every rank: from a generator of its own, since threads share torch's."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.down = nn.Linear(6, 8, dtype=dtype), nn.Linear(8, 3, dtype=dtype)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x, y):
        logits = self.down(torch.relu(self.up(x.to(self.up.weight.dtype)))).float()
        return logits, (logits - y).square().mean()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_mean_gradient_is_that_of_one_process_with_the_whole_batch(ranks):
    generator = torch.Generator().manual_seed(ranks)
    parts = [(torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(8)]
    model = Net(torch.float32)
    found = on_ranks(
        lambda mine: reference("accumulate_main_grads")(Net(torch.float32), mine),
        [(parts[r::ranks],) for r in range(ranks)],
    )
    whole = torch.autograd.grad(
        model(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))[1], list(model.parameters())
    )
    for rank in found:
        for got, want in zip(rank, whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(a, b) for rank in found for a, b in zip(rank, found[0], strict=True))


def test_the_norm_is_that_of_clip_grad_norm_of_the_whole():
    generator = torch.Generator().manual_seed(7)
    weight, bias = torch.randn(8, 4, generator=generator), torch.randn(5, generator=generator)
    together = [nn.Parameter(torch.zeros_like(each)) for each in (weight, bias)]
    for parameter, gradient in zip(together, (weight, bias), strict=True):
        parameter.grad = gradient.clone()
    want = float(nn.utils.clip_grad_norm_(together, 1.0))

    def rank(part):
        mine = [part.clone(), bias.clone()]
        return reference("clip_distributed")(mine, [True, False], 1.0), mine

    found = on_ranks(rank, [(each,) for each in weight.chunk(4)])
    assert all(abs(norm - want) < 1e-6 * want for norm, _ in found)
    torch.testing.assert_close(torch.cat([mine[0] for _, mine in found]), together[0].grad)
    torch.testing.assert_close(found[3][1][1], together[1].grad)


# --- weights and layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("ranks", "rows"), [(2, 64), (3, 64), (4, 9), (4, 2)])
def test_a_gathered_weight_is_quantize_of_the_whole_on_every_rank(fmt, ranks, rows):
    weight = torch.randn(rows, 24, generator=torch.Generator().manual_seed(rows)) * 3
    want = quantize(weight, fmt)
    for whose in (reference("float8_all_gather"), exact.float8_all_gather):
        for q in on_ranks(
            lambda mine, gather=whose: gather(mine, rows, fmt), [(s,) for s in chapter.shards_of(weight, ranks)]
        ):
            assert torch.equal(q.codes, want.codes)
            assert torch.equal(q.scale, want.scale)
            assert (q.fmt, q.granularity, q.dtype) == (fmt, "tensor", torch.float32)


def layer(x, weight, gradient):
    """Output and gradients of Float8Linear in one process, and bounds of what the order of float32 sums may change."""
    x, linear = x.clone().requires_grad_(), nn.Linear(*weight.shape[::-1], bias=False)
    linear.weight.data = weight.clone()
    made = reference("Float8Linear").from_linear(linear, "tensorwise")
    output = made(x)
    output.backward(gradient)
    recipe, bounds = float8_linear_oracle.RECIPES["tensorwise"], []
    for which in ("output", "grad_x", "grad_weight"):
        _, bound = float8_linear_oracle.product(
            *float8_linear_oracle.operands(which, recipe, x.detach(), weight, gradient)
        )
        bounds.append(torch.from_numpy(bound) * 4)  # each side rounds, and so do the sums over ranks
    return (output.detach(), x.grad, linear.weight.grad), bounds


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_divided_layer_is_the_whole_one_to_the_order_of_its_sums(kind, ranks):
    generator = torch.Generator().manual_seed(5)
    x, gradient = torch.randn(24, 32, generator=generator), torch.randn(24, 16, generator=generator)
    weight = torch.randn(16, 32, generator=generator)
    (output, grad_x, grad_weight), bounds = layer(x, weight, gradient)
    answer = reference(f"{kind}_parallel_float8")

    def rank(x, weight, gradient):
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        made = answer(x, weight)
        made.backward(gradient)
        return made.detach(), x.grad, weight.grad

    if kind == "column":
        found = on_ranks(rank, [(x, w, g) for w, g in zip(weight.chunk(ranks), gradient.chunk(ranks, 1), strict=True)])
        mine = torch.cat([o for o, _, _ in found], 1), found[0][1], torch.cat([w for _, _, w in found])
        assert all(torch.equal(gx, found[0][1]) for _, gx, _ in found)
    else:
        found = on_ranks(
            rank, [(a, w, gradient) for a, w in zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)]
        )
        mine = found[0][0], torch.cat([gx for _, gx, _ in found], 1), torch.cat([w for _, _, w in found], 1)
        assert all(torch.equal(o, found[0][0]) for o, _, _ in found)
    for got, want, bound in zip(mine, (output, grad_x, grad_weight), bounds, strict=True):
        assert ((got.double() - want.double()).abs() <= bound).all()


def test_groups_of_megatron():
    """The grid of its documentation: 16 GPUs, tensor 2, pipeline 4, data 2."""
    groups = reference("rank_groups")
    assert groups(16, 2, 4, "tensor")[:3] == [[0, 1], [2, 3], [4, 5]]
    assert groups(16, 2, 4, "data")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert groups(16, 2, 4, "pipeline") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_every_rank_of_a_world_is_in_one_group_of_each_kind():
    for kind in chapter.KINDS:
        assert sorted(sum(reference("rank_groups")(24, 2, 3, kind), [])) == list(range(24))


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_that_decide_alone_come_apart_and_together_they_do_not():
    from lowprec_lab.ranks import launch

    first, second = launch("lowprec_lab.distributed:train_both_ways", 2, (30, 5, 1), say=None)
    assert max(first["together"]["apart"]) == 0
    assert first["together"]["skipped"] == second["together"]["skipped"]
    assert first["together"]["scale"] == second["together"]["scale"]
    assert first["alone"]["apart"][:5] == [0.0] * 5
    assert min(first["alone"]["apart"][5:]) > 0
    assert (sum(first["alone"]["skipped"]), sum(second["alone"]["skipped"])) == (0, 1)


def all_answers():
    """What the reference answers give on this rank of two, in one row for each."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(20)
    parts = [(torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(4)]
    weight, x = torch.randn(7, 8, generator=generator), torch.randn(5, 8, generator=generator)
    mains = reference("accumulate_main_grads")(Net(torch.bfloat16), parts[rank::2])
    bad = [torch.tensor([1.0, torch.inf if rank else 1.0])]
    scaler = reference("DistributedLossScaler")(2.0**8, growth_interval=2)
    scales = [(scaler.update(step == rank), scaler.scale) for step in range(5)]
    amaxes = reference("all_reduce_amax")([torch.tensor([1.0, torch.nan][rank]), torch.tensor([[2.0], [3.0 + rank]])])
    gradients = [weight[rank].clone(), x.clone()]
    norm = reference("clip_distributed")(gradients, [True, False], 1.0)
    gathered = reference("float8_all_gather")(chapter.shards_of(weight, 2)[rank], 7)
    rows = [torch.cat([each.flatten() for each in mains]), torch.tensor(scales).flatten(), torch.tensor([norm])]
    rows += [torch.tensor([float(reference("all_reduce_found_inf")(bad))]), *map(torch.flatten, amaxes), *gradients]
    rows += [gathered.codes.flatten().float(), gathered.scale.reshape(1)]
    for answer in (reference("column_parallel_float8"), reference("row_parallel_float8")):
        mine, part = x.clone().requires_grad_(), weight[:6].clone().requires_grad_()
        output = answer(mine, part)
        output.backward(torch.ones_like(output))
        rows += [output.detach().flatten(), mine.grad.flatten(), part.grad.flatten()]
    return [row.detach().float().flatten() for row in rows]


@pytest.mark.slow
def test_answers_give_with_gloo_what_they_give_in_a_check():
    from test_ranks import WITH_TESTS

    from lowprec_lab.ranks import launch

    processes = launch("test_distributed_oracle:all_answers", 2, environment=WITH_TESTS, say=None)
    threads = on_ranks(all_answers, [(), ()])
    for process, thread in zip(processes, threads, strict=True):
        assert len(process) == len(thread)
        assert all(torch.equal(a, b) for a, b in zip(process, thread, strict=True))


@pytest.mark.slow
def test_the_wire_carries_about_a_quarter_of_the_bytes():
    from lowprec_lab.ranks import launch

    sent = launch("lowprec_lab.distributed:gather_in", 2, (512, 256), say=None)[0]
    if not sent:
        pytest.skip("this system does not count")
    assert sent["FP8"] <= 0.27 * sent["FP32"]
    assert 0.49 <= sent["BF16"] / sent["FP32"] <= 0.51


def test_quantize_part_has_the_scale_of_the_whole():
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    want = quantize(x, E4M3)
    found = on_ranks(lambda part: chapter.quantize_part(part, E4M3), [(each,) for each in x.chunk(2)])
    assert torch.equal(torch.cat([q.codes for q in found]), want.codes)
    assert {float(q.scale) for q in found} == {float(want.scale)}
    assert not dist.is_initialized()
