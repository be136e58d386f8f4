"""Processes that use one small pool and are killed at random; prints as JSON what they saw.

    python traffic.py NAME SECONDS SEED (checked|unchecked) FOLDER

Every block is filled from its own handle, so whoever reads a block knows whose it is. "unchecked" readers use what
they read without the second check.
"""

import json
import mmap
import os
import random
import signal
import sys
import time
import traceback
from enum import IntEnum, auto
from pathlib import Path

import numpy as np

from cache_store.errors import PoolRefusedError
from cache_store.pool.geometry import Geometry, SlotType
from cache_store.pool.handles import unpack
from cache_store.pool.protocol import PoolRefusal
from cache_store.pool.shared_memory import FOLDER, open_pool

PROCESSES, SLOTS, BOARD, LARGEST = 8, 24, 10, 6
GEOMETRY = Geometry(SLOTS, SlotType.UINT8)


class Seen(IntEnum):
    published = 0
    used = auto()
    stale_before = auto()
    stale_after = auto()
    refused = auto()
    given_up = auto()
    wrong_blocks_used = auto()
    blocks_of_two_writers = auto()
    faults = auto()


def content(handles):
    """What the slots of these handles have to hold: blocks uint32 [n, 64, 16] and scales float32 [n, 64]."""
    first = handles.generations * np.uint64(2654435761) + handles.slots.astype(np.uint64) * np.uint64(40503)
    steps = np.arange(64 * 16, dtype=np.uint64).reshape(64, 16)
    blocks = (first[:, None, None] + steps).astype(np.uint32)
    return blocks, np.repeat((handles.generations % 10**6).astype(np.float32)[:, None], 64, axis=1)


def as_content(pool, handles):
    blocks = pool.storage.blocks[handles.slots]
    return blocks.view(np.uint32).reshape(-1, 64, 16), pool.storage.scales[handles.slots]


def agrees(one, other):
    return all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))


class Worker:
    def __init__(self, name, folder, seen, *, checked):
        self.random = random.Random()
        self.pool = open_pool(name, GEOMETRY, deadline_s=30)
        self.folder, self.seen, self.checked = folder, seen, checked

    def run(self):
        while True:
            self.random.choices([self.write, self.read, self.clear, self.pool.recover], [4, 8, 1, 1])[0]()

    def write(self):
        try:
            handles = self.pool.allocate(self.random.randint(1, LARGEST))
        except PoolRefusedError as error:
            if error.reason != PoolRefusal.WRITING:
                raise
            self.seen[Seen.refused] += 1
            return
        blocks, scales = content(handles)
        for slot, block, scale in zip(handles.slots, blocks, scales, strict=True):
            self.pool.storage.blocks[slot] = block.view(np.uint8).reshape(64, 64)
            self.pool.storage.scales[slot] = scale
            self.dawdle()
        if not agrees(as_content(self.pool, handles), (blocks, scales)):
            self.seen[Seen.blocks_of_two_writers] += 1
        if self.random.random() < 0.1:
            self.seen[Seen.given_up] += 1
            self.pool.free(handles)
            return
        self.pool.publish(handles)
        self.seen[Seen.published] += len(handles)
        draft = self.folder / f"draft-{os.getpid()}"
        draft.write_bytes(handles.pack())
        draft.replace(self.folder / f"map-{self.random.randrange(BOARD)}")

    def read(self):
        handles = self.find()
        if handles is None:
            return
        if not self.pool.verify(handles).usable:
            self.seen[Seen.stale_before] += 1
            return
        self.dawdle()
        found = as_content(self.pool, handles)
        if self.checked:
            check = self.pool.retrieve(handles) if self.random.random() < 0.5 else self.pool.verify(handles)
            if not check.usable:
                self.seen[Seen.stale_after] += 1
                return
        self.seen[Seen.used] += 1
        if not agrees(found, content(handles)):
            self.seen[Seen.wrong_blocks_used] += 1

    def clear(self):
        handles = self.find()
        if handles is not None and self.random.random() < 0.3:
            self.pool.free(handles)

    def find(self):
        try:
            return unpack((self.folder / f"map-{self.random.randrange(BOARD)}").read_bytes())
        except FileNotFoundError:
            return None

    def dawdle(self):
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 1e-3)


def start(number, name, folder, seen, *, checked):
    child = os.fork()
    if child:
        return child
    try:
        Worker(name, folder, seen[number], checked=checked).run()
    except Exception:  # noqa: BLE001 - the parent counts it and shows the trace
        seen[number][Seen.faults] += 1
        traceback.print_exc()
    finally:
        os._exit(1)


def main(name, seconds, seed, mode, folder):
    chance, folder = random.Random(int(seed)), Path(folder)
    shared = mmap.mmap(-1, PROCESSES * len(Seen) * 8)
    seen = np.frombuffer(shared, np.int64).reshape(PROCESSES, len(Seen))
    watching = open_pool(name, GEOMETRY, deadline_s=30)
    children = [start(number, name, folder, seen, checked=mode == "checked") for number in range(PROCESSES)]
    killed, most_seats, end = 0, 0, time.monotonic() + float(seconds)
    while time.monotonic() < end and not seen[:, Seen.faults].any():
        time.sleep(chance.random() * 0.02)
        number = chance.randrange(PROCESSES)
        os.kill(children[number], signal.SIGKILL)
        os.waitpid(children[number], 0)
        killed += 1
        children[number] = start(number, name, folder, seen, checked=mode == "checked")
        if killed % 20 == 0:
            stats = watching.stats()
            most_seats = max(most_seats, stats.processes)
            assert stats.free + stats.writing + stats.published + stats.retrieved == SLOTS, stats
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    report = {kind.name: int(seen[:, kind].sum()) for kind in Seen}
    report |= conclude(watching, name) | {"killed": killed, "most_seats": most_seats}
    sys.stdout.write(json.dumps(report))


def conclude(watching, name):
    """What is left of the pool: who has it, and whether each slot can be had, once."""
    watching.recover()
    stats = watching.stats()
    everything = watching.allocate(SLOTS)
    path = FOLDER / f"crossfill-pool-{name}"
    return {
        "slots": stats.slots,
        "left_writing": stats.writing,
        "left_whole": stats.free + stats.published + stats.retrieved,
        "left_processes": stats.processes,
        "recovered": stats.recovered,
        "evicted": sum(stats.evicted.values()),
        "slots_to_be_had": len(set(everything.slots.tolist())),
        "size_bytes": stats.size_bytes,
        "file_bytes": path.stat().st_size,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
