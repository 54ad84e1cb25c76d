"""Checks and known misconceptions of chapter 08.

A product of matrices may be summed up in any order. So results are compared bit for bit on whole numbers (times powers
of two) whose sums are exact, in any order, and elsewhere with the bound that float8_linear_oracle.py derives. The sign
of a zero is not judged: a sum may begin with 0.0 or with its first product.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.float8_linear import (
    PRODUCTS,
    RECIPES,
    Cast,
    backward_of,
    both_ways,
    casts_of,
    forward_of,
    layer_facts,
    layer_of,
    product_of,
    products_for,
    recipe_of,
    refuses,
)
from lowprec_lab.formats import E4M3, E5M2, Format
from lowprec_lab.graders import float8_linear_oracle as exact
from lowprec_lab.graders import oracle, quantizer_oracle, rounding_oracle
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for
from lowprec_lab.quantizer import Quantized

for _function in (
    exact.cast_both_ways, exact.make_recipe, exact.float8_matmul, exact.float8_linear_forward,
    exact.float8_linear_backward, exact.Float8Linear, exact.why_not_float8,
):  # fmt: skip
    oracle_for(_function.__name__, _function)

E3M4 = Format("e3m4", 3, 4, specials="fn")
E2M3_FN = Format("e2m3_fn", 2, 3, specials="fn")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Recipes whose six casts all differ, so that none can be taken for another: data, as `recipe_of` takes them.
OWN_RECIPES = (
    ((E4M3, "row", True), (E3M4, "tensor", True), (E5M2, "row", True), (E4M3, "column", True),
     (E3M4, "column", True), (E5M2, "tensor", True)),
    ((E3M4, "tensor", True), (E5M2, "row", True), None, None, (E5M2, "column", True), (E4M3, "column", True)),
    (None, None, (E4M3, "tensor", True), (E5M2, "column", True), (E4M3, "column", True), (E3M4, "tensor", True)),
)  # fmt: skip


def _no_negative_zeros(value: object) -> object:
    return value + 0.0 if isinstance(value, Tensor) and value.dtype.is_floating_point else value


def _same(case, got: object, want: object, parts: tuple[str, ...] = ()) -> None:
    """Compare tensors, or tuples of them with a row of each: one comparison for each part."""
    if not isinstance(want, tuple):
        case.same_bits(_no_negative_zeros(got), _no_negative_zeros(want))
    elif not isinstance(got, tuple) or len(got) != len(want):
        case.same_bits(got, tuple(torch.zeros(1) for _ in want), parts=parts)  # says that there is no such tuple
    else:
        for one, other in zip(got, want, strict=True):
            case.same_bits(_no_negative_zeros(one), _no_negative_zeros(other))


# --- inputs -----------------------------------------------------------------------------------------------------------


def whole(rng: np.random.Generator, rows: int, columns: int, log2: int = 0, spread: int = 2) -> Tensor:
    """Whole numbers up to 28, times 2^log2, and times powers of two up to 2^spread for each row and each column.

    The largest one is 28 times a power of two. As 448 and 57344 are 7 times powers of two as well, one scale for the
    whole tensor is a power of two, and every quantized number is exact.
    """
    powers = rng.integers(0, spread + 1, (rows, 1)) + rng.integers(0, spread + 1, (1, columns))
    numbers = rng.integers(-28, 29, (rows, columns))
    if numbers.size:
        top = np.unravel_index(np.argmax(powers), powers.shape)
        numbers[top] = 28 * rng.choice([-1, 1])
    return torch.from_numpy(np.ldexp(numbers.astype(np.float64), powers + log2).astype(np.float32))


def floats(rng: np.random.Generator, *shape: int, log2: int = 0, apart: str = "") -> Tensor:
    """Numbers of both signs whose sizes vary by 2^6 from row to row and by 2^4 within a row.

    apart: "rows" or "columns" that are up to 2^18 apart. Where they share a scale, it has no room for the small ones.
    """
    sizes = rng.uniform(-3, 3, (*shape[:-1], 1)) + rng.uniform(-2, 2, shape) + log2
    if apart:
        sizes = sizes - rng.choice([0, 12, 18], (shape[0], 1) if apart == "rows" else (1, shape[1]))
    return torch.from_numpy((np.exp2(sizes) * rng.choice([-1, 1], shape)).astype(np.float32))


# --- 8.1 cast_both_ways -----------------------------------------------------------------------------------------------

_WAYS = (
    (E4M3, "tensor", False), (E5M2, "tensor", False), (E4M3, "row", True), (E5M2, "column", False),
    (E3M4, "row", False), (E2M3_FN, "tensor", True),
)  # fmt: skip


def _compare_ways(answer, case, x: Tensor, gradient: Tensor, forward: tuple | None, backward: tuple | None) -> None:
    want = tuple(exact.seen(each, how and Cast(*how)) for each, how in ((x, forward), (gradient, backward)))
    case.same_bits(answer.run(both_ways, x, gradient, forward, backward), want, parts=("result", "gradient"))


@check_for("cast_both_ways", weight=2)
def gradients_of_other_sizes_than_x(answer, case):
    """E4M3 forward and E5M2 backward, gradients of 2^-30 to 2^20 times the size of x; float32, bfloat16, float16."""
    for dtype in _DTYPES:
        for log2 in (-8, -5, 3) if dtype == torch.float16 else (-30, -12, 6, 20):
            for _ in range(case.count(1)):
                x, gradient = floats(case.rng, 2, 5).to(dtype), floats(case.rng, 2, 5, log2=log2).to(dtype)
                _compare_ways(answer, case, x, gradient, *_WAYS[:2])


@check_for("cast_both_ways")
def casts_of_every_kind(answer, case):
    """A scale for each row or column, powers of two, made-up formats: another cast for each direction."""
    for forward, backward in itertools.permutations(_WAYS, 2):
        for _ in range(case.count(1)):
            x, gradient = floats(case.rng, 3, 4), floats(case.rng, 3, 4, log2=-9)
            _compare_ways(answer, case, x, gradient, forward, backward)


@check_for("cast_both_ways")
def one_way_only(answer, case):
    """No cast forward, none backward, none at all."""
    for cast in ((E4M3, "tensor", False), (E5M2, "row", True)):
        for forward, backward in ((cast, None), (None, cast), (None, None)):
            for _ in range(case.count(2)):
                _compare_ways(answer, case, floats(case.rng, 2, 4), floats(case.rng, 2, 4, log2=-7), forward, backward)


@check_for("cast_both_ways")
def zeros_nan_and_no_numbers(answer, case):
    """Rows of zeros, a row with a NaN, a transposed matrix, one without rows."""
    row, tensor = (E4M3, "row", False), (E5M2, "tensor", False)
    for forward, backward in ((row, row), (tensor, row)):
        x, gradient = floats(case.rng, 3, 4), floats(case.rng, 3, 4, log2=-15)
        x[0], gradient[1], gradient[2, 3] = 0.0, 0.0, float("nan")
        _compare_ways(answer, case, x, gradient, forward, backward)
        _compare_ways(answer, case, x.t(), gradient.t(), forward, backward)
        _compare_ways(answer, case, torch.zeros(0, 4), torch.zeros(0, 4), forward, backward)


def _unscaled(value: Tensor, how: Cast | None) -> Tensor:
    return value if how is None else rounding_oracle.round_to(value.float().contiguous(), how.fmt).to(value.dtype)


@misconception(
    "cast_both_ways", "Autograd differentiates the conversion to 8 bits: the gradient is rounded like x, unscaled."
)
def gradient_through_the_cast(x, forward, backward):
    return exact.through(
        x, lambda value: exact.seen(value, forward), lambda g: _unscaled(exact.seen(g, backward), forward)
    )


@misconception("cast_both_ways", "The gradient comes back as it is: the cast for the way back is not used.")
def straight_through_alone(x, forward, backward):
    return exact.through(x, lambda value: exact.seen(value, forward), lambda g: g.clone())


@misconception("cast_both_ways", "The gradient is rounded without a scale of its own.")
def gradient_without_a_scale(x, forward, backward):
    return exact.through(x, lambda value: exact.seen(value, forward), lambda g: _unscaled(g, backward))


@misconception("cast_both_ways", "Both ways are cast alike: the gradient by the cast for x.")
def same_cast_back(x, forward, backward):
    return exact.through(x, lambda value: exact.seen(value, forward), lambda g: exact.seen(g, forward))


@misconception("cast_both_ways", "The casts are exchanged: x by that of the gradient, the gradient by that of x.")
def exchanged(x, forward, backward):
    return exact.through(x, lambda value: exact.seen(value, backward), lambda g: exact.seen(g, forward))


@misconception("cast_both_ways", "The gradient is scaled by the scale of x.")
def gradient_with_the_scale_of_x(x, forward, backward):
    def back(gradient):
        if backward is None:
            return gradient.clone()
        scale = quantizer_oracle.quantize(x.detach().contiguous(), *backward).scale
        scaled = (gradient.float() * scale).contiguous()
        return (rounding_oracle.round_to(scaled, backward.fmt) / scale).to(gradient.dtype)

    return exact.through(x, lambda value: exact.seen(value, forward), back)


@misconception("cast_both_ways", "No gradient arrives: quantizing cuts the graph.")
def cut(x, forward, backward):
    return exact.seen(x, forward)


@misconception("cast_both_ways", "The value is rounded without a scale.")
def x_without_a_scale(x, forward, backward):
    return exact.through(x, lambda value: _unscaled(value, forward).clone(), lambda g: exact.seen(g, backward))


# --- 8.2 make_recipe --------------------------------------------------------------------------------------------------

_SIX = ("x", "weight", "grad_output", "weight for grad_x", "grad_output for grad_weight", "x for grad_weight")
_PAIRS = ((E4M3, E5M2), (E5M2, E4M3), (E3M4, E5M2), (E4M3, E2M3_FN), (E4M3, E4M3))


def _as_recipe(*six: str) -> str:
    return "; ".join(f"{name}: {text}" for name, text in zip(_SIX, six, strict=True))


def _compare_recipes(answer, case, *settings) -> None:
    want = casts_of(exact.make_recipe, *settings)
    case.same_bits(answer.run(casts_of, *settings), want, show=_as_recipe, parts=_SIX)


@check_for("make_recipe")
def one_scale_for_each_operand(answer, case):
    """Granularity "tensor", five pairs of formats, scales that are powers of two and others."""
    for (forward, backward), power_of_two in itertools.product(_PAIRS, (False, True)):
        _compare_recipes(answer, case, "tensor", forward, backward, power_of_two)


@check_for("make_recipe", weight=2)
def as_many_scales_as_can_be_had(answer, case):
    """Granularity "row", five pairs of formats, scales that are powers of two and others."""
    for (forward, backward), power_of_two in itertools.product(_PAIRS, (False, True)):
        _compare_recipes(answer, case, "row", forward, backward, power_of_two)


@check_for("make_recipe")
def products_in_high_precision(answer, case):
    """One, two and all three products in high precision, with both granularities."""
    chosen = [each for count in (1, 2, 3) for each in itertools.combinations(PRODUCTS, count)]
    for high, granularity in itertools.product(chosen, ("tensor", "row")):
        _compare_recipes(answer, case, granularity, E4M3, E5M2, False, *high)


def _changed(change):
    """make_recipe with another cast in places: change(place, cast, forward, backward) gives it."""

    def made(granularity, forward, backward, power_of_two, high_precision):
        return exact.make_recipe(
            granularity, forward, backward, power_of_two, high_precision,
            lambda place, cast: cast and change(place, cast, forward, backward),
        )  # fmt: skip

    return made


def _turned(cast: Cast) -> Cast:
    return cast._replace(granularity={"row": "column", "column": "row"}.get(cast.granularity, cast.granularity))


@misconception("make_recipe", "Every operand has a scale for each row, also where a sum runs over those rows.")
def rows_everywhere(granularity, forward, backward, power_of_two, high_precision):
    return _changed(lambda place, cast, f, b: cast._replace(granularity=granularity))(
        granularity, forward, backward, power_of_two, high_precision
    )


@misconception("make_recipe", "Scales lie along the dimension that is summed over: rows and columns are exchanged.")
def along_the_sum(granularity, forward, backward, power_of_two, high_precision):
    return _changed(lambda place, cast, f, b: _turned(cast))(
        granularity, forward, backward, power_of_two, high_precision
    )


@misconception("make_recipe", "Rows and columns are those of the operands as they are multiplied, after transposing.")
def after_transposing(granularity, forward, backward, power_of_two, high_precision):
    return _changed(lambda place, cast, f, b: _turned(cast) if place in (1, 4) else cast)(
        granularity, forward, backward, power_of_two, high_precision
    )


@misconception("make_recipe", "The whole way back is in the format of the gradients, x and weight too.")
def backward_format_for_all(granularity, forward, backward, power_of_two, high_precision):
    return _changed(lambda place, cast, f, b: cast._replace(fmt=b) if place > 1 else cast)(
        granularity, forward, backward, power_of_two, high_precision
    )


@misconception("make_recipe", "Gradients have the format of x and weight.")
def forward_format_for_all(granularity, forward, backward, power_of_two, high_precision):
    return _changed(lambda place, cast, f, b: cast._replace(fmt=f))(
        granularity, forward, backward, power_of_two, high_precision
    )


@misconception("make_recipe", "Both x and weight are cast once: the way back takes the casts of the way forward.")
def casts_once(granularity, forward, backward, power_of_two, high_precision):
    along = "tensor" if granularity == "tensor" else "row"
    return _changed(lambda place, cast, f, b: cast._replace(granularity=along) if place in (3, 5) else cast)(
        granularity, forward, backward, power_of_two, high_precision
    )


@misconception("make_recipe", "Scales are powers of two on the way forward only.")
def powers_forward_only(granularity, forward, backward, power_of_two, high_precision):
    return _changed(lambda place, cast, f, b: cast._replace(power_of_two=False) if place > 1 else cast)(
        granularity, forward, backward, power_of_two, high_precision
    )


@misconception("make_recipe", "No product is left in high precision.")
def nothing_left(granularity, forward, backward, power_of_two, high_precision):
    return exact.make_recipe(granularity, forward, backward, power_of_two, ())


# --- 8.3 float8_matmul ------------------------------------------------------------------------------------------------

_GRANULARITIES = ("tensor", "row", "column", (2, 3))


def _scale_shape(granularity: str | tuple, rows: int, columns: int) -> tuple[int, ...]:
    if isinstance(granularity, tuple):
        return -(-rows // granularity[0]), -(-columns // granularity[1])
    return {"tensor": (), "row": (rows, 1), "column": (1, columns)}[granularity]


def _codes(rng: np.random.Generator, fmt: Format, rows: int, columns: int, low: float, high: float) -> Tensor:
    """Codes of zero and of magnitudes from low up to high, both signs."""
    every = torch.arange(2**fmt.width, dtype=torch.int32)
    sizes = oracle.decode(every, fmt).abs()
    chosen = every[(sizes == 0) | ((sizes >= low) & (sizes < high))].numpy()
    return torch.from_numpy(rng.choice(chosen, (rows, columns)).astype(np.uint8))


def _small_operand(rng, fmt: Format, granularity, rows: int, columns: int) -> tuple:
    """Codes of few bits and scales that are powers of two: all products and sums are exact."""
    powers = np.ldexp(1.0, rng.integers(-3, 4, _scale_shape(granularity, rows, columns)))
    return (
        _codes(rng, fmt, rows, columns, 0.5, 4.0), torch.from_numpy(np.asarray(powers, dtype=np.float32)), granularity,
        fmt,
    )  # fmt: skip


def _any_operand(rng, fmt: Format, granularity, rows: int, columns: int) -> tuple:
    scales = np.exp2(rng.uniform(-6, 6, _scale_shape(granularity, rows, columns)))
    return (
        _codes(rng, fmt, rows, columns, 0.0, np.inf), torch.from_numpy(np.asarray(scales, dtype=np.float32)),
        granularity, fmt,
    )  # fmt: skip


def _compare_products(answer, case, a: tuple, b: tuple, dtype: torch.dtype) -> None:
    operands = [
        exact.values(Quantized(codes, scale, fmt, granularity, dtype)) for codes, scale, granularity, fmt in (a, b)
    ]
    numbers, bound = exact.product(*operands)
    want = exact.rounded(numbers, dtype)
    got = answer.run(product_of, *a, *b, dtype)
    case.same_bits(_no_negative_zeros(exact.settled(got, numbers, bound, want)), _no_negative_zeros(want))


@check_for("float8_matmul", weight=2)
def products_that_are_exact(answer, case):
    """Codes of few bits and scales that are powers of two: every pair of granularities, three pairs of formats."""
    for kinds in itertools.product(_GRANULARITIES, _GRANULARITIES):
        for fmts in ((E4M3, E4M3), (E5M2, E4M3), (E3M4, E5M2)):
            for _ in range(case.count(1)):
                m, k, n = case.rng.integers(2, 6, 3)
                a, b = (_small_operand(case.rng, *each) for each in zip(fmts, kinds, (m, k), (k, n), strict=True))
                want = product_of(exact.float8_matmul, *a, *b, torch.float32)
                _same(case, answer.run(product_of, *a, *b, torch.float32), want)


@check_for("float8_matmul")
def any_codes_and_scales(answer, case):
    """All finite codes, scales that are no powers of two: within the bound of a float32 sum, in any order."""
    pairs = (("tensor", "tensor"), ("row", "column"), ("tensor", (2, 3)))
    for fmts, kinds in itertools.product(((E4M3, E4M3), (E5M2, E4M3)), pairs):
        for _ in range(case.count(2)):
            m, k, n = (int(each) for each in case.rng.integers(1, 9, 3))
            a, b = (_any_operand(case.rng, *each) for each in zip(fmts, kinds, (m, k), (k, n), strict=True))
            _compare_products(answer, case, a, b, torch.float32)


@check_for("float8_matmul")
def results_in_16_bits(answer, case):
    """bfloat16 and float16: rounded once, after the sum; operands are not rounded to them."""
    for dtype in (torch.bfloat16, torch.float16):
        for kinds in (("tensor", "tensor"), ("row", "column"), ("column", "row")):
            for _ in range(case.count(2)):
                m, k, n = (int(each) for each in case.rng.integers(1, 4, 3))
                a, b = (_any_operand(case.rng, E4M3, *each) for each in zip(kinds, (m, k), (k, n), strict=True))
                scales = (a[1] * 512, b[1] * 64)  # so that float16 holds the product
                _compare_products(answer, case, (a[0], scales[0], *a[2:]), (b[0], scales[1], *b[2:]), dtype)


@check_for("float8_matmul")
def nan_infinity_and_no_numbers(answer, case):
    """Codes of NaN and infinity among others, transposed codes, matrices without rows or columns."""
    for kinds in (("tensor", "tensor"), ("row", "column")):
        a, b = (_small_operand(case.rng, E5M2, kind, 4, 4) for kind in kinds)
        a[0][1, 2], a[0][2, 0], b[0][3, 3] = 0x7C, 0x7E, 0xFC
        _compare_products(answer, case, a, b, torch.float32)
        for m, k, n in ((0, 3, 2), (2, 3, 0), (3, 1, 2)):
            a, b = (_small_operand(case.rng, E4M3, *each) for each in zip(kinds, (m, k), (k, n), strict=True))
            _compare_products(answer, case, a, b, torch.float32)
        a, b = (_small_operand(case.rng, E4M3, kind, 4, 4) for kind in kinds)
        _compare_products(answer, case, (a[0].t(), *a[1:]), (b[0].t(), *b[1:]), torch.float32)


def _decoded(q: Quantized, fmt: Format | None = None) -> np.ndarray:
    return oracle.decode(q.codes.contiguous().to(torch.int32), fmt or q.fmt).numpy()


def _multiplied(left: np.ndarray, right: np.ndarray, dtype: torch.dtype) -> Tensor:
    with np.errstate(all="ignore"):
        return exact.rounded(left.astype(np.float64) @ right.astype(np.float64), dtype)


def _scales(q: Quantized) -> np.ndarray:
    ones = replace(q, codes=torch.full(q.codes.shape, 2 ** (q.fmt.mantissa_bits) * q.fmt.bias, dtype=torch.uint8))
    return 1 / exact.values(ones)


@misconception("float8_matmul", "It multiplies by the scales: a value is the code divided by its scale.")
def multiplies_by_the_scales(a, b):
    return _multiplied(_decoded(a) * _scales(a), _decoded(b) * _scales(b), a.dtype)


@misconception("float8_matmul", "It multiplies what the codes stand for, and leaves the scales out.")
def without_scales(a, b):
    return _multiplied(_decoded(a), _decoded(b), a.dtype)


@misconception("float8_matmul", "It divides by the scale of a and leaves out that of b.")
def without_the_second_scale(a, b):
    return _multiplied(exact.values(a), _decoded(b), a.dtype)


@misconception("float8_matmul", "It multiplies the codes themselves, as whole numbers.")
def codes_as_numbers(a, b):
    sides = (each.codes.numpy().astype(np.float64) / _scales(each) for each in (a, b))
    return _multiplied(*sides, a.dtype)


@misconception("float8_matmul", "It reads the codes of b in the format of a.")
def one_format_for_both(a, b):
    return _multiplied(exact.values(a), exact.values(replace(b, fmt=a.fmt)), a.dtype)


@misconception("float8_matmul", "It rounds both operands to the dtype before it multiplies: they are float32 there.")
def operands_in_the_dtype(a, b):
    sides = (exact.rounded(exact.values(each), a.dtype).double().numpy() for each in (a, b))
    return _multiplied(*sides, a.dtype)


@misconception("float8_matmul", "It takes the first scale of each operand for all of its elements.")
def first_scale_only(a, b):
    firsts = (each.scale.reshape(-1)[0].item() if each.scale.numel() else 1.0 for each in (a, b))
    return _multiplied(*(_decoded(each) / first for each, first in zip((a, b), firsts, strict=True)), a.dtype)


@misconception("float8_matmul", "It rounds the product to 8 bits, the format of a, before it returns it.")
def product_in_8_bits(a, b):
    found = exact.float8_matmul(a, b).float()
    return rounding_oracle.round_to(found.contiguous(), a.fmt).to(a.dtype)


# --- 8.4 float8_linear_forward ----------------------------------------------------------------------------------------


def _compare_forward(answer, case, x: Tensor, weight: Tensor, casts: str | tuple) -> None:
    """Bit for bit where all is exact, and within the bound elsewhere, which is 0 nowhere."""
    want = exact.float8_linear_forward(x, weight, recipe_of(casts))
    _same(case, answer.run(forward_of, x, weight, casts), want)


def _near_forward(answer, case, x: Tensor, weight: Tensor, casts: str | tuple) -> None:
    numbers, bound = exact.product(*exact.operands("output", recipe_of(casts), x, weight))
    want = exact.rounded(numbers, x.dtype)
    case.same_bits(exact.settled(answer.run(forward_of, x, weight, casts), numbers, bound, want), want)


@check_for("float8_linear_forward", weight=2)
def whole_numbers_by_every_recipe(answer, case):
    """Whole numbers whose sums are exact, the three recipes; float32, bfloat16, float16."""
    for casts, dtype in itertools.product(RECIPES, _DTYPES):
        for _ in range(case.count(2)):
            m, k, n = (int(each) for each in case.rng.integers(2, 9, 3))
            x, weight = whole(case.rng, m, k, -5).to(dtype), whole(case.rng, n, k, -7).to(dtype)
            _compare_forward(answer, case, x, weight, casts)


@check_for("float8_linear_forward")
def recipes_of_other_casts(answer, case):
    """Recipes whose six casts all differ, in format and granularity, and one without casts forward."""
    for casts, dtype in itertools.product(OWN_RECIPES, (torch.float32, torch.bfloat16)):
        for _ in range(case.count(2)):
            m, k, n = (int(each) for each in case.rng.integers(2, 7, 3))
            x, weight = whole(case.rng, m, k, -3, 0).to(dtype), whole(case.rng, n, k, 2, 0).to(dtype)
            _compare_forward(answer, case, x, weight, casts)


@check_for("float8_linear_forward")
def shapes_of_every_kind(answer, case):
    """x of one, three and four dimensions, transposed, without rows or columns; a transposed weight; rows of zeros."""
    for casts in RECIPES:
        for _ in range(case.count(1)):
            x, weight = whole(case.rng, 12, 6, -4), whole(case.rng, 5, 6, -4)
            _compare_forward(answer, case, x.reshape(3, 2, 2, 6), weight, casts)
            for items in (2, 3, 4):
                batch = whole(case.rng, 3 * items, 6, -4).reshape(items, 3, 6)
                _compare_forward(answer, case, batch, weight, casts)
                _compare_forward(answer, case, batch.transpose(0, 1), weight, casts)
            _compare_forward(answer, case, whole(case.rng, 1, 6)[0], weight, casts)
            for rows, columns in ((0, 6), (3, 0)):
                _compare_forward(answer, case, torch.zeros(rows, columns), torch.zeros(5, columns), casts)
            _compare_forward(answer, case, whole(case.rng, 6, 4, -4).t(), whole(case.rng, 6, 3, -4).t(), casts)
            x[::2], x[1, 0] = 0, 28
            _compare_forward(answer, case, x, weight, casts)


@check_for("float8_linear_forward")
def numbers_of_any_size(answer, case):
    """Numbers that are not whole, rows up to 2^18 apart: within the bound of a float32 sum, in any order."""
    for casts, dtype, apart in itertools.product(RECIPES, (torch.float32, torch.bfloat16), ("", "rows")):
        for _ in range(case.count(1)):
            x = floats(case.rng, 4, 12, apart=apart).to(dtype)
            weight = floats(case.rng, 5, 12, log2=-4, apart=apart).to(dtype)
            _near_forward(answer, case, x, weight, casts)


def _forward_with(x: Tensor, weight: Tensor, x_cast: Cast | None, weight_cast: Cast | None) -> Tensor:
    left, right = exact.cast(exact.rows_of(x), x_cast), exact.cast(weight, weight_cast).T
    return exact.rounded(exact.product(left, right)[0], x.dtype).reshape(*x.shape[:-1], len(weight))


@misconception("float8_linear_forward", "The weight stays in high precision.")
def weight_as_it_is(x, weight, recipe):
    return _forward_with(x, weight, recipe.x, None)


@misconception("float8_linear_forward", "The input stays in high precision.")
def x_as_it_is(x, weight, recipe):
    return _forward_with(x, weight, None, recipe.weight)


@misconception("float8_linear_forward", "The weight is transposed before it is cast: its rows are columns there.")
def transposes_first(x, weight, recipe):
    return _forward_with(x, weight, recipe.x, recipe.weight and _turned(recipe.weight))


@misconception("float8_linear_forward", "One scale for all of x and one for all of weight, whatever the recipe says.")
def always_tensorwise(x, weight, recipe):
    casts = (each and each._replace(granularity="tensor") for each in (recipe.x, recipe.weight))
    return _forward_with(x, weight, *casts)


@misconception("float8_linear_forward", "No scale is a power of two: the recipe's third setting is left out.")
def no_powers_of_two(x, weight, recipe):
    casts = (each and each._replace(power_of_two=False) for each in (recipe.x, recipe.weight))
    return _forward_with(x, weight, *casts)


@misconception("float8_linear_forward", "The casts are exchanged: x has that of weight, and weight that of x.")
def exchanges_the_casts(x, weight, recipe):
    return _forward_with(x, weight, recipe.weight, recipe.x)


@misconception("float8_linear_forward", "The casts of the way back are used, which are for the gradients' products.")
def casts_of_the_way_back(x, weight, recipe):
    return _forward_with(x, weight, recipe.x_for_grad_weight, recipe.weight_for_grad_x)


@misconception("float8_linear_forward", "Each item of a batch has scales of its own: x is not flattened first.")
def item_by_item(x, weight, recipe):
    if x.dim() < 3:
        return exact.float8_linear_forward(x, weight, recipe)
    return torch.stack([item_by_item(each, weight, recipe) for each in x])


@misconception("float8_linear_forward", "The output is quantized too, as x is.")
def output_in_8_bits(x, weight, recipe):
    output = exact.float8_linear_forward(x, weight, recipe)
    return output if recipe.x is None else exact.seen(exact.rows_of(output), recipe.x).reshape(output.shape)


# --- 8.5 float8_linear_backward ---------------------------------------------------------------------------------------

_GRADIENTS = ("gradient of x", "gradient of weight")


def _compare_backward(answer, case, grad_output: Tensor, x: Tensor, weight: Tensor, casts: str | tuple) -> None:
    want = exact.float8_linear_backward(grad_output, x, weight, recipe_of(casts))
    _same(case, answer.run(backward_of, grad_output, x, weight, casts), want, _GRADIENTS)


@check_for("float8_linear_backward", weight=2)
def whole_gradients_by_every_recipe(answer, case):
    """Whole numbers whose sums are exact, gradients of 2^-20 of their size, the three recipes; three dtypes."""
    for casts, dtype in itertools.product(RECIPES, _DTYPES):
        for _ in range(case.count(2)):
            m, k, n = (int(each) for each in case.rng.integers(2, 9, 3))
            x, weight = whole(case.rng, m, k, -5).to(dtype), whole(case.rng, n, k, -7).to(dtype)
            log2 = -8 if dtype == torch.float16 else -20
            _compare_backward(answer, case, whole(case.rng, m, n, log2).to(dtype), x, weight, casts)


@check_for("float8_linear_backward")
def recipes_of_six_casts(answer, case):
    """Recipes whose six casts all differ, in format and granularity, and one that leaves grad_x without casts."""
    for casts, dtype in itertools.product(OWN_RECIPES, (torch.float32, torch.bfloat16)):
        for _ in range(case.count(2)):
            m, k, n = (int(each) for each in case.rng.integers(2, 7, 3))
            x, weight = whole(case.rng, m, k, -3, 0).to(dtype), whole(case.rng, n, k, 2, 0).to(dtype)
            _compare_backward(answer, case, whole(case.rng, m, n, -12, 0).to(dtype), x, weight, casts)


@check_for("float8_linear_backward")
def gradients_of_every_shape(answer, case):
    """Three and four dimensions, one, transposed matrices, no rows or columns at all, rows of zeros."""
    for casts in RECIPES:
        for _ in range(case.count(1)):
            grad, x, weight = whole(case.rng, 12, 5, -9), whole(case.rng, 12, 6, -4), whole(case.rng, 5, 6, -4)
            for lead in ((2, 6), (3, 2, 2)):
                _compare_backward(answer, case, grad.reshape(*lead, 5), x.reshape(*lead, 6), weight, casts)
            _compare_backward(answer, case, whole(case.rng, 1, 5)[0], whole(case.rng, 1, 6)[0], weight, casts)
            for m, k, n in ((0, 3, 2), (2, 0, 3)):
                sizes = ((m, n), (m, k), (n, k))
                _compare_backward(answer, case, *(torch.zeros(size) for size in sizes), casts)
            turned = (whole(case.rng, *size, -6).t() for size in ((5, 7), (6, 7), (6, 5)))
            _compare_backward(answer, case, *turned, casts)
            grad[::2], grad[1, 0] = 0, 28
            _compare_backward(answer, case, grad, x, weight, casts)


@check_for("float8_linear_backward")
def gradients_of_any_size(answer, case):
    """Numbers that are not whole, rows or columns up to 2^18 apart: within the bound of a float32 sum, in any order."""
    ways = (("", "", ""), ("rows", "", "columns"), ("columns", "columns", ""))
    for casts, dtype, apart in itertools.product(RECIPES, (torch.float32, torch.bfloat16), ways):
        for _ in range(case.count(1)):
            sizes = ((4, 5, -14), (4, 12, 0), (5, 12, -4))
            grad, x, weight = (
                floats(case.rng, *size, log2=log2, apart=way).to(dtype)
                for (*size, log2), way in zip(sizes, apart, strict=True)
            )
            got = answer.run(backward_of, grad, x, weight, casts)
            for place, which in enumerate(PRODUCTS[1:]):
                numbers, bound = exact.product(*exact.operands(which, recipe_of(casts), x, weight, grad))
                want = exact.rounded(numbers, dtype)
                one = got[place] if isinstance(got, tuple) and len(got) == 2 else got
                case.same_bits(exact.settled(one, numbers, bound, want), want)


@check_for("float8_linear_backward")
def gradients_that_nobody_needs(answer, case):
    """needs of each kind, with 2 and 5 rows: None for what is not wanted, and no product for it."""
    for rows, casts, needs in itertools.product(
        (2, 5), ("tensorwise", "rowwise", "rowwise_with_gw_hp"), itertools.product((True, False), repeat=2)
    ):
        words = " and ".join("a tensor" if each else "None" for each in needs)
        case.same_bits(answer.run(products_for, rows, casts, *needs), f"{words}, {sum(needs)} products")


@misconception(
    "float8_linear_backward", "The weight is cast as on the way forward, whose sums run over its other side."
)
def weight_as_forward(grad_output, x, weight, recipe, needs=(True, True)):
    casts = exact.casts_back(recipe)
    casts[1] = casts[1] and recipe.weight
    return exact.backward_by(grad_output, x, weight, casts, needs)


@misconception("float8_linear_backward", "The input is cast as on the way forward, whose sums run over its other side.")
def x_as_forward(grad_output, x, weight, recipe, needs=(True, True)):
    casts = exact.casts_back(recipe)
    casts[3] = casts[3] and recipe.x
    return exact.backward_by(grad_output, x, weight, casts, needs)


@misconception("float8_linear_backward", "The gradient is cast once, for both products, as for that of x.")
def one_cast_for_both(grad_output, x, weight, recipe, needs=(True, True)):
    casts = exact.casts_back(recipe)
    casts[2] = casts[2] and casts[0]
    return exact.backward_by(grad_output, x, weight, casts, needs)


@misconception("float8_linear_backward", "The gradient is transposed before it is cast: its columns are rows there.")
def transposes_the_gradient_first(grad_output, x, weight, recipe, needs=(True, True)):
    casts = exact.casts_back(recipe)
    casts[2] = casts[2] and _turned(casts[2])
    return exact.backward_by(grad_output, x, weight, casts, needs)


@misconception("float8_linear_backward", "The gradient has the format of x: E4M3 where the recipe says E5M2.")
def gradient_in_the_format_of_x(grad_output, x, weight, recipe, needs=(True, True)):
    casts = exact.casts_back(recipe)
    casts[0], casts[2] = (each and each._replace(fmt=(recipe.x or each).fmt) for each in (casts[0], casts[2]))
    return exact.backward_by(grad_output, x, weight, casts, needs)


@misconception("float8_linear_backward", "The gradient stays in high precision: only x and weight are cast.")
def gradient_as_it_is(grad_output, x, weight, recipe, needs=(True, True)):
    _, weight_cast, _, x_cast = exact.casts_back(recipe)
    return exact.backward_by(grad_output, x, weight, (None, weight_cast, None, x_cast), needs)


@misconception(
    "float8_linear_backward", "Both x and weight are rounded twice: they were quantized on the way forward already."
)
def quantized_twice(grad_output, x, weight, recipe, needs=(True, True)):
    once = [exact.seen(exact.rows_of(x), recipe.x).reshape(x.shape), exact.seen(weight, recipe.weight)]
    return exact.backward_by(grad_output, *once, exact.casts_back(recipe), needs)


@misconception("float8_linear_backward", "Both products are computed, whether their gradient is wanted or not.")
def computes_both(grad_output, x, weight, recipe, needs=(True, True)):
    return exact.backward_by(grad_output, x, weight, exact.casts_back(recipe))


@misconception("float8_linear_backward", "Products in high precision are in 8 bits too, one scale for each operand.")
def nothing_in_high_precision(grad_output, x, weight, recipe, needs=(True, True)):
    casts = exact.casts_back(recipe)
    return exact.backward_by(grad_output, x, weight, [each or Cast(E4M3) for each in casts], needs)


# --- 8.6 Float8Linear -------------------------------------------------------------------------------------------------

_PARTS = ("output", "gradient of x", "gradient of weight", "gradient of bias")


def _layer_inputs(rng, *lead: int, k: int, n: int, dtype=torch.float32, bias: bool = True) -> tuple:
    lines = int(np.prod(lead))
    x, weight, grad = whole(rng, lines, k, -5), whole(rng, n, k, -7), whole(rng, lines, n, -16)
    offset = torch.from_numpy(rng.integers(-900, 901, n) / 64).to(dtype) if bias else None
    return x.reshape(*lead, k).to(dtype), weight.to(dtype), offset, grad.reshape(*lead, n).to(dtype)


def _compare_layers(answer, case, inputs: tuple, casts: str | tuple, how: str = "") -> None:
    x, weight, bias, grad = inputs
    dtype = torch.bfloat16 if how == "autocast" else x.dtype
    output = exact.float8_linear_forward(x, weight, recipe_of(casts)).to(dtype)
    gradients = exact.float8_linear_backward(grad.to(dtype), x, weight, recipe_of(casts))
    total = torch.empty(0)
    if bias is not None:
        output = output + bias.to(dtype)
        total = exact.rows_of(grad.to(dtype)).double().sum(0).to(dtype).to(bias.dtype)
    want = (output, *(each.to(x.dtype) for each in gradients), total)
    _same(case, answer.run(layer_of, *inputs, casts, how), want, _PARTS)


@check_for("Float8Linear", weight=2)
def a_step_by_every_recipe(answer, case):
    """One step of a layer with a bias, whole numbers: its output and three gradients, by the three recipes."""
    for casts in RECIPES:
        for _ in range(case.count(2)):
            k, n = (int(each) for each in case.rng.integers(2, 8, 2))
            _compare_layers(answer, case, _layer_inputs(case.rng, 4, k=k, n=n), casts)


@check_for("Float8Linear")
def layers_of_other_kinds(answer, case):
    """No bias; x of three dimensions; a layer in bfloat16; under BF16 autocast, with a bias and without."""
    for casts in RECIPES:
        for _ in range(case.count(1)):
            _compare_layers(answer, case, _layer_inputs(case.rng, 3, k=4, n=5, bias=False), casts)
            _compare_layers(answer, case, _layer_inputs(case.rng, 2, 3, k=5, n=3), casts)
            _compare_layers(answer, case, _layer_inputs(case.rng, 5, k=3, n=4, dtype=torch.bfloat16, bias=False), casts)
            for bias in (False, True):
                _compare_layers(answer, case, _layer_inputs(case.rng, 4, k=5, n=4, bias=bias), casts, "autocast")


_FACTS = ("kind", "parameters", "recipe", "products", "weight", "embedding")


def _as_facts(*facts: str) -> str:
    return "; ".join(facts)


@check_for("Float8Linear")
def parameters_and_what_is_not_computed(answer, case):
    """Made by the constructor and by from_linear: training and evaluating, tied, frozen, and as a first layer."""
    for how in ("made", "training", "evaluating", "frozen", "tied", "first layer"):
        for recipe, size in zip(RECIPES, (2, 3, 5), strict=True):
            settings = (size, size + 1, size % 2 == 1, recipe, how)
            want = layer_facts(exact.Float8Linear, *settings)
            case.same_bits(answer.run(layer_facts, *settings), want, show=_as_facts, parts=_FACTS)


@check_for("Float8Linear")
def recipes_that_do_not_exist(answer, case):
    """Names of no recipe: ValueError that lists those there are."""
    for name in ("blockwise", "Tensorwise", "row", ""):
        case.same_bits(answer.run(refuses, name), f"ValueError that lists {', '.join(RECIPES)}")


@misconception("Float8Linear", "The parameters are copied: the optimizer and a tied embedding hold others.")
class CopiesTheParameters(exact.Float8Linear):
    def take(self, linear):
        super().take(linear)
        self.weight = torch.nn.Parameter(linear.weight.detach().clone(), linear.weight.requires_grad)
        self.bias = self.bias if self.bias is None else torch.nn.Parameter(linear.bias.detach().clone())


@misconception("Float8Linear", "The recipe given to from_linear is forgotten: the layer has the default one.")
class ForgetsTheRecipe(exact.Float8Linear):
    @classmethod
    def from_linear(cls, linear, recipe="tensorwise"):
        return super().from_linear(linear)


@misconception("Float8Linear", "A new layer is in training mode, also in place of one that is not.")
class AlwaysTrains(exact.Float8Linear):
    @classmethod
    def from_linear(cls, linear, recipe="tensorwise"):
        return super().from_linear(linear, recipe).train()


@misconception("Float8Linear", "Both gradients are computed, also that of a frozen weight or of a first layer's input.")
class ComputesBoth(exact.Float8Linear):
    def gradients(self, gradient, x, weight, needs):
        return super().gradients(gradient, x, weight, (True, True))


@misconception("Float8Linear", "The bias is quantized, as x and weight are.")
class QuantizesTheBias(exact.Float8Linear):
    def add_bias(self, output):
        if self.bias is None:
            return output
        cast = exact.cast_both_ways(self.bias[None], Cast(E4M3), None)[0]
        return output + cast.to(output.dtype)


@misconception("Float8Linear", "Only the output is in 8 bits: both gradients are those of nn.Linear.")
class HighPrecisionBack(exact.Float8Linear):
    def gradients(self, gradient, x, weight, needs):
        return exact.backward_by(gradient, x, weight, (None,) * 4, needs)


@misconception("Float8Linear", "Autograd makes the way back: the gradient as it is, times quantized x and weight.")
class DifferentiatesTheProduct(exact.Float8Linear):
    def gradients(self, gradient, x, weight, needs):
        once = [exact.seen(exact.rows_of(x), self.recipe.x).reshape(x.shape), exact.seen(weight, self.recipe.weight)]
        return exact.backward_by(gradient, *once, (None,) * 4, needs)


@misconception("Float8Linear", "The weight is cast when the layer is made: later changes of it are not seen.")
class CastsTheWeightOnce(exact.Float8Linear):
    kept = None

    def take(self, linear):
        super().take(linear)
        self.kept = exact.seen(linear.weight, self.recipe.weight)

    def product(self, x, weight):
        return super().product(x, weight if self.kept is None else self.kept)


# --- 8.7 why_not_float8 -----------------------------------------------------------------------------------------------

_NAMES = ("head", "blocks.0.mlp.up", "blocks.11.attention.qkv")


def _compare_reasons(answer, case, *settings, skip: tuple[str, ...] = (), name: str = "") -> None:
    """settings: out_features, in_features, rows, recipe."""
    name = name or str(case.rng.choice(_NAMES))
    case.same_bits(answer(name, *settings, skip), exact.why_not_float8(name, *settings, skip))


@check_for("why_not_float8", weight=2)
def sizes_around_every_edge(answer, case):
    """Every size at which a rule changes, 16 less and 16 more, in both dimensions; the three recipes."""
    edges = [edge + step for edge in (1024, 2048, 4096) for step in (-16, 0, 16)]
    for recipe, out_features, in_features in itertools.product(RECIPES, edges, edges):
        _compare_reasons(answer, case, out_features, in_features, 512, recipe)


@check_for("why_not_float8")
def sizes_that_do_not_divide(answer, case):
    """Sizes and rows that are multiples of 1, 2, 4, 8 and 16, in large layers and small ones; 65 tokens; 50,257."""
    for recipe in RECIPES:
        for step, place, size in itertools.product((1, 2, 4, 8), range(3), (8192, 512)):
            sizes = [size] * 3
            sizes[place] += step
            _compare_reasons(answer, case, *sizes, recipe)
        for out_features in (65, 50_257, 50_304):
            _compare_reasons(answer, case, out_features, 8192, 1024, recipe)


@check_for("why_not_float8")
def names_to_skip(answer, case):
    """Names that are skipped as a whole, in part, or not; with good sizes, odd ones and small ones."""
    skips = (("head",), ("mlp",), (".0.",), ("qkv", "head"), ("attention.qkv",), (), ("up", "down"), ("Head",))
    for skip, name in itertools.product(skips, _NAMES):
        for out_features, in_features in ((8192, 8192), (65, 8192), (256, 256)):
            _compare_reasons(answer, case, out_features, in_features, 512, "rowwise", skip=skip, name=name)


@check_for("why_not_float8")
def names_of_no_recipe(answer, case):
    """Recipes that do not exist: ValueError, whatever the layer is."""
    for recipe, size in itertools.product(("blockwise", "tensor", "row"), (8192, 7)):
        case.raises(ValueError, answer, "head", size, size, 512, recipe, ())


def _reasons(name, out_features, in_features, rows, recipe, skip, **change) -> str:
    """The first rule that holds, with some of them replaced: by_name, does_not_divide, too_small."""
    if recipe not in RECIPES:
        raise ValueError(recipe)
    n, k = (size // 16 * 16 for size in (out_features, in_features))
    rules = {
        "by_name": any(text in name for text in skip),
        "does_not_divide": exact.why_not_float8(name, out_features, in_features, rows, recipe) == "does not divide",
        "too_small": exact.why_not_float8(name, n, k, 16, recipe) == "too small",
    }
    return next((rule.replace("_", " ") for rule, holds in (rules | change).items() if holds), "")


@misconception("why_not_float8", "It takes in_features for out_features, and the other way round.")
def sizes_exchanged(name, out_features, in_features, rows, recipe, skip=()):
    return exact.why_not_float8(name, in_features, out_features, rows, recipe, skip)


@misconception("why_not_float8", "It takes a size at the edge for large enough: `<` in place of `<=`.")
def edges_are_large(name, out_features, in_features, rows, recipe, skip=()):
    small = exact.why_not_float8("", *(each // 16 * 16 + 16 for each in (out_features, in_features)), 16, recipe)
    return _reasons(name, out_features, in_features, rows, recipe, skip, too_small=small == "too small")


@misconception("why_not_float8", "It never looks at the rows, over which grad_weight sums.")
def rows_do_not_matter(name, out_features, in_features, rows, recipe, skip=()):
    return exact.why_not_float8(name, out_features, in_features, 16, recipe, skip)


@misconception("why_not_float8", "It asks for multiples of 16 rows also where grad_weight is in high precision.")
def rows_always_matter(name, out_features, in_features, rows, recipe, skip=()):
    odd = bool(out_features % 16 or in_features % 16 or rows % 16)
    return _reasons(name, out_features, in_features, rows, recipe, skip, does_not_divide=odd)


@misconception("why_not_float8", "It skips a layer whose whole name is in `skip`, and none of which that is a part.")
def whole_names(name, out_features, in_features, rows, recipe, skip=()):
    return _reasons(name, out_features, in_features, rows, recipe, skip, by_name=name in skip)


@misconception("why_not_float8", "It has the sizes of rowwise for every recipe.")
def rowwise_sizes_for_all(name, out_features, in_features, rows, recipe, skip=()):
    sizes = (each // 16 * 16 for each in (out_features, in_features))
    small = exact.why_not_float8("", *sizes, 16, "rowwise") == "too small"
    return _reasons(name, out_features, in_features, rows, recipe, skip, too_small=small)


@misconception("why_not_float8", "It has the sizes of tensorwise for rowwise_with_gw_hp.")
def tensorwise_sizes_for_the_third(name, out_features, in_features, rows, recipe, skip=()):
    sizes = (each // 16 * 16 for each in (out_features, in_features))
    small = exact.why_not_float8("", *sizes, 16, "rowwise" if recipe == "rowwise" else "tensorwise") == "too small"
    return _reasons(name, out_features, in_features, rows, recipe, skip, too_small=small)


@misconception("why_not_float8", "It asks for multiples of 8.")
def multiples_of_eight(name, out_features, in_features, rows, recipe, skip=()):
    lengths = [out_features, in_features, *([] if recipe == "rowwise_with_gw_hp" else [rows])]
    return _reasons(name, out_features, in_features, rows, recipe, skip, does_not_divide=any(x % 8 for x in lengths))


@misconception("why_not_float8", "It leaves out the last rule of rowwise: 4096 by 2048 and below.")
def without_the_last_rule(name, out_features, in_features, rows, recipe, skip=()):
    small = out_features <= 2048 or in_features <= 1024
    if recipe == "tensorwise":
        small = in_features <= 4096 and out_features <= 1024
    return _reasons(name, out_features, in_features, rows, recipe, skip, too_small=small)


# --- reading questions ------------------------------------------------------------------------------------------------

question_for(
    "8.A",
    False,
    "False: without CUDA autocast the `if` is not taken, and the layer gets float32. Only the emulated float32 product "
    "is an op that CPU autocast casts.",
    "Which autocast is on, and which one does the `if` ask about?",
)
question_for(
    "8.B",
    "output",
    "output: use_fast_accum is True there, and False (the default) for both gradients.",
    "Two of the three lines say Float8GemmConfig(), with nothing in the brackets.",
)
question_for(
    "8.C",
    2,
    "2: input_hp is the input in high precision, bfloat16 here. Codes would take 1, but the way back needs other casts "
    "of it.",
    "What is saved, codes or the tensor itself? And how large is one number of it?",
    {1: "That would be its codes. Look at the name of what is saved.", 4: "In float32. This input is bfloat16."},
)
question_for(
    "8.D",
    2.0**-9,
    "2^-9 = 0.001953125: 0.001 is a little above 2^-10, which is half of the smallest E4M3, and so it is rounded up.",
    "The line `is` shows it. Which of its four numbers is it?",
    {0.0: "0.001 is above half of the smallest number, 0.00098.", 0.001: "E4M3 has no such number."},
)
question_for(
    "8.E",
    608,
    "608 = 38 times 16: eight rows of zeros, which add nothing to any sum.",
    "Which is the next multiple of 16 from 600 on?",
    {600: "600 / 16 is 37.5.", 592: "That would leave out eight tokens.", 1024: "That runs; fewer will do."},
)
