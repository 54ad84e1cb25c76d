"""Checks and known misconceptions of chapter 09."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lowprec_lab import scaled_mm as given
from lowprec_lab.graders import scaled_mm_oracle as exact
from lowprec_lab.graders.registry import check_for, misconception, oracle_for, question_for
from lowprec_lab.scaled_mm import E4M3, E5M2, call

for _name in (
    "scaled_mm_reference", "to_column_major", "pad_to_multiple", "scaling_kind", "explain_scaled_mm", "matmul_for",
    "requantized_sum", "multiply", "float8_products",
):  # fmt: skip
    oracle_for(_name, getattr(exact, _name))

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def whole(rng: np.random.Generator, shape: tuple, highest: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Whole numbers up to `highest`, which the dtype holds."""
    return torch.from_numpy(rng.integers(-highest, highest + 1, shape).astype(np.float32)).to(dtype)


def power(rng: np.random.Generator, shape: tuple, low: int = -6, high: int = 6) -> Tensor:
    """float32 powers of two between 2**low and 2**high."""
    return torch.from_numpy(np.asarray(np.ldexp(np.ones(shape, np.float32), rng.integers(low, high + 1, shape))))


def scales(rng: np.random.Generator, shape: tuple) -> Tensor:
    """1, 3, 5 or 7 times a power of two: products of few bits, so that float32 holds every sum exactly."""
    odd = torch.from_numpy(np.asarray(rng.choice([1, 3, 5, 7], shape), np.float32))
    return odd * power(rng, shape, -4, 3)


def operands(rng: np.random.Generator, m: int, k: int, n: int, dtype_a: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """a, row-major, and b, column-major, of small whole numbers."""
    a = whole(rng, (m, k), 15 if dtype_a == E4M3 else 7, dtype_a)
    return a, whole(rng, (n, k), 15).t()


# --- 9.1 scaled_mm_reference ------------------------------------------------------------------------------------------


def _compare_products(answer, case, a, b, scale_a, scale_b, *more) -> None:
    case.same_bits(answer(a, b, scale_a, scale_b, *more), exact.scaled_mm_reference(a, b, scale_a, scale_b, *more))


def _sizes(rng: np.random.Generator) -> tuple[int, int, int]:
    return tuple(int(size) for size in rng.integers(2, 9, 3))


@check_for("scaled_mm_reference", weight=2)
def one_scale_each(answer, case):
    """Products of whole numbers with one scale for each matrix, of 0, 1 and 2 dimensions, as bfloat16 and float32."""
    for shape in ((), (1,), (1, 1)):
        for out_dtype in (BF16, FP32):
            for _ in range(case.count(2)):
                a, b = operands(case.rng, *_sizes(case.rng))
                _compare_products(answer, case, a, b, scales(case.rng, shape), scales(case.rng, shape), None, out_dtype)


@check_for("scaled_mm_reference", weight=2)
def scales_by_row(answer, case):
    """Scales (M, 1) and (1, N); float16 and bfloat16; gradients in E5M2."""
    for dtype in (E4M3, E5M2):
        for out_dtype in (BF16, FP16, FP32):
            for _ in range(case.count(2)):
                m, k, n = _sizes(case.rng)
                a, b = operands(case.rng, m, k, n, dtype)
                both = power(case.rng, (m, 1), -5, 2), power(case.rng, (1, n), -5, 2)
                _compare_products(answer, case, a, b, *both, None, out_dtype)


@check_for("scaled_mm_reference")
def with_a_bias(answer, case):
    """A bias in float32, bfloat16 or float16, large enough for the order of adding and rounding to show."""
    for dtype in (FP32, BF16, FP16):
        for out_dtype in (BF16, FP32):
            for _ in range(case.count(2)):
                m, k, n = _sizes(case.rng)
                a, b = operands(case.rng, m, k + 4, n)
                bias = whole(case.rng, (n,), 120, dtype)
                both = scales(case.rng, (1,)), scales(case.rng, (1,))
                _compare_products(answer, case, a, b, *both, bias, out_dtype)


def _product(a, b, scale_a, scale_b, bias=None) -> Tensor:
    total = (a.float() * scale_a) @ (b.float() * scale_b)
    return total if bias is None else total + bias.float()


@misconception("scaled_mm_reference", "It divides by the scales: these are inverse scales, which a code is times.")
def divides(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    return _product(a, b, 1 / scale_a, 1 / scale_b, bias).to(out_dtype)


@misconception("scaled_mm_reference", "It leaves the scales out.")
def without_scales(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    return _product(a, b, 1.0, 1.0, bias).to(out_dtype)


@misconception("scaled_mm_reference", "It uses scale_a for both matrices, or its first row.")
def one_scale_for_both(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    return _product(a, b, scale_a, scale_a.reshape(-1)[0], bias).to(out_dtype)


@misconception("scaled_mm_reference", "It rounds the product to bfloat16 first: a second rounding, and short float32.")
def rounds_before_the_bias(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    total = _product(a, b, scale_a, scale_b).bfloat16().float()
    return (total if bias is None else total + bias.float()).to(out_dtype)


@misconception("scaled_mm_reference", "It rounds the scaled sum in float8's own matrix product, which gives float8.")
def in_float8(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    codes = (a.float() @ b.float()).clamp(-448, 448).to(E4M3).float()
    total = codes * scale_a * scale_b
    return (total if bias is None else total + bias.float()).to(out_dtype)


@misconception("scaled_mm_reference", "It ignores the bias.")
def without_bias(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    return _product(a, b, scale_a, scale_b).to(out_dtype)


@misconception("scaled_mm_reference", "It multiplies the bias by the scales as well.")
def scales_the_bias(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    total = a.float() @ b.float()
    return ((total if bias is None else total + bias.float()) * scale_a * scale_b).to(out_dtype)


# --- 9.2 to_column_major ----------------------------------------------------------------------------------------------


def _compare_with(answer, case, scenario, wants: tuple, *args) -> None:
    """Compare the parts of what a scenario gives for the answer with what it must give."""
    got = answer.run(scenario, *args)
    same_kind = isinstance(got, tuple) and len(got) == len(wants)
    for result, want in zip(got if same_kind else [got] * len(wants), wants, strict=True):
        case.same_bits(result, want, show=str if isinstance(want, str) else None)


def _compare_layouts(answer, case, x: Tensor, step: int = 1) -> None:
    want = given.layout_and_values(exact.to_column_major, x, step)
    _compare_with(answer, case, given.layout_and_values, want, x, step)


def _matrix(rng: np.random.Generator, shape: tuple, dtype: torch.dtype) -> Tensor:
    return whole(rng, shape, 7, dtype)


@check_for("to_column_major", weight=2)
def row_major_matrices(answer, case):
    """Row-major matrices of E4M3, E5M2 and bfloat16, wide, tall and square."""
    for dtype in (E4M3, E5M2, BF16):
        for _ in range(case.count(3)):
            m, n = (int(size) for size in case.rng.integers(2, 9, 2))
            _compare_layouts(answer, case, _matrix(case.rng, (m, n), dtype))


@check_for("to_column_major")
def column_major_already(answer, case):
    """Transposes of row-major matrices: they have the right strides before."""
    for dtype in (E4M3, BF16):
        for _ in range(case.count(3)):
            m, n = (int(size) for size in case.rng.integers(2, 9, 2))
            _compare_layouts(answer, case, _matrix(case.rng, (n, m), dtype).t())


@check_for("to_column_major")
def matrices_with_gaps(answer, case):
    """Every second column of a row-major and of a column-major matrix."""
    for transposed in (False, True):
        for _ in range(case.count(3)):
            m, n = (int(size) for size in case.rng.integers(3, 9, 2))
            x = _matrix(case.rng, (m, 2 * n), E4M3)
            _compare_layouts(answer, case, _matrix(case.rng, (2 * n, m), E4M3).t() if transposed else x, 2)


@misconception("to_column_major", "It gives the transpose: the columns are in order, and the shape is turned.")
def transposes(x):
    return x.t()


@misconception("to_column_major", "It makes the matrix contiguous, which is row-major.")
def makes_contiguous(x):
    return x.contiguous()


@misconception("to_column_major", "It copies the transpose and stops there: the right memory under a turned shape.")
def copies_the_transpose(x):
    return x.t().contiguous()


@misconception("to_column_major", "It changes the strides and moves nothing: the elements are scrambled.")
def changes_strides_only(x):
    return torch.as_strided(x.contiguous(), x.shape, (1, x.shape[0]))


@misconception("to_column_major", "It reshapes where it should transpose: same strides, other places.")
def reshapes(x):
    return x.reshape(x.shape[1], x.shape[0]).t()


@misconception("to_column_major", "It transposes twice and copies in between nothing: the strides stay what they were.")
def transposes_twice(x):
    return x.t().t()


# --- 9.3 pad_to_multiple ----------------------------------------------------------------------------------------------


def _compare_padding(answer, case, x: Tensor, multiple: int, dims: tuple[int, ...]) -> None:
    want = given.shape_and_values(exact.pad_to_multiple, x, multiple, dims)
    _compare_with(answer, case, given.shape_and_values, want, x, multiple, dims)


@check_for("pad_to_multiple", weight=2)
def matrices_to_multiples_of_16(answer, case):
    """Matrices of float8 and bfloat16 of up to 20 rows and 10 columns, the first, the last or both padded."""
    for dtype in (E4M3, E5M2, BF16):
        for dims in ((0,), (1,), (0, 1)):
            for _ in range(case.count(1)):
                shape = tuple(int(size) for size in case.rng.integers(1, (21, 11)))
                _compare_padding(answer, case, whole(case.rng, shape, 7, dtype), 16, dims)


@check_for("pad_to_multiple")
def multiples_already(answer, case):
    """Sizes that are multiples already, 0 among them: nothing is added."""
    for shape, multiple in (((4, 8), 4), ((12, 4), 4), ((0, 16), 16), ((16, 8), 8), ((3, 6), 3)):
        for dims in ((0,), (0, 1)):
            _compare_padding(answer, case, whole(case.rng, shape, 7), multiple, dims)


@check_for("pad_to_multiple")
def other_dimensions(answer, case):
    """Vectors and tensors of three dimensions; negative dims; multiples of 3 to 8."""
    for _ in range(case.count(4)):
        sizes = tuple(int(size) for size in case.rng.integers(1, 8, 3))
        multiple = int(case.rng.integers(3, 9))
        _compare_padding(answer, case, whole(case.rng, sizes, 7, FP32), multiple, (-1,))
        _compare_padding(answer, case, whole(case.rng, sizes, 7), multiple, (-3, 1))
        _compare_padding(answer, case, whole(case.rng, sizes[:1], 7, BF16), multiple, (0,))


def _padded(x: Tensor, dims: tuple, more, front: bool = False, value: float = 0.0) -> Tensor:
    """x with more(size) places of `value` beside it in each of dims."""
    added = {dim % x.dim(): more(x.shape[dim]) for dim in dims}
    sizes = [size + added.get(dim, 0) for dim, size in enumerate(x.shape)]
    made = torch.full(sizes, value).to(x.dtype)
    if min(added.values(), default=0) < 0:  # cut, not padded
        return x[tuple(slice(0, size) for size in sizes)].clone()
    starts = [added.get(dim, 0) if front else 0 for dim in range(x.dim())]
    made[tuple(slice(s, s + size) for s, size in zip(starts, x.shape, strict=True))] = x
    return made


@misconception("pad_to_multiple", "It adds a whole multiple where the size is one already.")
def always_adds(x, multiple, dims):
    return _padded(x, dims, lambda size: multiple - size % multiple)


@misconception("pad_to_multiple", "It cuts down to a multiple instead of filling up.")
def cuts(x, multiple, dims):
    return _padded(x, dims, lambda size: -(size % multiple))


@misconception("pad_to_multiple", "It puts the zeros in front.")
def pads_in_front(x, multiple, dims):
    return _padded(x, dims, lambda size: -size % multiple, front=True)


@misconception("pad_to_multiple", "It fills up with ones: they add to every sum.")
def pads_with_ones(x, multiple, dims):
    return _padded(x, dims, lambda size: -size % multiple, value=1.0)


@misconception("pad_to_multiple", "It pads every dimension, whatever dims says.")
def pads_all(x, multiple, dims):
    return _padded(x, tuple(range(x.dim())), lambda size: -size % multiple)


@misconception("pad_to_multiple", "It pads the last dimension alone.")
def pads_the_last(x, multiple, dims):
    return _padded(x, (-1,), lambda size: -size % multiple)


@misconception("pad_to_multiple", "It adds size % multiple places, where multiple - size % multiple are missing.")
def adds_the_remainder(x, multiple, dims):
    return _padded(x, dims, lambda size: size % multiple)


@misconception("pad_to_multiple", "It pads to multiples of 16, whatever the multiple is.")
def always_sixteen(x, multiple, dims):
    return _padded(x, dims, lambda size: -size % 16)


# --- 9.4 scaling_kind -------------------------------------------------------------------------------------------------


def _compare_kinds(answer, case, one: given.Call) -> None:
    described = one.a, one.b, one.scale_a, one.scale_b
    case.same_bits(answer.run(given.kind_found, *described), str(exact.kind(*described)), show=str)


def _large(rng: np.random.Generator) -> tuple[int, int, int]:
    return tuple(int(size) for size in rng.choice([16, 32, 64, 128, 160, 200, 256, 300], 3))


@check_for("scaling_kind", weight=2)
def scales_of_one_element(answer, case):
    """One element each, of 0, 1 and 2 dimensions, also for matrices of one row or one column."""
    for shape_a in ((), (1,), (1, 1)):
        for shape_b in ((), (1,), (1, 1)):
            both = {"scale_a": given.floats(*shape_a), "scale_b": given.floats(*shape_b)}
            _compare_kinds(answer, case, call("", (8, 9), *_large(case.rng), **both))
    for m, n in ((1, 1), (1, 16), (16, 1)):
        for k in (16, 32, 64, 256):
            _compare_kinds(answer, case, call("", (8, 9), m, k, n, rowwise=True))
            _compare_kinds(answer, case, call("", (8, 9), m, k, n))


@check_for("scaling_kind", weight=2)
def scales_of_rows(answer, case):
    """(M, 1) and (1, N); the same as (M,) and (N,); scale_b as (N, 1); one of each kind; scales with gaps."""
    for _ in range(case.count(4)):
        m, k, n = _large(case.rng)
        _compare_kinds(answer, case, call("", (8, 9), m, k, n, rowwise=True))
        for scale_a, scale_b in (
            (given.floats(m), given.floats(n)), (given.floats(m, 1), given.floats(n, 1)),
            (given.floats(m, 1), given.floats(1)), (given.floats(1), given.floats(1, n)),
            (given.floats(n + 1, 1), given.floats(1, m)), (given.floats(m, 1), given.floats(n)),
        ):  # fmt: skip
            _compare_kinds(answer, case, call("", (8, 9), m, k, n, scale_a=scale_a, scale_b=scale_b))
        gaps = given.floats(m, 1, strides=(2, 1)), given.floats(1, n, strides=(2 * n, 2))
        _compare_kinds(answer, case, call("", (8, 9), m, k, n, rowwise=True, scale_a=gaps[0]))
        _compare_kinds(answer, case, call("", (8, 9), m, k, n, rowwise=True, scale_b=gaps[1]))


@check_for("scaling_kind")
def scales_of_blocks(answer, case):
    """The pairs of blockwise scales that there are, and pairs that there are not; sizes that 128 does not divide."""
    for _ in range(case.count(3)):
        m, n = (int(size) for size in case.rng.choice([160, 200, 256, 300], 2))
        k = int(case.rng.choice([160, 256, 300, 384]))
        across = math.ceil(k / 128)
        for rows in (m, math.ceil(m / 128), m // 128):
            for columns in (n, math.ceil(n / 128)):
                _compare_kinds(answer, case, call("", (9, 0), m, k, n, **_block_scales(rows, across, columns, m, n)))
        _compare_kinds(answer, case, call("", (9, 0), m, k, n, **_block_scales(m, k // 128, n, m, n)))
        for turned in ("scale_a", "scale_b"):
            for rows, columns in ((m, n), (m, math.ceil(n / 128)), (math.ceil(m / 128), n)):
                both = _block_scales(rows, across, columns, m, n, turned)
                _compare_kinds(answer, case, call("", (9, 0), m, k, n, **both))


def _block_scales(rows: int, across: int, columns: int, m: int, n: int, turned: str = "") -> dict:
    """Scales (rows, across) and (across, columns) as they have to lie, or one of them (`turned`) the other way."""
    row_major = {"scale_a": rows != m, "scale_b": columns == n}
    shapes = {"scale_a": (rows, across), "scale_b": (across, columns)}
    made = {}
    for name, shape in shapes.items():
        strides = (shape[1], 1) if row_major[name] != (name == turned) else (1, shape[0])
        made[name] = given.floats(*shape, strides=strides)
    return made


@check_for("scaling_kind")
def other_dtypes(answer, case):
    """Scales in float64, bfloat16 and float16; operands in bfloat16 and float32; E5M2."""
    for dtype in (torch.float64, BF16, FP16):
        for side in ("scale_a", "scale_b"):
            m, k, n = _large(case.rng)
            shape = (m, 1) if side == "scale_a" else (1, n)
            _compare_kinds(answer, case, call("", (8, 9), m, k, n, **{side: given.floats(1, dtype=dtype)}))
            wrong = {side: given.floats(*shape, dtype=dtype)}
            _compare_kinds(answer, case, call("", (8, 9), m, k, n, rowwise=True, **wrong))
    for dtype in (BF16, FP32, E5M2):
        m, k, n = _large(case.rng)
        _compare_kinds(answer, case, call("", (8, 9), m, k, n, a=(dtype, (m, k), (k, 1))))
        _compare_kinds(answer, case, call("", (8, 9), m, k, n, rowwise=True, b=(dtype, (k, n), (1, k))))


def _kind(a, b, scale_a, scale_b, *, vectors=False, turned=False, gaps=False, scalars=False, scale_dtypes=False,
          operand_dtypes=False, floor=False, both_blocks=False, rows_first=False,
    one_side=False, any_strides=False,
):  # fmt: skip
    """scaling_kind with one of its conditions changed."""
    known = exact.FLOAT8
    if not operand_dtypes and not (a.dtype in known and b.dtype in known):
        return None
    if not scale_dtypes and not scale_a.dtype == scale_b.dtype == torch.float32:
        return None
    (m, k), n = a.shape, b.shape[1]
    shapes = tuple(scale_a.shape), tuple(scale_b.shape)
    by_row = [((m, 1), (1, n))] + [((m,), (n,))] * vectors + [((m, 1), (n, 1))] * turned
    is_by_row = shapes in by_row and (gaps or (scale_a.is_contiguous() and scale_b.is_contiguous()))
    if one_side:
        is_by_row = is_by_row or (shapes[0] == (m, 1) and m > 1) or (shapes[1] == (1, n) and n > 1)
    if rows_first and is_by_row:
        return "rowwise"
    single = shapes == ((), ()) if scalars else scale_a.numel() == scale_b.numel() == 1
    if single:
        return "tensorwise"
    if is_by_row:
        return "rowwise"
    blocks = (lambda size: size // 128) if floor else (lambda size: -(-size // 128))
    pairs = [(m, n), (m, blocks(n)), (blocks(m), n)] + [(blocks(m), blocks(n))] * both_blocks
    wanted = [((rows, blocks(k)), (blocks(k), columns)) for rows, columns in pairs]
    if shapes not in wanted:
        return None
    (rows, across), (_, columns) = shapes
    strides_a = (1, rows) if rows == m else (across, 1)
    strides_b = (columns, 1) if columns == n else (1, across)
    if not any_strides and not (given.has_strides(scale_a, *strides_a) and given.has_strides(scale_b, *strides_b)):
        return None
    return "blockwise"


@misconception("scaling_kind", "It does not look at the strides of blockwise scales.")
def blocks_anyhow(a, b, scale_a, scale_b):
    return _kind(a, b, scale_a, scale_b, any_strides=True)


@misconception("scaling_kind", "It takes scales of shape (M,) and (N,) as rowwise.")
def vectors_are_rows(a, b, scale_a, scale_b):
    return _kind(a, b, scale_a, scale_b, vectors=True)


@misconception("scaling_kind", "It takes a scale_b of shape (N, 1) as rowwise: it has to lie along b's columns.")
def turned_scales(a, b, scale_a, scale_b):
    return _kind(a, b, scale_a, scale_b, turned=True)


@misconception("scaling_kind", "It does not ask whether rowwise scales are contiguous.")
def gaps_are_fine(a, b, scale_a, scale_b):
    return _kind(a, b, scale_a, scale_b, gaps=True)


@misconception("scaling_kind", "It takes 0-d scales alone as tensorwise: (1,) and (1, 1) have one element too.")
def scalars_alone(a, b, scale_a, scale_b):
    return _kind(a, b, scale_a, scale_b, scalars=True)


@misconception("scaling_kind", "It does not look at the dtypes of the scales.")
def any_scale_dtype(a, b, scale_a, scale_b):
    return _kind(a, b, scale_a, scale_b, scale_dtypes=True)


@misconception("scaling_kind", "It does not ask whether a and b are float8.")
def any_operand_dtype(a, b, scale_a, scale_b):
    return _kind(a, b, scale_a, scale_b, operand_dtypes=True)


@misconception("scaling_kind", "It rounds the numbers of blocks down: 300 is three blocks of 128.")
def whole_blocks_only(a, b, scale_a, scale_b):
    return _kind(a, b, scale_a, scale_b, floor=True)


@misconception("scaling_kind", "It lets both matrices have blocks of 128x128, which no kernel takes.")
def both_in_blocks(a, b, scale_a, scale_b):
    return _kind(a, b, scale_a, scale_b, both_blocks=True)


@misconception("scaling_kind", "It asks for rowwise first: scales of one element each become rowwise where M = N = 1.")
def asks_for_rows_first(a, b, scale_a, scale_b):
    return _kind(a, b, scale_a, scale_b, rows_first=True)


@misconception("scaling_kind", "It calls scales rowwise when one of the two is.")
def one_side_is_enough(a, b, scale_a, scale_b):
    return _kind(a, b, scale_a, scale_b, one_side=True)


# --- 9.5 explain_scaled_mm --------------------------------------------------------------------------------------------

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
_CAPABLE = CAPABILITIES[3:]


def _compare_rules(answer, case, one: given.Call) -> None:
    found = exact.rules(*one.described)
    case.same_bits(answer.run(given.problems_found, *one.described), "; ".join(found) or "no problem", show=str)


def _pick(rng: np.random.Generator, *options):
    return options[int(rng.integers(len(options)))]


@check_for("explain_scaled_mm", weight=2)
def capabilities_and_sizes(answer, case):
    """Eight kinds of GPU; M, K and N of 8 to 65, multiples of 16 or not, or 0; wrong numbers of dimensions."""
    for capability in CAPABILITIES:
        for _ in range(case.count(3)):
            m, k, n = (int(case.rng.choice([8, 16, 17, 24, 32, 40, 48, 64, 65])) for _ in range(3))
            _compare_rules(answer, case, call("", capability, m, k, n))
    for m in (1, 8, 17, 40):
        _compare_rules(answer, case, call("", (8, 9), m, 32, 48))
    for capability in ((8, 6), (8, 9), (12, 0)):
        for shape in ((2, 8, 32), (32,)):
            a = (E4M3, shape, torch.empty(shape).stride())
            _compare_rules(answer, case, call("", capability, a=a))
        _compare_rules(answer, case, call("", capability, k=64, a=(E4M3, (16, 32), (32, 1))))
        row_major = (E4M3, (32, 48), (48, 1))
        _compare_rules(answer, case, call("", capability, m=0, b=row_major))


@check_for("explain_scaled_mm", weight=2)
def layouts(answer, case):
    """a and b row-major, column-major and with gaps, with one scale each and with scales by row, on all GPUs."""
    for capability in _CAPABLE:
        for _ in range(case.count(6)):
            a, b = (_strides(case.rng, *sizes) for sizes in ((16, 32), (32, 48)))
            cublas = _pick(case.rng, (12, 9), (12, 9), (12, 4))
            rowwise = bool(case.rng.random() < 0.5)
            changes = {"a": (E4M3, (16, 32), a), "b": (E4M3, (32, 48), b)}
            _compare_rules(answer, case, call("", capability, rowwise=rowwise, cublas=cublas, **changes))


def _strides(rng: np.random.Generator, rows: int, columns: int) -> tuple[int, int]:
    return _pick(
        rng, (columns, 1), (1, rows), (columns, 1), (1, rows), (2 * columns, 1), (1, 3 * rows), (2 * columns, 2),
        (2, 2 * rows),
    )  # fmt: skip


@check_for("explain_scaled_mm", weight=2)
def formats_and_scales(answer, case):
    """E4M3 and E5M2 on either side; scales by tensor, row and block, of right and wrong shapes; outputs in float8."""
    for capability in _CAPABLE:
        for _ in range(case.count(7)):
            m, k, n = 256, 256, 384
            kind = _pick(case.rng, {}, {"rowwise": True}, {"rowwise": True}, {"blockwise": True})
            changes = dict(kind)
            changes["a"] = (_pick(case.rng, E4M3, E5M2), (m, k), (k, 1))
            changes["b"] = (_pick(case.rng, E4M3, E5M2), (k, n), (1, k))
            if case.rng.random() < 0.2:
                changes["scale_a"] = _pick(case.rng, given.floats(m), given.floats(m, 1), given.floats(1, dtype=FP16))
            changes["out_dtype"] = _pick(case.rng, BF16, BF16, FP16, FP32, E4M3)
            changes["cublas"] = _pick(case.rng, (12, 9), (12, 9), (12, 4), (13, 0))
            _compare_rules(answer, case, call("", capability, m, k, n, **changes))


@check_for("explain_scaled_mm")
def biases(answer, case):
    """Biases of N and of other numbers of elements, of four dtypes, with outputs of four."""
    for bias in (FP32, BF16, FP16, torch.float64):
        for out_dtype in (FP32, BF16, FP16, E4M3):
            size = _pick(case.rng, 48, 48, 48, 16)
            capability = _pick(case.rng, *CAPABILITIES[2:])
            one = call("", capability, bias=given.floats(size, dtype=bias), out_dtype=out_dtype)
            _compare_rules(answer, case, one)
    for capability in _CAPABLE:
        one, other = _pick(case.rng, (BF16, FP16), (FP16, BF16))
        _compare_rules(answer, case, call("", capability, bias=given.floats(48, dtype=one), out_dtype=other))


def _changed(change, *call) -> list[given.Problem]:
    """The oracle's problems for these arguments, with its findings changed by `change(found, call)`."""
    a, b, scale_a, scale_b, capability, bias, out_dtype, cublas = call
    seen = [exact.describe(each) for each in (a, b, scale_a, scale_b)]
    one = given.Call("", capability, *seen, exact.describe(bias), out_dtype, cublas)
    return [given.problem(name, *call) for name in change(exact.rules(*one.described), one)]


def _again(one: given.Call, **changes) -> list[str]:
    """The rules that would be found broken for a changed call."""
    return exact.rules(*given.Call(**(vars(one) | changes)).described)


LAYOUT_RULES = ("a row-major", "b column-major")


def _the_first_alone(found, one):
    return found[:1]


@misconception(
    "explain_scaled_mm", "It stops at the first problem: those after it are found one by one, run after run."
)
def the_first_alone(*call):
    return _changed(_the_first_alone, *call)


def _from_nine(found, one):
    return ["capability", *found] if one.capability == (8, 9) else found


@misconception("explain_scaled_mm", "It asks for a compute capability of 9.0, and leaves out 8.9.")
def from_nine(*call):
    return _changed(_from_nine, *call)


def _all_of_eight(found, one):
    return [name for name in found if name != "capability" or one.capability[0] < 8]


@misconception("explain_scaled_mm", "It looks at the first number of the capability alone: 8.6 passes with 8.9.")
def all_of_eight(*call):
    return _changed(_all_of_eight, *call)


def _m_by_sixteen(found, one):
    if set(found) & {"two dimensions", "inner size", "K by 16"} or one.a[1][0] % 16 == 0:
        return found
    place = sum(name in ("capability", "scales", "bias size") for name in found)
    return [*found[:place], "K by 16", *found[place:]]


@misconception("explain_scaled_mm", "It asks for a multiple of 16 in M as well: the rows of a may be any number.")
def m_by_sixteen(*call):
    return _changed(_m_by_sixteen, *call)


def _n_is_free(found, one):
    return [name for name in found if name != "mat2 by 16" or one.b[1][0] % 16]


@misconception("explain_scaled_mm", "It forgets N: b's columns have to be a multiple of 16 too.")
def n_is_free(*call):
    return _changed(_n_is_free, *call)


def _strict_everywhere(found, one):
    scaling = exact.kind(*one.described[:4]) if set(found).isdisjoint({"two dimensions", "inner size"}) else None
    if scaling != "tensorwise" or one.capability[0] < 10:
        return found
    return found + [name for name in _again(one, capability=(9, 0)) if name in LAYOUT_RULES]


@misconception("explain_scaled_mm", "It asks for the layouts on Blackwell too, where cuBLAS takes all four.")
def strict_everywhere(*call):
    return _changed(_strict_everywhere, *call)


def _free_on_blackwell(found, one):
    return [name for name in found if name not in LAYOUT_RULES or one.capability[0] < 10]


@misconception(
    "explain_scaled_mm",
    "It lets Blackwell have any layout with scales by row: that kernel is CUTLASS's, which wants one.",
)
def free_on_blackwell(*call):
    return _changed(_free_on_blackwell, *call)


def _not_contiguous(found, one):
    if "b column-major" in found and one.b[2] != (one.b[1][1], 1):
        return [name for name in found if name != "b column-major"]
    return found


@misconception(
    "explain_scaled_mm", "It asks whether b is not contiguous: one with gaps is neither row-major nor column-major."
)
def not_contiguous(*call):
    return _changed(_not_contiguous, *call)


def _a_to_the_letter(found, one):
    if "two dimensions" in found or "inner size" in found or one.capability >= (10, 0) or not math.prod(one.a[1]):
        return found
    is_row_major = one.a[2][1] == 1 and one.a[2][0] >= one.a[1][1]
    wrong = exact.kind(*one.described[:4]) is not None and not is_row_major
    if "a row-major" in found or not wrong:
        return found
    place = len(found) - found.count("b column-major")
    return [*found[:place], "a row-major", *found[place:]]


@misconception("explain_scaled_mm", "It wants a row-major for cuBLAS to the letter, which copies an a with gaps.")
def a_to_the_letter(*call):
    return _changed(_a_to_the_letter, *call)


def _b_alone(found, one):
    return [name for name in found if name != "a row-major"]


@misconception("explain_scaled_mm", "It looks at b's layout and not at a's.")
def b_alone(*call):
    return _changed(_b_alone, *call)


def _no_e5m2(found, one):
    alone = {one.a[0], one.b[0]} == {E4M3, E5M2} and "two E5M2" not in found
    early = ("capability", "scales", "bias size", "K by 16", "mat2 by 16")
    place = sum(name in early for name in found)
    return [*found[:place], "two E5M2", *found[place:]] if alone and "inner size" not in found else found


@misconception("explain_scaled_mm", "It refuses E5M2 wherever it stands: only two of them are refused.")
def no_e5m2(*call):
    return _changed(_no_e5m2, *call)


def _two_e5m2_pass(found, one):
    return [name for name in found if name != "two E5M2"]


@misconception("explain_scaled_mm", "It lets two E5M2 matrices pass.")
def two_e5m2_pass(*call):
    return _changed(_two_e5m2_pass, *call)


def _bias_with_float32(found, one):
    return [name for name in found if name != "bias with float32"]


@misconception("explain_scaled_mm", "It lets a bias pass with a float32 output.")
def bias_with_float32(*call):
    return _changed(_bias_with_float32, *call)


def _any_short_bias(found, one):
    return [name for name in found if name != "bias as output"]


@misconception("explain_scaled_mm", "It takes any 16-bit bias for any 16-bit output.")
def any_short_bias(*call):
    return _changed(_any_short_bias, *call)


def _no_cutlass(found, one):
    return [name for name in found if not name.startswith("row-wise")]


@misconception(
    "explain_scaled_mm",
    "It takes it that cuBLAS multiplies with scales by row everywhere: only on 9.x, and from 12.9 on.",
)
def no_cutlass(*call):
    return _changed(_no_cutlass, *call)


def _blocks_anywhere(found, one):
    return [name for name in found if name != "block-wise"]


@misconception("explain_scaled_mm", "It lets blockwise scales pass on every GPU of 8.9 and above.")
def blocks_anywhere(*call):
    return _changed(_blocks_anywhere, *call)


# --- 9.6 matmul_for ---------------------------------------------------------------------------------------------------


def _compare_paths(answer, case, *args) -> None:
    case.same_bits(answer(*args), exact.matmul_for(*args))


@check_for("matmul_for", weight=2)
def kinds_of_gpu(answer, case):
    """No GPU, and capabilities of 5.2 to 12.1, with scales by tensor and by row."""
    for capability in (None, (5, 2), (7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 1)):
        _compare_paths(answer, case, capability)
        _compare_paths(answer, case, capability, "tensorwise")
        _compare_paths(answer, case, capability, "rowwise")


@check_for("matmul_for")
def blocks_on_gpus(answer, case):
    """Blockwise scales on GPUs of 8.0 to 12.0, and a kind of scaling that there is not."""
    for capability in (None, (8, 0), (8, 9), (9, 0), (9, 0), (10, 0), (11, 0), (12, 0)):
        _compare_paths(answer, case, capability, "blockwise")
    case.raises(ValueError, answer, (9, 0), "columnwise")
    case.raises(ValueError, answer, None, "rows")
    case.raises(ValueError, answer, (8, 6), "")


@check_for("matmul_for")
def sizes_of_layers(answer, case):
    """Layers whose K and N are multiples of 16 or not, with any M."""
    for _ in range(case.count(12)):
        sizes = tuple(int(size) for size in case.rng.choice([1, 8, 16, 24, 40, 64, 65, 128, 50257, 50304], 3))
        capability = _pick(case.rng, (8, 9), (9, 0), (12, 0), (8, 6))
        _compare_paths(answer, case, capability, _pick(case.rng, "tensorwise", "rowwise"), sizes)
    for shape in ((17, 64, 128), (64, 65, 128), (64, 128, 65), (65, 16, 16), (8, 24, 16), (8, 16, 24), (32, 768, 50257),
                  (16, 40, 32), (16, 32, 40)):  # fmt: skip
        _compare_paths(answer, case, (9, 0), "rowwise", shape)


def _path(capability, scaling, shape, able=None, blocks=None, fits=None, known=True):
    if known and scaling not in ("tensorwise", "rowwise", "blockwise"):
        raise ValueError(scaling)
    able = able or (lambda capability: capability >= (8, 9))
    blocks = blocks or (lambda capability: capability[0] == 9)
    fits = fits or (lambda m, k, n: k % 16 == 0 and n % 16 == 0)
    if capability is None or not able(capability) or (scaling == "blockwise" and not blocks(capability)):
        return "emulated"
    return "hardware" if shape is None or fits(*shape) else "emulated"


@misconception("matmul_for", "It leaves out 8.9: an RTX 4070 or an L4 multiplies float8.")
def hopper_and_later(capability, scaling="tensorwise", shape=None):
    return _path(capability, scaling, shape, able=lambda capability: capability[0] >= 9)


@misconception("matmul_for", "It takes every 8.x: an A100 (8.0) and an RTX 3090 (8.6) have no float8.")
def ampere_too(capability, scaling="tensorwise", shape=None):
    return _path(capability, scaling, shape, able=lambda capability: capability[0] >= 8)


@misconception("matmul_for", 'It compares capabilities as text, in which "10.0" is smaller than "8.9".')
def as_text(capability, scaling="tensorwise", shape=None):
    return _path(capability, scaling, shape, able=lambda capability: "{}.{}".format(*capability) >= "8.9")


@misconception("matmul_for", "It compares both numbers by themselves: 9.0 fails, because 0 is less than 9.")
def number_by_number(capability, scaling="tensorwise", shape=None):
    return _path(capability, scaling, shape, able=lambda capability: capability[0] >= 8 and capability[1] >= 9)


@misconception("matmul_for", "It lets blockwise scales run on every GPU that has float8.")
def blocks_everywhere(capability, scaling="tensorwise", shape=None):
    return _path(capability, scaling, shape, blocks=lambda capability: True)


@misconception("matmul_for", "It lets blockwise scales run on 9.0 and above: Blackwell has others.")
def blocks_from_nine(capability, scaling="tensorwise", shape=None):
    return _path(capability, scaling, shape, blocks=lambda capability: capability[0] >= 9)


@misconception("matmul_for", "It asks for a multiple of 16 in M as well.")
def all_three_sizes(capability, scaling="tensorwise", shape=None):
    return _path(capability, scaling, shape, fits=lambda *sizes: all(size % 16 == 0 for size in sizes))


@misconception("matmul_for", "It looks at K alone: N has to be a multiple of 16 too.")
def k_alone(capability, scaling="tensorwise", shape=None):
    return _path(capability, scaling, shape, fits=lambda m, k, n: k % 16 == 0)


@misconception("matmul_for", "It asks for multiples of 8, as FP16's tensor cores do.")
def multiples_of_eight(capability, scaling="tensorwise", shape=None):
    return _path(capability, scaling, shape, fits=lambda m, k, n: k % 8 == 0 and n % 8 == 0)


@misconception("matmul_for", "It takes any text as a kind of scaling.")
def any_scaling(capability, scaling="tensorwise", shape=None):
    return _path(capability, scaling, shape, known=False)


# --- 9.7 requantized_sum ----------------------------------------------------------------------------------------------


def _compare_sums(answer, case, x, inverse_x, y, inverse_out, saturates) -> None:
    args = x, inverse_x, y, inverse_out, saturates
    _compare_with(answer, case, given.sum_in_float8, given.sum_in_float8(exact.requantized_sum, *args), *args)


def _summands(rng: np.random.Generator, rows: int, top: int, large: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """x, inverse_x and y whose sum has `top` times a power of two (up to 2**large) as the largest of each row."""
    total = rng.integers(-top + 1, top, (rows, 8))
    total[:, 0] = np.where(rng.random(rows) < 0.5, top, -top)
    x = rng.integers(-7, 8, (rows, 8))
    unit = np.ldexp(1.0, rng.integers(-4, large + 1, (rows, 1)))
    inverse_x = unit * np.ldexp(1.0, rng.integers(-2, 3, (rows, 1)))
    y = total * unit - x * inverse_x
    as_float = lambda array: torch.from_numpy(array.astype(np.float32))  # noqa: E731
    return as_float(x).to(E4M3), as_float(inverse_x), as_float(y)


@check_for("requantized_sum", weight=2)
def sums_of_float8(answer, case):
    """Sums with scales that are found row by row, or fixed and large enough: torch has no float8 addition."""
    for saturates in (True, False):
        for _ in range(case.count(3)):
            x, inverse_x, y = _summands(case.rng, 4, 7)
            _compare_sums(answer, case, x, inverse_x, y, None, saturates)
            x, inverse_x, y = _summands(case.rng, 4, 7)
            _compare_sums(answer, case, x, inverse_x, y, power(case.rng, (4, 1), 0, 6), saturates)


@check_for("requantized_sum", weight=2)
def rows_of_zeros(answer, case):
    """Rows whose sum is 0 everywhere, among others, with scales that are found row by row."""
    for saturates in (True, False):
        for _ in range(case.count(3)):
            x, inverse_x, y = _summands(case.rng, 4, 7)
            empty = int(case.rng.integers(4))
            y[empty] = -x[empty].float() * inverse_x[empty]
            y[empty][y[empty] == 0] = 0.0  # not -0: the sum of two of those would be -0
            _compare_sums(answer, case, x, inverse_x, y, None, saturates)


@check_for("requantized_sum", weight=2)
def beyond_fixed_scales(answer, case):
    """Sums far beyond what the fixed scales hold, with casts that saturate or give NaN."""
    for saturates in (False, True):
        for _ in range(case.count(3)):
            x, inverse_x, y = _summands(case.rng, 4, 15, 10)
            inverse_out = inverse_x * power(case.rng, (4, 1), -12, -5)
            _compare_sums(answer, case, x, inverse_x, y, inverse_out, saturates)


@check_for("requantized_sum")
def not_numbers(answer, case):
    """NaN in y, with fixed scales: it stays NaN."""
    for _ in range(case.count(3)):
        x, inverse_x, y = _summands(case.rng, 4, 7)
        y[int(case.rng.integers(4)), int(case.rng.integers(8))] = torch.nan
        _compare_sums(answer, case, x, inverse_x, y, power(case.rng, (4, 1), 0, 6), True)


def _add(x, inverse_x, y, inverse_out, cast, *, least=1e-12, clamp=True, total=None, largest=None):
    total = x.float() * inverse_x + y if total is None else total
    if inverse_out is None:
        largest = total.abs().amax(dim=1, keepdim=True) if largest is None else largest
        inverse_out = largest.clamp(min=least) / 448
    scaled = total / inverse_out
    return cast(scaled.clamp(-448, 448) if clamp else scaled), inverse_out


@misconception("requantized_sum", "It adds two float8 tensors: torch has no such addition, and says so.")
def adds_codes_directly(x, inverse_x, y, inverse_out, cast):
    return x + cast(y / inverse_x), inverse_x


@misconception("requantized_sum", "It divides a row of zeros by 0: the scale is 0, and 0 / 0 is NaN.")
def no_least_amax(x, inverse_x, y, inverse_out, cast):
    return _add(x, inverse_x, y, inverse_out, cast, least=0.0)


@misconception("requantized_sum", "It leaves saturation to the cast: that of older versions gives NaN above 464.")
def no_clamp(x, inverse_x, y, inverse_out, cast):
    return _add(x, inverse_x, y, inverse_out, cast, clamp=False)


@misconception("requantized_sum", "It looks for scales of its own where they are fixed.")
def ignores_fixed_scales(x, inverse_x, y, inverse_out, cast):
    return _add(x, inverse_x, y, None, cast)


@misconception("requantized_sum", "It clamps the sum itself to 448, and then divides by the scale.")
def clamps_too_early(x, inverse_x, y, inverse_out, cast):
    total = (x.float() * inverse_x + y).clamp(-448, 448)
    return _add(x, inverse_x, y, inverse_out, cast, clamp=False, total=total)


@misconception("requantized_sum", "It adds y to x's codes and leaves out x's scales.")
def without_x_scale(x, inverse_x, y, inverse_out, cast):
    return _add(x, inverse_x, y, inverse_out, cast, total=x.float() + y)


@misconception("requantized_sum", "It clears NaN on the way: a broken number becomes 0.")
def clears_nan(x, inverse_x, y, inverse_out, cast):
    total = (x.float() * inverse_x + y).nan_to_num(0.0)
    return _add(x, inverse_x, y, inverse_out, cast, total=total)


@misconception("requantized_sum", "It finds one scale for the whole matrix: small rows lose their bits.")
def one_scale(x, inverse_x, y, inverse_out, cast):
    largest = (x.float() * inverse_x + y).abs().max().expand(len(x), 1)
    return _add(x, inverse_x, y, inverse_out, cast, largest=largest)


@misconception("requantized_sum", "It takes no largest magnitude below 1: rows of small numbers lose bits.")
def floor_of_one(x, inverse_x, y, inverse_out, cast):
    return _add(x, inverse_x, y, inverse_out, cast, least=1.0)


# --- 9.8 multiply -----------------------------------------------------------------------------------------------------


def _compare_multiplications(answer, case, capability, rowwise, by_row) -> None:
    sizes = (int(size) for size in case.rng.choice([16, 32, 48], 3))
    args = capability, rowwise, by_row, *sizes, int(case.rng.integers(1000))
    _compare_with(answer, case, given.multiplied_on, exact.multiplied(*args), *args)


@check_for("multiply", weight=2)
def on_gpus_without_float8(answer, case):
    """GPUs of 7.5, 8.0 and 8.6 (an RTX 3090): neither torch._scaled_mm nor E4M3 in Triton."""
    for capability in ((7, 5), (8, 0), (8, 6)):
        for by_row in (True, False):
            for _ in range(case.count(1)):
                _compare_multiplications(answer, case, capability, True, by_row)


@check_for("multiply", weight=2)
def without_a_rowwise_kernel(answer, case):
    """GPUs of 8.9 (an L4) and 12.0 whose torch has no row-wise kernel for them."""
    for capability in ((8, 9), (12, 0)):
        for by_row in (True, True, True, False):
            for _ in range(case.count(1)):
                _compare_multiplications(answer, case, capability, False, by_row)


@check_for("multiply", weight=2)
def on_gpus_with_everything(answer, case):
    """GPUs of 8.9 to 12.0 that take scales by tensor and by row: they are to get them as they are."""
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        for by_row in (True, False):
            for _ in range(case.count(1)):
                _compare_multiplications(answer, case, capability, True, by_row)


def _multiply(gpu, a, b, inverse_a, inverse_b, *, able=None, old=None, rows=None, outside=None):
    """multiply with one of its parts replaced."""
    able = gpu.capability >= (8, 9) if able is None else able
    if not able:
        product = old(a, b) if old else gpu.mm(a.bfloat16(), b.bfloat16())
    elif (gpu.rowwise if rows is None else rows) or inverse_a.numel() == 1:
        return gpu.scaled_mm(a, b, inverse_a, inverse_b)
    else:
        product = gpu.scaled_mm(a, b, torch.ones(1), torch.ones(1), out_dtype=outside or torch.float32).float()
    return (product * inverse_a * inverse_b).bfloat16()


@misconception("multiply", "It calls scaled_mm on every GPU: one without float8 refuses it.")
def scaled_mm_everywhere(gpu, a, b, inverse_a, inverse_b):
    return _multiply(gpu, a, b, inverse_a, inverse_b, able=True)


@misconception("multiply", "It hands E4M3 to Triton on a GPU without float8.")
def float8_for_triton(gpu, a, b, inverse_a, inverse_b):
    return _multiply(gpu, a, b, inverse_a, inverse_b, old=gpu.mm)


@misconception("multiply", "It casts to E5M2 for Triton, which takes it, and loses a bit of every number.")
def e5m2_for_triton(gpu, a, b, inverse_a, inverse_b):
    return _multiply(gpu, a, b, inverse_a, inverse_b, old=lambda a, b: gpu.mm(a.float().to(E5M2), b.float().to(E5M2)))


@misconception("multiply", "It hands over scales by row whether the GPU has a kernel for them or not.")
def rows_everywhere(gpu, a, b, inverse_a, inverse_b):
    return _multiply(gpu, a, b, inverse_a, inverse_b, rows=True)


@misconception("multiply", "It emulates everywhere, and leaves the tensor cores idle.")
def emulates_everywhere(gpu, a, b, inverse_a, inverse_b):
    return _multiply(gpu, a, b, inverse_a, inverse_b, able=False)


@misconception("multiply", "It takes float8 to begin with 9.0, and emulates on 8.9.")
def emulates_on_ada(gpu, a, b, inverse_a, inverse_b):
    return _multiply(gpu, a, b, inverse_a, inverse_b, able=gpu.capability >= (9, 0))


@misconception("multiply", "It lets the product be rounded to bfloat16 before it is scaled, and rounds a second time.")
def rounds_twice(gpu, a, b, inverse_a, inverse_b):
    return _multiply(gpu, a, b, inverse_a, inverse_b, outside=torch.bfloat16)


@misconception("multiply", "It never hands over scales by row: the row-wise kernel is not used where it is there.")
def never_by_row(gpu, a, b, inverse_a, inverse_b):
    return _multiply(gpu, a, b, inverse_a, inverse_b, rows=False)


@misconception("multiply", "It forgets the scales where it multiplies without them.")
def forgets_the_scales(gpu, a, b, inverse_a, inverse_b):
    if gpu.capability < (8, 9):
        return gpu.mm(a.bfloat16(), b.bfloat16()).bfloat16()
    one = torch.ones(1)
    if gpu.rowwise or inverse_a.numel() == 1:
        return gpu.scaled_mm(a, b, inverse_a, inverse_b)
    return gpu.scaled_mm(a, b, one, one)


# --- 9.9 float8_products ----------------------------------------------------------------------------------------------


def _compare_layers(answer, case, capability, compiled, *sizes) -> None:
    drawn = *sizes, int(case.rng.integers(1000))
    _compare_with(answer, case, given.products_on, exact.products(*drawn), capability, compiled, *drawn)


@check_for("float8_products", weight=2)
def layers_that_fit(answer, case):
    """GPUs of 8.9 to 12.0; M, K and N multiples of 16: layouts, formats and scales."""
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        for _ in range(case.count(1)):
            _compare_layers(answer, case, capability, False, *(int(s) for s in case.rng.choice([16, 32, 48], 3)))


@check_for("float8_products")
def a_vocabulary(answer, case):
    """Layers with 65 outputs, and with other N that 16 does not divide."""
    for n in (65, 10, 17):
        for _ in range(case.count(1)):
            _compare_layers(answer, case, (8, 9), False, 32, 16, n)


@check_for("float8_products")
def any_batch(answer, case):
    """batch * context of 24, 40 and 6: it is what the weight's gradient is summed over."""
    for m in (24, 40, 6):
        for _ in range(case.count(1)):
            _compare_layers(answer, case, (9, 0), False, m, 32, 16)


@check_for("float8_products")
def any_width(answer, case):
    """Layers whose K is 8, 20 or 40."""
    for k in (8, 20, 40):
        for _ in range(case.count(1)):
            _compare_layers(answer, case, (8, 9), False, 16, k, 32)


@check_for("float8_products")
def compiled_layers(answer, case):
    """The same under torch.compile on 12.0, whose template wants scales of the same number of dimensions."""
    for sizes in ((16, 32, 48), (32, 16, 16), (48, 16, 32)):
        for _ in range(case.count(1)):
            _compare_layers(answer, case, (12, 0), True, *sizes)


def _codes(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(dtype).max
    inverse = tensor.abs().max() / largest
    return (tensor / inverse).clamp(-largest, largest).to(dtype), inverse


def _padded_both(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return exact.pad_to_multiple(x, 16, dims)


def _products(
    gpu, x, weight, grad_output, *, grad_format=E5M2, x_format=E4M3, pad_k=(0, 1), pad_m=(0, 1), pad_n=(0, 1),
    column_major=True, shapes=((), ()), invert=False, cut=True, b_is_weight=False,
):  # fmt: skip
    """float8_products with one of its parts replaced."""

    def product(a, b, inverse_a, inverse_b, dims_a, dims_b):
        a, b = _padded_both(a.contiguous(), dims_a).contiguous(), _padded_both(b.contiguous(), dims_b)
        b = exact.to_column_major(b) if column_major else b.contiguous()
        if invert:
            inverse_a, inverse_b = 1 / inverse_a, 1 / inverse_b
        return gpu.scaled_mm(a, b, inverse_a.reshape(shapes[0]), inverse_b.reshape(shapes[1]))

    (m, k), n = x.shape, len(weight)
    for_forward, scale_x = _codes(x, E4M3)
    for_backward, scale_x2 = _codes(x, x_format)
    w, scale_w = _codes(weight, E4M3)
    g, scale_g = _codes(grad_output, grad_format)
    dims = lambda *chosen: tuple(place for place, pads in enumerate(chosen) if pads)  # noqa: E731
    b = w if b_is_weight else w.t()
    output = product(for_forward, b, scale_x, scale_w, dims(0, pad_k), dims(pad_k, pad_n))
    grad_weight = product(g.t(), for_backward, scale_g, scale_x2, dims(0, pad_m), dims(pad_m, pad_k))
    return (output[:m, :n], grad_weight[:n, :k]) if cut else (output, grad_weight)


@misconception("float8_products", "It hands over a row-major b: GPUs before Blackwell refuse it.")
def row_major_b(gpu, x, weight, grad_output):
    return _products(gpu, x, weight, grad_output, column_major=False)


@misconception("float8_products", "It does not pad N: a vocabulary of 65 is refused.")
def n_not_padded(gpu, x, weight, grad_output):
    return _products(gpu, x, weight, grad_output, pad_n=())


@misconception("float8_products", "It does not pad M: for the gradient of the weight, batch * context is K.")
def m_not_padded(gpu, x, weight, grad_output):
    return _products(gpu, x, weight, grad_output, pad_m=())


@misconception("float8_products", "It does not pad K, which the first product is summed over.")
def k_not_padded(gpu, x, weight, grad_output):
    return _products(gpu, x, weight, grad_output, pad_k=())


@misconception("float8_products", "It casts x to E5M2 for the gradient of the weight: two E5M2 are refused.")
def x_in_e5m2(gpu, x, weight, grad_output):
    return _products(gpu, x, weight, grad_output, x_format=E5M2)


@misconception("float8_products", "It casts the gradient to E4M3, which has not enough range for it.")
def gradient_in_e4m3(gpu, x, weight, grad_output):
    return _products(gpu, x, weight, grad_output, grad_format=E4M3)


@misconception("float8_products", "It hands over scales of shapes () and (1,): torch.compile asserts that they agree.")
def shapes_differ(gpu, x, weight, grad_output):
    return _products(gpu, x, weight, grad_output, shapes=((1,), ()))


@misconception("float8_products", "It hands over the scales, where their inverses are asked for.")
def scales_themselves(gpu, x, weight, grad_output):
    return _products(gpu, x, weight, grad_output, invert=True)


@misconception("float8_products", "It leaves the padding on the results.")
def not_cut(gpu, x, weight, grad_output):
    return _products(gpu, x, weight, grad_output, cut=False)


# --- the page's questions ---------------------------------------------------------------------------------------------

_CAUSES = ("hardware", "kernel", "layout", "size", "formats", "shape", "operation", "zero", "range")


def _cause(key: str, right: str, because: str, nudge: str, **nudges: str) -> None:
    """A question whose answer is one of the words of the page's table; others are asked to be one of them."""
    known = {word: f"{nudges[word]}" for word in _CAUSES if word in nudges}
    question_for(key, right, because, f"{nudge} (The words are: {', '.join(_CAUSES)}.)", known)


_cause(
    "9.A", "operation", "operation: float8 is a format for storing and for products. To add, decode first.",
    "Read the first message: what is not implemented, and for what?",
    range="3 and 4 fit into E4M3 well. It is not the numbers.",
)  # fmt: skip
_cause(
    "9.B", "zero", "zero: 448 / 0 is infinite, and infinity times 0 is NaN.",
    "Which of the two rows broke, and what is its largest magnitude?",
    range="No number is beyond 448 here. Look at the second row's scale.",
)  # fmt: skip
_cause(
    "9.C", "range", "range: 465 rounds to more than 448. Clamp before the cast, and no version of torch matters.",
    "Which is the first number that became NaN?",
    operation="The cast is there. What does it do with 465?",
)  # fmt: skip
_cause(
    "9.D", "hardware", "hardware: 8.6 has no float8 in its tensor cores. Float8 began with 8.9 and 9.0.",
    "What does the message ask for?",
    kernel="No program could be written for it: the units are not there.",
)  # fmt: skip
_cause(
    "9.E", "hardware",
    "hardware: Triton compiles for the card that is there, and the card has no E4M3. Multiply in bfloat16.",
    "Is it the same card as in program 4? What does its architecture lack?",
    kernel="The kernel is there, you wrote it. What can it not be compiled for?",
    formats="One E4M3 alone is refused as well. What lacks the format?",
)  # fmt: skip
_cause(
    "9.F", "kernel", "kernel: 8.9 multiplies float8 with one scale. What is missing is the program that scales by row.",
    "The same card takes one scale. So what can its cores do?",
    hardware="The same card multiplies float8 with one scale.",
    shape="(16, 1) and (1, 48) are what rowwise scales look like.",
)  # fmt: skip
_cause(
    "9.G", "kernel", "kernel: cuBLAS has no rowwise scaling on 12.0, and this version of torch asked it all the same.",
    "Which library was asked? Does the card have float8?",
    hardware="12.0 is newer than 8.9, and the report says that one scale works.",
    layout="a and b are the same as in program 6, where an H100 took them.",
)  # fmt: skip
_cause(
    "9.H", "layout", "layout: b has to be column-major. weight.t() is; .contiguous() moved the numbers and undid it.",
    "What are the strides of weight.t().contiguous()?",
    size="32, 64 and 48 are multiples of 16.",
)  # fmt: skip
_cause("9.I", "size", "size: N is 65. Pad to 80, and cut the result.", "What does the message ask of 64 and 65?")
_cause(
    "9.J", "size", "size: the product for the weight's gradient is summed over batch * context, which is 30 here.",
    "What is K in grad_output.T @ x?",
    layout="Both were laid out: a is contiguous, and b column-major.",
)  # fmt: skip
_cause(
    "9.K", "formats", "formats: there is no product of two E5M2 matrices. Keep x in E4M3; the gradient alone is E5M2.",
    "What do a and b have in common that they had not before?",
    range="E5M2 has more range than E4M3. The numbers are not the problem.",
)  # fmt: skip
_cause(
    "9.L", "shape", "shape: (1,) and () both have one element, and the compiler's template wants the same number of "
    "dimensions. Choose one shape and keep to it.",
    "What does the assertion compare?",
    kernel="The kernel is there: with equal shapes it runs.",
)  # fmt: skip
question_for(
    "9.M",
    2,
    "2: qkv and up, whose N is above 1024. out and down have N = 768 and K of at most 4096.",
    "N is the number of outputs, K that of inputs. Both conditions together say False.",
    {4: "N of out and down is 768.", 1: "qkv has 2304 outputs, up has 3072.", 3: "down has K = 3072: at most 4096."},
)
question_for(
    "9.N",
    "cpu",
    'cpu: if device_hint(self) != "cpu". So a program that runs on a CPU has not been checked.',
    "Which comparison stands above the four checks?",
    {"cuda": "That is where they are checked."},
)
question_for(
    "9.O",
    "b",
    "b: the transpose of A B is B^T A^T, and b comes first. Its letter is the first of TN.",
    "Write (A B)^T as a product.",
    {"a": "Then the result would come out in columns. What is (A B)^T?"},
)
question_for(
    "9.P",
    1,
    "1: a tensorwise product, and the scales by row afterwards, as in your multiply.",
    "new_ones(()) makes a tensor of no dimensions. How many elements has that?",
    {0: "A tensor of no dimensions has one element."},
)
