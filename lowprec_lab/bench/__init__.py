"""Benches: what has a stated bound is measured here.

`lowprec-lab bench NAME --json` prints {"figures": {name: number}} and whatever else the bench reports.
"""

from __future__ import annotations

import importlib

# Command name -> what it measures.
NAMES = {
    "graders": "what the graders catch and name, and how long a check takes",
    "explorer": "from a click or a drag in an explorer to its paint",
    "red_team": "submissions that cheat, break or attack people: what wins here, and on stock nbgrader (15 minutes)",
    "grading": "a class: next to nbgrader's stock engine, and as it grows",
    "rounding": "how fast rounding is: compiled, eager, torch's own cast, other libraries, next to a plain copy",
    "training": "a step of `lowprec-lab train` next to a bare loop, and in FP8 next to torchao's and to float32",
    "import": "how long importing the lab takes next to `import torch`",
    "float8_linear": "a linear layer in 8 bits next to torchao's and to float32, eager and compiled",
    "inference": "a served GPT: with a cache and without, memory, and codes next to compressed-tensors",
    "gguf": "blocks of 32 in C and in Python next to gguf-py's numpy, and the error of Q4_K",
    "block_formats": "MX and NVFP4 next to torchao's, and a compiled MX round trip next to torch's cast to E4M3",
}

# A module may not be called `import`.
_MODULES = {"import": "importing"}


def run(name: str, progress: bool = True) -> dict:
    """Measure `name`, with a progress bar on stderr if `progress`. Returns {"figures": {name: number}, ...}.

    Raises ValueError that lists the benches there are.
    """
    if name not in NAMES:
        raise ValueError(f"there is no bench {name!r}. The benches are: {', '.join(NAMES)}")
    return importlib.import_module(f"lowprec_lab.bench.{_MODULES.get(name, name)}").run(progress)
