"""The routing decision: a noise-injected threshold, and its special cases, as one pure and replayable function.

On a ladder of models, weakest first, model j beats a weaker model i iff u_j > u_i + (tau_i + … + tau_{j-1}), with

    u_m = q_m + eps_m - cost_weight · cost_m - ttft_weight · expected_ttft_s_m

and eps ~ N(0, sigma^2) from the request id. With two models and no weights: large iff q_L + eps_L > q_S + eps_S + tau.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import orjson

from router.decision.noise import standard_normals

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from router.errors import JsonObject

# No estimate is better than a tenth of a millisecond, and decisions travel in a header.
_TTFT_DECIMALS = 4


class Reason(StrEnum):
    """Why a model was chosen. The three thresholds tell where it stands among the usable models of the ladder."""

    EXPLICIT = "explicit"
    STICKY = "sticky"
    ONLY_HEALTHY = "only_healthy"
    THRESHOLD_SMALL = "threshold_small"
    THRESHOLD_MIDDLE = "threshold_middle"
    THRESHOLD_LARGE = "threshold_large"


@dataclass(frozen=True, slots=True)
class Scores:
    """Predicted quality of each candidate, and where the prediction came from.

    `fallback` says why `scorer` is not the configured one. `features` are numbers for the reader, never text.
    """

    quality: Mapping[str, float]
    scorer: str
    fallback: str | None = None
    difficulty: float | None = None
    features: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """What the operator sets.

    `tau` holds for every pair of neighbours, or has one entry for each pair. `cost_weight` is score per unit of cost,
    `ttft_weight` score per second.
    """

    tau: float | tuple[float, ...]
    sigma: float
    cost_weight: float = 0.0
    ttft_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of a request besides its text.

    `pinned` is the model that this conversation stays with. `expected_ttft_s` holds finite seconds to the first token
    by model, given the prefix that its workers could reuse; it counts if every usable model of the ladder has one.
    """

    pinned: str | None = None
    expected_ttft_s: Mapping[str, float] = field(default_factory=dict)


NOTHING_KNOWN = Situation()


@dataclass(frozen=True, slots=True)
class Decision:
    """A routing decision with all that is needed to make it again.

    `ladder` is weakest first and empty for an explicit model; `unavailable` names its models without a usable worker,
    which for a request that requires reuse is one that can reuse.
    `cost` is the expected cost of the request by model, in the unit of the configured prices.
    """

    request_id: str
    requested: str
    model: str
    reason: Reason
    tau: float | tuple[float, ...]
    sigma: float
    ladder: tuple[str, ...] = ()
    unavailable: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    scorer: str | None = None
    fallback: str | None = None
    difficulty: float | None = None
    features: Mapping[str, float] = field(default_factory=dict, compare=False)
    pinned: str | None = None
    cost: Mapping[str, float] = field(default_factory=dict)
    cost_weight: float = 0.0
    expected_ttft_s: Mapping[str, float] = field(default_factory=dict)
    ttft_weight: float = 0.0

    def to_json(self) -> JsonObject:
        """The record that `replay` takes; parts that do not apply are left out."""
        record: JsonObject = {
            "model": self.model,
            "requested": self.requested,
            "reason": self.reason.value,
            "request_id": self.request_id,
            "tau": list(self.tau) if isinstance(self.tau, tuple) else self.tau,
            "sigma": self.sigma,
        }
        optional: JsonObject = {
            "ladder": list(self.ladder),
            "unavailable": list(self.unavailable),
            "scores": dict(self.scores),
            "noise": dict(self.noise),
            "scorer": self.scorer,
            "fallback": self.fallback,
            "difficulty": self.difficulty,
            "features": dict(self.features),
            "pinned": self.pinned,
            "cost": dict(self.cost),
            "cost_weight": self.cost_weight or None,
            "expected_ttft_s": dict(self.expected_ttft_s),
            "ttft_weight": self.ttft_weight or None,
        }
        record.update((key, value) for key, value in optional.items() if value not in (None, [], {}))
        return record

    def to_told(self) -> JsonObject:
        """The record as clients get it with an answer: without features."""
        record = self.to_json()
        record.pop("features", None)
        return record

    def to_header(self) -> str:
        """What clients are told, as compact ASCII JSON."""
        # Names of models and request ids are ASCII, which the header needs.
        return orjson.dumps(self.to_told()).decode("ascii")


def decide_explicit(request_id: str, model: str, *, tau: float | tuple[float, ...], sigma: float) -> Decision:
    """The client named a model: it gets that one."""
    return Decision(request_id, model, model, Reason.EXPLICIT, tau, sigma)


def decide_routed(
    request_id: str,
    requested: str,
    ladder: tuple[str, ...],
    scores: Scores,
    rule: Rule,
    *,
    cost: Mapping[str, float] | None = None,
    situation: Situation = NOTHING_KNOWN,
    unavailable: Collection[str] = (),
) -> Decision:
    """Choose from `ladder`: the pinned model, else the only one that is usable, else by the thresholds.

    If none is usable, the thresholds decide among all. `cost` holds the models with a price.
    """
    cost = cost or {}
    normals = standard_normals(request_id, len(ladder))
    # Multiplying by a zero sigma would leave negative zeros in the log.
    noise = {name: rule.sigma * z if rule.sigma else 0.0 for name, z in zip(ladder, normals, strict=True)}
    expected_ttft_s = {
        name: round(situation.expected_ttft_s[name], _TTFT_DECIMALS)
        for name in ladder
        if name in situation.expected_ttft_s
    }
    usable = [name for name in ladder if name not in unavailable]
    if situation.pinned is not None and situation.pinned in usable:
        model, reason = situation.pinned, Reason.STICKY
    elif len(usable) == 1:
        model, reason = usable[0], Reason.ONLY_HEALTHY
    else:
        rungs = usable or list(ladder)
        utility = _utility(rungs, scores.quality, noise, (rule.cost_weight, cost), (rule.ttft_weight, expected_ttft_s))
        model = _climb(rungs, utility, ladder, rule.tau)
        reason = _place(model, rungs)
    return Decision(
        request_id,
        requested,
        model,
        reason,
        rule.tau,
        rule.sigma,
        ladder=ladder,
        unavailable=tuple(name for name in ladder if name in unavailable),
        scores={name: scores.quality[name] for name in ladder},
        noise=noise,
        scorer=scores.scorer,
        fallback=scores.fallback,
        difficulty=scores.difficulty,
        features=scores.features,
        pinned=situation.pinned,
        cost={name: cost[name] for name in ladder if name in cost},
        cost_weight=rule.cost_weight,
        expected_ttft_s=expected_ttft_s,
        ttft_weight=rule.ttft_weight,
    )


def _utility(
    rungs: Sequence[str],
    quality: Mapping[str, float],
    noise: Mapping[str, float],
    *terms: tuple[float, Mapping[str, float]],
) -> dict[str, float]:
    """Quality with noise, less each (weight, value by model) that is known for all of `rungs`."""
    utility = {name: quality[name] + noise[name] for name in rungs}
    for weight, values in terms:
        if weight and all(name in values for name in rungs):
            utility = {name: utility[name] - weight * values[name] for name in rungs}
    return utility


def _climb(
    rungs: Sequence[str], utility: Mapping[str, float], ladder: tuple[str, ...], tau: float | tuple[float, ...]
) -> str:
    """The rung that beats every other, the weaker one at a tie."""
    steps = tau if isinstance(tau, tuple) else (tau,) * (len(ladder) - 1)
    heights = dict(zip(ladder, accumulate(steps, initial=0.0), strict=True))
    best = rungs[0]
    for name in rungs[1:]:
        if utility[name] > utility[best] + (heights[name] - heights[best]):
            best = name
    return best


def _place(model: str, rungs: Sequence[str]) -> Reason:
    if model == rungs[0]:
        return Reason.THRESHOLD_SMALL
    return Reason.THRESHOLD_LARGE if model == rungs[-1] else Reason.THRESHOLD_MIDDLE


def replay(record: Mapping[str, Any]) -> Decision:
    """Make a logged decision again from what it was made of; the result equals the original."""
    request_id, requested, tau = record["request_id"], record["requested"], record["tau"]
    tau = tuple(tau) if isinstance(tau, list | tuple) else tau
    ladder = tuple(record.get("ladder", ()))
    if not ladder:
        return decide_explicit(request_id, requested, tau=tau, sigma=record["sigma"])
    scores = Scores(
        quality=record["scores"],
        scorer=record["scorer"],
        fallback=record.get("fallback"),
        difficulty=record.get("difficulty"),
        features=record.get("features", {}),
    )
    return decide_routed(
        request_id,
        requested,
        ladder,
        scores,
        Rule(tau, record["sigma"], record.get("cost_weight", 0.0), record.get("ttft_weight", 0.0)),
        cost=record.get("cost"),
        situation=Situation(record.get("pinned"), record.get("expected_ttft_s", {})),
        unavailable=record.get("unavailable", ()),
    )
