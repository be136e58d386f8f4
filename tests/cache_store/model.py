"""A store as plain dictionaries and loops: what the protocol says, in the fewest words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cache_store.backends.protocol import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from cache_store.backends.protocol import AnchorPool, Limits, PageWrite, ScopeInfo

Id = tuple[bytes, bytes]


@dataclass
class Page:
    scope: ScopeInfo
    parent: bytes
    tokens_digest: bytes
    records: dict[str, bytes]
    leases: dict[str, float] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a publish should say; evicted counts visible pages only."""

    pages: int = 0
    size_bytes: int = 0
    refused: dict[Refusal, int] = field(default_factory=dict)
    evicted: int = 0


class Model:
    """Visible pages in order of use; of flushed ones only how many bytes there can be at most."""

    def __init__(self, footprint: Callable[[Mapping[str, int]], int]) -> None:
        # What a page counts for, by the sizes of its records.
        self.footprint = footprint
        self.pages: dict[Id, Page] = {}
        self.epochs: dict[ScopeInfo, int] = {}
        self.quarantined = 0
        self.now_s = 0.0
        self.pools: dict[tuple[ScopeInfo, str], dict[str, list]] = {}

    def size(self, page: Page) -> int:
        return self.footprint({name: len(data) for name, data in page.records.items()})

    def held(self, tenant: str | None = None) -> int:
        return sum(self.size(page) for page in self.pages.values() if tenant in {None, page.scope.tenant})

    def use(self, scope: ScopeInfo, keys: Sequence[bytes]) -> None:
        for key in keys:
            if (scope.scope, key) in self.pages:
                self.pages[scope.scope, key] = self.pages.pop((scope.scope, key))

    def is_leased(self, page: Page) -> bool:
        return any(ends > self.now_s for ends in page.leases.values())

    def evict_one(self, tenant: str | None, spared: Collection[Id]) -> int:
        """Bytes of the page that went; 0 if none may."""
        parents = {(page.scope.scope, page.parent) for page in self.pages.values()}
        for name, page in self.pages.items():
            if tenant not in {None, page.scope.tenant} or name in spared or name in parents or self.is_leased(page):
                continue
            del self.pages[name]
            return self.size(page)
        return 0

    def publish(self, scope: ScopeInfo, written: Sequence[PageWrite], limits: Limits) -> Outcome:
        self.use(scope, [page.key for page in written])
        spared, before, outcome = {(scope.scope, page.key) for page in written}, len(self.pages), Outcome()
        added = 0
        for page in written:
            is_new = (scope.scope, page.key) not in self.pages
            refusal = self._store(scope, page, limits, spared)
            if refusal:
                outcome.refused[refusal] = outcome.refused.get(refusal, 0) + 1
            else:
                added += is_new
                outcome.pages += 1
                outcome.size_bytes += sum(len(data) for data in page.records.values())
        outcome.evicted = before + added - len(self.pages)
        return outcome

    def _store(self, scope: ScopeInfo, new: PageWrite, limits: Limits, spared: Collection[Id]) -> Refusal | None:
        old = self.pages.get((scope.scope, new.key))
        if old and old.tokens_digest != new.tokens_digest:
            return Refusal.COLLISION
        made = Page(scope, new.parent, new.tokens_digest, dict(new.records))
        if old:
            made = Page(scope, old.parent, old.tokens_digest, {**old.records, **new.records}, old.leases)
        if self.size(made) > min(limits.budget_bytes, limits.tenant_bytes):
            return Refusal.TOO_LARGE
        growth = self.size(made) - (self.size(old) if old else 0)
        while self.held(scope.tenant) + growth > limits.tenant_bytes:
            if not self.evict_one(scope.tenant, spared):
                return Refusal.QUOTA
        while self.held() + growth > limits.budget_bytes:
            if not self.evict_one(None, spared):
                return Refusal.FULL
        self.pages.pop((scope.scope, new.key), None)
        self.pages[scope.scope, new.key] = made
        self.epochs.setdefault(scope, 0)
        return None

    def lease(self, scope: ScopeInfo, keys: Sequence[bytes], holder: str, ttl_s: float | None) -> int:
        there = {key for key in keys if (scope.scope, key) in self.pages}
        for key in there:
            leases = self.pages[scope.scope, key].leases
            ends = float("inf") if ttl_s is None else self.now_s + ttl_s
            leases[holder] = max(ends, leases.get(holder, ends))
        return len(there)

    def release(self, holder: str) -> int:
        return sum(page.leases.pop(holder, 0.0) > self.now_s for page in self.pages.values())

    def flush(self, wanted: dict[str, str]) -> tuple[int, int]:
        fitting = [s for s in self.epochs if all(getattr(s, name) == value for name, value in wanted.items())]
        gone = {name: page for name, page in self.pages.items() if page.scope in fitting}
        self.pages = {name: page for name, page in self.pages.items() if name not in gone}
        for scope in fitting:
            self.epochs[scope] += 1
        self.pools = {name: pool for name, pool in self.pools.items() if name[0] not in fitting}
        return len(gone), sum(map(self.size, gone.values()))

    def evict(self, size_bytes: int, flushed_bytes: int) -> None:
        """Flushed pages go first, and what they free is known from outside."""
        freed = flushed_bytes
        while freed < size_bytes and (size := self.evict_one(None, ())):
            freed += size

    def put_anchor(self, pool: AnchorPool, identity: str, data: bytes) -> tuple[bool, list[str]]:
        if len(data) > pool.budget_bytes:
            return False, []
        self.epochs.setdefault(pool.info, 0)
        anchors = self.pools.setdefault((pool.info, pool.slot), {})
        anchors[identity] = [data, anchors.get(identity, [b"", 0])[1]]
        evicted = []
        while len(anchors) > pool.capacity or sum(len(data) for data, _ in anchors.values()) > pool.budget_bytes:
            oldest = [name for name in anchors if name != identity][:5]
            evicted.append(min(oldest, key=lambda name: anchors[name][1]))
            del anchors[evicted[-1]]
        return True, evicted
