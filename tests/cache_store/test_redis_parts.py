"""What Redis does in several runs of a script: it holds nobody up for long, and is seen whole."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from cache_store.backends import redis_recent, redis_scripts
from cache_store.backends.breaker import Breaker, BreakerState
from cache_store.backends.protocol import AnchorPool, Limits, PageWrite, Refusal, ScopeInfo
from cache_store.backends.redis import RedisBackend
from cache_store.backends.redis_link import RedisLink
from cache_store.backends.redis_scripts import load_script
from cache_store.errors import StoreUnavailableError

from .redis_audit import audit, page_bytes
from .sample_pages import ROOMY, A, B, chain, digest, key, look, page, put, there

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from .redis_server import RedisServer

    Start = Callable[..., RedisServer]

SCOPES = [ScopeInfo(b"%016d" % number, f"tenant {number % 3}", "m", "r") for number in range(10)]


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def open_one(redis_server: RedisServer, name: str) -> Iterator[Callable[[], RedisBackend]]:
    """Opens one store again and again, as so many processes would."""
    opened: list[RedisBackend] = []

    def open_it() -> RedisBackend:
        opened.append(RedisBackend.from_url(redis_server.url(name=name), deadline_s=10))
        return opened[-1]

    yield open_it
    for backend in opened:
        backend.close()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts that do very little at once."""
    for constant in ("SCOPES_AT_ONCE", "LEASES_AT_ONCE"):
        monkeypatch.setattr(redis_scripts, constant, 2)
    load_script.cache_clear()
    yield
    load_script.cache_clear()


def begin_flush(backend: RedisBackend, tenant: str = "") -> None:
    """The first part of a flush whose process ends after it."""
    _, done, *_ = backend._link.run(load_script("flush"), "", tenant, "", "")
    assert done == 0


@pytest.mark.usefixtures("small_parts")
def test_a_flush_is_seen_whole_though_its_process_ended_in_between(
    open_one: Callable[[], RedisBackend], redis_server: RedisServer, name: str
) -> None:
    first, second = open_one(), open_one()
    for scope in SCOPES:
        put(first, [page("a", scope.scope)], scope=scope)
        assert look(second, scope, "a") != [None]
        first.lease(scope.scope, [key("a")], "me", None)
        first.put_anchor(AnchorPool(scope, "slot"), "one", b"x")
    before = second.lookup(A.scope, []).flushes
    begin_flush(first, "=tenant 1")
    assert second.lookup(A.scope, []).flushes == before + 1
    gone = [scope for scope in SCOPES if scope.tenant == "tenant 1"]
    assert [scope for scope in SCOPES if look(second, scope, "a") == [None]] == gone
    assert [scope for scope in SCOPES if not second.anchors(AnchorPool(scope, "slot"))] == gone
    assert {stats.info.scope: stats.epoch for stats in second.stats().scopes} == {
        scope.scope: int(scope in gone) for scope in SCOPES
    }
    assert second.release("me") == len(SCOPES) - len(gone)
    # Whoever flushes next does what was left, too.
    second.flush(tenant="nobody")
    assert not list(redis_server.client().keys("{" + name + "}:f*"))
    audit(second, redis_server.client(), name)


@pytest.mark.usefixtures("small_parts")
def test_what_a_flush_has_not_come_to_goes_before_other_pages(open_one: Callable[[], RedisBackend]) -> None:
    backend = open_one()
    unit = page_bytes(100)
    put(backend, [page("old", A.scope)])
    for scope in SCOPES:
        put(backend, [page("a", scope.scope)], scope=scope)
    begin_flush(backend, "=tenant 1")
    kept = Limits((len(SCOPES) + 1) * unit, 2**30)
    for number in range(3):
        assert put(backend, [page(f"new {number}", B.scope)], kept, B).evicted_pages == 1
    assert there(backend, A, "old") == ["old"]
    put(backend, [page("one more", B.scope)], kept, B)
    assert there(backend, A, "old") == []


@pytest.mark.usefixtures("small_parts")
def test_what_is_published_while_a_flush_is_under_way_stays(open_one: Callable[[], RedisBackend]) -> None:
    backend = open_one()
    for scope in SCOPES:
        put(backend, [page("a", scope.scope)], scope=scope)
    begin_flush(backend)
    new = ScopeInfo(b"made-meanwhile--", "tenant 1", "m", "r")
    for scope in (*SCOPES, new):
        assert put(backend, [page("b", scope.scope)], scope=scope).pages == 1
    backend.evict(1)
    backend.flush(tenant="nobody")
    assert [there(backend, scope, "a", "b") for scope in (*SCOPES, new)] == [["b"]] * 11


@pytest.mark.usefixtures("small_parts")
def test_flushes_whose_processes_ended_do_not_pile_up(
    open_one: Callable[[], RedisBackend], redis_server: RedisServer, name: str
) -> None:
    backend = open_one()
    for scope in SCOPES:
        put(backend, [page("a", scope.scope)], scope=scope)
    for _ in range(3 * redis_scripts.FLUSHES_AT_ONCE):
        backend._link.run(load_script("flush"), "", "=nobody", "", "")
    assert redis_server.client().hlen("{" + name + "}:f") <= redis_scripts.FLUSHES_AT_ONCE
    assert backend.flush().pages == len(SCOPES)


@pytest.mark.parametrize("lost", ["everything", "{%s}", "{%s}:scopes", "{%s}:f"])
def test_the_number_of_flushes_does_not_go_back_when_keys_are_lost(start_redis: Start, lost: str) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=10)
    put(backend, chain(A, "a", "b"))
    backend.flush()
    put(backend, chain(A, "a", "b"))
    backend._link.run(load_script("flush"), "", "=nobody", "", "")
    before = backend.lookup(A.scope, [key("a")]).flushes
    if lost == "everything":
        server.client().flushall()
    else:
        server.client().delete(lost % "crossfill")
    for _ in range(2):
        assert backend.lookup(A.scope, [key("a")]).flushes >= before
        put(backend, chain(A, "a", "b"))
    after = backend.lookup(A.scope, [key("a")]).flushes
    backend.flush()
    assert backend.lookup(A.scope, [key("a")]).flushes == after + 1
    if lost in {"everything", "{%s}"}:
        assert put_before(backend, before).refused == {Refusal.FLUSHED: 2}


def put_before(backend: RedisBackend, flushes: int) -> Any:
    return backend.publish(A, chain(A, "a", "b"), ROOMY, flushes)


def test_a_flush_between_two_parts_of_a_publish_refuses_the_rest(
    open_one: Callable[[], RedisBackend], monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer, name: str
) -> None:
    backend, other = open_one(), open_one()
    monkeypatch.setattr("cache_store.backends.redis_publish.BATCH_BYTES", 1)
    names = [f"page-{number}" for number in range(150)]
    run, runs = RedisLink.run_together, []

    def flush_before_the_second(link: RedisLink, calls: Any) -> Any:
        runs.append(len(calls))
        if len(runs) == 2:
            other.flush(tenant="nobody")
        return run(link, calls)

    monkeypatch.setattr(RedisLink, "run_together", flush_before_the_second)
    published = backend.publish(A, chain(A, *names), ROOMY, backend.lookup(A.scope, []).flushes)
    assert len(runs) == 3
    assert (published.pages, dict(published.refused)) == (64, {Refusal.FLUSHED: 86})
    assert there(backend, A, *names) == names[:64]
    audit(backend, redis_server.client(), name)


def test_a_refused_publish_of_many_pages_is_no_use_of_them(open_one: Callable[[], RedisBackend]) -> None:
    backend = open_one()
    names = [f"page-{number}" for number in range(70)]
    put(backend, [page(one, A.scope) for one in names])
    before = backend.lookup(A.scope, []).flushes
    backend.flush(tenant="nobody")
    late = backend.publish(A, [page(one, A.scope) for one in reversed(names)], ROOMY, before)
    assert late.refused == {Refusal.FLUSHED: 70}
    backend.evict(1)
    assert there(backend, A, *names) == names[1:]


def tight(pages: int) -> Limits:
    return Limits(pages * page_bytes(100), 2**30)


@pytest.mark.parametrize(("told", "left"), [("never", "bcd"), ("by close", "acd"), ("when due", "acd")])
def test_what_another_process_used_counts_once_it_told(
    open_one: Callable[[], RedisBackend], monkeypatch: pytest.MonkeyPatch, told: str, left: str
) -> None:
    reader, writer = open_one(), open_one()
    for one in "abc":
        put(writer, [page(one, A.scope)])
    assert look(reader, A, "a") == [(digest("a"), {"mass/0": 100})]
    if told == "by close":
        reader.close()
    elif told == "when due":
        monkeypatch.setattr(redis_recent, "AGE_S", 0.0)
        look(reader, A, "no such page")
    put(writer, [page("d", A.scope)], tight(3))
    assert there(writer, A, *"abcd") == list(left)


def test_uses_are_told_in_their_order_whatever_the_scope(open_one: Callable[[], RedisBackend]) -> None:
    backend = open_one()
    put(backend, [page(one, A.scope) for one in "ace"])
    put(backend, [page(one, B.scope) for one in "bd"], scope=B)
    for scope, one in ((B, "d"), (A, "a"), (B, "b"), (A, "c"), (B, "d"), (A, "e")):
        backend.read(scope.scope, [(key(one), "mass/0")])
    for left in (["c", "e", "b", "d"], ["c", "e", "d"], ["e", "d"], ["e"], []):
        backend.evict(1)
        assert there(backend, A, *"ace") + there(backend, B, *"bd") == left


def test_uses_nobody_asks_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_recent, "MOST", 10)
    monkeypatch.setattr(redis_recent, "COUNT", 4)
    recent = redis_recent.Recent()
    for number in range(30):
        recent.add(A.scope, [b"%016d" % number], 0.0)
    ((_, (_, keys, *_)),) = recent.take()
    assert keys == b"".join(b"%016d" % number for number in range(20, 30))
    assert recent.take() == []


def test_a_publish_that_spends_its_deadline_on_making_room_is_no_hung_server(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=30)
    put(backend, [page(f"page-{number}", A.scope, 1) for number in range(5000)])
    # One at a time takes longer than a tenth of a second on any machine.
    monkeypatch.setattr(redis_scripts, "WORK_PAGES", 1)
    load_script.cache_clear()
    breaker = Breaker(failures=1, delay_s=3600)
    hasty = RedisBackend.from_url(server.url(), deadline_s=0.1, breaker=breaker)
    with pytest.raises(StoreUnavailableError) as raised:
        put(hasty, [page("new", A.scope)], tight(1))
    load_script.cache_clear()
    assert raised.value.reason == "timeout"
    assert breaker.state is BreakerState.CLOSED
    server.pause()
    with pytest.raises(StoreUnavailableError):
        look(hasty, A, "a")
    assert breaker.state is BreakerState.OPEN
    server.resume()


MOST_COMMANDS = 4000
"""That one run of a script makes; they take about a microsecond each."""


def commands_of_each_run(server: RedisServer, action: Callable[[], object]) -> list[int]:
    client = server.client()
    client.config_set("slowlog-max-len", 10**6)
    client.config_set("slowlog-log-slower-than", 0)
    client.slowlog_reset()
    action()
    runs, inside = [], 0
    for entry in reversed(client.slowlog_get(10**6)):
        if entry["command"].startswith(b"EVALSHA"):
            runs.append(inside)
            inside = 0
        else:
            inside += 1
    client.config_set("slowlog-log-slower-than", -1)
    return runs


def test_no_run_of_a_script_does_much(start_redis: Start) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=60)
    scopes = [ScopeInfo(b"%016d" % number, f"tenant {number % 150}", "m", "r") for number in range(400)]
    for scope in scopes:
        put(backend, chain(scope, "a", "b", "c", "d"), scope=scope)

    def lease() -> None:
        for scope in scopes:
            backend.lease(scope.scope, [key(one) for one in "abcd"], "me", None)

    def publish_over_all() -> None:
        many = [PageWrite(key(str(number)), A.scope, digest("x"), {"kv/0": b"x"}) for number in range(1500)]
        assert put(backend, many, tight(1400)).pages >= 1399

    lease()
    steps: dict[str, Callable[[], object]] = {
        "release": lambda: backend.release("me"),
        "stats": backend.stats,
        "flush": lambda: (lease(), backend.flush()),
        "evict": lambda: backend.evict(2**40),
        "publish": publish_over_all,
        "evict live": lambda: backend.evict(2**40),
    }
    most = {step: max(runs) for step, action in steps.items() if len(runs := commands_of_each_run(server, action)) > 1}
    assert most.keys() == steps.keys()
    assert max(most.values()) <= MOST_COMMANDS, most
    assert backend.stats().size_bytes == 0
    audit(backend, server.client())


def test_a_server_restarted_from_a_snapshot_stores_nothing_that_was_computed_before(start_redis: Start) -> None:
    server = start_redis(save="3600 100000")
    backend = RedisBackend.from_url(server.url(), deadline_s=10)
    put(backend, chain(A, "a", "b"))
    before = backend.lookup(A.scope, [key("a")]).flushes
    server.client().save()
    backend.flush()
    last = backend.lookup(A.scope, [key("a")]).flushes
    server.restart()
    # Connections of before are found to be closed.
    with suppress(StoreUnavailableError):
        backend.stats()
    assert put_before(backend, before).refused == {Refusal.FLUSHED: 2}
    # The flush is undone.
    found = backend.lookup(A.scope, [key("a")])
    assert found.digests != [None]
    assert found.flushes > last
    # It is numbered once.
    assert backend.lookup(A.scope, [key("a")]).flushes == found.flushes
    assert put_before(backend, found.flushes).pages == 2
    backend.flush()
    assert backend.lookup(A.scope, []).flushes == found.flushes + 1
    audit(backend, server.client())


def test_a_server_that_may_not_be_asked_who_it_is_keeps_the_number_of_flushes(start_redis: Start) -> None:
    server = start_redis()
    open_one = RedisBackend.from_url(server.url(), deadline_s=10)
    before = open_one.lookup(A.scope, [key("a")]).flushes
    server.client().acl_setuser("plain", enabled=True, passwords=["+word"], keys=["*"], commands=["+@all", "-info"])
    plain = RedisBackend.from_url(server.url().replace("://", "://plain:word@"), deadline_s=10)
    assert plain.lookup(A.scope, [key("a")]).flushes == before
    assert open_one.lookup(A.scope, [key("a")]).flushes == before
