"""The store on an event loop: calls run in threads, within a deadline."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cache_store.client.threads import Threads
from cache_store.errors import StoreUnavailableError

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

    Raises `StoreUnavailableError` from every method, with the reasons of the backend, `timeout` or `busy`.
    """

    def __init__(self, store: Store, *, deadline_s: float, threads: int = 2, in_flight: int = 64) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._threads = Threads("crossfill-store", threads, in_flight)

    async def match(self, namespace: Namespace, tokens: Sequence[int]) -> Coverage:
        """As `Store.match`."""
        return await self._run(partial(self._store.match, namespace, tokens))

    async def stats(self) -> BackendStats:
        """As `Store.stats`."""
        return await self._run(self._store.stats)

    async def flush(
        self, *, tenant: str | None = None, model: str | None = None, revision: str | None = None
    ) -> Reclaimed:
        """As `Store.flush`. After a timeout the flush may still come to be."""
        return await self._run(partial(self._store.flush, tenant=tenant, model=model, revision=revision))

    def close(self) -> None:
        """Take no more calls."""
        self._threads.close()

    async def _run(self, call: Callable[[], Result]) -> Result:
        work = self._threads.submit(call)
        if work is None:
            raise StoreUnavailableError("too many calls of the store are in flight", "busy")
        try:
            # A call that still waits for a thread when the time is over never runs.
            return await asyncio.wait_for(asyncio.wrap_future(work), self._deadline_s)
        except TimeoutError:
            raise StoreUnavailableError(f"the store did not answer within {self._deadline_s:g} s", "timeout") from None
