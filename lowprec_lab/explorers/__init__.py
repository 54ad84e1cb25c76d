"""Explorers: small widgets that show one idea each, driven by the learner's own code."""

from lowprec_lab.explorers.bit_explorer import BitExplorer

__all__ = ["BitExplorer"]
