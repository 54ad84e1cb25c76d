"""A GPT as a GGUF file: the same numbers after reading, other readers, and files that are damaged or foreign."""

import random
import struct

import numpy as np
import pytest
import torch

from lowprec_lab import gguf_blocks, gguf_file
from lowprec_lab.data import Vocabulary
from lowprec_lab.gguf_file import (
    ARCHITECTURE,
    GGUFError,
    gpt_tensors,
    kind_for,
    load_gpt,
    metadata_of,
    packed,
    read_gguf,
    save_gguf,
    save_gpt,
    unpacked,
)
from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.inference import perplexity
from lowprec_lab.weight_formats import find_format, with_weights_in

CHARACTERS = Vocabulary("\n abcdefgé")


def small_gpt(**changes):
    torch.manual_seed(3)
    size = {"vocab_size": len(CHARACTERS), "context": 16, "layers": 1, "heads": 2, "width": 32, **changes}
    return GPT(GPTConfig(**size)).eval()


def batches_for(model, count=2):
    generator = torch.Generator().manual_seed(4)
    size = (3, model.config.context)
    return [tuple(torch.randint(model.config.vocab_size, (2, *size), generator=generator)) for _ in range(count)]


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q5_0", "q4_1", "q4_0", "q4_k"])
@pytest.mark.parametrize("width", [64, 256])
def test_perplexity_from_the_file_is_that_in_memory(tmp_path, kind, width):
    model = small_gpt(width=width)
    saved = save_gpt(model, kind, tmp_path / "model.gguf", CHARACTERS)
    again, vocabulary = load_gpt(tmp_path / "model.gguf")
    assert vocabulary == CHARACTERS
    assert saved.bytes == (tmp_path / "model.gguf").stat().st_size
    assert not again.training
    assert again.head.weight is again.token_embedding.weight
    fmt = find_format({"f32": "float32", "f16": "float16"}.get(kind, kind.upper()))
    memory, _, fell = with_weights_in(model, fmt)
    batches = batches_for(model)
    assert perplexity(again, batches) == perplexity(memory, batches)
    assert len(fell) == len(saved.fell_back)
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), memory.parameters(), strict=True))


def test_ggufs_reader_has_every_tensor_of_the_model(tmp_path):
    gguf = pytest.importorskip("gguf")
    model = small_gpt(width=256, layers=2, bias=True)
    save_gpt(model, "q4_k", tmp_path / "model.gguf", CHARACTERS, name="a name")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    again, _ = load_gpt(tmp_path / "model.gguf")
    ours = {gguf_file.file_name(name): parameter.detach() for name, parameter in again.named_parameters()}
    assert {each.name for each in reader.tensors} == ours.keys()
    for each in reader.tensors:
        numbers = gguf.quants.dequantize(each.data, each.tensor_type).reshape(ours[each.name].shape)
        assert np.array_equal(numbers, ours[each.name].numpy())
    told = {key: field.contents() for key, field in reader.fields.items()}
    assert told["general.architecture"] == ARCHITECTURE
    assert told["general.name"] == "a name"
    assert told["tokenizer.ggml.tokens"] == list(CHARACTERS.characters)
    assert told[f"{ARCHITECTURE}.embedding_length"] == 256
    assert told[f"{ARCHITECTURE}.use_bias"] is True
    assert set(metadata_of(model, "q4_k", CHARACTERS)) <= told.keys()


def test_names_are_llama_cpps():
    names = [gguf_file.file_name(name) for name, _ in small_gpt(bias=True).named_parameters()]
    assert names[:4] == ["token_embd.weight", "position_embd.weight", "blk.0.attn_norm.weight", "blk.0.attn_norm.bias"]
    assert {"blk.0.attn_qkv.weight", "blk.0.attn_output.bias", "blk.0.ffn_up.weight", "output_norm.weight"} <= {*names}
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("kind", "columns", "stored"),
    [("q4_k", 256, "q4_k"), ("q4_k", 1024, "q4_k"), ("q4_k", 384, "q5_0"), ("q4_k", 96, "q5_0"), ("q4_k", 48, "f16"),
     ("q8_0", 96, "q8_0"), ("q8_0", 65, "f16"), ("f16", 65, "f16"), ("f32", 3, "f32")],
)  # fmt: skip
def test_what_a_tensor_falls_back_to(kind, columns, stored):
    assert kind_for((7, columns), kind) == stored


def test_what_fell_back_is_listed_and_counted(tmp_path):
    saved = save_gpt(small_gpt(width=64), "q4_k", tmp_path / "model.gguf")
    assert (saved.matrices, len(saved.fell_back)) == (6, 5)  # mlp.down has rows of 256
    assert "1 of 6 matrices in q4_k" in saved.text()
    assert "5 fell back" in saved.text()
    assert "blk.0.attn_qkv.weight (q5_0)" in saved.text()
    tensors, fell = gpt_tensors(small_gpt(width=16, heads=2), "q4_k")
    assert set(fell.values()) == {"f16", "q5_0"}
    assert {each.name: each.kind for each in tensors}["output_norm.weight"] == "f32"
    assert save_gpt(small_gpt(width=256), "q4_k", tmp_path / "other.gguf").text() == "6 of 6 matrices in q4_k"


def test_a_type_that_nobody_quantizes_to(tmp_path):
    with pytest.raises(ValueError, match="not written as 'q6_k'"):
        save_gpt(small_gpt(), "q6_k", tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="nothing here quantizes to 'q6_k'"):
        packed("a", torch.zeros(1, 256), "q6_k")
    assert not list(tmp_path.iterdir())


def test_a_q6_k_tensor_of_others_is_read(tmp_path):
    gguf = pytest.importorskip("gguf")
    data = np.random.default_rng(1).integers(0, 128, (3, 210)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "other")
    writer.add_tensor("a", data, raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "a.gguf").tensors["a"]
    assert found.shape == (3, 256)
    with np.errstate(all="ignore"):
        assert np.array_equal(
            unpacked(found).numpy(), gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q6_K), equal_nan=True
        )


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    save_gpt(small_gpt(), "q8_0", path, CHARACTERS)
    before = path.read_bytes()

    def breaks(file, metadata, tensors):
        file.write(b"GGUF")
        raise KeyError("no more")

    monkeypatch.setattr(gguf_blocks, "write_gguf", breaks)
    with pytest.raises(KeyError):
        save_gpt(small_gpt(), "q4_0", path, CHARACTERS)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [8, 32, 128])
def test_files_of_ggufs_writer_are_read(tmp_path, alignment):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "other")
    writer.add_custom_alignment(alignment)
    for add, value in (
        (writer.add_uint8, 200), (writer.add_int8, -100), (writer.add_uint16, 60000), (writer.add_int16, -30000),
        (writer.add_int32, -5), (writer.add_uint64, 2**40), (writer.add_int64, -(2**40)), (writer.add_float64, 0.1),
        (writer.add_bool, False), (writer.add_string, "é"),
    ):  # fmt: skip
        add(f"a.{add.__name__}", value)
    writer.add_array("a.list", [1.5, 2.5])
    x = np.random.default_rng(2).normal(size=(3, 64)).astype(np.float32)
    writer.add_tensor("x", x)
    packed_x = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("y", packed_x, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "a.gguf")
    assert found.metadata["a.add_int64"] == -(2**40)
    assert found.metadata["a.add_float64"] == 0.1
    assert found.metadata["a.add_bool"] is False
    assert found.metadata["a.add_string"] == "é"
    assert found.metadata["a.list"] == [1.5, 2.5]
    assert np.array_equal(unpacked(found.tensors["x"]).numpy(), x)
    theirs = gguf.quants.dequantize(packed_x, gguf.GGMLQuantizationType.Q4_1)
    assert np.array_equal(unpacked(found.tensors["y"]).numpy(), theirs)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    save_gpt(small_gpt(), "q8_0", path, CHARACTERS)
    return path.read_bytes()


def told(tmp_path, content, load=load_gpt):
    """What loading these bytes says, or "" where it works."""
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    try:
        load(path)
    except GGUFError as error:
        said = str(error)
    else:
        return ""
    assert said.startswith(f"{path} ")
    return said.removeprefix(f"{path} ")


def test_wherever_a_file_is_cut_off_is_told(tmp_path, content):
    end = content.rindex(b"output_norm.weight") + 100
    for size in (*range(end), *range(end, len(content) - 31, 97)):
        said = told(tmp_path, content[:size])
        assert "cut off" in said or size < 4 and "is no GGUF file" in said, (size, said)


def test_a_file_of_which_any_byte_is_another_takes_nothing_with_it(tmp_path, content):
    draw = random.Random(7)
    end = content.rindex(b"output_norm.weight") + 40
    for _ in range(600):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 1, 2, 8])):
            damaged[draw.randrange(end)] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        told(tmp_path, bytes(damaged))  # anything but GGUFError would be raised here


def head(tensors=0, entries=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def text(value):
    return struct.pack("<Q", len(value)) + value


def tensor(name=b"x", shape=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no GGUF file: it begins with b''"),
        (b"PK\3\4" + bytes(60), "is no GGUF file: it begins with b'PK"),
        (head(version=1) + bytes(64), "of version 1; 2 and 3 are read here"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "of the other byte order"),
        (head(tensors=2**60) + bytes(64), "1,152,921,504,606,846,976 tensors do not fit"),
        (head(entries=2**60) + bytes(64), "entries do not fit"),
        (head(entries=1) + struct.pack("<Q", 2**40) + bytes(64), "would be a text of 1,099,511,627,776 bytes"),
        (head(entries=1) + text(b"\xff\xfe") + bytes(64), "is not UTF-8"),
        (head(entries=1) + text(b"a") + struct.pack("<I", 77) + bytes(64), "a has type 77, which GGUF does not have"),
        (head(entries=1) + text(b"a") + struct.pack("<IIQ", 9, 4, 2**50) + bytes(64), "elements of a do not fit"),
        (head(entries=1) + text(b"a") + struct.pack("<IIQ", 9, 9, 1) * 1 + struct.pack("<IQ", 9, 1) * 9 + bytes(64),
         "a has type 9"),
        (head(entries=2) + 2 * (text(b"a") + struct.pack("<II", 4, 1)) + bytes(64), "has a twice"),
        (head(entries=1) + text(b"general.alignment") + struct.pack("<II", 4, 24) + bytes(64), "alignment is 24"),
        (head(entries=1) + text(b"general.alignment") + struct.pack("<If", 6, 32.0) + bytes(64), "alignment is 32.0"),
        (head(tensors=1) + tensor(shape=(1,) * 7) + bytes(256), "x has 7 dimensions"),
        (head(tensors=1) + tensor(kind=10) + bytes(256), "x is of ggml's type 10"),
        (head(tensors=1) + tensor(offset=8) + bytes(256), "begins at 8, which is no multiple of 32"),
        (head(tensors=1) + tensor(kind=12) + bytes(256), "rows of 32 numbers are not made of blocks of 256"),
        (head(tensors=1) + tensor(shape=(2**62,)) + bytes(256), "is cut off: tensor x would end at"),
        (head(tensors=1) + tensor(shape=(2**40, 2**40)) + bytes(256), "is cut off: tensor x would end at"),
        (head(tensors=2) + 2 * tensor(shape=(8,)) + bytes(256), "has tensor x twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(tmp_path, content, says):
    assert says in told(tmp_path, content, read_gguf)


def test_no_file_at_all(tmp_path):
    for path in (tmp_path / "nothing.gguf", tmp_path):
        with pytest.raises(GGUFError, match="there is no file"):
            load_gpt(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"general.architecture": "llama"}, "architecture 'llama'; one of 'lowprec_gpt' is wanted"),
        ({"general.architecture": None}, "architecture 'none'"),
        ({f"{ARCHITECTURE}.block_count": None}, "does not say lowprec_gpt.block_count"),
        ({f"{ARCHITECTURE}.block_count": 4_000_000_000}, "too few for 4000000000 layers"),
        ({f"{ARCHITECTURE}.block_count": 2}, "lacks blk.1."),
        ({f"{ARCHITECTURE}.block_count": 0}, "no sizes of a GPT"),
        ({f"{ARCHITECTURE}.embedding_length": 64}, "has another shape of blk.0."),
        ({f"{ARCHITECTURE}.embedding_length": 400_000}, "has another shape of"),
        ({f"{ARCHITECTURE}.embedding_length": 4_000_000_000}, "sizes that no tensor can have"),
        ({f"{ARCHITECTURE}.attention.head_count": 5}, "5 heads do not divide"),
        ({f"{ARCHITECTURE}.use_bias": True}, "lacks blk.0."),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "tokens that are not 10 characters"),
        ({"tokenizer.ggml.tokens": list("bacdefghij")}, "in the order of their code points"),
        ({"tokenizer.ggml.tokens": list("aacdefghij")}, "in the order of their code points"),
        ({"tokenizer.ggml.tokens": "abcdefghij"}, "tokens that are not 10 characters"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_gpt_of_this_course_says_why(tmp_path, change, says):
    model = small_gpt()
    metadata = metadata_of(model, "f32", CHARACTERS) | change
    metadata = {key: value for key, value in metadata.items() if value is not None}
    save_gguf(tmp_path / "a.gguf", metadata, gpt_tensors(model, "f32")[0])
    with pytest.raises(GGUFError, match="a.gguf") as caught:
        load_gpt(tmp_path / "a.gguf")
    assert says in str(caught.value)


def test_a_tensor_too_many(tmp_path):
    model = small_gpt()
    tensors = [*gpt_tensors(model, "f32")[0], packed("output.weight", torch.zeros(2, 2), "f32")]
    save_gguf(tmp_path / "a.gguf", metadata_of(model, "f32"), tensors)
    with pytest.raises(GGUFError, match="has what its sizes do not: output.weight"):
        load_gpt(tmp_path / "a.gguf")


def test_a_file_without_characters_has_no_vocabulary(tmp_path):
    save_gpt(small_gpt(), "f32", tmp_path / "a.gguf")
    assert load_gpt(tmp_path / "a.gguf")[1] is None
