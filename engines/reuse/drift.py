"""How far a guided prefill's next token is from a dense one's, and when a pair is too far away for too long."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# One-sided 95 %.
_Z = 1.644854


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two distributions of the same next token.

    Attributes:
        divergence: KL(dense ‖ guided) over the whole vocabulary, in nats.
        agrees: whether both hold the same token for the most likely one.
    """

    divergence: float
    agrees: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the last comparisons of a pair come to.

    Attributes:
        mean: divergence in nats.
        low: lower end of the one-sided 95 % interval of the mean.
        agreement: share of comparisons that agree.
        drifted: whether even `low` is above the limit.
    """

    mean: float
    low: float
    agreement: float
    drifted: bool


def compare(dense: torch.Tensor, guided: torch.Tensor) -> Comparison | None:
    """Compare the logits [V] of two prefills of one prompt; None if the dense one's are no numbers.

    Guided logits that are none, or rule out what the dense ones do not, count as far as a distribution over V tokens
    is from one that holds all of them for equally likely: ln V.
    """
    # In float64, as small divergences are differences of nearly equal numbers.
    one, other = (logits.double().log_softmax(dim=0) for logits in (dense, guided))
    if bool(one.isnan().any()):
        return None
    # What has no probability adds nothing.
    divergence = float(((one - other) * one.exp())[one.isfinite()].sum())
    if not math.isfinite(divergence):
        return Comparison(math.log(len(dense)), agrees=False)
    return Comparison(max(0.0, divergence), int(dense.argmax()) == int(guided.argmax()))


class DriftWindow:
    """The last comparisons of one pair.

    A pair has drifted if the lower end of the one-sided 95 % interval of the mean divergence is above the limit
    (Student's t). A few far values raise the mean and the interval's width alike, so it takes many, or all, to trip.

    Args:
        limit: most that the mean divergence may be, in nats.
        size: comparisons that a verdict needs, at least 2.
    """

    def __init__(self, limit: float, size: int) -> None:
        self._limit = limit
        self._last: deque[Comparison] = deque(maxlen=size)
        self._size = size

    def add(self, comparison: Comparison) -> Verdict | None:
        """One more; the verdict on the last ones, or None while they are too few."""
        self._last.append(comparison)
        if len(self._last) < self._size:
            return None
        divergences = [one.divergence for one in self._last]
        mean = fmean(divergences)
        low = mean - _student(self._size - 1) * stdev(divergences) / math.sqrt(self._size)
        agreement = fmean(one.agrees for one in self._last)
        return Verdict(mean, low, agreement, low > self._limit)


def _student(degrees: int) -> float:
    """Quantile .95 of Student's t by Cornish and Fisher's expansion; within .004 from 7 degrees of freedom on."""
    z = _Z
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
