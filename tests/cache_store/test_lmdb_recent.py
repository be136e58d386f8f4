"""Use of pages, remembered until it is written."""

from __future__ import annotations

import time
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
    assert not recent.add([], [])
    assert not recent.is_old()
    assert not recent.is_old()


def test_use_is_old_when_it_is_still_there_the_second_time_and_that_is_told_once() -> None:
    recent = Recent()
    assert not recent.is_old()
    recent.add([b"a"], [])
    assert not recent.is_old()
    assert recent.is_old()
    assert not recent.is_old()
    recent.take()
    recent.add([b"b"], [])
    assert not recent.is_old()
    assert recent.is_old()


def test_what_was_taken_in_between_is_not_old() -> None:
    recent = Recent()
    recent.add([b"a"], [])
    assert not recent.is_old()
    assert recent.take() == ([b"a"], [])
    recent.add([b"b"], [])
    assert not recent.is_old()


def test_use_is_due_by_the_number_of_pages_once() -> None:
    recent = Recent()
    assert not recent.add([number.to_bytes(4, "big") for number in range(100)], [])
    assert recent.add([number.to_bytes(4, "big") for number in range(Recent.COUNT)], [])
    assert not recent.add([number.to_bytes(4, "big") for number in range(Recent.COUNT)], [])


def test_the_same_few_pages_used_often_are_not_due() -> None:
    recent = Recent()
    assert not any(recent.add([b"a", b"b", b"c"], []) for _ in range(Recent.COUNT))
    assert recent.take() == ([b"a", b"b", b"c"], [])


def test_damage_is_due_at_once() -> None:
    recent = Recent()
    assert recent.add([], [b"a"])
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


def test_use_without_any_change_is_written_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recent, "AGE_S", 0.01)
    backend = LmdbBackend(tmp_path / "store", deadline_s=30)
    page = true_page("a", SCOPE.scope)
    backend.publish(SCOPE, [page], Limits(2**30, 2**30))
    environment = backend._environment.env
    before = environment.info()["last_txnid"]
    backend.lookup(SCOPE.scope, [page.key])
    until_s = time.monotonic() + 30
    while environment.info()["last_txnid"] == before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert environment.info()["last_txnid"] > before
    backend.close()
