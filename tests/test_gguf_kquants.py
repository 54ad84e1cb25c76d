"""Blocks of 256 next to gguf's own dequantizers, the bounds that quantizers are judged by, and files next to gguf's."""

import io
import math

import numpy as np
import pytest
import torch

from lowprec_lab.gguf_blocks import GGUF_TYPES, SAMPLES, GGUFTensor, byte_count, plain_bound, sample, written
from lowprec_lab.graders import gguf_kquants_oracle as exact
from lowprec_lab.graders.gguf_kquants import extreme_bytes, random_bytes
from lowprec_lab.sources import reference

KINDS = {
    "q4_k": (exact.Q4_K, (0, 2), exact.dequantize_q4_k),
    "q6_k": (exact.Q6_K, (208,), exact.dequantize_q6_k),
}


def theirs(kind, blocks):
    """What gguf makes of bytes: float32."""
    gguf = pytest.importorskip("gguf")
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind.upper()])


def same_bits(ours, other):
    ours = ours.numpy()
    assert ours.dtype == other.dtype
    assert ours.shape == other.shape
    both_nan = np.isnan(ours) & np.isnan(other)
    return bool(((ours.view(np.int32) == other.view(np.int32)) | both_nan).all())


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_numbers_are_ggufs_to_the_last_bit(kind):
    size, halves, oracle = KINDS[kind]
    rng = np.random.default_rng(5)
    blocks = torch.from_numpy(rng.integers(0, 256, (3000, 2 * size)).astype(np.uint8))  # any float16 at all for d
    for each in (blocks, extreme_bytes(rng, size, halves), random_bytes(rng, 2, 3, 4, size=size, halves=halves)):
        for function in (reference(f"dequantize_{kind}"), oracle):
            assert same_bits(function(each), theirs(kind, each))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_numbers_are_ggufs_for_every_d(kind):
    size, halves, _ = KINDS[kind]
    rng = np.random.default_rng(6)
    blocks = rng.integers(0, 256, (2**16, size)).astype(np.uint8)
    every = np.arange(2**16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    for place in halves:
        blocks[:, place : place + 2] = every if place == halves[0] else every[rng.permutation(2**16)]
    blocks = torch.from_numpy(blocks)
    assert same_bits(reference(f"dequantize_{kind}")(blocks), theirs(kind, blocks))


def share(x, packed):
    return float((exact.dequantize_q4_k(packed).double() - x.double()).norm() / x.double().norm())


def test_the_error_on_normal_numbers_is_less_than_what_ggml_has():
    x = torch.randn(800, 256, generator=torch.Generator().manual_seed(7))
    ours = share(x, reference("quantize_q4_k")(x))
    assert ours < 0.0716
    assert 0.0705 < share(x, exact.quantize_q4_k(x)) < 0.0717  # what the contract's 1.036 is taken of
    assert share(x, exact.quantize_q4_k(x, fit=exact.ends)) > 0.077


@pytest.mark.parametrize("kind", SAMPLES)
def test_two_searches_are_as_good_as_each_other(kind):
    x = sample(kind, 8, blocks=100)
    ratio = share(x, reference("quantize_q4_k")(x)) / share(x, exact.quantize_q4_k(x))
    assert 0.97 < ratio < 1.02


def heavy(seed):
    """Blocks whose groups differ by up to 2^18, with single numbers that are larger still."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, size=(60, 8, 32)) * np.ldexp(1.0, rng.integers(-9, 10, (60, 8, 1)))
    return torch.from_numpy(x.reshape(60, 256).astype(np.float32))


def test_the_bound_of_the_plain_way_holds_and_is_not_loose():
    closest = 0.0
    for x in (
        *(heavy(seed) for seed in range(10)),
        *(sample(kind, 1) for kind in SAMPLES),
        heavy(1).abs(),
        -heavy(2).abs(),
    ):
        found = exact.dequantize_q4_k(exact.quantize_q4_k(x, fit=exact.ends)).double()
        errors = (found - x.double()).abs().reshape(-1, 8, 32).amax(-1)
        bound = plain_bound(x).reshape(-1, 8)
        assert (errors <= bound * (1 + 1e-9)).all()
        closest = max(closest, float((errors / bound).max()))
    assert closest > 0.95


@pytest.mark.parametrize("quantize", [reference("quantize_q4_k"), exact.quantize_q4_k], ids=["reference", "oracle"])
def test_bad_blocks_have_their_rule(quantize):
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(9))
    x[0], x[1, 3], x[2, 255], x[3] = 0.0, math.nan, -math.inf, 3e38
    found = exact.dequantize_q4_k(quantize(x))
    assert not found[0].any()
    assert found[1].isnan().all()
    assert found[2].isnan().all()
    assert found[3].isfinite().all()
    assert (found[3] > 6e7).all()  # 63 * 15 * 65504: as far as a block reaches
    assert found[4].isfinite().all()
    tiny = torch.full((1, 256), 2.0**-127)
    assert exact.dequantize_q4_k(quantize(tiny)).abs().max() < 1e-4
    for shape in ((128,), (3, 300)):
        with pytest.raises(ValueError, match="256|blocks"):
            quantize(torch.zeros(shape))


# --- files ------------------------------------------------------------------------------------------------------------

METADATA = {
    "general.name": "Größe", "a.count": 7, "a.rate": 0.1, "a.flag": True, "a.texts": ["x", "\n"], "a.counts": [1, 2],
}  # fmt: skip
TENSORS = (("a.weight", "q4_k", (3, 256)), ("b.weight", "q8_0", (2, 64)), ("c", "f32", (5,)), ("d", "f16", (2, 3, 4)))


def made(*tensors):
    """(the tensors, as they lie in the bytes that `written` makes; the bytes)"""
    kept = []

    def keep(file, metadata, tensors):
        kept.extend(tensors)
        reference("write_gguf")(file, metadata, tensors)

    return kept, bytes(written(keep, tuple(METADATA.items()), *tensors).tolist())


@pytest.mark.parametrize("alignment", [None, 64])
def test_a_file_is_byte_for_byte_what_ggufs_writer_writes(tmp_path, alignment):
    gguf = pytest.importorskip("gguf")
    tensors, _ = made(*TENSORS)
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "lowprec_gpt")
    metadata = {"general.architecture": "lowprec_gpt", **METADATA}
    if alignment is not None:
        writer.add_custom_alignment(alignment)
        metadata = {"general.architecture": "lowprec_gpt", "general.alignment": alignment, **METADATA}
    writer.add_name("Größe")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.rate", 0.1)
    writer.add_bool("a.flag", True)
    writer.add_array("a.texts", ["x", "\n"])
    writer.add_key_value("a.counts", [1, 2], gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT32)
    for each in tensors:
        data = each.data.numpy().reshape(*each.shape[:-1], -1)
        if each.kind in ("f32", "f16"):
            data = data.view({"f32": np.float32, "f16": np.float16}[each.kind])
            writer.add_tensor(each.name, data)
        else:
            writer.add_tensor(each.name, data, raw_dtype=gguf.GGMLQuantizationType[each.kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = io.BytesIO()
    reference("write_gguf")(file, metadata, tensors)
    assert file.getvalue() == (tmp_path / "theirs.gguf").read_bytes()


def test_ggufs_reader_opens_what_was_written(tmp_path):
    gguf = pytest.importorskip("gguf")
    tensors, content = made(*TENSORS)
    (tmp_path / "ours.gguf").write_bytes(content)
    reader = gguf.GGUFReader(tmp_path / "ours.gguf")
    assert {key: reader.fields[key].contents() for key in METADATA if key != "a.rate"} == {
        key: value for key, value in METADATA.items() if key != "a.rate"
    }
    assert reader.fields["a.rate"].contents() == np.float32(0.1)
    for each, found in zip(tensors, reader.tensors, strict=True):
        assert (found.name, tuple(reversed(found.shape.tolist()))) == (each.name, each.shape)
        assert found.tensor_type.name.lower() == each.kind
        assert np.array_equal(np.ascontiguousarray(found.data).view(np.uint8).ravel(), each.data.numpy())
        assert found.data_offset % 32 == 0


def test_the_types_have_the_numbers_and_sizes_that_gguf_says():
    gguf = pytest.importorskip("gguf")
    for kind, number in GGUF_TYPES.items():
        assert gguf.GGMLQuantizationType[kind.upper()].value == number
        size, count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
        assert byte_count(kind, (3, 2 * size)) == 6 * count
    assert exact.KINDS == GGUF_TYPES


def test_what_a_check_says_of_a_file_changes_with_every_byte():
    content = bytearray(made(("a", "f32", (2, 3)), ("b", "q8_0", (1, 32)))[1])
    right = exact.described(bytes(content))
    assert len(right) == len(exact.PARTS)
    for place in range(len(content)):
        for flip in (1, 128):
            other = bytearray(content)
            other[place] ^= flip
            assert exact.described(bytes(other)) != right, place
    for cut in range(len(content)):
        assert exact.described(bytes(content[:cut])) != right
    assert exact.described(bytes(content) + b"\0") != right


def test_a_tensor_whose_blocks_do_not_fit_has_no_size():
    with pytest.raises(ValueError, match="rows of 300 numbers are not made of blocks of 256"):
        byte_count("q4_k", (2, 300))
    assert byte_count("f16", (3, 5)) == 30
    assert GGUFTensor("a", "f32", (1,), torch.zeros(4, dtype=torch.uint8)).kind == "f32"
