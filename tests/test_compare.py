"""Runs against each other: the table, the picture, and what is missing or damaged."""

import json

import pytest
from training import small

from lowprec_lab import __main__ as cli
from lowprec_lab import compare
from lowprec_lab.runs import Run, RunError, run_folder


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """Two runs of 12 steps as a training run leaves them; the second is 2 % worse and skipped a step."""
    monkeypatch.setenv("LOWPREC_WORK", str(tmp_path))
    for name, precision, factor in (("full", "fp32", 1.0), ("half", "fp16", 1.02)):
        run = Run(run_folder(name))
        run.write_settings(small(precision=precision))
        run.start_log(0)
        for step in range(1, 13):
            record = {"step": step, "loss": 4.0 - step / 10, "skipped": name == "half" and step == 1}
            record |= {"tokens_per_s": 1000 + step, "scale": 1.0, "lr": 1e-3, "grad_norm": 1.0}
            if step % 6 == 0:
                record["val_loss"] = (3.0 - step / 24) * factor
            run.log(record)
        run.close()
    return tmp_path / "runs"


def test_the_table():
    lines = compare.table(compare.load_curves(["full", "half"])).splitlines()
    assert lines[0].split()[:4] == ["run", "preset", "precision", "steps"]
    assert lines[1].split() == ["full", "baby", "fp32", "12", "3.3500", "2.5000", "2.5000", "0", "1,006"]
    assert lines[2].split() == ["half", "baby", "fp16", "12", "3.3500", "2.5500", "2.5500", "+2.00%", "1", "1,006"]


def test_a_run_without_a_validation_yet(runs):
    log = runs / "half" / "log.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[:3]))
    curves = compare.load_curves(["full", "half"])
    assert "none yet" in compare.table(curves)
    assert compare.plot(curves)


def test_the_picture_names_every_run():
    axes = compare.plot(compare.load_curves(["full", "half", "full"])).axes[0]
    assert [text.get_text() for text in axes.texts] == ["full", "full", "half"]
    heights = [text.xyann[1] for text in axes.texts]
    low, high = axes.get_ylim()
    assert all(b - a >= (high - low) / 23 for a, b in zip(heights, heights[1:], strict=False))
    assert axes.get_xlabel() == "step"
    colors = {line.get_color() for line in axes.get_lines()}
    assert len(colors) == 2
    styles = {line.get_linestyle() for line in axes.get_lines() if line.get_color() == axes.get_lines()[0].get_color()}
    assert len(styles) == 2


def test_smoothing():
    assert compare.smoothed([1.0, 2.0, 6.0, 4.0], window=2) == [1.0, 1.5, 4.0, 5.0]


def test_the_command(capsys, runs, tmp_path):
    assert cli.main(["compare", "full", "half"]) == 0
    assert "+2.00%" in capsys.readouterr().out
    assert (runs / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["compare", "full", str(runs / "half"), "--json", "--out", str(tmp_path / "both.svg")]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [each["run"] for each in made["runs"]] == ["full", "half"]
    assert made["runs"][1]["skipped"] == 1
    assert b"<svg" in (tmp_path / "both.svg").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["full", "none"], "there is no run in"),
        (["full", "none"], "The runs there are: full, half"),
        (["full", "--out", "picture.gif"], "ends in .png or .svg"),
        (["a b"], "a run's name"),
    ],
)
def test_commands_that_are_wrong(capsys, arguments, words):
    assert cli.main(["compare", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_damaged_runs(runs):
    (runs / "half" / "log.jsonl").write_text("not json\n")
    with pytest.raises(RunError, match="holds no step: it is empty or damaged"):
        compare.load_curves(["half"])
    (runs / "half" / "log.jsonl").unlink()
    with pytest.raises(RunError, match="there is no log of a run"):
        compare.load_curves(["half"])
    for content in ("{", "[]", '{"preset": "giant"}', '{"preset": "baby", "steps": "many"}'):
        (runs / "full" / "settings.json").write_text(content)
        with pytest.raises(RunError, match=r"settings.json is damaged"):
            compare.load_curves(["full"])
