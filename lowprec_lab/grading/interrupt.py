"""Ctrl-C between two steps of a long work: a step that has begun is finished, and no Ctrl-C gets lost.

Python raises KeyboardInterrupt wherever it happens to be. Inside the callback of a weak reference, of which a step of
nbgrader's ends in thousands, it is printed and forgotten, and the work goes on.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class CtrlC:
    """While it is entered, Ctrl-C raises KeyboardInterrupt: at once, or after a `step`; a second one at once."""

    def __init__(self) -> None:
        self._noticed = self._in_step = False
        self._before: object = None

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers, or gets the signal
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Something that is finished first. Raises KeyboardInterrupt afterwards if there was one until then."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
        if self._noticed:
            raise KeyboardInterrupt

    def _handle(self, *_: object) -> None:
        again, self._noticed = self._noticed, True
        if again or not self._in_step:
            raise KeyboardInterrupt
