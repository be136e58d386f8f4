"""Low-rank factors of matrices T × D: A B ≈ Z, A = U Σ, B = Vᵀ."""

from dataclasses import dataclass

import torch

from crossfill_kernels.arguments import FLOATS
from crossfill_kernels.errors import ArgumentError


@dataclass(frozen=True)
class Factors:
    """The factors of one matrix.

    Attributes:
        left: float32 [T, r], A = U_r Σ_r, columns in falling order of their singular values.
        right: float32 [r, D], B = V_rᵀ, orthonormal rows; where a singular value is zero, column and row are zero.
        error: float32 [], ‖Z - A B‖_F of the factors in float32.
    """

    left: torch.Tensor
    right: torch.Tensor
    error: torch.Tensor


def check_anchors(left: torch.Tensor, right: torch.Tensor, like: torch.Tensor, length: int, width: int) -> None:
    """Raise an ArgumentError unless these are the stacked factors of N anchors of a segment.

    Args:
        left, right: [N, T, r] and [N, r, D], both float32 or both bfloat16; any strides.
        like: a tensor on the device that they have to be on.
        length, width: the segment's T and D.
    """
    for name, tensor in (("left", left), ("right", right)):
        if tensor.dim() != 3 or tensor.dtype not in FLOATS:
            raise ArgumentError(
                name, f"want float32 or bfloat16 with 3 dimensions, got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.device != like.device:
            raise ArgumentError(name, f"want it on {like.device}, got {tensor.device}")
    if left.shape[1] != length:
        raise ArgumentError("left", f"want [N, {length}, r], got {list(left.shape)}")
    if right.shape != (left.shape[0], left.shape[2], width):
        raise ArgumentError("right", f"want {[left.shape[0], left.shape[2], width]}, got {list(right.shape)}")
    if right.dtype != left.dtype:
        raise ArgumentError("right", f"want the dtype of left {left.dtype}, got {right.dtype}")
