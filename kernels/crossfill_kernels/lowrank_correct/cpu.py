"""The low-rank correction on a CPU: one product of torch's, between the rotation and the scatter."""

import torch

from crossfill_kernels.rope_rerotate import rotate_keys
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


def aligned(source: SegmentRows, out: SegmentRows, rotation: Rotation | None) -> torch.Tensor:
    """The rotated source in float32 [T, D]: in the rows of `out` where those can hold it, else in new memory.

    float32 is also the form for bfloat16 caches: products are nowhere slower in it without bfloat16 instructions, and
    the result is then rounded once.
    """
    place = out.matrix() if out.data.dtype == torch.float32 else None
    target = torch.empty(source.length, source.width) if place is None else place
    rows = target.view(source.length, source.heads, source.dim)
    if rotation is None:
        rows.copy_(source.read())
    else:
        rotate_keys(source.data, rotation, out=rows, source_slots=source.slots)
    return target


def store(target: torch.Tensor, out: SegmentRows) -> None:
    """Bring the rows that `aligned` made to where they belong, if they are not there yet."""
    place = out.matrix()
    if place is None or place.data_ptr() != target.data_ptr():
        out.write(target)
