"""Statistics and flushes of real stores that another process publishes to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from .conftest import OPERATOR, bearer

if TYPE_CHECKING:
    from pathlib import Path

FLUSH = "/admin/store/flush"
# Tenant, model and revision, and how many pages each gets.
NAMESPACES = {
    ("acme", "small", "r1"): 3,
    ("acme", "small", "r2"): 2,
    ("acme", "large", "r1"): 4,
    ("bolt", "small", "r1"): 1,
}


@pytest.fixture
async def filled(administered: Any) -> Any:
    for (tenant, model, revision), pages in NAMESPACES.items():
        administered.store.publish(tenant, model, revision, pages)
    return administered


def left(filled: Any) -> dict[tuple[str, str, str], int]:
    """What another process finds now, of namespaces of which it finds anything."""
    found = {named: filled.store.found(*named, pages) for named, pages in NAMESPACES.items()}
    return {named: pages for named, pages in found.items() if pages}


async def test_statistics_show_what_was_published(filled: Any) -> None:
    stats = await filled.stats()
    shown = {(one["tenant"], one["model"], one["revision"]): one for one in stats["namespaces"]}
    assert {named: one["pages"] for named, one in shown.items()} == NAMESPACES
    assert len({one["namespace"] for one in shown.values()}) == 4
    assert all(one["size_bytes"] > 0 for one in shown.values())
    assert stats["pages"] == 10
    assert stats["size_bytes"] >= sum(one["size_bytes"] for one in shown.values())
    assert (stats["budget_bytes"], stats["tenant_bytes"]) == (4 * 2**30, 4 * 2**30)
    assert (stats["leased_pages"], stats["quarantined"]) == (0, 0)
    assert filled.router.metric("crossfill_store_pages") == 10
    assert filled.router.metric("crossfill_store_bytes") == stats["size_bytes"]


@pytest.mark.parametrize(
    ("what", "gone"),
    [
        ({"model": "small"}, {("acme", "small", "r1"), ("acme", "small", "r2"), ("bolt", "small", "r1")}),
        ({"revision": "r1"}, {("acme", "small", "r1"), ("acme", "large", "r1"), ("bolt", "small", "r1")}),
        ({"tenant": "bolt"}, {("bolt", "small", "r1")}),
        ({"tenant": "acme", "model": "small", "revision": "r2"}, {("acme", "small", "r2")}),
        ({"tenant": "bolt", "model": "large"}, set()),
        ({"model": "smal"}, set()),
        ({"all": True}, set(NAMESPACES)),
    ],
    ids=["model", "revision", "tenant", "all three", "no such pair", "unknown model", "everything"],
)
async def test_a_flush_takes_what_fits_all_of_it_and_nothing_else(filled: Any, what: Any, gone: Any) -> None:
    assert left(filled) == NAMESPACES
    before = {one["revision"] + one["model"] + one["tenant"]: one for one in (await filled.stats())["namespaces"]}
    told = await filled.flush(**what)
    assert told["flushed"] == what
    assert told["pages"] == sum(NAMESPACES[named] for named in gone)
    assert told["size_bytes"] == sum(before[r + m + t]["size_bytes"] for t, m, r in gone)
    assert left(filled) == {named: pages for named, pages in NAMESPACES.items() if named not in gone}
    assert filled.router.metric("crossfill_store_flushed_pages_total") == told["pages"]
    after = (await filled.stats())["namespaces"]
    raised = {
        (one["tenant"], one["model"], one["revision"])
        for one in after
        if one["epoch"] > before[one["revision"] + one["model"] + one["tenant"]]["epoch"]
    }
    assert raised == gone


async def test_both_answers_name_the_store_without_its_password(
    fake: Any, start_router: Any, auth: Any, start_redis: Any
) -> None:
    secret = start_redis(requirepass="hunter2").url()
    for url, shown in ((secret, secret.replace("hunter2", "***")), ("memory://", "memory://")):
        router = await start_router({"small": [await fake()]}, auth=auth, store={"url": url})
        got = await router.client.get("/admin/store", headers=bearer(OPERATOR))
        flushed = await router.client.post(FLUSH, json={"all": True}, headers=bearer(OPERATOR))
        assert (got.status_code, flushed.status_code) == (200, 200), got.text
        assert got.json()["store"] == flushed.json()["store"] == shown


@pytest.mark.parametrize(("method", "path"), [("GET", "/admin/store"), ("POST", FLUSH)])
async def test_a_store_that_is_not_there_is_told_and_not_made(
    fake: Any, start_router: Any, auth: Any, open_beside: Any, tmp_path: Path, method: str, path: str
) -> None:
    url = f"lmdb://{tmp_path}/none/yet"
    router = await start_router({"small": [await fake()]}, auth=auth, store={"url": url, "deadline_s": 20})

    async def ask() -> Any:
        body = {"all": True} if method == "POST" else None
        return await router.client.request(method, path, json=body, headers=bearer(OPERATOR))

    response = await ask()
    assert response.status_code == 503
    assert f"there is none yet at {url}" in response.json()["error"]["message"]
    assert router.metric("crossfill_store_unavailable_total", operation="open", reason="absent") == 1
    assert not (tmp_path / "none").exists()
    # The control: once a worker has made it, it is found.
    open_beside(url).publish("acme", "small", "r1", 3)
    # Until then the pause after a failure is over.
    await router.until(lambda: router.app.state.services.store._clock() >= router.app.state.services.store._again_s)
    assert (await ask()).json()["pages"] == 3


async def test_what_is_published_after_a_flush_is_found(filled: Any) -> None:
    await filled.flush(model="small")
    filled.store.publish("acme", "small", "r1", 2)
    assert filled.store.found("acme", "small", "r1", 3) == 2
    assert (await filled.flush(model="small"))["pages"] == 2


async def test_a_flush_during_traffic_is_atomic(administered: Any) -> None:
    administered.store.begin_traffic()
    last = 0
    for _ in range(4):
        await administered.router.until(lambda last=last: administered.store.number() >= last + 5)
        before = administered.store.number()
        # The control: without a flush they are there.
        assert administered.store.older_found(before) >= before - last
        told = await administered.flush(model="small")
        assert told["pages"] >= 3 * (before - last)
        assert administered.store.older_found(before) == 0
        last = administered.store.number()
    assert administered.store.end_traffic() == "partly found 0"


async def test_flushes_at_once_count_each_page_once(filled: Any) -> None:
    told = await asyncio.gather(*(filled.flush(all=True) for _ in range(8)))
    assert sum(one["pages"] for one in told) == 10


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        (b"", None, "not valid JSON"),
        (b"nonsense", None, "not valid JSON"),
        (b"[]", None, "must be a JSON object"),
        (b"null", None, "must be a JSON object"),
        (b"{}", "all", "Say what to flush"),
        (b'{"modle": "small"}', "modle", "`modle` is unknown; a flush has `tenant`, `model`, `revision`, `all`."),
        (b'{"model": 1}', "model", "`model` must be a string of 1 to 200 printable characters."),
        (b'{"model": ""}', "model", "`model` must be a string"),
        (b'{"model": "a\\nb"}', "model", "`model` must be a string"),
        (b'{"model": ["small"]}', "model", "`model` must be a string"),
        (b'{"model": "small", "tenant": null}', "tenant", "`tenant` must be a string"),
        (b'{"all": 1}', "all", "`all` must be true, or left out."),
        (b'{"all": "true"}', "all", "`all` must be true"),
        (b'{"all": false, "model": "small"}', "all", "`all` must be true"),
        (b'{"all": null, "model": "small"}', "all", "`all` must be true"),
        (b'{"all": true, "model": "small"}', "all", "`all` goes without `model`"),
        (b'{"tenant": "acme", "tenant": "bolt"}', "tenant", "`tenant` is there twice; a flush takes each field once."),
        (b'{"all": true, "\\u0061ll": true}', "all", "`all` is there twice"),
    ],
)
async def test_a_body_that_is_not_clear_flushes_nothing(
    is_error_object: Any, fake: Any, start_router: Any, auth: Any, body: bytes, param: str | None, told: str
) -> None:
    router = await start_router({"small": [await fake()]}, auth=auth, store={"url": "memory://"})
    response = await router.client.post(FLUSH, content=body, headers=bearer(OPERATOR))
    assert response.status_code == 400
    assert is_error_object(response)
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert told in error["message"]
    # The store was not even opened.
    assert router.metric("crossfill_store_operation_seconds_count", operation="open") == 0
