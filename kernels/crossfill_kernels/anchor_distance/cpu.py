"""Distances to anchors on a CPU: residuals of a few tokens at a time, in torch's products."""

import torch

from crossfill_kernels.segments import SegmentRows

# Ten anchors' residuals of 64 tokens and 1,024 numbers are 2.6 MB; of 256 tokens they leave the cache and take 1.7
# times as long (2,048 × 1,024, one thread of an AMD EPYC).
BLOCK_TOKENS = 64


def token_squares_cpu(segment: SegmentRows, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """‖C[t] - A_v[t] B_v‖², float32 [N, T]; arguments were checked."""
    rows = segment.read().flatten(1).float()  # [T, D]
    left, right = left.float(), right.float()
    squares = torch.empty(left.shape[:2])
    for start in range(0, segment.length, BLOCK_TOKENS):
        block = slice(start, start + BLOCK_TOKENS)
        residual = torch.baddbmm(rows[block], left[:, block], right, alpha=-1)  # [N, 64, D]
        squares[:, block] = torch.linalg.vecdot(residual, residual)
    return squares
