"""The store on an event loop: calls run in threads, within a deadline."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cache_store.client.threads import Threads
from cache_store.errors import StoreUnavailableError
from cache_store.metrics import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cache_store.backends.protocol import BackendStats, Reclaimed
    from cache_store.coverage import Coverage
    from cache_store.namespace import Namespace
    from cache_store.store import Store

Result = TypeVar("Result")


class AsyncStore:
    """What the router asks of a store. Every call ends within the deadline.

    A call that the backend hangs in keeps its thread until it returns, so threads and calls in flight are bounded; what
    goes beyond is refused at once, with the reason `busy`.

    Raises `StoreUnavailableError` from every method, with the reasons of the backend, `timeout` or `busy`; those that
    the store has not counted, because it was not asked or has not answered, are counted here.
    """

    def __init__(self, store: Store, *, deadline_s: float, threads: int = 2, in_flight: int = 64) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._threads = Threads("crossfill-store", threads, in_flight)

    async def match(self, namespace: Namespace, tokens: Sequence[int]) -> Coverage:
        """As `Store.match`."""
        return await self._run(Operation.MATCH, partial(self._store.match, namespace, tokens))

    async def stats(self) -> BackendStats:
        """As `Store.stats`."""
        return await self._run(Operation.STATS, self._store.stats)

    async def flush(
        self, *, tenant: str | None = None, model: str | None = None, revision: str | None = None
    ) -> Reclaimed:
        """As `Store.flush`. After a timeout the flush may still come to be."""
        flush = partial(self._store.flush, tenant=tenant, model=model, revision=revision)
        return await self._run(Operation.FLUSH, flush)

    def close(self) -> None:
        """Take no more calls."""
        self._threads.close()

    async def _run(self, operation: Operation, call: Callable[[], Result]) -> Result:
        work = self._threads.submit(call)
        if work is None:
            self._store.metrics.count_unavailable(operation, "busy")
            raise StoreUnavailableError("too many calls of the store are in flight", "busy")
        try:
            # A call that still waits for a thread when the time is over never runs.
            return await asyncio.wait_for(asyncio.wrap_future(work), self._deadline_s)
        except TimeoutError:
            self._store.metrics.count_unavailable(operation, "timeout")
            raise StoreUnavailableError(f"the store did not answer within {self._deadline_s:g} s", "timeout") from None
