from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.fake_worker import Reply
from router.dispatch.reuse_outcome import (
    LONGEST_HEADER,
    NOTHING_SAID,
    ReuseMode,
    ReuseOutcome,
    ReuseReason,
    RowBlocks,
    reuse_outcome,
)

GUIDED = "guided; blocks=33/34; density=0.48; sender=smollm2-135m-instruct"
PIECES = [
    "guided",
    "none",
    ";",
    "=",
    "/",
    " ",
    "reason",
    "blocks",
    "density",
    "sender",
    "1",
    "33/34",
    "\x00",
    "\xff",
    "é",
]


def read(value: str) -> ReuseOutcome:
    return reuse_outcome([("content-type", "text/plain"), ("X-Crossfill-Reuse", value)])


def test_every_value_is_read() -> None:
    said = ReuseOutcome(GUIDED, ReuseMode.GUIDED, None, RowBlocks(33, 34), 0.48, "smollm2-135m-instruct")
    assert read(GUIDED) == said
    told = {"mode": "guided", "row_blocks": {"guided": 33, "prompt": 34}, "density": 0.48}
    assert said.to_json() == {**told, "sender": "smollm2-135m-instruct"}
    fallback = read("fallback; reason=store_slow")
    assert (fallback.mode, fallback.reason) == (ReuseMode.FALLBACK, ReuseReason.STORE_SLOW)
    assert fallback.to_json() == {"mode": "fallback", "reason": "store_slow"}


def test_no_header_or_an_empty_one_says_nothing() -> None:
    assert reuse_outcome([("content-type", "text/plain")]) is NOTHING_SAID
    assert read("") is read("  ") is NOTHING_SAID
    assert NOTHING_SAID.to_json() == {"mode": "none"}


@pytest.mark.parametrize("mode", list(ReuseMode))
def test_every_mode_is_known_and_none_of_other_case(mode: ReuseMode) -> None:
    assert read(f"{mode}; x=1").mode is mode
    assert read(mode.upper()).mode is ReuseMode.NONE


def test_unknown_words_are_bounded() -> None:
    assert read("telepathy; reason=cached").mode is ReuseMode.NONE
    assert read("none; reason=because-of-you").reason is ReuseReason.OTHER
    assert read("none; reason=").reason is None


@pytest.mark.parametrize("blocks", ["34/33", "1", "-1/2", "1/2/3", "٣/٤", "1e3/2", "9999999999/9999999999", "", "a/b"])
def test_blocks_that_cannot_be_are_not_told(blocks: str) -> None:
    assert read(f"guided; blocks={blocks}").row_blocks is None


@pytest.mark.parametrize("density", ["1.5", "-0.1", "nan", "inf", "1e-3", "", "0,5", "\u0660", "1_0", "2"])
def test_densities_that_are_no_share_are_not_told(density: str) -> None:
    assert read(f"guided; density={density}").density is None
    assert read("guided; density=1.0").density == 1


@pytest.mark.parametrize("sender", ["auto", "", "-x", "a b", "größe", "x" * 201])
def test_senders_that_no_model_can_be_called_are_not_told(sender: str) -> None:
    assert read(f"guided; sender={sender}").sender is None


@pytest.mark.parametrize(("said", "hops"), [("1", 1), ("255", 255), ("0", None), ("-1", None), ("x", None), ("", None)])
def test_an_approximate_prefix_is_told(said: str, hops: int | None) -> None:
    found = read(f"none; reason=cached; prefix_hops={said}")
    assert found.prefix_hops == hops
    assert found.to_json().get("prefix_hops") == hops


def test_the_first_header_and_the_first_pair_of_a_name_count() -> None:
    assert reuse_outcome([("x-crossfill-reuse", "guided"), ("x-crossfill-reuse", "map")]).header == "guided"
    assert read("none; reason=cached; reason=off").reason is ReuseReason.CACHED


def test_a_long_value_is_cut_between_pairs() -> None:
    many = "guided; " + "; ".join(f"n{number}={number}" for number in range(100))
    header = read(many).header
    assert LONGEST_HEADER - 10 < len(header) <= LONGEST_HEADER
    assert many.startswith(header + ";")
    # Cut off within a value it would be another one.
    assert read(f"guided; x={'x' * 480}; density=0.{'4' * 20}").header == f"guided; x={'x' * 480}"
    assert read("x" * 10_000).header == "x" * LONGEST_HEADER
    exact = "none; x=".ljust(LONGEST_HEADER, "x")
    assert read(exact).header == exact


def test_what_is_no_printable_ascii_is_replaced() -> None:
    assert (
        read("guided;\r\nset-cookie: a=b; sender=größe\x00\x7f\udcff").header
        == "guided;??set-cookie: a=b; sender=gr??e???"
    )


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=400).map("".join))
@settings(deadline=None)
def test_whatever_is_said_is_safe_to_repeat(value: str) -> None:
    outcome = read(value)
    assert len(outcome.header) <= LONGEST_HEADER
    assert all(" " <= sign <= "~" for sign in outcome.header)
    assert read(outcome.header) == outcome
    assert json.loads(json.dumps(outcome.to_json())) == outcome.to_json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "told", "mode", "reason"),
    [
        (GUIDED, GUIDED, "guided", "none"),
        ("none; reason=nothing_stored", "none; reason=nothing_stored", "none", "nothing_stored"),
        ("fallback; reason=store_slow", "fallback; reason=store_slow", "fallback", "store_slow"),
        ("telepathy; reason=magic", "telepathy; reason=magic", "none", "other"),
        ("guided; sender=größe", "guided; sender=gr??e", "guided", "none"),
        ("map; " + "a=b;" * 2500, ("map; " + "a=b;" * 127)[:-1], "map", "none"),
        ("corrected" + ";reason=cached" * 100, "corrected" + ";reason=cached" * 35, "corrected", "cached"),
    ],
    ids=["guided", "none", "fallback", "unknown", "not ASCII", "10 kB", "a hundred pairs"],
)
async def test_header_metrics_and_log_tell_what_the_worker_said(
    fake: Any, start_router: Any, access_lines: Any, said: str, told: str, mode: str, reason: str, stream: bool
) -> None:
    router = await start_router({"small": [await fake(Reply(reuse=said))]})
    response = await router.chat(stream=stream)
    assert response.status_code == 200
    assert response.headers.get_list("x-crossfill-reuse") == [told]
    assert b"x-crossfill-reuse" not in response.content
    assert router.metric("crossfill_reuse_answers_total", model="small", mode=mode, reason=reason) == 1
    assert router.metric("crossfill_ttft_seconds_count", model="small", reuse=mode) == stream
    await router.until(lambda: bool(access_lines()))
    [line] = access_lines()
    assert (line["reuse"], line["reuse_reason"]) == (mode, None if reason == "none" else reason)
    assert line["reuse_row_blocks"] == ({"guided": 33, "prompt": 34} if said == GUIDED else None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_without_reuse_says_nothing(
    fake: Any, start_router: Any, access_lines: Any, stream: bool
) -> None:
    router = await start_router({"small": [await fake()]})
    response = await router.chat(stream=stream)
    assert "x-crossfill-reuse" not in response.headers
    assert not [one for one in router.registry.collect() if one.name == "crossfill_reuse_answers" and one.samples]
    await router.until(lambda: bool(access_lines()))
    assert (access_lines()[0]["reuse"], access_lines()[0]["reuse_reason"]) == ("none", None)


async def test_what_a_worker_writes_into_the_wire_ends_no_header(start_router: Any) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 16\r\n"
    said = b"x-crossfill-reuse: guided;\tsender=\xff\x80\xc3\xa9x\r\n"
    more = b"x-crossfill-model: forged\r\nx-crossfill-reuse: map\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        is_probe = b"/health" in request
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
            if is_probe
            else head + said + more + b'\r\n{"choices":[{}]}'
        )
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        router = await start_router({"small": [f"http://127.0.0.1:{port}"]}, health={"interval_s": 60})
        response = await router.chat()
    assert response.status_code == 200
    assert response.headers.get_list("x-crossfill-reuse") == ["guided;?sender=???x"]
    assert response.headers.get_list("x-crossfill-model") == ["small"]


async def test_an_error_tells_it_too_and_a_second_attempt_speaks_for_itself(fake: Any, start_router: Any) -> None:
    body = {"error": {"message": "too long"}}
    router = await start_router({"small": [await fake(Reply(status=400, body=body, reuse="none; reason=malformed"))]})
    response = await router.chat()
    assert (response.status_code, response.headers["x-crossfill-reuse"]) == (400, "none; reason=malformed")
    assert router.metric("crossfill_reuse_answers_total", model="small", mode="none", reason="malformed") == 1
    busy = Reply(status=503, body=body, reuse="fallback; reason=failed")
    for second, status in ((Reply(), 200), (Reply(close_before_headers=True), 502)):
        router = await start_router({"small": [await fake(busy), await fake(second)]})
        response = await router.chat()
        assert response.status_code == status
        assert router.metric("crossfill_retries_total", reason="status_503") == 1
        assert "x-crossfill-reuse" not in response.headers
