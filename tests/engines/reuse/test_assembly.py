"""What a worker does of itself, beside its requests."""

import threading

from cache_store.errors import StoreUnavailableError
from cache_store.keys import PAGE, page_keys
from cache_store.namespace import Namespace
from cache_store.records import Kind, Record
from engines.reuse.assembly import watch

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
