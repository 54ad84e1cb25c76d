"""Verdicts: what an answer can give back that is wrong, how it is told, and that what is told can be tried."""

import ast
import builtins
import html
import importlib
import math
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from misconceptions import NAMES, WRONG, in_notebook, label, named_verdict, verdict_on

from lowprec_lab import formats
from lowprec_lab.blanks import BLANKS
from lowprec_lab.calls import same_data
from lowprec_lab.formats import E4M3, FORMATS, FP32
from lowprec_lab.graders import judging, reproduction
from lowprec_lab.graders import run as running
from lowprec_lab.graders.case import Case
from lowprec_lab.graders.counterexample import bit_fields, line_of, tensor_text
from lowprec_lab.graders.judging import grade
from lowprec_lab.graders.registry import CHECKS, MISCONCEPTIONS
from lowprec_lab.graders.run import run_checks
from lowprec_lab.graders.verdict import Row, Verdict
from lowprec_lab.sources import Source, load, reference, reference_source

ROOT = Path(__file__).parents[1]


def judged(name, function):
    return grade(BLANKS[name], function)


def answer(name, source):
    """A function from the text of a cell, as a learner's is loaded."""
    return load(Source(source), BLANKS[name], reference, "your answer")


class Bits(torch.Tensor):
    pass


right = torch.signbit

NO_RESULT = [
    (lambda x: None, "returned None (is a `return` missing?); a Tensor is expected"),
    (lambda x: 1, "returned an int; a Tensor is expected"),
    (lambda x: [1, 2], "returned a list; a Tensor is expected"),
    (lambda x: right(x).int().numpy(), "returned an ndarray; a Tensor is expected"),
    (lambda x: (right(x).int(),), "returned a tuple; a Tensor is expected"),
    (lambda x: right(x), "returned bool; int32 is expected"),
    (lambda x: right(x).long(), "returned int64; int32 is expected"),
    (lambda x: right(x).float(), "returned float32; int32 is expected"),
    (lambda x: right(x).int()[..., None], "is expected."),
    (lambda x: right(x).int().reshape(-1), "shape (1,); () is expected"),
    (lambda x: right(x).int().to(torch.device("meta")), "returned a tensor on meta; one on cpu is expected"),
    (lambda x: right(x).int().as_subclass(Bits), "returned a Bits; a Tensor is expected"),
    (lambda x: torch.nn.Parameter(right(x).int(), requires_grad=False), "returned a Parameter; a Tensor is expected"),
    (lambda x: object(), "returned an object, which is not a tensor or a number"),
    (lambda x: {"sign": right(x)}, "returned a dict, which is not a tensor or a number"),
    (lambda x: (value for value in x), "returned a generator, which is not a tensor or a number"),
]


@pytest.mark.parametrize(("function", "sentence"), NO_RESULT, ids=[text for _, text in NO_RESULT])
def test_what_cannot_be_compared_is_told(function, sentence):
    verdict = judged("sign_bit", function)
    assert not verdict.passed
    assert verdict.level == "failed"
    assert sentence in verdict.text()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_exercise_survives_answers_of_every_kind(name):
    for result in (None, 3, 2.5, "text", [], (), (1, 2, 3), np.zeros(3), torch.zeros(0), torch.zeros(3, 3), E4M3, b"x"):
        verdict = judged(name, lambda *args, _result=result, **kwargs: _result)
        assert not verdict.passed
        assert verdict.points < verdict.max_points
        assert verdict.text()
        assert verdict.html()


def test_parts_of_a_tuple_are_named():
    def two(codes, fmt):
        return codes, codes

    def wide(codes, fmt):
        sign, exponent, mantissa = reference("split_fields")(codes, fmt)
        return sign, exponent.long(), mantissa

    assert "a tuple of 2; a tuple of 3 (sign, exponent, mantissa)" in judged("split_fields", two).text()
    assert "The exponent is int64; int32 is expected." in judged("split_fields", wide).text()
    assert "a list; a tuple of 3" in judged("split_fields", lambda codes, fmt: [codes, codes, codes]).text()


def test_a_float_is_no_numpy_float_and_no_int():
    assert "float64" in judged("min_normal", lambda fmt: np.float64(reference("min_normal")(fmt))).text()
    assert "an int; a float" in judged("machine_epsilon", lambda fmt: 1).text()


# exceptions


def test_an_exception_shows_the_learners_own_line():
    source = "def sign_bit(x):\n    y = x.abs()\n    return torch.add(y, 'one')  # here\n"
    verdict = judged("sign_bit", answer("sign_bit", source))
    assert verdict.level == "failed"
    assert "It raised TypeError" in verdict.text()
    assert "line 3 of sign_bit: return torch.add(y, 'one')  # here" in verdict.text()


def test_endless_recursion_is_told():
    verdict = judged("sign_bit", answer("sign_bit", "def sign_bit(x):\n    return sign_bit(x)\n"))
    assert "calls itself for ever" in verdict.text()


@pytest.mark.parametrize("raised", ["raise SystemExit(0)", "exit()"])
def test_leaving_is_an_exception_too(raised):
    verdict = judged("sign_bit", answer("sign_bit", f"def sign_bit(x):\n    {raised}\n"))
    assert verdict.level == "failed"
    assert "line 2" in verdict.text()


def test_a_long_text_of_an_exception_is_cut():
    def many_lines(x):
        raise ValueError("\n".join(f"line number {number}" for number in range(1000)))

    verdict = judged("sign_bit", many_lines)
    assert "ValueError: line number 0" in verdict.text()
    assert len(verdict.sentences[0]) < 300
    assert "\n" not in verdict.sentences[0]


def test_prints_and_warnings_of_an_answer_stay_away(capsys, recwarn):
    source = """
def sign_bit(x):
    import sys, warnings
    print("to stdout")
    print("to stderr", file=sys.stderr)
    warnings.warn("a warning")
    return torch.signbit(x).int()
"""
    verdict = judged("sign_bit", answer("sign_bit", source))
    assert verdict.passed
    output = capsys.readouterr()
    assert output.out == output.err == ""
    assert not recwarn.list
    [note] = verdict.notes
    assert note.startswith("While it was checked, your code printed: to stdout to stdout")
    assert len(note) < 300


def test_a_slow_answer_passes_and_is_told(monkeypatch):
    monkeypatch.setattr(judging, "_SLOW_S", 0.1)
    source = "def sign_bit(x):\n    import time\n    time.sleep(0.02)\n    return torch.signbit(x).int()\n"
    verdict = judged("sign_bit", answer("sign_bit", source))
    assert verdict.passed
    assert "a loop per element will be too slow" in verdict.notes[0]
    assert verdict.points == verdict.max_points


# time


def test_an_endless_loop_is_stopped_after_the_stated_time():
    forever = answer("sign_bit", "def sign_bit(x):\n    while True:\n        pass\n")
    started = time.perf_counter()
    outcomes = run_checks("sign_bit", forever, limit_s=0.3)
    assert time.perf_counter() - started < 3
    assert len(outcomes) == 1  # the other checks would take as long again
    assert outcomes[0].failure.kind == "timeout"
    assert "stopped after 0.3 s" in outcomes[0].failure.sentence


def test_so_is_one_that_swallows_the_interrupt_once():
    stubborn = answer(
        "sign_bit",
        """
def sign_bit(x):
    try:
        while True:
            pass
    except KeyboardInterrupt:
        pass
    while True:
        pass
""",
    )
    started = time.perf_counter()
    outcomes = run_checks("sign_bit", stubborn, limit_s=0.3)
    assert time.perf_counter() - started < 5
    assert outcomes[0].failure.kind == "timeout"


def test_no_interrupt_is_left_over_after_an_answer_that_just_made_it():
    slow = answer(
        "sign_bit", "def sign_bit(x):\n    import time\n    time.sleep(0.1)\n    return torch.signbit(x).int()\n"
    )
    for limit in (0.05, 0.1, 0.11):
        run_checks("sign_bit", slow, limit_s=limit)
        time.sleep(0.05)


def test_the_verdict_on_an_endless_loop(monkeypatch):
    monkeypatch.setattr(running.run_checks, "__kwdefaults__", {**running.run_checks.__kwdefaults__, "limit_s": 0.2})
    monkeypatch.setattr(judging, "name_misconception", lambda *args: None)
    verdict = judged("sign_bit", answer("sign_bit", "def sign_bit(x):\n    while True:\n        pass\n"))
    assert verdict.level == "failed"
    assert "stopped after 0.2 s: is there an endless loop" in verdict.text()
    assert [line["ran"] for line in verdict.checks] == [True] + [False] * (len(verdict.checks) - 1)
    assert verdict.points == 0


# inputs


def test_changing_the_input_is_told():
    verdict = judged("sign_bit", lambda x: torch.signbit(x.mul_(1.5)).int())
    assert verdict.level == "failed"
    assert "It changes its input in place" in verdict.text()


def test_changes_that_are_easy_to_miss():
    assert not same_data(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_data(torch.tensor([1.0]), torch.tensor([[1.0]]))
    assert same_data(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert same_data(torch.ones(2, 3).t(), torch.ones(3, 2))
    assert same_data(torch.empty(0, 3), torch.empty(0, 3))


# levels


@pytest.mark.parametrize(("steps", "level"), [(1, "close"), (4, "close"), (5, "wrong")])
def test_close_means_up_to_four_ulp(steps, level):
    def off(x, fmt):
        spacing = reference("ulp")(x, fmt)
        moved = (spacing.view(torch.int64) + steps).view(torch.float64)
        return torch.where(x == 1, moved, spacing)

    verdict = judged("ulp", off)
    assert (verdict.level, verdict.passed) == (level, False)
    assert verdict.points < verdict.max_points
    if level == "close":
        assert f"up to {steps} ulp from right" in verdict.headline


def test_a_lost_sign_of_zero_is_wrong_and_not_close():
    assert judged("decode", lambda codes, fmt: reference("decode")(codes, fmt) + 0.0).level == "wrong"


def test_integers_are_never_close():
    assert judged("bit_pattern", lambda x: x.view(torch.int32) + 1).level == "wrong"


def test_exact_says_on_how_many_inputs():
    verdict = judged("decode", reference("decode"))
    assert re.fullmatch(r"bit-exact on ([\d,]+) of \1 inputs", verdict.headline)
    assert verdict.text().startswith("✓ decode")


# the counter-example


def test_what_is_judged_by_error_is_not_called_bit_exact():
    verdict = judged("quantize_q4_k", reference("quantize_q4_k"))
    assert re.fullmatch(r"right on ([\d,]+) of \1 inputs, judged by error", verdict.headline)
    plain = next(each for each in MISCONCEPTIONS["quantize_q4_k"] if each.function.__name__ == "ends_as_they_are")
    assert [row.label for row in verdict_on(plain).rows][-2:] == ["yours", "at most"]


def test_marks_stand_under_the_bits_that_differ():
    def wrong(codes, fmt):
        values = reference("decode")(codes, fmt)
        return torch.where(codes == 9, values * 2, values)

    def lifted(x):
        return torch.where(x == 1, x.view(torch.int32) ^ 0b1010, x.view(torch.int32))

    assert "0x3f800000" in judged("bit_pattern", lifted).text()
    lines = judged("bit_pattern", lifted).text().splitlines()
    place = next(i for i, line in enumerate(lines) if line.split()[:1] == ["yours"])
    yours, correct, marks = lines[place : place + 3]
    assert len(marks) <= len(yours)
    for column in range(len(yours)):
        differ = column >= yours.rindex(" ") and yours[column] != correct[column]
        assert (marks[column : column + 1] == "^") == differ
    assert marks.count("^") == 2
    assert "first difference" in judged("decode", wrong).text()


def test_fields_of_no_bits_are_left_out():
    assert bit_fields(0x3F, E4M3) == [("s", "0"), ("e", "0111"), ("m", "111")]
    assert bit_fields(0x7F, FORMATS["float8_e8m0fnu"]) == [("e", "01111111")]
    assert "".join(digits for _, digits in bit_fields(0x80000001, FP32)) == "1" + "0" * 30 + "1"


def test_no_marks_under_strips_of_different_formats():
    rows = [Row("yours", "1", [("m", "01")]), Row("right", "2", [("m", "011")])]
    assert Verdict("f", "1.1", "wrong", "", False, 0, 1, rows=rows).marks() == ""


# try it


def chapter_module(name):
    return importlib.import_module(f"lowprec_lab.{BLANKS[name].module}")


def tried(text, name, function):
    """What the line gives in a page whose `name` is `function`: a result, or the class of the error that is raised."""
    given = {each: getattr(formats, each) for each in formats.__all__}
    try:
        return eval(text, {"torch": torch, **given, **vars(chapter_module(name)), name: function})
    except Exception as error:
        return type(error)


def differ(one, other):
    if isinstance(one, type) or isinstance(other, type):
        return one is not other
    one, other = (each if isinstance(each, tuple) else (each,) for each in (one, other))
    case = Case(0, "difference")
    for mine, right in zip(one, other, strict=True):
        case.same_bits(mine, right)
    return any(record.wrong.any() for record in case.records)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=label)
def test_try_it_shows_the_difference(wrong):
    name = wrong.exercise
    text = verdict_on(wrong).try_it
    assert name in text
    assert differ(tried(text, name, wrong.function), tried(text, name, reference(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_try_it_repeats_an_exception(name):
    def stumbles(*args, **kwargs):
        raise RuntimeError("no")

    raised = (RuntimeError, "RuntimeError: no")  # a scenario may give an error back as data
    assert tried(judged(name, stumbles).try_it, name, stumbles) in raised
    assert tried(judged(name, stumbles).try_it, name, reference(name)) not in raised


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_page_knows_every_name_that_its_lines_to_try_use(name):
    lines = {verdict_on(wrong).try_it for wrong in MISCONCEPTIONS[name]}
    used = {node.id for line in lines for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Name)}
    page = ast.parse((ROOT / "solutions" / f"{BLANKS[name].chapter.name}.py").read_text())
    imported = [
        alias for node in ast.walk(page) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    ]
    known = {alias.asname or alias.name for alias in imported}
    assert used <= known | set(dir(builtins)), used - known


def test_try_it_keeps_the_neighbours_that_a_mistake_needs():
    def by_the_largest(x, fmt):
        return reference("ulp")(x.abs().max().expand(x.shape) if x.numel() else x, fmt)

    text = judged("ulp", by_the_largest).try_it
    assert len(text) < 200
    assert differ(tried(text, "ulp", by_the_largest), tried(text, "ulp", reference("ulp")))


TENSORS = [
    torch.tensor([1.5, -0.0, math.inf, -math.inf, 1e-45]),
    torch.tensor([math.nan, 1.0]),
    torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32),
    torch.tensor(0.1),
    torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
    torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).t(),
    torch.tensor(7, dtype=torch.int64),
    torch.tensor([0.1, math.inf], dtype=torch.float64),
    torch.tensor([0x81, 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn),
    torch.tensor([1.0, -2.5], dtype=torch.bfloat16),
    torch.empty(0),
    torch.empty(0, 3, dtype=torch.int32),
]


@pytest.mark.parametrize("value", TENSORS, ids=[str(i) for i in range(len(TENSORS))])
def test_tensor_text_makes_the_same_tensor(value):
    again = eval(tensor_text(value), {"torch": torch})
    assert (again.dtype, again.shape, again.stride()) == (value.dtype, value.shape, value.stride())
    assert same_data(again, value)


# HTML

PAYLOAD = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def test_html_escapes_what_comes_from_an_answer():
    source = f"def sign_bit(x):\n    raise ValueError({PAYLOAD!r})\n"
    verdict = judged("sign_bit", answer("sign_bit", source))
    assert PAYLOAD in verdict.text()
    assert "<script" not in verdict.html()
    assert "<img" not in verdict.html()
    assert "&lt;script&gt;" in verdict.html()


def test_html_escapes_every_part():
    texts = dict.fromkeys(("name", "exercise", "headline", "try_it", "misconception"), PAYLOAD)
    check = {"name": PAYLOAD, "inputs": PAYLOAD, "weight": 1, "ran": True, "passed": False, "cases": 1, "wrong": 1}
    verdict = Verdict(
        level="wrong", passed=False, points=0, max_points=1, sentences=[PAYLOAD], notes=[PAYLOAD],
        rows=[Row(label, PAYLOAD, [("s", "<"), ("e", ">"), ("m", "&")]) for label in ("input", "yours", "right")],
        checks=[check, {**check, "ran": False}], **texts,
    )  # fmt: skip
    assert "<script" not in verdict.html()
    assert "<img" not in verdict.html()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_html_needs_no_style_sheet(name):
    right, wrong = in_notebook(name, reference_source(name)), named_verdict(MISCONCEPTIONS[name][0])
    for verdict in (right, wrong, judged(name, lambda *args: None)):
        markup = verdict.html()
        assert not re.search(r"<style|<svg|<script|\bclass=|\baria-|\bid=", markup)
        tags = re.findall(r"<(/?)(\w+)", markup)
        assert {tag for _, tag in tags} <= {"div", "b", "u", "pre", "span", "br"}
        opened = [tag for slash, tag in tags if not slash and tag != "br"]
        closed = [tag for slash, tag in tags if slash]
        assert sorted(opened) == sorted(closed)


def test_text_and_html_say_the_same():
    verdict = grade(BLANKS["decode"], MISCONCEPTIONS["decode"][0].function)

    plain = html.unescape(re.sub(r"<[^>]+>", "", verdict.html().replace("<br>", "\n")))
    tried = [line["inputs"] for line in verdict.checks]
    for sentence in [verdict.headline, *verdict.sentences, verdict.try_it, *tried]:
        assert sentence in verdict.text()
        assert sentence in plain


def test_every_check_is_listed_with_what_it_tried():
    verdict = grade(BLANKS["decode"], reference("decode"))
    assert [line["inputs"] for line in verdict.checks] == [check.inputs for check in CHECKS["decode"]]
    for line in verdict.checks:
        assert f"✓ {line['inputs']}" in verdict.text()


def test_what_took_too_much_memory_is_not_offered_to_be_tried():
    def greedy(x):
        raise MemoryError

    verdict = judged("sign_bit", greedy)
    assert "more memory than a check may take" in verdict.text()
    assert verdict.try_it == ""
    assert [line["ran"] for line in verdict.checks].count(True) == 1


def test_wrong_values_are_told_before_an_error_in_a_later_check():
    def wrong_and_broken(codes, fmt):
        if codes.dim() == 2:
            raise RuntimeError("only vectors")
        return reference("decode")(codes, fmt) + 1

    verdict = judged("decode", wrong_and_broken)
    assert verdict.headline.startswith("wrong on")
    assert verdict.rows
    assert "In another check: It raised RuntimeError: only vectors" in verdict.sentences


def test_what_a_scenario_was_handed_is_shown_under_its_own_names():
    wrong = next(m for m in MISCONCEPTIONS["bf16_loss"] if m.function.__name__ == "always_cpu")
    assert [row.label for row in verdict_on(wrong).rows][:3] == ["device_type", "batch", "length"]
    wrong = next(m for m in MISCONCEPTIONS["MiniAutocast"] if m.function.__name__ == "casts_doubles")
    labels = [row.label for row in verdict_on(wrong).rows]
    assert labels[:3] == ["table", "dtype", "op"]
    assert labels[3:-2] == ["dtypes"] * 2


def test_a_row_without_numbers_is_a_row():
    """An answer may be wrong on the amax of nothing, and a verdict shows that as any other row."""
    nothing, one = torch.zeros(2, 0), torch.zeros(2, 1)
    assert line_of(nothing, one, 1).shape == (0,)
    assert reproduction._row_around(nothing, one, 1).shape == (1, 0)
    assert line_of(one, nothing, 0) is None
