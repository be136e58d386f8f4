"""A time limit for waits that come by the thousand: moving it costs nothing."""

from __future__ import annotations

import asyncio
from math import inf


class Alarm:
    """Ends waits of the task that makes it.

    `asyncio.timeout` makes and cancels a timer for each wait, and a stream waits for every chunk. Here one timer
    stays, looks when it rings how far the limit has moved meanwhile, and is set again. Around each wait::

        alarm.set(due_s)
        try:
            await something
        except asyncio.CancelledError:
            if not alarm.has_rung():
                raise
        finally:
            alarm.unset()
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "made in the task that waits"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_s = inf
        self._due_s = inf
        self._is_set = False
        self._rang = False

    def set(self, due_s: float) -> None:
        """Cancel the task at `due_s` of the loop's clock, unless `unset` comes first."""
        self._due_s = due_s
        self._is_set = True
        if due_s < self._rings_s:
            self._start(due_s)

    def has_rung(self) -> bool:
        """Whether the cancellation that was just caught is this alarm's, which it then takes back.

        If somebody else has cancelled the task too it is not, and must go on.
        """
        return self._rang and self._task.uncancel() == 0

    def unset(self) -> None:
        """The wait is over."""
        self._is_set = self._rang = False

    def close(self) -> None:
        """There will be no further wait."""
        if self._timer is not None:
            self._timer.cancel()

    def _start(self, rings_s: float) -> None:
        self.close()
        self._rings_s = rings_s
        self._timer = self._loop.call_at(rings_s, self._ring)

    def _ring(self) -> None:
        self._timer, self._rings_s = None, inf
        if not self._is_set:
            return  # The next wait starts it.
        if self._loop.time() < self._due_s:
            self._start(self._due_s)
            return
        self._rang = True
        self._task.cancel()
