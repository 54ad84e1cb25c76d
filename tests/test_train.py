"""Training: steps, logs, checkpoints, going on bit for bit, stopping, several processes, and what can go wrong."""

import ast
import builtins
import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import training
from training import corpus, small, without_speed

from lowprec_lab import __main__ as cli
from lowprec_lab import blanks, files, fused, recipes, trainer
from lowprec_lab.answers import save_answer
from lowprec_lab.data import DataError, Text, corpus_of
from lowprec_lab.files import WorkspaceError
from lowprec_lab.runs import Run, RunError, run_folder
from lowprec_lab.settings import SettingsError, settings
from lowprec_lab.train import resume_settings, train
from lowprec_lab.trainer import Trainer, TrainingError, learning_rate, pick_device

FP8 = [{"precision": "fp8", "recipe": recipe} for recipe in recipes.NAMES]
needs_a_compiler = pytest.mark.skipif(bool(fused.why_not_compiled()), reason="nothing can be compiled here")


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPREC_WORK", str(tmp_path / "work"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)


def go(name="run", progress=False, **options):
    changes = {key: options.pop(key) for key in list(options) if key in training.SMALL or key in EXTRA}
    return train(small(**changes), name, progress=progress, corpus=corpus(), **options)


EXTRA = ("precision", "recipe", "skip", "loss_scale", "dropout", "compile", "accumulate", "lr", "min_lr", "clip",
         "device", "seed", "tensorboard", "weight_decay", "beta1", "beta2")  # fmt: skip


def state_of(result):
    """Everything that the next step depends on, flat: name -> tensor or number."""
    flat = {}

    def visit(name, value):
        if isinstance(value, dict):
            for key, each in value.items():
                visit(f"{name}.{key}", each)
        elif isinstance(value, list | tuple):
            for key, each in enumerate(value):
                visit(f"{name}.{key}", each)
        else:
            flat[name] = value

    visit("", result.trainer.state_dict())
    return flat


def require_same(a, b):
    """Bit for bit: weights, optimizer, scaler, generator, and every number in the log but the speed."""
    first, second = state_of(a), state_of(b)
    assert first.keys() == second.keys()
    assert any("exp_avg_sq" in name for name in first)
    assert any("generator" in name for name in first)
    for name, value in first.items():
        equal = torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        assert equal, name
    assert without_speed(a.records) == without_speed(b.records)
    assert a.sample == b.sample


# a run


def test_a_run_learns_and_leaves_its_folder(tmp_path):
    seen = []
    result = go(steps=40, lr=1e-2, on_step=seen.append, on_start=lambda trainer: seen.append(trainer.step))
    assert result.folder == tmp_path / "work" / "runs" / "run"
    names = {path.name for path in result.folder.iterdir()}
    assert names == {"settings.json", "log.jsonl", "checkpoint.pt", "checkpoint.previous.pt", "sample.txt"}
    records = Run(result.folder).read_log()
    assert records == result.records == seen[1:]
    assert seen[0] == 0
    assert [record["step"] for record in records] == list(range(1, 41))
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert set(records[0]) == {"step", "loss", "lr", "grad_norm", "scale", "skipped", "tokens_per_s"}
    assert [record["step"] for record in records if "val_loss" in record] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert result.val_loss == records[-1]["val_loss"]
    assert len(result.sample) == 11
    assert (result.folder / "sample.txt").read_text() == result.sample
    assert json.loads((result.folder / "settings.json").read_text())["width"] == 16
    assert "40 steps" in repr(result)


def test_what_is_said(capsys):
    go()
    printed = capsys.readouterr().out
    assert "parameters) in fp32 on cpu, 1 threads. The run is in" in printed


def test_a_step_is_what_it_should_be():
    """One step of the trainer against the same step written out, without its code."""
    told = small(accumulate=2, clip=0.5)
    ours = Trainer(told, corpus())
    torch.manual_seed(told.seed)
    model = trainer.GPT(trainer.config_of(told, len(ours.corpus.vocabulary)))
    optimizer = trainer.make_optimizer(model, told)
    for group in optimizer.param_groups:
        group["lr"] = told.lr / 3  # the first of two steps of warm-up
    losses = [model(*ours.batch(1, part))[1] for part in range(2)]
    (sum(losses) / 2).backward()
    norm = math.sqrt(sum(float((each.grad.double() ** 2).sum()) for each in model.parameters()))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    record = ours.take_step()
    assert record["loss"] == pytest.approx(float(sum(losses).detach()) / 2, abs=1e-6)
    assert record["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert record["lr"] == pytest.approx(told.lr / 3)
    for mine, theirs in zip(ours.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-7)


def test_the_learning_rate_rises_and_falls():
    told = settings("baby", steps=1000, warmup=100, lr=1e-3)
    rates = [learning_rate(told, step) for step in range(1, 1001)]
    assert rates[0] == pytest.approx(1e-3 / 101)
    assert max(rates) == rates[100] == pytest.approx(1e-3)
    assert rates[550] == pytest.approx((1e-3 + 1e-4) / 2)
    assert rates[-1] == pytest.approx(1e-4, rel=1e-2)
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert learning_rate(told, 2000) == 1e-4


def test_matrices_decay_and_vectors_do_not():
    optimizer = Trainer(small(), corpus()).optimizer
    assert [(group["weight_decay"], {each.dim() for each in group["params"]}) for group in optimizer.param_groups] == [
        (0.1, {2}), (0.0, {1}),
    ]  # fmt: skip


def test_a_validation_is_the_same_every_time_and_changes_nothing():
    ours = Trainer(small(dropout=0.3), corpus())
    before = torch.get_rng_state()
    assert ours.evaluate() == ours.evaluate()
    assert torch.equal(before, torch.get_rng_state())
    assert ours.model.training


def test_16_bits_train_nearly_as_well():
    full, bf16, fp16 = (go(name, precision=name, steps=30, lr=1e-2) for name in ("fp32", "bf16", "fp16"))
    for other in (bf16, fp16):
        assert other.val_loss == pytest.approx(full.val_loss, rel=0.02)
        assert other.val_loss != full.val_loss
    assert {record["scale"] for record in full.records} == {1.0}
    assert {record["scale"] for record in fp16.records} == {2.0**16}


@pytest.mark.parametrize("kind", FP8, ids=str)
def test_fp8_trains_nearly_as_well(kind, capsys):
    full, eight = (go(f"run{number}", steps=30, lr=1e-2, **each) for number, each in enumerate(({}, kind)))
    assert eight.val_loss == pytest.approx(full.val_loss, rel=0.02)
    assert eight.val_loss != full.val_loss
    told = capsys.readouterr().out
    assert "FP8 is by the reference's convert_to_float8, " in told
    assert "8 of 9 linear layers are converted. All products are emulated (there is no NVIDIA GPU)" in told
    assert f"in fp8-{kind['recipe']} on cpu" in told


@pytest.mark.parametrize("recipe", recipes.NAMES)
def test_a_head_and_a_batch_that_16_does_not_divide_train_too(recipe, capsys):
    """33 symbols, and 3 * 7 tokens: what does not divide is filled up with zeros."""
    text = corpus_of(Text(training.VERSE + "%" * 9, "sheep", "LOWPREC_DATA", "Training text: sheep and percents."))
    told = small(steps=6, batch=3, context=7, precision="fp8", recipe=recipe, skip="none")
    result = train(told, "run", progress=False, corpus=text)
    assert "9 of 9 linear layers are converted" in capsys.readouterr().out
    head = result.trainer.model.head
    assert head.out_features == 33
    assert type(head).__name__ == ("DelayedLinear" if recipe == "delayed" else "PaddedLinear")
    assert head.weight is result.trainer.model.token_embedding.weight
    assert result.records[-1]["loss"] < result.records[0]["loss"]


def test_validations_change_nothing_in_a_delayed_run():
    """A delayed scale learns from what it sees; it must not see the validation text."""
    often, seldom = (go(f"every{every}", eval_every=every, **FP8[-1]) for every in (2, 6))
    assert without_speed(often.records)[-1]["loss"] == without_speed(seldom.records)[-1]["loss"]
    assert all(torch.equal(one, two) for one, two in zip(
        often.trainer.model.parameters(), seldom.trainer.model.parameters(), strict=True))  # fmt: skip


MARKED = {
    "quantize": """
def quantize(x, fmt, granularity="tensor", power_of_two=False):
    PASSED.append("quantize")
    scale = scale_for(absmax(x, granularity), fmt, power_of_two=power_of_two)
    codes = encode((x.detach().float() * scale).clamp(-max_finite(fmt), max_finite(fmt)), fmt)
    return Quantized(codes.to(torch.uint8), scale, fmt, granularity, x.dtype)
""",
    "delayed_update": """
def delayed_update(history, scale, fmt, margin=0, algo="max"):
    PASSED.append("delayed_update")
    amax = history.max()
    scale = torch.where(amax > 0, fmt_max(fmt) / amax, scale)
    return torch.cat([history.new_zeros(1), history[2:], history[:1]]), scale


def fmt_max(fmt):
    return torch.tensor(max_finite(fmt))
""",
    "convert_to_float8": """
def convert_to_float8(model, recipe, skip=("head",)):
    PASSED.append("convert_to_float8")
    names = [name for name, m in model.named_modules() if type(m) is torch.nn.Linear and "mlp" in name]
    for name in names:
        model.set_submodule(name, float8_layer(model.get_submodule(name), recipe))
    return names
""",
}


@pytest.mark.parametrize(("name", "recipe"), [
    ("quantize", "tensorwise"), ("delayed_update", "delayed"), ("convert_to_float8", "rowwise"),
])  # fmt: skip
def test_what_a_learner_saved_is_what_trains(name, recipe, tmp_path, capsys):
    """The saved answer of one exercise says so whenever it runs; all others are the reference's."""
    passed = []
    builtins.PASSED = passed
    try:
        save_answer(blanks.BLANKS[name].module, name, MARKED[name].strip())
        result = go(steps=3, eval_every=100, sample=0, precision="fp8", recipe=recipe)
    finally:
        del builtins.PASSED
    steps, layers = 3, {"convert_to_float8": 4}.get(name, 8)
    wanted = {"quantize": 6, "delayed_update": 3}
    told = capsys.readouterr().out
    assert f"your saved {name}" in told
    assert f"{layers} of 9 linear layers are converted" in told
    assert passed.count(name) >= (steps * layers * 3 if name in wanted else 1)
    assert math.isfinite(result.val_loss)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    ours = Trainer(small(precision="fp16"), corpus())
    ours.scaler.scale = 2.0**40
    before = [each.clone() for each in ours.model.parameters()]
    record = ours.take_step()
    assert record["skipped"] is True
    assert record["grad_norm"] is None
    assert record["scale"] == 2.0**40
    assert ours.scaler.scale == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(before, ours.model.parameters(), strict=True))
    while ours.take_step()["skipped"]:
        pass
    assert ours.scaler.scale < 2.0**39
    assert not torch.equal(before[0], ours.model.head.weight)


def test_an_overflow_of_the_norm_alone_is_none():
    """Four gradients of 3e38 are finite, and so no reason to skip a step, though their squares are not."""
    ours = Trainer(small(loss_scale="1.0"), corpus())
    parameter = ours.model.norm.weight
    parameter.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
    assert ours.take_step()["skipped"] is False


def test_where_nothing_is_checked_a_bad_gradient_is_used():
    ours = Trainer(small(), corpus())
    ours.model.blocks[1].mlp.up.weight.register_hook(lambda gradient: gradient * math.inf)
    assert ours.take_step()["skipped"] is False
    with pytest.raises(TrainingError, match="step 2: the loss is nan.*gradient of blocks.1.mlp.up.weight .* at step 1"):
        ours.take_step()


# what can go wrong


def test_a_loss_that_is_not_finite_names_the_step_and_the_layer():
    def break_layer(trainer):
        gelu = trainer.model.blocks[1].mlp.gelu
        gelu.register_forward_hook(lambda module, x, y: y * math.inf if trainer.step == 6 else y)

    with pytest.raises(TrainingError, match="step 7: the loss is nan.* not finite is blocks.1.mlp.gelu"):
        go(on_start=break_layer)
    run = Run(run_folder("run"))
    assert run.load()["step"] == 4
    assert [record["step"] for record in run.read_log()] == [1, 2, 3, 4, 5, 6]


def test_a_weight_that_is_not_finite_is_named():
    def break_weight(trainer):
        trainer.model.blocks[0].mlp.up.weight.data[3, 5] = math.nan

    with pytest.raises(TrainingError, match="step 1: the loss is nan. The weight blocks.0.mlp.up.weight"):
        go(on_start=break_weight)


def test_a_scale_that_has_fallen_to_0():
    ours = Trainer(small(precision="fp16"), corpus())
    ours.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
    for _ in range(16 + 150):
        assert ours.take_step()["skipped"]
    with pytest.raises(TrainingError, match="the loss scale has fallen to 0.*gradient of norm.weight"):
        ours.take_step()


def test_a_text_shorter_than_the_context():
    short = corpus_of(Text("To be, or not to be", "short", "LOWPREC_DATA", ""))
    with pytest.raises(DataError, match="too short"):
        train(small(), "run", corpus=short, progress=False)


def test_a_prompt_with_unknown_characters():
    with pytest.raises(DataError, match="lacks '€'"):
        Trainer(small(), corpus()).sample(3, "5 € ")


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(TrainingError, match="there is no device 'toaster' here"):
        pick_device("toaster")
    if not torch.cuda.is_available():
        with pytest.raises(TrainingError, match="there is no device 'cuda' here"):
            pick_device("cuda")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "giant"}, "The presets are: baby, baby256, shakespeare_char, gpt2"),
        ({"steps": 0}, "steps is 1 or more"),
        ({"lr": -1.0}, "lr is 0 or more"),
        ({"lr": math.nan}, "lr is 0 or more"),
        ({"beta2": 1.0}, "beta2 is below 1"),
        ({"width": 1.5}, "width is of type int"),
        ({"colour": "red"}, "there is no setting colour"),
        ({"recipe": 8}, "recipe is of type str"),
    ],
)
def test_settings_that_cannot_be(changes, words):
    with pytest.raises(SettingsError, match=words):
        settings(**changes)


def test_presets_are_nanogpts_but_for_the_learning_rate_of_the_smallest():
    baby, gpt2 = settings("baby"), settings("gpt2")
    assert (baby.steps, baby.lr, baby.min_lr, baby.warmup, baby.beta2, baby.weight_decay, baby.clip) == (
        2000, 1.5e-3, 1e-4, 100, 0.99, 0.1, 1.0,
    )  # fmt: skip
    assert (baby.layers, baby.width, baby.context, baby.batch, baby.eval_every, baby.dropout) == (
        4,
        128,
        64,
        12,
        250,
        0,
    )
    assert (gpt2.layers, gpt2.heads, gpt2.context, gpt2.accumulate, gpt2.beta2) == (12, 12, 1024, 40, 0.95)


# going on


@pytest.mark.parametrize("stop_at", [5, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 11))])
@pytest.mark.parametrize(
    "kind", [*({"precision": name} for name in ("fp32", "bf16", "fp16", "pure_bf16")), *FP8], ids=lambda kind: str(kind)
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(stop_at, kind):
    options = {**kind, "dropout": 0.2, "accumulate": 2}
    whole = go("whole", **options)
    part = go("part", stop_at=stop_at, **options)
    assert part.records[-1]["step"] == stop_at
    assert part.sample == ""
    require_same(whole, go("part", resume=True, **options))


def test_a_scaler_in_the_middle_of_things_goes_on_bit_for_bit():
    def high(trainer):
        trainer.scaler.growth_interval = 3
        if trainer.step == 0:
            trainer.scaler.scale = 2.0**30

    whole = go("whole", precision="fp16", steps=40, on_start=high)
    assert len({record["scale"] for record in whole.records}) > 4
    go("part", precision="fp16", steps=40, stop_at=17, on_start=high)
    require_same(whole, go("part", precision="fp16", steps=40, resume=True, on_start=high))


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("kind", [{"precision": "fp32"}, {"precision": "fp16"}, FP8[0], FP8[-1]], ids=str)
def test_a_compiled_run_goes_on_bit_for_bit(kind):
    whole = go("whole", compile=True, **kind)
    for stop_at in (5,) if kind in FP8 else (1, 5, 11):  # compiling it takes its time
        go("part", compile=True, stop_at=stop_at, overwrite=True, **kind)
        torch._dynamo.reset()  # as another process would: nothing is compiled yet
        require_same(whole, go("part", compile=True, resume=True, **kind))


@pytest.mark.slow
@needs_a_compiler
def test_a_compiled_run_gives_what_an_eager_one_gives():
    eager, compiled = go("eager", lr=1e-2), go("compiled", lr=1e-2, compile=True)
    assert compiled.val_loss == pytest.approx(eager.val_loss, rel=1e-4)


def test_without_a_compiler_it_runs_eagerly_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(fused, "why_not_compiled", lambda: "no C++ compiler was found")
    go(compile=True)
    assert "not compiled, which changes nothing but the speed: no C++ compiler" in capsys.readouterr().out


def test_a_finished_run_that_is_gone_on_with_is_finished():
    whole = go()
    again = go(resume=True)
    require_same(whole, again)


def test_more_steps_are_said(capsys):
    go()
    go(steps=15, resume=True)
    assert "Changed since the checkpoint: steps 12 → 15." in capsys.readouterr().out


def test_going_on_starts_where_there_is_nothing():
    assert go(resume=True).records[-1]["step"] == 12


def test_a_run_is_not_overwritten_by_accident():
    go()
    with pytest.raises(RunError, match="--resume.*--overwrite"):
        go()
    go(overwrite=True, steps=3)
    assert Run(run_folder("run")).load()["step"] == 3
    assert len(Run(run_folder("run")).read_log()) == 3


def test_overwriting_takes_what_is_the_runs_and_nothing_else():
    go()
    folder = run_folder("run")
    (folder / "my-notes.json").write_text("{}")
    with pytest.raises(trainer.TrainingError, match="no device"):
        go(overwrite=True, device="toaster")
    assert Run(folder).load()["step"] == 12  # what is refused has overwritten nothing
    go(overwrite=True, steps=3)
    assert sorted(each.name for each in folder.iterdir()) == [
        "checkpoint.pt", "log.jsonl", "my-notes.json", "sample.txt", "settings.json",
    ]  # fmt: skip


def test_another_number_of_threads_is_said(capsys):
    go(stop_at=6)
    go(resume=True, threads=2)
    assert "made with 1 threads, and this run has 2" in capsys.readouterr().out
    assert "--threads 1 keeps them" in go_and_read(capsys)


def go_and_read(capsys):
    go("other", stop_at=6)
    go("other", resume=True, threads=2)
    return capsys.readouterr().out


def test_a_checkpoint_of_another_preset_is_refused():
    go(stop_at=6)
    with pytest.raises(RunError, match="is of another run: it has layers 2, and layers 3 was asked for"):
        go(resume=True, layers=3)
    with pytest.raises(RunError, match="trained with preset baby, and cannot go on with preset gpt2"):
        resume_settings("run", {"preset": "gpt2"})
    assert resume_settings("run", {"steps": 20}).width == 16


def test_a_checkpoint_of_another_text_is_refused():
    go(stop_at=6)
    other = corpus_of(Text(training.VERSE + "x", "goats", "LOWPREC_DATA", ""))
    with pytest.raises(RunError, match="another text than goats"):
        train(small(), "run", resume=True, corpus=other, progress=False)


# damage


def damage(path, how):
    content = path.read_bytes()
    if how == "cut off":
        path.write_bytes(content[: len(content) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "another file":
        path.write_bytes(b"hello")
    else:  # one bit in a weight
        middle = content.index(b"PK", len(content) // 3) - 100
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


@pytest.mark.parametrize("how", ["cut off", "emptied", "another file", "one bit"])
def test_a_damaged_checkpoint_gives_way_to_the_previous_one(how, capsys):
    whole = go("whole")
    part = go("part", stop_at=10)
    damage(part.folder / "checkpoint.pt", how)
    again = go("part", resume=True)
    printed = capsys.readouterr().out
    assert "checkpoint.pt is damaged" in printed
    assert "going on from checkpoint.previous.pt, which is of step 8" in printed
    require_same(whole, again)


def test_where_both_are_damaged_it_says_so():
    part = go(stop_at=10)
    for path in part.folder.glob("checkpoint*.pt"):
        damage(path, "cut off")
    with pytest.raises(RunError, match="no checkpoint in .* can be used: checkpoint.pt is damaged .*--overwrite"):
        go(resume=True)


def test_a_damaged_log_is_mended_from_the_checkpoint_on():
    whole = go("whole")
    part = go("part", stop_at=10)
    log = part.folder / "log.jsonl"
    log.write_bytes(log.read_bytes() + b'{"step": 11, "lo')
    require_same(whole, go("part", resume=True))
    assert len(Run(part.folder).read_log()) == 12


def test_a_full_disk_leaves_the_checkpoints_as_they_were(monkeypatch):
    go(stop_at=8)
    folder = run_folder("run")
    before = {path.name: path.read_bytes() for path in folder.glob("checkpoint*")}

    def full(path, content):
        if path.name.startswith(".checkpoint"):
            path.write_bytes(content[:1000])
            path.unlink()
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_new(path, content)

    write_new = files._write_new
    monkeypatch.setattr(files, "_write_new", full)
    with pytest.raises(
        WorkspaceError, match="The disk, or your share of it, is full.*What was saved before is unchanged"
    ):
        go(resume=True)
    assert {path.name: path.read_bytes() for path in folder.glob("checkpoint*")} == before
    assert not list(folder.glob(".*.tmp"))
    monkeypatch.setattr(files, "_write_new", write_new)
    require_same(go("whole"), go(resume=True))


def test_a_kill_between_two_renames_leaves_the_previous_one():
    whole = go("whole")
    part = go("part", stop_at=10)
    os.replace(part.folder / "checkpoint.pt", part.folder / "checkpoint.previous.pt")
    require_same(whole, go("part", resume=True))


def test_names_of_runs():
    assert settings("baby", precision="bf16").run_name == "baby-bf16"
    assert settings("gpt2", precision="fp8", recipe="rowwise").run_name == "gpt2-fp8-rowwise"
    for wrong in ("", "..", "a b", ".hidden"):
        with pytest.raises(RunError, match="a run's name"):
            run_folder(wrong)
    assert run_folder("/tmp/x") == Path("/tmp/x")


def test_under_grading_the_learners_folder_is_not_touched(monkeypatch, tmp_path):
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    result = go(steps=3)
    assert tmp_path not in result.folder.parents
    assert not (tmp_path / "work").exists()


def test_on_a_bare_machine_torch_and_numpy_are_enough(tmp_path):
    """Training in a Python that lacks everything else (but filelock, which torch itself needs)."""
    code = """
import sys
for name in ("matplotlib", "IPython", "ipywidgets", "anywidget", "pooch", "tqdm", "nbgrader", "torchao"):
    sys.modules[name] = None
from lowprec_lab.settings import settings
from lowprec_lab.train import train
size = {"layers": 1, "heads": 1, "width": 8, "context": 8, "batch": 2, "eval_batches": 1, "sample": 5}
for precision in ("fp32", "fp16", "fp8"):
    result = train(settings("baby", steps=2, precision=precision, **size))
print(len(result.records))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=training.environment(tmp_path), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2"


# TensorBoard


def test_tensorboard_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match="pip install tensorboard"):
        go(tensorboard=True)


def test_tensorboard_gets_every_number(monkeypatch):
    class Writer(list):
        closed = False

        def add_scalar(self, name, value, step):
            self.append((name, value, step))

        def close(self):
            self.closed = True

    writer = Writer()
    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = lambda folder, purge_step: writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    result = go(tensorboard=True)
    assert ("loss", result.records[4]["loss"], 5) in writer
    assert ("val_loss", result.val_loss, 12) in writer
    assert writer.closed


# the command line


def test_the_command(capsys, monkeypatch, tmp_path):
    for name, value in training.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "--name", "a", *training.flags(stop_at=6)]) == 0
    printed = capsys.readouterr()
    assert "sheep.txt (LOWPREC_DATA)" in printed.out
    assert "Stopped after step 6, with a checkpoint. Go on with the same command and --resume." in printed.out
    assert "tokens/s" in printed.err
    assert cli.main(["train", "--name", "a", "--resume", "--json"]) == 0
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert (made["step"], made["stopped"]) == (12, 0)
    assert "Going on after step 6 of 12." in printed.err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--precision", "fp12"], 2, "The precisions are"),
        (["--precision", "fp8", "--recipe", "row"], 2, "The recipes are: tensorwise, rowwise, rowwise_with_gw_hp, del"),
        (
            ["--precision", "fp8", "--skip", "blocks, head"],
            2,
            "no layer is left for FP8: blocks, head is to be skipped",
        ),
        (["--preset", "giant"], 2, "The presets are"),
        (["--heads", "3"], 2, "3 heads do not divide 128"),
        (["--loss-scale", "much"], 2, "a loss scale is"),
        (["--name", "b", "--device", "toaster"], 1, "no device 'toaster'"),
        (["--name", "a b"], 1, "a run's name"),
        (["--stop-at", "0"], 2, "stop_at is a step from 1 on"),
        (["--context", "100000"], 1, "too short"),
    ],
)
def test_commands_that_are_wrong(capsys, monkeypatch, tmp_path, arguments, status, words):
    for name, value in training.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", *arguments]) == status
    assert words in capsys.readouterr().err
    assert not list((tmp_path / "work").rglob("settings.json"))  # a run that is refused leaves no folder


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_makes_a_checkpoint(tmp_path, number, status):
    flags = training.flags(steps=100_000, checkpoint_every=100_000, eval_every=100_000)
    process = subprocess.Popen(
        training.command("--name", "run", *flags), env=training.environment(tmp_path), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    log = tmp_path / "work/runs/run/log.jsonl"
    wait_for(lambda: log.is_file() and log.stat().st_size > 2000, process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == status
    state = Run(log.parent).load()
    assert f"Stopped after step {state['step']}, with a checkpoint." in out
    assert len(log.read_text().splitlines()) == state["step"]


def wait_for(condition, process, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_run_goes_on_whenever_it_was_killed(tmp_path):
    """The run is killed at a random moment, again and again, until it is through: it ends as if it never was."""
    flags = training.flags(steps=600, checkpoint_every=1, eval_every=200, sample=0)
    environment = training.environment(tmp_path)
    chance = random.Random(int(time.time()))
    for _ in range(6):
        process = subprocess.Popen(
            training.command("--name", "killed", "--resume", *flags), env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(chance.uniform(2, 7))
        process.kill()
        process.wait()
    done = training.run(tmp_path, "--name", "killed", "--resume", *flags)
    assert done.returncode == 0, done.stderr
    done = training.run(tmp_path, "--name", "whole", *flags)
    assert done.returncode == 0, done.stderr
    killed, whole = (Run(tmp_path / "work/runs" / name) for name in ("killed", "whole"))
    assert without_speed(killed.read_log()) == without_speed(whole.read_log())
    first, second = (run.load()["trainer"]["model"] for run in (killed, whole))
    assert all(torch.equal(first[name], second[name]) for name in first)


# several processes

SEVERAL = """
import glob, hashlib, json, sys, torch
from pathlib import Path
from lowprec_lab.settings import settings
from lowprec_lab.train import train
from training import corpus, small
folder, accumulate, kind = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])

def keep_gradients(trainer):
    step = trainer.optimizer.step
    def stepping():
        if trainer.step == 0 and trainer.rank == 0:
            torch.save({n: p.grad.clone() for n, p in trainer.model.named_parameters()}, folder + "/gradients.pt")
        step()
    trainer.optimizer.step = stepping

told = small(accumulate=accumulate, clip=0.0, steps=30, **kind)
result = train(told, folder + "/run", progress=False, corpus=corpus(), on_start=keep_gradients)
left = [Path(each).read_text().strip() for each in glob.glob("/proc/self/task/*/comm")]
state = result.trainer.state_dict()
tensors = [*state["model"].values(), *(each for two in state["precision"].values() for each in two.values())]
digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()
told = [result.trainer.world, len(result.records), [name for name in left if "gloo" in name], digest]
Path(folder, f"rank-{result.trainer.rank}").write_text(repr(told))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, FP8[0], FP8[-1]], ids=str)
def test_two_processes_are_one_with_twice_the_batches(tmp_path, kind):
    script = tmp_path / "several.py"
    script.write_text(SEVERAL)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(__file__).parent)))
    environment = {**training.environment(tmp_path), "PYTHONPATH": path}
    outputs = []
    for launcher, accumulate in (([sys.executable], 2), (torchrun, 1)):
        folder = tmp_path / str(len(launcher))
        folder.mkdir()
        done = subprocess.run(
            [*launcher, str(script), str(folder), str(accumulate), json.dumps(kind)], capture_output=True, text=True,
            timeout=240, env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs.append((torch.load(folder / "gradients.pt"), Run(folder / "run").read_log()))
    (alone, log_alone), (together, log_together) = outputs
    told = [ast.literal_eval((folder / f"rank-{rank}").read_text()) for rank in (0, 1)]
    # No thread is left that could bring the process down at its end; weights and delayed scales are the same in both.
    assert [each[:3] for each in told] == [[2, 30, []], [2, 0, []]]
    assert told[0][3] == told[1][3]
    delayed = kind == FP8[-1]  # its first scales are 1, and a gradient of half the loss is rounded elsewhere
    for name, gradient in alone.items():
        # Two float32 sums in another order: a few last bits of the largest element.
        assert delayed or (gradient - together[name]).abs().max() <= 2.0**-21 * gradient.abs().max(), name
    assert len(log_together) == 30
    near = 2e-2 if delayed else 1e-2 if kind else 1e-5  # a last bit of a sum can be another code later on
    for one, two in zip(log_alone, log_together, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=near)
        if "val_loss" in one:
            assert one["val_loss"] == pytest.approx(two["val_loss"], abs=near)
