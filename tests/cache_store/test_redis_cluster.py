"""A store on a cluster of more than one node: it is found where its slot is, also after the slot has moved."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from cache_store.backends.redis import RedisBackend
from cache_store.errors import StoreUnavailableError

from .redis_audit import audit
from .redis_server import START_TIMEOUT_S, free_port
from .sample_pages import A, chain, key, look, put

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
    move(first, second)
    assert look(backend, A, "a") == [None]
    assert put(backend, chain(A, "a")).pages == 1
    assert (first.client().dbsize() == 0, second.client().dbsize() > 0) == (True, True)
    with pytest.raises(StoreUnavailableError, match=r"redis\+cluster://"):
        RedisBackend.from_url(first.url(), deadline_s=10)


def test_a_store_is_found_though_the_node_of_its_url_is_gone(start_redis: Callable[..., RedisServer]) -> None:
    bus_port, options = str(free_port()), {"cluster_enabled": "yes", "cluster_require_full_coverage": "no"}
    first = start_redis(cluster_port=bus_port, **options)
    second = start_redis(slots=False, cluster_port=str(free_port()), **options)
    join(first, second, bus_port)
    move(first, second)
    backend = RedisBackend.from_url(first.url("redis+cluster"), deadline_s=10)
    put(backend, chain(A, "a"))
    first.stop()
    second.client().execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert look(backend, A, "a") != [None]
    hung = RedisBackend.from_url(second.url("redis+cluster"), deadline_s=2)
    second.pause()
    for _ in range(2):
        with pytest.raises(StoreUnavailableError) as raised:
            look(hung, A, "a")
        assert raised.value.reason == "timeout"
    second.resume()
    assert look(hung, A, "a") != [None]


def test_a_server_that_is_no_cluster_says_so(redis_server: RedisServer) -> None:
    with pytest.raises(StoreUnavailableError, match=r"no cluster.*redis://"):
        RedisBackend.from_url(redis_server.url("redis+cluster"), deadline_s=10)


def test_a_slot_that_nobody_has_is_unavailable(start_redis: Callable[..., RedisServer]) -> None:
    server = start_redis(slots=False, cluster_enabled="yes", cluster_port=str(free_port()))
    with pytest.raises(StoreUnavailableError, match="does not cover"):
        RedisBackend.from_url(server.url("redis+cluster"), deadline_s=10)


def move(first: RedisServer, second: RedisServer) -> None:
    """Empty the store and give its slot away."""
    first.client().flushall()
    slot = first.client().execute_command("CLUSTER", "KEYSLOT", "{crossfill}")
    owner = second.client().execute_command("CLUSTER", "MYID")
    for node in (second, first):
        node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", owner)


def test_a_store_whose_slot_is_moved_key_by_key_is_unavailable_and_then_whole(
    start_redis: Callable[..., RedisServer],
) -> None:
    bus_port = str(free_port())
    first = start_redis(cluster_enabled="yes", cluster_port=bus_port)
    second = start_redis(slots=False, cluster_enabled="yes", cluster_port=str(free_port()))
    join(first, second, bus_port)
    backend = RedisBackend.from_url(first.url("redis+cluster"), deadline_s=10)
    names = [f"page-{number}" for number in range(20)]
    put(backend, chain(A, *names))
    here, there = first.client(), second.client()
    slot = here.execute_command("CLUSTER", "KEYSLOT", "{crossfill}")
    there.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", here.execute_command("CLUSTER", "MYID"))
    here.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", there.execute_command("CLUSTER", "MYID"))
    # What the store is recognized by last: before that, half a store is here.
    keys = sorted(here.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000), reverse=True)
    assert keys[-1] == b"{crossfill}"
    uses: list[Callable[[], object]] = [
        lambda: look(backend, A, *names),
        lambda: backend.read(A.scope, [(key(names[0]), "mass/0")]),
        lambda: put(backend, chain(A, *names, "new")),
        backend.flush,
        backend.stats,
    ]
    for moved in keys:
        for use in uses:
            with pytest.raises(StoreUnavailableError, match="slot is being moved"):
                use()
        here.execute_command("MIGRATE", "127.0.0.1", second.port, moved, 0, 10_000)
    owner = there.execute_command("CLUSTER", "MYID")
    for node in (there, here):
        node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", owner)
    assert None not in look(backend, A, *names)
    assert put(backend, chain(A, *names, "new")).pages == 21
    audit(backend, there)
