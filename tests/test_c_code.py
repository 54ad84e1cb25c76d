"""Answers in C: what compiles, what is guarded, and what a crash, a loop or an attack takes with it: nothing."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from sandboxes import open_sandbox

from lowprec_lab import c_code, devices
from lowprec_lab.blanks import BLANKS, load_chapters
from lowprec_lab.calls import AnswerFailed
from lowprec_lab.graders import judging
from lowprec_lab.grading import judge as judge_module
from lowprec_lab.grading.sandbox_check import check_sandbox
from lowprec_lab.grading.sandbox_view import make_view, package_files
from lowprec_lab.sources import Source

load_chapters()
needs_compiler = pytest.mark.skipif(c_code.find_compiler() is None, reason="there is no C compiler")
pytestmark = needs_compiler

UNUSED = "(void)x; (void)out; (void)blocks;"
COPY = "for (size_t i = 0; i < blocks * 32; i++) out[i] = (uint8_t)x[i];"
X = torch.arange(128, dtype=torch.float32).reshape(2, 64)


def text(body, head="", function="row"):
    return f"{head}void {function}(const float *x, uint8_t *out, size_t blocks) {{\n{body}\n}}"


def run(body, head="", x=X, **options):
    return c_code.run(text(body, head), "row", x, **{"block_bytes": 32, **options})


def said(body, head="", **options):
    with pytest.raises(AnswerFailed) as caught:
        run(body, head, **options)
    return caught.value.sentence


@pytest.mark.parametrize("sanitize", [False, True])
def test_it_writes_blocks_for_rows(sanitize):
    assert torch.equal(run(COPY, sanitize=sanitize), X.to(torch.uint8))


def test_rows_of_any_shape_and_layout():
    assert run(COPY, x=torch.ones(0, 32)).shape == (0, 32)
    assert run(COPY, x=torch.ones(32)).tolist() == [1] * 32
    turned = torch.arange(64.0).reshape(32, 2).t()
    assert torch.equal(run(COPY, x=turned), turned.to(torch.uint8))
    assert torch.equal(c_code.in_process(text(COPY), "row", block_bytes=32)(turned), turned.to(torch.uint8))


@pytest.mark.parametrize("x", [torch.ones(2, 33), torch.ones(()), torch.ones(32, dtype=torch.float64)])
def test_other_input_is_refused(x):
    with pytest.raises(ValueError, match="float32 rows whose length 32 divides"):
        run(COPY, x=x)


def test_what_is_printed_is_passed_on(capsys):
    run(COPY + ' printf("blocks: %zu\\n", blocks);')
    assert capsys.readouterr().out.strip() == "blocks: 4"


def test_a_time_is_measured():
    x = torch.ones(1000, 3200)
    assert 0 < c_code.fastest(text(COPY), "row", x, block_bytes=32) < 5


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("int y = 3;", "line 2, unused variable 'y'"),
        (UNUSED + "\nreturn 1;", "line 3, 'return' with a value"),
        (UNUSED + " int i = 0; if (i = 1) out[0] = 1;", "suggest parentheses around assignment"),
        (UNUSED + " float y = 1", "line 3, expected"),
        (UNUSED + " for (int i = 0; i < blocks; i++) out[i] = 0;", "different signedness"),
    ],
)
def test_a_warning_is_an_error_and_names_the_line(body, sentence):
    message = said(body)
    assert message.startswith("It does not compile: line ")
    assert sentence in message
    assert "/" not in message.replace("blocks/", "")
    assert len(message) < 400


def test_another_function_is_not_the_one_asked_for():
    with pytest.raises(AnswerFailed, match="there is no function row in it"):
        c_code.run(text(COPY, function="other"), "row", X, block_bytes=32)
    with pytest.raises(AnswerFailed, match="It returned int. Return C code as text"):
        c_code.run(3, "row", X, block_bytes=32)


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize(
    ("body", "ending"),
    [
        ("out[0] = (uint8_t)x[blocks * 32];", 1),
        ("out[blocks * 32] = 1;", 2),
        ("memset(out, 0, blocks * 34);", 2),
        ("((float *)x)[3] = 1;", 3),
        ("out[-1] = 0;", 5),
        ("*(volatile int *)blocks = 1;", 6),
    ],
)
def test_a_byte_that_is_not_its_own_is_named(body, ending, sanitize):
    assert said(UNUSED + body, sanitize=sanitize) == c_code.ENDINGS[ending]


def test_writing_in_front_of_the_input_is_noticed():
    assert said(UNUSED + "((float *)x)[-3] = 1;") in (c_code.ENDINGS[3], c_code.ENDINGS[4])


def test_a_recursion_without_an_end_is_a_sentence():
    head = "int deep(volatile int n);\nint deep(volatile int n) { return n ? deep(n + 1) + deep(n + 2) : 0; }\n"
    assert said(UNUSED + "out[0] = (uint8_t)deep(1);", head) == c_code.ENDINGS[6]


def test_undefined_behaviour_is_found_by_the_sanitizers():
    body = UNUSED + " int v[4]; volatile int i = 5; v[i & 7] = (int)x[0]; out[0] = (uint8_t)v[i & 3];"
    assert said(body, sanitize=True).startswith("A sanitizer stopped it: line 2: runtime error: index 5 out of bounds")
    assert "shift exponent 40" in said(UNUSED + " volatile int n = 40; out[0] = (uint8_t)(1 << n);", sanitize=True)


BY_LUCK = "for (size_t i = 0; i < blocks * 32; i++)\n out[i] = (uint8_t)-x[i];"


def test_what_is_right_by_luck_is_told_with_its_line(capsys):
    run(BY_LUCK)
    with pytest.raises(
        AnswerFailed, match="by luck: line 3, -1 is outside the range of .* 'unsigned char'. C"
    ) as caught:
        c_code.run_defined(text(BY_LUCK), "row", X, block_bytes=32)
    assert caught.value.kind == "undefined"
    assert capsys.readouterr().out == ""
    assert torch.equal(c_code.run_defined(text(COPY), "row", X, block_bytes=32), X.to(torch.uint8))


def test_a_crash_is_no_luck():
    with pytest.raises(AnswerFailed) as caught:
        c_code.run_defined(text("out[blocks * 32] = (uint8_t)x[0];"), "row", X, block_bytes=32)
    assert caught.value.sentence == c_code.ENDINGS[2]


def test_a_compiler_that_cannot_look_for_luck_compiles_all_the_same(monkeypatch):
    monkeypatch.setattr(c_code, "finds_undefined", lambda compiler: ())
    assert c_code.run_defined(text(BY_LUCK), "row", X, block_bytes=32).shape == (2, 64)
    monkeypatch.undo()
    assert c_code.finds_undefined("/no/compiler") == ()


def test_an_endless_loop_is_stopped():
    began = time.monotonic()
    with pytest.raises(AnswerFailed, match="stopped after 0.5 s") as caught:
        run(UNUSED + "for (volatile int i = 0;; i++) {}", seconds=0.5)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - began < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("exit(0);", "Return from your function; do not call exit"),
        ("exit(3);", "ended with the code 3"),
        ("abort();", "SIGABRT"),
        ("static char *volatile p; do p = malloc(1 << 26); while (p); abort();", "SIGABRT"),
    ],
)
def test_another_end_is_a_sentence(body, sentence):
    assert sentence in said(UNUSED + body)


@pytest.mark.skipif(os.name == "nt", reason="a limit of POSIX")
def test_a_file_that_it_writes_stays_empty(tmp_path):
    target = tmp_path / "file"
    body = f'{UNUSED} FILE *f = fopen("{target}", "w"); if (f) {{ fputs("more than nothing", f); fclose(f); }}'
    assert "it writes to a file" in said(body)
    assert not target.exists() or target.read_text() == ""


def test_nothing_is_left_of_what_was_compiled():
    script = (
        "import torch\nfrom lowprec_lab import c_code\n"
        f"c_code.run({text(COPY)!r}, 'row', torch.ones(32), block_bytes=32)\nprint(c_code._KEPT[0].name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip()
    assert not os.path.exists(done.stdout.strip())


def test_without_contraction_a_product_is_rounded_before_the_sum():
    """2^-24 is lost in a * a rounded to float32, and kept by a fused multiply-add."""
    body = "for (size_t i = 0; i < blocks * 32; i++) { float y = x[i] * x[i] + -1.0f; memcpy(out + 4 * i, &y, 4); }"
    x = torch.full((32,), 1 + 2**-12)
    assert torch.equal(run(body, x=x, block_bytes=128).view(torch.float32), x * x - 1)


def test_half_bits_are_those_of_torch():
    """Every float32 whose lower 12 bits are zero or around half of what float16 keeps, and a stride over all."""
    high = torch.arange(-(2**31), 2**31, 4096)
    around = torch.arange(0, 2**31, 2**13)
    bits = torch.cat([high, *(around + 4096 + offset for offset in (-1, 0, 1)), torch.arange(-(2**31), 2**31, 65537)])
    x = bits[: bits.numel() // 32 * 32].to(torch.int32).view(torch.float32)
    body = "for (size_t i = 0; i < blocks * 32; i++) { uint16_t b = half_bits(x[i]); memcpy(out + 2 * i, &b, 2); }"
    got, want = run(body, x=x, block_bytes=64).view(torch.int16), x.half()
    assert (want.isnan() == got.view(torch.float16).isnan()).all()
    assert torch.equal(got[~want.isnan()], want.view(torch.int16)[~want.isnan()])


# --- no compiler ------------------------------------------------------------------------------------------------------

IN_C = dataclasses.replace(BLANKS["sign_bit"], language="C")


@pytest.fixture
def no_compiler(monkeypatch):
    for module in (c_code, judging, judge_module):
        monkeypatch.setattr(module, "find_compiler", lambda: None)


def test_without_a_compiler_nothing_is_judged_wrong(no_compiler):
    verdict = judging.grade(IN_C, lambda: "")
    assert (verdict.level, verdict.headline) == ("unwritten", "cannot be judged on this machine")
    assert "apt-get install gcc" in verdict.text()
    with pytest.raises(c_code.CompilerMissingError, match="cannot be judged on this machine"):
        c_code.run(text(COPY), "row", X, block_bytes=32)


def test_without_a_compiler_a_class_gets_no_zeros(no_compiler):
    with pytest.raises(c_code.CompilerMissingError):
        judge_module.judge(IN_C, {"sign_bit": Source("def sign_bit(x):\n    return x")}, None)
    assert not judge_module.judge(IN_C, {}, None).passed, "what was not written deserves none"


def test_a_compiler_is_found_by_its_usual_names(tmp_path, monkeypatch):
    mine = tmp_path / "my-cc"
    mine.write_text("")
    mine.chmod(0o755)
    monkeypatch.setenv("CC", str(mine))
    assert c_code.find_compiler() == str(mine)
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    assert c_code.find_compiler() not in (None, str(mine))


def test_the_doctor_says_what_visual_c_is_good_for():
    machine = dataclasses.replace(devices.inspect_machine(), compilers={"c": "C:/VC/bin/cl.exe"})
    line = devices._c_compiler(machine)
    assert "exercises in C need gcc or clang" in str(line)


# --- in the sandbox ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers():
    with open_sandbox() as sandbox:
        yield sandbox


def in_sandbox(workers, body, head="", x=X):
    """What a C answer with this body gives in a worker: (its bytes, "") or (None, what was wrong)."""
    from sandboxes import run as ask

    code = f"return c_code.run({text(body, head)!r}, 'row', x, block_bytes=32)"
    outcome, why = ask(workers, code, x, imports="from lowprec_lab import c_code", within=60)
    assert why == ""
    failed = isinstance(outcome, tuple)
    return (None, outcome[1]) if failed else (outcome, "")


def test_the_sandbox_compiles(workers):
    assert torch.equal(in_sandbox(workers, COPY)[0], X.to(torch.uint8))
    assert {"c_code.py", "gguf_blocks.c", "c_harness.c"} <= set(package_files(c_code.HERE))


def test_the_sandbox_finds_luck(workers):
    from sandboxes import run as ask

    code = f"return c_code.run_defined({text(BY_LUCK)!r}, 'row', x, block_bytes=32)"
    outcome, _ = ask(workers, code, X, imports="from lowprec_lab import c_code", within=60)
    assert "by luck: line 3" in outcome[1]


def test_of_programs_only_the_compilers_are_there(workers):
    from sandboxes import run as ask

    bound = {target.split("/")[-1] for _, target in make_view().binds if target.startswith("/usr/bin/")}
    found, _ = ask(workers, "return tuple(os.listdir('/usr/bin'))", imports="import os")
    assert set(found) == bound
    assert bound <= {os.path.basename(c_code.find_compiler()), "as", "ld", "collect2", "cc1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "head", "sentence"),
    [
        ("out[blocks * 32] = 1;", "", c_code.ENDINGS[2]),
        ("abort();", "", "SIGABRT"),
        ("for (volatile int i = 0;; i++) {}", "", "stopped after"),
        ("", '#include "/etc/passwd"\n', "does not compile"),
        ("", '#include "/dev/zero"\n', "does not compile"),
        ("", "#include <sys/socket.h>\n" + "int a[1u << 31];\n" * 2, ""),
        ("for (int i = 0; i < 500; i++) if (fork() == 0) { sleep(3); _exit(0); }", "#include <unistd.h>\n", ""),
        ("for (int i = 0; i < 2048; i++) { char *p = malloc(1 << 20); if (p) memset(p, 1, 1 << 20); }", "", ""),
        ('FILE *f = fopen("/tmp/big", "w"); if (f) fputs("text", f);', "", ""),
    ],
)
def test_nothing_that_c_does_gets_out(workers, body, head, sentence):
    """It fails with its sentence or gives bytes; the next answer finds everything as it was."""
    outcome, message = in_sandbox(workers, UNUSED + body, head)
    assert sentence in message
    assert outcome is None or outcome.shape == (2, 64)
    assert torch.equal(in_sandbox(workers, COPY)[0], X.to(torch.uint8))


def test_c_cannot_read_what_python_cannot(workers, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("7")
    body = f'{UNUSED} FILE *f = fopen("{secret}", "r"); out[0] = f ? (uint8_t)fgetc(f) : 1;'
    assert run(body, x=torch.zeros(32))[0] == ord("7"), "this test can tell"
    assert in_sandbox(workers, body, x=torch.zeros(32))[0][0] == 1


def test_the_doctor_says_whether_c_can_be_judged():
    report = check_sandbox()
    if not report.healthy:
        pytest.skip("no sandbox here")
    assert [line.finding for line in report.lines if line.topic == "c compiler"] == [c_code.find_compiler()]
    json.dumps([dataclasses.asdict(line) for line in report.lines])


def test_arrays_of_zero_blocks():
    assert c_code.run(text(UNUSED), "row", torch.ones(3, 0), block_bytes=34).shape == (3, 0)
    assert np.array_equal(run(COPY, x=torch.zeros(1, 32)).numpy(), np.zeros((1, 32), np.uint8))
