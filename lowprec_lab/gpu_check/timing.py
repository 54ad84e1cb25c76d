"""What is bounded: time limits that hold, also while a compiler works, and errors that become data."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import torch

from lowprec_lab import fused


class OutOfTimeError(BaseException):
    """What ran was stopped. No Exception: nothing that it calls may take this for an error of its own."""


class SkippedError(Exception):
    """Something is not measured; the sentence says why."""


@contextlib.contextmanager
def reported(report: dict) -> Iterator[None]:
    """Put down what goes wrong inside, as "skipped" or "failed" with a line on why, and go on: the rest may work.

    OutOfTimeError goes on to whoever set the limit.
    """
    try:
        yield
    except SkippedError as reason:
        report["skipped"] = str(reason)
    except OutOfTimeError:
        report["skipped"] = "out of time"
        raise
    except torch.OutOfMemoryError as error:
        report["skipped"] = f"out of memory: {fused.first_line(error)}"
    except Exception as error:  # whatever a compiler, a driver or an answer may raise
        report["failed"] = fused.first_line(error)


@contextlib.contextmanager
def stop_after(seconds: float) -> Iterator[None]:
    """Stop the body with OutOfTimeError, again every second in case that something swallows it.

    Between two steps of Python code only, and not on Windows, nor outside the main thread: there the body goes on.
    A limit around this one goes on to count.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: object) -> None:
        raise OutOfTimeError

    began = time.monotonic()
    outer, _ = signal.getitimer(signal.ITIMER_REAL)
    before = signal.signal(signal.SIGALRM, stop)
    # An outer limit that is nearer stops the body as well; who set it catches what is raised.
    signal.setitimer(signal.ITIMER_REAL, max(min(seconds, outer or seconds), 1e-3), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - began), 1e-3), 1.0)


def countdown(seconds: float) -> Callable[[], float]:
    """A function that gives the seconds that are left, negative ones when time is over."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()
