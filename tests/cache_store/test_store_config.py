import logging

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from cache_store.backends.memory import MemoryBackend
from cache_store.backends.protocol import PageWrite
from cache_store.config import StoreSettings
from cache_store.errors import StoreUnavailableError
from cache_store.keys import PAGE, page_keys
from cache_store.metrics import StoreMetrics
from cache_store.namespace import Namespace
from cache_store.store import open_store


def test_the_defaults_are_an_embedded_store_whose_tenants_share_the_budget(tmp_path, monkeypatch):
    folder = tmp_path / "with space"
    folder.mkdir()
    monkeypatch.chdir(folder)
    settings = StoreSettings()
    open_store(settings, StoreMetrics(CollectorRegistry())).close()
    assert (folder / "var" / "store").is_dir()
    assert settings.limits.tenant_bytes == settings.limits.budget_bytes == settings.budget_bytes
    assert StoreSettings(tenant_bytes=2**21).limits.tenant_bytes == 2**21


def test_the_log_says_what_a_store_that_is_opened_holds(tmp_path, caplog):
    caplog.set_level(logging.INFO, "crossfill.store")
    settings = StoreSettings(url=f"lmdb://{tmp_path}/store", budget_bytes=2**21)
    for pages in (0, 3):
        store = open_store(settings, StoreMetrics(CollectorRegistry()))
        size_bytes = store.stats().size_bytes
        assert caplog.messages[-1] == f"the lmdb store holds {pages} pages, {size_bytes} of at most 2097152 bytes"
        namespace = Namespace("acme", "small", "r1", "tokenizer", "template")
        keys = page_keys(namespace.scope, range(3 * PAGE))
        store.write(namespace, [PageWrite(page.key, page.parent, page.tokens_digest, {}) for page in keys])
        store.close()
    assert size_bytes > 0


def test_a_store_that_does_not_answer_when_it_is_opened_is_closed_again(monkeypatch):
    closed = []

    def unavailable(_):
        raise StoreUnavailableError("away", "timeout")

    monkeypatch.setattr(MemoryBackend, "stats", unavailable)
    monkeypatch.setattr(MemoryBackend, "close", lambda _: closed.append(True))
    with pytest.raises(StoreUnavailableError):
        open_store(StoreSettings(url="memory://"), StoreMetrics(CollectorRegistry()))
    assert closed == [True]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"url": "mongodb://x"}, "begins with memory://, lmdb://"),
        ({"url": "var/store"}, "no store's URL"),
        ({"url": "lmdb://var/store"}, "lmdb:///absolute/path, with three slashes"),
        ({"url": "lmdb://"}, "lmdb:///absolute/path"),
        ({"url": "redis://host/x"}, "the number of a database"),
        ({"url": "redis://host?nam=x"}, "unknown option 'nam'; did you mean 'name'"),
        ({"budget_bytes": "4GB"}, "not a size: '4GB'"),
        ({"queue_bytes": "2048 GiB"}, "more than 1 TiB"),
        ({"budget_byte": 2**30}, "Extra inputs"),
        ({"budget_bytes": 2**21, "tenant_bytes": 2**22}, "more than budget_bytes"),
        ({"deadline_s": 0}, "greater than 0"),
        ({"deadline_s": float("inf")}, "finite"),
        ({"fetch_threads": 0}, "greater than or equal to 1"),
    ],
    ids=[
        *("scheme", "no scheme", "relative folder", "no folder", "database", "option", "unit", "large"),
        *("unknown key", "tenant", "deadline", "endless", "threads"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_is_wrong(wrong, said):
    with pytest.raises(ValidationError, match=said):
        StoreSettings(**wrong)


def test_sizes_may_have_units():
    settings = StoreSettings(budget_bytes="4 GiB", tenant_bytes="512MiB", queue_bytes=2**20)
    assert (settings.budget_bytes, settings.tenant_bytes, settings.queue_bytes) == (2**32, 2**29, 2**20)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2@host:1/0?name=x", "redis://:***@host:1/0?name=x"),
        ("rediss://me:hunter2@[::1]:1", "rediss://me:***@[::1]:1"),
        ("redis+cluster://:hunter2%40@host", "redis+cluster://:***@host"),
        ("redis://:hunter2@@host", "redis://:***@host"),
        ("redis://me@host", "redis://me@host"),
        ("lmdb:///data/a@b", "lmdb:///data/a@b"),
        ("memory://", "memory://"),
    ],
)
def test_a_password_is_kept_and_never_shown(url, shown):
    settings = StoreSettings(url=url)
    assert (settings.url, settings.shown_url) == (url, shown)
    assert "hunter2" not in repr(settings)
    assert StoreSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    "url",
    ["redis://:hunter2@host/x", "redis://:hunter2#@host", "redis://:hunter2@host:port", "mysql://:hunter2@host"],
)
def test_a_refused_url_is_not_repeated(url):
    with pytest.raises(ValidationError) as caught:
        StoreSettings(url=url)
    assert "hunter2" not in str(caught.value)
