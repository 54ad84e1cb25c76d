"""What a class did: scores, the exercises that most people miss, and the misconceptions behind them.

Scores come from nbgrader's gradebook, late penalties and what graders changed included; misconceptions come from the
verdicts. `<course>/reports/<chapter>/` gets scores.csv, exercises.csv, report.json and report.png.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from lowprec_lab.authoring import write_page
from lowprec_lab.blanks import Blank, in_order
from lowprec_lab.graders.registry import MISCONCEPTIONS, load_graders
from lowprec_lab.graders.verdict import Verdict
from lowprec_lab.grading.clean import clean_text
from lowprec_lab.grading.verdicts import load_verdicts

_MOST_SHOWN, _NAME_WIDTH = 40, 28


@dataclass
class StudentScore:
    """One student: the total (late penalty taken off), the penalty, the points by exercise; None: not graded."""

    student: str
    score: float
    max_score: float
    late_penalty: float
    needs_manual_grade: bool
    points: dict[str, float | None]


@dataclass
class ExerciseFigures:
    """One exercise: of `graded` answers, how many pass, are there and wrong, or are not written.

    misconceptions: how many behave like each known one, the commonest first: [name, its sentence, count].
    """

    name: str
    exercise: str
    max_points: float
    graded: int = 0
    passed: int = 0
    missed: int = 0
    unwritten: int = 0
    mean_points: float = 0.0
    misconceptions: list[tuple[str, str, int]] = field(default_factory=list)


@dataclass
class ClassReport:
    """A class in one chapter. failed: {student: why it could not be graded}. files: what was written of this."""

    chapter: str
    scores: list[StudentScore]
    exercises: list[ExerciseFigures]
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def as_dict(self) -> dict:
        """The report as plain data, for JSON."""
        return {
            "chapter": self.chapter,
            "graded": len(self.scores),
            "scores": [asdict(score) for score in self.scores],
            "exercises": [asdict(each) for each in self.exercises],
            "failed": self.failed,
            "notes": self.notes,
            "files": [str(path) for path in self.files],
        }

    def text(self) -> str:
        """The report as tables for a terminal."""
        parts = [self._scores_text(), self._exercises_text(), self._failed_text()]
        parts += ["\n".join(f"written: {path}" for path in self.files)]
        return "\n\n".join(part for part in parts if part)

    def _scores_text(self) -> str:
        shown = self.scores[:_MOST_SHOWN]
        rows = [("student", "score", "of", "")]
        rows += [(clean_text(s.student, _NAME_WIDTH), f"{s.score:g}", f"{s.max_score:g}", _remark(s)) for s in shown]
        more = len(self.scores) - len(shown)
        return "\n".join(_columns(rows) + ([f"and {more} more, in scores.csv"] if more else []))

    def _exercises_text(self) -> str:
        rows = [("exercise", "", "pass", "missed", "not written", "mean", "misconceptions")]
        for each in self.exercises:
            commonest = "; ".join(f"{count} x {name}" for name, _, count in each.misconceptions[:3])
            mean = f"{each.mean_points:.2f} of {each.max_points:g}"
            counts = (f"{each.passed} of {each.graded}", str(each.missed), str(each.unwritten))
            rows.append((each.exercise, each.name, *counts, mean, commonest))
        return "\n".join([*_columns(rows), *self._most_missed()])

    def _most_missed(self) -> list[str]:
        """A line for each of the three exercises that most people miss, with the commonest misconception's sentence."""
        worst = sorted((each for each in self.exercises if each.missed), key=lambda each: -each.missed)[:3]
        lines = []
        for each in worst:
            sentence = f" {each.misconceptions[0][1]}" if each.misconceptions else ""
            lines.append(f"Most people miss {each.name} ({each.missed} of {each.graded}).{sentence}")
        return [
            line if number == 0 else line.replace("Most people miss", "Then", 1) for number, line in enumerate(lines)
        ]

    def _failed_text(self) -> str:
        return "\n".join(f"not graded: {clean_text(student)}: {why}" for student, why in sorted(self.failed.items()))

    def __str__(self) -> str:
        return self.text()


def _remark(score: StudentScore) -> str:
    late = f"late: {score.late_penalty:g} taken off" if score.late_penalty else ""
    manual = "waits for a manual grade" if score.needs_manual_grade else ""
    return ", ".join(filter(None, (late, manual)))


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


# --- gathered ---------------------------------------------------------------------------------------------------------


def class_report(
    course: Path,
    chapter: str,
    failed: dict[str, str] | None = None,
    notes: list[str] | None = None,
    db_url: str | None = None,
) -> ClassReport:
    """Gather the report of a chapter ("01_bit_layouts") and write its files into the course.

    failed, notes: of the run that was just made. db_url: of the gradebook, gradebook.db in the course when omitted.
    Raises OSError when a file cannot be written.
    """
    load_graders()
    course = Path(course)
    blanks = [blank for blank in in_order() if blank.chapter.name == chapter]
    scores = _scores(db_url or f"sqlite:///{course / 'gradebook.db'}", chapter, blanks)
    verdicts = {score.student: load_verdicts(course, chapter, score.student) or {} for score in scores}
    exercises = [_figures(blank, scores, verdicts) for blank in blanks]
    report = ClassReport(chapter, scores, exercises, dict(failed or {}), list(notes or []))
    _write_files(report, course / "reports" / chapter)
    return report


def _scores(db_url: str, chapter: str, blanks: list[Blank]) -> list[StudentScore]:
    from nbgrader.api import Gradebook

    with Gradebook(db_url) as gradebook:
        found = [_score(submission, blanks) for submission in gradebook.assignment_submissions(chapter)]
    graded = (score for score in found if any(points is not None for points in score.points.values()))
    return sorted(graded, key=lambda score: score.student)


def _score(submission: object, blanks: list[Blank]) -> StudentScore:
    grades = {grade.name: grade for notebook in submission.notebooks for grade in notebook.grades}
    points = {blank.name: _points(grades.get(f"check_{blank.name}")) for blank in blanks}
    penalty = float(submission.late_submission_penalty or 0.0)
    score = max(float(submission.score or 0.0) - penalty, 0.0)
    return StudentScore(
        submission.student_id, score, float(submission.max_score or 0.0), penalty,
        bool(submission.needs_manual_grade), points,
    )  # fmt: skip


def _points(grade: object) -> float | None:
    graded = grade is not None and (grade.auto_score is not None or grade.manual_score is not None)
    return float(grade.score) if graded else None


def _figures(blank: Blank, scores: list[StudentScore], verdicts: dict[str, dict[str, Verdict]]) -> ExerciseFigures:
    figures = ExerciseFigures(blank.name, blank.exercise, float(blank.points))
    points = [score.points[blank.name] for score in scores if score.points[blank.name] is not None]
    figures.graded = len(points)
    figures.passed = sum(each >= blank.points for each in points)
    found = [each[blank.name] for each in verdicts.values() if blank.name in each]
    figures.unwritten = sum(verdict.level == "unwritten" for verdict in found)
    figures.missed = max(figures.graded - figures.passed - figures.unwritten, 0)
    figures.mean_points = sum(points) / len(points) if points else 0.0
    sentences = {each.function.__name__: each.sentence for each in MISCONCEPTIONS.get(blank.name, [])}
    counts = Counter(verdict.misconception for verdict in found if verdict.misconception)
    figures.misconceptions = [(name, sentences.get(name, ""), count) for name, count in counts.most_common()]
    return figures


# --- written ----------------------------------------------------------------------------------------------------------


def _write_files(report: ClassReport, folder: Path) -> None:
    contents = {
        "scores.csv": _scores_csv(report),
        "exercises.csv": _exercises_csv(report),
        "report.png": _picture(report),
    }
    report.files = [folder / name for name in (*contents, "report.json")]
    contents["report.json"] = _json(report)
    for name, content in contents.items():
        write_page(folder / name, content)


def _json(report: ClassReport) -> bytes:
    written = datetime.now(UTC).isoformat(timespec="seconds")
    return (json.dumps({"written": written, **report.as_dict()}, indent=1) + "\n").encode()


def _scores_csv(report: ClassReport) -> bytes:
    names = [each.name for each in report.exercises]
    rows = [["student", "score", "max_score", "late_penalty", "needs_manual_grade", *names]]
    for score in report.scores:
        points = ["" if score.points[name] is None else score.points[name] for name in names]
        rows.append(
            [score.student, score.score, score.max_score, score.late_penalty, score.needs_manual_grade, *points]
        )
    return _csv(rows)


def _exercises_csv(report: ClassReport) -> bytes:
    rows = [["exercise", "name", "max_points", "graded", "passed", "missed", "unwritten", "mean_points",
             "misconception", "sentence", "count"]]  # fmt: skip
    for each in report.exercises:
        start = [each.exercise, each.name, each.max_points, each.graded, each.passed, each.missed, each.unwritten,
                 round(each.mean_points, 4)]  # fmt: skip
        rows += [[*start, *found] for found in each.misconceptions or [("", "", "")]]
    return _csv(rows)


def _csv(rows: list[list]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[_cell(value) for value in row] for row in rows])
    return text.getvalue().encode("utf-8", "replace")


def _cell(value: object) -> object:
    """A name that begins like a formula must not become one in a spreadsheet."""
    if not isinstance(value, str):
        return value
    text = clean_text(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


# --- drawn ------------------------------------------------------------------------------------------------------------

_PASSED, _MISSED, _UNWRITTEN = "#007A5A", "#C24E00", "#B8BEC6"


def _picture(report: ClassReport) -> bytes:
    """How many pass each exercise, and how the scores are spread.

    What to see: the exercises with the longest orange bars are the ones to talk about, and the sentence beside each
    says where to begin.
    """
    from lowprec_lab import plots

    with plots.style():
        height = 2.6 + 0.42 * len(report.exercises)
        made, (upper, lower) = plots.figure(
            9.5, height + 2.2, rows=2, gridspec_kw={"height_ratios": [height - 0.6, 2.2]}
        )
        _draw_exercises(upper, report)
        _draw_scores(lower, report)
    return plots.png(made)


def _draw_exercises(axes: object, report: ClassReport) -> None:
    rows = list(reversed(report.exercises))
    most = max((each.graded for each in rows), default=0) or 1
    for place, each in enumerate(rows):
        start = 0
        for count, color in ((each.passed, _PASSED), (each.missed, _MISSED), (each.unwritten, _UNWRITTEN)):
            axes.barh(place, count, left=start, color=color, height=0.7)
            if count >= 0.04 * most:
                ink = "black" if color == _UNWRITTEN else "white"
                axes.text(start + count / 2, place, str(count), ha="center", va="center", color=ink, fontsize=9)
            start += count
        if each.misconceptions:
            _, sentence, count = each.misconceptions[0]
            text = f"{count} x {clean_text(sentence, 70)}"
            axes.text(1.02 * most, place, text, va="center", fontsize=7.5, color=_MISSED)
    axes.set_yticks(range(len(rows)), [f"{each.exercise} {each.name}" for each in rows])
    axes.set_xlim(0, 1.9 * most)
    axes.set_xticks(sorted({0, round(most / 2), most}))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("answers: pass, missed, not written; beside them the commonest misconception")
    axes.set_title(f"{report.chapter}: what {len(report.scores)} people passed")


def _draw_scores(axes: object, report: ClassReport) -> None:
    most = max((score.max_score for score in report.scores), default=1.0) or 1.0
    axes.hist([score.score for score in report.scores], bins=20, range=(0, most), color="#0065A8", rwidth=0.92)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(f"score (of {most:g} points, late penalties taken off)")
    axes.set_ylabel("people")
