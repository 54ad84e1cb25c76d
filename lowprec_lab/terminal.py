"""Grade a folder of answers without a notebook: behind `lowprec-lab check` and tests/test_exercises.py."""

from __future__ import annotations

from pathlib import Path

from lowprec_lab.blanks import BLANKS, Blank, in_order
from lowprec_lab.graders import registry
from lowprec_lab.graders.judging import failed, grade, unwritten
from lowprec_lab.graders.verdict import Verdict
from lowprec_lab.sources import AnswerError, Source, earlier_answers, earlier_sources, load, sources_in


def check_folder(path: str | Path | None = None, names: list[str] | None = None) -> dict:
    """The verdicts on a folder's answers as plain data: {"passed", "total", "exercises": [...]}.

    path: a folder with saved answers (bits.py) or pages (01_bit_layouts.py, .ipynb); the learner's own when omitted.
    names: only these exercises. Raises AnswerError for a folder or an exercise that is not there.
    """
    wanted = [_blank(name) for name in names] if names else in_order()
    sources = _sources(path)
    verdicts = [judge_source(target, sources.get(target.name), sources) for target in wanted]
    lines = [
        {
            "name": v.name,
            "chapter": target.chapter.name,
            "exercise": v.exercise,
            "passed": v.passed,
            "points": v.points,
            "max_points": v.max_points,
            "verdict": v.text(),
        }
        for target, v in zip(wanted, verdicts, strict=False)
    ]
    return {"passed": sum(v.passed for v in verdicts), "total": len(verdicts), "exercises": lines}


def judge_source(target: Blank, source: Source | None, sources: dict[str, Source]) -> Verdict:
    """The verdict on one answer's source; earlier exercises are the references, or the folder's own without them."""
    registry.load_graders()
    if source is None:
        return unwritten(target, f"not written yet (exercise {target.exercise}, page {target.page})")
    try:
        earlier = earlier_answers(earlier_sources(target, sources))
        return grade(target, load(source, target, earlier, f"answer: {target.name}"))
    except AnswerError as error:
        return failed(target, "could not be loaded", str(error))


def _blank(name: str) -> Blank:
    in_order()
    if name not in BLANKS:
        raise AnswerError(f"no exercise is called {name!r}. The exercises are: {', '.join(b.name for b in in_order())}")
    return BLANKS[name]


def _sources(path: str | Path | None) -> dict[str, Source]:
    from lowprec_lab.workspace import work_folder

    if path is None:
        folder = work_folder() / "answers"
        return sources_in(folder) if folder.is_dir() else {}
    folder = Path(path)
    if not folder.is_dir():
        raise AnswerError(f"{folder} is not a folder. Give a folder with saved answers (bits.py) or pages")
    return sources_in(folder)
