"""Distance of a segment's cache to the anchors of a pool (KVCMAS, § Match): d_v = ‖C - A_v B_v‖_F.

The residual is made tile by tile and only its squares are kept, so that no anchor is ever reconstructed in memory.
The expansion ‖C‖² - 2⟨C Bᵀ, A⟩ + tr((AᵀA)(BBᵀ)) takes as many operations and loses what matters most: near an anchor
that equals the segment it is the small difference of large numbers, in float32 off by up to 1e-3·‖C‖, and in float64 it
takes twice as long. From the residual the distance is within 1e-6·‖C‖ of its float64 value, however small it is.
"""

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.anchor_distance.reference import anchor_distance_reference, token_distance_reference
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.factors import check_anchors
from crossfill_kernels.segments import SegmentRows, segment_rows
from crossfill_kernels.slots import Slots

__all__ = ["anchor_distance", "anchor_distance_reference", "token_distance", "token_distance_reference"]


def anchor_distance(
    segment: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    slots: Slots | None = None,
) -> torch.Tensor:
    """Frobenius distance of a segment to each anchor; see `anchor_distance_reference` for the maths.

    Args:
        segment: values (or keys) of one layer, float32 or bfloat16 [T, D] or [T, H_kv, d], or a cache with `slots`.
        left: A_v, [N, T, r], float32 or bfloat16.
        right: B_v, [N, r, D], of the dtype of `left`.
        lengths: integers [N], the tokens of each anchor that are compared, from the first on; None: all T.
        slots: cache rows of the tokens.

    Returns:
        float32 [N].

    Raises:
        ArgumentError: a shape, dtype, device or layout does not fit; a slot lies outside its cache or a length outside
            0 … T (looked at on a CPU only).
    """
    rows = segment_rows("segment", segment, slots)
    check_anchors(left, right, segment, rows.length, rows.width)
    if lengths is not None:
        _check_lengths(lengths, left)
    squares = _token_squares(rows, left, right)
    if lengths is not None:
        compared = torch.arange(rows.length, device=segment.device) < lengths[:, None]
        squares = squares.masked_fill(~compared, 0.0)
    return squares.double().sum(dim=1).sqrt().float()


def token_distance(
    segment: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, slots: Slots | None = None
) -> torch.Tensor:
    """Euclidean distance of each token to that of each anchor, for weights of each token.

    Args:
        segment, left, right, slots: as `anchor_distance`.

    Returns:
        float32 [N, T].

    Raises:
        ArgumentError: as `anchor_distance`.
    """
    rows = segment_rows("segment", segment, slots)
    check_anchors(left, right, segment, rows.length, rows.width)
    return _token_squares(rows, left, right).sqrt_()


def _token_squares(rows: SegmentRows, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """‖C[t] - A_v[t] B_v‖², float32 [N, T]."""
    if rows.length == 0 or left.shape[0] == 0:
        return torch.zeros(left.shape[:2], device=left.device)
    chosen = dispatch.choose("anchor_distance", left, cpu="torch")
    if chosen == "reference":
        return token_distance_reference(rows.read(), left, right).square_()
    if chosen == "triton":
        from crossfill_kernels.anchor_distance.triton import token_squares_triton

        return token_squares_triton(rows, left, right)
    from crossfill_kernels.anchor_distance.cpu import token_squares_cpu

    return token_squares_cpu(rows, left, right)


def _check_lengths(lengths: torch.Tensor, left: torch.Tensor) -> None:
    anchors, longest = left.shape[:2]
    if lengths.dtype not in (torch.int32, torch.int64) or lengths.shape != (anchors,):
        raise ArgumentError("lengths", f"want integers [{anchors}], got {lengths.dtype} {list(lengths.shape)}")
    if lengths.device != left.device:
        raise ArgumentError("lengths", f"want it on {left.device}, got {lengths.device}")
    if not lengths.is_cuda and bool(((lengths < 0) | (lengths > longest)).any()):
        raise ArgumentError("lengths", f"want them within 0 … {longest}")
