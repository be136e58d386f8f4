"""A chat request as the router knows it: checked, with every field that it does not know kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from router.config import LimitsConfig
from router.schema import check_chat_body

if TYPE_CHECKING:
    from router.errors import JsonObject

_NEVER_FORWARDED = ("cache_salt", "custom_params", "crossfill")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: its role and all of its text."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated chat completion request. `payload` is the client's object and is never changed.

    `default_max_tokens` bounds the answer if the client does not.
    """

    payload: JsonObject
    model: str
    stream: bool
    default_max_tokens: int | None = None

    @property
    def cache_salt(self) -> str | None:
        """The client's salt, if it sent a non-empty string."""
        salt = self.payload.get("cache_salt")
        return salt if isinstance(salt, str) and salt else None

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for a usage event at the end of its stream."""
        options = self.payload.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    @property
    def has_one_choice(self) -> bool:
        """Whether the client asked for one answer (`n`)."""
        return self.payload.get("n") in (None, 1)

    def turns(self) -> tuple[Turn, ...]:
        """The conversation as text: null is empty, all text parts of a list count."""
        messages: Any = self.payload["messages"]
        return tuple(Turn(message["role"], _text(message.get("content"))) for message in messages)

    def worker_body(self, *, model: str, rid: str, extra_key: str) -> bytes:
        """The JSON for a worker: the client's fields, with those that the router owns overwritten or removed."""
        body = {**self.payload, "model": model, "rid": rid, "extra_key": extra_key}
        for name in _NEVER_FORWARDED:
            body.pop(name, None)
        if self.stream:
            # For the token counters; the relay withholds the event from clients that did not ask for it.
            options: Any = self.payload.get("stream_options")
            body["stream_options"] = {**(options or {}), "include_usage": True}
        is_bounded = body.get("max_tokens") is not None or body.get("max_completion_tokens") is not None
        if self.default_max_tokens is not None and not is_bounded:
            body["max_completion_tokens"] = self.default_max_tokens
        return orjson.dumps(body)


def parse_chat(body: JsonObject, limits: LimitsConfig | None = None) -> ChatRequest:
    """Check `body` and wrap it; raises InvalidRequestError."""
    limits = limits or LimitsConfig()
    check_chat_body(body, limits.choices)
    return ChatRequest(
        payload=body,
        model=str(body["model"]),
        stream=bool(body.get("stream")),
        default_max_tokens=limits.default_max_tokens,
    )


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")
