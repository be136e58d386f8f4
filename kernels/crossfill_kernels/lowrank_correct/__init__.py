"""Correction of a segment's cache by a weighted sum of low-rank anchors (KVCMAS, § Correct).

A segment cached behind one prefix differs from the same segment behind another. What the anchors, earlier segments that
were prefilled behind both, show of the difference is added, by weights that say how near each is:
Ĉ_target = Align(C_source) + Σ_v w_v A_v B_v. All anchors together are one product
[w_1 A_1 | … | w_N A_N] · [B_1; …; B_N] of inner dimension N·r.

One call reads the source from any cache rows, rotates it (keys), corrects it and writes it to any cache rows. On a GPU
that is one kernel; on a CPU the product is torch's (MKL is the fast way) between a gathering rotation in C++ and a
scatter, which is left out where the rows written are consecutive.
"""

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.factors import check_anchors
from crossfill_kernels.lowrank_correct.reference import lowrank_correct_reference
from crossfill_kernels.rope_rerotate.rotation import Rotation
from crossfill_kernels.segments import segment_pair
from crossfill_kernels.slots import Slots

__all__ = ["lowrank_correct", "lowrank_correct_reference"]


def lowrank_correct(
    source: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor,
    rotation: Rotation | None = None,
    source_slots: Slots | None = None,
    out_slots: Slots | None = None,
) -> None:
    """Write Align(source) + Σ_v w_v A_v B_v; see `lowrank_correct_reference` for the maths.

    Args:
        source: the segment's keys or values of one layer, float32 or bfloat16 [T, D] or [T, H_kv, d] (D = H_kv·d), or a
            cache [rows, H_kv, d] with `source_slots`.
        left: A_v, [N, T, r], float32 or bfloat16; N may be 0.
        right: B_v, [N, r, D], of the dtype of `left`.
        weights: float32 [N], or [N, T] for weights of each token; finite and not negative.
        out: as `source`, with `out_slots`; of the dtype of `source`, or float32. May be `source` itself with the same
            slots; otherwise no row may be both read and written.
        rotation: how far the keys turn before they are corrected (`rotation_by`); None for values.
        source_slots, out_slots: cache rows of the tokens; those written are distinct.

    Raises:
        ArgumentError: a shape, dtype, device or layout does not fit, a slot lies outside its cache, or a weight is
            negative or not finite (looked at on a CPU only).
    """
    read, write = segment_pair(source, out, source_slots, out_slots)
    check_anchors(left, right, source, read.length, read.width)
    _check_weights(weights, left)
    if rotation is not None:
        rotation.check(read)
    if read.length == 0:
        return
    chosen = dispatch.choose("lowrank_correct", source, cpu="torch")
    if chosen == "reference":
        wide = read.read().to(write.data.dtype)
        write.write(lowrank_correct_reference(wide, left, right, weights, rotation=rotation))
    elif chosen == "triton":
        from crossfill_kernels.lowrank_correct.triton import correct_triton

        correct_triton(read, write, left, right, weights, rotation)
    else:
        from crossfill_kernels.lowrank_correct.cpu import correct_cpu

        correct_cpu(read, write, left, right, weights, rotation)


def _check_weights(weights: torch.Tensor, left: torch.Tensor) -> None:
    anchors, length = left.shape[:2]
    if weights.dtype != torch.float32 or tuple(weights.shape) not in ((anchors,), (anchors, length)):
        want = f"float32 [{anchors}] or [{anchors}, {length}]"
        raise ArgumentError("weights", f"want {want}, got {weights.dtype} {list(weights.shape)}")
    if weights.device != left.device:
        raise ArgumentError("weights", f"want it on {left.device}, got {weights.device}")
    if not weights.is_cuda and not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ArgumentError("weights", "want finite weights that are not negative")
