# %% [markdown]
# # 10 · FP8 nanoGPT: what does FP8 cost a GPT?
#
# **Takes** 4 to 5 hours. **Needs** [chapter 08](08_float8_linear.ipynb): `Float8Linear` and its recipes.

# %% tags=["setup"]
try:
    import math
    from dataclasses import replace

    import torch

    from lowprec_lab import check, fill, plots, progress, question, reveal
    from lowprec_lab.bits import max_finite
    from lowprec_lab.data import load_corpus, step_generator
    from lowprec_lab.float8_linear import RECIPES, Float8Linear, float8_matmul, transpose
    from lowprec_lab.formats import E4M3, E5M2
    from lowprec_lab.gpt import GPT, GPTConfig, preset
    from lowprec_lab.quantizer import Quantized, absmax, quantize
    from lowprec_lab.recipes import (
        DelayedScaling,
        convert_to_float8,
        delayed_linear,
        delayed_update,
        float8_layer,
        loss_gap,
        padded_linear,
        require_recipe,
        scalings_of,
        training_step,
    )
    from lowprec_lab.rounding import cast_saturating, encode
    from lowprec_lab.scaled_mm import pad_to_multiple
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed in this kernel. In a terminal, go to the folder of the course and type `make lab`. "
        "It makes an environment and opens JupyterLab in it. (On Windows and on Colab: see README.md.)"
    ) from None


# %%
@fill
def delayed_update(history, scale, fmt, margin=0, algo="max"):
    ### BEGIN SOLUTION
    if algo not in ("max", "most_recent"):
        raise ValueError(f"algo is 'max' or 'most_recent', not {algo!r}")
    amax = history.max() if algo == "max" else history[0]
    largest = torch.tensor(max_finite(fmt) * 2.0**-margin, device=history.device)
    new = torch.div(largest, amax).clamp(max=torch.finfo(torch.float32).max)
    usable = (amax > 0) & amax.isfinite()
    moved = torch.cat([history[1:], history[:1]])  # history[1:] is the oldest to the newest before, then this step's
    moved[0] = 0
    return moved, torch.where(usable, new, scale)
    ### END SOLUTION


# %%
check(delayed_update)


# %%
@fill
class DelayedScaling:
    def __init__(self, fmt, length=1024, margin=0, algo="max"):
        ### BEGIN SOLUTION
        self.fmt, self.margin, self.algo = fmt, margin, algo
        self.history, self.scale = torch.zeros(length), torch.tensor(1.0)
        ### END SOLUTION

    def quantize(self, x, record=True):
        ### BEGIN SOLUTION
        x = x.detach()
        if record:
            self.history[0] = torch.maximum(self.history[0], absmax(x).float())  # NaN wins
        scale = self.scale.clone()
        scaled = x.float() * scale
        native = self.fmt.torch_dtype is not None and self.fmt.torch_dtype.itemsize == 1 and self.fmt.signed
        if native:
            codes = cast_saturating(scaled, self.fmt.torch_dtype).view(torch.uint8)
        else:
            codes = encode(scaled, self.fmt).to(torch.uint8)
        return Quantized(codes, scale, self.fmt, "tensor", x.dtype)
        ### END SOLUTION

    def update(self):
        ### BEGIN SOLUTION
        history, scale = delayed_update(self.history, self.scale, self.fmt, self.margin, self.algo)
        self.history.copy_(history)
        self.scale.copy_(scale)
        ### END SOLUTION

    def state_dict(self):
        ### BEGIN SOLUTION
        return {"history": self.history.clone(), "scale": self.scale.clone()}
        ### END SOLUTION

    def load_state_dict(self, state):
        ### BEGIN SOLUTION
        if state["history"].shape != self.history.shape:
            raise ValueError(
                f"the saved history has {len(state['history'])} steps, and this one keeps {len(self.history)}"
            )
        self.history.copy_(state["history"])
        self.scale.copy_(state["scale"])
        ### END SOLUTION


# %%
check(DelayedScaling)


# %%
@fill
def delayed_linear(x, weight, scalings, record=True):
    ### BEGIN SOLUTION
    scaling_x, scaling_weight, scaling_gradient = scalings

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, weight):
            x8, weight8 = scaling_x.quantize(rows, record), scaling_weight.quantize(weight, record)
            ctx.save_for_backward(x8.codes, x8.scale, weight8.codes, weight8.scale)
            ctx.formats = x8.fmt, weight8.fmt
            return float8_matmul(x8, transpose(weight8))

        @staticmethod
        def backward(ctx, gradient):
            x_codes, x_scale, weight_codes, weight_scale = ctx.saved_tensors
            gradient8 = scaling_gradient.quantize(gradient, record)
            grad_x = grad_weight = None
            if ctx.needs_input_grad[0]:
                weight8 = Quantized(weight_codes, weight_scale, ctx.formats[1], "tensor", gradient.dtype)
                grad_x = float8_matmul(gradient8, weight8)
            if ctx.needs_input_grad[1]:
                x8 = Quantized(x_codes, x_scale, ctx.formats[0], "tensor", gradient.dtype)
                grad_weight = float8_matmul(transpose(gradient8), x8)
            return grad_x, grad_weight

    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return Products.apply(rows, weight).reshape(*x.shape[:-1], weight.shape[0])
    ### END SOLUTION


# %%
check(delayed_linear)


# %%
@fill
def padded_linear(x, weight, linear, multiple=16):
    ### BEGIN SOLUTION
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    output = linear(pad_to_multiple(rows, multiple, (0, 1)), pad_to_multiple(weight, multiple, (0, 1)))
    return output[: rows.shape[0], : weight.shape[0]].reshape(*x.shape[:-1], weight.shape[0])
    ### END SOLUTION


# %%
check(padded_linear)


# %%
@fill
def convert_to_float8(model, recipe, skip=("head",)):
    ### BEGIN SOLUTION
    recipe = require_recipe(recipe)
    if type(model) is torch.nn.Linear:
        raise ValueError("the model is itself a linear layer: put it into a module, whose layers can be replaced")
    names = {}  # a layer -> its names, in the order in which they are met
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is torch.nn.Linear:
            names.setdefault(module, []).append(name)
    converted = []
    for linear, places in names.items():
        if any(text in name for text in skip for name in places):
            continue
        layer = float8_layer(linear, recipe)
        for name in places:
            model.set_submodule(name, layer)
        converted.append(places[0])
    return converted
    ### END SOLUTION


# %%
check(convert_to_float8)


# %%
@fill
def training_step(model, batches, optimizer, scalings=(), clip=1.0):
    ### BEGIN SOLUTION
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for x, y in batches:
        loss = model(x, y)[1] / len(batches)
        loss.backward()
        total += float(loss)
    norm = float(torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]))
    if clip and norm > clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, torch.tensor(norm))
    if math.isfinite(norm):
        optimizer.step()
    model.zero_grad(set_to_none=True)
    for scaling in scalings:
        scaling.update()
    return total, norm
    ### END SOLUTION


# %%
check(training_step)


# %%
@fill
def loss_gap(run, baseline):
    ### BEGIN SOLUTION
    theirs = dict(baseline)
    gaps = [loss / theirs[seed] - 1 for seed, loss in run if seed in theirs]
    if not gaps:
        raise ValueError("no seed is in both: only runs that saw the same batches can be compared")
    mean = sum(gaps) / len(gaps)
    if len(gaps) == 1:
        return mean, math.nan
    variance = sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)
    return mean, math.sqrt(variance / len(gaps))
    ### END SOLUTION


# %%
check(loss_gap)
