"""The HTTP server of a fake worker, and the record of what it was asked."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from dataclasses import asdict, dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Self

import uvloop
from aiohttp import web

from engines.fake_worker import shapes
from engines.fake_worker.script import Script, SlowHealth

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from engines.fake_worker.script import Health, Reply

_log = logging.getLogger("crossfill.fake_worker")

_LARGEST_BODY_BYTES = 64 * 2**20


@dataclass(slots=True)
class RecordedRequest:
    """A request as it came in. `headers` have lower-case names; `disconnected` says that the peer left early."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    disconnected: bool = False
    finished: bool = False


class FakeWorker:
    """Serves `script` while the context is open; port 0 lets the system choose.

    `health` may be changed at any time. After the context has been left it can be entered again, on the same port: a
    worker that died and came back. `requests`, `probes` and `most_probes_at_once` tell what happened.
    """

    def __init__(self, script: Script | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.script = script or Script()
        self.host = host
        self.port = port
        self.health: Health = self.script.health
        self.requests: list[RecordedRequest] = []
        self.probes = 0
        self.most_probes_at_once = 0
        self._probes_now = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base URL, known once the context has been entered."""
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_LARGEST_BODY_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._generate),
                web.post("/v1/completions", self._generate),
                web.get("/_fake/requests", self._recorded),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None, "entered before it is left"
        await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        self.probes += 1
        self._probes_now += 1
        self.most_probes_at_once = max(self.most_probes_at_once, self._probes_now)
        try:
            if self.health == "hanging":
                await asyncio.Event().wait()
            if isinstance(self.health, SlowHealth):
                await asyncio.sleep(self.health.slow_s)
        finally:
            self._probes_now -= 1
        return web.Response(status=503 if self.health == "failing" else 200)

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.script.model, "object": "model", "created": 0, "owned_by": "sglang"}
        return web.json_response({"object": "list", "data": [card]})

    async def _recorded(self, _: web.Request) -> web.Response:
        return web.json_response([asdict(request) for request in self.requests])

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        reply = self.script.responses[min(len(self.requests), len(self.script.responses) - 1)]
        headers = {name.lower(): value for name, value in request.headers.items()}
        record = RecordedRequest(request.path, headers, body)
        self.requests.append(record)
        try:
            answer = _ANSWERS[request.path](body, self.script.model)
            response = await _Exchange(request, body, reply, answer).run()
        except (asyncio.CancelledError, ConnectionResetError):
            record.disconnected = True
            raise
        record.finished = True
        return response


_ANSWERS = {"/v1/chat/completions": shapes.ChatAnswer, "/v1/completions": shapes.CompletionAnswer}


class _Kind(Enum):
    OPENING = auto()
    CONTENT = auto()
    END = auto()


class _Exchange:
    """One answer."""

    def __init__(self, request: web.Request, body: dict[str, Any], reply: Reply, answer: shapes.Answer) -> None:
        self._request = request
        self._body = body
        self._reply = reply
        self._answer = answer
        self._gzip = shapes.Gzip() if reply.gzip else None

    async def run(self) -> web.StreamResponse:
        """Answer as scripted."""
        reply = self._reply
        if reply.hang:
            await asyncio.Event().wait()
        await asyncio.sleep(reply.ttft_s)
        if reply.close_before_headers:
            return self._drop(web.Response())
        if reply.status != 200:
            return self._error(reply.status, reply.body)
        if reply.reuse_refusal is not None and self._requires_reuse():
            return self._error(409, shapes.reuse_refused(reply.reuse_refusal))
        return await self._stream() if self._body.get("stream") else self._whole()

    def _drop(self, response: web.StreamResponse) -> web.StreamResponse:
        # What has been written still goes out; the body then lacks its end.
        if self._request.transport is not None:
            self._request.transport.close()
        return response

    def _headers(self, content_type: str) -> dict[str, str]:
        encoding = {"content-encoding": "gzip"} if self._gzip else {}
        return {"content-type": content_type, **encoding, **self._reply.all_headers()}

    def _requires_reuse(self) -> bool:
        """Whether the router's word on this request is that it may not be answered without reuse."""
        said = (self._body.get("custom_params") or {}).get("crossfill") or {}
        return bool(said.get("reuse") == "require")

    def _piece(self, data: bytes) -> bytes:
        return self._gzip.piece(data) if self._gzip else data

    def _error(self, status: int, body: str | dict[str, Any] | None) -> web.Response:
        text, content_type = (body, "text/plain") if isinstance(body, str) else (json.dumps(body), "application/json")
        data = self._piece(text.encode()) + (self._gzip.end() if self._gzip else b"")
        return web.Response(status=status, body=data, headers=self._headers(content_type))

    def _whole(self) -> web.Response:
        answer = self._answer.whole(self._reply)
        raw = self._reply.raw_chunks
        data = b"".join(raw) if raw is not None else json.dumps(answer, ensure_ascii=False).encode()
        data = self._piece(data) + (self._gzip.end() if self._gzip else b"")
        return web.Response(body=data, headers=self._headers("application/json"))

    async def _stream(self) -> web.StreamResponse:
        response = web.StreamResponse(headers=self._headers("text/event-stream"))
        await response.prepare(self._request)
        sent = 0
        for data, kind in self._events():
            if kind is not _Kind.OPENING and sent == self._reply.close_after_chunks:
                return self._drop(response)
            if kind is not _Kind.OPENING and sent == self._reply.error_event_after:
                await response.write(self._piece(shapes.error_event()))
                return response
            if kind is _Kind.CONTENT and sent:
                await asyncio.sleep(self._reply.inter_token_s)
            await response.write(self._piece(data))
            sent += kind is _Kind.CONTENT
        if sent == self._reply.close_after_chunks:
            return self._drop(response)
        if self._gzip:
            await response.write(self._gzip.end())
        return response

    def _events(self) -> Iterator[tuple[bytes, _Kind]]:
        """The body of the stream, a write each."""
        reply = self._reply
        if reply.raw_chunks is not None:
            yield from ((data, _Kind.CONTENT) for data in reply.raw_chunks)
            return
        yield from ((data, _Kind.OPENING) for data in self._answer.opening())
        yield from ((data, _Kind.CONTENT) for piece in reply.pieces() for data in self._answer.events(piece))
        yield from ((data, _Kind.END) for data in self._answer.closing(reply))
        if not reply.no_done:
            yield shapes.DONE, _Kind.END


def run(script: Script, host: str = "127.0.0.1", port: int = 30000) -> None:
    """Serve `script` until SIGTERM or SIGINT."""
    uvloop.run(_serve(script, host, port))


async def _serve(script: Script, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with FakeWorker(script, host=host, port=port) as worker:
        _log.info("fake worker for %s listens on %s", script.model, worker.url)
        await stop.wait()
