"""A backend that is opened when it is first asked for, and again, after a pause, if it could not be.

Whoever works on without a store must start without one too: Redis may come up later than its clients, and a folder may
be of another version until somebody deletes it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from cache_store.errors import ForeignProcessError, StoreError, StoreUnavailableError, StoreUrlError, StoreVersionError
from cache_store.seldom import SeldomLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache_store.backends.protocol import Backend

_log = logging.getLogger("crossfill.store")

_LOG_EVERY_S = 60.0
_REASONS = {StoreUrlError: "url", StoreVersionError: "version", ForeignProcessError: "foreign"}


def reason_of(error: StoreError) -> str:
    """Why a store cannot be opened, as a label of metrics."""
    return error.reason if isinstance(error, StoreUnavailableError) else _REASONS.get(type(error), "other")


class Later:
    """Opens a backend at the first `backend()`. Safe to use from several threads.

    Args:
        open_backend: opens it, or raises StoreError.
        pause_s: after a failure nothing is tried for so long, and every call fails at once.
    """

    def __init__(
        self, open_backend: Callable[[], Backend], *, pause_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._open = open_backend
        self._pause_s = pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self._fault = StoreUnavailableError("the store is being opened", "opening")
        self._again_s = float("-inf")
        self._closed = False
        self._failures = SeldomLog(_log, _LOG_EVERY_S, clock)

    def backend(self) -> Backend:
        """The backend, opened if need be; while one thread opens it the others fail at once.

        Raises:
            StoreUnavailableError: it could not be opened, whatever the fault.
        """
        if self._backend is not None:
            return self._backend
        if not self._lock.acquire(blocking=False):
            raise self._told()
        try:
            if self._backend is None:
                self._backend = self._opened()
            return self._backend
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close it if it is open, and open it no more."""
        with self._lock:
            self._closed = True
            if self._backend is not None:
                self._backend.close()

    def _opened(self) -> Backend:
        if self._closed:
            raise StoreUnavailableError("this store was closed; open another", "closed")
        if self._clock() < self._again_s:
            raise self._told()
        try:
            return self._open()
        except StoreError as error:
            self._again_s = self._clock() + self._pause_s
            self._fault = StoreUnavailableError(str(error), reason_of(error))
            self._failures.warn(f"the store cannot be opened: {error}")
            raise self._told() from error

    def _told(self) -> StoreUnavailableError:
        """The fault; a new exception each time, as one that is raised again and again keeps every frame."""
        return StoreUnavailableError(str(self._fault), self._fault.reason)
