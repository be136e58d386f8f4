"""Everything that a fit by squared error needs to know of any amount of text: sums of products, added up once.

For head h of a receiver layer the squared error of a mixture w of the heads of a sender layer is
Σ (A^R_h - Σ_i w_i A^S_i)² = wᵀ G w - 2 b_hᵀ w + c_h, with G = Σ A^S A^Sᵀ, b = Σ A^S A^R and c = Σ (A^R)² over all
entries of the maps (or block masses). Sums of several texts, or of several machines, are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engines.calibration.observation import Layer

# So many products are added in float32, of which 65,536 lose four digits; sums of these in float64.
_ENTRIES = 2**12


@dataclass(frozen=True)
class Moments:
    """Of a sender layer of H_S heads and a receiver layer of H_R heads; all float64.

    Attributes:
        gram: [H_S, H_S].
        cross: [H_S, H_R].
        power: [H_R].
        rows: how many rows of maps (or row blocks of masses) are in it.
    """

    gram: torch.Tensor
    cross: torch.Tensor
    power: torch.Tensor
    rows: int

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.gram + other.gram, self.cross + other.cross, self.power + other.power, self.rows + other.rows
        )


def moments_of(sender: torch.Tensor, receiver: torch.Tensor) -> Moments:
    """Of maps or masses [H_S, n, C] and [H_R, n, C] of the same n rows of one text.

    Raises:
        ValueError: they are not of the same rows and columns.
    """
    if sender.dim() != 3 or receiver.dim() != 3 or sender.shape[1:] != receiver.shape[1:]:
        raise ValueError(
            f"want [heads, rows, columns] with rows and columns in common, got {list(sender.shape)} and "
            f"{list(receiver.shape)}"
        )
    theirs, own = sender.flatten(1), receiver.flatten(1)
    # Zeros at the end add nothing.
    spare = -theirs.shape[1] % _ENTRIES
    a, b = (
        torch.nn.functional.pad(maps, (0, spare)).view(len(maps), -1, _ENTRIES).transpose(0, 1)
        for maps in (theirs, own)
    )
    gram, cross = ((a @ other.transpose(1, 2)).double().sum(dim=0) for other in (a, b))
    power = b.square().sum(dim=2).double().sum(dim=0)
    return Moments(gram, cross, power, sender.shape[1])


def moments_of_maps(sender: Layer, receiver: Layer, *, rows: int = 64) -> Moments:
    """Of the whole maps of one text that both layers have seen, made and forgotten `rows` rows at a time.

    Raises:
        ValueError: the layers have not seen as many tokens.
    """
    tokens = sender.query.shape[0]
    if tokens != receiver.query.shape[0]:
        raise ValueError(f"of two texts: {tokens} and {receiver.query.shape[0]} tokens")
    parts = [(start, min(tokens, start + rows)) for start in range(0, tokens, rows)]
    whole = moments_of(*(layer.map(*parts[0]) for layer in (sender, receiver)))
    for part in parts[1:]:
        whole += moments_of(*(layer.map(*part) for layer in (sender, receiver)))
    return whole
