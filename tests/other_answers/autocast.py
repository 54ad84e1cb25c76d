"""Other right answers to the exercises of chapter 04."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_lab.autocast import op_name
from lowprec_lab.bench.other_answers import other

# --- 4.1 bf16_loss ---


@other("bf16_loss")
def with_a_decorator(model, x, y, device_type):
    @torch.autocast(device_type, torch.bfloat16)
    def forward():
        return model(x, targets=y)

    return forward()[1]


@other("bf16_loss")
def with_its_own_cross_entropy(model, x, y, device_type):
    from torch.nn.functional import cross_entropy

    with torch.amp.autocast(device_type=device_type, dtype=torch.bfloat16):
        logits = model(x, y)[0]
        return cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))


@other("bf16_loss")
def with_switches(model, x, y, device_type):
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, torch.bfloat16)
    try:
        return model(x, y)[-1]
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
        torch.clear_autocast_cache()


# --- 4.2 OpRecorder ---


@other("OpRecorder")
def around_a_mode():
    from torch import Tensor

    def flat(value):
        if isinstance(value, Tensor):
            return [value.dtype]
        if isinstance(value, dict):
            return flat(list(value.values()))
        return [dtype for each in value for dtype in flat(each)] if isinstance(value, (list, tuple)) else []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            outs = op(*args, **kwargs) if kwargs else op(*args)
            name = op.name().split("::")[1].split(".")[0]
            recorder.ops.append((name, tuple(flat(args) + flat(kwargs or {})), tuple(flat(outs))))
            return outs

    class Recorder:
        def __init__(self):
            self.ops, self.open = [], []

        def __enter__(self):
            self.open.append(Watch())
            self.open[-1].__enter__()
            return self

        def __exit__(self, *error):
            self.open.pop().__exit__(*error)

    recorder = Recorder()
    return recorder


@other("OpRecorder")
def with_tree_map():
    from torch.utils._pytree import tree_map_only

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ops = []

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ins, outs = [], []
            tree_map_only(torch.Tensor, lambda value: ins.append(value.dtype), [args, kwargs or {}])
            result = op(*args, **(kwargs or {}))
            tree_map_only(torch.Tensor, lambda value: outs.append(value.dtype), result)
            self.ops.append((op._schema.name.removeprefix("aten::"), tuple(ins), tuple(outs)))
            return result

    return Recorder()


# --- 4.3 cast_policy ---


@other("cast_policy")
def with_sets(op, device_type):
    both = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "prelu"}
    both.add("scaled_dot_product_attention")
    single = {"nll_loss", "mse_loss", "kl_div", "prod"}
    if device_type == "cpu":
        lower, full, widest = both, single | {"cross_entropy_loss"}, {"cat", "stack"}
    elif device_type == "cuda":
        lower, widest = both | {"mv"}, {"addcmul", "addcdiv", "atan2", "dot"}
        full = single | {"softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "exp", "log", "pow"}
        full |= {"rsqrt", "softplus", "logsumexp", "sum", "cumsum"}
    else:
        raise ValueError(device_type)
    if op in lower:
        return "lower precision"
    return "fp32" if op in full else "promote" if op in widest else "as is"


@other("cast_policy")
def asks_torch(op, device_type):
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"{device_type} is neither cpu nor cuda")
    key = "AutocastCPU" if device_type == "cpu" else "AutocastCUDA"
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    if op not in {name.removeprefix("aten::").split(".")[0] for name in registered}:
        return "as is"
    if op in ("addcmul", "addcdiv", "atan2", "dot", "cat", "stack"):
        return "promote"
    products = op in ("linear", "prelu", "scaled_dot_product_attention") or op.endswith(("mm", "mv", "matmul"))
    return "lower precision" if products or op.startswith("conv") else "fp32"


# --- 4.4 MiniAutocast ---


@other("MiniAutocast")
def around_another_mode(policy, dtype=torch.bfloat16):
    from torch.overrides import TorchFunctionMode

    def tensors_in(value):
        if isinstance(value, torch.Tensor):
            return [value]
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return [tensor for part in parts for tensor in tensors_in(part)]

    def replaced(value, change):
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, dict):
            return {key: replaced(part, change) for key, part in value.items()}
        return type(value)(replaced(part, change) for part in value) if type(value) in (list, tuple) else value

    class Mode(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.kept = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            rule, kwargs = policy(op_name(function)), kwargs or {}
            if rule == "promote":
                kinds = [tensor.dtype for tensor in tensors_in([args, kwargs])]
                rule = "fp32" if torch.float32 in kinds else "as is"
            if rule != "as is":
                target = dtype if rule == "lower precision" else torch.float32
                args, kwargs = replaced((args, kwargs), lambda tensor: self.cast(tensor, target))
            return function(*args, **kwargs)

        def cast(self, tensor, target):
            if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) or tensor.dtype == target:
                return tensor
            for source, copy in self.kept:
                if source is tensor and copy.dtype == target:
                    return copy
            copy = tensor.to(target)
            if tensor.requires_grad and tensor.grad_fn is None and tensor.dtype == torch.float32:
                self.kept.append((tensor, copy))
            return copy

    class Autocast:
        def __enter__(self):
            self.mode = Mode()
            return self.mode.__enter__()

        def __exit__(self, *error):
            self.mode.__exit__(*error)

    return Autocast()


@other("MiniAutocast")
def with_two_tables(policy, dtype=torch.bfloat16):
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_flatten, tree_unflatten

    class Mode(TorchFunctionMode):
        weights = {}

        def __enter__(self):
            self.weights = {}
            return super().__enter__()

        def __exit__(self, kind, error, where):
            self.weights = {}
            super().__exit__(kind, error, where)

        def __torch_function__(self, function, types, args=(), kwargs=None):
            leaves, shape = tree_flatten((args, kwargs or {}))
            able = [
                n
                for n, leaf in enumerate(leaves)
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64
            ]
            kinds = {leaves[n].dtype for n in able}
            widest = torch.float32 if torch.float32 in kinds else None
            targets = {"lower precision": dtype, "fp32": torch.float32, "promote": widest}
            target = targets.get(policy(op_name(function)))
            for n in able if target is not None else ():
                leaves[n] = self.converted(leaves[n], target)
            args, kwargs = tree_unflatten(leaves, shape)
            return function(*args, **kwargs)

        def converted(self, leaf, target):
            if leaf.dtype == target:
                return leaf
            if leaf.dtype != torch.float32 or not leaf.requires_grad or not leaf.is_leaf:
                return leaf.to(target)
            if (id(leaf), target) not in self.weights:
                self.weights[id(leaf), target] = leaf.to(target)
            return self.weights[id(leaf), target]

    return Mode()


# --- 4.5 count_weight_casts ---


@other("count_weight_casts")
def by_counting_layers(model, x, passes, cache_enabled):
    count = 0
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            for parameter in layer.parameters():
                kept = cache_enabled and parameter.requires_grad
                count += min(passes, 1) if kept else passes
    return count


@other("count_weight_casts")
def by_their_memory(model, x, passes, cache_enabled):
    places = {parameter.data_ptr() for parameter in model.parameters()}
    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.aten._to_copy.default and args[0].data_ptr() in places:
                found.append(op)
            return op(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled), Watch():
        for _ in range(passes):
            model(x)
    return len(found)


# --- 4.6 survives_compile ---


@other("survives_compile")
def with_whole_numbers(f, x, compiler=torch.compile):
    left, right = f(x.detach().clone()), compiler(f)(x.detach().clone())
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [torch.where(value.isnan(), 0.5, value).contiguous() for value in (left, right)]
    nans = torch.equal(left.isnan(), right.isnan())
    kind = kinds[left.element_size()]
    return nans and torch.equal(bits[0].view(kind), bits[1].view(kind))


@other("survives_compile")
def with_numpy(f, x, compiler=torch.compile):
    import numpy as np

    one, two = f(torch.clone(x)), compiler(f)(torch.clone(x))
    if one.dtype is not two.dtype:
        return False
    one, two = one.double().numpy(), two.double().numpy()
    return (
        one.shape == two.shape
        and np.array_equal(one, two, equal_nan=True)
        and bool(np.array_equal(np.signbit(one) | np.isnan(one), np.signbit(two) | np.isnan(two)))
    )
