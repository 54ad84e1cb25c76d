# %% [markdown]
# # 02 · Rounding: which of the two neighbours?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 01](01_bit_layouts.ipynb): formats, codes, `decode`, `ulp`. **Gives** you a rounder for any format that is right on
# every float32 there is, in five modes, and one that runs at the speed of a memory copy.
#
# Put 0.1 into an E4M3 tensor and read it back: 0.1015625. E4M3 has a value just below 0.1 (0.09375) and one just above, and something chose the upper one. Put 464 in: some
# libraries give 448, one gives NaN, another gives 480, which is not even a value of the format. Who is right?

# %% tags=["setup"]
try:
    import math

    import numpy as np
    import torch

    from lowprec_lab import RoundingExplorer, check, fill, plots, progress, question, reveal
    from lowprec_lab.bits import NumberClass, bit_pattern, classify, decode, join_fields, max_finite, min_normal, min_subnormal, split_fields, ulp
    from lowprec_lab.formats import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FORMATS, FP16, FP32, TF32, Format
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
        truncate_to_bfloat16,
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
# | `nearest_even` | the nearer one; a tie goes to the one whose last bit is 0. This is what hardware does unless told otherwise |
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
# | mind | integer operations only; NaN stays NaN |
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
# | mind | integer operations only; NaN stays NaN (adding could carry it into the sign); above the largest value comes infinity, by the same carry |
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
# **Predict first:** a thousand numbers are summed in float64; before that each is truncated, or rounded, to BF16. By how much is the sum off? By half a step? By a thousand of them?

# %%
generator = torch.Generator().manual_seed(2)
numbers = torch.rand(1000, generator=generator) + 1  # from 1 to 2, where a step of BF16 is 2^-7
for name, function in (("truncated", truncate_to_bfloat16), ("rounded", round_to_bfloat16)):
    error = function(numbers).double().sum() - numbers.double().sum()
    print(f"{name:10} the sum is off by {float(error) / 2**-7:8.1f} steps")

# %% [markdown]
# Errors of rounding have both signs and mostly cancel. Errors of truncation all point the same way and add up, half a step each. A mode is not a detail.
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
# 3. NaN stays NaN. -0.0 stays -0.0 (in fnuz formats, which have no -0, it becomes 0.0).
# 4. A format without zero (E8M0) gives its smallest value for anything smaller. A format without sign gives NaN for numbers below zero.
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
        raise ValueError(f"mode is one of {MODES} and overflow 'saturate' or 'to_special', not {mode!r} and {overflow!r}")
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
# **Predict first:** the mean of many numbers between 0.9 and 1.1, each rounded to E4M3. Which modes get the mean right? Which ones are off, and by how much of a step? (Between 1 and 2 a step is 0.125, below 1 it is half of that.)

# %%
numbers = 0.9 + 0.2 * torch.rand(100_000, generator=torch.Generator().manual_seed(3))
for mode in MODES:
    drift = round_to(numbers, E4M3, mode).double().mean() - numbers.double().mean()
    print(f"{mode:13} the mean is off by {float(drift):+.4f}")

# %% [markdown]
# **The same inputs in the libraries that are installed here.** Every row is a case that somebody got wrong in public.

# %%
casts([464.0, 464.00003, 1e6, math.inf, math.nan, -0.0, 2**-10, 1.0625, 1.8131605, 4.25, 0.000538887, 1.0625001], E4M3)

# %% [markdown]
# Where two libraries differ, ask what their *policy* is. torch 2.13 saturates E4M3 and sends E5M2 to infinity; earlier versions gave NaN for both kinds of E4M3 overflow. You cannot see that in the code that calls the cast. That is why your function
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
# for subnormals. Both cases are one formula: (e + bias) * 2^m + steps - 2^m. Then the sign, then infinity and NaN.</details>


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
# The noise is an argument. So your function has no state, and it can be checked exactly: over all possible noises the mean is x.
#
# | | |
# |---|---|
# | in | `x`: float32 tensor; `fmt`; `noise`: float32 tensor of the same shape, multiples of 2^-23 in [0, 1); `overflow` |
# | out | float32 tensor: with neighbours lo <= abs(x) < hi, hi exactly when noise < (abs(x) - lo) / (hi - lo), else lo; with the sign of x |
# | mind | values of the format never move; subnormals are as fair as all others; overflow is decided last |
#
# By hand, E4M3, x = 1.03125: lo is 1, hi is 1.125, and x is a quarter of the way. Noise 0.24 gives 1.125, noise 0.25 gives 1.0.
#
# There are two ways to use the noise, and both are fair: compare it with the fraction, or add it and cut. They disagree for half of all noises, so the contract fixes the first. Adding has a trap as well: in float32, 15 + (1 - 2^-24) is 16.
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
