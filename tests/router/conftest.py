from __future__ import annotations

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from engines.fake_worker import FakeWorker, Reply, Script
from router.app import create_app
from router.config import RouterConfig
from router.lifecycle import Lifecycle
from router.server.serve import RouterServer, server_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

CHAT = "/v1/chat/completions"
FAST_HEALTH = {"interval_s": 0.05, "timeout_s": 0.3, "unhealthy_after": 2}


@dataclass
class RunningRouter:
    """A router on a real socket, with what tests look at."""

    url: str
    app: Any
    registry: CollectorRegistry
    lifecycle: Lifecycle
    client: httpx.AsyncClient
    server: RouterServer

    @property
    def pool(self) -> Any:
        return self.app.state.services.pool

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    async def chat(self, text: str = "hi", model: str = "small", **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
        return await self.client.post(CHAT, json=body, headers=headers)

    def sdk(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"api_key": "client-key", "max_retries": 0, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - what is waited for is another process or socket, not an event
                await asyncio.sleep(0.005)

    async def until_all_healthy(self) -> None:
        await self.until(lambda: all(worker.state == "healthy" for worker in self.pool.workers))

    async def until_idle(self) -> None:
        await self.until(lambda: all(worker.in_flight == 0 for worker in self.pool.workers))


@pytest.fixture
async def held() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as held:
        yield held


def fake_starter(held: AsyncExitStack) -> Callable[..., Any]:
    async def start(*responses: Reply, **script: Any) -> FakeWorker:
        return await held.enter_async_context(FakeWorker(Script(responses=responses or (Reply(),), **script)))

    return start


def router_starter(held: AsyncExitStack) -> Callable[..., Any]:
    async def start(
        models: dict[str, list[Any]], /, *, wait: bool = True, new_id: Any = None, grace_s: float = 30.0, **config: Any
    ) -> Any:
        urls = {name: [getattr(worker, "url", worker) for worker in workers] for name, workers in models.items()}
        # Without noise, so that no test depends on the id that its request happens to get.
        routing = {"ladder": ["small", "large"], "sigma": 0.0} if {"small", "large"} <= set(models) else {}
        routing |= config.pop("routing", {})
        of_model = config.pop("of_model", {})
        listed = [{"name": name, "workers": workers, **of_model.get(name, {})} for name, workers in urls.items()]
        settings = RouterConfig.model_validate({"models": listed, "routing": routing, "health": FAST_HEALTH} | config)
        registry, lifecycle = CollectorRegistry(), Lifecycle()
        options = {"new_id": new_id} if new_id else {}
        app = create_app(settings, registry=registry, lifecycle=lifecycle, **options)
        server = RouterServer(server_config(app, settings), lifecycle, grace_s)
        # asyncio turns Nagle's algorithm off only where the protocol is spelt out, as its own listeners have it.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        task = asyncio.create_task(server.serve(sockets=[listener]))

        async def stop() -> None:
            server.should_exit = True
            await task

        held.push_async_callback(stop)
        client = await held.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
        router = RunningRouter(url, app, registry, lifecycle, client, server)
        await router.until(lambda: server.started)
        if wait:
            await router.until_all_healthy()
        return router

    return start


async def router_for_two(held: AsyncExitStack) -> Any:
    fake = fake_starter(held)
    small, large = await fake(Reply(text="from small")), await fake(Reply(text="from large"))
    router = await router_starter(held)({"small": [small], "large": [large]})
    router.small, router.large = small, large
    return router


@pytest.fixture
def fake(held: AsyncExitStack) -> Callable[..., Any]:
    """Start a fake worker: `await fake(Reply(...), Reply(...), health="failing")`."""
    return fake_starter(held)


@pytest.fixture
def start_router(held: AsyncExitStack) -> Callable[..., Any]:
    """Start a router: `await start_router({"small": [worker], "large": [worker]}, upstream={...})`.

    With both models a ladder is configured. Waits for all workers unless `wait=False`. `of_model={"small": {...}}`
    adds settings of a model.
    """
    return router_starter(held)


@pytest.fixture
async def duo(held: AsyncExitStack) -> Any:
    """A router with one healthy worker for each of `small` and `large`; the workers are `duo.small`, `duo.large`."""
    return await router_for_two(held)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_duo() -> AsyncIterator[Any]:
    """`duo` for all tests of a module that have `loop_scope="module"`: only what was added may be counted."""
    async with AsyncExitStack() as held:
        yield await router_for_two(held)


@pytest.fixture
def closed_port_url() -> Iterator[str]:
    """A URL that nobody listens on: bound, so that nobody else gets it, and never listening."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def access_lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """The access log so far, parsed."""
    caplog.set_level("INFO", logger="crossfill.access")
    return lambda: [json.loads(entry.message) for entry in caplog.records if entry.name == "crossfill.access"]


@pytest.fixture
def is_error_object() -> Callable[[httpx.Response], bool]:
    """Whether an answer is the OpenAI error object, with the request id where it must be."""

    def check(response: httpx.Response) -> bool:
        error = response.json()["error"]
        assert response.headers["content-type"] == "application/json"
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        assert {"param", "code"} <= set(error)
        return bool(error["request_id"] == response.headers["x-request-id"])

    return check
