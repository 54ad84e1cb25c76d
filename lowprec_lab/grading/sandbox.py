"""The sandbox in which learners' answers run: bubblewrap around a zygote, and a fresh process for each answer.

    with Sandbox() as workers:
        worker = workers.worker()   # a process for one exercise of one submission; wire messages on worker.channel
        worker.kill()               # ends it and all that it started; says why it had ended before

Starting costs as much as importing torch, once. A worker is a fork of the zygote in namespaces of its own (see
`zygote`): no network, nothing but `sandbox_view` to read, nothing to write but small folders that vanish with it, and
limits on memory, processes, files and processor time. A thread of the judge's process measures what it uses.

References: bwrap(1); unix(7) for SCM_CREDENTIALS; pidfd_open(2); proc(5).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lowprec_lab.grading.sandbox_view import GO, HOME, INSIDE, PACKAGE, READY, SCRATCH, View, ViewError, make_view

NOBODY = 65534
_START_LIMIT_S = 120.0
_WORKER_LIMIT_S = 30.0
_KILL_LIMIT_S = 20.0
_WATCH_EVERY_S, _WATCH_CLOSELY_EVERY_S = 0.03, 0.1
_CREDENTIALS = struct.Struct("3i")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

_ENVIRONMENT = {
    "HOME": HOME,
    "USER": "answer",
    "LOGNAME": "answer",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/nowhere",
    "NBGRADER_EXECUTION": "autograde",
    # One thread, so that the zygote may fork.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_PROGRAM = (
    f"import sys; sys.path += ['{INSIDE}/site-packages', '{INSIDE}/package']; import json, site; "
    "site.setquit(); site.sethelper(); "
    "from lowprec_lab.grading.zygote import main; main(int(sys.argv[1]), json.loads(sys.argv[2]))"
)


class SandboxError(Exception):
    """There is no sandbox here. The text says why, what to do, and how to go on."""


@dataclass(frozen=True)
class Limits:
    """What one worker may use, with everything that it starts.

    memory_bytes: beyond what the imported libraries take. processes: threads count too. scratch_bytes, scratch_files:
    of each of the folders it may write to (/tmp, /dev/shm and home). cpu_s: of each process.
    """

    memory_bytes: int = 2 * 2**30
    processes: int = 64
    open_files: int = 256
    file_bytes: int = 64 * 2**20
    scratch_bytes: int = 64 * 2**20
    scratch_files: int = 4096
    cpu_s: int = 90


class Worker:
    """A process for one exercise of one submission. `channel`: the socket to it. See `Sandbox.worker`."""

    def __init__(self, channel: socket.socket, status: socket.socket, pid: int) -> None:
        self.channel, self.pid = channel, pid
        self._status = status
        self._pidfd = os.pidfd_open(pid)
        self._why = ""
        self._killed = False
        self._lock = threading.Lock()

    def kill(self) -> str:
        """End the worker and everything it started. Returns why it had ended before, or ""; a second call does too."""
        with self._lock:
            if not self._killed:
                self._why = self._why or self._how_it_ended()
                self._end()
                self._killed = True
                self.channel.close()
                self._status.close()
                os.close(self._pidfd)
        return self._why

    def stop(self, why: str) -> None:
        """End the processes at once, for this reason, and leave the rest to `kill`."""
        with self._lock:
            if not self._killed and not self._has_ended(0):
                self._why = self._why or why
                self._signal()

    def _end(self) -> None:
        self._signal()
        if not self._has_ended(_KILL_LIMIT_S):
            raise SandboxError(f"process {self.pid} of a worker cannot be ended. Is its machine out of memory?")

    def _signal(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _has_ended(self, wait_s: float) -> bool:
        """Whether process 1 of the worker's namespace is gone, and so every other process in it."""
        return _readable(self._pidfd, wait_s)

    def _how_it_ended(self) -> str:
        """Why the worker is gone; "" while it is there."""
        if not _hung_up(self.channel):
            return ""
        if not _readable(self._status.fileno(), 1.0):
            return "it closed its connection"
        with contextlib.suppress(OSError, ValueError):
            return _ending(int(self._status.recv(16)))
        return "it was ended from outside"


def _readable(fd: int, wait_s: float) -> bool:
    poll = select.poll()  # not select.select: that knows no numbers above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


def _hung_up(channel: socket.socket) -> bool:
    try:
        channel.settimeout(0)
        return channel.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _ending(status: int) -> str:
    """What the end of a process means: an exit status, or minus the number of a signal."""
    if status >= 0:
        return f"it ended itself, with exit status {status}"
    known = {
        signal.SIGSEGV: "it crashed (a segmentation fault; is there an endless recursion, or a bad address?)",
        signal.SIGKILL: "it was killed: it used too much memory or processor time",
        signal.SIGXCPU: "it used too much processor time",
    }
    names = {each.value: each.name for each in signal.Signals}
    return known.get(-status, f"it was ended by {names.get(-status, f'signal {-status}')}")


class Sandbox:
    """Gives out workers, each in a process of its own. Starts with the first one, or on entering `with`.

    limits: of each worker. package: the folder of the package that answers see, this one when omitted.
    May be used from several threads. Raises SandboxError where no sandbox can be made.
    """

    def __init__(self, limits: Limits | None = None, *, package: Path = PACKAGE) -> None:
        self.limits, self._package = limits or Limits(), package
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._shared_bytes = 0
        self._workers: set[Worker] = set()
        self._watching = threading.Event()
        self._watcher: threading.Thread | None = None
        self._closed = False

    def __enter__(self) -> Sandbox:
        with self._lock:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every worker and the sandbox."""
        with self._lock:
            self._closed = True
            for worker in list(self._workers):
                worker.kill()
            self._workers.clear()
            self._stop()
        self._watching.set()

    def worker(self) -> Worker:
        """A fresh process, with a connected socket to it. Where the sandbox itself has died it is started once more."""
        with self._lock:
            self._forget_killed()
            try:
                self._start()
                worker = self._fork()
            except _ZygoteGone:
                self._stop()
                self._start()
                try:
                    worker = self._fork()
                except _ZygoteGone as error:
                    self._stop()
                    raise _refusal(str(error)) from None
            self._workers.add(worker)
        self._watch()
        return worker

    def _forget_killed(self) -> None:
        self._workers = {worker for worker in self._workers if not worker._killed}

    # --- the zygote ---

    def _start(self) -> None:
        if self._process is not None:
            return
        if self._closed:
            raise SandboxError("this sandbox was closed. Make another one: Sandbox()")
        ours, theirs = socket.socketpair()
        try:
            command = self._command(theirs.fileno())
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                start_new_session=True,
            )
            theirs.close()
            self._control = ours
            self._shared_bytes = self._await_zygote()
        except BaseException:
            ours.close()
            theirs.close()
            self._stop()
            raise

    def _command(self, control_fd: int) -> list[str]:
        if sys.platform != "linux":
            raise _refusal(f"unsupported system: {sys.platform}")
        bubblewrap = shutil.which("bwrap")
        if bubblewrap is None:
            raise _refusal("bwrap: not found")
        try:
            view = make_view(self._package)
        except ViewError as error:
            raise _refusal(str(error)) from None
        stage = _stage() if _is_root() else ""
        sources = [str(source) for source, _ in view.binds]
        shown = [f"{stage}/{number}" for number in range(len(sources))] if stage else sources
        command = [os.path.realpath(bubblewrap), *_arguments(view, shown)]
        limits = json.dumps(asdict(self.limits))
        command += ["--", view.python, "-I", "-S", "-B", "-X", "utf8", "-c", _PROGRAM, str(control_fd), limits]
        if not stage:
            return command
        plan = {"stage": stage, "sources": sources, "uid": NOBODY, "gid": NOBODY, "command": command}
        script = str(Path(__file__).with_name("sandbox_root.py"))
        return [view.python, "-I", "-S", "-B", script, json.dumps(plan)]

    def _await_zygote(self) -> int:
        """Wait until the zygote has imported everything; returns the memory that its forks share with it."""
        self._control.settimeout(_START_LIMIT_S)
        try:
            message = self._control.recv(1024)
        except TimeoutError:
            raise _refusal(f"the sandbox did not start within {_START_LIMIT_S:g} s") from None
        except OSError:
            message = b""
        if message:
            return json.loads(message)["rss"]
        self._process.wait(_KILL_LIMIT_S)
        said = self._process.stderr.read().decode(errors="replace")
        raise _refusal(said.strip() or f"bwrap ended with status {self._process.returncode} and said nothing")

    def _stop(self) -> None:
        """End the zygote, and with it every process of the sandbox."""
        control, process = self._control, self._process
        self._control = self._process = None
        if control is not None:
            control.close()
        if process is not None:
            try:
                process.wait(2.0)  # it ends when its socket is closed
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stderr.close()

    def _fork(self) -> Worker:
        channel, channel_theirs = socket.socketpair()
        status, status_theirs = socket.socketpair()
        try:
            status.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            status.settimeout(_WORKER_LIMIT_S)
            self._ask_for_a_process(channel_theirs, status_theirs)
            worker = Worker(channel, status, _await_ready(status))
            # Process 1 has waited until here, so its number was still its own when the worker took hold of it.
            status.sendall(GO)
            _await_ready(status)
        except OSError:
            channel.close()
            status.close()
            raise _ZygoteGone("the sandbox gives no more processes") from None
        except BaseException:
            channel.close()
            status.close()
            raise
        return worker

    def _ask_for_a_process(self, *theirs: socket.socket) -> None:
        try:
            socket.send_fds(self._control, [b"fork"], [each.fileno() for each in theirs])
        finally:
            for each in theirs:
                each.close()

    # --- watching ---

    def _watch(self) -> None:
        self._watching.set()
        if self._watcher is None or not self._watcher.is_alive():
            self._watcher = threading.Thread(target=self._watch_workers, name="sandbox-watch", daemon=True)
            self._watcher.start()

    def _watch_workers(self) -> None:
        while not self._closed:
            workers = [worker for worker in list(self._workers) if not worker._killed]
            if not workers:
                self._watching.clear()
                self._watching.wait(60.0)
                continue
            looked_closely = [self._require_modest(worker) for worker in workers]
            time.sleep(_WATCH_CLOSELY_EVERY_S if any(looked_closely) else _WATCH_EVERY_S)

    def _require_modest(self, worker: Worker) -> bool:
        """Stop a worker that uses more than it may. Returns whether that took a closer look, which costs time."""
        processes = _tree(worker.pid)
        if len(processes) > self.limits.processes + 2:
            worker.stop("it started too many processes")
        # Of the first two, process 1 and the worker, most is what they share with the zygote.
        used = sum(map(_resident_bytes, processes)) - self._shared_bytes * min(2, len(processes))
        if used <= self.limits.memory_bytes:
            return False
        # What several processes share was counted for each of them.
        if sum(map(_proportional_bytes, processes)) > self.limits.memory_bytes:
            worker.stop("it used too much memory")
        return True


class _ZygoteGone(Exception):
    """The sandbox has died, or does not do what it should."""


def _await_ready(status: socket.socket) -> int:
    """Wait until the process at the other end is ready; returns its number on this machine."""
    message, ancillary, _, _ = status.recvmsg(600, socket.CMSG_SPACE(_CREDENTIALS.size))
    if message not in (READY, b""):
        raise _refusal(f"worker: {message.decode(errors='replace')}")
    for level, kind, data in ancillary if message else ():
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
    raise _ZygoteGone("the sandbox gives no more processes")


def _refusal(reason: str) -> SandboxError:
    from lowprec_lab.grading.sandbox_check import explain

    return SandboxError(str(explain(reason)))


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _stage() -> str:
    """A folder that everybody may enter, to mount over in a namespace of its own; what is in it stays as it is."""
    found = next((place for place in ("/mnt", "/media", "/srv", "/opt") if os.path.isdir(place)), None)
    if found is None:
        raise _refusal("there is no folder /mnt")
    return found


def _arguments(view: View, shown: list[str]) -> list[str]:
    """bubblewrap's arguments: shown[n] is where the n-th bind's source can be read."""
    arguments = ["--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    arguments += ["--as-pid-1"]  # the zygote itself: when it ends, the kernel ends all that is left in there
    arguments += ["--hostname", "sandbox", "--new-session", "--clearenv", "--chdir", "/"]
    for name, value in {**_ENVIRONMENT, **view.environment}.items():
        arguments += ["--setenv", name, value]
    for target, link in view.links:
        arguments += ["--symlink", target, link]
    for source, (_, target) in zip(shown, view.binds, strict=True):
        arguments += ["--ro-bind", source, target]
    for place in view.covered:
        arguments += ["--tmpfs", place, "--remount-ro", place]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for place in SCRATCH:
        arguments += ["--dir", place]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/"]


def _tree(pid: int) -> list[int]:
    """The process and all its descendants: all that is in its namespace, as orphans there become its children."""
    found, waiting = [], [pid]
    while waiting and len(found) < 5000:
        this = waiting.pop()
        found.append(this)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{this}/task"):
                waiting += _children(this, thread)
    return found


def _children(pid: int, thread: str) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{thread}/children") as numbers:
            return [int(number) for number in numbers.read().split()]
    except OSError:
        return []


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as sizes:
            return int(sizes.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional_bytes(pid: int) -> int:
    """The memory of a process, with its part of what it shares; all that is resident where the system does not say."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except FileNotFoundError:
        return 0
    except (OSError, StopIteration):
        return _resident_bytes(pid)
