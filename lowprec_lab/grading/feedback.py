"""Where nbgrader finds its pages' templates: the course's first, so that feedback and form grader load no script afar.

nbgrader takes each template from a folder of its name (`feedback`, `formgrade`) in the first place that has it; the
course's folders have the one file that matters, nbconvert's macro that loads MathJax.
"""

from __future__ import annotations

from pathlib import Path

TEMPLATES = Path(__file__).with_name("templates")


def template_folders() -> list[str]:
    """For `c.HTMLExporter.extra_template_basedirs`: the course's templates, then nbgrader's."""
    import nbgrader

    return [str(TEMPLATES), str(Path(nbgrader.__file__).parent / "server_extensions" / "formgrader" / "templates")]
