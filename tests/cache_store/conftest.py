"""Backends for tests that hold for all of them."""

from __future__ import annotations

import importlib.util
import shutil
import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest

from cache_store.backends.memory import MemoryBackend
from cache_store.backends.protocol import PageWrite, ScopeInfo

from .redis_server import RedisServer, age_leases, free_port
from .sample_pages import ROOMY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cache_store.backends.protocol import Backend

MODULES = {"memory": "memory", "lmdb": "lmdb", "redis": "redis", "redis_cluster": "redis"}
KINDS = [kind for kind, module in MODULES.items() if importlib.util.find_spec(f"cache_store.backends.{module}")]


SERVERS = {"redis": "redis_server", "redis_cluster": "redis_cluster"}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Opened:
    """An empty store, and how its time passes: by a clock of the test's own, or by ageing what a server holds."""

    backend: Backend
    advance: Callable[[float], None]

    def __post_init__(self) -> None:
        probe = ScopeInfo(b"overhead-overhea", "overhead", "", "")
        self.backend.publish(probe, [PageWrite(b"k" * 16, probe.scope, b"d" * 32, {})], ROOMY)
        self.page_overhead_bytes = self.backend.stats().size_bytes
        """What this kind of store counts for a page beside its records."""
        self.backend.evict(self.page_overhead_bytes)
        assert self.backend.stats().size_bytes == 0


@pytest.fixture(scope="session")
def redis_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers run; without an installed redis-server the tests that want one are skipped."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server is installed (apt-get install redis-server)")
    return tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="session")
def redis_server(redis_folder: Path) -> Iterator[RedisServer]:
    """One server for the whole session; each test uses its own store's name or flushes."""
    server = RedisServer(redis_folder / "shared")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_url(redis_server: RedisServer) -> str:
    """A store on the session's server."""
    return redis_server.url()


@pytest.fixture(scope="session")
def redis_cluster(redis_folder: Path) -> Iterator[RedisServer]:
    """A cluster of one node that has all slots."""
    options = {"cluster_enabled": "yes", "cluster_config_file": "nodes.conf", "cluster_port": str(free_port())}
    server = RedisServer(redis_folder / "cluster", **options)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_cluster_url(redis_cluster: RedisServer) -> str:
    """A store on the session's cluster."""
    return redis_cluster.url("redis+cluster")


@pytest.fixture
def start_redis(redis_folder: Path, tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts servers of the test's own; options are those of redis.conf, with underscores."""
    started: list[RedisServer] = []

    def start(*, slots: bool = True, **options: str) -> RedisServer:
        started.append(RedisServer(tmp_path / f"redis-{len(started)}", slots=slots, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(params=KINDS)
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Opened]]:
    """Opens an empty store of each kind, as many as a test wants; closed when it ends."""
    opened: list[Opened] = []

    def open_one() -> Opened:
        clock = Clock()
        if request.param == "memory":
            opened.append(Opened(MemoryBackend(clock=clock), clock.advance))
        elif request.param == "lmdb":
            from cache_store.backends.lmdb import LmdbBackend

            opened.append(Opened(LmdbBackend(tmp_path / uuid.uuid4().hex, clock=clock, deadline_s=30), clock.advance))
        else:
            from cache_store.backends.redis import RedisBackend

            server: RedisServer = request.getfixturevalue(SERVERS[request.param])
            url, name = request.getfixturevalue(f"{request.param}_url"), uuid.uuid4().hex
            advance = partial(age_leases, server.client(), name)
            opened.append(Opened(RedisBackend.from_url(f"{url}?name={name}", deadline_s=10.0), advance))
        return opened[-1]

    yield open_one
    for store in opened:
        store.backend.close()


@pytest.fixture
def opened(open_store: Callable[[], Opened]) -> Opened:
    """One empty store of each kind, with its time."""
    return open_store()


@pytest.fixture
def backend(opened: Opened) -> Backend:
    """One empty store of each kind."""
    return opened.backend
