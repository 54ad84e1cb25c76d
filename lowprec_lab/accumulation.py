"""Chapter 03: sums in low precision, and why they are what it breaks.

Arithmetic in a format is done here as hardware without that format does it: one operation in float32, whose result is
rounded to the format, to nearest, ties to even; beyond its largest value to the special value that the format has, else
to the largest value. For formats of at most 11 significant bits that is the same as rounding the exact result once.

References: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, chapter 4; Kahan, Further remarks on
reducing truncation errors, CACM 8 (1965); DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3.2; Micikevicius
et al., Mixed Precision Training, arXiv:1710.03740.
"""

from __future__ import annotations

from torch import Tensor

from lowprec_lab.blanks import blank
from lowprec_lab.formats import Format


@blank(exercise="3.1", points=2, minutes=15)
def sum_sequential(x: Tensor, fmt: Format) -> Tensor:
    """Sum along the last dimension, one element after the other, with every total rounded to `fmt`.

    x: float32, (..., n); each element is rounded to `fmt` first. Returns: float32, (...); 0.0 for n = 0.
    The total starts at 0.0.
    """


@blank(exercise="3.2", points=3, minutes=25)
def sum_pairwise(x: Tensor, fmt: Format) -> Tensor:
    """Sum along the last dimension in a tree: neighbours first, then the sums of neighbours, each rounded to `fmt`.

    x: float32, (..., n); each element is rounded to `fmt` first. Returns: float32, (...); 0.0 for n = 0.
    Elements 0 and 1, 2 and 3, ... are added; the last of an odd number moves on unchanged; and so on until one is left.
    """


@blank(exercise="3.3", points=3, minutes=30)
def sum_kahan(x: Tensor, fmt: Format) -> Tensor:
    """Kahan's sum along the last dimension: what a rounding lost is carried along and added to the next element.

    x: float32, (..., n); each element is rounded to `fmt` first. Returns: float32, (...); 0.0 for n = 0.
    For each element: y = element - lost; t = total + y; lost = (t - total) - y; total = t. Each of the four operations
    is rounded to `fmt`. total and lost start at 0.0.
    """


@blank(exercise="3.4", points=3, minutes=25)
def dot_product(a: Tensor, b: Tensor, product_fmt: Format, accumulator_fmt: Format) -> Tensor:
    """Dot product along the last dimension with products rounded to one format and totals to another.

    a, b: float32, (..., n), values of at most 12 significant bits, so that float32 holds every product exactly.
    Returns: float32, (...). One element after the other; the total starts at 0.0 and is rounded to `accumulator_fmt`.
    """


@blank(exercise="3.5", points=4, minutes=40)
def matmul_promoted(a: Tensor, b: Tensor, accumulator_fmt: Format, promote_every: int) -> Tensor:
    """Matrix product with a short accumulator that is added to a float32 one every `promote_every` products.

    a: float32, (M, K); b: float32, (K, N); values of at most 12 significant bits. Returns: float32, (M, N).
    The short accumulator starts at 0.0, takes one product after the other in the order of K, and is rounded to
    `accumulator_fmt` after each. After `promote_every` products, and at the end, it is added to the float32 total (one
    float32 addition) and starts again at 0.0. ValueError for promote_every < 1.
    """


@blank(exercise="3.6", points=2, minutes=15)
def update_is_lost(weight: Tensor, update: Tensor, fmt: Format) -> Tensor:
    """Where adding an update changes nothing: the sum is rounded back to the weight.

    weight: float32 values of `fmt`; update: float32; one shape. Returns: bool, same shape: True where `update` is not
    zero and the rounded sum is the weight. An update of zero is not lost.
    """


@blank(exercise="3.7", points=3, minutes=25)
def sgd_with_master_weights(weight: Tensor, gradients: Tensor, lr: float, fmt: Format) -> tuple[Tensor, Tensor]:
    """Gradient descent with float32 master weights and a copy of them in `fmt`.

    weight: float32, (n,): the first master weights. gradients: float32, (steps, n). lr: learning rate.
    Returns: (stored, master): stored is float32 (steps, n), the weights rounded to `fmt` after each step; master is
    float32 (n,), the master weights after the last. Each step subtracts lr * gradient, in float32, from the master.
    """


@blank(exercise="3.8", points=3, minutes=25)
def sgd_with_stochastic_rounding(weight: Tensor, gradients: Tensor, lr: float, fmt: Format, noise: Tensor) -> Tensor:
    """Gradient descent on weights that exist in `fmt` only, rounded stochastically after each step.

    weight: float32 values of `fmt`, (n,). gradients, noise: float32, (steps, n); noise as in `round_stochastic`.
    lr: learning rate. Returns: float32, (steps, n): the weights after each step. Each step subtracts lr * gradient in
    float32 and rounds with that step's noise; what is beyond the largest value saturates.
    """
