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
    from collections.abc import Callable, Iterator, Mapping
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


class Footprints:
    """What pages count for in one kind of store, measured in one of that kind that is used for nothing else."""

    _PROBE = ScopeInfo(b"probe-probe-prob", "probe", "", "")

    def __init__(self, open_backend: Callable[[], Backend]) -> None:
        self._open_backend = open_backend
        self._backend: Backend | None = None
        self._known: dict[tuple[tuple[str, int], ...], int] = {}

    def __call__(self, sizes: Mapping[str, int]) -> int:
        """Of a page with records of these sizes."""
        records = tuple(sorted(sizes.items()))
        if records not in self._known:
            self._known[records] = self._measure(sizes)
        return self._known[records]

    def _measure(self, sizes: Mapping[str, int]) -> int:
        if self._backend is None:
            self._backend = self._open_backend()
        before = self._backend.stats().size_bytes
        name = len(self._known).to_bytes(16, "big")
        written = PageWrite(name, self._PROBE.scope, 2 * name, {record: bytes(size) for record, size in sizes.items()})
        assert self._backend.publish(self._PROBE, [written], ROOMY).pages == 1
        return self._backend.stats().size_bytes - before

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()


@dataclass
class Opened:
    """An empty store of one kind.

    Attributes:
        backend: the store.
        advance: lets its time pass: that of a clock of the test's own, or by ageing what a server holds.
        footprint: what it counts for a page with records of these sizes.
        rounds: whether it counts what is allocated for records and not their bytes.
    """

    backend: Backend
    advance: Callable[[float], None]
    footprint: Footprints
    rounds: bool


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

    def open_it() -> tuple[Backend, Callable[[float], None]]:
        clock = Clock()
        if request.param == "memory":
            return MemoryBackend(clock=clock), clock.advance
        if request.param == "lmdb":
            from cache_store.backends.lmdb import LmdbBackend

            return LmdbBackend(tmp_path / uuid.uuid4().hex, clock=clock, deadline_s=30), clock.advance
        from cache_store.backends.redis import RedisBackend

        server: RedisServer = request.getfixturevalue(SERVERS[request.param])
        url, name = request.getfixturevalue(f"{request.param}_url"), uuid.uuid4().hex
        return RedisBackend.from_url(f"{url}?name={name}", deadline_s=10.0), partial(age_leases, server.client(), name)

    footprints = Footprints(lambda: open_it()[0])

    def open_one() -> Opened:
        opened.append(Opened(*open_it(), footprints, request.param in SERVERS))
        return opened[-1]

    yield open_one
    footprints.close()
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
