"""Ranks as processes: what they return, what is said of one that fails, and that none is ever left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lowprec_lab.ranks import RankError, launch, run_ranks

HERE = str(Path(__file__).parent)
WITH_TESTS = {"PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])}
slow = pytest.mark.slow


# --- what the ranks do ---


def sums(x):
    import torch.distributed as dist

    print(f"I am rank {dist.get_rank()}")
    total = x * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return {"total": total, "rank": dist.get_rank()}


def one_fails(how):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("step 3: no more data")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_hangs():
    import torch.distributed as dist

    print("working")
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()


def sleeps(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(1000)


def wire(n):
    import torch.distributed as dist

    from lowprec_lab.ranks import wire_bytes

    dist.barrier()
    before = wire_bytes()
    pieces = [torch.empty(n) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, torch.ones(n))
    dist.barrier()
    return wire_bytes() - before


def start(name, *arguments, **how):
    return launch(f"test_ranks:{name}", 2, arguments, environment=WITH_TESTS, **how)


# --- the tests ---


@slow
def test_every_rank_returns_its_own_and_lines_are_streamed():
    heard = []
    first, second = start("sums", torch.tensor([1.0, 2.0]), say=heard.append)
    assert torch.equal(first["total"], torch.tensor([3.0, 6.0]))
    assert torch.equal(first["total"], second["total"])
    assert (first["rank"], second["rank"]) == (0, 1)
    assert {"[0] I am rank 0", "[1] I am rank 1"} <= set(heard)


@slow
@pytest.mark.parametrize(
    ("how", "said"),
    [("raises", "rank 1 failed: ValueError: step 3: no more data"), ("dies", "rank 1 was ended by SIGKILL")],
)
def test_a_rank_that_fails_ends_all_and_is_named(how, said):
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        start("one_fails", how, say=None)
    assert str(caught.value).startswith(said)
    assert caught.value.rank == 1
    assert time.monotonic() - began < 30


@slow
def test_a_rank_that_hangs_is_ended_at_the_limit():
    began = time.monotonic()
    with pytest.raises(RankError, match=r"ranks 0 and 1 had not ended after 10 s.*'working'"):
        start("one_hangs", time_limit_s=10, say=None)
    assert time.monotonic() - began < 20


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts the kernel's bytes")
def test_the_kernel_counts_what_a_gather_sends():
    for sent in start("wire", 100_000, say=None):
        assert 400_000 <= sent <= 404_000


@slow
def test_no_rank_outlives_the_process_that_launched_it(tmp_path):
    program = f"from lowprec_lab.ranks import launch; launch('test_ranks:sleeps', 2, ({str(tmp_path)!r},))"
    launcher = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **WITH_TESTS})
    while len(list(tmp_path.iterdir())) < 2:
        assert launcher.poll() is None
        time.sleep(0.1)
    ranks = [int(each.name) for each in tmp_path.iterdir()]
    launcher.kill()
    launcher.wait()
    ends = time.monotonic() + 10
    while any(map(_runs, ranks)) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not any(map(_runs, ranks))


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_command_that_does_not_start_well_is_said():
    with pytest.raises(RankError, match="rank 0 failed: no such thing"):
        run_ranks([sys.executable, "-c", "print('no such thing'); raise SystemExit(3)"], 1, say=None)


def test_less_than_one_rank_is_refused():
    with pytest.raises(ValueError, match="0 ranks"):
        launch("test_ranks:sums", 0)
