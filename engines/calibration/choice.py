"""Which of the candidates that were tried is taken."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engines.calibration.gate import Limits
    from engines.calibration.trial import Candidate, Rule, Tried

# Whose logarithm is taken; what looks everywhere diverges by nothing.
_LEAST_DIVERGENCE = 1e-9
# Of what the gate allows, the share that a choice may use: it is made on few texts, and the gate judges the
# unfavourable end of an interval, which for eight texts may be twice the mean.
_DIVERGENCE_MARGIN, _AGREEMENT_MARGIN = 0.35, 0.6


@dataclass(frozen=True)
class Bounds:
    """What a candidate must keep to, well within the limits of the gate."""

    limits: Limits

    def hold(self, divergence: float, agreement: float, density: float) -> bool:
        """Whether these means do."""
        return (
            divergence <= _DIVERGENCE_MARGIN * self.limits.divergence
            and 1 - agreement <= _AGREEMENT_MARGIN * (1 - self.limits.agreement)
            and density <= self.limits.density
        )

    def hold_of(self, tried: Tried) -> bool:
        """Whether what was measured of a candidate does."""
        return self.hold(*(statistics.fmean(one) for one in (tried.divergence, tried.agreement, tried.density)))


def rank(found: Mapping[Candidate, Tried], bounds: Bounds, layers: int) -> list[Candidate]:
    """Those within bounds, what leaves out most first.

    Args:
        found: what was measured of each.
        bounds: for figures.
        layers: of the receiver.
    """
    within = [one for one, tried in found.items() if bounds.hold_of(tried)]
    return sorted(within, key=lambda one: found[one].saved(one, layers), reverse=True)


def best_rule(found: Mapping[Candidate, Tried]) -> Rule:
    """The rule that is nearest to the dense run at equal density.

    Args:
        found: of every rule the same first layer and the same shares, all layers alike.
    """
    points: dict[Rule, list[tuple[float, float]]] = {}
    for one, tried in found.items():
        far = math.log(max(statistics.fmean(tried.divergence), _LEAST_DIVERGENCE))
        points.setdefault(one.rule, []).append((statistics.fmean(tried.density), far))
    # Where all have been: beyond its points nothing is known of a rule.
    low, high = max(min(of)[0] for of in points.values()), min(max(of)[0] for of in points.values())
    curves = {rule: np.array(sorted(of)).T for rule, of in points.items()}
    return min(curves, key=lambda rule: float(np.interp((low + high) / 2, curves[rule][0], curves[rule][1])))


def nearest(found: Mapping[Candidate, Tried]) -> Candidate:
    """Where none is within bounds."""
    return min(found, key=lambda one: sum(found[one].divergence))


def first_that_recalls(
    ranked: Sequence[Candidate], recalls: Callable[[Candidate], bool], told: Callable[[int, int], None]
) -> Candidate:
    """The first that recalls, or the last one.

    What leaves out less recalls no less, but for chance, so a bisection finds it.

    Args:
        ranked: one at the least, what leaves out most first.
        recalls: whether a candidate does.
        told: of steps that are done, and how many there are at most.
    """
    low, high, steps = 0, len(ranked) - 1, (len(ranked) - 1).bit_length()
    for step in range(steps):
        told(step, steps)
        if low == high:
            break
        middle = (low + high) // 2
        low, high = (low, middle) if recalls(ranked[middle]) else (middle + 1, high)
    told(steps, steps)
    return ranked[low]
