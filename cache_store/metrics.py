"""Prometheus metrics of the store. Label values come from enums, so the number of series is bounded."""

from __future__ import annotations

import time
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from cache_store.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import CollectorRegistry

    from cache_store.backends.protocol import BackendStats, Published, Reclaimed
    from cache_store.errors import RecordFault

# From a dictionary in memory (tens of microseconds) to a deadline of seconds.
LATENCY_BUCKETS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)


class Operation(StrEnum):
    """What was asked of the store."""

    OPEN = "open"
    MATCH = "match"
    CHECK = "check"
    READ = "read"
    PUBLISH = "publish"
    LEASE = "lease"
    FLUSH = "flush"
    EVICT = "evict"
    QUARANTINE = "quarantine"
    STATS = "stats"
    COMPACT = "compact"
    ANCHORS = "anchors"


class Lookup(StrEnum):
    """What a page of a prefix was found to be. `collision`: stored, but of other tokens, which counts as a miss."""

    HIT = "hit"
    ABSENT = "absent"
    COLLISION = "collision"


class Drop(StrEnum):
    """Why pages were never handed to the store."""

    QUEUE_FULL = "queue_full"
    TOO_LARGE = "too_large"
    UNAVAILABLE = "unavailable"
    CLOSED = "closed"
    FAILED = "failed"


class FetchEnd(StrEnum):
    """How a fetch ended.

    `busy`: refused or cut short, as many were in flight or held as much as may be; `flushed`: the store was flushed
    meanwhile; `failed`: a defect, which is logged.
    """

    DONE = "done"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    FLUSHED = "flushed"
    FAILED = "failed"


class StoreMetrics:
    """The store's series, on a registry given by the caller."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._make_gauges(partial(Gauge, registry=registry, multiprocess_mode="mostrecent"))
        self._make_counters(partial(Counter, registry=registry))
        self._seconds = Histogram(
            "crossfill_store_operation_seconds",
            "Time of one call of the backend.",
            ["operation"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )

    def _make_gauges(self, gauge: Callable[..., Gauge]) -> None:
        self._bytes = gauge("crossfill_store_bytes", "Bytes that count towards the store's budget.")
        self._pages = gauge("crossfill_store_pages", "Pages that can be found.")
        self._leased = gauge("crossfill_store_leased_pages", "Pages that may not be evicted now.")

    def _make_counters(self, counter: Callable[..., Counter]) -> None:
        self._lookups = counter("crossfill_store_lookup_pages", "Pages looked up, by what was found.", ["result"])
        self._records_read = counter("crossfill_store_records_read", "Records read and found intact.")
        self._records_absent = counter("crossfill_store_records_absent", "Records that were gone when they were read.")
        self._quarantined = counter(
            "crossfill_store_quarantined_records", "Records taken away, by what is wrong with them.", ["fault"]
        )
        self._published = counter("crossfill_store_published_pages", "Pages stored.")
        self._published_bytes = counter("crossfill_store_published_bytes", "Bytes stored.")
        self._dropped = counter("crossfill_store_dropped_pages", "Pages that were not stored, by reason.", ["reason"])
        self._evicted = counter("crossfill_store_evicted_pages", "Pages evicted to make room.")
        self._evicted_bytes = counter("crossfill_store_evicted_bytes", "Bytes evicted to make room.")
        self._flushed = counter("crossfill_store_flushed_pages", "Pages that flushes made invisible.")
        self._fetches = counter("crossfill_store_fetches", "Fetches of requests, by how they ended.", ["end"])
        self._unavailable = counter(
            "crossfill_store_unavailable", "Calls that the store did not answer, by reason.", ["operation", "reason"]
        )

    @contextmanager
    def timed(self, operation: Operation) -> Iterator[None]:
        """Measure a call, and count it if the store did not answer."""
        started_s = time.perf_counter()
        try:
            yield
        except StoreUnavailableError as error:
            self.count_unavailable(operation, error.reason)
            raise
        finally:
            self._seconds.labels(operation.value).observe(time.perf_counter() - started_s)

    def count_unavailable(self, operation: Operation, reason: str) -> None:
        """The store did not do what was asked; `reason` is one of `StoreUnavailableError`."""
        self._unavailable.labels(operation.value, reason).inc()

    def count_lookups(self, hits: int, absent: int, collisions: int) -> None:
        """Pages of one prefix."""
        self._lookups.labels(Lookup.HIT.value).inc(hits)
        self._lookups.labels(Lookup.ABSENT.value).inc(absent)
        self._lookups.labels(Lookup.COLLISION.value).inc(collisions)

    def count_read(self, intact: int, absent: int) -> None:
        """Records that were asked for; refused ones are counted where they are quarantined."""
        self._records_read.inc(intact)
        self._records_absent.inc(absent)

    def count_quarantined(self, fault: RecordFault) -> None:
        """A record was not what it should be."""
        self._quarantined.labels(fault.value).inc()

    def count_published(self, published: Published) -> None:
        """What became of a publish."""
        self._published.inc(published.pages)
        self._published_bytes.inc(published.size_bytes)
        self._count_dropped({reason.value: pages for reason, pages in published.refused.items()})
        self._evicted.inc(published.evicted_pages)
        self._evicted_bytes.inc(published.evicted_bytes)

    def count_dropped(self, reason: Drop, pages: int) -> None:
        """Pages that never reached the store."""
        self._count_dropped({reason.value: pages})

    def _count_dropped(self, pages: Mapping[str, int]) -> None:
        for reason, number in pages.items():
            self._dropped.labels(reason).inc(number)

    def count_evicted(self, reclaimed: Reclaimed) -> None:
        """What an operator's eviction took away."""
        self._evicted.inc(reclaimed.pages)
        self._evicted_bytes.inc(reclaimed.size_bytes)

    def count_flushed(self, reclaimed: Reclaimed) -> None:
        """What a flush made invisible."""
        self._flushed.inc(reclaimed.pages)

    def count_fetch(self, end: FetchEnd) -> None:
        """A request's fetch ended."""
        self._fetches.labels(end.value).inc()

    def show(self, stats: BackendStats) -> None:
        """Set the gauges; whoever asks the store for statistics calls this."""
        self._bytes.set(stats.size_bytes)
        self._pages.set(sum(scope.pages for scope in stats.scopes))
        self._leased.set(stats.leased_pages)
