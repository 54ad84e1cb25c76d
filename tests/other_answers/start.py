"""Other right answers to the exercises of chapter 00."""

import math

import numpy as np
import torch

from lowprec_lab.bench.other_answers import other


@other("sign_bit")
def by_mask(x):
    return (x.view(torch.int32) >> 31) & 1


@other("sign_bit")
def by_negative_code(x):
    return (x.view(torch.int32) < 0).int()


@other("sign_bit")
def by_copysign(x):
    return (torch.copysign(torch.ones_like(x), x) == -1).to(torch.int32)


@other("sign_bit")
def by_numpy(x):
    return torch.tensor(np.signbit(x.numpy()).astype(np.int32))


@other("sign_bit")
def by_division_in_int64(x):
    unsigned = x.view(torch.int32).to(torch.int64) % 2**32
    return torch.div(unsigned, 2**31, rounding_mode="floor").to(torch.int32)


@other("sign_bit")
def by_half_words(x):
    halves = x.contiguous().reshape(-1).view(torch.int16).reshape(-1, 2)
    return (halves[:, 1] < 0).to(torch.int32).reshape(x.shape)


@other("sign_bit")
def by_bytes(x):
    import struct

    words = struct.unpack(f"<{x.numel()}I", x.contiguous().numpy().tobytes())
    return torch.tensor([word // 0x80000000 for word in words], dtype=torch.int32).reshape(x.shape)


@other("sign_bit")
def by_loop(x):
    bits = [0 if math.copysign(1.0, value) > 0 else 1 for value in x.reshape(-1).tolist()]
    return torch.tensor(bits, dtype=torch.int32).reshape(x.shape)
