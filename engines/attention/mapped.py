"""A layer whose attention maps give for some rows: their queries are never computed (MapFlow, § Fused retrieval).

The attention of the models in `engines.mapped_models` asks here, layer by layer, before it projects anything.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engines.reuse.chunk import Chunk
    from engines.reuse.layers import Layers


class Projection(Protocol):
    """What a layer makes of its hidden states, for rows of the batch; positions are applied."""

    def whole(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [n, H, d], keys and values [n, H_kv, d]."""

    def queries(self, rows: slice) -> torch.Tensor:
        """Queries alone."""

    def keys(self, rows: slice) -> torch.Tensor:
        """Keys alone."""

    def values(self, rows: slice) -> torch.Tensor:
        """Values alone."""


class Aside(Protocol):
    """Where work is done that nobody waits for yet."""

    def start(self, work: Callable[[], None]) -> None:
        """Do it, after what was begun before."""

    def join(self) -> None:
        """What follows comes after it."""


class AtOnce:
    """On a device without streams."""

    def start(self, work: Callable[[], None]) -> None:
        """See `Aside.start`."""
        work()

    def join(self) -> None:
        """See `Aside.join`."""


class SideStream:
    """On a stream of its own. No GPU has run it yet.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, work: Callable[[], None]) -> None:
        """See `Aside.start`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """See `Aside.join`."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class MappedForward:
    """Knows the batch that is computed, and computes the layers of it in which maps take the place of queries.

    Args:
        pool: SGLang's KV pool.
        layers: of reuse.
        aside: where keys of mapped rows are computed, which only other rows look at.
    """

    def __init__(self, pool: Any, layers: Layers, aside: Aside) -> None:
        self._pool = pool
        self._layers = layers
        self._aside = aside
        self._chunks: list[tuple[slice, Chunk]] = []
        self.seconds = 0.0
        """Within attention, of all that was computed here; whoever counts them sets them back."""

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """These are computed next, whose rows follow one another in the batch; none while tokens are decoded."""
        self._chunks, start = [], 0
        for chunk in chunks:
            stop = start + chunk.rows.count
            self._chunks.append((slice(start, stop), chunk))
            start = stop

    def rows(self, layer: int) -> list[slice]:
        """Rows of the batch whose attention in a layer maps give, in order."""
        return [
            self._rows_of(own, chunk, number)
            for own, chunk in self._chunks
            for number in self._layers.mapped(chunk, layer)
        ]

    def attend(
        self, layer: Any, mapped: Sequence[slice], projection: Projection, locations: torch.Tensor
    ) -> torch.Tensor:
        """Keys and values into the pool, and attention of all rows.

        Args:
            layer: SGLang's RadixAttention module.
            mapped: what `rows` said, not empty.
            projection: of this layer.
            locations: [n], slots of the batch's rows.

        Returns:
            [n, H·d].
        """
        keys, values = (get(layer.layer_id) for get in (self._pool.get_key_buffer, self._pool.get_value_buffer))
        count = locations.numel()
        query = values.new_empty(count, layer.tp_q_head_num, layer.qk_head_dim)
        for rows in _others(mapped, count):
            query[rows], own_keys, own_values = projection.whole(rows)
            keys[locations[rows]], values[locations[rows]] = own_keys, own_values
        for rows in mapped:
            values[locations[rows]] = projection.values(rows)

        def store_keys() -> None:
            for rows in mapped:
                keys[locations[rows]] = projection.keys(rows)

        self._aside.start(store_keys)
        started_s = time.perf_counter()
        # Rows that no request owns (padding of the batch) stay zero rather than whatever memory held.
        out = torch.zeros_like(query)
        done = [self._layers.attend_maps(chunk, layer.layer_id, values, out[own]) for own, chunk in self._chunks]
        for (own, chunk), of_chunk in zip(self._chunks, done, strict=True):
            for number in self._layers.mapped(chunk, layer.layer_id).keys() - of_chunk:
                late = self._rows_of(own, chunk, number)
                query[late] = projection.queries(late)
            self._layers.note_skipped(chunk, of_chunk)
        self._aside.join()
        for (own, chunk), of_chunk in zip(self._chunks, done, strict=True):
            self._layers.attend(
                chunk, layer.layer_id, query[own], keys, values, scale=layer.scaling, out=out[own], done=of_chunk
            )
        self.seconds += time.perf_counter() - started_s
        return out.view(count, -1)

    def _rows_of(self, own: slice, chunk: Chunk, number: int) -> slice:
        place = chunk.place(chunk.parts[number])
        return slice(own.start + place.start, own.start + place.stop)


def _others(mapped: Sequence[slice], count: int) -> list[slice]:
    """What lies between the mapped rows of `count`."""
    bounds = [0, *(bound for rows in mapped for bound in (rows.start, rows.stop)), count]
    return [slice(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop]


_current: MappedForward | None = None


def current() -> MappedForward | None:
    """Of this process, if its worker uses maps."""
    return _current


def set_current(forward: MappedForward | None) -> None:
    """Have the models of this process ask `forward`."""
    global _current  # noqa: PLW0603 - SGLang makes models before backends, and gives neither to the other
    _current = forward
