"""Prometheus metrics of the router. Label values come from the configuration or an enum, so series are bounded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from router.record import Outcome
from router.workers import WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry

    from router.record import RequestRecord
    from router.workers import Worker

UNMATCHED_ROUTE = "other"
UNDECIDED = "none"

# 76 equal ratios from 50 ms to 2 s are 5 % each: a change of 10 % in a median stays visible.
_FINE_STEPS = 76
TTFT_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.03, 0.04),
    *(round(0.05 * 40 ** (step / _FINE_STEPS), 4) for step in range(_FINE_STEPS + 1)),
    *(2.2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 45, 60, 90, 120),
)
DURATION_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5),
    *(7.5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 1800),
)


class RouterMetrics:
    """The router's series, on a registry given by the caller."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._ttft = Histogram(
            "crossfill_ttft_seconds",
            "Arrival at the router to the first content token of a streamed answer.",
            ["model", "reuse"],
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._duration = Histogram(
            "crossfill_request_duration_seconds",
            "Arrival of a chat request at the router to the end of its answer.",
            ["model"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._requests = Counter(
            "crossfill_requests", "Chat requests by outcome.", ["model", "outcome"], registry=registry
        )
        self._decisions = Counter(
            "crossfill_decisions", "Routing decisions acted on, by reason.", ["model", "reason"], registry=registry
        )
        self._retries = Counter(
            "crossfill_retries",
            "Attempts on a further worker, by what the one before died of.",
            ["reason"],
            registry=registry,
        )
        self._disconnects = Counter(
            "crossfill_client_disconnects", "Clients that left before the end, by phase.", ["phase"], registry=registry
        )
        self._fallbacks = Counter(
            "crossfill_scorer_fallbacks",
            "Decisions not scored by the configured scorer.",
            ["reason"],
            registry=registry,
        )
        self._http = Counter(
            "crossfill_http_requests", "HTTP requests by route template.", ["route", "status"], registry=registry
        )
        self._in_flight = Gauge(
            "crossfill_in_flight_requests", "Requests that a worker is serving.", ["model", "worker"], registry=registry
        )
        self._up = Gauge(
            "crossfill_worker_up", "1 if the worker is healthy, else 0.", ["model", "worker"], registry=registry
        )

    def watch_workers(self, workers: Iterable[Worker]) -> None:
        """Read load and state of `workers` at each scrape."""
        for worker in workers:
            labels = {"model": worker.model, "worker": worker.id}
            self._in_flight.labels(**labels).set_function(partial(_load, worker))
            self._up.labels(**labels).set_function(partial(_is_up, worker))

    def count_retry(self, reason: str) -> None:
        """One more attempt, on a further worker."""
        self._retries.labels(reason).inc()

    def count_http(self, route: str | None, status: int) -> None:
        """One HTTP request; `route` is the template of the route, None if there is none."""
        self._http.labels(route or UNMATCHED_ROUTE, status).inc()

    def observe_first_token(self, record: RequestRecord, ttft_s: float) -> None:
        """The first content token of a stream left the router."""
        self._ttft.labels(record.model or UNDECIDED, "none").observe(ttft_s)

    def observe_chat(self, record: RequestRecord, duration_s: float) -> None:
        """The end of a chat request."""
        model = record.model or UNDECIDED
        self._duration.labels(model).observe(duration_s)
        self._requests.labels(model, (record.outcome or Outcome.INTERNAL_ERROR).value).inc()
        if record.outcome is Outcome.CLIENT_GONE:
            self._disconnects.labels("waiting" if record.status is None else "streaming").inc()
        if record.decision is not None:
            self._decisions.labels(model, record.decision.reason.value).inc()
            if record.decision.fallback is not None:
                self._fallbacks.labels(record.decision.fallback).inc()


def _load(worker: Worker) -> float:
    return worker.in_flight


def _is_up(worker: Worker) -> float:
    return 1.0 if worker.state is WorkerState.HEALTHY else 0.0
