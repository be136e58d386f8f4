"""Time limits of a worker request: each phase has its own, all share the total."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from router.errors import UpstreamTimeoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Deadline:
    """Starts to count when it is made; `end_s` is on the clock of the running event loop."""

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s
        self.end_s = asyncio.get_running_loop().time() + total_s

    @asynccontextmanager
    async def phase(self, name: str, limit_s: float) -> AsyncIterator[None]:
        """A context that raises UpstreamTimeoutError when its body takes longer than `limit_s`, or than is left."""
        end_s = asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(min(end_s, self.end_s)):
                yield
        except TimeoutError as error:
            if self.end_s < end_s:
                raise UpstreamTimeoutError("total", self.total_s) from error
            raise UpstreamTimeoutError(name, limit_s) from error
