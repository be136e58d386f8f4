from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.fake_worker import Reply
from router.stream.answer_report import report_comment, with_report

GUIDED = "guided; blocks=33/34; density=0.48; sender=large"
REUSE = {"mode": "guided", "row_blocks": {"guided": 33, "prompt": 34}, "density": 0.48, "sender": "large"}
ASKED = {"report": True}
JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5), st.lists, max_leaves=5)
REPORT: dict[str, object] = {"model": "m"}


@given(st.dictionaries(st.text(max_size=5) | st.just("crossfill"), JSON), st.sampled_from([None, 1]))
@settings(deadline=None)
def test_every_object_gets_the_member_and_keeps_the_others(answer: dict[str, Any], indent: int | None) -> None:
    body = json.dumps(answer, indent=indent).encode() + b"\n"
    told = with_report(body, REPORT)
    assert told.count(b'"crossfill":') == 1
    assert orjson.loads(told) == {**answer, "crossfill": REPORT}


def test_other_members_stay_byte_for_byte() -> None:
    assert with_report(b'{ "a" : 1.50,\n "b":"\\u00e9" }\n', REPORT) == (
        b'{ "a" : 1.50,\n "b":"\\u00e9","crossfill":{"model":"m"}}'
    )
    assert with_report(b" { } ", REPORT) == b'{"crossfill":{"model":"m"}}'
    for word in (b'{"text": "\\"crossfill\\""}', b'{"text": "crossfill", "n": 123456789012345678901}'):
        assert with_report(word, REPORT) == word[:-1] + b',"crossfill":{"model":"m"}}'


@pytest.mark.parametrize("body", [b"", b"  ", b"[1]", b'"a"', b"1", b"{", b"}", b"null", b'["crossfill"]'])
def test_what_is_no_json_object_is_left_alone(body: bytes) -> None:
    assert with_report(body, REPORT) == body


def test_a_comment_is_one_line() -> None:
    comment = report_comment({"a": "x\r\n\u2028y"})
    assert comment.startswith(b": crossfill {")
    assert comment.endswith(b"}\n\n")
    assert len(comment.splitlines()) == 2


@pytest.mark.parametrize("how", ["field", "header"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_whole_answers_tell_the_same_as_their_headers(fake: Any, start_router: Any, path: str, how: str) -> None:
    router = await start_router({"small": [await fake(Reply(reuse=GUIDED))], "large": [await fake()]})
    prompt: dict[str, Any] = (
        {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    asked = {"model": "auto", **prompt, **({"crossfill": ASKED} if how == "field" else {})}
    headers = {"crossfill": json.dumps(ASKED)} if how == "header" else {}
    response = await router.client.post(path, json=asked, headers=headers)
    assert response.headers["content-length"] == str(len(response.content))
    report = response.json()["crossfill"]
    assert report == {
        "model": "small",
        "decision": json.loads(response.headers["x-crossfill-decision"]),
        "reuse": REUSE,
        "request_id": response.headers["x-request-id"],
    }
    assert report["decision"]["reason"] == "threshold_small"
    assert report["decision"]["tau"] == 0.3
    assert set(report["decision"]["scores"]) == {"small", "large"}


async def test_without_being_asked_nothing_is_added(fake: Any, start_router: Any) -> None:
    raw = '{ "choices" : [ {} ],  "odd":"spacing é 😀" }\n'.encode()
    router = await start_router({"small": [await fake(Reply(raw_chunks=(raw,), reuse=GUIDED))]})
    for options in ({}, {"crossfill": {"report": False}}, {"crossfill": {"reuse": "off"}}):
        assert (await router.chat(**options)).content == raw
    told = (await router.chat(crossfill=ASKED)).content
    assert told.startswith(raw.rstrip()[:-1].rstrip() + b',"crossfill":{')


async def test_a_member_that_a_worker_calls_so_is_replaced(fake: Any, start_router: Any) -> None:
    raw = b'{"crossfill": "mine", "choices": [{}]}'
    router = await start_router({"small": [await fake(Reply(raw_chunks=(raw,)))]})
    assert (await router.chat()).content == raw
    told = await router.chat(crossfill=ASKED)
    assert told.content.count(b'"crossfill"') == 1
    assert told.json()["crossfill"]["model"] == "small"
    assert told.json()["crossfill"]["reuse"] == {"mode": "none"}


async def test_errors_have_no_report(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(status=400, body={"error": {"message": "no"}}))]})
    for stream in (False, True):
        assert set((await router.chat(stream=stream, crossfill=ASKED)).json()) == {"error"}


async def test_streams_tell_it_in_one_comment_before_the_first_data_line(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(text="a b", reuse=GUIDED))]})
    plain = await router.chat(stream=True)
    assert b"crossfill" not in plain.content
    response = await router.chat(stream=True, crossfill=ASKED)
    comment, first, *_ = response.content.split(b"\n\n")
    report = json.loads(comment.removeprefix(b": crossfill "))
    assert first.startswith(b"data: ")
    assert (report["model"], report["reuse"]) == ("small", REUSE)
    assert report["request_id"] == response.headers["x-request-id"]
    assert report["decision"] == json.loads(response.headers["x-crossfill-decision"])
    assert response.content.count(b": crossfill ") == 1
    assert response.content.count(b"data: ") == plain.content.count(b"data: ")


async def test_behind_early_headers_there_is_one_comment_of_each_kind(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(ttft_s=0.5, reuse=GUIDED))]}, streams={"heartbeat_s": 0.15})
    content = (await router.chat(stream=True, crossfill=ASKED)).content
    before = content[: content.index(b"data: ")].split(b"\n\n")[:-1]
    *beats, decision, reuse, report = before
    assert beats
    assert set(beats) == {b": still working"}
    assert "x-crossfill-worker" in json.loads(decision.removeprefix(b": "))
    assert reuse == f": x-crossfill-reuse: {GUIDED}".encode()
    assert json.loads(report.removeprefix(b": crossfill "))["reuse"] == REUSE


@pytest.mark.parametrize("options", [{}, {"crossfill": ASKED}], ids=["without", "with"])
async def test_a_byte_order_mark_stays_only_where_it_is_one(fake: Any, start_router: Any, options: Any) -> None:
    mark = b"\xef\xbb\xbf"
    raw = (mark + b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', b"data: [DONE]\n\n")
    router = await start_router({"small": [await fake(Reply(raw_chunks=raw))]})
    content = (await router.chat(stream=True, **options)).content
    assert content.startswith(mark) is not bool(options)
    assert content.count(mark) == (not options)
    assert content.endswith(raw[0].removeprefix(mark) + raw[1])


async def test_the_sdk_reads_the_report_and_does_not_see_comments(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(chunks=("a", "b"), reuse=GUIDED))]})
    asked: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "x"}]}
    asked["extra_body"] = {"crossfill": ASKED}
    answer = await router.sdk().chat.completions.create(**asked)
    assert answer.model_extra["crossfill"]["reuse"]["mode"] == "guided"
    stream = await router.sdk().chat.completions.create(**asked, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "ab"
