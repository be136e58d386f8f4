"""Exact causal attention over kept blocks only: guided prefill, in which a receiver reads another model's block masses.

Beyond MapFlow: the receiver takes from the sender's map where to look, and computes what it sees there from its own
queries, keys and values.
"""

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.arguments import check_attention, check_index
from crossfill_kernels.blocks import BlockIndex
from crossfill_kernels.guided_attention.native import guided_attention_native
from crossfill_kernels.guided_attention.reference import guided_attention_reference
from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots

__all__ = ["guided_attention", "guided_attention_reference"]


def guided_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    index: BlockIndex,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Block-sparse causal attention; see `guided_attention_reference` for the maths.

    Args:
        query: float32 or bfloat16 [n, H, d]; n may be 0.
        key_cache, value_cache: [rows, H_kv, d] of the same dtype as `query`; H is a multiple of H_kv.
        slots: cache rows of positions 0 … T-1 (see `as_slots`); the rows' own keys and values are already there.
        rows: positions of the query rows (see `rows_at`), all below T.
        index: the kept column blocks of H heads, for exactly the row blocks of `rows`.
        scale: factor on the scores, usually 1/√d.
        out: [n, H, d], written; zeros for a row that sees no kept key.

    Raises:
        ArgumentError: a shape, dtype, layout, position or list does not fit. On a GPU the lists themselves are not read
            (`BlockIndex.check_content` does that).
    """
    check_attention(query, key_cache, value_cache, slots, rows, scale, out)
    check_index(index, rows, query)
    chosen = dispatch.choose("guided_attention", query)
    if rows.count == 0:
        return
    if chosen == "native":
        guided_attention_native(query, key_cache, value_cache, slots, rows, index, scale=scale, out=out)
    elif chosen == "triton":
        from crossfill_kernels.guided_attention.triton import guided_attention_triton

        guided_attention_triton(query, key_cache, value_cache, slots, rows, index, scale=scale, out=out)
    else:
        out.copy_(guided_attention_reference(query, key_cache, value_cache, slots, rows, index, scale=scale))
