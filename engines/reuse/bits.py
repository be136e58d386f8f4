"""Which column blocks each head keeps, as bits: what records of masses and of maps begin with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.bool_]


def pack_bits(kept: Bits) -> bytes:
    """Of each head [H, C] its bits, the first column block in the lowest, filled up to whole bytes."""
    return np.packbits(kept, axis=1, bitorder="little").tobytes()


def unpack_bits(payload: bytes, heads: int, columns: int) -> tuple[Bits, bytes]:
    """The bits [heads, columns] that `payload` begins with, and what follows them.

    Raises:
        ValueError: it is too short.
    """
    row_bytes = -(-columns // 8)
    if len(payload) < heads * row_bytes:
        raise ValueError(f"{len(payload)} bytes are too few for {heads} heads of {columns} blocks")
    packed = np.frombuffer(payload, np.uint8, heads * row_bytes).reshape(heads, row_bytes)
    bits = np.unpackbits(packed, axis=1, count=columns, bitorder="little").astype(bool)
    return bits, payload[heads * row_bytes :]
