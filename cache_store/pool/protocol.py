"""What a block pool does, whether its slots lie in shared memory or on a GPU.

Every operation is atomic towards the others and all or nothing. Processes share a pool; one that dies at any point
leaves a pool that the others go on with. Writing and reading slots is up to the caller, and nobody locks a slot:

- a writer has its slots to itself from `allocate` to `publish`;
- a reader checks its handles before and after reading, and uses nothing if they are stale the second time. `reading`
  (cache_store/pool/reading.py) does both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from cache_store.pool.handles import Handles

Storage_co = TypeVar("Storage_co", covariant=True)


class PoolRefusal(StrEnum):
    """Why slots were not given; a metric's label."""

    TOO_LARGE = "too_large"
    WRITING = "writing"


class Eviction(StrEnum):
    """What an evicted slot was; a metric's label."""

    RETRIEVED = "retrieved"
    UNUSED = "unused"


class Staleness(StrEnum):
    """Why a slot is not what its handle stands for; a metric's label."""

    OTHER_POOL = "other_pool"
    REUSED = "reused"
    NOT_PUBLISHED = "not_published"


@dataclass(frozen=True, eq=False)
class Check:
    """Whether slots are still what their handles stand for.

    Attributes:
        stale: bool [n], which are not.
        reasons: their number by reason.
    """

    stale: npt.NDArray[np.bool_]
    reasons: Mapping[Staleness, int]

    @property
    def usable(self) -> bool:
        """Whether all of them are."""
        return not self.reasons


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment. Counts are since it was made and of all its processes; killed ones may miss their last.

    Attributes:
        slots: all of them: free + writing + published + retrieved.
        free, writing, published, retrieved: slots by state.
        size_bytes: memory that the pool takes, however full it is.
        processes: that have it open.
        allocated, freed, recovered: slots that were given, given back, and taken from dead processes.
        evicted: slots by what they were.
        stale: handles that were found stale, by reason.
        refused: allocations by reason.
    """

    slots: int
    free: int
    writing: int
    published: int
    retrieved: int
    size_bytes: int
    processes: int
    allocated: int
    freed: int
    recovered: int
    evicted: Mapping[Eviction, int]
    stale: Mapping[Staleness, int]
    refused: Mapping[PoolRefusal, int]


class Pool(Protocol[Storage_co]):
    """A fixed number of slots. Beside what is said, any operation may raise `StoreUnavailableError`."""

    @property
    def storage(self) -> Storage_co:
        """All slots, to be written and read by slot number."""

    def allocate(self, count: int) -> Handles:
        """Take this many slots to write; what they hold is undefined.

        Free ones first, then those of dead writers, then published ones: retrieved ones before those that nobody has
        used yet, of each kind the least recently published. Never slots that are being written.

        Raises:
            PoolRefusedError: there are not that many; nothing was evicted.
        """

    def publish(self, handles: Handles) -> None:
        """Make slots readable that this process allocated and has written.

        Raises:
            ValueError: some are not; none is published.
        """

    def verify(self, handles: Handles) -> Check:
        """Whether the slots are readable and still what the handles stand for.

        All that was read of a slot before this call is good if it is.
        """

    def retrieve(self, handles: Handles) -> Check:
        """Verify, and if all are usable note that they have been used: they are the first to be evicted from now on.

        Call it after reading, so that a map is not given away because it is being read.
        """

    def free(self, handles: Handles) -> int:
        """Give back slots, published ones or this process's own unpublished ones; stale handles are skipped.

        Returns how many there were.
        """

    def recover(self) -> int:
        """Free the slots that dead processes allocated and did not publish; how many. `allocate` does it if in need."""

    def stats(self) -> PoolStats:
        """What the pool holds and has done."""

    def close(self) -> None:
        """Let go of it. Own slots that were not published are freed; anything after it raises."""

    def unlink(self) -> None:
        """Remove the pool's name: those who have it open go on with it, whoever opens it next makes a new one."""
