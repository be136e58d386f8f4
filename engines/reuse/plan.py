"""How the rows of one request are prefilled, or why not with the help of others; frozen when its turn comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crossfill_kernels.rows import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cache_store.client.fetch import Fetch
    from engines.reuse.guided import GuidedLayer, GuidedLayers
    from engines.reuse.settings import PairSettings


@dataclass(frozen=True, slots=True)
class Run:
    """Rows at positions [start, stop) that are computed alike."""

    start: int
    stop: int
    guided: bool

    @property
    def blocks(self) -> tuple[int, int]:
        """First and last row block."""
        return self.start // BLOCK, (self.stop - 1) // BLOCK


@dataclass
class Plan:
    """Which row blocks are guided, by whom; layers come from the fetch as the computation asks for them.

    Attributes:
        pair: whose masses.
        pages: row blocks, ascending.
        density: mean of guided layers, estimated from those that had come when the plan was frozen.
    """

    pair: PairSettings
    pages: frozenset[int]
    density: float
    _fetch: Fetch[GuidedLayers | None]
    _layers: dict[int, GuidedLayers | None] = field(default_factory=dict)

    def is_guided(self, layer: int) -> bool:
        """Whether rows of this receiver layer are."""
        return layer in self.pair.guided

    def has_come(self, layer: int) -> bool:
        """Whether it is known what guides a receiver layer."""
        sender = self.pair.guided[layer]
        return sender in self._layers or self._fetch.ready(sender)

    def layer(self, layer: int) -> GuidedLayer | None:
        """What guides a receiver layer; None if it has not come, or is not usable."""
        sender = self.pair.guided[layer]
        if sender not in self._layers:
            if not self._fetch.ready(sender):
                return None
            self._layers[sender] = self._fetch.take(sender)
        layers = self._layers[sender]
        return None if layers is None else layers[layer]

    def end(self) -> None:
        """No further layer is wanted."""
        self._fetch.cancel()
        self._layers.clear()


def dense_run(start: int, stop: int) -> tuple[Run, ...]:
    """All rows computed as always."""
    return (Run(start, stop, guided=False),)


def runs_of(start: int, stop: int, pages: frozenset[int]) -> tuple[Run, ...]:
    """The rows [start, stop) of a chunk, cut where guided and other row blocks meet."""
    return tuple(_runs(start, stop, pages))


def _runs(start: int, stop: int, pages: frozenset[int]) -> Iterator[Run]:
    at = start
    while at < stop:
        guided = at // BLOCK in pages
        end = at
        while end < stop and (end // BLOCK in pages) == guided:
            end = min(stop, (end // BLOCK + 1) * BLOCK)
        yield Run(at, end, guided)
        at = end


def pages_to_guide(covered: Sequence[bool], prefix: int, total: int) -> frozenset[int]:
    """Row blocks that a receiver computes and has masses for.

    Args:
        covered: whether the store has all layers, of each complete page of the prompt.
        prefix: tokens that the receiver has in its own cache.
        total: tokens of the prompt. The row block of the last one, whose answer is asked for, is never guided.
    """
    last = (total - 1) // BLOCK
    return frozenset(
        page for page, is_covered in enumerate(covered) if is_covered and page < last and (page + 1) * BLOCK > prefix
    )


def rows_in(pages: frozenset[int], prefix: int) -> int:
    """Rows of these row blocks that lie beyond the prefix."""
    return sum(BLOCK - max(0, prefix - page * BLOCK) for page in pages)
