"""A scorer that needs no data: a difficulty from the text, and a quality from difficulty and capability."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from router.decision.policy import Scores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.decision.features import Features, TextFeatures
    from router.decision.scorers import Candidate

NAME = "heuristic"

# Log-odds of "hard". Set so that, with the default tau and sigma, a greeting or a fact is two standard deviations of
# the noise below the threshold and a proof or an implementation task as far above it; test_scorers.py says so.
_BIAS = -5.4
_PER_DOUBLING_OF_LENGTH = 0.5
_WEIGHTS: Mapping[str, float] = {
    "proof": 6.4,
    "build": 5.2,
    "explain": 2.2,
    "code": 1.0,
    "maths": 0.8,
    "questions": 0.3,
    "constraints": 1.0,
}
# Earlier turns say what the talk is about, not how hard this turn is.
_CONTEXT_SHARE = 0.25
_CONTEXT_LIMIT = 2.0
_PER_DOUBLING_OF_TURNS = 0.2


class HeuristicScorer:
    """q = 1 - d (1 - capability): every model answers easy queries, capability decides on hard ones."""

    def score(self, features: Features, models: Sequence[Candidate]) -> Scores:
        """Qualities in [0, 1] for `models`."""
        d = difficulty(features)
        return Scores(
            quality={model.name: 1 - d * (1 - model.capability) for model in models},
            scorer=NAME,
            difficulty=d,
            features=_as_numbers(features),
        )


def difficulty(features: Features) -> float:
    """Difficulty in [0, 1], a logistic function of the counts."""
    context = min(_CONTEXT_SHARE * _weight(features.context), _CONTEXT_LIMIT)
    turns = _PER_DOUBLING_OF_TURNS * math.log2(max(1, features.turns))
    return 1 / (1 + math.exp(-(_BIAS + _weight(features.last) + context + turns)))


def default_capabilities(count: int) -> list[float]:
    """Capabilities for a ladder of `count` models, evenly spaced from .3 to .9."""
    if count == 1:
        return [0.9]
    return [0.3 + 0.6 * index / (count - 1) for index in range(count)]


def _weight(text: TextFeatures) -> float:
    length = _PER_DOUBLING_OF_LENGTH * math.log2(1 + text.words / 20)
    return length + sum(weight * _saturated(getattr(text, name)) for name, weight in _WEIGHTS.items())


def _saturated(count: int) -> float:
    """0, 1, 1.5, 1.75, … 2: a second sign of the same kind says half as much as the first."""
    return 2 * (1 - 0.5 ** min(count, 32))


def _as_numbers(features: Features) -> Mapping[str, float]:
    numbers = {"words": round(features.last.words, 1), "context_words": round(features.context.words, 1)}
    return numbers | {name: getattr(features.last, name) for name in _WEIGHTS} | {"turns": features.turns}
