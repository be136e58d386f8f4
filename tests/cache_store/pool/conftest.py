"""Pools in /dev/shm under a name of their own; what a test leaves there is removed."""

import secrets
from collections.abc import Callable, Iterator

import pytest

from cache_store.pool.geometry import Geometry, SlotType
from cache_store.pool.shared_memory import FOLDER, SharedMemoryPool, open_pool


@pytest.fixture
def pool_name() -> Iterator[str]:
    name = f"test-{secrets.token_hex(8)}"
    yield name
    (FOLDER / f"crossfill-pool-{name}").unlink(missing_ok=True)


@pytest.fixture
def open_named(pool_name: str) -> Iterator[Callable[..., SharedMemoryPool]]:
    """Open the test's pool, as often as wanted; each is one that a further process could have."""
    opened = []

    def open_it(slots: int = 8, dtype: SlotType = SlotType.UINT8, **options) -> SharedMemoryPool:
        opened.append(open_pool(pool_name, Geometry(slots, dtype), **options))
        return opened[-1]

    yield open_it
    for pool in opened:
        pool.close()
