# %% [markdown]
# # 09 · Scaled matmul: why does it fail on my RTX 4070?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 02](02_rounding.ipynb): E4M3, E5M2, saturation; [chapter 04](04_autocast.ipynb): how a GPT is built. **Gives** you an explanation for every error of `torch._scaled_mm`, the function behind all FP8 training in PyTorch, and code that runs on any GPU.
#
# Your FP8 layer works on your laptop. You send it to a friend with an RTX 4070, and get back an error. The friend with an RTX 3090 gets another one, and at work, on an H100, there is a third. None of them is about your arithmetic.

# %% tags=["setup"]
try:
    import torch

    from lowprec_lab import check, fill, plots, progress, question
    from lowprec_lab.explorers import scaled_mm_picture
    from lowprec_lab.gpt import GPT, preset
    from lowprec_lab.reading import installed_lines
    from lowprec_lab.scaled_mm import (
        CALLS,
        E4M3,
        E5M2,
        FLOAT8,
        RULES,
        Gpu,
        ask_compiler,
        ask_torch,
        call,
        cast_before_2_13,
        empty_like_described,
        explain_scaled_mm,
        float8_products,
        has_strides,
        kind_found,
        layout_and_values,
        matmul_for,
        multiplied_on,
        multiply,
        pad_to_multiple,
        problem,
        problems_found,
        products_on,
        requantized_sum,
        runs_on_cutlass,
        scaled_mm_reference,
        scaling_kind,
        shape_and_values,
        sum_in_float8,
        to_column_major,
    )
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %% [markdown]
# Here is such a layer, with 40 inputs and 65 outputs (a vocabulary), on whatever is in this machine's CPU. `Gpu` stands in for a graphics card of a *compute capability*: it refuses what that card refuses, with torch's own message. 8.9 is an RTX 4070, 8.6 an RTX 3090, 9.0 an H100. (The messages are those of PyTorch's source; where you have a GPU, this page asks the real one further down.)

# %%
torch.set_num_threads(1)
torch.manual_seed(0)
x, weight = torch.randn(30, 40), torch.randn(65, 40)
a, b = x.to(E4M3), weight.t().contiguous().to(E4M3)  # (M, K) and (K, N)
one = torch.ones(1)


def said(run):
    """The first line of the error that `run()` ends with."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "it works"


print("this CPU:", said(lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)))
for name, capability in (("RTX 3090", (8, 6)), ("RTX 4070", (8, 9)), ("H100", (9, 0))):
    gpu = Gpu(capability)
    print(f"{name}:", said(lambda gpu=gpu: gpu.scaled_mm(a, b, one, one)))

# %% [markdown]
# The CPU computes anything. A GPU has float8 in its tensor cores, and those take a few sizes, layouts and formats, and nothing else. By the end of this page you have written down every rule, and twelve programs that broke one of them run again.
#
# **Words.** The product is a (M, K) times b (K, N); torch's messages call them mat1 and mat2. A **scale** in this chapter is what a code is *multiplied* with to get its value: torch asks for these **inverse scales**. One number for a whole matrix is **tensorwise** scaling; one for each row of a and each column of b is **rowwise**; one for each block of 128 numbers along K is **blockwise**.
#
# ---
# ## What it computes
#
# ### Exercise 9.1 · `scaled_mm_reference` · 20 min · easy · 2 points
#
# Before the rules, the function itself. The tensor cores multiply codes and add up in float32 (or nearly: [chapter 03](03_accumulation.ipynb)); scales, bias and one rounding come at the end. Written for a CPU that is three lines. You need them for every GPU that has no float8.
#
# | | |
# |---|---|
# | in | `a`, `b`: float8, (M, K) and (K, N); `scale_a`, `scale_b`: float32 inverse scales, one element each or (M, 1) and (1, N); `bias`: (N,) or None; `out_dtype` |
# | out | `out_dtype`, (M, N) |
# | mind | the product of the *values*, in float32; the bias is added before the only rounding |
#
# By hand: a has one row, 3 and -2; b one column, 5 and 1. The codes' product is 3 * 5 - 2 * 1 = 13. With inverse scales 0.5 and 0.25 the values are 1.5, -1 and 1.25, 0.25, and their product is 1.875 - 0.25 = 1.625 = 13 * 0.5 * 0.25. A bias of 100 gives 101.625, and in bfloat16 101.5.
#
# <details><summary>A nudge</summary><code>a @ b</code> works on float8 tensors on a CPU. In which dtype is what comes out?</details>
# <details><summary>An approach</summary>To float32 first, then the scales, which broadcast by themselves, then <code>@</code>, the bias, and <code>to(out_dtype)</code>.</details>


# %%
@fill
def scaled_mm_reference(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    ### BEGIN SOLUTION
    product = (a.float() * scale_a) @ (b.float() * scale_b)
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype)
    ### END SOLUTION


# %%
check(scaled_mm_reference)

# %% [markdown]
# Does torch compute the same? On a CPU it does, bit for bit, with one scale and with scales by row:

# %%
differences = 0
for m, k, n in ((5, 7, 3), (16, 32, 48), (64, 100, 65), (33, 512, 10)):
    a, b = torch.randn(m, k).to(E4M3), torch.randn(k, n).to(E4M3)
    for scales in ((torch.rand(()), torch.rand(())), (torch.rand(m, 1), torch.rand(1, n))):
        for out_dtype in (torch.bfloat16, torch.float32):
            try:
                torchs = torch._scaled_mm(a, b, *scales, out_dtype=out_dtype)
            except (RuntimeError, ValueError) as error:  # before 2.13 a CPU knew one scale each alone
                print(type(error).__name__, str(error).splitlines()[0])
                continue
            differences += int((torchs != scaled_mm_reference(a, b, *scales, None, out_dtype)).sum())
print("elements that differ:", differences)

# %% [markdown]
# **Predict first:** what happens to somebody who hands over the scale instead of its inverse? There will be no error. By which factor is the result wrong, if both scales are 100?

# %%
x, weight = torch.randn(16, 32), torch.randn(48, 32)
scale = torch.tensor(100.0)
a, b = (x * scale).to(E4M3), (weight * scale).to(E4M3).t()
right = scaled_mm_reference(a, b, 1 / scale, 1 / scale, None, torch.float32)
wrong = scaled_mm_reference(a, b, scale, scale, None, torch.float32)
print(
    f"exact {float((x @ weight.t())[0, 0]):.4f}   right {float(right[0, 0]):.4f}   with scales {float(wrong[0, 0]):.4g}"
)
print(f"factor {float(wrong[0, 0] / right[0, 0]):.3g}")

# %% [markdown]
# ---
# ## Where the numbers lie
#
# A tensor's **strides** say how far one has to go in memory for the next element of each dimension. The picture shows the place of each element. Left: row-major, as torch makes it. Middle: the same shape, column-major. Right: the transpose of the left one. No element moved for it; rows and columns have swapped roles.

# %%
matrix = torch.zeros(3, 4)
scaled_mm_picture.memory([
    ("row-major (3, 4)", matrix),
    ("column-major (3, 4)", torch.empty_strided((3, 4), (1, 3))),
    ("matrix.t(), (4, 3)", matrix.t()),
])  # fmt: skip

# %% [markdown]
# A tensor core multiplies a row of a by a column of b, and reads 16 bytes at a time from both, which are 16 neighbours. So a has to be row-major and b column-major: then K runs along memory in both. Libraries call that *TN*, after the letters of BLAS. Before Blackwell (capability 10.0) there is no other way in float8.
#
# ### Exercise 9.2 · `to_column_major` · 15 min · easy · 1 point
#
# | | |
# |---|---|
# | in | `x`: any dtype, 2-D, with any strides |
# | out | same dtype, shape and elements; strides (1, number of rows) |
# | mind | a slice such as `x[:, ::2]` has gaps in memory; the result has none |
#
# By hand, the matrix 1 2 3 / 4 5 6: row-major memory holds 1 2 3 4 5 6, with strides (3, 1). Column-major it is 1 4 2 5 3 6, with strides (1, 2). It is still the matrix 1 2 3 / 4 5 6.
#
# <details><summary>A nudge</summary>What does the memory of <code>x.t().contiguous()</code> hold? And what shape has it?</details>
# <details><summary>An approach</summary>Transpose, make contiguous, transpose back.</details>


# %%
@fill
def to_column_major(x):
    ### BEGIN SOLUTION
    return x.t().contiguous().t()
    ### END SOLUTION


# %%
check(to_column_major)

# %% [markdown]
# For a linear layer you rarely need it. Its weight is stored as (N, K), row-major, and the product wants b = weight.t(), which *is* column-major, for free:

# %%
weight = torch.randn(48, 32).to(E4M3)
for name, b in (
    ("weight.t()", weight.t()),
    ("weight.t().contiguous()", weight.t().contiguous()),
    ("to_column_major of that", to_column_major(weight.t().contiguous())),
):
    print(f"{name:24} strides {str(b.stride()):9}", said(lambda b=b: Gpu((8, 9)).scaled_mm(weight[:16], b, one, one)))

# %% [markdown]
# ### Exercise 9.3 · `pad_to_multiple` · 20 min · easy · 2 points
#
# Because of those 16 bytes, K and N have to be multiples of 16. A vocabulary of 65 is none. Zeros help: a zero in K adds nothing to any sum, and a column of zeros in b makes a column of zeros in the result, which is cut off.
#
# | | |
# |---|---|
# | in | `x`: any dtype, any number of dimensions; `multiple`; `dims`: which dimensions, negative ones count from the end |
# | out | same dtype, with zeros at the end of those dimensions |
# | mind | a multiple stays as it is; float8 too |
#
# By hand, `multiple=16`: 65 becomes 80, 40 becomes 48, 16 stays 16, 0 stays 0. What is missing is -size % 16: -65 % 16 = 15, and -16 % 16 = 0.
#
# <details><summary>A nudge</summary>How many zeros does your formula add to a size of 16?</details>
# <details><summary>An approach</summary>Work out the new shape in a list, make a tensor of zeros of that shape and of x's dtype, and copy x into its corner with slices.</details>


# %%
@fill
def pad_to_multiple(x, multiple, dims):
    ### BEGIN SOLUTION
    shape = list(x.shape)
    for dim in dims:
        shape[dim] += -shape[dim] % multiple
    padded = x.new_zeros(shape)
    padded[tuple(slice(size) for size in x.shape)] = x
    return padded
    ### END SOLUTION


# %%
check(pad_to_multiple)

# %% [markdown]
# **Predict first:** which of these sizes has to be padded: M, K, N? Does padding change a single bit of the result?

# %%
x, weight = torch.randn(30, 40), torch.randn(65, 40)
a, b = x.to(E4M3), weight.to(E4M3).t()
padded_a, padded_b = pad_to_multiple(a, 16, (1,)), to_column_major(pad_to_multiple(b, 16, (0, 1)))
product = Gpu((8, 9)).scaled_mm(padded_a, padded_b, one, one)
print(
    f"{tuple(a.shape)} @ {tuple(b.shape)} becomes {tuple(padded_a.shape)} @ {tuple(padded_b.shape)} -> {tuple(product.shape)}"
)
print("the first 65 columns are the same:", torch.equal(product[:, :65], scaled_mm_reference(a, b, one, one)))

# %% [markdown]
# M, the rows of a, may be any number. (The sums above have zeros added at their ends; no rounding can change by that.)
#
# What does it cost? The picture shows how much of the work is done on zeros. For a vocabulary of 65 it is nearly a fifth, for one of 50,257 nothing that could be measured. **Predict first:** where is the worst place?

# %%
sizes = list(range(1, 161))
wasted = []
for n in sizes:
    padded = pad_to_multiple(torch.zeros(n), 16, (0,)).numel()
    wasted.append(100 * (padded - n) / padded)
with plots.style():
    picture, axes = plots.figure(9, 3.4)
    axes.plot(sizes, wasted, color=plots.color_of("float8_e4m3fn"), marker=".", linewidth=1)
    axes.annotate(f"N = 65: {wasted[64]:.0f} %", (65, wasted[64]), xytext=(70, 40), arrowprops={"arrowstyle": "-"})
    axes.set_xlabel("N")
    axes.set_ylabel("work on zeros (%)")
    axes.set_title("What padding to 16 costs")
    axes.grid()
picture

# %% [markdown]
# ---
# ## Every rule
#
# ### Exercise 9.4 · `scaling_kind` · 25 min · medium · 3 points
#
# `_scaled_mm` is not told how the scales are meant. It looks at their shapes, and takes the first kind that fits. Nothing else in the error messages is misread as often: a scale of shape (M,) is not a scale by row.
#
# | kind | scale_a | scale_b |
# |---|---|---|
# | `"tensorwise"` | one element, any shape | one element, any shape |
# | `"rowwise"` | (M, 1), contiguous | (1, N), contiguous |
# | `"blockwise"`, with B = ceil(K / 128) | (M, B), strides (1, M), or (ceil(M / 128), B), strides (B, 1) | (B, N), strides (N, 1), or (B, ceil(N / 128)), strides (1, B); not both of the short ones |
# | `None` | everything else, | and operands that are not float8, scales that are not float32 |
#
# By hand, a of (256, 300) and b of (300, 512): B is 3. Scales of (256, 1) and (1, 512) are rowwise; (256, 3) and (3, 4) are blockwise, (2, 3) and (3, 512) too; (2, 3) and (3, 4) are nothing. (256,) and (512,) are nothing.
#
# <details><summary>A nudge</summary>How do you round a division up with whole numbers? And what are scales of (1, 1), if M and N are 1?</details>
# <details><summary>An approach</summary>First the dtypes, then the three kinds in the order of the table, each a comparison of both shapes. <code>has_strides(scale, 1, M)</code> compares strides, and leaves out dimensions of size 1.</details>


# %%
@fill
def scaling_kind(a, b, scale_a, scale_b):
    ### BEGIN SOLUTION
    if not (a.dtype in FLOAT8 and b.dtype in FLOAT8 and scale_a.dtype == scale_b.dtype == torch.float32):
        return None
    (m, k), n = a.shape, b.shape[1]
    rows, columns, blocks = -(-m // 128), -(-n // 128), -(-k // 128)
    shapes = tuple(scale_a.shape), tuple(scale_b.shape)
    if scale_a.numel() == scale_b.numel() == 1:
        return "tensorwise"
    if shapes == ((m, 1), (1, n)) and scale_a.is_contiguous() and scale_b.is_contiguous():
        return "rowwise"
    if shapes not in (((m, blocks), (blocks, n)), ((m, blocks), (blocks, columns)), ((rows, blocks), (blocks, n))):
        return None
    fine_a, fine_b = shapes[0][0] == m, shapes[1][1] == n
    lies_a = has_strides(scale_a, 1, m) if fine_a else has_strides(scale_a, blocks, 1)
    lies_b = has_strides(scale_b, n, 1) if fine_b else has_strides(scale_b, 1, blocks)
    return "blockwise" if lies_a and lies_b else None
    ### END SOLUTION


# %%
check(scaling_kind)

# %% [markdown]
# ### Exercise 9.5 · `explain_scaled_mm` · 60 min · hard · 6 points
#
# Now everything that a GPU enforces, in the order in which PyTorch checks it. The order matters: CUDA tells you the *first* broken rule, you mend it, run again for ten minutes, and meet the second. Your function tells all of them at once.

# %%
for name, rule in RULES.items():
    print(f"{name:18} {rule.asks}")

# %% [markdown]
# | | |
# |---|---|
# | in | what `torch._scaled_mm` takes, then `capability`, such as (8, 9), and at the end `cublas`, the version of NVIDIA's library |
# | out | a list of `problem(rule, a, b, scale_a, scale_b, capability, bias, out_dtype, cublas)`: `problem` writes torch's message for you |
# | mind | a wrong number of dimensions, or inner sizes that differ, end the list; the rules from "block-wise" on need to know the kind of the scales, and are skipped when there is none or when M, K or N is 0 |
#
# Two libraries multiply. **cuBLAS** takes tensorwise scales, and scales by row on 9.x from version 12.9 on; it needs the layouts on capabilities below 10.0, where torch copies an a that is in neither of the two. **CUTLASS** takes all other scales by row (`runs_on_cutlass`), and needs the layouts everywhere.
#
# By hand, an RTX 3090 (8.6) with K = 40, N = 65 and a row-major b: "capability"; then "K by 16", since 40 is 2 * 16 + 8; then "mat2 by 16"; and "b column-major", since 8.6 is below 10.0. On a B200 the last one would not be there.
#
# <details><summary>A nudge</summary>Is b column-major if it is not contiguous? What are the strides of every second column of a matrix? And is an a that is not row-major always column-major?</details>
# <details><summary>An approach</summary>A small function inside, <code>ask(rule, holds)</code>, that appends a problem where a condition does not hold. Then the rules read like the list above, one line each. Return early after the second and the third.</details>


# %%
@fill
def explain_scaled_mm(a, b, scale_a, scale_b, capability, bias=None, out_dtype=torch.bfloat16, cublas=(12, 9)):
    ### BEGIN SOLUTION
    broken = []

    def ask(rule, holds):
        if not holds:
            broken.append(problem(rule, a, b, scale_a, scale_b, capability, bias, out_dtype, cublas))
        return holds

    ask("capability", capability >= (8, 9))
    if not ask("two dimensions", a.dim() == b.dim() == 2) or not ask("inner size", a.shape[1] == b.shape[0]):
        return broken
    (m, k), n = a.shape, b.shape[1]
    kind = scaling_kind(a, b, scale_a, scale_b)
    ask("scales", kind is not None)
    ask("bias size", bias is None or bias.numel() == n)
    ask("K by 16", k % 16 == 0)
    ask("mat2 by 16", k % 16 == 0 and n % 16 == 0)
    ask("two E5M2", not a.dtype == b.dtype == E5M2)
    if bias is not None:
        ask("bias with float32", out_dtype != torch.float32)
        short = (torch.bfloat16, torch.float16)
        ask("bias dtype", bias.dtype in short)
        ask("bias as output", bias.dtype not in short or out_dtype not in short or bias.dtype == out_dtype)
    if kind is None or m * k * n == 0:
        return broken
    if kind == "blockwise":
        ask("block-wise", capability[0] == 9)
        ask("block-wise cuBLAS", cublas >= (12, 9))
    cutlass = kind == "rowwise" and runs_on_cutlass(capability, cublas)
    if cutlass:
        ask("row-wise output", out_dtype in (torch.float32, torch.bfloat16, torch.float16))
        ask("row-wise E5M2", b.dtype == E4M3)
        ask("a row-major", a.stride(1) == 1 and a.stride(0) >= k)
    elif capability < (10, 0):
        ask("a row-major", not (m > 1 and a.stride(0) == 1 and a.stride(1) >= m))
    if cutlass or capability < (10, 0):
        ask("b column-major", b.stride(0) == 1 and b.stride(1) >= k)
    return broken
    ### END SOLUTION


# %%
check(explain_scaled_mm)

# %% [markdown]
# Here are more than fifty products, with what your function finds, what this CPU says to the very same tensors, and what torch's *compiler* says. `torch.compile` works out the shapes of a program with tensors that hold no numbers, and has its own copy of some of the rules, written in Python. So it can be asked about CUDA on a machine that has none. (`ask_compiler` does.)
#
# **Predict first:** how many of the broken rules does the CPU notice?


# %%
def problems_of(one_call):
    return explain_scaled_mm(
        *one_call.tensors(),
        one_call.capability,
        empty_like_described(one_call.bias),
        one_call.out_dtype,
        one_call.cublas,
    )


rows, cpu_refuses = [], 0
for each in CALLS:
    found = problems_of(each)
    bias = empty_like_described(each.bias)
    on_cpu = ask_torch(*each.tensors(), bias=bias, out_dtype=each.out_dtype)
    cpu_refuses += bool(found) and on_cpu != "it works"
    rows.append((each.title, found, on_cpu, ask_compiler(each)))
for title, found, on_cpu, compiler in rows:
    rules = "; ".join(each.rule for each in found) or "fine"
    marks = f"CPU {'runs' if on_cpu == 'it works' else 'no':5} compiler {'runs' if compiler == 'it works' else 'no':5}"
    print(f"{title:39} {marks} {rules}")
broken = sum(bool(found) for _, found, _, _ in rows)
print(f"{len(rows)} products, {broken} of them refused by a GPU; the CPU refuses {cpu_refuses} of those {broken}")

# %% [markdown]
# What the CPU refuses is what it could not compute. The compiler knows sizes, layouts and scales, and neither the card nor the bias. Where it refuses and your function does not, it is stricter than the hardware: on Blackwell cuBLAS takes a row-major b, and the compiler does not let it through.
#
# On a machine with a GPU, the next cell asks the GPU itself, and compares the first problem that you found with its message.

# %%
if torch.cuda.is_available():
    capability, agree = torch.cuda.get_device_capability(), 0
    for each in CALLS:
        tensors, bias = each.tensors("cuda"), empty_like_described(each.bias, "cuda")
        real = ask_torch(*tensors, bias=bias, out_dtype=each.out_dtype)
        found = explain_scaled_mm(*tensors, capability, bias, each.out_dtype)
        same = (real == "it works") == (not found)
        agree += same
        print(f"{'same  ' if same else 'OTHER '} {each.title:39} {found[0].rule if found else 'fine':20} {real[:90]}")
    print(f"{agree} of {len(CALLS)} agree on {torch.cuda.get_device_name()}")
else:
    print("There is no GPU here. What a GPU says is quoted from PyTorch's source, and not measured on this page.")

# %% [markdown]
# ### Exercise 9.6 · `matmul_for` · 15 min · easy · 2 points
#
# Most programs need less: can this GPU do it at all, or do I have to emulate? `torch.cuda.get_device_capability()` gives a tuple, and tuples compare as one should hope: (8, 9) < (9, 0) < (10, 0) < (12, 1).
#
# | | |
# |---|---|
# | in | `capability`: (major, minor), or None without a GPU; `scaling`; `shape`: (M, K, N) or None |
# | out | `"hardware"` or `"emulated"` |
# | mind | float8 begins with 8.9; blockwise scales run on 9.x alone; K and N are multiples of 16, M is not asked; `ValueError` for an unknown `scaling` |
#
# By hand: (8, 6) emulated; (8, 9) hardware; (8, 9) with "blockwise" emulated; (9, 0) with (30, 40, 65) emulated, and with (30, 48, 80) hardware.
#
# <details><summary>A nudge</summary>Is "10.0" &gt; "8.9"? And 10.0 &gt; 8.9? And (10, 0) &gt; (8, 9)?</details>
# <details><summary>An approach</summary>Refuse unknown scalings first. Then one condition for each line under "mind".</details>


# %%
@fill
def matmul_for(capability, scaling="tensorwise", shape=None):
    ### BEGIN SOLUTION
    if scaling not in ("tensorwise", "rowwise", "blockwise"):
        raise ValueError(f"scaling is tensorwise, rowwise or blockwise, not {scaling!r}")
    if capability is None or capability < (8, 9):
        return "emulated"
    if scaling == "blockwise" and capability[0] != 9:
        return "emulated"
    if shape is not None and (shape[1] % 16 or shape[2] % 16):
        return "emulated"
    return "hardware"
    ### END SOLUTION


# %%
check(matmul_for)

# %% [markdown]
# All of it in one picture, drawn from your `explain_scaled_mm`. What to see: most rows are the same for every GPU with float8, and the few differences are what reports are made of.
#
# (The map is that of PyTorch's source. A library below it may still say no: on 12.0, cuBLAS before 13.6 refused other layouts than TN for MXFP8, [pytorch#198126](https://github.com/pytorch/pytorch/issues/198126), and PyTorch had let them pass.)

# %%
scaled_mm_picture.compatibility(explain_scaled_mm)

# %% [markdown]
# And which layers of a real model fit? In the GPT of this course and in GPT-2, all but one:

# %%
for name, vocabulary in (("baby", 65), ("gpt2", 50257), ("gpt2", 50304)):
    with torch.device("meta"):  # shapes without numbers
        model = GPT(preset(name, vocab_size=vocabulary))
    layers = [(label, each) for label, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    misfits = {
        f"{label} {tuple(each.weight.shape)}"
        for label, each in layers
        if matmul_for((8, 9), "tensorwise", (1, each.in_features, each.out_features)) == "emulated"
    }
    print(f"{name}, {vocabulary} tokens: {len(layers)} linear layers, does not fit: {', '.join(misfits) or 'none'}")

# %% [markdown]
# nanoGPT pads GPT-2's vocabulary of 50,257 tokens to 50,304, a multiple of 64, to be faster in BF16. For float8 it has to be done.
#
# ---
# ## Break it: twelve programs
#
# Twelve short programs, each after a public report, in three groups. Each cell shows the failure. First say what the *cause* is, in one word of this table; then write the function at the end of the group, which is graded on all of its programs.
#
# | word | what is wrong |
# |---|---|
# | `"hardware"` | this GPU's cores have no float8 |
# | `"kernel"` | the cores could, and the library has no program for it on this GPU |
# | `"layout"` | row-major where column-major is asked for, or the other way about |
# | `"size"` | a size is no multiple of 16 |
# | `"formats"` | this pair of float8 formats cannot be multiplied |
# | `"shape"` | the shape of a scale |
# | `"operation"` | torch has no such operation on float8 tensors |
# | `"zero"` | a scale that is made from zeros |
# | `"range"` | a number beyond 448 |
#
# ### Group one: numbers
#
# These three fail on any machine, yours included.
#
# **Program 1** ([pytorch#107087](https://github.com/pytorch/pytorch/issues/107087)): a residual connection. The error below is your torch's own.

# %%
h = torch.tensor([[1.0, 2.0]]).to(E4M3)
print(said(lambda: h + h))
print(said(lambda: h * 2.0))
print(said(lambda: h + torch.ones(1, 2)))

# %%
question(
    "9.A",
    ### BEGIN SOLUTION
    "operation",
    ### END SOLUTION
)

# %% [markdown]
# **Program 2** ([ao#3356](https://github.com/pytorch/ao/issues/3356)): scales by row, and a batch with a padded row. No error at all, and a loss of NaN:

# %%
x = torch.tensor([[0.5, -2.0], [0.0, 0.0]])
scale = 448 / x.abs().amax(dim=1, keepdim=True)
print("scales", scale.flatten().tolist(), " codes", (x * scale).to(E4M3).float().tolist())

# %%
question(
    "9.B",
    ### BEGIN SOLUTION
    "zero",
    ### END SOLUTION
)

# %% [markdown]
# **Program 3** ([ao#1912](https://github.com/pytorch/ao/issues/1912), [ml_dtypes#260](https://github.com/jax-ml/ml_dtypes/issues/260)): the scale is fixed beforehand, and one day a larger number comes. In torch 2.13 the cast saturates. In older versions, on CPUs, it gave NaN; `cast_before_2_13` stands in for them.

# %%
x, inverse = torch.tensor([100.0, 464.0, 465.0, 3e10]), torch.tensor(1.0)
print(f"torch {torch.__version__}:", (x / inverse).to(E4M3).float().tolist())
print("before 2.13:  ", cast_before_2_13(x / inverse).float().tolist())

# %%
question(
    "9.C",
    ### BEGIN SOLUTION
    "range",
    ### END SOLUTION
)

# %% [markdown]
# ### Exercise 9.7 · `requantized_sum` · 35 min · medium · 3 points
#
# One function that survives all three: it adds to a float8 matrix, and gives a float8 matrix back, on any version of torch.
#
# | | |
# |---|---|
# | in | `x`: E4M3, (M, K); `inverse_x`: (M, 1); `y`: float32, (M, K); `inverse_out`: (M, 1) or None; `cast`: some torch's cast from float32 to E4M3 |
# | out | codes (E4M3) and inverse scales (M, 1) of the sum |
# | mind | `inverse_out` given: those are the scales, and what is beyond them saturates; None: a row's largest magnitude becomes 448; a row of zeros becomes zeros; NaN stays NaN |
#
# By hand, one row: x = 2, -3 with inverse 0.5, y = 0, 5. The sum is 1, 3.5. Row by row, 3.5 becomes 448: the inverse is 3.5 / 448 = 0.0078125, and the codes are 128 and 448. With `inverse_out` = 0.001 the quotients are 1000 and 3500, and both codes are 448.
#
# <details><summary>A nudge</summary>What is 0 / 0? And which smallest amax would change no row that matters?</details>
# <details><summary>An approach</summary>Decode, add in float32, find the scales (with a floor under the largest magnitude), divide, clamp, cast. In this order.</details>


# %%
@fill
def requantized_sum(x, inverse_x, y, inverse_out, cast):
    ### BEGIN SOLUTION
    total = x.float() * inverse_x + y
    if inverse_out is None:
        inverse_out = total.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 448
    return cast((total / inverse_out).clamp(-448, 448)), inverse_out
    ### END SOLUTION


# %%
check(requantized_sum)

# %% [markdown]
# ### Group two: whose GPU is it?
#
# **Program 4** ([ComfyUI-HunyuanVideoWrapper#98](https://github.com/kijai/ComfyUI-HunyuanVideoWrapper/issues/98), [pytorch#118703](https://github.com/pytorch/pytorch/issues/118703)): a checkbox "fp8 fast mode", and an RTX 3090 Ti. In this group and the next the messages come from `Gpu`.

# %%
a, b = torch.randn(16, 32).to(E4M3), torch.randn(48, 32).to(E4M3).t()
print(said(lambda: Gpu((8, 6)).scaled_mm(a, b, one, one)))

# %%
question(
    "9.D",
    ### BEGIN SOLUTION
    "hardware",
    ### END SOLUTION
)

# %% [markdown]
# **Program 5** ([triton#4319](https://github.com/triton-lang/triton/issues/4319), [triton#8929](https://github.com/triton-lang/triton/issues/8929)): so we multiply in a kernel of our own, written in Triton, on the same card. (Triton calls E4M3 fp8e4nv.)

# %%
print(said(lambda: Gpu((8, 6)).mm(a, b)))

# %%
question(
    "9.E",
    ### BEGIN SOLUTION
    "hardware",
    ### END SOLUTION
)

# %% [markdown]
# **Program 6** ([pytorch#130359](https://github.com/pytorch/pytorch/issues/130359), [pytorch#135718](https://github.com/pytorch/pytorch/pull/135718)): scales by row. They work on an H100, and an L4 (8.9) refuses them, though it takes one scale. The row-wise kernel was written for 9.0 first; builds without one for 8.9 are still around. The text is the one in PyTorch's source.

# %%
by_row = torch.rand(16, 1), torch.rand(1, 48)
for capability, rowwise in (((9, 0), True), ((8, 9), False)):
    gpu = Gpu(capability, rowwise=rowwise)
    print(capability, "one scale:", said(lambda gpu=gpu: gpu.scaled_mm(a, b, one, one)))
    print(capability, "by row:   ", said(lambda gpu=gpu: gpu.scaled_mm(a, b, *by_row)))

# %%
question(
    "9.F",
    ### BEGIN SOLUTION
    "kernel",
    ### END SOLUTION
)

# %% [markdown]
# **Program 7** ([pytorch#192707](https://github.com/pytorch/pytorch/issues/192707)): the same on an RTX PRO 5000 (12.0) with torch 2.10. The message says less: cuBLAS was asked, and had no algorithm. (The report's message goes on with the arguments of that call.)

# %%
print(said(lambda: Gpu((12, 0), rowwise=False).scaled_mm(a, b, *by_row)))

# %%
question(
    "9.G",
    ### BEGIN SOLUTION
    "kernel",
    ### END SOLUTION
)

# %% [markdown]
# ### Exercise 9.8 · `multiply` · 40 min · medium · 4 points
#
# One function for all four cards. Where float8 is missing, multiply in bfloat16: every E4M3 number is a bfloat16 number, so nothing is lost. Where scales by row are missing, multiply without them: a row's scale is a factor of the whole row of the result, and can be applied afterwards, to a result that has not been rounded yet.
#
# | | |
# |---|---|
# | in | `gpu`: `.capability`, `.rowwise`, `.scaled_mm(...)`, `.mm(a, b)`; `a`, `b`: E4M3, row- and column-major, sizes that fit; `inverse_a`, `inverse_b`: float32, (M, 1) and (1, N), or one element each |
# | out | bfloat16, (M, N), rounded once |
# | mind | exactly one product runs; scales by row are handed over where the GPU takes them; `mm` only where there is no float8 |
#
# By hand, a row of products 10 and 20 with inverse_a = 0.5 for this row and inverse_b = 3 and 0.25: 10 * 0.5 * 3 = 15, and 20 * 0.5 * 0.25 = 2.5. Why not round before? 257 is not in bfloat16 and becomes 256. With a factor of 3 that is 768; 257 * 3 = 771 itself becomes 772.
#
# <details><summary>A nudge</summary>Which <code>out_dtype</code> keeps the product as it is until the scales are applied?</details>
# <details><summary>An approach</summary>Three cases. <code>matmul_for(gpu.capability)</code> tells the first; <code>gpu.rowwise</code> and the number of elements of the scales tell the other two.</details>


# %%
@fill
def multiply(gpu, a, b, inverse_a, inverse_b):
    ### BEGIN SOLUTION
    if matmul_for(gpu.capability) == "emulated":
        product = gpu.mm(a.bfloat16(), b.bfloat16())  # every E4M3 number is a BF16 number
    elif gpu.rowwise or inverse_a.numel() == 1:
        return gpu.scaled_mm(a, b, inverse_a, inverse_b)
    else:
        one = torch.ones(1)
        product = gpu.scaled_mm(a, b, one, one, out_dtype=torch.float32)
    return (product * inverse_a * inverse_b).bfloat16()
    ### END SOLUTION


# %%
check(multiply)

# %% [markdown]
# ### Group three: a layer and its gradient
#
# **Program 8** ([pytorch#152150](https://github.com/pytorch/pytorch/issues/152150) asks to lift it on Blackwell): somebody transposed the weight, "so that the shapes fit", and made it contiguous. On 9.0 torch checks it; on 8.9 cuBLAS itself finds out, and says less.

# %%
x, weight = torch.randn(32, 64), torch.randn(48, 64)
for capability in ((9, 0), (8, 9), (10, 0)):
    gpu = Gpu(capability)
    print(capability, said(lambda gpu=gpu: gpu.scaled_mm(x.to(E4M3), weight.t().contiguous().to(E4M3), one, one)))

# %%
question(
    "9.H",
    ### BEGIN SOLUTION
    "layout",
    ### END SOLUTION
)

# %% [markdown]
# **Program 9** ([float8_experimental#264](https://github.com/meta-pytorch/float8_experimental/pull/264), the same rule as in [ao#571](https://github.com/pytorch/ao/issues/571)): the last layer of a language model with 65 tokens.

# %%
head = torch.randn(65, 64).to(E4M3)
print(said(lambda: Gpu((8, 9)).scaled_mm(x.to(E4M3), head.t(), one, one)))

# %%
question(
    "9.I",
    ### BEGIN SOLUTION
    "size",
    ### END SOLUTION
)

# %% [markdown]
# **Program 10** ([ao#571](https://github.com/pytorch/ao/issues/571), [ao#3111](https://github.com/pytorch/ao/issues/3111)): all layers are multiples of 16, the forward pass works, and *backward* fails. The gradient of the weight is grad_output.T @ x, and it is summed over the rows: K of that product is batch * context. Three sentences of ten tokens are 30.

# %%
x, grad_output = torch.randn(30, 64), torch.randn(30, 48)
print("forward: ", said(lambda: Gpu((8, 9)).scaled_mm(x.to(E4M3), weight.to(E4M3).t(), one, one)))
g8, x8 = grad_output.t().contiguous().to(E5M2), to_column_major(x.to(E4M3))
print("backward:", said(lambda: Gpu((8, 9)).scaled_mm(g8, x8, one, one)))

# %%
question(
    "9.J",
    ### BEGIN SOLUTION
    "size",
    ### END SOLUTION
)

# %% [markdown]
# **Program 11** ([pytorch#132005](https://github.com/pytorch/pytorch/issues/132005)): gradients need range, so everything in the backward pass is cast to E5M2.

# %%
x, grad_output = torch.randn(32, 64), torch.randn(32, 48)
g8, x8 = grad_output.t().contiguous().to(E5M2), to_column_major(x.to(E5M2))
print(said(lambda: Gpu((9, 0)).scaled_mm(g8, x8, one, one)))

# %%
question(
    "9.K",
    ### BEGIN SOLUTION
    "formats",
    ### END SOLUTION
)

# %% [markdown]
# **Program 12** ([pytorch#175206](https://github.com/pytorch/pytorch/issues/175206)): it runs on an RTX 4070, compiled or not, and on an RTX 5090. Compiled on the RTX 5090 it does not, since torch 2.9. The assertion below is in your torch's compiler, too; a cell further down shows it.

# %%
x8, w8 = x.to(E4M3), weight.to(E4M3).t()
for capability, compiled in (((8, 9), True), ((12, 0), False), ((12, 0), True)):
    gpu = Gpu(capability, compiled=compiled)
    said_now = said(lambda gpu=gpu: gpu.scaled_mm(x8, w8, torch.ones(1), torch.tensor(1.0)))
    print(capability, "compiled" if compiled else "eager   ", said_now)

# %%
question(
    "9.L",
    ### BEGIN SOLUTION
    "shape",
    ### END SOLUTION
)

# %% [markdown]
# ### Exercise 9.9 · `float8_products` · 50 min · hard · 5 points
#
# Two of the three products of a linear layer, mended: for any batch, any width, any vocabulary, on any GPU with float8, compiled or not.
#
# | | |
# |---|---|
# | in | `gpu`; `x`: float32 (M, K); `weight`: float32 (N, K); `grad_output`: float32 (M, N); any sizes |
# | out | bfloat16: x @ weight.T, (M, N), and grad_output.T @ x, (N, K) |
# | mind | x and weight in E4M3, grad_output in E5M2; one scale for each tensor, largest / 448 or largest / 57344; `gpu.scaled_mm` once for each product; cut the padding off |
#
# By hand, M = 30, K = 40, N = 65: the first product is (30, 48) @ (48, 80), cut to (30, 65). The second one is (65, 32) @ (32, 48): its K is 30, padded to 32, and 40 is padded to 48. It is cut to (65, 40).
#
# <details><summary>A nudge</summary>Write the shapes of both products on paper, and mark what has to be a multiple of 16. Which of x's dimensions is marked in both?</details>
# <details><summary>An approach</summary>Two helpers inside: one quantizes a tensor (codes and inverse scale), the other multiplies any two float8 matrices by padding, laying out and calling the GPU. Then the rest is four lines.</details>


# %%
@fill
def float8_products(gpu, x, weight, grad_output):
    ### BEGIN SOLUTION
    def quantized(tensor, dtype):
        largest = torch.finfo(dtype).max
        inverse = tensor.abs().amax() / largest
        return (tensor / inverse).clamp(-largest, largest).to(dtype), inverse

    def product(a, b, inverse_a, inverse_b):
        a, b = pad_to_multiple(a, 16, (1,)), to_column_major(pad_to_multiple(b, 16, (0, 1)))
        return gpu.scaled_mm(a.contiguous(), b, inverse_a, inverse_b)

    n, k = weight.shape
    x, inverse_x = quantized(x, E4M3)
    weight, inverse_w = quantized(weight, E4M3)
    grad, inverse_g = quantized(grad_output, E5M2)
    output = product(x, weight.t(), inverse_x, inverse_w)[:, :n]
    grad_weight = product(grad.t(), x, inverse_g, inverse_x)[:, :k]
    return output, grad_weight
    ### END SOLUTION


# %%
check(float8_products)

# %% [markdown]
# ---
# ## And when it works, is it faster?
#
# Not always ([ao#2262](https://github.com/pytorch/ao/issues/2262), [torchtitan#1191](https://github.com/pytorch/torchtitan/issues/1191)). A product in float8 takes half the time of one in bfloat16 at best (an H100's peak rates are 1,979 and 989 TFLOPS). The casts before it read and write every number, and without `torch.compile` each of their steps is a kernel of its own. For a small layer that costs more than it saves. torchao leaves such layers out; its limits were measured on an H100.

# %%
AO = "https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear_utils.py"
print(
    installed_lines(
        "torchao", "float8/float8_linear_utils.py", "if K <= 4096 and N <= 1024", before=10, after=3, link=AO
    )
)

# %% [markdown]
# **9.M** GPT-2 small is 768 wide, and its blocks have four kinds of linear layers: qkv (768 to 2304), out (768 to 768), up (768 to 3072) and down (3072 to 768). For how many of the four does this function answer True (convert it), for tensorwise scaling? (If torchao is not installed here: it says False where K <= 4096 and N <= 1024.)

# %%
question(
    "9.M",
    ### BEGIN SOLUTION
    2,
    ### END SOLUTION
)

# %% [markdown]
# ---
# ## Read the real code
#
# The rules on CUDA are in C++, and are not part of the installation; read them in [ScaledBlas.cpp](https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/ScaledBlas.cpp), from `_scaled_mm_out_cuda` on. What is installed is the compiler's copy:

# %%
META = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_meta_registrations.py"
print(installed_lines("torch", "_meta_registrations.py", "def is_row_major(stride)", before=6, after=29, link=META))

# %% [markdown]
# **9.N** On which type of device are layouts and sizes *not* checked?

# %%
question(
    "9.N",
    ### BEGIN SOLUTION
    "cpu",
    ### END SOLUTION
)

# %% [markdown]
# How torch tells cuBLAS what to do is in a header that is installed with it:

# %%
HEADER = "https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/cuBlasCommonArgs.h"
print(
    installed_lines(
        "torch", "native/cuda/cuBlasCommonArgs.h", "Transpose in this context", before=6, after=12, link=HEADER
    )
)

# %% [markdown]
# **9.O** cuBLAS thinks in columns, so torch asks it for the transpose of the result: which matrix does it hand over first, "a" or "b"? (What is the transpose of A times B?)

# %%
question(
    "9.O",
    ### BEGIN SOLUTION
    "b",
    ### END SOLUTION
)

# %% [markdown]
# And torchao, which trains with `_scaled_mm`, knows your trick from exercise 9.8. It uses it for another reason:

# %%
OPS = "https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_ops.py"
print(
    installed_lines(
        "torchao", "float8/float8_ops.py", "is_rowwise_scaling and not use_fast_accum", before=5, after=20, link=OPS
    )
)
print()
print(
    installed_lines(
        "torch", "_inductor/template_heuristics/triton.py", "len(scale_a.get_size()) == 0", after=4, link=META
    )
)

# %% [markdown]
# **9.P** With scales by row and without fast accumulation, how many numbers are in the scale of `a` that torchao hands to `_scaled_mm`? (The scales go to `post_inverse_scale`, and a new one is made with `new_ones(())`.)

# %%
question(
    "9.P",
    ### BEGIN SOLUTION
    1,
    ### END SOLUTION
)

# %% [markdown]
# **Fast accumulation** (`use_fast_accum=True`) lets the tensor cores of an H100 keep their partial sums in fewer bits than float32 has. [Chapter 03](03_accumulation.ipynb) built that accumulator. With a GPU, the next cell measures what it costs:

# %%
if torch.cuda.is_available() and matmul_for(torch.cuda.get_device_capability()) == "hardware":
    torch.manual_seed(0)
    a, b = torch.randn(256, 8192).to(E4M3), torch.randn(256, 8192).to(E4M3).t()
    exact = a.double() @ b.double()
    scales = torch.ones((), device="cuda"), torch.ones((), device="cuda")
    ours = scaled_mm_reference(a, b, one, one, None, torch.float32).double()
    print(f"emulated:       off by {float((ours - exact).norm() / exact.norm()):.2e}")
    for fast in (False, True):
        real = torch._scaled_mm(a.cuda(), b.cuda(), *scales, out_dtype=torch.float32, use_fast_accum=fast)
        off = float((real.double().cpu() - exact).norm() / exact.norm())
        print(f"use_fast_accum={fast!s:5} off by {off:.2e}")
else:
    print("There is no GPU with float8 here; this is not measured.")

# %% [markdown]
# ---
# ## What you built
#
# An answer to the question of the title. Why does it fail on an RTX 4070? Because b is row-major, or K is 40, or N is 65, or the scales have the wrong shape; and you can tell which before you own one. Four points to take along:
#
# - A program that runs on the CPU has shown that the arithmetic is right, and nothing about the GPU.
# - float8 begins with 8.9. Scales by row and by block depend on the GPU *and* on the build of torch: look, do not guess.
# - K of the weight's gradient is batch * context. Pad it, or choose it well.
# - Zeros are free: they may be added wherever a size does not fit, and cut off afterwards.
#
# Chapter 10 trains a GPT with these products.

# %%
progress()
