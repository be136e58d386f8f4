from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import openai
import pytest

from engines.fake_worker import Reply
from router.errors import ClientGoneError
from router.lifecycle import Lifecycle
from router.stream.client import while_client_listens

TEXT = "日本語 and emoji 😀👩‍👩‍👧 ünïcode"
EVENT = f'data: {{"choices":[{{"index":0,"delta":{{"content":"{TEXT}"}}}}]}}\n\n'.encode()
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def events(content: bytes) -> list[bytes]:
    return [event for event in content.split(b"\n\n") if event]


def last_error(content: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(events(content)[-1].removeprefix(b"data: "))["error"]
    return error


@pytest.mark.parametrize("pieces", ["halves", "bytes"])
async def test_stream_is_relayed_byte_for_byte_wherever_reads_fall(fake: Any, start_router: Any, pieces: str) -> None:
    body = ROLE + b": a comment\n\n" + EVENT + b"event: x\r\ndata: {}\r\n\r\n" + EVENT + DONE
    middle = body.index("😀".encode()) + 2
    chunks = (body[:middle], body[middle:]) if pieces == "halves" else tuple(bytes([byte]) for byte in body)
    pause_s = 0.05 if pieces == "halves" else 0.0
    router = await start_router({"small": [await fake(Reply(raw_chunks=chunks, inter_token_s=pause_s))]})
    response = await router.chat(stream=True)
    assert response.content == body
    assert response.headers["content-type"].startswith("text/event-stream")
    assert router.metric("crossfill_requests_total", model="small", outcome="ok") == 1


async def test_events_reach_the_client_while_the_worker_still_writes(fake: Any, start_router: Any) -> None:
    worker = await fake(Reply(chunks=("one", "two"), inter_token_s=20))
    router = await start_router({"small": [worker]})
    body = {"model": "small", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with asyncio.timeout(5), router.client.stream("POST", "/v1/chat/completions", json=body) as response:
        seen = b""
        async for chunk in response.aiter_raw():
            seen += chunk
            if b"one" in seen:
                break
    assert b"two" not in seen
    await router.until(lambda: worker.requests[0].disconnected)


async def test_error_event_of_a_worker_passes_and_the_request_counts_as_failed(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(text="a b c d", error_event_after=1))]})
    response = await router.chat(stream=True)
    assert last_error(response.content)["message"] == "scripted failure"
    assert b"[DONE]" not in response.content
    assert response.content.count(b'"error"') == 1
    assert router.metric("crossfill_requests_total", model="small", outcome="error_event") == 1
    assert router.metric("crossfill_requests_total", model="small", outcome="ok") == 0


async def test_error_event_reaches_the_sdk_as_an_exception(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(text="a b c d", error_event_after=1))]})
    stream = await router.sdk().chat.completions.create(
        model="small", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="scripted failure"):
        [chunk async for chunk in stream]


async def test_worker_that_dies_after_the_first_byte_is_not_retried(fake: Any, start_router: Any) -> None:
    dying = [await fake(Reply(text="a b c d e f", close_after_chunks=3)) for _ in range(2)]
    router = await start_router({"small": dying})
    response = await router.chat(stream=True)
    assert response.status_code == 200
    deltas = [
        json.loads(event[6:])["choices"][0]["delta"].get("content", "") for event in events(response.content)[:-1]
    ]
    assert "".join(deltas) == "a b c"
    error = last_error(response.content)
    assert error["type"] == "upstream_error"
    assert error["request_id"] == response.headers["x-request-id"]
    assert b"[DONE]" not in response.content
    assert sum(len(worker.requests) for worker in dying) == 1
    assert router.metric("crossfill_requests_total", model="small", outcome="upstream_error") == 1
    assert router.metric("crossfill_retries_total", reason="connection_lost") == 0


async def test_error_frame_never_runs_into_a_torn_event(fake: Any, start_router: Any) -> None:
    torn = Reply(raw_chunks=(ROLE + EVENT + EVENT[:20], b"never sent"), close_after_chunks=1)
    router = await start_router({"small": [await fake(torn)]})
    response = await router.chat(stream=True)
    assert response.content.startswith(ROLE + EVENT + b'data: {"error"')
    for event in events(response.content):
        json.loads(event.removeprefix(b"data: "))


async def test_stream_without_done_counts_as_truncated(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(text="a b", no_done=True))]})
    response = await router.chat(stream=True)
    assert last_error(response.content)["code"] == "stream_truncated"
    assert router.metric("crossfill_requests_total", model="small", outcome="truncated") == 1


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n\r\n"])
async def test_done_counts_however_its_line_ends(fake: Any, start_router: Any, end: bytes) -> None:
    router = await start_router({"small": [await fake(Reply(raw_chunks=(ROLE, EVENT, end)))]})
    response = await router.chat(stream=True)
    assert response.content == ROLE + EVENT + end
    assert router.metric("crossfill_requests_total", model="small", outcome="ok") == 1


async def test_worker_that_stops_between_bytes_ends_with_a_frame_that_names_phase_and_limit(
    fake: Any, start_router: Any
) -> None:
    worker = await fake(Reply(text="a b", inter_token_s=20))
    router = await start_router({"small": [worker]}, upstream={"between_bytes_s": 0.2})
    response = await router.chat(stream=True)
    error = last_error(response.content)
    assert error["code"] == "upstream_timeout"
    assert "between_bytes limit of 0.2 s" in error["message"]
    assert router.metric("crossfill_requests_total", model="small", outcome="timeout") == 1
    await router.until(lambda: worker.requests[0].disconnected)


async def leave_early(router: Any, **fields: Any) -> None:
    """Send a chat request and close the connection once the worker has it."""
    host, port = router.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, port)
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "x"}], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await router.until(lambda: any(worker.in_flight for worker in router.pool.workers))
    await asyncio.sleep(0.1)
    writer.close()


@pytest.mark.parametrize(
    ("reply", "phase"),
    [(Reply(hang=True), "waiting"), (Reply(text="a b", inter_token_s=30), "streaming")],
    ids=["before the first byte", "mid-stream"],
)
async def test_client_that_leaves_ends_the_worker_request(
    fake: Any, start_router: Any, access_lines: Any, reply: Reply, phase: str
) -> None:
    worker = await fake(reply)
    router = await start_router({"small": [worker]})
    await leave_early(router, stream=True)
    await router.until(lambda: worker.requests[0].disconnected, timeout_s=3)
    await router.until_idle()
    await router.until(lambda: bool(access_lines()))
    assert router.metric("crossfill_client_disconnects_total", phase=phase) == 1
    assert router.metric("crossfill_requests_total", model="small", outcome="client_gone") == 1
    assert router.metric("crossfill_in_flight_requests", model="small", worker="small/0") == 0
    assert access_lines()[-1]["outcome"] == "client_gone"
    assert router.pool.workers[0].state == "healthy"


async def test_client_that_leaves_while_waiting_for_a_whole_answer_ends_the_worker_request(
    fake: Any, start_router: Any
) -> None:
    worker = await fake(Reply(ttft_s=30))
    router = await start_router({"small": [worker]})
    await leave_early(router)
    await router.until(lambda: worker.requests[0].disconnected, timeout_s=3)
    await router.until_idle()


async def test_client_that_stays_is_not_counted_as_gone(duo: Any) -> None:
    await duo.chat(stream=True)
    await duo.chat()
    assert duo.metric("crossfill_client_disconnects_total", phase="waiting") == 0
    assert duo.metric("crossfill_client_disconnects_total", phase="streaming") == 0
    assert duo.metric("crossfill_requests_total", model="small", outcome="ok") == 2


async def test_client_that_leaves_after_done_had_its_answer(fake: Any, start_router: Any, access_lines: Any) -> None:
    worker = await fake(Reply(raw_chunks=(EVENT + DONE, b": more\n\n"), inter_token_s=30))
    router = await start_router({"small": [worker]})
    await leave_early(router, stream=True)
    await router.until(lambda: bool(access_lines()), timeout_s=0.8)
    assert access_lines()[-1]["outcome"] == "ok"
    assert router.metric("crossfill_client_disconnects_total", phase="streaming") == 0


@pytest.mark.parametrize(("pause_s", "count"), [(30, 2), (0.1, 300)], ids=["silence", "comments"])
async def test_worker_that_does_not_end_after_done_holds_the_client_briefly(
    fake: Any, start_router: Any, pause_s: float, count: int
) -> None:
    worker = await fake(Reply(raw_chunks=(EVENT + DONE, *[b": x\n\n"] * count), inter_token_s=pause_s))
    router = await start_router({"small": [worker]})
    async with asyncio.timeout(4):
        response = await router.chat(stream=True)
    assert response.content.startswith(EVENT + DONE)
    assert b"error" not in response.content
    assert router.metric("crossfill_requests_total", model="small", outcome="ok") == 1
    await router.until(lambda: worker.requests[0].disconnected)


@pytest.mark.parametrize("is_reading", [False, True])
async def test_client_that_stops_reading_is_cut_off(fake: Any, start_router: Any, is_reading: bool) -> None:
    worker = await fake(Reply(chunks=("x" * 100_000,) * 200))
    router = await start_router({"small": [worker]}, limits={"client_write_s": 0.5})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        host, port = router.url.removeprefix("http://").split(":")
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        await loop.sock_sendall(client, head + body)
        await router.until(lambda: any(seen.in_flight for seen in router.pool.workers))
        if is_reading:
            seen = b""
            while b"[DONE]" not in seen[-100:]:
                seen = seen[-100:] + await asyncio.wait_for(loop.sock_recv(client, 2**20), 5)
        await router.until_idle()
    outcome = "ok" if is_reading else "client_gone"
    await router.until(lambda: router.metric("crossfill_requests_total", model="small", outcome=outcome) == 1)
    await router.until(lambda: worker.requests[0].disconnected or worker.requests[0].finished)
    assert worker.requests[0].disconnected is not is_reading


async def test_end_of_the_grace_period_is_told_within_the_stream(
    fake: Any, start_router: Any, access_lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await fake(Reply(chunks=("a", "b"), inter_token_s=30), Reply(hang=True))
    router = await start_router({"small": [worker]}, grace_s=0.3)
    streamed = asyncio.create_task(router.chat(stream=True))
    await router.until(lambda: len(worker.requests) == 1)
    waiting = asyncio.create_task(router.chat())
    await router.until(lambda: len(worker.requests) == 2)
    router.server.should_exit = True
    async with asyncio.timeout(4):
        content = (await streamed).content
        refused = await waiting
    assert b'"a"' in content
    assert last_error(content)["code"] == "shutting_down"
    assert last_error(content)["message"] == "The router is shutting down."
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert [line["outcome"] for line in access_lines()] == ["shutdown", "shutdown"]
    assert not [entry for entry in caplog.records if entry.exc_info or entry.levelname == "ERROR"]


async def test_garbage_of_a_client_does_not_get_into_its_own_stream(fake: Any, start_router: Any) -> None:
    worker = await fake(Reply(text="a b c", inter_token_s=0.3))
    router = await start_router({"small": [worker]})
    reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    seen = await asyncio.wait_for(reader.readuntil(b'"a"'), 5)
    writer.write(b"\x16\x03\x01 not http\r\n\r\n")
    seen += await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert b"HTTP/1.1 400" not in seen
    assert b"invalid_http" not in seen
    await router.until(lambda: worker.requests[0].disconnected)


async def test_cancellation_by_the_server_is_not_taken_for_a_departure() -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    lifecycle = Lifecycle()

    async def exchange(receive: Any) -> None:
        async with while_client_listens(receive, lifecycle):
            await asyncio.Event().wait()

    cancelled = asyncio.create_task(exchange(never))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled

    leave = asyncio.Event()

    async def leaves() -> Any:
        await leave.wait()
        return {"type": "http.disconnect"}

    # Both at once: the departure must not swallow the server's cancellation.
    both = asyncio.create_task(exchange(leaves))
    await asyncio.sleep(0.01)
    leave.set()
    await asyncio.sleep(0)
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both
    # The control: alone it is told as one.
    alone = asyncio.create_task(exchange(leaves))
    with pytest.raises(ClientGoneError):
        await alone
    assert not lifecycle.exchanges


async def test_slow_first_byte_is_answered(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(ttft_s=0.8))]}, upstream={"between_bytes_s": 0.3})
    assert (await router.chat(stream=True)).content.endswith(DONE)
    assert (await router.chat()).status_code == 200


async def test_ttft_is_of_the_first_content_not_of_the_role_or_a_comment(
    fake: Any, start_router: Any, access_lines: Any
) -> None:
    reply = Reply(raw_chunks=(ROLE, b": keepalive\n\n", EVENT + DONE), inter_token_s=0.3)
    router = await start_router({"small": [await fake(reply)]})
    await router.chat(stream=True)
    await router.until(lambda: bool(access_lines()))
    assert router.metric("crossfill_ttft_seconds_count", model="small", reuse="none") == 1
    assert router.metric("crossfill_ttft_seconds_sum", model="small", reuse="none") >= 0.55
    assert access_lines()[-1]["ttft_s"] >= 0.55


async def test_client_that_leaves_while_it_sends_is_not_an_error(duo: Any, access_lines: Any) -> None:
    _, writer = await asyncio.open_connection(*duo.url.removeprefix("http://").split(":"))
    writer.write(b'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"model":')
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    await duo.until(lambda: bool(access_lines()))
    assert access_lines()[-1]["outcome"] == "client_gone"
    assert not duo.small.requests


async def test_sdk_sees_an_error_that_the_worker_did_not_finish(fake: Any, start_router: Any) -> None:
    raw = (EVENT, b'data: {"error":{"message":"boom"}}\n')
    router = await start_router({"small": [await fake(Reply(raw_chunks=raw))]})
    stream = await router.sdk().chat.completions.create(
        model="small", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="boom"):
        [chunk async for chunk in stream]


async def test_a_huge_event_that_breaks_off_ends_with_a_frame_of_its_own(fake: Any, start_router: Any) -> None:
    head = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 2**20
    raw = (head, b"y" * 1000, b"never sent")
    router = await start_router({"small": [await fake(Reply(raw_chunks=raw, inter_token_s=0.3, close_after_chunks=2))]})
    response = await router.chat(stream=True)
    assert last_error(response.content)["code"] == "worker_failed"


@pytest.mark.parametrize("option", ["include_usage", "continuous_usage_stats"])
async def test_usage_in_every_event_is_for_those_who_asked(fake: Any, start_router: Any, option: str) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}],"usage":{"prompt_tokens":7}}\n\n'
    router = await start_router({"small": [await fake(Reply(raw_chunks=(event, DONE)))]})
    assert (await router.chat(stream=True, stream_options={option: True})).content == event + DONE
    assert b'"usage":null' in (await router.chat(stream=True)).content
