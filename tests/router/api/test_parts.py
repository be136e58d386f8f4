"""Contents that are lists of parts: what counts for the decision, and what tells two requests apart."""

from __future__ import annotations

from typing import Any

HARD = "Prove step by step that the square root of 2 is irrational, and implement a parser."


def image(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


async def route(router: Any, content: Any) -> dict[str, Any]:
    body = {"model": "auto", "messages": [{"role": "user", "content": content}]}
    return (await router.client.post("/v1/route", json=body, headers={"x-request-id": "same"})).json()


async def test_every_text_part_counts_wherever_it_stands(duo: Any) -> None:
    decision = await route(duo, [text("Look."), image("AA=="), text(HARD)])
    assert decision["model"] == "large"
    assert decision == await route(duo, f"Look.\n{HARD}")
    assert (await route(duo, [text("Look."), image("AA==")]))["model"] == "small"


async def test_two_requests_that_differ_in_the_image_differ_at_the_worker(duo: Any) -> None:
    contents = [[text("What is it?"), image(data), text("Be brief.")] for data in ("AA==", "AB==")]
    for content in contents:
        assert (await duo.chat(content)).status_code == 200
    first, second = (request.body for request in duo.small.requests)
    assert [first["messages"][0]["content"], second["messages"][0]["content"]] == contents
    # Within one namespace the worker's own key decides, and the image is part of what it gets.
    assert first["extra_key"] == second["extra_key"]
