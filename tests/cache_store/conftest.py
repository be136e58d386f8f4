"""Backends for tests that hold for all of them."""

from __future__ import annotations

import importlib.util
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from cache_store.backends.memory import MemoryBackend
from cache_store.backends.protocol import PageWrite, ScopeInfo

from .sample_pages import ROOMY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cache_store.backends.protocol import Backend

KINDS = ["memory", *(name for name in ("lmdb", "redis") if importlib.util.find_spec(f"cache_store.backends.{name}"))]


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
    """An empty store, and how its time passes: by a clock of the test's own, or by sleeping for a server's."""

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
def redis_url() -> str:
    """URL of a Redis server for the session, without a query. To be replaced by one that starts a server."""
    pytest.skip("no Redis server is started yet")


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

            url = f"{request.getfixturevalue('redis_url')}?name={uuid.uuid4().hex}"
            opened.append(Opened(RedisBackend.from_url(url, deadline_s=10.0), time.sleep))
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
