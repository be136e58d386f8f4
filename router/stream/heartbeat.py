"""Keeps a waiting client's connection alive: early response headers and SSE comments until the first byte is there.

Proxies and clients end connections on which nothing comes for a while, often 60 s; a long prefill takes longer.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

import orjson

from router.dispatch.reuse_outcome import REUSE_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from starlette.types import Send

    from router.telemetry.record import RequestRecord

COMMENT = b": still working\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect the comments otherwise.
    (b"x-accel-buffering", b"no"),
]


class Heartbeat:
    """A context in which a client waits for the first byte of its stream.

    After `interval_s` without one (None: never) the head of the answer goes out, status 200, and a comment at each
    further interval; `has_begun` says so, and errors must then be told within the stream. `count` is called for each
    comment.
    """

    def __init__(self, send: Send, interval_s: float | None, count: Callable[[], None]) -> None:
        self._send = send
        self._interval_s = interval_s
        self._count = count
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self.has_begun = False

    async def __aenter__(self) -> Self:
        if self._interval_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating

    def _begin(self) -> None:
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        assert self._interval_s is not None, "only an interval begins it"
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self.has_begun = True
        while True:
            await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            self._count()
            await asyncio.sleep(self._interval_s)


def told_late(record: RequestRecord) -> bytes:
    """Comments with what the response headers would have said, had they not gone out before it was known."""
    return comment(orjson.dumps(record.decision_headers()).decode()) + reuse_told_late(record)


def reuse_told_late(record: RequestRecord) -> bytes:
    """The one with the worker's word on reuse; nothing if it said none."""
    return comment(f"{REUSE_HEADER}: {record.reuse.header}") if record.reuse.header else b""


def comment(line: str) -> bytes:
    """`line`, which has no line break, where readers of server-sent events see nothing."""
    return f": {line}\n\n".encode()
