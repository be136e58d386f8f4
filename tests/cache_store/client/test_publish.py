import time
from array import array
from collections import Counter
from dataclasses import replace

import pytest

from cache_store.client.publish import Publisher, job_bytes
from cache_store.errors import StoreUnavailableError
from cache_store.keys import PAGE
from cache_store.metrics import Drop

TOKENS = list(range(4 * PAGE))
# Longer than anything here takes; a test that waits for it has failed.
LONG_S = 30.0


@pytest.fixture
def publisher(store):
    publisher = Publisher(store)
    yield publisher
    publisher.close(0)


def hold(backend, publisher, namespace, made):
    """Keep the publisher's thread busy with a first job until `backend.go_on()`."""
    backend.hang("publish")
    first = [7] * PAGE
    assert publisher.offer(namespace, first, made(namespace, first)) is None
    while not backend.calls["publish"]:
        time.sleep(0.001)


def test_what_is_offered_is_found(store, publisher, namespace, made, counted):
    assert publisher.offer(namespace, TOKENS, made(namespace, TOKENS)) is None
    assert publisher.drain(LONG_S)
    assert store.match(namespace, TOKENS).contiguous_pages("mass/0") == 4
    assert counted("published_pages_total") == 4


def test_jobs_of_one_namespace_that_wait_are_written_together(backend, store, publisher, namespace, made):
    other = replace(namespace, tenant="other")
    hold(backend, publisher, namespace, made)
    longer = [*TOKENS, *range(PAGE)]
    publisher.offer(namespace, TOKENS, made(namespace, TOKENS, ("mass/0",)))
    publisher.offer(other, TOKENS, made(other, TOKENS))
    publisher.offer(namespace, longer, made(namespace, longer, ("mass/1",)))
    backend.go_on()
    assert publisher.drain(LONG_S)
    assert backend.calls["publish"] == 3, "the first, both of one namespace, the other"
    found = store.match(namespace, longer)
    assert (found.contiguous_pages("mass/0"), found.contiguous_pages("mass/1")) == (4, 5)
    assert store.match(other, TOKENS).contiguous_pages("mass/0") == 4


def test_a_flush_drops_what_waits_and_was_computed_before_it(backend, store, publisher, namespace, made, counted):
    before = store.match(namespace, TOKENS).flushes
    hold(backend, publisher, namespace, made)
    publisher.offer(namespace, TOKENS, made(namespace, TOKENS), flushes=before)
    backend.backend.flush()
    publisher.offer(namespace, TOKENS, made(namespace, TOKENS, ("mass/1",)), flushes=before + 1)
    backend.go_on()
    assert publisher.drain(LONG_S)
    assert counted("dropped_pages_total", reason="flushed") == 4
    assert store.match(namespace, TOKENS).names == {"mass/1"}


def test_a_batch_has_a_bound(backend, store, namespace, made):
    publisher = Publisher(store, batch_bytes=1)
    hold(backend, publisher, namespace, made)
    for _ in range(3):
        publisher.offer(namespace, TOKENS, made(namespace, TOKENS))
    backend.go_on()
    assert publisher.close(LONG_S)
    assert backend.calls["publish"] == 4


def test_a_full_queue_drops_what_comes_and_keeps_what_waits(backend, store, namespace, made, counted):
    records = made(namespace, TOKENS)
    publisher = Publisher(store, max_bytes=2 * job_bytes(TOKENS, records))
    hold(backend, publisher, namespace, made)
    assert publisher.offer(namespace, TOKENS, records) is None
    other = [8] * (4 * PAGE)
    assert publisher.offer(namespace, other, made(namespace, other)) is Drop.QUEUE_FULL
    assert counted("dropped_pages_total", reason="queue_full") == 4
    backend.go_on()
    assert publisher.drain(LONG_S)
    assert publisher.offer(namespace, other, made(namespace, other)) is None
    assert publisher.close(LONG_S)
    assert store.match(namespace, TOKENS).names == store.match(namespace, other).names == {"mass/0"}
    assert counted("dropped_pages_total", reason="queue_full") == 4


def test_tokens_count_towards_the_bound_as_much_as_they_take(backend, store, namespace, made, counted):
    def taken(tokens):
        """How many of these prefixes with one record each wait beside the one that is written."""
        publisher = Publisher(store, max_bytes=2**20)
        hold(backend, publisher, namespace, made)
        records = made(namespace, [7] * PAGE)
        number = 0
        while number < 1000 and publisher.offer(replace(namespace, salt=str(number)), tokens, records) is None:
            number += 1
        backend.go_on()
        publisher.close(LONG_S)
        return number

    assert 4 <= taken([7] * 20_000) <= 2**20 // 8 // 20_000
    assert 10 <= taken(array("I", [7] * 20_000)) <= 2**20 // 4 // 20_000
    # The control: what is short is many.
    assert taken([7] * PAGE) > 100


def test_jobs_without_records_count_too(backend, store, namespace, made):
    publisher = Publisher(store, max_bytes=2**16)
    hold(backend, publisher, namespace, made)
    answers = [publisher.offer(namespace, [], {}) for _ in range(1000)]
    assert Counter(answers)[Drop.QUEUE_FULL] > 900
    assert answers[0] is None
    backend.go_on()
    assert publisher.close(LONG_S)


def test_namespaces_take_turns(backend, store, namespace, made, monkeypatch):
    publisher = Publisher(store, batch_bytes=1)
    order = []
    write = store.write
    monkeypatch.setattr(
        store, "write", lambda of, pages, *, flushes: order.append(of.tenant) or write(of, pages, flushes=flushes)
    )
    hold(backend, publisher, namespace, made)
    busy, quiet = replace(namespace, tenant="busy"), replace(namespace, tenant="quiet")
    for _ in range(3):
        publisher.offer(busy, TOKENS, made(busy, TOKENS))
    publisher.offer(quiet, TOKENS, made(quiet, TOKENS))
    backend.go_on()
    assert publisher.close(LONG_S)
    assert order == ["acme", "busy", "quiet", "busy", "busy"]


def test_what_could_never_wait_is_too_large(store, namespace, made, counted):
    publisher = Publisher(store, max_bytes=100)
    assert publisher.offer(namespace, TOKENS, made(namespace, TOKENS)) is Drop.TOO_LARGE
    assert counted("dropped_pages_total", reason="too_large") == 4
    publisher.close(LONG_S)


def test_a_store_that_is_away_drops_and_the_next_is_written(backend, store, publisher, namespace, made, counted):
    backend.error = StoreUnavailableError("connection refused", "refused")
    publisher.offer(namespace, TOKENS, made(namespace, TOKENS))
    assert publisher.drain(LONG_S)
    assert counted("dropped_pages_total", reason="unavailable") == 4
    backend.error = None
    publisher.offer(namespace, TOKENS, made(namespace, TOKENS))
    assert publisher.drain(LONG_S)
    assert store.match(namespace, TOKENS).names == {"mass/0"}
    assert counted("dropped_pages_total", reason="unavailable") == 4


def test_records_that_do_not_fit_are_dropped_and_the_thread_goes_on(store, publisher, namespace, made, counted, caplog):
    records = made(namespace, TOKENS)
    publisher.offer(namespace, TOKENS, {0: records[1]})
    assert publisher.drain(LONG_S)
    assert counted("dropped_pages_total", reason="failed") == 1
    assert "of other tokens" in caplog.text
    publisher.offer(namespace, TOKENS, records)
    assert publisher.drain(LONG_S)
    assert store.match(namespace, TOKENS).contiguous_pages("mass/0") == 4


def test_a_defective_job_takes_no_other_of_its_batch_with_it(backend, store, publisher, namespace, made, counted):
    records = made(namespace, TOKENS)
    hold(backend, publisher, namespace, made)
    publisher.offer(namespace, TOKENS, {0: records[0]})
    publisher.offer(namespace, TOKENS, {1: records[2]})
    publisher.offer(namespace, TOKENS, {3: records[3]})
    backend.go_on()
    assert publisher.drain(LONG_S)
    assert store.match(namespace, TOKENS).pages_with("mass/0") == (0, 3)
    assert counted("dropped_pages_total", reason="failed") == 1


def test_defects_are_logged_once_a_minute(store, publisher, namespace, made, caplog):
    records = made(namespace, TOKENS)
    for _ in range(5):
        publisher.offer(namespace, TOKENS, {0: records[1]})
        assert publisher.drain(LONG_S)
    [line] = caplog.messages
    assert "a record of page 0 is of other tokens than the page" in line
    assert "Traceback" not in caplog.text


def test_close_writes_what_waits_and_takes_nothing_more(backend, store, namespace, made, counted):
    publisher = Publisher(store)
    hold(backend, publisher, namespace, made)
    publisher.offer(namespace, TOKENS, made(namespace, TOKENS))
    backend.go_on()
    assert publisher.close(LONG_S)
    assert store.match(namespace, TOKENS).contiguous_pages("mass/0") == 4
    assert publisher.offer(namespace, TOKENS, made(namespace, TOKENS)) is Drop.CLOSED
    assert counted("dropped_pages_total", reason="closed") == 4


def test_close_does_not_wait_for_a_store_that_hangs(backend, store, namespace, made, counted):
    publisher = Publisher(store)
    hold(backend, publisher, namespace, made)
    publisher.offer(namespace, TOKENS, made(namespace, TOKENS))
    started_s = time.monotonic()
    assert not publisher.close(0.05)
    assert time.monotonic() - started_s < LONG_S / 2
    assert counted("dropped_pages_total", reason="closed") == 4
    backend.go_on()
    publisher.drain(LONG_S)
    assert store.match(namespace, TOKENS).names == frozenset()
