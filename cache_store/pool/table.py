"""What each slot is, and how that changes. Whoever calls has the pool's mutex.

All that decides about a slot is one word of 64 bits: generation, seat of its writer, state. Each change of a slot is
one store of that word, and no list of free slots or count exists beside it. So a process that is killed after any
number of stores leaves a table in which every slot is either what it was or what it was to become; the only trace of
the interrupted call are slots that a dead seat is writing, which `abandoned` finds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np
import numpy.typing as npt

from cache_store.pool.protocol import Check, Staleness

Slots = npt.NDArray[np.intp]
Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

_SEAT_SHIFT, _GENERATION_SHIFT = np.uint64(2), np.uint64(16)
_STATE_MASK, _SEAT_MASK = np.uint64(3), np.uint64(2**14 - 1)


class State(IntEnum):
    """What a slot is. Those from PUBLISHED on may be read."""

    FREE = 0
    WRITING = 1
    PUBLISHED = 2
    RETRIEVED = 3


class Count(IntEnum):
    """Places in the array of counts."""

    SEQUENCE = 0
    ALLOCATED = auto()
    FREED = auto()
    RECOVERED = auto()
    EVICTED_RETRIEVED = auto()
    EVICTED_UNUSED = auto()
    STALE_OTHER_POOL = auto()
    STALE_REUSED = auto()
    STALE_NOT_PUBLISHED = auto()
    REFUSED_TOO_LARGE = auto()
    REFUSED_WRITING = auto()


@dataclass(frozen=True, eq=False)
class Victims:
    """Published slots that are to go.

    Attributes:
        retrieved: those that were used.
        unused: those that were not.
    """

    retrieved: Slots
    unused: Slots


class SlotTable:
    """The table of a pool.

    Args:
        words: uint64 [S], see above; zeros for a new pool.
        sequences: uint64 [S], when a slot was published, as a count of published slots.
        counts: uint64, by `Count`.
    """

    def __init__(self, words: Words, sequences: Words, counts: Words) -> None:
        self._words, self._sequences, self.counts = words, sequences, counts

    def in_state(self, state: State) -> Slots:
        """The slots in this state, ascending."""
        return np.flatnonzero((self._words & _STATE_MASK) == state)

    def tally(self) -> list[int]:
        """Number of slots by state."""
        counts = np.bincount((self._words & _STATE_MASK).astype(np.intp), minlength=len(State))
        return [int(count) for count in counts]

    def victims(self, count: int) -> Victims | None:
        """Which slots go if this many must; None if there are not that many."""
        retrieved = self._oldest(self.in_state(State.RETRIEVED), count)
        missing = count - len(retrieved)
        if missing == 0:
            return Victims(retrieved, retrieved[:0])
        unused = self._oldest(self.in_state(State.PUBLISHED), missing)
        return Victims(retrieved, unused) if len(unused) == missing else None

    def claim(self, slots: Slots, seat: int) -> Words:
        """Give these slots to a writer; their new generations."""
        generations = (self._words[slots] >> _GENERATION_SHIFT) + np.uint64(1)
        self._words[slots] = generations << _GENERATION_SHIFT | np.uint64(seat << 2 | State.WRITING)
        return generations

    def publish(self, slots: Slots) -> None:
        """Make these slots readable."""
        first = int(self.counts[Count.SEQUENCE])
        self.counts[Count.SEQUENCE] = first + len(slots)
        # Before the state: a published slot has its sequence.
        self._sequences[slots] = np.arange(first, first + len(slots), dtype=np.uint64)
        self._set_state(slots, State.PUBLISHED)

    def mark_retrieved(self, slots: Slots) -> None:
        """Note that these readable slots have been used."""
        self._set_state(slots, State.RETRIEVED)

    def release(self, slots: Slots) -> None:
        """Make these slots free."""
        self._set_state(slots, State.FREE)

    def recover(self, slots: Slots) -> None:
        """Make these slots of dead writers free."""
        self.release(slots)
        self.counts[Count.RECOVERED] += np.uint64(len(slots))

    def holds(self, slots: Slots, generations: Words) -> Flags:
        """Which slots have these generations and may be read, bool [n]."""
        words = self._words[slots]
        same: Flags = (words >> _GENERATION_SHIFT) == generations
        return same & ((words & _STATE_MASK) >= State.PUBLISHED)

    def writes(self, slots: Slots, generations: Words, seat: int) -> Flags:
        """Which slots have these generations and are being written by this seat, bool [n]."""
        wanted = generations << _GENERATION_SHIFT | np.uint64(seat << 2 | State.WRITING)
        ours: Flags = self._words[slots] == wanted
        return ours

    def check(self, slots: Slots, generations: Words, known: Flags) -> Check:
        """Which handles are stale, and why.

        Args:
            slots: [n], any slot where `known` is false.
            generations: [n].
            known: [n], whether the handle is of this pool at all.
        """
        usable = known & self.holds(slots, generations)
        if usable.all():
            return Check(~usable, {})
        same = (self._words[slots] >> _GENERATION_SHIFT) == generations
        numbers = {
            Staleness.OTHER_POOL: int(np.count_nonzero(~known)),
            Staleness.REUSED: int(np.count_nonzero(known & ~same)),
            Staleness.NOT_PUBLISHED: int(np.count_nonzero(known & same & ~usable)),
        }
        return Check(~usable, {reason: number for reason, number in numbers.items() if number})

    def abandoned(self, is_alive: Callable[[int], bool]) -> Slots:
        """Slots that are being written by seats that are not alive."""
        writing = self.in_state(State.WRITING)
        seats = (self._words[writing] >> _SEAT_SHIFT) & _SEAT_MASK
        dead = [seat for seat in np.unique(seats).tolist() if not is_alive(seat)]
        return writing[np.isin(seats, np.array(dead, dtype=np.uint64))]

    def written_by(self, seat: int) -> Slots:
        """Slots that are being written by this seat."""
        return self.abandoned(lambda other: other != seat)

    def _oldest(self, slots: Slots, count: int) -> Slots:
        if len(slots) <= count:
            return slots
        sequences = self._sequences[slots]
        # A full pool goes round in the order of publishing, so the oldest are among the next few sequences; selecting
        # from those alone takes a fifth of the time of selecting from all.
        first, window, near = int(sequences.min()), count, slots[:0]
        while len(near) < count:
            window *= 4
            near = np.flatnonzero(sequences < np.uint64(first + window))
        if len(near) > count:
            near = near[np.argpartition(sequences[near], count)[:count]]
        return slots[near]

    def _set_state(self, slots: Slots, state: State) -> None:
        self._words[slots] = self._words[slots] & ~_STATE_MASK | np.uint64(state)
