"""From a chapter's source to the released page: ids, nbgrader's metadata, the errors, and that no answer leaks."""

import dataclasses
import json
import re

import nbformat
import pytest

from lowprec_lab import authoring
from lowprec_lab.authoring import AuthoringError, build, leaked_lines, out_of_step, source_notebook
from lowprec_lab.blanks import Blank
from lowprec_lab.chapters import CHAPTERS

CHAPTER = CHAPTERS[1].name
LEAKED = "doubled = number * 2 + 0  # twice the number"

SETUP = """\
# %% [markdown]
# # A page
#
# Some text.

# %% tags=["setup"]
import math

from lowprec_lab.exercises import check, fill, question
"""

ANSWERS = {
    name: f'''
# %%
@fill
def {name}(number):
    """What to do."""
    ### BEGIN SOLUTION
    {LEAKED}
    return doubled
    ### END SOLUTION
'''
    for name in ("first", "second", "tenth")
}
CHECKS = {name: f"\n# %%\ncheck({name})\n" for name in ANSWERS}

HELPERS = "\n# %%\n# Your helpers: saved and judged with your answers.\n"
TEXT = "\n# %% [markdown]\n# The same text twice.\n"
QUESTION = """
# %%
question(
    "1.A",
    ### BEGIN SOLUTION
    "because it has no sign bit",
    ### END SOLUTION
)
"""

PAGE = "".join(
    [SETUP, HELPERS, ANSWERS["first"], CHECKS["first"], TEXT, ANSWERS["second"], CHECKS["second"]]
    + [TEXT, QUESTION, ANSWERS["tenth"], CHECKS["tenth"]]
)


def blank(name: str, exercise: str) -> Blank:
    return Blank(name, CHAPTERS[1].module, exercise, 2, 10, (), "", lambda number: None)


BLANKS = {"tenth": blank("tenth", "1.10"), "first": blank("first", "1.1"), "second": blank("second", "1.9")}


@pytest.fixture
def solutions(tmp_path):
    """Writes a page and gives the folder it is in."""

    def write(text: str = PAGE):
        folder = tmp_path / "solutions"
        folder.mkdir(exist_ok=True)
        (folder / f"{CHAPTER}.py").write_text(text, encoding="utf-8")
        return folder

    return write


def read_source(folder, blanks=BLANKS):
    return source_notebook(folder / f"{CHAPTER}.py", blanks)


def read_built(folder, out):
    [page] = build(out, [CHAPTER], solutions=folder, blanks=BLANKS)
    return nbformat.read(page, as_version=4)


def by_id(notebook):
    return {cell.id: cell for cell in notebook.cells}


# --- the source notebook --------------------------------------------------------------------------------------------


def test_ids_come_from_names(solutions):
    ids = [cell.id for cell in read_source(solutions()).cells if not re.match("markdown-[0-9a-f]{12}", cell.id)]
    checked = {name: [name, f"check-{name}"] for name in BLANKS}
    assert ids == ["setup", "helpers", *checked["first"], *checked["second"], "question-1A", *checked["tenth"]]


def test_nbgrader_knows_answers_checks_questions_and_the_setup_cell(solutions):
    cells = by_id(read_source(solutions()))
    kinds = {
        cell.metadata.nbgrader.grade_id: (
            cell.metadata.nbgrader.solution,
            cell.metadata.nbgrader.grade,
            cell.metadata.nbgrader.locked,
            cell.metadata.nbgrader.get("points"),
        )
        for cell in cells.values()
        if "nbgrader" in cell.metadata
    }
    answer, check = (True, False, False, None), (False, True, True, 2)
    assert kinds == {
        "setup": (False, False, True, None),
        "question_1A": answer,
        **dict.fromkeys(BLANKS, answer),
        **{f"check_{name}": check for name in BLANKS},
    }
    assert "nbgrader" not in cells["helpers"].metadata


def test_an_inserted_exercise_renames_nothing(solutions):
    shorter = PAGE.replace(ANSWERS["second"] + CHECKS["second"], "")
    blanks = {name: BLANKS[name] for name in ("first", "tenth")}
    before = by_id(read_source(solutions(shorter), blanks))
    after = by_id(read_source(solutions()))
    assert set(before) < set(after)
    assert all(after[name] == cell for name, cell in before.items())


def test_equal_cells_have_different_ids(solutions):
    notebook = read_source(solutions())
    nbformat.validate(notebook)
    same = [cell.id for cell in notebook.cells if cell.source == "The same text twice."]
    assert len(same) == len(set(same)) == 2


# --- the released page ----------------------------------------------------------------------------------------------


def test_a_released_page_has_stubs_and_no_outputs(solutions, tmp_path):
    notebook = read_built(solutions(), tmp_path / "notebooks")
    cells = by_id(notebook)
    assert cells["first"].source == '@fill\ndef first(number):\n    """What to do."""\n    ...  # your code here'
    assert cells["question-1A"].source == 'question(\n    "1.A",\n    ...  # your code here\n)'
    assert all(cell.outputs == [] and cell.execution_count is None for cell in notebook.cells if "outputs" in cell)
    assert cells["check-first"].metadata.editable is cells["setup"].metadata.editable is False
    assert "editable" not in cells["first"].metadata
    assert notebook.metadata.kernelspec.name == "python3"
    assert "version" not in notebook.metadata.language_info


def test_the_release_hash_is_that_of_the_released_cells(solutions, tmp_path):
    notebook = read_built(solutions(), tmp_path / "notebooks")
    assert notebook.metadata.lowprec_lab == {"chapter": CHAPTER, "release": authoring._release_hash(notebook.cells)}


def test_the_release_hash_changes_with_the_page_and_not_with_the_answer(solutions):
    release = read_source(solutions()).metadata.lowprec_lab.release
    assert (
        read_source(solutions(PAGE.replace(LEAKED, "doubled = number + number"))).metadata.lowprec_lab.release
        == release
    )
    assert read_source(solutions(PAGE.replace("Some text", "Other text"))).metadata.lowprec_lab.release != release
    assert read_source(solutions(PAGE.replace("What to do", "Do it"))).metadata.lowprec_lab.release != release


def test_built_twice_byte_identical(solutions, tmp_path):
    folder = solutions()
    pages = [build(tmp_path / out, [CHAPTER], solutions=folder, blanks=BLANKS)[0] for out in ("one", "two", "two")]
    assert pages[0].read_bytes() == pages[1].read_bytes()
    assert pages[1] == pages[2]
    assert not [path for path in (tmp_path / "two").rglob("*") if path.is_file() and path != pages[1]]


def test_settings_of_whoever_builds_change_nothing(solutions, tmp_path, monkeypatch):
    folder = solutions()
    [page] = build(tmp_path / "one", [CHAPTER], solutions=folder, blanks=BLANKS)
    (tmp_path / "nbgrader_config.py").write_text("c = get_config()\nc.ClearSolutions.code_stub = {'python': 'pass'}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    assert build(tmp_path / "two", [CHAPTER], solutions=folder, blanks=BLANKS)[0].read_bytes() == page.read_bytes()


def test_a_build_that_fails_changes_nothing(solutions, tmp_path, monkeypatch):
    folder, out = solutions(), tmp_path / "notebooks"
    [page] = build(out, [CHAPTER], solutions=folder, blanks=BLANKS)
    before = page.read_bytes()
    solutions(PAGE.replace("    ### END SOLUTION\n", "", 1))
    with pytest.raises(AuthoringError):
        build(out, [CHAPTER], solutions=folder, blanks=BLANKS)
    solutions(PAGE.replace("Some text", "Other text"))
    monkeypatch.setattr("nbgrader.preprocessors.ClearSolutions.preprocess_cell", None)
    with pytest.raises(RuntimeError, match=f"nbgrader could not generate the page of {CHAPTER}(?s:.*)Traceback"):
        build(out, [CHAPTER], solutions=folder, blanks=BLANKS)
    assert [path for path in out.rglob("*") if path.is_file()] == [page]
    assert page.read_bytes() == before


def test_out_of_step(solutions, tmp_path, monkeypatch):
    folder, out = solutions(), tmp_path / "notebooks"
    monkeypatch.setattr(authoring, "CHAPTERS", [CHAPTERS[1]])
    compare = {"solutions": folder, "blanks": BLANKS}
    assert [sentence.partition(" is ")[2] for sentence in out_of_step(out, **compare)] == [
        "missing. Run `make notebooks`"
    ]
    [page] = build(out, solutions=folder, blanks=BLANKS)
    assert out_of_step(out, **compare) == []
    page.write_text(page.read_text().replace("Some text", "Some edited text"))
    assert [sentence.partition(" differs ")[0] for sentence in out_of_step(out, **compare)] == [str(page)]
    old = out / "07_old" / "07_old.ipynb"
    old.parent.mkdir()
    old.write_text("{}")
    (out / "README.md").write_text("not generated")
    assert len(out_of_step(out, **compare)) == 2
    build(out, **compare)
    assert out_of_step(out, **compare) == []
    assert not old.parent.exists()
    assert (out / "README.md").exists()


def test_pages_without_a_number_are_built_too(solutions, tmp_path, monkeypatch):
    folder, out = solutions(), tmp_path / "notebooks"
    monkeypatch.setattr(authoring, "CHAPTERS", [CHAPTERS[1]])
    (folder / "glossary.py").write_text("# %% [markdown]\n# # Words\n")
    pages = build(out, solutions=folder, blanks=BLANKS)
    assert [page.name for page in pages] == [f"{CHAPTER}.ipynb", "glossary.ipynb"]
    assert [cell.source for cell in nbformat.read(pages[1], as_version=4).cells] == ["# Words"]
    (folder / "07_new.py").write_text(PAGE)
    with pytest.raises(AuthoringError, match=r"07_new\.py: no chapter has this name"):
        build(out, solutions=folder, blanks=BLANKS)


# --- no answer in a released page -----------------------------------------------------------------------------------


def test_a_released_page_leaks_nothing(solutions, tmp_path):
    folder = solutions()
    assert leaked_lines(read_built(folder, tmp_path / "notebooks"), read_source(folder)) == []


@pytest.mark.parametrize("line", [LEAKED, LEAKED.partition("  #")[0], '"because it has no sign bit"'])
@pytest.mark.parametrize("place", ["code", "markdown", "output", "metadata"])
def test_an_injected_line_is_found(solutions, tmp_path, line, place):
    folder = solutions()
    released = read_built(folder, tmp_path / "notebooks")
    if place == "code":
        by_id(released)["tenth"].source += f"\n    {line}\n"
    elif place == "markdown":
        released.cells[0].source += f"\n\n```python\n{line}\n```"
    elif place == "output":
        by_id(released)["tenth"].outputs = [nbformat.v4.new_output("stream", text=f"{line}\n")]
    else:
        released.metadata["note"] = {"answers": [line]}
    leaks = leaked_lines(released, read_source(folder))
    assert set(leaks) == {text for text in (LEAKED, LEAKED.partition("  #")[0], line) if text in line}


def test_given_code_is_no_leak_but_text_is(solutions, tmp_path):
    line = LEAKED.partition("  #")[0]
    folder = solutions(PAGE + f"\n# %%\nnumber = 1\n{line}\n")
    assert leaked_lines(read_built(folder, tmp_path / "one"), read_source(folder)) == []
    folder = solutions(PAGE + f"\n# %% [markdown]\n# Write `{line}`.\n")
    assert set(leaked_lines(read_built(folder, tmp_path / "two"), read_source(folder))) == {line}


def test_a_class_has_a_region_for_each_method(solutions, tmp_path):
    method = (
        "    def {}(self):\n        ### BEGIN SOLUTION\n        return [self.number] * 20\n        ### END SOLUTION\n"
    )
    text = "\n# %%\n@fill\nclass first:\n" + method.format("one") + "\n" + method.format("two")
    page = read_built(solutions(PAGE.replace(ANSWERS["first"], text)), tmp_path / "out")
    stub = by_id(page)["first"].source
    assert stub.count(authoring.CODE_STUB) == 2
    assert "self.number" not in stub
    with pytest.raises(AuthoringError, match="needs one line"):
        read_source(solutions(PAGE.replace(ANSWERS["first"], ANSWERS["first"] + method.format("one"))))


# --- what an author is told -----------------------------------------------------------------------------------------

MARKERS = re.compile(r" *### (BEGIN|END) SOLUTION\n")
WRONG = {
    "no markers": (MARKERS.sub("", ANSWERS["first"]), "first", "needs one line `### BEGIN SOLUTION`"),
    "no end": (ANSWERS["first"].replace("    ### END SOLUTION\n", ""), "first", "needs one line `### BEGIN SOLUTION`"),
    "a region elsewhere": (ANSWERS["first"].replace("@fill\n", ""), "first", "outside an answer cell"),
    "half a statement": (ANSWERS["first"].replace("return doubled", "return (doubled").replace(
        "    ### END SOLUTION\n", "    ### END SOLUTION\n    )\n"), "first", "without its answer the cell of first"),
    "no Python": (ANSWERS["first"].replace("return doubled", "return return"), "first", "is no Python"),
    "unknown": (ANSWERS["first"].replace("def first", "def frist"), "first", "there is no exercise 'frist'"),
    "twice": (ANSWERS["first"] * 2, "first", "the answer of first is here twice"),
    "check in the answer cell": (ANSWERS["first"] + "check(first)\n", "first", "holds another answer or a check"),
    "check not last": (CHECKS["first"] + "print(1)\n", "check", "is not the last and only check"),
    "check without answer": ("", "first", "check(first) has no answer cell above it"),
    "unknown check": (CHECKS["first"].replace("first", "frist"), "check", "there is no exercise 'frist'"),
    "wrong tags": (ANSWERS["first"].replace("# %%", "# %% tags=[a]"), "first", "tags are a list of strings"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_author_is_told_file_line_and_what_to_do(solutions, name):
    new, where, sentence = WRONG[name]
    old = CHECKS["first"] if where == "check" else ANSWERS["first"]
    folder = solutions(PAGE.replace(old, new))
    with pytest.raises(AuthoringError) as told:
        read_source(folder)
    problem = next(line for line in str(told.value).splitlines() if sentence in line)
    file, line, _ = problem.split(":", 2)
    assert file == str(folder / f"{CHAPTER}.py")
    assert 1 <= int(re.match(r"\s*(?:line )?(\d+)", line)[1]) <= len((PAGE + new).splitlines())


def test_the_line_is_that_of_the_mistake(solutions):
    text = PAGE.replace("return doubled", "return return", 1)
    with pytest.raises(AuthoringError) as told:
        read_source(solutions(text))
    wanted = 1 + text.splitlines().index("    return return")
    assert f"{CHAPTER}.py:{wanted}: this cell is no Python" in str(told.value)


def test_everything_wrong_is_told_at_once(solutions):
    text = (
        PAGE.replace(CHECKS["first"], "").replace(ANSWERS["tenth"] + CHECKS["tenth"], "").replace('tags=["setup"]', "")
    )
    with pytest.raises(AuthoringError) as told:
        read_source(solutions(text))
    sentences = str(told.value).splitlines()
    assert len(sentences) == 3
    for words in ("not the setup cell", "first is never checked", "exercise 1.10, tenth, has no answer cell"):
        assert any(words in sentence for sentence in sentences)


def test_order_follows_the_numbers(solutions):
    folder = solutions()
    assert read_source(folder)  # 1.10 comes after 1.9
    blanks = {**BLANKS, "second": dataclasses.replace(BLANKS["second"], exercise="1.11")}
    with pytest.raises(AuthoringError, match=r"exercise 1.10, tenth, comes after 1.11, second"):
        read_source(folder, blanks)


def test_a_page_that_is_not_there(tmp_path):
    with pytest.raises(AuthoringError, match="there is no such page"):
        source_notebook(tmp_path / "05_missing.py", BLANKS)


# --- the chapters themselves ----------------------------------------------------------------------------------------


def test_notebooks_are_in_step_with_solutions():
    assert out_of_step() == []


def test_no_answer_is_in_any_released_page():
    pages = sorted(authoring.NOTEBOOKS.glob("*/*.ipynb"))
    assert {chapter.name for chapter in CHAPTERS} <= {page.stem for page in pages}
    sources = [source_notebook(authoring.SOLUTIONS / f"{chapter.name}.py") for chapter in CHAPTERS]
    assert all(any(authoring._solution_lines(source)) for source in sources)
    for page in pages:
        released = nbformat.from_dict(json.loads(page.read_text(encoding="utf-8")))
        assert {page.stem: [line for source in sources for line in leaked_lines(released, source)]} == {page.stem: []}
