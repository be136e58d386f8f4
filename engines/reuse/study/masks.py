"""Masks to compare guided ones with: as dense, head by head and row block by row block, and made without a sender."""

from __future__ import annotations

import statistics
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.blocks import BlockIndex, index_of

if TYPE_CHECKING:
    from collections.abc import Mapping


class Mask(StrEnum):
    """Which column blocks a row block attends to.

    All of them; those that a sender's masses say; as many at random; the first and as many of the nearest. Every mask
    has the first block and the diagonal.
    """

    DENSE = "dense"
    GUIDED = "guided"
    RANDOM = "random"
    WINDOW = "sink + window"


def like(guided: BlockIndex, mask: Mask, generator: torch.Generator) -> BlockIndex:
    """A control of kind `mask` that keeps as many blocks as `guided` in every list."""
    if mask is Mask.DENSE:
        raise ValueError("dense attention has no index")
    if mask is Mask.GUIDED:
        return guided
    width = int(guided.blocks[-1]) + 1 if guided.blocks.numel() else 0
    kept = guided.mask(width).sum(dim=-1, keepdim=True)
    columns, rows = torch.arange(width), guided.blocks[:, None].long()
    if mask is Mask.WINDOW:
        liking = columns.expand(rows.shape[0], width).double().repeat(guided.heads, 1, 1)
    else:
        liking = torch.rand(guided.heads, rows.shape[0], width, generator=generator, dtype=torch.float64)
    always = (columns == 0) | (columns == rows)
    liking = liking.masked_fill(always, float("inf")).masked_fill(columns > rows, float("-inf"))
    rank = liking.argsort(dim=-1, descending=True).argsort(dim=-1)
    return index_of(rank < kept, guided.blocks)


def density(index: BlockIndex) -> float:
    """Kept blocks as a share of the causal ones."""
    causal = index.heads * int((index.blocks.long() + 1).sum())
    return int(index.offsets[-1]) / causal if causal else 1.0


def mean_density(indices: Mapping[int, BlockIndex]) -> float:
    """Mean of the layers."""
    return statistics.fmean(map(density, indices.values()))
