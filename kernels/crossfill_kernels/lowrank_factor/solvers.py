"""The two ways to factors, in torch."""

import torch

from crossfill_kernels.factors import Factors

# Singular values are square roots of eigenvalues in float64, whose noise is 1e-16 of the largest; below this share of
# the largest they are noise (and beyond what the float32 input holds), and their vectors are any.
_NOISE = 1e-6


def by_gram(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors [T, k], [k, D], k = min(rank, T, D), float64, from the eigenvectors of the smaller Gram matrix.

    The Gram matrix squares singular values: in float32 those below 3e-4 of the largest would be lost.
    """
    wide = matrix.double()
    tall = wide.shape[0] >= wide.shape[1]
    values, vectors = torch.linalg.eigh(wide.mT @ wide if tall else wide @ wide.mT)
    kept = min(rank, values.numel())
    sigma = values[-kept:].flip(0).clamp_min(0.0).sqrt()  # [k]
    vectors = vectors[:, -kept:].flip(1)
    sigma = sigma.where(sigma > _NOISE * sigma[0], 0.0)
    if tall:
        right = vectors.mT * (sigma > 0)[:, None]
        return wide @ right.mT, right
    inverse = torch.where(sigma > 0, 1.0 / sigma, 0.0)
    return vectors * sigma, inverse[:, None] * (vectors.mT @ wide)


def by_range(
    matrix: torch.Tensor, rank: int, oversampling: int, iterations: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors as `by_gram`, of the matrix projected onto a subspace that nearly holds its leading columns."""
    columns = min(rank + oversampling, *matrix.shape)
    start = torch.randn(matrix.shape[1], columns, generator=generator, device=matrix.device)
    basis = _orthonormal(matrix @ start)  # [T, columns]
    for _ in range(iterations):
        basis = _orthonormal(matrix @ _orthonormal(matrix.mT @ basis))
    left, right = by_gram(basis.mT @ matrix, rank)
    return basis.double() @ left, right


def padded(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, rank: int) -> Factors:
    """The factors with zeros up to `rank`, and the error that they leave."""
    residual = torch.addmm(matrix.float(), left, right, alpha=-1)
    missing = rank - left.shape[1]
    if missing > 0:
        left = torch.nn.functional.pad(left, (0, missing))
        right = torch.nn.functional.pad(right, (0, 0, 0, missing))
    return Factors(left.contiguous(), right.contiguous(), torch.linalg.vector_norm(residual))


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    basis: torch.Tensor = torch.linalg.qr(columns)[0]
    return basis
