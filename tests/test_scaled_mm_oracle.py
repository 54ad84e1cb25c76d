"""torch._scaled_mm: the oracle and the reference agree with torch, with its compiler, and with a table made by hand."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from lowprec_lab import scaled_mm as given
from lowprec_lab.blanks import BLANKS
from lowprec_lab.explorers import scaled_mm_picture
from lowprec_lab.formats import get_format
from lowprec_lab.graders import rounding_oracle
from lowprec_lab.graders import scaled_mm as grader
from lowprec_lab.graders import scaled_mm_oracle as exact
from lowprec_lab.grading import wire
from lowprec_lab.plots import png
from lowprec_lab.scaled_mm import CALLS, E4M3, E5M2, RULES, Gpu, call
from lowprec_lab.sources import reference

# What a GPU finds broken, read off ScaledBlas.cpp, RowwiseScaledMM.cu and cuBlasCommonArgs.h by hand; "" for nothing.
EXPECTED = {
    "RTX 4070": "",
    "RTX 3090": "capability",
    "A100": "capability",
    "T4": "capability",
    "H100": "",
    "B200": "",
    "RTX 5090": "",
    "a of three dimensions": "two dimensions",
    "b of one dimension": "two dimensions",
    "b not transposed": "inner size",
    "K = 40": "K by 16; mat2 by 16",
    "K = 24, M = 24": "K by 16; mat2 by 16",
    "M = 17 is fine": "",
    "M = 0 is fine": "",
    "N = 65, a vocabulary": "mat2 by 16",
    "N = 50257": "mat2 by 16",
    "K = 8, N = 8": "K by 16; mat2 by 16",
    "b row-major, RTX 4070": "b column-major",
    "b row-major, H100": "b column-major",
    "b row-major, B200": "",
    "b row-major, B200, rowwise": "b column-major",
    "a column-major, RTX 4070": "a row-major",
    "a column-major, RTX 5090": "",
    "a column-major, RTX 5090, rowwise": "a row-major",
    "a is half of wider rows": "",
    "a is every second column": "",
    "a is every second column, rowwise": "a row-major",
    "both in the other layout": "a row-major; b column-major",
    "gradient in E5M2": "",
    "both in E5M2": "two E5M2",
    "both in E5M2, RTX 3090": "capability; two E5M2",
    "a in bfloat16": "scales",
    "scales in float64": "scales",
    "scales in bfloat16": "scales",
    "scales 0-d and (1, 1)": "",
    "rowwise": "",
    "rowwise, scales (M,) and (N,)": "scales",
    "rowwise, scale_b (N, 1)": "scales",
    "rowwise for a alone": "scales",
    "rowwise, scale_a has gaps": "scales",
    "rowwise, b in E5M2, RTX 4070": "row-wise E5M2",
    "rowwise, b in E5M2, H100": "",
    "rowwise, b in E5M2, H100, cuBLAS 12.4": "row-wise E5M2",
    "rowwise, float8 output": "row-wise output",
    "float8 output": "",
    "blockwise, H100": "",
    "blockwise, H100, cuBLAS 12.4": "block-wise cuBLAS",
    "blockwise, scale_a row-major": "scales",
    "blockwise, RTX 4070": "block-wise",
    "blockwise, B200": "block-wise",
    "bias": "",
    "bias of M elements": "bias size",
    "bias in float32": "bias dtype",
    "bias in float16": "bias as output",
    "bias and output in float16": "",
    "bias in bfloat16, output in float16": "bias as output",
    "bias, output in float32": "bias with float32",
    "RTX 3090, K = 40, N = 65, row-major": "capability; K by 16; mat2 by 16; b column-major",
}

EXPLAINERS = [
    pytest.param(exact.explain_scaled_mm, id="oracle"),
    pytest.param(reference("explain_scaled_mm"), id="reference"),
]


def titled(title):
    return next(each for each in CALLS if each.title == title)


def test_the_table_is_whole():
    assert [each.title for each in CALLS] == list(EXPECTED)
    assert len(CALLS) >= 40
    met = {name for found in EXPECTED.values() for name in found.split("; ") if name}
    assert met == set(RULES), "a rule that no case of the table breaks"


@pytest.mark.parametrize("explain", EXPLAINERS)
@pytest.mark.parametrize("one", CALLS, ids=lambda one: one.title)
def test_pass_or_fail_and_why(explain, one):
    assert given.problems_found(explain, *one.described) == (EXPECTED[one.title] or "no problem")


@pytest.mark.parametrize("explain", EXPLAINERS)
@pytest.mark.parametrize(
    ("title", "message"),
    [
        ("RTX 3090", "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or "),
        ("b of one dimension", "mat2 must be a matrix"),
        ("a of three dimensions", "mat1 must be a matrix"),
        ("b not transposed", "mat1 and mat2 shapes cannot be multiplied (16x32 and 48x32)"),
        ("rowwise for a alone", "Invalid scaling configuration.\n- For TensorWise scaling"),
        ("bias of M elements", "Bias must be size 48 but got 16"),
        ("K = 40", "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (16x40)."),
        ("N = 65, a vocabulary", "mat2 shape (32x65) must be divisible by 16"),
        ("both in E5M2", "Multiplication of two Float8_e5m2 matrices is not supported"),
        ("bias, output in float32", "Bias is not supported when out_dtype is set to Float32"),
        ("bias in float32", "Bias must be BFloat16 or Half, but got Float"),
        ("bias in float16", "Bias must be BFloat16 to compute BFloat16 output, but got Half"),
        ("bias in bfloat16, output in float16", "Bias must be Float16 to compute Half output, but got BFloat16"),
        ("b row-major, H100", "Only multiplication of row-major and column-major matrices is supported by cuBLASLt"),
        ("b row-major, RTX 4070", "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeur"),
        ("b row-major, B200, rowwise", "Expected b.stride(0) == 1 to be true, but got false."),
        ("a column-major, RTX 5090, rowwise", "Expected a.stride(1) == 1 to be true, but got false."),
        ("blockwise, B200", "DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90"),
    ],
)
def test_the_first_message_is_torchs(explain, title, message):
    one = titled(title)
    found = explain(*one.tensors(), one.capability, given.empty_like_described(one.bias), one.out_dtype, one.cublas)
    assert found[0].text.startswith(message)
    assert found[0].fix


# --- what torch itself says -------------------------------------------------------------------------------------------

# Rules that torch's compiler has a copy of; its copy does not know which GPU it compiles for.
KNOWN_TO_THE_COMPILER = {"two dimensions", "scales", "K by 16", "mat2 by 16"}


@pytest.mark.parametrize("one", CALLS, ids=lambda one: one.title)
def test_the_compiler_refuses_what_it_has_a_rule_for(one):
    rules, said = set(EXPECTED[one.title].split("; ")), given.ask_compiler(one)
    if rules & KNOWN_TO_THE_COMPILER and "blockwise" not in one.title:  # it does not look at strides of blocks
        assert said != "it works"
    if rules & {"a row-major", "b column-major"}:
        assert "must be" in said or "divisible by 16" in said
    if not EXPECTED[one.title] and one.capability < (10, 0) and one.title != "a is every second column":
        assert said == "it works"


def test_the_compiler_says_it_in_its_own_words():
    assert given.ask_compiler(titled("b row-major, H100")) == "RuntimeError: mat2 must be col_major, got stride (48, 1)"


def test_a_cpu_runs_what_a_gpu_refuses():
    for title in ("K = 40", "N = 65, a vocabulary", "both in E5M2", "b row-major, H100", "bias, output in float32"):
        one = titled(title)
        bias = given.empty_like_described(one.bias)
        assert given.ask_torch(*one.tensors(), bias=bias, out_dtype=one.out_dtype) == "it works", title


def test_the_compilers_assertion_is_quoted_as_it_stands():
    source = Path(importlib.util.find_spec("torch").origin).parent / "_inductor/template_heuristics/triton.py"
    one = call("", (12, 0)).tensors()
    with pytest.raises(AssertionError) as error:
        Gpu((12, 0), compiled=True).scaled_mm(one[0], one[1], torch.ones(()), torch.ones(1))
    assert str(error.value) in source.read_text()


@pytest.mark.parametrize("multiply", [exact.scaled_mm_reference, reference("scaled_mm_reference")])
def test_products_are_torchs(multiply):
    rng = np.random.default_rng(9)
    for m, k, n in ((1, 16, 5), (7, 20, 33), (32, 64, 48)):
        for by_row in (False, True):
            a, b = grader.operands(rng, m, k, n)
            shapes = ((m, 1), (1, n)) if by_row else ((), (1,))
            scales = [grader.scales(rng, shape) for shape in shapes]
            for bias in (None, grader.whole(rng, (n,), 99, torch.bfloat16)):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    if dtype == torch.float16 and bias is not None:
                        continue
                    torchs = torch._scaled_mm(a, b, *scales, bias=bias, out_dtype=dtype)
                    assert torch.equal(multiply(a, b, *scales, bias, dtype), torchs)


@pytest.mark.slow
def test_products_of_any_numbers_are_torchs():
    """Bit for bit for the reference: torch adds in the same order as `@` does."""
    multiply = reference("scaled_mm_reference")
    torch.manual_seed(9)
    for _ in range(100):
        m, k, n = (int(size) for size in torch.randint(1, 200, (3,)))
        a, b = torch.randn(m, k).to(E4M3), torch.randn(k, n).to(E4M3)
        for scales in ((torch.rand(()), torch.rand(())), (torch.rand(m, 1), torch.rand(1, n))):
            torchs = torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
            assert torch.equal(multiply(a, b, *scales), torchs)


def test_the_older_cast_is_that_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array([0.0, -0.0, 0.1, 447.0, 448.0, 463.9, 464.0, 464.1, 465.0, 3e10, np.inf, np.nan], np.float32)
    x = np.concatenate([x, -x])
    theirs = torch.from_numpy(x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert torch.equal(given.cast_before_2_13(torch.from_numpy(x)).float().nan_to_num(1e9), theirs.nan_to_num(1e9))


def test_the_saturating_cast_is_the_oracles():
    x = torch.linspace(-1000, 1000, 4001)
    codes = rounding_oracle.encode(x, get_format("float8_e4m3fn"), "nearest_even", "saturate")
    assert torch.equal(given._saturating_cast(x).view(torch.uint8), codes.to(torch.uint8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("one", CALLS, ids=lambda one: one.title)
def test_a_gpu_agrees(one):
    capability = torch.cuda.get_device_capability()
    tensors, bias = one.tensors("cuda"), given.empty_like_described(one.bias, "cuda")
    said = given.ask_torch(*tensors, bias=bias, out_dtype=one.out_dtype)
    found = reference("explain_scaled_mm")(*tensors, capability, bias, one.out_dtype)
    assert (said == "it works") == (not found)


# --- the GPU that stands in -------------------------------------------------------------------------------------------


def test_a_stand_in_raises_torchs_kind_of_error():
    e5m2 = call("", (9, 0), a=given.float8(E5M2, 16, 32), b=given.float8(E5M2, 32, 48, column_major=True)).tensors()
    with pytest.raises(ValueError, match="two Float8_e5m2"):
        Gpu((9, 0)).scaled_mm(*e5m2)
    with pytest.raises(RuntimeError, match="compute capability"):
        Gpu((8, 6)).scaled_mm(*call("", (8, 6)).tensors())
    with pytest.raises(NotImplementedError, match="SM90"):
        Gpu((8, 9)).scaled_mm(*call("", (8, 9), k=256, n=256, blockwise=True).tensors())
    with pytest.raises(ValueError, match="fp8e4nv"):
        Gpu((8, 6)).mm(*call("", (8, 6)).tensors()[:2])
    with pytest.raises(RuntimeError, match="Rowwise scaling is not currently supported on your device"):
        Gpu((8, 9), rowwise=False).scaled_mm(*call("", (8, 9), rowwise=True).tensors())


def test_a_stand_in_writes_down_what_ran():
    gpu = Gpu((8, 9))
    gpu.scaled_mm(*call("", (8, 9)).tensors())
    gpu.scaled_mm(*call("", (8, 9), rowwise=True).tensors())
    assert gpu.log == [
        "scaled_mm of float8_e4m3fn and float8_e4m3fn, one scale each",
        "scaled_mm of float8_e4m3fn and float8_e4m3fn, scales by row",
    ]
    assert gpu.refusal is None


def test_a_mistake_in_an_earlier_answer_costs_nothing_later(monkeypatch):
    """The GPU of a check runs on the references, whatever the page's own explain_scaled_mm says."""
    monkeypatch.setattr(given, "explain_scaled_mm", lambda *_: [given.Problem("capability", "no", "none")])
    with pytest.raises(RuntimeError, match="no"):
        Gpu((9, 0)).scaled_mm(*call("", (9, 0)).tensors())
    assert given.multiplied_on(exact.multiply, (9, 0), True, True, 16, 16, 16, 0)[0].startswith("scaled_mm of")


def test_an_error_of_the_answer_is_not_taken_for_the_gpus():
    def stumbles(*_):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        given.multiplied_on(stumbles, (8, 9), True, True, 16, 16, 16, 0)


@pytest.mark.parametrize("name", ["multiply", "float8_products"])
def test_the_oracles_stand_in_is_right(name):
    """What stands in while no answer is there passes its own checks."""
    from lowprec_lab.graders.judging import grade

    assert grade(BLANKS[name], getattr(exact, name)).passed


# --- data on its way to a sandbox -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_float8_goes_over_the_wire_in_its_layout(dtype):
    codes = torch.arange(96, dtype=torch.uint8).view(dtype).reshape(8, 12)
    for sent in (codes, codes.t(), exact.to_column_major(codes)):
        (got,) = wire.unpack(*wire.pack((sent,)))
        assert got.dtype == dtype
        assert got.shape == sent.shape
        assert got.stride() == sent.stride()
        assert torch.equal(got.contiguous().view(torch.uint8), sent.contiguous().view(torch.uint8))


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_the_map_shows_what_was_found():
    titles, rows = scaled_mm_picture.verdicts(exact.explain_scaled_mm)
    found = dict(zip(titles, rows, strict=True))
    assert found["one scale each"] == ["capability", "", "", "", ""]
    assert found["b row-major"] == ["capability", "b column-major", "b column-major", "", ""]
    assert found["scales by block of 128"] == ["capability", "block-wise", "", "block-wise", "block-wise"]
    picture = scaled_mm_picture.compatibility(exact.explain_scaled_mm)
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert texts == [rule or "yes" for row in rows for rule in row]
    assert png(picture).startswith(b"\x89PNG")


def test_the_picture_of_memory_counts_as_memory_does():
    turned = torch.empty_strided((2, 3), (1, 2))
    texts = [text.get_text() for text in scaled_mm_picture.memory([("turned", turned)]).axes[0].texts]
    assert texts == ["turned", "strides (1, 2)", "0", "2", "4", "1", "3", "5"]
