import threading
from dataclasses import replace

import pytest

from cache_store.client.fetch import Fetcher
from cache_store.keys import PAGE
from cache_store.metrics import FetchEnd

PREFIXES = [[number] * (4 * PAGE) for number in range(4)]
NAMES = ("mass/0", "mass/1", "kv/1", "mass/2")
# Longer than anything here takes; a test that waits for it has failed.
LONG_S = 30.0


class Gate:
    """Stops every read but those of layer 0, until it is opened."""

    def __init__(self, read):
        self.read, self.stopped, self.opened = read, threading.Semaphore(0), threading.Event()

    def __call__(self, scope, wanted):
        if wanted[0][1] != "mass/0" and not self.opened.is_set():
            self.stopped.release()
            assert self.opened.wait(LONG_S)
        return self.read(scope, wanted)


@pytest.fixture
def gate(backend, monkeypatch):
    gate = Gate(backend.backend.read)
    monkeypatch.setattr(backend.backend, "read", gate)
    yield gate
    gate.opened.set()


@pytest.fixture
def fetcher(store):
    fetcher = Fetcher(store, threads=5)
    yield fetcher
    fetcher.close()


@pytest.fixture
def running(store, fetcher, gate, namespace, made):
    """Four fetches that have layer 0 and are about to read layer 1, and the records of each prefix."""
    records = [made(namespace, tokens, NAMES) for tokens in PREFIXES]
    for tokens, of_pages in zip(PREFIXES, records, strict=True):
        store.publish(namespace, tokens, of_pages)
    fetches = [fetcher.start(str(tokens[0]), namespace, tokens, NAMES, LONG_S) for tokens in PREFIXES]
    for fetch in fetches:
        assert gate.stopped.acquire(timeout=LONG_S)
        assert fetch.end is None
    return list(zip(fetches, records, strict=True))


def taken(fetch):
    """Everything a fetch gives, once it has ended: records by name, then by page."""
    layers = [fetch.take(layer, LONG_S) or {} for layer in range(3)]
    assert fetch.end is not None
    return {name: pages for layer in layers for name, pages in layer.items()}


def layer_0(records):
    return {"mass/0": {index: page[0] for index, page in records.items()}}


def test_fetches_that_run_during_a_flush_keep_what_they_had_and_lookups_miss_at_once(
    store, fetcher, gate, running, namespace
):
    assert store.flush().pages == 16
    for tokens in PREFIXES:
        assert not any(store.match(namespace, tokens).hits)
    late = fetcher.start("late", namespace, PREFIXES[0], NAMES, LONG_S)
    assert taken(late) == {}
    assert late.end is FetchEnd.DONE
    gate.opened.set()
    for fetch, records in running:
        assert taken(fetch) == layer_0(records)


def test_without_a_flush_the_same_fetches_get_everything(gate, running):
    gate.opened.set()
    for fetch, records in running:
        found = taken(fetch)
        assert found == {
            name: {index: page[place] for index, page in records.items()} for place, name in enumerate(NAMES)
        }
        assert fetch.end is FetchEnd.DONE


def test_no_fetch_mixes_what_was_stored_before_a_flush_with_what_came_after_it(
    store, fetcher, gate, running, namespace, counted
):
    store.flush(model=namespace.model)
    newer = {}
    for tokens, (_, records) in zip(PREFIXES, running, strict=True):
        newer = {
            index: [replace(record, payload=record.payload[::-1]) for record in page] for index, page in records.items()
        }
        assert store.publish(namespace, tokens, newer).pages == 4
    gate.opened.set()
    for fetch, records in running:
        assert taken(fetch) == layer_0(records)
        assert fetch.end is FetchEnd.FLUSHED
    assert counted("fetches_total", end="flushed") == 4
    # The control: whoever begins now gets all that is new.
    now = taken(fetcher.start("now", namespace, PREFIXES[-1], NAMES, LONG_S))
    assert now == {name: {index: page[place] for index, page in newer.items()} for place, name in enumerate(NAMES)}
