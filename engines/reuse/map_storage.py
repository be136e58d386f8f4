"""A block pool in shared memory as kernels see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cache_store.pool.geometry import SlotType
from crossfill_kernels.blocks import MapStorage

if TYPE_CHECKING:
    from cache_store.pool.shared_memory import SharedMemoryPool


def map_storage(pool: SharedMemoryPool) -> MapStorage:
    """The slots of a pool, where they lie: what a kernel writes there, other processes read."""
    arrays = pool.storage
    blocks = torch.from_numpy(arrays.blocks)
    if pool.geometry.dtype is SlotType.BFLOAT16:
        blocks = blocks.view(torch.bfloat16)
    return MapStorage(blocks, None if arrays.scales is None else torch.from_numpy(arrays.scales))
