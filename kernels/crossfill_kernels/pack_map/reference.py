"""The maths of packing a map, in plain torch."""

import torch

from crossfill_kernels.blocks import BlockIndex, MapStorage, PackedMap
from crossfill_kernels.pack_map.layout import lay_out
from crossfill_kernels.rows import BLOCK, Rows
from crossfill_kernels.slots import Slots, length_of

LEAST_SCALE = torch.finfo(torch.float32).tiny
"""A row of a uint8 block whose scale would be smaller is all zero: its scale could not be inverted."""


def pack_map_reference(  # noqa: PLR0913  # the arguments of the op
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
    """Write the probabilities of every kept block into its slot; see `probabilities` for what they are.

    The row at position p of row block b is row p - 64·b of its blocks. Rows of a block that are not in `rows`, and
    keys that causality hides, are zero. uint8 blocks hold round(P / s) with a scale s = max P / 255 of their own for
    each row (MapFlow stores float16; a scale a row keeps the error of an output below .5 %).

    Args and result: as `pack_map`; computed in float64.
    """
    entries = slot_ids.numel()
    layout = lay_out(index, entries)
    packed = PackedMap(index.heads, index.blocks, layout.offsets, layout.columns, slot_ids, storage)
    if entries == 0:
        return packed
    dense = probabilities(query, key_cache, slots, rows, index, scale=scale, lse=lse, renormalise=renormalise)
    row_blocks, columns = rows.block_count, -(-dense.shape[2] // BLOCK)
    row_block = torch.repeat_interleave(torch.arange(row_blocks, device=query.device), rows.starts.diff().long())
    place = row_block * BLOCK + rows.positions % BLOCK
    tiles = dense.new_zeros(index.heads, row_blocks * BLOCK, columns * BLOCK)
    tiles[:, place, : dense.shape[2]] = dense
    tiles = tiles.view(index.heads, row_blocks, BLOCK, columns, BLOCK).transpose(2, 3)
    row = torch.repeat_interleave(torch.arange(row_blocks, device=query.device), layout.offsets.diff().long())
    column, head = layout.columns.long() // index.heads, layout.columns.long() % index.heads
    _write(tiles[head, row, column], storage, slot_ids.long())
    return packed


def probabilities(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    index: BlockIndex,
    *,
    scale: float,
    lse: torch.Tensor | None,
    renormalise: bool,
) -> torch.Tensor:
    """The kept probabilities as a dense map.

    For a row at position p with the kept keys K = {t ≤ p, block of t kept}:

        P[h, p, t] = exp(s_t - l),  s_t = scale · q[p, h] · k[t, h // G],  G = H / H_kv

    for t in K, else 0; l is the given row log-sum-exp over all keys, or, renormalised, that over K (MapFlow's release
    keeps the full denominator, so that its rows sum to about top-p; renormalised rows erred less in our measurements).

    Returns:
        float64 [H, n, T].
    """
    heads, length = query.shape[1], length_of(slots)
    keys = key_cache[slots].double().repeat_interleave(heads // key_cache.shape[1], dim=1)  # [T, H, d]
    scores = torch.einsum("nhd,thd->hnt", query.double(), keys) * scale
    kept = index.mask(-(-length // BLOCK))
    kept = kept.repeat_interleave(rows.starts.diff().long(), dim=1).repeat_interleave(BLOCK, dim=2)[..., :length]
    seen = kept & (torch.arange(length, device=query.device) <= rows.positions[:, None])
    scores = scores.masked_fill(~seen, float("-inf"))
    if renormalise:
        return torch.where(seen.any(dim=-1, keepdim=True), scores.softmax(dim=-1), 0.0)
    assert lse is not None
    return torch.exp(scores - lse.double().t()[:, :, None])


def _write(tiles: torch.Tensor, storage: MapStorage, slots: torch.Tensor) -> None:
    """Store float64 tiles [m, 64, 64] in the storage's own form."""
    if storage.scales is None:
        storage.blocks[slots] = tiles.to(storage.blocks.dtype)
        return
    scales = (tiles.amax(dim=-1) / 255).float()
    scales = torch.where(scales < LEAST_SCALE, 0.0, scales)
    codes = torch.where(scales[..., None] > 0, (tiles / scales.double()[..., None]).round().clamp(0, 255), 0.0)
    storage.scales[slots] = scales
    storage.blocks[slots] = codes.to(torch.uint8)
