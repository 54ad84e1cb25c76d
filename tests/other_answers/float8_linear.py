"""Other right answers to the exercises of chapter 08."""

from dataclasses import replace

import torch

from lowprec_lab.bench.other_answers import other
from lowprec_lab.bits import decode
from lowprec_lab.float8_linear import (
    RECIPES,
    Cast,
    Recipe,
    find_recipe,
    float8_linear_backward,
    float8_linear_forward,
    float8_matmul,
    transpose,
)
from lowprec_lab.quantizer import absmax, dequantize, quantize, scale_for, spread
from lowprec_lab.rounding import round_to

# --- 8.1 cast_both_ways ---


@other("cast_both_ways")
def with_a_copy_and_a_hook(x, forward, backward):
    copy = x.clone()  # its gradient is that of x
    if forward is not None:
        copy.detach().copy_(dequantize(quantize(x, *forward)))  # behind autograd's back
    if backward is not None and copy.requires_grad:
        copy.register_hook(lambda gradient: dequantize(quantize(gradient, *backward)))
    return copy


@other("cast_both_ways")
def two_functions_one_after_the_other(x, forward, backward):
    class There(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return dequantize(quantize(tensor, *forward))

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx, gradient):
            scale = spread(
                scale_for(absmax(gradient, backward.granularity), backward.fmt, power_of_two=backward.power_of_two),
                backward.granularity,
                gradient.shape,
            )
            return (round_to(gradient.float() * scale, backward.fmt) / scale).to(gradient.dtype)

    if backward is not None:
        x = Back.apply(x)
    return x * 1 if forward is None else There.apply(x)


# --- 8.2 make_recipe ---


@other("make_recipe")
def written_out(granularity, forward, backward, power_of_two, high_precision):
    row, column = ("tensor", "tensor") if granularity == "tensor" else ("row", "column")
    x = weight = Cast(forward, row, power_of_two)
    gradient = Cast(backward, row, power_of_two)
    weight_back = x_back = Cast(forward, column, power_of_two)
    gradient_back = Cast(backward, column, power_of_two)
    if "output" in high_precision:
        x = weight = None
    if "grad_x" in high_precision:
        gradient = weight_back = None
    if "grad_weight" in high_precision:
        gradient_back = x_back = None
    return Recipe("written out", x, weight, gradient, weight_back, gradient_back, x_back)


@other("make_recipe")
def by_the_letters(granularity, forward, backward, power_of_two, high_precision):
    products = {"output": ("mk", "nk"), "grad_x": ("mn", "nk"), "grad_weight": ("mn", "mk")}
    six = []
    for product, operands in products.items():
        (summed,) = set(operands[0]) & set(operands[1])
        for letters in operands:
            fmt = backward if letters == "mn" else forward
            along = "row" if letters.index(summed) == 1 else "column"
            cast = Cast(fmt, along if granularity == "row" else granularity, power_of_two)
            six.append(None if product in high_precision else cast)
    return Recipe("by the letters", *six)


@other("make_recipe")
def from_a_known_one(granularity, forward, backward, power_of_two, high_precision):
    known = RECIPES["rowwise" if granularity == "row" else "tensorwise"]
    formats = (forward, forward, backward, forward, backward, forward)
    names = ("output", "output", "grad_x", "grad_x", "grad_weight", "grad_weight")
    old = [cast for pair in known.pairs() for cast in pair]
    new = [
        None if name in high_precision else cast._replace(fmt=fmt, power_of_two=power_of_two)
        for cast, fmt, name in zip(old, formats, names, strict=True)
    ]
    return Recipe("changed", *new)


# --- 8.3 float8_matmul ---


@other("float8_matmul")
def decoded_and_divided(a, b):
    left, right = (decode(q.codes.int(), q.fmt).float() / spread(q.scale, q.granularity, q.codes.shape) for q in (a, b))
    return (left @ right).to(a.dtype)


@other("float8_matmul")
def one_column_after_the_other(a, b):
    left, right = (dequantize(replace(q, dtype=torch.float32)) for q in (a, b))
    total = torch.zeros(left.shape[0], right.shape[1])
    for k in reversed(range(left.shape[1])):
        total = total + left[:, k, None] * right[k]
    return total.to(a.dtype)


@other("float8_matmul")
def scales_after_the_sum(a, b):
    # Tensor cores multiply codes; the scales come last, where no sum meets two of them.
    before = []
    after = []
    for q, kept in ((a, "row"), (b, "column")):
        values = decode(q.codes.int(), q.fmt).float()
        outside = q.granularity in ("tensor", kept)
        before.append(values if outside else values / spread(q.scale, q.granularity, values.shape))
        after.append(q.scale if outside else torch.ones(()))
    return (before[0] @ before[1] / after[0] / after[1]).to(a.dtype)


# --- 8.4 float8_linear_forward ---


@other("float8_linear_forward")
def with_dequantized_operands(x, weight, recipe):
    flat = x.flatten(0, -2) if x.dim() > 1 else x[None]
    if recipe.x is None:
        return torch.nn.functional.linear(x, weight.to(x.dtype))
    left = dequantize(replace(quantize(flat, *recipe.x), dtype=torch.float32))
    right = dequantize(replace(quantize(weight, *recipe.weight), dtype=torch.float32))
    return torch.nn.functional.linear(left, right).to(x.dtype).reshape(x.shape[:-1] + weight.shape[:1])


@other("float8_linear_forward")
def transposes_and_turns_the_granularity(x, weight, recipe):
    lines = 1
    for size in x.shape[:-1]:
        lines *= size
    flat = x.reshape(lines, x.shape[-1])
    if recipe.x is None:
        found = flat @ weight.to(x.dtype).T
    else:
        fmt, granularity, power_of_two = recipe.weight
        turned = {"row": "column", "column": "row", "tensor": "tensor"}[granularity]
        found = float8_matmul(quantize(flat, *recipe.x), quantize(weight.t().contiguous(), fmt, turned, power_of_two))
    return found.reshape(*x.shape[:-1], len(weight))


# --- 8.5 float8_linear_backward ---


@other("float8_linear_backward")
def each_gradient_by_itself(grad_output, x, weight, recipe, needs=(True, True)):
    def both(first, first_cast, second, second_cast):
        if first_cast is None:
            return first, second.to(first.dtype)
        casts = ((first, first_cast), (second, second_cast))
        return tuple(dequantize(replace(quantize(each, *cast), dtype=torch.float32)) for each, cast in casts)

    def gradient_of_x():
        left, right = both(grad, recipe.grad_output, weight, recipe.weight_for_grad_x)
        return torch.mm(left, right).to(grad.dtype).reshape(x.shape)

    def gradient_of_weight():
        left, right = both(grad, recipe.grad_output_for_grad_weight, rows, recipe.x_for_grad_weight)
        return torch.mm(right.t(), left).t().to(grad.dtype)

    grad, rows = (each[None] if each.dim() == 1 else each.flatten(0, -2) for each in (grad_output, x))
    return gradient_of_x() if needs[0] else None, gradient_of_weight() if needs[1] else None


@other("float8_linear_backward")
def as_two_layers_forward(grad_output, x, weight, recipe, needs=(True, True)):
    # Each gradient is the output of a linear layer: of the gradient with weight.T, and of its transpose with x.T.
    def turned(cast):
        return cast and cast._replace(granularity={"row": "column", "column": "row"}.get(cast[1], cast[1]))

    def layer(left, left_cast, right, right_cast):
        casts = (left_cast, right_cast)
        return float8_linear_forward(left, right, Recipe("one product", *casts, *casts, *casts))

    grad, rows = (each[None] if each.dim() == 1 else each.flatten(0, -2) for each in (grad_output, x))
    grad_x = grad_weight = None
    if needs[0]:
        grad_x = layer(grad, recipe.grad_output, weight.t(), turned(recipe.weight_for_grad_x)).reshape(x.shape)
    if needs[1]:
        casts = turned(recipe.grad_output_for_grad_weight), turned(recipe.x_for_grad_weight)
        grad_weight = layer(grad.t(), casts[0], rows.t(), casts[1])
    return grad_x, grad_weight


# --- 8.6 Float8Linear ---


@other("Float8Linear")
class OnOneFunction(torch.nn.Linear):
    def __init__(self, in_features, out_features, bias=True, recipe="tensorwise"):
        self.__dict__["recipe"] = find_recipe(recipe)
        super().__init__(in_features, out_features, bias)

    @classmethod
    def from_linear(cls, linear, recipe="tensorwise"):
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer.recipe = find_recipe(recipe)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.register_parameter("weight", linear.weight)
        layer.register_parameter("bias", linear.bias)
        layer.training = linear.training
        return layer

    def forward(self, x):
        autocast = torch.is_autocast_enabled(x.device.type)
        kind = torch.get_autocast_dtype(x.device.type) if autocast else None
        torch.set_autocast_enabled(x.device.type, False)
        try:
            flat = self.EightBits.apply(x.reshape(-1, x.shape[-1]), self.weight, self.recipe, kind)
        finally:
            torch.set_autocast_enabled(x.device.type, autocast)
        output = flat.reshape(*x.shape[:-1], self.out_features)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output

    class EightBits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, recipe, kind):
            ctx.saved = x, weight, recipe
            ctx.wanted = tuple(ctx.needs_input_grad[:2])
            output = float8_linear_forward(x, weight, recipe)
            return output if kind is None else output.to(kind)

        @staticmethod
        def backward(ctx, gradient):
            x, weight, recipe = ctx.saved
            both = float8_linear_backward(gradient.contiguous(), x.detach(), weight.detach(), recipe, ctx.wanted)
            return both[0], both[1], None, None


@other("Float8Linear")
class ByConstructionOfAutograd(torch.nn.Linear):
    """Each product is a function of its own that autograd chains: y = f(x, w), with backward through two more."""

    def __init__(self, in_features, out_features, bias=True, recipe="tensorwise"):
        super().__init__(in_features, out_features, bias=bias)
        self.recipe = find_recipe(recipe)

    @classmethod
    def from_linear(cls, linear, recipe="tensorwise"):
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, recipe)
        made._parameters.update(weight=linear.weight, bias=linear.bias)
        return made.train(linear.training)

    def forward(self, x):
        recipe = self.recipe

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight, bias, dtype=None):
                ctx.save_for_backward(x, weight)
                rows, wanted = x.reshape(-1, x.shape[-1]), x.dtype
                if torch.is_autocast_enabled(x.device.type):
                    wanted = torch.get_autocast_dtype(x.device.type)
                    with torch.autocast(x.device.type, enabled=False):
                        return Product.forward(ctx, x, weight, bias, wanted)
                if recipe.x is None:
                    output = rows @ weight.to(x.dtype).t()
                else:
                    output = float8_matmul(quantize(rows, *recipe.x), transpose(quantize(weight, *recipe.weight)))
                output = output.reshape(*x.shape[:-1], len(weight)).to(dtype or wanted)
                return output if bias is None else output + bias.to(output.dtype)

            @staticmethod
            def backward(ctx, gradient):
                needs = ctx.needs_input_grad
                grads = float8_linear_backward(gradient, *ctx.saved_tensors, recipe, needs[:2])
                return *grads, gradient.reshape(-1, gradient.shape[-1]).sum(0) if needs[2] else None

        return Product.apply(x, self.weight, self.bias)


# --- 8.7 why_not_float8 ---


@other("why_not_float8")
def as_a_table(name, out_features, in_features, rows, recipe, skip=()):
    if recipe not in RECIPES:
        raise ValueError(f"{recipe!r} is none of {list(RECIPES)}")
    small = [(1024, 4096)] if recipe == "tensorwise" else [(2048, float("inf")), (float("inf"), 1024), (4096, 2048)]
    contracted = {"tensorwise": rows, "rowwise": rows, "rowwise_with_gw_hp": 0}[recipe]
    if sum(name.count(text) for text in skip):
        return "by name"
    if (out_features | in_features | contracted) & 0b1111:
        return "does not divide"
    return "too small" if any(out_features <= n and in_features <= k for n, k in small) else ""


@other("why_not_float8")
def rule_by_rule(name, out_features, in_features, rows, recipe, skip=()):
    known = find_recipe(recipe)
    for text in skip:
        if text in name:
            return "by name"
    divides = divmod(out_features, 16)[1] == 0 and divmod(in_features, 16)[1] == 0
    if known.grad_output_for_grad_weight is not None:
        divides = divides and divmod(rows, 16)[1] == 0
    if not divides:
        return "does not divide"
    if known.name == "tensorwise":
        return "" if in_features > 4096 or out_features > 1024 else "too small"
    if out_features > 2048 and in_features > 1024 and not (out_features <= 4096 and in_features <= 2048):
        return ""
    return "too small"
