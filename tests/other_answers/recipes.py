"""Other right answers to the exercises of chapter 10."""

import math
from dataclasses import replace

import numpy as np
import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.bits import max_finite
from lowprec_lab.float8_linear import float8_matmul, transpose
from lowprec_lab.quantizer import Quantized, absmax, dequantize
from lowprec_lab.recipes import NAMES, delayed_update, float8_layer
from lowprec_lab.rounding import encode, round_to

# --- 10.1 delayed_update ---


@other("delayed_update")
def with_lists(history, scale, fmt, margin=0, algo="max"):
    amaxes = history.tolist()
    if algo == "max":
        amax = math.nan if any(map(math.isnan, amaxes)) else max(amaxes)
    elif algo == "most_recent":
        amax = amaxes[0]
    else:
        raise ValueError(f"{algo!r} is neither 'max' nor 'most_recent'")
    new = scale.clone()
    if amax > 0 and math.isfinite(amax):
        new = torch.tensor(math.ldexp(max_finite(fmt), -margin)) / torch.tensor(amax)
        if new.isinf():
            new = torch.tensor(torch.finfo(torch.float32).max)
    return torch.tensor([0.0, *amaxes[2:], *amaxes[:1]][: len(amaxes)]), new


@other("delayed_update")
def rolled(history, scale, fmt, margin=0, algo="max"):
    try:
        amax = {"max": history.amax(), "most_recent": history[0].clone()}[algo]
    except KeyError:
        raise ValueError(f"{algo!r} is unknown; max and most_recent are known") from None
    with np.errstate(all="ignore"):  # float64 has more than twice the bits: rounding twice changes no quotient
        quotient = np.float64(max_finite(fmt) / 2.0**margin) / np.float64(amax.item())
        found = torch.tensor(float(np.float32(quotient)))
    if not (0 < amax < math.inf):
        found = scale.clone()
    elif found == math.inf:
        found = torch.tensor(3.4028234663852886e38)
    moved = torch.roll(history, -1)
    moved[0] = 0.0
    return moved, found


# --- 10.2 DelayedScaling ---


@other("DelayedScaling")
class WithRoundTo:
    """Values first, codes from them: rounding twice to the same format changes nothing."""

    def __init__(self, fmt, length=1024, margin=0, algo="max"):
        self.settings = fmt, margin, algo
        self.history = torch.zeros(length, dtype=torch.float32)
        self.scale = torch.ones((), dtype=torch.float32)

    @torch.no_grad()
    def quantize(self, x, record=True):
        fmt = self.settings[0]
        values = round_to(x.to(torch.float32) * self.scale, fmt)
        if record and x.numel():
            amax = x.abs().max().to(torch.float32)
            if not amax <= self.history[0]:  # larger, or NaN
                self.history[0] = amax if not self.history[0].isnan() else self.history[0]
        return Quantized(encode(values, fmt).to(torch.uint8), self.scale * 1.0, fmt, "tensor", x.dtype)

    def update(self):
        fmt, margin, algo = self.settings
        history, scale = delayed_update(self.history, self.scale, fmt, margin, algo)
        self.load_state_dict({"scale": scale, "history": history})

    def state_dict(self):
        return {name: getattr(self, name).detach().clone() for name in ("history", "scale")}

    def load_state_dict(self, state):
        if len(state["history"]) != len(self.history):
            raise ValueError(f"{len(state['history'])} steps do not fit into {len(self.history)}")
        for name, value in state.items():
            getattr(self, name).copy_(value)


@other("DelayedScaling")
class OnAModule(torch.nn.Module):
    """Buffers of a module, which has a state_dict of its own."""

    def __init__(self, fmt, length=1024, margin=0, algo="max"):
        super().__init__()
        self.fmt, self.how = fmt, (margin, algo)
        self.register_buffer("history", torch.zeros(length))
        self.register_buffer("scale", torch.tensor(1.0))

    def quantize(self, x, record=True):
        x = x.detach()
        scale = self.scale.clone()
        codes = encode(x.float().mul(scale), self.fmt).to(torch.uint8)
        if record:
            both = torch.stack((self.history[0], absmax(x).float()))
            self.history[:1] = both.amax()
        return Quantized(codes, scale, self.fmt, "tensor", x.dtype)

    def update(self):
        new = delayed_update(self.history, self.scale, self.fmt, *self.how)
        for mine, theirs in zip((self.history, self.scale), new, strict=True):
            mine[...] = theirs

    def state_dict(self):
        return {name: value.clone() for name, value in self.named_buffers()}

    def load_state_dict(self, state):
        if state["history"].numel() != self.history.numel():
            raise ValueError(f"a history of {state['history'].numel()}, and {self.history.numel()} are kept here")
        self.history[:] = state["history"]
        self.scale.fill_(state["scale"])


# --- 10.3 delayed_linear ---


@other("delayed_linear")
def with_values_that_are_kept(x, weight, scalings, record=True):
    of_x, of_weight, of_gradient = scalings

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
            pairs = ((of_x, rows), (of_weight, weight))
            ctx.wide = [dequantize(scaling.quantize(each.float(), record)) for scaling, each in pairs]
            ctx.shape = x.shape
            output = torch.mm(ctx.wide[0], ctx.wide[1].t()).to(x.dtype)
            return output.reshape(*x.shape[:-1], len(weight))

        @staticmethod
        def backward(ctx, gradient):
            rows = gradient.reshape(len(ctx.wide[0]), gradient.shape[-1])
            back = dequantize(of_gradient.quantize(rows.float(), record))
            grad_x = grad_weight = None
            if ctx.needs_input_grad[0]:
                grad_x = torch.mm(back, ctx.wide[1]).to(gradient.dtype).reshape(ctx.shape)
            if ctx.needs_input_grad[1]:
                grad_weight = torch.mm(ctx.wide[0].t(), back).t().to(gradient.dtype)
            return grad_x, grad_weight

    return Products.apply(x, weight)


@other("delayed_linear")
def quantized_before_the_function(x, weight, scalings, record=True):
    class WithGiven(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, weight, rows8, weight8):
            ctx.kept = rows8, weight8
            return float8_matmul(rows8, transpose(weight8))

        @staticmethod
        def backward(ctx, gradient):
            rows8, weight8 = (replace(each, dtype=gradient.dtype) for each in ctx.kept)
            gradient8 = scalings[2].quantize(gradient, record)
            return (
                float8_matmul(gradient8, weight8) if ctx.needs_input_grad[0] else None,
                float8_matmul(transpose(gradient8), rows8) if ctx.needs_input_grad[1] else None,
                None,
                None,
            )

    lines = math.prod(x.shape[:-1])
    rows = x.reshape(lines, x.shape[-1])
    quantized = [scaling.quantize(each, record) for scaling, each in zip(scalings[:2], (rows, weight), strict=True)]
    return WithGiven.apply(rows, weight, *quantized).reshape(*x.shape[:-1], len(weight))


# --- 10.4 padded_linear ---


@other("padded_linear")
def with_larger_zeros(x, weight, linear, multiple=16):
    k, n = x.shape[-1], weight.shape[0]
    m = math.prod(x.shape[:-1])
    tall, deep, wide = (-(-size // multiple) * multiple for size in (m, k, n))
    rows, larger = x.new_zeros(tall, deep), weight.new_zeros(wide, deep)
    rows[:m, :k], larger[:n, :k] = x.reshape(m, k), weight
    return linear(rows, larger).narrow(0, 0, m).narrow(1, 0, n).reshape(x.shape[:-1] + (n,))


@other("padded_linear")
def zeros_before(x, weight, linear, multiple=16):
    # Zeros may stand anywhere, as long as x and weight have them in the same places of the sum.
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    before = [(-size) % multiple for size in (flat.shape[0], flat.shape[1], weight.shape[0])]
    output = linear(
        torch.nn.functional.pad(flat, (before[1], 0, before[0], 0)),
        torch.nn.functional.pad(weight, (before[1], 0, before[2], 0)),
    )
    return output[before[0] :, before[2] :].reshape(*x.shape[:-1], weight.shape[0])


# --- 10.5 convert_to_float8 ---


@other("convert_to_float8")
def by_parents(model, recipe, skip=("head",)):
    if recipe not in NAMES and isinstance(recipe, str):
        raise ValueError(f"{recipe!r} is none of {', '.join(NAMES)}")
    if type(model) is torch.nn.Linear:
        raise ValueError("there is nothing around this layer")
    stays = set()
    for name, layer in model.named_modules(remove_duplicate=False):
        if any(name.count(text) for text in skip):
            stays.add(id(layer))
    made, names = {}, []
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if type(layer) is not torch.nn.Linear or id(layer) in stays:
            continue
        if id(layer) not in made:
            made[id(layer)] = layer, float8_layer(layer, recipe)  # the old layer is kept: else its id may come again
            names.append(name)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made[id(layer)][1])
    return names


@other("convert_to_float8")
def by_slots(model, recipe, skip=("head",)):
    if type(model) is torch.nn.Linear:
        raise ValueError("a model is more than a linear layer")
    float8_layer(torch.nn.Linear(1, 1), recipe)  # raises for an unknown recipe

    names = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        names.setdefault(layer, []).append(name)
    chosen = {
        layer: float8_layer(layer, recipe)
        for layer, own in names.items()
        if layer.__class__ is torch.nn.Linear and not any(text in name for name in own for text in skip)
    }
    for parent in list(model.modules()):
        for own, child in list(parent.named_children()) + list(parent._modules.items()):
            if child in chosen:
                parent._modules[own] = chosen[child]
    return [names[layer][0] for layer in chosen]


# --- 10.6 training_step ---


@other("training_step")
def with_clip_grad_norm(model, batches, optimizer, scalings=(), clip=1.0):
    model.zero_grad()
    losses = [model(x, y)[1] for x, y in batches]
    mean = torch.stack(losses).mean()
    mean.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()
    for scaling in scalings:
        scaling.update()
    return mean.item(), norm.item()


@other("training_step")
def by_hand(model, batches, optimizer, scalings=(), clip=1.0):
    optimizer.zero_grad()
    total = 0.0
    for x, y in batches:
        _, loss = model(x, y)
        loss.backward()
        total += loss.item()
    with torch.no_grad():
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient /= len(batches)
        norm = (
            math.sqrt(math.fsum(gradient.double().square().sum().item() for gradient in gradients))
            if all(bool(gradient.isfinite().all()) for gradient in gradients)
            else float(sum(gradient.abs().sum() for gradient in gradients))
        )
        if 0 < clip < norm < math.inf:
            for gradient in gradients:
                gradient *= clip / norm
    if norm < math.inf:
        optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None
    for k in range(len(scalings)):
        scalings[k].update()
    return total / len(batches), norm


# --- 10.7 loss_gap ---


@other("loss_gap")
def with_statistics(run, baseline):
    import statistics

    ours, theirs = dict(run), dict(baseline)
    common = sorted(set(ours) & set(theirs))
    if len(common) == 0:
        raise ValueError("nothing to compare")
    gaps = [(ours[seed] - theirs[seed]) / theirs[seed] for seed in common]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
    return statistics.fmean(gaps), error


@other("loss_gap")
def with_a_tensor(run, baseline):
    pairs = [(a, b) for s, a in run for t, b in baseline if s == t]
    if not pairs:
        raise ValueError("the runs have no seed in common")
    mine, other_ones = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    gaps = mine / other_ones - 1
    error = gaps.std(unbiased=True) / math.sqrt(len(gaps)) if len(pairs) > 1 else torch.tensor(math.nan)
    return gaps.mean().item(), float(error)
