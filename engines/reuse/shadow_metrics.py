"""Counters of shadow prefills; like `engines.metrics`, to be imported in the scheduler process only."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engines.reuse.drift import Comparison

_DIVERGENCES = (1e-5, 1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Dropped(StrEnum):
    """Why a request that was drawn was not compared."""

    TOO_LONG = "too_long"
    QUEUE_FULL = "queue_full"
    LATE = "late"
    BUSY = "busy"
    ABORTED = "aborted"
    WEIGHTS_CHANGED = "weights_changed"
    FAILED = "failed"


class ShadowMetrics:
    """What was compared, and what came of it.

    Args:
        senders: of the worker's pairs; each has its series from the start.
    """

    def __init__(self, senders: Iterable[str], registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"crossfill_reuse_{name}", text, labels, registry=registry)

        self._prefills = counter(
            "shadow_prefills", "Guided requests drawn for a comparison, by what came of it.", ("result", "reason")
        )
        self._agreements = counter(
            "shadow_agreements", "Comparisons in which both prefills hold the same token most likely.", ("sender",)
        )
        self._seconds = counter("shadow_seconds", "Time from the start of a shadow prefill to its logits.")
        self._divergence = Histogram(
            "crossfill_reuse_shadow_divergence_nats",
            "KL divergence of the next token after a guided prefill from that after a dense one.",
            ["sender"],
            buckets=_DIVERGENCES,
            registry=registry,
        )
        self._drifted = Gauge(
            "crossfill_reuse_drifted",
            "1 if a pair was taken out of use because its answers drifted.",
            ["sender"],
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        for sender in senders:
            self._drifted.labels(sender).set(0)
            self._agreements.labels(sender)
            self._divergence.labels(sender)

    def count_compared(self, sender: str, comparison: Comparison, seconds: float) -> None:
        """A shadow prefill was done, in so many seconds."""
        self._prefills.labels("compared", "none").inc()
        self._divergence.labels(sender).observe(comparison.divergence)
        self._seconds.inc(seconds)
        if comparison.agrees:
            self._agreements.labels(sender).inc()

    def count_dropped(self, reason: Dropped) -> None:
        """A request that was drawn is not compared."""
        self._prefills.labels("dropped", reason.value).inc()

    def note_drifted(self, sender: str) -> None:
        """A pair was taken out of use."""
        self._drifted.labels(sender).set(1)
