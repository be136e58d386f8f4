"""What the router remembers between requests: where prefixes lie, which model a conversation is with, prefill speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from router.config import AUTO_MODEL
from router.decision.policy import Situation
from router.sessions.pins import Pins
from router.sessions.prefill_rate import PrefillRates
from router.sessions.prompt import Prompt, read_prompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.config import RouterConfig
    from router.dispatch.workers import WorkerPool
    from router.telemetry.metrics import SessionMetrics
    from router.telemetry.record import RequestRecord


class Sessions:
    """Memory of one router process; it ends with the process and is not shared between processes."""

    def __init__(self, config: RouterConfig, pool: WorkerPool, metrics: SessionMetrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self._ladder = config.routing.ladder or ()
        self._pins = Pins(config.sessions.remembered) if config.sessions.sticky else None
        self._rates = PrefillRates({model.name: model.prefill_tokens_per_s for model in config.models})
        self._weighs_ttft = config.routing.ttft_weight > 0
        self._has_affinity = config.affinity.enabled
        self._reads = self._has_affinity or self._weighs_ttft or self._pins is not None

    def situation(
        self, record: RequestRecord, payload: Mapping[str, Any], namespace: str, session: str | None = None
    ) -> Situation:
        """Read the prompt of a checked body onto `record`; the result is what is known for the choice of its model.

        Safe to call in a thread.
        """
        if not self._reads:
            return Situation()
        prompt = record.prompt = read_prompt(payload, namespace.encode(), session)
        if payload["model"] != AUTO_MODEL:
            return Situation()
        return Situation(
            pinned=self._pins.model_of(prompt) if self._pins else None,
            expected_ttft_s=self._expected_ttft(record, prompt) if self._weighs_ttft else {},
        )

    def answered(self, record: RequestRecord) -> None:
        """The first bytes of an answer came: that worker holds the prompt now, and that model the conversation."""
        assert record.placement is not None, "an answer comes from a worker"
        assert record.decision is not None, "a worker is chosen for a model"
        if self._has_affinity:
            evicted = record.placement.worker.prefixes.add(record.prompt)
            self._metrics.count_evictions(evicted)
        if self._pins is not None and record.decision.requested == AUTO_MODEL:
            event = self._pins.answered(record.prompt, record.decision.model)
            if event is not None:
                self._metrics.count_pin(event)

    def first_token(self, record: RequestRecord) -> None:
        """The first content token of a stream came; `record` has the time to it."""
        placement, model = record.placement, record.model
        if placement is None or model is None or record.ttft_s is None or record.sent_s is None:
            return
        waited_s = record.arrived_s + record.ttft_s - record.sent_s
        self._rates.observe(model, record.prompt.tokens_behind(placement.matched_blocks), waited_s)

    def _expected_ttft(self, record: RequestRecord, prompt: Prompt) -> dict[str, float]:
        """Seconds by model of the ladder; a model whose speed is not known yet is left out, counted and noted."""
        expected: dict[str, float] = {}
        for model in self._ladder:
            rate = self._rates.tokens_per_s(model)
            if rate is None:
                record.ttft_unknown.append(model)
                self._metrics.count_ttft_unknown(model)
            else:
                expected[model] = prompt.tokens_behind(self._pool.longest_match(model, prompt).blocks) / rate
        return expected
