"""The maths of attention by mixed maps, in plain torch."""

import torch

from crossfill_kernels.blocks import PackedMap
from crossfill_kernels.map_attention.arguments import packed_rows
from crossfill_kernels.rows import BLOCK, Rows
from crossfill_kernels.slots import Slots, length_of


def map_attention_reference(
    packed: PackedMap, weights: torch.Tensor, value_cache: torch.Tensor, slots: Slots, rows: Rows
) -> torch.Tensor:
    """Receiver head h attends with a mixture of the sender's maps (MapFlow, head mixing and Algorithm 2).

        O[p, h] = Σ_t (Σ_k W[k, h] · A_k[p, t]) · v[t, h // G],  G = H_R / H_kv

    A_k[p, t] is row p - 64·b, column t - 64·j of the block that sender head k keeps for row block b and column block
    j, times the row's scale in uint8 storage; 0 where no block is kept.

    Args:
        packed: the sender's map of one layer.
        weights: float32 [H_S, H_R].
        value_cache: [cache rows, H_kv, d].
        slots: cache rows of positions 0 … T-1.
        rows: the positions of the query rows; their row blocks are among those of `packed`.

    Returns:
        [n, H_R, d] in the dtype of `value_cache`, computed in float64.
    """
    receivers, length, device = weights.shape[1], length_of(slots), value_cache.device
    columns = -(-length // BLOCK)
    values = value_cache[slots].double().repeat_interleave(receivers // value_cache.shape[1], dim=1)  # [T, H_R, d]
    out = torch.zeros(rows.count, receivers, value_cache.shape[2], dtype=torch.float64, device=device)
    starts = rows.starts.tolist()
    for i, row in enumerate(packed_rows(packed, rows).tolist()):
        entries = slice(int(packed.offsets[row]), int(packed.offsets[row + 1]))
        column, head = packed.columns[entries].long() // packed.heads, packed.columns[entries].long() % packed.heads
        dense = torch.zeros(packed.heads, columns, BLOCK, BLOCK, dtype=torch.float64, device=device)
        dense[head, column] = _tiles(packed, packed.slots[entries].long())
        mine = slice(starts[i], starts[i + 1])
        maps = dense.transpose(1, 2).flatten(2)[:, rows.positions[mine] % BLOCK, :length]  # [H_S, rows, T]
        mixed = torch.einsum("kh,knt->hnt", weights.double(), maps)
        out[mine] = torch.einsum("hnt,thd->nhd", mixed, values)
    return out.to(value_cache.dtype)


def _tiles(packed: PackedMap, slots: torch.Tensor) -> torch.Tensor:
    """Stored probabilities as float64 [m, 64, 64]."""
    tiles = packed.storage.blocks[slots].double()
    if packed.storage.scales is None:
        return tiles
    return tiles * packed.storage.scales[slots].double()[..., None]
