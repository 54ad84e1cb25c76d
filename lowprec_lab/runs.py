"""The folder of a training run: its settings, its log, its two newest checkpoints; and reading all that back.

    work/runs/NAME/settings.json             what the run was told
                   log.jsonl                 one line for each step
                   checkpoint.pt             the newest; checkpoint.previous.pt is the one before it
                   checkpoint.sharded/       in place of checkpoint.pt where each rank wrote its part (--shard)
                   sample.txt                what the model wrote at the end

Whatever is written is written whole: a run that is killed at any moment leaves a folder from which it can go on.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import zipfile
import zlib
from pathlib import Path

import torch

from lowprec_lab.files import WorkspaceError, explained, under_grading, work_folder, write_whole
from lowprec_lab.settings import Settings, SettingsError, settings

FORMAT = 1  # of a checkpoint
REST, SUMS = "rest.pt", "sums.json"  # of one that is written by many ranks: what all have in common; and the checksums
MISSING = "not all ranks have written to the run's folder: it has to be one that all machines share"
_NAMES = ("checkpoint", "checkpoint.previous")


class RunError(Exception):
    """A run's folder cannot be used; the sentence says why, and what to do."""

    def _render_traceback_(self) -> list[str]:
        return [f"RunError: {self}"]


def runs_folder() -> Path:
    """Where runs live: `work/runs`; under grading, where nothing of the learner's is touched, a temporary folder."""
    if under_grading():
        import tempfile

        return Path(tempfile.mkdtemp(prefix="lowprec-runs-"))
    return work_folder() / "runs"


def run_folder(name: str) -> Path:
    """The folder of the run called `name`, or of the path `name`; it may not exist yet."""
    if os.sep in name or (os.altsep and os.altsep in name):
        return Path(name).expanduser().absolute()
    if not re.fullmatch(r"[\w.+=-]+", name) or name.startswith("."):
        raise RunError(f"a run's name is made of letters, digits and . _ + = -, not {name!r}")
    return runs_folder() / name


class Run:
    """The folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.checkpoint, self.previous = self.folder / "checkpoint.pt", self.folder / "checkpoint.previous.pt"
        self.sharded, self.previous_sharded = (self.folder / f"{name}.sharded" for name in _NAMES)
        self._log_path, self._log = self.folder / "log.jsonl", None

    def exists(self) -> bool:
        """Whether anything of a run is there."""
        return (self.folder / "settings.json").exists() or bool(self._checkpoints())

    def clear(self) -> None:
        """Forget what was there: the run starts again."""
        with explained(self.folder):
            for name in ("settings.json", "log.jsonl", "checkpoint.pt", "checkpoint.previous.pt", "sample.txt"):
                (self.folder / name).unlink(missing_ok=True)  # and nothing else that may lie in a folder of that path
            for name in ("tensorboard", self.sharded, self.previous_sharded, self.unfinished):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    # Settings.

    def write_settings(self, told: Settings) -> None:
        write_whole(self.folder / "settings.json", json.dumps(dataclasses.asdict(told), indent=1).encode() + b"\n")

    def read_settings(self) -> Settings:
        """What the run was told. Raises RunError when that is not there, or is damaged."""
        return _settings_in(_read(self.folder / "settings.json", "no run").decode(errors="replace"), self.folder)

    # The log.

    def start_log(self, done: int) -> list[dict]:
        """Open the log behind the line of step `done`, and return the lines so far: what came after it comes again."""
        kept = [record for record in self._lines() if record["step"] <= done] if done else []
        write_whole(self._log_path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        with explained(self._log_path):
            self._log = open(self._log_path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by close()
        return kept

    def log(self, record: dict) -> None:
        with explained(self._log_path):
            self._log.write(json.dumps(record) + "\n")

    def close(self) -> None:
        if self._log is not None:
            with explained(self._log_path):
                self._log.close()
            self._log = None

    def read_log(self) -> list[dict]:
        """A dict for each step. Raises RunError when there is no log, or it holds no whole line."""
        _read(self._log_path, "no log of a run")
        records = self._lines()
        if not records:
            raise RunError(f"the log {self._log_path} holds no step: it is empty or damaged. Train that run again")
        return records

    def _lines(self) -> list[dict]:
        """The log's lines up to the first that is not whole: a run that was killed may leave half a line."""
        records: list[dict] = []
        if not self._log_path.is_file():
            return records
        for line in self._log_path.read_bytes().splitlines():
            try:
                record = json.loads(line)
                if type(record["step"]) is not int or type(record["loss"]) is not float:
                    break
            except (ValueError, KeyError, TypeError):
                break
            records.append(record)
        return records

    # Checkpoints.

    def save(self, state: dict) -> None:
        """Make `state` the newest checkpoint, and the newest so far the previous one.

        Raises WorkspaceError when it cannot be written (a full disk, say): the checkpoints are then as they were.
        """
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, **state}, buffer)
        write_whole(self.checkpoint, buffer.getvalue(), self._step_back)

    def _step_back(self) -> bool:
        """The newest checkpoint becomes the previous one, of whichever kind it is; there is one of each at most."""
        pairs = (self.checkpoint, self.previous), (self.sharded, self.previous_sharded)
        for (newest, previous), (_, other) in (pairs, pairs[::-1]):
            if newest.exists():
                _remove(previous)
                os.replace(newest, previous)
                _remove(other)
        return True

    def load(self, say=print) -> dict | None:
        """The newest checkpoint that is whole, None where there is none yet; says so when it is not the newest one.

        Raises RunError when there are checkpoints and none of them is whole.
        """
        troubles = []
        for path in self._checkpoints():
            try:
                state = _load_sharded(path) if path.is_dir() else _load(path)
            except _DamagedError as error:
                troubles.append(f"{path.name} is damaged ({error})")
                continue
            if troubles:
                say(f"{'; '.join(troubles)}: going on from {path.name}, which is of step {state['step']}.")
            return state
        if troubles:
            raise RunError(
                f"no checkpoint in {self.folder} can be used: {'; '.join(troubles)}. Start again with --overwrite"
            )
        return None

    def _checkpoints(self) -> list[Path]:
        """The checkpoints that are there, the newest first."""
        newest_first = (self.checkpoint, self.sharded, self.previous, self.previous_sharded)
        return [each for each in newest_first if each.exists()]

    # Checkpoints that all ranks write.

    @property
    def unfinished(self) -> Path:
        """The folder that a checkpoint is written to before it counts; nothing reads it."""
        return self.folder / ".checkpoint.sharded.tmp"

    def begin_shards(self) -> Path:
        """An empty folder for the ranks to write to. By one rank, before all others."""
        with explained(self.unfinished):
            shutil.rmtree(self.unfinished, ignore_errors=True)
            self.unfinished.mkdir(parents=True)
        return self.unfinished

    def end_shards(self, state: dict, ranks: int) -> None:
        """All ranks have written: make it the newest checkpoint. By one rank. state: what is the same on all ranks.

        Raises RunError where files of some rank are not here.
        """
        folder = self.unfinished
        with explained(folder):
            torch.save({"format": FORMAT, **state}, folder / REST)
            found = sums(folder)
            if len({name.split("_")[2] for name in found if name.startswith("__")}) < ranks:
                raise RunError(MISSING)
            for name in found:
                _flush(folder / name)
            write_whole(folder / SUMS, json.dumps(found).encode())
            self._step_back()
            os.replace(folder, self.sharded)


def _remove(path: Path) -> None:
    """A checkpoint, whether it is a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _DamagedError(Exception):
    """A file that is not what was written."""


def sums(folder: Path) -> dict[str, list[int]]:
    """[bytes, CRC-32] of every file in a checkpoint but `SUMS`."""
    found = {}
    for path in sorted(each for each in folder.iterdir() if each.name != SUMS):
        crc, size = 0, 0
        with path.open("rb") as file:
            while part := file.read(1 << 22):
                crc, size = zlib.crc32(part, crc), size + len(part)
        found[path.name] = [size, crc]
    return found


def _load(path: Path) -> dict:
    with explained(path, "read"):
        content = path.read_bytes()
    try:
        # torch reads past damage in a tensor; the archive's own checksums show it.
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            damaged = archive.testzip()
        if damaged:
            raise _DamagedError(f"the checksum of {damaged} is wrong")
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except _DamagedError:
        raise
    except Exception as error:  # whatever a reader of broken archives stumbles over
        raise _DamagedError("it is cut off, or no checkpoint" if content else "it is empty") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise _DamagedError("it is of another version of the lab, or no checkpoint of ours")
    return state


def _load_sharded(folder: Path) -> dict:
    """What is the same on all ranks; "shards" is the folder with the rest."""
    try:
        wanted = json.loads((folder / SUMS).read_bytes())
        wrong = [name for name, each in sums(folder).items() if wanted.pop(name) != each]
        if wrong or wanted:
            raise _DamagedError(f"the checksum of {', '.join(wrong or wanted)} is wrong")
        state = torch.load(folder / REST, map_location="cpu", weights_only=True)
    except _DamagedError:
        raise
    except Exception as error:  # whatever a reader of broken files stumbles over
        raise _DamagedError("a file of it is missing, or damaged") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise _DamagedError("it is of another version of the lab, or no checkpoint of ours")
    return {**state, "shards": str(folder)}


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        known = _known_runs(path.parent.parent)
        raise RunError(f"there is {what} in {path.parent}.{known}") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error


def _known_runs(folder: Path) -> str:
    names = sorted(path.parent.name for path in folder.glob("*/settings.json"))
    return f" The runs there are: {', '.join(names)}" if names else " Make one: lowprec-lab train --name NAME"


def _settings_in(text: str, folder: Path) -> Settings:
    try:
        values = json.loads(text)
        return settings(values.pop("preset"), **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f": {error}" if isinstance(error, SettingsError) else ""
        raise RunError(f"{folder / 'settings.json'} is damaged{why}. Start again with --overwrite") from error


__all__ = ["Run", "RunError", "WorkspaceError", "run_folder", "runs_folder"]
