"""The exact oracle for many ranks: what all of them have in the end, worked out in one place, in numpy.

What a check expects is computed from the inputs of all ranks at once, without any collective. The functions that stand
in for exercises gather what the others have, and decide alone; the known misconceptions are made of them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_lab.formats import E4M3, E5M2
from lowprec_lab.graders import float8_linear_oracle, loss_scaling_oracle, oracle, quantizer_oracle
from lowprec_lab.quantizer import Quantized


def everybodys(x: Tensor, group: object = None) -> list[Tensor]:
    """The tensor x of every rank of the group."""
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return pieces


def flags(found: bool, group: object = None) -> list[bool]:
    """What every rank of the group has found."""
    return [bool(each) for each in everybodys(torch.tensor([found]).to(torch.uint8), group)]


# --- 14.1 -------------------------------------------------------------------------------------------------------------


def main_grads(groups: tuple, inputs: Tensor) -> tuple[Tensor, ...]:
    """What every rank has in the end, for `main_grads_on_ranks`, where all sums and quotients are exact."""
    x = inputs.double().numpy()
    found = {}
    for ranks in groups:
        mean = x[list(ranks)].mean(axis=1).mean(axis=0)
        found.update(dict.fromkeys(ranks, torch.from_numpy(mean.astype(np.float32))))
    return tuple(found[rank] for rank in sorted(found))


def own_main_grads(model, batches, parts: int) -> list[Tensor]:
    """This rank's sum over its micro-batches, in float32; each loss is divided by `parts`."""
    parameters = list(model.parameters())
    totals = [np.zeros(tuple(each.shape), dtype=np.float32) for each in parameters]
    for x, y in batches:
        found = torch.autograd.grad(model(x, y)[1] / parts, parameters)
        totals = [total + each.float().numpy() for total, each in zip(totals, found, strict=True)]
    return [torch.from_numpy(each) for each in totals]


def accumulate_main_grads(model, batches, group=None) -> list[Tensor]:
    totals = own_main_grads(model, batches, len(batches))
    return [summed(each / dist.get_world_size(group), group) for each in totals]


def summed(x: Tensor, group: object = None) -> Tensor:
    """The sum over the group, in x itself."""
    dist.all_reduce(x, group=group)
    return x


# --- 14.2 and 14.3 ----------------------------------------------------------------------------------------------------


def found(groups: tuple, gradients: tuple) -> tuple[bool, ...]:
    """For each rank whether anything of its group is not finite."""
    own = [loss_scaling_oracle.found_nonfinite(each) for each in gradients]
    of = {rank: any(own[other] for other in ranks) for ranks in groups for rank in ranks}
    return tuple(of[rank] for rank in sorted(of))


def all_reduce_found_inf(gradients, group=None) -> bool:
    return any(flags(loss_scaling_oracle.found_nonfinite(gradients), group))


def scales(settings: tuple, groups: tuple, steps: tuple[str, ...], before: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The text of each rank that `scales_on_ranks` is to give; after the steps `before`, of a run of other ranks."""
    told = {}
    for ranks in groups:
        machine = loss_scaling_oracle.HysteresisLossScaler(*settings)
        for step in zip(*before, strict=True):
            machine.update("x" in step)
        line = [f"{machine.scale:g}"]
        for step in zip(*(steps[rank] for rank in ranks), strict=True):
            machine.update("x" in step)
            line.append(f"{machine.scale:g}" + (" skip" if "x" in step else ""))
        told.update(dict.fromkeys(ranks, ", ".join(line)))
    return tuple(told[rank] for rank in sorted(told))


class DistributedLossScaler:
    """The machine of one rank's rule, told what any of them has found."""

    def __init__(
        self, init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0,
        hysteresis=2, group=None,
    ):  # fmt: skip
        self.settings = (growth_factor, backoff_factor, growth_interval, min_scale, hysteresis)
        self.group = group
        self.machine = loss_scaling_oracle.HysteresisLossScaler(init_scale, *self.settings)

    @property
    def scale(self):
        return self.machine.scale

    def agree(self, found):
        return any(flags(found, self.group))

    def update(self, found_inf):
        bad = self.agree(found_inf)
        self.machine.update(bad)
        return bad

    def state_dict(self):
        return self.machine.state_dict()

    def load_state_dict(self, state):
        self.machine.load_state_dict(state)


# --- 14.4 -------------------------------------------------------------------------------------------------------------

# In which of a rank's coordinates (pipeline, data, tensor) the ranks of a group differ.
VARY = {"tensor": (2,), "data": (1,), "pipeline": (0,), "model": (0, 2), "amax": (1, 2)}


def grid_groups(grid: np.ndarray, vary: tuple[int, ...]) -> list[list[int]]:
    """The ranks that differ only in these axes of a grid."""
    kept = [axis for axis in range(3) if axis not in vary]
    rows = np.transpose(grid, (*kept, *vary)).reshape(-1, math.prod(grid.shape[axis] for axis in vary))
    return sorted(sorted(int(rank) for rank in row) for row in rows)


def require_grid(world: int, tensor: int, pipeline: int, kind: str) -> None:
    if min(world, tensor, pipeline) < 1 or world % (tensor * pipeline):
        raise ValueError(f"{tensor} x {pipeline} ranks do not divide a world of {world}")
    if kind not in VARY:
        raise ValueError(f"no kind {kind!r}; there are {', '.join(VARY)}")


def rank_groups(world, tensor, pipeline, kind) -> list[list[int]]:
    require_grid(world, tensor, pipeline, kind)
    return grid_groups(np.arange(world).reshape(pipeline, -1, tensor), VARY[kind])


# --- 14.5 -------------------------------------------------------------------------------------------------------------


def largest(groups: tuple, amaxes: tuple) -> tuple[Tensor, ...]:
    """The numbers that `amaxes_on_ranks` is to give."""
    rows = np.stack([np.concatenate([each.double().numpy().reshape(-1) for each in mine]) for mine in amaxes])
    rows = np.where(np.isnan(rows), np.inf, rows)
    of = {rank: rows[list(ranks)].max(axis=0) for ranks in groups for rank in ranks}
    return tuple(torch.from_numpy(of[rank].astype(np.float32)) for rank in sorted(of))


def together(amaxes) -> Tensor:
    """All numbers in one row, float32; NaN is infinity."""
    row = torch.cat([each.reshape(-1).float() for each in amaxes])
    return torch.where(row != row, torch.inf, row)


def apart(row: Tensor, amaxes) -> list[Tensor]:
    """A row as tensors of the shapes and dtypes of these."""
    found, at = [], 0
    for each in amaxes:
        found.append(row[at : at + each.numel()].reshape(each.shape).to(each.dtype))
        at += each.numel()
    return found


def all_reduce_amax(amaxes, group=None) -> list[Tensor]:
    return apart(torch.stack(everybodys(together(amaxes), group)).amax(0), amaxes)


# --- 14.6 -------------------------------------------------------------------------------------------------------------


def clipped(groups: tuple, sharded: list[bool], max_norm: float, gradients: tuple) -> tuple[Tensor, ...]:
    """The row of each rank that `clipped_on_ranks` is to give, where the sum of squares is exact."""
    rows = {}
    for ranks in groups:
        squares = 0.0
        for which, part in enumerate(sharded):
            counted = ranks if part else ranks[:1]
            with np.errstate(all="ignore"):
                squares += sum(float(np.square(gradients[r][which].double().numpy()).sum()) for r in counted)
        norm = math.sqrt(squares) if squares == squares else squares
        factor = factor_for(norm, max_norm)
        for rank in ranks:
            held = [each.numpy() * factor for each in gradients[rank]]
            rows[rank] = torch.tensor([*(float(v) for each in held for v in each.reshape(-1)), norm])
    return tuple(rows[rank] for rank in sorted(rows))


def factor_for(norm: float, max_norm: float) -> np.float32:
    return np.float32(min(1.0, max_norm / (norm + 1e-6))) if math.isfinite(norm) else np.float32(1)


def squares_of(gradients) -> list[float]:
    """The sum of squares of each gradient, float64."""
    return [float(each.double().pow(2).sum()) for each in gradients]


def apply(gradients, factor: float) -> None:
    for each in gradients:
        each.copy_(each * torch.tensor(factor, dtype=torch.float32))


def clip_distributed(gradients, sharded, max_norm, group=None) -> float:
    own = torch.tensor(squares_of(gradients), dtype=torch.float64)
    everywhere = torch.stack(everybodys(own, group))
    total = torch.where(torch.tensor(sharded), everywhere.sum(0), own).sum()
    norm = float(total.sqrt())
    apply(gradients, float(factor_for(norm, max_norm)))
    return norm


# --- 14.7 -------------------------------------------------------------------------------------------------------------


def whole(ranks: int, weight: Tensor, fmt) -> tuple[Tensor, ...]:
    """The rows that `gathered_on_ranks` is to give."""
    q = quantizer_oracle.quantize(weight, fmt)
    return (torch.cat([q.codes.flatten().float(), q.scale.flatten()]),) * ranks


def whole_facts(ranks: int, weight: Tensor, fmt) -> tuple[str, ...]:
    name = str(weight.dtype).removeprefix("torch.")
    return (
        f"codes uint8 {tuple(weight.shape)}, scale float32 (), {fmt.name}, tensor, back to {name}; "
        "at most 0.27 of the bytes of FP32",
    ) * ranks


def amax_over(x: Tensor, group: object = None) -> Tensor:
    """The largest magnitude in the tensors x of all ranks, in x's dtype."""
    own = quantizer_oracle.absmax(x).reshape(1)
    return torch.stack(everybodys(own, group)).max()


def with_scale(x: Tensor, scale: Tensor, fmt) -> Tensor:
    """The codes of x under a scale."""
    return quantizer_oracle.codes_of(quantizer_oracle.scaled(x, scale, "tensor"), fmt)


def gather_rows(mine: Tensor, rows: int, group: object = None) -> Tensor:
    """All rows of a matrix of which each rank has some, cut as FSDP cuts it."""
    size = math.ceil(rows / dist.get_world_size(group))
    filled = torch.cat([mine, mine.new_zeros(size - len(mine), mine.shape[1])])
    return torch.cat(everybodys(filled, group))[:rows]


def float8_all_gather(shard, rows, fmt=E4M3, group=None) -> Quantized:
    scale = quantizer_oracle.scale_for(amax_over(shard, group), fmt)
    codes = gather_rows(with_scale(shard, scale, fmt), rows, group)
    return Quantized(codes, scale, fmt, "tensor", shard.dtype)


# --- 14.8 and 14.9 ----------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output, gradient of x, gradient of weight) of the whole layer in one process."""
    recipe = float8_linear_oracle.RECIPES["tensorwise"]
    output = float8_linear_oracle.float8_linear_forward(x, weight, recipe)
    return output, *float8_linear_oracle.float8_linear_backward(gradient, x, weight, recipe)


def columns(groups: tuple, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """The rows that `column_parallel_on_ranks` is to give, where all sums are exact."""
    return _in_pieces(groups, x, weight, gradient, lambda out, gx, gw, n: (out.chunk(n, 1), [gx] * n, gw.chunk(n)))


def rows(groups: tuple, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """The rows that `row_parallel_on_ranks` is to give, where all sums are exact."""
    return _in_pieces(groups, x, weight, gradient, lambda out, gx, gw, n: ([out] * n, gx.chunk(n, 1), gw.chunk(n, 1)))


def _in_pieces(groups: tuple, x: Tensor, weight: Tensor, gradient: Tensor, cut) -> tuple[Tensor, ...]:
    found = {}
    for which, ranks in enumerate(groups):
        parts = linear(x, weight * 2.0**which, gradient)
        for rank, each in zip(ranks, zip(*cut(*parts, len(ranks)), strict=True), strict=True):
            found[rank] = torch.cat([piece.flatten().float() for piece in each])
    return tuple(found[rank] for rank in sorted(found))


def seen(x: Tensor, fmt, everywhere: bool, group: object) -> np.ndarray:
    """What 8 bits leave of x, as float64; with the amax of the whole group, or its own."""
    amax = amax_over(x.detach(), group) if everywhere else quantizer_oracle.absmax(x.detach())
    scale = quantizer_oracle.scale_for(amax, fmt)
    codes = with_scale(x.detach(), scale, fmt)
    return float8_linear_oracle.values(Quantized(codes, scale, fmt, "tensor", torch.float32))


class Parallel:
    """A layer that is divided among ranks. shared: which of "x", "weight", "gradient" have their amax over the group.

    sums: which of "output", "grad_x", "grad_weight" are summed over it.
    """

    back = E5M2

    def __init__(self, shared: tuple[str, ...], sums: tuple[str, ...], group: object) -> None:
        self.shared, self.sums, self.group = shared, sums, group

    def seen(self, name: str, x: Tensor, fmt) -> np.ndarray:
        return seen(x, fmt, name in self.shared, self.group)

    def whole(self, name: str, x: Tensor) -> Tensor:
        return summed(x, self.group) if name in self.sums else x

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return _Both.apply(x, weight, self)


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        product = layer.seen("x", x, E4M3) @ layer.seen("weight", weight, E4M3).T
        return layer.whole("output", float8_linear_oracle.rounded(product, x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        arrived = layer.seen("gradient", gradient, layer.back)
        grad_x = float8_linear_oracle.rounded(arrived @ layer.seen("weight", weight, E4M3), x.dtype)
        grad_weight = float8_linear_oracle.rounded(arrived.T @ layer.seen("x", x, E4M3), x.dtype)
        return layer.whole("grad_x", grad_x), layer.whole("grad_weight", grad_weight), None


class GradientInE4M3(Parallel):
    """The gradient that arrives is cast to E4M3."""

    back = E4M3


class GradientAsItIs(Parallel):
    """The gradient that arrives is not cast."""

    def seen(self, name, x, fmt):
        return x.detach().double().numpy() if name == "gradient" else super().seen(name, x, fmt)


class Averages(Parallel):
    """What is to be summed over the group is averaged."""

    def whole(self, name, x):
        return super().whole(name, x) / (dist.get_world_size(self.group) if name in self.sums else 1)


class WeightAsItIs(Parallel):
    """The weight is not cast."""

    def seen(self, name, x, fmt):
        return x.detach().double().numpy() if name == "weight" else super().seen(name, x, fmt)


class SumsTheGradient(Parallel):
    """The gradient that arrives is summed over the group first."""

    def seen(self, name, x, fmt):
        if name == "gradient":
            x = summed(x.detach().clone(), self.group)
        return super().seen(name, x, fmt)


COLUMN = (("weight", "gradient"), ("grad_x",))
ROW = (("x", "weight"), ("output",))


def column_parallel_float8(x, weight, group=None) -> Tensor:
    return Parallel(*COLUMN, group)(x, weight)


def row_parallel_float8(x, weight, group=None) -> Tensor:
    return Parallel(*ROW, group)(x, weight)


# The largest magnitudes that make a scale a power of two, so that no product is rounded.
TOP, BACK_TOP = oracle.max_finite(E4M3), oracle.max_finite(E5M2) / 2**10
