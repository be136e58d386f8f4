"""Server-sent events seen from outside: where they end, and what they mean for accounting. Bytes stay as they are."""

from __future__ import annotations

import re

import orjson

from router.worker_answers import told_error

# Two line ends in a row; atomic, or CR LF alone would count as two.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_LONGEST_HELD_BYTES = 2**20

_CONTENT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal", "audio")


class EventMeter:
    """Takes the bytes of a stream as they come and gives back those that may go on: whole events only.

    An event reaches the client in one piece, so an error frame can always follow. `has_content`, `has_error` and
    `is_done` tell what went by; `is_inside_event` that a huge event had to be passed on in parts.
    """

    def __init__(self) -> None:
        self.has_content = False
        self.has_error = False
        self.is_done = False
        self.is_inside_event = False
        self._held = b""
        self._is_first = True

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that now make whole events; the rest is held."""
        data = self._held + chunk if self._held else chunk
        end = 0
        for blank in _BLANK_LINE.finditer(data):
            self._account(data[end : blank.start()])
            end = blank.end()
        if len(data) - end > _LONGEST_HELD_BYTES:
            self._held, self.is_inside_event, self.has_content = b"", True, True
            return data
        self._held = data[end:]
        return data[:end]

    def finish(self) -> bytes:
        """The held rest if it is a last event without its blank line; a torn event is dropped, as the SSE rules say."""
        rest, self._held = self._held, b""
        if not rest.strip():
            return rest
        was_done, had_error = self.is_done, self.has_error
        self._account(rest.rstrip(b"\r\n"))
        return rest if (self.is_done, self.has_error) != (was_done, had_error) else b""

    def _account(self, event: bytes) -> None:
        if self._is_first:
            # A stream may begin with one; it belongs to no field name.
            self._is_first = False
            event = event.removeprefix(_BYTE_ORDER_MARK)
        if self.is_inside_event:
            # The tail of an event whose head has already gone; its meaning is unknown.
            self.is_inside_event = False
            return
        if self.has_content and b"error" not in event and b"[DONE]" not in event:
            return
        data = _data(event)
        if data == b"[DONE]":
            self.is_done = True
        elif data:
            self._account_data(data)

    def _account_data(self, data: bytes) -> None:
        try:
            parsed = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if told_error(parsed):
            self.has_error = True
        elif isinstance(parsed, dict):
            self.has_content = self.has_content or _has_content(parsed.get("choices"))


def _data(event: bytes) -> bytes:
    """The data lines of an event, joined; comments and other fields are left out."""
    values = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(values).strip()


def _has_content(choices: object) -> bool:
    if not isinstance(choices, list):
        return False
    deltas = [choice.get("delta") for choice in choices if isinstance(choice, dict)]
    return any(isinstance(delta, dict) and any(delta.get(field) for field in _CONTENT_FIELDS) for delta in deltas)
