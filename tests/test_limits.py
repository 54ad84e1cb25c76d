"""The time that an answer has: of the processor where the machine is busy, of the clock where it only waits."""

import signal
import time
from pathlib import Path

import pytest

from lowprec_lab import limits


def stopped_after(body, seconds):
    started = time.monotonic()
    with pytest.raises(limits.TookTooLongError), limits.time_limit(seconds):
        body()
    return time.monotonic() - started


def computes():
    while True:
        pass


def test_what_only_waits_is_stopped_by_the_clock():
    assert stopped_after(lambda: time.sleep(30), 0.3) < 5


def test_what_computes_on_a_busy_machine_gets_its_time_of_the_processor(monkeypatch):
    real = time.process_time
    monkeypatch.setattr(limits.time, "process_time", lambda: real() / 3)  # as if others took two thirds of it
    assert stopped_after(computes, 0.3) > 0.8


def test_nobody_gets_more_than_six_times_the_time(monkeypatch):
    began, real = time.monotonic(), time.monotonic
    monkeypatch.setattr(limits.time, "process_time", lambda: (real() - began) / 5)
    monkeypatch.setattr(limits, "_LONGEST", 2.0)
    assert stopped_after(computes, 0.3) < 5


def test_what_is_in_the_queue_does_not_wait():
    """On a machine that is busy with ten other things, a body can have less than a tenth of a processor."""
    assert limits._still_due(10, took=10, used=0.5) == 0
    assert limits._still_due(10, took=10, used=0.5, wants_to_run=True) == 9.5
    assert limits._still_due(10, took=60, used=0.5, wants_to_run=True) == 0


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system does not tell")
@pytest.mark.parametrize(("body", "seen"), [(computes, True), (lambda: time.sleep(30), False)])
def test_who_waits_and_who_would_run(body, seen, monkeypatch):
    answers = []
    monkeypatch.setattr(limits, "_still_due", lambda *given: answers.append(given[-1]) or 0.0)
    stopped_after(body, 0.3)
    assert answers == [seen]


def test_how_much_is_still_due():
    assert limits._still_due(10, took=10, used=10) == 0
    assert limits._still_due(10, took=10, used=4) == 6
    assert limits._still_due(10, took=10, used=0.5) == 0  # it waits
    assert limits._still_due(10, took=60, used=9) == 0


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_process_that_was_told_to_ignore_ctrl_c_is_stopped_all_the_same(before):
    """A script that starts a program in the background has it ignore SIGINT."""

    def computes_for_a_minute():
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            pass

    handler = signal.signal(signal.SIGINT, before)
    try:
        assert stopped_after(computes_for_a_minute, 0.2) < 30
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, handler)
