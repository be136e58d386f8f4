"""Packs a sender's attention into the block pool and publishes handles, on its own thread (MapFlow, Algorithm 1).

What the computation does is to copy queries and keys. Row blocks that lie in two chunks have rows whose queries are
gone when the others come, and are left out.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cache_store.errors import PoolRefusedError, StoreError
from cache_store.keys import page_keys
from cache_store.pool.handles import join
from cache_store.records import Kind, record_name
from cache_store.seldom import SeldomLog
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.rows import BLOCK, rows_at
from crossfill_kernels.select_blocks import select_blocks
from engines.errors import MapRecordError
from engines.reuse.background import Background
from engines.reuse.map_records import pack_maps, unpack_maps
from engines.reuse.map_storage import map_storage
from engines.reuse.metrics import Unpacked
from engines.reuse.sender import of_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cache_store.client.fetch import Fetch, LayerRecords
    from cache_store.client.publish import Publisher
    from cache_store.coverage import Coverage
    from cache_store.namespace import Namespace
    from cache_store.pool.handles import Handles
    from cache_store.pool.shared_memory import SharedMemoryPool
    from cache_store.records import Record
    from cache_store.store import Store
    from crossfill_kernels.blocks import BlockMass
    from engines.reuse.metrics import ReuseMetrics

_log = logging.getLogger("crossfill.reuse")

_LOG_EVERY_S = 60.0


@dataclass(frozen=True)
class CopiedLayer:
    """What one layer's attention of a chunk was computed from, on the host.

    Attributes:
        query: [n, H, d] of the chunk's rows.
        keys: [T, H_kv, d] of positions 0 … T - 1, the last row's included.
        mass: of these rows.
        scale: factor on the scores.
    """

    query: torch.Tensor
    keys: torch.Tensor
    mass: BlockMass
    scale: float


@dataclass(frozen=True)
class CapturedMaps:
    """One chunk of one request, of exact rows.

    Attributes:
        request_id: for messages.
        namespace: where handles are published.
        tokens: of the prompt, at least to the end of this chunk.
        start, stop: positions of the rows, [start, stop).
        layers: copies, by layer.
        stored: what the store had when the request arrived.
    """

    request_id: str
    namespace: Namespace
    tokens: Sequence[int]
    start: int
    stop: int
    layers: Mapping[int, CopiedLayer]
    stored: Fetch[LayerRecords]

    @property
    def size_bytes(self) -> int:
        """Of the copies."""
        return sum(one.query.nbytes + one.keys.nbytes for one in self.layers.values())

    @property
    def blocks(self) -> range:
        """Row blocks that have all their rows in this chunk."""
        return range(-(-self.start // BLOCK), self.stop // BLOCK)


class MapSender(Background[CapturedMaps]):
    """Takes copies from the computation.

    Args:
        pool: of this machine.
        store: in which it is looked up what is packed already.
        publisher: of the store.
        top_p: by layer, the share of attention mass that the blocks of each head reach.
        renormalise: make what is kept of a row sum to 1.
        most_bytes: of copies that wait; more are dropped and counted.
        wait_s: most that is waited for what the store had, on the thread.
        shard: which part of its layers' heads this process computes, and of how many.
    """

    def __init__(  # noqa: PLR0913  # what it reads, what it writes, and four settings
        self,
        pool: SharedMemoryPool,
        store: Store,
        publisher: Publisher,
        metrics: ReuseMetrics,
        *,
        top_p: Mapping[int, float],
        renormalise: bool,
        most_bytes: int,
        wait_s: float,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self._shard = shard
        self.layers = frozenset(top_p)
        self._pool, self._storage = pool, map_storage(pool)
        self._store, self._publisher, self._metrics = store, publisher, metrics
        self._top_p, self._renormalise = top_p, renormalise
        self._wait_s = wait_s
        self._failures = SeldomLog(_log, _LOG_EVERY_S, time.monotonic)
        super().__init__("crossfill-pack", most_bytes)

    def offer(self, captured: CapturedMaps) -> bool:
        """Pack and publish these soon; whether there is room for them. Never waits."""
        fits = super().offer(captured)
        if not fits:
            self._drop(Unpacked.QUEUE_FULL, captured)
        return fits

    def work(self, captured: CapturedMaps) -> None:
        """Publish them; what fails is counted and logged."""
        try:
            self._publish(captured)
        except PoolRefusedError as error:
            self._drop(Unpacked.POOL_FULL, captured)
            self._failures.warn(f"{captured.request_id}: maps were not packed: {error}")
        except Exception as error:  # noqa: BLE001 - the thread serves all requests
            self._drop(Unpacked.FAILED, captured)
            self._failures.warn(f"{captured.request_id}: maps were not published: {error!r}")

    def _publish(self, captured: CapturedMaps) -> None:
        blocks = captured.blocks
        touched = -(-captured.stop // BLOCK) - captured.start // BLOCK
        self._metrics.count_unpacked(Unpacked.CUT, (touched - len(blocks)) * len(captured.layers))
        if not blocks:
            return
        coverage = captured.stored.coverage(self._wait_s)
        if coverage is None:
            # Without knowing of flushes nothing may be stored: it could be older than one.
            self._drop(Unpacked.STORE_UNKNOWN, captured)
            return
        tokens = captured.tokens[: blocks.stop * BLOCK]
        digests = [page.tokens_digest for page in page_keys(captured.namespace.scope, tokens)]
        records: dict[int, list[Record]] = {}
        taken: list[Handles] = []
        try:
            for layer, copied in captured.layers.items():
                usable = self._usable(captured.namespace, coverage, layer, blocks, copied.query.shape[1])
                new = [block for block in blocks if block not in usable]
                if new:
                    taken.append(self._pack(captured, layer, new, digests, records))
            if not records:
                return
            if self._publisher.offer(captured.namespace, tokens, records, flushes=coverage.flushes) is not None:
                raise StoreError("the queue of the store is full")
        except BaseException:
            if taken:
                self._pool.free(join(taken))
            raise
        self._metrics.count_packed(sum(map(len, records.values())))

    def _pack(
        self,
        captured: CapturedMaps,
        layer: int,
        blocks: Sequence[int],
        digests: Sequence[bytes],
        records: dict[int, list[Record]],
    ) -> Handles:
        """Pack row blocks of one layer, and add their records; the slots."""
        started_s = time.perf_counter()
        copied = captured.layers[layer]
        index = select_blocks(of_blocks(copied.mass, blocks), top_p=self._top_p[layer])
        positions = torch.cat([torch.arange(block * BLOCK, (block + 1) * BLOCK) for block in blocks])
        handles = self._pool.allocate(int(index.offsets[-1]))
        try:
            packed = pack_map(
                copied.query[positions - captured.start].contiguous(),
                copied.keys,
                slice(0, copied.keys.shape[0]),
                rows_at(positions),
                index,
                scale=copied.scale,
                storage=self._storage,
                slot_ids=torch.from_numpy(handles.slots),
                renormalise=self._renormalise,
            )
            self._pool.publish(handles)
        except BaseException:
            self._pool.free(handles)
            raise
        for record in pack_maps(packed, handles, layer, [digests[block] for block in blocks], self._shard):
            # The second dimension is the number of column blocks up to the diagonal.
            records.setdefault(record.shape[1] - 1, []).append(record)
        self._metrics.count_packing(len(handles), time.perf_counter() - started_s)
        return handles

    def _usable(
        self, namespace: Namespace, coverage: Coverage, layer: int, blocks: range, heads: int
    ) -> frozenset[int]:
        """Row blocks whose map of this layer is in the store and still in the pool."""
        name = record_name(Kind.MAP, layer, *self._shard)
        there = [block for block in blocks if name in coverage.records[block]]
        found = self._store.read(namespace, [(coverage.pages[block], name) for block in there]) if there else []
        usable = set()
        for block, record in zip(there, found, strict=True):
            try:
                stored = unpack_maps([{block: record}], heads) if record is not None else None
            except MapRecordError:
                continue
            if stored is not None and self._pool.verify(stored.handles).usable:
                usable.add(block)
        return frozenset(usable)

    def _drop(self, reason: Unpacked, captured: CapturedMaps) -> None:
        self._metrics.count_unpacked(reason, len(captured.blocks) * len(captured.layers))
