"""The maths of the low-rank correction, in plain torch."""

import torch

from crossfill_kernels.rope_rerotate.reference import rotate_reference
from crossfill_kernels.rope_rerotate.rotation import Rotation


def lowrank_correct_reference(
    source: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    weights: torch.Tensor,
    *,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Align the source and add the weighted sum of the anchors.

        Ĉ[t] = R(C[t]) + Σ_v w[v, t] · A[v, t] B[v]

    R turns keys by the positions that they move, and is the identity for values.

    Args:
        source: [T, D] or [T, H_kv, d]; with a rotation [T, H_kv, d].
        left: A, [N, T, r].
        right: B, [N, r, D].
        weights: [N] or [N, T].
        rotation: how far the keys turn.

    Returns:
        The corrected cache in the shape and dtype of `source`, computed in float64.
    """
    aligned = source.double() if rotation is None else rotate_reference(source.double(), rotation)
    each = weights.double() if weights.dim() == 2 else weights.double()[:, None].expand(-1, left.shape[1])
    correction = torch.einsum("nt,ntr,nrd->td", each, left.double(), right.double())
    return (aligned + correction.view(source.shape)).to(source.dtype)
