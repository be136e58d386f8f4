"""Probing of workers: one background task each, never more than one probe outstanding."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Self

from router.background import LastingTasks
from router.errors import ConnectFailedError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from router.config import HealthConfig
    from router.dispatch.transport import Transport
    from router.dispatch.workers import Worker

_log = logging.getLogger("crossfill.workers")


class HealthMonitor:
    """Probes `workers` from entering the context to leaving it."""

    def __init__(
        self, workers: tuple[Worker, ...], transport: Transport, config: HealthConfig, clock: Callable[[], float]
    ) -> None:
        self._workers = workers
        self._transport = transport
        self._config = config
        self._clock = clock
        self._tasks = LastingTasks(_log, "a probe task ended, its worker is no longer watched")

    async def __aenter__(self) -> Self:
        for worker in self._workers:
            self._tasks.start(self._watch(worker))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.cancel()

    async def _watch(self, worker: Worker) -> None:
        while True:
            await self.probe(worker)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker.probe_now.wait(), self._config.interval_s)
            worker.probe_now.clear()

    async def probe(self, worker: Worker) -> None:
        """Ask `worker` once and note the result on it."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                status = await self._transport.get_status(worker.url + "/health")
        except ConnectFailedError as error:
            # Nobody listens: no reason to wait for further proof.
            worker.probe_failed(str(error), limit=1, is_working=False)
        except TimeoutError:
            self._note_failure(worker, f"no answer within {self._config.timeout_s:g} s")
        except TransportError as error:
            self._note_failure(worker, str(error))
        else:
            if 200 <= status < 300:
                worker.probe_succeeded()
            else:
                self._note_failure(worker, f"status {status}")

    def _note_failure(self, worker: Worker, reason: str) -> None:
        quiet_s = self._clock() - worker.last_life_s
        is_working = worker.in_flight > 0 and quiet_s <= self._config.timeout_s + self._config.interval_s
        worker.probe_failed(reason, limit=self._config.unhealthy_after, is_working=is_working)
