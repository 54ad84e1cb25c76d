"""Runs of several ranks: how they end, and that they are the run of one."""

import random
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import many_ranks
import pytest
import training
from many_ranks import launch

from lowprec_lab.runs import Run

pytestmark = pytest.mark.slow


# how they end

ENDS = {
    "hangs": "rank 1 hangs, or is too slow, at step 3 (batch 1 of 1): rank 0 waits at step 3 (the gradients of batch",
    "breaks": "rank 1 failed at step 3 (batch 1 of 1): ValueError: this batch is broken",
    "comes_late": "rank 1 has not joined within 3 seconds: it died, hangs, or started late",
    "has_other_settings": "rank 1 has accumulate 2, and rank 0 has accumulate 1: all ranks need the same settings",
    "has_fewer_batches": "rank 1 has no batches after step 5, and rank 0 is at step 6 (the gradients of batch 1 ",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """What each of the scenarios said, and how long all of them took. They share the time of one start."""
    folder = tmp_path_factory.mktemp("ends")
    started = time.monotonic()
    done = launch(folder, *((name, 2, {"steps": 20, "patience": 3, "name": name}) for name in ENDS), timeout=300)
    assert done.returncode == len(ENDS), done.stderr  # all of them ended, and none of them well
    assert not many_ranks.left(folder)
    said = [[line for line in part.splitlines() if line.startswith("lowprec-lab:")]
            for part in done.stderr.split("== ")[1:]]  # fmt: skip
    return dict(zip(ENDS, said, strict=True)), time.monotonic() - started


@pytest.mark.parametrize("scenario", ENDS)
def test_a_run_ends_and_one_rank_says_who_when_and_why(ends, scenario):
    said, seconds = ends
    assert len(said[scenario]) == 1
    assert ENDS[scenario] in said[scenario][0]
    assert seconds < 45 * len(ENDS)  # patience, signs of life, 10 seconds of grace, and torchrun's own 30 at most


def test_a_port_in_use(tmp_path):
    """Without torchrun, whose own error that is else: rank 0 says so, and rank 1 that it could not reach it."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        done = as_ranks(tmp_path, port, training.command("--name", "a", *training.flags(patience=4)))
    assert [status for status, _ in done] == [1, 1]
    assert f"rank 0 cannot start: port {port} is in use on this machine" in done[0][1]
    assert time.monotonic() - started < 45


def as_ranks(folder, port, command):
    """(status, stderr) of two processes that find each other at a port."""
    base = {**many_ranks.environment(folder), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = [subprocess.Popen(command, env={**base, "RANK": str(rank)}, text=True, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE) for rank in range(2)]  # fmt: skip
    errors = [process.communicate(timeout=120)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Twenty times a rank of four is killed, at a random moment of a run that goes on each time: (folder, seconds).

    Four runs at once: most of that time is waiting for signs of life.
    """
    seed = int(time.time())
    print(f"seed {seed}")
    folders = [tmp_path_factory.mktemp(f"killed{number}") for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda each: (each, kill_five_times(each, random.Random(f"{seed} {each}"))), folders))


def kill_five_times(folder, chance):
    """How long after its rank was killed each run was still there."""
    seconds = []
    for _ in range(5):
        options = {"who": chance.randrange(4), "after": chance.uniform(0, 4), "resume": True, **LONG}
        done = launch(folder, ("dies", 4, options), timeout=200)
        assert done.returncode == 1, done.stderr
        assert not many_ranks.left(folder)
        died = float((folder / "died").read_text())
        seconds.append(float((folder / "ended").read_text()) - died)
    return seconds


LONG = {"steps": 400, "checkpoint_every": 3, "eval_every": 100, "sample": 0}


def test_a_killed_rank_ends_the_run_within_30_seconds(killed):
    seconds = [each for _, five in killed for each in five]
    assert len(seconds) == 20
    print(f"the longest of 20 ends took {max(seconds):.1f} s")
    assert max(seconds) < 30


def test_a_killed_run_goes_on_with_half_the_ranks(killed):
    for folder, _ in killed[:2]:
        state = Run(folder / "run").load()
        begun = state["step"] if state else 0
        done = launch(folder, ("trains", 2, {**LONG, "resume": True, "stop_at": begun + 2}))
        assert done.returncode == 0, done.stderr
        assert Run(folder / "run").load()["step"] == begun + 2
        assert [each["step"] for each in Run(folder / "run").read_log()] == list(range(1, begun + 3))
