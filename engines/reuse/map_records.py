"""Maps as records of pages: one row block of one sender layer, all heads (design: record `map`).

A payload has, of each head, a bit for every column block up to the diagonal, as records of masses have, then handles of
the kept blocks in a block pool, by column block and then by head. The blocks themselves never leave the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from cache_store.pool.handles import Handles, join, unpack
from cache_store.records import Kind, Record
from crossfill_kernels.blocks import PackedMap
from engines.errors import MapRecordError
from engines.reuse.bits import Bits, pack_bits, unpack_bits
from engines.reuse.mass_records import whole_blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from crossfill_kernels.blocks import MapStorage

DTYPE = "map1"
"""How the payload is read; another layout gets another name, and this one is then a miss."""


@dataclass(frozen=True)
class StoredMap:
    """One sender layer's kept attention, of the row blocks that were left; its blocks are slots of one pool.

    Attributes:
        heads: of the sender.
        blocks: int32 [R], row blocks, ascending.
        offsets: int32 [R + 1]; row block i owns entries `offsets[i]` … `offsets[i + 1] - 1`.
        columns: int32 [m], column block · heads + head, ascending within a row block.
        handles: m of them, in the same order.
    """

    heads: int
    blocks: torch.Tensor
    offsets: torch.Tensor
    columns: torch.Tensor
    handles: Handles

    @property
    def size_bytes(self) -> int:
        """Of the lists."""
        lists = sum(one.nbytes for one in (self.blocks, self.offsets, self.columns))
        return lists + self.handles.slots.nbytes + self.handles.generations.nbytes

    def covers(self, first: int, last: int) -> bool:
        """Whether it has row blocks `first` … `last`."""
        low, high = self._places(first, last)
        return high - low == last - first + 1

    def part(self, first: int, last: int) -> StoredMap:
        """Row blocks `first` … `last`, all of which it has."""
        low, high = self._places(first, last)
        start, stop = int(self.offsets[low]), int(self.offsets[high])
        return StoredMap(
            self.heads,
            self.blocks[low:high],
            self.offsets[low : high + 1] - start,
            self.columns[start:stop],
            self.handles[start:stop],
        )

    def packed(self, storage: MapStorage) -> PackedMap:
        """As kernels take it; what the slots hold is up to the pool."""
        slots = torch.from_numpy(self.handles.slots).to(storage.blocks.device)
        blocks, offsets, columns = (
            one.to(storage.blocks.device).contiguous() for one in (self.blocks, self.offsets, self.columns)
        )
        return PackedMap(self.heads, blocks, offsets, columns, slots, storage)

    def _places(self, first: int, last: int) -> tuple[int, int]:
        """Numbers of the first row block from `first` on, and of the first after `last`."""
        bounds = torch.tensor([first, last + 1], dtype=torch.int32)
        low, high = torch.searchsorted(self.blocks, bounds).tolist()
        return low, high


def union(lists: StoredMap | PackedMap, blocks: Collection[int] | None = None) -> float:
    """Positions that some head of a map keeps, as a share of the causal ones; 1 if it has none of the row blocks.

    Args:
        blocks: row blocks that are looked at; by default all.
    """
    row = torch.repeat_interleave(torch.arange(lists.blocks.numel()), lists.offsets.diff().long())
    chosen = lists.blocks if blocks is None else torch.tensor(sorted(blocks), dtype=torch.int32)
    wanted = torch.isin(lists.blocks, chosen)
    causal = int((lists.blocks[wanted].long() + 1).sum())
    position = (row << 32) | (lists.columns.long() // lists.heads)
    kept = torch.unique_consecutive(position[wanted[row]]).numel()
    return kept / causal if causal else 1.0


def pack_maps(
    packed: PackedMap, handles: Handles, layer: int, digests: Sequence[bytes], shard: tuple[int, int] = (0, 1)
) -> list[Record]:
    """One record for each row block.

    Args:
        packed: what was packed, of R row blocks.
        handles: of its entries, in their order.
        layer: of the model that computed it.
        digests: of the tokens up to each row block's end (`PageKey.tokens_digest`), R of them.
        shard: which part of the layer's heads these are, and of how many.
    """
    bounds, columns = packed.offsets.tolist(), packed.columns.numpy()
    records = []
    for row, (block, digest) in enumerate(zip(packed.blocks.tolist(), digests, strict=True)):
        own = slice(bounds[row], bounds[row + 1])
        kept = np.zeros((block + 1, packed.heads), dtype=bool)
        kept.reshape(-1)[columns[own]] = True
        payload = pack_bits(kept.T) + handles[own].pack()
        shape = packed.heads, block + 1
        records.append(Record(Kind.MAP, layer, shape, DTYPE, digest, payload, shard=shard[0], shards=shard[1]))
    return records


def unpack_maps(shards: Sequence[Mapping[int, Record]], heads: int) -> StoredMap:
    """The map of the row blocks that all shards have; the inverse of `pack_maps`.

    Of row blocks that were left by several pools (a sender that was started again makes a new one) only those of the
    last one's are taken, so that all blocks lie in one.

    Args:
        shards: records by row block, of each part of the heads in order.
        heads: that the sender has in all.

    Raises:
        MapRecordError: there is none, or one is not of this layout, of its share of the heads and of its row block.
    """
    if not (blocks := whole_blocks(shards)):
        raise MapRecordError("no row block was left")
    found = {block: [_parts(records[block], heads // len(shards), block) for records in shards] for block in blocks}
    pool = found[blocks[-1]][0][1].pool
    joined = {
        block: _joined(parts) for block, parts in found.items() if all(handles.pool == pool for _, handles in parts)
    }
    if not joined:
        raise MapRecordError("shards of the last row block lie in several pools")
    columns = [own_columns for own_columns, _ in joined.values()]
    offsets = np.cumsum([0, *map(len, columns)], dtype=np.int32)
    return StoredMap(
        heads,
        torch.tensor([*joined], dtype=torch.int32),
        torch.from_numpy(offsets),
        torch.from_numpy(np.concatenate(columns)),
        join([handles for _, handles in joined.values()]),
    )


def _joined(parts: Sequence[tuple[Bits, Handles]]) -> tuple[np.ndarray, Handles]:
    """Columns and handles of all heads, by column block and then by head, from those of parts of the heads."""
    bits = np.concatenate([one for one, _ in parts])
    heads = len(bits)
    first = np.cumsum([0, *(len(one) for one, _ in parts)])
    # Of each part its entries come by column block and then by head.
    numbers = [np.argwhere(one.T) @ (heads, 1) + low for (one, _), low in zip(parts, first, strict=False)]
    order = np.argsort(np.concatenate(numbers), kind="stable")
    return np.flatnonzero(bits.T).astype(np.int32), join([handles for _, handles in parts])[order]


def _parts(record: Record, heads: int, block: int) -> tuple[np.ndarray, Handles]:
    """Set bits [H, block + 1] and the handles of one record."""
    if record.dtype != DTYPE or record.shape != (heads, block + 1):
        raise MapRecordError(f"want {DTYPE} {[heads, block + 1]}, got {record.dtype} {list(record.shape)}")
    try:
        bits, rest = unpack_bits(record.payload, heads, block + 1)
        handles = unpack(rest)
    except ValueError as error:
        raise MapRecordError(str(error)) from None
    if int(bits.sum()) != len(handles):
        raise MapRecordError(f"{len(handles)} handles for {int(bits.sum())} bits")
    if not bits.any(axis=1).all():
        raise MapRecordError(f"a head of row block {block} keeps no block at all")
    return bits, handles
