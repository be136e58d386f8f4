"""The folder of an LMDB store, and who has it open.

LMDB judges by process id whether a reader still lives, which means nothing to a process of another PID namespace: it
would take live readers for dead ones and overwrite the pages that they read. So every process holds a lock on a file
named after its PID namespace. The kernel drops it when the process ends, however it ends, and it is seen from every
namespace of the machine.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cache_store.errors import ForeignProcessError, StoreUnavailableError

_POLL_S = 0.01


def read_pid_namespace() -> int:
    """Number of this process's PID namespace; 0 where the system has none."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


class Folder:
    """A store's folder, held open.

    Args:
        path: the folder; made if it is not there.
        pid_namespace: of this process.
        deadline_s: longest to wait for another process that is opening it.

    Raises:
        ForeignProcessError: processes of another PID namespace have it open.
        StoreUnavailableError: it cannot be made, or another process keeps it to itself.
    """

    def __init__(self, path: Path, *, pid_namespace: int, deadline_s: float) -> None:
        self.path = path
        self._deadline_s = deadline_s
        self._users = path / f"users-{pid_namespace}"
        try:
            # What it holds is of all tenants: this user alone reads it.
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailableError(f"cannot make the store's folder {path}: {error.strerror}", "io") from None
        with self.guard():
            for other in path.glob("users-*"):
                if other != self._users:
                    self._refuse_foreigners(other)
            self._fd = self._lock(self._users, fcntl.LOCK_SH)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Keep others from opening the store meanwhile."""
        fd = self._lock(self.path / "guard", fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(fd)

    def is_alone(self) -> bool:
        """Whether no other process has the store open; only while guarded."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # A failed change of a lock may have lost it.
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True

    def close(self) -> None:
        """Let go, for a child of a fork as well, which shares the lock and has no use for it."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)

    def _refuse_foreigners(self, users: Path) -> None:
        fd = self._open(users)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ForeignProcessError(
                f"the store {self.path} is open in another PID namespace (another container), where LMDB's locks do"
                " not reach: start both with one PID namespace, or share a Redis store instead"
            ) from None
        else:
            # They are gone; a number may be given to another namespace later.
            with suppress(FileNotFoundError):
                users.unlink()
        finally:
            os.close(fd)

    def _lock(self, path: Path, kind: int) -> int:
        fd = self._open(path)
        ends = time.monotonic() + self._deadline_s
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > ends:
                    os.close(fd)
                    raise StoreUnavailableError(f"another process keeps {path} locked", "timeout") from None
                time.sleep(_POLL_S)
            else:
                return fd

    @staticmethod
    def _open(path: Path) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            reason = "full" if error.errno in {28, 122} else "io"
            raise StoreUnavailableError(f"cannot open {path}: {error.strerror}", reason) from None
