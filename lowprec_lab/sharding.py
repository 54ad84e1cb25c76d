"""A model in shards: each rank keeps its part of every weight, of its gradient and of its moments (FSDP2).

A block's weights are put together just before the block runs, forward and backward, and taken apart after it; gradients
are averaged and cut up on their way. With FP8 by the recipe "tensorwise", which casts a weight with one scale for all
of it, the cast is done before the weight travels: all ranks agree on the largest magnitude, once for each step and all
weights together, and send codes of 8 bits instead of numbers of 32. What arrives is put together so that the layer's
own cast gives those codes and that scale again, to the last bit: a layer cannot tell whether its weight has travelled.

A checkpoint is written by all ranks, each its part, and read by any number of them (torch.distributed.checkpoint).

References: PyTorch, torch.distributed.fsdp.fully_shard and its extensions fsdp_pre_all_gather, fsdp_post_all_gather;
torchao/float8/fsdp_utils.py in pytorch/ao (one reduction of all magnitudes); Rajbhandari et al., ZeRO,
arXiv:1910.02054.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowprec_lab import quantizer
from lowprec_lab.formats import E4M3
from lowprec_lab.quantizer import Quantized

TENSORWISE = "tensorwise"  # the recipe whose weights can be cast before they travel


class TravellingWeight(Tensor):
    """A rank's part of a weight, which goes to the others as codes of 8 bits. amax: of the whole weight, float32, 0-d.

    `agree` sets amax after every change of the weight.
    """

    amax: Tensor

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy) -> tuple[tuple, tuple]:
        """What this rank sends: its codes; and what it keeps for putting them together."""
        q = codes_of(self.as_subclass(Tensor), self.amax)
        return (q.codes,), (q.scale, self.amax)

    def fsdp_post_all_gather(self, outputs: tuple[Tensor, ...], kept: tuple, dtype: torch.dtype, *, out=None):
        """The weight of all codes, in `out` where there is one; and the memory that FSDP frees and takes again."""
        (codes,) = outputs
        whole = weight_of(codes, *kept, dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


def codes_of(part: Tensor, amax: Tensor) -> Quantized:
    """A part of a tensor, float32, quantized to E4M3 with the scale of the whole one, whose largest magnitude is amax.

    By chapter 07's `quantize`, which sees that magnitude as one element more.
    """
    q = quantizer.quantize(torch.cat((part.reshape(-1), amax.reshape(1))), E4M3)
    return Quantized(q.codes[:-1].view(part.shape), q.scale, E4M3, "tensor", part.dtype)


def weight_of(codes: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that the codes stand for, with the largest of them as they were before: exactly amax.

    So quantizing it again finds the same magnitude, and gives the same scale and codes.
    """
    whole = quantizer.dequantize(Quantized(codes, scale, E4M3, "tensor", torch.float32))
    size = whole.abs()
    return torch.where(size == size.max(), amax.copysign(whole), whole).to(dtype)


def shard(model: nn.Module, names: list[str], world: int) -> tuple[list[TravellingWeight], str]:
    """Cut a model up, block by block, in place; (the weights that travel in 8 bits, what to say about it).

    names: the layers in FP8 whose weights may travel so. Their rows have to divide among the ranks.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    travelling = [name for name in names if model.get_submodule(name).out_features % world == 0]
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule) and next(model.parameters()).device.type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    weights = _travelling(model, [model.get_submodule(name).weight for name in travelling])
    note = f"Each of {world} ranks keeps its part of every weight. "
    if not weights:
        return [], note + "Weights travel as they are."
    return weights, note + f"The weights of {len(weights)} layers travel as codes of 8 bits."


def _travelling(model: nn.Module, weights: list[nn.Parameter]) -> list[TravellingWeight]:
    """Make this rank's parts of some weights travelling ones.

    A DTensor comes to hold a plain tensor, whatever it is made from (unless that catches every operation, as torchao's
    does). So the part is put in afterwards, and FSDP looks at it again.
    """
    from torch.distributed.fsdp import FSDPModule

    groups = [each._get_fsdp_state()._fsdp_param_group for each in model.modules() if isinstance(each, FSDPModule)]
    known = {each.sharded_param: each for group in groups if group is not None for each in group.fsdp_params}
    for weight in weights:
        weight._local_tensor = weight._local_tensor.as_subclass(TravellingWeight)
        known[weight]._init_extensions()
    return [weight._local_tensor for weight in weights]


@torch.no_grad()
def agree(weights: list[TravellingWeight]) -> None:
    """All ranks take the largest magnitude of all parts: one reduction for all weights. NaN wins."""
    if not weights:
        return
    own = torch.stack([quantizer.absmax(each.as_subclass(Tensor)).float() for each in weights])
    both = torch.stack((own.nan_to_num(nan=0.0, posinf=torch.inf), own.isnan().float()))
    dist.all_reduce(both, dist.ReduceOp.MAX)  # MAX does not always let NaN win
    for each, amax in zip(weights, torch.where(both[1] > 0, torch.nan, both[0]), strict=True):
        each.amax = amax


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, or the tensor where it is whole."""
    part = getattr(tensor, "_local_tensor", tensor)
    return part.as_subclass(Tensor) if isinstance(part, TravellingWeight) else part


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write weights and moments to a new folder: all ranks together, each its part."""
    import torch.distributed.checkpoint as dcp

    with _quiet():
        dcp.save(_tensors(model, optimizer), checkpoint_id=str(folder))


@torch.no_grad()
def load(model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    """Read what `save` wrote with any number of ranks, in place; this model may be whole or sharded in another way.

    optimizer: None leaves the moments where they are.
    """
    import torch.distributed.checkpoint as dcp

    tensors = _tensors(model, optimizer)
    with _quiet():
        dcp.load(tensors, checkpoint_id=str(folder))
    for name, parameter in model.named_parameters() if optimizer is not None else ():
        optimizer.state[parameter] = {key: tensors[f"optimizer.{name}.{key}"] for key in _MOMENTS}


@torch.no_grad()
def load_whole(model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict, state: dict) -> None:
    """Fill a sharded model from the state_dicts of one that is whole."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(order):
        _plain(parameter).copy_(_like(weights[names[parameter]], parameter))
        if number in state["state"]:
            moments = state["state"][number]
            optimizer.state[parameter] = {
                key: moments[key].clone() if moments[key].dim() == 0 else _like(moments[key], parameter)
                for key in _MOMENTS
            }


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its name; those of a model that has taken no step yet are zeros."""
    found = {}
    for name, parameter in model.named_parameters():
        plain = found[f"model.{name}"] = _plain(parameter)
        if optimizer is None:
            continue
        state = optimizer.state.get(parameter) or {
            "step": torch.zeros(()), "exp_avg": torch.zeros_like(plain), "exp_avg_sq": torch.zeros_like(plain),
        }  # fmt: skip
        found |= {f"optimizer.{name}.{key}": _plain(state[key]) for key in _MOMENTS}
    return found


def _plain(tensor: Tensor) -> Tensor:
    """The same memory, without a gradient, and without what makes a weight a travelling one."""
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(
        local(tensor), tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
        stride=tensor.stride(),
    )  # fmt: skip


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    """`whole`, in shards as `parameter` is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(parameter.device), parameter.device_mesh, parameter.placements)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch's remarks on what a checkpoint of one process means are for its own developers."""
    log = logging.getLogger("torch.distributed.checkpoint")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
