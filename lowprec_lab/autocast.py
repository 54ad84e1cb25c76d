"""Chapter 04: who decides in which dtype an operation runs.

An op has here the name that torch's library of operations (ATen) gives it: "linear", "softmax", "cross_entropy_loss".
What autocast does with it is one of four policies: "lower precision" (floating arguments are cast to BF16 or FP16),
"fp32" (they are cast to float32), "promote" (to the widest among them), "as is" (nothing). float64 tensors and tensors
that are no floating-point numbers are never cast.

References: torch 2.13, ATen/autocast_mode.h (installed with torch) and ATen/autocast_mode.cpp; torch's documentation,
autocast op reference; Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode  # noqa: F401 (answers find it here)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map  # noqa: F401 (answers find them here)

from lowprec_lab.blanks import blank
from lowprec_lab.gpt import GPT, GPTConfig

POLICIES = ("lower precision", "fp32", "promote", "as is")


@blank(exercise="4.1", points=2, minutes=20)
def bf16_loss(model: GPT, x: Tensor, y: Tensor, device_type: str) -> Tensor:
    """The loss of one batch, with the forward pass under BF16 autocast of `device_type` ("cpu", "cuda", ...).

    x, y: int64, (B, T), tokens and targets. Returns: float32, 0-d: the mean cross-entropy over all B * T positions,
    with its graph, so that the caller can call `.backward()` on it.
    The model runs once. Its weights (float32), its mode and the state of autocast are afterwards what they were.
    """


@blank(exercise="4.2", points=3, minutes=30)
class OpRecorder:
    """A context manager that records every op that runs in its block, forward and backward, in their order.

    `with OpRecorder() as recorder: model(x)`, and then `recorder.ops` is a list of tuples (name, ins, outs).
    name: str, ATen's name without the overload ("mm", "_to_copy"). ins, outs: tuples of torch.dtype: of every tensor
    among the arguments (those in lists and keyword arguments too, in their order) and among the results.
    Ops are seen where kernels are chosen, below autograd and autocast. Each runs and gives what it would have given.
    Nothing is recorded before the block and after it. A second block of the same recorder adds to the list.
    """

    def __init__(self) -> None: ...


@blank(exercise="4.3", points=3, minutes=30, unlocks="CastPolicyExplorer casts by your table.")
def cast_policy(op: str, device_type: str) -> str:
    """What torch.autocast does with the floating-point arguments of an op on a CPU or on a CUDA device (torch 2.13).

    op: ATen's name of it, one of `OPS`; for other names "as is". device_type: "cpu" or "cuda"; else ValueError.
    Returns: "lower precision", "fp32", "promote" or "as is".
    """


@blank(exercise="4.4", points=5, minutes=60, unlocks="CastPolicyExplorer casts with it.")
class MiniAutocast:
    """A context manager in whose block the floating-point arguments of every function of torch are cast by a policy.

    policy: a function from an op's name (`op_name` of the function that was called) to one of `POLICIES`.
    dtype: of the lower precision. "promote" casts to float32 if one of the arguments is float32, else nothing.
    Tensors in lists and keyword arguments are cast too; float64 and other kinds of tensors never.
    A cast is part of the graph: gradients flow back through it. What a function calls inside is left alone.
    A float32 leaf that requires gradients is cast to `dtype` once in a block, however often it is used there (the cast
    cache). After the block nothing is cast, and no cast is kept, also if the block ended with an error.
    """

    def __init__(self, policy: Callable[[str], str], dtype: torch.dtype = torch.bfloat16) -> None: ...


@blank(exercise="4.5", points=3, minutes=30)
def count_weight_casts(model: GPT, x: Tensor, passes: int, cache_enabled: bool) -> int:
    """How often CPU autocast (BF16) casts a parameter of `model`, in `passes` forward passes `model(x)` in one block.

    x: int64, (B, T). cache_enabled: whether the block has a cast cache. Returns: int; activations do not count.
    Gradients are on, as in training; a parameter that is frozen (`requires_grad` False) is never cached.
    """


@blank(exercise="4.6", points=2, minutes=20)
def survives_compile(f: Callable[[Tensor], Tensor], x: Tensor, compiler: Callable = torch.compile) -> bool:
    """Whether a function gives the same bits when it is compiled.

    f: from a floating-point tensor to one; it may change its argument. x: is not changed. compiler: from f to its
    compiled version. Returns: bool: True if dtype, shape and all elements are the same; -0.0 and 0.0 are not, all NaNs
    are.
    """


# --- ops to watch: how each is called ---------------------------------------------------------------------------------

# Each is handed two functions that make the next operand of a shape: floating-point numbers t, whole numbers i.
_CALLS: dict[str, Callable] = {
    "linear": lambda t, i: F.linear(t(2, 4), t(3, 4)),
    "matmul": lambda t, i: t(2, 4) @ t(4, 3),
    "mm": lambda t, i: torch.mm(t(2, 4), t(4, 3)),
    "bmm": lambda t, i: torch.bmm(t(2, 2, 4), t(2, 4, 3)),
    "addmm": lambda t, i: torch.addmm(t(3), t(2, 4), t(4, 3)),
    "baddbmm": lambda t, i: torch.baddbmm(t(2, 2, 3), t(2, 2, 4), t(2, 4, 3)),
    "mv": lambda t, i: torch.mv(t(3, 4), t(4)),
    "conv1d": lambda t, i: F.conv1d(t(1, 2, 6), t(3, 2, 3)),
    "conv2d": lambda t, i: F.conv2d(t(1, 2, 4, 4), t(3, 2, 3, 3)),
    "prelu": lambda t, i: F.prelu(t(2, 3), t(3)),
    "scaled_dot_product_attention": lambda t, i: F.scaled_dot_product_attention(*(t(1, 1, 4, 8) for _ in range(3))),
    "softmax": lambda t, i: F.softmax(t(2, 3), dim=-1),
    "log_softmax": lambda t, i: F.log_softmax(t(2, 3), dim=-1),
    "layer_norm": lambda t, i: F.layer_norm(t(2, 4), (4,)),
    "rms_norm": lambda t, i: F.rms_norm(t(2, 4), (4,)),
    "group_norm": lambda t, i: F.group_norm(t(2, 4), 2),
    "exp": lambda t, i: torch.exp(t(3)),
    "log": lambda t, i: torch.log(t(3)),
    "pow": lambda t, i: torch.pow(t(3), 2),
    "rsqrt": lambda t, i: torch.rsqrt(t(3)),
    "softplus": lambda t, i: F.softplus(t(3)),
    "logsumexp": lambda t, i: torch.logsumexp(t(2, 3), dim=-1),
    "sum": lambda t, i: torch.sum(t(2, 3)),
    "cumsum": lambda t, i: torch.cumsum(t(2, 3), dim=-1),
    "prod": lambda t, i: torch.prod(t(3)),
    "cross_entropy_loss": lambda t, i: F.cross_entropy(t(2, 5), i(2)),
    "nll_loss": lambda t, i: F.nll_loss(t(2, 5), i(2)),
    "mse_loss": lambda t, i: F.mse_loss(t(2, 3), t(2, 3)),
    "kl_div": lambda t, i: F.kl_div(t(2, 3), t(2, 3), reduction="sum"),
    "cat": lambda t, i: torch.cat([t(2, 3), t(2, 3)]),
    "stack": lambda t, i: torch.stack([t(2, 3), t(2, 3)]),
    "addcmul": lambda t, i: torch.addcmul(t(3), t(3), t(3)),
    "addcdiv": lambda t, i: torch.addcdiv(t(3), t(3), t(3)),
    "atan2": lambda t, i: torch.atan2(t(3), t(3)),
    "dot": lambda t, i: torch.dot(t(3), t(3)),
    "add": lambda t, i: t(2, 3) + t(2, 3),
    "mul": lambda t, i: t(2, 3) * t(2, 3),
    "gelu": lambda t, i: F.gelu(t(3)),
    "relu": lambda t, i: F.relu(t(3)),
    "silu": lambda t, i: F.silu(t(3)),
    "tanh": lambda t, i: torch.tanh(t(3)),
    "sigmoid": lambda t, i: torch.sigmoid(t(3)),
    "sqrt": lambda t, i: torch.sqrt(t(3)),
    "mean": lambda t, i: torch.mean(t(2, 3)),
    "amax": lambda t, i: torch.amax(t(2, 3)),
    "embedding": lambda t, i: F.embedding(i(2), t(5, 3)),
    "dropout": lambda t, i: F.dropout(t(2, 3), 0.5, training=True),
    "transpose": lambda t, i: torch.transpose(t(2, 3), 0, 1),
}  # fmt: skip
OPS = tuple(_CALLS)


def op_name(function: Callable) -> str:
    """ATen's name for a function that a `TorchFunctionMode` meets: F.cross_entropy is "cross_entropy_loss"."""
    name = getattr(function, "__name__", "").strip("_")
    return {"cross_entropy": "cross_entropy_loss", "rmatmul": "matmul", "radd": "add", "rmul": "mul"}.get(name, name)


def call_op(op: str, *dtypes: torch.dtype, device: str = "cpu", requires_grad: bool = False) -> Tensor:
    """The result of an op of `OPS` on small operands of these dtypes: the first operand has the first, and so on.

    The last dtype goes on for all further operands. Only dtypes matter here: every number is 0.5, every index 0.
    """
    waiting = list(dtypes)

    def floating(*shape: int) -> Tensor:
        dtype = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return torch.full(shape, 0.5, dtype=dtype, device=device).requires_grad_(requires_grad)

    def whole(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return _CALLS[op](floating, whole)


def autocast_result(op: str, device_type: str, *dtypes: torch.dtype) -> torch.dtype | None:
    """The dtype that comes out of an op under torch's own BF16 autocast, of a CPU or of a CUDA device.

    Where there is no GPU, "cuda" runs on tensors without data (FakeTensorMode), which go through the same dispatcher.
    None if the op refuses these operands.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, and only needed here

    kinds = FakeTensorMode() if device_type == "cuda" else contextlib.nullcontext()
    was = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)  # torch.autocast("cuda") switches itself off where there is no GPU
    torch.set_autocast_dtype(device_type, torch.bfloat16)
    try:
        with kinds:
            return call_op(op, *dtypes, device=device_type).dtype
    except RuntimeError:
        return None
    finally:
        torch.set_autocast_enabled(device_type, was[0])
        torch.set_autocast_dtype(device_type, was[1])


# --- scenarios: what drives the answers that are context managers, or are handed a model ------------------------------


def _apart(scenario: Callable) -> Callable:
    """Run a scenario on one thread, and switch off whatever modes an answer leaves on, with a last line that says so.

    Its tensors are tiny, and threads that wait for each other take far longer. A mode that stays on would work on
    everything that comes after it in this process, the next answer too.
    """

    @functools.wraps(scenario)
    def run(*args: object) -> object:
        threads, before = torch.get_num_threads(), [depth() for depth, _ in _MODE_STACKS]
        torch.set_num_threads(1)
        left = 0
        try:
            result = scenario(*args)
        finally:
            torch.set_num_threads(threads)
            for (depth, pop), start in zip(_MODE_STACKS, before, strict=True):
                while depth() > start:
                    pop()
                    left += 1
        return f"{result}\nafter its block the mode is still on" if left else result

    return run


# torch's two stacks of modes: how many are on one, and how the topmost is taken off.
_MODE_STACKS = (
    (torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack),
    (torch._C._len_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack),
)


def small_gpt(layers: int = 1, bias: bool = False, fused: bool = True, seed: int = 0, kind: type = GPT) -> GPT:
    """A GPT of 17 tokens, a context of 8 and a width of 8, with fresh weights; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(GPTConfig(17, 8, layers, 2, 8, 0.0, bias, fused))


def small_batch(batch: int = 2, length: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and targets for it, int64 (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(17, (2, batch, length), generator=generator))


class _Witness(GPT):
    """A GPT that notes how it is called."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.notes: list[str] = []
        self.device_type = "cpu"

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        given = "with targets" if targets is not None else "without targets"
        mode = "training" if self.training else "evaluating"
        self.notes.append(f"forward pass {given}, {mode}, autocast {_autocast_state(self.device_type)}")
        return super().forward(tokens, targets)


def _autocast_state(device_type: str) -> str:
    on = torch.is_autocast_enabled(device_type)
    return _name(torch.get_autocast_dtype(device_type)) if on else "off"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@_apart
def loss_facts(
    bf16_loss: Callable, device_type: str, batch: int = 2, length: int = 8, training: bool = True, seed: int = 0
) -> str:
    """What `bf16_loss` does with a small GPT and a batch: a line for each fact.

    device_type: any that autocast knows: the state of autocast can be seen without the device.
    """
    model, (x, y) = small_gpt(seed=seed, kind=_Witness).train(training), small_batch(batch, length, seed)
    model.device_type = device_type
    with torch.autocast(device_type, torch.bfloat16):
        right = GPT.forward(model, x, y)[1]
    with _autocast_restored(device_type):
        loss = bf16_loss(model, x, y, device_type)
        facts = [*model.notes, f"autocast afterwards: {_autocast_state(device_type)}"]
    facts.append(f"weights: {_kinds(model.parameters())}, {'training' if model.training else 'evaluating'}")
    facts.append(f"gradients before backward: {_kinds(p.grad for p in model.parameters())}")
    if not isinstance(loss, Tensor):
        return "\n".join([*facts, f"result: {type(loss).__name__}"])
    same = loss.shape == right.shape and loss.dtype == right.dtype and bool((loss == right).all())
    facts.append(f"result: {_name(loss.dtype)} of shape {tuple(loss.shape)}, {'' if same else 'not '}the model's loss")
    if loss.requires_grad and loss.dim() == 0 and loss.grad_fn is not None:
        with contextlib.suppress(RuntimeError):  # a graph that was used up already
            loss.backward()
    facts.append(f"gradients after backward: {_kinds(p.grad for p in model.parameters())}")
    return "\n".join(facts)


def _kinds(tensors: Iterator[Tensor | None]) -> str:
    return " and ".join(sorted({"none" if t is None else _name(t.dtype) for t in tensors}))


@contextlib.contextmanager
def _autocast_restored(device_type: str) -> Iterator[None]:
    """Whatever a body does to autocast and to gradients is undone after it."""
    was = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type), torch.is_grad_enabled()
    depth = _autocast_depth()
    try:
        yield
    finally:
        for _ in range(_autocast_depth() - depth):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, was[0])
        torch.set_autocast_dtype(device_type, was[1])
        torch.set_grad_enabled(was[2])


def _autocast_depth() -> int:
    """How many autocast blocks this is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _in_place(dtype: torch.dtype) -> Tensor:
    x = torch.ones(2, 3, dtype=dtype)
    x.add_(1).mul_(torch.full((3,), 2.0, dtype=dtype))
    return x


def _with_out(dtype: torch.dtype) -> Tensor:
    x, result = torch.ones(3, 3, dtype=dtype), torch.zeros(3, 3, dtype=dtype)
    torch.mul(x, x, out=result)
    torch.mm(x, x, out=result)
    return result


def _backward(dtype: torch.dtype) -> Tensor:
    x = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    (x @ x.t()).sum().backward()
    return x.grad


def _autocast_linear(dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.gelu(F.linear(torch.ones(2, 3, dtype=dtype).float(), torch.ones(4, 3)))


PROGRAMS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "a product": lambda dtype: torch.mm(torch.ones(2, 3, dtype=dtype), torch.ones(3, 2, dtype=dtype)),
    "two kinds": lambda dtype: torch.ones(2, 3, dtype=dtype) + torch.ones(2, 3),
    "the same twice": lambda dtype: torch.exp(torch.exp(torch.ones(3, dtype=dtype))),
    "a list": lambda dtype: torch.cat([torch.ones(2, dtype=dtype), torch.ones(2), torch.ones(1, dtype=torch.int64)]),
    "a list of results": lambda dtype: torch.ones(4, dtype=dtype).split(2)[1],
    "two results": lambda dtype: torch.ones(4, dtype=dtype).topk(2)[0],
    "whole numbers": lambda dtype: F.embedding(torch.tensor([0, 1]), torch.ones(3, 2, dtype=dtype)),
    "a mask": lambda dtype: torch.ones(3, dtype=dtype).masked_fill(torch.tensor([True, False, True]), 0.0),
    "no tensor": lambda dtype: torch.zeros(3, dtype=dtype),
    "in place": _in_place,
    "with out": _with_out,
    "casts": lambda dtype: torch.ones(3, dtype=dtype).to(torch.float16).to(torch.float64),
    "backward": _backward,
    "autocast": _autocast_linear,
}


@_apart
def recorded(recorder_class: type, program: str, dtype: torch.dtype) -> str:
    """What an `OpRecorder` notes of one of `PROGRAMS`, a line for each op, run with operands of `dtype`."""
    run, recorder = PROGRAMS[program], recorder_class()
    right = run(dtype)
    with recorder:
        result = run(dtype)
    run(dtype)  # after the block
    return "\n".join([*_op_lines(recorder), f"the result is {'' if torch.equal(result, right) else 'not '}the same"])


@_apart
def recorded_in_two_blocks(recorder_class: type, program: str, dtype: torch.dtype) -> str:
    """The same in the second of two blocks: the first ends with an error, and one more op runs between them."""
    recorder = recorder_class()
    with contextlib.suppress(ZeroDivisionError), recorder:
        torch.ones(2, dtype=dtype).neg()
        1 // 0  # noqa: B018
    torch.ones(2).sqrt()
    with recorder:
        PROGRAMS[program](dtype)
    return "\n".join(_op_lines(recorder))


@_apart
def recorded_gpt(recorder_class: type, precision: torch.dtype, layers: int, fused: bool, backward: bool) -> str:
    """What an `OpRecorder` notes of a small GPT: forward under autocast (float32: without), and backward if asked."""
    model, (x, y) = small_gpt(layers, fused=fused), small_batch()
    recorder = recorder_class()
    with recorder:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            _, loss = model(x, y)
        if backward:
            loss.backward()
    return "\n".join(_op_lines(recorder))


def _op_lines(recorder: object) -> list[str]:
    return [f"{name}: {_listed(ins)} -> {_listed(outs)}" for name, ins, outs in recorder.ops]


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return "(" + ", ".join(_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype) for dtype in dtypes) + ")"


class _Trace(TorchDispatchMode):
    """Lines of text for the ops of a block: what the scenarios below compare."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, op: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = op(*args, **(kwargs or {}))
        sides = [[x.dtype for x in tree_leaves(each) if isinstance(x, Tensor)] for each in ((args, kwargs), result)]
        self.lines.append(f"{op.overloadpacket.__name__}: {_listed(sides[0])} -> {_listed(sides[1])}")
        return result

    def __exit__(self, kind: type | None, error: BaseException | None, where: object) -> bool:
        """An op that refuses the dtypes that it is handed is a line too, the last one."""
        super().__exit__(kind, error, where)
        if isinstance(error, RuntimeError):
            self.lines.append(f"RuntimeError: {str(error).splitlines()[0]}")
        return isinstance(error, RuntimeError)

    def text(self) -> str:
        """The ops in order without casts and `detach`, and then how many of these there are of each kind."""
        own = [line for line in self.lines if not line.startswith(("_to_copy:", "detach:"))]
        rest = Counter(line for line in self.lines if line.startswith(("_to_copy:", "detach:")))
        return "\n".join([*own, *(f"{count} x {line}" for line, count in sorted(rest.items()))])


def _policy_of(table: tuple[tuple[str, str], ...]) -> Callable[[str], str]:
    rules = dict(table)
    return lambda op: rules.get(op, "as is")


@_apart
def traced_gpt(
    autocast_class: Callable, table: tuple, dtype: torch.dtype, layers: int, fused: bool, bias: bool, passes: int
) -> str:
    """All ops of a small GPT with their dtypes: forward `passes` times in one block, and backward after it.

    table: (op, policy) pairs; what is not in it is left as it is. Casts and `detach` come last, counted.
    """
    model, (x, y) = small_gpt(layers, bias, fused), small_batch()
    with _Trace() as trace:
        with autocast_class(_policy_of(table), dtype):
            losses = [model(x, y)[1] for _ in range(passes)]
        if losses[0].requires_grad:
            sum(losses).backward()
    return trace.text()


@_apart
def traced_op(autocast_class: Callable, table: tuple, dtype: torch.dtype, op: str, *dtypes: torch.dtype) -> str:
    """The trace of one op of `OPS` in a block, on operands of these dtypes (`call_op`)."""
    with _Trace() as trace, autocast_class(_policy_of(table), dtype):
        call_op(op, *dtypes)
    return trace.text()


@_apart
def traced_keywords(autocast_class: Callable, policy: str, dtype: torch.dtype, *dtypes: torch.dtype) -> str:
    """The trace of linear, addmm and stack whose operands are handed over by keyword, under one policy."""
    first, last = dtypes[0], dtypes[-1]
    table = tuple((op, policy) for op in ("linear", "addcmul", "stack"))
    with _Trace() as trace, autocast_class(_policy_of(table), dtype):
        F.linear(torch.ones(2, 3, dtype=first), weight=torch.ones(4, 3, dtype=first))
        torch.addcmul(torch.ones(3, dtype=first), tensor1=torch.ones(3, dtype=last), tensor2=torch.ones(3, dtype=last))
        torch.stack(tensors=[torch.ones(3, dtype=first), torch.ones(3, dtype=last)])
    return trace.text()


@_apart
def traced_weight(
    autocast_class: Callable, dtype: torch.dtype, uses: int, blocks: int, leaf: bool, requires_grad: bool
) -> str:
    """The trace of a weight that is used `uses` times in each of `blocks` blocks of one object, and once after them.

    leaf: whether the weight is one, or the result of an addition. Every block ends with an error.
    """
    x, weight = torch.ones(2, 3), torch.ones(4, 3).requires_grad_(requires_grad)
    weight = weight if leaf else weight + 0.5
    autocast = autocast_class(_policy_of((("linear", "lower precision"), ("exp", "fp32"))), dtype)
    with _Trace() as trace:
        for _ in range(blocks):
            with contextlib.suppress(ZeroDivisionError), autocast:
                for _ in range(uses):
                    torch.exp(F.linear(x, weight))
                1 // 0  # noqa: B018
        F.linear(x, weight)
    return trace.text()


@_apart
def weight_casts(
    count_weight_casts: Callable,
    layers: int,
    bias: bool,
    frozen: int,
    passes: int,
    cache_enabled: bool,
    length: int = 8,
) -> int:
    """What `count_weight_casts` says of a small GPT whose first `frozen` blocks are frozen."""
    model, (x, _) = small_gpt(layers, bias), small_batch(length=length)
    for block in model.blocks[:frozen]:
        block.requires_grad_(False)
    return count_weight_casts(model, x, passes, cache_enabled)


def _bfloat16_bits(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16 and back": lambda x: x.to(torch.bfloat16).float(),
    "float16 and back": lambda x: x.to(torch.float16).float(),
    "float8_e4m3fn and back": lambda x: x.to(torch.float8_e4m3fn).float(),
    "bfloat16 by its bits": _bfloat16_bits,
    "to bfloat16": lambda x: x.to(torch.bfloat16),
    "in place": lambda x: x.mul_(3).to(torch.bfloat16).float(),
}


def _last_one_up(x: Tensor) -> Tensor:
    moved = x.clone()
    moved.view(-1)[-1] = torch.nextafter(x.float().view(-1)[-1], torch.tensor(torch.inf)).to(x.dtype) + 2.0**-7
    return moved


# Stand-ins for a compiler: what each does to the result of the function that it "compiled".
COMPILERS: dict[str, Callable[[Callable], Callable]] = {
    "faithful": lambda f: f,
    "drops the casts": lambda f: lambda x: x.clone(),
    "loses minus zero": lambda f: lambda x: f(x) + 0.0,
    "turns minus zero round": lambda f: lambda x: torch.where(f(x) == 0, -f(x), f(x)),
    "another NaN": lambda f: lambda x: torch.where(f(x).isnan(), -f(x), f(x)),
    "NaN becomes zero": lambda f: lambda x: f(x).nan_to_num(0.0, torch.inf, -torch.inf),
    "the last one moves": lambda f: lambda x: _last_one_up(f(x)),
    "widens": lambda f: lambda x: f(x).double(),
    "flattens": lambda f: lambda x: f(x).reshape(-1),
}


def survives(survives_compile: Callable, rounding: str, compiler: str, x: Tensor) -> bool:
    """What `survives_compile` says of one of `ROUNDINGS` under one of the stand-ins for a compiler, `COMPILERS`."""
    return survives_compile(ROUNDINGS[rounding], x, COMPILERS[compiler])
