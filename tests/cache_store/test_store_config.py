import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from cache_store.config import StoreSettings
from cache_store.metrics import StoreMetrics
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"url": "mongodb://x"}, "begins with memory://, lmdb://"),
        ({"url": "var/store"}, "no store's URL"),
        ({"budget_byte": 2**30}, "Extra inputs"),
        ({"budget_bytes": 2**21, "tenant_bytes": 2**22}, "more than budget_bytes"),
        ({"deadline_s": 0}, "greater than 0"),
        ({"deadline_s": float("inf")}, "finite"),
        ({"fetch_threads": 0}, "greater than or equal to 1"),
    ],
    ids=["scheme", "no scheme", "unknown key", "tenant", "deadline", "endless", "threads"],
)
def test_a_wrong_setting_is_refused_with_what_is_wrong(wrong, said):
    with pytest.raises(ValidationError, match=said):
        StoreSettings(**wrong)
