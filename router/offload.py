"""Work on large bodies, in threads, so that other requests go on meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

# About a millisecond of work, which a change of thread is worth.
_OFF_LOOP_BYTES = 64 * 2**10

# Threads take turns with the event loop for the interpreter; more of them would leave it too small a share.
_MOST_AT_ONCE = 2


class Offload:
    """Runs work here or in a thread, by the size of what it is about."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)

    async def run(self, work: Callable[[], Result], size_bytes: int) -> Result:
        """What `work` gives; it must be safe to call in a thread."""
        if size_bytes <= _OFF_LOOP_BYTES:
            return work()
        async with self._turns:
            return await asyncio.to_thread(work)
