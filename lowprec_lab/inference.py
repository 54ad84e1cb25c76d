"""Chapter 11: what a served model needs from 8 bits: weights, activations, a cache of keys and values, a file.

Everything here is E4M3 (`torch.float8_e4m3fn`, largest value 448), as servers have it. A **scale** is what they mean by
the word, the inverse of chapter 07's: `value = code * scale`. So the scale of a group is its largest magnitude divided
by 448, and no scale is below MIN_SCALE: a row of zeros has one too.

What holds for every function here:
- Scales are float32 and are divided in float32: amax / 448, a true division, then the floor.
- Codes are float8_e4m3fn: rounded to nearest, ties to even, saturated at 448. NaN stays NaN.
- A NaN makes the scale of its group NaN. An infinity makes it infinite: the finite codes of the group are zeros.

References: vllm-project/vllm, vllm/model_executor/layers/quantization/{input_quant_fp8,kv_cache}.py and
tests/kernels/quant_utils.py (the rules of scales and codes); vllm-project/compressed-tensors (the checkpoint's layout);
Xiao et al., SmoothQuant, arXiv:2211.10438; Frantar et al., GPTQ, arXiv:2210.17323, and Hassibi and Stork, Second order
derivatives for network pruning: Optimal Brain Surgeon (1992), for `compensate`; Micikevicius et al., arXiv:2209.05433.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowprec_lab.blanks import blank
from lowprec_lab.gpt import GPT, Attention

FP8 = torch.float8_e4m3fn
TOP = 448.0
MIN_SCALE = 1 / (448 * 512)  # the smallest scale: 448 of it are 2^-9, E4M3's smallest number
UNSET = -1.0  # the scale of a cache that nobody has calibrated


# --- the exercises ----------------------------------------------------------------------------------------------------


@blank(exercise="11.1", points=2, minutes=20)
def quantize_weight_per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale) of a weight, with one scale for each output channel: each row.

    weight: (N, K), float32, bfloat16 or float16. Returns: codes (N, K) float8_e4m3fn; scale (N, 1) float32.
    scale = max(amax of the row / 448, MIN_SCALE); codes = weight / scale, both in float32.
    """


@blank(exercise="11.2", points=3, minutes=25)
def quantize_activation_per_token(x: Tensor, upper_bound: float | None = None) -> tuple[Tensor, Tensor]:
    """(codes, scale) of an activation, with one scale for each token: each row along the last dimension.

    x: (..., K), float32, bfloat16 or float16, K at least 1. Returns: codes (..., K) float8_e4m3fn; scale (..., 1)
    float32, as for a weight. upper_bound: no amax counts as more than this; what is above saturates.
    """


@blank(exercise="11.3", points=2, minutes=20)
def quantize_per_tensor(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes, scale) of a tensor with one scale: a given one ("static"), or that of its own amax ("dynamic").

    x: any shape, at least one element; float32, bfloat16 or float16. scale: float32, 0-d, above 0.
    Returns: codes float8_e4m3fn in the shape of x; scale float32, 0-d.
    codes = x * (1 / scale), in float32: the reciprocal is rounded, once for the tensor. That is what kernels do here.
    """


@blank(exercise="11.4", points=2, minutes=20)
def calibrate_static(batches: list[Tensor], fraction: float = 1.0) -> Tensor:
    """A static scale from samples of an activation: float32, 0-d.

    batches: tensors of any shapes; float32, bfloat16 or float16. fraction: above 0, at most 1.
    With n numbers in all batches together, amax is their ceil(fraction * n)-th smallest magnitude: the largest of all
    for 1.0. scale = max(amax / 448, MIN_SCALE). A NaN in a batch gives NaN. ValueError where there is no number.
    """


@blank(exercise="11.5", points=4, minutes=45)
class Float8InferenceLinear(nn.Module):
    """A linear layer with a weight in 8 bits, for inference only: it has buffers and no parameters.

    Its buffers are the checkpoint's tensors: "weight" (codes), "weight_scale", and "bias" and "input_scale" where they
    are not None. output[m, n] = (sum over k of the products) * input scale[m] * weight_scale[n] + bias[n], all in
    float32, then x's dtype. The sum runs over products of codes; a weight-only layer has x itself, in float32, in place
    of input codes, and no input scale.
    """

    def __init__(
        self,
        codes: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
        activations: str = "token",
    ) -> None:
        """codes: (N, K) float8_e4m3fn. weight_scale: float32, (N, 1) or (1,). bias: (N,), any float dtype.

        activations: "token" (quantize_activation_per_token), "tensor" (quantize_per_tensor, with input_scale where
        there is one: float32, (1,)) or "none" (weight-only); ValueError that lists them for another.
        """

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., K), float32, bfloat16 or float16. Returns: x's dtype, (..., N). No gradient flows."""


@blank(exercise="11.6", points=2, minutes=20)
def perplexity(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """exp of the mean loss of all tokens in all batches, each token counted once.

    model: model(x, y) returns (logits (B, T, V), the mean cross-entropy of the B * T tokens). batches: (x, y), int64
    (B, T), of any sizes. The model evaluates meanwhile (no dropout) and is in the mode that it was in afterwards; no
    gradient is made. The mean over batches is taken in float64.
    """


@blank(exercise="11.7", points=4, minutes=45)
class Float8KVCache:
    """The keys and values of all tokens so far, in 8 bits, with one scale for keys and one for values.

    .length: how many tokens it holds. .k_scale, .v_scale: floats, the scales in use. .k, .v: its memory,
    float8_e4m3fn, (batch, heads, context, dim), allocated once.
    """

    def __init__(
        self, batch: int, heads: int, context: int, dim: int, k_scale: float = UNSET, v_scale: float = UNSET
    ) -> None:
        """An empty cache with room for `context` tokens.

        A scale below 0 is unset. Both unset: both become 1.0, with one warning (UserWarning). One unset: the other is
        used for both, without a warning, as for old checkpoints, which have one. ValueError for 0 and NaN.
        """

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add t tokens: k, v (batch, heads, t, dim), float32, bfloat16 or float16. Kept is k / k_scale in float32, as
        codes. ValueError, and nothing is changed, where there is no room for them."""

    def read(self) -> tuple[Tensor, Tensor]:
        """(k, v) of all tokens, oldest first: float32, (batch, heads, length, dim), code * scale."""


@blank(exercise="11.8", points=2, minutes=20)
def smooth(activation_amax: Tensor, weight: Tensor, alpha: float = 0.5) -> tuple[Tensor, Tensor]:
    """(factors, weight * factors): SmoothQuant's way to move outliers from an activation to the weight behind it.

    activation_amax: (K,) float32, the largest magnitude of each input channel; weight: (N, K) float32.
    Returns: factors (K,) float32 and the new weight (N, K) float32; x / factors is to be its input.
    factor[k] = activation_amax[k]^alpha / w[k]^(1 - alpha), where w[k] is the largest magnitude of weight's column k;
    in float64, rounded to float32 once. 1.0 where one of the two is 0.
    """


@blank(exercise="11.9", points=4, minutes=50)
def compensate(weight: Tensor, x: Tensor, damping: float = 0.01) -> tuple[Tensor, Tensor]:
    """(codes, scale) of a weight whose rounding errors are made up for, column by column, by the columns after them.

    weight: (N, K) float32; x: (M, K) float32, samples of the layer's input. Returns: codes (N, K) float8_e4m3fn; scale
    (N, 1) float32, that of `quantize_weight_per_channel(weight)`.
    In float64: H = x^T x, plus damping times the mean of its diagonal on its diagonal. For column j = 0, 1, ...:
        codes[:, j] = w[:, j] / scale, rounded to float32 and then to codes, saturated;
        error = w[:, j] - codes[:, j] * scale;
        w[:, k] for k > j grows by error * a[k], where a solves H[k, l] a[l] = H[k, j] over all k, l > j.
    That is the change of the later columns with the least squared error of x @ w^T. If x is 0 throughout, none changes.
    """


# --- scenarios: what a check drives an answer with, beside plain calls ------------------------------------------------


def layer_output(
    function: Callable, codes: Tensor, weight_scale: Tensor, bias: Tensor | None, input_scale: Tensor | None,
    activations: str, x: Tensor,
) -> Tensor:  # fmt: skip
    """The output for x of a layer that was made of these parts."""
    return function(codes, weight_scale, bias, input_scale, activations)(x).detach()


def layer_state(
    function: Callable, codes: Tensor, weight_scale: Tensor, bias: Tensor | None, input_scale: Tensor | None,
    activations: str,
) -> tuple[str, ...]:  # fmt: skip
    """What a layer keeps, in words: its tensors by name, how many parameters it has, and whether gradients flow."""
    layer = function(codes, weight_scale, bias, input_scale, activations)
    state = [
        f"{name} {str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}"
        for name, each in sorted(layer.state_dict().items())
    ]
    output = layer(torch.ones(2, codes.shape[1], requires_grad=True))
    return (
        "an nn.Module" if isinstance(layer, nn.Module) else "no nn.Module",
        "; ".join(state),
        f"{len(list(layer.parameters()))} parameters",
        "a gradient flows" if output.requires_grad else "no gradient flows",
    )


def layer_refuses(function: Callable, activations: str) -> str:
    """In words: the error of a layer whose activations are quantized in this way, and which ways its text lists."""
    try:
        function(torch.zeros(1, 1).to(FP8), torch.ones(1, 1), None, None, activations)
    except ValueError as error:
        return f"ValueError that lists {', '.join(way for way in ('token', 'tensor', 'none') if way in str(error))}"
    return "no error"


class Recited(nn.Module):
    """A model that has the logits of each batch by heart: batch number i is the one whose first token is i.

    While it trains it says something else, so that one notices.
    """

    def __init__(self, logits: Sequence[Tensor]) -> None:
        super().__init__()
        self.logits = nn.ParameterList(each.clone() for each in logits)
        self.graphs: list[bool] = []

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits[int(x[0, 0])] * (0.25 if self.training else 1.0)
        self.graphs.append(torch.is_grad_enabled())
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def perplexity_of(function: Callable, training: bool, *pieces: Tensor) -> float:
    """function(model, batches); pieces: for each batch the model's logits, (B, T, V), and then the targets, (B, T)."""
    return function(*_recited(training, pieces))


def perplexity_leaves(function: Callable, training: bool, *pieces: Tensor) -> str:
    """In words: the mode that the model is left in, and whether a graph for gradients was made."""
    model, batches = _recited(training, pieces)
    function(model, batches)
    graph = "a graph" if any(model.graphs) else "no graph"
    return f"{'training' if model.training else 'evaluating'}, {graph}, {len(model.graphs)} calls"


def _recited(training: bool, pieces: Sequence[Tensor]) -> tuple[Recited, list[tuple[Tensor, Tensor]]]:
    model = Recited(pieces[::2]).train(training)
    return model, [(torch.full_like(y, which), y) for which, y in enumerate(pieces[1::2])]


def cached(function: Callable, context: int, k_scale: float, v_scale: float, *pieces: Tensor) -> tuple[Tensor, Tensor]:
    """What a cache of `context` tokens gives back after these pieces, k and v in turn, were appended."""
    cache = _opened(function, pieces[0], context, k_scale, v_scale)
    for k, v in zip(pieces[::2], pieces[1::2], strict=True):
        cache.append(k, v)
    return cache.read()


def cache_scales(function: Callable, *scales: float) -> str:
    """In words: the scales of a cache that was made with these, and how many warnings there were."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            cache = function(1, 1, 2, 2, *scales)
        except ValueError:
            return "ValueError"
    kinds = [each.category.__name__ for each in caught]
    return (
        f"k_scale {float(cache.k_scale)!r}, v_scale {float(cache.v_scale)!r}, {len(kinds)} warnings {set(kinds) or ''}"
    )


def cache_keeps(function: Callable, context: int, *pieces: Tensor) -> tuple[str, ...]:
    """In words: the length of a cache after each piece was appended to it as k and v, and what its memory is.

    A piece that does not fit has its error in place of a length, and what is read afterwards is compared with before.
    """
    cache = _opened(function, pieces[0], context, 1.0, 1.0)
    memory, said = cache.k.data_ptr(), []
    for piece in pieces:
        before = [each.clone() for each in cache.read()]
        try:
            cache.append(piece, piece)
            said.append(f"length {cache.length}")
        except ValueError:
            same = all(torch.equal(one, other) for one, other in zip(before, cache.read(), strict=True))
            said.append(f"ValueError, length {cache.length}, {'as before' if same else 'changed'}")
    kept = f"{str(cache.k.dtype).removeprefix('torch.')} {tuple(cache.k.shape)}, {tuple(cache.v.shape)}"
    return (*said, kept, "one memory" if cache.k.data_ptr() == memory else "new memory")


def _opened(function: Callable, piece: Tensor, context: int, k_scale: float, v_scale: float) -> object:
    batch, heads, _, dim = piece.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(batch, heads, context, dim, k_scale, v_scale)


# --- given: a whole model in 8 bits -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServingRecipe:
    """How the linear layers of a model are served.

    weights: "channel" (a scale for each output) or "tensor". activations: "token", "static" (one calibrated scale for
    each layer), or "none" (weight-only).
    """

    name: str
    weights: str
    activations: str
    text: str


RECIPES: dict[str, ServingRecipe] = {recipe.name: recipe for recipe in (
    ServingRecipe("fp8_dynamic", "channel", "token", "a scale for each output channel, and for each token as it comes"),
    ServingRecipe("fp8_static", "channel", "static", "a scale for each output channel, a calibrated one for inputs"),
    ServingRecipe("fp8_tensor", "tensor", "static", "one scale for the weight, a calibrated one for inputs"),
    ServingRecipe("fp8_weights", "channel", "none", "weights in 8 bits, activations as they are"),
)}  # fmt: skip


def find_recipe(name: str) -> ServingRecipe:
    """The recipe of that name. Raises ValueError that lists the names there are."""
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}. The recipes are: {', '.join(RECIPES)}")
    return RECIPES[name]


def layer_in_8_bits(linear: nn.Linear, recipe: ServingRecipe, input_scale: Tensor | None = None) -> nn.Module:
    """A Float8InferenceLinear with the weight of `linear`. input_scale: float32, for a static recipe."""
    weight = linear.weight.detach()
    if recipe.weights == "channel":
        codes, scale = quantize_weight_per_channel(weight)
    else:
        codes, scale = quantize_per_tensor(weight)
        scale = scale.reshape(1)
    bias = None if linear.bias is None else linear.bias.detach().clone()
    given = input_scale.reshape(1) if recipe.activations == "static" else None
    way = {"static": "tensor"}.get(recipe.activations, recipe.activations)
    return Float8InferenceLinear(codes, scale, bias, given, way)


def quantize_model(
    model: nn.Module, recipe: str | ServingRecipe, batches: Sequence = (), ignore: tuple[str, ...] = ("head",),
    fraction: float = 1.0,
) -> nn.Module:  # fmt: skip
    """A copy of the model whose linear layers are in 8 bits. The model itself stays as it is.

    recipe: or its name. batches: (x, y), for a static recipe, which needs at least one. ignore: layers with one of
    these names, or below it, stay as they are; the head of a GPT does, since its weight is the embedding's as well.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    scales: dict[str, Tensor] = {}
    if recipe.activations == "static":
        if not batches:
            raise ValueError(f"recipe {recipe.name!r} has static scales: give batches to calibrate them with")
        inputs = layer_inputs(model, batches)
        scales = {name: calibrate_static(found, fraction) for name, found in inputs.items()}
    made = copy.deepcopy(model).eval()  # one deepcopy keeps tied weights tied
    for name, layer in list(made.named_modules()):
        if type(layer) is nn.Linear and not any(name == each or name.startswith(each + ".") for each in ignore):
            parent, _, own = name.rpartition(".")
            setattr(made.get_submodule(parent), own, layer_in_8_bits(layer, recipe, scales.get(name)))
    return made


@torch.no_grad()
def layer_inputs(model: nn.Module, batches: Sequence) -> dict[str, list[Tensor]]:
    """What each linear layer gets to see: its inputs, (tokens, K) for each batch, by the layer's name."""
    found: dict[str, list[Tensor]] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _layer, inputs, name=name: found.setdefault(name, []).append(inputs[0].flatten(0, -2).clone())
        )
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        for x, y in batches:
            model(x, y)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@dataclass(frozen=True)
class Comparison:
    """A model beside another one on the same text.

    perplexity: its own. agreement: the share of tokens for which both think the same token likeliest. divergence: the
    mean of KL(reference || model) over all tokens, in nats: how much worse it predicts what the reference would say.
    """

    perplexity: float
    agreement: float
    divergence: float


@torch.no_grad()
def compare_models(reference: nn.Module, model: nn.Module, batches: Sequence) -> Comparison:
    """How a model does beside `reference`, on batches (x, y). Both are expected to evaluate (`.eval()`)."""
    same = divergence = tokens = 0.0
    for x, y in batches:
        theirs, ours = (F.log_softmax(each(x, y)[0].double(), dim=-1) for each in (reference, model))
        same += float((theirs.argmax(-1) == ours.argmax(-1)).sum())
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        tokens += y.numel()
    return Comparison(perplexity(model, list(batches)), same / tokens, divergence / tokens)


def model_bytes(model: nn.Module) -> int:
    """The bytes of all tensors of a model; tied ones count once."""
    tensors = {each.data_ptr(): each for each in (*model.parameters(), *model.buffers())}
    return sum(each.numel() * each.element_size() for each in tensors.values())


# --- given: generating with a cache -----------------------------------------------------------------------------------


class KVCache:
    """Keys and values as they are, in float32: what Float8KVCache saves memory against, with the same methods."""

    def __init__(self, batch: int, heads: int, context: int, dim: int) -> None:
        self.k, self.v = (torch.empty(batch, heads, context, dim) for _ in range(2))
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add t tokens, (batch, heads, t, dim). ValueError where there is no room for them."""
        end = self.length + k.shape[2]
        if end > self.k.shape[2]:
            raise ValueError(
                f"a cache of {self.k.shape[2]} tokens that holds {self.length} has no room for {k.shape[2]}"
            )
        self.k[:, :, self.length : end], self.v[:, :, self.length : end] = k, v
        self.length = end

    def read(self) -> tuple[Tensor, Tensor]:
        """(k, v) of all tokens, oldest first: (batch, heads, length, dim)."""
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


def make_caches(model: GPT, batch: int = 1, scales: Sequence[tuple[float, float]] | None = None) -> list:
    """An empty cache for each block: in float32, or, with (k_scale, v_scale) for each block, in 8 bits."""
    size = model.config
    shape = batch, size.heads, size.context, size.width // size.heads
    if scales is None:
        return [KVCache(*shape) for _ in model.blocks]
    return [Float8KVCache(*shape, k_scale, v_scale) for k_scale, v_scale in scales]


def extend(model: GPT, tokens: Tensor, caches: list) -> Tensor:
    """The logits after `tokens`, (B, T), of which the caches have seen all that came before: (B, V).

    Keys and values of these tokens are added to the caches. Nothing is computed again for older tokens.
    """
    return model.head(model.norm(_stream(model, tokens, caches)[:, -1]))


def _stream(model: GPT, tokens: Tensor, caches: list) -> Tensor:
    """What flows out of the last block, (B, T, C)."""
    start, T = caches[0].length, tokens.shape[1]
    positions = torch.arange(start, start + T, device=tokens.device)
    x = model.token_embedding(tokens) + model.position_embedding(positions)  # (B, T, C)
    for block, cache in zip(model.blocks, caches, strict=True):
        x = x + _attend(block.attention, block.attention_norm(x), cache)
        x = x + block.mlp(block.mlp_norm(x))
    return x


def _attend(attention: Attention, x: Tensor, cache: object) -> Tensor:
    B, T, C = x.shape
    q, k, v = (
        part.view(B, T, attention.heads, C // attention.heads).transpose(1, 2)  # (B, heads, T, D)
        for part in attention.qkv(x).split(C, dim=2)
    )
    cache.append(k, v)
    k, v = cache.read()  # (B, heads, length, D)
    # The i-th of the T new tokens sees the older ones and the new ones up to itself; a single one sees all there are.
    mask = None if T == 1 else torch.ones(T, k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - T)
    y = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask)
    return attention.out(y.transpose(1, 2).reshape(B, T, C))


@torch.no_grad()
def generate(
    model: GPT, tokens: Tensor, count: int, temperature: float = 1.0, top_k: int | None = None,
    generator: torch.Generator | None = None, scales: Sequence[tuple[float, float]] | None = None,
) -> Tensor:  # fmt: skip
    """As `model.generate`, with a cache of keys and values: `tokens`, int64 (B, T), and `count` more.

    scales: (k_scale, v_scale) for each block; the cache is in 8 bits then. As long as all tokens fit into the context,
    logits are those without a cache (up to float32's rounding, and to 8 bits where the cache has them). Where they do
    not, positions move, and all keys with them: the caches are filled again with the last half of the context.
    Give a model that evaluates.
    """
    context = model.config.context
    caches, fresh = make_caches(model, len(tokens), scales), tokens[:, -context:]
    for _ in range(count):
        if caches[0].length + fresh.shape[1] > context:
            for cache in caches:
                cache.length = 0
            fresh = tokens[:, -max(1, context // 2) :]
        following = draw(extend(model, fresh, caches), temperature, top_k, generator)
        tokens, fresh = torch.cat((tokens, following), dim=1), following
    return tokens


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """A next token for each row of logits (B, V): int64 (B, 1), drawn as `GPT.generate` draws it."""
    logits = logits.float() / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial(F.softmax(logits, dim=-1), 1, generator=generator)


class WithCache(nn.Module):
    """A model whose keys and values go through caches, to be compared: forward(x, y) as `GPT` has it.

    scales: as in `generate`.
    """

    def __init__(self, model: GPT, scales: Sequence[tuple[float, float]] | None = None) -> None:
        super().__init__()
        self.model, self.scales = model, scales

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = _stream(self.model, tokens, make_caches(self.model, len(tokens), self.scales))
        logits = self.model.head(self.model.norm(x))  # (B, T, V)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Recorder(KVCache):
    """A cache that remembers nothing but its last piece, for calibrating."""

    def append(self, k: Tensor, v: Tensor) -> None:
        self.piece = k, v

    def read(self) -> tuple[Tensor, Tensor]:
        return self.piece


@torch.no_grad()
def keys_and_values(model: GPT, batches: Iterable) -> list[tuple[list[Tensor], list[Tensor]]]:
    """(keys, values) of each block, a tensor (B, heads, T, D) for each batch (x, y)."""
    found: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in model.blocks]
    for x, _ in batches:
        recorders = [_Recorder(1, 1, 0, 1) for _ in model.blocks]
        extend(model, x, recorders)
        for (keys, values), recorder in zip(found, recorders, strict=True):
            keys.append(recorder.piece[0])
            values.append(recorder.piece[1])
    return found


def calibrate_cache(model: GPT, batches: Iterable, fraction: float = 1.0) -> list[tuple[float, float]]:
    """(k_scale, v_scale) for each block, from the keys and values of these batches (x, y)."""
    return [tuple(float(calibrate_static(each, fraction)) for each in both) for both in keys_and_values(model, batches)]
