"""Log lines about what may happen thousands of times a second, at most one in a while."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable


class SeldomLog:
    """Logs the first warning, then at most one every `every_s` seconds, which says how many were left out.

    Safe to use from several threads.
    """

    def __init__(self, log: logging.Logger, every_s: float, clock: Callable[[], float]) -> None:
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self._lock = Lock()
        self._next_s: float | None = None
        self._left_out = 0

    def warn(self, message: str) -> None:
        """Log `message`, or count it."""
        with self._lock:
            now_s = self._clock()
            if self._next_s is not None and now_s < self._next_s:
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
            self._next_s = now_s + self._every_s
        more = f" (and {left_out} more since the last line)" if left_out else ""
        self._log.warning("%s%s", message, more)
