"""The block pool of a machine, in shared memory."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from cache_store.errors import PoolRefusedError, StoreUnavailableError, StoreUrlError, StoreVersionError
from cache_store.pool.geometry import Geometry, SlotArrays
from cache_store.pool.handles import Handles
from cache_store.pool.protocol import Check, Eviction, Pool, PoolRefusal, PoolStats, Staleness
from cache_store.pool.segment import Segment, open_segment, remove, remove_if_abandoned, size_bytes
from cache_store.pool.table import Count, Flags, Slots, SlotTable, State

FOLDER = Path("/dev/shm")  # noqa: S108 - files there are made without a name, 0600, and checked when opened
_PREFIX = "crossfill-pool-"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

_STALE = {
    Staleness.OTHER_POOL: Count.STALE_OTHER_POOL,
    Staleness.REUSED: Count.STALE_REUSED,
    Staleness.NOT_PUBLISHED: Count.STALE_NOT_PUBLISHED,
}
_EVICTED = {Eviction.RETRIEVED: Count.EVICTED_RETRIEVED, Eviction.UNUSED: Count.EVICTED_UNUSED}
_REFUSED = {PoolRefusal.TOO_LARGE: Count.REFUSED_TOO_LARGE, PoolRefusal.WRITING: Count.REFUSED_WRITING}


def open_pool(name: str, geometry: Geometry, *, folder: Path = FOLDER, deadline_s: float = 1.0) -> "SharedMemoryPool":
    """Open the pool of this name, or make it. All of its memory is taken when it is made.

    Args:
        name: at most 64 letters, digits and `._-`; the same in all processes that share it.
        geometry: size and type; a pool of another geometry is replaced if nobody has it open.
        folder: where the file lies; in memory, so that slots are never written to a disk.
        deadline_s: longest wait for other processes, here and in each operation.

    Raises:
        StoreFullError: not enough shared memory.
        StoreUrlError: the name or the folder cannot be, or others have the pool open with another geometry.
        StoreVersionError: what is there is no pool of this version.
        StoreUnavailableError: it cannot be opened or locked.
    """
    if not _NAME.fullmatch(name):
        raise StoreUrlError(f"{name!r} cannot name a block pool; want at most 64 letters, digits and ._-")
    return SharedMemoryPool(open_segment(folder / f"{_PREFIX}{name}", geometry, deadline_s))


def remove_abandoned(name: str = "*", *, folder: Path = FOLDER, deadline_s: float = 1.0) -> list[str]:
    """Remove the pool of this name, or all, if no living process has them open; their names.

    Files that cannot be judged stay. What is published in a pool outlives its processes, so this is for whoever starts
    or ends all of them.
    """
    removed = []
    for path in sorted(folder.glob(f"{_PREFIX}{name}")):
        with suppress(StoreVersionError, StoreUnavailableError):
            if remove_if_abandoned(path, deadline_s):
                removed.append(path.name.removeprefix(_PREFIX))
    return removed


class SharedMemoryPool(Pool[SlotArrays]):
    """A pool as one process has it open (`cache_store.pool.protocol.Pool`). Safe to use from several threads.

    It is of no use in a child that is forked: operations there raise `StoreUnavailableError`, `closed`.
    """

    def __init__(self, segment: Segment) -> None:
        self._open: Segment | None = segment
        self._pool, self._geometry = segment.header.pool, segment.header.geometry

    @property
    def geometry(self) -> Geometry:
        """Size and type."""
        return self._geometry

    @property
    def storage(self) -> SlotArrays:
        """All slots, where they lie. Their memory stays for as long as a view of it does, also after `close`."""
        return self._segment.storage

    def allocate(self, count: int) -> Handles:
        """See `Pool.allocate`."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} slots")
        with self._locked() as table:
            if count > self._geometry.slots:
                raise self._refused(table, PoolRefusal.TOO_LARGE, count)
            slots = table.in_state(State.FREE)
            if len(slots) < count and self._recover(table):
                slots = table.in_state(State.FREE)
            slots = slots[:count]
            if len(slots) < count:
                slots = np.concatenate([slots, self._evict(table, count - len(slots), count)])
            generations = table.claim(slots, self._segment.seat)
            table.counts[Count.ALLOCATED] += np.uint64(count)
        return Handles(self._pool, slots.astype(np.int32), generations)

    def publish(self, handles: Handles) -> None:
        """See `Pool.publish`."""
        with self._locked() as table:
            slots, known = self._place(handles)
            if not (known & table.writes(slots, handles.generations, self._segment.seat)).all():
                raise ValueError("publish what this process has allocated and not yet published or freed")
            table.publish(slots)

    def verify(self, handles: Handles) -> Check:
        """See `Pool.verify`."""
        with self._locked() as table:
            return self._check(table, handles)

    def retrieve(self, handles: Handles) -> Check:
        """See `Pool.retrieve`."""
        with self._locked() as table:
            check = self._check(table, handles)
            if check.usable:
                table.mark_retrieved(handles.slots.astype(np.intp))
            return check

    def free(self, handles: Handles) -> int:
        """See `Pool.free`."""
        with self._locked() as table:
            slots, known = self._place(handles)
            ours = table.writes(slots, handles.generations, self._segment.seat)
            # Each once, however often it is named, so that the count is right.
            chosen = np.zeros(self._geometry.slots, np.bool_)
            chosen[slots[known & (ours | table.holds(slots, handles.generations))]] = True
            slots = np.flatnonzero(chosen)
            table.release(slots)
            table.counts[Count.FREED] += np.uint64(len(slots))
            return len(slots)

    def recover(self) -> int:
        """See `Pool.recover`."""
        with self._locked() as table:
            return self._recover(table)

    def stats(self) -> PoolStats:
        """See `Pool.stats`."""
        with self._locked() as table:
            free, writing, published, retrieved = table.tally()
            counts = [int(count) for count in table.counts]
            processes = self._segment.locks.count_taken() + 1
        return PoolStats(
            slots=self._geometry.slots,
            free=free,
            writing=writing,
            published=published,
            retrieved=retrieved,
            size_bytes=size_bytes(self._geometry),
            processes=processes,
            allocated=counts[Count.ALLOCATED],
            freed=counts[Count.FREED],
            recovered=counts[Count.RECOVERED],
            evicted={kind: counts[place] for kind, place in _EVICTED.items()},
            stale={reason: counts[place] for reason, place in _STALE.items()},
            refused={reason: counts[place] for reason, place in _REFUSED.items()},
        )

    def close(self) -> None:
        """See `Pool.close`. A second time does nothing."""
        if self._open is None:
            return
        # If the table cannot be locked, whoever takes the seat next or recovers frees the slots instead.
        with suppress(StoreUnavailableError), self._locked() as table:
            slots = table.written_by(self._segment.seat)
            table.release(slots)
            table.counts[Count.FREED] += np.uint64(len(slots))
        self._open.locks.close()
        self._open = None

    def unlink(self) -> None:
        """See `Pool.unlink`."""
        remove(self._segment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _segment(self) -> Segment:
        if self._open is None:
            raise StoreUnavailableError("the block pool was closed", "closed")
        return self._open

    @contextmanager
    def _locked(self) -> Iterator[SlotTable]:
        segment = self._segment
        with segment.locks.exclusive():
            yield segment.table

    def _place(self, handles: Handles) -> tuple[Slots, Flags]:
        """The slots, 0 for those that are not here, and which are."""
        slots = handles.slots.astype(np.intp)
        known = (slots >= 0) & (slots < self._geometry.slots) & (handles.pool == self._pool)
        return np.where(known, slots, 0), known

    def _check(self, table: SlotTable, handles: Handles) -> Check:
        slots, known = self._place(handles)
        check = table.check(slots, handles.generations, known)
        for reason, number in check.reasons.items():
            table.counts[_STALE[reason]] += np.uint64(number)
        return check

    def _recover(self, table: SlotTable) -> int:
        segment = self._segment
        slots = table.abandoned(lambda seat: seat == segment.seat or segment.locks.is_taken(seat))
        table.recover(slots)
        return len(slots)

    def _evict(self, table: SlotTable, missing: int, count: int) -> Slots:
        victims = table.victims(missing)
        if victims is None:
            raise self._refused(table, PoolRefusal.WRITING, count)
        table.counts[Count.EVICTED_RETRIEVED] += np.uint64(len(victims.retrieved))
        table.counts[Count.EVICTED_UNUSED] += np.uint64(len(victims.unused))
        return np.concatenate([victims.retrieved, victims.unused])

    def _refused(self, table: SlotTable, reason: PoolRefusal, count: int) -> PoolRefusedError:
        table.counts[_REFUSED[reason]] += np.uint64(1)
        have = "all others are being written" if reason is PoolRefusal.WRITING else f"it has {self._geometry.slots}"
        return PoolRefusedError(f"the block pool cannot give {count} slots: {have}", reason)
