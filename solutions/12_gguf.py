# %% [markdown]
# # 12 · GGUF: how do 4.5 bits hold a weight?
#
# **Takes** 6 to 7 hours. **Needs** [chapter 01](01_bit_layouts.ipynb): codes and bits; [chapter 07](07_quantizer.ipynb): amax and granularity; [chapter 11](11_fp8_inference.ipynb): what a served model is measured by. A C compiler for two of its exercises. **Gives** you the blocks of llama.cpp in Python and in C, byte for byte, and your own GPT as a GGUF file.
#
# Chapter 11 went from 32 bits to 8, with one scale for each row. Below 8 bits a row is too much for one scale: a single large number makes the step so wide that all its neighbours fall to a handful of codes. llama.cpp cuts each row into **blocks** of 32 numbers, and gives each of them a scale of its own. The files that people load to run a large model on a laptop are made of these blocks, one after the other.

# %% tags=["setup"]
try:
    import torch

    from lowprec_lab import check, fill, progress, question, reveal
    from lowprec_lab.gguf_blocks import BLOCK, LAYOUTS, as_blocks, quantize_q8_0
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None

# %% [markdown]
# ---
# ## Blocks of 32
#
# ### Exercise 12.1 · `quantize_q8_0` · 30 min · medium · 3 points
#
# | | |
# |---|---|
# | in | `x`: (..., n) float32 |
# | out | uint8, (..., n / 32 · 34) |


# %%
@fill
def quantize_q8_0(x):
    ### BEGIN SOLUTION
    blocks = as_blocks(x)
    d = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = 1 / d
    scaled = torch.where(d.isfinite() & inverse.isfinite(), blocks * inverse, 0.0)
    whole = scaled.trunc()
    codes = whole + ((scaled - whole).abs() >= 0.5) * scaled.sign()  # torch.round would send half-way to even
    return torch.cat([d.half().view(torch.uint8), codes.to(torch.int8).view(torch.uint8)], -1).flatten(-2)
    ### END SOLUTION


# %%
check(quantize_q8_0)

# %% [markdown]
# ---
# ## Blocks of 32, in C

# %% [markdown]
# ---
# ## Blocks of 256

# %%
progress()
