"""The grader's own answers of chapter 04, against torch's autocast, its header and its dispatcher."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowprec_lab import autocast as given
from lowprec_lab.graders import autocast as grader
from lowprec_lab.graders import autocast_oracle as exact
from lowprec_lab.graders.autocast_oracle import AS_IS, FP32, LOWER, PROMOTE

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
# On no list of CUDA's, and yet float32 comes out: it calls log_softmax and nll_loss, which are.
BY_WHAT_IT_CALLS = "cross_entropy_loss"


# --- the tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_op_has_a_policy_where_torch_has_a_kernel_for_it(device):
    names = torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[device])
    registered = {name.removeprefix("aten::").split(".")[0] for name in names}
    for op in given.OPS:
        assert (exact.cast_policy(op, device) != AS_IS) == (op in registered), op


def test_cudas_table_is_that_of_the_installed_header():
    text = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    policies = {"LOWER_PRECISION_FP": LOWER, "FP32": FP32, "FP32_SET_OPT_DTYPE": FP32, "PROMOTE": PROMOTE}
    found = {}
    for name, policy in policies.items():
        lines = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)+.*)", text)[1]
        found |= dict.fromkeys(re.findall(r"_\((\w+)", lines), policy)
    assert len(found) > 90
    for op in given.OPS:
        assert exact.cast_policy(op, "cuda") == found.get(op, AS_IS), op


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("op", given.OPS)
def test_torchs_own_autocast_does_what_the_table_says(op, device):
    """On a CPU with tensors, for CUDA with fake ones."""
    policy = FP32 if (op, device) == (BY_WHAT_IT_CALLS, "cuda") else exact.cast_policy(op, device)
    out = [given.autocast_result(op, device, dtype) for dtype in (FLOAT32, BFLOAT16)]
    expected = {LOWER: [BFLOAT16, BFLOAT16], FP32: [FLOAT32, FLOAT32]}
    assert out == expected.get(policy, [FLOAT32, BFLOAT16])
    if policy == PROMOTE:
        assert given.autocast_result(op, device, BFLOAT16, FLOAT32) == FLOAT32


@pytest.mark.parametrize("op", given.OPS)
def test_a_function_mode_meets_every_op_under_its_name(op):
    met = []

    class Names(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            met.append(given.op_name(function))
            return function(*args, **(kwargs or {}))

    with Names():
        given.call_op(op, FLOAT32)
    assert op in met


# --- the caster -------------------------------------------------------------------------------------------------------


def torchs_trace(layers, fused, bias, passes):
    class Torchs:
        def __new__(cls, policy, dtype):
            return torch.autocast("cpu", dtype=dtype)

    return given.traced_gpt(Torchs, (), BFLOAT16, layers, fused, bias, passes)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("layers", "passes"), [(1, 1), (3, 1), (2, 3)])
def test_with_the_cpus_table_the_trace_of_a_gpt_is_torchs(layers, passes, fused, bias):
    """In order without casts and detach, and as a multiset: forward and backward."""
    ours = given.traced_gpt(exact.Caster, exact.table_of("cpu"), BFLOAT16, layers, fused, bias, passes)
    assert "mm: (bfloat16, bfloat16) -> (bfloat16)" in ours
    assert ours == torchs_trace(layers, fused, bias, passes)


@pytest.mark.parametrize("operands", [(FLOAT32,), (BFLOAT16,), (BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)], ids=str)
@pytest.mark.parametrize("op", [op for op in given.OPS if op != BY_WHAT_IT_CALLS])
def test_with_cudas_table_every_op_gives_what_cuda_autocast_gives(op, operands):
    theirs = given.autocast_result(op, "cuda", *operands)
    try:
        with exact.Caster(lambda name: exact.cast_policy(name, "cuda")):
            ours = given.call_op(op, *operands).dtype
    except RuntimeError:  # as it is, with operands that a CPU's kernel refuses
        assert exact.cast_policy(op, "cuda") == AS_IS
        return
    assert ours == theirs


class ByHand:
    """A GPT's forward pass written out, with a cast in front of every op: no mode is involved."""

    def __init__(self, table, dtype):
        self.rules, self.dtype, self.kept = dict(table), dtype, {}

    def __call__(self, op, function, *args):
        floating = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
        rule = self.rules.get(op, AS_IS)
        if rule == PROMOTE:
            rule = FP32 if any(x.dtype == FLOAT32 for x in floating) else AS_IS
        target = {LOWER: self.dtype, FP32: FLOAT32}.get(rule)
        return function(*(self.cast(x, target) if any(x is y for y in floating) else x for x in args))

    def cast(self, x, target):
        if target in (None, x.dtype):
            return x
        if isinstance(x, torch.nn.Parameter) and target == self.dtype:
            return self.kept.setdefault(x, x.to(target)) if x not in self.kept else self.kept[x]
        return x.to(target)


def forward_by_hand(model, tokens, targets, at):
    config, T = model.config, tokens.shape[1]
    add = torch.Tensor.add

    def linear(layer, x):
        return at("linear", F.linear, x, layer.weight, layer.bias)

    def norm(layer, x):
        return at("layer_norm", lambda x, w, b: F.layer_norm(x, (config.width,), w, b), x, layer.weight, layer.bias)

    def heads(x):
        return at("transpose", lambda x: x.transpose(1, 2), x.view(*x.shape[:2], config.heads, -1))

    positions = torch.arange(T)
    looked_up = at("embedding", F.embedding, tokens, model.token_embedding.weight)
    x = at("add", add, looked_up, at("embedding", F.embedding, positions, model.position_embedding.weight))
    x = at("dropout", lambda x: F.dropout(x, 0.0, True), x)
    for block in model.blocks:
        q, k, v = (heads(part) for part in linear(block.attention.qkv, norm(block.attention_norm, x)).split(8, dim=2))
        y = at(
            "scaled_dot_product_attention",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True),
            q, k, v,
        )  # fmt: skip
        y = at("transpose", lambda y: y.transpose(1, 2), y).reshape(*tokens.shape, 8)
        y = at("dropout", lambda y: F.dropout(y, 0.0, True), linear(block.attention.out, y))
        x = at("add", add, x, y)
        y = at("gelu", F.gelu, linear(block.mlp.up, norm(block.mlp_norm, x)))
        y = at("dropout", lambda y: F.dropout(y, 0.0, True), linear(block.mlp.down, y))
        x = at("add", add, x, y)
    logits = at("linear", F.linear, norm(model.norm, x), model.head.weight)
    return at("cross_entropy_loss", F.cross_entropy, logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("seed", range(30))
def test_with_invented_tables_the_trace_is_that_of_casts_by_hand(seed):
    table, dtype = grader.invented_table(np.random.default_rng(seed)), (BFLOAT16, FLOAT16)[seed % 2]
    model, (tokens, targets) = given.small_gpt(2, seed % 3 == 0), given.small_batch()
    with given._Trace() as trace:
        sum([forward_by_hand(model, tokens, targets, ByHand(table, dtype))]).backward()
    assert given.traced_gpt(exact.Caster, table, dtype, 2, True, seed % 3 == 0, 1) == trace.text()


def test_a_right_caster_never_meets_an_op_that_refuses(monkeypatch):
    for seed in range(30):
        table = grader.invented_table(np.random.default_rng(100 + seed))
        assert "RuntimeError" not in given.traced_gpt(exact.Caster, table, FLOAT16, 1, seed % 2 == 0, False, 1)


# --- the others -------------------------------------------------------------------------------------------------------


def test_the_recorder_sees_what_linear_comes_to():
    with exact.Recorder() as recorder, torch.autocast("cpu", dtype=BFLOAT16):
        F.linear(torch.ones(2, 3), torch.ones(4, 3))
    ones = ("ones", (), (FLOAT32,))
    cast = ("_to_copy", (FLOAT32,), (BFLOAT16,))
    turned, product = ("t", (BFLOAT16,), (BFLOAT16,)), ("mm", (BFLOAT16, BFLOAT16), (BFLOAT16,))
    assert recorder.ops == [ones, ones, cast, cast, turned, product]


def test_the_recorder_counts_as_torchs_profiler_does():
    model, (tokens, targets) = given.small_gpt(2), given.small_batch()
    with exact.Recorder() as recorder:
        model(tokens, targets)[1].backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(tokens, targets)[1].backward()
    seen = Counter(event.name.removeprefix("aten::") for event in profile.events())
    for name in ("mm", "gelu", "native_layer_norm", "_log_softmax", "gelu_backward", "native_layer_norm_backward"):
        assert Counter(op[0] for op in recorder.ops)[name] == seen[name] > 0, name


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize(("layers", "frozen", "bias"), [(1, 0, False), (2, 1, True), (3, 3, False)])
def test_weights_are_cast_as_often_as_the_rule_says(layers, frozen, bias, cache_enabled):
    """Every `_to_copy` of autocast, less those of activations, which are counted in a pass with BF16 weights."""

    def counted(model, x, passes, cache_enabled):
        places = {weight.data_ptr() for weight in model.parameters()}
        seen = []

        class Watch(exact.TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                seen.append(op is torch.ops.aten._to_copy.default and args[0].data_ptr() in places)
                return op(*args, **(kwargs or {}))

        with Watch(), torch.autocast("cpu", dtype=BFLOAT16, cache_enabled=cache_enabled):
            for _ in range(passes):
                model(x)
        return sum(seen)

    for passes in (0, 1, 3):
        arguments = (layers, bias, frozen, passes, cache_enabled)
        assert given.weight_casts(exact.count_weight_casts, *arguments) == given.weight_casts(counted, *arguments)


def test_bits_are_compared_nan_by_class():
    nan, other = torch.tensor([float("nan"), 1.0]), torch.tensor([-float("nan"), 1.0])
    assert exact.same_bits(nan, other)
    assert not exact.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not exact.same_bits(torch.ones(2), torch.ones(2).double())
    assert not exact.same_bits(torch.ones(2), torch.ones(2, 1))
    assert exact.same_bits(torch.ones(0), torch.ones(0))


def test_scenarios_leave_no_trace():
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()

    def leaves_it_on(model, x, y, device_type):
        torch.autocast(device_type, dtype=torch.float16).__enter__()
        torch.set_grad_enabled(False)
        return model(x, y)[1]

    assert "autocast afterwards: float16" in given.loss_facts(leaves_it_on, "cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == BFLOAT16
    assert torch.is_grad_enabled()
    assert given._autocast_depth() == 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)
