from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stream.sse import EventMeter

STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b": comment\n\n"
    b'data: {"choices":[{"delta":{"content":"\xf0\x9f\x98\x80"}}]}\r\n\r\n'
    b"event: other\rdata: x\r\r"
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_bytes_and_meaning_do_not_depend_on_where_reads_fall(cuts: list[int]) -> None:
    meter = EventMeter()
    bounds = sorted({0, *cuts, len(STREAM)})
    passed = b"".join(meter.feed(STREAM[start:end]) for start, end in pairwise(bounds)) + meter.finish()
    assert passed == STREAM
    assert (meter.content_events > 0, meter.is_done, meter.has_error) == (True, True, False)


@given(st.binary(max_size=300), st.integers(1, 20))
def test_any_bytes_pass_in_order_without_a_crash(data: bytes, size: int) -> None:
    meter = EventMeter()
    passed = b"".join(meter.feed(data[start : start + size]) for start in range(0, len(data), size)) + meter.finish()
    assert data.startswith(passed)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        (b'data: {"choices":[{"delta":{"content":null}}]}', False),
        (b'data: {"choices":[],"usage":{}}', False),
        (b"data: [DONE]", False),
        (b": content", False),
        (b"data: not json", False),
        (b"data: 5", False),
        (b'data: {"choices":{"a":1}}', False),
        (b'data: {"choices":[{"delta":{"content":"x"}}]}', True),
        (b'data:{"choices":[{"delta":{"reasoning_content":"x"}}]}', True),
        (b'data: {"choices":[{"delta":{}},{"delta":{"tool_calls":[{"index":0}]}}]}', True),
        (b'event: message\nid: 7\ndata: {"choices":\ndata: [{"delta":{"content":"x"}}]}', True),
    ],
)
def test_first_content(event: bytes, expected: bool) -> None:
    meter = EventMeter()
    meter.feed(event + b"\n\n")
    assert (meter.content_events > 0) is expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"error":{"message":"m"}}', True),
        (b'{"object":"error","message":"m"}', True),
        (b'{"error":"m"}', True),
        (b'{"error":null,"choices":[]}', False),
        (b'{"choices":[{"delta":{"content":"an \\"error\\" and [DONE]"}}]}', False),
    ],
)
def test_errors_are_told_from_text_about_errors(data: bytes, expected: bool) -> None:
    meter = EventMeter()
    meter.feed(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n' + b"data: " + data + b"\n\n")
    assert meter.has_error is expected
    assert not meter.is_done


def test_byte_order_mark_before_the_first_event_passes_and_hides_nothing() -> None:
    event = b'\xef\xbb\xbfdata: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    meter = EventMeter()
    assert meter.feed(event) == event
    assert meter.content_events > 0
    later = EventMeter()
    later.feed(b": comment\n\n" + event)
    assert later.content_events == 0


def test_huge_event_is_passed_on_in_parts() -> None:
    meter = EventMeter()
    head = b"data: " + b"x" * 2**21
    assert meter.feed(head) == head
    assert meter.is_inside_event
    assert meter.feed(b"yy\n\ndata: [DONE]\n\n") == b"yy\n\ndata: [DONE]\n\n"
    assert not meter.is_inside_event
    assert meter.is_done


USAGE = {"prompt_tokens": 7, "completion_tokens": 2}
WITH_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'


@pytest.mark.parametrize("passes_usage", [True, False])
def test_usage_is_read_and_withheld_from_those_who_did_not_ask(passes_usage: bool) -> None:
    meter = EventMeter(passes_usage=passes_usage)
    stream = [TEXT, WITH_USAGE, b"data: [DONE]\n\n"]
    passed = b"".join(meter.feed(part) for part in stream)
    assert passed == (b"".join(stream) if passes_usage else TEXT + stream[-1])
    assert meter.usage == USAGE


def test_usage_within_a_content_event_is_taken_out_and_the_rest_kept() -> None:
    event = b'id: 5\ndata: {"choices":[{"index":0,"delta":{"content":"x"}}],"usage":{"prompt_tokens":7}}\n\n'
    meter = EventMeter(passes_usage=False)
    passed = meter.feed(event)
    assert passed == b'id: 5\ndata: {"choices":[{"index":0,"delta":{"content":"x"}}],"usage":null}\n\n'
    assert meter.usage == {"prompt_tokens": 7}


def test_content_events_are_counted() -> None:
    meter = EventMeter()
    meter.feed(TEXT + WITH_USAGE + TEXT + b'data: {"choices":[{"index":0,"text":"x"}]}\n\n: x\n\n')
    assert meter.content_events == 3


HEAD = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
NULLS = b'"reasoning_content":null,"tool_calls":null}'
SGLANG = HEAD + b'{"role":null,"content":"x",' + NULLS + b',"finish_reason":null}],"usage":null}\n\n'
KINDS = {
    "content": SGLANG,
    "talks of errors": SGLANG.replace(b'"x"', rb'"\"error\": 5, \"usage\": {}, [DONE]"'),
    "tool call": HEAD + b'{"content":null,"tool_calls":[{"function":{"name":"f"}}]},"finish_reason":null}]}\n\n',
    "finish": HEAD + b'{"content":null,' + NULLS + b',"finish_reason":"stop"}],"usage":null}\n\n',
    "finish again": HEAD + b'{"content":""},"finish_reason": "length"}]}\n\n',
    "usage": b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":7}}\n\n',
    "usage within": SGLANG.replace(b'"usage":null', b'"usage": {"prompt_tokens":7}'),
    "error": b'data: {"id":"c","error":{"message":"m"}}\n\n',
    "flat error": b'data: {"id":"c","object": "error","message":"m"}\n\n',
    "comment": b": x\n\n",
    "done": b"data: [DONE]\n\n",
}


@given(st.lists(st.sampled_from(sorted(KINDS)), max_size=12))
def test_the_short_cut_for_one_choice_changes_nothing(kinds: list[str]) -> None:
    quick, thorough = EventMeter(passes_usage=False, is_one_choice=True), EventMeter(passes_usage=False)
    for kind in ["content", *kinds]:
        assert quick.feed(KINDS[kind]) == thorough.feed(KINDS[kind])
        seen = [(m.content_events, m.has_error, m.is_done, m.usage) for m in (quick, thorough)]
        assert seen[0] == seen[1], kind


def test_the_short_cut_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = EventMeter(is_one_choice=True)
    meter.feed(KINDS["content"])
    monkeypatch.setattr("router.stream.sse.orjson.loads", None)
    assert meter.feed(KINDS["content"]) == KINDS["content"]
    with pytest.raises(TypeError):
        meter.feed(KINDS["finish"])


def test_a_torn_huge_event_stays_one() -> None:
    meter = EventMeter()
    meter.feed(b"data: " + b"x" * 2**20 + b"x")
    assert meter.feed(b"y" * 1000) == b""
    assert meter.finish() == b"y" * 1000
    assert meter.is_inside_event


def test_an_error_without_its_blank_line_gets_one() -> None:
    event = b'data: {"error":{"message":"boom"}}'
    meter = EventMeter()
    assert meter.feed(TEXT + event + b"\n") == TEXT
    assert meter.finish() == event + b"\n\n"
    assert meter.has_error
