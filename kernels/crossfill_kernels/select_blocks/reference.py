"""The maths of the choice of blocks, in plain torch."""

import torch

from crossfill_kernels.blocks import BlockIndex, BlockMass, index_of


def select_blocks_reference(mass: BlockMass, *, top_p: float, cap: int | None = None) -> BlockIndex:
    """Keep the first block and the diagonal, then the greatest masses, until a share of the total mass is kept.

    Per (head, row block) the causal column blocks are put in order: the first block, the diagonal, then by falling
    mass, the lower column first where masses are equal. Column block number k of that order is kept iff

        k is forced,  or  mass_k > 0  and  Σ_{i < k} mass_i < top_p · totals

    so that leaving out the least block that is not forced falls below the share (MapFlow, Algorithm 1). Where the
    masses do not reach the share, because some were left out, every block of positive mass is kept. With top_p = 1
    every causal block is. In all cases the order ends at `cap`. Sums are float64, in that order, so that every
    implementation decides alike.

    Args:
        mass: the masses [H, R, C].
        top_p: share of `mass.totals` to reach, in (0, 1].
        cap: most column blocks that a list may have, None for no bound.

    Returns:
        The index of what is kept.
    """
    columns = torch.arange(mass.mass.shape[2], device=mass.mass.device)
    diagonal = mass.blocks[:, None]
    causal = columns <= diagonal  # [R, C]
    forced = causal & ((columns == 0) | (columns == diagonal))
    key = mass.mass.double().masked_fill(~causal, float("-inf")).masked_fill(forced, float("inf"))
    order = key.sort(dim=-1, descending=True, stable=True).indices
    ordered = mass.mass.double().masked_fill(~causal, 0).gather(-1, order)
    before = torch.zeros_like(ordered)
    before[..., 1:] = ordered.cumsum(dim=-1)[..., :-1]
    wanted = (ordered > 0) & (before < top_p * mass.totals.double()[:, None])
    forced = forced.expand(mass.mass.shape).gather(-1, order)
    if top_p == 1:
        wanted = causal.expand(mass.mass.shape).gather(-1, order)
    kept = forced | wanted
    if cap is not None:
        kept &= columns < cap
    return index_of(torch.zeros_like(kept).scatter(-1, order, kept), mass.blocks)
