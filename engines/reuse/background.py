"""Work that a computation hands to a thread of its own, bounded by bytes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Something that takes memory until it is done."""

    @property
    def size_bytes(self) -> int:
        """How much."""


T = TypeVar("T", bound=Sized)


class Background(ABC, Generic[T]):
    """A queue and the thread that works it off, one piece after the other; it starts at once.

    Args:
        name: of the thread.
        most_bytes: of pieces that wait or are worked on.
    """

    def __init__(self, name: str, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._queue: deque[T] = deque()
        self._held_bytes = 0
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @abstractmethod
    def work(self, piece: T, /) -> None:
        """Do what is to be done with a piece. Raises nothing, as the thread serves all requests."""

    def offer(self, piece: T, /) -> bool:
        """Work on this soon; whether there is room for it. Never waits."""
        with self._changed:
            fits = not self._closed and self._held_bytes + piece.size_bytes <= self._most_bytes
            if fits:
                self._queue.append(piece)
                self._held_bytes += piece.size_bytes
                self._changed.notify_all()
        return fits

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was offered is done; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held_bytes and not self._queue, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Take nothing more; what waits is done if that takes no longer than `timeout_s` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.drain(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                piece = self._queue.popleft()
            try:
                self.work(piece)
            finally:
                with self._changed:
                    self._held_bytes -= piece.size_bytes
                    self._changed.notify_all()
