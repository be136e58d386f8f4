"""Correction of a segment's cache by a ridge map of the cache itself.

Our mode beyond KVCMAS: what a prefix changes in a segment is mostly a linear function of the segment's own cache, so
one map an edge between two agents (and layer, keys and values apart), learned from a few dense prefills (`ridge_fit`),
serves segments that resemble no anchor. Ĉ_target = x + f(x), x = Align(C_source), f(x) = (x - mean) P M Q + bias.

On a GPU gather, rotation, both products and scatter are one kernel up to an inner rank of 64; beyond, and on a CPU,
the products are torch's (cuBLAS, MKL).
"""

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.ridge_correct.reference import ridge_correct_reference
from crossfill_kernels.ridge_correct.ridge_map import RidgeMap
from crossfill_kernels.rope_rerotate.rotation import Rotation
from crossfill_kernels.segments import segment_pair
from crossfill_kernels.slots import Slots

__all__ = ["RidgeMap", "ridge_correct", "ridge_correct_reference"]


def ridge_correct(
    source: torch.Tensor,
    state: RidgeMap,
    *,
    out: torch.Tensor,
    rotation: Rotation | None = None,
    source_slots: Slots | None = None,
    out_slots: Slots | None = None,
) -> None:
    """Write x + f(x), x the aligned source; see `ridge_correct_reference` for the maths.

    Args:
        source: the segment's keys or values of one layer, float32 or bfloat16 [T, D] or [T, H_kv, d] (D = H_kv·d), or a
            cache [rows, H_kv, d] with `source_slots`.
        state: f.
        out: as `source`, with `out_slots`; of the dtype of `source`, or float32. May be `source` itself with the same
            slots; otherwise no row may be both read and written.
        rotation: how far the keys turn before they are corrected (`rotation_by`); None for values.
        source_slots, out_slots: cache rows of the tokens; those written are distinct.

    Raises:
        ArgumentError: a shape, dtype, device or layout does not fit, or a slot lies outside its cache.
    """
    read, write = segment_pair(source, out, source_slots, out_slots)
    if state.mean.numel() != read.width:
        raise ArgumentError("state", f"maps rows of {state.mean.numel()} numbers, the source has {read.width}")
    if state.mean.device != source.device:
        raise ArgumentError("state", f"want it on {source.device}, got {state.mean.device}")
    if rotation is not None:
        rotation.check(read)
    if read.length == 0:
        return
    chosen = dispatch.choose("ridge_correct", source, cpu="torch", cuda="triton" if state.fits_kernel else "torch")
    if chosen == "reference":
        wide = read.read().to(write.data.dtype)
        write.write(ridge_correct_reference(wide, state, rotation=rotation))
    elif chosen == "triton" and state.fits_kernel:
        from crossfill_kernels.ridge_correct.triton import ridge_triton

        ridge_triton(read, write, state, rotation)
    else:
        from crossfill_kernels.ridge_correct.products import ridge_products

        ridge_products(read, write, state, rotation)
