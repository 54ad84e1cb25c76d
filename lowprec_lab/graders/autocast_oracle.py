"""The right answers of chapter 04 for its grader, and the same with one thing wrong: every knob is a misconception.

The tables are typed from torch 2.13's ATen/autocast_mode.h and autocast_mode.cpp; tests compare them with the kernels
that the installed torch has registered, and with what autocast does on tensors and on fake CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_lab.autocast import OPS, op_name
from lowprec_lab.calls import bits_of

LOWER, FP32, PROMOTE, AS_IS = "lower precision", "fp32", "promote", "as is"
_BOTH_LOWER = (
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "prelu", "scaled_dot_product_attention",
)  # fmt: skip
CPU = {
    **dict.fromkeys(_BOTH_LOWER, LOWER),
    **dict.fromkeys(("prod", "cross_entropy_loss", "nll_loss", "mse_loss", "kl_div"), FP32),
    **dict.fromkeys(("cat", "stack"), PROMOTE),
}
CUDA = {
    **dict.fromkeys((*_BOTH_LOWER, "mv"), LOWER),
    **dict.fromkeys(
        (
            "softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "exp", "log", "pow", "rsqrt", "softplus",
            "logsumexp", "sum", "cumsum", "prod", "nll_loss", "mse_loss", "kl_div",
        ),
        FP32,
    ),
    **dict.fromkeys(("addcmul", "addcdiv", "atan2", "dot"), PROMOTE),
}  # fmt: skip
TABLES = {"cpu": CPU, "cuda": CUDA}


def cast_policy(op: str, device_type: str) -> str:
    """The policy of an op; ValueError for devices whose table is not here."""
    if device_type not in TABLES:
        raise ValueError(f"there is a table for 'cpu' and for 'cuda', not for {device_type!r}")
    return TABLES[device_type].get(op, AS_IS)


def table_of(device_type: str) -> tuple[tuple[str, str], ...]:
    """The table of a device as data: (op, policy) pairs, in the order of OPS, without what is left as it is."""
    return tuple((op, TABLES[device_type][op]) for op in OPS if op in TABLES[device_type])


def bf16_loss(model, x: Tensor, y: Tensor, device_type: str) -> Tensor:
    """The loss that the model gives under BF16 autocast."""
    context = torch.autocast(device_type, dtype=torch.bfloat16)
    return context(model)(x, y)[1]


# --- recording --------------------------------------------------------------------------------------------------------


def dtypes_in(value: object, lists: bool = True) -> tuple[torch.dtype, ...]:
    """The dtypes of the tensors in nested tuples, lists and dictionaries, in order."""
    if isinstance(value, Tensor):
        return (value.dtype,)
    if isinstance(value, dict):
        value = list(value.values())
    elif not lists:
        value = [each for each in value if not isinstance(each, (list, tuple))] if isinstance(value, tuple) else value
    if isinstance(value, (list, tuple)):
        return tuple(dtype for each in value for dtype in dtypes_in(each))
    return ()


class Recorder(TorchDispatchMode):
    """An OpRecorder. change: from (name, ins, outs) to what is noted instead, or None for nothing.

    lists, keywords: whether tensors in lists, and in keyword arguments, are seen. forgets: whether a block begins anew.
    """

    def __init__(self, change: Callable | None = None, lists=True, keywords=True, forgets=False, full_names=False):
        super().__init__()
        self.ops: list[tuple] = []
        self._change, self._lists, self._keywords, self._forgets = change, lists, keywords, forgets
        self._full_names = full_names

    def __enter__(self):
        if self._forgets:
            self.ops = []
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(op).removeprefix("aten.")
        name = name if self._full_names else name.rpartition(".")[0]
        ins = dtypes_in(args, self._lists) + (dtypes_in(kwargs) if self._keywords else ())
        results = op(*args, **kwargs)
        noted = (name, ins, dtypes_in(results))
        noted = self._change(self.ops, *noted) if self._change else noted
        if noted is not None:
            self.ops.append(noted)
        return results


class FunctionRecorder(TorchFunctionMode):
    """A recorder that stands too high: it sees the functions of torch that are called, not the ops they come to."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.ops.append((op_name(function), dtypes_in((args, kwargs or {})), dtypes_in(result)))
        return result


# --- casting ----------------------------------------------------------------------------------------------------------


class Caster(TorchFunctionMode):
    """A MiniAutocast. The keywords are what can be wrong with one.

    cached: which tensors have their cast kept ("leaves", "everything", "frozen leaves too", "nothing").
    keeps: whether casts outlive their block. lists, keywords: whether tensors there are cast. cut: whether gradients
    end at a cast. doubles: whether float64 is cast. back: whether results are cast back to float32. widest: from the
    dtypes of the arguments to what "promote" casts to. only: the one dtype that is ever cast. stays: whether it stays
    switched on after its block.
    """

    def __init__(
        self, policy, dtype=torch.bfloat16, *, cached="leaves", keeps=False, lists=True, keywords=True,
        cut=False, doubles=False, back=False, widest=None, only=None, stays=False,
    ):  # fmt: skip
        super().__init__()
        self.policy, self.dtype, self.cached, self.keeps = policy, dtype, cached, keeps
        self.lists, self.keywords, self.cut, self.doubles = lists, keywords, cut, doubles
        self.back, self.widest, self.only, self.stays = back, widest, only, stays
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}

    def __exit__(self, *error):
        if not self.keeps:
            self.casts = {}
        return None if self.stays else super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = self._target(self.policy(op_name(function)), dtypes_in((args, kwargs)))
        if target is None:
            return function(*args, **kwargs)
        args = tuple(self._cast(each, target) for each in args)
        if self.keywords:
            kwargs = {key: self._cast(each, target) for key, each in kwargs.items()}
        result = function(*args, **kwargs)
        return result.float() if self.back and result.is_floating_point() else result

    def _target(self, policy: str, dtypes: tuple[torch.dtype, ...]) -> torch.dtype | None:
        if policy == PROMOTE:
            return self.widest(self, dtypes) if self.widest else (torch.float32 if torch.float32 in dtypes else None)
        return {LOWER: self.dtype, FP32: torch.float32}.get(policy)

    def _cast(self, value: object, target: torch.dtype) -> object:
        if isinstance(value, (list, tuple)) and self.lists and not isinstance(value, torch.Size):
            return type(value)(self._cast(each, target) for each in value)
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point or value.dtype == target:
            return value
        if value.dtype == torch.float64 and not self.doubles or self.only not in (None, value.dtype):
            return value
        if not self._is_kept(value, target):
            return (value.detach() if self.cut else value).to(target)
        if id(value) not in self.casts:
            self.casts[id(value)] = (value, (value.detach() if self.cut else value).to(target))
        return self.casts[id(value)][1]

    def _is_kept(self, value: Tensor, target: torch.dtype) -> bool:
        if target != self.dtype or value.dtype != torch.float32 or self.cached == "nothing":
            return False
        leaf = value.is_leaf or self.cached == "everything"
        return leaf and (value.requires_grad or self.cached == "frozen leaves too")


# --- counting and comparing -------------------------------------------------------------------------------------------


def count_weight_casts(model, x: Tensor, passes: int, cache_enabled: bool) -> int:
    """Two numbers for each linear layer with a bias, one without; kept where the cache may keep it."""
    return sum(times(weight, passes, cache_enabled) for weight in cast_weights(model))


def cast_weights(model) -> list[Tensor]:
    """The parameters that linear layers hand to an op of the lower precision, in the order of a forward pass."""
    linears = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    return [weight for layer in linears for weight in (layer.weight, layer.bias) if weight is not None]


def times(weight: Tensor, passes: int, cache_enabled: bool) -> int:
    """How often one of them is cast."""
    return min(passes, 1) if cache_enabled and weight.requires_grad else passes


def survives_compile(f: Callable, x: Tensor, compiler: Callable = torch.compile) -> bool:
    """Bits, with one pattern for all NaNs."""
    return same_bits(f(x.clone()), compiler(f)(x.clone()))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether dtype, shape and the bits of every element are the same, NaN by class."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    nans = left.isnan().reshape(-1).numpy(), right.isnan().reshape(-1).numpy()
    return bool(np.all((bits_of(left) == bits_of(right)) | (nans[0] & nans[1])))
