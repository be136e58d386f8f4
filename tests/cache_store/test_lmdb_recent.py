"""Use of pages, remembered until it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache_store.backends.lmdb import LmdbBackend
from cache_store.backends.lmdb_recent import Recent
from cache_store.backends.protocol import Limits

from .lmdb_process import SCOPE, true_page

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_nothing_used_is_never_due() -> None:
    recent = Recent()
    recent.add([], [])
    assert not recent.is_due(0.0)
    assert not recent.is_due(1e9)


def test_use_is_due_by_age_once() -> None:
    recent = Recent()
    recent.add([b"a"], [])
    assert not recent.is_due(100.0)
    assert not recent.is_due(100.0 + Recent.AGE_S - 0.1)
    assert recent.is_due(100.0 + Recent.AGE_S)
    assert not recent.is_due(100.0 + Recent.AGE_S)


def test_use_is_due_by_count() -> None:
    recent = Recent()
    recent.add([bytes([number]) for number in range(100)], [])
    assert not recent.is_due(0.0)
    recent.add([number.to_bytes(4, "big") for number in range(Recent.COUNT)], [])
    assert recent.is_due(0.0)


def test_damage_is_due_at_once() -> None:
    recent = Recent()
    recent.add([], [b"a"])
    assert recent.is_due(0.0)
    assert recent.take() == ([], [b"a"])
    assert recent.take() == ([], [])


def test_a_page_used_again_is_used_last_and_kept_once() -> None:
    recent = Recent()
    recent.add([b"a", b"b", b"a"], [])
    recent.add([b"c", b"b"], [])
    assert recent.take() == ([b"a", b"c", b"b"], [])


def test_what_cannot_be_written_stays_bounded_and_the_oldest_is_forgotten() -> None:
    recent = Recent()
    for start in range(0, 2 * Recent.MOST, 1000):
        recent.add([number.to_bytes(4, "big") for number in range(start, start + 1000)], [])
    used, _ = recent.take()
    assert len(used) == Recent.MOST
    assert used[-1] > used[0] > (Recent.MOST - 1000).to_bytes(4, "big")


def test_many_lookups_are_written_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recent, "COUNT", 3)
    backend = LmdbBackend(tmp_path / "store", deadline_s=30)
    pages = [true_page(name, SCOPE.scope) for name in "abc"]
    backend.publish(SCOPE, pages, Limits(2**30, 2**30))
    environment = backend._environment.env

    def changes() -> int:
        # An empty change behind all that was asked for counts for nothing.
        backend._writer.change(lambda _: None, 30)
        return environment.info()["last_txnid"]

    before = changes()
    backend.lookup(SCOPE.scope, [pages[0].key, pages[1].key])
    assert changes() == before
    backend.lookup(SCOPE.scope, [pages[2].key])
    assert changes() == before + 1
    backend.close()
