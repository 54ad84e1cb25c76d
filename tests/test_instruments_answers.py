"""Wrong answers to chapter 05 as people write them: each is refused, named, and told where it went wrong."""

import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lowprec_lab.bits import max_finite, min_normal, min_subnormal
from lowprec_lab.blanks import BLANKS
from lowprec_lab.graders import registry
from lowprec_lab.graders.judging import grade
from lowprec_lab.rounding import round_to

registry.load_graders()


def counted(x):
    x = x.float().reshape(-1)
    return x[x.isfinite() & (x != 0)]


def share(lost):
    return int(lost.sum()) / lost.numel() if lost.numel() else 0.0


def checked(scale):
    if not 0 < scale < math.inf:
        raise ValueError("scale")
    return scale


def after_scaling(x, scale):
    return counted(x.float() * checked(scale))


def scaled(x, scale):
    return counted(x) * checked(scale)


def found(parameters):
    return [each.grad for each in parameters if each.grad is not None]


def over(moved, size):
    return moved / size if size else (math.inf if moved else 0.0)


def counts(exponents):
    return torch.bincount(exponents.long() + 149, minlength=277)


PLAIN = [
    ("exponent_histogram", "by_frexp", lambda x: counts(torch.frexp(counted(x)).exponent)),
    ("exponent_histogram", "by_log2", lambda x: counts(counted(x).abs().log2().floor())),
    ("underflow_fraction", "underflow_counted_after_scaling",
     lambda x, fmt, scale=1.0: share(round_to(after_scaling(x, scale).abs(), fmt) == 0)),
    ("underflow_fraction", "signs_are_rounded",
     lambda x, fmt, scale=1.0: share(round_to(scaled(x, scale), fmt) == 0)),
    ("underflow_fraction", "below_min_subnormal",
     lambda x, fmt, scale=1.0: share(scaled(x, scale).abs() < min_subnormal(fmt))),
    ("underflow_fraction", "below_half_of_min_subnormal",
     lambda x, fmt, scale=1.0: share(scaled(x, scale).abs() < min_subnormal(fmt) / 2)),
    ("underflow_fraction", "zero_where_there_is_none",
     lambda x, fmt, scale=1.0: share(scaled(x, scale).abs() <= (min_subnormal(fmt) or min_normal(fmt)) / 2)),
    ("underflow_fraction", "underflow_by_an_exact_scale",
     lambda x, fmt, scale=1.0: share(round_to((counted(x).double() * checked(scale)).float().abs(), fmt) == 0)),
    ("overflow_fraction", "looks_for_infinities_and_raises",
     lambda x, fmt, scale=1.0: share(round_to(scaled(x, scale).abs(), fmt, overflow="to_special").isinf())),
    ("overflow_fraction", "never_overflows",
     lambda x, fmt, scale=1.0: share(round_to(scaled(x, scale).abs(), fmt) > max_finite(fmt))),
    ("gradient_norm", "clips_to_infinity", lambda parameters: clip_grad_norm_(parameters, math.inf).item()),
    ("gradient_norm", "squares_in_float32",
     lambda parameters: sum(each.float().square().sum().item() for each in found(parameters)) ** 0.5),
    ("gradient_norm", "squares_in_float32", lambda parameters: get_total_norm(found(parameters)).item()),
    ("gradient_norm", "squares_in_own_dtype",
     lambda parameters: float(sum((each**2).sum() for each in found(parameters))) ** 0.5),
    ("gradient_norm", "stacks_own_dtype",
     lambda parameters: torch.stack([each.square().sum() for each in found(parameters)]).sum().sqrt().item()),
    ("gradient_norm", "stacks_float32",
     lambda parameters: torch.stack([each.norm() for each in found(parameters)]).norm().item()),
    ("update_ratio", "ratio_in_own_dtype",
     lambda before, after: over((after - before).norm().item(), before.norm().item())),
    ("update_ratio", "ratio_in_float32",
     lambda before, after: over((after.float() - before.float()).norm().item(), before.float().norm().item())),
    ("update_ratio", "subtracts_in_float32",
     lambda before, after: over(
         (after.float() - before.float()).double().norm().item(), before.double().norm().item())),
]  # fmt: skip


class Watch:
    """Right, but for what the kinds of it below do otherwise."""

    def __init__(self, model, names, measure=torch.clone):
        self.modules = {name: model.get_submodule(name) for name in names}
        self.measure, self.handles = measure, []
        self.activations = {name: [] for name in names}
        self.gradients = {name: [] for name in names}

    def __enter__(self):
        for name, module in self.modules.items():
            self.handles.append(module.register_forward_hook(self.hook(name)))
        return self

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()

    def hook(self, name):
        def called(module, inputs, output):
            self.activations[name].append(self.measure(output.detach()))
            self.gradients[name].append(None)
            if output.requires_grad:
                self.watch(output, self.arrives(name))

        return called

    def watch(self, output, arrived):
        self.handles.append(output.register_hook(arrived))

    def arrives(self, name):
        place = len(self.gradients[name]) - 1

        def arrived(gradient):
            self.gradients[name][place] = self.measure(gradient.detach())

        return arrived


class LeavesHooks(Watch):
    def watch(self, output, arrived):
        output.register_hook(arrived)


class LatePlace(Watch):
    def arrives(self, name):
        def arrived(gradient):
            self.gradients[name][len(self.gradients[name]) - 1] = self.measure(gradient.detach())

        return arrived


class LateName(Watch):
    def __enter__(self):
        for name, module in self.modules.items():
            called = lambda *call: self.hook(name)(*call)  # noqa: B023, E731 (the mistake)
            self.handles.append(module.register_forward_hook(called))
        return self


class LatePlaceAndLeavesHooks(LatePlace, LeavesHooks):
    pass


TAPS = [
    ("Taps", "leaves_hooks_on_tensors", LeavesHooks),
    ("Taps", "place_is_looked_up_late", LatePlace),
    ("Taps", "name_is_looked_up_late", LateName),
    ("Taps", "late_place_and_hooks_stay", LatePlaceAndLeavesHooks),
]


@pytest.mark.parametrize(
    ("exercise", "name", "answer"), PLAIN + TAPS, ids=lambda value: value if isinstance(value, str) else "answer"
)
def test_it_is_refused_and_named(exercise, name, answer):
    verdict = grade(BLANKS[exercise], answer)
    assert not verdict.passed
    assert verdict.misconception == name


def test_hooks_that_are_removed_pass():
    assert grade(BLANKS["Taps"], Watch).passed


def rows(exercise, answer):
    return {row.label: row.value for row in grade(BLANKS[exercise], answer, naming=False).rows}


def test_a_wrong_count_is_told_with_its_exponent():
    told = rows("exponent_histogram", PLAIN[0][2])
    exponent, place = (int(part) for part in told["right"].rstrip(")").replace("(place", "").split()[-2:])
    assert place == exponent + 149
    assert told["yours"].split(" ", 1)[1] == told["right"].split(" ", 1)[1]


def test_a_wrong_entry_is_told_with_its_list_module_and_call():
    told = rows("Taps", LatePlace)
    assert told["yours"].startswith("nothing in gradients['up'], call 1 of 2")
    assert "in gradients['up'], call 1 of 2" in told["right"]
