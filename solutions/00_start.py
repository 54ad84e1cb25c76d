# %% tags=["setup"]
import torch
from lowprec_lab import check, fill
from lowprec_lab.start import sign_bit


# %%
@fill
def sign_bit(x):
    ### BEGIN SOLUTION
    return torch.signbit(x).to(torch.int32)
    ### END SOLUTION


# %%
check(sign_bit)
