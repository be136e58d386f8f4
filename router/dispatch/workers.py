"""Workers as the router sees them: state, load, and the choice among those of a model."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

from router.config import AffinityConfig
from router.dispatch.affinity import PlacementReason, place
from router.sessions.prefix_mirror import ENTRY_BYTES, PrefixMatch, PrefixMirror
from router.sessions.prompt import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from router.config import ModelConfig, SystemRole
    from router.dispatch.affinity import Placement

_log = logging.getLogger("crossfill.workers")


class WorkerState(StrEnum):
    """`starting` is a worker that has never been seen healthy."""

    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class Worker:
    """One worker process. `id` is `<model>/<index in the configuration>`; it is public, the URL is not.

    `system_role` is how its model takes system turns. `last_life_s` is when it last sent anything (monotonic clock),
    `slow` says that probes fail while it still works, `can_reuse` that it can reuse what other models computed.
    `prefixes` is what it has prefilled since it became healthy, in at most
    `mirror_entries` digests. `on_change` is called after each change of `state` and `in_flight`.
    """

    def __init__(
        self,
        model: str,
        index: int,
        url: str,
        mirror_entries: int = 0,
        system_role: SystemRole = "system",
        *,
        can_reuse: bool = False,
    ) -> None:
        self.model = model
        self.system_role: SystemRole = system_role
        self.id = f"{model}/{index}"
        self.url = url
        self.state = WorkerState.STARTING
        self.slow = False
        self.prefixes = PrefixMirror(mirror_entries)
        self.can_reuse = can_reuse
        self.in_flight = 0
        self.failures = 0
        self.last_life_s = float("-inf")
        self.probe_now = asyncio.Event()
        self.on_change: Callable[[Worker], None] = lambda _: None

    def saw_life(self, now_s: float) -> None:
        """The worker sent part of an answer: it is alive, whatever probes say."""
        self.last_life_s = now_s
        if self.state is not WorkerState.HEALTHY:
            self._become(WorkerState.HEALTHY, "it answers requests")

    def saw_refusal(self, now_s: float) -> None:
        """The worker refused a request as the client's fault: a sign of life, and no proof that it can serve."""
        self.last_life_s = now_s

    def probe_succeeded(self) -> None:
        """`/health` answered."""
        self.failures = 0
        self.slow = False
        self._become(WorkerState.HEALTHY, "its probe succeeded")

    def probe_failed(self, reason: str, *, limit: int, is_working: bool) -> None:
        """`/health` did not answer. A worker that is working is slow, not dead; otherwise `limit` failures end it."""
        self.slow = is_working
        if is_working:
            return
        self.failures += 1
        if self.failures >= limit:
            self._fail(f"{self.failures} probes failed in a row: {reason}")

    def connection_failed(self, reason: str) -> None:
        """A connection failed: take it out at once, and probe it soon."""
        self._fail(reason)
        self.probe_now.set()

    def _fail(self, reason: str) -> None:
        if self.state is WorkerState.HEALTHY:
            self._become(WorkerState.UNHEALTHY, reason)

    def _become(self, state: WorkerState, reason: str) -> None:
        if state is self.state:
            return
        level = logging.WARNING if state is WorkerState.UNHEALTHY else logging.INFO
        _log.log(level, "worker %s (%s) is %s: %s", self.id, self.url, state.value, reason)
        self.state = state
        if state is WorkerState.HEALTHY:
            # It may have been started anew, with an empty cache.
            self.prefixes.clear()
        self.on_change(self)


class WorkerPool:
    """All workers, by model. The memory of `affinity` is shared out evenly among them."""

    def __init__(self, models: Sequence[ModelConfig], affinity: AffinityConfig | None = None) -> None:
        self._affinity = affinity or AffinityConfig()
        entries = self._affinity.mirror_bytes // sum(len(model.workers) for model in models) // ENTRY_BYTES
        self._by_model = {
            model.name: tuple(
                Worker(model.name, index, url, entries, model.system_role, can_reuse=model.reuses)
                for index, url in enumerate(model.workers)
            )
            for model in models
        }
        self._turn = dict.fromkeys(self._by_model, 0)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Every worker."""
        return tuple(worker for workers in self._by_model.values() for worker in workers)

    @property
    def by_model(self) -> dict[str, tuple[Worker, ...]]:
        """Workers by model name, in the order of the configuration."""
        return dict(self._by_model)

    @property
    def reusing(self) -> frozenset[str]:
        """Models with a worker that can reuse what other models computed, healthy or not."""
        return frozenset(worker.model for worker in self.workers if worker.can_reuse)

    def unavailable(self, tried: Collection[Worker] = ()) -> frozenset[str]:
        """Models that have no healthy worker outside `tried`."""
        return frozenset(model for model in self._by_model if not self._candidates(model, tried))

    def longest_match(self, model: str, prompt: Prompt) -> PrefixMatch:
        """The most that a healthy worker of `model` holds of `prompt`. May be called from any thread."""
        matches = [worker.prefixes.match(prompt) for worker in self._candidates(model, ())]
        return max(matches, key=lambda match: match.blocks, default=PrefixMatch())

    def pick(self, model: str, tried: Collection[Worker] = (), prompt: Prompt | None = None) -> Placement | None:
        """A healthy worker, by prefix and load; slow ones last, equals take turns. None if there is none."""
        candidates = self._candidates(model, tried)
        if not candidates:
            return None
        turn = self._turn[model]
        rotated = [candidates[(turn + offset) % len(candidates)] for offset in range(len(candidates))]
        quick = [worker for worker in rotated if not worker.slow]
        placement = place(quick or rotated, prompt or Prompt(), self._affinity)
        # Neither a return to a prefix nor a second attempt is a turn taken: conversations of two turns, or requests
        # that each fail once, would all meet the same worker.
        if not tried and placement.reason is not PlacementReason.PREFIX:
            self._turn[model] = turn + 1
        return placement

    def _candidates(self, model: str, tried: Collection[Worker]) -> list[Worker]:
        return [
            worker for worker in self._by_model[model] if worker.state is WorkerState.HEALTHY and worker not in tried
        ]


@contextmanager
def in_flight(worker: Worker) -> Iterator[None]:
    """Count one request on `worker` while the context is open."""
    worker.in_flight += 1
    worker.on_change(worker)
    try:
        yield
    finally:
        worker.in_flight -= 1
        worker.on_change(worker)
