"""The red team through this package's engine: nothing is won, nobody is disturbed. The bench compares with nbgrader."""

import shutil
import sys
from collections import Counter

import pytest

from lowprec_lab.bench.attack_room import active_content
from lowprec_lab.bench.attacks import KINDS, Attack, load_attacks
from lowprec_lab.bench.red_team import Result, grade_here, table
from lowprec_lab.blanks import in_order
from lowprec_lab.calls import AnswerFailed
from lowprec_lab.sources import Source

ATTACKS = {attack.name: attack for attack in load_attacks()}
# An exercise has 60 s; beyond that are the start of a worker and its end. No attack needs two exercises' time.
LONGEST_S = 75.0


def test_there_are_attacks_of_every_kind():
    assert len(ATTACKS) == len(load_attacks()) >= 45, "names are used once"
    assert set(Counter(attack.kind for attack in ATTACKS.values())) == set(KINDS)
    assert not [attack.name for attack in ATTACKS.values() if len(attack.tries) > 120 or not attack.tries.endswith(".")]


def test_every_exercise_is_attacked_with_a_later_or_its_own_blank():
    wanted = {blank.name for blank in in_order() if blank.chapter.name == "01_bit_layouts"}
    for name in ("its_own_blank", "later_blanks", "supplied"):
        assert set(ATTACKS[name].sources) == wanted


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("<script>word()</script>", ["<script>"]),
        ("<p>&lt;script&gt;word()&lt;/script&gt;</p>", []),
        ("<img src=x onerror=word()>", ["<img onerror>"]),
        ("<a href='JaVa\tScript:word()'>x</a>", ["<a href>"]),
        ("<svg onload='word()'></svg>", ["<svg onload>"]),
        ("<a title='word' href='page.html'>word</a><script>other()</script>", []),
    ],
)
def test_what_counts_as_active_content(page, found):
    assert active_content(page, "word") == found


def test_the_table_says_who_let_an_attack_win():
    ours, theirs = (Result("a", "secrets", "Reads.", gains) for gains in ([], ["read a file"]))
    assert table([(ours, theirs)]).splitlines()[1] == "a  -     won    Reads. read a file"


def test_a_submission_has_an_end(monkeypatch):
    """What the first answers take is missing to the last ones; nothing is started for them."""
    from lowprec_lab.grading import judge

    class Slow:
        def worker(self):
            clock[0] += 200.0  # seconds that each exercise takes
            raise AnswerFailed("timeout", "slow")

    clock = [0.0]
    monkeypatch.setattr(judge.time, "monotonic", lambda: clock[0])
    names = ("bit_pattern", "split_fields", "join_fields")
    verdicts = judge.judge_all({name: Source("x = 1") for name in names}, "01_bit_layouts", Slow())
    said = [verdicts[name].text() for name in names]
    assert ["slow" in text for text in said] == [True, True, False]
    assert "what a submission has for all of them" in said[2]
    assert clock == [400.0]


def sandbox_missing():
    return sys.platform != "linux" or shutil.which("bwrap") is None


@pytest.fixture(scope="module")
def results():
    pytest.importorskip("nbgrader")
    if sandbox_missing():
        pytest.skip("grading a class needs Linux and bubblewrap")
    return {result.attack: result for result in grade_here(list(ATTACKS.values()))}


@pytest.mark.slow
def test_no_attack_wins(results):
    """No points, no secret, no change, no process, no script; honest students before, between and after are graded."""
    assert {name: result.gains for name, result in results.items() if result.gains} == {}
    assert set(results) == set(ATTACKS)


@pytest.mark.slow
def test_the_honest_part_of_each_gets_its_points(results):
    assert {name: result.lost for name, result in results.items() if result.lost} == {}


@pytest.mark.slow
def test_no_attack_takes_long(results):
    assert {name: round(r.seconds) for name, r in results.items() if r.seconds > LONGEST_S} == {}


@pytest.mark.slow
def test_an_answer_that_is_right_would_count(tmp_path):
    """The room can tell a win from a loss: what reads nothing and is right gains points that it does not deserve."""
    pytest.importorskip("nbgrader")
    if sandbox_missing():
        pytest.skip("grading a class needs Linux and bubblewrap")
    right = Attack("right", "Is right.", "return x.contiguous().view(torch.int32)", kind="verdicts")
    script = Attack("script", "Tells a word.", "raise ValueError('@MARK@')", kind="people")
    [first, second] = grade_here([right, script], rooms=1)
    assert first.gains == ["2 points for bit_pattern, which deserves 0"]
    assert second.gains == []
