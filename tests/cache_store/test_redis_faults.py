"""A Redis server that is down, hung, slow, full, restarted, changed from outside, or no Redis at all."""

from __future__ import annotations

import logging
import threading
import time
import traceback
import uuid
from typing import TYPE_CHECKING

import pytest

from cache_store.backends import redis_sockets
from cache_store.backends.breaker import Breaker, BreakerState
from cache_store.backends.protocol import AnchorPool
from cache_store.backends.redis import RedisBackend
from cache_store.errors import StoreError, StoreUnavailableError, StoreUrlError, StoreVersionError

from .odd_server import OddServer
from .redis_audit import audit
from .redis_server import free_port
from .sample_pages import A, chain, key, look, put, there

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from .odd_server import Behaviour
    from .redis_server import RedisServer

    Start = Callable[..., RedisServer]

DEADLINE_S = 0.3
SLACK_S = 1.0


@pytest.fixture
def make_odd() -> Iterator[Callable[[Behaviour], OddServer]]:
    started: list[OddServer] = []

    def make(behave: Behaviour) -> OddServer:
        started.append(OddServer(behave))
        return started[-1]

    yield make
    for server in started:
        server.stop()


@pytest.fixture
def named(redis_server: RedisServer) -> tuple[RedisBackend, str]:
    """An empty store on the session's server, and its name."""
    name = uuid.uuid4().hex
    return RedisBackend.from_url(redis_server.url(name=name), deadline_s=10), name


def reason_of(action: Callable[[], object], deadline_s: float = DEADLINE_S) -> str:
    """Why it is unavailable; it must say so in time."""
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError) as raised:
        action()
    assert time.monotonic() - start < deadline_s + SLACK_S
    return raised.value.reason


def looks(backend: RedisBackend) -> list[bool]:
    return [found is not None for found in look(backend, A, "a", "b", "c")]


ABC = chain(A, "a", "b", "c")


def test_no_server_is_refused() -> None:
    assert (
        reason_of(lambda: RedisBackend.from_url(f"redis://127.0.0.1:{free_port()}", deadline_s=DEADLINE_S)) == "refused"
    )


def test_no_cluster_is_refused() -> None:
    url = f"redis+cluster://127.0.0.1:{free_port()}"
    assert reason_of(lambda: RedisBackend.from_url(url, deadline_s=DEADLINE_S)) == "refused"


def test_a_host_without_address_is_refused() -> None:
    assert reason_of(lambda: RedisBackend.from_url("redis://nowhere.invalid", deadline_s=DEADLINE_S)) == "refused"


@pytest.mark.parametrize("cluster", [False, True], ids=["plain", "cluster"])
def test_a_server_that_went_away_is_used_again_when_it_is_back(start_redis: Start, cluster: bool) -> None:
    options = {"cluster_enabled": "yes", "cluster_port": str(free_port())} if cluster else {}
    server = start_redis(**options)
    backend = RedisBackend.from_url(server.url("redis+cluster" if cluster else "redis"), deadline_s=5)
    put(backend, ABC)
    server.stop()
    assert [reason_of(lambda: looks(backend)) for _ in range(5)][-1] == "refused"
    server.start()
    # Restarted empty: without scripts, without pages.
    assert looks(backend) == [False] * 3
    assert put(backend, ABC).pages == 3
    assert looks(backend) == [True] * 3
    audit(backend, server.client())


@pytest.mark.parametrize("cluster", [False, True], ids=["plain", "cluster"])
def test_a_hung_server_costs_the_deadline_and_after_some_calls_nothing(start_redis: Start, cluster: bool) -> None:
    options = {"cluster_enabled": "yes", "cluster_port": str(free_port())} if cluster else {}
    server = start_redis(**options)
    breaker = Breaker(failures=3, delay_s=3600)
    url = server.url("redis+cluster" if cluster else "redis")
    backend = RedisBackend.from_url(url, deadline_s=DEADLINE_S, breaker=breaker)
    put(backend, ABC)
    server.pause()
    assert [reason_of(lambda: looks(backend)) for _ in range(3)] == ["timeout"] * 3
    assert backend.breaker.state is BreakerState.OPEN
    with pytest.raises(StoreUnavailableError, match="not asked"):
        looks(backend)
    server.resume()


def test_a_server_that_hung_is_used_again_after_a_probe(start_redis: Start) -> None:
    server = start_redis()
    now = [0.0]
    breaker = Breaker(failures=2, delay_s=60, clock=lambda: now[0])
    backend = RedisBackend.from_url(server.url(), deadline_s=DEADLINE_S, breaker=breaker)
    put(backend, ABC)
    server.pause()
    for _ in range(2):
        reason_of(lambda: looks(backend))
    now[0] += 61
    assert backend.breaker.state is BreakerState.HALF_OPEN
    assert reason_of(lambda: looks(backend)) == "timeout"
    assert backend.breaker.state is BreakerState.OPEN
    server.resume()
    now[0] += 61
    # It did what it was asked while it hung, and its late answers are not taken for those to later questions.
    assert looks(backend) == [True] * 3
    assert backend.breaker.state is BreakerState.CLOSED


def test_many_threads_wait_for_a_hung_server_side_by_side(start_redis: Start) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=DEADLINE_S, breaker=Breaker(failures=10**6))
    server.pause()
    reasons: list[str] = []
    start = time.monotonic()
    threads = [threading.Thread(target=lambda: reasons.append(reason_of(lambda: looks(backend)))) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < DEADLINE_S + 3 * SLACK_S
    assert reasons == ["timeout"] * 100


def test_a_server_that_answers_byte_by_byte_costs_the_deadline(make_odd: Callable[[Behaviour], OddServer]) -> None:
    def drip(connection: socket.socket) -> None:
        # Bytes that come unasked are another fault.
        connection.recv(1)
        connection.sendall(b"$1000000\r\n")
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)

    server = make_odd(drip)
    assert reason_of(lambda: RedisBackend.from_url(server.url, deadline_s=DEADLINE_S)) == "timeout"


def test_a_server_that_answers_without_end_is_cut_off(
    make_odd: Callable[[Behaviour], OddServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_sockets, "MAX_REPLY_BYTES", 1 << 20)
    sent = []

    def flood(connection: socket.socket) -> None:
        connection.sendall(b"$100000000000\r\n")
        while True:
            connection.sendall(b"x" * 65536)
            sent.append(65536)

    server = make_odd(flood)
    with pytest.raises(StoreUnavailableError, match="larger than any") as raised:
        RedisBackend.from_url(server.url, deadline_s=30)
    assert raised.value.reason == "server"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$x\r\n",
        b":x\r\n",
        b"*-5\r\n*x\r\n",
        b"\r\n\r\n",
        b"\xff\xfe\r\n",
        b"+OK\r\n+OK\r\n+OK\r\n",
        b"*1\r\n:1\r\n*1\r\n:1\r\n",
    ],
)
def test_a_server_that_is_no_redis_is_said_to_be_none(
    make_odd: Callable[[Behaviour], OddServer], answer: bytes
) -> None:
    def babble(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            connection.sendall(answer)

    server = make_odd(babble)
    with pytest.raises(StoreUnavailableError) as raised:
        RedisBackend.from_url(server.url, deadline_s=DEADLINE_S)
    assert raised.value.reason in {"server", "closed", "timeout"}


def test_a_connection_that_breaks_in_an_answer_is_closed(make_odd: Callable[[Behaviour], OddServer]) -> None:
    def hang_up(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"$1000\r\nhalf")
        connection.close()

    server = make_odd(hang_up)
    assert reason_of(lambda: RedisBackend.from_url(server.url, deadline_s=DEADLINE_S)) == "closed"


def test_connections_the_server_dropped_are_replaced_without_an_error(start_redis: Start) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=10)
    put(backend, ABC)
    server.client().execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert looks(backend) == [True] * 3


def test_scripts_the_server_forgot_are_loaded_again(named: tuple[RedisBackend, str], redis_server: RedisServer) -> None:
    backend, _ = named
    put(backend, ABC)
    wanted = [(key("a"), "mass/0"), (key("b"), "mass/0")]
    for _ in range(2):
        redis_server.client().script_flush()
        assert looks(backend) == [True] * 3
        redis_server.client().script_flush()
        assert backend.read(A.scope, wanted) == [ABC[0].records["mass/0"], ABC[1].records["mass/0"]]
    redis_server.client().script_flush()
    assert put(backend, chain(A, "a", "b", "c", "d")).pages == 4
    audit(backend, redis_server.client(), named[1])


def test_a_wrong_password_is_an_error_of_the_url_and_not_repeated(
    start_redis: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = start_redis(requirepass="right-secret")
    server_url = server.url()
    assert "right-secret" in server_url
    for url in (server_url.replace("right-secret", "wrong-secret"), server_url.replace(":right-secret@", "")):
        with pytest.raises(StoreUrlError) as raised:
            RedisBackend.from_url(url, deadline_s=10)
        text = "".join(traceback.format_exception(raised.value)[-1:]) + repr(raised.value) + caplog.text
        assert "secret" not in text
    backend = RedisBackend.from_url(server_url, deadline_s=10)
    assert "secret" not in repr(backend) + caplog.text


def test_a_password_changed_later_makes_it_unavailable(start_redis: Start) -> None:
    server = start_redis(requirepass="first-secret")
    backend = RedisBackend.from_url(server.url(), deadline_s=DEADLINE_S)
    client = server.client()
    client.config_set("requirepass", "second-secret")
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert reason_of(lambda: looks(backend)) == "server"


def test_a_store_of_another_version_is_refused(named: tuple[RedisBackend, str], redis_server: RedisServer) -> None:
    backend, name = named
    put(backend, ABC)
    redis_server.client().hset("{" + name + "}", "layout", "99")
    with pytest.raises(StoreVersionError, match="99"):
        looks(backend)
    with pytest.raises(StoreVersionError, match="99"):
        put(backend, ABC)
    with pytest.raises(StoreVersionError, match="99"):
        RedisBackend.from_url(redis_server.url(name=name), deadline_s=10)


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_a_server_that_would_delete_the_index_is_refused(start_redis: Start, policy: str) -> None:
    server = start_redis(maxmemory="100mb", maxmemory_policy=policy)
    with pytest.raises(StoreUrlError, match=f"{policy}.*noeviction"):
        RedisBackend.from_url(server.url(), deadline_s=10)


@pytest.mark.parametrize(
    "options", [{"maxmemory_policy": "allkeys-lru"}, {"maxmemory_policy": "volatile-lru", "maxmemory": "100mb"}]
)
def test_a_server_that_keeps_what_does_not_expire_is_taken(start_redis: Start, options: dict[str, str]) -> None:
    server = start_redis(**options)
    backend = RedisBackend.from_url(server.url(), deadline_s=10)
    put(backend, ABC)
    names = server.client().keys()
    assert len(names) > 5
    assert {server.client().ttl(name) for name in names} == {-1}


def test_a_replica_says_that_it_is_one(start_redis: Start) -> None:
    primary = start_redis()
    replica = start_redis(replicaof=f"127.0.0.1 {primary.port}")
    with pytest.raises(StoreUnavailableError, match="replica") as raised:
        RedisBackend.from_url(replica.url(), deadline_s=10)
    assert raised.value.reason == "server"


def fill(backend: RedisBackend, megabytes: int) -> StoreUnavailableError:
    """Publish until the server has no memory left."""
    try:
        for number in range(megabytes):
            put(backend, chain(A, *(f"page-{number}-{at}" for at in range(16)), size=65536))
    except StoreUnavailableError as error:
        return error
    pytest.fail("the server took all of it")


def test_a_server_without_memory_is_full_and_can_still_be_read_and_emptied(start_redis: Start) -> None:
    server = start_redis(maxmemory="16mb", maxmemory_policy="noeviction")
    backend = RedisBackend.from_url(server.url(), deadline_s=10)
    put(backend, ABC)
    assert fill(backend, 100).reason == "full"
    audit(backend, server.client())
    assert looks(backend) == [True] * 3
    assert backend.read(A.scope, [(key("a"), "mass/0")]) == [ABC[0].records["mass/0"]]
    assert backend.lease(A.scope, [key("a")], "me", 60) == 1
    assert backend.release("me") == 1
    assert backend.quarantine(A.scope, key("c"), "mass/0")
    assert backend.evict(4 << 20).size_bytes >= 4 << 20
    audit(backend, server.client())
    assert put(backend, chain(A, "new")).pages == 1
    assert backend.flush().pages > 0
    assert backend.evict(1 << 40).pages > 0
    assert backend.stats().size_bytes == 0
    audit(backend, server.client())


def test_keys_of_others_are_left_alone(start_redis: Start) -> None:
    server = start_redis()
    client = server.client()
    others = {b"session:1": b"x", b"crossfill": b"y", b"{crossfil}:l": b"z", b"{crossfill2}:p:12345678": b"w"}
    client.mset(others)
    neighbour = RedisBackend.from_url(server.url(name="other"), deadline_s=10)
    put(neighbour, ABC)
    backend = RedisBackend.from_url(server.url(), deadline_s=10)
    put(backend, chain(A, "x", "y"))
    backend.flush()
    backend.compact()
    put(backend, chain(A, "x", "y"))
    backend.evict(1 << 40)
    assert client.mget(list(others)) == list(others.values())
    assert there(neighbour, A, "a", "b", "c") == ["a", "b", "c"]
    assert there(backend, A, "x", "y") == []


def test_every_error_is_one_of_the_store_and_one_line(start_redis: Start) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=DEADLINE_S, breaker=Breaker(failures=10**6))
    put(backend, ABC)
    server.stop()
    pool = AnchorPool(A, "slot")
    calls: list[Callable[[], object]] = [
        lambda: looks(backend),
        lambda: backend.read(A.scope, [(key("a"), "mass/0")]),
        lambda: put(backend, ABC),
        lambda: backend.lease(A.scope, [key("a")], "me", 1),
        lambda: backend.release("me"),
        backend.flush,
        lambda: backend.evict(1),
        lambda: backend.quarantine(A.scope, key("a"), "mass/0"),
        backend.stats,
        lambda: list(backend.scan()),
        backend.compact,
        lambda: backend.put_anchor(pool, "one", b"x"),
        lambda: backend.anchors(pool),
        lambda: backend.use_anchors(pool, ["one"]),
    ]
    for call in calls:
        with pytest.raises(StoreError) as raised:
            call()
        assert "\n" not in str(raised.value)
