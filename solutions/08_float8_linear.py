# %% [markdown]
# # 08 · FP8 linear: which casts does a linear layer need?

# %% tags=["setup"]
import torch
from dataclasses import replace
from lowprec_lab import check, fill, plots, progress, question, reveal
from lowprec_lab.quantizer import dequantize, quantize
from lowprec_lab.float8_linear import *


# %%
@fill
def cast_both_ways(x, forward, backward):
    ### BEGIN SOLUTION
    def seen(tensor, cast):
        return tensor.clone() if cast is None else dequantize(quantize(tensor, *cast))

    class BothWays(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return seen(x, forward)

        @staticmethod
        def backward(ctx, gradient):
            return seen(gradient, backward)

    return BothWays.apply(x)
    ### END SOLUTION


# %%
check(cast_both_ways)


# %%
@fill
def make_recipe(granularity, forward, backward, power_of_two, high_precision):
    ### BEGIN SOLUTION
    def casts(product, *operands):
        if product in high_precision:
            return None, None
        return tuple(
            Cast(fmt, "tensor" if granularity == "tensor" else lines, power_of_two) for fmt, lines in operands
        )

    return Recipe(
        "by rules",
        *casts("output", (forward, "row"), (forward, "row")),
        *casts("grad_x", (backward, "row"), (forward, "column")),
        *casts("grad_weight", (backward, "column"), (forward, "column")),
    )
    ### END SOLUTION


# %%
check(make_recipe)


# %%
@fill
def float8_matmul(a, b):
    ### BEGIN SOLUTION
    def values(q):  # laid out in memory as its codes are: the order of a sum, and its last bits, depend on that
        wide = replace(q, dtype=torch.float32)
        return dequantize(wide) if q.codes.is_contiguous() else dequantize(transpose(wide)).t()

    return torch.mm(values(a), values(b)).to(a.dtype)
    ### END SOLUTION


# %%
check(float8_matmul)


# %%
@fill
def float8_linear_forward(x, weight, recipe):
    ### BEGIN SOLUTION
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # (M, K)
    if recipe.x is None:
        output = torch.mm(rows, weight.t().to(x.dtype))
    else:
        output = float8_matmul(quantize(rows, *recipe.x), transpose(quantize(weight, *recipe.weight)))
    return output.reshape(*x.shape[:-1], weight.shape[0])
    ### END SOLUTION


# %%
check(float8_linear_forward)


# %%
@fill
def float8_linear_backward(grad_output, x, weight, recipe, needs=(True, True)):
    ### BEGIN SOLUTION
    m = math.prod(x.shape[:-1])
    gradient, rows = grad_output.reshape(m, len(weight)), x.reshape(m, x.shape[-1])  # (M, N), (M, K)
    grad_x = grad_weight = None
    if needs[0] and recipe.grad_output is None:
        grad_x = torch.mm(gradient, weight.to(gradient.dtype))
    elif needs[0]:
        grad_x = float8_matmul(quantize(gradient, *recipe.grad_output), quantize(weight, *recipe.weight_for_grad_x))
    if needs[1] and recipe.grad_output_for_grad_weight is None:
        grad_weight = torch.mm(gradient.t(), rows.to(gradient.dtype))
    elif needs[1]:
        left = transpose(quantize(gradient, *recipe.grad_output_for_grad_weight))
        grad_weight = float8_matmul(left, quantize(rows, *recipe.x_for_grad_weight))
    return grad_x if grad_x is None else grad_x.reshape(x.shape), grad_weight
    ### END SOLUTION


# %%
check(float8_linear_backward)


# %%
@fill
class Float8Linear(torch.nn.Linear):
    def __init__(self, in_features, out_features, bias=True, recipe="tensorwise"):
        ### BEGIN SOLUTION
        super().__init__(in_features, out_features, bias=bias)
        self.recipe = find_recipe(recipe)
        ### END SOLUTION

    @classmethod
    def from_linear(cls, linear, recipe="tensorwise"):
        ### BEGIN SOLUTION
        with torch.device("meta"):  # no memory for weights that are replaced at once
            layer = cls(linear.in_features, linear.out_features, linear.bias is not None, recipe)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        output = self.Products.apply(x, self.weight, self.recipe)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, recipe):
            ctx.save_for_backward(x, weight)
            ctx.recipe = recipe
            return float8_linear_forward(x, weight, recipe)

        @staticmethod
        def backward(ctx, gradient):
            needs = ctx.needs_input_grad[:2]
            return *float8_linear_backward(gradient, *ctx.saved_tensors, ctx.recipe, needs), None
        ### END SOLUTION


# %%
check(Float8Linear)


# %%
@fill
def why_not_float8(name, out_features, in_features, rows, recipe, skip=()):
    ### BEGIN SOLUTION
    summed_over_rows = find_recipe(recipe).x_for_grad_weight is not None
    if any(text in name for text in skip):
        return "by name"
    if in_features % 16 or out_features % 16 or summed_over_rows and rows % 16:
        return "does not divide"
    if recipe == "tensorwise":
        small = in_features <= 4096 and out_features <= 1024
    else:
        small = out_features <= 2048 or in_features <= 1024 or out_features <= 4096 and in_features <= 2048
    return "too small" if small else ""
    ### END SOLUTION


# %%
check(why_not_float8)

# %%
progress()
