"""Prometheus metrics of the router. Label values come from the configuration or an enum, so series are bounded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from router.dispatch.worker_answers import TokenKind
from router.dispatch.workers import WorkerState
from router.errors import AuthFailure
from router.telemetry.record import Outcome, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import CollectorRegistry

    from router.dispatch.affinity import Placement
    from router.dispatch.dispatcher import RetryReason
    from router.dispatch.reuse_outcome import ReuseOutcome
    from router.dispatch.workers import Worker
    from router.sessions.pins import PinEvent
    from router.stream.stream_repair import Repair
    from router.telemetry.record import RequestRecord

UNMATCHED_ROUTE = "other"
UNDECIDED = "none"
NO_REASON = "none"

# 76 equal ratios from 50 ms to 2 s are 5 % each: a change of 10 % in a median stays visible.
_FINE_STEPS = 76
TTFT_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.03, 0.04),
    *(round(0.05 * 40 ** (step / _FINE_STEPS), 4) for step in range(_FINE_STEPS + 1)),
    *(2.2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 45, 60, 90, 120),
)
# From 1 ms, a small model on a GPU, to a stalled stream.
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.065, 0.08),
    *(0.1, 0.125, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30),
)
SCORE_BUCKETS = tuple(round(0.05 * step, 2) for step in range(1, 21))
DURATION_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5),
    *(7.5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 1800),
)


_ERROR_CLASSES: Mapping[Outcome | None, str] = {
    Outcome.CLIENT_ERROR: "client",
    Outcome.UNAVAILABLE: "unavailable",
    Outcome.TIMEOUT: "timeout",
    Outcome.UPSTREAM_ERROR: "worker",
    Outcome.ERROR_EVENT: "worker",
    Outcome.TRUNCATED: "worker",
    Outcome.SHUTDOWN: "router",
    Outcome.INTERNAL_ERROR: "router",
}


class RouterMetrics:
    """The router's series, on a registry given by the caller."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._make_histograms(partial(Histogram, registry=registry))
        self._make_counters(partial(Counter, registry=registry))
        self.sessions = SessionMetrics(registry)
        self._in_flight = Gauge(
            "crossfill_in_flight_requests",
            "Requests that a worker is serving.",
            ["model", "worker"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._up = Gauge(
            "crossfill_worker_up",
            "1 if the worker is healthy to every router process, else 0.",
            ["model", "worker"],
            registry=registry,
            multiprocess_mode="livemin",
        )

    def _make_histograms(self, histogram: Callable[..., Histogram]) -> None:
        self._ttft = histogram(
            "crossfill_ttft_seconds",
            "Arrival at the router to the first content token of a streamed answer.",
            ["model", "reuse"],
            buckets=TTFT_BUCKETS,
        )
        self._ttft_parts = histogram(
            "crossfill_ttft_part_seconds",
            "Where the time to first token went: queue (body and turn), route (parsing and decision), upstream.",
            ["model", "part"],
            buckets=TTFT_BUCKETS,
        )
        self._inter_token = histogram(
            "crossfill_inter_token_seconds",
            "Between two arrivals of content within a streamed answer.",
            ["model"],
            buckets=INTER_TOKEN_BUCKETS,
        )
        self._duration = histogram(
            "crossfill_request_duration_seconds",
            "Arrival of a request for text at the router to the end of its answer.",
            ["model"],
            buckets=DURATION_BUCKETS,
        )
        self._scores = histogram(
            "crossfill_score",
            "Predicted quality of each model of the ladder for routed requests.",
            ["model"],
            buckets=SCORE_BUCKETS,
        )

    def _make_counters(self, counter: Callable[..., Counter]) -> None:
        self._requests = counter(
            "crossfill_requests", "Requests for text, chat or not, by outcome.", ["model", "outcome"]
        )
        self._errors = counter("crossfill_errors", "Requests that failed, by whose matter it is.", ["model", "class"])
        self._decisions = counter("crossfill_decisions", "Routing decisions acted on, by reason.", ["model", "reason"])
        self._fallbacks = counter(
            "crossfill_scorer_fallbacks", "Decisions not scored by the configured scorer.", ["reason"]
        )
        self._tokens = counter(
            "crossfill_tokens",
            "Tokens by the workers' count: prompt tokens that were prefilled, that were cached, and completion tokens.",
            ["model", "kind"],
        )
        self._retries = counter(
            "crossfill_retries", "Attempts on a further worker, by what the one before died of.", ["reason"]
        )
        self._disconnects = counter(
            "crossfill_client_disconnects", "Clients that left before the end, by phase.", ["phase"]
        )
        self._repairs = counter(
            "crossfill_stream_repairs", "Faults in workers' streams that were mended, or seen and left.", ["kind"]
        )
        self._heartbeats = counter("crossfill_heartbeats", "Comments written to streams on which nothing came.")
        self._reuse_answers = counter(
            "crossfill_reuse_answers",
            "Answers of workers, errors too, that tell of reuse between models, by what they tell.",
            ["model", "mode", "reason"],
        )
        self._http = counter("crossfill_http_requests", "HTTP requests by route template.", ["route", "status"])

        self._auth_failures = counter(
            "crossfill_auth_failures", "Requests without a valid API key, by what is wrong.", ["reason"]
        )
        for reason in AuthFailure:
            self._auth_failures.labels(reason.value)
        self._keys_reload_failures = counter(
            "crossfill_keys_reload_failures", "Faults that kept a changed keys file from being used."
        )

    def watch_workers(self, workers: Iterable[Worker]) -> None:
        """Show load and state of `workers`, now and after each change.

        Not by functions that are called at a scrape: of several processes only the one that is asked would be seen.
        """
        for worker in workers:
            labels = {"model": worker.model, "worker": worker.id}
            show = partial(_show, self._in_flight.labels(**labels), self._up.labels(**labels))
            show(worker)
            # A histogram from the start: a process then has its files open, whatever becomes of their folder.
            self._duration.labels(worker.model)
            worker.on_change = show

    def count_retry(self, reason: RetryReason) -> None:
        """One more attempt, on a further worker."""
        self._retries.labels(reason.value).inc()

    def count_auth_failure(self, reason: AuthFailure) -> None:
        """A request was refused for its key."""
        self._auth_failures.labels(reason.value).inc()

    def count_keys_reload_failure(self) -> None:
        """The keys file changed and cannot be used."""
        self._keys_reload_failures.inc()

    def count_http(self, route: str | None, status: int) -> None:
        """One HTTP request; `route` is the template of the route, None if there is none."""
        self._http.labels(route or UNMATCHED_ROUTE, status).inc()

    def count_repair(self, kind: Repair) -> None:
        """A fault in a worker's stream."""
        self._repairs.labels(kind.value).inc()

    def count_reuse(self, model: str, outcome: ReuseOutcome) -> None:
        """A worker of `model` told what it made of state that others left."""
        reason = outcome.reason.value if outcome.reason else NO_REASON
        self._reuse_answers.labels(model, outcome.mode.value, reason).inc()

    def count_heartbeat(self) -> None:
        """A comment was written to a silent stream."""
        self._heartbeats.inc()

    def observe_first_token(self, record: RequestRecord, ttft_s: float) -> None:
        """The first content token of a stream is about to leave the router, `ttft_s` after the request's arrival."""
        model = record.model or UNDECIDED
        self._ttft.labels(model, record.reuse.mode.value).observe(ttft_s)
        if record.received_s is None or record.decided_s is None:
            return
        parts = {
            "queue": record.received_s - record.arrived_s,
            "route": record.decided_s - record.received_s,
            "upstream": record.arrived_s + ttft_s - record.decided_s,
        }
        for part, seconds in parts.items():
            self._ttft_parts.labels(model, part).observe(seconds)

    def inter_token(self, record: RequestRecord) -> Callable[[float], None]:
        """What takes the seconds between two arrivals of content in this answer."""
        return self._inter_token.labels(record.model or UNDECIDED).observe

    def observe_generation(self, record: RequestRecord, duration_s: float) -> None:
        """The end of a request for text."""
        model = record.model or UNDECIDED
        self._duration.labels(model).observe(duration_s)
        self._requests.labels(model, (record.outcome or Outcome.INTERNAL_ERROR).value).inc()
        if record.usage is not None:
            for kind in TokenKind:
                self._tokens.labels(model, kind.value).inc(record.usage.of(kind))
        if (error_class := _ERROR_CLASSES.get(record.outcome)) is not None:
            self._errors.labels(model, error_class).inc()
        if record.outcome is Outcome.CLIENT_GONE:
            phase = Phase.STREAMING if record.has_answer_begun else Phase.WAITING
            self._disconnects.labels(phase.value).inc()
        if record.placement is not None:
            self.sessions.observe_placement(record.placement)
        if record.decision is not None:
            self._decisions.labels(model, record.decision.reason.value).inc()
            for name, score in record.decision.scores.items():
                self._scores.labels(name).observe(score)
            if record.decision.fallback is not None:
                self._fallbacks.labels(record.decision.fallback).inc()


class SessionMetrics:
    """The series about what is remembered between requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._placements = Counter("crossfill_placements", "Chosen workers, by reason.", ["reason"], registry=registry)
        self._matched_blocks = Counter(
            "crossfill_affinity_matched_blocks",
            "Prompt blocks that lay on the worker which got them.",
            registry=registry,
        )
        self._prompt_blocks = Counter(
            "crossfill_affinity_prompt_blocks", "Prompt blocks sent to workers.", registry=registry
        )
        self._evictions = Counter(
            "crossfill_affinity_evictions", "Digests forgotten to stay within affinity.mirror_bytes.", registry=registry
        )
        self._pins = Counter(
            "crossfill_session_pins", "Answers to auto, by what they did to a pin.", ["event"], registry=registry
        )
        self._ttft_unknown = Counter(
            "crossfill_expected_ttft_unknown",
            "Expected times to first token left out of a decision, for want of samples.",
            ["model"],
            registry=registry,
        )

    def observe_placement(self, placement: Placement) -> None:
        """The worker that a request went to last."""
        self._placements.labels(placement.reason.value).inc()
        self._matched_blocks.inc(placement.matched_blocks)
        self._prompt_blocks.inc(placement.prompt_blocks)

    def count_evictions(self, count: int) -> None:
        """Digests were forgotten for lack of room."""
        self._evictions.inc(count)

    def count_pin(self, event: PinEvent) -> None:
        """An answer set the pin of its conversation."""
        self._pins.labels(event.value).inc()

    def count_ttft_unknown(self, model: str) -> None:
        """A decision went without the expected time to first token of `model`."""
        self._ttft_unknown.labels(model).inc()


def _show(in_flight: Gauge, up: Gauge, worker: Worker) -> None:
    in_flight.set(worker.in_flight)
    up.set(worker.state is WorkerState.HEALTHY)
