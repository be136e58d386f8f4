"""Reads what the store has for a request, in the background, while the request waits for its turn."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from cache_store.client.threads import Threads
from cache_store.errors import StoreError
from cache_store.metrics import FetchEnd
from cache_store.records import read_record_name
from cache_store.seldom import SeldomLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from cache_store.coverage import Coverage
    from cache_store.namespace import Namespace
    from cache_store.records import Record
    from cache_store.store import Store

_log = logging.getLogger("crossfill.store")

_LOG_EVERY_S = 60.0

LayerRecords = dict[str, dict[int, "Record"]]
"""Records by name, then by index of their page within the prefix."""

T = TypeVar("T")


class _Held:
    """Bytes of all layers that came and were not taken yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return self._bytes

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self._bytes += size_bytes


class Fetch(Generic[T]):
    """What one request gets from the store. Safe to use from several threads; nothing here waits unless it says so.

    Layers become ready in the order in which the computation will want them, as `T`: the records, or what was prepared
    of them. A fetch that ended early keeps what had come by then, except after `cancel`, which drops everything. All of
    it was stored between the same two flushes.
    """

    def __init__(
        self,
        request_id: str,
        deadline_at_s: float,
        clock: Callable[[], float],
        count: Callable[[FetchEnd], None],
        held: _Held,
        size: Callable[[T], int],
    ) -> None:
        self.request_id = request_id
        self._held, self._size = held, size
        self._deadline_at_s = deadline_at_s
        self._clock = clock
        self._changed = threading.Condition()
        self._coverage: Coverage | None = None
        self._layers: dict[int, T] = {}
        self._ready: set[int] = set()
        self._end: FetchEnd | None = None
        self._count = count
        self._work: Future[None] | None = None

    @property
    def end(self) -> FetchEnd | None:
        """How it ended; None while it goes on."""
        self._check_deadline()
        return self._end

    def coverage(self, wait_s: float = 0.0) -> Coverage | None:
        """What the store has, waiting at most `wait_s` seconds and never beyond the deadline; None if nobody knows."""
        left_s = min(wait_s, self._deadline_at_s - self._clock())
        with self._changed:
            self._changed.wait_for(lambda: self._coverage is not None or self._end is not None, max(0.0, left_s))
            found = self._coverage
        self._check_deadline()
        return found

    def ready(self, layer: int) -> bool:
        """Whether all that will come of a layer is there to be taken."""
        with self._changed:
            return layer in self._ready

    def wait_for(self, layer: int, wait_s: float) -> bool:
        """Whether a layer is ready to be taken, waiting at most `wait_s` seconds for it or for the end."""
        with self._changed:
            self._changed.wait_for(lambda: layer in self._ready or self._end is not None, max(0.0, wait_s))
            return layer in self._ready

    def take(self, layer: int, wait_s: float = 0.0) -> T | None:
        """The records of a layer, once; None if they are not ready after `wait_s` seconds or the deadline."""
        left_s = min(wait_s, self._deadline_at_s - self._clock())
        with self._changed:
            self._changed.wait_for(lambda: layer in self._ready or self._end is not None, max(0.0, left_s))
            self._ready.discard(layer)
            taken = self._layers.pop(layer, None)
            if taken is not None:
                self._held.add(-self._size(taken))
            return taken

    def cancel(self) -> None:
        """The request is gone: read no further, and drop what was read."""
        self._finish(FetchEnd.CANCELLED)
        with self._changed:
            self._coverage = None
            self._held.add(-sum(map(self._size, self._layers.values())))
            self._layers.clear()
            self._ready.clear()

    def _check_deadline(self) -> None:
        if self._end is None and self._clock() >= self._deadline_at_s:
            self._finish(FetchEnd.DEADLINE)

    def _finish(self, end: FetchEnd) -> None:
        with self._changed:
            if self._end is not None:
                return
            self._end = end
            self._changed.notify_all()
        self._count(end)
        # Makes room for another one, if no thread has come to it yet.
        if self._work is not None:
            self._work.cancel()

    def _goes_on(self) -> bool:
        self._check_deadline()
        return self._end is None

    def _found(self, coverage: Coverage) -> None:
        with self._changed:
            if self._end is None:
                self._coverage = coverage
                self._changed.notify_all()

    def _came(self, layer: int, records: T) -> None:
        with self._changed:
            if self._end is None:
                self._held.add(self._size(records))
                self._layers[layer] = records
                self._ready.add(layer)
                self._changed.notify_all()


class Fetcher:
    """Starts fetches, on a bounded number of threads, for a bounded number of requests at a time.

    A backend that hangs holds these threads and nothing else: requests end at their deadline, and while all threads
    hang, new ones are refused as `busy` once `in_flight` wait. So are they while requests that wait for their turn hold
    more than `held_bytes`, and those that are being read then end as `busy` with what they have.
    """

    def __init__(
        self,
        store: Store,
        threads: int = 2,
        in_flight: int = 64,
        *,
        held_bytes: int = 512 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clock = clock
        self._held, self._most_held_bytes = _Held(), held_bytes
        self._threads = Threads("crossfill-fetch", threads, in_flight)
        self._failures = SeldomLog(_log, _LOG_EVERY_S, clock)
        self._defects = SeldomLog(_log, _LOG_EVERY_S, clock)

    @overload
    def start(
        self, request_id: str, namespace: Namespace, tokens: Sequence[int], names: Sequence[str], deadline_s: float
    ) -> Fetch[LayerRecords]: ...

    @overload
    def start(
        self,
        request_id: str,
        namespace: Namespace,
        tokens: Sequence[int],
        names: Sequence[str],
        deadline_s: float,
        *,
        prepare: Callable[[LayerRecords], T],
        size: Callable[[T], int],
    ) -> Fetch[T]: ...

    def start(
        self,
        request_id: str,
        namespace: Namespace,
        tokens: Sequence[int],
        names: Sequence[str],
        deadline_s: float,
        *,
        prepare: Callable[[LayerRecords], T] | None = None,
        size: Callable[[T], int] | None = None,
    ) -> Fetch[T] | Fetch[LayerRecords]:
        """Begin to look up a prefix and to read its records of these names; returns at once.

        Layers are read in the order in which `names` mentions them first; `prepare` makes of each layer's records what
        `Fetch.take` gives, on the thread that read them, and `size` tells its bytes. A fetch that cannot be started has
        ended as `busy`.

        Raises:
            ValueError: a name is none that `record_name` gives.
        """
        layers = _by_layer(names)
        fetch: Fetch[Any] = Fetch(
            request_id,
            self._clock() + deadline_s,
            self._clock,
            self._store.metrics.count_fetch,
            self._held,
            size or _bytes_of,
        )
        if not self._is_full:
            fetch._work = self._threads.submit(lambda: self._run(fetch, namespace, tokens, layers, prepare or _as_read))
        if fetch._work is None:
            fetch._finish(FetchEnd.BUSY)
        return fetch

    @property
    def _is_full(self) -> bool:
        return self._held.size_bytes > self._most_held_bytes

    def close(self) -> None:
        """Start nothing more."""
        self._threads.close()

    def _run(
        self,
        fetch: Fetch[T],
        namespace: Namespace,
        tokens: Sequence[int],
        layers: Mapping[int, Sequence[str]],
        prepare: Callable[[LayerRecords], T],
    ) -> None:
        try:
            if not fetch._goes_on():
                return
            coverage = self._store.match(namespace, tokens)
            fetch._found(coverage)
            for layer, names in layers.items():
                if not fetch._goes_on():
                    return
                if self._is_full:
                    fetch._finish(FetchEnd.BUSY)
                    return
                records = self._read(namespace, coverage, names)
                # What came after a flush does not go with what was there before it.
                if records and not self._store.is_current(namespace, coverage):
                    fetch._finish(FetchEnd.FLUSHED)
                    return
                fetch._came(layer, prepare(records))
            fetch._finish(FetchEnd.DONE)
        except StoreError as error:
            self._failures.warn(f"{fetch.request_id}: the store did not answer: {error}")
            fetch._finish(FetchEnd.UNAVAILABLE)
        except BaseException as error:  # noqa: BLE001 - this request must not wait for its deadline, nor others for a thread
            self._defects.warn(f"{fetch.request_id}: a fetch failed: {error!r}")
            fetch._finish(FetchEnd.FAILED)

    def _read(self, namespace: Namespace, coverage: Coverage, names: Sequence[str]) -> LayerRecords:
        wanted = [(index, name) for name in names for index in coverage.pages_with(name)]
        if not wanted:
            return {}
        found = self._store.read(namespace, [(coverage.pages[index], name) for index, name in wanted])
        records: LayerRecords = {}
        for (index, name), record in zip(wanted, found, strict=True):
            if record is not None:
                records.setdefault(name, {})[index] = record
        return records


def _as_read(records: LayerRecords) -> LayerRecords:
    return records


def _bytes_of(records: LayerRecords) -> int:
    return sum(len(record.payload) for of_name in records.values() for record in of_name.values())


def _by_layer(names: Sequence[str]) -> dict[int, list[str]]:
    layers: dict[int, list[str]] = {}
    for name in names:
        layers.setdefault(read_record_name(name).layer, []).append(name)
    return layers
