"""What tests need of a sandbox: to open one, or to be skipped, with the reason, where none can be made."""

import contextlib
import os
import time

import pytest

from lowprec_lab.grading import wire
from lowprec_lab.grading.sandbox import Sandbox, SandboxError


@contextlib.contextmanager
def open_sandbox(*args, **kwargs):
    """A started Sandbox. Where there can be none: skip, or fail if LOWPREC_REQUIRE_SANDBOX is 1."""
    sandbox = Sandbox(*args, **kwargs)
    try:
        sandbox.__enter__()
    except SandboxError as error:
        sandbox.close()
        if os.environ.get("LOWPREC_REQUIRE_SANDBOX") == "1":
            raise
        pytest.skip(str(error))
    try:
        yield sandbox
    finally:
        sandbox.close()


def ask(worker, *request, within=20.0):
    """The reply of a worker. Raises WireError as the judge's own requests do."""
    deadline = time.monotonic() + within
    wire.send(worker.channel, request, deadline)
    return wire.receive(worker.channel, deadline)


def run(workers, body, *args, imports="", within=20.0):
    """What a fresh worker replies whose answer to sign_bit has this body (of x), and why it had ended: (reply, why).

    The reply is the result, ("failed", sentence), or ("gone", WireError's text).
    """
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    worker = workers.worker()
    try:
        loaded = ask(worker, "load", "sign_bit", f"{imports}\ndef sign_bit(x=None):\n{lines}\n", "", {}, within=within)
        assert "ok" in loaded, loaded
        reply = ask(worker, "call", args, {}, within=within)
        outcome = reply["ok"] if "ok" in reply else ("failed", reply["failed"][1])
    except wire.WireError as error:
        outcome = ("gone", str(error))
    return outcome, worker.kill()
