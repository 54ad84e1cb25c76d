# %% [markdown]
# # 04 · Autocast: who decides the dtype?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 03](03_accumulation.ipynb): what BF16 is good at (products) and bad at (sums). **Gives** you a GPT that trains in BF16, a recorder that shows in which dtype every operation runs, and an autocast of your own that does what torch's does.
#
# "Switch on mixed precision" is one line of code: `with torch.autocast("cpu", dtype=torch.bfloat16):`. No weight changes, no layer is told anything. And inside the block some operations run in BF16 and others in float32. Which ones? Who decided it? And is it the same on a GPU?

# %% tags=["setup"]
try:
    import time
    import warnings

    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map
    from tqdm.auto import tqdm

    from lowprec_lab import CastPolicyExplorer, check, fill, plots, progress, question
    from lowprec_lab.autocast import (
        OPS,
        ROUNDINGS,
        MiniAutocast,
        OpRecorder,
        autocast_result,
        bf16_loss,
        call_op,
        cast_policy,
        count_weight_casts,
        loss_facts,
        op_name,
        recorded,
        recorded_gpt,
        recorded_in_two_blocks,
        small_batch,
        small_gpt,
        survives,
        survives_compile,
        traced_gpt,
        traced_keywords,
        traced_op,
        traced_weight,
        weight_casts,
    )
    from lowprec_lab.data import load_corpus, step_generator
    from lowprec_lab.formats import BF16, FP32, TF32
    from lowprec_lab.fused import why_not_compiled
    from lowprec_lab.gpt import GPT, preset
    from lowprec_lab.reading import installed_lines
    from lowprec_lab.rounding import round_to
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %%
x = torch.full((2, 4), 0.5)
weight = torch.full((3, 4), 0.5)
with torch.autocast("cpu", dtype=torch.bfloat16):
    for name, result in (
        ("x", x),
        ("F.linear(x, weight)", F.linear(x, weight)),
        ("F.gelu(x)", F.gelu(x)),
        ("F.gelu(F.linear(x, weight))", F.gelu(F.linear(x, weight))),
        ("x + x", x + x),
        ("x.sum()", x.sum()),
        ("F.mse_loss(F.linear(x, weight), F.linear(x, weight))", F.mse_loss(F.linear(x, weight), F.linear(x, weight))),
    ):
        print(f"{name:55} {str(result.dtype).removeprefix('torch.')}")

# %% [markdown]
# Two float32 tensors go in, and a BF16 tensor comes out of `linear`. `gelu` gives back what it gets. A loss of BF16 numbers is float32. At the end of this page you can predict each of these lines, and you will have written the thing that makes them so.
#
# **Words.** An **op** is one operation of torch's library, which is called ATen: `linear`, `softmax`, `add`. **Autocast** stands in front of the ops: it looks at which one is called, casts the arguments, and passes them on. A **policy** is what it does for an op: cast to the lower precision, cast to float32, promote to the widest argument, or leave everything as it is.
#
# ---
# ## The GPT, once through
#
# The model of the coming chapters is in `lowprec_lab/gpt.py`. Its structure and sizes are those of nanoGPT ([model.py](https://github.com/karpathy/nanoGPT/blob/3adf61e/model.py)); the code is this course's own. Read it now, `GPT.forward` first; it takes ten minutes. The shapes, B sequences of T tokens, C numbers for each token, V tokens in the vocabulary:
#
# | where | shape | what |
# |---|---|---|
# | `tokens`, `targets` | (B, T) | int64; targets are the tokens one place further |
# | `x`, the **residual stream** | (B, T, C) | embeddings go in; every block *adds* to it |
# | `qkv(norm(x))` | (B, T, 3C) | three matrices in one; then split among the heads, (B, heads, T, C / heads) |
# | `up`, `gelu`, `down` | (B, T, 4C), then (B, T, C) | the MLP |
# | `logits` | (B, T, V) with targets, (B, 1, V) without | the last linear layer; its weight is also the embedding table |
# | `loss` | () | mean cross-entropy; None without targets |
#
# There is no dtype anywhere in it. That is the point of autocast.
#
# ### Exercise 4.1 · `bf16_loss` · 20 min · easy · 2 points
#
# Here is a snippet as it is passed around for "nanoGPT in BF16". It fails three times. Run it, and read each message before you go on.

# %%
model, (tokens, targets) = small_gpt(), small_batch()


def first_try():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def second_try():  # the model returns a tuple: unpack it
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits, _ = model(tokens)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


with warnings.catch_warnings(record=True) as said:
    for attempt in (first_try, second_try):
        try:
            attempt()
        except (AttributeError, ValueError) as error:
            print(f"{attempt.__name__}: {type(error).__name__}: {error}")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits, loss = model(tokens, targets)
for sentence in dict.fromkeys(str(each.message) for each in said):
    print(f"torch warns: {sentence}")
print(f"third try: no error, and logits in {logits.dtype} on a {logits.device.type}")

# %% [markdown]
# The first two are loud. The third is not: autocast for `"cuda"` looks at CUDA tensors only. On a CPU it casts nothing (torch warns, and switches it off where there is no GPU), and the run is a float32 run that somebody believes to be BF16.
#
# | | |
# |---|---|
# | in | `model`: a GPT with float32 weights; `x`, `y`: int64 (B, T), tokens and targets; `device_type`: "cpu", "cuda", ... |
# | out | float32, 0-d: the mean cross-entropy over all B * T positions, with its graph |
# | mind | the device type is an argument; the model runs once; the loss belongs into the block, `backward` does not; weights, mode and autocast are afterwards as before |
#
# What the small GPT above has to say of a right answer:
#
# | fact | value |
# |---|---|
# | forward passes | one, with targets, under bfloat16 autocast |
# | autocast afterwards | off |
# | weights | float32 |
# | loss | float32, shape () |
# | gradients after `loss.backward()` | float32 |
#
# <details><summary>A nudge</summary>Look at what `GPT.forward` returns when it is given the targets. Is there anything left to compute?</details>
# <details><summary>An approach</summary>A <code>with torch.autocast(...)</code> block around one call of the model with both tensors; the second of the two things that it returns.</details>


# %%
@fill
def bf16_loss(model, x, y, device_type):
    ### BEGIN SOLUTION
    with torch.autocast(device_type, dtype=torch.bfloat16):
        _, loss = model(x, y)
    return loss
    ### END SOLUTION


# %%
check(bf16_loss)

# %% [markdown]
# ---
# ## See it
#
# ### Exercise 4.2 · `OpRecorder` · 30 min · medium · 3 points
#
# Printing dtypes by hand does not scale. torch has a place through which every op passes just before a kernel is chosen: below autograd, below autocast. A `TorchDispatchMode` may stand there. While it is active, its method `__torch_dispatch__` is called for each op instead of the op, and has to call it itself.
#
# | | |
# |---|---|
# | in | nothing: `with OpRecorder() as recorder:` |
# | out | `recorder.ops`: a list of tuples `(name, ins, outs)`, one for each op: a str, a tuple of dtypes, a tuple of dtypes |
# | mind | tensors in lists and in keyword arguments count, too; the name has no overload ("mm", not "mm.default"); the result is passed on; a second block goes on in the same list |
#
# By hand, `F.linear(x, weight)` with float32 tensors under CPU autocast comes to four ops:
#
# | name | ins | outs | why |
# |---|---|---|---|
# | `_to_copy` | float32 | bfloat16 | autocast casts x |
# | `_to_copy` | float32 | bfloat16 | and the weight |
# | `t` | bfloat16 | bfloat16 | linear is x times the transposed weight |
# | `mm` | bfloat16, bfloat16 | bfloat16 | the matrix product |
#
# `linear` itself is not among them: it was taken apart above.
#
# <details><summary>A nudge</summary>Arguments may be nested: a tuple of lists of tensors and a dictionary. What does <code>tree_leaves</code> (it is imported above) make of them?</details>
# <details><summary>An approach</summary>In <code>__init__</code>: call <code>super().__init__()</code> and make the list. In <code>__torch_dispatch__(self, op, types, args=(), kwargs=None)</code>: call <code>op(*args, **(kwargs or {}))</code>, note <code>op.overloadpacket.__name__</code> and the dtypes of the tensors among the leaves, return the result.</details>


# %%
@fill
class OpRecorder(TorchDispatchMode):
    ### BEGIN SOLUTION
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self.ops.append((op.overloadpacket.__name__, self.dtypes((args, kwargs)), self.dtypes(result)))
        return result

    def dtypes(self, values):
        return tuple(value.dtype for value in tree_leaves(values) if isinstance(value, torch.Tensor))

    ### END SOLUTION


# %%
check(OpRecorder)

# %% [markdown]
# **Predict first:** in one block of the GPT under CPU autocast, where is the residual stream BF16, and where float32? The MLP's output is BF16, for it comes from a linear layer.

# %%
shown = {"embedding", "native_layer_norm", "mm", "gelu", "add", "_log_softmax", "nll_loss_forward"}
with OpRecorder() as recorder, torch.autocast("cpu", dtype=torch.bfloat16):
    model(tokens, targets)
trace = [op for op in recorder.ops if op[0] in shown or "attention" in op[0]]
colors = {torch.float32: plots.color_of(FP32), torch.bfloat16: plots.color_of(BF16)}
with plots.style():
    picture, axes = plots.figure(9, 0.3 * len(trace) + 0.8)
    for row, (name, ins, outs) in enumerate(trace):
        floats = [[d for d in dtypes if d in colors] for dtypes in (ins, outs[:1])]
        label = "attention" if "attention" in name else name.removeprefix("native_").strip("_")
        axes.text(0.0, row, label, ha="center", va="center")
        for side, dtypes in zip((-1, 1), floats, strict=True):
            for place, dtype in enumerate(dtypes):
                at = side * (0.35 + 0.22 * (len(dtypes) - 1 - place if side < 0 else place))
                short = "FP32" if dtype == torch.float32 else "BF16"
                axes.text(at, row, short, ha="center", va="center", color=colors[dtype], fontsize=9, fontweight="bold")
    axes.set_xlim(-1.2, 0.7)
    axes.set_ylim(len(trace) - 0.4, -1.4)
    axes.text(-0.5, -0.9, "goes in", ha="center", color="#57606A")
    axes.text(0.35, -0.9, "comes out", ha="center", color="#57606A")
    axes.axis("off")
    axes.set_title("A forward pass of one block under CPU autocast")
picture

# %% [markdown]
# Look at the rows of `add`: a float32 tensor and a BF16 tensor go in, float32 comes out. That is not autocast's doing. It is **type promotion**, torch's ordinary rule for adding tensors of two kinds. The embeddings are float32, so the stream starts as float32, and each block adds BF16 to float32. So **the residual stream stays float32**: the one long sum of the model is kept in the wide format, as chapter 03 says that it should be. And after the cast to BF16 the head's logits go back to float32 for the loss.
#
# ---
# ## Predict it
#
# ### Exercise 4.3 · `cast_policy` · 30 min · medium · 3 points
#
# Autocast is a table. For a GPU it is written down in a header that is installed with torch:

# %%
RELEASE = "https://github.com/pytorch/pytorch/blob/v2.13.0/"
HEADER = "aten/src/ATen/autocast_mode.h"
for mark, lines in (
    ("AT_FORALL_LOWER_PRECISION_FP(_)", 34),
    ("AT_FORALL_FP32(_)", 24),
    ("AT_FORALL_FP32_SET_OPT_DTYPE(_)", 12),
    ("AT_FORALL_PROMOTE(_)", 12),
):
    print(installed_lines("torch", "ATen/autocast_mode.h", f"#define {mark}", after=lines, link=RELEASE + HEADER))
    print()

# %% [markdown]
# (The list of `FP32` goes on: norms, and all losses from `poisson_nll_loss` to `binary_cross_entropy_with_logits`, `nll_loss`, `mse_loss` and `kl_div` among them, and `logsumexp`.) The lists of a CPU are others. They are in [autocast_mode.cpp](https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/autocast_mode.cpp) under `AutocastCPU`; of the ops that we watch here, these are on it:
#
# | policy on a CPU | ops |
# |---|---|
# | lower precision | `linear`, `matmul`, `mm`, `bmm`, `addmm`, `baddbmm`, `conv1d`, `conv2d`, `prelu`, `scaled_dot_product_attention` |
# | fp32 | `prod`, and the losses: `cross_entropy_loss`, `nll_loss`, `mse_loss`, `kl_div` |
# | promote | `cat`, `stack` |
#
# | | |
# |---|---|
# | in | `op`: a name of ATen, one of `OPS`; `device_type`: "cpu" or "cuda" |
# | out | "lower precision", "fp32", "promote" or "as is" |
# | mind | names that are on no list are "as is"; `fp32_set_opt_dtype` counts as "fp32"; ValueError for other device types; an op has its own entry, whatever the ops that it calls inside have: there is no `cross_entropy_loss` on CUDA's lists |
#
# By hand: `softmax` is on the third list above, so "fp32" on "cuda"; it is not in the table of the CPU, so "as is" there. `gelu` is on none: "as is" twice.
#
# <details><summary>A nudge</summary>Print <code>OPS</code>. How many of them are on any list? You only have to type those.</details>
# <details><summary>An approach</summary>For each device a dictionary from policy to names; look for the name, and give "as is" when it is nowhere. Check the device first.</details>


# %%
@fill
def cast_policy(op, device_type):
    ### BEGIN SOLUTION
    products = "linear matmul mm bmm addmm baddbmm conv1d conv2d prelu scaled_dot_product_attention"
    everywhere = "prod nll_loss mse_loss kl_div"
    sums = "softmax log_softmax logsumexp sum cumsum"
    steep = "exp log pow rsqrt softplus"
    norms = "layer_norm rms_norm group_norm"
    tables = {
        "cpu": {
            "lower precision": products,
            "fp32": f"{everywhere} cross_entropy_loss",
            "promote": "cat stack",
        },
        "cuda": {
            "lower precision": f"{products} mv",
            "fp32": f"{everywhere} {sums} {steep} {norms}",
            "promote": "addcmul addcdiv atan2 dot",
        },
    }
    if device_type not in tables:
        raise ValueError(f"there is no table for {device_type!r}: 'cpu' and 'cuda' have one")
    found = (policy for policy, ops in tables[device_type].items() if op in ops.split())
    return next(found, "as is")
    ### END SOLUTION


# %%
check(cast_policy)

# %% [markdown]
# **Predict first:** softmax, layer_norm, exp and sum get a BF16 tensor under BF16 autocast. What comes out on a CPU, and what on a GPU? (No GPU is needed for this: a *fake* CUDA tensor has a shape, a dtype and a device, but no numbers. It goes through the same dispatcher, and autocast does not look at numbers.)

# %%
print(f"{'op':30} {'BF16 in, CPU':>14} {'BF16 in, CUDA':>14}   policy: CPU, CUDA")
for op in ("linear", "softmax", "layer_norm", "exp", "sum", "gelu", "cross_entropy_loss", "cat", "addcmul"):
    out = [str(autocast_result(op, device, torch.bfloat16)).removeprefix("torch.") for device in ("cpu", "cuda")]
    print(f"{op:30} {out[0]:>14} {out[1]:>14}   {cast_policy(op, 'cpu')}, {cast_policy(op, 'cuda')}")


def as_predicted(op, device):
    """Whether torch's own autocast gives the dtypes that the policy says, for float32 and for BF16 operands."""
    lower, full = torch.bfloat16, torch.float32
    said = {"lower precision": (lower, lower), "fp32": (full, full), "promote": (full, lower), "as is": (full, lower)}
    return tuple(autocast_result(op, device, dtype) for dtype in (full, lower)) == said[cast_policy(op, device)]


for device in ("cpu", "cuda"):
    surprises = [op for op in OPS if not as_predicted(op, device)]
    print(f"{device}: {len(OPS) - len(surprises)} of {len(OPS)} ops as predicted; surprises: {surprises or 'none'}")

# %% [markdown]
# And what do the tables make of a whole model? Below is one forward pass of the GPT, with attention written as five ops. Pick an op, and read what is cast, and why.
#
# **Predict first:** which ops of the block would give another dtype with CUDA's table? Choose it, and see. Then choose the second forward pass of the block: which casts does it not make again? (The badges say whose code runs. Your `cast_policy` decides as soon as you have run its cell. The casts are the exact oracle's until you write your own in exercise 4.4.)

# %%
CastPolicyExplorer("cpu")

# %% [markdown]
# The same line of Python, `F.softmax(scores)`, is a BF16 softmax on a CPU and a float32 softmax on a GPU. A model that trains on one may behave differently on the other, and nobody changed the code. `layer_norm` has two policies as well, but here they come to the same: it gets the residual stream, which is float32 already.
#
# The surprise on CUDA is no mistake of the table: `cross_entropy_loss` is on no list there, but it calls `log_softmax` and `nll_loss`, and they are. Autocast looks at those calls, too. So the explorer shows the loss as two ops there, and as one on a CPU.
#
# ---
# ## Build it
#
# ### Exercise 4.4 · `MiniAutocast` · 60 min · hard · 5 points
#
# Now write it. Below autograd is too low for this: a cast has to be part of the graph, so that gradients find their way back from BF16 to the float32 weight. A `TorchFunctionMode` stands *above* autograd. Its method `__torch_function__` is called for each function of torch that Python code calls (`F.linear`, `x + y`), and has to call it itself. While it does, the mode is off: what a function calls inside is left alone, as in torch's autocast.
#
# | | |
# |---|---|
# | in | `policy`: a function from an op's name to one of the four policies; `dtype`: of the lower precision, `torch.bfloat16` by default |
# | out | a context manager: `with MiniAutocast(policy):` |
# | mind | `op_name(function)` gives the name to ask the policy with; lists and keyword arguments are cast, too; float64 and whole numbers never are; "promote": to float32 if any argument is float32, else nothing; a float32 *leaf that requires gradients* (a weight) is cast to `dtype` once in a block and kept, and forgotten at the end of the block, also after an error |
#
# Your table decides, not torch's. The checks use tables that nobody would want (a softmax in BF16, embeddings in FP16), so `torch.autocast` itself is no answer.
#
# By hand, with a policy that says "lower precision" for linear and "promote" for add, x and weight float32:
#
# | call | arguments become | result |
# |---|---|---|
# | `y = F.linear(x, weight)` | x cast; weight cast and kept | BF16 |
# | `F.linear(x, weight)` again | x cast again (it is no weight); the kept weight | BF16 |
# | `x + y` | float32 is among them: y cast to float32 | float32 |
# | `y + y` | no float32: nothing | BF16 |
#
# <details><summary>A nudge</summary><code>tree_map(f, (args, kwargs))</code> applies f to everything inside, lists included, and gives back the same structure. What has to be known before the first cast for "promote"?</details>
# <details><summary>An approach</summary><code>__torch_function__(self, function, types, args=(), kwargs=None)</code>: ask the policy; find the target dtype, or none; tree_map a method <code>cast(value, dtype)</code>; call the function. In <code>cast</code>: leave what is no floating tensor, is float64, or has the dtype already. A dictionary with tensors as keys is a fine cache (they are found by identity). Empty it in <code>__exit__(self, *error)</code>, and call <code>super().__exit__(*error)</code>.</details>


# %%
@fill
class MiniAutocast(TorchFunctionMode):
    ### BEGIN SOLUTION
    def __init__(self, policy, dtype=torch.bfloat16):
        super().__init__()
        self.policy, self.dtype, self.cache = policy, dtype, {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        policy = self.policy(op_name(function))
        dtypes = {value.dtype for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        if policy == "lower precision":
            args, kwargs = tree_map(lambda value: self.cast(value, self.dtype), (args, kwargs))
        elif policy == "fp32" or (policy == "promote" and torch.float32 in dtypes):
            args, kwargs = tree_map(lambda value: self.cast(value, torch.float32), (args, kwargs))
        return function(*args, **kwargs)

    def cast(self, value, dtype):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if value.dtype in (dtype, torch.float64):
            return value
        is_weight = value.dtype == torch.float32 and value.is_leaf and value.requires_grad
        if not is_weight:
            return value.to(dtype)
        if value not in self.cache:
            self.cache[value] = value.to(dtype)
        return self.cache[value]

    def __exit__(self, *error):
        self.cache.clear()  # an optimizer may change the weights before the next block
        return super().__exit__(*error)

    ### END SOLUTION


# %%
check(MiniAutocast)

# %% [markdown]
# The real test: a forward and a backward pass of the GPT, recorded twice, under torch's autocast and under yours with the table of exercise 4.3.


# %%
def trace_under(context):
    """Every op of a forward pass under `context`, and of the backward pass after it."""
    model, (tokens, targets) = small_gpt(layers=2, fused=False), small_batch()
    with OpRecorder() as recorder:
        with context:
            _, loss = model(tokens, targets)
        loss.backward()
    return recorder.ops


theirs = trace_under(torch.autocast("cpu", dtype=torch.bfloat16))
yours = trace_under(MiniAutocast(lambda op: cast_policy(op, "cpu")))
without_casts = [[op for op in ops if op[0] not in ("_to_copy", "detach")] for ops in (theirs, yours)]
print(f"{len(theirs)} ops under torch.autocast, {len(yours)} under MiniAutocast")
print(f"the same ops, with the same dtypes, each as often:  {sorted(map(str, theirs)) == sorted(map(str, yours))}")
print(f"in the same order, casts and detach left out:       {without_casts[0] == without_casts[1]}")

# %% [markdown]
# **Predict first:** what would a GPT do on a CPU if autocast there had CUDA's table? Which of its ops change their dtype? (`fused=False` above writes attention as five ops, with a softmax to be seen.)

# %%
gpus = trace_under(MiniAutocast(lambda op: cast_policy(op, "cuda")))
for name in ("_softmax", "native_layer_norm", "gelu", "_log_softmax"):
    for label, ops in (("CPU's table", theirs), ("CUDA's table", gpus)):
        dtypes = {
            tuple(str(d).removeprefix("torch.") for d in (*ins[:1], *outs[:1])) for n, ins, outs in ops if n == name
        }
        print(f"{name:20} {label:13} {' or '.join(' -> '.join(pair) for pair in sorted(dtypes))}")

# %% [markdown]
# The softmax of attention moves to float32. The layer norms were float32 before, because the stream is. And the loss would be BF16 with this table alone: your mode sees that Python calls `cross_entropy`, and not that `log_softmax` is called inside, where torch's own autocast would step in. (The explorer makes those two calls one by one for it.)
#
# Why are products on a list at all, when most of what they get is BF16 already? **Predict first:** a table has softmax in float32, as on a GPU, and leaves `matmul` as it is. What comes out of the product of the shares and the values?

# %%
CastPolicyExplorer("own", {"softmax": "fp32", "matmul": "as is"})

# %% [markdown]
# Nothing: the pass ends there. The shares are float32, the values are BF16, and a matrix product wants one dtype; type promotion is for additions and the like. "Lower precision" does more than save time: it brings together what other ops have left in two dtypes.
#
# Take the change of `matmul` back. Then turn the residual stream into BF16 with one change to the table. There are two ops whose policy does it; chapter 03 says why nobody wants that.
#
# ---
# ## What it costs, and what it does not
#
# ### Exercise 4.5 · `count_weight_casts` · 30 min · medium · 3 points
#
# Every cast reads a tensor and writes another. For a weight that is used several times before the next update (gradient accumulation, shared layers), autocast keeps the result: the **cast cache**. Torch keeps casts of float32 leaves that require gradients, until the outermost block ends. Count what that saves.
#
# | | |
# |---|---|
# | in | `model`: a GPT; `x`: int64 (B, T); `passes`: forward passes `model(x)`, all in one block of CPU autocast (BF16); `cache_enabled`: bool |
# | out | int: how often a *parameter* was cast |
# | mind | casts of activations do not count; there may be biases, frozen weights (`requires_grad` False) and no pass at all |
#
# By hand, a GPT of one block without biases has five linear layers: qkv, out, up, down, and the head.
#
# | passes | cache | casts of weights | why |
# |---|---|---|---|
# | 1 | on or off | 5 | each weight is used once; embedding tokens is a look-up and casts nothing |
# | 3 | off | 15 | |
# | 3 | on | 5 | the second and third pass find them |
# | 3 | on, the block frozen | 13 | four frozen weights three times, the head once |
#
# <details><summary>A nudge</summary>Your recorder sees every <code>_to_copy</code>. How do you know whether it was a weight that was cast? Below autograd a weight is still the same Python object.</details>
# <details><summary>An approach</summary>Either count: a small <code>TorchDispatchMode</code> that counts <code>_to_copy</code> whose argument's <code>id</code> is that of a parameter, around <code>torch.autocast("cpu", dtype=..., cache_enabled=...)</code>. Or think: which parameters are cast at all, and how often each?</details>


# %%
@fill
def count_weight_casts(model, x, passes, cache_enabled):
    ### BEGIN SOLUTION
    weights = {id(weight) for weight in model.parameters()}

    class CastCounter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.count += op.overloadpacket.__name__ == "_to_copy" and id(args[0]) in weights
            return op(*args, **(kwargs or {}))

    with CastCounter() as counter, torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
        for _ in range(passes):
            model(x)
    return counter.count
    ### END SOLUTION


# %%
check(count_weight_casts)

# %%
baby = GPT(preset("baby"))
tokens = torch.zeros(1, 8, dtype=torch.int64)
for passes in (1, 4, 16):
    counts = [count_weight_casts(baby, tokens, passes, cache_enabled) for cache_enabled in (False, True)]
    print(
        f"{passes:3} micro-batches in one block: {counts[0]:4} casts of weights without the cache, {counts[1]:3} with it"
    )

# %% [markdown]
# The cache is also a trap. Change a weight inside the block and call the layer again: what is used is the old cast. That is why the optimizer's step belongs outside, and why your `__exit__` empties the cache.
#
# ### Exercise 4.6 · `survives_compile` · 20 min · easy · 2 points
#
# From here on this course emulates formats: round a float32 tensor to BF16 or E4M3, and go on in float32. Many people write `x.to(torch.bfloat16).float()` for that. And then they switch on `torch.compile`. Does the rounding survive? Write the test.
#
# | | |
# |---|---|
# | in | `f`: a function from a floating-point tensor to one; `x`; `compiler`: from a function to its compiled version |
# | out | bool: True if f and its compiled version give the same dtype, the same shape, and the same bits |
# | mind | 0.0 and -0.0 differ; all NaNs are the same; f may change its argument in place, so give it a copy each time; `x` itself stays as it is |
#
# By hand:
#
# | f(x) | compiled f(x) | same? |
# |---|---|---|
# | [1.0, nan] | [1.0, nan] | yes |
# | [0.0] | [-0.0] | no |
# | [1.0], BF16 | [1.0], float32 | no |
#
# <details><summary>A nudge</summary>nan == nan is False, and 0.0 == -0.0 is True. Which two functions of torch tell these cases apart?</details>
# <details><summary>An approach</summary>Compare dtype and shape first. Then, element by element: equal with the same <code>signbit</code>, or both <code>isnan</code>. All of them.</details>


# %%
@fill
def survives_compile(f, x, compiler=torch.compile):
    ### BEGIN SOLUTION
    eager, compiled = f(x.clone()), compiler(f)(x.clone())
    if (eager.dtype, eager.shape) != (compiled.dtype, compiled.shape):
        return False
    same = (eager == compiled) & (eager.signbit() == compiled.signbit())
    return bool((same | (eager.isnan() & compiled.isnan())).all())
    ### END SOLUTION


# %%
check(survives_compile)

# %% [markdown]
# **Predict first:** two ways to round to BF16, compiled: a cast there and back, and integer operations on the bits (exercise 2.2). Which of them survives? (Compiling takes some seconds.)

# %%
numbers = torch.randn(4096, generator=torch.Generator().manual_seed(1))
if why_not_compiled():
    print(f"torch.compile does not work on this machine: {why_not_compiled()}")
else:
    for name in tqdm(("bfloat16 and back", "bfloat16 by its bits"), desc="compiling", leave=False):
        print(f"{name:22} survives torch.compile: {survives_compile(ROUNDINGS[name], numbers)}")

# %% [markdown]
# With torch 2.13 on a CPU the cast does not survive. The compiler sees a cast to 16 bits and back within one kernel, thinks that the detour costs time and precision, and deletes it. For a model under autocast that is welcome: its results get more exact. For an emulated format it means that you measure float32 and believe that it was BF16. The integer version is safe: bits are bits. So the rounding of this course works on bits, and what is compiled is compared with eager first.
#
# ---
# ## TF32: the other switch
#
# There is one more way in which a float32 product may not be one. On NVIDIA's GPUs since Ampere a tensor core can take float32 tensors, read 10 bits of each mantissa (**TF32**), multiply, and add up in float32. The tensors are float32 before and after; no dtype shows it. PyTorch's switch is `torch.set_float32_matmul_precision`:
#
# | setting | a float32 matrix product may use |
# |---|---|
# | "highest" (the default) | float32 |
# | "high" | TF32, or a sum of BF16 products that is as good |
# | "medium" | BF16 |
#
# It is about products of float32 tensors only: under autocast `linear` gets BF16 and the switch does not matter. (Convolutions have a switch of their own, `torch.backends.cudnn.allow_tf32`, which is on by default.) What TF32 keeps can be seen without a GPU, with your own `round_to`: round the two matrices, multiply in float32.

# %%
print("torch.get_float32_matmul_precision() is", torch.get_float32_matmul_precision())
generator = torch.Generator().manual_seed(4)
a, b = torch.randn(64, 256, generator=generator), torch.randn(256, 64, generator=generator)
exact = a.double() @ b.double()
for fmt in (FP32, TF32, BF16):
    product = round_to(a, fmt) @ round_to(b, fmt)
    error = (product.double() - exact).norm() / exact.norm()
    print(f"operands in {fmt.name:8}: relative error of the product {float(error):.1e}")

# %% [markdown]
# ---
# ## Train it
#
# Does it cost quality? The `baby` GPT, on real text, from the same weights and with the same batches, once in float32 and once with your `bf16_loss`. (A hundred steps each, so that the page stays quick. In a terminal, `lowprec-lab train --preset baby --precision bf16` goes on for as long as you like.)
#
# **Predict first:** BF16 has two to three decimal digits. By how much do the two losses differ after a hundred steps: in the first digit, the second, the third?

# %%
corpus = load_corpus()
STEPS, WARMUP = 100, 25


def train_for(steps, loss_of):
    """The loss of every step; the same weights and the same batches each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(preset("baby", vocab_size=len(corpus.vocabulary)))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in tqdm(range(steps), leave=False):
        x, y = corpus.batch("train", step_generator(0, step), batch=12, context=64)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / WARMUP)
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


threads = torch.get_num_threads()
torch.set_num_threads(1)  # so small a model gains nothing from more
started = time.perf_counter()
fp32 = train_for(STEPS, lambda model, x, y: model(x, y)[1])
middle = time.perf_counter()
bf16 = train_for(STEPS, lambda model, x, y: bf16_loss(model, x, y, "cpu"))
finished = time.perf_counter()
torch.set_num_threads(threads)
differences = [abs(one - two) / one for one, two in zip(fp32, bf16, strict=True)]
print(f"mean loss of the last ten steps: float32 {sum(fp32[-10:]) / 10:.4f}, BF16 {sum(bf16[-10:]) / 10:.4f}")
print(f"largest relative difference of a step: {max(differences):.3%}")
print(f"time of BF16 relative to float32 on this CPU: {(finished - middle) / (middle - started):.1f}")
with plots.style():
    picture, axes = plots.figure(9, 4)
    axes.plot(range(1, STEPS + 1), fp32, color=plots.color_of(FP32), linewidth=3, alpha=0.5)
    axes.plot(range(1, STEPS + 1), bf16, color=plots.color_of(BF16), linewidth=1)
    axes.text(STEPS + 1, fp32[-1] + 0.12, "FP32", color=plots.color_of(FP32), va="center", fontweight="bold")
    axes.text(STEPS + 1, bf16[-1] - 0.12, "BF16", color=plots.color_of(BF16), va="center", fontweight="bold")
    axes.set_xlim(0, STEPS * 1.08)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_title("The same GPT, the same batches: float32 and BF16 autocast")
picture

# %% [markdown]
# One curve hides the other. Products in BF16, sums and weights in float32: the recipe of chapter 03, applied by a table. Whether it is *faster* is a matter of hardware: on a GPU with BF16 tensor cores very much, on a CPU that emulates BF16 not at all.
#
# One thing is worth a try: set `WARMUP` to 1 and run the cell again. AdamW's first steps have the size of the learning rate, whatever the size of the gradient is; only its sign counts. A gradient near zero may have another sign in BF16, and the two runs part. Neither is wrong: they are two runs, as with two seeds. When you compare precisions, keep such differences apart from what the precision costs.
#
# ---
# ## Read the real code
#
# The header of torch names five policies. Three of them are yours; "as is" has no name there (it is for what is on no list), and two are variants of fp32. (What it says of FP16 for CUDA is the default; `dtype=torch.bfloat16` changes it.)

# %%
print(installed_lines("torch", "ATen/autocast_mode.h", "enum class CastPolicy", after=30, link=RELEASE + HEADER))

# %% [markdown]
# **4.A** Which of these policies (its name, as in the enum below its first line) does `softmax` have on a GPU? The lists are printed above, in exercise 4.3.

# %%
question(
    "4.A",
    ### BEGIN SOLUTION
    "fp32_set_opt_dtype",
    ### END SOLUTION
)

# %% [markdown]
# Which tensors are cast at all? One function decides.

# %%
print(installed_lines("torch", "ATen/autocast_mode.h", "inline bool is_eligible(", after=7, link=RELEASE + HEADER))

# %% [markdown]
# **4.B** A float64 tensor is handed to `torch.matmul` under autocast. Is it cast to BF16? (`True` or `False`.)

# %%
question(
    "4.B",
    ### BEGIN SOLUTION
    False,
    ### END SOLUTION
)

# %% [markdown]
# And where is *linear* told about dtypes? Nowhere: read [Linear.cpp](https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/Linear.cpp), which turns it into `addmm` or `matmul`, and [Blas.cpp](https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/Blas.cpp), where `addmm` on a GPU prepares matrices for cuBLAS. Both take the dtypes that arrive. The whole policy is in the one header and its `.cpp`.
#
# ---
# ## Break it: a GPU that is too old
#
# People start nanoGPT on a free GPU, and it stops at once ([nanoGPT#8](https://github.com/karpathy/nanoGPT/issues/8), [#84](https://github.com/karpathy/nanoGPT/issues/84), [#277](https://github.com/karpathy/nanoGPT/issues/277)). The stand-in below raises torch's message where torch would: native BF16 needs a compute capability of 8.0 (Ampere) or more. A T4 has 7.5, a V100 7.0.

# %%
CAPABILITY = {"V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "H100": (9, 0)}


def autocast_on(gpu, dtype):
    """A stand-in for entering `torch.autocast("cuda", dtype=dtype)` on this GPU."""
    if dtype == torch.bfloat16 and CAPABILITY[gpu] < (8, 0):
        raise RuntimeError("Current CUDA Device does not support bfloat16. Please switch dtype to float16.")
    return f"{gpu}: runs in {str(dtype).removeprefix('torch.')}"


for gpu in CAPABILITY:
    try:
        print(autocast_on(gpu, torch.bfloat16))
    except RuntimeError as error:
        print(f"{gpu}: RuntimeError: {error}")

# %% [markdown]
# The message says what to do, and it is half of the cure. FP16 has as many bits as BF16 and three more of mantissa; the exponent pays for them.

# %%
for dtype in (torch.bfloat16, torch.float16):
    info = torch.finfo(dtype)
    print(f"{str(dtype):15} largest {info.max:.3g}, smallest normal {info.smallest_normal:.3g}")

# %% [markdown]
# **4.C** A training run moves from BF16 on an A100 to FP16 on a T4. Gradients of about 1e-8 were normal BF16 numbers. What does the smallest positive number of FP16, 2^-24, make of a gradient of 1e-8: which number is stored?

# %%
question(
    "4.C",
    ### BEGIN SOLUTION
    0.0,
    ### END SOLUTION
)

# %% [markdown]
# So whoever follows the message needs a loss scale as well, and nanoGPT switches one on for `float16` only. That is chapter 06. Before that, chapter 05 looks at what is in those gradients.
#
# ---
# ## What you built
#
# A recorder for every op, a table that predicts autocast on two kinds of devices, an autocast that is driven by any table, and a test that catches a compiler which deletes your rounding.

# %%
progress()
