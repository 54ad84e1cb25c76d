"""Ranks as threads: collectives give what gloo gives, and no rank waits for one that does not come."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from sandboxes import open_sandbox

from lowprec_lab.limits import TookTooLongError, time_limit
from lowprec_lab.rank_threads import RanksDisagreeError, bytes_sent, collectives, group_of, on_ranks


def all_of_them(x):
    """What the collectives of torch.distributed make of x, and of who calls them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        total = x.clone()
        dist.all_reduce(total, op=op)
        found.append(total)
    pieces = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(pieces, x)
    first = x.clone()
    dist.broadcast(first, src=1)
    dist.barrier()
    later = x.clone()
    dist.all_reduce(later, async_op=True).wait()
    return torch.stack([*found, *pieces, first, later, torch.full_like(x, rank), torch.full_like(x, world)])


INPUTS = [torch.tensor([1.5, -2.0, 8.0]), torch.tensor([0.25, 4.0, -8.0])]


def on_its_rank():
    return all_of_them(INPUTS[dist.get_rank()])


@pytest.mark.slow
def test_threads_give_what_processes_with_gloo_give():
    from test_ranks import WITH_TESTS

    from lowprec_lab.ranks import launch

    processes = launch("test_rank_threads:on_its_rank", 2, environment=WITH_TESTS, say=None)
    for thread, process in zip(on_ranks(all_of_them, [(each,) for each in INPUTS]), processes, strict=True):
        assert torch.equal(thread, process)


def test_a_rank_that_returns_early_is_named():
    def early(rank):
        if rank:
            dist.all_reduce(torch.zeros(2))

    with pytest.raises(
        RanksDisagreeError, match=r"Rank 1 waits for rank 0 in all_reduce \(SUM, 2 of float32\), and .* has returned"
    ):
        on_ranks(early, [(0,), (1,)])


def test_ranks_that_call_different_things_are_named():
    def differ(rank):
        dist.all_reduce(torch.zeros(rank + 1))

    with pytest.raises(
        RanksDisagreeError, match="Rank 0 calls all_reduce .*1 of float32.*, and rank 1 calls .*2 of float32"
    ):
        on_ranks(differ, [(0,), (1,)])


def test_ranks_that_wait_for_each_other_in_two_groups_are_named():
    def cross(rank):
        first, second = group_of([0, 1]), group_of([1, 2])
        if rank == 0:
            dist.all_reduce(torch.zeros(1), group=first)
        elif rank == 1:
            dist.all_reduce(torch.zeros(1), group=second)
        else:
            dist.barrier()

    with pytest.raises(RanksDisagreeError, match="Rank 0 waits for rank 1 in all_reduce .*, and rank 1 waits in"):
        on_ranks(cross, [(0,), (1,), (2,)])


def test_the_error_of_a_rank_is_the_one_that_is_raised():
    def fails(rank):
        if rank == 1:
            raise KeyError("mine")
        dist.barrier()

    with pytest.raises(KeyError, match="mine"):
        on_ranks(fails, [(0,), (1,)])


def test_a_rank_that_never_ends_is_stopped_with_the_others():
    def loops(rank):
        while rank:
            pass
        dist.barrier()

    before, began = threading.active_count(), time.monotonic()
    with pytest.raises(TookTooLongError), time_limit(0.5):
        on_ranks(loops, [(0,), (1,)])
    assert time.monotonic() - began < 10
    assert threading.active_count() == before


def test_groups_count_their_ranks_anew():
    def where(rank):
        group = group_of([1, 3]) if rank in (1, 3) else group_of([0, 2])
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        return dist.get_rank(), dist.get_rank(group), dist.get_world_size(group), float(x)

    assert on_ranks(where, [(rank,) for rank in range(4)]) == [
        (0, 0, 2, 2.0),
        (1, 0, 2, 4.0),
        (2, 1, 2, 2.0),
        (3, 1, 2, 4.0),
    ]


def test_bytes_are_those_of_rings():
    def sends(_):
        dist.all_reduce(torch.zeros(8))
        first = bytes_sent()
        dist.all_gather([torch.zeros(8, dtype=torch.uint8) for _ in range(4)], torch.zeros(8, dtype=torch.uint8))
        return first, bytes_sent() - first, collectives()

    assert on_ranks(sends, [(0,)] * 4) == [(2 * 3 * 8, 3 * 8, 2)] * 4


def test_the_world_of_the_process_is_untouched():
    def inside(_):
        return dist.is_initialized()

    assert on_ranks(inside, [(0,), (0,)]) == [True, True]
    assert not dist.is_initialized()
    assert type(dist.distributed_c10d._world).__name__ == "_World"


def test_backward_runs_on_the_rank_that_calls_it():
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            total = gradient.clone()
            dist.all_reduce(total)
            return total

    def rank(k):
        x = torch.ones(2, requires_grad=True)
        (Sum.apply(x) * k).sum().backward()
        return x.grad.tolist()

    assert on_ranks(rank, [(1.0,), (2.0,)]) == [[3.0, 3.0], [3.0, 3.0]]


# --- in a class's sandbox ---

LOOPS = """
def all_reduce_found_inf(gradients, group=None):
    while dist.get_rank() == 1:
        pass
    dist.barrier(group=group)
    return False
"""
WAITS = """
def all_reduce_found_inf(gradients, group=None):
    if dist.get_rank() == 1:
        import time
        time.sleep(1000)
    dist.barrier(group=group)
    return False
"""


@pytest.fixture(scope="module")
def workers():
    with open_sandbox() as sandbox:
        yield sandbox


@pytest.mark.slow
@pytest.mark.parametrize("text", [LOOPS, WAITS], ids=["loops", "waits"])
def test_a_rank_that_never_ends_costs_its_exercise_alone(text, workers):
    from lowprec_lab.blanks import BLANKS
    from lowprec_lab.grading.judge import judge
    from lowprec_lab.sources import Source, reference_source

    name = "all_reduce_found_inf"
    verdict = judge(BLANKS[name], {name: Source(text)}, workers)
    assert not verdict.passed
    assert "It was stopped after" in verdict.text()
    other = judge(BLANKS[name], {name: reference_source(name)}, workers)
    assert other.passed


def test_ranks_that_need_the_same_answer_first_load_it_once(monkeypatch):
    from lowprec_lab import sources

    loads = []
    real = sources.load
    monkeypatch.setattr(
        sources, "load", lambda *given: (time.sleep(0.02), loads.append(given[1].name), real(*given))[-1]
    )
    answer = real(
        sources.reference_source("all_reduce_found_inf"), blank("all_reduce_found_inf"), reference_later(), "ours"
    )
    assert on_ranks(answer, [([torch.ones(2)],)] * 4) == [False] * 4
    assert loads == ["found_nonfinite"]


def blank(name):
    from lowprec_lab.blanks import BLANKS, load_chapters

    load_chapters()
    return BLANKS[name]


def reference_later():
    from lowprec_lab.sources import earlier_answers, reference_source

    return earlier_answers({"found_nonfinite": reference_source("found_nonfinite")})
