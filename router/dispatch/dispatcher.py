"""From a request to the beginning of a worker's answer: choose a worker, send, and try others until a byte is there."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from router.dispatch.answers import StreamAnswer, WholeAnswer
from router.dispatch.deadline import Deadline
from router.dispatch.reuse_outcome import NOTHING_SAID, reuse_outcome
from router.dispatch.worker_answers import (
    RETRIED_STATUSES,
    error_of_status,
    is_event_stream,
    passed_headers,
    read_success,
    usage_of,
)
from router.dispatch.workers import in_flight
from router.errors import (
    AnsweredError,
    ConnectFailedError,
    ConnectionLostError,
    NoHealthyWorkerError,
    RouterError,
    TransportError,
    UpstreamTimeoutError,
    WorkerFailedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.config import RouterConfig
    from router.decision.decider import Decide
    from router.decision.policy import Decision
    from router.dispatch.affinity import Placement
    from router.dispatch.answers import Answer
    from router.dispatch.transport import Transport, UpstreamResponse
    from router.dispatch.workers import Worker, WorkerPool
    from router.offload import Offload
    from router.request.generation import GenerationRequest
    from router.sessions.memory import Sessions
    from router.telemetry.metrics import RouterMetrics
    from router.telemetry.record import RequestRecord

_log = logging.getLogger("crossfill.workers")

# What a worker says of a failure is for people to read.
_LONGEST_ERROR_BYTES = 64 * 2**10


class RetryReason(StrEnum):
    """What an attempt died of that may be made again on another worker; one for each of RETRIED_STATUSES."""

    CONNECT_TIMEOUT = "connect_timeout"
    CONNECT_FAILED = "connect_failed"
    CONNECTION_LOST = "connection_lost"
    STATUS_502 = "status_502"
    STATUS_503 = "status_503"
    STATUS_504 = "status_504"


class _AttemptFailedError(RouterError):
    """This worker could not serve the request, another one might. `answer` is for the client if none does.

    `broke_worker` says that the worker had the request when its connection broke.
    """

    def __init__(self, reason: RetryReason, answer: AnsweredError, *, broke_worker: bool = False) -> None:
        super().__init__(str(answer))
        self.reason = reason
        self.answer = answer
        self.broke_worker = broke_worker


class Dispatcher:
    """Sends requests to workers."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        pool: WorkerPool,
        sessions: Sessions,
        transport: Transport,
        metrics: RouterMetrics,
        offload: Offload,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._pool = pool
        self._sessions = sessions
        self._transport = transport
        self._limits = config.upstream
        self._retry_after_s = max(1, math.ceil(config.health.interval_s))
        self._metrics = metrics
        self._offload = offload
        self._clock = clock
        self._new_id = new_id

    async def open(self, request: GenerationRequest, decide: Decide, record: RequestRecord) -> Answer:
        """The answer of the first worker that gives one; nothing has reached the client yet.

        After a failure the decision is made again without the workers that were tried, so that the other model of the
        ladder can step in. It cannot once a worker broke with the request in its hands: the request may be the cause,
        and must not take both models down. Raises UpstreamError or WorkerRefusalError.
        """
        deadline = Deadline(self._limits.total_s)
        tried: list[Worker] = []
        failure: _AttemptFailedError | None = None
        stays_with_model = False
        decision = decide(self._pool.unavailable())
        record.decided_s = self._clock()
        while len(tried) < self._limits.attempts:
            placement = self._pool.pick(decision.model, tried, record.prompt)
            if placement is None:
                record.decision = record.decision or decision
                break
            self._note_attempt(record, decision, placement, failure)
            tried.append(placement.worker)
            try:
                answer = await self._attempt(placement.worker, request, record, deadline)
            except _AttemptFailedError as error:
                failure = error
            else:
                self._sessions.answered(record)
                return answer
            stays_with_model = stays_with_model or failure.broke_worker
            if not stays_with_model:
                decision = decide(self._pool.unavailable(tried))
        raise failure.answer if failure else self._nobody(record)

    def _note_attempt(
        self, record: RequestRecord, decision: Decision, placement: Placement, failure: _AttemptFailedError | None
    ) -> None:
        if failure is not None:
            record.retries.append(failure.reason.value)
            self._metrics.count_retry(failure.reason)
        record.decision, record.placement, record.reuse = decision, placement, NOTHING_SAID
        record.attempts += 1
        record.sent_s = self._clock()

    async def _attempt(
        self, worker: Worker, request: GenerationRequest, record: RequestRecord, deadline: Deadline
    ) -> Answer:
        # An answer in one piece has no byte before its end.
        is_stream = request.stream
        phase, limit_s = ("first_byte", self._limits.first_byte_s) if is_stream else ("total", self._limits.total_s)
        with ExitStack() as held:
            held.enter_context(in_flight(worker))
            async with deadline.phase(phase, limit_s):
                try:
                    response = await self._send(worker, request, record)
                    held.callback(response.close)
                    answer = await self._receive(worker, response, deadline, record, is_stream=is_stream)
                except TransportError as error:
                    # Its text holds the worker's address or its bytes: for the log and not for clients.
                    _log.warning("request %s on worker %s: %s", record.request_id, worker.id, error)
                    worker.connection_failed(str(error))
                    raise self._failed_attempt(worker, error) from error
            if isinstance(answer, StreamAnswer):
                answer.hold(held.pop_all())
            return answer

    async def _send(self, worker: Worker, request: GenerationRequest, record: RequestRecord) -> UpstreamResponse:
        assert record.tenant is not None, "every endpoint identifies its client first"
        assert record.namespace is not None, "known since the request is understood"
        # Written afresh: nothing of the client's headers, its key above all, goes to a worker.
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream" if request.stream else "application/json",
            "accept-encoding": "identity",
            "x-request-id": record.request_id,
        }
        write = partial(
            request.worker_body,
            model=worker.model,
            rid=f"cf-{self._new_id()}",
            tenant=record.tenant,
            extra_key=record.namespace,
            system_role=worker.system_role,
        )
        body = await self._offload.run(write, record.body_bytes)
        return await self._transport.post(worker.url + request.path, headers, body)

    async def _receive(
        self, worker: Worker, response: UpstreamResponse, deadline: Deadline, record: RequestRecord, *, is_stream: bool
    ) -> Answer:
        if not 200 <= response.status < 300:
            raise await self._error_answer(worker, response, record)
        if is_stream and is_event_stream(response.headers):
            first = await response.read_some()
            if not first:
                raise ConnectionLostError("the stream ended before its first byte")
            worker.saw_life(self._clock())
            self._note_reuse(worker, response, record)
            return StreamAnswer(response, first, worker, deadline, self._limits.between_bytes_s, self._clock)
        body = await response.read_all()
        worker.saw_life(self._clock())
        self._note_reuse(worker, response, record)
        usage = usage_of(read_success(body, is_stream=is_stream).get("usage"))
        return WholeAnswer(response.status, passed_headers(response.headers), body, usage)

    def _note_reuse(self, worker: Worker, response: UpstreamResponse, record: RequestRecord) -> None:
        """Not before the answer is there: what a worker said of one that broke holds for nothing."""
        record.reuse = reuse_outcome(response.headers)
        if record.reuse.header:
            self._metrics.count_reuse(worker.model, record.reuse)

    async def _error_answer(self, worker: Worker, response: UpstreamResponse, record: RequestRecord) -> RouterError:
        body = await response.read_at_most(_LONGEST_ERROR_BYTES)
        self._note_reuse(worker, response, record)
        error = error_of_status(response.status, body, response.headers, self._retry_after_s)
        if response.status in RETRIED_STATUSES:
            return _AttemptFailedError(RetryReason(f"status_{response.status}"), error)
        if response.status < 500:
            worker.saw_refusal(self._clock())
        return error

    def _failed_attempt(self, worker: Worker, error: TransportError) -> _AttemptFailedError:
        if isinstance(error, ConnectFailedError):
            if error.timed_out:
                return _AttemptFailedError(
                    RetryReason.CONNECT_TIMEOUT, UpstreamTimeoutError("connect", self._limits.connect_s)
                )
            return _AttemptFailedError(
                RetryReason.CONNECT_FAILED, WorkerFailedError(f"Worker {worker.id} cannot be reached.")
            )
        answer = WorkerFailedError(f"Worker {worker.id} broke the connection.")
        return _AttemptFailedError(RetryReason.CONNECTION_LOST, answer, broke_worker=True)

    def _nobody(self, record: RequestRecord) -> NoHealthyWorkerError:
        return NoHealthyWorkerError(
            f"No healthy worker for the model {record.model!r} at the moment.", retry_after_s=self._retry_after_s
        )
