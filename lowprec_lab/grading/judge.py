"""The judge: drives an answer that runs elsewhere, and grades it with the same checks as the notebook does.

It holds the checks, the seed and the expected values. It never runs a learner's code, and it trusts no reply: a reply
is data of bounded size, compared bit by bit, and its texts are cut and cleaned before anybody sees them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor

from lowprec_lab.blanks import Blank, in_order
from lowprec_lab.c_code import CompilerMissingError, find_compiler
from lowprec_lab.calls import AnswerFailed
from lowprec_lab.graders import registry
from lowprec_lab.graders.judging import failed, grade, unwritten
from lowprec_lab.graders.run import TIME_LIMIT_S, took_too_long
from lowprec_lab.graders.verdict import Verdict
from lowprec_lab.grading import wire
from lowprec_lab.grading.clean import clean_text
from lowprec_lab.grading.worker import PRINTED_LIMIT
from lowprec_lab.sources import Source, earlier_sources

# For one exercise, naming of misconceptions included.
EXERCISE_LIMIT_S = 60.0
# For all exercises of one submission: a page of endless loops takes half of it, a page that means it takes no more.
SUBMISSION_LIMIT_S = 300.0
_LOAD_LIMIT_S = 20.0
_KINDS = ("exception", "timeout", "memory", "mutated", "type", "undefined", "unusable")
_NO_TIME_LEFT = (
    f"The answers above it took {SUBMISSION_LIMIT_S:g} s, and that is what a submission has for all of them. "
    "Mend those first."
)
_NO_REPLY = "Its process sent something that is no reply."


class Worker(Protocol):
    """A process for one exercise: a channel to it, and a way to end it with all that it started."""

    channel: object

    def kill(self) -> str:
        """End it; returns why it had ended already ("it used too much memory"), or ""."""


class Workers(Protocol):
    """Where workers come from: a sandbox, or plain processes for one's own work."""

    def worker(self) -> Worker: ...


class RemoteAnswer:
    """An answer in a worker, as `lowprec_lab.graders.case.Answer` drives it.

    After a timeout or a lost worker a new worker is started, with the answer loaded again, for the next check.
    """

    def __init__(
        self,
        workers: Workers,
        blank: Blank,
        source: Source,
        earlier: Mapping[str, Source],
        limit_s: float = EXERCISE_LIMIT_S,
    ) -> None:
        self._workers, self._blank, self._source = workers, blank, source
        self._earlier = {name: (each.text, each.helpers) for name, each in earlier.items()}
        self._worker: Worker | None = None
        self._deadline = 0.0
        self._in_all_s, self._ends = round(limit_s, 1), time.monotonic() + limit_s
        self._limit_s = limit_s  # the limit behind the last deadline

    def load(self) -> None:
        """Start the worker and load the answer. Raises AnswerFailed."""
        self._worker = self._workers.worker()
        request = ("load", self._blank.name, self._source.text, self._source.helpers, self._earlier)
        try:
            self._ask(request, self._deadline_in(_LOAD_LIMIT_S))
        except AnswerFailed:
            self.close()
            raise

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    @contextlib.contextmanager
    def begin_check(self, limit_s: float = TIME_LIMIT_S) -> Iterator[None]:
        """Give the answer `limit_s` for one check, and no more than is left for the exercise."""
        if time.monotonic() >= self._ends:
            raise took_too_long(self._in_all_s)
        if self._worker is None:
            self.load()
        self._deadline = self._deadline_in(limit_s)
        yield

    def _deadline_in(self, seconds: float) -> float:
        soon = time.monotonic() + seconds
        self._limit_s = seconds if soon <= self._ends else self._in_all_s
        return min(soon, self._ends)

    def elsewhere(self, verb: str, args: tuple, kwargs: dict, *more: object) -> object:
        """What the answer gives for one call (see `worker.Served`). Raises AnswerFailed."""
        result = self._ask((verb, args, kwargs, *more), self._deadline, show_printed=True)
        if verb == "build" and type(result) is not int:
            raise AnswerFailed("exception", _NO_REPLY)
        if verb == "differentiate" and not _is_outputs_and_gradients(result):
            raise AnswerFailed("exception", _NO_REPLY)
        return result

    def _ask(self, request: tuple, deadline: float, *, show_printed: bool = False) -> object:
        try:
            wire.send(self._worker.channel, request, deadline)
            reply = wire.receive(self._worker.channel, deadline)
        except wire.WireError as error:
            why = self._worker.kill()
            self._worker = None
            raise took_too_long(self._limit_s) if error.late else _lost(error, why) from None
        if not isinstance(reply, dict) or not isinstance(reply.get("printed"), str):
            raise AnswerFailed("exception", _NO_REPLY)
        if show_printed and reply["printed"]:  # the run of a check collects it, as that of an answer in this process
            print(clean_text(reply["printed"], PRINTED_LIMIT))
        if "ok" in reply:
            return reply["ok"]
        raise _failure(reply.get("failed"))


def _is_outputs_and_gradients(result: object) -> bool:
    if type(result) is not tuple or len(result) != 2 or not all(type(part) is tuple for part in result):
        return False
    outputs, gradients = result
    return all(type(each) is Tensor for each in outputs) and all(
        each is None or type(each) is Tensor for each in gradients
    )


def _lost(error: wire.WireError, why: str) -> AnswerFailed:
    if why:
        return AnswerFailed("exception", f"Its process ended: {clean_text(why)}.")
    return AnswerFailed("exception", f"Its process ended or broke off ({error}).")


def _failure(parts: object) -> AnswerFailed:
    if not (isinstance(parts, tuple) and len(parts) == 3 and all(isinstance(part, str) for part in parts)):
        return AnswerFailed("exception", _NO_REPLY)
    kind, sentence, where = parts
    kind = kind if kind in _KINDS else "exception"
    return AnswerFailed(kind, clean_text(sentence, 400), clean_text(where, 200))


def judge(
    blank: Blank,
    sources: Mapping[str, Source],
    workers: Workers,
    *,
    seed: int | None = None,
    limit_s: float = EXERCISE_LIMIT_S,
) -> Verdict:
    """The verdict on the answer to `blank` among `sources` (all answers of one submission).

    Raises CompilerMissingError for an answer in C on a machine without a compiler: it deserves no points, and no zero.
    """
    registry.load_graders()
    source = sources.get(blank.name)
    if source is None:
        return unwritten(blank, f"not written (exercise {blank.exercise})")
    if blank.language == "C" and find_compiler() is None:
        raise CompilerMissingError
    if limit_s <= 0:
        return failed(blank, "could not be judged", _NO_TIME_LEFT)
    answer = RemoteAnswer(workers, blank, source, earlier_sources(blank, sources), limit_s)
    try:
        answer.load()
        return grade(blank, answer, seed=seed)
    except AnswerFailed as failure:
        return failed(blank, "could not be loaded", failure.sentence)
    finally:
        answer.close()


def _exercise_limit(blank: Blank) -> float:
    """Seconds for an exercise: more for one whose checks work long themselves, once for all of them."""
    registry.load_graders()
    return EXERCISE_LIMIT_S + max((check.limit_s or 0.0 for check in registry.CHECKS[blank.name]), default=0.0)


def judge_all(sources: Mapping[str, Source], chapter: str, workers: Workers, *, seed: int | None = None) -> dict:
    """{exercise name: Verdict} for every exercise of a chapter ("01_bit_layouts")."""
    blanks = [blank for blank in in_order() if blank.chapter.name == chapter]
    ends = time.monotonic() + SUBMISSION_LIMIT_S
    verdicts = {}
    for blank in blanks:
        limit_s = min(_exercise_limit(blank), ends - time.monotonic())
        verdicts[blank.name] = judge(blank, sources, workers, seed=seed, limit_s=limit_s)
    return verdicts
