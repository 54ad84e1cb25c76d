"""Checks and known misconceptions of chapter 06."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.graders import loss_scaling_oracle as exact
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for
from lowprec_lab.loss_scaling import (
    adamw_steps,
    gradients_taken,
    refused,
    scales_after,
    scales_resumed,
    steps_told,
    unscaled,
)

for _function in (
    exact.unscale_, exact.found_nonfinite, exact.DynamicLossScaler, exact.ApexLossScaler, exact.HysteresisLossScaler,
    exact.MasterWeightAdamW, exact.fp16_train_step,
):  # fmt: skip
    oracle_for(_function.__name__, _function)


# --- 6.1 unscale_ -----------------------------------------------------------------------------------------------------


def some_gradients(rng: np.random.Generator, *shapes: tuple[int, ...] | None) -> list[Tensor | None]:
    """float32 gradients of 2^-20 to 2^20; None for None."""
    return [None if shape is None else _spread(rng, shape) for shape in shapes]


def _spread(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    sizes = np.ldexp(rng.uniform(1, 2, shape), rng.integers(-20, 21, shape)) * rng.choice([-1.0, 1.0], shape)
    return torch.from_numpy(np.asarray(sizes, dtype=np.float32))


def _compare_unscaled(answer, case, gradients: list[Tensor | None], scale: float) -> None:
    held = [None if each is None else each.clone() for each in gradients]
    exact.unscale_(held, scale)
    want = torch.cat([each.flatten() for each in held if each is not None])
    case.same_bits(answer.run(unscaled, gradients, scale), want)


@check_for("unscale_", weight=2)
def scales_that_are_powers_of_two_and_others(answer, case):
    """Three gradients of several shapes, with the scales 2^16, 2^-3, 1000, 3 and random ones."""
    for scale in (2.0**16, 0.125, 1000.0, 3.0, *(float(np.float32(case.rng.uniform(1, 9999))) for _ in range(4))):
        for _ in range(case.count(2)):
            _compare_unscaled(answer, case, some_gradients(case.rng, (3,), (2, 2), ()), scale)


@check_for("unscale_")
def parameters_without_a_gradient(answer, case):
    """None at the beginning, in the middle and at the end of the list."""
    for shapes in ((None, (2,), (3,)), ((2,), None, (3,)), ((2, 1), (3,), None), (None, None, (1,))):
        for _ in range(case.count(2)):
            _compare_unscaled(answer, case, some_gradients(case.rng, *shapes), 2.0 ** int(case.rng.integers(1, 20)))


@check_for("unscale_")
def gradients_that_are_not_finite(answer, case):
    """Infinities and NaN among numbers, zeros of both signs, the smallest and the largest float32."""
    edges = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, -3e38])
    for scale in (2.0**15, 1.0, 2.0**-10, 2.0**-130):
        _compare_unscaled(answer, case, [edges, _spread(case.rng, (2,))], scale)


@check_for("unscale_")
def gradients_in_fp16(answer, case):
    """FP16 gradients alone, after and before float32 ones: ValueError, and nothing is changed."""
    for place in range(3):
        for scale in (2.0**16, 8.0):
            gradients = some_gradients(case.rng, (2,), (3,), (2,))
            gradients[place] = gradients[place].to(torch.float16)
            want = "ValueError, and the gradients are as they were"
            case.same_bits(answer.run(refused, gradients, scale), want)


def _is_half(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.dtype == torch.float16


def _refuse_half(gradients) -> None:
    if any(_is_half(each) for each in gradients):
        raise ValueError("Attempting to unscale FP16 gradients.")


@misconception(
    "unscale_",
    "It divides, or multiplies in float64: torch multiplies by the float32 nearest to 1 / scale.",
)
def divides(gradients, scale):
    _refuse_half(gradients)
    for each in gradients:
        if each is not None:
            each.div_(scale)


@misconception("unscale_", "It makes new tensors: those that the optimizer holds stay scaled.")
def makes_new_tensors(gradients, scale):
    _refuse_half(gradients)
    for place, each in enumerate(gradients):
        if each is not None:
            gradients[place] = each * (1 / scale)


@misconception("unscale_", "It multiplies by the scale once more.")
def scales_again(gradients, scale):
    _refuse_half(gradients)
    for each in gradients:
        if each is not None:
            each.mul_(scale)


@misconception("unscale_", "It stops at the first parameter without a gradient.")
def stops_at_none(gradients, scale):
    _refuse_half(gradients)
    for each in gradients:
        if each is None:
            return
        each.mul_(1 / scale)


@misconception("unscale_", "It unscales the first gradient and returns: the `return` is inside the loop.")
def first_one_only(gradients, scale):
    _refuse_half(gradients)
    for each in gradients:
        if each is not None:
            each.mul_(1 / scale)
            return


@misconception("unscale_", "It unscales FP16 gradients too, and what was small enough to need a scale is lost again.")
def takes_fp16(gradients, scale):
    for each in gradients:
        if each is not None:
            each.mul_(1 / scale)


@misconception("unscale_", "It refuses an FP16 gradient when it meets it: those before it are changed already.")
def refuses_half_way(gradients, scale):
    for each in gradients:
        if _is_half(each):
            raise ValueError("Attempting to unscale FP16 gradients.")
        if each is not None:
            each.mul_(1 / scale)


@misconception("unscale_", "It sets what is not finite to 0: nobody can see the overflow any more.")
def hides_overflows(gradients, scale):
    _refuse_half(gradients)
    for each in gradients:
        if each is not None:
            each.mul_(1 / scale).masked_fill_(~each.isfinite(), 0.0)


# --- 6.2 found_nonfinite ----------------------------------------------------------------------------------------------


@check_for("found_nonfinite", weight=2)
def one_that_is_not_finite(answer, case):
    """Infinity, minus infinity or NaN, one element of three gradients, in each of them and at any place."""
    for value in (math.inf, -math.inf, math.nan):
        for which in range(3):
            for _ in range(case.count(2)):
                gradients = some_gradients(case.rng, (3,), (2, 2), (1,))
                flat = gradients[which].view(-1)
                flat[case.rng.integers(len(flat))] = value
                case.same_bits(answer(gradients), True)


@check_for("found_nonfinite")
def finite_and_huge(answer, case):
    """Four gradients of 3e38, two of them negative or none; 1e30 in several tensors; 70,000, beyond FP16's largest."""
    for huge in (3e38, 2.5e38, 3.4e38):
        case.same_bits(answer([torch.full((4,), huge)]), False)
        case.same_bits(answer([torch.tensor([huge, huge, -huge, -huge])]), False)
        case.same_bits(answer([torch.tensor([huge]), torch.tensor([[huge], [huge]])]), False)
    for large in (1e30, 7e25, 70_000.0, 65_536.0, -1e6):
        case.same_bits(answer([torch.full((2,), large), torch.tensor([1.0, large])]), False)


@check_for("found_nonfinite")
def ordinary_gradients(answer, case):
    """Finite ones of several shapes, 0 among them; empty tensors, None, and no gradient at all."""
    for _ in range(case.count(3)):
        case.same_bits(answer(some_gradients(case.rng, (4,), (2, 3), ())), False)
    for gradients in ([], [None], [torch.zeros(3), None], [torch.empty(0), torch.tensor([-0.0])]):
        case.same_bits(answer(gradients), False)
    for value in (math.inf, math.nan, -math.inf):
        case.same_bits(answer([torch.empty(0), None, torch.tensor([1.0, value])]), True)


@check_for("found_nonfinite")
def short_gradients(answer, case):
    """FP16 and BF16: their largest numbers, which are finite, and infinity and NaN."""
    for dtype in (torch.float16, torch.bfloat16):
        largest = torch.finfo(dtype).max
        case.same_bits(answer([torch.tensor([largest, largest, -1.0], dtype=dtype)]), False)
        for value in (math.inf, math.nan):
            case.same_bits(answer([torch.tensor([1.0], dtype=dtype), torch.tensor([value, 0.5], dtype=dtype)]), True)


def _there(gradients) -> list[Tensor]:
    return [each for each in gradients if each is not None]


@misconception("found_nonfinite", "It looks at the sum of a gradient: finite numbers can have an infinite sum.")
def looks_at_the_sum(gradients):
    return any(not math.isfinite(float(each.sum())) for each in _there(gradients))


@misconception("found_nonfinite", "It looks at the norm: squares above 3.4e38 are infinite, and the numbers are not.")
def looks_at_the_norm(gradients):
    return any(not math.isfinite(float(each.float().square().sum().sqrt())) for each in _there(gradients))


@misconception("found_nonfinite", "It finds NaN and no infinity.")
def nan_only(gradients):
    return any(bool(each.isnan().any()) for each in _there(gradients))


@misconception("found_nonfinite", "It finds infinity and no NaN.")
def infinity_only(gradients):
    return any(bool(each.isinf().any()) for each in _there(gradients))


@misconception("found_nonfinite", "It looks at the largest element: minus infinity is never the largest.")
def looks_at_the_largest(gradients):
    return any(not math.isfinite(float(each.max())) for each in _there(gradients) if each.numel())


@misconception("found_nonfinite", "It tells of the last gradient only: each one overwrites what was found before.")
def last_gradient_only(gradients):
    found = False
    for each in _there(gradients):
        found = not bool(each.isfinite().all())
    return found


@misconception("found_nonfinite", "It tells of the first gradient only: the `return` is inside the loop.")
def first_gradient_only(gradients):
    for each in _there(gradients):
        return not bool(each.isfinite().all())
    return False


@misconception("found_nonfinite", "It takes what is above 65504, the largest FP16, for an overflow.")
def above_fp16(gradients):
    return any(not bool((each.float().abs() <= 65504).all()) and each.dtype != torch.bfloat16
               or not bool(each.isfinite().all()) for each in _there(gradients))  # fmt: skip


@misconception("found_nonfinite", "It finds a gradient when all of its elements are infinite or NaN, not any.")
def all_instead_of_any(gradients):
    return any(each.numel() > 0 and not bool(each.isfinite().any()) for each in _there(gradients))


# --- 6.3 DynamicLossScaler --------------------------------------------------------------------------------------------

# The traces that the published scalers are compared on: what came of each step.
PUBLISHED = "x.x.x...xxx"


def random_steps(rng: np.random.Generator, n: int, bad: float) -> str:
    """n steps, each bad with a probability."""
    return "".join(rng.choice(["x", "."], n, p=[bad, 1 - bad]))


def as_row(*scales: float) -> str:
    """Scales as they are shown in a verdict."""
    return " ".join(f"{scale:.9g}" if isinstance(scale, float) else repr(scale) for scale in scales)


def dynamic_scales(answer, case, steps: str, *settings) -> None:
    want = scales_after(exact.DynamicLossScaler, steps, *settings)
    case.same_bits(answer.run(scales_after, steps, *settings), want, show=as_row)


@check_for("DynamicLossScaler", weight=2)
def traces_of_good_and_bad_steps(answer, case):
    """A short trace and random ones, with intervals of 1 to 6 good steps: as torch's GradScaler."""
    dynamic_scales(answer, case, PUBLISHED, 256.0, 2.0, 0.5, 3)
    for interval in (1, 2, 3, 4, 6):
        for bad in (0.1, 0.4):
            for _ in range(case.count(2)):
                dynamic_scales(answer, case, random_steps(case.rng, 24, bad), 2.0**10, 2.0, 0.5, interval)


@check_for("DynamicLossScaler")
def factors_that_are_no_powers_of_two(answer, case):
    """Growth by 1.1 to 3 and backoff by 0.1 to 0.9: every scale is a float32."""
    for _ in range(case.count(8)):
        factors = round(case.rng.uniform(1.1, 3), 3), round(case.rng.uniform(0.1, 0.9), 3)
        start = float(np.float32(case.rng.uniform(1, 70_000)))
        dynamic_scales(answer, case, random_steps(case.rng, 16, 0.3), start, *factors, int(case.rng.integers(1, 4)))


@check_for("DynamicLossScaler")
def floors_and_ceilings(answer, case):
    """Down to a floor, to 0 where there is none, up to a ceiling, and up to the edge of float32 where there is none."""
    inf = math.inf
    for low, high in ((1.0, 2.0**6), (0.75, 100.0), (8.0, inf), (0.0, 33.0), (0.5, 2.0**20)):
        for steps in ("xxxxxxx..x", "..........", random_steps(case.rng, 20, 0.5)):
            dynamic_scales(answer, case, steps, 32.0, 2.0, 0.5, 2, low, high)
    dynamic_scales(answer, case, "x" * 12 + "..", 2.0**-140, 2.0, 0.5, 2)
    for steps in ("......", "....x....", random_steps(case.rng, 12, 0.2)):
        dynamic_scales(answer, case, steps, 2.0**126, 2.0, 0.5, 2)
        dynamic_scales(answer, case, steps, 3e38 // 2**104 * 2**104, 2.0, 0.5, 1)


@check_for("DynamicLossScaler")
def states_taken_up_again(answer, case):
    """A scaler that goes on where another stood, which has met three more bad steps in the meantime."""
    for interval in (2, 3, 5):
        settings = (2.0**8, 2.0, 0.5, interval)
        pairs = [("." * (interval - 1), "...x.."), ("x..", "......"), ("", "....")]
        pairs += [(random_steps(case.rng, 9, 0.2), random_steps(case.rng, 9, 0.2)) for _ in range(case.count(2))]
        for before, after in pairs:
            want = scales_resumed(exact.DynamicLossScaler, before, after, *settings)
            case.same_bits(answer.run(scales_resumed, before, after, *settings), want, show=as_row)


@check_for("DynamicLossScaler")
def settings_that_are_left_out(answer, case):
    """No setting at all: 2^16, and 2,000 good steps before it grows."""
    for steps in ("x.x", "." * 12):
        dynamic_scales(answer, case, steps)
    dynamic_scales(answer, case, "..x" + "." * 2001, 2.0**4)


def _dynamic(good=None, bad=None, **memory):
    """A maker of a wrong DynamicLossScaler: rules (machine, settings) in place of the right ones."""

    def make(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale):
        s = (growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
        return exact.Machine(
            init_scale,
            lambda m: (good or _dynamic_good)(m, *s),
            lambda m: (bad or _dynamic_bad)(m, *s),
            **{"good": 0, **memory},
        )

    return make


def _dynamic_good(m, growth, backoff, interval, low, high):
    exact.count(m, interval, lambda: exact.grown_in_float32(m, growth, high))


def _dynamic_bad(m, growth, backoff, interval, low, high):
    m.scale, m.good = max(exact.single(m.scale * backoff), low), 0


@misconception("DynamicLossScaler", "It goes on counting good steps where it stood before a bad one.")
def keeps_the_count(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    def bad(m, growth, backoff, interval, low, high):
        m.scale = max(exact.single(m.scale * backoff), low)

    return _dynamic(bad=bad)(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)


@misconception(
    "DynamicLossScaler", "It does not count from 0 again after it grew: it grows at every step from then on."
)
def grows_at_every_step(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    def good(m, growth, backoff, interval, low, high):
        m.good += 1
        if m.good >= interval:
            exact.grown_in_float32(m, growth, high)

    return _dynamic(good=good)(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)


@misconception("DynamicLossScaler", "It grows one step late: after growth_interval + 1 good ones.")
def grows_one_step_late(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    return _dynamic()(init_scale, growth_factor, backoff_factor, growth_interval + 1, min_scale, max_scale)


@misconception("DynamicLossScaler", "It counts bad steps too: it grows every growth_interval steps, whatever happened.")
def counts_bad_steps(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    def bad(m, growth, backoff, interval, low, high):
        m.scale = max(exact.single(m.scale * backoff), low)
        exact.count(m, interval, lambda: exact.grown_in_float32(m, growth, high))

    return _dynamic(bad=bad)(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)


@misconception("DynamicLossScaler", "It has no floor: the scale falls below min_scale.")
def has_no_floor(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    return _dynamic()(init_scale, growth_factor, backoff_factor, growth_interval, 0.0, max_scale)


@misconception("DynamicLossScaler", "It has no ceiling: the scale rises above max_scale.")
def has_no_ceiling(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    return _dynamic()(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, math.inf)


@misconception("DynamicLossScaler", "It grows to infinity: a product beyond float32 is to leave the scale as it is.")
def grows_to_infinity(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    def good(m, growth, backoff, interval, low, high):
        def grow():
            m.scale = min(exact.single(m.scale * growth), high)

        exact.count(m, interval, grow)

    return _dynamic(good=good)(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)


@misconception(
    "DynamicLossScaler", "It keeps the scale in float64: torch keeps it in float32, and rounds each product."
)
def keeps_float64(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    def grow(m, growth, high):
        if exact.single(m.scale * growth) != math.inf:
            m.scale = min(m.scale * growth, high)

    def good(m, growth, backoff, interval, low, high):
        exact.count(m, interval, lambda: grow(m, growth, high))

    def bad(m, growth, backoff, interval, low, high):
        m.scale, m.good = max(m.scale * backoff, low), 0

    return _dynamic(good, bad)(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)


@misconception("DynamicLossScaler", "Its state is the scale alone: a run that goes on counts good steps from 0.")
def forgets_the_count(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    made = _dynamic()(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
    made.kept = ("scale",)
    return made


@misconception("DynamicLossScaler", "Its state is its own dictionary: it changes with every later step.")
def hands_out_itself(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    made = _dynamic()(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
    update, living = made.update, made.state_dict()

    def update_both(found_inf):
        update(found_inf)
        living.update(scale=made.scale, good=made.good)

    made.update, made.state_dict = update_both, lambda: living
    return made


@misconception("DynamicLossScaler", "It takes up the count of a state and not the scale.")
def forgets_the_scale(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    made = _dynamic()(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
    made.kept = ("good",)
    return made


@misconception("DynamicLossScaler", "It backs off by growth_factor: it divides by it, and backoff_factor is not used.")
def divides_by_growth(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=0.0, max_scale=math.inf
):
    return _dynamic()(init_scale, growth_factor, 1 / growth_factor, growth_interval, min_scale, max_scale)


# --- 6.4 ApexLossScaler -----------------------------------------------------------------------------------------------


def apex_scales(answer, case, steps: str, *settings) -> None:
    want = scales_after(exact.ApexLossScaler, steps, *settings)
    case.same_bits(answer.run(scales_after, steps, *settings), want, show=as_row)


@check_for("ApexLossScaler", weight=2)
def traces_of_apex(answer, case):
    """A short trace and random ones, with windows of 1 to 6 good steps."""
    apex_scales(answer, case, PUBLISHED, 256.0, 3)
    for window in (1, 2, 3, 4, 6):
        for bad in (0.1, 0.4):
            for _ in range(case.count(2)):
                apex_scales(answer, case, random_steps(case.rng, 24, bad), 2.0**10, window)


@check_for("ApexLossScaler")
def caps(answer, case):
    """Up to the largest scale, one that is no power of two among them; first scales at it and above it."""
    for cap in (2.0**12, 5000.0, 3000.0, 7000.0, 1024.0, 1000.0):
        for steps in (".........", "x........", random_steps(case.rng, 16, 0.3)):
            apex_scales(answer, case, steps, 1024.0, 2, None, cap)
    for steps in ("....", "x....", random_steps(case.rng, 12, 0.4)):
        apex_scales(answer, case, steps, 2.0**23, 1)


@check_for("ApexLossScaler")
def floors(answer, case):
    """Down to a floor of 0.75, 2 or 64; without one down past the smallest float32."""
    for floor in (0.75, 2.0, 64.0):
        for steps in ("xxxxxxxxxx", "xxxxxxxxx....", random_steps(case.rng, 16, 0.7)):
            apex_scales(answer, case, steps, 256.0, 2, floor)
    for steps in ("x" * 9, "xxxx.xxx..", random_steps(case.rng, 12, 0.8)):
        apex_scales(answer, case, steps, 2.0**-145, 2)
        apex_scales(answer, case, steps, 4.0, 2)


@check_for("ApexLossScaler")
def defaults_of_apex(answer, case):
    """No setting at all: 2^16, a window of 2,000, no floor, at most 2^24."""
    for steps in ("x.x", "." * 12):
        apex_scales(answer, case, steps)
    apex_scales(answer, case, "..x" + "." * 2001, 2.0**4)


def _apex(init_scale, scale_window, floor, cap, good=None, bad=None):
    def double(m):
        m.scale = min(m.scale * 2, cap)

    def halve(m):
        m.scale, m.good = max(m.scale / 2, floor or 0.0), 0

    good = good or (lambda m: exact.count(m, scale_window, lambda: double(m)))
    return exact.Machine(min(init_scale, cap), good, bad or halve, good=0)


@misconception("ApexLossScaler", "It does not cap the first scale: it begins above max_loss_scale.")
def begins_above_the_cap(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
    made = _apex(init_scale, scale_window, min_loss_scale, max_loss_scale)
    made.scale = init_scale
    return made


@misconception("ApexLossScaler", "It has no cap at all: neither the first scale nor growth ends at max_loss_scale.")
def has_no_cap(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
    return _apex(init_scale, scale_window, min_loss_scale, math.inf)


@misconception(
    "ApexLossScaler", "It grows only where the double is at most max_loss_scale: it never reaches a cap between."
)
def stops_before_the_cap(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
    def double(m):
        m.scale = m.scale * 2 if m.scale * 2 <= max_loss_scale else m.scale

    def good(m):
        exact.count(m, scale_window, lambda: double(m))

    return _apex(init_scale, scale_window, min_loss_scale, max_loss_scale, good)


@misconception("ApexLossScaler", "It has no floor: the scale falls below min_loss_scale.")
def forgets_the_floor(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
    return _apex(init_scale, scale_window, None, max_loss_scale)


@misconception("ApexLossScaler", "It takes a floor of 1 where min_loss_scale is None: there is none, then.")
def floor_of_one(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
    def bad(m):
        m.scale, m.good = max(m.scale / 2, min(m.scale, 1.0)), 0

    return _apex(init_scale, scale_window, min_loss_scale, max_loss_scale, bad=None if min_loss_scale else bad)


@misconception("ApexLossScaler", "It goes on counting good steps where it stood before a bad one.")
def apex_keeps_the_count(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
    def bad(m):
        m.scale = max(m.scale / 2, min_loss_scale or 0.0)

    return _apex(init_scale, scale_window, min_loss_scale, max_loss_scale, bad=bad)


@misconception("ApexLossScaler", "It counts skipped steps as well: a bad step can be the one that makes it grow.")
def apex_counts_bad_steps(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
    def double(m):
        m.scale = min(m.scale * 2, max_loss_scale)

    def bad(m):
        m.scale = max(m.scale / 2, min_loss_scale or 0.0)
        exact.count(m, scale_window, lambda: double(m))

    return _apex(init_scale, scale_window, min_loss_scale, max_loss_scale, bad=bad)


@misconception("ApexLossScaler", "It grows one step late: after scale_window + 1 good ones.")
def apex_grows_late(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
    return _apex(init_scale, scale_window + 1, min_loss_scale, max_loss_scale)


@misconception(
    "ApexLossScaler", "It keeps the scale in float32, where it is 0 below 2^-149: Apex has a float of Python."
)
def apex_in_float32(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24):
    def bad(m):
        m.scale, m.good = max(exact.single(m.scale / 2), min_loss_scale or 0.0), 0

    return _apex(init_scale, scale_window, min_loss_scale, max_loss_scale, bad=bad)


# --- 6.5 HysteresisLossScaler -----------------------------------------------------------------------------------------


def megatron_scales(answer, case, steps: str, *settings) -> None:
    want = scales_after(exact.HysteresisLossScaler, steps, *settings)
    case.same_bits(answer.run(scales_after, steps, *settings), want, show=as_row)


@check_for("HysteresisLossScaler", weight=2)
def traces_of_megatron(answer, case):
    """The trace of the page and random ones, with intervals of 2 to 4 good steps and a hysteresis of 1 to 4."""
    megatron_scales(answer, case, PUBLISHED, 256.0, 2.0, 0.5, 3, 1.0, 2)
    for interval in (2, 3, 4):
        for hysteresis in (1, 2, 3, 4):
            for bad in (0.2, 0.5):
                for _ in range(case.count(1)):
                    steps = random_steps(case.rng, 24, bad)
                    megatron_scales(answer, case, steps, 2.0**12, 2.0, 0.5, interval, 1.0, hysteresis)


@check_for("HysteresisLossScaler")
def other_factors(answer, case):
    """Growth by 4 or 1.5, backoff by 0.25 or 0.75."""
    for growth, backoff in ((4.0, 0.5), (2.0, 0.25), (1.5, 0.75)):
        for _ in range(case.count(2)):
            megatron_scales(answer, case, random_steps(case.rng, 20, 0.4), 2.0**12, growth, backoff, 2, 1.0, 2)


@check_for("HysteresisLossScaler")
def a_floor(answer, case):
    """Many bad steps, down to a floor of 1, 3 or 64, and up again."""
    for floor in (1.0, 3.0, 64.0):
        for steps in ("x" * 12, "xxxxxxxxx....xx", random_steps(case.rng, 20, 0.75)):
            megatron_scales(answer, case, steps, 256.0, 2.0, 0.5, 2, floor, 2)


@check_for("HysteresisLossScaler")
def defaults_of_megatron(answer, case):
    """No setting at all: 2^32, 1,000 good steps, a floor of 1 and a hysteresis of 2."""
    for steps in ("x.x.x", "xxxx", "xx" + "." * 1000 + "xx", "x" * 40):
        megatron_scales(answer, case, steps)


def _megatron(settings, good=None, bad=None, **memory):
    """A wrong HysteresisLossScaler: rules (machine, settings) in place of the right ones."""
    init_scale, *rest = settings
    return exact.Machine(
        init_scale,
        lambda m: (good or _megatron_good)(m, *rest),
        lambda m: (bad or _megatron_bad)(m, *rest),
        good=0,
        patience=rest[-1],
        **memory,
    )


def _megatron_good(m, growth, backoff, interval, low, hysteresis):
    exact.count(m, interval, lambda: m.__dict__.update(scale=m.scale * growth, patience=hysteresis))


def _megatron_bad(m, growth, backoff, interval, low, hysteresis):
    m.good, m.patience = 0, m.patience - 1
    if m.patience <= 0:
        m.scale = max(m.scale * backoff, low)


@misconception(
    "HysteresisLossScaler",
    "It refills the patience on every good step, as Apex's kernel does: overflows have to be consecutive then.",
)
def refills_on_good_steps(
    init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0, hysteresis=2
):
    def good(m, growth, backoff, interval, low, hysteresis):
        _megatron_good(m, growth, backoff, interval, low, hysteresis)
        m.patience = hysteresis

    return _megatron((init_scale, growth_factor, backoff_factor, growth_interval, min_scale, hysteresis), good)


@misconception(
    "HysteresisLossScaler", "It refills the patience when the scale falls: the next bad step is forgiven again."
)
def refills_after_backoff(
    init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0, hysteresis=2
):
    def bad(m, growth, backoff, interval, low, hysteresis):
        _megatron_bad(m, growth, backoff, interval, low, hysteresis)
        m.patience = hysteresis if m.patience <= 0 else m.patience

    return _megatron((init_scale, growth_factor, backoff_factor, growth_interval, min_scale, hysteresis), bad=bad)


@misconception("HysteresisLossScaler", "It never refills the patience: growth is to do that.")
def never_refills(
    init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0, hysteresis=2
):
    def good(m, growth, backoff, interval, low, hysteresis):
        before = m.patience
        _megatron_good(m, growth, backoff, interval, low, hysteresis)
        m.patience = before

    return _megatron((init_scale, growth_factor, backoff_factor, growth_interval, min_scale, hysteresis), good)


@misconception(
    "HysteresisLossScaler", "It waits one bad step too many: the scale falls when the patience is 0, not below it."
)
def waits_one_longer(
    init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0, hysteresis=2
):
    return _megatron((init_scale, growth_factor, backoff_factor, growth_interval, min_scale, hysteresis + 1))


@misconception(
    "HysteresisLossScaler", "It falls only when the patience is exactly 0: bad steps after that one change nothing."
)
def falls_once(
    init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0, hysteresis=2
):
    def bad(m, growth, backoff, interval, low, hysteresis):
        m.good, m.patience = 0, m.patience - 1
        if m.patience == 0:
            m.scale = max(m.scale * backoff, low)

    return _megatron((init_scale, growth_factor, backoff_factor, growth_interval, min_scale, hysteresis), bad=bad)


@misconception("HysteresisLossScaler", "It falls at every bad step: the hysteresis is not used.")
def has_no_patience(
    init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0, hysteresis=2
):
    return _megatron((init_scale, growth_factor, backoff_factor, growth_interval, min_scale, 1))


@misconception("HysteresisLossScaler", "It keeps the count of good steps when a bad one is forgiven.")
def counts_through_forgiven_steps(
    init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0, hysteresis=2
):
    def bad(m, growth, backoff, interval, low, hysteresis):
        good = m.good
        _megatron_bad(m, growth, backoff, interval, low, hysteresis)
        m.good = good if m.patience > 0 else 0

    return _megatron((init_scale, growth_factor, backoff_factor, growth_interval, min_scale, hysteresis), bad=bad)


@misconception("HysteresisLossScaler", "It never counts from 0 again after a bad step.")
def counts_through_bad_steps(
    init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0, hysteresis=2
):
    def bad(m, growth, backoff, interval, low, hysteresis):
        good = m.good
        _megatron_bad(m, growth, backoff, interval, low, hysteresis)
        m.good = good

    return _megatron((init_scale, growth_factor, backoff_factor, growth_interval, min_scale, hysteresis), bad=bad)


@misconception("HysteresisLossScaler", "It has no floor: the scale falls below min_scale.")
def megatron_without_floor(
    init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0, hysteresis=2
):
    return _megatron((init_scale, growth_factor, backoff_factor, growth_interval, 0.0, hysteresis))


@misconception("HysteresisLossScaler", "It grows one step late: after growth_interval + 1 good ones.")
def megatron_grows_late(
    init_scale=2.0**32, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, min_scale=1.0, hysteresis=2
):
    return _megatron((init_scale, growth_factor, backoff_factor, growth_interval + 1, min_scale, hysteresis))


# --- 6.6 MasterWeightAdamW --------------------------------------------------------------------------------------------

ADAM = (1e-3, 0.9, 0.999, 1e-8, 0.01)


def weights_for(rng: np.random.Generator, n: int) -> Tensor:
    """float16 weights of 2^-8 to 2."""
    return (_spread(rng, (n,)).sign() * torch.from_numpy(np.exp2(rng.uniform(-8, 1, n)))).to(torch.float16)


def _compare_adam(answer, case, weight: Tensor, gradients: Tensor, *settings: float) -> None:
    want = exact.adamw_rows(weight, gradients, *settings)
    case.same_bits(
        answer.run(adamw_steps, weight, gradients, *settings), want, show=weight_and_master, parts=("weight", "master")
    )


def weight_and_master(weight: Tensor, master: Tensor) -> str:
    """Both as they are shown in a verdict."""
    return f"weight {float(weight):.9g}, master {float(master):.9g}"


@check_for("MasterWeightAdamW", weight=2)
def steps_with_the_usual_settings(answer, case):
    """Six steps of four weights (two parameters), learning rate 1e-3, decay 0.01, gradients of 2^-20 to 2^20."""
    for _ in range(case.count(6)):
        _compare_adam(answer, case, weights_for(case.rng, 4), _spread(case.rng, (6, 4)), *ADAM)


@check_for("MasterWeightAdamW")
def many_settings(answer, case):
    """Learning rates of 1e-4 to 0.3, other betas, large and small eps, decay of 0 to 0.5."""
    for lr, beta1, beta2, eps, decay in (
        (0.3, 0.9, 0.95, 1e-8, 0.1), (1e-4, 0.8, 0.99, 1e-6, 0.5), (0.02, 0.0, 0.9, 1e-3, 0.0),
        (1e-2, 0.95, 0.98, 0.1, 0.3),
    ):  # fmt: skip
        for _ in range(case.count(2)):
            _compare_adam(
                answer, case, weights_for(case.rng, 4), _spread(case.rng, (6, 4)), lr, beta1, beta2, eps, decay
            )


@check_for("MasterWeightAdamW")
def updates_below_half_a_step(answer, case):
    """A hundred steps of 1e-5 on weights near 1: no single one moves a float16, all of them together do."""
    for _ in range(case.count(2)):
        weight = torch.ones(4, dtype=torch.float16) * torch.tensor([1, -1, 2, 0.5]).to(torch.float16)
        gradients = torch.from_numpy(case.rng.uniform(0.5, 1.5, (100, 4)).astype(np.float32))
        _compare_adam(answer, case, weight, gradients, 1e-5, 0.9, 0.999, 1e-8, 0.01)


@check_for("MasterWeightAdamW")
def gradients_of_zero(answer, case):
    """Zeros, tiny gradients whose squares vanish in float16, and huge ones."""
    for size in (0.0, 1e-7, 1e-12, 3e4):
        gradients = _spread(case.rng, (5, 4)).sign() * size
        _compare_adam(answer, case, weights_for(case.rng, 4), gradients, *ADAM)


def _plain(p, update, o):
    return p - np.float32(o.lr) * (update + np.float32(o.weight_decay) * p)


@misconception("MasterWeightAdamW", "It leaves out the bias correction: the first steps are too small.")
def no_bias_correction(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    def rule(t, p, g, memory, o):
        m, v = exact.moments(memory, g, o)
        return _plain(p, m / (np.sqrt(v) + np.float32(o.eps)), o)

    return exact.Adam(rule, parameters, lr, betas, eps, weight_decay)


@misconception("MasterWeightAdamW", "It puts eps under the square root.")
def eps_under_the_root(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    def rule(t, p, g, memory, o):
        m, v = exact.moments(memory, g, o)
        one, two = (np.float32(1 - beta**t) for beta in o.betas)
        return _plain(p, (m / one) / np.sqrt(v / two + np.float32(o.eps)), o)

    return exact.Adam(rule, parameters, lr, betas, eps, weight_decay)


@misconception(
    "MasterWeightAdamW", "It adds the decay to the gradient (L2): then the moments see it, which AdamW avoids."
)
def decay_in_the_gradient(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    def rule(t, p, g, memory, o):
        m, v = exact.moments(memory, g + np.float32(o.weight_decay) * p, o)
        return p - np.float32(o.lr) * exact.adam_update(m, v, t, *o.betas, o.eps)

    return exact.Adam(rule, parameters, lr, betas, eps, weight_decay)


@misconception("MasterWeightAdamW", "It leaves out the weight decay.")
def no_decay(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    def rule(t, p, g, memory, o):
        return p - np.float32(o.lr) * exact.adam_update(*exact.moments(memory, g, o), t, *o.betas, o.eps)

    return exact.Adam(rule, parameters, lr, betas, eps, weight_decay)


@misconception("MasterWeightAdamW", "Each step begins from the float16 weight: small updates are lost for ever.")
def forgets_the_masters(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    def rule(t, p, g, memory, o):
        p = p.astype(np.float16).astype(np.float32)
        return _plain(p, exact.adam_update(*exact.moments(memory, g, o), t, *o.betas, o.eps), o)

    return exact.Adam(rule, parameters, lr, betas, eps, weight_decay)


@misconception("MasterWeightAdamW", "It decays first, p * (1 - lr * decay), as torch.optim.AdamW does: other bits.")
def decays_first(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    def rule(t, p, g, memory, o):
        update = exact.adam_update(*exact.moments(memory, g, o), t, *o.betas, o.eps)
        return p * np.float32(1 - o.lr * o.weight_decay) - np.float32(o.lr) * update

    return exact.Adam(rule, parameters, lr, betas, eps, weight_decay)


@misconception("MasterWeightAdamW", "It counts steps from 0: the first bias correction divides by 1 - beta**0, by 0.")
def counts_from_zero(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    def rule(t, p, g, memory, o):
        with np.errstate(all="ignore"):
            return _plain(p, exact.adam_update(*exact.moments(memory, g, o), t - 1, *o.betas, o.eps), o)

    return exact.Adam(rule, parameters, lr, betas, eps, weight_decay)


@misconception("MasterWeightAdamW", "It counts a step for each parameter: the second one is at t = 2, 4, 6.")
def counts_parameters(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    calls = [0]

    def rule(t, p, g, memory, o):
        calls[0] += 1
        return _plain(p, exact.adam_update(*exact.moments(memory, g, o), calls[0], *o.betas, o.eps), o)

    return exact.Adam(rule, parameters, lr, betas, eps, weight_decay)


@misconception("MasterWeightAdamW", "It keeps the moments in float16: small squares are 0, and large ones infinite.")
def short_moments(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    def rule(t, p, g, memory, o):
        return _plain(p, exact.adam_update(*exact.moments(memory, g, o, np.float16), t, *o.betas, o.eps), o)

    return exact.Adam(rule, parameters, lr, betas, eps, weight_decay)


@misconception(
    "MasterWeightAdamW", "It works in float64 and rounds at the end of a step: each operation is a float32 one."
)
def in_float64(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    def rule(t, p, g, memory, o):
        zeros = np.zeros(g.shape)
        memory["m"], memory["v"] = exact.adam_moments(
            memory.get("m", zeros), memory.get("v", zeros), g.astype(np.float64), *o.betas
        )
        update = exact.adam_update(memory["m"], memory["v"], t, *o.betas, o.eps)
        return p - o.lr * (update + o.weight_decay * p)

    return exact.Adam(rule, parameters, lr, betas, eps, weight_decay)


@misconception(
    "MasterWeightAdamW", "It changes the masters and not the parameters: the model computes with old weights."
)
def never_writes_back(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    def rule(t, p, g, memory, o):
        return _plain(p, exact.adam_update(*exact.moments(memory, g, o), t, *o.betas, o.eps), o)

    made = exact.Adam(rule, parameters, lr, betas, eps, weight_decay)
    made.write = lambda parameter, master: None
    return made


# --- 6.7 fp16_train_step ----------------------------------------------------------------------------------------------

# (a, b) and (c, d): both of these norms and that of all four are whole numbers, so any order of summation gives them.
SQUARES = ((3, 4, 0, 12), (4, 3, 12, 0), (6, 8, 24, 0), (0, 3, 4, 0), (0, 5, 0, 12), (8, 0, 0, 15), (5, 12, 84, 0),
           (6, 8, 0, 0), (9, 12, 20, 0), (3, 4, 0, 0), (12, 16, 0, 21), (0, 0, 3, 0))  # fmt: skip
NEVER = 1e9


def _compare_steps(answer, case, inputs: Tensor, *settings) -> None:
    rows, told = exact.train_rows(inputs, *settings)
    case.same_bits(answer.run(gradients_taken, inputs, *settings), rows)
    case.same_bits(answer.run(steps_told, inputs, *settings), told, show=in_turn)


def in_turn(*told: str) -> str:
    """What was told of each step, as it is shown in a verdict."""
    return "; ".join(f"{number}: {each}" for number, each in enumerate(told, start=1))


def whole(rng: np.random.Generator, steps: int, exponent: int = 0) -> Tensor:
    """Rows of four small whole numbers times a power of two: every sum of them is exact."""
    return torch.from_numpy(np.ldexp(rng.integers(-12, 13, (steps, 4)).astype(np.float32), exponent))


@check_for("fp16_train_step", weight=2)
def steps_without_overflow(answer, case):
    """Six steps with gradients of 0 to 12; the scale doubles after two. Nothing is clipped."""
    for scale in (1.0, 2.0**8, 2.0**3):
        for _ in range(case.count(1)):
            _compare_steps(answer, case, whole(case.rng, 6), scale, 2, NEVER)


@check_for("fp16_train_step", weight=2)
def gradients_below_fp16(answer, case):
    """Gradients of 2^-26 to 2^-20, which are 0 or a few steps of FP16 unless they are scaled."""
    for exponent, scale in ((-26, 2.0**16), (-25, 2.0**12), (-24, 2.0**14)):
        for _ in range(case.count(1)):
            _compare_steps(answer, case, whole(case.rng, 6, exponent), scale, 100, NEVER)


@check_for("fp16_train_step", weight=2)
def steps_that_overflow(answer, case):
    """A scale that is too large for the first steps, or for single ones: they are skipped, and the scale halves."""
    for scale in (2.0**16, 2.0**17):
        for _ in range(case.count(1)):
            inputs = whole(case.rng, 6)
            inputs[:, case.rng.integers(4)] = 11.0
            _compare_steps(answer, case, inputs, scale, 3, NEVER)
    for value in (2.0**14, -(2.0**14), math.inf, math.nan):
        inputs = whole(case.rng, 6)
        inputs[2:4, case.rng.integers(4)] = value
        _compare_steps(answer, case, inputs, 2.0**8, 2, NEVER)


@check_for("fp16_train_step", weight=2)
def gradients_that_are_clipped(answer, case):
    """Gradients with norms from 2^-4 to 800, and a largest norm of 0.5, 1 or 8: some are clipped, some are not."""
    for max_norm in (0.5, 1.0, 8.0):
        for scale in (2.0**4, 2.0**10):
            for _ in range(case.count(1)):
                _compare_steps(answer, case, to_be_clipped(case.rng, max_norm), scale, 3, max_norm)


def to_be_clipped(rng: np.random.Generator, max_norm: float) -> Tensor:
    """Six rows of SQUARES times powers of two, whose factor is the same number in float32 and in float64."""
    rows = []
    while len(rows) < 6:
        row = np.ldexp(np.array(SQUARES[rng.integers(len(SQUARES))], np.float32), rng.integers(-6, 4))
        norm = np.sqrt((row.astype(np.float64) ** 2).sum())
        narrow = np.float32(max_norm) / (np.float32(norm) + np.float32(1e-6))
        if np.float32(max_norm / (norm + 1e-6)) == narrow:
            rows.append(row * rng.choice([-1, 1], 4))
    return torch.from_numpy(np.stack(rows).astype(np.float32))


def _step(
    model, x, y, optimizer, scaler, max_norm, *, backward_scale=None, unscale_by=None, before=None, clip=None,
    step=None, keep=False, tell=True, reported=None,
):  # fmt: skip
    """The right step, with one of its parts replaced."""
    loss = model(x, y)[1]
    (loss * (scaler.scale if backward_scale is None else backward_scale)).backward()
    gradients = [(before or _to_float32)(each.grad, scaler, max_norm) for each in model.parameters()]
    if not keep:
        model.zero_grad(set_to_none=True)
    if unscale_by is not None:
        gradients = [each * (1 / unscale_by) for each in gradients]
    else:
        gradients = [each * (1 / scaler.scale) for each in gradients]
    bad = exact.found_nonfinite(gradients)
    if step is not None or not bad:
        optimizer.step((clip or _clipped)(gradients, max_norm))
    if tell or not bad:
        scaler.update(bad)
    return (float(loss.detach()) if reported is None else reported(loss, scaler)), bad


def _to_float32(gradient, scaler, max_norm):
    return gradient.to(torch.float32, copy=True)


def _norm(gradients) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in gradients))


def _clipped(gradients, max_norm):
    factor = max_norm / (_norm(gradients) + 1e-6)
    return [each * factor for each in gradients] if factor < 1 else gradients


@misconception(
    "fp16_train_step", "It clips before it unscales: what is clipped to max_norm is then divided by the scale."
)
def clips_before_unscaling(model, x, y, optimizer, scaler, max_norm):
    loss = model(x, y)[1]
    (loss * scaler.scale).backward()
    gradients = [each.grad.float() for each in model.parameters()]
    model.zero_grad(set_to_none=True)
    bad = exact.found_nonfinite(gradients)
    if not bad:
        optimizer.step([each * (1 / scaler.scale) for each in _clipped(gradients, max_norm)])
    scaler.update(bad)
    return float(loss.detach()), bad


@misconception("fp16_train_step", "It does not unscale: the optimizer gets gradients that are as large as the scale.")
def never_unscales(model, x, y, optimizer, scaler, max_norm):
    return _step(model, x, y, optimizer, scaler, max_norm, unscale_by=1.0)


@misconception("fp16_train_step", "It does not scale the loss: small gradients are 0 in FP16 before they are unscaled.")
def never_scales(model, x, y, optimizer, scaler, max_norm):
    return _step(model, x, y, optimizer, scaler, max_norm, backward_scale=1.0, unscale_by=1.0)


@misconception(
    "fp16_train_step", "It unscales in FP16: what the scale has saved is rounded to FP16's small numbers again."
)
def unscales_in_fp16(model, x, y, optimizer, scaler, max_norm):
    def before(gradient, scaler, max_norm):
        return (gradient * (1 / scaler.scale)).float()

    return _step(model, x, y, optimizer, scaler, max_norm, before=before, unscale_by=1.0)


@misconception("fp16_train_step", "It takes the step with infinite gradients too: nothing is skipped.")
def steps_all_the_same(model, x, y, optimizer, scaler, max_norm):
    return _step(model, x, y, optimizer, scaler, max_norm, step=True)


@misconception(
    "fp16_train_step", "It tells the scaler of good steps only: after an overflow the scale stays too large."
)
def tells_of_good_steps_only(model, x, y, optimizer, scaler, max_norm):
    return _step(model, x, y, optimizer, scaler, max_norm, tell=False)


@misconception(
    "fp16_train_step", "It updates the scaler before it unscales: where the scale changes, gradients are off by 2."
)
def updates_too_early(model, x, y, optimizer, scaler, max_norm):
    loss = model(x, y)[1]
    (loss * scaler.scale).backward()
    gradients = [each.grad.float() for each in model.parameters()]
    model.zero_grad(set_to_none=True)
    bad = exact.found_nonfinite(gradients)
    scaler.update(bad)
    if not bad:
        optimizer.step(_clipped([each * (1 / scaler.scale) for each in gradients], max_norm))
    return float(loss.detach()), bad


@misconception("fp16_train_step", "It leaves the gradients there: the next backward adds to them.")
def leaves_gradients(model, x, y, optimizer, scaler, max_norm):
    return _step(model, x, y, optimizer, scaler, max_norm, keep=True)


@misconception("fp16_train_step", "It clips each gradient by its own norm: the norm is that of all of them together.")
def clips_each_alone(model, x, y, optimizer, scaler, max_norm):
    def clip(gradients, max_norm):
        return [_clipped([each], max_norm)[0] for each in gradients]

    return _step(model, x, y, optimizer, scaler, max_norm, clip=clip)


@misconception("fp16_train_step", "It scales every gradient to max_norm: small ones are to stay as they are.")
def makes_small_ones_large(model, x, y, optimizer, scaler, max_norm):
    def clip(gradients, max_norm):
        return [each * (max_norm / (_norm(gradients) + 1e-6)) for each in gradients]

    return _step(model, x, y, optimizer, scaler, max_norm, clip=clip)


@misconception("fp16_train_step", "It does not clip.")
def never_clips(model, x, y, optimizer, scaler, max_norm):
    def clip(gradients, max_norm):
        return gradients

    return _step(model, x, y, optimizer, scaler, max_norm, clip=clip)


@misconception("fp16_train_step", "It returns the scaled loss.")
def returns_the_scaled_loss(model, x, y, optimizer, scaler, max_norm):
    scale = scaler.scale

    def reported(loss, scaler):
        return float(loss.detach()) * scale

    return _step(model, x, y, optimizer, scaler, max_norm, reported=reported)


@misconception("fp16_train_step", "It returns the loss as a tensor, with its graph, and not as a float.")
def returns_a_tensor(model, x, y, optimizer, scaler, max_norm):
    return _step(model, x, y, optimizer, scaler, max_norm, reported=lambda loss, scaler: loss)


# --- the page's questions ---------------------------------------------------------------------------------------------

question_for(
    "6.A",
    64,
    "64: the scale goes to double, its reciprocal is taken there, and that is rounded to float32. As in your unscale_.",
    "Look at what is called on the scale before its reciprocal is taken. How many bits has that type?",
    {32: "32 bits has the result, and the scale itself. What is between the two calls?"},
)
question_for(
    "6.B",
    False,
    "False: each optimizer has its own record of infinities, and its step looks at that alone. The scale is lowered "
    "for both, since update looks at the records of all.",
    "_maybe_opt_step gets one optimizer_state. Whose is it?",
)
question_for(
    "6.C",
    166,
    "166: 165 halvings lead from 2^16 to 2^-149, the smallest float32. Half of that is a tie between 0 and 2^-149, and "
    "0 is the even one.",
    "scales_after(DynamicLossScaler, 'x' * 170) lists them all. Which place has the first 0.0?",
    {
        165: "After 165 the scale is 2^-149, which is not 0 yet.",
        167: "The list of scales_after begins with the scale before the first step.",
        170: "It is 0 by then. Since when?",
    },
)
question_for(
    "6.D",
    -16,
    "-16: clipped to at most 1, and then divided by 2^16. A learning rate would have to be 65,536 times as large.",
    "The norm is at most 1 after clipping. What happens to it next?",
    {16: "Unscaling divides.", 0: "That is the norm after clipping. Then the gradients are unscaled."},
)
