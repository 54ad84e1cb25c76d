# %% [markdown]
# # 00 · How this lab works
#
# **Takes** 20 minutes. **Needs** Python, a little torch, nothing else. **Gives** you a lab that works, and your first saved answer.
#
# Is -0.0 a negative number? Python says that it equals 0.0. Yet it is stored with its sign bit set, it prints a minus sign, and
# in torch `1 / -0.0` is minus infinity. If you compare *values* you get one answer, and if you look at *bits* another. In low precision that
# difference matters soon: to round, scale or pack numbers by hand is to work on bits.
#
# In this course you write a small package, `lowprec_lab`, function by function. Every function is judged at once, bit for bit. At the
# end a GPT trains in 8-bit floating point on the code that you wrote. This page shows how the lab works, on the smallest function there is.
#
# Run each cell with **Shift+Enter**, from top to bottom. The first one gets the tools.

# %% tags=["setup"]
try:
    import math

    import numpy as np
    import torch

    from lowprec_lab import BitExplorer, check, doctor, fill, progress, question, reveal
    from lowprec_lab.start import sign_bit
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %% [markdown]
# ## What this machine can do
#
# The `doctor` looks at your machine: which precisions it runs in hardware, which ones the lab emulates, and why. Everything in this course works on a
# laptop without a GPU. Where there is a GPU with FP8 units, the same pages use it. Nothing in the table stops you, whatever it says: *emulated* means slower, not wrong.

# %%
doctor()

# %% [markdown]
# ## The bits of a number
#
# Below are the 32 bits of a float32: one **sign** bit, eight **exponent** bits, 23 **mantissa** bits. (Some books say *significand* for mantissa; this
# course says mantissa.) Click a bit, or move with the arrow keys and press space. Type a number of your own into the field.
#
# Then find the two bit patterns of zero: type `0`, look at the value, and flip the sign bit. (The two menus say what becomes of numbers that lie between two values or beyond the largest.
# Leave them as they are; chapter 02 is about them.)

# %%
BitExplorer("float32", value=-0.0)

# %%
zeros = torch.tensor([0.0, -0.0])
print("equal:          ", bool(zeros[0] == zeros[1]))
print("less than zero: ", (zeros < 0).tolist())
print("one over it:    ", (1 / zeros).tolist())

# %% [markdown]
# Both zeros are equal, and neither is less than zero. No comparison tells them apart; the bits do.
#
# ### Exercise 0.1 · `sign_bit` · 10 min · easy · 1 point
#
# Write a function that gives the sign bit of every element of a tensor: 1 where it is set, 0 where it is not.
#
# The contract is the function's docstring: run `help(sign_bit)` in a cell of your own (the + button above makes one), or read it here at a glance:
#
# | | |
# |---|---|
# | in | `x`: float32 tensor of any shape |
# | out | int32 tensor of the same shape, of 0 and 1 |
# | mind | the sign bit is a bit, not a comparison with zero |
#
# By hand:
#
# | value | sign bit | `x < 0` says |
# |---|---|---|
# | 1.5 | 0 | False |
# | -1.5 | 1 | True |
# | -0.0 | **1** | **False** |
#
# **First do it wrong, on purpose.** Put `return (x < 0).to(torch.int32)` in place of the dots, run the cell, then run the one below it, and
# read the verdict: it says how many inputs went wrong, what your function behaves like, and the first input that shows it.
#
# Then make it right. You may run both cells as often as you like.
#
# <details><summary>A nudge</summary>
#
# Which function of torch looks at the sign bit itself? Or: which integer has the same 32 bits as the number, and when is that integer negative?
#
# </details>
# <details><summary>An approach</summary>
#
# `x.view(torch.int32)` reads the same bits as whole numbers: the number is negative exactly when the topmost bit is set. Shifting right by 31 moves that bit
# to the lowest place, but copies it on the way (-1, not 1), so mask it with `& 1`. torch also has a function whose name is the answer.
#
# </details>


# %%
@fill
def sign_bit(x):
    ### BEGIN SOLUTION
    return torch.signbit(x).to(torch.int32)
    ### END SOLUTION


# %%
check(sign_bit)

# %% [markdown]
# ## What just happened
#
# - `@fill` made your function live at once: wherever the package calls `sign_bit`, it now runs your code, right or wrong. Until you write it something else stands in,
#   and says so: the *reference* (the course's own answer, where it is installed), else the *exact oracle* (the calculation that answers are compared with).
# - `check` tried it on thousands of inputs, the awkward ones included, and compared every bit with an exact calculation that shares nothing with your code.
# - When it passed, your cell was saved in `work/answers/start.py`. It is a plain Python file, and yours. Later failures do not touch it.
# - The page itself is yours as well: the released pages in `notebooks/` stay as they are, and your copies live in `work/`. After an update, `lowprec-lab open 00`
#   gives you the new page with your cells in it, and keeps the old page.
#
# An answer stands alone: it is saved, and judged later, without the rest of your page. An answer may use the imports of the first cell and your earlier answers. What several answers share goes into
# the next cell, which is saved with them.

# %% tags=["helpers"]
# Your helpers: functions that more than one of your answers on this page uses.

# %% [markdown]
# ### Try it: your answer outlives the kernel
#
# Restart the kernel (menu *Kernel*, *Restart Kernel*), run only the first code cell of this page (the tools), and then the cell below this text. Your saved answer
# is in use; nothing else was run again.

# %%
sign_bit(torch.tensor([1.5, -1.5, 0.0, -0.0]))

# %% [markdown]
# `check` behaves the same way after a restart: it judges nothing that you have not run, and says which saved answer is in use.
#
# ## Questions along the way
#
# Pages also ask small questions, mostly about the source code of real libraries. Put your answer in place of the dots and run the cell.
#
# What does Python say to `-0.0 == 0.0`: `True` or `False`?

# %%
question(
    "0.A",
    ### BEGIN SOLUTION
    True,
    ### END SOLUTION
)

# %% [markdown]
# ## When you are stuck
#
# 1. Read the verdict's counter-example, and run its *try it* line in a cell of your own.
# 2. Open *A nudge*, then *An approach*.
# 3. `reveal(sign_bit)` shows the reference, where it is installed. It costs no points, but you learn most from what you wrote yourself.
# 4. If you think that a verdict is wrong, `check(sign_bit, report=True)` writes a small file with your code, the verdict and the versions, to send along.
#
# ## Which chapters need what
#
# | chapters | need |
# |---|---|
# | 00 to 03: bits, rounding, sums | any machine, no network |
# | 04 to 06: training in 16 bits | any machine; text for training is fetched once, and without network Python's own library is the text |
# | 07 to 10: training in FP8 | any machine (emulated); a GPU of compute capability 8.9 or more runs it natively |
# | 11 to 13: inference and block formats | any machine; a C compiler for half of chapter 12 |
# | 14 and 15: many machines, your own recipe | any machine: several processes on one will do |
#
# ## What you built
#
# The map of the chapters: what is done, and whose code runs for each exercise. Questions are for you alone and are not on it.

# %%
progress()

# %% [markdown]
# Next: [01 · What do 8 bits mean?](01_bit_layouts.ipynb) If it is not in your folder yet, type `lowprec-lab open 01` in a terminal.
