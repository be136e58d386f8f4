"""Request bytes to a JSON object, refused at the door when too large, too slow, too deep, too rich or not JSON."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect

from router.errors import BodyTooLargeError, ClientGoneError, InvalidRequestError, UploadTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from router.config import LimitsConfig
    from router.errors import JsonObject
    from router.offload import Offload

Understood = TypeVar("Understood")


class BodyReader:
    """Reads bodies and has them understood, in a thread if they are large."""

    def __init__(self, limits: LimitsConfig, offload: Offload) -> None:
        self._limits = limits
        self._offload = offload

    async def read(self, request: Request, understand: Callable[[bytes], Understood]) -> Understood:
        """What `understand` makes of the body of `request`; it must be safe to call in a thread.

        Raises what it raises, BodyTooLargeError, UploadTimeoutError, or ClientGoneError if the client leaves while
        sending.
        """
        try:
            async with asyncio.timeout(self._limits.upload_s):
                body = await _read_bytes(request, self._limits.body_bytes)
        except TimeoutError as error:
            raise UploadTimeoutError(self._limits.upload_s) from error
        return await self._offload.run(partial(understand, body), len(body))


async def _read_bytes(request: Request, limit_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise BodyTooLargeError(limit_bytes)
    body = bytearray()
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > limit_bytes:
                raise BodyTooLargeError(limit_bytes)
            body += chunk
    except ClientDisconnect as error:
        raise ClientGoneError("the client left while it sent its request") from error
    return bytes(body)


def parse_json_object(body: bytes, limits: LimitsConfig) -> JsonObject:
    """`body` as a JSON object within `limits`; raises InvalidRequestError."""
    openings = _openings(body)
    may_be_rich = openings + body.count(b",") >= limits.json_values
    if may_be_rich:
        _refuse_certainly_rich(body, limits.json_values)
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # The parser has a limit of its own, above any that can be configured.
        if "depth limit" in error.msg or "ecursion" in error.msg:
            raise _too_deep(limits.nesting_depth) from error
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError("The request body must be a JSON object.", code="invalid_json")
    # A level opens with a bracket, so few brackets in the text (counted in C) spare the walk.
    if may_be_rich or openings > limits.nesting_depth:
        _walk(parsed, limits)
    return parsed


def _openings(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


def _refuse_certainly_rich(body: bytes, limit: int) -> None:
    """Refuse before parsing what would cost a second to parse and as long to free. Every step here is one loop in C."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # A value and its key have four quotation marks at most; more also means that splitting at them would be dear.
    if unescaped.count(b'"') > 4 * limit:
        raise _too_rich(limit)
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    if max(_openings(outside_strings), outside_strings.count(b",")) > limit:
        raise _too_rich(limit)


def _walk(parsed: dict[str, Any], limits: LimitsConfig) -> None:
    """Walk level by level, without recursion, so that no input can exhaust the stack."""
    level: list[dict[str, Any] | list[Any]] = [parsed]
    values = 1
    for _ in range(limits.nesting_depth):
        values += sum(map(len, level))
        if values > limits.json_values:
            raise _too_rich(limits.json_values)
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _too_deep(limits.nesting_depth)


def _too_deep(limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"The request body is nested deeper than {limit} levels.", code="nesting_too_deep")


def _too_rich(limit: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"The request body holds more than {limit} values (limits.json_values).", code="too_many_values"
    )
