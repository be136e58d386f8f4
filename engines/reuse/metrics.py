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


class MapMissed(StrEnum):
    """Why a layer was not computed by the sender's map, but guided, or densely."""

    NO_POOL = "no_pool"
    POOL_REMOTE = "pool_remote"
    POOL_UNAVAILABLE = "pool_unavailable"
    LATE = "late"
    ABSENT = "absent"
    TOO_DENSE = "too_dense"
    GONE = "gone"
    KERNEL = "kernel"


class Unpublished(StrEnum):
    """Why masses that were captured were not handed to the store."""

    QUEUE_FULL = "queue_full"
    STORE_UNKNOWN = "store_unknown"
    FAILED = "failed"


class Unpacked(StrEnum):
    """Why a row block of a layer whose queries and keys were copied was not packed into the block pool."""

    CUT = "cut"
    QUEUE_FULL = "queue_full"
    POOL_FULL = "pool_full"
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
        self._map_layers = counter(
            "map_layers", "Layers of chunks that maps were to compute: `mapped`, or why they were not.", ("outcome",)
        )
        self._mapped_rows = counter("mapped_rows", "Rows of layers whose attention came from a map.")
        self._skipped = counter("skipped_query_rows", "Rows of layers whose queries were not computed.")
        self._published = counter("published_row_blocks", "Row blocks whose masses were handed to the store.")
        self._published_bytes = counter("published_bytes", "Bytes of records of such row blocks.")
        self._unpublished = counter(
            "unpublished_row_blocks", "Row blocks whose masses were captured and dropped, by reason.", ("reason",)
        )
        self._packed = counter(
            "packed_row_blocks", "Row blocks of layers whose map was packed and handed to the store."
        )
        self._packed_slots = counter("packed_slots", "Slots of the block pool that were written.")
        self._packing = counter("packing_seconds", "Time in which that was done, in the background.")
        self._unpacked = counter(
            "unpacked_row_blocks",
            "Row blocks of layers that were copied to be packed and were not, by reason.",
            ("reason",),
        )
        self._hooks = counter("hook_failures", "Hooks into SGLang that failed; the request goes on without.", ("hook",))
        self._waited = counter("waited_seconds", "Time that requests whose turn had come waited for the store.")
        self._density = Histogram(
            "crossfill_reuse_density",
            "Kept blocks of guided requests as a share of the causal ones.",
            buckets=_DENSITIES,
            registry=registry,
        )

    def count_planned(self, mode: str, blocks: int, density: float) -> None:
        """A request is prefilled with the help of others' masses or maps."""
        self._requests.labels(mode, "none").inc()
        self._blocks.labels(mode).inc(blocks)
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

    def count_mapped(self, rows: int) -> None:
        """A map computed so many rows of a chunk in one layer."""
        self._map_layers.labels("mapped").inc()
        self._mapped_rows.inc(rows)

    def count_map_missed(self, reason: MapMissed) -> None:
        """A map was to compute rows of a chunk in one layer, and did not."""
        self._map_layers.labels(reason.value).inc()

    def count_skipped(self, rows: int) -> None:
        """So many rows of one layer have no queries."""
        self._skipped.inc(rows)

    def count_published(self, blocks: int, size_bytes: int) -> None:
        """Handed to the store's queue."""
        self._published.inc(blocks)
        self._published_bytes.inc(size_bytes)

    def count_unpublished(self, reason: Unpublished, blocks: int) -> None:
        """Captured for nothing."""
        self._unpublished.labels(reason.value).inc(blocks)

    def count_packed(self, blocks: int) -> None:
        """Row blocks of layers whose handles went to the store's queue."""
        self._packed.inc(blocks)

    def count_packing(self, slots: int, seconds: float) -> None:
        """Slots of one layer were written."""
        self._packed_slots.inc(slots)
        self._packing.inc(seconds)

    def count_unpacked(self, reason: Unpacked, blocks: int) -> None:
        """Row blocks of layers that were copied for nothing."""
        self._unpacked.labels(reason.value).inc(blocks)

    def count_hook_failure(self, hook: str) -> None:
        """A defect of ours; the log has it."""
        self._hooks.labels(hook).inc()

    def count_wait(self, seconds: float) -> None:
        """A request waited for the store at admission."""
        self._waited.inc(seconds)
