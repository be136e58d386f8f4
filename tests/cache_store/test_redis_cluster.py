"""A store on a cluster of more than one node: it is found where its slot is, also after the slot has moved."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from cache_store.backends.redis import RedisBackend
from cache_store.errors import StoreUnavailableError

from .redis_server import START_TIMEOUT_S, free_port
from .sample_pages import A, chain, look, put

if TYPE_CHECKING:
    from collections.abc import Callable

    from .redis_server import RedisServer


def join(first: RedisServer, second: RedisServer, bus_port: str) -> None:
    second.client().execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, int(bus_port))
    end = time.monotonic() + START_TIMEOUT_S
    while second.client().execute_command("CLUSTER INFO")["cluster_state"] != "ok":
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_store_is_followed_to_the_node_that_gets_its_slot(start_redis: Callable[..., RedisServer]) -> None:
    bus_port = str(free_port())
    first = start_redis(cluster_enabled="yes", cluster_port=bus_port)
    backend = RedisBackend.from_url(first.url("redis+cluster"), deadline_s=10)
    put(backend, chain(A, "a"))
    second = start_redis(slots=False, cluster_enabled="yes", cluster_port=str(free_port()))
    join(first, second, bus_port)
    first.client().flushall()
    slot = first.client().execute_command("CLUSTER", "KEYSLOT", "{crossfill}")
    owner = second.client().execute_command("CLUSTER", "MYID")
    for node in (second, first):
        node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", owner)
    assert look(backend, A, "a") == [None]
    assert put(backend, chain(A, "a")).pages == 1
    assert (first.client().dbsize() == 0, second.client().dbsize() > 0) == (True, True)
    with pytest.raises(StoreUnavailableError, match=r"redis\+cluster://"):
        RedisBackend.from_url(first.url(), deadline_s=10)
