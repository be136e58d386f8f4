"""A circuit breaker: after several calls that got no answer, the next ones do not wait for one."""

import threading
import time
from collections.abc import Callable
from enum import StrEnum


class BreakerState(StrEnum):
    """What a breaker does with a call; a metric's label."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts calls without answer in a row, and keeps others from waiting while the server is taken to be hung.

    Closed, it admits all. Open, it admits none until `delay_s` has passed; then half open: one call at a time is
    admitted as a probe, and its outcome closes or opens it again. Safe to use from several threads.

    Args:
        failures: in a row, that open it.
        delay_s: between opening and the next probe, and after which a probe that never reported is given up.
        clock: monotonic seconds.
    """

    def __init__(self, *, failures: int = 3, delay_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._delay_s, self._clock = failures, delay_s, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._probe_at = 0.0

    @property
    def state(self) -> BreakerState:
        """What it does now."""
        with self._lock:
            return self._state()

    def _state(self) -> BreakerState:
        if self._failures < self._limit:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._clock() >= self._probe_at else BreakerState.OPEN

    def admit(self) -> bool:
        """Whether a call may be made. One that was admitted reports with `succeed` or `fail`."""
        with self._lock:
            state = self._state()
            if state is BreakerState.HALF_OPEN:
                # Others are kept out until this probe reports, or for as long again if it never does.
                self._probe_at = self._clock() + self._delay_s
            return state is not BreakerState.OPEN

    def succeed(self) -> None:
        """The server answered, be it with an error."""
        with self._lock:
            self._failures = 0

    def fail(self) -> None:
        """The call was given up without an answer."""
        with self._lock:
            self._failures += 1
            self._probe_at = self._clock() + self._delay_s
