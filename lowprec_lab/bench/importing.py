"""How long importing the lab takes next to `import torch`, each in a Python process of its own.

`import lowprec_lab` alone imports nothing yet (its names come when they are asked for), so that would be no fair race:
what is timed is the lab with all chapters and graders, ready to judge.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

PAIRS = 9
READY = "import lowprec_lab; lowprec_lab.check; from lowprec_lab import exercises; exercises.load_chapters()"
BARE = "import lowprec_lab"


def run(progress: bool = True) -> dict:
    """Figures: `import_vs_torch` (median over pairs of the ratio), `import_s`, `bare_import_s`, `torch_s` (medians)."""
    ours, bares, torchs = [], [], []
    _seconds(READY)  # what the disk has to deliver and Python to compile, once
    for _ in _with_bar(range(PAIRS), progress):
        # One after the other, so that what slows the machine for a while slows both.
        ours.append(_seconds(READY))
        bares.append(_seconds(BARE))
        torchs.append(_seconds("import torch"))
    ratios = [our / torch for our, torch in zip(ours, torchs, strict=True)]
    figures = {
        "import_vs_torch": statistics.median(ratios),
        "import_s": statistics.median(ours),
        "bare_import_s": statistics.median(bares),
        "torch_s": statistics.median(torchs),
    }
    return {"figures": figures, "pairs": PAIRS, "ratios": ratios}


def _seconds(statement: str) -> float:
    """Seconds that a whole Python process takes to run `statement`."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _with_bar(steps, progress: bool):
    if not progress:
        return steps
    from tqdm import tqdm

    return tqdm(steps, desc="import", unit="pair")
