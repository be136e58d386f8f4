"""What a tenant asks for is the same work whether another tenant has it or nobody does, so time does not tell."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from cache_store.backends.lmdb import LmdbBackend
from cache_store.backends.memory import MemoryBackend
from cache_store.backends.protocol import Limits
from cache_store.backends.redis import RedisBackend
from cache_store.keys import PAGE, page_keys
from cache_store.metrics import StoreMetrics
from cache_store.namespace import Namespace
from cache_store.records import Kind, Record
from cache_store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from .redis_server import RedisServer

OURS = Namespace("acme", "small", "r1", "tokenizer", "template")
THEIRS = replace(OURS, tenant="bolt")
STORED, UNKNOWN = list(range(8 * PAGE)), [7] * (8 * PAGE)


def publish(store: Store, namespace: Namespace, tokens: list[int]) -> None:
    records = {
        index: [Record(Kind.MASS, 0, (1000,), "u1", page.tokens_digest, bytes(1000))]
        for index, page in enumerate(page_keys(namespace.scope, tokens))
    }
    store.publish(namespace, tokens, records)


def ask(store: Store, namespace: Namespace, tokens: list[int]) -> int:
    """All that a request does: look up, see what there is, read it; how many records it got."""
    found = store.match(namespace, tokens)
    assert found.size_bytes(["mass/0"]) >= 0
    return sum(record is not None for record in store.read(namespace, [(page, "mass/0") for page in found.pages]))


def ask_blindly(store: Store, namespace: Namespace, tokens: list[int]) -> int:
    """Read without looking up first, by the keys of the other tenant too, for whoever knows them."""
    known = [*page_keys(namespace.scope, tokens), *page_keys(OURS.scope, tokens)]
    return sum(record is not None for record in store.read(namespace, [(page, "mass/0") for page in known]))


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    backend = MemoryBackend() if request.param == "memory" else LmdbBackend(tmp_path / "store", deadline_s=30)
    return Store(backend, Limits(2**30, 2**30), StoreMetrics(CollectorRegistry()))


def steps(call: Callable[[], int]) -> tuple[int, Counter[str]]:
    """Result of a call, and how often each function was called within it, those written in C included."""
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counted[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            counted[getattr(argument, "__qualname__", repr(argument))] += 1

    before = sys.getprofile()
    # What is collected meanwhile would be work of something else.
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        result = call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return result, counted


@pytest.mark.parametrize("request_of", [ask, ask_blindly], ids=["looks up", "knows the keys"])
@pytest.mark.parametrize("known", [False, True], ids=["a new tenant", "one with pages of its own"])
def test_in_this_process_every_call_is_made_as_often(
    store: Store, known: bool, request_of: Callable[[Store, Namespace, list[int]], int]
) -> None:
    publish(store, OURS, STORED)
    if known:
        publish(store, THEIRS, [3] * len(STORED))
    # What is done once in a process is done.
    for tokens in (STORED, UNKNOWN):
        request_of(store, THEIRS, tokens)
    found, work = steps(lambda: request_of(store, THEIRS, STORED))
    nothing, of_nothing = steps(lambda: request_of(store, THEIRS, UNKNOWN))
    assert (found, nothing) == (0, 0)
    assert work == of_nothing
    assert work.total() > 50
    # The control: a hit is other work, and it is seen.
    own, of_own = steps(lambda: request_of(store, OURS, STORED))
    assert own >= 8
    assert of_own != work
    store.close()


def served(server: RedisServer, call: Callable[[], int]) -> tuple[int, dict[str, int], tuple[int, int]]:
    """Result of a call, the commands that the server did for it, and the bytes that went to it and came from it."""
    client = server.client()
    client.config_resetstat()
    before = client.info("stats")
    result = call()
    after = client.info("stats")
    commands = {name: about["calls"] for name, about in client.info("commandstats").items()}
    moved = [after[f"total_net_{way}_bytes"] - before[f"total_net_{way}_bytes"] for way in ("input", "output")]
    return result, commands, (moved[0], moved[1])


@pytest.mark.parametrize("request_of", [ask, ask_blindly], ids=["looks up", "knows the keys"])
@pytest.mark.parametrize("known", [False, True], ids=["a new tenant", "one with pages of its own"])
def test_a_redis_server_does_the_same_commands_for_the_same_bytes(
    start_redis: Callable[..., RedisServer],
    known: bool,
    request_of: Callable[[Store, Namespace, list[int]], int],
) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=30)
    store = Store(backend, Limits(2**30, 2**30), StoreMetrics(CollectorRegistry()))
    publish(store, OURS, STORED)
    if known:
        publish(store, THEIRS, [3] * len(STORED))
    for tokens in (STORED, UNKNOWN):
        request_of(store, THEIRS, tokens)
    found, work, moved = served(server, lambda: request_of(store, THEIRS, STORED))
    nothing, of_nothing, moved_nothing = served(server, lambda: request_of(store, THEIRS, UNKNOWN))
    assert (found, nothing) == (0, 0)
    assert (work, moved[0]) == (of_nothing, moved_nothing[0])
    # The numbers in the server's own report may have a digit more.
    assert abs(moved[1] - moved_nothing[1]) < 64
    assert sum(work.values()) > 3
    own, of_own, moved_own = served(server, lambda: request_of(store, OURS, STORED))
    assert own >= 8
    assert of_own != work
    assert moved_own[1] > moved[1] + 4000
    store.close()
