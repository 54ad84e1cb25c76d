"""The map of progress: every exercise of every chapter, whether it is done, and whose code runs for it now."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from lowprec_lab.blanks import FILLED, Blank, in_order
from lowprec_lab.chapters import CHAPTERS, Chapter

_MARKS = {"done": ("●", "done"), "live": ("◐", "in this kernel, not passed yet"), "open": ("○", "open")}
_MORE = "Every exercise of every chapter: progress(whole=True), or lowprec-lab progress --all"


@dataclass(frozen=True)
class Line:
    """One exercise on the map. state: "done" (saved after a pass), "live" (filled in this kernel) or "open"."""

    exercise: str
    name: str
    chapter: str
    minutes: int
    points: float
    state: str
    runs: str


class ProgressMap:
    """The map as plain text, as HTML with inline styles, and as data.

    A chapter's exercises are listed where there is something to look at: in a chapter that is begun, and in the first
    one that is not done. The others take one line, with a mark for each exercise. whole: list all of them.
    """

    def __init__(self, lines: list[Line], whole: bool = False) -> None:
        self.lines, self.whole = lines, whole

    def to_dict(self) -> dict:
        """{"done", "total", "exercises": [...]}."""
        done = sum(line.state == "done" for line in self.lines)
        return {"done": done, "total": len(self.lines), "exercises": [asdict(line) for line in self.lines]}

    def _chapters(self) -> Iterator[tuple[Chapter, str, str, list[Line]]]:
        """(chapter, its marks, how much is done, the lines to list) of each."""
        next_one = True
        for chapter in CHAPTERS:
            lines = [line for line in self.lines if line.chapter == chapter.name]
            marks = "".join(_MARKS[line.state][0] for line in lines)
            done = sum(line.state == "done" for line in lines)
            finished = done == len(lines)
            listed = (
                self.whole or len(set(marks)) > 1 or not finished and next_one or "live" in {x.state for x in lines}
            )
            next_one = next_one and finished
            yield chapter, marks, f"{done} of {len(lines)} done", lines if listed else []

    def text(self) -> str:
        """The map for a terminal or a screen reader."""
        rows = []
        for chapter, marks, done, lines in self._chapters():
            rows.append(f"{chapter.number} {chapter.title}: {chapter.question}   {'' if lines else marks + ' '}{done}")
            for line in lines:
                mark, _ = _MARKS[line.state]
                rows.append(f"   {mark} {line.exercise:<5} {line.name:<29} {line.minutes:>3} min   runs: {line.runs}")
        rows.append("   " + "   ".join(f"{mark} {meaning}" for mark, meaning in _MARKS.values()))
        if not self.whole:
            rows.append(f"   {_MORE}")
        return "\n".join(rows)

    def html(self) -> str:
        """The map for a notebook."""
        rows = []
        for chapter, marks, done, lines in self._chapters():
            rows.append(
                f'<tr><td colspan="5" style="text-align: left"><b>{chapter.number} {html.escape(chapter.title)}</b> '
                f"{html.escape(chapter.question)} {'' if lines else marks} ({done})</td></tr>"
            )
            for line in lines:
                mark, meaning = _MARKS[line.state]
                cells = (f"{mark} {meaning}", line.exercise, line.name, f"{line.minutes} min", f"runs: {line.runs}")
                rows.append(
                    "<tr>"
                    + "".join(f'<td style="text-align: left">{html.escape(cell)}</td>' for cell in cells)
                    + "</tr>"
                )
        return "<table>" + "".join(rows) + "</table>" + ("" if self.whole else f"<div>{html.escape(_MORE)}</div>")

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}

    def __str__(self) -> str:
        return self.text()


def progress_map(whole: bool = False) -> ProgressMap:
    """The map as it stands now in this process and in the learner's folder. whole: with every exercise listed."""
    from lowprec_lab.exercises import supply  # here, because exercises imports this module's caller
    from lowprec_lab.sources import AnswerError
    from lowprec_lab.workspace import load_answers

    blanks = in_order()
    saved = {module: load_answers(module).answers for module in {blank.module for blank in blanks}}

    def line(blank: Blank) -> Line:
        done = blank.name in saved[blank.module]
        state = "done" if done else "live" if blank.name in FILLED else "open"
        try:
            runs = supply(blank.name).origin
        except AnswerError:
            runs = "nothing yet"
        return Line(blank.exercise, blank.name, blank.chapter.name, blank.minutes, blank.points, state, runs)

    return ProgressMap([line(blank) for blank in blanks], whole)
