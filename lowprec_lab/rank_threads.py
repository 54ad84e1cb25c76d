"""Several ranks as threads of one process, for checks: the calls of torch.distributed work, and none waits for ever.

    results = on_ranks(function, [(1.0,), (2.0,)])      # function(1.0) on rank 0, function(2.0) on rank 1

Inside, `dist.all_reduce`, `dist.all_gather`, `dist.get_rank` and the like do what they do between processes, with a
group of threads in place of gloo or NCCL. It needs no socket, so a class's sandbox can judge many ranks. And it knows
where each rank is: when all that still run wait for one that will not come, each of them ends at once, with a sentence.
(Processes would wait until a time limit.) It counts what each rank would send, too.

Numbers are added up in the order of ranks. MAX and MIN over a NaN give what the comparison with it happens to give, as
gloo's do.

Reference: torch/distributed/distributed_c10d.py (`_world`, which PyTorch's own tests replace in the same way), and
Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH (2005), for the ring's bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

_END_S = 2.0  # that a thread gets to end, once it was told to


class RanksDisagreeError(RuntimeError):
    """Ranks call different collectives, or one waits for another that has ended."""

    def _render_traceback_(self) -> list[str]:
        return [f"RanksDisagreeError: {self}"]


@dataclass
class _Meeting:
    """One collective: what each rank of the group brings. `done` once all are there, and it is worked out."""

    brought: dict[int, tuple] = field(default_factory=dict)
    done: bool = False


class _Ranks:
    """What the threads of one run share: who waits, who has ended, and why all have to end."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.changed = threading.Condition()
        self.waits: dict[int, str] = {}  # by rank: in which collective
        self.missing: dict[int, list[int]] = {}  # by rank: for whom
        self.ended: dict[int, str] = {}  # by rank: how
        self.why: str | None = None
        self.meetings: dict[tuple, _Meeting] = {}
        self.sent = [0] * world

    def meet(self, ranks: tuple[int, ...], rank: int, number: int, brings: tuple, work: Callable) -> None:
        """Wait for all `ranks` in their collective `number`; the last to come does the work for all."""
        with self.changed:
            meeting = self.meetings.setdefault((ranks, number), _Meeting())
            meeting.brought[rank] = brings
            if len(meeting.brought) == len(ranks):
                self._work(meeting, ranks, work)
            else:
                self._wait(meeting, ranks, rank, brings[0])

    def _work(self, meeting: _Meeting, ranks: tuple[int, ...], work: Callable) -> None:
        kinds = {each: meeting.brought[each][0] for each in ranks}
        other = next((each for each in ranks if kinds[each] != kinds[ranks[0]]), None)
        if other is not None:
            self.fail(f"Rank {ranks[0]} calls {kinds[ranks[0]]}, and rank {other} calls {kinds[other]}")
            raise RanksDisagreeError(self.why)
        work([meeting.brought[each][1:] for each in ranks])
        meeting.done = True
        for each in ranks:
            self.waits.pop(each, None)
        self.changed.notify_all()

    def _wait(self, meeting: _Meeting, ranks: tuple[int, ...], rank: int, what: str) -> None:
        self.waits[rank] = what
        self.missing[rank] = [each for each in ranks if each not in meeting.brought]
        for each in meeting.brought:
            self.missing[each] = self.missing[rank]
        self.look_for_a_standstill()
        while not meeting.done and self.why is None:
            self.changed.wait()
        self.waits.pop(rank, None)
        if not meeting.done:
            raise RanksDisagreeError(self.why)

    def look_for_a_standstill(self) -> None:
        if self.why is None and self.waits and len(self.waits) + len(self.ended) == self.world:
            first = min(self.waits)
            other = self.missing[first][0]
            doing = f"has {self.ended[other]}" if other in self.ended else f"waits in {self.waits[other]}"
            self.fail(f"Rank {first} waits for rank {other} in {self.waits[first]}, and rank {other} {doing}")

    def fail(self, why: str) -> None:
        self.why = self.why or why
        self.changed.notify_all()


class _Done:
    """The handle of a collective that is over."""

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Group(dist.ProcessGroup):
    """A process group whose ranks are threads."""

    def __init__(self, shared: _Ranks, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self.shared, self.ranks, self.mine, self.number = shared, ranks, rank, 0

    def getBackendName(self) -> str:
        return "threads"

    def allreduce(self, tensors: list[Tensor], opts=None) -> _Done:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        share = 2 * (len(self.ranks) - 1) / len(self.ranks)
        return self._meet(f"all_reduce ({_name(op)}, {_kind(tensors[0])})", tensors, _reduced(op), share)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts=None) -> _Done:
        def gather(brought: list[tuple]) -> None:
            copies = [each[1].clone() for each in brought]
            for places, _ in brought:
                for place, copy in zip(places, copies, strict=True):
                    place.copy_(copy)

        return self._meet(f"all_gather ({_kind(inputs[0])})", (outputs[0], inputs[0]), gather, len(self.ranks) - 1)

    def all_gather_single(self, output: Tensor, given: Tensor, opts=None) -> _Done:
        if output.numel() != given.numel() * len(self.ranks):
            raise ValueError("the output tensor of a gather must have world_size times as many numbers as the input")
        return self.allgather([list(output.view(-1).chunk(len(self.ranks)))], [given.reshape(-1)])

    _allgather_base = all_gather_single  # its name before torch 2.13

    def broadcast(self, tensors: list[Tensor], opts=None) -> _Done:
        root = 0 if opts is None else opts.rootRank

        def copy(brought: list[tuple]) -> None:
            for (each,) in brought:
                each.copy_(brought[root][0])

        return self._meet(f"broadcast ({_kind(tensors[0])})", tensors, copy, float(self.rank() == root))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts=None) -> _Done:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def scatter(brought: list[tuple]) -> None:
            for place, (output, _) in enumerate(brought):
                output.copy_(_combined(op, [pieces[place] for _, pieces in brought]))

        kind = f"reduce_scatter ({_name(op)}, {_kind(outputs[0])})"
        return self._meet(kind, (outputs[0], inputs[0]), scatter, len(self.ranks) - 1, outputs[0])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts=None) -> _Done:
        return self.reduce_scatter([output.view(-1)], [list(given.reshape(-1).chunk(len(self.ranks)))], opts)

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts=None) -> _Done:
        return self._meet("barrier", (), lambda brought: None, 0.0)

    def _meet(self, kind: str, brings: Sequence, work: Callable, share: float, counted: Tensor | None = None) -> _Done:
        """share: how many times the bytes of `counted` (the last tensor that is brought) a rank sends in a ring."""
        tensor = counted if counted is not None else brings[-1] if brings else None
        if tensor is not None:
            self.shared.sent[self.mine] += round(share * tensor.numel() * tensor.element_size())
        self.number += 1
        with torch.no_grad():
            self.shared.meet(self.ranks, self.mine, self.number, (kind, *brings), work)
        return _Done()


def _kind(tensor: Tensor) -> str:
    return f"{tensor.numel()} of {str(tensor.dtype).removeprefix('torch.')}"


def _name(op: object) -> str:
    return next((name for name in _OPERATIONS if op == getattr(dist.ReduceOp, name)), "another operation")


_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": lambda a, b: a + b,
    "AVG": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MAX": lambda a, b: torch.where(a < b, b, a),
    "MIN": lambda a, b: torch.where(b < a, b, a),
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}


def _combined(op: object, tensors: list[Tensor]) -> Tensor:
    name = _name(op)
    if name not in _OPERATIONS:
        raise RuntimeError(f"these ranks cannot reduce with {op}: there are {', '.join(_OPERATIONS)}")
    total = tensors[0].clone()
    for each in tensors[1:]:
        total = _OPERATIONS[name](total, each)
    return total / len(tensors) if name == "AVG" else total


def _reduced(op: object) -> Callable:
    def work(brought: list[tuple]) -> None:
        total = _combined(op, [each[0] for each in brought])
        for (each,) in brought:
            each.copy_(total)

    return work


# --- whose world it is ------------------------------------------------------------------------------------------------

_here = threading.local()
_installing = threading.Lock()
_runs = 0


class _Worlds:
    """In place of torch's `_world`: on a thread that is a rank, that rank's; on any other, torch's own."""

    def __init__(self, own: object) -> None:
        object.__setattr__(self, "own", own)

    def __getattr__(self, name: str) -> object:
        return getattr(getattr(_here, "world", self.own), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(getattr(_here, "world", self.own), name, value)


@contextlib.contextmanager
def _worlds() -> Iterator[None]:
    global _runs
    with _installing:
        _runs += 1
        if _runs == 1:
            dist.distributed_c10d._world = _Worlds(dist.distributed_c10d._world)
    try:
        yield
    finally:
        with _installing:
            _runs -= 1
            if _runs == 0:
                dist.distributed_c10d._world = dist.distributed_c10d._world.own


def _world_of(shared: _Ranks, rank: int) -> SimpleNamespace:
    everybody = _Group(shared, tuple(range(shared.world)), rank)
    return SimpleNamespace(
        default_pg=everybody, pg_map={everybody: ("threads", None)}, pg_names={everybody: "threads"},
        pg_group_ranks={everybody: {each: each for each in range(shared.world)}}, pg_backend_config={}, group_count=1,
        tags_to_pg={}, pg_to_tag={}, pg_coalesce_state={}, comms=[], pg_default_device={}, shared=shared, rank=rank,
    )  # fmt: skip


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """On a rank of `on_ranks`: the group of these ranks; None for the world, or where this rank is none of them.

    Every rank makes its groups in the same order, as with `dist.new_group`. Ranks are counted anew in a group.
    """
    world, ranks = _here.world, tuple(sorted(ranks))
    if world.rank not in ranks or len(ranks) == world.shared.world:
        return None
    known = next((each for each in world.pg_map if each.ranks == ranks), None)
    if known is None:
        known = _Group(world.shared, ranks, world.rank)
        world.pg_map[known] = ("threads", None)
        world.pg_names[known] = f"ranks {ranks}"
        world.pg_group_ranks[known] = {each: place for place, each in enumerate(ranks)}
    return known


def bytes_sent() -> int:
    """On a rank of `on_ranks`: the bytes that it has sent so far, if rings carry all collectives."""
    return _here.world.shared.sent[_here.world.rank]


def collectives() -> int:
    """On a rank of `on_ranks`: how many collectives it has taken part in so far, in all of its groups."""
    return sum(group.number for group in _here.world.pg_map)


# --- running ----------------------------------------------------------------------------------------------------------


def on_ranks(function: Callable, arguments: Sequence[tuple]) -> list:
    """function(*arguments[rank]) on each rank, all at once; what each returns.

    An error of a rank is raised here, that of the lowest rank that has one of its own; RanksDisagreeError where ranks
    wait for each other. No thread is left behind: who still computes is stopped between two bytecodes.
    """
    shared = _Ranks(len(arguments))
    results: list = [None] * len(arguments)
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        _here.world = _world_of(shared, rank)
        how = "returned"
        try:
            results[rank] = function(*arguments[rank])
        except BaseException as error:
            errors[rank] = error
            how = f"ended with {type(error).__name__}"
        finally:
            del _here.world
            with shared.changed:
                shared.ended[rank] = how
                shared.look_for_a_standstill()
                shared.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(arguments))]
    with _worlds():
        for thread in threads:
            thread.start()
        try:
            with shared.changed:
                while len(shared.ended) < len(threads):
                    shared.changed.wait()
        finally:
            _stop(shared, threads)
    own = [rank for rank in sorted(errors) if not isinstance(errors[rank], RanksDisagreeError)]
    for rank in (*own, *sorted(errors)):
        raise errors[rank]
    return results


class _Stopped(BaseException):
    """Raised in a rank that nobody waits for any more."""


def _stop(shared: _Ranks, threads: list[threading.Thread]) -> None:
    """End the threads that still run, after an interrupt: waiting ones by a word, others by an exception."""
    with shared.changed:
        if len(shared.ended) < len(threads):
            shared.fail("The run was stopped")
    for thread in threads:
        if thread.is_alive():
            thread.join(0.05 if shared.why else None)
        if thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped))
            thread.join(_END_S)
