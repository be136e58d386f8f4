"""The maths of the ridge correction, in plain torch."""

import torch

from crossfill_kernels.ridge_correct.ridge_map import RidgeMap
from crossfill_kernels.rope_rerotate.reference import rotate_reference
from crossfill_kernels.rope_rerotate.rotation import Rotation


def ridge_correct_reference(source: torch.Tensor, state: RidgeMap, *, rotation: Rotation | None = None) -> torch.Tensor:
    """Align the source and add the ridge map of the result.

        x[t] = R(C[t]),  Ĉ[t] = x[t] + (x[t] - mean) P M Q + bias

    R turns keys by the positions that they move, and is the identity for values.

    Args:
        source: C, [T, D] or [T, H_kv, d]; with a rotation [T, H_kv, d].
        state: mean, P, M, Q and bias.
        rotation: how far the keys turn.

    Returns:
        The corrected cache in the shape and dtype of `source`, computed in float64.
    """
    aligned = source.double() if rotation is None else rotate_reference(source.double(), rotation)
    change = aligned.reshape(source.shape[0], state.mean.numel()) - state.mean.double()
    for factor in (state.basis_in, state.weights, state.basis_out):
        if factor is not None:
            change = change @ factor.double()
    return (aligned + (change + state.bias.double()).view(source.shape)).to(source.dtype)
