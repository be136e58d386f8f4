"""A bounded number of threads for calls that may hang."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


class Threads:
    """Runs calls in at most `count` threads; at most `in_flight` calls run or wait.

    The standard pool would wait for a hung call when the process ends, and queues without bound. These are daemons.
    """

    def __init__(self, name: str, count: int, in_flight: int) -> None:
        self._count = count
        self._in_flight_most = in_flight
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = 0
        self._started = 0
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Calls that run or wait."""
        with self._changed:
            return self._running + len(self._waiting)

    def submit(self, call: Callable[[], Result]) -> Future[Result] | None:
        """Run `call` when its turn comes; None if as many are in flight as may be, or after `close`.

        The result can be cancelled while it waits.
        """
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for it
                future.set_exception(error)

        with self._changed:
            if self._closed or self._running + len(self._waiting) >= self._in_flight_most:
                return None
            self._waiting.append(run)
            # A thread that has just been woken and not run yet does not count as free.
            if self._started < min(self._count, self._running + len(self._waiting)):
                self._started += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()
            self._changed.notify()
        future.add_done_callback(lambda ended: self._forget(run) if ended.cancelled() else None)
        return future

    def close(self) -> None:
        """Take no more calls and drop those that wait; what runs is left to end by itself."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _forget(self, run: Callable[[], None]) -> None:
        with self._changed:
            if run in self._waiting:
                self._waiting.remove(run)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                run = self._waiting.popleft()
                self._running += 1
            run()
            with self._changed:
                self._running -= 1
