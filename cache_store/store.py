"""The store as routers and workers use it: keys go in with the tokens, and what comes out is verified."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cache_store.backends.opening import open_backend
from cache_store.backends.protocol import AnchorPool, PageWrite, ScopeInfo
from cache_store.coverage import Coverage
from cache_store.errors import RecordFault, RecordRefusedError, StoreUnavailableError
from cache_store.keys import page_keys
from cache_store.later import Later
from cache_store.metrics import Operation
from cache_store.records import Kind, RecordOf, decode, decode_any, encode, read_record_name
from cache_store.seldom import SeldomLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cache_store.backends.protocol import AnchorPut, Backend, BackendStats, Limits, Published, Reclaimed
    from cache_store.config import StoreSettings
    from cache_store.keys import PageKey
    from cache_store.metrics import StoreMetrics
    from cache_store.namespace import Namespace
    from cache_store.records import Record

_log = logging.getLogger("crossfill.store")

_LOG_EVERY_S = 60.0
_ANCHOR_KINDS = (Kind.ANCHOR, Kind.RIDGE)


def scope_info(namespace: Namespace) -> ScopeInfo:
    """What a backend is told of a namespace."""
    return ScopeInfo(namespace.scope, namespace.tenant, namespace.model, namespace.revision)


def open_store(settings: StoreSettings, metrics: StoreMetrics) -> Store:
    """The store that the settings name; the log says what is in it.

    Raises:
        StoreError: it cannot be opened.
    """
    return Store(_opened(settings, metrics), settings.limits, metrics)


def open_store_later(settings: StoreSettings, metrics: StoreMetrics) -> Store:
    """As `open_store`, but opened by the first call; one that it cannot be opened for fails as unavailable."""
    return Store(Later(partial(_opened, settings, metrics)), settings.limits, metrics)


def _opened(settings: StoreSettings, metrics: StoreMetrics) -> Backend:
    backend = open_backend(settings.url, deadline_s=settings.deadline_s)
    try:
        # Part of the opening, and no call that somebody made.
        held = backend.stats()
    except BaseException:
        backend.close()
        raise
    metrics.show(held)
    # Not the URL: it may hold a password.
    scheme, pages = urlsplit(settings.url).scheme, sum(scope.pages for scope in held.scopes)
    budget = settings.budget_bytes
    _log.info("the %s store holds %d pages, %d of at most %d bytes", scheme, pages, held.size_bytes, budget)
    return backend


class Store:
    """Pages and anchors of every namespace, in one backend. Safe to use from several threads.

    Every method that asks the backend raises `StoreUnavailableError` if that does not answer, and counts it.
    """

    def __init__(
        self,
        backend: Backend | Later,
        limits: Limits,
        metrics: StoreMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        keys_of: Callable[[bytes, Sequence[int]], list[PageKey]] = page_keys,
    ) -> None:
        """`clock` spaces log lines; `keys_of` is replaced only by tests that want collisions."""
        self.metrics = metrics
        self._given = backend
        self._limits = limits
        self._keys_of = keys_of
        self._refusals = SeldomLog(_log, _LOG_EVERY_S, clock)

    @property
    def _backend(self) -> Backend:
        return self._given.backend() if isinstance(self._given, Later) else self._given

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> Coverage:
        """Which pages of a prefix have which records; marks them as used. One round trip.

        A page that is stored under the same key and of other tokens is a miss, and counted as a collision.
        """
        pages = self._keys_of(namespace.scope, tokens)
        with self.metrics.timed(Operation.MATCH):
            found = self._backend.lookup(namespace.scope, [page.key for page in pages])
        hits = [page.tokens_digest == digest for page, digest in zip(pages, found.digests, strict=True)]
        hit, absent = hits.count(True), found.digests.count(None)
        self.metrics.count_lookups(hit, absent, len(pages) - hit - absent)
        return Coverage(tuple(pages), hits, found.flushes, found.sizes)

    def is_current(self, namespace: Namespace, found: Coverage) -> bool:
        """Whether the store was not flushed since; what was read before asking is then of one time. One round trip."""
        with self.metrics.timed(Operation.CHECK):
            return self._backend.lookup(namespace.scope, []).flushes == found.flushes

    def read(self, namespace: Namespace, wanted: Sequence[tuple[PageKey, str]]) -> list[Record | None]:
        """The records (page, name) in their order, each verified; None for those that are not there. One round trip.

        A record that is not what it should be is taken away for good, counted and logged, and is None like a missing
        one.

        Raises:
            ValueError: a name is none that `record_name` gives.
        """
        kinds = [read_record_name(name) for _, name in wanted]
        with self.metrics.timed(Operation.READ):
            found = self._backend.read(namespace.scope, [(page.key, name) for page, name in wanted])
        records = [
            self._verified(namespace, page, name, of, data)
            for (page, name), of, data in zip(wanted, kinds, found, strict=True)
        ]
        intact = sum(record is not None for record in records)
        self.metrics.count_read(intact, sum(data is None for data in found))
        return records

    def publish(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        records: Mapping[int, Sequence[Record]],
        *,
        flushes: int | None = None,
    ) -> Published:
        """Store records by index of their page within `tokens`; what became of each page is counted.

        With `flushes` (`Coverage.flushes` of when the records were begun) they are refused if the store was flushed
        since.

        Raises:
            ValueError: an index is beyond the complete pages, or a record is of other tokens than its page.
        """
        return self.write(namespace, self.page_writes(namespace, tokens, records), flushes=flushes)

    def page_writes(
        self, namespace: Namespace, tokens: Sequence[int], records: Mapping[int, Sequence[Record]]
    ) -> list[PageWrite]:
        """Records as `write` takes them, parents before children; no backend is asked.

        Raises:
            ValueError: as `publish` does.
        """
        pages = self._keys_of(namespace.scope, tokens)
        writes = []
        for index in sorted(records):
            if not 0 <= index < len(pages):
                raise ValueError(f"page {index} is none of the {len(pages)} complete pages of {len(tokens)} tokens")
            page = pages[index]
            if any(record.tokens_digest != page.tokens_digest for record in records[index]):
                raise ValueError(f"a record of page {index} is of other tokens than the page")
            encoded = {record.name: encode(record) for record in records[index]}
            writes.append(PageWrite(page.key, page.parent, page.tokens_digest, encoded))
        return writes

    def write(self, namespace: Namespace, pages: Sequence[PageWrite], *, flushes: int | None = None) -> Published:
        """Store pages of one namespace, within the limits; none if the store was flushed since `flushes`."""
        with self.metrics.timed(Operation.PUBLISH):
            published = self._backend.publish(scope_info(namespace), pages, self._limits, flushes)
        self.metrics.count_published(published)
        return published

    def lease(self, namespace: Namespace, pages: Sequence[PageKey], holder: str, ttl_s: float | None) -> int:
        """Keep pages from eviction for `ttl_s` seconds (None: until `release`); how many are there to keep."""
        with self.metrics.timed(Operation.LEASE):
            return self._backend.lease(namespace.scope, [page.key for page in pages], holder, ttl_s)

    def release(self, holder: str) -> int:
        """End all leases of `holder`; of how many pages."""
        with self.metrics.timed(Operation.LEASE):
            return self._backend.release(holder)

    def flush(self, *, tenant: str | None = None, model: str | None = None, revision: str | None = None) -> Reclaimed:
        """Make everything that fits all that is given a miss at once; what that was."""
        with self.metrics.timed(Operation.FLUSH):
            flushed = self._backend.flush(tenant=tenant, model=model, revision=revision)
        self.metrics.count_flushed(flushed)
        _log.info("flushed %d pages (tenant %s, model %s, revision %s)", flushed.pages, tenant, model, revision)
        return flushed

    def evict(self, size_bytes: int) -> Reclaimed:
        """Reclaim flushed pages, then evict, until this much is free or nothing more may go."""
        with self.metrics.timed(Operation.EVICT):
            evicted = self._backend.evict(size_bytes)
        self.metrics.count_evicted(evicted)
        return evicted

    def compact(self) -> Reclaimed:
        """Give free space back to the system, where the backend can."""
        with self.metrics.timed(Operation.COMPACT):
            return self._backend.compact()

    def stats(self) -> BackendStats:
        """What the store holds; sets the gauges too."""
        with self.metrics.timed(Operation.STATS):
            stats = self._backend.stats()
        self.metrics.show(stats)
        return stats

    def put_anchor(self, pool: AnchorPool, identity: str, record: Record) -> AnchorPut:
        """Add or replace an anchor or a ridge map of a pool.

        Raises:
            ValueError: the record is of another kind.
        """
        if record.kind not in _ANCHOR_KINDS:
            raise ValueError(f"a pool holds anchors and ridge maps, not {record.kind.name.lower()}")
        data = encode(record)
        with self.metrics.timed(Operation.ANCHORS):
            return self._backend.put_anchor(pool, identity, data)

    def anchors(self, pool: AnchorPool) -> dict[str, Record]:
        """The pool's intact anchors by identity, the oldest first. Others are taken away for good and counted."""
        with self.metrics.timed(Operation.ANCHORS):
            found = self._backend.anchors(pool)
        intact = {}
        for identity, data in found.items():
            try:
                intact[identity] = _decode_anchor(data)
            except RecordRefusedError as error:
                self._quarantine_anchor(pool, identity, error)
        return intact

    def use_anchors(self, pool: AnchorPool, identities: Sequence[str]) -> None:
        """Count one use of each."""
        with self.metrics.timed(Operation.ANCHORS):
            self._backend.use_anchors(pool, identities)

    def close(self) -> None:
        """Let go of the backend."""
        self._given.close()

    def _verified(
        self, namespace: Namespace, page: PageKey, name: str, of: RecordOf, data: bytes | None
    ) -> Record | None:
        if data is None:
            return None
        try:
            return decode(data, of, tokens_digest=page.tokens_digest)
        except RecordRefusedError as error:
            self._quarantine(namespace, page, name, error)
            return None

    def _quarantine(self, namespace: Namespace, page: PageKey, name: str, error: RecordRefusedError) -> None:
        try:
            if error.fault is RecordFault.TOKENS and not self._is_page(namespace, page):
                # The page of other tokens that has the same key: right for those, and theirs to keep.
                self.metrics.count_lookups(hits=0, absent=0, collisions=1)
                return
            self._refuse(f"record {name} of page {page.key.hex()}", error)
            with self.metrics.timed(Operation.QUARANTINE):
                self._backend.quarantine(namespace.scope, page.key, name)
        except StoreUnavailableError:
            # Counted by `timed`. What was read stands, and the next reader refuses this record again.
            return

    def _quarantine_anchor(self, pool: AnchorPool, identity: str, error: RecordRefusedError) -> None:
        self._refuse(f"anchor {identity!r} of slot {pool.slot!r}", error)
        try:
            with self.metrics.timed(Operation.QUARANTINE):
                self._backend.quarantine_anchor(pool, identity)
        except StoreUnavailableError:
            return

    def _is_page(self, namespace: Namespace, page: PageKey) -> bool:
        with self.metrics.timed(Operation.MATCH):
            return self._backend.lookup(namespace.scope, [page.key]).digests[0] == page.tokens_digest

    def _refuse(self, what: str, error: RecordRefusedError) -> None:
        self.metrics.count_quarantined(error.fault)
        self._refusals.warn(f"{what} is not used: {error}")


def _decode_anchor(data: bytes) -> Record:
    record = decode_any(data)
    if record.kind not in _ANCHOR_KINDS:
        raise RecordRefusedError(RecordFault.KIND, f"want an anchor, found {record.kind.name.lower()}")
    return record
