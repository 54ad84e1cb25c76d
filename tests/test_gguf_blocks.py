"""Blocks of 32 against gguf-py's numpy, and answers in C under sanitizers and where there is no compiler."""

import math
import re
import sys

import numpy as np
import pytest
import torch

from lowprec_lab import c_code, gguf_blocks, libraries
from lowprec_lab.bench.other_answers import load_answer, other_answers
from lowprec_lab.blanks import BLANKS
from lowprec_lab.calls import AnswerFailed
from lowprec_lab.gguf_blocks import BLOCK, LAYOUTS, as_blocks, run_q4_0, run_q8_0
from lowprec_lab.graders import gguf_blocks as grader
from lowprec_lab.graders import gguf_blocks_oracle as exact
from lowprec_lab.graders import judging
from lowprec_lab.graders.case import Call, Case
from lowprec_lab.graders.counterexample import input_rows
from lowprec_lab.graders.naming import input_key
from lowprec_lab.graders.reproduction import try_again, try_it
from lowprec_lab.sources import Source, reference

NAMES = ("q8_0", "q4_0", "q4_1", "q5_0")
IN_C = {"q8_0_in_c": (run_q8_0, "q8_0"), "q4_0_in_c": (run_q4_0, "q4_0")}
OTHERS_IN_C = [each for each in other_answers() if each.exercise in IN_C]
needs_compiler = pytest.mark.skipif(c_code.find_compiler() is None, reason="there is no C compiler")
MAKERS = {
    "heavy-tailed": grader.heavy_tailed, "tiny": grader.tiny, "zero": grader.zeros, "denormal": grader.subnormal,
    "integer": grader.whole,
}  # fmt: skip
KINDS = ("normal", *MAKERS, "half-way")


def inputs(kind, layout, rng, blocks):
    """(blocks, 32) float32 of one of the kinds that are promised to be gguf's."""
    if kind == "half-way":
        return grader.near_ties(rng, blocks, layout)
    if kind == "normal":
        return torch.from_numpy(rng.standard_normal((blocks, 32), dtype=np.float32))
    makers = {
        "heavy-tailed": "heavy_tailed",
        "tiny": "tiny",
        "zero": "zeros",
        "denormal": "subnormal",
        "integer": "whole",
    }
    return getattr(grader, makers[kind])(rng, blocks)


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_gguf_s(kind, layout):
    pytest.importorskip("gguf")
    x = inputs(kind, layout, np.random.default_rng(1), 500)
    theirs = libraries.gguf_bytes(x, layout)
    assert torch.equal(reference(f"quantize_{layout}")(x), theirs)
    assert torch.equal(getattr(exact, f"quantize_{layout}")(x), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", NAMES)
def test_ten_million_numbers_of_every_kind_have_gguf_s_bytes(layout):
    """In Python, and in C where the layout has an exercise in C: no byte differs."""
    pytest.importorskip("gguf")
    rng = np.random.default_rng(2)
    quantize = [reference(f"quantize_{layout}")]
    name = f"{layout}_in_c"
    if name in IN_C and c_code.find_compiler():
        quantize.append(
            lambda x: c_code.run(reference(name)(), f"quantize_{layout}", x, block_bytes=LAYOUTS[layout].bytes)
        )
    for kind in KINDS:
        for _ in range(10):
            x = inputs(kind, layout, rng, 31_250).reshape(-1, 320)
            theirs = libraries.gguf_bytes(x, layout)
            for each in quantize:
                assert torch.equal(each(x), theirs), kind


@pytest.mark.parametrize("layout", NAMES)
def test_numbers_are_gguf_s(layout):
    pytest.importorskip("gguf")
    rng = np.random.default_rng(3)
    rows = torch.cat(
        [grader.with_halves(rng, 2000, layout), grader.with_halves(rng, 200, layout, 0.0, 65504.0, math.inf)]
    )
    mine, theirs = reference("dequantize_blocks")(rows, layout), libraries.gguf_numbers(rows, layout)
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(mine.nan_to_num(9).view(torch.int32), theirs.nan_to_num(9).view(torch.int32))


def test_without_gguf_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    libraries._gguf.cache_clear()
    with pytest.raises(libraries.AbsentError, match="is not installed"):
        libraries.gguf_bytes(torch.ones(1, 32), "q8_0")


def test_bits_of_each_layout():
    assert {name: LAYOUTS[name].bits for name in NAMES} == {"q8_0": 8.5, "q4_0": 4.5, "q4_1": 5.0, "q5_0": 5.5}


def test_rows_that_cannot_be_cut_are_told_what_to_do():
    for size, n in ((32, 65), (256, 128)):
        with pytest.raises(ValueError, match=f"rows of {n} numbers cannot be cut into blocks of {size}. Fall back"):
            as_blocks(torch.zeros(2, n), size)
    with pytest.raises(ValueError, match="blocks of 32"):
        as_blocks(torch.tensor(1.0))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_C)
@pytest.mark.parametrize("place", range(3))
def test_right_answers_in_c_are_clean_under_sanitizers(name, place):
    """The reference and both other answers, on blocks of every kind."""
    run, layout = IN_C[name]
    others = [load_answer(name, each.source, each.label) for each in OTHERS_IN_C if each.exercise == name]
    function = [reference(name), *others][place]
    rng = np.random.default_rng(4)
    x = (
        torch.cat([*(inputs(kind, layout, rng, 50) for kind in KINDS), grader.not_usable(rng), grader.huge(rng, 20)])
        + 0.0
    )
    want = getattr(exact, f"quantize_{layout}")(x)
    size = LAYOUTS[layout].bytes
    got = c_code.run(function(), f"quantize_{layout}", x, block_bytes=size, sanitize=True)
    assert torch.equal(got, grader.settled(got, want, size))


def tried(line, function):
    """What the line to try does with this answer: the exception's text, or ""."""
    known = {**vars(gguf_blocks), "torch": torch, line.partition("(")[2].partition(",")[0]: function}
    try:
        eval(line, known)
    except AnswerFailed as failure:
        return failure.sentence
    return ""


@needs_compiler
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("int code = (int)roundf(v);", "uint8_t code = (uint8_t)roundf(v);"), "type 'unsigned char'"),
        (("isfinite(d) && isfinite(id)", "isfinite(d) || isfinite(id)"), "type 'int'"),
    ],
)
def test_bytes_that_are_right_by_luck_do_not_pass(change, sentence):
    def answer():
        return grader.changed(exact.Q8_0_IN_C, change)

    verdict = judging.grade(BLANKS["q8_0_in_c"], answer)
    if verdict.passed and not c_code.finds_undefined(c_code.find_compiler()):
        pytest.skip("this compiler cannot look for what is undefined")
    assert (verdict.headline, verdict.passed) == ("right here, by luck", False)
    assert re.match(r"It passes here by luck: line \d+, ", verdict.sentences[0])
    assert sentence in verdict.sentences[0]
    assert not verdict.notes
    assert tried(verdict.try_it, answer) == verdict.sentences[0]


@needs_compiler
@pytest.mark.parametrize(
    ("change", "sentence"),
    [(("j < 32", "j <= 32"), "beyond the end of x"), (("34 * b", "36 * b"), "beyond the end of out")],
)
def test_a_line_to_try_has_whole_blocks_and_shows_the_failure(change, sentence):
    def answer():
        return grader.changed(exact.Q8_0_IN_C, change)

    verdict = judging.grade(BLANKS["q8_0_in_c"], answer)
    assert sentence in verdict.text()
    assert sentence in tried(verdict.try_it, answer)


def test_a_line_to_try_after_an_endless_loop_has_whole_blocks():
    x = torch.arange(96.0).reshape(1, 96)
    line = try_again(BLANKS["quantize_q8_0"], None, Call((x,)))
    assert eval(line, {"quantize_q8_0": lambda x: x.shape[-1] % BLOCK, "torch": torch}) == 0


@needs_compiler
@pytest.mark.parametrize("name", IN_C)
def test_compiled_for_this_processor_it_gives_the_same_bytes(name):
    run, layout = IN_C[name]
    fast = c_code.in_process(reference(name)(), f"quantize_{layout}", block_bytes=LAYOUTS[layout].bytes)
    x = torch.cat([inputs(kind, layout, np.random.default_rng(5), 200) for kind in KINDS])
    assert torch.equal(fast(x), run(reference(name), x))


def test_a_compiler_that_knows_no_such_processor_is_not_asked_for_it():
    assert c_code.for_this_processor("/nowhere/cc") == ()
    assert c_code.for_this_processor("false") == ()


@pytest.mark.parametrize("name", IN_C)
def test_without_a_compiler_it_is_not_called_wrong(name, monkeypatch):
    monkeypatch.setattr(judging, "find_compiler", lambda: None)
    verdict = judging.grade(BLANKS[name], reference(name))
    assert "cannot be judged on this machine" in verdict.text()
    assert "There is no C compiler here" in verdict.text()


@needs_compiler
def test_contraction_changes_bytes_of_q4_0():
    """Why the flag is there: a fused multiply-add rounds once, and some codes are others."""
    x = grader.near_ties(np.random.default_rng(6), 2000, "q4_0")
    fused = grader.c_fused()
    assert not torch.equal(c_code.run(fused, "quantize_q4_0", x, block_bytes=18), exact.quantize_q4_0(x + 0.0))


def test_a_verdict_shows_the_row_that_a_wrong_byte_came_from():
    wrong = load_answer(
        "quantize_q8_0", Source("def quantize_q8_0(x):\n    return torch.zeros(x.shape[0], 68).byte()"), "x"
    )
    case = Case(0, "")
    x = torch.ones(3, 64)
    x[1, 40] = 2.0
    case.last_call = Call((x,))
    case.same_bits(wrong(x), exact.quantize_q8_0(x))
    (record,) = case.records
    index = 68 + 34 + 2 + 8  # in the second row, its second block
    assert [(row.label, row.value[:20]) for row in input_rows(BLANKS["quantize_q8_0"], record, index)] == [
        ("input", "[1.0, 1.0, 1.0, 1.0,"),
        ("place", "element 44 of the re"),
    ]
    assert try_it(BLANKS["quantize_q8_0"], wrong, record, index).count("1.0") == 63
    assert len({input_key(record, each) for each in (0, 67, 68, 135, 136)}) == 2  # two rows are alike
