"""Checks and known misconceptions of chapter 10.

Models, optimizers and scales that write down what happens to them are made in the scenarios of recipes.py. Products
are compared bit for bit on whole numbers whose sums are exact, and elsewhere with chapter 08's bound.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.formats import E2M1, E4M3, E4M3FNUZ, E5M2, Format
from lowprec_lab.graders import float8_linear_oracle as products
from lowprec_lab.graders import recipes_oracle as exact
from lowprec_lab.graders import rounding_oracle
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for
from lowprec_lab.recipes import (
    NAMES,
    converted,
    delayed_casts,
    delayed_step,
    gradients_used,
    padded_step,
    scaling_facts,
    scaling_refuses,
    scaling_resumed,
    scaling_steps,
    steps_of,
    steps_told,
    update_refuses,
)

for _function in (
    exact.delayed_update, exact.DelayedScaling, exact.delayed_linear, exact.padded_linear, exact.convert_to_float8,
    exact.training_step, exact.loss_gap,
):  # fmt: skip
    oracle_for(_function.__name__, _function)

E3M4 = Format("e3m4", 3, 4, specials="fn")
ALGOS = ("max", "most_recent")


def _no_negative_zeros(value: object) -> object:
    return value + 0.0 if isinstance(value, Tensor) and value.dtype.is_floating_point else value


def _each(case, got: object, want: tuple, parts: tuple[str, ...] = ()) -> None:
    """One comparison for each part of a tuple, whose parts need not be equally long."""
    if not isinstance(got, tuple) or len(got) != len(want):
        case.same_bits(got, tuple(torch.zeros(1) for _ in want), parts=parts)  # says that there is no such tuple
    else:
        for one, other in zip(got, want, strict=True):
            case.same_bits(_no_negative_zeros(one), _no_negative_zeros(other))


def _as_facts(*facts: str) -> str:
    return "; ".join(facts)


# --- 10.1 delayed_update ----------------------------------------------------------------------------------------------


def amaxes(rng: np.random.Generator, *shape: int, log2: float = 6) -> Tensor:
    """float32 above 0, of 2^-log2 to 2^log2."""
    return torch.from_numpy(np.exp2(rng.uniform(-log2, log2, shape)).astype(np.float32))


def _compare_updates(answer, case, history: Tensor, fmt: Format, margin: int, algo: str) -> None:
    scale = amaxes(case.rng, 1)[0]
    want = exact.delayed_update(history, scale, fmt, margin, algo)
    _each(case, answer(history, scale, fmt, margin, algo), want, ("history", "scale"))


@check_for("delayed_update", weight=2)
def histories_of_every_length(answer, case):
    """Histories of 1 to 8 steps, four formats, both algos."""
    for fmt, algo, length in itertools.product((E4M3, E5M2, E3M4, E2M1), ALGOS, (1, 2, 3, 5, 8)):
        for _ in range(case.count(1)):
            _compare_updates(answer, case, amaxes(case.rng, length), fmt, 0, algo)


@check_for("delayed_update")
def margins_of_every_kind(answer, case):
    """Margins of -3 to 8."""
    for margin, algo in itertools.product((-3, -1, 1, 2, 8), ALGOS):
        for _ in range(case.count(2)):
            _compare_updates(answer, case, amaxes(case.rng, 4), E4M3, margin, algo)


@check_for("delayed_update")
def histories_with_zeros_infinities_and_nan(answer, case):
    """Zeros, infinity and NaN in each place of a history of four; nothing but zeros."""
    for algo, value, place in itertools.product(ALGOS, (0.0, math.inf, math.nan), range(4)):
        for _ in range(case.count(1)):
            history = amaxes(case.rng, 4)
            history[place] = value
            _compare_updates(answer, case, history, E4M3, 0, algo)
    for algo, length in itertools.product(ALGOS, (1, 3, 4)):
        _compare_updates(answer, case, torch.zeros(length), E5M2, 0, algo)


@check_for("delayed_update")
def magnitudes_at_the_ends_of_float32(answer, case):
    """1e-45 to 1e-34, whose scales are infinite or nearly; 1e30 to the largest float32."""
    for fmt, algo in itertools.product((E4M3, E5M2), ALGOS):
        for amax in (1e-45, 1e-40, 1e-37, 1.3e-36, 1.4e-36, 1e-34, 1e30, 3.4028235e38):
            history = torch.tensor([amax, 0.0, amax / 2])
            _compare_updates(answer, case, history, fmt, 0, algo)


@check_for("delayed_update")
def many_steps_in_a_row(answer, case):
    """The scales of 12 steps, each with its own amax, with histories of 1, 3 and 5 steps."""
    for length, algo, margin in itertools.product((1, 3, 5), ALGOS, (0, 1)):
        for _ in range(case.count(1)):
            x = amaxes(case.rng, 12)
            x[case.rng.integers(12)], x[case.rng.integers(12)] = 1000.0, math.inf
            want = steps_of(exact.delayed_update, x, length, E4M3, margin, algo)
            case.same_bits(answer.run(steps_of, x, length, E4M3, margin, algo), want)


@check_for("delayed_update")
def algos_that_do_not_exist(answer, case):
    """Names of no algo: ValueError that lists both."""
    for name, length in (("mean", 3), ("Max", 1), ("", 2), ("mostrecent", 4)):
        case.same_bits(answer.run(update_refuses, name, length), "ValueError that lists max and most_recent")


@misconception("delayed_update", "A NaN is passed over: the scale follows the largest of the others.")
def passes_over_nan(history, scale, fmt, margin=0, algo="max"):
    def find(old, algo):
        return exact.largest(np.nan_to_num(old, nan=0.0, posinf=np.inf), algo)

    return exact.delayed_update(history, scale, fmt, margin, algo, find=find)


@misconception("delayed_update", 'By "most_recent" it takes the last of the history, which is the step before.')
def takes_the_last(history, scale, fmt, margin=0, algo="max"):
    def find(old, algo):
        exact.largest(old, algo)
        return old[-1] if algo == "most_recent" else exact.largest(old, algo)

    return exact.delayed_update(history, scale, fmt, margin, algo, find=find)


@misconception("delayed_update", "It moves the history before it looks: the oldest is gone, and history[0] is 0.")
def moves_first(history, scale, fmt, margin=0, algo="max"):
    def find(old, algo):
        return exact.largest(exact.moved(old), algo)

    return exact.delayed_update(history, scale, fmt, margin, algo, find=find)


@misconception("delayed_update", "It does not look at this step: the scale is that of the steps before.")
def without_this_step(history, scale, fmt, margin=0, algo="max"):
    def find(old, algo):
        exact.largest(old, algo)
        before = np.append(np.float32(0), old[1:])
        return exact.largest(before, "max") if algo == "max" else before[-1]

    return exact.delayed_update(history, scale, fmt, margin, algo, find=find)


@misconception("delayed_update", "It takes the largest whatever the algo is.")
def always_the_largest(history, scale, fmt, margin=0, algo="max"):
    def find(old, algo):
        return exact.largest(old, algo and exact.largest(old, algo) is not None and "max")

    return exact.delayed_update(history, scale, fmt, margin, algo, find=find)


@misconception("delayed_update", "The history does not move: this step's is set to 0 and lost.")
def does_not_move(history, scale, fmt, margin=0, algo="max"):
    def move(old):
        return np.append(np.float32(0), old[1:])

    return exact.delayed_update(history, scale, fmt, margin, algo, move=move)


@misconception("delayed_update", "The oldest stays in history[0], where the next step begins: nothing sets it to 0.")
def keeps_the_oldest(history, scale, fmt, margin=0, algo="max"):
    def move(old):
        return np.roll(old, -1)

    return exact.delayed_update(history, scale, fmt, margin, algo, move=move)


@misconception("delayed_update", "The history moves the other way: the step before is dropped, and the oldest stays.")
def moves_the_other_way(history, scale, fmt, margin=0, algo="max"):
    def move(old):
        return np.append(np.float32(0), np.roll(old, 1)[1:])

    return exact.delayed_update(history, scale, fmt, margin, algo, move=move)


@misconception("delayed_update", "A margin makes the scale larger: 2^margin, where it is 2^-margin.")
def margin_the_other_way(history, scale, fmt, margin=0, algo="max"):
    return exact.delayed_update(history, scale, fmt, -margin, algo)


@misconception("delayed_update", "It multiplies by 1 / A, which is rounded by itself: a division rounds once.")
def multiplies_by_the_reciprocal(history, scale, fmt, margin=0, algo="max"):
    def divide(amax, old, fmt, margin):
        right = exact.next_scale(amax, old, fmt, margin)
        if not 0 < amax < np.inf or amax < 1e-34:
            return right
        return np.float32(np.ldexp(exact.oracle.max_finite(fmt), -margin)) * (np.float32(1) / np.float32(amax))

    return exact.delayed_update(history, scale, fmt, margin, algo, divide=divide)


@misconception("delayed_update", "An infinite scale stays infinite: zeros times that are NaN.")
def infinite_scales(history, scale, fmt, margin=0, algo="max"):
    def divide(amax, old, fmt, margin):
        if not 0 < amax < np.inf:
            return old
        with np.errstate(over="ignore"):
            return np.float32(np.ldexp(exact.oracle.max_finite(fmt), -margin)) / np.float32(amax)

    return exact.delayed_update(history, scale, fmt, margin, algo, divide=divide)


@misconception("delayed_update", "Where A is no use the scale is 1 again, not what it was.")
def back_to_one(history, scale, fmt, margin=0, algo="max"):
    def divide(amax, old, fmt, margin):
        return exact.next_scale(amax, np.float32(1), fmt, margin)

    return exact.delayed_update(history, scale, fmt, margin, algo, divide=divide)


@misconception("delayed_update", "An infinite magnitude is taken like any other: the next scale is 0.")
def zero_for_infinity(history, scale, fmt, margin=0, algo="max"):
    def divide(amax, old, fmt, margin):
        return np.float32(0) if amax == np.inf else exact.next_scale(amax, old, fmt, margin)

    return exact.delayed_update(history, scale, fmt, margin, algo, divide=divide)


# --- 10.2 DelayedScaling ----------------------------------------------------------------------------------------------

_FORMATS = (E4M3, E5M2, E3M4, E4M3FNUZ)
_SEEN = ("codes", "scales", "histories")


def batches(rng: np.random.Generator, steps: int, count: int, n: int = 4, log2: float = 4) -> Tensor:
    """float32, (steps, count, n), of both signs; batches are 2^-log2 to 2^log2 times as large as each other."""
    sizes = rng.uniform(-log2, log2, (steps, count, 1)) + rng.uniform(-3, 3, (steps, count, n))
    return torch.from_numpy((np.exp2(sizes) * rng.choice([-1, 1], sizes.shape)).astype(np.float32))


def _compare_scalings(answer, case, x: Tensor, record: str, *settings) -> None:
    want = exact.scaling_steps(x, record, *settings)
    _each(case, answer.run(scaling_steps, x, record, *settings), want, _SEEN)


@check_for("DelayedScaling", weight=2)
def steps_of_one_batch(answer, case):
    """Six steps of four numbers that are 2^-7 to 2^7, with histories of 1, 2 and 4 steps; four formats."""
    for fmt, length in itertools.product(_FORMATS, (1, 2, 4)):
        for _ in range(case.count(1)):
            _compare_scalings(answer, case, batches(case.rng, 6, 1), "r", fmt, length, 0, "max")


@check_for("DelayedScaling")
def steps_of_several_batches(answer, case):
    """Two and three batches in a step, some of which are not recorded; both algos, margins of 0 and 2."""
    for record, algo, margin in itertools.product(("rr", "r-r", "--", "rrr"), ALGOS, (0, 2)):
        for _ in range(case.count(1)):
            x = batches(case.rng, 4, len(record))
            _compare_scalings(answer, case, x, record, E4M3, 3, margin, algo)


@check_for("DelayedScaling")
def numbers_beyond_the_format(answer, case):
    """Numbers that grow by 2^4 from step to step, so that the scale is too large; infinity and NaN among them."""
    for fmt, value in itertools.product(_FORMATS, (1.0, math.inf, -math.inf, math.nan)):
        for _ in range(case.count(1)):
            x = batches(case.rng, 4, 2, log2=1) * torch.tensor([1.0, 16.0, 256.0, 4096.0])[:, None, None]
            x[case.rng.integers(1, 4), case.rng.integers(2), 1] = value
            _compare_scalings(answer, case, x, "rr", fmt, 2, 0, "max")


@check_for("DelayedScaling")
def short_dtypes(answer, case):
    """BF16 and FP16, which become float32 before they are multiplied by the scale."""
    for dtype, fmt in itertools.product((torch.bfloat16, torch.float16), (E4M3, E5M2)):
        for _ in range(case.count(10)):
            _compare_scalings(answer, case, batches(case.rng, 4, 1, 6).to(dtype), "r", fmt, 2, 0, "max")


@check_for("DelayedScaling")
def states_that_are_taken_up(answer, case):
    """A scale that goes on where another one stood, which has lived on; a state of another length is refused."""
    for length, algo in itertools.product((2, 3, 5), ALGOS):
        for _ in range(case.count(1)):
            before, after = batches(case.rng, 4, 1)[:, 0], batches(case.rng, 3, 1)[:, 0]
            settings = (before, after, E4M3, length, 1, algo)
            want = scaling_resumed(exact.DelayedScaling, *settings)
            _each(case, answer.run(scaling_resumed, *settings), want, ("scales", "histories"))
    for length, other in ((2, 3), (16, 4), (5, 1024), (7, 1)):
        case.same_bits(answer.run(scaling_refuses, length, other), f"ValueError with {length} and {other}")


_FACTS = ("beginning", "result", "tensors", "gradient", "scale", "state", "empty")


@check_for("DelayedScaling")
def what_stays_and_what_changes(answer, case):
    """Two steps, an empty tensor, and a tensor with a gradient: which tensors are new, and which numbers stay."""
    for fmt, length, dtype in ((E4M3, 4, torch.float32), (E5M2, 2, torch.bfloat16), (E4M3, 0, torch.float16)):
        want = scaling_facts(exact.DelayedScaling, fmt, length, dtype)
        case.same_bits(answer.run(scaling_facts, fmt, length, dtype), want, show=_as_facts, parts=_FACTS)


@misconception("DelayedScaling", "It scales by the tensor at hand: that is current scaling, without any delay.")
class ScalesByTheTensor(exact.DelayedScaling):
    def scale_of(self, x):
        amax = np.maximum(self.history.numpy()[0] * 0, exact.amax_of(x))
        return torch.from_numpy(np.array(exact.next_scale(amax, self.scale.numpy()[()], self.fmt, self.margin)))


@misconception("DelayedScaling", "It records first and updates the scale at once: the history has this tensor already.")
class UpdatesBeforeItCasts(exact.DelayedScaling):
    def scale_of(self, x):
        history = self.history.numpy().copy()
        history[0] = np.maximum(history[0], exact.amax_of(x))
        amax = exact.largest(history, self.algo)
        return torch.from_numpy(np.array(exact.next_scale(amax, self.scale.numpy()[()], self.fmt, self.margin)))


@misconception("DelayedScaling", "It records the largest magnitude after scaling, not that of x.")
class RecordsWhatIsScaled(exact.DelayedScaling):
    def record(self, x):
        self.put(np.maximum(self.history.numpy()[0], exact.amax_of(x) * self.scale.numpy()[()]))


@misconception("DelayedScaling", "Each batch overwrites what the one before it recorded: the last one counts.")
class OverwritesBatches(exact.DelayedScaling):
    def record(self, x):
        if x.numel():
            self.put(exact.amax_of(x))


@misconception("DelayedScaling", "It compares by Python's max: NaN is larger than nothing, and is not recorded.")
class LosesNaN(exact.DelayedScaling):
    def record(self, x):
        self.put(max(self.history.numpy()[0], exact.amax_of(x)))


@misconception("DelayedScaling", "It records although it was told not to.")
class RecordsEverything(exact.DelayedScaling):
    def quantize(self, x, record=True):
        return super().quantize(x)


@misconception("DelayedScaling", "It does not saturate: what is beyond the format becomes infinity or NaN.")
class DoesNotSaturate(exact.DelayedScaling):
    def codes_of(self, x, scale):
        scaled = x.detach().float() * scale
        return rounding_oracle.encode(scaled, self.fmt, "nearest_even", "to_special").to(torch.uint8)


@misconception("DelayedScaling", "It multiplies in the dtype of x, and rounds there first.")
class MultipliesInShort(exact.DelayedScaling):
    def codes_of(self, x, scale):
        scaled = (x.detach() * scale.to(x.dtype)).float()
        if self.fmt.torch_dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            scaled = x.detach().float() * scale
        return rounding_oracle.encode(scaled, self.fmt).to(torch.uint8)


@misconception("DelayedScaling", "It has new tensors after every step: who holds the history does not see them.")
class MakesNewTensors(exact.DelayedScaling):
    def load(self, history, scale):
        self.history, self.scale = history.clone(), scale.clone()


@misconception("DelayedScaling", "A state is the tensors themselves: later steps change what was saved.")
class SharesItsState(exact.DelayedScaling):
    def state_dict(self):
        return {"history": self.history, "scale": self.scale}


@misconception("DelayedScaling", "A result has the very scale of the next steps: its value changes with the update.")
class SharesItsScale(exact.DelayedScaling):
    def scale_of(self, x):
        return self.scale


@misconception("DelayedScaling", "A margin and an algo that are given are not used.")
class ForgetsItsSettings(exact.DelayedScaling):
    def updated(self):
        return exact.delayed_update(self.history, self.scale, self.fmt)


@misconception("DelayedScaling", "A history of another length is taken as it is.")
class TakesAnyLength(exact.DelayedScaling):
    def load_state_dict(self, state):
        if len(state["history"]) == len(self.history):
            super().load_state_dict(state)
        else:
            self.history, self.scale = state["history"].clone(), state["scale"].clone()


# --- 10.3 delayed_linear ----------------------------------------------------------------------------------------------

_RESULTS = ("output", "gradient of x", "gradient of weight")
_FMTS = (E4M3, E4M3, E5M2)


def whole(rng: np.random.Generator, *shape: int, log2: int = 0) -> Tensor:
    """Whole numbers up to 40, times 2^log2, and a few that are 16 times as large."""
    numbers = rng.integers(-40, 41, shape) * rng.choice([1, 1, 1, 16], shape)
    return torch.from_numpy(np.ldexp(numbers.astype(np.float64), log2).astype(np.float32))


def powers(rng: np.random.Generator, *low: int) -> Tensor:
    """Scales that are powers of two: 2^low to 2^(low + 4) of each."""
    return torch.from_numpy(np.exp2([int(rng.integers(each, each + 5)) for each in low]).astype(np.float32))


def _step_wanted(x: Tensor, weight: Tensor, gradient: Tensor, scales: Tensor) -> list[tuple]:
    """(exact, bound, dtype, shape) of the output and both gradients."""
    x8, weight8, gradient8 = exact.quantized_operands(x, weight, gradient.to(x.dtype), scales, _FMTS)
    sides = ((x8, weight8.T), (gradient8, weight8), (gradient8.T, x8))
    shapes = ((*x.shape[:-1], len(weight)), x.shape, weight.shape)
    return [(*products.product(*both), shape) for both, shape in zip(sides, shapes, strict=True)]


def _compare_steps_of(answer, case, x: Tensor, weight: Tensor, gradient: Tensor, scales: Tensor) -> None:
    got = answer.run(delayed_step, x, weight, gradient, scales)
    dtypes = (x.dtype, x.dtype, weight.dtype)
    wanted, settled = [], []
    for place, (numbers, bound, shape) in enumerate(_step_wanted(x, weight, gradient, scales)):
        want = products.rounded(numbers, x.dtype).to(dtypes[place])
        one = got[place] if isinstance(got, tuple) and len(got) == 3 else got
        flat = one.reshape(want.shape) if isinstance(one, Tensor) and tuple(one.shape) == tuple(shape) else one
        near = products.settled(flat, numbers, bound, want) if dtypes[place] == x.dtype else flat
        settled.append(near.reshape(shape) if isinstance(near, Tensor) and near.shape == want.shape else near)
        wanted.append(want.reshape(shape))
    _each(case, tuple(settled) if isinstance(got, tuple) and len(got) == 3 else got, tuple(wanted), _RESULTS)


@check_for("delayed_linear", weight=2)
def whole_numbers_by_given_scales(answer, case):
    """Whole numbers whose sums are exact, three scales that are powers of two; float32, BF16 and FP16."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for _ in range(case.count(3)):
            m, k, n = (int(each) for each in case.rng.integers(2, 7, 3))
            x, weight = whole(case.rng, m, k, log2=-4).to(dtype), whole(case.rng, n, k, log2=-6).to(dtype)
            gradient = whole(case.rng, m, n, log2=-9).to(dtype)
            _compare_steps_of(answer, case, x, weight, gradient, powers(case.rng, 1, 3, 12))


@check_for("delayed_linear")
def inputs_of_every_shape(answer, case):
    """x of one, three and four dimensions, transposed, without rows; a float32 weight under BF16 numbers."""
    for lead in ((), (2, 3), (2, 1, 3), (0,), (2, 0)):
        for _ in range(case.count(1)):
            x, weight = whole(case.rng, *lead, 5, log2=-4), whole(case.rng, 4, 5, log2=-6)
            gradient = whole(case.rng, *lead, 4, log2=-9)
            _compare_steps_of(answer, case, x, weight, gradient, powers(case.rng, 1, 3, 12))
    for _ in range(case.count(2)):
        x, weight = whole(case.rng, 5, 3, log2=-4).t(), whole(case.rng, 5, 4, log2=-6).t()
        scales = powers(case.rng, 1, 3, 12)
        _compare_steps_of(answer, case, x, weight, whole(case.rng, 4, 3, log2=-9).t(), scales)
        short = whole(case.rng, 3, 5).to(torch.bfloat16)
        _compare_steps_of(answer, case, short, weight, whole(case.rng, 3, 4, log2=-9), scales)


@check_for("delayed_linear")
def numbers_of_any_size(answer, case):
    """Numbers that are not whole, scales that are no powers of two: within the bound of a float32 sum, in any order."""
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(case.count(3)):
            x, weight, gradient = (
                batches(case.rng, 1, rows, columns, log2=1)[0].to(dtype) for rows, columns in ((4, 9), (5, 9), (4, 5))
            )
            scales = amaxes(case.rng, 3, log2=3) * torch.tensor([8.0, 8.0, 1024.0])
            _compare_steps_of(answer, case, x, weight, gradient, scales)


@check_for("delayed_linear")
def what_is_quantized_and_computed(answer, case):
    """How often each tensor is quantized, recorded and not; frozen weights, and an input that needs no gradient."""
    for rows, record, frozen in itertools.product((2, 5), (True, False), ("", "weight", "x")):
        word = "recorded" if record else "cast"
        arrived = {"": "x and weight", "x": "weight", "weight": "x"}[frozen]
        want = (
            f"forward x {word}, weight {word}, grad_output none; then x {word}, weight {word}, grad_output {word}; "
            f"{1 if frozen else 2} products backward, gradients of {arrived}"
        )
        case.same_bits(answer.run(delayed_casts, rows, record, frozen), want)


@misconception("delayed_linear", "On the way back x and weight are quantized again, by the scales of that moment.")
def quantizes_again(x, weight, scalings, record=True):
    class Again(exact.Layer):
        def back(self):
            return self.cast_x(self.rows), self.cast_weight(self.weight)

    return exact.linear_by(Again, x, weight, scalings, record)


@misconception("delayed_linear", "The gradient is quantized by the scale of x, and so in E4M3.")
def gradient_by_the_scale_of_x(x, weight, scalings, record=True):
    class ByX(exact.Layer):
        def cast_gradient(self, gradient):
            return self.cast_x(gradient)

    return exact.linear_by(ByX, x, weight, scalings, record)


@misconception("delayed_linear", "The gradient is quantized twice, once for each product.")
def gradient_twice(x, weight, scalings, record=True):
    class Twice(exact.Layer):
        def gradients_for(self, gradient):
            return self.cast_gradient(gradient), self.cast_gradient(gradient)

    return exact.linear_by(Twice, x, weight, scalings, record)


@misconception("delayed_linear", "Gradients come from x and weight as they are, not from what was multiplied.")
def gradients_of_unquantized(x, weight, scalings, record=True):
    class Unquantized(exact.Layer):
        def back(self):
            return self.rows.double().numpy(), self.weight.double().numpy()

    return exact.linear_by(Unquantized, x, weight, scalings, record)


@misconception("delayed_linear", "The gradient that arrives is not quantized: its scaling never sees it.")
def gradient_as_it_is(x, weight, scalings, record=True):
    class AsItIs(exact.Layer):
        def cast_gradient(self, gradient):
            return gradient.double().numpy()

    return exact.linear_by(AsItIs, x, weight, scalings, record)


@misconception("delayed_linear", "Gradients are always recorded: record does not reach the way back.")
def always_records_gradients(x, weight, scalings, record=True):
    class Always(exact.Layer):
        def cast_gradient(self, gradient):
            return products.values(self.of_gradient.quantize(gradient))

    return exact.linear_by(Always, x, weight, scalings, record)


@misconception("delayed_linear", "Both products are computed, whether their gradient is wanted or not.")
def computes_both(x, weight, scalings, record=True):
    class Both(exact.Layer):
        def gradients(self, gradient, needs, shape):
            found = super().gradients(gradient, (True, True), shape)
            return tuple(each if wanted else None for each, wanted in zip(found, needs, strict=True))

    return exact.linear_by(Both, x, weight, scalings, record)


@misconception("delayed_linear", "The scales of x and of weight are exchanged.")
def exchanges_the_scales(x, weight, scalings, record=True):
    return exact.linear_by(exact.Layer, x, weight, (scalings[1], scalings[0], scalings[2]), record)


@misconception("delayed_linear", "No gradient arrives: codes are whole numbers, and autograd ends there.")
def cut(x, weight, scalings, record=True):
    made = exact.Layer(scalings, record)
    output = made.output(x.detach(), weight.detach())
    return output + 0.0 * (x.sum() + weight.sum()).nan_to_num().to(output.dtype)


@misconception("delayed_linear", "The weight is not quantized on the way forward.")
def weight_as_it_is(x, weight, scalings, record=True):
    class AsItIs(exact.Layer):
        def cast_weight(self, weight):
            return weight.double().numpy()

    return exact.linear_by(AsItIs, x, weight, scalings, record)


# --- 10.4 padded_linear -----------------------------------------------------------------------------------------------

_PADDED = ("operands", "output", "gradient of x", "gradient of weight")


def _compare_padded(answer, case, lead: tuple[int, ...], k: int, n: int, multiple: int) -> None:
    x, weight, gradient = (whole(case.rng, *shape) for shape in ((*lead, k), (n, k), (*lead, n)))
    rows, flat, back = math.prod(lead), products.rows_of(x).double(), products.rows_of(gradient).double()
    m, k, n = (exact.up(each, multiple) for each in (rows, k, n))
    results = (
        (flat @ weight.double().T).reshape(*lead, len(weight)), (back @ weight.double()).reshape(x.shape), back.T @ flat
    )  # fmt: skip
    want = (f"{(m, k)} and {(n, k)}, zeros around", *(each.float() for each in results))
    _each(case, answer.run(padded_step, x, weight, gradient, multiple), want, _PADDED)


@check_for("padded_linear", weight=2)
def sizes_that_do_not_divide(answer, case):
    """Sizes of 1 to 9 and multiples of 2, 4 and 8; all three sizes have to be filled up."""
    for multiple in (2, 4, 8):
        for _ in range(case.count(3)):
            m, k, n = (int(case.rng.choice([1, 3, 5, 7, 9])) for _ in range(3))
            _compare_padded(answer, case, (m,), k, n, multiple)


@check_for("padded_linear")
def one_size_that_does_not_divide(answer, case):
    """Only the rows, only the inputs, only the outputs; and none: then nothing is added."""
    for m, k, n in ((5, 4, 8), (4, 6, 4), (8, 4, 3), (4, 8, 4), (8, 8, 8)):
        for _ in range(case.count(1)):
            _compare_padded(answer, case, (m,), k, n, 4)


@check_for("padded_linear")
def rows_of_every_shape(answer, case):
    """x of one, three and four dimensions, whose rows together are filled up; no rows at all."""
    for lead in ((), (2, 5), (5, 1), (3, 2, 1), (2, 4), (0,), (3, 0)):
        for _ in range(case.count(1)):
            _compare_padded(answer, case, lead, 5, 6, 4)


@check_for("padded_linear")
def the_head_of_a_small_gpt(answer, case):
    """65 symbols, a width of 16, 2 batches of 9 tokens, and multiples of 16."""
    for lead in ((2, 9), (18,), (16,)):
        for _ in range(case.count(1)):
            _compare_padded(answer, case, lead, 16, 65, 16)


@misconception("padded_linear", "What is added are ones, and their products are part of every sum.")
def pads_with_ones(x, weight, linear, multiple=16):
    return exact.padded_by(x, weight, linear, multiple, fill=1.0)


@misconception("padded_linear", "Only the sizes of the layer are filled up, not the rows of x.")
def not_the_rows(x, weight, linear, multiple=16):
    return exact.padded_by(x, weight, linear, multiple, which=(False, True, True))


@misconception("padded_linear", "Only what is summed over is filled up, K; rows and outputs are left as they are.")
def only_the_sum(x, weight, linear, multiple=16):
    return exact.padded_by(x, weight, linear, multiple, which=(False, True, False))


@misconception("padded_linear", "It fills up at the end and takes the result from there: the wrong corner.")
def takes_the_wrong_corner(x, weight, linear, multiple=16):
    return exact.padded_by(x, weight, linear, multiple, corner=False)


@misconception("padded_linear", "A size that divides gets a whole multiple of zeros more.")
def one_multiple_more(x, weight, linear, multiple=16):
    def size(each, multiple):
        return each + multiple - each % multiple

    return exact.padded_by(x, weight, linear, multiple, size=size)


@misconception("padded_linear", "Everything is filled up to multiples of 16, whatever multiple says.")
def always_sixteen(x, weight, linear, multiple=16):
    return exact.padded_by(x, weight, linear, 16)


@misconception("padded_linear", "It calls linear twice.")
def calls_twice(x, weight, linear, multiple=16):
    exact.padded_linear(x.detach(), weight.detach(), linear, multiple)
    return exact.padded_linear(x, weight, linear, multiple)


@misconception("padded_linear", "No gradient reaches x and weight: their numbers are copied by .data.")
def copies_numbers(x, weight, linear, multiple=16):
    return exact.padded_linear(x.data, weight.data, linear, multiple)


@misconception("padded_linear", "Where a size does not divide it multiplies by itself, without linear.")
def goes_around(x, weight, linear, multiple=16):
    if any(size % multiple for size in (math.prod(x.shape[:-1]), *weight.shape)):
        return x @ weight.T
    return exact.padded_linear(x, weight, linear, multiple)


@misconception("padded_linear", "The rows of each matrix of x are filled up by themselves, not all rows together.")
def rows_of_each_batch(x, weight, linear, multiple=16):
    if x.dim() < 3:
        return exact.padded_linear(x, weight, linear, multiple)
    tall = exact.up(x.shape[-2], multiple)
    filled = torch.nn.functional.pad(x, (0, 0, 0, tall - x.shape[-2]))
    return exact.padded_linear(filled, weight, linear, multiple)[..., : x.shape[-2], :]


# --- 10.5 convert_to_float8 -------------------------------------------------------------------------------------------

_CONVERTED = ("result", "layers", "parameters")


def _compare_models(answer, case, *settings: str) -> None:
    want = converted(exact.convert_to_float8, *settings)
    case.same_bits(answer.run(converted, *settings), want, show=_as_facts, parts=_CONVERTED)


@check_for("convert_to_float8", weight=2)
def models_by_every_recipe(answer, case):
    """A model of several levels, and one whose last layer is tied to its embedding; the four recipes, and your own."""
    for kind, recipe in itertools.product(("nested", "tied"), (*NAMES, "your own")):
        _compare_models(answer, case, kind, recipe)


@check_for("convert_to_float8")
def layers_that_are_skipped(answer, case):
    """Nothing, a name, a part of one, several, and one that is nowhere."""
    for skip in (("nothing",), ("first",), ("inner",), ("of_block", "ahead"), ("head",), ("mlp",), ("0",)):
        _compare_models(answer, case, "nested", "rowwise", *skip)


@check_for("convert_to_float8")
def layers_in_several_places(answer, case):
    """A layer and a block that stand in two places; one of whose two names is skipped."""
    for kind, *skip in (
        ("shared",), ("shared", "again"), ("shared", "twice"), ("shared", "up", "last"), ("shared with the head",),
        ("shared with the head", "nothing"), ("shared with the head", "up"),
    ):  # fmt: skip
        _compare_models(answer, case, kind, "tensorwise", *skip)


@check_for("convert_to_float8")
def layers_of_other_classes(answer, case):
    """Subclasses of nn.Linear, one inside of multi-head attention; a model without linear layers; one of a subclass."""
    for kind, recipe in itertools.product(("subclasses", "no linear layer", "a changed linear layer"), NAMES):
        _compare_models(answer, case, kind, recipe)


@check_for("convert_to_float8")
def what_is_refused(answer, case):
    """Recipes that do not exist, also where there is nothing to convert; a model that is itself a linear layer."""
    for kind, recipe in itertools.product(("nested", "no linear layer", "shared"), ("blockwise", "", "Rowwise")):
        _compare_models(answer, case, kind, recipe)
    for recipe in NAMES:
        _compare_models(answer, case, "a linear layer", recipe)


@misconception("convert_to_float8", "Subclasses of nn.Linear are converted too, and lose what makes them special.")
def converts_subclasses(model, recipe, skip=("head",)):
    def linear(module):
        return isinstance(module, torch.nn.Linear) and not hasattr(module, "scalings")

    return exact.converted_by(model, recipe, skip, linear=linear)


@misconception("convert_to_float8", "Parameters are copied into the new layers: ties are cut.")
def copies_parameters(model, recipe, skip=("head",)):
    def layer(linear, recipe):
        made = exact.float8_layer(linear, recipe)
        made.weight = torch.nn.Parameter(linear.weight.detach().clone())
        made.bias = None if linear.bias is None else torch.nn.Parameter(linear.bias.detach().clone())
        return made

    return exact.converted_by(model, recipe, skip, layer=layer)


@misconception("convert_to_float8", "The head is converted as well: nothing is skipped.")
def skips_nothing(model, recipe, skip=("head",)):
    return exact.converted_by(model, recipe, ())


@misconception("convert_to_float8", "Only layers whose whole name is in skip stay, not those that have it in a part.")
def skips_whole_names(model, recipe, skip=("head",)):
    def skipped(names, skip):
        return any(name in skip for name in names)

    return exact.converted_by(model, recipe, skip, skipped=skipped)


@misconception("convert_to_float8", "A layer is skipped by its own name alone; the names of its parents do not count.")
def skips_own_names(model, recipe, skip=("head",)):
    def skipped(names, skip):
        return exact.skipped_by_text([name.rpartition(".")[2] for name in names], skip)

    return exact.converted_by(model, recipe, skip, skipped=skipped)


@misconception("convert_to_float8", "A layer with two places is converted twice: two layers, which return two names.")
def converts_places(model, recipe, skip=("head",)):
    slots = [
        slot
        for slot in exact.places_of(model)
        if exact.is_linear(slot[0]._modules[slot[1]]) and not exact.skipped_by_text([slot[2]], skip)
    ]
    exact.converted_by(torch.nn.ModuleDict(), recipe, ())
    exact.converted_by(model, recipe, ("",))
    layers = [exact.float8_layer(parent._modules[own], recipe) for parent, own, _ in slots]
    for (parent, own, _), layer in zip(slots, layers, strict=True):
        parent._modules[own] = layer
    return [name for _, _, name in slots]


@misconception("convert_to_float8", "A layer with two places is replaced in the first one only.")
def first_place_only(model, recipe, skip=("head",)):
    def places(model):
        seen, found = set(), []
        for parent, own, name in exact.places_of(model):
            if id(parent._modules[own]) not in seen:
                seen.add(id(parent._modules[own]))
                found.append((parent, own, name))
        return found

    return exact.converted_by(model, recipe, skip, places=places)


@misconception("convert_to_float8", "Every name of a converted layer is returned, not the first alone.")
def returns_every_name(model, recipe, skip=("head",)):
    names = {}
    for parent, own, name in exact.places_of(model):
        names.setdefault(id(parent._modules[own]), []).append(name)
    by_first = {each[0]: each for each in names.values()}
    return [name for first in exact.converted_by(model, recipe, skip) for name in by_first[first]]


@misconception("convert_to_float8", "Layers inside of other modules stay: it looks at the model's own children.")
def children_only(model, recipe, skip=("head",)):
    def places(model):
        return [slot for slot in exact.places_of(model) if "." not in slot[2]]

    return exact.converted_by(model, recipe, skip, places=places)


@misconception("convert_to_float8", "A recipe that does not exist is noticed only where a layer is converted.")
def notices_late(model, recipe, skip=("head",)):
    return exact.converted_by(model, recipe, skip, check=False)


@misconception("convert_to_float8", "Nothing is said of a model that is itself a linear layer, and nothing happens.")
def says_nothing(model, recipe, skip=("head",)):
    return exact.converted_by(model, recipe, skip, root=False)


@misconception("convert_to_float8", "Sizes that are no multiple of 16 are left out, which PaddedLinear is made for.")
def leaves_odd_sizes(model, recipe, skip=("head",)):
    def linear(module):
        return exact.is_linear(module) and module.in_features % 16 == 0 and module.out_features % 16 == 0

    return exact.converted_by(model, recipe, skip, linear=linear)


# --- 10.6 training_step -----------------------------------------------------------------------------------------------

# Norms of these are whole numbers, and so are the norms of the first two and of the last two.
SQUARES = ((3, 4, 0, 12), (4, 3, 12, 0), (6, 8, 24, 0), (0, 3, 4, 0), (0, 5, 0, 12), (8, 0, 0, 15), (5, 12, 84, 0),
           (6, 8, 0, 0), (9, 12, 20, 0), (3, 4, 0, 0), (12, 16, 0, 21), (0, 0, 3, 0))  # fmt: skip


def gradients_of(rng: np.random.Generator, steps: int, count: int, log2: int = 0) -> Tensor:
    """float32, (steps, count, 4): whole numbers times 2^log2, the mean over each step's batches one of SQUARES."""
    means = np.array([SQUARES[rng.integers(len(SQUARES))] for _ in range(steps)])[:, None]
    apart = 4 * rng.integers(-9, 10, (steps, count, 4))
    apart[:, -1] -= apart.sum(axis=1)
    numbers = (means * rng.choice([-1, 1], means.shape) + apart) * 2.0**log2
    return torch.from_numpy(numbers.astype(np.float32))


def _compare_training(answer, case, x: Tensor, scalings: int, clip: float) -> None:
    told = exact.steps_told(x, scalings, clip)
    case.same_bits(answer.run(steps_told, x, scalings, clip), told, show=in_turn)
    want = exact.gradients_used(x, clip)
    case.same_bits(
        _no_negative_zeros(exact.as_clipped(answer.run(gradients_used, x, scalings, clip), want)),
        _no_negative_zeros(want),
    )


def in_turn(*told: str) -> str:
    """What was told of each step, as it is shown in a verdict."""
    return "; ".join(f"{number}: {each}" for number, each in enumerate(told, start=1))


@check_for("training_step", weight=2)
def steps_without_clipping(answer, case):
    """Three steps of 1, 2 and 4 batches, with no, one and three scales; gradients from before are left behind."""
    for count, scalings in itertools.product((1, 2, 4), (0, 1, 3)):
        for _ in range(case.count(1)):
            _compare_training(answer, case, gradients_of(case.rng, 3, count), scalings, 0.0)


@check_for("training_step")
def steps_that_are_clipped(answer, case):
    """Norms of 2^-2 to 800, a largest one of 1, 8 and 30: some are clipped, some are not."""
    for clip, log2 in ((1.0, -2), (8.0, 0), (30.0, 0), (30.0, 3)):
        for count in (1, 2, 4):
            for _ in range(case.count(1)):
                _compare_training(answer, case, gradients_of(case.rng, 3, count, log2), 1, clip)


@check_for("training_step")
def norms_that_are_not_finite(answer, case):
    """Infinity and NaN in one of the batches, with clipping and without: no step, and the scales move on."""
    for value, clip, scalings in itertools.product((math.inf, -math.inf, math.nan), (0.0, 1.0), (1, 2)):
        for _ in range(case.count(1)):
            x = gradients_of(case.rng, 3, 2)
            x[case.rng.integers(2), case.rng.integers(2), case.rng.integers(4)] = value
            _compare_training(answer, case, x, scalings, clip)


def _step(
    model, batches, optimizer, scalings, clip, *, fresh=True, keep_last=False, divide=True, each_clip=False,
    factor=exact.factor_for, alone=False, always=False, update="after", keep=False, told=None,
):  # fmt: skip
    """The right step, with one of its parts replaced."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    totals = [None if fresh or each.grad is None else each.grad.clone() for each in parameters]
    losses = []
    for x, y in batches:
        if update == "before":
            _update(scalings, losses)
        loss = model(x, y)[1]
        losses.append(float(loss.detach()))
        found = list(torch.autograd.grad(loss, parameters, allow_unused=True))
        found = [each if each is None or not divide else each / len(batches) for each in found]
        if each_clip:
            found = _scaled(found, factor(_norm(found), clip))
        totals = found if keep_last else [_sum(a, b) for a, b in zip(totals, found, strict=True)]
        if update == "each":
            for scaling in scalings:
                scaling.update()
    norm = _norm(totals)
    clipped = totals if each_clip else _scaled(totals, factor(norm, clip))
    if alone:
        clipped = [each if each is None else each * factor(_norm([each]), clip) for each in totals]
    for parameter, each in zip(parameters, clipped, strict=True):
        parameter.grad = each
    if update == "first":
        _update(scalings, ())
    if always or math.isfinite(norm):
        optimizer.step()
    if not keep:
        model.zero_grad(set_to_none=True)
    if update == "after" or update == "if taken" and math.isfinite(norm):
        _update(scalings, ())
    mean = sum(losses) / (len(losses) if divide else 1)
    return told(losses, mean, norm, clip) if told else (mean, norm)


def _update(scalings, losses) -> None:
    if not losses:
        for scaling in scalings:
            scaling.update()


def _sum(a, b):
    return b if a is None else a if b is None else a + b


def _scaled(gradients, factor):
    return [each if each is None else each * factor for each in gradients]


def _norm(gradients) -> float:
    return exact.norm_of([each.numpy() for each in gradients if each is not None])


@misconception("training_step", "It adds up the gradients of the batches: their mean is that divided by their number.")
def adds_up(model, batches, optimizer, scalings=(), clip=1.0):
    def told(losses, mean, norm, clip):
        return mean / len(losses), norm

    return _step(model, batches, optimizer, scalings, clip, divide=False, told=told)


@misconception("training_step", "Gradients of each batch are clipped by themselves: the sum of them is what counts.")
def clips_each_batch(model, batches, optimizer, scalings=(), clip=1.0):
    return _step(model, batches, optimizer, scalings, clip, each_clip=True)


@misconception("training_step", "Each gradient is cleared before the next batch: only the last one is used.")
def last_batch_only(model, batches, optimizer, scalings=(), clip=1.0):
    return _step(model, batches, optimizer, scalings, clip, keep_last=True)


@misconception("training_step", "Gradients that were there before are part of the step.")
def old_gradients_too(model, batches, optimizer, scalings=(), clip=1.0):
    return _step(model, batches, optimizer, scalings, clip, fresh=False)


@misconception("training_step", "Every gradient is scaled to the largest norm: small ones are to stay as they are.")
def makes_small_ones_large(model, batches, optimizer, scalings=(), clip=1.0):
    def factor(norm, clip):
        return clip / norm if clip else 1.0

    return _step(model, batches, optimizer, scalings, clip, factor=factor)


@misconception("training_step", "Each parameter is clipped by its own norm, not by that of all together.")
def clips_each_alone(model, batches, optimizer, scalings=(), clip=1.0):
    return _step(model, batches, optimizer, scalings, clip, alone=True)


@misconception("training_step", "A largest norm of 0 makes every gradient 0: it is to mean that nothing is clipped.")
def clips_to_zero(model, batches, optimizer, scalings=(), clip=1.0):
    def factor(norm, clip):
        return clip / norm if norm > clip else 1.0

    return _step(model, batches, optimizer, scalings, clip, factor=factor)


@misconception("training_step", "The optimizer steps with gradients that are not finite, too.")
def steps_all_the_same(model, batches, optimizer, scalings=(), clip=1.0):
    return _step(model, batches, optimizer, scalings, clip, always=True)


@misconception("training_step", "Scales are updated only if the optimizer steps: an outlier is never let out.")
def updates_if_taken(model, batches, optimizer, scalings=(), clip=1.0):
    return _step(model, batches, optimizer, scalings, clip, update="if taken")


@misconception("training_step", "Scales are updated at the beginning of the step, before anything was recorded.")
def updates_at_the_beginning(model, batches, optimizer, scalings=(), clip=1.0):
    return _step(model, batches, optimizer, scalings, clip, update="before")


@misconception("training_step", "Scales are updated before the optimizer steps: the gradient is not used yet.")
def updates_before_the_optimizer(model, batches, optimizer, scalings=(), clip=1.0):
    return _step(model, batches, optimizer, scalings, clip, update="first")


@misconception("training_step", "Scales are updated after every batch: a step of four is four steps for them.")
def updates_for_each_batch(model, batches, optimizer, scalings=(), clip=1.0):
    return _step(model, batches, optimizer, scalings, clip, update="each")


@misconception("training_step", "Gradients stay where they are after the step.")
def leaves_gradients(model, batches, optimizer, scalings=(), clip=1.0):
    return _step(model, batches, optimizer, scalings, clip, keep=True)


@misconception("training_step", "The loss of the last batch is returned, not the mean of all.")
def returns_the_last_loss(model, batches, optimizer, scalings=(), clip=1.0):
    def told(losses, mean, norm, clip):
        return losses[-1], norm

    return _step(model, batches, optimizer, scalings, clip, told=told)


@misconception("training_step", "The norm after clipping is returned: a spike can no longer be seen.")
def returns_the_clipped_norm(model, batches, optimizer, scalings=(), clip=1.0):
    def told(losses, mean, norm, clip):
        return mean, norm * exact.factor_for(norm, clip)

    return _step(model, batches, optimizer, scalings, clip, told=told)


# --- 10.7 loss_gap ----------------------------------------------------------------------------------------------------


def runs_of(rng: np.random.Generator, seeds: list[int], mean: float = 2.0) -> tuple[tuple[int, float], ...]:
    """(seed, loss) of each seed, in any order."""
    return tuple((seed, float(mean * rng.uniform(0.9, 1.1))) for seed in rng.permutation(seeds).tolist())


def _compare_gaps(answer, case, run: tuple, baseline: tuple) -> None:
    want = exact.loss_gap(run, baseline)
    case.same_bits(exact.as_near(answer(run, baseline), want), want, parts=("mean", "standard error"))


@check_for("loss_gap", weight=2)
def the_same_seeds(answer, case):
    """Two to six seeds that both have, in any order."""
    for count in (2, 3, 5, 6):
        for _ in range(case.count(2)):
            seeds = case.rng.choice(2000, count, replace=False).tolist()
            _compare_gaps(answer, case, runs_of(case.rng, seeds), runs_of(case.rng, seeds, 1.5))


@check_for("loss_gap")
def seeds_that_one_of_them_lacks(answer, case):
    """Two or three seeds in common, and others that are left out."""
    for ours, theirs in (
        ([1, 2, 3], [2, 3, 4]),
        ([5, 1, 9], [9, 5]),
        ([7, 8], [1, 2, 8, 7, 3]),
        ([1, 2, 3, 4], [4, 1]),
    ):
        for _ in range(case.count(1)):
            _compare_gaps(answer, case, runs_of(case.rng, ours), runs_of(case.rng, theirs))


@check_for("loss_gap")
def a_single_pair(answer, case):
    """One seed in common: no standard error."""
    for ours, theirs in (([1], [1]), ([1, 2], [2]), ([3, 4], [5, 3]), ([0], [0, 1, 2])):
        _compare_gaps(answer, case, runs_of(case.rng, ours), runs_of(case.rng, theirs))


@check_for("loss_gap")
def no_pair(answer, case):
    """No seed in common, or no run at all: ValueError."""
    for ours, theirs in (([1, 2], [3, 4]), ([1], []), ([], [1, 2]), ([], [])):
        case.raises(ValueError, answer, runs_of(case.rng, ours), runs_of(case.rng, theirs))


def _gap(run, baseline, *, pairs=None, share=None, error=None):
    """The right figures, with one part replaced."""
    found = pairs(run, baseline) if pairs else [(mine, dict(baseline)[s]) for s, mine in run if s in dict(baseline)]
    if not found or not {s for s, _ in run} & {s for s, _ in baseline}:
        raise ValueError("no seed is in both")
    gaps = np.array([share(*each) if share else each[0] / each[1] - 1 for each in found])
    if error:
        return float(gaps.mean()), float(error(gaps))
    return float(gaps.mean()), float(gaps.std(ddof=1) / math.sqrt(len(gaps))) if len(gaps) > 1 else math.nan


@misconception("loss_gap", "Runs are paired in the order in which they stand, not by their seeds.")
def pairs_in_order(run, baseline):
    def pairs(run, baseline):
        return [(mine, other) for (_, mine), (_, other) in zip(run, baseline, strict=False)]

    return _gap(run, baseline, pairs=pairs)


@misconception("loss_gap", "Each run is compared with the mean of the baseline, not with the one of its seed.")
def against_the_mean(run, baseline):
    def pairs(run, baseline):
        seeds = {seed for seed, _ in run} & {seed for seed, _ in baseline}
        mean = np.mean([loss for seed, loss in baseline if seed in seeds]) if seeds else 0.0
        return [(mine, mean) for seed, mine in run if seed in seeds]

    return _gap(run, baseline, pairs=pairs)


@misconception("loss_gap", "Seeds that only one of them has are part of the means.")
def means_of_all(run, baseline):
    paired, error = _gap(run, baseline)
    ours, theirs = (np.mean([loss for _, loss in each]) for each in (run, baseline))
    extra = {seed for seed, _ in run} ^ {seed for seed, _ in baseline}
    return (float(ours / theirs - 1) if extra else paired), error


@misconception("loss_gap", "It divides by n where a sample has n - 1 degrees of freedom.")
def population(run, baseline):
    def error(gaps):
        return gaps.std() / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan

    return _gap(run, baseline, error=error)


@misconception("loss_gap", "It returns the standard deviation of the shares, not the error of their mean.")
def deviation(run, baseline):
    def error(gaps):
        return gaps.std(ddof=1) if len(gaps) > 1 else math.nan

    return _gap(run, baseline, error=error)


@misconception("loss_gap", "It divides the deviation by the number of pairs, not by its root.")
def without_the_root(run, baseline):
    def error(gaps):
        return gaps.std(ddof=1) / len(gaps) if len(gaps) > 1 else math.nan

    return _gap(run, baseline, error=error)


@misconception("loss_gap", "A single pair has an error of 0, as if it were certain.")
def certain(run, baseline):
    def error(gaps):
        return gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0

    return _gap(run, baseline, error=error)


@misconception("loss_gap", "The difference is a share of the run's own loss, not of the baseline's.")
def share_of_its_own(run, baseline):
    def share(mine, other):
        return (mine - other) / mine

    return _gap(run, baseline, share=share)


@misconception("loss_gap", "It is the difference in nats, not a share.")
def in_nats(run, baseline):
    def share(mine, other):
        return mine - other

    return _gap(run, baseline, share=share)


@misconception("loss_gap", "The sign is the other one: above 0 where the run is better.")
def the_other_sign(run, baseline):
    def share(mine, other):
        return 1 - mine / other

    return _gap(run, baseline, share=share)


# --- the page's questions ---------------------------------------------------------------------------------------------

question_for(
    "10.A",
    True,
    "True: isinstance is true of subclasses. The layer inside of nn.MultiheadAttention is one, and becomes a "
    "Float8Linear; yours stays. (nn.MultiheadAttention never calls it: it takes its weight. So nothing is won either.)",
    "Which test of the class does the traversal make: isinstance, or the type itself?",
    {False: "`type(module) is nn.Linear` would say no. Is that what stands there?"},
)
question_for(
    "10.B",
    False,
    "False: a layer cannot take its own place. A new one is returned, and who does not look at it goes on with the old "
    "one. Your convert_to_float8 raises ValueError instead.",
    "What happens at the top of swap_linear_layers, before anything is traversed?",
    {True: "That holds for a layer inside of a model. What replaces the model itself?"},
)
question_for(
    "10.C",
    112.0,
    "112, which is 448 / 4: fmaxf gives the other number where one of the two is NaN. Yours keeps the scale it has.",
    "C's fmaxf(2, NaN) is 2. So which numbers are left, and what is 448 divided by the largest of them?",
    {
        224.0: "2 is not the largest of the history: there is a 4 as well.",
        1.0: "That is what yours does: the NaN wins, and the scale stays.",
    },
)
question_for(
    "10.D",
    8,
    "8: four linear layers in each of the two blocks. The head was skipped, and embedding, positions and norms are "
    "still the tensors that the optimizer holds.",
    "Which layers were given a weight of their own? Compare both lists of parameters by `is`, or count the layers.",
    {9: "The head was skipped: it still has the weight of the embedding.", 4: "A block has four. And the model?"},
)
question_for(
    "10.E",
    16,
    "16: the step in which it is recorded still has the old scale; after it the outlier is in one of the 16 places for "
    "16 updates, and the scales of the 16 steps that follow come from it.",
    "Count the steps in the picture whose scale is low. Is the outlier's own step among them?",
    {
        15: "It is in the history for one step more: the largest is taken before the oldest is dropped.",
        17: "The outlier's own step is cast with the scale from before.",
        1024: "That is the usual length. Here it is 16.",
    },
)
