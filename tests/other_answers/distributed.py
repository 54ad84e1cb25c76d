"""Other right answers to the exercises of chapter 14."""

import math

import numpy as np
import torch
import torch.distributed as dist

from lowprec_lab.bench.other_answers import other
from lowprec_lab.distributed import (
    all_reduce_amax,
    all_reduce_found_inf,
    float8_all_gather,
    quantize_part,
)
from lowprec_lab.float8_linear import float8_matmul, transpose
from lowprec_lab.formats import E4M3, E5M2
from lowprec_lab.loss_scaling import HysteresisLossScaler, found_nonfinite
from lowprec_lab.quantizer import Quantized, absmax, dequantize, quantize, scale_for
from lowprec_lab.rounding import encode

# --- 14.1 accumulate_main_grads ---


@other("accumulate_main_grads")
def one_parameter_after_the_other(model, batches, group=None):
    mains = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in model.parameters()}
    for x, y in batches:
        _, loss = model(x, y)
        loss.div(len(batches)).backward()
        for parameter, main in mains.items():
            main += parameter.grad.float()
        model.zero_grad(set_to_none=True)
    for main in mains.values():
        main /= dist.get_world_size(group)
        dist.all_reduce(main, op=dist.ReduceOp.SUM, group=group)
    return [main.detach() for main in mains.values()]


@other("accumulate_main_grads")
def with_hooks_as_megatron(model, batches, group=None):
    mains, hooks = {}, []
    for parameter in model.parameters():
        mains[parameter] = torch.zeros(parameter.shape)

        def add(parameter):
            mains[parameter].add_(parameter.grad)
            parameter.grad = None

        hooks.append(parameter.register_post_accumulate_grad_hook(add))
    for x, y in batches:
        (model(x, y)[1] * (1 / len(batches))).backward()
    for hook in hooks:
        hook.remove()
    works = []
    for main in mains.values():
        main.mul_(1 / dist.get_world_size(group))
        works.append(dist.all_reduce(main, group=group, async_op=True))
    for work in works:
        work.wait()
    return list(mains.values())


@other("accumulate_main_grads")
def without_any_grad_attribute(model, batches, group=None):
    parameters = list(model.parameters())
    total = 0
    for x, y in batches:
        found = torch.autograd.grad(model(x, y)[1] / len(batches), parameters)
        total = total + torch.cat([each.float().reshape(-1) for each in found])
    total = total / dist.get_world_size(group)
    dist.all_reduce(total, group=group)
    rows = torch.split(total, [each.numel() for each in parameters])
    return [row.reshape(each.shape) for row, each in zip(rows, parameters, strict=True)]


# --- 14.2 all_reduce_found_inf ---


@other("all_reduce_found_inf")
def by_gathering(gradients, group=None):
    mine = torch.tensor([int(found_nonfinite(gradients))])
    said = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(said, mine, group=group)
    return any(bool(each) for each in said)


@other("all_reduce_found_inf")
def by_counting(gradients, group=None):
    count = torch.zeros(1)
    for gradient in gradients:
        if gradient is not None and not gradient.isfinite().all():
            count += 1
    dist.all_reduce(count, group=group)
    return count.item() > 0


@other("all_reduce_found_inf")
def all_are_finite(gradients, group=None):
    fine = torch.tensor(0 if found_nonfinite(gradients) else 1, dtype=torch.int32)
    dist.all_reduce(fine, op=dist.ReduceOp.MIN, group=group)
    return not fine


# --- 14.3 DistributedLossScaler ---


@other("DistributedLossScaler")
class WithTheOtherInside:
    def __init__(
        self,
        init_scale=2.0**32,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=1000,
        min_scale=1.0,
        hysteresis=2,
        group=None,
    ):
        self._inner = HysteresisLossScaler(
            init_scale, growth_factor, backoff_factor, growth_interval, min_scale, hysteresis
        )
        self._group = group

    @property
    def scale(self):
        return self._inner.scale

    def update(self, found_inf):
        bad = all_reduce_found_inf([torch.tensor([math.inf if found_inf else 0.0])], self._group)
        self._inner.update(bad)
        return bad

    def state_dict(self):
        return dict(vars(self._inner))

    def load_state_dict(self, state):
        vars(self._inner).update(state)


@other("DistributedLossScaler")
class CountsDown:
    def __init__(
        self,
        init_scale=2.0**32,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=1000,
        min_scale=1.0,
        hysteresis=2,
        group=None,
    ):
        self.scale = init_scale
        self.rule = growth_factor, backoff_factor, growth_interval, min_scale, hysteresis
        self.left, self.strikes, self.group = growth_interval, 0, group

    def update(self, found_inf):
        grow, shrink, interval, floor, allowed = self.rule
        vote = torch.tensor([0 if found_inf else 1], dtype=torch.uint8)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self.group)
        if vote.item() == 0:
            self.left, self.strikes = interval, self.strikes + 1
            if self.strikes >= allowed:
                self.scale = max(floor, self.scale * shrink)
            return True
        self.left -= 1
        if self.left == 0:
            self.scale, self.left, self.strikes = self.scale * grow, interval, 0
        return False

    def state_dict(self):
        return {"numbers": [self.scale, self.left, self.strikes]}

    def load_state_dict(self, state):
        self.scale, self.left, self.strikes = state["numbers"]


# --- 14.4 rank_groups ---


@other("rank_groups")
def with_a_grid(world, tensor, pipeline, kind):
    if tensor < 1 or pipeline < 1 or world < 1 or world % (tensor * pipeline) != 0:
        raise ValueError(f"world {world}, tensor {tensor}, pipeline {pipeline}: these numbers do not go together")
    grid = torch.arange(world).view(pipeline, world // tensor // pipeline, tensor)
    if kind == "tensor":
        rows = grid.flatten(0, 1)
    elif kind == "data":
        rows = grid.transpose(1, 2).flatten(0, 1)
    elif kind == "pipeline":
        rows = grid.permute(1, 2, 0).flatten(0, 1)
    elif kind == "model":
        rows = grid.transpose(0, 1).flatten(1)
    elif kind == "amax":
        rows = grid.flatten(1)
    else:
        raise ValueError(f"{kind!r} is none of tensor, data, pipeline, model, amax")
    return sorted(rows.tolist())


@other("rank_groups")
def with_ranges(world, tensor, pipeline, kind):
    if kind not in ("tensor", "data", "pipeline", "model", "amax"):
        raise ValueError("kinds: tensor, data, pipeline, model, amax")
    data, rest = divmod(world, tensor * pipeline) if tensor > 0 < pipeline else (0, 1)
    if rest or data < 1:
        raise ValueError(f"{world} ranks, {tensor} tensor, {pipeline} pipeline")
    stage = tensor * data
    if kind == "tensor":
        return [list(range(first, first + tensor)) for first in range(0, world, tensor)]
    if kind == "amax":
        return [list(range(first, first + stage)) for first in range(0, world, stage)]
    if kind == "pipeline":
        return [list(range(first, world, stage)) for first in range(stage)]
    if kind == "data":
        return [list(range(p + t, p + stage, tensor)) for p in range(0, world, stage) for t in range(tensor)]
    return [[p + first + t for p in range(0, world, stage) for t in range(tensor)] for first in range(0, stage, tensor)]


# --- 14.5 all_reduce_amax ---


@other("all_reduce_amax")
def gathers_and_looks(amaxes, group=None):
    row = torch.cat([each.reshape(-1).to(torch.float64) for each in amaxes])
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    best = torch.stack(rows).nan_to_num(nan=math.inf, posinf=math.inf).amax(dim=0)
    result, start = [], 0
    for each in amaxes:
        result.append(best[start : start + each.numel()].reshape(each.shape).to(each.dtype))
        start += each.numel()
    return result


@other("all_reduce_amax")
def by_their_bits(amaxes, group=None):
    # Not below 0, so the bits are in the order of the numbers, and NaN is above infinity.
    bits = torch.cat([each.float().flatten() for each in amaxes]).view(torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    row = bits.clamp(max=0x7F800000).view(torch.float32)
    pieces = iter(row.split([each.numel() for each in amaxes]))
    return [next(pieces).reshape(each.shape).to(each.dtype) for each in amaxes]


# --- 14.6 clip_distributed ---


@other("clip_distributed")
def copies_count_on_the_first_rank(gradients, sharded, max_norm, group=None):
    first = dist.get_rank(group) == 0
    counted = [g.double().norm() for g, part in zip(gradients, sharded, strict=True) if part or first]
    total = torch.stack(counted).square().sum() if counted else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(total, group=group)
    norm = math.sqrt(total.item()) if not total.isnan() else math.nan
    if norm < math.inf:
        torch._foreach_mul_(gradients, min(1.0, max_norm / (norm + 1e-6)))
    return norm


@other("clip_distributed")
def copies_are_divided(gradients, sharded, max_norm, group=None):
    size = dist.get_world_size(group)
    parts = [
        float((each.double() ** 2).sum()) / (1 if part else size) for each, part in zip(gradients, sharded, strict=True)
    ]
    total = torch.tensor([sum(parts)], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    norm = float(np.sqrt(total.numpy())[0])
    scale = np.float32(max_norm / (norm + 1e-6))
    if math.isfinite(norm) and scale < 1:
        for each in gradients:
            each.copy_(torch.from_numpy(each.numpy() * scale))
    return norm


# --- 14.7 float8_all_gather ---


@other("float8_all_gather")
def from_the_amax_on(shard, rows, fmt=E4M3, group=None):
    world = dist.get_world_size(group)
    amax = absmax(shard).float()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    scale = scale_for(amax, fmt)
    most = math.ceil(rows / world)
    padded = torch.nn.functional.pad(shard.float(), (0, 0, 0, most - shard.shape[0]))
    codes = encode(padded * scale, fmt).to(torch.uint8)
    out = torch.empty(world, most, shard.shape[1], dtype=torch.uint8)
    dist.all_gather(list(out.unbind()), codes, group=group)
    return Quantized(out.flatten(0, 1)[:rows].clone(), scale, fmt, "tensor", shard.dtype)


@other("float8_all_gather")
def flat(shard, rows, fmt=E4M3, group=None):
    q = quantize_part(shard, fmt, group)
    size = -(-rows // dist.get_world_size(group)) * shard.shape[1]
    wire = torch.zeros(size, dtype=torch.uint8)
    wire[: q.codes.numel()] = q.codes.reshape(-1)
    pieces = [torch.zeros(size, dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, wire, group=group)
    whole = torch.cat(pieces)[: rows * shard.shape[1]].view(rows, shard.shape[1])
    return Quantized(whole, q.scale, fmt, q.granularity, q.dtype)


# --- 14.8 column_parallel_float8 ---


@other("column_parallel_float8")
def columns_in_values(x, weight, group=None):
    def values(part, fmt, shared):
        return dequantize(quantize_part(part, fmt, group) if shared else quantize(part, fmt)).float()

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            w = values(weight, E4M3, True)
            seen = values(x, E4M3, False)
            ctx.save_for_backward(seen, w)
            ctx.dtype = x.dtype
            return (seen @ w.T).to(x.dtype)

        @staticmethod
        def backward(ctx, g):
            seen, w = ctx.saved_tensors
            g = values(g, E5M2, True)
            grad_x = g @ w
            dist.all_reduce(grad_x, group=group)
            return grad_x.to(ctx.dtype), (g.T @ seen).to(ctx.dtype)

    return Layer.apply(x, weight)


@other("column_parallel_float8")
def columns_with_the_whole_weight(x, weight, group=None):
    # Not what anybody should do, and right: gather all, compute all, keep a part.
    class Part(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return float8_matmul(quantize(x, E4M3), transpose(quantize_part(weight, E4M3, group)))

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            n = len(weight)
            whole = float8_all_gather(weight, n * dist.get_world_size(group), E4M3, group)
            every = [torch.empty(n, len(x), dtype=gradient.dtype) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, gradient.t().contiguous(), group=group)
            arrived = quantize(torch.cat(every).t(), E5M2)
            mine = slice(dist.get_rank(group) * n, (dist.get_rank(group) + 1) * n)
            grad_weight = float8_matmul(transpose(arrived), quantize(x, E4M3))[mine]
            return float8_matmul(arrived, whole), grad_weight

    return Part.apply(x, weight)


# --- 14.9 row_parallel_float8 ---


@other("row_parallel_float8")
def rows_in_values(x, weight, group=None):
    def values(part, fmt):
        (amax,) = all_reduce_amax([absmax(part)], group)
        scale = scale_for(amax, fmt)
        codes = encode(part.detach().float() * scale, fmt).to(torch.uint8)
        return dequantize(Quantized(codes, scale, fmt, "tensor", torch.float32))

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            seen, w = values(x, E4M3), values(weight, E4M3)
            ctx.save_for_backward(seen, w)
            output = seen @ w.T
            output = output.to(x.dtype)
            dist.all_reduce(output, group=group)
            return output

        @staticmethod
        def backward(ctx, g):
            seen, w = ctx.saved_tensors
            arrived = dequantize(quantize(g.float(), E5M2))
            return (arrived @ w).to(g.dtype), (arrived.T @ seen).to(g.dtype)

    return Layer.apply(x, weight)


@other("row_parallel_float8")
def rows_with_one_exchange_of_amaxes(x, weight, group=None):
    def both(x, weight):
        amaxes = all_reduce_amax([absmax(x), absmax(weight)], group)
        made = []
        for part, amax in zip((x, weight), amaxes, strict=True):
            scale = scale_for(amax, E4M3)
            made.append(
                Quantized(encode(part.float() * scale, E4M3).to(torch.uint8), scale, E4M3, "tensor", part.dtype)
            )
        return made

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            x8, w8 = both(x, weight)
            ctx.x8, ctx.w8 = x8, w8
            output = float8_matmul(x8, transpose(w8))
            total = [torch.empty_like(output) for _ in range(dist.get_world_size(group))]
            dist.all_gather(total, output, group=group)
            return torch.stack(total).sum(0)

        @staticmethod
        def backward(ctx, g):
            g8 = quantize(g, E5M2)
            return float8_matmul(g8, ctx.w8), float8_matmul(transpose(g8), ctx.x8)

    return Layer.apply(x, weight)
