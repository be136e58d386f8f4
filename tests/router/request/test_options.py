from __future__ import annotations

import json
from typing import Any

import pytest

from router.errors import InvalidRequestError
from router.request.options import RequestOptions, Reuse, read_options

OFF = '{"reuse": "off"}'


def test_default_is_allow_without_a_session() -> None:
    for body in ({}, {"crossfill": None}, {"crossfill": {}}):
        assert read_options(body) == RequestOptions(Reuse.ALLOW, None, report=False)


def test_body_wins_over_header_key_by_key() -> None:
    header = ['{"reuse": "off", "session": "header"}']
    assert read_options({}, header) == RequestOptions(Reuse.OFF, "header")
    assert read_options({"crossfill": {"session": "body"}}, header) == RequestOptions(Reuse.OFF, "body")
    assert read_options({"crossfill": {"reuse": "allow"}}, header) == RequestOptions(Reuse.ALLOW, "header")
    assert read_options({"crossfill": {"report": False}}, ['{"report": true}']) == RequestOptions(report=False)
    assert read_options({"crossfill": {"session": "s"}}, ['{"report": true}']).report


@pytest.mark.parametrize("session", ["a", "A-z_0.9:x", "x" * 128])
def test_sane_sessions_are_kept(session: str) -> None:
    assert read_options({"crossfill": {"session": session}}).session == session


WRONG: dict[str, tuple[Any, str]] = {
    "a string": ("off", "crossfill"),
    "a list": ([], "crossfill"),
    "false": (False, "crossfill"),
    "a number": (0, "crossfill"),
    "unknown value": ({"reuse": "sometimes"}, "crossfill.reuse"),
    "capitals": ({"reuse": "Off"}, "crossfill.reuse"),
    "reuse null": ({"reuse": None}, "crossfill.reuse"),
    "reuse true": ({"reuse": True}, "crossfill.reuse"),
    "reuse a list": ({"reuse": ["off"]}, "crossfill.reuse"),
    "reuse an object": ({"reuse": {}}, "crossfill.reuse"),
    "report null": ({"report": None}, "crossfill.report"),
    "report a word": ({"report": "true"}, "crossfill.report"),
    "report a number": ({"report": 1}, "crossfill.report"),
    "misspelt key": ({"reuze": "off"}, "crossfill.reuze"),
    "very long key": ({"x" * 1000: 1}, "crossfill." + "x" * 100),
    "session empty": ({"session": ""}, "crossfill.session"),
    "session too long": ({"session": "x" * 129}, "crossfill.session"),
    "session with a space": ({"session": "a b"}, "crossfill.session"),
    "session with a line break": ({"session": "a\n"}, "crossfill.session"),
    "session not ASCII": ({"session": "ü"}, "crossfill.session"),
    "session a number": ({"session": 5}, "crossfill.session"),
}


@pytest.mark.parametrize(("given", "param"), WRONG.values(), ids=WRONG)
def test_wrong_options_name_the_key_in_body_and_header(given: Any, param: str) -> None:
    for body, headers in (({"crossfill": given}, ()), ({}, (json.dumps(given),))):
        with pytest.raises(InvalidRequestError) as refused:
            read_options(body, headers)
        assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("header", ["", "off", "{", '{"reuse": off}', "null", "[]", '{"a":' * 2000, "\xff", OFF + OFF])
def test_a_header_that_is_no_json_object_names_crossfill(header: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_options({}, [header])
    assert refused.value.param == "crossfill"


def test_a_wrong_header_is_refused_although_the_body_overrides_it() -> None:
    with pytest.raises(InvalidRequestError):
        read_options({"crossfill": {"reuse": "off"}}, ['{"reuse": "sometimes"}'])


async def test_reuse_off_has_its_own_namespace_by_field_and_by_header(duo: Any) -> None:
    async def namespace(**fields: Any) -> str:
        assert (await duo.chat(**fields)).status_code == 200
        return str(duo.small.requests[-1].body["extra_key"])

    allowed, salted = await namespace(), await namespace(cache_salt="s")
    exact = await namespace(crossfill={"reuse": "off"})
    assert exact != allowed
    assert await namespace(headers={"crossfill": OFF}) == exact
    assert await namespace(headers={"crossfill": OFF}, crossfill={"reuse": "allow"}) == allowed
    assert await namespace(crossfill={"reuse": "allow", "session": "s-1"}) == allowed
    assert await namespace(crossfill={"reuse": "off"}, cache_salt="s") not in {allowed, salted, exact}
    assert await namespace(cache_salt="reuse") not in {allowed, salted, exact}


@pytest.mark.parametrize("reuse", ["off", "allow"])
async def test_the_worker_is_told_of_reuse_and_of_no_other_option(duo: Any, reuse: str) -> None:
    await duo.chat(
        crossfill={"reuse": reuse, "session": "s-1", "report": True}, headers={"crossfill": '{"session": "s-2"}'}
    )
    [request] = duo.small.requests
    assert request.body["custom_params"] == {"crossfill": {"reuse": reuse, "tenant": "local", "salt": ""}}
    assert "crossfill" not in request.body
    assert "crossfill" not in request.headers
    assert "s-1" not in str(request)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/route"])
@pytest.mark.parametrize(
    "sent",
    [
        {"body": {"crossfill": {"reuse": "sometimes"}}},
        {"header": '{"reuse": "sometimes"}'},
        {"header": "reuse=off"},
        {"header": [OFF, OFF]},
    ],
    ids=["field", "header", "no JSON", "two headers"],
)
async def test_wrong_options_are_refused_at_the_door(duo: Any, is_error_object: Any, path: str, sent: Any) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], **sent.get("body", {})}
    values = sent.get("header", [])
    headers = [("crossfill", value) for value in ([values] if isinstance(values, str) else values)]
    response = await duo.client.post(path, json=body, headers=headers)
    assert response.status_code == 400
    assert is_error_object(response)
    assert response.json()["error"]["param"].startswith("crossfill")
    assert not duo.small.requests


async def test_a_salt_that_is_none_is_refused(duo: Any) -> None:
    response = await duo.chat(cache_salt=5)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")
