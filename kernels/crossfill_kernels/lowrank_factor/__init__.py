"""Low-rank factors of a segment's cache or of its correction (KVCMAS, § Anchors): Z ≈ A B, A = U_r Σ_r, B = V_rᵀ.

Two ways: the eigenvectors of the smaller Gram matrix in float64 are exact; a randomised range finder with oversampling
(Halko, Martinsson and Tropp 2011, § 4.5 and § 5.1) is many times faster where both sides are long. Both are products
and small eigenvalue problems, which torch gives to cuBLAS and cuSOLVER or to MKL and LAPACK: well-kept libraries beat
code of our own here, so torch serves on every device.
"""

from typing import Literal

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.arguments import FLOATS
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.factors import Factors
from crossfill_kernels.lowrank_factor.reference import lowrank_factor_reference
from crossfill_kernels.lowrank_factor.solvers import by_gram, by_range, padded

__all__ = ["Factors", "Method", "lowrank_factor", "lowrank_factor_reference"]

Method = Literal["auto", "gram", "randomised"]

# Up to here the exact way takes at most 3 times the time of the other, a few milliseconds (256 × 1,024, rank 32).
_SHORT_SIDE = 256


def lowrank_factor(
    matrix: torch.Tensor,
    rank: int,
    *,
    method: Method = "auto",
    oversampling: int = 10,
    iterations: int = 2,
    generator: torch.Generator | None = None,
) -> Factors:
    """The best factors of a rank (`gram`), or nearly so (`randomised`).

    The randomised error is within .4 % of the best where singular values fall like 1/i or faster, as those of
    corrections do; on white noise it is up to 2 % above it.

    Args:
        matrix: float32 or bfloat16 [T, D].
        rank: r, from 1 on. Beyond min(T, D) the factors are padded with zeros, so that anchors of short and long
            segments stack.
        method: `auto` is exact where the shorter side has up to 256 or is less than 4 times as long as the rank with
            its oversampling, else randomised.
        oversampling: columns beyond `rank` that the range finder keeps until the end.
        iterations: its power iterations.
        generator: of its random matrix, on the device of `matrix`; None: the same numbers in every call.

    Returns:
        The factors in float32, and the error that they leave.

    Raises:
        ArgumentError: a shape or dtype does not fit, a number is out of range, or the matrix is not finite.
    """
    _check(matrix, rank, method, oversampling, iterations)
    chosen = dispatch.choose("lowrank_factor", matrix, cpu="torch", cuda="torch")
    if chosen == "reference":
        return lowrank_factor_reference(matrix, rank)
    short = min(matrix.shape)
    if method == "auto":
        method = "gram" if short <= max(_SHORT_SIDE, 4 * (rank + oversampling)) else "randomised"
    if short == 0:
        left, right = matrix.new_zeros(matrix.shape[0], 0), matrix.new_zeros(0, matrix.shape[1])
    elif method == "gram":
        left, right = by_gram(matrix, rank)
    else:
        if generator is None:
            generator = torch.Generator(matrix.device).manual_seed(0)
        left, right = by_range(matrix.float(), rank, oversampling, iterations, generator)
    return padded(matrix, left.float(), right.float(), rank)


def _check(matrix: torch.Tensor, rank: int, method: str, oversampling: int, iterations: int) -> None:
    if matrix.dim() != 2 or matrix.dtype not in FLOATS:
        raise ArgumentError("matrix", f"want float32 or bfloat16 [T, D], got {matrix.dtype} {list(matrix.shape)}")
    if rank < 1:
        raise ArgumentError("rank", f"want at least 1, got {rank}")
    if method not in ("auto", "gram", "randomised"):
        raise ArgumentError("method", f"want auto, gram or randomised, got {method}")
    for name, number in (("oversampling", oversampling), ("iterations", iterations)):
        if number < 0:
            raise ArgumentError(name, f"want at least 0, got {number}")
    # The eigenvalue solvers wait for a GPU anyway.
    if not bool(matrix.isfinite().all()):
        raise ArgumentError("matrix", "want finite numbers")
