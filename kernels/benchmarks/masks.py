"""Masks of kept blocks of the shape that real heads have: a sink, a diagonal, and stripes that heads partly share."""

import torch

from crossfill_kernels.blocks import BlockIndex, BlockMass, index_of


def striped_index(heads: int, blocks: int, density: float, *, shared: float = 1.0, seed: int = 0) -> BlockIndex:
    """An index of which each head keeps `density` of its causal blocks.

    Args:
        heads: number of heads.
        blocks: row blocks, and column blocks.
        density: share of the causal blocks that a head keeps, the first block and the diagonal included.
        shared: how much the heads agree on stripes; the greater, the smaller their union.
        seed: of the random choice.
    """
    generator = torch.Generator().manual_seed(seed)
    stripes = shared * torch.randn(1, 1, blocks, generator=generator) + torch.randn(
        heads, 1, blocks, generator=generator
    )
    score = stripes + 0.5 * torch.randn(heads, blocks, blocks, generator=generator)
    columns, rows = torch.arange(blocks), torch.arange(blocks)[:, None]
    forced = (columns == 0) | (columns == rows)
    score = score.masked_fill(columns > rows, float("-inf")).masked_fill(forced & (columns <= rows), float("inf"))
    causal = blocks * (blocks + 1) // 2
    # Beyond the forced blocks a row block keeps a number that rises with its causal blocks.
    extra = (density * causal - (2 * blocks - 1)) / (causal - (2 * blocks - 1))
    wanted = 2 + extra * (rows - 1).clamp(min=0).double()
    wanted = wanted.floor() + (torch.rand(heads, blocks, 1, generator=generator) < wanted % 1)
    rank = score.argsort(dim=-1, descending=True).argsort(dim=-1)
    return index_of(rank < wanted, torch.arange(blocks, dtype=torch.int32))


def striped_mass(heads: int, blocks: int, *, shared: float = 1.0, seed: int = 0) -> BlockMass:
    """Block masses with a sink, a diagonal that holds most, and stripes that heads partly share.

    Args:
        heads: number of heads.
        blocks: row blocks, and column blocks.
        shared: how much the heads agree on stripes.
        seed: of the random choice.
    """
    generator = torch.Generator().manual_seed(seed)
    columns, rows = torch.arange(blocks), torch.arange(blocks)[:, None]
    stripes = shared * torch.randn(1, 1, blocks, generator=generator) + torch.randn(
        heads, 1, blocks, generator=generator
    )
    score = (
        1.5 * stripes
        + torch.randn(heads, blocks, blocks, generator=generator)
        - 0.1 * (rows - columns).clamp(min=0).sqrt()
    )
    score = score + 6.0 * (columns == 0) + 5.0 * (columns == rows)
    share = score.masked_fill(columns > rows, float("-inf")).softmax(dim=-1)
    return BlockMass(64 * share, torch.arange(blocks, dtype=torch.int32), torch.full((blocks,), 64.0))


def union_density(index: BlockIndex) -> float:
    """Share of the causal blocks that at least one head keeps."""
    blocks = index.blocks.numel()
    return float(index.mask(blocks).any(dim=0).sum()) / (blocks * (blocks + 1) // 2)
