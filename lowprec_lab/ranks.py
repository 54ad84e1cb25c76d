"""Several ranks as real processes on this machine: each with a log that is streamed, and all with a bounded end.

    results = launch("lowprec_lab.distributed:greet", ranks=2)       # what the function returns on each rank

Every process has the environment that torchrun gives (RANK, LOCAL_RANK, WORLD_SIZE, ...) and the process group is
there when the function is called: NCCL where each rank has a GPU, else gloo over the loopback device. The ranks find
each other through a file, so no port can be in use.

How it ends:
- When a rank ends with an error all others are stopped, and RankError says which rank it was, and why.
- After `time_limit_s` all are stopped, and RankError names those that were still at work.
- When the process that launched them ends, in whatever way, they end: each reads from a pipe that closes then.

References: PyTorch's documentation of torchrun (elastic/run) for the environment; prctl(2) of the Linux man-pages.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIME_LIMIT_S = 60.0
_GRACE_S = 2.0  # for the last words of a process that has ended
_LAST_LINES = 3
_LAUNCHED = "LOWPREC_LAUNCHED"  # in the environment of a process that `run_ranks` has started


class RankError(RuntimeError):
    """A rank failed, or was not done in time. The sentence says which, and why. rank: the first one that did."""

    def __init__(self, sentence: str, rank: int) -> None:
        super().__init__(sentence)
        self.rank = rank

    def _render_traceback_(self) -> list[str]:
        return [f"RankError: {self}"]


def launch(
    function: str, ranks: int = 2, arguments: Sequence = (), *, time_limit_s: float = TIME_LIMIT_S,
    environment: Mapping[str, str] | None = None, say: Callable[[str], None] | None = print,
) -> list:  # fmt: skip
    """What `function(*arguments)` returns on each of `ranks` processes, by rank. It never takes longer than the limit.

    function: "module:name", as every process can import it. arguments, results: tensors, numbers, texts, and lists,
    tuples and dicts of them. environment: variables beside this process's own. say: hears every line that a rank
    prints, with "[0] " before it; None drops them. Exercises run on what is filled in here.
    Raises RankError, and ValueError for less than one rank.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: there must be one at least")
    with tempfile.TemporaryDirectory(prefix="lowprec-ranks-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        torch.save({"arguments": tuple(arguments), "answers": _answers_in_use()}, place / "given")
        command = [sys.executable, "-m", "lowprec_lab.ranks", function, folder, str(time_limit_s)]
        run_ranks(command, ranks, time_limit_s=time_limit_s, environment=environment, say=say)
        return [torch.load(place / f"result{rank}", weights_only=True) for rank in range(ranks)]


def run_ranks(
    command: Sequence[str], ranks: int, *, time_limit_s: float = TIME_LIMIT_S,
    environment: Mapping[str, str] | None = None, say: Callable[[str], None] | None = print,
) -> None:  # fmt: skip
    """Run a command once for each rank, with torchrun's environment, until all are done; as `launch` does.

    The command's process calls `end_with_the_launcher`, so that it ends when this one is killed. It has no other input.
    """
    processes: list[_Process] = []
    heard: queue.SimpleQueue = queue.SimpleQueue()
    try:
        for rank in range(ranks):
            variables = {**os.environ, **torchrun_variables(rank, ranks), **(environment or {})}
            processes.append(_Process(rank, command, {**variables, _LAUNCHED: "1"}, heard))
        _attend(processes, heard, time_limit_s, say or (lambda line: None))
    finally:
        for each in processes:
            each.end()


def torchrun_variables(rank: int, ranks: int) -> dict[str, str]:
    """What torchrun tells each process by its environment, for ranks on one machine, without an address."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


class _Process:
    """One rank: its process, in a session of its own, and the thread that reads what it prints."""

    def __init__(self, rank: int, command: Sequence[str], variables: dict, heard: queue.SimpleQueue) -> None:
        self.rank, self.last, self.gone_at = rank, [], 0.0
        self.popen = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, args=(heard,), daemon=True)
        self.reader.start()

    def _read(self, heard: queue.SimpleQueue) -> None:
        for line in self.popen.stdout:
            heard.put((self, line.decode("utf-8", "replace").rstrip()))
        heard.put((self, None))

    def code(self, ends: float) -> int:
        """Its exit status, now that its output has ended; 0 while it runs on until then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.popen.wait(max(ends - time.monotonic(), 0.0))
        return 0

    def long_gone(self) -> bool:
        """Whether it has ended for a while, though something that it started still holds its output."""
        if self.popen.poll() is None:
            return False
        self.gone_at = self.gone_at or time.monotonic()
        return time.monotonic() > self.gone_at + _GRACE_S

    def end(self) -> None:
        """End it and all that it started, if it still runs."""
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self.popen.pid, signal.SIGKILL)
            else:
                self.popen.kill()
        self.popen.wait()
        self.reader.join(_GRACE_S)
        self.popen.stdin.close()
        self.popen.stdout.close()


def _attend(processes: list[_Process], heard: queue.SimpleQueue, time_limit_s: float, say: Callable) -> None:
    """Pass on what the ranks say until all have ended well. Raises RankError for the first that has not.

    The first is the one whose output ended first: others fail because of it, soon after.
    """
    ends = time.monotonic() + time_limit_s
    ended: list[_Process] = []
    while len(ended) < len(processes):
        ended += [each for each in _pass_on(heard, say, 0.05) if each not in ended]
        ended += [each for each in processes if each not in ended and each.long_gone()]
        failed = next((each for each in ended if each.code(ends)), None)
        if failed is not None:
            stopped = ", and the other ranks were stopped" if len(processes) > 1 else ""
            raise RankError(f"rank {failed.rank} {_how(failed)}{stopped}", failed.rank)
        if time.monotonic() > ends:
            raise _too_long([each for each in processes if each.popen.poll() is None], time_limit_s)


def _pass_on(heard: queue.SimpleQueue, say: Callable, wait_s: float) -> list[_Process]:
    """Say the lines that have come, after a wait for the first; returns the processes that will say no more."""
    silent = []
    with contextlib.suppress(queue.Empty):
        process, line = heard.get(timeout=wait_s)
        while True:
            if line is None:
                silent.append(process)
            else:
                process.last = [*process.last, line][-_LAST_LINES:]
                say(f"[{process.rank}] {line}")
            process, line = heard.get_nowait()
    return silent


def _how(process: _Process) -> str:
    code = process.popen.poll()
    said = process.last[-1] if process.last else ""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
    return f"failed: {said}" if said else f"ended with status {code}"


def _too_long(still: list[_Process], time_limit_s: float) -> RankError:
    who = ("rank " if len(still) == 1 else "ranks ") + " and ".join(str(each.rank) for each in still)
    said = [f"the last line of rank {each.rank} was {each.last[-1]!r}" for each in still if each.last]
    more = f"; {', '.join(said)}" if said else ""
    return RankError(
        f"{who} had not ended after {time_limit_s:g} s, and all ranks were stopped{more}. Does a rank call a "
        "collective that the others do not?", still[0].rank,
    )  # fmt: skip


# --- in the process of a rank -----------------------------------------------------------------------------------------


def end_with_the_launcher() -> None:
    """Have this process end when the one that launched it does: its pipe closes, and on Linux the kernel says so too.

    For a command of `run_ranks`; does nothing in a process that was launched in another way.
    """
    if not os.environ.pop(_LAUNCHED, ""):
        return
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also where Python no longer runs

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(0, 1)
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def pick_backend(ranks: int) -> str:
    """ "nccl" where each of these ranks has a GPU of its own on this machine, else "gloo"."""
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "gloo"


def wire_bytes() -> int | None:
    """The bytes that this process has sent over all its TCP connections, as the kernel counts them; None elsewhere.

    Between ranks of one machine gloo sends what it would send between two. Headers of gloo are counted; those of
    TCP, and what TCP had to send again, are not. What still waits in a buffer is not, so let a barrier come first. On
    Linux only.
    """
    if sys.platform != "linux":
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
                    total += sent - again
    return total


def _answers_in_use() -> dict[str, tuple[str, str]]:
    """The source and helpers of every answer that is filled in here."""
    from lowprec_lab.blanks import FILLED
    from lowprec_lab.sources import source_of

    sources = {name: source_of(function) for name, function in FILLED.items()}
    return {name: (each.text, each.helpers) for name, each in sources.items() if each is not None}


def _take_answers(answers: Mapping[str, tuple[str, str]]) -> None:
    from lowprec_lab import blanks
    from lowprec_lab.sources import Source, load

    blanks.load_chapters()
    for each in blanks.in_order():
        if each.name in answers:
            blanks.install(each.name, load(Source(*answers[each.name]), each, _in_use, f"rank's {each.name}"))


def _in_use(name: str) -> Callable:
    from lowprec_lab import blanks

    return lambda *args, **kwargs: blanks.current(name, say=False)(*args, **kwargs)


def main(function: str, folder: str, limit_s: str) -> None:
    """Be one rank of a `launch`: join the others, call the function, and leave its result in the folder."""
    end_with_the_launcher()
    rank, ranks, place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(folder)
    backend = pick_backend(ranks)
    if backend == "gloo":
        loopback = "lo" if sys.platform == "linux" else "lo0" if sys.platform == "darwin" else None
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    else:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    given = torch.load(place / "given", weights_only=True)
    _take_answers(given["answers"])
    module, _, name = function.partition(":")
    dist.init_process_group(
        backend, init_method=(place / "meeting").as_uri(), rank=rank, world_size=ranks,
        timeout=timedelta(seconds=float(limit_s)),
    )  # fmt: skip
    result = getattr(importlib.import_module(module), name)(*given["arguments"])
    torch.save(result, place / f"result{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:
        traceback.print_exc(limit=-2)
        if "\n" in str(error):  # the last line is what a RankError quotes
            print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        sys.stdout.flush()
        os._exit(1)  # not through what would wait for the other ranks
