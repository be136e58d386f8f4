"""Everything that a fit by squared error needs to know of any amount of text: sums of products, added up once.

For receiver layer j, its head h and sender layer k the squared error of a mixture w of the sender's heads is
Σ (A^R_jh - Σ_i w_i A^S_ki)² = wᵀ G_k w - 2 b_jkhᵀ w + c_jh, with G = Σ A^S A^Sᵀ, b = Σ A^S A^R and c = Σ (A^R)² over
all entries of the maps (or block masses). Sums of several texts, or of several machines, are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engines.calibration.observation import Observation

# So many products are added in float32, of which 65,536 lose four digits; sums of these in float64.
_ENTRIES = 2**12


@dataclass(frozen=True)
class Moments:
    """Of a sender's S layers of H_S heads and a receiver's R layers of H_R heads; all float64.

    Attributes:
        gram: [S, H_S, H_S].
        cross: [R, S, H_S, H_R].
        power: [R, H_R].
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
    """Of maps or masses [S, H_S, n, C] and [R, H_R, n, C] of the same n rows of one text.

    Raises:
        ValueError: they are not of the same rows and columns.
    """
    if sender.dim() != 4 or receiver.dim() != 4 or sender.shape[2:] != receiver.shape[2:]:
        raise ValueError(
            f"want [layers, heads, rows, columns] with rows and columns in common, got {list(sender.shape)} and "
            f"{list(receiver.shape)}"
        )
    (s, h_s, rows, columns), (r, h_r) = sender.shape, receiver.shape[:2]
    theirs, own = sender.reshape(s * h_s, rows * columns), receiver.reshape(r * h_r, rows * columns)
    gram = torch.zeros(s, h_s, h_s, dtype=torch.float64)
    cross = torch.zeros(s * h_s, r * h_r, dtype=torch.float64)
    power = torch.zeros(r * h_r, dtype=torch.float64)
    for start in range(0, rows * columns, _ENTRIES):
        a, b = (maps[:, start : start + _ENTRIES] for maps in (theirs, own))
        of_layers = a.reshape(s, h_s, -1)
        gram += (of_layers @ of_layers.transpose(1, 2)).double()
        cross += (a @ b.T).double()
        power += b.square().sum(dim=1).double()
    return Moments(gram, cross.view(s, h_s, r, h_r).permute(2, 0, 1, 3).contiguous(), power.view(r, h_r), rows)


def moments_of_maps(sender: Observation, receiver: Observation, *, rows: int = 64) -> Moments:
    """Of all maps of one text that both models have read, made and forgotten `rows` rows at a time.

    Raises:
        ValueError: the observations are not of as many tokens.
    """
    if sender.tokens != receiver.tokens:
        raise ValueError(f"of two texts: {sender.tokens} and {receiver.tokens} tokens")
    whole: Moments | None = None
    for start in range(0, sender.tokens, rows):
        stop = min(sender.tokens, start + rows)
        part = moments_of(sender.maps(start, stop), receiver.maps(start, stop))
        whole = part if whole is None else whole + part
    assert whole is not None
    return whole


def moments_of_masses(sender: Observation, receiver: Observation) -> Moments:
    """Of all block masses of one text that both models have read.

    Raises:
        ValueError: the observations are not of as many tokens.
    """
    return moments_of(torch.stack(list(sender.masses())), torch.stack(list(receiver.masses())))
