"""What the endpoints work with, made once by `create_app` and handed to each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.config import RouterConfig
    from router.decision.decider import Decider
    from router.dispatch.dispatcher import Dispatcher
    from router.dispatch.workers import WorkerPool
    from router.lifecycle import Lifecycle
    from router.offload import Offload
    from router.sessions.memory import Sessions
    from router.shared_store import SharedStore
    from router.stream.relay import Relay
    from router.telemetry.metrics import RouterMetrics
    from router.tenants.identity import Identity


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a router. `clock` is monotonic, `started_s` Unix time, both in seconds."""

    config: RouterConfig
    identity: Identity
    pool: WorkerPool
    decider: Decider
    dispatcher: Dispatcher
    relay: Relay
    sessions: Sessions
    metrics: RouterMetrics
    store: SharedStore
    lifecycle: Lifecycle
    offload: Offload
    clock: Callable[[], float]
    started_s: int
