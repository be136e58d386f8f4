"""Kills a process before each line of an operation in turn, and looks at what it leaves; prints how many lines.

python dying.py NAME OPERATION
"""

import os
import signal
import sys

from cache_store.pool.geometry import Geometry, SlotType
from cache_store.pool.handles import join
from cache_store.pool.shared_memory import open_pool

SLOTS = 8
# An opened pool and four published handles, of which two have been retrieved; "open" has to open the pool itself.
OPERATIONS = {
    "open": lambda enter, live: enter(),
    "allocate-free": lambda pool, live: pool.allocate(2),
    "allocate-evict": lambda pool, live: pool.allocate(6),
    "publish": lambda pool, live: pool.publish(pool.allocate(4)),
    "retrieve": lambda pool, live: pool.retrieve(live),
    "free": lambda pool, live: (pool.free(pool.allocate(2)), pool.free(live[:1])),
    "recover": lambda pool, live: pool.recover(),
    "close": lambda pool, live: (pool.allocate(3), pool.close()),
}


def main(name, operation):
    """Every slot has to be accounted for, whatever line it was."""

    def enter():
        return open_pool(name, Geometry(SLOTS, SlotType.UINT8), deadline_s=30)

    watching, number, lived = enter(), 0, False
    while not lived:
        watching.free(publish(watching, SLOTS))
        live = join([publish(watching, 2), publish(watching, 2)])
        watching.retrieve(live[:2])
        if operation in {"recover", "open"}:
            leave_unpublished(enter)
        lived = kill_before_line(number, operation, enter, live)
        number += 1

        watching.recover()
        stats = watching.stats()
        assert stats.writing == 0, (number, stats)
        assert stats.free + stats.published + stats.retrieved == SLOTS, (number, stats)
        assert stats.processes == 1, (number, stats)
        everything = publish(watching, SLOTS)
        assert sorted(everything.slots.tolist()) == list(range(SLOTS)), number
        assert watching.verify(everything).usable, number
    sys.stdout.write(str(number))


def kill_before_line(number, operation, enter, live):
    """Run the operation in a child that dies before its Nth line in the pool's code; whether it lived to the end."""
    child = os.fork()
    if child == 0:
        try:
            first = enter if operation == "open" else enter()
            sys.settrace(killer(number))
            OPERATIONS[operation](first, live)
            sys.settrace(None)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in {0, -signal.SIGKILL}, code
    return code == 0


def killer(left):
    def trace(frame, event, _):
        nonlocal left
        if "cache_store/pool" not in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
            return None
        if event == "line":
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return trace

    return trace


def publish(pool, count):
    handles = pool.allocate(count)
    pool.publish(handles)
    return handles


def leave_unpublished(enter):
    child = os.fork()
    if child == 0:
        try:
            enter().allocate(3)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
