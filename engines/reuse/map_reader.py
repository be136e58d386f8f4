"""The block pool as a receiver reads it: what was given away before or while it was read is not used."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cache_store.errors import StoreError
from cache_store.pool.protocol import Staleness
from cache_store.seldom import SeldomLog
from engines.reuse.metrics import MapMissed

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from cache_store.pool.protocol import Check
    from cache_store.pool.shared_memory import SharedMemoryPool
    from crossfill_kernels.blocks import MapStorage, PackedMap
    from engines.reuse.map_records import StoredMap

_LOG_EVERY_S = 60.0


class MapReader:
    """Reads maps of other processes.

    Args:
        pool: that senders on this machine write.
        storage: its slots.
        log: told of a pool that fails.
    """

    def __init__(self, pool: SharedMemoryPool, storage: MapStorage, log: logging.Logger) -> None:
        self._pool = pool
        self._storage = storage
        self._failures = SeldomLog(log, _LOG_EVERY_S, time.monotonic)

    def missed(self, stored: StoredMap) -> MapMissed | None:
        """Why the blocks of a map cannot be used; None if they can, now."""
        return self._judge(lambda: self._pool.verify(stored.handles))

    def packed(self, stored: StoredMap) -> PackedMap:
        """The map with its blocks, which are undefined unless `used` says that they were good."""
        return stored.packed(self._storage)

    def used(self, stored: StoredMap) -> MapMissed | None:
        """A map was read: why what was read is not it; None if it is. Its slots are then the first to be given away."""
        return self._judge(lambda: self._pool.retrieve(stored.handles))

    def _judge(self, look: Callable[[], Check]) -> MapMissed | None:
        try:
            check = look()
        except StoreError as error:
            self._failures.warn(f"the block pool cannot be used, so layers are guided: {error}")
            return MapMissed.POOL_UNAVAILABLE
        if check.usable:
            return None
        return MapMissed.POOL_REMOTE if Staleness.OTHER_POOL in check.reasons else MapMissed.GONE
