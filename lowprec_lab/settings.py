"""What a training run is told: every setting with its default and its line of help. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields

# What nanoGPT's own configurations say for these sizes; "baby" is its setting for a laptop's CPU, at 1.5 times the
# learning rate: so small a model ends lower with it (tiny Shakespeare, 2000 steps: 1.85 for 1.92).
TRAINING: dict[str, dict] = {
    "baby": {"steps": 2000, "lr": 1.5e-3, "min_lr": 1e-4, "warmup": 100, "beta2": 0.99, "eval_every": 250},
    "baby256": {"steps": 2000, "lr": 1e-3, "min_lr": 1e-4, "warmup": 100, "beta2": 0.99, "eval_every": 250},
    "shakespeare_char": {"steps": 5000, "lr": 1e-3, "min_lr": 1e-4, "warmup": 100, "beta2": 0.99, "eval_every": 250},
    "gpt2": {
        "steps": 600_000, "lr": 6e-4, "min_lr": 6e-5, "warmup": 2000, "beta2": 0.95, "eval_every": 1000,
        "accumulate": 40,
    },
}  # fmt: skip

# A run that goes on keeps these: with another value it would be another run. It keeps the batches of a step, too.
IDENTITY = (
    "preset", "layers", "heads", "width", "context", "bias", "dropout", "precision", "recipe", "skip", "batch",
    "seed",
)  # fmt: skip


class SettingsError(ValueError):
    """A setting that cannot be; the sentence names it."""

    def _render_traceback_(self) -> list[str]:
        return [f"SettingsError: {self}"]


def _setting(default: object, text: str, least: float | None = None):
    return field(default=default, metadata={"help": text, "least": least})


@dataclass(frozen=True)
class Settings:
    """All settings of a run; `settings(preset, ...)` fills in what the preset says."""

    preset: str = _setting("baby", "baby, baby256, shakespeare_char or gpt2: sizes, and defaults for what follows")
    precision: str = _setting("fp32", "fp32, bf16, fp16, fp8, or pure_bf16 (weights and optimizer too)")
    recipe: str = _setting("tensorwise", "of fp8: tensorwise, rowwise, rowwise_with_gw_hp or delayed")
    skip: str = _setting(
        "head", "layers that fp8 leaves alone: texts in their names, with commas; small: those no GPU is faster with"
    )
    loss_scale: str = _setting(
        "auto", "dynamic, none, or a number, such as 1024 or 1/640 (auto: dynamic for fp16, else none)"
    )
    steps: int = _setting(2000, "optimizer steps; the learning rate falls until the last", 1)
    batch: int = _setting(12, "sequences in a batch", 1)
    accumulate: int = _setting(1, "batches whose gradients make one step, on each process", 1)
    lr: float = _setting(1e-3, "largest learning rate", 0)
    min_lr: float = _setting(1e-4, "learning rate at the end", 0)
    warmup: int = _setting(100, "steps in which the learning rate rises", 0)
    beta1: float = _setting(0.9, "AdamW's average of gradients", 0)
    beta2: float = _setting(0.99, "AdamW's average of squared gradients", 0)
    weight_decay: float = _setting(0.1, "of matrices; vectors have none", 0)
    clip: float = _setting(1.0, "largest gradient norm (0: no clipping)", 0)
    context: int = _setting(64, "tokens that the model sees", 1)
    layers: int = _setting(4, "blocks", 1)
    heads: int = _setting(4, "attention heads", 1)
    width: int = _setting(128, "numbers for each token", 1)
    dropout: float = _setting(0.0, "probability of a zero while training", 0)
    bias: bool = _setting(False, "whether layers have a bias")
    eval_every: int = _setting(250, "steps between validations", 1)
    eval_batches: int = _setting(100, "batches of a validation, always the same ones", 1)
    checkpoint_every: int = _setting(250, "steps between checkpoints", 1)
    sample: int = _setting(300, "characters to write at the end (0: none)", 0)
    seed: int = _setting(1337, "of weights, batches and dropout", 0)
    device: str = _setting("auto", "auto, cpu, cuda, cuda:1, mps")
    compile: bool = _setting(False, "torch.compile the model")
    threads: int = _setting(0, "of the CPU (0: as torch chooses); other counts, other last bits", 0)
    shard: bool = _setting(False, "under torchrun: each rank keeps its part of the weights (FSDP2), FP8 ones travel so")
    patience: int = _setting(60, "under torchrun: seconds that a rank waits for another one before the run ends", 1)
    tensorboard: bool = _setting(False, "write the log for TensorBoard as well")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            wanted = type(each.default)
            if wanted is float and type(value) is int:
                object.__setattr__(self, each.name, float(value))
            elif type(value) is not wanted:
                raise SettingsError(f"{each.name} is of type {wanted.__name__}, not {value!r}")
            least = each.metadata["least"]
            if least is not None and not value >= least:
                raise SettingsError(f"{each.name} is {least} or more, not {value!r}")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise SettingsError(f"{name} is below 1, not {getattr(self, name)!r}")

    @property
    def skipped(self) -> tuple[str, ...]:
        """`skip`, text by text; none where it is empty or "none"."""
        texts = tuple(text.strip() for text in self.skip.split(",") if text.strip())
        return () if texts == ("none",) else texts

    @property
    def label(self) -> str:
        """The precision, and for FP8 its recipe: "fp8-rowwise"."""
        return f"fp8-{self.recipe}" if self.precision == "fp8" else self.precision

    @property
    def run_name(self) -> str:
        """What the run's folder is called where nobody says otherwise."""
        return f"{self.preset}-{self.label}"

    @property
    def scale_setting(self) -> str:
        """`loss_scale`, with what "auto" means."""
        if self.loss_scale != "auto":
            return self.loss_scale
        return "dynamic" if self.precision == "fp16" else "none"


def settings(preset: str = "baby", **changes: object) -> Settings:
    """The settings of a preset, with `changes` to them. Raises SettingsError for what cannot be."""
    from lowprec_lab.gpt import PRESETS

    if preset not in TRAINING:
        raise SettingsError(f"there is no preset {preset!r}. The presets are: {', '.join(TRAINING)}")
    unknown = set(changes) - {each.name for each in fields(Settings)}
    if unknown:
        raise SettingsError(f"there is no setting {', '.join(sorted(unknown))}. The settings are: {', '.join(names())}")
    values = {**PRESETS[preset], **TRAINING[preset], **changes}
    values.setdefault("checkpoint_every", values["eval_every"])
    return Settings(preset=preset, **values)


def names() -> list[str]:
    """The names of all settings."""
    return [each.name for each in fields(Settings)]


def changed(before: Settings, after: Settings) -> dict[str, tuple[object, object]]:
    """Setting -> (before, after), where they differ."""
    pairs = (
        (each.name, getattr(before, each.name), getattr(after, each.name)) for each in dataclasses.fields(Settings)
    )
    return {name: (old, new) for name, old, new in pairs if old != new}
