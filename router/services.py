"""What the endpoints work with, made once by `create_app` and handed to each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from router.config import RouterConfig
    from router.decision.decider import Decider
    from router.dispatch.dispatcher import Dispatcher
    from router.dispatch.workers import WorkerPool
    from router.sessions.memory import Sessions
    from router.stream.relay import Relay
    from router.telemetry.metrics import RouterMetrics
    from router.tenants.identity import Identity


@dataclass(slots=True)
class Lifecycle:
    """Whether the process has been told to stop; it then still serves, but is not ready.

    `exchanges` are the tasks that wait for a worker; `is_over` says that the time in which they may finish is over.
    """

    is_draining: bool = False
    is_over: bool = False
    exchanges: set[asyncio.Task[object]] = field(default_factory=set)

    def end(self) -> None:
        """Interrupt what still runs: every exchange tells its client, and ends."""
        self.is_over = True
        for task in self.exchanges:
            task.cancel()


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
    lifecycle: Lifecycle
    clock: Callable[[], float]
    started_s: int
