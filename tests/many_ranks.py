"""Runs of several ranks, for tests: torchrun's own agent, in a process that has torch already and forks the ranks.

    python tests/many_ranks.py FOLDER '[["scenario", ranks, {options}], ...]'

Every scenario is launched in turn. A rank leaves FOLDER/pids/PID when it begins; what it is to tell goes to files, and
errors to stderr, as the command line says them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
