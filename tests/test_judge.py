"""The judge says of an answer in the sandbox what the same checks say of it in the notebook and in a terminal."""

import ast
import functools
import importlib
import inspect
import re
import shutil
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
from misconceptions import NAMES, in_notebook, label, verdict_on
from sandboxes import open_sandbox

from lowprec_lab import blanks, chapters
from lowprec_lab.bench.other_answers import other_answers
from lowprec_lab.blanks import BLANKS, in_order
from lowprec_lab.calls import AnswerFailed
from lowprec_lab.graders import registry, run
from lowprec_lab.graders.judging import grade
from lowprec_lab.graders.registry import CHECKS, MISCONCEPTIONS, Check
from lowprec_lab.grading import judge as judge_module
from lowprec_lab.grading import wire
from lowprec_lab.grading.judge import RemoteAnswer, judge, judge_all
from lowprec_lab.grading.processes import PlainProcesses
from lowprec_lab.sources import Source, load, reference, reference_source
from lowprec_lab.terminal import judge_source

registry.load_graders()
PACKAGE = Path(blanks.__file__).parent
OTHERS = other_answers()


@pytest.fixture(scope="session")  # an exercise's tests run in one process after another exercise's
def workers():
    with open_sandbox() as sandbox:
        yield sandbox


# --- the source of a misconception, made to stand alone ---------------------------------------------------------------


# The graders' own modules, in the order in which they import each other. A sandbox has none of them.
GIVEN = (
    "oracle", "rounding_oracle", "inputs", "accumulation_oracle", "loss_scaling_oracle", "autocast_oracle",
    "quantizer_oracle", "float8_linear_oracle", "scaled_mm_oracle", "recipes_oracle", "inference_oracle",
    "gguf_blocks_oracle", "gguf_kquants_oracle", "block_formats_oracle", "distributed_oracle", "capstone_oracle",
)  # fmt: skip
MODULE_AS_HELPER = """
import sys, types
def _given_module(name, text):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, f"<{{name}}>", "exec"), module.__dict__)
    return module
_GIVEN = {{name: _given_module(name, text) for name, text in {texts!r}}}
"""


def given_modules():
    """The helper that makes modules of the graders again from their texts."""
    texts = []
    for name in GIVEN:
        text = inspect.getsource(importlib.import_module(f"lowprec_lab.graders.{name}"))
        text = re.sub(r"^from lowprec_lab\.graders import (.+)$", given_import, text, flags=re.MULTILINE)
        texts.append((f"given_{name}", text))
    return MODULE_AS_HELPER.format(texts=texts)


def given_import(line):
    """`import given_oracle as oracle`, in place of `from lowprec_lab.graders import oracle`."""
    parts = [part.strip().partition(" as ") for part in line[1].split(",")]
    return "import " + ", ".join(f"given_{name} as {alias or name}" for name, _, alias in parts)


@functools.cache
def standing_alone(wrong):
    """The misconception as an answer cell: its own text, and what it uses of its module as helpers."""
    module = sys.modules[wrong.function.__module__]
    chapter = importlib.import_module(f"lowprec_lab.{BLANKS[wrong.exercise].module}")
    text = re.sub(rf"\b{wrong.function.__name__}\b", wrong.exercise, definition(wrong.function))
    helpers, waiting, seen, given = [], [wrong.function], set(), False
    while waiting:
        for name in sorted(used_names(waiting.pop())):
            value = vars(module).get(name)
            if name in seen or value is None:
                continue
            seen.add(name)
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                helpers.append(definition(value))
                waiting.append(value)
                continue
            if vars(chapter).get(name) is value:  # the chapter's own, which every answer finds
                continue
            line, from_given = as_helper(name, value)
            helpers.insert(0, line)
            given |= from_given
    return Source(text, "\n".join([given_modules() if given else "", *helpers]))


def as_helper(name, value):
    """(a line that defines a name of a grader's module in a helpers cell, whether it needs the graders' modules)"""
    if inspect.ismodule(value):
        own = value.__name__.removeprefix("lowprec_lab.graders.")
        return (f"{name} = _GIVEN['given_{own}']", True) if own in GIVEN else (f"import {own} as {name}", False)
    own = getattr(value, "__module__", "").removeprefix("lowprec_lab.graders.")
    if callable(value) and own in GIVEN:
        return f"{name} = _GIVEN['given_{own}'].{value.__name__}", True
    if callable(value):
        return f"from {value.__module__} import {value.__name__} as {name}", False
    return (f"{name} = float({str(value)!r})" if isinstance(value, float) else f"{name} = {value!r}"), False


def definition(function):
    text = inspect.getsource(function)
    return textwrap.dedent(text[re.search(rf"(def|class) {function.__name__}\(", text).start() :])


def used_names(function):
    if inspect.isclass(function):
        names = ast.walk(ast.parse(definition(function)))
        return {each.id for each in names if isinstance(each, ast.Name)}
    codes, found = [function.__code__], set()
    while codes:
        code = codes.pop()
        found |= set(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return found


def said(verdict):
    """All that a verdict says of an answer, but how long it took."""
    found = verdict.as_dict()
    found["notes"] = [note for note in found["notes"] if not note.startswith("The check took")]
    return found


# --- the same verdict everywhere --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [blank.name for blank in in_order()])
def test_the_reference_gets_the_same_verdict(name, workers):
    source = reference_source(name)
    verdict = judge(BLANKS[name], {name: source}, workers)
    assert verdict.passed, verdict.text()
    assert verdict.points == verdict.max_points
    assert said(verdict) == said(in_notebook(name, source)) == said(judge_source(BLANKS[name], source, {name: source}))


# The rest of an exercise's take the same way as these; what is said of them in the notebook is looked at below.
IN_SANDBOX = [wrong for name in NAMES for wrong in MISCONCEPTIONS[name][:3]]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", IN_SANDBOX, ids=label)
def test_a_misconception_gets_the_same_verdict(wrong, workers):
    name, source = wrong.exercise, standing_alone(wrong)
    verdict = judge(BLANKS[name], {name: source}, workers)
    assert not verdict.passed
    assert said(verdict) == said(in_notebook(name, source))
    if wrong is MISCONCEPTIONS[name][0]:  # a terminal loads an answer in its own way, and then goes the same one
        assert said(verdict) == said(judge_source(BLANKS[name], source, {name: source}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nine_in_ten_misconceptions_are_named_and_none_falsely(name):
    """In the notebook, of an answer with the misconception's text."""
    named = 0
    for wrong in MISCONCEPTIONS[name]:
        verdict = in_notebook(name, standing_alone(wrong))
        assert not verdict.passed
        original = verdict_on(wrong)  # of the function itself, nobody having looked for its name
        assert (verdict.level, verdict.points, verdict.rows) == (original.level, original.points, original.rows)
        assert verdict.misconception in ("", wrong.function.__name__)
        assert not verdict.misconception or verdict.sentences[0] == wrong.sentence
        named += bool(verdict.misconception)
    assert named >= 0.9 * len(MISCONCEPTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: f"{other.exercise}-{other.label}")
def test_another_right_answer_gets_the_same_verdict(other, workers):
    name, source = other.exercise, other.source
    verdict = judge(BLANKS[name], {name: source}, workers)
    assert verdict.passed, verdict.text()
    assert said(verdict) == said(in_notebook(name, source)) == said(judge_source(BLANKS[name], source, {name: source}))


ODD = {
    "an exception": "def decode(codes, fmt):\n    return codes.nothing",
    "an exception with a long text": "def decode(codes, fmt):\n    raise ValueError('word ' * 200)",
    "an exception in torch": "def decode(codes, fmt):\n    return torch.stack([codes, codes[:1]])",
    "an exception of its own": (
        "class Lie(Exception):\n    def __str__(self):\n        return 1 / 0\n"
        "def decode(codes, fmt):\n    raise Lie('x')"
    ),
    "an assertion": "def decode(codes, fmt):\n    assert False",
    "exit": "def decode(codes, fmt):\n    exit()",
    "an endless recursion": "def decode(codes, fmt):\n    return decode(codes, fmt)",
    "nothing": "def decode(codes, fmt):\n    pass",
    "an array": "def decode(codes, fmt):\n    return codes.double().numpy()",
    "a numpy number": "def decode(codes, fmt):\n    return np.float64(1)",
    "a list": "def decode(codes, fmt):\n    return codes.tolist()[:9]",
    "a tuple": "def decode(codes, fmt):\n    return codes, codes",
    "a function": "def decode(codes, fmt):\n    return print",
    "a subclass of Tensor": "def decode(codes, fmt):\n    return torch.nn.Parameter(codes.double())",
    "another dtype": "def decode(codes, fmt):\n    return codes.float()",
    "another shape": "def decode(codes, fmt):\n    return codes.double().reshape(-1, 1)",
    "a changed input": "def decode(codes, fmt):\n    codes.add_(1)\n    return codes.double()",
    "much memory": "def decode(codes, fmt):\n    return torch.ones(2**35)",
    "printing": "def decode(codes, fmt):\n    print('code', codes.numel())\n    return codes.double()",
    "the format's dtype": (
        "def decode(codes, fmt):\n    if fmt.torch_dtype is None:\n        return codes.double()\n"
        "    return torch.full(codes.shape, torch.finfo(fmt.torch_dtype).max, dtype=torch.float64)"
    ),
    "a later exercise": "def decode(codes, fmt):\n    return ulp(codes, fmt)",
    "a name that is not there": "def decode(codes, fmt):\n    return helper(codes)",
    "a syntax error": "def decode(codes, fmt)\n    return codes",
    "no such function": "def decod(codes, fmt):\n    return codes",
    "an exception at the top": "TABLE = {}['x']\ndef decode(codes, fmt):\n    return codes",
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_an_odd_answer_gets_the_same_verdict(text, workers):
    source = Source(text)
    verdict = judge(BLANKS["decode"], {"decode": source}, workers)
    assert verdict.points == 0
    assert said(verdict) == said(judge_source(BLANKS["decode"], source, {"decode": source}))


def test_what_is_printed_is_told_as_in_the_notebook(workers):
    verdict = judge(BLANKS["decode"], {"decode": Source(ODD["printing"])}, workers)
    assert any("your code printed: code" in note for note in verdict.notes)


def test_an_answer_that_is_not_there_and_all_of_a_chapter(workers):
    sources = {name: reference_source(name) for name in ("bit_pattern", "split_fields")}
    verdicts = judge_all(sources, "01_bit_layouts", workers)
    assert list(verdicts) == [blank.name for blank in in_order() if blank.chapter.name == "01_bit_layouts"]
    assert [name for name, verdict in verdicts.items() if verdict.passed] == list(sources)
    assert verdicts["decode"].level == "unwritten"


def test_the_inputs_are_drawn_from_the_judges_seed(workers):
    wrong = Source("def bit_pattern(x):\n    return x.view(torch.int32) + 1")
    seen = [str(judge(BLANKS["bit_pattern"], {"bit_pattern": wrong}, workers, seed=seed).rows) for seed in (1, 1, 2)]
    assert seen[0] == seen[1] != seen[2]


def test_plain_processes_say_the_same():
    with PlainProcesses() as plain:
        right = judge(BLANKS["sign_bit"], {"sign_bit": reference_source("sign_bit")}, plain)
        wrong = judge(BLANKS["sign_bit"], {"sign_bit": Source("def sign_bit(x):\n    return (x < 0).int()")}, plain)
    assert right.passed
    assert wrong.misconception == "is_negative"


# --- time -------------------------------------------------------------------------------------------------------------


def test_time_for_an_exercise_is_up_whatever_its_checks_and_names_still_want(workers):
    text = "import time\ndef sign_bit(x):\n    time.sleep(0.4)\n    return x.int()"
    verdict = judge(BLANKS["sign_bit"], {"sign_bit": Source(text)}, workers, limit_s=1.0)
    assert verdict.points == 0
    assert "It was stopped after 1 s" in verdict.text()


def test_an_endless_loop_gets_the_same_verdict(monkeypatch, workers):
    monkeypatch.setattr(run.run_checks, "__kwdefaults__", {**run.run_checks.__kwdefaults__, "limit_s": 0.5})
    source = Source("def sign_bit(x):\n    while True:\n        pass")
    verdict = judge(BLANKS["sign_bit"], {"sign_bit": source}, workers)
    assert "It was stopped after 0.5 s" in verdict.text()
    assert said(verdict) == said(judge_source(BLANKS["sign_bit"], source, {"sign_bit": source}))


def test_an_answer_that_does_not_load_in_time_is_not_judged(monkeypatch, workers):
    monkeypatch.setattr(judge_module, "_LOAD_LIMIT_S", 0.5)
    text = "import time\nTIME = time.sleep(30)\ndef sign_bit(x):\n    return x.int()"
    verdict = judge(BLANKS["sign_bit"], {"sign_bit": Source(text)}, workers)
    assert (verdict.headline, verdict.points) == ("could not be loaded", 0)


# --- replies that lie -------------------------------------------------------------------------------------------------


class Scripted:
    """A worker that gives these replies, whatever it is asked."""

    def __init__(self, *replies):
        self.replies, self.killed = list(replies), 0
        self.channel = None

    def worker(self):
        return self

    def kill(self):
        self.killed += 1
        return ""


@pytest.fixture
def scripted(monkeypatch):
    def make(*replies):
        script = Scripted({"ok": None, "printed": ""}, *replies)
        monkeypatch.setattr(wire, "send", lambda channel, value, deadline=None: None)
        monkeypatch.setattr(wire, "receive", lambda channel, deadline=None: script.replies.pop(0))
        answer = RemoteAnswer(script, BLANKS["sign_bit"], Source(""), {})
        answer.load()
        return answer

    return make


@pytest.mark.parametrize(
    "reply",
    [None, 3, "ok", [], {}, {"ok": 1}, {"printed": ""}, {"printed": 3, "ok": 1}, {"failed": 3, "printed": ""},
     {"failed": ("exception", "x"), "printed": ""}, {"failed": (1, 2, 3), "printed": ""},
     {"failed": ["exception", "a", "b"], "printed": ""}],
)  # fmt: skip
def test_what_is_no_reply_is_a_failure(scripted, reply):
    with pytest.raises(AnswerFailed, match="no reply"):
        scripted(reply).elsewhere("call", (), {})


@pytest.mark.parametrize(
    "result",
    [None, (), ((), (), ()), [(), ()], ((torch.zeros(1),), [None]), ((1.0,), (None,)), ((torch.zeros(1),), (2,))],
)
def test_gradients_are_tensors_or_a_failure(scripted, result):
    with pytest.raises(AnswerFailed, match="no reply"):
        scripted({"ok": result, "printed": ""}).elsewhere("differentiate", (), {}, ())


def test_an_object_is_a_number(scripted):
    with pytest.raises(AnswerFailed, match="no reply"):
        scripted({"ok": torch.zeros(9), "printed": ""}).elsewhere("build", (), {})


def test_texts_of_a_failure_are_cut_and_cleaned(scripted):
    sentence = "\x1b[31mred\u202e" + "x" * 10_000
    with pytest.raises(AnswerFailed) as caught:
        scripted({"failed": ("passed", sentence, "y" * 999), "printed": ""}).elsewhere("call", (), {})
    assert caught.value.kind == "exception"
    assert "\x1b" not in caught.value.sentence
    assert "\u202e" not in caught.value.sentence
    assert len(caught.value.sentence) <= 400
    assert len(caught.value.where) <= 200


def test_what_is_printed_while_an_answer_loads_is_not_shown(scripted, capsys):
    scripted({"ok": 1, "printed": "\x1b[2Jhello"}).elsewhere("call", (), {})
    assert capsys.readouterr().out.strip() == "[2Jhello"


# --- answers with a state, and with gradients -------------------------------------------------------------------------

INVENTED_CHAPTER = '''
"""A chapter that only tests have."""

from torch import Tensor

from lowprec_lab.blanks import blank


@blank(exercise="90.1", points=2)
class Scaler:
    """A loss scaler."""

    def __init__(self, scale: float) -> None: ...

    def update(self, overflow: bool) -> float: ...

    def scaled(self, loss: Tensor) -> Tensor: ...


@blank(exercise="90.2", points=2)
def clipped(x: Tensor, limit: float) -> Tensor:
    """x, cut at +-limit; the gradient passes everywhere (straight through)."""
'''

SCALER = """
class Scaler:
    def __init__(self, scale):
        self.scale, self.good = scale, 0

    def update(self, overflow):
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.scale = self.scale / 2
        elif self.good == 3:
            self.scale, self.good = self.scale * 2, 0
        return self.scale

    def scaled(self, loss):
        return loss * self.scale
"""
NEVER_GROWS = SCALER.replace("self.good == 3", "self.good == 99")
RAISES = SCALER.replace("return loss * self.scale", "return self.missing")
NO_METHOD = SCALER.replace("def scaled", "def other")

CLIPPED = """
class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def clipped(x, limit):
    return _Clip.apply(x, limit)
"""
ZERO_OUTSIDE = "def clipped(x, limit):\n    return x.clamp(-limit, limit)"
DETACHED = "def clipped(x, limit):\n    return x.detach().clamp(-limit, limit)"


def follows_a_script(answer, case):
    """Ten steps, with an overflow in the fourth."""
    scaler = answer.build(1024.0)
    for step in range(10):
        want = [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 4096.0][step]
        case.same_bits(scaler.update(step == 3), want)
    loss = torch.tensor([1.5, -2.0])
    case.same_bits(scaler.scaled(loss), loss * 4096.0)


def two_do_not_share(answer, case):
    """Two scalers, one after the other."""
    first, second = answer.build(4.0), answer.build(8.0)
    first.update(True)
    case.same_bits(second.update(True), 4.0)
    case.same_bits(first.update(True), 1.0)


def values_and_gradients(answer, case):
    """Numbers on both sides of the limit."""
    x = torch.tensor([-3.0, -1.0, 0.5, 2.0, 7.0])
    outputs, gradients = answer.differentiate(x, 2.0, gradients=(torch.arange(5.0),))
    case.same_bits(outputs[0], x.clamp(-2, 2))
    case.same_bits(gradients[0], torch.arange(5.0))


@pytest.fixture(scope="module")
def invented_package(tmp_path_factory):
    """A copy of the package with one more chapter, for the sandbox to show."""
    package = tmp_path_factory.mktemp("package") / "lowprec_lab"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "invented.py").write_text(INVENTED_CHAPTER)
    text = (package / "chapters.py").read_text()
    line = '    Chapter("90_invented", "invented", "Is it there?"),\n)\n'
    (package / "chapters.py").write_text(text.replace("\n)\n", "\n" + line, 1))
    return package


@pytest.fixture(scope="module")
def invented_workers(invented_package):
    with open_sandbox(package=invented_package) as sandbox:
        yield sandbox


@pytest.fixture
def invented(invented_package, monkeypatch):
    """The same chapter in this process."""
    name = "lowprec_lab.invented"
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    more = (*chapters.CHAPTERS, chapters.Chapter("90_invented", "invented", "Is it there?"))
    for where in (chapters, blanks):
        monkeypatch.setattr(where, "CHAPTERS", more)
    before = dict(BLANKS)
    exec(compile(INVENTED_CHAPTER, str(invented_package / "invented.py"), "exec"), module.__dict__)
    for exercise, checks in (("Scaler", (follows_a_script, two_do_not_share)), ("clipped", (values_and_gradients,))):
        monkeypatch.setitem(CHECKS, exercise, [Check(exercise, check, 1.0) for check in checks])
        monkeypatch.setitem(MISCONCEPTIONS, exercise, [])
    yield
    BLANKS.clear()
    BLANKS.update(before)


@pytest.mark.parametrize(
    ("name", "text", "points"),
    [
        ("Scaler", SCALER, 2.0),
        ("Scaler", NEVER_GROWS, 1.0),
        ("Scaler", RAISES, 1.0),
        ("clipped", CLIPPED, 2.0),
        ("clipped", ZERO_OUTSIDE, 0.0),
        ("clipped", DETACHED, 0.0),
    ],
    ids=["scaler", "never-grows", "raises", "clipped", "zero-outside", "detached"],
)
def test_states_and_gradients_are_judged_the_same_here_and_there(name, text, points, invented, invented_workers):
    source = Source(text)
    there = judge(BLANKS[name], {name: source}, invented_workers)
    here = grade(BLANKS[name], load(source, BLANKS[name], reference, f"answer: {name}"))
    assert there.points == here.points == points, there.text()
    assert said(there) == said(here)


def test_a_method_that_is_not_there_is_the_answers_failure(invented, invented_workers):
    verdict = judge(BLANKS["Scaler"], {"Scaler": Source(NO_METHOD)}, invented_workers)
    assert not verdict.passed
    assert "AttributeError" in verdict.text()
