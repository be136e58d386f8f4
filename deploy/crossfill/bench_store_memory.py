"""What a page takes beside the bytes of its records, really and as the store counts it, in a store of its own.

In this process: what Python allocates, the objects around records included. LMDB: pages of its file that its tables
use. Redis: growth of the server's `used_memory` without that of connections.
"""

from __future__ import annotations

import gc
import random
import secrets
import tracemalloc
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from cache_store.backends.opening import open_backend
from cache_store.backends.protocol import Limits, PageWrite, ScopeInfo
from cache_store.keys import DIGEST_BYTES, KEY_BYTES
from crossfill.bench_store_report import PageMemory, without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from cache_store.backends.protocol import Backend
    from crossfill.bench_store_report import StoreBench
    from crossfill.progress import Bars

    # Opens the store, as often as it is asked; and tells how many bytes it takes while it is not open.
    Own = tuple[Callable[[], AbstractContextManager[Backend]], Callable[[], int]]

_SCOPE = ScopeInfo(b"bench-memory-ben", "bench", "model", "revision")
_PLENTY = Limits(2**40, 2**40)
# Published at once.
_PART = 64
# Of pages that go on where the one before ended; the others branch off from any.
_CHAINED = 0.9


def measure_memory(bench: StoreBench, url: str, folder: Path, progress: Bars) -> list[PageMemory]:
    """Pages as `bench` has them, with one record, and with none; nothing if this kind of store cannot be asked.

    Args:
        bench: says how many pages and records of which size.
        url: of a store of the same kind; on the same server if it has one, and nothing is left there.
        folder: not there yet; for what an embedded one writes.
        progress: is told how far it is.
    """
    scheme = urlsplit(url).scheme
    if scheme == "redis+cluster":
        return []
    found = []
    for records in sorted({bench.records, 1, 0}, reverse=True):
        names = [f"mass/{layer}" for layer in range(records)]
        fill = _Filling(bench, names, f"{scheme} memory, records a page: {records}", progress)
        with _OPENERS[scheme](url, folder / str(records)) as (opened, used_bytes):
            # What is allocated once, such as tables and scripts, is no page's.
            with opened() as backend:
                counted = fill(backend, _PART)
            before = used_bytes()
            with opened() as backend:
                counted = fill(backend, bench.memory_pages) - counted
            used = used_bytes() - before
        content = records * bench.record_bytes
        used_a_page, counted_a_page = (size / bench.memory_pages - content for size in (used, counted))
        found.append(PageMemory(without_password(url), bench.memory_pages, records, used_a_page, counted_a_page))
    return found


class _Filling:
    """Pages for one store, each a child of one before it."""

    def __init__(self, bench: StoreBench, names: list[str], stage: str, progress: Bars) -> None:
        self._record_bytes = bench.record_bytes
        self._names = names
        self._stage = stage
        self._progress = progress
        self._random = random.Random(len(names))
        self._last = _SCOPE.scope
        # A sample of the pages, from which others branch off; few, as what this remembers counts in this process.
        self._some = [_SCOPE.scope]

    def __call__(self, backend: Backend, pages: int) -> int:
        """Publish so many more; what the store counts for all it holds."""
        for first in range(0, pages, _PART):
            backend.publish(_SCOPE, [self._page() for _ in range(min(_PART, pages - first))], _PLENTY)
            self._progress(self._stage, min(first + _PART, pages), pages)
        return backend.stats().size_bytes

    def _page(self) -> PageWrite:
        parent = self._last if self._random.random() < _CHAINED else self._random.choice(self._some)
        self._last = self._random.randbytes(KEY_BYTES)
        if len(self._some) < _PART:
            self._some.append(self._last)
        records = {name: self._random.randbytes(self._record_bytes) for name in self._names}
        return PageWrite(self._last, parent, self._random.randbytes(DIGEST_BYTES), records)


@contextmanager
def _opened(url: str) -> Iterator[Backend]:
    backend = open_backend(url, deadline_s=30.0)
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def _in_process(url: str, _folder: Path) -> Iterator[Own]:
    def used_bytes() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        with _opened(url) as backend:
            yield lambda: nullcontext(backend), used_bytes
    finally:
        tracemalloc.stop()


@contextmanager
def _in_lmdb(_url: str, folder: Path) -> Iterator[Own]:
    import lmdb

    def used_bytes() -> int:
        with lmdb.open(str(folder), readonly=True, max_dbs=64) as environment, environment.begin() as txn:
            names = list(txn.cursor().iternext(values=False))
            tables = [environment.open_db(name, txn=txn, create=False) for name in names]
            stats = [environment.stat(), *map(txn.stat, tables)]
            return sum(s["psize"] * (s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)

    folder.mkdir(parents=True)
    yield partial(_opened, f"lmdb://{folder}"), used_bytes


@contextmanager
def _in_redis(url: str, _folder: Path) -> Iterator[Own]:
    import redis

    name = f"bench-memory-{secrets.token_hex(4)}"
    own_url = urlunsplit(urlsplit(url)._replace(query=f"name={name}"))
    with redis.Redis.from_url(urlunsplit(urlsplit(url)._replace(query=""))) as client:

        def used_bytes() -> int:
            memory = client.info("memory")
            return int(memory["used_memory"]) - int(memory["mem_clients_normal"])

        try:
            yield partial(_opened, own_url), used_bytes
        finally:
            for key in client.scan_iter(f"{{{name}}}*", count=1000):
                client.unlink(key)


_OPENERS = {"memory": _in_process, "lmdb": _in_lmdb, "redis": _in_redis, "rediss": _in_redis}
