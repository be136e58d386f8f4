"""The routing decision: a noise-injected threshold, and its special cases, as one pure and replayable function.

Large iff q_L + eps_L > q_S + eps_S + tau, with eps ~ N(0, sigma^2) derived from the request id.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from router.errors import JsonObject

_UNIFORM_BITS = 52


class Reason(StrEnum):
    """Why a model was chosen."""

    EXPLICIT = "explicit"
    THRESHOLD_LARGE = "threshold_large"
    THRESHOLD_SMALL = "threshold_small"
    ONLY_HEALTHY = "only_healthy"
    STICKY = "sticky"


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known beside the query: the model that the conversation is with, and what each would take to answer."""

    pinned: str | None = None
    expected_ttft_s: Mapping[str, float] = field(default_factory=dict)


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
class Decision:
    """A routing decision with all that is needed to make it again.

    `ladder` is weakest first and empty for an explicit model; `unavailable` names its models without a usable worker.
    """

    request_id: str
    requested: str
    model: str
    reason: Reason
    tau: float
    sigma: float
    ladder: tuple[str, ...] = ()
    unavailable: tuple[str, ...] = ()
    pinned: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    scorer: str | None = None
    fallback: str | None = None
    difficulty: float | None = None
    features: Mapping[str, float] = field(default_factory=dict, compare=False)

    def to_json(self) -> JsonObject:
        """The record that `replay` takes; parts that do not apply are left out."""
        record: JsonObject = {
            "model": self.model,
            "requested": self.requested,
            "reason": self.reason.value,
            "request_id": self.request_id,
            "tau": self.tau,
            "sigma": self.sigma,
        }
        optional: JsonObject = {
            "ladder": list(self.ladder),
            "unavailable": list(self.unavailable),
            "pinned": self.pinned,
            "scores": dict(self.scores),
            "noise": dict(self.noise),
            "scorer": self.scorer,
            "fallback": self.fallback,
            "difficulty": self.difficulty,
            "features": dict(self.features),
        }
        record.update((key, value) for key, value in optional.items() if value not in (None, [], {}))
        return record

    def to_header(self) -> str:
        """The record, without features, as compact ASCII JSON."""
        record = self.to_json()
        record.pop("features", None)
        return json.dumps(record, ensure_ascii=True, separators=(",", ":"))


def standard_normals(request_id: str) -> tuple[float, float]:
    """Two independent N(0, 1) values that depend on nothing but `request_id`."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=16, person=b"crossfill-noise").digest()
    words = (int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big"))
    # The half keeps both ends, where the inverse is infinite, out of reach.
    uniforms = [((word >> (64 - _UNIFORM_BITS)) + 0.5) / 2**_UNIFORM_BITS for word in words]
    normal = NormalDist()
    return normal.inv_cdf(uniforms[0]), normal.inv_cdf(uniforms[1])


def decide_explicit(request_id: str, model: str, *, tau: float, sigma: float) -> Decision:
    """The client named a model: it gets that one."""
    return Decision(request_id, model, model, Reason.EXPLICIT, tau, sigma)


def decide_routed(
    request_id: str,
    requested: str,
    ladder: tuple[str, ...],
    scores: Scores,
    *,
    tau: float,
    sigma: float,
    unavailable: Collection[str] = (),
    pinned: str | None = None,
) -> Decision:
    """Choose from `ladder` (small, large) by the threshold, unless `pinned` or exactly one of the two is available."""
    small, large = ladder
    normals = standard_normals(request_id)
    # Multiplying by a zero sigma would leave negative zeros in the log.
    noise = {name: sigma * z if sigma else 0.0 for name, z in zip(ladder, normals, strict=True)}
    usable = [name for name in ladder if name not in unavailable]
    if pinned in usable:
        model, reason = str(pinned), Reason.STICKY
    elif len(usable) == 1:
        model, reason = usable[0], Reason.ONLY_HEALTHY
    elif scores.quality[large] + noise[large] > scores.quality[small] + noise[small] + tau:
        model, reason = large, Reason.THRESHOLD_LARGE
    else:
        model, reason = small, Reason.THRESHOLD_SMALL
    return Decision(
        request_id,
        requested,
        model,
        reason,
        tau,
        sigma,
        ladder=ladder,
        unavailable=tuple(name for name in ladder if name in unavailable),
        pinned=pinned,
        scores={name: scores.quality[name] for name in ladder},
        noise=noise,
        scorer=scores.scorer,
        fallback=scores.fallback,
        difficulty=scores.difficulty,
        features=scores.features,
    )


def replay(record: Mapping[str, Any]) -> Decision:
    """Make a logged decision again, from its request id, scores, tau and sigma; the result equals the original."""
    request_id, requested = record["request_id"], record["requested"]
    tau, sigma = record["tau"], record["sigma"]
    ladder = tuple(record.get("ladder", ()))
    if not ladder:
        return decide_explicit(request_id, requested, tau=tau, sigma=sigma)
    scores = Scores(
        quality=record["scores"],
        scorer=record["scorer"],
        fallback=record.get("fallback"),
        difficulty=record.get("difficulty"),
        features=record.get("features", {}),
    )
    unavailable = record.get("unavailable", ())
    pinned = record.get("pinned")
    return decide_routed(
        request_id, requested, ladder, scores, tau=tau, sigma=sigma, unavailable=unavailable, pinned=pinned
    )
