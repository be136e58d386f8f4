"""The ridge correction as torch's products, between the rotation and the scatter."""

from crossfill_kernels.ridge_correct.ridge_map import RidgeMap
from crossfill_kernels.rope_rerotate.aligned import aligned, store
from crossfill_kernels.rope_rerotate.rotation import Rotation
from crossfill_kernels.segments import SegmentRows


def ridge_products(source: SegmentRows, out: SegmentRows, state: RidgeMap, rotation: Rotation | None) -> None:
    """See `ridge_correct`; arguments were checked."""
    folded = state.folded
    target = aligned(source, out, rotation)
    # The mean goes first: folded into the product it would cancel there, where it is much greater than what varies.
    hidden = (target - state.mean) @ folded.down  # [T, k]
    target.add_(state.bias)
    if folded.up is None:
        target.add_(hidden)
    else:
        target.addmm_(hidden, folded.up)
    store(target, out)
