"""Chapter 13: block formats: a scale for every few numbers of a row.

An **MX** tensor has blocks of 32 numbers along its last dimension. Each number is a *code* of a small format (E4M3,
E5M2, E2M3, E3M2 or E2M1), each block has a *scale* that is one byte: an exponent, as E8M0 has it. The value of a number
is decode(code) * 2^(byte - 127), and byte 255 makes a block NaN. **NVFP4** has blocks of 16 E2M1 codes, a scale in E4M3
for each block and one in float32 for the tensor. **DeepSeek-V3** has E4M3 codes, and a float32 scale for each 1 x 128
numbers of an activation and each 128 x 128 numbers of a weight. Scales are what a code is *multiplied* by, as in
chapter 11.

What holds for every function here that quantizes:
- Codes are rounded to nearest, ties to even, and saturate at the format's largest value.
- Inputs of 16 bits are converted to float32 first, and everything is float32.

References: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6.3 (floor); NVIDIA, cuBLAS documentation,
1D block scaling, and TransformerEngine, transformer_engine/common/util/ptx.cuh, float_to_e8m0 (rceil); pytorch/ao,
torchao/prototype/mx_formats/{mx_tensor,nvfp4_tensor}.py (ceil, even, two levels); NVIDIA, Pretraining Large Language
Models with NVFP4, arXiv:2509.25149; DeepSeek-V3, arXiv:2412.19437, section 3.3, and inference/kernel.py; Ashkboos et
al., QuaRot, arXiv:2404.00456 (rotations); Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
arXiv:2110.02861; Xi et al., COAT, arXiv:2410.19313 (a power of the second moment before it is cast).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lowprec_lab import fused
from lowprec_lab.bits import decode
from lowprec_lab.blanks import blank
from lowprec_lab.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from lowprec_lab.quantizer import spread, values_of

MX_BLOCK = 32
NVFP4_BLOCK = 16
MOMENT_BLOCK = 256
SCALE_MODES = ("floor", "rceil", "ceil", "even")
MX_FORMATS: dict[str, Format] = {
    "MXFP8": E4M3, "MXFP8 E5M2": E5M2, "MXFP6 E2M3": E2M3, "MXFP6 E3M2": E3M2, "MXFP4": E2M1,
}  # fmt: skip
NAN_SCALE = 255  # the E8M0 byte that makes a block NaN
SMALLEST_TENSOR_SCALE = 2.0**-100  # below it the reciprocals of NVFP4 leave float32
FP8 = torch.float8_e4m3fn


# --- the exercises ----------------------------------------------------------------------------------------------------


@blank(exercise="13.1", points=3, minutes=35)
def e8m0_scale(amax: Tensor, fmt: Format, mode: str = "floor") -> Tensor:
    """The scale of each block as an E8M0 byte, from the exponent bits of its largest magnitude.

    amax: float32, any shape, not below 0. fmt: one of MX_FORMATS. Returns: uint8, same shape: k + 127 for a scale 2^k,
    at least 0 and at most 254. With 2^emax the largest power of two in fmt:
        "floor"   k = floor(log2(amax)) - emax
        "ceil"    k = ceil(log2(amax)) - emax
        "even"    k = floor(log2(r)) - emax, r being amax rounded to fmt's mantissa bits, ties upwards
        "rceil"   k = ceil(log2(amax / max_finite(fmt))), the quotient in float32
    0 gives 0, NaN gives 255. Infinity counts as 2^128; "rceil" gives it 254. All exact, next to powers of two and for
    subnormal numbers too. ValueError that lists SCALE_MODES for another mode.
    """


@blank(exercise="13.2", points=3, minutes=30, unlocks="BlockExplorer runs on your quantizer.")
def quantize_mx(x: Tensor, fmt: Format, mode: str = "floor", block: int = MX_BLOCK) -> tuple[Tensor, Tensor]:
    """(codes, scale) of an MX tensor, with one scale for each block of a row.

    x: (..., K), float32, bfloat16 or float16. fmt: one of MX_FORMATS. Returns: codes uint8 in x's shape, one code in a
    byte; scale uint8 (..., K / block), the `e8m0_scale` of each block's largest magnitude.
    A code is that of x / 2^(byte - 127), for byte 0 too. Codes of a block whose scale is 255 are 0.
    ValueError that names both numbers where block does not divide K.
    """


@blank(exercise="13.3", points=2, minutes=15)
def dequantize_mx(codes: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """The values of an MX tensor: decode(code) * 2^(byte - 127).

    codes: uint8 (..., K); scale: uint8 (..., K / block), for any block. Returns: float32, in the shape of codes.
    Byte 255 gives NaN, whatever the codes are. What is beyond float32 is infinity.
    """


@blank(exercise="13.4", points=1, minutes=10)
def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes of 4 bits in each byte: that of an even place in the lower half, the one after it in the upper half.

    codes: uint8 (..., n), from 0 to 15. Returns: uint8 (..., n / 2). ValueError for an odd n.
    """


@blank(exercise="13.5", points=1, minutes=10)
def unpack_nibbles(packed: Tensor) -> Tensor:
    """The codes of 4 bits that `pack_nibbles` put into each byte. packed: uint8 (..., n). Returns: uint8 (..., 2 n)."""


@blank(exercise="13.6", points=4, minutes=40)
def quantize_nvfp4(x: Tensor, tensor_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, tensor_scale): E2M1 codes with a scale for each block of 16, and one for the tensor.

    x: (..., K), float32, bfloat16 or float16; ValueError that names both numbers where 16 does not divide K.
    tensor_scale: float32, 0-d, at least 2^-100; or None: amax of x / 2688, and 1.0 where that is below 2^-100.
    Returns: codes uint8 in x's shape, one code in a byte; scale float8_e4m3fn (..., K / 16); the tensor_scale in use.
    scale = amax of the block / 6 / tensor_scale, rounded to E4M3 (subnormals too), saturated at 448.
    A code is that of x * ((1 / tensor_scale) / scale), all in float32. Where scale is 0 or NaN, codes are 0.
    """


@blank(exercise="13.7", points=3, minutes=30)
def quantize_blockwise_128(
    x: Tensor, block: tuple[int, int] = (1, 128), power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(codes, scale) by DeepSeek's rule: (1, 128) for activations, (128, 128) for weights.

    x: (M, K), float32, bfloat16 or float16. block: rows and columns of a block; where they do not divide, the last ones
    are smaller. Returns: codes float8_e4m3fn (M, K); scale float32 (ceil(M / rows), ceil(K / columns)).
    scale = max(amax of the block, 1e-4) / 448; codes = x / scale, both in float32.
    power_of_two: the smallest power of two that is not below that scale, exactly.
    NaN and infinity are the scale of their block, and its codes are x divided by that.
    """


@blank(exercise="13.8", points=2, minutes=25)
def hadamard_rotate(x: Tensor, signs: Tensor, back: bool = False) -> Tensor:
    """Mix the numbers of each block by signs and a Hadamard matrix: a rotation, which spreads what is large.

    x: float32 (..., K). signs: float32 (n,), of 1.0 and -1.0, n a power of 4. Returns: float32, same shape.
    Each n numbers of a row, as a row vector: forth, (block * signs) @ H / sqrt(n); back, its inverse.
    H[i, j] is 1 where i & j has an even number of bits that are set, else -1.
    ValueError that names both numbers where n does not divide K.
    """


@blank(exercise="13.9", points=4, minutes=45)
def adam_8bit_step(
    weight: Tensor, gradient: Tensor, m_codes: Tensor, m_scale: Tensor, r_codes: Tensor, r_scale: Tensor, step: int,
    lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """One step of AdamW whose moments are kept in 8 bits: (new weight, and the four parts of the new moments).

    weight, gradient: float32, one shape. step: counted from 1. Codes are E4M3 (float8_e4m3fn, weight's shape), scales
    are float32, one for each 256 numbers in the order of rows (1-d; the last block may be smaller): of the first moment
    m, and of r, the *root* of the second moment v. A value is code * scale. In float32:
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * r^2 + (1 - beta2) * gradient^2
        weight * (1 - lr * weight_decay) - lr * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)
    and these m and sqrt(v) are what is kept: scale = amax of the block / 448, and 1.0 where that is below 2^-126;
    codes = value / scale.
    """


@blank(exercise="13.10", points=5, minutes=60)
def mx_linear(x: Tensor, weight: Tensor, fmt: Format = E4M3, mode: str = "rceil") -> Tensor:
    """The output of a linear layer, x @ weight.T, and its gradients: three products of MX tensors.

    x: float32 (..., K); weight: float32 (N, K). Returns: float32 (..., N), differentiable in both.
        output = x @ weight.T    grad_x = grad_output @ weight    grad_weight = grad_output.T @ x
    Every operand of every product is quantized from its own float32 numbers, in blocks of 32 along the dimension that
    this product sums over, by `quantize_mx` with fmt and mode; products of their values are float32's. All dimensions
    of x but the last are one. ValueError where 32 does not divide what is summed over.
    """


# --- given: values, round trips, the other ways back ------------------------------------------------------------------


def quick_encode(x: Tensor, fmt: Format) -> Tensor:
    """The codes that chapter 02's `encode` gives, several times as fast. x: float32. Returns: uint8, same shape.

    fmt: of at most 8 bits. As there: nearest, ties to even, saturated; ValueError for NaN where fmt has none.
    """
    return fused.encode_(x, fmt)


def scale_value(scale: Tensor) -> Tensor:
    """2^(byte - 127) for E8M0 bytes, exactly; NaN for 255. scale: uint8. Returns: float32, same shape."""
    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, 0x00400000, bits)  # 2^-127 is a subnormal number
    return torch.where(scale == NAN_SCALE, 0x7FC00000, bits).view(torch.float32)


def mx_round_trip(x: Tensor, fmt: Format, mode: str = "floor", block: int = MX_BLOCK) -> Tensor:
    """What MX leaves of x: x's dtype and shape."""
    return dequantize_mx(*quantize_mx(x, fmt, mode, block), fmt).to(x.dtype)


def dequantize_nvfp4(codes: Tensor, scale: Tensor, tensor_scale: Tensor) -> Tensor:
    """The values of what `quantize_nvfp4` gives: decode(code) * (scale * tensor_scale), float32."""
    values = values_of(decode, E2M1, codes.device)[codes.int()].unflatten(-1, (-1, NVFP4_BLOCK))
    return (values * (scale.float() * tensor_scale).unsqueeze(-1)).flatten(-2)


def dequantize_blockwise(codes: Tensor, scale: Tensor, block: tuple[int, int] = (1, 128)) -> Tensor:
    """The values of what `quantize_blockwise_128` gives: code * scale, float32."""
    return codes.float() * spread(scale, block, codes.shape)


def nvfp4_round_trip(x: Tensor) -> Tensor:
    """What NVFP4 leaves of x: x's dtype and shape."""
    return dequantize_nvfp4(*quantize_nvfp4(x)).to(x.dtype)


def blockwise_round_trip(x: Tensor, block: tuple[int, int] = (1, 128), power_of_two: bool = False) -> Tensor:
    """What DeepSeek's blocks leave of x: x's dtype and shape."""
    return dequantize_blockwise(*quantize_blockwise_128(x, block, power_of_two), block).to(x.dtype)


def random_signs(count: int, seed: int) -> Tensor:
    """`count` signs, 1.0 or -1.0, float32, drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)
    return 1.0 - 2.0 * torch.randint(2, (count,), generator=generator).float()


# --- given: an optimizer and a layer that run on the answers ----------------------------------------------------------


class Adam8bit(torch.optim.Optimizer):
    """AdamW with moments in 8 bits: `adam_8bit_step` for every parameter.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them; also groups.
    """

    def __init__(
        self, params: Iterable, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """One step for every parameter that has a gradient."""
        for group in self.param_groups:
            options = group["lr"], group["betas"], group["eps"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, *options)

    def _step_one(self, parameter: Tensor, *options: object) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, moments=empty_moments(parameter))
        state["step"] += 1
        made = adam_8bit_step(parameter, parameter.grad, *state["moments"], state["step"], *options)
        parameter.copy_(made[0])
        state["moments"] = made[1:]

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch has it, which makes every tensor of a state float32: codes become codes again."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            m_codes, m_scale, r_codes, r_scale = state["moments"]
            state["moments"] = m_codes.to(FP8), m_scale, r_codes.to(FP8), r_scale

    def moment_bytes(self) -> int:
        """The bytes of all moments and their scales."""
        return sum(part.nbytes for state in self.state.values() for part in state["moments"])


def empty_moments(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The moments before the first step: codes of 0, and scales of 1.0."""
    blocks = -(-weight.numel() // MOMENT_BLOCK)
    return tuple(
        part
        for _ in range(2)
        for part in (torch.zeros(weight.shape, device=weight.device).to(FP8), torch.ones(blocks, device=weight.device))
    )


class MXLinear(nn.Linear):
    """A linear layer whose three products are `mx_linear`'s. The bias is added in high precision.

    fmt, mode: of all six casts.
    """

    fmt: Format = E4M3
    mode: str = "rceil"

    @classmethod
    def from_linear(cls, linear: nn.Linear, fmt: Format = E4M3, mode: str = "rceil") -> MXLinear:
        """A layer with the very parameters of `linear`, not copies of them."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        made.weight, made.bias, made.fmt, made.mode = linear.weight, linear.bias, fmt, mode
        return made.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """x: float32 (..., in_features). Returns: float32 (..., out_features)."""
        output = mx_linear(x, self.weight, self.fmt, self.mode)
        return output if self.bias is None else output + self.bias


def convert_to_mx(
    model: nn.Module, fmt: Format = E4M3, mode: str = "rceil", skip: tuple[str, ...] = ("head",)
) -> nn.Module:
    """Make every nn.Linear of the model an MXLinear, in place, but those whose name is in `skip`. Returns the model."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name not in skip:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, MXLinear.from_linear(layer, fmt, mode))
    return model


# --- scenarios: what a check drives an answer with, beside plain calls ------------------------------------------------


def refusal(function: Callable, names: tuple[str, ...], *args: object) -> str:
    """In words: whether `function(*args)` raises ValueError, and which of these names and numbers its text has."""
    try:
        function(*args)
    except ValueError as error:
        return f"ValueError that names {', '.join(name for name in names if name in str(error)) or 'none of them'}"
    return "no error"


def few_bits(generator: torch.Generator, *shape: int) -> Tensor:
    """Whole numbers up to 31 times powers of two from 1 to 2^-6: all sums of products are exact, in any order."""
    numbers = torch.randint(-31, 32, shape, generator=generator).float()
    return numbers * 2.0 ** -torch.randint(0, 7, shape, generator=generator)


def linear_products(
    function: Callable, seed: int, rows: tuple[int, ...], inputs: int, outputs: int, fmt: Format = E4M3,
    mode: str = "rceil",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(output, grad_x, grad_weight) of `function(x, weight, fmt, mode)`, on `few_bits` drawn from the seed.

    x is (*rows, inputs), weight (outputs, inputs), the output's gradient (*rows, outputs). Zeros where none arrives.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = (*rows, inputs), (outputs, inputs), (*rows, outputs)
    x, weight, gradient = (few_bits(generator, *shape) for shape in shapes)
    with torch.enable_grad():
        output = function(x.requires_grad_(), weight.requires_grad_(), fmt, mode)
    found = [None, None]
    if output.requires_grad:
        found = torch.autograd.grad(output, (x, weight), gradient, allow_unused=True)
    arrived = [torch.zeros_like(each) if g is None else g for each, g in zip((x, weight), found, strict=True)]
    return output.detach(), *arrived


def linear_refusal(function: Callable, rows: tuple[int, ...], inputs: int, outputs: int) -> str:
    """In words: whether `linear_products` of these sizes raises ValueError, and whether its text names the block."""
    try:
        linear_products(function, 0, rows, inputs, outputs)
    except ValueError as error:
        return f"ValueError that {'names' if str(MX_BLOCK) in str(error) else 'does not name'} {MX_BLOCK}"
    return "no error"
