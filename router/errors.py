"""Errors of the router, in families by who must act.

::

    RouterError
    ├── ConfigError                     the operator: fix the configuration, the process does not start
    ├── ClientGoneError                 nobody: the client left, there is no one to answer
    ├── TransportError                  the dispatcher: try another worker, or turn it into an UpstreamError
    │   ├── ConnectFailedError          no connection, nothing was sent
    │   └── ConnectionLostError         the connection broke later
    └── AnsweredError                   500  becomes an HTTP answer; one of no other kind is a fault of the router
        ├── ClientError                 the client: its request cannot be served as it is (4xx)
        │   ├── InvalidRequestError     400  malformed or wrongly typed body
        │   ├── InvalidApiKeyError      401  no key, not the form of one, or not one of ours
        │   ├── AdministrationOffError  403  no admin keys are configured
        │   ├── ModelNotFoundError      404  no such model here
        │   ├── UploadTimeoutError      408  the body took longer than `limits.upload_s`
        │   ├── BodyTooLargeError       413  more bytes than `limits.body_bytes`
        │   ├── ReuseUnavailableError   409  reuse is required, and the model that is asked for cannot reuse
        │   └── HeadTooLargeError       431  more bytes of request line and headers than the router reads
        ├── WorkerRefusalError          the client, in the worker's words: a 4xx of the worker, relayed
        │   └── ReuseRefusedError       409  reuse is required, and there was nothing to reuse for this prompt
        ├── MetricsLostError            503  the operator: files of a running process were removed
        ├── ShuttingDownError           503  nobody: the process ends, the client may try again
        ├── StoreFailedError            503  the operator: the shared store did not do what was asked
        └── UpstreamError               the workers' operator
            ├── NoHealthyWorkerError    503  with Retry-After
            ├── WorkerFailedError       502  the worker answered 5xx or nonsense, or broke the connection
            └── UpstreamTimeoutError    504  names the phase and its limit

Each one that reaches a client carries what the OpenAI error object needs: message, type, param, code.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

JsonObject = dict[str, object]

REUSE_FIELD = "crossfill.reuse"
"""Path of the field with which a request asks for reuse."""

# OpenAI's SDKs send a request that was answered with 409 again unless they are told not to.
_NO_RETRY = {"x-should-retry": "false"}


class RouterError(Exception):
    """Root of the tree; `str(error)` is one readable line."""


class ConfigError(RouterError):
    """A configuration that cannot be used; the message names the file and the key or line."""


class AnsweredError(RouterError):
    """An error that becomes an HTTP answer: `status`, `headers` and the OpenAI error object."""

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code
        self.headers = dict(headers or {})


class ClientError(AnsweredError):
    """The client must change its request."""

    status = 400
    type = "invalid_request_error"


class InvalidRequestError(ClientError):
    """A malformed or wrongly typed body; `param` is the path of the field, as in `messages.2.content`."""


class BodyTooLargeError(ClientError):
    """The body has more bytes than the router accepts."""

    status = 413
    code = "request_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is larger than the limit of {limit_bytes} bytes.")
        self.limit_bytes = limit_bytes


class UploadTimeoutError(ClientError):
    """The body did not arrive in time."""

    status = 408
    code = "upload_timeout"

    def __init__(self, limit_s: float) -> None:
        # What is still to come of the body must not be taken for the next request.
        super().__init__(
            f"The request body did not arrive within {limit_s:g} s (limits.upload_s).", headers={"connection": "close"}
        )
        self.limit_s = limit_s


class HeadTooLargeError(ClientError):
    """Request line and headers have more bytes than the router reads."""

    status = 431
    code = "head_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"Request line and headers are larger than the limit of {limit_bytes} bytes.")
        self.limit_bytes = limit_bytes


class AuthFailure(StrEnum):
    """Why a request was not let in."""

    MISSING = "missing"
    MALFORMED = "malformed"
    UNKNOWN = "unknown"


_AUTH_MESSAGES = {
    AuthFailure.MISSING: "No API key was sent; send it as `Authorization: Bearer KEY`.",
    AuthFailure.MALFORMED: "The Authorization header does not have the form `Bearer KEY`.",
    AuthFailure.UNKNOWN: "The API key is not valid.",
}


class InvalidApiKeyError(ClientError):
    """The request does not carry a valid API key. What it carries instead is never repeated."""

    status = 401
    code = "invalid_api_key"

    def __init__(self, reason: AuthFailure, hint: str = "") -> None:
        super().__init__(f"{_AUTH_MESSAGES[reason]} {hint}".rstrip(), headers={"www-authenticate": "Bearer"})
        self.reason = reason


class AdministrationOffError(ClientError):
    """Nobody may administer this router."""

    status = 403
    code = "administration_off"

    def __init__(self) -> None:
        super().__init__(
            "Administration is off: name a file of admin keys in the router's configuration (auth.admin_keys_file); "
            "`crossfill keys add OPERATOR --admin --file FILE` makes it."
        )


class ReuseUnavailableError(ClientError):
    """The request insists on reuse, and nothing that it may be sent to can reuse what other models computed.

    `model` is the one that is asked for, `able` are the models that can.
    """

    status = 409
    code = "reuse_unavailable"

    def __init__(self, model: str, able: Sequence[str]) -> None:
        others = f"those that can: {', '.join(able)}" if able else "no model here can"
        super().__init__(
            f"`{REUSE_FIELD}` is `require`, and {model!r} cannot reuse what other models computed; {others}. "
            "`allow` uses reuse where there is any.",
            param=REUSE_FIELD,
            headers=_NO_RETRY,
        )
        self.model = model


class ModelNotFoundError(ClientError):
    """The request names a model that is not configured."""

    status = 404
    code = "model_not_found"

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        shown = model if len(model) <= 200 else model[:200] + "…"
        super().__init__(f"The model {shown!r} does not exist here; models: {', '.join(known)}.", param="model")
        self.model = model


class ClientGoneError(RouterError):
    """The client closed its connection before the answer was complete."""


class TransportError(RouterError):
    """A connection to a worker failed; never reaches a client as it is."""


class ConnectFailedError(TransportError):
    """No connection could be made. `timed_out` says that the connect limit was the cause."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class ConnectionLostError(TransportError):
    """The connection broke, or what came over it was not HTTP, before the answer was complete."""


class WorkerRefusalError(AnsweredError):
    """A worker's own 4xx answer: its status and message reach the client unchanged."""

    type = "invalid_request_error"

    def __init__(self, message: str, *, status: int, type_: str | None, param: str | None, code: str | None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.type = type_ or type(self).type


class ReuseRefusedError(WorkerRefusalError):
    """The request insists on reuse, and its worker could not reuse anything; `why` are the worker's words."""

    def __init__(self, why: str) -> None:
        message = why if REUSE_FIELD in why else f"`{REUSE_FIELD}` is `require`, and nothing could be reused: {why}"
        super().__init__(message, status=409, type_=None, param=REUSE_FIELD, code="reuse_refused")
        self.headers.update(_NO_RETRY)


class MetricsLostError(AnsweredError):
    """Metrics of the processes in the slots `lost` can no longer be read; those of the others alone would mislead."""

    status = 503
    code = "metrics_lost"

    def __init__(self, lost: Sequence[int]) -> None:
        super().__init__(
            f"The metrics files of process {', '.join(map(str, lost))} were removed; restart the router to count again."
        )


class ShuttingDownError(AnsweredError):
    """The grace period of a router that was told to stop is over."""

    status = 503
    type = "server_error"
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The router is shutting down.", headers={"retry-after": "1"})


class StoreFailedError(AnsweredError):
    """The shared store is down, hung, refuses, or cannot be opened."""

    status = 503
    type = "server_error"
    code = "store_unavailable"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"retry-after": "1"})


class UpstreamError(AnsweredError):
    """The workers could not serve the request; the client may try again."""

    status = 502
    type = "upstream_error"


class NoHealthyWorkerError(UpstreamError):
    """No worker can take the request now; `Retry-After` says when to come back."""

    status = 503
    code = "no_healthy_worker"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after_s)})


class WorkerFailedError(UpstreamError):
    """A worker answered 5xx or something unreadable, or broke the connection."""

    status = 502
    code = "worker_failed"


class UpstreamTimeoutError(UpstreamError):
    """A phase of the worker request ran past its limit (seconds)."""

    status = 504
    code = "upstream_timeout"

    def __init__(self, phase: str, limit_s: float) -> None:
        super().__init__(f"The worker passed the {phase} limit of {limit_s:g} s (upstream.{phase}_s).")
        self.phase = phase
        self.limit_s = limit_s


def error_object(error: AnsweredError, request_id: str) -> JsonObject:
    """The OpenAI error object of `error`, with the request id beside the four standard members."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
            "request_id": request_id,
        }
    }
