"""Who may administer: operators, by keys that clients do not have."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from router.config import AuthConfig
from router.errors import ConfigError
from router.tenants.keyring import open_keyrings

from .conftest import CLIENT, OPERATOR, bearer, write_keys

FLUSH, STATS, MODELS = "/admin/store/flush", "/admin/store", "/v1/models"


@pytest.fixture
async def router(fake: Any, start_router: Any, auth: Any) -> Any:
    started = await start_router({"small": [await fake()]}, auth=auth, store={"url": "memory://"})
    started.auth = auth
    return started


async def status(router: Any, path: str, key: str | None) -> int:
    headers = bearer(key) if key else {}
    if path == FLUSH:
        return int((await router.client.post(path, json={"all": True}, headers=headers)).status_code)
    return int((await router.client.get(path, headers=headers)).status_code)


def failures(router: Any, reason: str) -> float:
    return float(router.metric("crossfill_auth_failures_total", reason=reason))


@pytest.mark.parametrize("path", [STATS, FLUSH])
async def test_only_an_operators_key_administers(router: Any, is_error_object: Any, path: str) -> None:
    assert await status(router, path, OPERATOR) == 200
    assert [await status(router, path, key) for key in (CLIENT, "cf-nobody", None)] == [401, 401, 401]
    assert (failures(router, "unknown"), failures(router, "missing")) == (2, 1)
    refused = await router.client.get(STATS, headers=bearer(CLIENT))
    assert is_error_object(refused)
    assert refused.headers["www-authenticate"] == "Bearer"
    assert "auth.admin_keys_file" in refused.json()["error"]["message"]


async def test_an_operators_key_is_no_clients_key(router: Any) -> None:
    assert await status(router, MODELS, CLIENT) == 200
    assert await status(router, MODELS, OPERATOR) == 401
    assert (await router.chat(headers=bearer(OPERATOR))).status_code == 401
    assert failures(router, "unknown") == 2


async def test_every_administrative_endpoint_asks_for_an_operators_key(router: Any) -> None:
    included = [getattr(route, "original_router", None) or route for route in router.app.routes]
    routes = [each for part in included for each in getattr(part, "routes", [part]) if each.path.startswith("/admin")]
    assert {route.path for route in routes} == {STATS, FLUSH}
    for route in routes:
        for method in route.methods:
            assert (await router.client.request(method, route.path, headers=bearer(CLIENT))).status_code == 401


async def test_the_key_comes_before_the_body(router: Any) -> None:
    assert (await router.client.post(FLUSH, content=b"nonsense", headers=bearer(CLIENT))).status_code == 401
    assert (await router.client.post(FLUSH, content=b"nonsense", headers=bearer(OPERATOR))).status_code == 400


@pytest.mark.parametrize("keys", [True, False], ids=["with client keys", "without any keys"])
async def test_without_a_file_of_admin_keys_nobody_administers(
    fake: Any, start_router: Any, auth: Any, is_error_object: Any, keys: bool
) -> None:
    auth = {"keys_file": auth["keys_file"]} if keys else {}
    router = await start_router({"small": [await fake()]}, auth=auth, store={"url": "memory://"})
    for key in (OPERATOR, CLIENT, None):
        assert [await status(router, path, key) for path in (STATS, FLUSH)] == [403, 403]
    response = await router.client.get(STATS)
    assert is_error_object(response)
    assert response.json()["error"]["code"] == "administration_off"
    assert "auth.admin_keys_file" in response.json()["error"]["message"]
    assert await status(router, MODELS, CLIENT) == 200


async def test_administration_needs_no_keys_of_clients(fake: Any, start_router: Any, auth: Any) -> None:
    auth = {"admin_keys_file": auth["admin_keys_file"]}
    router = await start_router({"small": [await fake()]}, auth=auth, store={"url": "memory://"})
    assert [await status(router, STATS, key) for key in (OPERATOR, CLIENT, None)] == [200, 401, 401]
    assert await status(router, MODELS, None) == 200


def test_a_key_in_both_files_is_a_fault_of_the_configuration(auth: Any) -> None:
    open_keyrings(AuthConfig(**auth))
    write_keys(auth["admin_keys_file"], ("ada", OPERATOR), ("eve", CLIENT))
    with pytest.raises(ConfigError, match=r"admin-keys: the key [0-9a-f]{12} is in .*/keys too; .*never both"):
        open_keyrings(AuthConfig(**auth))
    with pytest.raises(ConfigError, match="never both"):
        open_keyrings(AuthConfig(keys_file=auth["keys_file"], admin_keys_file=auth["keys_file"]))


def test_a_file_of_admin_keys_without_one_ends_the_start(auth: Any) -> None:
    write_keys(auth["admin_keys_file"])
    with pytest.raises(ConfigError, match=r"nobody could use its administration; .*auth\.admin_keys_file"):
        open_keyrings(AuthConfig(**auth))
    auth["admin_keys_file"].unlink()
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*auth\.admin_keys_file"):
        open_keyrings(AuthConfig(**auth))


async def becomes(router: Any, path: str, key: str, wanted: int) -> None:
    async with asyncio.timeout(5):
        while await status(router, path, key) != wanted:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.02)


async def test_operators_come_and_go_without_a_restart(router: Any) -> None:
    write_keys(router.auth["admin_keys_file"], ("ben", "cf-admin-ben"))
    await becomes(router, STATS, "cf-admin-ben", 200)
    assert await status(router, STATS, OPERATOR) == 401
    assert await status(router, MODELS, CLIENT) == 200


@pytest.mark.parametrize("changed", ["keys_file", "admin_keys_file"])
async def test_a_new_version_with_a_key_of_the_other_file_is_refused(
    router: Any, caplog: pytest.LogCaptureFixture, changed: str
) -> None:
    write_keys(router.auth[changed], ("eve", CLIENT), ("eve", OPERATOR), ("eve", "cf-eve"))
    await router.until(lambda: router.metric("crossfill_keys_reload_failures_total") == 1)
    for path in (STATS, MODELS):
        assert await status(router, path, "cf-eve") == 401
    assert [await status(router, STATS, key) for key in (OPERATOR, CLIENT)] == [200, 401]
    assert [await status(router, MODELS, key) for key in (OPERATOR, CLIENT)] == [401, 200]
    assert "never both" in caplog.text
    # The control: without the foreign key it is taken.
    write_keys(router.auth[changed], ("eve", "cf-eve"))
    await becomes(router, MODELS if changed == "keys_file" else STATS, "cf-eve", 200)


def test_a_key_that_both_files_got_at_once_opens_nothing(auth: Any) -> None:
    rings = open_keyrings(AuthConfig(**auth))
    # As when each file is read while the other one is still the old one.
    rings.clients._other = rings.operators._other = None
    write_keys(auth["keys_file"], ("eve", "cf-both"), ("acme", CLIENT))
    write_keys(auth["admin_keys_file"], ("eve", "cf-both"), ("ada", OPERATOR))
    assert rings.clients.refresh()
    assert rings.operators.refresh()
    assert rings.clients.owner_of(b"cf-both") == "eve"
    rings.clients._other, rings.operators._other = rings.operators, rings.clients
    assert [ring.owner_of(b"cf-both") for ring in (rings.clients, rings.operators)] == [None, None]
    assert rings.clients.owner_of(CLIENT.encode()) == "acme"


async def test_each_call_is_a_line_with_the_operator_and_no_key(
    router: Any, access_lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await router.client.get(STATS, headers=bearer(OPERATOR))
    await router.client.post(FLUSH, json={"model": "small"}, headers=bearer(OPERATOR))
    await router.client.post(FLUSH, json={}, headers=bearer(OPERATOR))
    await router.client.post(FLUSH, json={"all": True}, headers=bearer(CLIENT))
    await router.client.get(MODELS, headers=bearer(CLIENT))
    lines = access_lines()
    assert [(line["route"], line["status"], line["operator"], line["tenant"]) for line in lines] == [
        (STATS, 200, "ada", None),
        (FLUSH, 200, "ada", None),
        (FLUSH, 400, "ada", None),
        (FLUSH, 401, None, None),
        (MODELS, 200, None, "acme"),
    ]
    assert 'ada flushes {"model":"small"}: 0 pages, 0 bytes' in caplog.text
    assert OPERATOR not in caplog.text
    assert CLIENT not in caplog.text
