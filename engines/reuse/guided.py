"""Which column blocks a receiver layer looks at: a sender layer's masses, mixed and cut at top-p."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.blocks import BlockIndex
from crossfill_kernels.mix_mass import mix_mass
from crossfill_kernels.select_blocks import select_blocks
from engines.errors import PairArtifactError
from engines.reuse.artifact import read_manifest, read_weights
from engines.reuse.mass_records import unpack_masses
from engines.reuse.settings import Weights

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from cache_store.records import Record
    from engines.reuse.settings import ModelIdentity, PairSettings


# What a worker was told from the manifest; a worker that starts again may find that of a later calibration.
_OF_BOTH = (
    "layers",
    "first_layer",
    "top_p",
    "layer_top_p",
    "layer_density",
    "min_tokens",
    "max_density",
    "mode",
    "map_top_p",
    "map_density",
)


def mixtures(pair: PairSettings, receiver: ModelIdentity) -> dict[int, torch.Tensor]:
    """Of each guided receiver layer float32 [H_S, H_R]: how much of each sender head is in each head of the receiver.

    Columns sum to 1.

    Raises:
        PairArtifactError: fitted weights cannot be read, or are no longer those that the worker was told of.
    """
    if pair.artifact is None:
        same = torch.eye(receiver.heads) if pair.weights is Weights.IDENTITY else _uniform(pair.sender.heads, receiver)
        return dict.fromkeys(pair.guided, same)
    folder = Path(pair.artifact)
    manifest = read_manifest(folder)
    as_told = all(getattr(manifest, name) == getattr(pair, name) for name in _OF_BOTH)
    if not (as_told and manifest.passed and manifest.is_of(pair.sender, receiver)):
        raise PairArtifactError(f"{folder}: was changed since this worker was told of it; start again")
    return {layer: torch.tensor(matrix) for layer, matrix in read_weights(folder, manifest).items()}


def _uniform(heads: int, receiver: ModelIdentity) -> torch.Tensor:
    return torch.full((heads, receiver.heads), 1 / heads)


@dataclass(frozen=True)
class GuidedLayer:
    """The kept column blocks of one receiver layer, for the row blocks that the store has.

    Attributes:
        index: of H_R heads and these row blocks.
        places: of each row block, its number within the index.
    """

    index: BlockIndex
    places: Mapping[int, int]

    @property
    def size_bytes(self) -> int:
        """Of the lists."""
        return sum(one.nbytes for one in (self.index.blocks, self.index.offsets, self.index.columns))

    def density(self, blocks: Collection[int]) -> float:
        """Kept blocks of these row blocks as a share of the causal ones; 1 if it has none of them."""
        there = [block for block in blocks if block in self.places]
        causal = self.index.heads * sum(block + 1 for block in there)
        lengths = self.index.offsets.diff().view(self.index.heads, -1)
        return int(lengths[:, [self.places[block] for block in there]].sum()) / causal if causal else 1.0

    def covers(self, first: int, last: int) -> bool:
        """Whether it has row blocks `first` … `last`."""
        return all(block in self.places for block in range(first, last + 1))

    def part(self, first: int, last: int) -> BlockIndex:
        """The lists of row blocks `first` … `last`, all of which it has."""
        low, high = self.places[first], self.places[last] + 1
        rows = self.index.blocks.numel()
        if (low, high) == (0, rows):
            return self.index
        # Blocks that follow one another lie side by side, head by head.
        bounds = self.index.offsets.tolist()
        pieces = [slice(bounds[head * rows + low], bounds[head * rows + high]) for head in range(self.index.heads)]
        lengths = self.index.offsets.diff().view(self.index.heads, rows)[:, low:high]
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int32)
        offsets[1:] = lengths.flatten().cumsum(0)
        columns = torch.cat([self.index.columns[piece] for piece in pieces])
        return BlockIndex(self.index.heads, self.index.blocks[low:high].contiguous(), offsets, columns)


GuidedLayers = Mapping[int, GuidedLayer]
"""By receiver layer, of those that one sender layer guides."""


def guide(
    shards: Sequence[Mapping[int, Record]], pair: PairSettings, weights: Mapping[int, torch.Tensor]
) -> GuidedLayers:
    """What one sender layer's masses of these row blocks make receiver layers look at.

    Args:
        shards: records by row block, of each part of the sender's heads in order.
        pair: of both models.
        weights: [H_S, H_R] of each receiver layer that is wanted.

    Raises:
        MassRecordError: a record is not of the sender's heads and of its row block.
    """
    masses = unpack_masses(shards, pair.sender.heads)
    blocks = masses.blocks.tolist()
    places, width = {block: place for place, block in enumerate(blocks)}, blocks[-1] + 1 if blocks else 0
    # Layers that are mixed and cut alike look at the same.
    ways = {layer: (id(matrix), pair.top_p_of(layer)) for layer, matrix in weights.items()}
    made: dict[tuple[int, float], GuidedLayer] = {}
    for layer, matrix in weights.items():
        if ways[layer] not in made:
            kept = select_blocks(mix_mass(masses, matrix, width), top_p=pair.top_p_of(layer))
            made[ways[layer]] = GuidedLayer(kept, places)
    return {layer: made[way] for layer, way in ways.items()}


def bytes_of(layers: GuidedLayers | None) -> int:
    """Of the lists of all of them; None has none."""
    return sum({id(layer): layer.size_bytes for layer in (layers or {}).values()}.values())
