"""A process is killed before every single line of every operation; what it leaves must be whole each time."""

import os
import signal
import sys

import pytest

from cache_store.pool.handles import join


def kill_before_line(number, prepare, operation):
    """Run `operation` in a child that dies before its Nth line in the pool's code; whether it lived to the end."""
    child = os.fork()
    if child == 0:
        left = number

        def trace(frame, event, _):
            nonlocal left
            if "cache_store" not in frame.f_code.co_filename:
                return None
            if event == "line":
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
            return trace

        try:
            prepared = prepare()
            sys.settrace(trace)
            operation(prepared)
            sys.settrace(None)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in {0, -signal.SIGKILL}
    return code == 0


OPERATIONS = {
    "allocate-free": lambda pool, live: pool.allocate(2),
    "allocate-evict": lambda pool, live: pool.allocate(6),
    "publish": lambda pool, live: pool.publish(pool.allocate(4)),
    "retrieve": lambda pool, live: pool.retrieve(live),
    "free": lambda pool, live: (pool.free(pool.allocate(2)), pool.free(live[:1])),
    "recover": lambda pool, live: pool.recover(),
    "close": lambda pool, live: (pool.allocate(3), pool.close()),
    "open": lambda open_pool, live: open_pool(8),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_whatever_line_it_dies_at_every_slot_is_accounted_for(open_named, name):
    watching = open_named(8)
    number, lived = 0, False
    while not lived:
        watching.free(join([publish(watching, 8)]))
        live = join([publish(watching, 2), publish(watching, 2)])
        watching.retrieve(live[:2])
        if name in {"recover", "open"}:
            leave_unpublished(open_named)

        prepare = (lambda: open_named) if name == "open" else (lambda: open_named(8))
        lived = kill_before_line(number, prepare, lambda pool, live=live: OPERATIONS[name](pool, live))
        number += 1

        watching.recover()
        stats = watching.stats()
        assert stats.writing == 0
        assert stats.free + stats.published + stats.retrieved == 8
        assert stats.processes == 1
        assert_all_can_be_had(watching)
    assert number > 10, "the child was killed at the lines of the operation"


def publish(pool, count):
    handles = pool.allocate(count)
    pool.publish(handles)
    return handles


def leave_unpublished(open_named):
    child = os.fork()
    if child == 0:
        try:
            open_named(8).allocate(3)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def assert_all_can_be_had(pool):
    everything = publish(pool, 8)
    assert sorted(everything.slots.tolist()) == list(range(8))
    assert pool.verify(everything).usable
