"""Ports for workers, taken so that two programs on one machine never hand out the same one."""

import fcntl
import os
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from crossfill.errors import StartError


class Ports:
    """Hands out free loopback ports, counting up from `first`, and keeps them reserved while the context is open.

    A worker binds its port only some twenty seconds after it was chosen; until then the reservation is a lock on a file
    beside other temporary files, which the kernel releases when this process ends.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = first
        self._held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def take(self) -> int:
        """The next port that nobody uses or has reserved.

        Raises:
            StartError: there is none.
        """
        for port in range(self._next, 65536):
            if self._reserve(port) and _is_free(port):
                self._next = port + 1
                return port
        raise StartError(f"no free port from {self._first} up for a worker; set first_worker_port")

    def _reserve(self, port: int) -> bool:
        try:
            lock = os.open(Path(tempfile.gettempdir()) / f"crossfill-port-{port}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:
            # Another user's reservation, or what is left of one.
            return False
        self._held.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
