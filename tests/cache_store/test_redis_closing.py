"""A Redis store that is closed while a server that does not answer is waited for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from cache_store.backends.redis import RedisBackend
from cache_store.errors import StoreUnavailableError

from .sample_pages import A, chain, key, look, put

if TYPE_CHECKING:
    from collections.abc import Callable

    from .redis_server import RedisServer


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "not closed"])
def test_who_waits_for_a_hung_server_is_told_that_the_store_was_closed(
    start_redis: Callable[..., RedisServer], closes: bool
) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=3 if closes else 0.3)
    put(backend, chain(A, "a"))
    look(backend, A, "a")
    server.pause()
    errors: list[StoreUnavailableError] = []

    def wait() -> None:
        with pytest.raises(StoreUnavailableError) as caught:
            backend.lookup(A.scope, [key("a")])
        errors.append(caught.value)

    waiting = [threading.Thread(target=wait) for _ in range(4)]
    for thread in waiting:
        thread.start()
    if closes:
        # One that is not connected yet waits for its deadline.
        while connections_in_use(backend) < len(waiting):
            pass
        backend._link.close()
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive()
    server.resume()
    expected = ("closed", "the store was closed") if closes else ("timeout", "no answer in time")
    assert [error.reason for error in errors] == [expected[0]] * 4
    assert all(expected[1] in str(error) for error in errors)


def connections_in_use(backend: RedisBackend) -> int:
    """Connections of the backend that somebody waits for."""
    (pool,) = backend._link._nodes._pools.values()
    return len(pool._in_use_connections)
