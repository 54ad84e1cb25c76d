"""gpu-check on a machine without a GPU: a CPU stands in for one, so that every line has run before a GPU is there."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from lowprec_lab import __main__ as cli
from lowprec_lab import gpu_check, quantizer
from lowprec_lab.float8_linear import Cast
from lowprec_lab.formats import E4M3
from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.gpu_check import Check, device, products, rules, training
from lowprec_lab.gpu_check.timing import OutOfTimeError, countdown, reported, stop_after
from lowprec_lab.scaled_mm import cast_before_2_13

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PARTS = ["machine", "products", "training", "rules"]
HIDDEN = (
    "torchao", "jupytext", "nbgrader", "IPython", "ipywidgets", "anywidget", "tqdm", "matplotlib", "pooch", "dask",
    "distributed", "nbformat", "nbconvert", "jupyter_core", "ml_dtypes", "gfloat",
)  # fmt: skip
HIDES = f"""
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
hidden = {HIDDEN!r}
importlib.machinery.PathFinder.find_spec = lambda name, *more: (
    None if name.partition(".")[0] in hidden else find(name, *more)
)
"""
EAGER = device.StandIn("cpu", "a stand-in", (9, 0), (12, 9), 2**30, compiler="")
UNCOMPILED = device.StandIn("cpu", "a stand-in", (9, 0), (12, 9), 2**30, compiler="eager")


def check_of(tmp_path, seconds=60.0, **parts):
    """A Check whose parts are replaced: name -> function of (found, save, left)."""
    made = Check(EAGER, tmp_path / "report.json", seconds, tiny=True, say=lambda text: None)
    real = {part.name: part for part in made._parts()}
    nothing = {"products": lambda found, save, left: found.update(codes={}), "training": lambda found, save, left: None}
    for name, run in {**nothing, **parts}.items():
        real[name] = gpu_check._Part(name, run, real[name].share)
    made._parts = lambda: tuple(real[name] for name in PARTS)
    return made


# --- the whole command ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The command on torch and numpy alone: (its process, the report)."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(HIDES)
    environment = {
        **os.environ, gpu_check.STAND_IN: "1", "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "OMP_NUM_THREADS": "1", "LOWPREC_WORK": str(folder / "work"),
    }  # fmt: skip
    command = [sys.executable, "-m", "lowprec_lab", "gpu-check"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert (folder / "work" / "gpu-check.json").is_file(), ran.stderr
    return ran, json.loads((folder / "work" / "gpu-check.json").read_text())


def test_it_runs_on_torch_and_numpy_alone(bare):
    ran, report = bare
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert report["finished"]
    assert report["stand_in"]
    assert [(name, part["status"]) for name, part in report["parts"].items()] == [(name, "done") for name in PARTS]
    assert "gpu-check.json" in ran.stdout


def test_the_report_says_which_machine(bare):
    machine = bare[1]["parts"]["machine"]
    assert {"name", "capability", "memory_gib", "torch", "cuda", "cublas", "driver"} < set(machine)
    assert "fp8 rowwise" in [line["topic"] for line in machine["doctor"]["precisions"]]


def test_codes_and_scales_are_those_of_the_emulation(bare):
    codes = bare[1]["parts"]["products"]["codes"]
    assert len(codes) == 5
    for counts in codes.values():
        assert counts["codes"] >= 3000
        assert [counts[f"{way}_{what}"] for way in products.WAYS for what in ("codes", "scales")] == [0] * 6


def test_products_and_layers_are_next_to_the_emulated_ones(bare):
    part = bare[1]["parts"]["products"]
    assert [(each["kind"], each["shape"]) for each in part["products"]] == [
        (kind, list(shape)) for shape in products.TINY_SHAPES for kind in ("tensorwise", "rowwise")
    ]
    for each in part["products"]:
        small = 1e-6 if each["kind"] == "tensorwise" else 4e-3
        assert all(0 < each[way]["relative"] < small for way in ("fast", "slow"))
        assert each["public"] == "the same bits"
    for recipe, each in part["layers"].items():
        for way in ("eager", "compiled"):
            assert max(each[way].values()) < (1e-6 if recipe == "tensorwise" else 4e-3)


def test_training_is_compiled_once_for_all_blocks_and_compared(bare):
    model = bare[1]["parts"]["training"]["tiny"]
    for name in ("bf16", "fp8_tensorwise", "fp8_rowwise"):
        told = model["variants"][name]
        assert told["turns"] == training.TURNS
        assert told["milliseconds"] > 0
        assert told["graphs"] <= 2
        assert told["graph_breaks"] == 0
        assert 3 < told["loss"] < 5
    assert set(model["times_as_fast"]) == {"fp8_vs_bf16", "fp8_vs_bf16_rowwise"}
    assert "torchao is not installed" in model["variants"]["torchao_tensorwise"]["skipped"]


def test_what_torch_says_is_next_to_what_chapter_09_expects(bare):
    part = bare[1]["parts"]["rules"]
    assert len(part["calls"]) == sum(part["counts"].values()) >= 40
    found = {each["title"]: each for each in part["calls"]}
    assert found["H100"] == {
        "title": "H100", "verdict": rules.AGREE, "rule": "", "expected": rules.WORKS, "said": rules.WORKS,
    }  # fmt: skip
    assert found["K = 40"]["verdict"] == rules.ALLOWED_HERE  # a CPU is less strict than a GPU
    assert found["K = 40"]["rule"] == "K by 16"


def test_without_a_gpu_it_says_what_it_needs(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv(gpu_check.STAND_IN, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["gpu-check", "--json", str(tmp_path / "x.json")]) == 2
    said = capsys.readouterr().err
    assert "there is no GPU" in said
    assert "8.9" in said
    assert not (tmp_path / "x.json").exists()


def test_an_old_gpu_is_refused_by_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 6))
    with pytest.raises(gpu_check.NoGPUError, match=r"capability 8\.6"):
        gpu_check.find_gpu()


def test_a_gpu_that_has_fp8_is_found_with_its_versions(monkeypatch):
    properties = types.SimpleNamespace(name="NVIDIA H200", total_memory=139 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    facts = gpu_check.find_gpu().facts()
    assert (facts["name"], facts["capability"], facts["memory_gib"]) == ("NVIDIA H200", "9.0", 139.0)
    if not torch.backends.cuda.is_built():  # else the library itself tells its version
        assert facts["cublas"] == "12.8"
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(gpu_check.NoGPUError, match="AMD"):
        gpu_check.find_gpu()


def test_a_number_of_seconds_that_cannot_be(capsys):
    assert cli.main(["gpu-check", "--seconds", "0"]) == 2
    assert "--seconds" in capsys.readouterr().err


# --- a part that fails, or does not end -------------------------------------------------------------------------------


def test_a_part_that_raises_is_reported_and_the_others_go_on(tmp_path):
    def fails(found, save, left):
        found["half"] = 1
        raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

    made = check_of(tmp_path, products=fails)
    report = made.run()
    assert report["parts"]["products"]["error"] == "RuntimeError: CUDA error: an illegal memory access"
    assert report["parts"]["products"]["half"] == 1
    assert [part["status"] for part in report["parts"].values()] == ["done", "failed", "done", "done"]
    assert not made.holds


def test_a_part_that_does_not_end_is_stopped_and_the_rules_still_run(tmp_path):
    def hangs(found, save, left):
        while True:
            try:
                time.sleep(60)
            except Exception:  # as a compiler may catch what it does not know
                continue

    started = time.monotonic()
    made = check_of(tmp_path, seconds=3.0, training=hangs)
    report = made.run()
    assert time.monotonic() - started < 15
    assert [part["status"] for part in report["parts"].values()] == ["done", "done", "out of time", "done"]
    assert len(report["parts"]["rules"]["calls"]) >= 40
    assert not made.holds


def test_a_process_that_does_not_listen_is_ended_and_its_report_stays(tmp_path, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(gpu_check, "_GRACE", 0.0)
    monkeypatch.setattr(gpu_check.os, "_exit", lambda status: ended.set())
    made = check_of(tmp_path, seconds=0.1)
    with made.watched():
        assert ended.wait(10)
    assert json.loads((tmp_path / "report.json").read_text())["gave_up"]
    ended.clear()
    with check_of(tmp_path, seconds=0.3).watched():
        pass  # in time
    assert not ended.wait(0.6)


def test_when_no_time_is_left_nothing_is_begun(tmp_path):
    report = check_of(tmp_path, seconds=-1.0).run()
    assert {part["status"] for part in report["parts"].values()} == {"out of time"}


def test_the_file_is_whole_and_valid_at_every_moment(tmp_path):
    path, seen = tmp_path / "report.json", []

    def reads(found, save, left):
        for value in (1.0, float("nan"), float("inf"), (1, 2)):
            found["value"] = value
            save()
            seen.append(json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name)))
        raise KeyboardInterrupt  # what was saved stays

    with pytest.raises(KeyboardInterrupt):
        check_of(tmp_path, training=reads).run()
    assert [each["parts"]["training"]["value"] for each in seen] == [1.0, "nan", "inf", [1, 2]]
    assert json.loads(path.read_text())["parts"]["training"]["status"] == "running"
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_it_does_not_hold_where_codes_differ(tmp_path):
    counts = {"codes": 10, "scales": 1, "eager_codes": 0, "eager_scales": 0, "compiled_codes": 0, "compiled_scales": 0}
    made = check_of(tmp_path, products=lambda found, save, left: found.update(codes={"E4M3 tensor": counts}))
    made.run()
    assert made.holds
    counts["compiled_codes"] = 1
    assert not made.holds
    counts["compiled_codes"] = 0
    made.report["parts"]["training"]["gpt2"] = {"variants": {"bf16": {"failed": "RuntimeError: no"}}}
    assert not made.holds


def test_every_state_of_a_report_can_be_told():
    for name in PARTS:
        assert (
            gpu_check.describe(name, {"status": "failed", "seconds": 1.0, "error": "E: x"})
            == f"{name}: failed, 1 s (E: x)"
        )
    half = {"status": "out of time", "seconds": 1.0, "codes": {"a": {"skipped": "no"}}, "products": [
        {"shape": [1, 2, 3], "kind": "rowwise", "failed": "E: y"}], "layers": {"rowwise": {"eager": {"output": 0.1}}},
    }  # fmt: skip
    assert "E: y" in gpu_check.describe("products", half)
    half = {"status": "done", "seconds": 1.0, "gpt2": {"variants": {"bf16": {}, "fp8": {"skipped": "out of time"}}}}
    assert "not measured" in gpu_check.describe("training", half)
    assert "gpt2 fp8: out of time" in gpu_check.describe("training", half)


# --- time limits ------------------------------------------------------------------------------------------------------


def test_a_limit_inside_another_one_leaves_it_as_it_was():
    handler = signal.getsignal(signal.SIGALRM)
    passed = []

    def run():
        with contextlib.suppress(OutOfTimeError), stop_after(0.1):
            time.sleep(5)
        with stop_after(60):
            passed.append("both inner ones")
        time.sleep(5)

    with pytest.raises(OutOfTimeError), stop_after(0.6):
        run()
    assert passed == ["both inner ones"]
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_an_outer_limit_stops_what_an_inner_one_would_let_run():
    started = time.monotonic()
    with pytest.raises(OutOfTimeError), stop_after(0.2), stop_after(60):
        time.sleep(5)
    assert time.monotonic() - started < 3


def test_what_goes_wrong_becomes_a_line():
    report = {}
    with reported(report):
        raise ValueError("first\nsecond")
    assert report == {"failed": "ValueError: first"}
    report = {}
    with reported(report):
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")
    assert report["skipped"].startswith("out of memory")


# --- training ---------------------------------------------------------------------------------------------------------

TINY = training.TINY[0]


def test_variants_share_the_weights_and_torchaos_is_one_of_them(monkeypatch):
    pytest.importorskip("torchao")
    model = GPT(TINY.config)
    for name in training.VARIANTS:
        made = training._variant(name, model, EAGER, TINY, {})
        assert all(mine is theirs for mine, theirs in zip(made.parameters(), model.parameters(), strict=True))
        assert type(made.head) is torch.nn.Linear
        kind = type(made.blocks[1].mlp.up)
        assert (
            kind.__name__ == {"bf16": "Linear", "fp8": "HardwareLinear", "torchao": "Float8Linear"}[name.split("_")[0]]
        )
    monkeypatch.setattr(training, "VARIANTS", ("bf16", "fp8_tensorwise", "torchao_tensorwise"))
    report = {}
    training.measure(EAGER, TINY, report, lambda: None, countdown(60))
    assert set(report["times_as_fast"]) == {"fp8_vs_bf16", "fp8_vs_torchao"}


def test_a_variant_that_fails_leaves_the_others(monkeypatch):
    def fails(model, recipe, emulate):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(training, "_with_torchao", fails)
    monkeypatch.setattr(training, "VARIANTS", ("bf16", "torchao_tensorwise", "fp8_tensorwise"))
    found = {}
    training.check(EAGER, found, lambda: None, countdown(60), (TINY,))
    assert found["tiny"]["variants"]["torchao_tensorwise"] == {"failed": "RuntimeError: no kernel"}
    assert "fp8_vs_bf16" in found["tiny"]["times_as_fast"]


def test_a_variant_that_takes_all_the_time_leaves_what_was_ready(monkeypatch):
    def hangs(model, recipe, emulate):
        time.sleep(60)

    monkeypatch.setattr(training, "_with_torchao", hangs)
    monkeypatch.setattr(training, "VARIANTS", ("bf16", "fp8_tensorwise", "torchao_tensorwise", "fp8_rowwise"))
    found = {}
    training.check(EAGER, found, lambda: None, countdown(4), (TINY,))
    told = found["tiny"]["variants"]
    assert told["torchao_tensorwise"]["skipped"] == told["fp8_rowwise"]["skipped"] == "out of time"
    assert told["bf16"]["milliseconds"] > 0
    assert "fp8_vs_bf16" in found["tiny"]["times_as_fast"]


def test_a_model_that_does_not_fit_is_skipped_and_the_next_one_tried(monkeypatch):
    monkeypatch.setattr(training, "VARIANTS", ("bf16",))
    large = training.Size("large", GPTConfig(32768, 64, 6, 32, 4096), 1)
    found = {}
    training.check(EAGER, found, lambda: None, countdown(60), (large, TINY))
    assert found["large"] == {"skipped": "weights and AdamW alone need 20 GiB, and the GPU has less"}
    assert "milliseconds" in found["tiny"]["variants"]["bf16"]


def test_the_models_have_the_sizes_that_they_say():
    sizes = {size.name: training._numbers(size.config) for size in training.SIZES}
    assert list(sizes) == ["shakespeare_char", "gpt2", "gpt 1.3B"]
    assert 1.2e9 < sizes["gpt 1.3B"] < 1.4e9
    assert all(size.rows % 16 == 0 for size in training.SIZES)


def test_a_ratio_above_one_is_faster():
    seconds = {"bf16": [2.0, 4.0, 2.0], "fp8_tensorwise": [1.0, 1.0, 1.0], "torchao_tensorwise": [0.5, 0.5]}
    assert training.times_as_fast(seconds) == {"fp8_vs_bf16": 2.0, "fp8_vs_torchao": 0.5}
    assert training.times_as_fast({"bf16": [1.0], "fp8_tensorwise": []}) == {}


# --- codes, errors, versions ------------------------------------------------------------------------------------------


def test_codes_and_scales_that_differ_are_counted(monkeypatch):
    real, calls = products._cast, []

    def broken(x, cast):
        codes, scale = real(x, cast)
        calls.append(1)
        if len(calls) % 2 == 0:  # the device's turn
            codes = codes.clone()
            codes[0, 1] += 1
            scale = torch.nextafter(scale, torch.tensor(0.0))
        return codes, scale

    monkeypatch.setattr(products, "_cast", broken)
    monkeypatch.setattr(products, "inputs", lambda rows, columns: {"bfloat16": torch.ones(rows, columns)})
    counts = {}
    products.differing_codes(device.stand_in(), Cast(E4M3), (16, 16), counts)
    assert (counts["codes"], counts["cpu_codes"], counts["eager_codes"], counts["eager_scales"]) == (256, 0, 1, 1)


def test_a_cast_that_does_not_saturate_shows_on_every_device(monkeypatch):
    """Torch before 2.13 gives NaN beyond 464, on a CPU and on a GPU alike: codes that are right here as well are not
    compared with themselves. A scale that is 5 % too large takes the largest number of each group there."""
    real = products._cast

    def unclamped(x, cast):
        _, scale = real(x, cast)
        scale = scale * 1.05
        return cast_before_2_13(x.float() * quantizer.spread(scale, cast.granularity, x.shape)).view(torch.uint8), scale

    monkeypatch.setattr(products, "_cast", unclamped)
    counts = {}
    products.differing_codes(UNCOMPILED, Cast(E4M3, "row"), (24, 32), counts)
    assert counts["cpu_codes"] >= 24
    assert counts["eager_codes"] >= 24
    assert counts["compiled_codes"] >= 24
    assert counts["cpu_scales"] == counts["eager_scales"] == 0


@pytest.mark.parametrize(
    ("expected", "said", "verdict"),
    [
        (rules.WORKS, rules.WORKS, rules.AGREE),
        ("ValueError: no", "ValueError: no", rules.AGREE),
        ("RuntimeError: when calling `cublas`", "RuntimeError: when calling `cublas( handle, n)`", rules.AGREE),
        ("RuntimeError: no", "ValueError: no", rules.OTHER_WORDS),
        (rules.WORKS, "ValueError: no", rules.REFUSED_HERE),
        ("ValueError: no", rules.WORKS, rules.ALLOWED_HERE),
    ],
)
def test_verdicts_on_rules(expected, said, verdict):
    assert rules.judge(expected, said) == verdict


def test_versions_of_libraries():
    assert device.version_of(120904) == (12, 9)
    assert device.version_of(130100) == (13, 1)
    assert isinstance(device.driver_version(), str)
