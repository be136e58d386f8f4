from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from router.background import LastingTasks

if TYPE_CHECKING:
    import pytest


async def fail() -> None:
    raise ZeroDivisionError


async def test_a_task_that_fails_is_told_and_the_others_go_on_until_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    tasks, ended = LastingTasks(logging.getLogger("test"), "nobody watches"), asyncio.Event()

    async def last() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    tasks.start(last())
    tasks.start(fail())
    async with asyncio.timeout(5):
        while "nobody watches" not in caplog.text:  # noqa: ASYNC110 - a log line
            await asyncio.sleep(0)
    assert "ZeroDivisionError" in caplog.text
    assert not ended.is_set()
    await tasks.cancel()
    assert ended.is_set()
    assert len(caplog.records) == 1, "a cancelled task is no failure"
