"""The seam to workers: HTTP requests out, bytes in. aiohttp's errors end here."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, Self

import aiohttp

from router.errors import ConnectFailedError, ConnectionLostError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

# SGLang's HTTP server closes an idle connection after 5 s; a request must not meet one that is just closing.
_KEEP_IDLE_S = 3.0

# aiohttp's own limit of 8 KiB would make one wordy header the end of a connection, and that of a worker's health.
_LONGEST_HEADER_BYTES = 64 * 2**10


class UpstreamResponse(Protocol):
    """Status and headers of a worker's answer, and its body as it comes. Must be closed."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Names, as sent, and values."""
        ...

    async def read_some(self) -> bytes:
        """The bytes that are there, at least one; empty at the end. Raises ConnectionLostError."""
        ...

    async def read_all(self) -> bytes:
        """The whole rest of the body. Raises ConnectionLostError."""
        ...

    async def read_at_most(self, limit_bytes: int) -> bytes:
        """The rest of the body, or its first `limit_bytes` bytes. Raises ConnectionLostError."""
        ...

    def close(self) -> None:
        """Give the connection back if the body is complete, else close it at once."""
        ...


class Transport(Protocol):
    """Sends requests to workers; an async context manager that holds the connections."""

    async def __aenter__(self) -> Self:
        """Open."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        ...

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> UpstreamResponse:
        """Send a request and wait for the head of its answer. Raises ConnectFailedError, ConnectionLostError."""
        ...

    async def get_status(self, url: str) -> int:
        """The status that a GET is answered with. Raises ConnectFailedError, ConnectionLostError."""
        ...


class AiohttpTransport:
    """Transport on an aiohttp session. Apart from `connect_s` it sets no limit: callers do.

    The session keeps no cookies (they would leak between clients), follows no redirects, uses no proxy from the
    environment and has no bound on connections (one slow worker must not hold up others).
    """

    def __init__(self, connect_s: float) -> None:
        self._connect_s = connect_s
        self._open_session: aiohttp.ClientSession | None = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._open_session is not None, "the transport is used outside its context"
        return self._open_session

    async def __aenter__(self) -> Self:
        self._open_session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=self._connect_s, sock_connect=self._connect_s, sock_read=None
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"user-agent": "crossfill-router"},
            max_field_size=_LONGEST_HEADER_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> UpstreamResponse:
        """See Transport."""
        with self._translated():
            return _AiohttpResponse(await self._session.post(url, headers=headers, data=body, allow_redirects=False))

    async def get_status(self, url: str) -> int:
        """See Transport."""
        with self._translated():
            async with self._session.get(url, allow_redirects=False) as response:
                return response.status

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            message = f"no connection within the connect limit of {self._connect_s:g} s (upstream.connect_s)"
            raise ConnectFailedError(message, timed_out=True) from error
        except aiohttp.ClientConnectorError as error:
            raise ConnectFailedError(f"no connection: {_told(error)}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLostError(_told(error)) from error


class _AiohttpResponse:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> list[tuple[str, str]]:
        return list(self._response.headers.items())

    async def read_some(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLostError(_told(error)) from error

    async def read_all(self) -> bytes:
        try:
            return await self._response.content.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLostError(_told(error)) from error

    async def read_at_most(self, limit_bytes: int) -> bytes:
        body = bytearray()
        while len(body) < limit_bytes and (chunk := await self.read_some()):
            body += chunk
        return bytes(body[:limit_bytes])

    def close(self) -> None:
        # Of a complete answer the connection has already gone back to the pool, and this does nothing.
        self._response.close()


def _told(error: BaseException) -> str:
    """Never empty: some of these exceptions have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
