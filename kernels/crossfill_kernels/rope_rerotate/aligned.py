"""The first and last step of a correction that is composed of torch's products: rotated rows, and where they end up."""

import torch

from crossfill_kernels.rope_rerotate import rotate_keys
from crossfill_kernels.rope_rerotate.rotation import Rotation
from crossfill_kernels.segments import SegmentRows


def aligned(source: SegmentRows, out: SegmentRows, rotation: Rotation | None) -> torch.Tensor:
    """The rotated source in float32 [T, D]: in the rows of `out` where those can hold it, else in new memory.

    float32 is also the form for bfloat16 caches: a product in it is no slower without bfloat16 instructions, and the
    result is rounded once.
    """
    place = out.matrix() if out.data.dtype == torch.float32 else None
    target = torch.empty(source.length, source.width, device=source.data.device) if place is None else place
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
