"""How a receiver's context is prefilled while weights are trained: by a sender's maps, or where its masses say.

As served: layers from the first guided one to the last but one take from the sender for whole row blocks of the
context, and all rows after it attend densely.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from crossfill_kernels.blocks import BlockIndex, BlockMass
from crossfill_kernels.mix_mass import QuantisedMass, mix_mass
from crossfill_kernels.rows import BLOCK
from crossfill_kernels.select_blocks import select_blocks
from engines.calibration.gradients import Maps, exact, gated, gates, mapped
from engines.calibration.observation import Layer, observe
from engines.reuse.mass_records import unpack_masses
from engines.reuse.study.masks import density

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engines.reuse.study.network import Attend
    from engines.reuse.study.pair import Pair


class Context(Protocol):
    """What the sender left of one text's context."""

    def rows(
        self,
        layer: int,
        weights: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention [P, H_R, d] of a guided receiver layer's context, differentiable in weights [H_S, H_R] too."""
        ...

    def density(self, weights: Mapping[int, torch.Tensor]) -> float:
        """Blocks that are read as a share of the causal ones, mean of the guided layers."""
        ...


def reusing(context: Context, weights: Mapping[int, torch.Tensor], tokens: int) -> Attend:
    """Attention that takes the first `tokens` rows of the layers of `weights` from a context."""

    def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        mixed = weights.get(layer)
        if mixed is None:
            return exact(query, keys, values, scale)
        reused = context.rows(layer, mixed, query[:tokens], keys[:tokens], values[:tokens], scale)
        if query.shape[0] == tokens:
            return reused
        return torch.cat([reused, exact(query[tokens:], keys, values, scale)])

    return attend


@dataclass(frozen=True)
class Guided:
    """Masses by sender layer: as they were stored, and float32 [H_S, R, R] as shares of a row's.

    Attributes:
        senders: sender layer of each guided receiver layer.
        stored, shares: by sender layer.
        top_p: share of the mixed mass to keep.
        temperature: of the gates.
    """

    senders: Mapping[int, int]
    stored: Mapping[int, QuantisedMass]
    shares: Mapping[int, torch.Tensor]
    top_p: float
    temperature: float

    def index(self, layer: int, weights: torch.Tensor) -> BlockIndex:
        """What a receiver layer keeps, exactly as serving chooses it."""
        stored = self.stored[self.senders[layer]]
        # Rounding of weights that were moved may leave them strided.
        mixed = mix_mass(stored, weights.detach().contiguous(), stored.blocks.numel())
        return select_blocks(mixed, top_p=self.top_p)

    def rows(
        self,
        layer: int,
        weights: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See `Context`."""
        index = self.index(layer, weights)
        shares = torch.einsum("kh,krc->hrc", weights, self.shares[self.senders[layer]])
        return gated(query, keys, values, gates(shares, index.mask(shares.shape[2]), self.temperature), index, scale)

    def density(self, weights: Mapping[int, torch.Tensor]) -> float:
        """See `Context`."""
        return statistics.fmean(density(self.index(layer, one)) for layer, one in weights.items())


@dataclass(frozen=True)
class Mapped:
    """Maps by sender layer.

    Attributes:
        senders: sender layer of each guided receiver layer.
        maps: by sender layer.
    """

    senders: Mapping[int, int]
    maps: Mapping[int, Maps]

    def rows(
        self,
        layer: int,
        weights: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See `Context`; the receiver's own queries and keys do not matter."""
        return mapped(values, weights, self.maps[self.senders[layer]])

    def density(self, weights: Mapping[int, torch.Tensor]) -> float:
        """See `Context`; of the sender's heads, all of which are read."""
        kept = [self.maps[self.senders[layer]].kept for layer in weights]
        return statistics.fmean(1.0 if one is None else _density(one) for one in kept)


def read_guided(pair: Pair, text: Sequence[int], tokens: int, temperature: float) -> Guided:
    """Have the sender read a text; what guides the first `tokens` of it, whole row blocks."""
    left, senders = pair.leave(text), pair.settings.guided
    heads, pages = pair.settings.sender.heads, tokens // BLOCK
    stored = {
        sender: unpack_masses([{page: left.layers[sender][page] for page in range(pages)}], heads)
        for sender in dict.fromkeys(senders.values())
    }
    shares = {sender: mix_mass(one, torch.eye(heads), pages).mass for sender, one in stored.items()}
    return Guided(senders, stored, shares, pair.settings.top_p, temperature)


def read_mapped(pair: Pair, text: Sequence[int], tokens: int) -> Mapped:
    """Have the sender read the first `tokens` of a text, whole row blocks; 4 · tokens · (H + H_kv) · d bytes a layer.

    With a `top_p` below 1 its maps are of the blocks that reach it, head by head, as they would be stored.
    """
    senders = pair.settings.guided
    wanted = observe(pair.sender, text[:tokens], set(senders.values())).layers
    if pair.settings.top_p == 1:
        return Mapped(senders, {sender: Maps(layer) for sender, layer in wanted.items()})
    return Mapped(senders, {sender: Maps(layer, _kept(layer, pair.settings.top_p)) for sender, layer in wanted.items()})


def _kept(layer: Layer, top_p: float) -> torch.Tensor:
    """Blocks [H_S, R, R] that reach the share of a sender layer's mass."""
    mass = layer.masses()
    count = mass.shape[1]
    blocks = torch.arange(count, dtype=torch.int32)
    return select_blocks(BlockMass(mass, blocks, torch.full((count,), float(BLOCK))), top_p=top_p).mask(count)


def _density(kept: torch.Tensor) -> float:
    heads, count = kept.shape[:2]
    return int(kept.sum()) / (heads * count * (count + 1) // 2)
