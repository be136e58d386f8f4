"""Server-sent events seen from outside: where they end, and what they mean for accounting.

Bytes stay as they are, with three exceptions: a usage event that the client did not ask for is withheld, and what
`stream_repair` mends.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson

from router.dispatch.worker_answers import told_error
from router.stream.stream_repair import StreamRepair

if TYPE_CHECKING:
    from collections.abc import Mapping

# Two line ends in a row; atomic, or CR LF alone would count as two.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DONE = b"[DONE]"

# In a stream of one choice, an event after the first content that sets none of these (null does not count) is one more
# piece of content, and need not be parsed.
_PLAIN_START = b'data: {"id":'
_SPECIAL = re.compile(
    rb'"(?:error|tool_calls|finish_reason|usage)"\s*:\s*(?!null)|"object"\s*:\s*"error"|"choices"\s*:\s*\[\s*\]'
)

_LONGEST_HELD_BYTES = 2**20

# `text` is of text completions, whose choices have no delta.
_CONTENT_FIELDS = (
    "content",
    "reasoning_content",
    "reasoning",
    "tool_calls",
    "function_call",
    "refusal",
    "audio",
    "text",
)


class EventMeter:
    """Takes the bytes of a stream as they come and gives back those that may go on: whole events only.

    An event reaches the client in one piece, so an error frame can always follow. `content_events`, `has_error` and
    `is_done` tell what went by, `usage` is the last that the worker told; `is_inside_event` says that a huge event had
    to be passed on in parts. `repair` may change events. With `is_one_choice`, content after the first is recognised
    without being parsed. Without `keeps_mark`, a byte order mark is dropped: it belongs before everything else, and
    something has gone out already.
    """

    def __init__(
        self,
        *,
        passes_usage: bool = True,
        is_one_choice: bool = False,
        repair: StreamRepair | None = None,
        keeps_mark: bool = True,
    ) -> None:
        self.content_events = 0
        self.has_error = False
        self.is_done = False
        self.is_inside_event = False
        self.usage: Mapping[str, Any] | None = None
        self._passes_usage = passes_usage
        self._is_one_choice = is_one_choice
        self._repair = repair or StreamRepair()
        self._keeps_mark = keeps_mark
        self._held = b""
        self._is_first = True

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that now make whole events; the rest is held."""
        data = self._held + chunk if self._held else chunk
        if data.endswith(b"\n\n") and data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            # As good as always a read brings one event; this spares the search for all kinds of line ends.
            self._held = b""
            return self._pass(data[:-2], data)
        passed: list[bytes] = []
        end = 0
        for blank in _BLANK_LINE.finditer(data):
            passed.append(self._pass(data[end : blank.start()], data[end : blank.end()]))
            end = blank.end()
        if len(data) - end > _LONGEST_HELD_BYTES:
            self._held, self.is_inside_event = b"", True
            self.content_events += 1
            return b"".join(passed) + data[end:]
        self._held = data[end:]
        return passed[0] if len(passed) == 1 else b"".join(passed)

    def finish(self) -> bytes:
        """The held rest if it is a last event without its blank line; a torn event is dropped, as the SSE rules say."""
        rest, self._held = self._held, b""
        if self.is_inside_event or not rest.strip():
            return rest
        was_done, had_error = self.is_done, self.has_error
        event = rest.rstrip(b"\r\n")
        passed = self._pass(event, rest)
        if self.has_error and not had_error:
            # Without its blank line a client would not see it, and take the answer for whole.
            return event + b"\n\n"
        return passed if self.is_done and not was_done else b""

    def _pass(self, event: bytes, whole: bytes) -> bytes:
        """What the client gets of an event; `whole` is that with its blank line."""
        text = event
        if self._is_first:
            # A stream may begin with one; it belongs to no field name.
            self._is_first = False
            text = event.removeprefix(_BYTE_ORDER_MARK)
            if not self._keeps_mark:
                whole = whole.removeprefix(_BYTE_ORDER_MARK)
        if self.is_inside_event:
            # The tail of an event whose head has already gone; its meaning is unknown.
            self.is_inside_event = False
            return whole
        if self._is_more_of_the_same(text):
            self.content_events += 1
            return whole
        data = _data(text)
        if data == _DONE:
            self.is_done = True
            return _framed(self._repair.closing()) + whole
        return self._pass_data(text, data, whole) if data else whole

    def _is_more_of_the_same(self, event: bytes) -> bool:
        return (
            self._is_one_choice
            and self.content_events > 0
            and event.startswith(_PLAIN_START)
            and _SPECIAL.search(event) is None
        )

    def _pass_data(self, event: bytes, data: bytes, whole: bytes) -> bytes:
        try:
            parsed = orjson.loads(data)
        except orjson.JSONDecodeError:
            return whole
        if not isinstance(parsed, dict):
            return whole
        if told_error(parsed):
            self.has_error = True
            return whole
        choices = parsed.get("choices")
        if not isinstance(choices, list):
            return whole
        before = b""
        is_changed = self._repair.mend(parsed, choices)
        if isinstance(usage := parsed.get("usage"), dict):
            self.usage = usage
            if not choices:
                before = _framed(self._repair.closing())
            if not self._passes_usage:
                if not choices:
                    return before
                parsed["usage"], is_changed = None, True
        self.content_events += _has_content(choices)
        return before + (_rewritten(event, parsed) if is_changed else whole)


def _data(event: bytes) -> bytes:
    """The data lines of an event, joined; comments and other fields are left out."""
    if event.startswith(b"data: {") and b"\n" not in event and b"\r" not in event:
        return event[6:]
    values = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(values).strip()


def _framed(events: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)


def _rewritten(event: bytes, parsed: dict[str, Any]) -> bytes:
    """The event with other data; its other lines stay."""
    others = [line + b"\n" for line in event.splitlines() if not line.startswith(b"data:")]
    return b"".join(others) + b"data: " + orjson.dumps(parsed) + b"\n\n"


def _has_content(choices: list[Any]) -> bool:
    """Whether one of `choices` brings text, a tool call or the like."""
    for choice in choices:
        if isinstance(choice, dict):
            delta = choice.get("delta")
            said = delta if isinstance(delta, dict) else choice
            if any(said.get(field) for field in _CONTENT_FIELDS):
                return True
    return False
