"""Explorers: small widgets that show one idea each, driven by the learner's own code."""

from lowprec_lab.explorers.accumulator_explorer import AccumulatorExplorer
from lowprec_lab.explorers.bit_explorer import BitExplorer
from lowprec_lab.explorers.block_explorer import BlockExplorer
from lowprec_lab.explorers.cast_policy_explorer import CastPolicyExplorer
from lowprec_lab.explorers.exponent_heatmap import ExponentHeatmap
from lowprec_lab.explorers.float8_linear_explorer import Float8LinearExplorer
from lowprec_lab.explorers.loss_scale_explorer import LossScaleExplorer
from lowprec_lab.explorers.rounding_explorer import RoundingExplorer
from lowprec_lab.explorers.scale_explorer import ScaleExplorer

__all__ = [
    "AccumulatorExplorer",
    "BitExplorer",
    "BlockExplorer",
    "CastPolicyExplorer",
    "ExponentHeatmap",
    "Float8LinearExplorer",
    "LossScaleExplorer",
    "RoundingExplorer",
    "ScaleExplorer",
]
