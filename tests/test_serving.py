"""`lowprec-lab quantize` and `generate`: on a short run, on folders that are none, and with settings that cannot be."""

import json

import pytest

from lowprec_lab.__main__ import main
from lowprec_lab.data import Text, corpus_of
from lowprec_lab.inference import RECIPES
from lowprec_lab.serving import GGUF_RECIPES, load_run, quantize, write
from lowprec_lab.settings import settings
from lowprec_lab.train import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the folder of a short run, the text it was trained on)."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    corpus = corpus_of(Text(text.read_text(), "text.txt", "test", "A text for a test."))
    told = settings(
        "baby", steps=3, layers=1, heads=2, width=16, context=16, batch=4, sample=0, eval_every=3, threads=1
    )
    run = folder / "run"
    train(told, str(run), progress=False, corpus=corpus, say=lambda line: None)
    return run, text


@pytest.fixture
def with_text(trained, monkeypatch):
    monkeypatch.setenv("LOWPREC_DATA", str(trained[1]))
    return str(trained[0])


def silent(line):
    pass


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantize_says_what_it_costs_and_writes_a_checkpoint(with_text, recipe, tmp_path, capsys):
    assert main(["quantize", with_text, "--recipe", recipe, "--out", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"] == recipe
    assert abs(found["perplexity"] / found["perplexity_before"] - 1) < 0.02
    assert 0.8 < found["agreement"] <= 1
    assert found["bytes"] < found["bytes_before"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json"}
    assert main(["generate", str(tmp_path / "out"), "--start", "the ", "--count", "20", "--fp8-cache"]) == 0
    assert len(capsys.readouterr().out) == len("the ") + 20 + 1


@pytest.mark.parametrize("recipe", GGUF_RECIPES)
def test_quantize_writes_gguf_files_that_generate_reads(with_text, recipe, tmp_path, capsys):
    assert main(["quantize", with_text, "--recipe", recipe, "--out", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert abs(found["perplexity"] / found["perplexity_before"] - 1) < 0.05
    assert found["file_bytes"] == (tmp_path / "out" / "model.gguf").stat().st_size
    assert ("fell back" in found["note"]) == (recipe != "f16")  # 16 numbers in a row are no block
    assert main(["generate", str(tmp_path / "out"), "--start", "the ", "--count", "20", "--fp8-cache"]) == 0
    assert len(capsys.readouterr().out) == len("the ") + 20 + 1
    assert main(["generate", with_text, "--recipe", recipe, "--start", "the ", "--count", "3"]) == 0
    capsys.readouterr()
    assert main(["quantize", with_text, "--recipe", recipe]) == 0
    text = capsys.readouterr().out
    assert f"{recipe}: GGUF" in text
    assert "model.gguf" in text


def test_a_broken_gguf_file_is_told(with_text, tmp_path, capsys):
    quantize(with_text, "q4_0", str(tmp_path), say=silent)
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[:-300])
    assert main(["generate", str(tmp_path)]) == 1
    assert "is cut off" in capsys.readouterr().err


def test_text_for_people_and_the_usual_folder(with_text, capsys):
    assert main(["quantize", with_text]) == 0
    text = capsys.readouterr().out
    assert "fp8_dynamic" in text
    assert "perplexity" in text
    assert (load_folder := with_text + "/fp8_dynamic") in text
    assert main(["generate", load_folder, "--count", "0", "--start", "fox"]) == 0
    assert capsys.readouterr().out == "fox\n"


def test_generate_from_a_run_is_the_same_twice_and_goes_on_beyond_the_context(with_text, capsys):
    texts = []
    for more in ([], [], ["--seed", "2"], ["--recipe", "fp8_weights"], ["--fp8-cache", "--recipe", "fp8_static"]):
        assert main(["generate", with_text, "--start", "the", "--count", "40", *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(len(text) == 44 and text.startswith("the") for text in texts)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["quantize", "{folder}/nothing"], 1, "there is no run in"),
        (["generate", "{folder}/nothing"], 1, "there is no run in"),
        (["quantize", "no-such-run"], 1, "there is no run in"),
        (["quantize", "{run}", "--recipe", "int4"], 2, "The recipes are: fp8_dynamic"),
        (["generate", "{run}", "--recipe", "int4"], 2, "The recipes are: fp8_dynamic"),
        (["generate", "{run}", "--count", "-1"], 2, "count is a number from 0 on"),
        (["generate", "{run}", "--temperature", "0"], 2, "temperature one above 0"),
        (["generate", "{run}", "--start", ""], 2, "at least one character"),
        (["generate", "{run}", "--start", "Ω"], 1, "lacks 'Ω'"),
        (["quantize", "{untrained}"], 1, "there is no checkpoint in"),
    ],
    ids=lambda value: value[0] + " " + " ".join(value[1:]) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_said(with_text, tmp_path, arguments, status, says, capsys):
    untrained = tmp_path / "untrained"
    untrained.mkdir()
    (untrained / "settings.json").write_text(json.dumps({"preset": "baby"}))
    places = {"folder": tmp_path, "run": with_text, "untrained": untrained}
    assert main([each.format(**places) for each in arguments]) == status
    said = capsys.readouterr()
    assert says in said.err
    assert not said.out


def test_a_run_on_another_text_says_so(trained, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other.txt"
    other.write_text("0123456789\n" * 100)
    monkeypatch.setenv("LOWPREC_DATA", str(other))
    assert main(["quantize", str(trained[0])]) == 1
    assert "trained on another text" in capsys.readouterr().err


def test_a_checkpoint_is_not_quantized_again(with_text, tmp_path, capsys):
    quantize(with_text, "fp8_dynamic", str(tmp_path), say=silent)
    assert main(["generate", str(tmp_path), "--recipe", "fp8_dynamic"]) == 2
    assert "is quantized already" in capsys.readouterr().err


def test_a_broken_checkpoint_is_told(with_text, tmp_path, capsys):
    quantize(with_text, "fp8_dynamic", str(tmp_path), say=silent)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert main(["generate", str(tmp_path)]) == 1
    assert "is no safetensors file" in capsys.readouterr().err


def test_from_python(with_text):
    model, vocabulary, _, told = load_run(with_text, say=silent)
    assert not model.training
    assert told.context == model.config.context
    assert len(vocabulary) == model.config.vocab_size


def test_generate_needs_no_text(trained, monkeypatch, tmp_path):
    monkeypatch.setenv("LOWPREC_DATA", str(tmp_path / "nothing"))
    assert write(str(trained[0]), "fox", 4, recipe="fp8_dynamic", say=silent).startswith("fox")
