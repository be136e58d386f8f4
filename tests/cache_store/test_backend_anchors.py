"""Anchor pools of every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache_store.backends.protocol import AnchorPool

from .sample_pages import A, B

if TYPE_CHECKING:
    from cache_store.backends.protocol import Backend


POOL = AnchorPool(A, "turn/3", capacity=6, budget_bytes=1000)


def test_anchors_come_oldest_first_with_their_bytes(backend: Backend) -> None:
    assert backend.anchors(POOL) == {}
    for identity in ("z", "a", "m"):
        assert backend.put_anchor(POOL, identity, identity.encode() * 3).stored
    assert list(backend.anchors(POOL).items()) == [("z", b"zzz"), ("a", b"aaa"), ("m", b"mmm")]


def test_pools_are_apart_by_slot_and_namespace(backend: Backend) -> None:
    backend.put_anchor(POOL, "x", b"1")
    backend.put_anchor(AnchorPool(A, "turn/33"), "x", b"2")
    backend.put_anchor(AnchorPool(B, "turn/3"), "x", b"3")
    assert backend.anchors(POOL) == {"x": b"1"}
    assert backend.anchors(AnchorPool(A, "turn/33")) == {"x": b"2"}
    assert backend.anchors(AnchorPool(B, "turn/3")) == {"x": b"3"}
    assert backend.anchors(AnchorPool(A, "turn")) == {}


def test_of_the_five_oldest_anchors_the_least_used_goes(backend: Backend) -> None:
    for identity in "abcdef":
        backend.put_anchor(POOL, identity, b"x")
    # f is used least but is the sixth; c is used least of the five oldest.
    backend.use_anchors(POOL, ["a", "b", "d", "e"])
    backend.use_anchors(POOL, ["a", "b", "d", "e", "c", "not there"])
    assert list(backend.put_anchor(POOL, "g", b"x").evicted) == ["c"]
    assert list(backend.anchors(POOL)) == ["a", "b", "d", "e", "f", "g"]
    # Now f is among the five oldest.
    assert list(backend.put_anchor(POOL, "h", b"x").evicted) == ["f"]


def test_at_equal_use_the_older_anchor_goes(backend: Backend) -> None:
    for identity in "abcdef":
        backend.put_anchor(POOL, identity, b"x")
    backend.use_anchors(POOL, ["a"])
    assert list(backend.put_anchor(POOL, "g", b"x").evicted) == ["b"]


def test_looking_at_anchors_is_no_use(backend: Backend) -> None:
    for identity in "abcdef":
        backend.put_anchor(POOL, identity, b"x")
    backend.use_anchors(POOL, ["a"])
    for _ in range(3):
        backend.anchors(POOL)
    assert list(backend.put_anchor(POOL, "g", b"x").evicted) == ["b"]


def test_anchors_are_evicted_until_the_budget_is_kept(backend: Backend) -> None:
    for identity in "abc":
        backend.put_anchor(POOL, identity, b"x" * 300)
    put_large = backend.put_anchor(POOL, "large", b"x" * 500)
    assert (put_large.stored, list(put_large.evicted)) == (True, ["a", "b"])
    assert list(backend.anchors(POOL)) == ["c", "large"]


def test_an_anchor_larger_than_the_budget_is_not_stored(backend: Backend) -> None:
    backend.put_anchor(POOL, "a", b"x")
    assert not backend.put_anchor(POOL, "large", b"x" * 1001).stored
    assert not backend.put_anchor(POOL, "a", b"x" * 1001).stored
    assert backend.anchors(POOL) == {"a": b"x"}
    assert backend.put_anchor(POOL, "exact", b"x" * 1000).stored
    assert list(backend.anchors(POOL)) == ["exact"]


def test_a_replaced_anchor_keeps_its_age_and_its_uses(backend: Backend) -> None:
    for identity in "abcdef":
        backend.put_anchor(POOL, identity, b"x")
    backend.use_anchors(POOL, ["a"])
    assert backend.put_anchor(POOL, "a", b"new").stored
    assert next(iter(backend.anchors(POOL).items())) == ("a", b"new")
    assert list(backend.put_anchor(POOL, "g", b"x").evicted) == ["b"]


def test_an_anchor_that_grows_does_not_evict_itself(backend: Backend) -> None:
    for identity in "ab":
        backend.put_anchor(POOL, identity, b"x" * 400)
    assert list(backend.put_anchor(POOL, "a", b"x" * 900).evicted) == ["b"]
    assert list(backend.anchors(POOL)) == ["a"]


def test_a_smaller_pool_is_kept_by_the_next_put(backend: Backend) -> None:
    for identity in "abcdef":
        backend.put_anchor(POOL, identity, b"x")
    backend.put_anchor(AnchorPool(A, "turn/3", capacity=2), "g", b"x")
    assert list(backend.anchors(POOL)) == ["f", "g"]


def test_a_flush_empties_the_pools_of_its_namespaces(backend: Backend) -> None:
    backend.put_anchor(POOL, "a", b"x")
    backend.put_anchor(AnchorPool(B, "turn/3"), "a", b"x")
    backend.flush(tenant="acme")
    assert backend.anchors(POOL) == {}
    assert backend.anchors(AnchorPool(B, "turn/3")) == {"a": b"x"}
    assert backend.put_anchor(POOL, "a", b"y").stored
    assert backend.anchors(POOL) == {"a": b"y"}


def test_a_quarantined_anchor_is_gone_counted_and_leaves_room(backend: Backend) -> None:
    small = AnchorPool(A, "turn/3", capacity=2, budget_bytes=1000)
    for identity in ("a", "b"):
        backend.put_anchor(small, identity, b"x" * 500)
    backend.use_anchors(small, ["a"])
    assert backend.quarantine_anchor(small, "a")
    assert not backend.quarantine_anchor(small, "a")
    assert not backend.quarantine_anchor(AnchorPool(A, "other"), "b")
    assert not backend.quarantine_anchor(AnchorPool(B, "turn/3"), "b")
    assert backend.anchors(small) == {"b": b"x" * 500}
    assert backend.stats().quarantined == 1
    assert list(backend.put_anchor(small, "a", b"y" * 500).evicted) == []
    # A new one: the newest, without uses.
    assert list(backend.anchors(small)) == ["b", "a"]
