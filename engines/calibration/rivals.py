"""Other ways to guide a receiver, made as dense as the one that was chosen: what it is worth shows against them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.blocks import BlockIndex, index_of
from engines.reuse.study.masks import density

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engines.calibration.trial import Candidate, Models
    from engines.reuse.study.pair import Left, Pair

UNION = "union of heads"
"""Of every head the blocks that any of the sender's heads would keep."""

# Halvings of the interval in which top-p lies: by .0002.
_HALVINGS = 12


@dataclass(frozen=True)
class Rival:
    """A name, and weights [H_S, H] of each guided layer; if they are of a union, H is H_S."""

    name: str
    weights: Mapping[int, torch.Tensor]


def rivals_of(models: Models, chosen: Candidate) -> tuple[Rival, ...]:
    """Every other rule for the same layers, and the union."""
    layers = models.pair(chosen).settings.guided
    heads = torch.eye(models.sender.heads)
    return (
        *(Rival(rule.value, models.mixed(rule, layers)) for rule in models.rules if rule is not chosen.rule),
        Rival(UNION, dict.fromkeys(layers, heads)),
    )


def as_dense(pair: Pair, rival: Rival, left: Left, pages: int, wanted: Mapping[int, float]) -> dict[int, BlockIndex]:
    """What each guided layer looks at in the first `pages` row blocks if a top-p of its own makes it as dense.

    Args:
        pair: whose layers are guided.
        rival: by whose weights.
        left: by the sender.
        pages: row blocks.
        wanted: density of each layer, as near as a top-p comes to it.
    """
    low, high = dict.fromkeys(wanted, 0.0), dict.fromkeys(wanted, 1.0)
    best = _at(pair, rival, left, pages, high)
    for _ in range(_HALVINGS):
        middle = {layer: (low[layer] + high[layer]) / 2 for layer in wanted}
        for layer, index in _at(pair, rival, left, pages, middle).items():
            found = density(index)
            if abs(found - wanted[layer]) < abs(density(best[layer]) - wanted[layer]):
                best[layer] = index
            (high if found > wanted[layer] else low)[layer] = middle[layer]
    return best


def _at(pair: Pair, rival: Rival, left: Left, pages: int, top_p: Mapping[int, float]) -> dict[int, BlockIndex]:
    settings = pair.settings.model_copy(update={"layer_top_p": top_p})
    guides = replace(pair, settings=settings, weights=rival.weights).guides(left, pages)
    indices = {layer: one.index for layer, one in guides.items()}
    if rival.name != UNION:
        return indices
    # Layers that one sender layer guides look at the same.
    made: dict[int, BlockIndex] = {}
    for index in indices.values():
        if id(index) not in made:
            made[id(index)] = _union(index, pair.receiver.heads)
    return {layer: made[id(index)] for layer, index in indices.items()}


def _union(index: BlockIndex, heads: int) -> BlockIndex:
    width = int(index.blocks[-1]) + 1
    any_head = index.mask(width).any(dim=0)
    return index_of(any_head.expand(heads, -1, -1), index.blocks)
