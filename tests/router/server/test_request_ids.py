from __future__ import annotations

import re
from typing import Any

import pytest

from engines.fake_worker import Reply


async def test_one_id_joins_response_worker_and_log(duo: Any, access_lines: Any) -> None:
    response = await duo.chat()
    request_id = response.headers["x-request-id"]
    assert re.fullmatch(r"req_[0-9a-f]{32}", request_id)
    assert duo.small.requests[0].headers["x-request-id"] == request_id
    assert access_lines()[-1]["request_id"] == request_id


async def test_error_object_and_error_frame_carry_the_id(fake: Any, start_router: Any) -> None:
    workers = [await fake(Reply(text="a b", close_after_chunks=1))]
    router = await start_router({"small": workers})
    broken = await router.chat(stream=True, headers={"x-request-id": "mine-1"})
    assert '"request_id":"mine-1"' in broken.text
    refused = await router.chat(model="nope", headers={"x-request-id": "mine-2"})
    assert refused.json()["error"]["request_id"] == "mine-2"


@pytest.mark.parametrize("given", ["a", "A-z_0.9:x", "x" * 128])
async def test_sane_ids_of_clients_are_kept(duo: Any, given: str) -> None:
    assert (await duo.chat(headers={"x-request-id": given})).headers["x-request-id"] == given
    assert duo.small.requests[0].headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", 'a"b', "ü", "a/b"])
async def test_other_ids_are_replaced(duo: Any, given: str) -> None:
    response = await duo.chat(headers={"x-request-id": given.encode()})
    assert response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("path", ["/live", "/ready", "/metrics", "/v1/models", "/nope"])
async def test_every_answer_has_an_id(duo: Any, path: str) -> None:
    assert (await duo.client.get(path)).headers["x-request-id"].startswith("req_")


async def test_log_line_tells_the_decision_and_no_secret(duo: Any, access_lines: Any) -> None:
    await duo.chat("my secret prompt", model="auto", stream=True, headers={"authorization": "Bearer my-key"})
    await duo.until(lambda: bool(access_lines()))
    [line] = access_lines()
    assert line["decision"]["reason"] == "threshold_small"
    assert line["decision"]["scores"].keys() == {"small", "large"}
    assert (line["status"], line["outcome"], line["worker"], line["attempts"]) == (200, "ok", "small/0", 1)
    assert 0 < line["ttft_s"] <= line["duration_s"]
    assert line["route"] == "/v1/chat/completions"
    assert "secret" not in str(line)
    assert "my-key" not in str(line)


async def test_polled_routes_are_not_logged(duo: Any, access_lines: Any) -> None:
    for path in ("/live", "/ready", "/metrics", "/v1/models"):
        await duo.client.get(path)
    assert [line["route"] for line in access_lines()] == ["/v1/models"]
