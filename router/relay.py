"""From a worker's answer to the client: bytes as they are, and a true end even when the worker has none."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import orjson

from router.dispatch import WholeAnswer
from router.errors import (
    AnsweredError,
    ConnectionLostError,
    ShuttingDownError,
    TransportError,
    UpstreamTimeoutError,
    WorkerFailedError,
    error_object,
)
from router.record import Outcome
from router.sse import EventMeter

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Send

    from router.dispatch import Answer, StreamAnswer
    from router.metrics import RouterMetrics
    from router.record import RequestRecord
    from router.services import Lifecycle

    Failure = TransportError | UpstreamTimeoutError | ShuttingDownError

_log = logging.getLogger("crossfill.workers")


class Relay:
    """Sends answers to clients and notes on the record how they went."""

    def __init__(self, metrics: RouterMetrics, lifecycle: Lifecycle, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._clock = clock

    async def send_answer(self, answer: Answer, send: Send, record: RequestRecord) -> None:
        """Relay `answer` to its end and set the outcome. A stream that breaks ends with an error frame, not [DONE]."""
        if isinstance(answer, WholeAnswer):
            await _send_whole(answer, send)
            record.outcome = Outcome.OK
            return
        with answer:
            await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
            meter = EventMeter()
            failure = await self._forward_until_end(answer, meter, send, record)
            rest = meter.finish()
            record.outcome, frame = _ending(meter, failure, record)
            await send({"type": "http.response.body", "body": rest + frame, "more_body": False})

    async def _forward_until_end(
        self, answer: StreamAnswer, meter: EventMeter, send: Send, record: RequestRecord
    ) -> Failure | None:
        try:
            await self._forward(answer, meter, send, record)
        except (TransportError, UpstreamTimeoutError) as failure:
            _log.warning("request %s on worker %s: %s", record.request_id, record.worker, failure)
            return failure
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._lifecycle.is_over or task is None:
                raise
            # The cancellation has done its work: there is still a frame to send.
            task.uncancel()
            return ShuttingDownError()
        return None

    async def _forward(self, answer: StreamAnswer, meter: EventMeter, send: Send, record: RequestRecord) -> None:
        chunk = answer.first
        while chunk:
            ready = meter.feed(chunk)
            if meter.has_content and record.ttft_s is None:
                record.ttft_s = self._clock() - record.arrived_s
                self._metrics.observe_first_token(record, record.ttft_s)
            if ready:
                await send({"type": "http.response.body", "body": ready, "more_body": True})
            if meter.is_done and not meter.has_error:
                record.outcome = Outcome.OK
            chunk = await answer.next_chunk(is_done=meter.is_done)


def _ending(meter: EventMeter, failure: Failure | None, record: RequestRecord) -> tuple[Outcome, bytes]:
    """How the stream ended, and the error frame if the worker did not tell the client itself."""
    if meter.has_error:
        return Outcome.ERROR_EVENT, b""
    if meter.is_done:
        return Outcome.OK, b""
    error: AnsweredError
    match failure:
        case ShuttingDownError():
            outcome, error = Outcome.SHUTDOWN, failure
        case UpstreamTimeoutError():
            outcome, error = Outcome.TIMEOUT, failure
        case ConnectionLostError():
            outcome = Outcome.UPSTREAM_ERROR
            error = WorkerFailedError("The worker broke the connection within its answer.")
        case _:
            outcome = Outcome.TRUNCATED
            error = WorkerFailedError("The worker's stream ended before its [DONE].", code="stream_truncated")
    record.error_code = error.code
    frame = b"data: " + orjson.dumps(error_object(error, record.request_id)) + b"\n\n"
    return outcome, b"\n\n" + frame if meter.is_inside_event else frame


async def _send_whole(answer: WholeAnswer, send: Send) -> None:
    headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
