"""The judge in nbgrader's autograde: it stands in the place of Execute, and nothing in a submission runs in the open.

Each check cell gets its verdict and ends in the number of its points, which is what nbgrader reads. `CourseExecute` is
nbgrader's own engine with the course's seed, for comparison: it runs a submission with its user's rights, and believes
what it prints.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_output
from nbgrader.preprocessors import Execute, NbGraderPreprocessor
from nbgrader.utils import is_grade, is_solution
from traitlets import Bool, Unicode

from lowprec_lab.grading.course import CourseError, installed_release, require_release, seed_or_new
from lowprec_lab.grading.repair import find_answers

WIDGET = "application/vnd.jupyter.widget-view+json"
_CHECK = "check_"


# --- judging --------------------------------------------------------------------------------------------------------


def judge_notebook(notebook: Mapping, chapter: str, workers: object, seed: int) -> dict:
    """{exercise: Verdict} for every exercise of `chapter` ("01_bit_layouts"); nothing of the page runs in this process.

    notebook: a page as `staging.read_submission` or nbformat gives it, before or after `repair`. workers: a Sandbox, or
    PlainProcesses for one's own work.
    """
    from lowprec_lab.grading.judge import judge_all

    return judge_all(find_answers(notebook, chapter), chapter, workers, seed=seed)


def write_outputs(notebook: NotebookNode, verdicts: Mapping) -> None:
    """Put each verdict under its check cell, with the points as the cell's result; no other cell has outputs.

    Cells that a person grades keep what `repair` left of what they showed. A graded cell that nothing judges gets an
    error, which is worth 0: nbgrader gives full points for silence.
    """
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        if not is_grade(cell):
            cell.outputs = []
        elif not is_solution(cell):
            verdict = verdicts.get(cell.metadata.nbgrader.grade_id.removeprefix(_CHECK))
            cell.outputs = _verdict_outputs(verdict, cell) if verdict else [_error("nothing judges this cell")]


def _verdict_outputs(verdict, cell: NotebookNode) -> list[NotebookNode]:
    points = clamped(verdict.points, cell.metadata.nbgrader.points)
    shown = {"text/html": verdict.html(), "text/plain": verdict.text()}
    result = {"text/plain": repr(points)}
    return [
        new_output("display_data", data=shown),
        new_output("execute_result", data=result, execution_count=None),
    ]


def clamped(points: float, most: float) -> float:
    """Points from 0 to `most`; 0 for what is no number."""
    points = float(points)
    return min(max(points, 0.0), float(most)) if math.isfinite(points) else 0.0


def _error(sentence: str) -> NotebookNode:
    return new_output("error", ename="NoPoints", evalue=sentence, traceback=[f"NoPoints: {sentence}"])


class JudgeExecute(NbGraderPreprocessor):
    """Stands in Execute's place among nbgrader's autograde_preprocessors. Runs nothing in this process."""

    course = Unicode("", help="The course's folder, with its seed and course.json.").tag(config=True)
    sandbox = Bool(True, help="False runs answers with your own rights: for your own work, never a class's.").tag(
        config=True
    )

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Judge the page, or take the verdicts that are kept. Raises CourseError when this course cannot grade."""
        from lowprec_lab.grading.verdicts import key_of, load_verdicts, save_verdicts

        about, folder = resources["nbgrader"], Path(self.course)
        seed = self._require_course(folder)
        chapter, student = about["notebook"], about["student"]
        key = key_of(find_answers(nb, chapter), chapter, seed)
        verdicts = load_verdicts(folder, chapter, student, key)
        if verdicts is None:
            verdicts = judge_notebook(nb, chapter, open_workers(self.sandbox), seed)
            save_verdicts(folder, chapter, student, key, verdicts)
        write_outputs(nb, verdicts)
        nb.cells.append(graded_by(seed))
        return nb, resources

    def require_ready(self, chapter: str, students: list[str]) -> None:
        """Raise CourseError unless this course can grade; a sandbox is opened if somebody has no verdicts yet."""
        from lowprec_lab.grading.verdicts import private_file

        folder = Path(self.course)
        require_release(folder)
        if not all(private_file(folder, "verdicts", chapter, student).is_file() for student in students):
            open_workers(self.sandbox)

    def _require_course(self, folder: Path) -> int:
        from lowprec_lab.graders.run import seed_number

        require_release(folder)
        seed, note = seed_or_new(folder)
        if note:
            self.log.warning(note)
        return seed_number(seed)


def graded_by(seed: int) -> NotebookNode:
    """The cell that says what graded a page: it tells two gradings apart, and the seed to nobody."""
    from lowprec_lab.grading.verdicts import grader_hash, seed_id

    text = f"Graded by lowprec_lab {installed_release()}, graders `{grader_hash()}`, seed `{seed_id(seed)}`."
    return new_markdown_cell(text, id="graded-by")


def open_workers(sandbox: bool = True) -> object:
    """Where this process's workers come from: a sandbox, started once. Raises CourseError where there is none."""
    return _open_workers(sandbox, os.getpid())


@functools.lru_cache(maxsize=4)
def _open_workers(sandbox: bool, _process: int) -> object:
    from lowprec_lab.grading import processes
    from lowprec_lab.grading.sandbox import SandboxError

    stack = contextlib.ExitStack()
    try:
        workers = stack.enter_context(processes.open_workers(sandbox))
    except SandboxError as problem:
        raise CourseError(str(problem)) from None
    atexit.register(stack.close)
    return workers


# --- nbgrader's own engine --------------------------------------------------------------------------------------------


class CourseExecute(Execute):
    """Executes a submission with the course's seed; keeps Execute's settings (`c.Execute.timeout`).

    Stock nbgrader gives no points to a graded cell that writes a warning, and full points to one that ends in no
    number; here a warning costs nothing, and no number earns nothing.
    """

    course = Unicode("", help="The course's folder, with its seed and course.json.").tag(config=True)

    def require_ready(self, _chapter: str, _students: list[str]) -> None:
        """Raise CourseError when another release is installed."""
        require_release(Path(self.course))

    def preprocess(self, nb: NotebookNode, resources: dict, **arguments: object) -> tuple[NotebookNode, dict]:
        """Run the cells. Raises CourseError when another release is installed."""
        folder = Path(self.course)
        require_release(folder)
        seed, _ = seed_or_new(folder)
        with _environment("LOWPREC_SEED", seed):
            nb, resources = super().preprocess(nb, resources, **arguments)
        for cell in nb.cells:
            if cell.cell_type == "code":
                show_pictures(cell)
            if cell.cell_type == "code" and is_grade(cell) and not is_solution(cell):
                settle(cell)
        return nb, resources


@contextlib.contextmanager
def _environment(name: str, value: str):
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:  # nbgrader's own setenv leaves it there when a page fails
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


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
        cell.outputs.insert(0, _error(sentence))  # nbgrader believes the first result or error


def _ends_in_points(cell: NotebookNode) -> bool:
    results = [output.data.get("text/plain", "") for output in cell.outputs if output.output_type == "execute_result"]
    try:
        points = float(results[0])
    except (IndexError, TypeError, ValueError):
        return False
    return math.isfinite(points) and 0 <= points <= float(cell.metadata.nbgrader.points)
