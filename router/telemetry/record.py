"""What is known about one request while it is served: filled in on the way, read by metrics and the access log."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, cast

from router.dispatch.reuse_outcome import NOTHING_SAID, REUSE_HEADER, ReuseOutcome
from router.errors import (
    ClientError,
    MetricsLostError,
    NoHealthyWorkerError,
    ShuttingDownError,
    StoreFailedError,
    UpstreamTimeoutError,
    WorkerRefusalError,
)
from router.sessions.prompt import Prompt

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Any

    from router.decision.policy import Decision
    from router.dispatch.affinity import Placement
    from router.dispatch.worker_answers import Usage
    from router.errors import AnsweredError, JsonObject

_SCOPE_KEY = "crossfill.record"


class Phase(StrEnum):
    """Where a client was when it left: before the first bytes of a worker's answer, or behind them."""

    WAITING = "waiting"
    STREAMING = "streaming"


class Outcome(StrEnum):
    """How a request ended. Only `ok` is a success."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    CLIENT_GONE = "client_gone"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    UPSTREAM_ERROR = "upstream_error"
    ERROR_EVENT = "error_event"
    TRUNCATED = "truncated"
    SHUTDOWN = "shutdown"
    INTERNAL_ERROR = "internal_error"


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request.

    `arrived_s`, `received_s` (its body is there and its turn has come), `decided_s` and `sent_s` (the last attempt) are
    seconds on the monotonic clock, `ttft_s` is from arrival. `placement` is that of the last attempt, `reuse` what its
    worker said of state that others left, `ttft_unknown` names models whose prefill speed was asked and not known.
    `tenant` is whose key the request came with (`local` where no key is asked for), None until that is known,
    `operator` that of one about the router itself; `namespace` is what a worker may share with it.
    """

    request_id: str
    arrived_s: float
    body_bytes: int = 0
    tenant: str | None = None
    operator: str | None = None
    namespace: str | None = None
    decision: Decision | None = None
    prompt: Prompt = field(default_factory=Prompt)
    placement: Placement | None = None
    sent_s: float | None = None
    ttft_unknown: list[str] = field(default_factory=list)
    attempts: int = 0
    retries: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    status: int | None = None
    error_code: str | None = None
    received_s: float | None = None
    decided_s: float | None = None
    ttft_s: float | None = None
    usage: Usage | None = None
    reuse: ReuseOutcome = NOTHING_SAID
    has_answer_begun: bool = False
    is_generation: bool = False

    @property
    def model(self) -> str | None:
        """The concrete model, once decided."""
        return self.decision.model if self.decision else None

    @property
    def worker(self) -> str | None:
        """The worker of the last attempt, once there was one."""
        return self.placement.worker.id if self.placement else None

    def crossfill_headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers that tell the decision and what the worker reused, as far as known; all of it is ASCII."""
        headers = self.decision_headers()
        if self.reuse.header:
            headers[REUSE_HEADER] = self.reuse.header
        return [(name.encode(), value.encode("ascii")) for name, value in headers.items()]

    def decision_headers(self) -> dict[str, str]:
        """Those that tell the decision; empty before there is one."""
        if self.decision is None:
            return {}
        headers = {
            "x-crossfill-model": self.decision.model,
            "x-crossfill-reason": self.decision.reason.value,
            "x-crossfill-decision": self.decision.to_header(),
        }
        if self.placement is not None:
            headers["x-crossfill-worker"] = self.placement.worker.id
            headers["x-crossfill-placement"] = self.placement.to_header()
        return headers

    def report(self) -> JsonObject:
        """What a client gets within its answer that asks for it: the same as in the headers, as JSON."""
        return {
            "model": self.model,
            "decision": self.decision.to_told() if self.decision else None,
            "reuse": self.reuse.to_json(),
            "request_id": self.request_id,
        }


def outcome_of(error: AnsweredError) -> Outcome:
    """How a request ended that was answered with `error`."""
    if isinstance(error, (ClientError, WorkerRefusalError)):
        return Outcome.CLIENT_ERROR
    if isinstance(error, ShuttingDownError):
        return Outcome.SHUTDOWN
    if isinstance(error, MetricsLostError):
        return Outcome.INTERNAL_ERROR
    if isinstance(error, (NoHealthyWorkerError, StoreFailedError)):
        return Outcome.UNAVAILABLE
    return Outcome.TIMEOUT if isinstance(error, UpstreamTimeoutError) else Outcome.UPSTREAM_ERROR


def attach(scope: MutableMapping[str, Any], record: RequestRecord) -> None:
    """Put `record` on an ASGI scope."""
    scope[_SCOPE_KEY] = record


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """The record on an ASGI scope."""
    return cast("RequestRecord", scope[_SCOPE_KEY])
