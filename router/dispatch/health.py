"""Probing of workers: one background task each, never more than one probe outstanding."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Self

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
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._watch(worker)) for worker in self._workers]
        for task in self._tasks:
            task.add_done_callback(_report_failure)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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


def _report_failure(task: asyncio.Task[None]) -> None:
    """A probe task has no end of its own; one that ends by an error would leave its worker unwatched without a word."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a probe task ended, its worker is no longer watched", exc_info=error)
