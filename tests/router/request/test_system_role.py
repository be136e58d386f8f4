from __future__ import annotations

import json
from typing import Any

import pytest

from engines.fake_worker import Reply
from router.request.system_role import for_model

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "Rhyme."},
    {"role": "user", "content": "Hi", "name": "ann"},
    {"role": "assistant", "content": "Yo"},
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("native", TURNS),
        ("system", [TURNS[0], {"role": "system", "content": "Rhyme."}, *TURNS[2:]]),
        ("user", [{"role": "user", "content": "Be brief.\n\nRhyme.\n\nHi", "name": "ann"}, TURNS[3]]),
    ],
)
def test_rules(rule: Any, expected: list[dict[str, Any]]) -> None:
    before = json.dumps(TURNS)
    assert for_model(TURNS, rule) == expected
    assert json.dumps(TURNS) == before


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([turn("system", "S"), turn("user", [text("a"), text("b")])], [turn("user", [text("S\n\na"), text("b")])]),
        ([turn("system", "S"), turn("user", [IMAGE, text("a")])], [turn("user", [text("S"), IMAGE, text("a")])]),
        ([turn("system", [text("S"), text("T")]), turn("user", "a")], [turn("user", [text("S"), text("T\n\na")])]),
        ([turn("system", [text("S"), IMAGE]), turn("user", "a")], [turn("user", [text("S"), IMAGE, text("a")])]),
        ([turn("system", "S"), turn("user", None)], [turn("user", "S")]),
        ([turn("system", None), turn("user", "a")], [turn("user", "a")]),
        ([turn("system", "S")], [turn("user", "S")]),
        ([turn("system", "")], [turn("user", "")]),
        ([turn("system", "S"), turn("assistant", "a")], [turn("user", "S"), turn("assistant", "a")]),
        (
            [turn("assistant", "hello"), turn("user", "a"), turn("developer", "D"), turn("user", "b")],
            [turn("assistant", "hello"), turn("user", "D\n\na"), turn("user", "b")],
        ),
        ([turn("user", "a"), turn("tool", "t")], [turn("user", "a"), turn("tool", "t")]),
    ],
    ids=[
        *("text parts", "image first", "system parts", "system image", "user null", "system null"),
        *("no user", "nothing", "no user but others", "late system", "no system"),
    ],
)
def test_instructions_become_part_of_the_first_user_turn(
    turns: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    assert for_model(turns, "user") == expected


async def ask(router: Any, model: str, turns: list[dict[str, Any]] = TURNS) -> Any:
    return await router.client.post("/v1/chat/completions", json={"model": model, "messages": turns})


@pytest.mark.parametrize(
    ("rule", "roles"),
    [
        ({}, ["system", "system", "user", "assistant"]),
        ({"system_role": "native"}, ["system", "developer", "user", "assistant"]),
        ({"system_role": "user"}, ["user", "assistant"]),
    ],
    ids=["default", "native", "user"],
)
async def test_each_model_gets_turns_by_its_own_rule(
    fake: Any, start_router: Any, rule: dict[str, str], roles: list[str]
) -> None:
    small, large = await fake(), await fake()
    of_model = {"small": {"system_role": "native"}, "large": rule}
    router = await start_router({"small": [small], "large": [large]}, of_model=of_model)
    for model in ("small", "large"):
        assert (await ask(router, model)).status_code == 200
    assert small.requests[0].body["messages"] == TURNS
    assert [turn["role"] for turn in large.requests[0].body["messages"]] == roles


async def test_a_request_that_moves_to_another_model_follows_its_rule_and_is_scored_as_it_came(
    fake: Any, start_router: Any, closed_port_url: str
) -> None:
    large = await fake()
    of_model = {"large": {"system_role": "user"}}
    router = await start_router({"small": [closed_port_url], "large": [large]}, wait=False, of_model=of_model)
    await router.until(lambda: router.pool.workers[1].state == "healthy")
    router.pool.workers[0].saw_life(0.0)
    dry = (await router.client.post("/v1/route", json={"model": "auto", "messages": TURNS})).json()
    response = await ask(router, "auto")
    assert response.status_code == 200
    assert router.metric("crossfill_retries_total", reason="connect_failed") == 1
    assert large.requests[0].body["messages"] == for_model(TURNS, "user")
    told = json.loads(response.headers["x-crossfill-decision"])
    assert (dry["model"], told["model"], told["reason"]) == ("small", "large", "only_healthy")
    assert told["scores"] == dry["scores"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_template_says_reaches_the_client_as_a_400(
    fake: Any, start_router: Any, is_error_object: Any, stream: bool
) -> None:
    # As SGLang answers when a chat template raises.
    told = {"object": "error", "message": "System role not supported", "type": "BadRequest", "param": None, "code": 400}
    router = await start_router({"small": [await fake(Reply(status=400, body=told), Reply())]})
    body = {"model": "small", "messages": TURNS, "stream": stream}
    response = await router.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert is_error_object(response)
    error = response.json()["error"]
    assert (error["message"], error["type"]) == ("System role not supported", "invalid_request_error")
    assert (await ask(router, "small")).status_code == 200
