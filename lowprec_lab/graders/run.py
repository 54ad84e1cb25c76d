"""Run the checks of one exercise on an answer, within a time limit, and gather what they recorded."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256

from lowprec_lab.calls import AnswerFailed
from lowprec_lab.graders.case import Answer, Call, Case, Record
from lowprec_lab.graders.registry import CHECKS, Check
from lowprec_lab.limits import TookTooLongError, memory_limit, quiet, time_limit

PUBLIC_SEED = 20260101
TIME_LIMIT_S = 10.0
MEMORY_LIMIT_BYTES = 4 * 2**30
# Kinds of failures after which an answer is not called again.
OUT_OF_LIMITS = ("timeout", "memory")


@dataclass
class Outcome:
    """What one check found: its records, the failure that ended it early, if one did, and what the answer printed."""

    check: Check
    records: list[Record] = field(default_factory=list)
    failure: AnswerFailed | None = None
    failed_call: Call | None = None
    printed: str = ""
    seconds: float = 0.0

    @property
    def wrong(self) -> int:
        return sum(int(record.wrong.sum()) for record in self.records)

    @property
    def cases(self) -> int:
        return sum(record.cases for record in self.records)

    @property
    def passed(self) -> bool:
        """Whether the answer was compared at least once and was right every time."""
        return self.failure is None and self.cases > 0 and self.wrong == 0


def current_seed() -> int:
    """The instructor's seed when they grade (LOWPREC_SEED, any text), else the public one."""
    text = os.environ.get("LOWPREC_SEED", "")
    return seed_number(text) if text else PUBLIC_SEED


def seed_number(text: str) -> int:
    """The number that a seed's text stands for."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")


def run_checks(
    exercise: str, function: Callable, *, seed: int | None = None, size: int = 1, limit_s: float = TIME_LIMIT_S
) -> list[Outcome]:
    """Every check of `exercise` on `function`, in their order, until it runs out of time or memory in one.

    A check that is a `last` one is left out where an earlier one was not passed.
    """
    seed = current_seed() if seed is None else seed
    outcomes: list[Outcome] = []
    for check in CHECKS[exercise]:
        if check.last and not all(outcome.passed for outcome in outcomes):
            continue
        outcomes.append(run_check(check, function, seed, size, limit_s))
        if outcomes[-1].failure is not None and outcomes[-1].failure.kind in OUT_OF_LIMITS:
            break
    return outcomes


def run_check(check: Check, function: Callable, seed: int, size: int = 1, limit_s: float = TIME_LIMIT_S) -> Outcome:
    """One check on `function`: what was compared, and the failure that ended it early, if one did."""
    case = Case(seed, check.name, size)
    outcome = Outcome(check, case.records)
    begin = getattr(function, "begin_check", None)  # an answer behind a pipe has limits of its own
    limit_s = limit_s if begin or check.limit_s is None else check.limit_s
    limits = begin(limit_s) if begin else _local_limits(limit_s)
    started = time.perf_counter()
    try:
        with quiet() as printed, limits:
            check.function(Answer(function, case), case)
    except TookTooLongError:
        outcome.failure = took_too_long(limit_s)
    except AnswerFailed as failure:
        outcome.failure = failure
    outcome.failed_call = case.last_call if outcome.failure else None
    outcome.printed, outcome.seconds = printed.getvalue(), time.perf_counter() - started
    return outcome


def took_too_long(limit_s: float) -> AnswerFailed:
    """The failure of an answer that was stopped after `limit_s`."""
    sentence = f"It was stopped after {limit_s:g} s: is there an endless loop, or a loop per element?"
    return AnswerFailed("timeout", sentence)


@contextlib.contextmanager
def _local_limits(seconds: float) -> Iterator[None]:
    with time_limit(seconds), memory_limit(MEMORY_LIMIT_BYTES):
        yield
