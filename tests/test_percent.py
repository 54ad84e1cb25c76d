"""The reader of percent files, compared with jupytext, which defined them."""

from pathlib import Path

import pytest

from lowprec_lab.percent import Cell, read_cells

PAGES = sorted((Path(__file__).parents[1] / "solutions").glob("*.py"))

PAGE = '''\
# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # A title
#
# - a list
#     indented
#   ```python
#   code
#   ```

# %% tags=["setup", "two"]
import math


class Two:
    pass


# %%

# %% some title
x = """
a string
"""

# %% [raw]
# raw text
'''


def test_cells_of_a_page():
    assert read_cells(PAGE) == [
        Cell("markdown", "# A title\n\n- a list\n    indented\n  ```python\n  code\n  ```", (), 8),
        Cell("code", "import math\n\n\nclass Two:\n    pass", ("setup", "two"), 17),
        Cell("code", 'x = """\na string\n"""', (), 27, "some title"),
        Cell("raw", "raw text", (), 32),
    ]


def test_the_line_is_that_of_the_first_line_of_the_source():
    lines = PAGE.splitlines()
    for cell in read_cells(PAGE):
        assert cell.source.splitlines()[0] in lines[cell.line - 1]


def test_text_above_the_first_marker_is_a_code_cell():
    assert read_cells('"""A module."""\n\n# %%\nx = 1\n') == [
        Cell("code", '"""A module."""', (), 1),
        Cell("code", "x = 1", (), 4),
    ]
    assert read_cells("x = 1") == [Cell("code", "x = 1", (), 1)]


@pytest.mark.parametrize("text", ["", "\n\n", "# %%\n", "# ---\n# a: b\n# ---\n"])
def test_nothing_in_nothing_out(text):
    assert read_cells(text) == []


def test_an_indented_marker_is_a_comment():
    assert len(read_cells("# %%\ndef f():\n    # %% not a cell\n    return 1\n")) == 1
    assert len(read_cells("# %%\n# %%% not a cell\n")) == 1


@pytest.mark.parametrize("tags", ["[setup]", "['setup']", "[1]"])
def test_tags_that_are_no_strings_are_refused(tags):
    with pytest.raises(ValueError, match="line 3: tags are a list of strings"):
        read_cells(f"x = 1\n\n# %% tags={tags}\ny = 2\n")


def agrees_with_jupytext(text: str) -> bool:
    jupytext = pytest.importorskip("jupytext")
    theirs = [
        (cell.cell_type, cell.source.strip("\n"), tuple(cell.metadata.get("tags", ())))
        for cell in jupytext.reads(text, fmt="py:percent").cells
        if cell.source.strip("\n")
    ]
    return theirs == [(cell.kind, cell.source, cell.tags) for cell in read_cells(text)]


def test_agrees_with_jupytext():
    assert agrees_with_jupytext(PAGE)
    assert not agrees_with_jupytext('# %%\nx = """\n# %%\n"""\n')  # the one case, documented, where the two differ


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_agrees_with_jupytext_on_every_chapter(path):
    assert agrees_with_jupytext(path.read_text(encoding="utf-8"))
