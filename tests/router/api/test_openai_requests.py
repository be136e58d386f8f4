"""Requests as the installed openai package types them: each is accepted and reaches the worker as it is."""

from __future__ import annotations

from typing import Any, get_type_hints

import orjson
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import TypeAdapter

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
WEATHER = {"name": "weather", "description": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": {**WEATHER, "strict": True}}]
SCHEMA = {"name": "answer", "strict": True, "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": list(messages) or [USER], **fields}


def parts(*content: dict[str, Any], role: str = "user", **fields: Any) -> dict[str, Any]:
    return chat({"role": role, "content": list(content), **fields}, USER)


CHATS: dict[str, dict[str, Any]] = {
    "plain": chat(),
    "every role": chat(
        {"role": "developer", "content": "d", "name": "dev"},
        {"role": "system", "content": [{"type": "text", "text": "s"}], "name": "sys"},
        {**USER, "name": "u"},
        {"role": "assistant", "content": "a", "name": "bot", "refusal": None, "audio": {"id": "audio_1"}},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "refusal": "no"},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": None},
    ),
    "tools": chat(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
        tools=TOOLS,
        tool_choice="auto",
        parallel_tool_calls=False,
    ),
    "custom tools": chat(
        USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        tools=[{"type": "custom", "custom": {"name": "sql", "format": {"type": "text"}}}],
        tool_choice={"type": "custom", "custom": {"name": "sql"}},
    ),
    "no tool": chat(tools=TOOLS, tool_choice="none"),
    "some tool": chat(tools=TOOLS, tool_choice="required"),
    "this tool": chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}),
    "allowed tools": chat(
        tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}}
    ),
    "functions": chat(functions=[WEATHER], function_call="auto"),
    "this function": chat(functions=[WEATHER], function_call={"name": "weather"}),
    "parts": parts(
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f", "filename": "a.pdf"}},
    ),
    "sampling": chat(
        temperature=0.5,
        top_p=0.9,
        n=2,
        seed=7,
        stop="\n",
        presence_penalty=-2,
        frequency_penalty=2.0,
        logit_bias={"50256": -100, "7": 100},
        max_tokens=5,
        max_completion_tokens=6,
        logprobs=True,
        top_logprobs=20,
        reasoning_effort="low",
        verbosity="low",
        prediction={"type": "content", "content": "hi"},
    ),
    "stops": chat(stop=["a", "b", "c", "d"]),
    "a schema": chat(response_format={"type": "json_schema", "json_schema": SCHEMA}),
    "JSON": chat(response_format={"type": "json_object"}),
    "about the request": chat(
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="flex",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
        web_search_options={"search_context_size": "low"},
    ),
    "a stream": chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}),
}
TEXTS: dict[str, dict[str, Any]] = {
    "plain": {"model": "small", "prompt": "Once"},
    "several": {"model": "small", "prompt": ["Once", "Twice"]},
    "sampling": {
        "model": "small",
        "prompt": "Once",
        "best_of": 2,
        "n": 2,
        "echo": True,
        "logprobs": 5,
        "suffix": "end",
        "max_tokens": 3,
        "temperature": 0,
        "top_p": 1,
        "seed": 1,
        "stop": ["a"],
        "user": "u",
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "logit_bias": {"1": 1},
    },
    "a stream": {"model": "small", "prompt": "Once", "stream": True, "stream_options": {"include_usage": True}},
}
SHAPES = {
    CHAT: (chat_create_params.CompletionCreateParamsNonStreaming, chat_create_params.CompletionCreateParamsStreaming),
    TEXT: (
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
}
BODIES = {f"chat, {name}": (CHAT, body) for name, body in CHATS.items()}
BODIES |= {f"text, {name}": (TEXT, body) for name, body in TEXTS.items()}
# What the router sets or adapts; tested where it does.
OWN = {"rid", "extra_key", "custom_params"}


@pytest.mark.parametrize(("path", "bodies"), [(CHAT, CHATS), (TEXT, TEXTS)])
def test_the_requests_here_use_every_field_of_the_package(path: str, bodies: dict[str, dict[str, Any]]) -> None:
    fields = {name for shape in SHAPES[path] for name in get_type_hints(shape)}
    assert {name for body in bodies.values() for name in body} == fields


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
def test_the_requests_here_are_valid_for_the_package(path: str, body: dict[str, Any]) -> None:
    whole, streamed = SHAPES[path]
    TypeAdapter(streamed if body.get("stream") else whole).validate_python(body, strict=False)


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_worker_gets_the_fields_as_they_were_sent(shared_duo: Any, path: str, body: dict[str, Any]) -> None:
    # The developer's turn would become the system's; that rule has its own tests.
    sent = orjson.loads(orjson.dumps(body).replace(b'"developer"', b'"system"'))
    response = await shared_duo.client.post(path, json=sent)
    assert response.status_code == 200, response.text
    got = shared_duo.small.requests[-1]
    assert got.path == path
    assert {name: value for name, value in got.body.items() if name not in OWN} == sent


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_field_of_another_type_is_named(shared_duo: Any, path: str, body: dict[str, Any]) -> None:
    before = len(shared_duo.small.requests)
    unchecked = {"reasoning_effort"}
    for name, value in body.items():
        if name in unchecked:
            continue
        # A number where nothing is one, and a list of numbers for what is.
        wrong = [1] if isinstance(value, (int, float)) else 1
        response = await shared_duo.client.post(path, json={**body, name: wrong})
        assert response.status_code == 400, (name, response.text)
        assert response.json()["error"]["param"] == name
    assert len(shared_duo.small.requests) == before


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.asyncio(loop_scope="module")
async def test_null_means_missing_and_is_left_out(shared_duo: Any, path: str) -> None:
    base = {"model": "small", **({"messages": [USER]} if path == CHAT else {"prompt": "Once"})}
    fields = {name for shape in SHAPES[path] for name in get_type_hints(shape)} - set(base)
    nulls = dict.fromkeys(fields, None) | {"of_nobody": None}
    response = await shared_duo.client.post(path, json={**base, **nulls})
    assert response.status_code == 200, response.text
    got = shared_duo.small.requests[-1].body
    # SGLang refuses a null for `n`, `stream`, `logprobs` and others; what the router does not know stays.
    assert {name for name, value in got.items() if value is None} <= {"of_nobody", "reasoning_effort"}
    assert "of_nobody" in got


@pytest.mark.asyncio(loop_scope="module")
async def test_fields_of_nobody_and_of_turns_pass(shared_duo: Any) -> None:
    turns = [
        {"role": "user", "content": [{"type": "hologram", "hologram": [1, None]}, {"type": "text", "text": "é 😀"}]},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "reasoning": "q", "annotations": [{"a": 1}]},
        {"role": "assistant", "content": None, "thinking_blocks": [{"thinking": "t"}], "tool_calls": [CALL]},
        USER,
    ]
    fields = {
        "min_p": 0.1,
        "top_k": 40,
        "min_tokens": 2,
        "repetition_penalty": 1.1,
        "prompt_logprobs": 3,
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False, "spaces_between_special_tokens": True},
        "prompt": "a chat's unknown field",
        "seed": 2**53 + 1,
    }
    response = await shared_duo.client.post(CHAT, json=chat(*turns, **fields))
    assert response.status_code == 200, response.text
    got = shared_duo.small.requests[-1].body
    assert got["messages"] == turns
    assert fields.items() <= got.items()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_last_of_two_equal_keys_counts_at_the_door_and_at_the_worker(shared_duo: Any) -> None:
    text = b'{"model":"small","messages":[{"role":"user","content":"x"}],"n":99,"n":1}'
    assert (await shared_duo.client.post(CHAT, content=text)).status_code == 200
    assert shared_duo.small.requests[-1].body["n"] == 1
    assert (await shared_duo.client.post(CHAT, content=text.replace(b'"n":1', b'"n":98'))).status_code == 400
