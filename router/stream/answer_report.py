"""How an answer came about, told within it to clients that ask: `crossfill: {"report": true}`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from router.request.options import NAME

if TYPE_CHECKING:
    from router.errors import JsonObject

_WHITESPACE = b" \t\r\n"
_QUOTED = b'"%s"' % NAME.encode()


def with_report(body: bytes, report: JsonObject) -> bytes:
    """`body`, a JSON object, with the member `crossfill` in addition; anything else is left as it is.

    The member is put before the last brace, so that all the rest stays byte for byte and a large body is not parsed
    once more. Only where the word is in the body is it parsed, and written anew if it has such a member itself.
    """
    whole = body.strip(_WHITESPACE)
    if not (whole.startswith(b"{") and whole.endswith(b"}")):
        return body
    if _QUOTED in body and NAME in (parsed := _parsed(body)):
        return orjson.dumps({**parsed, NAME: report})
    inner = whole[:-1].rstrip(_WHITESPACE)
    comma = b"" if inner.endswith(b"{") else b","
    return b"".join((inner, comma, _QUOTED, b":", orjson.dumps(report), b"}"))


def report_comment(report: JsonObject) -> bytes:
    """The same for a stream: a comment, which readers of server-sent events do not see."""
    return b": " + NAME.encode() + b" " + orjson.dumps(report) + b"\n\n"


def _parsed(body: bytes) -> JsonObject:
    try:
        parsed: JsonObject = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return parsed
