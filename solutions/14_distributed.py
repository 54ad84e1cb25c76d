# %% [markdown]
# # 14 · Distributed: what must many ranks agree on?

# %% tags=["setup"]
try:
    import json
    import math

    import torch
    import torch.distributed as dist

    from lowprec_lab import check, fill, plots, progress, question, reveal
    from lowprec_lab.distributed import (
        KINDS,
        DistributedLossScaler,
        accumulate_main_grads,
        all_reduce_amax,
        all_reduce_found_inf,
        amax_facts,
        amaxes_on_ranks,
        clip_distributed,
        clipped_on_ranks,
        column_parallel_float8,
        column_parallel_on_ranks,
        float8_all_gather,
        found_on_ranks,
        gathered_facts,
        gathered_on_ranks,
        main_grads_facts,
        main_grads_on_ranks,
        quantize_part,
        rank_groups,
        row_parallel_float8,
        row_parallel_on_ranks,
        scales_on_ranks,
        scales_resumed_on_ranks,
    )
    from lowprec_lab.float8_linear import float8_matmul, transpose
    from lowprec_lab.formats import E4M3, E5M2
    from lowprec_lab.loss_scaling import found_nonfinite, unscale_
    from lowprec_lab.quantizer import Quantized, absmax, quantize, scale_for
    from lowprec_lab.ranks import RankError, launch
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %% [markdown]
# ### Exercise 14.1 · `accumulate_main_grads` · 35 min · medium · 3 points


# %%
@fill
def accumulate_main_grads(model, batches, group=None):
    ### BEGIN SOLUTION
    parameters = list(model.parameters())
    sizes = [each.numel() for each in parameters]
    bucket = torch.zeros(sum(sizes))  # one piece of memory: one all-reduce
    mains = [view.view(each.shape) for view, each in zip(bucket.split(sizes), parameters, strict=True)]
    for x, y in batches:
        (model(x, y)[1] / len(batches)).backward()
        for main, parameter in zip(mains, parameters, strict=True):
            main.add_(parameter.grad)  # a sum of float32 and bfloat16 is float32
            parameter.grad = None
    bucket.mul_(1 / dist.get_world_size(group))
    dist.all_reduce(bucket, group=group)
    return mains
    ### END SOLUTION


# %%
check(accumulate_main_grads)

# %% [markdown]
# ### Exercise 14.2 · `all_reduce_found_inf` · 15 min · easy · 2 points


# %%
@fill
def all_reduce_found_inf(gradients, group=None):
    ### BEGIN SOLUTION
    found = torch.tensor(float(found_nonfinite(gradients)))
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found)
    ### END SOLUTION


# %%
check(all_reduce_found_inf)

# %% [markdown]
# ### Exercise 14.3 · `DistributedLossScaler` · 35 min · medium · 3 points


# %%
@fill
class DistributedLossScaler:
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
        ### BEGIN SOLUTION
        self.scale, self.good_steps, self.patience = init_scale, 0, hysteresis
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.min_scale, self.hysteresis, self.group = min_scale, hysteresis, group
        ### END SOLUTION

    def update(self, found_inf):
        ### BEGIN SOLUTION
        anywhere = torch.tensor(float(found_inf))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.group)
        if anywhere:
            self.good_steps = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.good_steps, self.patience = 0, self.hysteresis
                self.scale *= self.growth_factor
        return bool(anywhere)
        ### END SOLUTION

    def state_dict(self):
        ### BEGIN SOLUTION
        return {"scale": self.scale, "good_steps": self.good_steps, "patience": self.patience}
        ### END SOLUTION

    def load_state_dict(self, state):
        ### BEGIN SOLUTION
        self.scale, self.good_steps, self.patience = state["scale"], state["good_steps"], state["patience"]
        ### END SOLUTION


# %%
check(DistributedLossScaler)

# %% [markdown]
# ### Exercise 14.4 · `rank_groups` · 30 min · medium · 3 points


# %%
@fill
def rank_groups(world, tensor, pipeline, kind):
    ### BEGIN SOLUTION
    if min(world, tensor, pipeline) < 1 or world % (tensor * pipeline):
        raise ValueError(f"tensor {tensor} times pipeline {pipeline} must divide a world of {world} ranks")
    alike = {"tensor": "dp", "data": "tp", "pipeline": "td", "model": "d", "amax": "p"}  # in which coordinates
    if kind not in alike:
        raise ValueError(f"there is no kind of group {kind!r}. The kinds are: {', '.join(alike)}")
    groups = {}
    for rank in range(world):
        data = world // (tensor * pipeline)
        place = {"t": rank % tensor, "d": rank // tensor % data, "p": rank // (tensor * data)}
        groups.setdefault(tuple(place[each] for each in alike[kind]), []).append(rank)
    return list(groups.values())
    ### END SOLUTION


# %%
check(rank_groups)

# %% [markdown]
# ### Exercise 14.5 · `all_reduce_amax` · 20 min · easy · 2 points


# %%
@fill
def all_reduce_amax(amaxes, group=None):
    ### BEGIN SOLUTION
    together = torch.cat([amax.flatten().float() for amax in amaxes]).nan_to_num(nan=math.inf, posinf=math.inf)
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
    pieces = together.split([amax.numel() for amax in amaxes])
    return [piece.view(amax.shape).to(amax.dtype) for piece, amax in zip(pieces, amaxes, strict=True)]
    ### END SOLUTION


# %%
check(all_reduce_amax)

# %% [markdown]
# ### Exercise 14.6 · `clip_distributed` · 35 min · medium · 3 points


# %%
@fill
def clip_distributed(gradients, sharded, max_norm, group=None):
    ### BEGIN SOLUTION
    squares = torch.zeros(2, dtype=torch.float64)  # of gradients that all ranks have, and of this rank's parts
    for gradient, part in zip(gradients, sharded, strict=True):
        squares[int(part)] += gradient.double().square().sum()
    parts = squares[1].clone()
    dist.all_reduce(parts, group=group)
    norm = float((squares[0] + parts).sqrt())
    factor = max_norm / (norm + 1e-6)
    if math.isfinite(norm) and factor < 1:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
    ### END SOLUTION


# %%
check(clip_distributed)

# %% [markdown]
# ### Exercise 14.7 · `float8_all_gather` · 40 min · hard · 4 points


# %%
@fill
def float8_all_gather(shard, rows, fmt=E4M3, group=None):
    ### BEGIN SOLUTION
    ranks = dist.get_world_size(group)
    mine = quantize_part(shard, fmt, group)
    size = -(-rows // ranks)
    filled = torch.zeros(size, shard.shape[1], dtype=torch.uint8)
    filled[: len(shard)] = mine.codes
    everybodys = [torch.empty_like(filled) for _ in range(ranks)]
    dist.all_gather(everybodys, filled, group=group)
    return Quantized(torch.cat(everybodys)[:rows], mine.scale, fmt, "tensor", shard.dtype)
    ### END SOLUTION


# %%
check(float8_all_gather)

# %% [markdown]
# ### Exercise 14.8 · `column_parallel_float8` · 45 min · hard · 4 points


# %%
@fill
def column_parallel_float8(x, weight, group=None):
    ### BEGIN SOLUTION
    class Columns(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return float8_matmul(quantize(x, E4M3), transpose(quantize_part(weight, E4M3, group)))

        @staticmethod
        def backward(ctx, grad_output):
            x, weight = ctx.saved_tensors
            arrived = quantize_part(grad_output, E5M2, group)
            grad_x = float8_matmul(arrived, quantize_part(weight, E4M3, group))
            dist.all_reduce(grad_x, group=group)  # each rank's outputs send back their part of it
            return grad_x, float8_matmul(transpose(arrived), quantize(x, E4M3))

    return Columns.apply(x, weight)
    ### END SOLUTION


# %%
check(column_parallel_float8)

# %% [markdown]
# ### Exercise 14.9 · `row_parallel_float8` · 40 min · hard · 4 points


# %%
@fill
def row_parallel_float8(x, weight, group=None):
    ### BEGIN SOLUTION
    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            output = float8_matmul(quantize_part(x, E4M3, group), transpose(quantize_part(weight, E4M3, group)))
            dist.all_reduce(output, group=group)
            return output

        @staticmethod
        def backward(ctx, grad_output):
            x, weight = ctx.saved_tensors
            arrived = quantize(grad_output, E5M2)
            grad_x = float8_matmul(arrived, quantize_part(weight, E4M3, group))
            return grad_x, float8_matmul(transpose(arrived), quantize_part(x, E4M3, group))

    return Rows.apply(x, weight)
    ### END SOLUTION


# %%
check(row_parallel_float8)

# %%
progress()
