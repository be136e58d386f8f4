"""Block masses as records of pages: one row block of one sender layer, all heads (design: record `mass`).

A payload has, of each head, a bit for every column block up to the diagonal (the first in the lowest bit), then the
codes of the set bits, head by head: a bit and a byte a mass, where a list of columns would take two bytes more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from cache_store.records import Kind, Record
from crossfill_kernels.mix_mass import QuantisedMass, quantise_mass
from engines.errors import MassRecordError
from engines.reuse.bits import pack_bits, unpack_bits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from crossfill_kernels.blocks import BlockMass

DTYPE = "mass8"
"""How the payload is read; another layout gets another name, and this one is then a miss."""


def pack_masses(mass: BlockMass, layer: int, digests: Sequence[bytes], shard: tuple[int, int] = (0, 1)) -> list[Record]:
    """One record for each row block of `mass`, quantised.

    Args:
        mass: masses [H, R, C] of whole row blocks.
        layer: of the model that computed them.
        digests: of the tokens up to each row block's end (`PageKey.tokens_digest`), R of them.
        shard: which part of the layer's heads these are, and of how many.
    """
    quantised = quantise_mass(mass)
    heads, width = quantised.heads, mass.mass.shape[2]
    lengths = quantised.offsets.diff().numpy()
    kept = np.zeros((lengths.size, width), dtype=bool)
    codes = np.zeros((lengths.size, width), dtype=np.uint8)
    entry = np.repeat(np.arange(lengths.size), lengths)
    kept[entry, quantised.columns.numpy()] = True
    codes[entry, quantised.columns.numpy()] = quantised.codes.numpy()
    records = []
    for row, (block, digest) in enumerate(zip(mass.blocks.tolist(), digests, strict=True)):
        # Entry (h, i) of the lists is h·R + i.
        own = (slice(row, None, mass.blocks.numel()), slice(block + 1))
        bits, values = kept[own], codes[own]
        payload = pack_bits(bits) + values[bits].tobytes()
        records.append(
            Record(Kind.MASS, layer, (heads, block + 1), DTYPE, digest, payload, shard=shard[0], shards=shard[1])
        )
    return records


def unpack_masses(shards: Sequence[Mapping[int, Record]], heads: int) -> QuantisedMass:
    """The masses of the row blocks that all shards have; the inverse of `pack_masses`.

    Args:
        shards: records by row block, of each part of the heads in order.
        heads: that the sender has in all.

    Raises:
        MassRecordError: a record is not of this layout, of its share of the heads and of its row block.
    """
    blocks = whole_blocks(shards)
    width = blocks[-1] + 1 if blocks else 0
    kept = np.zeros((heads, len(blocks), width), dtype=bool)
    codes = np.zeros((heads, len(blocks), width), dtype=np.uint8)
    for row, block in enumerate(blocks):
        parts = [_parts(records[block], heads // len(shards), block) for records in shards]
        bits = np.concatenate([one for one, _ in parts])
        kept[:, row, : block + 1] = bits
        codes[:, row, : block + 1][bits] = np.concatenate([values for _, values in parts])
    flat = kept.reshape(heads * len(blocks), width)
    offsets = np.zeros(flat.shape[0] + 1, dtype=np.int32)
    np.cumsum(flat.sum(axis=1), out=offsets[1:])
    columns = np.nonzero(flat)[1].astype(np.int32)
    return QuantisedMass(
        heads,
        torch.tensor(blocks, dtype=torch.int32),
        torch.from_numpy(offsets),
        torch.from_numpy(columns),
        torch.from_numpy(codes[kept]),
    )


def whole_blocks(shards: Sequence[Mapping[int, Record]]) -> list[int]:
    """Row blocks that all shards have, ascending."""
    return sorted(set(shards[0]).intersection(*shards[1:])) if shards else []


def _parts(record: Record, heads: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Set bits [H, block + 1] and the codes of one record."""
    if record.dtype != DTYPE or record.shape != (heads, block + 1):
        raise MassRecordError(f"want {DTYPE} {[heads, block + 1]}, got {record.dtype} {list(record.shape)}")
    try:
        bits, rest = unpack_bits(record.payload, heads, block + 1)
    except ValueError as error:
        raise MassRecordError(str(error)) from None
    values = np.frombuffer(rest, dtype=np.uint8)
    if int(bits.sum()) != values.size:
        raise MassRecordError(f"{values.size} codes for {int(bits.sum())} bits")
    return bits, values
