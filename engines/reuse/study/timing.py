"""What share of its dense attention a receiver's guided layers take, and how much faster they are when guided."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.guided_attention import guided_attention
from crossfill_kernels.paged_attention import paged_attention
from crossfill_kernels.rows import BLOCK, rows_at
from engines.models.progress import Progress, silent
from engines.reuse.study.passages import passage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from crossfill_kernels.blocks import BlockIndex
    from engines.reuse.guided import GuidedLayer
    from engines.reuse.study.pair import Pair


@dataclass(frozen=True)
class AttentionTimes:
    """Seconds of one prefill's attention; each list has one figure a round.

    Attributes:
        dense_s: of all layers, computed densely.
        dense_guided_s: of those that can be guided, computed densely.
        guided_s: of the same, guided.
        prepare_s: unpacking, mixing and selecting for them, which a worker does beside the computation.
        density: of their masks.
    """

    dense_s: Sequence[float]
    dense_guided_s: Sequence[float]
    guided_s: Sequence[float]
    prepare_s: Sequence[float]
    density: float

    @property
    def share(self) -> float:
        """f: of the dense attention time, what guided layers take."""
        return statistics.median(own / whole for own, whole in zip(self.dense_guided_s, self.dense_s, strict=True))

    @property
    def speed_up(self) -> float:
        """k: dense over guided time of these layers."""
        return statistics.median(old / new for old, new in zip(self.dense_guided_s, self.guided_s, strict=True))

    @property
    def speed_up_prepared(self) -> float:
        """What k would be if preparing were done in the computation's own time."""
        return statistics.median(
            old / (new + extra)
            for old, new, extra in zip(self.dense_guided_s, self.guided_s, self.prepare_s, strict=True)
        )


def time_attention(
    pair: Pair, tokens: int, *, chunk: int, rounds: int, seed: int, progress: Progress = silent
) -> AttentionTimes:
    """Time every layer of the receiver's prefill both ways, in turns, on what the layer really attends to.

    Args:
        tokens: of the prompt; the row block of the last one is dense, as in a worker.
        chunk: rows that are computed at once, as in a worker.
        rounds: how often; a text of its own each, and one more to warm up.
        seed: of the texts.
    """
    stage = f"{tokens} tokens, attention"
    clocks = []
    densities = []
    for number in range(rounds + 1):
        progress(stage, number, rounds + 1)
        ids = passage(pair.receiver.tokenizer, tokens, seed + number)
        left = pair.leave(ids)
        started_s = time.perf_counter()
        guides = pair.guides(left, (tokens - 1) // BLOCK)
        clock = _Clock(guides, chunk, time.perf_counter() - started_s, guided_first=number % 2 == 1)
        pair.receiver.hidden(ids, clock)
        clocks.append(clock)
        densities.append(statistics.fmean(one.density(one.places) for one in guides.values()))
    progress(stage, rounds + 1, rounds + 1)
    kept = clocks[1:]
    return AttentionTimes(
        [sum(one.dense_s.values()) for one in kept],
        [sum(one.dense_s[layer] for layer in one.guided_s) for one in kept],
        [sum(one.guided_s.values()) for one in kept],
        [one.prepare_s for one in kept],
        statistics.fmean(densities[1:]),
    )


class _Clock:
    """Computes a layer densely and, where it can be, guided as well, and goes on with the dense result."""

    def __init__(self, guides: Mapping[int, GuidedLayer], chunk: int, prepare_s: float, *, guided_first: bool) -> None:
        self._guides = guides
        self._chunk = chunk
        self._guided_first = guided_first
        self.prepare_s = prepare_s
        self.dense_s: dict[int, float] = {}
        self.guided_s: dict[int, float] = {}

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `Attend`."""
        out = torch.empty_like(query)
        guide = self._guides.get(layer)
        kinds = [None] if guide is None else [guide, None] if self._guided_first else [None, guide]
        for kind in kinds:
            target = out if kind is None else torch.empty_like(query)
            steps = list(self._steps(query.shape[0], kind))
            started_s = time.perf_counter()
            for start, stop, context, index in steps:
                rows, slots = rows_at(range(start, stop)), slice(0, context)
                q, o = query[start:stop], target[start:stop]
                if index is None:
                    paged_attention(q, keys, values, slots, rows, scale=scale, out=o)
                else:
                    guided_attention(q, keys, values, slots, rows, index, scale=scale, out=o)
            taken = self.dense_s if kind is None else self.guided_s
            taken[layer] = time.perf_counter() - started_s
        return out

    def _steps(self, count: int, guide: GuidedLayer | None) -> Iterator[tuple[int, int, int, BlockIndex | None]]:
        """First row, the row after the last, context and index of each call."""
        guided = 0 if guide is None else BLOCK * len(guide.places)
        for start in range(0, count, self._chunk):
            stop = min(count, start + self._chunk)
            cut = max(start, min(stop, guided))
            if guide is not None and cut > start:
                yield start, cut, stop, guide.part(start // BLOCK, (cut - 1) // BLOCK)
            if stop > cut:
                yield cut, stop, stop, None
