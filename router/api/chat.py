"""POST /v1/chat/completions, /v1/completions, and /v1/route, which decides the same way and sends nothing."""

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request, Response
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
from router.request.options import require_available
from router.services import Services
from router.stream.client import while_client_listens
from router.telemetry.record import record_of
from router.tenants.namespace import extra_key

Parse = Callable[[JsonObject, LimitsConfig, Sequence[str]], GenerationRequest]


def chat_routes(services: Services) -> APIRouter:
    """The endpoints that take a request for text."""
    routes = APIRouter()

    limits = services.config.limits
    reader = BodyReader(limits)

    async def read_and_prepare(request: Request, parse: Parse) -> tuple[GenerationRequest, Decide]:
        tenant = services.identity.identify(request.scope)
        record, option_headers = record_of(request.scope), request.headers.getlist("crossfill")

        def understand(body: bytes) -> tuple[GenerationRequest, Decide]:
            record.received_s = services.clock()
            asked = parse(parse_json_object(body, limits), limits, option_headers)
            require_available(asked.options, can_reuse=services.pool.can_reuse)
            record.namespace = extra_key(tenant, asked.cache_salt, asked.options.reuse)
            situation = services.sessions.situation(record, asked.payload, record.namespace, asked.options.session)
            return asked, services.decider.prepare(asked, record.request_id, situation)

        return await reader.read(request, understand)

    async def generate(request: Request, parse: Parse) -> Response:
        record_of(request.scope).is_generation = True
        asked, decide = await read_and_prepare(request, parse)
        return Exchange(asked, decide, services)

    @routes.post(ChatRequest.path)
    async def chat_completions(request: Request) -> Response:
        return await generate(request, parse_chat)

    @routes.post(CompletionRequest.path)
    async def completions(request: Request) -> Response:
        return await generate(request, parse_completion)

    @routes.post("/v1/route")
    async def route(request: Request) -> Response:
        _, decide = await read_and_prepare(request, parse_either)
        decision = record_of(request.scope).decision = decide(services.pool.unavailable())
        return JsonResponse(decision.to_json())

    return routes


class Exchange(Response):
    """The rest of a request for text after it has been understood: dispatch and relay, while the client listens."""

    def __init__(self, asked: GenerationRequest, decide: Decide, services: Services) -> None:
        super().__init__()
        self._asked = asked
        self._decide = decide
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises AnsweredError before the first byte; after it, errors are told within the stream."""
        record, relay = record_of(scope), self._services.relay
        heartbeat = relay.heartbeat(send, is_stream=self._asked.stream)
        try:
            async with while_client_listens(receive, self._services.lifecycle):
                async with heartbeat:
                    answer = await self._services.dispatcher.open(self._asked, self._decide, record)
                await relay.send_answer(
                    answer,
                    send,
                    record,
                    passes_usage=self._asked.wants_usage,
                    is_one_choice=self._asked.choices == 1,
                    has_begun=heartbeat.has_begun,
                )
        except AnsweredError as error:
            if not heartbeat.has_begun:
                raise
            await relay.send_error(error, send, record)
