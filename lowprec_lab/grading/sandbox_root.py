"""For a judge that runs as root: hand what the sandbox needs to a user without rights, and go on as that user.

The interpreter and the packages may lie where nobody else can look, such as under /root, and limits on the number of
processes do not hold for root. So this script, in a mount namespace of its own, binds each source to a place that
everybody may enter, gives up root, and becomes bubblewrap. It runs on its own: nothing of the package is imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
import sys

_NEW_MOUNTS = 0x00020000
_BIND, _RECURSIVE, _PRIVATE, _NOSUID, _NODEV = 4096, 16384, 1 << 18, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)


def main(plan: dict) -> None:
    """plan: {"stage": a folder, "sources": [path, ...], "uid", "gid", "command": [argument, ...]}.

    Source number n is bound to stage/n; outside this namespace the folder stays as it is. Does not return; exits with
    status 1 and a sentence when a step fails.
    """
    stage = plan["stage"]
    _check("a mount namespace", _libc.unshare(_NEW_MOUNTS))
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    opened = [os.open(source, os.O_PATH) for source in plan["sources"]]  # one may lie where the stage covers it
    _mount("tmpfs", stage, "tmpfs", _NOSUID | _NODEV, "mode=755,size=4m")
    for number, fd in enumerate(opened):
        target = os.path.join(stage, str(number))
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{fd}", target, None, _BIND | _RECURSIVE)
    os.setgroups([])
    os.setresgid(plan["gid"], plan["gid"], plan["gid"])
    os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    os.chdir("/")
    os.execv(plan["command"][0], plan["command"])


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [source.encode(), target.encode(), kind.encode() if kind else None]
    _check(f"mounting {source}", _libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()))


def _check(step: str, result: int) -> None:
    if result != 0:
        raise OSError(f"{step}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as error:
        sys.exit(f"sandbox_root: {error}")
