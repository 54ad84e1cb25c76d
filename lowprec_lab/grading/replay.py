"""One answer of one submission once more, in the sandbox: its source, the verdict, and the first differences.

For a person who wants to see why an answer lost its points: input, theirs, right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowprec_lab.blanks import BLANKS, Blank
from lowprec_lab.calls import AnswerFailed
from lowprec_lab.graders.counterexample import input_rows, result_rows
from lowprec_lab.graders.registry import load_graders
from lowprec_lab.graders.reproduction import try_it
from lowprec_lab.graders.run import Outcome, run_checks, seed_number
from lowprec_lab.graders.verdict import Row, Verdict
from lowprec_lab.grading.clean import clean_text
from lowprec_lab.grading.course import CourseError, read_seed, require_release
from lowprec_lab.grading.judge import RemoteAnswer, Workers, judge
from lowprec_lab.grading.processes import open_workers
from lowprec_lab.grading.repair import find_answers
from lowprec_lab.grading.staging import Submission, read_submission
from lowprec_lab.sources import Source, earlier_sources

_MOST_LINES, _LINE_WIDTH = 120, 160


@dataclass
class Difference:
    """One input on which an answer is wrong. check: what was tried; rows: input, yours, right; try_it: a call."""

    check: str
    rows: list[Row]
    try_it: str


@dataclass
class Replay:
    """One answer, judged again. wrong, cases: over all checks. source: the answer's cell, cleaned, line by line.

    notes: about the submission as a whole.
    """

    student: str
    verdict: Verdict
    differences: list[Difference]
    wrong: int
    cases: int
    source: list[str]
    notes: list[str]

    def text(self) -> str:
        """All of it for a terminal: nothing in it can steer one."""
        title = f"{clean_text(self.student)}: exercise {self.verdict.exercise}, {self.verdict.name}"
        parts = ["\n".join([title, *map(clean_text, self.notes)]), clean_lines(self.verdict.text())]
        parts += [self._difference_text(n, each) for n, each in enumerate(self.differences, start=1)]
        parts += ["\n".join(["the answer", *(f"  {line}" for line in self.source)])] if self.source else []
        return "\n\n".join(parts)

    def _difference_text(self, number: int, difference: Difference) -> str:
        width = max(len(row.label) for row in difference.rows) + 1
        wide = max((len(row.value) for row in difference.rows if row.bits), default=0) + 2
        heading = f"difference {number} of {self.wrong:,} (in {self.cases:,} inputs)   {difference.check}"
        lines = [f"  {row.label:<{width}} {row.value:<{wide}} {row.strip}".rstrip() for row in difference.rows]
        return clean_lines("\n".join([heading, *lines, f"  {'try it':<{width}} {difference.try_it}"]))

    def as_dict(self) -> dict:
        """The replay as plain data, for JSON."""
        differences = [
            {"check": each.check, "rows": {row.label: row.value for row in each.rows}, "try_it": each.try_it}
            for each in self.differences
        ]
        return {
            "student": self.student, "verdict": self.verdict.as_dict(), "wrong": self.wrong, "cases": self.cases,
            "differences": differences, "source": self.source, "notes": self.notes,
        }  # fmt: skip


def clean_lines(text: str) -> str:
    """Text of several lines, each cut and without control characters; blanks at the start of a line stay."""
    lines = []
    for line in text.expandtabs(4).splitlines()[:_MOST_LINES]:
        indent = len(line) - len(line.lstrip(" "))
        # Neighbouring blanks matter in columns of bits, so the words are cleaned one by one.
        words = (clean_text(word, _LINE_WIDTH) for word in line[indent : indent + _LINE_WIDTH].split(" "))
        lines.append((" " * min(indent, _LINE_WIDTH) + " ".join(words)).rstrip())
    return "\n".join(lines)


def replay(course: Path | str, student: str, exercise: str, *, sandbox: bool = True, most: int = 5) -> Replay:
    """Judge a student's answer to `exercise` (its name) again, with the course's seed; writes nothing.

    most: how many differences are shown. Raises CourseError where there is no such submission, seed or sandbox.
    """
    folder = Path(course).expanduser().resolve()
    load_graders()
    require_release(folder)
    blank, seed = BLANKS[exercise], seed_number(read_seed(folder))
    submission = _read(folder, student, blank.chapter.name)
    answers = find_answers(submission.notebook, blank.chapter.name)
    source = answers.get(exercise, Source(""))
    with open_workers(sandbox) as workers:
        verdict = judge(blank, answers, workers, seed=seed)
        outcomes = _outcomes(blank, answers, workers, seed) if exercise in answers else []
    wrong, cases = sum(each.wrong for each in outcomes), sum(each.cases for each in outcomes)
    differences = list(_differences(blank, outcomes, most))
    lines = clean_lines(_shown(source)).splitlines()
    return Replay(student, verdict, differences, wrong, cases, lines, submission.notes)


def _shown(source: Source) -> str:
    """The answer's cell, below the helpers if there are any."""
    written = any(line.strip() and not line.startswith("#") for line in source.helpers.splitlines())
    return f"{source.helpers}\n\n{source.text}" if written else source.text


def _read(folder: Path, student: str, chapter: str) -> Submission:
    place = folder / "submitted" / student / chapter
    if student in ("", ".", "..") or "/" in student or not place.is_dir():
        known = sorted(path.parent.name for path in folder.glob(f"submitted/*/{chapter}"))
        handed_in = f"Handed in by: {', '.join(map(clean_text, known[:20]))}" if known else "Nobody handed in anything"
        raise CourseError(f"{clean_text(student)} has no submission of {chapter} in {folder}. {handed_in}")
    try:
        return read_submission(place, chapter)
    except OSError as problem:
        raise CourseError(f"{place} cannot be read: {problem.strerror or problem}") from None


def _outcomes(blank: Blank, answers: dict[str, Source], workers: Workers, seed: int) -> list[Outcome]:
    answer = RemoteAnswer(workers, blank, answers[blank.name], earlier_sources(blank, answers))
    try:
        answer.load()
        return run_checks(blank.name, answer, seed=seed)
    except AnswerFailed:
        return []
    finally:
        answer.close()


def _differences(blank: Blank, outcomes: list[Outcome], most: int) -> Iterator[Difference]:
    """The first wrong inputs, taken from the checks in turn: one check's hundred are often one mistake."""
    streams = [_wrong_inputs(blank, outcome) for outcome in outcomes]
    while streams and most > 0:
        for stream in list(streams):
            found = next(stream, None)
            if found is None:
                streams.remove(stream)
            elif most > 0:
                most -= 1
                yield found


def _wrong_inputs(blank: Blank, outcome: Outcome) -> Iterator[Difference]:
    for record in outcome.records:
        if record.problem is not None:
            continue  # nothing to compare, and the verdict says so
        for index in np.flatnonzero(record.wrong):
            rows = input_rows(blank, record, int(index)) + result_rows(record, int(index))
            yield Difference(outcome.check.inputs, rows, try_it(blank, None, record, int(index)))
