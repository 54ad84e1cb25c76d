"""Limits for code that is not ours: how long it runs, how much memory it takes, and what it prints."""

from __future__ import annotations

import _thread
import contextlib
import io
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator

# A body gets its processor time within so many times its seconds; one that uses less than this share, and is not in the
# queue for more, only waits.
_LONGEST = 6.0
_WAITING = 0.1


class TookTooLongError(Exception):
    """The body of `time_limit` was stopped."""


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Keep warnings and prints away from the output, where stderr costs points; yields what was printed."""
    printed = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(printed),
    ):
        warnings.simplefilter("ignore")
        yield printed


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop the body after `seconds` with TookTooLongError, on every platform, when in the main thread.

    The interrupt is the one that Ctrl-C sends, so it ends Python code between two bytecodes, and waiting too (not on
    Windows); it is sent again every second in case the body swallows it. In another thread nothing can interrupt the
    body and it runs unlimited. Where the machine is busy with something else, a body that computes gets its `seconds`
    of processor time, within limits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    done, fired = threading.Event(), threading.Event()

    def watch() -> None:
        began, busy, wait = time.monotonic(), time.process_time(), seconds
        while not done.wait(wait):
            took, used = time.monotonic() - began, time.process_time() - busy
            wait = 0.0 if fired.is_set() else _still_due(seconds, took, used, _wants_to_run())
            if wait > 0:
                continue
            fired.set()
            _interrupt_main_thread()
            wait = 1.0

    watcher = threading.Thread(target=watch, daemon=True)
    interrupted = False
    try:
        with _interruptible():
            watcher.start()
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
        raise TookTooLongError(f"was stopped after {seconds:g} s")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Have Python listen to SIGINT: a process that a script started in the background was told to ignore it."""
    before = signal.getsignal(signal.SIGINT)
    if callable(before):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if before is not None:  # None: not set by Python, and nothing that it could set again
            signal.signal(signal.SIGINT, before)


def _interrupt_main_thread() -> None:
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # a real signal ends time.sleep as well
    else:
        _thread.interrupt_main()


def _still_due(seconds: float, took: float, used: float, wants_to_run: bool = False) -> float:
    """How much longer a body may run that `took` so long and `used` so much of the processor: none if it only waits."""
    if took >= _LONGEST * seconds or (used < _WAITING * took and not wants_to_run):
        return 0.0
    return max(0.0, seconds - used)


def _wants_to_run() -> bool:
    """Whether the main thread runs, or would if it were its turn; False where the system does not tell."""
    try:
        with open(f"/proc/self/task/{threading.main_thread().native_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


@contextlib.contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Let this process take at most `more_bytes` of address space more than it has; beyond that, allocations fail.

    One call of torch cannot be interrupted, and 2^32 elements would take a laptop down. Linux only: elsewhere nothing
    is limited.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    with open("/proc/self/statm") as pages:
        now = int(pages.read().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = min([now + more_bytes, *(limit for limit in (before, hard) if limit != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
