from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from engines.fake_worker import Reply
from router.server.serve import START_FAILED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PROGRAM = """
import sys
from router.config import RouterConfig
from router.server.serve import run
run(RouterConfig.model_validate_json(sys.argv[1]))
"""


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110 - another process, not an event
            await asyncio.sleep(0.02)


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process, which does not outlive its test."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@asynccontextmanager
async def serving(worker: Any) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A router process that listens, and its URL."""
    models = [{"name": "m", "workers": [worker.url]}]
    config = {"listen": {"port": 0}, "models": models, "health": {"interval_s": 0.05}}
    async with started("-c", PROGRAM, json.dumps(config)) as process:
        yield process, await url_of(process)


async def url_of(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async with asyncio.timeout(30):
        async for line in process.stderr:
            if b"running on http://" in line:
                return line.decode().split("running on ")[1].split()[0]
    raise AssertionError("the router did not start")


async def begin_stream(client: httpx.AsyncClient, worker: Any, text: str) -> asyncio.Task[httpx.Response]:
    """A streamed request that has reached the worker."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True}
    streaming = asyncio.create_task(client.post("/v1/chat/completions", json=body))
    async with asyncio.timeout(10):
        while not worker.requests:  # noqa: ASYNC110 - what is waited for is another process, not an event
            await asyncio.sleep(0.02)
    return streaming


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_lets_streams_finish_and_is_a_clean_exit(fake: Any, number: signal.Signals) -> None:
    worker = await fake(Reply(text="a b c d e", inter_token_s=0.2))
    async with serving(worker) as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            await until_ready(client)
            streaming = await begin_stream(client, worker, "private")
            process.send_signal(number)
            assert (await streaming).content.endswith(b"data: [DONE]\n\n")
        output, errors = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0, errors.decode()
        [line] = [json.loads(text) for text in output.splitlines()]
        assert (line["route"], line["outcome"], line["model"]) == ("/v1/chat/completions", "ok", "m")
        assert b"private" not in output + errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_open_connection_is_told_that_the_process_drains(fake: Any, number: signal.Signals) -> None:
    worker = await fake(Reply(text="a b c d e", inter_token_s=0.4))
    async with serving(worker) as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            await until_ready(client)
            streaming = await begin_stream(client, worker, "x")
            # Idle connections are closed at once; one with a request under way is kept to its end.
            reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
            writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(0.1)
            process.send_signal(number)
            writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            rest = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            assert (await streaming).content.endswith(b"data: [DONE]\n\n")
        assert b"HTTP/1.1 503 " in rest
        assert b'"draining":true' in rest
        await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0


@pytest.mark.parametrize("name", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
@pytest.mark.parametrize("exists", [True, False])
async def test_the_environment_changes_nothing(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, exists: bool
) -> None:
    folder = tmp_path / "metrics"
    if exists:
        folder.mkdir()
    monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("PROMETHEUS_DISABLE_CREATED_SERIES", "false")
    monkeypatch.setenv("WEB_CONCURRENCY", "many")
    async with serving(await fake()) as (process, url), httpx.AsyncClient(base_url=url, timeout=10) as client:
        await until_ready(client)
        shown = (await client.get("/metrics")).text
        assert 'crossfill_worker_up{model="m",worker="m/0"} 1.0' in shown
        assert "_created" not in shown
        assert "process_cpu_seconds_total" in shown
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0
    assert not files_in(tmp_path)


async def test_missing_scores_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(
        "models: [{name: a, workers: ['http://a']}, {name: b, workers: ['http://b']}]\n"
        "routing: {ladder: [a, b], scorer: {kind: recorded, path: none.jsonl}}\n"
    )
    async with started("-c", "from crossfill.cli import main; main()", "serve", str(path)) as process:
        _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert errors.decode() == f"crossfill: {tmp_path / 'none.jsonl'}: cannot be read: No such file or directory\n"


async def test_taken_port_is_a_failure(duo: Any) -> None:
    port = int(duo.url.rsplit(":", 1)[1])
    config = {"listen": {"port": port}, "models": [{"name": "m", "workers": ["http://127.0.0.1:9"]}]}
    async with started("-c", PROGRAM, json.dumps(config)) as process:
        _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == START_FAILED
    assert b"address already in use" in errors
