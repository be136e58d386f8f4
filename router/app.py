"""Puts a router together. Everything that it depends on comes in here; there are no globals."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from router.api.admin import admin_routes
from router.api.edge import Edge
from router.api.error_handlers import add_error_handlers
from router.api.generation import generation_routes
from router.api.models import model_routes
from router.api.openapi import openapi_routes
from router.api.status import status_routes
from router.decision.decider import Decider, build_scorer
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.health import HealthMonitor
from router.dispatch.transport import AiohttpTransport
from router.dispatch.workers import WorkerPool
from router.lifecycle import Lifecycle
from router.offload import Offload
from router.request.ids import random_hex
from router.services import Services
from router.sessions.memory import Sessions
from router.shared_store import SharedStore
from router.stream.relay import Relay
from router.telemetry.metrics import RouterMetrics
from router.telemetry.shared_metrics import OwnRegistry
from router.tenants.identity import Identity
from router.tenants.keyring import Keyrings, KeyWatch, open_keyrings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from prometheus_client import CollectorRegistry

    from router.config import RouterConfig
    from router.decision.scorers import Scorer
    from router.dispatch.transport import Transport


def create_app(
    config: RouterConfig,
    *,
    transport: Transport | None = None,
    scorer: Scorer | None = None,
    registry: CollectorRegistry | None = None,
    lifecycle: Lifecycle | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    new_id: Callable[[], str] = random_hex,
) -> FastAPI:
    """The ASGI application for `config`; its lifespan holds the connections to the workers and their probes.

    `clock` is monotonic and `wall_clock` Unix time, both in seconds. Raises ConfigError if a configured file is bad.
    """
    transport = transport or AiohttpTransport(config.upstream.connect_s)
    lifecycle = lifecycle or Lifecycle()
    offload = Offload()
    pool = WorkerPool(config.models, config.affinity)
    metrics = RouterMetrics(registry or OwnRegistry())
    metrics.watch_workers(pool.workers)
    sessions = Sessions(config, pool, metrics.sessions)
    dispatcher = Dispatcher(
        config,
        pool=pool,
        sessions=sessions,
        transport=transport,
        metrics=metrics,
        offload=offload,
        clock=clock,
        new_id=new_id,
    )
    keyrings = open_keyrings(config.auth)
    services = Services(
        config=config,
        identity=Identity(keyrings, metrics),
        pool=pool,
        decider=Decider(config, scorer or build_scorer(config.routing)),
        dispatcher=dispatcher,
        relay=Relay(metrics, sessions, lifecycle, config.streams, clock),
        sessions=sessions,
        metrics=metrics,
        store=SharedStore(config.store, metrics.registry, clock=clock),
        lifecycle=lifecycle,
        offload=offload,
        clock=clock,
        started_s=int(wall_clock()),
    )
    monitor = HealthMonitor(pool.workers, transport, config.health, clock)
    app = _assemble(services, transport, monitor, keyrings)
    app.add_middleware(Edge, metrics=metrics, clock=clock, wall_clock=wall_clock, new_id=new_id)
    return app


def _assemble(services: Services, transport: Transport, monitor: HealthMonitor, keyrings: Keyrings) -> FastAPI:
    clients, operators = (KeyWatch(ring, services.metrics) for ring in (keyrings.clients, keyrings.operators))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with transport, monitor, clients, operators, services.store:
            yield

    # Bodies are checked by the router itself, so FastAPI's own document would say nothing; no redirects either,
    # because a client that follows one may lose its method and body.
    app = FastAPI(title="Crossfill", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.services = services
    app.router.routes.extend(generation_routes(services))
    app.include_router(model_routes(services))
    app.include_router(status_routes(services))
    app.include_router(admin_routes(services))
    app.include_router(openapi_routes(services))
    add_error_handlers(app)
    return app
