from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from engines.fake_worker import Reply
from router.stream.sse import EventMeter
from router.stream.stream_repair import Repair, StreamRepair

DONE = b"data: [DONE]\n\n"


def event(*choices: dict[str, Any], **fields: Any) -> bytes:
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: " + json.dumps({**head, "choices": list(choices), **fields}).encode() + b"\n\n"


def call(**fields: Any) -> dict[str, Any]:
    return {"index": 0, "delta": {"tool_calls": [fields]}, "finish_reason": None}


def say(index: int, text: str = "", finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text} if text else {}, "finish_reason": finish}


def mended(*stream: bytes) -> tuple[list[dict[str, Any]], Counter[Repair]]:
    told: list[Repair] = []
    meter = EventMeter(repair=StreamRepair(told.append))
    passed = b"".join(meter.feed(part) for part in stream) + meter.finish()
    lines = [line.removeprefix(b"data: ") for line in passed.split(b"\n\n") if line]
    return [json.loads(line) for line in lines if line != b"[DONE]"], Counter(told)


def indices(parsed: list[dict[str, Any]]) -> list[int | None]:
    return [c.get("index") for e in parsed for choice in e["choices"] for c in choice["delta"].get("tool_calls", [])]


def test_missing_tool_indices_are_filled_in() -> None:
    function = {"name": "weather", "arguments": ""}
    parsed, told = mended(
        event(call(id="a", function=function)),
        event(call(function={"arguments": '{"ci'})),
        event(call(id="b", function=function)),
        event(call(function={"arguments": '{"to'})),
        event(call(id="a", function={"arguments": 'ty"'})),
    )
    assert indices(parsed) == [0, 0, 1, 1, 0]
    assert told == {Repair.TOOL_INDEX: 5}


def test_indices_that_are_there_are_kept_and_counted_on() -> None:
    stream = [event(call(index=3, id="a", function={"name": "f"})), event(call(id="b", function={"name": "f"}))]
    parsed, told = mended(*stream)
    assert indices(parsed) == [3, 4]
    assert told == {Repair.TOOL_INDEX: 1}


@pytest.mark.parametrize(
    "calls", [[{"function": {"arguments": "{"}}], [{"function": {"arguments": "{"}}] * 2], ids=["first", "two at once"]
)
def test_an_index_that_is_not_certain_is_left_out_and_told(calls: list[dict[str, Any]]) -> None:
    original = event({"index": 0, "delta": {"tool_calls": calls}})
    told: list[Repair] = []
    assert EventMeter(repair=StreamRepair(told.append)).feed(original) == original
    assert set(told) == {Repair.TOOL_INDEX_UNKNOWN}


def test_calls_of_different_choices_are_counted_apart() -> None:
    first, second = call(id="a", function={"name": "f"}), call(id="b", function={"name": "f"})
    parsed, _ = mended(event(first), event({**second, "index": 1}))
    assert indices(parsed) == [0, 0]


def finishes(parsed: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(c["index"], c["finish_reason"]) for e in parsed for c in e["choices"] if c.get("finish_reason")]


def test_each_choice_finishes_once() -> None:
    stream = [event(say(0, "a")), event(say(1, "b")), event(say(0, finish="length")), event(say(0, finish="stop"))]
    parsed, told = mended(*stream, event(say(1, finish="stop")), DONE)
    assert finishes(parsed) == [(0, "length"), (1, "stop")]
    assert told == {Repair.FINISH_TWICE: 1}


def test_a_choice_left_open_is_finished_before_usage_and_done() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    parsed, told = mended(
        event(say(0, "a")), event(say(1, "b")), event(say(1, finish="stop")), event(usage=usage), DONE
    )
    assert finishes(parsed) == [(1, "stop"), (0, "stop")]
    assert parsed[-1]["usage"] == usage
    assert parsed[-2]["id"] == "c1"
    assert told == {Repair.FINISH_MISSING: 1}


def test_text_completions_are_closed_in_their_own_shape() -> None:
    text = [{"index": index, "text": "x", "finish_reason": None} for index in range(2)]
    parsed, _ = mended(event(*text), event({"index": 0, "text": "", "finish_reason": "stop"}), DONE)
    assert parsed[-1]["choices"] == [{"index": 1, "text": "", "logprobs": None, "finish_reason": "stop"}]


@pytest.mark.parametrize(
    "stream",
    [
        [event(say(0, "a")), DONE],
        [event(say(0, "a"), say(1, "b")), event(say(0, finish="stop"), say(1, finish="length")), DONE],
        [event(call(index=0, id="a", function={"name": "f"})), event(call(index=0)), event(say(0, finish="stop"))],
        [event({"index": "x"}), event({"delta": 5}), b'data: {"choices":[5,null]}\n\n'],
    ],
    ids=["never finished", "two", "tools", "nonsense"],
)
def test_streams_without_these_faults_keep_every_byte(stream: list[bytes]) -> None:
    told: list[Repair] = []
    meter = EventMeter(repair=StreamRepair(told.append))
    assert [meter.feed(part) for part in stream] == stream
    assert not told


async def test_the_sdks_stream_helper_puts_a_call_without_indices_together(
    fake: Any, start_router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    deltas = (
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"function": {"arguments": '"Paris"}'}}]},
    )
    worker = await fake(Reply(chunks=deltas))
    router = await start_router({"small": [worker]})
    asked: Any = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
    async with router.sdk().chat.completions.stream(**asked) as stream:
        final = await stream.get_final_completion()
    [made] = final.choices[0].message.tool_calls
    assert (made.function.name, made.function.arguments) == ("weather", '{"city":"Paris"}')
    assert router.metric("crossfill_stream_repairs_total", kind="tool_index") == 3
    assert caplog.text.count("tool_index") == 1
    # The control: without the repair the helper fails.
    bare = router.sdk().with_options(base_url=f"{worker.url}/v1")
    with pytest.raises((TypeError, AttributeError, ValueError, AssertionError)):
        async with bare.chat.completions.stream(**asked) as stream:
            await stream.get_final_completion()


async def test_both_choices_of_a_stream_are_closed(fake: Any, start_router: Any) -> None:
    raw = (event(say(0, "a"), say(1, "b")), event(say(1, finish="stop")), event(say(1, finish="stop")), DONE)
    router = await start_router({"small": [await fake(Reply(raw_chunks=raw))]})
    response = await router.chat(stream=True, n=2)
    lines = [json.loads(line[6:]) for line in response.content.split(b"\n\n")[:-2]]
    assert sorted(finishes(lines)) == [(0, "stop"), (1, "stop")]
    assert router.metric("crossfill_stream_repairs_total", kind="finish_twice") == 1
    assert router.metric("crossfill_stream_repairs_total", kind="finish_missing") == 1
