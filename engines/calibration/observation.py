"""What every layer of a model attends to in a text: its maps, some rows at a time, and its block masses.

Whole maps of a context of 4,096 tokens take 64 MiB a head a layer. So what is kept of a text is its rotated queries and
keys, and maps are made anew from them, a few rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.block_mass import block_mass
from crossfill_kernels.rows import rows_at
from engines.reuse.study.network import dense

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engines.reuse.study.network import Network


@dataclass(frozen=True)
class Layer:
    """One layer's rotated queries [T, H, d] and keys [T, H_kv, d], and the scale of their products."""

    query: torch.Tensor
    keys: torch.Tensor
    scale: float

    def map(self, start: int, stop: int) -> torch.Tensor:
        """Attention probabilities float32 [H, stop - start, stop] of rows [start, stop), causal."""
        heads, kv_heads = self.query.shape[1], self.keys.shape[1]
        # Query head h reads key head h · H_kv // H (grouped-query attention).
        query = self.query[start:stop].float().reshape(stop - start, kv_heads, heads // kv_heads, -1)
        scores = torch.einsum("nkgd,mkd->kgnm", query, self.keys[:stop].float()) * self.scale
        later = torch.arange(stop)[None, :] > torch.arange(start, stop)[:, None]
        return scores.masked_fill(later, float("-inf")).softmax(dim=-1).flatten(0, 1)


@dataclass(frozen=True)
class Observation:
    """All layers of one text of T tokens."""

    layers: Sequence[Layer]

    @property
    def tokens(self) -> int:
        """T."""
        return self.layers[0].query.shape[0]

    def maps(self, start: int, stop: int) -> torch.Tensor:
        """Maps float32 [layers, H, stop - start, stop] of rows [start, stop)."""
        return torch.stack([layer.map(start, stop) for layer in self.layers])

    def masses(self) -> Iterator[torch.Tensor]:
        """Of each layer the block masses float32 [H, R, C] of all rows; the masses of one row sum to 1."""
        rows = rows_at(range(self.tokens))
        for layer in self.layers:
            out = torch.empty_like(layer.query)
            # Values change the attention's output and no probability.
            found = block_mass(
                layer.query, layer.keys, layer.keys, slice(0, self.tokens), rows, scale=layer.scale, out=out
            )
            yield found.mass


def observe(network: Network, tokens: Sequence[int]) -> Observation:
    """Run a text densely and keep the queries and keys of every layer: 4·T·(H + H_kv)·d bytes a layer."""
    layers: list[Layer] = []

    def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        layers.append(Layer(query, keys, scale))
        return dense(layer, query, keys, values, scale)

    network.hidden(tokens, attend)
    return Observation(layers)
