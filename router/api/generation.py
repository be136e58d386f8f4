"""POST /v1/chat/completions, /v1/completions, and /v1/route, which decides the same way and sends nothing."""

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router.api.json_response import JsonResponse
from router.config import LimitsConfig
from router.decision.decider import Decide
from router.errors import AnsweredError, JsonObject
from router.request.body import BodyReader, parse_json_object
from router.request.generation import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
    parse_either,
)
from router.services import Services
from router.stream.client import while_client_listens
from router.telemetry.record import record_of
from router.tenants.namespace import extra_key

Parse = Callable[[JsonObject, LimitsConfig, Sequence[str]], GenerationRequest]


def generation_routes(services: Services) -> list[Route]:
    """The endpoints that take a request for text.

    Plain ASGI applications and not FastAPI's path functions: those have nothing to do here, bodies being the router's
    own matter, and each byte of an answer would pass through their layers.
    """
    door = Door(services)
    return [
        PlainRoute(ChatRequest.path, Generate(door, parse_chat, services), methods=["POST"]),
        PlainRoute(CompletionRequest.path, Generate(door, parse_completion, services), methods=["POST"]),
        PlainRoute("/v1/route", DryRun(door, services), methods=["POST"]),
    ]


class PlainRoute(Route):
    """Puts itself on the scope, as FastAPI's own routes do, for those who count and log by route."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that matched."""
        scope["route"] = self
        await super().handle(scope, receive, send)


class Door:
    """Reads a request for text and prepares its decision; what is wrong with it ends here."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._limits = services.config.limits
        self._reader = BodyReader(self._limits, services.offload)

    async def read(self, scope: Scope, receive: Receive, parse: Parse) -> tuple[GenerationRequest, Decide]:
        """The request and the way to its decision. Raises AnsweredError, ClientGoneError."""
        services, request = self._services, Request(scope, receive)
        tenant = services.identity.identify(scope)
        record, option_headers = record_of(scope), request.headers.getlist("crossfill")

        def understand(body: bytes) -> tuple[GenerationRequest, Decide]:
            record.received_s, record.body_bytes = services.clock(), len(body)
            asked = parse(parse_json_object(body, self._limits), self._limits, option_headers)
            record.namespace = extra_key(tenant, asked.cache_salt, asked.options.reuse)
            situation = services.sessions.situation(record, asked, record.namespace)
            return asked, services.decider.prepare(asked, record.request_id, situation, services.pool.reusing)

        return await self._reader.read(request, understand)


class DryRun:
    """Decides and tells the decision."""

    def __init__(self, door: Door, services: Services) -> None:
        self._door = door
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises AnsweredError."""
        _, decide = await self._door.read(scope, receive, parse_either)
        decision = record_of(scope).decision = decide(self._services.pool.unavailable())
        await JsonResponse(decision.to_json())(scope, receive, send)


class Generate:
    """Understands a request, then dispatches it and relays the answer while the client listens."""

    def __init__(self, door: Door, parse: Parse, services: Services) -> None:
        self._door = door
        self._parse = parse
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises AnsweredError before the first byte; after it, errors are told within the stream."""
        record, relay = record_of(scope), self._services.relay
        record.is_generation = True
        asked, decide = await self._door.read(scope, receive, self._parse)
        heartbeat = relay.heartbeat(send, is_stream=asked.stream)
        try:
            async with while_client_listens(receive, self._services.lifecycle):
                async with heartbeat:
                    answer = await self._services.dispatcher.open(asked, decide, record)
                await relay.send_answer(
                    answer,
                    send,
                    record,
                    passes_usage=asked.wants_usage,
                    is_one_choice=asked.choices == 1,
                    has_begun=heartbeat.has_begun,
                    wants_report=asked.options.report,
                )
        except AnsweredError as error:
            if not heartbeat.has_begun:
                raise
            await relay.send_error(error, send, record)
