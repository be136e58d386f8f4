"""Block masses of a sender, made small to be published, and mixed into masses of a receiver's heads.

Mixing is linear, so the mixed masses are exactly the masses of the mixed map. The references document the maths.
"""

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.arguments import check_weights
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.mix_mass.codes import QuantisedMass
from crossfill_kernels.mix_mass.native import mix_mass_native, quantise_mass_native
from crossfill_kernels.mix_mass.reference import mix_mass_reference, quantise_mass_reference
from crossfill_kernels.select_blocks import check_columns

__all__ = ["QuantisedMass", "mix_mass", "mix_mass_reference", "quantise_mass", "quantise_mass_reference"]


def quantise_mass(mass: BlockMass, *, keep: float = 0.98) -> QuantisedMass:
    """The greatest masses of every (head, row block), a byte each; see `quantise_mass_reference`.

    Args:
        mass: the masses [H, R, C]; C reaches every row block's diagonal.
        keep: share of `mass.totals` to keep, in (0, 1].

    Returns:
        The masses as codes, on the device of `mass`; each is within 2.2 % of what it stands for.

    Raises:
        ArgumentError: `keep` is out of range, or the masses end before a diagonal.
    """
    if not 0 < keep <= 1:
        raise ArgumentError("keep", f"want a share in (0, 1], got {keep}")
    check_columns(mass)
    chosen = dispatch.choose("quantise_mass", mass.mass)
    if chosen == "triton":
        from crossfill_kernels.mix_mass.triton import quantise_mass_triton

        quantised: QuantisedMass = quantise_mass_triton(mass, keep=keep)
        return quantised
    if chosen == "native":
        return quantise_mass_native(mass, keep=keep)
    return quantise_mass_reference(mass, keep=keep)


def mix_mass(mass: QuantisedMass, weights: torch.Tensor, columns: int) -> BlockMass:
    """Block masses of a receiver's heads; see `mix_mass_reference`.

    Args:
        mass: masses of the sender's H_S heads.
        weights: float32 [H_S, H_R], not negative.
        columns: number of column blocks C of the result, beyond every column of `mass` and every row block.

    Returns:
        Masses [H_R, R, C] as shares of a row's mass: `totals` are 1.

    Raises:
        ArgumentError: the weights do not fit or are negative or not finite; `columns` is too small; the lists do not
            rise.
    """
    check_weights(weights, mass.heads, mass.codes.device)
    if columns < 0:
        raise ArgumentError("columns", f"want a number of column blocks, got {columns}")
    if not mass.codes.is_cuda:
        mass.check_content(columns)
    chosen = dispatch.choose("mix_mass", mass.codes)
    if chosen == "triton":
        from crossfill_kernels.mix_mass.triton import mix_mass_triton

        mixed: BlockMass = mix_mass_triton(mass, weights, columns)
        return mixed
    if chosen == "native":
        return mix_mass_native(mass, weights, columns)
    return mix_mass_reference(mass, weights, columns)
