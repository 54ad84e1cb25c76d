"""Attacks on the people who look: scripts in markdown, attachments, exceptions, reprs, names and lines of source.

An attack has won when a page that an instructor opens (the form grader's, the feedback) holds a script, a handler or an
address of it that a browser would run.
"""

import base64

from nbformat.v4 import new_code_cell, new_markdown_cell, new_output, new_raw_cell

from lowprec_lab.bench.attacks import Attack, cell_of

NOTHING = "return torch.zeros(x.shape, dtype=torch.int32)"
SCRIPT = "<script>@MARK@()</script>"
HANDLER = "<img src=x onerror=@MARK@()>"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" onload="@MARK@()"><script>@MARK@()</script></svg>'


def markdown(text, **more):
    def tamper(notebook):
        notebook.cells.insert(1, new_markdown_cell(text, **more))

    return tamper


def outputs(*data):
    """Outputs handed in with an answer and with a check, and with a cell of its own."""

    def tamper(notebook):
        made = [new_output("display_data", data=each) for each in data]
        for name in ("bit_pattern", "check-bit_pattern"):
            cell_of(notebook, name).outputs = made
        notebook.cells.append(new_code_cell("1", outputs=made))

    return tamper


def raw(notebook):
    for kind in ("text/html", "html", ""):
        cell = new_raw_cell(SCRIPT + SVG)
        cell.metadata["format"] = cell.metadata["raw_mimetype"] = kind
        notebook.cells.append(cell)


def names(notebook):
    notebook.metadata["title"] = f"</title>{SCRIPT}"
    notebook.metadata["authors"] = [{"name": SCRIPT}]
    for cell in notebook.cells:
        cell.metadata["tags"] = [f'"><{SCRIPT}', "x onmouseover=@MARK@()"]
        cell.metadata["name"] = '"><img src=x onerror=@MARK@()>'


def ids(notebook):
    for number, cell in enumerate(notebook.cells):
        if cell.id.startswith("check-"):
            cell.id = f'x"><img src=x onerror=@MARK@()>{number}'


SVG_BASE64 = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>').decode()

ATTACKS = [
    Attack("script_in_markdown", "Has a script in a cell of text.", NOTHING, tamper=markdown(f"Hello {SCRIPT}")),
    Attack(
        "script_that_sets_scores",
        "Has a script that gives its own submission points through the form grader's address.",
        NOTHING,
        tamper=markdown(
            "<script>/* @MARK@ */ fetch('/formgrader/api/grades?submission_id=' + submission_id).then(r => r.json())"
            ".then(g => g.forEach(x => fetch('/formgrader/api/grade/' + x.id, {method: 'PUT', headers: {'X-CSRFToken':"
            " document.cookie.match(/_xsrf=([^;]*)/)[1]}, body: JSON.stringify({manual_score: 2})})))</script>"
        ),
    ),
    Attack(
        "handler_in_markdown",
        "Has a picture in a cell of text that fails, with a script for that.",
        NOTHING,
        tamper=markdown(f"Hello {HANDLER}\n\n<details open ontoggle=@MARK@()>x</details>"),
    ),
    Attack("svg_in_markdown", "Has an SVG with a script in a cell of text.", NOTHING, tamper=markdown(SVG)),
    Attack(
        "frame_in_markdown",
        "Has a frame, an object and a base address in a cell of text.",
        NOTHING,
        tamper=markdown(
            '<iframe srcdoc="&lt;script&gt;parent.@MARK@()&lt;/script&gt;"></iframe>'
            '<object data="data:text/html,<script>@MARK@()</script>"></object>'
            '<embed src="javascript:@MARK@()"><base href="https://@MARK@.invalid/">'
            '<meta http-equiv="refresh" content="0;url=javascript:@MARK@()">'
            '<form action="javascript:@MARK@()"><button>More</button></form>'
        ),
    ),
    Attack(
        "links_in_markdown",
        "Has links that are scripts.",
        NOTHING,
        tamper=markdown(
            "[more](javascript:@MARK@()) [more](JaVaScRiPt:@MARK@())"
            " <a href='java\tscript:@MARK@()'>x</a>"
            " [more](data:text/html;base64,@MARK@) [r]\n\n[r]: javascript:@MARK@()"
        ),
    ),
    Attack(
        "markdown_that_is_not_closed",
        "Has text that the sanitizer and the browser may read in two ways.",
        NOTHING,
        tamper=markdown(
            '<noscript><p title="</noscript><img src=x onerror=@MARK@()>">\n\n'
            "<math><mtext><table><mglyph><style><!--</style>"
            '<img title="--&gt;&lt;img src=x onerror=@MARK@()&gt;">'
            '\n\n<svg></p><style><a id="</style><img src=1 onerror=@MARK@()>">'
            "\n\n<!--><img src=x onerror=@MARK@()>-->"
        ),
    ),
    Attack(
        "code_in_markdown",
        "Has scripts in code, mathematics and headings of a cell of text.",
        NOTHING,
        tamper=markdown(
            f"# {SCRIPT}\n\n`{SCRIPT}`\n\n$${HANDLER}$$\n\n"
            f"```{HANDLER}\n{SCRIPT}\n```\n\n$\\href{{javascript:@MARK@()}}{{x}}$"
        ),
    ),
    Attack(
        "svg_as_attachment",
        "Has an SVG with a script as an attachment.",
        NOTHING,
        tamper=markdown("![x](attachment:a.svg)", attachments={"a.svg": {"image/svg+xml": SVG_BASE64}}),
    ),
    Attack(
        "attachment_of_a_strange_type",
        "Has an attachment whose type ends the attribute it stands in.",
        NOTHING,
        tamper=markdown("![x](attachment:a.png)", attachments={"a.png": {'image/png" onerror="@MARK@()" x="': "AAAA"}}),
    ),
    Attack("raw_cells", "Has raw cells, which are passed on as they are.", NOTHING, tamper=raw),
    Attack("names_with_scripts", "Has scripts in the title, in tags and in names of cells.", NOTHING, tamper=names),
    Attack("ids_with_scripts", "Has handlers in the ids of its cells.", NOTHING, tamper=ids),
    Attack(
        "outputs_handed_in",
        "Hands in outputs with scripts.",
        NOTHING,
        tamper=outputs(
            {"text/html": SCRIPT + HANDLER},
            {"image/svg+xml": SVG},
            {"text/markdown": SCRIPT},
            {"application/javascript": "@MARK@()"},
            {"text/latex": HANDLER},
        ),
    ),
    Attack(
        "outputs_made",
        "Makes outputs with scripts while it is checked.",
        """
           try:
               from IPython.display import HTML, SVG, Javascript, Markdown, display
               display(HTML("<script>@MARK@()</script>"), Javascript("@MARK@()"))
               display(Markdown("<img src=x onerror=@MARK@()>"))
           except Exception:
               pass
           return torch.zeros(x.shape, dtype=torch.int32)
           """,
    ),
    Attack(
        "script_in_an_exception",
        "Raises an exception whose text is a script.",
        f"raise ValueError('</pre>{SCRIPT}{HANDLER}')",
    ),
    Attack(
        "script_in_an_exceptions_name",
        "Raises an exception whose name is a script.",
        f"raise type('</pre>{SCRIPT}', (Exception,), {{}})('{HANDLER}')",
    ),
    Attack(
        "script_in_a_line",
        "Raises an exception in a line of source that is a script.",
        f"1 / 0  # </pre>{SCRIPT}{HANDLER}",
    ),
    Attack(
        "script_in_a_functions_name",
        "Raises an exception in a function whose name is a script.",
        f"inner.__code__ = inner.__code__.replace(co_name='</pre>{SCRIPT}', co_qualname='{HANDLER}')\nreturn inner()",
        before="def inner():\n    return 1 / 0",
    ),
    Attack(
        "script_in_what_is_printed",
        "Prints scripts while it is checked.",
        f"print('</pre>{SCRIPT}')\nprint('{HANDLER}')\nreturn x",
    ),
    Attack(
        "script_in_a_repr",
        "Returns objects whose repr is a script.",
        "return Shown(1.0)",
        before=f"""
               class Shown(float):
                   def __repr__(self):
                       return "</pre>{SCRIPT}"
                   __str__ = __repr__
                   def _repr_html_(self):
                       return "{HANDLER}"
           """,
        exercise="max_finite",
    ),
    Attack(
        "script_in_a_class_name",
        "Returns objects of a class whose name is a script.",
        f"return type('</pre>{SCRIPT}', (), {{}})()",
    ),
    Attack("text_as_a_result", "Returns a script as its result.", f"return '</pre>{SCRIPT}'", exercise="max_finite"),
    Attack(
        "script_in_the_source",
        "Has a script in the source of its answer and of a cell of its own.",
        f"'''</pre>{SCRIPT}'''\n" + NOTHING,
        cells=(f"# </pre>{SCRIPT}{HANDLER}\n'''{SVG}'''",),
    ),
    Attack(
        "signs_that_turn_text_round",
        "Has signs in its texts that turn the writing round, and clear terminals.",
        "raise ValueError('\\u202e2.0 fo 2.0\\u2066 \\x1b[2J\\x1b]0;@MARK@\\x07 \\r✓ passed')",
    ),
    Attack(
        "script_for_whoever_opens_it",
        "Says that the page is trusted, and asks a widget to draw itself.",
        NOTHING,
        tamper=outputs(
            {
                "application/vnd.jupyter.widget-view+json": {"model_id": "@MARK@", "version_major": 2},
                "text/html": "<link rel=stylesheet href=//@MARK@.invalid/x.css>",
            }
        ),
    ),
]
