"""The doctor: what it says of machines that are not here, and that it says something true of this one."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from lowprec_lab import data, devices
from lowprec_lab.devices import CANNOT, EMULATED, MISSING, NATIVE, NOTE, OK, Machine, diagnose, doctor
from lowprec_lab.exercises import AnswerError

LAPTOP = Machine(
    python=(3, 12, 4),
    torch="2.13.0+cpu",
    system="Linux",
    processor="x86_64",
    cores=8,
    memory_bytes=16 * 2**30,
    cpu_flags=frozenset({"avx2", "f16c"}),
    compilers={"c": "/usr/bin/cc", "c++": "/usr/bin/g++"},
)
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8 e4m3", "fp8 e5m2")
PRODUCTS = ("fp8 tensorwise", "fp8 rowwise")


def gpu(major, minor):
    return replace(
        LAPTOP,
        torch="2.13.0+cu130",
        accelerator="cuda",
        device_name="a GPU",
        device_count=1,
        device_memory_bytes=24 * 2**30,
        capability=(major, minor),
        triton=True,
    )


def statuses(machine):
    report = diagnose(machine)
    return tuple(report.status_of(topic) for topic in PRECISIONS)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (LAPTOP, (NATIVE, CANNOT, EMULATED, EMULATED, EMULATED, EMULATED)),
        (gpu(6, 1), (NATIVE, CANNOT, EMULATED, EMULATED, EMULATED, EMULATED)),
        (gpu(7, 5), (NATIVE, CANNOT, EMULATED, NATIVE, EMULATED, EMULATED)),
        (gpu(8, 0), (NATIVE, NATIVE, NATIVE, NATIVE, EMULATED, EMULATED)),
        (gpu(8, 6), (NATIVE, NATIVE, NATIVE, NATIVE, EMULATED, EMULATED)),
        (gpu(8, 9), (NATIVE, NATIVE, NATIVE, NATIVE, NATIVE, NATIVE)),
        (gpu(9, 0), (NATIVE, NATIVE, NATIVE, NATIVE, NATIVE, NATIVE)),
        (gpu(10, 0), (NATIVE, NATIVE, NATIVE, NATIVE, NATIVE, NATIVE)),
        (gpu(12, 0), (NATIVE, NATIVE, NATIVE, NATIVE, NATIVE, NATIVE)),
        (
            replace(LAPTOP, system="Darwin", processor="arm64", accelerator="mps", device_count=1),
            (NATIVE, CANNOT, NATIVE, NATIVE, EMULATED, EMULATED),
        ),
        (
            replace(gpu(9, 4), accelerator="rocm", capability=None, architecture="gfx942"),
            (NATIVE, NATIVE, NATIVE, NATIVE, NATIVE, NATIVE),
        ),
        (
            replace(gpu(9, 0), accelerator="rocm", capability=None, architecture="gfx90a"),
            (NATIVE, CANNOT, NATIVE, NATIVE, EMULATED, EMULATED),
        ),
    ],
    ids=["none", "6.1", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "mps", "gfx942", "gfx90a"],
)
def test_each_precision(machine, expected):
    assert statuses(machine) == expected


def test_the_reason_names_the_capability_there_is_and_the_one_it_takes():
    by_topic = {line.topic: line.reason for line in diagnose(gpu(8, 6)).precisions}
    assert "8.6" in by_topic["fp8 e4m3"]
    assert "8.9" in by_topic["fp8 e4m3"]


def test_block_scaling_is_promised_from_10_0_only():
    def promised(machine):
        return any("MXFP8" in line.reason for line in diagnose(machine).precisions)

    assert promised(gpu(10, 0))
    assert not promised(gpu(9, 0))


def test_fnuz_is_named_on_the_gpu_that_has_it():
    machine = replace(gpu(9, 4), accelerator="rocm", capability=None, architecture="gfx942")
    assert "fnuz" in next(line.reason for line in diagnose(machine).precisions if line.topic == "fp8 e4m3")


@pytest.mark.parametrize(
    ("processor", "flags", "bf16", "fp16", "named"),
    [
        ("x86_64", {"avx512_bf16"}, NATIVE, EMULATED, "AVX512_BF16"),
        ("x86_64", {"avx512_bf16", "amx_bf16", "avx512_fp16"}, NATIVE, NATIVE, "AMX-BF16"),
        ("x86_64", {"avx2"}, EMULATED, EMULATED, "AVX512_BF16"),
        ("aarch64", {"asimd", "asimdhp", "bf16"}, NATIVE, NATIVE, "FEAT_BF16"),
        ("aarch64", {"asimd"}, EMULATED, EMULATED, "FEAT_BF16"),
        ("x86_64", set(), EMULATED, EMULATED, "not known"),
    ],
)
def test_16_bits_on_a_cpu_depend_on_its_instructions(processor, flags, bf16, fp16, named):
    report = diagnose(replace(LAPTOP, processor=processor, cpu_flags=frozenset(flags)))
    assert (report.status_of("bf16"), report.status_of("fp16")) == (bf16, fp16)
    assert named in next(line.reason for line in report.precisions if line.topic == "bf16")


@pytest.mark.parametrize(
    ("change", "topic", "status", "says"),
    [
        ({}, "torch.compile", OK, "g++"),
        ({"compilers": {"c": None, "c++": None}}, "torch.compile", NOTE, "eagerly"),
        ({"compilers": {"c": None, "c++": None}}, "c compiler", NOTE, "apt-get install g++"),
        ({"compilers": {}, "system": "Darwin"}, "c compiler", NOTE, "xcode-select"),
        ({"compilers": {}, "system": "Windows"}, "c compiler", NOTE, "Visual Studio"),
        ({"python_headers": False}, "torch.compile", NOTE, "python3-dev"),
        ({"memory_bytes": 2 * 2**30}, "memory", NOTE, "2.0 GiB"),
        ({"memory_bytes": None}, "memory", NOTE, "does not say"),
        ({"cores": 1}, "cores", NOTE, "1 for this process"),
        ({"nvidia_driver": True}, "gpu", NOTE, "cannot use it"),
        ({"training_text": "/home/me/text.txt"}, "training text", OK, "/home/me/text.txt"),
        ({}, "training text", NOTE, "1.1 MB"),
        ({"python": (3, 10, 2)}, "python", MISSING, "3.11"),
        ({"torch": "2.4.1"}, "torch", MISSING, "2.11"),
        ({"torch": "2.11.0a0+git1234"}, "torch", OK, "2.11"),
    ],
)
def test_each_fact(change, topic, status, says):
    report = diagnose(replace(LAPTOP, **change))
    line = next(line for line in report.facts if line.topic == topic)
    assert line.status == status
    assert says in line.reason
    assert report.healthy == (status != MISSING)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"triton": False}, "Triton is missing"),
        ({"compilers": {"c": None, "c++": None}}, "C compiler"),
        ({"capability": (6, 1)}, "7.0"),
    ],
)
def test_torch_compile_on_a_gpu_needs_triton_and_a_compiler(change, says):
    good, bad = diagnose(gpu(8, 9)), diagnose(replace(gpu(8, 9), **change))
    assert good.status_of("torch.compile") == OK
    assert says in next(line.reason for line in bad.facts if line.topic == "torch.compile")
    assert bad.status_of("torch.compile") == NOTE


def test_torch_without_8_bit_dtypes_cannot_run_them():
    report = diagnose(replace(gpu(9, 0), float8=False))
    assert report.status_of("fp8 e4m3") == CANNOT
    assert not report.healthy


def test_several_gpus_are_counted():
    gpus = next(line.reason for line in diagnose(replace(gpu(9, 0), device_count=8)).facts if line.topic == "gpu")
    assert gpus.startswith("8 x ")


def test_the_report_of_this_machine_in_its_three_forms():
    report = doctor()
    as_json = json.loads(json.dumps(report.to_dict()))
    lines = as_json["facts"] + as_json["precisions"]
    assert [line["topic"] for line in as_json["precisions"]] == [*PRECISIONS, *PRODUCTS]
    assert as_json["healthy"]
    for line in lines:
        assert line["status"] in (OK, NOTE, MISSING, NATIVE, EMULATED, CANNOT)
        assert line["reason"]
        assert line["reason"] in str(report)
    assert repr(report) == str(report)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [(LAPTOP, EMULATED), (gpu(8, 6), EMULATED), (gpu(8, 9), NATIVE), (gpu(9, 0), NATIVE)],
)
def test_where_products_run_is_what_matmul_for_says(machine, expected):
    report = diagnose(machine, devices._matmul_for())
    assert [report.status_of(topic) for topic in PRODUCTS] == [expected, expected]
    assert "matmul_for (exercise 9.6)" in str(report)
    rowwise_alone = diagnose(machine, (lambda capability, kind: {"rowwise": "hardware"}[kind], "yours"))
    assert [rowwise_alone.status_of(topic) for topic in PRODUCTS] == [EMULATED, NATIVE]
    assert "yours, which raised KeyError" in str(rowwise_alone)


def test_without_any_matmul_for_the_report_has_no_line_on_products(monkeypatch):
    def nothing(name):
        raise AnswerError(f"{name} is not written yet")

    monkeypatch.setattr("lowprec_lab.exercises.supply", nothing)
    assert not any(topic in str(doctor()) for topic in PRODUCTS)


def test_the_html_survives_an_untrusted_notebook():
    page = diagnose(replace(LAPTOP, training_text="/tmp/<b>&.txt"))._repr_html_()
    assert not re.search(r"<(style|svg|script|b)\b|class=|aria-|role=", page)
    assert "/tmp/&lt;b&gt;&amp;.txt" in page


def test_an_unknown_topic_lists_the_topics():
    with pytest.raises(KeyError, match="fp8 e4m3"):
        diagnose(LAPTOP).status_of("fp4")


def test_flags_are_read_from_linux_and_macos():
    assert devices._flags_in("processor\t: 0\nflags\t\t: fpu AVX2 avx512_bf16\n") == {"fpu", "avx2", "avx512_bf16"}
    assert devices._flags_in("Features\t: fp asimd bf16\n") == {"fp", "asimd", "bf16"}
    assert devices._flags_in("no flags here\n") == frozenset()
    found = devices._flags_in_sysctl("hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_FP16: 0\n")
    assert found == {"bf16"}


def test_a_gpu_older_than_the_build_of_torch_is_not_used(monkeypatch):
    monkeypatch.setattr(devices.torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "sm_100", "compute_120"])
    assert devices._oldest_capability() == (7, 5)
    monkeypatch.setattr(devices.torch.cuda, "get_arch_list", list)
    assert devices._oldest_capability() == (0, 0)


def test_the_training_text_is_found_where_lowprec_data_says(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPREC_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert devices.cached_training_text() is None
    (tmp_path / data.SHAKESPEARE).write_text("First Citizen:")
    assert devices.cached_training_text() == str(tmp_path / data.SHAKESPEARE)


def test_it_imports_with_torch_and_numpy_alone():
    """In a Python that refuses everything else that is installed next to them."""
    code = """
import sys
FORBIDDEN = {"matplotlib", "IPython", "ipywidgets", "anywidget", "pooch", "tqdm", "nbgrader", "torchao", "filelock"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FORBIDDEN:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import lowprec_lab.devices
print(lowprec_lab.devices.Machine.__name__)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "Machine\n", result.stderr
