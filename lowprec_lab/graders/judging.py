"""From recorded comparisons to a verdict: points, the named misconception, the first difference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from lowprec_lab.blanks import Blank
from lowprec_lab.c_code import NO_COMPILER, find_compiler
from lowprec_lab.graders.case import Record, tokens_of
from lowprec_lab.graders.counterexample import input_rows, result_rows
from lowprec_lab.graders.naming import name_misconception
from lowprec_lab.graders.registry import CHECKS, Check
from lowprec_lab.graders.reproduction import try_again, try_it
from lowprec_lab.graders.run import OUT_OF_LIMITS, Outcome, current_seed, run_checks
from lowprec_lab.graders.verdict import Verdict

_CLOSE_ULP = 4
_SLOW_S = 2.0


def grade(blank: Blank, function: Callable, *, seed: int | None = None, naming: bool = True) -> Verdict:
    """Judge `function` as an answer to `blank`. seed: the public or the instructor's one when omitted."""
    if blank.language == "C" and find_compiler() is None:
        return unwritten(blank, "cannot be judged on this machine", NO_COMPILER)
    seed = current_seed() if seed is None else seed
    outcomes = run_checks(blank.name, function, seed=seed)
    verdict = summary(blank, function, outcomes)
    if verdict.passed:
        return verdict
    if naming and not any(o.failure and o.failure.kind in (*OUT_OF_LIMITS, "undefined") for o in outcomes):
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


def failed(blank: Blank, headline: str, sentence: str) -> Verdict:
    """The verdict on an answer that is there and cannot be judged."""
    verdict = unwritten(blank, headline, sentence)
    verdict.level = "failed"
    return verdict


def summary(blank: Blank, function: Callable, outcomes: list[Outcome]) -> Verdict:
    """The verdict that follows from what the checks found out about `function`, without a name for its mistake."""
    cases, wrong = sum(o.cases for o in outcomes), sum(o.wrong for o in outcomes)
    tried = {o.check.name: o for o in outcomes}
    checks = [_check_line(check, tried.get(check.name)) for check in CHECKS[blank.name]]
    passed = bool(checks) and all(line["passed"] for line in checks)
    total = sum(line["weight"] for line in checks)
    share = sum(line["weight"] for line in checks if line["passed"]) / total if total else 0.0
    points = float(blank.points) if passed else round(blank.points * share, 2)
    verdict = Verdict(blank.name, blank.exercise, "exact", "", passed, points, float(blank.points), checks=checks)
    first = next((o for o in outcomes if not o.passed), None)  # checks go from the plain to the special
    if passed:
        verdict.headline = _all_right(blank.name, cases)
    elif first is None or not (first.failure or first.wrong):
        _describe_empty(verdict)
    elif first.failure:
        _describe_failure(verdict, blank, function, first)
    elif any(record.problem for record in first.records):
        _describe_problem(verdict, blank, function, next(record for record in first.records if record.problem))
    else:
        _describe_difference(verdict, blank, function, outcomes, wrong, cases)
        verdict.sentences += _other_troubles(outcomes)
    verdict.notes += _notes(outcomes)
    return verdict


def _all_right(exercise: str, cases: int) -> str:
    ways = dict.fromkeys(check.by for check in CHECKS[exercise])
    if list(ways) == ["bits"]:
        return f"bit-exact on {cases:,} of {cases:,} inputs"
    return f"right on {cases:,} of {cases:,} inputs, judged by {' and '.join(ways)}"


def _other_troubles(outcomes: list[Outcome]) -> list[str]:
    """What else went wrong than values, in a check after the one that is told about."""
    failures = [o.failure.sentence for o in outcomes if o.failure]
    problems = [record.problem[1] for o in outcomes for record in o.records if record.problem]
    return [f"In another check: {sentence}" for sentence in (failures + problems)[:1]]


def _notes(outcomes: list[Outcome]) -> list[str]:
    notes = []
    lines = "".join(o.printed for o in outcomes).splitlines()
    supplied = [line for line in lines if line.startswith(("reference: ", "exact oracle: "))]
    printed = " ".join(" ".join(line for line in lines if line not in supplied).split())
    if supplied:
        notes.append(f"Where answers of yours are not there yet, it ran on: {'; '.join(dict.fromkeys(supplied))}")
    if printed:
        notes.append(f"While it was checked, your code printed: {printed[:200]}{'…' if len(printed) > 200 else ''}")
    seconds = sum(o.seconds for o in outcomes if o.check.limit_s is None)  # others take long by their nature
    if seconds > _SLOW_S and not any(o.failure for o in outcomes):
        notes.append(
            f"The check took {seconds:.1f} s. Speed earns no points, but later cells call this on millions of numbers: "
            "a loop per element will be too slow there."
        )
    return notes


def _check_line(check: Check, outcome: Outcome | None) -> dict:
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


def _describe_failure(verdict: Verdict, blank: Blank, function: Callable, outcome: Outcome) -> None:
    failure = outcome.failure
    lucky = failure.kind == "undefined"
    verdict.level, verdict.headline = ("close", "right here, by luck") if lucky else ("failed", "could not be judged")
    verdict.sentences.append(failure.sentence)
    if failure.where:
        verdict.sentences.append(f"In your code, {failure.where}")
    if failure.kind != "memory":  # nobody should type that
        verdict.try_it = try_again(blank, None if failure.kind == "timeout" else function, outcome.failed_call)


def _describe_problem(verdict: Verdict, blank: Blank, function: Callable, record: Record) -> None:
    kind, sentence = record.problem
    verdict.level, verdict.headline = "failed", f"returns the wrong {kind}"
    verdict.sentences.append(sentence)
    verdict.try_it = try_it(blank, function, record)


def _describe_empty(verdict: Verdict) -> None:
    """Nothing was wrong and yet a check did not pass: it compared nothing, which is the course's fault."""
    verdict.level, verdict.headline = "failed", "could not be judged"
    verdict.sentences.append(
        "A check compared nothing. That is a fault of the course, not of your answer: please report it, with the file "
        f"that check({verdict.name}, report=True) writes."
    )


def _describe_difference(
    verdict: Verdict, blank: Blank, function: Callable, outcomes: list[Outcome], wrong: int, cases: int
) -> None:
    distance = _largest_distance(outcomes)
    if distance is not None and distance <= _CLOSE_ULP:
        verdict.level = "close"
        verdict.headline = f"close, not exact: {wrong:,} of {cases:,} inputs are up to {distance} ulp from right"
    else:
        verdict.level, verdict.headline = "wrong", f"wrong on {wrong:,} of {cases:,} inputs"
    record = next(record for o in outcomes for record in o.records if record.wrong.any())
    index = int(np.flatnonzero(record.wrong)[0])
    verdict.rows = input_rows(blank, record, index) + result_rows(record, index)
    verdict.try_it = try_it(blank, function, record, index)


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
