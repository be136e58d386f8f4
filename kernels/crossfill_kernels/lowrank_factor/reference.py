"""The maths of the low-rank factors: a truncated singular value decomposition."""

import torch

from crossfill_kernels.factors import Factors


def lowrank_factor_reference(matrix: torch.Tensor, rank: int) -> Factors:
    """Z = U Σ Vᵀ, cut after the `rank` greatest singular values: A = U_r Σ_r, B = V_rᵀ, ‖Z - A B‖² = Σ_{i > r} σ_i².

    Args:
        matrix: Z, [T, D].
        rank: r; beyond min(T, D) the factors are padded with zeros.

    Returns:
        The factors, computed in float64.
    """
    u, sigma, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    kept = min(rank, sigma.numel())
    left, right = matrix.new_zeros(matrix.shape[0], rank).float(), matrix.new_zeros(rank, matrix.shape[1]).float()
    left[:, :kept] = u[:, :kept] * sigma[:kept]
    right[:kept] = vh[:kept] * (sigma[:kept] > 0)[:, None]
    return Factors(left, right, sigma[kept:].square().sum().sqrt().float())
