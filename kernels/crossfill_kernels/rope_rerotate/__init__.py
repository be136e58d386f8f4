"""Re-rotation of cached keys to the positions that they move to: the Align step of KVCMAS (§ Correction).

A key cached at position p carries the rotary embedding of p. When its segment is reused Δ positions further on, the
key needs the rotation of Δ on top, whatever p was; values are not rotated. Cached keys may carry a model's attention
scaling (YaRN): a rotation keeps it.

A rotation by one Δ for all tokens also acts on the right factors of a low-rank correction (their rows are keys, heads
concatenated), so an anchor that was learned at one offset serves at another.
"""

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.rope_rerotate.reference import rope_rerotate_reference, rotate_reference
from crossfill_kernels.rope_rerotate.rotation import Layout, Rotation, rotation_by
from crossfill_kernels.segments import SegmentRows, segment_pair
from crossfill_kernels.slots import Slots

__all__ = ["Layout", "Rotation", "rope_rerotate", "rope_rerotate_reference", "rotate_keys", "rotation_by"]


def rope_rerotate(
    keys: torch.Tensor,
    delta: int | torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    layout: Layout = "neox",
    out: torch.Tensor,
    source_slots: Slots | None = None,
    out_slots: Slots | None = None,
) -> None:
    """Rotate cached keys by the positions that they move; see `rope_rerotate_reference` for the maths.

    `rotate_keys` is the form for several layers: it takes the sines and cosines ready made.

    Args:
        keys: float32 or bfloat16 [T, H_kv, d], or a cache [rows, H_kv, d] with `source_slots`.
        delta: how many positions they move, one for all or int64 [T]; may be negative.
        inv_freq: float32 [d_rot/2], the model's inverse frequencies, scaling (llama3, YaRN, …) included; dimensions
            from d_rot on are copied.
        layout: `neox` pairs dimension i with i + d_rot/2, `gptj` 2i with 2i + 1.
        out: [T, H_kv, d], or a cache with `out_slots`; of the dtype of `keys`, or float32. May be `keys` itself with
            the same slots; otherwise no row may be both read and written.
        source_slots, out_slots: cache rows of the tokens; those written are distinct.

    Raises:
        ArgumentError: a shape, dtype, device or layout does not fit, or a slot lies outside its cache.
    """
    source, target = _pair(keys, out, source_slots, out_slots)
    rotation = rotation_by(delta, inv_freq, layout=layout)
    if 2 * rotation.half > source.dim:
        raise ArgumentError("inv_freq", f"{rotation.half} frequencies turn more than the {source.dim} dimensions")
    if rotation.cos.shape[0] not in (1, source.length):
        raise ArgumentError("delta", f"{rotation.cos.shape[0]} distances for {source.length} keys")
    if rotation.cos.device != keys.device:
        raise ArgumentError("inv_freq", f"want it on {keys.device}, got {inv_freq.device}")
    _rotate(source, target, rotation)


def rotate_keys(
    keys: torch.Tensor,
    rotation: Rotation,
    *,
    out: torch.Tensor,
    source_slots: Slots | None = None,
    out_slots: Slots | None = None,
) -> None:
    """`rope_rerotate` with a rotation that was made once for all layers."""
    source, target = _pair(keys, out, source_slots, out_slots)
    rotation.check(source)
    _rotate(source, target, rotation)


def _pair(
    keys: torch.Tensor, out: torch.Tensor, source_slots: Slots | None, out_slots: Slots | None
) -> tuple[SegmentRows, SegmentRows]:
    if keys.dim() != 3:
        raise ArgumentError("keys", f"want [rows, H_kv, d], got {list(keys.shape)}")
    return segment_pair(keys, out, source_slots, out_slots, source_name="keys")


def _rotate(source: SegmentRows, target: SegmentRows, rotation: Rotation) -> None:
    if source.length == 0:
        return
    chosen = dispatch.choose("rope_rerotate", source.data)
    if chosen == "native":
        from crossfill_kernels.rope_rerotate.native import rotate_native

        rotate_native(source, target, rotation)
    elif chosen == "triton":
        from crossfill_kernels.rope_rerotate.triton import rotate_triton

        rotate_triton(source, target, rotation)
    else:
        target.write(rotate_reference(source.read().to(target.data.dtype), rotation))
