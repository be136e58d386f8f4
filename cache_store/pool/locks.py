"""Locks between processes that the kernel lets go of when their holder dies, however it dies.

They are open file description locks on single bytes of the pool's file (fcntl(2)): one byte is the mutex of the table,
and one byte is the seat of each process that has the pool open. Whether a process lives is whether its seat is locked,
which holds across PID namespaces and cannot be fooled by a process id that is used again.
"""

import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO

from cache_store.errors import StoreUnavailableError

SEATS = 256
# l_type, l_whence, l_start, l_len, l_pid of `struct flock` on 64-bit Linux
_FLOCK = struct.Struct("hhqqi4x")
_MUTEX, _FIRST_SEAT = 0, 1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


class SegmentLocks:
    """The locks of one open pool. Safe to use from several threads; closed in a child that is forked.

    Args:
        file: the pool's file, opened for this object alone: whoever shares the description shares the locks.
        deadline_s: longest wait for the mutex.
    """

    def __init__(self, file: FileIO, deadline_s: float) -> None:
        self._file, self._deadline_s = file, deadline_s
        # Threads share the description, so it does not keep them apart.
        self._threads = threading.Lock()
        # A child would share the description too, and keep the locks of its dead parent.
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: method() if (method := forget()) else None)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Be the only one to use the table.

        Raises:
            StoreUnavailableError: `closed`, or `timeout` if others had it until the deadline.
        """
        self._demand_open()
        deadline = time.monotonic() + self._deadline_s
        if not self._threads.acquire(timeout=self._deadline_s):
            raise self._timeout()
        try:
            self._wait(deadline)
            yield
        finally:
            # Also when interrupted between lock and block: letting go of what is not held does nothing.
            if not self._file.closed:
                self._set(fcntl.F_UNLCK, _MUTEX)
            self._threads.release()

    def take_seat(self) -> int:
        """The number of a free seat, which this process has from now on. The caller has the mutex.

        Raises:
            StoreUnavailableError: `full`, all seats are taken.
        """
        for seat in range(SEATS):
            if self._set(fcntl.F_WRLCK, _FIRST_SEAT + seat):
                return seat
        raise StoreUnavailableError(f"{SEATS} processes have the block pool open; no more can", "full")

    def is_taken(self, seat: int) -> bool:
        """Whether another process, or another pool object of this one, has this seat."""
        return self._conflicts(_FIRST_SEAT + seat, 1)

    def is_shared(self) -> bool:
        """Whether any seat is taken by another."""
        return self._conflicts(_FIRST_SEAT, SEATS)

    def count_taken(self) -> int:
        """How many seats are taken by others."""
        return sum(self.is_taken(seat) for seat in range(SEATS)) if self.is_shared() else 0

    def close(self) -> None:
        """Let go of all locks, once no thread of this process is at the table. Not to be called within `exclusive`."""
        with self._threads:
            self._file.close()

    def _forget(self) -> None:
        # A thread that was at the table is not there in the child, so there is nobody to wait for.
        self._file.close()

    def _demand_open(self) -> None:
        if self._file.closed:
            raise StoreUnavailableError("the block pool was closed, or opened before a fork; open it again", "closed")

    def _wait(self, deadline: float) -> None:
        pause_s = _FIRST_PAUSE_S
        self._demand_open()
        while not self._set(fcntl.F_WRLCK, _MUTEX):
            if time.monotonic() >= deadline:
                raise self._timeout()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _timeout(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"the block pool's table was locked for {self._deadline_s:g} s", "timeout")

    def _set(self, kind: int, byte: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreUnavailableError(f"cannot lock the block pool's file: {error.strerror}", "io") from error
        return True

    def _conflicts(self, start: int, length: int) -> bool:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        answer: bytes = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
