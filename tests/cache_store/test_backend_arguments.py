"""What callers may not give is a ValueError, and leaves a store that works."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from cache_store.backends.lmdb import LmdbBackend
from cache_store.backends.memory import MemoryBackend
from cache_store.backends.protocol import AnchorPool, ScopeInfo

from .sample_pages import ROOMY, A, chain, key, page, put, there

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cache_store.backends.protocol import Backend

HALF = "\ud800"


@pytest.fixture(params=["memory", "lmdb"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    opened = MemoryBackend() if request.param == "memory" else LmdbBackend(tmp_path / "store", deadline_s=30)
    put(opened, chain(A, "a"))
    yield opened
    opened.close()


@pytest.mark.parametrize("ttl_s", [math.inf, -math.inf, math.nan, 1e12, -1.0])
def test_a_lease_of_no_sensible_time_is_refused(backend: Backend, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="a lease lasts"):
        backend.lease(A.scope, [key("a")], "reader", ttl_s)
    assert backend.stats().leased_pages == 0
    assert backend.lease(A.scope, [key("a")], "reader", 60) == 1
    assert backend.lease(A.scope, [key("a")], "reader", 10 * 365 * 86_400) == 1
    assert backend.lease(A.scope, [key("a")], "reader", 0) == 1


@pytest.mark.parametrize(
    "do",
    [
        lambda backend: backend.lease(A.scope, [key("a")], HALF, 1.0),
        lambda backend: backend.release(HALF),
        lambda backend: backend.publish(ScopeInfo(b"z" * 16, HALF, "m", "r"), [page("z", b"z" * 16)], ROOMY),
        lambda backend: backend.flush(tenant=HALF),
        lambda backend: backend.flush(model=HALF),
        lambda backend: backend.anchors(AnchorPool(A, HALF)),
        lambda backend: backend.put_anchor(AnchorPool(A, "slot"), HALF, b"x"),
        lambda backend: backend.put_anchor(AnchorPool(A, HALF), "anchor", b"x"),
        lambda backend: backend.quarantine_anchor(AnchorPool(A, HALF), "anchor"),
        lambda backend: backend.use_anchors(AnchorPool(A, "slot"), [HALF]),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(backend: Backend, do: Callable[[Backend], object]) -> None:
    with pytest.raises(ValueError, match="is no text"):
        do(backend)
    assert there(backend, A, "a") == ["a"]
    assert put(backend, chain(A, "b")).pages == 1
