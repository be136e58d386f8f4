"""Several router processes with one store: each opens its own, and their numbers are one."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx

from ..server.test_processes import launch, router_file, scrape
from .conftest import OPERATOR, bearer

if TYPE_CHECKING:
    from pathlib import Path

HEADERS = bearer(OPERATOR)


def counted(scraped: dict[str, float], operation: str) -> float:
    return scraped.get(f'crossfill_store_operation_seconds_count{{operation="{operation}"}}', 0.0)


async def test_metrics_of_the_store_are_the_sums_of_all_processes(
    fake: Any, tmp_path: Path, store_url: str, auth: Any, open_beside: Any
) -> None:
    beside = open_beside(store_url)
    file = router_file(tmp_path, [(await fake()).url], processes=2)
    config = json.loads(file.read_text()) | {
        "auth": {"admin_keys_file": str(auth["admin_keys_file"])},
        "store": {"url": store_url, "budget_bytes": "1 GiB", "deadline_s": 20},
    }
    file.write_text(json.dumps(config))
    async with launch(tmp_path, file) as service:
        await service.read_log(lambda: bool(service.url) and service.healthy() == 2)
        asked = flushed = 0
        async with asyncio.timeout(60):
            # A connection for each call, until both processes have had some.
            while counted(await scrape(service.url), "open") < 2:
                beside.publish("acme", "small", f"r{asked}", 2)
                async with httpx.AsyncClient(base_url=service.url, headers=HEADERS, timeout=30) as client:
                    stats = (await client.get("/admin/store")).json()
                async with httpx.AsyncClient(base_url=service.url, headers=HEADERS, timeout=30) as client:
                    done = (await client.post("/admin/store/flush", json={"model": "small"})).json()
                assert (stats["pages"], stats["budget_bytes"], done["pages"]) == (2, 2**30, 2)
                asked, flushed = asked + 1, flushed + done["pages"]
        scraped = await scrape(service.url)
        assert (counted(scraped, "open"), counted(scraped, "stats"), counted(scraped, "flush")) == (2, asked, asked)
        assert scraped["crossfill_store_flushed_pages_total"] == flushed
        # The gauge is what was seen last, by whichever process, and no sum.
        assert scraped["crossfill_store_pages"] == 2
