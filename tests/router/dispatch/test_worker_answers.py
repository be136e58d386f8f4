from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engines.fake_worker import Reply
from router.dispatch.worker_answers import error_of_status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=204, body=""),
        Reply(raw_chunks=(b"",), headers={"content-type": "application/json"}),
        Reply(raw_chunks=(b"<html>hello</html>",), headers={"content-type": "text/html"}),
        Reply(raw_chunks=(b'{"choices":[],"id":"x"}',), headers={"content-type": "application/json"}),
        Reply(raw_chunks=(b'{"choices":{"a":1}}',), headers={"content-type": "application/json"}),
        Reply(raw_chunks=(b'["choices"]',), headers={"content-type": "application/json"}),
    ],
    ids=["204", "empty", "html", "no choices", "choices an object", "a list"],
)
async def test_success_without_an_answer_is_a_failure(
    fake: Any, start_router: Any, is_error_object: Any, reply: Reply, stream: bool
) -> None:
    router = await start_router({"small": [await fake(reply, Reply())]})
    response = await router.chat(stream=stream)
    assert response.status_code == 502
    assert is_error_object(response)
    assert router.metric("crossfill_requests_total", model="small", outcome="upstream_error") == 1
    assert (await router.chat(stream=stream)).status_code == 200


async def test_events_for_a_request_that_wants_one_piece_are_a_failure(fake: Any, start_router: Any) -> None:
    events = Reply(raw_chunks=(b"data: [DONE]\n\n",), headers={"content-type": "text/event-stream"})
    router = await start_router({"small": [await fake(events)]})
    assert (await router.chat()).status_code == 502
    assert (await router.chat(stream=True)).status_code == 200


@pytest.mark.parametrize("retry_after", ["Wed, 21 Oct 2015 07:28:00 GMT", "soon", "7 s", "九", "-1"])
async def test_retry_after_that_is_no_number_is_dropped(fake: Any, start_router: Any, retry_after: str) -> None:
    reply = Reply(status=429, body={"error": {"message": "busy"}}, headers={"Retry-After": retry_after})
    response = await (await start_router({"small": [await fake(reply)]})).chat()
    assert response.status_code == 429
    assert "retry-after" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        b"secret garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nsecret bad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        b"8\r\ndata: x\n\r\nsecret\r\n",
    ],
    ids=["no HTTP", "bad header", "bad chunk"],
)
async def test_neither_address_nor_bytes_of_a_broken_worker_reach_the_client(
    start_router: Any, answer: bytes, stream: bool
) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n" if b"/health" in head else answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        router = await start_router({"small": [f"http://127.0.0.1:{port}"]}, health={"interval_s": 60})
        response = await router.chat(stream=stream)
    assert "error" in response.text
    assert not any(leak in response.text for leak in ("secret", "127.0.0.1", str(port)))


def test_where_in_a_workers_source_it_failed_is_left_out() -> None:
    place = '\n\n  File "/opt/x/http_server.py", line 18, in chat\n    POST /v1/chat'
    told = f"1 validation error:\n  Field required{place}\nEnd"
    error = error_of_status(400, json.dumps({"message": told}).encode(), [], 1)
    assert error.message == "1 validation error:\n  Field required\nEnd"
