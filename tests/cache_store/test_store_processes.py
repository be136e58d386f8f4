"""Processes that share a store: with other hash seeds, at the same page at once, killed while they read or write."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from cache_store.backends.lmdb import LmdbBackend, read_boottime
from cache_store.backends.redis import RedisBackend
from cache_store.backends.redis_publish import BATCH_BYTES, STAGED_MS
from cache_store.records import Kind, decode_any, record_name

from .redis_audit import audit
from .redis_server import age_leases
from .slow_proxy import SlowProxy
from .store_process import LEASE_S, NAMESPACE, ROUNDS, TOKENS, open_process_store, publish_layer, true_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .redis_server import RedisServer

    Start = Callable[..., subprocess.Popen[str]]

PROGRAM = Path(__file__).parent / "store_process.py"
PAGES, MEGABYTES = len(TOKENS) // 64, 40


@pytest.fixture(params=["lmdb", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store that several processes can share."""
    if request.param == "lmdb":
        return f"lmdb://{tmp_path}/store"
    server: RedisServer = request.getfixturevalue("redis_server")
    return server.url(name=uuid.uuid4().hex)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that does something to a store; waits for its first line if one is given."""
    running: list[subprocess.Popen[str]] = []

    def start_one(what: str, url: str, number: int, *, line: str | None = None, seed: str = "0") -> subprocess.Popen:
        running.append(
            subprocess.Popen(
                [sys.executable, str(PROGRAM), what, url, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONHASHSEED": seed},
            )
        )
        if line is not None:
            assert running[-1].stdout is not None
            assert running[-1].stdout.readline() == line + "\n"
        return running[-1]

    yield start_one
    for process in running:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> str:
    """What a process that ends by itself said; it must have ended well."""
    said, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    return said


def test_processes_with_other_hash_seeds_read_each_others_pages(url: str, start: Start) -> None:
    keys = {end(start("publish", url, layer, seed=str(layer))) for layer in (1, 2)}
    assert len(keys) == 1
    hashes = set()
    for seed, layer in ((1, 2), (2, 1), (3, 1)):
        right, text_hash = end(start("read", url, layer, seed=str(seed))).split()
        assert int(right) == PAGES
        hashes.add(text_hash)
    # The control: the seeds did make the interpreters' own hashes differ.
    assert len(hashes) == 3
    assert end(start("read", url, 3)).split()[0] == "0"


def test_two_processes_at_the_same_pages_at_once_leave_the_records_of_both(url: str, start: Start) -> None:
    layers = (0, 1000)
    processes = [start("publish_at_once", url, layer, line="ready") for layer in layers]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        end(process)
    store = open_process_store(url)
    expected = {record_name(Kind.MASS, layer + number) for layer in layers for number in range(ROUNDS)}
    found = store.match(NAMESPACE, TOKENS)
    assert [set(records) for records in found.records] == [expected] * PAGES
    for layer in (0, ROUNDS - 1, 1000, 1000 + ROUNDS - 1):
        wanted = [(page, record_name(Kind.MASS, layer)) for page in found.pages]
        assert store.read(NAMESPACE, wanted) == [true_record(index, layer) for index in range(PAGES)]
    store.close()


def open_later(url: str, elapsed_s: float, further_s: float) -> LmdbBackend | RedisBackend:
    """The store so many seconds later than `elapsed_s`, as which it was seen last."""
    if url.startswith("lmdb"):
        folder = Path(url.removeprefix("lmdb://"))
        return LmdbBackend(folder, deadline_s=30, clock=lambda: read_boottime() + elapsed_s + further_s)
    backend = RedisBackend.from_url(url, deadline_s=30)
    age_leases(redis.Redis(port=backend._link.address.port), backend._link.address.name, further_s)
    return backend


def test_a_reader_killed_with_a_lease_keeps_its_pages_until_that_ends_and_no_longer(url: str, start: Start) -> None:
    store = open_process_store(url)
    publish_layer(store, 0)
    store.close()
    reader = start("lease", url, 0, line=str(PAGES))
    reader.kill()
    assert reader.wait() == -9
    before = open_later(url, 0, LEASE_S - 600)
    assert before.stats().leased_pages == PAGES
    assert before.evict(2**40).pages == 0
    before.close()
    after = open_later(url, LEASE_S - 600, 1200)
    assert after.stats().leased_pages == 0
    assert after.evict(2**40).pages == PAGES
    after.close()


@pytest.fixture
def write_and_kill(start: Start) -> Iterator[Callable[[RedisServer, int], None]]:
    """Starts a writer, lets so many bytes of it reach the server, and kills it."""
    proxies: list[SlowProxy] = []

    def kill(server: RedisServer, most_bytes: int) -> None:
        proxies.append(SlowProxy(server.port, most_bytes=most_bytes))
        url = f"redis://127.0.0.1:{proxies[-1].port}"
        writer = start("publish_large", url, MEGABYTES, line="ready")
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert proxies[-1].held.wait(60)
        writer.kill()
        assert writer.wait() == -9
        proxies[-1].stop()
        server.client().ping()

    yield kill
    for proxy in proxies:
        proxy.stop()


def test_a_writer_killed_in_the_middle_of_a_publish_leaves_whole_pages_and_their_parents(
    start_redis: Callable[..., RedisServer], start: Start, write_and_kill: Callable[[RedisServer, int], None]
) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=30)
    # The control: one that is left alone publishes all of it. It makes the scripts known too.
    end(start("publish_large", server.url(), MEGABYTES, line="ready"))
    assert sum(1 for _ in backend.scan()) == MEGABYTES
    backend.evict(2**40)
    write_and_kill(server, BATCH_BYTES + 5 * 2**20)
    stored = [page for _, page in backend.scan()]
    assert BATCH_BYTES >> 20 <= len(stored) < MEGABYTES
    parents = [NAMESPACE.scope, *(page.key for page in stored)]
    for page, parent in zip(stored, parents, strict=False):
        assert page.parent == parent
        assert {name: decode_any(data).payload for name, data in page.records.items()} == {"mass/0": page.key * 2**16}
    audit(backend, server.client())
    backend.close()


def test_what_a_writer_killed_before_its_script_was_known_has_sent_goes_by_itself(
    start_redis: Callable[..., RedisServer], write_and_kill: Callable[[RedisServer, int], None]
) -> None:
    server = start_redis()
    # It sent a whole batch, was told that the script is not known, and began anew.
    write_and_kill(server, BATCH_BYTES + 5 * 2**20)
    client = server.client()
    waiting = [client.pttl(key) for key in client.scan_iter("{crossfill}:x:*")]
    assert waiting
    assert all(0 < left_ms <= STAGED_MS for left_ms in waiting)
