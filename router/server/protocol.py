"""HTTP/1.1 by uvicorn and httptools, with what uvicorn leaves open: its own answers, limits, and offers to upgrade."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.config import LimitsConfig
from router.errors import ClientError, HeadTooLargeError, InvalidRequestError, error_object
from router.request.ids import random_hex, request_id

if TYPE_CHECKING:
    import asyncio

_HEAD_LIMIT_BYTES = 64 * 2**10

_FRAMING = (b"content-length", b"transfer-encoding")


class _HeadIsTooLargeError(Exception):
    """Stops the parser."""


class RouterProtocol(HttpToolsProtocol):
    """A connection of a client.

    Bytes that never reach the application are answered with the error object too. A client that takes nothing of its
    answer for `limits.client_write_s` is cut off, which the application sees as any other departure.
    """

    limits = LimitsConfig()
    _write_timer: asyncio.TimerHandle | None = None
    _is_in_head = False
    _has_begun_now = False
    _is_replaying_head = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._unset_keepalive_if_required()
        self._has_begun_now = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            is_head_too_large = isinstance(error.__context__, _HeadIsTooLargeError)
            self._refuse(
                HeadTooLargeError(_HEAD_LIMIT_BYTES)
                if is_head_too_large
                else InvalidRequestError("Invalid HTTP request received.", code="invalid_http")
            )
            return
        # The parser tells of a header when it is complete; one without an end would be collected for ever.
        if self._is_in_head and not self._has_begun_now:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_LIMIT_BYTES:
                self._refuse(HeadTooLargeError(_HEAD_LIMIT_BYTES))

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._decline_upgrade()
            else:
                return

    def _decline_upgrade(self) -> None:
        """Go on in HTTP/1.1, as a server may (RFC 9110, 7.8), here for clients that offer h2c.

        The parser stops after the head and takes the body for the other protocol. A fresh one, with a head that says
        no more than how the body is framed, reads on.
        """
        self.parser = httptools.HttpRequestParser(self)
        framing = b"".join(name + b": " + value + b"\r\n" for name, value in self.headers if name in _FRAMING)
        self._is_replaying_head = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        finally:
            self._is_replaying_head = False

    def on_message_begin(self) -> None:
        """A request begins."""
        if not self._is_replaying_head:
            self._is_in_head = self._has_begun_now = True
            self._head_bytes = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the URL came."""
        if not self._is_replaying_head:
            self._count_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header came."""
        if not self._is_replaying_head:
            self._count_head(len(name) + len(value))
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if not self._is_replaying_head:
            self._is_in_head = False
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is complete, unless the parser only believes that another protocol follows."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _count_head(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > _HEAD_LIMIT_BYTES:
            raise _HeadIsTooLargeError

    def pause_writing(self) -> None:
        """The client does not take what is sent."""
        super().pause_writing()
        self._cancel_write_timer()
        self._write_timer = self.loop.call_later(self.limits.client_write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It takes it again."""
        self._cancel_write_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._cancel_write_timer()
        super().connection_lost(exc)

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """The connection has been idle; closing it would wait for a client that never takes the rest of an answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _refuse(self, error: ClientError) -> None:
        """Answer and close; within an answer there is no room for another one."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            own_id = request_id(random_hex())
            body = orjson.dumps(error_object(error, own_id))
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                "content-type: application/json\r\nconnection: close\r\n"
                f"content-length: {len(body)}\r\nx-request-id: {own_id}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def protocol_with(limits: LimitsConfig) -> type[RouterProtocol]:
    """The protocol under `limits`; uvicorn makes its instances itself and passes nothing of ours."""
    return type("LimitedProtocol", (RouterProtocol,), {"limits": limits})
