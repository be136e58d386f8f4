"""Attention of a chunk in one layer: by a map, by chosen blocks, or dense, and what it leaves for others."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from cache_store.seldom import SeldomLog
from crossfill_kernels.block_mass import block_mass
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.errors import KernelError
from crossfill_kernels.guided_attention import guided_attention
from crossfill_kernels.map_attention import map_attention
from crossfill_kernels.paged_attention import paged_attention
from crossfill_kernels.rows import BLOCK
from engines.reuse.map_records import union
from engines.reuse.map_sender import CopiedLayer
from engines.reuse.metrics import MapMissed, Missed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import torch

    from crossfill_kernels.blocks import BlockIndex
    from crossfill_kernels.rows import Rows
    from engines.reuse.chunk import Chunk, Part
    from engines.reuse.map_reader import MapReader
    from engines.reuse.map_records import StoredMap
    from engines.reuse.metrics import ReuseMetrics

_log = logging.getLogger("crossfill.reuse")

_LOG_EVERY_S = 60.0


def _copied(query: torch.Tensor, keys: torch.Tensor, mass: BlockMass, scale: float) -> CopiedLayer:
    host = BlockMass(mass.mass.cpu(), mass.blocks.cpu(), mass.totals.cpu())
    return CopiedLayer(query.to("cpu", copy=True), keys.cpu(), host, scale)


class Layers:
    """Computes attention as plans say, on the scheduler's thread.

    Args:
        publish: layers whose masses are captured.
        pack: those of them whose queries and keys are copied, to be packed.
        maps: reads maps; None if this worker has no block pool.
    """

    def __init__(
        self,
        publish: Collection[int],
        metrics: ReuseMetrics,
        maps: MapReader | None = None,
        *,
        pack: Collection[int] = (),
    ) -> None:
        self._publish, self._pack = frozenset(publish), frozenset(pack)
        self._metrics = metrics
        self._maps = maps
        self._failures = SeldomLog(_log, _LOG_EVERY_S, time.monotonic)
        self.pace_s: float | None = None
        """Seconds of a row and a key of dense attention in one layer; unknown on a GPU, which does not wait for it."""
        self.skips_queries = False
        """Whether the model computes no queries of rows that maps compute; `engines.mapped_models` does."""

    def concerns(self, chunk: Chunk, layer: int) -> bool:
        """Whether anything but dense attention is to be computed of a chunk in this layer."""
        return any(self._wanted(chunk, layer))

    def mapped(self, chunk: Chunk, layer: int) -> Mapping[int, StoredMap]:
        """Parts of a chunk, by number, whose attention in this layer a map gives, so that queries are of no use.

        What is missing is counted; asked again, the answer is the same.
        """
        if layer not in chunk.maps:
            chunk.maps[layer] = dict(self._find_maps(chunk, layer))
        return chunk.maps[layer]

    def attend_maps(self, chunk: Chunk, layer: int, values: torch.Tensor, out: torch.Tensor) -> frozenset[int]:
        """Attention of the parts that maps give (MapFlow, Algorithm 2).

        Args:
            values: the layer's pool, with the values of these rows.
            out: [rows of the chunk, H, d]; what is written of other parts is nothing.

        Returns:
            The parts that are done; of others `out` is undefined, and they need queries.
        """
        done = set()
        for number, stored in self.mapped(chunk, layer).items():
            assert self._maps is not None
            assert chunk.plan is not None
            part = chunk.parts[number]
            own = out[chunk.place(part)]
            weights = chunk.plan.weights[layer].to(values.device)
            try:
                map_attention(self._maps.packed(stored), weights, values, chunk.slots, part.rows, out=own)
            except KernelError as error:
                self._metrics.count_map_missed(MapMissed.KERNEL)
                self._failures.warn(f"{chunk.request_id}: layer {layer} is not computed by its map: {error}")
                continue
            # The slots may have been given to others while they were read.
            if (missed := self._maps.used(stored)) is not None:
                self._metrics.count_map_missed(missed)
                continue
            self._metrics.count_mapped(part.rows.count)
            done.add(number)
        return frozenset(done)

    def note_skipped(self, chunk: Chunk, done: frozenset[int]) -> None:
        """No queries were computed of these parts in one layer."""
        self._metrics.count_skipped(sum(chunk.parts[number].rows.count for number in done))

    def attend(
        self,
        chunk: Chunk,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor,
        done: frozenset[int] | None = None,
    ) -> None:
        """Causal attention of a chunk's rows in one layer; other arguments as of `paged_attention`.

        Args:
            chunk: how its rows are computed; gets the masses that are to be published.
            layer: number of the model's layer.
            done: parts whose output is there; by default maps give what they can first.
        """
        slots = chunk.slots
        if done is None:
            done = self.attend_maps(chunk, layer, values, out)
        guided, captured = self._wanted(chunk, layer)
        if not (guided or captured):
            started_s = time.perf_counter()
            paged_attention(query, keys, values, slots, chunk.rows, scale=scale, out=out)
            self._note_pace(chunk.rows, time.perf_counter() - started_s, query.device.type)
            return
        for number, part in enumerate(chunk.parts):
            if number in done:
                continue
            own = chunk.place(part)
            q, o = query[own], out[own]
            index = self._index_of(chunk, part, layer) if guided and part.run.guided else None
            try:
                if part.captured and captured:
                    mass = block_mass(q, keys, values, slots, part.rows, scale=scale, out=o)
                    chunk.masses[layer] = mass
                    if layer in self._pack:
                        # The pool's slots are given to others once the request is gone.
                        own_keys = keys[slots].clone() if isinstance(slots, slice) else keys[slots]
                        chunk.copies[layer] = _copied(q, own_keys, mass, scale)
                    continue
                if index is not None:
                    guided_attention(q, keys, values, slots, part.rows, index.to(query.device), scale=scale, out=o)
                    continue
            except KernelError as error:
                self._metrics.count_missed(Missed.KERNEL)
                self._failures.warn(f"{chunk.request_id}: layer {layer} is computed densely: {error}")
            paged_attention(q, keys, values, slots, part.rows, scale=scale, out=o)

    def _wanted(self, chunk: Chunk, layer: int) -> tuple[bool, bool]:
        """Whether rows of a chunk are guided in this layer, and whether masses of it are published."""
        guided = chunk.plan is not None and chunk.plan.is_guided(layer)
        return guided, chunk.parts[0].captured and layer in self._publish

    def _find_maps(self, chunk: Chunk, layer: int) -> Iterator[tuple[int, StoredMap]]:
        plan = chunk.plan
        if plan is None or not plan.is_guided(layer):
            return
        for number, part in enumerate(chunk.parts):
            if part.run.mapped:
                found = self._map_of(chunk, part, layer)
                if isinstance(found, MapMissed):
                    self._metrics.count_map_missed(found)
                else:
                    yield number, found

    def _map_of(self, chunk: Chunk, part: Part, layer: int) -> StoredMap | MapMissed:
        plan, (first, last) = chunk.plan, part.run.blocks
        assert plan is not None
        if self._maps is None:
            return MapMissed.NO_POOL
        if not plan.has_come(layer):
            return MapMissed.LATE
        stored = plan.map(layer)
        if stored is None or not stored.covers(first, last):
            return MapMissed.ABSENT
        stored, most = stored.part(first, last), plan.pair.most_map_density
        if most < 1 and union(stored) > most:
            return MapMissed.TOO_DENSE
        return self._maps.missed(stored) or stored

    def _note_pace(self, rows: Rows, seconds: float, device: str) -> None:
        if device != "cpu" or rows.count < BLOCK:
            return
        pace_s = seconds / (rows.count * (rows.last + 1 - rows.count / 2))
        self.pace_s = pace_s if self.pace_s is None else 0.9 * self.pace_s + 0.1 * pace_s

    def _index_of(self, chunk: Chunk, part: Part, layer: int) -> BlockIndex | None:
        """The kept blocks of a guided part; None, counted, if they are not to be had."""
        assert chunk.plan is not None
        if not chunk.plan.has_come(layer):
            self._metrics.count_missed(Missed.LATE)
            return None
        of_layer, blocks = chunk.plan.layer(layer), part.run.blocks
        if of_layer is None:
            self._metrics.count_missed(Missed.MALFORMED)
            return None
        if not of_layer.covers(*blocks):
            self._metrics.count_missed(Missed.GONE)
            return None
        return of_layer.part(*blocks)
