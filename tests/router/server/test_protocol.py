from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

BODY = orjson.dumps({"model": "small", "messages": [{"role": "user", "content": "hi"}]})
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
SIZED = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
IN_CHUNKS = b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\n\r\n"


async def connect(router: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = next(int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
    return head.split(b"\r\n")[0], await asyncio.wait_for(reader.readexactly(length), 5)


@pytest.mark.parametrize("cut", ["whole", "after the head", "bytes"])
@pytest.mark.parametrize("framing", [(SIZED, BODY), (CHUNKED, IN_CHUNKS)], ids=["sized", "chunked"])
@pytest.mark.parametrize("offer", [H2C, b""], ids=["h2c", "no offer"])
async def test_offer_of_another_protocol_is_declined_and_the_request_served(
    duo: Any, offer: bytes, framing: tuple[bytes, bytes], cut: str
) -> None:
    reader, writer = await connect(duo)
    head, body = POST + offer + framing[0] + b"\r\n", framing[1]
    # Twice, for the connection must stay usable.
    for _ in range(2):
        pieces = {"whole": [head + body], "after the head": [head, body], "bytes": [bytes([b]) for b in head + body]}
        for piece in pieces[cut]:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05 if cut == "after the head" else 0)
        status, content = await answer(reader)
        assert status == b"HTTP/1.1 200 OK"
        assert b"from small" in content
    writer.close()
    assert [request.body["messages"] for request in duo.small.requests] == [orjson.loads(BODY)["messages"]] * 2


async def test_requests_in_one_packet_are_told_apart_after_an_offer(duo: Any) -> None:
    reader, writer = await connect(duo)
    writer.write((POST + H2C + SIZED + b"\r\n" + BODY) * 2 + b"GET /live HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n")
    for expected in (b"from small", b"from small", b"alive"):
        status, content = await answer(reader)
        assert status == b"HTTP/1.1 200 OK"
        assert expected in content
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live HTTP/1.1\r\nhost: x\r\n"
        + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(70))
        + b"\r\n",
        b"GET /live HTTP/1.1\r\nhost: x\r\nx-endless: " + b"y" * 66_000,
        b"GET /live?" + b"y" * 66_000,
    ],
    ids=["many headers", "one without end", "address"],
)
async def test_huge_head_is_refused(duo: Any, head: bytes) -> None:
    reader, writer = await connect(duo)
    # In two packets, as what comes with the beginning of a request in one may be the end of another one's body.
    writer.write(head[:100])
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.write(head[100:])
    seen, content = (await asyncio.wait_for(reader.read(), 5)).split(b"\r\n\r\n")
    writer.close()
    assert seen.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in seen
    assert orjson.loads(content)["error"]["code"] == "head_too_large"


async def test_large_body_does_not_count_as_head(duo: Any) -> None:
    assert (await duo.chat("x" * 500_000, headers={"x-big": "y" * 50_000})).status_code == 200
