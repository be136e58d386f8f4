"""Reading a worker's answer: which headers pass, and what its errors mean to the client."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson

from router.dispatch.reuse_outcome import reuse_outcome
from router.errors import (
    AnsweredError,
    JsonObject,
    NoHealthyWorkerError,
    ReuseRefusedError,
    WorkerFailedError,
    WorkerRefusalError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RETRIED_STATUSES = frozenset({502, 503, 504})

# Told to the client they would read as a fault of its own key.
_ROUTER_CREDENTIAL_STATUSES = frozenset({401, 403, 407})

_LONGEST_TEXT = 2000

# OpenAI's types are lower-case words; SGLang's, like `BadRequest` or `400`, only repeat the status.
_OPENAI_TYPE = re.compile(r"[a-z_]+")
_REUSE_REFUSED = "ReuseRefused"
_SECONDS = re.compile(r"[0-9]{1,9}")
# FastAPI tells in a validation error where the endpoint stands: nobody's business but the worker's.
_PLACE_IN_SOURCE = re.compile(r'\s*File "[^"\n]*", line \d+, in \w+[^\n]*(?:\n {4}[A-Z]+ /\S*)?')
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

_NOT_PASSED = frozenset(
    {
        # Between the worker and the router only (RFC 9110, 7.6.1).
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        # The transport has decoded the body.
        "content-encoding",
        "content-length",
        # The server's or the router's own.
        "date",
        "server",
        "set-cookie",
        "x-request-id",
    }
)
# The router says these itself, what a worker reused too.
_OURS = "x-crossfill-"


class TokenKind(StrEnum):
    """What became of a token: computed as part of a prompt, found in a cache, or written."""

    PREFILLED = "prefilled"
    CACHED = "cached"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer, all choices together; `cached` ones of the prompt were not prefilled."""

    prompt: int
    cached: int
    completion: int

    @property
    def prefilled(self) -> int:
        """Prompt tokens that were computed."""
        return max(0, self.prompt - self.cached)

    def of(self, kind: TokenKind) -> int:
        """The tokens of one kind; the kinds add up to all tokens."""
        match kind:
            case TokenKind.PREFILLED:
                return self.prefilled
            case TokenKind.CACHED:
                return self.cached
        return self.completion


def passed_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """The worker's headers that the client gets, as ASGI pairs."""
    pairs = [(name.lower(), value) for name, value in headers]
    named_by_connection = {
        token.strip().lower() for name, value in pairs if name == "connection" for token in value.split(",")
    }
    dropped = _NOT_PASSED | named_by_connection
    return [
        (name.encode(), value.encode("latin-1", "replace"))
        for name, value in pairs
        if name not in dropped and not name.startswith(_OURS) and name.isascii() and not _CONTROL.search(value)
    ]


def is_event_stream(headers: Iterable[tuple[str, str]]) -> bool:
    """Whether the body is server-sent events, whatever the client asked for."""
    return any(
        name.lower() == "content-type" and value.lower().startswith("text/event-stream") for name, value in headers
    )


def error_of_status(status: int, body: bytes, headers: Sequence[tuple[str, str]], retry_after_s: int) -> AnsweredError:
    """What a worker's answer other than 2xx becomes for the client."""
    told = _told_error(body)
    message = _message(told, body)
    if status == 409 and told.get("type") == _REUSE_REFUSED:
        reason = reuse_outcome(headers).reason
        return ReuseRefusedError(message or (reason.value if reason else "the worker gives no reason"))
    if status == 503:
        return NoHealthyWorkerError(message or "The worker is not available.", retry_after_s=retry_after_s)
    if status in _ROUTER_CREDENTIAL_STATUSES:
        return WorkerFailedError(f"The worker does not accept the router's credentials (status {status}).")
    if not 400 <= status < 500:
        return WorkerFailedError(message or f"The worker answered with status {status}.")
    error = WorkerRefusalError(
        message or f"The worker refused the request with status {status}.",
        status=status,
        type_=kind if (kind := _text(told.get("type"))) and _OPENAI_TYPE.fullmatch(kind) else None,
        param=_text(told.get("param")),
        code=_text(told.get("code")),
    )
    for name, value in headers:
        if name.lower() == "retry-after" and _SECONDS.fullmatch(value):
            error.headers["retry-after"] = value
    return error


def read_success(body: bytes, *, is_stream: bool) -> JsonObject:
    """A 2xx answer in one piece, parsed.

    Raises WorkerFailedError if it is none: an error in it, no completion, or a stream was asked for.
    """
    try:
        parsed: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    choices = parsed.get("choices") if isinstance(parsed, dict) else None
    if isinstance(choices, list) and choices and not is_stream:
        return dict(parsed)
    if b"error" in body and (told := _told_error(body)):
        raise WorkerFailedError(_message(told, body) or "The worker answered with an error.")
    kind = "a stream of events" if is_stream else "a completion"
    raise WorkerFailedError(f"The worker's answer is not {kind}.", code="invalid_answer")


def usage_of(told: object) -> Usage | None:
    """The token counts in the `usage` of an answer, None if it has no counts."""
    if not isinstance(told, dict) or not isinstance(prompt := told.get("prompt_tokens"), int):
        return None
    completion = told.get("completion_tokens")
    details = told.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        prompt=max(0, prompt),
        cached=max(0, cached) if isinstance(cached, int) else 0,
        completion=max(0, completion) if isinstance(completion, int) else 0,
    )


def told_error(event: object) -> JsonObject:
    """The error in a parsed answer: OpenAI's nested shape or SGLang's flat one. Empty if there is none."""
    if not isinstance(event, dict):
        return {}
    nested = event.get("error")
    if isinstance(nested, dict):
        return nested
    if isinstance(nested, str) and nested:
        return {"message": nested}
    return event if event.get("object") == "error" else {}


def _told_error(body: bytes) -> JsonObject:
    try:
        parsed: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    told = told_error(parsed)
    if not told and isinstance(parsed, dict):
        # FastAPI's shape, of workers that fail before they reach the OpenAI layer.
        detail = parsed.get("detail", parsed.get("message"))
        return {"message": detail if isinstance(detail, str) else orjson.dumps(detail).decode()} if detail else {}
    return told


def _message(told: JsonObject, body: bytes) -> str:
    message = told.get("message")
    if isinstance(message, str) and message:
        return _PLACE_IN_SOURCE.sub("", message)
    return "" if told else body.decode("utf-8", "replace").strip()[:_LONGEST_TEXT]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
