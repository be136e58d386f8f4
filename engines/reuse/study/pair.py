"""A sender and a receiver in one process: what the one leaves, and what guides the other by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cache_store.keys import DIGEST_BYTES
from cache_store.records import HEADER_BYTES
from crossfill_kernels.block_mass import block_mass
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.guided_attention import guided_attention
from crossfill_kernels.map_attention import map_attention
from crossfill_kernels.paged_attention import paged_attention
from crossfill_kernels.rows import BLOCK, rows_at
from engines.reuse.guided import GuidedLayer, guide
from engines.reuse.mass_records import pack_masses
from engines.reuse.plan import runs_of
from engines.reuse.study.network import dense

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cache_store.records import Record
    from crossfill_kernels.blocks import BlockIndex, PackedMap
    from engines.reuse.settings import PairSettings
    from engines.reuse.study.network import Network


@dataclass(frozen=True)
class Left:
    """What a sender left of a text: records by sender layer, then by row block."""

    layers: Mapping[int, Mapping[int, Record]]

    @property
    def size_bytes(self) -> int:
        """Of all records, their headers included."""
        return sum(len(one.payload) + HEADER_BYTES for layer in self.layers.values() for one in layer.values())

    @property
    def tokens(self) -> int:
        """Of the whole row blocks."""
        return BLOCK * max((len(layer) for layer in self.layers.values()), default=0)

    @property
    def bytes_a_token_a_layer(self) -> float:
        """Stored bytes, headers included."""
        return self.size_bytes / (self.tokens * len(self.layers))


@dataclass(frozen=True)
class Pair:
    """Both models, how the receiver uses the sender's masses, and [H_S, H_R] weights of each guided layer."""

    sender: Network
    receiver: Network
    settings: PairSettings
    weights: Mapping[int, torch.Tensor]

    def leave(self, tokens: Sequence[int]) -> Left:
        """Have the sender compute a text; returns what it would publish."""
        wanted = frozenset(self.settings.guided.values())
        left: dict[int, dict[int, Record]] = {}

        def attend(
            layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
        ) -> torch.Tensor:
            if layer not in wanted:
                return dense(layer, query, keys, values, scale)
            count, out = query.shape[0], torch.empty_like(query)
            mass = block_mass(query, keys, values, slice(0, count), rows_at(range(count)), scale=scale, out=out)
            whole = count // BLOCK
            kept = BlockMass(mass.mass[:, :whole].contiguous(), mass.blocks[:whole], mass.totals[:whole])
            left[layer] = dict(enumerate(pack_masses(kept, layer, [bytes(DIGEST_BYTES)] * whole)))
            return out

        self.sender.hidden(tokens, attend)
        return Left(left)

    def guides(self, left: Left, pages: int) -> dict[int, GuidedLayer]:
        """What each guided receiver layer looks at in the first `pages` row blocks."""
        guided: dict[int, GuidedLayer] = {}
        for sender in dict.fromkeys(self.settings.guided.values()):
            wanted = {layer: self.weights[layer] for layer in self.settings.guided_by(sender)}
            guided |= guide([{page: left.layers[sender][page] for page in range(pages)}], self.settings, wanted)
        return guided


class Sparse:
    """Attention of some layers over the kept blocks of `indices`; rows after their row blocks are computed densely."""

    def __init__(self, indices: Mapping[int, BlockIndex]) -> None:
        self._indices = indices

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `Attend`."""
        index = self._indices.get(layer)
        if index is None:
            return dense(layer, query, keys, values, scale)
        count, out = query.shape[0], torch.empty_like(query)
        guided, slots = BLOCK * index.blocks.numel(), slice(0, count)
        rows, tail = rows_at(range(guided)), rows_at(range(guided, count))
        guided_attention(query[:guided], keys, values, slots, rows, index, scale=scale, out=out[:guided])
        if tail.count:
            paged_attention(query[guided:], keys, values, slots, tail, scale=scale, out=out[guided:])
        return out


class Planned:
    """Attention as a worker plans it: rows of `pages`, which all `guides` have, are guided, and all others dense.

    Args:
        maps: of layers whose rows of `pages` are computed by them.
        weights: of these, [H_S, H_R].
    """

    def __init__(
        self,
        guides: Mapping[int, GuidedLayer],
        pages: frozenset[int],
        maps: Mapping[int, PackedMap] | None = None,
        weights: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._guides = guides
        self._pages = pages
        self._maps, self._weights = maps or {}, weights or {}

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `Attend`."""
        guide_of = self._guides.get(layer)
        if guide_of is None:
            return dense(layer, query, keys, values, scale)
        slots, out = slice(0, query.shape[0]), torch.empty_like(query)
        for run in runs_of(0, query.shape[0], self._pages):
            rows, own = rows_at(range(run.start, run.stop)), slice(run.start, run.stop)
            if run.guided and layer in self._maps:
                map_attention(self._maps[layer], self._weights[layer], values, slots, rows, out=out[own])
            elif run.guided:
                index = guide_of.part(*run.blocks)
                guided_attention(query[own], keys, values, slots, rows, index, scale=scale, out=out[own])
            else:
                paged_attention(query[own], keys, values, slots, rows, scale=scale, out=out[own])
        return out
