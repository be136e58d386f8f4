"""Counters of reuse within a worker; like `engines.metrics`, to be imported in the scheduler process only."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

if TYPE_CHECKING:
    from engines.reuse.refusal import Refusal

_DENSITIES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Missed(StrEnum):
    """Why a layer of a guided request was computed densely after all."""

    LATE = "late"
    GONE = "gone"
    MALFORMED = "malformed"
    KERNEL = "kernel"


class Unpublished(StrEnum):
    """Why masses that were captured were not handed to the store."""

    QUEUE_FULL = "queue_full"
    STORE_UNKNOWN = "store_unknown"
    FAILED = "failed"


class ReuseMetrics:
    """What a worker took from others and left for them."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"crossfill_reuse_{name}", text, labels, registry=registry)

        self._requests = counter(
            "requests",
            "Requests by how they were prefilled; `reason` says why not guided.",
            ("mode", "reason"),
        )
        self._blocks = counter(
            "row_blocks", "Row blocks of prompts by how they were prefilled: guided, or dense by reason.", ("outcome",)
        )
        self._layers = counter("missed_layers", "Layers of guided chunks computed densely, by reason.", ("reason",))
        self._published = counter("published_row_blocks", "Row blocks whose masses were handed to the store.")
        self._published_bytes = counter("published_bytes", "Bytes of records of such row blocks.")
        self._unpublished = counter(
            "unpublished_row_blocks", "Row blocks whose masses were captured and dropped, by reason.", ("reason",)
        )
        self._hooks = counter("hook_failures", "Hooks into SGLang that failed; the request goes on without.", ("hook",))
        self._waited = counter("waited_seconds", "Time that requests whose turn had come waited for the store.")
        self._density = Histogram(
            "crossfill_reuse_density",
            "Kept blocks of guided requests as a share of the causal ones.",
            buckets=_DENSITIES,
            registry=registry,
        )

    def count_guided(self, blocks: int, density: float) -> None:
        """A request is prefilled with the help of others' masses."""
        self._requests.labels("guided", "none").inc()
        self._blocks.labels("guided").inc(blocks)
        self._density.observe(density)

    def count_refused(self, mode: str, reason: Refusal, blocks: int) -> None:
        """A request is prefilled densely; `blocks` are those that it computes."""
        self._requests.labels(mode, reason.value).inc()
        self._blocks.labels(reason.value).inc(blocks)

    def count_uncovered(self, blocks: int) -> None:
        """Row blocks of a guided request that nobody left masses for."""
        self._blocks.labels("uncovered").inc(blocks)

    def count_missed(self, reason: Missed) -> None:
        """One layer of one chunk."""
        self._layers.labels(reason.value).inc()

    def count_published(self, blocks: int, size_bytes: int) -> None:
        """Handed to the store's queue."""
        self._published.inc(blocks)
        self._published_bytes.inc(size_bytes)

    def count_unpublished(self, reason: Unpublished, blocks: int) -> None:
        """Captured for nothing."""
        self._unpublished.labels(reason.value).inc(blocks)

    def count_hook_failure(self, hook: str) -> None:
        """A defect of ours; the log has it."""
        self._hooks.labels(hook).inc()

    def count_wait(self, seconds: float) -> None:
        """A request waited for the store at admission."""
        self._waited.inc(seconds)
