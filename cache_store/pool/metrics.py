"""Gauges of a block pool, as one of its processes sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Gauge

if TYPE_CHECKING:
    from cache_store.pool.shared_memory import SharedMemoryPool


class PoolMetrics:
    """Shows a pool's statistics. What is counted since the pool was made is a gauge too: all its processes count it."""

    def __init__(self, pool: SharedMemoryPool, registry: CollectorRegistry = REGISTRY) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"crossfill_pool_{name}", text, labels, registry=registry, multiprocess_mode="mostrecent")

        self._pool = pool
        self._slots = gauge("slots", "Slots by what they are: free, writing, published, retrieved.", ("state",))
        self._bytes = gauge("bytes", "Shared memory that the pool takes, however full it is.")
        self._evicted = gauge("evicted_slots", "Slots that were given to others, by what they were.", ("kind",))
        self._stale = gauge("stale_handles", "Handles that were found to stand for nothing any more.", ("reason",))
        self._refused = gauge("refused_allocations", "Allocations that could not be met.", ("reason",))

    def refresh(self) -> None:
        """Look at the pool.

        Raises:
            StoreUnavailableError: it is closed, or locked for too long.
        """
        stats = self._pool.stats()
        for state in ("free", "writing", "published", "retrieved"):
            self._slots.labels(state).set(getattr(stats, state))
        self._bytes.set(stats.size_bytes)
        for gauge, counted in (
            (self._evicted, stats.evicted),
            (self._stale, stats.stale),
            (self._refused, stats.refused),
        ):
            for label, count in counted.items():
                gauge.labels(label.value).set(count)
