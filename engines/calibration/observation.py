"""What every layer of a model attends to in a text: its maps, some rows at a time, and its block masses.

Whole maps of a context of 4,096 tokens take 64 MiB a head a layer. So what is kept of a text is its rotated queries and
keys, and maps are made anew from them, a few rows at a time. Of block masses nothing but themselves is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.block_mass import block_mass
from crossfill_kernels.rows import rows_at
from engines.reuse.study.network import dense

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

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

    def masses(self) -> torch.Tensor:
        """Block masses float32 [H, R, C] of all rows."""
        count, out = self.query.shape[0], torch.empty_like(self.query)
        # Values change the attention's output and no probability.
        values, slots, rows = self.keys, slice(0, count), rows_at(range(count))
        return block_mass(self.query, self.keys, values, slots, rows, scale=self.scale, out=out).mass


@dataclass(frozen=True)
class Observation:
    """Layers of one text of T tokens, by their numbers."""

    layers: Mapping[int, Layer]

    @property
    def tokens(self) -> int:
        """T."""
        return next(iter(self.layers.values())).query.shape[0]


def observe(network: Network, tokens: Sequence[int], layers: Collection[int] | None = None) -> Observation:
    """Run a text densely and keep queries and keys of these layers, by default all: 4·T·(H + H_kv)·d bytes a layer."""
    kept: dict[int, Layer] = {}

    def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        if layers is None or layer in layers:
            kept[layer] = Layer(query, keys, scale)
        return dense(layer, query, keys, values, scale)

    network.hidden(tokens, attend)
    return Observation(kept)


def observe_masses(network: Network, tokens: Sequence[int]) -> torch.Tensor:
    """Block masses float32 [layers, H, R, C] of a text; those of one row block sum to its rows."""
    found: list[torch.Tensor] = []

    def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        count, out = query.shape[0], torch.empty_like(query)
        rows = rows_at(range(count))
        found.append(block_mass(query, keys, values, slice(0, count), rows, scale=scale, out=out).mass)
        return out

    network.hidden(tokens, attend)
    return torch.stack(found)
