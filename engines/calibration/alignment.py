"""Which sender layer guides which receiver layer: from the last ones backwards, or as cheaply as any ordered choice.

MapFlow aligns suffixes (§ Layer alignment), which is right for models of one family that differ in size. A model that
was made by leaving layers out has its own order, which is found from how well each sender layer fits each of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engines.errors import CalibrationFitError
from engines.reuse.settings import align_suffix

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Alignment:
    """The sender layer of each receiver layer, and what the guided ones cost together."""

    layers: tuple[int, ...]
    cost: float
    name: str


def cost_of(cost: Floats, layers: Sequence[int], guided: Sequence[int]) -> float:
    """Sum of `cost` [R, S] over the guided receiver layers, each with its sender layer of `layers`."""
    return float(sum(cost[layer, layers[layer]] for layer in guided))


def align_ordered(cost: Floats, guided: Sequence[int]) -> tuple[int, ...]:
    """The map of least cost in which no receiver layer is guided by an earlier sender layer than the one before it.

    Of maps that cost the same the one nearer to the suffixes. Layers that are not guided get the entry of the nearest
    guided one, or of suffix alignment where that is between.

    Args:
        cost: [R, S], of each receiver layer with each sender layer; lower is better.
        guided: receiver layers that are, ascending.

    Raises:
        CalibrationFitError: there is nothing to align, or a cost is not finite.
    """
    _check(cost, guided)
    suffix = align_suffix(*cost.shape)
    # Of each sender layer: the least cost of a map that ends with it, its distance from the suffixes, and where from.
    best = [(0.0, 0, -1)] * cost.shape[1]
    steps: list[list[int]] = []
    for layer in guided:
        reached: list[tuple[float, int, int]] = []
        cheapest, came_from = (float("inf"), 0), -1
        for sender in range(cost.shape[1]):
            if best[sender][:2] < cheapest:
                cheapest, came_from = best[sender][:2], sender
            far = abs(sender - suffix[layer])
            reached.append((cheapest[0] + float(cost[layer, sender]), cheapest[1] + far, came_from))
        steps.append([came for _, _, came in reached])
        best = reached
    at = min(range(len(best)), key=lambda sender: best[sender][:2])
    found: dict[int, int] = {}
    for layer, came in zip(reversed(guided), reversed(steps), strict=True):
        found[layer] = at
        at = came[at]
    return _filled(found, suffix)


def _filled(found: dict[int, int], suffix: Sequence[int]) -> tuple[int, ...]:
    low, high = min(found), max(found)
    layers = []
    for layer, default in enumerate(suffix):
        if layer < low:
            layers.append(min(default, found[low]))
        elif layer > high:
            layers.append(max(default, found[high]))
        else:
            layers.append(found[layer] if layer in found else layers[-1])
    return tuple(layers)


def align(cost: Floats, guided: Sequence[int]) -> tuple[Alignment, Alignment]:
    """The better of the ordered and the suffix alignment, then the other; arguments and errors as `align_ordered`."""
    maps = {"suffix": align_suffix(*cost.shape), "ordered": align_ordered(cost, guided)}
    found = [Alignment(layers, cost_of(cost, layers, guided), name) for name, layers in maps.items()]
    # Of two that cost the same the suffixes, which say nothing about these models.
    better, other = sorted(found, key=lambda one: one.cost)
    return better, other


def _check(cost: Floats, guided: Sequence[int]) -> None:
    if cost.ndim != 2 or not cost.size or not len(guided):
        raise CalibrationFitError(f"nothing to align: costs {list(cost.shape)}, {len(guided)} guided layers")
    if list(guided) != sorted(set(guided)) or guided[0] < 0 or guided[-1] >= len(cost):
        raise CalibrationFitError(f"guided layers are not ascending or not among {len(cost)}: {list(guided)}")
    if not np.isfinite(cost).all():
        raise CalibrationFitError("a cost is not finite")
