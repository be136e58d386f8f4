"""What stands for slots outside of the pool: a pool's id, and for each slot its number and generation."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_POOL = struct.Struct("<Q")
_SLOT = np.dtype([("slot", "<i4"), ("generation", "<u8")])
HANDLE_BYTES = _POOL.size + _SLOT.itemsize
"""Bytes of one packed handle; each further one of the same pool takes 12."""


@dataclass(frozen=True, eq=False)
class Handles:
    """Slots of one pool as they were at one time. A slot that is given away again has another generation.

    Attributes:
        pool: id of the pool, unsigned 64-bit; a pool that is made anew has another.
        slots: int32 [n], contiguous, as kernels take them.
        generations: uint64 [n].
    """

    pool: int
    slots: npt.NDArray[np.int32]
    generations: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, chosen: slice | npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> "Handles":
        return Handles(self.pool, np.ascontiguousarray(self.slots[chosen]), self.generations[chosen])

    def pack(self) -> bytes:
        """8 bytes of the pool and 12 for each slot, the same on every machine."""
        packed = np.empty(len(self), _SLOT)
        packed["slot"], packed["generation"] = self.slots, self.generations
        return _POOL.pack(self.pool) + packed.tobytes()


def unpack(data: bytes) -> Handles:
    """The handles of `Handles.pack`.

    Raises:
        ValueError: the bytes cannot be handles.
    """
    if len(data) < _POOL.size or (len(data) - _POOL.size) % _SLOT.itemsize:
        raise ValueError(f"{len(data)} bytes are not {_POOL.size} and {_SLOT.itemsize} for each handle")
    packed = np.frombuffer(data, _SLOT, offset=_POOL.size)
    slots, generations = packed["slot"].astype(np.int32), packed["generation"].astype(np.uint64)
    return Handles(_POOL.unpack_from(data)[0], slots, generations)


def join(parts: Sequence[Handles]) -> Handles:
    """All handles of these, in order.

    Raises:
        ValueError: there are none, or they are of different pools.
    """
    if len({part.pool for part in parts}) != 1:
        raise ValueError("want handles of one pool")
    slots = np.concatenate([part.slots for part in parts])
    return Handles(parts[0].pool, slots, np.concatenate([part.generations for part in parts]))
