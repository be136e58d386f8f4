import logging
import threading
import time
from dataclasses import replace
from functools import partial
from hashlib import blake2b

import pytest

from cache_store.backends.protocol import AnchorPool, Limits
from cache_store.errors import StoreUnavailableError
from cache_store.keys import KEY_BYTES, PAGE, page_keys
from cache_store.metrics import StoreMetrics
from cache_store.records import Kind, Record, encode
from cache_store.store import Store, scope_info

TOKENS = list(range(5 * PAGE + 7))


def test_a_lookup_goes_on_behind_pages_without_records(store, namespace, made):
    store.publish(namespace, TOKENS, made(namespace, TOKENS, ("mass/0", "mass/1"), pages=(0, 1, 3)))
    store.publish(namespace, TOKENS, made(namespace, TOKENS, ("kv/1",), pages=(1,)))
    found = store.match(namespace, TOKENS)
    assert found.tokens == 5 * PAGE
    assert [sorted(records) for records in found.records] == [
        ["mass/0", "mass/1"],
        ["kv/1", "mass/0", "mass/1"],
        [],
        ["mass/0", "mass/1"],
        [],
    ]
    assert found.pages_with("mass/0") == (0, 1, 3)
    assert found.names == {"mass/0", "mass/1", "kv/1"}
    assert found.keys == tuple(found.pages[index].key for index in (0, 1, 3))
    assert [found.contiguous_pages(name) for name in ("mass/0", "kv/1", "map/0")] == [2, 0, 0]
    assert found.size_bytes(["kv/1"]) == found.records[1]["kv/1"]


def test_a_prefix_that_goes_on_differently_shares_the_pages_before(store, namespace, made):
    store.publish(namespace, TOKENS, made(namespace, TOKENS))
    other = TOKENS[: 2 * PAGE] + [9] * (3 * PAGE)
    assert store.match(namespace, other).pages_with("mass/0") == (0, 1)
    assert store.match(namespace, TOKENS).contiguous_pages("mass/0") == 5


def test_what_was_published_is_read_and_what_was_not_is_none(store, namespace, made, counted):
    records = made(namespace, TOKENS, ("mass/3",), pages=(1, 2))
    published = store.publish(namespace, TOKENS, records)
    pages = store.match(namespace, TOKENS).pages
    assert store.read(namespace, [(pages[2], "mass/3"), (pages[1], "mass/4"), (pages[1], "mass/3")]) == [
        records[2][0],
        None,
        records[1][0],
    ]
    assert published.pages == counted("published_pages_total") == 2
    assert counted("published_bytes_total") == published.size_bytes > 0
    assert (counted("records_read_total"), counted("records_absent_total")) == (2, 1)
    assert counted("lookup_pages_total", result="hit") == 2
    assert counted("lookup_pages_total", result="absent") == 3
    assert counted("operation_seconds_count", operation="match") == 1


def test_an_empty_record_is_a_record(store, namespace):
    page = page_keys(namespace.scope, TOKENS)[0]
    empty = Record(Kind.MASS, 0, (0,), "u1", page.tokens_digest, b"")
    store.publish(namespace, TOKENS, {0: [empty]})
    assert store.read(namespace, [(page, "mass/0")]) == [empty]


@pytest.mark.parametrize(
    "difference",
    [{"tenant": "other"}, {"model": "large"}, {"revision": "r2"}, {"tokenizer": "t2"}, {"salt": "s"}],
    ids=lambda difference: next(iter(difference)),
)
def test_another_namespace_never_gets_a_hit_by_lookup_or_by_value(store, namespace, made, difference):
    other = replace(namespace, **difference)
    store.publish(namespace, TOKENS, made(namespace, TOKENS))
    ours = store.match(namespace, TOKENS)
    assert store.match(other, TOKENS).names == frozenset()
    # Whoever knows the keys of others still reads within his own namespace only.
    asked = [(page, "mass/0") for page in (*ours.pages, *store.match(other, TOKENS).pages)]
    assert store.read(other, asked) == [None] * 10
    assert ours.contiguous_pages("mass/0") == 5
    assert None not in store.read(namespace, [(page, "mass/0") for page in ours.pages])


def test_a_lookup_of_what_another_tenant_has_is_the_same_work_as_of_what_nobody_has(backend, store, namespace, made):
    # Equal work is what keeps time from telling: the same calls, and answers of the same size.
    store.publish(namespace, TOKENS, made(namespace, TOKENS))
    other, nobody = replace(namespace, tenant="other"), [9] * len(TOKENS)

    def work(of, tokens):
        backend.calls.clear()
        records = store.match(of, tokens).records
        return dict(backend.calls), [len(names) for names in records]

    assert work(other, TOKENS) == work(other, nobody) == ({"lookup": 1}, [0] * 5)
    assert work(namespace, TOKENS) == ({"lookup": 1}, [1] * 5)


def by_depth(data):
    """A hash under which every prefix has the same keys: it looks at the parent only."""
    return blake2b(data[:KEY_BYTES], digest_size=KEY_BYTES).digest()


def test_colliding_keys_are_a_miss_that_is_counted(backend, registry, namespace, made, counted):
    weak = partial(page_keys, hash_key=by_depth)
    store = Store(backend, Limits(2**30, 2**30), StoreMetrics(registry), keys_of=weak)
    store.publish(namespace, TOKENS, made(namespace, TOKENS, keys_of=weak))
    other = [9] * len(TOKENS)
    assert [page.key for page in weak(namespace.scope, other)] == [page.key for page in weak(namespace.scope, TOKENS)]
    found = store.match(namespace, other)
    assert found.names == frozenset()
    assert counted("lookup_pages_total", result="collision") == 5
    assert store.match(namespace, TOKENS).contiguous_pages("mass/0") == 5
    assert counted("lookup_pages_total", result="hit") == 5


def test_records_of_a_colliding_page_are_not_read_and_stay_with_their_owner(
    backend, registry, namespace, made, counted
):
    weak = partial(page_keys, hash_key=by_depth)
    store = Store(backend, Limits(2**30, 2**30), StoreMetrics(registry), keys_of=weak)
    store.publish(namespace, TOKENS, made(namespace, TOKENS, keys_of=weak))
    other = [9] * len(TOKENS)
    assert store.publish(namespace, other, made(namespace, other, keys_of=weak)).pages == 0
    assert counted("dropped_pages_total", reason="collision") == 5
    assert store.read(namespace, [(page, "mass/0") for page in weak(namespace.scope, other)]) == [None] * 5
    assert counted("quarantined_records_total", fault="tokens") == 0
    assert None not in store.read(namespace, [(page, "mass/0") for page in weak(namespace.scope, TOKENS)])


def test_a_flipped_byte_is_quarantined_counted_and_a_miss(store, namespace, made, counted, flip):
    records = made(namespace, TOKENS)
    store.publish(namespace, TOKENS, records)
    pages = store.match(namespace, TOKENS).pages
    flip(namespace, pages[1], "mass/0")
    wanted = [(page, "mass/0") for page in pages[:3]]
    assert store.read(namespace, wanted) == [records[0][0], None, records[2][0]]
    assert counted("quarantined_records_total", fault="checksum") == 1
    assert store.match(namespace, TOKENS).pages_with("mass/0") == (0, 2, 3, 4)
    store.read(namespace, wanted)
    assert counted("quarantined_records_total", fault="checksum") == 1


@pytest.mark.parametrize(
    ("alter", "fault"),
    [
        (lambda record: replace(record, tokens_digest=b"x" * 32), "tokens"),
        (lambda record: replace(record, layer=9), "layer"),
        (lambda record: replace(record, kind=Kind.KV), "kind"),
    ],
    ids=["tokens", "layer", "kind"],
)
def test_a_record_under_the_wrong_name_is_quarantined(store, namespace, made, counted, put, alter, fault):
    records = made(namespace, TOKENS)
    store.publish(namespace, TOKENS, records)
    pages = store.match(namespace, TOKENS).pages
    put(namespace, pages[0], "mass/0", encode(alter(records[0][0])))
    assert store.read(namespace, [(page, "mass/0") for page in pages[:2]]) == [None, records[1][0]]
    assert counted("quarantined_records_total", fault=fault) == 1
    assert store.match(namespace, TOKENS).pages_with("mass/0") == (1, 2, 3, 4)


def test_refused_records_are_logged_once_a_minute_with_their_number(backend, registry, namespace, made, caplog, flip):
    now = [100.0]
    store = Store(backend, Limits(2**30, 2**30), StoreMetrics(registry), clock=lambda: now[0])
    store.publish(namespace, TOKENS, made(namespace, TOKENS))
    pages = store.match(namespace, TOKENS).pages
    for page in pages:
        flip(namespace, page, "mass/0")
    with caplog.at_level(logging.WARNING, "crossfill.store"):
        store.read(namespace, [(page, "mass/0") for page in pages[:3]])
        now[0] += 59
        store.read(namespace, [(pages[3], "mass/0")])
        assert len(caplog.messages) == 1
        now[0] += 1
        store.read(namespace, [(pages[4], "mass/0")])
    first, second = caplog.messages
    assert pages[0].key.hex() in first
    assert "altered since it was written" in first
    assert second.endswith("(and 3 more since the last line)")


def test_a_quarantine_that_the_store_does_not_answer_loses_no_other_record(
    backend, store, namespace, made, counted, flip, monkeypatch
):
    records = made(namespace, TOKENS)
    store.publish(namespace, TOKENS, records)
    pages = store.match(namespace, TOKENS).pages
    flip(namespace, pages[0], "mass/0")

    def unavailable(*_):
        raise StoreUnavailableError("away", "timeout")

    monkeypatch.setattr(backend.backend, "quarantine", unavailable)
    assert store.read(namespace, [(page, "mass/0") for page in pages[:2]]) == [None, records[1][0]]
    assert counted("unavailable_total", operation="quarantine", reason="timeout") == 1


def test_a_backend_that_does_not_answer_is_counted_by_operation(backend, store, namespace, counted):
    backend.error = StoreUnavailableError("connection refused", "refused")
    with pytest.raises(StoreUnavailableError, match="connection refused"):
        store.match(namespace, TOKENS)
    assert counted("unavailable_total", operation="match", reason="refused") == 1
    backend.error = None
    store.match(namespace, TOKENS)
    assert counted("unavailable_total", operation="match", reason="refused") == 1


def test_records_of_other_tokens_are_not_published(backend, store, namespace, made):
    records = made(namespace, TOKENS)
    with pytest.raises(ValueError, match="page 0 is of other tokens"):
        store.publish(namespace, TOKENS, {0: records[1]})
    with pytest.raises(ValueError, match="page 5 is none of the 5 complete pages"):
        store.publish(namespace, TOKENS, {5: records[4]})
    assert backend.calls["publish"] == 0


def test_names_that_are_none_are_refused_before_anything_is_read(backend, store, namespace):
    page = page_keys(namespace.scope, TOKENS)[0]
    for name in ("mass", "mass/x", "mess/1"):
        with pytest.raises(ValueError, match="no name of a record"):
            store.read(namespace, [(page, name)])
    assert backend.calls["read"] == 0


def test_a_flush_takes_what_fits_and_nothing_else(store, namespace, made, counted):
    newer, other = replace(namespace, revision="r2"), replace(namespace, model="large")
    for one in (namespace, newer, other):
        store.publish(one, TOKENS, made(one, TOKENS))
    before = store.match(namespace, TOKENS)
    assert store.flush(model="small", revision="r1").pages == 5
    assert counted("flushed_pages_total") == 5
    assert store.match(namespace, TOKENS).names == frozenset()
    # Who looked it up before the flush reads nothing after it.
    assert store.read(namespace, [(page, "mass/0") for page in before.pages]) == [None] * 5
    assert store.match(newer, TOKENS).contiguous_pages("mass/0") == 5
    assert store.match(other, TOKENS).contiguous_pages("mass/0") == 5


def test_what_was_computed_before_a_flush_is_refused_and_counted(store, namespace, made, counted):
    before = store.match(namespace, TOKENS)
    store.flush(model="another")
    assert store.publish(namespace, TOKENS, made(namespace, TOKENS), flushes=before.flushes).pages == 0
    assert counted("dropped_pages_total", reason="flushed") == 5
    now = store.match(namespace, TOKENS)
    assert not any(now.hits)
    assert store.publish(namespace, TOKENS, made(namespace, TOKENS), flushes=now.flushes).pages == 5


class Traffic:
    """Threads that publish prefixes, each of its own number, and read the latest ones, until it is stopped."""

    def __init__(self, store, namespace, made):
        self.store, self.namespace, self.made = store, namespace, made
        self.published, self.right, self.wrong, self.stopped = [], 0, [], threading.Event()
        work = [partial(self.publish, 0), partial(self.publish, 1), self.look]
        self.threads = [threading.Thread(target=target) for target in work]
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.stopped.set()
        for thread in self.threads:
            thread.join()

    def publish_one(self, number):
        tokens = [number] * (2 * PAGE)
        self.store.publish(self.namespace, tokens, self.made(self.namespace, tokens))

    def served(self, number):
        return bool(self.store.match(self.namespace, [number] * (2 * PAGE)).names)

    def publish(self, number):
        while not self.stopped.is_set():
            self.publish_one(number)
            self.published.append(number)
            number += 2

    def look(self):
        while not self.stopped.is_set():
            for number in self.published[-3:]:
                pages = self.store.match(self.namespace, [number] * (2 * PAGE)).pages
                found = self.store.read(self.namespace, [(page, "mass/0") for page in pages])
                right = [page.key + b"mass/0" for page in pages]
                there = [(one, want) for one, want in zip(found, right, strict=True) if one]
                self.wrong += [one for one, want in there if one.payload != want]
                self.right += len(there)


def test_nothing_from_before_a_flush_is_served_after_it_whatever_else_runs(store, namespace, made):
    traffic, served = Traffic(store, namespace, made), []
    for _ in range(20):
        seen = len(traffic.published)
        while len(traffic.published) < seen + 4:
            time.sleep(0)
        earlier = traffic.published[-40:]
        store.flush()
        served += [number for number in earlier if traffic.served(number)]
    traffic.stop()
    assert served == []
    assert traffic.wrong == []
    assert traffic.right > 0, "what is stored between two flushes was read"
    # The control: what is published after a flush is served.
    traffic.publish_one(1)
    assert traffic.served(1)


def anchor(number, kind=Kind.ANCHOR):
    return Record(kind, 3, (4,), "f4", bytes([number]) * 32, bytes([number]) * 16)


def test_anchors_come_back_and_one_with_a_flipped_byte_does_not(backend, store, namespace, counted):
    pool = AnchorPool(scope_info(namespace), "agent-2")
    for number, kind in enumerate((Kind.ANCHOR, Kind.RIDGE, Kind.ANCHOR)):
        store.put_anchor(pool, f"a{number}", anchor(number, kind))
    backend.backend.put_anchor(pool, "a1", backend.backend.anchors(pool)["a1"][:-1] + b"!")
    for _ in range(2):
        assert store.anchors(pool) == {"a0": anchor(0), "a2": anchor(2)}
    assert counted("quarantined_records_total", fault="checksum") == 1
    assert store.stats().quarantined == 1
    store.put_anchor(pool, "a1", anchor(1))
    assert store.anchors(pool)["a1"] == anchor(1)


def test_a_pool_holds_anchors_only(store, namespace, counted, backend):
    pool = AnchorPool(scope_info(namespace), "agent-2")
    with pytest.raises(ValueError, match="not mass"):
        store.put_anchor(pool, "a", anchor(1, Kind.MASS))
    backend.backend.put_anchor(pool, "b", encode(anchor(1, Kind.MASS)))
    assert store.anchors(pool) == {}
    assert counted("quarantined_records_total", fault="kind") == 1


def test_statistics_set_the_gauges(store, namespace, made, counted):
    store.publish(namespace, TOKENS, made(namespace, TOKENS))
    assert store.lease(namespace, page_keys(namespace.scope, TOKENS)[:2], "reader", 5.0) == 2
    stats = store.stats()
    assert counted("pages") == 5
    assert counted("bytes") == stats.size_bytes > 0
    assert counted("leased_pages") == 2
    assert store.release("reader") == 2
    store.stats()
    assert counted("leased_pages") == 0
