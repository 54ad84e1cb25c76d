"""A small text and a small model, for tests that train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lowprec_lab import data
from lowprec_lab.settings import Settings, settings

VERSE = "".join(f"{i * i % 97} sheep, and {i * 7 % 13} wolves: who counts the {'nights' if i % 3 else 'days'}?\n"
                for i in range(120))  # fmt: skip
SMALL = {
    "layers": 2, "heads": 2, "width": 16, "context": 8, "batch": 4, "steps": 12, "warmup": 2, "eval_every": 5,
    "eval_batches": 3, "checkpoint_every": 4, "sample": 10, "threads": 1,
}  # fmt: skip


def small(**changes: object) -> Settings:
    return settings("baby", **{**SMALL, **changes})


def corpus() -> data.Corpus:
    return data.corpus_of(data.Text(VERSE, "sheep", "LOWPREC_DATA", "Training text: sheep."))


def flags(**changes: object) -> list[str]:
    """The command line's flags for `small(**changes)`."""
    values = {**SMALL, **changes}
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def environment(folder: Path) -> dict[str, str]:
    """For a process that trains on the verse, with its runs and its cache in `folder`."""
    text = folder / "sheep.txt"
    text.write_text(VERSE)
    return {
        **os.environ, "LOWPREC_DATA": str(text), "LOWPREC_WORK": str(folder / "work"), "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }  # fmt: skip


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lowprec_lab", "train", *arguments]


def run(folder: Path, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(folder), timeout=timeout, check=False
    )


def without_speed(records: list[dict]) -> list[dict]:
    return [{key: value for key, value in record.items() if key != "tokens_per_s"} for record in records]
