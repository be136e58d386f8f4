"""Pages in this process's memory: the plain backend that the others are compared with."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cache_store.backends.anchors import Pool
from cache_store.backends.arguments import check_info, check_pool, check_text, check_ttl
from cache_store.backends.options import read_options
from cache_store.backends.protocol import (
    AnchorPool,
    AnchorPut,
    BackendStats,
    Found,
    Limits,
    PageWrite,
    Published,
    Reclaimed,
    Refusal,
    ScopeInfo,
    ScopeStats,
)
from cache_store.errors import StoreUnavailableError, StoreUrlError

PAGE_OVERHEAD_BYTES = 2304
"""Counted for a page beside its records: what Python needs for a page with 30 of them (measured: 2,214 bytes; 515
without any)."""

_PageId = tuple[bytes, bytes]


@dataclass(eq=False)
class _Page:
    scope: bytes
    key: bytes
    parent: bytes
    tokens_digest: bytes
    records: dict[str, bytes] = field(default_factory=dict)
    # When each holder's lease ends; None: when it is released.
    leases: dict[str, float | None] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return PAGE_OVERHEAD_BYTES + sum(map(len, self.records.values()))


@dataclass
class _Scope:
    info: ScopeInfo
    epoch: int = 0
    pools: dict[str, Pool] = field(default_factory=dict)


class MemoryBackend:
    """All in dictionaries, under one lock.

    Args:
        clock: seconds, by which leases end; only differences count.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._closed = False
        self._scopes: dict[bytes, _Scope] = {}
        # Visible pages, the least recently used first.
        self._pages: OrderedDict[_PageId, _Page] = OrderedDict()
        self._children: Counter[_PageId] = Counter()
        self._flushed: list[_Page] = []
        self._size_bytes, self._quarantined, self._flushes = 0, 0, 0
        self._tenant_bytes: Counter[str] = Counter()

    @classmethod
    def from_url(cls, url: str) -> "MemoryBackend":
        """An empty store; `memory://` has no options."""
        parts = urlsplit(url)
        if parts.netloc or parts.path not in {"", "/"}:
            raise StoreUrlError(f"memory:// takes neither host nor path, got {url!r}")
        read_options(parts.query, ())
        return cls()

    def lookup(self, scope: bytes, keys: Sequence[bytes]) -> Found:
        """See `Backend.lookup`."""
        with self._open():
            pages = [self._use(scope, key) for key in keys]
            # Records of a page are replaced, never changed.
            records = [page.records if page else {} for page in pages]
            digests = [page.tokens_digest if page else None for page in pages]
            return Found(digests, self._flushes, lambda index: {n: len(d) for n, d in records[index].items()})

    def read(self, scope: bytes, wanted: Sequence[tuple[bytes, str]]) -> list[bytes | None]:
        """See `Backend.read`."""
        with self._open():
            pages = [(self._use(scope, key), name) for key, name in wanted]
            return [page.records.get(name) if page else None for page, name in pages]

    def publish(
        self, info: ScopeInfo, pages: Sequence[PageWrite], limits: Limits, flushes: int | None = None
    ) -> Published:
        """See `Backend.publish`."""
        check_info(info)
        refused: Counter[Refusal] = Counter()
        gone: list[_Page] = []
        stored = size_bytes = 0
        with self._open():
            if flushes not in {None, self._flushes}:
                return Published(refused={Refusal.FLUSHED: len(pages)} if pages else {})
            self._scopes.setdefault(info.scope, _Scope(info))
            spared = {(info.scope, page.key) for page in pages}
            for page in pages:
                self._use(info.scope, page.key)
            for page in pages:
                refusal = self._store(info, page, limits, spared, gone)
                if refusal:
                    refused[refusal] += 1
                else:
                    stored += 1
                    size_bytes += sum(map(len, page.records.values()))
        return Published(stored, size_bytes, dict(refused), len(gone), sum(page.size_bytes for page in gone))

    def lease(self, scope: bytes, keys: Sequence[bytes], holder: str, ttl_s: float | None) -> int:
        """See `Backend.lease`."""
        check_text("holder", holder)
        check_ttl(ttl_s)
        with self._open():
            ends = None if ttl_s is None else self._clock() + ttl_s
            there = [page for key in dict.fromkeys(keys) if (page := self._pages.get((scope, key)))]
            for page in there:
                held = page.leases.get(holder, 0.0)
                page.leases[holder] = None if held is None or ends is None else max(held, ends)
            return len(there)

    def release(self, holder: str) -> int:
        """See `Backend.release`."""
        check_text("holder", holder)
        with self._open():
            now = self._clock()
            ended = [page.leases.pop(holder, now) for page in self._pages.values()]
            return sum(1 for ends in ended if ends is None or ends > now)

    def flush(self, *, tenant: str | None = None, model: str | None = None, revision: str | None = None) -> Reclaimed:
        """See `Backend.flush`. Leases of what it makes invisible end; anchors go at once."""
        with self._open():
            asked = {"tenant": tenant, "model": model, "revision": revision}
            wanted = {name: value for name, value in asked.items() if value is not None}
            for name, value in wanted.items():
                check_text(name, value)
            self._flushes += 1
            hidden: list[_Page] = []
            for scope in self._scopes.values():
                if all(getattr(scope.info, name) == value for name, value in wanted.items()):
                    scope.epoch += 1
                    scope.pools.clear()
                    hidden += [page for page in self._pages.values() if page.scope == scope.info.scope]
            for page in hidden:
                del self._pages[page.scope, page.key]
                self._children[page.scope, page.parent] -= 1
            self._flushed += hidden
            return Reclaimed(len(hidden), sum(page.size_bytes for page in hidden))

    def evict(self, size_bytes: int) -> Reclaimed:
        """See `Backend.evict`."""
        with self._open():
            gone: list[_Page] = []
            while sum(page.size_bytes for page in gone) < size_bytes and self._drop_one(None, frozenset(), gone):
                pass
            return Reclaimed(len(gone), sum(page.size_bytes for page in gone))

    def quarantine(self, scope: bytes, key: bytes, name: str) -> bool:
        """See `Backend.quarantine`."""
        with self._open():
            page = self._pages.get((scope, key))
            if page is None or name not in page.records:
                return False
            self._count(scope, -len(page.records[name]))
            page.records = {other: data for other, data in page.records.items() if other != name}
            self._quarantined += 1
            return True

    def stats(self) -> BackendStats:
        """See `Backend.stats`."""
        with self._open():
            scopes = []
            for scope in self._scopes.values():
                pages = [page for page in self._pages.values() if page.scope == scope.info.scope]
                size_bytes = sum(page.size_bytes for page in pages)
                scopes.append(ScopeStats(scope.info, scope.epoch, len(pages), size_bytes))
            leased = sum(1 for page in self._pages.values() if self._is_leased(page))
            return BackendStats(scopes, self._size_bytes, leased, self._quarantined)

    def scan(self) -> Iterator[tuple[ScopeInfo, PageWrite]]:
        """See `Backend.scan`. What is stored when it begins."""
        with self._open():
            below: dict[_PageId, list[_Page]] = {}
            for page in self._pages.values():
                below.setdefault((page.scope, page.parent), []).append(page)
            found = [page for page in self._pages.values() if (page.scope, page.parent) not in self._pages]
            # Grows while it is walked: children follow parents.
            for page in found:
                found += below.get((page.scope, page.key), [])
            written = [
                (
                    self._scopes[page.scope].info,
                    PageWrite(page.key, page.parent, page.tokens_digest, dict(page.records)),
                )
                for page in found
            ]
        yield from written

    def compact(self) -> Reclaimed:
        """Nothing to do: Python gives memory back by itself."""
        with self._open():
            return Reclaimed(0, 0)

    def put_anchor(self, pool: AnchorPool, identity: str, data: bytes) -> AnchorPut:
        """See `Backend.put_anchor`. A replaced anchor keeps its age and its uses."""
        check_pool(pool, identity)
        with self._open():
            if len(data) > pool.budget_bytes or pool.capacity < 1:
                return AnchorPut(stored=False)
            scope = self._scopes.setdefault(pool.info.scope, _Scope(pool.info))
            return scope.pools.setdefault(pool.slot, Pool()).put(identity, data, pool.capacity, pool.budget_bytes)

    def anchors(self, pool: AnchorPool) -> dict[str, bytes]:
        """See `Backend.anchors`."""
        check_pool(pool)
        with self._open():
            return self._pool(pool).anchors()

    def quarantine_anchor(self, pool: AnchorPool, identity: str) -> bool:
        """See `Backend.quarantine_anchor`."""
        check_pool(pool, identity)
        with self._open():
            there = self._pool(pool).drop(identity)
            self._quarantined += there
            return there

    def use_anchors(self, pool: AnchorPool, identities: Sequence[str]) -> None:
        """See `Backend.use_anchors`. Anchors that are gone are left out."""
        check_pool(pool, *identities)
        with self._open():
            self._pool(pool).use(identities)

    def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True

    def _open(self) -> threading.RLock:
        if self._closed:
            raise StoreUnavailableError("this store was closed; open another", "closed")
        return self._lock

    def _pool(self, pool: AnchorPool) -> Pool:
        scope = self._scopes.get(pool.info.scope)
        return scope.pools.get(pool.slot, Pool()) if scope else Pool()

    def _use(self, scope: bytes, key: bytes) -> _Page | None:
        page = self._pages.get((scope, key))
        if page:
            self._pages.move_to_end((scope, key))
        return page

    def _store(
        self, info: ScopeInfo, new: PageWrite, limits: Limits, spared: set[_PageId], gone: list[_Page]
    ) -> Refusal | None:
        page = self._pages.get((info.scope, new.key))
        if page and page.tokens_digest != new.tokens_digest:
            return Refusal.COLLISION
        records = {**(page.records if page else {}), **new.records}
        size_bytes = PAGE_OVERHEAD_BYTES + sum(map(len, records.values()))
        if size_bytes > min(limits.tenant_bytes, limits.budget_bytes):
            return Refusal.TOO_LARGE
        growth = size_bytes - (page.size_bytes if page else 0)
        while self._tenant_bytes[info.tenant] + growth > limits.tenant_bytes:
            if not self._drop_one(info.tenant, spared, gone):
                return Refusal.QUOTA
        while self._size_bytes + growth > limits.budget_bytes:
            if not self._drop_one(None, spared, gone):
                return Refusal.FULL
        if not page:
            page = self._pages[info.scope, new.key] = _Page(info.scope, new.key, new.parent, new.tokens_digest)
            self._children[info.scope, new.parent] += 1
        page.records = records
        self._count(info.scope, growth)
        self._use(info.scope, new.key)
        return None

    def _drop_one(self, tenant: str | None, spared: set[_PageId] | frozenset[_PageId], gone: list[_Page]) -> bool:
        """Remove a flushed page, or the least recently used that may go, of the tenant if one is given."""

        def fits(page: _Page) -> bool:
            return tenant is None or self._scopes[page.scope].info.tenant == tenant

        page = next(filter(fits, self._flushed), None)
        if page:
            self._flushed.remove(page)
        else:
            leaves = (p for i, p in self._pages.items() if fits(p) and i not in spared and self._may_go(p))
            page = next(leaves, None)
            if not page:
                return False
            del self._pages[page.scope, page.key]
            self._children[page.scope, page.parent] -= 1
        self._count(page.scope, -page.size_bytes)
        gone.append(page)
        return True

    def _may_go(self, page: _Page) -> bool:
        return not self._children[page.scope, page.key] and not self._is_leased(page)

    def _is_leased(self, page: _Page) -> bool:
        now = self._clock()
        return any(ends is None or ends > now for ends in page.leases.values())

    def _count(self, scope: bytes, growth: int) -> None:
        self._size_bytes += growth
        self._tenant_bytes[self._scopes[scope].info.tenant] += growth
