"""A Redis store whose keys are changed from outside, or that many use at once: it goes on, and its sums are right."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TYPE_CHECKING

import pytest

from cache_store.backends.protocol import AnchorPool, Limits
from cache_store.backends.redis import RedisBackend

from .redis_audit import audit, page_bytes
from .sample_pages import A, B, chain, key, look, page, put, there

if TYPE_CHECKING:
    from collections.abc import Callable

    from .redis_server import RedisServer

    Start = Callable[..., RedisServer]

ABC = chain(A, "a", "b", "c")


@pytest.fixture
def named(redis_server: RedisServer) -> tuple[RedisBackend, str]:
    """An empty store on the session's server, and its name."""
    name = uuid.uuid4().hex
    return RedisBackend.from_url(redis_server.url(name=name), deadline_s=10), name


def looks(backend: RedisBackend) -> list[bool]:
    return [found is not None for found in look(backend, A, "a", "b", "c")]


def test_a_server_emptied_from_outside_is_an_empty_store(start_redis: Start) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=10)
    put(backend, ABC)
    backend.read(A.scope, [(key("a"), "mass/0")])
    backend.lease(A.scope, [key("b")], "me", None)
    server.client().flushall()
    assert looks(backend) == [False] * 3
    assert backend.read(A.scope, [(key("a"), "mass/0")]) == [None]
    assert (backend.stats().size_bytes, backend.stats().leased_pages) == (0, 0)
    assert put(backend, ABC).pages == 3
    audit(backend, server.client())


def test_a_page_deleted_from_outside_is_missing_and_nothing_else(start_redis: Start) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=10)
    put(backend, ABC)
    for guessed in (False, True):
        if guessed:
            backend.lookup(A.scope, [key("a")])
        lost = next(name for name in server.client().scan_iter("{crossfill}:p:*") if name.endswith(key("b")))
        server.client().delete(lost)
        wanted = [(key(name), "mass/0") for name in "abc"]
        found = backend.read(A.scope, wanted)
        assert found == [ABC[0].records["mass/0"], None, ABC[2].records["mass/0"]]
        assert looks(backend) == [True, False, True]
        audit(backend, server.client())
        assert put(backend, ABC).pages == 3
        assert looks(backend) == [True] * 3
        audit(backend, server.client())


KINDS = [
    "",
    ":scopes",
    ":info",
    ":epochs",
    ":tenants",
    ":g:*",
    ":i:*",
    ":u:*",
    ":k:*",
    ":l",
    ":t:*",
    ":lp",
    ":e",
    ":h:*",
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind or "root")
def test_any_key_deleted_from_outside_leaves_a_store_that_works(start_redis: Start, kind: str) -> None:
    server = start_redis()
    client = server.client()
    backend = RedisBackend.from_url(server.url(), deadline_s=10)
    put(backend, ABC)
    put(backend, chain(B, "d", "e"), scope=B)
    backend.lease(A.scope, [key("c")], "me", None)
    assert client.delete(*client.keys("{crossfill}" + kind)) > 0
    looks(backend)
    backend.read(A.scope, [(key("a"), "mass/0")])
    tight = 4 * page_bytes(176)
    for number in range(8):
        assert put(backend, chain(A, f"x{number}"), Limits(tight, tight)).pages + backend.release("me") >= 0
    assert backend.stats().size_bytes <= tight
    backend.flush()
    backend.evict(1 << 40)
    backend.compact()
    assert backend.stats().size_bytes == 0
    assert not list(client.scan_iter("{crossfill}:p:*"))
    assert put(backend, ABC).pages == 3
    assert looks(backend) == [True] * 3
    audit(backend, client)


def test_what_lost_its_index_is_deleted_by_compact(start_redis: Start) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=10)
    put(backend, ABC)
    pool = AnchorPool(A, "slot")
    backend.put_anchor(pool, "one", b"x")
    server.client().delete("{crossfill}")
    assert put(backend, chain(A, "d")).pages == 1
    gone = backend.compact()
    assert gone.pages == 3
    audit(backend, server.client())
    assert there(backend, A, "a", "b", "c", "d") == ["d"]


def test_a_smaller_budget_is_reached_in_many_short_runs(
    named: tuple[RedisBackend, str], redis_server: RedisServer
) -> None:
    backend, name = named
    names = [f"page-{number}" for number in range(1700)]
    assert put(backend, [page(one, A.scope, 10) for one in names]).pages == 1700
    result = put(backend, chain(A, "new", size=10), Limits(3 * page_bytes(10), 2**30))
    assert (result.pages, result.evicted_pages) == (1, 1698)
    assert backend.stats().size_bytes == 3 * page_bytes(10)
    assert there(backend, A, *names, "new") == ["page-1698", "page-1699", "new"]
    audit(backend, redis_server.client(), name)


def test_a_publish_of_many_parts_spares_its_own_pages(
    named: tuple[RedisBackend, str], redis_server: RedisServer
) -> None:
    backend, name = named
    names = [f"page-{number}" for number in range(300)]
    room = Limits(300 * page_bytes(50), 2**30)
    put(backend, [page(one, A.scope, 50) for one in reversed(names)], room)
    old = put(backend, [page(one, A.scope, 50) for one in names] + [page("more", A.scope, 50)], room)
    assert (old.pages, dict(old.refused)) == (300, {"full": 1})
    assert len(there(backend, A, *names)) == 300
    audit(backend, redis_server.client(), name)


def test_a_lease_ends_by_the_servers_clock(named: tuple[RedisBackend, str], redis_server: RedisServer) -> None:
    backend, name = named
    put(backend, ABC)
    assert backend.lease(A.scope, [key("c")], "reader", 0.05) == 1
    time.sleep(0.1)
    assert backend.stats().leased_pages == 0
    audit(backend, redis_server.client(), name)
    assert backend.evict(1 << 40).pages == 3


def test_scopes_without_pages_are_forgotten_beyond_a_number(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cache_store.backends import redis_scripts
    from cache_store.backends.protocol import ScopeInfo

    monkeypatch.setattr(redis_scripts, "MAX_SCOPES", 20)
    redis_scripts.load_script.cache_clear()
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=10)
    put(backend, ABC)
    backend.put_anchor(AnchorPool(B, "slot"), "one", b"x")
    for number in range(200):
        put(backend, [], scope=ScopeInfo(number.to_bytes(16, "big"), "t", "m", "r"))
    redis_scripts.load_script.cache_clear()
    kept = {scope.info.scope for scope in backend.stats().scopes}
    assert len(kept) < 100
    assert {A.scope, B.scope} <= kept
    assert looks(backend) == [True] * 3
    audit(backend, server.client())


WRITER = """
import sys
from cache_store.backends.protocol import Limits, PageWrite, ScopeInfo
from cache_store.backends.redis import RedisBackend
from cache_store.keys import page_keys

backend, round_ = RedisBackend.from_url(sys.argv[1], deadline_s=10), 0
info = ScopeInfo(b"scope-a-scope-a-", "acme", "small", "r1")
while True:
    pages = [PageWrite(k.key, k.parent, k.tokens_digest, {"mass/0": b"x" * 9000}) for k in page_keys(info.scope,
             [round_ % 7] * 64 * 150)]
    backend.publish(info, pages, Limits(int(sys.argv[2]), 2**30))
    round_ += 1
    print(round_, flush=True)
"""


def test_a_writer_killed_while_it_writes_leaves_a_store_that_adds_up(start_redis: Start) -> None:
    server = start_redis()
    for rounds in (1, 2, 3, 5):
        command = [sys.executable, "-c", WRITER, server.url(), str(300 * page_bytes(9000))]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout
        for _ in range(rounds):
            assert writer.stdout.readline()
        writer.kill()
        writer.wait()
        backend = RedisBackend.from_url(server.url(), deadline_s=10)
        server.client().ping()
        audit(backend, server.client())
        assert backend.stats().size_bytes > 0


STEPS = ("publish", "publish", "publish", "lookup", "read", "lease", "release", "evict", "flush")


def do_anything(backend: RedisBackend, random: Random, holder: str) -> None:
    """One operation; what is read must be what was written."""
    names = [f"{random.randrange(3)}-{at}" for at in range(random.randrange(1, 90))]
    scope, keys = random.choice([A, B]), [key(name) for name in names]
    unit = page_bytes(100)
    steps: dict[str, Callable[[], object]] = {
        "publish": lambda: put(backend, chain(scope, *names), Limits(120 * unit, 70 * unit), scope),
        "lookup": lambda: backend.lookup(scope.scope, keys),
        "lease": lambda: backend.lease(scope.scope, keys[:9], holder, random.random() / 9),
        "release": lambda: backend.release(holder),
        "evict": lambda: backend.evict(random.randrange(20 * unit)),
        "flush": lambda: backend.flush(tenant=scope.tenant),
    }
    step = random.choice(STEPS)
    if step == "read":
        found = backend.read(scope.scope, [(one, "mass/0") for one in keys])
        written = [page(name, scope.scope).records["mass/0"] for name in names]
        assert all(data in {None, want} for data, want in zip(found, written, strict=True))
    else:
        steps[step]()


def test_many_threads_do_everything_at_once_and_it_adds_up(start_redis: Start) -> None:
    server = start_redis()
    shared = RedisBackend.from_url(server.url(), deadline_s=30)

    def work(seed: int) -> None:
        random, holder = Random(seed), f"holder-{seed}"
        backend = shared if seed % 2 else RedisBackend.from_url(server.url(), deadline_s=30)
        for _ in range(60):
            do_anything(backend, random, holder)
        backend.release(holder)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, seed) for seed in range(6)]:
            done.result()
    audit(shared, server.client())
    shared.flush()
    shared.evict(1 << 40)
    assert shared.stats().size_bytes == 0
    audit(shared, server.client())
