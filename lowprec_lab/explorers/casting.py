"""A forward pass of a small GPT, op by op: what goes in, what a MiniAutocast casts, and what comes out.

The pass is a real one, under whoever's MiniAutocast and cast_policy are in use. It is watched from three places: above
the casts (what the model hands over), below them (what the op gets), and where kernels are chosen (which tensors were
copied to another dtype; a weight that arrives cast without a copy was kept from earlier).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowprec_lab.autocast import OPS, POLICIES, op_name, small_batch, small_gpt
from lowprec_lab.graders import autocast_oracle as exact
from lowprec_lab.graders.autocast_oracle import AS_IS, FP32, LOWER, PROMOTE
from lowprec_lab.tables import NotUsableError, ask

# What can be shown: the two tables of torch, no autocast, and the CPU's table with changes of the reader's own.
TABLES = {"cpu": "the CPU's table", "cuda": "CUDA's table", "none": "no autocast", "own": "your own table"}

_NAMES = {torch.float32: "FP32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Place:
    """Where the model calls an op. arguments: what its tensors are, a weight last. part: of the model."""

    key: str
    op: str
    part: str
    words: str
    arguments: tuple[str, ...]


_LOSS = "head and loss"
PLACES = tuple(
    Place(*each)
    for each in (
        ("tokens", "embedding", "embedding", "of tokens", ("tokens", "weight")),
        ("positions", "embedding", "embedding", "of positions", ("positions", "weight")),
        ("stream", "add", "embedding", "begins the stream", ("tokens", "positions")),
        ("attention_norm", "layer_norm", "attention", "at the start", ("stream", "weight")),
        ("qkv", "linear", "attention", "q, k and v", ("x", "weight")),
        ("scores", "matmul", "attention", "q × k", ("q", "k")),
        ("scaled", "div", "attention", "by √(width)", ("scores",)),
        ("masked", "masked_fill", "attention", "the future", ("scores", "mask")),
        ("softmax", "softmax", "attention", "gives shares", ("scores",)),
        ("mixed", "matmul", "attention", "shares × v", ("shares", "v")),
        ("out", "linear", "attention", "joins the heads", ("x", "weight")),
        ("attention_add", "add", "attention", "to the stream", ("stream", "attention")),
        ("mlp_norm", "layer_norm", "MLP", "at the start", ("stream", "weight")),
        ("up", "linear", "MLP", "up to 4C", ("x", "weight")),
        ("gelu", "gelu", "MLP", "bend", ("x",)),
        ("down", "linear", "MLP", "down to C", ("x", "weight")),
        ("mlp_add", "add", "MLP", "to the stream", ("stream", "MLP")),
        ("norm", "layer_norm", _LOSS, "the last", ("stream", "weight")),
        ("head", "linear", _LOSS, "logits", ("x", "weight")),
        ("loss", "cross_entropy_loss", _LOSS, "in one op", ("logits", "targets")),
        ("log_softmax", "log_softmax", _LOSS, "of logits", ("logits",)),
        ("nll_loss", "nll_loss", _LOSS, "the mean", ("log_softmax", "targets")),
    )
)
KEYS = tuple(place.key for place in PLACES)
NAMED = tuple(dict.fromkeys(place.op for place in PLACES))  # the ops that a table of one's own can speak of

_WHAT = {
    "embedding": "It looks rows up and computes nothing.",
    "add": "It adds to the long sum of the model: the residual stream.",
    "layer_norm": "It divides by the root of a mean of squares: a long sum.",
    "linear": "A matrix product: products survive BF16, and most of the time goes into them.",
    "matmul": "A matrix product: products survive BF16, and most of the time goes into them.",
    "div": "It works on each number alone.",
    "masked_fill": "It works on each number alone.",
    "gelu": "It works on each number alone.",
    "softmax": "It takes exp, and adds up.",
    "log_softmax": "It takes exp, adds up, and takes the log of the sum.",
    "cross_entropy_loss": "It takes exp, adds up, and means over all tokens.",
    "nll_loss": "It means over all tokens.",
}


# --- one pass ---------------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """An op on its way. got: its tensors as the model hands them over. received: as they reach the op."""

    place: Place
    function: Callable
    got: list[Tensor]
    received: list[torch.dtype] | None = None
    result: torch.dtype | None = None
    error: str = ""
    copied: set[int] | None = None


class _RefusedError(Exception):
    """An op does not take the dtypes that reach it: the pass ends here."""


class _Copies(TorchDispatchMode):
    """Notes which tensors are copied to another dtype while an op is on its way."""

    call: _Call | None = None

    def __torch_dispatch__(self, op: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if self.call is not None and op.overloadpacket is torch.ops.aten._to_copy:
            self.call.copied.add(id(args[0]))
        return op(*args, **(kwargs or {}))


class _Below(TorchFunctionMode):
    """Stands below the casts."""

    call: _Call | None = None

    def __torch_function__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        call, kwargs = self.call, kwargs or {}
        if call is None or function is not call.function:
            return function(*args, **kwargs)
        call.received = [tensor.dtype for tensor in _tensors((args, kwargs))]
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            call.error = str(error).splitlines()[0]
            raise _RefusedError from error


class _Above(TorchFunctionMode):
    """Stands above the casts: takes down each op of `PLACES`, in their order."""

    def __init__(self, policy: Callable[[str], str], below: _Below, copies: _Copies) -> None:
        super().__init__()
        self.policy, self.below, self.copies = policy, below, copies
        self.calls: list[_Call] = []
        self.waiting: list[Place] = []

    def begin(self) -> list[_Call]:
        self.calls, self.waiting = [], list(PLACES)
        return self.calls

    def __torch_function__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        name, kwargs = op_name(function), kwargs or {}
        if name not in NAMED:
            return function(*args, **kwargs)
        if name == "cross_entropy_loss" and self.policy(name) == AS_IS:
            # torch's autocast looks at what an op on no list calls inside; a mode of Python does not see that far.
            logs = self.take_down(F.log_softmax, args[0], dim=-1)
            return self.take_down(F.nll_loss, logs, *args[1:])
        return self.take_down(function, *args, **kwargs)

    def take_down(self, function: Callable, *args: object, **kwargs: object) -> Tensor:
        name = op_name(function)
        place = next(place for place in self.waiting if place.op == name)
        self.waiting = self.waiting[self.waiting.index(place) + 1 :]
        with torch._C.DisableTorchFunction():
            call = _Call(place, function, _tensors((args, kwargs)), copied=set())
        self.calls.append(call)
        self.below.call = self.copies.call = call
        try:
            result = function(*args, **kwargs)
        finally:
            self.below.call = self.copies.call = None
        with torch._C.DisableTorchFunction():
            call.result = result.dtype
        return result


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def trace(autocast: Callable | None, policy: Callable[[str], str]) -> list[list[dict]]:
    """Two forward passes in one block of `autocast(policy)` (None: in no block): a list of rows for each.

    A row: key, op, part, words, policy, args, out ("FP32", "BF16" ...; None after an error), error. An arg: name,
    weight (bool), was, is (dtypes), how ("as it is", "cast" or "kept"). Where an op refuses its dtypes, the pass ends
    with it.
    """
    model, (tokens, targets) = small_gpt(fused=False), small_batch()
    weights = {id(weight) for weight in model.parameters()}
    below, copies = _Below(), _Copies()
    above = _Above(policy, below, copies)
    passes = []
    block = (lambda: autocast(policy)) if autocast else contextlib.nullcontext
    with _watched(), copies, below, contextlib.suppress(_RefusedError), block():
        for _ in range(2):
            passes.append(above.begin())
            with above:
                model(tokens, targets)
    return [[_row(call, weights, policy) for call in calls] for calls in (passes[0], passes[-1])]


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """With gradients and without autocast; a mode that an answer does not switch off is switched off at the end."""
    depth = torch._C._len_torch_function_stack()
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        while torch._C._len_torch_function_stack() > depth:
            torch._C._pop_torch_function_stack()


def _row(call: _Call, weights: set[int], policy: Callable[[str], str]) -> dict:
    place = call.place
    if call.received is None or len(call.received) != len(call.got):
        raise NotUsableError(f"did not call {place.op} with what it was handed")
    if call.result is None and not call.error:
        raise NotUsableError(f"gave nothing back for {place.op}")
    args = []
    for name, tensor, received in zip(place.arguments, call.got, call.received, strict=True):
        how = "as it is" if received == tensor.dtype else "cast" if id(tensor) in call.copied else "kept"
        args.append(
            {
                "name": name,
                "weight": id(tensor) in weights,
                "was": _name(tensor.dtype),
                "is": _name(received),
                "how": how,
            }
        )
    return {
        "key": place.key,
        "op": place.op,
        "part": place.part,
        "words": place.words,
        "policy": policy(place.op),
        "args": args,
        "out": _name(call.result) if call.result else None,
        "error": call.error,
    }


def _name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


# --- by whoever's code is in use --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """passes: for each table two passes, lists of rows. sources: for both exercises origin, line and note."""

    passes: dict[str, list[list[dict]]]
    sources: list[dict]


def runs(own: dict[str, str]) -> Runs:
    """The passes under all four tables, by the cast_policy and the MiniAutocast that are in use.

    own: policies by name of an op, which differ from the CPU's in the reader's own table.
    """
    tables, *policy_source = ask("cast_policy", _tables_of, exact=exact.cast_policy)
    if wrong := [f"{op} ({device})" for device in tables for op in tables[device] if _differs(tables, device, op)]:
        policy_source[2] = f"differs from torch's table for {', '.join(wrong)}"
    tables = {"cpu": tables["cpu"], "cuda": tables["cuda"], "own": {**tables["cpu"], **own}}

    def use(autocast: Callable) -> dict[str, list[list[dict]]]:
        return {name: trace(autocast, _policy(table)) for name, table in tables.items()}

    passes, *autocast_source = ask("MiniAutocast", use, exact=exact.Caster)
    right = use(exact.Caster)
    both = [two for name in right for two in zip(passes[name], right[name], strict=True)]
    pairs = [pair for two in both for pair in zip_longest(*two)]
    if (wrong := sum(found != wanted for found, wanted in pairs)) and not autocast_source[2]:
        autocast_source[2] = f"differs from the definition for {wrong} of the {len(pairs)} ops it was watched at"
    passes["none"] = trace(None, _policy({}))
    for name, two in passes.items():
        _explain(two, name)
    sources = [dict(zip(("origin", "line", "note"), each, strict=True)) for each in (policy_source, autocast_source)]
    return Runs(passes, sources)


def _tables_of(cast_policy: Callable) -> dict[str, dict[str, str]]:
    """The policies of the GPT's ops on both devices."""
    return {
        device: {op: _known(cast_policy(op, device), op) for op in NAMED if op in OPS} for device in ("cpu", "cuda")
    }


def _known(policy: object, op: str) -> str:
    if policy not in POLICIES:
        raise NotUsableError(f"returned {policy!r} for {op}, which is no policy")
    return policy


def _differs(tables: dict, device: str, op: str) -> bool:
    return tables[device][op] != exact.cast_policy(op, device)


def _policy(table: dict[str, str]) -> Callable[[str], str]:
    return lambda op: table.get(op, AS_IS)


# --- in words ---------------------------------------------------------------------------------------------------------


def _explain(two: list[list[dict]], table: str) -> None:
    """Add to each row `why`, a few sentences, and to each arg `stays`: whether its cast is used by the second pass."""
    kept = {row["key"] for row in two[1] if any(arg["how"] == "kept" for arg in row["args"])}
    for row in (row for rows in two for row in rows):
        for arg in row["args"]:
            arg["stays"] = arg["weight"] and arg["how"] == "cast" and row["key"] in kept
        row["why"] = " ".join(filter(None, (_by_policy(row, table), _WHAT[row["op"]], _what_happened(row))))


def _by_policy(row: dict, table: str) -> str:
    if table == "none":
        return "No autocast: every op takes what comes."
    of = {"cpu": "the CPU's list", "cuda": "CUDA's list", "own": "your list"}[table]
    op = row["op"]
    return {
        LOWER: f"{op} is on {of} for lower precision: its floating-point tensors are cast to BF16.",
        FP32: f"{op} is on {of} for float32: its floating-point tensors are cast to FP32.",
        PROMOTE: f"{op} is on {of} to promote: its tensors are cast to the widest dtype among them.",
        AS_IS: f"{op} is on no list{' of yours' if table == 'own' else ''}: it takes what comes.",
    }[row["policy"]]


def _what_happened(row: dict) -> str:
    if row["error"]:
        return f"And here the pass ends: RuntimeError, {row['error'].rstrip('.')}."
    floats = {arg["is"] for arg in row["args"]} & {"FP32", "BF16"}
    if len(floats) == 2 and row["op"] == "add":
        rule = "type promotion, torch's own rule, not autocast's doing"
        return f"FP32 and BF16 meet, and {row['out']} comes out: {rule}."
    if any(arg["how"] == "kept" for arg in row["args"]):
        return "The weight was cast earlier in this block, and the kept cast is used."
    if any(arg["stays"] for arg in row["args"]):
        return "The cast of the weight is kept until the block ends."
    return ""


def counts(rows: list[dict]) -> dict[str, int]:
    """How many casts of activations and of weights a pass makes, and how many kept ones it uses."""
    args = [arg for row in rows for arg in row["args"]]
    return {
        "activations": sum(arg["how"] == "cast" and not arg["weight"] for arg in args),
        "weights": sum(arg["how"] == "cast" and arg["weight"] for arg in args),
        "kept": sum(arg["how"] == "kept" for arg in args),
    }


def stream(rows: list[dict]) -> list[str]:
    """The dtypes that the residual stream has on its way, each once, in order."""
    return list(dict.fromkeys(row["out"] for row in rows if row["op"] == "add" and row["out"]))
