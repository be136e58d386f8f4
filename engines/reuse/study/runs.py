"""One text under several masks, and what sets a run apart from the dense one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfill_kernels.rows import BLOCK
from engines.reuse.study.maps import usable_maps
from engines.reuse.study.masks import Mask, density, like, mean_density
from engines.reuse.study.network import dense
from engines.reuse.study.pair import Planned, Sparse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from engines.models.needle import Needle
    from engines.reuse.study.network import Attend, Network
    from engines.reuse.study.pair import Pair
    from engines.reuse.study.passages import Recollection

NEEDLE_TOKENS = 256
"""Of the text that a needle is given; conversations put its fact into prose of their own."""

# Needles of one conversation are of different kinds, of which there are eight; more would leave no prose in 1K tokens.
_NEEDLES_A_TEXT = 8


class Runs:
    """One text, which the sender reads once.

    Args:
        pair: both models.
        ids: the text.
        tokens: of its prefix, whole row blocks, which is under the mask.
        generator: of random masks.
    """

    def __init__(self, pair: Pair, ids: Sequence[int], tokens: int, generator: torch.Generator) -> None:
        self.left = pair.leave(ids)
        self.guides = pair.guides(self.left, tokens // BLOCK)
        self.maps = usable_maps(pair, ids)
        self._weights, self._pages = pair.weights, tokens // BLOCK
        self._indices = {layer: one.index for layer, one in self.guides.items()}
        self._generator = generator

    @property
    def densities(self) -> dict[int, float]:
        """Kept blocks of each guided layer as a share of the causal ones."""
        return {layer: density(index) for layer, index in self._indices.items()}

    @property
    def density(self) -> float:
        """Kept blocks of the guided mask as a share of the causal ones, mean of the guided layers."""
        return mean_density(self._indices)

    def under(self, masks: Iterable[Mask]) -> Iterator[tuple[Mask, Attend]]:
        """How the receiver attends under each of `masks`."""
        for mask in masks:
            yield mask, dense if mask is Mask.DENSE else self._sparse(mask)

    def _sparse(self, mask: Mask) -> Attend:
        if mask is Mask.GUIDED:
            return Planned(self.guides, frozenset(range(self._pages)), self.maps, self._weights)
        return Sparse({layer: like(index, mask, self._generator) for layer, index in self._indices.items()})


def distance(exact: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """Mean KL in nats of log-probabilities [n, V] from exact ones; the share of rows that agree on the next token."""
    # A token that the exact run rules out adds nothing, and 0 · ∞ is no number.
    terms = (exact.exp() * (exact - found)).masked_fill(exact.isneginf(), 0.0)
    divergence = terms.sum(dim=-1).mean()
    agreement = (exact.argmax(dim=-1) == found.argmax(dim=-1)).float().mean()
    return float(divergence), float(agreement)


def in_conversations(needles: Sequence[Needle]) -> list[Sequence[Needle]]:
    """The needles, dealt to conversations of eight."""
    return [needles[begin : begin + _NEEDLES_A_TEXT] for begin in range(0, len(needles), _NEEDLES_A_TEXT)]


def recalled(receiver: Network, hidden: torch.Tensor, talk: Recollection) -> list[bool]:
    """Of each fact of a conversation, whether every token of its value would have been said."""
    found = []
    for value in talk.values:
        said = receiver.log_probabilities(hidden[value.start - 1 : value.stop - 1]).argmax(dim=-1).tolist()
        found.append(said == list(talk.tokens[value.start : value.stop]))
    return found
