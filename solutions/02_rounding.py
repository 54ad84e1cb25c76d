# %% [markdown]
# # 02 · Rounding: which of the two neighbours?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 01](01_bit_layouts.ipynb): formats, codes, `decode`, `ulp`. **Gives** you a rounder for any format that is right on
# every float32 there is, in five modes, and one that runs at the speed of a memory copy.
#
# Put 0.1 into an E4M3 tensor and read it back: 0.1015625. E4M3 has a value just below 0.1 (0.09375) and one just above, and something chose the upper one. Put 465 in: torch 2.13
# gives 448, ml_dtypes gives NaN, and one library was seen to make 480 of 464, which is not even a value of the format. Who is right?

# %% tags=["setup"]
try:
    import math

    import numpy as np
    import torch

    from lowprec_lab import RoundingExplorer, check, fill, plots, progress, question, reveal
    from lowprec_lab.bits import (
        NumberClass,
        bit_pattern,
        classify,
        decode,
        join_fields,
        max_finite,
        min_normal,
        min_subnormal,
        split_fields,
        ulp,
    )
    from lowprec_lab.formats import (
        BF16,
        E2M1,
        E2M3,
        E3M2,
        E4M3,
        E4M3FNUZ,
        E5M2,
        E5M2FNUZ,
        E8M0,
        FORMATS,
        FP16,
        FP32,
        TF32,
        Format,
    )
    from lowprec_lab.libraries import casts
    from lowprec_lab.prove import prove
    from lowprec_lab.races import race
    from lowprec_lab.reading import installed_lines
    from lowprec_lab.rounding import (
        MODES,
        cast_saturating,
        compiled,
        double_rounding_victims,
        encode,
        fast_round_to,
        round_stochastic,
        round_to,
        round_to_bfloat16,
        traced,
        truncate_to_bfloat16,
        written_into,
    )
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %%
RoundingExplorer(fmt=E4M3, value=0.1)

# %% [markdown]
# Drag the marker, or type a number, and find where the choice flips. Change the mode: which of the five ever disagree about 0.1? Then try 0.09765625. It lies exactly half-way between its neighbours: a **tie**.
#
# **Words.** To *round* is to choose a value of the format for a number that need not be one. The **mode** says which neighbour is chosen:
#
# | mode | chooses |
# |---|---|
# | `nearest_even` | the nearer one; a tie goes to the one whose last mantissa bit is 0, and in a format without mantissa bits to the larger magnitude. This is what hardware does unless told otherwise |
# | `nearest_away` | the nearer one; a tie goes away from zero |
# | `toward_zero` | the one nearer to zero: what cutting off bits does |
# | `up`, `down` | the one above, the one below |
#
# Above the largest value there is no second neighbour, and a **policy** decides: `saturate` gives the largest value, `to_special` gives infinity, or NaN where there is no infinity. Libraries differ
# in exactly these two things, and most do not say so. Here both are arguments, always.

# %% tags=["helpers"]
# Your helpers: functions that more than one of your answers on this page uses.

# %% [markdown]
# ---
# ## BF16, with integers alone
#
# ### Exercise 2.1 · `truncate_to_bfloat16` · 10 min · easy · 1 point
#
# BF16 is the upper half of a float32. So the cheapest conversion is to keep that half. It rounds towards zero, with one exception that you must take care of: a NaN whose payload is all in the
# lower half. What is left of it is an exponent of all ones and a mantissa of zeros.
#
# | | |
# |---|---|
# | in | `x`: float32 tensor of any shape |
# | out | bfloat16 tensor of that shape |
# | mind | NaN stays NaN. It can be done with integer operations alone; whether it was is not judged |
#
# By hand:
#
# | value | float32 bits (the lower half after the bar) | bfloat16 | value |
# |---|---|---|---|
# | 1.0078124 | `0 01111111 0000000` \| `1111111111111111` | `0 01111111 0000000` | 1.0 |
# | a NaN | `0 11111111 0000000` \| `0000000000000001` | `0 11111111 1000000` | NaN |
#
# <details><summary>A nudge</summary>What does the second row turn into if you only drop the lower half?</details>
# <details><summary>An approach</summary>View as int32, shift right by 16, set the mantissa's top bit where <code>x</code> is NaN, convert to int16, view as bfloat16.</details>


# %%
@fill
def truncate_to_bfloat16(x):
    ### BEGIN SOLUTION
    upper = x.view(torch.int32) >> 16
    quiet = upper | 0x40  # a NaN whose payload was all in the lower half would read as infinity
    return torch.where(x.isnan(), quiet, upper).to(torch.int16).view(torch.bfloat16)
    ### END SOLUTION


# %%
check(truncate_to_bfloat16)

# %% [markdown]
# ### Exercise 2.2 · `round_to_bfloat16` · 20 min · medium · 2 points
#
# Cutting always moves towards zero: a thousand roundings later that is a drift. To go to the *nearest* value, add half a step before you cut. Half a step is the topmost bit of the part that
# you are about to lose. And when the value sits exactly half-way, the bit that you keep last decides.
#
# | float32 bits (the lower half after the bar) | result | why |
# |---|---|---|
# | `0 01111111 0000000` \| `1000000000000000` | `0 01111111 0000000` | a tie; the kept bit is 0, so down |
# | `0 01111111 0000001` \| `1000000000000000` | `0 01111111 0000010` | a tie; the kept bit is 1, so up |
# | `0 01111111 1111111` \| `1000000000000000` | `0 10000000 0000000` | up, and the carry runs into the exponent: 2.0 |
#
# The last row is why this is done on integers: the carry from the mantissa into the exponent is exactly what you want, and costs nothing. You met this line of code in question 1.C.
#
# | | |
# |---|---|
# | in | `x`: float32 tensor of any shape |
# | out | bfloat16 tensor of that shape |
# | mind | NaN stays NaN (adding could carry it into the sign); above the largest value comes infinity, by the same carry |
#
# <details><summary>A nudge</summary>What would you have to add so that a tie carries only when the kept bit is 1?</details>
# <details><summary>An approach</summary>Add <code>0x7FFF</code> and the kept bit, then cut. Treat NaN apart, as in 2.1.</details>


# %%
@fill
def round_to_bfloat16(x):
    ### BEGIN SOLUTION
    bits = x.view(torch.int32)
    kept = (bits >> 16) & 1
    rounded = (bits + 0x7FFF + kept) >> 16  # half a step, less one, plus the kept bit: a tie carries only if it is odd
    quiet = (bits >> 16) | 0x40  # adding could carry a NaN into the sign
    return torch.where(x.isnan(), quiet, rounded).to(torch.int16).view(torch.bfloat16)
    ### END SOLUTION


# %%
check(round_to_bfloat16)

# %% [markdown]
# **Predict first:** a thousand numbers are summed in float64; before that each is truncated, or rounded, to BF16. By how much is the sum off? By half a step? By a thousand of them? (The cell does it two hundred times, with other numbers each time.)

# %%
generator = torch.Generator().manual_seed(2)
numbers = torch.rand(200, 1000, generator=generator) + 1  # from 1 to 2, where a step of BF16 is 2^-7
for name, function in (("truncated", truncate_to_bfloat16), ("rounded", round_to_bfloat16)):
    steps = (function(numbers).double() - numbers.double()).sum(1) / 2**-7
    print(f"{name:10} the sum is off by {float(steps.mean()):7.1f} steps, give or take {float(steps.std()):.1f}")

# %% [markdown]
# Errors of rounding have both signs and mostly cancel: a thousand of them, each up to half a step, come to about 9 steps, to either side (0.29 times the root of 1000). Errors of truncation all point the same way and add up, half a step each. A mode is not a detail.
#
# ---
# ## Any format, any mode
#
# ### Exercise 2.3 · `round_to` · 60 min · the heart of this chapter · 5 points
#
# Now for every format at once. Think in *steps*: around x the values of the format are spaced by `ulp(x, fmt)`, which you have. Measured in steps, x is a number like 12.5, and rounding it to the format is rounding 12.5 to
# a whole number. That is all; the rest is edges.
#
# | | |
# |---|---|
# | in | `x`: float32 tensor; `fmt`; `mode`: one of the five; `overflow`: `"saturate"` or `"to_special"` |
# | out | float32 tensor of that shape, of values of the format; `x` is not changed |
# | mind | the edges below, in this order |
#
# 1. **Round first**, as if the largest binade went on. Only what then lies above the largest finite value has overflowed. So 464, a tie between 448 and what would be 480, does not overflow E4M3; 464.00003 does.
# 2. **Overflow**: `saturate` gives the largest value with the sign, for infinity too. `to_special` gives infinity where the format has one, else NaN. Rounding towards zero never overflows a finite number: 1e6 becomes 448.
#    The same goes for `up` on negative and `down` on positive numbers.
# 3. NaN stays NaN. -0.0 stays -0.0, and so does what rounds to zero from below (in fnuz formats and in formats without sign, which have no -0, it is 0.0).
# 4. A format without zero (E8M0, or one of your own with `subnormals=False`) gives its smallest value for anything smaller, with the sign of x. A format without sign gives NaN for numbers below zero.
# 5. A mode or policy that does not exist is a `ValueError`, and so is `to_special` on a format that has no special value. Say in the message what was expected.
#
# By hand, E4M3:
#
# | x | step | x in steps | nearest_even | up |
# |---|---|---|---|---|
# | 1.0625 | 0.125 | 8.5 | 8, so 1.0 | 9, so 1.125 |
# | -1.1 | 0.125 | -8.8 | -9, so -1.125 | -8, so -1.0 |
# | 2^-10 | 2^-9 | 0.5 | 0 | 1, so 2^-9 |
# | 464 | 32 | 14.5 | 14, so 448 | 15, so 480: overflow |
#
# <details><summary>A nudge</summary>Work on |x| and put the sign back at the end. For which modes do the sign and the direction then interact?</details>
# <details><summary>An approach</summary>In float64: <code>steps = |x| / ulp(x, fmt)</code> is exact, because a step is a power of two. Take the floor and what is left over, and decide per mode whether to add 1: left over more than half, or a half and the floor odd;
# at least a half; never; more than nothing and x positive; more than nothing and x negative. Multiply by the step. Then the edges, from 1 to 4, with <code>torch.where</code>. <code>torch.copysign</code> puts signs back, that of zero included.</details>


# %%
@fill
def round_to(x, fmt, mode="nearest_even", overflow="saturate"):
    ### BEGIN SOLUTION
    if mode not in MODES or overflow not in ("saturate", "to_special"):
        raise ValueError(
            f"mode is one of {MODES} and overflow 'saturate' or 'to_special', not {mode!r} and {overflow!r}"
        )
    if overflow == "to_special" and fmt.specials == "finite":
        raise ValueError(f"{fmt.name} has no infinity and no NaN to overflow to: use overflow='saturate'")
    step = ulp(x, fmt)
    steps = x.double().abs() / step  # exact: a step is a power of two
    below = steps.floor()
    rest, odd, negative = steps - below, below % 2 == 1, x.signbit()
    move = {
        "nearest_even": (rest > 0.5) | ((rest == 0.5) & odd),
        "nearest_away": rest >= 0.5,
        "toward_zero": torch.zeros_like(odd),
        "up": (rest > 0) & ~negative,
        "down": (rest > 0) & negative,
    }[mode]
    magnitude = (below + move) * step
    if not fmt.subnormals:
        magnitude = magnitude.clamp(min=min_normal(fmt))
    largest = max_finite(fmt)
    if overflow == "saturate":
        magnitude = torch.where((magnitude > largest) | x.isinf(), largest, magnitude)
    else:
        special = math.inf if fmt.specials == "ieee" else math.nan
        outwards = mode.startswith("nearest") | (negative if mode == "down" else ~negative if mode == "up" else False)
        beyond = torch.where(torch.as_tensor(outwards), special, largest)
        magnitude = torch.where(magnitude > largest, beyond, magnitude)
        magnitude = torch.where(x.isinf(), special, magnitude)
    magnitude = torch.where(x.isnan(), math.nan, magnitude)
    if not fmt.signed:
        return torch.where(x < 0, math.nan, magnitude).float()
    rounded = torch.copysign(magnitude, x.double()).float()
    return torch.where(rounded == 0, 0.0, rounded) if fmt.specials == "fnuz" else rounded
    ### END SOLUTION


# %%
check(round_to)

# %% [markdown]
# **Predict first:** the mean of many numbers between 0.9 and 1.1, each rounded to E4M3. Which modes get the mean right? Which ones are off, and by how many steps of 0.125? (Below 1 a step is half of that.)

# %%
numbers = 0.9 + 0.2 * torch.rand(100_000, generator=torch.Generator().manual_seed(3))
for mode in MODES:
    drift = round_to(numbers, E4M3, mode).double().mean() - numbers.double().mean()
    print(f"{mode:13} the mean is off by {float(drift) / 0.125:+.3f} steps")

# %% [markdown]
# **The same inputs in the libraries that are installed here.** The columns after "right" were computed just now.

# %%
casts([464.0, 464.00003, 1e6, math.inf, math.nan, -0.0, 2**-10, 1.0625, 1.8131605, 4.25, 0.000538887, 1.0625001], E4M3)

# %% [markdown]
# Somebody got each of these rows wrong in public:
#
# | input | what was reported | what it is |
# |---|---|---|
# | 464 and NaN | [QPyTorch](https://github.com/Tiiiger/QPyTorch) makes 480 of both | 480 is NaN's place in E4M3: no policy gives it |
# | 464.00003, 1e6, inf | torch 2.11 gave NaN, torch 2.13 gives 448 | two policies, one library |
# | 1.8131605 | 1.75, [onnxruntime#16938](https://github.com/microsoft/onnxruntime/issues/16938) | 1.875 is nearer |
# | 4.25 | "should be 4.5", [ml_dtypes#221](https://github.com/jax-ml/ml_dtypes/issues/221) | a tie: 4 is the even one |
# | 0.000538887 | 0.0039, [openvino#30057](https://github.com/openvinotoolkit/openvino/pull/30057) | below half of the smallest value: 0 |
# | 1.0625001 | 1.0, [triton#11753](https://github.com/triton-lang/triton/pull/11753) | just above a tie; it was rounded twice. Exercise 2.6 is about this |
#
# So who is right about 465? Both: 448 under one policy, NaN under the other. Where two libraries differ, ask what their *policy* is. torch 2.13 saturates E4M3 and sends E5M2 to infinity. You cannot see that in the code that calls the cast. That is why your function
# has two more arguments.
#
# ### Exercise 2.4 · `encode` · 30 min · medium · 3 points
#
# A rounded value is still a float32. To store it in 8 bits you need its code: the way back from `decode`.
#
# | | |
# |---|---|
# | in | as `round_to` |
# | out | int32 codes: `decode(encode(x, fmt, ...), fmt)` is `round_to(x, fmt, ...)`, bit for bit |
# | mind | one code for NaN: in ieee formats sign 0 and only the top mantissa bit set; in fn all ones with sign 0; in fnuz the code of -0. A NaN in a "finite" format is a `ValueError` |
#
# By hand, E4M3, x = -1.1: rounded it is -1.125, that is 9 steps of 2^-3 in the binade of 2^0, whose exponent field is 7. The magnitude's code counts steps from 0 up: 7 * 8 + (9 - 8) = 57, or `0x39`. With the sign bit it is `0xB9`.
#
# <details><summary>A nudge</summary>For positive numbers the codes run in the order of the values, without a gap. Within a binade, what is code minus steps?</details>
# <details><summary>An approach</summary>Round first. Take the exponent e of the rounded magnitude, no smaller than that of the smallest normal value. Its exponent field is e + bias, and steps = magnitude / 2^(e - m) is a whole number from 2^m to 2^(m + 1) - 1, or less
# for subnormals. Both cases are one formula: (e + bias) * 2^m + steps - 2^m. (<code>torch.frexp</code> gives a fraction below 1, so its exponent is one too large; the limit from below takes care of 0.) Then the sign, then infinity and NaN.</details>


# %%
@fill
def encode(x, fmt, mode="nearest_even", overflow="saturate"):
    ### BEGIN SOLUTION
    rounded = round_to(x, fmt, mode, overflow)
    if fmt.specials == "finite" and bool(rounded.isnan().any()):
        raise ValueError(f"{fmt.name} has no code for NaN: replace NaNs before you encode")
    finite = torch.where(rounded.isfinite(), rounded, 1.0).double().abs()
    exponent = torch.frexp(finite.clamp(min=min_normal(fmt))).exponent - 1
    one = 2**fmt.mantissa_bits
    steps = torch.ldexp(finite, (fmt.mantissa_bits - exponent).double()).to(torch.int64)
    codes = (exponent.to(torch.int64) + fmt.bias) * one + steps - one
    top = (2**fmt.exponent_bits - 1) * one
    codes = torch.where(rounded.isinf(), top, codes)
    if fmt.signed:
        codes = codes + rounded.signbit() * 2 ** (fmt.width - 1)
    nan = {"ieee": top + one // 2, "fn": top + one - 1, "fnuz": 2 ** (fmt.width - 1), "finite": 0}[fmt.specials]
    return torch.where(rounded.isnan(), nan, codes).to(torch.int32)
    ### END SOLUTION


# %%
check(encode)

# %% [markdown]
# ---
# ## Rounding at random
#
# ### Exercise 2.5 · `round_stochastic` · 30 min · medium · 3 points
#
# A weight of 1.0 in BF16 and an update of 0.001: to nearest, the sum is 1.0, today and after a thousand updates. If instead the sum goes up in one case out of eight, because 0.001 is about an eighth of a step, then a thousand updates arrive *on average*. That is
# stochastic rounding: up with a probability equal to how far up you already are.
#
# The noise is an argument. So your function has no state, and it can be checked exactly: over all 2^23 noises the mean is x, to the last bit, wherever x is a multiple of 2^-23 steps.
#
# | | |
# |---|---|
# | in | `x`: float32 tensor; `fmt`; `noise`: float32 tensor of the same shape, multiples of 2^-23 in [0, 1); `overflow` |
# | out | float32 tensor: with neighbours lo <= abs(x) < hi, hi exactly when noise < (abs(x) - lo) / (hi - lo), else lo; with the sign of x |
# | mind | values of the format never move; subnormals are as fair as all others; overflow is decided last; the edges and the errors are those of 2.3 |
#
# By hand, E4M3, x = 1.03125: lo is 1, hi is 1.125, and x is a quarter of the way. Noise 0.24 gives 1.125, noise 0.25 gives 1.0.
#
# There are two ways to use the noise, and both are fair: compare it with the fraction, or add it and cut. They choose differently for many noises (for half of them in this example), so the contract fixes the first. Adding has a trap as well: in float32, 15 + (1 - 2^-23) is 16.
#
# <details><summary>A nudge</summary>In steps again: the floor, and what is left over. What is compared with what?</details>
# <details><summary>An approach</summary>As <code>round_to</code> with the mode replaced by <code>rest > noise</code>, in float64, where nothing is lost. The edges are the same. If you moved them into a helper, both functions can use it.</details>


# %%
@fill
def round_stochastic(x, fmt, noise, overflow="saturate"):
    ### BEGIN SOLUTION
    step, magnitude = ulp(x, fmt), x.double().abs()
    steps = magnitude / step
    below = steps.floor()
    chosen = (below + (noise.double() < steps - below)) * step
    # A value of the format, or the one that would follow the largest: rounding it to nearest moves nothing, and settles
    # overflow, special values, signs and formats without zero.
    chosen = torch.copysign(torch.where(x.isfinite(), chosen, magnitude), x.double()).float()
    rounded = round_to(chosen, fmt, "nearest_even", overflow)
    return rounded if fmt.signed else torch.where(x < 0, math.nan, rounded)
    ### END SOLUTION


# %%
check(round_stochastic)

# %% [markdown]
# **Predict first:** 42.5 in E5M2 lies between 40 and 48. To nearest it is 40, every time. What is the mean of ten thousand stochastic roundings? (The number is the example of [RFC-0030](https://github.com/pytorch/rfcs/pull/51), which left stochastic rounding open.)

# %%
noise = torch.randint(0, 2**23, (10_000,), generator=torch.Generator().manual_seed(4)) / 2**23
rounded = round_stochastic(torch.full((10_000,), 42.5), E5M2, noise)
print("values that occur:", sorted(set(rounded.tolist())), "  mean:", float(rounded.mean()))

# %% [markdown]
# ---
# ## Rounding twice
#
# ### Exercise 2.6 · `double_rounding_victims` · 20 min · medium · 2 points
#
# A tensor is in BF16, because that is what the layer gives, and then it is cast to E4M3. It was rounded twice. Once in a while the first rounding moves a number exactly onto a tie, and the second one then goes the wrong way. Find every float32 to which that happens.
#
# | | |
# |---|---|
# | in | `via`, `fmt`: Formats; `lo`, `hi`: floats, 0 < lo < hi |
# | out | float32 tensor of one dimension, ascending: every float32 in [lo, hi) for which rounding to `via` first changes what `fmt` makes of it |
# | mind | *every* float32: walk through the codes, not through a grid. Both roundings are `nearest_even`, `saturate` |
#
# By hand: 1.0625001 is just above the tie between 1.0 and 1.125 of E4M3, so it becomes 1.125. BF16 has no room for the last digit: it makes 1.0625 of it, which is the tie, and that goes to the even neighbour, 1.0. A victim.
#
# <details><summary>A nudge</summary>In chapter 01 the codes of positive float32 ran in order without a gap. How do you get all numbers between two of them?</details>
# <details><summary>An approach</summary><code>torch.arange</code> from the code of <code>lo</code> to the code of <code>hi</code>, as int32, viewed as float32. Round both ways, compare, select. Take the codes of lo and hi from float32 tensors: a Python float may lie between two of them.</details>


# %%
@fill
def double_rounding_victims(via, fmt, lo, hi):
    ### BEGIN SOLUTION
    ends = torch.tensor([lo, hi], dtype=torch.float64)
    near = ends.float()
    above = torch.nextafter(near, torch.tensor(math.inf))
    first, last = bit_pattern(torch.where(near.double() < ends, above, near)).tolist()  # the first float32 not below
    x = torch.arange(first, last, dtype=torch.int32).view(torch.float32)
    return x[round_to(round_to(x, via), fmt) != round_to(x, fmt)]
    ### END SOLUTION


# %%
check(double_rounding_victims)

# %% [markdown]
# **Predict first:** which share of all float32 between 1 and 1.125 changes in E4M3, when it goes through BF16 first? Through FP16?

# %%
count = int(bit_pattern(torch.tensor([1.125])) - bit_pattern(torch.tensor([1.0])))
for via in (BF16, FP16):
    for fmt in (E4M3, E5M2):
        victims = double_rounding_victims(via, fmt, 1.0, 1.125 if fmt is E4M3 else 1.25)
        share = len(victims) / (count if fmt is E4M3 else 2 * count)
        example = f"for example {victims[0].item():.9g}" if len(victims) else ""
        print(f"{fmt.name:14} via {via.name:9} {share:8.3%}   {example}")

# %% [markdown]
# Three numbers in a hundred, one step each. It is not a disaster, but it is not what you asked for, and a comparison bit for bit finds it at once. The cure is to round once, from the widest value you have.
#
# ---
# ## As fast as memory
#
# ### Exercise 2.7 · `fast_round_to` · 40 min · hard · 3 points
#
# `round_to` is right, and slow: it walks through memory some thirty times. A rounder that sits in every layer of a training run has to read each number once and write it once. `torch.compile` can fuse a chain of element-wise operations into one such pass, if you give it nothing that stops it: no Python branch on a value,
# no selection by a mask (`x[mask]`, whose size depends on values), and no pair of casts to 16 bits and back, which it would delete.
#
# So work on the bits, as in 2.2: half a step less one, plus the kept bit, then cut; this time 23 - m bits of a float32 instead of 16. For subnormals the step is a fixed one, and there is a famous trick: add a large power of two whose last bit is worth exactly one step, and subtract it again. The addition rounds for you, to nearest, ties to even.
#
# | | |
# |---|---|
# | in | `x`: float32 tensor; `fmt`: with a sign, a zero, 2 to 8 exponent bits, at most 22 mantissa bits and a bias from -100 to 127; `out`: a float32 tensor to write into, or None |
# | out | `out`, or a new float32 tensor: bit for bit `round_to(x, fmt)` |
# | mind | one graph, element-wise; NaN stays NaN; infinity saturates; no -0 in fnuz formats; without mantissa bits a tie goes to the larger magnitude, as in 2.3 |
#
# By hand, E4M3, x = 0.005: subnormal, 2.56 steps of 2^-9. Between 2^14 and 2^15 the steps of float32 are 2^-9 as well. So 16384 + 0.005 is rounded to 16384.005859375, three steps above 16384; subtract 16384, and 0.005859375 is left, which is what E4M3 makes
# of 0.005.
#
# <details><summary>A nudge</summary>Which power of two has a last float32 bit that is worth the format's smallest step, 2^(1 - bias - m)?</details>
# <details><summary>An approach</summary>Three parts: normal numbers by integers on the magnitude's bits; subnormal ones by adding and subtracting 2^(1 - bias - m + 23); <code>torch.where</code> chooses by comparing with <code>min_normal(fmt)</code>. Then the largest value as an upper limit, NaN, and the sign.</details>


# %%
@fill
def fast_round_to(x, fmt, out=None):
    ### BEGIN SOLUTION
    lost = 23 - fmt.mantissa_bits
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    odd = (magnitude >> lost) & 1 if fmt.mantissa_bits else 1  # without mantissa bits a tie goes to the larger one
    normal = ((magnitude + (2 ** (lost - 1) - 1) + odd) >> lost << lost).view(torch.float32)
    magic = 2.0 ** (1 - fmt.bias + lost)  # its last bit is worth one step of the subnormals: adding it rounds
    size = magnitude.view(torch.float32)
    subnormal = (size + magic) - magic
    rounded = torch.where(size < min_normal(fmt), subnormal, normal).clamp(max=max_finite(fmt))
    rounded = torch.copysign(torch.where(x != x, x, rounded), x)  # x.isnan() is not vectorised when it is compiled
    if fmt.specials == "fnuz":
        rounded = torch.where(rounded == 0, 0.0, rounded)  # there is no -0
    return rounded if out is None else out.copy_(rounded)
    ### END SOLUTION


# %%
check(fast_round_to)

# %% [markdown]
# ### The proof
#
# There are 4,294,967,296 float32 numbers. That is not many. The next cell rounds **all of them** to E4M3 with your `fast_round_to`, compiled, and compares every single one with the exact oracle. (It takes up to half a minute. You may interrupt it; run again, it goes on where it stopped.)

# %%
prove(E4M3)

# %% [markdown]
# That was no test. A test tries some inputs. There is no input left on which your function could be wrong.
#
# ---
# ## Read the real code
#
# This is how torch makes an E4M3 of a float32. Look for the two things that you have written yourself: the rounding bias with its odd bit, and the addition of a magic number.

# %%
RELEASE = "https://github.com/pytorch/pytorch/blob/v2.13.0/"
print(
    installed_lines(
        "torch",
        "headeronly/util/Float8_e4m3fn.h",
        "uint8_t fp8e4m3fn_from_fp32_value",
        after=72,
        link=RELEASE + "torch/headeronly/util/Float8_e4m3fn.h",
    )
)

# %% [markdown]
# **2.A** `denorm_mask` is `141 << 23`: the bits of a float32. Which number is that, written as a power of two? Give the exponent.

# %%
question(
    "2.A",
    ### BEGIN SOLUTION
    14,
    ### END SOLUTION
)

# %% [markdown]
# **2.B** The line with `fp8_max` compares with the bits of 480, although the largest value is 448. 464.00003 is below 480: by which later line does torch 2.13 still make 448 of it? Give the number in that line's `if` that the code is compared with.

# %%
question(
    "2.B",
    ### BEGIN SOLUTION
    0x7F,
    ### END SOLUTION
)

# %% [markdown]
# Earlier versions of torch had NaN where this one has 448, both there and above 480. Code that relied on either had to change, and a checkpoint quantized by one version need not be the same bytes as one quantized by another. That brings us to the last exercise.
#
# ---
# ## Break it
#
# ### Exercise 2.8 · `cast_saturating` · 15 min · easy · 2 points
#
# A model worked, then somebody upgraded torch, and now activations are NaN; or the other way round. The reports are public: [ao#1912](https://github.com/pytorch/ao/issues/1912), [ao#4364](https://github.com/pytorch/ao/issues/4364), [ml_dtypes#260](https://github.com/jax-ml/ml_dtypes/issues/260). The line is always the same:

# %%
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
    print(f"torch {torch.__version__}   {dtype}   {torch.tensor([1e6, math.inf]).to(dtype).float().tolist()}")

# %% [markdown]
# One line, four dtypes, more than one policy; and with another version of torch another list. Write a cast that gives the same everywhere: beyond the largest value it saturates, infinity too, and NaN stays NaN.
#
# | | |
# |---|---|
# | in | `x`: float32, bfloat16 or float16 tensor; `dtype`: one of the four float8 dtypes |
# | out | tensor of that dtype and shape |
# | mind | NaN stays NaN. Round once, and not by way of another dtype |
#
# By hand: 60000 in E5M2 is 57344 with or without a clamp, because it is nearer to 57344 than to what would follow. 1e6 is infinity without one.
#
# <details><summary>A nudge</summary>Whatever is beyond the largest value becomes the largest value, rounded first or not. So what may you do before the cast?</details>
# <details><summary>An approach</summary><code>torch.finfo(dtype).max</code>, <code>clamp</code>, <code>to</code>. What does <code>clamp</code> do to NaN? Try it.</details>


# %%
@fill
def cast_saturating(x, dtype):
    ### BEGIN SOLUTION
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype)  # clamp keeps NaN; every float16 and bfloat16 is a float32
    ### END SOLUTION


# %%
check(cast_saturating)

# %% [markdown]
# ---
# ## What you built
#
# A race over four million numbers: your two rounders, yours compiled, and what the libraries do. Copying the numbers is the ceiling: nothing that reads and writes them can be faster.

# %%
x = torch.randn(4_000_000, generator=torch.Generator().manual_seed(5)) * 100
out = torch.empty_like(x)
fused = compiled(fast_round_to, E4M3)
fused(x, out)  # the first call compiles
race(
    {
        "copy": lambda: out.copy_(x),
        "fast_round_to, compiled": lambda: fused(x, out),
        "fast_round_to": lambda: fast_round_to(x, E4M3, out),
        "torch's cast and back": lambda: x.to(torch.float8_e4m3fn).float(),
        "round_to": lambda: round_to(x, E4M3),
    },
    rounds=5,
).plot(to="torch's cast and back")

# %% [markdown]
# Compiled, your rounder is close to the copy. You will need it: from chapter 08 on it sits in front of every matrix product. But first, what rounding does to the *sums* inside those products: [03 · Why is adding the hard part?](03_accumulation.ipynb)

# %%
progress()
