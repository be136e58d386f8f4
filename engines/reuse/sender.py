"""What a worker leaves for others: block masses of exact rows, made records and published in the background.

A row block is published when all 64 of its rows were computed from an exact prefix, in one chunk or in several that
follow one another. Row blocks that a prefix hit cuts have rows that nobody saw, and stay out.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from cache_store.keys import page_keys
from cache_store.records import Kind, record_name
from cache_store.seldom import SeldomLog
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.rows import BLOCK
from engines.reuse.background import Background
from engines.reuse.mass_records import pack_masses
from engines.reuse.metrics import Unpublished

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cache_store.client.fetch import Fetch, LayerRecords
    from cache_store.client.publish import Publisher
    from cache_store.namespace import Namespace
    from cache_store.records import Record
    from engines.reuse.metrics import ReuseMetrics

_log = logging.getLogger("crossfill.reuse")

_LOG_EVERY_S = 60.0
# Requests whose chunks have not all come; beyond, the one heard of least recently is forgotten.
_MOST_UNFINISHED = 256


@dataclass(frozen=True)
class Captured:
    """The masses of one chunk of one request.

    Attributes:
        request_id: that chunks of one prompt have in common.
        namespace: where they are published.
        tokens: of the prompt, at least to the end of this chunk.
        start, stop: positions of the rows, [start, stop).
        is_last: whether no chunk follows.
        masses: by layer, of these rows.
        stored: what the store had when the request arrived.
    """

    request_id: str
    namespace: Namespace
    tokens: Sequence[int]
    start: int
    stop: int
    is_last: bool
    masses: Mapping[int, BlockMass]
    stored: Fetch[LayerRecords]

    @property
    def size_bytes(self) -> int:
        """Of the masses."""
        return sum(mass.mass.numel() * 4 for mass in self.masses.values())

    @property
    def blocks(self) -> int:
        """Row blocks that have all their rows in this chunk."""
        return max(0, self.stop // BLOCK - -(-self.start // BLOCK))


@dataclass
class _Cut:
    """The first rows of a row block that the next chunk goes on with: sums by layer [H, C], of rows up to `stop`."""

    stop: int
    masses: dict[int, torch.Tensor] = field(default_factory=dict)


class Sender(Background[Captured]):
    """Takes captured masses from the computation and publishes them on a thread of its own.

    Args:
        publisher: of the store.
        most_bytes: of masses that wait; more are dropped and counted.
        wait_s: most that is waited for what the store had, on the thread.
        shard: which part of its layers' heads this process computes, and of how many.
    """

    def __init__(
        self,
        publisher: Publisher,
        metrics: ReuseMetrics,
        *,
        most_bytes: int,
        wait_s: float,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self._shard = shard
        self._publisher = publisher
        self._metrics = metrics
        self._wait_s = wait_s
        self._failures = SeldomLog(_log, _LOG_EVERY_S, time.monotonic)
        self._cuts: OrderedDict[str, _Cut] = OrderedDict()
        super().__init__("crossfill-capture", most_bytes)

    def offer(self, captured: Captured) -> bool:
        """Publish these soon; whether there is room for them. Never waits."""
        fits = super().offer(captured)
        if not fits:
            self._metrics.count_unpublished(Unpublished.QUEUE_FULL, captured.blocks)
        return fits

    def work(self, captured: Captured) -> None:
        """Publish them; what fails is counted and logged."""
        try:
            self._publish(captured)
        except Exception as error:  # noqa: BLE001 - the thread serves all requests
            self._metrics.count_unpublished(Unpublished.FAILED, captured.blocks)
            self._failures.warn(f"{captured.request_id}: masses were not published: {error!r}")

    def _publish(self, captured: Captured) -> None:
        whole = self._whole_blocks(captured)
        blocks = next(iter(whole.values())).blocks.tolist() if whole else []
        if not blocks:
            return
        coverage = captured.stored.coverage(self._wait_s)
        if coverage is None:
            # Without knowing of flushes nothing may be stored: it could be older than one.
            self._metrics.count_unpublished(Unpublished.STORE_UNKNOWN, len(blocks))
            return
        names = frozenset(record_name(Kind.MASS, layer, *self._shard) for layer in whole)
        new = [block for block in blocks if not names <= coverage.records[block].keys()]
        if not new:
            return
        tokens = captured.tokens[: (blocks[-1] + 1) * BLOCK]
        digests = [page.tokens_digest for page in page_keys(captured.namespace.scope, tokens)]
        records: dict[int, list[Record]] = {block: [] for block in new}
        for layer, mass in whole.items():
            own = [digests[block] for block in new]
            for record in pack_masses(of_blocks(mass, new), layer, own, self._shard):
                # The second dimension is the number of column blocks up to the diagonal.
                records[record.shape[1] - 1].append(record)
        reason = self._publisher.offer(captured.namespace, tokens, records, flushes=coverage.flushes)
        if reason is None:
            size = sum(len(record.payload) for page in records.values() for record in page)
            self._metrics.count_published(len(new), size)

    def _whole_blocks(self, captured: Captured) -> dict[int, BlockMass]:
        """Masses of the row blocks that this chunk completes, by layer; remembers what it leaves cut."""
        before = self._cuts.pop(captured.request_id, None)
        if before is not None and before.stop != captured.start:
            before = None
        after = _Cut(captured.stop)
        whole = {}
        for layer, of_chunk in captured.masses.items():
            mass = of_chunk if before is None else _joined(of_chunk, before.masses[layer])
            complete = mass.totals == BLOCK
            whole[layer] = _of_mask(mass, complete)
            starts_whole = captured.start <= (captured.stop - 1) // BLOCK * BLOCK or before is not None
            if not captured.is_last and not bool(complete[-1]) and starts_whole:
                after.masses[layer] = mass.mass[:, -1].clone()
        if after.masses:
            self._cuts[captured.request_id] = after
            while len(self._cuts) > _MOST_UNFINISHED:
                self._cuts.popitem(last=False)
        return whole


def is_wanted(start: int, stop: int, is_last: bool, layers: Collection[int], stored: Fetch[LayerRecords]) -> bool:
    """Whether masses of rows [start, stop) of a prompt may complete a row block that the store lacks, as far as known.

    Args:
        is_last: whether no chunk follows.
        layers: that are published.
        stored: what the store had when the request arrived; not waited for.
    """
    last = (stop // BLOCK if is_last else -(-stop // BLOCK)) - 1
    touched = range(start // BLOCK, last + 1)
    coverage = stored.coverage()
    if coverage is None:
        return bool(touched)
    names = frozenset(record_name(Kind.MASS, layer) for layer in layers)
    # Of the last, incomplete page of a prompt nothing is ever left.
    return any(block < len(coverage.records) and not names <= coverage.records[block].keys() for block in touched)


def _joined(mass: BlockMass, earlier: torch.Tensor) -> BlockMass:
    """With the earlier rows' masses [H, C] of its first row block added."""
    masses, totals = mass.mass.clone(), mass.totals.clone()
    masses[:, 0, : earlier.shape[1]] += earlier
    # Every row's masses sum to one.
    totals[0] += earlier[0].sum().round()
    return BlockMass(masses, mass.blocks, totals)


def _of_mask(mass: BlockMass, kept: torch.Tensor) -> BlockMass:
    return BlockMass(mass.mass[:, kept].contiguous(), mass.blocks[kept].contiguous(), mass.totals[kept].contiguous())


def of_blocks(mass: BlockMass, blocks: Sequence[int]) -> BlockMass:
    """The masses of these row blocks alone."""
    return _of_mask(mass, torch.isin(mass.blocks, torch.tensor(blocks, dtype=mass.blocks.dtype)))
