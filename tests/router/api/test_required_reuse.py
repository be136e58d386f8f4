from __future__ import annotations

from typing import Any

import openai
import pytest

from engines.fake_worker import FakeWorker, Reply
from router.decision.policy import replay

REQUIRE = {"reuse": "require"}
USER = {"role": "user", "content": "hi"}
HARD = "Prove that the square root of 2 is irrational, step by step."
PATHS = ["/v1/chat/completions", "/v1/route"]
REUSES = {"reuses": True}


def error_of(response: Any) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_model_that_cannot_reuse_is_refused_and_those_that_can_are_named(
    fake: Any, start_router: Any, is_error_object: Any, path: str
) -> None:
    small, large = await fake(), await fake()
    router = await start_router({"small": [small], "large": [large]}, of_model={"large": REUSES})
    body = {"model": "small", "messages": [USER]}
    refused = await router.client.post(path, json=body, headers={"crossfill": '{"reuse": "require"}'})
    assert is_error_object(refused)
    assert error_of(refused) == (409, "reuse_unavailable", "crossfill.reuse")
    assert "'small' cannot reuse" in refused.json()["error"]["message"]
    assert "those that can: large." in refused.json()["error"]["message"]
    assert not small.requests
    assert not large.requests
    # The controls: the other model, and the same one without the demand.
    assert (await router.client.post(path, json={**body, "model": "large", "crossfill": REQUIRE})).status_code == 200
    assert (await router.client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", ["small", "auto"])
async def test_where_no_model_can_reuse_everything_is_refused(duo: Any, path: str, model: str) -> None:
    refused = await duo.client.post(path, json={"model": model, "messages": [USER], "crossfill": REQUIRE})
    assert error_of(refused) == (409, "reuse_unavailable", "crossfill.reuse")
    assert "no model here can" in refused.json()["error"]["message"]
    assert not duo.small.requests
    assert not duo.large.requests


async def test_an_unknown_model_is_unknown_before_it_cannot_reuse(duo: Any) -> None:
    assert (await duo.chat(model="huge", crossfill=REQUIRE)).status_code == 404


async def test_auto_chooses_among_those_that_can(fake: Any, start_router: Any, access_lines: Any) -> None:
    small, large = await fake(), await fake()
    router = await start_router({"small": [small], "large": [large]}, of_model={"small": REUSES})
    assert (await router.chat(HARD, model="auto")).headers["x-crossfill-model"] == "large"
    required = await router.chat(HARD, model="auto", crossfill=REQUIRE)
    assert (required.status_code, required.headers["x-crossfill-model"]) == (200, "small")
    assert required.headers["x-crossfill-reason"] == "only_healthy"
    await router.until(lambda: len(access_lines()) == 2)
    decision = access_lines()[1]["decision"]
    assert decision["unavailable"] == ["large"]
    assert replay(decision).to_json() == decision


async def test_auto_on_a_ladder_of_none_that_can_names_the_others(fake: Any, start_router: Any) -> None:
    models = {name: [await fake()] for name in ("small", "large", "aside")}
    router = await start_router(models, of_model={"aside": REUSES})
    refused = await router.chat(model="auto", crossfill=REQUIRE)
    assert error_of(refused) == (409, "reuse_unavailable", "crossfill.reuse")
    assert "'auto' cannot reuse" in refused.json()["error"]["message"]
    assert "those that can: aside." in refused.json()["error"]["message"]


async def test_no_model_that_cannot_steps_in_for_one_that_is_down(
    fake: Any, start_router: Any, closed_port_url: str
) -> None:
    large = await fake()
    router = await start_router(
        {"small": [closed_port_url], "large": [large]}, of_model={"small": REUSES}, wait=False, upstream={"attempts": 3}
    )
    await router.until(lambda: router.pool.workers[1].state == "healthy")
    for model in ("auto", "small"):
        refused = await router.chat(HARD, model=model, crossfill=REQUIRE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_healthy_worker")
        assert refused.headers["retry-after"] == "1"
    assert not large.requests
    assert (await router.chat(HARD, model="auto")).status_code == 200


async def test_no_model_that_cannot_steps_in_after_a_failed_attempt(fake: Any, start_router: Any) -> None:
    small, large = await fake(Reply(status=503, body="busy")), await fake()
    router = await start_router({"small": [small], "large": [large]}, of_model={"small": REUSES})
    assert (await router.chat(model="auto", crossfill=REQUIRE)).status_code == 503
    assert (len(small.requests), len(large.requests)) == (1, 0)
    # The control: without the demand it does.
    assert (await router.chat(model="auto")).status_code == 200
    assert (len(small.requests), len(large.requests)) == (2, 1)


async def test_one_that_can_steps_in_for_another(fake: Any, start_router: Any) -> None:
    small, large = await fake(Reply(status=503, body="busy")), await fake()
    both = dict.fromkeys(("small", "large"), REUSES)
    router = await start_router({"small": [small], "large": [large]}, of_model=both)
    answer = await router.chat(model="auto", crossfill=REQUIRE)
    assert (answer.status_code, answer.headers["x-crossfill-model"]) == (200, "large")


async def test_a_pin_to_a_model_that_cannot_does_not_hold(fake: Any, start_router: Any) -> None:
    workers = {"small": [await fake()], "large": [await fake()]}
    router = await start_router(workers, of_model={"large": REUSES}, sessions={"sticky": True})
    session = {"session": "s-1"}
    assert (await router.chat(model="auto", crossfill=session)).headers["x-crossfill-model"] == "small"
    moved = await router.chat(model="auto", crossfill=session | REQUIRE)
    assert (moved.status_code, moved.headers["x-crossfill-model"]) == (200, "large")


@pytest.fixture
async def refusing(fake: Any, start_router: Any) -> Any:
    """A router with two workers that find nothing to reuse; they are `refusing.workers`."""
    workers = [await fake(Reply(reuse_refusal="cached")) for _ in range(2)]
    router = await start_router({"small": workers}, of_model={"small": REUSES})
    router.workers = workers
    return router


@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_refusal_is_passed_on_and_tried_nowhere_else(
    refusing: Any, is_error_object: Any, access_lines: Any, stream: bool
) -> None:
    refused = await refusing.chat(stream=stream, crossfill=REQUIRE)
    assert is_error_object(refused)
    assert error_of(refused) == (409, "reuse_refused", "crossfill.reuse")
    error = refused.json()["error"]
    assert error["message"] == "crossfill.reuse is `require`, and nothing could be reused: cached"
    assert error["type"] == "invalid_request_error"
    assert refused.headers["x-crossfill-reuse"] == "none; reason=cached"
    assert sum(len(worker.requests) for worker in refusing.workers) == 1
    assert refusing.metric("crossfill_requests_total", model="small", outcome="client_error") == 1
    assert refusing.metric("crossfill_reuse_answers_total", model="small", mode="none", reason="cached") == 1
    await refusing.until(lambda: bool(access_lines()))
    [line] = access_lines()
    assert (line["error_code"], line["reuse_reason"], line["retries"]) == ("reuse_refused", "cached", [])
    # The control: the same worker answers whoever does not insist.
    assert (await refusing.chat(stream=stream)).headers["x-crossfill-reuse"] == "none; reason=cached"


async def test_refusals_say_nothing_about_health(refusing: Any) -> None:
    for _ in range(6):
        assert (await refusing.chat(crossfill=REQUIRE)).status_code == 409
    assert [worker.state for worker in refusing.pool.workers] == ["healthy", "healthy"]
    assert refusing.metric("crossfill_retries_total", reason="status_503") == 0
    sick = refusing.pool.workers[0]
    refusing.workers[0].health = "hanging"
    await refusing.until(lambda: sick.state == "unhealthy")
    assert (await refusing.chat(crossfill=REQUIRE)).headers["x-crossfill-worker"] == "small/1"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"object": "error", "message": "cached", "type": "ReuseRefused", "code": 409},
            "nothing could be reused: cached",
        ),
        ({"object": "error", "type": "ReuseRefused", "code": 409}, "nothing could be reused: too_short"),
        ({"error": {"message": "cached", "type": "ReuseRefused"}}, "nothing could be reused: cached"),
    ],
    ids=["one word", "no message", "nested"],
)
async def test_the_reason_is_always_in_the_text(fake: Any, start_router: Any, body: Any, message: str) -> None:
    worker: FakeWorker = await fake(Reply(status=409, body=body, reuse="none; reason=too_short"))
    refused = await (await start_router({"small": [worker]}, of_model={"small": REUSES})).chat(crossfill=REQUIRE)
    assert error_of(refused) == (409, "reuse_refused", "crossfill.reuse")
    assert refused.json()["error"]["message"] == f"`crossfill.reuse` is `require`, and {message}"


async def test_a_conflict_of_another_kind_is_no_refusal_of_reuse(fake: Any, start_router: Any) -> None:
    body = {"object": "error", "message": "taken", "type": "Conflict", "code": 409}
    refused = await (await start_router({"small": [await fake(Reply(status=409, body=body))]})).chat()
    assert error_of(refused) == (409, None, None)
    assert "x-should-retry" not in refused.headers


@pytest.mark.parametrize("reuses", [False, True], ids=["unavailable", "refused"])
async def test_the_sdk_does_not_send_it_again_by_itself(fake: Any, start_router: Any, reuses: bool) -> None:
    worker = await fake(Reply(reuse_refusal="cached"))
    router = await start_router({"small": [worker]}, of_model={"small": {"reuses": reuses}})
    with pytest.raises(openai.ConflictError, match="require"):
        await router.sdk(max_retries=2).chat.completions.create(
            model="small", messages=[USER], extra_body={"crossfill": REQUIRE}
        )
    assert len(worker.requests) == reuses
    assert router.metric("crossfill_requests_total", model="small", outcome="client_error") == reuses
    assert router.metric("crossfill_requests_total", model="none", outcome="client_error") == (not reuses)
