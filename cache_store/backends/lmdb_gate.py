"""Whether a store's files may be used now: not while they are replaced, and not after they were closed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_store.errors import StoreUnavailableError


class Gate:
    """Counts those within, so that files are closed under nobody.

    Args:
        path: the store, for messages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = self._closed = False

    @contextmanager
    def use(self) -> Iterator[None]:
        """Be within.

        Raises:
            StoreUnavailableError: `closed`, or `refused` while the files are replaced.
        """
        with self._changed:
            self._check()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def shut(self, deadline_s: float) -> Iterator[None]:
        """Be alone.

        Raises:
            StoreUnavailableError: as for `use`, or `timeout` if others stay within.
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
            raise StoreUnavailableError(f"{self._path} is being compacted", "refused")
