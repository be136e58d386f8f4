"""Redis behind a slow network, or hung: what it costs whoever asks by way of the clients."""

import asyncio
import time
from dataclasses import replace

import pytest

from cache_store.backends.breaker import Breaker
from cache_store.backends.protocol import Limits
from cache_store.backends.redis import RedisBackend
from cache_store.client.aio import AsyncStore
from cache_store.client.fetch import Fetcher
from cache_store.client.publish import Publisher
from cache_store.errors import StoreUnavailableError
from cache_store.keys import PAGE
from cache_store.metrics import FetchEnd, StoreMetrics
from cache_store.store import Store
from tests.cache_store.slow_proxy import SlowProxy

TOKENS, OTHER = list(range(4 * PAGE)), [9] * (4 * PAGE)
NAMES = ("mass/0", "mass/1", "mass/2")
# Of a request, of a call of the backend, and what a busy machine may take beside them.
REQUEST_S, CALL_S, LONG_S = 1.5, 1.0, 30.0


@pytest.fixture
def server(start_redis):
    return start_redis()


@pytest.fixture
def proxy(server):
    proxy = SlowProxy(server.port)
    yield proxy
    proxy.stop()


def open_at(port, registry, deadline_s, failures=10**6):
    url = f"redis://127.0.0.1:{port}"
    backend = RedisBackend.from_url(url, deadline_s=deadline_s, breaker=Breaker(failures=failures, delay_s=0.1))
    return Store(backend, Limits(2**30, 2**30), StoreMetrics(registry))


@pytest.fixture
def open_slow(proxy, registry):
    """Opens the store by way of the proxy."""
    opened = []

    def open_one(deadline_s, **options):
        opened.append(open_at(proxy.port, registry, deadline_s, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def ended(fetch):
    until_s = time.monotonic() + LONG_S
    while fetch.end is None and time.monotonic() < until_s:
        time.sleep(0.001)
    return fetch.end


def test_a_slow_answer_that_comes_in_time_is_whole(open_slow, proxy, namespace, made):
    store = open_slow(LONG_S)
    records = made(namespace, TOKENS, NAMES)
    store.publish(namespace, TOKENS, records)
    proxy.delay_s, proxy.piece_bytes, proxy.pieces = 0.001, 7, 0
    fetcher = Fetcher(store)
    fetch = fetcher.start("r", namespace, TOKENS, NAMES, LONG_S)
    assert fetch.coverage(LONG_S).contiguous_pages("mass/2") == 4
    for layer, name in enumerate(NAMES):
        assert fetch.take(layer, LONG_S) == {name: {index: page[layer] for index, page in records.items()}}
    assert proxy.pieces > 100, "the answers came in many pieces"
    fetcher.close()


def test_an_answer_that_comes_too_late_is_not_taken_for_that_to_the_next_question(open_slow, proxy, namespace, made):
    store = open_slow(CALL_S)
    store.publish(namespace, TOKENS, made(namespace, TOKENS))
    asked = store.match(namespace, TOKENS), store.match(namespace, OTHER)
    assert asked[0].contiguous_pages("mass/0") == 4
    assert not any(asked[1].hits)
    for _ in range(2):
        proxy.delay_s = 2 * CALL_S
        with pytest.raises(StoreUnavailableError) as caught:
            store.match(namespace, TOKENS)
        assert caught.value.reason == "timeout"
        proxy.delay_s = 0.0
        # The late answer says that all is there.
        assert not any(store.match(namespace, OTHER).hits)
        assert all(store.match(namespace, TOKENS).hits)


def test_a_slow_server_costs_a_request_its_deadline_and_gives_what_came_by_then(open_slow, proxy, namespace, made):
    store = open_slow(LONG_S)
    records = made(namespace, TOKENS, NAMES)
    size_bytes = 400_000
    large = {
        index: [page[0], *(replace(record, payload=bytes(size_bytes), shape=(size_bytes,)) for record in page[1:])]
        for index, page in records.items()
    }
    store.publish(namespace, TOKENS, large)
    fetcher = Fetcher(store)
    # The lookup and layer 0 are a few pieces, layer 1 some hundred: many seconds.
    proxy.delay_s, proxy.piece_bytes = 0.02, 4096
    started_s = time.monotonic()
    fetch = fetcher.start("r", namespace, TOKENS, NAMES, REQUEST_S)
    assert fetch.take(1, LONG_S) is None
    assert fetch.take(2, LONG_S) is None
    assert time.monotonic() - started_s < LONG_S / 2
    assert fetch.end is FetchEnd.DEADLINE
    assert fetch.coverage().contiguous_pages("mass/2") == 4
    assert fetch.take(0) == {"mass/0": {index: page[0] for index, page in records.items()}}
    # The control: with time enough all of it comes.
    proxy.delay_s = 0.0
    again = fetcher.start("again", namespace, TOKENS, NAMES, LONG_S)
    assert again.take(2, LONG_S) == {"mass/2": {index: page[2] for index, page in large.items()}}
    fetcher.close()


async def test_a_hung_server_costs_every_client_at_most_its_deadline_and_is_used_again(
    server, registry, namespace, made, counted
):
    store = open_at(server.port, registry, CALL_S)
    store.publish(namespace, TOKENS, made(namespace, TOKENS, NAMES))
    fetcher, publisher = Fetcher(store, threads=2, in_flight=8), Publisher(store)
    client = AsyncStore(store, deadline_s=REQUEST_S, in_flight=8)
    assert (await client.match(namespace, TOKENS)).contiguous_pages("mass/0") == 4
    server.pause()
    started_s = time.monotonic()
    fetches = [fetcher.start(str(number), namespace, TOKENS, NAMES, REQUEST_S) for number in range(10)]
    offered = [publisher.offer(namespace, OTHER, made(namespace, OTHER)) for _ in range(10)]
    started_in_s = time.monotonic() - started_s
    results = await asyncio.gather(*(client.match(namespace, TOKENS) for _ in range(10)), return_exceptions=True)
    assert started_in_s < LONG_S / 2, "to start fetches and to offer pages waits for nothing"
    assert offered == [None] * 10
    assert all(isinstance(result, StoreUnavailableError) for result in results)
    assert {result.reason for result in results} == {"timeout", "busy"}
    assert [fetch.coverage(LONG_S) for fetch in fetches] == [None] * 10
    assert time.monotonic() - started_s < LONG_S / 2
    ends = [ended(fetch) for fetch in fetches]
    assert set(ends) <= {FetchEnd.DEADLINE, FetchEnd.UNAVAILABLE, FetchEnd.BUSY}
    assert ends.count(FetchEnd.BUSY) == 2
    assert publisher.drain(LONG_S)
    assert counted("dropped_pages_total", reason="unavailable") > 0
    server.resume()
    # All of them are of use again, and nothing of what hung is left in their way.
    assert (await client.match(namespace, TOKENS)).contiguous_pages("mass/2") == 4
    after = fetcher.start("after", namespace, TOKENS, NAMES, LONG_S)
    assert ended(after) is FetchEnd.DONE
    assert len(after.take(2)["mass/2"]) == 4
    assert publisher.offer(namespace, OTHER, made(namespace, OTHER)) is None
    assert publisher.close(LONG_S)
    assert store.match(namespace, OTHER).contiguous_pages("mass/0") == 4
    client.close()
    fetcher.close()
    store.close()


def test_a_hung_server_costs_most_requests_nothing(server, registry, namespace):
    store = open_at(server.port, registry, CALL_S, failures=2)
    fetcher = Fetcher(store, threads=1)
    store.match(namespace, TOKENS)
    server.pause()
    waits = []
    for number in range(40):
        started_s = time.monotonic()
        fetch = fetcher.start(str(number), namespace, TOKENS, NAMES, LONG_S)
        assert fetch.coverage(LONG_S) is None
        assert fetch.end is FetchEnd.UNAVAILABLE
        waits.append(time.monotonic() - started_s >= CALL_S / 2)
    server.resume()
    assert waits[:2] == [True, True]
    # While the breaker is open nobody waits; a probe may, now and then.
    assert waits.count(False) > len(waits) / 2
    fetcher.close()
    store.close()
