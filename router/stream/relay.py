"""From a worker's answer to the client: bytes as they are, and a true end even when the worker has none."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import orjson

from router.dispatch.answers import WholeAnswer
from router.dispatch.worker_answers import usage_of
from router.errors import (
    AnsweredError,
    ConnectionLostError,
    ShuttingDownError,
    TransportError,
    UpstreamTimeoutError,
    WorkerFailedError,
    error_object,
)
from router.stream.answer_report import report_comment, with_report
from router.stream.heartbeat import COMMENT, Heartbeat, reuse_told_late, told_late
from router.stream.sse import EventMeter
from router.stream.stream_repair import Repair, StreamRepair
from router.telemetry.record import Outcome, outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Send

    from router.config import StreamsConfig
    from router.dispatch.answers import Answer, StreamAnswer
    from router.lifecycle import Lifecycle
    from router.sessions.memory import Sessions
    from router.telemetry.metrics import RouterMetrics
    from router.telemetry.record import RequestRecord

    Failure = TransportError | UpstreamTimeoutError | ShuttingDownError

_log = logging.getLogger("crossfill.workers")


class Relay:
    """Sends answers to clients and notes on the record how they went."""

    def __init__(
        self,
        metrics: RouterMetrics,
        sessions: Sessions,
        lifecycle: Lifecycle,
        config: StreamsConfig,
        clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._sessions = sessions
        self._lifecycle = lifecycle
        self._heartbeat_s = config.heartbeat_s
        self._clock = clock

    def heartbeat(self, send: Send, *, is_stream: bool) -> Heartbeat:
        """What keeps the client's connection alive until there is an answer; only a stream has room for that."""
        return Heartbeat(send, self._heartbeat_s if is_stream else None, self._metrics.count_heartbeat)

    async def send_answer(
        self,
        answer: Answer,
        send: Send,
        record: RequestRecord,
        *,
        passes_usage: bool,
        is_one_choice: bool,
        has_begun: bool,
        wants_report: bool = False,
    ) -> None:
        """Relay `answer` to its end and set the outcome. A stream that breaks ends with an error frame, not [DONE].

        `has_begun` says that the head of the answer has gone out already, by a heartbeat; `wants_report` that the
        client asked to be told within the answer how it came about.
        """
        record.has_answer_begun = True
        if isinstance(answer, WholeAnswer):
            record.usage = answer.usage
            await _send_whole(answer, with_report(answer.body, record.report()) if wants_report else answer.body, send)
            record.outcome = Outcome.OK
            return
        with answer:
            if not has_begun:
                await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
            comments = (told_late(record) if has_begun else b"") + (
                report_comment(record.report()) if wants_report else b""
            )
            if comments:
                await _send_part(send, comments)
            repair = StreamRepair(self._repair_teller(record))
            meter = EventMeter(
                passes_usage=passes_usage, is_one_choice=is_one_choice, repair=repair, keeps_mark=not comments
            )
            failure = await self._forward_until_end(answer, meter, send, record)
            rest = meter.finish()
            record.usage = usage_of(meter.usage)
            self._sessions.ended(record)
            record.outcome, frame = _ending(meter, failure, record)
            await send({"type": "http.response.body", "body": rest + frame, "more_body": False})

    async def send_error(self, error: AnsweredError, send: Send, record: RequestRecord) -> None:
        """End a stream whose head a heartbeat has sent and for which there is no answer."""
        record.outcome, record.error_code = outcome_of(error), error.code
        told = reuse_told_late(record) + _frame(error, record)
        await send({"type": "http.response.body", "body": told, "more_body": False})

    def _repair_teller(self, record: RequestRecord) -> Callable[[Repair], None]:
        told: set[Repair] = set()

        def tell(kind: Repair) -> None:
            self._metrics.count_repair(kind)
            if kind not in told:
                told.add(kind)
                _log.warning("request %s: the stream of worker %s: %s", record.request_id, record.worker, kind.value)

        return tell

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
        pace = _Pace(self._metrics, record)
        chunk: bytes | None = answer.first
        while chunk != b"":
            if chunk is None:
                await self._beat(meter, send)
            else:
                ready = meter.feed(chunk)
                pace.note(meter.content_events, self._clock)
                if ready:
                    await send({"type": "http.response.body", "body": ready, "more_body": True})
                if meter.is_done:
                    answer.done()
                    record.outcome = record.outcome if meter.has_error else Outcome.OK
            chunk = await answer.next_chunk(self._heartbeat_s)

    async def _beat(self, meter: EventMeter, send: Send) -> None:
        # Within a huge event there is no place for a comment.
        if not meter.is_inside_event:
            await _send_part(send, COMMENT)
            self._metrics.count_heartbeat()


class _Pace:
    """Measures when content comes: the first, and from each to the next."""

    def __init__(self, metrics: RouterMetrics, record: RequestRecord) -> None:
        self._metrics = metrics
        self._record = record
        self._observe_gap = metrics.inter_token(record)
        self._seen = 0
        self._last_s = 0.0

    def note(self, content_events: int, clock: Callable[[], float]) -> None:
        """So many events with content have come by now."""
        if content_events == self._seen:
            return
        now_s = clock()
        if self._seen:
            self._observe_gap(now_s - self._last_s)
        else:
            self._record.ttft_s = now_s - self._record.arrived_s
            self._metrics.observe_first_token(self._record, self._record.ttft_s)
        self._seen, self._last_s = content_events, now_s


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
    frame = _frame(error, record)
    return outcome, b"\n\n" + frame if meter.is_inside_event else frame


def _frame(error: AnsweredError, record: RequestRecord) -> bytes:
    return b"data: " + orjson.dumps(error_object(error, record.request_id)) + b"\n\n"


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def _send_whole(answer: WholeAnswer, body: bytes, send: Send) -> None:
    headers = [*answer.headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
