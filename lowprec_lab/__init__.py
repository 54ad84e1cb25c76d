"""lowprec_lab: learn BF16 and FP8 by building them.

The names a page uses most are here, and are imported when they are first asked for: `import lowprec_lab` costs no more
than `import torch`.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "check": "exercises",
    "fill": "exercises",
    "progress": "exercises",
    "question": "exercises",
    "reveal": "exercises",
    "doctor": "devices",
    "AccumulatorExplorer": "explorers.accumulator_explorer",
    "BitExplorer": "explorers.bit_explorer",
    "BlockExplorer": "explorers.block_explorer",
    "CastPolicyExplorer": "explorers.cast_policy_explorer",
    "ExponentHeatmap": "explorers.exponent_heatmap",
    "Float8LinearExplorer": "explorers.float8_linear_explorer",
    "LossScaleExplorer": "explorers.loss_scale_explorer",
    "RoundingExplorer": "explorers.rounding_explorer",
    "ScaleExplorer": "explorers.scale_explorer",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"lowprec_lab has no attribute {name!r}; it offers {', '.join(_HOMES)} and its modules")
    return getattr(importlib.import_module(f"lowprec_lab.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
