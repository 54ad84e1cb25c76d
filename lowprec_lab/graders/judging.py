"""From recorded comparisons to a verdict: points, the named misconception, the first difference, how to try it."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.blanks import Blank
from lowprec_lab.formats import FORMATS, Format
from lowprec_lab.graders.case import Call, Record, tokens_of
from lowprec_lab.graders.naming import name_misconception
from lowprec_lab.graders.run import Outcome, current_seed, run_checks
from lowprec_lab.graders.verdict import Row, Verdict

_CLOSE_ULP = 4
_SLOW_S = 2.0
_OWN_FORMAT = {fmt.torch_dtype: fmt for fmt in FORMATS.values() if fmt.torch_dtype is not None}


def grade(blank: Blank, function: Callable, *, seed: int | None = None, naming: bool = True) -> Verdict:
    """Judge `function` as an answer to `blank`. seed: the public or the instructor's one when omitted."""
    seed = current_seed() if seed is None else seed
    outcomes = run_checks(blank.name, function, seed=seed)
    verdict = _summary(blank, outcomes)
    if verdict.passed:
        return verdict
    if naming:
        named = name_misconception(blank.name, function, outcomes, seed)
        if named is not None:
            verdict.misconception = named.function.__name__
            verdict.sentences.insert(0, named.sentence)
    return verdict


def unwritten(blank: Blank, headline: str, *notes: str) -> Verdict:
    """The verdict on an answer that is not there."""
    return Verdict(
        blank.name, blank.exercise, "unwritten", headline, False, 0.0, float(blank.points), notes=list(notes)
    )


def _summary(blank: Blank, outcomes: list[Outcome]) -> Verdict:
    cases, wrong = sum(o.cases for o in outcomes), sum(o.wrong for o in outcomes)
    tried = {o.check.name: o for o in outcomes}
    checks = [_check_line(check, tried.get(check.name)) for check in _all_checks(blank)]
    passed = bool(checks) and all(line["passed"] for line in checks)
    total = sum(line["weight"] for line in checks)
    share = sum(line["weight"] for line in checks if line["passed"]) / total if total else 0.0
    points = float(blank.points) if passed else round(blank.points * share, 2)
    verdict = Verdict(blank.name, blank.exercise, "exact", "", passed, points, float(blank.points), checks=checks)
    failures = [o for o in outcomes if o.failure]
    problems = [record for o in outcomes for record in o.records if record.problem]
    if passed:
        verdict.headline = f"bit-exact on {cases:,} of {cases:,} inputs"
    elif failures:
        _describe_failure(verdict, blank, failures[0])
    elif problems:
        _describe_problem(verdict, blank, problems[0])
    elif not wrong:
        _describe_empty(verdict)
    else:
        _describe_difference(verdict, blank, outcomes, wrong, cases)
    verdict.notes += _notes(outcomes)
    return verdict


def _notes(outcomes: list[Outcome]) -> list[str]:
    notes = []
    lines = "".join(o.printed for o in outcomes).splitlines()
    supplied = [line for line in lines if line.startswith(("reference: ", "exact oracle: "))]
    printed = " ".join(" ".join(line for line in lines if line not in supplied).split())
    if supplied:
        notes.append(f"Where answers of yours are not there yet, it ran on: {'; '.join(dict.fromkeys(supplied))}")
    if printed:
        notes.append(f"While it was checked, your code printed: {printed[:200]}{'…' if len(printed) > 200 else ''}")
    seconds = sum(o.seconds for o in outcomes)
    if seconds > _SLOW_S and not any(o.failure for o in outcomes):
        notes.append(
            f"The check took {seconds:.1f} s. Speed earns no points, but later cells call this on millions of numbers: "
            "a loop per element will be too slow there."
        )
    return notes


def _all_checks(blank: Blank) -> list:
    from lowprec_lab.graders.registry import CHECKS

    return CHECKS[blank.name]


def _check_line(check, outcome: Outcome | None) -> dict:
    ran = outcome is not None
    return {
        "name": check.name,
        "inputs": check.inputs,
        "weight": check.weight,
        "ran": ran,
        "passed": ran and outcome.passed,
        "cases": outcome.cases if ran else 0,
        "wrong": outcome.wrong if ran else 0,
    }


def _describe_failure(verdict: Verdict, blank: Blank, outcome: Outcome) -> None:
    failure = outcome.failure
    verdict.level, verdict.headline = "failed", "could not be judged"
    verdict.sentences.append(failure.sentence)
    if failure.where:
        verdict.sentences.append(f"In your code, {failure.where}")
    if outcome.failed_call is not None:
        verdict.try_it = _call_text(blank, outcome.failed_call, None, None)


def _describe_problem(verdict: Verdict, blank: Blank, record: Record) -> None:
    kind, sentence = record.problem
    verdict.level, verdict.headline = "failed", f"returns the wrong {kind}"
    verdict.sentences.append(sentence)
    verdict.try_it = _call_text(blank, record.call, None, None)


def _describe_empty(verdict: Verdict) -> None:
    """Nothing was wrong and yet a check did not pass: it compared nothing, which is the course's fault."""
    verdict.level, verdict.headline = "failed", "could not be judged"
    verdict.sentences.append(
        "A check compared nothing. That is a fault of the course, not of your answer: please report it, with the file "
        f"that check({verdict.name}, report=True) writes."
    )


def _describe_difference(verdict: Verdict, blank: Blank, outcomes: list[Outcome], wrong: int, cases: int) -> None:
    distance = _largest_distance(outcomes)
    if distance is not None and distance <= _CLOSE_ULP:
        verdict.level = "close"
        verdict.headline = f"close, not exact: {wrong:,} of {cases:,} inputs are up to {distance} ulp from right"
    else:
        verdict.level, verdict.headline = "wrong", f"wrong on {wrong:,} of {cases:,} inputs"
    record = next(record for o in outcomes for record in o.records if record.wrong.any())
    index = int(np.flatnonzero(record.wrong)[0])
    verdict.rows = _input_rows(blank, record, index) + _result_rows(record, index)
    verdict.try_it = _call_text(blank, record.call, record.want[0], index)


def _largest_distance(outcomes: list[Outcome]) -> int | None:
    """The largest distance in ulp over all wrong results; None where some are not finite floats near each other."""
    worst = 0
    for record in (record for o in outcomes for record in o.records if record.wrong.any()):
        for got, want in zip(record.got, record.want, strict=False):
            if not (isinstance(want, Tensor) and want.dtype.is_floating_point):
                return None
            both = (
                got.detach().reshape(-1)[record.wrong].float().isfinite()
                & want.reshape(-1)[record.wrong].float().isfinite()
            )
            if not bool(both.all()):
                return None
            steps = _ordered(got)[record.wrong].astype(object) - _ordered(want)[record.wrong].astype(object)
            if len(record.want) == 1 and not steps.all():
                return None  # the same number with another sign: zero, which no distance describes
            worst = max(worst, *(abs(int(step)) for step in steps))
    return worst


def _ordered(value: Tensor) -> np.ndarray:
    """The bits of floats as integers in which neighbours differ by 1, also across zero."""
    bits = tokens_of(value)
    lowest = -(2 ** (value.element_size() * 8 - 1))
    return np.where(bits < 0, lowest - bits, bits)


def _input_rows(blank: Blank, record: Record, index: int) -> list[Row]:
    rows = []
    fmt = next((arg for arg in record.call.args if isinstance(arg, Format)), None)
    names = list(blank.signature.parameters)
    tensors = sum(isinstance(arg, Tensor) for arg in record.call.args)
    for name, arg in zip(names, record.call.args, strict=False):
        if isinstance(arg, Format):
            rows.append(Row("format", _format_text(arg)))
        elif isinstance(arg, Tensor) and isinstance(record.want[0], Tensor) and arg.shape == record.want[0].shape:
            label = "input" if tensors == 1 else name
            rows.append(_element_row(label, arg.reshape(-1)[index], fmt if name == "codes" else None))
        else:
            rows.append(Row(name, _short(arg)))
    return rows


def _result_rows(record: Record, index: int) -> list[Row]:
    rows = []
    for label, results in (("yours", record.got), ("right", record.want)):
        elements = [r.detach().reshape(-1)[index] if isinstance(r, Tensor) else r for r in results]
        if isinstance(record.show, Format):
            rows.append(_element_row(label, elements[0], record.show))
        elif callable(record.show):
            rows.append(Row(label, record.show(*elements)))
        else:
            rows.append(_element_row(label, elements[0], None))
    return rows


def _element_row(label: str, element: object, code_format: Format | None) -> Row:
    """A value with its bits: a code under the format it belongs to, a float under its own."""
    if not isinstance(element, Tensor):
        return Row(label, "None" if element is None else repr(element))
    if code_format is not None:
        code = int(element) % 2**code_format.width
        outside = int(element) not in (code, code - 2**code_format.width)
        value = f"{int(element)} (not a code)" if outside else f"{code:#0{2 + (code_format.width + 3) // 4}x}"
        return Row(label, value, [] if outside else bit_fields(code, code_format))
    if element.dtype in _OWN_FORMAT:
        fmt = _OWN_FORMAT[element.dtype]
        bits = int(element.reshape(1).view(_unsigned_view(fmt.width)).to(torch.int64)) % 2**fmt.width
        return Row(label, repr(float(element)), bit_fields(bits, fmt))
    return Row(label, repr(element.item()))


def _unsigned_view(width: int) -> torch.dtype:
    return {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]


def bit_fields(code: int, fmt: Format) -> list[tuple[str, str]]:
    """The digits of a code by field: [("s", "0"), ("e", "0111"), ("m", "000")]; fields of no bits are left out."""
    digits = f"{code:0{fmt.width}b}"
    widths = [("s", int(fmt.signed)), ("e", fmt.exponent_bits), ("m", fmt.mantissa_bits)]
    fields, start = [], 0
    for name, width in widths:
        if width:
            fields.append((name, digits[start : start + width]))
        start += width
    return fields


def _format_text(fmt: Format) -> str:
    extras = "".join(
        f", {text}" for text, there in (("no sign", not fmt.signed), ("no subnormals", not fmt.subnormals)) if there
    )
    return (
        f"{fmt.name}: {fmt.exponent_bits} exponent bits, {fmt.mantissa_bits} mantissa bits, bias {fmt.bias}, "
        f"{fmt.specials}{extras}"
    )


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _call_text(blank: Blank, call: Call | None, want: object, index: int | None) -> str:
    """The call as the learner can type it, on the one element that matters where there is one."""
    if call is None:
        return ""
    parts = []
    for arg in call.args:
        if isinstance(arg, Tensor):
            one = index is not None and isinstance(want, Tensor) and arg.shape == want.shape
            parts.append(tensor_text(arg.reshape(-1)[index : index + 1] if one else _corner(arg)))
        else:
            parts.append(repr(arg))
    parts += [f"{key}={value!r}" for key, value in call.kwargs.items()]
    return f"{blank.name}({', '.join(parts)})"


def _corner(value: Tensor) -> Tensor:
    """A few elements that keep the tensor's number of dimensions: a failure may depend on it."""
    few = 3 if value.dim() == 1 else 2
    return value[(slice(few),) * value.dim()]


def tensor_text(value: Tensor) -> str:
    """Python that makes this small tensor again, to the last bit."""
    if value.dim() == 2 and not value.is_contiguous() and value.t().is_contiguous():
        return f"{tensor_text(value.t())}.t()"
    dtype = "" if value.dtype in (torch.int64, torch.float32) and value.numel() else f", dtype={value.dtype}"
    if not value.numel():
        return f"torch.empty({tuple(value.shape)}{dtype})"
    if value.dtype.is_floating_point and (value.isnan().any() or value.element_size() < 4):
        view = _unsigned_view(value.element_size() * 8)
        return f"torch.tensor({value.contiguous().view(view).tolist()}, dtype={view}).view({value.dtype})"
    numbers = re.sub(r"\binf\b", "float('inf')", repr(value.tolist()))
    return f"torch.tensor({numbers}{dtype})"
