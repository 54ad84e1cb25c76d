"""A served model: codes next to compressed-tensors', checkpoints that it reads, generating with a cache."""

import copy
import json
import math
import warnings

import pytest
import torch
from torch import nn

from lowprec_lab.checkpoints import (
    CONFIG,
    WEIGHTS,
    CheckpointError,
    load_fp8_checkpoint,
    read_safetensors,
    save_fp8_checkpoint,
    write_safetensors,
)
from lowprec_lab.data import Vocabulary
from lowprec_lab.gpt import GPT, GPTConfig
from lowprec_lab.inference import (
    FP8,
    MIN_SCALE,
    RECIPES,
    Float8InferenceLinear,
    calibrate_cache,
    compare_models,
    extend,
    generate,
    keys_and_values,
    make_caches,
    model_bytes,
    quantize_activation_per_token,
    quantize_model,
    quantize_per_tensor,
    quantize_weight_per_channel,
)
from lowprec_lab.libraries import AbsentError, compressed_tensors_rows


def small_gpt(seed=1, **changes):
    torch.manual_seed(seed)
    size = {"vocab_size": 11, "context": 16, "layers": 2, "heads": 2, "width": 16, **changes}
    return GPT(GPTConfig(**size)).eval()


def batches_for(model, count=2, seed=5):
    generator = torch.Generator().manual_seed(seed)
    size = (3, model.config.context)
    drawn = [torch.randint(model.config.vocab_size, (2, *size), generator=generator) for _ in range(count)]
    return [(x, y) for x, y in drawn]


def rows(seed, shape=(6, 24)):
    """float32 rows whose amax is at least 448 / (448 * 512): where the floor of a scale plays no part."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-8, 12, (shape[0], 1), generator=generator).float())
    x = torch.randn(shape, generator=generator) * sizes
    x[:, 0] = x[:, 0].sign() * x[:, 0].abs().clamp(min=2**-9)
    return x


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("compressed_tensors")
    try:
        compressed_tensors_rows(torch.ones(1, 1))
    except AbsentError as absent:
        pytest.skip(f"compressed-tensors {absent}")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    def per_channel(weight):
        args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
        scale, zero = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), args)
        return quantize(weight, scale, zero, args, dtype=FP8), scale

    return per_channel


def same(one, other):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


# codes


def test_a_thousand_tensors_have_the_codes_and_scales_of_compressed_tensors(library):
    for seed in range(1000):
        x = rows(seed)
        assert same(quantize_activation_per_token(x), compressed_tensors_rows(x)), seed
        assert same(quantize_weight_per_channel(x), library(x)), seed


def test_where_compressed_tensors_has_another_rule(library):
    """Zero rows, rows under the floor, and bfloat16, whose scale it keeps in bfloat16."""
    zeros, tiny, short = torch.zeros(1, 4), torch.full((1, 4), 1e-6), rows(3).bfloat16()
    assert compressed_tensors_rows(zeros)[1].item() == torch.finfo(torch.float32).eps
    assert compressed_tensors_rows(tiny)[1].item() < MIN_SCALE
    for x in (zeros, tiny):
        assert quantize_activation_per_token(x)[1].item() == torch.tensor(MIN_SCALE).item()
    theirs, ours = compressed_tensors_rows(short)[1], quantize_activation_per_token(short)[1]
    assert (theirs.dtype, ours.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(ours, short.float().abs().amax(-1, keepdim=True) / 448)


def test_one_scale_for_a_tensor_static_and_dynamic():
    x = rows(4)
    codes, scale = quantize_per_tensor(x)
    assert scale.item() == (x.abs().max() / 448).item()
    assert same((codes,), ((x * scale.reciprocal()).clamp(-448, 448).to(FP8),))
    codes, given = quantize_per_tensor(x, torch.tensor(0.25))
    assert given.item() == 0.25
    assert same((codes,), ((x * 4).clamp(-448, 448).to(FP8),))


# a model


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantized_model_is_near_the_model_and_a_quarter_as_large(recipe):
    model = small_gpt(width=64, context=32)
    batches = batches_for(model)
    made = quantize_model(model, recipe, batches)
    linear = {name for name, layer in made.named_modules() if isinstance(layer, nn.Linear)}
    assert linear == {"head"}
    assert made.head.weight is made.token_embedding.weight
    assert not any(isinstance(layer, type(made.blocks[0].mlp.up)) for layer in model.modules() if layer is not model)
    found = compare_models(model, made, batches)
    assert abs(math.log(found.perplexity / compare_models(model, model, batches).perplexity)) < 0.02
    assert 0 <= found.divergence < 0.01
    assert model_bytes(made) < 0.4 * model_bytes(model)
    itself = compare_models(model, model, batches)
    assert (itself.agreement, itself.divergence) == (1.0, 0.0)


def test_static_recipes_need_batches_and_names_are_known():
    with pytest.raises(ValueError, match="give batches"):
        quantize_model(small_gpt(), "fp8_static")
    with pytest.raises(ValueError, match="fp8_dynamic, fp8_static"):
        quantize_model(small_gpt(), "int4")


def test_layers_can_be_left_as_they_are_and_biases_stay():
    model = small_gpt(bias=True)
    nn.init.normal_(model.blocks[0].mlp.up.bias)
    made = quantize_model(model, "fp8_dynamic", ignore=("head", "blocks.1", "blocks.0.mlp.down"))
    kept = {name for name, layer in made.named_modules() if type(layer) is nn.Linear}
    linear = {name for name, layer in model.named_modules() if type(layer) is nn.Linear}
    assert kept == {name for name in linear if name.startswith(("head", "blocks.1")) or "down" in name}
    assert torch.equal(made.blocks[0].mlp.up.bias, model.blocks[0].mlp.up.bias)


# generating


@pytest.mark.parametrize("fused", [True, False])
def test_logits_with_a_cache_are_those_without(fused):
    model = small_gpt(fused_attention=fused)
    tokens = torch.randint(11, (3, 12), generator=torch.Generator().manual_seed(2))
    for cut in ((12,), (5, 7), (1,) * 12, (3, 1, 1, 7)):
        caches, place = make_caches(model, 3), 0
        with torch.no_grad():
            for size in cut:
                logits = extend(model, tokens[:, place : place + size], caches)
                place += size
                assert torch.allclose(logits, model(tokens[:, :place])[0][:, 0], atol=1e-5)


def test_what_is_generated_is_the_same_as_long_as_it_fits():
    model = small_gpt(seed=3)
    start = torch.zeros(2, 3, dtype=torch.int64)
    draws = (torch.Generator().manual_seed(4) for _ in range(2))
    assert torch.equal(generate(model, start, 13, 0.7, 5, next(draws)), model.generate(start, 13, 0.7, 5, next(draws)))


@pytest.mark.parametrize("length", [1, 16, 40])
def test_more_tokens_than_the_context_holds(length):
    model = small_gpt()
    start = torch.zeros(1, length, dtype=torch.int64)
    made = generate(model, start, 30, generator=torch.Generator().manual_seed(1))
    assert made.shape == (1, length + 30)
    assert torch.equal(made[:, :length], start)
    assert generate(small_gpt(context=1), start, 3).shape == (1, length + 3)


def test_a_cache_in_8_bits_is_near_and_a_quarter_as_large():
    model, batches = small_gpt(width=32), None
    batches = batches_for(model)
    scales = calibrate_cache(model, batches)
    for (k, v), (k_scale, v_scale) in zip(keys_and_values(model, batches), scales, strict=True):
        assert k_scale == max((each.abs().max() / 448).item() for each in k)
        assert v_scale == max((each.abs().max() / 448).item() for each in v)
    tokens = batches[0][0]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, short = make_caches(model, 3), make_caches(model, 3, scales)
        exact, near = extend(model, tokens, plain), extend(model, tokens, short)
    assert 0 < (exact - near).abs().max() < 0.05 * exact.abs().max()
    assert short[0].k.nbytes * 4 == plain[0].k.nbytes
    with pytest.warns(UserWarning, match="1.0"):
        make_caches(model, 1, [(-1.0, -1.0)] * 2)


# files


def test_safetensors_both_ways(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "a.weight": torch.randn(3, 5).to(FP8), "b": torch.randn(7).bfloat16(), "ç": torch.tensor(2.5),
        "empty": torch.zeros(0, 4), "counts": torch.arange(6).reshape(2, 3), "turned": torch.randn(2, 3).t(),
        "half": torch.randn(1).half(), "bytes": torch.tensor([1, 255], dtype=torch.uint8),
    }  # fmt: skip
    path = tmp_path / "ours.safetensors"
    assert write_safetensors(path, tensors) == path.stat().st_size
    theirs = {name: each.contiguous() for name, each in tensors.items()}
    safetensors.save_file(theirs, tmp_path / "theirs.safetensors")
    for read, name in ((safetensors.load_file, "ours"), (read_safetensors, "theirs"), (read_safetensors, "ours")):
        found = read(tmp_path / f"{name}.safetensors")
        assert found.keys() == tensors.keys()
        for key, each in tensors.items():
            assert (found[key].dtype, found[key].shape) == (each.dtype, each.shape)
            assert torch.equal(found[key].contiguous().reshape(-1).view(torch.uint8),
                               each.contiguous().reshape(-1).view(torch.uint8))  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_comes_back(recipe, tmp_path):
    model = small_gpt(bias=True)
    batches = batches_for(model)
    made = quantize_model(model, recipe, batches)
    sizes = save_fp8_checkpoint(made, recipe, tmp_path / "new" / "folder", Vocabulary("abcdefghijk"))
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "new" / "folder").iterdir()}
    back, vocabulary = load_fp8_checkpoint(tmp_path / "new" / "folder")
    assert vocabulary.characters == "abcdefghijk"
    assert back.head.weight is back.token_embedding.weight
    x, y = batches[0]
    assert torch.equal(back(x, y)[0], made(x, y)[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_compressed_tensors_reads_the_checkpoint(recipe, tmp_path, library):
    safetensors = pytest.importorskip("safetensors.torch")
    from compressed_tensors.compressors.base import compress_module, decompress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = small_gpt(seed=8)
    made = quantize_model(model, recipe, batches_for(model))
    save_fp8_checkpoint(made, recipe, tmp_path)
    told = json.loads((tmp_path / CONFIG).read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(told)
    assert config.ignore == ["head"]
    theirs = small_gpt(seed=9)  # other weights: all that is compared comes from the file
    apply_quantization_config(theirs, config)
    layers = {name: each for name, each in theirs.named_modules() if hasattr(each, "quantization_scheme")}
    assert set(layers) == {name for name, each in made.named_modules() if isinstance(each, type(made.blocks[0].mlp.up))}
    for layer in layers.values():
        compress_module(layer)
    tensors = safetensors.load_file(tmp_path / WEIGHTS)
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert (set(missing), unexpected) == ({"head.weight"}, [])
    for name, layer in layers.items():
        assert layer.quantization_scheme.format == told["format"]
        decompress_module(layer)
        ours = made.get_submodule(name)
        assert torch.equal(layer.weight, ours.weight.float() * ours.weight_scale)
        if recipe in ("fp8_static", "fp8_tensor"):
            assert torch.equal(layer.input_scale, ours.input_scale)


def test_a_model_run_by_compressed_tensors_says_nearly_the_same(tmp_path, library):
    """Their layers quantize activations too, with the same rule, so both models differ by float32's rounding alone."""
    safetensors = pytest.importorskip("safetensors.torch")
    from compressed_tensors.compressors.base import compress_module, decompress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = small_gpt(seed=8)
    made = quantize_model(model, "fp8_dynamic")
    save_fp8_checkpoint(made, "fp8_dynamic", tmp_path)
    theirs = small_gpt(seed=9)
    told = json.loads((tmp_path / CONFIG).read_text())["quantization_config"]
    apply_quantization_config(theirs, QuantizationConfig.model_validate(told))
    layers = [each for each in theirs.modules() if hasattr(each, "quantization_scheme")]
    for layer in layers:
        compress_module(layer)
    theirs.load_state_dict(safetensors.load_file(tmp_path / WEIGHTS), strict=False)
    for layer in layers:
        decompress_module(layer)
    (x, y), _ = batches_for(model)
    with torch.no_grad():
        one, other, plain = (each(x, y)[0] for each in (made, theirs, model))
    assert (one - other).norm() < 0.2 * (one - plain).norm()


def broken(tmp_path, change):
    """A checkpoint of which something was changed."""
    model = quantize_model(small_gpt(), "fp8_static", batches_for(small_gpt()))
    save_fp8_checkpoint(model, "fp8_static", tmp_path)
    tensors = read_safetensors(tmp_path / WEIGHTS)
    change(tmp_path, tensors)
    return tmp_path


def without(name):
    def change(folder, tensors):
        del tensors[name]
        write_safetensors(folder / WEIGHTS, tensors)

    return change


def with_one_more(folder, tensors):
    write_safetensors(folder / WEIGHTS, {**tensors, "lora": torch.ones(2)})


def with_a_short_norm(folder, tensors):
    write_safetensors(folder / WEIGHTS, {**tensors, "norm.weight": torch.ones(2)})


def cut_off(folder, tensors):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def cut_in_the_header(folder, tensors):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:20])


def foreign(folder, tensors):
    (folder / WEIGHTS).write_bytes(b"GGUF" + bytes(100))


def empty(folder, tensors):
    (folder / WEIGHTS).write_bytes(b"")


def of_an_unknown_dtype(folder, tensors):
    text = json.dumps({"x": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + b"1")


def no_configuration(folder, tensors):
    (folder / CONFIG).unlink()


def a_configuration_of_something_else(folder, tensors):
    (folder / CONFIG).write_text('{"architectures": ["Llama"]}')


def no_weights(folder, tensors):
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("blocks.0.mlp.up.weight_scale"), "codes for blocks.0.mlp.up and no weight_scale"),
        (without("blocks.1.attention.qkv.input_scale"), "and no input_scale: codes without scales are no numbers"),
        (without("norm.weight"), "lacks norm.weight"),
        (with_one_more, "lora"),
        (with_a_short_norm, "wrong size of norm.weight"),
        (cut_off, "cut off"),
        (cut_in_the_header, "cut off"),
        (foreign, "is no safetensors file"),
        (empty, "is no safetensors file"),
        (of_an_unknown_dtype, "dtype F4 is not among"),
        (no_configuration, f"there is no file .*{CONFIG}"),
        (a_configuration_of_something_else, "is not that of a GPT in 8 bits"),
        (no_weights, f"there is no file .*{WEIGHTS}"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_checkpoint_that_is_not_whole_says_so(change, says, tmp_path):
    with pytest.raises(CheckpointError, match=says):
        load_fp8_checkpoint(broken(tmp_path, change))


def test_a_layer_can_be_copied_and_moved_like_any_module():
    codes, scale = quantize_weight_per_channel(torch.randn(3, 4))
    layer = Float8InferenceLinear(codes, scale, torch.ones(3))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(torch.ones(2, 4)), layer(torch.ones(2, 4)))
    assert twin.weight.data_ptr() != layer.weight.data_ptr()
