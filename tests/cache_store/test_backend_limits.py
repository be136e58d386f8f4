"""What goes when a store is full, what stays, and what a flush does, in every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cache_store.backends.protocol import Limits, PageWrite, Refusal

from .sample_pages import A2, A, B, chain, digest, key, look, page, put, room, there

if TYPE_CHECKING:
    from cache_store.backends.protocol import Backend

    from .conftest import Opened


def test_the_least_recently_used_page_goes_first(opened: Opened) -> None:
    backend, limits = opened.backend, room(opened, 3)
    for name in "abc":
        put(backend, [page(name, A.scope)], limits)
    published = put(backend, [page("d", A.scope)], limits)
    assert there(backend, A, *"abcd") == ["b", "c", "d"]
    assert (published.evicted_pages, published.evicted_bytes) == (1, limits.budget_bytes // 3)


@pytest.mark.parametrize("use", ["lookup", "read", "publish"])
def test_use_keeps_a_page(opened: Opened, use: str) -> None:
    backend, limits = opened.backend, room(opened, 3)
    for name in "abc":
        put(backend, [page(name, A.scope)], limits)
    if use == "lookup":
        backend.lookup(A.scope, [key("a")])
    elif use == "read":
        backend.read(A.scope, [(key("a"), "mass/0")])
    else:
        put(backend, [page("a", A.scope)], limits)
    put(backend, [page("d", A.scope)], limits)
    assert there(backend, A, *"abcd") == ["a", "c", "d"]


def test_pages_of_one_call_were_used_in_its_order(opened: Opened) -> None:
    backend = opened.backend
    put(backend, [page("b", A.scope), page("d", A.scope)])
    put(backend, [page(name, A.scope) for name in "abcd"])
    for left in ("bcd", "cd", "d", ""):
        backend.evict(1)
        assert there(backend, A, *"abcd") == list(left)
    put(backend, [page(name, A.scope) for name in "abc"])
    backend.lookup(A.scope, [key("c"), key("a"), key("b")])
    backend.evict(1)
    assert there(backend, A, *"abc") == ["a", "b"]


@pytest.mark.parametrize("look", ["scan", "stats", "lease"])
def test_looking_without_use_keeps_no_page(opened: Opened, look: str) -> None:
    backend, limits = opened.backend, room(opened, 3)
    for name in "abc":
        put(backend, [page(name, A.scope)], limits)
    if look == "scan":
        list(backend.scan())
    elif look == "stats":
        backend.stats()
    else:
        backend.lease(A.scope, [key("a")], "reader", None)
        backend.release("reader")
    put(backend, [page("d", A.scope)], limits)
    assert there(backend, A, *"abcd") == ["b", "c", "d"]


def test_leaves_go_before_their_parents_however_old_those_are(opened: Opened) -> None:
    backend, limits = opened.backend, room(opened, 4)
    put(backend, chain(A, "a", "b", "c"), limits)
    put(backend, [page("x", A.scope)], limits)
    for number, expected in enumerate((["a", "b", "x"], ["a", "x"], ["x"], [])):
        put(backend, [page(f"new {number}", A.scope)], limits)
        assert there(backend, A, "a", "b", "c", "x") == expected


def test_a_branch_keeps_its_trunk(opened: Opened) -> None:
    backend = opened.backend
    put(backend, [*chain(A, "a", "b"), page("b2", "a")])
    backend.lookup(A.scope, [key("a"), key("b")])
    assert backend.evict(1).pages == 1
    assert there(backend, A, "a", "b", "b2") == ["a", "b"]


def test_a_child_that_was_stored_before_its_parent_keeps_it(opened: Opened) -> None:
    backend = opened.backend
    put(backend, [page("child", "parent")])
    put(backend, [page("parent", A.scope)])
    backend.lookup(A.scope, [key("child")])
    backend.evict(1)
    assert there(backend, A, "parent", "child") == ["parent"]


def test_a_full_page_evicts_as_many_as_it_needs(opened: Opened) -> None:
    backend, limits = opened.backend, room(opened, 4)
    for name in "abcd":
        put(backend, [page(name, A.scope)], limits)
    published = put(backend, [page("large", A.scope, limits.budget_bytes * 5 // 8 - opened.footprint({}))], limits)
    assert published.evicted_pages == 3
    assert there(backend, A, "a", "b", "c", "d", "large") == ["d", "large"]
    assert backend.stats().size_bytes <= limits.budget_bytes


def test_pages_of_one_call_do_not_evict_each_other(opened: Opened) -> None:
    backend, limits = opened.backend, room(opened, 2)
    published = put(backend, chain(A, "a", "b", "c"), limits)
    assert there(backend, A, *"abc") == ["a", "b"]
    assert published.pages == 2
    assert published.refused == {Refusal.FULL: 1}


def test_a_page_of_this_call_that_was_there_is_not_evicted_for_the_others(opened: Opened) -> None:
    backend, limits = opened.backend, room(opened, 2)
    put(backend, [page("old", A.scope)], limits)
    put(backend, [page("other", A.scope)], limits)
    put(backend, [page("new", A.scope), page("old", A.scope)], limits)
    assert there(backend, A, "old", "other", "new") == ["old", "new"]


@pytest.mark.parametrize("bound", ["budget", "quota"])
def test_a_page_larger_than_a_bound_is_refused_and_evicts_nothing(opened: Opened, bound: str) -> None:
    backend, small = opened.backend, room(opened, 2).budget_bytes
    limits = Limits(small, 2**30) if bound == "budget" else Limits(2**30, small)
    put(backend, [page("a", A.scope)], limits)
    published = put(backend, [page("huge", A.scope, small)], limits)
    assert published.refused == {Refusal.TOO_LARGE: 1}
    assert there(backend, A, "a", "huge") == ["a"]


def test_a_page_that_outgrows_the_budget_keeps_what_it_had(opened: Opened) -> None:
    backend, limits = opened.backend, room(opened, 1)
    put(backend, [page("a", A.scope, {"mass/0": b"x" * 100})], limits)
    published = put(backend, [page("a", A.scope, {"mass/1": b"y" * 100})], limits)
    assert published.refused == {Refusal.TOO_LARGE: 1}
    assert look(backend, A, "a") == [(digest("a"), {"mass/0": 100})]


def test_growing_a_page_evicts_others(opened: Opened) -> None:
    # With Redis, a page counts for as much as is allocated for it: 102 bytes of data are as many as find room there.
    backend, limits = opened.backend, room(opened, 2, size=102)
    put(backend, [page("a", A.scope, 102)], limits)
    put(backend, [page("b", A.scope, 102)], limits)
    put(backend, [page("a", A.scope, {"mass/1": b"y"})], limits)
    assert there(backend, A, "a", "b") == ["a"]


def test_a_tenant_at_its_quota_loses_its_own_pages_only(opened: Opened) -> None:
    backend = opened.backend
    quota = Limits(2**30, room(opened, 2).budget_bytes)
    put(backend, [page("theirs", B.scope)], quota, scope=B)
    put(backend, [page("a", A.scope)], quota, scope=A)
    put(backend, [page("b", A2.scope)], quota, scope=A2)
    published = put(backend, [page("c", A2.scope)], quota, scope=A2)
    assert published.evicted_pages == 1
    assert there(backend, B, "theirs") == ["theirs"]
    assert there(backend, A, "a") == []
    assert there(backend, A2, "b", "c") == ["b", "c"]


def test_a_quota_that_cannot_be_kept_refuses_as_quota(opened: Opened) -> None:
    backend = opened.backend
    quota = Limits(2**30, room(opened, 1).budget_bytes)
    put(backend, [page("a", A.scope)], quota)
    backend.lease(A.scope, [key("a")], "reader", None)
    assert put(backend, [page("b", A.scope)], quota).refused == {Refusal.QUOTA: 1}
    assert there(backend, A, "a", "b") == ["a"]


def test_the_budget_evicts_whoever_is_oldest(opened: Opened) -> None:
    backend, limits = opened.backend, room(opened, 2)
    put(backend, [page("theirs", B.scope)], limits, scope=B)
    put(backend, [page("a", A.scope)], limits, scope=A)
    put(backend, [page("b", A.scope)], limits, scope=A)
    assert there(backend, B, "theirs") == []
    assert there(backend, A, "a", "b") == ["a", "b"]


def test_a_smaller_budget_is_kept_by_the_next_publish(opened: Opened) -> None:
    backend, limits = opened.backend, room(opened, 2)
    put(backend, [page(name, A.scope) for name in "abcdef"])
    put(backend, [page("new", A.scope)], limits)
    assert backend.stats().size_bytes <= limits.budget_bytes
    assert there(backend, A, *"abcdef", "new") == ["f", "new"]


def test_evict_frees_at_least_what_is_asked_and_no_page_more(opened: Opened) -> None:
    backend, one = opened.backend, room(opened, 1).budget_bytes
    put(backend, [page(name, A.scope) for name in "abcd"])
    gone = backend.evict(one + 1)
    assert (gone.pages, gone.size_bytes) == (2, 2 * one)
    assert there(backend, A, *"abcd") == ["c", "d"]
    assert backend.evict(0).pages == 0
    assert backend.evict(2**40).pages == 2
    assert backend.stats().size_bytes == 0


def test_a_leased_page_and_so_its_ancestors_stay(opened: Opened) -> None:
    backend = opened.backend
    put(backend, [*chain(A, "a", "b", "c"), page("x", A.scope)])
    assert backend.lease(A.scope, [key("b")], "reader", None) == 1
    backend.evict(2**40)
    assert there(backend, A, "a", "b", "c", "x") == ["a", "b"]


def test_lease_counts_the_pages_that_are_there(backend: Backend) -> None:
    put(backend, chain(A, "a", "b"))
    assert backend.lease(A.scope, [key("a"), key("b"), key("missing")], "reader", 60) == 2
    assert backend.stats().leased_pages == 2
    assert backend.lease(B.scope, [key("a")], "reader", 60) == 0


def test_release_ends_all_leases_of_its_holder(backend: Backend) -> None:
    put(backend, chain(A, "a", "b"))
    put(backend, [page("c", B.scope)], scope=B)
    backend.lease(A.scope, [key("a"), key("b")], "reader", None)
    backend.lease(B.scope, [key("c")], "reader", 60)
    backend.lease(A.scope, [key("a")], "other", None)
    assert backend.release("reader") == 3
    assert backend.stats().leased_pages == 1
    assert backend.release("reader") == 0
    backend.evict(2**40)
    assert there(backend, A, "a", "b") == ["a"]


def test_a_lease_ends_by_itself(opened: Opened) -> None:
    backend = opened.backend
    put(backend, [page("a", A.scope), page("b", A.scope)])
    backend.lease(A.scope, [key("a")], "dead reader", 0.2)
    backend.lease(A.scope, [key("b")], "reader", 60)
    opened.advance(0.3)
    assert backend.stats().leased_pages == 1
    backend.evict(2**40)
    assert there(backend, A, "a", "b") == ["b"]
    assert backend.release("dead reader") == 0


def test_a_page_whose_lease_ended_goes_in_its_old_place(opened: Opened) -> None:
    backend = opened.backend
    for name in "abc":
        put(backend, [page(name, A.scope)])
    backend.lease(A.scope, [key("a")], "reader", 0.2)
    opened.advance(0.3)
    backend.evict(1)
    assert there(backend, A, *"abc") == ["b", "c"]


def test_leasing_again_extends_and_never_shortens(opened: Opened) -> None:
    backend = opened.backend
    put(backend, [page(name, A.scope) for name in "abc"])
    for name, first, second in (("a", 0.2, 60), ("b", 60, 0.2), ("c", None, 0.2)):
        backend.lease(A.scope, [key(name)], "reader", first)
        backend.lease(A.scope, [key(name)], "reader", second)
    opened.advance(0.3)
    assert backend.stats().leased_pages == 3


def test_pages_that_cannot_go_fill_the_budget(opened: Opened) -> None:
    backend, limits = opened.backend, room(opened, 2)
    put(backend, [page("a", A.scope), page("b", A.scope)], limits)
    backend.lease(A.scope, [key("a"), key("b")], "reader", None)
    assert put(backend, [page("c", A.scope)], limits).refused == {Refusal.FULL: 1}
    backend.release("reader")
    assert put(backend, [page("c", A.scope)], limits).pages == 1


def test_records_can_be_added_to_a_leased_page(backend: Backend) -> None:
    put(backend, [page("a", A.scope, {})])
    backend.lease(A.scope, [key("a")], "reader", None)
    put(backend, [page("a", A.scope, {"mass/0": b"x"})])
    assert backend.stats().leased_pages == 1
    assert backend.evict(2**40).pages == 0


def test_a_flush_hides_at_once_and_reclaims_later(opened: Opened) -> None:
    backend = opened.backend
    put(backend, chain(A, "a", "b"))
    before = backend.stats().size_bytes
    flushed = backend.flush()
    assert (flushed.pages, flushed.size_bytes) == (2, before)
    assert look(backend, A, "a", "b") == [None, None]
    assert backend.read(A.scope, [(key("a"), "mass/0")]) == [None]
    assert list(backend.scan()) == []
    (stats,) = [scope for scope in backend.stats().scopes if scope.info == A]
    assert (stats.epoch, stats.pages, stats.size_bytes) == (1, 0, 0)
    assert backend.evict(before).pages == 2
    assert backend.stats().size_bytes == 0


@pytest.mark.parametrize(
    ("fits", "gone"),
    [
        ({"tenant": "acme"}, ["a", "a2"]),
        ({"model": "small"}, ["a", "b"]),
        ({"tenant": "acme", "model": "small"}, ["a"]),
        ({"revision": "r1"}, ["a", "a2", "b"]),
        ({"revision": "r2"}, []),
        ({"tenant": "acm"}, []),
        ({}, ["a", "a2", "b"]),
    ],
    ids=str,
)
def test_a_flush_takes_the_scopes_that_fit(backend: Backend, fits: dict[str, str], gone: list[str]) -> None:
    scopes = {"a": A, "a2": A2, "b": B}
    for name, scope in scopes.items():
        put(backend, [page(name, scope.scope)], scope=scope)
    assert backend.flush(**fits).pages == len(gone)
    assert [name for name, scope in scopes.items() if not there(backend, scope, name)] == gone


def test_what_is_published_after_a_flush_is_new(backend: Backend) -> None:
    put(backend, chain(A, "a", "b"))
    backend.flush()
    other = PageWrite(key("a"), A.scope, digest("other tokens"), {"mass/1": b"new"})
    assert put(backend, [other]).refused == {}
    assert look(backend, A, "a", "b") == [(digest("other tokens"), {"mass/1": 3}), None]


def test_flushed_pages_go_before_any_other(opened: Opened) -> None:
    backend, limits = opened.backend, room(opened, 3)
    put(backend, [page("old", A.scope)], limits, scope=A)
    put(backend, [page("flushed", B.scope)], limits, scope=B)
    put(backend, [page("flushed too", B.scope)], limits, scope=B)
    backend.flush(tenant="bolt")
    put(backend, [page("n1", A.scope)], limits)
    put(backend, [page("n2", A.scope)], limits)
    assert there(backend, A, "old", "n1", "n2") == ["old", "n1", "n2"]
    put(backend, [page("n3", A.scope)], limits)
    assert there(backend, A, "old", "n1", "n2", "n3") == ["n1", "n2", "n3"]


def test_a_flush_ends_leases(opened: Opened) -> None:
    backend, limits = opened.backend, room(opened, 1)
    put(backend, [page("a", A.scope)], limits)
    backend.lease(A.scope, [key("a")], "reader", None)
    backend.flush()
    assert backend.stats().leased_pages == 0
    assert put(backend, [page("b", A.scope)], limits).pages == 1
    assert backend.release("reader") == 0


def test_a_flushed_child_does_not_keep_a_new_parent(opened: Opened) -> None:
    backend = opened.backend
    put(backend, chain(A, "a", "b"))
    backend.flush()
    put(backend, [page("a", A.scope)])
    backend.evict(2**40)
    assert backend.stats().size_bytes == 0


def test_flushing_again_and_again_loses_no_bytes(backend: Backend) -> None:
    for _ in range(5):
        put(backend, chain(A, "a", "b", "c"))
        backend.flush()
    backend.evict(2**40)
    assert backend.stats().size_bytes == 0
