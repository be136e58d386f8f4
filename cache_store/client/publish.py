"""Publishes in the background; what does not fit the queue is dropped, with a reason that is counted."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cache_store.errors import StoreError
from cache_store.metrics import Drop
from cache_store.records import HEADER_BYTES
from cache_store.seldom import SeldomLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cache_store.backends.protocol import PageWrite
    from cache_store.namespace import Namespace
    from cache_store.records import Record
    from cache_store.store import Store

_log = logging.getLogger("crossfill.store")

_LOG_EVERY_S = 60.0


@dataclass(frozen=True)
class _Job:
    namespace: Namespace
    tokens: Sequence[int]
    records: Mapping[int, Sequence[Record]]
    flushes: int | None
    size_bytes: int


class Publisher:
    """Takes pages from whoever computed them and hands them to the store on a thread of its own.

    At most `max_bytes` of records wait or are being written; jobs of one namespace that wait together, and were
    computed between the same flushes, are written together, up to `batch_bytes`. Safe to use from several threads.
    Nothing but `close` and `drain` waits.
    """

    def __init__(
        self,
        store: Store,
        max_bytes: int = 64 * 2**20,
        *,
        batch_bytes: int = 8 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._batch_bytes = batch_bytes
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._held_bytes = 0
        self._closed = False
        self._failures = SeldomLog(_log, _LOG_EVERY_S, clock)
        self._thread = threading.Thread(target=self._work, name="crossfill-publish", daemon=True)
        self._thread.start()

    def offer(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        records: Mapping[int, Sequence[Record]],
        *,
        flushes: int | None = None,
    ) -> Drop | None:
        """Publish records by index of their page within `tokens`, soon; why not, if not.

        Tokens and records must not change afterwards. `flushes` as for `Store.publish`.
        """
        size_bytes = sum(HEADER_BYTES + len(record.payload) for page in records.values() for record in page)
        job = _Job(namespace, tokens, records, flushes, size_bytes)
        with self._changed:
            reason = self._refusal(size_bytes)
            if reason is None:
                self._queue.append(job)
                self._held_bytes += size_bytes
                self._changed.notify_all()
        if reason is not None:
            self._store.metrics.count_dropped(reason, len(records))
        return reason

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was offered is written or dropped; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held_bytes and not self._queue, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Take nothing more, and write what waits; what is left after `timeout_s` seconds is dropped.

        Whether everything was written or refused by the store in time.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        in_time = self.drain(timeout_s)
        with self._changed:
            left = list(self._queue)
            self._queue.clear()
            self._held_bytes -= sum(job.size_bytes for job in left)
        self._drop(Drop.CLOSED, left)
        return in_time

    def _refusal(self, size_bytes: int) -> Drop | None:
        if self._closed:
            return Drop.CLOSED
        if size_bytes > self._max_bytes:
            return Drop.TOO_LARGE
        return Drop.QUEUE_FULL if self._held_bytes + size_bytes > self._max_bytes else None

    def _work(self) -> None:
        while batch := self._next_batch():
            try:
                self._write(batch)
            finally:
                with self._changed:
                    self._held_bytes -= sum(job.size_bytes for job in batch)
                    self._changed.notify_all()

    def _next_batch(self) -> list[_Job]:
        """Jobs of the namespace that waits longest, in order; empty when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            batch: list[_Job] = []
            rest: deque[_Job] = deque()
            size_bytes = 0
            for job in self._queue:
                fits = not batch or (
                    (job.namespace, job.flushes) == (batch[0].namespace, batch[0].flushes)
                    and size_bytes + job.size_bytes <= self._batch_bytes
                )
                (batch if fits else rest).append(job)
                size_bytes += job.size_bytes if fits else 0
            self._queue = rest
            return batch

    def _write(self, batch: list[_Job]) -> None:
        namespace = batch[0].namespace
        try:
            pages = [page for job in batch for page in self._store.page_writes(job.namespace, job.tokens, job.records)]
            self._store.write(namespace, _merged(pages), flushes=batch[0].flushes)
        except StoreError as error:
            self._drop(Drop.UNAVAILABLE, batch)
            self._failures.warn(f"the store did not take {len(batch)} prefixes: {error}")
        except Exception:  # noqa: BLE001 - the thread publishes for all requests
            self._drop(Drop.FAILED, batch)
            _log.exception("publishing failed")

    def _drop(self, reason: Drop, jobs: Sequence[_Job]) -> None:
        if jobs:
            self._store.metrics.count_dropped(reason, sum(len(job.records) for job in jobs))


def _merged(pages: Iterable[PageWrite]) -> list[PageWrite]:
    """Each page once, in the order of their first; of records of one name the latest."""
    merged: dict[tuple[bytes, bytes], PageWrite] = {}
    for page in pages:
        # With the digest: of two prefixes that collide, the store is to refuse one.
        identity = page.key, page.tokens_digest
        earlier = merged.get(identity)
        merged[identity] = page if earlier is None else replace(page, records={**earlier.records, **page.records})
    return list(merged.values())
