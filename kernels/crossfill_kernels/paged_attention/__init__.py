"""Causal attention of some rows of a request over its paged KV cache.

`paged_attention` serves both phases of a request: in an extend the rows are the new tokens of a prompt (or of a chunk
of it, or of what is left of one), in a decode there is one. Only those rows are computed, whatever stands before
them in the cache.

`paged_attention_reference` documents the maths; every other implementation is compared with it.
"""

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.arguments import check_attention
from crossfill_kernels.native import library
from crossfill_kernels.paged_attention.flash import paged_attention_flash
from crossfill_kernels.paged_attention.native import paged_attention_native
from crossfill_kernels.paged_attention.reference import paged_attention_reference
from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots, as_slots, length_of

__all__ = ["Slots", "as_slots", "paged_attention", "paged_attention_reference"]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of a request's rows over its cache; see `paged_attention_reference` for the maths.

    On a GPU whole batches are another backend's work; rows that it cannot be asked for go through the kernel that also
    gives block masses, which nobody wants here.

    Args:
        query: float32 or bfloat16 [n, H, d]; n may be 0.
        key_cache, value_cache: [rows, H_kv, d] of the same dtype as `query`; H is a multiple of H_kv.
        slots: cache rows of positions 0 … T-1 (see `as_slots`); the rows' own keys and values are already there.
        rows: positions of the query rows (see `rows_at`), all below T.
        scale: factor on the scores, usually 1/√d.
        out: [n, H, d], written.

    Raises:
        ArgumentError: a shape, dtype, layout or position does not fit.
    """
    check_attention(query, key_cache, value_cache, slots, rows, scale, out)
    # The narrow variant takes 2 to 3 times as long as torch's kernel, which uses whatever the processor has.
    narrow = library.status().variant in {None, "generic"}
    newest = rows.count == 0 or rows.count == length_of(slots) - int(rows.positions[0])
    preferred: dispatch.Implementation = "torch" if narrow and newest else "native"
    others: tuple[dispatch.Implementation, ...] = ("native", "torch") if newest else ("native",)
    chosen = dispatch.choose("paged_attention", query, cpu=preferred, others=others)
    if rows.count == 0:
        return
    if chosen == "native":
        paged_attention_native(query, key_cache, value_cache, slots, rows, scale=scale, out=out)
    elif chosen == "triton":
        from crossfill_kernels.block_mass.triton import block_mass_triton

        block_mass_triton(query, key_cache, value_cache, slots, rows, scale=scale, out=out)
    elif chosen == "torch":
        paged_attention_flash(query, key_cache, value_cache, slots, scale=scale, out=out)
    else:
        out.copy_(paged_attention_reference(query, key_cache, value_cache, slots, rows, scale=scale))
