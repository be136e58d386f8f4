"""Joins request, scorer and policy: one decision for a request, made again when a worker drops out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from router.config import AUTO_MODEL, LearnedScorerConfig, RecordedScorerConfig
from router.decision.cost import expected_tokens
from router.decision.features import conversation_features
from router.decision.policy import NOTHING_KNOWN, Decision, Rule, Situation, decide_explicit, decide_routed
from router.decision.scorers import Candidate
from router.decision.scorers.heuristic import HeuristicScorer, default_capabilities
from router.decision.scorers.learned import LearnedScorer, read_artifact
from router.decision.scorers.recorded import RecordedScorer, read_recorded
from router.errors import ModelNotFoundError, ReuseUnavailableError
from router.request.options import Reuse

if TYPE_CHECKING:
    from router.config import RouterConfig, RoutingConfig
    from router.decision.scorers import Scorer
    from router.request.generation import GenerationRequest
Decide = Callable[[Collection[str]], Decision]
"""Names of models without a usable worker in, decision out."""


class Decider:
    """Knows the models, the ladder and the scorer."""

    def __init__(self, config: RouterConfig, scorer: Scorer) -> None:
        routing = config.routing
        self._routing = routing
        self._rule = Rule(routing.tau, routing.sigma, routing.cost_weight, routing.ttft_weight)
        self._concrete = config.model_names
        self._prices = {model.name: model.cost for model in config.models if model.cost is not None}
        self._scorer = scorer
        self._candidates = _candidates(config)

    @property
    def models(self) -> tuple[str, ...]:
        """Every name that a request may give, the routed one first."""
        return (AUTO_MODEL, *self._concrete) if self._routing.ladder else self._concrete

    def prepare(
        self,
        request: GenerationRequest,
        request_id: str,
        situation: Situation = NOTHING_KNOWN,
        reusing: Collection[str] = (),
    ) -> Decide:
        """Score `request` once; the result decides from that as often as needed.

        A request that requires reuse goes to none but the models that are `reusing` what others computed. Raises
        ModelNotFoundError, ReuseUnavailableError.
        """
        if request.model not in self.models:
            raise ModelNotFoundError(request.model, self.models)
        decide = self._prepare(request, request_id, situation)
        return decide if request.options.reuse is not Reuse.REQUIRE else self._among(request.model, reusing, decide)

    def _among(self, asked: str, reusing: Collection[str], decide: Decide) -> Decide:
        """`decide`, with models that cannot reuse as good as unavailable."""
        choices = self._routing.ladder if asked == AUTO_MODEL else None
        able = [name for name in choices or (asked,) if name in reusing]
        unable = frozenset(self._concrete).difference(able)
        if not able:
            raise ReuseUnavailableError(asked, [name for name in self._concrete if name in reusing])

        def decide_among(unavailable: Collection[str]) -> Decision:
            # If none of them is usable now, they are still the ones to name: no other may step in.
            usable = [name for name in able if name not in unavailable]
            return decide(unable.union(unavailable) if usable else unable)

        return decide_among

    def _prepare(self, request: GenerationRequest, request_id: str, situation: Situation) -> Decide:
        rule, ladder = self._rule, self._routing.ladder
        if request.model != AUTO_MODEL or ladder is None:
            explicit = decide_explicit(request_id, request.model, tau=rule.tau, sigma=rule.sigma)
            return lambda _: explicit
        features = conversation_features(request.turns())
        scores = self._scorer.score(features, self._candidates)
        tokens = expected_tokens(features, request)
        cost = {name: tokens.cost(price) for name, price in self._prices.items()}
        return lambda unavailable: decide_routed(
            request_id, AUTO_MODEL, ladder, scores, rule, cost=cost, situation=situation, unavailable=unavailable
        )


def build_scorer(routing: RoutingConfig) -> Scorer:
    """The configured scorer; raises ConfigError if its file cannot be used."""
    heuristic = HeuristicScorer()
    if isinstance(routing.scorer, LearnedScorerConfig):
        return LearnedScorer(read_artifact(routing.scorer.path, routing.ladder or ()))
    if isinstance(routing.scorer, RecordedScorerConfig):
        return RecordedScorer(read_recorded(routing.scorer.path), heuristic)
    return heuristic


def _candidates(config: RouterConfig) -> tuple[Candidate, ...]:
    ladder = config.routing.ladder or ()
    configured = {model.name: model.capability for model in config.models}
    defaults = default_capabilities(len(ladder)) if ladder else []
    return tuple(
        Candidate(name, default if (capability := configured[name]) is None else capability)
        for name, default in zip(ladder, defaults, strict=True)
    )
