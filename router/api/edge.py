"""The outermost layer of every request: its id, its record, the last error boundary, metrics and the access log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import orjson

from router.errors import AnsweredError, ClientGoneError, error_object
from router.request.ids import is_id, request_id
from router.telemetry.access_log import log_request
from router.telemetry.record import Outcome, RequestRecord, attach

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from router.telemetry.metrics import RouterMetrics

_log = logging.getLogger("crossfill.router")

# What proxies log for a client that left; it is never sent.
_CLIENT_CLOSED_REQUEST = 499


class Edge:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; nothing but cancellation leaves this function."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(self._request_id(scope), self._clock())
        attach(scope, record)

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                own = [(b"x-request-id", record.request_id.encode()), *record.crossfill_headers()]
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except ClientGoneError:
            # A stream that was relayed up to its [DONE] is a success, whoever closes the connection first.
            record.outcome = record.outcome or Outcome.CLIENT_GONE
        except Exception:  # noqa: BLE001 - one of the three named boundaries; logged and counted
            # The HTTP boundary: whatever went wrong, the client gets an error object and the process lives on.
            record.outcome = Outcome.INTERNAL_ERROR
            _log.exception("request %s failed unexpectedly", record.request_id)
            await _answer_internal_error(record, send_marked)
        finally:
            self._finish(scope, record)

    def _request_id(self, scope: Scope) -> str:
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        return given if is_id(given) else request_id(self._new_id())

    def _finish(self, scope: Scope, record: RequestRecord) -> None:
        duration_s = self._clock() - record.arrived_s
        route = getattr(scope.get("route"), "path", None)
        record.outcome = record.outcome or _outcome_of_status(record)
        if record.is_generation:
            self._metrics.observe_generation(record, duration_s)
        if record.status is None:
            record.status = _CLIENT_CLOSED_REQUEST
        self._metrics.count_http(route, record.status)
        log_request(record, method=scope["method"], route=route, time_s=self._wall_clock(), duration_s=duration_s)


def _outcome_of_status(record: RequestRecord) -> Outcome:
    # A generation that ended well says so; one that does not was cut, for example at the end of the grace period.
    if record.is_generation or record.status is None:
        return Outcome.INTERNAL_ERROR
    if record.status < 400:
        return Outcome.OK
    return Outcome.CLIENT_ERROR if record.status < 500 else Outcome.UNAVAILABLE


async def _answer_internal_error(record: RequestRecord, send: Send) -> None:
    if record.status is not None:
        return  # The head has gone; the server closes the connection on an answer that stays incomplete.
    error = AnsweredError("The router failed on this request; its log has the details.", code="internal_error")
    record.error_code = error.code
    body = orjson.dumps(error_object(error, record.request_id))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
