from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import openai
import pytest

from router.tenants.key_file import KeyEntry, sha256_of

if TYPE_CHECKING:
    from pathlib import Path

ANNA, ANNA_2, BERT = "cf-anna-first", "cf-anna-second", "cf-bert"
USER = {"role": "user", "content": "hi"}
MODELS = "/v1/models"


def line(tenant: str, key: str, label: str = "") -> str:
    return KeyEntry(tenant, sha256_of(key.encode()), None, label).to_line()


def write(path: Path, *lines: str) -> None:
    """As programs do that replace a file: whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text("".join(lines))
    new.chmod(0o600)
    new.replace(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    write(path, line("anna", ANNA, "laptop"), line("anna", ANNA_2), line("bert", BERT))
    return path


@pytest.fixture
async def guarded(keys: Path, fake: Any, start_router: Any) -> Any:
    """A router that asks for keys, with one worker."""
    worker = await fake()
    router = await start_router({"small": [worker]}, auth={"keys_file": keys})
    router.worker, router.keys = worker, keys
    return router


async def namespace(router: Any, key: str, **fields: Any) -> str:
    headers = bearer(key) | fields.pop("headers", {})
    assert (await router.chat(headers=headers, **fields)).status_code == 200
    return str(router.worker.requests[-1].body["extra_key"])


def failures(router: Any) -> dict[str, float]:
    reasons = ("missing", "malformed", "unknown")
    return {reason: router.metric("crossfill_auth_failures_total", reason=reason) for reason in reasons}


async def test_a_key_of_the_file_lets_in_and_names_the_tenant(guarded: Any, access_lines: Any) -> None:
    assert (await guarded.chat(headers=bearer(ANNA))).status_code == 200
    assert (await guarded.chat(headers=bearer(BERT))).status_code == 200
    assert [entry["tenant"] for entry in access_lines()] == ["anna", "bert"]
    assert failures(guarded) == {"missing": 0, "malformed": 0, "unknown": 0}


async def test_the_scheme_has_no_case(guarded: Any) -> None:
    assert (await guarded.client.get(MODELS, headers={"authorization": f"bEARER {ANNA}"})).status_code == 200


BAD_HEADERS: dict[str, tuple[list[bytes], str]] = {
    "none": ([], "missing"),
    "empty": ([b""], "malformed"),
    "scheme alone": ([b"Bearer"], "malformed"),
    "other scheme": ([b"Basic " + ANNA.encode()], "malformed"),
    "no scheme": ([ANNA.encode()], "malformed"),
    "two words": ([b"Bearer cf-one cf-two"], "malformed"),
    "non-ASCII": ([b"Bearer \xff\xfe\x80"], "malformed"),
    "UTF-8": (["Bearer schlüssel".encode()], "malformed"),
    "too long": ([b"Bearer " + b"x" * 513], "malformed"),
    "very long": ([b"Bearer " + b"x" * 60_000], "malformed"),
    "there twice": ([b"Bearer " + ANNA.encode()] * 2, "malformed"),
    "unknown": ([b"Bearer cf-nobody"], "unknown"),
    "a key with one letter more": ([b"Bearer " + ANNA.encode() + b"x"], "unknown"),
    "a key without its last letter": ([b"Bearer " + ANNA.encode()[:-1]], "unknown"),
    "the hash of a key": ([b"Bearer " + sha256_of(ANNA.encode()).encode()], "unknown"),
}


@pytest.mark.parametrize(("values", "reason"), BAD_HEADERS.values(), ids=BAD_HEADERS)
async def test_without_a_valid_key_is_a_counted_401(
    guarded: Any, is_error_object: Any, values: list[bytes], reason: str
) -> None:
    headers = [(b"authorization", value) for value in values]
    response = await guarded.client.post(
        "/v1/chat/completions", json={"model": "small", "messages": [USER]}, headers=headers
    )
    assert response.status_code == 401
    assert is_error_object(response)
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert failures(guarded) == {"missing": 0, "malformed": 0, "unknown": 0, reason: 1}
    assert not guarded.worker.requests
    assert not any(word in response.text for value in values for word in value.decode("latin-1").split()[1:])


async def test_sdk_raises_authentication_error(guarded: Any) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        await guarded.sdk(api_key="cf-nobody").chat.completions.create(model="small", messages=[USER])
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        await guarded.sdk(api_key="cf-nobody").models.list()
    answer = await guarded.sdk(api_key=ANNA).chat.completions.create(model="small", messages=[USER])
    assert answer.choices


async def test_every_endpoint_of_the_api_asks_for_a_key_and_no_other_does(guarded: Any) -> None:
    asked = set()
    # A new endpoint cannot be forgotten: whatever the application serves is tried.
    included = [getattr(route, "original_router", None) or route for route in guarded.app.routes]
    for route in [each for part in included for each in getattr(part, "routes", [part])]:
        for method in route.methods:
            response = await guarded.client.request(method, route.path.replace("{name:path}", "small"))
            if response.status_code == 401:
                asked.add(route.path)
            assert (response.status_code == 401) == route.path.startswith("/v1/"), route.path
    assert {"/v1/chat/completions", "/v1/route", "/v1/models", "/v1/models/{name:path}"} <= asked


async def test_the_body_is_not_read_before_the_key(guarded: Any) -> None:
    reader, writer = await asyncio.open_connection(*guarded.url.removeprefix("http://").split(":"))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"
    writer.write(head + b"\r\n{")
    refused = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert refused.startswith(b"HTTP/1.1 401 ")
    writer.close()
    # The control: with a key, there is no answer before the rest of the body.
    reader, writer = await asyncio.open_connection(*guarded.url.removeprefix("http://").split(":"))
    writer.write(head + f"authorization: Bearer {ANNA}\r\n\r\n{{".encode())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readline(), 0.2)
    writer.write(b"}")
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_without_a_file_any_key_or_none_is_welcome(duo: Any, access_lines: Any) -> None:
    for headers in ({}, bearer(ANNA), {"authorization": "\xff"}):
        assert (await duo.chat(headers={k: v.encode("latin-1") for k, v in headers.items()})).status_code == 200
    assert len({request.body["extra_key"] for request in duo.small.requests}) == 1
    assert {entry["tenant"] for entry in access_lines()} == {"local"}


async def test_keys_of_one_tenant_share_and_tenants_do_not(guarded: Any) -> None:
    anna = await namespace(guarded, ANNA)
    assert await namespace(guarded, ANNA_2) == anna
    assert await namespace(guarded, BERT) != anna


ATTEMPTS: dict[str, dict[str, Any]] = {
    "salt": {"cache_salt": "s"},
    "tenant as salt": {"cache_salt": "anna"},
    "extra_key": {"extra_key": "THEIRS"},
    "extra_key and salt": {"extra_key": "THEIRS", "cache_salt": "s"},
    "namespace as salt": {"cache_salt": "THEIRS"},
    "custom_params": {"custom_params": {"extra_key": "THEIRS", "crossfill": {"tenant": "anna", "salt": "s"}}},
    "rid": {"rid": "THEIRS"},
    "tenant": {"tenant": "anna", "user": "anna", "metadata": {"tenant": "anna"}},
    "session": {"crossfill": {"session": "anna"}},
    "headers": {"headers": {"x-tenant": "anna", "openai-organization": "anna", "x-request-id": "anna"}},
}


@pytest.mark.parametrize(("mine", "theirs"), [(BERT, ANNA), (ANNA, BERT)], ids=["bert to anna", "anna to bert"])
@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
async def test_no_field_reaches_the_namespace_of_another_tenant(
    guarded: Any, attempt: dict[str, Any], mine: str, theirs: str
) -> None:
    target = {await namespace(guarded, theirs), await namespace(guarded, theirs, cache_salt="s")}
    for wanted in target:
        fields = json.loads(json.dumps(attempt).replace("THEIRS", wanted))
        assert await namespace(guarded, mine, **fields) not in target
        body = guarded.worker.requests[-1].body
        # The salt is the client's; the tenant is that of its key, whatever it says.
        told = {"reuse": "allow", "tenant": "anna" if mine == ANNA else "bert", "salt": fields.get("cache_salt", "")}
        assert body["custom_params"] == {"crossfill": told}
        assert body["rid"].startswith("cf-")
    # The control: whoever has the key does reach it.
    assert await namespace(guarded, theirs, cache_salt="s") in target


async def test_the_key_reaches_neither_worker_nor_any_log(guarded: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    address = guarded.url.removeprefix("http://").split(":")
    for key in (ANNA, "cf-nobody-secret"):
        for model in ("small", "none"):
            await guarded.chat("text", model=model, stream=True, headers=bearer(key))
        # Not HTTP, and a client that leaves.
        _, writer = await asyncio.open_connection(*address)
        writer.write(f"GET / HTTP/1.1\r\nauthorization: Bearer {key}\r\nbad header\r\n\r\n".encode())
        await writer.drain()
        writer.close()
    await guarded.worker.__aexit__(None, None, None)
    assert (await guarded.chat(headers=bearer(ANNA))).status_code in {502, 503}
    [request] = guarded.worker.requests
    seen = str(request.headers) + str(request.body)
    logged = "\n".join(f"{record.getMessage()} {record.exc_text} {record.__dict__}" for record in caplog.records)
    assert "authorization" not in request.headers
    for secret in (ANNA, "cf-nobody-secret", sha256_of(ANNA.encode())):
        assert secret not in seen
        assert secret not in logged
    # The control: the same logs have what belongs there.
    assert '"tenant":"anna"' in logged
    assert "no connection" in logged
    await guarded.worker.__aenter__()


async def test_a_programming_error_does_not_log_the_key(guarded: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def fail(*_: Any) -> None:
        raise ZeroDivisionError

    guarded.app.state.services.dispatcher.open = fail
    assert (await guarded.chat(headers=bearer(ANNA))).status_code == 500
    assert "ZeroDivisionError" in caplog.text
    assert ANNA not in caplog.text


async def status_becomes(router: Any, key: str, status: int) -> None:
    async with asyncio.timeout(5):
        while (await router.client.get(MODELS, headers=bearer(key))).status_code != status:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.02)


async def test_a_revoked_key_is_refused_and_a_new_one_let_in_without_a_restart(guarded: Any) -> None:
    await status_becomes(guarded, ANNA, 200)
    write(guarded.keys, line("anna", ANNA_2), line("carl", "cf-carl"))
    await status_becomes(guarded, ANNA, 401)
    for key, status in ((ANNA_2, 200), (BERT, 401), ("cf-carl", 200)):
        assert (await guarded.client.get(MODELS, headers=bearer(key))).status_code == status
    assert guarded.metric("crossfill_keys_reload_failures_total") == 0


async def test_a_revoked_last_key_is_refused_too(guarded: Any) -> None:
    write(guarded.keys)
    await status_becomes(guarded, ANNA, 401)
    assert guarded.metric("crossfill_keys_reload_failures_total") == 0


async def test_a_broken_version_keeps_the_keys_and_a_good_one_ends_that(
    guarded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write(guarded.keys, line("anna", ANNA_2), "nonsense\n")
    await guarded.until(lambda: guarded.metric("crossfill_keys_reload_failures_total") == 1)
    assert (await guarded.client.get(MODELS, headers=bearer(BERT))).status_code == 200
    write(guarded.keys, line("anna", ANNA_2))
    await status_becomes(guarded, BERT, 401)
    [told] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert f"{guarded.keys}:2: not a key" in told.getMessage()


async def test_a_deleted_file_keeps_the_keys_until_it_is_back(guarded: Any) -> None:
    guarded.keys.unlink()
    await guarded.until(lambda: guarded.metric("crossfill_keys_reload_failures_total") == 1)
    assert (await guarded.client.get(MODELS, headers=bearer(BERT))).status_code == 200
    write(guarded.keys, line("anna", ANNA_2))
    await status_becomes(guarded, BERT, 401)
    assert guarded.metric("crossfill_keys_reload_failures_total") == 1
