"""How the rows of one request are prefilled, or why not with the help of others; frozen when its turn comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crossfill_kernels.rows import BLOCK
from engines.reuse.settings import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from cache_store.client.fetch import Fetch
    from engines.reuse.guided import GuidedLayer
    from engines.reuse.map_records import StoredMap
    from engines.reuse.metrics import MapMissed
    from engines.reuse.prepared import Prepared
    from engines.reuse.settings import PairSettings


@dataclass(frozen=True, slots=True)
class Run:
    """Rows at positions [start, stop) that are computed alike; `mapped` ones are guided where a map cannot be used."""

    start: int
    stop: int
    guided: bool
    mapped: bool = False

    @property
    def blocks(self) -> tuple[int, int]:
        """First and last row block."""
        return self.start // BLOCK, (self.stop - 1) // BLOCK


@dataclass
class Plan:
    """Which row blocks are guided, by whom; layers come from the fetch as the computation asks for them.

    Attributes:
        pair: whose masses.
        pages: row blocks that are guided.
        density: mean of guided layers, estimated from those that had come when the plan was frozen.
        mapped: row blocks of which there are maps too.
        weights: of each guided receiver layer float32 [H_S, H_R].
        unmapped: why no layer that had come then is computed by its map; None if one is, or none is wanted.
    """

    pair: PairSettings
    pages: frozenset[int]
    density: float
    _fetch: Fetch[Prepared | None]
    mapped: frozenset[int] = frozenset()
    weights: Mapping[int, torch.Tensor] = field(default_factory=dict)
    unmapped: MapMissed | None = None
    _layers: dict[int, Prepared | None] = field(default_factory=dict)

    @property
    def mode(self) -> ReuseMode:
        """What is reused, as far as was known when the plan was frozen."""
        return ReuseMode.MAP if self.pair.uses_maps and self.unmapped is None else ReuseMode.GUIDED

    def is_guided(self, layer: int) -> bool:
        """Whether rows of this receiver layer are."""
        return layer in self.pair.guided

    def has_come(self, layer: int) -> bool:
        """Whether it is known what guides a receiver layer."""
        sender = self.pair.guided[layer]
        return sender in self._layers or self._fetch.ready(sender)

    def layer(self, layer: int) -> GuidedLayer | None:
        """What guides a receiver layer; None if it has not come, or is not usable."""
        prepared = self._prepared(layer)
        return None if prepared is None else prepared.guided[layer]

    def map(self, layer: int) -> StoredMap | None:
        """The sender's map for a receiver layer; None if it has not come, or there is none."""
        prepared = self._prepared(layer)
        return None if prepared is None else prepared.map

    def end(self) -> None:
        """No further layer is wanted."""
        self._fetch.cancel()
        self._layers.clear()

    def _prepared(self, layer: int) -> Prepared | None:
        sender = self.pair.guided[layer]
        if sender not in self._layers:
            if not self._fetch.ready(sender):
                return None
            self._layers[sender] = self._fetch.take(sender)
        return self._layers[sender]


def dense_run(start: int, stop: int) -> tuple[Run, ...]:
    """All rows computed as always."""
    return (Run(start, stop, guided=False),)


def runs_of(start: int, stop: int, pages: frozenset[int], mapped: frozenset[int] = frozenset()) -> tuple[Run, ...]:
    """The rows [start, stop) of a chunk, cut where guided, mapped and other row blocks meet."""
    return tuple(_runs(start, stop, pages, mapped))


def _runs(start: int, stop: int, pages: frozenset[int], mapped: frozenset[int]) -> Iterator[Run]:
    at = start
    while at < stop:
        alike = at // BLOCK in pages, at // BLOCK in mapped
        end = at
        while end < stop and (end // BLOCK in pages, end // BLOCK in mapped) == alike:
            end = min(stop, (end // BLOCK + 1) * BLOCK)
        yield Run(at, end, *alike)
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
