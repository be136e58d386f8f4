"""POST /v1/chat/completions, and POST /v1/route, which decides the same way and sends nothing."""

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from router.api.json_response import JsonResponse
from router.body import BodyReader, parse_json_object
from router.client import while_client_listens
from router.decider import Decide
from router.errors import AnsweredError
from router.namespace import LOCAL_TENANT, extra_key
from router.record import record_of
from router.request import ChatRequest, parse_chat
from router.services import Services


def chat_routes(services: Services) -> APIRouter:
    """The two endpoints that take a chat request."""
    routes = APIRouter()

    limits = services.config.limits
    reader = BodyReader(limits)

    async def read_and_prepare(request: Request) -> tuple[ChatRequest, Decide]:
        record = record_of(request.scope)

        def understand(body: bytes) -> tuple[ChatRequest, Decide]:
            record.received_s = services.clock()
            chat = parse_chat(parse_json_object(body, limits), limits)
            situation = services.sessions.situation(record, chat.payload, extra_key(LOCAL_TENANT, chat.cache_salt))
            return chat, services.decider.prepare(chat, record.request_id, situation)

        return await reader.read(request, understand)

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        record_of(request.scope).is_chat = True
        chat, decide = await read_and_prepare(request)
        return ChatExchange(chat, decide, services)

    @routes.post("/v1/route")
    async def route(request: Request) -> Response:
        _, decide = await read_and_prepare(request)
        decision = record_of(request.scope).decision = decide(services.pool.unavailable())
        return JsonResponse(decision.to_json())

    return routes


class ChatExchange(Response):
    """The rest of a chat request after it has been understood: dispatch and relay, while the client listens."""

    def __init__(self, chat: ChatRequest, decide: Decide, services: Services) -> None:
        super().__init__()
        self._chat = chat
        self._decide = decide
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises AnsweredError before the first byte; after it, errors are told within the stream."""
        record, relay = record_of(scope), self._services.relay
        heartbeat = relay.heartbeat(send, is_stream=self._chat.stream)
        try:
            async with while_client_listens(receive, self._services.lifecycle):
                async with heartbeat:
                    answer = await self._services.dispatcher.open(self._chat, self._decide, record)
                await relay.send_answer(
                    answer,
                    send,
                    record,
                    passes_usage=self._chat.wants_usage,
                    is_one_choice=self._chat.has_one_choice,
                    has_begun=heartbeat.has_begun,
                )
        except AnsweredError as error:
            if not heartbeat.has_begun:
                raise
            await relay.send_error(error, send, record)
