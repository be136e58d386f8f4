"""The ridge correction as torch's products, between the rotation and the scatter."""

import torch

from crossfill_kernels.ridge_correct.ridge_map import RidgeMap
from crossfill_kernels.rope_rerotate.aligned import aligned, store
from crossfill_kernels.rope_rerotate.rotation import Rotation
from crossfill_kernels.segments import SegmentRows


def ridge_products(source: SegmentRows, out: SegmentRows, state: RidgeMap, rotation: Rotation | None) -> None:
    """See `ridge_correct`; arguments were checked."""
    folded = state.folded
    target = aligned(source, out, rotation)
    hidden = torch.addmm(folded.shift, target, folded.down)  # [T, k]
    if folded.up is None:
        target.add_(hidden)
    else:
        target.add_(state.bias).addmm_(hidden, folded.up)
    store(target, out)
