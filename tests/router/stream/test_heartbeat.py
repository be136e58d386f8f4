from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from engines.fake_worker import Reply
from router.stream.heartbeat import COMMENT

HEARTBEAT = {"heartbeat_s": 0.15}
STREAM = {"model": "small", "messages": [{"role": "user", "content": "x"}], "stream": True}


def events(content: bytes) -> list[bytes]:
    return [event for event in content.split(b"\n\n") if event]


def without_comments(content: bytes) -> bytes:
    return b"".join(event + b"\n\n" for event in events(content) if not event.startswith(b":"))


async def test_headers_and_comments_come_while_the_worker_prefills(fake: Any, start_router: Any) -> None:
    worker = await fake(Reply(text="a b", ttft_s=30))
    router = await start_router({"small": [worker]}, streams=HEARTBEAT)
    async with (
        asyncio.timeout(10),
        router.client.stream("POST", "/v1/chat/completions", json=STREAM) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-crossfill-worker"] == "small/0"
        seen = b""
        async for chunk in response.aiter_raw():
            seen += chunk
            if seen.count(COMMENT) == 3:
                break
    assert seen == 3 * COMMENT
    await router.until(lambda: worker.requests[0].disconnected)
    await router.until(lambda: router.metric("crossfill_requests_total", model="small", outcome="client_gone") == 1)
    assert router.metric("crossfill_heartbeats_total") >= 3
    # Early headers are no answer: the client was still waiting.
    assert router.metric("crossfill_client_disconnects_total", phase="waiting") == 1


async def test_the_answer_follows_whole_and_ttft_is_not_fooled(fake: Any, start_router: Any, access_lines: Any) -> None:
    worker = await fake(Reply(text="a b", ttft_s=0.8, reuse="guided; blocks=3/4; sender=large"))
    plain = await start_router({"small": [worker]}, streams={"heartbeat_s": None})
    beating = await start_router({"small": [worker]}, streams=HEARTBEAT)
    expected = (await plain.chat(stream=True, headers={"x-request-id": "a"})).content
    response = await beating.chat(stream=True, headers={"x-request-id": "b"})
    assert plain.metric("crossfill_heartbeats_total") == 0
    assert beating.metric("crossfill_heartbeats_total") >= 3
    assert [event.split(b'"id"')[0] for event in events(without_comments(response.content))] == [
        event.split(b'"id"')[0] for event in events(expected)
    ]
    # What went out in time is not told twice.
    assert b"\n:" not in b"\n" + expected
    # What the headers could not say any more is told before the first data line.
    decision, reuse, first, *_ = events(response.content.replace(COMMENT, b""))
    assert json.loads(decision.removeprefix(b": "))["x-crossfill-worker"] == "small/0"
    assert reuse == b": x-crossfill-reuse: guided; blocks=3/4; sender=large"
    assert first.startswith(b"data: ")
    assert response.content.count(b"x-crossfill-reuse") == 1
    assert "x-crossfill-reuse" not in response.headers
    await beating.until(lambda: len(access_lines()) == 2)
    assert access_lines()[-1]["ttft_s"] >= 0.75
    assert beating.metric("crossfill_ttft_seconds_count", model="small", reuse="guided") == 1
    assert beating.metric("crossfill_requests_total", model="small", outcome="ok") == 1


async def test_the_sdk_does_not_see_comments(fake: Any, start_router: Any) -> None:
    worker = await fake(Reply(chunks=("a", "b"), ttft_s=0.5, inter_token_s=0.5, reuse="guided"))
    router = await start_router({"small": [worker]}, streams=HEARTBEAT)
    stream = await router.sdk().chat.completions.create(**STREAM, extra_body={"crossfill": {"report": True}})
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "ab"
    assert router.metric("crossfill_heartbeats_total") >= 4


async def test_silence_within_a_stream_is_filled_too_and_its_limit_still_holds(fake: Any, start_router: Any) -> None:
    worker = await fake(Reply(text="a b", inter_token_s=20))
    router = await start_router({"small": [worker]}, streams=HEARTBEAT, upstream={"between_bytes_s": 0.7})
    response = await router.chat(stream=True)
    assert COMMENT in response.content
    error = json.loads(events(response.content)[-1].removeprefix(b"data: "))["error"]
    assert "between_bytes limit of 0.7 s" in error["message"]


async def test_whole_answers_have_no_heartbeat(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(ttft_s=0.6))]}, streams=HEARTBEAT)
    assert (await router.chat()).json()["choices"]
    assert router.metric("crossfill_heartbeats_total") == 0


@pytest.mark.parametrize(
    ("reply", "outcome", "message"),
    [
        (Reply(status=400, body={"error": {"message": "too long", "type": "x"}}, ttft_s=0.5), "client_error", "too lo"),
        (Reply(status=500, body="boom", ttft_s=0.5), "upstream_error", "boom"),
        (Reply(hang=True), "timeout", "first_byte limit"),
    ],
    ids=["refused", "failed", "hanging"],
)
async def test_errors_after_early_headers_are_told_within_the_stream(
    fake: Any, start_router: Any, access_lines: Any, reply: Reply, outcome: str, message: str
) -> None:
    limit_s = 0.7 if reply.hang else 30
    router = await start_router({"small": [await fake(reply)]}, streams=HEARTBEAT, upstream={"first_byte_s": limit_s})
    response = await router.chat(stream=True)
    assert response.status_code == 200
    assert response.content.startswith(COMMENT)
    error = json.loads(events(response.content)[-1].removeprefix(b"data: "))["error"]
    assert message in error["message"]
    assert error["request_id"] == response.headers["x-request-id"]
    await router.until(lambda: bool(access_lines()))
    assert access_lines()[-1]["outcome"] == outcome
    assert router.metric("crossfill_requests_total", model="small", outcome=outcome) == 1
    with pytest.raises(openai.APIError, match=message):
        [chunk async for chunk in await router.sdk().chat.completions.create(**STREAM)]


async def test_a_late_word_on_reuse_is_told_before_an_error_too_and_only_if_there_is_one(
    fake: Any, start_router: Any
) -> None:
    silent = Reply(ttft_s=0.5, status=400, body={"error": {"message": "too long"}})
    for reuse, told in (("none; reason=failed", [b": x-crossfill-reuse: none; reason=failed"]), (None, [])):
        worker = await fake(silent.model_copy(update={"reuse": reuse}))
        router = await start_router({"small": [worker]}, streams=HEARTBEAT)
        *before, error = events((await router.chat(stream=True)).content.replace(COMMENT, b""))
        assert before == told
        assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "too long"


async def test_silence_on_reuse_is_no_comment(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(ttft_s=0.5))]}, streams=HEARTBEAT)
    content = (await router.chat(stream=True)).content
    assert COMMENT in content
    assert b"x-crossfill-reuse" not in content


async def test_another_worker_may_still_step_in_and_is_named(fake: Any, start_router: Any) -> None:
    workers = [await fake(Reply(ttft_s=0.5, close_before_headers=True)), await fake(Reply(text="saved"))]
    router = await start_router({"small": workers}, streams=HEARTBEAT)
    responses = [await router.chat(stream=True) for _ in range(2)]
    [late] = [response for response in responses if COMMENT in response.content]
    told = json.loads(events(late.content.replace(COMMENT, b""))[0].removeprefix(b": "))
    assert late.headers["x-crossfill-worker"] == "small/0"
    assert told["x-crossfill-worker"] == "small/1"
    assert b"saved" in late.content
    assert late.content.endswith(b"data: [DONE]\n\n")


async def test_end_of_the_grace_period_is_told_to_a_client_that_waits(
    fake: Any, start_router: Any, access_lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await fake(Reply(hang=True))
    router = await start_router({"small": [worker]}, streams=HEARTBEAT, grace_s=0.6)
    waiting = asyncio.create_task(router.chat(stream=True))
    await router.until(lambda: router.metric("crossfill_heartbeats_total") >= 1)
    router.server.should_exit = True
    content = (await waiting).content
    assert json.loads(events(content)[-1].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    assert access_lines()[-1]["outcome"] == "shutdown"
    assert not [entry for entry in caplog.records if entry.exc_info or entry.levelname == "ERROR"]
