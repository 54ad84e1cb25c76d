# %% [markdown]
# # 14 · Distributed: what must many ranks agree on?
#
# **Takes** 5 to 6 hours. **Needs** [chapter 06](06_loss_scaling.ipynb): loss scalers; [chapter 07](07_quantizer.ipynb): amax and scales; [chapter 08](08_float8_linear.ipynb): the casts of a linear layer. **Gives** you the parts of Megatron's training step that talk to other ranks, an all-gather with a quarter of the bytes, linear layers that are divided among ranks, in FP8, and a plan for ten thousand GPUs.
#
# A model that does not fit on one GPU, or would take a year there, is trained by many processes. Each has its own data, its own part of the weights, its own gradients. Most of the time they compute alone. But every decision that one number makes for the whole model (is this step bad? what is the scale? how long is the gradient?) is a decision that *all of them must make in the same way*. Where two of them decide differently nothing crashes. There are just two models from then on, and nobody notices for a while.
#
# How many such numbers are there in a step in FP8?

# %% tags=["setup"]
try:
    import math

    import torch
    import torch.distributed as dist

    from lowprec_lab import check, cost_model, fill, plots, progress, question, reveal
    from lowprec_lab.cost_model import LLAMA_8B, LLAMA_70B, LLAMA_405B, PUBLISHED, Plan, h100
    from lowprec_lab.data import load_corpus, step_generator
    from lowprec_lab.distributed import (
        KINDS,
        DistributedLossScaler,
        LossInFloat32,
        accumulate_main_grads,
        all_reduce_amax,
        all_reduce_found_inf,
        amax_facts,
        amaxes_on_ranks,
        clip_distributed,
        clipped_on_ranks,
        column_parallel_float8,
        column_parallel_on_ranks,
        float8_all_gather,
        found_on_ranks,
        gathered_facts,
        gathered_on_ranks,
        main_grads_facts,
        main_grads_on_ranks,
        quantize_part,
        rank_groups,
        refusal_of,
        row_parallel_float8,
        row_parallel_on_ranks,
        scales_by_kind,
        scales_on_ranks,
        scales_resumed_on_ranks,
    )
    from lowprec_lab.float8_linear import Float8Linear, float8_matmul, transpose
    from lowprec_lab.formats import BF16, E4M3, E5M2, FP32
    from lowprec_lab.gpt import GPT, GPTConfig
    from lowprec_lab.loss_scaling import found_nonfinite
    from lowprec_lab.quantizer import Quantized, quantize
    from lowprec_lab.rank_threads import RanksDisagreeError, on_ranks
    from lowprec_lab.ranks import RankError, launch
    from lowprec_lab.reading import installed_lines
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %% [markdown]
# ## Processes that meet
#
# A run of many processes is started by a launcher. Each process is told its number, its **rank**, and how many there are, the **world**. Then they meet, and from then on they can call **collectives**: functions that all of them call, and that end when all have. `dist.all_reduce(x)` replaces `x` on every rank by the sum of all of them; `dist.all_gather` gives every rank a list of what all have. Who carries the bytes is called the *backend*: NCCL between GPUs, gloo between CPUs.
#
# `launch` starts real processes, as `torchrun` does: two of them here, with gloo. It shows what each of them prints, and gives back what each returns.

# %%
launch("lowprec_lab.distributed:meet", ranks=2)

# %% [markdown]
# What if one of them has an error? The others are waiting for it in a collective, and would wait until a time limit of the backend, which is up to half an hour. So a launcher must watch all of them, and end all when one fails:

# %%
try:
    launch("lowprec_lab.distributed:fail_on", 2, [1])
except RankError as error:
    print("RankError:", error)

# %% [markdown]
# Processes are slow to start, and a mistake in a collective makes them wait. So `check` runs your answers on ranks that are *threads* of one process, with the same calls of `torch.distributed`. There the waiting is noticed at once: when all ranks that still run wait for one that will not come, you are told which, and for what.
#
# **Words.** A **group** is some of the ranks; they can have collectives of their own. `group=None` means all ranks. A **micro-batch** is as much as one forward and backward takes; several of them, on several ranks, make a step. Ranks that have the same weights and other data are **data parallel**; ranks that have parts of the same layer are **tensor parallel**; ranks that have other layers are stages of a **pipeline**.
#
# ---
# ## One step of many batches
#
# ### Exercise 14.1 · `accumulate_main_grads` · 35 min · medium · 3 points
#
# With BF16 weights, gradients arrive in BF16. One step adds up many of them: those of 16 or 64 micro-batches here, and those of all other ranks. In BF16 that sum forgets what chapter 03 forgot: a number of 8 bits, and a small one added to it, is the same number. So Megatron keeps a **main gradient** in float32 for each parameter, adds every micro-batch to it, and sends that over the wire. And it sends only once, after the last micro-batch.
#
# | | |
# |---|---|
# | in | `model(x, y)` returns `(logits, loss)`; `batches`: this rank's micro-batches; `group` |
# | out | for each parameter, in order, a float32 tensor: the mean gradient over all micro-batches of all ranks |
# | mind | divide each *loss* by the number of micro-batches before its backward; take the gradient off the parameter each time (`grad = None`), so that autograd has nothing to add to |
# | wire | multiply by 1 / ranks *before* the sum over ranks; each number crosses the wire once, in float32 |
#
# By hand: two ranks, four micro-batches each. The gradients of one weight are 1024, 4, 4, 4 on rank 0, and 4, 4, 4, 4 on rank 1.
#
# | | rank 0 | rank 1 |
# |---|---|---|
# | gradients of loss / 4 | 256, 1, 1, 1 | 1, 1, 1, 1 |
# | their sum in BF16, one by one | 256 (257 is half-way between 256 and 258, and goes to the even one) | 4 |
# | their sum in float32 | **259** | **4** |
# | times 1/2 | 129.5 | 2 |
# | summed over ranks | **131.5** | **131.5** |
#
# <details><summary>A nudge</summary>Why before the sum? Think of two ranks with a gradient of 2e38 each, and of what is above 3.4e38.</details>
# <details><summary>An approach</summary>A float32 tensor of zeros for each parameter; for each micro-batch a backward, <code>add_</code>, and <code>grad = None</code>. Then <code>mul_</code> and <code>dist.all_reduce</code>. One long tensor of which all main gradients are views needs one collective only.</details>


# %%
@fill
def accumulate_main_grads(model, batches, group=None):
    ### BEGIN SOLUTION
    parameters = list(model.parameters())
    sizes = [each.numel() for each in parameters]
    bucket = torch.zeros(sum(sizes))  # one piece of memory: one all-reduce
    mains = [view.view(each.shape) for view, each in zip(bucket.split(sizes), parameters, strict=True)]
    for x, y in batches:
        (model(x, y)[1] / len(batches)).backward()
        for main, parameter in zip(mains, parameters, strict=True):
            main.add_(parameter.grad)  # a sum of float32 and bfloat16 is float32
            parameter.grad = None
    bucket.mul_(1 / dist.get_world_size(group))
    dist.all_reduce(bucket, group=group)
    return mains
    ### END SOLUTION


# %%
check(accumulate_main_grads)

# %% [markdown]
# **Predict first:** a small GPT with BF16 weights, and steps of 2 to 64 micro-batches. How far from the exact sum is one that BF16 parameters add up themselves? How does that change when the micro-batches are twice as many? And yours?

# %%
torch.set_num_threads(1)  # the matrices are small: two threads would mostly wait for each other
corpus = load_corpus()
torch.manual_seed(1)
model = LossInFloat32(GPT(GPTConfig(len(corpus.vocabulary), 32, layers=2, heads=2, width=64)), torch.bfloat16)
batches = [corpus.batch("train", step_generator(1, part), 4, 32) for part in range(64)]
parameters = list(model.parameters())


def flat(tensors):
    return torch.cat([each.detach().double().flatten() for each in tensors])


def error(found, exact):
    return float((flat(found) - exact).norm() / exact.norm())


sizes, in_bfloat16, in_float32 = [2, 4, 8, 16, 32, 64], [], []
exact, added = 0.0, [torch.zeros_like(each) for each in parameters]
for part, (x, y) in enumerate(batches, start=1):
    gradients = torch.autograd.grad(model(x, y)[1], parameters)
    exact = exact + flat(gradients)
    added = [total + gradient for total, gradient in zip(added, gradients, strict=True)]  # BF16, as .grad adds up
    if part in sizes:
        in_bfloat16.append(error(added, exact))
        (mains,) = on_ranks(accumulate_main_grads, [(model, batches[:part])])  # a world of one rank
        in_float32.append(error(mains, exact / part))

with plots.style():
    picture, axes = plots.figure(8, 3.8)
    for fmt, errors in ((BF16, in_bfloat16), (FP32, in_float32)):
        axes.plot(sizes, errors, color=plots.color_of(fmt), marker="o")
        axes.text(
            sizes[-1] * 1.1,
            errors[-1],
            plots.short_name(fmt),
            color=plots.color_of(fmt),
            fontweight="bold",
            va="center",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(1.8, 100)
    axes.set_xlabel("micro-batches in a step (log2 axis)")
    axes.set_ylabel("relative error of the sum")
    axes.set_title("Where gradients are added up")
print(f"64 micro-batches: {in_bfloat16[-1]:.2%} off in BF16, {in_float32[-1]:.1e} in float32")
picture

# %% [markdown]
# The gradients that are added are the same BF16 numbers in both. What is lost, is lost by adding, and it becomes more with every micro-batch. (The exact sum is in float64. Float32's error is far below one of its roundings, since most sums of BF16 numbers are exact in it; it grows, too.)
#
# ---
# ## One rank overflows
#
# ### Exercise 14.2 · `all_reduce_found_inf` · 15 min · easy · 2 points
#
# In a model that is divided among ranks, an infinity may be on one of them alone: in its part of a layer, or in its share of the optimizer's work. All the same the *step* is bad. Each rank looks at what it has, and one collective with the operation MAX tells everybody: 1 if any of them has found one.
#
# | | |
# |---|---|
# | in | `gradients`: this rank's, as for `found_nonfinite` (exercise 6.2); each rank may have others, or none; `group` |
# | out | a bool of Python, the same on every rank of the group |
# | mind | *every* rank takes part, whatever it has found. A rank that returns early leaves the others waiting |
#
# By hand, four ranks in two groups, {0, 1} and {2, 3}:
#
# | rank | its gradients | has found | after MAX over its group |
# |---|---|---|---|
# | 0 | 1, 2 | 0 | **True** |
# | 1 | inf | 1 | **True** |
# | 2 | 3e38, 3e38 | 0 | False |
# | 3 | (none) | 0 | False |
#
# <details><summary>A nudge</summary>A collective works on tensors. Which tensor says yes or no?</details>
# <details><summary>An approach</summary><code>torch.tensor(float(...))</code>, <code>dist.all_reduce(..., op=dist.ReduceOp.MAX, group=group)</code>, <code>bool</code>.</details>


# %%
@fill
def all_reduce_found_inf(gradients, group=None):
    ### BEGIN SOLUTION
    found = torch.tensor(float(found_nonfinite(gradients)))
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found)
    ### END SOLUTION


# %%
check(all_reduce_found_inf)

# %% [markdown]
# ### Exercise 14.3 · `DistributedLossScaler` · 35 min · medium · 3 points
#
# Megatron's scaler (exercise 6.5), on many ranks. Each tells it what it has found itself; the scaler asks the others. Then all ranks follow the same rule with the same input, so their scales are the same for ever, without being sent even once.
#
# | | |
# |---|---|
# | in | the settings, and `group`; then `update(found_inf)` with what *this rank* has found |
# | out | `update` returns whether the step is bad, for all alike: then nobody takes it; the attribute `scale`, a float |
# | rule | bad: good steps are 0, the patience one less; at 0 or below, scale * backoff, at least min_scale. Good: one more; at growth_interval 0 again, scale * growth, and the patience is full again |
# | mind | two ranks that overflow at once are *one* bad step; only growth refills the patience |
# | state | as in 6.3: plain numbers, the same on all ranks, which later steps do not change. A run goes on on more ranks, or on less |
#
# By hand: scale 256, interval 3, patience 2.
#
# | step | 1 | 2 | 3 | 4 | 5 | 6 |
# |---|---|---|---|---|---|---|
# | rank 0 has found | x | . | . | . | x | . |
# | rank 1 has found | x | . | x | . | . | . |
# | the step is | bad | good | bad | good | bad | good |
# | patience | 1 | 1 | 0 | 0 | -1 | -1 |
# | scale after it | 256 | 256 | **128** | 128 | **64** | 64 |
#
# <details><summary>A nudge</summary>Three numbers change over time. They are the state, and the same on every rank.</details>
# <details><summary>An approach</summary>The collective of 14.2 first, on a tensor of one number. Then the rule of 6.5 with its result. You may also have a <code>HysteresisLossScaler</code> inside; but what is <em>its</em> state?</details>


# %%
@fill
class DistributedLossScaler:
    def __init__(
        self,
        init_scale=2.0**32,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=1000,
        min_scale=1.0,
        hysteresis=2,
        group=None,
    ):
        ### BEGIN SOLUTION
        self.scale, self.good_steps, self.patience = init_scale, 0, hysteresis
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.min_scale, self.hysteresis, self.group = min_scale, hysteresis, group
        ### END SOLUTION

    def update(self, found_inf):
        ### BEGIN SOLUTION
        anywhere = torch.tensor(float(found_inf))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.group)
        if anywhere:
            self.good_steps = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.good_steps, self.patience = 0, self.hysteresis
                self.scale *= self.growth_factor
        return bool(anywhere)
        ### END SOLUTION

    def state_dict(self):
        ### BEGIN SOLUTION
        return {"scale": self.scale, "good_steps": self.good_steps, "patience": self.patience}
        ### END SOLUTION

    def load_state_dict(self, state):
        ### BEGIN SOLUTION
        self.scale, self.good_steps, self.patience = state["scale"], state["good_steps"], state["patience"]
        ### END SOLUTION


# %%
check(DistributedLossScaler)

# %% [markdown]
# **Predict first:** two processes train a network whose hidden layer is divided between them; the norm before it and the bias behind it are on both, and both update their copies in the same way. At step 30 a gradient of rank 0's own half is infinite. Once each scaler asks *all* ranks, and once each asks a group of itself alone. What happens to the copies in the second run? And to the loss: will you see it there?

# %%
ways = launch("lowprec_lab.distributed:train_both_ways", 2, [120, 30, 0], say=None)
with plots.style():
    picture, (above, below) = plots.figure(9, 5.4, rows=2, sharex=True)
    for way, color in (("alone", plots.color_of(E5M2)), ("together", plots.color_of(FP32))):
        above.plot(ways[0][way]["apart"], color=color)
        above.text(121, ways[0][way]["apart"][-1], way, color=color, va="center", fontweight="bold")
        below.plot(
            ways[0][way]["loss"], color=color, linestyle="--" if way == "alone" else "-", zorder=3 - len(way) / 9
        )
    above.set_ylabel("largest distance of two copies")
    above.set_title("One rank overflows at step 30")
    above.set_xlim(0, 138)
    below.text(121, ways[0]["alone"]["loss"][-1], "both\n(alone: dashed)", va="center", fontsize=9)
    below.set_ylabel("loss")
    below.set_xlabel("step")
for way in ways[0]:
    skipped = [[step for step, bad in enumerate(rank[way]["skipped"]) if bad] for rank in ways]
    print(
        f"{way:9} skipped by rank 0: {skipped[0]}, by rank 1: {skipped[1]}; scales at the end: {[rank[way]['scale'][-1] for rank in ways]}"
    )
picture

# %% [markdown]
# Alone, rank 0 skips the step and halves its scale, and rank 1 takes the step. From then on they have different norms and biases, and multiply the same loss by different scales; what they add up in backward is no gradient of anything. The distance grows, and the loss hardly shows it. Together, they skip the same step, and the distance is 0 to the last bit.
#
# ---
# ## Who asks whom
#
# ### Exercise 14.4 · `rank_groups` · 30 min · medium · 3 points
#
# "All ranks" is mostly the wrong answer. Thousands of ranks form a grid with three directions, and each kind of question has its own group. The two that matter here:
#
# - **model**: all ranks that together have *one* copy of the model. They ask each other about infinities and norms. (Gradients were averaged over data shards before; so other copies find the same.)
# - **amax**: all ranks that have a part *or a copy* of the same tensors. Ranks of one layer have parts of its weight, and each data shard has another activation of it. Other stages have other layers, with scales of their own.
#
# | | |
# |---|---|
# | in | `world`, `tensor`, `pipeline` (how many ranks, parts of a layer, stages), `kind` |
# | out | a list of all groups of that kind; each a list of ranks, in rising order; in the order of their first ranks |
# | number | rank = t + tensor * (d + data * p): parts of a layer are neighbours, since they talk most; data = world / (tensor * pipeline) |
# | kinds | "tensor": same d and p. "data": same t and p. "pipeline": same t and d. "model": same d. "amax": same p |
# | mind | a `ValueError` where it does not divide, with all three numbers; and for another kind, with the kinds there are |
#
# By hand: 8 ranks, tensor 2, pipeline 2; so data is 2.
#
# | | stage p = 0 | stage p = 1 |
# |---|---|---|
# | data shard d = 0 | ranks 0, 1 | ranks 4, **5** |
# | data shard d = 1 | ranks 2, 3 | ranks 6, 7 |
#
# Rank 5 is t = 1, d = 0, p = 1: 1 + 2 * (0 + 2 * 1). Its tensor group is 4, 5; its data group 5, 7; its pipeline 1, 5; its model 0, 1, 4, 5; its amax group 4, 5, 6, 7.
#
# <details><summary>A nudge</summary>Which two numbers do you get from <code>divmod(rank, tensor)</code>? And then?</details>
# <details><summary>An approach</summary>For each rank its t, d and p; put it into a dict under those that have to be alike. Or <code>torch.arange(world).view(pipeline, data, tensor)</code>, and turn it.</details>


# %%
@fill
def rank_groups(world, tensor, pipeline, kind):
    ### BEGIN SOLUTION
    if min(world, tensor, pipeline) < 1 or world % (tensor * pipeline):
        raise ValueError(f"tensor {tensor} times pipeline {pipeline} must divide a world of {world} ranks")
    alike = {"tensor": "dp", "data": "tp", "pipeline": "td", "model": "d", "amax": "p"}  # in which coordinates
    if kind not in alike:
        raise ValueError(f"there is no kind of group {kind!r}. The kinds are: {', '.join(alike)}")
    groups = {}
    for rank in range(world):
        data = world // (tensor * pipeline)
        place = {"t": rank % tensor, "d": rank // tensor % data, "p": rank // (tensor * data)}
        groups.setdefault(tuple(place[each] for each in alike[kind]), []).append(rank)
    return list(groups.values())
    ### END SOLUTION


# %%
check(rank_groups)

# %% [markdown]
# ### Exercise 14.5 · `all_reduce_amax` · 20 min · easy · 2 points
#
# A tensor that is spread over a group has one scale if all ranks know its largest magnitude. That is a MAX again. A step in FP8 has hundreds of tensors, and a collective takes its time however short it is; so all amaxes go in one.
#
# | | |
# |---|---|
# | in | `amaxes`: this rank's, a list of tensors of any shapes and float dtypes; `group` |
# | out | a list of new tensors, of the same shapes and dtypes: the largest of the group, element by element |
# | mind | one collective for all of them; nothing is rounded on the way |
# | edges | where any rank has NaN: infinity, on all. Whether a MAX over NaN gives NaN depends on who computes it, so send something that every MAX understands |
#
# By hand, two ranks: 1.5 and NaN on one, 2.0 and 3.0 on the other. Both get 2.0 and infinity. (`scale_for` makes 0 of infinity, and the tensor comes back as NaN: the overflow shows on every rank.)
#
# <details><summary>A nudge</summary>Which comparison with NaN is true?</details>
# <details><summary>An approach</summary><code>torch.cat</code> of all, flat and in float32; <code>nan_to_num</code>; <code>all_reduce</code>; <code>split</code>, and back to shapes and dtypes.</details>


# %%
@fill
def all_reduce_amax(amaxes, group=None):
    ### BEGIN SOLUTION
    together = torch.cat([amax.flatten().float() for amax in amaxes]).nan_to_num(nan=math.inf, posinf=math.inf)
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
    pieces = together.split([amax.numel() for amax in amaxes])
    return [piece.view(amax.shape).to(amax.dtype) for piece, amax in zip(pieces, amaxes, strict=True)]
    ### END SOLUTION


# %%
check(all_reduce_amax)

# %% [markdown]
# With the right groups, every tensor has one scale. `quantize_part` is `quantize` with an amax that went through your `all_reduce_amax`: you will use it below. Here is a world of 8 ranks, tensor 2, pipeline 2. All ranks of a stage have parts of one weight, and each data shard has its own batch.
#
# **Predict first:** Megatron-LM [#442](https://github.com/NVIDIA/Megatron-LM/issues/442) reports ranks that drift apart in FP8: amaxes went over the wrong group. Which kind of group gives how many different scales, of the activation and of the weight of one stage? (There should be 1, and it should be that of the whole tensor.)

# %%
generator = torch.Generator().manual_seed(1)
x = torch.randn(8, 16, generator=generator)
weights = torch.randn(2, 12, 16, generator=generator)
whole = [float(quantize(each, E4M3).scale) for each in (x, weights[0])]
print("scales in stage 0    activation              weight")
for kind in KINDS:
    of_x, of_weight = scales_by_kind(8, 2, 2, kind, x, weights)
    of_others = [
        "" if set(found[:4]) == {one} else "not the whole one's"
        for found, one in zip((of_x, of_weight), whole, strict=True)
    ]
    print(f"amax over {kind:10} {len(set(of_x[:4])):2} {of_others[0]:20} {len(set(of_weight[:4])):2} {of_others[1]}")

# %% [markdown]
# Over "tensor" the two halves of a layer agree, and data shards do not: each copy of the model rounds in another way. Over "data" it is the other way round. Over "pipeline" everybody asks about other layers only. "model" has one scale for a weight, but two layers share it: whoever has small weights loses bits to the other. With delayed scaling (chapter 10) that is worse than it looks: the history of amaxes is a state that lives on, and two ranks that should have the same state have not.
#
# ---
# ## How long is a gradient that nobody has?
#
# ### Exercise 14.6 · `clip_distributed` · 35 min · medium · 3 points
#
# Clipping needs the norm of *all* gradients. With a divided model no rank has all of them. But a norm is a sum of squares, and sums are what collectives are good at. One trap: a bias or a norm that every rank has a copy of must count once.
#
# | | |
# |---|---|
# | in | `gradients`: this rank's, float32; `sharded`: for each, whether it is this rank's part (True), or a copy that all have (False); `max_norm`, `group` |
# | out | the norm before clipping, a float, the same on every rank; the gradients are changed in place |
# | mind | squares and sums in float64; one float32 factor, max_norm / (norm + 1e-6), only where that is below 1 |
# | edges | where the norm is infinite or NaN, nothing is changed: the step will be skipped |
#
# By hand, two ranks, max_norm 1:
#
# | | a weight in parts | a bias that both have |
# |---|---|---|
# | rank 0 | 3 | 12 |
# | rank 1 | 4 | 12 |
# | counts | 9 + 16 | 144, once |
#
# The norm is sqrt(169) = **13**, the factor 1 / 13.000001. (Counted on each rank, the bias would make it sqrt(313) = 17.7, and every gradient would become too small. With 64 ranks it would be much worse.)
#
# <details><summary>A nudge</summary>What goes into the sum over ranks, and what is added after it?</details>
# <details><summary>An approach</summary>Two sums of squares. <code>all_reduce</code> on one of them, a float64 tensor. Then each rank has the same norm, and needs no other to clip.</details>


# %%
@fill
def clip_distributed(gradients, sharded, max_norm, group=None):
    ### BEGIN SOLUTION
    squares = torch.zeros(2, dtype=torch.float64)  # of gradients that all ranks have, and of this rank's parts
    for gradient, part in zip(gradients, sharded, strict=True):
        squares[int(part)] += gradient.double().square().sum()
    parts = squares[1].clone()
    dist.all_reduce(parts, group=group)
    norm = float((squares[0] + parts).sqrt())
    factor = max_norm / (norm + 1e-6)
    if math.isfinite(norm) and factor < 1:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
    ### END SOLUTION


# %%
check(clip_distributed)

# %% [markdown]
# ---
# ## Fewer bytes on the wire
#
# ### Exercise 14.7 · `float8_all_gather` · 40 min · hard · 4 points
#
# Fully sharded training (ZeRO, FSDP) keeps a part of each weight on each rank, and gathers the whole weight just before a layer needs it. That happens in every layer, forward and backward: the wire is the bottleneck. If the layer is going to cast its weight to FP8 anyway, why gather four bytes for each number, or two? Cast first, gather codes. All that is needed is a scale on which all agree *before* they cast.
#
# | | |
# |---|---|
# | in | `shard`: this rank's rows, (r, K); `rows`: of the whole weight; `fmt`, `group` |
# | out | exactly `quantize(weight, fmt)` of the whole weight: a `Quantized` with one scale, codes of (rows, K) |
# | shards | ceil(rows / ranks) rows on each rank, in order, until there are no more; the last ones have fewer, or none |
# | wire | codes and amaxes, nothing else: at most 0.27 of the bytes that FP32 would take |
# | mind | all ranks bring equally many codes to a gather: fill up with zeros, and cut off in the end |
#
# By hand: 5 rows on 4 ranks. ceil(5 / 4) = 2, so the ranks have 2, 2, 1 and 0 rows. Their amaxes are 7, 3.5, 0.5, and 0 of no row at all; the largest is 7, and the scale of all codes 448 / 7 = 64. Each brings 2 rows of codes; of the 8 that come together the first 5 are the weight.
#
# <details><summary>A nudge</summary>What is the amax of a tensor without elements? Chapter 07 has decided that.</details>
# <details><summary>An approach</summary><code>quantize_part</code> gives codes and the common scale. Put the codes into a tensor of zeros of the full size, <code>dist.all_gather</code> into a list, <code>cat</code>, cut, and make a <code>Quantized</code>.</details>


# %%
@fill
def float8_all_gather(shard, rows, fmt=E4M3, group=None):
    ### BEGIN SOLUTION
    ranks = dist.get_world_size(group)
    mine = quantize_part(shard, fmt, group)
    size = -(-rows // ranks)
    filled = torch.zeros(size, shard.shape[1], dtype=torch.uint8)
    filled[: len(shard)] = mine.codes
    everybodys = [torch.empty_like(filled) for _ in range(ranks)]
    dist.all_gather(everybodys, filled, group=group)
    return Quantized(torch.cat(everybodys)[:rows], mine.scale, fmt, "tensor", shard.dtype)
    ### END SOLUTION


# %%
check(float8_all_gather)

# %% [markdown]
# **Predict first:** two processes gather a weight of 1024 x 256. How many bytes does each of them send, in FP32, in BF16, and with yours? (Counted by the kernel, in the TCP connections between them.)

# %%
sent = launch("lowprec_lab.distributed:gather_in", 2, [1024, 256])[0]
for name, count in sent.items():
    print(f"{name}: {count:>8,} bytes, {count / sent['FP32']:.4f} of FP32's, for {1024 * 256 // 2:,} numbers")
if not sent:
    print("This system does not tell how many bytes a connection has carried.")

# %% [markdown]
# The rest beyond a quarter is the collective of the amax, and what gloo writes to say what comes next. The other direction, the reduction of *gradients*, is still in float32 or BF16 here: adding up codes of 8 bits on the way would round after every addition.
#
# ---
# ## A layer on many ranks
#
# A linear layer can be cut in two ways. Cut by **columns** of its output, every rank has all of `x` and some rows of the weight, and makes some of the outputs. Cut by **rows** of its input, every rank has some columns of `x` and of the weight, and makes a part of the sum for *every* output. One after the other, with GELU in between, nothing has to be sent in the middle. This is what Megatron-LM is named for.
#
# | | forward | backward |
# |---|---|---|
# | column-parallel | each its own columns; nothing to sum | the gradient of `x` is a sum over ranks |
# | row-parallel | the output is a sum over ranks | each its own columns; nothing to sum |
#
# In FP8 there is one question more: the scales. Each rank could scale its part of a weight by the amax of that part; it would be a finer granularity, and not wrong. But then the result would depend on how many ranks there are: a run on 8 ranks could not be compared with one on 4, nor go on there. With amaxes over the group, codes and scales are those of the whole tensor, however it is cut.
#
# ### Exercise 14.8 · `column_parallel_float8` · 45 min · hard · 4 points
#
# | | |
# |---|---|
# | in | `x` (M, K), the same on every rank; `weight` (N / ranks, K): this rank's rows; `group` |
# | out | (M, N / ranks), with a gradient for both: what `Float8Linear` ("tensorwise") with the whole weight gives, cut |
# | casts | x and weight to E4M3, the gradient that arrives to E5M2, one scale for each whole tensor |
# | mind | `x` is whole, its amax needs nobody; weight and gradient are parts. The gradient of `x`: sum over ranks |
# | given | from chapter 08, `float8_matmul(a, b)`, the product of two `Quantized`, and `transpose(q)`; `quantize_part(x, fmt, group)` |
#
# By hand, two ranks, x = (1, 1). Rank 0 has the weight (448, 1), rank 1 has (3, 5.3). The amax of the whole is 448, the scale 1. E4M3 near 5.3 has 5 and 5.5, so rank 1's output is 3 + 5.5 = **8.5**. With the scale of its own part, 448 / 5.3 = 84.5, it would be 3.03 + 5.3 = 8.33: nearer to 8.3, but not what one process computes.
#
# <details><summary>A nudge</summary>Which functions of chapter 08 do you have? Which two of their three products stay as they are?</details>
# <details><summary>An approach</summary>A <code>torch.autograd.Function</code> inside, as in exercise 8.6. Forward: <code>float8_matmul</code> of <code>quantize(x)</code> and <code>transpose(quantize_part(weight))</code>. Backward: the gradient through <code>quantize_part</code>, two products, and one <code>all_reduce</code>.</details>


# %%
@fill
def column_parallel_float8(x, weight, group=None):
    ### BEGIN SOLUTION
    class Columns(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return float8_matmul(quantize(x, E4M3), transpose(quantize_part(weight, E4M3, group)))

        @staticmethod
        def backward(ctx, grad_output):
            x, weight = ctx.saved_tensors
            arrived = quantize_part(grad_output, E5M2, group)
            grad_x = float8_matmul(arrived, quantize_part(weight, E4M3, group))
            dist.all_reduce(grad_x, group=group)  # each rank's outputs send back their part of it
            return grad_x, float8_matmul(transpose(arrived), quantize(x, E4M3))

    return Columns.apply(x, weight)
    ### END SOLUTION


# %%
check(column_parallel_float8)

# %% [markdown]
# ### Exercise 14.9 · `row_parallel_float8` · 40 min · hard · 4 points
#
# | | |
# |---|---|
# | in | `x` (M, K / ranks): this rank's columns; `weight` (N, K / ranks): the same columns; `group` |
# | out | (M, N), the same on every rank: what `Float8Linear` ("tensorwise") gives for the whole input and weight; with a gradient for both |
# | mind | both are parts now; the products are summed over ranks in x's dtype. The gradient that arrives is whole, and the same everywhere: nobody sums it again |
#
# By hand, two ranks, one output, x = (7, 3.5) and weight (448, 1): the scales are 448 / 7 = 64 and 1. Rank 0 makes 7 * 448 = 3136, rank 1 makes 3.5 * 1, and both return **3139.5**. Backward with a gradient of 1, rank 0 gets 448 for its part of x, and rank 1 gets 1. (With its own amax rank 1 would scale 3.5 by 128. Here that gives the same value; most numbers are not so kind.)
#
# <details><summary>A nudge</summary>Forward all ranks give and all get. What does that say about the gradient of each part?</details>
# <details><summary>An approach</summary>As in 14.8, with <code>quantize_part</code> for x and weight, <code>quantize</code> for the gradient, and <code>all_reduce</code> on the output. If you let autograd make the way back of the sum, it may sum the gradient, too.</details>


# %%
@fill
def row_parallel_float8(x, weight, group=None):
    ### BEGIN SOLUTION
    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            output = float8_matmul(quantize_part(x, E4M3, group), transpose(quantize_part(weight, E4M3, group)))
            dist.all_reduce(output, group=group)
            return output

        @staticmethod
        def backward(ctx, grad_output):
            x, weight = ctx.saved_tensors
            arrived = quantize(grad_output, E5M2)
            grad_x = float8_matmul(arrived, quantize_part(weight, E4M3, group))
            return grad_x, float8_matmul(transpose(arrived), quantize_part(x, E4M3, group))

    return Rows.apply(x, weight)
    ### END SOLUTION


# %%
check(row_parallel_float8)

# %% [markdown]
# **Predict first:** a network of two layers, the first cut by columns, the second by rows, on 1, 2 and 4 ranks; random numbers, whose sums are not exact. How far are output and gradients from those of two `Float8Linear` in one process? Zero? A rounding of float32, about 1e-7? A rounding of E4M3, about 3e-2?

# %%
generator = torch.Generator().manual_seed(3)
x, gradient = torch.randn(32, 48, generator=generator), torch.randn(32, 48, generator=generator)
up, down = torch.randn(64, 48, generator=generator) / 7, torch.randn(48, 64, generator=generator) / 8


def on_one(x):
    first, second = torch.nn.Linear(48, 64, bias=False), torch.nn.Linear(64, 48, bias=False)
    first.weight.data, second.weight.data = up.clone(), down.clone()
    first, second = Float8Linear.from_linear(first), Float8Linear.from_linear(second)
    x = x.clone().requires_grad_()
    output = second(torch.relu(first(x)))
    output.backward(gradient)
    return output.detach(), x.grad


def on_many(part_of_up, part_of_down):
    mine = x.clone().requires_grad_()
    hidden = torch.relu(column_parallel_float8(mine, part_of_up))
    output = row_parallel_float8(hidden, part_of_down)
    output.backward(gradient)
    return output.detach(), mine.grad


right = on_one(x)
for ranks in (1, 2, 4):
    found = on_ranks(on_many, list(zip(up.chunk(ranks), down.chunk(ranks, 1), strict=True)))
    off = [float((got - want).norm() / want.norm()) for got, want in zip(found[0], right, strict=True)]
    same = all(torch.equal(one, other) for rank in found for one, other in zip(rank, found[0], strict=True))
    print(f"{ranks} ranks: output off by {off[0]:.1e}, gradient of x by {off[1]:.1e}; the same on all ranks: {same}")

# %% [markdown]
# Every code and every scale is the same as in one process; only the order of float32 additions is another. That is as near as a sum on many ranks can come.
#
# ## A whole run
#
# `lowprec-lab train` does all this for a GPT when it is started by torchrun. Two processes with a batch each, whose gradients are averaged:
#
# ```
# torchrun --nproc-per-node 2 -m lowprec_lab train --preset baby --precision fp8
# ```
#
# With `--shard` each process keeps its part of every weight, of its gradient and of the optimizer (FSDP2), and FP8 weights travel as codes, as in your exercise 14.7. Whether all processes skip a step is then up to your `all_reduce_found_inf`: its MAX is left out in one line, and after the first bad step the parts of one weight belong to different models. Stop it with Ctrl-C and go on with `--resume`, with more processes or with fewer: a checkpoint is written in parts, and read by any number. (A step stays as large: on half the processes each has twice as many batches, added up in float32.) If one of them dies or hangs, all end, and one of them says which it was, at which step, and why. torchrun prints much around it: read the line that begins with `lowprec-lab:`. If it says that an address is in use, another run has that port, and `--master-port 29501`, right after `torchrun`, takes another one. On GPUs the same commands use NCCL.

# %% [markdown]
# ## A plan on paper
#
# Ten thousand GPUs are nothing to try things out on. What people do is count. A training step does work of three kinds: operations, bytes from memory, and bytes from other GPUs. Each has a rate, and so each takes a time. `lowprec_lab.cost_model` is that count for a transformer, in one short file that you can read and change.
#
# | what | how it is counted | rate of an H100 |
# |:--|:--|:--|
# | products of linear layers | 2 M K N operations, three times; once more where the forward pass is computed again | 989e12 a second in BF16, 1979e12 in FP8, of which 78 % are reached |
# | casts to FP8 | 6 bytes for each element of three operands: read for amax, read, written twice | 3.35e12 bytes a second, 92 % of it |
# | attention | causal, always in BF16 | 40 % of BF16's rate |
# | the rest: norms, activations, logits, optimizer | bytes read and written | memory's |
# | wire | weights gathered twice (2 bytes in BF16, 1 in FP8), gradients reduced once (4 bytes) | 450e9 bytes a second inside a machine, 50e9 between machines |
#
# Wire hides behind compute, but for a fifth of it (an assumption), and but for what takes longer than compute. The share of the forward pass that is computed again, and the sequences of a step, are assumptions too: what was published does not say them.
#
# Two numbers cannot be read off a data sheet: how long it takes to *launch* one more kernel, and how much more memory *traffic* the rest causes than counted. Each is fitted to one published speed-up, FP8 against BF16: the launch to that of a small layer, which FP8 makes slower (0.80), and the traffic to that of Llama-3 8B on 8 H100 (1.25).
#
# **Predict first:** those two say nothing about 70 billion parameters on 256 GPUs. Does FP8 bring more there, or less?

# %%
gpu = h100()
print(f"fitted: a launch of {gpu.launch * 1e6:.2f} microseconds, and {gpu.traffic:.1f} times the counted traffic\n")
print(f"{'FP8 / BF16':27} published  predicted   points")
for figure in PUBLISHED:
    said = figure.predicted(gpu)
    off = "fitted" if figure.fitted else f"{100 * (said - figure.factor):+.0f}"
    print(f"{figure.name:27} {figure.factor:9.2f} {said:10.2f} {off:>8}")

# %% [markdown]
# (A fitted number takes up whatever the count leaves out. A launch can be so cheap only if the next kernel is queued while one runs; and "the rest" reads and writes four times what it would have to if all of it were fused.)
#
# Figures are from torchao's README (both layers, and 8B on 8 GPUs) and from IBM and Meta's report on float8 and FSDP2 (all others; which of 128, 256 and 512 GPUs a line of its first table is from is our guess).
#
# All whole models are within ten points. One large *layer* is not: the model says too much. It takes FP8 products to reach the same share of their peak as BF16 ones, and on real GPUs they do not, since power runs out; and when that layer was measured, the compiler did not yet fuse its casts. A model of a machine that nobody has contradicted has not been looked at closely.
#
# Why do large models gain more? Here is where the time goes.

# %%
print(f"{'':26} linear   casts  attention   rest   wire   tokens/s for each GPU")
for model, plan in (
    (LLAMA_8B, Plan(8)),
    (LLAMA_70B, Plan(256, sequences=2, recompute=1.0)),
    (LLAMA_405B, Plan(256, tensor=4, sequences=2, recompute=1.0)),
):
    for fp8 in (False, True):
        cost = cost_model.step(model, plan, fp8, gpu)
        parts = (cost.linear, cost.casts, cost.attention, cost.rest, cost.wire)
        shares = "".join(f"{part / cost.seconds:8.0%}" for part in parts)
        print(f"{model.name:15} {'FP8' if fp8 else 'BF16':6}{shares} {cost.tokens_per_second:12,.0f}")

# %% [markdown]
# FP8 makes linear layers faster, and the gathering of their weights; nothing else. The share of linear layers grows with the width, since their work grows with its square and everything else with the width itself. This is Amdahl's law, and no recipe gets around it. What FP8 saves in products it pays back in part as casts: see the column.
#
# **Predict first:** from 8 GPUs to 10,000, each with the same batch: what does FP8 bring then?

# %%
cost_model.picture()

# %% [markdown]
# A line begins where weights, gradients, moments and activations fit into 80 GB. Where a line leaves its first machine, at 8 GPUs, wire no longer hides behind compute (of 8B's step it is a third then), and FP8 gains a little, since it gathers half the bytes. Beyond that all lines run nearly level. With sharded weights each GPU receives the whole model twice in a step, however many GPUs there are, and sends its gradients once: the bytes of a GPU do not grow. What does grow is the number of hops. And what no count has in it: of ten thousand GPUs one fails every few hours, and all others wait for the slowest. That is what the first half of this chapter was for.
#
# **Try it:** a cheaper network, with a tenth of the rate between machines. `dataclasses.replace(gpu, slow=5e9)` is that machine, and `cost_model.speedup(LLAMA_70B, Plan(512, sequences=2, recompute=1.0), ...)` says what FP8 brings on it. Why does that come near 8/6, whatever FP8 does for the products?

# %% [markdown]
# ---
# ## Read the real code
#
# Megatron-LM is not installed here, so open it: [its scaler](https://github.com/NVIDIA/Megatron-LM/blob/d98e8a6/megatron/core/optimizer/grad_scaler.py), the class `DynamicGradScaler`. Its docstring says that the scale falls "if `hysteresis` number of NaNs are seen in a row".
#
# **14.A** With `hysteresis=2` and a growth interval of 1000: three good steps lie between two bad ones. Does the scale fall at the second bad one? (`True` or `False`. Read `update`, not the docstring.)

# %%
question(
    "14.A",
    ### BEGIN SOLUTION
    True,
    ### END SOLUTION
)

# %% [markdown]
# PyTorch has a scaler for sharded models, too. This is the end of its `unscale_`:

# %%
SHARDED = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/sharded_grad_scaler.py"
print(
    installed_lines("torch", "fsdp/sharded_grad_scaler.py", "for found_inf in optimizer_state", after=17, link=SHARDED)
)

# %% [markdown]
# **14.B** Four ranks, and two of them have found an infinity (their `found_inf` is 1.0). Which number has `found_inf` on each rank afterwards?

# %%
question(
    "14.B",
    ### BEGIN SOLUTION
    2.0,
    ### END SOLUTION
)

# %% [markdown]
# Exercise 14.1 multiplies by 1 / ranks before the sum. FSDP decides by dtype:

# %%
COLLECTIVES = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
print(
    installed_lines(
        "torch", "_fully_shard/_fsdp_collectives.py", "if overflow_risk:", before=4, after=14, link=COLLECTIVES
    )
)

# %% [markdown]
# **14.C** 64 ranks reduce gradients in FP16. By how much are they divided *before* the sum?

# %%
question(
    "14.C",
    ### BEGIN SOLUTION
    8,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## Break it
#
# **Everybody waits.** The most common bug of distributed code has no error message: a collective inside an `if` whose answer is not the same on all ranks. Here, only a rank that has found something tells the others.


# %%
def tells_only_bad_news(gradients):
    if not found_nonfinite(gradients):
        return False  # nothing to report
    found = torch.ones(())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


try:
    on_ranks(tells_only_bad_news, [([torch.tensor(1.0)],), ([torch.tensor(math.inf)],)])
except RanksDisagreeError as error:
    print(error)

# %% [markdown]
# In processes rank 1 would wait there until gloo's or NCCL's time limit. The cure is a rule: *what decides whether a collective is called must be the same on every rank*. That is why skipping a step comes after the collective, and not before. (When a run hangs: `py-spy dump --pid` on each rank shows where it is; `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares the calls of all ranks, and names the first that differs.)
#
# **The norm of copies.** Clipped by `torch.nn.utils.clip_grad_norm_` on each rank, as one does on one GPU:


# %%
def clip_each_alone(part, copy):
    parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in (part, copy)]
    for parameter, gradient in zip(parameters, (part, copy), strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    return float(norm), float(parameters[1].grad)


def clip_together(part, copy):
    gradients = [part.clone(), copy.clone()]
    return clip_distributed(gradients, [True, False], 1.0), float(gradients[1])


given = [(torch.tensor([3.0]), torch.tensor([12.0])), (torch.tensor([4.0]), torch.tensor([12.0]))]
for name, way in (("each alone", clip_each_alone), ("together", clip_together)):
    print(
        f"{name:11}"
        + "   ".join(f"rank {r}: norm {n:.4f}, bias {b:.6f}" for r, (n, b) in enumerate(on_ranks(way, given)))
    )

# %% [markdown]
# Each alone, the ranks have two norms, and the gradients of the bias that both have a copy of are no longer the same: after this step there are two biases.
#
# **14.D** In the grid of exercise 14.4 (8 ranks, tensor 2, pipeline 2, data 2), over how many ranks goes the sum of squares of one model's gradients?

# %%
question(
    "14.D",
    ### BEGIN SOLUTION
    4,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## What you built
#
# The parts of a training step that many ranks do together. The title's question has a short list for an answer: the mean gradient, whether the step is bad, the norm, and one amax for each tensor. Everything else (the scale, the codes, the clipping factor, the next weight) each rank works out alone, and gets the same, because it began with the same.
#
# - Agree on *inputs* of a rule, and the results agree by themselves. That is cheaper than sending results, and it cannot drift.
# - The group is part of the question. MAX over the wrong ranks is a wrong answer without an error.
# - Codes on the wire are a quarter of the bytes, if the scale is agreed on first.

# %%
progress()
