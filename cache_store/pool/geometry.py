"""How large a pool is and what its slots hold."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from cache_store.errors import StoreUrlError
from cache_store.keys import PAGE

# Kernels take slots as int32.
_MAX_SLOTS = 2**31 - 1
_SCALE_BYTES = 4


class SlotType(StrEnum):
    """What a probability is stored as."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    UINT8 = "uint8"

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The same in numpy, which has no bfloat16: uint16, to be viewed as bfloat16 by whoever computes."""
        return np.dtype("uint16" if self is SlotType.BFLOAT16 else self.value)


@dataclass(frozen=True)
class Geometry:
    """A number of slots and their type. All processes that share a pool agree on it.

    Attributes:
        slots: how many.
        dtype: what they hold. uint8 slots have a float32 scale for each row beside them.

    Raises:
        StoreUrlError: no slots, or more than kernels can address.
    """

    slots: int
    dtype: SlotType

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= _MAX_SLOTS:
            raise StoreUrlError(f"a block pool of {self.slots} slots; want 1 to {_MAX_SLOTS}")

    @classmethod
    def within(cls, budget_bytes: int, dtype: SlotType) -> Self:
        """As many slots as this many bytes hold, without the pool's own table of 16 bytes a slot.

        Raises:
            StoreUrlError: not even one.
        """
        return cls(budget_bytes // cls(1, dtype).slot_bytes, dtype)

    @property
    def scaled(self) -> bool:
        """Whether slots have scales."""
        return self.dtype is SlotType.UINT8

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, its scales included."""
        return PAGE * PAGE * self.dtype.numpy.itemsize + (PAGE * _SCALE_BYTES if self.scaled else 0)


@dataclass(frozen=True)
class SlotArrays:
    """The slots themselves. `torch.from_numpy` makes them the kernels' `MapStorage` without a copy.

    Attributes:
        blocks: [S, 64, 64] (rows, columns): float32, uint8, or uint16 for bfloat16.
        scales: float32 [S, 64], of uint8 slots only.
    """

    blocks: npt.NDArray[np.generic]
    scales: npt.NDArray[np.float32] | None
