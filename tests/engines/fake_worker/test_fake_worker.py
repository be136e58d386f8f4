from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from engines.fake_worker import FakeWorker, Reply, Script, ScriptError, SlowHealth, load_script

if TYPE_CHECKING:
    from pathlib import Path

CHAT = "/v1/chat/completions"
HEAVY_IMPORTS = (
    "import sys, engines.fake_worker; print(','.join(sorted({'torch', 'sglang', 'router'} & set(sys.modules))))"
)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "one two"}], **fields}


async def ask(worker: FakeWorker, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=worker.url, timeout=10) as client:
        return await client.post(CHAT, json=body(**fields))


async def read_into(client: httpx.AsyncClient, seen: bytearray) -> None:
    async with client.stream("POST", CHAT, json=body(stream=True)) as response:
        async for chunk in response.aiter_raw():
            seen += chunk


def deltas(response: httpx.Response) -> list[dict[str, Any]]:
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    return [choice["delta"] for event in parsed for choice in event.get("choices", [])]


async def test_stream_has_role_content_finish_and_done() -> None:
    async with FakeWorker(Script(responses=(Reply(chunks=("a", "b")),))) as worker:
        response = await ask(worker, stream=True)
    assert deltas(response) == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]
    assert response.text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in response.text


async def test_usage_comes_when_asked_for() -> None:
    async with FakeWorker() as worker:
        streamed = await ask(worker, stream=True, stream_options={"include_usage": True})
        whole = await ask(worker)
    assert '"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":5,"total_tokens":7}' in streamed.text
    assert whole.json()["usage"]["prompt_tokens"] == 2
    assert whole.json()["choices"][0]["message"]["content"] == "Hello from the fake worker."


async def test_responses_are_used_in_order_and_the_last_one_stays() -> None:
    async with FakeWorker(Script(responses=(Reply(status=400, body={"a": 1}), Reply(text="x")))) as worker:
        statuses = [(await ask(worker)).status_code for _ in range(3)]
    assert statuses == [400, 200, 200]


@pytest.mark.parametrize(("closed_after", "expected"), [(0, ""), (1, "a"), (2, "ab"), (3, "abc")])
async def test_connection_closes_after_as_many_chunks(closed_after: int, expected: str) -> None:
    reply = Reply(chunks=("a", "b", "c"), close_after_chunks=closed_after)
    async with FakeWorker(Script(responses=(reply,))) as worker, httpx.AsyncClient(base_url=worker.url) as client:
        seen = bytearray()
        with pytest.raises(httpx.RemoteProtocolError):
            await read_into(client, seen)
    text = "".join(delta.get("content", "") for delta in deltas(httpx.Response(200, content=bytes(seen))))
    assert text == expected
    assert b'finish_reason":"stop' not in seen


async def test_connection_closes_before_headers() -> None:
    async with FakeWorker(Script(responses=(Reply(close_before_headers=True),))) as worker:
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(worker)


async def test_error_event_ends_the_stream() -> None:
    async with FakeWorker(Script(responses=(Reply(chunks=("a", "b"), error_event_after=1),))) as worker:
        response = await ask(worker, stream=True)
    assert json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == 500
    assert "[DONE]" not in response.text
    assert '"content":"b"' not in response.text


async def test_done_can_be_left_out() -> None:
    async with FakeWorker(Script(responses=(Reply(no_done=True),))) as worker:
        assert "[DONE]" not in (await ask(worker, stream=True)).text


@pytest.mark.parametrize("stream", [False, True])
async def test_gzip_is_real(stream: bool) -> None:
    async with FakeWorker(Script(responses=(Reply(gzip=True),))) as worker:
        response = await ask(worker, stream=stream)
    assert response.headers["content-encoding"] == "gzip"
    assert "worker" in response.text


async def test_raw_chunks_are_the_whole_body() -> None:
    async with FakeWorker(Script(responses=(Reply(raw_chunks=(b"\xf0\x9f", b"\x98\x80")),))) as worker:
        assert (await ask(worker, stream=True)).content == "😀".encode()


async def test_whole_deltas_make_tool_calls() -> None:
    call = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]}
    async with FakeWorker(Script(responses=(Reply(chunks=(call,)),))) as worker:
        response = await ask(worker, stream=True)
    assert call in deltas(response)
    assert '"finish_reason":"tool_calls"' in response.text


def finished(response: httpx.Response) -> list[int]:
    events = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
    return [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]


async def test_choices_are_interleaved_and_each_is_finished_once() -> None:
    async with FakeWorker(Script(responses=(Reply(chunks=("a", "b")),))) as worker:
        streamed = await ask(worker, stream=True, n=2)
        whole = (await ask(worker, n=2)).json()
    events = [json.loads(event.removeprefix("data: ")) for event in streamed.text.split("\n\n")[:-2]]
    told = [(choice["index"], choice["delta"].get("content")) for event in events for choice in event["choices"]]
    assert told == [(0, ""), (1, ""), (0, "a"), (1, "a"), (0, "b"), (1, "b"), (0, None), (1, None)]
    assert finished(streamed) == [0, 1]
    assert [(choice["index"], choice["message"]["content"]) for choice in whole["choices"]] == [(0, "ab"), (1, "ab")]
    assert whole["usage"]["completion_tokens"] == 4


async def test_an_object_with_choices_is_a_whole_event() -> None:
    twice = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    async with FakeWorker(Script(responses=(Reply(chunks=("a", twice)),))) as worker:
        response = await ask(worker, stream=True)
    assert finished(response) == [0, 0]
    assert '"object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]' in response.text


@pytest.mark.parametrize(("prompt", "choices"), [("one two", 1), (["one", "two"], 2)])
async def test_text_completions_have_their_own_shape(prompt: Any, choices: int) -> None:
    reply = Reply(chunks=("a", {"tool_calls": []}, "b"))
    fields = {"model": "m", "prompt": prompt, "stream_options": {"include_usage": True}}
    async with (
        FakeWorker(Script(responses=(reply,))) as worker,
        httpx.AsyncClient(base_url=worker.url, timeout=10) as client,
    ):
        streamed = await client.post("/v1/completions", json={**fields, "stream": True})
        whole = (await client.post("/v1/completions", json=fields)).json()
    events = [json.loads(event.removeprefix("data: ")) for event in streamed.text.split("\n\n")[:-2]]
    of_first = [choice["text"] for event in events for choice in event["choices"] if choice["index"] == 0]
    assert of_first == ["a", "", "b", ""]
    assert finished(streamed) == list(range(choices))
    assert {event["object"] for event in events} == {whole["object"]} == {"text_completion"}
    assert [choice["text"] for choice in whole["choices"]] == ["ab"] * choices
    usage = {"prompt_tokens": 2, "completion_tokens": 3 * choices, "total_tokens": 2 + 3 * choices}
    assert events[-1]["usage"] == whole["usage"] == usage
    assert [request.path for request in worker.requests] == ["/v1/completions"] * 2


async def test_peer_that_leaves_is_recorded() -> None:
    async with FakeWorker(Script(responses=(Reply(hang=True), Reply()))) as worker:
        with pytest.raises(httpx.ReadTimeout):
            async with httpx.AsyncClient(base_url=worker.url, timeout=0.2) as client:
                await client.post(CHAT, json=body())
        await ask(worker)
        async with asyncio.timeout(5):
            while not worker.requests[0].disconnected:  # noqa: ASYNC110 - set by a server, not an event
                await asyncio.sleep(0.01)
        assert not worker.requests[1].disconnected
        assert worker.requests[1].finished


async def test_requests_are_recorded_and_served() -> None:
    async with FakeWorker() as worker, httpx.AsyncClient(base_url=worker.url) as client:
        await client.post(CHAT, json=body(seed=3), headers={"X-Request-Id": "r1"})
        [served] = (await client.get("/_fake/requests")).json()
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake-model"
    assert served["body"] == worker.requests[0].body == body(seed=3)
    assert served["headers"]["x-request-id"] == "r1"


async def test_health_follows_the_script_and_can_be_changed() -> None:
    async with FakeWorker(Script(health="failing")) as worker, httpx.AsyncClient(base_url=worker.url) as client:
        assert (await client.get("/health")).status_code == 503
        worker.health = "ok"
        assert (await client.get("/health")).status_code == 200
        for health in ("hanging", SlowHealth(slow_s=5)):
            worker.health = health
            with pytest.raises(httpx.ReadTimeout):
                await client.get("/health", timeout=0.1)
        worker.health = SlowHealth(slow_s=0.01)
        assert (await client.get("/health")).status_code == 200
    assert worker.probes == 5


async def test_worker_comes_back_on_its_port() -> None:
    worker = FakeWorker()
    async with worker:
        url = worker.url
    with pytest.raises(httpx.ConnectError):
        await ask(worker)
    async with worker:
        assert worker.url == url
        assert (await ask(worker)).status_code == 200


def test_script_file(tmp_path: Path) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(
        "model: demo\nhealth: {slow_s: 0.5}\nresponses:\n  - text: hi\n    ttft_s: 0.1\n"
        "  - raw_chunks: [plain, !!binary 8J+YgA==]\n"
    )
    script = load_script(path)
    assert script.health == SlowHealth(slow_s=0.5)
    assert script.responses[0] == Reply(text="hi", ttft_s=0.1)
    assert script.responses[1].raw_chunks == (b"plain", "😀".encode())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("responses: [{txt: hi}]", "responses.0.txt"),
        ("helth: ok", "helth"),
        ("responses: []", "responses"),
        ("responses: [{ttft_s: -1}]", "ttft_s"),
        ("[", "expected the node content"),
    ],
)
def test_bad_script_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(text)
    with pytest.raises(ScriptError) as caught:
        load_script(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_program_serves_a_script_and_ends_on_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "script.yaml"
    path.write_text("model: demo")
    command = [sys.executable, "-m", "crossfill", "fake-worker", str(path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split("listens on ")[1].strip()
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
            assert json.load(response)["data"][0]["id"] == "demo"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


def test_import_brings_neither_torch_nor_the_router() -> None:
    output = subprocess.run([sys.executable, "-c", HEAVY_IMPORTS], capture_output=True, text=True, check=True).stdout
    assert output.strip() == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_reuse_is_told_and_refused_as_workers_do(stream: bool) -> None:
    guided, refusing = Reply(reuse="guided; blocks=1/2"), Reply(reuse_refusal="cached")
    required = {"custom_params": {"crossfill": {"reuse": "require", "tenant": "t", "salt": ""}}}
    async with FakeWorker(Script(responses=(guided, refusing, refusing, Reply()))) as worker:
        answers = [await ask(worker, stream=stream, **asked) for asked in (required, {}, required, {})]
    told = [answer.headers.get("x-crossfill-reuse") for answer in answers]
    assert told == ["guided; blocks=1/2", "none; reason=cached", "none; reason=cached", None]
    assert [answer.status_code for answer in answers] == [200, 200, 409, 200]
    assert answers[2].headers["content-type"].startswith("application/json")
    assert answers[2].json()["type"] == "ReuseRefused"
    assert answers[2].json()["message"].endswith("nothing could be reused: cached")
