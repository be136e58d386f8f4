"""A time limit for waits that come by the thousand: moving it costs nothing."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable

Result = TypeVar("Result")


class Alarm:
    """Ends waits of the task that makes it.

    `asyncio.timeout` makes and cancels a timer for each wait, and a stream waits for every chunk. Here one timer
    stays, looks when it rings how far the limit has moved meanwhile, and is set again.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "made in the task that waits"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_s = inf
        self._due_s = inf
        self._is_waiting = False
        self._rang = False

    async def wait(self, awaitable: Awaitable[Result], due_s: float) -> Result:
        """What `awaitable` gives, which is cancelled at `due_s` of the loop's clock. Raises TimeoutError then."""
        self._due_s = due_s
        if due_s < self._rings_s:
            self._set(due_s)
        self._is_waiting = True
        try:
            return await awaitable
        except asyncio.CancelledError as error:
            # A cancellation by somebody else goes on as it is.
            if self._rang and self._task.uncancel() == 0:
                raise TimeoutError from error
            raise
        finally:
            self._is_waiting = self._rang = False

    def close(self) -> None:
        """Wait no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, rings_s: float) -> None:
        self.close()
        self._rings_s = rings_s
        self._timer = self._loop.call_at(rings_s, self._ring)

    def _ring(self) -> None:
        self._timer, self._rings_s = None, inf
        if not self._is_waiting:
            return  # The next wait sets it.
        if self._loop.time() < self._due_s:
            self._set(self._due_s)
            return
        self._rang = True
        self._task.cancel()
