"""Whether a store's files may be used now: not while they are replaced, not after they were closed, and not by a child.

What fails within is told in our words.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_store.backends.lmdb_environment import FAILURES, explain
from cache_store.errors import ForeignProcessError, StoreUnavailableError


class Gate:
    """Counts those within a `with` of it, so that files are closed under nobody.

    Args:
        path: the store, for messages.
    """

    # Plain methods, as every lookup passes here: a generator's context manager costs as much as reading two pages.

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inside = 0
        self._shut = self._closed = False
        self._pid = os.getpid()

    def __enter__(self) -> None:
        """Be within.

        Raises:
            ForeignProcessError: this process is a child of the one that opened the store.
            StoreUnavailableError: `closed`, or `refused` while the files are replaced.
        """
        if os.getpid() != self._pid:
            self.check_process()
        with self._lock:
            if self._shut or self._closed:
                self._check()
            self._inside += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Be out.

        Raises:
            StoreUnavailableError: in place of one of `FAILURES`.
        """
        with self._lock:
            self._inside -= 1
            if self._shut or self._closed:
                self._changed.notify_all()
        if error is not None and isinstance(error, FAILURES):
            raise explain(self._path, error) from error

    def is_own(self) -> bool:
        """Whether this process opened the store."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raises ForeignProcessError in a child of the process that opened the store."""
        if not self.is_own():
            message = f"the store {self._path} was opened before this process was forked; open it again in the child"
            raise ForeignProcessError(message)

    @contextmanager
    def shut(self, deadline_s: float) -> Iterator[None]:
        """Be alone.

        Raises:
            StoreUnavailableError: as for being within, or `timeout` if others stay within.
        """
        with self._changed:
            self._check()
            self._shut = True
            try:
                if not self._changed.wait_for(lambda: not self._inside, deadline_s):
                    raise StoreUnavailableError(f"{self._path} is in use", "timeout")
            except BaseException:
                self._shut = False
                raise
        try:
            yield
        finally:
            with self._changed:
                self._shut = False

    def close(self, deadline_s: float) -> bool:
        """Let nobody in any more and wait for those within; whether it was open and is empty now."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            return self._changed.wait_for(lambda: not self._inside, deadline_s)

    def _check(self) -> None:
        if self._closed:
            raise StoreUnavailableError(f"the store {self._path} was closed; open it again", "closed")
        if self._shut:
            raise StoreUnavailableError(f"{self._path} is being compacted or opened again", "refused")
