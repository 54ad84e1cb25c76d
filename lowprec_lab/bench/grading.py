"""A class next to nbgrader's stock engine, and what a submission costs as the class grows.

Both grade the same honest submissions of chapter 01 in courses of their own: the commands that an instructor types, on
the same two processors, turn about, so that whatever else the machine does is shared out fairly.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from lowprec_lab.bench.attack_room import STOCK_CONFIG
from lowprec_lab.bench.classroom import Classroom, honest_answers
from lowprec_lab.chapters import find_chapter

CHAPTER = "01"
COMPARED, TURNS = 20, 2
CLASSES = (10, 40, 160)
PROCESSORS = 2


def run(progress: bool = True) -> dict:
    """Grade the classes. Figures: how many times the stock engine's throughput, and cost of 160 by cost of 40.

    "stock_s", "ours_s": seconds for each submission, commands and starts included; "cost_s": by size of the class.
    Raises RuntimeError when a command fails or a right answer was not given its points, FileNotFoundError without the
    other answers of a clone.
    """
    small, large = CLASSES[1:]
    with tempfile.TemporaryDirectory(prefix="lowprec-lab-") as folder, _processors(), _bar(progress) as bar:
        place = Path(folder)
        stock, ours = _compare(place, bar)
        costs = {size: _cost(place / f"class-{size}", size, bar) for size in CLASSES}
    return {
        "figures": {"throughput_vs_stock": stock / ours, "cost_growth_40_to_160": costs[large] / costs[small]},
        "submissions": COMPARED,
        "stock_s": stock,
        "ours_s": ours,
        "cost_s": {str(size): cost for size, cost in costs.items()},
        "processors": PROCESSORS,
    }


@contextlib.contextmanager
def _processors() -> Iterator[None]:
    """Stay on the same two processors, with all that is started from here."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:PROCESSORS]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _bar(progress: bool) -> tqdm:
    total = 2 * COMPARED + TURNS * COMPARED - COMPARED + sum(CLASSES)
    return tqdm(total=total, unit="submission", disable=not progress, file=sys.stderr)


def _compare(place: Path, bar: tqdm) -> tuple[float, float]:
    """Seconds for a submission with the stock engine, and with ours.

    The stock engine takes a share of the class in each turn; ours, which is meant for whole classes, all of it.
    """
    stock, ours = _class(place / "stock", COMPARED, STOCK_CONFIG), _class(place / "ours", COMPARED)
    students = sorted(path.name for path in (stock.course / "submitted").iterdir())
    share = COMPARED // TURNS
    stock_s = ours_s = 0.0
    for turn in range(TURNS):
        for student in students[turn * share : (turn + 1) * share]:
            (stock.course / "waiting").mkdir(exist_ok=True)
            shutil.move(stock.course / "submitted" / student, stock.course / "waiting" / student)
    for turn in range(TURNS):
        for student in students[turn * share : (turn + 1) * share]:
            shutil.move(stock.course / "waiting" / student, stock.course / "submitted" / student)
        stock_s += _timed(stock, "-m", "nbgrader", "autograde", stock.chapter.name)
        bar.update(share)
        ours_s += _timed(ours, *ours.grade_command("--force", "--workers", str(PROCESSORS))[1:])
        bar.update(COMPARED)
    _require_full_marks(ours)
    return stock_s / COMPARED, ours_s / (TURNS * COMPARED)


def _cost(place: Path, size: int, bar: tqdm) -> float:
    room = _class(place, size)
    seconds = _timed(room, *room.grade_command("--workers", str(PROCESSORS))[1:])
    _require_full_marks(room)
    bar.update(size)
    return seconds / size


def _class(place: Path, size: int, config: str | None = None) -> Classroom:
    room = Classroom(place, find_chapter(CHAPTER))
    room.prepare(config)
    for number, answers in enumerate(itertools.islice(honest_answers(room.chapter), size)):
        room.hand_in(f"student-{number:03}", room.answered(answers))
    return room


def _timed(room: Classroom, *words: str) -> float:
    started = time.perf_counter()
    done = room.run(*words)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return seconds


def _require_full_marks(room: Classroom) -> None:
    """Speed is no merit in what grades wrong."""
    from lowprec_lab.blanks import in_order

    full = {blank.name: float(blank.points) for blank in in_order() if blank.chapter == room.chapter}
    graded: dict[str, dict[str, float]] = {}
    for student, cell, points, *_ in room.grades():
        graded.setdefault(student, {})[cell.removeprefix("check_")] = points
    wrong = [student for student, points in graded.items() if points != full]
    handed_in = len(list((room.course / "submitted").iterdir()))
    if wrong or len(graded) != handed_in:
        raise RuntimeError(f"{len(graded)} of {handed_in} were graded, and without full marks: {', '.join(wrong)}")
