"""Top-p by groups of layers: where looking at less costs little, the receiver looks at less.

What a change in one group does to divergence, agreement and density is measured; what changes in several do together is
predicted as the sum, and measured of the best that the prediction finds.
"""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

from engines.calibration.trial import Candidate, Tried

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engines.calibration.choice import Bounds

GROUPS = 4
"""Of layers that follow one another, or fewer if there are not so many."""

# Of the combinations that are predicted to do so many are measured.
_MOST = 4

Change = tuple[int, float]
"""Number of a group, and its top-p."""


def groups_of(guided: Sequence[int]) -> list[Sequence[int]]:
    """Guided layers in groups of equal size, but for one layer."""
    count = min(GROUPS, len(guided))
    ends = [len(guided) * number // count for number in range(count + 1)]
    return [guided[begin:end] for begin, end in itertools.pairwise(ends)]


def single_changes(chosen: Candidate, guided: Sequence[int], top_ps: Sequence[float]) -> dict[Change, Candidate]:
    """What differs from `chosen` in one group."""
    return {
        (number, top_p): _changed(chosen, guided, {number: top_p})
        for number in range(len(groups_of(guided)))
        for top_p in top_ps
        if top_p != chosen.top_p
    }


def combinations(
    chosen: Candidate, base: Tried, singles: Mapping[Change, Tried], guided: Sequence[int], bounds: Bounds
) -> list[Candidate]:
    """Of all combinations of changes that are predicted to be within bounds those that leave out most, in that order.

    Args:
        chosen: that is changed.
        base: what it does.
        singles: what each change alone does, on the same texts.
        guided: layers.
        bounds: for figures.
    """
    predicted = []
    for changes in _all_changes(singles):
        divergence, agreement, density = (
            _sum(base_values, [getattr(singles[change], name) for change in changes])
            for name, base_values in (
                ("divergence", base.divergence),
                ("agreement", base.agreement),
                ("density", base.density),
            )
        )
        if density < statistics.fmean(base.density) and bounds.hold(divergence, agreement, density):
            predicted.append((density, changes))
    predicted.sort(key=lambda one: one[0])
    return [_changed(chosen, guided, dict(changes)) for _, changes in predicted[:_MOST]]


def _all_changes(singles: Mapping[Change, Tried]) -> Iterator[tuple[Change, ...]]:
    """Every choice of at most one change a group, but for none at all."""
    numbers = sorted({number for number, _ in singles})
    options = [[None, *(change for change in singles if change[0] == number)] for number in numbers]
    for picked in itertools.product(*options):
        changes = tuple(change for change in picked if change is not None)
        if changes:
            yield changes


def _sum(base: Sequence[float], changed: Sequence[Sequence[float]]) -> float:
    start = statistics.fmean(base)
    return start + sum(statistics.fmean(one) - start for one in changed)


def _changed(chosen: Candidate, guided: Sequence[int], changes: Mapping[int, float]) -> Candidate:
    groups = groups_of(guided)
    layers = tuple((layer, top_p) for number, top_p in sorted(changes.items()) for layer in groups[number])
    return Candidate(chosen.first_layer, chosen.rule, chosen.top_p, layers)
