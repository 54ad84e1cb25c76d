"""Why a sandbox cannot be made here and how to mend it, and `lowprec-lab doctor --grading`, which makes one and looks.

The causes are recognised by what bubblewrap (1) and the kernel say, and by the settings under /proc/sys.
References: bubblewrap's source (bubblewrap.c); user_namespaces(7); Docker's default seccomp profile; Ubuntu 24.04
release notes on unprivileged user namespaces.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

GO_ON = "Without a sandbox only your own work can be judged: add --no-sandbox."
_CHAPTER_EXAMPLE = ("sign_bit", "def sign_bit(x):\n    return x.signbit().int()\n")
_SETTINGS = {
    "apparmor": "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
    "clone": "/proc/sys/kernel/unprivileged_userns_clone",
    "most": "/proc/sys/user/max_user_namespaces",
}
_DENIED = r"Operation not permitted|Permission denied|No permissions"
_SYSCTL = "Then keep it over a restart: write the same setting to a file in /etc/sysctl.d."


@dataclass(frozen=True)
class Cause:
    """Why there is no sandbox, and what to do about it. As text: both, the original message, and how to go on."""

    cause: str
    cure: str
    message: str = ""

    def __str__(self) -> str:
        said = f" (It said: {self.message})" if self.message else ""
        return f"There is no sandbox to grade in: {self.cause}.{said} {self.cure} {GO_ON}"


@dataclass(frozen=True)
class Machine:
    """What tells causes with the same message apart. Settings are numbers, or None where there is no such setting."""

    apparmor: int | None = None
    clone: int | None = None
    most: int | None = None
    container: bool = False


def inspect_machine() -> Machine:
    """This machine's settings about namespaces, and whether it is a container."""
    found = {name: _number_in(path) for name, path in _SETTINGS.items()}
    marks = (Path("/.dockerenv"), Path("/run/.containerenv"))
    in_container = any(mark.exists() for mark in marks) or "KUBERNETES_SERVICE_HOST" in os.environ
    return Machine(**found, container=in_container)


def _number_in(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def explain(message: str, machine: Machine | None = None) -> Cause:
    """The cause behind a message of bubblewrap, the zygote or a worker, on this machine if none is given."""
    machine = inspect_machine() if machine is None else machine
    text = " ".join(message.split())
    shown = text if len(text) <= 300 else f"…{text[-299:]}"
    for fits, cause, cure in _causes():
        if fits(text, machine):
            return Cause(cause, cure, shown)
    return Cause(
        "the sandbox did not start",
        "Run `lowprec-lab doctor --grading`, and report what it prints.",
        shown,
    )


def _causes() -> list[tuple[Callable[[str, Machine], bool], str, str]]:
    """(whether it is this, cause, cure), the more certain ones first."""
    return [
        (
            lambda text, _: "unsupported system" in text,
            f"grading a class needs Linux, and this is {_system_name()}",
            "Grade on a Linux machine, in a virtual machine, or on Windows in WSL 2.",
        ),
        (
            lambda text, _: "unsupported processor" in text,
            "the sandbox's filter of system calls knows x86_64 and arm64 only",
            "Grade on such a machine.",
        ),
        (
            lambda text, _: "bwrap: not found" in text,
            "bubblewrap (the program bwrap) is not installed",
            "Debian, Ubuntu: sudo apt-get install bubblewrap. Fedora: sudo dnf install bubblewrap.",
        ),
        (
            lambda text, _: "is not installed for" in text or "must not see" in text,
            "what answers need cannot be shown to them",
            "Install the package and torch in one environment, and start lowprec-lab from it.",
        ),
        (
            lambda _, machine: machine.most == 0,
            "the kernel allows no user namespaces (user.max_user_namespaces is 0)",
            f"sudo sysctl user.max_user_namespaces=15000. {_SYSCTL}",
        ),
        (
            lambda text, machine: machine.clone == 0 and bool(re.search(_DENIED, text)),
            "the kernel allows user namespaces to root only (kernel.unprivileged_userns_clone is 0)",
            f"sudo sysctl kernel.unprivileged_userns_clone=1. {_SYSCTL}",
        ),
        (
            lambda text, machine: machine.container and _is_about_proc(text),
            "this container hides parts of /proc, so the sandbox cannot have a /proc of its own",
            "Docker: start it with --security-opt systempaths=unconfined. Kubernetes: procMount: Unmasked.",
        ),
        (
            lambda text, machine: machine.container and bool(re.search(_DENIED, text)),
            "this container may not make namespaces (its seccomp or AppArmor profile refuses)",
            "Docker, Podman: start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined. Kubernetes: securityContext with seccompProfile: Unconfined and "
            "procMount: Unmasked. Or grade outside the container.",
        ),
        (
            lambda text, machine: machine.apparmor == 1 and bool(re.search(_DENIED, text)),
            "AppArmor refuses user namespaces to programs without a profile (Ubuntu 23.10 and newer)",
            f"sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0. {_SYSCTL}",
        ),
        (
            lambda text, _: "ENOSPC" in text or "No space left" in text,
            "there are too many user namespaces already",
            "Raise user.max_user_namespaces and user.max_net_namespaces with sysctl, or end what holds them.",
        ),
        (
            lambda text, _: "Unknown option" in text,
            "this bubblewrap is too old",
            "Install version 0.6 or newer.",
        ),
        (
            lambda text, _: _is_about_proc(text),
            "parts of /proc are hidden here (is this a container?), so the sandbox cannot have a /proc of its own",
            "Docker: start it with --security-opt systempaths=unconfined. Kubernetes: procMount: Unmasked.",
        ),
        (
            lambda text, _: bool(re.search(_DENIED, text)),
            "the system refuses namespaces (a seccomp or AppArmor profile, or a setting of the kernel)",
            "In a container: --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt "
            "systempaths=unconfined. Elsewhere: look at the sysctl settings kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns and user.max_user_namespaces.",
        ),
        (
            lambda text, _: "annot allocate memory" in text or "MemoryError" in text,
            "there is not enough memory to start",
            "The sandbox takes about 0.5 GiB, and each worker up to its limit. Close other programs.",
        ),
        (
            lambda text, _: "Error" in text and "File" in text,
            "the package does not load inside",
            "Does `python -c 'import torch, lowprec_lab'` work here? Files that only root may read do not work inside.",
        ),
    ]


def _is_about_proc(text: str) -> bool:
    about = re.search(r"mount(ing)? proc on|/proc/sys|mount proc", text)
    return bool(about) and bool(re.search(_DENIED, text))


def _system_name() -> str:
    return {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)


# --- lowprec-lab doctor --grading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One finding: what was looked at, whether it is as it must be, and in words."""

    topic: str
    fine: bool
    finding: str


@dataclass(frozen=True)
class Report:
    """What `check_sandbox` found. Prints as text; `.to_dict()` is for programs."""

    lines: tuple[Line, ...]

    @property
    def healthy(self) -> bool:
        """Whether a class can be graded here."""
        return all(line.fine for line in self.lines)

    def to_dict(self) -> dict:
        """{"healthy": bool, "lines": [{"topic", "fine", "finding"}]}."""
        return {"healthy": self.healthy, "lines": [asdict(line) for line in self.lines]}

    def __str__(self) -> str:
        width = max(len(line.topic) for line in self.lines)
        rows = [f"{line.topic:<{width}}  {'ok' if line.fine else 'MISSING':<7}  {line.finding}" for line in self.lines]
        return "\n".join(["Grading a class", *rows])


def check_sandbox() -> Report:
    """Make a real sandbox, judge one exercise in it, and let an answer try to get out; with cause and cure if not."""
    from lowprec_lab.grading.sandbox import Sandbox, SandboxError

    lines: list[Line] = []
    try:
        began = time.perf_counter()
        with Sandbox() as workers:
            lines.append(Line("sandbox", True, f"starts in {time.perf_counter() - began:.1f} s, once for a class"))
            lines.append(_judged(workers))
            lines.append(_compiler())
            lines += _attempts(workers)
    except SandboxError as error:
        lines.append(Line("sandbox", False, str(error)))
    return Report(tuple(lines))


def _judged(workers: object) -> Line:
    from lowprec_lab.blanks import BLANKS, load_chapters
    from lowprec_lab.grading.judge import judge
    from lowprec_lab.sources import Source

    load_chapters()
    name, text = _CHAPTER_EXAMPLE
    began = time.perf_counter()
    verdict = judge(BLANKS[name], {name: Source(text)}, workers)
    took = f"{(time.perf_counter() - began) * 1000:.0f} ms"
    if verdict.passed:
        return Line("an exercise", True, f"{name} was judged in it in {took}: {verdict.headline}")
    return Line("an exercise", False, f"a right answer to {name} did not pass: {verdict.text()}")


def _compiler() -> Line:
    from lowprec_lab.c_code import find_compiler

    path = find_compiler()
    return Line(
        "c compiler", True, path or "none: exercises in C (chapter 12) cannot be judged here. Install gcc or clang"
    )


def _attempts(workers: object) -> list[Line]:
    """What an answer must not be able to do, tried: each expression raises where it is refused."""
    kernel = "ctypes.CDLL(None, use_errno=True)"
    with tempfile.NamedTemporaryFile() as mine:
        expressions = {
            "your files": f"open({mine.name!r})",
            "the judge": f"open({str(Path(__file__).with_name('judge.py'))!r})",
            "the graders": "importlib.import_module('lowprec_lab.graders.case')",
            "the peers": "importlib.import_module('ml_dtypes')",
            "network": "socket.create_connection(('127.0.0.1', 1), 1)",
            "writing": "open('/lab/mine', 'w')",
            "more rights": "os.setuid(0)",
            "namespaces": f"1 / (1 + {kernel}.unshare(0x10000000))",
        }
        return [_attempt(workers, topic, expression) for topic, expression in expressions.items()]


def _attempt(workers: object, topic: str, expression: str) -> Line:
    from lowprec_lab.grading import wire

    name = _CHAPTER_EXAMPLE[0]
    text = (
        f"import ctypes, importlib, os, socket\ndef {name}(x):\n    try:\n        {expression}\n    except Exception:\n"
        "        return 'refused'\n    return 'possible'\n"
    )
    worker = workers.worker()
    try:
        deadline = time.monotonic() + 30
        for request in (("load", name, text, "", {}), ("call", (), {"x": 0})):
            wire.send(worker.channel, request, deadline)
            reply = wire.receive(worker.channel, deadline)
    except wire.WireError as error:
        reply = {"failed": str(error)}
    finally:
        worker.kill()
    fine = reply.get("ok") == "refused"
    return Line(topic, fine, "an answer is refused it" if fine else f"an answer tried, and got: {reply}")
