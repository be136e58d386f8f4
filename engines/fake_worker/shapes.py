"""OpenAI's answer shapes, as SGLang sends them."""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from engines.fake_worker.script import Reply

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


class Answer(ABC):
    """Writes one answer: `choices` choices, each with the same content, of `body`'s request."""

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, body: Json, model: str) -> None:
        self._body = body
        self._head = {"id": f"{self.prefix}-{body.get('rid', 'fake')}", "created": 0, "model": model}
        self.choices = self._prompts() * (body.get("n") or 1)

    def opening(self) -> list[bytes]:
        """Events before the content."""
        return []

    def events(self, piece: Json) -> list[bytes]:
        """The events of one piece: an object with `choices` is one as it is, else a delta is sent for every choice."""
        if "choices" in piece:
            return [event({**self._head, "object": self.chunk_kind, **piece})]
        return [self._chunk(index, piece, None) for index in range(self.choices)]

    def closing(self, reply: Reply) -> list[bytes]:
        """Events after the content: each choice is finished once, and usage is told if it was asked for."""
        reason = finish_reason(reply)
        events = [self._chunk(index, {}, reason) for index in range(self.choices)]
        if (self._body.get("stream_options") or {}).get("include_usage"):
            usage = {"choices": [], "usage": self._usage(reply)}
            events.append(event({**self._head, "object": self.chunk_kind, **usage}))
        return events

    def whole(self, reply: Reply) -> Json:
        """The answer in one piece."""
        choices = [
            {"index": index, **self._content(reply.message_text()), "logprobs": None, "finish_reason": "stop"}
            for index in range(self.choices)
        ]
        return {**self._head, "object": self.whole_kind, "choices": choices, "usage": self._usage(reply)}

    def _chunk(self, index: int, delta: Json, reason: str | None) -> bytes:
        choice = {"index": index, **self._delta(delta), "logprobs": None, "finish_reason": reason}
        return event({**self._head, "object": self.chunk_kind, "choices": [choice]})

    def _usage(self, reply: Reply) -> Json:
        """Token counts; a token is a word of the prompt and a piece of the answer."""
        prompt = sum(len(text.split()) for text in self._prompt_texts())
        answer = len(reply.pieces()) * self.choices
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    @abstractmethod
    def _prompts(self) -> int:
        """How many prompts the request has."""

    @abstractmethod
    def _prompt_texts(self) -> list[str]:
        """Their text."""

    @abstractmethod
    def _content(self, text: str) -> Json:
        """What a whole choice says."""

    @abstractmethod
    def _delta(self, delta: Json) -> Json:
        """What a choice of a stream says."""


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[bytes]:
        """The role, for every choice."""
        return [self._chunk(index, {"role": "assistant", "content": ""}, None) for index in range(self.choices)]

    def _prompts(self) -> int:
        return 1

    def _prompt_texts(self) -> list[str]:
        return [str(message.get("content") or "") for message in self._body.get("messages", [])]

    def _content(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, delta: Json) -> Json:
        return {"delta": delta}


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    prefix = "cmpl"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def _prompts(self) -> int:
        return len(self._prompt_texts())

    def _prompt_texts(self) -> list[str]:
        prompt = self._body.get("prompt", "")
        return [prompt] if isinstance(prompt, str) else prompt

    def _content(self, text: str) -> Json:
        return {"text": text}

    def _delta(self, delta: Json) -> Json:
        return {"text": delta.get("content") or ""}


def event(data: Json) -> bytes:
    """One server-sent event. Text stays UTF-8, so that multi-byte characters are on the wire."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def error_event() -> bytes:
    """How SGLang tells of a failure within a stream."""
    return event({"error": {"message": "scripted failure", "type": "InternalServerError", "param": None, "code": 500}})


def reuse_refused(reason: str) -> Json:
    """How a worker says that a request required reuse, and nothing could be reused."""
    message = f"crossfill.reuse is `require`, and nothing could be reused: {reason}"
    return {"object": "error", "message": message, "type": "ReuseRefused", "param": None, "code": 409}


def finish_reason(reply: Reply) -> str:
    """`tool_calls` if any delta calls a tool."""
    return "tool_calls" if any("tool_calls" in piece for piece in reply.pieces()) else "stop"


class Gzip:
    """Compresses a body piece by piece, each piece readable as soon as it arrives."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(wbits=31)

    def piece(self, data: bytes) -> bytes:
        """Compressed `data`."""
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        """The trailer."""
        return self._compressor.flush()
