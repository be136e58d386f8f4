from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from router.config import LimitsConfig

CHAT = "/v1/chat/completions"
_DEEPEST = 250
USER = {"role": "user", "content": "hi"}


def body(**fields: Any) -> bytes:
    return orjson.dumps({"model": "small", "messages": [USER], **fields})


def without(field: str) -> bytes:
    return orjson.dumps({key: value for key, value in {"model": "small", "messages": [USER]}.items() if key != field})


def nested(levels: int) -> bytes:
    return b'{"model":"small","messages":[{"role":"user","content":"x"}],"a":' + b"[" * levels + b"]" * levels + b"}"


BAD = {
    "empty body": (b"", 400, None),
    "not JSON": (b"{nope", 400, None),
    "an array": (b"[]", 400, None),
    "a string": (b'"hi"', 400, None),
    "NaN": (b'{"model":"small","temperature":NaN}', 400, None),
    "Infinity": (b'{"model":"small","temperature":Infinity}', 400, None),
    "invalid UTF-8": (b'{"model":"sm\xffall"}', 400, None),
    "lone surrogate": (b'{"model":"\\ud800"}', 400, None),
    "65 levels": (nested(64), 400, None),
    "100000 levels": (nested(100_000), 400, None),
    "100000 objects deep": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400, None),
    "no model": (without("model"), 400, "model"),
    "empty model": (body(model=""), 400, "model"),
    "model null": (body(model=None), 400, "model"),
    "model a number": (body(model=3), 400, "model"),
    "unknown model": (body(model="gpt-9"), 404, "model"),
    "no messages": (without("messages"), 400, "messages"),
    "empty messages": (body(messages=[]), 400, "messages"),
    "messages an object": (body(messages={}), 400, "messages"),
    "a message that is a string": (body(messages=[USER, "x"]), 400, "messages.1"),
    "unknown role": (body(messages=[{"role": "robot", "content": "x"}]), 400, "messages.0.role"),
    "no role": (body(messages=[{"content": "x"}]), 400, "messages.0.role"),
    "content a number": (body(messages=[USER, USER, {"role": "user", "content": 5}]), 400, "messages.2.content"),
    "content an empty list": (body(messages=[{"role": "user", "content": []}]), 400, "messages.0.content"),
    "a part without type": (body(messages=[{"role": "user", "content": [{}]}]), 400, "messages.0.content.0.type"),
    "a part that is a string": (body(messages=[{"role": "user", "content": ["x"]}]), 400, "messages.0.content.0"),
    "a text part without text": (
        body(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        400,
        "messages.0.content.0.text",
    ),
    "stream a string": (body(stream="true"), 400, "stream"),
    "stream_options without stream": (body(stream_options={"include_usage": True}), 400, "stream_options"),
    "stream_options a list": (body(stream=True, stream_options=[]), 400, "stream_options"),
    "temperature a string": (body(temperature="1"), 400, "temperature"),
    "temperature a bool": (body(temperature=True), 400, "temperature"),
    "max_tokens a fraction": (body(max_tokens=1.5), 400, "max_tokens"),
    "n a string": (body(n="2"), 400, "n"),
    "stop a number": (body(stop=1), 400, "stop"),
    "stop a list of numbers": (body(stop=[1]), 400, "stop.0"),
    "tools an object": (body(tools={}), 400, "tools"),
    "a tool that is a string": (body(tools=["x"]), 400, "tools.0"),
    "response_format a string": (body(response_format="json"), 400, "response_format"),
    "logit_bias of strings": (body(logit_bias={"1": "x"}), 400, "logit_bias.1"),
    "another's session": (body(session_params={"id": "x"}), 400, "session_params"),
    "a transfer host": (body(bootstrap_host="h"), 400, "bootstrap_host"),
    "n zero": (body(n=0), 400, "n"),
    "n above the limit": (body(n=9), 400, "n"),
    "n huge": (body(n=2**62), 400, "n"),
    "top_logprobs 21": (body(top_logprobs=21), 400, "top_logprobs"),
    "top_logprobs negative": (body(top_logprobs=-1), 400, "top_logprobs"),
    "max_tokens zero": (body(max_tokens=0), 400, "max_tokens"),
    "max_completion_tokens negative": (body(max_completion_tokens=-1), 400, "max_completion_tokens"),
    "temperature negative": (body(temperature=-0.1), 400, "temperature"),
    "temperature 2.1": (body(temperature=2.1), 400, "temperature"),
    "top_p zero": (body(top_p=0), 400, "top_p"),
    "top_p 1.1": (body(top_p=1.1), 400, "top_p"),
    **{
        f"the field {name}": (body(**{name: [1]}), 400, name)
        for name in (
            *("input_ids", "stop_regex", "return_hidden_states", "return_routed_experts"),
            *("watermark", "mm_processor_kwargs", "stop_token_ids"),
        )
    },
    "a place in the queue": (body(priority=9), 400, "priority"),
    "top_k beyond 32 bits": (body(top_k=2**31), 400, "top_k"),
    "min_tokens beyond 32 bits": (body(min_tokens=2**31), 400, "min_tokens"),
    "a bias of any size": (body(logit_bias={"5": 1e39}), 400, "logit_bias.5"),
    "a repetition penalty of nothing": (body(repetition_penalty=1e-300), 400, "repetition_penalty"),
    "presence_penalty 2.1": (body(presence_penalty=2.1), 400, "presence_penalty"),
    "frequency_penalty -2.1": (body(frequency_penalty=-2.1), 400, "frequency_penalty"),
    "a template argument that SGLang dies of": (
        body(chat_template_kwargs={"spaces_between_special_tokens": "x"}),
        400,
        "chat_template_kwargs.spaces_between_special_tokens",
    ),
    "include_usage a number": (
        body(stream=True, stream_options={"include_usage": 1}),
        400,
        "stream_options.include_usage",
    ),
    "tool_choice another word": (body(tool_choice="always"), 400, "tool_choice"),
    "a whole number beyond 64 bits": (
        b'{"model":"small","messages":[{"role":"user","content":"x"}],"seed":1' + b"0" * 30 + b"}",
        400,
        "seed",
    ),
    "a hundred thousand empty messages": (body(messages=[{}] * 100_000), 400, "messages.0.role"),
    "a million empty messages": (body(messages=[{}] * 1_000_000), 400, None),
    "larger than the limit": (body(messages=[{"role": "user", "content": "x" * (8 * 2**20)}]), 413, None),
}


@pytest.mark.parametrize(("content", "status", "param"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("path", [CHAT, "/v1/route"])
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_request_is_refused_at_the_door(
    shared_duo: Any, is_error_object: Any, path: str, content: bytes, status: int, param: str | None
) -> None:
    before = len(shared_duo.small.requests)
    began_s = time.monotonic()
    response = await shared_duo.client.post(path, content=content)
    assert time.monotonic() - began_s < 5
    assert response.status_code == status
    assert is_error_object(response)
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert len(shared_duo.small.requests) == before
    assert not shared_duo.large.requests
    assert (await shared_duo.chat()).status_code == 200
    assert len(shared_duo.small.requests) == before + 1


GOOD = {
    "null optional fields": body(stream=None, temperature=None, stop=None, tools=None, stream_options=None, user=None),
    "assistant last": body(messages=[USER, {"role": "assistant", "content": "I"}]),
    "only a system turn": body(messages=[{"role": "system", "content": "be brief"}]),
    "content missing": body(messages=[USER, {"role": "assistant", "tool_calls": [{"id": "a"}]}]),
    "64 levels": nested(63),
    "an integer temperature": body(temperature=1),
    "image parts": body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    "developer role": body(messages=[{"role": "developer", "content": "x"}, USER]),
    "null for the router's own": body(session_params=None, priority=None, rid="mine", custom_params={"a": 1}),
    "the ends of the ranges": body(
        n=8, top_logprobs=20, max_tokens=1, temperature=2, top_p=1, top_k=2**31 - 1, logit_bias={"5": 100}
    ),
    "64 bits": body(seed=2**63 - 1, max_tokens=2**63, unknown=2**64 - 1),
    "the other ends": body(n=1, top_logprobs=0, max_completion_tokens=1, temperature=0, top_p=0.001),
    "numbers and unknown fields": body(seed=7, logit_bias={"5": -1}, unknown={"a": [1, 2]}),
}


@pytest.mark.parametrize("content", GOOD.values(), ids=GOOD.keys())
@pytest.mark.asyncio(loop_scope="module")
async def test_what_openai_accepts_is_accepted(shared_duo: Any, content: bytes) -> None:
    before = len(shared_duo.small.requests)
    response = await shared_duo.client.post(CHAT, content=content)
    assert response.status_code == 200, response.text
    assert len(shared_duo.small.requests) == before + 1


async def test_brackets_within_strings_are_not_levels(duo: Any) -> None:
    assert (await duo.chat("[{" * 1000)).status_code == 200


@pytest.mark.parametrize("levels", [64, 2_000, 100_000])
async def test_depth_has_its_own_code_whatever_the_parser_says(duo: Any, levels: int) -> None:
    error = (await duo.client.post(CHAT, content=nested(levels))).json()["error"]
    assert error["code"] == "nesting_too_deep"
    assert (await duo.client.post(CHAT, content=nested(63))).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
async def test_the_deepest_body_that_may_be_allowed_reaches_the_worker(
    fake: Any, start_router: Any, route: str, stream: bool
) -> None:
    with pytest.raises(ValidationError):
        LimitsConfig(nesting_depth=_DEEPEST + 1)
    worker = await fake()
    router = await start_router({"small": [worker]}, limits={"nesting_depth": _DEEPEST})
    own = {"messages": [USER]} if "chat" in route else {"prompt": "hi"}
    deep: list[dict[str, Any]] = [
        {**own, "metadata": {"x": levels(_DEEPEST - 2)}},
        {**own, "other": levels(_DEEPEST - 1)},
    ]
    if "chat" in route:
        deep.append({"messages": [{**USER, "other": levels(_DEEPEST - 3)}]})
        part = {"type": "text", "text": "hi", "other": levels(_DEEPEST - 5)}
        deep.append({"messages": [{"role": "user", "content": [part]}]})
    for fields in deep:
        response = await router.client.post(route, json={"model": "small", "stream": stream, **fields})
        assert response.status_code == 200, response.text
        sent = worker.requests[-1].body
        assert all(sent[name] == value for name, value in fields.items())
        too_deep = {"model": "small", **fields, "other": levels(_DEEPEST)}
        refused = await router.client.post(route, json=too_deep)
        assert refused.json()["error"]["code"] == "nesting_too_deep"


def levels(count: int) -> list[Any]:
    """So many lists in each other."""
    nested_lists: list[Any] = []
    for _ in range(count - 1):
        nested_lists = [nested_lists]
    return nested_lists


@pytest.mark.parametrize(
    ("extra", "accepted"),
    [
        (b"[" + b"[]," * 93 + b"[]]", True),
        (b"[" + b"[]," * 94 + b"[]]", False),
        (b"[" + b"1," * 93 + b"1]", True),
        (b"[" + b"1," * 94 + b"1]", False),
        (b'"' + b"[,{" * 1000 + b'"', True),
        (b'"' + b'\\"[,{\\\\' * 1000 + b'"', True),
        (b"[" * 2000 + b",", False),
        (b"[" + b'"",' * 1000, False),
    ],
    ids=["arrays", "an array more", "numbers", "a number more", "in a string", "escapes", "no JSON", "quotes"],
)
async def test_values_of_a_body_are_counted(fake: Any, start_router: Any, extra: bytes, accepted: bool) -> None:
    # Seven values beside those in `a`: the body, the model, the list, the message and its two fields, and `a` itself.
    router = await start_router({"small": [await fake()]}, limits={"json_values": 101})
    content = b'{"model":"small","messages":[{"role":"user","content":"x"}],"a":' + extra + b"}"
    response = await router.client.post(CHAT, content=content)
    assert (response.status_code == 200) is accepted
    if not accepted:
        assert response.json()["error"]["code"] == "too_many_values"


async def test_slow_upload_is_a_408_and_a_closed_connection(fake: Any, start_router: Any) -> None:
    worker = await fake()
    router = await start_router({"small": [worker]}, limits={"upload_s": 0.3})
    reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    writer.write(b'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"model":')
    head, content = (await asyncio.wait_for(reader.read(), 5)).split(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 408 ")
    assert orjson.loads(content)["error"]["code"] == "upload_timeout"
    assert not worker.requests
    assert (await router.chat()).status_code == 200


async def test_declared_length_is_refused_before_the_body_is_sent(fake: Any, start_router: Any) -> None:
    worker = await fake()
    router = await start_router({"small": [worker]}, limits={"body_bytes": 1000})
    reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
    assert b"413" in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    assert not worker.requests


async def test_undeclared_length_is_refused_while_reading(fake: Any, start_router: Any, is_error_object: Any) -> None:
    worker = await fake()
    router = await start_router({"small": [worker]}, limits={"body_bytes": "64KiB"})
    sent_chunks = 0

    async def endless() -> Any:
        nonlocal sent_chunks
        while sent_chunks < 100:
            sent_chunks += 1
            yield b"x" * 4096

    response = await router.client.post(CHAT, content=endless())
    assert response.status_code == 413
    assert is_error_object(response)
    assert not worker.requests
    assert (await router.chat()).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/chat", "/v1/models/nope", "/v1/models/", "/docs"])
@pytest.mark.asyncio(loop_scope="module")
async def test_unknown_paths_get_the_error_object(shared_duo: Any, is_error_object: Any, path: str) -> None:
    response = await shared_duo.client.get(path)
    assert response.status_code == 404
    assert is_error_object(response)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/live")]
)
@pytest.mark.asyncio(loop_scope="module")
async def test_wrong_methods_get_the_error_object_and_are_told_the_right_one(
    shared_duo: Any, is_error_object: Any, method: str, path: str
) -> None:
    response = await shared_duo.client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"]
    assert is_error_object(response)


async def test_unexpected_failure_is_an_error_object_and_the_process_lives(
    duo: Any, is_error_object: Any, monkeypatch: pytest.MonkeyPatch, access_lines: Any
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    with monkeypatch.context() as patched:
        patched.setattr(type(duo.app.state.services.decider), "prepare", fail)
        response = await duo.chat()
    assert response.status_code == 500
    assert is_error_object(response)
    assert "secret detail" not in response.text
    assert duo.metric("crossfill_requests_total", model="none", outcome="internal_error") == 1
    assert access_lines()[-1]["error_code"] == "internal_error"
    assert (await duo.chat()).status_code == 200


async def test_bytes_that_are_not_http_get_the_error_object(duo: Any) -> None:
    reader, writer = await asyncio.open_connection(*duo.url.removeprefix("http://").split(":"))
    writer.write(b"\x16\x03\x01 not http\r\n\r\n")
    head, body = (await asyncio.wait_for(reader.read(), 5)).split(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    error = orjson.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert f"x-request-id: {error['request_id']}".encode() in head
