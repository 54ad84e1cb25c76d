"""Feedback as a page that loads nothing from anywhere: no script, no MathJax, no font."""

from __future__ import annotations

from pathlib import Path

from jinja2 import FileSystemLoader
from nbconvert.exporters import HTMLExporter
from traitlets import default

TEMPLATES = Path(__file__).with_name("templates")


class FeedbackExporter(HTMLExporter):
    """nbgrader's feedback page, with the course's macro in the place of nbconvert's, which loads MathJax."""

    @default("extra_loaders")
    def _extra_loaders_default(self) -> list[FileSystemLoader]:
        return [FileSystemLoader(TEMPLATES / "feedback")]
