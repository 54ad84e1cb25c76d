"""Chapter 14: many ranks: what each of them may decide alone, and what all must agree on.

A **rank** is one process of a run, and a **group** some of them. `group` is always one of torch.distributed's, or None
for all ranks; every rank of a group calls the same functions in the same order. Ranks work on one *data* shard each, on
one part of each weight (*tensor* parallel), and on some of the layers (*pipeline* parallel).

References: Shoeybi et al., Megatron-LM, arXiv:1909.08053 (column- and row-parallel layers); Narayanan et al.,
arXiv:2104.04473 (the grid of ranks); Rajbhandari et al., ZeRO, arXiv:1910.02054; NVIDIA/Megatron-LM, megatron/core/:
parallel_state.py, optimizer/{grad_scaler,optimizer,clip_grads}.py, distributed/param_and_grad_buffer.py (the rules of
this chapter's exercises); torch/distributed/fsdp in PyTorch (shards by rows); Micikevicius et al., FP8 Formats for Deep
Learning, arXiv:2209.05433.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lowprec_lab.blanks import blank, current
from lowprec_lab.float8_linear import transpose  # noqa: F401 (for answers)
from lowprec_lab.formats import E4M3, Format
from lowprec_lab.loss_scaling import found_nonfinite, unscale_
from lowprec_lab.quantizer import Quantized
from lowprec_lab.rank_threads import bytes_sent, collectives, group_of, on_ranks

KINDS = ("tensor", "data", "pipeline", "model", "amax")


# --- the exercises ----------------------------------------------------------------------------------------------------


@blank(exercise="14.1", points=3, minutes=35)
def accumulate_main_grads(model: nn.Module, batches: list[tuple[Tensor, Tensor]], group: object = None) -> list[Tensor]:
    """The gradient of one step, in float32: the mean over all micro-batches of all ranks of the group.

    model: `model(x, y)` returns `(logits, loss)`, loss 0-d float32; all of its parameters (float32, bfloat16 or
    float16) get a gradient, and have none before. batches: this rank's micro-batches (x, y), as many on every rank.
    Returns: a float32 tensor for each parameter, in the order of model.parameters(); the same on every rank.

    Each loss is divided by len(batches) before its backward. Its gradients are added to the float32 ones and taken off
    the parameters (`grad` is None), so that no two are added up in the parameter's dtype. After the last micro-batch,
    and not before, what has come together is multiplied by 1 / ranks and summed over the group by all-reduce, in
    float32: each number goes over the wire once.
    """


@blank(exercise="14.2", points=2, minutes=15)
def all_reduce_found_inf(gradients: list[Tensor | None], group: object = None) -> bool:
    """Whether any gradient of any rank of the group has an infinity or a NaN: the same bool on all of them.

    gradients: this rank's, as `found_nonfinite` takes them; each rank may have others, or none at all.
    One collective, in which every rank of the group takes part whatever it has found.
    """


@blank(exercise="14.3", points=3, minutes=35)
class DistributedLossScaler:
    """Megatron-LM's rule of the loss scale (that of `HysteresisLossScaler`) on many ranks that stay together.

    A step is bad if *any* rank of the group found an infinity in it; how many did does not matter. After a bad step the
    count of good ones is 0 again and the patience one less; if it is 0 or below, the scale is multiplied by
    backoff_factor, and is at least min_scale. After a good one: one more; at growth_interval of them the count is 0
    again, the scale is multiplied by growth_factor, and the patience is `hysteresis` again.
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        min_scale: float = 1.0,
        hysteresis: int = 2,
        group: object = None,
    ) -> None:
        """Sets `scale`, a float, to init_scale. Nothing goes over the wire."""

    def update(self, found_inf: bool) -> bool:
        """Say what this rank has found; one collective. Afterwards `scale` is that of the next step.

        Returns: whether the step was bad, for all ranks alike: then none of them takes it.
        """

    def state_dict(self) -> dict:
        """All that later steps depend on, beside the settings: numbers by name, which later steps do not change."""

    def load_state_dict(self, state: dict) -> None:
        """Go on from a `state_dict()` of any rank; the settings are the constructor's. Nothing goes over the wire."""


@blank(exercise="14.4", points=3, minutes=30)
def rank_groups(world: int, tensor: int, pipeline: int, kind: str) -> list[list[int]]:
    """All groups of one kind, in a world of `world` ranks.

    tensor: how many ranks share each layer. pipeline: how many stages the layers are cut into. The rest is data:
    data = world / (tensor * pipeline). Rank t + tensor * (d + data * p) has part t of the layers of stage p, and data
    shard d. A group has all ranks that are alike in the rest:
        "tensor"    the same d and p        "data"      the same t and p        "pipeline"  the same t and d
        "model"     the same d              "amax"      the same p
    Returns: a list for each group, of ranks in rising order; groups in the order of their first ranks.
    ValueError where tensor * pipeline does not divide world (all three numbers are in its text), or a number is below
    1; and for another kind, with the kinds there are in its text.
    """


@blank(exercise="14.5", points=2, minutes=20)
def all_reduce_amax(amaxes: list[Tensor], group: object = None) -> list[Tensor]:
    """The largest magnitudes of tensors of which each rank has a part, or a version of its own.

    amaxes: this rank's, tensors of any shapes, float32, bfloat16 or float16, not below 0; of the same shapes and dtypes
    on every rank. Returns: new tensors of these shapes and dtypes: the largest of the group, element by element. Where
    any rank has NaN, infinity: whether a MAX over NaN gives NaN depends on who computes it.
    All of them go in one collective.
    """


@blank(exercise="14.6", points=3, minutes=35)
def clip_distributed(gradients: list[Tensor], sharded: list[bool], max_norm: float, group: object = None) -> float:
    """Clip the gradients of a model that is spread over a group, in place, by the norm of all of it; the norm.

    gradients: this rank's, float32. sharded[i]: whether gradients[i] is this rank's part of one (each rank has another
    part); else all ranks have the same gradient, and it counts once. The lists are as long on every rank.
    Returns: the square root of the sum of all squares before clipping, a float, worked out in float64 (float32 has no
    square of 1e30); the same on every rank.
    Each gradient is multiplied by one float32 number, max_norm / (norm + 1e-6) worked out in float64 and rounded, where
    that is below 1. Where the norm is not finite nothing is changed.
    """


@blank(exercise="14.7", points=4, minutes=40)
def float8_all_gather(shard: Tensor, rows: int, fmt: Format = E4M3, group: object = None) -> Quantized:
    """A weight of which each rank has some rows, whole and in 8 bits, on every rank.

    shard: this rank's rows, (r, K), float32, bfloat16 or float16, finite. Rows are cut as FSDP cuts them: each rank has
    ceil(rows / ranks), in the order of ranks, until there are no more; so the last ones may have fewer, or none (0, K).
    Returns: exactly `quantize(weight, fmt)` of the whole weight, (rows, K).
    On the wire go codes, one byte for each number, and amaxes; the shard itself never does. Codes of all ranks are
    gathered at once, so all bring as many: short shards are filled up with zeros.
    """


@blank(exercise="14.8", points=4, minutes=45)
def column_parallel_float8(x: Tensor, weight: Tensor, group: object = None) -> Tensor:
    """A linear layer whose outputs are divided among the ranks, in 8 bits, forward and backward ("tensorwise").

    x: (M, K), the same on every rank. weight: (N / ranks, K), the rows of this rank. Both float32, bfloat16 or float16.
    Returns: x's dtype, (M, N / ranks): this rank's columns of the output of `Float8Linear` with the whole weight.
    Backward: x gets the gradient that it has there, the same on every rank; weight gets its rows' part.
    Scales are those of whole tensors: the amax of weight, and of the gradient that arrives, are taken over the group.
    """


@blank(exercise="14.9", points=4, minutes=40)
def row_parallel_float8(x: Tensor, weight: Tensor, group: object = None) -> Tensor:
    """A linear layer whose inputs are divided among the ranks, in 8 bits, forward and backward ("tensorwise").

    x: (M, K / ranks), this rank's columns of the input. weight: (N, K / ranks), the same columns of the weight. Both
    float32, bfloat16 or float16. Returns: x's dtype, (M, N): the output of `Float8Linear` with the whole input and
    weight, the same on every rank: their products are rounded to x's dtype, and then summed over the group.
    Backward: the gradient that arrives is the same on every rank, and x and weight get their columns' parts.
    Scales are those of whole tensors: the amax of x and of weight are taken over the group.
    """


# --- given: one scale for a tensor that is spread over a group --------------------------------------------------------


def quantize_part(x: Tensor, fmt: Format, group: object = None) -> Quantized:
    """`quantize(x, fmt)`, with the scale of a whole tensor of which each rank of the group has a part: x is this one's.

    One collective, by `all_reduce_amax`. It runs on the answers in use, as everything here does, and does not say so.
    """
    (amax,) = _in_use("all_reduce_amax")([_in_use("absmax")(x)], group)
    scale = _in_use("scale_for")(amax, fmt)
    codes = _in_use("encode")(x.detach().float() * scale, fmt, overflow="saturate").to(torch.uint8)
    return Quantized(codes, scale, fmt, "tensor", x.dtype)


def _in_use(name: str) -> Callable:
    return current(name, say=False)


# --- scenarios: what a check drives an answer with, on ranks that are threads of one process --------------------------
# groups: a partition of all ranks, such as ((0, 1), (2, 3)). Each rank calls the answer with its own group.


def _my_group(groups: Sequence[Sequence[int]]) -> object:
    mine = [group_of(ranks) for ranks in groups if dist.get_rank() in ranks]
    return mine[0]


def main_grads_on_ranks(function: Callable, groups: tuple, dtype: torch.dtype, inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradient that each rank has in the end, float32, in one row of n numbers.

    inputs: float32, (ranks, micro-batches, n): the gradient of each micro-batch's loss, before the loss is divided and
    the parameters' dtype rounds it.
    """
    return tuple(each[0] for each in _main_grads(function, groups, dtype, inputs))


def main_grads_facts(function: Callable, groups: tuple, dtype: torch.dtype, inputs: Tensor) -> tuple[str, ...]:
    """For each rank, in words: how many bytes of each number it sends in all, and what is left on the parameters."""
    return tuple(each[1] for each in _main_grads(function, groups, dtype, inputs))


def _main_grads(function: Callable, groups: tuple, dtype: torch.dtype, inputs: Tensor) -> list[tuple[Tensor, str]]:
    def rank(mine: Tensor) -> tuple[Tensor, str]:
        model, group = _GradientIs(mine.shape[1], dtype), _my_group(groups)
        found = function(model, [(each, each) for each in mine], group)
        left = sum(each.grad is not None for each in model.parameters())
        size = dist.get_world_size(group)
        each_once = 2 * (size - 1) / size * mine.shape[1]  # bytes, if each number is one byte and goes in a ring
        facts = f"{bytes_sent() / each_once:.3g} bytes for each number, {left} gradients left"
        return torch.cat([each.flatten() for each in found]), facts

    return on_ranks(rank, [(each,) for each in inputs])


class _GradientIs(nn.Module):
    """A loss whose gradient is x: the sum of weights times x. Its n weights, all 1, are two parameters."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(2, dtype=dtype))
        self.other = nn.Parameter(torch.ones(n - 2, 1, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        products = torch.cat([self.one.float(), self.other.float().flatten()]) * x
        return products, products.sum()


def found_on_ranks(function: Callable, groups: tuple, *gradients: list[Tensor | None]) -> tuple[bool, ...]:
    """What `function(gradients of the rank, its group)` returns on each rank."""
    return tuple(on_ranks(lambda mine: function(list(mine), _my_group(groups)), [(each,) for each in gradients]))


def scales_on_ranks(scaler: Callable, groups: tuple, settings: tuple, *steps: str) -> tuple[str, ...]:
    """For each rank the scale before the first step and after each, as text; "skip" behind one that it is to skip.

    steps: for each rank what it finds itself, "x" for an infinity and "." for none. settings: of the constructor.
    """

    def rank(mine: str) -> str:
        return _scales_told(scaler(*settings, group=_my_group(groups)), mine)

    return tuple(on_ranks(rank, [(each,) for each in steps]))


def scales_resumed_on_ranks(
    scaler: Callable, settings: tuple, before: tuple[str, ...], after: tuple[str, ...]
) -> tuple[str, ...]:
    """As `scales_on_ranks`, for the steps `after` of a run that goes on where another stood after `before`.

    The state goes to a file and back, from the last rank of the first run to all of the second, which may have more or
    less of them. In between the first run lives on, and meets three bad steps.
    ValueError where a state has something else than numbers, or not the same ones on ranks that have found the same.
    """

    def first(mine: str) -> str:
        made = scaler(*settings)
        for step in mine:
            made.update(step == "x")
        state = made.state_dict()
        for _ in range(3):
            made.update(True)
        other = next((name for name, each in state.items() if not isinstance(each, int | float | list)), None)
        if other is not None:
            raise ValueError(f"state_dict() has {other!r}: {state[other]!r}, which is no number")
        return json.dumps(state)

    def second(mine: str) -> str:
        made = scaler(*settings)
        made.load_state_dict(json.loads(state))
        return _scales_told(made, mine)

    state, *others = on_ranks(first, [(each,) for each in before])[::-1]
    if len(set(before)) == 1 and any(each != state for each in others):
        raise ValueError(f"state_dict() gives {state} on one rank, and {others[-1]} on another")
    return tuple(on_ranks(second, [(each,) for each in after]))


def _scales_told(scaler: object, steps: str) -> str:
    told = [f"{scaler.scale:g}"]
    for step in steps:
        bad = scaler.update(step == "x")
        told.append(f"{scaler.scale:g}{' skip' if bad else ''}")
    return ", ".join(told)


def refusal_of(function: Callable, world: int, tensor: int, pipeline: int, kind: str) -> str:
    """What the ValueError of `rank_groups` has of what it should say, in words: the three numbers, or all kinds."""
    try:
        function(world, tensor, pipeline, kind)
    except ValueError as error:
        wanted = [str(each) for each in (world, tensor, pipeline)] if kind in KINDS else list(KINDS)
        said = re.findall(r"-?\d+|[a-z]+", str(error))
        return f"ValueError that has {', '.join(each for each in wanted if each in said) or 'none of them'}"
    return "no error"


def amaxes_on_ranks(function: Callable, groups: tuple, *amaxes: list[Tensor]) -> tuple[Tensor, ...]:
    """The numbers that `function` returns on each rank, in one row each, float32."""

    def rank(mine: list[Tensor]) -> Tensor:
        return torch.cat([each.flatten().float() for each in function(list(mine), _my_group(groups))])

    return tuple(on_ranks(rank, [(each,) for each in amaxes]))


def amax_facts(function: Callable, groups: tuple, *amaxes: list[Tensor]) -> tuple[str, ...]:
    """For each rank, in words: what kind of tensors are returned, and how many collectives there were."""

    def rank(mine: list[Tensor]) -> str:
        found = function(list(mine), _my_group(groups))
        kinds = ", ".join(f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in found)
        return f"{kinds}; {collectives()} collectives"

    return tuple(on_ranks(rank, [(each,) for each in amaxes]))


def clipped_on_ranks(
    function: Callable, groups: tuple, sharded: list[bool], max_norm: float, *gradients: list[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of each rank after `function` clipped them, in one row, and behind them the norm that it returned.

    float32: the last bits of a norm are its own.
    """

    def rank(mine: list[Tensor]) -> Tensor:
        held = [each.clone() for each in mine]
        norm = function(held, list(sharded), max_norm, _my_group(groups))
        if not isinstance(norm, float):
            raise TypeError(f"the norm is a float of Python, and not of type {type(norm).__name__}")
        return torch.cat([*(each.flatten() for each in held), torch.tensor([norm])])

    return tuple(on_ranks(rank, [(each,) for each in gradients]))


def shards_of(weight: Tensor, ranks: int) -> list[Tensor]:
    """The rows of each rank, cut as FSDP cuts them."""
    size = -(-weight.shape[0] // ranks)
    return [weight[rank * size : (rank + 1) * size] for rank in range(ranks)]


def gathered_on_ranks(function: Callable, ranks: int, weight: Tensor, fmt: Format) -> tuple[Tensor, ...]:
    """What each rank has of a weight that was cut into shards for this many: all codes in one row, and the scale.

    float32. A row of NaN where the codes are not as many as the weight has numbers.
    """

    def rank(shard: Tensor) -> Tensor:
        made = function(shard, len(weight), fmt)
        if made.codes.numel() != weight.numel():
            return torch.full((weight.numel() + 1,), torch.nan)
        return torch.cat([made.codes.flatten().float(), made.scale.flatten()])

    return tuple(on_ranks(rank, _alone(shards_of(weight, ranks))))


def gathered_facts(function: Callable, ranks: int, weight: Tensor, fmt: Format) -> tuple[str, ...]:
    """For each rank, in words: what it has, and how many of the bytes it sends that FP32 would take."""
    full = (ranks - 1) * -(-weight.shape[0] // ranks) * weight.shape[1] * 4

    def rank(shard: Tensor) -> str:
        q = function(shard, len(weight), fmt)
        share = bytes_sent() / full
        much = "at most 0.27" if share <= 0.27 else f"{share:.2g}"
        names = [str(each).removeprefix("torch.") for each in (q.codes.dtype, q.scale.dtype, q.dtype)]
        return (
            f"codes {names[0]} {tuple(q.codes.shape)}, scale {names[1]} {tuple(q.scale.shape)}, {q.fmt.name}, "
            f"{q.granularity}, back to {names[2]}; {much} of the bytes of FP32"
        )

    return tuple(on_ranks(rank, _alone(shards_of(weight, ranks))))


def _alone(each: Sequence) -> list[tuple]:
    return [(one,) for one in each]


def column_parallel_on_ranks(
    function: Callable, groups: tuple, x: Tensor, weight: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """(output, gradient of x, gradient of its part of the weight) of rank 0, then of rank 1, ..., each flat, float32.

    The whole weight (N, K) and the gradient of the whole output (M, N) are cut here, among the ranks of each group. The
    second group has twice the weight of the first one, and so on.
    """

    def pieces(size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [(x, w, g) for w, g in zip(weight.chunk(size), gradient.chunk(size, 1), strict=True)]

    return _forward_and_backward(function, groups, pieces)


def row_parallel_on_ranks(
    function: Callable, groups: tuple, x: Tensor, weight: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """(output, gradient of its part of x, of its part of the weight) of rank 0, then of rank 1, ..., flat, float32.

    The whole input (M, K) and weight (N, K) are cut here, among the ranks of each group, as for `column_parallel...`.
    """

    def pieces(size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [(a, w, gradient) for a, w in zip(x.chunk(size, 1), weight.chunk(size, 1), strict=True)]

    return _forward_and_backward(function, groups, pieces)


def _forward_and_backward(function: Callable, groups: tuple, pieces: Callable) -> tuple[Tensor, ...]:
    def rank(x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        output = function(x, weight, _my_group(groups))
        found = torch.autograd.grad(output, (x, weight), gradient.to(output.dtype), allow_unused=True)
        there = [torch.full_like(of, torch.nan) if g is None else g for g, of in zip(found, (x, weight), strict=True)]
        return torch.cat([each.detach().flatten().float() for each in (output, *there)])

    given = {}
    for which, ranks in enumerate(groups):
        for each, (x, weight, gradient) in zip(ranks, pieces(len(ranks)), strict=True):
            given[each] = x, weight * 2.0**which, gradient
    return tuple(on_ranks(rank, [given[each] for each in sorted(given)]))


# --- given: what the page runs in real processes, by ranks.launch -----------------------------------------------------


def meet() -> dict:
    """Every rank says who it is, and all learn the sum of their numbers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {ranks}, process {os.getpid()}, by {dist.get_backend()}")
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return {"rank": rank, "sum of all ranks": float(total)}


def fail_on(rank: int) -> None:
    """One rank has an error; the others wait for it."""
    if dist.get_rank() == rank:
        raise RuntimeError("step 7: a batch of 0 tokens")
    print("waiting for the others")
    dist.barrier()


class _ToAll(torch.autograd.Function):
    """What all ranks have goes into layers that are divided: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class _FromAll(torch.autograd.Function):
    """The sum of what the ranks have; each of them gets all of its gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Divided(nn.Module):
    """Two linear layers with a GELU between them, and what is before and behind it, on all ranks.

    The hidden layer is divided among the ranks: `up` by rows, `down` by columns. The norm and the bias of the output
    are the same on every rank, as long as their gradients are.
    """

    def __init__(self, width: int, hidden: int, seed: int) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        up = torch.randn(hidden, width, generator=generator) / width**0.5
        down = torch.randn(width, hidden, generator=generator) / hidden**0.5
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(up.chunk(ranks)[rank].clone())
        self.down = nn.Parameter(down.chunk(ranks, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(_ToAll.apply(self.norm(x)), self.up))
        return _FromAll.apply(F.linear(hidden, self.down)) + self.bias

    def common(self) -> Tensor:
        """The parameters that all ranks have, in one row."""
        return torch.cat([self.norm.weight, self.norm.bias, self.bias]).detach()


def train_divided(steps: int, bad_step: int, bad_rank: int, together: bool) -> dict:
    """Train a divided network. At one step a gradient of one rank's own part is infinite.

    together: every rank's DistributedLossScaler asks all others, as it should; else it asks a group of itself alone.
    Returns lists with a number for each step: "loss"; "scale" (of this rank); "skipped" (by this rank); "apart" (the
    largest distance of two ranks in a parameter that all have).
    """
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]  # all ranks make all groups
    group = None if together else alone[dist.get_rank()]
    scaler = DistributedLossScaler(2.0**12, growth_interval=40, hysteresis=1, group=group)
    model = Divided(16, 32, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(16, 16, generator=generator)
    told: dict[str, list] = {"loss": [], "scale": [], "skipped": [], "apart": []}
    for step in range(steps):
        x = torch.randn(64, 16, generator=generator)
        loss = F.mse_loss(model(x), torch.tanh(x @ target))
        optimizer.zero_grad()
        (loss * scaler.scale).backward()
        if (step, dist.get_rank()) == (bad_step, bad_rank):
            model.up.grad[0, 0] = torch.inf
        gradients = [each.grad for each in model.parameters()]
        unscale_(gradients, scaler.scale)
        told["scale"].append(scaler.scale)
        skipped = scaler.update(found_nonfinite(gradients))
        if not skipped:
            optimizer.step()
        told["loss"].append(float(loss.detach()))
        told["skipped"].append(skipped)
        told["apart"].append(_apart(model.common()))
    return told


def train_both_ways(steps: int, bad_step: int, bad_rank: int) -> dict:
    """`train_divided` with ranks that decide alone, and together."""
    return {
        "alone": train_divided(steps, bad_step, bad_rank, False),
        "together": train_divided(steps, bad_step, bad_rank, True),
    }


def _apart(x: Tensor) -> float:
    most, least = x.clone(), x.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float((most - least).max())


def gather_in(rows: int, columns: int) -> dict:
    """The bytes that this process sends to gather a weight in FP32, in BF16, and in codes by `float8_all_gather`.

    Counted by the kernel in gloo's TCP connections; empty where it does not tell (elsewhere than on Linux).
    """
    from lowprec_lab.ranks import wire_bytes

    ranks = dist.get_world_size()
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    shard = shards_of(weight, ranks)[dist.get_rank()].contiguous()

    def gather(dtype: torch.dtype) -> None:
        mine = shard.to(dtype)
        dist.all_gather([torch.empty_like(mine) for _ in range(ranks)], mine)

    ways = {
        "FP32": lambda: gather(torch.float32),
        "BF16": lambda: gather(torch.bfloat16),
        "FP8": lambda: float8_all_gather(shard, rows),
    }
    dist.barrier()
    sent = {}
    for name, way in ways.items():
        before = wire_bytes()
        if before is None:
            return {}
        way()
        dist.barrier()  # what was written has gone over the wire when all have it
        sent[name] = wire_bytes() - before
    return sent


# --- given: what the page does in one process -------------------------------------------------------------------------


class LossInFloat32(nn.Module):
    """A language model in 16 bits, with the loss of its logits in float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model.to(dtype)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(x, y)[0].float()
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def scales_by_kind(world: int, tensor: int, pipeline: int, kind: str, x: Tensor, weight: Tensor) -> tuple[list, list]:
    """(the scale of its activation, of its part of the weight) on each rank of a world, with amaxes over one kind of
    group; by `rank_groups` and `quantize_part`.

    x: (data * M, K), a batch for each data shard; weight: (pipeline, N, K), a layer for each stage, divided by rows.
    """
    groups = rank_groups(world, tensor, pipeline, kind)
    data = world // (tensor * pipeline)

    def rank(mine: int) -> tuple[float, float]:
        t, d, p = mine % tensor, mine // tensor % data, mine // (tensor * data)
        group = _my_group(groups)
        seen = quantize_part(x.chunk(data)[d], E4M3, group)
        return float(seen.scale), float(quantize_part(weight[p].chunk(tensor)[t], E4M3, group).scale)

    found = on_ranks(rank, _alone(range(world)))
    return [each[0] for each in found], [each[1] for each in found]
