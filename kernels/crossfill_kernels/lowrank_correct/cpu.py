"""The low-rank correction on a CPU: one product of torch's, between the rotation and the scatter."""

import torch

from crossfill_kernels.rope_rerotate.aligned import aligned, store
from crossfill_kernels.rope_rerotate.rotation import Rotation
from crossfill_kernels.segments import SegmentRows


def correct_cpu(
    source: SegmentRows,
    out: SegmentRows,
    left: torch.Tensor,
    right: torch.Tensor,
    weights: torch.Tensor,
    rotation: Rotation | None,
) -> None:
    """See `lowrank_correct`; arguments were checked."""
    anchors, length, rank = left.shape
    scaled = torch.empty(length, anchors, rank)
    each = weights.T[:, :, None] if weights.dim() == 2 else weights[:, None]  # [T or none, N, 1]
    torch.mul(left.transpose(0, 1), each, out=scaled)
    target = aligned(source, out, rotation)
    target.addmm_(scaled.view(length, anchors * rank), right.reshape(anchors * rank, source.width).float())
    store(target, out)
