"""The graders: every misconception is rejected, other right answers pass, and mutants are never named falsely."""

import inspect
import types
import typing
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from misconceptions import NAMES, WRONG, in_notebook, label, verdict_on

from lowprec_lab.bench.graders import differs
from lowprec_lab.bench.mutants import mutants
from lowprec_lab.bench.other_answers import other_answers
from lowprec_lab.blanks import BLANKS
from lowprec_lab.graders import naming
from lowprec_lab.graders.judging import grade
from lowprec_lab.graders.registry import CHECKS, MISCONCEPTIONS, ORACLES, Check, Misconception
from lowprec_lab.graders.run import PUBLIC_SEED, current_seed, run_checks
from lowprec_lab.sources import reference, reference_source

OTHERS = other_answers()


def test_eleven_exercises_or_more_and_each_is_checked():
    assert len(NAMES) >= 11
    for name in NAMES:
        assert CHECKS[name], name
        assert len(MISCONCEPTIONS[name]) >= 4, name
        assert sum(other.exercise == name for other in OTHERS) >= 2, name


@pytest.mark.parametrize("name", [name for name in NAMES if name != "add_float8"])
def test_an_oracle_stands_in_for_every_blank_that_it_can(name):
    assert name in ORACLES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [PUBLIC_SEED, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_reference_passes_whatever_the_seed(name, seed):
    verdict = grade(BLANKS[name], reference(name), seed=seed)
    assert verdict.passed, verdict.text()
    assert verdict.level == "exact"
    assert verdict.points == verdict.max_points
    assert not verdict.misconception


def fits(value, hint):
    """Whether a value is exactly of the type that an annotation says; a model or an optimizer may be of any kind."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if kind is list:
        return type(value) is list and all(fits(each, parts[0]) for each in value)
    if kind is not None or hint in (object, Callable) or issubclass(hint, (torch.nn.Module, torch.optim.Optimizer)):
        return isinstance(value, kind or hint)
    return type(value) is hint


@pytest.mark.parametrize("name", NAMES)
def test_checks_hand_over_what_the_contract_says(name):
    """Not a whole number where it says float: an answer may rely on it."""
    contract = BLANKS[name].contract
    hints = typing.get_type_hints(contract.__init__ if inspect.isclass(contract) else contract)

    def watched(*args, **kwargs):
        for parameter, value in BLANKS[name].signature.bind(*args, **kwargs).arguments.items():
            assert fits(value, hints[parameter]), f"{parameter} is {value!r}"
        return reference(name)(*args, **kwargs)

    outcomes = run_checks(name, watched)
    assert not [o.failure.sentence for o in outcomes if o.failure and "AssertionError" in o.failure.sentence]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: f"{other.exercise}-{other.label}")
def test_other_right_answers_pass(other):
    verdict = in_notebook(other.exercise, other.source)
    assert verdict.passed, verdict.text()
    assert not verdict.misconception


# What gives another dtype, shape or error than the right answer, and says so in its sentence.
OF_ANOTHER_KIND = {
    "cut_but_float32", "casts_back", "along_the_first", "over_everything", "swaps_the_results", "all_masters",
    "last_weights_only", "fast_branches_on_values", "by_frexp", "below_min_subnormal", "below_half_of_min_subnormal",
    "looks_for_infinities_and_raises", "stacks_float32", "stacks_own_dtype", "joins_float32",
    "swaps_rows_and_columns", "swaps_the_sides_of_blocks",
    "amax_in_float32", "back_in_float32", "ReadsAllOfIt", "c_one_block_too_far", "c_does_not_pack",
    "tells_only_of_bad_news", "skips_ranks_without_gradients", "TellsOnlyOfBadNews", "does_not_fill_up",
    "StateOfOneRank", "norm_as_a_tensor",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=label)
def test_a_misconception_fails_for_nothing_but_what_its_sentence_says(wrong):
    """Else a learner's version, which fails for that alone, would not be named."""
    outcomes = [
        naming.known_outcome(wrong, check, PUBLIC_SEED, 1) for check in CHECKS[wrong.exercise] if not check.last
    ]
    odd = [o.failure.sentence for o in outcomes if o.failure]
    odd += [record.problem[1] for o in outcomes for record in o.records if record.problem]
    own = wrong.function.__name__ in OF_ANOTHER_KIND or wrong.exercise == "double_rounding_victims"
    assert own or not odd


def the_first_two_are_quick():
    """Every misconception; all but the first two of each exercise marked as slow."""
    seen = Counter()
    for wrong in WRONG:
        seen[wrong.exercise] += 1
        yield pytest.param(wrong, marks=[pytest.mark.slow] if seen[wrong.exercise] > 2 else [])


@pytest.mark.parametrize("wrong", the_first_two_are_quick(), ids=label)
def test_a_misconception_is_rejected_and_costs_points(wrong):
    verdict = verdict_on(wrong)
    assert not verdict.passed
    assert verdict.points < verdict.max_points


@pytest.mark.parametrize("name", NAMES)
def test_sentences_are_sentences_and_none_is_there_twice(name):
    sentences = [wrong.sentence for wrong in MISCONCEPTIONS[name]]
    assert len(set(sentences)) == len(sentences)
    assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in sentences)


def loaded(name, text):
    from lowprec_lab.bench.other_answers import load_answer
    from lowprec_lab.sources import AnswerError, Source

    try:
        return load_answer(name, Source(text), "mutant")
    except AnswerError:
        return None


@pytest.mark.parametrize("name", ["sign_bit", "max_finite", "min_normal", "min_subnormal", "machine_epsilon"])
def test_mutants_are_rejected_or_right_and_never_named_falsely(name):
    judged = 0
    for text in mutants(reference_source(name).text, seed=3, count=20):
        function = loaded(name, text)
        if function is None:
            continue
        verdict = grade(BLANKS[name], function)
        judged += 1
        assert verdict.passed == (not differs(name, function, reference(name))), text
        if verdict.misconception:
            wrong = next(m for m in MISCONCEPTIONS[name] if m.function.__name__ == verdict.misconception)
            assert not differs(name, function, wrong.function), text
    assert judged >= 5


def test_mutants_depend_on_the_seed_alone_and_are_distinct():
    source = reference_source("decode").text
    once = mutants(source, seed=1, count=30)
    assert once == mutants(source, seed=1, count=30)
    assert once != mutants(source, seed=2, count=30)
    assert len(set(once)) == 30


# the bench


def test_the_bench_reports_the_figures_and_where_they_come_from(monkeypatch):
    from lowprec_lab.bench import graders

    few = [BLANKS[name] for name in ("sign_bit", "machine_epsilon")]
    monkeypatch.setattr(graders, "in_order", lambda: few)
    monkeypatch.setattr(graders, "MUTANTS_PER_CHAPTER", 30)
    report = graders.run(progress=False)
    figures = report["figures"]
    assert {
        "misconceptions", "misconceptions_rejected", "misconceptions_named", "other_answers", "other_answers_passed",
        "false_names", "median_check_s",
    } <= set(figures)  # fmt: skip
    assert figures["misconceptions"] == figures["misconceptions_rejected"] == figures["misconceptions_named"] == 12
    assert figures["other_answers"] == figures["other_answers_passed"] == 12
    assert (figures["false_names"], figures["mutants_surviving"]) == (0, 0)
    assert 0 < figures["median_check_s"] < 1
    assert [each["exercise"] for each in report["exercises"]] == ["sign_bit", "machine_epsilon"]
    assert sum(report["mutants"].values()) == figures["mutants"] > 10


def test_the_bench_counts_a_hole_in_a_check(invented):
    from lowprec_lab.bench import graders

    def positive_numbers(answer, case):
        """1, 2 and 3: too few to tell."""
        x = torch.tensor([1.0, 2.0, 3.0])
        case.same_bits(answer(x), torch.zeros(3, dtype=torch.int32))

    blank = invented(positive_numbers)
    finding = graders.Finding("sign_bit", "00_start")
    graders._judge_mutant(finding, blank, "def sign_bit(x):\n    return (x < 0).int()")
    graders._judge_mutant(finding, blank, "def sign_bit(x):\n    return x.signbit().int()")
    graders._judge_mutant(finding, blank, "def sign_bit(x):\n    return nothing")
    assert (finding.mutants, finding.mutants_right, finding.mutants_aside) == (1, 1, 1)
    assert len(finding.survivors) == 1


def test_the_bench_counts_a_false_name(invented):
    from lowprec_lab.bench import graders

    def three_numbers(answer, case):
        """-1, -2 and -3."""
        x = torch.tensor([-1.0, -2.0, -3.0])
        case.same_bits(answer(x), torch.ones(3, dtype=torch.int32))

    def never(x):
        """It gives 0."""
        return torch.zeros_like(x, dtype=torch.int32)

    finding = graders.Finding("sign_bit", "00_start")
    blank = invented(three_numbers, wrong=[never])
    graders._judge_mutant(finding, blank, "def sign_bit(x):\n    return (x > 0).int()")
    assert finding.mutants_named == len(finding.false_names) == 1
    graders._judge_mutant(finding, blank, "def sign_bit(x):\n    return (x != x).int() * 0")
    assert (finding.mutants_named, len(finding.false_names)) == (2, 1)


def test_other_answers_are_in_a_clone_only(tmp_path):
    with pytest.raises(FileNotFoundError, match="Run this from a clone"):
        other_answers(tmp_path / "nowhere")


# the machinery, on an exercise that exists only here


@pytest.fixture
def invented(monkeypatch):
    """Make "sign_bit" an exercise with the given checks and misconceptions: invented(check, ..., wrong=[...])."""

    def make(*checks, wrong=()):
        found = [Check("sign_bit", check, 1.0) for check in checks]
        monkeypatch.setitem(CHECKS, "sign_bit", found)
        monkeypatch.setitem(MISCONCEPTIONS, "sign_bit", [Misconception("sign_bit", f, f.__doc__) for f in wrong])
        naming.known_outcome.cache_clear()
        return BLANKS["sign_bit"]

    yield make
    naming.known_outcome.cache_clear()


def numbers(answer, case):
    """0 to 9, doubled."""
    x = torch.arange(10 * case.size)
    case.same_bits(answer(x), x * 2)


def compares_nothing(answer, case):
    """Nothing at all."""
    answer(torch.arange(3))


def always_zero(x):
    """It gives 0."""
    return x * 0


def zero_above_four(x):
    """It gives 0 above 4."""
    return torch.where(x > 4, 0, x * 2)


def test_a_check_that_compared_nothing_does_not_pass(invented):
    blank = invented(numbers, compares_nothing)
    verdict = grade(blank, lambda x: x * 2)
    assert not verdict.passed
    assert [line["passed"] for line in verdict.checks] == [True, False]
    assert verdict.points < verdict.max_points


def test_an_exercise_without_checks_does_not_pass(invented):
    assert not grade(invented(), lambda x: x * 2).passed


def test_the_misconception_that_fits_is_named(invented):
    blank = invented(numbers, wrong=[always_zero, zero_above_four])
    assert grade(blank, lambda x: torch.zeros_like(x)).misconception == "always_zero"
    assert grade(blank, lambda x: torch.where(x > 4, 0, x + x)).misconception == "zero_above_four"


def test_one_input_on_which_they_differ_is_enough_for_no_name(invented):
    blank = invented(numbers, wrong=[always_zero])
    assert not grade(blank, lambda x: torch.where(x == 7, 1, 0)).misconception
    assert not grade(blank, lambda x: torch.where(x == 7, 14, 0)).misconception


def test_no_name_when_two_misconceptions_fit(invented):
    def also_zero(x):
        """It gives nothing."""
        return x - x

    blank = invented(numbers, wrong=[always_zero, also_zero])
    assert not grade(blank, lambda x: torch.zeros_like(x)).misconception


@pytest.mark.parametrize(("first_wrong", "named"), [(7, "zero_from_the_top"), (8, "")])
def test_three_distinct_inputs_or_no_name(invented, first_wrong, named):
    def zero_from_the_top(x):
        """It gives 0 for the largest numbers."""
        return torch.where((x >= first_wrong) & (x < 10), 0, x * 2)

    blank = invented(numbers, wrong=[zero_from_the_top])
    assert grade(blank, zero_from_the_top).misconception == named


def test_the_same_input_many_times_is_one_input(invented):
    def twos(answer, case):
        """2, again and again."""
        x = torch.full((50,), 2)
        case.same_bits(answer(x), x * 2)

    verdict = grade(invented(twos, wrong=[always_zero]), always_zero)
    assert not verdict.passed
    assert not verdict.misconception


def test_the_second_larger_look_clears_a_suspect(invented):
    def zero_below_ten(x):
        """It gives 0, as far as the first ten numbers tell."""
        return torch.where(x < 10, 0, 5)

    blank = invented(numbers, wrong=[always_zero])
    assert not grade(blank, zero_below_ten).misconception


def test_exceptions_are_compared_too(invented):
    def divides(x):
        """It divides by zero."""
        return x * (1 // 0)

    blank = invented(numbers, numbers, numbers, wrong=[divides, always_zero])
    verdict = grade(blank, lambda x: [][0])
    assert not verdict.passed
    assert not verdict.misconception


def test_weights_decide_the_points(monkeypatch, invented):
    def large(answer, case):
        """10 to 19, doubled."""
        x = torch.arange(10, 20)
        case.same_bits(answer(x), x * 2)

    blank = invented(numbers, large)
    monkeypatch.setitem(CHECKS, "sign_bit", [Check("sign_bit", numbers, 3.0), Check("sign_bit", large, 1.0)])
    assert grade(blank, lambda x: torch.where(x < 10, x * 2, 0)).points == 0.75 * blank.points
    assert grade(blank, lambda x: torch.where(x < 10, 0, x * 2)).points == 0.25 * blank.points


def test_the_instructors_seed_is_another_one(monkeypatch):
    assert current_seed() == PUBLIC_SEED
    monkeypatch.setenv("LOWPREC_SEED", "autumn, section B")
    assert current_seed() != PUBLIC_SEED
    assert current_seed() == current_seed()
    assert grade(BLANKS["bit_pattern"], reference("bit_pattern")).passed


def test_another_seed_draws_other_inputs():
    seen = []
    for seed in (1, 1, 2):
        outcomes = run_checks("bit_pattern", reference("bit_pattern"), seed=seed)
        seen.append(outcomes[0].records[0].tokens.tobytes())
    assert seen[0] == seen[1] != seen[2]
