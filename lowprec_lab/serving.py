"""`lowprec-lab quantize` and `generate`: a trained run in 8 bits or fewer, measured, written, and asked for text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lowprec_lab import sharding
from lowprec_lab.checkpoints import CONFIG, WEIGHTS, load_fp8_checkpoint, save_fp8_checkpoint
from lowprec_lab.data import Corpus, DataError, Vocabulary, load_corpus
from lowprec_lab.gguf_file import FILE, load_gpt, save_gpt
from lowprec_lab.gpt import GPT
from lowprec_lab.inference import (
    RECIPES,
    Comparison,
    calibrate_cache,
    compare_models,
    find_recipe,
    generate,
    model_bytes,
    quantize_model,
)
from lowprec_lab.runs import Run, RunError, run_folder
from lowprec_lab.settings import Settings
from lowprec_lab.trainer import config_of
from lowprec_lab.weight_formats import find_format, name_of, with_weights_in

CALIBRATION = 8  # batches of training text for static scales
VALIDATION = 20  # batches that perplexities are measured on
# What a GGUF file may be made of: chapter 12's types, and what there is without quantizing.
GGUF_RECIPES = {
    "q8_0": "GGUF, 8.5 bits: blocks of 32 numbers, 8 bits and a scale",
    "q5_0": "GGUF, 5.5 bits: blocks of 32 numbers, 5 bits and a scale",
    "q4_1": "GGUF, 5 bits: blocks of 32 numbers, 4 bits, a scale and a smallest number",
    "q4_0": "GGUF, 4.5 bits: blocks of 32 numbers, 4 bits and a scale",
    "q4_k": "GGUF, 4.5 bits: blocks of 256 numbers, 4 bits, and 6 for each group's scale and min",
    "f16": "GGUF, 16 bits: float16",
}


@dataclass(frozen=True)
class Served:
    """What a recipe makes of a run. before, after: on the same text. bytes_before, bytes_after: of all tensors."""

    run: str
    recipe: str
    folder: Path
    before: Comparison
    after: Comparison
    bytes_before: int
    bytes_after: int
    file_bytes: int
    files: str = f"{WEIGHTS}, {CONFIG}"
    note: str = ""

    def as_dict(self) -> dict:
        """For --json."""
        return {
            "run": self.run, "recipe": self.recipe, "folder": str(self.folder),
            "perplexity_before": self.before.perplexity, "perplexity": self.after.perplexity,
            "agreement": self.after.agreement, "kl_divergence": self.after.divergence,
            "bytes_before": self.bytes_before, "bytes": self.bytes_after, "file_bytes": self.file_bytes,
            "note": self.note,
        }  # fmt: skip

    def text(self) -> str:
        """For people."""
        more = self.after.perplexity / self.before.perplexity - 1
        return "\n".join([
            f"{self.run}, {self.recipe}: {_text_of(self.recipe)}",
            f"  perplexity      {self.before.perplexity:.4f} in float32, {self.after.perplexity:.4f} now ({more:+.2%})",
            f"  next token      the same likeliest one for {self.after.agreement:.2%} of all tokens",
            f"  KL divergence   {self.after.divergence:.2e} nats for each token",
            f"  memory          {self.bytes_before:,} bytes before, {self.bytes_after:,} now",
            *([f"  matrices        {self.note}"] if self.note else []),
            f"  written to      {self.folder} ({self.files}; {self.file_bytes:,} bytes)",
        ])  # fmt: skip


def _text_of(recipe: str) -> str:
    return GGUF_RECIPES[recipe] if recipe in GGUF_RECIPES else find_recipe(recipe).text


def _require_recipe(name: str) -> None:
    """ValueError that lists all recipes where there is none of that name."""
    if name not in RECIPES and name not in GGUF_RECIPES:
        raise ValueError(f"there is no recipe {name!r}. The recipes are: {', '.join((*RECIPES, *GGUF_RECIPES))}")


def load_run(name: str, say=print) -> tuple[GPT, Vocabulary, str, Settings]:
    """(the model of a run, evaluating, in float32; its vocabulary; the SHA-256 of its text; its settings).

    Raises RunError for a folder without a run, or without a checkpoint.
    """
    run = Run(run_folder(name))
    told, state = run.read_settings(), run.load(say)
    if state is None:
        raise RunError(f"there is no checkpoint in {run.folder}: train that run, or go on with it (--resume)")
    vocabulary = Vocabulary(state["vocabulary"])
    model = GPT(config_of(told, len(vocabulary)))
    if "shards" in state:
        sharding.load(model, None, state["shards"])
    else:
        model.load_state_dict(state["trainer"]["model"])
    return model.eval(), vocabulary, state["text"], told


def text_of(run: str, sha256: str, say=print) -> Corpus:
    """The text that a run was trained on. RunError where the one that is found is another."""
    corpus = load_corpus(say)
    if corpus.sha256 != sha256:
        raise RunError(f"{run} was trained on another text than {corpus.name}. Set LOWPREC_DATA to that text")
    return corpus


def some_batches(corpus: Corpus, split: str, count: int, told: Settings) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` batches spread evenly over a split, the same every time."""
    return [corpus.even_batch(split, which, count, told.batch, told.context) for which in range(count)]


def quantize(run: str, recipe: str, out: str | None = None, say=print) -> Served:
    """Quantize a run, measure it, and write it to `out` (the recipe's name in the run's folder, where omitted).

    ValueError for an unknown recipe; RunError and DataError as `load_run` and `text_of`.
    """
    _require_recipe(recipe)
    model, vocabulary, sha256, told = load_run(run, say)
    corpus = text_of(run, sha256, say)
    if recipe in GGUF_RECIPES:
        return _quantize_gguf(run, recipe, out, model, vocabulary, some_batches(corpus, "validation", VALIDATION, told))
    made = quantize_model(model, recipe, some_batches(corpus, "train", CALIBRATION, told))
    validation = some_batches(corpus, "validation", VALIDATION, told)
    folder = Path(out) if out else run_folder(run) / recipe
    sizes = save_fp8_checkpoint(made, recipe, folder, vocabulary)
    before, after = (compare_models(model, each, validation) for each in (model, made))
    return Served(run, recipe, folder, before, after, model_bytes(model), model_bytes(made), sizes[WEIGHTS])


def _quantize_gguf(
    run: str, recipe: str, out: str | None, model: GPT, vocabulary: Vocabulary, validation: list
) -> Served:
    """The same as a GGUF file, which is then read again: what is measured is what the file holds."""
    folder = Path(out) if out else run_folder(run) / recipe
    saved = save_gpt(model, recipe, folder / FILE, vocabulary, name=Path(run).name)
    made, _ = load_gpt(folder / FILE)
    before, after = (compare_models(model, each, validation) for each in (model, made))
    return Served(run, recipe, folder, before, after, model_bytes(model), saved.bytes, saved.bytes, FILE, saved.text())


def write(
    run: str, start: str = "\n", count: int = 500, temperature: float = 0.8, seed: int = 1337,
    recipe: str | None = None, fp8_cache: bool = False, say=print,
) -> str:  # fmt: skip
    """`start` and `count` characters after it, by the model of a run, with a cache.

    run: a run, or a folder that `quantize` wrote. recipe: quantize the run first. fp8_cache: keys and values in 8 bits
    as well, with scales calibrated on the training text, or on `start` where there is only a folder.
    ValueError for settings that cannot be; RunError, CheckpointError and DataError as elsewhere.
    """
    if count < 0 or not temperature > 0:
        raise ValueError(f"count is a number from 0 on, and temperature one above 0; not {count} and {temperature:g}")
    if not start:
        raise ValueError("start is at least one character: a model continues a text")
    if recipe is not None:
        _require_recipe(recipe)
    model, vocabulary, batches = _model(run, recipe, fp8_cache, say)
    tokens = torch.from_numpy(vocabulary.encode(start).astype("int64"))[None]
    scales = None
    if fp8_cache:
        scales = calibrate_cache(model, batches or [(tokens[:, -model.config.context :], tokens)])
    generator = torch.Generator().manual_seed(seed)
    return vocabulary.decode(generate(model, tokens, count, temperature, generator=generator, scales=scales)[0])


def _model(run: str, recipe: str | None, fp8_cache: bool, say) -> tuple[GPT, Vocabulary, list]:
    """(model, vocabulary, batches to calibrate with: none where nothing asks for them)."""
    folder = run_folder(run)
    loaders = {WEIGHTS: load_fp8_checkpoint, FILE: lambda folder: load_gpt(folder / FILE)}
    for file in filter(lambda file: (folder / file).is_file(), loaders):
        if recipe is not None:
            raise ValueError(f"{folder} is quantized already: leave --recipe out")
        model, vocabulary = loaders[file](folder)
        if vocabulary is None:
            raise DataError(f"{folder} names no characters, so its tokens are no text")
        return model, vocabulary, []
    model, vocabulary, sha256, told = load_run(run, say)
    batches = []
    if fp8_cache or recipe in RECIPES and find_recipe(recipe).activations == "static":
        batches = some_batches(text_of(run, sha256, say), "train", CALIBRATION, told)
    if recipe in GGUF_RECIPES:
        model = with_weights_in(model, find_format(name_of(recipe)))[0]
    elif recipe is not None:
        model = quantize_model(model, recipe, batches)
    return model, vocabulary, batches
