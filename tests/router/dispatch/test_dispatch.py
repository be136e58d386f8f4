from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from engines.fake_worker import FakeWorker, Reply
from router.config import ModelConfig
from router.dispatch.workers import WorkerPool

SGLANG_400 = {
    "object": "error",
    "message": "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
    "type": "BadRequestError",
    "param": None,
    "code": 400,
}


@pytest.mark.parametrize("stream", [False, True])
async def test_workers_refusal_keeps_status_and_message(
    fake: Any, start_router: Any, is_error_object: Any, stream: bool
) -> None:
    worker = await fake(Reply(status=400, body=SGLANG_400))
    router = await start_router({"small": [worker]})
    response = await router.chat(stream=stream)
    assert response.status_code == 400
    assert is_error_object(response)
    assert response.json()["error"]["message"] == SGLANG_400["message"]
    assert response.headers["x-crossfill-model"] == "small"
    assert router.metric("crossfill_requests_total", model="small", outcome="client_error") == 1
    assert len(worker.requests) == 1


async def test_sdk_sees_the_workers_message_of_a_refused_stream(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(status=400, body=SGLANG_400))]})
    with pytest.raises(openai.BadRequestError, match="longer than the model's context length"):
        await router.sdk().chat.completions.create(
            model="small", messages=[{"role": "user", "content": "hi"}], stream=True
        )


async def test_refusals_leave_the_worker_in_service(fake: Any, start_router: Any) -> None:
    worker = await fake(*[Reply(status=400, body=SGLANG_400)] * 15, Reply())
    router = await start_router({"small": [worker]})
    assert [(await router.chat()).status_code for _ in range(16)] == [400] * 15 + [200]


@pytest.mark.parametrize(("reply", "state"), [(Reply(status=400, body=SGLANG_400), "unhealthy"), (Reply(), "healthy")])
async def test_a_refusal_does_not_bring_an_unhealthy_worker_back(
    fake: Any, start_router: Any, reply: Reply, state: str
) -> None:
    worker = await fake(reply.model_copy(update={"ttft_s": 0.8}))
    router = await start_router({"small": [worker]}, health={"interval_s": 60, "timeout_s": 1, "unhealthy_after": 1})
    waiting = asyncio.create_task(router.chat())
    await router.until(lambda: len(worker.requests) == 1)
    router.pool.workers[0].probe_failed("scripted", limit=1, is_working=False)
    assert router.pool.workers[0].state == "unhealthy"
    await waiting
    assert router.pool.workers[0].state == state


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "nested", "type": "t", "param": "p", "code": "c"}}, "nested"),
        ({"detail": "fastapi"}, "fastapi"),
        ("plain text", "plain text"),
        ("", "The worker refused the request with status 422."),
    ],
)
async def test_other_shapes_of_refusal_keep_their_message(
    fake: Any, start_router: Any, is_error_object: Any, body: Any, message: str
) -> None:
    router = await start_router({"small": [await fake(Reply(status=422, body=body))]})
    response = await router.chat()
    assert response.status_code == 422
    assert is_error_object(response)
    assert response.json()["error"]["message"] == message


async def test_workers_429_keeps_its_retry_after(fake: Any, start_router: Any) -> None:
    reply = Reply(status=429, body={"error": {"message": "busy"}}, headers={"Retry-After": "7"})
    response = await (await start_router({"small": [await fake(reply)]})).chat()
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reply", "status", "outcome"),
    [
        (Reply(status=500, body=SGLANG_400 | {"message": "boom", "code": 500}), 502, "upstream_error"),
        (Reply(status=503, body="not now"), 503, "unavailable"),
        (Reply(status=401, body="no key"), 502, "upstream_error"),
        (Reply(status=302, headers={"location": "http://elsewhere/"}, body=""), 502, "upstream_error"),
        (Reply(close_before_headers=True), 502, "upstream_error"),
    ],
    ids=["500", "503", "401", "302", "closed"],
)
async def test_failing_worker_is_never_a_success(
    fake: Any, start_router: Any, is_error_object: Any, reply: Reply, status: int, outcome: str, stream: bool
) -> None:
    router = await start_router({"small": [await fake(reply)]})
    response = await router.chat(stream=stream)
    assert response.status_code == status
    assert is_error_object(response)
    assert response.json()["error"]["type"] == "upstream_error"
    assert ("retry-after" in response.headers) == (status == 503)
    assert router.metric("crossfill_requests_total", model="small", outcome=outcome) == 1


async def test_error_in_a_200_answer_is_not_a_success(fake: Any, start_router: Any, is_error_object: Any) -> None:
    reply = Reply(raw_chunks=(json.dumps({"object": "error", "message": "boom", "code": 500}).encode(),))
    response = await (await start_router({"small": [await fake(reply)]})).chat()
    assert response.status_code == 502
    assert is_error_object(response)
    assert response.json()["error"]["message"] == "boom"


async def test_nobody_listens(start_router: Any, is_error_object: Any, closed_port_url: str) -> None:
    router = await start_router({"small": [closed_port_url]}, wait=False)
    response = await router.chat()
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert is_error_object(response)
    assert response.json()["error"]["code"] == "no_healthy_worker"
    assert response.headers["x-crossfill-reason"] == "explicit"


async def test_worker_that_died_since_its_last_probe_is_a_502(fake: Any, start_router: Any) -> None:
    worker = await fake()
    router = await start_router({"small": [worker]}, health={"interval_s": 60})
    await worker.__aexit__(None, None, None)
    response = await router.chat()
    assert response.status_code == 502
    assert response.json()["error"]["message"] == "Worker small/0 cannot be reached."
    await router.until(lambda: router.pool.workers[0].state == "unhealthy")
    assert (await router.chat()).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Reply(close_before_headers=True), "connection_lost"),
        (Reply(status=502, body=""), "status_502"),
        (Reply(status=503, body=""), "status_503"),
        (Reply(status=504, body=""), "status_504"),
    ],
    ids=["closed", "502", "503", "504"],
)
async def test_failure_before_the_first_byte_goes_to_another_worker(
    fake: Any, start_router: Any, access_lines: Any, bad: Reply, reason: str, stream: bool
) -> None:
    workers = [await fake(bad), await fake(bad), await fake(Reply(text="good"))]
    router = await start_router({"small": workers}, upstream={"attempts": 3})
    for _ in range(3):
        response = await router.chat(stream=stream)
        assert response.status_code == 200
        assert "good" in response.text
        assert response.headers["x-crossfill-worker"] == "small/2"
        await router.until_all_healthy()
    tries = sum(len(worker.requests) for worker in workers[:2])
    assert tries > 0
    assert router.metric("crossfill_retries_total", reason=reason) == tries
    assert sum(line["attempts"] for line in access_lines()) == tries + 3


async def test_stream_that_ends_before_its_first_byte_is_retried(fake: Any, start_router: Any) -> None:
    empty = Reply(raw_chunks=(b"x",), close_after_chunks=0)
    workers = [await fake(empty), await fake(Reply(text="good"))]
    router = await start_router({"small": workers})
    for _ in range(2):
        assert "good" in (await router.chat(stream=True)).text
    assert len(workers[0].requests) == router.metric("crossfill_retries_total", reason="connection_lost") == 1


async def test_attempts_are_bounded(fake: Any, start_router: Any) -> None:
    workers = [await fake(Reply(status=502, body="")) for _ in range(4)]
    router = await start_router({"small": workers}, upstream={"attempts": 2})
    assert (await router.chat()).status_code == 502
    assert sum(len(worker.requests) for worker in workers) == 2


async def test_500_is_not_retried(fake: Any, start_router: Any) -> None:
    workers = [await fake(Reply(status=500, body="")) for _ in range(2)]
    router = await start_router({"small": workers})
    await router.chat()
    assert sum(len(worker.requests) for worker in workers) == 1


async def test_auto_goes_to_the_other_model_when_the_chosen_one_fails(fake: Any, start_router: Any) -> None:
    small, large = await fake(), await fake(Reply(text="from large"))
    router = await start_router({"small": [small], "large": [large]}, health={"interval_s": 60})
    before = await router.chat(model="auto")
    assert before.headers["x-crossfill-reason"] == "threshold_small"
    await small.__aexit__(None, None, None)
    response = await router.chat(model="auto")
    assert response.status_code == 200
    assert response.headers["x-crossfill-model"] == "large"
    assert response.headers["x-crossfill-reason"] == "only_healthy"
    assert router.metric("crossfill_decisions_total", model="large", reason="only_healthy") == 1
    assert router.metric("crossfill_retries_total", reason="connect_failed") == 1


async def test_auto_goes_to_the_other_model_when_the_chosen_one_is_alive_but_overloaded(
    fake: Any, start_router: Any
) -> None:
    small, large = await fake(Reply(status=503, body="overloaded")), await fake(Reply(text="from large"))
    router = await start_router({"small": [small], "large": [large]})
    response = await router.chat(model="auto")
    assert response.headers["x-crossfill-reason"] == "only_healthy"
    assert "from large" in response.text
    assert len(small.requests) == router.metric("crossfill_retries_total", reason="status_503") == 1
    assert router.pool.workers[0].state == "healthy"


async def test_request_that_breaks_a_worker_does_not_meet_the_other_model(fake: Any, start_router: Any) -> None:
    poisoned = [await fake(Reply(close_before_headers=True)) for _ in range(2)]
    large = await fake(Reply(text="from large"))
    router = await start_router({"small": poisoned, "large": [large]}, health={"interval_s": 60})
    for worker in poisoned:
        worker.health = "failing"
    response = await router.chat(model="auto")
    assert response.status_code == 502
    assert response.headers["x-crossfill-model"] == "small"
    assert [len(worker.requests) for worker in poisoned] == [1, 1]
    assert not large.requests
    # The control: the next request finds no worker of the small model, and may go to the other one.
    assert "from large" in (await router.chat(model="auto")).text


async def test_break_and_then_an_overload_stay_with_the_model(fake: Any, start_router: Any) -> None:
    small = [await fake(Reply(close_before_headers=True)), await fake(Reply(status=503, body=""))]
    large = await fake()
    router = await start_router({"small": small, "large": [large]}, upstream={"attempts": 5})
    router.pool.workers[1].slow = True
    assert (await router.chat(model="auto")).status_code == 503
    assert [len(worker.requests) for worker in small] == [1, 1]
    assert not large.requests


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_completion_tokens": 50}),
        ({"max_tokens": None}, {"max_completion_tokens": 50}),
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 900}, {"max_completion_tokens": 900}),
    ],
)
async def test_answers_are_bounded_where_the_client_does_not(
    fake: Any, start_router: Any, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    worker = await fake()
    router = await start_router({"small": [worker]}, limits={"default_max_tokens": 50})
    await router.chat(**given)
    sent = worker.requests[0].body
    assert {name: sent[name] for name in ("max_tokens", "max_completion_tokens") if name in sent} == expected


async def test_without_a_default_no_bound_is_added(duo: Any) -> None:
    await duo.chat()
    assert not {"max_tokens", "max_completion_tokens"} & set(duo.small.requests[0].body)


def test_slow_workers_are_chosen_last() -> None:
    pool = WorkerPool([ModelConfig(name="m", workers=("http://a", "http://b"))])
    slow, quick = pool.workers
    for worker in pool.workers:
        worker.probe_succeeded()
    assert {pool.pick("m").worker, pool.pick("m").worker} == {slow, quick}
    slow.slow, quick.in_flight = True, 5
    assert [pool.pick("m").worker for _ in range(4)] == [quick] * 4


async def test_explicit_model_never_becomes_another(fake: Any, start_router: Any, closed_port_url: str) -> None:
    large = await fake()
    router = await start_router({"small": [closed_port_url], "large": [large]}, wait=False)
    await router.until(lambda: router.pool.workers[1].state == "healthy")
    assert (await router.chat(model="small")).status_code == 503
    assert not large.requests


async def test_least_loaded_worker_is_chosen(fake: Any, start_router: Any) -> None:
    busy, idle = await fake(Reply(ttft_s=30)), await fake()
    router = await start_router({"small": [busy, idle]})
    waiting = []
    while not busy.requests:
        waiting.append(asyncio.create_task(router.chat()))
        await asyncio.sleep(0.02)
    seen = len(idle.requests)
    for _ in range(6):
        assert (await router.chat()).headers["x-crossfill-worker"] == "small/1"
    assert len(busy.requests) == 1
    assert len(idle.requests) == seen + 6
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_equally_loaded_workers_take_turns(fake: Any, start_router: Any) -> None:
    workers = [await fake() for _ in range(3)]
    router = await start_router({"small": workers})
    for _ in range(9):
        await router.chat()
    assert [len(worker.requests) for worker in workers] == [3, 3, 3]


@pytest.mark.parametrize(
    ("stream", "limits", "told"),
    [
        (True, {"first_byte_s": 0.2}, "first_byte limit of 0.2 s"),
        (True, {"total_s": 0.2}, "total limit of 0.2 s"),
        (False, {"total_s": 0.2}, "total limit of 0.2 s"),
    ],
)
async def test_timeout_names_phase_and_limit(
    fake: Any, start_router: Any, is_error_object: Any, stream: bool, limits: dict[str, float], told: str
) -> None:
    worker = await fake(Reply(hang=True))
    router = await start_router({"small": [worker]}, upstream=limits)
    response = await router.chat(stream=stream)
    assert response.status_code == 504
    assert is_error_object(response)
    assert told in response.json()["error"]["message"]
    assert router.metric("crossfill_requests_total", model="small", outcome="timeout") == 1
    await router.until(lambda: worker.requests[0].disconnected)
    await router.until_idle()


async def test_first_byte_limit_does_not_cut_long_whole_answers(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(ttft_s=0.5))]}, upstream={"first_byte_s": 0.1})
    assert (await router.chat()).status_code == 200
    assert (await router.chat(stream=True)).status_code == 504


async def test_one_of_three_workers_dies_under_load(fake: Any, start_router: Any) -> None:
    workers: list[FakeWorker] = [await fake(Reply(inter_token_s=0.01)) for _ in range(3)]
    router = await start_router({"small": workers})

    async def ask() -> int:
        status: int = (await router.chat()).status_code
        return status

    first = [asyncio.create_task(ask()) for _ in range(20)]
    await workers[0].__aexit__(None, None, None)
    later = [await ask() for _ in range(20)]
    assert set(await asyncio.gather(*first)) == {200}
    assert set(later) == {200}
    assert router.metric("crossfill_worker_up", model="small", worker="small/0") == 0
    assert router.metric("crossfill_worker_up", model="small", worker="small/1") == 1


async def test_of_a_workers_endless_error_little_is_read(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(status=400, body="x" * 30_000_000))]})
    response = await router.chat()
    assert response.status_code == 400
    assert len(response.content) < 3_000
