"""A request for text as the router knows it: checked, with every field that it does not know kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from router.request.options import RequestOptions, read_options
from router.request.schema import ChatBody, CompletionBody, check_chat_body, check_completion_body
from router.request.system_role import for_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.config import LimitsConfig, SystemRole
    from router.errors import JsonObject

_NEVER_FORWARDED = ("cache_salt", "crossfill")

# OpenAI's default, and SGLang's.
_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: its role and all of its text."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class GenerationRequest(ABC):
    """A validated request for text. `payload` is the client's object and is never changed.

    `path` is the endpoint, of the router and of its workers alike; `known` are the fields that are checked.
    """

    path: ClassVar[str]
    is_chat: ClassVar[bool]
    known: ClassVar[frozenset[str]]

    payload: JsonObject
    model: str
    stream: bool
    options: RequestOptions = field(default_factory=RequestOptions)

    @property
    def cache_salt(self) -> str | None:
        """The client's salt, if it sent a non-empty string."""
        salt = self.payload.get("cache_salt")
        return salt if isinstance(salt, str) and salt else None

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for a usage event at the end of its stream."""
        options = self.payload.get("stream_options")
        # SGLang's own option for usage in every event.
        asked = ("include_usage", "continuous_usage_stats")
        return isinstance(options, dict) and any(options.get(name) for name in asked)

    @property
    @abstractmethod
    def answer_limit_tokens(self) -> int | None:
        """The most tokens that one answer may have, None if nobody bounds it."""

    @property
    @abstractmethod
    def choices(self) -> int:
        """How many answers are asked for."""

    @abstractmethod
    def turns(self) -> tuple[Turn, ...]:
        """What is asked, as text."""

    def worker_body(self, *, model: str, rid: str, tenant: str, extra_key: str, system_role: SystemRole) -> bytes:
        """The JSON for a worker of `model`: the client's fields, with those that the router owns set or removed.

        Nulls of known fields are left out: they mean the default, and SGLang refuses some of them.
        """
        body = {name: value for name, value in self.payload.items() if value is not None or name not in self.known}
        told = self.options.to_worker(tenant, self.cache_salt)
        body |= {"model": model, "rid": rid, "extra_key": extra_key, "custom_params": told}
        for name in _NEVER_FORWARDED:
            body.pop(name, None)
        if self.stream:
            # For the token counters; the relay withholds the event from clients that did not ask for it.
            options: Any = self.payload.get("stream_options")
            body["stream_options"] = {**(options or {}), "include_usage": True}
        self._adapt(body, system_role)
        return orjson.dumps(body)

    @abstractmethod
    def _adapt(self, body: JsonObject, system_role: SystemRole) -> None:
        """Change in `body` what the model needs otherwise."""


@dataclass(frozen=True, slots=True)
class ChatRequest(GenerationRequest):
    """A request for a chat completion. `default_max_tokens` bounds the answer if the client does not."""

    path = "/v1/chat/completions"
    is_chat = True
    known = frozenset(ChatBody.model_fields)

    default_max_tokens: int | None = None

    @property
    def answer_limit_tokens(self) -> int | None:
        """See GenerationRequest; the newer field wins over the older."""
        for name in ("max_completion_tokens", "max_tokens"):
            limit: Any = self.payload.get(name)
            if limit is not None:
                return int(limit)
        return self.default_max_tokens

    @property
    def choices(self) -> int:
        """See GenerationRequest."""
        return _choices(self.payload)

    def turns(self) -> tuple[Turn, ...]:
        """The conversation as text: null is empty, all text parts of a list count."""
        messages: Any = self.payload["messages"]
        return tuple(Turn(message["role"], _text(message.get("content"))) for message in messages)

    def _adapt(self, body: JsonObject, system_role: SystemRole) -> None:
        messages: Any = body["messages"]
        body["messages"] = for_model(messages, system_role)
        is_bounded = "max_tokens" in body or "max_completion_tokens" in body
        if self.default_max_tokens is not None and not is_bounded:
            body["max_completion_tokens"] = self.default_max_tokens


@dataclass(frozen=True, slots=True)
class CompletionRequest(GenerationRequest):
    """A request for text that goes on from a prompt. Without `max_tokens` workers write 16 tokens."""

    path = "/v1/completions"
    is_chat = False
    known = frozenset(CompletionBody.model_fields)

    @property
    def answer_limit_tokens(self) -> int:
        """See GenerationRequest."""
        limit: Any = self.payload.get("max_tokens")
        return _COMPLETION_TOKENS if limit is None else int(limit)

    @property
    def choices(self) -> int:
        """One for each prompt, times `n`."""
        prompt: Any = self.payload["prompt"]
        return _choices(self.payload) * (1 if isinstance(prompt, str) else len(prompt))

    def turns(self) -> tuple[Turn, ...]:
        """All prompts as one turn of a user."""
        prompt: Any = self.payload["prompt"]
        return (Turn("user", prompt if isinstance(prompt, str) else "\n".join(prompt)),)

    def _adapt(self, body: JsonObject, system_role: SystemRole) -> None:
        """A prompt has no roles, and a bound of its own."""


def parse_chat(body: JsonObject, limits: LimitsConfig, option_headers: Sequence[str] = ()) -> ChatRequest:
    """Check `body` and wrap it, with the values of the header `crossfill`; raises InvalidRequestError."""
    check_chat_body(body, limits.choices)
    return ChatRequest(
        payload=body,
        model=str(body["model"]),
        stream=bool(body.get("stream")),
        options=read_options(body, option_headers),
        default_max_tokens=limits.default_max_tokens,
    )


def parse_completion(body: JsonObject, limits: LimitsConfig, option_headers: Sequence[str] = ()) -> CompletionRequest:
    """Check `body` and wrap it, with the values of the header `crossfill`; raises InvalidRequestError."""
    check_completion_body(body, limits.choices)
    return CompletionRequest(
        payload=body,
        model=str(body["model"]),
        stream=bool(body.get("stream")),
        options=read_options(body, option_headers),
    )


def parse_either(body: JsonObject, limits: LimitsConfig, option_headers: Sequence[str] = ()) -> GenerationRequest:
    """A text completion if `body` has a prompt and no messages, else a chat; raises InvalidRequestError."""
    if "prompt" in body and body.get("messages") is None:
        return parse_completion(body, limits, option_headers)
    return parse_chat(body, limits, option_headers)


def _choices(payload: JsonObject) -> int:
    n: Any = payload.get("n")
    return 1 if n is None else int(n)


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")
