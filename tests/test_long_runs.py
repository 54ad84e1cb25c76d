"""Recorded runs: made by a command that goes on where it was stopped, kept small, and summed up with their spread."""

import json
import math

import numpy as np
import pytest
import training
from training import SMALL, corpus

from lowprec_lab import __main__ as cli
from lowprec_lab import data, long_runs
from lowprec_lab.long_runs import EVERY, VARIANTS, LongRuns, RecordedRun
from lowprec_lab.runs import Run, run_folder

TINY = {key: value for key, value in SMALL.items() if key not in ("sample", "threads")}


def recorded() -> LongRuns:
    """Two seeds of two variants: one ends 1 % and 3 % above the other."""
    finals = {("float32", 1): 2.0, ("float32", 2): 3.0, ("FP16, scaler", 1): 2.02, ("FP16, scaler", 2): 3.09}
    runs = [
        RecordedRun(name, seed, [(25, 4.0), (50, final)], [(25, 4.0), (50, final)], skipped=seed)
        for (name, seed), final in finals.items()
    ]
    return LongRuns("06_loss_scaling", {}, runs)


def test_a_gap_is_taken_in_pairs_with_its_standard_error():
    mean, error = recorded().gap("FP16, scaler", "float32")
    assert mean == pytest.approx(0.02)
    assert error == pytest.approx(0.01)  # two gaps, 0.02 apart: a deviation of 0.01 * sqrt(2), over sqrt(2)


def test_gaps_at_every_validation_and_their_picture():
    assert recorded().gaps("FP16, scaler", "float32")[0] == (25, 0.0, 0.0)
    step, *last = recorded().gaps("FP16, scaler", "float32")[1]
    assert (step, tuple(last)) == (50, recorded().gap("FP16, scaler", "float32"))
    axes = recorded().plot_gaps("float32", "above").axes[0]
    assert [text.get_text() for text in axes.texts] == ["FP16, scaler"]
    ((line, *_),) = axes.containers
    assert list(line.get_ydata()) == pytest.approx([0.0, 2.0])


def test_one_pair_has_no_error():
    one = LongRuns("06_loss_scaling", {}, [run for run in recorded().runs if run.seed == 1])
    assert math.isnan(one.gap("FP16, scaler", "float32")[1])
    assert one.table("float32").splitlines()[2].split()[-2:] == ["+1.00%", "1"]


def test_the_table():
    lines = recorded().table("float32").splitlines()
    assert lines[1].split() == ["float32", "2", "2.5000", "3"]
    assert lines[2].split() == ["FP16,", "scaler", "2", "2.5550", "+2.00%", "±", "1.00%", "3"]


def test_a_variant_that_was_not_recorded():
    with pytest.raises(KeyError, match="There are: float32, FP16, scaler"):
        recorded().finals("FP4")


def test_a_log_becomes_means_of_25_steps():
    log = [{"step": step, "loss": float(step), "skipped": step == 3} for step in range(1, 61)]
    log[-1]["val_loss"] = 1.23456789
    run = RecordedRun.of("float32", 7, log)
    assert EVERY == 25
    assert run.losses == [(25, 13.0), (50, 38.0), (60, 55.5)]
    assert (run.validations, run.skipped, run.final) == ([(60, 1.23457)], 1, 1.23457)


def test_the_loss_of_who_knows_how_often_each_character_comes():
    """A text of 9 a and 1 b, and one of 4 a and 1 b to be read with its frequencies: 10 and 2 of 12 counts."""

    class Text:
        vocabulary = "ab"

        @staticmethod
        def split(name):
            return np.array([0] * 9 + [1]) if name == "train" else np.array([0, 0, 1, 0, 0])

    wanted = -(4 * math.log(10 / 12) + math.log(2 / 12)) / 5
    assert long_runs.loss_of_frequencies(Text) == pytest.approx(wanted)


@pytest.mark.parametrize("chapter", VARIANTS)
def test_what_is_kept_is_every_variant_with_the_same_seeds(chapter):
    kept = long_runs.long_runs(chapter)
    seeds = {run.seed for run in kept.runs}
    assert len(seeds) >= 3
    for variant in VARIANTS[chapter]:
        assert set(kept.finals(variant.name)) == seeds
    for run in kept.runs:
        assert run.losses[-1][0] == run.validations[-1][0] == kept.made_with["steps"]
    assert kept.made_with["steps"] == 2000
    names = {text.get_text() for text in kept.plot("all").axes[0].texts}
    assert names == {variant.name for variant in VARIANTS[chapter]}


def test_recording_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPREC_WORK", str(tmp_path))
    monkeypatch.setattr(data, "load_corpus", lambda say: corpus())
    said = []
    first = long_runs.record("06", [3], tmp_path / "one.json", said.append, **TINY)
    log = Run(run_folder("06-fp16-scaler-3")).read_log()
    again = long_runs.record("06", [3, 4], tmp_path / "two.json", said.append, **TINY)
    assert Run(run_folder("06-fp16-scaler-3")).read_log() == log  # taken as it was
    assert [run for run in again.runs if run.seed == 3] == first.runs
    assert {run.seed for run in again.runs} == {3, 4}
    kept = json.loads((tmp_path / "two.json").read_text())
    assert kept["made_with"]["steps"] == TINY["steps"]
    assert [run["name"] for run in kept["runs"][::2]] == [variant.name for variant in VARIANTS["06_loss_scaling"]]


def test_the_command(capsys, monkeypatch, tmp_path):
    for name, value in training.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(VARIANTS, "06_loss_scaling", VARIANTS["06_loss_scaling"][:1])
    out = tmp_path / "made.json"
    assert cli.main(["record", "06", "--seeds", "5", "--steps", "1", "--out", str(out)]) == 0
    assert "float32, seed 5: validation loss" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["runs"]) == 1
    assert cli.main(["record", "01"]) == 2
    assert "chapter 01_bit_layouts has no recorded runs" in capsys.readouterr().err
