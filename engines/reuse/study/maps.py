"""A sender's maps of one text, and those of them that a receiver computes layers by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from crossfill_kernels.block_mass import block_mass
from crossfill_kernels.blocks import BlockMass, MapStorage
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.rows import BLOCK, rows_at
from crossfill_kernels.select_blocks import select_blocks
from engines.reuse.map_records import union
from engines.reuse.study.network import dense

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from crossfill_kernels.blocks import PackedMap
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
