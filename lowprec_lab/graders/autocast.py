"""Checks and known misconceptions of chapter 04.

What a scenario returns is a text of many lines; a verdict shows the first line that differs.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from lowprec_lab import autocast as given
from lowprec_lab.graders import autocast_oracle as exact
from lowprec_lab.graders.autocast_oracle import AS_IS, CPU, CUDA, FP32, LOWER, PROMOTE, Caster, Recorder
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for

for _name, _right in (
    ("bf16_loss", exact.bf16_loss), ("OpRecorder", Recorder), ("cast_policy", exact.cast_policy),
    ("MiniAutocast", Caster), ("count_weight_casts", exact.count_weight_casts),
    ("survives_compile", exact.survives_compile),
):  # fmt: skip
    oracle_for(_name, _right)

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def _same_text(answer, case, scenario, right, *args) -> None:
    """Compare what a scenario says of the answer and of the oracle; show the first line in which they differ."""
    want, got = scenario(right, *args), answer.run(scenario, *args)
    case.same_bits(got, want, show=_first_difference(got, want))


def _first_difference(got: object, want: str):
    """A function from either text to its first line that is not the other's, with its number."""
    lines = [text.splitlines() if isinstance(text, str) else [] for text in (got, want)]
    pairs = enumerate(zip(*lines, strict=False))
    place = next((n for n, (left, right) in pairs if left != right), min(map(len, lines)))

    def show(text: str) -> str:
        own = text.splitlines()
        return f"line {place + 1}: {own[place]}" if place < len(own) else f"ends after line {len(own)}"

    return show


# --- 4.1 bf16_loss ----------------------------------------------------------------------------------------------------


@check_for("bf16_loss", weight=2)
def batches_on_a_cpu(answer, case):
    """A small GPT and batches of 1 to 4 sequences of 1 to 8 tokens, device type "cpu", training."""
    for batch, length in ((2, 8), (4, 5), (1, 8), (3, 1), (1, 1)):
        seed = int(case.rng.integers(1000))
        _same_text(answer, case, given.loss_facts, exact.bf16_loss, "cpu", batch, length, True, seed)


@check_for("bf16_loss")
def other_device_types(answer, case):
    """Device types that are not there: autocast is switched on for them all the same, and can be asked for."""
    for device_type in ("xpu", "mtia", "hpu", "ipu"):
        seed = int(case.rng.integers(1000))
        _same_text(answer, case, given.loss_facts, exact.bf16_loss, device_type, 2, 4, True, seed)


@check_for("bf16_loss")
def models_that_evaluate(answer, case):
    """A GPT whose mode is `eval()`: it has to stay so."""
    for batch in (1, 2, 3):
        seed = int(case.rng.integers(1000))
        _same_text(answer, case, given.loss_facts, exact.bf16_loss, "cpu", batch, 6, False, seed)


@misconception("bf16_loss", "It leaves autocast off: the forward pass runs in float32.")
def without_autocast(model, x, y, device_type):
    return model(x, y)[1]


@misconception("bf16_loss", 'It asks for autocast of the "cpu", whatever device_type says.')
def always_cpu(model, x, y, device_type):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x, y)[1]


@misconception("bf16_loss", "It runs autocast in FP16 instead of BF16.")
def in_float16(model, x, y, device_type):
    with torch.autocast(device_type, dtype=torch.float16):
        return model(x, y)[1]


@misconception("bf16_loss", "It turns the model's own weights into BF16: they are to stay float32.")
def weights_to_bfloat16(model, x, y, device_type):
    return model.to(torch.bfloat16)(x, y)[1]


@misconception("bf16_loss", "It turns the loss into a Python number: the graph is gone, and with it backward.")
def as_a_number(model, x, y, device_type):
    with torch.autocast(device_type, dtype=torch.bfloat16):
        return model(x, y)[1].item()


@misconception("bf16_loss", "It runs without gradients (no_grad or detach): nothing flows back from the loss.")
def without_gradients(model, x, y, device_type):
    with torch.no_grad(), torch.autocast(device_type, dtype=torch.bfloat16):
        return model(x, y)[1]


@misconception("bf16_loss", "It calls backward itself: that is the caller's part, and cannot be done twice.")
def goes_backward(model, x, y, device_type):
    with torch.autocast(device_type, dtype=torch.bfloat16):
        loss = model(x, y)[1]
    loss.backward()
    return loss


@misconception("bf16_loss", "It leaves autocast switched on after the call.")
def leaves_it_on(model, x, y, device_type):
    torch.autocast(device_type, dtype=torch.bfloat16).__enter__()
    return model(x, y)[1]


@misconception("bf16_loss", "It gives the model no targets: what comes back are logits of the last position alone.")
def last_position_only(model, x, y, device_type):
    with torch.autocast(device_type, dtype=torch.bfloat16):
        logits, _ = model(x)
        return F.cross_entropy(logits.flatten(0, 1), y[:, -1])


@misconception("bf16_loss", "It runs the model twice: once for the logits, and once for the loss.")
def runs_twice(model, x, y, device_type):
    with torch.autocast(device_type, dtype=torch.bfloat16):
        model(x)
        return model(x, y)[1]


@misconception("bf16_loss", "It computes the cross-entropy from the logits after the block, where autocast is off.")
def cross_entropy_outside(model, x, y, device_type):
    with torch.autocast(device_type, dtype=torch.bfloat16):
        logits, _ = model(x, y)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@misconception("bf16_loss", "It gives back the logits and the loss: the loss alone is wanted.")
def logits_too(model, x, y, device_type):
    with torch.autocast(device_type, dtype=torch.bfloat16):
        return model(x, y)


@misconception("bf16_loss", "It switches the model to evaluation first.")
def switches_to_eval(model, x, y, device_type):
    with torch.autocast(device_type, dtype=torch.bfloat16):
        return model.eval()(x, y)[1]


@misconception("bf16_loss", "It rounds the loss to BF16.")
def rounds_the_loss(model, x, y, device_type):
    with torch.autocast(device_type, dtype=torch.bfloat16):
        return model(x, y)[1].bfloat16().float()


# --- 4.2 OpRecorder ---------------------------------------------------------------------------------------------------


@check_for("OpRecorder", weight=2)
def programs_of_a_few_ops(answer, case):
    """Programs of a few ops (lists, `out=`, masks, whole numbers, casts, backward) in float32, BF16 and float64."""
    for program in given.PROGRAMS:
        for dtype in (FLOAT32, BFLOAT16, FLOAT64):
            _same_text(answer, case, given.recorded, Recorder, program, dtype)


@check_for("OpRecorder")
def two_blocks_and_an_error(answer, case):
    """A recorder with two blocks, the first of which ends with an error; an op between them is not recorded."""
    for program in ("a product", "two results", "in place"):
        _same_text(answer, case, given.recorded_in_two_blocks, Recorder, program, BFLOAT16)


@check_for("OpRecorder")
def forward_and_backward_of_a_gpt(answer, case):
    """A GPT of one and two blocks, with fused attention and without, in float32 and under autocast."""
    for precision, layers, fused, backward in (
        (FLOAT32, 1, True, False), (BFLOAT16, 1, True, True), (BFLOAT16, 2, False, True),
    ):  # fmt: skip
        _same_text(answer, case, given.recorded_gpt, Recorder, precision, layers, fused, backward)


def _noting(change):
    """A recorder that notes change(name, ins, outs)."""
    return Recorder(lambda noted, *op: change(*op))


@misconception("OpRecorder", "It notes the dtype of the first tensor only, of those that go in.")
def first_input_only():
    return _noting(lambda name, ins, outs: (name, ins[:1], outs))


@misconception("OpRecorder", "It notes the dtype of the first result only.")
def first_result_only():
    return _noting(lambda name, ins, outs: (name, ins, outs[:1]))


@misconception("OpRecorder", "It does not look into lists: the tensors that cat is handed are missing.")
def without_lists():
    return Recorder(lists=False)


@misconception("OpRecorder", "It does not look at keyword arguments: the tensor behind out= is missing.")
def without_keywords():
    return Recorder(keywords=False)


@misconception("OpRecorder", "It swaps what goes in and what comes out.")
def swaps_in_and_out():
    return _noting(lambda name, ins, outs: (name, outs, ins))


@misconception("OpRecorder", "It leaves out tensors of whole numbers and of truth values.")
def floating_only():
    def kept(dtypes):
        return tuple(dtype for dtype in dtypes if dtype.is_floating_point)

    return _noting(lambda name, ins, outs: (name, kept(ins), kept(outs)))


@misconception("OpRecorder", "It notes an op once, however often it runs.")
def each_op_once():
    return Recorder(lambda noted, *op: None if op in noted else op)


@misconception("OpRecorder", "It notes a dtype once for each op, however many tensors have it.")
def each_dtype_once():
    return _noting(lambda name, ins, outs: (name, tuple(dict.fromkeys(ins)), tuple(dict.fromkeys(outs))))


@misconception("OpRecorder", "It leaves out the casts, `_to_copy`.")
def without_casts():
    return Recorder(lambda noted, *op: None if op[0] == "_to_copy" else op)


@misconception("OpRecorder", "It leaves out ops that are handed no tensor, such as arange.")
def without_makers():
    return Recorder(lambda noted, *op: op if op[1] else None)


@misconception("OpRecorder", 'It gives names with their overload, "mm.default" instead of "mm".')
def with_overloads():
    return Recorder(full_names=True)


@misconception("OpRecorder", "It sees the functions that are called, above autograd and autocast, and not the ops.")
def sees_functions():
    return exact.FunctionRecorder()


@misconception("OpRecorder", "It forgets what it has when a second block begins.")
def forgets_the_first_block():
    return Recorder(forgets=True)


@misconception("OpRecorder", 'It notes the names of dtypes, "float32", and not the dtypes.')
def dtypes_as_text():
    def named(dtypes):
        return tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)

    return _noting(lambda name, ins, outs: (name, named(ins), named(outs)))


# --- 4.3 cast_policy --------------------------------------------------------------------------------------------------


def _policies(answer, case, device_type: str, ops) -> None:
    for op in case.rng.permutation(sorted(ops)).tolist():
        case.same_bits(answer(op, device_type), exact.cast_policy(op, device_type), show=str)


@check_for("cast_policy", weight=2)
def ops_on_a_cpu(answer, case):
    """Every op of OPS, on a CPU, in a random order."""
    _policies(answer, case, "cpu", given.OPS)


@check_for("cast_policy", weight=2)
def ops_on_cuda(answer, case):
    """Every op of OPS, on a CUDA device, in a random order."""
    _policies(answer, case, "cuda", given.OPS)


@check_for("cast_policy")
def other_names_and_devices(answer, case):
    """Names that are not in OPS, and device types that have no table here."""
    for device_type in ("cpu", "cuda"):
        _policies(answer, case, device_type, ("view", "split", "masked_fill", "arange", "detach", "flatten"))
    for device_type in ("xpu", "CPU", ""):
        case.raises(ValueError, answer, "linear", device_type)


_LOSSES = ("cross_entropy_loss", "nll_loss", "mse_loss", "kl_div")
_BENDS = ("gelu", "relu", "silu", "tanh", "sigmoid")
_ELEMENTWISE = ("add", "mul", "gelu", "relu", "silu", "tanh", "sigmoid", "sqrt", "dropout")


def _looked_up(op, device_type, changes=(), instead=None):
    """The right policy, but for some ops: changes is a dict from ops to policies, or instead one for all devices."""
    right = exact.cast_policy(op, device_type)
    return dict(changes).get(op, right) if instead is None else instead(op, right)


@misconception("cast_policy", "It has one table, CUDA's, for both devices.")
def cuda_everywhere(op, device_type):
    exact.cast_policy(op, device_type)
    return CUDA.get(op, AS_IS)


@misconception("cast_policy", "It has one table, the CPU's, for both devices.")
def cpu_everywhere(op, device_type):
    exact.cast_policy(op, device_type)
    return CPU.get(op, AS_IS)


@misconception("cast_policy", "It has the tables of the two devices the wrong way round.")
def tables_swapped(op, device_type):
    exact.cast_policy(op, device_type)
    return exact.TABLES["cuda" if device_type == "cpu" else "cpu"].get(op, AS_IS)


@misconception("cast_policy", "It has gelu and its like in the lower precision: they take what comes.")
def bends_in_lower_precision(op, device_type):
    return _looked_up(op, device_type, dict.fromkeys(_BENDS, LOWER))


@misconception("cast_policy", "It has gelu and its like in fp32: they take what comes.")
def bends_in_fp32(op, device_type):
    return _looked_up(op, device_type, dict.fromkeys(_BENDS, FP32))


@misconception("cast_policy", "It calls add and mul promote: type promotion does that, without autocast.")
def arithmetic_promotes(op, device_type):
    return _looked_up(op, device_type, {"add": PROMOTE, "mul": PROMOTE})


@misconception("cast_policy", "It has every elementwise op in the lower precision.")
def elementwise_lower(op, device_type):
    return _looked_up(op, device_type, dict.fromkeys(_ELEMENTWISE, LOWER))


@misconception("cast_policy", "It leaves losses as they are: autocast computes them in fp32.")
def losses_as_is(op, device_type):
    return _looked_up(op, device_type, dict.fromkeys(_LOSSES, AS_IS))


@misconception(
    "cast_policy", "It has layer_norm, rms_norm and group_norm in fp32 on every device: on a CPU it is not so."
)
def norms_in_fp32(op, device_type):
    return _looked_up(op, device_type, dict.fromkeys(("layer_norm", "rms_norm", "group_norm"), FP32))


@misconception("cast_policy", "It has sums (sum, mean, cumsum, logsumexp) in fp32 on every device.")
def sums_in_fp32(op, device_type):
    return _looked_up(op, device_type, dict.fromkeys(("sum", "mean", "cumsum", "logsumexp"), FP32))


@misconception("cast_policy", "It has only linear and matmul in the lower precision, and forgets their relatives.")
def linear_and_matmul_only(op, device_type):
    return _looked_up(
        op, device_type, instead=lambda op, right: AS_IS if right == LOWER and op not in ("linear", "matmul") else right
    )


@misconception("cast_policy", "It says fp32 where the policy is promote.")
def promote_is_fp32(op, device_type):
    return _looked_up(op, device_type, instead=lambda op, right: FP32 if right == PROMOTE else right)


@misconception("cast_policy", "It says promote where nothing is on the list: such ops are left as they are.")
def as_is_is_promote(op, device_type):
    return _looked_up(op, device_type, instead=lambda op, right: PROMOTE if right == AS_IS else right)


# --- 4.4 MiniAutocast -------------------------------------------------------------------------------------------------

_TORCHS_CPU = exact.table_of("cpu")
_SHAKES = ("embedding", "add", "layer_norm", "gelu", "softmax", "cross_entropy_loss", "dropout", "div", "transpose")
_PRODUCTS = ("linear", "matmul", "scaled_dot_product_attention")


def invented_table(rng) -> tuple[tuple[str, str], ...]:
    """A random policy for each op of a GPT; products, whose operands must agree, are never left as they are."""
    rules = [(op, str(rng.choice(given.POLICIES))) for op in _SHAKES]
    return (*rules, *((op, str(rng.choice(given.POLICIES[:3]))) for op in _PRODUCTS))


# Short programs first: a verdict shows the first check that fails, and a difference in a whole GPT says little.


@check_for("MiniAutocast")
def single_ops_under_every_policy(answer, case):
    """Ops of OPS under each policy, on operands of float32, BF16, FP16 and float64, and of two kinds at once."""
    mixed = ((FLOAT32, BFLOAT16), (BFLOAT16, FLOAT32), (FLOAT16, BFLOAT16), (FLOAT64, FLOAT32), (FLOAT64, BFLOAT16))
    for policy in given.POLICIES:
        for op in ("mul", "cat", "stack"):
            for dtypes in mixed:
                _same_text(answer, case, given.traced_op, Caster, ((op, policy),), BFLOAT16, op, *dtypes)
        for op in case.rng.choice(["mm", "softmax", "exp", "gelu", "layer_norm", "sum", "cross_entropy_loss"], 2):
            for dtype in (FLOAT32, BFLOAT16, FLOAT64):
                _same_text(answer, case, given.traced_op, Caster, ((str(op), policy),), FLOAT16, str(op), dtype)


@check_for("MiniAutocast")
def operands_by_keyword_and_in_lists(answer, case):
    """Operands that are handed over by keyword, one at a time and in a list."""
    for policy in given.POLICIES:
        for dtypes in ((FLOAT32,), (BFLOAT16,), (FLOAT16,)):
            _same_text(answer, case, given.traced_keywords, Caster, policy, BFLOAT16, *dtypes)


@check_for("MiniAutocast")
def a_weight_that_is_used_again(answer, case):
    """A weight used 1 to 4 times in each of 1 to 3 blocks, leaf or not, frozen or not; blocks end with errors."""
    for uses, blocks in ((1, 1), (3, 1), (4, 2), (2, 3), (1, 2)):
        for leaf, requires_grad in ((True, True), (True, False), (False, True)):
            _same_text(answer, case, given.traced_weight, Caster, BFLOAT16, uses, blocks, leaf, requires_grad)


@check_for("MiniAutocast", weight=2)
def torchs_own_table_on_a_gpt(answer, case):
    """Forward and backward of a small GPT with the CPU's table: what torch.autocast does, op by op."""
    for layers, fused, bias, passes in ((1, True, False, 1), (2, False, True, 1), (1, True, True, 3)):
        _same_text(
            answer, case, given.traced_gpt, Caster, _TORCHS_CPU, BFLOAT16, layers, fused, bias, passes
        )  # fmt: skip


@check_for("MiniAutocast", weight=2)
def invented_tables_on_a_gpt(answer, case):
    """Forward and backward of a small GPT with tables that nobody uses, in BF16 and FP16."""
    for _ in range(case.count(4)):
        dtype, fused, passes = BFLOAT16 if case.rng.random() < 0.7 else FLOAT16, bool(case.rng.integers(2)), 1
        table = invented_table(case.rng)
        _same_text(answer, case, given.traced_gpt, Caster, table, dtype, 1, fused, False, passes)


def _with_policy(policy, change):
    return lambda op: change(policy(op))


@misconception("MiniAutocast", "It is torch.autocast for CPUs: it never asks the policy.")
def torchs_own(policy, dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype=dtype)


@misconception("MiniAutocast", "It casts nothing at all.")
def casts_nothing(policy, dtype=torch.bfloat16):
    return Caster(lambda op: AS_IS, dtype)


@misconception("MiniAutocast", "It takes fp32 for as is: BF16 stays BF16 where float32 is asked for.")
def fp32_as_is(policy, dtype=torch.bfloat16):
    return Caster(_with_policy(policy, lambda rule: AS_IS if rule == FP32 else rule), dtype)


@misconception("MiniAutocast", "It takes promote for as is.")
def promote_as_is(policy, dtype=torch.bfloat16):
    return Caster(_with_policy(policy, lambda rule: AS_IS if rule == PROMOTE else rule), dtype)


@misconception("MiniAutocast", "It casts to float32 for promote, also where no argument is float32.")
def promote_to_float32(policy, dtype=torch.bfloat16):
    return Caster(_with_policy(policy, lambda rule: FP32 if rule == PROMOTE else rule), dtype)


@misconception("MiniAutocast", "It casts to the lower precision for promote: the widest wins, not the narrowest.")
def promote_to_lower(policy, dtype=torch.bfloat16):
    return Caster(_with_policy(policy, lambda rule: LOWER if rule == PROMOTE else rule), dtype)


@misconception("MiniAutocast", "It casts float64 as well.")
def casts_doubles(policy, dtype=torch.bfloat16):
    return Caster(policy, dtype, doubles=True)


@misconception("MiniAutocast", "It casts to BF16, whatever dtype says.")
def always_bfloat16(policy, dtype=torch.bfloat16):
    return Caster(policy)


@misconception("MiniAutocast", "It has no cast cache: a weight is cast each time it is used.")
def without_a_cache(policy, dtype=torch.bfloat16):
    return Caster(policy, dtype, cached="nothing")


@misconception("MiniAutocast", "It keeps the casts of all float32 tensors that require gradients, not of leaves alone.")
def caches_everything(policy, dtype=torch.bfloat16):
    return Caster(policy, dtype, cached="everything")


@misconception("MiniAutocast", "It keeps the casts of leaves that require no gradients, too.")
def caches_the_frozen(policy, dtype=torch.bfloat16):
    return Caster(policy, dtype, cached="frozen leaves too")


@misconception("MiniAutocast", "It keeps its casts after the block: a later block would see old weights.")
def keeps_its_casts(policy, dtype=torch.bfloat16):
    return Caster(policy, dtype, keeps=True)


@misconception("MiniAutocast", "It does not cast tensors in lists.")
def leaves_lists(policy, dtype=torch.bfloat16):
    return Caster(policy, dtype, lists=False)


@misconception("MiniAutocast", "It does not cast tensors that are handed over by keyword.")
def leaves_keywords(policy, dtype=torch.bfloat16):
    return Caster(policy, dtype, keywords=False)


@misconception("MiniAutocast", "It detaches what it casts: no gradient flows back through a cast.")
def cuts_the_graph(policy, dtype=torch.bfloat16):
    return Caster(policy, dtype, cut=True)


@misconception("MiniAutocast", "It casts results back to float32.")
def casts_back_again(policy, dtype=torch.bfloat16):
    return Caster(policy, dtype, back=True)


@misconception("MiniAutocast", "It casts float32 tensors only: FP16 stays FP16 where BF16 or float32 is asked for.")
def casts_float32_only(policy, dtype=torch.bfloat16):
    return Caster(policy, dtype, only=torch.float32)


@misconception("MiniAutocast", "It is never switched off: its __exit__ does not call super().__exit__.")
def never_off(policy, dtype=torch.bfloat16):
    return Caster(policy, dtype, stays=True)


# --- 4.5 count_weight_casts -------------------------------------------------------------------------------------------


def _counts(answer, case, *args) -> None:
    case.same_bits(answer.run(given.weight_casts, *args), given.weight_casts(exact.count_weight_casts, *args))


@check_for("count_weight_casts")
def one_pass_and_more(answer, case):
    """GPTs of 1 to 3 blocks, with biases and without, 1 to 4 passes, with the cache and without."""
    for layers, bias, passes in ((1, False, 1), (2, False, 3), (1, True, 2), (3, True, 4)):
        for cache_enabled in (True, False):
            _counts(answer, case, layers, bias, 0, passes, cache_enabled)


@check_for("count_weight_casts")
def frozen_blocks(answer, case):
    """GPTs some of whose blocks are frozen, or all: their weights are cast anew in every pass."""
    for layers, bias, frozen, passes in ((2, False, 1, 3), (2, True, 2, 2), (3, False, 1, 2), (1, True, 1, 4)):
        for cache_enabled in (True, False):
            _counts(answer, case, layers, bias, frozen, passes, cache_enabled)


@check_for("count_weight_casts")
def short_sequences_and_no_pass(answer, case):
    """Sequences of one token, five passes, and no pass at all."""
    for length, passes in ((1, 2), (3, 5), (1, 0), (8, 0)):
        for cache_enabled in (True, False):
            _counts(answer, case, 1, False, 0, passes, cache_enabled, length)


def _sum_of_times(weights, passes, cache_enabled):
    return sum(exact.times(weight, passes, cache_enabled) for weight in weights)


@misconception("count_weight_casts", "It counts all casts down to BF16, those of activations included.")
def activations_too(model, x, passes, cache_enabled):
    # Of each block, what the norms give goes to two linear layers; of the model, to the head.
    return exact.count_weight_casts(model, x, passes, cache_enabled) + passes * (2 * len(model.blocks) + 1)


@misconception("count_weight_casts", "It has the cache on, whatever cache_enabled says.")
def always_cached(model, x, passes, cache_enabled):
    return exact.count_weight_casts(model, x, passes, True)


@misconception("count_weight_casts", "It has the cache off, whatever cache_enabled says (or a block for each pass).")
def never_cached(model, x, passes, cache_enabled):
    return exact.count_weight_casts(model, x, passes, False)


@misconception("count_weight_casts", "It has cache_enabled the wrong way round.")
def cached_the_wrong_way(model, x, passes, cache_enabled):
    return exact.count_weight_casts(model, x, passes, not cache_enabled)


@misconception("count_weight_casts", "It counts every parameter, norms and position embeddings too.")
def all_parameters(model, x, passes, cache_enabled):
    return _sum_of_times(model.parameters(), passes, cache_enabled)


@misconception("count_weight_casts", "It leaves out the weight that head and embedding share.")
def without_the_tied(model, x, passes, cache_enabled):
    weights = [w for w in exact.cast_weights(model) if w is not model.head.weight]
    return _sum_of_times(weights, passes, cache_enabled)


@misconception(
    "count_weight_casts", "It counts the shared weight twice: embedding tokens is a look-up, without a cast."
)
def the_tied_twice(model, x, passes, cache_enabled):
    return _sum_of_times([*exact.cast_weights(model), model.head.weight], passes, cache_enabled)


@misconception("count_weight_casts", "It has frozen weights in the cache like all others.")
def caches_frozen_weights(model, x, passes, cache_enabled):
    return len(exact.cast_weights(model)) * (min(passes, 1) if cache_enabled else passes)


@misconception("count_weight_casts", "It leaves out frozen weights.")
def without_the_frozen(model, x, passes, cache_enabled):
    return _sum_of_times([w for w in exact.cast_weights(model) if w.requires_grad], passes, cache_enabled)


@misconception("count_weight_casts", "It counts one pass, whatever passes says.")
def one_pass_only(model, x, passes, cache_enabled):
    return exact.count_weight_casts(model, x, 1, cache_enabled)


@misconception("count_weight_casts", "It leaves out the biases.")
def without_biases(model, x, passes, cache_enabled):
    return _sum_of_times([w for w in exact.cast_weights(model) if w.dim() == 2], passes, cache_enabled)


# --- 4.6 survives_compile ---------------------------------------------------------------------------------------------


def _survives(answer, case, rounding: str, compiler: str, x) -> None:
    right = given.survives(exact.survives_compile, rounding, compiler, x)
    case.same_bits(answer.run(given.survives, rounding, compiler, x), right)


@check_for("survives_compile", weight=2)
def plain_numbers(answer, case):
    """Random numbers, through every rounding and every stand-in for a compiler."""
    for rounding in given.ROUNDINGS:
        for compiler in given.COMPILERS:
            x = torch.from_numpy(case.rng.normal(size=(3, 4)).astype("float32"))
            _survives(answer, case, rounding, compiler, x)


@check_for("survives_compile")
def special_numbers(answer, case):
    """The same with zeros of both signs, infinities and NaN among them."""
    for rounding in ("bfloat16 and back", "float16 and back", "bfloat16 by its bits", "to bfloat16", "in place"):
        for compiler in given.COMPILERS:
            x = torch.from_numpy(case.rng.normal(size=5).astype("float32"))
            _survives(answer, case, rounding, compiler, torch.cat([torch.tensor(_SPECIAL), x]))
            _survives(answer, case, rounding, compiler, torch.cat([torch.tensor(_SPECIAL[:4]), x]))


@check_for("survives_compile")
def numbers_that_are_rounded_already(answer, case):
    """Values of BF16 and of FP8, on which dropping the casts changes nothing, and no number at all."""
    for rounding in ("bfloat16 and back", "float8_e4m3fn and back", "bfloat16 by its bits"):
        for compiler in ("faithful", "drops the casts", "the last one moves", "widens"):
            x = torch.from_numpy(case.rng.integers(-8, 8, 6).astype("float32")) / 4
            _survives(answer, case, rounding, compiler, x)
        _survives(answer, case, rounding, "faithful", torch.zeros(0))


_SPECIAL = [-0.0, 0.0, float("inf"), float("-inf"), float("nan")]


def _both(f, x, compiler):
    return f(x.clone()), compiler(f)(x.clone())


def _compared(left, right, same):
    """same(left, right), both as float32 tensors, where dtype and shape agree."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(same(left.float(), right.float()))


@misconception("survives_compile", "It compares with torch.equal or ==: a NaN is never the same as a NaN.")
def nan_is_no_nan(f, x, compiler=torch.compile):
    return _compared(*_both(f, x, compiler), lambda a, b: torch.equal(a, b) and not (b.signbit() ^ a.signbit()).any())


@misconception("survives_compile", "It compares values: -0.0 and 0.0 count as the same.")
def zeros_are_equal(f, x, compiler=torch.compile):
    return _compared(*_both(f, x, compiler), lambda a, b: ((a == b) | (a.isnan() & b.isnan())).all())


@misconception("survives_compile", "It compares with == alone: NaNs differ, and zeros of both signs do not.")
def equal_alone(f, x, compiler=torch.compile):
    return _compared(*_both(f, x, compiler), torch.equal)


@misconception("survives_compile", "It compares with a tolerance (allclose): a rounding is smaller than that.")
def close_enough(f, x, compiler=torch.compile):
    return _compared(*_both(f, x, compiler), lambda a, b: torch.allclose(a, b, rtol=0.1, atol=0.1, equal_nan=True))


@misconception("survives_compile", "It compares the compiled result with x, not with what f gives.")
def compares_with_x(f, x, compiler=torch.compile):
    return exact.same_bits(x, compiler(f)(x.clone()))


@misconception("survives_compile", "It compares f with x, and compiles nothing.")
def compiles_nothing(f, x, compiler=torch.compile):
    return exact.same_bits(f(x.clone()), x)


@misconception("survives_compile", "It compares bits without an exception for NaN: two NaNs of other bits differ.")
def nan_by_its_bits(f, x, compiler=torch.compile):
    left, right = _both(f, x, compiler)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool((exact.bits_of(left) == exact.bits_of(right)).all())


@misconception("survives_compile", "It compares values whatever their dtype: a float64 result counts as the same.")
def any_dtype(f, x, compiler=torch.compile):
    left, right = _both(f, x, compiler)
    return exact.same_bits(left.double(), right.double())


@misconception("survives_compile", "It compares the elements in a row, whatever the shape.")
def any_shape(f, x, compiler=torch.compile):
    left, right = _both(f, x, compiler)
    return exact.same_bits(left.reshape(-1), right.reshape(-1))


@misconception("survives_compile", "It says whether something differs: that is the other way round.")
def the_other_way_round(f, x, compiler=torch.compile):
    return not exact.survives_compile(f, x, compiler)


@misconception("survives_compile", "It compares the first element only.")
def first_element_only(f, x, compiler=torch.compile):
    left, right = _both(f, x, compiler)
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and exact.same_bits(left.reshape(-1)[:1], right.reshape(-1)[:1])


@misconception("survives_compile", "It is content when one element is the same.")
def any_element(f, x, compiler=torch.compile):
    def some(a, b):
        same = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
        return same.any() or not same.numel()

    return _compared(*_both(f, x, compiler), some)


# --- questions about the real code ------------------------------------------------------------------------------------

question_for(
    "4.A",
    "fp32_set_opt_dtype",
    "Right: softmax has an argument for the dtype of its result. Autocast fills it in with float32, unless you did.",
    "Look for softmax among the lists that begin with AT_FORALL_. The name of a list, in small letters, is the policy.",
    {
        "fp32": "The list of plain fp32 begins with acos and has no softmax. Look at the lists below it.",
        "lower_precision_fp": "That is the list of the matrix products. Look at the lists below it.",
        "promote": "That is the last and shortest list. softmax is on the one before.",
    },
)
question_for(
    "4.B",
    False,
    "Right: double tensors are never eligible. A float64 argument stays float64, in every policy.",
    "Read the function from the header again: which dtype is named there, and with which comparison?",
    {True: "The last condition takes one dtype out: which one?"},
)
question_for(
    "4.C",
    0.0,
    "Right: 1e-8 is less than half of 2^-24 (6e-8), so it is rounded to zero. The weight stands still.",
    "Half of the smallest positive number is 2^-25, about 3e-8. Is 1e-8 above or below?",
    {
        1e-8: "FP16 has no value there. Its smallest positive number is 2^-24, about 6e-8: which neighbour is nearer?",
        2.0**-24: "That would be rounding up. 1e-8 lies between 0 and 2^-24: which of the two is nearer?",
    },
)
