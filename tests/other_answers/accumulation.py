"""Other right answers to the exercises of chapter 03."""

import math

import numpy as np
import torch

from lowprec_lab.accumulation import dot_product
from lowprec_lab.bench.other_answers import other
from lowprec_lab.bits import max_finite, min_normal, ulp
from lowprec_lab.formats import FP32
from lowprec_lab.rounding import round_stochastic, round_to

# --- 3.1 sum_sequential ---


@other("sum_sequential")
def by_index(x, fmt):
    policy = "saturate" if fmt.specials == "finite" else "to_special"
    x = round_to(x, fmt, overflow=policy)
    total = torch.zeros_like(x).sum(-1)
    for place in range(x.shape[-1]):
        total = round_to(total + x[..., place], fmt, overflow=policy)
    return total


@other("sum_sequential")
def one_sum_at_a_time(x, fmt):
    if fmt.specials == "finite":

        def nearest(value):
            return round_to(value, fmt)
    else:

        def nearest(value):
            return round_to(value, fmt, "nearest_even", "to_special")

    elements = nearest(x).movedim(-1, 0)
    total = torch.zeros(x.shape[:-1], dtype=torch.float32)
    while len(elements):
        total, elements = nearest(elements[0] + total), elements[1:]
    return total


@other("sum_sequential")
def with_reduce(x, fmt):
    from functools import reduce

    def add(total, element):
        return round_to(total + element, fmt, overflow=overflow)

    overflow = "to_special" if fmt.specials != "finite" else "saturate"
    elements = torch.unbind(round_to(x, fmt, overflow=overflow), dim=-1)
    return reduce(add, elements, torch.zeros(x.shape[:-1]))


# --- 3.2 sum_pairwise ---


@other("sum_pairwise")
def by_recursion_on_a_power_of_two(x, fmt):
    policy = "saturate" if fmt.specials == "finite" else "to_special"

    def tree(parts):
        if parts.shape[-1] == 1:
            return parts[..., 0]
        half = 2 ** (math.ceil(math.log2(parts.shape[-1])) - 1)
        return round_to(tree(parts[..., :half]) + tree(parts[..., half:]), fmt, overflow=policy)

    return tree(round_to(x, fmt, overflow=policy)) if x.shape[-1] else torch.zeros(x.shape[:-1])


@other("sum_pairwise")
def with_a_reshape(x, fmt):
    policy = "saturate" if fmt.specials == "finite" else "to_special"
    x = round_to(x, fmt, overflow=policy)
    while x.shape[-1] > 1:
        odd = x[..., -1:] if x.shape[-1] % 2 else x[..., :0]
        paired = x[..., : x.shape[-1] // 2 * 2].unflatten(-1, (-1, 2))
        x = torch.cat([round_to(paired[..., 0] + paired[..., 1], fmt, overflow=policy), odd], dim=-1)
    return x.squeeze(-1) if x.shape[-1] else torch.zeros(x.shape[:-1])


@other("sum_pairwise")
def with_a_list(x, fmt):
    policy = "saturate" if fmt.specials == "finite" else "to_special"
    parts = list(round_to(x, fmt, overflow=policy).unbind(-1))
    while len(parts) > 1:
        pairs = zip(parts[0::2], parts[1::2], strict=False)
        sums = [round_to(left + right, fmt, overflow=policy) for left, right in pairs]
        parts = sums + parts[2 * len(sums) :]
    return parts[0] if parts else torch.zeros(x.shape[:-1])


# --- 3.3 sum_kahan ---


@other("sum_kahan")
def with_the_loss_negated(x, fmt):
    policy = "saturate" if fmt.specials == "finite" else "to_special"
    x = round_to(x, fmt, overflow=policy)
    total, owed = torch.zeros(x.shape[:-1]), torch.zeros(x.shape[:-1])
    for place in range(x.shape[-1]):
        y = round_to(x[..., place] + owed, fmt, overflow=policy)
        before, total = total, round_to(total + y, fmt, overflow=policy)
        owed = round_to(y - round_to(total - before, fmt, overflow=policy), fmt, overflow=policy)
    return total


@other("sum_kahan")
def with_an_adder(x, fmt):
    policy = "saturate" if fmt.specials == "finite" else "to_special"

    def add(left, right):
        return round_to(left + right, fmt, overflow=policy)

    total = lost = torch.zeros(x.shape[:-1])
    for element in round_to(x, fmt, overflow=policy).unbind(-1):
        y = add(element, -lost)
        new = add(total, y)
        total, lost = new, add(add(new, -total), -y)
    return total


@other("sum_kahan")
def with_a_state(x, fmt):
    policy = "saturate" if fmt.specials == "finite" else "to_special"
    state = torch.zeros(2, *x.shape[:-1])
    for element in round_to(x, fmt, overflow=policy).movedim(-1, 0):
        y = round_to(element - state[1], fmt, overflow=policy)
        t = round_to(state[0] + y, fmt, overflow=policy)
        arrived = round_to(t - state[0], fmt, overflow=policy)
        state = torch.stack([t, round_to(arrived - y, fmt, overflow=policy)])
    return state[0]


# --- 3.4 dot_product ---


@other("dot_product")
def product_by_product(a, b, product_fmt, accumulator_fmt):
    policies = ["saturate" if fmt.specials == "finite" else "to_special" for fmt in (product_fmt, accumulator_fmt)]
    total = torch.zeros(a.shape[:-1])
    for place in range(a.shape[-1]):
        product = round_to(a[..., place] * b[..., place], product_fmt, overflow=policies[0])
        total = round_to(total + product, accumulator_fmt, overflow=policies[1])
    return total


@other("dot_product")
def products_in_float64(a, b, product_fmt, accumulator_fmt):
    policies = {fmt: "saturate" if fmt.specials == "finite" else "to_special" for fmt in (product_fmt, accumulator_fmt)}
    products = (a.double() * b.double()).float()  # float32 holds them: they were exact before
    products = round_to(products, product_fmt, overflow=policies[product_fmt])
    total = torch.zeros(a.shape[:-1])
    for product in products.unbind(-1):
        total = round_to(product + total, accumulator_fmt, overflow=policies[accumulator_fmt])
    return total


# --- 3.5 matmul_promoted ---


@other("matmul_promoted")
def with_a_counter(a, b, accumulator_fmt, promote_every):
    if promote_every <= 0:
        raise ValueError("promote_every must be positive")
    policy = "saturate" if accumulator_fmt.specials == "finite" else "to_special"
    total = torch.zeros(a.shape[0], b.shape[1])
    short, waiting = torch.zeros_like(total), 0
    for column, row in zip(a.unbind(1), b.unbind(0), strict=True):
        short = round_to(short + torch.outer(column, row), accumulator_fmt, overflow=policy)
        waiting += 1
        if waiting == promote_every:
            total, short, waiting = total + short, torch.zeros_like(short), 0
    return total + short


@other("matmul_promoted")
def from_dot_products(a, b, accumulator_fmt, promote_every):
    if promote_every < 1:
        raise ValueError("promote_every is 1 or more")
    rows, columns = a.shape[0], b.shape[1]
    left = a[:, None, :].expand(rows, columns, a.shape[1])
    right = b.t()[None, :, :].expand(rows, columns, a.shape[1])
    total = torch.zeros(rows, columns)
    for start in range(0, a.shape[1], promote_every):
        part = slice(start, start + promote_every)
        total = total + dot_product(left[..., part], right[..., part], FP32, accumulator_fmt)
    return total


@other("matmul_promoted")
def column_by_column(a, b, accumulator_fmt, promote_every):
    if promote_every < 1:
        raise ValueError("promote_every is 1 or more")
    policy = "saturate" if accumulator_fmt.specials == "finite" else "to_special"
    products = a.unsqueeze(2) * b.unsqueeze(0)  # (M, K, N)
    total = torch.zeros(a.shape[0], b.shape[1])
    for chunk in products.split(promote_every, dim=1) if a.shape[1] else ():
        short = torch.zeros_like(total)
        for place in range(chunk.shape[1]):
            short = round_to(short + chunk[:, place], accumulator_fmt, overflow=policy)
        total += short
    return total


# --- 3.6 update_is_lost ---


@other("update_is_lost")
def where_nothing_changes(weight, update, fmt):
    policy = "saturate" if fmt.specials == "finite" else "to_special"
    after = round_to(torch.add(weight, update), fmt, overflow=policy)
    return torch.where(update == 0, torch.zeros_like(weight, dtype=torch.bool), after.eq(weight))


@other("update_is_lost")
def in_three_steps(weight, update, fmt):
    after = weight + update
    after = round_to(after, fmt) if fmt.specials == "finite" else round_to(after, fmt, overflow="to_special")
    moved = after != weight
    return torch.logical_and(torch.logical_not(moved), update.ne(0.0))


@other("update_is_lost")
def by_a_dot_product(weight, update, fmt):
    pairs = torch.stack([weight, update], dim=-1)
    return (dot_product(pairs, torch.ones_like(pairs), FP32, fmt) == weight) & ~(update == 0)


# --- 3.7 sgd_with_master_weights ---


@other("sgd_with_master_weights")
def with_a_list_of_copies(weight, gradients, lr, fmt):
    policy = "saturate" if fmt.specials == "finite" else "to_special"
    masters = [weight]
    for gradient in gradients:
        masters.append(masters[-1] - gradient * lr)
    copies = [round_to(each, fmt, overflow=policy) for each in masters[1:]]
    return torch.stack(copies) if copies else torch.zeros_like(gradients), masters[-1].clone()


@other("sgd_with_master_weights")
def rounded_all_at_once(weight, gradients, lr, fmt):
    policy = "saturate" if fmt.specials == "finite" else "to_special"
    updates = gradients * torch.tensor(lr, dtype=torch.float32)
    masters = torch.empty_like(gradients)
    master = weight.clone()
    for step in range(len(gradients)):
        master -= updates[step]
        masters[step] = master
    return round_to(masters, fmt, overflow=policy), master


@other("sgd_with_master_weights")
def in_numpy(weight, gradients, lr, fmt):
    policy = "saturate" if fmt.specials == "finite" else "to_special"
    master, rate = weight.numpy().copy(), np.float32(lr)
    rows = np.zeros(tuple(gradients.shape), dtype=np.float32)
    with np.errstate(all="ignore"):
        for step, gradient in enumerate(gradients.numpy()):
            master = master - rate * gradient
            rows[step] = master
    return round_to(torch.from_numpy(rows), fmt, overflow=policy), torch.from_numpy(master)


# --- 3.8 sgd_with_stochastic_rounding ---


@other("sgd_with_stochastic_rounding")
def with_a_list_of_weights(weight, gradients, lr, fmt, noise):
    weights = [weight]
    for gradient, luck in zip(gradients, noise, strict=True):
        weights.append(round_stochastic(weights[-1] - gradient * lr, fmt, luck))
    return torch.stack(weights[1:]) if len(gradients) else torch.zeros_like(gradients)


@other("sgd_with_stochastic_rounding")
def with_updates_first(weight, gradients, lr, fmt, noise):
    updates = gradients * -lr
    weights = torch.zeros(gradients.shape)
    for step in range(gradients.shape[0]):
        weight = round_stochastic(torch.add(weight, updates[step]), fmt, noise[step])
        weights[step] = weight
    return weights


@other("sgd_with_stochastic_rounding")
def by_hand(weight, gradients, lr, fmt, noise):
    rows = torch.empty_like(gradients)
    for step, gradient in enumerate(gradients):
        exact = weight - lr * gradient
        spacing, size = ulp(exact, fmt), exact.double().abs()
        below = torch.floor(size / spacing)
        moved = (below + (noise[step].double() < size / spacing - below).double()) * spacing
        weight = torch.copysign(moved.clamp(max=max_finite(fmt)), exact.double()).float()
        if fmt.specials == "fnuz":
            weight = torch.where(weight == 0, 0.0, weight)
        if not fmt.subnormals:
            weight = torch.copysign(weight.abs().clamp(min=min_normal(fmt)), exact)
        rows[step] = weight
    return rows
