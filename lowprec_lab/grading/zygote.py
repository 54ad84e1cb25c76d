"""What runs inside the sandbox: a trusted process that forks a fresh one, in namespaces of its own, for each answer.

It has imported torch and the package, on one thread, and holds no answer, no reference and no seed: those go to the
forked process over a socket of its own. Nothing that one answer does is there for the next: not a process, a file, a
variable or a piece of shared memory.

References: namespaces(7), user_namespaces(7), pid_namespaces(7), seccomp(2), capabilities(7) of the Linux man-pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import socket

from lowprec_lab.grading.sandbox_view import GO, HOME, READY, SCRATCH

_NEW_NAMESPACES = (
    0x10000000 | 0x00020000 | 0x20000000 | 0x08000000 | 0x04000000 | 0x40000000
)  # user mount pid ipc uts net
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 4, 38, 22, 24
_LAST_CAPABILITY = 63

# The system calls that no answer needs and that reach far into the kernel, or make memory that no limit counts.
_REFUSED = {
    "x86_64": {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "add_key": 248,
        "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "mount": 165,
        "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "io_setup": 206, "kexec_load": 246,
        "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176, "memfd_create": 319,
        "memfd_secret": 447, "shmget": 29, "shmat": 30, "msgget": 68, "semget": 64, "mq_open": 240, "socket": 41,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "personality": 135, "syslog": 103, "acct": 163,
        "quotactl": 179, "swapon": 167, "reboot": 169, "fanotify_init": 300,
    },
    "aarch64": {
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "add_key": 217,
        "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "mount": 40,
        "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "io_setup": 0, "kexec_load": 104,
        "kexec_file_load": 294, "init_module": 105, "finit_module": 273, "delete_module": 106, "memfd_create": 279,
        "memfd_secret": 447, "shmget": 194, "shmat": 196, "msgget": 186, "semget": 190, "mq_open": 180, "socket": 198,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "personality": 92, "syslog": 116, "acct": 89,
        "quotactl": 60, "swapon": 224, "reboot": 142, "fanotify_init": 262,
    },
}  # fmt: skip
_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_X32_BIT = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


class SetupError(Exception):
    """The sandbox could not be made as it must be; the text names the step and the system's reason."""


# --- the zygote -------------------------------------------------------------------------------------------------------


def main(control_fd: int, limits: dict) -> None:
    """Import what answers may import, say so on the control socket, and fork for each socket that comes over it.

    Ends when the judge's process closes the socket or ends itself, and with it every process of the sandbox.
    """
    control = socket.socket(fileno=control_fd)
    if os.uname().machine not in _CLONE:
        raise SetupError(f"unsupported processor: {os.uname().machine}")
    _import_everything()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SetupError(f"{threads} threads after importing torch: a fork is safe with one only")
    # Pages that no collection touches stay shared with the forked processes.
    gc.collect()
    gc.freeze()
    _prctl("dumpable", _PR_SET_DUMPABLE, 0)
    control.sendall(json.dumps({"rss": _resident_bytes()}).encode())
    _to_dev_null(2)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system itself buries what it ends
    while True:
        fds = _receive_fds(control)
        if len(fds) != 2:
            return
        channel, status = (socket.socket(fileno=fd) for fd in fds)
        with channel, status:
            _start_worker(control, channel, status, limits)


def _import_everything() -> None:
    """Import what a worker needs, and go through the motions once, so that no worker pays for what is done lazily."""
    import torch

    torch.set_num_threads(1)
    from lowprec_lab.blanks import in_order
    from lowprec_lab.grading import wire
    from lowprec_lab.grading.worker import Served

    served, first = Served(), in_order()[0]
    served.load(first.name, f"def {first.name}(x):\n    return x + 1", "", {})
    wire.unpack(*wire.pack(served.call((torch.zeros(3),), {})))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()


def _receive_fds(control: socket.socket) -> list[int]:
    """The sockets for one worker; none when the judge's process is gone."""
    try:
        return socket.recv_fds(control, 16, 2)[1]
    except OSError:
        return []


# --- from the zygote to a worker --------------------------------------------------------------------------------------


def _start_worker(control: socket.socket, channel: socket.socket, status: socket.socket, limits: dict) -> None:
    """As os.fork, but the child is process 1 in namespaces of its own. One fork, where unshare would take two.

    The C library does not hear of it, and goes on to think of the child as the zygote: good enough for the few calls
    that process 1 makes. The worker comes from an ordinary fork.
    """
    uid, gid = os.getuid(), os.getgid()
    _prctl("dumpable", _PR_SET_DUMPABLE, 1)  # only such a process may write its user map; no answer is here to look
    child = _libc.syscall(_CLONE[os.uname().machine], _NEW_NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
    try:
        _check("new namespaces", min(child, 0))
        if child == 0:
            control.close()
            _be_process_1(channel, status, limits, uid, gid)
    except BaseException as error:  # whatever it was, the judge's process says it: there is nobody else to
        with contextlib.suppress(OSError):
            status.sendall(f"{type(error).__name__}: {error}"[:500].encode())
    finally:
        if child == 0:
            os._exit(1)
        _prctl("dumpable", _PR_SET_DUMPABLE, 0)


def _be_process_1(channel: socket.socket, status: socket.socket, limits: dict, uid: int, gid: int) -> None:
    """Prepare the new namespaces, fork the worker, and report how it ended; all in them ends with this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _write("/proc/self/oom_score_adj", "1000")  # where memory runs out, this is what the kernel ends first
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _prctl("dumpable", _PR_SET_DUMPABLE, 0)
    _prepare_files(limits)
    _write("/proc/sys/user/max_user_namespaces", "0")  # nobody in here makes another world with rights of its own
    _drop_rights()
    for fd in (0, 1, 2):
        _to_dev_null(fd)
    status.sendall(READY)  # the kernel adds the process's number as the judge's process sees it
    if status.recv(1) != GO:
        return
    worker = os.fork()
    if worker == 0:
        _work(channel, status, limits)
    channel.close()
    while True:
        pid, ending = os.wait()
        if pid == worker:
            status.sendall(str(os.waitstatus_to_exitcode(ending)).encode())
            return


def _prepare_files(limits: dict) -> None:
    options = f"size={limits['scratch_bytes']},nr_inodes={limits['scratch_files']},mode=1777"
    for place in SCRATCH:
        _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV, options)
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, "")
    os.chdir(HOME)


def _drop_rights() -> None:
    for capability in range(_LAST_CAPABILITY + 1):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # the last ones are not known to this kernel
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check("dropping capabilities", _libc.capset(header, (ctypes.c_uint32 * 6)()))
    _prctl("no new privileges", _PR_SET_NO_NEW_PRIVS, 1)


def _work(channel: socket.socket, status: socket.socket, limits: dict) -> None:
    """In the worker: the limits, the filter of system calls, and then the answer. Raises before it says "ready"."""
    os.setsid()
    _close_all_but(channel.fileno(), status.fileno())
    _limit(limits)
    _filter_system_calls()
    from lowprec_lab.grading.worker import serve

    status.sendall(READY)
    status.close()
    try:
        serve(channel)
    finally:
        os._exit(0)


def _close_all_but(*kept: int) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the listing's own is closed already
                os.close(fd)


def _limit(limits: dict) -> None:
    with open("/proc/self/statm") as sizes:
        mapped = int(sizes.read().split()[0]) * resource.getpagesize()
    _set_limit(resource.RLIMIT_AS, mapped + limits["memory_bytes"])
    _set_limit(resource.RLIMIT_NPROC, limits["processes"])
    _set_limit(resource.RLIMIT_NOFILE, limits["open_files"])
    _set_limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_MEMLOCK, 0)
    _set_limit(resource.RLIMIT_SIGPENDING, 1024)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that is too large is an error of the write, not an end


def _set_limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


# --- system calls that are refused ------------------------------------------------------------------------------------


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _FAIL, _NO_SUCH_CALL, _NOT_PERMITTED = 0x7FFF0000, 0x00050000, 38, 1


def _filter_system_calls() -> None:
    """Refuse `_REFUSED`, and clone with new namespaces, with "not permitted"."""
    program = _program(os.uname().machine)
    array_type = _Instruction * len(program)
    filled = array_type(*(_Instruction(*each) for each in program))
    packed = _Program(len(program), ctypes.cast(filled, ctypes.POINTER(_Instruction)))
    _check("the filter of system calls", _libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(packed), 0, 0))


def _program(machine: str) -> list[tuple[int, int, int, int]]:
    refuse = (_RETURN, 0, 0, _FAIL | _NOT_PERMITTED)
    unknown = (_RETURN, 0, 0, _FAIL | _NO_SUCH_CALL)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _AUDIT_ARCHITECTURE[machine]), refuse,
        (_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32_BIT), unknown,
        (_EQUAL, 0, 1, _CLONE3), unknown,  # the C library then uses clone, whose flags a filter can read
    ]  # fmt: skip
    for number in _REFUSED[machine].values():
        program += [(_EQUAL, 0, 1, number), refuse]
    namespaces = _NEW_NAMESPACES | 0x02000000  # the one for cgroups as well
    program += [(_EQUAL, 0, 3, _CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, namespaces), refuse]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


# --- the system's calls -----------------------------------------------------------------------------------------------


def _check(step: str, result: int) -> None:
    if result != 0:
        raise SetupError(f"{step}: {os.strerror(ctypes.get_errno())}")


def _prctl(step: str, option: int, value: int) -> None:
    _check(step, _libc.prctl(option, value, 0, 0, 0))


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(f"mounting {kind} on {target}", result)


def _write(path: str, text: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise SetupError(f"writing {path}: {error.strerror}") from None


def _to_dev_null(fd: int) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, fd)
    if null != fd:
        os.close(null)
