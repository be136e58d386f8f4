"""The maths of the distance to anchors, in plain torch."""

import torch


def anchor_distance_reference(
    segment: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Distance over the compared prefix of n_v tokens.

        d[v] = √ Σ_{t < n_v} ‖C[t] - A[v, t] B[v]‖²

    Args:
        segment: C, [T, D] or [T, H_kv, d].
        left: A, [N, T, r].
        right: B, [N, r, D].
        lengths: n, integers [N]; None: T.

    Returns:
        float32 [N], computed in float64.
    """
    squares = _residual(segment, left, right).square().sum(dim=-1)  # [N, T]
    if lengths is not None:
        position = torch.arange(left.shape[1], device=left.device)
        squares = squares.where(position < lengths[:, None], 0.0)
    distance: torch.Tensor = squares.sum(dim=1).sqrt().float()
    return distance


def token_distance_reference(segment: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """‖C[t] - A[v, t] B[v]‖, float32 [N, T], computed in float64."""
    return _residual(segment, left, right).square().sum(dim=-1).sqrt().float()


def _residual(segment: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    rows = segment.double().reshape(segment.shape[0], right.shape[2])
    residual: torch.Tensor = rows - left.double() @ right.double()  # [N, T, D]
    return residual
