"""Chapter 09: torch._scaled_mm, the product of two float8 matrices on a GPU, and everything that it refuses.

`torch._scaled_mm(a, b, scale_a, scale_b)` multiplies a (M, K) by b (K, N). Its scales are *inverse* scales, those that
a code is multiplied with to get its value. The scales' shapes say how they are meant: one number for a whole matrix
(tensorwise), one for each row of a and each column of b (rowwise), one for each block of 128 along K (blockwise).

The rules and messages are those of aten/src/ATen/native/cuda/ScaledBlas.cpp and RowwiseScaledMM.cu in PyTorch (its
main branch in 2026, commits 0174dfa and 01386a0), in the order in which they are checked there. A CPU checks few of
them. Further references: cuBLAS documentation, section "FP8 data types"; the public reports that each case names.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_lab.blanks import blank, current

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = (E4M3, E5M2)


@blank(exercise="9.1", points=2, minutes=20)
def scaled_mm_reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """What torch._scaled_mm computes, in float32 and with one rounding at the end.

    a: float8, (M, K). b: float8, (K, N), in any layout. scale_a, scale_b: float32 inverse scales, of one element each
    (0, 1 or 2 dimensions), or (M, 1) and (1, N). bias: (N,), float32, bfloat16 or float16, or None.
    Returns: out_dtype (float32, bfloat16 or float16), (M, N): the product of the values plus the bias, worked out in
    float32, then rounded to out_dtype.
    """


@blank(exercise="9.2", points=1, minutes=15)
def to_column_major(x: Tensor) -> Tensor:
    """The same matrix with its columns one after another in memory: strides (1, number of rows).

    x: any dtype, 2-D, with any strides. Returns: the same dtype, shape and elements. x itself is not changed.
    """


@blank(exercise="9.3", points=2, minutes=20)
def pad_to_multiple(x: Tensor, multiple: int, dims: tuple[int, ...]) -> Tensor:
    """Zeros at the end of each of `dims`, until its size is a multiple of `multiple`.

    x: any dtype (float8 too), any number of dimensions. dims: numbers of dimensions; negative ones count from the end.
    Returns: the same dtype. A size that is a multiple already (0 is one) stays, and so do the other dimensions.
    """


@blank(exercise="9.4", points=3, minutes=25)
def scaling_kind(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> str | None:
    """How the scales of a product of a (M, K) and b (K, N) are meant, as torch._scaled_mm finds out.

    Returns "tensorwise", "rowwise", "blockwise" or None, the first that fits:
    tensorwise: both scales have one element, in any shape.
    rowwise: scale_a has the shape (M, 1), scale_b (1, N), and both are contiguous.
    blockwise: with B = ceil(K / 128), scale_a is (M, B) column-major or (ceil(M / 128), B) row-major, scale_b is (B, N)
    row-major or (B, ceil(N / 128)) column-major, and at least one of the two has the full M or N. Row-major and
    column-major without gaps; along a dimension of size 1 any stride will do (`has_strides`).
    None also where a or b is not float8 (E4M3 or E5M2), or where a scale is not float32.
    """


@blank(exercise="9.5", points=6, minutes=60)
def explain_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    capability: tuple[int, int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    cublas: tuple[int, int] = (12, 9),
) -> list[Problem]:
    """Every rule that torch._scaled_mm would find broken on a GPU, in the order in which it looks.

    a, b, scale_a, scale_b, bias, out_dtype: as torch._scaled_mm takes them. capability: the GPU's, (8, 9) for an
    RTX 4070. cublas: the version of cuBLAS that torch runs on.
    Returns: a list of `problem(rule, a, b, scale_a, scale_b, capability, bias, out_dtype, cublas)`, empty if all is
    well. The rules are the keys of `RULES`, and what each asks for stands there. Where "two dimensions" or "inner size"
    is broken, nothing after it is looked at. The rules from "block-wise" on depend on the kind of the scales, and are
    not looked at when that is None, nor when M, K or N is 0. Values do not matter, only dtypes, shapes and strides.
    """


@blank(exercise="9.6", points=2, minutes=15)
def matmul_for(
    capability: tuple[int, int] | None, scaling: str = "tensorwise", shape: tuple[int, int, int] | None = None
) -> str:
    """Whether a float8 product runs on the tensor cores, or has to be emulated.

    capability: the GPU's, (major, minor), or None where there is none. scaling: "tensorwise", "rowwise" or "blockwise";
    ValueError for another one. shape: (M, K, N), or None if it is not known yet.
    Returns: "hardware" if torch._scaled_mm takes it (capability 8.9, or 9.0 and above; blockwise: 9.x alone; K and N
    multiples of 16), else "emulated".
    """


@blank(exercise="9.7", points=3, minutes=35)
def requantized_sum(
    x: Tensor, inverse_x: Tensor, y: Tensor, inverse_out: Tensor | None, cast: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Add to a float8 matrix, and give a float8 matrix back: (codes, inverse scales).

    x: float8_e4m3fn, (M, K). inverse_x: float32, (M, 1). y: float32, (M, K). The sum is x's values plus y, in float32.
    inverse_out: float32, (M, 1): the inverse scales of the result, fixed before; values beyond them saturate at 448
    (NaN stays NaN). None: they are found row by row, so that the largest magnitude of a row becomes 448; for a row of
    zeros any finite one above 0 will do.
    cast: the cast from float32 to float8_e4m3fn of some version of torch, for a float32 tensor of any shape.
    """


@blank(exercise="9.8", points=4, minutes=40)
def multiply(gpu: Gpu, a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor) -> Tensor:
    """A float8 product on whatever GPU there is: bfloat16, (M, N), rounded once.

    a: float8_e4m3fn, (M, K), row-major. b: float8_e4m3fn, (K, N), column-major. inverse_a, inverse_b: float32, (M, 1)
    and (1, N), or of one element each. M, K and N are multiples of 16.
    gpu: `capability`; `rowwise`: whether its row-wise kernel works; `scaled_mm`, as torch._scaled_mm; `mm(a, b)`: a
    kernel of Triton that multiplies float32, bfloat16 or float8 matrices and returns float32.
    Exactly one product runs: `scaled_mm` where the GPU has it, with the scales as they are if it can take them, and
    with scales of 1 and float32 output otherwise; `mm` on a GPU without float8.
    """


@blank(exercise="9.9", points=5, minutes=50)
def float8_products(gpu: Gpu, x: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """Two of a linear layer's three products, in float8 with one scale for each tensor: (output, grad_weight).

    x: float32, (M, K), with M = batch * context. weight: float32, (N, K). grad_output: float32, (M, N). Any M, K, N.
    gpu: its `scaled_mm` is called once for each product.
    Returns: bfloat16 (M, N), x @ weight.T, of E4M3 and E4M3; bfloat16 (N, K), grad_output.T @ x, of E5M2 and E4M3.
    A tensor's scale brings its largest magnitude to the largest number of its format, 448 or 57344; it is not 0.
    """


# --- the rules of torch._scaled_mm ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A rule that is broken. rule: its name in RULES; text: what torch says; fix: what helps."""

    rule: str
    text: str
    fix: str


@dataclass(frozen=True)
class Rule:
    """asks: what must hold. error: the type of torch's error. text: what torch says. fix: what helps."""

    asks: str
    error: type[Exception]
    text: str
    fix: str


_SCALES = (
    "Invalid scaling configuration.\n"
    "- For TensorWise scaling, a and b should be float8, scales should be float and singletons.\n"
    "- For RowWise scaling, a and b should be float8, scales should be float, scale_a should be ({m}, 1) and scale_b "
    "should be (1, {n}), and both should be contiguous."
)  # the message goes on with the kinds of blocks, and with what it got
_LAYOUT = "Only multiplication of row-major and column-major matrices is supported by cuBLASLt"

# In the order in which they are checked. Names of dtypes in messages are those of C++: Float, BFloat16, Half.
RULES: dict[str, Rule] = {
    "capability": Rule(
        "the GPU's compute capability is 8.9, or 9.0 and above", RuntimeError,
        "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+",
        "ask matmul_for(torch.cuda.get_device_capability()) first, and emulate elsewhere"),
    "two dimensions": Rule(
        "a and b have two dimensions", RuntimeError, "{which} must be a matrix",
        "flatten the leading dimensions: x.reshape(-1, x.shape[-1])"),
    "inner size": Rule(
        "the second size of a is the first of b", RuntimeError,
        "mat1 and mat2 shapes cannot be multiplied ({m}x{k} and {inner}x{n})", "hand over the weight's transpose"),
    "scales": Rule(
        "the scales are of one kind (scaling_kind is not None)", RuntimeError, _SCALES,
        "float8 operands, float32 scales, of one element each or (M, 1) and (1, N)"),
    "bias size": Rule(
        "the bias has N elements", RuntimeError, "Bias must be size {n} but got {bias}",
        "one number for each column of b"),
    "K by 16": Rule(
        "K is a multiple of 16", RuntimeError,
        "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: ({m}x{k}).",
        "pad K of both with zeros, which add nothing"),
    "mat2 by 16": Rule(
        "both sizes of b are multiples of 16", RuntimeError, "mat2 shape ({inner}x{n}) must be divisible by 16",
        "pad b's columns with zeros, and cut the result"),
    "two E5M2": Rule(
        "a and b are not both E5M2", ValueError, "Multiplication of two Float8_e5m2 matrices is not supported",
        "make one of them E4M3"),
    "bias with float32": Rule(
        "no bias if out_dtype is float32", RuntimeError, "Bias is not supported when out_dtype is set to Float32",
        "add it afterwards"),
    "bias dtype": Rule(
        "the bias is bfloat16 or float16", RuntimeError, "Bias must be BFloat16 or Half, but got {bias_dtype}",
        "bias.to(out_dtype)"),
    "bias as output": Rule(
        "a 16-bit bias has the dtype of a 16-bit output", RuntimeError,
        "Bias must be {wanted} to compute {out} output, but got {bias_dtype}", "bias.to(out_dtype)"),
    "block-wise": Rule(
        "blockwise scales need capability 9.x", NotImplementedError,
        "DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90", "emulate, or use rowwise scales"),
    "block-wise cuBLAS": Rule(
        "blockwise scales need cuBLAS 12.9", NotImplementedError,
        "DeepSeek style (1x128, 128x128) scaling requires cublasLt >= 12.9", "a torch built for CUDA 12.9 or later"),
    "row-wise output": Rule(
        "CUTLASS's row-wise kernel writes float32, bfloat16 or float16", ValueError,
        "Only bf16, fp16, and fp32 high precision output types are supported for row-wise scaling.",
        "out_dtype=torch.bfloat16"),
    "row-wise E5M2": Rule(
        "CUTLASS's row-wise kernel takes b in E4M3 alone", RuntimeError,
        "Expected b.dtype() == at::kFloat8_e4m3fn to be true, but got false.", "E5M2 is for a"),
    "a row-major": Rule(
        "CUTLASS: a has the strides (at least K, 1); cuBLAS below 10.0: not (1, at least M), unless M is 1",
        RuntimeError, _LAYOUT, "a.contiguous()"),
    "b column-major": Rule(
        "CUTLASS, and cuBLAS below 10.0: b has the strides (1, at least K)",
        RuntimeError, _LAYOUT, "to_column_major(b), or weight.t() of a contiguous (N, K) weight"),
}  # fmt: skip

# What stands in a message of the layout rules where another library multiplies than on an H100.
_OTHER_LAYOUT = {
    "cuBLAS": "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`",
    "a row-major": "Expected a.stride(1) == 1 to be true, but got false.",  # and asks for a better message
    "b column-major": "Expected b.stride(0) == 1 to be true, but got false.",
}
_CPP_NAMES = {
    torch.float64: "Double", torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half",
    E4M3: "Float8_e4m3fn", E5M2: "Float8_e5m2",
}  # fmt: skip


def has_strides(x: Tensor, *strides: int) -> bool:
    """Whether a tensor has these strides, along every dimension whose size is more than 1."""
    return all(size <= 1 or own == asked for size, own, asked in zip(x.shape, x.stride(), strides, strict=True))


def runs_on_cutlass(capability: tuple[int, int], cublas: tuple[int, int] = (12, 9)) -> bool:
    """Whether CUTLASS and not cuBLAS multiplies with rowwise scales: everywhere but on 9.x with cuBLAS 12.9."""
    return capability[0] != 9 or tuple(cublas) < (12, 9)


def problem(
    rule: str,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    capability: tuple[int, int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    cublas: tuple[int, int] = (12, 9),
) -> Problem:
    """The Problem of a rule of RULES, with the message that torch would have for these arguments."""
    said, out = RULES[rule].text, _CPP_NAMES.get(out_dtype, str(out_dtype))
    if said == _LAYOUT and scale_a.numel() > 1 and scale_a.shape[-1] == 1 and runs_on_cutlass(capability, cublas):
        said = _OTHER_LAYOUT[rule]
    elif said == _LAYOUT and capability[0] != 9:
        said = _OTHER_LAYOUT["cuBLAS"]
    sizes = {"m": a.shape[0], "k": a.shape[-1], "inner": b.shape[0], "n": b.shape[-1]} if a.dim() and b.dim() else {}
    text = said.format(
        **sizes,
        which="mat1" if a.dim() != 2 else "mat2",
        bias=None if bias is None else bias.numel(),
        bias_dtype=None if bias is None else _CPP_NAMES.get(bias.dtype, str(bias.dtype)),
        out=out,
        wanted="Float16" if out == "Half" else "BFloat16",
    )
    return Problem(rule, text, RULES[rule].fix)


# --- a GPU that stands in -------------------------------------------------------------------------------------------


class Gpu:
    """Stands in for a GPU of a compute capability: it refuses what that refuses, with the message that torch has.

    capability: (8, 6) is an RTX 3090, (8, 9) an RTX 4070 or L4, (9, 0) an H100, (12, 0) an RTX 5090.
    rowwise: whether this torch has a row-wise kernel for it. Older ones had one for 9.0 alone, and some builds none.
    compiled: whether the code runs under torch.compile. What it can multiply is computed in float32 on the CPU.
    log: the dtypes of every product, in words. refusal: the last error.
    runs_on: functions in place of explain_scaled_mm, scaling_kind and scaled_mm_reference, by name.
    """

    def __init__(
        self,
        capability: tuple[int, int],
        rowwise: bool = True,
        compiled: bool = False,
        runs_on: dict[str, Callable] | None = None,
    ) -> None:
        self.capability, self.rowwise, self.compiled = tuple(capability), rowwise, compiled
        self._runs_on = runs_on or {}
        self.log: list[str] = []
        self.refusal: Exception | None = None

    def scaled_mm(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """torch._scaled_mm on this GPU: the product, or torch's error."""
        explain = self._runs_on.get("explain_scaled_mm", explain_scaled_mm)
        kind = self._runs_on.get("scaling_kind", scaling_kind)
        product = self._runs_on.get("scaled_mm_reference", scaled_mm_reference)
        problems = explain(a, b, scale_a, scale_b, self.capability, bias, out_dtype)
        if problems:
            raise self._refused(RULES[problems[0].rule].error(problems[0].text))
        differ = scale_a.dim() != scale_b.dim() and 0 in (scale_a.dim(), scale_b.dim())
        if differ and self.compiled and self.capability >= (12, 0):
            raise self._refused(AssertionError("assert len(scale_a.get_size()) == len(scale_b.get_size())"))
        if not self.rowwise and kind(a, b, scale_a, scale_b) == "rowwise":
            raise self._refused(RuntimeError(_NO_ROWWISE["8.9" if self.capability < (9, 0) else "12.0"]))
        self.log.append(f"scaled_mm of {name_of(a)} and {name_of(b)}, {_kind_in_words(scale_a)}")
        return product(a, b, scale_a, scale_b, bias, out_dtype)

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """A kernel of Triton: float32 (M, N), the product of the codes' values."""
        if E4M3 in (a.dtype, b.dtype) and self.capability < (8, 9):
            said = "type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')"
            raise self._refused(ValueError(said))
        self.log.append(f"mm of {name_of(a)} and {name_of(b)}")
        return a.float() @ b.float()

    def _refused(self, error: Exception) -> Exception:
        self.refusal = error
        return error


# From RowwiseScaledMM.cu, and from the report pytorch#192707.
_NO_ROWWISE = {
    "8.9": "Rowwise scaling is not currently supported on your device",
    "12.0": "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`",
}


def name_of(x: Tensor) -> str:
    """A tensor's dtype as it is written without `torch.`."""
    return str(x.dtype).removeprefix("torch.")


def _kind_in_words(scale: Tensor) -> str:
    return "one scale each" if scale.numel() == 1 else "scales by row"


def cast_before_2_13(x: Tensor) -> Tensor:
    """The cast to float8_e4m3fn that torch had on a CPU before 2.13: what rounds to more than 448 becomes NaN."""
    return torch.where(x.abs() > 464, torch.nan, x).clamp(-448, 448).to(E4M3)


def ask_torch(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **more: object) -> str:
    """What torch._scaled_mm itself says on the device where the tensors are: "it works", or the error in a line."""
    try:
        torch._scaled_mm(a, b, scale_a, scale_b, **more)
    except Exception as error:
        lines = str(error).splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return "it works"


# --- calls to try: dtypes, shapes and strides are all that the rules look at -----------------------------------------


@dataclass(frozen=True)
class Call:
    """The arguments of a product as data. a, b, scale_a, scale_b and bias: (dtype, shape, strides)."""

    title: str
    capability: tuple[int, int]
    a: tuple
    b: tuple
    scale_a: tuple
    scale_b: tuple
    bias: tuple | None = None
    out_dtype: torch.dtype = torch.bfloat16
    cublas: tuple[int, int] = (12, 9)

    @property
    def described(self) -> tuple:
        """The arguments that `problems_found` takes after the function."""
        return (self.a, self.b, self.scale_a, self.scale_b, self.capability, self.bias, self.out_dtype, self.cublas)

    def tensors(self, device: str = "cpu") -> tuple[Tensor, ...]:
        """a, b, scale_a and scale_b, full of zeros."""
        return tuple(empty_like_described(each, device) for each in (self.a, self.b, self.scale_a, self.scale_b))


def ask_compiler(one: Call) -> str:
    """What torch's compiler says to a call on CUDA: "it works", or the error in a line. No GPU is needed.

    It is asked with tensors that have a dtype, a shape and strides, and no numbers (device "meta"), which it takes for
    CUDA's. It does not know which GPU it compiles for, and knows some of the rules only.
    """

    def made(described: tuple | None) -> Tensor | None:
        return described and torch.empty_strided(*described[1:], dtype=described[0], device="meta")

    tensors = [made(each) for each in (one.a, one.b, one.scale_a, one.scale_b)]
    return ask_torch(*tensors, bias=made(one.bias), out_dtype=one.out_dtype)


def empty_like_described(described: tuple | None, device: str = "cpu") -> Tensor | None:
    """A tensor of zeros of a (dtype, shape, strides); None for None."""
    if described is None:
        return None
    dtype, shape, strides = described
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(0.0)


def float8(dtype: torch.dtype, *shape: int, column_major: bool = False) -> tuple:
    """A described float8 matrix."""
    return (dtype, shape, (1, shape[0]) if column_major else (*shape[1:], 1))


def floats(*shape: int, dtype: torch.dtype = torch.float32, strides: tuple | None = None) -> tuple:
    """A described tensor, contiguous unless strides are given."""
    return (dtype, shape, tuple(torch.empty(shape).stride()) if strides is None else strides)


def call(title: str, capability: tuple[int, int], m: int = 16, k: int = 32, n: int = 48, **changes: object) -> Call:
    """A call that is right but for `changes`: E4M3 of (M, K) and (K, N), scales of one element, bfloat16."""
    right = {
        "a": float8(E4M3, m, k),
        "b": float8(E4M3, k, n, column_major=True),
        "scale_a": floats(1),
        "scale_b": floats(1),
    }
    if changes.pop("rowwise", False):
        right |= {"scale_a": floats(m, 1), "scale_b": floats(1, n)}
    if changes.pop("blockwise", False):
        blocks = -(-k // 128)
        right |= {
            "scale_a": floats(m, blocks, strides=(1, m)),
            "scale_b": floats(blocks, -(-n // 128), strides=(1, blocks)),
        }
    return Call(title, capability, **(right | changes))


_ADA, _H100, _B200, _RTX5090 = (8, 9), (9, 0), (10, 0), (12, 0)
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
CALLS: tuple[Call, ...] = (
    call("RTX 4070", _ADA),
    call("RTX 3090", (8, 6)),
    call("A100", (8, 0)),
    call("T4", (7, 5)),
    call("H100", _H100),
    call("B200", _B200),
    call("RTX 5090", _RTX5090),
    call("a of three dimensions", _ADA, a=(E4M3, (2, 8, 32), (256, 32, 1))),
    call("b of one dimension", _ADA, b=(E4M3, (32,), (1,))),
    call("b not transposed", _ADA, b=float8(E4M3, 48, 32)),
    call("K = 40", _ADA, k=40),
    call("K = 24, M = 24", _H100, m=24, k=24),
    call("M = 17 is fine", _ADA, m=17),
    call("M = 0 is fine", _ADA, m=0),
    call("N = 65, a vocabulary", _ADA, n=65),
    call("N = 50257", _H100, n=50257),
    call("K = 8, N = 8", _ADA, k=8, n=8),
    call("b row-major, RTX 4070", _ADA, b=float8(E4M3, 32, 48)),
    call("b row-major, H100", _H100, b=float8(E4M3, 32, 48)),
    call("b row-major, B200", _B200, b=float8(E4M3, 32, 48)),
    call("b row-major, B200, rowwise", _B200, rowwise=True, b=float8(E4M3, 32, 48)),
    call("a column-major, RTX 4070", _ADA, a=float8(E4M3, 16, 32, column_major=True)),
    call("a column-major, RTX 5090", _RTX5090, a=float8(E4M3, 16, 32, column_major=True)),
    call("a column-major, RTX 5090, rowwise", _RTX5090, rowwise=True, a=float8(E4M3, 16, 32, column_major=True)),
    call("a is half of wider rows", _ADA, a=(E4M3, (16, 32), (64, 1))),
    call("a is every second column", _H100, a=(E4M3, (16, 32), (64, 2))),
    call("a is every second column, rowwise", _ADA, rowwise=True, a=(E4M3, (16, 32), (64, 2))),
    call("both in the other layout", _H100, a=float8(E4M3, 16, 32, column_major=True), b=float8(E4M3, 32, 48)),
    call("gradient in E5M2", _ADA, a=float8(E5M2, 16, 32)),
    call("both in E5M2", _ADA, a=float8(E5M2, 16, 32), b=float8(E5M2, 32, 48, column_major=True)),
    call("both in E5M2, RTX 3090", (8, 6), a=float8(E5M2, 16, 32), b=float8(E5M2, 32, 48, column_major=True)),
    call("a in bfloat16", _ADA, a=floats(16, 32, dtype=_BF16)),
    call("scales in float64", _ADA, scale_a=floats(1, dtype=torch.float64)),
    call("scales in bfloat16", _H100, scale_a=floats(1, dtype=_BF16), scale_b=floats(1, dtype=_BF16)),
    call("scales 0-d and (1, 1)", _ADA, scale_a=floats(), scale_b=floats(1, 1)),
    call("rowwise", _ADA, rowwise=True),
    call("rowwise, scales (M,) and (N,)", _ADA, scale_a=floats(16), scale_b=floats(48)),
    call("rowwise, scale_b (N, 1)", _H100, scale_a=floats(16, 1), scale_b=floats(48, 1)),
    call("rowwise for a alone", _ADA, scale_a=floats(16, 1)),
    call("rowwise, scale_a has gaps", _ADA, rowwise=True, scale_a=floats(16, 1, strides=(2, 1))),
    call("rowwise, b in E5M2, RTX 4070", _ADA, rowwise=True, b=float8(E5M2, 32, 48, column_major=True)),
    call("rowwise, b in E5M2, H100", _H100, rowwise=True, b=float8(E5M2, 32, 48, column_major=True)),
    call("rowwise, b in E5M2, H100, cuBLAS 12.4", _H100, rowwise=True, cublas=(12, 4),
         b=float8(E5M2, 32, 48, column_major=True)),
    call("rowwise, float8 output", _ADA, rowwise=True, out_dtype=E4M3),
    call("float8 output", _ADA, out_dtype=E4M3),
    call("blockwise, H100", _H100, k=256, n=256, blockwise=True),
    call("blockwise, H100, cuBLAS 12.4", _H100, k=256, n=256, blockwise=True, cublas=(12, 4)),
    call("blockwise, scale_a row-major", _H100, k=256, n=256, blockwise=True, scale_a=floats(16, 2)),
    call("blockwise, RTX 4070", _ADA, k=256, n=256, blockwise=True),
    call("blockwise, B200", _B200, k=256, n=256, blockwise=True),
    call("bias", _ADA, bias=floats(48, dtype=_BF16)),
    call("bias of M elements", _ADA, bias=floats(16, dtype=_BF16)),
    call("bias in float32", _ADA, bias=floats(48)),
    call("bias in float16", _ADA, bias=floats(48, dtype=_FP16)),
    call("bias and output in float16", _ADA, bias=floats(48, dtype=_FP16), out_dtype=_FP16),
    call("bias in bfloat16, output in float16", _H100, bias=floats(48, dtype=_BF16), out_dtype=_FP16),
    call("bias, output in float32", _ADA, bias=floats(48, dtype=_BF16), out_dtype=_FP32),
    call("RTX 3090, K = 40, N = 65, row-major", (8, 6), k=40, n=65, b=float8(E4M3, 40, 65)),
)  # fmt: skip


# --- scenarios: what a check drives an answer with, beside plain calls ------------------------------------------------


def layout_and_values(function: Callable, x: Tensor, step: int) -> tuple[str, Tensor]:
    """(shape and strides in words, the elements' bytes row by row) of the answer for every `step`-th column of x."""
    made = function(x[:, ::step])
    said = f"{name_of(made)}, shape {tuple(made.shape)}, strides {tuple(made.stride())}"
    return said, made.contiguous().view(torch.uint8).flatten()


def shape_and_values(function: Callable, x: Tensor, multiple: int, dims: tuple[int, ...]) -> tuple[str, Tensor]:
    """(shape in words, the elements in the corner of a larger tensor of zeros) of a padded tensor."""
    made = function(x, multiple, dims)
    return f"{name_of(made)}, shape {tuple(made.shape)}", _laid(made.float(), [size + multiple for size in x.shape])


def _laid(x: Tensor, shape: list[int] | tuple[int, ...]) -> Tensor:
    """As much of x as fits into the corner of a tensor of zeros of that shape."""
    laid = x.new_zeros(shape)
    if x.dim() == laid.dim():
        corner = tuple(slice(min(pair)) for pair in zip(x.shape, shape, strict=True))
        laid[corner] = x[corner]
    return laid


def problems_found(
    function: Callable, a: tuple, b: tuple, scale_a: tuple, scale_b: tuple, capability: tuple, bias: tuple | None,
    out_dtype: torch.dtype, cublas: tuple,
) -> str:  # fmt: skip
    """The names of the rules that `function` finds broken. Tensors are given as (dtype, shape, strides)."""
    made = [empty_like_described(each) for each in (a, b, scale_a, scale_b)]
    found = function(*made, tuple(capability), empty_like_described(bias), out_dtype, tuple(cublas))
    return "; ".join(each.rule for each in found) or "no problem"


def kind_found(function: Callable, a: tuple, b: tuple, scale_a: tuple, scale_b: tuple) -> str:
    """The kind of scaling that `function` sees in tensors that are given as (dtype, shape, strides)."""
    return str(function(*(empty_like_described(each) for each in (a, b, scale_a, scale_b))))


def sum_in_float8(
    function: Callable, x: Tensor, inverse_x: Tensor, y: Tensor, inverse_out: Tensor | None, saturates: bool
) -> tuple[Tensor, Tensor]:
    """(codes as uint8, their values as float32) of a `requantized_sum`. saturates: whether its cast does.

    Where torch refuses, the codes are 0 and the values NaN.
    """
    cast = _saturating_cast if saturates else cast_before_2_13
    try:
        codes, inverse = function(x, inverse_x, y, inverse_out, cast)
    except NotImplementedError:  # torch has no such operation on float8
        return torch.zeros(x.shape, dtype=torch.uint8), torch.full(x.shape, torch.nan)
    numbers = codes.float() * inverse
    return codes.contiguous().view(torch.uint8).masked_fill(numbers.isnan(), 0x7F), numbers


def _saturating_cast(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def whole_operands(m: int, k: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """a (M, K), row-major, and b (K, N), column-major, in E4M3: whole numbers up to 15, drawn from a seed."""
    rng = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-15, 16, shape, generator=rng).float().to(E4M3) for shape in ((m, k), (n, k)))
    return a, b.t()


def whole_scales(m: int, n: int, by_row: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Inverse scales of 1, 3, 5 or 7 times a power of two: (M, 1) and (1, N), or one each."""
    rng = torch.Generator().manual_seed(seed)
    shapes = ((m, 1), (1, n)) if by_row else ((1,), (1,))
    odd = [2 * torch.randint(0, 4, shape, generator=rng).float() + 1 for shape in shapes]
    return tuple(torch.ldexp(each, torch.randint(-4, 4, each.shape, generator=rng)) for each in odd)


def whole_layer(m: int, k: int, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K), weight (N, K) and grad_output (M, N): whole numbers times a power of two, drawn from a seed.

    The largest magnitudes are 14, 14 and 7 times that power, so that float8 holds all of them at its scale.
    """
    rng = torch.Generator().manual_seed(seed)
    made = []
    for shape, top in (((m, k), 14), ((n, k), 14), ((m, n), 7)):
        numbers = torch.randint(-top, top + 1, shape, generator=rng).float()
        numbers[0, 0] = top
        made.append(torch.ldexp(numbers, torch.randint(-9, 4, (1,), generator=rng)))
    return tuple(made)


def multiplied_on(
    function: Callable, capability: tuple, rowwise: bool, by_row: bool, m: int, k: int, n: int, seed: int
) -> tuple[str, Tensor]:
    """(what ran on a GPU of that kind or the error that came, the product) for `multiply`, on numbers from a seed."""
    gpu = Gpu(capability, rowwise, runs_on=_earlier_answers())
    operands = *whole_operands(m, k, n, seed), *whole_scales(m, n, by_row, seed)
    return _ran(gpu, lambda: (function(gpu, *operands),), ((m, n),))


def products_on(
    function: Callable, capability: tuple, compiled: bool, m: int, k: int, n: int, seed: int
) -> tuple[str, Tensor, Tensor]:
    """(what ran or the error that came, output, grad_weight) for `float8_products`, on numbers from a seed."""
    gpu = Gpu(capability, compiled=compiled, runs_on=_earlier_answers())
    return _ran(gpu, lambda: function(gpu, *whole_layer(m, k, n, seed)), ((m, n), (n, k)))


def _earlier_answers() -> dict[str, Callable]:
    """What a GPU runs on while an answer is judged: the references, so that a mistake costs once, or what is in use."""
    from lowprec_lab.sources import reference

    names = ("explain_scaled_mm", "scaling_kind", "scaled_mm_reference")
    with contextlib.redirect_stdout(io.StringIO()):  # whose answer the GPU runs on is no news about this one
        return {name: reference(name) or current(name) for name in names}


def _ran(gpu: Gpu, run: Callable, shapes: tuple) -> tuple:
    """What ran and the results' shapes in words, and the results; for an error its message, and results full of NaN."""
    try:
        results = tuple(run())
    except Exception as error:
        if error is not gpu.refusal:
            raise
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return (said, *(torch.full(shape, torch.nan, dtype=torch.bfloat16) for shape in shapes))
    if len(results) != len(shapes) or not all(type(each) is Tensor for each in results):
        return results
    ran = "; ".join(gpu.log) or "nothing ran"
    said = f"{ran}; shapes {', '.join(str(tuple(each.shape)) for each in results)}"
    return (said, *(_laid(each, shape) for each, shape in zip(results, shapes, strict=True)))
