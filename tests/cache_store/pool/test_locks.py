import os
import signal
import threading
import time

import pytest

from cache_store.errors import StoreUnavailableError


def in_child(work):
    """Run `work` in a forked child, which then ends without any clean-up; its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = work() or 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_held_table_costs_the_deadline_and_no_more(open_named):
    holder, waiting = open_named(), open_named(deadline_s=0.1)
    with holder._open.locks.exclusive():
        started = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=r"0\.1 s") as error:
            waiting.allocate(1)
        assert time.monotonic() - started >= 0.1
    assert error.value.reason == "timeout"
    assert waiting.stats().writing == 0


def test_threads_of_one_process_exclude_each_other(open_named):
    pool = open_named(deadline_s=0.1)
    failures = []

    def use():
        try:
            pool.stats()
        except StoreUnavailableError as error:
            failures.append(error.reason)

    thread = threading.Thread(target=use)
    with pool._open.locks.exclusive():
        thread.start()
        thread.join()
    assert failures == ["timeout"]


def test_closing_waits_for_the_threads_that_are_at_the_table(open_named):
    pool, other = open_named(), open_named(deadline_s=0.05)
    closing = threading.Thread(target=pool._open.locks.close)
    with pool._open.locks.exclusive():
        closing.start()
        closing.join(0.05)
        with pytest.raises(StoreUnavailableError, match="locked"):
            other.stats()
    closing.join()
    assert other.stats().processes == 1


def test_a_lock_ends_with_its_killed_holder(open_named, pool_name):
    watching = open_named()

    def hold_and_die():
        pool = open_named()
        pool.allocate(2)
        lock = pool._open.locks.exclusive()
        lock.__enter__()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(hold_and_die) == -signal.SIGKILL
    assert watching.recover() == 2
    assert watching.stats().processes == 1


def test_a_childs_inheritance_does_not_keep_its_dead_parent_alive(open_named):
    watching = open_named()
    told, tell = os.pipe()
    done, finish = os.pipe()

    def die_with_a_child():
        pool = open_named()
        pool.allocate(2)
        lock = pool._open.locks.exclusive()
        lock.__enter__()
        if os.fork() == 0:
            os.write(tell, b".")
            os.read(done, 1)
            os._exit(0)
        os.read(told, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die_with_a_child) == -signal.SIGKILL
    try:
        assert watching.recover() == 2, "while the child is still there"
    finally:
        os.write(finish, b".")
        for descriptor in (told, tell, done, finish):
            os.close(descriptor)


def test_a_forked_child_has_to_open_the_pool_itself(open_named):
    pool = open_named()
    handles = pool.allocate(1)

    def use_in_child():
        try:
            pool.publish(handles)
        except StoreUnavailableError as error:
            return 7 if error.reason == "closed" and open_named().stats().writing == 1 else 8
        return 9

    assert in_child(use_in_child) == 7
    pool.publish(handles)
    assert pool.stats().processes == 1


def test_an_interrupt_within_the_table_leaves_it_unlocked(open_named):
    pool, other = open_named(), open_named(deadline_s=0.1)

    def interrupt():
        with pool._open.locks.exclusive():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert other.stats().free == pool.stats().free == 8
