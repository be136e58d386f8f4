"""Writes a sender's kept attention probabilities into slots of a block pool (MapFlow, Algorithm 1, second pass).

`pack_map_reference` documents the maths; every other implementation is compared with it.
"""

from typing import TYPE_CHECKING

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import BlockIndex, MapStorage, PackedMap
from crossfill_kernels.pack_map.arguments import check
from crossfill_kernels.pack_map.native import pack_map_native
from crossfill_kernels.pack_map.reference import pack_map_reference
from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["pack_map", "pack_map_reference"]


def pack_map(  # noqa: PLR0913  # the request, the choice of blocks, and where the result goes
    query: torch.Tensor,
    key_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    index: BlockIndex,
    *,
    scale: float,
    storage: MapStorage,
    slot_ids: torch.Tensor,
    lse: torch.Tensor | None = None,
    renormalise: bool = True,
) -> PackedMap:
    """Write the probabilities of every kept block; see `pack_map_reference`.

    Args:
        query: [n, H, d], float32 or bfloat16, the rows at `rows.positions`.
        key_cache: [cache rows, H_kv, d] of the same dtype; H is a multiple of H_kv.
        slots: cache rows of positions 0 … T-1, T > rows.last.
        rows: the positions of the query rows.
        index: the kept blocks, on the row blocks of `rows`, for H heads.
        scale: factor on the scores, usually 1/√d.
        storage: where the blocks go; only the slots of `slot_ids` are written, each of them wholly.
        slot_ids: int32 [m], distinct, one for each kept block of all heads, in the order of the result's entries.
        lse: float32 [n, H], the rows' log-sum-exp over all their keys (natural log); needed unless `renormalise`.
        renormalise: scale a row's kept probabilities to sum to 1; otherwise they sum to what the kept blocks retain.

    Returns:
        The packed map; entries by row block, then by column block, then by head.

    Raises:
        ArgumentError: a shape, dtype, device or layout does not fit; `slot_ids` has the wrong length, repeats a slot
            or leaves the storage; `lse` is missing; the slots leave the cache; the index is not one of these rows.
    """
    check(
        query,
        key_cache,
        slots,
        rows,
        index,
        scale=scale,
        storage=storage,
        slot_ids=slot_ids,
        lse=lse,
        renormalise=renormalise,
    )
    chosen = dispatch.choose("pack_map", query)
    implementation: Callable[..., PackedMap] = pack_map_native if chosen == "native" else pack_map_reference
    if chosen == "triton":
        from crossfill_kernels.pack_map.triton import pack_map_triton

        implementation = pack_map_triton
    options = {"scale": scale, "storage": storage, "slot_ids": slot_ids, "lse": lse, "renormalise": renormalise}
    return implementation(query, key_cache, slots, rows, index, **options)
