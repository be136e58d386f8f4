"""Time limits of a worker request: each phase has its own, all share the total."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.errors import UpstreamTimeoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Deadline:
    """Starts to count when it is made, on the clock of the running event loop."""

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._now_s = asyncio.get_running_loop().time
        self._end_s = self._now_s() + total_s

    def phase(self, name: str, limit_s: float) -> Phase:
        """A phase that begins now, bounded by `limit_s` and by what is left of the total."""
        end_s = self._now_s() + limit_s
        if self._end_s < end_s:
            return Phase("total", self._total_s, self._end_s)
        return Phase(name, limit_s, end_s)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a worker request that ends at `end_s` of the loop's clock at the latest."""

    name: str
    limit_s: float
    end_s: float

    @property
    def error(self) -> UpstreamTimeoutError:
        """What to raise when it has run out."""
        return UpstreamTimeoutError(self.name, self.limit_s)

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """A context whose body is ended with `error` when the phase has run out."""
        try:
            async with asyncio.timeout_at(self.end_s):
                yield
        except TimeoutError as timeout:
            raise self.error from timeout
