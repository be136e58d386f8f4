"""A sender's maps of one text, and a receiver whose attention in some layers is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from crossfill_kernels.block_mass import block_mass
from crossfill_kernels.blocks import BlockMass, MapStorage
from crossfill_kernels.map_attention import map_attention
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.paged_attention import paged_attention
from crossfill_kernels.rows import BLOCK, rows_at
from crossfill_kernels.select_blocks import select_blocks
from engines.reuse.study.network import dense
from engines.reuse.study.pair import Sparse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from crossfill_kernels.blocks import BlockIndex, PackedMap
    from engines.reuse.study.pair import Pair


def leave_maps(
    pair: Pair, tokens: Sequence[int], *, top_p: float, dtype: torch.dtype = torch.uint8, renormalise: bool = True
) -> dict[int, PackedMap]:
    """What a sender's worker would pack of a text's whole row blocks, by sender layer (MapFlow, Algorithm 1).

    Args:
        top_p: share of attention mass that the blocks of each head reach.
        dtype: of the slots.
        renormalise: make what is kept of a row sum to 1.
    """
    wanted = frozenset(pair.settings.guided.values())
    found: dict[int, PackedMap] = {}

    def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        if layer not in wanted:
            return dense(layer, query, keys, values, scale)
        count, out = query.shape[0], torch.empty_like(query)
        mass = block_mass(query, keys, values, slice(0, count), rows_at(range(count)), scale=scale, out=out)
        whole = count // BLOCK
        index = select_blocks(
            BlockMass(mass.mass[:, :whole].contiguous(), mass.blocks[:whole], mass.totals[:whole]), top_p=top_p
        )
        entries = int(index.offsets[-1])
        scales = torch.empty(entries, BLOCK) if dtype is torch.uint8 else None
        found[layer] = pack_map(
            query[: whole * BLOCK],
            keys,
            slice(0, count),
            rows_at(range(whole * BLOCK)),
            index,
            scale=scale,
            storage=MapStorage(torch.empty(entries, BLOCK, BLOCK, dtype=dtype), scales),
            slot_ids=torch.arange(entries, dtype=torch.int32),
            renormalise=renormalise,
        )
        return out

    pair.sender.hidden(tokens, attend)
    return found


def usable_maps(pair: Pair, tokens: Sequence[int]) -> dict[int, PackedMap]:
    """Of each receiver layer that a worker would compute by its map, the sender's; none for a pair that only guides."""
    if not pair.settings.uses_maps:
        return {}
    return sparse_enough(pair, leave_maps(pair, tokens, top_p=pair.settings.map_top_p))


def sparse_enough(pair: Pair, left: Mapping[int, PackedMap]) -> dict[int, PackedMap]:
    """Of each receiver layer that is computed by its map, the sender's, out of all that were left."""
    most = pair.settings.most_map_density
    return {layer: left[of] for layer, of in pair.settings.guided.items() if union(left[of]) <= most}


def union(packed: PackedMap) -> float:
    """Positions that some head keeps, as a share of the causal ones."""
    row = torch.repeat_interleave(torch.arange(packed.blocks.numel()), packed.offsets.diff().long())
    kept = torch.unique_consecutive((row << 32) | (packed.columns.long() // packed.heads)).numel()
    return float(kept) / int((packed.blocks.long() + 1).sum())


class Mapped:
    """Attention of some layers by maps, of others over kept blocks; rows after their row blocks are dense.

    Args:
        maps: of each mapped receiver layer, the sender's map.
        weights: of these, [H_S, H_R].
        pages: row blocks from the first on that are mapped.
        indices: of layers that are guided.
    """

    def __init__(
        self,
        maps: Mapping[int, PackedMap],
        weights: Mapping[int, torch.Tensor],
        pages: int,
        indices: Mapping[int, BlockIndex],
    ) -> None:
        self._maps = maps
        self._weights = weights
        self._rows = pages * BLOCK
        self._others = Sparse(indices)

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `Attend`."""
        packed = self._maps.get(layer)
        if packed is None:
            return self._others(layer, query, keys, values, scale)
        count, out, slots = query.shape[0], torch.empty_like(query), slice(0, query.shape[0])
        mapped, tail = rows_at(range(self._rows)), rows_at(range(self._rows, count))
        map_attention(packed, self._weights[layer], values, slots, mapped, out=out[: self._rows])
        if tail.count:
            paged_attention(query[self._rows :], keys, values, slots, tail, scale=scale, out=out[self._rows :])
        return out
