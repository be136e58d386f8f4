"""Answers of workers as the relay gets them: whole, or a stream whose first bytes have come."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Self

from router.dispatch.alarm import Alarm
from router.dispatch.worker_answers import passed_headers
from router.errors import UpstreamTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from router.dispatch.deadline import Deadline
    from router.dispatch.transport import UpstreamResponse
    from router.dispatch.worker_answers import Usage
    from router.dispatch.workers import Worker

# After [DONE] nothing is missing; a worker that does not close its stream must not hold the client.
_AFTER_DONE_S = 1.0


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A complete answer in one piece; nothing is held any more."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    usage: Usage | None


class StreamAnswer:
    """An answer whose first bytes have come. A context manager that ends the worker request."""

    def __init__(
        self,
        response: UpstreamResponse,
        first: bytes,
        worker: Worker,
        deadline: Deadline,
        between_bytes_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.status = response.status
        self.headers = passed_headers(response.headers)
        self.first = first
        self._response = response
        self._worker = worker
        self._deadline = deadline
        self._between_bytes_s = between_bytes_s
        self._clock = clock
        self._now_s = asyncio.get_running_loop().time
        self._alarm = Alarm()
        self._held = ExitStack()
        self._wait_ends_s: float | None = None
        self._is_done = False

    def hold(self, held: ExitStack) -> Self:
        """Take over what keeps the request open."""
        self._held = held
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm.close()
        self._held.close()

    def done(self) -> None:
        """Nothing is missing any more. One limit holds for all that follows, or comments could come for ever."""
        if not self._is_done:
            self._is_done = True
            self._wait_ends_s = self._now_s() + _AFTER_DONE_S

    async def next_chunk(self, nap_s: float | None) -> bytes | None:
        """More bytes, or none at the end; None if nothing came for `nap_s`, and the caller should ask again.

        Raises ConnectionLostError, UpstreamTimeoutError.
        """
        now_s = self._now_s()
        ends_s = self._wait_ends_s
        if ends_s is None:
            ends_s = self._wait_ends_s = min(now_s + self._between_bytes_s, self._deadline.end_s)
        nap_ends_s = inf if nap_s is None else now_s + nap_s
        self._alarm.set(min(ends_s, nap_ends_s))
        try:
            chunk = await self._response.read_some()
        except asyncio.CancelledError:
            if not self._alarm.has_rung():
                raise
            if ends_s <= nap_ends_s:
                raise self._timeout(ends_s) from None
            return None
        finally:
            self._alarm.unset()
        if not self._is_done:
            self._wait_ends_s = None
        self._worker.saw_life(self._clock())
        return chunk

    def _timeout(self, ends_s: float) -> UpstreamTimeoutError:
        if self._is_done:
            return UpstreamTimeoutError("after_done", _AFTER_DONE_S)
        if ends_s == self._deadline.end_s:
            return UpstreamTimeoutError("total", self._deadline.total_s)
        return UpstreamTimeoutError("between_bytes", self._between_bytes_s)


Answer = WholeAnswer | StreamAnswer
