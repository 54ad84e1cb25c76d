"""Runs of several ranks, for tests: torchrun's own agent, in a process that has torch already and forks the ranks.

    python tests/many_ranks.py FOLDER '[["scenario", ranks, {options}], ...]'

Every scenario is launched in turn. A rank leaves FOLDER/pids/PID when it begins; what it is to tell goes to files, and
errors to stderr, as the command line says them.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from lowprec_lab import blanks
from lowprec_lab.ranks import wire_bytes

HERE = Path(__file__).resolve().parent


def environment(folder: Path) -> dict[str, str]:
    import training

    path = os.pathsep.join(map(str, (HERE.parent, HERE)))
    return {**training.environment(folder), "PYTHONPATH": path}


def launch(folder: Path, *launches: tuple, timeout: float = 120) -> subprocess.CompletedProcess:
    """Run the scenarios, one after the other. Returns when all have ended; status is the number that failed.

    stderr has a line "== NUMBER" before what each of them says.
    """
    told = [sys.executable, str(HERE / "many_ranks.py"), str(folder), json.dumps(launches)]
    return subprocess.run(told, capture_output=True, text=True, env=environment(folder), timeout=timeout, check=False)


def left(folder: Path) -> list[int]:
    """Ranks that are still there."""
    pids = [int(path.name) for path in (folder / "pids").iterdir()]
    return [pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and _state(pid) != "Z"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


# --- scenarios: what each rank does -----------------------------------------------------------------------------------


def trains(folder: Path, rank: int, on_start=None, **options) -> object:
    """A run of small(**options), as the command line makes it; name, resume, overwrite and stop_at go to train."""
    from training import corpus, small

    from lowprec_lab.train import train

    told = {name: options.pop(name) for name in ("resume", "overwrite", "stop_at") if name in options}
    name = str(folder / options.pop("name", "run"))
    return train(small(**options), name, progress=False, corpus=corpus(), on_start=on_start, **told)


def _at(step: int, what) -> object:
    """An on_start that does `what` at the beginning of a step."""

    def on_start(trainer) -> None:
        batch = trainer.batch
        trainer.batch = lambda now, part=0: (what() if now == step else None, batch(now, part))[1]

    return on_start


def hangs(folder: Path, rank: int, **options) -> None:
    trains(folder, rank, _at(3, lambda: time.sleep(1000)) if rank == 1 else None, **options)


def _break() -> None:
    raise ValueError("this batch is broken")


def breaks(folder: Path, rank: int, **options) -> None:
    trains(folder, rank, _at(3, _break) if rank == 1 else None, **options)


def comes_late(folder: Path, rank: int, **options) -> None:
    time.sleep(1000 if rank == 1 else 0)
    trains(folder, rank, **options)


def has_other_settings(folder: Path, rank: int, **options) -> None:
    trains(folder, rank, accumulate=1 + rank, **options)


def has_fewer_batches(folder: Path, rank: int, **options) -> None:
    from lowprec_lab.peers import Peers

    Peers.agree = lambda self, what, values: None  # else it would be found out before the first step
    trains(folder, rank, stop_at=5 if rank == 1 else None, **options)


def dies(folder: Path, rank: int, who: int = 0, after: float = 0.0, **options) -> None:
    """One rank is killed so many seconds after its start, whatever it does then; FOLDER/died has the moment."""
    if rank == who:
        me = os.getpid()
        killer = os.fork()
        if killer == 0:
            time.sleep(after)
            (folder / "died").write_text(str(time.time()))
            os.kill(me, signal.SIGKILL)
            os._exit(0)
    trains(folder, rank, **options)
    time.sleep(1000 if rank == who else 0)  # it was done before its moment came


def _whole(tensor):
    """A tensor with all its shards."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _digest(tensors) -> str:
    parts = (each.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for each in tensors)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def is_compared(folder: Path, rank: int, to: str = "", **options) -> None:
    """Two steps whose gradients go to FOLDER/TO-RANK.pt, with the hashes of what FP8 layers made of their operands.

    "gradients": of the first step. "bound": of an alone rank: how far another order of its sums can be from them.
    "weights": hash of the codes and scales of all FP8 weights in the second step. "scales": of all delayed scales after
    the first. "sent": (what, bytes given, bytes sent) of each collective operation of the second step.
    """
    from lowprec_lab import recipes
    from lowprec_lab.formats import E4M3
    from lowprec_lab.quantizer import quantize

    told = {"weights": {}, "sent": [], "scales": "", "bound": {}}

    def on_start(trainer) -> None:
        def look(name):
            def hook(layer, _inputs):
                if trainer.step == 1 and trainer.model.training:
                    scaling = getattr(layer, "scalings", (None, None))[1]
                    q = scaling.quantize(layer.weight, False) if scaling else quantize(layer.weight, E4M3)
                    told["weights"][name] = _digest([q.codes, q.scale])

            return hook

        for name in getattr(trainer.precision, "converted", []):
            trainer.model.get_submodule(name).register_forward_pre_hook(look(name))
        finish = trainer._finish

        def finishing(step, scale):
            if step == 1:
                told["gradients"] = {name: _whole(p.grad).clone() for name, p in trainer.model.named_parameters()}
                if trainer.world == 1:
                    told["bound"] = _bound(trainer, step)
            done = finish(step, scale)
            if step == 1:
                scalings = recipes.scalings_of(trainer.model).values()
                told["scales"] = _digest([part.reshape(-1) for each in scalings for part in (each.scale, each.history)])
                _count_sent(told["sent"])
            return done

        trainer._finish = finishing

    trains(folder, rank, on_start, name=f"{to}-run", steps=2, clip=0.0, sample=0, eval_every=9, eval_batches=1,
           checkpoint_every=9, **options)  # fmt: skip
    torch.save(told, folder / f"{to}-{rank}.pt")


def _bound(trainer, step: int) -> dict:
    """For each gradient, a bound on the difference of two sums of its n parts in float32, in whatever order.

    A sum of n numbers is within gamma(n - 1) * sum(|number|) of the exact one, gamma(k) = k u / (1 - k u), u = 2^-24
    (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). The parts are the same bits everywhere, but
    for powers of two.
    """
    n = trainer.settings.accumulate
    kept = {name: p.grad for name, p in trainer.model.named_parameters()}
    sizes = {name: torch.zeros_like(p) for name, p in trainer.model.named_parameters()}
    for part in range(n):
        trainer.model.zero_grad(set_to_none=True)
        (trainer.model(*trainer.batch(step, part))[1] / n).backward()
        for name, p in trainer.model.named_parameters():
            sizes[name] += p.grad.abs()
    for name, p in trainer.model.named_parameters():
        p.grad = kept[name]
    u = 2.0**-24
    return {name: 2 * (n - 1) * u / (1 - (n - 1) * u) * each for name, each in sizes.items()}


def _count_sent(sent: list) -> None:
    """From here on, what each gathering and reduction is given, in bytes, and what the kernel sends during it."""
    dist = torch.distributed
    gather, reduce = dist.all_gather_single, dist.all_reduce

    def gathering(output, part, *args, **more):
        before = wire_bytes()
        work = gather(output, part, *args, **more)
        if work is not None:
            work.wait()
        sent.append(("gather", part.numel() * part.element_size(), wire_bytes() - before))
        return work

    def reducing(tensor, *args, **more):
        sent.append(("reduce", tensor.numel() * tensor.element_size(), 0))
        return reduce(tensor, *args, **more)

    dist.all_gather_single, dist.all_reduce = gathering, reducing


def overflows(folder: Path, rank: int, to: str = "", agree: bool = True, bad: dict | None = None, **options) -> None:
    """Twenty of sixty steps have an infinity in the gradient of one rank; FOLDER/TO-RANK.pt is what came of it.

    bad: step, as text -> rank. agree: False is for a learner's answer to exercise 14.2 that leaves the MAX out.
    """
    if not agree:
        blanks.FILLED["all_reduce_found_inf"] = lambda gradients, group=None: any(
            each is not None and not bool(each.isfinite().all()) for each in gradients
        )
    made = {}

    def on_start(trainer) -> None:
        made["trainer"], gradients = trainer, trainer._gradients

        def with_a_bad_one(step, scale, stop):
            done = gradients(step, scale, stop)
            if bad.get(str(step)) == rank:
                _part(trainer.model.blocks[0].mlp.up.weight.grad)[1, 2] = float("inf")
            return done

        def reduced_with_a_bad_one(step, scale, stop):
            weight = trainer.model.blocks[0].mlp.up.weight
            hook = weight.register_hook(lambda g: g * float("inf")) if bad.get(str(step)) == rank else None
            done = gradients(step, scale, stop)
            if hook is not None:
                hook.remove()
            return done

        trainer._gradients = with_a_bad_one if trainer.sharded else reduced_with_a_bad_one

        take = trainer.take_step

        def taking(stop=False):
            record = take(stop)
            skipped.extend([record["step"]] * record["skipped"])
            if record["step"] == 60:
                made["weights"] = _digest([_whole(each) for each in trainer.model.parameters()])
            return record

        trainer.take_step = taking

    skipped = []
    trains(folder, rank, on_start, name=f"{to}-run", loss_scale="1024", sample=0, eval_every=99, steps=60, clip=0.0,
           checkpoint_every=99, **options)  # fmt: skip
    trainer = made["trainer"]
    taken = {float(_part(state["step"])) for state in trainer.optimizer.state.values()}
    told = {"skipped": skipped, "taken": taken, "weights": made["weights"]}
    torch.save(told, folder / f"{to}-{rank}.pt")


def _part(tensor):
    return getattr(tensor, "_local_tensor", tensor)


# --- the driver -------------------------------------------------------------------------------------------------------


def _enter(scenario: str, folder: str, options: dict) -> None:
    """What a forked rank runs."""
    (Path(folder) / "pids" / str(os.getpid())).touch()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's own handler came along
    rank = int(os.environ["RANK"])
    try:
        globals()[scenario](Path(folder), rank, **options)
    except Exception as error:
        if getattr(error, "tell", rank == 0):
            print(f"lowprec-lab: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def main(folder: str, launches: list) -> int:
    import torch.distributed.nn  # noqa: F401 - loaded once, for all ranks that are forked
    import training  # noqa: F401
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    import lowprec_lab.train  # noqa: F401

    blanks.load_chapters()
    (Path(folder) / "pids").mkdir(exist_ok=True)
    failed = 0
    for number, (scenario, ranks, options) in enumerate(launches):
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=f"{os.getpid()}-{number}", rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", start_method="fork", monitor_interval=0.1, max_restarts=0,
        )  # fmt: skip
        print(f"== {number}", file=sys.stderr, flush=True)
        try:
            elastic_launch(config, _enter)(scenario, folder, options)
        except ChildFailedError:
            failed += 1
        (Path(folder) / "ended").write_text(str(time.time()))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
