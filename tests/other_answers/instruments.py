"""Other right answers to the exercises of chapter 05."""

import math

import numpy as np
import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.bits import bit_pattern, max_finite, min_normal, min_subnormal, ulp
from lowprec_lab.rounding import round_to

# --- 5.1 exponent_histogram ---


@other("exponent_histogram")
def by_frexp_in_float64(x):
    values = x.double().abs().reshape(-1)
    values = values[values.isfinite() & (values > 0)]
    exponents = torch.frexp(values).exponent.to(torch.int64) - 1
    return torch.bincount(exponents + 149, minlength=277)


@other("exponent_histogram")
def by_bits(x):
    bits = bit_pattern(x.float()).reshape(-1).to(torch.int64) & 0x7FFFFFFF
    bits = bits[(bits > 0) & (bits < 0x7F800000)]
    normal = bits[bits >= 2**23] // 2**23 + 22
    small = bits[bits < 2**23]
    place = sum(((small >= 2**power).to(torch.int64) for power in range(1, 23)), start=torch.zeros_like(small))
    return torch.bincount(torch.cat([normal, place]), minlength=277)


@other("exponent_histogram")
def by_search(x):
    starts = torch.pow(torch.tensor(2.0, dtype=torch.float64), torch.arange(-149, 129))
    values = x.double().abs().reshape(-1)
    values = values[values.isfinite() & (values > 0)]
    place = torch.searchsorted(starts, values, right=True) - 1
    counts = torch.zeros(277, dtype=torch.int64)
    return counts.index_add_(0, place, torch.ones_like(place))


# --- 5.2 underflow_fraction ---


@other("underflow_fraction")
def below_half_of_the_smallest(x, fmt, scale=1.0):
    if not 0 < scale < math.inf:
        raise ValueError("scale")
    x = x.float().reshape(-1)
    x = x[x.isfinite() & (x != 0)]
    if not x.numel() or not fmt.subnormals:
        return 0.0
    smallest = min_subnormal(fmt)
    limit = (min_normal(fmt) if smallest is None else smallest) / 2
    if limit == 2.0**-150:  # float32 itself: nothing lies between 0 and its smallest
        return (x * scale == 0).sum().item() / x.numel()
    return ((x * scale).abs().double() <= limit).sum().item() / x.numel()


@other("underflow_fraction")
def with_numpy(x, fmt, scale=1.0):
    if math.isnan(scale) or math.isinf(scale) or scale <= 0:
        raise ValueError("the scale is a finite number above zero")
    values = x.detach().to(torch.float32).numpy().ravel()
    values = np.abs(values[np.isfinite(values) & (values != 0)])
    with np.errstate(all="ignore"):
        scaled = values * np.float32(scale)
    rounded = round_to(torch.from_numpy(scaled), fmt).numpy()
    return int(np.count_nonzero(rounded == 0)) / max(1, len(values))


# --- 5.3 overflow_fraction ---


@other("overflow_fraction")
def by_rounding_where_it_shows(x, fmt, scale=1.0):
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError("scale")
    x = x.float().reshape(-1)
    scaled = (x[x.isfinite() & (x != 0)] * scale).abs()
    if fmt.specials != "finite":
        lost = ~round_to(scaled, fmt, overflow="to_special").isfinite()
    else:
        largest = max_finite(fmt)
        step = float(ulp(torch.tensor(largest), fmt))
        lost = scaled.double() >= largest + step / 2  # all ones: odd
    return int(lost.sum()) / scaled.numel() if scaled.numel() else 0.0


@other("overflow_fraction")
def by_the_step_at_the_top(x, fmt, scale=1.0):
    if not (0 < scale < math.inf):
        raise ValueError("scale")
    values = x.double().reshape(-1)
    values = values[values.isfinite() & values.ne(0)].float()
    top = max_finite(fmt)
    step = float(ulp(torch.tensor([top]), fmt)[0])
    steps = (values * scale).abs().double() / step
    return int((steps.round() > top / step).sum()) / max(len(values), 1)  # round() sends ties to the even one


# --- 5.4 tensor_report ---


@other("tensor_report")
def by_sorting(x):
    values = x.double().abs().reshape(-1)
    finite = values[values.isfinite()]
    ordered = finite[finite > 0].sort().values.tolist()
    zeros = int((finite == 0).sum())
    nonfinite = values.numel() - finite.numel()
    return (ordered[0], ordered[-1], zeros, nonfinite) if ordered else (0.0, 0.0, zeros, nonfinite)


@other("tensor_report")
def with_masks(x):
    size = x.abs()
    there = size.isfinite() & (size != 0)
    low, high = 0.0, 0.0
    if there.any():
        low = size.masked_fill(~there, math.inf).min().item()
        high = size.masked_fill(~there, 0).max().item()
    return low, high, torch.count_nonzero(x == 0).item(), torch.count_nonzero(~x.isfinite()).item()


# --- 5.5 gradient_norm ---


@other("gradient_norm")
def by_norms_of_norms(parameters):
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0


@other("gradient_norm")
def by_one_long_vector(parameters):
    parts = [p.grad.detach().double().flatten() for p in parameters if p.grad is not None]
    return float(torch.cat([torch.zeros(1, dtype=torch.float64), *parts]).norm())


@other("gradient_norm")
def by_dot_products(parameters):
    total = 0.0
    for parameter in parameters:
        if parameter.grad is not None:
            values = parameter.grad.double().reshape(-1)
            total += float(values @ values)
    return math.sqrt(total) if not math.isnan(total) else math.nan


# --- 5.6 update_ratio ---


@other("update_ratio")
def with_numpy_norms(before, after):
    old, new = (each.detach().double().numpy().ravel() for each in (before, after))
    moved, size = np.linalg.norm(new - old), np.linalg.norm(old)
    with np.errstate(all="ignore"):
        return float(moved / size) if size != 0 or moved != 0 else 0.0


@other("update_ratio")
def by_square_sums(before, after):
    old = before.double()
    moved = float((after.double() - old).square().sum())
    size = float(old.square().sum())
    if size == 0:
        return math.inf if moved > 0 else moved
    return math.sqrt(moved / size) if math.isfinite(moved / size) else moved / size


# --- 5.7 Taps ---


@other("Taps")
def by_wrapped_calls(model, names, measure=torch.clone):
    class Watching:
        over = False

        def __init__(self):
            self.activations = {name: [] for name in names}
            self.gradients = {name: [] for name in names}

        def __enter__(self):
            for name in names:
                model.get_submodule(name).forward = self.watched(name, model.get_submodule(name).forward)
            return self

        def __exit__(self, *error):
            for name in names:
                del model.get_submodule(name).forward
            self.over = True

        def watched(self, name, forward):
            def call(*args, **kwargs):
                output = forward(*args, **kwargs)
                self.activations[name].append(measure(output.detach()))
                self.gradients[name].append(None)
                index = len(self.gradients[name]) - 1
                if output.requires_grad:

                    def arrived(gradient):
                        if not self.over:
                            self.gradients[name][index] = measure(gradient.detach())

                    output.register_hook(arrived)
                return output

            return call

    return Watching()


@other("Taps")
def with_a_global_hook(model, names, measure=torch.clone):
    import contextlib

    class Watching(contextlib.ExitStack):
        def __init__(self):
            super().__init__()
            self.names = {model.get_submodule(name): name for name in names}
            self.activations, self.gradients = {n: [] for n in names}, {n: [] for n in names}

        def __enter__(self):
            handle = torch.nn.modules.module.register_module_forward_hook(self.called)
            self.callback(handle.remove)
            return self

        def called(self, module, args, output):
            name = self.names.get(module)
            if name is None:
                return
            own = self.gradients[name]
            place = len(own)
            self.activations[name].append(measure(output.detach()))
            own.append(None)
            if output.grad_fn is not None:
                handle = output.register_hook(lambda gradient: own.__setitem__(place, measure(gradient.detach())))
                self.callback(handle.remove)

    return Watching()


# --- 5.8 row_lengths ---


@other("row_lengths")
def by_vector_norm(x):
    return torch.linalg.vector_norm(x, dim=-1)


@other("row_lengths")
def root_of_some(x):
    total = x.square().sum(-1)
    there = total > 0
    lengths = torch.zeros_like(total)
    return lengths.masked_scatter(there, total[there].sqrt())


@other("row_lengths")
def with_a_gradient_of_its_own(x):
    class Lengths(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            length = x.square().sum(-1).sqrt()
            ctx.save_for_backward(x, length)
            return length

        @staticmethod
        def backward(ctx, gradient):
            x, length = ctx.saved_tensors
            return torch.where(length > 0, gradient / length, 0.0)[..., None] * x

    return Lengths.apply(x)
