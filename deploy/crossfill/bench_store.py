"""What the store costs on this machine, against plain calls of the libraries that it is built on.

**Paired.** In every round each operation is done by the store, by its backend alone and by plain calls of the library,
on the same bytes, one after the other and in turns, so that a busy machine slows all of them alike. The ratio is the
median over the rounds of backend over library.

**What is timed is right.** Before the first round, what was published must be found and read byte for byte, through
the store and through the library, and another tenant must find nothing; else there is no figure but an error.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from cache_store.backends.opening import open_backend
from cache_store.backends.protocol import Limits, PageWrite
from cache_store.client.fetch import Fetcher
from cache_store.keys import DIGEST_BYTES, PAGE, page_keys
from cache_store.metrics import StoreMetrics
from cache_store.namespace import Namespace
from cache_store.records import HEADER_BYTES, Kind, Record
from cache_store.store import Store
from crossfill.bench_radix import bench_radix, bench_removals
from crossfill.bench_store_memory import measure_memory
from crossfill.bench_store_raw import Layout, description, open_raw
from crossfill.bench_store_report import (
    Hung,
    Measured,
    PageMemory,
    Side,
    StoreBench,
    StoreResults,
    report,
    tables,
    without_password,
)
from crossfill.errors import BenchError
from crossfill.ports import Ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console

    from cache_store.backends.protocol import Backend
    from crossfill.bench_store_raw import Raw
    from crossfill.progress import Bars

_NAMESPACE = Namespace("bench", "model", "revision", "tokenizer", "template")
_PLENTY = Limits(2**36, 2**36)
_START_TIMEOUT_S = 20.0
_HUNG_REQUESTS = 20
_HUNG_WAIT_S = 0.02


def bench_store(bench: StoreBench, *, output: Path | None, console: Console, progress: Bars) -> StoreResults:
    """Measure each store of `bench` and the radix mirror, print tables, and write everything to `output` as JSON.

    Raises:
        BenchError: something that was stored did not come back as it was, or a server did not start.
        StoreError: a store could not be opened or stopped answering.
    """
    measured: list[Measured] = []
    memory: list[PageMemory] = []
    hung = None
    with ExitStack() as held:
        folder = Path(held.enter_context(TemporaryDirectory(prefix="crossfill-bench-")))
        urls, server = list(bench.urls), None
        if not urls:
            urls = ["memory://", f"lmdb://{folder}/store"]
            if shutil.which("redis-server"):
                url, server = held.enter_context(_redis(folder))
                urls.append(url)
        for number, url in enumerate(urls):
            measured += _bench_url(bench, url, folder / str(number), progress)
            memory += measure_memory(bench, url, folder / f"memory-{number}", progress)
        if server is not None:
            hung = _bench_hung(urls[-1], server)
    mirrors, removals = bench_radix(bench.mirror_pages, progress), bench_removals(bench.mirror_pages, progress)
    results = StoreResults(measured, memory, hung, mirrors, removals)
    for table in tables(bench, results):
        console.print(table)
    if output:
        output.write_text(json.dumps(report(bench, results), indent=2) + "\n", encoding="utf-8")
    return results


def _bench_url(bench: StoreBench, url: str, folder: Path, progress: Bars) -> list[Measured]:
    with ExitStack() as held:
        backend = open_backend(url, deadline_s=30.0)
        held.callback(backend.close)
        raw = held.enter_context(open_raw(url, folder / "raw", _layout(bench)))
        measured: list[Measured] = []
        for tokens in bench.tokens:
            run = _Run(bench, without_password(url), tokens, backend, raw, progress)
            run.check()
            measured += run.measure()
        return measured


def _layout(bench: StoreBench) -> Layout:
    names = {f"mass/{layer}": b"" for layer in range(bench.records)}
    return Layout(len(description(PageWrite(b"", b"", bytes(DIGEST_BYTES), names))), bench.record_bytes)


class _Run:
    """One store at one length of prefix."""

    def __init__(
        self, bench: StoreBench, url: str, tokens: int, backend: Backend, raw: Mapping[Side, Raw], progress: Bars
    ) -> None:
        self._bench = bench
        self._url = url
        self._tokens = tokens
        self._backend = backend
        self._raw = raw
        self._progress = progress
        self._store = Store(backend, _PLENTY, StoreMetrics(CollectorRegistry()))
        self._random = random.Random(tokens)
        self._names = [f"mass/{layer}" for layer in range(bench.records)]

    def check(self) -> None:
        """Raises BenchError unless what goes in comes out."""
        tokens = self._prefix()
        pages = page_keys(_NAMESPACE.scope, tokens)
        writes = self._store.page_writes(_NAMESPACE, tokens, self._records(tokens))
        published = self._store.write(_NAMESPACE, writes)
        found = self._store.match(_NAMESPACE, tokens)
        wanted = [(page.key, name) for page in pages for name in self._names]
        sent = [data for write in writes for data in write.records.values()]
        other = self._store.match(replace(_NAMESPACE, tenant="other"), tokens)
        self._require(published.pages == len(pages), f"{published.pages} of {len(pages)} pages were stored")
        self._require(all(found.contiguous_pages(name) == len(pages) for name in self._names), "pages were not found")
        self._require(self._backend.read(_NAMESPACE.scope, wanted) == sent, "other bytes were read than were written")
        self._require(not other.names, "another tenant found them")
        for raw in self._raw.values():
            raw.publish(raw.prepare(writes))
            described = raw.match([page.key for page in pages])
            self._require(list(described) == list(map(description, writes)), "plain calls did not find the pages")
            second = raw.read([page.key for page in pages], 1)
            self._require(list(second) == sent[1 :: len(self._names)], "plain calls read other bytes")

    def measure(self) -> list[Measured]:
        """Each operation; the prefixes of all rounds but the last stay in the store, which is what fills it."""
        rounds = self._bench.rounds
        publish = self._times("publish", rounds, self._publish)
        # Each looks up and reads what it has just published; more often, as that is quick.
        match, read = (max(times * rounds, self._bench.least_lookups) for times in (5, 2))
        return [publish, self._times("match", match, self._match), self._times("read", read, self._read)]

    def _publish(self) -> Mapping[Side, Callable[[], object]]:
        tokens = self._prefix()
        records = self._records(tokens)
        alone = self._prefix()
        writes = self._store.page_writes(_NAMESPACE, alone, self._records(alone))
        calls: dict[Side, Callable[[], object]] = {
            Side.STORE: lambda: self._store.publish(_NAMESPACE, tokens, records),
            Side.BACKEND: lambda: self._store.write(_NAMESPACE, writes),
        }
        for side, raw in self._raw.items():
            calls[side] = partial(raw.publish, raw.prepare(writes))
        self._known = alone
        return calls

    def _match(self) -> Mapping[Side, Callable[[], object]]:
        tokens = self._known
        keys = [page.key for page in page_keys(_NAMESPACE.scope, tokens)]
        calls: dict[Side, Callable[[], object]] = {
            Side.STORE: lambda: self._store.match(_NAMESPACE, tokens),
            Side.BACKEND: lambda: self._backend.lookup(_NAMESPACE.scope, keys),
        }
        return calls | {side: partial(raw.match, keys) for side, raw in self._raw.items()}

    def _read(self) -> Mapping[Side, Callable[[], object]]:
        index = self._random.randrange(self._bench.records)
        name = self._names[index]
        pages = page_keys(_NAMESPACE.scope, self._known)
        wanted = [(page, name) for page in pages]
        keyed = [(page.key, name) for page in pages]
        calls: dict[Side, Callable[[], object]] = {
            Side.STORE: lambda: self._store.read(_NAMESPACE, wanted),
            Side.BACKEND: lambda: self._backend.read(_NAMESPACE.scope, keyed),
        }
        keys = [page.key for page in pages]
        return calls | {side: partial(raw.read, keys, index) for side, raw in self._raw.items()}

    def _times(
        self, operation: str, rounds: int, prepare: Callable[[], Mapping[Side, Callable[[], object]]]
    ) -> Measured:
        stage = f"{self._url.partition(':')[0]} {self._tokens} tokens, {operation}"
        taken: dict[Side, list[float]] = {}
        for number in range(rounds + 1):
            calls = list(prepare().items())
            # In turns: whoever comes first finds colder caches.
            for side, call in calls[number % len(calls) :] + calls[: number % len(calls)]:
                started_s = time.perf_counter()
                call()
                if number:
                    taken.setdefault(side, []).append(time.perf_counter() - started_s)
            self._progress(stage, number, rounds)
        moved = self._bench.records * self._bench.record_bytes if operation == "publish" else self._bench.record_bytes
        size_bytes = 0 if operation == "match" else moved * (self._tokens // PAGE)
        return Measured(self._url, self._tokens, operation, self._tokens // PAGE, size_bytes, taken)

    def _prefix(self) -> list[int]:
        return [self._random.randrange(50_000) for _ in range(self._tokens)]

    def _records(self, tokens: Sequence[int]) -> dict[int, list[Record]]:
        size = self._bench.record_bytes - HEADER_BYTES
        return {
            index: [
                Record(Kind.MASS, layer, (size,), "u1", page.tokens_digest, self._random.randbytes(size))
                for layer in range(self._bench.records)
            ]
            for index, page in enumerate(page_keys(_NAMESPACE.scope, tokens))
        }

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise BenchError(f"{self._url}: {otherwise}; no figure of it would be worth anything")


def _bench_hung(url: str, server: subprocess.Popen[bytes]) -> Hung:
    """What requests wait for a server that accepts connections and answers nothing."""
    backend = open_backend(url, deadline_s=1.0)
    fetcher = Fetcher(Store(backend, _PLENTY, StoreMetrics(CollectorRegistry())))
    tokens = list(range(20_000))
    waited = []
    try:
        if fetcher.start("before", _NAMESPACE, tokens, ["mass/0"], 5.0).coverage(5.0) is None:
            raise BenchError(f"{url}: does not answer before it is stopped")
        os.kill(server.pid, signal.SIGSTOP)
        for number in range(_HUNG_REQUESTS):
            started_s = time.perf_counter()
            found = fetcher.start(str(number), _NAMESPACE, tokens, ["mass/0"], 1.0).coverage(_HUNG_WAIT_S)
            waited.append(time.perf_counter() - started_s)
            if found is not None:
                raise BenchError(f"{url}: answers while it is stopped")
    finally:
        os.kill(server.pid, signal.SIGCONT)
        fetcher.close()
        backend.close()
    return Hung(url, _HUNG_WAIT_S, waited)


@contextmanager
def _redis(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URL and process of a Redis server of our own, which keeps nothing."""
    import redis

    with Ports(31950) as ports, (folder / "redis.log").open("wb") as log:
        port = ports.take()
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        server = subprocess.Popen([*command, "--dir", str(folder)], stdout=log, stderr=subprocess.STDOUT)  # noqa: S603
        try:
            client = redis.Redis(port=port)
            until_s = time.monotonic() + _START_TIMEOUT_S
            while not _answers(client):
                if server.poll() is not None or time.monotonic() > until_s:
                    raise BenchError(f"redis-server did not start: {(folder / 'redis.log').read_text()[-300:]}")
                time.sleep(0.02)
            client.close()
            yield f"redis://127.0.0.1:{port}/0", server
        finally:
            server.terminate()
            server.wait()


def _answers(client: object) -> bool:
    import redis

    assert isinstance(client, redis.Redis)
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
