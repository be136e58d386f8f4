"""Attention together with its block masses, which a sender publishes (MapFlow, Algorithm 1, first half).

One pass gives both: the sums of every row over each block of keys are kept as they were when the block was visited, and
scaled once the row's log-sum-exp is known. `block_mass_sampled` estimates the masses from a sample of the rows, without
outputs.
"""

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.arguments import check_attention, check_cache, check_query, check_scale, check_slots
from crossfill_kernels.block_mass.native import block_mass_native, block_mass_sampled_native
from crossfill_kernels.block_mass.reference import block_mass_reference, block_mass_sampled_reference
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.rows import BLOCK, Rows
from crossfill_kernels.slots import Slots

__all__ = ["block_mass", "block_mass_reference", "block_mass_sampled", "block_mass_sampled_reference"]


def block_mass(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> BlockMass:
    """Causal attention, and the mass of every (head, row block, column block); `block_mass_reference` has the maths.

    Args:
        query: float32 or bfloat16 [n, H, d]; n may be 0.
        key_cache, value_cache: [rows, H_kv, d] of the same dtype as `query`; H is a multiple of H_kv.
        slots: cache rows of positions 0 … T-1 (see `as_slots`); the rows' own keys and values are already there.
        rows: positions of the query rows (see `rows_at`), all below T.
        scale: factor on the scores, usually 1/√d.
        out: [n, H, d], written.
        lse: float32 [n, H], written if given: the log-sum-exp of each row's scores.

    Returns:
        Masses [H, R, C] of the R row blocks of `rows` over C = ⌊last position / 64⌋ + 1 column blocks.

    Raises:
        ArgumentError: a shape, dtype, layout or position does not fit.
    """
    check_attention(query, key_cache, value_cache, slots, rows, scale, out)
    _check_lse(lse, query)
    chosen = dispatch.choose("block_mass", query)
    if chosen == "native":
        return block_mass_native(query, key_cache, value_cache, slots, rows, scale=scale, out=out, lse=lse)
    if chosen == "triton":
        from crossfill_kernels.block_mass.triton import block_mass_triton

        return block_mass_triton(query, key_cache, value_cache, slots, rows, scale=scale, out=out, lse=lse)
    attended, mass, sums = block_mass_reference(query, key_cache, value_cache, slots, rows, scale=scale)
    out.copy_(attended)
    if lse is not None:
        lse.copy_(sums)
    return mass


def block_mass_sampled(
    query: torch.Tensor, key_cache: torch.Tensor, slots: Slots, rows: Rows, *, scale: float, stride: int = 8
) -> BlockMass:
    """Block masses of every `stride`-th row of each row block, counted backwards from its last row.

    Args:
        query, key_cache, slots, rows, scale: as in `block_mass`.
        stride: 1 … 64; 8 keeps nearly all of what exact selection keeps, at about a twelfth of the cost.

    Returns:
        Masses as of `block_mass`; `totals` are the numbers of sampled rows.

    Raises:
        ArgumentError: a shape, dtype, layout, position or the stride does not fit.
    """
    check_query(query, rows)
    check_cache("key_cache", key_cache, query)
    check_slots(slots, key_cache.shape[0], rows)
    check_scale(scale)
    if not 1 <= stride <= BLOCK:
        raise ArgumentError("stride", f"want 1 … {BLOCK}, got {stride}")
    chosen = dispatch.choose("block_mass_sampled", query)
    if chosen == "native":
        return block_mass_sampled_native(query, key_cache, slots, rows, scale=scale, stride=stride)
    if chosen == "triton":
        from crossfill_kernels.block_mass.triton import block_mass_sampled_triton

        return block_mass_sampled_triton(query, key_cache, slots, rows, scale=scale, stride=stride)
    return block_mass_sampled_reference(query, key_cache, slots, rows, scale=scale, stride=stride)


def _check_lse(lse: torch.Tensor | None, query: torch.Tensor) -> None:
    if lse is None:
        return
    if lse.dtype != torch.float32 or lse.shape != query.shape[:2] or not lse.is_contiguous():
        raise ArgumentError(
            "lse", f"want contiguous float32 {list(query.shape[:2])}, got {lse.dtype} {list(lse.shape)}"
        )
    if lse.device != query.device:
        raise ArgumentError("lse", f"on {lse.device}, query on {query.device}")
