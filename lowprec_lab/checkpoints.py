"""A model in 8 bits as two files that others read, laid out as compressed-tensors does: weights and configuration.

A safetensors file is: 8 bytes, the length of what follows, little-endian; a JSON object that says of each tensor its
dtype, its shape and where its bytes begin and end; and the bytes. Nothing in it can be run, which is why people
exchange this and no pickles. For each linear layer in 8 bits, model.safetensors has

    NAME.weight          F8_E4M3 (N, K): codes
    NAME.weight_scale    F32 (N, 1), or (1,): a code times this is the weight
    NAME.input_scale     F32 (1,), where activations have a static scale
    NAME.bias            as it is

and config.json says under "quantization_config" which layers these are, and how their inputs are quantized.

References: huggingface/safetensors, README (the format); vllm-project/compressed-tensors, quantization/quant_config.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from lowprec_lab.data import Vocabulary
from lowprec_lab.files import explained, write_whole
from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.inference import RECIPES, Float8InferenceLinear, ServingRecipe, find_recipe

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64, "U8": torch.uint8,
}  # fmt: skip
_LONGEST_HEADER = 100_000_000


class CheckpointError(Exception):
    """A checkpoint cannot be used; the sentence says why."""

    def _render_traceback_(self) -> list[str]:
        return [f"CheckpointError: {self}"]


# --- one file ---------------------------------------------------------------------------------------------------------


def write_safetensors(path: str | Path, tensors: dict[str, Tensor]) -> int:
    """Write tensors to a safetensors file, whole or not at all. Returns its size in bytes."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        place, end = end, end + len(raw)
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        parts.append(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the bytes of the tensors begin at a multiple of 8
    content = b"".join([len(text).to_bytes(8, "little"), text, *parts])
    write_whole(Path(path), content)
    return len(content)


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. CheckpointError where it is cut off, or is none."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    with explained(path, "read"):
        content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, _LONGEST_HEADER):
        raise CheckpointError(f"{path} is no safetensors file, or is cut off: its header would have {length} bytes")
    try:
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        return {name: _tensor(told, content[8 + length :]) for name, told in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file, or is cut off: {error}") from error


def _tensor(told: dict, content: bytes) -> Tensor:
    dtype, shape, (start, end) = _DTYPES.get(told["dtype"]), tuple(told["shape"]), told["data_offsets"]
    if dtype is None:
        raise ValueError(f"dtype {told['dtype']} is not among those that are read here: {', '.join(_DTYPES)}")
    if not 0 <= start <= end <= len(content) or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"bytes {start} to {end} of {len(content)} cannot be a tensor of shape {shape}")
    if start == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content[start:end]), dtype=torch.uint8).view(dtype).reshape(shape)


# --- a model ----------------------------------------------------------------------------------------------------------


def save_fp8_checkpoint(
    model: GPT, recipe: str | ServingRecipe, folder: str | Path, vocabulary: Vocabulary | None = None
) -> dict[str, int]:
    """Write a GPT that `quantize_model` made with this recipe to a folder. Returns the bytes of each file.

    A weight that is tied is written once, under the embedding's name. vocabulary: kept in the configuration, so that
    text can be generated from the folder alone.
    """
    recipe, folder = find_recipe(recipe) if isinstance(recipe, str) else recipe, Path(folder)
    tensors = dict(model.state_dict())
    if model.head.weight is model.token_embedding.weight:
        del tensors["head.weight"]
    kept = [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
    config = {
        "architectures": ["GPT"],
        "tie_word_embeddings": "head.weight" not in tensors,
        "lowprec_lab": {**dataclasses.asdict(model.config), "recipe": recipe.name},
        "quantization_config": quantization_config(recipe, kept),
    }
    if vocabulary is not None:
        config["lowprec_lab"]["characters"] = vocabulary.characters
    text = json.dumps(config, indent=1).encode() + b"\n"
    size = write_safetensors(folder / WEIGHTS, tensors)
    write_whole(folder / CONFIG, text)
    return {WEIGHTS: size, CONFIG: len(text)}


def quantization_config(recipe: ServingRecipe, ignore: list[str]) -> dict:
    """What compressed-tensors has to know: how linear layers are quantized, and which of them are not."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = {
        "token": {**number, "strategy": "token", "dynamic": True},
        "static": {**number, "strategy": "tensor", "dynamic": False},
        "none": None,
    }[recipe.activations]
    group = {"targets": ["Linear"], "weights": {**number, "strategy": recipe.weights, "dynamic": False}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if inputs else "naive-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "input_activations": inputs, "output_activations": None}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def load_fp8_checkpoint(folder: str | Path) -> tuple[GPT, Vocabulary | None]:
    """(the model, evaluating; its vocabulary, if the folder has one). CheckpointError where something is missing."""
    folder = Path(folder)
    tensors = read_safetensors(folder / WEIGHTS)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"there is no file {folder / CONFIG}: it says what the tensors are")
    try:
        with explained(folder / CONFIG, "read"):
            told = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["lowprec_lab"]
        recipe, characters = RECIPES[told.pop("recipe")], told.pop("characters", None)
        model = GPT(GPTConfig(**told))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG} is not that of a GPT in 8 bits: {error!r}") from error
    _put_layers(model, tensors, recipe, folder)
    if "head.weight" not in tensors:
        tensors["head.weight"] = tensors.get("token_embedding.weight")
    expected = model.state_dict()
    wrong = [name for name, there in expected.items() if name in tensors and tensors[name].shape != there.shape]
    missing, foreign = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    troubles = ((missing, "lacks"), (foreign, "has, and the model does not,"), (wrong, "has the wrong size of"))
    for names, what in troubles:
        if names:
            raise CheckpointError(f"{folder / WEIGHTS} {what} {', '.join(names[:3])}{' ...' * (len(names) > 3)}")
    model.load_state_dict(tensors)
    return model.eval(), None if characters is None else Vocabulary(characters)


def _put_layers(model: GPT, tensors: dict[str, Tensor], recipe: ServingRecipe, folder: Path) -> None:
    """A layer in 8 bits in place of each whose weight has codes."""
    way = {"static": "tensor"}.get(recipe.activations, recipe.activations)
    for name, layer in list(model.named_modules()):
        codes = tensors.get(f"{name}.weight")
        if type(layer) is not nn.Linear or codes is None or codes.dtype != torch.float8_e4m3fn:
            continue
        needed = ["weight_scale", *(["input_scale"] if recipe.activations == "static" else [])]
        found = {part: tensors.get(f"{name}.{part}") for part in (*needed, "bias")}
        for part in needed:
            if found[part] is None:
                raise CheckpointError(
                    f"{folder / WEIGHTS} has codes for {name} and no {part}: codes without scales are no numbers"
                )
        parent, _, own = name.rpartition(".")
        made = Float8InferenceLinear(codes, found["weight_scale"], found["bias"], found.get("input_scale"), way)
        setattr(model.get_submodule(parent), own, made)
