"""Records and anchors that were altered where they lie: in LMDB's file, in the server's memory."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from prometheus_client import CollectorRegistry

from cache_store.backends.opening import open_backend
from cache_store.backends.protocol import AnchorPool, Limits
from cache_store.keys import PAGE, page_keys
from cache_store.metrics import StoreMetrics
from cache_store.namespace import Namespace
from cache_store.records import HEADER_BYTES, Kind, Record, encode
from cache_store.store import Store, scope_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from .redis_server import RedisServer

    Alter = Callable[[bytes], bytes]

NAMESPACE = Namespace("acme", "small", "r1", "tokenizer", "template")
TOKENS = list(range(3 * PAGE))
POOL = AnchorPool(scope_info(NAMESPACE), "agent-2")


class Stored:
    """A store whose bytes a test can alter where they lie."""

    def __init__(self, url: str) -> None:
        self.url, self.registry = url, CollectorRegistry()
        self.store = self._open()

    def _open(self) -> Store:
        return Store(open_backend(self.url, deadline_s=30), Limits(2**30, 2**30), StoreMetrics(self.registry))

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"crossfill_store_{name}", labels) or 0.0

    def alter(self, found: bytes, change: Alter) -> None:
        """Change these bytes, wherever the store has them, while nobody has it open."""
        self.store.close()
        places = self._in_file(found, change) if self.url.startswith("lmdb") else self._in_server(found, change)
        assert places >= 1
        self.registry = CollectorRegistry()
        self.store = self._open()

    def _in_file(self, found: bytes, change: Alter) -> int:
        path = Path(self.url.removeprefix("lmdb://")) / "data.mdb"
        data, changed = path.read_bytes(), change(found)
        # A file's bytes do not move up: what is cut off is lost, and something else stands there.
        path.write_bytes(data.replace(found, changed + b"\0" * (len(found) - len(changed))))
        return data.count(found)

    def _in_server(self, found: bytes, change: Alter) -> int:
        client, places = redis.Redis.from_url(self.url.partition("?")[0]), 0
        root = "{" + self.url.partition("name=")[2] + "}"
        for key in client.scan_iter(root + ":p:*"):
            data = client.get(key)
            if found in data:
                client.set(key, data.replace(found, change(found)))
                places += 1
        for key in client.scan_iter(root + ":a:*"):
            for field, data in client.hgetall(key).items():
                if data == found:
                    client.hset(key, field, change(found))
                    places += 1
        return places


@pytest.fixture(params=["lmdb", "redis"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Stored:
    if request.param == "lmdb":
        return Stored(f"lmdb://{tmp_path}/store")
    server: RedisServer = request.getfixturevalue("redis_server")
    return Stored(server.url(name=uuid.uuid4().hex))


def flip(data: bytes) -> bytes:
    at = HEADER_BYTES + 5
    return data[:at] + bytes([data[at] ^ 0x04]) + data[at + 1 :]


def cut(data: bytes) -> bytes:
    return data[: HEADER_BYTES + 7]


ALTERED = pytest.mark.parametrize("change", [flip, cut], ids=["a flipped byte", "cut off"])


def records_of(name_bytes: int = 500) -> dict[int, list[Record]]:
    made: dict[int, list[Record]] = {}
    for index, page in enumerate(page_keys(NAMESPACE.scope, TOKENS)):
        payloads = [(page.key + bytes([layer])) * (name_bytes // 17) for layer in range(2)]
        made[index] = [
            Record(Kind.MASS, layer, (len(payload),), "u1", page.tokens_digest, payload)
            for layer, payload in enumerate(payloads)
        ]
    return made


@ALTERED
def test_a_record_altered_where_it_lies_is_missing_counted_and_can_be_stored_again(
    stored: Stored, change: Alter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    records = records_of()
    stored.store.publish(NAMESPACE, TOKENS, records)
    pages = stored.store.match(NAMESPACE, TOKENS).pages
    wanted = [(page, "mass/1") for page in pages]
    assert stored.store.read(NAMESPACE, wanted) == [records[index][1] for index in range(3)]
    stored.alter(encode(records[1][1]), change)
    for _ in range(2):
        assert stored.store.read(NAMESPACE, wanted) == [records[0][1], None, records[2][1]]
        assert stored.store.match(NAMESPACE, TOKENS).pages_with("mass/1") == (0, 2)
    assert stored.store.stats().quarantined == 1
    if change is cut and stored.url.startswith("redis"):
        # The page is not as long as the index says, and goes as a whole.
        assert stored.store.match(NAMESPACE, TOKENS).pages_with("mass/0") == (0, 2)
        assert "altered since they were written" in caplog.text
    else:
        assert stored.counted("quarantined_records_total", fault="checksum") == 1
        assert "altered since it was written" in caplog.text
        assert stored.store.read(NAMESPACE, [(pages[1], "mass/0")]) == [records[1][0]]
    stored.store.publish(NAMESPACE, TOKENS, records)
    assert stored.store.read(NAMESPACE, wanted) == [records[index][1] for index in range(3)]
    stored.store.close()


@ALTERED
def test_an_anchor_altered_where_it_lies_is_missing_counted_logged_and_can_be_stored_again(
    stored: Stored, change: Alter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "crossfill.store")
    anchors = {
        name: Record(Kind.ANCHOR, 3, (100,), "f4", name.encode() * 32, name.encode() * 400) for name in ("a", "b", "c")
    }
    for name, record in anchors.items():
        stored.store.put_anchor(POOL, name, record)
    assert stored.store.anchors(POOL) == anchors
    stored.alter(encode(anchors["b"]), change)
    left = {name: record for name, record in anchors.items() if name != "b"}
    for _ in range(2):
        assert stored.store.anchors(POOL) == left
    refused = [stored.counted("quarantined_records_total", fault=fault) for fault in ("checksum", "truncated")]
    assert sum(refused) == 1
    assert stored.store.stats().quarantined == 1
    assert "anchor 'b' of slot 'agent-2' is not used" in caplog.text
    stored.store.put_anchor(POOL, "b", replace(anchors["b"], hops=2))
    assert stored.store.anchors(POOL)["b"] == replace(anchors["b"], hops=2)
    stored.store.close()
