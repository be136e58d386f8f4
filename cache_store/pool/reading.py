"""Reads slots such that a slot given away meanwhile cannot go unnoticed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_store.errors import StaleHandlesError
from cache_store.pool.handles import Handles
from cache_store.pool.protocol import Check, Pool


@contextmanager
def reading(pool: Pool[Any], handles: Handles) -> Iterator[npt.NDArray[np.int32]]:
    """Read slots within the block; what was computed from them may be used after it, and not before.

    The block gets the slots' numbers, int32 [n]. It has to be done with reading at its end: a result on another device
    must have been waited for, and a lazy view of the slots is not a result.

    Raises:
        StaleHandlesError: slots were stale before the block, which then did not run, or became so within it.
        StoreUnavailableError: the pool is closed or locked too long; what was read is void.
    """
    _demand(pool.verify(handles), handles)
    yield handles.slots
    _demand(pool.retrieve(handles), handles)


def _demand(check: Check, handles: Handles) -> None:
    if not check.usable:
        raise StaleHandlesError({reason.value: count for reason, count in check.reasons.items()}, len(handles))
