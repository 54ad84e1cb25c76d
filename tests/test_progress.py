"""The map of progress: what it lists, what it keeps to one line, and that nothing is missing on the whole one."""

import re

import pytest

from lowprec_lab.blanks import in_order, load_chapters
from lowprec_lab.chapters import CHAPTERS, find_chapter
from lowprec_lab.progress import Line, ProgressMap, progress_map

load_chapters()


def lines(**states):
    """A line for each exercise, with the states that are told by chapter number: "c01='done open'", else all open."""
    made = []
    for chapter in CHAPTERS:
        names = [blank for blank in in_order() if blank.chapter == chapter]
        told = states.get(f"c{chapter.number}", "open").split()
        for place, blank in enumerate(names):
            state = told[min(place, len(told) - 1)]
            made.append(Line(blank.exercise, blank.name, chapter.name, 10, 2.0, state, "reference"))
    return made


def listed(text):
    return sorted({name.split(".")[0] for name in re.findall(r"^   [●◐○] (\d+\.\d+) ", text, re.MULTILINE)}, key=int)


def test_titles_are_spelled_as_people_write_them():
    assert [find_chapter(number).title for number in ("01", "10")] == ["Bit layouts", "FP8 nanoGPT"]


@pytest.mark.parametrize(
    ("states", "chapters"),
    [
        ({}, ["0"]),
        ({"c00": "done"}, ["1"]),
        ({"c00": "done", "c01": "done open"}, ["1"]),
        ({"c00": "done", "c03": "done open"}, ["1", "3"]),
        ({"c01": "done"}, ["0"]),
        ({"c00": "done", "c05": "open live open"}, ["1", "5"]),
        ({"c00": "live"}, ["0"]),
        ({f"c{chapter.number}": "done" for chapter in CHAPTERS}, []),
    ],
)
def test_a_chapter_that_is_begun_is_listed_and_the_first_that_is_not_done(states, chapters):
    text = ProgressMap(lines(**states)).text()
    assert listed(text) == chapters
    assert all(chapter.question in text for chapter in CHAPTERS)
    assert "progress(whole=True)" in text


def test_a_chapter_on_one_line_has_a_mark_for_each_exercise():
    made = ProgressMap(lines(c00="done"))
    assert re.search(r"^00 Start: .* ● 1 of 1 done$", made.text(), re.MULTILINE)
    count = sum(blank.chapter.number == "02" for blank in in_order())
    assert re.search(rf"^02 Rounding: .* ○{{{count}}} 0 of {count} done$", made.text(), re.MULTILINE)
    assert f"{'○' * count} (0 of {count} done)" in made.html()


def test_the_whole_map_lists_everything():
    made = ProgressMap(lines(), whole=True)
    for blank in in_order():
        assert f" {blank.name} " in made.text()
        assert f">{blank.name}<" in made.html()
    assert "whole=True" not in made.text() + made.html()


def test_the_data_is_whole_in_any_case(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWPREC_WORK", str(tmp_path))
    data = progress_map().to_dict()
    assert (data["done"], data["total"], len(data["exercises"])) == (0, len(in_order()), len(in_order()))
    assert {line["state"] for line in data["exercises"]} == {"open"}
