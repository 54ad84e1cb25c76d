"""Checks and known misconceptions of chapter 14."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_lab.distributed import (
    KINDS,
    amax_facts,
    amaxes_on_ranks,
    clipped_on_ranks,
    column_parallel_on_ranks,
    found_on_ranks,
    gathered_facts,
    gathered_on_ranks,
    main_grads_facts,
    main_grads_on_ranks,
    refusal_of,
    row_parallel_on_ranks,
    scales_on_ranks,
    scales_resumed_on_ranks,
)
from lowprec_lab.formats import E4M3, E5M2
from lowprec_lab.graders import distributed_oracle as exact
from lowprec_lab.graders import loss_scaling_oracle, quantizer_oracle
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for
from lowprec_lab.quantizer import Quantized

for _function in (
    exact.accumulate_main_grads, exact.all_reduce_found_inf, exact.DistributedLossScaler, exact.rank_groups,
    exact.all_reduce_amax, exact.clip_distributed, exact.float8_all_gather, exact.column_parallel_float8,
    exact.row_parallel_float8,
):  # fmt: skip
    oracle_for(_function.__name__, _function)

# All ranks in one group, and two groups beside each other.
TWO, FOUR, PAIRS, ACROSS = ((0, 1),), ((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3))


def _same_on_ranks(case, got: object, want: tuple) -> None:
    """Compare what ranks have; a verdict shows the first rank that has something else."""
    case.same_bits(got, want, parts=tuple(f"the result of rank {rank}" for rank in range(len(want))))


def _ranks(groups: tuple) -> int:
    return sum(map(len, groups))


# --- 14.1 accumulate_main_grads ---------------------------------------------------------------------------------------


def some_inputs(rng: np.random.Generator, ranks: int, parts: int, n: int = 5) -> Tensor:
    """float32 (ranks, parts, n) of 7 bits each, so that all sums of them are exact in float32, and not in bfloat16."""
    whole = rng.integers(65, 128, (ranks, parts, n)) * rng.choice([-1, 1], (ranks, parts, n), p=[0.2, 0.8])
    return torch.from_numpy(np.ldexp(whole, rng.integers(-6, -1, (ranks, parts, n))).astype(np.float32))


def _compare_mains(answer, case, groups: tuple, dtype: torch.dtype, inputs: Tensor) -> None:
    _same_on_ranks(case, answer.run(main_grads_on_ranks, groups, dtype, inputs), exact.main_grads(groups, inputs))


@check_for("accumulate_main_grads", weight=2)
def bfloat16_parameters(answer, case):
    """BF16 parameters; 1 to 8 micro-batches on two and four ranks, whose sums are exact in float32."""
    for groups in (TWO, FOUR):
        for parts in (1, 2, 4, 8):
            for _ in range(case.count(1)):
                _compare_mains(answer, case, groups, torch.bfloat16, some_inputs(case.rng, _ranks(groups), parts))


@check_for("accumulate_main_grads")
def other_parameters_and_groups(answer, case):
    """FP16 and float32 parameters; two groups of two ranks beside each other."""
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        for groups in (PAIRS, ACROSS):
            for _ in range(case.count(1)):
                _compare_mains(answer, case, groups, dtype, some_inputs(case.rng, 4, 2))


@check_for("accumulate_main_grads")
def huge_gradients(answer, case):
    """Gradients of 1e38 to 3e38 on every rank: the sum of two is infinite, and their mean is not."""
    for groups in (TWO, FOUR, PAIRS):
        for parts in (2, 4):
            whole = case.rng.integers(80, 127, (_ranks(groups), 1, 5))
            inputs = torch.from_numpy(np.ldexp(whole, 121).astype(np.float32)).expand(-1, parts, -1).contiguous()
            _compare_mains(answer, case, groups, torch.float32, inputs)


@check_for("accumulate_main_grads")
def bytes_on_the_wire(answer, case):
    """What goes over the wire, with 1, 2 and 4 micro-batches on two and four ranks; what is left on the parameters."""
    for groups in (TWO, FOUR):
        for parts in (1, 2, 4):
            inputs = some_inputs(case.rng, _ranks(groups), parts, 8)
            want = ("4 bytes for each number, 0 gradients left",) * _ranks(groups)
            _same_on_ranks(case, answer.run(main_grads_facts, groups, torch.bfloat16, inputs), want)


def _averaged(totals: list[Tensor], group: object) -> list[Tensor]:
    return [exact.summed(each / dist.get_world_size(group), group) for each in totals]


@misconception(
    "accumulate_main_grads", "It lets the parameters add their gradients up, in their own dtype, and converts the sum."
)
def adds_up_in_the_parameters(model, batches, group=None):
    for x, y in batches:
        (model(x, y)[1] / len(batches)).backward()
    totals = [each.grad.float() for each in model.parameters()]
    model.zero_grad(set_to_none=True)
    return _averaged(totals, group)


@misconception("accumulate_main_grads", "It does not divide the loss by the number of micro-batches.")
def sums_micro_batches(model, batches, group=None):
    return _averaged(exact.own_main_grads(model, batches, 1), group)


@misconception("accumulate_main_grads", "It sends each micro-batch over the wire: as many times as much of it.")
def sends_each_micro_batch(model, batches, group=None):
    each = [_averaged(exact.own_main_grads(model, [one], len(batches)), group) for one in batches]
    return [torch.stack(same).sum(0) for same in zip(*each, strict=True)]


@misconception(
    "accumulate_main_grads",
    "It sums what has come together over the ranks after every micro-batch: earlier ones count more than once.",
)
def sums_what_was_summed(model, batches, group=None):
    totals = None
    for one in batches:
        own = exact.own_main_grads(model, [one], len(batches))
        totals = own if totals is None else [a + b for a, b in zip(totals, own, strict=True)]
        totals = [exact.summed(each, group) for each in totals]
    return [each / dist.get_world_size(group) for each in totals]


@misconception("accumulate_main_grads", "It adds the ranks up and does not divide by how many there are.")
def sums_ranks(model, batches, group=None):
    return [exact.summed(each, group) for each in exact.own_main_grads(model, batches, len(batches))]


@misconception("accumulate_main_grads", "It never asks the other ranks: each keeps the mean of its own micro-batches.")
def keeps_its_own(model, batches, group=None):
    return exact.own_main_grads(model, batches, len(batches))


@misconception("accumulate_main_grads", "It sends the sum in the parameter's dtype: the wire rounds what was kept.")
def sends_the_parameters_dtype(model, batches, group=None):
    totals = exact.own_main_grads(model, batches, len(batches))
    parameters = list(model.parameters())
    return [
        exact.summed((each / dist.get_world_size(group)).to(of.dtype), group).float()
        for each, of in zip(totals, parameters, strict=True)
    ]


@misconception("accumulate_main_grads", "It sums over all ranks there are, and not over the group.")
def sums_over_the_world(model, batches, group=None):
    totals = exact.own_main_grads(model, batches, len(batches))
    return [exact.summed(each / dist.get_world_size(group)) for each in totals]


@misconception(
    "accumulate_main_grads", "It leaves gradients on the parameters: each micro-batch adds those before it once more."
)
def adds_earlier_ones_again(model, batches, group=None):
    parameters = list(model.parameters())
    totals = [torch.zeros(each.shape) for each in parameters]
    for x, y in batches:
        (model(x, y)[1] / len(batches)).backward()
        totals = [total + each.grad for total, each in zip(totals, parameters, strict=True)]
    return _averaged(totals, group)


@misconception(
    "accumulate_main_grads",
    "It divides after a sum (of micro-batches, or ranks): huge gradients become infinite in it.",
)
def divides_after_the_sum(model, batches, group=None):
    totals = exact.own_main_grads(model, batches, len(batches))
    return [exact.summed(each, group) / dist.get_world_size(group) for each in totals]


@misconception("accumulate_main_grads", "It overwrites: only the last micro-batch is in the result.")
def last_micro_batch_only(model, batches, group=None):
    return _averaged(exact.own_main_grads(model, batches[-1:], len(batches)), group)


# --- 14.2 all_reduce_found_inf ----------------------------------------------------------------------------------------

_BAD = (math.inf, -math.inf, math.nan)


def some_gradients(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[Tensor | None]:
    return [torch.from_numpy(rng.normal(0, 1, shape).astype(np.float32)) for shape in shapes]


def _with(rng: np.random.Generator, value: float) -> list[Tensor | None]:
    """Gradients of which one has an element of this value."""
    gradients = some_gradients(rng, (3,), (2, 2))
    gradients[rng.integers(2)].view(-1)[rng.integers(3)] = value
    return gradients


def _found(answer, case, groups: tuple, *gradients: list[Tensor | None]) -> None:
    _same_on_ranks(case, answer.run(found_on_ranks, groups, *gradients), exact.found(groups, gradients))


@check_for("all_reduce_found_inf", weight=2)
def one_rank_has_found_it(answer, case):
    """Two and four ranks: an infinity, a minus infinity or a NaN on one of them, each in turn."""
    for groups in (TWO, FOUR):
        for bad in range(_ranks(groups)):
            for value in _BAD:
                of = [_with(case.rng, value if rank == bad else 1.0) for rank in range(_ranks(groups))]
                _found(answer, case, groups, *of)


@check_for("all_reduce_found_inf")
def several_ranks_or_none(answer, case):
    """No rank, two, three and all four; finite gradients of 3e38 on every rank."""
    for bad in ((), (0, 1), (1, 2), (0, 3), (1, 2, 3), (0, 1, 2, 3)):
        for _ in range(case.count(1)):
            value = _BAD[int(case.rng.integers(3))]
            _found(answer, case, FOUR, *(_with(case.rng, value if rank in bad else 2.0) for rank in range(4)))
    for huge in (3e38, 2e38, 3.4e38):
        _found(answer, case, TWO, [torch.full((3,), huge)], [torch.full((2,), huge), None])


@check_for("all_reduce_found_inf")
def only_the_group(answer, case):
    """Two groups of two ranks beside each other: what one of them found is nothing to the other."""
    for groups in (PAIRS, ACROSS):
        for bad in range(4):
            value = _BAD[int(case.rng.integers(3))]
            _found(answer, case, groups, *(_with(case.rng, value if rank == bad else 1.0) for rank in range(4)))


@check_for("all_reduce_found_inf")
def ranks_with_other_gradients(answer, case):
    """As in a pipeline: other shapes on each rank, a rank without any gradient, and one with None alone."""
    for value in (*_BAD, 1.0):
        has = [torch.tensor([[1.0, value]]), None]
        for of in ([[], has], [has, [None, None]], [[torch.empty(0)], [], has]):
            _found(answer, case, (tuple(range(len(of))),), *of)


@misconception("all_reduce_found_inf", "Each rank looks at its own gradients alone.")
def looks_at_its_own(gradients, group=None):
    return loss_scaling_oracle.found_nonfinite(gradients)


@misconception("all_reduce_found_inf", "It wants all ranks to have found one (MIN, or `all`), where one is enough.")
def all_must_have_found(gradients, group=None):
    return all(exact.flags(loss_scaling_oracle.found_nonfinite(gradients), group))


@misconception("all_reduce_found_inf", "It takes the mean over ranks and asks for at least one half.")
def most_must_have_found(gradients, group=None):
    found = exact.flags(loss_scaling_oracle.found_nonfinite(gradients), group)
    return 2 * sum(found) >= len(found) and sum(found) > 0


@misconception("all_reduce_found_inf", "It adds up and compares with 1: where two ranks have found one, it says no.")
def exactly_one(gradients, group=None):
    return sum(exact.flags(loss_scaling_oracle.found_nonfinite(gradients), group)) == 1


@misconception("all_reduce_found_inf", "It asks all ranks there are, and not those of the group.")
def asks_the_world(gradients, group=None):
    return any(exact.flags(loss_scaling_oracle.found_nonfinite(gradients)))


@misconception("all_reduce_found_inf", "It does what the first rank says, whatever the others have found.")
def first_rank_decides(gradients, group=None):
    return exact.flags(loss_scaling_oracle.found_nonfinite(gradients), group)[0]


@misconception(
    "all_reduce_found_inf",
    "A rank returns before the collective, by what it has found itself: the others wait for it in theirs.",
)
def tells_only_of_bad_news(gradients, group=None):
    return loss_scaling_oracle.found_nonfinite(gradients) and any(exact.flags(True, group))


@misconception(
    "all_reduce_found_inf", "A rank without gradients returns at once: the others wait for it in their collective."
)
def skips_ranks_without_gradients(gradients, group=None):
    if not any(each is not None for each in gradients):
        return False
    return any(exact.flags(loss_scaling_oracle.found_nonfinite(gradients), group))


@misconception("all_reduce_found_inf", "It sums up all numbers of all ranks: finite ones can have an infinite sum.")
def looks_at_the_sum(gradients, group=None):
    there = [each.sum() for each in gradients if each is not None]
    total = torch.stack(there).sum() if there else torch.zeros(())
    return not bool(exact.summed(total, group).isfinite())


@misconception("all_reduce_found_inf", "It finds NaN, and no infinity.")
def finds_nan_only(gradients, group=None):
    return any(exact.flags(any(bool(each.isnan().any()) for each in gradients if each is not None), group))


# --- 14.3 DistributedLossScaler ---------------------------------------------------------------------------------------

PUBLISHED = "x.x.x...xxx"  # the trace on which the rules are compared


def some_steps(rng: np.random.Generator, n: int, bad: float) -> str:
    return "".join(rng.choice(["x", "."], n, p=[bad, 1 - bad]))


def _scales(answer, case, settings: tuple, groups: tuple, *steps: str) -> None:
    _same_on_ranks(case, answer.run(scales_on_ranks, groups, settings, *steps), exact.scales(settings, groups, steps))


@check_for("DistributedLossScaler", weight=2)
def ranks_that_find_different_things(answer, case):
    """A published trace that either of two ranks finds; random ones on two, three and four, patience 1 to 3."""
    nothing = "." * len(PUBLISHED)
    for steps in ((PUBLISHED, nothing), (nothing, PUBLISHED), (PUBLISHED, PUBLISHED), ("x...x....x.", "..x.....xx.")):
        _scales(answer, case, (256.0, 2.0, 0.5, 3, 1.0, 2), TWO, *steps)
    for ranks in (2, 3, 4):
        for hysteresis in (1, 2, 3):
            for _ in range(case.count(1)):
                steps = [some_steps(case.rng, 14, 0.12) for _ in range(ranks)]
                settings = (2.0**10, 2.0, 0.5, int(case.rng.integers(1, 4)), 1.0, hysteresis)
                _scales(answer, case, settings, (tuple(range(ranks)),), *steps)


@check_for("DistributedLossScaler")
def scales_of_two_groups(answer, case):
    """Two groups of two ranks beside each other, each with a scale of its own."""
    for groups in (PAIRS, ACROSS):
        for _ in range(case.count(2)):
            _scales(
                answer, case, (2.0**8, 2.0, 0.5, 2, 1.0, 2), groups, *(some_steps(case.rng, 10, 0.2) for _ in "1234")
            )


@check_for("DistributedLossScaler")
def floors_and_factors(answer, case):
    """Down to floors of 1 and 8; growth by 1.5 and 4, backoff by a quarter."""
    for settings in ((32.0, 2.0, 0.5, 2, 1.0, 1), (32.0, 4.0, 0.25, 2, 8.0, 2), (64.0, 1.5, 0.25, 1, 1.0, 2)):
        for steps in (("xxxxxxx..", "........."), ("x.x.x.xx.", ".x.xx.x.x"), ("..x......", "......x..")):
            _scales(answer, case, settings, TWO, *steps)
    _scales(answer, case, (), TWO, "x..xx.", "..x...")


@check_for("DistributedLossScaler")
def runs_taken_up_on_other_ranks(answer, case):
    """A state that is taken up by as many ranks, by more, by less; the old run meets three more bad steps meanwhile."""
    settings = (2.0**8, 2.0, 0.5, 3, 1.0, 3)
    for before, after in (
        (("x..", "..."), ("x.....", ".x....")),
        (("..", ".."), (".x...", "x....", ".....")),
        (("..", ".."), ("......", "......")),
        (("x.", ".."), (".....", "....x", ".....")),
        (("x..", "..."), ("....", "....")),
        (("xx.", "...", "..."), ("x...xx",)),
        (("x", "x", ".", "."), ("xx...", ".....")),
        *((tuple(some_steps(case.rng, 5, 0.2) for _ in "12"), tuple(some_steps(case.rng, 6, 0.2) for _ in "123"))
          for _ in range(case.count(2))),
    ):  # fmt: skip
        want = exact.scales(settings, (tuple(range(len(after))),), after, before)
        _same_on_ranks(case, answer.run(scales_resumed_on_ranks, settings, before, after), want)


@misconception(
    "DistributedLossScaler", "Each rank decides alone: after one overflow the scales are no longer the same."
)
class DecidesAlone(exact.DistributedLossScaler):
    def agree(self, found):
        return found


@misconception("DistributedLossScaler", "A step is bad only if all ranks have found an infinity.")
class AllMustAgree(exact.DistributedLossScaler):
    def agree(self, found):
        return all(exact.flags(found, self.group))


@misconception(
    "DistributedLossScaler", "It tells the rank what it has found itself: some skip the step, and the others take it."
)
class ReturnsItsOwn(exact.DistributedLossScaler):
    def update(self, found_inf):
        super().update(found_inf)
        return found_inf


@misconception("DistributedLossScaler", "Each rank that has found one costs patience, and not each bad step.")
class CountsRanks(exact.DistributedLossScaler):
    def update(self, found_inf):
        found = sum(exact.flags(found_inf, self.group))
        self.machine.patience -= max(found - 1, 0)
        self.machine.update(found > 0)
        return found > 0


@misconception("DistributedLossScaler", "It refills the patience on every good step, as Apex's kernel does.")
class RefillsOnGoodSteps(exact.DistributedLossScaler):
    def update(self, found_inf):
        bad = super().update(found_inf)
        if not bad:
            self.machine.patience = self.settings[4]
        return bad


@misconception("DistributedLossScaler", "It refills the patience when the scale has fallen: the next bad step is free.")
class RefillsAfterFalling(exact.DistributedLossScaler):
    def update(self, found_inf):
        bad = super().update(found_inf)
        if self.machine.patience < 1:
            self.machine.patience = self.settings[4]
        return bad


@misconception("DistributedLossScaler", "It has no patience: the scale falls at each bad step.")
class HasNoPatience(exact.DistributedLossScaler):
    def update(self, found_inf):
        self.machine.patience = 1
        return super().update(found_inf)


@misconception("DistributedLossScaler", "It goes on counting good steps where it stood before a bad one.")
class KeepsTheCount(exact.DistributedLossScaler):
    def update(self, found_inf):
        good = self.machine.good
        bad = super().update(found_inf)
        if bad:
            self.machine.good = good
        return bad


@misconception("DistributedLossScaler", "It has no floor.")
class HasNoFloor(exact.DistributedLossScaler):
    def update(self, found_inf):
        before = self.machine.scale
        bad = super().update(found_inf)
        if bad and self.machine.patience < 1:
            self.machine.scale = before * self.settings[1]
        return bad


@misconception("DistributedLossScaler", "The state lacks the patience: whoever takes it up has all of it again.")
class ForgetsThePatience(exact.DistributedLossScaler):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "patience": self.settings[4]})


@misconception("DistributedLossScaler", "The state lacks the count of good steps: whoever takes it up begins at 0.")
class ForgetsTheCount(exact.DistributedLossScaler):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "good": 0})


@misconception("DistributedLossScaler", "The state has the scale alone: whoever takes it up begins both counts anew.")
class ForgetsBothCounts(exact.DistributedLossScaler):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "good": 0, "patience": self.settings[4]})


@misconception(
    "DistributedLossScaler", "Its state has more than numbers that all ranks have: its group, or which rank it is."
)
class StateOfOneRank(exact.DistributedLossScaler):
    def state_dict(self):
        return {**super().state_dict(), "rank": dist.get_rank(self.group)}

    def load_state_dict(self, state):
        super().load_state_dict({name: each for name, each in state.items() if name != "rank"})


@misconception("DistributedLossScaler", "It asks all ranks there are, and not those of its group.")
class AsksTheWorld(exact.DistributedLossScaler):
    def agree(self, found):
        return any(exact.flags(found))


@misconception(
    "DistributedLossScaler",
    "A rank tells the others or not, by what it has found itself: others wait for it for ever.",
)
class TellsOnlyOfBadNews(exact.DistributedLossScaler):
    def agree(self, found):
        return found and any(exact.flags(True, self.group))


# --- 14.4 rank_groups -------------------------------------------------------------------------------------------------


@check_for("rank_groups", weight=2)
def worlds_of_all_three(answer, case):
    """8, 16 and 24 ranks with two or more of each kind; all five kinds of groups."""
    for world, tensor, pipeline in ((8, 2, 2), (16, 2, 4), (16, 4, 2), (24, 2, 3), (24, 3, 2)):
        for kind in KINDS:
            case.same_bits(answer(world, tensor, pipeline, kind), exact.rank_groups(world, tensor, pipeline, kind))


@check_for("rank_groups")
def worlds_without_one(answer, case):
    """No tensor parallel, no pipeline, or no data parallel; one rank alone; random worlds."""
    worlds = [(8, 1, 2), (8, 4, 1), (8, 2, 4), (6, 1, 1), (1, 1, 1), (6, 6, 1), (6, 1, 6)]
    for _ in range(case.count(3)):
        tensor, data, pipeline = (int(each) for each in case.rng.integers(1, 5, 3))
        worlds.append((tensor * data * pipeline, tensor, pipeline))
    for world, tensor, pipeline in worlds:
        for kind in KINDS:
            case.same_bits(answer(world, tensor, pipeline, kind), exact.rank_groups(world, tensor, pipeline, kind))


@check_for("rank_groups")
def worlds_that_do_not_divide(answer, case):
    """8 ranks for 3 times 1, 2 times 3 and 16 times 1; numbers of 0 and below; kinds that there are not."""
    for world, tensor, pipeline in ((8, 3, 1), (8, 2, 3), (8, 16, 1), (12, 8, 1), (8, 0, 1), (8, 2, -2), (0, 1, 1)):
        said = answer.run(refusal_of, world, tensor, pipeline, "data")
        case.same_bits(said, f"ValueError that has {world}, {tensor}, {pipeline}")
    for kind in ("context", "Tensor", ""):
        case.same_bits(answer.run(refusal_of, 8, 2, 2, kind), f"ValueError that has {', '.join(KINDS)}")


@misconception(
    "rank_groups", "It numbers data shards first: neighbours are copies of each other, not parts of a layer."
)
def data_first(world, tensor, pipeline, kind):
    exact.require_grid(world, tensor, pipeline, kind)
    grid = np.arange(world).reshape(pipeline, tensor, -1).transpose(0, 2, 1)
    return exact.grid_groups(grid, exact.VARY[kind])


@misconception("rank_groups", "It numbers pipeline stages before data shards.")
def pipeline_second(world, tensor, pipeline, kind):
    exact.require_grid(world, tensor, pipeline, kind)
    grid = np.arange(world).reshape(-1, pipeline, tensor).transpose(1, 0, 2)
    return exact.grid_groups(grid, exact.VARY[kind])


def _kinds_of_its_own(world, tensor, pipeline, kind, vary):
    exact.require_grid(world, tensor, pipeline, kind)
    grid = np.arange(world).reshape(pipeline, -1, tensor)
    return exact.grid_groups(grid, {**exact.VARY, **vary}[kind])


@misconception("rank_groups", "Its group for the amax has tensor-parallel ranks alone: data shards are left out.")
def amax_of_tensor_ranks(world, tensor, pipeline, kind):
    return _kinds_of_its_own(world, tensor, pipeline, kind, {"amax": (2,)})


@misconception(
    "rank_groups", "Its group for the amax has data-parallel ranks alone: the parts of a layer are left out."
)
def amax_of_data_ranks(world, tensor, pipeline, kind):
    return _kinds_of_its_own(world, tensor, pipeline, kind, {"amax": (1,)})


@misconception("rank_groups", "Its group for the amax has all ranks: other stages have other layers.")
def amax_of_the_world(world, tensor, pipeline, kind):
    return _kinds_of_its_own(world, tensor, pipeline, kind, {"amax": (0, 1, 2)})


@misconception("rank_groups", "Its group of the model has one stage of the pipeline only.")
def model_of_one_stage(world, tensor, pipeline, kind):
    return _kinds_of_its_own(world, tensor, pipeline, kind, {"model": (2,)})


@misconception("rank_groups", "Its group of the model has the same part of each stage, and leaves out the other parts.")
def model_of_one_part(world, tensor, pipeline, kind):
    return _kinds_of_its_own(world, tensor, pipeline, kind, {"model": (0,)})


@misconception("rank_groups", "What its ValueError says lacks the three numbers, or the kinds that there are.")
def says_little(world, tensor, pipeline, kind):
    try:
        return exact.rank_groups(world, tensor, pipeline, kind)
    except ValueError:
        raise ValueError("it does not divide" if kind in KINDS else "no such kind") from None


@misconception("rank_groups", "Its groups have the ranks that are alike in what they are named after.")
def groups_what_is_alike(world, tensor, pipeline, kind):
    complement = {name: tuple(axis for axis in range(3) if axis not in axes) for name, axes in exact.VARY.items()}
    return _kinds_of_its_own(world, tensor, pipeline, kind, complement)


@misconception("rank_groups", "It returns the group of rank 0 alone.")
def first_group_only(world, tensor, pipeline, kind):
    return exact.rank_groups(world, tensor, pipeline, kind)[:1]


@misconception("rank_groups", "It takes whatever does not divide, and lets the ranks that are left over out.")
def leaves_ranks_out(world, tensor, pipeline, kind):
    if kind not in exact.VARY:
        raise ValueError("no such kind")
    data = max(world // max(tensor * pipeline, 1), 1)
    grid = np.arange(max(tensor, 1) * data * max(pipeline, 1)).reshape(max(pipeline, 1), -1, max(tensor, 1))
    return exact.grid_groups(grid, exact.VARY[kind])


# --- 14.5 all_reduce_amax ---------------------------------------------------------------------------------------------


def some_amaxes(rng: np.random.Generator) -> list[Tensor]:
    """Of a tensor, of two rows, and of a BF16 tensor; the first two have more bits than BF16."""
    sizes = [np.ldexp(rng.uniform(1, 2, shape), rng.integers(-8, 9, shape)) for shape in ((), (2, 1), ())]
    first, rows, short = (torch.from_numpy(np.asarray(each, dtype=np.float32)) for each in sizes)
    return [first, rows, short.bfloat16()]


def _amaxes(answer, case, groups: tuple, *amaxes: list[Tensor]) -> None:
    _same_on_ranks(case, answer.run(amaxes_on_ranks, groups, *amaxes), exact.largest(groups, amaxes))


@check_for("all_reduce_amax", weight=2)
def amaxes_of_ranks(answer, case):
    """Two to four ranks, three tensors each: a float32 number, two rows, and a bfloat16 number."""
    for ranks in (2, 3, 4):
        for _ in range(case.count(3)):
            _amaxes(answer, case, (tuple(range(ranks)),), *(some_amaxes(case.rng) for _ in range(ranks)))


@check_for("all_reduce_amax")
def amaxes_of_two_groups(answer, case):
    """Two groups of two ranks beside each other."""
    for groups in (PAIRS, ACROSS):
        for _ in range(case.count(2)):
            _amaxes(answer, case, groups, *(some_amaxes(case.rng) for _ in range(4)))


@check_for("all_reduce_amax")
def not_a_number(answer, case):
    """NaN or infinity on one rank, the first, the second or the last; zeros everywhere."""
    for value in (math.nan, math.inf):
        for bad in range(3):
            for place in (0, 2):
                of = [some_amaxes(case.rng) for _ in range(3)]
                of[bad][place] = torch.full_like(of[bad][place], value)
                _amaxes(answer, case, ((0, 1, 2),), *of)
    _amaxes(answer, case, TWO, [torch.zeros(2)], [torch.zeros(2)])


@check_for("all_reduce_amax")
def one_collective(answer, case):
    """How many collectives there are for one tensor, and for two to four; the kinds of what is returned."""
    for ranks in (2, 4):
        for kinds in ((0, 1, 2), (1,), (2, 0), (0, 0, 1, 2)):
            of = []
            for _ in range(ranks):
                three = some_amaxes(case.rng)
                of.append([three[kind] for kind in kinds])
            names = ("float32 ()", "float32 (2, 1)", "bfloat16 ()")
            told = f"{', '.join(names[kind] for kind in kinds)}; 1 collectives"
            _same_on_ranks(case, answer.run(amax_facts, (tuple(range(ranks)),), *of), (told,) * ranks)


def _pooled(amaxes, group, pool, *, clean=True, over_world=False) -> list[Tensor]:
    row = torch.cat([each.reshape(-1).float() for each in amaxes])
    row = exact.together(amaxes) if clean else row
    return exact.apart(pool(torch.stack(exact.everybodys(row, None if over_world else group))), amaxes)


@misconception("all_reduce_amax", "It takes the largest of all ranks there are, and not of the group.")
def over_all_ranks(amaxes, group=None):
    return _pooled(amaxes, group, lambda rows: rows.amax(0), over_world=True)


@misconception("all_reduce_amax", "It adds the amaxes of the ranks up.")
def adds_amaxes(amaxes, group=None):
    return _pooled(amaxes, group, lambda rows: rows.sum(0))


@misconception("all_reduce_amax", "It takes the mean of the ranks: the largest numbers of some saturate.")
def mean_of_amaxes(amaxes, group=None):
    return _pooled(amaxes, group, lambda rows: rows.mean(0))


@misconception("all_reduce_amax", "It takes the smallest.")
def smallest_of_amaxes(amaxes, group=None):
    return _pooled(amaxes, group, lambda rows: rows.amin(0))


@misconception("all_reduce_amax", "Each rank keeps its own.")
def keeps_its_own_amax(amaxes, group=None):
    return _pooled(amaxes, group, lambda rows: rows[dist.get_rank(group)])


@misconception("all_reduce_amax", "It makes one number of all tensors: the largest amax is used for each of them.")
def one_for_all(amaxes, group=None):
    return _pooled(amaxes, group, lambda rows: rows.amax().expand(rows.shape[1]))


@misconception("all_reduce_amax", "It does a collective for each tensor: a hundred layers wait a hundred times.")
def one_for_each(amaxes, group=None):
    return [exact.all_reduce_amax([each], group)[0] for each in amaxes]


@misconception("all_reduce_amax", "It trusts the MAX with NaN: some ranks lose it on the way.")
def trusts_max(amaxes, group=None):
    row = torch.cat([each.reshape(-1).float() for each in amaxes])
    dist.all_reduce(row, op=dist.ReduceOp.MAX, group=group)
    return exact.apart(row, amaxes)


@misconception("all_reduce_amax", "It makes 0 of NaN: the others never hear of the overflow.")
def nan_is_zero(amaxes, group=None):
    def largest(rows):
        return torch.where(rows != rows, torch.zeros(()), rows).amax(0)

    return _pooled(amaxes, group, largest, clean=False)


@misconception(
    "all_reduce_amax", "It makes the largest finite number of infinity, as nan_to_num does unless it is told otherwise."
)
def infinity_is_finite(amaxes, group=None):
    def largest(rows):
        rows = torch.where(rows != rows, torch.inf, rows.clamp(max=torch.finfo(torch.float32).max))
        return rows.amax(0)

    return _pooled(amaxes, group, largest, clean=False)


@misconception("all_reduce_amax", "It sends BF16: float32 amaxes are rounded on the way, and some downwards.")
def sends_bfloat16(amaxes, group=None):
    return exact.all_reduce_amax([each.bfloat16().to(each.dtype) for each in amaxes], group)


@misconception("all_reduce_amax", "It returns everything in float32.")
def all_in_float32(amaxes, group=None):
    return [each.float() for each in exact.all_reduce_amax(amaxes, group)]


# --- 14.6 clip_distributed --------------------------------------------------------------------------------------------


def whole_gradients(rng: np.random.Generator, sharded: list[bool], ranks: int, size: float = 1.0) -> list[list[Tensor]]:
    """For each rank gradients of whole numbers times `size`, whose squares have an exact sum."""
    shapes = [(3,), (2, 2), (1,)][: len(sharded)]

    def one(shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy((rng.integers(-60, 61, shape) * size).astype(np.float32))

    same = [one(shape) for shape in shapes]
    return [[one(s) if part else same[i] for i, (s, part) in enumerate(zip(shapes, sharded, strict=True))]
            for _ in range(ranks)]  # fmt: skip


def _clipped(answer, case, groups: tuple, sharded: list[bool], max_norm: float, *gradients: list[Tensor]) -> None:
    want = exact.clipped(groups, sharded, max_norm, gradients)
    _same_on_ranks(case, answer.run(clipped_on_ranks, groups, sharded, max_norm, *gradients), want)


@check_for("clip_distributed", weight=2)
def parts_and_copies(answer, case):
    """Two and four ranks; gradients in parts, gradients that all have, and both; norms above max_norm."""
    for groups in (TWO, FOUR):
        for sharded in ([True, True, True], [True, False, True], [False, True, False], [False, False, False]):
            for _ in range(case.count(1)):
                _clipped(answer, case, groups, sharded, 1.0, *whole_gradients(case.rng, sharded, _ranks(groups)))


@check_for("clip_distributed")
def small_norms(answer, case):
    """Norms below max_norm, and a little above it: only the latter are clipped."""
    for max_norm in (1000.0, 500.0, 100.0, 50.0):
        for sharded in ([True, False, True], [True, True, False]):
            _clipped(answer, case, TWO, sharded, max_norm, *whole_gradients(case.rng, sharded, 2))


@check_for("clip_distributed")
def norms_of_groups(answer, case):
    """Two groups of two ranks beside each other."""
    for groups in (PAIRS, ACROSS):
        for _ in range(case.count(2)):
            of = whole_gradients(case.rng, [True, False, True], 4)
            _clipped(answer, case, groups, [True, False, True], 2.0, *of)


@check_for("clip_distributed")
def extreme_gradients(answer, case):
    """1e30, whose square float32 does not have, and 1e-30; infinity and NaN on one rank; zeros."""
    sharded = [True, False, True]
    for size in (2.0**100, 2.0**-100):
        for _ in range(case.count(2)):
            _clipped(answer, case, TWO, sharded, 1.0, *whole_gradients(case.rng, sharded, 2, size))
    for value in _BAD:
        for bad in (0, 1):
            of = whole_gradients(case.rng, sharded, 2)
            of[bad][0][1] = value
            _clipped(answer, case, TWO, sharded, 1.0, *of)
    _clipped(answer, case, TWO, sharded, 1.0, *([torch.zeros(3), torch.zeros(2, 2), torch.zeros(1)] for _ in "12"))


def _total(gradients, sharded, group) -> float:
    """The sum of all squares, as it should be."""
    own = torch.tensor(exact.squares_of(gradients), dtype=torch.float64)
    everywhere = torch.stack(exact.everybodys(own, group)).sum(0)
    return float(torch.where(torch.tensor(sharded), everywhere, own).sum())


def _clip(gradients, max_norm: float, squares: float) -> float:
    norm = math.sqrt(squares) if squares == squares else squares
    exact.apply(gradients, float(exact.factor_for(norm, max_norm)))
    return norm


@misconception("clip_distributed", "Each rank takes the norm of what it has: parts of one gradient shrink differently.")
def own_norm(gradients, sharded, max_norm, group=None):
    return _clip(gradients, max_norm, sum(exact.squares_of(gradients)))


@misconception("clip_distributed", "Gradients that all ranks have count once for each of them.")
def counts_copies(gradients, sharded, max_norm, group=None):
    return _clip(gradients, max_norm, _total(gradients, [True] * len(sharded), group))


@misconception("clip_distributed", "Gradients that all ranks have do not count at all.")
def leaves_copies_out(gradients, sharded, max_norm, group=None):
    return _clip(
        gradients, max_norm,
        _total([each if part else each * 0 for each, part in zip(gradients, sharded, strict=True)], sharded, group),
    )  # fmt: skip


@misconception("clip_distributed", "It adds up the norms of the ranks, and not their squares.")
def adds_norms(gradients, sharded, max_norm, group=None):
    pairs = list(zip(exact.squares_of(gradients), sharded, strict=True))
    parts = torch.tensor([sum(square for square, part in pairs if part)], dtype=torch.float64).sqrt()
    norm = float(torch.cat(exact.everybodys(parts, group)).sum())
    return _clip(gradients, max_norm, norm * norm + sum(square for square, part in pairs if not part))


@misconception("clip_distributed", "It takes the norm over all ranks there are, and not over the group.")
def norm_of_the_world(gradients, sharded, max_norm, group=None):
    return _clip(gradients, max_norm, _total(gradients, sharded, None))


@misconception("clip_distributed", "It scales every gradient to max_norm: small ones become large.")
def makes_small_ones_large(gradients, sharded, max_norm, group=None):
    squares = _total(gradients, sharded, group)
    norm = math.sqrt(squares) if squares == squares else squares
    if math.isfinite(norm):
        exact.apply(gradients, max_norm / (norm + 1e-6))
    return norm


@misconception("clip_distributed", "It returns the norm, and clips nothing.")
def never_clips(gradients, sharded, max_norm, group=None):
    return _clip(gradients, math.inf, _total(gradients, sharded, group))


@misconception("clip_distributed", "It returns the norm that is left after clipping.")
def norm_after_clipping(gradients, sharded, max_norm, group=None):
    _clip(gradients, max_norm, _total(gradients, sharded, group))
    squares = _total(gradients, sharded, group)
    return math.sqrt(squares) if squares == squares else squares


@misconception("clip_distributed", "It squares in float32: what is above 1.8e19 makes the norm infinite.")
def squares_in_float32(gradients, sharded, max_norm, group=None):
    own = torch.stack([each.square().sum() for each in gradients])
    everywhere = torch.stack(exact.everybodys(own, group)).double().sum(0)
    return _clip(gradients, max_norm, float(torch.where(torch.tensor(sharded), everywhere, own.double()).sum()))


@misconception("clip_distributed", "It clips where the norm is not finite, too: finite gradients become 0 or NaN.")
def clips_by_infinity(gradients, sharded, max_norm, group=None):
    squares = _total(gradients, sharded, group)
    norm = math.sqrt(squares) if squares == squares else squares
    exact.apply(gradients, max_norm / (norm + 1e-6) if not norm + 1e-6 <= max_norm else 1.0)
    return norm


@misconception("clip_distributed", "It returns the norm as a tensor, where a float is asked for.")
def norm_as_a_tensor(gradients, sharded, max_norm, group=None):
    return torch.tensor(exact.clip_distributed(gradients, sharded, max_norm, group))


@misconception("clip_distributed", "It divides the sum of squares by the number of ranks, as one does with gradients.")
def mean_of_squares(gradients, sharded, max_norm, group=None):
    own = torch.tensor(exact.squares_of(gradients), dtype=torch.float64)
    mean = torch.stack(exact.everybodys(own, group)).mean(0)
    return _clip(gradients, max_norm, float(mean.sum()))


# --- 14.7 float8_all_gather -------------------------------------------------------------------------------------------


def some_weight(rng: np.random.Generator, rows: int, columns: int, dtype=torch.float32) -> Tensor:
    """Rows of different sizes, so that each shard has another amax."""
    sizes = np.ldexp(1.0, rng.integers(-4, 5, (rows, 1)))
    return torch.from_numpy((rng.normal(0, 1, (rows, columns)) * sizes).astype(np.float32)).to(dtype)


def _gathered(answer, case, ranks: int, weight: Tensor, fmt=E4M3) -> None:
    _same_on_ranks(case, answer.run(gathered_on_ranks, ranks, weight, fmt), exact.whole(ranks, weight, fmt))


@check_for("float8_all_gather", weight=2)
def rows_that_divide(answer, case):
    """Weights whose rows two, three and four ranks divide evenly, in E4M3 and E5M2; float32 and bfloat16."""
    for ranks, rows in ((2, 4), (3, 6), (4, 8), (4, 4)):
        for fmt, dtype in ((E4M3, torch.float32), (E5M2, torch.float32), (E4M3, torch.bfloat16)):
            for _ in range(case.count(1)):
                _gathered(answer, case, ranks, some_weight(case.rng, rows, 3, dtype), fmt)


@check_for("float8_all_gather")
def rows_that_do_not(answer, case):
    """5 rows on two ranks, 5 on four (the last has none), 7 on three, 1 on two."""
    for ranks, rows in ((2, 5), (4, 5), (3, 7), (2, 1), (4, 9)):
        for _ in range(case.count(1)):
            _gathered(answer, case, ranks, some_weight(case.rng, rows, 4))


@check_for("float8_all_gather")
def bytes_that_are_sent(answer, case):
    """What each rank sends, as a share of the bytes of FP32; and what kind of thing it has in the end."""
    for ranks, rows, columns, dtype in (
        (2, 32, 64, torch.float32), (4, 64, 16, torch.float32), (2, 64, 32, torch.bfloat16), (3, 48, 48, torch.float32)
    ):  # fmt: skip
        weight = some_weight(case.rng, rows, columns, dtype)
        _same_on_ranks(case, answer.run(gathered_facts, ranks, weight, E4M3), exact.whole_facts(ranks, weight, E4M3))


def _of_codes(codes: Tensor, scale: Tensor, shard: Tensor, fmt) -> Quantized:
    return Quantized(codes, scale, fmt, "tensor", shard.dtype)


@misconception(
    "float8_all_gather", "Each rank uses the scale of its own rows: codes of the others mean something else."
)
def own_scale(shard, rows, fmt=E4M3, group=None):
    exact.amax_over(shard, group)
    scale = quantizer_oracle.scale_for(quantizer_oracle.absmax(shard), fmt)
    return _of_codes(exact.gather_rows(exact.with_scale(shard, scale, fmt), rows, group), scale, shard, fmt)


@misconception("float8_all_gather", "All use the scale of the first rank's rows: larger numbers of others saturate.")
def scale_of_the_first(shard, rows, fmt=E4M3, group=None):
    amax = exact.everybodys(quantizer_oracle.absmax(shard).reshape(1), group)[0].reshape(())
    scale = quantizer_oracle.scale_for(amax, fmt)
    return _of_codes(exact.gather_rows(exact.with_scale(shard, scale, fmt), rows, group), scale, shard, fmt)


@misconception("float8_all_gather", "It uses the mean of the ranks' amaxes: larger numbers saturate.")
def scale_of_the_mean(shard, rows, fmt=E4M3, group=None):
    own = quantizer_oracle.absmax(shard).reshape(1)
    scale = quantizer_oracle.scale_for(torch.stack(exact.everybodys(own, group)).float().mean(), fmt)
    return _of_codes(exact.gather_rows(exact.with_scale(shard, scale, fmt), rows, group), scale, shard, fmt)


@misconception("float8_all_gather", "It gathers the shards as they are, and quantizes the weight: no byte is saved.")
def gathers_in_high_precision(shard, rows, fmt=E4M3, group=None):
    weight = exact.gather_rows(shard, rows, group)
    return quantizer_oracle.quantize(weight, fmt)


@misconception("float8_all_gather", "It gathers codes in int32: each takes four bytes on the wire.")
def gathers_int32(shard, rows, fmt=E4M3, group=None):
    scale = quantizer_oracle.scale_for(exact.amax_over(shard, group), fmt)
    codes = exact.gather_rows(exact.with_scale(shard, scale, fmt).int(), rows, group)
    return _of_codes(codes.to(torch.uint8), scale, shard, fmt)


@misconception("float8_all_gather", "It gathers BF16, and quantizes that: twice the bytes, and rounded twice.")
def gathers_bfloat16(shard, rows, fmt=E4M3, group=None):
    weight = exact.gather_rows(shard.bfloat16(), rows, group).to(shard.dtype)
    return quantizer_oracle.quantize(weight, fmt)


@misconception("float8_all_gather", "It always makes E4M3, whatever the format.")
def always_e4m3(shard, rows, fmt=E4M3, group=None):
    return exact.float8_all_gather(shard, rows, E4M3, group)


@misconception("float8_all_gather", "It returns the inverse of the scale, which servers use.")
def inverse_scale(shard, rows, fmt=E4M3, group=None):
    q = exact.float8_all_gather(shard, rows, fmt, group)
    return _of_codes(q.codes, 1 / q.scale, shard, fmt)


@misconception("float8_all_gather", "It brings as many rows as a rank has: those with fewer bring another number.")
def does_not_fill_up(shard, rows, fmt=E4M3, group=None):
    scale = quantizer_oracle.scale_for(exact.amax_over(shard, group), fmt)
    return _of_codes(torch.cat(exact.everybodys(exact.with_scale(shard, scale, fmt), group)), scale, shard, fmt)


@misconception("float8_all_gather", "It takes the first rows of what was gathered from the last rank to the first.")
def backwards(shard, rows, fmt=E4M3, group=None):
    scale = quantizer_oracle.scale_for(exact.amax_over(shard, group), fmt)
    size = math.ceil(rows / dist.get_world_size(group))
    codes = exact.with_scale(shard, scale, fmt)
    filled = torch.cat([codes, codes.new_zeros(size - len(codes), codes.shape[1])])
    return _of_codes(torch.cat(exact.everybodys(filled, group)[::-1])[:rows], scale, shard, fmt)


@misconception("float8_all_gather", "It fills short shards up in front: their rows slip down.")
def fills_in_front(shard, rows, fmt=E4M3, group=None):
    scale = quantizer_oracle.scale_for(exact.amax_over(shard, group), fmt)
    size = math.ceil(rows / dist.get_world_size(group))
    codes = exact.with_scale(shard, scale, fmt)
    filled = torch.cat([codes.new_zeros(size - len(codes), codes.shape[1]), codes])
    return _of_codes(torch.cat(exact.everybodys(filled, group))[:rows], scale, shard, fmt)


# --- 14.8 and 14.9: layers that are divided ---------------------------------------------------------------------------


def some_layer(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight, gradient of the output) of whole numbers, none of them 0, whose sums are exact.

    One element of each makes its scale a power of two. It lies in a random place, so most parts of a tensor have
    another amax than the whole has.
    """

    def matrix(rows: int, columns: int, most: int, top: float) -> Tensor:
        made = (rng.integers(1, most + 1, (rows, columns)) * rng.choice([-1, 1], (rows, columns))).astype(np.float32)
        made[rng.integers(rows), rng.integers(columns)] = top * rng.choice([-1, 1])
        return torch.from_numpy(made)

    return matrix(m, k, 30, exact.TOP), matrix(n, k, 30, exact.TOP), matrix(m, n, 30, exact.BACK_TOP)


def _columns(answer, case, groups: tuple, m: int, k: int, n: int) -> None:
    x, weight, gradient = some_layer(case.rng, m, k, n)
    want = exact.columns(groups, x, weight, gradient)
    _same_on_ranks(case, answer.run(column_parallel_on_ranks, groups, x, weight, gradient), want)


def _rows(answer, case, groups: tuple, m: int, k: int, n: int) -> None:
    x, weight, gradient = some_layer(case.rng, m, k, n)
    want = exact.rows(groups, x, weight, gradient)
    _same_on_ranks(case, answer.run(row_parallel_on_ranks, groups, x, weight, gradient), want)


@check_for("column_parallel_float8", weight=2)
def columns_of_a_layer(answer, case):
    """Whole numbers, so that every sum is exact; two and four ranks, forward and backward, as in one process."""
    for groups, n in ((TWO, 4), (FOUR, 4), (FOUR, 8)):
        for _ in range(case.count(2)):
            _columns(answer, case, groups, 3, 5, n)


@check_for("column_parallel_float8")
def columns_of_two_layers(answer, case):
    """Two groups of two ranks beside each other, each with a layer of its own."""
    for groups in (PAIRS, ACROSS):
        for _ in range(case.count(2)):
            _columns(answer, case, groups, 2, 4, 4)


@check_for("column_parallel_float8")
def columns_of_one_row(answer, case):
    """One row of x, one output for each rank, one input."""
    for groups, m, k, n in ((TWO, 1, 4, 2), (FOUR, 2, 3, 4), (TWO, 4, 1, 2)):
        for _ in range(case.count(2)):
            _columns(answer, case, groups, m, k, n)


@check_for("row_parallel_float8", weight=2)
def rows_of_a_layer(answer, case):
    """Whole numbers, so that every sum is exact; two and four ranks, forward and backward, as in one process."""
    for groups, k in ((TWO, 4), (FOUR, 4), (FOUR, 8)):
        for _ in range(case.count(2)):
            _rows(answer, case, groups, 3, k, 5)


@check_for("row_parallel_float8")
def rows_of_two_layers(answer, case):
    """Two groups of two ranks beside each other, each with a layer of its own."""
    for groups in (PAIRS, ACROSS):
        for _ in range(case.count(2)):
            _rows(answer, case, groups, 2, 4, 4)


@check_for("row_parallel_float8")
def rows_of_one_column(answer, case):
    """One row of x, one input for each rank, one output."""
    for groups, m, k, n in ((TWO, 1, 4, 2), (FOUR, 2, 4, 3), (TWO, 4, 2, 1)):
        for _ in range(case.count(2)):
            _rows(answer, case, groups, m, k, n)


@misconception(
    "column_parallel_float8",
    "It quantizes its part of weight and gradient as if they were whole (`quantize`): each rank has scales of its own.",
)
def column_own_scales(x, weight, group=None):
    return exact.Parallel((), exact.COLUMN[1], group)(x, weight)


@misconception("column_parallel_float8", "Each rank scales its part of the weight by its own amax.")
def column_own_weight_scale(x, weight, group=None):
    return exact.Parallel(("gradient",), ("grad_x",), group)(x, weight)


@misconception("column_parallel_float8", "Each rank scales the gradient that arrives by its own amax.")
def column_own_gradient_scale(x, weight, group=None):
    return exact.Parallel(("weight",), ("grad_x",), group)(x, weight)


@misconception("column_parallel_float8", "The gradient of x has this rank's outputs only: nothing is summed.")
def column_own_gradient_of_x(x, weight, group=None):
    return exact.Parallel(exact.COLUMN[0], (), group)(x, weight)


@misconception("column_parallel_float8", "The gradient of x is the mean over ranks, and not the sum.")
def column_mean_gradient_of_x(x, weight, group=None):
    return exact.Averages(*exact.COLUMN, group)(x, weight)


@misconception("column_parallel_float8", "It sums the outputs of the ranks, which are different columns.")
def column_sums_outputs(x, weight, group=None):
    return exact.Parallel(exact.COLUMN[0], ("output", "grad_x"), group)(x, weight)


@misconception("column_parallel_float8", "It sums the gradients of the weight, too: each rank has other rows.")
def column_sums_gradients_of_weight(x, weight, group=None):
    return exact.Parallel(exact.COLUMN[0], ("grad_x", "grad_weight"), group)(x, weight)


@misconception("column_parallel_float8", "The gradient that arrives is cast to E4M3, and not to E5M2.")
def column_gradient_in_e4m3(x, weight, group=None):
    return exact.GradientInE4M3(*exact.COLUMN, group)(x, weight)


@misconception("column_parallel_float8", "The gradient that arrives is not cast at all.")
def column_gradient_as_it_is(x, weight, group=None):
    return exact.GradientAsItIs(*exact.COLUMN, group)(x, weight)


@misconception("column_parallel_float8", "It talks to all ranks there are, and not to the group.")
def column_over_the_world(x, weight, group=None):
    return exact.Parallel(*exact.COLUMN, None)(x, weight)


@misconception(
    "row_parallel_float8",
    "It quantizes x and weight as if they were whole (`quantize`): each rank has scales of its own.",
)
def row_own_scales(x, weight, group=None):
    return exact.Parallel((), exact.ROW[1], group)(x, weight)


@misconception("row_parallel_float8", "Each rank scales its columns of x by their own amax.")
def row_own_scale_of_x(x, weight, group=None):
    return exact.Parallel(("weight",), exact.ROW[1], group)(x, weight)


@misconception("row_parallel_float8", "Each rank scales its part of the weight by its own amax.")
def row_own_scale_of_weight(x, weight, group=None):
    return exact.Parallel(("x",), exact.ROW[1], group)(x, weight)


@misconception("row_parallel_float8", "The output has this rank's inputs only: nothing is summed.")
def row_own_output(x, weight, group=None):
    return exact.Parallel(exact.ROW[0], (), group)(x, weight)


@misconception("row_parallel_float8", "The output is the mean over ranks, and not the sum.")
def row_mean_output(x, weight, group=None):
    return exact.Averages(*exact.ROW, group)(x, weight)


@misconception("row_parallel_float8", "It sums the gradients of x over ranks, which have different columns of it.")
def row_sums_gradients_of_x(x, weight, group=None):
    return exact.Parallel(exact.ROW[0], ("output", "grad_x"), group)(x, weight)


@misconception(
    "row_parallel_float8",
    "It sums the gradient that arrives over ranks, as autograd of a sum would: it is there already.",
)
def row_sums_the_gradient(x, weight, group=None):
    return exact.SumsTheGradient(*exact.ROW, group)(x, weight)


@misconception("row_parallel_float8", "The gradient that arrives is cast to E4M3, and not to E5M2.")
def row_gradient_in_e4m3(x, weight, group=None):
    return exact.GradientInE4M3(*exact.ROW, group)(x, weight)


@misconception("row_parallel_float8", "The weight is not cast at all.")
def row_weight_as_it_is(x, weight, group=None):
    return exact.WeightAsItIs(*exact.ROW, group)(x, weight)


@misconception("row_parallel_float8", "It talks to all ranks there are, and not to the group.")
def row_over_the_world(x, weight, group=None):
    return exact.Parallel(*exact.ROW, None)(x, weight)


# --- the page's questions ---------------------------------------------------------------------------------------------

question_for(
    "14.A",
    True,
    "True: good steps add to the other counter alone. Nothing but growth, after 1000 of them, refills the patience.",
    "Which lines set _hysteresis_tracker?",
    {False: "That is what the docstring says. Which line would have to fill the patience again at a good step?"},
)
question_for(
    "14.B",
    2.0,
    "2.0: without `op`, all_reduce sums. Step and update only ask whether it is above 0, so a sum does what MAX does.",
    "Which operation has all_reduce where none is given?",
    {1.0: "That would be MAX. Is there an `op` in the call?"},
)
question_for(
    "14.C",
    8,
    "8: doubled as long as 64 / factor is above factor. So it is near the root of 64: divided by 8 before the sum, and "
    "by 8 after it. The sum does not overflow, and what is summed does not become too small.",
    "pre_factor begins at 1 and is doubled while ... Do it by hand.",
    {64: "That is all of it. What is left for after the sum?", 16: "At 8, is 64 / 8 above 8?"},
)
question_for(
    "14.D",
    4,
    "4: one model is tensor x pipeline ranks, 2 x 2. The other data shard has the same gradients, after the mean.",
    "Which kind of group is one copy of the model? How many ranks has it?",
    {8: "Those are two copies of the model.", 2: "Those are the parts of one stage."},
)
