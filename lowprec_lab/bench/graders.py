"""What the graders catch and name: misconceptions, other right answers, and mutants that are on no list.

A name is false when it is given to a right answer, or when the answer and the named misconception differ anywhere on
the larger set of inputs. A mutant that differs from the reference there and passes all the same is a hole in a check.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lowprec_lab.bench.larger_inputs import calls_for, named_calls_for
from lowprec_lab.bench.mutants import mutants
from lowprec_lab.bench.other_answers import OtherAnswer, load_answer, other_answers
from lowprec_lab.blanks import Blank, in_order
from lowprec_lab.calls import copy_data
from lowprec_lab.graders import naming, registry
from lowprec_lab.graders.case import Call, tokens_of, type_problem
from lowprec_lab.graders.judging import grade
from lowprec_lab.graders.registry import MISCONCEPTIONS
from lowprec_lab.graders.run import OUT_OF_LIMITS, run_checks
from lowprec_lab.graders.verdict import Verdict
from lowprec_lab.limits import TookTooLongError, quiet, time_limit
from lowprec_lab.sources import AnswerError, Source, reference, reference_source

SEED = 20260101
MUTANTS_PER_CHAPTER = 260
_MUTANT_LIMIT_S = 2.0  # a mutant that takes longer than this on one check is put aside: the learner's limit is 10 s
_COMPARE_LIMIT_S = 8.0
_NAMED_LIMIT_S = 60.0  # a name counts as false until the whole larger set was compared


@dataclass
class Finding:
    """What the bench found out about one exercise; lists hold names of functions, or texts of mutants."""

    exercise: str
    chapter: str
    misconceptions: int = 0
    accepted: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    others: int = 0
    others_failing: list[str] = field(default_factory=list)
    mutants: int = 0
    mutants_right: int = 0
    mutants_aside: int = 0
    mutants_named: int = 0
    survivors: list[str] = field(default_factory=list)
    false_names: list[str] = field(default_factory=list)
    right_check_s: float = 0.0
    wrong_check_s: float = 0.0


def run(progress: bool = True) -> dict:
    """Judge every misconception, other answer and mutant. Figures are counts, and seconds for `median_check_s`.

    Raises FileNotFoundError where the other answers are not installed, AnswerError where the references are not.
    """
    registry.load_graders()
    others = other_answers()
    blanks = in_order()
    missing = [blank.name for blank in blanks if reference_source(blank.name) is None]
    if missing:
        raise AnswerError(f"no reference answer for {', '.join(missing)}: run this in a clone, which has solutions/")
    steps = list(_steps(blanks, others))
    findings = {blank.name: Finding(blank.name, blank.chapter.name) for blank in blanks}
    for step, blank, *rest in _with_bar(steps, progress):
        step(findings[blank.name], blank, *rest)
    return _report(list(findings.values()))


def _steps(blanks: list[Blank], others: list[OtherAnswer]) -> Iterator[tuple]:
    chapters: dict[str, int] = {}
    for blank in blanks:
        chapters[blank.module] = chapters.get(blank.module, 0) + 1
    for blank in blanks:
        yield _measure, blank
        for each in MISCONCEPTIONS.get(blank.name, []):
            yield _judge_misconception, blank, each
        mine = [other for other in others if other.exercise == blank.name]
        for other in mine:
            yield _judge_other, blank, other
        share = -(-MUTANTS_PER_CHAPTER // chapters[blank.module])
        for text in _mutants_of(blank, mine, share):
            yield _judge_mutant, blank, text


def _mutants_of(blank: Blank, others: list[OtherAnswer], share: int) -> list[str]:
    """`share` mutants: half of them of the reference where it has so many, the rest of the other answers."""
    found = mutants(reference_source(blank.name).text, SEED, share // 2)
    for place, other in enumerate(others):
        part = (share - len(found)) // (len(others) - place)
        found += mutants(other.source.text, SEED + 1 + place, part)
    return list(dict.fromkeys(found))


# --- one thing after the other ---


def _measure(finding: Finding, blank: Blank) -> None:
    right = reference(blank.name)
    started = time.perf_counter()
    verdict = grade(blank, right)
    finding.right_check_s = time.perf_counter() - started
    if not verdict.passed or verdict.misconception:
        finding.others_failing.append("reference")
        _note_name(finding, "reference", verdict)
    wrongs = MISCONCEPTIONS.get(blank.name, [])
    naming.known_outcome.cache_clear()  # a learner's first wrong answer meets a cold cache
    started = time.perf_counter()
    if wrongs:
        grade(blank, wrongs[len(wrongs) // 2].function)
        finding.wrong_check_s = time.perf_counter() - started


def _judge_misconception(finding: Finding, blank: Blank, wrong) -> None:
    verdict = grade(blank, wrong.function)
    finding.misconceptions += 1
    label = wrong.function.__name__
    if verdict.passed:
        finding.accepted.append(label)
    elif verdict.misconception != label:
        finding.unnamed.append(label)
        if verdict.misconception:
            finding.false_names.append(f"{label}: named {verdict.misconception}")


def _judge_other(finding: Finding, blank: Blank, other: OtherAnswer) -> None:
    function = other.function()
    verdict = grade(blank, function)
    finding.others += 1
    if not verdict.passed:
        finding.others_failing.append(other.label)
    elif differs(blank.name, function, reference(blank.name)):
        finding.others_failing.append(f"{other.label} (passes, and differs from the reference on the larger set)")
    _note_name(finding, other.label, verdict)


def _note_name(finding: Finding, label: str, verdict: Verdict) -> None:
    if verdict.misconception:
        finding.false_names.append(f"{label}: named {verdict.misconception}")


def _judge_mutant(finding: Finding, blank: Blank, text: str) -> None:
    function = _runnable(blank, text)
    if function is None:
        finding.mutants_aside += 1
        return
    expected = reference(blank.name)
    different = differs(blank.name, function, expected)
    if different is None:
        finding.mutants_aside += 1
        return
    verdict = grade(blank, function)
    finding.mutants += different
    finding.mutants_right += not different
    if different and verdict.passed:
        finding.survivors.append(text)
    if not verdict.misconception:
        return
    finding.mutants_named += 1
    named = next(m for m in MISCONCEPTIONS[blank.name] if m.function.__name__ == verdict.misconception)
    if not different or _differ(function, named.function, named_calls_for(blank.name), _NAMED_LIMIT_S) is not False:
        finding.false_names.append(f"named {verdict.misconception}:\n{text}")


def _runnable(blank: Blank, text: str) -> Callable | None:
    """The mutant as a function, or None where it cannot be loaded, never returns data, or is too slow to be judged."""
    try:
        function = load_answer(blank.name, Source(text, reference_source(blank.name).helpers), "mutant")
    except AnswerError:
        return None
    outcomes = run_checks(blank.name, function, limit_s=_MUTANT_LIMIT_S)
    slow = any(o.failure is not None and o.failure.kind in OUT_OF_LIMITS for o in outcomes)
    return function if not slow and any(o.records for o in outcomes) else None


def differs(exercise: str, one: Callable, another: Callable) -> bool | None:
    """Whether two answers differ anywhere on the larger set: types, bits (NaN by class), or the exceptions' types.

    None where that takes too long to be found out.
    """
    return _differ(one, another, calls_for(exercise), _COMPARE_LIMIT_S)


def _differ(one: Callable, another: Callable, calls: list[tuple], limit_s: float) -> bool | None:
    try:
        with quiet(), time_limit(limit_s):
            return any(_outcome(one, args) != _outcome(another, args) for args in calls)
    except TookTooLongError:
        return None


def _outcome(function: Callable, args: tuple) -> object:
    """What a call comes to, in a form that compares by bits. A function as the first argument is a scenario."""
    scenario, args = (args[0], args[1:]) if args and inspect.isfunction(args[0]) else (None, args)
    try:
        return _as_data(Call(copy_data(args), scenario=scenario).made_on(function))
    except Exception as error:  # whatever a mutant raises is its result
        return type(error).__name__


def _as_data(result: object) -> object:
    if isinstance(result, tuple):
        return tuple(_as_data(part) for part in result)
    if isinstance(result, (int, float)) or hasattr(result, "shape") and type_problem(result, result) is None:
        described = (type(result), getattr(result, "dtype", None), getattr(result, "shape", None))
        return (*described, tokens_of(result).tobytes())
    return type(result), repr(result)


# --- the report ---


def _report(findings: list[Finding]) -> dict:
    def total(count) -> int:
        return sum(count(finding) for finding in findings)

    figures = {
        "misconceptions": total(lambda f: f.misconceptions),
        "misconceptions_rejected": total(lambda f: f.misconceptions - len(f.accepted)),
        "misconceptions_named": total(lambda f: f.misconceptions - len(f.accepted) - len(f.unnamed)),
        "other_answers": total(lambda f: f.others),
        "other_answers_passed": total(lambda f: f.others - len(set(f.others_failing) - {"reference"})),
        "false_names": total(lambda f: len(f.false_names)),
        "median_check_s": statistics.median(s for f in findings for s in (f.right_check_s, f.wrong_check_s)),
        "mutants": total(lambda f: f.mutants),
        "mutants_surviving": total(lambda f: len(f.survivors)),
        "mutants_right": total(lambda f: f.mutants_right),
    }
    by_chapter: dict[str, int] = {}
    for finding in findings:
        by_chapter[finding.chapter] = by_chapter.get(finding.chapter, 0) + finding.mutants
    return {"figures": figures, "mutants": by_chapter, "exercises": [vars(finding) for finding in findings]}


def _with_bar(steps: list, progress: bool):
    if not progress:
        return steps
    from tqdm import tqdm

    return tqdm(steps, desc="graders", unit="answer")
