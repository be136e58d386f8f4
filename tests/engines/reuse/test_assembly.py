"""What a worker does of itself, beside its requests."""

import os
import threading

import pytest

from cache_store.errors import StoreFullError, StoreUnavailableError
from cache_store.keys import PAGE, page_keys
from cache_store.namespace import Namespace
from cache_store.pool.shared_memory import remove_abandoned
from cache_store.records import Kind, Record
from engines.reuse import assembly
from engines.reuse.assembly import _open_pool, watch
from engines.reuse.settings import MapSettings, ReuseSettings

from .conftest import LARGE

TOKENS = list(range(PAGE))


def test_gauges_follow_the_store_whoever_changes_it_and_outlive_an_outage(store, backend, store_registry):
    of = Namespace("acme", LARGE.name, LARGE.revision, LARGE.tokenizer, LARGE.template, "")
    [page] = page_keys(of.scope, TOKENS)
    ended, reached = threading.Event(), threading.Event()

    class Watched:
        def stats(self):
            found = store.stats()
            if store_registry.get_sample_value("crossfill_store_pages") == 1:
                reached.set()
            return found

    backend.error = StoreUnavailableError("down", "timeout")
    thread = threading.Thread(target=watch, args=([Watched().stats], ended, 0.01))
    thread.start()
    try:
        while not backend.calls["stats"]:
            assert not reached.wait(0.01)
        backend.error = None
        store.publish(of, TOKENS, {0: [Record(Kind.MASS, 0, (1, 1), "mass8", page.tokens_digest, b"\x01\xff")]})
        assert reached.wait(30)
    finally:
        ended.set()
        thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("device", "pool_bytes", "said"), [("cuda", 2**20, "host's memory"), ("cpu", 2**40, "no room")], ids=str
)
def test_a_worker_that_can_have_no_block_pool_says_so_and_guides(caplog, monkeypatch, device, pool_bytes, said):
    monkeypatch.setattr(assembly, "_POOL_WAIT_S", 0.5)
    told = MapSettings(pool=f"none-{os.getpid()}", pool_bytes=pool_bytes)
    settings = ReuseSettings(model=LARGE, publish=(1,), publish_maps={1: 0.9}, maps=told)
    assert _open_pool(settings, device) is None
    assert "layers are guided instead" in caplog.text
    assert said in caplog.text
    # A control: the same with room for it, where it can be used.
    pool = _open_pool(settings.model_copy(update={"maps": told.model_copy(update={"pool_bytes": 2**20})}), "cpu")
    assert pool is not None
    pool.close()
    assert remove_abandoned(told.pool) == [told.pool]


def test_a_block_pool_that_another_worker_is_making_is_waited_for(monkeypatch):
    opened, waits = [], iter([StoreUnavailableError("busy", "timeout"), StoreFullError("no room"), None])

    def open_later(*arguments):
        if (fault := next(waits)) is not None:
            raise fault
        opened.append(arguments)
        return "the pool"

    monkeypatch.setattr(assembly, "open_pool", open_later)
    settings = ReuseSettings(model=LARGE, publish=(1,), publish_maps={1: 0.9}, maps=MapSettings(pool="later"))
    assert _open_pool(settings, "cpu") == "the pool"
    assert [name for name, _ in opened] == ["later"]
