"""The shared store as the router administers it: opened when it is first asked, and again after it could not be.

The router serves without it. Nothing here blocks the event loop: opening and closing run in a thread of their own,
calls in those of `AsyncStore`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TypeVar

from cache_store.client.aio import AsyncStore
from cache_store.client.threads import Threads
from cache_store.config import is_unmade
from cache_store.errors import StoreError, StoreUnavailableError
from cache_store.later import reason_of
from cache_store.metrics import Operation, StoreMetrics
from cache_store.seldom import SeldomLog
from cache_store.store import open_store
from router.errors import StoreFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType
    from typing import Any

    from prometheus_client import CollectorRegistry

    from cache_store.backends.protocol import BackendStats, Reclaimed
    from cache_store.config import StoreSettings
    from cache_store.store import Store

Result = TypeVar("Result")

_log = logging.getLogger("crossfill.store")

_PAUSE_S = 1.0
_LOG_EVERY_S = 60.0
# A backend gives up at its deadline and says why; these many deadlines are for one that hangs.
_PATIENCE = 2.0
# Reasons for which a change was certainly not made.
_NOT_BEGUN = frozenset({"busy", "refused", "full"})


class SharedStore:
    """The store of `settings`, open from the first call on until the context is left.

    It makes no embedded store: that is for those who have something to put into it. Every method raises
    StoreFailedError, which says why, within four times `settings.deadline_s`; a store that could not be opened is tried
    again by the first call after `pause_s`, until which calls fail at once.
    """

    def __init__(
        self,
        settings: StoreSettings,
        registry: CollectorRegistry,
        *,
        pause_s: float = _PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._metrics = StoreMetrics(registry)
        self._pause_s = pause_s
        self._clock = clock
        self._patience_s = _PATIENCE * settings.deadline_s
        self._failures = SeldomLog(_log, _LOG_EVERY_S, clock)
        # One thread, so that what an opening left is always closed after it.
        self._threads = Threads("crossfill-store-open", 1, 2)
        self._store: Store | None = None
        self._client: AsyncStore | None = None
        self._opening: asyncio.Task[None] | None = None
        self._fault: StoreError | None = None
        self._again_s = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            self._client.close()
        closing = self._threads.submit(self._close_now)
        if closing is not None:
            # What hangs is left to the end of the process.
            with suppress(TimeoutError, StoreError):
                await asyncio.wait_for(asyncio.wrap_future(closing), self._patience_s)
        self._threads.close()

    async def stats(self) -> BackendStats:
        """What the store holds; sets the gauges too."""
        return await self._ask(Operation.STATS, lambda client: client.stats())

    async def flush(
        self, *, tenant: str | None = None, model: str | None = None, revision: str | None = None
    ) -> Reclaimed:
        """Make everything that fits all that is given a miss at once, for every process; what that was.

        If it is not known whether that came to be, the error says so; a flush may be repeated.
        """
        return await self._ask(
            Operation.FLUSH,
            lambda client: client.flush(tenant=tenant, model=model, revision=revision),
            if_unknown="; it is not known whether the flush was done, ask again",
        )

    async def _ask(
        self, operation: Operation, call: Callable[[AsyncStore], Coroutine[Any, Any, Result]], if_unknown: str = ""
    ) -> Result:
        client = await self._opened()
        try:
            return await call(client)
        except StoreUnavailableError as error:
            raise self._told("did not answer", error, "" if error.reason in _NOT_BEGUN else if_unknown) from error
        except StoreError as error:
            # Another version of Crossfill has taken the store over meanwhile.
            self._metrics.count_unavailable(operation, reason_of(error))
            raise self._told("cannot be used", error) from error

    async def _opened(self) -> AsyncStore:
        if self._client is None and self._fault is not None and self._clock() < self._again_s:
            raise self._told("cannot be opened", self._fault)
        if self._client is None:
            opening = self._opening = self._opening or asyncio.create_task(self._open())
            # Not ended by a caller whose time is over: the next one finds the store open.
            done, _ = await asyncio.wait({opening}, timeout=self._patience_s)
            if not done:
                self._metrics.count_unavailable(Operation.OPEN, "timeout")
                slow = StoreUnavailableError(f"it is still being opened after {self._patience_s:g} s", "timeout")
                raise self._told("cannot be used yet", slow)
            opening.result()
        if self._client is None:
            assert self._fault is not None, "an opening ends with a store or a fault"
            raise self._told("cannot be opened", self._fault)
        return self._client

    async def _open(self) -> None:
        try:
            work = self._threads.submit(self._open_now)
            if work is None:
                raise StoreUnavailableError("the router is shutting down", "closed")
            store = await asyncio.wrap_future(work)
        except StoreError as error:
            self._fault, self._again_s = error, self._clock() + self._pause_s
        else:
            self._fault, self._client = None, AsyncStore(store, deadline_s=self._patience_s)
            _log.info("opened %s", self._settings.shown_url)
        finally:
            self._opening = None

    def _open_now(self) -> Store:
        """In the thread: open it, and count it if that fails."""
        with self._metrics.timed(Operation.OPEN):
            if is_unmade(self._settings.url):
                # An empty one, made here, would be flushed with success while the workers use another.
                told = f"there is none yet at {self._settings.shown_url}; the first worker that uses it makes it"
                raise StoreUnavailableError(told, "absent")
            try:
                self._store = open_store(self._settings, self._metrics)
            except StoreUnavailableError:
                raise
            except StoreError as error:
                # Counted as well, under the kind of fault.
                raise StoreUnavailableError(str(error), reason_of(error)) from error
        return self._store

    def _close_now(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _told(self, what: str, error: StoreError, more: str = "") -> StoreFailedError:
        told = f"The store {what}: {error}{more}."
        self._failures.warn(told)
        return StoreFailedError(told)
