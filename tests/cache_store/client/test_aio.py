import asyncio
import threading
import time

import pytest

from cache_store.client.aio import AsyncStore
from cache_store.errors import StoreUnavailableError
from cache_store.keys import PAGE

TOKENS = list(range(4 * PAGE))
# Longer than anything here takes; a test that waits for it has failed.
LONG_S = 30.0


def store_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("crossfill-store")]


async def failure(call):
    """The reason for which a call was given up."""
    with pytest.raises(StoreUnavailableError) as caught:
        await call
    return caught.value.reason


async def test_match_stats_and_flush_as_the_store_does_them(store, namespace, made):
    store.publish(namespace, TOKENS, made(namespace, TOKENS))
    client = AsyncStore(store, deadline_s=LONG_S)
    assert await client.match(namespace, TOKENS) == store.match(namespace, TOKENS)
    assert sum(scope.pages for scope in (await client.stats()).scopes) == 4
    assert (await client.flush(tenant="nobody")).pages == 0
    assert (await client.flush(tenant="acme")).pages == 4
    assert (await client.match(namespace, TOKENS)).names == frozenset()
    client.close()


async def test_a_store_that_hangs_is_given_up_at_the_deadline(backend, store, namespace):
    backend.hang()
    client = AsyncStore(store, deadline_s=0.05)
    started_s = time.monotonic()
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    assert await failure(client.match(namespace, TOKENS)) == "timeout"
    ticking.cancel()
    assert ticks > 1, "the loop stood still"
    assert time.monotonic() - started_s < LONG_S / 2
    backend.go_on()
    assert (await client.match(namespace, TOKENS)).tokens == 4 * PAGE
    client.close()


async def test_hanging_calls_do_not_pile_up(backend, store, namespace, counted):
    before = len(store_threads())
    backend.hang()
    client = AsyncStore(store, deadline_s=0.2, threads=2, in_flight=4)
    reasons = await asyncio.gather(*(failure(client.match(namespace, TOKENS)) for _ in range(10)))
    assert sorted(reasons) == ["busy"] * 6 + ["timeout"] * 4
    assert len(store_threads()) - before <= 2
    for reason, number in (("busy", 6), ("timeout", 4)):
        assert counted("unavailable_total", operation="match", reason=reason) == number
    # Two hang; the two that waited were withdrawn, so there is room, and they never reach the store.
    assert await failure(client.match(namespace, TOKENS)) == "timeout"
    backend.go_on()
    assert (await client.match(namespace, TOKENS)).tokens == 4 * PAGE
    assert backend.calls["lookup"] == 3
    client.close()


async def test_the_reason_of_the_backend_is_kept(backend, store, namespace):
    backend.error = StoreUnavailableError("away", "refused")
    client = AsyncStore(store, deadline_s=LONG_S)
    assert await failure(client.match(namespace, TOKENS)) == "refused"
    client.close()
    assert await failure(client.match(namespace, TOKENS)) == "busy"
