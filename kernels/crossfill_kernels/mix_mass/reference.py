"""The maths of small block masses and of their mixing, in plain torch."""

import torch

from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.mix_mass.codes import QuantisedMass, fractions, thresholds


def quantise_mass_reference(mass: BlockMass, *, keep: float = 0.98) -> QuantisedMass:
    """The greatest masses until a share of the total is kept, as codes of their logarithm.

    With f = mass / totals (float32), per (head, row block), by falling mass and the lower column first where masses
    are equal, block number k of that order is kept iff mass_k > 0, Σ_{i < k} mass_i < keep · totals (float64), and
    f_k is not below the least fraction that a code stands for (1.5e-5). Its code is c with 2^((c - 255.5) / 16) ≤ f <
    2^((c - 254.5) / 16).

    Args:
        mass: the masses [H, R, C].
        keep: share of `mass.totals` to keep, in (0, 1].

    Returns:
        The kept masses.
    """
    columns = torch.arange(mass.mass.shape[2], device=mass.mass.device)
    causal = (columns <= mass.blocks[:, None]).expand(mass.mass.shape)
    masses = mass.mass.masked_fill(~causal, 0)
    order = masses.sort(dim=-1, descending=True, stable=True).indices
    ordered = masses.double().gather(-1, order)
    before = torch.zeros_like(ordered)
    before[..., 1:] = ordered.cumsum(dim=-1)[..., :-1]
    kept = (ordered > 0) & (before < keep * mass.totals.double()[:, None])
    kept = torch.zeros_like(kept).scatter(-1, order, kept)
    shares = masses / mass.totals[:, None]
    codes = torch.bucketize(shares.contiguous(), thresholds(masses.device), right=True) - 1
    kept &= codes >= 0
    flat = kept.flatten(0, 1)
    offsets = torch.zeros(flat.shape[0] + 1, dtype=torch.int32, device=masses.device)
    offsets[1:] = flat.sum(dim=1).cumsum(0)
    return QuantisedMass(
        masses.shape[0], mass.blocks, offsets, flat.nonzero()[:, 1].int().contiguous(), codes[kept].to(torch.uint8)
    )


def mix_mass_reference(mass: QuantisedMass, weights: torch.Tensor, columns: int) -> BlockMass:
    """The block masses of the mixed map: mixing is linear.

        B̂[h, i, j] = Σ_k W[k, h] · f[k, i, j]

    with f = 2^((code - 255) / 16) where a mass is stored, else 0. If every column of W sums to 1, so do the masses of
    a row block, less what was left out when they were quantised.

    Args:
        mass: masses of the sender's H_S heads, fractions of a row's mass.
        weights: float32 [H_S, H_R].
        columns: number of column blocks C.

    Returns:
        Masses [H_R, R, C] with `totals` 1, computed in float64.
    """
    row_blocks, device = mass.blocks.numel(), mass.codes.device
    lengths = mass.offsets.diff().long()
    entry = torch.repeat_interleave(torch.arange(lengths.numel(), device=device), lengths)
    dense = torch.zeros(lengths.numel(), columns, dtype=torch.float64, device=device)
    dense[entry, mass.columns.long()] = fractions(device).double()[mass.codes.long()]
    dense = dense.view(mass.heads, row_blocks, columns)
    mixed = torch.einsum("kh,krc->hrc", weights.double(), dense).float().contiguous()
    return BlockMass(mixed, mass.blocks, torch.ones(row_blocks, device=device))
