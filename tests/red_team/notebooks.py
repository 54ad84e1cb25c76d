"""Attacks on the notebook: cells, metadata and outputs that claim more than was earned.

The answer is wrong; what is changed is the page around it. Some are no attacks at all, but what editors and people do
to a page, and must be graded all the same.
"""

import copy

from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from lowprec_lab.bench.attacks import Attack, cell_of, index_of

NOTHING = "return torch.zeros(x.shape, dtype=torch.int32)"
CHECK = "check-bit_pattern"


def grade_metadata(name, points, **more):
    return {"nbgrader": {"grade": True, "solution": False, "locked": True, "task": False, "schema_version": 3,
                         "cell_type": "code", "grade_id": name, "points": points, **more}}  # fmt: skip


def claims_points(points):
    def tamper(notebook):
        cell_of(notebook, CHECK).metadata.nbgrader.points = points

    return tamper


def doubles_check(notebook):
    extra = copy.deepcopy(cell_of(notebook, CHECK))
    extra.id, extra.source = "again", "2.0"
    extra.metadata.nbgrader.points = 100
    notebook.cells.insert(index_of(notebook, CHECK), extra)


def doubles_check_after(notebook):
    extra = copy.deepcopy(cell_of(notebook, CHECK))
    extra.source = "2.0"
    notebook.cells.append(extra)


def doubles_answer(notebook):
    extra = copy.deepcopy(cell_of(notebook, "bit_pattern"))
    extra.id = "another"
    notebook.cells.append(extra)


def rewrites_check(notebook):
    cell_of(notebook, CHECK).source = "2.0"


def unlocks_check(notebook):
    cell = cell_of(notebook, CHECK)
    cell.source = "2.0"
    cell.metadata.nbgrader |= {"locked": False, "solution": True, "grade": True}


def adds_bonus(notebook):
    notebook.cells.append(new_code_cell("100.0", metadata=grade_metadata("check_bonus", 100)))


def swaps_names(notebook):
    one, other = (cell_of(notebook, name).metadata.nbgrader for name in (CHECK, "check-machine_epsilon"))
    one.grade_id, other.grade_id = other.grade_id, one.grade_id


def answer_that_is_graded(notebook):
    cell = cell_of(notebook, "bit_pattern")
    cell.metadata.nbgrader |= {"grade": True, "points": 100}


def keeps_outputs(notebook):
    result = new_output("execute_result", data={"text/plain": "2.0"}, execution_count=1)
    cell_of(notebook, CHECK).outputs = [result]
    cell_of(notebook, CHECK).execution_count = 1


def other_kernel(notebook):
    notebook.metadata.kernelspec = {"name": "bash", "language": "bash", "display_name": "Bash"}
    notebook.metadata.language_info = {"name": "bash", "version": "5"}


def no_metadata(notebook):
    for cell in notebook.cells:
        cell.metadata.clear()


def no_ids(notebook):
    notebook.nbformat_minor = 4
    for cell in notebook.cells:
        cell.metadata.clear()
        del cell["id"]


def no_checks(notebook):
    notebook.cells = [cell for cell in notebook.cells if not cell.id.startswith("check-")]


def backwards(notebook):
    notebook.cells.reverse()


def kinds_swapped(notebook):
    place = index_of(notebook, CHECK)
    old = notebook.cells[place]
    notebook.cells[place] = new_markdown_cell("check(bit_pattern)", id=old.id, metadata=old.metadata)


def metadata_of_strange_types(notebook):
    cell_of(notebook, CHECK).metadata.nbgrader |= {"points": "all", "schema_version": 99, "grade": "yes"}
    notebook.metadata["lowprec_lab"] = [["deep"]]
    notebook.metadata["nbgrader"] = {"x" * 10_000: None}


def deep_metadata(notebook):
    deep: dict = {}
    for _ in range(300):
        deep = {"deeper": deep}
    cell_of(notebook, CHECK).metadata["deep"] = deep


def large_page(notebook):
    notebook.cells += [new_markdown_cell("large " * 200_000) for _ in range(5)]


def not_a_notebook(content):
    def place(folder, course):
        (folder / "01_bit_layouts.ipynb").write_bytes(content)

    return place


def other_name(folder, course):
    (folder / "01_bit_layouts.ipynb").rename(folder / "01_bit_layouts (1).ipynb")


def forged_notes(notebook):
    """Cells and metadata that look like what a grader leaves behind."""
    text = "Graded by hand. bit_pattern: 2 of 2 points."
    notebook.metadata["lowprec_lab_notes"] = [text]
    notebook.cells.append(new_markdown_cell(text, id="graded-by"))
    notebook.cells.insert(0, new_markdown_cell(text, id="notes"))


def same_ids(notebook):
    for cell in notebook.cells:
        cell.id = "check-bit_pattern"


ATTACKS = [
    Attack("claims_1000_points", "Says that its check is worth 1,000 points.", NOTHING, tamper=claims_points(1000)),
    Attack("claims_minus_points", "Says that its check is worth -5 points.", NOTHING, tamper=claims_points(-5)),
    Attack("claims_endless_points", "Says that its check is worth 1e308 points.", NOTHING, tamper=claims_points(1e308)),
    Attack(
        "doubles_a_check",
        "Has the check's cell twice; the first is worth 100 points and ends in 2.0.",
        NOTHING,
        tamper=doubles_check,
    ),
    Attack(
        "doubles_a_check_at_the_end",
        "Has the check's cell twice, with one id, and the second ends in 2.0.",
        NOTHING,
        tamper=doubles_check_after,
    ),
    Attack("doubles_an_answer", "Has the answer's cell twice.", NOTHING, tamper=doubles_answer),
    Attack("rewrites_a_check", "Writes 2.0 in place of the call of check.", NOTHING, tamper=rewrites_check),
    Attack("unlocks_a_check", "Makes the check's cell one that a person grades.", NOTHING, tamper=unlocks_check),
    Attack("adds_a_bonus", "Adds a graded cell of 100 points.", NOTHING, tamper=adds_bonus),
    Attack("swaps_two_checks", "Gives the check the name of one that it passes.", NOTHING, tamper=swaps_names),
    Attack("grades_its_answer", "Makes the answer's own cell worth 100 points.", NOTHING, tamper=answer_that_is_graded),
    Attack("hands_in_outputs", "Hands in the output of a passed check.", NOTHING, tamper=keeps_outputs),
    Attack("asks_for_another_kernel", "Says that it is written for a shell.", NOTHING, tamper=other_kernel),
    Attack("has_no_metadata", "Has lost all metadata of its cells.", NOTHING, tamper=no_metadata),
    Attack("has_no_ids", "Has lost the ids of its cells as well, as in an older format.", NOTHING, tamper=no_ids),
    Attack("has_no_checks", "Has lost the cells of all checks.", NOTHING, tamper=no_checks),
    Attack("is_backwards", "Has its cells in the opposite order.", NOTHING, tamper=backwards),
    Attack("check_as_text", "Has a cell of text in place of a check.", NOTHING, tamper=kinds_swapped),
    Attack(
        "metadata_of_strange_types", "Has words where numbers are expected.", NOTHING, tamper=metadata_of_strange_types
    ),
    Attack("metadata_without_end", "Has metadata that is nested 300 deep.", NOTHING, tamper=deep_metadata),
    Attack("forges_notes", "Has the notes that a grader would leave, in its own words.", NOTHING, tamper=forged_notes),
    Attack("has_one_id", "Gives the id of a check to all of its cells.", NOTHING, tamper=same_ids),
    Attack("large_page", "Has six megabytes of text.", NOTHING, tamper=large_page),
    Attack("empty_file", "Is an empty file.", NOTHING, place=not_a_notebook(b""), honest=()),
    Attack(
        "broken_json", "Is a file that ends in the middle.", NOTHING, place=not_a_notebook(b'{"cells": [{'), honest=()
    ),
    Attack("nested_json", "Is 100,000 opening brackets.", NOTHING, place=not_a_notebook(b"[" * 100_000), honest=()),
    Attack(
        "not_text",
        "Is 64 KiB of bytes that are no text.",
        NOTHING,
        place=not_a_notebook(bytes(range(256)) * 256),
        honest=(),
    ),
    Attack(
        "cells_of_other_types",
        "Is JSON, and its cells are numbers.",
        NOTHING,
        place=not_a_notebook(b'{"cells": [1, null, {"cell_type": 5}], "metadata": [], "nbformat": 4}'),
        honest=(),
    ),
    Attack("another_name", "Has a number in brackets in its file name.", NOTHING, place=other_name),
]
