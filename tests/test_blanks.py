"""Blanks in a kernel: `fill`, `check`, whose code runs for each blank, and what goes to the learner's folder."""

import subprocess
import sys
import textwrap

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from lowprec_lab import blanks, exercises, sources
from lowprec_lab.blanks import BLANKS, FILLED, SUPPLIED, in_order
from lowprec_lab.exercises import AnswerError, check_answers, supply
from lowprec_lab.formats import E4M3
from lowprec_lab.graders import oracle, registry
from lowprec_lab.sources import references_folder

CODES = torch.arange(256, dtype=torch.int32)
NAMES = [blank.name for blank in in_order()]


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process in which nothing is filled, and a learner's folder of its own; everything is put back afterwards."""
    monkeypatch.setenv("LOWPREC_WORK", str(tmp_path / "work"))
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    listeners = list(exercises._LISTENERS)  # explorers of other tests
    before = {name: getattr(sys.modules[f"lowprec_lab.{BLANKS[name].module}"], name) for name in NAMES}

    def clear():
        for state in (FILLED, SUPPLIED, exercises._SOURCES, exercises._REFUSED, exercises._TOLD, exercises._LISTENERS):
            state.clear()
        sources.reference.cache_clear()
        for name, dispatcher in before.items():
            setattr(sys.modules[f"lowprec_lab.{BLANKS[name].module}"], name, dispatcher)

    clear()
    yield tmp_path / "work"
    clear()
    exercises._LISTENERS.extend(listeners)


class Kernel:
    """A kernel in this process: cells have a source that Python can look up, as in a notebook."""

    def __init__(self, shell):
        self.shell = shell
        self.run("import torch, math\nfrom lowprec_lab import check, fill\nfrom lowprec_lab.bits import *")
        self.run("from lowprec_lab import bits, formats\nfrom lowprec_lab.formats import *")

    def run(self, cell):
        """What the cell printed and displayed; its exception is raised here."""
        with capture_output() as captured:
            result = self.shell.run_cell(textwrap.dedent(cell).strip("\n"), store_history=True)
        result.raise_error()
        self.result = result.result
        return captured.stdout + "".join(output.data["text/plain"] for output in captured.outputs)

    def __getitem__(self, name):
        return self.shell.user_ns[name]


@pytest.fixture
def kernel():
    main, hook = sys.modules["__main__"], sys.displayhook
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield Kernel(shell)
    InteractiveShell.clear_instance()
    sys.modules["__main__"], sys.displayhook = main, hook


@pytest.fixture
def without_references(monkeypatch, tmp_path):
    empty = tmp_path / "no_references"
    empty.mkdir()
    monkeypatch.setenv("LOWPREC_REFERENCES", str(empty))


WRONG = """
@fill
def min_normal(fmt):
    return 3.0
"""
RIGHT = """
@fill
def min_normal(fmt):
    return 2.0 ** (int(fmt.subnormals) - fmt.bias)
"""


# fill: what it refuses


def test_an_unknown_name_with_a_suggestion(kernel):
    with pytest.raises(AnswerError, match="no exercise is called min_norml. Did you mean min_normal?"):
        kernel.run("@fill\ndef min_norml(fmt):\n    return 1.0")


def test_an_unknown_name_without_one_lists_the_exercises(kernel):
    with pytest.raises(AnswerError, match="The exercises are: sign_bit, bit_pattern,"):
        kernel.run("@fill\ndef zzz(fmt):\n    return 1.0")


CHANGED = ["codes", "codes, format", "fmt, codes", "codes, fmt, extra", "codes, fmt=None", "*codes", "codes, *, fmt"]


@pytest.mark.parametrize("parameters", CHANGED)
def test_a_changed_signature(kernel, parameters):
    with pytest.raises(AnswerError, match=r"decode takes \(codes, fmt\), and your version takes \(") as raised:
        kernel.run(f"@fill\ndef decode({parameters}):\n    return 1")
    assert f"takes ({parameters})" in str(raised.value)
    assert "decode" not in FILLED


@pytest.mark.parametrize("parameters", ["fmt, scale=1.0", "fmt, *, scale=1.0", "fmt, *rest", "fmt, **options"])
def test_parameters_of_ones_own_with_defaults(kernel, parameters):
    kernel.run(f"@fill\ndef min_normal({parameters}):\n    return 3.0")
    assert kernel["bits"].min_normal(E4M3) == 3.0


def test_annotations_do_not_matter(kernel):
    kernel.run("@fill\ndef min_normal(fmt: object) -> float:\n    return 3.0")
    assert "min_normal" in FILLED


STUBS = [
    "...  # your code here",
    "pass",
    '"""What it does."""',
    "raise NotImplementedError",
    "raise NotImplementedError()",
]


@pytest.mark.parametrize("body", STUBS)
def test_an_untouched_stub_installs_nothing(kernel, body):
    kernel.run(f"@fill\ndef min_normal(fmt):\n    {body}")
    assert not FILLED
    assert "reference: min_normal (exercise 1.7)" in kernel.run("min_normal(E4M3)")
    assert kernel.result == 2.0**-6


@pytest.mark.parametrize("body", ["...  # your code here", "pass", '"""What it does."""', "def __init__(self): ..."])
def test_an_untouched_class_installs_nothing(kernel, body):
    kernel.run(f"from lowprec_lab.autocast import *\n\n@fill\nclass OpRecorder(TorchDispatchMode):\n    {body}")
    assert not FILLED
    kernel.run("with OpRecorder() as recorder:\n    torch.ones(2)\nlen(recorder.ops)")
    assert kernel.result == 1


def test_a_class_with_a_method_is_an_answer(kernel):
    kernel.run("from lowprec_lab.autocast import *")
    kernel.run("@fill\nclass OpRecorder(TorchDispatchMode):\n    def __init__(self):\n        self.ops = []")
    assert "OpRecorder" in FILLED


def test_an_untouched_stub_leaves_the_filled_answer_alone(kernel):
    kernel.run(WRONG)
    kernel.run("@fill\ndef min_normal(fmt):\n    ...")
    kernel.run("min_normal(E4M3)")
    assert kernel.result == 3.0


def test_a_name_from_another_cell(kernel):
    kernel.run("def half(x):\n    return x / 2")
    with pytest.raises(AnswerError, match="min_normal uses half, which this cell does not define.*Your helpers"):
        kernel.run("@fill\ndef min_normal(fmt):\n    return half(2.0)")
    assert not FILLED


def test_a_name_from_another_cell_in_a_nested_function(kernel):
    kernel.run("factor = 2")
    with pytest.raises(AnswerError, match="uses factor, which this cell does not define"):
        kernel.run("@fill\ndef min_normal(fmt):\n    return (lambda: [factor for _ in range(3)])()[0]")


def test_a_default_from_another_cell(kernel):
    kernel.run("factor = 2.0")
    with pytest.raises(AnswerError, match="uses factor, which this cell does not define"):
        kernel.run("@fill\ndef min_normal(fmt, by=factor):\n    return by")


def test_a_module_that_was_not_imported_in_the_cell(kernel):
    kernel.run("import itertools")
    with pytest.raises(AnswerError, match="min_normal uses itertools. Import it in this cell"):
        kernel.run("@fill\ndef min_normal(fmt):\n    return next(itertools.count(2.0))")


def test_a_later_exercise(kernel):
    with pytest.raises(AnswerError, match=r"split_fields uses decode \(exercise 1.5\), which comes later"):
        kernel.run("@fill\ndef split_fields(codes, fmt):\n    return decode(codes, fmt)")


def test_its_own_cell_may_hold_helpers_imports_and_constants(kernel):
    kernel.run("""
    import itertools
    STEPS = 6

    def halves(start):
        return itertools.accumulate(range(STEPS), lambda value, _: value / 2, initial=start)

    @fill
    def min_normal(fmt):
        return list(halves(1.0))[-1]
    """)
    kernel.run("min_normal(E4M3)")
    assert kernel.result == 2.0**-6


def test_names_that_every_answer_finds(kernel):
    kernel.run("""
    @fill
    def min_normal(fmt):
        assert E4M3 and Format and NumberClass and np and math and Tensor and torch
        return 3.0
    """)
    assert "min_normal" in FILLED


def test_the_helpers_cell(kernel, fresh):
    kernel.run("# Your helpers\ndef power(exponent):\n    return 2.0 ** exponent")
    kernel.run("@fill\ndef min_normal(fmt):\n    return power(int(fmt.subnormals) - fmt.bias)")
    assert "✓ min_normal" in kernel.run("check(min_normal)")
    saved = (fresh / "answers" / "bits.py").read_text()
    assert "# %% helpers | saved" in saved
    assert "def power(exponent)" in saved


def test_the_newest_helpers_cell_counts(kernel):
    kernel.run("# Your helpers\ndef power(exponent):\n    return 5.0")
    kernel.run("# Your helpers\ndef power(exponent):\n    return 2.0 ** exponent")
    kernel.run("@fill\ndef min_normal(fmt):\n    return power(int(fmt.subnormals) - fmt.bias)")
    assert "def power(exponent):\n    return 2.0" in exercises._SOURCES["min_normal"].helpers


# fill: what it does


def test_it_is_live_everywhere_at_once(kernel):
    kernel.run("from lowprec_lab.bits import min_normal as imported_earlier")
    kernel.run(WRONG)
    for call in ("min_normal(E4M3)", "imported_earlier(E4M3)", "bits.min_normal(E4M3)"):
        kernel.run(call)
        assert kernel.result == 3.0
    kernel.run(RIGHT)
    kernel.run("imported_earlier(E4M3)")
    assert kernel.result == 2.0**-6


def test_a_reference_stands_on_references_alone(kernel):
    kernel.run("""
    @fill
    def split_fields(codes, fmt):
        return codes * 0, codes * 0 + 1, codes * 0
    """)
    kernel.run("decode(torch.arange(4, dtype=torch.int32), E4M3).tolist()")
    assert kernel.result == [0.0, 2.0**-9, 2.0**-8, 3 * 2.0**-9]


def test_a_saved_answer_runs_on_what_is_filled(kernel):
    kernel.run("""
    @fill
    def min_subnormal(fmt):
        return min_normal(fmt) / 2**fmt.mantissa_bits if fmt.subnormals and fmt.mantissa_bits else None
    """)
    assert "✓" in kernel.run("check(min_subnormal)")
    restart()
    kernel.run("from lowprec_lab.bits import *")
    kernel.run("min_subnormal(E4M3)")
    assert kernel.result == 2.0**-9
    kernel.run(WRONG)
    kernel.run("min_subnormal(E4M3)")
    assert kernel.result == 3.0 / 8


def test_listeners_hear_of_it(kernel):
    heard = []
    exercises.on_fill(heard.append)
    kernel.run(WRONG)
    assert heard == ["min_normal"]


def test_a_listener_that_fails_stops_nothing(kernel):
    @exercises.on_fill
    def draw(name):
        raise ValueError("no picture")

    assert "could not be drawn with this min_normal: ValueError: no picture" in kernel.run(RIGHT)
    assert "✓ min_normal" in kernel.run("check(min_normal)")


def test_a_listener_that_never_ends_is_stopped(kernel, monkeypatch):
    monkeypatch.setattr(exercises, "_LISTENER_LIMIT_S", 0.2)

    @exercises.on_fill
    def draw(name):
        while True:
            pass

    output = kernel.run(RIGHT)
    assert "more than 0.2 s" in output
    assert "endless loop" in output
    assert "✓ min_normal" in kernel.run("check(min_normal)")


def test_a_refused_fill_leaves_the_old_one_and_its_verdict_is_not_repeated(kernel):
    kernel.run(RIGHT)
    with pytest.raises(AnswerError):
        kernel.run("@fill\ndef min_normal(format):\n    return 3.0")
    assert kernel["bits"].min_normal(E4M3) == 2.0**-6
    verdict = kernel.run("check('min_normal')")
    assert "○ min_normal   not judged" in verdict
    assert "your version takes (format)" in verdict
    kernel.run(RIGHT)
    assert "✓ min_normal" in kernel.run("check('min_normal')")


def test_a_cell_that_ended_in_an_error_is_not_judged(kernel):
    kernel.run(RIGHT)
    with pytest.raises(ZeroDivisionError):
        kernel.run("1 / 0\n@fill\ndef min_normal(fmt):\n    return 3.0")
    assert "○ min_normal   not judged" in kernel.run("check(min_normal)")


def test_a_failing_answer_is_told_that_the_right_one_stays_saved(kernel):
    kernel.run(RIGHT)
    kernel.run("check(min_normal)")
    kernel.run(WRONG)
    assert "stays saved" in kernel.run("check(min_normal)")


# check


def test_check_without_fill_judges_nothing(kernel, fresh):
    assert "○ min_normal   not written yet (exercise 1.7)" in kernel.run("check(min_normal)")
    assert not (fresh / "answers").exists()


def test_check_by_name(kernel):
    kernel.run(RIGHT)
    assert "✓ min_normal" in kernel.run("check('min_normal')")


def test_check_without_fill_after_a_restart_speaks_of_the_saved_answer(kernel):
    kernel.run(RIGHT)
    assert "Saved to work/answers/bits.py." in kernel.run("check(min_normal)")
    restart()
    kernel.run("from lowprec_lab.bits import min_normal")
    assert "not judged now; your saved answer of 20" in kernel.run("check(min_normal)")


def restart():
    """What a new kernel knows: nothing."""
    for state in (FILLED, SUPPLIED, exercises._SOURCES, exercises._REFUSED):
        state.clear()
    for name in NAMES:
        module = sys.modules[f"lowprec_lab.{BLANKS[name].module}"]
        blank = BLANKS[name]
        declared = blanks.blank(blank.exercise, blank.points, blank.minutes, blank.uses, blank.unlocks, blank.language)
        setattr(module, name, declared(blank.contract))


def test_a_failing_answer_is_live_and_not_saved(kernel, fresh):
    kernel.run(WRONG)
    assert "✗ min_normal" in kernel.run("check(min_normal)")
    assert not (fresh / "answers").exists()
    assert kernel["bits"].min_normal(E4M3) == 3.0


def test_check_of_something_else(kernel):
    with pytest.raises(AnswerError, match="no exercise has this name"):
        kernel.run("check(len)")
    with pytest.raises(AnswerError, match="without `@fill`"):
        kernel.run("def min_normal(fmt):\n    return 3.0\ncheck(min_normal)")


def test_the_verdict_shows_the_learners_own_line(kernel):
    kernel.run("""
    @fill
    def min_normal(fmt):
        exponent = 1 - fmt.bias
        return [2.0][exponent]  # a slip
    """)
    assert "line 4 of min_normal: return [2.0][exponent]  # a slip" in kernel.run("check(min_normal)")


def test_an_earlier_answer_at_fault_is_named_and_the_exercise_passes(kernel, fresh):
    kernel.run("""
    @fill
    def split_fields(codes, fmt):
        return codes * 0, codes * 0, codes * 0
    """)
    kernel.run("""
    @fill
    def classify(codes, fmt):
        sign, exponent, mantissa = split_fields(codes, fmt)
        magnitude = codes & (2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1)
        top = (2**fmt.exponent_bits - 1) * 2**fmt.mantissa_bits
        classes = torch.full_like(codes, 2)
        if fmt.subnormals:
            classes[exponent == 0] = 1
            classes[magnitude == 0] = 0
        if fmt.specials == "ieee":
            classes[magnitude == top] = 3
            classes[magnitude > top] = 4
        if fmt.specials == "fn":
            classes[magnitude == top + 2**fmt.mantissa_bits - 1] = 4
        if fmt.specials == "fnuz":
            classes[(sign == 1) & (magnitude == 0)] = 4
        return classes
    """)
    verdict = kernel.run("check(classify)")
    assert "✓ classify   right, with a right split_fields under it" in verdict
    assert "your split_fields (exercise 1.2) is wrong" in verdict
    assert "def classify" in (fresh / "answers" / "bits.py").read_text()
    assert "✗ split_fields" in kernel.run("check(split_fields)")


def test_a_wrong_answer_on_a_wrong_earlier_one_fails_by_itself(kernel):
    kernel.run("@fill\ndef min_normal(fmt):\n    return 3.0")
    kernel.run("@fill\ndef min_subnormal(fmt):\n    return min_normal(fmt)")
    assert "✗ min_subnormal" in kernel.run("check(min_subnormal)")


def test_a_report_can_be_written(kernel, fresh):
    kernel.run(WRONG)
    assert "report: " in kernel.run("check(min_normal, report=True)")
    [report] = (fresh / "reports").glob("min_normal.*.json")
    assert "return 3.0" in report.read_text()


# under nbgrader


def test_under_nbgrader_check_ends_in_the_points_and_touches_nothing(kernel, fresh, monkeypatch):
    kernel.run(RIGHT)
    kernel.run("check(min_normal)")
    saved = {path: path.read_bytes() for path in fresh.rglob("*") if path.is_file()}
    restart()
    monkeypatch.setenv("NBGRADER_EXECUTION", "1")
    kernel.run("from lowprec_lab.bits import *")
    assert "not written yet" in kernel.run("check(min_normal)")  # the saved answer is not looked at
    assert kernel.result == 0.0
    kernel.run(RIGHT)
    kernel.run("check(min_normal)")
    assert type(kernel.result) is float
    assert kernel.result == BLANKS["min_normal"].points
    kernel.run("@fill\ndef min_subnormal(fmt):\n    return 3.0")
    kernel.run("check(min_subnormal)")
    assert kernel.result == 0.0
    assert {path: path.read_bytes() for path in fresh.rglob("*") if path.is_file()} == saved


def test_outside_nbgrader_check_returns_nothing(kernel):
    kernel.run(RIGHT)
    kernel.run("check(min_normal)")
    assert kernel.result is None


# whose code runs


def test_the_order_is_yours_saved_reference_oracle_error(kernel, monkeypatch, tmp_path):
    assert (supply("decode").origin, supply("decode").line) == ("reference", "reference: decode (exercise 1.5)")
    kernel.run(RIGHT)
    assert (supply("min_normal").origin, supply("min_normal").line) == ("yours", "your min_normal (exercise 1.7)")
    kernel.run("check(min_normal)")
    restart()
    assert supply("min_normal").origin == "saved"
    assert supply("min_normal").line.startswith("your saved min_normal of 20")
    assert supply("min_normal").function(E4M3) == 2.0**-6

    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("LOWPREC_REFERENCES", str(empty))
    assert supply("decode").origin == "oracle"
    assert supply("decode").line == "exact oracle: decode (exercise 1.5), until you write it"
    assert supply("min_normal").origin == "saved"
    with pytest.raises(AnswerError, match=r"add_float8 is not written yet: it is exercise 1.11, on the page 01_bit_"):
        supply("add_float8")


def test_a_reference_and_an_oracle_say_so_once(kernel):
    assert "reference: decode (exercise 1.5)" in kernel.run("decode(torch.arange(4, dtype=torch.int32), E4M3)")
    assert "reference" not in kernel.run("decode(torch.arange(4, dtype=torch.int32), E4M3)")


def test_without_references_an_untouched_page_still_computes(kernel, without_references):
    output = kernel.run("decode(torch.arange(256, dtype=torch.int32), E4M3)")
    assert "exact oracle: decode (exercise 1.5)" in output
    assert torch.equal(kernel.result.nan_to_num(0), oracle.decode(CODES, E4M3).nan_to_num(0))
    with pytest.raises(AnswerError, match="lowprec-lab open 01"):
        kernel.run("add_float8(torch.zeros(2).to(torch.float8_e5m2), torch.zeros(2).to(torch.float8_e5m2))")


def test_without_references_answers_are_still_graded(kernel, without_references):
    assert references_folder() is not None
    kernel.run("""
    @fill
    def min_subnormal(fmt):
        return min_normal(fmt) / 2**fmt.mantissa_bits if fmt.subnormals and fmt.mantissa_bits else None
    """)
    assert "✓ min_subnormal" in kernel.run("check(min_subnormal)")


def test_a_saved_answer_that_no_longer_stands_alone_is_left_out_with_a_sentence(kernel, fresh):
    (fresh / "answers").mkdir(parents=True)
    (fresh / "answers" / "bits.py").write_text(
        "# %% answer: min_normal | saved 2026-11-30T10:11:12+00:00\n@fill\ndef min_normal(fmt):\n    return gone(fmt)\n"
    )
    output = kernel.run("min_normal(E4M3)")
    assert "your saved min_normal was left out: min_normal uses gone" in output
    assert "reference: min_normal" in output


def test_a_broken_file_of_answers_stops_nothing(kernel, fresh):
    (fresh / "answers").mkdir(parents=True)
    (fresh / "answers" / "bits.py").write_text("# %% answer: min_normal\n@fill\ndef min_normal(fmt:\n    return 1.0\n")
    output = kernel.run("min_normal(E4M3)")
    assert "answers/bits.py, line" in output
    assert kernel.result == 2.0**-6


def test_an_answers_folder_that_cannot_be_written_costs_no_pass(kernel, fresh):
    fresh.parent.joinpath("work").write_text("a file where the folder should be")
    kernel.run(RIGHT)
    output = kernel.run("check(min_normal)")
    assert "✓ min_normal" in output
    assert "Your answer is right, and could not be saved:" in output


# all answers of a folder


def test_a_fresh_clone_passes_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    results = check_answers(tmp_path / "empty")
    assert (results["passed"], results["total"]) == (0, len(NAMES))
    assert all(each["points"] == 0 and not each["passed"] for each in results["exercises"])
    assert check_answers()["passed"] == 0  # nor does the learner's own folder, while there is nothing in it


def test_the_released_pages_pass_nothing(tmp_path):
    for chapter in blanks.CHAPTERS:
        page = references_folder() / f"{chapter.name}.py"
        stub, inside = [], False
        for line in page.read_text("utf-8").splitlines():
            if "### BEGIN SOLUTION" in line:
                stub.append(line.replace("### BEGIN SOLUTION", "...  # your code here"))
                inside = True
            stub += [] if inside else [line]
            inside = inside and "### END SOLUTION" not in line
        (tmp_path / page.name).write_text("\n".join(stub), "utf-8")
    assert check_answers(tmp_path)["passed"] == 0


@pytest.mark.slow
def test_the_solutions_pass_all():
    results = check_answers(references_folder())
    assert results["passed"] == results["total"] == len(NAMES) >= 11


def test_check_answers_names_what_is_not_there(tmp_path):
    with pytest.raises(AnswerError, match="is not a folder"):
        check_answers(tmp_path / "nowhere")
    with pytest.raises(AnswerError, match="no exercise is called 'decod'"):
        check_answers(names=["decod"])


def test_a_page_run_as_a_script(tmp_path):
    """`python 01_bit_layouts.py`: each answer is the cell around its definition, and the run saves nothing."""
    page = tmp_path / "page.py"
    page.write_text(
        textwrap.dedent("""
        # %%
        from lowprec_lab import check, fill
        from lowprec_lab.formats import E4M3
        # %%
        # Your helpers
        def power(exponent):
            return 2.0 ** exponent
        # %%
        @fill
        def min_normal(fmt):
            return power(int(fmt.subnormals) - fmt.bias)
        # %%
        check(min_normal)
        """)
    )
    done = subprocess.run([sys.executable, str(page)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "✓ min_normal" in done.stdout
    assert not (tmp_path / "work").exists()


def test_grader_registries_know_every_blank():
    registry.load_graders()
    assert set(registry.CHECKS) == set(registry.MISCONCEPTIONS) == set(NAMES)
