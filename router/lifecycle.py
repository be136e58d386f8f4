"""Whether the process has been told to stop, and what then still runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


@dataclass(slots=True)
class Lifecycle:
    """A process that was told to stop still serves, but is not ready.

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
