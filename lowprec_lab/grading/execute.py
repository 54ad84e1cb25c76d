"""nbgrader's engine for a course: it runs the submission with the course's seed, and every check ends in a number.

Stock nbgrader gives no points to a graded cell that writes a warning, and full points to one that ends in no number.
"""

from __future__ import annotations

import math
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader.preprocessors import Execute
from nbgrader.utils import is_grade, setenv
from traitlets import Unicode

from lowprec_lab.grading.course import read_seed, require_release

WIDGET = "application/vnd.jupyter.widget-view+json"


class CourseExecute(Execute):
    """Executes a submission; takes the place of nbgrader's Execute and keeps its settings (`c.Execute.timeout`)."""

    course = Unicode("", help="The course's folder, with its seed and course.json.").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: dict, **arguments: object) -> tuple[NotebookNode, dict]:
        """Run the cells. Raises CourseError when the seed is missing or another release is installed."""
        folder = Path(self.course)
        require_release(folder)
        with setenv(LOWPREC_SEED=read_seed(folder)):
            nb, resources = super().preprocess(nb, resources, **arguments)
        for cell in nb.cells:
            if cell.cell_type == "code":
                show_pictures(cell)
            if cell.cell_type == "code" and is_grade(cell):
                settle(cell)
        return nb, resources


def show_pictures(cell: NotebookNode) -> None:
    """Leave the still picture of each explorer in the outputs: the form grader and feedback have no kernel for it."""
    for output in cell.outputs:
        if any(kind.startswith("image/") for kind in output.get("data", {})):
            output.data.pop(WIDGET, None)


def settle(cell: NotebookNode) -> None:
    """Make the outputs of an executed check mean the same to nbgrader as to a reader.

    Warnings become ordinary output: they cost nothing. A check that ended in no number from 0 to its points (its
    function was replaced, say) gets an error, which is worth 0.
    """
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stderr":
            output.name = "stdout"
    failed = any(output.output_type == "error" for output in cell.outputs)
    if not failed and not _ends_in_points(cell):
        sentence = (
            f"This check ended in no number from 0 to {cell.metadata.nbgrader.points:g}, so it counts 0. "
            "Something in the notebook replaced `check`, or the cell did not run to its end."
        )
        error = new_output("error", ename="NoPoints", evalue=sentence, traceback=[f"NoPoints: {sentence}"])
        cell.outputs.insert(0, error)  # nbgrader believes the first result or error


def _ends_in_points(cell: NotebookNode) -> bool:
    results = [output.data.get("text/plain", "") for output in cell.outputs if output.output_type == "execute_result"]
    try:
        points = float(results[0])
    except (IndexError, TypeError, ValueError):
        return False
    return math.isfinite(points) and 0 <= points <= float(cell.metadata.nbgrader.points)
