"""What the router remembers between requests: where prefixes lie, which model a conversation is with, prefill speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.config import AUTO_MODEL
from router.decision.policy import Situation
from router.sessions.pins import Pins
from router.sessions.prefill_rate import PrefillRates
from router.sessions.prompt import Prompt, read_prompt

if TYPE_CHECKING:
    from router.config import RouterConfig
    from router.dispatch.workers import WorkerPool
    from router.request.generation import GenerationRequest
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

    def situation(self, record: RequestRecord, request: GenerationRequest, namespace: str) -> Situation:
        """Read the prompt of `request` onto `record`; the result is what is known for the choice of its model.

        Safe to call in a thread.
        """
        if not self._reads:
            return Situation()
        prompt = record.prompt = read_prompt(
            request.payload, namespace.encode(), request.options.session, is_chat=request.is_chat
        )
        if request.model != AUTO_MODEL:
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

    def ended(self, record: RequestRecord) -> None:
        """A stream ended; `record` has the time to its first token, and the worker's count of tokens if it told one.

        Speeds rest on that count alone: an estimate from a client's bytes, some of which its template may leave out,
        would let one client change the decisions for all.
        """
        if record.model is None or record.usage is None or record.ttft_s is None or record.sent_s is None:
            return
        waited_s = record.arrived_s + record.ttft_s - record.sent_s
        self._rates.observe(record.model, record.usage.prefilled, waited_s)

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
