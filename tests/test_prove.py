"""The proof: right rounders hold, one wrong input is found and shown, and a run that was stopped goes on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lowprec_lab import __main__ as cli
from lowprec_lab import fused, prove
from lowprec_lab.formats import BF16, E2M1, E4M3, E4M3FNUZ, E5M2, E8M0, FP16, FP32, TF32, Format
from lowprec_lab.graders import rounding_oracle

ONE = 0x3F800000  # the bits of 1.0
AROUND_ONE = range(ONE - 2**16, ONE + 2**16)
ENDS = [range(2**12), range(0x7F800000 - 2**11, 0x7F800000 + 2**11), range(2**31 - 2**11, 2**31 + 2**11),
        range(0xFF800000 - 2**11, 0xFF800000 + 2**11), range(2**32 - 2**11, 2**32)]  # fmt: skip


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPREC_WORK", str(tmp_path / "work"))
    return tmp_path / "work"


def eager(x, fmt, mode="nearest_even", overflow="saturate"):
    return fused.round_(x, fmt, None, mode, overflow)


def wrong_at(bits, value):
    """A right rounder but for the one input with these bits."""

    def rounder(x, fmt):
        at = x.view(torch.int32) == (bits if bits < 2**31 else bits - 2**32)
        return torch.where(at, value, fused.round_(x, fmt))

    return rounder


def test_a_right_rounder_holds():
    proof = prove.prove(E4M3, function=eager, limit=AROUND_ONE, progress=False)
    assert proof.holds
    assert proof.first is None
    assert proof.inputs == 2**17
    assert "0 differences on 131,072 inputs" in str(proof)
    assert "exact oracle: nearest_even, saturate" in str(proof)


@pytest.mark.parametrize("limit", ENDS, ids=lambda limit: f"{limit.start:#x}")
@pytest.mark.parametrize(
    "fmt", [E4M3, E5M2, E4M3FNUZ, BF16, FP16, E8M0, E2M1, Format("own", 4, 2, subnormals=False)], ids=str
)
def test_ends_of_the_range_under_every_mode(fmt, limit):
    for mode in fused.MODES:
        for overflow in ["saturate"] + ["to_special"] * (fmt.specials != "finite"):
            assert prove.prove(fmt, mode, overflow, function=eager, limit=limit, progress=False).holds, (mode, overflow)


@pytest.mark.parametrize("bits", [ONE + 3, ONE + 2**32 // 2, 0x7F800000, 0])
def test_one_wrong_input_is_found_and_shown(bits):
    limit = range(max(0, bits - 70_000), bits + 70_000)
    proof = prove.prove(E4M3, function=wrong_at(bits, 1.125), limit=limit, progress=False)
    assert proof.differences == 1
    assert proof.first.input == bits
    text = str(proof)
    assert "1 difference on" in text
    assert f"{prove._value(bits)!r}" in text
    assert "yours  1.125" in text
    assert "0 0111 001" in text
    assert "^" in text
    assert "first difference" in proof._repr_mimebundle_()["text/html"]


def test_the_input_can_be_made_again():
    proof = prove.prove(E4M3, function=wrong_at(0xBF800001, 2.0), limit=range(0xBF800000, 0xBF800010), progress=False)
    made = eval(proof.verdict.try_it, {"torch": torch})
    assert made.view(torch.int32).item() % 2**32 == 0xBF800001


def test_a_result_that_is_no_value_of_the_format_is_shown_as_float32():
    text = str(prove.prove(E4M3, function=wrong_at(ONE, 1.01), limit=range(ONE, ONE + 8), progress=False))
    assert "0 01111111 00000010100011110101110" in text


def test_every_difference_is_counted_and_the_first_has_the_smallest_bits():
    def ties_away(x, fmt):
        return rounding_oracle.round_to(x, fmt, "nearest_away")

    limit = range(ONE, ONE + 2**23)  # from 1 to 2: of 8 ties 4 go to the even value above anyway
    proof = prove.prove(E4M3, function=ties_away, limit=limit, progress=False)
    assert proof.differences == 4
    assert prove._value(proof.first.input) == 1.0625


def test_nan_has_to_stay_nan_whatever_its_bits():
    limit = range(0x7F800001, 0x7F800100)
    assert prove.prove(E4M3, function=lambda x, fmt: x * torch.nan, limit=limit, progress=False).holds
    proof = prove.prove(E4M3, function=lambda x, fmt: x * 0 + 1, limit=limit, progress=False)
    assert proof.holds  # NaN * 0 is NaN
    proof = prove.prove(E4M3, function=lambda x, fmt: torch.ones_like(x), limit=limit, progress=False)
    assert proof.differences == len(limit)


def test_the_sign_of_zero_counts():
    proof = prove.prove(E4M3, function=lambda x, fmt: x * 0, limit=range(2**31, 2**31 + 4), progress=False)
    assert proof.holds
    proof = prove.prove(
        E4M3, function=lambda x, fmt: torch.zeros_like(x), limit=range(2**31, 2**31 + 4), progress=False
    )
    assert proof.differences == 4


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M3FNUZ, BF16, FP16], ids=str)
@pytest.mark.parametrize("limit", ENDS, ids=lambda limit: f"{limit.start:#x}")
def test_against_torch(fmt, limit):
    """With the policy that the installed torch has for the format, found out by trying."""
    proof = prove.prove(fmt, against="torch", function=eager, limit=limit, progress=False)
    assert proof.holds, str(proof)
    beyond = torch.tensor([1e38 if fmt != BF16 else 3.4e38]).to(fmt.torch_dtype).float()
    assert proof.overflow == ("saturate" if beyond.isfinite() else "to_special")


def test_against_ml_dtypes():
    pytest.importorskip("ml_dtypes")
    above = range(0x43E00000, 0x43F00000)  # from 448 on
    assert prove.prove(E4M3, against="ml_dtypes", function=eager, limit=above, progress=False).holds
    proof = prove.prove(E4M3, "nearest_even", "saturate", "ml_dtypes", function=eager, limit=above, progress=False)
    assert prove._value(proof.first.input) == pytest.approx(464.00003)
    assert "ml_dtypes" in str(proof)


def test_a_learners_function_with_out_or_with_a_mode():
    limit = range(ONE, ONE + 1000)

    def with_mode(x, fmt, mode="nearest_even", overflow="saturate"):
        return rounding_oracle.round_to(x, fmt, mode, overflow)

    assert prove.prove(E4M3, "up", function=with_mode, limit=limit, progress=False).holds
    with pytest.raises(ValueError, match="no parameter for mode='up'"):
        prove.prove(E4M3, "up", function=lambda x, fmt: x, limit=limit, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fmt": "float9"}, "no format is called"),
        ({"mode": "nearest"}, "no such mode"),
        ({"against": "numpy"}, "against is one of"),
        ({"against": "torch", "mode": "up"}, "no other mode"),
        ({"fmt": E2M1, "against": "torch"}, "torch has no dtype"),
        ({"fmt": TF32, "against": "torch"}, "torch has no dtype"),
        ({"fmt": FP32}, "compare it to torch"),
        ({"fmt": E2M1, "overflow": "to_special"}, "no special value"),
        ({"limit": 2**33}, "limit is a number"),
        ({"limit": range(0, 10, 2)}, "step 1"),
        ({"function": "decode_it"}, "no exercise is called"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        prove.prove(**{"fmt": E4M3, "progress": False, "limit": 10} | options)


def test_threads_are_as_before():
    before = torch.get_num_threads()
    prove.prove(E4M3, function=eager, limit=10, progress=False)
    assert torch.get_num_threads() == before


# stopped and resumed


def files(work):
    return sorted(path.name for path in (work / "runs").glob("*.json")) if (work / "runs").is_dir() else []


def test_an_interrupt_keeps_what_was_finished(work, monkeypatch):
    monkeypatch.setattr(prove, "_BLOCK", 2**12)
    limit = range(ONE, ONE + 2**18)
    wrong = wrong_at(ONE + 5, 2.0)
    add, seen = prove._State.add, []

    def interrupted(self, block, found):
        add(self, block, found)
        seen.append(block)
        if len(seen) == 10:
            raise KeyboardInterrupt

    monkeypatch.setattr(prove._State, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prove.prove(E4M3, function=wrong, limit=limit, progress=False)
    assert len(files(work)) == 1
    monkeypatch.setattr(prove._State, "add", add)
    proof = prove.prove(E4M3, function=wrong, limit=limit, progress=False)
    assert proof.resumed >= 10 * 2**12
    assert (proof.differences, proof.first.input) == (1, ONE + 5)
    assert "had been done" in str(proof)
    assert files(work) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"key": "another"}', b"\xff\xfe"])
def test_a_file_that_is_not_of_this_comparison_is_no_start(work, content):
    (work / "runs").mkdir(parents=True)
    (work / "runs" / "prove_float8_e4m3fn_nearest_even_saturate_oracle.json").write_bytes(content)
    proof = prove.prove(E4M3, function=eager, limit=1000, progress=False)
    assert proof.holds
    assert proof.resumed == 0


def test_another_function_does_not_go_on_where_this_one_stopped(work, monkeypatch):
    monkeypatch.setattr(prove._State, "remove", lambda self: self.save())
    prove.prove(E4M3, function=wrong_at(5, 1.0), limit=10_000, progress=False)
    proof = prove.prove(E4M3, function=lambda x, fmt: fused.round_(x, fmt), limit=10_000, progress=False)
    assert proof.resumed == 0
    assert proof.holds


def test_nothing_is_written_under_nbgrader(work, monkeypatch):
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    assert prove.prove(E4M3, function=eager, limit=1000, progress=False).holds
    assert not work.exists()


KILLED = """
import torch
from lowprec_lab import fused, prove
prove._BLOCK, prove._SAVE_EVERY_S = 2**14, 0.0
def rounder(x, fmt):
    return torch.where(x.view(torch.int32) == 0x3F800005, 2.0, fused.round_(x, fmt))
proof = prove.prove("E4M3", function=rounder, limit=range(0x3F800000, 0x3F800000 + 2**24), progress=False)
print(proof.differences, hex(proof.first.input), proof.resumed)
"""


@pytest.mark.slow
def test_killed_it_goes_on_with_the_same_verdict(work):
    environment = os.environ | {"PYTHONPATH": str(Path(prove.__file__).parents[1])}
    command = [sys.executable, "-c", KILLED]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not files(work) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert process.poll() is None, "it had finished before it could be killed"
    process.kill()
    process.wait()
    assert files(work)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    differences, first, resumed = again.stdout.split()
    assert (differences, first) == ("1", "0x3f800005")
    assert int(resumed) > 0
    assert files(work) == []


# the command


def replaced(monkeypatch, function, limit):
    """The command, on few inputs."""
    real = prove.prove

    def on_few(fmt, mode, overflow, against, _answer, progress):
        return real(fmt, mode, overflow, against, function, progress, limit)

    monkeypatch.setattr(prove, "prove", on_few)


def test_the_command(monkeypatch, capsys):
    replaced(monkeypatch, eager, AROUND_ONE)
    assert cli.main(["prove", "E5M2", "--mode", "up"]) == 0
    assert "✓ proof for float8_e5m2" in capsys.readouterr().out


def test_json(monkeypatch, capsys):
    replaced(monkeypatch, wrong_at(ONE, 1.125), AROUND_ONE)
    assert cli.main(["prove", "float8_e4m3fn", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["differences"] == 1
    assert report["first"]["input"] == {"bits": "0x3f800000", "value": "1.0"}
    assert report["first"]["got"]["value"] == "1.125"
    assert not report["holds"]


@pytest.mark.parametrize("words", [["float9"], ["E4M3", "--mode", "odd"], ["E4M3", "--against", "numpy"]])
def test_wrong_words(words, capsys):
    assert cli.main(["prove", *words]) == 2
    assert "lowprec-lab: " in capsys.readouterr().err


def test_the_core_needs_torch_and_numpy_alone():
    code = (
        "import sys\n"
        "for name in ('tqdm', 'matplotlib', 'IPython', 'nbformat', 'filelock', 'ml_dtypes', 'anywidget'):\n"
        "    sys.modules[name] = None\n"
        "import lowprec_lab.prove, lowprec_lab.fused, lowprec_lab.libraries\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(prove.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
