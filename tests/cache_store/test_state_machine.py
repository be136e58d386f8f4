"""Every backend does what plain dictionaries do, whatever happens in whatever order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cache_store.backends.protocol import AnchorPool, Limits, PageWrite, Refusal, ScopeInfo

from .model import Model
from .sample_pages import digest, key, look

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Opened

SCOPES = [
    ScopeInfo(b"scope-a-scope-a-", "acme", "small", "r1"),
    ScopeInfo(b"scope-a2scope-a2", "acme", "large", "r1"),
    ScopeInfo(b"scope-b-scope-b-", "bolt", "small", "r2"),
]
# A tree: the parent of page n is page n // 2, that of page 1 the namespace.
PAGES = range(1, 10)
RECORD_BYTES, TTL_S = 4000, 60.0

scopes = st.sampled_from(SCOPES)
numbers = st.lists(st.sampled_from(PAGES), min_size=1, max_size=6)
names = st.sampled_from(["mass/0", "mass/1", "kv/0"])
records = st.dictionaries(names, st.integers(0, RECORD_BYTES).map(lambda size: bytes([size % 256]) * size))
holders = st.sampled_from(["one", "two"])


class StoreMachine(RuleBasedStateMachine):
    """Does the same to a backend and to the model, and compares all that can be seen."""

    open_store: Callable[[], Opened]

    def __init__(self) -> None:
        super().__init__()
        self.opened = self.open_store()
        self.backend = self.opened.backend
        self.model = Model(self.opened.footprint)
        self.flushed_most = 0

    def teardown(self) -> None:
        self.backend.close()

    def flushed_bytes(self) -> int:
        return self.backend.stats().size_bytes - self.model.held()

    @rule(
        scope=scopes,
        written=st.lists(st.tuples(st.sampled_from(PAGES), records, st.integers(0, 19)), max_size=5),
        budget_pages=st.integers(2, 12),
        tenant_pages=st.integers(2, 12),
        before=st.sampled_from([None, 0, 0, 1]),
    )
    def publish(
        self,
        scope: ScopeInfo,
        written: list[tuple[int, dict[str, bytes], int]],
        budget_pages: int,
        tenant_pages: int,
        before: int | None,
    ) -> None:
        pages = [
            PageWrite(
                key(str(number)),
                key(str(number // 2)) if number > 1 else scope.scope,
                digest("other" if odd == 0 else str(number)),
                found,
            )
            for number, found, odd in written
        ]
        unit = self.model.footprint({"mass/0": RECORD_BYTES})
        limits = Limits(unit * budget_pages, unit * tenant_pages)
        flushed = self.flushed_bytes()
        # Computed since so many flushes ago.
        flushes = None if before is None else self.backend.lookup(scope.scope, []).flushes - before
        if before:
            refused = {Refusal.FLUSHED: len(pages)} if pages else {}
            assert dict(self.backend.publish(scope, pages, limits, flushes).refused) == refused
            return
        expected = self.model.publish(scope, pages, limits)
        published = self.backend.publish(scope, pages, limits, flushes)
        assert (published.pages, published.size_bytes) == (expected.pages, expected.size_bytes)
        assert dict(published.refused) == expected.refused
        if flushed:
            assert published.evicted_pages >= expected.evicted
        else:
            assert published.evicted_pages == expected.evicted
        if expected.pages and not expected.refused:
            assert self.backend.stats().size_bytes <= limits.budget_bytes
            assert self.model.held(scope.tenant) <= limits.tenant_bytes

    @rule(scope=scopes, wanted=numbers)
    def lookup(self, scope: ScopeInfo, wanted: list[int]) -> None:
        keys = [key(str(number)) for number in wanted]
        self.model.use(scope, keys)
        pages = [self.model.pages.get((scope.scope, one)) for one in keys]
        expected = [
            (page.tokens_digest, {name: len(data) for name, data in page.records.items()}) if page else None
            for page in pages
        ]
        assert look(self.backend, scope, *map(str, wanted)) == expected

    @rule(scope=scopes, wanted=st.lists(st.tuples(st.sampled_from(PAGES), names), max_size=6))
    def read(self, scope: ScopeInfo, wanted: list[tuple[int, str]]) -> None:
        asked = [(key(str(number)), name) for number, name in wanted]
        self.model.use(scope, [one for one, _ in asked])
        pages = [(self.model.pages.get((scope.scope, one)), name) for one, name in asked]
        assert self.backend.read(scope.scope, asked) == [
            page.records.get(name) if page else None for page, name in pages
        ]

    @rule(scope=scopes, wanted=numbers, holder=holders, ttl_s=st.sampled_from([TTL_S, 1000.0, None]))
    def lease(self, scope: ScopeInfo, wanted: list[int], holder: str, ttl_s: float | None) -> None:
        keys = [key(str(number)) for number in wanted]
        assert self.backend.lease(scope.scope, keys, holder, ttl_s) == self.model.lease(scope, keys, holder, ttl_s)

    @rule(holder=holders)
    def release(self, holder: str) -> None:
        assert self.backend.release(holder) == self.model.release(holder)

    @rule()
    def wait(self) -> None:
        self.opened.advance(2 * TTL_S)
        self.model.now_s += 2 * TTL_S

    @rule(
        fits=st.fixed_dictionaries(
            {},
            optional={
                "tenant": st.sampled_from(["acme", "bolt"]),
                "model": st.sampled_from(["small", "large"]),
                "revision": st.sampled_from(["r1", "r2"]),
            },
        )
    )
    def flush(self, fits: dict[str, str]) -> None:
        flushes = self.backend.lookup(SCOPES[0].scope, []).flushes
        flushed = self.backend.flush(**fits)
        assert self.backend.lookup(SCOPES[0].scope, []).flushes == flushes + 1
        expected = self.model.flush(fits)
        assert (flushed.pages, flushed.size_bytes) == expected
        self.flushed_most += expected[1]

    @rule(pages=st.integers(0, 6))
    def evict(self, pages: int) -> None:
        wanted, flushed, before = (
            pages * self.model.footprint({}),
            self.flushed_bytes(),
            self.backend.stats().size_bytes,
        )
        self.model.evict(wanted, flushed)
        gone = self.backend.evict(wanted)
        assert gone.size_bytes == before - self.backend.stats().size_bytes
        assert gone.size_bytes >= wanted or self.flushed_bytes() == 0

    @rule(scope=scopes, number=st.sampled_from(PAGES), name=names)
    def quarantine(self, scope: ScopeInfo, number: int, name: str) -> None:
        page = self.model.pages.get((scope.scope, key(str(number))))
        there = page is not None and page.records.pop(name, None) is not None
        self.model.quarantined += there
        assert self.backend.quarantine(scope.scope, key(str(number)), name) == there

    @rule(
        scope=scopes,
        slot=st.sampled_from(["s", "t"]),
        identity=st.sampled_from("abcdefgh"),
        size=st.integers(0, 60),
        capacity=st.integers(1, 7),
    )
    def put_anchor(self, scope: ScopeInfo, slot: str, identity: str, size: int, capacity: int) -> None:
        pool = AnchorPool(scope, slot, capacity, budget_bytes=50)
        put = self.backend.put_anchor(pool, identity, b"x" * size)
        assert (put.stored, list(put.evicted)) == self.model.put_anchor(pool, identity, b"x" * size)

    @rule(scope=scopes, slot=st.sampled_from(["s", "t"]), identity=st.sampled_from("abcdefgh"))
    def quarantine_anchor(self, scope: ScopeInfo, slot: str, identity: str) -> None:
        there = self.model.pools.get((scope, slot), {}).pop(identity, None) is not None
        self.model.quarantined += there
        assert self.backend.quarantine_anchor(AnchorPool(scope, slot), identity) == there

    @rule(scope=scopes, slot=st.sampled_from(["s", "t"]), identities=st.lists(st.sampled_from("abcdefgh"), max_size=4))
    def use_anchors(self, scope: ScopeInfo, slot: str, identities: list[str]) -> None:
        self.backend.use_anchors(AnchorPool(scope, slot), identities)
        for identity in identities:
            anchors = self.model.pools.get((scope, slot), {})
            if identity in anchors:
                anchors[identity][1] += 1

    @invariant()
    def holds_the_same(self) -> None:
        found = {(info.scope, page.key): (page.parent, dict(page.records)) for info, page in self.backend.scan()}
        assert found == {name: (page.parent, page.records) for name, page in self.model.pages.items()}

    @invariant()
    def counts_the_same(self) -> None:
        stats = self.backend.stats()
        found = {s.info: (s.epoch, s.pages, s.size_bytes) for s in stats.scopes if s.info in SCOPES}
        for scope, epoch in self.model.epochs.items():
            pages = [page for page in self.model.pages.values() if page.scope == scope]
            assert found[scope][1:] == (len(pages), sum(map(self.model.size, pages)))
            # A store may know a namespace before it holds anything.
            assert found[scope][0] >= epoch
        assert stats.leased_pages == sum(map(self.model.is_leased, self.model.pages.values()))
        assert stats.quarantined == self.model.quarantined
        assert 0 <= stats.size_bytes - self.model.held() <= self.flushed_most

    @invariant()
    def has_the_same_anchors(self) -> None:
        for scope in SCOPES:
            for slot in ("s", "t"):
                expected = {name: data for name, (data, _) in self.model.pools.get((scope, slot), {}).items()}
                found = self.backend.anchors(AnchorPool(scope, slot))
                assert list(found.items()) == list(expected.items())


def test_every_backend_equals_plain_dictionaries(open_store: Callable[[], Opened]) -> None:
    class Machine(StoreMachine):
        pass

    Machine.open_store = staticmethod(open_store)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
