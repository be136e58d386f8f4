"""How good predicted qualities are, and how good routing by them is.

The measures of routing are those of RouteLLM (Ong et al. 2024, section 4): the performance gap recovered, its average,
and the call-performance threshold. They compare two models; of a longer ladder they take the ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from sklearn.metrics import roc_auc_score

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

_BINS = 10


@dataclass(frozen=True, slots=True)
class Calibration:
    """Mean prediction and mean score in bins of equally many queries, in ascending order of prediction."""

    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def error(self) -> float:
        """Expected calibration error: |predicted - observed|, weighted by the queries of each bin."""
        gaps = np.abs(np.array(self.predicted) - np.array(self.observed))
        return float(np.average(gaps, weights=self.counts))

    @property
    def error_by_chance(self) -> float:
        """The error that true probabilities would show on as many right or wrong answers, by the normal law."""
        predicted, counts = np.array(self.predicted), np.array(self.counts)
        deviations = np.sqrt(predicted * (1 - predicted) / counts)
        return float(np.average(np.sqrt(2 / np.pi) * deviations, weights=counts))


@dataclass(frozen=True, slots=True)
class QualityCurve:
    """Mean score as the share of queries sent to the strong model grows, best gain first.

    `shares` run from 0 to 1. Queries of equal gain are taken together, and the line between two points is what taking
    them in random order gives: a scorer that knows nothing is exactly random routing.
    """

    shares: tuple[float, ...]
    scores: tuple[float, ...]

    @property
    def recovered(self) -> Vector | None:
        """PGR at each share: (score - weak) / (strong - weak); None where the strong model is no better."""
        weak, strong = self.scores[0], self.scores[-1]
        return (np.array(self.scores) - weak) / (strong - weak) if strong > weak else None

    def recovered_at(self, share: float) -> float | None:
        """PGR at `share`."""
        recovered = self.recovered
        return None if recovered is None else float(np.interp(share, self.shares, recovered))

    @property
    def apgr(self) -> float | None:
        """Average PGR, the area under it over the share of strong calls; random routing has one half."""
        recovered = self.recovered
        return None if recovered is None else float(np.trapezoid(recovered, self.shares))

    def share_for(self, recovered_part: float) -> float | None:
        """CPT: the smallest share of strong calls that recovers `recovered_part` of the gap."""
        recovered = self.recovered
        if recovered is None:
            return None
        reached = int(np.argmax(recovered >= recovered_part))
        if reached == 0:
            return 0.0
        low, high = recovered[reached - 1], recovered[reached]
        step = (recovered_part - low) / (high - low)
        return float(self.shares[reached - 1] + step * (self.shares[reached] - self.shares[reached - 1]))


@dataclass(frozen=True, slots=True)
class Interval:
    """The middle 95 % of what resampling the queries gives."""

    low: float
    high: float


def quality_curve(gain: Vector, weak: Vector, strong: Vector) -> QualityCurve:
    """The curve of sending queries to the strong model in the order of predicted `gain`, given the true scores."""
    order = np.argsort(-gain, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(gain[order]) != 0, True)) + 1
    won = np.cumsum((strong - weak)[order])[ends - 1]
    shares = np.concatenate([[0.0], ends / len(gain)])
    scores = weak.mean() + np.concatenate([[0.0], won / len(gain)])
    return QualityCurve(tuple(shares.tolist()), tuple(scores.tolist()))


def auc(predicted: Vector, score: Vector) -> float | None:
    """Chance that a good answer was predicted higher than a bad one; None without one of each.

    A score between 0 and 1 counts as a good and a bad answer with weights that add up to one.
    """
    weights = np.concatenate([score, 1 - score])
    if min(score.sum(), (1 - score).sum()) <= 0:
        return None
    labels = np.repeat([1, 0], len(score))
    return float(roc_auc_score(labels, np.concatenate([predicted, predicted]), sample_weight=weights))


def brier(predicted: Vector, score: Vector) -> float:
    """Mean squared error of the predictions."""
    return float(np.mean((predicted - score) ** 2))


def calibration(predicted: Vector, score: Vector) -> Calibration:
    """Predictions against scores in ten bins."""
    bins = [part for part in np.array_split(np.argsort(predicted, kind="stable"), _BINS) if len(part)]
    return Calibration(
        tuple(float(predicted[part].mean()) for part in bins),
        tuple(float(score[part].mean()) for part in bins),
        tuple(len(part) for part in bins),
    )


def interval(values: list[float]) -> Interval | None:
    """The 95 % percentile interval of resampled `values` (Efron and Tibshirani 1993, chapter 13)."""
    if not values:
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return Interval(float(low), float(high))
