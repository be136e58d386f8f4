from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from engines.fake_worker import Reply


async def test_sdk_chat_gets_the_workers_answer(duo: Any) -> None:
    answer = await duo.sdk().chat.completions.create(
        model="small", messages=[{"role": "user", "content": "What is the capital of France?"}]
    )
    assert answer.choices[0].message.content == "from small"
    assert answer.usage.prompt_tokens == 6
    assert len(duo.small.requests) == 1
    assert not duo.large.requests


async def test_sdk_stream_gets_every_delta_and_the_usage_once_at_the_end(duo: Any) -> None:
    stream = await duo.sdk().chat.completions.create(
        model="large",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "from large"
    assert [index for index, chunk in enumerate(chunks) if chunk.usage] == [len(chunks) - 1]
    assert chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_usage_is_absent_when_not_requested(duo: Any) -> None:
    stream = await duo.sdk().chat.completions.create(
        model="large", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


async def test_sdk_stream_helper_finishes_on_tool_calls(fake: Any, start_router: Any) -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"city":"Paris"}'}}
    worker = await fake(Reply(chunks=({"tool_calls": [call]}, {"tool_calls": [more]})))
    router = await start_router({"small": [worker]})
    function = {"name": "weather", "strict": True, "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    async with router.sdk().chat.completions.stream(
        model="small", messages=[{"role": "user", "content": "weather?"}], tools=tools
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"city":"Paris"}'
    assert router.metric("crossfill_ttft_seconds_count", model="small", reuse="none") == 1


async def test_sdk_raises_the_class_of_the_status(duo: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await duo.sdk().chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id
    with pytest.raises(openai.BadRequestError) as refused:
        await duo.sdk().chat.completions.create(model="small", messages=[])
    assert refused.value.param == "messages"


async def test_tool_turns_with_null_content_are_forwarded_as_they_are(duo: Any) -> None:
    messages = [
        {"role": "user", "content": "weather in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    body = {"model": "auto", "messages": messages, "tools": tools}
    response = await duo.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    [request] = duo.small.requests + duo.large.requests
    assert request.body["messages"] == messages
    assert request.body["tools"] == tools


async def test_unknown_fields_reach_the_worker(duo: Any) -> None:
    unknown = {"chat_template_kwargs": {"enable_thinking": False}, "min_p": 0.1, "ü": [1, None, "é"]}
    await duo.chat(**unknown)
    assert unknown.items() <= duo.small.requests[0].body.items()


async def test_fields_that_the_router_owns_cannot_be_set_by_a_client(duo: Any) -> None:
    client = {
        "rid": "mine",
        "extra_key": "other-tenant",
        "custom_params": {"a": 1},
        "cache_salt": "s",
        "crossfill": {"reuse": "allow"},
    }
    await duo.chat(**client)
    await duo.chat(**client)
    await duo.chat()
    salted, again, plain = (request.body for request in duo.small.requests)
    told = [{"reuse": "allow", "tenant": "local", "salt": salt} for salt in ("s", "s", "")]
    assert [body["custom_params"] for body in (salted, again, plain)] == [{"crossfill": each} for each in told]
    for body in (salted, again, plain):
        assert body["model"] == "small"
        assert body["rid"].startswith("cf-")
        assert not {"cache_salt", "crossfill"} & set(body)
    assert salted["rid"] != again["rid"]
    assert salted["extra_key"] == again["extra_key"] != plain["extra_key"]
    assert salted["extra_key"] != "other-tenant"


async def test_clients_headers_stay_at_the_router(duo: Any) -> None:
    await duo.chat(headers={"authorization": "Bearer client-secret", "cookie": "a=b", "te": "trailers", "x-own": "1"})
    headers = duo.small.requests[0].headers
    assert not {"authorization", "cookie", "te", "x-own"} & set(headers)
    assert headers["host"] == duo.small.url.removeprefix("http://")
    assert headers["accept-encoding"] == "identity"


async def test_workers_hop_by_hop_headers_stay_at_the_router(fake: Any, start_router: Any) -> None:
    sent = {
        "Connection": "x-internal",
        "X-Internal": "1",
        "Set-Cookie": "a=b",
        "X-Crossfill-Reuse": "guided",
        "X-Crossfill-Model": "forged",
        "X-Crossfill-Prefix": "forged",
        "X-Crossfill-Anything": "forged",
    }
    router = await start_router({"small": [await fake(Reply(headers=sent))]})
    response = await router.chat()
    assert response.headers["x-crossfill-reuse"] == "guided"
    assert "forged" not in str(response.headers)
    assert not {"x-internal", "set-cookie", "server"} & set(response.headers)


async def test_whole_answers_are_relayed_byte_for_byte(fake: Any, start_router: Any) -> None:
    raw = '{ "choices" : [ {} ],  "odd":"spacing é 😀" }\n'.encode()
    router = await start_router({"small": [await fake(Reply(raw_chunks=(raw,)))]})
    response = await router.chat()
    assert response.content == raw
    assert response.headers["content-length"] == str(len(raw))


@pytest.mark.parametrize("stream", [False, True])
async def test_gzip_of_a_worker_leaves_the_body_intact(fake: Any, start_router: Any, stream: bool) -> None:
    text = "ünïcode " * 200
    router = await start_router({"small": [await fake(Reply(chunks=(text,), gzip=True))]})
    response = await router.chat(stream=stream, headers={"accept-encoding": "identity"})
    assert response.status_code == 200
    assert "content-encoding" not in response.headers
    assert text in response.text
    if stream:
        assert router.metric("crossfill_ttft_seconds_count", model="small", reuse="none") == 1
    else:
        assert json.loads(response.content)["choices"][0]["message"]["content"] == text


async def test_large_prompts_pass(duo: Any) -> None:
    text = "lorem ipsum " * 100_000
    response = await duo.chat(text, model="auto")
    assert response.status_code == 200
    [request] = duo.small.requests + duo.large.requests
    assert request.body["messages"][0]["content"] == text


async def test_models_lists_every_name_and_each_can_be_fetched(fake: Any, start_router: Any) -> None:
    worker = await fake()
    router = await start_router({"small": [worker], "large": [worker], "org/model-1:q4": [worker]})
    listed = [model["id"] for model in (await router.client.get("/v1/models")).json()["data"]]
    assert listed == ["auto", "small", "large", "org/model-1:q4"]
    for name in listed:
        assert (await router.client.get(f"/v1/models/{name}")).json()["id"] == name
    assert [model.id async for model in router.sdk().models.list()] == listed
    assert (await router.sdk().models.retrieve("org/model-1:q4")).id == "org/model-1:q4"


async def test_auto_is_not_offered_without_a_ladder(fake: Any, start_router: Any, is_error_object: Any) -> None:
    router = await start_router({"small": [await fake()]})
    assert [model["id"] for model in (await router.client.get("/v1/models")).json()["data"]] == ["small"]
    response = await router.chat(model="auto")
    assert response.status_code == 404
    assert is_error_object(response)
    assert (await router.client.get("/v1/models/auto")).status_code == 404


async def test_sixty_four_clients_with_keep_alive_get_no_error(duo: Any) -> None:
    import asyncio

    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=duo.url, limits=limits, timeout=30) as client:
        body = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
        for _ in range(3):
            answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(64)))
            assert {answer.status_code for answer in answers} == {200}
    assert len(duo.small.requests) == 192
    assert duo.metric("crossfill_requests_total", model="small", outcome="ok") == 192
