"""Text that a learner controls and a person will see: cut, on one line, without control characters."""

from __future__ import annotations

import unicodedata


def clean_text(text: object, limit: int = 300) -> str:
    """At most `limit` characters of `text` on one line. Control, format and surrogate characters become a blank.

    The result is still text, not HTML: whoever puts it into a page escapes it.
    """
    shown = str(text)[: limit + 1]
    kept = "".join(" " if unicodedata.category(each)[0] == "C" else each for each in shown)
    line = " ".join(kept.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
