"""How near a receiver stays to its dense prefill by maps, beside being guided, and what the kernels take."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from crossfill_kernels.guided_attention import guided_attention
from crossfill_kernels.map_attention import map_attention
from crossfill_kernels.paged_attention import paged_attention
from crossfill_kernels.rows import BLOCK, rows_at
from engines.models.progress import Progress, silent
from engines.reuse.map_records import union
from engines.reuse.study.maps import leave_maps
from engines.reuse.study.network import dense
from engines.reuse.study.pair import Planned
from engines.reuse.study.passages import passage, recollection
from engines.reuse.study.quality import CONTINUATION, Quality
from engines.reuse.study.runs import distance, in_conversations, recalled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from crossfill_kernels.blocks import BlockIndex, PackedMap
    from engines.models.needle import Needle
    from engines.reuse.study.network import Attend
    from engines.reuse.study.pair import Pair


class Way(StrEnum):
    """How a prefix is prefilled."""

    DENSE = "dense"
    GUIDED = "guided"
    MAP = "map"
    HYBRID = "hybrid"


@dataclass(frozen=True)
class MapStudy:
    """Of one length.

    Attributes:
        ways: quality; of `map` and `hybrid` the densities are those of positions that some head keeps.
        mapped_layers: of `hybrid`, one a text.
        kernel_s: of one text, seconds of the attention of all guided layers by way; `map, paper` is Algorithm 2.
    """

    ways: dict[Way, Quality]
    mapped_layers: list[int]
    kernel_s: dict[str, float]


def study_maps(
    pair: Pair, tokens: int, *, texts: int, needles: Sequence[Needle], seed: int, progress: Progress = silent
) -> MapStudy:
    """Continuations of `texts` passages, and `needles` in conversations, after prefixes of `tokens` tokens.

    Args:
        pair: whose settings say what maps keep, and up to which density `hybrid` uses them.
        tokens: a multiple of 64; all of them are reused.
        texts: how many continuations.
        needles: to recall, of which eight share a conversation.
        seed: of texts.
    """
    if tokens % BLOCK:
        raise ValueError(f"want whole row blocks of {BLOCK} tokens, got {tokens} tokens")
    found = MapStudy({way: Quality() for way in Way}, [], {})
    groups = in_conversations(needles)
    stage, total = f"{tokens} tokens, quality", len(Way) * (texts + len(groups))
    done = 0
    progress(stage, 0, total)
    for number in range(texts + len(groups)):
        own_seed, talk = seed + number, None
        if number >= texts:
            talk = recollection(pair.receiver.tokenizer, groups[number - texts], tokens, own_seed)
        ids = talk.tokens if talk else passage(pair.receiver.tokenizer, tokens + CONTINUATION, own_seed)
        exact = torch.empty(0)
        for way, density, attend in _ways(pair, ids, tokens // BLOCK, found):
            hidden = pair.receiver.hidden(ids, attend)
            quality = found.ways[way]
            quality.densities.append(density)
            if talk:
                quality.recalled += recalled(pair.receiver, hidden, talk)
            else:
                logs = pair.receiver.log_probabilities(hidden[tokens:])
                exact = logs if way is Way.DENSE else exact
                divergence, agreement = distance(exact, logs)
                quality.divergence.append(divergence)
                quality.agreement.append(agreement)
            done += 1
            progress(stage, done, total)
    return found


def _ways(pair: Pair, ids: Sequence[int], pages: int, study: MapStudy) -> list[tuple[Way, float, Attend]]:
    guides = pair.guides(pair.leave(ids), pages)
    indices = {layer: one.index for layer, one in guides.items()}
    kept = {layer: one.density(range(pages)) for layer, one in guides.items()}
    of_sender = leave_maps(pair, ids, top_p=pair.settings.map_top_p)
    maps = {layer: of_sender[sender] for layer, sender in pair.settings.guided.items()}
    unions = {layer: union(one) for layer, one in maps.items()}
    sparse = {layer: maps[layer] for layer in maps if unions[layer] <= pair.settings.map_density}
    study.mapped_layers.append(len(sparse))
    if not study.kernel_s:
        clock = _Clock(pair.weights, indices, maps, pages * BLOCK)
        pair.receiver.hidden(ids, clock)
        study.kernel_s.update(clock.seconds)
    rows = frozenset(range(pages))
    hybrid = {layer: unions[layer] if layer in sparse else kept[layer] for layer in kept}
    return [
        (Way.DENSE, 1.0, dense),
        (Way.GUIDED, statistics.fmean(kept.values()), Planned(guides, rows)),
        (Way.MAP, statistics.fmean(unions.values()), Planned(guides, rows, maps, pair.weights)),
        (Way.HYBRID, statistics.fmean(hybrid.values()), Planned(guides, rows, sparse, pair.weights)),
    ]


class _Clock:
    """Computes the mapped rows of each guided layer every way there is, and goes on with the dense result."""

    def __init__(
        self,
        weights: Mapping[int, torch.Tensor],
        indices: Mapping[int, BlockIndex],
        maps: Mapping[int, PackedMap],
        rows: int,
    ) -> None:
        self._weights, self._indices, self._maps, self._count = weights, indices, maps, rows
        self.seconds = {"dense": 0.0, "guided": 0.0, "map": 0.0, "map, paper": 0.0}

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `Attend`."""
        if layer in self._maps:
            rows, slots = rows_at(range(self._count)), slice(0, query.shape[0])
            q, out = query[: self._count], torch.empty_like(query[: self._count])
            packed, weights, index = self._maps[layer], self._weights[layer], self._indices[layer]
            self._time("dense", lambda: paged_attention(q, keys, values, slots, rows, scale=scale, out=out))
            self._time("guided", lambda: guided_attention(q, keys, values, slots, rows, index, scale=scale, out=out))
            self._time("map", lambda: map_attention(packed, weights, values, slots, rows, out=out))
            self._time("map, paper", lambda: map_attention(packed, weights, values, slots, rows, out=out, form="paper"))
        return dense(layer, query, keys, values, scale)

    def _time(self, name: str, work: Callable[[], object]) -> None:
        started_s = time.perf_counter()
        work()
        self.seconds[name] += time.perf_counter() - started_s
