from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from engines.fake_worker import Reply

if TYPE_CHECKING:
    import httpx

PATH = "/v1/completions"


async def ask(router: Any, prompt: Any = "Once", model: str = "small", **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    return await router.client.post(PATH, json={"model": model, "prompt": prompt, **fields}, headers=headers)


async def test_sdk_gets_the_workers_text(duo: Any) -> None:
    answer = await duo.sdk().completions.create(model="small", prompt="Once upon a time")
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.usage.prompt_tokens) == ("from small", 4)
    [request] = duo.small.requests
    assert (request.path, request.body["prompt"]) == (PATH, "Once upon a time")
    assert request.body["rid"].startswith("cf-")
    assert not {"max_tokens", "max_completion_tokens"} & set(request.body)


async def test_sdk_stream_gets_every_piece_and_the_usage_at_the_end(duo: Any) -> None:
    stream = await duo.sdk().completions.create(
        model="large", prompt="Once", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "from large"
    assert (chunks[-1].choices, chunks[-1].usage.prompt_tokens) == ([], 1)
    assert duo.metric("crossfill_ttft_seconds_count", model="large", reuse="none") == 1
    assert duo.metric("crossfill_requests_total", model="large", outcome="ok") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_has_its_choices(duo: Any, stream: bool) -> None:
    prompts = ["Once", "Twice", "Thrice"]
    response = await ask(duo, prompts, n=2, stream=stream)
    assert response.status_code == 200
    assert duo.small.requests[0].body["prompt"] == prompts
    if not stream:
        assert [choice["index"] for choice in response.json()["choices"]] == list(range(6))
        return
    events = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == list(range(6))


async def test_auto_reads_the_prompt(duo: Any) -> None:
    easy = await ask(duo, "The capital of France is", model="auto")
    hard = await ask(
        duo,
        [
            "Prove step by step that the square root of 2 is irrational.",
            "Implement a parser and explain why it is fast.",
        ],
        model="auto",
    )
    assert [easy.headers["x-crossfill-model"], hard.headers["x-crossfill-model"]] == ["small", "large"]
    assert json.loads(hard.headers["x-crossfill-decision"])["reason"] == "threshold_large"
    assert duo.large.requests[0].body["model"] == "large"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Prove that there are infinitely many primes, step by step."},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "Prove it.", "messages": [{"role": "user", "content": "hi"}]},
    ],
    ids=["prompt", "messages", "both"],
)
async def test_dry_run_takes_either_shape_as_the_endpoint_of_it_would(duo: Any, body: dict[str, Any]) -> None:
    body = {"model": "auto", **body}
    headers = {"x-request-id": "same"}
    path = "/v1/chat/completions" if "messages" in body else PATH
    dry = (await duo.client.post("/v1/route", json=body, headers=headers)).json()
    assert not duo.small.requests + duo.large.requests
    told = json.loads((await duo.client.post(path, json=body, headers=headers)).headers["x-crossfill-decision"])
    assert {key: value for key, value in dry.items() if key != "features"} == told


TOKENS = "`prompt` takes text here, not token ids; send the text that they stand for."


@pytest.mark.parametrize("path", [PATH, "/v1/route"])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": [1, 2]}, "prompt", TOKENS),
        ({"prompt": [[1, 2], [3]]}, "prompt", TOKENS),
        ({"prompt": ""}, "prompt", "`prompt` must not be empty."),
        ({"prompt": []}, "prompt", "`prompt` must not be empty."),
        ({"prompt": ["a", ""]}, "prompt.1", "`prompt.1` must not be empty."),
        ({"prompt": ["a", 1]}, "prompt.1", "`prompt.1` must be a valid string."),
        ({"prompt": None}, "prompt", "`prompt` must be a string or a non-empty list of strings."),
        ({"prompt": {"a": 1}}, "prompt", "`prompt` must be a string or a non-empty list of strings."),
        ({"prompt": "a", "n": 9}, "n", "`n` must be at most 8 (limits.choices)."),
        ({"prompt": ["a"] * 9}, "prompt", "`n` times the number of prompts must be at most 8 (limits.choices)."),
        ({"prompt": ["a"] * 3, "n": 3}, "n", "`n` times the number of prompts must be at most 8 (limits.choices)."),
        ({"prompt": "a", "best_of": 9}, "best_of", "`best_of` must be at most 8 (limits.choices)."),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "`logprobs` must be less than or equal to 20."),
        ({"prompt": "a", "logprobs": True}, "logprobs", "`logprobs` must be a valid integer."),
        ({"prompt": "a", "stop_token_ids": [10**9]}, "stop_token_ids", "`stop_token_ids` is not a client's to set."),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_request_is_refused_at_the_door(
    shared_duo: Any, is_error_object: Any, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    response = await shared_duo.client.post(path, json={"model": "small", **fields})
    assert response.status_code == 400
    assert is_error_object(response)
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (param, message)
    assert not shared_duo.small.requests


async def test_a_prompt_is_required(duo: Any) -> None:
    response = await duo.client.post(PATH, json={"model": "small", "messages": [{"role": "user", "content": "hi"}]})
    assert response.json()["error"]["param"] == "prompt"
    with pytest.raises(openai.NotFoundError):
        await duo.sdk().completions.create(model="nope", prompt="Once")
    assert duo.metric("crossfill_requests_total", model="none", outcome="client_error") == 2


async def test_the_default_bound_is_for_chats_only(fake: Any, start_router: Any) -> None:
    worker = await fake()
    router = await start_router({"small": [worker]}, limits={"default_max_tokens": 99})
    await ask(router)
    await router.chat()
    completion, chat = (request.body for request in worker.requests)
    assert not {"max_tokens", "max_completion_tokens"} & set(completion)
    assert chat["max_completion_tokens"] == 99


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_cannot_be_reached_is_replaced(
    fake: Any, start_router: Any, closed_port_url: str, stream: bool
) -> None:
    worker = await fake(Reply(text="here"))
    router = await start_router({"small": [closed_port_url, worker]}, wait=False)
    await router.until(lambda: router.pool.workers[1].state == "healthy")
    router.pool.workers[0].saw_life(0.0)
    answers = [await ask(router, stream=stream) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(worker.requests) == 2
    assert router.metric("crossfill_retries_total", reason="connect_failed") == 1


async def test_an_answer_without_choices_is_a_failure(fake: Any, start_router: Any, is_error_object: Any) -> None:
    empty = Reply(raw_chunks=(b'{"choices":[]}',), headers={"content-type": "application/json"})
    response = await ask(await start_router({"small": [await fake(empty)]}))
    assert response.status_code == 502
    assert is_error_object(response)
    assert response.json()["error"]["message"] == "The worker's answer is not a completion."


@pytest.mark.parametrize("stray", [None, 5, [1], [{"role": "user", "content": [1]}]])
async def test_messages_are_nothing_to_a_text_completion(duo: Any, stray: Any) -> None:
    body = {"model": "small", "prompt": "x" * 999, "messages": stray}
    assert (await duo.client.post("/v1/completions", json=body)).status_code == 200
    second = await duo.client.post("/v1/completions", json={**body, "messages": None})
    assert "blocks=3, of=3" in second.headers["x-crossfill-placement"]
