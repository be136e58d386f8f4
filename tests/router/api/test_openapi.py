from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.transport import DEFAULT_MAX_STREAM_EVENTS
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from engines.fake_worker import Reply
from router.api.answer_schema import ChatCompletionChunk, Completion, ReuseReport, RoutingDecision
from router.api.openapi_document import openapi_document
from router.decision.policy import Decision
from router.tenants.key_file import KeyEntry, sha256_of

if TYPE_CHECKING:
    from pathlib import Path

    from schemathesis import APIOperation, Case

DOCUMENT = openapi_document(["auto", "small", "large"], "0")
OPERATIONS = {
    operation["operationId"]: (path, method)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}
STREAMING = {"createChatCompletion": ChatCompletionChunk, "createCompletion": Completion}
TAKES_BODY = {*STREAMING, "route"}
ADMINISTRATIVE = {"storeStatistics": False, "flushStore": True}
"""Whether it takes input."""
TAKES_INPUT = {*TAKES_BODY, "getModel"}
EXAMPLES = 80
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def cases(operation: APIOperation, name: str) -> st.SearchStrategy[Case]:
    """As documented, as a stream, and, where there is a body to be wrong, against the document."""
    right = operation.as_strategy(GenerationMode.POSITIVE)
    kinds = [right]
    if name in STREAMING:
        kinds.append(right.map(streamed))
    if name in TAKES_BODY or ADMINISTRATIVE.get(name):
        kinds.append(operation.as_strategy(GenerationMode.NEGATIVE))
    return st.one_of(kinds)


def streamed(case: Case) -> Case:
    case.body = {**case.body, "stream": True}
    return case


def call_all(document: dict[str, Any], url: str, name: str, headers: dict[str, str] | None = None) -> Counter[str]:
    path, method = OPERATIONS[name]
    operation = schemathesis.openapi.from_dict(document)[path][method]
    seen: Counter[str] = Counter()

    @given(case=cases(operation, name))
    @settings(
        max_examples=EXAMPLES if name in TAKES_INPUT or ADMINISTRATIVE.get(name) else 3,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def call(case: Case) -> None:
        response = case.call_and_validate(base_url=url, checks=CHECKS, headers=headers)
        seen[f"{response.status_code // 100}xx"] += 1
        if response.headers["content-type"][0].startswith("text/event-stream"):
            seen["stream"] += 1
            events = [event for event in response.content.split(b"\n\n") if event and not event.startswith(b":")]
            data = [event.removeprefix(b"data: ") for event in events]
            # Of a longer stream Schemathesis reads no more.
            assert data[-1] == b"[DONE]" or len(data) == DEFAULT_MAX_STREAM_EVENTS
            for one in data[:-1]:
                STREAMING[name].model_validate(orjson.loads(one))

    call()
    return seen


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - set(ADMINISTRATIVE)))
async def test_answers_are_as_documented_whatever_is_asked(duo: Any, name: str) -> None:
    document = (await duo.client.get("/openapi.json")).json()
    seen = await asyncio.to_thread(call_all, document, duo.url, name)
    assert seen["2xx"], seen
    assert bool(seen["4xx"]) is (name in TAKES_INPUT), seen
    assert bool(seen["stream"]) is (name in STREAMING), seen
    assert bool(duo.small.requests) is (name in STREAMING)
    assert (await duo.chat()).status_code == 200


@pytest.mark.parametrize("name", ADMINISTRATIVE)
async def test_administrative_answers_are_as_documented(
    fake: Any, start_router: Any, tmp_path: Path, name: str
) -> None:
    keys = tmp_path / "admin-keys"
    keys.write_text(KeyEntry("ada", sha256_of(b"cf-admin")).to_line())
    settings = {"auth": {"admin_keys_file": keys}, "store": {"url": "memory://"}}
    router = await start_router({"small": [await fake()]}, **settings)
    document = (await router.client.get("/openapi.json")).json()
    right = {"authorization": "Bearer cf-admin"}
    seen = await asyncio.to_thread(call_all, document, router.url, name, right)
    assert seen["2xx"], seen
    assert bool(seen["4xx"]) is ADMINISTRATIVE[name], seen
    # Without the key, the same calls are refused as documented.
    seen = await asyncio.to_thread(call_all, document, router.url, name, {"authorization": "Bearer cf-client"})
    assert set(seen) == {"4xx"}
    schema = document["paths"][OPERATIONS[name][0]][OPERATIONS[name][1]]
    assert schema["security"] == [{"bearerAuth": []}]


@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")  # of GET and HEAD, in a document that nobody gets
async def test_every_route_is_documented(duo: Any) -> None:
    paths = duo.app.openapi()["paths"]
    served = {(path, method) for path, methods in paths.items() for method in methods}
    # FastAPI leaves out what is not its own kind of route.
    plain = [route for route in duo.app.routes if isinstance(route, Route)]
    assert plain
    served |= {(route.path, method.lower()) for route in plain for method in route.methods or ()}
    served = {(path, method) for path, method in served if method != "head"}
    assert served == set(OPERATIONS.values())


@pytest.mark.parametrize(
    ("field", "value", "is_valid"),
    [
        ("stop", ["a"], True),
        ("stop", 1, False),
        ("tool_choice", {"type": "function"}, True),
        ("tool_choice", "always", False),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}], True),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], False),
        ("messages", [], False),
        ("model", "nope", False),
        ("unknown", 1, True),
    ],
)
async def test_the_document_and_the_door_agree(duo: Any, field: str, value: Any, is_valid: bool) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], field: value}
    schema = {"$ref": "#/components/schemas/ChatBody", "components": DOCUMENT["components"]}
    assert Draft202012Validator(schema).is_valid(body) is is_valid
    assert ((await duo.client.post("/v1/chat/completions", json=body)).status_code == 200) is is_valid


async def test_reports_are_as_documented(fake: Any, start_router: Any) -> None:
    said = (
        "guided; blocks=3/4; density=0.5; sender=large",
        "fallback; reason=store_slow",
        "none; reason=magic; prefix_hops=1",
        "odd",
    )
    replies = [*(Reply(reuse=words) for words in said), Reply()]
    router = await start_router({"small": [await fake(*replies)], "large": [await fake()]})
    schema = {"$ref": "#/components/schemas/Report", "components": DOCUMENT["components"]}
    reports = [(await router.chat(model="auto", crossfill={"report": True})).json()["crossfill"] for _ in replies]
    for report in reports:
        Draft202012Validator(schema).validate(report)
    assert {key for report in reports for key in report["reuse"]} == set(ReuseReport.model_fields)
    assert not Draft202012Validator(schema).is_valid({**reports[0], "reuse": {"mode": "odd"}})


async def test_decisions_of_every_kind_are_as_documented(fake: Any, start_router: Any) -> None:
    names = ["small", "middle", "large"]
    price = {"cost": {"input": 1, "output": 2}, "prefill_tokens_per_s": 100}
    router = await start_router(
        {name: [await fake()] for name in names},
        of_model=dict.fromkeys(names, price),
        routing={"ladder": names, "tau": [0.1, 0.2], "sigma": 0.1, "cost_weight": 1, "ttft_weight": 1},
        sessions={"sticky": True},
    )
    document = (await router.client.get("/openapi.json")).json()
    schema = {"$ref": "#/components/schemas/RoutingDecision", "components": document["components"]}
    asked = {"model": "auto", "messages": [{"role": "user", "content": "hi"}], "crossfill": {"session": "s"}}
    assert (await router.client.post("/v1/chat/completions", json=asked)).status_code == 200
    decisions = [
        (await router.client.post("/v1/route", json={**asked, "model": model})).json() for model in ("auto", "small")
    ]
    assert [decision["reason"] for decision in decisions] == ["sticky", "explicit"]
    for decision in decisions:
        Draft202012Validator(schema).validate(decision)
    told = {field for decision in decisions for field in decision}
    assert told == set(RoutingDecision.model_fields) - {"unavailable", "fallback"}


def test_the_documented_decision_has_every_field_of_one() -> None:
    assert set(RoutingDecision.model_fields) == {field.name for field in fields(Decision)}
