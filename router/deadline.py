"""Time limits of a worker request: each phase has its own, all share the total."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.errors import UpstreamTimeoutError

if TYPE_CHECKING:
    from types import TracebackType


class Deadline:
    """Starts to count when it is made, on the clock of the running event loop."""

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._now_s = asyncio.get_running_loop().time
        self._end_s = self._now_s() + total_s

    def phase(self, name: str, limit_s: float) -> Phase:
        """A context whose body is bounded by `limit_s` from now and by what is left of the total."""
        end_s = self._now_s() + limit_s
        if self._end_s < end_s:
            return Phase("total", self._total_s, self._end_s)
        return Phase(name, limit_s, end_s)


class Phase:
    """An async context that raises UpstreamTimeoutError, with its name and limit, at `end_s` of the loop's clock.

    A class and not a generator: it is entered for every chunk of every stream.
    """

    __slots__ = ("_limit_s", "_name", "_timeout", "end_s")

    def __init__(self, name: str, limit_s: float, end_s: float) -> None:
        self._name = name
        self._limit_s = limit_s
        self.end_s = end_s
        self._timeout = asyncio.timeout_at(end_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as timeout:
            raise UpstreamTimeoutError(self._name, self._limit_s) from timeout
