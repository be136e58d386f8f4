"""The one thread that writes to an LMDB store.

LMDB waits without end for its writers' lock, and a disk may take as long as it likes. So changes are made in a thread
of their own, and the caller waits no longer than the deadline. A change that was given up while it waited for the lock
is not made, and nothing of it is kept. One that was given up later is undone, unless it was already being written or
is one that lasts.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cache_store.errors import StoreUnavailableError

if TYPE_CHECKING:
    import lmdb

T = TypeVar("T")

_GRACE_S = 1.0
"""Longest that a thread is waited for which waits for the lock on behalf of nobody."""


class GaveUpError(Exception):
    """Within the thread: whoever asked for the change no longer waits for it."""


class Begin(Protocol):
    """Starts a transaction that writes; may block."""

    def __call__(self) -> "lmdb.Transaction[memoryview]":
        """The transaction."""


class _Job:
    def __init__(self, change: Callable[["lmdb.Transaction[memoryview]"], Any], *, lasting: bool = False) -> None:
        self.change, self.lasting = change, lasting
        self.done = threading.Event()
        self.begun = self.given_up = False
        self.result: Any = None
        self.error: BaseException | None = None


class Writer:
    """Makes changes one after the other.

    Args:
        begin: starts a transaction that writes.
        idle: called whenever nothing was asked for `idle_s`.
        idle_s: how long.
    """

    def __init__(self, begin: Begin, idle: Callable[[], None], idle_s: float) -> None:
        self._begin, self._idle, self._idle_s = begin, idle, idle_s
        self._asked = threading.Condition()
        self._jobs: deque[_Job | None] = deque()
        self._current: _Job | None = None
        self._thread = threading.Thread(target=self._run, name="lmdb-writer", daemon=True)
        self._thread.start()

    def change(
        self, change: Callable[["lmdb.Transaction[memoryview]"], T], deadline_s: float, *, lasting: bool = False
    ) -> T:
        """Make a change: all of it, or nothing. With `lasting`, once begun it is made, however long it takes.

        Raises:
            StoreUnavailableError: not within the deadline.
        """
        job = _Job(change, lasting=lasting)
        self._put(job)
        try:
            job.done.wait(deadline_s)
        finally:
            # Interrupted or late.
            missing = self._give_up(job)
        if missing:
            raise StoreUnavailableError(f"no change within {deadline_s:g} s: {missing}", "timeout")
        if job.error:
            raise job.error
        result: T = job.result
        return result

    def post(self, change: Callable[["lmdb.Transaction[memoryview]"], object]) -> None:
        """Make a change some time; nobody waits for it or hears of its errors."""
        self._put(_Job(change))

    def stop(self, deadline_s: float) -> bool:
        """End after what was asked for; whether it has ended."""
        self._put(None)
        current = self._current
        if current and current.given_up and not current.begun:
            # Whoever asked has waited for the lock already.
            deadline_s = min(deadline_s, _GRACE_S)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _put(self, job: _Job | None) -> None:
        with self._asked:
            self._jobs.append(job)
            self._asked.notify()

    def _give_up(self, job: _Job) -> str:
        """Wait no longer; what the job lacks, nothing if it is done."""
        with self._asked:
            if job.done.is_set():
                return ""
            if job.begun and job.lasting:
                return "it is being made, and will hold if this process goes on"
            job.given_up = True
            # It may hold many pages, and wait for the lock as long as another process likes.
            del job.change
            with suppress(ValueError):
                self._jobs.remove(job)
            return "it takes longer" if job.begun else "another process holds the writers' lock, or the disk hangs"

    def _run(self) -> None:
        while True:
            with self._asked:
                waiting = self._asked.wait_for(lambda: bool(self._jobs), self._idle_s)
                if waiting:
                    job = self._current = self._jobs.popleft()
            if not waiting:
                self._idle()
                continue
            if job is None:
                return
            self._make(job)
            self._current = None
            job.done.set()
            # An error holds its frames, and those the transaction and the buffers in it.
            del job

    def _make(self, job: _Job) -> None:
        try:
            with self._begin() as txn:
                with self._asked:
                    self._check(job)
                    job.begun, change = True, job.change
                job.result = change(txn)
                if not job.lasting:
                    # Leaving with an error undoes all.
                    self._check(job)
        except Exception as error:  # noqa: BLE001 - handed to the thread that asked
            job.error = error

    @staticmethod
    def _check(job: _Job) -> None:
        if job.given_up:
            raise GaveUpError
