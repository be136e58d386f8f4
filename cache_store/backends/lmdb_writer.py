"""The one thread that writes to an LMDB store.

LMDB waits without end for its writers' lock, and a disk may take as long as it likes. So changes are made in a thread
of their own, and the caller waits no longer than the deadline. A change that was given up while it waited for the lock
is not made; one that was given up later is undone, unless it was already being written.
"""

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cache_store.errors import StoreUnavailableError

if TYPE_CHECKING:
    import lmdb

T = TypeVar("T")


class GaveUpError(Exception):
    """Within the thread: whoever asked for the change no longer waits for it."""


class Begin(Protocol):
    """Starts a transaction that writes; may block."""

    def __call__(self) -> "lmdb.Transaction[memoryview]":
        """The transaction."""


class _Job:
    def __init__(self, change: Callable[["lmdb.Transaction[memoryview]"], Any]) -> None:
        self.change = change
        self.done = threading.Event()
        self.given_up = False
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
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lmdb-writer", daemon=True)
        self._thread.start()

    def change(self, change: Callable[["lmdb.Transaction[memoryview]"], T], deadline_s: float) -> T:
        """Make a change: all of it, or nothing.

        Raises:
            StoreUnavailableError: not within the deadline.
        """
        job = _Job(change)
        self._jobs.put(job)
        if not job.done.wait(deadline_s):
            job.given_up = True
            # It may have ended just now.
            if not job.done.is_set():
                message = (
                    f"no change within {deadline_s:g} s: another process holds the writers' lock, or the disk hangs"
                )
                raise StoreUnavailableError(message, "timeout")
        if job.error:
            raise job.error
        result: T = job.result
        return result

    def post(self, change: Callable[["lmdb.Transaction[memoryview]"], object]) -> None:
        """Make a change some time; nobody waits for it or hears of its errors."""
        self._jobs.put(_Job(change))

    def stop(self, deadline_s: float) -> bool:
        """End after what was asked for; whether it has ended."""
        self._jobs.put(None)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                self._idle()
                continue
            if job is None:
                return
            if not job.given_up:
                self._make(job)
            job.done.set()
            # An error holds its frames, and those the transaction and the buffers in it.
            del job

    def _make(self, job: _Job) -> None:
        try:
            with self._begin() as txn:
                self._check(job)
                job.result = job.change(txn)
                # Leaving with an error undoes all.
                self._check(job)
        except Exception as error:  # noqa: BLE001 - handed to the thread that asked
            job.error = error

    @staticmethod
    def _check(job: _Job) -> None:
        if job.given_up:
            raise GaveUpError
