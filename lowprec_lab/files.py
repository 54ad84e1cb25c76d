"""Where the learner's folder is, and how a file in it is written: whole or not at all, and one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

_LOCK_SECONDS = 20.0
_STALE_SECONDS = 3600.0  # a temporary file this old belongs to a process that was killed
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_A_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
_ELSEWHERE = "or set LOWPREC_WORK to a folder of your own"


class WorkspaceError(Exception):
    """Something in the learner's folder could not be read or written; the message says what, and what to do."""


def under_grading() -> bool:
    """Whether nbgrader is running this page: then nothing in the learner's folder is read or written."""
    return bool(os.environ.get("NBGRADER_EXECUTION"))


def find_clone() -> Path | None:
    """The folder that this package lies in, if it is a copy of the whole project (with its pages), else None."""
    root = Path(__file__).resolve().parent.parent
    is_project = (root / "pyproject.toml").is_file() and (root / "notebooks").is_dir()
    return root if is_project else None


def work_folder() -> Path:
    """The learner's folder, an absolute path; it may not exist yet.

    In this order: `LOWPREC_WORK`; `work/` in a clone that is the user's own; on a shared machine
    `~/lowprec_lab/<LOWPREC_COURSE, else "work">`. Never the current folder, nor the installed package's.
    Raises WorkspaceError when `LOWPREC_WORK` is not an absolute path, or the user has no home folder.
    """
    moved = os.environ.get("LOWPREC_WORK", "").strip()
    if moved:
        return _absolute(moved)
    clone = find_clone()
    if clone is not None and _is_own(clone):
        return clone / "work"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise WorkspaceError("You have no home folder. Set LOWPREC_WORK to a folder of your own.") from error
    course = re.sub(r"[^\w.-]+", "_", os.environ.get("LOWPREC_COURSE", "").strip()).lstrip(".")
    return home / "lowprec_lab" / (course or "work")


def _absolute(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise WorkspaceError(f"LOWPREC_WORK is {text!r}, and there is no such home folder.") from error
    if not path.is_absolute():
        # Each notebook's kernel runs in the notebook's own folder: a relative path would mean another place in each.
        raise WorkspaceError(f"LOWPREC_WORK is {text!r}. Give the whole path, for example {path.absolute()}.")
    return path


def _is_own(folder: Path) -> bool:
    """Whether this user may treat the folder as theirs: writable, and not merely shared with a group."""
    if not os.access(folder, os.W_OK):
        return False
    return os.name == "nt" or os.getuid() in (0, folder.stat().st_uid)


@contextlib.contextmanager
def explained(path: Path, action: str = "written") -> Iterator[None]:
    """Turn an OSError about `path` into a WorkspaceError that says what was wrong and what to do.

    action: what was being done, "written" or "read".
    """
    try:
        yield
    except OSError as error:
        raise WorkspaceError(_explanation(error, path, action)) from error


def _explanation(error: OSError, path: Path, action: str) -> str:
    kept = "What was saved before is unchanged." if path.is_file() else "Nothing was written."
    if error.errno in _FULL:
        return (
            f"The disk, or your share of it, is full: {path} was not written. Free some space, then try again. {kept}"
        )
    blocker = _file_in_the_way(path)
    if error.errno in _NOT_A_FOLDER and blocker is not None:
        return f"{blocker} is a file, and a folder is needed there to write {path}. Rename the file, {_ELSEWHERE}."
    if error.errno in _NOT_A_FOLDER and path.is_dir():
        return f"{path} is a folder, and a file is needed there. Rename the folder, {_ELSEWHERE}."
    if error.errno in _FORBIDDEN and action == "written":
        return f"{path.parent} is not writable, so {path.name} was not written. Make it writable, {_ELSEWHERE}. {kept}"
    return f"{path} could not be {action}: {error.strerror or error}. Check the folder, {_ELSEWHERE}. {kept}"


def _file_in_the_way(path: Path) -> Path | None:
    return next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the folder that `path` is in, so that two notebooks that write at the same moment take turns.

    Makes the folder if it is missing. Raises WorkspaceError when that fails, or after 20 seconds of waiting.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _acquire(path.parent)
    try:
        yield
    finally:
        lock.release()


def _acquire(folder: Path):
    import filelock

    kinds = ((filelock.FileLock, ".lock"), (filelock.SoftFileLock, ".lock.soft"))
    for kind, name in kinds:
        lock = kind(folder / name)
        try:
            lock.acquire(timeout=_LOCK_SECONDS)
            return lock
        except NotImplementedError:  # a network drive without file locks: the next kind is a file that is there or not
            continue
        except filelock.Timeout as error:
            waited = f"Another notebook has been writing in {folder} for {_LOCK_SECONDS:.0f} seconds."
            remedy = f"If none is, delete {folder / name}. Then try again; nothing was written."
            raise WorkspaceError(f"{waited} {remedy}") from error
    raise WorkspaceError(f"{folder} is on a drive that cannot be locked. Set LOWPREC_WORK to a folder elsewhere.")


def write_whole(path: Path, content: bytes, still_wanted: Callable[[], bool] | None = None) -> bool:
    """Write `content` to `path` so that a reader, or a crash, sees the old file or the new one and nothing between.

    The new bytes go to a temporary file in the same folder and reach the disk before it takes the old one's place.
    still_wanted: asked just before that; when it says no, nothing is changed and the result is False.
    Raises WorkspaceError; the old file is then intact.
    """
    path = Path(os.path.realpath(path))  # a link to a file elsewhere stays a link
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        try:
            _write_new(temporary, content)
            with contextlib.suppress(OSError):  # there is no old file, or the drive knows no permissions
                os.chmod(temporary, path.stat().st_mode & 0o777)
            if still_wanted is not None and not still_wanted():
                return False
            _replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _flush_folder(path.parent)
    return True


def keep_copy(content: bytes, folder: Path, stem: str, suffix: str) -> Path:
    """Keep `content` as `<folder>/<stem>.<UTC date and time><suffix>`, over no other file, and return the path.

    A copy with the same content that is there already is returned instead.
    """
    with explained(folder / f"{stem}{suffix}"):
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob(f"{stem}.*{suffix}")):
            if path.stat().st_size == len(content) and path.read_bytes() == content:
                return path
        moment = datetime.now(UTC).strftime("%Y-%m-%d_%H%M%S")
        for count in range(1, 1000):
            path = folder / f"{stem}.{moment}{'' if count == 1 else f'-{count}'}{suffix}"
            try:
                _write_new(path, content)
            except FileExistsError:
                continue
            _flush_folder(folder)
            return path
    raise WorkspaceError(
        f"{folder} holds 1,000 copies of {stem}{suffix} from this second. Delete some; then try again."
    )


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist yet, and wait until it is on the disk. Leaves no half file behind."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _replace(temporary: Path, path: Path) -> None:
    """os.replace; on Windows it fails while somebody reads the old file, which takes a moment."""
    for _ in range(20 if os.name == "nt" else 0):
        try:
            return os.replace(temporary, path)
        except PermissionError:
            time.sleep(0.05)
    return os.replace(temporary, path)


def _flush_folder(folder: Path) -> None:
    """Have the folder's new entry on the disk as well, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_stale(path: Path) -> None:
    with contextlib.suppress(OSError):
        for left in path.parent.glob(f".{path.name}.*.tmp"):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()
