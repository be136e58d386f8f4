"""OpenAI's answer shapes, as SGLang sends them."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.fake_worker.script import Reply

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def event(data: Json) -> bytes:
    """One server-sent event. Text stays UTF-8, so that multi-byte characters are on the wire."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def chunk(answer_id: str, model: str, delta: Json, finish_reason: str | None = None) -> Json:
    """One `chat.completion.chunk`."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _head(answer_id, model, "chat.completion.chunk") | {"choices": [choice]}


def usage_chunk(answer_id: str, model: str, usage: Json) -> Json:
    """The last chunk when `stream_options.include_usage` is set: no choices."""
    return _head(answer_id, model, "chat.completion.chunk") | {"choices": [], "usage": usage}


def completion(answer_id: str, model: str, text: str, usage: Json) -> Json:
    """An answer in one piece."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return _head(answer_id, model, "chat.completion") | {"choices": [choice], "usage": usage}


def usage(body: Json, reply: Reply) -> Json:
    """Token counts; a token is a word of the prompt and a chunk of the answer."""
    prompt = sum(len(str(message.get("content") or "").split()) for message in body.get("messages", []))
    answer = len(reply.deltas())
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def error_event() -> bytes:
    """How SGLang tells of a failure within a stream."""
    return event({"error": {"message": "scripted failure", "type": "InternalServerError", "param": None, "code": 500}})


def finish_reason(reply: Reply) -> str:
    """`tool_calls` if any delta calls a tool."""
    return "tool_calls" if any("tool_calls" in delta for delta in reply.deltas()) else "stop"


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


def _head(answer_id: str, model: str, kind: str) -> Json:
    return {"id": answer_id, "object": kind, "created": 0, "model": model}
