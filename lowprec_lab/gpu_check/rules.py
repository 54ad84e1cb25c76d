"""Part "rules": what torch._scaled_mm says here to each call of chapter 09, next to what `explain_scaled_mm` says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from lowprec_lab.blanks import current
from lowprec_lab.gpu_check.device import Device
from lowprec_lab.scaled_mm import CALLS, RULES, Call, ask_torch, empty_like_described

WORKS = "it works"
AGREE, OTHER_WORDS = "agree", "both refuse, in other words"
ALLOWED_HERE, REFUSED_HERE = "the rules refuse it, torch does not", "torch refuses it, the rules do not"


def check(device: Device, found: dict, save: Callable[[], None]) -> None:
    """Fill in `counts`, by verdict, and `calls`, a list: title, verdict, rule, expected and said of each.

    Each call is judged for the GPU that is here, whatever GPU its title names.
    """
    found["calls"] = []
    for one in CALLS:
        rule, expected, said = compare(one, device)
        told = {"title": one.title, "verdict": judge(expected, said), "rule": rule, "expected": expected, "said": said}
        found["calls"].append(told)
        found["counts"] = dict(Counter(each["verdict"] for each in found["calls"]))
    save()


def compare(one: Call, device: Device) -> tuple[str, str, str]:
    """(the first rule that is broken, or ""; what torch is expected to say; what it says), in a line each."""
    tensors = one.tensors(device.where)
    bias = empty_like_described(one.bias, device.where)
    problems = current("explain_scaled_mm")(*tensors, device.capability, bias, one.out_dtype, device.cublas)
    said = ask_torch(*tensors, bias=bias, out_dtype=one.out_dtype)
    device.synchronize()
    if not problems:
        return "", WORKS, said
    first = problems[0]
    return first.rule, f"{RULES[first.rule].error.__name__}: {first.text.splitlines()[0]}", said


def judge(expected: str, said: str) -> str:
    """Whether they agree: both work, or torch's line begins as it should (after the name of a function it goes on)."""
    if WORKS in (expected, said):
        return AGREE if expected == said else REFUSED_HERE if expected == WORKS else ALLOWED_HERE
    return AGREE if said.startswith(expected.rstrip("`")) else OTHER_WORDS
