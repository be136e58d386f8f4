from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Any

import pytest

from router.dispatch.alarm import Alarm

if TYPE_CHECKING:
    from collections.abc import Awaitable


async def wait(alarm: Alarm, awaitable: Awaitable[Any], due_s: float) -> Any:
    alarm.set(due_s)
    try:
        return await awaitable
    except asyncio.CancelledError:
        if not alarm.has_rung():
            raise
        raise TimeoutError from None
    finally:
        alarm.unset()


def due(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_wait_ends_at_its_time_and_the_next_one_works() -> None:
    alarm = Alarm()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await wait(alarm, asyncio.Event().wait(), due(0.02))
    assert await wait(alarm, asyncio.sleep(0.01, "x"), due(5)) == "x"
    alarm.close()


async def test_the_limit_moves_with_each_wait() -> None:
    alarm = Alarm()
    # Longer in all than the limit of each; the timer of the first rings within a later one.
    for _ in range(6):
        await wait(alarm, asyncio.sleep(0.03), due(0.1))
    with pytest.raises(TimeoutError):
        await wait(alarm, asyncio.Event().wait(), due(0.05))


async def test_nothing_rings_between_waits() -> None:
    alarm = Alarm()
    await wait(alarm, asyncio.sleep(0), due(0.02))
    await asyncio.sleep(0.05)
    assert await wait(alarm, asyncio.sleep(0, "x"), due(0.02)) == "x"
    alarm.close()


async def test_an_earlier_limit_is_kept_after_a_later_one() -> None:
    alarm = Alarm()
    await wait(alarm, asyncio.sleep(0), due(60))
    async with asyncio.timeout(5):
        with pytest.raises(TimeoutError):
            await wait(alarm, asyncio.Event().wait(), due(0.02))


async def test_cancellation_by_others_stays_one() -> None:
    async def waits(due_s: float) -> None:
        await wait(Alarm(), asyncio.Event().wait(), due_s)

    task = asyncio.create_task(waits(inf))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Both in the same step: the other's must not be swallowed.
    both_s = due(0.02)
    task = asyncio.create_task(waits(both_s))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_at(both_s, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_a_wait_did_not_get_stays_for_the_next() -> None:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    alarm = Alarm()
    with pytest.raises(TimeoutError):
        await wait(alarm, queue.get(), due(0.02))
    queue.put_nowait("x")
    assert await wait(alarm, queue.get(), due(1)) == "x"
    alarm.close()
