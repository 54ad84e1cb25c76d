# %% [markdown]
# # 04 · Autocast: who decides the dtype?

# %% tags=["setup"]
import torch

from lowprec_lab import check, fill
from lowprec_lab.autocast import op_name
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


# %%
@fill
def bf16_loss(model, x, y, device_type):
    ### BEGIN SOLUTION
    with torch.autocast(device_type, dtype=torch.bfloat16):
        logits, loss = model(x, y)
    return loss
    ### END SOLUTION


# %%
check(bf16_loss)


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


# %%
@fill
def cast_policy(op, device_type):
    ### BEGIN SOLUTION
    products = "linear matmul mm bmm addmm baddbmm conv1d conv2d prelu scaled_dot_product_attention"
    losses = "nll_loss mse_loss kl_div prod"
    tables = {
        "cpu": {
            "lower precision": products,
            "fp32": f"{losses} cross_entropy_loss",
            "promote": "cat stack",
        },
        "cuda": {
            "lower precision": f"{products} mv",
            "fp32": f"{losses} softmax log_softmax layer_norm rms_norm group_norm exp log pow rsqrt softplus "
            "logsumexp sum cumsum",
            "promote": "addcmul addcdiv atan2 dot",
        },
    }
    if device_type not in tables:
        raise ValueError(f"no table for {device_type!r}")
    found = (policy for policy, ops in tables[device_type].items() if op in ops.split())
    return next(found, "as is")
    ### END SOLUTION


# %%
check(cast_policy)


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
            self.cache[value] = value.to(dtype)  # a tensor as a key is found by its identity
        return self.cache[value]

    def __exit__(self, *error):
        self.cache.clear()  # an optimizer may change the weights before the next block
        return super().__exit__(*error)

    ### END SOLUTION


# %%
check(MiniAutocast)


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
