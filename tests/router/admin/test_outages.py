"""A store that is away, hangs, or cannot be opened: the router serves, says why, and finds it again."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from cache_store.backends.memory import MemoryBackend
from cache_store.errors import StoreUnavailableError

from ...cache_store.redis_server import RedisServer, free_port
from .conftest import OPERATOR, bearer

if TYPE_CHECKING:
    from pathlib import Path

FLUSH, STATS = "/admin/store/flush", "/admin/store"
DEADLINE_S = 0.5
# What a test machine may add.
SLACK_S = 5.0


@pytest.fixture
def start(fake: Any, start_router: Any, auth: Any) -> Any:
    """Starts a router with this store."""

    async def start(url: str, **settings: Any) -> Any:
        store = {"url": url, "deadline_s": DEADLINE_S, **settings}
        return await start_router(
            {"small": [await fake()]}, auth={"admin_keys_file": auth["admin_keys_file"]}, store=store
        )

    return start


async def ask(router: Any, path: str = STATS) -> Any:
    """The answer of an operator's call, which comes in time."""
    began_s = time.monotonic()
    method, body = ("POST", {"model": "small"}) if path == FLUSH else ("GET", None)
    response = await router.client.request(method, path, json=body, headers=bearer(OPERATOR))
    assert time.monotonic() - began_s < 4 * DEADLINE_S + SLACK_S
    return response


async def recovers(router: Any) -> Any:
    async with asyncio.timeout(30):
        while (response := await ask(router)).status_code != 200:
            assert response.status_code == 503
            await asyncio.sleep(0.05)
    return response


def unavailable(router: Any, operation: str, reason: str) -> float:
    return float(router.metric("crossfill_store_unavailable_total", operation=operation, reason=reason))


@pytest.mark.parametrize("path", [STATS, FLUSH])
async def test_a_port_that_refuses_is_a_503_that_says_so(
    start: Any, is_error_object: Any, access_lines: Any, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        router = await start(f"redis://:hunter2@127.0.0.1:{held.getsockname()[1]}")
        response = await ask(router, path)
        assert response.status_code == 503
        assert is_error_object(response)
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "store_unavailable")
        assert "connection refused" in error["message"]
        # Nothing was sent, so nothing is unknown.
        assert "not known" not in error["message"]
        assert response.headers["retry-after"] == "1"
        assert unavailable(router, "open", "refused") == 1
        assert (await router.client.get("/v1/models")).status_code == 200
        assert (await router.chat()).status_code == 200
    [line] = [line for line in access_lines() if line["route"] == path]
    assert (line["operator"], line["outcome"], line["error_code"]) == ("ada", "unavailable", "store_unavailable")
    [warned] = [record for record in caplog.records if record.name == "crossfill.store"]
    assert "connection refused" in warned.getMessage()
    assert "hunter2" not in caplog.text + response.text


async def test_calls_soon_after_a_failed_opening_do_not_open_again(start: Any) -> None:
    router = await start(f"redis://127.0.0.1:{free_port()}")
    router.app.state.services.store._pause_s = 60.0
    for _ in range(5):
        assert (await ask(router)).status_code == 503
    assert router.metric("crossfill_store_operation_seconds_count", operation="open") == 1


@pytest.mark.parametrize("opened", [True, False], ids=["while it is open", "before it is opened"])
async def test_a_redis_that_hangs_is_a_503_and_comes_back(start: Any, start_redis: Any, opened: bool) -> None:
    server: RedisServer = start_redis()
    router = await start(server.url())
    if opened:
        assert (await ask(router)).status_code == 200
    server.pause()
    try:
        asked = [asyncio.create_task(ask(router, path)) for path in (STATS, FLUSH)]
        assert (await router.client.get("/v1/models")).status_code == 200
        assert not any(task.done() for task in asked)
        stats, flushed = [await task for task in asked]
        assert (stats.status_code, flushed.status_code) == (503, 503)
        assert "no answer in time" in stats.json()["error"]["message"]
        assert ("not known whether the flush was done" in flushed.json()["error"]["message"]) is opened
        assert unavailable(router, "stats" if opened else "open", "timeout") == 1
    finally:
        server.resume()
    await recovers(router)
    assert (await ask(router, FLUSH)).status_code == 200


async def test_a_redis_that_ends_and_starts_again_is_found_without_a_restart(start: Any, start_redis: Any) -> None:
    server: RedisServer = start_redis()
    router = await start(server.url())
    assert (await ask(router)).status_code == 200
    server.stop()
    assert (await ask(router)).status_code == 503
    server.start()
    await recovers(router)


async def test_a_redis_that_starts_after_the_router_is_found(start: Any, start_redis: Any) -> None:
    server: RedisServer = start_redis(requirepass="hunter2")
    server.stop()
    router = await start(server.url())
    assert (await ask(router)).status_code == 503
    server.start()
    await recovers(router)


async def test_a_refused_password_is_told_without_it(
    start: Any, start_redis: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server: RedisServer = start_redis(requirepass="right")
    router = await start(server.url().replace(":right@", ":hunter2@"))
    response = await ask(router)
    assert response.status_code == 503
    assert "the server refuses the user or password" in response.text
    assert unavailable(router, "open", "url") == 1
    assert "hunter2" not in response.text + caplog.text


async def test_a_folder_that_cannot_be_is_a_503_until_it_can(start: Any, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    router = await start(f"lmdb://{tmp_path}/store")
    response = await ask(router)
    assert (response.status_code, "there is none yet" in response.text) == (503, True)
    (tmp_path / "store").unlink()
    (tmp_path / "store").mkdir()
    await recovers(router)


async def test_an_opening_that_hangs_costs_each_call_its_time_and_happens_once(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, openings = threading.Event(), []

    def open_slowly(url: str, **_: Any) -> MemoryBackend:
        openings.append(url)
        go_on.wait(60)
        return MemoryBackend()

    monkeypatch.setattr("cache_store.store.open_backend", open_slowly)
    router = await start("memory://")
    try:
        responses = await asyncio.gather(*(ask(router) for _ in range(3)))
        assert [response.status_code for response in responses] == [503] * 3
        assert "still being opened" in responses[0].text
        assert unavailable(router, "open", "timeout") == 3
        assert (await router.client.get("/v1/models")).status_code == 200
    finally:
        go_on.set()
    # It was not given up: what it opens is used.
    await recovers(router)
    assert len(openings) == 1


async def test_calls_that_hang_are_bounded_and_given_up(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await start("memory://")
    assert (await ask(router)).status_code == 200
    go_on = threading.Event()
    monkeypatch.setattr(MemoryBackend, "stats", lambda _: go_on.wait(60))
    try:
        responses = await asyncio.gather(*(ask(router) for _ in range(80)))
        told = [response.json()["error"]["message"] for response in responses]
        assert sum("too many calls" in one for one in told) == 80 - 64
        assert sum("did not answer within" in one for one in told) == 64
        assert (unavailable(router, "stats", "busy"), unavailable(router, "stats", "timeout")) == (16, 64)
    finally:
        go_on.set()


async def test_a_defect_of_the_store_is_a_500_and_the_next_call_is_served(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    router = await start("memory://")
    with monkeypatch.context() as patched:
        patched.setattr("cache_store.store.open_backend", fail)
        assert (await ask(router)).status_code == 500
    assert (await ask(router)).status_code == 200


async def test_a_failing_store_does_not_flood_the_log(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="crossfill.store")
    router = await start(f"redis://127.0.0.1:{free_port()}")
    for _ in range(20):
        assert (await ask(router)).status_code == 503
    assert len([record for record in caplog.records if record.name == "crossfill.store"]) == 1


async def test_the_end_of_the_router_closes_the_store(
    start: Any, tmp_path: Path, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cache_store.backends.lmdb import LmdbBackend

    url = f"lmdb://{tmp_path}/store"
    (tmp_path / "store").mkdir()
    router = await start(url)
    assert (await ask(router)).status_code == 200
    # The control: a store cannot be open twice in a process.
    with pytest.raises(StoreUnavailableError, match="already open"):
        LmdbBackend.from_url(url)
    await held.aclose()
    LmdbBackend.from_url(url).close()
