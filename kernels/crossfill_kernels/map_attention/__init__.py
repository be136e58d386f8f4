"""Attention by a sender's packed maps, mixed by head weights and applied to own values (MapFlow, Algorithm 2).

`map_attention_reference` documents the maths; every other implementation is compared with it.
"""

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import PackedMap
from crossfill_kernels.map_attention.arguments import FORMS, Form, check
from crossfill_kernels.map_attention.native import map_attention_native
from crossfill_kernels.map_attention.reference import map_attention_reference
from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots

__all__ = ["FORMS", "Form", "map_attention", "map_attention_reference"]


def map_attention(
    packed: PackedMap,
    weights: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    *,
    out: torch.Tensor,
    form: Form = "auto",
) -> None:
    """Mix the sender's maps and apply them to the receiver's values; see `map_attention_reference`.

    Args:
        packed: the sender's map of one layer; `rows.blocks` are among its row blocks.
        weights: float32 [H_S, H_R], finite and not negative; W[k, h] weighs sender head k in receiver head h.
        value_cache: [cache rows, H_kv, d], float32 or bfloat16; H_R is a multiple of H_kv.
        slots: cache rows of positions 0 … T-1, T > rows.last.
        rows: the positions of the query rows.
        out: [n, H_R, d] of the dtype of `value_cache`, written.
        form: order of the work. All forms give the same result within rounding: `paper` walks the entries for each
            receiver head (Algorithm 2), `mix` mixes all receiver heads of a block at once, `values_first` multiplies
            values by the sender's maps and mixes the products, `sparse` touches nonzero weights only, and `auto`
            takes the one that costs least by count.

    Raises:
        ArgumentError: a shape, dtype, device or layout does not fit; a weight is negative or not finite; a row block
            is not in the map; the map's lists do not rise or leave its storage; the slots leave the cache.
    """
    check(packed, weights, value_cache, slots, rows, out=out, form=form)
    if rows.count == 0:
        return
    chosen = dispatch.choose("map_attention", value_cache)
    if chosen == "triton":
        from crossfill_kernels.map_attention.triton import map_attention_triton

        map_attention_triton(packed, weights, value_cache, slots, rows, out=out, form=form)
    elif chosen == "native":
        map_attention_native(packed, weights, value_cache, slots, rows, out=out, form=form)
    else:
        out.copy_(map_attention_reference(packed, weights, value_cache, slots, rows))
