"""Workers without a sandbox, for one's own work (`--no-sandbox`) and for machines that only develop: plain processes.

They can do whatever their user can do. Nobody else's code is graded with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

_START = (
    "import socket, sys; from lowprec_lab.grading.worker import serve; serve(socket.socket(fileno=int(sys.argv[1])))"
)


class PlainWorker:
    """One process for one exercise, in a session of its own."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        environment = {**os.environ, "NBGRADER_EXECUTION": "autograde"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        theirs.close()

    def kill(self) -> str:
        """End the process and everything in its session. Returns why it had ended before, if it had."""
        ended = self._process.poll()
        if ended is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.channel.close()
        return "" if ended is None else f"it ended with status {ended}"


class PlainProcesses:
    """Gives out plain workers; as a context manager, like the sandbox."""

    def __enter__(self) -> PlainProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def worker(self) -> PlainWorker:
        """A fresh process."""
        return PlainWorker()


def open_workers(sandbox: bool) -> contextlib.AbstractContextManager:
    """Where workers come from, to be entered: the sandbox, or without one plain processes.

    Entering raises SandboxError, with what to do, where no sandbox can be made.
    """
    if not sandbox:
        return PlainProcesses()
    from lowprec_lab.grading.sandbox import Sandbox

    return Sandbox()
