"""The proof on every float32 there is: a rounder compared on all 4,294,967,296 inputs, or on a part of them.

Against the exact oracle nothing is worked out for each input. Rounding is a staircase: between two neighbouring
breakpoints every input has the same result. So the inputs are cut at the breakpoints into runs, the oracle says what
one input of each run becomes, and the rounder's results on a run must all be that, bit for bit. Against torch and
ml_dtypes every element is compared. NaN is compared as NaN: which of its bit patterns comes out is nobody's promise.

A run that was stopped goes on where it was: what is finished is kept in `work/runs/`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowprec_lab import __version__, fused
from lowprec_lab.devices import threads
from lowprec_lab.formats import FP32, Format, get_format
from lowprec_lab.graders import rounding_oracle
from lowprec_lab.graders.verdict import Row, Verdict

EVERY = range(2**32)
AGAINST = ("oracle", "torch", "ml_dtypes")
_BLOCK = 2**23  # inputs that are finished, and kept, together
_PIECE = 2**18  # inputs that go through the rounder together: they stay in the cache
_SAVE_EVERY_S = 1.0
_WIDEST = 19  # bits of a format whose breakpoints are worked out in a second or two
_NAN_BITS = 0x7F800001
_INFINITY_BITS = 0x7F800000


@dataclass(frozen=True)
class Difference:
    """One input on which the two differ; all three as the bits of a float32, 0 to 2^32 - 1."""

    input: int
    got: int
    wanted: int


@dataclass
class Found:
    """Differences in a part of the inputs: how many, and the one with the smallest bits."""

    count: int = 0
    first: Difference | None = None

    def add(self, other: Found) -> None:
        self.count += other.count
        firsts = [each for each in (self.first, other.first) if each is not None]
        self.first = min(firsts, key=lambda each: each.input, default=None)


@dataclass(frozen=True)
class Proof:
    """What a comparison on many inputs found. Prints as text, shows as a verdict in a notebook.

    inputs: how many were compared. resumed: how many of them an earlier, stopped run had done. seconds: of this run.
    subject: a sentence that says whose code was compared.
    """

    fmt: Format
    mode: str
    overflow: str
    against: str
    subject: str
    inputs: int
    differences: int
    first: Difference | None
    seconds: float
    resumed: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether there was no difference."""
        return self.differences == 0

    @property
    def verdict(self) -> Verdict:
        """The same as a verdict, with the first difference as bit strips."""
        scope = "every float32 there is" if self.inputs == len(EVERY) else "of 4,294,967,296 that there are"
        found = f"{self.differences:,} differences" if self.differences != 1 else "1 difference"
        other = {"oracle": "the exact oracle"}.get(self.against, self.against)
        return Verdict(
            name=f"proof for {self.fmt.name}", exercise="", level="exact" if self.holds else "wrong",
            headline=f"{found} on {self.inputs:,} inputs ({scope}), in {self.seconds:.1f} s", passed=self.holds,
            points=0, max_points=0, sentences=[f"{self.subject}, against {other}: {self.mode}, {self.overflow}."],
            rows=self._rows(), try_it=self._try_it(), notes=self.notes,
        )  # fmt: skip

    def _rows(self) -> list[Row]:
        if self.first is None:
            return []
        both = [
            _row(label, bits, self.fmt) for label, bits in (("yours", self.first.got), ("right", self.first.wanted))
        ]
        if len({row.strip == "" for row in both}) > 1 or len({len(row.strip) for row in both}) > 1:
            both = [
                _row(row.label, bits, FP32) for row, bits in zip(both, (self.first.got, self.first.wanted), strict=True)
            ]
        if self.against != "oracle":
            both[1].label = self.against
        return [_row("input", self.first.input, FP32), *both]

    def _try_it(self) -> str:
        if self.first is None:
            return ""
        signed = self.first.input - 2**32 * (self.first.input >= 2**31)
        return f"torch.tensor([{signed}], dtype=torch.int32).view(torch.float32)  # the input"

    def as_dict(self) -> dict:
        """Plain data, for JSON."""
        first = self.first and {
            name: {"bits": f"{bits:#010x}", "value": repr(_value(bits))} for name, bits in asdict(self.first).items()
        }
        same = ("mode", "overflow", "against", "subject", "inputs", "differences", "resumed")
        return {
            "format": self.fmt.name,
            **{name: getattr(self, name) for name in same},
            "holds": self.holds,
            "first": first,
            "seconds": round(self.seconds, 2),
            "verdict": self.verdict.text(),
        }

    def __str__(self) -> str:
        return self.verdict.text()

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return self.verdict._repr_mimebundle_(include, exclude)


def prove(
    fmt: Format | str,
    mode: str = "nearest_even",
    overflow: str | None = None,
    against: str = "oracle",
    function: Callable | str | None = None,
    progress: bool = True,
    limit: int | range | None = None,
) -> Proof:
    """Compare a rounder with the exact oracle, torch or ml_dtypes on every float32 there is.

    overflow: "saturate" or "to_special"; None: the policy that `against` has for the format, and "saturate" for the
    oracle. function: a rounder `f(x, fmt)` with any of `out`, `mode`, `overflow` as further parameters, or the name of
    an exercise; None: your `fast_round_to` or `round_to` where there is one that covers the mode, else the reference,
    else the package's own fused rounder. limit: only the inputs whose bits are below it, or in a range of step 1.
    progress: show a bar with the time left.

    Stopped with Ctrl-C, or killed, it goes on where it was when it is called again. Raises ValueError for a mode, a
    policy or a comparison that does not exist, ModuleNotFoundError where ml_dtypes is not installed.
    """
    fmt = get_format(fmt) if isinstance(fmt, str) else fmt
    inputs = _inputs(limit)
    other = _other(fmt, mode, overflow, against)
    subject = _subject(fmt, mode, other.overflow, function)
    with threads(1):  # for each worker, which share the inputs
        started = time.monotonic()
        found, resumed = _compare_all(subject, other, inputs, _State.of(fmt, mode, other, subject, inputs), progress)
        seconds = time.monotonic() - started
    notes = [f"{resumed:,} inputs had been done before it was stopped."] if resumed else []
    return Proof(
        fmt, mode, other.overflow, against, subject.line, len(inputs), found.count, found.first, seconds, resumed, notes
    )


def _inputs(limit: int | range | None) -> range:
    inputs = EVERY if limit is None else limit if isinstance(limit, range) else range(limit)
    if inputs.step != 1 or not 0 <= inputs.start <= inputs.stop <= len(EVERY):
        raise ValueError(f"limit is a number up to 2^32 or a range of step 1 within it, not {limit!r}")
    return inputs


# --- what is compared -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Subject:
    """run(x, out): the rounder. line: whose it is. identity: changes whenever its code does."""

    run: Callable
    line: str
    identity: str


def _subject(fmt: Format, mode: str, overflow: str, function: Callable | str | None) -> _Subject:
    if callable(function):
        return _adapted(function, fmt, mode, overflow, f"your {getattr(function, '__name__', 'function')}")
    plain = mode == "nearest_even" and overflow == "saturate" and fmt.signed and fmt.subnormals
    fast = plain and fmt.exponent_bits > 1
    names = [function] if function else ["fast_round_to"] * fast + ["round_to"]
    supplies = [supply for supply in map(_supply, names) if supply is not None]
    if function and not supplies:
        raise ValueError(f"there is no {function} to compare: nobody wrote it, and no reference is installed")
    own = next((supply for supply in supplies if supply.origin in ("yours", "saved")), None)
    quick = next((supply for supply in supplies if function or "fast_round_to" in supply.line), None)
    chosen = own or quick
    if chosen is None:
        run = fused.compiled_round(fmt, mode, overflow)
        return _Subject(run, "the package's own fused rounder (lowprec_lab.fused)", "fused")
    return _adapted(chosen.function, fmt, mode, overflow, chosen.line)


def _supply(name: str):
    """What stands in for an exercise: the learner's, or the reference. Not the oracle: it is what is compared to."""
    from lowprec_lab.blanks import BLANKS, load_chapters
    from lowprec_lab.exercises import AnswerError, supply

    load_chapters()
    if name not in BLANKS:
        raise ValueError(f"no exercise is called {name!r}. Give fast_round_to, round_to, or a function of your own")
    try:
        found = supply(name)
    except AnswerError:
        return None
    return None if found.origin == "oracle" else found


def _adapted(function: Callable, fmt: Format, mode: str, overflow: str, line: str) -> _Subject:
    """Any rounder as `run(x, out)`: with `out` it is compiled, as exercise 2.7 asks; else called as it is."""
    parameters = inspect.signature(function).parameters
    policies = {"mode": mode, "overflow": overflow}
    missing = [f"{name}={value!r}" for name, value in policies.items() if name not in parameters]
    if missing and (mode, overflow) != ("nearest_even", "saturate"):
        raise ValueError(f"{line} has no parameter for {', '.join(missing)}: prove round_to instead")
    options = {name: value for name, value in policies.items() if name in parameters}
    identity = _identity(function)
    if "out" in parameters and not options:
        from lowprec_lab.rounding import compiled

        return _Subject(compiled(function, fmt), line, identity)
    into = "out" in parameters

    def run(x: Tensor, out: Tensor) -> Tensor:
        return function(x, fmt, out=out, **options) if into else out.copy_(function(x, fmt, **options))

    return _Subject(run, line, identity)


def _identity(function: Callable) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return repr((code.co_code, code.co_consts, code.co_names)) if code else repr(type(function))


@dataclass(frozen=True)
class _Other:
    """differences(start, x, out): what differs from the right results for the inputs from bits `start` on."""

    name: str
    overflow: str
    differences: Callable


def _other(fmt: Format, mode: str, overflow: str | None, against: str) -> _Other:
    if against not in AGAINST:
        raise ValueError(f"against is one of {', '.join(AGAINST)}, not {against!r}")
    if against == "oracle":
        overflow = overflow or "saturate"
        rounding_oracle.require_policies(fmt, mode, overflow)
        return _Other(against, overflow, _Runs(fmt, mode, overflow).differences)
    if mode != "nearest_even":
        raise ValueError(
            f"{against} rounds to nearest, ties to even, and in no other mode: compare {mode} to the oracle"
        )
    cast = _torch_cast(fmt) if against == "torch" else _ml_dtypes_cast(fmt)
    beyond = float(cast(torch.tensor([torch.finfo(torch.float32).max])))
    policy = "saturate" if np.isfinite(beyond) else "to_special"
    return _Other(against, overflow or policy, lambda start, x, out: _elementwise(start, out, cast(x)))


def _torch_cast(fmt: Format) -> Callable:
    if fmt.torch_dtype is None:
        raise ValueError(f"torch has no dtype for {fmt.name}: compare it to the oracle")
    if fmt.width > 8:
        return lambda x: x.to(fmt.torch_dtype).float()
    values = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype).float()
    # Looking values up is the same as torch's cast back to float32, and several times as fast.
    return lambda x: values[x.to(fmt.torch_dtype).view(torch.uint8).int()]


def _ml_dtypes_cast(fmt: Format) -> Callable:
    import ml_dtypes

    dtype = getattr(ml_dtypes, fmt.name, None) or {"float16": np.float16, "float32": np.float32}.get(fmt.name)
    if dtype is None:
        raise ValueError(f"ml_dtypes has no dtype for {fmt.name}: compare it to the oracle")

    def cast(x: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return torch.from_numpy(x.numpy().astype(dtype).astype(np.float32))

    return cast


def _elementwise(start: int, out: Tensor, wanted: Tensor) -> Found:
    got_bits, wanted_bits = out.view(torch.int32), wanted.view(torch.int32)
    if torch.equal(got_bits, wanted_bits):
        return Found()
    wrong = (got_bits != wanted_bits) & ~(out.isnan() & wanted.isnan())
    return _found(start, got_bits, wanted_bits, wrong)


def _found(start: int, got: Tensor, wanted: Tensor, wrong: Tensor) -> Found:
    count = int(torch.count_nonzero(wrong))
    if not count:
        return Found()
    at = int(torch.argmax(wrong.to(torch.uint8)))
    return Found(count, Difference(start + at, int(got[at]) % 2**32, int(wanted[at]) % 2**32))


class _Runs:
    """The oracle as runs: all inputs from `starts[k]` to before `starts[k + 1]` become the float32 `wanted[k]`."""

    def __init__(self, fmt: Format, mode: str, overflow: str) -> None:
        if fmt.width > _WIDEST:
            raise ValueError(
                f"{fmt.name} has {fmt.width} bits, and runs are worked out for at most {_WIDEST}: compare it to torch"
            )
        halves = []
        for negative in (False, True):
            points = rounding_oracle.breakpoints(fmt, mode, negative)
            # Zero, infinity and NaN are results of their own, whatever the staircase does.
            cuts = np.unique(np.concatenate([[0, 1, _INFINITY_BITS, _NAN_BITS], points]))
            halves.append(cuts[(cuts >= 0) & (cuts < 2**31)] + 2**31 * negative)
        self.starts = np.concatenate(halves)
        firsts = torch.from_numpy(self.starts.astype(np.uint32).view(np.int32)).view(torch.float32)
        results = rounding_oracle.round_to(firsts, fmt, mode, overflow)
        self.wanted, self.nan = results.view(torch.int32).tolist(), results.isnan().tolist()
        self.stops = [*self.starts[1:].tolist(), 2**32]

    def differences(self, start: int, _x: Tensor, out: Tensor) -> Found:
        found, stop, bits = Found(), start + out.numel(), out.view(torch.int32)
        run = int(np.searchsorted(self.starts, start, "right")) - 1
        at = start
        while at < stop:
            until = min(self.stops[run], stop)
            self._compare(run, at, bits[at - start : until - start], found)
            at, run = until, run + 1
        return found

    def _compare(self, run: int, start: int, bits: Tensor, found: Found) -> None:
        """Whether all results of a run are the one that they must be: then their smallest and largest bits are it."""
        if self.nan[run]:
            wrong = ~bits.view(torch.float32).isnan()
        else:
            low, high = torch.aminmax(bits)
            if int(low) == int(high) == self.wanted[run]:
                return
            wrong = bits != self.wanted[run]
        found.add(_found(start, bits, torch.tensor(self.wanted[run]).expand(bits.shape), wrong))


# --- all inputs -------------------------------------------------------------------------------------------------------


def _compare_all(subject: _Subject, other: _Other, inputs: range, state: _State, progress: bool) -> tuple[Found, int]:
    """(what was found, how many inputs had been done before)."""
    resumed = state.done_inputs()
    todo = iter([block for block in _blocks(inputs) if block.start not in state.done])
    _compare(subject, other, range(inputs.start, min(inputs.stop, inputs.start + 64)))  # compiles, in this thread
    stop = threading.Event()
    with _bar(len(inputs), resumed, progress) as bar, ThreadPoolExecutor(_workers()) as pool:
        try:
            for block, found in _in_turn(pool, lambda block: _compare_block(subject, other, block, stop), todo):
                state.add(block, found)
                bar.update(len(block))
        except BaseException:
            stop.set()
            state.save()
            raise
    state.remove()
    return state.found, resumed


def _workers() -> int:
    from lowprec_lab.devices import available_cores

    return max(1, available_cores())


def _in_turn(pool: ThreadPoolExecutor, work: Callable, blocks: Iterator[range]) -> Iterator[tuple[range, Found]]:
    """(block, work(block)) as they are finished, with two blocks for each worker under way at any time."""
    running: dict = {}
    while True:
        for block in blocks:
            running[pool.submit(work, block)] = block
            if len(running) >= 2 * pool._max_workers:
                break
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            block = running.pop(future)
            yield block, future.result()


class _StoppedError(Exception):
    """A worker was told to stop."""


def _compare_block(subject: _Subject, other: _Other, block: range, stop: threading.Event) -> Found:
    torch.set_num_threads(1)
    found = Found()
    for start in range(block.start, block.stop, _PIECE):
        if stop.is_set():
            raise _StoppedError
        found.add(_compare(subject, other, range(start, min(start + _PIECE, block.stop))))
    return found


def _compare(subject: _Subject, other: _Other, piece: range) -> Found:
    if not piece:
        return Found()
    wrap = 2**32 * (piece.start >= 2**31)
    x = torch.arange(piece.start - wrap, piece.stop - wrap, dtype=torch.int32).view(torch.float32)
    out = torch.empty_like(x)
    with torch.no_grad():
        subject.run(x, out)
        return other.differences(piece.start, x, out)


def _blocks(inputs: range) -> Iterator[range]:
    """The inputs in blocks whose ends are multiples of the block's size, so that no block has both signs."""
    start = inputs.start
    while start < inputs.stop:
        stop = min(inputs.stop, (start // _BLOCK + 1) * _BLOCK)
        yield range(start, stop)
        start = stop


class _NoBar:
    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def update(self, _count: int) -> None:
        pass


def _bar(total: int, done: int, progress: bool):
    if not progress:
        return _NoBar()
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, initial=done, desc="every float32", unit="", unit_scale=True, leave=False)


# --- what is kept -----------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """What of a comparison is finished. path: its file, None where nothing is to be written. key: of the comparison."""

    path: Path | None
    key: str
    done: dict[int, int] = field(default_factory=dict)  # start of a block -> how many inputs it has
    found: Found = field(default_factory=Found)
    saved_at: float = 0.0

    @classmethod
    def of(cls, fmt: Format, mode: str, other: _Other, subject: _Subject, inputs: range) -> _State:
        """The state to go on from: empty when nothing, or something else, was kept."""
        from lowprec_lab.files import under_grading, work_folder

        identity = (__version__, torch.__version__, repr(fmt), mode, other.name, other.overflow, repr(inputs),
                    subject.identity, _behaviour(subject, fmt))  # fmt: skip
        key = hashlib.sha256(repr(identity).encode()).hexdigest()
        if under_grading():
            return cls(None, key)
        name = re.sub(r"[^\w.-]+", "_", f"prove_{fmt.name}_{mode}_{other.overflow}_{other.name}")
        state = cls(work_folder() / "runs" / f"{name}.json", key)
        state._load()
        return state

    def _load(self) -> None:
        try:
            kept = json.loads(self.path.read_text())
            if kept["key"] != self.key:
                return
            first = kept["first"] and Difference(**kept["first"])
            self.found = Found(int(kept["differences"]), first)
            self.done = {int(start): int(count) for start, count in kept["done"]}
        except (OSError, ValueError, KeyError, TypeError):  # no file, or not one of ours: from the beginning
            self.done, self.found = {}, Found()

    def done_inputs(self) -> int:
        return sum(self.done.values())

    def add(self, block: range, found: Found) -> None:
        self.done[block.start] = len(block)
        self.found.add(found)
        if time.monotonic() - self.saved_at > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        if self.path is None:
            return
        from lowprec_lab.files import write_whole

        content = {
            "key": self.key,
            "differences": self.found.count,
            "first": self.found.first and asdict(self.found.first),
            "done": sorted(self.done.items()),
        }
        write_whole(self.path, json.dumps(content).encode())
        self.saved_at = time.monotonic()

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _behaviour(subject: _Subject, fmt: Format) -> str:
    """What the rounder makes of some inputs: helpers that it calls may have changed where its own code has not."""
    bits = torch.arange(-(2**31), 2**31, 65521 * 3, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    out = torch.empty_like(x)
    subject.run(x, out)
    return hashlib.sha256(out.numpy().tobytes()).hexdigest()


# --- how a difference is shown ----------------------------------------------------------------------------------------


def _value(bits: int) -> float:
    return float(np.array(bits, dtype=np.uint32).view(np.float32))


def _row(label: str, bits: int, fmt: Format) -> Row:
    """A float32 with its bits in `fmt`; without bits when it is no value of the format."""
    from lowprec_lab.graders.counterexample import bit_fields

    value = _value(bits)
    code = bits if fmt == FP32 else _code(value, fmt)
    return Row(label, repr(value), [] if code is None else bit_fields(code, fmt))


def _code(value: float, fmt: Format) -> int | None:
    x = torch.tensor([value])
    if fmt.width > 16 or fmt.specials == "finite" and np.isnan(value):
        return None
    policy = "saturate" if fmt.specials == "finite" else "to_special"
    code = rounding_oracle.encode(x, fmt, "nearest_even", policy)
    back = rounding_oracle.round_to(x, fmt, "nearest_even", policy)
    same = bool((back == x) | (back.isnan() & x.isnan())) and bool(back.signbit() == x.signbit() or back.isnan())
    return int(code) % 2**fmt.width if same else None
