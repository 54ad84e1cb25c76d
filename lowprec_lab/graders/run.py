"""Run the checks of one exercise on an answer, within a time limit, and gather what they recorded."""

from __future__ import annotations

import _thread
import contextlib
import io
import linecache
import os
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from lowprec_lab.graders.case import Answer, AnswerFailed, Call, Case, Record
from lowprec_lab.graders.registry import CHECKS, Check

PUBLIC_SEED = 20260101
TIME_LIMIT_S = 10.0


@dataclass
class Outcome:
    """What one check found: its records, and the failure that ended it early, if one did."""

    check: Check
    records: list[Record] = field(default_factory=list)
    failure: AnswerFailed | None = None
    failed_call: Call | None = None

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
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big") if text else PUBLIC_SEED


def run_checks(
    exercise: str, function: Callable, *, seed: int | None = None, size: int = 1, limit_s: float = TIME_LIMIT_S
) -> list[Outcome]:
    """Every check of `exercise` on `function`, in their order. An answer that runs out of time ends the run there."""
    seed = current_seed() if seed is None else seed
    outcomes: list[Outcome] = []
    for check in CHECKS[exercise]:
        outcomes.append(run_check(check, function, seed, size, limit_s))
        if outcomes[-1].failure is not None and outcomes[-1].failure.kind == "timeout":
            break
    return outcomes


def run_check(check: Check, function: Callable, seed: int, size: int = 1, limit_s: float = TIME_LIMIT_S) -> Outcome:
    """One check on `function`: what was compared, and the failure that ended it early, if one did."""
    case = Case(seed, check.name, size)
    outcome = Outcome(check, case.records)
    try:
        with quiet(), time_limit(limit_s):
            check.function(Answer(_guarded(function), case), case)
    except AnswerFailed as failure:
        outcome.failure, outcome.failed_call = failure, case.last_call
    return outcome


def _guarded(function: Callable) -> Callable:
    """`function`, with every exception of its own turned into an AnswerFailed that names its line."""

    def call(*args: object, **kwargs: object) -> object:
        try:
            return function(*args, **kwargs)
        except RecursionError as error:
            raise AnswerFailed("exception", "It calls itself for ever (RecursionError).", own_line(error)) from None
        except (Exception, SystemExit) as error:
            text = str(error).strip().splitlines()
            said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
            raise AnswerFailed("exception", f"It raised {said}", own_line(error)) from None

    return call


def own_line(error: BaseException) -> str:
    """The deepest line of the answer itself (not of a library) in the error's traceback, as 'line 3: code'."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_learners(frame.filename)]
    if not frames:
        return ""
    code = frames[-1].line or linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    return f"line {frames[-1].lineno}: {code}" if code else f"line {frames[-1].lineno}"


_LIBRARIES = (str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])


def _is_learners(filename: str) -> bool:
    return not filename.startswith(("<frozen", *_LIBRARIES))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and prints of an answer away from the output: nbgrader gives 0 for anything on stderr."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop the body after `seconds` with AnswerFailed("timeout"), on every platform, when in the main thread.

    The interrupt is the one that Ctrl-C sends, so it ends Python code between two bytecodes; it is sent again every
    second in case the answer swallows it. In another thread nothing can interrupt the body and it runs unlimited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    done, fired = threading.Event(), threading.Event()

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            fired.set()
            _thread.interrupt_main()
            wait = 1.0

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        if not fired.is_set():
            raise
        interrupted = True
    finally:
        done.set()
        watcher.join()
    if fired.is_set():
        if not interrupted:
            with contextlib.suppress(KeyboardInterrupt):  # the one that is still on its way
                time.sleep(0.05)
        raise _too_long(seconds)


def _too_long(seconds: float) -> AnswerFailed:
    return AnswerFailed(
        "timeout", f"It was stopped after {seconds:g} s: is there an endless loop, or a loop per element?"
    )
