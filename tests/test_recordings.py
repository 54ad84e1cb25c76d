"""Recordings: what is written is read back, a cut line is left out, and what the pictures are made of."""

import json
import math

import numpy as np
import pytest
import torch

from lowprec_lab.explorers import heatmap_picture
from lowprec_lab.files import WorkspaceError
from lowprec_lab.formats import BF16, E4M3, E5M2, E8M0, FP16
from lowprec_lab.graders import instruments_oracle as exact
from lowprec_lab.recordings import Recording, median_exponent, packed, share_below, share_from, unpacked


def line(step, scale=1.0):
    rng = np.random.default_rng(step)
    layers = {
        name: packed(exact.exponent_histogram(torch.from_numpy(rng.normal(size=64).astype(np.float32)) * scale * size))
        for name, size in (("first", 1.0), ("second", 2.0**-12))
    }
    return {"step": step, "loss": 4.0 - step, "gradient_norm": 1.0, "activations": layers, "gradients": layers}


@pytest.fixture
def recording(tmp_path):
    made = Recording(tmp_path / "deep" / "run.jsonl")
    for step in (0, 1, 2):
        made.write(line(step))
    return made


@pytest.mark.parametrize("values", [[], [1.0], [1e-45, 3e38], [0.0, math.nan], [1.5, 2.0, 3.0, 1e-3]])
def test_a_histogram_survives_packing(values):
    counts = exact.exponent_histogram(torch.tensor(values))
    assert unpacked(json.loads(json.dumps(packed(counts)))).tolist() == counts.tolist()


def test_what_is_written_is_read_back(recording):
    again = Recording.read(recording.path)
    assert again.lines == recording.lines
    assert (again.steps, again.layers) == ([0, 1, 2], ["first", "second"])
    assert again.column("loss") == [4.0, 3.0, 2.0]
    assert again.counts().shape == (2, 3, 277)
    assert np.array_equal(again.counts("activations"), recording.counts("gradients"))


def test_a_line_that_was_cut_off_is_left_out(recording):
    text = recording.path.read_text()
    recording.path.write_text(text[:-40])
    assert Recording.read(recording.path).steps == [0, 1]
    recording.path.write_text(text.replace("{", "", 1))
    with pytest.raises(ValueError, match="line 1 of .* is no JSON"):
        Recording.read(recording.path)


def test_each_line_is_in_the_file_at_once(tmp_path):
    made = Recording(tmp_path / "run.jsonl")
    made.write(line(0))
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 1
    assert Recording(tmp_path / "run.jsonl").lines == []
    assert (tmp_path / "run.jsonl").read_text() == ""


def test_a_folder_that_cannot_be_used_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkspaceError):
        Recording(tmp_path / "file" / "run.jsonl")
    with pytest.raises(WorkspaceError):
        Recording.read(tmp_path / "nothing.jsonl")


def test_recordings_are_in_the_learners_folder_but_not_under_grading(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPREC_WORK", str(tmp_path))
    assert Recording.named("run").path == tmp_path / "recordings" / "run.jsonl"
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    assert not Recording.named("run").path.is_relative_to(tmp_path)


def test_shares_and_medians():
    counts = np.zeros((2, 277), dtype=np.int64)
    counts[0, 149 - 10], counts[0, 149], counts[0, 149 + 3] = 1, 2, 1
    assert median_exponent(counts)[0] == 0
    assert np.isnan(median_exponent(counts)[1])
    assert share_below(counts, 0)[0] == 0.25
    assert share_below(counts, -149)[0] == share_below(counts, -400)[0] == 0
    assert share_from(counts, 3)[0] == 0.25
    assert share_from(counts, 4)[0] == 0
    assert np.isnan(share_from(counts, 4)[1])


@pytest.mark.parametrize("fmt", [FP16, E5M2, E4M3, BF16, E8M0])
@pytest.mark.parametrize("scale", [-6, 0, 9])
def test_the_heat_map_shows_what_the_exercises_say(fmt, scale):
    rng = np.random.default_rng(3)
    x = torch.from_numpy((rng.normal(size=500) * 2.0 ** rng.integers(-24, 12, 500)).astype(np.float32))
    counts = {"layer": packed(exact.exponent_histogram(x))}
    recording = Recording()
    recording.write({"step": 0, "activations": counts, "gradients": counts})
    lost = heatmap_picture.cells(recording, "gradients", "underflow", fmt, scale)
    assert lost[0, 0] == pytest.approx(exact.underflow_fraction(x, fmt, 2.0**scale), abs=1e-12)
    over = heatmap_picture.cells(recording, "gradients", "overflow", fmt, scale)[0, 0]
    right = exact.overflow_fraction(x, fmt, 2.0**scale)
    assert over <= right <= over + 0.05  # what lies between the largest value and the next power of two


def test_every_picture_can_be_drawn(recording):
    for shown in heatmap_picture.SHOWN:
        made = heatmap_picture.draw(recording, "gradients", shown, E5M2, 4)
        assert [label.get_text() for label in made.axes[0].get_yticklabels()] == ["first", "second"]
    assert "step 2 of 9" in heatmap_picture.live(recording, 9, FP16).axes[0].get_title(loc="left")
    counts = {"a": (recording.counts()[0, 0], "#000000"), "nothing": (np.zeros(277, dtype=np.int64), "#000000")}
    assert heatmap_picture.histograms(counts, [BF16, E4M3], "one").axes
    assert heatmap_picture.sweep({FP16.name: ([0.5, 0.0], [0.0, 0.2])}, [0, 8], "two").axes
    single = Recording()
    single.write(line(0))
    assert heatmap_picture.live(single, 300, FP16).axes
