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
# A job and a queue of its own weigh about this much beside tokens and records.
_JOB_BYTES = 2048
# Of a token in a list or tuple: the reference. The numbers are as a rule the request's, which keeps them anyway.
_TOKEN_BYTES = 8


@dataclass(frozen=True)
class _Job:
    namespace: Namespace
    tokens: Sequence[int]
    records: Mapping[int, Sequence[Record]]
    flushes: int | None
    size_bytes: int


class Publisher:
    """Takes pages from whoever computed them and hands them to the store on a thread of its own.

    At most `max_bytes` of records and tokens (`job_bytes` for each offer) wait or are being written; jobs of one
    namespace that wait together, and were computed between the same flushes, are written together, up to `batch_bytes`.
    Namespaces take turns. Safe to use from several threads. Nothing but `close` and `drain` waits.
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
        # In the order of their turns; none is empty.
        self._queues: dict[tuple[Namespace, int | None], deque[_Job]] = {}
        self._held_bytes = 0
        self._closed = False
        self._failures = SeldomLog(_log, _LOG_EVERY_S, clock)
        self._defects = SeldomLog(_log, _LOG_EVERY_S, clock)
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
        size_bytes = job_bytes(tokens, records)
        job = _Job(namespace, tokens, records, flushes, size_bytes)
        with self._changed:
            reason = self._refusal(size_bytes)
            if reason is None:
                self._queues.setdefault((namespace, flushes), deque()).append(job)
                self._held_bytes += size_bytes
                self._changed.notify_all()
        if reason is not None:
            self._store.metrics.count_dropped(reason, len(records))
        return reason

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was offered is written or dropped; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held_bytes, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Take nothing more, and write what waits; what is left after `timeout_s` seconds is dropped.

        Whether everything was written or refused by the store in time.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        in_time = self.drain(timeout_s)
        with self._changed:
            left = [job for queue in self._queues.values() for job in queue]
            self._queues.clear()
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
        """Jobs of the namespace whose turn it is, in order; empty when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queues or self._closed)
            if not self._queues:
                return []
            of = next(iter(self._queues))
            queue = self._queues.pop(of)
            batch = [queue.popleft()]
            size_bytes = batch[0].size_bytes
            while queue and size_bytes + queue[0].size_bytes <= self._batch_bytes:
                size_bytes += queue[0].size_bytes
                batch.append(queue.popleft())
            if queue:
                # Behind the others.
                self._queues[of] = queue
            return batch

    def _write(self, batch: list[_Job]) -> None:
        sound, pages = [], []
        for job in batch:
            try:
                pages += self._store.page_writes(job.namespace, job.tokens, job.records)
            except BaseException as error:  # noqa: BLE001 - the thread publishes for all requests
                self._fail([job], error)
            else:
                sound.append(job)
        if not sound:
            return
        try:
            self._store.write(sound[0].namespace, _merged(pages), flushes=sound[0].flushes)
        except StoreError as error:
            self._drop(Drop.UNAVAILABLE, sound)
            self._failures.warn(f"the store did not take {len(sound)} prefixes: {error}")
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(sound, error)

    def _fail(self, jobs: Sequence[_Job], error: BaseException) -> None:
        self._drop(Drop.FAILED, jobs)
        self._defects.warn(f"publishing {len(jobs)} prefixes failed: {error!r}")

    def _drop(self, reason: Drop, jobs: Sequence[_Job]) -> None:
        if jobs:
            self._store.metrics.count_dropped(reason, sum(len(job.records) for job in jobs))


def job_bytes(tokens: Sequence[int], records: Mapping[int, Sequence[Record]]) -> int:
    """What an offer counts towards a publisher's bound: its records, its tokens, and a constant.

    A token counts 8 bytes, or as many as it has in an array.
    """
    record_bytes = sum(HEADER_BYTES + len(record.payload) for page in records.values() for record in page)
    return _JOB_BYTES + len(tokens) * int(getattr(tokens, "itemsize", _TOKEN_BYTES)) + record_bytes


def _merged(pages: Iterable[PageWrite]) -> list[PageWrite]:
    """Each page once, in the order of their first; of records of one name the latest."""
    merged: dict[tuple[bytes, bytes], PageWrite] = {}
    for page in pages:
        # With the digest: of two prefixes that collide, the store is to refuse one.
        identity = page.key, page.tokens_digest
        earlier = merged.get(identity)
        merged[identity] = page if earlier is None else replace(page, records={**earlier.records, **page.records})
    return list(merged.values())
