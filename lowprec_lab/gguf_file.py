"""A GPT as a GGUF file, and back: which tensor gets which type, a reader that trusts nothing, the model again.

The file is written by exercise 12.11. Tensors have the names that llama.cpp gives them. The architecture in the
metadata is this course's own, since its GPT (no biases, characters as tokens) is none that llama.cpp knows: any reader
of GGUF opens the file, and only this one makes a model of it.

References: ggml-org/ggml, docs/gguf.md (the format) and include/gguf.h; ggml-org/llama.cpp, src/llama-quant.cpp (what
a tensor falls back to whose rows blocks of 256 do not divide).
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowprec_lab import gguf_blocks
from lowprec_lab.data import Vocabulary
from lowprec_lab.files import explained, write_whole
from lowprec_lab.gguf_blocks import ALIGNMENT, GGUF_TYPES, LAYOUTS, GGUFTensor, byte_count
from lowprec_lab.gpt import GPT, GPTConfig

FILE = "model.gguf"
ARCHITECTURE = "lowprec_gpt"
# What a tensor is stored as whose rows the blocks of a type do not divide, and if 32 does not divide them either.
FALLBACK, LAST_RESORT = "q5_0", "f16"
# The number that stands for "mostly this type" in the metadata (llama.cpp's llama_ftype).
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q4_k": 14}
_RENAMED = (
    (r"^blocks\.(\d+)\.", r"blk.\1."), (r"attention_norm\.", "attn_norm."), (r"attention\.qkv\.", "attn_qkv."),
    (r"attention\.out\.", "attn_output."), (r"mlp_norm\.", "ffn_norm."), (r"mlp\.up\.", "ffn_up."),
    (r"mlp\.down\.", "ffn_down."), (r"^token_embedding\.", "token_embd."), (r"^position_embedding\.", "position_embd."),
    (r"^norm\.", "output_norm."),
)  # fmt: skip


class GGUFError(Exception):
    """A GGUF file cannot be used; the sentence says why."""

    def _render_traceback_(self) -> list[str]:
        return [f"GGUFError: {self}"]


# --- one tensor -------------------------------------------------------------------------------------------------------


def kind_for(shape: tuple[int, ...], kind: str) -> str:
    """The type that a tensor of this shape is stored as where `kind` is wanted: itself, or what it falls back to."""
    for each in (kind, FALLBACK):
        if each not in LAYOUTS or shape[-1] % LAYOUTS[each].size == 0:
            return each
    return LAST_RESORT


def packed(name: str, x: Tensor, kind: str) -> GGUFTensor:
    """x as a tensor for a file, by the quantizers of chapter 12. ValueError for q6_k, which has none here."""
    x = x.detach().cpu().float()
    if kind in ("f32", "f16"):
        data = x.to(torch.float16 if kind == "f16" else torch.float32).contiguous().reshape(-1).view(torch.uint8)
    elif hasattr(gguf_blocks, f"quantize_{kind}"):
        data = getattr(gguf_blocks, f"quantize_{kind}")(x)
    else:
        raise ValueError(f"nothing here quantizes to {kind!r}. There are: {', '.join(_FILE_TYPES)}")
    return GGUFTensor(name, kind, tuple(x.shape), data.reshape(-1))


def unpacked(tensor: GGUFTensor) -> Tensor:
    """The numbers of a tensor: float32, in its shape."""
    if tensor.kind in ("f32", "f16"):
        dtype = torch.float32 if tensor.kind == "f32" else torch.float16
        return tensor.data.clone().view(dtype).float().reshape(tensor.shape)
    rows = tensor.data.reshape(math.prod(tensor.shape[:-1]), -1)
    if tensor.kind in ("q4_k", "q6_k"):
        numbers = getattr(gguf_blocks, f"dequantize_{tensor.kind}")(rows)
    else:
        numbers = gguf_blocks.dequantize_blocks(rows, tensor.kind)
    return numbers.reshape(tensor.shape)


# --- one file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GGUFFile:
    """What a file holds. metadata: by key. tensors: by name, in the order of the file."""

    metadata: dict
    tensors: dict[str, GGUFTensor]


def save_gguf(path: str | Path, metadata: dict, tensors: list[GGUFTensor]) -> int:
    """Write a GGUF file by exercise 12.11, whole or not at all. Returns its size in bytes."""
    file = io.BytesIO()
    gguf_blocks.write_gguf(file, metadata, tensors)
    content = file.getvalue()
    write_whole(Path(path), content)
    return len(content)


def read_gguf(path: str | Path, architecture: str | None = None) -> GGUFFile:
    """What a GGUF file holds: version 2 or 3, little-endian, tensors of the types that this chapter has.

    architecture: what general.architecture has to be; asked before any tensor is looked at. Raises GGUFError that says
    what is wrong, for a file that is cut off, or is none, or has what cannot be read here.
    """
    path = Path(path)
    if not path.is_file():
        raise GGUFError(f"there is no file {path}")
    with explained(path, "read"), path.open("rb") as file, _told(path):
        size = path.stat().st_size
        return _Reader(file, size).file(architecture)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """The file's name in front of what the reader found."""
    try:
        yield
    except GGUFError as error:
        raise GGUFError(f"{path} {error}") from None


_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_LONGEST_TEXT, _MOST_DIMENSIONS, _DEEPEST = 1 << 24, 4, 3
_LEAST_ENTRY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8  # bytes


class _Reader:
    """Reads a file from its beginning. Nothing is allocated for a number that the file's size does not allow."""

    def __init__(self, file: io.BufferedReader, size: int) -> None:
        self.raw, self.size, self.place = file, size, 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.place:
            raise GGUFError(
                f"is cut off: {what} would end at byte {self.place + count:,}, and the file has {self.size:,} bytes"
            )
        self.place += count
        return self.raw.read(count)

    def number(self, code: str, what: str) -> int | float:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def text(self, what: str) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > _LONGEST_TEXT:
            raise GGUFError(f"is damaged: {what} would be a text of {length:,} bytes")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise GGUFError(f"is damaged: {what} is not UTF-8") from None

    def count(self, code: str, least: int, what: str) -> int:
        """How many of something there are, each of at least so many bytes."""
        count = self.number(code, f"the number of {what}")
        if count * least > self.size - self.place:
            raise GGUFError(f"is cut off or damaged: {count:,} {what} do not fit into its {self.size:,} bytes")
        return count

    def value(self, kind: int, what: str, depth: int = 0) -> object:
        if kind == _TEXT:
            return self.text(what)
        if kind == _LIST and depth < _DEEPEST:
            inner = self.number("I", f"the type in {what}")
            return [self.value(inner, what, depth + 1) for _ in range(self.count("Q", 1, f"elements of {what}"))]
        if kind not in _NUMBERS:
            raise GGUFError(f"is damaged: {what} has type {kind}, which GGUF does not have")
        return self.number(_NUMBERS[kind], what)

    def file(self, architecture: str | None) -> GGUFFile:
        start = self.raw.read(min(4, self.size))
        if start != b"GGUF":
            raise GGUFError(f"is no GGUF file: it begins with {start!r}, not with b'GGUF'")
        self.place = 4
        version = self.number("I", "the version")
        if version not in (2, 3):
            order = " of the other byte order" if version and version % 65536 == 0 else ""
            raise GGUFError(f"is a GGUF file{order} of version {version}; 2 and 3 are read here, little-endian")
        tensors, entries = self.number("Q", "the number of tensors"), self.count("Q", _LEAST_ENTRY, "entries")
        metadata: dict = {}
        for _ in range(entries):
            key = self.text("a key")
            if key in metadata:
                raise GGUFError(f"is damaged: it has {key} twice")
            metadata[key] = self.value(self.number("I", f"the type of {key}"), key)
        if architecture is not None and metadata.get("general.architecture") != architecture:
            found = metadata.get("general.architecture", "none")
            raise GGUFError(f"holds a model of architecture {found!r}; one of {architecture!r} is wanted")
        if tensors * _LEAST_TENSOR > self.size - self.place:
            raise GGUFError(f"is cut off or damaged: {tensors:,} tensors do not fit into its {self.size:,} bytes")
        infos = [self.info() for _ in range(tensors)]
        return GGUFFile(metadata, self.tensors(infos, self.alignment(metadata)))

    def alignment(self, metadata: dict) -> int:
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise GGUFError(f"is damaged: its alignment is {alignment!r}, and a power of two is needed")
        return alignment

    def info(self) -> tuple[str, str, tuple[int, ...], int]:
        """(name, kind, shape in torch's order, where it begins) of a tensor."""
        name = self.text("the name of a tensor")
        dimensions = self.number("I", f"the number of dimensions of {name}")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise GGUFError(f"is damaged: {name} has {dimensions} dimensions, and 1 to {_MOST_DIMENSIONS} can be")
        sizes = [self.number("Q", f"the shape of {name}") for _ in range(dimensions)]
        code, offset = self.number("I", f"the type of {name}"), self.number("Q", f"the place of {name}")
        kind = next((kind for kind, number in GGUF_TYPES.items() if number == code), None)
        if kind is None:
            raise GGUFError(f"has a type that is not read here: {name} is of ggml's type {code}")
        return name, kind, tuple(reversed(sizes)), offset

    def tensors(self, infos: list[tuple], alignment: int) -> dict[str, GGUFTensor]:
        begin, found = self.place + -self.place % alignment, {}
        for name, kind, shape, offset in infos:
            if name in found:
                raise GGUFError(f"is damaged: it has tensor {name} twice")
            if offset % alignment:
                raise GGUFError(f"is damaged: {name} begins at {offset:,}, which is no multiple of {alignment}")
            try:
                count = byte_count(kind, shape)
            except ValueError as error:
                raise GGUFError(f"is damaged: {name}: {error}") from None
            self.place = begin + offset
            self.raw.seek(min(self.place, self.size))
            content = bytearray(self.take(count, f"tensor {name}"))
            data = torch.frombuffer(content, dtype=torch.uint8) if count else torch.zeros(0, dtype=torch.uint8)
            found[name] = GGUFTensor(name, kind, shape, data)
        return found


# --- a model ----------------------------------------------------------------------------------------------------------


def file_name(name: str) -> str:
    """What a parameter of the GPT is called in a file: "blocks.0.mlp.up.weight" is "blk.0.ffn_up.weight"."""
    for ours, theirs in _RENAMED:
        name = re.sub(ours, theirs, name)
    return name


def gpt_tensors(model: GPT, kind: str) -> tuple[list[GGUFTensor], dict[str, str]]:
    """(the tensors of a GPT, by file; what some fell back to, by name).

    Matrices are stored as `kind`, vectors as float32. The head's weight is the embedding's, and is stored once.
    """
    made, fell = [], {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        chosen = kind_for(shape, kind) if parameter.dim() > 1 else "f32"
        if parameter.dim() > 1 and chosen != kind:
            fell[file_name(name)] = chosen
        made.append(packed(file_name(name), parameter, chosen))
    return made, fell


@dataclass(frozen=True)
class SavedGPT:
    """What was written. fell_back: type by name of each matrix that is not of the wanted type."""

    kind: str
    bytes: int
    matrices: int
    fell_back: dict[str, str]

    def text(self) -> str:
        """How many matrices are of the type, and which are not."""
        told = f"{self.matrices - len(self.fell_back)} of {self.matrices} matrices in {self.kind}"
        if not self.fell_back:
            return told
        names = ", ".join(f"{name} ({kind})" for name, kind in self.fell_back.items())
        return f"{told}. {len(self.fell_back)} fell back, as their rows are not made of its blocks: {names}"


def save_gpt(
    model: GPT, kind: str, path: str | Path, vocabulary: Vocabulary | None = None, name: str = "GPT"
) -> SavedGPT:
    """Write a GPT as a GGUF file, whole or not at all. kind: "f32", "f16" or a type that chapter 12 quantizes to."""
    if kind not in _FILE_TYPES:
        raise ValueError(f"a GPT is not written as {kind!r}. There are: {', '.join(_FILE_TYPES)}")
    tensors, fell = gpt_tensors(model, kind)
    size = save_gguf(path, metadata_of(model, kind, vocabulary, name), tensors)
    return SavedGPT(kind, size, sum(len(each.shape) > 1 for each in tensors), fell)


def metadata_of(model: GPT, kind: str, vocabulary: Vocabulary | None = None, name: str = "GPT") -> dict:
    """What a file says of its model: the keys that every GGUF file has, the sizes, and the characters."""
    config, own = model.config, ARCHITECTURE
    metadata = {
        "general.architecture": own,
        "general.name": name,
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": 2,
        f"{own}.context_length": config.context,
        f"{own}.embedding_length": config.width,
        f"{own}.block_count": config.layers,
        f"{own}.feed_forward_length": 4 * config.width,
        f"{own}.attention.head_count": config.heads,
        f"{own}.attention.layer_norm_epsilon": model.norm.eps,
        f"{own}.vocab_size": config.vocab_size,
        f"{own}.use_bias": config.bias,
    }
    if vocabulary is not None:
        metadata |= {
            "tokenizer.ggml.model": "lowprec_characters",
            "tokenizer.ggml.tokens": list(vocabulary.characters),
        }
    return metadata


def load_gpt(path: str | Path) -> tuple[GPT, Vocabulary | None]:
    """(the GPT of a file, in float32, evaluating; its vocabulary, if it has one). GGUFError says what is wrong."""
    found = read_gguf(path, ARCHITECTURE)
    with _told(Path(path)):
        config = _config_of(found)
        shapes = _shapes_of(config)
        theirs = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
        missing, foreign = sorted(shapes.keys() - theirs.keys()), sorted(theirs.keys() - shapes.keys())
        wrong = sorted(name for name in shapes.keys() & theirs.keys() if shapes[name] != theirs[name])
        for names, what in (
            (missing, "lacks"),
            (foreign, "has what its sizes do not:"),
            (wrong, "has another shape of"),
        ):
            if names:
                raise GGUFError(f"{what} {', '.join(names[:3])}{' ...' * (len(names) > 3)}")
        tokens = found.metadata.get("tokenizer.ggml.tokens")
        vocabulary = None if tokens is None else _vocabulary(tokens, config)
    model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(unpacked(found.tensors[file_name(name)]))
    return model.eval(), vocabulary


def _config_of(found: GGUFFile) -> GPTConfig:
    keys = {
        "vocab_size": "vocab_size", "context": "context_length", "layers": "block_count",
        "heads": "attention.head_count", "width": "embedding_length", "bias": "use_bias",
    }  # fmt: skip
    told = {}
    for field, key in keys.items():
        if f"{ARCHITECTURE}.{key}" not in found.metadata:
            raise GGUFError(f"does not say {ARCHITECTURE}.{key}, which a GPT needs")
        told[field] = found.metadata[f"{ARCHITECTURE}.{key}"]
    if type(told["layers"]) is not int or told["layers"] > len(found.tensors):
        raise GGUFError(f"has {len(found.tensors)} tensors, which are too few for {told['layers']} layers")
    try:
        return GPTConfig(**told)
    except ValueError as error:
        raise GGUFError(f"has no sizes of a GPT: {error}") from None


def _shapes_of(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor by its name in a file; nothing is allocated."""
    try:
        with torch.device("meta"):
            model = GPT(dataclasses.replace(config))
    except (RuntimeError, OverflowError):
        raise GGUFError("has sizes that no tensor can have") from None
    return {file_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _vocabulary(tokens: object, config: GPTConfig) -> Vocabulary:
    fine = isinstance(tokens, list) and all(isinstance(each, str) and len(each) == 1 for each in tokens)
    if not fine or len(tokens) != config.vocab_size:
        raise GGUFError(f"has tokens that are not {config.vocab_size} characters")
    if any(one >= other for one, other in itertools.pairwise(tokens)):
        raise GGUFError("has characters that are not in the order of their code points, each of them once")
    return Vocabulary("".join(tokens))
