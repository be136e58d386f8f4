"""Namespaces of an LMDB store that hold nothing are forgotten, and what one change does is bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cache_store.backends import lmdb_change, lmdb_flush, lmdb_layout, lmdb_pages
from cache_store.backends.lmdb import LmdbBackend
from cache_store.backends.protocol import AnchorPool, Limits, Refusal, ScopeInfo

from .sample_pages import A2, A, B, chain, key, page, put, there

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST = 6


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LmdbBackend]:
    opened = LmdbBackend(tmp_path / "store", deadline_s=30)
    yield opened
    opened.close()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that remembers few namespaces."""
    monkeypatch.setattr(lmdb_change, "MAX_SCOPES", MOST)


def known(backend: LmdbBackend) -> set[bytes]:
    return {scope.info.scope for scope in backend.stats().scopes}


def rows(backend: LmdbBackend, table: str) -> int:
    with backend._environment.view() as view:
        return view.stat(backend._environment.tables[table])["entries"]


def number(backend: LmdbBackend, scope: ScopeInfo) -> int:
    with backend._environment.view() as view:
        packed = view.get(scope.scope, db=backend._environment.tables["scopes"])
        assert packed is not None
        return int.from_bytes(packed[:4], "big")


def make_empty(backend: LmdbBackend, count: int, prefix: str = "") -> None:
    """Namespaces that hold nothing, such as salts make whose pages were refused."""
    for one in range(count):
        put(backend, [], scope=ScopeInfo(key(f"{prefix}{one}"), "salty", "m", "r"))


@pytest.mark.usefixtures("few")
def test_namespaces_without_anything_are_forgotten_beyond_a_number(backend: LmdbBackend) -> None:
    # At a later epoch.
    put(backend, chain(A, "old"))
    backend.flush()
    backend.evict(2**30)
    put(backend, chain(A, "a", "b"))
    backend.put_anchor(AnchorPool(B, "slot"), "anchor", b"x")
    # Flushed, and not reclaimed yet.
    put(backend, chain(A2, "c"), scope=A2)
    backend.flush(model="large")
    size_bytes = backend.stats().size_bytes
    make_empty(backend, 5 * MOST)
    assert {A.scope, A2.scope, B.scope} <= known(backend)
    assert len(known(backend)) <= MOST + 1
    assert rows(backend, "scope_names") == rows(backend, "scopes") == len(known(backend))
    assert there(backend, A, "a", "b") == ["a", "b"]
    assert backend.anchors(AnchorPool(B, "slot")) == {"anchor": b"x"}
    assert backend.stats().size_bytes == size_bytes
    assert backend.evict(2**30).pages == 3
    assert backend.flush(tenant=B.tenant).pages == 0
    make_empty(backend, 5 * MOST, "again")
    assert known(backend).isdisjoint({A.scope, A2.scope, B.scope})
    assert backend.stats().size_bytes == 0


def test_up_to_that_number_none_is_forgotten(backend: LmdbBackend) -> None:
    make_empty(backend, 5 * MOST)
    assert len(known(backend)) == 5 * MOST


@pytest.mark.usefixtures("few")
def test_one_change_forgets_a_bounded_number(backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_change, "MAX_SCOPES", 1000)
    make_empty(backend, 5 * MOST)
    monkeypatch.setattr(lmdb_change, "MAX_SCOPES", MOST)
    monkeypatch.setattr(lmdb_change, "_SWEPT_SCOPES", 4)
    before = len(known(backend))
    make_empty(backend, 1, "one more")
    assert len(known(backend)) == before + 1 - 4


@pytest.mark.usefixtures("few")
def test_many_that_hold_something_hide_none_that_does_not(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_change, "_SWEPT_SCOPES", 3)
    for one in range(MOST):
        scope = ScopeInfo(key(f"full {one}"), "acme", "m", "r")
        put(backend, chain(scope, f"page {one}"), scope=scope)
    make_empty(backend, 5 * MOST)
    assert len(known(backend)) < 2.5 * MOST
    assert {key(f"full {one}") for one in range(MOST)} <= known(backend)


@pytest.mark.usefixtures("few")
def test_one_that_comes_back_is_new(backend: LmdbBackend) -> None:
    put(backend, chain(A, "a", "b"))
    before = number(backend, A)
    backend.lookup(A.scope, [key("a")])
    backend.lease(A.scope, [key("b")], "reader", None)
    backend.flush()
    backend.evict(2**30)
    make_empty(backend, 5 * MOST)
    assert A.scope not in known(backend)
    assert backend.lookup(A.scope, [key("a")]).digests == [None]
    assert put(backend, chain(A, "a")).pages == 1
    assert number(backend, A) > before
    assert backend.release("reader") == 0
    assert there(backend, A, "a", "b") == ["a"]
    assert backend.evict(2**30).pages == 1


def test_a_tenant_that_holds_nothing_is_forgotten(backend: LmdbBackend) -> None:
    put(backend, chain(A, "a"))
    put(backend, chain(B, "b"), scope=B)
    assert rows(backend, "tenants") == 2
    backend.evict(1)
    assert rows(backend, "tenants") == 1
    assert there(backend, B, "b") == ["b"]


# What one change does


@pytest.mark.parametrize("bound", [Refusal.FULL, Refusal.QUOTA])
def test_a_far_smaller_bound_is_reached_publish_by_publish(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch, bound: Refusal
) -> None:
    put(backend, [page(str(one), A.scope) for one in range(30)])
    small = backend.stats().size_bytes // 30 * 4
    limits = Limits(small, 2**30) if bound is Refusal.FULL else Limits(2**30, small)
    monkeypatch.setattr(lmdb_pages, "PUBLISH_EVICTIONS", 10)
    outcomes = [put(backend, chain(A, "x", "y"), limits) for _ in range(4)]
    assert [outcome.evicted_pages for outcome in outcomes] == [10, 10, 8, 0]
    refused = [dict(outcome.refused) for outcome in outcomes]
    assert refused == [{bound: 2}, {bound: 2}, {}, {}]
    assert there(backend, A, "x", "y") == ["x", "y"]


def test_a_bound_that_is_reached_within_one_publish_takes_one(backend: LmdbBackend) -> None:
    put(backend, [page(str(one), A.scope) for one in range(30)])
    limits = Limits(backend.stats().size_bytes // 30 * 4, 2**30)
    outcome = put(backend, chain(A, "x", "y"), limits)
    assert (outcome.pages, outcome.evicted_pages) == (2, 28)


def test_flushed_pages_of_other_tenants_are_not_looked_at(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in range(12):
        scope = ScopeInfo(key(str(one)), f"tenant {one}", "m", "r")
        put(backend, chain(scope, f"page {one}"), scope=scope)
    backend.flush()
    put(backend, [page(str(one), A.scope) for one in range(20)])
    backend.flush(tenant=A.tenant)
    looked: list[str] = []
    below = lmdb_change.Change.below

    def counted(self: lmdb_change.Change, prefix: bytes, table: str) -> Iterator[bytes]:
        for found in below(self, prefix, table):
            looked.append(table)
            yield found

    monkeypatch.setattr(lmdb_change.Change, "below", counted)
    quota = Limits(2**30, 20 * backend.stats().size_bytes // 32)
    outcome = put(backend, [page(f"new {one}", A.scope) for one in range(10)], quota)
    assert (outcome.pages, outcome.evicted_pages) == (10, 10)
    # The own row for each page.
    assert [looked.count("flushed"), looked.count("flushed_tenant")] == [0, 10]


def test_rows_of_flushed_pages_go_with_the_last_of_them(backend: LmdbBackend) -> None:
    put(backend, chain(A, "a", "b"))
    put(backend, chain(B, "c"), scope=B)
    backend.flush()
    backend.put_anchor(AnchorPool(A, "slot"), "anchor", b"x")
    assert [rows(backend, "flushed"), rows(backend, "flushed_tenant")] == [2, 2]
    # Of one tenant by its quota, of the other by an eviction.
    quota = Limits(2**30, backend.stats().size_bytes // 3)
    assert put(backend, chain(A, "new"), quota).evicted_pages == 2
    put(backend, chain(A, "newer"), quota)
    assert [rows(backend, "flushed"), rows(backend, "flushed_tenant")] == [1, 1]
    backend.evict(2**30)
    assert [rows(backend, "flushed"), rows(backend, "flushed_tenant")] == [0, 0]


def test_a_flush_unpacks_once_the_names_that_many_namespaces_share(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in range(30):
        scope = ScopeInfo(key(f"salt {one}"), "salty", "m", f"r{one % 3}")
        put(backend, chain(scope, f"page {one}"), scope=scope)
    unpacked: list[bytes] = []
    unpack = lmdb_flush.unpack_names

    def counted(scope: bytes, names: bytes) -> ScopeInfo:
        unpacked.append(names)
        return unpack(scope, names)

    monkeypatch.setattr(lmdb_flush, "unpack_names", counted)
    assert backend.flush(model="m", revision="r1").pages == 10
    assert len(unpacked) == 3
    left = {scope.info.revision for scope in backend.stats().scopes if scope.pages}
    assert left == {"r0", "r2"}


def test_a_change_writes_the_namespaces_that_it_changed(backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    put(backend, chain(A, "a"))
    put(backend, chain(B, "b"), scope=B)
    written: list[str] = []
    pack = lmdb_layout.Scope.pack

    def counted(self: lmdb_layout.Scope) -> bytes:
        written.append(self.info.tenant)
        return pack(self)

    monkeypatch.setattr(lmdb_layout.Scope, "pack", counted)
    backend.lease(A.scope, [key("a")], "reader", 60)
    backend.flush(tenant="nobody")
    assert written == []
    put(backend, chain(B, "b", "c"), scope=B)
    assert written == ["bolt"]
