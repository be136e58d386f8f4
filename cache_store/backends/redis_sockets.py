"""Connections of redis-py that keep a deadline for a whole operation, however slowly the server's bytes drip in."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.connection import Connection, SSLConnection

MAX_REPLY_BYTES = 1 << 30
"""More than this for one operation is no answer of a store (a page has some KB, a lookup some thousand pages)."""


class ReplyTooLargeError(ConnectionError):
    """The server sent more than a store ever does."""


class Deadline:
    """When the operation that runs in this thread must be over, and how much it has received."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = threading.local()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """The time for what is done inside; within another one, the earlier counts."""
        before: float | None = getattr(self._thread, "end", None)
        if before is None:
            self.answered = False
        end = self._clock() + seconds
        self._thread.end = end if before is None else min(end, before)
        self._thread.received = 0
        try:
            yield
        finally:
            self._thread.end = before

    @property
    def answered(self) -> bool:
        """Whether the server has answered something since the operation of this thread began."""
        return bool(getattr(self._thread, "answered", False))

    @answered.setter
    def answered(self, value: bool) -> None:
        self._thread.answered = value

    def left_s(self) -> float:
        """Seconds that are left; no less than a millisecond, as 0 would mean not to block at all."""
        end: float | None = getattr(self._thread, "end", None)
        return 1.0 if end is None else max(end - self._clock(), 0.001)

    def over(self) -> bool:
        """Whether there is none left."""
        end: float | None = getattr(self._thread, "end", None)
        return end is not None and self._clock() >= end

    def receive(self, size_bytes: int) -> None:
        """Count what came in.

        Raises:
            ReplyTooLargeError: it is too much.
        """
        self._thread.received = getattr(self._thread, "received", 0) + size_bytes
        if self._thread.received > MAX_REPLY_BYTES:
            raise ReplyTooLargeError(f"more than {MAX_REPLY_BYTES} bytes")


class BoundedSocket:
    """A socket whose every wait ends with the operation's deadline, instead of having its own each time."""

    def __init__(self, inner: socket.socket, deadline: Deadline) -> None:
        self._inner, self._deadline = inner, deadline
        self._blocking = True

    def settimeout(self, seconds: float | None) -> None:
        """Only whether it blocks is heeded."""
        self._blocking = seconds != 0
        self._inner.settimeout(seconds)

    def recv(self, size: int) -> bytes:
        """Receive at most `size` bytes."""
        self._bound()
        data = self._inner.recv(size)
        self._deadline.receive(len(data))
        return data

    def sendall(self, data: bytes) -> None:
        """Send all of it."""
        self._bound()
        self._inner.sendall(data)

    def _bound(self) -> None:
        if self._blocking:
            if self._deadline.over():
                raise TimeoutError("the deadline is over")
            self._inner.settimeout(self._deadline.left_s())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def connection_class(deadline: Deadline, *, tls: bool) -> type[Connection]:
    """A class of connections for redis-py's pool that keep `deadline`, for connecting too."""

    class Plain(Connection):
        def _connect(self) -> BoundedSocket:
            return _connect_within(self, super()._connect, deadline)

    class Encrypted(SSLConnection):
        def _connect(self) -> BoundedSocket:
            return _connect_within(self, super()._connect, deadline)

    return Encrypted if tls else Plain


def _connect_within(connection: Any, connect: Callable[[], socket.socket], deadline: Deadline) -> BoundedSocket:
    connection.socket_connect_timeout = connection.socket_timeout = deadline.left_s()
    return BoundedSocket(connect(), deadline)
