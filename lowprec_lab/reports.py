"""A small file with which a learner can dispute a verdict: the answer, the verdict, the seed, the versions."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from lowprec_lab import __version__
from lowprec_lab.blanks import Blank
from lowprec_lab.graders.run import PUBLIC_SEED
from lowprec_lab.graders.verdict import Verdict
from lowprec_lab.workspace import work_folder, write_whole


def write_report(target: Blank, verdict: Verdict, source: str) -> Path:
    """Write `work/reports/<exercise>.<UTC date>.json` and return its path.

    Raises WorkspaceError if the folder cannot be written.
    """
    now = datetime.now(UTC)
    content = {
        "written": now.isoformat(timespec="seconds"),
        "exercise": target.exercise,
        "answer": source,
        "verdict": verdict.as_dict(),
        "public_seed": PUBLIC_SEED,
        "versions": {"lowprec_lab": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": f"{platform.system()} {platform.machine()}",
    }
    folder = work_folder() / "reports"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target.name}.{now:%Y%m%dT%H%M%SZ}.json"
    write_whole(path, json.dumps(content, indent=1).encode())
    return path
