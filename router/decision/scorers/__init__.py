"""Scorers: predictions of how well each candidate model would answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.decision.features import Features
    from router.decision.policy import Scores


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model of the ladder; `capability` in [0, 1] is its quality on the hardest queries."""

    name: str
    capability: float


class Scorer(Protocol):
    """Predicts qualities. Pure: equal arguments give equal scores."""

    def score(self, features: Features, models: Sequence[Candidate]) -> Scores:
        """A quality, usually in [0, 1], for every one of `models`."""
        ...
