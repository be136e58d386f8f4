"""Tasks without an end of their own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import logging
    from collections.abc import Coroutine


class LastingTasks:
    """Run until they are cancelled; one that ends by an error is logged as `failure`, else nobody would know."""

    def __init__(self, log: logging.Logger, failure: str) -> None:
        self._log = log
        self._failure = failure
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside everything else."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._report)
        self._tasks.append(task)

    async def cancel(self) -> None:
        """Cancel all of them and wait for their ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error(self._failure, exc_info=error)
