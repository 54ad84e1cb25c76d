"""What the ranks of one run know of each other, so that a run of many processes ends when one of them does.

A collective operation waits for everybody. If one rank has died, hangs, came too late or was told something else, all
others wait, and a library's error says "connection closed" at best. Here each rank tells the others twice a second, by
the store through which they found each other, at which step it is and what it does there; whoever cannot go on reads
that, and says which rank it was, at which step, and why. A thread of each rank looks after three things meanwhile:

    another rank has failed          this one ends too, 4 seconds later at the latest
    the launcher is gone             this one ends at once: no process is left behind
    the next rank gives no sign of   the run has failed; so a rank that died while all others wait inside of a library
    life for 12 seconds              is found, too
    nothing goes on for too long,    the run has failed, and the rank that is furthest behind is named
    and another rank is behind

References: torch.distributed, TCPStore and the environment of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

BEAT = 0.5  # seconds between two signs of life
SILENT = 2.5  # seconds without one, after which a rank counts as gone
END = "the end"  # of the steps: what a rank does last
LOST = 12.0  # seconds without one, after which the rank before it ends the run
GRACE = 4.0  # seconds in which a rank ends by itself after another one has failed
_COMMUNICATION = ("connection", "timed out", "timeout", "gloo", "nccl", "store", "socket", "broken pipe", "peer")


class PeerError(RuntimeError):
    """A run of many ranks cannot go on. tell: whether this rank is the one that says so."""

    def __init__(self, text: str, tell: bool = True) -> None:
        super().__init__(text)
        self.tell = tell

    def _render_traceback_(self) -> list[str]:
        return [f"PeerError: {self}"]


class Alone:
    """The one process of a run: there is nobody to tell anything."""

    rank, world = 0, 1

    def mark(self, step: int, what: str) -> None:
        """This rank begins `what` ("the gradients", say) at this step."""

    def agree(self, what: str, values: dict) -> None:
        """All ranks have the same values, or PeerError says which has others."""

    def failed(self, error: Exception) -> Exception:
        """Tell the others of an error; the error to raise instead, which names the rank that is to blame."""
        return error

    def leave(self) -> None:
        """This rank has done everything."""


class Peers(Alone):
    """The other ranks of a run. patience: seconds that one waits for another."""

    def __init__(self, store: dist.Store, rank: int, world: int, patience: float) -> None:
        self.rank, self.world, self.patience = rank, world, patience
        self._store = store  # of the main thread; the watching one has a connection of its own
        self._count, self._step, self._what, self._moved = 0, 0, "the start", time.monotonic()
        self._ended, self._until = threading.Event(), float("inf")
        self._is_over = False
        self._mine = dist.PrefixStore("lowprec", store.clone())
        self._parent = os.getppid()
        self._watching = threading.Thread(target=self._watch, name="peers", daemon=True)

    # Told by the run.

    def start(self) -> None:
        """Tell the others that this rank is here, and wait until all are; PeerError for those who do not come."""
        self._beat(self._mine)
        self._watching.start()
        self._wait_for([f"beat/{rank}" for rank in range(self.world)], "has not joined")

    def mark(self, step: int, what: str) -> None:
        self._count, self._step, self._what, self._moved = self._count + 1, step, what, time.monotonic()

    def agree(self, what: str, values: dict) -> None:
        main = dist.PrefixStore("lowprec", self._store)
        main.set(f"{what}/{self.rank}", json.dumps(values))
        keys = [f"{what}/{rank}" for rank in range(self.world)]
        self._wait_for(keys, f"has not told its {what}")
        first, *others = (json.loads(main.get(key)) for key in keys)
        for rank, other in enumerate(others, start=1):
            names = [name for name in first if first[name] != other.get(name)]
            if names:
                theirs, ours = (", ".join(f"{name} {each.get(name)}" for name in names) for each in (other, first))
                raise self._fail(f"rank {rank} has {theirs}, and rank 0 has {ours}: all ranks need the same {what}")

    def failed(self, error: Exception) -> Exception:
        if isinstance(error, PeerError):
            return error
        if self._is_of_communication(error):
            return self._fail(self._who(error))
        known = hasattr(error, "_render_traceback_")  # its sentence is for people
        text = str(error) if known else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        told = self._fail(f"rank {self.rank} failed at step {self._step} ({self._what}): {text}")
        if known:
            error.tell = told.tell
        return error if known else told

    def leave(self) -> None:
        """This rank has done everything; it tells so and watches no more."""
        self._is_over = True
        self._ended.set()
        self._watching.join(SILENT)

    # Finding out who it was.

    def _wait_for(self, keys: list[str], what: str) -> None:
        main, until = dist.PrefixStore("lowprec", self._store), time.monotonic() + self.patience
        while not main.check(keys):
            if main.check(["failed"]):
                raise PeerError(_told(main), tell=False)
            if time.monotonic() > until:
                missing = [key.rpartition("/")[2] for key in keys if not main.check([key])]
                ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
                raise self._fail(f"{ranks} {what} within {self.patience:g} seconds: it died, hangs, or started late")
            time.sleep(0.05)

    def _fail(self, text: str) -> PeerError:
        """The run has failed: the first rank that says so says it for all."""
        self._until = min(self._until, time.monotonic() + GRACE)
        try:
            first = self._mine.compare_set("failed", "", f"{self.rank}:{text}").decode()
        except RuntimeError:  # the store is gone with the rank, or the launcher, that kept it
            return PeerError(text)
        rank, _, text = first.partition(":")
        return PeerError(text, tell=int(rank) == self.rank)

    def _is_of_communication(self, error: Exception) -> bool:
        text = str(error).lower()
        return isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError)
            and not hasattr(error, "_render_traceback_")
            and any(word in text for word in _COMMUNICATION)
        )

    def _who(self, error: Exception) -> str:
        """A sentence on the rank that is to blame for an error of communication."""
        here = f"rank {self.rank} waits at step {self._step} ({self._what})"
        try:
            before, until = self._beats(), time.monotonic() + SILENT
            while time.monotonic() < until:
                if self._mine.check(["failed"]):
                    return _told(self._mine)
                time.sleep(0.1)
            after = self._beats()
        except RuntimeError:
            return f"{here}, and the rank or launcher through which all found each other has ended"
        others = [rank for rank in range(self.world) if rank != self.rank]
        done = [rank for rank in range(self.world) if after[rank]["what"] == END]
        silent = [rank for rank in others if before[rank] == after[rank] and not after[rank]["over"]]
        behind = min(others, key=lambda rank: after[rank]["count"])
        ahead = max(range(self.world), key=lambda rank: after[rank]["step"])
        if silent:
            return f"rank {silent[0]} died or stands still: it gives no sign of life, and {here}"
        if done and after[ahead]["step"] > after[done[0]]["step"]:
            return (
                f"rank {done[0]} has no batches after step {after[done[0]]['step']}, and rank {ahead} is at step "
                f"{_place(after[ahead])}: all ranks need the same number of batches"
            )
        if after[behind]["count"] < self._count:
            return f"rank {behind} hangs, or is too slow, at step {_place(after[behind])}: {here}"
        return f"{here}, and so do the others ({str(error).splitlines()[0][:200]})"

    def _beats(self) -> list[dict]:
        keys = [f"beat/{rank}" for rank in range(self.world)]
        return [json.loads(each) for each in self._mine.multi_get(keys)]

    # The thread that watches.

    def _beat(self, store: dist.Store) -> None:
        record = {"count": self._count, "step": self._step, "what": self._what, "time": time.time()}
        store.set(f"beat/{self.rank}", json.dumps({**record, "over": self._is_over}))

    def _watch(self) -> None:
        store = dist.PrefixStore("lowprec", self._store.clone())
        unreachable, neighbour, seen = None, (self.rank + 1) % self.world, (None, time.monotonic())
        while not self._ended.wait(BEAT):
            now = time.monotonic()
            if os.getppid() != self._parent:
                _end(f"rank {self.rank} ends: the process that started it has ended")
            if now > self._until:
                os._exit(1)  # what there was to say has been said; the main thread waits for somebody who is gone
            try:
                self._beat(store)
                if self._until == float("inf") and store.check(["failed"]):
                    self._until = now + GRACE
                unreachable = None
                beat = store.get(f"beat/{neighbour}") if store.check([f"beat/{neighbour}"]) else b""
                if beat != seen[0]:
                    seen = beat, now
                elif beat and now - seen[1] > LOST and self._until == float("inf") and not json.loads(beat)["over"]:
                    place = f"rank {self.rank} is at step {self._step} ({self._what})"
                    self._tell(f"rank {neighbour} died or stands still: it gives no sign of life, and {place}")
                if now - self._moved > self.patience + GRACE:
                    self._stuck()
            except RuntimeError:
                unreachable = unreachable or now
                if now - unreachable > GRACE:
                    _end(f"rank {self.rank} ends: the rank or launcher through which all found each other has")
        with contextlib.suppress(RuntimeError):
            self._beat(store)

    def _stuck(self) -> None:
        """The main thread waits for longer than a collective may; where another rank is behind, the run ends."""
        mine = self._count
        if any(each["count"] < mine for rank, each in enumerate(self._beats()) if rank != self.rank):
            self._tell(self._who(RuntimeError("")))

    def _tell(self, text: str) -> None:
        error = self._fail(text)
        if error.tell:
            _say(f"lowprec-lab: {error}")


def _told(store: dist.Store) -> str:
    """What the rank said that was the first to fail."""
    return store.get("failed").decode().partition(":")[2]


def _place(beat: dict) -> str:
    return f"{beat['step']} ({beat['what']})"


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _end(text: str) -> None:
    _say(f"lowprec-lab: {text}")
    os._exit(1)


# --- joining ----------------------------------------------------------------------------------------------------------


def join(patience: float) -> Peers:
    """Find the other ranks by what torchrun, or a launcher like it, has put into the environment.

    Raises PeerError when the port is taken, when rank 0 cannot be reached, or when somebody does not come in time.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
    launcher_keeps_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _die_with_parent()
    unreachable = (
        f"rank {rank} could not reach rank 0 at {host}:{port} within {patience:g} seconds: it died, hangs or started "
        "late, or MASTER_ADDR and MASTER_PORT name another place"
    )
    # Something else that listens at that port may never answer, and torch waits for it without end.
    guard = threading.Timer(patience + GRACE, _end, (unreachable,))
    guard.daemon = True
    guard.start()
    try:
        store = dist.TCPStore(
            host, port, world, is_master=rank == 0 and not launcher_keeps_it, wait_for_workers=False,
            timeout=timedelta(seconds=patience),
        )  # fmt: skip
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise PeerError(
                f"rank {rank} cannot start: port {port} is in use on this machine. End what uses it (an older run?), "
                "or choose another one: torchrun --master-port, or MASTER_PORT"
            ) from error
        raise PeerError(unreachable) from error
    finally:
        guard.cancel()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    peers = Peers(dist.PrefixStore(f"attempt-{attempt}", store), rank, world, patience)
    peers.start()
    return peers


def open_group(peers: Peers, backend: str) -> None:
    """torch's default group of all ranks; no operation in it waits for longer than their patience."""
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", peers._store), rank=peers.rank, world_size=peers.world,
        timeout=timedelta(seconds=peers.patience),
    )  # fmt: skip


def _die_with_parent() -> None:
    """Linux ends this process when the one that started it ends, even if it is stopped or in a loop."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
