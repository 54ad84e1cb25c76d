"""Runs of several ranks: how they end, and that they are the run of one."""

import random
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import many_ranks
import pytest
import torch
import training
from many_ranks import launch
from training import small

from lowprec_lab.runs import Run, RunError
from lowprec_lab.serving import load_run
from lowprec_lab.train import _with_steps_as_large

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


# that they are the run of one

KINDS = {"fp32": {}, "fp8": {"precision": "fp8"}, "delayed": {"precision": "fp8", "recipe": "delayed"}}
RUNS = [(ranks, shard) for ranks in (2, 4) for shard in (False, True)]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """What each rank found in two steps: for each kind, one rank with four batches, and two and four with as many."""
    folder = tmp_path_factory.mktemp("compared")
    launches = []
    for kind, options in KINDS.items():
        launches.append(("is_compared", 1, {"to": f"{kind}-1-False", "accumulate": 4, **options}))
        for ranks, shard in RUNS:
            told = {"to": f"{kind}-{ranks}-{shard}", "accumulate": 4 // ranks, "shard": shard, **options}
            launches.append(("is_compared", ranks, told))
    wide = {"shard": True, "width": 64}
    launches += [("is_compared", 2, {"to": f"wire-{kind}", **wide, **KINDS[kind]}) for kind in ("fp32", "fp8")]
    done = launch(folder, *launches, timeout=400)
    assert done.returncode == 0, done.stderr
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


@pytest.mark.parametrize(("ranks", "shard"), RUNS)
@pytest.mark.parametrize("kind", ["fp32", "fp8"])
def test_gradients_are_those_of_one_process(compared, kind, ranks, shard):
    """To the error of a sum of four parts in another order, and no further."""
    alone, (first, *others) = compared[f"{kind}-1-False-0"], of_all(compared, kind, ranks, shard)
    for name, gradient in alone["gradients"].items():
        difference = (gradient - first["gradients"][name]).abs()
        assert bool((difference <= alone["bound"][name]).all()), name
        assert bool((alone["bound"][name] <= 1e-5).all())  # and that says something
        assert all(torch.equal(first["gradients"][name], each["gradients"][name]) for each in others)


@pytest.mark.parametrize(("ranks", "shard"), RUNS)
@pytest.mark.parametrize("kind", ["fp8", "delayed"])
def test_all_ranks_have_the_same_codes_and_scales(compared, kind, ranks, shard):
    """Of weights, by hashes; of activations too where their largest magnitudes are reduced, with delayed scales."""
    first, *others = of_all(compared, kind, ranks, shard)
    assert len(first["weights"]) == 8
    for other in others:
        assert other["weights"] == first["weights"]
        assert other["scales"] == first["scales"]
    if ranks == 2 and kind == "fp8":  # two numbers add up to the same bits in either order: what follows is the same
        assert first["weights"] == of_all(compared, kind, 2, not shard)[0]["weights"]


def of_all(compared, kind, ranks, shard):
    return [compared[f"{kind}-{ranks}-{shard}-{rank}"] for rank in range(ranks)]


def test_weights_that_travel_as_codes_are_a_quarter_of_the_bytes(compared):
    """What a rank sends to gather its blocks, and to agree on their largest magnitudes, as Linux counts it."""
    full, eight = (compared[f"wire-{kind}-0"]["sent"] for kind in ("fp32", "fp8"))
    gathered = [[each[1:] for each in sent if each[0] == "gather"] for sent in (full, eight)]
    blocks = [(one, two) for one, two in zip(*gathered, strict=True) if one[0] != two[0]]
    assert len(blocks) == 6  # two blocks forward and backward, and forward in the validation after it
    agreed = [size for what, size, _ in eight if what == "reduce" and size > 8]  # beside the loss
    assert agreed == [8 * 2 * 4] * 2
    for count, what in enumerate(("given to the gatherings", "sent by the kernel")):
        ratio = (sum(two[count] for _, two in blocks) + sum(agreed)) / sum(one[count] for one, _ in blocks)
        print(f"{ratio:.4f} of FP32's bytes are {what}")
        assert 0.25 < ratio <= 0.27


@pytest.fixture(scope="module")
def overflowed(tmp_path_factory):
    """Runs of two ranks with an infinity in one rank's gradient at 20 random steps of 60: (those steps, what came)."""
    folder = tmp_path_factory.mktemp("overflowed")
    chance = random.Random(int(time.time()))
    bad = {str(step): chance.randrange(2) for step in chance.sample(range(2, 61), 20)}
    cases = {"whole": {}, "sharded": {"shard": True}, "apart": {"shard": True, "agree": False}}
    done = launch(folder, *(("overflows", 2, {"to": to, "bad": bad, **case}) for to, case in cases.items()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the work of reference: all_reduce_found_inf (exercise 14.2)") == 2
    assert done.stdout.count("the work of your all_reduce_found_inf (exercise 14.2)") == 1
    return sorted(map(int, bad)), {to: [torch.load(folder / f"{to}-{rank}.pt") for rank in range(2)] for to in cases}


def test_all_ranks_skip_the_same_steps(overflowed):
    bad, came = overflowed
    for to in ("whole", "sharded"):
        for rank in came[to]:
            assert rank["skipped"] == bad, to
            assert rank["taken"] == {40.0}
    hashes = {rank["weights"] for to in ("whole", "sharded") for rank in came[to]}
    assert len(hashes) == 1  # both ranks, whole and in shards, are the same to the last bit


def test_without_the_reduction_ranks_drift_apart(overflowed):
    """A learner's answer without the MAX: each rank skips what it sees itself, and weights are of different steps."""
    bad, came = overflowed
    skipped = [rank["skipped"] for rank in came["apart"]]
    assert skipped[0] != skipped[1]
    assert sorted(skipped[0] + skipped[1]) == bad
    assert came["apart"][0]["taken"] != came["apart"][1]["taken"] or len(skipped[0]) == len(skipped[1])
    assert came["apart"][0]["weights"] != came["sharded"][0]["weights"]


GOES_ON = {**KINDS, "fp16": {"precision": "fp16"}}


@pytest.fixture(scope="module")
def went_on(tmp_path_factory):
    """Runs that four ranks began, two went on with, then one that is not sharded, then two: (folder, what was said)."""
    folder = tmp_path_factory.mktemp("on")
    legs = [(4, 4, True), (2, 7, True), (1, 9, False), (2, 12, True)]
    launches = []
    for kind, options in GOES_ON.items():
        launches.append(("trains", 1, {**options, "name": f"{kind}-whole", "accumulate": 4}))
        launches += [("trains", ranks, {**options, "name": kind, "stop_at": stop, "shard": shard, "resume": True})
                     for ranks, stop, shard in legs]  # fmt: skip
    done = launch(folder, *launches, timeout=400)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.parametrize("kind", GOES_ON)
def test_a_sharded_run_goes_on_with_any_number_of_ranks(went_on, kind):
    """It stays the run of one rank that was never stopped, but for the order of sums."""
    folder, said = went_on
    whole, parts = (Run(folder / name).read_log() for name in (f"{kind}-whole", kind))
    near = {"fp32": 1e-5, "fp16": 1e-3, "fp8": 1e-2, "delayed": 2e-2}[kind]
    assert [each["step"] for each in parts] == list(range(1, 13))
    for one, two in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=near)
    assert said.count("Going on after step 4 of 12.") == len(GOES_ON)
    for ranks, each in ((2, 2), (1, 4)):
        assert f"{kind} is 4 batches, so each of {ranks} processes has {each} of them now." in said
    names = {path.name for path in (folder / kind).iterdir()}
    # The newest is of the two ranks, and the one before it of the one rank that was not sharded.
    assert names == {"settings.json", "log.jsonl", "checkpoint.sharded", "checkpoint.previous.pt", "sample.txt"}
    assert load_run(str(folder / kind), print)[0].training is False


def test_a_step_stays_as_large_or_the_run_is_another(went_on):
    folder, _ = went_on
    run = Run(folder / "fp32")
    with pytest.raises(RunError, match=r"is 4 batches, and 3 processes cannot .* Go on with 1, 2 or 4$"):
        _with_steps_as_large(run, run.load(), small(), print, 3)
    with pytest.raises(RunError, match="is 4 batches, and 6 were asked for .2 of processes times accumulate 3."):
        _with_steps_as_large(run, run.load(), small(accumulate=3), print, 2)
    assert _with_steps_as_large(run, run.load(), small(), print, 4).accumulate == 1


def test_a_damaged_shard_gives_way_to_the_previous_checkpoint(went_on, capsys):
    folder, _ = went_on
    shutil.copytree(folder / "fp32", folder / "damaged")
    run = Run(folder / "damaged")
    assert run.load()["step"] == 12
    shard = next(run.sharded.glob("__1*"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    assert run.load()["step"] < 12
    assert f"the checksum of {shard.name} is wrong" in capsys.readouterr().out
    shard.unlink()
    assert run.load()["step"] < 12
    shutil.rmtree(run.sharded)
    assert run.load()["step"] < 12


def test_a_folder_that_machines_do_not_share_is_refused(tmp_path):
    run = Run(tmp_path)
    (run.begin_shards() / "__0_0.distcp").write_bytes(b"of rank 0")
    with pytest.raises(RunError, match="one that all machines share"):
        run.end_shards({"step": 3}, ranks=2)
    assert run.load() is None


# two machines

# One network namespace inside of a new one, a cable between them, and torchrun at each end of it. Nothing of this
# machine's own network is touched, and all of it is gone with the processes.
TWO_MACHINES = """
ip link set lo up || exit 77
unshare --net sleep 300 & other=$!
trap "kill $other" EXIT
sleep 0.5
ip link add here type veth peer name there netns $other || exit 77
ip addr add 10.77.0.1/24 dev here; ip link set here up
nsenter --target $other --net sh -c "ip link set lo up; ip addr add 10.77.0.2/24 dev there; ip link set there up"
GLOO_SOCKET_IFNAME=here "$@" --node-rank 0 $TRAIN & first=$!
GLOO_SOCKET_IFNAME=there nsenter --target $other --net "$@" --node-rank 1 $TRAIN; second=$?
wait $first && exit $second
"""


def test_two_machines(tmp_path):
    """torchrun on two machines that have nothing but a cable, and a folder that both see."""
    if not all(shutil.which(name) for name in ("ip", "unshare", "nsenter")):
        pytest.skip("ip, unshare and nsenter are needed")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make network namespaces")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                "--master-addr", "10.77.0.1", "--master-port", "29500"]  # fmt: skip
    flags = training.flags(steps=8, sample=0, precision="fp8")
    command = " ".join(["-m lowprec_lab train --name a --shard", *flags])
    environment = {**many_ranks.environment(tmp_path), "TRAIN": command}
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", TWO_MACHINES, "two", *torchrun], capture_output=True, text=True,
        env=environment, timeout=150, check=False,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip(f"this kernel has no virtual cables: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "2 processes, 1 threads" in done.stdout
    assert len(Run(tmp_path / "work/runs/a").read_log()) == 8
