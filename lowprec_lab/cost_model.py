"""What a training step costs on paper: compute, memory and wire, in BF16 and FP8, from one GPU to ten thousand.

A step is the sum of five times, each of which is work divided by a rate:

    linear layers   2 M K N operations for each of their products, at the rate of a format; in FP8 the casts as well,
                    which are limited by memory: amax, cast and transposed copy of an operand read and write 6 bytes for
                    each of its elements in BF16
    attention       in BF16, whatever the layers are in
    the rest        norms, activations, residual sums, softmax, optimizer: limited by memory
    launches        a fixed time for each kernel that FP8 adds, which large layers hide and small ones do not
    wire            what is gathered, reduced and shared, of which a share cannot hide behind compute, and none of it
                    can where it takes longer than compute

Two numbers are fitted, each to one published figure: the time of a launch, to a small layer that FP8 makes slower, and
the rest's traffic, to Llama-3 8B on 8 H100. All other numbers are data sheets' or stated here as assumptions. `memory`
counts what a GPU has to hold, and nothing stops a plan that does not fit. Stragglers, failures and pipelines are left
out, and FP8's products are taken to reach the share of their peak that BF16's do, which is too much for single large
layers: see the last of `PUBLISHED`.

References: torchao/float8/README.md in pytorch/ao (0.80 and 1.39 of one layer; 1.25 of Llama-3 8B on 8 H100); IBM and
Meta, Supercharging Training using float8 and FSDP2, 2024, pytorch.org/blog/training-using-float8-fsdp2 (8B, 70B and
405B); NVIDIA, H100 data sheet; Rajbhandari et al., ZeRO, arXiv:1910.02054 (bytes of sharded data parallelism).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

CAST_BYTES = 6  # for an element in BF16: read for amax (2), read (2), write twice, as it is and transposed (1 + 1)
CASTS = 3  # of x, of the weight, of the gradient of the output
FP8_KERNELS = 9  # that FP8 adds to a layer's step: for each of three operands amax, scale and cast


@dataclass(frozen=True)
class Machine:
    """One GPU among others. Rates in operations and bytes a second; shares are of the data sheet's peaks.

    matmul, attention, memory: the shares that are reached. fast, slow: bytes a second between GPUs of one machine, and
    between machines, for each GPU. exposed: the share of wire time that does not hide behind compute. launch: seconds
    of a kernel that FP8 adds. traffic: how much more than the counted bytes the rest moves. memory_bytes: of one GPU.
    """

    bf16: float = 989e12
    fp8: float = 1979e12
    bandwidth: float = 3.35e12
    matmul: float = 0.78
    attention: float = 0.40
    memory: float = 0.92
    fast: float = 450e9
    slow: float = 50e9
    latency: float = 10e-6
    per_machine: int = 8
    exposed: float = 0.2
    memory_bytes: float = 80e9
    launch: float = 0.0
    traffic: float = 1.0


@dataclass(frozen=True)
class Model:
    """A transformer with gated MLPs and grouped keys. width, hidden, kv: of a token; kv of keys or values, together."""

    name: str
    layers: int
    width: int
    hidden: int
    kv: int
    vocabulary: int = 128_256

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(K, N) of the linear layers of a block."""
        d, h = self.width, self.hidden
        return (d, d), (d, self.kv), (d, self.kv), (d, d), (d, h), (d, h), (h, d)

    @property
    def size(self) -> int:
        """Trained numbers, without norms."""
        return self.layers * sum(k * n for k, n in self.linears) + 2 * self.vocabulary * self.width


LLAMA_8B = Model("Llama-3 8B", 32, 4096, 14336, 1024)
LLAMA_70B = Model("Llama-3 70B", 80, 8192, 28672, 1024)
LLAMA_405B = Model("Llama-3 405B", 126, 16384, 53248, 1024)


@dataclass(frozen=True)
class Plan:
    """How a model is trained: on `gpus`, weights sharded over all of them that do not split tensors.

    tensor: GPUs that split each layer. sequences: of each such group, in a step. context: tokens of a sequence.
    recompute: the share of the forward pass that is computed again in the backward pass.
    """

    gpus: int = 8
    tensor: int = 1
    sequences: int = 1
    context: int = 8192
    recompute: float = 0.5

    def __post_init__(self) -> None:
        if min(self.gpus, self.tensor, self.sequences, self.context) < 1:
            raise ValueError("gpus, tensor, sequences and context are 1 or more")
        if self.gpus % self.tensor:
            raise ValueError(f"groups of {self.tensor} GPUs do not divide {self.gpus}: tensor has to")
        if not 0 <= self.recompute <= 1:
            raise ValueError(f"recompute is a share, from 0 to 1, not {self.recompute:g}")


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, by what takes them. wire: that does not hide; carried: all seconds of wire."""

    linear: float
    casts: float
    attention: float
    rest: float
    wire: float
    carried: float
    wire_bytes: float
    tokens: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.linear + self.casts + self.attention + self.rest + self.wire

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.tokens / self.seconds


def layer_seconds(m: int, k: int, n: int, fp8: bool, machine: Machine, recompute: float = 0.0) -> tuple[float, float]:
    """(seconds of the products, seconds of the casts) of one linear layer, forward and backward, on one GPU."""
    operations = 2 * m * k * n * (3 + recompute)
    if not fp8:
        return operations / (machine.bf16 * machine.matmul), 0.0
    elements = (m * k + k * n) * (1 + recompute) + m * n
    moved = CAST_BYTES * elements / (machine.bandwidth * machine.memory)
    return operations / (machine.fp8 * machine.matmul), moved + FP8_KERNELS * machine.launch


def step(model: Model, plan: Plan, fp8: bool, machine: Machine) -> Cost:
    """The cost of a step on each GPU; `tokens` are those of one GPU: a group's, shared among its GPUs."""
    rows = plan.sequences * plan.context
    linear = casts = 0.0
    for k, n in model.linears:
        one, other = layer_seconds(rows, k, math.ceil(n / plan.tensor), fp8, machine, plan.recompute)
        linear, casts = linear + model.layers * one, casts + model.layers * other
    head = 6 * rows * model.width * model.vocabulary / plan.tensor
    linear += head / (machine.bf16 * machine.matmul)
    # Causal: each token sees half of the others. Backward computes the scores again: 2.5 times forward.
    attended = 2 * rows * plan.context * model.width * model.layers * (3.5 + plan.recompute) / plan.tensor
    attention = attended / (machine.bf16 * machine.attention)
    # 20 passes over what has the width and 8 over what is hidden, forward and backward, in BF16; logits in FP32.
    passes = model.layers * (20 * model.width + 8 * model.hidden) * (1 + plan.recompute / 3) * 2
    logits = 6 * model.vocabulary * 4
    optimizer = 28 * model.size / plan.gpus  # weight, gradient and two moments in FP32: read, and all but one written
    moved = machine.traffic * rows * (passes + logits) / plan.tensor + optimizer
    rest = moved / (machine.bandwidth * machine.memory)
    compute = linear + casts + attention + rest
    carried, wire_bytes = wire(model, plan, fp8, machine)
    exposed = max(carried - compute, 0.0) + machine.exposed * min(carried, compute)
    return Cost(linear, casts, attention, rest, exposed, carried, wire_bytes, rows // plan.tensor)


def wire(model: Model, plan: Plan, fp8: bool, machine: Machine) -> tuple[float, float]:
    """(seconds, bytes) that a GPU sends in a step: weights gathered twice, gradients reduced once, tensors split."""
    shards = plan.gpus // plan.tensor
    share = (shards - 1) / shards
    blocks = model.layers * sum(k * n for k, n in model.linears) / plan.tensor
    ends = 2 * model.vocabulary * model.width / plan.tensor
    sharded = share * (2 * (blocks * (1 if fp8 else 2) + ends * 2) + (blocks + ends) * 4)
    # Four gatherings or reductions of the activations in a block, and as many of gradients; codes of 8 bits in FP8.
    each = plan.sequences * plan.context * model.width * (plan.tensor - 1) / plan.tensor
    split = model.layers * (8 + 4 * plan.recompute) * each * (1.5 if fp8 else 2)
    over = machine.fast if plan.gpus <= machine.per_machine else machine.slow
    hops = 3 * model.layers * machine.latency * math.log2(max(shards, 1))
    seconds = sharded / over + split / machine.fast + hops
    return seconds, sharded + split


def memory(model: Model, plan: Plan, fp8: bool) -> float:
    """Bytes of one GPU: weights, gradients and moments in FP32, sharded; two whole blocks; what backward needs."""
    shards = plan.gpus // plan.tensor
    kept = 16 * model.size / plan.tensor / shards
    block = sum(k * n for k, n in model.linears) / plan.tensor
    rows = plan.sequences * plan.context
    inputs = (5 * model.width + 2 * model.kv + 3 * model.hidden) * (1 - plan.recompute) + model.width
    activations = 2 * rows * model.layers * inputs / plan.tensor
    return kept + 2 * block * (1 if fp8 else 2) + activations + 4 * rows * model.vocabulary / plan.tensor


def speedup(model: Model, plan: Plan, machine: Machine) -> float:
    """How many times as many tokens FP8 trains on in the same time."""
    return step(model, plan, False, machine).seconds / step(model, plan, True, machine).seconds


def layer_speedup(m: int, k: int, n: int, machine: Machine) -> float:
    """The same for one linear layer, forward and backward."""
    return sum(layer_seconds(m, k, n, False, machine)) / sum(layer_seconds(m, k, n, True, machine))


# --- published figures ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A figure that somebody measured. what: (model, plan), or (M, K, N) of a layer. fitted: the model has seen it."""

    name: str
    what: tuple
    factor: float
    fitted: bool = False

    def predicted(self, machine: Machine) -> float:
        """What the cost model says."""
        of = layer_speedup if len(self.what) == 3 else speedup
        return of(*self.what, machine)


# Published are the model, the context, the way to split tensors and, for 8 and 512, the number of GPUs (else "128, 256
# and 512"); sequences and recomputing are assumptions of ours.
PUBLISHED = (
    Published("layer 1024 x 2048 x 1024", (1024, 2048, 1024), 0.80, fitted=True),
    Published("8B, 8 GPUs", (LLAMA_8B, Plan(8, context=8192)), 1.25, fitted=True),
    Published("8B, 128 GPUs", (LLAMA_8B, Plan(128, sequences=2)), 1.28),
    Published("70B, 256 GPUs", (LLAMA_70B, Plan(256, sequences=2, recompute=1.0)), 1.50),
    Published("70B, 512 GPUs", (LLAMA_70B, Plan(512, sequences=2, recompute=1.0)), 1.51),
    Published("405B, 256 GPUs", (LLAMA_405B, Plan(256, 4, sequences=2, recompute=1.0)), 1.52),
    Published("405B, 512 GPUs", (LLAMA_405B, Plan(512, 4, sequences=2, recompute=1.0)), 1.43),
    Published("layer 4096 x 8192 x 16384", (4096, 8192, 16384), 1.39),
)


@functools.cache
def h100() -> Machine:
    """An H100, its launch and its traffic fitted to the two published figures that say so."""
    layer, model = (each for each in PUBLISHED if each.fitted)
    machine = Machine()
    launch = _solve(lambda x: layer.predicted(dataclasses.replace(machine, launch=x)) - layer.factor, 0.0, 1e-3)
    machine = dataclasses.replace(machine, launch=launch)
    traffic = _solve(lambda x: model.predicted(dataclasses.replace(machine, traffic=x)) - model.factor, 0.0, 100.0)
    return dataclasses.replace(machine, traffic=traffic)


def _solve(falling, low: float, high: float) -> float:
    """Where a falling function is 0, by halving. Raises ValueError where it is not between the two ends."""
    if falling(low) < 0 or falling(high) > 0:
        raise ValueError("the published figure is outside of what this model can give")
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


# --- a picture --------------------------------------------------------------------------------------------------------

SIZES = (8, 32, 128, 512, 2048, 10_000)  # GPUs


def picture(machine: Machine | None = None):
    """What FP8 brings, and what share of its step is wire that does not hide, by the number of GPUs: a Figure.

    A line begins where the model fits into memory. What to see: how far each line runs level, and what wire takes.
    """
    from lowprec_lab import plots
    from lowprec_lab.formats import BF16, E4M3, FP32

    machine = machine or h100()
    plans = (
        (LLAMA_8B, Plan(sequences=1), BF16),
        (LLAMA_70B, Plan(sequences=2, recompute=1.0), E4M3),
        (LLAMA_405B, Plan(tensor=4, sequences=2, recompute=1.0), FP32),
    )
    with plots.style():
        made, (upper, lower) = plots.figure(9, 6.5, rows=2, sharex=True)
        for model, plan, fmt in plans:
            at = [dataclasses.replace(plan, gpus=gpus) for gpus in SIZES]
            at = [each for each in at if memory(model, each, False) <= machine.memory_bytes]
            color = plots.color_of(fmt)
            steps = [step(model, each, True, machine) for each in at]
            for axes, values in (
                (upper, [speedup(model, each, machine) for each in at]),
                (lower, [100 * each.wire / each.seconds for each in steps]),
            ):
                axes.plot([each.gpus for each in at], values, marker="o", markersize=4, color=color)
                axes.annotate(
                    model.name.removeprefix("Llama-3 "), (SIZES[-1], values[-1]), xytext=(6, 0),
                    textcoords="offset points", va="center", color=color, fontweight="bold", annotation_clip=False,
                )  # fmt: skip
        upper.set_title("tokens a second, FP8 / BF16")
        lower.set_title("wire that does not hide, % of an FP8 step")
        lower.set_xscale("log")
        lower.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
        lower.minorticks_off()
        lower.set_xlabel("GPUs")
        for axes in (upper, lower):
            axes.grid()
    return made
