"""Any sequence of operations, by processes that come and die, does what a plain list of slots would."""

import secrets
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from cache_store.errors import PoolRefusedError, StaleHandlesError
from cache_store.pool.geometry import Geometry, SlotType
from cache_store.pool.handles import join, unpack
from cache_store.pool.protocol import Eviction, PoolRefusal
from cache_store.pool.reading import reading
from cache_store.pool.shared_memory import open_pool

SLOTS, PROCESSES = 7, 3


@dataclass
class Slot:
    """What the model knows of a slot: whose it is, what it holds, and when it was published."""

    state: str = "free"
    writer: int = -1
    mark: int = 0
    published: int = 0


class PoolMachine(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize()
    def start(self):
        self.name = f"test-{secrets.token_hex(8)}"
        self.slots = [Slot() for _ in range(SLOTS)]
        self.marks = self.clock = 0
        self.counts = dict.fromkeys(["allocated", "freed", "recovered", "retrieved", "unused", "refused"], 0)
        self.seats, self.dead_writers = {}, set()
        self.pools, self.processes = [], []
        for _ in range(PROCESSES):
            pool, process = self.enter()
            self.pools.append(pool)
            self.processes.append(process)

    def enter(self):
        """A further process; it takes the lowest seat, and what a dead one was writing there is free."""
        pool = open_pool(self.name, Geometry(SLOTS, SlotType.FLOAT32), deadline_s=5)
        taken = {seat for process, seat in self.seats.items() if process not in self.dead_writers}
        process, seat = len(self.seats), min(set(range(PROCESSES + 1)) - taken)
        self.seats[process] = seat
        for slot in self.in_state("writing"):
            if self.seats[self.slots[slot].writer] == seat:
                assert self.slots[slot].writer in self.dead_writers
                self.slots[slot].state = "free"
                self.counts["recovered"] += 1
        return pool, process

    def teardown(self):
        if hasattr(self, "pools"):
            self.pools[0].unlink()
            for pool in self.pools:
                pool.close()

    @rule(target=held, who=st.integers(0, PROCESSES - 1), count=st.integers(0, SLOTS + 1))
    def allocate(self, who, count):
        chosen = self.expected(count)
        if chosen is None:
            with pytest.raises(PoolRefusedError) as refused:
                self.pools[who].allocate(count)
            self.counts["refused"] += 1
            assert refused.value.reason == (PoolRefusal.TOO_LARGE if count > SLOTS else PoolRefusal.WRITING)
            return multiple()
        handles = self.pools[who].allocate(count)
        assert sorted(handles.slots.tolist()) == sorted(chosen)
        self.counts["allocated"] += count
        marks = []
        for slot in handles.slots.tolist():
            self.marks += 1
            marks.append(self.marks)
            self.slots[slot] = Slot("writing", self.processes[who], self.marks)
            self.pools[who].storage.blocks[slot] = self.marks
        return handles, marks, self.processes[who]

    def expected(self, count):
        """Slots that an allocation has to take, after doing to the model what it does to the pool."""
        if count > SLOTS:
            return None
        free = self.in_state("free")
        if len(free) < count:
            self.counts["recovered"] += self.recover_model()
            free = self.in_state("free")
        missing = count - len(free)
        if missing <= 0:
            return free[:count]
        order = sorted(
            self.in_state("retrieved", "published"),
            key=lambda slot: (self.slots[slot].state != "retrieved", self.slots[slot].published),
        )
        if len(order) < missing:
            return None
        for slot in order[:missing]:
            self.counts["retrieved" if self.slots[slot].state == "retrieved" else "unused"] += 1
        return free + order[:missing]

    def recover_model(self):
        dead = [slot for slot in self.in_state("writing") if self.slots[slot].writer in self.dead_writers]
        for slot in dead:
            self.slots[slot].state = "free"
        return len(dead)

    def in_state(self, *states):
        return [number for number, slot in enumerate(self.slots) if slot.state in states]

    def current(self, given):
        """For each slot of a handle, the model's slot if it is still the one that the handle was made for."""
        handles, marks, _ = given
        slots = [self.slots[slot] for slot in handles.slots.tolist()]
        return [slot if slot.mark == mark else None for slot, mark in zip(slots, marks, strict=True)]

    @rule(given=held, who=st.integers(0, PROCESSES - 1))
    def publish(self, given, who):
        current = self.current(given)
        allowed = all(slot and slot.state == "writing" and slot.writer == self.processes[who] for slot in current)
        try:
            self.pools[who].publish(given[0])
        except ValueError:
            assert not allowed
            return
        assert allowed
        for slot in current:
            self.clock += 1
            slot.state, slot.published = "published", self.clock

    @rule(given=held, who=st.integers(0, PROCESSES - 1), marks=st.booleans())
    def check(self, given, who, marks):
        current = self.current(given)
        stale = [slot is None or slot.state not in {"published", "retrieved"} for slot in current]
        pool, handles = self.pools[who], unpack(given[0].pack())
        check = pool.retrieve(handles) if marks else pool.verify(handles)
        assert check.stale.tolist() == stale
        assert sum(check.reasons.values()) == sum(stale)
        if marks and check.usable:
            for slot in current:
                slot.state = "retrieved"

    @rule(given=held, who=st.integers(0, PROCESSES - 1))
    def read(self, given, who):
        current = self.current(given)
        try:
            with reading(self.pools[who], given[0]) as slots:
                content = self.pools[who].storage.blocks[slots]
        except StaleHandlesError:
            assert any(slot is None or slot.state not in {"published", "retrieved"} for slot in current)
            return
        assert (content == np.array(given[1], np.float32).reshape(-1, 1, 1)).all()
        for slot in current:
            slot.state = "retrieved"

    @rule(given=consumes(held), other=held, who=st.integers(0, PROCESSES - 1))
    def free(self, given, other, who):
        expected = set()
        for part in (given, other):
            for number, slot in zip(part[0].slots.tolist(), self.current(part), strict=True):
                own = slot and slot.state == "writing" and slot.writer == self.processes[who]
                if slot and (own or slot.state in {"published", "retrieved"}):
                    expected.add(number)
        assert self.pools[who].free(join([given[0], other[0]])) == len(expected)
        self.counts["freed"] += len(expected)
        for number in expected:
            self.slots[number].state = "free"

    @rule(who=st.integers(0, PROCESSES - 1))
    def end(self, who):
        """A process closes the pool, and then another one comes."""
        self.pools[who].close()
        self.dead_writers.add(self.processes[who])
        for slot in self.in_state("writing"):
            if self.slots[slot].writer == self.processes[who]:
                self.slots[slot].state = "free"
                self.counts["freed"] += 1
        self.pools[who], self.processes[who] = self.enter()

    @rule(who=st.integers(0, PROCESSES - 1), before=st.booleans())
    def die(self, who, before):
        """A process is killed; another one has come before it, or comes after it and takes its seat."""
        dead, pool, entered = self.processes[who], self.pools[who], self.enter() if before else None
        pool._open.locks.close()
        self.dead_writers.add(dead)
        self.pools[who], self.processes[who] = entered or self.enter()

    @rule(who=st.integers(0, PROCESSES - 1))
    def recover(self, who):
        recovered = self.recover_model()
        assert self.pools[who].recover() == recovered
        self.counts["recovered"] += recovered

    @invariant()
    def every_slot_is_accounted_for(self):
        if not hasattr(self, "pools"):
            return
        stats = self.pools[0].stats()
        wanted = [len(self.in_state(state)) for state in ("free", "writing", "published", "retrieved")]
        assert [stats.free, stats.writing, stats.published, stats.retrieved] == wanted
        assert stats.processes == PROCESSES
        assert (stats.allocated, stats.freed) == (self.counts["allocated"], self.counts["freed"])
        assert stats.evicted == {
            Eviction.RETRIEVED: self.counts["retrieved"],
            Eviction.UNUSED: self.counts["unused"],
        }
        assert stats.recovered == self.counts["recovered"]
        assert sum(stats.refused.values()) == self.counts["refused"]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
